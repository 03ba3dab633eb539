/* flash.h: types and functions that forward.c, decode.c, backward.c and observe.c share. They describe the arrays of a
 * run in memory, and the tiles of a problem.
 *
 * A run is the array of planned problems of one attn_run(). It is computed in phases. A phase is one parallel loop over
 * the items of all problems together. A run of many small problems therefore has no more barriers between threads than
 * a run of one problem:
 *
 *     phase            an item (unit of work) is           what an item does
 *     FLASH_PREPARE    a key tile; a head's mask rows      packs K and V for products; min and max FlashMask bounds
 *     FLASH_FORWARD    a row tile against a span of keys   scores, softmax, O; a result, or a partial result
 *     FLASH_MERGE      a row tile whose keys were split    adds up partial results in order
 *     FLASH_ROWS       a row tile; a slice of dbias        packs Q and dO; lse, delta; zeros dQ, dbias (backward)
 *     FLASH_KEYS       a chunk of keys                     dK and dV of the chunk, its share of dQ (backward)
 *     FLASH_FINISH     a row tile; a head                  dQ in its dtype; dsinks, dalibi_slopes (backward)
 *
 * An observe (statistics of probabilities) has its own kinds of items in FORWARD, KEYS and FINISH: see observe.c.
 *
 * A phase without items costs nothing. A backward without out and lse runs the forward phases first and stores only lse
 * and delta of their results.
 *
 * A row tile is up to BM rows of one key/value head. The rows are consecutive queries of one query head, or, where a
 * sequence is short, all queries of several heads of the group (one decoded token of 8 heads is 8 rows of one product,
 * not 8 products):
 *
 *     long:   head h, queries i0 .. i0 + n - 1            rows = n
 *     short:  heads h .. h + heads - 1, queries 0 .. n-1  rows = heads * n, head by head
 *
 * Invariants
 * 1. Tile sizes, paths, splits and the order of all sums depend on one sequence's Sq and Sk, and on the problem's H /
 * Hk, D, Dv, dtype and options. They never depend on B, on other sequences or problems, or on the number of threads.
 * 2. No Sq x Sk matrix exists. Scratch is a few tiles per thread. The size of the workspace is at most a constant times
 * the tensors' size.
 * 3. The size of the workspace can be computed without reading cu_seqlens or seqlens: flash_run_bytes() uses upper
 * bounds on the sums of lengths. */
#ifndef ATTN_CPU_FLASH_H
#define ATTN_CPU_FLASH_H

#include <assert.h>
#include <math.h>

#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"
#include "kernels/tiles.h"

/* The features of attention that the fast kernels of this backend support, each tensor and option by name. A problem
 * with a feature that is not in this list is computed by the kernel "double". */
#define FLASH_FEATURES                                                                                                \
    (ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(alibi_slopes) |                   \
     ATTN_TENSOR_BIT(bias) | ATTN_TENSOR_BIT(keep_mask) | ATTN_TENSOR_BIT(sinks) | ATTN_TENSOR_BIT(cu_seqlens_q) |    \
     ATTN_TENSOR_BIT(cu_seqlens_k) | ATTN_TENSOR_BIT(seqlens_q) | ATTN_TENSOR_BIT(seqlens_k) |                        \
     ATTN_TENSOR_BIT(page_table) | ATTN_OPTION_BIT(GAPS) | ATTN_TENSOR_BIT(mask_startend_rows) |                      \
     ATTN_TENSOR_BIT(q_scale) | ATTN_TENSOR_BIT(k_scale) | ATTN_TENSOR_BIT(v_scale) | ATTN_TENSOR_BIT(out) |          \
     ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(dout) | ATTN_TENSOR_BIT(dlse) | ATTN_TENSOR_BIT(dq) |                     \
     ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) | ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dbias) |                   \
     ATTN_TENSOR_BIT(dalibi_slopes) | ATTN_OPTION_BIT(CAUSAL) | ATTN_OPTION_BIT(WINDOW) | ATTN_OPTION_BIT(TOP_LEFT) | \
     ATTN_OPTION_BIT(KEEP_MASK_AT_END) | ATTN_OPTION_BIT(GROUPED) | ATTN_OPTION_BIT(SCALE) |                          \
     ATTN_OPTION_BIT(SOFTCAP) | ATTN_OPTION_BIT(DROPOUT) | ATTN_OPTION_BIT(DETERMINISTIC) |                           \
     ATTN_OPTION_BIT(KEY_DTYPE) | ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(DOUT_DTYPE) |                          \
     ATTN_OPTION_BIT(GRAD_DTYPE) | ATTN_TENSOR_BIT(row_max) | ATTN_TENSOR_BIT(entropy) | ATTN_TENSOR_BIT(max_logit) | \
     ATTN_TENSOR_BIT(mean_entropy) | ATTN_TENSOR_BIT(key_mass) | ATTN_TENSOR_BIT(top_keys) |                          \
     ATTN_TENSOR_BIT(top_weights) | ATTN_TENSOR_BIT(weights) | ATTN_TENSOR_BIT(map))

