/* simple.h: the steps of simple.cu that other families use too. */
#ifndef ATTN_CUDA_SIMPLE_H
#define ATTN_CUDA_SIMPLE_H

#include "rows.cuh"

/* s.delta, and s.lse from the problem's lse where `given`. */
void simple_delta(const cuda_args &a, const saved &s, bool given, cudaStream_t stream);

/* dbias, dalibi_slopes and dsinks, those that the problem wants. Needs s.lse and s.delta. */
void simple_gradients(const attn_problem *p, const cuda_args &a, const saved &s, cudaStream_t stream);

#endif
