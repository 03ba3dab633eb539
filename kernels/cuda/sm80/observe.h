/* observe.h: the passes of an observe on tensor cores, which observe.cu launches. */
#ifndef ATTN_SM80_OBSERVE_H
#define ATTN_SM80_OBSERVE_H

#include "kernels/cuda/simple/observe.h"

/* Keys of a chunk. Sums of a row are made chunk by chunk and merged in the order of keys, so that several blocks may
 * share the keys of a row, and the bits do not depend on how many blocks do. */
enum { OBSERVE_CHUNK = 4096 };

/* The maxima and sums of rows over some keys. Part n of row lse_at() is at n * rows + lse_at(). */
struct observed_parts {
    /* x: the row's largest score; y: l; z: e, both relative to x; w: 1 where a block has written the part. The unit
     * of scores is that of the kernel: q.k, or with options the score itself. */
    float4 *part;
    int64_t rows;
    int blocks; /* blocks that share the keys of a row; 1: each row has one part */
};

/* Base and inverse of each row, for the passes after the rows. base is INFINITY where P is 0, and for strange rows. */
struct tile_rows {
    float2 *end;
};

/* Sums of rectangles of a map: the queries of a strip (the rows of a warp) that lie in row u of the map, and the keys
 * of column v. The sum is at ((b * H + h) * (strips + map[0]) + strip + u) * map[1] + v. */
struct observed_cells {
    float *part;
    int64_t strips;
    int blocks; /* blocks that share the columns of a map, or the keys of the region */
    bool map;   /* false: the launch computes weights */
};

/* Each launches a pass for the chip's share of the tiles. `sums`: 0: only maxima; 1: l too; 2: l and e too. */
cudaError_t observe_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                              const observed_parts &parts, int sums, cudaStream_t stream);
cudaError_t observe_top_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                             const observed_rows &rows, cudaStream_t stream);
cudaError_t observe_cells_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                               const observed_cells &cells, cudaStream_t stream);
cudaError_t observe_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                              cudaStream_t stream);

/* The rows of a block of observe_rows_pass(), the rows of a warp of observe_cells_pass(), and the largest shared
 * memory of the passes, in bytes. */
int observe_block_rows(const attn_plan *plan);
int observe_strip_rows(const attn_plan *plan);
size_t observe_rows_shared(const attn_plan *plan);
size_t observe_cells_shared(const attn_plan *plan);
size_t observe_mass_shared(const attn_plan *plan);

#endif
