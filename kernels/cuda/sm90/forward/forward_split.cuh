/* forward_split.cuh: launches the Hopper forward for sequences whose keys are split: few rows over many keys, such as
 * chunks of a prompt. The keys of a work tile are divided into splits (split_rule.h), so that all multiprocessors have
 * work. forward_tiles leaves the sums of splits in the workspace, and merge_splits adds them (splits.cuh). Where a
 * batch has enough tiles of rows, one work tile computes all splits of its rows, one after the other. Both ways give
 * the same bits. */
#ifndef ATTN_SM90_FORWARD_SPLIT_CUH
#define ATTN_SM90_FORWARD_SPLIT_CUH

#include "kernels/cuda/sm90/forward/forward_tiles.cuh"

namespace {

/* ---- Functions of the host --------------------------------------------------------------------------------------- */

enum { SPLIT_BM = 128 }; /* number of rows of a work tile */

/* Returns what the rule that splits keys needs to know of the work tiles. The shapes have head sizes up to D, and BN
 * keys per tile. A key/value head gets at most 16 work tiles: with eight key/value heads, these nearly fill the 132
 * multiprocessors of an H100. With 17, the last four work tiles would begin when the others end: 128 queries of 8 heads
 * over 40960 keys took 1.37 times as long (H200, 2026-11-28). */
constexpr split_tile split_tile_of_shape(int D, int BN, bool packs)
{
    return { SPLIT_BM, BN, D > 128 ? 512 : 1024, 16, packs };
}

/* Launches the forward of the sequences whose keys are split by the rule job.splits. */
template <typename T, class X> cudaError_t launch_splits(const forward_job &job)
{
    static_assert(X::BM == SPLIT_BM, "what split_tile_of_shape() says");
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const split_rule &r = job.splits;
    if (r.BN != X::BN) return cudaErrorInvalidValue;
    kv_maps maps;
    const CUtensorMap none = {};
    if (!tma_map(&maps.Q, queries_by_head(g), 1 << r.shift, 128, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 64 >> r.shift) ||
        !tma_map(&maps.K, tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D), X::BN) ||
        !tma_map(&maps.V, tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv), X::BN))
        return cudaErrorInvalidValue;
    cudaError_t code = allow_shared<forward_tiles<T, X>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    const split_layout y = split_layout_of(job.chip, r, d, X::DV, 1);
    plan_of<X> p;
    code = begin_plan<X>(job, p);
    if (code != cudaSuccess) return code;
    make_split_plan(r, y, job.split_memory, p);
    if constexpr (X::PAIRS) p.out_scale = p.dropout.scale, p.huge_scores = true;
    p.least_Sk = 0, p.most_Sk = INT32_MAX;
    take_share(job.chip, p.order);
    if (p.order.first < p.order.end)
        code = launch_dependent(forward_tiles<T, X>, attn_min64(p.order.end - p.order.first, job.chip->multiprocessors),
                                X::THREADS, sizeof(shared<X>), job.stream, p, maps, none, job.given);
    if (code != cudaSuccess || y.in_turn || !is_last_share(job.chip)) return code;
    return launch_dependent(merge_splits<T, X::BM, X::BN, 4 * X::C, X::DV>, y.per_head * y.heads * 4 * X::C, X::DV, 0,
                            job.stream, (const split_plan &)p, job.given);
}

} // namespace

#endif
