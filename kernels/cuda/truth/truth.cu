/* truth.cu: computes attention in float64 on tensor cores (attn_truth_some()), for comparison with other results.
 *
 * The kernel widen converts q, k, v and dout exactly to dense float32 arrays. FORWARD computes out and lse. close_rows
 * computes delta, and takes the client's lse if there is one. DQ, DK and DV compute one gradient each.
 *
 * FORWARD, DQ, DK and DV are one kernel. A block has 64 rows of a head (queries, or keys for DK and DV) and WIDTH
 * columns of the result, and visits tiles of 32 columns of S (keys, or queries for DK and DV):
 *
 *     S  = X Y^T       X is q (k in DK and DV), Y is k (q in DK and DV); S then becomes the scores, and these become P
 *     dP = X2 Y2^T     only in DQ (X2 is dout, Y2 is v) and DK (X2 is v, Y2 is dout); dP and P then become dS
 *     result += P Z    Z is v in FORWARD, k in DQ, q in DK, dout in DV; DQ and DK use dS in place of P
 *
 * P of a hidden pair is -0, and P of a visible pair is never -0. Rows of Z with a NaN or an infinity are multiplied
 * without tensor cores, skipping hidden pairs. All sums are in double, in an order that depends on the problem alone.
 * Two doubles hold lse: the row's largest score, and the logarithm of the sum of exponentials relative to it.
 * cpu/reference.c computes the same on the CPU. */
#include "kernels/cuda/sm80/ptx.cuh"
#include "kernels/cuda/truth/steps.cuh"
#include "kernels/cuda/truth/truth.h"