enum flash_phase { FLASH_PREPARE, FLASH_FORWARD, FLASH_MERGE, FLASH_ROWS, FLASH_KEYS, FLASH_FINISH, FLASH_PHASES };

enum {
    /* In packed memory, the number of rows and the number of keys are rounded up to multiples of FLASH_UNIT. Rows and
     * keys then fill whole panels (SIMD_PANEL columns) of matrix products (simd.h). Their numbers are also multiples of
     * every simd_type.k_multiple. */
    FLASH_UNIT = 32,
    /* number of keys per entry of the array `extremes`, which holds the smallest and the largest FlashMask bounds of
     * these keys */
    FLASH_MASK_BLOCK = 64,
    /* A sequence with at most this many query rows per key/value head (queries times query heads of the group) takes
     * the path FLASH_DOTS. That path does not pack K and V, because packing would cost more than the products. An
     * observe never takes it. */
    FLASH_DOT_ROWS = 8,
    /* an item (unit of parallel work) of an observe computes at most this many cells of one row of the output `map` */
    FLASH_MAP_COLUMNS = 64,
    /* largest number of query rows in a bundle, which is a group of key/value heads that are computed together. The
     * scores and sums of this many rows stay in the L1 cache. */
    FLASH_BUNDLE_ROWS = 32,
};

enum flash_path {
    FLASH_DOTS, /* decode.c computes the sequence, which has few query rows; K and V are read without packing */
    FLASH_TILES /* forward.c computes the sequence, by matrix products on tiles of packed queries and keys */
};

/* The lse (a natural logarithm) of a row as a sum of two numbers: the row's largest score `top`, and `rest`, which is
 * lse - top. If a row sees no key, `top` is -inf and `rest` is 0. */
struct flash_lse {
    double top, rest;
};

/* Which unusual numbers (huge, infinite or NaN) a packed tile contains, as a set of bits. */
enum flash_values {
    FLASH_TAME = 0,
    FLASH_LARGE = 1,  /* some values are so large (SIMD_TAME or more) that a sum of them may be infinite */
    FLASH_UNREAL = 2, /* some values are NaN or infinite; packing has replaced them by zeros */
    /* some queries or keys are infinite, NaN or so large (SIMD_TAME or more) that dot products may overflow */
    FLASH_WILD = 4,
};

/* Returns the number x such that a probability below 2^x counts as 0. Probabilities are multiplied by other numbers;
 * `values` says which unusual numbers are among these, as bits of enum flash_values. */
static inline float flash_least(int values)
{
    return values & (FLASH_LARGE | FLASH_UNREAL) ? SIMD_EXP2_LEAST : SIMD_EXP2_LEAST_TAME;
}

