/* observe.h: the passes of an observe (the operation that reports which keys the queries attend to) on tensor cores.
 * observe.cu launches them. For two of these passes, Hopper GPUs have separate kernels (sm90/observe/). */
#ifndef ATTN_SM80_OBSERVE_H
#define ATTN_SM80_OBSERVE_H

#include "kernels/cuda/simple/observe.h"

/* Number of keys of a chunk. Each row is summed chunk by chunk, and the sums of the chunks are added in the order of
 * keys. The bits of the result therefore do not depend on the number of thread blocks among which a row is divided. */
enum { OBSERVE_CHUNK = 4096 };

/* The maxima and sums of rows over their keys. The keys of a row are divided into parts, each with its own maximum and
 * sums. part[n * rows + r] belongs to part number n of the row with index r (see lse_at()). */
struct observed_parts {
    /* x: the row's largest score over the keys of the part, or without options the largest q.k; y, z: the sums l and e
     * (observe_rows.cu), relative to x; w: 1 if a block has written the part */
    float4 *part;
    int64_t rows;
    int blocks; /* number of blocks among which the keys of a row are divided; 1: each row has one part */
};

/* For each row, x is `base` and y is `inverse`. From these numbers and a score z in base 2, later passes compute a
 * probability P = exp2(z - base) * inverse. `base` is INFINITY for a row whose P are all 0, and for a row that tensor
 * cores cannot compute. */
struct tile_rows {
    float2 *end;
};

/* Partial sums of the cells of a map. Cell (u, v) is row u and column v of the map. Each strip (the rows of a warp) has
 * a partial sum of P for the cell, over the strip's queries in row u and the keys of column v, at index ((b * H + h) *
 * (strips + map[0]) + strip + u) * map[1] + v. */
struct observed_cells {
    float *part;
    int64_t strips;
    /* number of blocks among which the columns of a map, or the keys of the region (selected queries and keys), are
     * divided */
    int blocks;
    /* true: the launch computes partial sums for the output `map` (sums of probabilities P over cells); false: it
     * computes the output `weights` (the probabilities P themselves) */
    bool map;
};

/* Each function observe_..._pass() launches one kernel of an observe. The launch computes the tiles of one of
 * chip->shares shares: number chip->share. The argument `sums` of observe_rows_pass() is 0 for maxima only, 1 for
 * maxima and the sums l, and 2 for maxima and the sums l and e (observed_parts). */
cudaError_t observe_rows_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                              const observed_parts &parts, int sums, cudaStream_t stream);
cudaError_t observe_top_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan,
                             const observed_rows &rows, cudaStream_t stream);
cudaError_t observe_cells_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                               const observed_cells &cells, cudaStream_t stream);
cudaError_t observe_mass_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                              cudaStream_t stream);

/* The kernels of an observe of which the families sm80 and sm90 have their own versions. block_rows is the number of
 * rows of a block of the kernel rows(). Both families use the same version of all other kernels, which together take at
 * most `others` times tile_seconds(). */
struct observe_passes {
    int block_rows, others;
    cudaError_t (*rows)(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const observed_parts &parts,
                        int sums, cudaStream_t stream);
    cudaError_t (*mass)(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                        cudaStream_t stream);
};

/* observe_plan() plans an observe on tensor cores with the kernels `passes`, and returns false if they cannot compute
 * the problem. observe_launch() launches it. */
bool observe_plan(const cuda_chip *chip, attn_plan *plan, const observe_passes &passes);
cudaError_t observe_launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace,
                           const observe_passes &passes);

/* The number of rows of a block of observe_rows_pass(), the number of rows of a warp of observe_cells_pass(), and the
 * shared memory that a block of each pass needs, in bytes. */
int observe_block_rows(const attn_plan *plan);
int observe_strip_rows(const attn_plan *plan);
size_t observe_rows_shared(const attn_plan *plan);
size_t observe_cells_shared(const attn_plan *plan);
size_t observe_mass_shared(const attn_plan *plan);

#endif
