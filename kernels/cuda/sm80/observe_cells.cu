/* observe_cells.cu: two outputs of an observe (statistics of attention weights), on tensor cores: `weights`, the
 * probabilities P of the queries and keys that the request selects, and `map`. The map divides these queries and keys
 * into a grid of cells, and has the sum of P of each cell.
 *
 * Cells may have any size. A warp computes a strip (some neighbouring queries). For each row u and column v of the map,
 * it stores the sum of P over its queries in row u and the keys in column v. observe.cu then adds up the sums of all
 * strips in order.
 *
 * A tile of keys is divided into runs (neighbouring keys in the same column v). A lane adds up a run for each of its
 * queries, and the warp adds up the queries of each row u. If columns are narrow, P goes through shared memory: each
 * lane adds up the runs of one query (add_runs), and then the queries of some cells (add_cells). */
#include "observe_tiles.cuh"

namespace {

template <int D, bool SCORE_MODS> struct shared {
    stages<D, SCORE_MODS> tiles;
    scores_on_their_way<shape<D, SCORE_MODS>> way;
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
    /* P of a tile, for a map whose columns have at most NARROW keys. If there are options (softcap, bias, masks, ...),
     * this array is not used, and `way` holds P. */
    float P[SCORE_MODS ? 1 : shape<D, SCORE_MODS>::BM][SCORE_MODS ? 1 : shape<D, SCORE_MODS>::BN + 1];

    DEVICE float *line(int row)
    {
        if constexpr (SCORE_MODS) return way.S[row];
        else return P[row];
    }
};

/* if the map's columns have at most this many keys, P goes through shared memory */
const int NARROW = 32;

/* Divides `size` rows (or keys) into `cells` cells, and returns the first row (or key) of cell `cell`. If this cell is
 * empty, returns the first row of the next cell that is not empty. */
DEVICE int first_of_cell(int64_t cell, int64_t cells, int64_t size)
{
    return (int)attn_tiles(cell * size, cells);
}

/* A column of a map. It ends before key `end` (counted from the first key that the request selects), and begins where
 * the previous column ends. next() advances to the next column without a division. */
struct map_column {
    int v, end;
    /* The map divides `size` keys into `cells` columns. size / cells is `whole` with the remainder `rest`; (v + 1) *
     * size / cells has the remainder `left`. */
    int size, cells, whole, rest, left;

    DEVICE map_column(int first, int keys, int columns)
    {
        v = first, size = keys, cells = columns;
        whole = size / cells, rest = size % cells;
        const int64_t up = (int64_t)(v + 1) * size;
        left = (int)(up % cells);
        end = (int)(up / cells) + (left > 0);
    }
    DEVICE void next()
    {
        const int was = left > 0;
        v++;
        end += whole - was;
        left += rest;
        if (left >= cells) left -= cells, end++;
        end += left > 0;
    }
};

/* The rows of a map that contain queries of a strip (a warp's queries). There are `count` such rows. Lane n has the
 * n-th of them: its number u in the map, and the queries [begin, end) of the strip that this row contains. */
struct strip_rows {
    int count, u, begin, end;

    DEVICE strip_rows(int r0, int r1, int64_t cells, int64_t size)
    {
        const int lane = threadIdx.x % 32;
        count = u = begin = end = 0;
        if (r0 >= r1) return;
        const int first = (int)((int64_t)r0 * cells / size), last = (int)((int64_t)(r1 - 1) * cells / size);
        /* whether each row of the map has at most one query, because there are more rows than queries */
        const bool single = cells > size;
        count = single ? r1 - r0 : last - first + 1;
        u = single ? (int)((int64_t)(r0 + lane) * cells / size) : first + lane;
        begin = single ? lane : max(first_of_cell(u, cells, size), r0) - r0;
        end = single ? lane + 1 : min(first_of_cell(u + 1, cells, size), r1) - r0;
        if (lane >= count) begin = end = 0;
    }
};

template <class Shape, int NT>
DEVICE void add_run(const float (&P)[Shape::MT][NT][4], int c0, int c1, float (&sum)[Shape::MT][2])
{
    const bool whole = c0 == 0 && c1 == Shape::BN;
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        if (nt * 8 + 8 <= c0 || nt * 8 >= c1) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int c = nt * 8 + column + e;
            if (!whole && (c < c0 || c >= c1)) continue;
#pragma unroll
            for (int mt = 0; mt < Shape::MT; mt++)
#pragma unroll
                for (int half = 0; half < 2; half++) sum[mt][half] += P[mt][nt][half * 2 + e];
        }
    }
}

