/* softmax.cuh: the online softmax of a warpgroup's 64 rows, a tile of keys at a time, in base 2.
 *
 * What a row's exponentials are relative to is a policy. REFERENCE offers
 *     advance(m, top)   the next reference of a row whose was m and whose maximum is now top >= m
 *     least(m)          what a maximum has to be above for the reference to move from m
 *     base(m)           log2 of what the exponentials are divided by
 *     c                 log2(e) * what scores are multiplied by, > 0
 * Rows do not look at their neighbours, so that a row's bits are its own. */
#ifndef ATTN_SM90_SOFTMAX_CUH
#define ATTN_SM90_SOFTMAX_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

/* Moves only when the maximum grows by more than slack = 8 / c over it, which is seldom: P is then at most 2^8. */
struct lazy_reference {
    float c, slack;
    DEVICE float advance(float m, float top) const { return top <= m + slack ? m : top; }
    DEVICE float least(float m) const { return m + slack; }
    DEVICE float base(float m) const { return __fmul_rn(m, c); }
};

/* The maximum itself, and P is 2^SHIFT there. */
template <int SHIFT> struct shifted_reference {
    float c;
    DEVICE float advance(float, float top) const { return top; }
    DEVICE float least(float m) const { return m; }
    DEVICE float base(float m) const { return fmaf(m, c, -SHIFT); } /* rounded alike everywhere */
};

/* Reference of the exponentials, a raw score, and this lane's part of the sum, for the thread's two rows. */
struct softmax {
    float m[2] = { -INFINITY, -INFINITY }, l[2] = { 0, 0 };
};

/* May the next maxima of the thread's rows be found by bits? They begin with a number >= 0 then, below which nothing
 * counts; and may be so ever after, for a reference only grows. */
template <class REFERENCE> DEVICE bool is_high(const softmax &x, const REFERENCE &reference)
{
    return reference.least(x.m[0]) >= 0 && reference.least(x.m[1]) >= 0;
}

/* S becomes P; rescale gets the factors of O: exactly 1 where the reference stays. Two chains a row, even and odd
 * columns, for the pipeline's sake. midway(sum) is called with a sum, >= 0 or NaN, that needs a row's maximum and a
 * quarter of its exponentials: what depends on it cannot be done before.
 *
 * IN_TURN: the second row's maximum is found under the first row's exponentials, for it begins with a number that needs
 * the first row's and changes nothing. ptxas else finds both before all exponentials, or not, as any change elsewhere
 * has it. IN_TURN = 2: that number needs the first of these exponentials too, so that they begin before it.
 *
 * BY_BITS: is_high() holds for all rows. */
