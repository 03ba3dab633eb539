/* args.cuh: the arguments of all kernels (a problem's tensors, sizes and options), and the score of one (query, key)
 * pair with every option.
 *
 * kernels/README.md defines the score. Every kernel that computes scores one by one calls these functions, so all
 * kernels compute the same scores. */
#ifndef ATTN_CUDA_ARGS_CUH
#define ATTN_CUDA_ARGS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <math_constants.h>

#include "kernels/cuda/common/kernels.h"
#include "kernels/philox.h"
#include "kernels/score.h"
#include "kernels/tiles.h"

#define DEVICE __device__ __forceinline__

/* The element type of the kernels that launchers start for float16. With CUDA_QUICK=1, make compiles Hopper's kernels
 * for bfloat16 alone, which takes half the time; device_open() then fails, so that nobody computes with them. */
#ifdef ATTN_CUDA_QUICK
typedef __nv_bfloat16 compiled_half;
const bool QUICK_BUILD = true;
#else
typedef __half compiled_half;
const bool QUICK_BUILD = false;
#endif

/* Returns the block's dynamic shared memory as a struct S, which each kernel defines. */
template <class S> DEVICE S &block_memory()
{
    extern __shared__ __align__(1024) char memory[];
    return *reinterpret_cast<S *>(memory);
}

const float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct cuda_args {
    attn_geometry g;
    uint64_t seed;
    /* dropout drops a (query, key) pair whose 16 random bits are below this number; 0: no dropout */
    uint32_t drop_below;
    float drop_scale; /* 1 / (1 - dropout_p): the factor of P for a pair that dropout keeps */
    /* dropout's random generator uses the number drop_first + b * drop_batch + h for head h of batch row b */
    int64_t drop_first, drop_batch;
    /* Strides of lse and delta. The element for query i of sequence b and head h has the index b * lse_batch + h *
     * lse_head + q_start + i. */
    int64_t lse_batch, lse_head;
    /* index of the first tile that this launch computes in each head */
    int first_tile;
    /* whether sequences may have fewer queries (or keys) than their tensor has rows (packed problem, or seqlens) */
    bool ends_of_queries, ends_of_keys;
    /* kernels skip packed sequences of at most this many rows (queries * heads of a group), because decode.cu computes
     * them */
    int decode_rows;
    /* rows_later has a byte for each row of lse, keys_later one for each row of dk. A byte that is not 0 says that a
     * kernel could not compute the row, and that a later launch (simple/simple.cu) must compute it. *rows_found becomes
     * 1 if there is such a row. The pointers are NULL if the kernel computes such rows itself, as in short problems. */
    uint8_t *rows_later, *keys_later, *rows_found;
    /* A backward keeps the lse of rows with huge scores as two floats (lse and rest of struct saved in rows.cuh). To
     * compute them, it starts a forward with the addresses of the two arrays here, and this forward writes nothing
     * else. In other launches both pointers are NULL. */
    float *part_lse, *part_rest;
};

static inline cuda_args cuda_args_of(const cuda_chip *chip, const attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    cuda_args a;
    a.g = plan->geometry;
    a.seed = p->seed;
    a.drop_below = attn_dropout_threshold(p->dropout_p);
    a.drop_scale = (float)(1 / (1 - p->dropout_p));
    a.drop_batch = p->dropout_heads ? p->dropout_heads : a.g.dims.H;
    a.drop_first = p->dropout_first;
    a.lse_head = a.g.dims.Sq;
    a.lse_batch = a.g.dims.packed ? 0 : a.g.dims.H * a.g.dims.Sq;
    a.ends_of_queries = a.g.dims.packed || a.g.seqlens_q;
    a.ends_of_keys = a.g.dims.packed || a.g.seqlens_k;
    a.first_tile = a.decode_rows = 0;
    a.rows_later = chip->rows_later, a.keys_later = chip->keys_later, a.rows_found = chip->rows_found;
    a.part_lse = a.part_rest = nullptr;
    return a;
}

/* query_rows() returns the number of rows of lse (queries of all heads), and key_rows() the number of rows of dk (keys
 * of all key/value heads). */
