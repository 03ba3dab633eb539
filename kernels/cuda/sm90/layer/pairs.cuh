/* pairs.cuh: the options that have a value for each pair of a query and a key: bias, keep_mask and dropout.
 *
 *   keep_mask   A kernel first turns the mask's bytes into bits, and finds hidden tiles, which are neither loaded nor
 *               multiplied.
 *   bias        A warp reads the bias from its tensor into registers, one tile ahead.
 *   dropout     A lane draws random bits in registers (philox.h), one draw for eight keys of a row. The four lanes that
 *               share two rows make a quarter of the draws each, and then exchange the bits.
 *
 * A thread's scores of a tile of N keys are in the order of wgmma's results (ptx.cuh): register n * 4 + half * 2 + e is
 * row i0 + half * 8, column n * 8 + lane % 4 * 2 + e. */
#ifndef ATTN_SM90_PAIRS_CUH
#define ATTN_SM90_PAIRS_CUH

#include "kernels/cuda/common/rows.cuh"
#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/softmax.cuh"

/* ---- The softmax of rows whose scores may be huge ---------------------------------------------------------------- */

/* The choice of a row's reference (the number that is subtracted from its scores before exp2) where a bias may make
 * scores huge, such as -3.4e38. Scores are converted to base 2 unless the reference is huge. With a huge reference, P
 * is 1 for the largest score and 0 for all others, in any base. */
struct exact_reference {
    float c, slack;
    DEVICE float factor(float m) const { return fabsf(m) * c < SCORE_MOST ? c : 1; }
    DEVICE float advance(float m, float top) const { return top <= m + slack ? m : top; }
    DEVICE float least(float m) const { return m + slack; }
    DEVICE float base(float m) const { return __fmul_rn(m, factor(m)); }
    DEVICE float change(float m, float b, float f) const { return __fsub_rn(__fmul_rn(m, f), b); }
};

/* end_rows() gets an object of this type in place of a reference (see softmax.cuh). base() converts a row's largest
 * score, which is m * unit, to base 2, as in_base_2() does. */
struct largest_in_base_2 {
    float unit;
    DEVICE float base(float m) const
    {
        return m == -CUDART_INF_F ? m : in_base_2(fmaxf(fminf(m * unit, FLT_MAX), -FLT_MAX));
    }
};

/* ---- keep_mask as bits, row by row ------------------------------------------------------------------------------- */

/* A keep_mask as bits. Each row (query) has four words per tile of keys; bit n of word e belongs to key 4 n + e of the
 * tile, and is 1 if the key is kept or does not exist. `kinds` has one byte (bits of tile_kind) for each block of 64
 * rows by one tile of keys. */
struct kept_bits {
    const uint4 *words; /* NULL: the problem has no keep_mask */
    const uint8_t *kinds;
    /* The words of batch row b, head h and query i begin at index (b * batch + h * head + i * row) * tiles. `batch` is
     * 0 if all batch rows have the same bits; `head` and `row` are 0 if all heads or all queries have the same bits. */
    int64_t batch, head, row;
    /* rows: number of rows per head (1: the mask is the same for all rows); tiles: number of tiles of keys */
    int rows, tiles;
};
enum tile_kind { SOME_SEEN = 1, SOME_HIDDEN = 2 };
const int KIND_ROWS = 64;

static inline int64_t kept_rows_of(const attn_geometry &g, bool batch, bool head, bool row)
{
    return (batch ? g.dims.B : 1) * (head ? g.dims.H : 1) * (row ? g.dims.Sq : 1);
}

/* Plans keep_mask's bits for tiles of BN keys. Returns the bytes of scratch memory that they take. `memory` may be NULL
 * if the caller only needs the size. */