/* Reasons why P of a row cannot be computed as exp2(score - lse) in float32. */
enum flash_strangeness {
    /* the scores of the row must be computed in double; if lse.top is NaN, the visible scores become NaN instead */
    FLASH_EXACT,
    FLASH_ALIKE, /* all keys that the row sees have the same score, which is in `z` */
    FLASH_SINGLE /* the row sees one key, so P is 1 if the row's lse differs from the key's score only by rounding */
};
struct flash_strange {
    struct flash_lse lse;
    double z;
    enum flash_strangeness kind;
};

/* One sequence of a problem. Members whose names end in 0 are prefix sums: tiles0, for example, is the number of row
 * tiles in all key/value heads of all earlier sequences. */
struct flash_sequence {
    attn_sequence s;
    enum flash_path path;
    /* whether K and V are packed once for all row tiles; if not, each row tile packs the key tiles that it needs */
    bool packs;
    int heads; /* number of query heads whose rows are computed together, in one row tile */
    /* number of key/value heads that one item (unit of parallel work) of a forward computes; it is above 1 only if
     * there are few query rows (FLASH_DOTS) */
    int bundle;
    int64_t tiles; /* number of row tiles into which the rows of a key/value head are cut */
    /* number of rows in all row tiles of a key/value head; the rows of each tile are counted as a multiple of
     * FLASH_UNIT, rounded up */
    int64_t rows;
    /* `splits`: number of spans into which the keys of a row tile are split (1: not split); `span`: number of keys in a
     * span */
    int64_t splits, span;
    /* number of rows that each key/value head has, for each span of keys, in the arrays of partial results; 0: keys are
     * not split */
    int64_t part_rows;
    int64_t tiles0, rows0, items0, packs0, keys0, parts0, chunks0;
};

/* A row tile: queries of one head, or of several heads of one key/value head's group, that are computed together. */
struct flash_tile {
    const struct flash_sequence *seq;
    int64_t b, hk;
    int64_t index; /* index of the tile among the row tiles of its key/value head */
    int64_t h, i0; /* h: first query head of the tile; i0: index of the tile's first query in its sequence */
    int heads, n;  /* heads: number of heads in the tile; n: number of queries of each head */
    int rows;
    /* index of the tile's first row in the arrays with an entry for each row (run.c); a multiple of FLASH_UNIT */
    int64_t row0;
    attn_range keys; /* keys that at least one query of the tile sees, by causal, window and lengths */
    attn_range all;  /* keys that every query of the tile sees, by causal, window and lengths */
};

/* The columns (keys) of a key tile that a row tile sees: c0 to c0 + cols - 1. Column 0 is key j0, the first key that
 * flash_visible_block() was given. */
struct visible_block {
    int c0, cols;
    /* whether causal mask or window hides some of the columns c0 to c0 + cols - 1 from some row of the tile */
    bool ranged;
    bool masked; /* whether FlashMask may hide some of the columns c0 to c0 + cols - 1 from some row of the tile */
};

/* One of the problems of an attn_run(), with its tile sizes and the addresses of its arrays in the workspace. */
struct flash {
    const attn_problem *p;
    const struct simd *simd;
    /* `type`: the compute type, which is the format of numbers in matrix products (simd.h). `forward_type`: the compute
     * type of the product P V in a forward, which is at least as exact as `type`. Forward and backward use the same
     * type for scores, because the backward computes P from the forward's lse. */
    const struct simd_type *type, *forward_type;
    attn_geometry g;
    /* recompute: whether the problem is a backward without out and lse, which must start with a forward */
    bool backward, observe, recompute;
    /* whether the scale is the only option of the scores, and each row sees one range of keys */
    bool plain;
    bool may_overflow; /* whether dot products of q and k in their dtypes can exceed the range of float32 */
    bool dropout;
    uint32_t drop_threshold;
    float drop_scale; /* 1 / (1 - dropout_p); 1 without dropout */
    /* BM and BN of a forward: the number of query rows of a row tile, and the number of keys of a key tile */
    int BM, BN;
    int Bk; /* number of keys that a backward computes together (a chunk) */
    /* number of key/value heads that one item (unit of parallel work) computes if there are few query rows
     * (FLASH_DOTS) */
    int bundle;
    int64_t B;
    const int *cancel;
    /* bytes of scratch memory (for intermediate results) that a thread needs in any phase */
    int64_t scratch_bytes;

