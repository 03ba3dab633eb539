/* simd_avx2.c: the table of vector functions (struct simd) for AVX2 and FMA, whose vectors have 8 floats. */
#include "kernels/cpu/simd_variants.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels/cpu/simd_v256.h"
#include "kernels/cpu/simd_rows.h"
#include "kernels/cpu/simd_f32.h"
#include "kernels/cpu/simd_tiles.h"
#include "kernels/cpu/simd_gemm.h"

const struct simd simd_avx2 = {
    .name = "avx2",
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