static inline int64_t plan_kept_bits(const attn_geometry &g, bool given, int BN, void *memory, kept_bits &x)
{
    const attn_view &keep = g.view[ATTN_T_keep_mask];
    const bool batch = keep.batch || (g.keep_tail >= 0 && g.seqlens_k), head = keep.head, row = keep.row;
    x = {};
    if (!given) return 0;
    x.tiles = (int)attn_tiles(g.dims.Sk, BN);
    x.rows = row ? (int)g.dims.Sq : 1;
    x.row = row, x.head = head ? x.rows : 0, x.batch = batch ? (head ? g.dims.H : 1) * x.rows : 0;
    const int64_t words = kept_rows_of(g, batch, head, row) * x.tiles * (int64_t)sizeof(uint4),
                  kinds = (batch ? g.dims.B : 1) * (head ? g.dims.H : 1) * attn_tiles(x.rows, KIND_ROWS) * x.tiles;
    x.words = (const uint4 *)memory;
    x.kinds = (const uint8_t *)memory + words;
    return (words + kinds + 127) / 128 * 128;
}

/* Returns the tile_kind of a tile of keys for rows i to i + KIND_ROWS - 1. i must be a multiple of KIND_ROWS. */
DEVICE uint8_t kind_of(const kept_bits &kept, int b, int h, int i, int tile)
{
    const int64_t head = (b * kept.batch + h * kept.head) / kept.rows, blocks = attn_tiles(kept.rows, KIND_ROWS);
    return kept.kinds[(head * blocks + (kept.row ? i / KIND_ROWS : 0)) * kept.tiles + tile];
}

/* Returns keep_mask's bits of this lane's columns, for row i and a tile of keys. Of the columns 8 n to 8 n + 7 the lane
 * has two neighbouring ones. Bit 2 n + lane % 4 / 2 of x belongs to the left column, and the same bit of y to the right
 * column. */
DEVICE uint2 kept_words(const kept_bits &kept, int b, int h, int i, int tile, int lane)
{
    const uint4 *const at = kept.words + (b * kept.batch + h * kept.head + i * kept.row) * kept.tiles + tile;
    return __ldg((const uint2 *)at + lane % 2);
}

/* Lists the tiles of keys that FlashMask and keep_mask let rows [begin, end) see. `begin` must be a multiple of
 * KIND_ROWS. All lanes of the warp must call this. */
DEVICE void list_visible_tiles(const flash_mask &mask, const kept_bits &kept, int b, int h, int H, int begin, int end,
                               key_tiles &tiles, tile_bits &seen)
{
    const attn_mask_extremes *const extremes = mask.bounds ? extremes_of(mask, b, h, H) : nullptr;
    list_tiles(tiles, seen, [&](int j) {
        attn_tile_kind kind = extremes ? attn_mask_classify(&extremes[j], begin, end) : ATTN_TILE_FREE;
        if (kept.words && kind != ATTN_TILE_HIDDEN) {
            int some = 0;
            for (int i = begin; i < end; i += KIND_ROWS) some |= kind_of(kept, b, h, i, j);
            if (!(some & SOME_SEEN)) kind = ATTN_TILE_HIDDEN;
            else if (some & SOME_HIDDEN) kind = ATTN_TILE_PARTIAL;
        }
        return kind;
    });
}

/* Sets the scores of pairs that keep_mask hides to -inf. words[r]: the kept_words() of the thread's row r (0 or 1). */
template <int N> DEVICE void hide_by_words(float (&S)[N / 2], const uint2 (&words)[2], int lane)
{
    const int place = lane % 4 / 2;
    const uint2 mine[2] = { { words[0].x >> place, words[0].y >> place },
                            { words[1].x >> place, words[1].y >> place } };
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const uint32_t word = i % 2 ? mine[i / 2 % 2].y : mine[i / 2 % 2].x;
        if (!(word >> (i / 4 * 2) & 1)) S[i] = -CUDART_INF_F;
    }
}

