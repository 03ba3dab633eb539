/* splits.cuh: work tiles that have only a split (a part) of the keys that their rows see, and the sum of the results.
 *
 * A split's result is O, not divided by l, and `top` and l for each row; the exponentials in O and l are divided by
 * 2^top. Either each split is a work tile, and the kernel merge_splits() adds the results. Or, with in_turn, a work
 * tile computes all splits of its rows. Both ways do the same operations in the same order, so the bits are the same.
 *
 * Row r of a work tile is query r >> shift of head r % 2^shift of a group. */
#ifndef ATTN_SM90_SPLITS_CUH
#define ATTN_SM90_SPLITS_CUH

#include "kernels/cuda/sm90/forward/forward_plan.cuh"

namespace {

/* The results of a split's softmax besides O, for the thread's two rows. l: the sum of exponentials divided by 2^top. */
struct split_end {
    float top[2], l[2];
};

/* ---- Work tiles -------------------------------------------------------------------------------------------------- */

/* Returns the rows of work tile t, all keys that they see, and the number of splits (parts) of these keys. */
template <int BM, int BN> DEVICE work_tile split_rows_of(const split_plan &p, int t)
{
    work_tile x = work_tile_of<BM, BN, true>(p, t, p.shift);
    const int length = max(x.length, 1);
    x.splits = max((x.last - x.first + length - 1) / length, 1);
    x.split = 0;
    return x;
}

/* Returns work tile t with the number of its split (part of the keys). If the rows have no such split, i0 is SKIP. */
template <int BM, int BN> DEVICE work_tile split_tile_of(const split_plan &p, int t)
{
    work_tile x = split_rows_of<BM, BN>(p, t / p.most);
    x.index = t;
    x.split = t % p.most;
    if (x.split >= x.splits) x.i0 = SKIP;
    return x;
}

/* ---- Adding up the results of splits (parts of the keys) --------------------------------------------------------- */

/* Combines two partial results of a row. Each operation is an intrinsic, so that the two kernels that combine results
 * get the same bits. */
struct fold {
    float top, keep, add;
    DEVICE fold(float before, float next)
    {
        top = fmaxf(before, next);
        /* top is -inf if the row has seen no key yet; -inf - -inf would be NaN */
        const float base = top == -CUDART_INF_F ? 0 : top;
        keep = exp2_fast(__fsub_rn(before, base));
        add = exp2_fast(__fsub_rn(next, base));
    }
    DEVICE float operator()(float before, float next) const { return fmaf(add, next, __fmul_rn(keep, before)); }
};

/* Adds the sums of all earlier splits (parts of the keys) to O and `end`. `before`: `top` and l of these sums, for both
 * rows. O_of(n) returns four numbers of their O, two for each row. */
template <int N, class F> DEVICE void add_split(const float4 &before, F O_of, float (&O)[N], split_end &end)
{
    const fold first(before.x, end.top[0]), second(before.z, end.top[1]);
    end.top[0] = first.top, end.top[1] = second.top;
    end.l[0] = first(before.y, end.l[0]), end.l[1] = second(before.w, end.l[1]);
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const float4 sum = O_of(n);
        O[n * 4] = first(sum.x, O[n * 4]), O[n * 4 + 1] = first(sum.y, O[n * 4 + 1]);
        O[n * 4 + 2] = second(sum.z, O[n * 4 + 2]), O[n * 4 + 3] = second(sum.w, O[n * 4 + 3]);
    }
}

/* Stores a warp's sums of a split to memory, and adds the sums of earlier splits. Each thread reads only the sums that
 * it has written itself. */