    struct flash_sequence *seq;

    /* packed K and V, each as the matrix B of a product A B (simd.h). Each key tile has its K^T first, and then its
     * V. */
    char *kv;
    uint8_t *kv_values;   /* which unusual numbers (huge, NaN) each key tile contains: bits of enum flash_values */
    int64_t kv_key_bytes; /* bytes per key in `kv`, for packed K and V together */
    /* array [B][mask heads][mask_blocks] with the smallest and largest FlashMask bounds of each block of
     * FLASH_MASK_BLOCK keys */
    attn_mask_extremes *extremes;
    int64_t mask_heads, mask_blocks;
    /* shape [B][Hk][2]: for each key/value head, the largest absolute value in k, and the largest in v (exact.c);
     * negative if not computed yet */
    _Atomic float *most;

    /* Partial results of sequences whose keys are split into spans. part_O is [rows][Dv]; part_m and part_l are [rows].
     * Here `rows` is the sum of part_rows over all spans and key/value heads. */
    float *part_O, *part_m, *part_l;

    /* The arrays below belong to a backward and have an entry for each row. */
    char *Qa, *dOa;   /* Q and dO packed for matrix products, one row after the other */
    char *Qat, *dOat; /* Q^T and dO^T, packed for matrix products, one row tile after the other */
    /* lse2: the row's lse in base 2; NaN for a row whose lse is stored in `strange` instead */
    float *lse2, *delta, *dQ;
    /* lse of each row whose P cannot be computed as exp2(score - lse2) in float32 (see exact.c); the entries of all
     * other rows are undefined */
    struct flash_strange *strange;
    /* which unusual numbers (huge, NaN) each row tile contains, as bits of enum flash_values: FLASH_WILD is about Q,
     * FLASH_UNREAL about dO, and FLASH_LARGE about both. The index is row0 / FLASH_UNIT. */
    uint8_t *row_values;
    /* q_unit_bytes and do_unit_bytes: number of bytes that FLASH_UNIT rows of Qat and dOat take */
    int64_t q_lda, do_lda, q_unit_bytes, do_unit_bytes, dq_ld;

    /* Arrays of an observe (statistics of probabilities) with an entry for each row. For a score z in base 2, the
     * probability is P = exp2(z - row_base) * row_inverse. row_base is INFINITY where every P of the row is 0, and NaN
     * where `strange` holds the row's lse. */
    float *row_base, *row_inverse, *row_most, *row_entropy;
    /* observe_chunks: number of items (units of parallel work) of the phase FLASH_KEYS that compute a chunk of keys
     * each; the other items of this phase compute the output `map`. shown_keys: number of keys in a row of the output
     * key_mass. */
    int64_t observe_chunks, shown_keys;

    /* The members below belong to a backward; their arrays have an entry for each chunk of keys. */
    /* number of chunks of each sequence (a chunk: keys that a backward computes together); in a packed problem, the
     * number of chunks of the longest sequence */
    int64_t chunks;
    struct flash_progress *progress;
    double *slope_parts; /* shape [B][H][chunks]: the part of dalibi_slopes that comes from each chunk of keys */
    /* number of classes (sets of heads and batch rows that share one matrix of dbias: backward.c); 0: dbias is not
     * shared */
    int64_t dbias_classes;
    /* numbers of row tiles (tiles of query rows), packed key tiles and chunks of keys, in all key/value heads of all
     * sequences */
    int64_t tiles_all, packs_all, chunks_all;
    /* In the phase FLASH_ROWS, some items (units of parallel work) set dbias to zero. Each of them sets one slice: some
     * consecutive rows of a [Sq, Sk] matrix of dbias. dbias_slices: number of all slices; dbias_blocks: number of
     * slices of each matrix. */
    int64_t dbias_slices, dbias_blocks;