/* Converts a keep_mask to bits. A block has KIND_ROWS rows; a lane reads the bytes of four keys of a row at a time. */
template <int BN>
__global__ void __launch_bounds__(128)
    keep_bits(const __grid_constant__ attn_geometry g, const __grid_constant__ kept_bits kept, int heads)
{
    static_assert(BN <= 128 && BN % 4 == 0, "a lane has four keys");
    const int ROWS = KIND_ROWS / 4, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int b = blockIdx.z / heads, h = blockIdx.z % heads, i0 = blockIdx.y * KIND_ROWS + warp * ROWS;
    const attn_view &keep = g.view[ATTN_T_keep_mask];
    const attn_sequence s = attn_sequence_of(&g, b);
    const int Sk = (int)s.Sk, from = (int)attn_keep_from(&g, &s);
    const uint8_t *const first = (const uint8_t *)keep.data + attn_at(&keep, b, h, i0);
    const bool in_words = (((uintptr_t)first | (uintptr_t)keep.row | (uint32_t)from) & 3) == 0;
    const int64_t row = ((int64_t)blockIdx.z * kept.rows + i0) * kept.tiles;
    for (int tile = blockIdx.x; tile < kept.tiles; tile += gridDim.x) {
        const int j = tile * BN + lane * 4;
        const bool mine = lane * 4 < BN && j < Sk;
        /* a word per row; the loads of all rows start before the result of the first load is used */
        uint32_t bytes[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            bytes[r] = 0x01010101;
            if (!mine || i0 + r >= kept.rows) continue;
            const uint8_t *const at = first + r * keep.row - from;
            if (in_words && j >= from && j + 4 <= Sk) bytes[r] = __ldg((const uint32_t *)(at + j));
            else
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j + e >= from && j + e < Sk && !at[j + e]) bytes[r] &= ~(0xffu << e * 8);
        }
        uint32_t some = 0, every = 0x01010101;
        uint4 words = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (mine && i0 + r < kept.rows) some |= bytes[r], every &= bytes[r];
            const uint4 all = { __ballot_sync(0xffffffff, bytes[r] & 1), __ballot_sync(0xffffffff, bytes[r] >> 8 & 1),
                                __ballot_sync(0xffffffff, bytes[r] >> 16 & 1),
                                __ballot_sync(0xffffffff, bytes[r] >> 24 & 1) };
            if (lane == r) words = all;
        }
        if (lane < ROWS && i0 + lane < kept.rows)
            ((uint4 *)kept.words)[row + (int64_t)lane * kept.tiles + tile] = words;
        const bool seen = __syncthreads_or(some), hidden = __syncthreads_or(every != 0x01010101);
        if (threadIdx.x == 0)
            ((uint8_t *)kept.kinds)[((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * kept.tiles + tile] =
                (uint8_t)((seen ? SOME_SEEN : 0) | (hidden ? SOME_HIDDEN : 0));
    }
}

template <int BN> cudaError_t make_kept_bits(const attn_geometry &g, const kept_bits &kept, cudaStream_t stream)
{
    if (!kept.words) return cudaSuccess;
    const int heads = kept.head ? (int)g.dims.H : 1, batch = kept.batch ? (int)g.dims.B : 1;
    const dim3 grid(kept.tiles, (unsigned)attn_tiles(kept.rows, KIND_ROWS), (unsigned)(heads * batch));
    keep_bits<BN><<<grid, 128, 0, stream>>>(g, kept, heads);
    return cudaPeekAtLastError();
}

/* ---- keep_mask as bits, key by key ------------------------------------------------------------------------------- */

/* A keep_mask as bits by key. Each key has two words per COLUMN_QUERIES queries: bit n of the first is query 2 n, bit n
 * of the second is query 2 n + 1. Bits are also 1 for queries and keys that do not exist. `kinds` has one byte (bits of
 * tile_kind) for each block of KIND_KEYS keys by COLUMN_QUERIES queries. */
const int COLUMN_QUERIES = 64, KIND_KEYS = 128;
struct kept_columns {
    const uint2 *words; /* NULL: the problem has no keep_mask */
    const uint8_t *kinds;
    /* The words of batch row b and head h begin at index (b * batch + h * head) * keys * tiles. `batch` is 0 if all
     * batch rows have the same bits, and `head` is 0 if all heads do. */
    int64_t batch, head;
    /* keys: number of keys per head; tiles: number of tiles of queries per head (1: the mask is the same for all
     * queries) */
    int keys, tiles;
};

/* Plans keep_mask's bits ordered by key. Returns the bytes of scratch memory that they take. `memory` may be NULL if
 * the caller only needs the size. */
