/* pair.cuh: the gradient of one pair of a query and a key, computed by a warp. */
#ifndef ATTN_CUDA_PAIR_CUH
#define ATTN_CUDA_PAIR_CUH

#include "kernels/cuda/common/rows.cuh"

/* Returns P and dZ (the gradient of the score after softcap) of a visible pair of a query and a key. The query's lse
 * must not be -inf. The whole warp calls it. */
template <int N>
static __device__ __noinline__ pair_gradient gradient_of_pair(const cuda_args &a, const saved &s, const head_args &x,
                                                              int64_t i, int64_t j)
{
    const attn_geometry &g = a.g;
    const int64_t at = lse_at(a, x, i);
    float q[N], k[N], dout[N], v[N];
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, g.dims.D, q);
    load_row(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, g.dims.D, k);
    load_row(g.view[ATTN_T_dout], x.b, x.h, x.s.q_start + i, g.dims.Dv, dout);
    load_row(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start + j, g.dims.Dv, v);
    return gradient(a, x, i, j, s.lse[at], s.rest[at], s.delta[at], q, k, dot(dout, v));
}

#endif
