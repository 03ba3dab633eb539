/* attention.c: the tables that attention.h declares, and the functions that handle problems and need no device.
 *
 *   tables      the tables of dtypes, statuses and tensors, made from the maps (X macros) of attention.h
 *   shapes      functions that say which size each axis of a tensor has, by the rows of ATTN_TENSOR_MAP. All code that
 *               needs a shape (attn_dims_of, attn_output, attn_geometry_of, and attn_check in check.c) uses them.
 *   work        attn_flops() and attn_scores(), which count a problem's operations and its (query, key, head) triples
 *
 * To add a dtype, add a row to ATTN_DTYPE_MAP and a case to dtype.h. To add a tensor, add a row to
 * ATTN_TENSOR_MAP. To add an option that is one number, add a row to ATTN_SCORE_OPTION_MAP and its lines to
 * score.h. */
#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "attention.h"
#include "axes.h"
#include "backend.h"
#include "tiles.h"

/* ---- Statuses and error messages --------------------------------------------------------------------------------- */

attn_status attn_fail(attn_error *err, attn_status status, const char *member, const char *format, ...)
{
    if (err) {
        va_list args;
        err->status = status;
        snprintf(err->member, sizeof err->member, "%s", member ? member : "");
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
    }
    return status;
}

const char *attn_status_name(attn_status status)
{
    static const char *const names[] = {
#define X(id, meaning) #id,
        ATTN_STATUS_MAP(X)
#undef X
    };
    return (unsigned)status < ATTN_STATUS_COUNT ? names[status] : "?";
}

/* ---- Dtypes: sizes and names ------------------------------------------------------------------------------------- */

static const struct {
    const char *wire, *safetensors, *kserve;
    size_t bytes;
    bool floating;
} dtypes[ATTN_DTYPE_COUNT] = {
#define X(id, wire, safetensors, kserve, bytes, floating) { wire, safetensors, kserve, bytes, floating },
    ATTN_DTYPE_MAP(X)
#undef X
};

