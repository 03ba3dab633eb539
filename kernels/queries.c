/* queries.c: makes a problem from some of the queries of another problem. */
#include "kernels/queries.h"

#include "kernels/axes.h"
#include "kernels/tiles.h"

/* Returns the number r such that each query i sees the keys up to i + r. The problem's window must be bounded on the
 * right. */
static int64_t reach_of(const attn_problem *p, const attn_dims *d)
{
    return (p->causal ? 0 : p->window_right) + (p->alignment == ATTN_TOP_LEFT ? 0 : d->Sk - d->Sq);
}

static bool is_bounded(const attn_problem *p)
{
    return p->causal || p->window_right >= 0;
}

bool attn_queries_divide(const attn_problem *p)
{
    const attn_dims d = attn_dims_of(p);
    if (p->op == ATTN_OP_OBSERVE || d.packed || d.page_size > 0) return false;
    if (p->alibi_slopes.rank || p->mask_startend_rows.rank || p->seqlens_q.rank || p->dropout_p > 0) return false;
    if (p->window_left >= 0) return false;
    if (!is_bounded(p)) return true;
    if (p->seqlens_k.rank && p->alignment != ATTN_TOP_LEFT) return false;
    /* Kernels use other code for windows that are wider than the number of keys. A part (some of the queries) gives the
     * same bits as the whole problem only if no part has such a window. */
    return reach_of(p, &d) >= 0 && reach_of(p, &d) + d.Sq <= d.Sk;
}

/* Returns the index of a tensor's axis of queries; -1 if the tensor has no such axis, or if all queries share one entry
 * (size 1). */
static int query_axis(const attn_problem *p, attn_tensor_id id)
{
    char letters[ATTN_MAX_RANK + 1];
    const int rank = attn_axes_of(p, id, letters);
    for (int axis = 0; axis < rank; axis++)
        if (letters[axis] == 'q') return p->tensor[id].shape[axis] == attn_dims_of(p).Sq ? axis : -1;
    return -1;
}

attn_problem attn_queries_of(const attn_problem *p, int64_t first, int64_t end)
{
    const attn_dims d = attn_dims_of(p);
    attn_problem some = *p;
    some.whole_queries = p->whole_queries ? p->whole_queries : d.Sq;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        attn_tensor *const t = &some.tensor[id];
        const int axis = t->rank > 0 ? query_axis(p, (attn_tensor_id)id) : -1;
        if (axis < 0) continue;
        if (t->data) t->data = (char *)t->data + first * t->stride[axis] * (int64_t)attn_dtype_bytes(t->dtype);
        t->shape[axis] = end - first;
    }
    if (is_bounded(p)) {
        some.window_right = reach_of(p, &d) + first;
        some.alignment = ATTN_TOP_LEFT;
        some.causal = false;
    }
    return some;
}

bool attn_is_sum_of_queries(const attn_problem *p, attn_tensor_id id)
{
    return p->tensor[id].rank > 0 && attn_writes(p, id) && query_axis(p, id) < 0;
}

/* Returns how many (query, key) pairs the causal mask or the window leaves visible for the first `queries` queries of a
 * head. */
static int64_t pairs_of(const attn_problem *p, const attn_dims *d, int64_t queries)
{
    return is_bounded(p) ? attn_clamped_sum(reach_of(p, d) + 1, queries, d->Sk) : queries * d->Sk;
}

bool attn_queries_share(const attn_problem *p, int count, int64_t *ends, double *shares)
{
    const attn_dims d = attn_dims_of(p);
    const int64_t units = d.Sq / ATTN_QUERY_UNIT;
    const double all = (double)pairs_of(p, &d, d.Sq);
    int64_t unit = 0, before = 0;
    if (units < count || all <= 0) return false;
    for (int n = 0; n < count; n++) {
        const double want = all * (n + 1) / count;
        /* The largest end that range n may have, in units of ATTN_QUERY_UNIT queries. Each of the later ranges needs at
         * least one unit. */
        const int64_t last = units - (count - 1 - n);
        for (unit++; unit < last; unit++) {
            const int64_t here = unit * ATTN_QUERY_UNIT, next = here + ATTN_QUERY_UNIT;
            if ((double)pairs_of(p, &d, here) + (double)pairs_of(p, &d, next) >= 2 * want) break;
        }
        ends[n] = n + 1 < count ? unit * ATTN_QUERY_UNIT : d.Sq;
        const int64_t until = pairs_of(p, &d, ends[n]);
        shares[n] = (double)(until - before) / all;
        before = until;
    }
    return true;
}
