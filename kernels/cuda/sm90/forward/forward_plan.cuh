/* forward_plan.cuh: what the kernel of forward_tiles.cuh gets from the host: its plan (parameters), its work tiles and
 * its scratch memory. This file also tests whether the kernel can compute a problem. */
#ifndef ATTN_SM90_FORWARD_PLAN_CUH
#define ATTN_SM90_FORWARD_PLAN_CUH

#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/sm90/forward/split_rule.h"
#include "kernels/cuda/sm90/layer/epilogue.cuh"
#include "kernels/cuda/sm90/layer/masks.cuh"
#include "kernels/cuda/sm90/layer/pairs.cuh"
#include "kernels/cuda/sm90/layer/score_mods.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

namespace {

const int LEAST_BN = 64; /* the smallest number of keys per tile of any shape */

/* The most bytes of K and V in a section (a group of heads, see ending_order): FEW_KEYS_SECTION if there are fewer than
 * MANY_KEYS keys, SECTION otherwise. */
const int MANY_KEYS = 2048;
const int64_t FEW_KEYS_SECTION = 4 << 20, SECTION = 16 << 20;

/* ---- The plan: the numbers of a problem that the kernel reads, in 32 bits ---------------------------------------- */

struct plan {
    ending_order order; /* the order in which work tiles are claimed; in packed problems some work tiles have no rows */
    int B, H, group, Sq, Sk;
    int left, right; /* how many keys a row sees to the left and right of its own position, at most FAR */
    int top_left;
    /* reference.c is log2(e) times the scale (or times the softcap, if there is one); it is above 0 */
    lazy_reference reference;
    const int32_t *cu_q, *cu_k, *seqlens_q, *seqlens_k;
    bool ends_of_queries; /* whether a sequence may have fewer queries than its tensor has rows */
    input_scales scales;
    score_mods mods;
    flash_mask mask;
    results to;
    uint8_t *nonfinite; /* [work tile][warp]: not 0 if a result of the warp was NaN or infinite */
    int32_t *before;    /* [work tile]: the work tile that the same block computed before this one, or -1 */
    /* If lengths differ (cu_k or seqlens_k), this launch computes only sequences of least_Sk to most_Sk keys, see
     * launch_shapes(). */
    int least_Sk, most_Sk;
    /* in packed problems: this launch skips sequences of at most this many rows (queries times query heads of a group),
     * because sm80/decode.cu computes them */
    int decode_rows;
    /* The rule that splits the keys of some sequences. One launch computes these sequences, and another one the
     * rest. */
    split_rule splits;
    int *counter;
};

/* The plan of a launch that computes sequences whose keys are split (splits.cuh). Other launches do not set the members
 * that this struct adds, except column_blocks in sm90/wide. */
struct split_plan : plan {
    bool in_turn; /* whether a work tile computes all splits of its rows; otherwise each split is a work tile */
    /* number of work tiles with the same rows: 1 with in_turn, otherwise the largest number of splits */
    int most;
    int shift;         /* row r of a work tile is query r >> shift of head r % 2^shift of a group */
    int column_blocks; /* number of work tiles among which the columns of out are divided */
    float4 *sums; /* [slot][warp][4 numbers of O][lane]: sums of O; a slot belongs to a work tile or, with in_turn, to a
                   * block */
    /* `top` and l of the lane's two rows: (x, y) of the first row, (z, w) of the second one. The indices are
     * [slot][warp][lane], and in sm90/wide [slot][warp][0 or 1][lane]. */
    float4 *of_row;
    /* factor of out: 1 / (1 - dropout_p) */
    float out_scale;
    bool huge_scores; /* whether `top` comes from in_base_2(), which does not convert huge scores to base 2 */
};

/* The plan for bias, keep_mask or dropout (pairs.cuh). With a bias, a score is q.k times `unit`, plus the bias, and
 * reference.c is log2(e). */
struct pair_plan : split_plan {
    pair_bias bias;
    kept_bits kept;
    pair_dropout dropout;
    float unit, largest_unit;
};

/* ---- Work tiles -------------------------------------------------------------------------------------------------- */

/* A work tile: rows i0 to i0 + BM - 1 of head h of sequence b. They see tiles of keys `first` to `last` - 1. */
struct __align__(16) work_tile
{
    int b, h, i0, first;
    int last, Sq, Sk, align;
    /* nonfinite_to_zero: 1 if the work tile is computed a second time, with zeros for each infinity and NaN in V */
    int q_start, k_start, index, nonfinite_to_zero;
    /* with FlashMask or keep_mask: which list in shared memory (0 or 1) has the key tiles that this work tile sees */
    int list;
    /* If the keys are split: the number of this split, how many splits the rows' keys have, and how many key tiles a
     * split has. */
    int split, splits, length;
};

/* Negative values of work_tile::i0. REPORT: consumers must arrive at a barrier when all their results are written.
 * STOP: there is no more work. SKIP: this launch does not compute the work tile, and consumers never get it. */
enum { REPORT = -1, STOP = -2, SKIP = -3 };

DEVICE key_band band_of(const plan &p, const work_tile &x)
{
    return key_band_of(x.align, p.left, p.right, x.Sk);
}

/* Returns work tile t of the order. With SPLIT, the launch computes only sequences whose keys are split, otherwise only
 * the other sequences. With shift > 0, a work tile has rows of 2^shift query heads: row r belongs to query r >> shift,
 * h is the first of the heads, and Sq counts rows. */
template <int BM, int BN, bool SPLIT = false> DEVICE work_tile work_tile_of(const plan &p, int t, int shift = 0)
{
    work_tile x;
    x.index = t;
    x.nonfinite_to_zero = x.list = 0;
    const head_tile place = head_tile_of(p.order, t);
    int tile = p.order.per_head - 1 - place.tile, first = 0;
    x.b = place.head / p.H;
    x.h = place.head - x.b * p.H;
    x.q_start = x.k_start = 0;
    x.Sq = p.Sq;
    x.Sk = p.Sk;
    if (p.cu_q) {
        int low = 0, high = p.B;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if ((p.cu_q[middle] << shift) / BM + middle <= tile) low = middle;
            else high = middle;
        }
        x.b = low;
        x.q_start = p.cu_q[low];
        x.k_start = p.cu_k[low];
        x.Sq = p.cu_q[low + 1] - x.q_start;
        x.Sk = p.cu_k[low + 1] - x.k_start;
        first = (x.q_start << shift) / BM + low;
    }
    if (p.seqlens_q) x.Sq = p.seqlens_q[x.b];
    if (p.seqlens_k) x.Sk = p.seqlens_k[x.b];
    x.align = p.top_left ? 0 : x.Sk - x.Sq;
    x.i0 = (tile - first) * BM;
    bool skips = x.Sk < p.least_Sk || x.Sk > p.most_Sk || (int64_t)x.Sq * p.group <= p.decode_rows;
    if (SPLIT) x.length = split_length(p.splits, x.Sq, x.Sk), skips |= x.length == 0;
    else skips |= has_splits(p.splits, x.Sq, x.Sk);
    x.Sq <<= shift, x.h <<= shift;
    const key_tiles keys = key_tiles_of<BN>(band_of(p, x), x.i0 >> shift, ((min(x.i0 + BM, x.Sq) - 1) >> shift) + 1);
    x.first = keys.first;
    x.last = x.i0 < x.Sq ? keys.last : keys.first;
    if (x.i0 >= x.Sq || skips) x.i0 = SKIP;
    return x;
}

