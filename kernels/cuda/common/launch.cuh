/* launch.cuh: launches whose kernel is made ready while the one before it in the stream runs, and waits itself for
 * its end (programmatic dependent launch). Every block of such a kernel waits (wait_for_prerequisites()), also one with
 * nothing to do: the kernel after it waits for its end alone, which must not come before the end of the one before
 * it. */
#ifndef ATTN_CUDA_LAUNCH_CUH
#define ATTN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

/* `overlap`: was the kernel's code made for compute capability 9.0 or above? Else it is launched as others are. */
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
