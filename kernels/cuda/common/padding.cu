/* padding.cu: writes the results of padding rows: -inf for lse, 0 for out and gradients. Padding rows lie past a
 * sequence's length in seqlens_q or seqlens_k, or in the gaps between packed sequences. Other kernels run later and do
 * not write these rows. For an observe (statistics of attention weights) every row of the outputs is filled: with -inf
 * (row_max, lse, max_logit), -1 (top_keys) or 0. */
#include "kernels/cuda/common/args.cuh"

namespace {

enum { WARPS = 4, MOST_BLOCKS = 1 << 16 };

struct padded {
    attn_view view;
    /* `rows`: number of rows of one batch element, or of all packed sequences together */
    int64_t rows, heads, columns;
    const int32_t *cu; /* cu_seqlens; NULL if the tensor is not packed */
    bool of_queries, lse;
};

__global__ void __launch_bounds__(32 * WARPS)
    fill_rows(const __grid_constant__ attn_geometry g, const __grid_constant__ padded x, int64_t count)
{
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < count; n += (int64_t)gridDim.x * WARPS) {
        const int64_t line = n % x.rows, h = n / x.rows % x.heads,
                      b = x.cu ? sequence_at(x.cu, g.dims.B, line) : n / x.rows / x.heads;
        const attn_sequence s = attn_sequence_of(&g, b);
        if (line < (x.of_queries ? s.q_start + s.Sq : s.k_start + s.Sk)) continue;
        const int64_t to = attn_at(&x.view, b, h, line);
        for (int64_t c = threadIdx.x % 32; c < x.columns; c += 32)
            store_float(x.view.dtype, x.view.data, to + c, x.lse ? -CUDART_INF_F : 0);
    }
}

__global__ void __launch_bounds__(32 * WARPS)
    fill_tensor(const __grid_constant__ attn_tensor t, int64_t count, uint32_t bits)
{
    const int64_t threads = (int64_t)gridDim.x * 32 * WARPS;
    for (int64_t n = (int64_t)blockIdx.x * 32 * WARPS + threadIdx.x; n < count; n += threads) {
        int64_t at = 0, rest = n;
        for (int axis = t.rank - 1; axis >= 0; axis--) {
            at += rest % t.shape[axis] * t.stride[axis];
            rest /= t.shape[axis];
        }
        ((uint32_t *)t.data)[at] = bits;
    }
}

cudaError_t fill_observed(cudaStream_t stream, const attn_problem *p)
{
    const uint32_t minus_infinity = 0xff800000u, no_key = 0xffffffffu;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor &t = p->tensor[id];
        const bool scores = id == ATTN_T_row_max || id == ATTN_T_lse || id == ATTN_T_max_logit;
        int64_t count;
        if (t.rank == 0 || !attn_writes(p, (attn_tensor_id)id) || !attn_shape_elements(t.rank, t.shape, &count) ||
            count == 0)
            continue;
        const int64_t blocks = attn_min64(attn_tiles(count, 32 * WARPS), MOST_BLOCKS);
        fill_tensor<<<(unsigned)blocks, 32 * WARPS, 0, stream>>>(t, count,
                                                                 scores                  ? minus_infinity
                                                                 : id == ATTN_T_top_keys ? no_key
                                                                                         : 0);
    }
    return cudaPeekAtLastError();
}

} // namespace

cudaError_t cuda_fill_padding(cudaStream_t stream, const attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const bool forward = plan->problem->op == ATTN_OP_FORWARD;
    if (plan->problem->op == ATTN_OP_OBSERVE) return fill_observed(stream, plan->problem);
    const auto fill = [&](attn_tensor_id id, bool of_queries, int64_t columns) {
        const padded x = { g.view[id],      of_queries ? d.Sq : d.Sk,     of_queries ? d.H : d.Hk,
                           columns,         of_queries ? g.cu_q : g.cu_k, of_queries,
                           id == ATTN_T_lse };
        const int64_t count = x.rows * x.heads * (x.cu ? 1 : d.B);
        if (!x.view.data || count == 0) return;
        fill_rows<<<(unsigned)attn_min64(attn_tiles(count, WARPS), MOST_BLOCKS), 32 * WARPS, 0, stream>>>(g, x, count);
    };
    if (forward && g.seqlens_q) {
        fill(ATTN_T_out, true, d.Dv);
        fill(ATTN_T_lse, true, 1);
    }
    if (!forward && g.seqlens_q) fill(ATTN_T_dq, true, d.D);
    if (!forward && g.seqlens_k && g.cu_k) {
        fill(ATTN_T_dk, false, d.D);
        fill(ATTN_T_dv, false, d.Dv);
    }
    return cudaPeekAtLastError();
}
