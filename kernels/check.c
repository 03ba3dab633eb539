/* check.c: attn_check, the one validator. No kernel is started on a problem that has not passed it.
 *
 * A client reads the messages as they are, so each is one sentence that names tensor, index, value and rule:
 *     k: shape[2] is 3, must divide the 8 heads of q
 * Axes are counted in the order in which the client gave them, whatever the layout. attn_error.member is a JSON pointer
 * to the wrong member, such as "/k/shape/2".
 *
 * The check has these steps, in this order, and reports the first fault that it finds:
 *   1. q, k and v: whether they are given, their ranks, dtypes and sizes, and whether these agree. Later steps may call
 *      attn_dims_of().
 *   2. which tensors may be given together (packed or not, fp8 scales only with fp8, gradients only of given tensors)
 *   3. every other tensor: the rank, dtype and shape that its row of ATTN_TENSOR_MAP demands
 *   4. memory: strides, alignment, and that no offset overflows
 *   5. options: scale, those of ATTN_SCORE_OPTION_MAP, window, dropout
 *   6. values of tensors that control which memory a kernel reads, or which numbers it computes: cu_seqlens, seqlens,
 *      page_table, mask rows, keep_mask, bias, sinks, slopes, fp8 scales. The host reads them here. Values of q, k, v
 *      and gradients are not checked.
 *
 * Limits of sizes: every axis is at most AXIS_MAX, every tensor's bytes fit in int64_t, and B * H is at most
 * ATTN_MAX_HEADS. Other code therefore computes sums and products of two lengths (Sq * Sk), and offsets, without a
 * check for overflow. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "attention.h"
#include "axes.h"
#include "dtype.h"
#include "tiles.h"

/* largest size of an axis, because index tensors are int32 and dropout's generator takes 32-bit row numbers */
#define AXIS_MAX INT32_MAX

typedef long long ll;

static const char *letter_name(char letter)
{
    switch (letter) {
    case 'b': return "the batch of q";
    case 'q': return "the queries of q";
    case 'k': return "the keys of k";
    case 'h': return "the heads of q";
    case 'g': return "the heads of k";
    case 'd': return "the head size of q";
    case 'e': return "the head size of v";
    case 'p': return "the pages of k";
    case 's': return "the slots of a page of k";
    case 'y': return "the keys of k";
    case 'w': return "top";
    case 'r': return "the rows of the region";
    case 'x': return "the keys of the region";
    case 'u':
    case 'v': return "the cells of map";
    default: return "";
    }
}

#define MEMBER_BYTES sizeof(((attn_error *)0)->member)
static const char *axis_member(char member[MEMBER_BYTES], attn_tensor_id id, const char *part, int axis)
{
    snprintf(member, MEMBER_BYTES, "/%s/%s/%d", attn_tensors[id].name, part, axis);
    return member;
}

static const char *tensor_member(char member[MEMBER_BYTES], attn_tensor_id id, const char *part)
{
    snprintf(member, MEMBER_BYTES, "/%s%s%s", attn_tensors[id].name, *part ? "/" : "", part);
    return member;
}

/* bytes of the text "[1, 2, 3, 4]": each index takes up to 20 bytes (an int64_t with its sign), and 2 for a comma and a
 * space */
enum { INDEX_BYTES = ATTN_MAX_RANK * 22 + 3 };
static const char *index_text(char text[INDEX_BYTES], int rank, const int64_t *index)
{
    size_t n = (size_t)snprintf(text, INDEX_BYTES, "[");
    for (int a = 0; a < rank && a < ATTN_MAX_RANK; a++)
        n += (size_t)snprintf(text + n, INDEX_BYTES - n, "%s%lld", a ? ", " : "", (ll)index[a]);
    snprintf(text + n, INDEX_BYTES - n, "]");
    return text;
}

/* Returns whether the problem's operation (forward, backward or observe) uses the tensor. A forward ignores tensors
 * that only a backward uses. A client can therefore send the same tensors for a forward and for a backward. */
static bool takes_part(const attn_problem *p, attn_tensor_id id)
{
    return p->tensor[id].rank > 0 && (attn_reads(p, id) || attn_writes(p, id));
}

/* ---- Rank, dtype and sizes of one tensor ------------------------------------------------------------------------- */

static attn_status check_rank(const attn_problem *p, attn_tensor_id id, attn_error *err)
{
    char letters[ATTN_MAX_RANK + 1], member[MEMBER_BYTES], is[INDEX_BYTES], must[ATTN_SHAPE_BYTES];
    const attn_tensor *t = &p->tensor[id];
    const int rank = attn_axes_of(p, id, letters);
    const attn_axes_kind kind = attn_axes_row(id)->kind;
    const bool packed = p->cu_seqlens_q.rank > 0;
    const bool paged = p->page_table.rank > 0 && attn_axes_row(id)->paged != NULL;
    if (t->rank == rank) return ATTN_OK;
    tensor_member(member, id, "shape");
    index_text(is, t->rank, t->shape);
    if (attn_axes_may_lack_one(attn_tensors[id].axes.kind)) {
        /* `letters` may lack the first letter of `all`, because some tensors may be given without their first axis */
        const char *const all = attn_tensors[id].axes.plain;
        attn_axes_put(stpcpy(attn_axes_put(must, all + 1, packed, kind), " or "), all, packed, kind);
        return attn_fail(err, ATTN_INVALID, member, "%s: shape %s has %d dimensions, must have %d or %d: %s",
                         attn_tensors[id].name, is, t->rank, (int)strlen(attn_tensors[id].axes.plain) - 1,
                         (int)strlen(attn_tensors[id].axes.plain), must);
    }
    attn_axes_put(must, letters, packed, kind);
    return attn_fail(
        err, ATTN_INVALID, member, "%s: shape %s has %d dimensions, must have %d%s: %s%s", attn_tensors[id].name, is,
        t->rank, rank,
        paged                                ? " with page_table"
        : packed && kind == ATTN_AXES_LAYOUT ? " with cu_seqlens_q"
                                             : "",
        must,
        t->rank == rank + 1 && packed && kind == ATTN_AXES_LAYOUT && t->shape[0] == 1 ? "; leave out the first axis"
        : t->rank >= rank || rank < ATTN_MAX_RANK                                     ? ""
        : kind == ATTN_AXES_LAYOUT ? "; a missing axis is written as 1, and heads have an axis of their own"
                                   : "; a missing axis is written as 1");
}

