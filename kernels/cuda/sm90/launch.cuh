/* launch.cuh: launches whose kernel is made ready while the one before it in the stream runs, and waits itself for
 * its end (programmatic dependent launch). */
#ifndef ATTN_SM90_LAUNCH_CUH
#define ATTN_SM90_LAUNCH_CUH

#include <cuda_runtime.h>

template <class... P, class... A>
cudaError_t launch_dependent(void (*kernel)(P...), int64_t blocks, int threads, size_t shared_bytes,
                             cudaStream_t stream, const A &...args)
{
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

#endif
