/* encode.h: the driver's function that makes the maps of TMA. */
#ifndef ATTN_CUDA_ENCODE_H
#define ATTN_CUDA_ENCODE_H

#include <atomic>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

typedef PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder;

/* NULL: this driver has none. It is looked up once; threads that come at the same time find the same address. */
inline tensor_map_encoder encoder()
{
    static std::atomic<tensor_map_encoder> known;
    tensor_map_encoder encode = known.load(std::memory_order_relaxed);
    cudaDriverEntryPointQueryResult found;
    if (encode) return encode;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess)
        return nullptr;
    known.store(encode, std::memory_order_relaxed);
    return encode;
}

#endif
