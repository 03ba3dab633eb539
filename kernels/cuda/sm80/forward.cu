/* forward.cu: flash attention forward on tensor cores by mma.sync, from compute capability 8.0 on. A block owns BM
 * queries of one head. It visits, in tiles of BN keys, all keys that these queries may see, from the last tile to the
 * first (FlashAttention-2, arXiv:2307.08691, Algorithm 1).
 *
 * A warp owns MT blocks of 16 rows, and four lanes share a row, so the softmax needs no data of other warps. m, the
 * number that is subtracted from a row's scores, may be up to 8 (base 2) below the row's maximum, so that O is rescaled
 * only once or twice per row.
 *
 * The plain variant computes problems with lengths, causal and window, where each row sees one interval of keys, and
 * with a scale above 0. The variant with options (softcap, bias, ALiBi, masks, dropout, any scale) applies the
 * functions of args.cuh to every score.
 *
 * If V has a NaN or an infinity, P V is NaN even for rows that do not see this key, because 0 times NaN is NaN. A block
 * whose result is not finite therefore visits its tiles a second time, with zeros in place of such values. It then
 * computes the rows that see such a value with rows.cuh, which skips hidden keys. */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/rows.cuh"
#include "decode.h"
#include "forward_steps.cuh"
#include "seen_tiles.cuh"