static attn_status check_dtype(const attn_problem *p, attn_tensor_id id, attn_error *err)
{
    const attn_dtype is = p->tensor[id].dtype, q = p->q.dtype;
    const attn_dtype_set set = attn_dtype_rules[attn_tensors[id].dtypes];
    const bool as_q = attn_dtype_in(set.as_q, q);
    char member[MEMBER_BYTES], list[ATTN_DTYPE_LIST_BYTES];
    if (attn_dtype_in(set.always, is) || (as_q && is == q)) return ATTN_OK;
    const unsigned others = as_q ? set.always & ~(1u << q) : set.always;
    return attn_fail(err, ATTN_INVALID, tensor_member(member, id, "dtype"), "%s: dtype is %s, must be %s%s%s%s",
                     attn_tensors[id].name, attn_dtype_name(is), as_q ? attn_dtype_name(q) : "", as_q ? " as q's" : "",
                     as_q && others ? ", or " : "", attn_dtype_list(others, list));
}

/* Checks that no axis is negative or too large, and that the tensor's bytes fit in int64_t. An element counts as 4
 * bytes (float32), because results may have a wider dtype than their inputs. */
static attn_status check_sizes(const attn_problem *p, attn_tensor_id id, attn_error *err)
{
    const attn_tensor *t = &p->tensor[id];
    char member[MEMBER_BYTES];
    int64_t bytes;
    for (int a = 0; a < t->rank; a++) {
        if (t->shape[a] < 0)
            return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                             "%s: shape[%d] is %lld, must be at least 0", attn_tensors[id].name, a, (ll)t->shape[a]);
        if (t->shape[a] > AXIS_MAX)
            return attn_fail(err, ATTN_TOO_LARGE, axis_member(member, id, "shape", a),
                             "%s: shape[%d] is %lld, must be at most %lld", attn_tensors[id].name, a, (ll)t->shape[a],
                             (ll)AXIS_MAX);
    }
    if (!attn_shape_bytes(ATTN_F32, t->rank, t->shape, &bytes))
        return attn_fail(err, ATTN_TOO_LARGE, tensor_member(member, id, "shape"),
                         "%s: the product of its shape is over 2^61 elements", attn_tensors[id].name);
    return ATTN_OK;
}

static attn_status check_shape(const attn_problem *p, const attn_dims *d, attn_tensor_id id, attn_error *err)
{
    const attn_tensor *t = &p->tensor[id];
    const attn_tensor_id owner = attn_axes_owner(id);
    const attn_axes_kind kind = attn_axes_row(id)->kind;
    char letters[ATTN_MAX_RANK + 1], member[MEMBER_BYTES];
    const int rank = attn_axes_of(p, id, letters);
    for (int a = 0; a < rank; a++) {
        const int64_t is = t->shape[a], must = attn_size_of(p, d, letters[a]);
        const bool may_be_one = attn_axis_may_be_one(kind, a, rank);
        /* a gradient must have the shape of its input (`owner`), which has been checked before */
        if (kind == ATTN_AXES_BROADCAST && owner != id) {
            const int64_t as = p->tensor[owner].shape[a];
            if (is != as)
                return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                                 "%s: shape[%d] is %lld, must be %lld as %s's", attn_tensors[id].name, a, (ll)is,
                                 (ll)as, attn_tensors[owner].name);
            continue;
        }
        switch (letters[a]) {
        case 'c':
            if (is != p->cu_seqlens_q.shape[0])
                return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                                 "%s: shape[0] is %lld, must be %lld as cu_seqlens_q's", attn_tensors[id].name, (ll)is,
                                 (ll)p->cu_seqlens_q.shape[0]);
            break;
        case 't': break;
        case 'm':
            if (is != 1 && is != d->Hk && is != d->H)
                return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                                 "%s: shape[%d] is %lld, must be 1, %lld (the heads of k) or %lld (the heads of q)",
                                 attn_tensors[id].name, a, (ll)is, (ll)d->Hk, (ll)d->H);
            break;
        case 'n':
            if (p->causal ? is != 1 && is != 2 : is != 2 && is != 4)
                return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                                 "%s: shape[%d] is %lld, must be %s", attn_tensors[id].name, a, (ll)is,
                                 p->causal ? "1 or 2 when causal" : "2 or 4 when not causal");
            break;
        default:
            if (is == must || (may_be_one && is == 1)) break;
            if (id == ATTN_T_keep_mask && letters[a] == 'k' && p->keep_mask_at_end) {
                if (is <= must) break;
                return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                                 "%s: shape[%d] is %lld, must be at most %lld, the keys of k", attn_tensors[id].name, a,
                                 (ll)is, (ll)must);
            }
            return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", a),
                             "%s: shape[%d] is %lld, must be %s%lld, %s%s", attn_tensors[id].name, a, (ll)is,
                             may_be_one && must != 1 ? "1 or " : "", (ll)must,
                             letters[a] == 'b' && d->packed ? "the sequences of cu_seqlens_q" : letter_name(letters[a]),
                             kind == ATTN_AXES_SPREAD && rank == 1
                                 ? "; one dimension is that of the heads, and a scale of each batch row is [B, 1]"
                                 : "");
        }
    }
    return ATTN_OK;
}

/* ---- 1. The tensors q, k and v ----------------------------------------------------------------------------------- */

static int axis_of(const attn_problem *p, attn_tensor_id id, char letter)
{
    char letters[ATTN_MAX_RANK + 1];
    const char *found;
    attn_axes_of(p, id, letters);
    found = strchr(letters, letter);
    return found ? (int)(found - letters) : 0;
}

static attn_status at_least_one(const attn_problem *p, attn_tensor_id id, char letter, int64_t size, attn_error *err)
{
    char member[MEMBER_BYTES];
    const int axis = axis_of(p, id, letter);
    if (size >= 1) return ATTN_OK;
    return attn_fail(err, ATTN_INVALID, axis_member(member, id, "shape", axis),
                     "%s: shape[%d] is %lld, must be at least 1", attn_tensors[id].name, axis, (ll)size);
}

static attn_status head_size_fits(const attn_problem *p, attn_tensor_id id, char letter, int64_t size, attn_error *err)
{
    char member[MEMBER_BYTES];
    const int axis = axis_of(p, id, letter);
    if (size <= ATTN_MAX_HEAD_DIM) return ATTN_OK;
    return attn_fail(err, ATTN_UNSUPPORTED, axis_member(member, id, "shape", axis),
                     "%s: shape[%d] is %lld, head sizes up to %d are supported", attn_tensors[id].name, axis, (ll)size,
                     ATTN_MAX_HEAD_DIM);
}

