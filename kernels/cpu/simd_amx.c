/* simd_amx.c: the product of bf16 operands on AMX tiles (TDPBF16PS), which adds 16 x 32 numbers of A times 32 x 16 of B
 * to 16 x 16 sums.
 *
 * All eight tile registers have the full shape, 16 rows of 64 bytes, so that one tile configuration serves every
 * product:
 *
 *     0 1    C, rows 0-15     4  A, rows 0-15      6 7  B, columns 0-15 and 16-31, half a panel each
 *     2 3    C, rows 16-31    5  A, rows 16-31
 *
 * Four loads thus feed four products. Where rows or columns do not fill a tile, the products also use padding or
 * whatever memory lies behind the operand. Such a block of C is computed in a buffer, and only its valid part is copied
 * to C. A sum runs along k in order, starting from C.
 *
 * The operating system gives tile registers only to a process that has requested them (simd_amx_permit). Each thread
 * loads the tile configuration at its first product and keeps it, because loading takes 50 ns. leave() releases the
 * tiles, so that the system need not save the 8 KiB of tiles of a sleeping thread. */
#include "kernels/cpu/simd_variants.h"

/* clang 14 calls this macro __AMXBF16__, newer compilers __AMX_BF16__ */
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512F__)
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 16, K_STEP = 32, K_BLOCK = 128 };

/* Constants of <asm/prctl.h>, written out because the headers of old systems lack them. */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

bool simd_amx_permit(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static _Thread_local bool configured;

static void configure(void)
{
    struct tile_config config = { .palette = 1 };
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = TILE;
    }
    _tile_loadconfig(&config);
    configured = true;
}

void simd_amx_leave(void)
{
    if (!configured) return;
    _tile_release();
    configured = false;
}

/* Multiplies each row of C by its factor in `rescale`, if the factor is not 1, in one panel of columns. All rows are
 * multiplied before the first product, because an AMX tile load stalls if the same memory was stored shortly before. */
