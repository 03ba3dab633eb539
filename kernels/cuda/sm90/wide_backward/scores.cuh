/* scores.cuh: the kernel of the wide backward that computes P and dS of a part of the problem and stores them in
 * memory. A block computes pairs of a row tile (128 queries) and a key tile (256 keys), one after the other. Each of
 * its two consumers has 64 of the queries:
 *
 *     S = Q K^T,     in steps of 64 columns of D           P  = exp(S - lse)         to memory, 16 bits
 *     dP = dO V^T,   in steps of 64 columns of Dv          dS = P (dP - delta)       to memory, 16 bits
 *
 * Every mask and every option of scores is applied here. dS is computed from the rounded P. A pair with P = 0 has
 * dS = 0, so that NaN in a hidden row of V or dO has no effect. */
#ifndef ATTN_SM90_SCORES_CUH
#define ATTN_SM90_SCORES_CUH

#include "kernels/cuda/sm90/wide_backward/kept.cuh"

namespace {

/* A piece of work: the pairs of a row tile (128 queries) and a key tile (256 keys). */
struct score_work {
    int b, h, i0, j0, Sq, Sk; /* Sq == 0: there is no more work */
    key_band band;
    int64_t row;    /* index of the row tile's first query in lse and delta */
    uint16_t *kept; /* where P of these pairs is stored; dS follows P */
    bool bounded;   /* whether FlashMask hides some of the pairs */
};

typedef kept_shared<ROWS * STEP, KEYS * STEP, score_work> scores_shared;

/* registers per thread of the producer warpgroup, and of a consumer warpgroup */
enum { SCORES_PRODUCER = 40, SCORES_CONSUMER = 232 };
/* LEAD: a number of buffers. At the beginning, the right-hand consumer waits until the left-hand consumer has issued
 * the products of LEAD buffers. */
enum { LEAD = 3, LEAD_BARRIER = 1 };

/* ---- The warpgroup that loads operands (producer) ---------------------------------------------------------------- */

/* Loads the operands of the block's work: of every gridDim.x-th pair of a row tile and a key tile, unless a mask hides
 * the pair. One thread calls this. */
DEVICE void load_scores(scores_shared &sm, const cuda_args &a, const kept_plan &p, const kept_maps &m)
{
    const attn_dims &d = a.g.dims;
    const int steps_D = (int)attn_tiles(d.D, STEP), steps = steps_D + (int)attn_tiles(d.Dv, STEP);
    const uint32_t BYTES = sizeof(scores_shared::stage);
    ring<STAGES> at;
    int work = 0;
    const auto publish = [&](const score_work &y) {
        await_empty(sm.bars, at);
        sm.works[work] = y;
        if (++work == WORKS) work = 0;
    };
    int next = (int)blockIdx.x; /* next key tile of this block, counted from the first that row tile r sees */
    for (int r = 0; r < p.part.heads * p.part.rows; r++) {
        const int head = r / p.part.rows, row = p.part.row + r - head * p.part.rows;
        const row_tile x = row_tile_of(a, p, p.part.head + head, row);
        const int count = x.keys.last - x.keys.first;
        for (; next < count; next += (int)gridDim.x) {
            const int n = x.keys.first + next, q = (int)x.s.q_start + x.i0, k = (int)x.s.k_start + n * KEYS,
                      batch = d.packed ? 0 : x.b;
            if (!shows(a, p, x.b, x.h, x.i0, x.Sq, n)) continue;
            publish({ x.b, x.h, x.i0, n * KEYS, x.Sq, (int)x.s.Sk, x.band,
                      x.b * a.lse_batch + x.h * a.lse_head + x.s.q_start + x.i0, kept_at(p, head, row, x.keys.first, n),
                      mask_kind_of(a, p, x.b, x.h, x.i0, x.Sq, n) == ATTN_TILE_PARTIAL });
#pragma unroll 1
            for (int c = 0; c < steps; c++, at.next()) {
                const uint32_t bar = smem_addr(&sm.bars.full[at.stage]);
                const bool values = c >= steps_D;
                const int column = (values ? c - steps_D : c) * STEP;
                await_empty(sm.bars, at);
                mbarrier_arrive_expect_tx(bar, BYTES);
                tma_load_4d(smem_addr(sm.stages[at.stage].first), values ? &m.dO : &m.Q, column, q, x.h, batch, bar);
                tma_load_4d(smem_addr(sm.stages[at.stage].second), values ? &m.V : &m.K, column, k, x.hk, batch, bar);
            }
        }
        next -= count;
    }
    publish({});
    mbarrier_arrive(smem_addr(&sm.bars.full[at.stage]));
}

/* ---- Masks of scores, and storing P and dS ----------------------------------------------------------------------- */

/* Sets exponents of the thread's rows i and i + 8 to -inf, for keys that the row does not see and for rows that do not
 * exist. The keys begin at j0. */
template <int N> DEVICE void hide_pairs(float (&z)[N / 2], const score_work &x, int i, int j0, int lane)
{
    const int column = j0 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = i + half * 8, lo = row + x.band.lo - column,
                  hi = row < x.Sq ? min(row + x.band.hi, x.band.Sk) - column : 0;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi) z[n * 4 + half * 2 + e] = -CUDART_INF_F;
    }
}

