/* simple.h: functions of simple.cu (attention without tensor cores) that other kernel families call. */
#ifndef ATTN_CUDA_SIMPLE_H
#define ATTN_CUDA_SIMPLE_H

#include <string.h>

#include "kernels/cuda/common/rows.cuh"

/* Computes delta of every query (s.delta), and, if the client gave lse (`given`), s.lse and s.rest. */
void simple_delta(const cuda_args &a, const saved &s, bool given, cudaStream_t stream);

/* Computes the rows that the forward of `plan` could not compute and has marked in rows_later. */
void simple_rows_left(const cuda_chip *chip, const attn_plan *plan, cudaStream_t stream);

/* Computes in one launch the rows that a forward could not compute and has marked in a.rows_later. */
void simple_marked_rows(const cuda_chip *chip, cuda_args a, cudaStream_t stream);

/* Computes the rows of dq, dk and dv that a backward could not compute and has marked, and the two parts of each huge
 * lse. Call it before simple_gradients(), which uses these parts. */
void simple_gradients_left(const cuda_chip *chip, const attn_plan *plan, cuda_args a, const saved &s,
                           cudaStream_t stream);

/* Computes the rows of dq, dk and dv that a backward could not compute and has marked. One launch computes the rows of
 * dq, and another those of dk and dv. */
void simple_marked_gradients(const cuda_chip *chip, cuda_args a, const saved &s, cudaStream_t stream);

/* Computes dbias, dalibi_slopes and dsinks, if the problem requests them, from s.lse and s.delta. */
void simple_gradients(const cuda_chip *chip, const attn_problem *p, const cuda_args &a, const saved &s,
                      cudaStream_t stream);

/* ---- How long the kernels take ----------------------------------------------------------------------------------- */

/* Seconds that simple.cu takes for a pair of a query and a key, on a busy H100 (132 multiprocessors): a constant, plus
 * an amount for every 32 channels, measured by tests/gpu/rates.c. A backward takes BACKWARD_PAIR in each of three
 * loops: for dq, for dk and dv, and for dalibi_slopes. */
struct pair_cost {
    double each, each_32_channels;
};
const pair_cost FORWARD_PAIR = { 0.45e-9, 0.2e-9 }, BACKWARD_PAIR = { 0.6e-9, 0.24e-9 },
                DBIAS_PAIR = { 1.7e-9, 0.22e-9 };
/* simple.cu takes this many times as long if a lane has more than CHANNELS channels, which do not fit in registers */
const double WIDE_COST = 2;

/* For a row that tensor cores cannot compute, simple.cu takes up to this many times as long as for an ordinary row. The
 * row's scores are computed in double, and its lse has two parts. */
const double LEFT_COST = 3.5;

/* A warp adds at most this many terms to a sum in one launch, so that no launch takes long: a term takes about 4 us if
 * few warps run. */
const int64_t MOST_IN_A_ROW = 4096;

static inline double pair_seconds(const cuda_chip *chip, const attn_geometry &g, const pair_cost &cost)
{
    const double channels = (double)attn_tiles(attn_max64(g.dims.D, g.dims.Dv), 32);
    return (cost.each + cost.each_32_channels * channels) * (channels > CHANNELS ? WIDE_COST : 1) * 132 /
           chip->multiprocessors;
}

static inline double row_seconds(const cuda_chip *chip, const attn_geometry &g, const pair_cost &cost)
{
    return (double)keys_of_row(g) * pair_seconds(chip, g, cost);
}

/* Returns the number of multiplications for a pair of a query and a key in sm80/wide_forward.cu or wide_backward.cu.
 * There, each block computes the scores itself, but only its own columns of the result. */
static inline double wide_products(int64_t D, int64_t Dv, bool backward)
{
    const int64_t columns = TILE_HEAD_DIM, of_D = attn_tiles(D, columns), of_Dv = attn_tiles(Dv, columns);
    return (double)(of_Dv * (D + columns) + (backward ? 2 * of_D * (D + Dv + columns) : 0));
}

/* Returns an upper bound on the seconds that tensor cores need for a problem, from rates measured on an H100
 * (kernels/MEASUREMENTS.md). Options (softcap, bias, masks, ...) take six times as long, or three times on Hopper. */
static inline double tile_seconds(const cuda_chip *chip, const attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const bool hopper = strncmp(plan->kernel->name, "sm90", 4) == 0;
    /* kernels on tensor cores compute at least 64 channels, even if the head size is smaller */
    const int64_t D = attn_max64(g.dims.D, 64), Dv = attn_max64(g.dims.Dv, 64);
    const bool is_float32 = plan->problem->q.dtype == ATTN_F32, backward = plan->problem->op == ATTN_OP_BACKWARD,
               wide = !hopper &&
                      (attn_max64(D, Dv) > TILE_HEAD_DIM || (is_float32 && plan->kernel->head_dim > TILE_HEAD_DIM));
    const double flops = 2 * (wide ? wide_products(D, Dv, backward) : (double)(D + Dv) * (backward ? 2.5 : 1)),
                 rate = is_float32 ? (wide ? 2e13 : 3e13)
                        : hopper   ? 3e14
                                   : 1e14;
    return (double)query_rows(g.dims) * (double)keys_of_row(g) * flops / rate *
           (has_options(plan) ? hopper ? 3 : 6 : 1) * 132 / chip->multiprocessors;
}

/* Returns whether the host checks for marked rows (rows that tensor cores could not compute) before the launches that
 * compute them. The host waits about 30 us for a check, so it makes one only in problems for which 30 us are less than
 * one percent of the time. In other problems it checks at the end, and computes the whole problem again if rows are
 * marked. */
static inline bool looks_for_rows(const cuda_chip *chip, const attn_plan *plan)
{
    return tile_seconds(chip, plan) >= chip->step_seconds / 4;
}

static inline double key_seconds(const cuda_chip *chip, const attn_geometry &g, const pair_cost &cost)
{
    const attn_dims &d = g.dims;
    const int64_t rows = d.packed ? attn_tiles(d.Sq, attn_max64(d.B, 1)) : d.Sq,
                  window = attn_min64(g.left, ATTN_UNBOUNDED) + attn_min64(g.right, ATTN_UNBOUNDED) + 1;
    return (double)(attn_max64(attn_min64(rows, window), 1) * g.group) * pair_seconds(chip, g, cost);
}

#endif
