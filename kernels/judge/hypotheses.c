/* hypotheses.c: the table of mistakes that a judge (which checks a caller's results) tests. */
#include "kernels/judge/hypotheses.h"

#include <math.h>
#include <stdio.h>

/* Begins the definition of a function for the member `apply` of a hypothesis (a mistake). Most functions do not use all
 * parameters. */
#define HYPOTHESIS(name) \
    static bool name(const struct hypothesis_facts *f, int n, variation *v, char words[HYPOTHESIS_WORDS])
#define UNUSED (void)f, (void)n, (void)v, (void)words

static const int64_t tiles[] = { 16, 32, 64, 128, 256 };
static const int64_t splits[] = { 2, 4, 8, 16 };
enum { TILES = 5, SPLITS = 4 };

static bool has(const struct hypothesis_facts *f, attn_tensor_id id)
{
    return f->g.view[id].data != NULL;
}

static bool is_given(const struct hypothesis_facts *f, attn_tensor_id id)
{
    return f->given >> id & 1;
}

static void say_tiles(char words[HYPOTHESIS_WORDS], int64_t tile, const char *more)
{
    snprintf(words, HYPOTHESIS_WORDS, "tiles of %lld keys%s", (long long)tile, more);
}

/* ---- Mistakes of layout ------------------------------------------------------------------------------------------ */

/* Returns whether a tensor has at least as much memory as a contiguous tensor of its shape. A tensor with a broadcast
 * axis (stride 0) has less. A mistake that reads such a tensor with other strides would read past its end. */
static bool has_whole_memory(const attn_tensor *t)
{
    int64_t contiguous = 1;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        if (t->shape[axis] > 1 && t->stride[axis] < contiguous) return false;
        contiguous *= t->shape[axis];
    }
    return true;
}

/* Makes compute.c read a tensor with heads and rows exchanged. Returns false if the exchange changes nothing or is not
 * possible. */
static bool swap_layout(const struct hypothesis_facts *f, variation *v, attn_tensor_id id)
{
    const attn_dims *const d = &f->g.dims;
    const bool of_keys = id == ATTN_T_k || id == ATTN_T_v;
    const int64_t heads = of_keys ? d->Hk : d->H, rows = of_keys     ? (d->packed ? d->total_k : d->Sk)
                                                         : d->packed ? d->total_q
                                                                     : d->Sq;
    const int64_t columns = id == ATTN_T_v ? d->Dv : d->D;
    attn_view *const view = &v->g.view[id];
    if (!view->data || heads < 2 || rows < 2 || f->g.page_table || !has_whole_memory(&f->p->tensor[id])) return false;
    const bool rows_first = view->row > view->head;
    view->head = rows_first ? rows * columns : columns;
    view->row = rows_first ? columns : heads * columns;
    return true;
}

HYPOTHESIS(layout_q)
{
    UNUSED;
    return swap_layout(f, v, ATTN_T_q);
}

HYPOTHESIS(layout_k)
{
    UNUSED;
    return swap_layout(f, v, ATTN_T_k);
}

HYPOTHESIS(layout_v)
{
    UNUSED;
    return swap_layout(f, v, ATTN_T_v);
}

/* The mistake `layout_out`: some results were written with heads and rows exchanged. Each variant exchanges another set
 * of results. */
HYPOTHESIS(layout_out)
{
    static const uint64_t sets[] = {
        ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv),
        ATTN_TENSOR_BIT(out),
        ATTN_TENSOR_BIT(dq),
        ATTN_TENSOR_BIT(dk),
        ATTN_TENSOR_BIT(dv),
        ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv),
    };
    (void)words;
    const uint64_t set = sets[n] & f->given;
    if (set == 0 || (n > 0 && set == (sets[0] & f->given))) return false;
    v->swapped |= set;
    return true;
}

