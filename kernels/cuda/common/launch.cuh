/* launch.cuh: programmatic dependent launch: a kernel starts while the stream's previous kernel still runs. By
 * wait_for_prerequisites() it waits for the end of that kernel.
 * Every block must call wait_for_prerequisites(), even a block without work. Otherwise this kernel could end before the
 * previous kernel does. The next kernel waits only for this one, and could then start too early. */
#ifndef ATTN_CUDA_LAUNCH_CUH
#define ATTN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* Launches a kernel. If `overlap` is true, this is a programmatic dependent launch, which needs code compiled for
 * compute capability 9.0 or above. */
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
