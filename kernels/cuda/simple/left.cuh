/* left.cuh: launches kernels that compute marked rows. An earlier kernel has marked the rows that it could not compute,
 * each by a byte. */
#ifndef ATTN_CUDA_LEFT_CUH
#define ATTN_CUDA_LEFT_CUH

#include "simple.h"
#include "work.cuh"

namespace {

/* Queues a check whether kernels have marked rows since the previous check. The check copies the byte chip->rows_found
 * to *chip->found: 1 means that there are marked rows. It then sets chip->rows_found to 0. */
inline void look_for_rows(const cuda_chip *chip, cudaStream_t stream)
{
    if (!takes_step(chip, 0)) return;
    cudaMemcpyAsync(chip->found, chip->rows_found, 1, cudaMemcpyDeviceToHost, stream);
    cudaMemsetAsync(chip->rows_found, 0, 1, stream);
    chip->steps->looked = true;
}

/* Launches a kernel on marked rows in steps: calls launch(blocks, first, count, warps) for each step. If this call of
 * attn_run_some() has queued a check for marked rows, the steps are left to the next call, which knows the check's
 * result. If no row is marked, nothing is launched, and the steps count as done. */
template <typename F> void launch_left(const cuda_chip *chip, int64_t rows, double seconds_each, F launch)
{
    /* this many warps, 32 per multiprocessor, keep the GPU busy */
    const int64_t busy = (int64_t)chip->multiprocessors * 32;
    cuda_steps *const s = chip->steps;
    seconds_each *= LEFT_COST;
    in_parts(chip, rows, seconds_each, [&](int64_t first, int64_t count) {
        const int64_t warps = attn_max64(attn_tiles(count, 32), attn_min64(count, busy));
        if (s->looked && s->at >= s->done) s->more = true;
        const bool any = !s->idle || *(volatile uint8_t *)chip->found;
        if (takes_step(chip, any ? (double)count * seconds_each : 0) && any)
            launch(blocks_for(warps), first, count, (int64_t)blocks_for(warps) * WARPS);
    });
}

} // namespace

#endif
