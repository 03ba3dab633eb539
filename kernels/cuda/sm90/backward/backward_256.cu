/* backward_256.cu: flash attention backward for Hopper, head sizes from 129 to 256. README.md has the schedule.
 *
 * Registers hold dK and dV of only 64 keys. Blocks of 64 keys therefore compute dK and dV and store dS in global
 * memory, 16 bits per element; blocks of 128 queries then compute dQ = dS K (backward_256_kept.cuh). The first consumer
 * of a block of keys computes S, P and dV. The second one takes P from shared memory and computes dP, dS and dK.
 *
 * The memory for dS is limited (KEPT_BYTES), so the heads are processed in parts. Where dS is not stored, blocks of
 * queries compute S and dP again (backward_256_dq.cuh). No two blocks add to the same number in memory, so gradients
 * are the same in every run.
 *
 * Rows past the end of a sequence are set to zero in shared memory, because P = 0 times NaN is NaN. A warp whose dK, dV
 * or dQ is not finite sets a flag, and repair_keys or repair_queries recomputes its rows one by one. */
#include "kernels/cuda/sm90/backward/backward_256_kept.cuh"

namespace {

/* ---- Blocks of keys: shared memory, and the thread that loads tiles ---------------------------------------------- */

template <class X> struct shared_keys {
    /* K of the block's keys; at the end dV on its way to global memory */
    alignas(1024) uint16_t K[X::BN * X::D];
    alignas(1024) uint16_t V[X::BN * X::DV];
    /* Q; at the end buffer 0 holds dK on its way to global memory */
    alignas(1024) uint16_t Q[X::STAGES][X::BM * X::D];
    alignas(1024) uint16_t dO[X::STAGES][X::BM * X::DV];
    alignas(1024) uint16_t dS[X::BN * X::BM]; /* dS on its way to global memory */
    /* P^T, in the order that wgmma needs for an operand in registers: each thread of a consumer stores 16 bytes for
     * each step of 16 queries */
    uint4 P[X::STAGES_P][X::BM / 16][128];
    alignas(16) row_values values[X::STAGES][X::UNITS];
    barrier_pairs<X::STAGES> bars_Q, bars_dO;
    /* one pair of barriers for each warp of a consumer: the warp hands P to the warp that has the same number in the
     * other consumer */
    barrier_pairs<X::STAGES_P> bars_P[4];
    uint64_t K_full, V_full;
    block_place place;
};

/* Loads K and V of the block's keys, and Q, dO, lse and delta of the tiles of queries. One thread of the producer runs
 * this. */
template <class X>
DEVICE void load_rounds(shared_keys<X> &sm, const cuda_args &a, const plan &p, const maps &m, const block_place &x)
{
    if (x.first == x.last) return;
    const tma_place keys = { 0, (int)x.s.k_start + x.j0, x.hk, a.g.dims.packed ? 0 : x.b };
    ring<X::STAGES> at;
    load_tile<X::BN, X::CHUNKS, 64>(smem_addr(sm.K), &m.K, keys, smem_addr(&sm.K_full));
    bool begun = false;
    for (int h = x.h; h < x.h + p.group; h++)
#pragma unroll 1
        for (int tile = x.first; tile < x.last; tile++, at.next()) {
            load_Q<X>(sm, a, p.scratch, m, x, at, h, tile);
            if (!begun) load_tile<X::BN, X::CHUNKS_V, 64>(smem_addr(sm.V), &m.V, keys, smem_addr(&sm.V_full));
            load_dO<X>(sm, a, m, x, at, h, tile);
            begun = true;
        }
}

/* ---- Blocks of keys: the warpgroups that multiply (consumers) ---------------------------------------------------- */

/* Loads STEPS steps (16 channels each) of a K-major operand into registers, which saves bandwidth of shared memory.
 * ROWS: rows of the operand per chunk of 64 channels. */
template <int STEPS, int ROWS>
DEVICE void hold_steps(uint32_t (&held)[STEPS][4], const uint16_t *tile, int warp, int lane)
{
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int row = warp * 16 + lane / 4 + n % 2 * 8, piece = k % 4 * 2 + n / 2;
            held[k][n] = *(const uint32_t *)(tile + (k / 4 * ROWS + row) * 64 + (piece ^ (row & 7)) * 8 + lane % 4 * 2);
        }
}

