/* backward_tiles.cuh: FlashAttention-2 backward (arXiv:2307.08691) for Hopper, head sizes up to 128, with TMA, wgmma
 * and warp specialisation. README.md has the schedule. backward_rounds.cuh has a block's shared memory and the
 * producer's warps; this file has the consumers.
 *
 * A block claims tiles of BN = 128 keys, or parts of them (key_parts.cuh), and goes over the tiles of BM queries that
 * see them, for every head of the group. Each of two consumer warpgroups owns 64 of the keys and has their dK and dV in
 * registers:
 *
 *     S^T = K Q^T            dP^T = V dO^T                  64 keys x BM queries per consumer
 *     P^T = exp(S^T - lse)   dS^T = P^T (dP^T - delta)      in registers, which are the next two products' operands
 *     dV += P^T dO           dK += dS^T Q
 *     dQ  = dS K             one tile of queries later, because dQ needs dS of both consumers
 *
 * TMA adds dQ to float32 sums in global memory. Blocks that find no more tiles of keys compute dQ from the sums
 * (backward_dq.cuh).
 *
 * Rows past the end of a sequence are set to zero in shared memory, because P = 0 times NaN is NaN. Keys whose dK or dV
 * is not finite are recomputed one by one at the end (repair_own_keys, or sum_parts). Rows of dQ that are not finite
 * are recomputed immediately. */
#ifndef ATTN_SM90_BACKWARD_TILES_CUH
#define ATTN_SM90_BACKWARD_TILES_CUH
#include "kernels/cuda/sm90/backward/backward_dq.cuh"

/* From sm80/forward.cu: computes lse of rows with huge scores as two numbers. */
cudaError_t forward_parts(const cuda_chip *chip, cuda_args a, const attn_plan *plan, cudaStream_t stream);

namespace {

/* ---- A warpgroup that multiplies (consumer) ---------------------------------------------------------------------- */

/* A consumer warpgroup. R is the type of dK and dV in memory, T or float. It is a template parameter because a test of
 * the type in store() would make ptxas run products one after the other. */
template <typename T, class X, typename R> struct gradients {
    static const int D = X::D, BM = X::BM, BN = X::BN;
    const cuda_args &a;
    const plan_of<X> &p;
    shared<X> &sm;
    const block_place &x;
    consumer<2> me;
    ring<X::STAGES_Q> q; /* positions of the next tile of queries in the rings of Q and dO */
    ring<X::STAGES_DO> o;
    /* positions in the ring of buffers for dS: the buffer to write next (`mine`), and the one to read next for dQ
     * (`whole`) */
    ring<X::STAGES_DS> mine, whole;
    uint32_t phase = 0;
    int tile;
    /* all queries of tiles free_first to free_last - 1 see all keys of this warpgroup */
    int free_first, free_last;
    /* Operands of products. own_K, own_V: K and V of this warpgroup's keys. Names with first_: the operand in the first
     * buffer of a ring. K_down: K as it is used in the product dQ = dS K, which sums over keys. */
    k_major_low<BN> own_K, own_V;
    const k_major_low<BM> first_Q, first_dO, first_dS;
    const mn_major_low<BM> first_Q_down, first_dO_down;
    mn_major_low<BN> K_down;
    const uint32_t dS_to; /* shared-memory address of this thread's elements in the first buffer of dS */
    /* index in sm.dQ of this thread's elements. me.lane and me.leader are computed from it, which saves registers. */
    const uint32_t dQ_at;

    DEVICE gradients(const cuda_args &a_, const plan_of<X> &p_, shared<X> &sm_, int w)
        : a(a_), p(p_), sm(sm_), x(sm_.place), me(w), own_K(smem_addr(sm_.keys[0]) + w * 64 * 128),
          own_V(smem_addr(sm_.keys[1]) + w * 64 * 128), first_Q(smem_addr(sm_.Q)), first_dO(smem_addr(sm_.dO)),
          first_dS(smem_addr(sm_.dS) + (X::UNITS == 2 ? w * 64 * 128 : 0)), first_Q_down(smem_addr(sm_.Q)),
          first_dO_down(smem_addr(sm_.dO)),
          K_down(smem_addr(sm_.keys[0]) + (X::UNITS == 2 ? 0 : w * X::DQ_COLUMNS / 64 * BN * 128)),
          dS_to(kept(smem_addr(sm_.dS[0]) + dS_place(me))), dQ_at(kept(dQ_place(me)))
    {
        me.lane = dQ_at / 4 % 32;
        me.leader = dQ_at == (uint32_t)me.w * QUERY_TILE * X::DQ_COLUMNS;
    }

    /* Returns a copy that ptxas cannot recognise as a copy. ptxas then computes the operand's addresses at each use,
     * and does not keep them in registers. */
    template <class OPERAND> static DEVICE OPERAND anew(OPERAND x)
    {
        x.low = opaque(x.low);
        return x;
    }

    /* Return the operands in a buffer of Q or dO: ..._along() for products that sum over channels, ..._down() for
     * products that sum over queries. */
    DEVICE auto Q_along(int stage) const { return stage_of<sizeof sm.Q[0]>(first_Q, stage); }
    DEVICE auto dO_along(int stage) const { return stage_of<sizeof sm.dO[0]>(first_dO, stage); }
    DEVICE mn_major_low<BM> Q_down(int stage) const { return stage_of<sizeof sm.Q[0]>(first_Q_down, stage); }
    DEVICE mn_major_low<BM> dO_down(int stage) const { return stage_of<sizeof sm.dO[0]>(first_dO_down, stage); }

    DEVICE void zero_past_end(uint16_t *queries) const
    {
        if (a.ends_of_queries && (tile + 1) * BM > x.Sq) zero_rows<BM, X::CHUNKS>(queries, x.Sq - tile * BM);
    }

    /* Sets `tile` to the next tile of queries. After the last tile of one head comes the first tile of the next
     * head. */
    DEVICE void next_tile_of_queries() { tile = tile + 1 == x.last ? x.first : tile + 1; }

    DEVICE const round_record &record() const { return sm.rounds[X::OPTIONS ? q.stage : 0]; }

    DEVICE void issue_S(float (&S)[BM / 2])
    {
        await_full(sm.bars_Q, q);
        if (X::OPTIONS) tile = record().tile;
        zero_past_end(sm.Q[q.stage]);
        if constexpr (X::BIAS) scale_bias(S);
        multiply<T, BM, D / 16>(S, anew(own_K), anew(Q_along(q.stage)), X::BIAS);
    }
    DEVICE void issue_dP(float (&dP)[BM / 2]) const
    {
        await_full(sm.bars_dO, o);
        zero_past_end(sm.dO[o.stage]);
        multiply<T, BM, D / 16>(dP, anew(own_V), anew(dO_along(o.stage)));
    }

    DEVICE void exponents(float (&S)[BM / 2], const row_values *values) const
    {
        if (tile < free_first || tile >= free_last)
            hide_queries<BM>(S, x, x.j0 + me.w * 64 + me.warp * 16 + me.lane / 4, tile * BM, me.lane);
        exponents_of<BM>(S, values, p.c, me.lane);
    }

    /* Sets the bit in `hidden` of each score that the causal mask, the window, the lengths or FlashMask hide. The loops
     * are not unrolled, to save registers. */
    DEVICE void hidden_scores(uint32_t (&hidden)[BM / 64], const round_record &round) const
    {
        const int column = tile * BM + me.lane % 4 * 2;
#pragma unroll
        for (int word = 0; word < BM / 64; word++) hidden[word] = 0;
        if (!round.bounded && tile >= free_first && tile < free_last) return;
        const int32_t *const bounds = p.mask.bounds + x.b * p.mask.batch + round.h / p.mask.group * p.mask.head;
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const int j = x.j0 + me.w * 64 + me.warp * 16 + me.lane / 4 + half * 8;
            const int lo = j < x.band.Sk ? j - x.band.hi + 1 : INT32_MAX, hi = min(j - x.band.lo + 1, x.Sq);
            attn_mask m = {};
            if (round.bounded)
                m = attn_mask_of(bounds + min(j, x.band.Sk - 1) * p.mask.row, p.mask.n, p.mask.causal, x.Sq);
#pragma unroll
            for (int word = 0; word < BM / 64; word++)
#pragma unroll 1
                for (int n = 0; n < 16; n++) {
                    const int i = column + word * 64 + n / 2 * 8 + n % 2;
                    const bool hides = i < lo || i >= hi || (i >= m.lts && i < m.lte) || (i >= m.uts && i < m.ute);
                    hidden[word] |= (uint32_t)hides << (n / 2 * 4 + half * 2 + n % 2);
                }
        }
    }

