/* observe_merge.cuh: merges the sums of a row over some keys with those over other keys, with the same bits in every
 * kernel. The sums (m, l, e) are those of observed_parts in observe.h. */
#ifndef ATTN_SM80_OBSERVE_MERGE_CUH
#define ATTN_SM80_OBSERVE_MERGE_CUH

#include "kernels/cuda/common/args.cuh"
#include "ptx.cuh"

namespace {

/* Converts l and e of a part of a row to those relative to a larger maximum. */
DEVICE float2 relative_to(const float4 &part, float by)
{
    const float scale = part.x == -CUDART_INF_F ? 0 : exp2_fast(by);
    if (scale == 0) return make_float2(0, 0);
    return make_float2(__fmul_rn(part.y, scale), __fmul_rn(scale, fmaf(by, part.y, part.z)));
}

template <bool SCORE_MODS> DEVICE float in_unit_2(float most, float scale_log2)
{
    return SCORE_MODS ? in_base_2(most) : __fmul_rn(most, scale_log2);
}

template <bool SCORE_MODS> DEVICE float4 merged(const float4 &x, const float4 &y, float scale_log2)
{
    const float most = max_or_nan(x.x, y.x), m = in_unit_2<SCORE_MODS>(most, scale_log2);
    const float2 u = relative_to(x, in_unit_2<SCORE_MODS>(x.x, scale_log2) - m),
                 v = relative_to(y, in_unit_2<SCORE_MODS>(y.x, scale_log2) - m);
    return make_float4(most, __fadd_rn(u.x, v.x), __fadd_rn(u.y, v.y), 1);
}

} // namespace

#endif