/* Checks all that page_table requires except the shapes of k and v. */
static attn_status check_page_table(const attn_problem *p, attn_error *err)
{
    attn_status status;
    if ((status = check_rank(p, ATTN_T_page_table, err)) || (status = check_dtype(p, ATTN_T_page_table, err)) ||
        (status = check_sizes(p, ATTN_T_page_table, err)))
        return status;
    if (p->op == ATTN_OP_BACKWARD)
        return attn_fail(err, ATTN_UNSUPPORTED, "/page_table",
                         "page_table: backward has no pages; send k and v whole, or with cu_seqlens_k");
    if (p->seqlens_k.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/seqlens_k",
                         "seqlens_k: is required with page_table, the number of keys of each row");
    if (p->cu_seqlens_k.rank)
        return attn_fail(err, ATTN_INVALID, "/cu_seqlens_k",
                         "cu_seqlens_k: cannot be combined with page_table, where seqlens_k says how long rows are");
    if (p->layout == ATTN_BHSD)
        return attn_fail(err, ATTN_INVALID, "/layout", "layout: is bhsd, must be bshd with page_table");
    return ATTN_OK;
}

static attn_status check_qkv(const attn_problem *p, attn_error *err)
{
    static const attn_tensor_id qkv[] = { ATTN_T_q, ATTN_T_k, ATTN_T_v };
    attn_status status;
    attn_dims d;
    char member[MEMBER_BYTES];

    /* an observe (statistics of probabilities) has no v */
    const int inputs = p->op == ATTN_OP_OBSERVE ? 2 : 3;
    for (int i = 0; i < inputs; i++)
        if (p->tensor[qkv[i]].rank == 0)
            return attn_fail(err, ATTN_INVALID, tensor_member(member, qkv[i], ""), "%s: is required; %s",
                             attn_tensors[qkv[i]].name,
                             inputs == 2 ? "an observe has q and k" : "a problem has q, k and v");
    if (p->cu_seqlens_q.rank == 0 && p->cu_seqlens_k.rank != 0)
        return attn_fail(err, ATTN_INVALID, "/cu_seqlens_q", "cu_seqlens_q: is required with cu_seqlens_k");
    if (p->cu_seqlens_q.rank != 0 && p->cu_seqlens_k.rank == 0 && p->page_table.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/cu_seqlens_k",
                         "cu_seqlens_k: is required with cu_seqlens_q, unless k and v are [%lld, Sk, Hk, D], a row "
                         "for each sequence",
                         (ll)(p->cu_seqlens_q.shape[0] - 1));
    /* cu_seqlens_q is checked before the other tensors, because attn_dims_of() reads B from it */
    if (p->cu_seqlens_q.rank) {
        if ((status = check_rank(p, ATTN_T_cu_seqlens_q, err)) || (status = check_dtype(p, ATTN_T_cu_seqlens_q, err)) ||
            (status = check_sizes(p, ATTN_T_cu_seqlens_q, err)))
            return status;
        if (p->cu_seqlens_q.shape[0] < 1)
            return attn_fail(err, ATTN_INVALID, "/cu_seqlens_q/shape/0",
                             "cu_seqlens_q: shape[0] is 0, must be at least 1");
        if (p->layout == ATTN_BHSD)
            return attn_fail(err, ATTN_INVALID, "/layout", "layout: is bhsd, must be bshd with cu_seqlens_q");
    }
    /* page_table is checked before q, k and v, because attn_dims_of() reads Sk from it */
    if (p->page_table.rank && (status = check_page_table(p, err))) return status;
    for (int i = 0; i < inputs; i++)
        if ((status = check_rank(p, qkv[i], err)) || (status = check_dtype(p, qkv[i], err)) ||
            (status = check_sizes(p, qkv[i], err)))
            return status;

    d = attn_dims_of(p);
    if ((status = at_least_one(p, ATTN_T_q, 'h', d.H, err)) || (status = at_least_one(p, ATTN_T_q, 'd', d.D, err)) ||
        (p->page_table.rank && (status = at_least_one(p, ATTN_T_k, 's', d.page_size, err))) ||
        (status = at_least_one(p, ATTN_T_k, 'g', d.Hk, err)) ||
        (inputs == 3 && (status = at_least_one(p, ATTN_T_v, 'e', d.Dv, err))) ||
        (status = head_size_fits(p, ATTN_T_q, 'd', d.D, err)) || (status = head_size_fits(p, ATTN_T_v, 'e', d.Dv, err)))
        return status;
    if (d.B > 0 && d.H > ATTN_MAX_HEADS / d.B)
        return attn_fail(err, ATTN_TOO_LARGE, tensor_member(member, ATTN_T_q, "shape"),
                         "q: %lld %s of %lld heads are %.10g, B times H must be at most %d", (ll)d.B,
                         d.packed ? "sequences" : "batch rows", (ll)d.H, (double)d.B * (double)d.H, ATTN_MAX_HEADS);
    if (d.H % d.Hk) {
        const int axis = axis_of(p, ATTN_T_k, 'g');
        return attn_fail(err, ATTN_INVALID, axis_member(member, ATTN_T_k, "shape", axis),
                         "k: shape[%d] is %lld, must divide the %lld heads of q%s", axis, (ll)d.Hk, (ll)d.H,
                         p->page_table.rank && d.H % d.page_size == 0
                             ? "; are the pages [Hk, page_size, D]? They must be [page_size, Hk, D]"
                             : "");
    }
    if ((status = check_shape(p, &d, ATTN_T_k, err)) || (inputs == 3 && (status = check_shape(p, &d, ATTN_T_v, err))))
        return status;
    if (p->page_table.rank && d.Sk > AXIS_MAX)
        return attn_fail(
            err, ATTN_TOO_LARGE, "/page_table/shape/1",
            "page_table: shape[1] is %lld, with the %lld slots of a page of k %.10g keys in a row, of which "
            "there may be %lld",
            (ll)p->page_table.shape[1], (ll)d.page_size, (double)p->page_table.shape[1] * (double)d.page_size,
            (ll)AXIS_MAX);
    if (d.row_k > 0 && d.Sk > AXIS_MAX)
        return attn_fail(err, ATTN_TOO_LARGE, "/k/shape/1",
                         "k: shape[1] is %lld, which makes %.10g keys in the %lld sequences of cu_seqlens_q; there may "
                         "be %lld keys",
                         (ll)d.row_k, (double)d.row_k * (double)d.B, (ll)d.B, (ll)AXIS_MAX);
    if (inputs == 3 && p->v.dtype != p->k.dtype)
        return attn_fail(err, ATTN_INVALID, "/v/dtype", "v: dtype is %s, must be %s as k's",
                         attn_dtype_name(p->v.dtype), attn_dtype_name(p->k.dtype));
    for (int i = 0; p->op == ATTN_OP_BACKWARD && i < 2; i++)
        if (p->tensor[qkv[i]].dtype == ATTN_F8E4M3)
            return attn_fail(err, ATTN_UNSUPPORTED, tensor_member(member, qkv[i], "dtype"),
                             "%s: dtype is float8_e4m3fn, backward supports float32, float16 and bfloat16",
                             attn_tensors[qkv[i]].name);
    return ATTN_OK;
}