/* Computes d = A B (64 rows, N columns). The first 16 * HELD of A's 16 * STEPS columns are in registers, the others in
 * shared memory. */
template <typename T, int N, int STEPS, int HELD, class A, class B>
DEVICE void multiply_held(float (&d)[N / 2], const uint32_t (&held)[HELD][4], const A &a, const B &b)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++)
        if (k < HELD) wgmma_mn<T, N, 0, 0>::rs(d, held[k], b.step(k), k > 0);
        else wgmma<T, N>::ss(d, a.step(k), b.step(k), 1);
    wgmma_commit();
}

/* Code and state that are the same for both consumers of a block. A round is one tile of queries of one head. */
template <typename T, class X> struct half_of_keys {
    static const int BM = X::BM, BN = X::BN;
    typedef uint32_t operand[BM / 16][4];
    const cuda_args &a;
    const plan &p;
    shared_keys<X> &sm;
    const block_place &x;
    consumer<2> me;
    const int rounds;
    /* tile: the newest tile of queries. h: its query head, counted from the first query head of this launch. */
    int tile, h;
    ring<X::STAGES> at;         /* position of the newest tile of queries in the rings of Q and dO */
    ring<X::STAGES_P> handover; /* position in the ring of buffers through which one consumer passes P to the other */

    DEVICE half_of_keys(const cuda_args &a_, const plan &p_, shared_keys<X> &sm_, const block_place &x_, int w)
        : a(a_), p(p_), sm(sm_), x(x_), me(w), rounds(x_.tiles() * p_.group), tile(x_.first),
          h(x_.b * (int)a_.g.dims.H + x_.h - p_.part * p_.queries.heads)
    {
    }

    DEVICE void next_round()
    {
        at.next();
        if (++tile == x.last) tile = x.first, h++;
    }

    /* Waits for this consumer's operand, K or V. Sets rows of K and V past the end of the sequence to zero. */
    DEVICE void await_keys(uint64_t &full)
    {
        const int keys = x.band.Sk - x.j0;
        mbarrier_wait(smem_addr(&full), 0);
        if (a.ends_of_keys && keys < BN) {
            mbarrier_wait(smem_addr(&sm.K_full), 0);
            mbarrier_wait(smem_addr(&sm.V_full), 0);
            zero_rows<BN, X::CHUNKS>(sm.K, keys);
            zero_rows<BN, X::CHUNKS_V>(sm.V, keys);
        }
    }
    /* Waits for the newest tile of queries. Both consumers must call this before their first product with the tile,
     * because it may contain a barrier. */
    DEVICE void await_queries(barrier_pairs<X::STAGES> &bars)
    {
        await_full(bars, at);
        if (a.ends_of_queries && (tile + 1) * BM > x.Sq) {
            await_full(sm.bars_Q, at);
            await_full(sm.bars_dO, at);
            zero_rows<BM, X::CHUNKS>(sm.Q[at.stage], x.Sq - tile * BM);
            zero_rows<BM, X::CHUNKS_V>(sm.dO[at.stage], x.Sq - tile * BM);
        }
    }

    DEVICE uint4 *handed(int n) { return &sm.P[handover.stage][n][me.warp * 32 + me.lane]; }

    /* Multiplies dK or dV by `factor` and stores it through shared memory. Sets the warp's flag in p.nonfinite if a
     * result is not finite. */
    template <int N>
    DEVICE void finish(float (&sums)[N / 2], float factor, attn_tensor_id gradient, int64_t width, uint16_t *staging,
                       int t)
    {
        const float factors[2] = { factor, factor };
        const int row = me.warp * 16;
        const attn_view &view = a.g.view[gradient];
        const bool any = __any_sync(0xffffffff, !finish_rows(sums, factors));
        if (me.lane == 0) p.nonfinite[t * 8 + me.w * 4 + me.warp] = any;
        if (view.data)
            store_gradient<T, N>(view, attn_at(&view, x.b, x.to, x.s.k_start + x.j0 + row), x.rows - row, (int)width,
                                 sums, staging + row * N, me.lane);
    }
};

