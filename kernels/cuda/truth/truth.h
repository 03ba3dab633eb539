/* truth.h: what device.cu calls for attn_truth_need(), attn_truth_some() and attn_truth_compare() of attention.h:
 * results in float64 with which others are compared. */
#ifndef ATTN_CUDA_TRUTH_H
#define ATTN_CUDA_TRUTH_H

#include "kernels/cuda/common/kernels.h"

/* Implements attn_truth_need(). Returns false if the problem's sizes overflow. */
bool cuda_truth_need(const cuda_chip *chip, const attn_problem *problem, attn_truth_cost *cost);

/* Implements attn_truth_some(): queues the steps that chip->steps selects. */
cudaError_t cuda_truth(const cuda_chip *chip, cudaStream_t stream, const attn_problem *problem,
                       const attn_truth *results, void *workspace);

/* Implements attn_truth_compare(). The function is in compare.cu. */
cudaError_t cuda_truth_compare(cudaStream_t stream, const attn_problem *problem, const attn_truth *truth,
                               attn_truth_distance *distances);

#endif
