/* splits.cuh: work tiles that have only a split (a part) of the keys that their rows see, the sum of their results, and
 * the host's functions that choose splits, work tiles and scratch memory.
 *
 * A split's result is O, not divided by l, and `top` and l for each row; the exponentials in O and l are divided by
 * 2^top. Either each split is a work tile, and the kernel merge_splits() adds the results. Or, with in_turn, a work
 * tile computes all splits of its rows. Both ways do the same operations in the same order, so the bits are the same.
 *
 * Row r of a work tile is query r >> shift of head r % 2^shift of a group. */
#ifndef ATTN_SM90_SPLITS_CUH
#define ATTN_SM90_SPLITS_CUH

#include "kernels/cuda/sm90/forward/forward_plan.cuh"

namespace {

/* The results of a split's softmax besides O, for the thread's two rows. l: the sum of exponentials divided by
 * 2^top. */
struct split_end {
    float top[2], l[2];
    bool finite; /* whether scores and sums are finite */
};

/* ---- Work tiles -------------------------------------------------------------------------------------------------- */

/* Returns work tile t with all keys that its rows see, and the number of splits (parts) of these keys. */
template <int BM, int BN> DEVICE work_tile split_rows_of(const split_plan &p, int t)
{
    work_tile x = work_tile_of<BM, BN, true>(p, t, p.shift);
    const int length = max(x.length, 1);
    x.splits = max((x.last - x.first + length - 1) / length, 1);
    x.split = 0;
    return x;
}

/* Returns work tile t with the number of its split (part of the keys). If the rows have no such split, i0 is SKIP. */
template <int BM, int BN> DEVICE work_tile split_tile_of(const split_plan &p, int t)
{
    work_tile x = split_rows_of<BM, BN>(p, t / p.most);
    x.index = t;
    x.split = t % p.most;
    if (x.split >= x.splits) x.i0 = SKIP;
    return x;
}

/* Calls give() for each split (part of the keys) of work tile x that this block computes. */
template <class F> DEVICE void for_splits(const split_plan &p, work_tile x, F give)
{
    const int last = x.last;
    x.first += x.split * x.length;
    do {
        x.last = min(x.first + x.length, last);
        give(x);
        x.first = x.last, x.split++;
    } while (p.in_turn && x.split < x.splits);
}

/* ---- Adding up the results of splits (parts of the keys) --------------------------------------------------------- */

/* Combines two partial results of a row. Each operation is an intrinsic, so that the compiler cannot fuse it with
 * others: the two kernels that combine results must get the same bits. */
struct fold {
    float top, keep, add;
    DEVICE fold(float before, float next)
    {
        top = fmaxf(before, next);
        /* top is -inf if the row has seen no key yet; -inf - -inf would be NaN */
        const float base = top == -CUDART_INF_F ? 0 : top;
        keep = exp2_fast(__fsub_rn(before, base));
        add = exp2_fast(__fsub_rn(next, base));
    }
    DEVICE float operator()(float before, float next) const { return fmaf(add, next, __fmul_rn(keep, before)); }
};

/* Adds the sums of all earlier splits (parts of the keys) to O and `end`. `before`: `top` and l of these sums, for both
 * rows. O_of(n) returns four numbers of their O, two for each row. */
template <int N, class F> DEVICE void add_split(const float4 &before, F O_of, float (&O)[N], split_end &end)
{
    const fold first(before.x, end.top[0]), second(before.z, end.top[1]);
    end.top[0] = first.top, end.top[1] = second.top;
    end.l[0] = first(before.y, end.l[0]), end.l[1] = second(before.w, end.l[1]);
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
        const float4 sum = O_of(n);
        O[n * 4] = first(sum.x, O[n * 4]), O[n * 4 + 1] = first(sum.y, O[n * 4 + 1]);
        O[n * 4 + 2] = second(sum.z, O[n * 4 + 2]), O[n * 4 + 3] = second(sum.w, O[n * 4 + 3]);
    }
}

/* A warp's sums of splits in memory. store() writes the sums of a split, and add_before() adds the sums of earlier
 * splits to those of the present split. Each thread reads only the sums that it has written itself. */
