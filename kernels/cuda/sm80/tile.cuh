/* tile.cuh: tiles of rows in shared memory, and the interval of keys that a row sees, for all kernels of this folder. A
 * row has D 16-bit elements, in pieces of 16 bytes. Piece c of row r is stored as piece c ^ (r % 8), so that neither
 * copies nor ldmatrix have bank conflicts. */
#ifndef ATTN_SM80_TILE_CUH
#define ATTN_SM80_TILE_CUH

#include "ptx.cuh"

/* Returns the offset of piece c (16 bytes) of row r in a tile, in 16-bit elements. With D = 32, two neighbouring rows
 * have the same swizzle, because together they span all banks. */
template <int D> DEVICE int at(int r, int c)
{
    return r * D + (c ^ (D >= 64 ? r & 7 : r / 2 & 3)) * 8;
}

template <typename T> DEVICE uint16_t widened(uint8_t x)
{
    return attn_bf16_from_f32(attn_e4m3_to_f32(x));
}
template <> DEVICE uint16_t widened<__half>(uint8_t x)
{
    return __half_as_ushort(__float2half_rn(attn_e4m3_to_f32(x)));
}

/* How elements of a tile are stored in shared memory. If T is a 16-bit type, float8 numbers are converted to T. If T is
 * uint8_t, they stay float8, and a row has D bytes. If T is float, the tensor is float32. */
template <typename T, int D> struct tile_row {
    static const int BYTES = sizeof(T), PIECE = 16 / BYTES, WIDTH = D * BYTES / 2, PIECES = D / PIECE;

    static DEVICE void put(uint16_t *to, int r, int d, attn_dtype dtype, const void *data, int64_t index, bool valid)
    {
        if constexpr (BYTES == 1) {
            ((uint8_t *)(to + at<WIDTH>(r, d / PIECE)))[d % PIECE] = valid ? ((const uint8_t *)data)[index] : 0;
        } else if constexpr (BYTES == 4) {
            ((float *)(to + at<WIDTH>(r, d / PIECE)))[d % PIECE] = valid ? ((const float *)data)[index] : 0;
        } else {
            uint16_t x = 0;
            if (valid)
                x = dtype == ATTN_F8E4M3 ? widened<T>(((const uint8_t *)data)[index]) : ((const uint16_t *)data)[index];
            to[at<WIDTH>(r, d / PIECE) + d % PIECE] = x;
        }
    }
};

/* Copies tiles of one head's rows to shared memory. A thread copies piece c (16 bytes) of rows r, r + STEP, ...; if
 * STEP is a multiple of 8, the swizzle puts the piece at the same offset in each of these rows. ONCE: no other block
 * reads these rows, so they need not stay in the L2 cache. T: the type of an element (see tile_row). */
template <int D, int THREADS, bool ONCE = false, typename T = __half> struct loader {
    typedef tile_row<T, D> tile;
    static const int W = tile::WIDTH, PIECES = tile::PIECES, STEP = THREADS / PIECES;
    /* address of the thread's first piece of 16 bytes, in row threadIdx.x / PIECES; if `pieces` is false, address of
     * row 0 */
    const char *data;
    const attn_view *view;
    int row_bytes; /* number of bytes from one row to the next; set only if `pieces` is true */
    int rows;      /* number of rows of the sequence; later rows become zeros */
    int columns;
    /* whether every row is 16-byte aligned and a multiple of 16 bytes; rows are then copied in pieces of 16 bytes */
    bool pieces;

    DEVICE loader(const attn_view &tensor, int64_t b, int64_t h, int64_t line, int64_t count, int64_t width)
    {
        const int bytes = tensor.dtype == ATTN_F8E4M3 ? 1 : tensor.dtype == ATTN_F32 ? 4 : 2;
        data = (const char *)tensor.data + attn_at(&tensor, b, h, line) * bytes;
        view = &tensor;
        rows = (int)count;
        columns = (int)width;
        row_bytes = (int)tensor.row * tile::BYTES;
        pieces = bytes == tile::BYTES && width % tile::PIECE == 0 && tensor.row % tile::PIECE == 0 &&
                 tensor.row * tile::BYTES < INT64_C(1) << 31 && (uint64_t)data % 16 == 0;
        if (pieces) data += (int64_t)(threadIdx.x / PIECES) * row_bytes + threadIdx.x % PIECES * 16;
    }

    /* Loads rows [first, first + ROWS). Rows past the sequence and columns past the tensor become zeros. */
    template <int ROWS> DEVICE void load(uint16_t *to, int first) const
    {
        if (pieces) {
            const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
            const bool column = c * tile::PIECE < columns;
            const char *from = data + (int64_t)first * row_bytes;
            const uint32_t there = smem_addr(to + at<W>(r, c));
            const uint64_t policy = ONCE ? evict_first() : 0;
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++) {
                const uint32_t piece = STEP % 8 == 0 ? there + n * STEP * W * 2
                                                     : smem_addr(to + at<W>(r + n * STEP, c));
                const char *const row = from + (int64_t)(n * STEP) * row_bytes;
                const bool valid = column && first + r + n * STEP < rows;
                if (ONCE) cp_async_16(piece, row, valid, policy);
                else cp_async_16(piece, row, valid);
            }
            return;
        }
#pragma unroll 1
        for (int n = threadIdx.x; n < ROWS * D; n += THREADS) {
            const int r = n / D, d = n % D;
            tile::put(to, r, d, view->dtype, data, (first + r) * view->row + d, first + r < rows && d < columns);
        }
    }
};

