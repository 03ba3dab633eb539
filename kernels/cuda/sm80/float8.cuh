/* float8.cuh: tiles of float8_e4m3fn keys and values, which lanes convert to 16 bits in registers, for kernels that
 * mostly read keys and values.
 *
 * A row has D bytes, swizzled like D / 2 elements of 16 bits (tile.cuh). ldmatrix gives a lane two neighbouring float8
 * in place of one element, which changes the order of channels. With t = lane % 4:
 * Q K^T: a lane has channels 4 t .. 4 t + 3 of 16, where the instruction expects 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Q's
 * channels are put in the same order (permuted_word()), so the sum stays the same.
 * P V: even channels form one block of eight columns, odd channels another, so a lane's accumulators are channels 4 t
 * .. 4 t + 3 of 16 (four_channels()).
 *
 * Converting four float8 to float16 takes two instructions, to bfloat16 eight. P V is therefore computed in float16,
 * and so is Q K^T if each row of Q is float16 times a power of two (load_permuted_queries()). */
#ifndef ATTN_SM80_FLOAT8_CUH
#define ATTN_SM80_FLOAT8_CUH

#include "scores.cuh"

/* Converts four float8 to float16 without rounding: bytes 0 and 1 to `low`, bytes 2 and 3 to `high`. */
DEVICE void halves_of(uint32_t bytes, uint32_t &low, uint32_t &high)
{
#if __CUDA_ARCH__ >= 890
    low = halves_of_e4m3<0>(bytes);
    high = halves_of_e4m3<1>(bytes);
#else
    /* a float8 in the upper byte of 16 bits, shifted right by one bit, is a float16 that is 2^8 times too small
     * (exponent bias 7 instead of 15) */
    const auto one = [](uint32_t x) {
        const uint32_t magnitude = x & 0x7f007f00, nan = (magnitude + 0x01000100) & 0x80008000;
        return multiply_halves(magnitude >> 1 | (x & 0x80008000), 0x5c005c00 /* times 2^8 */) | (nan - (nan >> 15));
    };
    low = one(__byte_perm(bytes, 0, 0x1404));
    high = one(__byte_perm(bytes, 0, 0x3424));
#endif
}

/* Converts two float16 numbers to T. This needs no rounding, because the numbers were float8 before. */
template <typename T> DEVICE uint32_t from_halves(uint32_t x)
{
    const float2 y = floats_of_halves(x);
    return pack<T>(y.x, y.y);
}
template <> DEVICE uint32_t from_halves<__half>(uint32_t x)
{
    return x;
}

/* Returns the index (0 to 7) of the 32-bit word in which channels 2 w and 2 w + 1 of 16 channels of Q are stored. The
 * order is that in which a lane gets the channels of float8 keys. */
DEVICE int permuted_word(int w)
{
    return w % 2 * 4 + w / 2;
}

/* Computes S += Q K^T for float8 keys and 16 rows. rows_of_a(fragment, kk) loads Q, in the order of permuted_word(),
 * from channel 16 kk on; rows_of_b(bytes, nt, kk) loads K from channel 32 kk on. */
template <typename T, int D, int NT, typename A, typename B>
DEVICE void scores_of_float8(float (&S)[NT][4], A rows_of_a, B rows_of_b)
{
#pragma unroll
    for (int kk = 0; kk < D / 32; kk++) {
        uint32_t a[2][4];
        rows_of_a(a[0], kk * 2);
        rows_of_a(a[1], kk * 2 + 1);
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            uint32_t bytes[4];
            rows_of_b(bytes, nt, kk);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                /* successive products add to different sums, so that no product waits for the previous one */
                const int e = n % 2 * 2 + n / 2;
                uint32_t low, high;
                halves_of(bytes[e], low, high);
                mma<T>(S[nt + e / 2], a[e % 2], from_halves<T>(low), from_halves<T>(high));
            }
        }
    }
}

/* Computes O += P V for float8 values and 16 rows, in float16, whose range suffices because P is at most 1.
 * columns_of_b(bytes, u, kk) loads channels 32 u .. 32 u + 31 of keys 16 kk .. 16 kk + 15. */
template <int NT, int DT, typename B>
DEVICE void accumulate_float8(float (&O)[DT][4], const float (&P)[NT][4], B columns_of_b)
{
#pragma unroll
    for (int kk = 0; kk < NT / 2; kk++) {
        uint32_t a[4];
        to_operand<__half>(a, P, kk);
#pragma unroll
        for (int u = 0; u < DT / 4; u++) {
            uint32_t bytes[4];
            columns_of_b(bytes, u, kk);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint32_t even[2], odd[2];
#pragma unroll
                for (int half = 0; half < 2; half++)
                    halves_of(__byte_perm(bytes[e * 2 + half], 0, 0x3120), even[half], odd[half]);
                mma<__half>(O[u * 4 + e * 2], a, even[0], even[1]);
                mma<__half>(O[u * 4 + e * 2 + 1], a, odd[0], odd[1]);
            }
        }
    }
}

/* Computes O^T += V^T P^T for float8 values and at most 8 rows. Block 2 u of O has the even channels from 32 u on,
 * block 2 u + 1 the odd ones. */
template <int NT, int DT, typename A>
DEVICE void accumulate_turned_float8(float (&O)[DT][4], const float (&P)[NT][4], A columns_of_a)
{
#pragma unroll
    for (int kk = 0; kk < NT / 2; kk++) {
        uint32_t b[2];
        to_turned_operand<__half>(b, P, kk);
#pragma unroll
        for (int u = 0; u < DT / 2; u++) {
            uint32_t bytes[4], even[4], odd[4];
            columns_of_a(bytes, u, kk);
#pragma unroll
            for (int e = 0; e < 4; e++) halves_of(__byte_perm(bytes[e], 0, 0x3120), even[e], odd[e]);
            mma<__half>(O[u * 2], even, b[0], b[1]);
            mma<__half>(O[u * 2 + 1], odd, b[0], b[1]);
        }
    }
}

/* Returns elements 16 n + 4 t .. 16 n + 4 t + 3 (t is lane % 4) of one of the lane's rows of O: the upper row if `half`
 * is 0, the lower if it is 1. */
template <int DT> DEVICE float4 four_channels(const float (&O)[DT][4], int n, int half)
{
    return make_float4(O[n * 2][half * 2], O[n * 2 + 1][half * 2], O[n * 2][half * 2 + 1], O[n * 2 + 1][half * 2 + 1]);
}

#endif