    /* Turns S into P if softcap, ALiBi, FlashMask or keep_mask changes scores of this tile. */
    DEVICE void exponents_of_options(float (&S)[BM / 2], const row_values *values) const
    {
        const round_record &round = record();
        const int key = x.j0 + me.w * 64 + me.warp * 16 + me.lane / 4, column = tile * BM + me.lane % 4 * 2;
        uint32_t hidden[BM / 64];
        hidden_scores(hidden, round);
        add_kept(hidden, round);
        const float slope = round.slope;
        /* position of the query minus position of the key (for ALiBi), of the thread's first pair */
        const float behind = (float)(column + (int)x.s.Sk - x.Sq - key);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 lse2 = *(const float2 *)&values[n / 8].lse2[n % 8 * 8 + me.lane % 4 * 2];
            float t[4], derivative[4] = { 1, 1, 1, 1 };
            if (p.mods.cap != 0) {
#pragma unroll
                for (int e = 0; e < 4; e++) t[e] = S[n * 4 + e] * p.mods.cap;
                tanh_of_four(t);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int c = n * 8 + e % 2, half = e / 2;
                float &s = S[n * 4 + e];
                if (p.mods.cap != 0) derivative[e] = fmaf(-t[e], t[e], 1);
                s = p.mods.cap != 0 ? t[e] * p.cap : s * p.c;
                s = fmaf(-slope, fabsf(behind + (float)(c - half * 8)), s);
                s = exp2_fast(s - (e % 2 ? lse2.y : lse2.x));
                if (hidden[n / 8] >> (n % 8 * 4 + e) & 1) s = 0;
            }
            if (p.mods.cap != 0) put_aside(n, S + n * 4, derivative);
        }
    }

    DEVICE int first_key() const
    {
        return x.j0 + me.w * 64 + me.warp * 16 + me.lane / 4;
    }

    DEVICE const char *first_bias() const
    {
        const int64_t column = (int64_t)first_key() * (p.bias.dtype == ATTN_F32 ? 4 : 2);
        return p.bias.data + x.b * p.bias.batch + record().h * p.bias.head +
               (record().tile * BM + me.lane % 4 * 2) * p.bias.row + column;
    }

    /* Loads the bias of the next tile of queries into S, as the 32 or 16 bits that are in memory. */
    template <typename WORD> DEVICE void load_bias(float (&S)[BM / 2]) const
    {
        const int i = record().tile * BM + me.lane % 4 * 2, rows = x.Sq - i, columns = p.bias.columns - first_key();
        const int64_t row = p.bias.row;
        const char *at = first_bias();
        if (i + BM <= x.Sq && x.j0 + BN <= p.bias.columns) {
#pragma unroll
            for (int n = 0; n < BM / 8; n++, at += 6 * row)
#pragma unroll
                for (int e = 0; e < 2; e++, at += row)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        S[n * 4 + half * 2 + e] = __uint_as_float(__ldg((const WORD *)at + half * 8));
        } else {
#pragma unroll
            for (int n = 0; n < BM / 8; n++, at += 6 * row)
#pragma unroll
                for (int e = 0; e < 2; e++, at += row)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        S[n * 4 + half * 2 + e] = n * 8 + e < rows && half * 8 < columns
                                                      ? __uint_as_float(__ldg((const WORD *)at + half * 8))
                                                      : 0;
        }
    }

    DEVICE static float widened(float word, attn_dtype dtype)
    {
        const uint32_t bits = __float_as_uint(word);
        return dtype == ATTN_F32 ? word : dtype == ATTN_BF16 ? __uint_as_float(bits << 16) : unpack<__half>(bits).x;
    }

    /* Converts the loaded bias in S to float32 and divides it by the scale, so that the product can add q.k. For a tile
     * with a huge lse, exponents_in_parts() reads the bias again. */
    DEVICE void scale_bias(float (&S)[BM / 2]) const
    {
        if (p.bias.dtype == ATTN_F32)
#pragma unroll
            for (int i = 0; i < BM / 2; i++) S[i] *= p.per_scale;
        else if (p.bias.dtype == ATTN_BF16)
#pragma unroll
            for (int i = 0; i < BM / 2; i++) S[i] = widened(S[i], ATTN_BF16) * p.per_scale;
        else
#pragma unroll
            for (int i = 0; i < BM / 2; i++) S[i] = widened(S[i], ATTN_F16) * p.per_scale;
    }

    /* Begins to load the bias and keep_mask's bits of the next tile of queries, whose round_record must have
     * arrived. */
    DEVICE void ask_for_pairs(float (&S)[BM / 2]) const
    {
        if constexpr (X::PAIRS) {
            if constexpr (X::BIAS) {
                if (p.bias.dtype == ATTN_F32) load_bias<uint32_t>(S);
                else load_bias<uint16_t>(S);
            }
            if constexpr (X::COPIES_KEPT) {
                const round_record &round = record();
                if (!round.partly_kept || me.lane % 4) return;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (first_key() + half * 8 < x.band.Sk)
                        cp_async_8(smem_addr(&sm.kept[first_key() - x.j0 + half * 8]),
                                   column_words(p.kept, x.b, round.h, first_key() + half * 8, round.tile));
            }
        }
    }

    /* Sets the bit in `hidden` of each score that keep_mask hides. */
    DEVICE void add_kept(uint32_t (&hidden)[BM / 64], const round_record &round) const
    {
        if constexpr (X::PAIRS) {
            if (!round.partly_kept) return;
            if (X::COPIES_KEPT) cp_async_wait_all();
            __syncwarp();
#pragma unroll
            for (int unit = 0; unit < X::UNITS; unit++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int j = min(first_key() + half * 8, x.band.Sk - 1);
                    const uint2 words = X::COPIES_KEPT ? sm.kept[first_key() - x.j0 + half * 8]
                                                       : __ldg(column_words(p.kept, x.b, round.h, j,
                                                                            round.tile * X::UNITS + unit));
                    hidden[unit] |= (~(words.x >> me.lane % 4) & 0x11111111) << half * 2;
                    hidden[unit] |= (~(words.y >> me.lane % 4) & 0x11111111) << (half * 2 + 1);
                }
        }
    }

    /* Returns whether the lse of some row is stored as two numbers, because the row has a huge score. */
    DEVICE bool has_parts(const row_values *values) const
    {
        bool any = false;
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 lse2 = *(const float2 *)&values[n / 8].lse2[n % 8 * 8 + me.lane % 4 * 2];
            any |= lse2.x != lse2.x || lse2.y != lse2.y;
        }
        return __any_sync(0xffffffff, any);
    }

    /* Turns S into P for a tile with rows whose lse is stored as two numbers. The bias of these rows is so huge that
     * q.k makes no difference. */
    DEVICE void exponents_in_parts(float (&S)[BM / 2], const row_values *values) const
    {
        if constexpr (X::BIAS) {
            const round_record &round = record();
            const int column = tile * BM + me.lane % 4 * 2;
            const float behind = (float)(column + (int)x.s.Sk - x.Sq - first_key());
            const bool wide = p.bias.dtype == ATTN_F32;
            const char *at = first_bias();
            head_args head; /* exponent_of() reads only the members of `head` that are set below */
            head.b = x.b, head.h = round.h, head.s.q_start = x.s.q_start;
#pragma unroll
            for (int n = 0; n < BM / 8; n++, at += 6 * p.bias.row)
#pragma unroll
                for (int e = 0; e < 2; e++, at += p.bias.row)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int i = column + n * 8 + e;
                        float &s = S[n * 4 + half * 2 + e], bias = 0;
                        if (i < x.Sq && first_key() + half * 8 < p.bias.columns)
                            bias = wide ? ((const float *)at)[half * 8]
                                        : widened(__uint_as_float(((const uint16_t *)at)[half * 8]), p.bias.dtype);
                        const float away = fabsf(behind + (float)(n * 8 + e - half * 8)) * round.slope * LN2;
                        const float z = saturated((fabsf(bias) >= HUGE_SCORE ? bias : s * p.scale) - away);
                        const float lse2 = values[n / 8].lse2[n % 8 * 8 + me.lane % 4 * 2 + e];
                        s = bias == -CUDART_INF_F ? 0
                                                  : exp2_fast(exponent_of(a, p.scratch.s, head, i, in_base_2(z), lse2));
                    }
        }
    }

    DEVICE void exponents_of_pairs(float (&S)[BM / 2], const row_values *values) const
    {
        if constexpr (X::PAIRS) {
            const round_record &round = record();
            uint32_t hidden[BM / 64];
            hidden_scores(hidden, round);
            add_kept(hidden, round);
            if (X::BIAS && has_parts(values)) exponents_in_parts(S, values);
            else {
                if (round.slope != 0) {
                    const float slope = round.slope / p.c;
                    const float behind = (float)(tile * BM + me.lane % 4 * 2 + (int)x.s.Sk - x.Sq - first_key());
#pragma unroll
                    for (int i = 0; i < BM / 2; i++)
                        S[i] = fmaf(-slope, fabsf(behind + (float)(i / 4 * 8 + i % 2 - i / 2 % 2 * 8)), S[i]);
                }
                exponents_of<BM>(S, values, p.c, me.lane);
            }
            uint32_t any = 0;
#pragma unroll
            for (int k = 0; k < BM / 64; k++) any |= hidden[k];
            if (!__any_sync(0xffffffff, any)) return;
#pragma unroll
            for (int i = 0; i < BM / 2; i++)
                if (hidden[i / 32] >> i % 32 & 1) S[i] = 0;
        }
    }

    /* Draws dropout's bits (1: keep) for the next tile of queries, 8 keys of a query at a time. Byte n of word k
     * belongs to query 64 k + 32 (n / 2) + lane, and to the first (n even) or last (n odd) 8 of the warp's 16 keys. */
    DEVICE void draw_pairs(uint32_t (&drawn)[BM / 64]) const
    {
        if constexpr (X::PAIRS) {
            const round_record &round = record();
            const uint32_t head = (uint32_t)(p.dropout.first + x.b * p.dropout.batch + round.h);
            const int eighth = (x.j0 + me.w * 64 + me.warp * 16) / 8;
#pragma unroll
            for (int k = 0; k < BM / 64; k++) {
                drawn[k] = 0;
#pragma unroll(X::BIAS ? 1 : 2)
                for (int n = 0; n < 4; n++)
                    drawn[k] |=
                        kept_of_eight(p.dropout, head, round.tile * BM + k * 64 + n / 2 * 32 + me.lane, eighth + n % 2)
                        << n * 8;
            }
        }
    }

    /* Replaces P of each dropped pair by -P. Where P is negative, the product dV uses 0, and dS uses the absolute value
     * of P. */
    DEVICE void drop_pairs(float (&P)[BM / 2], const uint32_t (&drawn)[BM / 64]) const
    {
#pragma unroll
        for (int k = 0; k < BM / 64; k++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t word = __shfl_sync(0xffffffff, drawn[k], n * 8 + me.lane % 4 * 2 + e) >> me.lane / 4;
#pragma unroll
                    for (int m = 0; m < 4; m++) {
                        float &y = P[k * 32 + (n + m / 2 * 4) * 4 + m % 2 * 2 + e];
                        if (!(word >> m * 8 & 1)) y = -y;
                    }
                }
    }

    /* Stores four P, each times the softcap's derivative, in shared memory as 16-bit numbers. */
    DEVICE void put_aside(int n, const float *P, const float (&derivative)[4]) const
    {
#pragma unroll
        for (int half = 0; half < 2; half++)
            sm.stash[X::OPTIONS ? n * 2 + half : 0][X::OPTIONS ? threadIdx.x - 128 : 0] = pack<T>(
                P[half * 2] * derivative[half * 2], P[half * 2 + 1] * derivative[half * 2 + 1]);
    }

    /* Turns S into P where softcap is the only option. Of each two registers of S, the first then holds two P, and the
     * second holds the same P times the softcap's derivative. All four are 16-bit numbers. EDGE: some pairs are hidden.
     * NEAR: all scores are so near 0 that tanh_near_0() can compute softcap. */
    template <bool EDGE, bool NEAR> DEVICE void capped_exponents(float (&S)[BM / 2], const row_values *values) const
    {
        /* for each of the thread's two keys: the range of queries that see it, counted from the thread's first query */
        int first[2] = {}, last[2] = {};
        if (EDGE)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int j = x.j0 + me.w * 64 + me.warp * 16 + me.lane / 4 + half * 8, i = tile * BM + me.lane % 4 * 2;
                first[half] = j < x.band.Sk ? j - x.band.hi - i + 1 : INT32_MAX;
                last[half] = min(j - x.band.lo + 1, x.Sq) - i;
            }
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
            const float2 lse2 = *(const float2 *)&values[n / 8].lse2[n % 8 * 8 + me.lane % 4 * 2];
            float t[4], P[4], times[4];
