/* latent.cu: multi-head latent attention for Hopper: few queries of many heads, and one key/value head. The values are
 * the first 512 of the keys' 576 columns, in the same memory. README.md has the schedule.
 *
 * A block has 64 rows (row r is query r / H of head r % H) and visits tiles of 64 keys in pairs. Each of two consumer
 * warpgroups computes the scores of one tile of a pair, passes P to the other through shared memory, and accumulates
 * half of O's 512 columns (the "seesaw" of FlashMLA).
 *
 * A sequence's keys are divided into splits. The results of four splits (a group) are added up first, then the results
 * of the groups, always in this order. A block computes one split or one group. The kernel combine_latent adds up the
 * results of different blocks.
 *
 * A row is flagged if its scores are huge, or if its result is not finite (P = 0 times a NaN in V, for example). The
 * next kernel recomputes the flagged rows one by one. */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/latent/latent_plan.cuh"
#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"

namespace {

/* ---- A block's threads and its shared memory --------------------------------------------------------------------- */

/* THREADS: threads per block. PRODUCER, CONSUMER: registers per thread of the warpgroup that loads tiles, and of a
 * warpgroup that multiplies. */
enum { THREADS = 384, PRODUCER = 24, CONSUMER = 240 };
/* A tile of keys is loaded in PIECES pieces, each with its own barrier: four of 128 columns, and one of 64 columns. */
enum { PIECES = 5 };
enum { KEPT = 3 };

/* The two consumer warpgroups. LEFT computes the left half of O's columns, RIGHT the right half. */
enum { LEFT, RIGHT };

/* Numbers of the named barriers. All 256 consumer threads meet at each barrier with a number below MEET. The 128
 * threads of one warpgroup meet at barrier MEET + LEFT or MEET + RIGHT. */
enum { Q_READY = 1, P0_READY, P1_READY, TURN, ENDED, MEET };

struct shared {
    alignas(1024) uint16_t Q[BOXES][BM * 64];
    /* [buffer][box of 64 columns]: tiles of keys. P of a tile overwrites the last box of that tile. */
    alignas(1024) uint16_t K[2][BOXES][BOX];
    /* [warpgroup that computed the scores][row]: the reference (the number subtracted from scores before exp2), and the
     * factor by which O is multiplied */
    float reference[2][BM], rescale[2][BM];
    float l[2][2][BM]; /* [split % 2][warpgroup][row]: sums l of P */
    /* [warpgroup][row]: maximum m in base 2 (x) and sum l (y) of the splits added up so far */
    float2 before[2][BM];
    int2 sees[BM]; /* [row]: the row sees keys x to y - 1 */
    block_place place;
    struct {
        uint64_t full[PIECES], empty[2];
    } bars[2];
};

/* ---- The warp that loads tiles (producer) ------------------------------------------------------------------------ */

/* Loads the block's tiles of keys. One warp calls this. While the warp loads 32 tiles, each of its lanes looks up the
 * page of one of the next 32 tiles, so that no load waits for the page table. */
DEVICE void load_keys(const attn_geometry &g, shared &sm, const CUtensorMap *map)
{
    const int b = sm.place.b, page_size = (int)g.dims.page_size, lane = threadIdx.x % 32;
    const int end = sm.place.last_key(sm.place.end - 1), length = sm.place.q.length;
    const int32_t *const pages = g.page_table ? g.page_table + b * g.page_table_row : nullptr;
    const auto find = [&](int key) { /* returns the key's row in its page (x), and the page (y) */
                                     if (!pages || key >= end) return make_int2(key, b);
                                     const int page = key / page_size;
                                     return make_int2(key - page * page_size, pages[page]);
    };
    const uint64_t policy = evict_first();
    /* [buffer]: the phase parity to wait for at its barriers `empty`. It begins as 1, so that the first wait returns at
     * once. */
    uint32_t phase[2] = { 1, 1 };
    int j = sm.place.first_key(sm.place.begin), split_end = j + length, s = 0, n = 0;
    int2 place = find(j + lane * BN), ahead = find(j + (lane + 32) * BN);
#pragma unroll 1
    for (; j < end; j += BN, s ^= 1) {
        if (j == split_end) s = 0, split_end += length;
        const int row = __shfl_sync(0xffffffff, place.x, n), page = __shfl_sync(0xffffffff, place.y, n);
        if (++n == 32) n = 0, place = ahead, ahead = find(j + (lane + 33) * BN);
        const auto ask = [&](int piece) {
            const int first = piece * 2, boxes = piece == 4 ? 1 : 2;
            const uint32_t bar = smem_addr(&sm.bars[s].full[piece]);
            mbarrier_arrive_expect_tx(bar, boxes * BOX * 2);
            for (int c = first; c < first + boxes; c++)
                tma_load_4d(smem_addr(sm.K[s][c]), map, c * 64, row, 0, page, bar, policy);
        };
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            /* the two halves of a buffer are loaded in the order in which the consumers release them */
            const int half = turn ^ s;
            /* only lane 0 waits, because another lane might begin to wait too late, after the barrier's next phase */
            if (lane == 0) {
                mbarrier_wait(smem_addr(&sm.bars[s].empty[half]), phase[s]);
                ask(half * 2);
                ask(half * 2 + 1);
                if (turn == 1) ask(4);
            }
            __syncwarp();
        }
        phase[s] ^= 1;
    }
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* A consumer warpgroup. W (LEFT or RIGHT) says for which buffer of keys (0 or 1) it computes scores, and which half of
 * V's columns it multiplies. */
template <typename T, int W> struct warpgroup {
    const plan &p;
    shared &sm;
    const block_place &place; /* a reference to shared memory, because a copy would take registers */
    const int group;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    /* the thread's first row in the block; its second row is 8 rows below */
    const int row = warp * 16 + lane / 4;
    uint32_t phase[2] = { 0, 0 }; /* [buffer]: the phase parity to wait for at its barriers `full` */
    softmax x;                    /* x.l sums P only over the tiles whose scores this warpgroup computes */
    uint32_t kept[KEPT * 4][4];   /* the last KEPT boxes (64 columns each) of Q, in registers, as operands of wgmma */

    DEVICE warpgroup(const attn_geometry &g, const plan &p_, shared &sm_)
        : p(p_), sm(sm_), place(sm_.place), group((int)g.group)
    {
    }

    /* Returns the address of a tile in shared memory. It is computed at each call, to save registers. */
    DEVICE uint32_t address(const uint16_t *tile) const
    {
        return memory_anew() + (uint32_t)((const char *)tile - (const char *)&sm);
    }
    DEVICE void meet() const { named_barrier_sync(MEET + W, 128); }
    DEVICE void release(int stage) const
    {
        if (thread == 0) mbarrier_arrive(smem_addr(&sm.bars[stage].empty[W]));
    }
    DEVICE void await_piece(int stage, int piece) const
    {
        mbarrier_wait(smem_addr(&sm.bars[stage].full[piece]), phase[stage]);
    }

    DEVICE void keep_queries()
    {
#pragma unroll
        for (int k = 0; k < KEPT * 4; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = row + e % 2 * 8, piece = k % 4 * 2 + e / 2;
                kept[k][e] = *(const uint32_t *)(sm.Q[BOXES - KEPT + k / 4] + (r * 8 + (piece ^ (r & 7))) * 8 +
                                                 lane % 4 * 2);
            }
    }

    /* Waits for a piece (128 or 64 columns) of the tile whose scores this warpgroup computes, and issues S += Q K^T for
     * these columns. FIRST: S starts from 0. */
    template <int PIECE, bool FIRST> DEVICE void score_piece(float (&S)[BN / 2]) const
    {
        const k_major_low<64> Q(address(sm.Q[0])), K(address(sm.K[W][0]));
        await_piece(W, PIECE);
        wgmma_fence();
#pragma unroll
        for (int k = PIECE * 8; k < (PIECE == 4 ? D / 16 : PIECE * 8 + 8); k++) {
            const int step = k - (BOXES - KEPT) * 4, accumulate = !(FIRST && k == PIECE * 8);
            if (step < 0) wgmma<T, BN>::ss(S, Q.step(k), K.step(k), accumulate);
            else wgmma_mn<T, BN, 0, 0>::rs(S, kept[step < 0 ? 0 : step], K.step(k), accumulate);
        }
    }

    /* Turns the scores S of the tile of keys at key j0 into P. `rescale` gets the factors by which the thread's two
     * rows of O must be multiplied. */
    DEVICE void exponentiate(float (&S)[BN / 2], float (&rescale)[2], int j0)
    {
        if (j0 < place.open_lo || j0 + BN > place.open_hi) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int2 sees = sm.sees[row + half * 8];
                const int column = j0 + lane % 4 * 2, from = sees.x - column, to = sees.y - column;
#pragma unroll
                for (int n = 0; n < BN / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (n * 8 + e < from || n * 8 + e >= to) S[n * 4 + half * 2 + e] = -CUDART_INF_F;
            }
        }
        softmax_step<BN>(S, x, rescale, p.reference);
    }

