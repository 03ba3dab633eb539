/* padding.c: the results of padding rows. Padding rows lie behind the seqlens_q of a sequence, or in the gap between
 * two packed sequences. Kernels do not write them. attn_fill_padding() sets out, dq, dk and dv to 0 there, and lse
 * to -inf. */
#include <math.h>
#include <string.h>

#include "attention.h"
#include "backend.h"
#include "tiles.h"

/* Sets rows [first, end) of sequence b to 0, in every head. */
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

void attn_fill_padding(const attn_problem *p)
{
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
