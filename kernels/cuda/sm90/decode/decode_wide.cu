/* decode_wide.cu: computes the splits of sm80/decode_wide.cu on Hopper, with tiles that TMA loads
 * (decode_copies.cuh). */
#include "decode_copies.cuh"

namespace {

template <typename T>
cudaError_t launch_for(const copy_plan &copies, const cuda_args &a, const plan &p, int D, int64_t blocks,
                       cudaStream_t stream)
{
    return D == 512 ? launch_splits<T, 512, KEYS_AS_T>(copies, a, p, blocks, stream)
                    : launch_splits<T, 1024, KEYS_AS_T>(copies, a, p, blocks, stream);
}

} // namespace

bool wide_decode_by_engine(const cuda_chip *chip, cudaStream_t stream, const attn_plan *of, const cuda_args &a,
                           const decode_plan &p, int64_t blocks, cudaError_t *code)
{
    const int D = attn_max64(a.g.dims.D, a.g.dims.Dv) <= 512 ? 512 : 1024;
    copy_plan copies;
    if (!plan_copies(&copies, chip, of, a, shape<512, false, false, true, KEYS_AS_T>::BN, D * 2)) return false;
    *code = of->problem->q.dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(copies, a, p, D, blocks, stream)
                                              : launch_for<compiled_half>(copies, a, p, D, blocks, stream);
    return true;
}