template <typename T, class X> struct values_half : half_of_keys<T, X> {
    typedef half_of_keys<T, X> base;
    using base::BM, base::a, base::p, base::sm, base::x, base::me, base::tile, base::at, base::handover;
    using typename base::operand;
    const k_major_low<X::BN> K;
    const k_major_low<BM> first_Q;
    const mn_major_low<BM> first_dO;
    const free_queries free;

    DEVICE values_half(const cuda_args &a_, const plan &p_, shared_keys<X> &sm_, const block_place &x_)
        : base(a_, p_, sm_, x_, 0), K(smem_addr(sm_.K)), first_Q(smem_addr(sm_.Q)), first_dO(smem_addr(sm_.dO)),
          free(free_queries_of<BM>(x_, x_.j0))
    {
    }

    DEVICE void issue_S(float (&S)[BM / 2], const uint32_t (&held)[X::HELD][4])
    {
        this->await_queries(sm.bars_Q);
        multiply_held<T, BM, X::D / 16>(S, held, K, stage_of<sizeof sm.Q[0]>(first_Q, at.stage));
    }

    DEVICE void make_P(operand &P, float (&S)[BM / 2])
    {
        if (tile < free.first || tile >= free.last)
            hide_queries<BM>(S, x, x.j0 + me.warp * 16 + me.lane / 4, tile * BM, me.lane);
        exponents_of<BM>(S, sm.values[at.stage], p.c, me.lane);
        to_operand<T, BM>(P, S);
        await_empty(sm.bars_P[me.warp], handover);
#pragma unroll
        for (int n = 0; n < BM / 16; n++) *this->handed(n) = make_uint4(P[n][0], P[n][1], P[n][2], P[n][3]);
        __syncwarp();
        if (me.lane == 0) mbarrier_arrive(smem_addr(&sm.bars_P[me.warp].full[handover.stage]));
        handover.next();
    }

    DEVICE void issue_dV(float (&dV)[X::DV / 2], const operand &P)
    {
        await_full(sm.bars_dO, at);
        multiply_add<T, X::DV, BM / 16>(dV, P, stage_of<sizeof sm.dO[0]>(first_dO, at.stage));
    }

    DEVICE void run(int t)
    {
        float dV[X::DV / 2];
#pragma unroll
        for (int i = 0; i < X::DV / 2; i++) dV[i] = 0;
        if (this->rounds > 0) {
            float S[BM / 2];
            operand P;
            uint32_t held[X::HELD][4];
            this->await_keys(sm.K_full);
            hold_steps<X::HELD, X::BN>(held, sm.K, me.warp, me.lane);
            issue_S(S, held);
            retire<0>(S);
            make_P(P, S);
#pragma unroll 1
            for (int n = 1; n < this->rounds; n++) {
                const ring<X::STAGES> now = at;
                issue_dV(dV, P);
                this->next_round();
                issue_S(S, held);
                /* Wait for the product dV, because the next P overwrites registers that this product reads. After the
                 * wait all warps have also read lse and delta. */
                wgmma_wait<1>();
                me.release(sm.bars_Q, now);
                me.release(sm.bars_dO, now);
                retire<0>(S);
                make_P(P, S);
            }
            issue_dV(dV, P);
            retire<0>(dV);
        }
        /* dV passes through the memory of K on its way to global memory */
        this->template finish<X::DV>(dV, 1, ATTN_T_dv, a.g.dims.Dv, sm.K, t);
    }
};

