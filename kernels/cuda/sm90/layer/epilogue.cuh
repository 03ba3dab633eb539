/* epilogue.cuh: the end of a work tile (BM queries of one head): the sink, lse, the test whether all results are
 * finite, the store of O, and the search for rows that must be recomputed because a result is not finite. */
#ifndef ATTN_SM90_EPILOGUE_CUH
#define ATTN_SM90_EPILOGUE_CUH

#include "kernels/cuda/common/rows.cuh"
#include "kernels/cuda/sm90/layer/softmax.cuh"

/* Addresses and strides of out, lse and the sinks. A head's sink is added to the softmax sum of each row at the end. */
struct results {
    void *out;  /* NULL: out is not wanted */
    float *lse; /* NULL: lse is not wanted */
    int64_t out_batch, out_head, out_row, lse_batch, lse_head, lse_row;
    const float *sinks; /* NULL: there are no sinks */
    int64_t sink_stride;
    int Dv;
};

static inline results results_of(const attn_geometry &g)
{
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse], &sinks = g.view[ATTN_T_sinks];
    results x;
    x.out = out.data, x.out_batch = out.batch, x.out_head = out.head, x.out_row = out.row;
    x.lse = (float *)lse.data, x.lse_batch = lse.batch, x.lse_head = lse.head, x.lse_row = lse.row;
    x.sinks = (const float *)sinks.data, x.sink_stride = sinks.head;
    x.Dv = (int)g.dims.Dv;
    return x;
}

/* Returns the sink of head h in base 2 (times log2(e)), or -inf if there is no sink. */
DEVICE float sink_log2(const results &to, int h)
{
    const float sink = to.sinks ? to.sinks[h * to.sink_stride] : -CUDART_INF_F, y = sink * LOG2E;
    return sink == -CUDART_INF_F || y != -CUDART_INF_F ? y : -FLT_MAX;
}

/* ---- Computing the factors of O, and lse, from the sums of rows -------------------------------------------------- */

/* Results of end_rows() for the thread's two rows. `factor`: the row of O must be multiplied by it. `top`: the row's
 * exponentials were divided by 2^top before they were added to l. */
struct row_ends {
    float factor[2], top[2];
};

/* Adds the sink to the sum l of each row, and computes v_scale / l, the factor of each row of O. x.l must be this
 * lane's part of each row's sum (the function adds the parts of four lanes) or, with WHOLE, the whole sum. */
template <bool WHOLE = false, class REFERENCE>
DEVICE row_ends end_rows(softmax &x, const REFERENCE &reference, float sink, float v_scale)
{
    row_ends y;
#pragma unroll
    for (int distance = 1; distance <= 2 && !WHOLE; distance++)
#pragma unroll
        for (int half = 0; half < 2; half++) x.l[half] += __shfl_xor_sync(0xffffffff, x.l[half], distance);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float &l = x.l[half], keep = 1;
        y.top[half] = reference.base(x.m[half]); /* base() multiplies by c > 0, so a maximum of -inf stays -inf */
        if (sink != -CUDART_INF_F) {
            const float both = fmaxf(y.top[half], sink);
            keep = exp2_fast(y.top[half] - both);
            l = l * keep + exp2_fast(sink - both);
            y.top[half] = both;
        }
        y.factor[half] = l == 0 ? 0 : __fdividef(keep, l) * v_scale;
    }
    return y;
}

/* Stores lse = top ln 2 + ln l of the thread's rows i0 and i0 + 8, if they are below Sq. BY_IN_BASE_2: `top` comes from
 * in_base_2(), which does not convert huge scores to base 2. */
template <bool BY_IN_BASE_2 = false>
DEVICE void store_lse(const results &to, int b, int h, int64_t q_start, int i0, int Sq, const softmax &x,
                      const row_ends &ends, int lane)
{
    if (lane % 4 != 0 || !to.lse) return;
    float *const lse = to.lse + b * to.lse_batch + h * to.lse_head + (q_start + i0) * to.lse_row;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (i0 + half * 8 < Sq)
            lse[half * 8 * to.lse_row] = x.l[half] == 0 ? -CUDART_INF_F
                                         : BY_IN_BASE_2 && fabsf(ends.top[half]) >= HUGE_SCORE
                                             ? ends.top[half]
                                             : (ends.top[half] + __log2f(x.l[half])) * LN2;
}

