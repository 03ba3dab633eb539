/* truth.h: the functions that device.cu calls for attn_truth_need(), attn_truth_some() and attn_truth_compare() of
 * attention.h. They compute float64 results, with which other results are compared. */
#ifndef ATTN_CUDA_TRUTH_H
#define ATTN_CUDA_TRUTH_H

#include "kernels/cuda/common/kernels.h"

/* Computes the memory and time that float64 results of the problem need, for attn_truth_need(). Returns false if the
 * problem's sizes overflow. */
bool cuda_truth_need(const cuda_chip *chip, const attn_problem *problem, attn_truth_cost *cost);

/* Computes float64 results, for attn_truth_some(). The computation consists of several steps (short launches), and a
 * call queues the steps that chip->steps selects. */
cudaError_t cuda_truth(const cuda_chip *chip, cudaStream_t stream, const attn_problem *problem,
                       const attn_truth *results, void *workspace);

/* Measures how far results are from float64 results, for attn_truth_compare(). The function is in compare.cu. */
cudaError_t cuda_truth_compare(cudaStream_t stream, const attn_problem *problem, const attn_truth *truth,
                               attn_truth_distance *distances);

#endif