/* Loads tiles of K or V. If PAGED is true, the rows lie in the pages of page_table. */
template <typename T, int D, int THREADS, bool ONCE, bool PAGED> struct key_loader : loader<D, THREADS, ONCE, T> {
    DEVICE key_loader(const attn_geometry &, const attn_view &tensor, int64_t b, int64_t hk, int64_t line,
                      int64_t count, int64_t width)
        : loader<D, THREADS, ONCE, T>(tensor, b, hk, line, count, width)
    {
    }
};
template <typename T, int D, int THREADS, bool ONCE> struct key_loader<T, D, THREADS, ONCE, true> {
    typedef tile_row<T, D> tile;
    static const int PIECES = tile::PIECES, STEP = THREADS / PIECES;
    /* Number of rows of a chunk. If the page size is a multiple of CHUNK, a chunk needs only one entry of
     * page_table. */
    static const int CHUNK = STEP > 16 ? STEP : 16;
    const attn_geometry *g;
    const attn_view *view;
    /* this sequence's entries of page_table; if each tile lies in one page, `table` is advanced to the next tile's
     * entry */
    const int32_t *table;
    /* address of this thread's piece of 16 bytes in row threadIdx.x / PIECES of page 0 */
    const char *data;
    int64_t page_bytes;
    int page_size, row_bytes;
    int b, hk, rows, columns;
    int next = -1, page,
        /* next: the first row that the next call of load() probably loads; page, slot: this row's page, and the row's
         * index in the page, computed early to hide latency */
        slot;
    /* whether every row is 16-byte aligned and a multiple of 16 bytes; rows are then copied in pieces of 16 bytes */
    bool pieces;
    bool chunks; /* whether `pieces` is true and a page consists of whole chunks of CHUNK rows */

    DEVICE key_loader(const attn_geometry &geometry, const attn_view &tensor, int64_t b, int64_t hk, int64_t,
                      int64_t count, int64_t width)
    {
        g = &geometry;
        view = &tensor;
        this->b = (int)b, this->hk = (int)hk;
        rows = (int)count;
        columns = (int)width;
        pieces = (tensor.dtype == ATTN_F8E4M3) == (tile::BYTES == 1) && width % tile::PIECE == 0 &&
                 tensor.row % tile::PIECE == 0 && tensor.batch % tile::PIECE == 0 &&
                 ((uint64_t)tensor.data + hk * tensor.head * tile::BYTES) % 16 == 0;
        table = geometry.page_table + b * geometry.page_table_row;
        page_bytes = tensor.batch * tile::BYTES;
        page_size = (int)geometry.dims.page_size;
        row_bytes = (int)tensor.row * tile::BYTES;
        data = (const char *)tensor.data + hk * tensor.head * tile::BYTES + threadIdx.x % PIECES * 16 +
               (int64_t)(threadIdx.x / PIECES) * row_bytes;
        const int64_t most = (INT64_C(1) << 31) / tile::BYTES;
        chunks = pieces && tensor.row < most && geometry.dims.page_size % CHUNK == 0 &&
                 geometry.dims.page_size * tensor.row < most;
    }

    DEVICE void copy(uint16_t *to, int r, int c, const char *from, bool valid) const
    {
        const uint32_t piece = smem_addr(to + at<tile::WIDTH>(r, c));
        if (ONCE) cp_async_16(piece, from, valid, evict_first());
        else cp_async_16(piece, from, valid);
    }

    /* Loads ROWS rows from row `first`, a multiple of ROWS. A call is faster if its rows directly follow those of the
     * previous call. */
    template <int ROWS> DEVICE void load(uint16_t *to, int first)
    {
        static_assert(CHUNK % STEP == 0 && ROWS % STEP == 0, "a thread's rows of a chunk are whole steps");
        const int r = threadIdx.x / PIECES, c = threadIdx.x % PIECES;
        const bool column = c * tile::PIECE < columns;
        if (chunks && page_size % ROWS == 0) {
            if (first != next) {
                const int entry = first / page_size;
                table = g->page_table + b * g->page_table_row + entry;
                slot = first - entry * page_size;
                page = first < rows ? *table : 0; /* page_table has no entry for rows past the end */
            }
            const char *const from = data + page * page_bytes + slot * row_bytes;
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++)
                copy(to, r + n * STEP, c, from + n * STEP * row_bytes, column && first + r + n * STEP < rows);
            next = first + ROWS;
            slot += ROWS;
            if (slot == page_size) {
                slot = 0;
                table++;
                if (next < rows) page = *table;
            }
            return;
        }
        if (chunks && ROWS % CHUNK == 0) {
            const char *chunk[ROWS / CHUNK < 1 ? 1 : ROWS / CHUNK];
            int entry = first / page_size, slot = first - entry * page_size, page = 0;
#pragma unroll
            for (int n = 0; n < ROWS / CHUNK; n++) {
                if (n == 0 || slot == 0) page = first + n * CHUNK < rows ? table[entry] : 0;
                chunk[n] = data + page * page_bytes + slot * row_bytes;
                slot += CHUNK;
                if (slot == page_size) slot = 0, entry++;
            }
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++)
                copy(to, r + n * STEP, c, chunk[n * STEP / CHUNK] + n * STEP % CHUNK * row_bytes,
                     column && first + r + n * STEP < rows);
            return;
        }
        if (pieces) {
#pragma unroll 1
            for (int n = 0; n < ROWS / STEP; n++) {
                const int line = first + r + n * STEP;
                /* page_table has no entry for rows past the sequence's end */
                const bool valid = column && line < rows;
                copy(to, r + n * STEP, c,
                     (const char *)view->data +
                         (valid ? attn_key_at(g, view, b, hk, line) + c * tile::PIECE : 0) * tile::BYTES,
                     valid);
            }
            return;
        }