HYPOTHESIS(layout_all)
{
    UNUSED;
    if (n == 0) {
        v->swapped_problem = true;
        return f->g.dims.H > 1 && f->most_q > 1 && !f->g.dims.packed && !f->g.page_table;
    }
    const bool q = swap_layout(f, v, ATTN_T_q), k = swap_layout(f, v, ATTN_T_k), values = swap_layout(f, v, ATTN_T_v);
    v->swapped |= n == 1 ? f->given & ATTN_TENSOR_BIT(out) : 0;
    return q && (k || values) && !f->backward;
}

HYPOTHESIS(lse_layout)
{
    UNUSED;
    v->swapped |= ATTN_TENSOR_BIT(lse);
    return is_given(f, ATTN_T_lse) && f->g.dims.H > 1;
}

HYPOTHESIS(keys_transposed)
{
    UNUSED;
    const attn_dims *const d = &f->g.dims;
    attn_view *const k = &v->g.view[ATTN_T_k];
    const int64_t rows = d->packed ? d->total_k : d->Sk;
    if (f->g.page_table || d->D < 2 || rows < 2 || !has_whole_memory(&f->p->k)) return false;
    k->row = 1;
    k->head = rows;
    v->k_column = d->Hk * rows;
    if (k->batch == 0 || f->p->layout == ATTN_BSHD) return true;
    /* in layout bhsd k is [B, Hk, Sk, D], but the kernel with this mistake reads it as [B, Hk, D, Sk] */
    k->head = d->D * rows;
    v->k_column = rows;
    return true;
}

HYPOTHESIS(k_v_swapped)
{
    UNUSED;
    const attn_view k = v->g.view[ATTN_T_k], scale = v->g.view[ATTN_T_k_scale];
    v->g.view[ATTN_T_k] = v->g.view[ATTN_T_v], v->g.view[ATTN_T_k_scale] = v->g.view[ATTN_T_v_scale];
    v->g.view[ATTN_T_v] = k, v->g.view[ATTN_T_v_scale] = scale;
    return f->g.dims.D == f->g.dims.Dv;
}

/* ---- Mistakes of scale, and of the order of operations ----------------------------------------------------------- */

HYPOTHESIS(scale_missing)
{
    UNUSED;
    v->g.scale = 1;
    return f->g.scale != 1;
}

HYPOTHESIS(scale_twice)
{
    UNUSED;
    v->g.scale *= f->g.scale;
    return f->g.scale != 1 && f->g.scale != 0;
}

HYPOTHESIS(scale_of_dv)
{
    UNUSED;
    v->g.scale = 1 / sqrt((double)f->g.dims.Dv);
    return f->g.dims.Dv != f->g.dims.D && v->g.scale != f->g.scale;
}

HYPOTHESIS(scale_inverse)
{
    UNUSED;
    v->g.scale = 1 / f->g.scale;
    return f->g.scale != 0 && fabs(f->g.scale) != 1;
}

HYPOTHESIS(softcap_missing)
{
    UNUSED;
    v->g.softcap = 0;
    return f->g.softcap > 0;
}

HYPOTHESIS(softcap_before_scale)
{
    UNUSED;
    v->softcap_first = true;
    return f->g.softcap > 0 && f->g.scale != 1;
}

HYPOTHESIS(bias_missing)
{
    UNUSED;
    v->g.view[ATTN_T_bias].data = NULL;
    return has(f, ATTN_T_bias);
}

HYPOTHESIS(bias_before_scale)
{
    UNUSED;
    v->bias_first = true;
    return has(f, ATTN_T_bias) && f->g.scale != 1;
}

HYPOTHESIS(bias_in_base2)
{
    UNUSED;
    v->bias_factor = 0.69314718055994530942;
    return has(f, ATTN_T_bias);
}

/* ---- Mistakes of masks ------------------------------------------------------------------------------------------- */

/* Returns how many keys the window lets a query see to its right, as if there were no causal mask. */
static int64_t right_of_window(const struct hypothesis_facts *f)
{
    return f->p->window_right < 0 ? ATTN_UNBOUNDED : attn_min64(f->p->window_right, ATTN_UNBOUNDED);
}

HYPOTHESIS(causal_missing)
{
    UNUSED;
    v->g.right = right_of_window(f);
    return f->g.causal && v->g.right != f->g.right;
}

