/* flash.h: types and functions that forward.c, decode.c and backward.c share: a run laid out in memory, and the tiles
 * of a problem.
 *
 * A run is attn_run()'s array of planned problems. It is computed in phases; a phase is one parallel loop over the
 * items of all problems together, so many small problems cost no more barriers than one:
 *
 *     phase            an item is                          does
 *     FLASH_PREPARE    a key tile; a head's mask rows      packs K and V for products; extremes of the FlashMask bounds
 *     FLASH_FORWARD    a row tile against a span of keys   scores, softmax, O; a result, or a partial result
 *     FLASH_MERGE      a row tile whose keys were split    adds up partial results in order
 *     FLASH_ROWS       a row tile                          packs Q and dO; lse, delta; zeros dQ, dbias (backward)
 *     FLASH_KEYS       a chunk of keys                     dK and dV of the chunk, its share of dQ (backward)
 *     FLASH_FINISH     a row tile; a head                  dQ in its dtype; dsinks, dalibi_slopes (backward)
 *
 * An observe has items of its own in FORWARD, KEYS and FINISH: see observe.c.
 *
 * A phase without items costs nothing. A backward without out and lse runs the forward phases first and keeps only
 * lse and delta of their results.
 *
 * A row tile is up to BM rows of one key/value head: consecutive queries of one query head, or, where a sequence is
 * short, all the queries of several heads of the group (one decoded token of 8 heads is 8 rows of one product, not
 * 8 products):
 *
 *     long:   head h, queries i0 .. i0 + n - 1            rows = n
 *     short:  heads h .. h + heads - 1, queries 0 .. n-1  rows = heads * n, head by head
 *
 * Invariants
 * 1. Tile sizes, paths, splits and the order of all sums depend on one sequence's Sq and Sk, and on the problem's
 *    H / Hk, D, Dv, dtype and options. They never depend on B, on other sequences or problems, or on the number of
 *    threads.
 * 2. No Sq x Sk matrix exists. Scratch is a few tiles per thread. The size of the workspace is at most a multiple of
 *    the tensors' size.
 * 3. The size of the workspace can be computed without reading cu_seqlens or seqlens: flash_run_bytes() uses bounds on
 *    their sums. */
#ifndef ATTN_CPU_FLASH_H
#define ATTN_CPU_FLASH_H

#include <assert.h>
#include <math.h>

#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"
#include "kernels/tiles.h"

/* The features of this backend's fast kernels, each tensor and option by name. Until a new feature of attention.h is
 * added here, the kernel "double" computes problems that have it. */
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
    FLASH_UNIT = 32,        /* all code pads rows and keys to multiples of FLASH_UNIT, which is SIMD_PANEL and the
                             * largest k_multiple */
    FLASH_MASK_BLOCK = 64,  /* keys whose FlashMask bounds share one entry of `extremes` */
    FLASH_DOT_ROWS = 8,     /* row tiles of up to this many rows take FLASH_DOTS, because reading K and V is their
                             * whole cost */
    FLASH_MAP_COLUMNS = 64, /* cells of a row of map that one item computes */
    FLASH_BUNDLE_ROWS = 32, /* rows of a bundle of heads; few enough that their scores and sums stay in L1 */
};

/* The code that computes the forward of a sequence. */
enum flash_path {
    FLASH_DOTS, /* decode.c: few rows; K and V are read as they lie in memory */
    FLASH_TILES /* forward.c: matrix products on packed tiles */
};

/* The lse of a row in two parts: its largest score and the logarithm of the rest, in natural units. A row that sees
 * no key has -inf and 0. */
struct flash_lse {
    double top, rest;
};

/* Properties of a tile's values that packing found, as a set of bits. */
enum flash_values {
    FLASH_TAME = 0,
    FLASH_LARGE = 1,  /* some values are so large (SIMD_TAME) that their sum may be infinite */
    FLASH_UNREAL = 2, /* some values are NaN or infinite; the pack has zeros in their place */
    FLASH_WILD = 4,   /* some queries or keys are so large (SIMD_TAME), or not finite, that products may overflow */
};

/* Why P of a row cannot be computed from its lse in float32. */
enum flash_strangeness {
    FLASH_EXACT, /* each score must be computed in double; lse.top is NaN where every score of the row is NaN */
    FLASH_ALIKE, /* every key that the row sees has the same score, z */
    FLASH_SINGLE /* the row sees one key: P is 1 where lse and that key's score differ only by rounding */
};
struct flash_strange {
    struct flash_lse lse;
    double z;
    enum flash_strangeness kind;
};