#pragma unroll
            for (int e = 0; e < 4; e++) t[e] = NEAR ? tanh_near_0(p.near_0, S[n * 4 + e]) : S[n * 4 + e] * p.mods.cap;
            if (!NEAR) tanh_of_four(t);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = n * 8 + e % 2, half = e / 2;
                P[e] = exp2_fast(fmaf(t[e], p.cap, -(e % 2 ? lse2.y : lse2.x)));
                if (EDGE && (i < first[half] || i >= last[half])) P[e] = 0;
                times[e] = P[e] * fmaf(-t[e], t[e], 1);
            }
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                S[n * 4 + e] = __uint_as_float(pack<T>(P[e], P[e + 1]));
                S[n * 4 + e + 1] = __uint_as_float(pack<T>(times[e], times[e + 1]));
            }
        }
    }
    DEVICE void capped_exponents(float (&S)[BM / 2], const row_values *values) const
    {
        float most[4] = {};
#pragma unroll
        for (int i = 0; i < BM / 2; i++) most[i % 4] = fmaxf(most[i % 4], fabsf(S[i]));
        const float all = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
        if (tile < free_first || tile >= free_last) capped_exponents<true, false>(S, values);
        else if (__any_sync(0xffffffff, all > p.near_0.most)) capped_exponents<false, false>(S, values);
        else capped_exponents<false, true>(S, values);
    }

    /* Turns dP of queries FIRST to LAST - 1 of the tile into dS. */
    template <int FIRST, int LAST>
    DEVICE void differences(float (&dP)[BM / 2], const float (&P)[BM / 2], const row_values *values) const
    {
        if constexpr (X::PAIRS)
            if (p.dropout.drops)
#pragma unroll
                for (int i = FIRST / 2; i < LAST / 2; i++) dP[i] *= P[i] < 0 ? 0 : p.dropout.scale;
        differences_of<FIRST, LAST>(dP, P, values, me.lane, [&](float2 pair, int n) {
            if (X::PAIRS && (X::BIAS || p.mods.cap == 0)) return make_float2(fabsf(pair.x), fabsf(pair.y));
            if (X::VARIANT == CAPPED) return unpack<T>(__float_as_uint(pair.y));
            return X::OPTIONS && p.mods.cap != 0 ? unpack<T>(sm.stash[X::OPTIONS ? n : 0][threadIdx.x - 128]) : pair;
        });
    }

    /* Returns P for the product dV: 0 for a dropped pair, whose P drop_pairs() has made negative. */
    static DEVICE float kept_P(float P)
    {
        return X::PAIRS && P < 0 ? 0 : P;
    }

    /* Issues dV += P^T dO for one of the DV_PARTS parts of the tile's queries (number PART), and computes dS of these
     * queries meanwhile. */
    template <int PART>
    DEVICE void add_dV(float (&dV)[D / 2], float (&dP)[BM / 2], const float (&S)[BM / 2], uint32_t (&P)[BM / 16][4],
                       const row_values *values) const
    {
        const int QUERIES = BM / X::DV_PARTS, FIRST = PART * QUERIES;
        auto &part = *(uint32_t(*)[QUERIES / 16][4]) & P[FIRST / 16];
#pragma unroll
        for (int i = 0; i < QUERIES / 4; i++)
            part[i / 4][i % 4] = X::VARIANT == CAPPED
                                     ? __float_as_uint(S[FIRST / 2 + 2 * i])
                                     : pack<T>(kept_P(S[FIRST / 2 + 2 * i]), kept_P(S[FIRST / 2 + 2 * i + 1]));
        mn_major_low<BM> dO = dO_down(o.stage);
        dO.low += FIRST / 16 * 2048 >> 4;
        multiply_add<T, D, QUERIES / 16>(dV, part, dO);
        differences<FIRST, FIRST + QUERIES>(dP, S, values);
    }

    /* dS_place() and dQ_place() return where a thread stores its elements: in dS as a byte offset, in dQ as a number of
     * floats. */
    static DEVICE uint32_t dS_place(const consumer<2> &me)
    {
        const int t = me.lane / 8, piece = me.warp * 2 + t % 2, i = t / 2 * 8 + me.lane % 8;
        return ((me.w * BM + i) * 64 + (piece ^ (i & 7)) * 8) * 2;
    }
    static DEVICE uint32_t dQ_place(const consumer<2> &me)
    {
        return me.w * QUERY_TILE * X::DQ_COLUMNS + fragment_at<X::DQ_COLUMNS>(me.warp * 16, 0) + me.lane * 4;
    }

    /* Writes dS^T to shared memory as dS, whose rows are queries. */
    DEVICE void share_dS(const uint32_t (&dS)[BM / 16][4])
    {
        const uint32_t to = dS_to + mine.stage * (uint32_t)sizeof sm.dS[0];
#pragma unroll
        for (int n = 0; n < BM / 16; n++) stmatrix_x4_trans(to + n * 16 * 128, dS[n]);
        fence_proxy_async_shared();
        __syncwarp();
        if (me.lane == 0) mbarrier_arrive(smem_addr(&sm.dS_full[mine.stage]));
        mine.next();
    }

    /* Waits until both consumers have written dS of the previous tile of queries. No consumer then reads the buffer
     * that share_dS() writes next. */
    DEVICE void await_dS() const
    {
        mbarrier_wait(smem_addr(&sm.dS_full[whole.stage]), whole.phase);
    }

    /* Issues this warpgroup's share of dQ = dS K. The share is half of the columns or, if a tile of queries has two
     * units (UNIT_ROWS queries each), one of the units. await_dS() must have returned. */
    DEVICE void issue_dQ(float (&dQ)[X::DQ_COLUMNS / 2])
    {
        multiply_down<T, X::DQ_COLUMNS, BN / 16>(dQ, anew(stage_of<sizeof sm.dS[0]>(first_dS, whole.stage)),
                                                 anew(K_down));
        whole.next();
    }

    /* Writes dQ to shared memory. From there the sender (a warp of the producer) adds it to the sums in global
     * memory. */
    DEVICE void hand_over(const float (&dQ)[X::DQ_COLUMNS / 2]) const
    {
        named_barrier_sync(DQ_FREE + me.w, HANDING);
#pragma unroll
        for (int n = 0; n < X::DQ_COLUMNS / 8; n++)
            *(float4 *)(sm.dQ[0] + dQ_at + fragment_at<X::DQ_COLUMNS>(0, n * 8)) = make_float4(
                dQ[n * 4], dQ[n * 4 + 1], dQ[n * 4 + 2], dQ[n * 4 + 3]);
        fence_proxy_async_shared();
        named_barrier_arrive(DQ_FULL + me.w, HANDING);
    }

    DEVICE void make_P(float (&S)[BM / 2])
    {
        if (X::TURNS) me.await_turn();
        /* exponents() suffices where no option changes the scores of this tile of queries */
        if constexpr (X::PAIRS) {
            if (!X::BIAS && p.mods.cap != 0) exponents_of_options(S, sm.values[q.stage]);
            else if (record().bounded || record().slope != 0 || X::BIAS || record().partly_kept)
                exponents_of_pairs(S, sm.values[q.stage]);
            else exponents(S, sm.values[q.stage]);
        } else if (X::VARIANT == CAPPED) capped_exponents(S, sm.values[q.stage]);
        else if (X::OPTIONS && (p.mods.cap != 0 || record().bounded || record().slope != 0))
            exponents_of_options(S, sm.values[q.stage]);
        else exponents(S, sm.values[q.stage]);
        if (X::TURNS) me.next_turn();
    }

    DEVICE void end_P(float (&S)[BM / 2], float (&dP)[BM / 2])
    {
        uint32_t drawn[BM / 64];
        if constexpr (X::PAIRS)
            if (p.dropout.drops) draw_pairs(drawn);
        /* the products dP and dK may still run after this wait */
        retire<X::S_BEFORE_DK ? 2 : 1>(S);
        make_P(S);
        if constexpr (X::PAIRS)
            if (p.dropout.drops) drop_pairs(S, drawn);
        retire<0>(dP); /* also waits for dK, which was issued before dP */
    }

    /* Computes dV, dS and dK of a tile of queries from its P and dP, and dQ of the previous tile. MORE: also computes P
     * and dP of the next tile. The call ends only when all its products are complete, because ptxas would not let a
     * product run on into the next iteration of the loop. `first`: there is no previous tile; dQ is computed but not
     * used, because a branch around the product would cost registers. */
    template <bool MORE>
    DEVICE void round(float (&S)[BM / 2], float (&dP)[BM / 2], float (&dK)[D / 2], float (&dV)[D / 2], bool first)
    {
        uint32_t P[BM / 16][4], dS[BM / 16][4];
        float dQ[X::DQ_COLUMNS / 2];
        const ring<X::STAGES_Q> now = q;
        q.next();
        if constexpr (X::DV_PARTS == 2) add_dV<0>(dV, dP, S, P, sm.values[now.stage]);
        /* This call must stand exactly here. At other places ptxas would compute dS after the wait for the product dV,
         * which costs 10 % of the time at D = 128. */
        if (!X::OPTIONS) next_tile_of_queries();
        add_dV<X::DV_PARTS - 1>(dV, dP, S, P, sm.values[now.stage]);
        wgmma_wait<0>(); /* waits for the product dV */
        me.release(sm.bars_dO, o);
        o.next();
        opaque(dP);
        to_operand<T, BM>(dS, dP);
        if (X::PAIRS && MORE) {
            /* the round_record of the next tile of queries arrives together with its Q */
            await_full(sm.bars_Q, q);
            ask_for_pairs(S);
        }
        if (!first) await_dS();
        share_dS(dS);
        issue_dQ(dQ);
        if (MORE && X::S_BEFORE_DK) issue_S(S);
        multiply_add<T, D, BM / 16>(dK, dS, Q_down(now.stage));
        if (MORE && !X::S_BEFORE_DK) issue_S(S);
        retire<MORE ? 2 : 1>(dQ);
        if (X::STAGES_DS == 2) /* after this barrier no consumer reads dS of the previous tile of queries */
            named_barrier_sync(DS_FREE, CONSUMERS);
        if (!first) hand_over(dQ);
        if (!X::S_BEFORE_DK) {
            wgmma_wait<MORE ? 1 : 0>();
            me.release(sm.bars_Q, now);
        }
        if (MORE) {
            issue_dP(dP);
            end_P(S, dP);
        } else wgmma_wait<0>();
        if (X::S_BEFORE_DK) me.release(sm.bars_Q, now);
    }

    /* Replaces round() for a tile of queries that sees no key of this warpgroup: writes zeros as the warpgroup's dS. */
    DEVICE void pass_round()
    {
        const uint32_t dS[BM / 16][4] = {};
        await_full(sm.bars_Q, q);
        zero_past_end(sm.Q[q.stage]);
        await_full(sm.bars_dO, o);
        zero_past_end(sm.dO[o.stage]);
        me.meet();
        me.release(sm.bars_Q, q);
        me.release(sm.bars_dO, o);
        q.next();
        o.next();
        if (X::TURNS) me.pass_turn();
        share_dS(dS);
    }

    template <class F> DEVICE void last_dQ(F meanwhile)
    {
        float dQ[X::DQ_COLUMNS / 2];
        await_dS();
        issue_dQ(dQ);
        meanwhile();
        retire<0>(dQ);
        hand_over(dQ);
    }

    /* Stores dK or dV, 64 channels at a time. 16-bit results pass through the warp's part of a buffer of dS, which no
     * consumer reads at that time. */
    template <int CHUNKS> DEVICE void store(const attn_view &to, const float (&sums)[CHUNKS * 32], int width)
    {
        const int row = me.w * 64 + me.warp * 16;
        const int64_t line = x.s.k_start + x.j0 + row;
        uint16_t *const staging = sm.dS[mine.stage] + (me.w * 4 + me.warp) * 16 * 64;
        if (!to.data) return;
        R *const rows = (R *)to.data + attn_at(&to, x.b, x.to, line);
        /* Float32 results are stored directly from registers, except in one shape, in which ptxas would spill
         * registers. */
        if constexpr (std::is_same<R, float>::value && X::VARIANT == CAPPED && D == 64)
            store_floats<CHUNKS * 64>(rows, to.row, x.rows - row, width, sums, staging, me.lane);
        else if constexpr (std::is_same<R, float>::value)
            store_floats<CHUNKS * 64>(rows, to.row, x.rows - row, width, sums, me.lane);
        else
#pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                store_rows<T, 64>(rows + n * 64, to.row, x.rows - row, width - n * 64,
                                  *(const float(*)[32])(sums + n * 32), staging, me.lane);
                __syncwarp();
            }
    }

    /* Multiplies dK or dV by `factor` and stores it. Returns whether all results are finite. */
    DEVICE bool finish(float (&sums)[D / 2], float factor, attn_tensor_id tensor, int64_t width)
    {
        const float factors[2] = { factor, factor };
        const bool finite = finish_rows(sums, factors);
        store<X::CHUNKS>(a.g.view[tensor], sums, (int)width);
        return finite;
    }
    DEVICE bool finish_dV(float (&dV)[D / 2])
    {
        if constexpr (X::PAIRS) return finish(dV, p.dropout.scale, ATTN_T_dv, a.g.dims.Dv);
        return finish(dV, 1, ATTN_T_dv, a.g.dims.Dv);
    }
    DEVICE bool finish_dK(float (&dK)[D / 2])
    {
        return finish(dK, p.scale, ATTN_T_dk, a.g.dims.D);
    }

    /* Records for repair_own_keys() whether dK or dV of this warp's keys is not finite. */
    DEVICE void leave_mark(bool finite) const
    {
        const bool any = __any_sync(0xffffffff, !finite);
        if (me.lane == 0) p.nonfinite[x.t * 8 + me.w * 4 + me.warp] = any ? (uint16_t)(blockIdx.x + 1) : 0;
        /* several warps may write the same value */
        if (any) *(volatile int *)&sm.any_nonfinite = 1;
    }

    /* Returns whether this warpgroup can skip the first tile of queries (if `first`) or the last one, because the tile
     * sees none of the warpgroup's keys. */
    DEVICE bool passes(bool first, int rounds) const
    {
        if (!X::PASSES || rounds < 2 || x.begin != x.first) return false;
        const int key = x.j0 + me.w * 64;
        return first ? (x.first + 1) * BM <= key - x.band.hi + 1 : (x.last - 1) * BM > key + 63 - x.band.lo;
    }

    /* Returns x, which must be the same in all lanes. The shuffle shows this to ptxas, so that descriptors stay in
     * uniform registers. */
    static DEVICE uint32_t same_in_warp(uint32_t x)
    {
        return __shfl_sync(0xffffffff, x, 0);
    }

    /* Swaps the operands K and V: K of the next tile of keys is loaded into the buffer that has held V, and V of that
     * tile into the buffer that has held K. */
    DEVICE void swap_keys()
    {
        const k_major_low<BN> K = own_K;
        K_down.low = same_in_warp(K_down.low + own_V.low - own_K.low);
        own_K.low = same_in_warp(own_V.low);
        own_V.low = same_in_warp(K.low);
        phase ^= 1;
    }

    DEVICE void add_rounds(float (&dK)[D / 2], float (&dV)[D / 2], int rounds)
    {
        float S[BM / 2], dP[BM / 2];
        const int keys = x.band.Sk - x.j0;
        mbarrier_wait(smem_addr(&sm.K_full), phase);
        /* Sets rows of K and V past the end of the sequence to zero. This is sometimes done without need, which is
         * harmless: the exact condition would also read ends_of_keys, which ptxas would spill. */
        if ((a.ends_of_queries || a.g.seqlens_k) && keys < BN) {
            mbarrier_wait(smem_addr(&sm.V_full), phase);
            zero_rows<BN, X::CHUNKS>(sm.keys[0], keys);
            zero_rows<BN, X::CHUNKS>(sm.keys[1], keys);
        }
        if (X::TURNS) me.begin_turns();
        const bool passes_first = passes(true, rounds), passes_last = passes(false, rounds - passes_first);
        int n = 0;
        if (passes_first) {
            pass_round();
            whole.next();
            next_tile_of_queries();
            n++;
        }
        if (X::PAIRS) {
            await_full(sm.bars_Q, q);
            ask_for_pairs(S);
        }
        issue_S(S);
        wgmma_fence();
        /* The waits below count groups of products. This empty group stands for the product dK of the previous round,
         * which does not exist in the first round. */
        wgmma_commit();
        mbarrier_wait(smem_addr(&sm.V_full), phase);
        issue_dP(dP);
        end_P(S, dP);
        const int last = rounds - 1 - passes_last;
#pragma unroll 1
        for (; X::OPTIONS ? record().more : n < last; n++) round<true>(S, dP, dK, dV, n == 0);
        me.release(sm.V_empty);
        round<false>(S, dP, dK, dV, n == 0);
        if (passes_last) {
            last_dQ([] {});
            pass_round();
        }
        if (X::TURNS) me.end_turns();
        bool finite = true;
        last_dQ([&] {
            /* If the problem has options, dV is stored only after dQ is complete: registers do not suffice for dQ and
             * dV at the same time. */
            if (!X::OPTIONS) finite = finish_dV(dV);
        });
        me.release(sm.K_empty);
        if (X::OPTIONS) finite = finish_dV(dV);
        finite &= finish_dK(dK);
        leave_mark(finite);
        swap_keys();
    }

    /* Waits for the next tile of keys, and copies it to sm.place. Returns false if there is none. All threads of both
     * consumers must call this. */
    DEVICE bool next_tile(ring<2> &at)
    {
        /* dK and dV have passed through the memory of dS, which may be overwritten after this barrier */
        named_barrier_sync(END_BARRIER, CONSUMERS);
        /* In this function only single instructions depend on the lane. After a branch that only some lanes take, ptxas
         * would keep addresses in registers of each thread. */
        await_full(sm.bars_work, at);
        const int words = sizeof(block_place) / sizeof(int);
        static_assert(words <= 32, "a lane copies a word");
        if (dQ_at < words * 4) ((int *)&sm.place)[me.lane] = ((const int *)&sm.work[at.stage])[me.lane];
        /* all consumers have seen the next tile of keys, and its description is copied */
        named_barrier_sync(END_BARRIER, CONSUMERS);
        if (me.leader && me.w == 0) mbarrier_arrive(smem_addr(&sm.bars_work.empty[at.stage]));
        at.next();
        return x.rows != NO_ROWS;
    }

    DEVICE void run()
    {
        for (ring<2> at; next_tile(at);) {
            const int rounds = x.tiles() * p.group;
            const free_queries free = free_queries_of<BM>(x, x.j0 + me.w * 64);
            free_first = free.first;
            free_last = free.last;
            tile = x.begin;
            whole = mine;
            whole.back();
            float dK[D / 2], dV[D / 2];
#pragma unroll
            for (int i = 0; i < D / 2; i++) dK[i] = dV[i] = 0;
            opaque(dK);
            opaque(dV);
            if (rounds > 0) add_rounds(dK, dV, rounds);
            else leave_mark(finish_dV(dV) & finish_dK(dK));
            /* dK and dV have passed through shared memory that the next product dQ reads. The result of this product is
             * not used, but its reads must come after the writes of dK and dV. */
            fence_proxy_async_shared();
        }
    }
};