template <typename T, class X, bool KEEP> struct keys_half : half_of_keys<T, X> {
    typedef half_of_keys<T, X> base;
    using base::BM, base::a, base::p, base::sm, base::x, base::me, base::tile, base::at, base::handover;
    using typename base::operand;
    const k_major_low<X::BN> V;
    const k_major_low<BM> first_dO;
    const mn_major_low<BM> first_Q;

    DEVICE keys_half(const cuda_args &a_, const plan &p_, shared_keys<X> &sm_, const block_place &x_)
        : base(a_, p_, sm_, x_, 1), V(smem_addr(sm_.V)), first_dO(smem_addr(sm_.dO)), first_Q(smem_addr(sm_.Q))
    {
    }

    DEVICE void issue_dP(float (&dP)[BM / 2], const uint32_t (&held)[X::HELD][4])
    {
        this->await_queries(sm.bars_dO);
        multiply_held<T, BM, X::DV / 16>(dP, held, V, stage_of<sizeof sm.dO[0]>(first_dO, at.stage));
    }

    DEVICE void make_dS(operand &dS, const float (&dP)[BM / 2])
    {
        await_full(sm.bars_Q, at); /* lse and delta of the queries arrive with Q */
        await_full(sm.bars_P[me.warp], handover);
#pragma unroll
        for (int n = 0; n < BM / 16; n++) {
            const uint4 four = *this->handed(n);
            dS[n][0] = four.x, dS[n][1] = four.y, dS[n][2] = four.z, dS[n][3] = four.w;
        }
        __syncwarp();
        if (me.lane == 0) mbarrier_arrive(smem_addr(&sm.bars_P[me.warp].empty[handover.stage]));
        handover.next();
        differences_of_rounded<T, BM>(dS, dP, sm.values[at.stage], me.lane);
    }

    DEVICE void keep_dS(const operand &dS)
    {
        if (!KEEP) return;
        uint16_t *const rows = sm.dS + me.warp * 16 * BM;
        const int i = me.lane % 16;
        if (me.lane == 0) bulk_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int n = 0; n < BM / 16; n++)
            stmatrix_x4(smem_addr(rows + i * BM + ((2 * n + me.lane / 16) ^ (i & 7)) * 8), dS[n]);
        fence_proxy_async_shared();
        __syncwarp();
        if (me.lane == 0) {
            bulk_store(p.kept.at(this->h, x.band, tile, x.j0 / X::BN) + me.warp * 16 * BM, smem_addr(rows),
                       16 * BM * 2);
            bulk_commit();
        }
    }

    DEVICE void issue_dK(float (&dK)[X::D / 2], const operand &dS)
    {
        multiply_add<T, X::D, BM / 16>(dK, dS, stage_of<sizeof sm.Q[0]>(first_Q, at.stage));
    }

    DEVICE void run(int t)
    {
        float dK[X::D / 2];
#pragma unroll
        for (int i = 0; i < X::D / 2; i++) dK[i] = 0;
        if (this->rounds > 0) {
            float dP[BM / 2];
            operand dS;
            uint32_t held[X::HELD][4];
            this->await_keys(sm.V_full);
            hold_steps<X::HELD, X::BN>(held, sm.V, me.warp, me.lane);
            issue_dP(dP, held);
            retire<0>(dP);
            me.release(sm.bars_dO, at);
            make_dS(dS, dP);
#pragma unroll 1
            for (int n = 1; n < this->rounds; n++) {
                const ring<X::STAGES> now = at;
                issue_dK(dK, dS);
                keep_dS(dS);
                this->next_round();
                issue_dP(dP, held);
                /* Wait for the product dK, because the next dS overwrites registers that this product reads. After the
                 * wait all warps have also read lse and delta. */
                wgmma_wait<1>();
                me.release(sm.bars_Q, now);
                retire<0>(dP);
                me.release(sm.bars_dO, at);
                make_dS(dS, dP);
            }
            issue_dK(dK, dS);
            keep_dS(dS);
            retire<0>(dK);
            /* These copies (TMA) must have read shared memory before this block ends, because another block may then
             * get that memory. */
            if (KEEP && me.lane == 0) bulk_wait_read<0>();
        }
        /* dK is copied to global memory through sm.Q[0]. No consumer reads sm.Q[0] any more: the other consumer made
         * its last P after its last product with Q. */
        this->template finish<X::D>(dK, p.scale, ATTN_T_dk, a.g.dims.D, sm.Q[0], t);
    }
};

