/* widen.cuh: converts float8_e4m3 tensors to bfloat16, which holds all e4m3 values exactly, for kernels that multiply
 * 16-bit numbers. */
#ifndef ATTN_SM90_WIDEN_CUH
#define ATTN_SM90_WIDEN_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

/* Copies a tensor [B, H, rows, D] to a bfloat16 tensor [B, rows, H, D], whose rows are `pitch` elements apart. Each
 * thread copies N elements; N must divide the pitch. */
template <int N>
__global__ void __launch_bounds__(256)
    widen(const __grid_constant__ attn_view from, uint16_t *to, int64_t B, int H, int64_t rows, int D, int pitch)
{
    const int pieces = pitch / N;
    for (int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x; at < B * rows * H * pieces;
         at += gridDim.x * (int64_t)256) {
        const int64_t line = at / pieces, b = line / (rows * H), r = line - b * (rows * H);
        const int d = (int)(at - line * pieces) * N, h = (int)(r % H);
        const uint8_t *const source = (const uint8_t *)from.data + attn_at(&from, b, h, r / H) + d;
        alignas(16) uint8_t x[N];
        if ((uint64_t)source % N == 0 && d + N <= D) {
            if (N == 16) *(uint4 *)x = *(const uint4 *)source;
            else *(uint2 *)x = *(const uint2 *)source;
        } else {
            for (int n = 0; n < N; n++) x[n] = d + n < D ? source[n] : 0;
        }
#pragma unroll
        for (int n = 0; n < N; n += 8) {
            uint32_t y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) y[e] = widen_e4m3(x[n + 2 * e], x[n + 2 * e + 1]);
            *(uint4 *)(to + at * N + n) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}

/* Queues the conversion of a tensor [B, H, rows, D]. `view` then describes the bfloat16 tensor at `to`. */
template <int N>
cudaError_t widen_view(attn_view &view, int64_t B, int64_t H, int64_t rows, int64_t D, int64_t pitch, void *to,
                       int multiprocessors, cudaStream_t stream)
{
    const int64_t blocks = attn_tiles(B * rows * H * (pitch / N), 256);
    widen<N><<<(unsigned)attn_min64(blocks, multiprocessors * 16), 256, 0, stream>>>(view, (uint16_t *)to, B, (int)H,
                                                                                     rows, (int)D, (int)pitch);
    view.data = to;
    view.dtype = ATTN_BF16;
    view.head = pitch, view.row = H * pitch, view.batch = rows * H * pitch;
    return cudaPeekAtLastError();
}

#endif