/* Recomputes, one by one, the keys whose dK or dV this warp has found not finite. The function is not inlined, so that
 * the loop over tiles of queries keeps its registers. */
template <class X> static __device__ __noinline__ void repair_own_keys(const plan &p, const cuda_args &a)
{
    const int warp = threadIdx.x / 32 - 4;
    repair_begins();
    for (int base = p.order.first; base < p.order.end; base += 32) {
        const int n = base + threadIdx.x % 32;
        const bool mine = n < p.order.end && ((volatile uint16_t *)p.nonfinite)[n * 8 + warp] == blockIdx.x + 1;
        for (unsigned set = __ballot_sync(0xffffffff, mine); set; set &= set - 1) {
            const int t = base + __ffs(set) - 1;
            repair_keys_of<X>(a, p.scratch.s, key_place_of<X>(a, p.tile_parts, p.group, keys_of(p, t)), warp);
        }
    }
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

template <typename T, class X, typename R>
__global__ void __launch_bounds__(X::THREADS, 1)
    backward_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ plan_of<X> p,
                   const __grid_constant__ maps m)
{
    static_assert(sizeof(shared<X>) <= 227 << 10, "what a block may have");
    shared<X> &sm = block_memory<shared<X>>();
    const int wg = warpgroup_index(), warp = threadIdx.x / 32;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&m.Q);
        prefetch_tensormap(&m.K);
        prefetch_tensormap(&m.V);
        prefetch_tensormap(&m.dO);
        init_pairs(sm.bars_Q, 2);
        init_pairs(sm.bars_dO, 2);
        /* A tile of keys is released by four arrivals: one by the loader, two by the senders (the warps that send dQ),
         * and one for both consumers together. */
        init_pairs(sm.bars_work, 4);
        mbarrier_init(smem_addr(&sm.K_full), 1);
        mbarrier_init(smem_addr(&sm.V_full), 1);
        mbarrier_init(smem_addr(&sm.K_empty), 2);
        mbarrier_init(smem_addr(&sm.V_empty), 2);
        mbarrier_init(smem_addr(&sm.loaded), 1);
        /* one arrival per warp of the two consumers */
        for (int n = 0; n < X::STAGES_DS; n++) mbarrier_init(smem_addr(&sm.dS_full[n]), 8);
        sm.any_nonfinite = 0;
        fence_mbarrier_init();
    }
    __syncthreads();

    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 0) loader<X>{ a, p, sm, m }.run();
        else if (threadIdx.x == 96) scheduler<X>{ a, p, sm, m }.run();
        else if (warp == 1 || warp == 2) sender<X>{ a, p, sm, warp - 1 }.run();
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        gradients<T, X, R>(a, p, sm, wg - 1).run();
        /* The next kernel waits for the end of this kernel, but not for prepare_ahead, which was launched before. So
         * this kernel must not end before prepare_ahead has ended. */
        wait_for_prerequisites();
        const uint32_t t = thread_anew() - 128;
        if (p.makes_dq) dq_writer<T, X>{ a, p, sm.dS[0] + t / 32 * (16 * 64), (int)(t % 32) }.run();
        /* Recompute keys whose dK or dV is not finite. If tiles of keys have parts (key_parts.cuh), the kernel
         * sum_parts does this instead. */
        if (p.tile_parts.count() == 1 && __any_sync(0xffffffff, *(volatile int *)&sm.any_nonfinite))
            repair_own_keys<X>(p, a);
    }
}