/* ---- Blocks of keys: the kernel ---------------------------------------------------------------------------------- */

DEVICE head_tile key_tile_of(const plan &p, int t)
{
    return tile_of_parts(p.keys, p.heads << p.tile_parts.log2_of_ranges, t);
}

template <typename T, class X, bool KEEP>
__global__ void __launch_bounds__(X::THREADS, 1)
    backward_keys(const __grid_constant__ cuda_args a, const __grid_constant__ plan p, const __grid_constant__ maps m)
{
    static_assert(sizeof(shared_keys<X>) <= 227 << 10, "what a block may have");
    static_assert(X::DV <= X::D, "dV is staged in K");
    shared_keys<X> &sm = block_memory<shared_keys<X>>();
    const int wg = warpgroup_index(), t = p.part * p.keys.tiles + first_tile(p.keys);

    if (threadIdx.x == 0) {
        prefetch_maps(m);
        init_pairs(sm.bars_Q, 2);
        init_pairs(sm.bars_dO, 2);
        for (auto &bars : sm.bars_P) init_pairs(bars, 1);
        mbarrier_init(smem_addr(&sm.K_full), 1);
        mbarrier_init(smem_addr(&sm.V_full), 1);
        fence_mbarrier_init();
    }
    if (threadIdx.x == 32) sm.place = key_place_of<X>(a, p.tile_parts, p.group, key_tile_of(p, t));
    __syncthreads();
    wait_for_prerequisites();
    const block_place &x = sm.place;
    if (x.rows == 0) return;

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 0) load_rounds<X>(sm, a, p, m, x);
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        if (wg == 1) values_half<T, X>(a, p, sm, x).run(t);
        else keys_half<T, X, KEEP>(a, p, sm, x).run(t);
    }
}

