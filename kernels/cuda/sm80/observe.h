/* observe.h: the passes (kernels) of an observe (which keys the queries attend to) on tensor cores. For two of them,
 * Hopper GPUs have their own kernels (sm90/observe/). */
#ifndef ATTN_SM80_OBSERVE_H
#define ATTN_SM80_OBSERVE_H

#include "kernels/cuda/simple/observe.h"

/* Number of keys of a chunk. The sums of a row are computed chunk by chunk, and the sums of the chunks are added in
 * order, so the bits do not depend on how many blocks share a row. */
enum { OBSERVE_CHUNK = 4096 };

/* Maxima and sums of rows over parts of their keys: part[n * rows + r] is part n of the row with index r (see
 * lse_at()). */
struct observed_parts {
    /* Numbers of a row over one part of its keys. x: the largest score or, if there are no options (softcap, bias,
     * masks, ...), the largest q.k. y, z: the sums l and e (observe_rows.cu), relative to x. w: 1 if a block has
     * written this element. */
    float4 *part;
    int64_t rows;
    int blocks; /* number of blocks that share the keys of a row; 1: each row has one part */
};

/* `base` (x) and `inverse` (y) of each row: P = exp2(z - base) * inverse for a score z in base 2. `base` is INFINITY if
 * all P are 0, or if tensor cores cannot compute the row. */
struct tile_rows {
    float2 *end;
};

/* Partial sums of the cells of a map. Each strip (the rows of a warp) has, for cell (u, v), the sum of P over its
 * queries in row u and the keys of column v, at index ((b * H + h) * (strips + map[0]) + strip + u) * map[1] + v. */
struct observed_cells {
    float *part;
    int64_t strips;
    /* number of blocks that share the keys of a tile of queries; each block has some columns of the map, or some of the
     * selected keys */
    int blocks;
    /* whether the launch is for the output `map` (sums of P over cells); if not, it is for `weights` (the P
     * themselves) */
    bool map;
};

/* Each of these functions launches one kernel of an observe (statistics of attention weights). The launch computes part
 * number chip->share of the tiles, or all tiles if chip->shares is 0. `sums` says what is computed for each row. 0:
 * only the maximum; 1: the maximum and the sum l; 2: the maximum and the sums l and e (observed_parts). */
cudaError_t observe_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                              const observed_parts &parts, int sums, cudaStream_t stream);
cudaError_t observe_top_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                             const observed_rows &rows, cudaStream_t stream);
cudaError_t observe_cells_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                               const observed_cells &cells, cudaStream_t stream);
cudaError_t observe_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                              cudaStream_t stream);

/* The two kernels of an observe (statistics of attention weights) that differ between sm80 and sm90. block_rows: number
 * of rows per block of rows(). tile_seconds() estimates the time of rows() and mass(). `others`: how many times as long
 * the other kernels of the observe take for the same (query, key) pairs. */
struct observe_passes {
    int block_rows, others;
    cudaError_t (*rows)(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const observed_parts &parts,
                        int sums, cudaStream_t stream);
    cudaError_t (*mass)(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                        cudaStream_t stream);
};

/* Plan and launch an observe on tensor cores with the kernels `passes`. observe_plan() returns false if they cannot
 * compute the problem. */
bool observe_plan(const cuda_chip *chip, attn_plan *plan, const observe_passes &passes);
cudaError_t observe_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace,
                           const observe_passes &passes);

/* These functions return the number of rows per block of observe_rows_pass(), the number of rows per warp of
 * observe_cells_pass(), and the bytes of shared memory per block of each kernel. */
int observe_block_rows(const attn_plan *plan);
int observe_strip_rows(const attn_plan *plan);
size_t observe_rows_shared(const attn_plan *plan);
size_t observe_cells_shared(const attn_plan *plan);
size_t observe_mass_shared(const attn_plan *plan);

#endif