    /* Writes P, the references and the rescale factors to shared memory, for the other warpgroup. P overwrites the last
     * 64 columns of the tile of keys, after all warps of this warpgroup have computed the tile's scores. */
    DEVICE void give(const uint32_t (&P)[BN / 16][4], const float (&rescale)[2]) const
    {
        /* Reads the thread index again: if addresses were computed from the struct's members, they would stay in
         * registers. */
        const int thread = (int)thread_anew() % 128, warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
        meet();
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
            const int r = warp * 16 + lane % 16, piece = 2 * k + lane / 16;
            stmatrix_x4(smem_addr(sm.K[W][BOXES - 1] + (r * 8 + (piece ^ (r & 7))) * 8), P[k]);
        }
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                sm.reference[W][row + half * 8] = x.m[half];
                sm.rescale[W][row + half * 8] = rescale[half];
            }
        fence_proxy_async_shared();
        named_barrier_arrive(W == LEFT ? P0_READY : P1_READY, 256);
    }

    /* Reads the references and rescale factors that the other warpgroup has written. Threads with the same number have
     * the same rows in both warpgroups. */
    DEVICE void take(float (&rescale)[2])
    {
        named_barrier_sync(W == LEFT ? P1_READY : P0_READY, 256);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            x.m[half] = sm.reference[1 - W][row + half * 8];
            rescale[half] = sm.rescale[1 - W][row + half * 8];
            x.l[half] *= rescale[half];
        }
        await_piece(1 - W, W * 2);
        await_piece(1 - W, W * 2 + 1);
    }

    /* Sets rows of V past the end of the sequence to zero, in this warpgroup's half of a buffer. */
    DEVICE void clear_tail(int stage, int j0) const
    {
        const int valid = place.q.last - j0;
        if (valid >= BN) return;
        for (int n = thread; n < (BN - valid) * 32; n += 128) {
            const int r = valid + n / 32, c = n % 32;
            *(uint4 *)(sm.K[stage][W * 4 + c / 8] + r * 64 + c % 8 * 8) = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async_shared();
        meet();
    }

    DEVICE mn_major_low<BN> values(int stage) const
    {
        return mn_major_low<BN>(address(sm.K[stage][W * 4]));
    }

    /* Issues O += P V for the tile whose P the other warpgroup has passed to this one. */
    DEVICE void multiply_other(float (&O)[HALF / 2]) const
    {
        const k_major_low<BM> P(address(sm.K[1 - W][BOXES - 1]));
        const mn_major_low<BN> V = values(1 - W);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BN / 16; k++) wgmma_mn<T, HALF, 0, 1>::ss(O, P.step(k), V.step(k), 1);
        wgmma_commit();
    }

    /* Computes one split (a part of the keys), two tiles at a time. ptxas makes good code only under two conditions:
     * the iteration that issues a product O += P V also waits for it, and no other product is running while O is
     * rescaled. */
    DEVICE void run_left(float (&O)[HALF / 2], int first, int tiles)
    {
        float S[BN / 2];
        if (tiles == 0) return;
        score_piece<0, true>(S);
        score_piece<1, false>(S);
        finish_scores(S, tiles > 1);
        int t = 0;
#pragma unroll 1
        while (t + 1 < tiles) {
            float rescale[2];
            left_tile(O, S, first + t * BN);
            take(rescale);
            phase[1] ^= 1;
            rescale_rows(O, rescale);
            clear_tail(1, first + t * BN + BN);
            multiply_other(O);
            t += 2;
            if (t == tiles) {
                retire<0>(O);
                release(1);
                return;
            }
            score_piece<0, true>(S);
            wgmma_commit();
            retire<1>(O);
            release(1);
            score_piece<1, false>(S);
            finish_scores(S, t + 1 < tiles);
        }
        left_tile(O, S, first + t * BN);
    }
    DEVICE void finish_scores(float (&S)[BN / 2], bool two)
    {
        score_piece<2, false>(S);
        score_piece<3, false>(S);
        score_piece<4, false>(S);
        wgmma_commit();
        if (two) named_barrier_arrive(TURN, 256);
        phase[0] ^= 1;
    }
    /* Processes the tile in buffer 0. The caller has already issued its product S = Q K^T. */
    DEVICE void left_tile(float (&O)[HALF / 2], float (&S)[BN / 2], int j0)
    {
        float rescale[2];
        uint32_t P[BN / 16][4], to_give[BN / 16][4];
        retire<0>(S);
        exponentiate(S, rescale, j0);
        to_operand<T, BN>(P, S);
        copy_words(to_give, P);
        rescale_rows(O, rescale);
        clear_tail(0, j0);
        multiply_add<T, HALF, BN / 16>(O, P, values(0));
        give(to_give, rescale);
        retire<0>(O);
        release(0);
    }

    DEVICE void run_right(float (&O)[HALF / 2], int first, int tiles)
    {
        int t = 0;
#pragma unroll 1
        for (; t + 1 < tiles; t += 2) {
            float S[BN / 2], rescale[2];
            uint32_t P[BN / 16][4];
            named_barrier_sync(TURN, 256);
            score_piece<2, true>(S);
            score_piece<3, false>(S);
            score_piece<0, false>(S);
            score_piece<1, false>(S);
            score_piece<4, false>(S);
            wgmma_commit();
            phase[1] ^= 1;
            right_take(O, rescale, [&] { retire<0>(S); });
            multiply_other(O);
            exponentiate(S, rescale, first + t * BN + BN);
            to_operand<T, BN>(P, S);
            give(P, rescale);
            retire<0>(O);
            release(0);
            rescale_rows(O, rescale);
            clear_tail(1, first + t * BN + BN);
            multiply_add<T, HALF, BN / 16>(O, P, values(1));
            retire<0>(O);
            release(1);
        }
        if (t == tiles) return;
        float rescale[2];
        right_take(O, rescale, [] {});
        clear_tail(0, first + t * BN);
        multiply_other(O);
        retire<0>(O);
        release(0);
    }
    template <class F> DEVICE void right_take(float (&O)[HALF / 2], float (&rescale)[2], F retire_scores)
    {
        take(rescale);
        phase[0] ^= 1;
        retire_scores();
        rescale_rows(O, rescale);
    }

    /* Ends a split (a part of the keys): adds its result to the sum of this block's earlier splits. Writes the sum to
     * `out` if the block has computed all splits of these rows, otherwise to the workspace. */
    DEVICE void end(float (&O)[HALF / 2], int split)
    {
        const bool joins = split > place.begin, last = split + 1 == place.end, out = last && place.q.ends_in_block(p);
        float2 now[2];
        float keep[2], add[2];
#pragma unroll
        for (int distance = 1; distance <= 2; distance++)
#pragma unroll
            for (int half = 0; half < 2; half++) x.l[half] += __shfl_xor_sync(0xffffffff, x.l[half], distance);
        float(&sums)[2][BM] = sm.l[split & 1];
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) sums[W][row + half * 8] = x.l[half];
        named_barrier_sync(ENDED, 256);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + half * 8;
            const float m = p.reference.base(x.m[half]), l = __fadd_rn(sums[0][r], sums[1][r]);
            const float2 before = joins ? sm.before[W][r] : make_float2(0, 0);
            const fold f(before.x, m);
            now[half] = joins ? make_float2(f.m, f(before.y, l)) : make_float2(m, l);
            keep[half] = f.keep, add[half] = f.add;
        }
        __syncwarp();
        if (lane % 4 == 0)