/* One sequence of a problem. The members whose names end in 0 are prefix sums: they count over all key/value heads
 * of all earlier sequences. */
struct flash_sequence {
    attn_sequence s;
    enum flash_path path;
    bool packs;           /* FLASH_PREPARE packs K and V once; false: each row tile packs the keys that it needs */
    int heads;            /* query heads whose rows share a row tile */
    int bundle;           /* key/value heads that one item of FLASH_FORWARD computes: 1, or more for FLASH_DOTS */
    int64_t tiles;        /* row tiles of a key/value head */
    int64_t rows;         /* rows of these tiles, each tile rounded up to FLASH_UNIT */
    int64_t splits, span; /* spans of keys that a row tile is split into (1: not split), and keys of a span */
    int64_t part_rows;    /* rows of partial results of a key/value head for each span; 0 where nothing is split */
    int64_t tiles0, rows0, items0, packs0, keys0, parts0, chunks0;
};

/* A row tile: the queries of one or several heads of a group that are computed together. */
struct flash_tile {
    const struct flash_sequence *seq;
    int64_t b, hk;   /* sequence, key/value head */
    int64_t index;   /* index of the tile among those of its key/value head */
    int64_t h, i0;   /* first query head and first query */
    int heads, n;    /* number of heads, and queries of each head */
    int rows;        /* number of rows: heads * n */
    int64_t row0;    /* index of its first row in the arrays by row; a multiple of FLASH_UNIT */
    attn_range keys; /* keys that at least one query of the tile sees, by causal, window and lengths */
    attn_range all;  /* keys that every query of the tile sees, by causal, window and lengths */
};

/* The columns that a row tile sees of a key tile that starts at key j0: c0 to c0 + cols - 1. */
struct visible_block {
    int c0, cols;
    bool ranged; /* causal or window hides some column from some row */
    bool masked; /* FlashMask hides some column from some row */
};

/* A problem with all sizes decided and its memory laid out. */
struct flash {
    const attn_problem *p;
    const struct simd *simd;
    /* type is the compute type of products. forward_type is that of P V in a forward, and equal or more exact.
     * Scores have the same type in forward and backward, because lse must be the sum of the P from which gradients
     * are made. */
    const struct simd_type *type, *forward_type;
    attn_geometry g;
    bool backward, observe, recompute; /* recompute: a backward without out and lse, which starts with a forward */
    bool plain;                        /* scores need only a positive scale and ranges of columns */
    bool may_overflow;                 /* dot products of these dtypes of q and k can exceed the range of float32 */
    bool dropout;
    uint32_t drop_threshold;
    float drop_scale; /* 1 / (1 - dropout_p); 1 without dropout */
    int BM, BN;       /* forward: rows and keys of a tile */
    int Bk;           /* backward: keys of a chunk */
    int bundle;       /* key/value heads that an item of FLASH_DOTS computes */
    int64_t B;
    const int *cancel;     /* the run's cancel flag; attn_is_cancelled() reads it between tiles */
    int64_t scratch_bytes; /* bytes of a thread's scratch, enough for every phase */

    struct flash_sequence *seq; /* [B], one for each sequence */

    /* Operands that FLASH_PREPARE packs, for each key tile K^T and then V, both in B form. */
    char *kv;
    uint8_t *kv_values;           /* enum flash_values of each key tile */
    int64_t kv_key_bytes;         /* bytes that `kv` has for each key */
    attn_mask_extremes *extremes; /* extremes of FlashMask's bounds: [B][mask heads][mask_blocks] */
    int64_t mask_heads, mask_blocks;
    _Atomic float *most; /* [B][Hk][2] largest |k| and |v|, see exact.c; negative: not computed yet */

    /* Partial results of split sequences: O is [part rows][Dv], followed by m and l. */
    float *part_O, *part_m, *part_l;

    /* Arrays by row, for a backward. */
    char *Qa, *dOa;                /* Q and dO as A operands, one row after the other */
    char *Qat, *dOat;              /* Q and dO as transposed A operands, one row tile after the other */
    float *lse2, *delta, *dQ;      /* lse2 is NaN where `strange` holds the row's lse */
    struct flash_strange *strange; /* lse of rows that lse2 cannot hold, see exact.c; written only for these rows */
    /* values of Q (WILD) and of dO (UNREAL) in each row tile, at row0 / FLASH_UNIT: enum flash_values */
    uint8_t *row_values;
    /* the unit sizes are bytes of FLASH_UNIT rows of Qat and dOat */
    int64_t q_lda, do_lda, q_unit_bytes, do_unit_bytes, dq_ld;