namespace {

/* ---- The kernel `widen`, which converts inputs to dense float32 arrays ------------------------------------------- */

enum { SMALL_BLOCK = 256, SMALL_ROWS = SMALL_BLOCK / 32, MOST_BLOCKS = 1 << 16 };

__global__ void __launch_bounds__(SMALL_BLOCK)
    widen(const __grid_constant__ truth_args t, attn_tensor_id id, bool keys, int64_t rows, int64_t D, dense to)
{
    const attn_geometry &g = t.a.g;
    const attn_view &view = g.view[id];
    const int lane = threadIdx.x % 32;
    for (int64_t n = blockIdx.x * (int64_t)SMALL_ROWS + threadIdx.x / 32; n < rows; n += gridDim.x * SMALL_ROWS) {
        const row_place row = place_of_row(g.dims, keys, n);
        const bool exists = !(keys && g.page_table) || row.line < g.seqlens_k[row.b];
        const int64_t at = !exists ? 0
                           : keys  ? attn_key_at(&g, &view, row.b, row.h, row.line)
                                   : attn_at(&view, row.b, row.h, row.line);
        bool strange = false;
        for (int d = lane; d < to.width; d += 32) {
            const float x = exists && d < D ? load_float(view.dtype, view.data, at + d) : 0;
            strange |= !(fabsf(x) <= FLT_MAX);
            to.data[n * to.width + d] = x;
        }
        strange = __any_sync(0xffffffff, strange);
        if (lane == 0) to.strange[n] = strange;
    }
}

__global__ void __launch_bounds__(SMALL_BLOCK) fill(double *to, int64_t count, double value)
{
    for (int64_t n = blockIdx.x * (int64_t)SMALL_BLOCK + threadIdx.x; n < count; n += gridDim.x * SMALL_BLOCK)
        to[n] = value;
}

/* ---- The four passes FORWARD, DQ, DK and DV ---------------------------------------------------------------------- */

constexpr bool is_by_keys(pass p)
{
    return p == DK || p == DV;
}
constexpr bool has_two_products(pass p)
{
    return p == DQ || p == DK;
}

/* The operands of a pass (FORWARD, DQ, DK or DV), which computes S = X Y^T and dP = X2 Y2^T, and adds P Z to the
 * result. */
struct operands {
    dense x, y, x2, y2, z;
};
template <pass PASS> ATTN_HD operands operands_of(const truth_args &t)
{
    switch (PASS) {
    case FORWARD: return { t.q, t.k, t.q, t.k, t.v };
    case DQ: return { t.q, t.k, t.dout, t.v, t.k };
    case DK: return { t.k, t.q, t.v, t.dout, t.q };
    default: return { t.k, t.q, t.k, t.q, t.dout };
    }
}

/* Returns the number of tiles of rows per head. In packed problems it is an upper bound on the number of tiles of all
 * sequences together. Each tile has one block for every WIDTH columns of the result. */
static inline int64_t row_tiles(const attn_dims &d, bool keys)
{
    return packed_rows(d, keys) ? (keys ? d.Sk : d.Sq) / ROWS + d.B : attn_tiles(keys ? d.Sk : d.Sq, ROWS);
}
struct block_shape {
    int64_t tiles, parts;
};

struct block_place {
    int64_t b, h; /* query head in FORWARD and DQ, key/value head in DK and DV */
    int row, part;
    attn_sequence s;
};
DEVICE block_place place_of_block(const truth_args &t, const block_shape &shape, bool keys)
{
    const attn_geometry &g = t.a.g;
    const int64_t heads = keys ? g.dims.Hk : g.dims.H;
    int64_t n = t.first_block + blockIdx.x, tile;
    block_place place;
    place.part = (int)(n % shape.parts);
    n /= shape.parts;
    tile = n % shape.tiles;
    n /= shape.tiles;
    place.h = n % heads;
    place.b = n / heads;
    if (packed_rows(g.dims, keys)) {
        const int32_t *const cu = keys ? g.cu_k : g.cu_q;
        place.b = sequence_of_tile(cu, g.dims.B, ROWS, 1, (int)tile);
        tile -= cu[place.b] / ROWS + place.b;
    }
    place.row = (int)tile * ROWS;
    place.s = attn_sequence_of(&g, place.b);
    return place;
}

/* Returns the columns (keys, or queries if the row is a key) that form visible pairs with a row. */
template <bool BY_KEYS> DEVICE attn_range columns_of(const attn_geometry &g, const attn_sequence &s, int64_t row)
{
    return BY_KEYS ? attn_rows_of(&g, &s, row) : attn_keys_of(&g, &s, row);
}

/* ---- The work of a block ----------------------------------------------------------------------------------------- */

/* What one block computes. In FORWARD and DQ rows are queries and columns keys; in DK and DV rows are keys and columns
 * queries. */
struct block_work {
    operands o;
    attn_sequence s;
    int64_t b, h, hk;
    int64_t first_row; /* index of the tile's first row, counted over the rows of all heads */
    /* row: the tile's first row in its sequence; rows, columns: how many the sequence has */
    int row, rows, columns;
    int begin, end;      /* rows of the tile can see only columns `begin` to `end` - 1 */
    int chunks, chunks2; /* number of chunks of channels of X Y^T, and of X2 Y2^T */
    /* members: number of query heads that the block visits; part: which WIDTH columns of the result the block
     * computes */
    int members, part;
    int from_z, width;
    /* causal, window and lengths let each of the lane's two rows see columns lo to hi - 1 */
    int lo[2], hi[2];
    double scale;
};

/* An iteration of a block's loop, for the tile that begins at column `column`, and for query head number `member` of
 * the group. `part` says what the iteration loads. The first `chunks` values of `part` stand for channels of X and Y,
 * the next `chunks2` values for channels of X2 and Y2, and the last value for Z. */
struct cursor {
    int part, column, member;
};
DEVICE void advance(const block_work &w, cursor &at)
{
    if (++at.part <= w.chunks + w.chunks2) return;
    at.part = 0;
    if ((at.column += COLUMNS) < w.end) return;
    at.column = w.begin;
    at.member++;
}

template <pass PASS> DEVICE int64_t query_head(const truth_args &t, const block_work &w, int member)
{
    return is_by_keys(PASS) ? w.h * t.a.g.group + member : w.h;
}

/* Returns the index of the sequence's column 0 (a key, or in DK and DV a query), counted over all heads. */
template <pass PASS> DEVICE int64_t first_column(const truth_args &t, const block_work &w, int member)
{
    constexpr bool BY_KEYS = is_by_keys(PASS);
    return first_row(t.a.g.dims, w.s, !BY_KEYS, w.b, BY_KEYS ? query_head<PASS>(t, w, member) : w.hk);
}

template <pass PASS> DEVICE block_work work_of(const truth_args &t, const block_shape &shape)
{
    constexpr bool BY_KEYS = is_by_keys(PASS);
    const attn_geometry &g = t.a.g;
    const block_place place = place_of_block(t, shape, BY_KEYS);
    block_work w;
    w.o = operands_of<PASS>(t);
    w.s = place.s;
    w.b = place.b, w.h = place.h, w.hk = BY_KEYS ? place.h : place.h / g.group;
    w.row = place.row, w.part = place.part;
    w.rows = (int)(BY_KEYS ? w.s.Sk : w.s.Sq), w.columns = (int)(BY_KEYS ? w.s.Sq : w.s.Sk);
    w.first_row = first_row(g.dims, w.s, BY_KEYS, w.b, w.h) + w.row;
    /* From row to row, the first and the last visible column never decrease. The tile's columns therefore lie between
     * the first column of its first row and the last column of its last row. */
    w.begin = (int)columns_of<BY_KEYS>(g, w.s, w.row).lo / COLUMNS * COLUMNS;
    w.end = (int)columns_of<BY_KEYS>(g, w.s, min(w.row + ROWS, w.rows) - 1).hi;
    w.chunks = w.o.x.width / CHUNK, w.chunks2 = has_two_products(PASS) ? w.o.x2.width / CHUNK : 0;
    w.members = BY_KEYS ? (int)g.group : 1;
    w.from_z = w.part * WIDTH, w.width = min(WIDTH, w.o.z.width - w.from_z);
    w.scale = g.scale * (double)scale_of(g.view[ATTN_T_q_scale], w.b, w.hk) *
              (double)scale_of(g.view[ATTN_T_k_scale], w.b, w.hk);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = w.row + threadIdx.x / 32 * 16 + row_of(2 * r);
        attn_range seen = { 0, 0 };
        if (row < w.rows) seen = columns_of<BY_KEYS>(g, w.s, row);
        w.lo[r] = (int)seen.lo, w.hi[r] = (int)seen.hi;
    }
    return w;
}