/* ---- Functions of the host that launch the kernel ---------------------------------------------------------------- */

const int KEYS = 128;

int64_t per_head_of(const attn_dims &d)
{
    return key_tiles_per_head(d, KEYS);
}

int64_t query_tiles_of(const attn_dims &d)
{
    return query_tiles_per_head(d, QUERY_TILE) * d.H * (d.packed ? 1 : d.B);
}

/* Returns the number of 32-bit words of plan::prepared, begun, done and claimed together. All start at 0. */
int64_t words_of(const attn_plan *plan, const key_parts &parts)
{
    const attn_dims &d = plan->geometry.dims;
    const int64_t heads = extent_of(d).B * d.Hk * parts.heads;
    return heads + (plan->problem->dq.rank ? query_tiles_of(d) * 2 + heads + 1 : 0);
}

/* Returns whether the kernel prepare_ahead sets the sums of dQ to zero. If not, the first block that has a term of dQ
 * for some queries stores it as their sum, and other blocks wait for this store. */
bool wants_zeros(const attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const extent e = extent_of(g.dims);
    const bool causal = g.right < e.rows_k && g.left >= e.rows_q,
               sums = plan->problem->dq.rank && !plan->problem->deterministic;
    return sums && causal && backward_class(g.dims) == 128 && g.group == 1 && e.rows_q >= 8192;
}