    /* Arrays by row, for an observe. P = exp2(z - row_base) row_inverse; row_base is INFINITY where P is 0, and NaN
     * where `strange` holds the row's lse. */
    float *row_base, *row_inverse, *row_most, *row_entropy;
    int64_t observe_chunks, shown_keys; /* items of FLASH_KEYS that are chunks; keys of a row that key_mass has */

    /* For a backward, by chunk of keys. */
    int64_t chunks; /* chunks of each sequence when not packed, of the longest sequence when packed */
    struct flash_progress *progress;
    double *slope_parts; /* [B][H][chunks] parts of dalibi_slopes */
    /* above 0 where dbias is a sum over heads or batch rows: the number of classes, see backward.c */
    int64_t dbias_classes;
    int64_t tiles_all, packs_all, chunks_all; /* numbers of tiles, packs and chunks of all sequences */
    /* number of slices in which FLASH_ROWS zeroes dbias, and slices of each [Sq, Sk] matrix */
    int64_t dbias_slices, dbias_blocks;

    /* number of items of this problem in each phase, and of all problems before it */
    int64_t items[FLASH_PHASES], first[FLASH_PHASES];
};

/* How far a chunk of keys has come: it has finished all row tiles before `tile`. The struct fills a cache line, so
 * that threads that poll one chunk do not slow down others. */
struct flash_progress {
    _Alignas(64) _Atomic int64_t tile;
};

/* The scratch of a thread, large enough for each problem of the run. Every user takes its buffers from the start of
 * it. */
struct flash_scratch {
    char *memory;
};

struct flash_run {
    const struct simd *simd;
    int count;
    struct flash *problems;
    char *scratch;
    int64_t scratch_bytes; /* bytes of each thread's scratch */
    int64_t items[FLASH_PHASES];
    const int *cancel;
    bool small; /* the run is too small to wake other threads */
};

/* Bytes of workspace that suffice for these problems, whatever the lengths of their sequences are. TOO_LARGE on
 * overflow. */
attn_status flash_run_bytes(const struct simd *simd, int threads, const attn_plan *plans, int count, size_t *bytes,
                            attn_error *err);

/* flash_run_bytes() with the actual lengths: the size that a call without a workspace allocates. */
attn_status flash_run_bytes_exact(const struct simd *simd, int threads, const attn_plan *plans, int count,
                                  size_t *bytes, attn_error *err);

/* Computes all problems and returns when they are done. The workspace is 64-byte aligned. Returns false where
 * *cancel was set and some work was not done; `cancel` may be NULL. */
bool flash_run(const struct simd *simd, struct pool *pool, const attn_plan *plans, int count, void *workspace,
               const int *cancel);

/* ---- A bump allocator that also measures ------------------------------------------------------------------------- */

/* With base NULL the arena only adds up sizes, so that the same code first measures memory and then divides it.
 * `used` is INT64_MAX after an overflow. */
struct flash_arena {
    char *base;
    int64_t used;
};

/* Takes count * bytes at a multiple of 64. Returns NULL while the arena only measures. */
void *flash_take(struct flash_arena *arena, int64_t count, int64_t bytes);

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

/* Fills in row tile `index` of key/value head hk of sequence b. */
struct flash_tile flash_tile_of(const struct flash *f, int64_t b, int64_t hk, int64_t index);

/* The sequence to which an item belongs. `field` is the offset of a prefix sum in struct flash_sequence. */
int64_t flash_find(const struct flash *f, size_t field, int64_t item);
#define FLASH_FIND(f, prefix, item) flash_find(f, offsetof(struct flash_sequence, prefix), item)

/* Finds what a row tile sees of the keys [j0, j1), where j0 is a multiple of FLASH_UNIT. Returns false where the
 * tile sees none of them. */
bool flash_visible_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1,
                         struct visible_block *block);

/* Scratch for flash_scores() and flash_drop(): limits of BM rows, and of BN or Bk columns. */
struct flash_limits {
    int *lo, *hi;
    int32_t *hide[4];
    uint8_t *keep; /* keep_mask by rows and columns; NULL where it keeps all keys */
};
void flash_scores_take_limits(const struct flash *f, struct flash_arena *arena, int rows, int cols,
                              struct flash_limits *limits);