static inline int64_t query_rows(const attn_dims &d)
{
    return d.Sq * d.H * (d.packed ? 1 : d.B);
}
static inline int64_t key_rows(const attn_dims &d)
{
    return d.Sk * d.Hk * (d.packed ? 1 : d.B);
}

/* Estimates the number of keys that a query sees. For packed sequences the function assumes equal lengths, because the
 * true lengths are in device memory. */
static inline int64_t keys_of_row(const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    const int64_t keys = attn_keys_are_packed(&d) ? attn_tiles(d.Sk, attn_max64(d.B, 1)) : d.Sk,
                  window = attn_min64(g.left, ATTN_UNBOUNDED) + attn_min64(g.right, ATTN_UNBOUNDED) + 1;
    return attn_max64(attn_min64(keys, window), 1);
}

DEVICE float load_float(attn_dtype dtype, const void *data, int64_t index)
{
    switch (dtype) {
    case ATTN_F32: return ((const float *)data)[index];
    case ATTN_F16: return attn_f16_to_f32(((const uint16_t *)data)[index]);
    case ATTN_BF16: return attn_bf16_to_f32(((const uint16_t *)data)[index]);
    case ATTN_F8E4M3: return attn_e4m3_to_f32(((const uint8_t *)data)[index]);
    default: return 0;
    }
}

DEVICE void store_float(attn_dtype dtype, void *data, int64_t index, float x)
{
    switch (dtype) {
    case ATTN_F32: ((float *)data)[index] = x; break;
    case ATTN_F16: ((uint16_t *)data)[index] = attn_f16_from_f32(x); break;
    case ATTN_BF16: ((uint16_t *)data)[index] = attn_bf16_from_f32(x); break;
    default: break;
    }
}

struct head_args {
    int64_t b, h, hk; /* b: sequence or batch row; h: query head; hk: the key/value head of h */
    attn_sequence s;
    float scale; /* the score is q.k times this factor, which includes the scales of float8 tensors */
    attn_score_options options;
    float slope; /* the head's ALiBi slope; 0 without ALiBi */
    float v_scale;
};

DEVICE float scale_of(const attn_view &view, int64_t b, int64_t hk)
{
    return view.data ? ((const float *)view.data)[attn_at(&view, b, hk, 0)] : 1.0f;
}

DEVICE head_args head_args_of(const cuda_args &a, int64_t b, int64_t h)
{
    const attn_geometry &g = a.g;
    head_args x;
    x.b = b;
    x.h = h;
    x.hk = (int)h / (int)g.group;
    x.s = attn_sequence_of(&g, b);
    x.scale = (float)g.scale * scale_of(g.view[ATTN_T_q_scale], b, x.hk) * scale_of(g.view[ATTN_T_k_scale], b, x.hk);
    x.options = attn_score_options_of(&g);
    x.slope = 0;
    if (g.view[ATTN_T_alibi_slopes].data)
        x.slope = ((const float *)g.view[ATTN_T_alibi_slopes].data)[attn_at(&g.view[ATTN_T_alibi_slopes], b, h, 0)];
    x.v_scale = scale_of(g.view[ATTN_T_v_scale], b, x.hk);
    return x;
}

/* Returns whether keep_mask, FlashMask and bias let query i see key j; a bias of -inf hides the key. */
DEVICE bool visible_by_mask(const cuda_args &a, const head_args &x, int64_t i, int64_t j)
{
    const attn_geometry &g = a.g;
    const attn_view &keep = g.view[ATTN_T_keep_mask], &rows = g.view[ATTN_T_mask_startend_rows],
                    &bias = g.view[ATTN_T_bias];
    if (bias.data && load_float(bias.dtype, bias.data, attn_at(&bias, x.b, x.h, i) + j) == -CUDART_INF_F) return false;
    if (keep.data) {
        const int64_t column = j - attn_keep_from(&g, &x.s);
        if (column >= 0 && !((const uint8_t *)keep.data)[attn_at(&keep, x.b, x.h, i) + column]) return false;
    }
    if (rows.data) {
        const int32_t *bounds = (const int32_t *)rows.data + attn_at(&rows, x.b, x.h / g.mask_group, j);
        if (attn_mask_hides(attn_mask_of(bounds, g.mask_bounds, g.causal, x.s.Sq), i)) return false;
    }
    return true;
}