HYPOTHESIS(causal_unasked)
{
    UNUSED;
    if (f->g.right <= 0) return false;
    v->g.right = 0;
    v->g.top_left = n == 0 ? f->g.top_left : !f->g.top_left;
    return n == 0 || (f->uneven && f->g.left == ATTN_UNBOUNDED);
}

HYPOTHESIS(alignment)
{
    UNUSED;
    v->g.top_left = !v->g.top_left;
    return f->uneven && (f->g.right != ATTN_UNBOUNDED || f->g.left != ATTN_UNBOUNDED);
}

HYPOTHESIS(causal_off_by_one)
{
    UNUSED;
    v->more_right = 1;
    return f->g.causal;
}

HYPOTHESIS(causal_strict)
{
    UNUSED;
    v->more_right = -1;
    return f->g.causal;
}

HYPOTHESIS(window_missing)
{
    UNUSED;
    v->g.left = n == 2 ? f->g.left : ATTN_UNBOUNDED;
    if (n != 1 && !f->g.causal) v->g.right = ATTN_UNBOUNDED;
    return v->g.left != f->g.left || v->g.right != f->g.right;
}

HYPOTHESIS(window_off_by_one)
{
    static const int left[] = { 1, -1, 0, 0, 1, -1 }, right[] = { 0, 0, 1, -1, 1, -1 };
    const bool bounded_left = f->g.left < ATTN_UNBOUNDED, bounded_right = f->g.right < ATTN_UNBOUNDED && !f->g.causal;
    if ((left[n] && !bounded_left) || (right[n] && !bounded_right)) return false;
    if (f->g.left + left[n] < 0 || f->g.right + right[n] < 0) return false;
    v->g.left += left[n];
    v->g.right += right[n];
    snprintf(words, HYPOTHESIS_WORDS, "%s on the %s", left[n] + right[n] > 0 ? "one key more" : "one key less",
             left[n] && right[n] ? "left and on the right"
             : left[n]           ? "left"
                                 : "right");
    return true;
}

HYPOTHESIS(mask_inverted)
{
    UNUSED;
    v->keep_inverted = true;
    return has(f, ATTN_T_keep_mask) || has(f, ATTN_T_mask_startend_rows);
}

HYPOTHESIS(mask_ignored)
{
    UNUSED;
    static const attn_tensor_id masks[] = { ATTN_T_keep_mask, ATTN_T_mask_startend_rows };
    v->g.view[masks[n]].data = NULL;
    return has(f, masks[n]);
}

/* Mistake: the kernel attends to padding keys. In variants 0 and 1 it attends to all keys of the tensor, in other
 * variants to the padding keys that fill the last tile. In odd variants, causal and window still count from the true
 * length of the row. With pages, the kernel attends only to the padding keys of the last page. Entries of the page
 * table after that page may be arbitrary. */
HYPOTHESIS(padding_attended)
{
    const bool placed = f->g.right != ATTN_UNBOUNDED || f->g.left != ATTN_UNBOUNDED || has(f, ATTN_T_alibi_slopes);
    v->padding_kept = n % 2 == 1;
    if (!f->has_gaps || (f->g.page_table && n > 1)) return false;
    if (f->g.page_table) v->whole_keys = f->g.dims.page_size;
    else if (n < 2) v->g.seqlens_k = NULL;
    else v->whole_keys = tiles[n / 2 - 1], say_tiles(words, v->whole_keys, "");
    return n % 2 == 0 || placed;
}

HYPOTHESIS(sequences_mixed)
{
    UNUSED;
    v->one_sequence = true;
    v->g.seqlens_q = v->g.seqlens_k = NULL;
    return f->mixes && f->g.dims.packed && f->g.dims.B > 1;
}

HYPOTHESIS(alibi_missing)
{
    UNUSED;
    v->g.view[ATTN_T_alibi_slopes].data = NULL;
    return has(f, ATTN_T_alibi_slopes);
}

HYPOTHESIS(alibi_corner)
{
    UNUSED;
    v->alibi_corner = true;
    return has(f, ATTN_T_alibi_slopes) && f->uneven;
}

