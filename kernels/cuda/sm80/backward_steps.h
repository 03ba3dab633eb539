/* backward_steps.h: the steps that a backward on tensor cores takes before and after its main kernel, for
 * sm80/backward.cu and sm90/backward/backward.cu. In order:
 *
 * begin_backward: runs the forward if the client has not given the tensors out and lse.
 * prepare_backward: computes delta = rowsum(dO O) - dlse, stores lse and delta by query tiles, and sets the sums of dQ
 * to zero (sm90 has its own version).
 * The main kernel: computes dK and dV, and the float32 sums of dQ; then dQ = scale * sums.
 * end_backward: computes rows that earlier kernels have only marked, and dbias, dalibi_slopes and dsinks if
 * requested. */
#ifndef ATTN_SM80_BACKWARD_STEPS_H
#define ATTN_SM80_BACKWARD_STEPS_H

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/simple/simple.h"

/* number of queries of a query tile */
enum { QUERY_TILE = 64 };

/* Values of each query of a tile: delta, and lse in base 2. lse is +inf for a row that does not exist or sees no key,
 * which makes its P 0. */
struct row_values {
    float lse2[QUERY_TILE], delta[QUERY_TILE];
};

/* The workspace of the kernels: lse and delta of each row, and row_values of every query tile. `sums` has the float32
 * sums of dQ of every query tile (64 queries by 64, 128 or 256 columns each). `sums` is NULL if the main kernel adds no
 * dQ to such sums. */
struct backward_scratch {
    saved s;
    row_values *values;
    float *sums;
};

/* Returns the index of a query tile, counted across all heads. In a packed problem, the tiles of a head are numbered
 * across all sequences: those of sequence b have the numbers from cu[b] / QUERY_TILE + b on. */
DEVICE int64_t query_tile(const cuda_args &a, const attn_sequence &s, int b, int h, int tile)
{
    const int64_t tiles = a.g.dims.packed ? a.g.dims.total_q / QUERY_TILE + a.g.dims.B
                                          : attn_tiles(a.g.dims.Sq, QUERY_TILE);
    return (a.g.dims.packed ? h * tiles + s.q_start / QUERY_TILE + b : (b * a.g.dims.H + h) * tiles) + tile;
}

/* Returns the index of query q, channel d in the float32 sums of dQ of a query tile. The sums lie in blocks of 16
 * queries x 8 channels, four floats per lane. The 32 x 32 sums of a warp are contiguous, because atomic additions to
 * contiguous sums are the fastest. */
template <int D> DEVICE int fragment_at(int q, int d)
{
    return ((q / 32 * (D / 8) + d / 8) * 2 + q / 16 % 2) * 128;
}

/* Rounds head sizes up to what kernels are compiled for: 64, 128 or 256. */
int backward_class(const attn_dims &d);

/* Returns the bytes of workspace for the steps before and after the main kernel; the main kernel's own workspace
 * follows this one. Returns 0 if the client has not given the tensors out and lse, and none of the chip's forward
 * kernels computes them. `adds`: whether the main kernel adds dQ to float32 sums in this workspace. */
size_t backward_bytes(const cuda_chip *chip, const attn_plan *plan, bool adds);

struct backward_run {
    cuda_args args;
    backward_scratch scratch;
    float *gradients; /* memory in the workspace for option_gradients() */
};
cudaError_t begin_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, bool adds, void *memory,
                           backward_run *run);
cudaError_t prepare_backward(cudaStream_t stream, const attn_plan *plan, const backward_run &run);
cudaError_t end_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const backward_run &run);

#endif