/* Writes a warp's 16 rows of a block to memory. words[n * 2 + half] has two numbers of row lane / 4 + 8 half, in
 * columns c and c + 1, where c = 8 n + 2 (lane % 4). */
DEVICE void keep_rows(uint16_t *block, const uint32_t *words, int warp, int lane)
{
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < STEP / 8; n += 4) {
            const int row = warp * 16 + half * 8 + lane / 4;
            uint32_t r[4];
#pragma unroll
            for (int e = 0; e < 4; e++) r[e] = words[(n + e) * 2 + half];
            transpose_quad(r, lane % 4);
            store_16(block + row * STEP + ((n + lane % 4) ^ (row & 7)) * 8, make_uint4(r[0], r[1], r[2], r[3]));
        }
}

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* Options that an instance of the kernel computes. PLAIN: none. WITH_MODS: softcap, ALiBi and FlashMask. WITH_PAIRS:
 * these options, and keep_mask and dropout. WITH_BIAS: all options. */
enum score_form { PLAIN, WITH_MODS, WITH_PAIRS, WITH_BIAS };

template <typename T, score_form FORM> struct score_maker {
    static const bool MODS = FORM != PLAIN, BIAS = FORM == WITH_BIAS, PAIRS = FORM == WITH_PAIRS || BIAS;
    const cuda_args &a;
    const kept_plan &p;
    scores_shared &sm;
    consumer<2> me;
    ring<STAGES> at;
    /* true in the left-hand consumer until it is LEAD buffers ahead; the right-hand consumer waits until then */
    bool ahead;
    const k_major_low<ROWS> first_rows;
    const k_major_low<KEYS> first_keys;

    DEVICE score_maker(const cuda_args &a_, const kept_plan &p_, scores_shared &sm_, int w)
        : a(a_), p(p_), sm(sm_), me(w), ahead(w == 0), first_rows(smem_addr(sm_.stages[0].first) + w * STEP * 128),
          first_keys(smem_addr(sm_.stages[0].second))
    {
    }

    DEVICE void issue(float (&S)[KEYS / 2], int add)
    {
        await_full(sm.bars, at);
        multiply<T, KEYS, STEP / 16>(S, stage_of<sizeof(scores_shared::stage)>(first_rows, at.stage),
                                     stage_of<sizeof(scores_shared::stage)>(first_keys, at.stage), add);
    }
    DEVICE void multiply_stages(float (&S)[KEYS / 2], int steps)
    {
        issue(S, 0);
#pragma unroll 1
        for (int c = 1; c < steps; c++) {
            const ring<STAGES> before = at;
            at.next();
            if (ahead && c == LEAD) lead();
            issue(S, 1);
            wgmma_wait<1>();
            me.release(sm.bars, before);
        }
        retire<0>(S);
        me.release(sm.bars, at);
        at.next();
        if (ahead) lead();
    }
    DEVICE void lead()
    {
        named_barrier_arrive(LEAD_BARRIER, 256);
        ahead = false;
    }

    /* Turns S, the products q.k with 64 keys from key j0 on, into P = exp2((score - top) log2(e) - lse2). `top` is 0
     * unless the row's lse is huge and stored as two numbers. `derivative` gets the derivative of softcap, if any. */
    DEVICE void make_P(float (&S)[STEP / 2], float (&derivative)[STEP / 2], const score_work &x, const float (&top)[2],
                       const float (&lse2)[2], float slope, int i, int j0, bool free)
    {
        float c = p.scale; /* the score, before bias and masks, is S times c */
        if (MODS && p.mods.cap != 0) {
            c = (float)a.g.softcap;
#pragma unroll
            for (int n = 0; n < STEP / 2; n++) {
                S[n] = 1 - __fdividef(2, 1 + exp2_fast(S[n] * p.mods.cap));
                derivative[n] = fmaf(-S[n], S[n], 1);
            }
        }
        if (BIAS) {
            const char *rows[2];
            uint32_t raw[STEP / 2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                rows[half] = p.bias.data + x.b * p.bias.batch + x.h * p.bias.head +
                             min(i + half * 8, x.Sq - 1) * p.bias.row +
                             me.lane % 4 * (p.bias.dtype == ATTN_F32 ? 8 : 4);
            load_bias<STEP>(raw, p.bias, rows, j0, me.lane);
            add_bias<STEP>(S, raw, p.bias.dtype, c);
            c = 1;
        }
        if (MODS && slope != 0) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float behind = (float)(i + half * 8 + x.Sk - x.Sq - (j0 + me.lane % 4 * 2));
#pragma unroll
                for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &s = S[n * 4 + half * 2 + e];
                        s = fmaf(s, c, -slope * fabsf(behind - (float)(n * 8 + e)));
                    }
            }
            c = 1;
        }
