/* compute.h: attention in float64, a tile of query rows at a time, as a variation says.
 *
 *   for each head: compute_keys()               K and V of a key/value head
 *     for each tile: compute_rows()             out and lse of its rows
 *                    compute_gradients()        then dq of these rows, and what they add to dk, dv and the sums
 *
 * A struct compute is the memory of one thread. */
#ifndef JUDGE_COMPUTE_H
#define JUDGE_COMPUTE_H

#include "kernels/judge/products.h"
#include "kernels/judge/variation.h"

/* Packed sequences of more keys than this are not computed as one. */
enum { COMPUTE_MIXED_KEYS = 16384 };

/* A tile of queries of one head. */
struct compute_rows {
    int64_t b, h;         /* sequence and query head */
    int64_t first, count; /* inside the sequence; rows from its length on do not exist */
};

/* Gradients that are sums over everything they are broadcast over; NULL where not wanted. As the tensors. */
struct compute_sums {
    double *dbias, *dsinks, *dslopes;
};

struct compute {
    const struct products *products;
    const attn_problem *p;
    int64_t tile;        /* most rows of a tile */
    int64_t most_keys;   /* of a sequence under any variation */
    int64_t D, Dv, keys; /* D, Dv and most_keys rounded up to PRODUCTS_WIDTH: lengths of rows */
    void *memory;

    /* Of a key/value head. */
    bool has_keys, strange; /* strange: a number is not finite, so what is hidden must not be multiplied */
    int64_t b, hk;
    attn_sequence s;
    int64_t shift;           /* of places: see padding_kept */
    double *KT, *V, *K, *VT; /* [D, keys], [most_keys, Dv], and for gradients [most_keys, D], [Dv, keys] */
    double *dK, *dV;         /* [most_keys, D], [most_keys, Dv] */

    /* Of a tile: [tile, keys] */
    double *z, *P, *M, *slope,
        *dP;                /* scores (-inf: hidden), weights of V, dropout's factors, derivatives, dP then dS */
    double *Q, *dO;         /* [tile, D], [tile, Dv] */
    double *out, *lse, *dq; /* [tile, Dv], [tile], [tile, D] */
    double *top, *rest;     /* [tile]: lse in two parts */
    double *delta;          /* [tile] */
};

/* Bytes that compute_open() takes. */
int64_t compute_bytes(const attn_problem *p, int64_t tile);
/* False: there is no memory. `p` is borrowed. */
bool compute_open(struct compute *c, const attn_problem *p, int64_t tile);
void compute_close(struct compute *c);

/* Takes the keys and values of head hk of sequence b. Clears dK and dV in a backward. */
void compute_keys(struct compute *c, const variation *v, int64_t b, int64_t hk);
/* Fills out, lse, top and rest of the tile, whose head reads the keys that compute_keys() took. */
void compute_rows(struct compute *c, const variation *v, const struct compute_rows *rows);
/* Fills dq, and adds to dK, dV and sums. Call it after compute_rows() of the same tile. */
void compute_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums);

/* The steps of these, for emulate.c. compute_scores() hides and scores the products in row `r` of z, for query i
 * of head h. compute_dropout() says what dropout multiplies a row's probabilities by; false: by 1.
 * compute_row_gradients() makes P what dv takes, and dP what dq and dk take. */
void compute_load_queries(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_scores(struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, int64_t r);
bool compute_dropout(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, double *M);
void compute_load_gradients(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_row_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const struct compute_sums *sums, int64_t r);
double compute_sink(const variation *v, int64_t h); /* -inf: none */
double compute_rounded(attn_dtype dtype, double x);

#endif
