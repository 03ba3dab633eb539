/* forward_steps.cuh: the steps that the forwards for 16-bit numbers (forward.cu, wide_forward.cu) and for float32
 * (f32_forward.cu) share.
 *
 * X is a kernel's shape: BM queries, BN keys, MT blocks of 16 rows per warp, THREADS threads; X::SCORE_MODS is the
 * variant with options (softcap, bias, masks, ...), which has one 16-row block per warp. O, S and `rows` are fragments
 * of mma.sync: the four lanes from lane r % 8 * 4 on hold rows r % 8 and r % 8 + 8 of a block. */
#ifndef ATTN_SM80_FORWARD_STEPS_CUH
#define ATTN_SM80_FORWARD_STEPS_CUH

#include "kernels/cuda/common/kernels.h"
#include "scores.cuh"

namespace {

/* A thread's state of one row: maximum m (base 2), and the lane's part of the sum l. */
struct softmax_row {
    float m, l;
};

template <class X> struct scores_on_their_way {
    float S[X::SCORE_MODS ? X::BM : 1][X::SCORE_MODS ? X::BN + 4 : 1];
};

/* Sets the state before the first key: O is 0, and m is the sink's score (-inf without a sink). Four lanes share a row;
 * one of them passes the sink's exponential as `l`, the others pass 0. */
template <int MT, int DT> DEVICE void begin_rows(float (&O)[MT][DT][4], softmax_row (&rows)[MT][2], float m, float l)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int dt = 0; dt < DT; dt++) O[mt][dt][0] = O[mt][dt][1] = O[mt][dt][2] = O[mt][dt][3] = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) rows[mt][half].m = m, rows[mt][half].l = l;
    }
}

/* One step of the online softmax: scores S become probabilities P. m, which is subtracted from the scores, grows only
 * if the new maximum is larger by more than 8 (base 2), so O is hardly ever rescaled. P and l may therefore be up to
 * 2^8 times larger, which costs no accuracy. `c` converts S to base 2. */
template <int NT, int DT>
DEVICE void softmax_step(float (&S)[NT][4], float (&O)[DT][4], softmax_row (&rows)[2], float c)
{
    float rescale[2];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        softmax_row &row = rows[half];
        const float top = largest_of_row(S, half) * c;
        const bool grows = top > row.m + 8;
        const float m = grows ? top : row.m;
        rescale[half] = grows ? exp2_fast(row.m - m) : 1;
        row.m = m;
        grown |= grows;
    }
    if (__any_sync(0xffffffff, grown)) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows[half].l *= rescale[half];
#pragma unroll
            for (int dt = 0; dt < DT; dt++) {
                O[dt][half * 2] *= rescale[half];
                O[dt][half * 2 + 1] *= rescale[half];
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        softmax_row &row = rows[half];
        /* m is -inf until the row has seen a key; -inf - -inf would be NaN */
        const float base = row.m == -CUDART_INF_F ? 0 : row.m;
        row.l += exponents_of_row(S, half, c, -base);
    }
}

/* Applies masks and options to the scores of key tile j; S times `unit` is q.k. Without options, it only sets scores
 * outside causal and window to -inf, and only if `bounded` is true. */
template <class X, int NT>
DEVICE void change_or_hide(float (&S)[X::MT][NT][4], scores_on_their_way<X> &way, const cuda_args &a,
                           const head_args &x, const limits &limit, int Sq, int q0, int j, bool bounded, float unit)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (X::SCORE_MODS) {
        change_scores<false>(S[0], lines_of<X::BN + 4>(&way.S[warp * 16]), lane, [&](int r, int c, float &s) {
            const int i = q0 + warp * 16 + r, key = j * X::BN + c;
            float derivative;
            s = score_log2(a, x, limit, i < Sq, i, key, s * unit, &derivative);
        });
    } else if (bounded) {
#pragma unroll
        for (int mt = 0; mt < X::MT; mt++)
            hide_keys(S[mt], limit, q0 + (warp * X::MT + mt) * 16 + lane / 4, j * X::BN + lane % 4 * 2);
    }
}

/* Sets P to 0 for the pairs that dropout drops. The factor 1 / (1 - dropout_p) is applied to out, because P times the
 * factor might exceed the range of 16-bit numbers. `head` is b * H + h. */
