/* backward_steps.h: the steps that a backward on tensor cores takes before and after its main kernel. sm80/backward.cu
 * and sm90/backward/backward.cu share them.
 *
 *   begin_backward   runs the forward if the client has not given out and lse
 *   prepare_backward launches `prepare`: delta = rowsum(dO O) - dlse, lse and delta by query tiles, zeros in the
 *                    sums of dQ
 *   the main kernel  computes dK and dV, and adds dQ of its keys to the float32 sums; then dQ = scale * sums
 *   end_backward     computes rows that earlier kernels have only marked; computes dbias, dalibi_slopes and dsinks if
 *                    they are requested
 *
 * sm90/backward/backward.cu has its own `prepare` (sm90/backward/backward_prepare.cuh). */
#ifndef ATTN_SM80_BACKWARD_STEPS_H
#define ATTN_SM80_BACKWARD_STEPS_H

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/simple/simple.h"

/* Number of queries of a tile. In memory, the row_values (lse and delta) of a tile are contiguous, and so are its sums
 * of dQ. */
enum { QUERY_TILE = 64 };

/* Values of each row (query) of a query tile: delta, and lse in base 2. If a row does not exist or sees no key, its lse
 * is +inf, which makes its probabilities 0. */
struct row_values {
    float lse2[QUERY_TILE], delta[QUERY_TILE];
};

/* The workspace as kernels see it: lse and delta of each row (`saved` of rows.cuh), row_values of every query tile, and
 * the float32 sums of dQ of every query tile (64 queries by 64, 128 or 256 columns; NULL if dq is not requested). */
struct backward_scratch {
    saved s;
    row_values *values;
    float *sums;
};

/* Returns the index of a query tile. Tiles are numbered across all heads. In a packed problem the tiles of sequence b
 * begin with tile number cu[b] / QUERY_TILE + b (see tile_place_of()). */
DEVICE int64_t query_tile(const cuda_args &a, const attn_sequence &s, int b, int h, int tile)
{
    const int64_t tiles = a.g.dims.packed ? a.g.dims.total_q / QUERY_TILE + a.g.dims.B
                                          : attn_tiles(a.g.dims.Sq, QUERY_TILE);
    return (a.g.dims.packed ? h * tiles + s.q_start / QUERY_TILE + b : (b * a.g.dims.H + h) * tiles) + tile;
}

/* Returns the index of query q, channel (column) d in the float32 sums of dQ of a query tile. The sums are stored in
 * blocks of 16 queries x 8 channels, and in a block in the order of the lanes of a warp: four floats per lane. The 32 x
 * 32 sums of a warp are contiguous in memory, because atomic additions are fastest on contiguous addresses. red_add_4()
 * adds the four floats of a lane with one instruction; older GPUs add them one by one. */
template <int D> DEVICE int fragment_at(int q, int d)
{
    return ((q / 32 * (D / 8) + d / 8) * 2 + q / 16 % 2) * 128;
}

/* Rounds the head sizes of a problem up to the size that kernels are compiled for: 64, 128 or 256. */
int backward_class(const attn_dims &d);

/* Returns the bytes of workspace for the steps of a backward before and after its main kernel. The main kernel's own
 * workspace lies behind these bytes. Returns 0 if the client has not given out and lse and no kernel of this chip
 * computes them. `adds` is true if the main kernel may add to float32 sums of dQ in any order. */
size_t backward_bytes(const cuda_chip *chip, const attn_plan *plan, bool adds);

struct backward_run {
    cuda_args args;
    backward_scratch scratch;
    float *gradients; /* the memory in the workspace that option_gradients() uses */
};
cudaError_t begin_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, bool adds, void *memory,
                           backward_run *run);
cudaError_t prepare_backward(cudaStream_t stream, const attn_plan *plan, const backward_run &run);
cudaError_t end_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, const backward_run &run);

#endif