/* Copies `wide` columns from `channel` on, of `count` rows, to shared memory; rows from `valid` on become zeros. */
DEVICE void load_rows(float *to, int line, const dense &from, int64_t row0, int channel, int count, int wide, int valid)
{
    const int pieces = wide / 4;
    for (int n = threadIdx.x; n < count * pieces; n += THREADS) {
        const int row = n / pieces, piece = n % pieces;
        cp_async_16(smem_addr(to + row * line + piece * 4),
                    from.data + (row0 + min(row, valid - 1)) * from.width + channel + piece * 4, row < valid);
    }
}

/* Starts to copy to shared memory all that iteration `at` will read, as one group of asynchronous copies. After the
 * last tile, the group has no copies. */
template <pass PASS> DEVICE void load(const truth_args &t, const block_work &w, float *to, const cursor &at)
{
    if (at.member < w.members && w.begin < w.end) {
        const int64_t column0 = first_column<PASS>(t, w, at.member) + at.column;
        const int valid = w.columns - at.column;
        if (at.part < w.chunks + w.chunks2) {
            const bool first = at.part < w.chunks;
            const int channel = (first ? at.part : at.part - w.chunks) * CHUNK;
            load_rows(to, LINE, first ? w.o.x : w.o.x2, w.first_row, channel, ROWS, CHUNK, w.rows - w.row);
            load_rows(to + ROWS * LINE, LINE, first ? w.o.y : w.o.y2, column0, channel, COLUMNS, CHUNK, valid);
        } else load_rows(to, Z_LINE, w.o.z, column0, w.from_z, COLUMNS, w.width, valid);
    }
    cp_async_commit();
}