template <class X, int NT>
DEVICE void drop_some(float (&P)[X::MT][NT][4], scores_on_their_way<X> &way, const cuda_args &a, int64_t head, int q0,
                      int j)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (X::SCORE_MODS && a.drop_below)
        drop(P[0], reinterpret_cast<uint32_t *>(&way.S[warp * 16]), 1, lane,
             [&](int r, int eighth) { return kept_of(a, head, q0 + warp * 16 + r, j * NT + eighth); });
}

/* Calls visit(mt, half, r) for each of the thread's rows r of the block's tile: in the upper (half = 0) or lower (half
 * = 1) eight rows of the warp's block mt. */
template <class X, typename F> DEVICE void for_own_rows(F visit)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int mt = 0; mt < X::MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) visit(mt, half, (warp * X::MT + mt) * 16 + half * 8 + lane / 4);
}

/* Replaces infinities and NaN in a tile of V by 0. A float32 tile consists of float16 halves hi and lo; only hi is
 * changed. All threads call this function. */
template <typename T, class X, int D> DEVICE void clear_not_finite(uint16_t *V)
{
    for (int n = threadIdx.x; n < X::BN * D; n += X::THREADS)
        if (not_finite<T>(V[n])) V[n] = 0;
    __syncthreads();
}

DEVICE float whole_sum(float l)
{
    l += __shfl_xor_sync(0xffffffff, l, 1);
    l += __shfl_xor_sync(0xffffffff, l, 2);
    return l;
}

DEVICE void store_lse(const attn_view &lse, int64_t b, int64_t h, int64_t row, bool exists, const softmax_row &of)
{
    if (exists && threadIdx.x % 4 == 0 && lse.data)
        ((float *)lse.data)[attn_at(&lse, b, h, row)] = lse_of_sum(of.m, of.l);
}

/* has_parts() returns whether one of the ROWS rows from i0 on has a huge lse that this kernel must replace by two
 * numbers, a.part_lse and a.part_rest (see struct saved). store_parts() stores these numbers, and computes the rows
 * that tensor cores cannot compute. The whole block calls has_parts() at its beginning, and store_parts() at its
 * end. */
template <int ROWS> DEVICE bool has_parts(const cuda_args &a, const head_args &x, int64_t i0)
{
    const int64_t i = i0 + threadIdx.x;
    return __syncthreads_or(threadIdx.x < ROWS && i < x.s.Sq && is_parted_by_tiles(a, a.part_lse[lse_at(a, x, i)]));
}
template <class X>
DEVICE void store_parts(const cuda_args &a, const head_args &x, int64_t i0, const softmax_row (&rows)[X::MT][2])
{
    static_assert(X::BM <= X::THREADS, "a row a thread");
    const int warp = threadIdx.x / 32;
    for_own_rows<X>([&](int mt, int half, int r) {
        const softmax_row &row = rows[mt][half];
        const int64_t at = lse_at(a, x, i0 + r);
        if (threadIdx.x % 4 || i0 + r >= x.s.Sq || !is_parted_by_tiles(a, a.part_lse[at])) return;
        const bool sound = row.l - row.l == 0 && fabsf(row.m) >= HUGE_SCORE;
        if (sound) a.part_lse[at] = row.m;
        a.part_rest[at] = sound ? logf(row.l) : CUDART_NAN_F;
    });
    __syncwarp(); /* after this barrier a lane may read rows that other lanes of the warp have written */
    for (int r = warp * X::MT * 16; r < (warp + 1) * X::MT * 16 && i0 + r < x.s.Sq; r++) {
        const int64_t at = lse_at(a, x, i0 + r);
        if (!is_parted_by_tiles(a, a.part_lse[at]) || a.part_rest[at] == a.part_rest[at]) continue;
        const float2 parts = lse_in_parts(a, x, i0 + r, a.part_lse[at], true);
        __syncwarp();
        if (threadIdx.x % 32 == 0) a.part_lse[at] = parts.x, a.part_rest[at] = parts.y;
    }
}

template <class X, auto kernel, typename... Args>
cudaError_t launch_tiles(const cuda_chip *chip, cuda_args a, size_t shared_bytes, cudaStream_t stream,
                         const Args &...args)
{
    dim3 grid = tile_grid(a.g, X::BM);
    take_share(chip, a, grid);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow_shared<kernel>(shared_bytes);
    if (code == cudaSuccess) kernel<<<grid, X::THREADS, shared_bytes, stream>>>(a, args...);
    return code == cudaSuccess ? cudaPeekAtLastError() : code;
}

} // namespace

#endif
