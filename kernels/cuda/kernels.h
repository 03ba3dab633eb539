/* kernels.h: the table of CUDA kernel families, and what a family offers to device.cu.
 *
 * A family is one row: a name (what an answer's `backend` says), the operation, the oldest compute capability,
 * which problems it covers, how much scratch it wants, and its launcher. device.cu takes the first row that covers
 * a problem, so fast rows stand before general ones; adding a family is adding a row to cuda_kernels[] in
 * kernels.cu. */
#ifndef ATTN_CUDA_KERNELS_H
#define ATTN_CUDA_KERNELS_H

#include <atomic>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/attention.h"

/* What a launcher may know of the device. */
struct cuda_chip {
    int major, minor;
    int multiprocessors;
    int shared_bytes; /* most dynamic shared memory of a block */
    /* 0, but in a run that decode.cu makes of another forward kernel: packed sequences of at most so many rows
     * (queries times heads of a group) are left alone, for they are its own. */
    int decode_rows;
};

struct cuda_kernel {
    const char *name;
    attn_op op;
    int compute; /* major * 10 + minor, at least */
    bool (*covers)(const struct cuda_chip *chip, const attn_problem *p);
    /* Device memory that run() may scribble on, in bytes. Depends on the problem and the chip alone. */
    size_t (*workspace)(const struct cuda_chip *chip, const attn_problem *p);
    /* Queues the kernels of one checked, covered problem, whose pointers are device memory. Never waits. */
    cudaError_t (*run)(const struct cuda_chip *chip, cudaStream_t stream, const attn_problem *p, void *workspace);
};

/* Lets `kernel` have that much dynamic shared memory on the current device. The runtime is asked once a device
 * (each has a context of its own), not at every launch. */
template <auto kernel> cudaError_t allow_shared(size_t bytes)
{
    static std::atomic<uint64_t> allowed; /* a bit a device */
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    const uint64_t bit = device < 64 ? UINT64_C(1) << device : 0;
    if (code != cudaSuccess || (allowed.load(std::memory_order_relaxed) & bit)) return code;
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
    return code;
}

extern const struct cuda_kernel *const cuda_kernels[];
extern const int cuda_kernel_count;

#endif
