/* emulate.h: what a right kernel computes, with its roundings.
 *
 * A kernel multiplies numbers of q's dtype, rounds P and dS to that dtype and sums in float32, tile by tile. Its
 * result differs from the exact one by what these roundings make. An emulation says how much that is on this very
 * problem. */
#ifndef JUDGE_EMULATE_H
#define JUDGE_EMULATE_H

#include "kernels/judge/compute.h"

/* How a kernel goes about it; all are right. */
struct emulation {
    int64_t tile;          /* keys of a tile */
    bool backwards;        /* from the last tile to the first */
    bool normalized_first; /* P is divided by its sum before it is rounded */
};

/* Computes as compute_rows() and compute_gradients() do, with roundings: out, lse, dq of the tile, and dK, dV and
 * sums. `scratch` is of emulate_floats() numbers. Call compute_keys() with the right variation before. */
int64_t emulate_floats(const struct compute *c);
void emulate_keys(const struct compute *c, float *scratch);
void emulate_rows(struct compute *c, const struct emulation *e, const variation *v, const struct compute_rows *rows,
                  float *scratch);
void emulate_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums, float *scratch);
/* Numbers of dK and dV are rounded to the dtype of the caller's tensor when the head is complete. */
void emulate_round(attn_dtype dtype, double *x, int64_t count);

#endif
