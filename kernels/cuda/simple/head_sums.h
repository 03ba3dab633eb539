/* head_sums.h: dalibi_slopes and dsinks, gradients that are sums over all queries of a head, for the backward of every
 * kernel family (simple, sm80, sm90). */
#ifndef ATTN_CUDA_HEAD_SUMS_H
#define ATTN_CUDA_HEAD_SUMS_H

#include "kernels/cuda/common/rows.cuh"

/* Sums over the keys of one query: p is the sum of the probabilities P, and dz the sum of dZ, the gradient of the
 * scores after softcap. p_far and dz_far are the sums of P and of dZ times the distance between the positions of query
 * and key. */
struct row_far_sums {
    float p, dz, p_far, dz_far;
};

/* Returns the sum of dZ (the gradient of the scores after softcap) times distance over the pairs of query i. Distances
 * may be several hundred, so a small error of delta would cause a large error of the sum. If the client gave no out
 * (`given` is false), delta comes from rounded P, and the function corrects the sum. With the corrected P and dZ, and
 * with the sink's part, the sum of P is 1 and the sum of dZ is dlse. */
DEVICE float far_of_row(const cuda_args &a, const saved &s, const head_args &x, int64_t i, const row_far_sums &sum,
                        bool given)
{
    const attn_view &dlse = a.g.view[ATTN_T_dlse];
    const int64_t at = lse_at(a, x, i);
    if (s.lse[at] == -CUDART_INF_F) return 0;
    if (given) return sum.dz_far;
    const float sink_p = expf(sink_of(a, x.h) - s.lse[at] - s.rest[at]), all = sum.p + sink_p,
                wanted = dlse.data ? ((const float *)dlse.data)[attn_at(&dlse, x.b, x.h, x.s.q_start + i)] : 0;
    const float off = (sum.dz - s.delta[at] * sink_p) / all - wanted;
    return (sum.dz_far - off * sum.p_far) / all;
}

/* Computes dalibi_slopes from s.far, and dsinks from s.lse, s.rest and s.delta, if the problem requests them. */
cudaError_t sum_heads(const cuda_chip *chip, const attn_problem *p, const cuda_args &a, const saved &s,
                      cudaStream_t stream);

#endif
