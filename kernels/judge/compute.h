/* compute.h: attention in float64, a tile of query rows at a time, as defined or with a mistake (variation.h).
 *
 *   for each head: compute_keys()               loads K and V of a key/value head
 *     for each tile: compute_rows()             computes out and lse of the tile's rows
 *                    compute_gradients()        computes dq of these rows, and adds to dk, dv and compute_sums
 *
 * dk and dv of a few keys take less work if out and lse of all rows are known:
 *
 *   for each head: compute_keys()               loads K and V; then the caller sets `lo` and `hi` to the few keys
 *     for each tile: compute_tile_scores()      computes the scores of these keys; then the caller stores out and lse
 *                    compute_gradients()        adds the tile's part to dk and dv of these keys
 *
 * A struct compute is used by one thread at a time. */
#ifndef JUDGE_COMPUTE_H
#define JUDGE_COMPUTE_H

#include "kernels/judge/products.h"
#include "kernels/judge/variation.h"

/* If packed sequences together have more keys than this, the judge (which checks a caller's results) does not test
 * mistakes that mix sequences. */
enum { COMPUTE_MIXED_KEYS = 16384 };

/* A tile: consecutive queries of one head of one sequence, which are computed together. */
struct compute_rows {
    int64_t b, h;
    int64_t first, count; /* the tile has `count` rows of the sequence, from row `first` on; rows past the sequence's
                           * length do not exist */
};

/* Gradients that are sums over rows: dbias, dsinks and dslopes. Each array has the shape of its tensor; NULL: the
 * gradient is not wanted. */
struct compute_sums {
    double *dbias, *dsinks, *dslopes;
};

struct compute {
    const struct products *products;
    const attn_problem *p;
    int64_t tile;        /* the largest number of query rows in a tile */
    int64_t most_keys;   /* the largest number of keys that a row can see with any of the mistakes */
    int64_t D, Dv, keys; /* lengths of rows in memory, in doubles: D, Dv and most_keys, each rounded up to a multiple of
                          * PRODUCTS_WIDTH */
    void *memory;

    /* The members from has_keys to dV describe the loaded key/value head. */
    bool has_keys, strange; /* strange: whether an input is NaN or infinite, so that products must skip hidden pairs */
    int64_t b, hk;
    attn_sequence s;
    /* Scores and gradients are computed only for keys `lo` to `hi` - 1. compute_keys() sets this range to all keys of
     * the sequence. The caller may then set a smaller range, in which `lo` must be a multiple of PRODUCTS_WIDTH. */
    int64_t lo, hi;
    /* With variation.padding_kept (the mistake of attending to padding keys), s.Sk includes padding. `shift`, which
     * causal and window add to a query's index, is the true number of keys minus s.Sk. */
    int64_t shift;
    /* keys and values of the head: KT [D, keys] (K transposed) and V [most_keys, Dv]; for gradients also K [most_keys,
     * D] and VT [Dv, keys] (V transposed) */
    double *KT, *V, *K, *VT;
    double *dK, *dV; /* gradients of keys and values: dK [most_keys, D], dV [most_keys, Dv] */

    /* The members from here to `rest` belong to one tile of queries. The next five arrays have the shape [tile, keys]:
     * z (scores; -inf: hidden), P (softmax weights), M (factors of dropout), slope (derivatives of softcap), and dP,
     * which is later overwritten by dS. */
    double *z, *P, *M, *slope, *dP;
    double *Q, *dO;         /* the tile's rows of q [tile, D] and of dout [tile, Dv] */
    double *out, *lse, *dq; /* results of the tile's rows: out [tile, Dv], lse [tile], dq [tile, D] */
    double *top, *rest;     /* `top` is the largest score of each row of the tile, and `rest` is lse - top */
    double *delta;          /* [tile] */
    /* whether compute_row_gradients() rounds to float32 after each step, as emulated kernels do (emulate.c) */
    bool in_float;
};

int64_t compute_bytes(const attn_problem *p, int64_t tile);
/* Allocates the memory for tiles of `tile` rows. Returns false if there is not enough memory. `c` borrows `p` until
 * compute_close(). */
bool compute_open(struct compute *c, const attn_problem *p, int64_t tile);
void compute_close(struct compute *c);

/* Loads the keys and values of head hk of sequence b. In a backward it also sets dK and dV to 0. */
void compute_keys(struct compute *c, const variation *v, int64_t b, int64_t hk);
/* Computes out and lse of a tile of queries, and for each row `top` (the largest score) and `rest` (lse - top). Before
 * this call, compute_keys() must have loaded the keys that the tile's query head reads. */
void compute_rows(struct compute *c, const variation *v, const struct compute_rows *rows);
enum compute_wanted { COMPUTE_DQ = 1, COMPUTE_DK_DV = 2, COMPUTE_ALL = 3 };
/* Computes dq of a tile, and adds the tile's contributions to dK, dV and `sums`. Call it after compute_rows() of the
 * same tile, because it reads the tile's scores, out, top and rest. dq is correct only if scores of all keys were
 * computed. */
void compute_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums, enum compute_wanted wanted);
/* Computes the scores z of a tile's rows with the keys `lo` to `hi` - 1, and the factors M by which dropout multiplies
 * P. */
void compute_tile_scores(struct compute *c, const variation *v, const struct compute_rows *rows);
/* Returns whether causal and window let some row of the tile see some of the keys `lo` to `hi` - 1. */
bool compute_sees(const struct compute *c, const variation *v, const struct compute_rows *rows);

/* These functions are steps of compute_rows() and compute_gradients(), and emulate.c calls them too. compute_scores()
 * turns row `r` of the array z from products q.k into the scores of query i of head h; hidden scores become -inf.
 * compute_dropout() sets the array M to the factors of dropout for a row; without dropout they are 1.
 * compute_row_gradients() turns the weights P of a row into the weights after dropout, and dP into dS. */
void compute_load_queries(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_scores(struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, int64_t r);
void compute_dropout(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, double *M);
void compute_load_gradients(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_row_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const struct compute_sums *sums, int64_t r);
double compute_sink(const variation *v, int64_t h); /* returns the sink of head h; -inf: there is no sink */
double compute_rounded(attn_dtype dtype, double x);
/* Rounds x towards 0 to a number with as many mantissa bits as the dtype has. */
double compute_cut(attn_dtype dtype, double x);

#endif