static void rescale_panel(int m, int cols, float *C, int64_t ldc, const float *rescale)
{
    const __mmask16 m0 = (__mmask16)_bzhi_u32(0xffff, (unsigned)cols);
    const __mmask16 m1 = (__mmask16)_bzhi_u32(0xffff, (unsigned)(cols < TILE ? 0 : cols - TILE));
    for (int i = 0; i < m; i += TILE) {
        const __mmask16 rows = (__mmask16)_bzhi_u32(0xffff, (unsigned)(m - i < TILE ? m - i : TILE));
        const __m512 factors = _mm512_maskz_loadu_ps(rows, rescale + i);
        uint32_t changed = _mm512_mask_cmp_ps_mask(rows, factors, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
        for (; changed; changed &= changed - 1) {
            const int r = i + __builtin_ctz(changed);
            const __m512 factor = _mm512_set1_ps(rescale[r]);
            float *c = C + r * ldc;
            _mm512_mask_storeu_ps(c, m0, _mm512_mul_ps(_mm512_maskz_loadu_ps(m0, c), factor));
            _mm512_mask_storeu_ps(c + TILE, m1, _mm512_mul_ps(_mm512_maskz_loadu_ps(m1, c + TILE), factor));
        }
    }
}

static void copy_block(int rows, int cols, const float *from, int64_t ld_from, float *to, int64_t ld_to)
{
    for (int r = 0; r < rows; r++) memcpy(to + r * ld_to, from + r * ld_from, (size_t)cols * sizeof(float));
}

/* Computes 16 rows of C (32 rows if `two` is true) in the 32 columns of one panel. C must have memory for all 32
 * columns. With three parts, the product of part a of A and part b of B is left out if a + b >= 3, because it is too
 * small to matter (simd_split.h). */
static inline __attribute__((always_inline)) void gemm_block(const bool two, const int parts, int k, const uint16_t *A,
                                                             int64_t lda, const uint16_t *B, int64_t ldb, float *C,
                                                             int64_t ldc, bool add)
{
    const size_t a_bytes = (size_t)lda * 2, c_bytes = (size_t)ldc * sizeof(float);
    if (add) {
        _tile_loadd(0, C, c_bytes);
        _tile_loadd(1, C + TILE, c_bytes);
        if (two) _tile_loadd(2, C + TILE * ldc, c_bytes);
        if (two) _tile_loadd(3, C + TILE * ldc + TILE, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (two) _tile_zero(2);
        if (two) _tile_zero(3);
    }
    for (int kk = 0; kk < k; kk += K_STEP) {
#pragma GCC unroll 3
        for (int a = 0; a < parts; a++) {
            const uint16_t *A_part = A + a * (lda / parts);
#pragma GCC unroll 3
            for (int b = 0; b < parts; b++) {
                if (parts == 3 && a + b >= parts) continue;
                const uint16_t *B_part = B + b * (ldb / parts);
                _tile_loadd(6, B_part, 4 * SIMD_PANEL);
                if (b == 0) _tile_loadd(4, A_part, a_bytes);
                _tile_loadd(7, B_part + 2 * TILE, 4 * SIMD_PANEL);
                if (two && b == 0) _tile_loadd(5, A_part + TILE * lda, a_bytes);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (two) _tile_dpbf16ps(2, 5, 6);
                if (two) _tile_dpbf16ps(3, 5, 7);
            }
        }
        A += K_STEP;
        B += K_STEP * SIMD_PANEL;
    }
    _tile_stored(0, C, c_bytes);
    _tile_stored(1, C + TILE, c_bytes);
    if (two) _tile_stored(2, C + TILE * ldc, c_bytes);
    if (two) _tile_stored(3, C + TILE * ldc + TILE, c_bytes);
}

/* Computes the product of matrices whose numbers have 1, 2 or 3 bf16 parts. A panel (32 columns) of B and 32 rows of A,
 * with all their parts, should fit into the 48 KiB of L1. With several parts k is therefore processed in pieces of
 * K_BLOCK. Measured for m x n x k = 128 x 128 x 256: with two parts, 450 GFLOP/s for the whole of k at once and 580
 * GFLOP/s in pieces; with one part, 1900 GFLOP/s at once and 1400 in pieces. */
static inline __attribute__((always_inline)) void gemm(const int parts, int m, int n, int k, const void *A_form,
                                                       int64_t lda, const void *B_form, int64_t ldb, float *C,
                                                       int64_t ldc, bool add, const float *rescale)
{
    float buffer[2 * TILE * SIMD_PANEL] __attribute__((aligned(64)));
    if (!configured) configure();
    for (int k0 = 0, depth; k0 < k; k0 += depth) {
        const uint16_t *A = (const uint16_t *)A_form + k0, *B = (const uint16_t *)B_form + (int64_t)k0 * SIMD_PANEL;
        const bool sum = add || k0 > 0;
        depth = parts > 1 && k - k0 > K_BLOCK ? K_BLOCK : k - k0;
        for (int j = 0; j < n; j += SIMD_PANEL) {
            const uint16_t *panel = B + j / SIMD_PANEL * ldb;
            const int cols = n - j < SIMD_PANEL ? n - j : SIMD_PANEL;
            if (add && rescale && k0 == 0) rescale_panel(m, cols, C + j, ldc, rescale);
            for (int i = 0; i < m; i += 2 * TILE) {
                const int rows = m - i < 2 * TILE ? m - i : 2 * TILE;
                const uint16_t *a = A + i * lda;
                float *c = C + i * ldc + j;
                const bool whole = cols == SIMD_PANEL && rows % TILE == 0;
                float *target = whole ? c : buffer;
                const int64_t ld = whole ? ldc : SIMD_PANEL;
                if (!whole && sum) copy_block(rows, cols, c, ldc, buffer, SIMD_PANEL);
                if (rows > TILE) gemm_block(true, parts, depth, a, lda, panel, ldb, target, ld, sum);
                else gemm_block(false, parts, depth, a, lda, panel, ldb, target, ld, sum);
                if (!whole) copy_block(rows, cols, buffer, SIMD_PANEL, c, ldc);
            }
        }
    }
}

#define PRODUCT(name, parts)                                                                                      \
    void name(int m, int n, int k, const void *A, int64_t lda, const void *B, int64_t ldb, float *C, int64_t ldc, \
              bool add, const float *rescale)                                                                     \
    {                                                                                                             \
        gemm(parts, m, n, k, A, lda, B, ldb, C, ldc, add, rescale);                                               \
    }
PRODUCT(simd_amx_gemm, 1)
PRODUCT(simd_amx_gemm2, 2)
PRODUCT(simd_amx_gemm3, 3)
#endif
