/* f32_forward.cu: flash attention forward for float32 on tensor cores by mma.sync, from compute capability 8.0 on:
 * FlashAttention-2 (arXiv:2307.08691), Algorithm 1, as in forward.cu. A float32 number is stored as a pair of float16
 * numbers, and three float16 products make one float32 product, with about float32's error (split.cuh). A kernel that
 * runs first splits K and V into such pairs. Each block itself splits its rows of Q, and splits P in registers.
 *
 * Registers hold 2^15 P and 2^15 l, so that small P stay within float16's range. If a row sees only one key, out is a
 * bitwise copy of the key's row of v. Numbers that are not finite are handled as in forward.cu. A tile is wide if it
 * has a row whose numbers are all too small for the tile's exponent (split.cuh). If a block reads a wide tile, rows.cuh
 * computes all rows of the block. */
#include "forward_steps.cuh"
#include "seen_tiles.cuh"
#include "split.cuh"

namespace {

/* For head sizes up to D. MT: number of 16-row blocks per warp; BN: number of keys per tile; WARPS: number of warps per
 * thread block; BLOCKS: number of thread blocks per multiprocessor. */
template <int D> struct tile;
template <> struct tile<64> {
    static const int MT = 2, BN = 64, WARPS = 4, BLOCKS = 2;
};
template <> struct tile<128> {
    static const int MT = 2, BN = 32, WARPS = 4, BLOCKS = 2;
};
template <> struct tile<256> {
    static const int MT = 1, BN = 32, WARPS = 8, BLOCKS = 1;
};

/* With options (softcap, bias, masks, ...), which take many registers, a warp computes only 16 rows. */
template <int D, bool SCORE_MODS_> struct shape {
    static const bool SCORE_MODS = SCORE_MODS_;
    static const int WARPS = tile<D>::WARPS, THREADS = 32 * WARPS, BN = tile<D>::BN, MT = SCORE_MODS ? 1 : tile<D>::MT;
    static const int BM = 16 * MT * WARPS, BLOCKS = tile<D>::BLOCKS;
    static_assert(SPLIT_ROWS % BM == 0 && SPLIT_ROWS % BN == 0, "a tile has one exponent");
};

template <int D, bool SCORE_MODS> struct shared {
    /* Q is stored as two float16 numbers for each float32 number: first all high halves (plane hi), then all low halves
     * (plane lo) */
    alignas(1024) uint16_t Q[2 * shape<D, SCORE_MODS>::BM * D];
    alignas(1024) uint16_t K[2 * shape<D, SCORE_MODS>::BN * D];
    alignas(1024) uint16_t V[2 * shape<D, SCORE_MODS>::BN * D];
    scores_on_their_way<shape<D, SCORE_MODS>> way;
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

/* P is stored as 2^P_BITS times the probability; l is the sum of this P. P_UNIT is 2^-P_BITS. */
const float P_BITS = 15, P_UNIT = 1.0f / 32768;

/* Rounds a row's maximum m to a multiple of 1/16 (above 2^18: coarser), so that adding P_BITS = 15 is exact. Huge
 * maxima are not rounded: see in_base_2(). */
DEVICE float rounded(float m)
{
    const float y = __fadd_rn(__fadd_rn(m, 786432.0f), -786432.0f);
    return fabsf(m) >= HUGE_SCORE ? m : y;
}

struct forward_planes {
    split_planes k, v;
};

/* Splits the block's rows of Q, times 1 / q_unit (a power of two), into float16 halves (planes hi and lo) in shared
 * memory. Sets score_bound, so that no score exceeds score_bound times the largest number of K. If some rows of Q have
 * only small numbers ("wide", see split.cuh), score_bound is 16 times larger. */
template <int D, bool SCORE_MODS>
DEVICE void split_queries(shared<D, SCORE_MODS> &sm, const cuda_args &a, const tile_place &place, float &q_unit,
                          float &score_bound)
{
    typedef shape<D, SCORE_MODS> Shape;
    const int ROWS = 16 * Shape::MT, V = D / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float x[ROWS][V], top, least;
    load_rows<D, ROWS>(x, a.g.view[ATTN_T_q], place.x.b, place.x.h, place.x.s.q_start, place.i0 + warp * ROWS,
                       place.x.s.Sq, (int)a.g.dims.D);
    range_of_rows(x, top, least);
    float *const tops = reinterpret_cast<float *>(sm.V), *const leasts = tops + Shape::WARPS;
    if (lane == 0) tops[warp] = top, leasts[warp] = least;
    __syncthreads();
    for (int w = 0; w < Shape::WARPS; w++) top = fmaxf(top, tops[w]), least = fminf(least, leasts[w]);
    const int e = exponent_of(top);
    const float factor = power_of_two(e);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        split_row(sm.Q + at<D>(warp * ROWS + r, lane * V / 8) + lane * V % 8, Shape::BM * D, x[r], factor);
    q_unit = power_of_two(-e);
    score_bound = top * (float)a.g.dims.D * fabsf(place.x.scale) * (is_wide(top, least) ? 16 : 1);
}

/* One step of the online softmax: S becomes P times 2^(P_BITS - shift). `shift` is above 0 only for tiles of V with
 * small numbers. `c` converts a score to base 2, and `rescale` becomes the factor by which O must be multiplied.
 * Without options (softcap, bias, masks, ...), P_BITS - shift is added to the exponent. With options, P is multiplied
 * by 2^(P_BITS - shift): if P_BITS - shift were added to a huge score, rounding would remove it. */
template <bool SCORE_MODS, int NT>
DEVICE void softmax_step(float (&S)[NT][4], softmax_row (&rows)[2], float (&rescale)[2], float c, int shift)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        softmax_row &row = rows[half];
        /* m is in base 2; with options (softcap, bias, masks, ...), `c` is 1, because in_base_2() has already converted
         * the scores to base 2 */
        const float m = fmaxf(row.m, rounded(largest_of_row(S, half) * c));
        /* m is -inf until the row has seen a key; -inf - -inf would be NaN */
        const float base = m == -CUDART_INF_F ? 0 : m;
        const float factor = exp2_fast(row.m - base), offset = SCORE_MODS ? -base : P_BITS - (float)shift - base;
        float sum = exponents_of_row(S, half, c, offset);
        if (SCORE_MODS) {
            const float unit = power_of_two((int)P_BITS - shift);
            sum *= unit;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) S[nt][half * 2] *= unit, S[nt][half * 2 + 1] *= unit;
        }
        row.l = fmaf(sum, power_of_two(shift), row.l * factor);
        row.m = m;
        rescale[half] = factor;
    }
}

