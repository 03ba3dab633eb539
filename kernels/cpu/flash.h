/* flash.h: what forward.c, decode.c and backward.c share: a run laid out in memory, and the tiles of a problem.
 *
 * A run is attn_run()'s array of planned problems. It is computed in phases; a phase is one parallel loop over the
 * items of all problems together, so many small problems cost no more barriers than one:
 *
 *     phase            an item is                          does
 *     FLASH_PREPARE    a key tile; a head's mask rows      packs K and V for products; extremes of the FlashMask bounds
 *     FLASH_FORWARD    a row tile against a span of keys   scores, softmax, O; finished, or left as a partial result
 *     FLASH_MERGE      a row tile whose keys were split    partial results added up in order
 *     FLASH_ROWS       a row tile                          packs Q and dO, lse and delta; zeros dQ and dbias (backward)
 *     FLASH_KEYS       a chunk of keys                     dK, dV of the chunk, its share of dQ (backward)
 *     FLASH_FINISH     a row tile; a head                  dQ in its dtype; dsinks, dalibi_slopes (backward)
 *
 * An observe has items of its own in FORWARD, KEYS and FINISH: see observe.c.
 *
 * A phase without items costs nothing. A backward that was not given out and lse runs the forward phases too, and
 * keeps of them lse and delta only.
 *
 * A row tile is up to BM rows of one key/value head: consecutive queries of one query head, or, where a sequence is
 * short, all the queries of several heads of the group (one decoded token of 8 heads is 8 rows of one product, not
 * 8 products):
 *
 *     long:   head h, queries i0 .. i0 + n - 1            rows = n
 *     short:  heads h .. h + heads - 1, queries 0 .. n-1  rows = heads * n, head by head
 *
 * Invariants
 * 1. Tile sizes, paths, splits and the order of all sums are functions of one sequence's Sq, Sk and of the
 * problem's H / Hk, D, Dv, dtype and options: never of B, of the other sequences, of the other problems or of the
 * number of threads.
 * 2. No Sq x Sk matrix exists. Scratch is a few tiles a thread; the workspace is bounded by a multiple of the
 * tensors.
 * 3. The workspace can be sized without reading cu_seqlens or seqlens: flash_run_bytes() uses bounds on their sums. */
#ifndef ATTN_CPU_FLASH_H
#define ATTN_CPU_FLASH_H

#include <assert.h>
#include <math.h>

#include "kernels/cpu/pool.h"
#include "kernels/cpu/simd.h"
#include "kernels/tiles.h"

/* The features of this backend's fast kernels, each tensor and option by name. A feature that is added to the
 * tables of attention.h goes to the kernel "double" until it is added here. */
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
    FLASH_UNIT = 32,        /* rows and keys are laid out in multiples of this: SIMD_PANEL, and the largest
                             * k_multiple */
    FLASH_MASK_BLOCK = 64,  /* keys whose FlashMask bounds share one summary */
    FLASH_DOT_ROWS = 8,     /* row tiles of up to this many rows take FLASH_DOTS, where reading K and V is the
                             * whole cost */
    FLASH_MAP_COLUMNS = 64, /* cells of a row of map that one item computes */
    FLASH_BUNDLE_ROWS = 32, /* rows of a bundle: their scores and sums stay in L1 */
};

/* How a sequence's forward is computed. */
enum flash_path {
    FLASH_DOTS, /* decode.c: few rows; K and V are read as they lie in memory */
    FLASH_TILES /* forward.c: matrix products on packed tiles */
};

/* The lse of a row as its largest score and the logarithm of the rest, in natural units. -inf and 0: the row
 * sees no key. */
struct flash_lse {
    double top, rest;
};

