/* products.cuh: products of tiles that a warpgroup computes, with operands in shared memory or registers.
 *
 * An operand's function step(k) returns the descriptor of step k: 32 bytes of each row of a K-major operand, or 16 rows
 * of an MN-major one. The functions multiply...() start a product, but do not wait for it: call retire() before reading
 * the sums. */
#ifndef ATTN_SM90_PRODUCTS_CUH
#define ATTN_SM90_PRODUCTS_CUH

#include "kernels/cuda/sm90/layer/ptx.cuh"

/* ---- Operands of tensor-core products (wgmma) -------------------------------------------------------------------- */

/* A K-major operand in shared memory, stored as chunks of ROWS rows by 128 bytes (see tma.cuh). Each descriptor is
 * computed from the address when it is needed, to save registers. */
template <int ROWS> struct k_major {
    uint32_t address;
    DEVICE uint64_t step(int k) const { return wgmma_descriptor(address + k / 4 * ROWS * 128 + k % 4 * 32, 16, 1024); }
};

/* A K-major operand that stores the descriptor of the first 32 bytes of its rows. The descriptor of later columns takes
 * one addition. */
template <int ROWS> struct k_major_described {
    uint64_t first;
    DEVICE explicit k_major_described(uint32_t address) : first(wgmma_descriptor(address, 16, 1024)) {}
    DEVICE uint64_t step(int k) const { return first + ((uint32_t)(k / 4 * ROWS * 128 + k % 4 * 32) >> 4); }
};

/* An MN-major operand in shared memory, stored as chunks of ROWS rows by 128 bytes (see tma.cuh). The rows are the
 * product's dimension k. */
template <int ROWS> struct mn_major {
    uint32_t address;
    DEVICE uint64_t step(int k) const { return wgmma_descriptor(address + k * 2048, ROWS * 128, 1024); }
};

/* Operands that store only the low word of a descriptor; the high word is the same in all descriptors. The descriptor
 * of another step along k, or of another buffer, takes one addition. */
DEVICE uint64_t descriptor_of(uint32_t low)
{
    return wgmma_descriptor(0, 0, 1024) | low;
}
template <int ROWS> struct k_major_low {
    uint32_t low;
    DEVICE explicit k_major_low(uint32_t address) : low((uint32_t)wgmma_descriptor(address, 16, 1024)) {}
    DEVICE uint64_t step(int k) const { return descriptor_of(low + ((k / 4 * ROWS * 128 + k % 4 * 32) >> 4)); }
};
template <int ROWS> struct mn_major_low {
    uint32_t low;
    DEVICE explicit mn_major_low(uint32_t address) : low((uint32_t)wgmma_descriptor(address, ROWS * 128, 1024)) {}
    DEVICE uint64_t step(int k) const { return descriptor_of(low + (k * 2048 >> 4)); }
};

/* Returns the operand in buffer n of a ring whose buffers are BYTES apart; `first` is the operand in buffer 0. */
template <int BYTES, class OPERAND> DEVICE OPERAND stage_of(OPERAND first, int n)
{
    first.low += (uint32_t)n * (BYTES >> 4);
    return first;
}

/* ---- Tensor-core products (wgmma) -------------------------------------------------------------------------------- */

/* Starts the product d[64 x N] = A B, in STEPS steps along k, with operands in shared memory. With add == 1 the product
 * is added to d. */
template <typename T, int N, int STEPS, class A, class B>
DEVICE void multiply(float (&d)[N / 2], const A &a, const B &b, int add = 0)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma<T, N>::ss(d, a.step(k), b.step(k), k > 0 ? 1 : add);
    wgmma_commit();
}

/* Starts the product d[64 x N] = A B, in STEPS steps along k, with operands in shared memory. B is MN-major. */
template <typename T, int N, int STEPS, class A, class B>
DEVICE void multiply_down(float (&d)[N / 2], const A &a, const B &b)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma_mn<T, N, 0, 1>::ss(d, a.step(k), b.step(k), k > 0);
    wgmma_commit();
}

/* Starts the product d[64 x N] += A B, in STEPS steps along k. A is in registers. With add == 0 d starts from 0. */
template <typename T, int N, int STEPS, class B>
DEVICE void multiply_add(float (&d)[N / 2], const uint32_t (&A)[STEPS][4], const B &b, int add = 1)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) wgmma<T, N>::rs(d, A[k], b.step(k), k > 0 ? 1 : add);
    wgmma_commit();
}

/* Waits until all but the newest LEFT products are complete. Afterwards d, the result of a completed product, may be
 * read. */
template <int LEFT, int N> DEVICE void retire(float (&d)[N])
{
    wgmma_wait<LEFT>();
    opaque(d);
}

/* ---- P as the operand of the next product ------------------------------------------------------------------------ */

/* Rounds P, which S holds, to 16-bit elements, in the order that wgmma needs for an operand in registers. */
template <typename T, int N, int M> DEVICE void to_operand(uint32_t (&P)[M][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) P[i / 4][i % 4] = pack<T>(S[2 * i], S[2 * i + 1]);
}

/* Rounds P to float8_e4m3: 4 registers of 4 elements for each 32 keys, with 0 for keys past N. The registers hold the
 * keys in the order in which transpose_v.cuh stores the keys of V^T. */
template <int N, int M> DEVICE void to_operand_8(uint32_t (&P)[M][4], const float (&S)[N / 2])
{
#pragma unroll
    for (int k = 0; k < M; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (k >= N / 32) {
                P[k][r] = 0;
                continue;
            }
            const float *const s = S + k * 16 + r / 2 * 8 + r % 2 * 2;
            P[k][r] = pack_e4m3(s[0], s[1], s[4], s[5]);
        }
}

#endif