template <int MT, int DT> DEVICE void multiply(float (&O)[MT][DT][4], float factor)
{
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 4; e++) O[mt][dt][e] *= factor;
}

/* Adds up l over the four lanes that share a row, and divides O by it. Returns whether all of O is finite. */
template <bool SCORE_MODS, int DT>
DEVICE bool divide(float (&O)[DT][4], softmax_row (&rows)[2], float drop_scale, float o_unit)
{
    bool is_finite = true;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        softmax_row &row = rows[half];
        row.l = whole_sum(row.l) * P_UNIT;
        const float factor = row.l == 0 ? 0 : drop_scale / row.l * o_unit;
        is_finite &= row.l - row.l == 0 && is_sound_score<SCORE_MODS>(row.m);
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &o = O[dt][half * 2 + e];
                o *= factor;
                is_finite &= o - o == 0;
            }
    }
    return is_finite;
}

/* Writes ROWS rows of out from shared memory, beginning with row `first` of the block's tile. If `copies` is true, a
 * row that sees only one key becomes an exact copy of the key's row of v. */
template <int D, int ROWS>
DEVICE void store_rows_or_values(const cuda_args &a, const head_args &x, const float *staged, int q0, int first,
                                 const limits &limit, bool copies, int lane)
{
    const attn_geometry &g = a.g;
    const attn_view &out = g.view[ATTN_T_out], &v = g.view[ATTN_T_v];
    const bool pieces = out.dtype == ATTN_F32 && g.dims.Dv % 4 == 0 && out.row % 4 == 0 &&
                        ((uint64_t)out.data + 4 * attn_at(&out, x.b, x.h, x.s.q_start)) % 16 == 0;
#pragma unroll 1
    for (int n = lane; n < ROWS * (D / 4); n += 32) {
        const int r = first + n / (D / 4), c = n % (D / 4), i = q0 + r;
        if (i >= x.s.Sq || c * 4 >= g.dims.Dv) continue;
        const float4 four = *(const float4 *)(staged + at<D>(r, c / 2) + c % 2 * 4);
        const int64_t to = attn_at(&out, x.b, x.h, x.s.q_start + i) + c * 4;
        const int key = max(i + limit.lo, 0), keys = min(i + limit.hi, limit.Sk) - key;
        if (pieces && !(copies && keys == 1)) {
            *(float4 *)((float *)out.data + to) = four;
            continue;
        }
        const float o[4] = { four.x, four.y, four.z, four.w };
        const float *const value = (const float *)v.data +
                                   (copies && keys == 1 ? attn_key_at(&g, &v, x.b, x.hk, x.s.k_start + key) : 0) +
                                   c * 4;
        for (int e = 0; e < 4 && c * 4 + e < g.dims.Dv; e++)
            store_float(out.dtype, out.data, to + e, copies && keys == 1 ? value[e] : o[e]);
    }
}