/* Turns q.k into scores; hidden pairs get -inf. With options, ex.slope becomes the scores' derivatives. */
template <pass PASS>
DEVICE void finish_scores(const truth_args &t, const block_work &w, const cursor &at, fragment &S, exchange &ex)
{
    if (t.options) {
        const head_args x = head_args_of(t.a, w.b, query_head<PASS>(t, w, at.member));
        for_each([&](int n, int e) { ex.z[row_of(e)][column_of(n, e)] = S[n][e]; });
        __syncwarp();
        apply_options<is_by_keys(PASS)>(t, x, w.scale, ex, w.row + threadIdx.x / 32 * 16, at.column);
        __syncwarp();
        for_each([&](int n, int e) { S[n][e] = ex.z[row_of(e)][column_of(n, e)]; });
        return;
    }
    for_each([&](int n, int e) {
        const int column = at.column + column_of(n, e);
        const bool seen = column >= w.lo[e / 2] && column < w.hi[e / 2];
        S[n][e] = seen ? saturated_double(w.scale * S[n][e]) : -INFINITY;
    });
}

/* Returns the row_sum (softmax and delta) of a pair's query. In DQ the query is the pair's row, in DK and DV its
 * column. */
template <pass PASS>
DEVICE const row_sum &sum_of(const row_sum (&of_rows)[2], const row_sum *of_columns, const cursor &at, int n, int e)
{
    return is_by_keys(PASS) ? of_columns[at.column + column_of(n, e)] : of_rows[e / 2];
}

template <pass PASS>
DEVICE void probabilities(const row_sum (&of_rows)[2], const row_sum *of_columns, const cursor &at, fragment &S)
{
    for_each([&](int n, int e) {
        if (S[n][e] == -INFINITY) {
            S[n][e] = -0.0;
            return;
        }
        const row_sum &sum = sum_of<PASS>(of_rows, of_columns, at, n, e);
        S[n][e] = sum.top == -INFINITY ? -0.0 : exp(S[n][e] - sum.top - sum.rest);
    });
}

/* Returns dropout's factor for element e of block n of the lane's fragment, or 0 if dropout drops the pair. */
DEVICE double kept(const truth_args &t, const exchange &ex, int n, int e)
{
    return !t.a.drop_below ? 1 : signbit(ex.slope[row_of(e)][column_of(n, e)]) ? 0 : t.drop_scale;
}

/* Replaces P (in S) by dS, and sets dP to 0 for the next tile. */
template <pass PASS>
DEVICE void score_gradients(const truth_args &t, const row_sum (&of_rows)[2], const row_sum *of_columns,
                            const cursor &at, fragment &S, fragment &dP, const exchange &ex)
{
    for_each([&](int n, int e) {
        const double dp = dP[n][e];
        dP[n][e] = 0;
        if (is_hidden(S[n][e])) return;
        double ds = S[n][e] * (kept(t, ex, n, e) * dp - sum_of<PASS>(of_rows, of_columns, at, n, e).delta);
        if (t.options) ds *= fabs(ex.slope[row_of(e)][column_of(n, e)]);
        S[n][e] = ds == 0 ? 0 : ds; /* dS of a visible pair is never -0, which stands for a hidden pair */
    });
}

/* Completes the softmax of the lane's row r, and stores lse. Returns the factor by which the row of the result must be
 * multiplied. */
DEVICE double close_softmax(const truth_args &t, const block_work &w, const online_row &online, int r)
{
    const double l = sum_of_quad(online.l), z = sum_of_quad(online.seen_z);
    const int seen = sum_of_quad(online.seen), in_tile = threadIdx.x / 32 * 16 + row_of(2 * r);
    const row_sum sum = { l == 0 ? -INFINITY : online.m, l == 0 ? 0 : log(l), 0, seen == 1 ? z : NAN };
    if (w.row + in_tile < w.rows && threadIdx.x % 4 == 0 && w.part == 0) {
        if (t.to.lse) t.to.lse[w.first_row + in_tile] = sum.top + sum.rest;
        if (t.sums) t.sums[w.first_row + in_tile] = sum;
    }
    return l == 0 ? 0 : (double)scale_of(t.a.g.view[ATTN_T_v_scale], w.b, w.hk) / l;
}