/* What packing found in a tile. */
enum flash_values {
    FLASH_TAME = 0,
    FLASH_LARGE = 1,  /* some values are so large (SIMD_TAME) that their sum may be infinite */
    FLASH_UNREAL = 2, /* some values are NaN or infinite; the pack has zeros in their place */
    FLASH_WILD = 4,   /* some queries or keys are so large (SIMD_TAME), or not finite, that products may overflow */
};

/* How lse in float32 fails to determine P of a row. */
enum flash_strangeness {
    FLASH_EXACT, /* each score is computed in double; lse.top is NaN where every score of the row is NaN */
    FLASH_ALIKE, /* every key that the row sees has the score z */
    FLASH_SINGLE /* the row sees one key: P is 1 where lse and that key's score differ only by rounding */
};
struct flash_strange {
    struct flash_lse lse;
    double z;
    enum flash_strangeness kind;
};

/* One sequence of a problem. The prefix sums (…0) count over all sequences before this one, with all
 * key/value heads. */
struct flash_sequence {
    attn_sequence s;
    enum flash_path path;
    bool packs;           /* FLASH_PREPARE packs K and V once; otherwise each row tile packs them for itself */
    int heads;            /* query heads in a row tile */
    int bundle;           /* key/value heads that one item of FLASH_FORWARD computes: 1, or more for FLASH_DOTS */
    int64_t tiles;        /* row tiles of a key/value head */
    int64_t rows;         /* their rows, each tile rounded up to FLASH_UNIT */
    int64_t splits, span; /* spans of keys that a row tile is split into (1: not split), and keys of a span */
    int64_t part_rows;    /* rows of partial results of a key/value head, per span; 0 where nothing is split */
    int64_t tiles0, rows0, items0, packs0, keys0, parts0, chunks0;
};

/* A row tile. */
struct flash_tile {
    const struct flash_sequence *seq;
    int64_t b, hk;   /* sequence, key/value head */
    int64_t index;   /* number of the tile in its key/value head */
    int64_t h, i0;   /* first head and first query */
    int heads, n;    /* heads, queries of each */
    int rows;        /* heads * n */
    int64_t row0;    /* its first row in the arrays by row, a multiple of FLASH_UNIT */
    attn_range keys; /* keys that some query of the tile sees, by causal, window and lengths */
    attn_range all;  /* that each of them sees */
};

/* The part of a row tile that meets keys j0 + c0 .. j0 + c0 + cols - 1. */
struct visible_block {
    int c0, cols;
    bool ranged; /* causal or window hides some column from some row */
    bool masked; /* the same, by FlashMask */
};

/* A problem, resolved and laid out in memory. */
struct flash {
    const attn_problem *p;
    const struct simd *simd;
    /* The compute type of products; and that of P V in a forward, which is equal or more exact. Scores have
     * one type in forward and backward, because lse must be the sum of the P from which gradients are made. */
    const struct simd_type *type, *forward_type;
    attn_geometry g;
    bool backward, observe, recompute; /* recompute: backward that starts with a forward */
    bool plain;                        /* scores need no more than a scale > 0 and ranges of columns */
    bool may_overflow;                 /* products of these dtypes of q and k can leave float32 */
    bool dropout;
    uint32_t drop_threshold;
    float drop_scale; /* 1 / (1 - p); 1 without dropout */
    int BM, BN;       /* forward: rows and keys of a tile */
    int Bk;           /* backward: keys of a chunk */
    int bundle;       /* key/value heads of an item of FLASH_DOTS */
    int64_t B;
    const int *cancel;     /* the run's cancel flag; attn_is_cancelled() reads it between tiles */
    int64_t scratch_bytes; /* size of a thread's scratch, enough for each phase that uses it */

    struct flash_sequence *seq; /* [B] */

    /* FLASH_TILES with packs: for each key tile, K^T as B operand, then V as B operand. */
    char *kv;
    uint8_t *kv_values;           /* enum flash_values of each key tile */
    int64_t kv_key_bytes;         /* kv bytes of a key */
    attn_mask_extremes *extremes; /* [B][mask heads][mask_blocks] */
    int64_t mask_heads, mask_blocks;
    _Atomic float *most; /* [B][Hk][2], see exact.c; negative: not computed yet */