#pragma unroll
            for (int half = 0; half < 2; half++) sm.before[W][row + half * 8] = now[half];
        __syncwarp();
        /* The thread's partial sums of O in the workspace, in pieces of 4 floats. Even pieces belong to the thread's
         * first row, odd pieces to its second row. */
        float4 *const sum = p.O + place.unit * UNIT + W * (UNIT / 2) + thread;
        if (joins) {
#pragma unroll
            for (int first = 0; first < HALF / 8; first += 8) {
                float4 old[8];
#pragma unroll
                for (int e = 0; e < 8; e++) old[e] = sum[(first + e) * 128];
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const float before[4] = { old[e].x, old[e].y, old[e].z, old[e].w };
                    const int half = e % 2, n = (first + e) / 2 * 8 + half * 2;
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float &y = O[n + c / 2 * 4 + c % 2];
                        y = fmaf(add[half], y, __fmul_rn(keep[half], before[c]));
                    }
                }
            }
        }
        if (!out) {
#pragma unroll
            for (int e = 0; e < HALF / 8; e++) {
                const int n = e / 2 * 8 + e % 2 * 2;
                sum[e * 128] = make_float4(O[n], O[n + 1], O[n + 4], O[n + 5]);
            }
            if (W == LEFT && last && lane % 4 == 0)
#pragma unroll
                for (int half = 0; half < 2; half++) p.ml[place.unit * BM + row + half * 8] = now[half];
            return;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = place.r0 + row + half * 8, i = r / group, h = r - i * group;
            const int2 sees = sm.sees[row + half * 8];
            const bool exists = r < place.q.rows, sound = is_sound(now[half].x, now[half].y, sees.x < sees.y);
            const float factor = factor_of(now[half].y);
            float zero = 0; /* 0, or NaN if one of the thread's sums in this row is not finite */
            T *const to = p.to.out ? out_row<T>(p.to, place.b, h, i) + W * HALF : nullptr;
#pragma unroll
            for (int n = 0; n < HALF / 8; n += 4) {
                uint32_t words[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *const o = O + (n + e) * 4 + half * 2;
                    zero = fmaf(o[0], 0, fmaf(o[1], 0, zero));
                    words[e] = pack<T>(o[0] * factor, o[1] * factor);
                }
                transpose_quad(words, lane % 4);
                if (exists && to)
                    *(uint4 *)(to + (n + lane % 4) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
            }
            const unsigned unsound = __ballot_sync(0xffffffff, !sound || zero != 0);
            if (lane % 4 != 0 || !exists) continue;
            p.flags[((int64_t)place.b * place.q.rows + r) * 2 + W] = (unsound >> (lane & 28) & 15) != 0;
            if (W == LEFT && p.to.lse)
                p.to.lse[place.b * p.to.lse_batch + h * p.to.lse_head + i * p.to.lse_row] = lse_of(now[half].x,
                                                                                                   now[half].y);
        }
    }

    DEVICE void run_all()
    {
        float O[HALF / 2];
        keep_queries();
#pragma unroll 1
        for (int split = place.begin; split < place.end; split++) {
#pragma unroll
            for (int n = 0; n < HALF / 2; n++) O[n] = 0;
            x = softmax();
            if (W == LEFT) run_left(O, place.first_key(split), place.tiles(split));
            else run_right(O, place.first_key(split), place.tiles(split));
            end(O, split);
        }
    }
};