#pragma unroll
        for (int n = 0; n < STEP / 2; n++)
            S[n] = fmaf(BIAS ? S[n] - top[n / 2 % 2] : S[n], c * LOG2E, -lse2[n / 2 % 2]);
        if (!free) hide_pairs<STEP>(S, x, i, j0, me.lane);
        if (MODS && x.bounded) hide_by_bounds<STEP, 4>(S, p.mask, x, i, j0, me.lane);
        if (PAIRS && p.keep.words && j0 < x.Sk) {
            uint2 words[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                words[half] = kept_words(p.keep, x.b, x.h, min(i + half * 8, x.Sq - 1), j0 / KEEP_KEYS, me.lane);
                if (j0 % KEEP_KEYS) words[half].x >>= STEP / 4, words[half].y >>= STEP / 4;
            }
            hide_by_words<STEP>(S, words, me.lane);
        }
#pragma unroll
        for (int n = 0; n < STEP / 2; n++) S[n] = exp2_fast(S[n]);
    }

    /* Returns two P times the derivative of softcap, as 16-bit numbers. For a hidden pair (P = 0) the derivative may be
     * NaN, so the result is set to 0. */
    DEVICE static uint32_t capped_P(const float (&P)[STEP / 2], const float (&derivative)[STEP / 2], int n)
    {
        return pack<T>(P[2 * n] == 0 ? 0 : P[2 * n] * derivative[2 * n],
                       P[2 * n + 1] == 0 ? 0 : P[2 * n + 1] * derivative[2 * n + 1]);
    }

    /* Applies dropout to P or dP of 64 keys: dropped pairs become 0, others are multiplied by the dropout scale. c says
     * which of the key tile's four groups of 64 keys these are. `kept` has the bits of draw() for these keys in its
     * lower half or, for odd c, in its upper half. */
    DEVICE void drop_pairs(float (&S)[STEP / 2], const uint32_t (&kept)[2], int c) const
    {
        const uint32_t mine[2] = { kept[0] >> c % 2 * 16, kept[1] >> c % 2 * 16 };
#pragma unroll
        for (int n = 0; n < STEP / 2; n++) S[n] *= p.dropout.scale;
        drop<STEP>(S, mine, me.lane);
    }

    DEVICE void run()
    {
        const int steps_D = (int)attn_tiles(a.g.dims.D, STEP), steps_Dv = (int)attn_tiles(a.g.dims.Dv, STEP);
        if (me.w == 1) named_barrier_sync(LEAD_BARRIER, 256);
        for (int work = 0;; work = work + 1 == WORKS ? 0 : work + 1) {
            await_full(sm.bars, at);
            const score_work x = sm.works[work];
            if (x.Sq == 0) break;
            const int row0 = x.i0 + me.w * STEP, row = me.w * STEP + me.warp * 16 + me.lane / 4, i = x.i0 + row;
            float top[2] = { 0, 0 }, lse2[2], delta[2], S[KEYS / 2], slope = 0;
            uint32_t P[KEYS / 4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool exists = i + half * 8 < x.Sq;
                const float lse = exists ? p.s.lse[x.row + row + half * 8] : -CUDART_INF_F;
                lse2[half] = lse_in_base_2(lse);
                /* a bias may make lse huge; it is then stored as two numbers */
                if (BIAS && is_parted_by_tiles(a, lse))
                    top[half] = lse, lse2[half] = p.s.rest[x.row + row + half * 8] * LOG2E;
                delta[half] = exists ? p.s.delta[x.row + row + half * 8] : 0;
            }
            if (MODS && p.mods.slopes) slope = p.mods.slopes[x.b * p.mods.slope_batch + x.h * p.mods.slope_head];
            uint32_t kept_pairs[KEYS / STEP / 2][2] = {};
            uint16_t *const kept = x.kept + me.w * (HALF_TILE / 2);
            multiply_stages(S, steps_D);
#pragma unroll
            for (int c = 0; c < KEYS / STEP; c++) {
                const int j0 = x.j0 + c * STEP;
                const bool free = j0 >= row0 + STEP - 1 + x.band.lo && j0 + STEP - 1 < row0 + x.band.hi &&
                                  j0 + STEP <= x.band.Sk && row0 + STEP <= x.Sq;
                float(&Z)[STEP / 2] = *(float(*)[STEP / 2])(S + c * (STEP / 2));
                float derivative[STEP / 2];
                make_P(Z, derivative, x, top, lse2, slope, i, j0, free);
                uint32_t *const words = P + c * (STEP / 4);
#pragma unroll
                for (int n = 0; n < STEP / 4; n++) words[n] = pack<T>(Z[2 * n], Z[2 * n + 1]);
                if (PAIRS && p.dropout.drops) {
                    uint32_t mine[2], dropped[STEP / 4];
                    draw<STEP>(mine, p.dropout, (uint32_t)(p.dropout.first + x.b * p.dropout.batch + x.h), i, j0,
                               me.lane);
#pragma unroll
                    for (int half = 0; half < 2; half++) kept_pairs[c / 2][half] |= mine[half] << c % 2 * 16;
                    if (p.mods.cap != 0)
#pragma unroll
                        for (int n = 0; n < STEP / 4; n++) words[n] = capped_P(Z, derivative, n);
                    drop_pairs(Z, kept_pairs[c / 2], c);
#pragma unroll
                    for (int n = 0; n < STEP / 4; n++) dropped[n] = pack<T>(Z[2 * n], Z[2 * n + 1]);
                    keep_rows(kept + c * BLOCK, dropped, me.warp, me.lane);
                } else {
                    keep_rows(kept + c * BLOCK, words, me.warp, me.lane);
                    if (MODS && p.mods.cap != 0)
#pragma unroll
                        for (int n = 0; n < STEP / 4; n++) words[n] = capped_P(Z, derivative, n);
                }
            }
            multiply_stages(S, steps_Dv);
#pragma unroll
            for (int c = 0; c < KEYS / STEP; c++) {
                uint32_t *const words = P + c * (STEP / 4);
                float(&dP)[STEP / 2] = *(float(*)[STEP / 2])(S + c * (STEP / 2));
                if (PAIRS && p.dropout.drops) drop_pairs(dP, kept_pairs[c / 2], c);
#pragma unroll
                for (int n = 0; n < STEP / 4; n++) {
                    const float2 y = unpack<T>(words[n]);
                    words[n] = pack<T>(y.x == 0 ? 0 : y.x * (dP[2 * n] - delta[n % 2]),
                                       y.y == 0 ? 0 : y.y * (dP[2 * n + 1] - delta[n % 2]));
                }
                keep_rows(kept + HALF_TILE + c * BLOCK, words, me.warp, me.lane);
            }
        }
        if (me.w == 0 && ahead) lead();
        fence_proxy_async_global();
    }
};

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, score_form FORM>
__global__ void __launch_bounds__(THREADS, 1)
    scores_of_part(const __grid_constant__ cuda_args a, const __grid_constant__ kept_plan p,
                   const __grid_constant__ kept_maps m)
{
    static_assert(sizeof(scores_shared) <= 227 << 10, "what a block may have");
    scores_shared &sm = block_memory<scores_shared>();
    begin_block(sm);
    const int wg = warpgroup_index();
    if (wg == 0) {
        setmaxnreg_dec<SCORES_PRODUCER>();
        if (threadIdx.x == 0) load_scores(sm, a, p, m);
    } else {
        setmaxnreg_inc<SCORES_CONSUMER>();
        score_maker<T, FORM>(a, p, sm, wg - 1).run();
    }
}

} // namespace

#endif