    /* Partial results of split sequences: O [part rows][Dv], then m and l. */
    float *part_O, *part_m, *part_l;

    /* By row, backward. */
    char *Qa, *dOa;                /* A operands, row by row */
    char *Qat, *dOat;              /* transposed A operands, tile by tile */
    float *lse2, *delta, *dQ;      /* lse2 is NaN where `strange` holds the row's lse */
    struct flash_strange *strange; /* see exact.c; written only for the rows that need it */
    uint8_t *row_values; /* enum flash_values of a row tile's Q (WILD) and dO (UNREAL); by row0 / FLASH_UNIT */
    int64_t q_lda, do_lda, q_unit_bytes, do_unit_bytes, dq_ld; /* unit: bytes of FLASH_UNIT rows of Qat, dOat */

    /* By row, observe. P = exp2(z - row_base) row_inverse; row_base is INFINITY where P is 0, and NaN where
     * `strange` holds the row's lse. */
    float *row_base, *row_inverse, *row_most, *row_entropy;
    int64_t observe_chunks, shown_keys; /* items of FLASH_KEYS that are chunks; keys of a row that key_mass has */

    /* Backward, by chunk. */
    int64_t chunks; /* chunks of a sequence when not packed, of the longest one when packed */
    struct flash_progress *progress;
    double *slope_parts;                      /* [B][H][chunks] */
    int64_t dbias_classes;                    /* > 0: dbias is a sum over heads or batch rows; see backward.c */
    int64_t tiles_all, packs_all, chunks_all; /* sums over all sequences */
    int64_t dbias_slices, dbias_blocks;       /* FLASH_ROWS zeroes dbias in this many slices; slices per matrix */

    int64_t items[FLASH_PHASES], first[FLASH_PHASES]; /* number of items of this problem; number of items of
                                                       * all problems before it */
};

/* Progress of a chunk of keys: it will not touch row tiles before `tile` any more. It fills a cache line of
 * its own. */
struct flash_progress {
    _Alignas(64) _Atomic int64_t tile;
};

/* Scratch of a thread, sized for the largest problem of the run. Each user carves what it needs, from the start. */
struct flash_scratch {
    char *memory;
};

struct flash_run {
    const struct simd *simd;
    int count;
    struct flash *problems;
    char *scratch;
    int64_t scratch_bytes; /* of a thread */
    int64_t items[FLASH_PHASES];
    const int *cancel;
    bool small; /* the run is too small to wake other threads */
};

/* Bytes of workspace that suffice for these problems with any lengths of their sequences. TOO_LARGE on overflow. */
attn_status flash_run_bytes(const struct simd *simd, int threads, const attn_plan *plans, int count, size_t *bytes,
                            attn_error *err);

/* flash_run_bytes() with the actual lengths: the size that a call without a workspace allocates. */
attn_status flash_run_bytes_exact(const struct simd *simd, int threads, const attn_plan *plans, int count,
                                  size_t *bytes, attn_error *err);

/* Computes all problems and returns when done. The workspace is 64-byte aligned. Returns false where *cancel
 * (may be NULL) was set and not all was computed. */
bool flash_run(const struct simd *simd, struct pool *pool, const attn_plan *plans, int count, void *workspace,
               const int *cancel);

/* ---- A bump allocator that also measures ------------------------------------------------------------------------- */

/* With base NULL it only adds up sizes, so that the same code first measures memory and then cuts it. used is
 * INT64_MAX after an overflow. */
struct flash_arena {
    char *base;
    int64_t used;
};

/* Takes count * bytes at a multiple of 64. NULL while measuring. */
void *flash_take(struct flash_arena *arena, int64_t count, int64_t bytes);

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