template <int DV> struct split_sums {
    float4 *const O, *const rows;
    DEVICE split_sums(const split_plan &p, int warp, int lane)
        : O(p.sums + (int64_t)warp * (DV / 8) * 32 + lane), rows(p.of_row + (int64_t)warp * 32 + lane)
    {
    }
    DEVICE void store(const float (&x)[DV / 2], const split_end &end)
    {
        *rows = make_float4(end.top[0], end.l[0], end.top[1], end.l[1]);
#pragma unroll
        for (int n = 0; n < DV / 8; n++) O[n * 32] = make_float4(x[n * 4], x[n * 4 + 1], x[n * 4 + 2], x[n * 4 + 3]);
    }
    DEVICE void add_before(float (&x)[DV / 2], split_end &end)
    {
        add_split(
            *rows, [&](int n) { return O[n * 32]; }, x, end);
    }
};

template <int N> DEVICE bool is_finite(const float (&O)[N])
{
    float zero[4] = { 0, 0, 0, 0 }; /* becomes NaN if a number of O is not finite; four independent sums hide latency */
#pragma unroll
    for (int i = 0; i < N; i++) zero[i % 4] = fmaf(O[i], 0, zero[i % 4]);
    return zero[0] + zero[1] + zero[2] + zero[3] == 0;
}

/* ---- Storing the results of rows --------------------------------------------------------------------------------- */

/* Returns the sink of head h in base 2, or -inf if there is no sink. */
DEVICE float sink_of(const split_plan &p, int h)
{
    if (!p.huge_scores) return sink_log2(p.to, h);
    return sink_in_base_2(p.to.sinks ? p.to.sinks[h * p.to.sink_stride] : -CUDART_INF_F);
}

/* Stores WIDTH columns of out, from `column` on, of rows i0 and i0 + 8. If `column` is 0, it also stores their lse.
 * Returns whether all results are finite. */
template <typename T, int WIDTH>
DEVICE bool store_split_rows(const split_plan &p, const work_tile &x, int i0, int column, float (&O)[WIDTH / 2],
                             const split_end &end, int lane)
{
    const int shift = p.shift;
    const results &to = p.to;
    const float scale = p.out_scale * input_scale(p.scales, SCALE_V, x.b, x.h / p.group);
    bool finite = true;
    float factor[2];
    T *rows[2] = { nullptr, nullptr };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = i0 + half * 8, h = x.h + (r & ((1 << shift) - 1)), i = x.q_start + (r >> shift);
        const bool exists = r < x.Sq;
        const float sink = exists ? sink_of(p, h) : -CUDART_INF_F, top = fmaxf(end.top[half], sink),
                    base = top == -CUDART_INF_F ? 0 : top, keep = exp2_fast(__fsub_rn(end.top[half], base)),
                    l = fmaf(end.l[half], keep, exp2_fast(__fsub_rn(sink, base)));
        factor[half] = l == 0 ? 0 : __fdividef(keep, l) * scale;
        finite &= l - l == 0 && (p.huge_scores ? is_sound_score<true>(top) : is_sound_score<false>(top));
        if (!exists) continue;
        if (to.out) rows[half] = out_row<T>(to, x.b, h, i);
        if (column == 0 && lane % 4 == 0 && to.lse)
            to.lse[x.b * to.lse_batch + h * to.lse_head + i * to.lse_row] = l == 0 ? -CUDART_INF_F
                                                                            : p.huge_scores && fabsf(top) >= HUGE_SCORE
                                                                                ? top
                                                                                : __fmul_rn(__fadd_rn(top, __log2f(l)),
                                                                                            LN2);
    }
    finite &= finish_rows(O, factor);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 4) {
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = pack<T>(O[(n + e) * 4 + half * 2], O[(n + e) * 4 + half * 2 + 1]);
            transpose_quad(r, lane % 4);
            const int at = column + (n + lane % 4) * 8;
            if (rows[half] && at < to.Dv) *(uint4 *)(rows[half] + at) = make_uint4(r[0], r[1], r[2], r[3]);
        }
    return finite;
}

/* Recomputes row r of work tile x, key by key, if tensor cores cannot compute it. All lanes of a warp must call
 * this. */
template <int CHANNELS> DEVICE void repair_split_row(const split_plan &p, const cuda_args &a, const work_tile &x, int r)
{
    const int shift = p.shift;
    if (r >= x.Sq) return;
    const head_args of_head = head_args_of(a, x.b, x.h + (r & ((1 << shift) - 1)));
    forward_row<CHANNELS>(a, of_head, r >> shift, a.g.view[ATTN_T_out], nullptr,
                          p.huge_scores ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS);
}