size_t attn_dtype_bytes(attn_dtype dtype)
{
    return (unsigned)dtype < ATTN_DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

const char *attn_dtype_name(attn_dtype dtype)
{
    return (unsigned)dtype < ATTN_DTYPE_COUNT ? dtypes[dtype].wire : "?";
}

bool attn_dtype_floating(attn_dtype dtype)
{
    return (unsigned)dtype < ATTN_DTYPE_COUNT && dtypes[dtype].floating;
}

bool attn_dtype_parse(const char *name, attn_dtype *dtype)
{
    for (int i = 0; i < ATTN_DTYPE_COUNT; i++)
        if (!strcasecmp(name, dtypes[i].wire) || !strcasecmp(name, dtypes[i].safetensors) ||
            !strcasecmp(name, dtypes[i].kserve)) {
            *dtype = (attn_dtype)i;
            return true;
        }
    return false;
}

/* ---- Which tensors an operation has, and their dtypes and axes --------------------------------------------------- */

const attn_tensor_info attn_tensors[ATTN_TENSOR_COUNT] = {
#define X(name, role, dtypes, axes, meaning) { #name, ATTN_ROLE_##role, ATTN_RULE_##dtypes, axes, meaning },
    ATTN_TENSOR_MAP(X)
#undef X
};

const attn_dtype_set attn_dtype_rules[] = {
#define X(id, always, as_q) { always, as_q },
    ATTN_DTYPE_RULE_MAP(X)
#undef X
};

unsigned attn_tensor_dtypes(attn_tensor_id id)
{
    const attn_dtype_set *set = &attn_dtype_rules[attn_tensors[id].dtypes];
    return set->always | set->as_q;
}

unsigned attn_tensor_ranks(attn_tensor_id id)
{
    const attn_axes *axes = attn_axes_row(id);
    unsigned ranks = 1u << strlen(axes->plain);
    if (axes->packed[0] != '\0') ranks |= 1u << strlen(axes->packed);
    if (attn_axes_may_lack_one(axes->kind)) ranks |= ranks >> 1;
    return ranks;
}

const char *attn_dtype_list(unsigned bits, char text[ATTN_DTYPE_LIST_BYTES])
{
    size_t n = 0;
    text[0] = '\0';
    for (int d = 0; d < ATTN_DTYPE_COUNT && n < ATTN_DTYPE_LIST_BYTES; d++)
        if (bits >> d & 1) {
            const bool last = bits >> d == 1;
            n += (size_t)snprintf(text + n, ATTN_DTYPE_LIST_BYTES - n, "%s%s",
                                  n == 0 ? ""
                                  : last ? " or "
                                         : ", ",
                                  dtypes[d].wire);
        }
    return text;
}

/* Returns the name that messages to clients use for the size of an axis: for letter 'k' it is "Sk", or "total_k" in a
 * packed problem. */
static const char *axis_text(char letter, bool packed)
{
    switch (letter) {
    case 'b': return packed ? "N" : "B";
    case 'q': return packed ? "total_q" : "Sq";
    case 'k': return packed ? "total_k" : "Sk";
    case 'h': return "H";
    case 'g': return "Hk";
    case 'd': return "D";
    case 'e': return "Dv";
    case 'c': return "N + 1";
    case 'p': return "pages";
    case 's': return "page_size";
    case 't': return "most";
    case 'm': return "1 or Hk or H";
    case 'y': return packed ? "total_k" : "Sk";
    case 'w': return "top";
    case 'r': return "rows";
    case 'x': return "keys";
    case 'u': return "m";
    default: return "n";
    }
}

char *attn_axes_put(char *at, const char *letters, bool packed, attn_axes_kind kind)
{
    const int rank = (int)strlen(letters);
    /* whether q is packed and k is [B, Sk, Hk, D], where row b of k holds the keys of sequence b */
    const bool side_by_side = packed && letters[0] == 'b' && letters[1] == 'k';
    *at++ = '[';
    for (int a = 0; a < rank; a++) {
        if (attn_axis_may_be_one(kind, a, rank)) at = stpcpy(at, "1 or ");
        at = stpcpy(stpcpy(at, axis_text(letters[a], packed && !(side_by_side && a == 1))), a == rank - 1 ? "]" : ", ");
    }
    *at = '\0';
    return at;
}

const char *attn_tensor_shape(attn_tensor_id id, char text[ATTN_SHAPE_BYTES])
{
    const attn_dtype_set *set = &attn_dtype_rules[attn_tensors[id].dtypes];
    const attn_tensor_id owner = attn_axes_owner(id);
    const attn_axes *axes = &attn_tensors[id].axes;
    char *at = text;
    /* If the rule always allows exactly one dtype, the text names this dtype. The text for k and v names no dtype. */
    if ((set->always & ~set->as_q) != 0 && (set->always & (set->always - 1)) == 0) {
        at = stpcpy(stpcpy(at, dtypes[__builtin_ctz(set->always)].wire), set->as_q ? " or q's dtype" : "");
        at = stpcpy(at, owner == id && axes->kind != ATTN_AXES_BROADCAST ? " " : ", ");
    }
    if (owner != id) {
        stpcpy(stpcpy(at, attn_tensors[owner].name), "'s shape");
        return text;
    }
    if (attn_axes_may_lack_one(axes->kind)) at = stpcpy(attn_axes_put(at, axes->plain + 1, false, axes->kind), " or ");
    attn_axes_put(at, axes->plain, false, axes->kind);
    return text;
}

attn_tensor attn_tensor_make(void *data, attn_dtype dtype, int rank, const int64_t *shape)
{
    attn_tensor t = { .data = data, .dtype = dtype, .rank = rank };
    int64_t stride = 1;
    for (int a = rank - 1; a >= 0; a--) {
        t.shape[a] = shape[a];
        t.stride[a] = stride;
        /* An axis of size 0 counts as 1 in strides, so that no stride becomes 0. An overflow becomes INT64_MAX, which
         * attn_check() refuses. */
        if (__builtin_mul_overflow(stride, shape[a] > 0 ? shape[a] : 1, &stride)) stride = INT64_MAX;
    }
    return t;
}

bool attn_shape_elements(int rank, const int64_t *shape, int64_t *elements)
{
    int64_t n = 1;
    bool none = false;
    for (int a = 0; a < rank; a++) {
        if (shape[a] < 0) return false;
        if (shape[a] == 0) none = true;
        /* Axes of size 0 are left out of the product. A shape such as [2^62, 2^62, 0] is thus refused although it has 0
         * elements, because its rows cannot be addressed. */
        else if (__builtin_mul_overflow(n, shape[a], &n)) return false;
    }
    *elements = none ? 0 : n;
    return true;
}

bool attn_shape_bytes(attn_dtype dtype, int rank, const int64_t *shape, int64_t *bytes)
{
    int64_t n;
    return attn_shape_elements(rank, shape, &n) && !__builtin_mul_overflow(n, (int64_t)attn_dtype_bytes(dtype), bytes);
}

/* ---- The sizes of a problem, found from the shapes of its tensors ------------------------------------------------ */

/* Returns whether k and v of a packed problem are [B, Sk, Hk, D]: row b of k holds the keys of sequence b. */
static bool rows_of_keys(const attn_problem *p)
{
    return p->cu_seqlens_q.rank == 1 && p->page_table.rank == 0 && p->k.rank == 4 &&
           p->k.shape[0] == p->cu_seqlens_q.shape[0] - 1;
}

int attn_axes_of(const attn_problem *p, attn_tensor_id id, char letters[ATTN_MAX_RANK + 1])
{
    const attn_tensor_id owner = attn_axes_owner(id);
    const attn_axes *info = &attn_tensors[owner].axes;
    const bool packed = p->cu_seqlens_q.rank > 0 || p->cu_seqlens_k.rank > 0;
    const char *axes = p->page_table.rank > 0 && info->paged ? info->paged : packed ? info->packed : info->plain;
    int rank = 0;
    if (attn_axes_may_lack_one(info->kind) && p->tensor[owner].rank > 0 &&
        (size_t)p->tensor[owner].rank == strlen(axes) - 1)
        axes++;
    if (packed && info->kind == ATTN_AXES_LAYOUT && p->page_table.rank == 0 && info->plain[1] == 'k' && rows_of_keys(p))
        axes = info->plain;
    /* a loop copies the letters, because a call of snprintf() here would add 2 us to each problem */
    for (; axes[rank]; rank++) letters[rank] = axes[rank];
    letters[rank] = '\0';
    if (info->kind == ATTN_AXES_LAYOUT && p->layout == ATTN_BHSD && !packed) {
        const char sequence = letters[1];
        letters[1] = letters[2];
        letters[2] = sequence;
    }
    return rank;
}

/* A tensor, and for each of its axes the letter (attn_axes) that says which size the axis has. */
struct named_axes {
    const attn_tensor *tensor;
    int rank;
    char letters[ATTN_MAX_RANK + 1];
};

static struct named_axes axes_by_name(const attn_problem *p, attn_tensor_id id)
{
    struct named_axes axes;
    axes.tensor = &p->tensor[id];
    axes.rank = attn_axes_of(p, id, axes.letters);
    if (axes.rank > axes.tensor->rank) axes.rank = axes.tensor->rank;
    return axes;
}

/* Returns the size of the tensor's axis with this letter (attn_axes); 0 if there is none. */
static int64_t size_on(const struct named_axes *axes, char letter)
{
    for (int a = 0; a < axes->rank; a++)
        if (axes->letters[a] == letter) return axes->tensor->shape[a];
    return 0;
}

/* Looks up each tensor's axes only once, because axis_named() is called several times for each problem. */
attn_dims attn_dims_of(const attn_problem *p)
{
    const struct named_axes q = axes_by_name(p, ATTN_T_q), k = axes_by_name(p, ATTN_T_k), v = axes_by_name(p, ATTN_T_v);
    attn_dims d = { 0 };
    d.packed = p->cu_seqlens_q.rank > 0 || p->cu_seqlens_k.rank > 0;
    d.B = d.packed ? p->cu_seqlens_q.shape[0] - 1 : size_on(&q, 'b');
    d.H = size_on(&q, 'h');
    d.Hk = size_on(&k, 'g');
    d.Sq = size_on(&q, 'q');
    d.Sk = size_on(&k, 'k');
    d.D = size_on(&q, 'd');
    d.Dv = p->op == ATTN_OP_OBSERVE ? 0 : size_on(&v, 'e');
    if (d.packed && rows_of_keys(p)) {
        d.row_k = d.Sk;
        /* an overflow becomes INT64_MAX, which attn_check() refuses */
        if (__builtin_mul_overflow(d.B, d.row_k, &d.Sk)) d.Sk = INT64_MAX;
    }
    if (d.packed) d.total_q = d.Sq, d.total_k = d.Sk;
    if (p->page_table.rank > 0) {
        const int64_t most = p->page_table.shape[p->page_table.rank - 1];
        d.pages = size_on(&k, 'p');
        d.page_size = size_on(&k, 's');
        if (__builtin_mul_overflow(most, d.page_size, &d.Sk)) d.Sk = INT64_MAX;
        if (d.packed && __builtin_mul_overflow(d.B, d.Sk, &d.total_k)) d.total_k = INT64_MAX;
    }
    return d;
}

static attn_status check_result_dtype(const attn_problem *p, attn_tensor_id id, attn_dtype dtype, attn_error *err)
{
    const attn_dtype_set *set = &attn_dtype_rules[attn_tensors[id].dtypes];
    const attn_dtype q = p->q.dtype;
    char list[ATTN_DTYPE_LIST_BYTES];
    if (attn_dtype_in(set->always, dtype) || (dtype == q && attn_dtype_in(set->as_q, q))) return ATTN_OK;
    if (set->as_q == 0)
        return attn_fail(err, ATTN_INVALID, "/out_dtype", "out_dtype: is %s, must be %s", attn_dtype_name(dtype),
                         attn_dtype_list(set->always, list));
    return attn_fail(err, ATTN_INVALID, "/grad_dtype", "grad_dtype: is %s, must be %s%s, q's dtype",
                     attn_dtype_name(dtype), attn_dtype_in(set->always, q) ? "" : "float32 or ", attn_dtype_name(q));
}

/* Checks that a problem of op ATTN_OP_OBSERVE has the options that its output `id` needs. */
static attn_status check_observed(const attn_problem *p, attn_tensor_id id, attn_error *err)
{
    const attn_observe *const o = &p->observe;
    const bool region = id == ATTN_T_weights || id == ATTN_T_map;
    if ((id == ATTN_T_top_keys || id == ATTN_T_top_weights) && o->top < 1)
        return attn_fail(err, ATTN_INVALID, "/top", "top: is missing, must be between 1 and %d with top_keys",
                         ATTN_MAX_TOP);
    if (id == ATTN_T_map && (o->map[0] < 1 || o->map[1] < 1))
        return attn_fail(err, ATTN_INVALID, "/map",
                         "map: is missing, must be [cells of queries, cells of keys], each "
                         "between 1 and %d",
                         ATTN_MAX_MAP);
    if (region && p->cu_seqlens_q.rank && o->sequence < 0)
        return attn_fail(err, ATTN_INVALID, "/sequence", "sequence: is missing; %s is of one packed sequence",
                         attn_tensors[id].name);
    return ATTN_OK;
}

static attn_status check_weights(int rank, const int64_t *shape, attn_error *err)
{
    int64_t elements;
    double all = 1;
    if (attn_shape_elements(rank, shape, &elements) && elements <= ATTN_MAX_WEIGHTS) return ATTN_OK;
    for (int a = 0; a < rank; a++) all *= (double)shape[a];
    return attn_fail(err, ATTN_TOO_LARGE, "/observe",
                     "observe: weights of %lld rows and %lld keys are %.10g numbers, at most %d are answered; give a "
                     "smaller region by rows and keys, or ask for map",
                     (long long)shape[rank - 2], (long long)shape[rank - 1], all, ATTN_MAX_WEIGHTS);
}

attn_status attn_output(const attn_problem *p, attn_tensor_id id, attn_dtype result_dtype, attn_tensor *tensor,
                        attn_error *err)
{
    char letters[ATTN_MAX_RANK + 1];
    int64_t shape[ATTN_MAX_RANK];
    const attn_dims d = attn_dims_of(p);
    const attn_tensor_info *info = &attn_tensors[id];
    const attn_tensor_id owner = attn_axes_owner(id);
    attn_dtype dtype = ATTN_F32;
    int rank;

    if (!attn_writes(p, id))
        return attn_fail(err, ATTN_NOT_FOUND, "/outputs", "outputs: %s has no %s", attn_op_name(p->op), info->name);
    if (owner != id && info->role == ATTN_ROLE_OUT_BACK && p->tensor[owner].rank == 0)
        return attn_fail(err, ATTN_NOT_FOUND, "/outputs", "outputs: %s needs %s, which is not given", info->name,
                         attn_tensors[owner].name);
    if (info->dtypes == ATTN_RULE_RESULT || info->dtypes == ATTN_RULE_GRADIENT) {
        const attn_status status = check_result_dtype(p, id, result_dtype, err);
        if (status != ATTN_OK) return status;
        dtype = result_dtype;
    }

    if (info->dtypes == ATTN_RULE_I32) dtype = ATTN_I32;

    if (p->op == ATTN_OP_OBSERVE) {
        const attn_status status = check_observed(p, id, err);
        if (status != ATTN_OK) return status;
    }
    rank = attn_axes_of(p, id, letters);
    for (int a = 0; a < rank; a++) shape[a] = attn_size_of(p, &d, letters[a]);
    if (id == ATTN_T_weights) {
        const attn_status status = check_weights(rank, shape, err);
        if (status != ATTN_OK) return status;
    }
    /* a gradient has size 1 on every axis on which its input has size 1 */
    if (attn_axes_row(id)->kind == ATTN_AXES_BROADCAST)
        for (int a = 0; a < rank; a++) shape[a] = p->tensor[owner].shape[a];
    *tensor = attn_tensor_make(NULL, dtype, rank, shape);
    return ATTN_OK;
}

int64_t attn_size_of(const attn_problem *p, const attn_dims *d, char letter)
{
    const attn_observe *const o = &p->observe;
    switch (letter) {
    case 'y': return d->page_size > 0 && o->shown_keys > 0 ? o->shown_keys : d->Sk;
    case 'w': return o->top;
    case 'r': return o->rows[1] - o->rows[0];
    case 'x': return o->keys[1] - o->keys[0];
    case 'u': return o->map[0];
    case 'v': return o->map[1];
    default: return attn_axis_size(d, letter);
    }
}

void attn_observe_region(attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    attn_observe *const o = &p->observe;
    int64_t rows = g.dims.Sq, keys = attn_size_of(p, &g.dims, 'y');
    if (g.dims.packed) {
        const attn_sequence none = { 0, 0, 0, 0 };
        const attn_sequence s = o->sequence >= 0 && o->sequence < g.dims.B ? attn_sequence_of(&g, o->sequence) : none;
        rows = s.Sq, keys = s.Sk;
    }
    if (o->rows[1] < 0) o->rows[1] = rows;
    if (o->keys[1] < 0) o->keys[1] = keys;
}

int64_t attn_axis_size(const attn_dims *d, char letter)
{
    switch (letter) {
    case 'b': return d->B;
    case 'q': return d->Sq;
    case 'k': return d->row_k ? d->row_k : d->Sk;
    case 'h': return d->H;
    case 'g': return d->Hk;
    case 'd': return d->D;
    case 'e': return d->Dv;
    case 'c': return d->B + 1;
    case 'p': return d->pages;
    case 's': return d->page_size;
    /* The letters 'm' and 'n' of mask_startend_rows and 't' of page_table get 0, because the client chooses these
     * sizes. Letters that only outputs of an observe have get 0 too; attn_size_of() returns their sizes. */
    default: return 0;
    }
}

/* ---- A problem's geometry: addresses and strides of all tensors -------------------------------------------------- */

static attn_view view_of(const attn_problem *p, attn_tensor_id id)
{
    const attn_tensor *t = &p->tensor[id];
    attn_view view = { .data = t->data, .dtype = t->dtype };
    char letters[ATTN_MAX_RANK + 1];
    if (t->rank == 0) {
        view.data = NULL;
        return view;
    }
    const int rank = attn_axes_of(p, id, letters);
    const bool rows_are_keys = id == ATTN_T_mask_startend_rows;
    if (t->rank != rank) {
        view.data = NULL;
        return view;
    }
    const bool side_by_side = letters[0] == 'b' && rank > 1 && letters[1] == 'k' && p->cu_seqlens_q.rank > 0;
    /* if queries are packed and k is [B, Sk, Hk, D], kernels read the axes B and Sk of k as one axis of B * Sk keys */
    if (side_by_side) {
        view.row = t->shape[1] > 1 ? t->stride[1] : t->shape[0] > 1 ? t->stride[0] : 0;
        view.head = t->shape[2] > 1 ? t->stride[2] : 0;
        return view;
    }
    for (int a = 0; a < rank; a++) {
        /* An axis of size 1 gets stride 0. If it is broadcast, every index then leads to its one element. */
        const int64_t stride = t->shape[a] == 1 ? 0 : t->stride[a];
        switch (letters[a]) {
        case 'b':
        case 'p': view.batch = stride; break;
        case 'h':
        case 'g':
        case 'm': view.head = stride; break;
        case 'q':
        case 'r':
        case 'u':
        case 's': view.row = stride; break;
        case 'k':
            if (rows_are_keys || attn_axes_row(id)->kind != ATTN_AXES_BROADCAST) view.row = stride;
            break;
        /* a view has no stride for the last axis: that stride is always 1 */
        default: break;
        }
    }
    return view;
}

attn_geometry attn_geometry_of(const attn_problem *p)
{
    attn_geometry g = { .dims = attn_dims_of(p) };
    g.group = g.dims.Hk > 0 ? g.dims.H / g.dims.Hk : 1;
    g.mask_group = 1;
    if (p->mask_startend_rows.rank) {
        g.mask_group = p->mask_startend_rows.shape[1] > 0 ? g.dims.H / p->mask_startend_rows.shape[1] : 1;
        g.mask_bounds = (int)p->mask_startend_rows.shape[3];
    }
    g.keep_tail = p->keep_mask.rank && p->keep_mask_at_end ? p->keep_mask.shape[p->keep_mask.rank - 1] : -1;
    g.observe = p->observe;
    g.causal = p->causal;
    g.top_left = p->alignment == ATTN_TOP_LEFT;
    g.left = p->window_left < 0 ? ATTN_UNBOUNDED : attn_min64(p->window_left, ATTN_UNBOUNDED);
    g.right = p->causal ? 0 : p->window_right < 0 ? ATTN_UNBOUNDED : attn_min64(p->window_right, ATTN_UNBOUNDED);
    g.scale = p->has_scale ? p->scale : g.dims.D > 0 ? 1 / sqrt((double)g.dims.D) : 1;
#define X(name, id, least, most, rule, meaning) g.name = p->name;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    g.cu_q = p->cu_seqlens_q.rank ? p->cu_seqlens_q.data : NULL;
    g.cu_k = p->cu_seqlens_k.rank ? p->cu_seqlens_k.data : NULL;
    g.seqlens_q = p->seqlens_q.rank ? p->seqlens_q.data : NULL;
    g.seqlens_k = p->seqlens_k.rank ? p->seqlens_k.data : NULL;
    g.page_table = p->page_table.rank ? p->page_table.data : NULL;
    g.page_table_row = p->page_table.rank ? p->page_table.stride[0] : 0;
    g.prefix_keys = p->page_table.rank ? p->prefix_keys : NULL;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) g.view[id] = view_of(p, (attn_tensor_id)id);
    return g;
}