/* ---- Functions of the host: scratch memory ----------------------------------------------------------------------- */

/* Returns the distance between rows of a tensor in scratch memory, in 16-bit elements. TMA needs a multiple of 16
 * bytes. */
int64_t pitch_of(int64_t D)
{
    return (D + 7) / 8 * 8;
}

int64_t per_head_of(const attn_dims &d, int BM)
{
    return d.packed ? d.total_q / BM + d.B : attn_tiles(d.Sq, BM);
}

const int MOST_WARPS = 16;             /* the largest number of consumer warps in any shape */
const int TILE_BYTES = 4 + MOST_WARPS; /* bytes of scratch per work tile: four for plan::before, and one flag per
                                        * warp */

/* Offsets in the scratch memory, which begins with plan::before and plan::nonfinite. extremes: FlashMask's smallest and
 * largest bounds of each tile of keys. wide: q, k and v, converted from float8 to bfloat16. */
struct layout {
    /* offsets in bytes from the beginning of the scratch memory, and its size (`bytes`) */
    int64_t extremes, wide[3], bytes;
};

layout layout_of(const attn_problem *p, const attn_dims &d)
{
    const extent e = extent_of(d);
    const bool narrow = p->q.dtype == ATTN_F8E4M3;
    const int64_t wide[3] = { e.rows_q * d.H * pitch_of(d.D), e.rows_k * d.Hk * pitch_of(d.D),
                              e.rows_k * d.Hk * pitch_of(d.Dv) };
    layout x;
    x.extremes = (e.B * d.H * (per_head_of(d, LEAST_BM) + 1) * TILE_BYTES + 127) / 128 * 128;
    x.bytes = x.extremes;
    if (p->mask_startend_rows.rank)
        x.bytes += (e.B * d.H * attn_tiles(d.Sk, LEAST_BN) * (int64_t)sizeof(attn_mask_extremes) + 127) / 128 * 128;
    for (int n = 0; n < 3; n++) {
        x.wide[n] = x.bytes;
        if (narrow) x.bytes += (e.B * wide[n] * 2 + 127) / 128 * 128;
    }
    return x;
}

/* ---- Functions of the host: which problems the kernels compute --------------------------------------------------- */