/* Loads the block's rows of Q, and determines which keys each row sees. All threads of both consumers call this. */
DEVICE void load_queries(const attn_geometry &g, shared &sm)
{
    const attn_view &q = g.view[ATTN_T_q];
    const int H = (int)g.group, rows = sm.place.q.rows, r0 = sm.place.r0, b = sm.place.b;
    for (int n = threadIdx.x; n < BM * (D / 8); n += 256) {
        const int r = n / (D / 8), c = n - r * (D / 8), i = (r0 + r) / H;
        const bool exists = r0 + r < rows;
        const uint16_t *const from = (const uint16_t *)q.data +
                                     (exists ? attn_at(&q, b, r0 + r - i * H, i) + c * 8 : 0);
        cp_async_16(smem_addr(sm.Q[c / 8] + (r * 8 + (c % 8 ^ (r & 7))) * 8), from, exists);
    }
    if (threadIdx.x < BM) {
        const int r = r0 + (int)threadIdx.x;
        attn_range keys = { 0, 0 };
        if (r < rows) keys = attn_keys_of(&g, &sm.place.q.s, r / H);
        sm.sees[threadIdx.x] = make_int2((int)keys.lo, (int)keys.hi);
    }
    cp_async_wait_all();
    fence_proxy_async_shared();
    named_barrier_sync(Q_READY, 256);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    latent_tiles(const __grid_constant__ CUtensorMap map, const __grid_constant__ cuda_args a,
                 const __grid_constant__ plan p)
{
    shared &sm = block_memory<shared>();
    const int w = warpgroup_index();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map);
        for (int s = 0; s < 2; s++) {
            for (int n = 0; n < PIECES; n++) mbarrier_init(smem_addr(&sm.bars[s].full[n]), 1);
            for (int n = 0; n < 2; n++) mbarrier_init(smem_addr(&sm.bars[s].empty[n]), 1);
        }
        fence_mbarrier_init();
    }
    launch_dependents();
    wait_for_prerequisites();
    if (threadIdx.x == 0) sm.place = block_place_of(a.g, p, (int)blockIdx.x);
    __syncthreads();
    if (sm.place.begin >= sm.place.end) return;
    if (w == 2) {
        setmaxnreg_dec<PRODUCER>();
        if (threadIdx.x / 32 == 8) load_keys(a.g, sm, &map);
        return;
    }
    setmaxnreg_inc<CONSUMER>();
    load_queries(a.g, sm);
    if (w == LEFT) warpgroup<T, LEFT>(a.g, p, sm).run_all();
    else warpgroup<T, RIGHT>(a.g, p, sm).run_all();
}

