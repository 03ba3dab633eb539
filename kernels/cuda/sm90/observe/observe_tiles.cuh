/* observe_tiles.cuh: what the two passes of an observe (statistics of attention weights) that use wgmma have in common.
 *
 * Both passes compute S = Q K^T in tiles of 64 queries (one warpgroup) and BN keys. A thread has the scores of two
 * rows, i0 and i0 + 8: register n * 4 + half * 2 + e is row i0 + half * 8, column n * 8 + lane % 4 * 2 + e. */
#ifndef ATTN_SM90_OBSERVE_TILES_CUH
#define ATTN_SM90_OBSERVE_TILES_CUH

#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"
#include "kernels/cuda/sm90/observe/ptx.cuh"
#include "kernels/cuda/sm80/observe_common.cuh"

namespace {

const int BN = 128;

/* The tensor maps of q and k. A load brings 64 rows of q, or BN rows of k. */
struct qk_maps {
    CUtensorMap Q, K;
};
static inline bool make_maps(const attn_geometry &g, qk_maps &maps)
{
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    return tma_map(&maps.Q, tma_tensor_of(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D), 64) &&
           tma_map(&maps.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), BN);
}

/* Prefetches the maps, and initialises the barriers in `memory`. All threads must call this. */
template <class MEMORY> DEVICE void begin_observe(const qk_maps &maps, MEMORY &memory)
{
    if (threadIdx.x == 0) {
        prefetch_tensormap(&maps.Q);
        prefetch_tensormap(&maps.K);
        memory.init();
        fence_mbarrier_init();
    }
    __syncthreads();
}

DEVICE key_band band_of(const attn_geometry &g, const attn_sequence &s)
{
    return key_band_of((int)attn_align(&g, &s), (int)attn_min64(g.left, FAR), (int)attn_min64(g.right, FAR), (int)s.Sk);
}

/* Returns the batch row of the tensors that holds sequence b. */
DEVICE int tensor_batch(const attn_geometry &g, int64_t b)
{
    return g.dims.packed ? 0 : (int)b;
}

/* Calls visit() with the smallest of 64, 128, 192 and 256 that is at least D, as a std::integral_constant. */
template <class F> auto with_head_size(int64_t D, F visit)
{
    return D <= 64    ? visit(std::integral_constant<int, 64>())
           : D <= 128 ? visit(std::integral_constant<int, 128>())
           : D <= 192 ? visit(std::integral_constant<int, 192>())
                      : visit(std::integral_constant<int, 256>());
}

} // namespace

#endif