/* ---- Features: the tensors and options that a problem uses ------------------------------------------------------- */

const attn_option_info attn_options[] = {
#define X(id, wire, meaning) { wire, meaning },
    ATTN_OPTION_MAP(X)
#undef X
#define X(name, id, least, most, rule, meaning) { #name, #name " is not 0" },
        ATTN_SCORE_OPTION_MAP(X)
#undef X
};

static_assert(ATTN_TENSOR_COUNT <= ATTN_OPTION_FIRST + 1 && ATTN_OPTION_END <= 63, "a bit for each, and one to spare");

attn_problem attn_part_of(const attn_problem *p, const attn_part *part)
{
    const attn_dims d = attn_dims_of(p);
    const int64_t group = d.Hk > 0 ? d.H / d.Hk : 1;
    attn_problem some = *p;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *t = &some.tensor[id];
        char letters[ATTN_MAX_RANK + 1];
        if (t->rank == 0) continue;
        attn_axes_of(p, (attn_tensor_id)id, letters);
        for (int axis = 0; axis < t->rank; axis++) {
            const char letter = letters[axis];
            const bool of_queries = letter == 'h' || (letter == 'm' && t->shape[axis] == d.H);
            int64_t first = 0, count = t->shape[axis];
            /* an axis of size 1 is not cut, because all batch rows (or heads) share its only entry */
            if (count == 1) continue;
            if (letter == 'b') first = part->first_batch, count = part->batches;
            else if (of_queries) first = part->first_head * group, count = part->heads * group;
            else if (letter == 'g' || letter == 'm') first = part->first_head, count = part->heads;
            if (t->data) t->data = (char *)t->data + first * t->stride[axis] * (int64_t)attn_dtype_bytes(t->dtype);
            t->shape[axis] = count;
        }
    }
    /* A part that lacks batch rows has no prefix_keys: prefix_keys[b] compares row b with row b - 1, which may lie
     * outside the part. */
    if (d.B != part->batches) some.prefix_keys = NULL;
    some.dropout_heads = p->dropout_heads ? p->dropout_heads : d.H;
    some.dropout_first = p->dropout_first + part->first_batch * some.dropout_heads + part->first_head * group;
    return some;
}