/* ---- The kernels that combine partial results -------------------------------------------------------------------- */

/* COMBINE_PARTS: the most parts into which combine_latent divides a row's split groups (four splits each). 128 threads
 * add up each part. */
enum { COMBINE_PARTS = 4, COMBINE_BLOCKS = 8 /* number of blocks per multiprocessor */ };

/* Adds up the results of a row's splits, one row per block. 128 threads add up one part: every PARTS-th split group
 * (four splits). One warp recomputes a row that tensor cores could not compute (see is_sound()). */
template <int PARTS>
__global__ void __launch_bounds__(128 * PARTS, COMBINE_BLOCKS / PARTS)
    combine_latent(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    __shared__ float4 part_O[PARTS][128];
    __shared__ float2 part_ml[PARTS];
    const attn_geometry &g = a.g;
    const uint32_t rows = (uint32_t)(g.dims.Sq * g.group), heads = (uint32_t)g.group;
    const int b = (int)(blockIdx.x / rows), r = (int)(blockIdx.x % rows), i = (int)((uint32_t)r / heads),
              h = r - i * (int)heads, part = PARTS > 1 ? threadIdx.x / 128 : 0, piece = threadIdx.x % 128;
    wait_for_prerequisites();
    const sequence_place q = sequence_place_of(g, b);
    bool repair;
    if (q.ends_in_block(p)) {
        const uint8_t *const flags = p.flags + ((int64_t)b * rows + r) * 2;
        repair = flags[0] | flags[1];
    } else {
        const int each = p.walks ? 1 : SPLIT_GROUP,
                  units = p.walks ? (q.splits + SPLIT_GROUP - 1) / SPLIT_GROUP : q.splits;
        const int64_t unit = ((int64_t)b * p.tiles + r / BM) * p.units;
        const float2 *const ml = p.ml + unit * BM + r % BM;
        const float4 *const O = p.O + unit * UNIT + piece_of(r % BM, piece);
        float m = -CUDART_INF_F, l = 0;
        float4 o = make_float4(0, 0, 0, 0);
        for (int u = part * each; u < units; u += PARTS * each) {
            const int count = min(each, units - u);
            float2 ml_of[SPLIT_GROUP];
            float4 O_of[SPLIT_GROUP];
#pragma unroll
            for (int n = 0; n < SPLIT_GROUP; n++)
                if (n < count) {
                    ml_of[n] = ml[(int64_t)(u + n) * BM];
                    O_of[n] = O[(int64_t)(u + n) * UNIT];
                }
            float m_group = ml_of[0].x, l_group = ml_of[0].y;
            float4 o_group = O_of[0];
#pragma unroll
            for (int n = 1; n < SPLIT_GROUP; n++)
                if (n < count) {
                    const fold f(m_group, ml_of[n].x);
                    const float4 &next = O_of[n];
                    m_group = f.m, l_group = f(l_group, ml_of[n].y);
                    o_group = make_float4(f(o_group.x, next.x), f(o_group.y, next.y), f(o_group.z, next.z),
                                          f(o_group.w, next.w));
                }
            const fold f(m, m_group);
            m = f.m, l = f(l, l_group);
            o = make_float4(f(o.x, o_group.x), f(o.y, o_group.y), f(o.z, o_group.z), f(o.w, o_group.w));
        }
        if (PARTS > 1) {
            part_O[part][piece] = o;
            if (piece == 0) part_ml[part] = make_float2(m, l);
            __syncthreads();
        }
        bool sound = true;
        if (part == 0) {
#pragma unroll
            for (int n = 1; n < PARTS; n++) {
                const fold f(m, part_ml[n].x);
                const float4 &next = part_O[n][piece];
                m = f.m, l = f(l, part_ml[n].y);
                o = make_float4(f(o.x, next.x), f(o.y, next.y), f(o.z, next.z), f(o.w, next.w));
            }
            const attn_range seen = attn_keys_of(&g, &q.s, i);
            const attn_view &out = g.view[ATTN_T_out];
            const float factor = factor_of(l), value[4] = { o.x, o.y, o.z, o.w };
            const int64_t to = attn_at(&out, b, h, i) + first_column(piece);
            sound = is_sound(m, l, seen.lo < seen.hi);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sound &= value[e] - value[e] == 0;
                if (out.data) store_float(out.dtype, out.data, to + e / 2 * 8 + e % 2, value[e] * factor);
            }
            if (threadIdx.x == 0 && p.to.lse)
                p.to.lse[b * p.to.lse_batch + h * p.to.lse_head + i * p.to.lse_row] = lse_of(m, l);
        }
        repair = __syncthreads_or(!sound);
    }
    if (repair && threadIdx.x < 32)
        forward_row<LATENT_CHANNELS>(a, head_args_of(a, b, h), i, g.view[ATTN_T_out], nullptr, EVERY_ROW);
}