    /* items: number of items (units of parallel work) of this problem in each phase; first: number of items of all
     * earlier problems together in each phase */
    int64_t items[FLASH_PHASES], first[FLASH_PHASES];
};

/* The progress of one chunk of keys in a backward: the chunk has finished all row tiles (tiles of query rows) whose
 * number is below `tile`. The struct fills a cache line, so that threads that poll one chunk do not slow down the
 * threads of other chunks. */
struct flash_progress {
    _Alignas(64) _Atomic int64_t tile;
};

/* The scratch memory of a thread, large enough for each problem of the attn_run(). Every item (unit of parallel work)
 * begins at the start of this memory again, and divides it among the arrays that the item needs. */
struct flash_scratch {
    char *memory;
};

struct flash_run {
    const struct simd *simd;
    int count;
    struct flash *problems;
    char *scratch;
    int64_t scratch_bytes;
    int64_t items[FLASH_PHASES];
    const int *cancel;
    bool small; /* whether all problems together are so little work that other threads are not woken */
};

/* Computes the bytes of workspace that suffice for the problems of `plans`, whatever the lengths of their sequences
 * are. Returns TOO_LARGE if the sum overflows. */
attn_status flash_run_bytes(const struct simd *simd, int threads, const attn_plan *plans, int count, size_t *bytes,
                            attn_error *err);

/* Computes the bytes of workspace that the problems of `plans` need with the true lengths of their sequences
 * (flash_run_bytes() uses upper bounds). If the caller gives no workspace, this size is allocated. */
attn_status flash_run_bytes_exact(const struct simd *simd, int threads, const attn_plan *plans, int count,
                                  size_t *bytes, attn_error *err);

/* Computes the `count` problems of `plans` and returns when they are done. The workspace is 64-byte aligned. Returns
 * false if *cancel was set and some work was not done; `cancel` may be NULL. */
bool flash_run(const struct simd *simd, struct pool *pool, const attn_plan *plans, int count, void *workspace,
               const int *cancel);

/* ---- An allocator of scratch memory, which can also only measure how much is needed ------------------------------ */

/* An arena is a piece of memory from which flash_take() takes one array after the other. If `base` is NULL, the arena
 * only adds up the sizes. The same code can thus first measure the memory and then divide it. `used` is INT64_MAX after
 * an overflow. */
struct flash_arena {
    char *base;
    int64_t used;
};

/* Takes memory for `count` elements of `bytes` bytes, at an address that is a multiple of 64. Returns NULL if the arena
 * only measures, or if the sizes overflow. */
void *flash_take(struct flash_arena *arena, int64_t count, int64_t bytes);

/* ---- Tiles: their rows, keys and scores -------------------------------------------------------------------------- */

struct flash_tile flash_tile_of(const struct flash *f, int64_t b, int64_t hk, int64_t index);

/* Returns the sequence to which item number `item` (a unit of parallel work) belongs. `field` is the offset in struct
 * flash_sequence of a prefix sum, such as tiles0, that counts these items. */
int64_t flash_find(const struct flash *f, size_t field, int64_t item);
#define FLASH_FIND(f, prefix, item) flash_find(f, offsetof(struct flash_sequence, prefix), item)

/* Finds out which of the keys j0 to j1 - 1 are seen by a row tile, and writes their range to *block. j0 is a multiple
 * of FLASH_UNIT. Returns false if the tile sees none of these keys. */
bool flash_visible_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1,
                         struct visible_block *block);

/* Scratch memory in which flash_scores() stores which columns (keys) each row of a tile may see. */
struct flash_limits {
    int *lo, *hi;
    int32_t *hide[4];
    /* memory for a copy of the tile's part of keep_mask; NULL if keep_mask covers all keys, or is not given */
    uint8_t *keep;
};
void flash_scores_take_limits(const struct flash *f, struct flash_arena *arena, int rows, int cols,
                              struct flash_limits *limits);

/* Turns the products S = Q K^T of a tile (rows x block.cols) into scores; hidden scores become -inf. Returns the factor
 * c by which softmax() and gradient() must multiply these scores to get scores in base 2. `cap` receives the
 * derivatives of softcap (struct simd_score), and may be NULL. `wild`: some products may be infinite or NaN although
 * the scores are finite (exact.c). */