template <pass PASS>
DEVICE void store_result(const truth_args &t, const block_work &w, const result_fragment &result,
                         const double (&factor)[2])
{
    double *const to = PASS == FORWARD ? t.to.out : PASS == DQ ? t.to.dq : PASS == DK ? t.to.dk : t.to.dv;
    const int64_t width = PASS == FORWARD || PASS == DV ? t.a.g.dims.Dv : t.a.g.dims.D;
    if (!to) return;
#pragma unroll
    for (int n = 0; n < N_WIDTH; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = threadIdx.x / 32 * 16 + row_of(e), column = w.from_z + column_of(n, e);
            if (w.row + row < w.rows && column < width)
                to[(w.first_row + row) * width + column] = result[n][e] * factor[e / 2];
        }
}

template <pass PASS>
__global__ void __launch_bounds__(THREADS, 2) compute(const __grid_constant__ truth_args t, block_shape shape)
{
    truth_memory &sm = block_memory<truth_memory>();
    const block_work w = work_of<PASS>(t, shape);
    if (w.row >= w.rows) return;
    exchange &ex = sm.warp[threadIdx.x / 32];
    const int tiles = w.begin < w.end ? (w.end - w.begin + COLUMNS - 1) / COLUMNS * w.members : 0;
    result_fragment result = {};
    fragment S = {}, dP = {};
    online_row online[2];
    row_sum sums[2];
    double factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = threadIdx.x / 32 * 16 + row_of(2 * r);
        if (PASS == FORWARD) online[r] = first_of_row(sink_of(t.a, w.h));
        if (PASS == DQ && w.row + row < w.rows) sums[r] = t.sums[w.first_row + row];
    }

    cursor next = { 0, w.begin, 0 }, at = next;
    for (int n = 0; n < STAGES - 1; n++, advance(w, next)) load<PASS>(t, w, sm.stage[n], next);
    for (int step = 0, stage = 0; step < tiles * (w.chunks + w.chunks2 + 1); step++, advance(w, at)) {
        cp_async_wait<STAGES - 2>();
        /* after this barrier the data of this stage (buffer) have arrived, and no warp reads the previous stage */
        __syncthreads();
        load<PASS>(t, w, sm.stage[stage == 0 ? STAGES - 1 : stage - 1], next);
        advance(w, next);
        const float *const from = sm.stage[stage];
        stage = stage == STAGES - 1 ? 0 : stage + 1;

        if (at.part < w.chunks) add_scores(S, from, from + ROWS * LINE);
        else if (at.part < w.chunks + w.chunks2) add_scores(dP, from, from + ROWS * LINE);

        const int64_t column0 = first_column<PASS>(t, w, at.member);
        if (at.part == w.chunks - 1) { /* S is complete: all chunks of q and k have been added */
            finish_scores<PASS>(t, w, at, S, ex);
            if (PASS == FORWARD) {
                const double rescale[2] = { softmax_step<0>(online[0], S), softmax_step<1>(online[1], S) };
#pragma unroll
                for (int n = 0; n < N_WIDTH; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) result[n][e] *= rescale[e / 2];
            } else probabilities<PASS>(sums, t.sums + column0, at, S);
            if (t.a.drop_below && !has_two_products(PASS))
                for_each([&](int n, int e) {
                    if (!is_hidden(S[n][e])) S[n][e] *= kept(t, ex, n, e);
                });
        }
        /* dP is complete: all chunks of dout and v have been added */
        if (has_two_products(PASS) && at.part == w.chunks + w.chunks2 - 1)
            score_gradients<PASS>(t, sums, t.sums + column0, at, S, dP, ex);
        if (at.part == w.chunks + w.chunks2) {
            const int column = at.column + threadIdx.x % 32;
            const bool strange = column < w.columns && w.o.z.strange[column0 + column];
            if (__any_sync(0xffffffff, strange)) add_strange_product(result, S, from, w.width);
            else add_product(result, S, from, w.width);
            for_each([&](int n, int e) { S[n][e] = 0; });
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++)
        factor[r] = PASS == FORWARD ? close_softmax(t, w, online[r], r) : PASS == DV ? 1 : t.a.g.scale;
    store_result<PASS>(t, w, result, factor);
}