/* Recomputes the rows that latent_tiles could not compute, one row per warp. It is launched if each row's splits were
 * computed by one block, so that there are no results to combine. */
__global__ void __launch_bounds__(128)
    repair_latent(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const attn_geometry &g = a.g;
    const int rows = (int)(g.dims.Sq * g.group), all = (int)g.dims.B * rows;
    const uint16_t *const flags = (const uint16_t *)p.flags;
    wait_for_prerequisites();
    for_flagged_warps(
        all, [&](int n) { return (uint32_t)flags[n]; },
        [&](int n, uint32_t) {
            const int b = n / rows, r = n % rows, i = r / (int)g.group;
            forward_row<LATENT_CHANNELS>(a, head_args_of(a, b, r - i * g.group), i, g.view[ATTN_T_out], nullptr,
                                         EVERY_ROW);
        });
}

/* ---- Functions of the host that plan and launch ------------------------------------------------------------------ */

/* How a problem is divided among blocks. A split is a part of a sequence's keys. A block computes either one split or a
 * group of up to SPLIT_GROUP splits, whichever takes fewer waves of blocks. Both ways give the same bits. */
struct launch_plan {
    int tiles, units, walks;
    bool all_end; /* whether one block computes all splits of a row, so that no kernel has to combine results */
    int64_t blocks, rows, O, ml, bytes;
};

