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

/* If the keys of all packed sequences together are more than this, no variation mixes the sequences. */
enum { COMPUTE_MIXED_KEYS = 16384 };

/* A tile of queries of one head. */
struct compute_rows {
    int64_t b, h;         /* sequence and query head */
    int64_t first, count; /* rows of the sequence; rows from the sequence's length on do not exist */
};

/* Gradients of broadcast tensors, which are sums over the broadcast axes. Each has the shape of its tensor; NULL: not
 * wanted. */
struct compute_sums {
    double *dbias, *dsinks, *dslopes;
};

struct compute {
    const struct products *products;
    const attn_problem *p;
    int64_t tile;        /* the most rows that a tile may have */
    int64_t most_keys;   /* the most keys that a row can see under any variation */
    int64_t D, Dv, keys; /* D, Dv and most_keys rounded up to PRODUCTS_WIDTH: lengths of rows */
    void *memory;

    /* The members from here to dV belong to one key/value head. */
    bool has_keys, strange; /* strange: some input is NaN or infinite, so products must skip hidden pairs */
    int64_t b, hk;
    attn_sequence s;
    int64_t shift; /* with padding_kept: true length of the keys minus s.Sk, which is added to a query's place */
    double *KT, *V, *K, *VT; /* [D, keys], [most_keys, Dv], and for gradients [most_keys, D], [Dv, keys] */
    double *dK, *dV;         /* [most_keys, D], [most_keys, Dv] */

    /* The members from here on belong to one tile. Each of the next five is [tile, keys]. */
    double *z, *P, *M, *slope,
        *dP; /* scores (-inf: hidden); weights of V; dropout's factors; derivatives of softcap; dP, which becomes dS */
    double *Q, *dO;         /* [tile, D], [tile, Dv] */
    double *out, *lse, *dq; /* [tile, Dv], [tile], [tile, D] */
    double *top, *rest;     /* [tile]: lse is top + rest; top is the largest score */
    double *delta;          /* [tile] */
    bool in_float;          /* compute_row_gradients() rounds to float32 after each step, for emulate.c */
};

/* Returns the bytes of memory that compute_open() allocates. */
int64_t compute_bytes(const attn_problem *p, int64_t tile);
/* Allocates the memory. Returns false if there is none. `p` is borrowed until compute_close(). */
bool compute_open(struct compute *c, const attn_problem *p, int64_t tile);
void compute_close(struct compute *c);

/* Loads the keys and values of head hk of sequence b. In a backward it also sets dK and dV to 0. */
void compute_keys(struct compute *c, const variation *v, int64_t b, int64_t hk);
/* Computes out, lse, top and rest of a tile. The tile's head must read the keys that compute_keys() loaded. */
void compute_rows(struct compute *c, const variation *v, const struct compute_rows *rows);
/* Computes dq of a tile, and adds the tile's part to dK, dV and sums. Call it after compute_rows() of the same tile. */
void compute_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                       const struct compute_sums *sums);

/* Steps of compute_rows() and compute_gradients(), for emulate.c. compute_scores() turns row `r` of z from products
 * into the scores of query i of head h, -inf where hidden. compute_dropout() sets M to dropout's factors of a row; it
 * returns false where all are 1. compute_row_gradients() turns P into the weights that dv takes, and dP into dS. */
void compute_load_queries(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_scores(struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, int64_t r);
bool compute_dropout(const struct compute *c, const variation *v, int64_t b, int64_t h, int64_t i, double *M);
void compute_load_gradients(struct compute *c, const variation *v, const struct compute_rows *rows);
void compute_row_gradients(struct compute *c, const variation *v, const struct compute_rows *rows,
                           const struct compute_sums *sums, int64_t r);
double compute_sink(const variation *v, int64_t h); /* -inf: there is no sink */
/* Rounds x to the nearest number of the dtype. */
double compute_rounded(attn_dtype dtype, double x);
/* Rounds x towards 0 to a number with as many bits as the dtype has. */
double compute_cut(attn_dtype dtype, double x);

#endif
