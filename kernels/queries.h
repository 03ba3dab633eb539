/* queries.h: makes a problem (the part) from some of the queries of another problem (the whole).
 *
 * The part has queries `first` to `end` - 1 and all keys, as views of the same memory. In the whole, a causal mask lets
 * query i see the keys up to i plus a constant. In the part this query has the index i - first. Instead of the causal
 * mask, the part has a window with alignment top left, which reaches to the right by the constant plus `first`. Each
 * query then sees the same keys as in the whole. All kernels compute such windows.
 *
 * If one kernel computes the part and the whole, and `first` is a multiple of ATTN_QUERY_UNIT, both give the same bits
 * of out, lse and dq. For dq the backward must also be deterministic. Gradients that are sums over queries
 * (attn_is_sum_of_queries()) are sums over the queries of the part only. */
#ifndef ATTN_QUERIES_H
#define ATTN_QUERIES_H

#include "attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* If a problem is divided by queries, each part begins at a multiple of this number of queries. The number is a
 * multiple of QUERY_TILE, because CUDA's backwards add up dq in tiles of QUERY_TILE queries. It is also a multiple of
 * SPLIT_ROWS, because CUDA's float32 kernels use one exponent for all numbers of SPLIT_ROWS rows. */
enum { ATTN_QUERY_UNIT = 128 };

/* Returns whether a checked forward or backward can be divided by queries. It cannot if an option counts queries from
 * the beginning or the end of the whole problem. These options are ALiBi, dropout, FlashMask, windows to the left,
 * seqlens_q, and seqlens_k with a causal mask (or window) aligned to the end. A causal mask or a window to the right
 * must also let query 0 see key 0, and must not reach past the last key for the last query. Problems that are packed or
 * have pages cannot be divided either. */
bool attn_queries_divide(const attn_problem *p);

/* Returns the problem that consists of queries `first` to `end` - 1 of *p. attn_queries_divide() must be true for
 * *p. */
attn_problem attn_queries_of(const attn_problem *p, int64_t first, int64_t end);

/* Returns whether the problem has this tensor as an output, and the tensor's numbers are sums over all queries. This is
 * true of dk, dv, dsinks, and the gradient of a bias that all queries share. */
bool attn_is_sum_of_queries(const attn_problem *p, attn_tensor_id id);

/* Divides the queries into `count` ranges with about equally many visible (query, key) pairs. Range 0 begins at query
 * 0, and range n has the queries ends[n - 1] to ends[n] - 1. shares[n] is the share of all pairs in range n. Every
 * range but the last ends at a multiple of ATTN_QUERY_UNIT. Returns false if there are fewer than `count` units of
 * ATTN_QUERY_UNIT queries, or no visible pairs. */
bool attn_queries_share(const attn_problem *p, int count, int64_t *ends, double *shares);

#ifdef __cplusplus
}
#endif
#endif