launch_plan launch_plan_of(const cuda_chip *chip, const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    launch_plan y;
    const int64_t rows = d.Sq * g.group, splits = most_splits_of(d.Sk, rows > BM),
                  groups = attn_tiles(splits, SPLIT_GROUP);
    y.tiles = (int)attn_tiles(rows, BM);
    const int64_t walkers = d.B * y.tiles * groups, singles = d.B * y.tiles * splits;
    const int64_t rounds = attn_tiles(walkers, chip->multiprocessors) * attn_min64(splits, SPLIT_GROUP);
    y.walks = splits > 1 && rounds * 8 <= attn_tiles(singles, chip->multiprocessors) * 9;
    y.units = (int)(y.walks ? groups : splits);
    y.all_end = y.units == 1;
    y.blocks = d.B * y.tiles * y.units;
    y.rows = d.B * rows;
    y.O = (y.rows * 2 + 1023) / 1024 * 1024;
    y.ml = y.O + (splits > 1 ? y.blocks * BM * DV * 4 : 0);
    y.bytes = y.ml + (splits > 1 ? y.blocks * BM * 8 : 0);
    return y;
}

/* Returns whether v consists of the first columns of k, in the same memory. */
bool values_are_keys(const attn_geometry &g)
{
    const attn_view &k = g.view[ATTN_T_k], &v = g.view[ATTN_T_v];
    return k.data == v.data && k.row == v.row && k.batch == v.batch;
}