/* ---- The kernel that adds up splits ------------------------------------------------------------------------------ */

enum { MERGE_COLUMNS = 32 }; /* number of columns of out that a warp of merge_splits computes */

/* Adds the results of the splits (parts of the keys) of 16 rows, and stores out of these rows. A block has the COLUMNS
 * columns of a work tile, and each of its warps has MERGE_COLUMNS columns.
 *
 *   BM, BN, FLAGS   rows, keys and flags (plan::nonfinite) of a work tile
 *   LINE            number of float4 of a warp in split_plan::of_row
 *   column_blocks   split_plan::column_blocks
 *   has_flags       whether the work tiles have written their flags
 *
 * If a result is not finite, all threads call leave(x, row, tile): `row` is the first of the 16 rows in work tile x,
 * and `tile` is the number of the work tile of the first split. */
template <typename T, int BM, int BN, int FLAGS, int COLUMNS, int LINE, class F>
DEVICE void merge_splits_of_rows(const split_plan &p, int column_blocks, bool has_flags, F leave)
{
    const int WARPS = BM / 16, AHEAD = 4;
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32, warp = blockIdx.x % WARPS;
    const int N = MERGE_COLUMNS / 2;
    launch_dependents();
    wait_for_prerequisites();
    const int block = (int)(blockIdx.x / WARPS), column0 = block % column_blocks * COLUMNS;
    const work_tile x = split_rows_of<BM, BN>(p, block / column_blocks);
    const int row = x.i0 + warp * 16;
    if (x.i0 == SKIP || row >= x.Sq) return;
    /* number of the work tile of the first split, and the distance from one split's work tile to the next split's */
    const int first = block / column_blocks * p.most * column_blocks + block % column_blocks;
    const int64_t stride = column_blocks;
    const float4 *const sums = p.sums + (((int64_t)first * WARPS + warp) * (COLUMNS / 8) + chunk * (N / 4)) * 32 + lane,
                        *const of_row = p.of_row + ((int64_t)first * WARPS + warp) * LINE + lane;
    const auto end_at = [&](int n) {
        const float4 y = of_row[n * stride * WARPS * LINE];
        return split_end{ { y.x, y.z }, { y.y, y.w }, true };
    };
    const auto load = [&](float(&O)[N], int n) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const float4 y = sums[(n * stride * WARPS * (COLUMNS / 8) + i) * 32];
            O[i * 4] = y.x, O[i * 4 + 1] = y.y, O[i * 4 + 2] = y.z, O[i * 4 + 3] = y.w;
        }
    };
    const auto flagged_at = [&](int n) {
        bool any = false;
        for (int w = warp; w < FLAGS && has_flags; w += WARPS)
            any |= p.nonfinite[(first + n * stride) * FLAGS + w] != 0;
        return any;
    };
    float O[N];
    split_end end = end_at(0);
    bool flagged = flagged_at(0);
    load(O, 0);
#pragma unroll 1
    for (int n = 1; n < x.splits; n += AHEAD) {
        float next[AHEAD][N];
        split_end next_end[AHEAD];
#pragma unroll
        for (int e = 0; e < AHEAD; e++)
            if (n + e < x.splits) {
                next_end[e] = end_at(n + e);
                load(next[e], n + e);
                flagged |= flagged_at(n + e);
            }
#pragma unroll
        for (int e = 0; e < AHEAD; e++)
            if (n + e < x.splits) {
                const float4 before = make_float4(end.top[0], end.l[0], end.top[1], end.l[1]);
                add_split(
                    before, [&](int i) { return make_float4(O[i * 4], O[i * 4 + 1], O[i * 4 + 2], O[i * 4 + 3]); },
                    next[e], next_end[e]);
                end = next_end[e];
#pragma unroll
                for (int i = 0; i < N; i++) O[i] = next[e][i];
            }
    }
    const bool finite = store_split_rows<T, MERGE_COLUMNS>(p, x, row + lane / 4, column0 + chunk * MERGE_COLUMNS, O,
                                                           end, lane);
    if (__syncthreads_or(flagged || !finite)) leave(x, row, first);
}