/* Returns whether a kernel without options can compute with this scale. Such a kernel computes exp2(c * q . k) with c =
 * scale * log2(e). A scale that is 0, negative or infinite would be wrong for masked scores of -inf. With a tiny scale,
 * q . k may exceed the range of float32. */
static bool is_plain_scale(const attn_problem *p)
{
    return !p->has_scale || (p->scale >= 1e-6 && p->scale <= 1e30);
}

const char *attn_op_name(attn_op op)
{
    static const char *const names[ATTN_OP_COUNT] = { "forward", "backward", "observe" };
    return names[op];
}

bool attn_reads(const attn_problem *p, attn_tensor_id id)
{
    const attn_role role = attn_tensors[id].role;
    if (p->op == ATTN_OP_OBSERVE)
        return id == ATTN_T_lse ? p->observe.given_lse : role == ATTN_ROLE_IN && id != ATTN_T_v && id != ATTN_T_v_scale;
    return role == ATTN_ROLE_IN || (p->op == ATTN_OP_BACKWARD && (role == ATTN_ROLE_OUT || role == ATTN_ROLE_IN_BACK));
}

bool attn_writes(const attn_problem *p, attn_tensor_id id)
{
    const attn_role role = attn_tensors[id].role;
    switch (p->op) {
    case ATTN_OP_FORWARD: return role == ATTN_ROLE_OUT;
    case ATTN_OP_BACKWARD: return role == ATTN_ROLE_OUT_BACK;
    default: return role == ATTN_ROLE_OUT_OBSERVE || (id == ATTN_T_lse && !p->observe.given_lse);
    }
}