#pragma unroll 1
        for (int n = threadIdx.x; n < ROWS * D; n += THREADS) {
            const int r = n / D, d = n % D;
            const bool valid = first + r < rows && d < columns;
            tile::put(to, r, d, view->dtype, view->data, valid ? attn_key_at(g, view, b, hk, first + r) + d : 0, valid);
        }
    }
};

template <typename T> constexpr int exponent_mask = 0x7f80;
template <> constexpr int exponent_mask<__half> = 0x7c00;
template <typename T> DEVICE bool not_finite(uint16_t x)
{
    return (x & 0x7fff) >= exponent_mask<T>;
}

/* The keys that each query of a sequence sees (causal, window, lengths), in 32 bits: query i sees keys max(0, i + lo)
 * to min(Sk, i + hi) - 1. */
struct limits {
    int lo, hi, Sk;
};

DEVICE limits limits_of(const attn_geometry &g, const attn_sequence &s)
{
    const int64_t far = INT64_C(1) << 30,
                  /* a window is clamped to fit in 32 bits, which changes no result for lengths up to 2^30 */
        align = attn_align(&g, &s);
    return limits{ (int)attn_clamp64(align - g.left, -far, far), (int)attn_clamp64(align + g.right + 1, -far, far),
                   (int)s.Sk };
}

/* Returns x, but the compiler does not see that the result is x. It therefore computes values that depend on x when
 * they are needed, and does not keep them in registers. */