template <int N, int IN_TURN = 0, bool BY_BITS = false, class REFERENCE, class F>
DEVICE void softmax_step(float (&S)[N / 2], softmax &x, float (&rescale)[2], const REFERENCE &reference, F midway)
{
    static_assert(N % 16 == 0, "columns in pairs");
    float top[4], base[2], sum[4] = { 0, 0, 0, 0 };
#pragma unroll
    for (int e = 0; e < 4; e++) top[e] = BY_BITS ? reference.least(x.m[e / 2]) : S[e];
    const auto find_maxima = [&](int begin, int end) {
#pragma unroll
        for (int n = BY_BITS ? 0 : 1; n < N / 8; n++)
#pragma unroll
            for (int e = begin; e < end; e++)
                if (!BY_BITS) top[e] = fmaxf(top[e], S[n * 4 + e]);
                else if (n % 2 == 0) top[e] = largest_by_bits(top[e], S[n * 4 + e], S[n * 4 + 4 + e]);
    };
    if (!IN_TURN) find_maxima(0, 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (IN_TURN && half == 1) {
            float least = fminf(x.m[0], x.m[1]);
            if (IN_TURN == 2) {
                S[1] = exp2_fast(fmaf(S[1], reference.c, -base[0]));
                least = fmaf(S[1], 0, least); /* or NaN, which a maximum passes over */
            }
            top[2] = fmaxf(top[2], least), top[3] = fmaxf(top[3], least);
        }
        if (IN_TURN) find_maxima(half * 2, half * 2 + 2);
        float m = fmaxf(x.m[half], fmaxf(top[half * 2], top[half * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        m = reference.advance(x.m[half], m);
        base[half] = m == -CUDART_INF_F ? 0 : reference.base(m); /* nothing seen yet: -inf - -inf would be NaN */
        rescale[half] = exp2_fast(__fsub_rn(reference.base(x.m[half]), base[half]));
        x.m[half] = m;
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &s = S[n * 4 + e];
            if (!(IN_TURN == 2 && n == 0 && e == 1)) s = exp2_fast(fmaf(s, reference.c, -base[e / 2]));
            sum[e] += s;
            if (e == 1 && n == N / 16 - 1) midway(sum[e]);
        }
#pragma unroll
    for (int half = 0; half < 2; half++) x.l[half] = x.l[half] * rescale[half] + (sum[half * 2] + sum[half * 2 + 1]);
}

template <int N, bool BY_BITS = false, class REFERENCE>
DEVICE void softmax_step(float (&S)[N / 2], softmax &x, float (&rescale)[2], const REFERENCE &reference)
{
    softmax_step<N, 0, BY_BITS>(S, x, rescale, reference, [](float) {});
}

/* The same in the order that lets O be rescaled under the exponentials. midway(sum) comes before them all but one, with
 * a number >= 0 or NaN that needs both rows' maxima; after it O may be multiplied by rescale. So that nothing but
 * exponentials is left then, the sums begin with what they were. The first row's maximum is of two chains, for all wait
 * for it; the second's of CHAINS (1 or 2), whose waits are where the first row's exponentials begin: the first of them
 * before it, as in IN_TURN = 2. HIDDEN: a row may have seen no key yet. BY_BITS: as above. SUMS: the sums are
 * wanted. */
template <int N, bool HIDDEN, int CHAINS, bool BY_BITS, bool SUMS, class REFERENCE, class F>
DEVICE void softmax_step_early(float (&S)[N / 2], softmax &x, float (&rescale)[2], const REFERENCE &reference, F midway)
{
    static_assert(N % 16 == 0, "columns in pairs");
    float top[2], other, base[2], sum[4];
    top[0] = BY_BITS ? reference.least(x.m[0]) : S[0], other = BY_BITS ? top[0] : S[1];
#pragma unroll
    for (int n = BY_BITS ? 0 : 1; n < N / 8; n++)
        if (!BY_BITS) top[0] = fmaxf(top[0], S[n * 4]), other = fmaxf(other, S[n * 4 + 1]);
        else if (n % 2 == 0) top[0] = largest_by_bits(top[0], S[n * 4], S[n * 4 + 1]);
        else other = largest_by_bits(other, S[n * 4], S[n * 4 + 1]);
    top[0] = fmaxf(top[0], other);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 1) { /* begins with a number that needs the first row's first exponential, and changes nothing */
            S[0] = exp2_fast(fmaf(S[0], reference.c, -base[0]));
            if (BY_BITS) top[1] = fmaxf(reference.least(x.m[1]), -fabsf(S[0]));
            else top[1] = fmaf(S[0], 0, fminf(x.m[0], x.m[1])); /* or NaN, which a maximum passes over */
            other = top[1];
            float &second = CHAINS == 2 ? other : top[1];
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                if (!BY_BITS) top[1] = fmaxf(top[1], S[n * 4 + 2]), second = fmaxf(second, S[n * 4 + 3]);
                else if (n % 2 == 0) top[1] = largest_by_bits(top[1], S[n * 4 + 2], S[n * 4 + 3]);
                else second = largest_by_bits(second, S[n * 4 + 2], S[n * 4 + 3]);
            if (CHAINS == 2) top[1] = fmaxf(top[1], other);
        }
        float m = fmaxf(x.m[half], top[half]);
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        m = reference.advance(x.m[half], m);
        base[half] = HIDDEN && m == -CUDART_INF_F ? 0 : reference.base(m); /* or -inf - -inf would be NaN */
        rescale[half] = exp2_fast(__fsub_rn(reference.base(x.m[half]), base[half]));
        x.m[half] = m;
    }
    midway(rescale[1]);
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &s = S[n * 4 + e];
            if (n > 0 || e > 0) s = exp2_fast(fmaf(s, reference.c, -base[e / 2]));
            if (!SUMS) continue;
            if (n > 0) sum[e] += s;
            else sum[e] = e % 2 ? s : fmaf(x.l[e / 2], rescale[e / 2], s);
        }
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (SUMS) x.l[half] = sum[half * 2] + sum[half * 2 + 1];
}

/* O *= factor, row by row. */
template <int N> DEVICE void multiply_rows(float (&O)[N], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) O[i] *= factor[i / 2 % 2];
}

/* O *= rescale; nothing where all the warp's rows keep their reference. Says whether it did. */
template <int N> DEVICE bool rescale_rows(float (&O)[N], const float (&rescale)[2])
{
    if (!__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) return false;
    multiply_rows(O, rescale);
    return true;
}

#endif
