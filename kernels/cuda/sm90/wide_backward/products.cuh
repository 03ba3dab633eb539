/* products.cuh: the kernel of the wide backward that computes gradients from P and dS of one part of the problem, which
 * the kernel of scores.cuh has stored in memory:
 *
 *     dV = P^T dO     dK = dS^T Q     128 keys and COLUMNS columns; sums over the part's queries that see the keys, of
 *                                     all query heads of the group
 *     dQ = dS K                       128 queries and COLUMNS columns; sums over the keys that the queries see
 *
 * A block claims such products from a counter. Each of its two consumers computes 64 of the 128 rows. If a part does
 * not have all row tiles of its key/value head, the float32 sums of dK and dV pass to the next part through memory. The
 * order of additions does not depend on the parts, and neither do the bits of the gradients.
 *
 * Rows past the end of a sequence are set to zero in shared memory, because P = 0 times NaN is NaN. Rows of a result
 * that are not finite get a mark, and a later launch recomputes them. */
#ifndef ATTN_SM90_WIDE_PRODUCTS_CUH
#define ATTN_SM90_WIDE_PRODUCTS_CUH

#include "kernels/cuda/sm90/wide_backward/kept.cuh"

namespace {

/* registers per thread of the producer warpgroup, and of a consumer warpgroup */
enum { PRODUCTS_PRODUCER = 88, PRODUCTS_CONSUMER = 208 };

/* A piece of work: 128 rows and COLUMNS columns of a gradient, summed over the queries or keys in this part of the
 * problem. */
struct product_work {
    attn_tensor_id gradient; /* dq, dk or dv; ATTN_TENSOR_COUNT: there is no more work */
    int b, head;             /* query head of dq, or key/value head of dk and dv */
    int line, rows;          /* first row of the gradient's tensor, and number of rows to write, at most 128 */
    int column0;
    int64_t mark; /* index of the first row in cuda_args::rows_later (dq) or keys_later (dk, dv) */
    bool empty;   /* whether no query or key contributes to the sum; consumers then get one buffer without operands */
    int sums;     /* index of this piece's float32 sums in kept_plan::sums, counted in pieces of work */
};

template <int COLUMNS> using products_shared = kept_shared<ROWS * STEP, (COLUMNS + 63) / 64 * BLOCK, product_work>;

/* ---- The warpgroup that loads operands (producer) ---------------------------------------------------------------- */

template <int COLUMNS> struct product_loader {
    static const int BOXES = (COLUMNS + 63) / 64;
    products_shared<COLUMNS> &sm;
    const cuda_args &a;
    const kept_plan &p;
    const kept_maps &m;
    ring<STAGES> at;
    int work = 0;
    bool begun, waiting; /* begun: the piece of work is published; waiting: `step` is not loaded yet */
    product_work y;
    /* The step (64 queries or keys of the sum) that is known but not loaded yet. `blocks`: where P or dS is. `map`,
     * `place`: where the other operand is. `exist`: how many rows the other operand has from there on. */
    struct {
        const uint16_t *blocks;
        const CUtensorMap *map;
        tma_place place;
        int exist;
    } step;

    DEVICE product_loader(products_shared<COLUMNS> &sm_, const cuda_args &a_, const kept_plan &p_, const kept_maps &m_)
        : sm(sm_), a(a_), p(p_), m(m_)
    {
    }

    DEVICE void publish()
    {
        await_empty(sm.bars, at);
        sm.works[work] = y;
        if (++work == WORKS) work = 0;
    }

    DEVICE void load(bool last)
    {
        const uint32_t bar = smem_addr(&sm.bars.full[at.stage]), first = smem_addr(sm.stages[at.stage].first),
                       second = smem_addr(sm.stages[at.stage].second);
        const bool queries = y.gradient == ATTN_T_dq;
        if (!begun) y.empty = false, publish(), begun = true;
        await_empty(sm.bars, at);
        sm.steps[at.stage] = { min(step.exist, (int)STEP), last };
        mbarrier_arrive_expect_tx(bar, (2 + BOXES) * BLOCK * 2);
        if (queries) {
            bulk_load(first, step.blocks, BLOCK * 2, bar);
            bulk_load(first + BLOCK * 2, step.blocks + HALF_TILE / 2, BLOCK * 2, bar);
        } else bulk_load(first, step.blocks, 2 * BLOCK * 2, bar);
        for (int c = 0; c < BOXES; c++)
            tma_load_4d(second + c * BLOCK * 2, step.map, y.column0 + c * STEP, step.place.row, step.place.h,
                        step.place.b, bar);
        at.next();
    }
    /* Adds a step (64 queries or keys of the sum) to the piece of work. The previous step is loaded only now, because
     * it is now known not to be the last one. */
    DEVICE void add(const uint16_t *blocks, const CUtensorMap *map, const tma_place &place, int exist)
    {
        if (waiting) load(false);
        step = { blocks, map, place, exist };
        waiting = true;
    }
    /* Ends a piece of work. `wanted`: the consumers must process it even if no query or key contributes to the sum,
     * because they must write zeros or the sums of earlier parts. */
    DEVICE void end(bool wanted)
    {
        if (waiting) load(true);
        else if (wanted) {
            y.empty = true;
            publish();
            mbarrier_arrive(smem_addr(&sm.bars.full[at.stage]));
            at.next();
        }
    }

    /* Loads the operands for dK or dV of a block of 128 keys of a head. `n`: index of the product among the products
     * for these keys; the products for dV come first. */
    DEVICE void load_keys(int head, int block, int n, int per_block)
    {
        const attn_geometry &g = a.g;
        const attn_dims &d = g.dims;
        const int Hk = (int)d.Hk, group = (int)g.group, all = p.part.head + head, hk = all % Hk,
                  columns_dv = g.view[ATTN_T_dv].data ? p.columns_Dv : 0;
        int b = all / Hk, tile = block;
        if (d.packed) {
            b = sequence_of_tile(g.cu_k, d.B, ROWS, 1, block);
            tile -= g.cu_k[b] / ROWS + b;
        }
        const attn_sequence s = attn_sequence_of(&g, b);
        const int j0 = tile * ROWS, Sq = (int)s.Sq, batch = d.packed ? 0 : b,
                  rows = min((int)(d.packed ? s.Sk : d.Sk) - j0, (int)ROWS);
        if (rows <= 0) return;
        const bool of_v = n < columns_dv;
        y.gradient = of_v ? ATTN_T_dv : ATTN_T_dk;
        y.b = b, y.head = hk;
        y.line = (int)s.k_start + j0, y.rows = rows;
        y.column0 = (of_v ? n : n - columns_dv) * COLUMNS;
        y.mark = (d.packed ? hk : (int64_t)all) * d.Sk + y.line;
        y.sums = block * per_block + n;
        const key_band band = band_of(g, s);
        const int last_key = min(j0 + ROWS, band.Sk) - 1, base = first_row_tile(g, b);
        int first = 0, last = 0; /* steps `first` to `last` - 1 (64 queries each) see at least one of the keys */
        if (last_key >= j0) {
            first = max(j0 - band.hi + 1, 0) / STEP;
            last = max((min(last_key - band.lo + 1, Sq) + STEP - 1) / STEP, first);
        }
        for (int member = 0; member < group; member++) {
            const int h = hk * group + member, zero = member * p.query_tiles + base,
                      from = max(first, (p.part.row - zero) * 2), to = min(last, (p.part.row + p.part.rows - zero) * 2);
            bool visible = false;
            for (int q = from; q < to; q++) {
                const int i0 = q / 2 * ROWS;
                const key_tiles keys = keys_of_rows(band, i0, Sq);
                if (j0 / KEYS < keys.first || j0 / KEYS >= keys.last) continue;
                if (q == from || q % 2 == 0) visible = shows(a, p, b, h, i0, Sq, j0 / KEYS);
                if (!visible) continue;
                const uint16_t *const kept = kept_at(p, head, zero + q / 2, keys.first, j0 / KEYS);
                add(kept + (of_v ? 0 : HALF_TILE) + q % 2 * (HALF_TILE / 2) + j0 % KEYS / STEP * BLOCK,
                    of_v ? &m.dO_step : &m.Q_step, { 0, (int)s.q_start + q * STEP, h, batch }, Sq - q * STEP);
            }
        }
        end(p.part.first || p.part.last);
    }

    DEVICE void load_queries(int head, int row, int n)
    {
        const attn_dims &d = a.g.dims;
        const row_tile x = row_tile_of(a, p, p.part.head + head, row);
        if (x.i0 >= x.Sq) return;
        y.gradient = ATTN_T_dq;
        y.b = x.b, y.head = x.h;
        y.line = (int)x.s.q_start + x.i0, y.rows = min(x.Sq - x.i0, (int)ROWS);
        y.column0 = n * COLUMNS;
        y.mark = x.b * a.lse_batch + x.h * a.lse_head + y.line;
        const key_tiles steps = key_tiles_of<STEP>(x.band, x.i0, min(x.i0 + ROWS, x.Sq));
        bool visible = false;
        for (int k = steps.first; k < steps.last; k++) {
            const int key_tile = k / (KEYS / STEP);
            if (k == steps.first || k % (KEYS / STEP) == 0) visible = shows(a, p, x.b, x.h, x.i0, x.Sq, key_tile);
            if (!visible) continue;
            add(kept_at(p, head, row, x.keys.first, key_tile) + HALF_TILE + k % (KEYS / STEP) * BLOCK, &m.K_step,
                { 0, (int)x.s.k_start + k * STEP, x.hk, d.packed ? 0 : x.b }, (int)x.s.Sk - k * STEP);
        }
        end(true);
    }

    /* Claims products and loads their operands. Within a head, the longest sums under a causal mask come first: those
     * of the first keys and of the last queries. */
    DEVICE void run()
    {
        const attn_geometry &g = a.g;
        const int per_block = (g.view[ATTN_T_dv].data ? p.columns_Dv : 0) + (g.view[ATTN_T_dk].data ? p.columns_D : 0),
                  per_head = p.key_blocks * per_block, of_keys = per_head * p.part.heads,
                  per_query_head = p.part.rows * p.columns_D,
                  end_of_all = of_keys + (g.view[ATTN_T_dq].data ? per_query_head * p.part.heads : 0);
        fence_proxy_async_global();
#pragma unroll 1
        for (int t = (int)blockIdx.x; t < end_of_all; t = (int)gridDim.x + atomicAdd(p.counter, 1)) {
            begun = waiting = false;
            if (t < of_keys) {
                const int head = t / per_head, n = t - head * per_head;
                load_keys(head, n / per_block, n % per_block, per_block);
            } else {
                const int n = t - of_keys, head = n / per_query_head, r = n - head * per_query_head;
                load_queries(head, p.part.row + p.part.rows - 1 - r / p.columns_D, r % p.columns_D);
            }
        }
        y.gradient = ATTN_TENSOR_COUNT;
        publish();
        mbarrier_arrive(smem_addr(&sm.bars.full[at.stage]));
        leave_counter(p.counter);
    }
};

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

template <typename T, int COLUMNS> struct product_maker {
    typedef typename products_shared<COLUMNS>::stage stage;
    static const int BOXES = product_loader<COLUMNS>::BOXES;
    const cuda_args &a;
    const kept_plan &p;
    products_shared<COLUMNS> &sm;
    consumer<2> me;
    ring<STAGES> at;
    const mn_major_low<STEP> by_keys; /* P^T or dS^T, the operand of products whose rows are keys */
    const k_major_low<STEP> by_queries;
    const mn_major_low<STEP> first_other;

    DEVICE product_maker(const cuda_args &a_, const kept_plan &p_, products_shared<COLUMNS> &sm_, int w)
        : a(a_), p(p_), sm(sm_), me(w), by_keys(smem_addr(sm_.stages[0].first) + w * BLOCK * 2),
          by_queries(smem_addr(sm_.stages[0].first) + w * BLOCK * 2), first_other(smem_addr(sm_.stages[0].second))
    {
    }

    /* Issues the product of the operands in a buffer. Returns whether this is the last buffer of its piece of work.
     * KEYWISE: the gradient's rows are keys, so P or dS is used M-major. */
    template <bool KEYWISE> DEVICE bool issue(float (&sums)[COLUMNS / 2])
    {
        await_full(sm.bars, at);
        const int rows = sm.steps[at.stage].rows;
        const bool last = sm.steps[at.stage].last;
        if (rows < STEP && (KEYWISE ? a.ends_of_queries : a.ends_of_keys))
            zero_rows<STEP, BOXES>(sm.stages[at.stage].second, rows);
        const auto other = stage_of<sizeof(stage)>(first_other, at.stage);
        wgmma_fence();
        if constexpr (KEYWISE) {
            const auto mine = stage_of<sizeof(stage)>(by_keys, at.stage);
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) wgmma_mn<T, COLUMNS, 1, 1>::ss(sums, mine.step(k), other.step(k), 1);
        } else {
            const auto mine = stage_of<sizeof(stage)>(by_queries, at.stage);
#pragma unroll
            for (int k = 0; k < STEP / 16; k++) wgmma_mn<T, COLUMNS, 0, 1>::ss(sums, mine.step(k), other.step(k), 1);
        }
        wgmma_commit();
        return last;
    }
    template <bool KEYWISE> DEVICE void multiply_stages(float (&sums)[COLUMNS / 2])
    {
        bool last = issue<KEYWISE>(sums);
#pragma unroll 1
        while (!last) {
            const ring<STAGES> before = at;
            at.next();
            last = issue<KEYWISE>(sums);
            wgmma_wait<1>();
            me.release(sm.bars, before);
        }
        retire<0>(sums);
        me.release(sm.bars, at);
        at.next();
    }