/* ---- 2. Which tensors may be given together ---------------------------------------------------------------------- */

static attn_status check_company(const attn_problem *p, attn_error *err)
{
    static const attn_tensor_id scales[][2] = { { ATTN_T_q_scale, ATTN_T_q },
                                                { ATTN_T_k_scale, ATTN_T_k },
                                                { ATTN_T_v_scale, ATTN_T_v } };
    char member[MEMBER_BYTES];
    if (p->cu_seqlens_q.rank)
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
            if (attn_axes_owner((attn_tensor_id)id) == (attn_tensor_id)id && p->tensor[id].rank &&
                attn_tensors[id].axes.packed[0] == '\0' && !(p->page_table.rank && attn_tensors[id].axes.paged))
                return attn_fail(
                    err, ATTN_INVALID, tensor_member(member, (attn_tensor_id)id, ""),
                    "%s: cannot be combined with cu_seqlens_q; send a sequence that needs it as a problem of its own",
                    attn_tensors[id].name);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const attn_tensor_id scale = scales[i][0], of = scales[i][1];
        if (takes_part(p, scale) && p->tensor[of].dtype != ATTN_F8E4M3)
            return attn_fail(err, ATTN_INVALID, tensor_member(member, scale, ""),
                             "%s: %s has dtype %s, scales are for float8_e4m3fn", attn_tensors[scale].name,
                             attn_tensors[of].name, attn_dtype_name(p->tensor[of].dtype));
    }
    if (p->op == ATTN_OP_OBSERVE && p->observe.given_lse && p->lse.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/lse", "lse: is not given");
    if (p->op != ATTN_OP_BACKWARD) return ATTN_OK;
    if (p->dout.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/dout", "dout: is required, the gradient of the loss with respect to out");
    if (p->out.rank == 0 && p->lse.rank != 0)
        return attn_fail(err, ATTN_INVALID, "/out", "out: is required with lse (give both or neither)");
    if (p->lse.rank == 0 && p->out.rank != 0)
        return attn_fail(err, ATTN_INVALID, "/lse", "lse: is required with out (give both or neither)");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor_id of = attn_axes_owner((attn_tensor_id)id);
        if (attn_tensors[id].role == ATTN_ROLE_OUT_BACK && p->tensor[id].rank && !p->tensor[of].rank)
            return attn_fail(err, ATTN_INVALID, tensor_member(member, (attn_tensor_id)id, ""), "%s: %s is not given",
                             attn_tensors[id].name, attn_tensors[of].name);
    }
    return ATTN_OK;
}

/* ---- 4. The tensors' memory -------------------------------------------------------------------------------------- */

static attn_status check_memory(const attn_problem *p, attn_tensor_id id, attn_error *err)
{
    const attn_tensor *t = &p->tensor[id];
    const char *name = attn_tensors[id].name;
    const size_t bytes = attn_dtype_bytes(t->dtype);
    char member[MEMBER_BYTES];
    int64_t elements = 0, last = 0;
    attn_shape_elements(t->rank, t->shape, &elements);
    if (t->stride[t->rank - 1] != 1)
        return attn_fail(err, ATTN_INVALID, axis_member(member, id, "stride", t->rank - 1),
                         "%s: stride[%d] is %lld, must be 1", name, t->rank - 1, (ll)t->stride[t->rank - 1]);
    for (int a = 0; a < t->rank; a++) {
        int64_t reach;
        if (t->stride[a] < 0)
            return attn_fail(err, ATTN_INVALID, axis_member(member, id, "stride", a),
                             "%s: stride[%d] is %lld, must be at least 0", name, a, (ll)t->stride[a]);
        if (t->stride[a] == 0 && t->shape[a] > 1 && attn_writes(p, id))
            return attn_fail(err, ATTN_INVALID, axis_member(member, id, "stride", a),
                             "%s: stride[%d] is 0, must be at least 1 where %lld results are written", name, a,
                             (ll)t->shape[a]);
        if (elements > 0 && t->shape[a] > 1 &&
            (__builtin_mul_overflow(t->shape[a] - 1, t->stride[a], &reach) ||
             __builtin_add_overflow(last, reach, &last)))
            last = INT64_MAX;
    }
    if (last > INT64_MAX / (int64_t)bytes - 1)
        return attn_fail(err, ATTN_TOO_LARGE, tensor_member(member, id, "stride"),
                         "%s: its strides reach past 2^63 bytes", name);
    if (axis_of(p, id, 'k') == 1 && t->rank == 4 && p->cu_seqlens_q.rank && p->page_table.rank == 0 && elements > 0 &&
        t->shape[0] > 1 && t->shape[1] > 1 && t->stride[0] != t->shape[1] * t->stride[1])
        return attn_fail(err, ATTN_INVALID, axis_member(member, id, "stride", 0),
                         "%s: stride[0] is %lld, must be %lld with cu_seqlens_q, where rows lie side by side", name,
                         (ll)t->stride[0], (ll)(t->shape[1] * t->stride[1]));
    /* An output need not have memory yet, because attn_run() tests later whether it has memory. */
    if (t->data == NULL && elements > 0 && !attn_writes(p, id))
        return attn_fail(err, ATTN_INVALID, tensor_member(member, id, "data"), "%s: has no data", name);
    if ((uintptr_t)t->data % bytes)
        return attn_fail(err, ATTN_INVALID, tensor_member(member, id, "data"), "%s: data is not aligned to %zu bytes",
                         name, bytes);
    return ATTN_OK;
}