/* Row tile `index` of key/value head hk of sequence b. */
struct flash_tile flash_tile_of(const struct flash *f, int64_t b, int64_t hk, int64_t index);

/* The sequence to which an item belongs. `field` is the offset of a prefix sum in struct flash_sequence. */
int64_t flash_find(const struct flash *f, size_t field, int64_t item);
#define FLASH_FIND(f, prefix, item) flash_find(f, offsetof(struct flash_sequence, prefix), item)

/* What a row tile sees of the keys [j0, j1), where j0 is a multiple of FLASH_UNIT. Returns false where it
 * sees none. */
bool flash_visible_block(const struct flash *f, const struct flash_tile *t, int64_t j0, int64_t j1,
                         struct visible_block *block);

/* Scratch for the two functions below: limits of BM rows and of BN or Bk columns. */
struct flash_limits {
    int *lo, *hi;
    int32_t *hide[4];
    uint8_t *keep; /* keep_mask by rows and columns; NULL where it keeps all keys */
};
void flash_scores_take_limits(const struct flash *f, struct flash_arena *arena, int rows, int cols,
                              struct flash_limits *limits);

/* Turns raw products S (rows x block.cols) into scores, hidden ones -inf, and returns the factor that is still to be
 * applied in base 2 (the c of softmax() and gradient()). `cap`: NULL, or as in struct simd_score. `wild`: some products
 * may not be finite though the scores are (exact.c). */
float flash_scores(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                   float *S, int64_t lds, float *cap, const struct flash_limits *limits, bool wild);

/* Writes which pairs of a block dropout keeps: 1 or 0. The factor 1 / (1 - p) is applied after the sums
 * (f->drop_scale): P times it would be rounded to the operand's type, and a P of 1 would not stay exact. */
void flash_drop(const struct flash *f, const struct flash_tile *t, int64_t j0, const struct visible_block *block,
                float *kept, int64_t ld);

/* flash_drop() for one row and up to FLASH_MASK_BLOCK keys from key j on. */
void flash_drop_row(const struct flash *f, int64_t b, int64_t h, int64_t i, int64_t j, int n, float *kept);

/* The rows of a tile in a tensor with axes like q's, as one strided matrix. They are read in place, or
 * gathered in `scratch` (t->rows * cols elements) where the tile has several heads. */
const void *flash_gather(const struct flash_tile *t, const attn_view *view, int cols, void *scratch, int64_t *stride);