namespace {

/* Number of queries and keys per tile, warps per block, and blocks per multiprocessor, for head sizes up to D. */
template <int D> struct tile;
template <> struct tile<64> {
    static const int BM = 128, BN = 128, WARPS = 4, BLOCKS = 2;
};
template <> struct tile<128> {
    static const int BM = 128, BN = 64, WARPS = 4, BLOCKS = 2;
};
template <> struct tile<256> {
    static const int BM = 128, BN = 64, WARPS = 8, BLOCKS = 1;
};

/* With options (softcap, bias, masks, ...), which take many registers, a warp computes only 16 rows. */
template <int D, bool SCORE_MODS_> struct shape {
    static const bool SCORE_MODS = SCORE_MODS_;
    static const int WARPS = tile<D>::WARPS, THREADS = 32 * WARPS, BN = SCORE_MODS ? 64 : tile<D>::BN,
                     BM = SCORE_MODS ? 16 * WARPS : tile<D>::BM;
    static const int MT = BM / 16 / WARPS, BLOCKS = D == 64 && SCORE_MODS ? 3 : tile<D>::BLOCKS;
};

template <int D, bool SCORE_MODS> struct shared {
    alignas(1024) uint16_t Q[shape<D, SCORE_MODS>::BM * D]; /* first the block's rows of Q, later its rows of out */
    alignas(1024) uint16_t K[shape<D, SCORE_MODS>::BN * D];
    alignas(1024) uint16_t V[shape<D, SCORE_MODS>::BN * D];
    scores_on_their_way<shape<D, SCORE_MODS>> way;
    std::conditional_t<SCORE_MODS, seen_tiles, char> seen;
};

/* results_fit<D, SCORE_MODS> is true if the block's results, BM rows of D floats, fit into its shared memory. */
template <int D, bool SCORE_MODS>
constexpr bool results_fit = sizeof(shared<D, SCORE_MODS>) >= sizeof(float) * shape<D, SCORE_MODS>::BM *D;
static_assert(results_fit<64, false> && results_fit<64, true> && results_fit<128, false> && results_fit<128, true> &&
              results_fit<256, false> && results_fit<256, true>);

template <typename T, int D, bool SCORE_MODS, bool PAGED>
__global__ void __launch_bounds__(shape<D, SCORE_MODS>::THREADS, shape<D, SCORE_MODS>::BLOCKS)
    forward_tiles(const __grid_constant__ cuda_args a, limits whole, float scale_log2)
{
    typedef shape<D, SCORE_MODS> Shape;
    const int BM = Shape::BM, BN = Shape::BN, MT = Shape::MT, THREADS = Shape::THREADS, NT = BN / 8, DT = D / 8;
    shared<D, SCORE_MODS> &sm = block_memory<shared<D, SCORE_MODS>>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    /* Q and the last tile of keys are loaded as soon as their addresses are known, while other indices are computed */
    row_place place = row_place_of<BM>(a, whole, blockIdx);
    if (!place.exists) return;
    if (SCORE_MODS && a.part_lse && !has_parts<BM>(a, head_args_of(a, place.b, place.h), place.i0)) return;
    const int q0 = place.i0;
    const limits limit = place.limit;
    const loader<D, THREADS> Q(g.view[ATTN_T_q], place.b, place.h, place.q_start, place.Sq, g.dims.D);
    Q.template load<BM>(sm.Q, q0);
    const int q_last = min(q0 + BM, place.Sq) - 1;
    /* no row of the block sees the key with number `end` or later keys */
    const int seen = max(q0 + limit.lo, 0), end = max(min(q_last + limit.hi, limit.Sk), 0);
    const int first = min(seen, limit.Sk) / BN;
    int last = (end + BN - 1) / BN; /* each of the tiles `first` to `last` - 1 has a key that at least one row sees */
    last = last_tile<SCORE_MODS, BN, THREADS>(a, place.b, place.h, q0, q_last + 1, first, last, sm.seen);
    key_loader<T, D, THREADS, false, PAGED> K(g, g.view[ATTN_T_k], place.b, place.hk, place.k_start, limit.Sk,
                                              g.dims.D);
    if (first < last) K.template load<BN>(sm.K, (last - 1) * BN);
    cp_async_commit();
    key_loader<T, D, THREADS, false, PAGED> V(g, g.view[ATTN_T_v], place.b, place.hk, place.k_start, limit.Sk,
                                              g.dims.Dv);
    /* all rows see all keys of the tiles free_first to free_last - 1 */
    const int free_first = (max(q_last + limit.lo, 0) + BN - 1) / BN,
              free_last = max(min(q0 + limit.hi, limit.Sk), 0) / BN;
    head_args x; /* arguments for options (softcap, bias, masks); set only in the variant with options */
    if (SCORE_MODS) x = head_args_of(a, place.b, place.h);

    /* for D = 128, `across` is kept in a register: when it was computed for each fragment, the kernel took 3 % longer
     * (H200) */
    const uint32_t start = smem_addr(&sm), down = start + lane_down<D>(lane);
    const uint32_t across = D == 128 ? kept(start + lane_across<D>(lane)) : start + lane_across<D>(lane);
    const uint32_t tileK = sizeof sm.Q, tileV = tileK + sizeof sm.K;
    bool clean = false; /* whether this is the loop's second pass, in which zeros replace infinities and NaN of V */
again:
    float O[MT][DT][4];
    softmax_row rows[MT][2];
    const float sink = sink_in_base_2(sink_of(a, place.h));
    begin_rows(O, rows, sink, sink != -CUDART_INF_F && lane % 4 == 0 ? 1 : 0);

    if (clean && first < last) {
        K.template load<BN>(sm.K, (last - 1) * BN);
        cp_async_commit();
    }
    for (int j = last - 1, next; j >= first; j = next) {
        cp_async_wait<0>();
        /* after this barrier K[j] has arrived, and no thread reads the previous tile of V */
        __syncthreads();
        V.template load<BN>(sm.V, j * BN);
        cp_async_commit();

        float S[MT][NT][4] = {};
        scores<T, D>(
            S, [&](uint32_t(&f)[4], int mt, int kk) { a_rows_of<D>(f, down, 0, (warp * MT + mt) * 16, kk * 16); },
            [&](uint32_t(&f)[4], int nt, int kk) { b_rows_of<D>(f, across, tileK, nt * 8, kk * 16); });

        change_or_hide<Shape>(S, sm.way, a, x, limit, place.Sq, q0, j, j < free_first || j >= free_last, 1);
        const float c = SCORE_MODS ? 1 : scale_log2;
#pragma unroll
        for (int mt = 0; mt < MT; mt++) softmax_step(S[mt], O[mt], rows[mt], c);
        drop_some<Shape>(S, sm.way, a, dropout_head(a, x.b, x.h), q0, j);

        cp_async_wait<0>();
        /* after this barrier V[j] has arrived, and no thread reads K[j] */
        __syncthreads();
        if (clean) clear_not_finite<T, Shape, D>(sm.V);
        next = tile_below<SCORE_MODS>(sm.seen, j, first);
        if (next >= first) {
            K.template load<BN>(sm.K, next * BN);
            cp_async_commit();
        }

        accumulate<T>(O, S, [&](uint32_t(&f)[4], int dt, int kk) { b_columns_of<D>(f, down, tileV, dt * 8, kk * 16); });
    }

    /* out = O / l, lse = m + ln l. The indices of the block's rows are computed a second time here, because keeping
     * them during the loop would take registers. */
    place = row_place_of<BM>(a, whole, make_uint3(kept(blockIdx.x), kept(blockIdx.y), kept(blockIdx.z)));
    const float v_scale = scale_of(g.view[ATTN_T_v_scale], place.b, place.hk) *
                          (SCORE_MODS && a.drop_below ? a.drop_scale : 1);
    const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse];
    float zero = 0;
    bool finite = true;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            softmax_row &row = rows[mt][half];
            row.l = whole_sum(row.l);
            const float factor = row.l == 0 ? 0 : v_scale / row.l;
            zero = fmaf(row.l, 0, zero);
            finite &= is_sound_score<SCORE_MODS>(row.m);
            if (!SCORE_MODS && row.m == -CUDART_INF_F) {
                const int i = place.i0 + (warp * MT + mt) * 16 + half * 8 + lane / 4;
                /* if the row sees a key, a maximum of -inf is wrong, and the row must be computed without tensor
                 * cores */
                finite &= max(i + place.limit.lo, 0) >= min(i + place.limit.hi, place.limit.Sk);
            }
#pragma unroll
            for (int dt = 0; dt < DT; dt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &o = O[mt][dt][half * 2 + e];
                    o *= factor;
                    /* for D above 64, the shorter test in the `else` branch makes the compiler spill registers */
                    if (D > 64) finite &= o - o == 0;
                    /* `zero` becomes NaN if o is not finite */
                    else zero = fmaf(o, 0, zero);
                }
        }
    cp_async_wait<0>();
    if (__syncthreads_or(zero != 0 || !finite) && !clean) {
        clean = true;
        goto again;
    }
    if (SCORE_MODS && a.part_lse) {
        store_parts<Shape>(a, head_args_of(a, place.b, place.h), place.i0, rows);
        return;
    }
    const bool pieces = in_pieces<T>(out, place.b, place.h, place.q_start, g.dims.Dv);
    for_own_rows<Shape>([&](int mt, int half, int r) {
        store_lse(lse, place.b, place.h, place.q_start + place.i0 + r, place.i0 + r < place.Sq, rows[mt][half]);
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            stage_pair<T, D>(&sm, pieces, r, dt * 8 + lane % 4 * 2, O[mt][dt][half * 2], O[mt][dt][half * 2 + 1]);
    });
    if (out.data) {
        const int mine = warp * MT * 16;
        __syncwarp(); /* a barrier of the warp is enough, because a warp reads back only rows that it wrote */
        store_rows<D, 32>(out, place.b, place.h, place.q_start + place.i0, mine,
                          (int)attn_clamp64(place.Sq - place.i0 - mine, 0, MT * 16), (int)g.dims.Dv, &sm, pieces, lane);
    }
    if (clean) {
        x = head_args_of(a, place.b, place.h);
        __syncthreads();
        for (int r = warp; r < BM && place.i0 + r < place.Sq; r += Shape::WARPS)
            forward_row(a, x, place.i0 + r, out, nullptr, SCORE_MODS ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS);
    }
}