static inline int64_t plan_kept_columns(const attn_geometry &g, bool given, void *memory, kept_columns &x)
{
    const attn_view &keep = g.view[ATTN_T_keep_mask];
    const bool batch = keep.batch || (g.keep_tail >= 0 && g.seqlens_k);
    x = {};
    if (!given) return 0;
    x.keys = (int)g.dims.Sk;
    x.tiles = keep.row ? (int)attn_tiles(g.dims.Sq, COLUMN_QUERIES) : 1;
    x.head = keep.head ? 1 : 0, x.batch = batch ? (keep.head ? g.dims.H : 1) : 0;
    const int64_t heads = (batch ? g.dims.B : 1) * (keep.head ? g.dims.H : 1),
                  words = heads * x.keys * x.tiles * (int64_t)sizeof(uint2),
                  kinds = heads * attn_tiles(x.keys, KIND_KEYS) * x.tiles;
    x.words = (const uint2 *)memory;
    x.kinds = (const uint8_t *)memory + words;
    return (words + kinds + 127) / 128 * 128;
}

DEVICE const uint2 *column_words(const kept_columns &kept, int b, int h, int j, int tile)
{
    return kept.words + ((b * kept.batch + h * kept.head) * kept.keys + j) * kept.tiles + (kept.tiles > 1 ? tile : 0);
}

/* Returns the OR of the tile_kinds of keys [j0, j0 + KIND_KEYS) with `count` tiles of queries, from tile number `tile`
 * on. j0 must be a multiple of KIND_KEYS. */
DEVICE int kinds_of(const kept_columns &kept, int b, int h, int j0, int tile, int count)
{
    const int64_t head = b * kept.batch + h * kept.head, blocks = attn_tiles(kept.keys, KIND_KEYS);
    const uint8_t *const kinds = kept.kinds + (head * blocks + j0 / KIND_KEYS) * kept.tiles;
    int some = 0;
    for (int n = 0; n < count; n++) some |= __ldg(kinds + min(tile + n, kept.tiles - 1));
    return some;
}

/* Returns byte k of each of the four words, as one word. */
DEVICE uint32_t column_of(const uint32_t (&rows)[4], int k)
{
    const uint32_t low = __byte_perm(rows[0], rows[1], k | (4 + k) << 4),
                   high = __byte_perm(rows[2], rows[3], k | (4 + k) << 4);
    return __byte_perm(low, high, 0x5410);
}

namespace {

/* Converts a keep_mask to bits, ordered by key. The mask's bytes (0 or 1) of eight rows are added up, and the n-th of
 * these rows is shifted left by n bits first. Each byte of the sum then has the eight bits of one key. */
__global__ void __launch_bounds__(128)
    keep_columns(const __grid_constant__ attn_geometry g, const __grid_constant__ kept_columns kept, int heads)
{
    const uint32_t ALL = 0x01010101;
    const int lane = threadIdx.x % 32, tile = blockIdx.x * 4 + threadIdx.x / 32;
    const int b = blockIdx.z / heads, h = blockIdx.z % heads, j = blockIdx.y * KIND_KEYS + lane * 4;
    if (tile >= kept.tiles) return;
    const attn_view &keep = g.view[ATTN_T_keep_mask];
    const attn_sequence s = attn_sequence_of(&g, b);
    const int Sk = (int)s.Sk, from = (int)attn_keep_from(&g, &s), i0 = tile * COLUMN_QUERIES;
    const int count = min((keep.row ? (int)g.dims.Sq : 1) - i0, COLUMN_QUERIES);
    const uint8_t *const first = (const uint8_t *)keep.data + attn_at(&keep, b, h, i0) - from;
    const bool in_words = (((uintptr_t)(first + j) | (uintptr_t)keep.row) & 3) == 0 && j >= from && j + 4 <= Sk;
    uint32_t even[4], odd[4], some = 0, every = ALL;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t bytes[16];
#pragma unroll
        for (int n = 0; n < 16; n++) {
            bytes[n] = ALL;
            if (k * 16 + n >= count || j >= Sk) continue;
            const uint8_t *const at = first + (k * 16 + n) * keep.row;
            if (in_words) bytes[n] = __ldg((const uint32_t *)(at + j));
            else
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j + e >= from && j + e < Sk && !at[j + e]) bytes[n] &= ~(0xffu << e * 8);
        }
        even[k] = odd[k] = 0;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            (n % 2 ? odd : even)[k] += bytes[n] << n / 2;
            if (k * 16 + n < count && j < Sk) some |= bytes[n], every &= bytes[n];
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        uint2 words = { column_of(even, e), column_of(odd, e) };
        /* The mask has one row for all queries: copy that row's bit to all queries of the words. */
        if (!keep.row) words.x = words.y = words.x & 1 ? ~0u : 0;
        if (j + e < kept.keys)
            ((uint2 *)kept.words)[((int64_t)blockIdx.z * kept.keys + j + e) * kept.tiles + tile] = words;
    }
    const bool seen = __any_sync(0xffffffff, some), hidden = __any_sync(0xffffffff, every != ALL);
    if (lane == 0)
        ((uint8_t *)kept.kinds)[((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * kept.tiles + tile] =
            (uint8_t)((seen ? SOME_SEEN : 0) | (hidden ? SOME_HIDDEN : 0));
}

} // namespace