template <class X>
__global__ void __launch_bounds__(128) repair_keys(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    launch_dependents();
    wait_for_prerequisites();
    for_flagged_warps(
        p.heads * p.keys.per_head * 8, [&](int n) { return p.nonfinite[n]; },
        [&](int n, uint32_t) {
            repair_keys_of<X>(a, p.scratch.s, key_place_of<X>(a, p.tile_parts, p.group, key_tile_of(p, n / 8)), n % 8);
        });
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

int64_t key_blocks_of(const attn_dims &d)
{
    return key_tiles_per_head(d, KEYS) * d.Hk * (d.packed ? 1 : d.B);
}
int64_t query_blocks_of(const attn_dims &d)
{
    return query_tiles_per_head(d, QUERIES) * d.H * (d.packed ? 1 : d.B);
}

/* The most memory for dS, in bytes: enough for one head of 16384 queries and keys. The GPU emulator of the tests has a
 * smaller limit, so that it too computes heads in several parts. */
#ifndef ATTN_KEPT_BYTES
#define ATTN_KEPT_BYTES (520 << 20)
#endif
const int64_t KEPT_BYTES = ATTN_KEPT_BYTES;

/* Returns kept_tiles::width. Two tiles of queries share memory for dS (see kept_tiles), and `width` is the number of
 * tiles of dS for which this memory has room. */
int64_t kept_width(const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    const int64_t tiles = query_tiles_per_head(d, QUERY_TILE), keys = key_tiles_per_head(d, KEYS);
    /* The sequences' lengths are not known here, so every tile of queries is assumed to see all keys. */
    if (g.seqlens_k) return 2 * keys;
    const attn_sequence whole = { 0, 0, d.Sq, d.Sk };
    const int64_t align = attn_align(&g, &whole), left = attn_min64(g.left, FAR), right = attn_min64(g.right, FAR);
    const auto seen = [&](int64_t tile) {
        const int64_t first = attn_max64(tile * QUERY_TILE + align - left, 0) / KEYS,
                      last = attn_tiles(attn_max64(attn_min64((tile + 1) * QUERY_TILE + align + right, d.Sk), 0), KEYS);
        return attn_max64(last - first, 0);
    };
    int64_t width = 1;
    for (int64_t n = 0; n <= tiles - 1 - n; n++)
        width = attn_max64(width, seen(n) + (n < tiles - 1 - n ? seen(tiles - 1 - n) : 0));
    return width;
}

/* How a problem is divided. parts: the parts of a tile of keys. A group is the query heads that one part sums over.
 * heads: the number of groups whose dS is in memory at the same time; 0: dS is not stored. In the workspace, the memory
 * of begin_backward() comes first. Then come dS, flags (a byte for each warp of each block), and the terms of dK and
 * dV. `flags` and `terms` are offsets in bytes from the beginning of dS. `bytes` is the size of dS, the flags and the
 * terms together. */
struct division {
    key_parts parts;
    int64_t heads, width;
    int64_t flags, terms, bytes;
};

/* Chooses x.heads, the number of groups of query heads whose dS is in memory at the same time. Sets x.flags to the
 * bytes of memory for dS. Memory may have no room for dS of all query heads of a key/value head. Tiles of keys are then
 * divided into parts, or into more parts than before. */
void divide_heads(const cuda_chip *chip, const attn_plan *plan, division &x)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const auto wanted = [&](attn_tensor_id t) { return plan->problem->tensor[t].rank != 0; };
    if (d.packed || g.seqlens_q || !wanted(ATTN_T_dq) || !(wanted(ATTN_T_dk) || wanted(ATTN_T_dv))) return;
    const int64_t width = kept_width(g), fit = KEPT_BYTES / (KEPT_TILE * 2);
    const int64_t tiles = attn_tiles(query_tiles_per_head(d, QUERY_TILE), 2) * width;
    for (int parts = x.parts.heads; parts <= g.group; parts++) {
        if (g.group % parts || tiles > fit / (g.group / parts)) continue;
        const int64_t heads = d.B * d.Hk * parts, part = tiles * (g.group / parts),
                      most = attn_min64(fit / part, heads), even = attn_tiles(heads, attn_tiles(heads, most));
        /* More parts than x.parts has are allowed only if no multiprocessor stays idle, and if the terms of all parts
         * take at most MOST_TERMS bytes. */
        if (parts > x.parts.heads &&
            (!may_have_parts(plan) || terms_bytes(plan, { parts, x.parts.log2_of_ranges }) > MOST_TERMS ||
             even * key_tiles_per_head(d, KEYS) < chip->multiprocessors))
            continue;
        x.parts.heads = parts;
        x.heads = even;
        x.width = width;
        /* computed from `most` and not from x.heads, so that a problem with fewer heads does not need more memory */
        x.flags = most * part * KEPT_TILE * 2;
        return;
    }
}

division division_of(const cuda_chip *chip, const attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const auto parts_of = [&](int64_t heads) { return key_parts_of(chip, plan, KEYS, QUERY_TILE, heads); };
    const int64_t heads = extent_of(d).B * d.Hk;
    division x = {};
    x.parts = { 1, 0 };
    divide_heads(chip, plan, x);
    /* If x.parts.heads is 1, a part sums over all query heads of a key/value head. Then x.heads (unless it is 0) is the
     * number of key/value heads that one launch computes. */
    if (x.parts.heads == 1) x.parts = parts_of(x.heads ? x.heads : heads);
    if (x.parts.heads > 1) divide_heads(chip, plan, x);
    x.terms = (x.flags + (key_blocks_of(d) * x.parts.count() + query_blocks_of(d)) * 8 + 127) / 128 * 128;
    x.bytes = x.terms + terms_bytes(plan, x.parts);
    return x;
}

struct backward_job {
    const cuda_chip *chip;
    cudaStream_t stream;
    backward_run run;
    division by;
    uint8_t *own; /* the part of the workspace that struct division describes */
};

