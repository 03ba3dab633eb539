/* judge_internal.h: what the files of the judge share.
 *
 *   frame.c    tiles of a problem, where the caller's numbers are, differences
 *   judge.c    the order of the work, verdict and explanations
 *   where.c    the worst elements, and where the wrong ones are */
#ifndef JUDGE_INTERNAL_H
#define JUDGE_INTERNAL_H

#include "kernels/judge/compute.h"
#include "kernels/judge/judge.h"

/* A tile of queries of the n-th query head of key/value head hk. */
struct tile {
    int64_t b, hk, n, first, count;
    int64_t row, line; /* positions of its first query row and its sequence's first key in arrays of a truth */
};

/* Where element (b, h, row, column) of a caller's tensor is. */
struct reading {
    const void *data; /* NULL: not given */
    attn_dtype dtype;
    int64_t batch, head, row, column;
};

/* A problem cut into tiles. Tiles of a key/value head follow each other, then those of the other sequences with
 * the same head. */
struct frame {
    attn_problem p;
    attn_geometry g;
    struct tile *tiles;
    int64_t count, rows, lines; /* tiles; query rows of all heads and keys of all heads that are kept */
    int64_t all_rows;           /* of the whole problem */
    int64_t *row_of_head;       /* [B, H]: number of the first row of a head that is kept whole; -1: it is not */
    bool whole;                 /* all tiles of the problem are in it */
    struct reading reading[ATTN_TENSOR_COUNT][2]; /* as it should be, and in the other layout */
    struct compute c;
    float *scratch; /* of emulations */
};

/* Differences of a tensor. Those between a number and what is not one are counted apart. */
struct difference {
    double most, sum, squares, bad_square; /* bad_square: what stands for the square of one that is counted apart */
    int64_t count, bad;
};

/* Exact results of the tiles of a frame, by row and line; sums as their tensors. */
struct truth {
    double *out, *lse, *dq, *dk, *dv;
    double *dbias, *dsinks, *dslopes;
};

enum { FRAME_ROW_TENSORS = 3, FRAME_TENSORS = 8 };
/* The results by kind: those by row, those by key, sums. */
extern const attn_tensor_id frame_tensors[FRAME_TENSORS];

/* Cuts the problem into tiles: all, or about `share` of them, edges first. False: no memory. */
bool frame_open(struct frame *f, const attn_problem *p, const attn_tensor *results, double share);
void frame_close(struct frame *f);
int64_t frame_bytes(const attn_problem *p, double share);
int64_t frame_tile_rows(const attn_problem *p);
/* Elements of a result of the problem, by its shape as it should be; 0: the problem has no such result. */
int64_t frame_elements(const attn_problem *p, attn_tensor_id id);

double frame_got(const struct frame *f, attn_tensor_id id, bool swapped, int64_t b, int64_t h, int64_t row,
                 int64_t column, int64_t *at);
/* First row of the sequence in the tensors of queries, and of keys. */
int64_t frame_first_row(const struct frame *f, int64_t b);
int64_t frame_first_key(const struct frame *f, int64_t b);
int64_t frame_key_room(const struct frame *f, int64_t b);
/* Columns, and the row's or line's numbers of a tensor in a truth. NULL: a sum. */
double *frame_kept(const struct truth *t, attn_tensor_id id);
int64_t frame_columns(const struct frame *f, attn_tensor_id id);

void difference_add(struct difference *d, double got, double want);

/* where.c */
void where_find(const struct frame *f, const struct truth *t, const attn_tensor *results, uint64_t given,
                judge_result *result);

#endif