/* ---- The kernels that run between the forward and the gradients -------------------------------------------------- */

/* Replaces a row's computed softmax by the client's lse, as cpu/reference.c does. An lse with |lse| >= ATTN_LSE_MOST is
 * ignored, except -inf. If the row sees only one key, and lse differs from the key's score only by rounding, that score
 * replaces lse. P is then exactly 1. */
DEVICE void take_given_lse(row_sum &sum, double lse)
{
    const bool counts = fabs(lse) < ATTN_LSE_MOST;
    if (!counts && lse != -INFINITY && lse == lse) return;
    const bool one_key = counts && fabs(sum.only - lse) <= (double)ATTN_LSE_SLACK * fabs(lse);
    sum.top = one_key ? sum.only : lse;
    sum.rest = 0;
}

/* Computes delta, and takes the client's lse if there is one. A warp computes one row. */
__global__ void __launch_bounds__(SMALL_BLOCK) close_rows(const __grid_constant__ truth_args t, int64_t rows)
{
    const attn_geometry &g = t.a.g;
    const attn_view &out = g.view[ATTN_T_out], &dout = g.view[ATTN_T_dout], &lse = g.view[ATTN_T_lse],
                    &dlse = g.view[ATTN_T_dlse];
    const int64_t Dv = g.dims.Dv;
    for (int64_t n = blockIdx.x * (int64_t)SMALL_ROWS + threadIdx.x / 32; n < rows; n += gridDim.x * SMALL_ROWS) {
        const row_place row = place_of_row(g.dims, false, n);
        double delta = 0;
        for (int64_t e = threadIdx.x % 32; e < Dv; e += 32) {
            const double x = out.data ? attn_load(out.dtype, out.data, attn_at(&out, row.b, row.h, row.line) + e)
                                      : t.to.out[n * Dv + e];
            delta += x * attn_load(dout.dtype, dout.data, attn_at(&dout, row.b, row.h, row.line) + e);
        }
        for (int lane = 16; lane; lane /= 2) delta += __shfl_xor_sync(0xffffffff, delta, lane);
        if (threadIdx.x % 32) continue;
        row_sum sum = t.sums[n];
        if (dlse.data) delta -= attn_load(dlse.dtype, dlse.data, attn_at(&dlse, row.b, row.h, row.line));
        if (lse.data) take_given_lse(sum, attn_load(lse.dtype, lse.data, attn_at(&lse, row.b, row.h, row.line)));
        sum.delta = delta;
        t.sums[n] = sum;
    }
}

/* ---- Functions of the host that plan and launch ------------------------------------------------------------------ */

/* Operations per second on chips whose tensor cores compute doubles (RATE), and on chips of compute capability 8.6, 8.7
 * and 8.9 (RATE_OF_FEW), which compute doubles at a 64th of their float32 rate. OPTIONS_COST: factor by which options
 * lengthen a problem. Measured with head size 128, in operations per second: 2.1e13 (forward) and 1.8e13 (backward) on
 * an H100, and 0.3 times these rates on an A100. All options together made a problem take 3.8 times as long. */
const double RATE = 1.8e13, RATE_OF_FEW = 2.5e11, OPTIONS_COST = 4;
const double BYTES_PER_SECOND = 5e11;

double rate_of(const cuda_chip *chip)
{
    const bool few = chip->major == 8 && chip->minor != 0;
    return few ? RATE_OF_FEW * chip->multiprocessors / 84
               : RATE / (chip->major == 8 ? 4 : 1) * chip->multiprocessors / 132;
}

int padded(int64_t channels)
{
    return (int)(attn_tiles(channels, CHUNK) * CHUNK);
}

double flops_of_pair(const attn_dims &d, pass p)
{
    const int D = padded(d.D), Dv = padded(d.Dv), width = p == FORWARD || p == DV ? Dv : D;
    return 2.0 * (double)(attn_tiles(width, WIDTH) * (D + (has_two_products(p) ? Dv : 0)) + width);
}