plan plan_of(const backward_job &job)
{
    const attn_geometry &g = job.run.args.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const bool uneven = g.right < e.rows_k || g.left < e.rows_q || job.run.args.ends_of_queries ||
                        job.run.args.ends_of_keys;
    const key_parts &parts = job.by.parts;
    const int64_t group = g.group / parts.heads, heads = e.B * d.H / group, part = job.by.heads ? job.by.heads : heads;
    plan p;
    p.tile_parts = parts;
    p.group = (int)group;
    p.keys = tile_order_of(key_tiles_per_head(d, KEYS), part << parts.log2_of_ranges,
                           e.rows_q * group * (d.D + d.Dv) * 2, uneven);
    /* A section is a group of heads whose tiles of keys are claimed together. With many query heads per key/value head,
     * a section would be only one key/value head. Under a causal mask, the tiles that blocks claim last would then take
     * long. So up to eight heads form a section, if Q and dO of one query head of each fit into the L2 cache. With 8
     * query heads per key/value head and 4096 positions, such sections take 0.77 to 0.81 times the time. With 4 query
     * heads per key/value head, they would be up to 2 % slower (H200, 2026-11-28). */
    if (g.right < e.rows_k && g.left >= e.rows_q && group > 4 && p.keys.tiles > job.chip->multiprocessors)
        p.keys.section = (int)attn_max64(p.keys.section,
                                         attn_min64(L2_SHARE / attn_max64(e.rows_q * (d.D + d.Dv) * 2, 1), 8));
    p.queries = tile_order_of(query_tiles_per_head(d, QUERIES), part * group, e.rows_k * (d.D + d.Dv) * 2, uneven);
    p.heads = (int)heads;
    p.parts = (int)attn_tiles(heads, part);
    p.part = 0;
    p.kept = { job.by.heads ? (uint16_t *)job.own : nullptr, (int)job.by.width,
               (int)query_tiles_per_head(d, QUERY_TILE) };
    p.scratch = job.run.scratch;
    p.scale = (float)g.scale;
    p.c = p.scale * LOG2E;
    p.nonfinite = job.own + job.by.flags;
    p.nonfinite_queries = p.nonfinite + key_blocks_of(d) * parts.count() * 8;
    return p;
}

template <auto kernel, class X>
cudaError_t launch_blocks(const backward_job &job, const cuda_args &a, const plan &p, const maps &m, int64_t blocks,
                          size_t shared_bytes)
{
    const cudaError_t code = allow_shared<kernel>(shared_bytes);
    if (code != cudaSuccess) return code;
    return launch_dependent(kernel, blocks, X::THREADS, shared_bytes, job.stream, a, p, m);
}

/* Computes the heads in parts, because memory holds dS of one part at a time. For each part, backward_keys stores dS,
 * and then queries_of_kept reads it. `a` has the views of dk and dv to which backward_keys writes. */
template <typename T, class X>
cudaError_t launch_parts(const backward_job &job, const cuda_args &a, plan p, const maps &m)
{
    cudaError_t code = cudaSuccess;
    for (p.part = 0; p.part < p.parts && code == cudaSuccess; p.part++) {
        const int64_t heads = attn_min64(job.by.heads, p.heads - p.part * job.by.heads);
        code = launch_blocks<backward_keys<T, X, true>, X>(
            job, a, p, m, (heads << p.tile_parts.log2_of_ranges) * p.keys.per_head, sizeof(shared_keys<X>));
        if (code == cudaSuccess)
            code = launch_blocks<queries_of_kept<T, X>, X>(job, a, p, m, heads * p.group * p.queries.per_head,
                                                           sizeof(shared_kept<X>));
    }
    return code;
}

