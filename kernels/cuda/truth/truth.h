/* truth.h: float64 results, with which other results are compared: attn_truth_need(), attn_truth_some() and
 * attn_truth_compare() of attention.h on GPUs. */
#ifndef ATTN_CUDA_TRUTH_H
#define ATTN_CUDA_TRUTH_H

#include "kernels/cuda/common/kernels.h"

/* For attn_truth_need(): the memory and time that float64 results need. Returns false if the problem's sizes
 * overflow. */
bool cuda_truth_need(const cuda_chip *chip, const attn_problem *problem, attn_truth_cost *cost);

/* For attn_truth_some(): computes float64 results in several steps (short launches). A call queues only the steps that
 * chip->steps selects. */
cudaError_t cuda_truth(const cuda_chip *chip, cudaStream_t stream, const attn_problem *problem,
                       const attn_truth *results, void *workspace);

/* For attn_truth_compare(): measures how far results are from float64 results (in compare.cu). */
cudaError_t cuda_truth_compare(cudaStream_t stream, const attn_problem *problem, const attn_truth *truth,
                               attn_truth_distance *distances);

#endif