/* The memory of the kernel backward_tiles in the workspace. It comes after the memory that backward_steps.h
 * describes. */
struct layout {
    key_parts parts;
    /* offsets in bytes from the beginning of the workspace, and its size (`bytes`) */
    int64_t account, nonfinite, extremes, kept, terms, bytes;
    int64_t cleared; /* number of bytes to set to zero, from `account` on */
};

layout layout_of(const cuda_chip *chip, const attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const auto align = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    layout x;
    x.parts = key_parts_of(chip, plan, KEYS, backward_class(d) == 64 ? 128 : 64, e.B * d.Hk);
    x.account = align((int64_t)backward_bytes(chip, plan, true));
    x.nonfinite = x.account + words_of(plan, x.parts) * (int64_t)sizeof(uint32_t);
    x.cleared = e.B * d.Hk * x.parts.count() * per_head_of(d) * 8 * (int64_t)sizeof(uint16_t) + x.nonfinite - x.account;
    x.extremes = align(x.account + x.cleared);
    x.bytes = x.extremes;
    if (plan->problem->mask_startend_rows.rank)
        x.bytes += d.B * (d.H / g.mask_group) * per_head_of(d) * (int64_t)sizeof(attn_mask_extremes);
    x.kept = align(x.bytes);
    kept_columns kept;
    if (plan->problem->keep_mask.rank) x.bytes = x.kept + plan_kept_columns(g, true, nullptr, kept);
    x.terms = align(x.bytes);
    x.bytes = x.terms + terms_bytes(plan, x.parts);
    return x;
}