template <class Shape> DEVICE float sum_of_rows(const float (&sum)[Shape::MT][2], int begin, int end)
{
    const int row = threadIdx.x % 32 / 4;
    float all = 0;
#pragma unroll
    for (int mt = 0; mt < Shape::MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = mt * 16 + half * 8 + row;
            if (r >= begin && r < end) all += sum[mt][half];
        }
    return warp_sum(all);
}

/* Divides keys c to c1 - 1 of the tile into runs (a run is the keys in one column of the map), and adds up one query's
 * P over each run. The sums replace P in `line`, and the number of runs is returned. `column` is the column of the
 * first run, and becomes that of the last run. `first` is the distance from the first key that the request selects to
 * the tile's key 0; it is negative if the tile begins earlier. */
DEVICE int add_runs(float *line, bool mine, int first, int c, int c1, map_column &column)
{
    for (int runs = 0;; column.next()) {
        const int end = min(c1, column.end - first);
        float sum = 0;
        if (mine)
            for (int n = c; n < end; n++) sum += line[n];
        if (mine) line[runs] = sum;
        runs++;
        c = end;
        if (c == c1) return runs;
    }
}

/* Returns the sum over queries [begin, end) of run number `run` (the tile's keys in one column of the map). `lines` has
 * one line of run sums per query, `pitch` numbers apart. */
DEVICE float sum_of_run(const float *lines, int pitch, int begin, int end, int run)
{
    float sum = 0;
    for (int r = begin; r < end; r++) sum += lines[r * pitch + run];
    return sum;
}

/* Adds the P of one tile to the cells of a map. The tile's keys form `runs` runs: each run is the tile's keys in one
 * column of the map, and the first run is in column v. `open` is the unfinished sum of the first run's cell, and
 * becomes that of the last run's cell. `to` points to this warp's sums of cells, at row 0 of the map. If a cell ends in
 * the tile, its sum is stored there. */
DEVICE void add_cells(const float *lines, int pitch, const strip_rows &of_map, int runs, int v, int64_t columns,
                      float *to, double &open)
{
    const int lane = threadIdx.x % 32, inner = runs - 2;
    open += (double)sum_of_run(lines, pitch, of_map.begin, of_map.end, 0);
    if (runs == 1) return;
    if (lane < of_map.count) to[of_map.u * columns + v] = (float)open;
    for (int first = 0; first < inner * of_map.count; first += 32) {
        const int at = first + lane, n = at / inner, run = 1 + at % inner;
        const int begin = __shfl_sync(ALL_LANES, of_map.begin, n), end = __shfl_sync(ALL_LANES, of_map.end, n),
                  u = __shfl_sync(ALL_LANES, of_map.u, n);
        if (n < of_map.count) to[u * columns + v + run] = sum_of_run(lines, pitch, begin, end, run);
    }
    open = (double)sum_of_run(lines, pitch, of_map.begin, of_map.end, runs - 1);
}

/* Sets the scores of rows with a base of INFINITY to -inf, so that P is 0 and not NaN. (Such rows have only P of 0, or
 * tensor cores cannot compute them.) */
template <int MT, int NT> DEVICE void hide_rows_without_base(float (&S)[MT][NT][4], const float (&base)[MT][2])
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (base[mt][e / 2] == CUDART_INF_F) S[mt][nt][e] = -CUDART_INF_F;
}