/* Turns raw products S (rows x block.cols) into scores; hidden scores become -inf. Returns c, the factor in base 2
 * by which softmax() and gradient() multiply them. `cap`: NULL, or as in struct simd_score. `wild`: some products
 * may be infinite or NaN though the scores are finite (exact.c). */
float flash_scores(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                   float *S, int64_t lds, float *cap, const struct flash_limits *limits, bool wild);

/* Writes which pairs of a block dropout keeps: 1 or 0. The sums are multiplied by 1 / (1 - p) at their end
 * (f->drop_scale). Multiplied into P, the factor would be rounded with P to the operand's type, and a P of 1 would
 * not stay exact. */
void flash_drop(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                float *kept, int64_t ld);

/* flash_drop() for one row and up to FLASH_MASK_BLOCK keys from key j on. */
void flash_drop_row(const struct flash *f, int64_t b, int64_t h, int64_t i, int64_t j, int n, float *kept);

/* The rows of a tile in a tensor with axes like q's, as one strided matrix. They are read in place, or
 * gathered in `scratch` (t->rows * cols elements) where the tile has several heads. */
const void *flash_gather(const struct flash_tile *t, const attn_view *view, int cols, void *scratch, int64_t *stride);

/* The address of element (b, h, row) of a view. In a packed problem add the first row of the sequence to its index. */
static inline void *flash_at(const attn_view *view, int64_t b, int64_t h, int64_t row)
{
    return (char *)view->data + attn_at(view, b, h, row) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* The address of row `line` (k_start + j) of k or v of a key/value head, with or without pages. */
static inline void *flash_key_at(const struct flash *f, const attn_view *view, int64_t b, int64_t hk, int64_t line)
{
    return (char *)view->data + attn_key_at(&f->g, view, b, hk, line) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* Rows of k or v from `line` on as a strided matrix. It has at most `most` rows, and fewer where a page ends; if
 * more rows follow, their number is a multiple of `unit`. Where fewer than `unit` rows lie in one page, `unit` rows
 * are gathered in `scratch` (unit * cols elements). Work on units of rows thus does not depend on where pages end. */
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

/* Checks that the user of a thread's scratch took no more than there is. Every user calls it after its last take. */
static inline void flash_scratch_end(const struct flash *f, const struct flash_arena *arena)
{
    assert(arena->base == NULL || arena->used <= f->scratch_bytes);
    (void)f, (void)arena;
}

/* The index of query i of head h in the arrays by row. */
int64_t flash_row_of(const struct flash *f, int64_t b, int64_t h, int64_t i);

/* The factor of q . k for a key/value head: the problem's scale times the fp8 scales of q and k. */
double flash_scale(const struct flash *f, int64_t b, int64_t hk);

/* pack_b or pack_at of a tile in which NaN and infinity are replaced by 0. Returns enum flash_values. `scratch` has
 * FLASH_UNIT * cols floats. */
typedef bool (*flash_pack)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *operand,
                           int64_t ld);
int flash_pack_clean_b(const struct flash *f, const struct simd_type *type, int rows, int cols, const void *X,
                       attn_dtype dtype, int64_t stride, void *B, int64_t ldb, float *scratch);
int flash_pack_clean_at(const struct flash *f, int rows, int cols, const void *X, attn_dtype dtype, int64_t stride,
                        void *A, int64_t lda, float *scratch);

/* ---- The phases -------------------------------------------------------------------------------------------------- */

/* Each function computes item `item` of this problem's phase. Its scratch_bytes function returns how many bytes of
 * scratch a thread needs for an item. */
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

/* decode.c: computes item `rest` of a sequence of path FLASH_DOTS: a bundle of key/value heads against one span of
 * keys. */
void flash_decode(const struct flash *f, int64_t b, int64_t rest, char *scratch);

/* Does row r of a tile have numbers that float32 vectors cannot compute? m and l are the row's maximum in base 2 and
 * sum. Products that overflowed do not show here, because flash_scores() has repaired them. */
static inline bool flash_is_strange(const struct flash *f, const struct flash_tile *t, int r, float m, float l)
{
    if (m == -INFINITY && l == 0) { /* the row sees no key; visible scores are never -inf after score() */
        const attn_range keys = attn_keys_of(&f->g, &t->seq->s, t->i0 + r % t->n);
        return f->plain && keys.lo < keys.hi;
    }
    return !(fabsf(m) < SIMD_SCORE_MOST && l < INFINITY);
}

/* row_end.c: finishes the running O, m and l of a row tile. Where the tile's keys are split, it stores a
 * partial result; otherwise it writes out and lse (in a backward: lse2 and delta). It changes O. `inverse`:
 * t->rows floats of scratch. `large`: O may have overflowed. */
void flash_row_end_part(const struct flash *f, const struct flash_tile *t, int64_t split, float *O, int64_t ldo,
                        float *m, float *l, float *inverse, bool large);
/* flash_row_end_part() for whole rows, whose keys are not split: writes out and lse. */
void flash_row_end(const struct flash *f, const struct flash_tile *t, const float *O, int64_t ldo, const float *m,
                   const float *l, float *inverse, bool large);
/* The index of a row tile's partial result for span `split` in part_O, part_m and part_l. */
int64_t flash_row_end_part_row(const struct flash_tile *t, int64_t split);

/* delta = rowsum(dO O) of n rows of O, without dlse: for the queries of head h from row `first` of the tensor on. dO
 * is rounded as for the products, because sum_j P (dP - delta) must be 0: otherwise that sum times a large element of K
 * makes dQ wrong. */
void flash_deltas(const struct flash *f, int64_t b, int64_t h, int64_t first, int n, const void *O, attn_dtype dtype,
                  int64_t stride, float *delta);

/* Loads a row of dO and rounds it as for the products. */
void flash_load_dout(const struct flash *f, int64_t b, int64_t h, int64_t line, float *row);

/* Computes the row of query i of head h in double (exact.c). `out`: Dv numbers, or NULL where only lse is needed. */
struct flash_lse flash_exact_row(const struct flash *f, int64_t b, int64_t h, int64_t i, double *out);

/* The largest scores of a row, in descending order. */
struct flash_top {
    int most, count; /* number of scores that are wanted; number that is kept now */
    int32_t key[ATTN_MAX_TOP];
    double z[ATTN_MAX_TOP];
};

/* The bound that a score must exceed to be among the largest. */
static inline double flash_top_least(const struct flash_top *top)
{
    return top->count < top->most ? -INFINITY : top->z[top->count - 1];
}

/* Adds a score that exceeds flash_top_least(). */
static inline void flash_top_add(struct flash_top *top, double z, int32_t key)
{
    int n = top->count < top->most ? top->count++ : top->count - 1;
    for (; n > 0 && top->z[n - 1] < z; n--) top->z[n] = top->z[n - 1], top->key[n] = top->key[n - 1];
    top->z[n] = z;
    top->key[n] = key;
}

/* The keys of the row of query i of head h, in double and without the sink: their largest score m, l = sum exp(z - m)
 * and e = sum exp(z - m) (z - m). m is -inf where the row sees no key, NaN where a score is NaN. `top` (NULL: not
 * wanted) is empty before. */
void flash_exact_sums(const struct flash *f, int64_t b, int64_t h, int64_t i, double *m, double *l, double *e,
                      struct flash_top *top);

/* Where all keys that the row sees have one score, writes it to *found and returns the number of these keys.
 * 0: the row sees no key, or its scores may differ. */
int64_t flash_exact_alike(const struct flash *f, int64_t b, int64_t h, int64_t i, struct flash_strange *found);

/* Does row r of a tile see exactly one key? */
bool flash_exact_sees_one_key(const struct flash *f, const struct flash_tile *t, int r);

/* Stores a row's lse for gradient(): in lse2, or in `strange` where lse2 cannot hold it. */
static inline void flash_keep_lse(const struct flash *f, int64_t row, struct flash_strange lse)
{
    const double whole = lse.lse.top + lse.lse.rest;
    const bool holds = lse.kind == FLASH_EXACT && fabs(whole) < (double)ATTN_LSE_MOST;
    f->strange[row] = lse;
    f->lse2[row] = lse.lse.top == -INFINITY ? INFINITY : holds ? (float)(whole * M_LOG2E) : NAN;
}

/* Computes scores of row r of a tile for gradient(): score minus lse, in units of c (natural logarithms). Writes S
 * and, where `cap` is not NULL, softcap's factor for the gradient, for columns j .. j + cols - 1. */
void flash_exact_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                        struct flash_lse lse, double c, float *S, float *cap);

/* Computes scores again that are NaN after score(), because their products may have overflowed. Also computes
 * softcap's factor for their gradients. */
void flash_exact_mend_scores(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, float *S,
                             int64_t lds, float *cap);

#endif