static inline cudaError_t make_kept_columns(const attn_geometry &g, const kept_columns &kept, cudaStream_t stream)
{
    if (!kept.words) return cudaSuccess;
    const int heads = kept.head ? (int)g.dims.H : 1, batch = kept.batch ? (int)g.dims.B : 1;
    const dim3 grid((unsigned)attn_tiles(kept.tiles, 4), (unsigned)attn_tiles(kept.keys, KIND_KEYS),
                    (unsigned)(heads * batch));
    keep_columns<<<grid, 128, 0, stream>>>(g, kept, heads);
    return cudaPeekAtLastError();
}

/* ---- Loading a bias, and adding it to scores --------------------------------------------------------------------- */

struct pair_bias {
    const char *data;         /* NULL: the problem has no bias */
    int64_t batch, head, row; /* strides in bytes; 0: the axis is broadcast */
    int columns;
    attn_dtype dtype;
    bool in_pairs; /* whether columns 2 n and 2 n + 1 can be loaded by one instruction */
};

static inline pair_bias pair_bias_of(const attn_geometry &g)
{
    const attn_view &bias = g.view[ATTN_T_bias];
    const int64_t bytes = bias.dtype == ATTN_F32 ? 4 : 2;
    pair_bias x;
    x.data = (const char *)bias.data;
    x.batch = bias.batch * bytes, x.head = bias.head * bytes, x.row = bias.row * bytes;
    x.columns = (int)g.dims.Sk;
    x.dtype = bias.dtype;
    x.in_pairs = (((uint64_t)(uintptr_t)bias.data | x.batch | x.head | x.row) & (2 * bytes - 1)) == 0;
    return x;
}

/* Loads the bias of the thread's two rows and N keys from j0 on into `raw`, in the order of the scores. Two 16-bit
 * numbers share a register. rows[r] is the address of the bias of the thread's row r, at column lane % 4 * 2. */
template <int N>
DEVICE void load_bias(uint32_t (&raw)[N / 2], const pair_bias &bias, const char *const (&rows)[2], int j0, int lane)
{
    const bool wide = bias.dtype == ATTN_F32;
    if (bias.in_pairs && j0 + N <= bias.columns) {
        if (wide)
#pragma unroll
            for (int n = 0; n < N / 4; n++) {
                const uint2 pair = __ldg((const uint2 *)(rows[n % 2] + j0 * 4ll) + n / 2 * 4);
                raw[n * 2] = pair.x, raw[n * 2 + 1] = pair.y;
            }
        else
#pragma unroll
            for (int n = 0; n < N / 4; n++) raw[n] = __ldg((const uint32_t *)(rows[n % 2] + j0 * 2ll) + n / 2 * 4);
    } else {
        /* number of columns of the bias from this lane's first column on */
        const int left = bias.columns - j0 - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N / 4; n++) {
            const int c = n / 2 * 8;
            if (wide) {
                const uint32_t *const at = (const uint32_t *)(rows[n % 2] + j0 * 4ll) + c;
                raw[n * 2] = c < left ? at[0] : 0, raw[n * 2 + 1] = c + 1 < left ? at[1] : 0;
            } else {
                const uint16_t *const at = (const uint16_t *)(rows[n % 2] + j0 * 2ll) + c;
                raw[n] = c < left ? at[0] : 0;
                if (c + 1 < left) raw[n] |= (uint32_t)at[1] << 16;
            }
        }
    }
}

