/* emulate.h: what a correct kernel computes, with its roundings.
 *
 * A kernel multiplies numbers of q's dtype, rounds P and dS to that dtype and sums in float32, tile by tile. These
 * roundings make its results differ from the exact ones. An emulation computes the judged problem with the same
 * roundings, so its differences from the exact results are errors that a correct kernel may have. */
#ifndef JUDGE_EMULATE_H
#define JUDGE_EMULATE_H

#include "kernels/judge/compute.h"

/* How an emulated kernel orders and rounds its work. Correct kernels may differ in these points. */
struct emulation {
    int64_t tile;          /* number of keys in a tile */
    bool backwards;        /* whether the kernel goes from the last tile of keys to the first */
    bool normalized_first; /* whether the kernel divides P by the row's sum before it rounds P */
    /* whether the kernel adds the attention sink to a row's maximum and sum after the last tile of keys (true) or
     * before the first (false) */
    bool sink_last;
};

/* emulate_rows(), emulate_tile_scores() and emulate_gradients() do the work of the functions compute_rows(),
 * compute_tile_scores() and compute_gradients(), with the roundings of a kernel. `scratch` has emulate_floats() floats.
 * Before these functions, call compute_keys() with the variation that has no mistake, and then emulate_keys(). */
int64_t emulate_floats(const struct compute *c);
void emulate_keys(const struct compute *c, float *scratch);
void emulate_rows(struct compute *c, const struct emulation *e, const variation *v, const struct compute_rows *rows,
                  float *scratch);
void emulate_tile_scores(struct compute *c, const variation *v, const struct compute_rows *rows, float *scratch);
void emulate_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums, enum compute_wanted wanted, float *scratch);
/* Rounds out and lse of a tile to the dtypes in which a kernel stores them. Call this function between
 * emulate_tile_scores() and emulate_gradients(), if out and lse come from the truth (float64 results) and not from
 * emulate_rows(). */
void emulate_round_rows(struct compute *c, int64_t count);
/* Rounds `count` numbers of x to the dtype. Call this function for dK and dV after the last tile of a head, with the
 * dtype of the caller's dk and dv. */
void emulate_round(attn_dtype dtype, double *x, int64_t count);

#endif