template <int D, bool SCORE_MODS>
__global__ void __launch_bounds__(shape<D, SCORE_MODS>::THREADS, shape<D, SCORE_MODS>::BLOCKS)
    f32_forward_tiles(const __grid_constant__ cuda_args a, const __grid_constant__ forward_planes planes)
{
    typedef shape<D, SCORE_MODS> Shape;
    typedef shared<D, SCORE_MODS> Shared;
    const int BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS, NT = BN / 8, DT = D / 8;
    const attn_geometry &g = a.g;
    Shared &sm = block_memory<Shared>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    const tile_place place = tile_place_of<BM>(a, blockIdx.x);
    if (!place.exists) return;
    if (SCORE_MODS && a.part_lse && !has_parts<BM>(a, place.x, place.i0)) return;
    const int q0 = place.i0;
    const limits limit = limits_of(g, place.x.s);
    const int64_t rows_end = attn_min64(q0 + BM, place.x.s.Sq);
    const attn_range seen = attn_keys_of_rows(&g, &place.x.s, q0, rows_end),
                     open = attn_keys_of_all_rows(&g, &place.x.s, q0, rows_end);
    const int first = (int)(seen.lo / BN);
    /* each of the tiles `first` to `last` - 1 has a key that at least one row sees */
    int last = (int)attn_tiles(seen.hi, BN);
    last = last_tile<SCORE_MODS, BN, THREADS>(a, (int)place.x.b, (int)place.x.h, q0, (int)rows_end, first, last,
                                              sm.seen);
    /* all rows see all keys of the tiles free_first to free_last - 1 */
    const int free_first = (int)attn_tiles(open.lo, BN), free_last = (int)(open.hi / BN);

    /* index of the head's first tile of K and V; 32 bits suffice, because 2^31 tiles would take 2^46 bytes */
    const int k_tile = (int)split_tile_of(planes.k, place.x.b, place.x.hk, place.x.s.k_start);

    auto load = [&](uint16_t *to, const split_planes &from, int j) {
        load_planes<D, BN, THREADS>(to, from.data + (int64_t)(k_tile + j * BN / SPLIT_ROWS) * (2 * SPLIT_ROWS * D),
                                    j * BN % SPLIT_ROWS);
        cp_async_commit();
    };
    if (first < last) load(sm.K, planes.k, last - 1);

    float q_unit, score_bound;
    split_queries<D, SCORE_MODS>(sm, a, place, q_unit, score_bound);

    bool clean = false; /* whether this is the loop's second pass, in which zeros replace infinities and NaN of V */
    /* whether float16 halves are not exact enough for a tile that the block has read; if so, forward_row() computes all
     * rows of the block */
    bool wide = false;
again:
    /* O is the sum of P V times 2^o_exponent; o_exponent is the smallest exponent of the tiles of V so far */
    int o_exponent = 126;
    float O[MT][DT][4];
    softmax_row rows[MT][2];
    const float sink = sink_in_base_2(sink_of(a, place.x.h)), sink_m = rounded(sink),
                scale_log2 = place.x.scale * LOG2E * q_unit;
    begin_rows(O, rows, sink_m, sink != -CUDART_INF_F && lane % 4 == 0 ? exp2_fast(sink - sink_m) * (1 / P_UNIT) : 0);

    uint32_t q_at = by_16<D>(sm.Q, lane) + warp * MT * 32 * D, k_at = by_8<D>(sm.K, lane), v_at = by_16<D>(sm.V, lane);

    for (int j = last - 1, next; j >= first; j = next) {
        const split_stats ks = planes.k.stats[k_tile + j * BN / SPLIT_ROWS],
                          vs = planes.v.stats[k_tile + j * BN / SPLIT_ROWS];
        /* If the bound of the scores is above 2^22, their rounding errors are so large that P could exceed float16's
         * range. For wide tiles (with rows of only small numbers, see split.cuh) the limit is 16 times lower, to keep
         * the absolute error small. For Q, score_bound contains the factor 16. */
        wide |= vs.wide || !(score_bound * ks.top < (ks.wide ? 1 << 18 : 1 << 22));
        /* P is divided by 2^shift if the tile of V has smaller numbers (a larger exponent) than O; shift is mostly 0 */
        int shift = vs.top > 0 ? vs.exponent - o_exponent : 0;
        float o_rescale = 1;
        if (shift < 0) {
            o_rescale = power_of_two(max(shift, -126));
            o_exponent = vs.exponent;
            shift = 0;
        }
        wide |= shift > 16;
        cp_async_wait<0>();
        /* after this barrier K[j] has arrived, and no thread reads the previous tile of V */
        __syncthreads();
        load(sm.V, planes.v, j);

        /* whether a row of this warp sees a key of the tile; always true with MT == 2, where registers are too few for
         * the test */
        const int w0 = q0 + warp * MT * 16;
        const bool active = MT == 2 || (j * BN < w0 + MT * 16 - 1 + limit.hi && (j + 1) * BN > w0 + limit.lo);
        uint32_t ph[MT][NT / 2][4], pl[MT][NT / 2][4];
        float rescale[MT][2];
        if (active) {
            float S[MT][NT][4];
            opaque(q_at);
            opaque(k_at);
            multiply_rows<D, MT, BN, BM>(S, q_at, k_at);
            const float k_unit = power_of_two(-ks.exponent);

            change_or_hide<Shape>(S, sm.way, a, place.x, limit, place.x.s.Sq, q0, j, j < free_first || j >= free_last,
                                  q_unit * k_unit);
            /* the factor c must not be 0: the score of a hidden key is -inf, and 0 * -inf is NaN */
            const float c = SCORE_MODS ? 1 : fmaxf(scale_log2 * k_unit, 1.2e-38f);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                softmax_step<SCORE_MODS>(S[mt], rows[mt], rescale[mt], c, shift);
                rescale[mt][0] *= o_rescale;
                rescale[mt][1] *= o_rescale;
            }
            drop_some<Shape>(S, sm.way, a, dropout_head(a, place.x.b, place.x.h), q0, j);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) split_fragments<BN>(ph[mt], pl[mt], S[mt]);
        }

        cp_async_wait<0>();
        /* after this barrier V[j] has arrived, and no thread reads K[j] */
        __syncthreads();
        /* clears only the high halves of V, because the low half of a number that is not finite is 0 already */
        if (clean) clear_not_finite<__half, Shape, D>(sm.V);
        next = tile_below<SCORE_MODS>(sm.seen, j, first);
        if (next >= first) load(sm.K, planes.k, next);

        /* O = rescale O + P V, for as many pairs of 8-column blocks at a time as fit in registers */
        const int PAIRS = D == 256 ? 1 : 2;
        if (!active) {
            if (o_rescale != 1) multiply(O, o_rescale);
            continue;
        }
        opaque(v_at);