template <int N> DEVICE void add_bias(float (&S)[N / 2], const uint32_t (&raw)[N / 2], attn_dtype dtype, float unit)
{
    if (dtype == ATTN_F32) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) S[i] = fmaf(S[i], unit, __uint_as_float(raw[i]));
    } else {
        const bool half = dtype == ATTN_F16;
#pragma unroll
        for (int n = 0; n < N / 4; n++) {
            const float2 pair = half ? unpack<__half>(raw[n]) : unpack<__nv_bfloat16>(raw[n]);
            S[n * 2] = fmaf(S[n * 2], unit, pair.x), S[n * 2 + 1] = fmaf(S[n * 2 + 1], unit, pair.y);
        }
    }
}

/* ---- Which pairs dropout keeps ----------------------------------------------------------------------------------- */

struct pair_dropout {
    /* a pair is kept if its word exceeds this number; the upper half of the word is the pair's 16 random bits */
    uint32_t most;
    float scale; /* factor of the pairs that dropout keeps: 1 / (1 - dropout_p) */
    bool drops;
    uint32_t keys[20];    /* two key words for each of the 10 rounds of Philox4x32-10 */
    int64_t first, batch; /* head h of batch row b has number first + b * batch + h in the random generator's counter */
};

static inline pair_dropout pair_dropout_of(const cuda_args &a)
{
    pair_dropout x;
    x.drops = a.drop_below != 0;
    x.most = (a.drop_below << 16) - 1; /* drop_below = 65536 gives 2^32 - 1: all pairs are dropped */
    x.scale = x.drops ? a.drop_scale : 1;
    for (uint32_t n = 0; n < 10; n++) {
        x.keys[n * 2] = (uint32_t)a.seed + n * 0x9e3779b9u;
        x.keys[n * 2 + 1] = (uint32_t)(a.seed >> 32) + n * 0xbb67ae85u;
    }
    x.first = a.drop_first, x.batch = a.drop_batch;
    return x;
}

/* Returns 8 bits for row i, one for each key from 8 * eighth on; 1: dropout keeps the pair. The bits equal those of
 * kept_of() in sm80/scores.cuh. */
DEVICE uint32_t kept_of_eight(const pair_dropout &x, uint32_t head, uint32_t i, uint32_t eighth)
{
    uint32_t c[4] = { eighth, i, head, 0 };
#pragma unroll
    for (int n = 0; n < 10; n++) {
        const uint64_t p0 = (uint64_t)0xd2511f53u * c[0], p1 = (uint64_t)0xcd9e8d57u * c[2];
        c[0] = (uint32_t)(p1 >> 32) ^ c[1] ^ x.keys[n * 2];
        c[2] = (uint32_t)(p0 >> 32) ^ c[3] ^ x.keys[n * 2 + 1];
        c[1] = (uint32_t)p1, c[3] = (uint32_t)p0;
    }
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < 8; e++)
        if ((e % 2 ? c[e / 2] : c[e / 2] << 16) > x.most) bits |= 1u << e;
    return bits;
}

/* Computes this lane's random bits for rows i0 and i0 + 8 and N keys from j0 on. Byte n of a row's word is for keys 8 x
 * to 8 x + 7 of the tile, where x = n * 4 + lane % 4. */
template <int N> DEVICE void draw(uint32_t (&mine)[2], const pair_dropout &x, uint32_t head, int i0, int j0, int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mine[half] = 0;
#pragma unroll
        for (int n = 0; n < (N + 31) / 32; n++)
            mine[half] |= kept_of_eight(x, head, i0 + half * 8, j0 / 8 + n * 4 + lane % 4) << n * 8;
    }
}

/* Sets P to 0 for each pair that the random bits drop. All lanes of the warp must call this. */
template <int N> DEVICE void drop(float (&P)[N / 2], const uint32_t (&mine)[2], int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const uint32_t word = __shfl_sync(0xffffffff, mine[half], lane / 4 * 4 + q) >> lane % 4 * 2;
#pragma unroll
            for (int n = q; n < N / 8; n += 4)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (!(word >> (n / 4 * 8 + e) & 1)) P[n * 4 + half * 2 + e] = 0;
        }
}

#endif