/* Adds the results of splits, and recomputes rows that tensor cores could not compute. */
template <typename T, int BM, int BN, int FLAGS, int COLUMNS>
__global__ void __launch_bounds__(COLUMNS)
    merge_splits(const __grid_constant__ split_plan p, const __grid_constant__ cuda_args a)
{
    merge_splits_of_rows<T, BM, BN, FLAGS, COLUMNS, 32>(p, 1, true, [&](const work_tile &x, int row, int64_t) {
        repair_begins();
        for (int r = row + (int)threadIdx.x / 32; r < row + 16; r += COLUMNS / MERGE_COLUMNS)
            repair_split_row<COLUMNS / 32>(p, a, x, r);
    });
}

/* ---- Functions of the host: the rule ----------------------------------------------------------------------------- */

/* Returns the rule by which the keys of a problem are split. `tile`: the work tiles of the kernel that computes the
 * problem. */
split_rule split_rule_of(const attn_plan *plan, const split_tile &tile)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    split_rule r = NO_SPLITS;
    if (plan->problem->seqlens_q.rank) return r;
    const bool packs = tile.packs && g.group <= 64 && (g.group & (g.group - 1)) == 0;
    while (packs && 1 << r.shift < g.group) r.shift++;
    /* the rows of a packed problem are counted in an int, so there must be fewer than FAR */
    if (d.packed && d.total_q << r.shift >= FAR) return NO_SPLITS;
    r.BM = tile.BM, r.BN = tile.BN, r.least = tile.least, r.most = tile.most;
    r.queries = (int)attn_min64(plan->problem->whole_queries, FAR);
    r.per_tile = (int)attn_min64(g.group >> r.shift, FAR);
    r.window = (int)attn_min64(attn_min64(g.left, FAR) + attn_min64(g.right, FAR) + (r.BM >> r.shift), FAR);
    r.least_keys = (int)attn_max64(2 * r.least, 4 * (int64_t)attn_min64(r.queries, FAR / 4));
    r.most_queries = (r.most / 2 / r.per_tile * r.BM) >> r.shift;
    if (r.window < 2 * r.least || r.queries > r.most_queries) r.most_queries = 0;
    return r;
}

split_part split_part_of(const split_rule &r, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    if (r.most_queries <= 0) return SPLITS_NONE;
    if (d.packed) return d.total_k >= r.least_keys ? SPLITS_SOME : SPLITS_NONE;
    if (d.Sq > r.most_queries || !has_splits(r, (int)d.Sq, (int)attn_min64(d.Sk, FAR))) return SPLITS_NONE;
    return g.seqlens_k ? SPLITS_SOME : SPLITS_ALL;
}

/* ---- Functions of the host: work tiles and scratch memory -------------------------------------------------------- */

/* Return the number of tiles of rows per head, and the number of heads. 2^shift query heads of a group count as one
 * head, because their rows share work tiles. */
int64_t tiles_per_head(const split_rule &r, const attn_dims &d)
{
    return d.packed ? (d.total_q << r.shift) / r.BM + d.B : attn_tiles(d.Sq << r.shift, r.BM);
}
int64_t heads_of(const split_rule &r, const attn_dims &d)
{
    return extent_of(d).B * (d.H >> r.shift);
}

/* A problem's work tiles, and the offsets in bytes of what the scratch memory holds. It begins with plan::before and
 * plan::nonfinite. */
struct split_layout {
    int64_t per_head, heads;
    int64_t tiles; /* number of work tiles if each one had all columns of out */
    int most, column_blocks;
    bool in_turn;
    int64_t slots, of_row, sums, bytes;
};

/* Limits per multiprocessor, for problems that are not packed. With more splits than MANY, or more tiles of rows than
 * MOST_TILES, a work tile computes all splits of its rows; otherwise each split is a work tile. If tiles of rows are at
 * most half as many as multiprocessors, each split is a work tile in any case. The sums of MANY splits per
 * multiprocessor fit into the L2 cache. */
const int MANY = 6;
const double MOST_TILES = 1.6;

/* Returns whether a work tile computes all splits (parts of the keys) of its rows, one after the other. The results
 * have the same bits either way. `count`: the largest number of splits. */
bool runs_in_turn(const cuda_chip *chip, const attn_dims &d, int64_t tiles, int64_t count)
{
    /* The host does not know the lengths of packed sequences. If work tiles were planned for the largest possible
     * number of splits, most would be empty. */
    if (d.packed) return true;
    const int64_t fill = chip->multiprocessors;
    return tiles * 2 > fill && ((double)tiles > MOST_TILES * (double)fill || tiles * count > MANY * fill);
}