#pragma unroll
        for (int dt = 0; dt < DT; dt += 2 * PAIRS) {
            float part[MT][2 * PAIRS][4] = {};
#pragma unroll
            for (int kk = 0; kk < BN / 16; kk++) {
                uint32_t ah[MT][4], al[MT][4];
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) ah[mt][e] = ph[mt][kk][e], al[mt][e] = pl[mt][kk][e];
                multiply_columns<MT, PAIRS, BN * 2 * D>(part, ah, al, v_at, dt / 2, kk * 32 * D);
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        O[mt][dt + n][e] = fmaf(O[mt][dt + n][e], rescale[mt][e / 2], part[mt][n][e]);
        }
    }

    /* out = O / l, lse = m + ln l. The indices of the block's rows are computed a second time here, because keeping
     * them during the loop would take registers. */
    unsigned block = blockIdx.x;
    asm volatile("" : "+r"(block));
    const tile_place home = tile_place_of<BM>(a, block);
    const head_args &x = home.x;
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse];
    bool is_finite = true;
    const float o_unit = power_of_two(-o_exponent) * P_UNIT;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
        is_finite &= divide<SCORE_MODS>(O[mt], rows[mt], SCORE_MODS && a.drop_below ? a.drop_scale : 1, o_unit);
    if (!clean && !wide && __syncthreads_or(!is_finite)) {
        clean = true;
        if (first < last) load(sm.K, planes.k, last - 1);
        goto again;
    }
    if (SCORE_MODS && a.part_lse) {
        /* an l of NaN makes store_parts() compute all rows of the block one by one */
        if (wide)
            for (int n = 0; n < 2 * MT; n++) rows[n / 2][n % 2].l = CUDART_NAN_F;
        store_parts<Shape>(a, x, q0, rows);
        return;
    }
    /* Rows of out pass through the shared memory of Q, where rows of D floats just fit. A warp reads only rows that it
     * wrote. Piece c (eight floats) of row r is stored as piece c ^ (r % 8), to avoid bank conflicts. */
    float *const staged = reinterpret_cast<float *>(sm.Q);
    __syncthreads();
    for_own_rows<Shape>([&](int mt, int half, int r) {
        store_lse(lse, x.b, x.h, x.s.q_start + q0 + r, q0 + r < x.s.Sq, rows[mt][half]);
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            *(float2 *)(staged + at<D>(r, dt) + lane % 4 * 2) = make_float2(O[mt][dt][half * 2],
                                                                            O[mt][dt][half * 2 + 1]);
    });
    __syncwarp();
    const bool copies = !SCORE_MODS && sink_of(a, x.h) == -CUDART_INF_F;
    if (out.data) store_rows_or_values<D, MT * 16>(a, x, staged, q0, warp * MT * 16, limit, copies, lane);
    if (clean || wide) {
        __syncthreads();
        for (int r = warp; r < BM && q0 + r < x.s.Sq; r += Shape::WARPS)
            forward_row(a, x, q0 + r, out, nullptr,
                        wide         ? EVERY_ROW
                        : SCORE_MODS ? UNSOUND_ROWS_BUT_HUGE
                                     : UNSOUND_ROWS);
    }
}