uint64_t attn_features(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    const attn_dtype own = p->q.dtype == ATTN_F8E4M3 ? ATTN_BF16 : p->q.dtype;
    uint64_t features = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (p->tensor[id].rank && (attn_reads(p, (attn_tensor_id)id) || attn_writes(p, (attn_tensor_id)id)))
            features |= UINT64_C(1) << id;
    if (p->causal) features |= ATTN_OPTION_BIT(CAUSAL);
    if (p->window_left >= 0 || (p->window_right >= 0 && !p->causal)) features |= ATTN_OPTION_BIT(WINDOW);
    if (p->keep_mask.rank && p->keep_mask_at_end) features |= ATTN_OPTION_BIT(KEEP_MASK_AT_END);
    if (p->alignment == ATTN_TOP_LEFT) features |= ATTN_OPTION_BIT(TOP_LEFT);
    if (d.H != d.Hk) features |= ATTN_OPTION_BIT(GROUPED);
    if ((p->cu_seqlens_q.rank && p->seqlens_q.rank) || (p->cu_seqlens_k.rank && p->seqlens_k.rank))
        features |= ATTN_OPTION_BIT(GAPS);
    if (!is_plain_scale(p)) features |= ATTN_OPTION_BIT(SCALE);
#define X(name, id, least, most, rule, meaning) \
    if (p->name != 0) features |= ATTN_OPTION_BIT(id);
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    if (p->k.dtype != p->q.dtype) features |= ATTN_OPTION_BIT(KEY_DTYPE);
    if (p->dropout_p > 0 && p->op != ATTN_OP_OBSERVE) features |= ATTN_OPTION_BIT(DROPOUT);
    if (p->op == ATTN_OP_BACKWARD && p->deterministic) features |= ATTN_OPTION_BIT(DETERMINISTIC);
    if (p->op != ATTN_OP_OBSERVE && p->out.rank && p->out.dtype != own) features |= ATTN_OPTION_BIT(OUT_DTYPE);
    if (p->op == ATTN_OP_BACKWARD && p->dout.rank && p->dout.dtype != p->q.dtype)
        features |= ATTN_OPTION_BIT(DOUT_DTYPE);
    for (int id = ATTN_T_dq; id <= ATTN_T_dv && p->op == ATTN_OP_BACKWARD; id++)
        if (p->tensor[id].rank && p->tensor[id].dtype != p->q.dtype) features |= ATTN_OPTION_BIT(GRAD_DTYPE);
    return features;
}

