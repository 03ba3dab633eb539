/* kernels.h: the table of CUDA kernel families, and what a family offers to device.cu.
 *
 * A family is one row: a name (what an answer's `backend` says), the operation, the oldest compute capability, which problems it
 * covers, how much scratch it wants, and its launcher. device.cu takes the first row that covers a problem, so fast rows stand
 * before general ones; adding a family is adding a row to cuda_kernels[] in kernels.cu. */
#ifndef ATTN_CUDA_KERNELS_H
#define ATTN_CUDA_KERNELS_H

#include <cuda_runtime.h>

#include "kernels/attention.h"

/* What a launcher may know of the device. */
struct cuda_chip {
    int major, minor;
    int multiprocessors;
    int shared_bytes; /* most dynamic shared memory of a block */
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

extern const struct cuda_kernel *const cuda_kernels[];
extern const int cuda_kernel_count;

#endif