DEVICE bool visible(const cuda_args &a, const head_args &x, int64_t i, int64_t j)
{
    const attn_range keys = attn_keys_of(&a.g, &x.s, i);
    return j >= keys.lo && j < keys.hi && visible_by_mask(a, x, i, j);
}

/* Clamps z to the range of finite float32; a NaN stays NaN. */
template <typename real> DEVICE float saturated(real z)
{
    return z > FLT_MAX ? FLT_MAX : z < -FLT_MAX ? -FLT_MAX : (float)z;
}

/* Adds the terms of bias and ALiBi to the score z of the pair (i, j). */
template <typename real> DEVICE real with_bias(const cuda_args &a, const head_args &x, int64_t i, int64_t j, real z)
{
    const attn_view &bias = a.g.view[ATTN_T_bias];
    if (bias.data) z += load_float(bias.dtype, bias.data, attn_at(&bias, x.b, x.h, i) + j);
    if (x.slope != 0) {
        const int64_t distance = i + x.s.Sk - x.s.Sq - j;
        z -= (real)x.slope * (real)(distance < 0 ? -distance : distance);
    }
    return z;
}

/* Returns the score z of a visible pair from its q.k, or NaN if q.k overflows float32 (rows.cuh then calls
 * score_in_double()). *derivative becomes dz / d(scale q.k). */
DEVICE float score(const cuda_args &a, const head_args &x, int64_t i, int64_t j, float dot, float *derivative)
{
    float z = attn_score_of(&x.options, &x.s, i, j, x.scale * dot, derivative);
    z = saturated(with_bias(a, x, i, j, z));
    return fabsf(dot) <= FLT_MAX ? z : CUDART_NAN_F;
}

/* Computes the score z of a pair as score() does, but in double, because q.k is beyond the range of float32. Returns z
 * as x, and dz / d(scale q.k) as y. */
DEVICE float2 score_in_double_inline(const cuda_args &a, const head_args &x, int64_t i, int64_t j, double dot)
{
    const double scale = a.g.scale * (double)scale_of(a.g.view[ATTN_T_q_scale], x.b, x.hk) *
                         (double)scale_of(a.g.view[ATTN_T_k_scale], x.b, x.hk);
    double derivative;
    const double z = attn_score_of(&x.options, &x.s, i, j, scale * dot, &derivative);
    return make_float2(saturated(with_bias(a, x, i, j, z)), (float)derivative);
}
static __device__ __noinline__ float2 score_in_double(const cuda_args &a, const head_args &x, int64_t i, int64_t j,
                                                      double dot)
{
    return score_in_double_inline(a, x, i, j, dot);
}

/* A score is called huge if its magnitude is at least this. Neighbouring float32 numbers are so far apart there that P
 * is 1 for a row's largest score and 0 for all lower scores. */
const float HUGE_SCORE = 8589934592.0f;

/* Converts a score to base 2. The result is never -inf, which stands for a hidden pair. Huge scores are returned
 * unchanged, because their conversion could overflow; P is nevertheless correct (see HUGE_SCORE). */
DEVICE float in_base_2(float z)
{
    const float y = z * LOG2E, most = HUGE_SCORE - 512;
    /* comparisons with NaN are false, so NaN stays NaN */
    return fabsf(z) >= HUGE_SCORE ? z : y > most ? most : y < -most ? -most : y;
}

/* Returns a row's lse from its largest score m (in base 2) and the sum l of exp2(score - m). */
DEVICE float lse_of_sum(float m, float l)
{
    return l == 0 ? -CUDART_INF_F : fabsf(m) >= HUGE_SCORE ? m : m * LN2 + logf(l);
}

/* Returns whether causal, window and lengths let query i see at least one key. */
DEVICE bool sees_keys(const attn_geometry &g, const attn_sequence &s, int64_t i)
{
    const attn_range keys = attn_keys_of(&g, &s, i);
    return keys.lo < keys.hi;
}

