/* wide_backward.cu: the Hopper backward for head sizes above 256, and for smaller heads with options that the kernels
 * of backward/ do not compute.
 *
 * At head size 512 the sums of dK and dV of 64 keys would take all registers of a multiprocessor. This backward
 * therefore stores P and dS in memory, and computes each of the five products of attention once:
 *
 *   scores_of_part      (scores.cuh) P and dS of a part of the problem, 16 bits each, to memory
 *   products_of_part    (products.cuh) dQ of the part's queries, and the part's terms of dK and dV
 *
 * P and dS of a part, which is several heads or some of the queries of one head, take at most KEPT_LIMIT bytes. No two
 * blocks add to the same sum in memory, so all gradients are deterministic. */
#include "kernels/cuda/sm80/option_gradients.h"
#include "kernels/cuda/sm90/wide_backward/products.cuh"
#include "kernels/cuda/sm90/wide_backward/scores.cuh"

/* From sm80/forward.cu: computes lse of rows with huge scores as two numbers. */
cudaError_t forward_parts(const cuda_chip *chip, cuda_args a, const attn_plan *plan, cudaStream_t stream);

namespace {

/* The most memory for P and dS, in bytes. The GPU emulator of the tests has a smaller limit, so that its small problems
 * have several parts too. */
#ifndef ATTN_KEPT_BYTES
#define ATTN_KEPT_BYTES (512 << 20)
#endif
const int64_t KEPT_LIMIT = ATTN_KEPT_BYTES;

/* Number of bytes before the marks in the workspace. The first of these bytes is cuda_args.rows_found. A mark (a byte
 * per row) is nonzero if a later launch must compute the row. */
enum { MARKS_HEAD = 16 };

/* The numbers of columns of a gradient that one product may compute. A problem uses the smallest number with which D
 * and Dv columns take as few products as with MOST_COLUMNS. */
constexpr int column_counts[] = { 64, 128, 160, 192, 224, 256 };
enum { MOST_COLUMNS = 256 };

int64_t column_blocks(int64_t width)
{
    return attn_tiles(width, MOST_COLUMNS);
}
int columns_index(const attn_dims &d)
{
    const int64_t least = attn_max64(attn_tiles(d.D, column_blocks(d.D)), attn_tiles(d.Dv, column_blocks(d.Dv)));
    int n = 0;
    while (column_counts[n] < least) n++;
    return n;
}

/* How a problem is divided into parts, and the offsets in bytes of this backward's data in the workspace. */
struct kept_layout {
    int64_t heads;
    int64_t query_tiles;
    int64_t key_blocks;
    int64_t width;
    /* The problem is computed in parts, because P and dS of a part must fit in KEPT_LIMIT bytes. part_heads: the most
     * key/value heads of a part. part_rows: the most row tiles of each of these heads. Both are 0 if not even P and dS
     * of one row tile fit. */
    int64_t part_heads, part_rows;
    int64_t sums, extremes, keep, marks, bytes;
};

kept_layout layout_of(const attn_problem *p, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    const int64_t seen = attn_min64(g.left, FAR) + attn_min64(g.right, FAR) + ROWS;
    kept_layout x = {};
    x.heads = d.Hk * (d.packed ? 1 : d.B);
    x.query_tiles = query_tiles_per_head(d, ROWS);
    x.key_blocks = key_tiles_per_head(d, ROWS);
    /* `seen` neighbouring keys lie in at most (seen - 2) / KEYS + 2 tiles */
    x.width = attn_min64(attn_tiles(extent_of(d).rows_k, KEYS), (seen - 2) / KEYS + 2);
    const int64_t row_bytes = x.width * TILE * 2, fit = KEPT_LIMIT / row_bytes, rows = x.query_tiles * g.group;
    const auto even = [](int64_t count, int64_t most) { return attn_tiles(count, attn_tiles(count, most)); };
    if (fit == 0) return x;
    const int64_t most = rows <= fit ? attn_min64(fit / rows, x.heads) : 1;
    x.part_heads = even(x.heads, most);
    x.part_rows = rows <= fit ? rows : even(rows, fit);
    x.sums = most * x.part_rows * row_bytes;
    x.extremes = x.sums;
    if (x.part_rows < rows)
        x.extremes += x.key_blocks * (column_blocks(d.D) + column_blocks(d.Dv)) * ROWS *
                      column_counts[columns_index(d)] * (int64_t)sizeof(float);
    x.keep = x.extremes;
    if (p->mask_startend_rows.rank)
        x.keep += (d.B * d.H * attn_tiles(d.Sk, KEYS) * (int64_t)sizeof(attn_mask_extremes) + 127) / 128 * 128;
    kept_bits keep;
    x.marks = x.keep + plan_kept_bits(g, p->keep_mask.rank, KEEP_KEYS, nullptr, keep);
    x.bytes = x.marks + MARKS_HEAD + query_rows(d) + key_rows(d);
    return x;
}

struct kept_job {
    const cuda_chip *chip;
    cudaStream_t stream;
    cuda_args args;
    kept_plan plan;
    kept_maps maps;
    int64_t products;
};

template <auto kernel, class SHARED> cudaError_t launch_part(const kept_job &job, int64_t blocks)
{
    const cudaError_t code = allow_shared<kernel>(sizeof(SHARED));
    if (code != cudaSuccess) return code;
    return launch_dependent(kernel, attn_min64(blocks, job.chip->multiprocessors), THREADS, sizeof(SHARED), job.stream,
                            job.args, job.plan, job.maps);
}

struct kept_launchers {
    cudaError_t (*scores[4])(const kept_job &, int64_t);
    cudaError_t (*products[6])(const kept_job &, int64_t);
};
template <typename T> constexpr kept_launchers launchers()
{
    return { { launch_part<scores_of_part<T, PLAIN>, scores_shared>,
               launch_part<scores_of_part<T, WITH_MODS>, scores_shared>,
               launch_part<scores_of_part<T, WITH_PAIRS>, scores_shared>,
               launch_part<scores_of_part<T, WITH_BIAS>, scores_shared> },
             { launch_part<products_of_part<T, column_counts[0]>, products_shared<column_counts[0]>>,
               launch_part<products_of_part<T, column_counts[1]>, products_shared<column_counts[1]>>,
               launch_part<products_of_part<T, column_counts[2]>, products_shared<column_counts[2]>>,
               launch_part<products_of_part<T, column_counts[3]>, products_shared<column_counts[3]>>,
               launch_part<products_of_part<T, column_counts[4]>, products_shared<column_counts[4]>>,
               launch_part<products_of_part<T, column_counts[5]>, products_shared<column_counts[5]>> } };
}
const kept_launchers by_dtype[2] = { launchers<__nv_bfloat16>(), launchers<compiled_half>() };

bool make_kept_maps(kept_maps &m, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const tma_tensor Q = tma_tensor_of(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D),
                     K = tma_tensor_of(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D),
                     V = tma_tensor_of(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv),
                     dO = tma_tensor_of(g.view[ATTN_T_dout], e.B, d.H, e.rows_q, d.Dv);
    return tma_map(&m.Q, Q, ROWS) && tma_map(&m.K, K, KEYS) && tma_map(&m.V, V, KEYS) && tma_map(&m.dO, dO, ROWS) &&
           tma_map(&m.Q_step, Q, STEP) && tma_map(&m.K_step, K, STEP) && tma_map(&m.dO_step, dO, STEP);
}

bool plan_kept(const cuda_chip *chip, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    if (!backward_walkable(plan) || !mods_fit(p, g)) return false;
    if (d.packed && (p->mask_startend_rows.rank || p->keep_mask.rank || p->bias.rank)) return false;
    if (p->keep_mask.rank && (d.B * d.H > 65535 || attn_tiles(d.Sq, KIND_ROWS) > 65535)) return false;
    const kept_layout x = layout_of(p, g);
    if (x.part_heads == 0 || x.query_tiles * d.H >= INT32_MAX || x.key_blocks * d.Hk >= INT32_MAX / 8) return false;
    const size_t bytes = backward_bytes(chip, plan, false);
    plan->workspace_bytes = bytes + (size_t)x.bytes;
    return bytes > 0;
}

template <typename F>
cudaError_t in_kept_parts(const cuda_chip *chip, const kept_layout &x, int64_t rows, double seconds, F launch)
{
    cudaError_t code = cudaSuccess;
    for (int64_t head = 0; head < x.heads; head += x.part_heads)
        for (int64_t row = 0; row < rows && code == cudaSuccess; row += x.part_rows) {
            kept_part part;
            part.head = (int)head, part.heads = (int)attn_min64(x.part_heads, x.heads - head);
            part.row = (int)row, part.rows = (int)attn_min64(x.part_rows, rows - row);
            part.first = row == 0, part.last = row + part.rows == rows;
            if (takes_step(chip, seconds * part.heads * part.rows / ((double)x.heads * (double)rows)))
                code = launch(part);
        }
    return code;
}

/* Launches the kernels of one backward. In the workspace, the memory of begin_backward() comes first, and then the
 * memory that layout_of() describes. */
cudaError_t launch_kept(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const bool own = !chip->rows_later;
    const kept_layout x = layout_of(p, g);
    char *const at = (char *)memory + backward_bytes(chip, plan, false);
    backward_run run = {};
    cudaError_t code = begin_backward(chip, stream, plan, false, memory, &run);
    if (code != cudaSuccess) return code;
    kept_job job = { chip, stream, run.args, {}, {}, 0 };
    cuda_args &a = job.args;
    /* A bias such as -3.4e38 on all keys of a row makes the row's lse huge, and such an lse is stored as two numbers.
     * For head sizes above TILE_HEAD_DIM (256) no kernel on tensor cores computes the two numbers, so slow kernels
     * compute the row. */
    const bool by_tiles = p->bias.rank && attn_max64(d.D, d.Dv) <= TILE_HEAD_DIM;
    if (by_tiles) a.part_lse = run.scratch.s.lse, a.part_rest = run.scratch.s.rest;
    if (own) {
        a.rows_found = (uint8_t *)at + x.marks;
        a.rows_later = a.rows_found + MARKS_HEAD;
        a.keys_later = a.rows_later + query_rows(d);
    }
    kept_plan &k = job.plan;
    k.kept = (uint16_t *)at;
    k.sums = (float *)(at + x.sums);
    k.width = (int)x.width, k.query_tiles = (int)x.query_tiles, k.key_blocks = (int)x.key_blocks;
    k.columns_D = (int)column_blocks(d.D), k.columns_Dv = (int)column_blocks(d.Dv);
    k.s = run.scratch.s;
    k.mask = flash_mask_of(g, KEYS, at + x.extremes);
    plan_kept_bits(g, p->keep_mask.rank, KEEP_KEYS, at + x.keep, k.keep);
    k.bias = pair_bias_of(g);
    k.dropout = pair_dropout_of(a);
    k.mods = score_mods_of(g, 1);
    k.scale = (float)g.scale;
    k.counter = chip->counter;
    if (!make_kept_maps(job.maps, a.g)) return cudaErrorInvalidValue;
    if (takes_step(chip, 0)) {
        cuda_args now = a;
        /* `own` is true if the caller has no array of marks for rows that a later launch must compute. No later launch
         * then computes the two numbers of a huge lse, so simple_delta() computes them. */
        if (own) now.rows_later = nullptr;
        simple_delta(now, k.s, true, stream);
        if (by_tiles) code = forward_parts(chip, now, plan, stream);
        if (own && code == cudaSuccess) code = cudaMemsetAsync(a.rows_found, 0, (size_t)(x.bytes - x.marks), stream);
        if (k.mask.bounds) {
            const int64_t warps = d.B * (d.H / g.mask_group) * k.mask.key_tiles;
            tile_extremes<KEYS><<<(unsigned)attn_min64(attn_tiles(warps, 4), 1 << 20), 128, 0, stream>>>(
                k.mask, (int)d.B, (int)d.H, (int)d.Sq, (int)d.Sk, (attn_mask_extremes *)k.mask.extremes);
        }
        if (code == cudaSuccess) code = make_kept_bits<KEEP_KEYS>(g, k.keep, stream);
    }
    const kept_launchers &launch = by_dtype[p->q.dtype == ATTN_F16];
    const bool pairs = k.keep.words || k.dropout.drops,
               mods = p->softcap > 0 || p->alibi_slopes.rank || p->mask_startend_rows.rank;
    const score_form form = k.bias.data ? WITH_BIAS : pairs ? WITH_PAIRS : mods ? WITH_MODS : PLAIN;
    const int64_t of_keys = x.key_blocks * ((a.g.view[ATTN_T_dv].data ? k.columns_Dv : 0) +
                                            (a.g.view[ATTN_T_dk].data ? k.columns_D : 0)),
                  of_row = a.g.view[ATTN_T_dq].data ? k.columns_D : 0;
    if (code == cudaSuccess)
        code = in_kept_parts(chip, x, x.query_tiles * g.group, tile_seconds(chip, plan), [&](const kept_part &part) {
            const int64_t products = part.heads * (of_keys + part.rows * of_row);
            k.part = part;
            const cudaError_t scored = launch.scores[form](job, part.heads * part.rows * x.width);
            if (scored != cudaSuccess || products == 0) return scored;
            return launch.products[columns_index(d)](job, products);
        });
    if (code != cudaSuccess) return code;
    if (!own) simple_gradients_left(chip, plan, a, k.s, stream);
    else if (takes_step(chip, 0)) simple_marked_gradients(chip, a, k.s, stream);
    return option_gradients(chip, stream, plan, a, k.s, run.gradients);
}

const uint64_t FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_OPTION_BIT(SOFTCAP) |
                          ATTN_TENSOR_BIT(alibi_slopes) | ATTN_TENSOR_BIT(mask_startend_rows) | ATTN_TENSOR_BIT(bias) |
                          ATTN_TENSOR_BIT(keep_mask) | ATTN_OPTION_BIT(KEEP_MASK_AT_END) | ATTN_OPTION_BIT(DROPOUT) |
                          ATTN_TENSOR_BIT(dout) | ATTN_TENSOR_BIT(dlse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) |
                          ATTN_TENSOR_BIT(dv) | ATTN_TENSOR_BIT(dsinks) | ATTN_TENSOR_BIT(dbias) |
                          ATTN_TENSOR_BIT(dalibi_slopes) | ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(GRAD_DTYPE) |
                          ATTN_OPTION_BIT(DETERMINISTIC);

} // namespace

extern const cuda_kernel sm90_wide_backward = {
    { "sm90_wide", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), ATTN_MAX_HEAD_DIM, FEATURES },
    90,
    90,
    plan_kept,
    launch_kept,
};
