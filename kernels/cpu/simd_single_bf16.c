/* simd_single_bf16.c: the compute type "single", which stores float32 as three bf16 parts (simd_split.h). The product
 * of this type is in simd_amx.c. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX512F__) && defined(__AVX512VBMI__) && defined(__AVX512BF16__)
enum { PARTS = 3 };
#define OWN_DTYPE ATTN_F32
#include "kernels/cpu/simd_split.h"

const struct simd_type simd_single_type = { ATTN_BF16, K_MULTIPLE, PARTS, 0,       pack_a,  pack_at,
                                            pack_b,    pack_bt,    NULL,  softmax, gradient };
#endif
