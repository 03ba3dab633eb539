/* simd_half_bf16.c: the compute type "half", which stores float16 as two bf16 parts (simd_split.h). The product of this
 * type is in simd_amx.c. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX512F__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)
enum { PARTS = 2 };
#define OWN_DTYPE ATTN_F16
#include "kernels/cpu/simd_split.h"

const struct simd_type simd_half_type = { ATTN_BF16, K_MULTIPLE, PARTS, 0,       pack_a,  pack_at,
                                          pack_b,    pack_bt,    NULL,  softmax, gradient };
#endif