struct layout {
    truth_args t;
    int64_t bytes;
    bool overflows;
};

/* Reserves `count` elements in the workspace, and sets `to` to their address. `base` is the start of the workspace, or
 * NULL if only the size is needed. */
template <typename T> void take(layout &l, char *base, T *&to, int64_t count, int64_t each)
{
    int64_t bytes;
    to = (T *)(base + l.bytes);
    if (__builtin_mul_overflow(count, each * (int64_t)sizeof(T), &bytes) ||
        __builtin_add_overflow(l.bytes, (bytes + 255) & ~INT64_C(255), &l.bytes) || bytes > INT64_MAX / 4)
        l.overflows = true, l.bytes = 0;
}

layout lay_out(const attn_problem *p, const attn_truth *to, char *base)
{
    layout l = {};
    const attn_geometry g = attn_geometry_of(p);
    const bool backward = p->op == ATTN_OP_BACKWARD;
    const int64_t queries = dense_rows(g.dims, false), keys = dense_rows(g.dims, true);
    const auto take_dense = [&](dense &d, int64_t rows, int64_t channels) {
        d.width = padded(channels);
        take(l, base, d.data, rows, d.width);
        take(l, base, d.strange, rows, 1);
    };
    take_dense(l.t.q, queries, g.dims.D);
    take_dense(l.t.k, keys, g.dims.D);
    take_dense(l.t.v, keys, g.dims.Dv);
    if (to) l.t.to = *to;
    if (backward) {
        take_dense(l.t.dout, queries, g.dims.Dv);
        take(l, base, l.t.sums, queries, 1);
        /* Memory for out in the workspace. It is reserved even if the caller has memory for out, so that the size does
         * not depend on the requested results. */
        double *out;
        take(l, base, out, queries, g.dims.Dv);
        if (!l.t.to.out) l.t.to.out = out;
    }
    return l;
}

unsigned small_grid(int64_t rows, int rows_of_block)
{
    return (unsigned)attn_min64(attn_tiles(rows, rows_of_block), MOST_BLOCKS);
}

template <pass PASS> cudaError_t launch_pass(const cuda_chip *chip, cudaStream_t stream, truth_args t)
{
    const attn_dims &d = t.a.g.dims;
    const bool keys = is_by_keys(PASS);
    const int64_t rows = row_tiles(d, keys), width = operands_of<PASS>(t).z.width;
    const block_shape shape = { rows, attn_max64(attn_tiles(width, WIDTH), 1) };
    const int64_t heads = (keys ? d.Hk : d.H) * (packed_rows(d, keys) ? 1 : d.B), blocks = heads * rows * shape.parts;
    const size_t bytes = t.options ? sizeof(truth_memory) : offsetof(truth_memory, warp);
    const double pairs = (double)query_rows(d) * (double)keys_of_row(t.a.g),
                 seconds = pairs * flops_of_pair(d, PASS) / rate_of(chip) * (t.options ? OPTIONS_COST : 1);
    if (blocks == 0) return cudaSuccess;
    cudaError_t code = allow_shared<compute<PASS>>(sizeof(truth_memory));
    if (code != cudaSuccess) return code;
    in_steps(chip, blocks, seconds / (double)blocks, [&](int64_t first, int64_t count) {
        t.first_block = first;
        compute<PASS><<<(unsigned)count, THREADS, bytes, stream>>>(t, shape);
    });
    return cudaPeekAtLastError();
}

/* Converts the inputs to float32. Fills the results with 0, and lse with -inf, for padding rows, which no pass
 * writes. */