/* ---- 5. The values of options ------------------------------------------------------------------------------------ */

static attn_status check_options(const attn_problem *p, attn_error *err)
{
    if (p->has_scale && !(fabs(p->scale) <= FLT_MAX)) /* the comparison is negated, so that NaN is refused too */
        return attn_fail(err, ATTN_INVALID, "/scale", "scale: is %g, must be between -3.4e38 and 3.4e38 (a float32)",
                         p->scale);
#define X(name, id, least, most, rule, meaning)                 \
    if (p->name != 0 && !(p->name >= least && p->name <= most)) \
        return attn_fail(err, ATTN_INVALID, "/" #name, #name ": is %g, must be " rule, p->name);
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    if (p->window_left < -1)
        return attn_fail(err, ATTN_INVALID, "/window/0", "window: [0] is %lld, must be at least 0, or -1 for unbounded",
                         (ll)p->window_left);
    if (p->window_right < -1)
        return attn_fail(err, ATTN_INVALID, "/window/1", "window: [1] is %lld, must be at least 0, or -1 for unbounded",
                         (ll)p->window_right);
    if (p->keep_mask_at_end && p->keep_mask.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/keep_mask_at_end",
                         "keep_mask_at_end: is true, but keep_mask is not given");
    if (!(p->dropout_p >= 0 && p->dropout_p < 1))
        return attn_fail(err, ATTN_INVALID, "/dropout_p", "dropout_p: is %g, must be at least 0 and below 1%s",
                         p->dropout_p, p->dropout_p > 1 ? "; it is no percentage" : "");
    return ATTN_OK;
}

/* Checks a range of queries (or keys) of an observe (statistics of probabilities), given as [first, end). The range
 * must lie within the `size` queries (or keys) that exist; an end of -1 stands for `size`. */
static attn_status check_side(const char *name, const int64_t side[2], int64_t size, const char *of, attn_error *err)
{
    char member[MEMBER_BYTES];
    for (int end = 0; end < 2; end++) {
        const int64_t low = end == 0 ? 0 : side[0];
        if (end == 1 && side[1] == -1) continue;
        if (side[end] >= low && side[end] <= size) continue;
        snprintf(member, sizeof member, "/%s/%d", name, end);
        return attn_fail(err, ATTN_INVALID, member, "%s: [%d] is %lld, must be between %lld and %lld, %s", name, end,
                         (ll)side[end], (ll)low, (ll)size, of);
    }
    return ATTN_OK;
}

/* Checks the options of an observe (statistics of probabilities). The lengths of the sequences must have been checked
 * before. */
static attn_status check_observe(const attn_problem *p, const attn_dims *d, attn_error *err)
{
    const attn_observe *const o = &p->observe;
    const bool region = p->weights.rank || p->map.rank;
    attn_status status;
    int64_t rows = d->Sq, keys = attn_size_of(p, d, 'y');
    if (p->op != ATTN_OP_OBSERVE) return ATTN_OK;
    if (o->sequence >= 0 && !d->packed)
        return attn_fail(err, ATTN_INVALID, "/sequence", "sequence: belongs to packed sequences, cu_seqlens_q");
    if (o->sequence >= d->B)
        return attn_fail(err, ATTN_INVALID, "/sequence",
                         "sequence: is %lld, must be below %lld, the sequences of "
                         "cu_seqlens_q",
                         (ll)o->sequence, (ll)d->B);
    if (d->packed && o->sequence >= 0) {
        attn_observe whole = { .rows = { 0, -1 }, .keys = { 0, -1 }, .sequence = o->sequence };
        attn_problem one = *p;
        one.observe = whole;
        attn_observe_region(&one);
        rows = one.observe.rows[1], keys = one.observe.keys[1];
    }
    const bool asked = o->rows[0] != 0 || o->rows[1] >= 0 || o->keys[0] != 0 || o->keys[1] >= 0;
    if (d->packed && o->sequence < 0 && (region || asked))
        return attn_fail(err, ATTN_INVALID, "/sequence",
                         "sequence: is missing; weights, map, rows and keys are of one packed sequence");
    if ((status = check_side("rows", o->rows, rows, d->packed ? "the queries of the sequence" : "the queries of q",
                             err)) ||
        (status = check_side("keys", o->keys, keys, d->packed ? "the keys of the sequence" : "the keys of k", err)))
        return status;
    for (int axis = 0; axis < 2; axis++)
        if (o->map[axis] < (p->map.rank ? 1 : 0) || o->map[axis] > ATTN_MAX_MAP)
            return attn_fail(err, ATTN_INVALID, axis ? "/map/1" : "/map/0",
                             "map: [%d] is %lld, must be between 1 and %d", axis, (ll)o->map[axis], ATTN_MAX_MAP);
    if (o->top < (p->top_keys.rank || p->top_weights.rank ? 1 : 0) || o->top > ATTN_MAX_TOP)
        return attn_fail(err, ATTN_INVALID, "/top", "top: is %lld, must be between 1 and %d", (ll)o->top, ATTN_MAX_TOP);
    if (o->key_mass_rows < 0)
        return attn_fail(err, ATTN_INVALID, "/key_mass_rows",
                         "key_mass_rows: is %lld, must be at least 1, or 0 for all", (ll)o->key_mass_rows);
    return ATTN_OK;
}

/* ---- 6. The values in the tensors -------------------------------------------------------------------------------- */

/* A function that looks for an invalid element in a row of `count` elements. It returns the index of the first one, or
 * -1 if all are valid. */
typedef int64_t (*row_test)(const void *row, int64_t count, int64_t limit);

static int64_t first_float_not_finite(const void *row, int64_t count, int64_t minus_inf_allowed)
{
    const float *x = row;
    int64_t j;
    uint32_t any = 0;
    for (j = 0; j < count; j++) /* the loop has no branch, so that the compiler vectorises it */
        any |= (attn_f32_bits(x[j]) & 0x7f800000u) == 0x7f800000u;
    if (!any) return -1;
    for (j = 0; j < count; j++)
        if (!isfinite(x[j]) && !(minus_inf_allowed && x[j] == -INFINITY)) return j;
    return -1;
}

static int64_t first_half_not_finite(const uint16_t *x, int64_t count, uint16_t infinity)
{
    int64_t j;
    uint32_t any = 0;
    for (j = 0; j < count; j++) any |= (uint32_t)((x[j] & infinity) == infinity);
    if (!any) return -1;
    for (j = 0; j < count; j++)
        if ((x[j] & infinity) == infinity && x[j] != (uint16_t)(infinity | 0x8000u)) return j;
    return -1;
}

static int64_t first_f16_not_finite(const void *row, int64_t count, int64_t limit)
{
    (void)limit; /* `limit` is not used, because a bias has no limit: every number that is not NaN or +inf is valid */
    return first_half_not_finite(row, count, 0x7c00u);
}

static int64_t first_bf16_not_finite(const void *row, int64_t count, int64_t limit)
{
    (void)limit;
    return first_half_not_finite(row, count, 0x7f80u);
}

static int64_t first_not_a_bit(const void *row, int64_t count, int64_t limit)
{
    const uint8_t *x = row;
    uint8_t any = 0;
    (void)limit;
    for (int64_t j = 0; j < count; j++) any |= x[j];
    if (any <= 1) return -1;
    for (int64_t j = 0; j < count; j++)
        if (x[j] > 1) return j;
    return -1;
}

static int64_t first_out_of_range(const void *row, int64_t count, int64_t limit)
{
    /* a fixed number of elements lets the compiler vectorise the inner loop */
    enum { AT_ONCE = 64 };
    const int32_t *x = row, most = limit < INT32_MAX ? (int32_t)limit : INT32_MAX;
    int64_t j = 0;
    for (int32_t outside = 0; j + AT_ONCE <= count; j += AT_ONCE) {
        for (int n = 0; n < AT_ONCE; n++) outside |= (x[j + n] < 0) | (x[j + n] > most);
        if (outside) break;
    }
    for (; j < count; j++)
        if (x[j] < 0 || x[j] > most) return j;
    return -1;
}

/* Calls `test` for every row of a tensor (the elements along its last axis). If a row has an invalid element, the error
 * message gives the element's value and then the text `rule`, which says what it must be. */
static attn_status check_rows(const attn_problem *p, attn_tensor_id id, row_test test, int64_t limit, const char *rule,
                              attn_error *err)
{
    const attn_tensor *t = &p->tensor[id];
    const int last = t->rank - 1;
    int64_t index[ATTN_MAX_RANK] = { 0 }, elements;
    if (t->rank == 0 || !attn_shape_elements(t->rank, t->shape, &elements) || elements == 0) return ATTN_OK;
    for (;;) {
        int64_t offset = 0, fault;
        for (int a = 0; a < last; a++) offset += index[a] * t->stride[a];
        fault = test((const char *)t->data + offset * (int64_t)attn_dtype_bytes(t->dtype), t->shape[last], limit);
        if (fault >= 0) {
            const double value = attn_load(t->dtype, t->data, offset + fault);
            char member[MEMBER_BYTES], at[INDEX_BYTES], is[32];
            index[last] = fault;
            /* writes "nan" without printf(), because printf() may write "-nan" */
            if (isnan(value)) snprintf(is, sizeof is, "nan");
            else snprintf(is, sizeof is, "%.10g", value);
            return attn_fail(err, ATTN_INVALID, tensor_member(member, id, "data"), "%s: %s is %s, must be %s",
                             attn_tensors[id].name, index_text(at, t->rank, index), is, rule);
        }
        /* moves `index` to the next row */
        int a = last - 1;
        while (a >= 0 && ++index[a] == t->shape[a]) index[a--] = 0;
        if (a < 0) return ATTN_OK;
    }
}

/* Returns the smallest index i from 1 to n for which values[i] is less than values[i - 1]; n + 1 if there is none. */
static int64_t first_descent(const int32_t *values, int64_t n)
{
    int64_t i = 1;
    while (i <= n && values[i] >= values[i - 1]) i++;
    return i;
}

enum { SUGGESTION_BYTES = 128, SUMS_SHOWN = 3 };
/* Writes a hint for wrong cu_seqlens, which must be the starts of the sequences and the end of the last one. If the
 * values look like the lengths of the sequences, or like their ends, the hint says so. Otherwise it is empty. */
static void lengths_suggestion(char text[SUGGESTION_BYTES], const int32_t *values, int64_t last, int64_t total)
{
    int64_t sum = 0;
    text[0] = '\0';
    for (int64_t i = 0; i <= last; i++) {
        if (values[i] < 0) return;
        sum += values[i];
    }
    if (total > 0 && values[0] > 0 && values[last] == total && sum != total && first_descent(values, last) > last)
        snprintf(text, SUGGESTION_BYTES, "; these look like ends, a 0 before them is wanted: [0, %d%s", values[0],
                 last > 0 ? ", ...]" : "]");
    if (sum != total || total == 0) return;
    size_t n = (size_t)snprintf(text, SUGGESTION_BYTES, "; these look like lengths, their running sums are wanted: [0");
    sum = 0;
    for (int64_t i = 0; i <= last && i < SUMS_SHOWN; i++)
        n += (size_t)snprintf(text + n, SUGGESTION_BYTES - n, ", %lld", (ll)(sum += values[i]));
    snprintf(text + n, SUGGESTION_BYTES - n, last < SUMS_SHOWN ? "]" : ", ...]");
}

static attn_status check_cu_seqlens(const attn_problem *p, attn_tensor_id id, int64_t total, const char *total_of,
                                    attn_error *err)
{
    const attn_tensor *t = &p->tensor[id];
    const int32_t *cu = t->data;
    const char *name = attn_tensors[id].name;
    char member[MEMBER_BYTES], suggestion[SUGGESTION_BYTES];
    int64_t n;
    if (t->rank == 0) return ATTN_OK;
    n = t->shape[0] - 1;
    tensor_member(member, id, "data");
    const int64_t descent = first_descent(cu, n);
    if (cu[0] == 0 && descent > n && cu[n] == total) return ATTN_OK;
    lengths_suggestion(suggestion, cu, n, total);
    if (cu[0] != 0)
        return attn_fail(err, ATTN_INVALID, member, "%s: [0] is %d, must be 0, where the first sequence starts%s", name,
                         cu[0], suggestion);
    if (descent <= n)
        return attn_fail(err, ATTN_INVALID, member, "%s: [%lld] is %d, must be at least %d, the value before it%s",
                         name, (ll)descent, cu[descent], cu[descent - 1], suggestion);
    return attn_fail(err, ATTN_INVALID, member, "%s: [%lld] is %d, must be %lld, the rows of %s%s", name, (ll)n, cu[n],
                     (ll)total, total_of, suggestion);
}

static attn_status check_seqlens(const attn_problem *p, attn_tensor_id id, attn_tensor_id cu_id, int64_t most,
                                 const char *most_of, attn_error *err)
{
    const int32_t *const cu = p->tensor[cu_id].rank ? p->tensor[cu_id].data : NULL;
    const char *const name = attn_tensors[id].name;
    char member[MEMBER_BYTES], rule[160];
    snprintf(rule, sizeof rule, "between 0 and %lld, %s", (ll)most, most_of);
    if (!cu) return check_rows(p, id, first_out_of_range, most, rule, err);
    for (int64_t b = 0; p->tensor[id].rank && b < p->tensor[id].shape[0]; b++) {
        const int32_t is = ((const int32_t *)p->tensor[id].data)[b * p->tensor[id].stride[0]];
        if (is < 0 || is > cu[b + 1] - cu[b])
            return attn_fail(err, ATTN_INVALID, tensor_member(member, id, "data"),
                             "%s: [%lld] is %d, must be between 0 and %d, the rows that %s has for this sequence", name,
                             (ll)b, is, cu[b + 1] - cu[b], attn_tensors[cu_id].name);
    }
    return ATTN_OK;
}

/* Checks cu_seqlens_k of a problem with packed queries whose k is [B, Sk, Hk, D]. If given, cu_seqlens_k must say where
 * each row of k starts. */
static attn_status check_starts(const attn_problem *p, const attn_dims *d, attn_error *err)
{
    const int32_t *const cu = p->cu_seqlens_k.data;
    for (int64_t b = 0; d->packed && p->k.rank == 4 && d->page_size == 0 && b <= d->B; b++)
        if (cu[b] != b * d->row_k)
            return attn_fail(err, ATTN_INVALID, "/cu_seqlens_k/data",
                             "cu_seqlens_k: [%lld] is %d, must be %lld, where that row of k begins; with k [B, Sk, Hk, "
                             "D] it may be left out",
                             (ll)b, cu[b], (ll)(b * d->row_k));
    return ATTN_OK;
}

/* Checks those entries of page_table that kernels read: in row b, the pages that hold its first seqlens_k[b] keys. */
static attn_status check_pages(const attn_problem *p, const attn_dims *d, attn_error *err)
{
    const int32_t *const table = p->page_table.data, *const lengths = p->seqlens_k.data;
    int64_t seen = 0;
    if (p->page_table.rank == 0) return ATTN_OK;
    for (int64_t b = 0; b < d->B; b++) {
        const int64_t length = lengths[b * p->seqlens_k.stride[0]], pages = attn_tiles(length, d->page_size);
        /* with stride 0 all rows of page_table are the same memory, of which the first `seen` entries have been
         * checked */
        if (p->page_table.stride[0] == 0 && pages <= seen) continue;
        const int64_t fault = first_out_of_range(table + b * p->page_table.stride[0], pages, d->pages - 1);
        if (fault >= 0)
            return attn_fail(err, ATTN_INVALID, "/page_table/data",
                             "page_table: [%lld, %lld] is %d, must be between 0 and %lld, a page of k; it is read, for "
                             "seqlens_k[%lld] is %lld and pages have %lld slots",
                             (ll)b, (ll)fault, table[b * p->page_table.stride[0] + fault], (ll)d->pages - 1, (ll)b,
                             (ll)length, (ll)d->page_size);
        seen = pages;
    }
    return ATTN_OK;
}

/* Checks prefix_keys. A prefix must lie within its row and the row before it, and both rows must have the same pages
 * for the prefix. */
static attn_status check_prefixes(const attn_problem *p, const attn_dims *d, attn_error *err)
{
    const int32_t *const table = p->page_table.data, *const lengths = p->seqlens_k.data;
    if (p->prefix_keys == NULL) return ATTN_OK;
    if (p->page_table.rank == 0)
        return attn_fail(err, ATTN_INVALID, "/prefix_keys", "prefix_keys: is given without page_table");
    for (int64_t b = 0; b < d->B; b++) {
        const int64_t keys = p->prefix_keys[b], stride = p->page_table.stride[0];
        const int64_t most =
            b == 0 ? 0 : attn_min64(lengths[b * p->seqlens_k.stride[0]], lengths[(b - 1) * p->seqlens_k.stride[0]]);
        if (keys < 0 || keys > most)
            return attn_fail(err, ATTN_INVALID, "/prefix_keys",
                             "prefix_keys: [%lld] is %lld, must be between 0 and %lld, the keys that this row and the "
                             "one before it both have",
                             (ll)b, (ll)keys, (ll)most);
        for (int64_t n = 0; n < attn_tiles(keys, d->page_size); n++)
            if (table[b * stride + n] != table[(b - 1) * stride + n])
                return attn_fail(err, ATTN_INVALID, "/prefix_keys",
                                 "prefix_keys: [%lld] is %lld, but entry %lld of page_table is %d there and %d in the "
                                 "row before",
                                 (ll)b, (ll)keys, (ll)n, table[b * stride + n], table[(b - 1) * stride + n]);
    }
    return ATTN_OK;
}

static attn_status check_values(const attn_problem *p, const attn_dims *d, attn_error *err)
{
    const row_test bias_test = p->bias.dtype == ATTN_F16    ? first_f16_not_finite
                               : p->bias.dtype == ATTN_BF16 ? first_bf16_not_finite
                                                            : first_float_not_finite;
    char keys[128] = "the keys of k", queries[64];
    attn_status status;
    if (p->page_table.rank)
        snprintf(keys, sizeof keys, "the slots of the %lld pages of a row of page_table", (ll)p->page_table.shape[1]);
    if (p->mask_startend_rows.rank)
        snprintf(queries, sizeof queries, "between 0 and %lld, the queries of q", (ll)d->Sq);
    if ((status = check_cu_seqlens(p, ATTN_T_cu_seqlens_q, d->total_q, "q", err)) ||
        (status = check_cu_seqlens(p, ATTN_T_cu_seqlens_k, d->total_k, "k", err)) ||
        (status = check_starts(p, d, err)) ||
        (status = check_seqlens(p, ATTN_T_seqlens_q, ATTN_T_cu_seqlens_q, d->Sq, "the queries of q", err)) ||
        (status = check_seqlens(p, ATTN_T_seqlens_k, ATTN_T_cu_seqlens_k, d->Sk, keys, err)) ||
        (status = check_pages(p, d, err)) || (status = check_prefixes(p, d, err)) ||
        (status = check_rows(p, ATTN_T_mask_startend_rows, first_out_of_range, d->Sq, queries, err)) ||
        (status = check_rows(p, ATTN_T_keep_mask, first_not_a_bit, 0, "0 or 1", err)) ||
        (status = check_rows(p, ATTN_T_bias, bias_test, 1, "finite or -inf", err)) ||
        (status = check_rows(p, ATTN_T_sinks, first_float_not_finite, 1, "finite or -inf", err)) ||
        (status = check_rows(p, ATTN_T_alibi_slopes, first_float_not_finite, 0, "finite", err)) ||
        (status = check_rows(p, ATTN_T_q_scale, first_float_not_finite, 0, "finite", err)) ||
        (status = check_rows(p, ATTN_T_k_scale, first_float_not_finite, 0, "finite", err)) ||
        (status = check_rows(p, ATTN_T_v_scale, first_float_not_finite, 0, "finite", err)))
        return status;
    return ATTN_OK;
}

/* ---- All checks of a problem, in order --------------------------------------------------------------------------- */

/* Checks q, k and v, then which tensors are given together, then the ranks, dtypes and shapes of the other tensors. */
static attn_status check_shapes(const attn_problem *p, attn_error *err)
{
    attn_status status;
    attn_dims d;
    if ((status = check_qkv(p, err)) || (status = check_company(p, err))) return status;
    d = attn_dims_of(p);
    for (int i = 0; i < ATTN_TENSOR_COUNT; i++) {
        const attn_tensor_id id = (attn_tensor_id)i;
        if (!takes_part(p, id) || id == ATTN_T_q || id == ATTN_T_k || id == ATTN_T_v) continue;
        if ((status = check_rank(p, id, err)) || (status = check_dtype(p, id, err)) ||
            (status = check_sizes(p, id, err)) || (status = check_shape(p, &d, id, err)))
            return status;
    }
    return ATTN_OK;
}

/* Returns whether the tensor, read in layout `layout`, has fewer heads than rows. This is a sign of the correct layout,
 * because real problems nearly always have fewer heads than rows. */
static bool heads_are_fewer(const attn_tensor *t, attn_layout layout)
{
    const int heads = layout == ATTN_BHSD ? 1 : 2;
    return t->shape[heads] < t->shape[3 - heads];
}

/* Adds a hint to the message about a refused shape if all shapes are valid in the other layout (bshd or bhsd) and that
 * layout is likelier. A request in bhsd gets no hint, because its client chose that layout. */
static void suspect_layout(const attn_problem *p, attn_error *err)
{
    attn_problem other = *p;
    if (err == NULL || err->status != ATTN_INVALID || strstr(err->member, "/shape/") == NULL) return;
    if (strncmp(err->member, "/alibi_slopes/", strlen("/alibi_slopes/")) == 0) return;
    /* a tensor with 0 heads or rows fits both layouts, so that nothing can be said about its layout */
    for (int a = 1; a <= 2; a++)
        if (p->q.shape[a] == 0 || p->k.shape[a] == 0) return;
    const bool as_bhsd = p->layout == ATTN_BSHD;
    other.layout = as_bhsd ? ATTN_BHSD : ATTN_BSHD;
    const bool one_query = p->q.shape[as_bhsd ? 2 : 1] == 1;
    if (!heads_are_fewer(&p->k, other.layout) || (!one_query && !heads_are_fewer(&p->q, other.layout))) return;
    if (p->cu_seqlens_q.rank > 0 || check_shapes(&other, NULL) != ATTN_OK) return;
    const size_t used = strlen(err->text);
    snprintf(err->text + used, sizeof err->text - used, "; read as %s all would fit: is \"layout\": \"bhsd\" %s?",
             as_bhsd ? "[B, H, S, D]" : "[B, S, H, D]", as_bhsd ? "missing" : "meant");
}

/* Adds a hint to the message about a refused shape of k, if k would be valid with its last two axes exchanged, or if q
 * and k were exchanged. */
static void suspect_k(const attn_problem *p, attn_error *err)
{
    attn_problem transposed = *p, exchanged = *p;
    attn_tensor *const k = &transposed.k;
    if (err == NULL || err->status != ATTN_INVALID || strncmp(err->member, "/k/shape/", strlen("/k/shape/")) != 0)
        return;
    k->shape[k->rank - 1] = p->k.shape[k->rank - 2];
    k->shape[k->rank - 2] = p->k.shape[k->rank - 1];
    exchanged.q = p->k, exchanged.k = p->q;
    const char *const suggestion =
        check_shapes(&transposed, NULL) == ATTN_OK
            ? "with its last two axes exchanged it would fit; k is sent as it is, not transposed"
        : check_shapes(&exchanged, NULL) == ATTN_OK ? "did q and k change places?"
                                                    : NULL;
    const size_t used = strlen(err->text);
    if (suggestion) snprintf(err->text + used, sizeof err->text - used, "; %s", suggestion);
}

attn_status attn_check(const attn_problem *p, attn_error *err)
{
    attn_status status = check_shapes(p, err);
    if (status != ATTN_OK) {
        suspect_layout(p, err);
        suspect_k(p, err);
        return status;
    }
    const attn_dims d = attn_dims_of(p);
    /* the bytes of out and lse must fit in int64_t even if the client does not want these outputs, because kernels
     * compute them */
    {
        int64_t bytes;
        const int64_t rows[] = { d.packed ? 1 : d.B, d.Sq, d.H, d.D > d.Dv ? d.D : d.Dv };
        if (!attn_shape_bytes(ATTN_F32, 4, rows, &bytes))
            return attn_fail(err, ATTN_TOO_LARGE, "/q/shape", "q: its result would be over 2^61 elements");
    }
    for (int i = 0; i < ATTN_TENSOR_COUNT; i++)
        if (takes_part(p, (attn_tensor_id)i) && (status = check_memory(p, (attn_tensor_id)i, err))) return status;
    if ((status = check_options(p, err)) || (status = check_values(p, &d, err))) return status;
    return check_observe(p, &d, err);
}
