/* frame.h: a problem cut into tiles, places of the caller's numbers, and differences between numbers. */
#ifndef JUDGE_FRAME_H
#define JUDGE_FRAME_H

#include "kernels/judge/compute.h"
#include "kernels/judge/judge.h"

/* A tile of queries of the n-th query head of key/value head hk. */
struct tile {
    int64_t b, hk, n, first, count;
    int64_t row, line; /* where arrays of struct truth have its first query row, and its sequence's first key */
};

/* Where element (b, h, row, column) of a caller's tensor is. */
struct reading {
    const void *data; /* NULL: the caller did not give the tensor */
    attn_dtype dtype;
    int64_t batch, head, row, column;
};

/* A problem cut into tiles. The tiles of a key/value head follow each other, sequence by sequence. */
struct frame {
    attn_problem p;
    attn_geometry g;
    struct tile *tiles;
    int64_t count, rows,
        lines;            /* numbers of tiles, and of query rows and keys of all heads in arrays of struct truth */
    int64_t all_rows;     /* number of query rows of the whole problem, all heads together */
    int64_t *row_of_head; /* [B, H]: where struct truth has the head's first row; -1: its first tile is not chosen */
    bool whole;           /* all tiles of the problem were chosen */
    struct reading reading[ATTN_TENSOR_COUNT]
                          [2]; /* [0]: in the problem's layout; [1]: in the other layout, heads and rows exchanged */
    struct compute c;
    float *scratch; /* memory for emulations */
};

/* The differences between a tensor's numbers and the wanted ones. A difference where only one of the two is finite
 * counts in `bad`. */
struct difference {
    double most, sum, squares, bad_square; /* bad_square: the square that stands for each difference in `bad` */
    int64_t count, bad;
};

/* The exact results of a frame: out, lse and dq by row, dk and dv by line (a key), the others with their tensors'
 * shapes. */
struct truth {
    double *out, *lse, *dq, *dk, *dv;
    double *dbias, *dsinks, *dslopes;
};

/* The results, as indices of arrays [FRAME_TENSORS]: out, lse and dq, which have a row for each query; from
 * FRAME_ROW_TENSORS on dk and dv, which have a row for each key; from FRAME_KEY_TENSORS on dbias, dsinks and
 * dalibi_slopes, which are sums over rows. */
enum { FRAME_ROW_TENSORS = 3, FRAME_KEY_TENSORS = 5, FRAME_TENSORS = 8 };
extern const attn_tensor_id frame_tensors[FRAME_TENSORS];

/* Cuts the problem into tiles and chooses all of them, or about `share` of them. False: there is no memory. */
bool frame_open(struct frame *f, const attn_problem *p, const attn_tensor *results, double share);
void frame_close(struct frame *f);
/* Returns the bytes that a frame and its truth take for about `share` of the tiles. */
int64_t frame_bytes(const attn_problem *p, double share);
/* Returns the most query rows of a tile: as many as fit in a fixed amount of memory for scores. */
int64_t frame_tile_rows(const attn_problem *p);
/* Returns the number of elements that result `id` should have. 0: the problem has no such result. */
int64_t frame_elements(const attn_problem *p, attn_tensor_id id);
/* Returns the number of multiply-adds that the truth of all rows takes. */
double frame_multiply_adds(const attn_problem *p);

/* Returns an element of the caller's result `id`, and its place in *at. `row` counts from the start of the tensor.
 * swapped: the tensor is read in the other layout. */
double frame_got(const struct frame *f, attn_tensor_id id, bool swapped, int64_t b, int64_t h, int64_t row,
                 int64_t column, int64_t *at);
/* Return the row at which sequence b begins in tensors of queries, the row at which it begins in tensors of keys, and
 * the number of rows that it has room for in tensors of keys. */
int64_t frame_first_row(const struct frame *f, int64_t b);
int64_t frame_first_key(const struct frame *f, int64_t b);
int64_t frame_key_room(const struct frame *f, int64_t b);
/* frame_kept() returns a truth's numbers of a tensor; NULL: the truth has no memory for it. frame_columns() returns the
 * columns of a row; it is 1 for lse and for sums. */
double *frame_kept(const struct truth *t, attn_tensor_id id);
int64_t frame_columns(const struct frame *f, attn_tensor_id id);

/* Adds the difference of one number from the wanted one. Two NaN, or two equal infinities, do not differ. */
void difference_add(struct difference *d, double got, double want);
/* difference_worst() returns the largest difference, which is infinite if any counts in `bad`. difference_mean()
 * returns the mean over all compared numbers; those in `bad` add nothing to its sum. */
double difference_worst(const struct difference *d);
double difference_mean(const struct difference *d);

#endif