/* ---- Functions of the host that launch the kernel ---------------------------------------------------------------- */

template <int D, bool SCORE_MODS>
cudaError_t launch_variant(const cuda_chip *chip, const cuda_args &a, const forward_planes &planes, cudaStream_t stream)
{
    return launch_tiles<shape<D, SCORE_MODS>, f32_forward_tiles<D, SCORE_MODS>>(chip, a, sizeof(shared<D, SCORE_MODS>),
                                                                                stream, planes);
}

template <int D>
cudaError_t launch_width(const cuda_chip *chip, const cuda_args &a, const forward_planes &planes, bool options,
                         cudaStream_t stream)
{
    return options ? launch_variant<D, true>(chip, a, planes, stream)
                   : launch_variant<D, false>(chip, a, planes, stream);
}

template <int D> size_t shared_bytes(bool options)
{
    return options ? sizeof(shared<D, true>) : sizeof(shared<D, false>);
}

const attn_tensor_id split_ids[] = { ATTN_T_k, ATTN_T_v };

size_t lay_out(const attn_dims &d, void *memory, split_planes (&planes)[2])
{
    size_t total = 0;
    for (int n = 0; n < 2; n++) {
        size_t bytes;
        planes[n] = split_planes_of(d, split_ids[n], (char *)memory + total, &bytes);
        total += split_align(bytes);
    }
    return total;
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int D = split_class(d);
    const bool options = has_options(plan);
    const size_t bytes = D == 64    ? shared_bytes<64>(options)
                         : D == 128 ? shared_bytes<128>(options)
                                    : shared_bytes<256>(options);
    split_planes planes[2];
    plan->workspace_bytes = lay_out(d, nullptr, planes);
    return tile_grid_fits(d) && bytes <= (size_t)chip->shared_bytes;
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *memory)
{
    const cuda_args a = cuda_args_of(chip, plan);
    split_planes planes[2];
    lay_out(a.g.dims, memory, planes);
    const cudaError_t code = is_first_share(chip) ? split_tensors(a, planes, split_ids, 2, stream) : cudaSuccess;
    if (code != cudaSuccess) return code;
    const forward_planes all = { planes[0], planes[1] };
    switch (split_class(a.g.dims)) {
    case 64: return launch_width<64>(chip, a, all, has_options(plan), stream);
    case 128: return launch_width<128>(chip, a, all, has_options(plan), stream);
    default: return launch_width<256>(chip, a, all, has_options(plan), stream);
    }
}

} // namespace

/* Computes the lse of rows with huge scores as two numbers, a.part_lse and a.part_rest, for float32 inputs. */
cudaError_t f32_forward_parts(const cuda_chip *chip, cuda_args a, const split_planes &k, const split_planes &v,
                              cudaStream_t stream)
{
    const forward_planes all = { k, v };
    a.rows_later = nullptr;
    switch (split_class(a.g.dims)) {
    case 64: return launch_width<64>(chip, a, all, true, stream);
    case 128: return launch_width<128>(chip, a, all, true, stream);
    default: return launch_width<256>(chip, a, all, true, stream);
    }
}

extern const cuda_kernel f32_forward = {
    { "generic", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F32), TILE_HEAD_DIM, ATTN_ALL_SCORES | ATTN_TENSOR_BIT(page_table) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
    true,
};