HYPOTHESIS(alibi_sign)
{
    UNUSED;
    v->alibi_factor = -1;
    return has(f, ATTN_T_alibi_slopes);
}

/* ---- Mistakes of heads ------------------------------------------------------------------------------------------- */

HYPOTHESIS(heads_interleaved)
{
    UNUSED;
    v->heads = HEADS_INTERLEAVED;
    return f->g.dims.Hk > 1 && f->g.group > 1;
}

HYPOTHESIS(heads_reversed)
{
    UNUSED;
    v->heads = HEADS_REVERSED;
    return f->g.dims.Hk > 1;
}

HYPOTHESIS(group_not_summed)
{
    v->only_member = n == 0 ? v->g.group - 1 : 0;
    snprintf(words, HYPOTHESIS_WORDS, "the %s head of each group", n == 0 ? "last" : "first");
    return f->backward && v->g.group > 1;
}

/* ---- Mistakes of the softmax ------------------------------------------------------------------------------------- */

HYPOTHESIS(lse_base2)
{
    UNUSED;
    v->lse_factor = 1.44269504088896340736;
    return is_given(f, ATTN_T_lse);
}

HYPOTHESIS(lse_without_max)
{
    UNUSED;
    v->lse_without_max = true;
    return is_given(f, ATTN_T_lse);
}

HYPOTHESIS(empty_rows_inf)
{
    UNUSED;
    v->empty_lse = EMPTY_INFINITE;
    if (n == 1) v->empty_out = EMPTY_INFINITE;
    return f->has_empty && (is_given(f, ATTN_T_lse) || n == 1);
}

HYPOTHESIS(empty_rows_nan)
{
    UNUSED;
    if (n != 1) v->empty_out = EMPTY_NAN;
    if (n != 0) v->empty_lse = EMPTY_NAN;
    return f->has_empty;
}

HYPOTHESIS(not_normalized)
{
    UNUSED;
    v->softmax = n == 0 ? SOFTMAX_NOT_NORMALIZED : SOFTMAX_RAW;
    return is_given(f, ATTN_T_out);
}

HYPOTHESIS(not_rescaled)
{
    static const char *const what[] = { "", ", the sum not rescaled", ", out and the sum not rescaled" };
    const int64_t tile = tiles[n % TILES];
    const int which = n / TILES % 3;
    v->softmax = (enum variation_softmax)(SOFTMAX_OUT_NOT_RESCALED + which);
    v->tile = tile;
    v->backwards = n >= 3 * TILES;
    say_tiles(words, tile, what[which]);
    return f->most_k > tile && f->given & (ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(lse));
}

/* Makes the mistake of leaving out one tile of keys. The first TILES variants cut all keys into tiles, and `of_all`
 * says which tile is dropped. All other variants cut only the keys that causal and window let the row see, and
 * `of_seen` says which tile is dropped. */
static bool drop(const struct hypothesis_facts *f, int n, variation *v, char words[HYPOTHESIS_WORDS],
                 enum variation_drop of_all, enum variation_drop of_seen)
{
    const bool placed = f->g.right != ATTN_UNBOUNDED || f->g.left != ATTN_UNBOUNDED;
    v->tile = tiles[n % TILES];
    v->drop = n < TILES ? of_all : of_seen;
    say_tiles(words, v->tile, "");
    return (n < TILES && f->most_k > v->tile) || (n >= TILES && placed);
}

HYPOTHESIS(last_tile_dropped)
{
    return drop(f, n, v, words, DROP_LAST, DROP_LAST_SEEN);
}

HYPOTHESIS(first_tile_dropped)
{
    return drop(f, n, v, words, DROP_FIRST, DROP_FIRST_SEEN);
}

HYPOTHESIS(tail_unmasked)
{
    v->tail = tiles[n % TILES];
    v->tail_is_hidden = n >= TILES;
    say_tiles(words, v->tail, "");
    return n < TILES || f->g.right != ATTN_UNBOUNDED;
}