cudaError_t prepare(cudaStream_t stream, const truth_args &t, bool backward)
{
    const attn_dims &d = t.a.g.dims;
    const int64_t queries = dense_rows(d, false), keys = dense_rows(d, true);
    const struct {
        attn_tensor_id id;
        bool keys;
        int64_t D;
        const dense &to;
    } inputs[] = { { ATTN_T_q, false, d.D, t.q },
                   { ATTN_T_k, true, d.D, t.k },
                   { ATTN_T_v, true, d.Dv, t.v },
                   { ATTN_T_dout, false, d.Dv, t.dout } };
    for (int n = 0; n < (backward ? 4 : 3); n++) {
        const int64_t rows = inputs[n].keys ? keys : queries;
        if (rows == 0) continue;
        widen<<<small_grid(rows, SMALL_ROWS), SMALL_BLOCK, 0, stream>>>(t, inputs[n].id, inputs[n].keys, rows,
                                                                        inputs[n].D, inputs[n].to);
    }
    const struct {
        double *to;
        int64_t count;
        double value;
    } outputs[] = { { t.to.out, queries * d.Dv, 0 },
                    { t.to.lse, queries, -INFINITY },
                    { (double *)t.sums, queries * (int64_t)(sizeof(row_sum) / sizeof(double)), 0 },
                    { t.to.dq, queries * d.D, 0 },
                    { t.to.dk, keys * d.D, 0 },
                    { t.to.dv, keys * d.Dv, 0 } };
    for (const auto &output : outputs)
        if (output.to && output.count > 0)
            fill<<<small_grid(output.count, SMALL_BLOCK), SMALL_BLOCK, 0, stream>>>(output.to, output.count,
                                                                                    output.value);
    return cudaPeekAtLastError();
}

} // namespace

bool cuda_truth_need(const cuda_chip *chip, const attn_problem *p, attn_truth_cost *cost)
{
    const layout l = lay_out(p, nullptr, nullptr);
    const attn_dims d = attn_dims_of(p);
    const bool backward = p->op == ATTN_OP_BACKWARD;
    attn_plan plan = {};
    plan.problem = p, plan.features = attn_features(p);
    const double pairs = attn_flops(p) / (double)(2 * (d.D + d.Dv)) / (backward ? 2.5 : 1);
    double flops = flops_of_pair(d, FORWARD);
    for (pass each : { DQ, DK, DV }) flops += backward ? flops_of_pair(d, each) : 0;
    cost->workspace_bytes = (size_t)l.bytes;
    cost->seconds = pairs * flops / rate_of(chip) * (has_options(&plan) ? OPTIONS_COST : 1) +
                    (double)l.bytes / BYTES_PER_SECOND;
    return !l.overflows;
}

cudaError_t cuda_truth(const cuda_chip *chip, cudaStream_t stream, const attn_problem *p, const attn_truth *to,
                       void *workspace)
{
    layout l = lay_out(p, to, (char *)workspace);
    truth_args &t = l.t;
    attn_plan plan = {};
    const bool backward = p->op == ATTN_OP_BACKWARD;
    plan.problem = p, plan.features = attn_features(p), plan.geometry = attn_geometry_of(p);
    t.a = cuda_args_of(chip, &plan);
    t.drop_scale = 1 / (1 - p->dropout_p);
    t.options = has_options(&plan);
#define X(name, id, least, most, rule, meaning) t.scores.name = t.a.g.name;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    const int64_t queries = dense_rows(t.a.g.dims, false);
    cudaError_t code = cudaSuccess;
    if (takes_step(chip, (double)l.bytes / BYTES_PER_SECOND)) code = prepare(stream, t, backward);
    if (code == cudaSuccess) code = launch_pass<FORWARD>(chip, stream, t);
    if (!backward) return code;
    if (code == cudaSuccess && queries > 0 &&
        takes_step(chip, (double)(queries * t.a.g.dims.Dv * 16) / BYTES_PER_SECOND)) {
        close_rows<<<small_grid(queries, SMALL_ROWS), SMALL_BLOCK, 0, stream>>>(t, queries);
        code = cudaPeekAtLastError();
    }
    if (code == cudaSuccess && to->dq) code = launch_pass<DQ>(chip, stream, t);
    if (code == cudaSuccess && to->dk) code = launch_pass<DK>(chip, stream, t);
    if (code == cudaSuccess && to->dv) code = launch_pass<DV>(chip, stream, t);
    return code;
}