struct backward_job {
    const cuda_chip *chip;
    cudaStream_t stream;
    /* `whole_chip` has the launch options of the whole problem, and `chip` those of one share (the tiles of one
     * launch) */
    const cuda_chip *whole_chip;
    const attn_plan *whole;
    backward_run run;
    char *memory;
    layout place;
    bool deterministic, zeros;
};

/* Plans the order in which blocks claim tiles of keys. */
tile_order order_of(const backward_job &job)
{
    const attn_geometry &g = job.run.args.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    const bool mask = g.view[ATTN_T_mask_startend_rows].data, bounded = g.right < e.rows_k || g.left < e.rows_q || mask,
               causal = g.right < e.rows_k && g.left >= e.rows_q && !mask;
    const key_parts &parts = job.place.parts;
    const int64_t heads = e.B * d.Hk * parts.count(), group = g.group / parts.heads,
                  head_bytes = e.rows_q * (d.D + d.Dv) * 4;
    /* number of query heads whose Q, dO and dQ fit into the L2 cache together */
    const int64_t fit = L2_SHARE / attn_max64(head_bytes, 1);
    tile_order x = tile_order_of(per_head_of(d), heads, head_bytes * group,
                                 bounded || job.run.args.ends_of_queries || job.run.args.ends_of_keys);
    /* The blocks of a key/value head go through its query heads one after the other. The L2 cache therefore needs room
     * for only one query head of each key/value head. A section may therefore have more heads, and under a causal mask
     * the tiles that are claimed last are then shorter. At head size 64 and with a window, larger sections are
     * slower. */
    if (causal && !job.deterministic && backward_class(d) == 128 && heads * per_head_of(d) > job.chip->multiprocessors)
        x.section = (int)attn_max64(x.section, attn_min64(fit, 8));
    /* With `deterministic` and without a mask, blocks claim tiles of keys from all heads of a section in turn. With
     * more heads in a section, fewer blocks wait for each other's dQ. With fewer heads, more of their data stays in the
     * L2 cache. */
    if (job.deterministic && !bounded)
        x.section = (int)attn_max64(x.section, attn_min64(attn_max64(fit / group, 8), 16));
    return x;
}

/* Sets words of the workspace to 0. cudaMemsetAsync() could do this too, but the next kernel can be launched early only
 * while a kernel runs, and not during a cudaMemsetAsync(). */
__global__ void __launch_bounds__(256) clear_words(uint32_t *words, int64_t count)
{
    launch_dependents();
    for (int64_t n = blockIdx.x * 256 + threadIdx.x; n < count; n += gridDim.x * 256) words[n] = 0;
}

cudaError_t make_plan(const backward_job &job, plan &p)
{
    const attn_geometry &g = job.run.args.g;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    p.order = order_of(job);
    p.tile_parts = job.place.parts;
    p.group = (int)(g.group / p.tile_parts.heads);
    p.scratch = job.run.scratch;
    p.scale = (float)g.scale;
    p.c = p.scale * LOG2E;
    p.nonfinite = (uint16_t *)(job.memory + job.place.nonfinite);
    p.in_order = job.deterministic;
    p.zeros = job.zeros;
    p.claims = !p.in_order && !p.zeros;
    p.prepared = (uint32_t *)(job.memory + job.place.account);
    p.out_in_pieces = g.view[ATTN_T_out].dtype == g.view[ATTN_T_dout].dtype &&
                      tma_walkable(g.view[ATTN_T_out], e.B, d.H, e.rows_q, d.Dv, 8);
    const int64_t heads = e.B * d.Hk * p.tile_parts.heads;
    p.begun = g.view[ATTN_T_dq].data ? p.prepared + heads : nullptr;
    p.done = p.begun ? p.begun + query_tiles_of(d) * 2 : nullptr;
    p.claimed = p.begun ? (int *)p.done + heads : nullptr;
    p.makes_dq = p.begun && is_last_share(job.chip);
    p.mods = score_mods_of(g, 1 / LOG2E);
    p.cap = (float)g.softcap * LOG2E;
    p.near_0 = near_tanh_of(p.mods.cap);
    p.mask = flash_mask_of(g, KEYS, job.memory + job.place.extremes);
    p.mask_heads = p.mask.bounds ? (int)(d.H / g.mask_group) : 0;
    p.counter = job.chip->counter;
    take_share(job.chip, p.order);
    if (!is_first_share(job.chip)) return cudaSuccess;
    const int64_t words = job.place.cleared / (int64_t)sizeof(uint32_t);
    clear_words<<<(unsigned)attn_min64(attn_tiles(words, 1024), 1024), 256, 0, job.stream>>>(p.prepared, words);
    return cudaPeekAtLastError();
}