HYPOTHESIS(sink_missing)
{
    UNUSED;
    v->g.view[ATTN_T_sinks].data = NULL;
    v->sink_weight = 0;
    return has(f, ATTN_T_sinks);
}

HYPOTHESIS(sink_per_split)
{
    v->sink_weight = (double)splits[n];
    snprintf(words, HYPOTHESIS_WORDS, "%lld splits", (long long)splits[n]);
    return has(f, ATTN_T_sinks);
}

HYPOTHESIS(splits_unweighted)
{
    v->softmax = SOFTMAX_SPLITS_UNWEIGHTED;
    v->tile = splits[n % SPLITS];
    v->over_all = n >= SPLITS;
    snprintf(words, HYPOTHESIS_WORDS, "%lld splits", (long long)v->tile);
    return f->most_k >= v->tile && is_given(f, ATTN_T_out);
}

/* ---- Mistakes of precision --------------------------------------------------------------------------------------- */

static const attn_dtype halves[] = { ATTN_F16, ATTN_BF16 };

HYPOTHESIS(scores_in_16_bit)
{
    UNUSED;
    v->round_dtype = halves[n % 2];
    v->rounding = (enum variation_rounding)(ROUND_SCORES + n / 2);
    snprintf(words, HYPOTHESIS_WORDS, "%s", attn_dtype_name(v->round_dtype));
    return true;
}

HYPOTHESIS(accumulated_in_16_bit)
{
    static const int64_t terms[] = { 1, 16, 64 };
    v->rounding = n < 6 ? ROUND_SUMS_BUT_QK : ROUND_SUMS;
    v->round_dtype = halves[n % 2];
    v->tile = terms[n / 2 % 3];
    snprintf(words, HYPOTHESIS_WORDS, "%s", attn_dtype_name(v->round_dtype));
    return f->given != ATTN_TENSOR_BIT(lse);
}

HYPOTHESIS(tf32_products)
{
    UNUSED;
    v->rounding = (enum variation_rounding)(ROUND_TF32 + n);
    return f->p->q.dtype == ATTN_F32;
}

HYPOTHESIS(truncated)
{
    UNUSED;
    v->rounding = n < 2 ? CUT_RESULTS : CUT_P;
    v->round_dtype = halves[n % 2];
    snprintf(words, HYPOTHESIS_WORDS, "%s %s", n < 2 ? "results, to" : "P, to", attn_dtype_name(v->round_dtype));
    return f->given != ATTN_TENSOR_BIT(lse) && !(f->p->q.dtype == ATTN_BF16 && v->round_dtype == ATTN_F16);
}

/* ---- Mistakes of dropout ----------------------------------------------------------------------------------------- */

HYPOTHESIS(dropout_missing)
{
    UNUSED;
    v->dropout = DROPOUT_MISSING;
    return f->p->dropout_p > 0;
}

HYPOTHESIS(dropout_unscaled)
{
    UNUSED;
    v->dropout = DROPOUT_UNSCALED;
    return f->p->dropout_p > 0;
}

HYPOTHESIS(dropout_scaled_twice)
{
    UNUSED;
    v->dropout = DROPOUT_SCALED_TWICE;
    return f->p->dropout_p > 0;
}

HYPOTHESIS(dropout_other_seed)
{
    const uint64_t seeds[] = { 0, 1, 42, f->p->seed + 1, f->p->seed - 1 };
    v->seed = seeds[n];
    snprintf(words, HYPOTHESIS_WORDS, "seed %llu", (unsigned long long)v->seed);
    return f->p->dropout_p > 0 && v->seed != f->p->seed;
}

HYPOTHESIS(dropout_mask_transposed)
{
    UNUSED;
    v->dropout = DROPOUT_TRANSPOSED;
    return f->p->dropout_p > 0;
}

/* ---- Mistakes of the backward ------------------------------------------------------------------------------------ */

HYPOTHESIS(delta_missing)
{
    UNUSED;
    v->no_delta = true;
    v->no_dlse = n == 1;
    return f->backward && (n == 0 || has(f, ATTN_T_dlse));
}

