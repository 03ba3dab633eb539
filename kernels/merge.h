/* merge.h: merges partial attention results. It has the arithmetic for one row, for C and CUDA, and attn_merge_plan,
 * the checked merge that attn_merge() passes to a backend. The CPU backend also uses the arithmetic where it splits the
 * keys of a few queries. */
#ifndef ATTN_MERGE_H
#define ATTN_MERGE_H

#include <math.h>

#include "attention.h"
#include "dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the larger of two lse (logarithms of sums). A NaN counts as larger than all numbers. */
ATTN_HD float attn_merge_top(float top, float next)
{
    return next > top || next != next ? next : top;
}

/* Returns exp(lse - top), the weight of a partial result relative to the heaviest one, whose lse is `top`. An empty
 * partial result (lse is -inf) has weight 0. */
ATTN_HD float attn_merge_weight(float lse, float top)
{
    return lse == -INFINITY ? 0 : expf(lse - top);
}

ATTN_HD void attn_merge_add(float *sum, float weight, const float *part, int64_t columns)
{
    for (int64_t d = 0; d < columns; d++) sum[d] += weight * part[d];
}

/* A checked merge: sizes, the address of each partial result, and the strides that all partial results share. It is
 * plain data and may be copied to a device. */
typedef struct attn_merge_plan {
    int64_t B, Sq, H, Dv; /* in packed problems, B is 1 and Sq is the number of rows of all sequences */
    int count;
    const void *part_out[ATTN_MERGE_PARTS];
    const float *part_lse[ATTN_MERGE_PARTS];
    /* gradients of each partial result's out and lse; all are NULL where `gradients` is false */
    void *part_dout[ATTN_MERGE_PARTS];
    float *part_dlse[ATTN_MERGE_PARTS];
    bool gradients;
    const float *sinks; /* sinks of the heads (sinks[h]); NULL: there are no sinks */
    float *dsinks;      /* gradient of the sinks, an output; NULL: it is not wanted */
    /* strides of out and lse in each partial result; `data` of these views is NULL, because each partial result has its
     * own memory */
    attn_view out_of_part, lse_of_part;
    /* strides of the gradients of a partial result's out and lse; `data` of these views is NULL, because each gradient
     * has its own memory */
    attn_view dout_of_part, dlse_of_part;
    attn_view dout, dlse; /* views of the inputs dout and dlse; data is NULL where the input is not given */
    attn_view out, lse;   /* the merged out and lse; data is NULL where the result is not wanted */
} attn_merge_plan;

ATTN_HD int64_t attn_merge_count(const attn_merge_plan *m)
{
    return m->B * m->Sq * m->H;
}

/* One row of a merge: one query of one head of one batch row. The number of a row is n = (b * Sq + i) * H + h. */
typedef struct attn_merge_row {
    /* b, h, i: index of the batch row, of the head and of the query; lse_at: index of the row in each partial result's
     * lse */
    int64_t b, h, i, lse_at;
    float sink; /* the sink of the row's head; a merge treats it like the lse of one more partial result */
    /* `top`: the largest lse of the partial results and the sink. `sum`: the sum of the weights exp(lse - top), which
     * is 0 if all partial results are empty */
    float top, sum;
} attn_merge_row;

ATTN_HD attn_merge_row attn_merge_row_of(const attn_merge_plan *m, int64_t n)
{
    attn_merge_row row;
    row.h = n % m->H;
    row.i = n / m->H % m->Sq;
    row.b = n / m->H / m->Sq;
    row.lse_at = row.b * m->lse_of_part.batch + row.h * m->lse_of_part.head + row.i * m->lse_of_part.row;
    row.sink = m->sinks ? m->sinks[row.h] : -INFINITY;
    row.top = row.sink;
    row.sum = 0;
    for (int p = 0; p < m->count; p++) row.top = attn_merge_top(row.top, m->part_lse[p][row.lse_at]);
    for (int p = 0; p < m->count; p++) row.sum += attn_merge_weight(m->part_lse[p][row.lse_at], row.top);
    row.sum += attn_merge_weight(row.sink, row.top);
    return row;
}

/* Returns the share of a partial result (or of the sink) in a row: exp(lse - lse of the whole row), where `lse` is that
 * of the partial result or sink. All shares of a row add up to 1, so sums weighted by the shares do not overflow. */
ATTN_HD float attn_merge_share(const attn_merge_row *row, float lse)
{
    return lse == -INFINITY ? 0 : attn_merge_weight(lse, row->top) / row->sum;
}

ATTN_HD float attn_merge_lse(const attn_merge_row *row)
{
    return row->sum == 0 ? -INFINITY : row->top + logf(row->sum);
}

/* Returns the gradient with respect to the lse of one row of a partial result, or with respect to the sink. `dot` is
 * dout . out of that partial result, and 0 for the sink. `mean` is dout . out of the merged row: the sum of share * dot
 * over all partial results. */
ATTN_HD float attn_merge_dlse(const attn_merge_plan *m, const attn_merge_row *row, float lse, float dot, float mean)
{
    const int64_t at = row->b * m->dlse.batch + row->h * m->dlse.head + row->i * m->dlse.row;
    const float dlse = m->dlse.data ? ((const float *)m->dlse.data)[at] : 0;
    return lse == -INFINITY ? 0 : attn_merge_share(row, lse) * (dlse + (dot - mean));
}

/* Merges rows [first, end) on the host, and computes the gradients of the partial results if the plan asks for them. */
void attn_merge_rows(const attn_merge_plan *m, int64_t first, int64_t end);

/* Computes dsinks[h], the gradient of the sink of head h, on the host. */
void attn_merge_sink(const attn_merge_plan *m, int64_t h);

/* Computes all results that the plan of a merge asks for, on the host in the calling thread. */
void attn_merge_all(const attn_merge_plan *m);

#ifdef __cplusplus
}
#endif
#endif
