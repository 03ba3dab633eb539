/* sm80.h: conversions, and the instructions of compute capability 8.0 that a whole warp executes.
 * kernels/cuda/sm80/ptx.cuh says what each instruction does. PTX ISA 9.0, section 9.7.14.5, says which lane holds which
 * element. */
#ifndef ATTN_EMULATOR_SM80_H
#define ATTN_EMULATOR_SM80_H

#include <stdint.h>

namespace emu {

void ldmatrix_x4(uint32_t (&r)[4], uint32_t row);
void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row);

/* Matrix product of 16-bit operands: products are exact, and sums are float32, added in the order of k. */
void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

/* Rounds to TF32 (10 fraction bits), half away from zero. */
uint32_t tf32_of(float x);
/* Matrix product m16n8k8 of TF32: products of two numbers are exact, and sums are float32, added in the order of k. */
void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

/* Matrix product m16n8k16 of doubles. Each term is added by a fused multiply-add, in the order of k. */
void mma_f64(double (&c)[4], const double (&a)[8], const double (&b)[4]);

/* Rounds two floats to the nearest 16-bit numbers, ties to even, and packs them into a word. `low` goes into the low
 * half. */
uint32_t pack_f16(float low, float high);
uint32_t pack_bf16(float low, float high);

} // namespace emu

#endif