HYPOTHESIS(dlse_missing)
{
    UNUSED;
    v->no_dlse = true;
    return f->backward && has(f, ATTN_T_dlse);
}

/* Sets *of to `factor`. *of is the number by which a mistake multiplies dq or dk (tensor `id`). Returns false if the
 * caller did not give tensor `id`, or if the factor changes nothing. */
static bool has_factor(const struct hypothesis_facts *f, attn_tensor_id id, double factor, double *of)
{
    *of = factor;
    return is_given(f, id) && f->g.scale != 0 && factor != 1;
}

HYPOTHESIS(scale_missing_in_dq)
{
    UNUSED;
    return has_factor(f, ATTN_T_dq, 1 / f->g.scale, &v->dq_factor);
}

HYPOTHESIS(scale_missing_in_dk)
{
    UNUSED;
    return has_factor(f, ATTN_T_dk, 1 / f->g.scale, &v->dk_factor);
}

HYPOTHESIS(scale_twice_in_dq)
{
    UNUSED;
    return has_factor(f, ATTN_T_dq, f->g.scale, &v->dq_factor);
}

HYPOTHESIS(scale_twice_in_dk)
{
    UNUSED;
    return has_factor(f, ATTN_T_dk, f->g.scale, &v->dk_factor);
}

HYPOTHESIS(dv_of_unnormalized_p)
{
    UNUSED;
    v->dv_unnormalized = true;
    return is_given(f, ATTN_T_dv);
}

HYPOTHESIS(softcap_derivative_missing)
{
    UNUSED;
    v->no_softcap_derivative = true;
    return f->backward && f->g.softcap > 0;
}

HYPOTHESIS(dq_last_tile_only)
{
    static const int64_t rows[] = { 1, 0, 16, 32, 64, 128 };
    const bool placed = f->g.right != ATTN_UNBOUNDED || f->g.left != ATTN_UNBOUNDED;
    v->only_last_tile = tiles[n % TILES];
    v->backwards = n / TILES % 2;
    v->only_last_rows = rows[n / (2 * TILES)];
    say_tiles(words, v->only_last_tile, v->backwards ? ", from the last to the first" : "");
    return is_given(f, ATTN_T_dq) && f->most_k > v->only_last_tile && (placed || n < 2 * TILES);
}

/* ---- The table of mistakes --------------------------------------------------------------------------------------- */

/* Short names for the kinds of mistakes. A row of the table has: code and function of the mistake, number of variants,
 * kind, sentence, fix. */