cudaError_t make_pair_plan(const backward_job &job, pair_plan &p)
{
    const attn_geometry &g = job.run.args.g;
    p.bias = pair_bias_of(g);
    p.per_scale = 1 / p.scale;
    p.dropout = pair_dropout_of(job.run.args);
    plan_kept_columns(g, g.view[ATTN_T_keep_mask].data, job.memory + job.place.kept, p.kept);
    return is_first_share(job.chip) ? make_kept_columns(g, p.kept, job.stream) : cudaSuccess;
}

/* Launches the kernel backward_tiles, whose blocks compute tiles of keys. `a` has the views of dk and dv to which the
 * blocks write. */
template <typename T, class X, typename R> cudaError_t launch_blocks(const backward_job &job, const cuda_args &a)
{
    const attn_dims &d = a.g.dims;
    maps m;
    if (!make_maps<X>(m, a.g)) return cudaErrorInvalidValue;
    plan_of<X> p;
    cudaError_t code = make_plan(job, p);
    if constexpr (X::PAIRS)
        if (code == cudaSuccess) code = make_pair_plan(job, p);
    if (code == cudaSuccess) code = allow_shared<backward_tiles<T, X, R>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    if (X::OPTIONS && p.mask.bounds) {
        const int64_t warps = d.B * p.mask_heads * p.mask.key_tiles;
        tile_extremes<X::BN><<<(unsigned)attn_min64(attn_tiles(warps, 4), 1 << 20), 128, 0, job.stream>>>(
            p.mask, (int)d.B, (int)d.H, (int)d.Sq, (int)d.Sk, (attn_mask_extremes *)p.mask.extremes);
    }
    p.units = (int)query_tiles_of(d) * UNITS_OF_TILE<X>;
    p.units_of_head = (int)(p.units / (d.H * extent_of(d).B) * p.group);
    const int tiles = p.order.end - p.order.first;
    const int blocks = p.makes_dq ? job.chip->multiprocessors : std::min(tiles, job.chip->multiprocessors);
    /* A problem may have several launches, one after the other. All read what the first one has prepared, so the later
     * ones must not start early: they are launched without launch_dependent(). */
    if (!is_first_share(job.chip)) {
        if (blocks) backward_tiles<T, X, R><<<blocks, X::THREADS, sizeof(shared<X>), job.stream>>>(a, p, m);
        return cudaPeekAtLastError();
    }
    /* If there are fewer tiles of keys than multiprocessors, prepare_ahead may run on all multiprocessors that get no
     * tile of keys. */
    const int64_t preparers = std::min((int64_t)p.units, std::max(attn_tiles(job.chip->multiprocessors, PREPARER_SHARE),
                                                                  (int64_t)job.chip->multiprocessors - tiles));
    code = launch_dependent(prepare_ahead<T, shape<X::D, X::BM, PLAIN>>, preparers, PREPARER_THREADS, 0, job.stream, a,
                            (const plan &)p);
    if (X::BIAS && code == cudaSuccess) code = forward_parts(job.whole_chip, a, job.whole, job.stream);
    if (code != cudaSuccess || blocks == 0) return code;
    return launch_dependent(backward_tiles<T, X, R>, blocks, X::THREADS, sizeof(shared<X>), job.stream, a, p, m);
}

template <typename T, class X, typename R> cudaError_t launch(const backward_job &job)
{
    const layout &x = job.place;
    const bool divided = x.parts.count() > 1;
    cuda_args a = job.run.args;
    parts_sum sum;
    if (divided) divide_keys(a, x.parts, (float *)(job.memory + x.terms), job.run.scratch.s, sum);
    cudaError_t code = launch_blocks<T, X, R>(job, a);
    if (divided && code == cudaSuccess && is_last_share(job.chip))
        code = launch_sum<T>(job.whole_chip, job.stream, job.run.args, sum);
    return code;
}

struct shape_row {
    int D;
    variant takes;
    /* first index: 0 for bfloat16, 1 for float16; second index: 0 if dK and dV have the inputs' dtype, 1 if they are
     * float32 */
    cudaError_t (*launch[2][2])(const backward_job &);
};
template <class X> constexpr shape_row row()
{
    return { X::D,
             X::VARIANT,
             { { launch<__nv_bfloat16, X, __nv_bfloat16>, launch<__nv_bfloat16, X, float> },
               { launch<compiled_half, X, compiled_half>, launch<compiled_half, X, float> } } };
}

/* Returns whether the kernel can compute the problem. The problem's options are not checked here. */
bool plan_tiles(const cuda_chip *chip, attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_geometry &g = plan->geometry;
    const attn_dims &d = g.dims;
    const extent e = extent_of(d);
    if (backward_class(d) > 128) return false;
    if (!backward_walkable(plan) || e.B * d.H * (per_head_of(d) + 1) * 8 >= INT32_MAX) return false;
    if (query_tiles_of(d) * 4 >= INT32_MAX) return false;
    if (p->dk.rank && p->dv.rank && p->dk.dtype != p->dv.dtype) return false;
    if (!mods_fit(p, g) || (p->mask_startend_rows.rank && (d.packed || p->deterministic))) return false;
    if (backward_bytes(chip, plan, true) == 0) return false;
    plan->workspace_bytes = (size_t)layout_of(chip, plan).bytes;
    return true;
}

template <int ROWS>
cudaError_t launch_tiles(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory,
                         const shape_row (&rows)[ROWS], variant takes)
{
    const attn_dims &d = plan->geometry.dims;
    backward_job job = { chip,
                         stream,
                         chip,
                         plan,
                         {},
                         (char *)memory,
                         layout_of(chip, plan),
                         plan->problem->deterministic,
                         wants_zeros(plan) };
    cudaError_t code = begin_backward(chip, stream, plan, true, memory, &job.run);
    if (code != cudaSuccess) return code;
    if (takes == WITH_BIAS)
        job.run.args.part_lse = job.run.scratch.s.lse, job.run.args.part_rest = job.run.scratch.s.rest;
    const auto is_float = [](const attn_tensor &t) { return t.rank && t.dtype == ATTN_F32; };
    const bool floats = is_float(plan->problem->dk) || is_float(plan->problem->dv) || job.place.parts.count() > 1;
    const shape_row *x = rows;
    while (x->D != backward_class(d) || x->takes != takes) x++;
    code = in_shares(chip, tile_seconds(chip, plan), [&](const cuda_chip *part) {
        job.chip = part;
        return x->launch[plan->problem->q.dtype == ATTN_F16][floats](job);
    });
    return code == cudaSuccess ? end_backward(chip, stream, plan, job.run) : code;
}

/* FEATURES: the options that the kernel variant PLAIN computes. OPTIONS: what the variants for options compute in
 * addition. */
const uint64_t FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_TENSOR_BIT(dout) |
                          ATTN_TENSOR_BIT(dlse) | ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) |
                          ATTN_TENSOR_BIT(dsinks) | ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(GRAD_DTYPE) |
                          ATTN_OPTION_BIT(DETERMINISTIC);
const uint64_t OPTIONS = ATTN_OPTION_BIT(SOFTCAP) | ATTN_TENSOR_BIT(alibi_slopes) | ATTN_TENSOR_BIT(mask_startend_rows);

} // namespace

#endif
