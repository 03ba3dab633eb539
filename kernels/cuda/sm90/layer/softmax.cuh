/* softmax.cuh: the online softmax of a warpgroup's 64 rows, a tile of keys at a time, in base 2.
 *
 * The reference of a row is the score that is subtracted from the row's scores before exp2. A policy class REFERENCE
 * chooses it, by these members:
 *
 *   advance(m, top)   the next reference of a row whose reference was m and whose maximum is now top >= m
 *   least(m)          the value that a maximum must exceed to move the reference from m
 *   base(m)           log2 of the divisor of the exponentials
 *   c                 log2(e) * the factor of scores, > 0
 *   factor(m)         c; for a reference m that is huge, a number that keeps differences of scores exact
 *   change(old, b, f) log2 of the factor of sums when the reference changes from old to m; b is base(m), f is factor(m)
 *
 * Each row is computed independently, so that its bits do not depend on other rows. */
#ifndef ATTN_SM90_SOFTMAX_CUH
#define ATTN_SM90_SOFTMAX_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

/* A choice of the reference (the number that is subtracted from a row's scores before exp2): it moves only when the
 * row's maximum exceeds it by more than slack, which is rare. slack is 8 in base 2, so P is at most 2^8. */
struct lazy_reference {
    float c, slack;
    DEVICE float advance(float m, float top) const { return top <= m + slack ? m : top; }
    DEVICE float least(float m) const { return m + slack; }
    DEVICE float base(float m) const { return __fmul_rn(m, c); }
    DEVICE float factor(float) const { return c; }
    DEVICE float change(float m, float b, float) const { return __fsub_rn(base(m), b); }
};

/* A choice of the reference (the number that is subtracted from a row's scores before exp2): it always equals the row's
 * maximum. The largest P of a row is 2^SHIFT. */
template <int SHIFT> struct shifted_reference {
    float c;
    DEVICE float advance(float, float top) const { return top; }
    DEVICE float least(float m) const { return m; }
    /* an explicit fused multiply-add, so that base() rounds in the same way wherever it is compiled */
    DEVICE float base(float m) const { return fmaf(m, c, -SHIFT); }
    DEVICE float factor(float) const { return c; }
    DEVICE float change(float m, float b, float) const { return __fsub_rn(base(m), b); }
};

/* The softmax of the thread's two rows: m is the row's reference (subtracted from its scores before exp2), and l is
 * this lane's part of the row's sum of exponentials. */
struct softmax {
    float m[2] = { -INFINITY, -INFINITY }, l[2] = { 0, 0 };
};

/* Returns whether largest_by_bits(), which compares scores as integers, may find the next maxima of the thread's two
 * rows. It finds a maximum correctly only if the maximum is >= 0. Each row's reference must therefore be so high that
 * no negative score can change the reference. The result never changes from true to false. */
template <class REFERENCE> DEVICE bool is_high(const softmax &x, const REFERENCE &reference)
{
    return reference.least(x.m[0]) >= 0 && reference.least(x.m[1]) >= 0;
}

/* Turns scores S into probabilities P. `rescale` gets the factors for the rows of O; a factor is exactly 1 if the
 * reference stays. midway(sum) is called when a row's maximum and a quarter of its exponentials are known. `sum` is >=
 * 0 or NaN and depends on these exponentials, so that ptxas cannot move code that uses `sum` to an earlier place.
 * IN_TURN = 1: the second row's maximum depends on the first row's maximum, so that ptxas searches for it during the
 * first row's exponentials. IN_TURN = 2: it also depends on the first of these exponentials. BY_BITS: is_high() is true
 * for all rows. */
template <int N, int IN_TURN = 0, bool BY_BITS = false, class REFERENCE, class F>
DEVICE void softmax_step(float (&S)[N / 2], softmax &x, float (&rescale)[2], const REFERENCE &reference, F midway)
{
    static_assert(N % 16 == 0, "columns in pairs");
    float top[4], base[2], factor[2], sum[4] = { 0, 0, 0, 0 };
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
                S[1] = exp2_fast(fmaf(S[1], factor[0], -base[0]));
                /* The product S[1] * 0 is 0 or NaN, and fmaxf() ignores a NaN. So it has no effect except that `least`
                 * depends on S[1]. */
                least = fmaf(S[1], 0, least);
            }
            top[2] = fmaxf(top[2], least), top[3] = fmaxf(top[3], least);
        }
        if (IN_TURN) find_maxima(half * 2, half * 2 + 2);
        float m = fmaxf(x.m[half], fmaxf(top[half * 2], top[half * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
        m = reference.advance(x.m[half], m);
        /* m is -inf if the row has seen no key yet; -inf - -inf would be NaN */
        base[half] = m == -CUDART_INF_F ? 0 : reference.base(m);
        factor[half] = reference.factor(m);
        rescale[half] = exp2_fast(reference.change(x.m[half], base[half], factor[half]));
        x.m[half] = m;
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &s = S[n * 4 + e];
            if (!(IN_TURN == 2 && n == 0 && e == 1)) s = exp2_fast(fmaf(s, factor[e / 2], -base[e / 2]));
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

/* Turns S into P like softmax_step(), but calls midway() earlier, so that O can be rescaled among the exponentials:
 * midway(sum) is called when both rows' maxima and one exponential are known. `sum` is >= 0 or NaN and depends on both
 * maxima. CHAINS: number of chains of operations (1 or 2) that find the second row's maximum. HIDDEN: a row may have
 * seen no key yet. BY_BITS: is_high() is true for all rows. SUMS: the sums of P are wanted. */
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
        /* The search for the second row's maximum begins with a number that depends on an exponential of the first row,
         * but does not change the maximum. ptxas therefore searches while the first row's exponentials are computed. */
        if (half == 1) {
            S[0] = exp2_fast(fmaf(S[0], reference.c, -base[0]));
            if (BY_BITS) top[1] = fmaxf(reference.least(x.m[1]), -fabsf(S[0]));
            /* The product S[0] * 0 is 0 or NaN, and fmaxf() ignores a NaN. So it has no effect except that top[1]
             * depends on S[0]. */
            else top[1] = fmaf(S[0], 0, fminf(x.m[0], x.m[1]));
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
        /* with HIDDEN, m is -inf if the row has seen no key yet; -inf - -inf would be NaN */
        base[half] = HIDDEN && m == -CUDART_INF_F ? 0 : reference.base(m);
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

template <int N> DEVICE void multiply_rows(float (&O)[N], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++) O[i] *= factor[i / 2 % 2];
}

/* Multiplies O by rescale if a row of the warp has changed its reference. Returns whether it multiplied. */
template <int N> DEVICE bool rescale_rows(float (&O)[N], const float (&rescale)[2])
{
    if (!__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) return false;
    multiply_rows(O, rescale);
    return true;
}

#endif