/* Sets where the sums of x.slots work tiles of `rows` rows and `columns` columns lie. split_plan::of_row has 64 float4
 * for each warp, because sm90/wide needs twice 32 per warp. */
void place_sums(split_layout &x, int rows, int columns)
{
    const int64_t warps = rows / 16;
    x.of_row = (x.tiles * x.column_blocks * TILE_BYTES + 127) / 128 * 128;
    x.sums = x.of_row + x.slots * warps * 64 * (int64_t)sizeof(float4);
    x.bytes = x.sums + x.slots * rows * columns * (int64_t)sizeof(float);
}

/* Divides a problem into work tiles, and plans the memory for the sums of splits (parts of the keys). At least one
 * sequence must have splits. A work tile computes `columns` columns of out, and column_blocks work tiles together
 * compute all columns. */
split_layout split_layout_of(const cuda_chip *chip, const split_rule &r, const attn_dims &d, int columns,
                             int column_blocks)
{
    split_layout x;
    x.per_head = tiles_per_head(r, d), x.heads = heads_of(r, d), x.column_blocks = column_blocks;
    const int64_t rows = x.per_head * x.heads;
    const int count = d.packed ? 1 : split_count(r, (int)d.Sq, (int)d.Sk);
    x.in_turn = runs_in_turn(chip, d, rows, count);
    x.most = x.in_turn ? 1 : count;
    x.tiles = rows * x.most;
    x.slots = x.in_turn ? chip->multiprocessors : x.tiles * column_blocks;
    place_sums(x, r.BM, columns);
    return x;
}

/* Returns the bytes of scratch memory for the sums of splits; 0: the keys of no sequence are split. */
size_t split_workspace(const cuda_chip *chip, const attn_plan *plan, const split_rule &r, int columns,
                       int column_blocks = 1)
{
    if (split_part_of(r, plan->geometry) == SPLITS_NONE) return 0;
    const attn_dims &d = plan->geometry.dims;
    split_layout x = split_layout_of(chip, r, d, columns, column_blocks);
    const int64_t bytes = x.bytes;
    if (d.packed || !x.in_turn) return (size_t)bytes;
    /* device.cu may compute this problem in parts (some of its heads or queries), one after the other in the same
     * workspace. In such a part each split may be a work tile, and the sums of all splits then need more memory. */
    const int64_t count = split_count(r, (int)d.Sq, (int)d.Sk);
    x.tiles = attn_max64(chip->multiprocessors / 2 * count, (int64_t)MANY * chip->multiprocessors);
    x.slots = x.tiles * column_blocks;
    place_sums(x, r.BM, columns);
    return (size_t)attn_max64(bytes, x.bytes);
}

/* Sets the members of the plan p that differ from those of a plan without splits. `memory`: scratch memory of y.bytes
 * bytes. */
void make_split_plan(const split_rule &r, const split_layout &y, char *memory, split_plan &p)
{
    (tile_order &)p.order = tile_order_of(y.per_head, y.heads, 0, false);
    p.order.last_heads = p.order.heads, p.order.short_tiles = 0;
    p.order.tiles = p.order.end = (int)y.tiles;
    p.H >>= r.shift;
    p.splits = r;
    p.shift = r.shift, p.most = y.most, p.in_turn = y.in_turn, p.column_blocks = y.column_blocks;
    p.before = (int32_t *)memory;
    p.nonfinite = (uint8_t *)(p.before + y.tiles * y.column_blocks);
    p.of_row = (float4 *)(memory + y.of_row), p.sums = (float4 *)(memory + y.sums);
    p.out_scale = 1, p.huge_scores = false;
}

/* Returns the view of Q for its tensor map if keys are split. The view swaps two axes: its rows are the heads of Q, and
 * its heads are the queries. */
tma_tensor queries_by_head(const attn_geometry &g)
{
    const extent e = extent_of(g.dims);
    const attn_view &q = g.view[ATTN_T_q];
    tma_tensor x = tma_tensor_of(q, e.B, e.rows_q, g.dims.H, g.dims.D);
    x.head = q.row, x.row = q.head;
    return x;
}

} // namespace

#endif