    /* Returns the address of the first of the thread's sums in kept_plan::sums. The thread's float4s are 128 float4s
     * apart. */
    DEVICE float4 *sums_at(int number) const
    {
        return (float4 *)p.sums + ((int64_t)number * 2 + me.w) * (COLUMNS / 8 * 128) + threadIdx.x % 128;
    }

    DEVICE void finish(float (&sums)[COLUMNS / 2], const product_work &x)
    {
        const float factor = x.gradient == ATTN_T_dv ? 1 : p.scale, factors[2] = { factor, factor };
        const int row = me.w * STEP + me.warp * 16, count = x.rows - row;
        const attn_view &to = a.g.view[x.gradient];
        const int width = (int)(x.gradient == ATTN_T_dv ? a.g.dims.Dv : a.g.dims.D) - x.column0;
        const bool finite = finish_rows(sums, factors);
        store_gradient<T, COLUMNS>(to, attn_at(&to, x.b, x.head, x.line + row) + x.column0, count, width, sums,
                                   me.lane);
        if (!__any_sync(0xffffffff, !finite)) return;
        uint8_t *const marks = x.gradient == ATTN_T_dq ? a.rows_later : a.keys_later;
        if (me.lane < 16 && me.lane < count) marks[x.mark + row + me.lane] = 1;
        if (me.lane == 0) *a.rows_found = 1;
    }