bool attn_kernel_takes(const attn_kernel *kernel, const attn_problem *problem, uint64_t features)
{
    const attn_dims d = attn_dims_of(problem);
    return kernel->op == problem->op && (kernel->dtypes >> problem->q.dtype & 1) && d.D <= kernel->head_dim &&
           d.Dv <= kernel->head_dim && (features & ~kernel->features) == 0;
}

/* ---- How much work a problem needs: operations and scores -------------------------------------------------------- */

double attn_flops(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    const bool alike = g.cu_q == NULL && g.seqlens_q == NULL && g.seqlens_k == NULL;
    double pairs = 0;
    if (g.dims.B == 0 || g.dims.Sq == 0 || g.dims.Sk == 0) return 0;
    for (int64_t b = 0; b < (alike ? 1 : g.dims.B); b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        pairs += (double)attn_pairs_of(&g, &s);
    }
    if (alike) pairs *= (double)g.dims.B;
    return pairs * (double)g.dims.H * 2 * (double)(g.dims.D + g.dims.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1);
}

int64_t attn_rows_that_exist(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    int64_t rows = 0;
    /* B * Sq * H (packed: total_q * H) cannot overflow, because attn_check() has checked the number of q's elements. */
    if (!g.seqlens_q) return g.dims.H * (g.dims.packed ? g.dims.total_q : g.dims.B * g.dims.Sq);
    for (int64_t b = 0; b < g.dims.B; b++) rows += g.seqlens_q[b];
    return rows * g.dims.H;
}