/* ---- Functions of the host that launch the kernel ---------------------------------------------------------------- */

template <typename T, int D, bool SCORE_MODS, bool PAGED>
cudaError_t launch_variant(const cuda_chip *chip, const cuda_args &a, cudaStream_t stream)
{
    return launch_tiles<shape<D, SCORE_MODS>, forward_tiles<T, D, SCORE_MODS, PAGED>>(
        chip, a, sizeof(shared<D, SCORE_MODS>), stream, limits_of_whole(a.g), (float)a.g.scale * LOG2E);
}

template <typename T, int D>
cudaError_t launch_width(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, cudaStream_t stream)
{
    if (has_pages(plan))
        return has_options(plan) ? launch_variant<T, D, true, true>(chip, a, stream)
                                 : launch_variant<T, D, false, true>(chip, a, stream);
    return has_options(plan) ? launch_variant<T, D, true, false>(chip, a, stream)
                             : launch_variant<T, D, false, false>(chip, a, stream);
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, cudaStream_t stream)
{
    const int64_t D = attn_max64(a.g.dims.D, a.g.dims.Dv);
    return D <= 64    ? launch_width<T, 64>(chip, a, plan, stream)
           : D <= 128 ? launch_width<T, 128>(chip, a, plan, stream)
                      : launch_width<T, 256>(chip, a, plan, stream);
}

cudaError_t launch_dtype(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, cudaStream_t stream)
{
    return plan->problem->q.dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(chip, a, plan, stream)
                                               : launch_for<__half>(chip, a, plan, stream);
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    const int64_t D = attn_max64(d.D, d.Dv);
    const size_t plain = D <= 64    ? sizeof(shared<64, false>)
                         : D <= 128 ? sizeof(shared<128, false>)
                                    : sizeof(shared<256, false>);
    const size_t options = D <= 64    ? sizeof(shared<64, true>)
                           : D <= 128 ? sizeof(shared<128, true>)
                                      : sizeof(shared<256, true>);
    plan->workspace_bytes = 0;
    return tile_grid_fits(d) && (plain > options ? plain : options) <= (size_t)chip->shared_bytes;
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *)
{
    cuda_args a = cuda_args_of(chip, plan);
    a.decode_rows = chip->decode_rows;
    return launch_dtype(chip, a, plan, stream);
}

const uint32_t DTYPES = ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3);

} // namespace

/* Computes the lse of rows with huge scores as two numbers, a.part_lse and a.part_rest, for a backward with options
 * (softcap, bias, masks, ...). Visits only tiles that have such a row. */
cudaError_t forward_parts(const cuda_chip *chip, cuda_args a, const attn_plan *plan, cudaStream_t stream)
{
    a.rows_later = nullptr;
    return launch_dtype(chip, a, plan, stream);
}

extern const cuda_kernel generic_forward = {
    { "generic", ATTN_OP_FORWARD, DTYPES, TILE_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan,
    launch,
    true,
};
extern const cuda_kernel generic_packed_forward = {
    { "generic+decode", ATTN_OP_FORWARD, DTYPES, TILE_HEAD_DIM,
      (ATTN_ALL_SCORES & ~PADDING_FEATURES) | ATTN_OPTION_BIT(KEY_DTYPE) },
    80,
    ANY_COMPUTE,
    plan_with_decode<generic_forward>,
    launch_with_decode<generic_forward>,
    true,
};