bool plan_forward(const cuda_chip *, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    if (e.rows_q <= 0 || e.rows_k <= 0 || d.B <= 0 || d.H <= 0 || e.rows_q >= FAR || e.rows_k >= FAR) return false;
    if (e.B * d.H * (per_head_of(d, LEAST_BM) + 1) * TILE_BYTES >= INT32_MAX)
        return false; /* work tiles are counted in 32 bits */
    if (!mods_fit(p, g)) return false;
    if (p->mask_startend_rows.rank && (d.packed || attn_tiles(e.rows_k, LEAST_BN) > MOST_KEY_TILES)) return false;
    if (p->out.rank && !tma_walkable(g.view[ATTN_T_out], e.B, d.H, e.rows_q, d.Dv, 8)) return false;
    if (p->q.dtype != ATTN_F8E4M3 && !(tma_walkable(g.view[ATTN_T_q], e.B, d.H, e.rows_q, d.D, 8) &&
                                       tma_walkable(g.view[ATTN_T_k], e.B, d.Hk, e.rows_k, d.D, 8) &&
                                       tma_walkable(g.view[ATTN_T_v], e.B, d.Hk, e.rows_k, d.Dv, 8)))
        return false;
    plan->workspace_bytes = (size_t)layout_of(p, d).bytes;
    return true;
}

/* ---- Functions of the host: making the plan ---------------------------------------------------------------------- */

/* A problem to launch. `given` has the problem's own tensors. `read` has the tensors that forward_tiles reads, with
 * bfloat16 copies in place of float8 tensors. */
struct forward_job {
    const cuda_chip *chip;
    cudaStream_t stream;
    const attn_problem *problem;
    cuda_args given, read;
    char *memory;       /* scratch memory with the offsets `place` */
    char *split_memory; /* scratch memory of launch_splits(), if the keys of some sequences are split */
    layout place;
    /* The rule by which the keys of some sequences are split. A launch for whole sequences skips every sequence whose
     * keys this rule splits. */
    split_rule splits = NO_SPLITS;
};

void make_plan(const forward_job &job, int BM, int BN, plan &p)
{
    const attn_geometry &g = job.read.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const bool uneven = g.right < e.rows_k || g.left < e.rows_q || job.read.ends_of_queries || job.read.ends_of_keys ||
                        g.view[ATTN_T_mask_startend_rows].data;
    p.order = forward_order_of(g, per_head_of(d, BM), e.B * d.H, e.rows_k, (d.D + d.Dv) * 2, BM, uneven,
                               e.rows_k < MANY_KEYS ? FEW_KEYS_SECTION : SECTION);
    p.B = (int)d.B, p.H = (int)d.H, p.group = (int)g.group, p.Sq = (int)d.Sq, p.Sk = (int)d.Sk;
    p.left = (int)attn_min64(g.left, FAR), p.right = (int)attn_min64(g.right, FAR);
    p.top_left = g.top_left;
    /* a score in softmax_step() times this factor is the true score */
    const float unit = (float)(g.softcap > 0 ? g.softcap : g.scale);
    p.reference.c = unit * LOG2E, p.reference.slack = 8 / p.reference.c;
    p.cu_q = g.cu_q, p.cu_k = g.cu_k, p.seqlens_q = g.seqlens_q, p.seqlens_k = g.seqlens_k;
    p.ends_of_queries = job.read.ends_of_queries;
    p.scales = input_scales_of(g);
    p.mods = score_mods_of(g, unit);
    p.mask = flash_mask_of(g, BN, job.memory + job.place.extremes);
    p.to = results_of(g);
    p.decode_rows = job.read.decode_rows;
    p.splits = job.splits;
    p.before = (int32_t *)job.memory;
    p.nonfinite = (uint8_t *)(p.before + p.order.tiles);
    p.counter = job.chip->counter;
}

/* ---- Functions of the host: bias, keep_mask and dropout ---------------------------------------------------------- */

/* Offsets in scratch memory of the parts that follow those of struct layout: keep_mask as bits, and FlashMask's
 * smallest and largest bounds for each tile of BN keys. */
struct pair_layout {
    int64_t kept, extremes, bytes;
};
pair_layout pair_layout_of(const attn_problem *p, const attn_geometry &g, int BN)
{
    kept_bits kept;
    pair_layout x;
    x.kept = layout_of(p, g.dims).bytes;
    x.extremes = x.kept + plan_kept_bits(g, p->keep_mask.rank, BN, nullptr, kept);
    x.bytes = x.extremes;
    if (p->mask_startend_rows.rank)
        x.bytes += (g.dims.B * g.dims.H * attn_tiles(g.dims.Sk, BN) * (int64_t)sizeof(attn_mask_extremes) + 127) / 128 *
                   128;
    return x;
}

void make_pair_plan(const forward_job &job, int BN, pair_plan &p)
{
    const attn_geometry &g = job.read.g;
    const pair_layout place = pair_layout_of(job.problem, g, BN);
    p.bias = pair_bias_of(g);
    plan_kept_bits(g, g.view[ATTN_T_keep_mask].data, BN, job.memory + place.kept, p.kept);
    p.dropout = pair_dropout_of(job.given);
    p.unit = (float)(g.softcap > 0 ? g.softcap : g.scale);
    p.largest_unit = p.bias.data ? 1 : p.unit;
    p.reference.c = p.largest_unit * LOG2E, p.reference.slack = 8 / p.reference.c;
    p.mods = score_mods_of(g, p.largest_unit);
    p.mask = flash_mask_of(g, BN, job.memory + place.extremes);
}

} // namespace

#endif