    DEVICE void run()
    {
        for (int work = 0;; work = work + 1 == WORKS ? 0 : work + 1) {
            await_full(sm.bars, at);
            const product_work x = sm.works[work];
            if (x.gradient == ATTN_TENSOR_COUNT) break;
            const bool keys = x.gradient != ATTN_T_dq;
            float sums[COLUMNS / 2];
            if (keys && !p.part.first) {
                const float4 *const from = sums_at(x.sums);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    const float4 y = from[n * 128];
                    sums[n * 4] = y.x, sums[n * 4 + 1] = y.y, sums[n * 4 + 2] = y.z, sums[n * 4 + 3] = y.w;
                }
            } else {
#pragma unroll
                for (int n = 0; n < COLUMNS / 2; n++) sums[n] = 0;
            }
            if (x.empty) me.pass(sm.bars, at);
            else if (keys) multiply_stages<true>(sums);
            else multiply_stages<false>(sums);
            if (keys && !p.part.last) {
                float4 *const to = sums_at(x.sums);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++)
                    to[n * 128] = make_float4(sums[n * 4], sums[n * 4 + 1], sums[n * 4 + 2], sums[n * 4 + 3]);
            } else finish(sums, x);
        }
    }
};

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, int COLUMNS>
__global__ void __launch_bounds__(THREADS, 1)
    products_of_part(const __grid_constant__ cuda_args a, const __grid_constant__ kept_plan p,
                     const __grid_constant__ kept_maps m)
{
    typedef products_shared<COLUMNS> shared;
    static_assert(sizeof(shared) <= 227 << 10, "what a block may have");
    shared &sm = block_memory<shared>();
    begin_block(sm);
    const int wg = warpgroup_index();
    if (wg == 0) {
        setmaxnreg_dec<PRODUCTS_PRODUCER>();
        if (threadIdx.x == 0) product_loader<COLUMNS>(sm, a, p, m).run();
    } else {
        setmaxnreg_inc<PRODUCTS_CONSUMER>();
        product_maker<T, COLUMNS>(a, p, sm, wg - 1).run();
    }
}

} // namespace

#endif