/* Multiplies the thread's two rows of O by their factors. Returns whether all of O is finite. */
template <int N> DEVICE bool finish_rows(float (&O)[N], const float (&factor)[2])
{
    float zero[4] = { 0, 0, 0, 0 }; /* becomes NaN if a number of O is not finite; four independent sums hide latency */
#pragma unroll
    for (int i = 0; i < N; i++) {
        O[i] *= factor[i / 2 % 2];
        zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
    }
    return zero[0] + zero[1] + zero[2] + zero[3] == 0;
}

template <typename T> DEVICE T *out_row(const results &to, int b, int h, int64_t line)
{
    return (T *)to.out + b * to.out_batch + h * to.out_head + line * to.out_row;
}

/* ---- Storing O in global memory ---------------------------------------------------------------------------------- */

/* Writes a warp's 16 rows of O to the warp's shared memory. Piece c (16 bytes) of row r is stored as piece number
 * place(r, c). */
template <typename T, int D, class PLACE>
DEVICE void stage_rows(const float (&O)[D / 2], uint16_t *staging, int lane, PLACE place)
{
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t r[4];
#pragma unroll
        for (int e = 0; e < 4; e++) r[e] = pack<T>(O[n * 8 + e * 2], O[n * 8 + e * 2 + 1]);
        stmatrix_x4(smem_addr(staging + place(lane % 16, 2 * n + lane / 16) * 8), r);
    }
}

/* Stores a warp's rows of O through shared memory, whole rows at a time. `count`: number of rows that exist, at most
 * 16. */
template <typename T, int D>
DEVICE void store_rows(T *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], uint16_t *staging, int lane)
{
    /* PIECES: 16-byte pieces in a row. PITCH: pieces from one row to the next in shared memory, a multiple of 8,
     * because the swizzle permutes groups of 8 pieces. */
    const int PIECES = D / 8, PITCH = (D + 63) / 64 * 8;
    const auto place = [](int i, int piece) { return i * PITCH + (piece ^ (i & 7)); };
    stage_rows<T, D>(O, staging, lane, place);
    __syncwarp();
    /* number of rows that the 32 lanes store at a time; 0 if 32 is not a multiple of PIECES */
    const int STEP = 32 % PIECES == 0 ? 32 / PIECES : 0;
    auto word_of = [&](int i, int piece) { return *(const uint4 *)(staging + place(i, piece) * 8); };
    if (STEP) {
        const int i = lane / PIECES, piece = lane % PIECES;
        const int rows_left = piece * 8 < Dv ? count - i : 0;
        T *to = rows + i * stride + piece * 8;
        uint4 words[D / 16];
#pragma unroll
        for (int n = 0; n < D / 16; n++) words[n] = word_of(i + n * STEP, piece);
        /* without this call ptxas would move the last load after the stores */
        opaque(*(uint32_t(*)[D / 4]) words);
#pragma unroll
        for (int n = 0; n < D / 16; n++, to += STEP * stride)
            if (n * STEP < rows_left) store_16(to, words[n]);
    } else {
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            const int at = n * 32 + lane, i = at / PIECES, piece = at % PIECES;
            const uint4 word = word_of(i, piece);
            if (i < count && piece * 8 < Dv) store_16(rows + i * stride + piece * 8, word);
        }
    }
}

/* Returns where piece `piece` (16 bytes) of row i lies, counted in pieces, in the layout of store_tile(): chunks of 64
 * columns, with 8 pieces per row. */
DEVICE int place_in_chunks(int i, int piece)
{
    return piece / 8 * 128 + i * 8 + (piece % 8 ^ (i & 7));
}

/* Copies the first `count` rows from the layout of place_in_chunks() to global memory. All lanes of the warp must call
 * this. */
template <typename T, int D>
DEVICE void store_staged(T *rows, int64_t stride, int count, int Dv, const uint16_t *staging, int lane)
{
    const int PIECES = D / 8;
#pragma unroll 1
    for (int at = lane; at < count * PIECES; at += 32) {
        const int i = at / PIECES, piece = at % PIECES;
        const uint4 word = *(const uint4 *)(staging + place_in_chunks(i, piece) * 8);
        if (piece * 8 < Dv) store_16(rows + i * stride + piece * 8, word);
    }
}