template <typename T, class X> cudaError_t launch(const backward_job &job)
{
    const attn_geometry &g = job.run.args.g;
    const bool of_keys = g.view[ATTN_T_dk].data || g.view[ATTN_T_dv].data, of_queries = g.view[ATTN_T_dq].data;
    const bool divided = job.by.parts.count() > 1;
    cuda_args a = job.run.args;
    parts_sum sum;
    plan p = plan_of(job);
    maps m;
    if (divided) divide_keys(a, job.by.parts, (float *)(job.own + job.by.terms), job.run.scratch.s, sum);
    const auto repair = [&](auto kernel) {
        return launch_dependent(kernel, job.chip->multiprocessors, 128, 0, job.stream, job.run.args, p);
    };
    cudaError_t code = cudaSuccess;
    if (!make_maps<X>(m, g)) return cudaErrorInvalidValue;
    if (p.kept.tiles) code = launch_parts<T, X>(job, a, p, m);
    else {
        take_share(job.chip, p.keys);
        take_share(job.chip, p.queries);
        const int keys = p.keys.end - p.keys.first, queries = p.queries.end - p.queries.first;
        if (of_keys && keys)
            code = launch_blocks<backward_keys<T, X, false>, X>(job, a, p, m, keys, sizeof(shared_keys<X>));
        if (code == cudaSuccess && of_queries && queries)
            code = launch_blocks<backward_queries<T, X>, X>(job, a, p, m, queries, sizeof(shared_queries<X>));
    }
    if (!is_last_share(job.chip)) return code;
    if (code == cudaSuccess && of_keys)
        code = divided ? launch_sum<T>(job.chip, job.stream, job.run.args, sum) : repair(repair_keys<X>);
    if (code == cudaSuccess && of_queries) code = repair(repair_queries<X>);
    return code;
}

struct shape_row {
    int D, Dv;
    cudaError_t (*launch[2])(const backward_job &); /* launch functions for bfloat16 ([0]) and float16 ([1]) */
};
template <class X> constexpr shape_row row()
{
    return { X::D, X::DV, { launch<__nv_bfloat16, X>, launch<compiled_half, X> } };
}

/* A problem uses the first shape that has at least its head sizes. */
const shape_row shapes[] = {
    row<shape<192, 128>>(),
    row<shape<192, 192>>(),
    row<shape<256, 256>>(),
};

bool plan_backward(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    if (backward_class(d) <= 128 || !backward_walkable(plan)) return false;
    if ((key_blocks_of(d) + query_blocks_of(d)) * 8 >= INT32_MAX) return false;
    const size_t bytes = backward_bytes(chip, plan, false);
    if (bytes == 0) return false;
    plan->workspace_bytes = bytes + (size_t)division_of(chip, plan).bytes;
    return true;
}

cudaError_t launch_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const attn_dims &d = plan->geometry.dims;
    backward_job job = {
        chip, stream, {}, division_of(chip, plan), (uint8_t *)memory + backward_bytes(chip, plan, false)
    };
    cudaError_t code = begin_backward(chip, stream, plan, false, memory, &job.run);
    if (code != cudaSuccess) return code;
    const shape_row *x = shapes;
    while (d.D > x->D || d.Dv > x->Dv) x++;
    const auto tiles = [&](const cuda_chip *part) {
        job.chip = part;
        if (is_first_share(part)) code = prepare_backward(stream, plan, job.run);
        return code == cudaSuccess ? x->launch[plan->problem->q.dtype == ATTN_F16](job) : code;
    };
    const double seconds = tile_seconds(chip, plan);
    if (!job.by.heads) code = in_shares(chip, seconds, tiles);
    /* A part of the heads is not divided into several launches. Its launch takes only a few milliseconds, because its
     * dS fits into KEPT_BYTES. */
    else if (takes_step(chip, seconds)) code = tiles(chip);
    return code == cudaSuccess ? end_backward(chip, stream, plan, job.run) : code;
}

const uint64_t FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_TENSOR_BIT(dout) |
                          ATTN_TENSOR_BIT(dlse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) |
                          ATTN_TENSOR_BIT(dsinks) | ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(GRAD_DTYPE) |
                          ATTN_OPTION_BIT(DETERMINISTIC);

} // namespace

extern const cuda_kernel sm90_backward_256 = {
    { "sm90", ATTN_OP_BACKWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), TILE_HEAD_DIM, FEATURES },
    90,
    90,
    plan_backward,
    launch_backward,
};
