/* padding.c: the results of padding rows. Padding rows are the rows of a sequence behind its seqlens_q, and in dk and
 * dv of packed keys the rows behind its seqlens_k. In a packed tensor they are the gap before the next sequence.
 * Kernels do not write them. attn_fill_padding() sets out, dq, dk and dv to 0 there, and lse to -inf. All outputs of an
 * observe (statistics of probabilities) are filled completely, because its kernels write only rows that exist and keys
 * that some query sees. */
#include <math.h>
#include <string.h>

#include "attention.h"
#include "backend.h"
#include "tiles.h"

static void fill_rows(const attn_view *view, int64_t heads, int64_t columns, int64_t b, int64_t first, int64_t end)
{
    const size_t bytes = attn_dtype_bytes(view->dtype);
    for (int64_t h = 0; view->data && h < heads; h++)
        for (int64_t row = first; row < end; row++)
            memset((char *)view->data + (size_t)attn_at(view, b, h, row) * bytes, 0, (size_t)columns * bytes);
}

static void fill_lse(const attn_view *view, int64_t heads, int64_t b, int64_t first, int64_t end)
{
    for (int64_t h = 0; view->data && h < heads; h++)
        for (int64_t row = first; row < end; row++) ((float *)view->data)[attn_at(view, b, h, row)] = -INFINITY;
}

/* Fills one output tensor of an observe operation (statistics of attention probabilities) with the values that stand
 * for "no key seen": -1 for indices, -infinity for maxima and lse, 0 for the rest. */
static void fill_observed(const attn_tensor *t, attn_tensor_id id)
{
    const int32_t no_key = -1;
    const float nothing = id == ATTN_T_row_max || id == ATTN_T_lse || id == ATTN_T_max_logit ? -INFINITY : 0;
    const int last = t->rank - 1;
    int64_t index[ATTN_MAX_RANK] = { 0 }, elements;
    if (!attn_shape_elements(t->rank, t->shape, &elements) || elements == 0) return;
    for (int a = 0; a >= 0;) {
        int64_t at = 0;
        for (int x = 0; x < last; x++) at += index[x] * t->stride[x];
        for (int64_t c = 0; c < t->shape[last]; c++)
            if (t->dtype == ATTN_I32) ((int32_t *)t->data)[at + c] = no_key;
            else ((float *)t->data)[at + c] = nothing;
        for (a = last - 1; a >= 0 && ++index[a] == t->shape[a]; a--) index[a] = 0;
    }
}

void attn_fill_padding(const attn_problem *p)
{
    for (int id = 0; p->op == ATTN_OP_OBSERVE && id < ATTN_TENSOR_COUNT; id++)
        if (p->tensor[id].rank && attn_writes(p, (attn_tensor_id)id)) fill_observed(&p->tensor[id], (attn_tensor_id)id);
    if (p->op == ATTN_OP_OBSERVE) return;
    if (!p->seqlens_q.rank && !(p->seqlens_k.rank && p->cu_seqlens_k.rank)) return;
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims *const d = &g.dims;
    const bool forward = p->op == ATTN_OP_FORWARD;
    for (int64_t b = 0; b < d->B; b++) {
        const attn_sequence s = attn_sequence_of(&g, b);
        const int64_t q0 = s.q_start + s.Sq, q1 = s.q_start + attn_room_of(g.cu_q, d->Sq, b);
        const int64_t k0 = s.k_start + s.Sk, k1 = g.cu_k ? g.cu_k[b + 1] : k0;
        if (forward) {
            fill_rows(&g.view[ATTN_T_out], d->H, d->Dv, b, q0, q1);
            fill_lse(&g.view[ATTN_T_lse], d->H, b, q0, q1);
            continue;
        }
        fill_rows(&g.view[ATTN_T_dq], d->H, d->D, b, q0, q1);
        fill_rows(&g.view[ATTN_T_dk], d->Hk, d->D, b, k0, k1);
        fill_rows(&g.view[ATTN_T_dv], d->Hk, d->Dv, b, k0, k1);
    }
}
