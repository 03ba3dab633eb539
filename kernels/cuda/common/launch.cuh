/* launch.cuh: programmatic dependent launch. The GPU prepares such a kernel while the previous
 * kernel of the stream still runs; the kernel itself waits for that one's end. Every block must
 * call wait_for_prerequisites(), even a block without work. Otherwise this kernel could end before
 * the previous one, and the next kernel waits for this one's end only. */
#ifndef ATTN_CUDA_LAUNCH_CUH
#define ATTN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* `overlap`: the kernel's code was made for compute capability 9.0 or above. If false, this is an
 * ordinary launch. */
template <class... P, class... A>
cudaError_t launch_kernel(bool overlap, void (*kernel)(P...), dim3 blocks, int threads, size_t shared_bytes,
                          cudaStream_t stream, const A &...args)
{
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class... P, class... A>
cudaError_t launch_dependent(void (*kernel)(P...), int64_t blocks, int threads, size_t shared_bytes,
                             cudaStream_t stream, const A &...args)
{
    return launch_kernel(true, kernel, dim3((unsigned)blocks), threads, shared_bytes, stream, args...);
}

#endif