template <class V>
__global__ void __launch_bounds__(V::Shape::THREADS, V::Shape::BLOCKS)
    cells_of_tiles(const __grid_constant__ cuda_args a, float scale_log2, const __grid_constant__ tile_rows rows,
                   const __grid_constant__ observed_cells cells)
{
    typedef typename V::T T;
    typedef typename V::Shape Shape;
    const int D = V::D, BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS;
    const bool SCORE_MODS = V::SCORE_MODS;
    typedef shared<V::D, V::SCORE_MODS> memory;
    memory &sm = block_memory<memory>();
    const attn_geometry &g = a.g;
    const attn_observe &o = g.observe;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int number;
    const int tile = shared_tile(a, cells.blocks, &number);
    const head_args x = head_args_of(a, g.dims.packed ? o.sequence : blockIdx.z, blockIdx.y);
    const limits limit = limits_of(g, x.s);
    /* the block has queries [q0, q1) and keys [k0, k1); [v0, v1) are its columns of the map, or for the output
     * `weights` its tiles of BN keys */
    const int height = (int)(o.rows[1] - o.rows[0]), width = (int)(o.keys[1] - o.keys[0]), r0 = tile * BM;
    const int q0 = (int)o.rows[0] + r0, q1 = (int)attn_min64(attn_min64(q0 + BM, o.rows[1]), x.s.Sq);
    const int parts = cells.map ? (int)o.map[1] : (width + BN - 1) / BN;
    const int v0 = (int)((int64_t)parts * number / cells.blocks),
              v1 = (int)((int64_t)parts * (number + 1) / cells.blocks);
    const int k0 = (int)o.keys[0] + (cells.map ? first_of_cell(v0, parts, width) : v0 * BN),
              k1 = (int)o.keys[0] + (cells.map ? first_of_cell(v1, parts, width) : min(v1 * BN, width));
    if (q0 >= q1) return;
    key_range keys = keys_seen<BN>(limit, q0, q1);
    keys.first = max(keys.first, k0 / BN), keys.last = min(keys.last, (k1 + BN - 1) / BN);
    if (keys.first >= keys.last) return;
    const loader<D, THREADS> Q(g.view[ATTN_T_q], x.b, x.h, x.s.q_start, x.s.Sq, g.dims.D);
    Q.template load<BM>(sm.tiles.tile[0], q0);
    cp_async_commit();
    if constexpr (V::SCORE_MODS) list_seen_keys<BN, THREADS>(a, x.b, x.h, q0, q1, keys.first, keys.last, sm.seen);
    key_loader<T, D, THREADS, false, V::PAGED> K(g, g.view[ATTN_T_k], x.b, x.hk, x.s.k_start, limit.Sk, g.dims.D);

    float base[MT][2], inverse[MT][2];
    /* whether this kernel leaves out P of some row of the warp's tile, because that row lies behind the last query or
     * tensor cores cannot compute it */
    bool skips = false;
    for_own_rows<Shape>([&](int mt, int half, int r) {
        const float2 end = q0 + r < q1 ? rows.end[lse_at(a, x, q0 + r)] : make_float2(CUDART_INF_F, 0);
        base[mt][half] = end.x;
        inverse[mt][half] = end.y;
        skips |= base[mt][half] == CUDART_INF_F;
    });
    skips = __any_sync(0xffffffff, skips);
    const int strip = r0 / (16 * MT) + warp, s0 = r0 + warp * 16 * MT;
    const strip_rows of_map(s0, min(s0 + 16 * MT, q1 - (int)o.rows[0]), cells.map ? o.map[0] : 1, height);
    map_column column(cells.map ? v0 : 0, width, cells.map ? parts : 1);
    float *const of_strip =
        cells.part + ((x.b * (g.dims.packed ? 0 : g.dims.H) + x.h) * (cells.strips + o.map[0]) + strip) * o.map[1];
    float *const to = of_strip + of_map.u * o.map[1];
    const bool narrow = cells.map && width >= parts && width <= (int64_t)NARROW * parts;
    /* Lane n has the unfinished sum of one cell. The cell lies in the current column, and in the n-th of the map's rows
     * that contain queries of this warp. */
    double open = 0;
    const attn_view &weights = g.view[ATTN_T_weights];
    uint32_t own[MT][D / 16][4];
    cp_async_wait<0>();
    __syncthreads();
    take_rows<D, Shape>(own, smem_addr(&sm) + lane_down<D>(lane));
    __syncthreads();

    const auto from = [&](int n) {
        if constexpr (V::SCORE_MODS) return seen_tile_above(sm.seen, n - 1, keys.last);
        else return n;
    };
    for_tiles<T, D, Shape>(
        sm.tiles.tile, own, from(keys.first), keys.last,
        [&](uint16_t(&to)[BN * D], int n) { K.template load<BN>(to, n * BN); }, [] { __syncthreads(); },
        [&](int n) { return from(n + 1); },
        [&](float(&S)[MT][BN / 8][4], int n, int, int) {
            finish_scores<Shape>(S, sm.way, a, x, limit, q0, n, n < keys.free_first || n >= keys.free_last);
            if (skips) hide_rows_without_base(S, base);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int nt = 0; nt < BN / 8; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float &s = S[mt][nt][e];
                        s = exp2_fast(exponent<SCORE_MODS>(s, scale_log2, base[mt][e / 2])) * inverse[mt][e / 2];
                    }
            int lo = max(n * BN, k0);
            const int hi = min(n * BN + BN, k1);
            if (!cells.map) {
                for_own_rows<Shape>([&](int mt, int half, int r) {
                    if (q0 + r >= q1) return;
                    float *const row = (float *)weights.data + attn_at(&weights, x.b, x.h, r0 + r);
#pragma unroll
                    for (int nt = 0; nt < BN / 8; nt++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int j = n * BN + nt * 8 + lane % 4 * 2 + e;
                            if (j >= lo && j < hi) row[j - o.keys[0]] = S[mt][nt][half * 2 + e];
                        }
                });
                return;
            }
            const auto end_columns_before = [&](int j) {
                while (j - (int)o.keys[0] >= column.end) {
                    if (lane < of_map.count) to[column.v] = (float)open;
                    open = 0;
                    column.next();
                }
            };
            if (narrow) {
                end_columns_before(lo);
                for_own_rows<Shape>([&](int mt, int half, int r) {
#pragma unroll
                    for (int nt = 0; nt < BN / 8; nt++)
#pragma unroll
                        for (int e = 0; e < 2; e++) sm.line(r)[nt * 8 + lane % 4 * 2 + e] = S[mt][nt][half * 2 + e];
                });
                __syncwarp();
                float *const lines = sm.line(warp * 16 * MT);
                const int pitch = (int)(sm.line(1) - sm.line(0)), v = column.v;
                const int runs = add_runs(lines + lane % (16 * MT) * pitch, lane < 16 * MT, n * BN - (int)o.keys[0],
                                          lo - n * BN, hi - n * BN, column);
                __syncwarp();
                add_cells(lines, pitch, of_map, runs, v, o.map[1], of_strip, open);
                return;
            }
            while (lo < hi) {
                end_columns_before(lo);
                const int end = min(hi, (int)o.keys[0] + column.end);
                float sum[MT][2] = {};
                add_run<Shape>(S, lo - n * BN, end - n * BN, sum);
                for (int u = 0; u < of_map.count; u++) {
                    const float part = sum_of_rows<Shape>(sum, __shfl_sync(0xffffffff, of_map.begin, u),
                                                          __shfl_sync(0xffffffff, of_map.end, u));
                    if (lane == u) open += (double)part;
                }
                lo = end;
            }
        });
    if (cells.map && lane < of_map.count) to[column.v] = (float)open;
}

} // namespace

cudaError_t observe_cells_pass(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, const tile_rows &rows,
                               const observed_cells &cells, cudaStream_t stream)
{
    return with_variant(plan, [&](auto v) {
        typedef decltype(v) V;
        const attn_dims &d = a.g.dims;
        const int64_t height = a.g.observe.rows[1] - a.g.observe.rows[0];
        const dim3 grid((unsigned)attn_tiles(height, V::Shape::BM), (unsigned)d.H, (unsigned)(d.packed ? 1 : d.B));
        return launch_share<cells_of_tiles<V>>(chip, a, grid, cells.blocks, V::Shape::THREADS,
                                               sizeof(shared<V::D, V::SCORE_MODS>), stream, (float)a.g.scale * LOG2E,
                                               rows, cells);
    });
}

int observe_strip_rows(const attn_plan *plan)
{
    return with_variant(plan, [](auto v) { return 16 * decltype(v)::Shape::MT; });
}

size_t observe_cells_shared(const attn_plan *plan)
{
    return with_variant(plan, [](auto v) { return sizeof(shared<decltype(v)::D, decltype(v)::SCORE_MODS>); });
}
