/* moves.cu: attn_moves() for GPUs: one kernel makes many small copies, or clears memory, because a call of
 * cudaMemcpyAsync for each copy would take about 2 us. It writes the new keys and values of decode steps to their
 * pages, and copies small problems between staging memory (the host's pinned memory) and the device.
 * A launch has a list of at most MOST copies. A block copies PIECE bytes of one copy, in words of 16 bytes if the
 * addresses are aligned, otherwise byte by byte. */
#include "kernels/cuda/common/kernels.h"

namespace {

enum { MOST = 128, THREADS = 256, AT_ONCE = 4, PIECE = 16 * THREADS * AT_ONCE };

struct list {
    attn_move moves[MOST];
};

__device__ __forceinline__ bool wide(const void *to, const void *from)
{
    return (((uintptr_t)to | (uintptr_t)from) & 15) == 0;
}

__global__ void __launch_bounds__(THREADS) move(const __grid_constant__ list l)
{
    const attn_move m = l.moves[blockIdx.x];
    const size_t begin = (size_t)blockIdx.y * PIECE, end = begin + PIECE < m.bytes ? begin + PIECE : m.bytes;
    if (begin >= m.bytes) return;
    char *const to = (char *)m.to + begin;
    const char *const from = m.from ? (const char *)m.from + begin : nullptr;
    const size_t bytes = end - begin, words = wide(to, from) ? bytes / 16 : 0;
    uint4 word[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE;
         /* all loads start before the next loop uses a value, because loads from host memory take long */
         n++) {
        const size_t i = threadIdx.x + n * THREADS;
        word[n] = from && i < words ? ((const uint4 *)from)[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const size_t i = threadIdx.x + n * THREADS;
        if (i < words) ((uint4 *)to)[i] = word[n];
    }
    for (size_t i = 16 * words + threadIdx.x; i < bytes; i += THREADS) to[i] = from ? from[i] : 0;
}

} // namespace

cudaError_t cuda_moves(cudaStream_t stream, const attn_move *moves, int64_t count)
{
    for (int64_t at = 0; at < count; at += MOST) {
        const int n = count - at < MOST ? (int)(count - at) : MOST;
        list l = {};
        size_t longest = 0;
        for (int i = 0; i < n; i++) {
            l.moves[i] = moves[at + i];
            if (l.moves[i].bytes > longest) longest = l.moves[i].bytes;
        }
        if (longest == 0) continue;
        move<<<dim3(n, (unsigned)((longest + PIECE - 1) / PIECE)), THREADS, 0, stream>>>(l);
    }
    return cudaPeekAtLastError();
}