template <int DV> struct split_sums {
    float4 *const O, *const rows;
    DEVICE split_sums(const split_plan &p, int warp, int lane)
        : O(p.sums + (int64_t)warp * (DV / 8) * 32 + lane), rows(p.of_row + (int64_t)warp * 32 + lane)
    {
    }
    DEVICE void store(const float (&x)[DV / 2], const split_end &end)
    {
        *rows = make_float4(end.top[0], end.l[0], end.top[1], end.l[1]);
#pragma unroll
        for (int n = 0; n < DV / 8; n++) O[n * 32] = make_float4(x[n * 4], x[n * 4 + 1], x[n * 4 + 2], x[n * 4 + 3]);
    }
    DEVICE void add_before(float (&x)[DV / 2], split_end &end)
    {
        add_split(
            *rows, [&](int n) { return O[n * 32]; }, x, end);
    }
};

template <int N> DEVICE bool is_finite(const float (&O)[N])
{
    float zero[4] = { 0, 0, 0, 0 }; /* becomes NaN if a number is not finite; four independent sums hide latency */
#pragma unroll
    for (int i = 0; i < N; i++) zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] == 0;
}

/* ---- Storing the results of rows --------------------------------------------------------------------------------- */

/* Returns the sink of head h in base 2, or -inf if there is no sink. */
DEVICE float sink_of(const split_plan &p, int h)
{
    if (!p.huge_scores) return sink_log2(p.to, h);
    return sink_in_base_2(p.to.sinks ? p.to.sinks[h * p.to.sink_stride] : -CUDART_INF_F);
}

/* Stores WIDTH columns of out, from `column` on, of rows i0 and i0 + 8. If `column` is 0, it also stores their lse.
 * Returns whether all results are finite. */
template <typename T, int WIDTH>
DEVICE bool store_split_rows(const split_plan &p, const work_tile &x, int i0, int column, float (&O)[WIDTH / 2],
                             const split_end &end, int lane)
{
    const int shift = p.shift;
    const results &to = p.to;
    const float scale = p.out_scale * input_scale(p.scales, SCALE_V, x.b, x.h / p.group);
    bool finite = true;
    float factor[2];
    T *rows[2] = { nullptr, nullptr };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = i0 + half * 8, h = x.h + (r & ((1 << shift) - 1)), i = x.q_start + (r >> shift);
        const bool exists = r < x.Sq;
        const float sink = exists ? sink_of(p, h) : -CUDART_INF_F, top = fmaxf(end.top[half], sink),
                    base = top == -CUDART_INF_F ? 0 : top, keep = exp2_fast(__fsub_rn(end.top[half], base)),
                    l = fmaf(end.l[half], keep, exp2_fast(__fsub_rn(sink, base)));
        factor[half] = l == 0 ? 0 : __fdividef(keep, l) * scale;
        finite &= l - l == 0;
        if (!exists) continue;
        if (to.out) rows[half] = out_row<T>(to, x.b, h, i);
        if (column == 0 && lane % 4 == 0 && to.lse)
            to.lse[x.b * to.lse_batch + h * to.lse_head + i * to.lse_row] =
                l == 0                                          ? -CUDART_INF_F
                : p.huge_scores && fabsf(top) >= HUGE_SCORE ? top
                                                                : __fmul_rn(__fadd_rn(top, __log2f(l)), LN2);
    }
    finite &= finish_rows(O, factor);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 4) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack<T>(O[(n + e) * 4 + half * 2], O[(n + e) * 4 + half * 2 + 1]);
            transpose_quad(r, lane % 4);
            const int at = column + (n + lane % 4) * 8;
            if (rows[half] && at < to.Dv) *(uint4 *)(rows[half] + at) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    return finite;
}

/* Recomputes row r of work tile x, key by key, if tensor cores cannot compute it. All lanes of a warp must call
 * this. */
template <int CHANNELS> DEVICE void repair_split_row(const split_plan &p, const cuda_args &a, const work_tile &x, int r)
{
    const int shift = p.shift;
    if (r >= x.Sq) return;
    const head_args of_head = head_args_of(a, x.b, x.h + (r & ((1 << shift) - 1)));
    forward_row<CHANNELS>(a, of_head, r >> shift, a.g.view[ATTN_T_out], nullptr,
                          p.huge_scores ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS);
}

} // namespace

#endif