#define CONVERTS          .converts = true
#define SCORES            .of_scores = true
#define PATTERN           .of_pattern = true
#define BACKWARD          .of_backward = true
#define FACTOR            .converts = true, .of_backward = true
#define OTHER             .converts = false
#define SIZE              .of_pattern = true, .of_size = true
#define MISREADS(tensors) .misread = tensors
#define Q                 ATTN_TENSOR_BIT(q)
#define K                 ATTN_TENSOR_BIT(k)
#define V                 ATTN_TENSOR_BIT(v)
#define ROW(name, count, kind, sentence, mend) \
    { .code = #name, .apply = name, .variants = count, kind, .says = sentence, .fix = mend },

/* clang-format off */
const struct hypothesis hypotheses[] = {
    ROW(lse_base2, 1, CONVERTS, "lse is in base 2", "multiply lse by 0.6931472")
    ROW(layout_out, 6, CONVERTS, "the result has its heads and rows in the other order", "write it in the order that layout names, or name the other layout")
    ROW(lse_layout, 1, CONVERTS, "lse is [B, Sq, H]", "transpose lse to [B, H, Sq]")
    ROW(scale_missing, 1, SCORES, "q.k is not multiplied by the scale", "multiply q.k by the scale, which is 1/sqrt(D) by default")
    ROW(causal_missing, 1, SCORES, "the causal mask is missing", "hide key j from query i where j > i + Sk - Sq (alignment top_left: where j > i)")
    ROW(alignment, 1, SCORES, "causal or window is aligned at the other corner", "with Sq other than Sk, bottom_right lets the last query see the last key, top_left the first query the first key")
    ROW(layout_q, 1, MISREADS(Q), "q is read with its heads and rows in the other order", "use the strides of the layout that q has, or transpose q")
    ROW(layout_k, 1, MISREADS(K), "k is read with its heads and rows in the other order", "use the strides of the layout that k has, or transpose k")
    ROW(layout_v, 1, MISREADS(V), "v is read with its heads and rows in the other order", "use the strides of the layout that v has, or transpose v")
    ROW(layout_all, 3, MISREADS(Q | K | V), "all tensors are read with their heads and rows in the other order", "transpose axes 1 and 2, or name the layout that the tensors have")
    ROW(padding_attended, 2 + 2 * TILES, SCORES, "keys behind seqlens_k are attended to", "hide keys from seqlens_k[b] on")
    ROW(heads_interleaved, 1, OTHER, "query head h reads key/value head h mod Hk", "let query head h read key/value head h / (H / Hk)")
    ROW(causal_unasked, 2, SCORES, "a causal mask is applied that the problem does not have", "leave the causal mask out, or send causal")
    ROW(scale_twice, 1, SCORES, "the scale is applied twice", "multiply q.k by the scale once: not in q as well as in the softmax")
    ROW(causal_off_by_one, 1, SCORES, "the causal mask lets each query see one key too many", "compare with <=: query i sees keys j <= i + Sk - Sq")
    ROW(causal_strict, 1, SCORES, "the causal mask hides one key too many", "let query i see key i + Sk - Sq as well")
    ROW(mask_inverted, 1, SCORES, "the mask hides what it should let through", "keep_mask has 1 where a query may attend")
    ROW(mask_ignored, 2, SCORES, "the mask is ignored", "hide the keys that the mask hides")
    ROW(window_missing, 3, SCORES, "the window is ignored", "hide the keys outside the window")
    ROW(window_off_by_one, 6, SCORES, "the window has another width", "[left, right] lets a query see left + 1 + right keys, both ends included")
    ROW(sequences_mixed, 1, OTHER, "packed sequences see each other", "let each sequence see its own keys, cu_seqlens_k[b] to cu_seqlens_k[b + 1]")
    ROW(k_v_swapped, 1, MISREADS(K | V), "k and v have changed places", "pass k before v")
    ROW(keys_transposed, 1, MISREADS(K), "k is read with its columns before its rows", "read k as it is laid out, or transpose it")
    ROW(lse_without_max, 1, OTHER, "lse lacks the maximum of the row", "add the row's maximum to the logarithm of the sum")
    ROW(empty_rows_inf, 2, CONVERTS, "rows that see no key have infinity", "write out 0 and lse -inf for a row that sees no key")
    ROW(empty_rows_nan, 3, CONVERTS, "rows that see no key have NaN", "write out 0 and lse -inf for a row that sees no key, and do not subtract -inf from -inf")
    ROW(scale_of_dv, 1, SCORES, "the scale is that of Dv", "use 1/sqrt(D), D being the head size of q and k")
    ROW(scale_inverse, 1, SCORES, "q.k is divided by the scale", "multiply q.k by the scale")
    ROW(softcap_missing, 1, SCORES, "softcap is missing", "replace each scaled score s by softcap tanh(s / softcap)")
    ROW(softcap_before_scale, 1, SCORES, "softcap is applied before the scale", "apply softcap to the scaled score")
    ROW(bias_missing, 1, SCORES, "bias is missing", "add bias to the score after scale and softcap")
    ROW(bias_before_scale, 1, SCORES, "bias is added before the scale", "add bias after scale and softcap")
    ROW(bias_in_base2, 1, SCORES, "bias is not converted to base 2", "multiply bias by 1.442695 (log2 e) where exponentials are in base 2")
    ROW(alibi_missing, 1, SCORES, "ALiBi is missing", "subtract slope times the distance |i + Sk - Sq - j|")
    ROW(alibi_corner, 1, SCORES, "ALiBi counts from the other corner", "the distance is |i + Sk - Sq - j|")
    ROW(alibi_sign, 1, SCORES, "ALiBi has the other sign", "subtract slope times the distance; slopes are positive")
    ROW(heads_reversed, 1, OTHER, "key/value heads are read in reverse", "let query head h read key/value head h / (H / Hk)")
    ROW(not_normalized, 2, OTHER, "out is not divided by the sum of the exponentials", "divide out by the sum at the end")
    ROW(not_rescaled, 30, OTHER, "out is not rescaled where a tile has a larger maximum", "multiply out and the sum by exp(old maximum - new maximum) at each tile")
    ROW(last_tile_dropped, 10, SCORES, "the last tile of keys is left out", "round the number of tiles up, and compute the tile that is not full")
    ROW(first_tile_dropped, 10, SCORES, "the first tile of keys is left out", "begin with the first tile that a query of the tile may see")
    ROW(tail_unmasked, 10, OTHER, "padding of the last tile counts as keys of score 0", "give keys from Sk on the score -inf")
    ROW(sink_missing, 1, SCORES, "the sink is missing", "add exp(sink) to the sum once")
    ROW(sink_per_split, 4, SCORES, "the sink is counted once per split", "add the sink in one split only, or when the splits are merged")
    ROW(splits_unweighted, 8, OTHER, "the splits are averaged without their weights", "weigh each split by exp(its lse - the lse of all)")
    ROW(dropout_missing, 1, OTHER, "nothing is dropped", "apply dropout to the probabilities")
    ROW(dropout_unscaled, 1, OTHER, "what dropout keeps is not divided by 1 - dropout_p", "divide what is kept by 1 - dropout_p")
    ROW(dropout_scaled_twice, 1, OTHER, "what dropout keeps is divided by 1 - dropout_p twice", "divide once")
    ROW(dropout_other_seed, 5, OTHER, "dropout has another seed", "use the seed of the request")
    ROW(dropout_mask_transposed, 1, OTHER, "dropout decides about (i, j) by (j, i)", "count the query before the key")
    ROW(group_not_summed, 2, BACKWARD, "dk and dv are those of one query head of each group", "sum dk and dv over the query heads that read a key/value head")
    ROW(delta_missing, 2, BACKWARD, "delta, the row sums of dout times out, is missing", "subtract delta from dP")
    ROW(dlse_missing, 1, BACKWARD, "dlse is ignored", "subtract dlse from delta")
    ROW(scale_missing_in_dq, 1, FACTOR, "dq is not multiplied by the scale", "multiply dq by the scale")
    ROW(scale_missing_in_dk, 1, FACTOR, "dk is not multiplied by the scale", "multiply dk by the scale")
    ROW(scale_twice_in_dq, 1, FACTOR, "dq is multiplied by the scale twice", "divide dq by the scale")
    ROW(scale_twice_in_dk, 1, FACTOR, "dk is multiplied by the scale twice", "divide dk by the scale")
    ROW(dv_of_unnormalized_p, 1, OTHER, "dv is of exponentials that are not divided by their sum", "compute dv with exp(score - lse)")
    ROW(softcap_derivative_missing, 1, BACKWARD, "the derivative of softcap is missing", "multiply dS by 1 - tanh(s / softcap)^2")
    ROW(dq_last_tile_only, 60, BACKWARD, "dq has the last tile of keys alone", "add to dq at each tile instead of storing it")
    ROW(scores_in_16_bit, 6, PATTERN, "scores are rounded to 16 bits before the softmax", "keep scores in float32")
    ROW(accumulated_in_16_bit, 12, SIZE, "sums of products are kept in 16 bits", "sum in float32")
    ROW(tf32_products, 4, PATTERN, "products have the precision of TF32", "switch TF32 off where float32 is meant")
    ROW(truncated, 4, PATTERN, "numbers are cut, not rounded, to their dtype", "round to nearest, ties to even")
};
/* clang-format on */

const int hypotheses_count = (int)(sizeof hypotheses / sizeof *hypotheses);

_Static_assert(sizeof hypotheses / sizeof *hypotheses <= HYPOTHESES_MOST, "room for each");