tma_tensor keys_of(const attn_geometry &g)
{
    const attn_dims &d = g.dims;
    return d.page_size ? tma_tensor_of(g.view[ATTN_T_k], d.pages, 1, d.page_size, D)
                       : tma_tensor_of(g.view[ATTN_T_k], d.B, 1, d.Sk, D);
}

bool plan_latent(const cuda_chip *chip, attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const int64_t FAR = 1 << 29; /* keys and windows are counted in 32 bits */
    if (d.D != D || d.Dv != DV || d.Hk != 1 || d.packed || d.B <= 0 || d.Sq <= 0 || d.Sk <= 0 || d.Sk >= FAR)
        return false;
    if (d.Sq * g.group > MOST_ROWS || !values_are_keys(g)) return false;
    if (d.page_size && (d.page_size % BN || d.pages <= 0 || d.pages >= INT32_MAX)) return false;
    const tma_tensor k = keys_of(g);
    if (!tma_walkable(g.view[ATTN_T_k], k.B, 1, k.rows, D, 8)) return false;
    if (!tma_walkable(g.view[ATTN_T_q], d.B, d.H, d.Sq, D, 8)) return false;
    if (g.view[ATTN_T_out].data && !tma_walkable(g.view[ATTN_T_out], d.B, d.H, d.Sq, DV, 8)) return false;
    const launch_plan y = launch_plan_of(chip, g);
    if (y.blocks >= INT32_MAX || y.rows >= INT32_MAX) return false;
    plan->workspace_bytes = (size_t)y.bytes;
    return true;
}

template <typename T>
cudaError_t launch_tiles(const launch_plan &y, const CUtensorMap &map, const cuda_args &a, const plan &p,
                         cudaStream_t stream)
{
    cudaError_t code = allow_shared<latent_tiles<T>>(sizeof(shared));
    if (code == cudaSuccess)
        code = launch_dependent(latent_tiles<T>, y.blocks, THREADS, sizeof(shared), stream, map, a, p);
    if (code != cudaSuccess) return code;
    if (y.all_end)
        return launch_dependent(repair_latent, attn_min64(attn_tiles(y.rows, 128), 1024), 128, 0, stream, a, p);
    /* Whether each row has at most COMBINE_PARTS groups of splits. If so, 128 threads add up all groups of a row.
     * Otherwise, COMBINE_PARTS times as many threads share the groups. */
    const bool one_each = attn_tiles(y.units, y.walks ? 1 : SPLIT_GROUP) <= COMBINE_PARTS;
    return one_each ? launch_dependent(combine_latent<1>, y.rows, 128, 0, stream, a, p)
                    : launch_dependent(combine_latent<COMBINE_PARTS>, y.rows, 128 * COMBINE_PARTS, 0, stream, a, p);
}

cudaError_t launch_latent(const cuda_chip *chip, cudaStream_t stream, const attn_plan *of, void *memory)
{
    const cuda_args a = cuda_args_of(chip, of);
    const launch_plan y = launch_plan_of(chip, a.g);
    CUtensorMap map;
    if (!tma_map(&map, keys_of(a.g), BN)) return cudaErrorInvalidValue;
    plan p;
    p.reference.c = (float)a.g.scale * LOG2E, p.reference.slack = 8 / p.reference.c;
    p.to = results_of(a.g);
    p.tiles = y.tiles, p.units = y.units, p.walks = y.walks;
    p.flags = (uint8_t *)memory;
    p.O = (float4 *)((char *)memory + y.O);
    p.ml = (float2 *)((char *)memory + y.ml);
    return of->problem->q.dtype == ATTN_F16 ? launch_tiles<compiled_half>(y, map, a, p, stream)
                                            : launch_tiles<__nv_bfloat16>(y, map, a, p, stream);
}

const uint64_t FEATURES = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(out) |
                          ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(seqlens_k) | ATTN_TENSOR_BIT(page_table) |
                          ATTN_OPTION_BIT(GROUPED) | ATTN_OPTION_BIT(CAUSAL) | ATTN_OPTION_BIT(WINDOW) |
                          ATTN_OPTION_BIT(TOP_LEFT);

} // namespace

extern const cuda_kernel sm90_latent_forward = {
    { "sm90_latent", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16), ATTN_MAX_HEAD_DIM, FEATURES },
    90,
    90,
    plan_latent,
    launch_latent,
};