DEVICE int64_t dropout_head(const cuda_args &a, int64_t b, int64_t h)
{
    return a.drop_first + b * a.drop_batch + h;
}

DEVICE float dropout(const cuda_args &a, const head_args &x, int64_t i, int64_t j)
{
    if (a.drop_below == 0) return 1;
    return attn_dropout_keep(a.seed, dropout_head(a, x.b, x.h), i, j, a.drop_below) ? a.drop_scale : 0;
}

DEVICE float sink_of(const cuda_args &a, int64_t h)
{
    const attn_view &sinks = a.g.view[ATTN_T_sinks];
    return sinks.data ? ((const float *)sinks.data)[attn_at(&sinks, 0, h, 0)] : -CUDART_INF_F;
}

DEVICE float sink_in_base_2(float sink)
{
    return sink == -CUDART_INF_F ? sink : in_base_2(sink);
}

/* Returns the sequence that contains row `row` of a packed tensor; `cu` is cu_seqlens. */
DEVICE int64_t sequence_at(const int32_t *cu, int64_t sequences, int64_t row)
{
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (cu[middle] <= row) low = middle;
        else high = middle;
    }
    return low;
}

/* Returns the sequence to which tile number `tile` of a packed problem belongs. A tile has `unit` rows, and the tiles
 * of sequence b begin with number cu[b] / unit + extra * b, where `cu` is cu_seqlens. `extra` leaves room for a last
 * tile that is not full. */
DEVICE int sequence_of_tile(const int32_t *cu, int64_t sequences, int unit, int extra, int tile)
{
    int low = 0, high = (int)sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu[middle] / unit + extra * middle <= tile) low = middle;
        else high = middle;
    }
    return low;
}

DEVICE int64_t lse_at(const cuda_args &a, const head_args &x, int64_t i)
{
    return x.b * a.lse_batch + x.h * a.lse_head + x.s.q_start + i;
}

/* ---- Which tile of query rows a thread block computes ------------------------------------------------------------ */

/* Returns the grid for one block per tile of `rows` query rows: (tiles, heads, batch), or for packed problems (tiles of
 * all sequences, heads). A packed grid may have more tiles than the sequences need. */
static inline dim3 tile_grid(const attn_geometry &g, int rows)
{
    const attn_dims &d = g.dims;
    return d.packed ? dim3((unsigned)(d.total_q / rows + d.B), (unsigned)d.H)
                    : dim3((unsigned)attn_tiles(d.Sq, rows), (unsigned)d.H, (unsigned)d.B);
}

/* Reduces a grid that has all tiles to a grid that has the tiles of this launch (see tile_range). */
static inline void take_share(const cuda_chip *chip, cuda_args &a, dim3 &grid)
{
    const tile_range tiles = share_of(chip, grid.x);
    a.first_tile = (int)tiles.first;
    grid.x = (unsigned)(tiles.end - tiles.first);
}

/* Returns whether the numbers of heads and of batch rows are within CUDA's limits for a grid's y and z. */
static inline bool tile_grid_fits(const attn_dims &d)
{
    return d.H <= 65535 && (d.packed || d.B <= 65535);
}

struct tile_place {
    head_args x;
    int i0; /* first query of the tile, counted from the beginning of its sequence */
    bool exists;
};

/* Returns head, sequence and first query of the tile with the index `tile_index`. Low indices get the last tiles of a
 * head, because under a causal mask these take longest. */
template <int rows> DEVICE tile_place tile_place_of(const cuda_args &a, unsigned tile_index)
{
    const int tile = a.first_tile + (int)(gridDim.x - 1 - tile_index);
    tile_place place;
    int b = blockIdx.z, first = 0;
    if (a.g.dims.packed) {
        b = sequence_of_tile(a.g.cu_q, a.g.dims.B, rows, 1, tile);
        first = a.g.cu_q[b] / rows + b;
    }
    place.x = head_args_of(a, b, blockIdx.y);
    place.i0 = (tile - first) * rows;
    place.exists = place.i0 < place.x.s.Sq && place.x.s.Sq * a.g.group > a.decode_rows;
    return place;
}

DEVICE float warp_sum(float x)
{
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}

#endif