/* Transposes 4 x 4 words of four neighbouring lanes: lane q of the four gets word q of each of the four lanes. */
DEVICE void transpose_quad(uint32_t (&a)[4], int q)
{
#pragma unroll
    for (int step = 1; step <= 2; step++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int low = step == 1 ? 2 * n : n, high = low + step;
            const bool upper = q & step;
            const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? a[low] : a[high], step);
            if (upper) a[low] = other;
            else a[high] = other;
        }
}

/* Stores rows of O directly from registers, for kernels whose shared memory has no room for O. */
template <typename T, int D>
DEVICE void store_rows(T *rows, int64_t stride, int count, int Dv, const float (&O)[D / 2], int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < D / 8; n += 4) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack<T>(O[(n + e) * 4 + half * 2], O[(n + e) * 4 + half * 2 + 1]);
            transpose_quad(r, lane % 4);
            const int column = (n + lane % 4) * 8;
            if (i < count && column < Dv) *(uint4 *)(rows + i * stride + column) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    }
}

/* ---- Storing gradients in float32 -------------------------------------------------------------------------------- */

/* Stores a warp's 16 float32 rows through 2 KB of shared memory, 32 columns at a time. */
template <int D>
DEVICE void store_floats(float *rows, int64_t stride, int count, int width, const float (&sums)[D / 2],
                         uint16_t *staging, int lane)
{
    const auto at = [&](int r, int piece) { return (float *)staging + r * 32 + (piece ^ (r & 7)) * 4; };
    const int i = lane / 8, piece = lane % 8;
#pragma unroll
    for (int part = 0; part < D / 32; part++) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float *const pair = sums + (part * 4 + n) * 4 + half * 2;
                *(float2 *)(at(lane / 4 + half * 8, n * 2 + lane % 4 / 2) + lane % 2 * 2) = make_float2(pair[0],
                                                                                                        pair[1]);
            }
        __syncwarp();
        const int rows_left = part * 32 + piece * 4 < width ? count - i : 0;
        float *to = rows + i * stride + part * 32 + piece * 4;
        uint4 words[4];
#pragma unroll
        for (int n = 0; n < 4; n++) words[n] = *(const uint4 *)at(i + n * 4, piece);
        opaque(*(uint32_t(*)[16])words);
#pragma unroll
        for (int n = 0; n < 4; n++, to += 4 * stride)
            if (n * 4 < rows_left) store_16(to, words[n]);
        __syncwarp();
    }
}

/* Stores float32 rows directly from registers. Four lanes write 32 bytes of a row. */
template <int D>
DEVICE void store_floats(float *rows, int64_t stride, int count, int width, const float (&sums)[D / 2], int lane)
{
    const int i = lane / 4;
    rows += i * stride + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++, rows += 8 * stride)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            if (half * 8 < count - i && n * 8 < width)
                *(float2 *)(rows + n * 8) = make_float2(sums[n * 4 + half * 2], sums[n * 4 + half * 2 + 1]);
}

/* Stores `count` rows of a gradient, from element `place` of the tensor on, in the tensor's type (float32 or T).
 * `rest`: the last arguments of store_rows(). */
template <typename T, int D, class... REST>
DEVICE void store_gradient(const attn_view &to, int64_t place, int count, int width, const float (&sums)[D / 2],
                           REST... rest)
{
    if (to.dtype == ATTN_F32)
        store_floats<D>((float *)to.data + place, to.row, count, width, sums, (int)(threadIdx.x % 32));
    else store_rows<T, D>((T *)to.data + place, to.row, count, width, sums, rest...);
}

/* ---- Recomputing rows whose results are not finite --------------------------------------------------------------- */

/* For each n below `flags` with flag(n) != 0, one warp of the grid calls repair(n, flag(n)) with all its lanes. */
template <class FLAG, class REPAIR> DEVICE void for_flagged_warps(int flags, FLAG flag, REPAIR repair)
{
    for (int base = (blockIdx.x * 4 + threadIdx.x / 32) * 32; base < flags; base += gridDim.x * 128) {
        const int n = base + threadIdx.x % 32;
        const uint32_t word = n < flags ? flag(n) : 0;
        for (unsigned set = __ballot_sync(0xffffffff, word != 0); set; set &= set - 1) {
            const int bit = __ffs(set) - 1;
            repair(base + bit, __shfl_sync(0xffffffff, word, bit));
        }
    }
}

#endif
