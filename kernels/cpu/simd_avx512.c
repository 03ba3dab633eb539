/* simd_avx512.c: the table of vector functions (struct simd) for AVX-512 (F, BW, DQ, VL, VBMI), whose vectors have 16
 * floats.
 *
 * The matrix product C = A B is computed in blocks of up to 14 rows and 32 columns of C, which take 28 of the 32
 * registers. Two registers hold a row of 32 columns of B, and one holds an element of A. Each step along k thus costs
 * 2 + 14 loads and 28 multiply-adds, and the two multiply-add units bound the speed. All blocks get about equal
 * numbers of rows: 64 rows become 13, 13, 13, 13 and 12. A block of few rows would be slow, because it has too few
 * independent sums to hide the latency of multiply-adds. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#include "kernels/cpu/simd_v512.h"
#include "kernels/cpu/simd_rows.h"
#include "kernels/cpu/simd_f32.h"
#include "kernels/cpu/simd_tiles.h"

#define GEMM_ELEMENT         float
#define GEMM_BROADCAST(a)    _mm512_set1_ps(*(a))
#define GEMM_LOAD(b)         _mm512_load_ps(b)
#define GEMM_STEP(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define GEMM_PER_LANE        1
#include "kernels/cpu/simd_gemm512.h"

const struct simd simd_avx512 = {
    .name = "avx512",
    .f32 = { ATTN_F32, 1, 1, 16, pack_a, pack_at, pack_b, pack_bt, gemm, softmax, gradient },
    .score = score,
    .hide = hide,
    .dots = dots,
    .axpys = axpys,
    .dots_exact = dots_exact,
    .all_finite = all_finite,
    .most = most,
    .row_dots = row_dots,
    .load = load,
    .save = save,
    .store = store,
    .store_t = store_t,
    .close = close_rows,
    .exp2 = exp2_all,
    .drop = drop_bits,
    .observe = observe,
    .weigh = weigh,
    .add_rows = add_rows,
    .leave = leave,
};
#endif
