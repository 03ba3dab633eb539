/* frame.h: cuts a problem into tiles (a frame), finds the caller's numbers for each tile, and measures how far numbers
 * are from the truth (float64 results). */
#ifndef JUDGE_FRAME_H
#define JUDGE_FRAME_H

#include "kernels/judge/compute.h"
#include "kernels/judge/judge.h"

/* A tile of queries: consecutive queries of one query head in sequence b. The head is the n-th of the query heads that
 * read key/value head hk. */
struct tile {
    int64_t b, hk, n, first, count;
    /* indices in the arrays of struct truth (float64 results): `row` is the index of the tile's first query row, `line`
     * is the index of the first key of the tile's sequence */
    int64_t row, line;
    int64_t keys; /* index in `key_tiles` of the first tile of keys for the tile's sequence and key/value head */
};

/* A tile of keys: consecutive keys of key/value head hk, in sequence b, padding keys included. Only a backward has
 * tiles of keys. */
struct key_tile {
    int64_t b, hk, first, count;
    int64_t line; /* index of the tile's first key in the arrays of struct truth (float64 results) */
    /* the tiles of queries that read these keys: `tile` is the index of the first one in frame.tiles, and `tiles` is
     * their number (0: the sequence has no queries) */
    int64_t tile, tiles;
};

/* Address and strides of a caller's tensor: the element in row i and column j of head h of batch row b has the index b
 * * batch + h * head + i * row + j * column. */
struct reading {
    const void *data; /* address of the caller's tensor; NULL: the caller did not give the tensor */
    attn_dtype dtype;
    int64_t batch, head, row, column;
};

/* A problem cut into tiles of query rows. The tiles of a key/value head follow each other, sequence by sequence. */
struct frame {
    attn_problem p;
    attn_geometry g;
    struct tile *tiles;
    /* array of key_count tiles of keys. Tiles of queries read the first read_count of them, in the order of `tiles`;
     * the others belong to sequences without queries. */
    struct key_tile *key_tiles;
    int64_t key_count, read_count;
    /* count: number of tiles of queries; rows, lines: number of query rows and of keys, of all heads, in the arrays of
     * struct truth */
    int64_t count, rows, lines;
    /* whether the arrays of struct truth (float64 results) come from a device and have the order of attn_truth
     * (kernels/attention.h); if not, the judge computes them, tile after tile */
    bool as_device;
    int64_t all_rows; /* number of query rows of the whole problem, summed over all heads */
    /* [B, H]: for each batch row and head, the index of its first query row in the arrays of struct truth (float64
     * results); -1: the head's first tile was not chosen for the check */
    int64_t *row_of_head;
    bool whole; /* whether all tiles of the problem were chosen for the check */
    /* reading[id][0] reads the caller's tensor `id` in the problem's layout (bshd or bhsd), reading[id][1] in the
     * layout with heads and rows exchanged */
    struct reading reading[ATTN_TENSOR_COUNT][2];
    struct compute c;
    float *scratch; /* working memory of emulate.c, which imitates the roundings of kernels */
};

/* Sums over the differences between a tensor's numbers and the correct ones. Where exactly one of the two numbers is
 * finite, the difference counts only in `bad`. */
struct difference {
    double most, sum, squares;
    int64_t count, bad;
};

/* The exact results (float64) of a frame (a problem cut into tiles). out, lse and dq have a row for each query. dk and
 * dv have a row (a "line") for each key. dbias, dsinks and dslopes are sums over rows, in their tensors' shapes. */
struct truth {
    double *out, *lse, *dq, *dk, *dv;
    double *dbias, *dsinks, *dslopes;
};

/* An array [FRAME_TENSORS] has one entry for each result. First come out, lse and dq (indices below FRAME_ROW_TENSORS),
 * which have a row for each query. Then come dk and dv (indices below FRAME_KEY_TENSORS), which have a row for each
 * key. The last are dbias, dsinks and dalibi_slopes, which are sums over rows. */
enum { FRAME_ROW_TENSORS = 3, FRAME_KEY_TENSORS = 5, FRAME_TENSORS = 8 };
extern const attn_tensor_id frame_tensors[FRAME_TENSORS];

/* Cuts the problem into tiles and chooses a fraction of about `share` of them for the check (1: all tiles).
 * `as_device`: true if the rows of struct truth (float64 results) have the order of attn_truth (kernels/attention.h);
 * `share` must then be 1. Returns false if memory runs out. */
bool frame_open(struct frame *f, const attn_problem *p, const attn_tensor *results, double share, bool as_device);
void frame_close(struct frame *f);
/* Returns the bytes of memory that frame_open() takes for about `share` of the tiles. If `with_truth` is true, memory
 * for the truth (float64 results) is included. */
int64_t frame_bytes(const attn_problem *p, double share, bool with_truth);
/* Returns the largest number of query rows of a tile. The scores of such a tile fit in a fixed amount of memory. */
int64_t frame_tile_rows(const attn_problem *p);
/* Returns the number of elements that result `id` should have. 0: the problem has no such result. */
int64_t frame_elements(const attn_problem *p, attn_tensor_id id);
/* Returns the number of multiply-adds for computing the truth (float64 results) of all rows. */
double frame_multiply_adds(const attn_problem *p);

/* Returns how many multiply-adds a forward of some queries takes: of all queries that read the keys of the tile
 * `keys`. */
double frame_forward_multiply_adds(const struct frame *f, const struct key_tile *keys);

/* Returns an element of the caller's result `id`; *at becomes the element's index in the tensor. `row` counts from the
 * start of the tensor. `swapped`: true if the tensor is read with heads and rows exchanged. */
double frame_got(const struct frame *f, attn_tensor_id id, bool swapped, int64_t b, int64_t h, int64_t row,
                 int64_t column, int64_t *at);
/* Three functions about sequence b. frame_first_row() returns the index of the sequence's first row in packed tensors
 * of queries, and frame_first_key() returns the index in packed tensors of keys. Both return 0 for tensors that are not
 * packed. frame_key_room() returns how many rows the sequence has in tensors of keys, padding included. */
int64_t frame_first_row(const struct frame *f, int64_t b);
int64_t frame_first_key(const struct frame *f, int64_t b);
int64_t frame_key_room(const struct frame *f, int64_t b);
/* frame_kept() returns the array of struct truth that holds the float64 results of a tensor; NULL: there is none.
 * frame_columns() returns the number of columns of a row of the tensor; it is 1 for lse, dbias, dsinks and dslopes. */
double *frame_kept(const struct truth *t, attn_tensor_id id);
int64_t frame_columns(const struct frame *f, attn_tensor_id id);

/* Adds to *d the difference between a caller's number `got` and the correct number `want`. Two NaN, or two equal
 * infinities, count as equal. */
void difference_add(struct difference *d, double got, double want);
void difference_join(struct difference *d, const struct difference *more);
/* difference_worst() returns the largest difference; infinity if any difference counts in `bad`. difference_mean()
 * returns the mean over all compared numbers; differences in `bad` add nothing to the sum. */
double difference_worst(const struct difference *d);
double difference_mean(const struct difference *d);

#endif