/* Address of element (b, h, row) of a view. Packed: `row` counts inside the sequence, whose first row is `start`. */
static inline void *flash_at(const attn_view *view, int64_t b, int64_t h, int64_t row)
{
    return (char *)view->data + attn_at(view, b, h, row) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* Address of key or value `line` (k_start + j) of a key/value head, with or without pages. */
static inline void *flash_key_at(const struct flash *f, const attn_view *view, int64_t b, int64_t hk, int64_t line)
{
    return (char *)view->data + attn_key_at(&f->g, view, b, hk, line) * (int64_t)attn_dtype_bytes(view->dtype);
}

/* Rows of k or v from `line` on as a strided matrix. It has as many of `most` rows as one matrix can have,
 * and a multiple of `unit` where more rows follow. Where fewer than `unit` rows lie in one page, `unit` rows
 * are gathered in `scratch` (unit * cols elements). Work on units of rows thus does not depend on where pages
 * end. */
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

/* Checks that a user of a thread's scratch took no more than there is; each user calls it after its last take. */
static inline void flash_scratch_end(const struct flash *f, const struct flash_arena *arena)
{
    assert(arena->base == NULL || arena->used <= f->scratch_bytes);
    (void)f, (void)arena;
}

/* Row of (h, i) in the arrays by row. */
int64_t flash_row_of(const struct flash *f, int64_t b, int64_t h, int64_t i);

/* The factor of q . k for a key/value head: the problem's scale times the fp8 scales of q and k. */
double flash_scale(const struct flash *f, int64_t b, int64_t hk);

/* pack_b or pack_at, with 0 in place of NaN and infinity. Returns enum flash_values. `scratch`: FLASH_UNIT *
 * cols floats. */
typedef bool (*flash_pack)(int rows, int cols, const void *X, attn_dtype dtype, int64_t stride, void *operand,
                           int64_t ld);
int flash_pack_clean_b(const struct flash *f, const struct simd_type *type, int rows, int cols, const void *X,
                       attn_dtype dtype, int64_t stride, void *B, int64_t ldb, float *scratch);
int flash_pack_clean_at(const struct flash *f, int rows, int cols, const void *X, attn_dtype dtype, int64_t stride,
                        void *A, int64_t lda, float *scratch);

/* ---- The phases -------------------------------------------------------------------------------------------------- */

/* Each computes item `item` of this problem's phase. Its scratch_bytes function says how much scratch a
 * thread needs for it. */
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

/* decode.c: item `rest` of a sequence of path FLASH_DOTS: a bundle of key/value heads against one span of keys. */
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
/* Row in part_O, part_m and part_l of the partial result of a row tile and a span. */
int64_t flash_row_end_part_row(const struct flash_tile *t, int64_t split);

/* delta - dlse: rowsum(dO O) of n rows of O, for the queries of head h from `first` (a row of the tensor) on.
 * dO is rounded as for the products. sum_j P (dP - delta) must be 0; otherwise sums of it times a large
 * number are wrong. */
void flash_deltas(const struct flash *f, int64_t b, int64_t h, int64_t first, int n, const void *O, attn_dtype dtype,
                  int64_t stride, float *delta);

/* Loads a row of dO, rounded as for the products. */
void flash_load_dout(const struct flash *f, int64_t b, int64_t h, int64_t line, float *row);

/* Computes the row of query i of head h in double (exact.c). `out`: Dv numbers, or NULL where only lse is needed. */
struct flash_lse flash_exact_row(const struct flash *f, int64_t b, int64_t h, int64_t i, double *out);

/* The largest scores of a row, in descending order. */
struct flash_top {
    int most, count; /* how many are wanted, and there */
    int32_t key[ATTN_MAX_TOP];
    double z[ATTN_MAX_TOP];
};

/* A score must be above this to be among them. */
static inline double flash_top_least(const struct flash_top *top)
{
    return top->count < top->most ? -INFINITY : top->z[top->count - 1];
}

/* Adds one that is. */
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

/* Does row r of a tile see one key and no other? */
bool flash_exact_sees_one_key(const struct flash *f, const struct flash_tile *t, int r);

/* Stores a row's lse for gradient(): in lse2, or in `strange` where lse2 cannot hold it. */
static inline void flash_keep_lse(const struct flash *f, int64_t row, struct flash_strange lse)
{
    const double whole = lse.lse.top + lse.lse.rest;
    const bool holds = lse.kind == FLASH_EXACT && fabs(whole) < (double)ATTN_LSE_MOST;
    f->strange[row] = lse;
    f->lse2[row] = lse.lse.top == -INFINITY ? INFINITY : holds ? (float)(whole * M_LOG2E) : NAN;
}

/* Scores of row r of a tile for gradient(), minus their lse, in units of c (natural logarithms). S and, where
 * `cap` is not NULL, softcap's factor for the gradient are written for columns j .. j + cols - 1. */
void flash_exact_scores(const struct flash *f, const struct flash_tile *t, int r, int64_t j, int cols,
                        struct flash_lse lse, double c, float *S, float *cap);

/* Computes again the scores that are NaN after score(), because their products may have overflowed, and
 * softcap's factor for their gradients. */
void flash_exact_mend_scores(const struct flash *f, const struct flash_tile *t, int64_t j, int cols, float *S,
                             int64_t lds, float *cap);

#endif