/* Returns the number of (query, key, head) triples of sequence b that FlashMask lets through. */
static double masked_pairs(const attn_problem *p, const attn_geometry *g, const attn_sequence *s, int64_t b)
{
    const attn_view *bounds = &g->view[ATTN_T_mask_startend_rows];
    double pairs = 0;
    for (int64_t m = 0; m < p->mask_startend_rows.shape[1]; m++)
        for (int64_t j = 0; j < s->Sk; j++) {
            const int32_t *column = (const int32_t *)bounds->data + attn_at(bounds, b, m, j);
            const attn_mask hides = attn_mask_of(column, g->mask_bounds, g->causal, g->dims.Sq);
            const attn_range rows = attn_rows_of(g, s, j);
            const int64_t lts = attn_clamp64(hides.lts, rows.lo, rows.hi), lte = attn_clamp64(hides.lte, lts, rows.hi);
            const int64_t uts = attn_clamp64(hides.uts, rows.lo, rows.hi), ute = attn_clamp64(hides.ute, uts, rows.hi);
            const int64_t both = attn_max64(0, attn_min64(lte, ute) - attn_max64(lts, uts));
            pairs += (double)(rows.hi - rows.lo - (lte - lts) - (ute - uts) + both);
        }
    return pairs * (double)g->mask_group;
}

double attn_scores(const attn_problem *p)
{
    const attn_geometry g = attn_geometry_of(p);
    double pairs = 0;
    if (p->mask_startend_rows.rank == 0 || attn_is_empty(p)) {
        const double flops = attn_flops(p);
        return flops / (2 * (double)(g.dims.D + g.dims.Dv) * (p->op == ATTN_OP_BACKWARD ? 2.5 : 1));
    }
    for (int64_t b = 0; b < g.dims.B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        pairs += masked_pairs(p, &g, &s, b);
    }
    return pairs;
}

bool attn_is_empty(const attn_problem *p)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *t = &p->tensor[id];
        int64_t elements;
        if (t->rank == 0 || !attn_writes(p, (attn_tensor_id)id)) continue;
        if (!attn_shape_elements(t->rank, t->shape, &elements) || elements > 0) return false;
    }
    return true;
}