DEVICE uint32_t kept(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* A block's query rows, found by row_place_of(). If all sequences have the same length, row_place_of() computes in 32
 * bits, because the block's first copies wait for the result, and takes `limit` (the keys that each query sees) from
 * limits_of_whole(). If lengths differ, row_place_of() calls tile_place_of(). */
struct row_place {
    int b, h, hk, i0, Sq;
    int64_t q_start, k_start;
    limits limit;
    bool exists;
};

ATTN_HD limits limits_of_whole(const attn_geometry &g)
{
    const int64_t far = INT64_C(1) << 30, align = g.top_left ? 0 : g.dims.Sk - g.dims.Sq;
    limits whole = { (int)attn_clamp64(align - g.left, -far, far), (int)attn_clamp64(align + g.right + 1, -far, far),
                     (int)g.dims.Sk };
    return whole;
}

DEVICE bool is_whole(const cuda_args &a)
{
    return !a.ends_of_queries && !a.ends_of_keys;
}

DEVICE int key_head(const cuda_args &a, int h)
{
    return a.g.group == 1 ? h : h / (int)a.g.group;
}

template <int rows> DEVICE row_place row_place_of(const cuda_args &a, const limits &whole, uint3 block)
{
    row_place place;
    place.b = (int)block.z;
    place.h = (int)block.y;
    place.hk = key_head(a, place.h);
    place.i0 = (a.first_tile + (int)(gridDim.x - 1 - block.x)) * rows;
    place.Sq = (int)a.g.dims.Sq;
    place.q_start = place.k_start = 0;
    place.limit = whole;
    place.exists = true;
    if (!is_whole(a)) {
        const tile_place found = tile_place_of<rows>(a, block.x);
        place.b = (int)found.x.b;
        place.i0 = found.i0;
        place.Sq = (int)found.x.s.Sq;
        place.q_start = found.x.s.q_start;
        place.k_start = found.x.s.k_start;
        place.limit = limits_of(a.g, found.x.s);
        place.exists = found.exists;
    }
    return place;
}

/* ---- Loading fragments (operands of mma.sync) from shared memory ----------------------------------------------------
 *
 * The address `tile` of a tile is a multiple of 1024 bytes. The tile's rows have D elements of 16 bits. A and B are
 * indexed as in C[m][n] += A[m][k] B[k][n].
 *
 * a_rows     loads A from the tile's rows m .. m + 15, elements k .. k + 15
 * a_columns  loads A from elements m .. m + 15 of the tile's rows k .. k + 15
 * b_rows     loads B for two products from the tile's rows n .. n + 15, elements k .. k + 15
 * b_columns  loads B for two products from elements n .. n + 15 of the tile's rows k .. k + 15
 *
 * Of b[4], the first two registers are B of the first product (n .. n + 7), the others B of the second (n + 8 ..
 * n + 15).
 *
 * A lane once computes the address of the 16 bytes that it loads for m = n = k = 0. For every other address, the offset
 * of the tile's row is added, and the offset in the row is combined by xor. Row offsets are multiples of eight rows,
 * which do not change the swizzle. */
template <int D> DEVICE uint32_t lane_down(int lane)
{
    return lane % 16 * (D * 2) + ((lane / 16) ^ (lane % 8)) * 16;
}
template <int D> DEVICE uint32_t lane_across(int lane)
{
    return (lane % 8 + lane / 16 * 8) * (D * 2) + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}

/* The functions below whose names end in _of take the lane's address, which is computed once: `down` with lane_down(),
 * `across` with lane_across(). `tile` is the tile's address. If an address in shared memory is already included in
 * `down` or `across`, `tile` is the tile's offset from this address. */
template <int D> DEVICE void a_rows_of(uint32_t (&a)[4], uint32_t down, uint32_t tile, int m, int k)
{
    ldmatrix_x4(a, (down ^ (k * 2)) + (tile + m * (D * 2)));
}
template <int D> DEVICE void b_rows_of(uint32_t (&b)[4], uint32_t across, uint32_t tile, int n, int k)
{
    ldmatrix_x4(b, (across ^ (k * 2)) + (tile + n * (D * 2)));
}
template <int D> DEVICE void a_columns_of(uint32_t (&a)[4], uint32_t across, uint32_t tile, int m, int k)
{
    ldmatrix_x4_trans(a, (across ^ (m * 2)) + (tile + k * (D * 2)));
}
template <int D> DEVICE void b_columns_of(uint32_t (&b)[4], uint32_t down, uint32_t tile, int n, int k)
{
    ldmatrix_x4_trans(b, (down ^ (n * 2)) + (tile + k * (D * 2)));
}

template <int D> DEVICE void a_rows(uint32_t (&a)[4], uint32_t tile, int m, int k, int lane)
{
    a_rows_of<D>(a, lane_down<D>(lane), tile, m, k);
}
template <int D> DEVICE void b_rows(uint32_t (&b)[4], uint32_t tile, int n, int k, int lane)
{
    b_rows_of<D>(b, lane_across<D>(lane), tile, n, k);
}
template <int D> DEVICE void a_columns(uint32_t (&a)[4], uint32_t tile, int m, int k, int lane)
{
    a_columns_of<D>(a, lane_across<D>(lane), tile, m, k);
}
template <int D> DEVICE void b_columns(uint32_t (&b)[4], uint32_t tile, int n, int k, int lane)
{
    b_columns_of<D>(b, lane_down<D>(lane), tile, n, k);
}

/* Loads an operand from a tile whose address may be any multiple of 16 bytes. */
template <int D> DEVICE void a_rows(uint32_t (&a)[4], const uint16_t *tile, int m, int k, int lane)
{
    ldmatrix_x4(a, smem_addr(tile + at<D>(m + lane % 16, k / 8 + lane / 16)));
}
template <int D> DEVICE void b_rows(uint32_t (&b)[4], const uint16_t *tile, int n, int k, int lane)
{
    ldmatrix_x4(b, smem_addr(tile + at<D>(n + lane % 8 + lane / 16 * 8, k / 8 + lane / 8 % 2)));
}
template <int D> DEVICE void a_columns(uint32_t (&a)[4], const uint16_t *tile, int m, int k, int lane)
{
    ldmatrix_x4_trans(a, smem_addr(tile + at<D>(k + lane % 8 + lane / 16 * 8, m / 8 + lane / 8 % 2)));
}
template <int D> DEVICE void b_columns(uint32_t (&b)[4], const uint16_t *tile, int n, int k, int lane)
{
    ldmatrix_x4_trans(b, smem_addr(tile + at<D>(k + lane % 8 + lane / 8 % 2 * 8, n / 8 + lane / 16)));
}

/* Computes C += A B for MT blocks of 16 rows and NT blocks of 8 columns, in KK steps of 16. load_a and load_b load a
 * step's operands while the previous products are computed. */
template <typename T, int KK, int MT, int NT, typename A, typename B>
DEVICE void product(float (&c)[MT][NT][4], A load_a, B load_b)
{
    uint32_t a[2][MT][4], b[2][NT / 2][4];
    load_a(a[0], 0);
    load_b(b[0], 0);
#pragma unroll
    for (int kk = 0; kk < KK; kk++) {
        if (kk + 1 < KK) {
            load_a(a[(kk + 1) % 2], kk + 1);
            load_b(b[(kk + 1) % 2], kk + 1);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
                mma<T>(c[mt][nt], a[kk % 2][mt], b[kk % 2][nt / 2][nt % 2 * 2], b[kk % 2][nt / 2][nt % 2 * 2 + 1]);
    }
}

/* ---- Storing results ------------------------------------------------------------------------------------------------
 *
 * Rows of a result pass through shared memory, so that a warp writes whole pieces of 16 bytes. If a result cannot be
 * written in such pieces (because of its dtype or its strides), its rows lie in shared memory as D floats each. The
 * floats are then written one by one in a loop that is not unrolled, because unrolled code would not fit in the
 * instruction caches. */
template <typename T> constexpr attn_dtype dtype_of = ATTN_BF16;
template <> constexpr attn_dtype dtype_of<__half> = ATTN_F16;

/* Returns whether rows of `width` elements, from row `line` on, can be written 16 bytes at a time. */
template <typename T> DEVICE bool in_pieces(const attn_view &view, int64_t b, int64_t h, int64_t line, int64_t width)
{
    return view.dtype == dtype_of<T> && width % 8 == 0 && view.row % 8 == 0 &&
           ((uint64_t)view.data + 2 * attn_at(&view, b, h, line)) % 16 == 0;
}

/* Stores elements d and d + 1 (d is even) of row r in shared memory. If `pieces` is true they are stored as T,
 * otherwise as floats. */
template <typename T, int D> DEVICE void stage_pair(void *staged, bool pieces, int r, int d, float low, float high)
{
    if (pieces) *(uint32_t *)((uint16_t *)staged + at<D>(r, d / 8) + d % 8) = pack<T>(low, high);
    else *(float2 *)((float *)staged + r * D + d) = make_float2(low, high);
}

/* Writes `count` rows of `staged` (shared memory), from row `first` on: row r becomes row `line` + r of the tensor.
 * THREADS threads call it; `thread` is the caller's number. */
template <int D, int THREADS>
DEVICE void store_rows(const attn_view &view, int64_t b, int64_t h, int64_t line, int first, int count, int width,
                       const void *staged, bool pieces, int thread)
{
    const int64_t to = attn_at(&view, b, h, line);
    if (pieces) {
#pragma unroll 4
        for (int n = thread; n < count * (D / 8); n += THREADS) {
            const int r = first + n / (D / 8), c = n % (D / 8);
            if (c * 8 < width)
                *(uint4 *)((uint16_t *)view.data + to + r * view.row +
                           c * 8) = *(const uint4 *)((const uint16_t *)staged + at<D>(r, c));
        }
        return;
    }
#pragma unroll 1
    for (int n = thread; n < count * D; n += THREADS) {
        const int r = first + n / D, d = n % D;
        if (d < width) store_float(view.dtype, view.data, to + r * view.row + d, ((const float *)staged)[r * D + d]);
    }
}

#endif