float flash_scores(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                   float *S, int64_t lds, float *cap, const struct flash_limits *limits, bool wild);

/* Writes 1 for each (query, key) pair of a block that dropout keeps, and 0 for each pair that it drops. The factor 1 /
 * (1 - p) is applied to finished sums (f->drop_scale), because P times the factor would have to be rounded. */
void flash_drop(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                float *kept, int64_t ld);

/* Writes 1 for each (query, key) pair that dropout keeps and 0 for each that it drops. The pairs are query i of head h
 * with keys j to j + n - 1, n <= FLASH_MASK_BLOCK. flash_drop() does the same for a block of rows. */
void flash_drop_row(const struct flash *f, int64_t b, int64_t h, int64_t i, int64_t j, int n, float *kept);

/* Returns a tile's rows of a tensor as one matrix; the tensor has the same axes as q. If the tile has one head, the
 * function returns an address in the tensor's own memory; otherwise it copies the rows to `scratch` (t->rows * cols
 * elements). */
const void *flash_gather(const struct flash_tile *t, const attn_view *view, int cols, void *scratch, int64_t *stride);

/* Returns the address of element (b, h, row) of a view. In a packed problem, `row` counts from the first row of the
 * tensor, not of the sequence. */
static inline void *flash_at(const attn_view *view, int64_t b, int64_t h, int64_t row)
{
    return (char *)view->data + attn_at(view, b, h, row) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* Returns the address of a row of k or v of key/value head hk, with or without pages. Key j of the sequence has the
 * index `line` = k_start + j. */
static inline void *flash_key_at(const struct flash *f, const attn_view *view, int64_t b, int64_t hk, int64_t line)
{
    return (char *)view->data + attn_key_at(&f->g, view, b, hk, line) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* A matrix of at most `most` consecutive rows of k or v. The first row has the index `line` (k_start + j). If the keys
 * lie in pages, the matrix ends with the page of its first row. Its number of rows is then rounded down to a multiple
 * of `unit`. If no row is left, up to `unit` rows are copied from several pages to `scratch` (unit * cols elements). */
struct flash_keys {
    const void *rows;
    int64_t stride;
    int count;
};
struct flash_keys flash_keys_of_pages(const struct flash *f, const attn_view *view, int64_t b, int64_t hk, int64_t line,
                                      int most, int unit, int cols, void *scratch);
static inline struct flash_keys flash_keys_at(const struct flash *f, const attn_view *view, int64_t b, int64_t hk,
                                              int64_t line, int most, int unit, int cols, void *scratch)
{
    if (f->g.page_table) return flash_keys_of_pages(f, view, b, hk, line, most, unit, cols, scratch);
    return (struct flash_keys){ flash_key_at(f, view, b, hk, line), view->row, most };
}

/* Asserts that an item has taken no more bytes of the thread's scratch memory than there are. Call it after the item's
 * last flash_take(). */
static inline void flash_scratch_end(const struct flash *f, const struct flash_arena *arena)
{
    assert(arena->base == NULL || arena->used <= f->scratch_bytes);
    (void)f, (void)arena;
}

/* Returns the index of query i of head h in arrays with one entry per row, such as lse2. */
int64_t flash_row_of(const struct flash *f, int64_t b, int64_t h, int64_t i);

/* Returns the number by which q . k is multiplied for a key/value head: the problem's scale times the float8 scale
 * factors of q and k. */
double flash_scale(const struct flash *f, int64_t b, int64_t hk);

/* flash_pack_clean_b() and flash_pack_clean_at() do what pack_b() and pack_at() of simd.h do, with 0 in place of NaN
 * and infinity. Both return which unusual numbers (huge, infinite or NaN) the elements contain, as bits of enum
 * flash_values. `scratch` has FLASH_UNIT * cols floats. */
typedef bool (*flash_pack)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *operand,
                           int64_t ld);
int flash_pack_clean_b(const struct flash *f, const struct simd_type *type, int rows, int cols, const void *X,
                       attn_dtype dtype, int64_t stride, void *B, int64_t ldb, float *scratch);
int flash_pack_clean_at(const struct flash *f, int rows, int cols, const void *X, attn_dtype dtype, int64_t stride,
                        void *A, int64_t lda, float *scratch);

/* ---- The phases of a run, one function for each ------------------------------------------------------------------ */

/* Each function ..._item() computes item (unit of parallel work) number `item` of its phase, for the problem f. Each
 * function ..._scratch() returns how many bytes of scratch memory a thread needs for an item. */
void flash_forward_prepare_item(const struct flash *f, char *scratch, int64_t item);
void flash_forward_item(const struct flash *f, char *scratch, int64_t item);
void flash_forward_merge_item(const struct flash *f, char *scratch, int64_t item);
void flash_backward_rows_item(const struct flash *f, char *scratch, int64_t item);
void flash_backward_keys_item(const struct flash *f, char *scratch, int64_t item);
void flash_backward_finish_item(const struct flash *f, char *scratch, int64_t item);
void flash_observe_rows_item(const struct flash *f, char *scratch, int64_t item);
void flash_observe_keys_item(const struct flash *f, char *scratch, int64_t item);
void flash_observe_finish_item(const struct flash *f, char *scratch, int64_t item);
int64_t flash_observe_scratch(const struct flash *f);
int64_t flash_forward_scratch(const struct flash *f);
int64_t flash_decode_scratch(const struct flash *f);
int64_t flash_backward_scratch(const struct flash *f);

/* Computes one item (unit of parallel work) of FLASH_FORWARD for a sequence on the path FLASH_DOTS. The item is one
 * bundle (key/value heads computed together) over one span of keys. `rest` is the item's number among the items of
 * sequence b. */
void flash_decode(const struct flash *f, int64_t b, int64_t rest, char *scratch);

/* Returns whether scores or sums of row r of a tile exceed the range of float32, so that the row must be computed in
 * double. m is the row's largest score in base 2, and l the row's sum of exponentials. Products q . k that overflowed
 * do not matter, because flash_scores() has computed the scores of these pairs again in double. */
static inline bool flash_is_strange(const struct flash *f, const struct flash_tile *t, int r, float m, float l)
{
    /* a row that sees a key has m = -inf only after an overflow, because score() makes every visible score larger than
     * -inf */
    if (m == -INFINITY && l == 0) {
        const attn_range keys = attn_keys_of(&f->g, &t->seq->s, t->i0 + r % t->n);
        return f->plain && keys.lo < keys.hi;
    }
    return !(fabsf(m) < SIMD_SCORE_MOST && l < INFINITY);
}

/* Ends the computation of a tile of query rows. For each row, O holds the sum of P V, `m` the largest score and `l` the
 * sum of exponentials. If the keys of the tile are split, stores O, m and l as the partial result of split number
 * `split`. Otherwise writes `out` and `lse` (in a backward: `lse2` and `delta`). `inverse`: scratch memory for t->rows
 * floats. `large`: true if O may have overflowed. */
void flash_row_end_part(const struct flash *f, const struct flash_tile *t, int64_t split, float *O, int64_t ldo,
                        float *m, float *l, float *inverse, bool large);
/* Ends the rows of a tile whose keys are not split: writes out and lse. flash_row_end_part() explains the
 * parameters. */
void flash_row_end(const struct flash *f, const struct flash_tile *t, const float *O, int64_t ldo, const float *m,
                   const float *l, float *inverse, bool large);
/* Returns the index in part_O, part_m and part_l of the first row of a partial result. It is the result of a row tile
 * (tile of query rows) for span number `split` of the keys. */
int64_t flash_row_end_part_row(const struct flash_tile *t, int64_t split);

/* Computes rowsum(dO O), which is delta without dlse, for n rows of O and of dO. In the tensor dout, these rows begin
 * with row `first` of head h. dO is rounded as for the products, so that sum_j P (dP - delta) is 0. If this sum were
 * not 0, its product with a large element of K would make dQ wrong. */
void flash_deltas(const struct flash *f, int64_t b, int64_t h, int64_t first, int n, const void *O, attn_dtype dtype,
                  int64_t stride, float *delta);

/* Loads a row of dO as f32 and rounds it to the format in which packing stores dO for matrix products. */
void flash_load_dout(const struct flash *f, int64_t b, int64_t h, int64_t line, float *row);

/* Computes out and lse of query i of head h in double (exact.c). Returns lse, and writes out to `out` (Dv numbers, or
 * NULL if only lse is needed). */
struct flash_lse flash_exact_row(const struct flash *f, int64_t b, int64_t h, int64_t i, double *out);

/* The keys of a row that have the largest scores so far, in descending order of score. */
struct flash_top {
    int most, count; /* `most`: how many of the largest scores are wanted; `count`: how many are stored */
    int32_t key[ATTN_MAX_TOP];
    double z[ATTN_MAX_TOP];
};

/* Returns the number that a score must exceed to enter the list of largest scores: the smallest score in the list if
 * the list is full, otherwise -INFINITY. */
static inline double flash_top_least(const struct flash_top *top)
{
    return top->count < top->most ? -INFINITY : top->z[top->count - 1];
}

/* Adds a key and its score z to the list of largest scores. z must exceed flash_top_least(). */
static inline void flash_top_add(struct flash_top *top, double z, int32_t key)
{
    int n = top->count < top->most ? top->count++ : top->count - 1;
    for (; n > 0 && top->z[n - 1] < z; n--) top->z[n] = top->z[n - 1], top->key[n] = top->key[n - 1];
    top->z[n] = z;
    top->key[n] = key;
}

/* Computes three numbers from the scores of query i of head h, in double and without the sink: the largest score m, l =
 * sum exp(z - m), and e = sum exp(z - m) (z - m). m is -inf where the row sees no key, NaN where a score is NaN. `top`
 * (NULL: not wanted) must be empty before the call. */
void flash_exact_sums(const struct flash *f, int64_t b, int64_t h, int64_t i, double *m, double *l, double *e,
                      struct flash_top *top);

/* Tests whether all keys that the row sees have the same score because of their bias. If so, writes this score and the
 * row's lse to *found, and returns the number of these keys. Returns 0 if the row sees no key, or if the scores may
 * differ. */
int64_t flash_exact_alike(const struct flash *f, int64_t b, int64_t h, int64_t i, struct flash_strange *found);

bool flash_exact_sees_one_key(const struct flash *f, const struct flash_tile *t, int r);

/* Stores a row's lse where gradient() finds it: in f->lse2 (float32, base 2). If float32 does not suffice, f->lse2
 * becomes NaN, and the lse is stored in f->strange. */
static inline void flash_keep_lse(const struct flash *f, int64_t row, struct flash_strange lse)
{
    const double whole = lse.lse.top + lse.lse.rest;
    const bool holds = lse.kind == FLASH_EXACT && fabs(whole) < (double)ATTN_LSE_MOST;
    f->strange[row] = lse;
    f->lse2[row] = lse.lse.top == -INFINITY ? INFINITY : holds ? (float)(whole * M_LOG2E) : NAN;
}

/* Computes the scores of row r of a tile for gradient(), in double, for keys j to j + cols - 1. S receives (z - lse) /
 * c, where the score z and lse are natural logarithms, and c is the caller's divisor. A hidden score becomes -inf. If
 * `cap` is not NULL, the derivatives of softcap are written to it, for the gradient. */
void flash_exact_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                        struct flash_lse lse, double c, float *S, float *cap);

/* Finds scores that score() has made NaN. The reason may be that q . k overflowed in float32, so the function computes
 * these scores again in double, and also their derivatives of softcap. */
void flash_exact_mend_scores(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, float *S,
                             int64_t lds, float *cap);

#endif
