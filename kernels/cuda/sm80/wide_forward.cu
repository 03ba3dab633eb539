/* wide_forward.cu: the forward for head sizes above those of forward.cu, up to ATTN_MAX_HEAD_DIM. The shared memory and
 * registers of a block are the same for all head sizes. A block computes COLUMNS columns of O for BM queries of one
 * head. It visits, in tiles of BN keys, all keys that these queries may see, from the last tile to the first. S is the
 * sum over chunks of CHUNK columns of Q and K; while a product reads one of two buffers, copies fill the other.
 *
 * wide.cuh explains how float32 is multiplied.
 *
 * If Dv is above COLUMNS, several blocks compute the same S, which takes 1.5 times as many multiplications at D = Dv =
 * 512, and 2.5 times at 1024. The block with the first columns writes lse.
 *
 * A block only marks rows that tensor cores cannot compute (cuda_args.rows_later), because it has only its own columns;
 * a later launch computes them with one warp for all columns. The marks lie in the workspace, unless the caller
 * provides memory. forward.cu explains how blocks handle NaN and infinity in V. */
#include "forward_steps.cuh"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/rows.cuh"
#include "kernels/cuda/simple/simple.h"
#include "seen_tiles.cuh"
#include "wide.cuh"

namespace {

template <typename T_, bool SCORE_MODS_> struct shape {
    typedef T_ T;
    /* the type that determines the layout of tiles in shared memory; both 16-bit types have the layout of __half
     * (tile_row) */
    typedef std::conditional_t<is_float<T>, float, __half> stored;
    static const bool SCORE_MODS = SCORE_MODS_;
    static const int BM = 128, BN = is_float<T> ? 32 : 64, CHUNK = is_float<T> ? 64 : 128;
    static const int WARPS = 8, THREADS = 32 * WARPS, MT = 1;
    static_assert(BM == 16 * MT * WARPS, "a warp has 16 MT rows");
};

/* A buffer for a chunk of columns of Q and K, or for columns of V. While options are applied, scores overwrite the
 * chunk that was multiplied last. */
template <class X> union stage {
    struct {
        uint16_t Q[X::BM * X::CHUNK * WORDS<typename X::T>], K[X::BN * X::CHUNK * WORDS<typename X::T>];
    } chunk;
    uint16_t V[X::BN * COLUMNS * WORDS<typename X::T>];
    scores_on_their_way<X> way;
};

/* The block's rows and columns of out. The struct is in shared memory, because O and S take nearly all registers. */
struct block_place {
    row_place rows;
    head_args head;
    int column0;
};

template <class X> struct shared {
    alignas(1024) stage<X> stages[2];
    block_place place;
    std::conditional_t<X::SCORE_MODS, seen_tiles, char> seen;
};

/* Finds the block's rows and columns of out. Blocks with the same queries have successive numbers: they read the same
 * keys, and find them in the L2 cache. All threads of a block call this function. */
template <int BM> DEVICE void find_place(const cuda_args &a, const limits &whole, int column_blocks, block_place &place)
{
    const int n = (int)(gridDim.x - 1 - blockIdx.x);
    if (threadIdx.x == 0) {
        place.column0 = n % column_blocks * COLUMNS;
        place.rows = row_place_of<BM>(a, whole, make_uint3(gridDim.x - 1 - n / column_blocks, blockIdx.y, blockIdx.z));
        place.head = head_args_of(a, place.rows.b, place.rows.h);
    }
    __syncthreads();
}

template <class X, bool PAGED>
DEVICE void load_chunk(const cuda_args &a, const row_place &place, stage<X> &to, int chunk, int j)
{
    const attn_geometry &g = a.g;
    const int CHUNK = X::CHUNK, first = chunk * CHUNK;
    const attn_view q = columns_from(g.view[ATTN_T_q], first), k = columns_from(g.view[ATTN_T_k], first);
    const loader<CHUNK, X::THREADS, false, typename X::stored> Q(q, place.b, place.h, place.q_start, place.Sq,
                                                                 g.dims.D - first);
    Q.template load<X::BM>(to.chunk.Q, place.i0);
    key_loader<typename X::T, CHUNK, X::THREADS, false, PAGED> K(g, k, place.b, place.hk, place.k_start, place.limit.Sk,
                                                                 g.dims.D - first);
    K.template load<X::BN>(to.chunk.K, j * X::BN);
    cp_async_commit();
}

template <class X, bool PAGED>
DEVICE void load_values(const cuda_args &a, const block_place &place, stage<X> &to, int j)
{
    const attn_geometry &g = a.g;
    const attn_view v = columns_from(g.view[ATTN_T_v], place.column0);
    key_loader<typename X::T, COLUMNS, X::THREADS, false, PAGED> V(
        g, v, place.rows.b, place.rows.hk, place.rows.k_start, place.rows.limit.Sk, g.dims.Dv - place.column0);
    V.template load<X::BN>(to.V, j * X::BN);
    cp_async_commit();
}

/* Divides O by l. Returns false if tensor cores cannot compute one of this thread's rows. */
template <class X, int DT>
DEVICE bool divide_rows(float (&O)[X::MT][DT][4], softmax_row (&rows)[X::MT][2], const row_place &place, float v_scale)
{
    bool sound = true;
    for_own_rows<X>([&](int mt, int half, int r) {
        softmax_row &row = rows[mt][half];
        row.l = whole_sum(row.l);
        const float factor = row.l == 0 ? 0 : v_scale / row.l;
        sound &= is_sound_score<X::SCORE_MODS>(row.m) && row.l - row.l == 0;
        /* if the row sees a key, a maximum of -inf is wrong, and the row must be computed without tensor cores */
        if (!X::SCORE_MODS && row.m == -CUDART_INF_F) {
            const int i = place.i0 + r;
            sound &= max(i + place.limit.lo, 0) >= min(i + place.limit.hi, place.limit.Sk);
        }
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &o = O[mt][dt][half * 2 + e];
                o *= factor;
                sound &= o - o == 0;
            }
    });
    return sound;
}

/* Replaces infinities and NaN in a tile of float32 V by 0. */
template <class X> DEVICE void clear_not_finite_floats(uint16_t *V)
{
    for (int n = threadIdx.x; n < X::BN * COLUMNS; n += X::THREADS) {
        float &x = ((float *)V)[n];
        if (x - x != 0) x = 0;
    }
    __syncthreads();
}

/* With float32, a row that sees only one key becomes an exact copy of the key's row of v. Each warp copies its own
 * rows. */
template <class X> DEVICE void copy_values_of_one_key(const cuda_args &a, const row_place &place, int column0)
{
    const attn_geometry &g = a.g;
    const attn_view &out = g.view[ATTN_T_out], &v = g.view[ATTN_T_v];
    const int width = min((int)g.dims.Dv - column0, (int)COLUMNS), first = place.i0 + threadIdx.x / 32 * X::MT * 16;
    for (int i = first; i < min(first + X::MT * 16, place.Sq); i++) {
        const int key = max(i + place.limit.lo, 0);
        if (min(i + place.limit.hi, place.limit.Sk) - key != 1) continue;
        const float *const from = (const float *)v.data + attn_key_at(&g, &v, place.b, place.hk, place.k_start + key) +
                                  column0;
        const int64_t to = attn_at(&out, place.b, place.h, place.q_start + i) + column0;
        for (int d = threadIdx.x % 32; d < width; d += 32) store_float(out.dtype, out.data, to + d, from[d]);
    }
}

/* Writes the block's columns of out, and lse if these are the first columns. */
template <class X, int DT>
DEVICE void store_results(const cuda_args &a, const row_place &place, int column0, const float (&O)[X::MT][DT][4],
                          const softmax_row (&rows)[X::MT][2], void *staged)
{
    const int mine = threadIdx.x / 32 * X::MT * 16;
    const attn_view &out = a.g.view[ATTN_T_out];
    if (column0 == 0)
        for_own_rows<X>([&](int mt, int half, int r) {
            store_lse(a.g.view[ATTN_T_lse], place.b, place.h, place.q_start + place.i0 + r, place.i0 + r < place.Sq,
                      rows[mt][half]);
        });
    if (!out.data) return;
    store_columns<typename X::T>(out, place.b, place.h, place.q_start + place.i0,
                                 (int)attn_clamp64(place.Sq - place.i0 - mine, 0, X::MT * 16), column0,
                                 min((int)a.g.dims.Dv - column0, (int)COLUMNS), O, staged);
    if (is_float<typename X::T> && !X::SCORE_MODS && sink_of(a, place.h) == -CUDART_INF_F)
        copy_values_of_one_key<X>(a, place, column0);
}

template <typename T, bool SCORE_MODS, bool PAGED>
__global__ void __launch_bounds__(shape<T, SCORE_MODS>::THREADS, 1)
    wide_forward_tiles(const __grid_constant__ cuda_args a, limits whole, float scale_log2, int column_blocks)
{
    typedef shape<T, SCORE_MODS> X;
    const int BM = X::BM, BN = X::BN, CHUNK = X::CHUNK, NT = BN / 8, DT = COLUMNS / 8;
    static_assert(sizeof(stage<X>) % 1024 == 0, "fragments' swizzle");
    static_assert(sizeof(shared<X>) >= sizeof(float) * BM * COLUMNS / 2, "results are staged");
    shared<X> &sm = block_memory<shared<X>>();
    const attn_geometry &g = a.g;
    const int lane = threadIdx.x % 32, D = (int)g.dims.D, chunks = (D + CHUNK - 1) / CHUNK;
    find_place<BM>(a, whole, column_blocks, sm.place);
    const row_place &place = sm.place.rows;
    const head_args &x = sm.place.head;
    const limits &limit = place.limit;
    if (!place.exists) return;

    const int q_last = min(place.i0 + BM, place.Sq) - 1;
    /* no row of the block sees the key with number `end` or later keys */
    const int end = max(min(q_last + limit.hi, limit.Sk), 0);
    const int first = min(max(place.i0 + limit.lo, 0), limit.Sk) / BN;
    const int last = last_tile<SCORE_MODS, BN, X::THREADS>(a, place.b, place.h, place.i0, q_last + 1, first,
                                                           (end + BN - 1) / BN, sm.seen);
    const uint32_t start = smem_addr(&sm);
    const float c = SCORE_MODS ? 1 : scale_log2;
    bool clean = false; /* whether this is the loop's second pass, in which zeros replace infinities and NaN of V */
again:
    float O[1][DT][4];
    softmax_row rows[1][2];
    const float sink = sink_in_base_2(sink_of(a, place.h));
    begin_rows(O, rows, sink, sink != -CUDART_INF_F && lane % 4 == 0 ? 1 : 0);
    int at = 0;
    if (first < last) load_chunk<X, PAGED>(a, place, sm.stages[at], 0, last - 1);
    for (int j = last - 1, next; j >= first; j = next) {
        float S[1][NT][4] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk++, at ^= 1) {
            cp_async_wait<0>();
            /* after this barrier the chunk is in buffer `at`, and no thread reads the other buffer */
            __syncthreads();
            if (chunk + 1 < chunks) load_chunk<X, PAGED>(a, place, sm.stages[at ^ 1], chunk + 1, j);
            else load_values<X, PAGED>(a, sm.place, sm.stages[at ^ 1], j);
            const uint32_t tileQ = at * (uint32_t)sizeof(stage<X>);
            add_chunk<T, CHUNK>(S, start, tileQ, tileQ + BM * CHUNK * (uint32_t)sizeof(T), threadIdx.x / 32 * 16,
                                D - chunk * CHUNK);
        }
        /* after this barrier scores may overwrite the chunk that was multiplied last */
        if (SCORE_MODS) __syncthreads();
        const bool bounded = j * BN < q_last + limit.lo || j * BN + BN > min(place.i0 + limit.hi, limit.Sk);
        change_or_hide<X>(S, sm.stages[at ^ 1].way, a, x, limit, place.Sq, place.i0, j, bounded, 1);
        softmax_step(S[0], O[0], rows[0], c);
        drop_some<X>(S, sm.stages[at ^ 1].way, a, dropout_head(a, x.b, x.h), place.i0, j);

        cp_async_wait<0>();
        /* after this barrier V[j] is in buffer `at`, and no thread uses the other buffer */
        __syncthreads();
        if constexpr (is_float<T>) {
            if (clean) clear_not_finite_floats<X>(sm.stages[at].V);
        } else if (clean) clear_not_finite<T, X, COLUMNS>(sm.stages[at].V);
        next = tile_below<SCORE_MODS>(sm.seen, j, first);
        if (next >= first) load_chunk<X, PAGED>(a, place, sm.stages[at ^ 1], 0, next);
        add_product<T>(O, S, start, at * (uint32_t)sizeof(stage<X>));
        at ^= 1;
    }

    const float v_scale = x.v_scale * (SCORE_MODS && a.drop_below ? a.drop_scale : 1);
    const bool sound = divide_rows<X>(O, rows, place, v_scale);
    if (__syncthreads_or(!sound) && !clean) {
        clean = true;
        goto again;
    }
    store_results<X>(a, place, sm.place.column0, O, rows, &sm);
    const rows_written which = SCORE_MODS ? UNSOUND_ROWS_BUT_HUGE : UNSOUND_ROWS;
    for (int i = place.i0 + (int)threadIdx.x; clean && i < place.i0 + BM && i < place.Sq; i += X::THREADS) {
        a.rows_later[lse_at(a, x, i)] = 1 + which;
        *a.rows_found = 1;
    }
}

/* ---- Functions of the host that launch the kernel ---------------------------------------------------------------- */

/* In the workspace, a header of MARKS_HEAD bytes lies before the marks of rows. A mark is one byte; it is not 0 if a
 * later launch must compute the row. */
enum { MARKS_HEAD = 16 };

template <typename T, bool SCORE_MODS, bool PAGED>
cudaError_t launch_variant(const cuda_chip *chip, cuda_args a, cudaStream_t stream)
{
    typedef shape<T, SCORE_MODS> X;
    dim3 grid = tile_grid(a.g, X::BM);
    const int column_blocks = (int)attn_tiles(a.g.dims.Dv, COLUMNS);
    take_share(chip, a, grid);
    grid.x *= (unsigned)column_blocks;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
    const cudaError_t code = allow_shared<wide_forward_tiles<T, SCORE_MODS, PAGED>>(sizeof(shared<X>));
    if (code != cudaSuccess) return code;
    wide_forward_tiles<T, SCORE_MODS, PAGED><<<grid, X::THREADS, sizeof(shared<X>), stream>>>(
        a, limits_of_whole(a.g), (float)a.g.scale * LOG2E, column_blocks);
    return cudaPeekAtLastError();
}

template <typename T>
cudaError_t launch_for(const cuda_chip *chip, const cuda_args &a, const attn_plan *plan, cudaStream_t stream)
{
    if (has_pages(plan))
        return has_options(plan) ? launch_variant<T, true, true>(chip, a, stream)
                                 : launch_variant<T, false, true>(chip, a, stream);
    return has_options(plan) ? launch_variant<T, true, false>(chip, a, stream)
                             : launch_variant<T, false, false>(chip, a, stream);
}

bool plan(const cuda_chip *chip, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    plan->workspace_bytes = (size_t)(MARKS_HEAD + query_rows(d));
    const size_t bytes = plan->problem->q.dtype == ATTN_F32 ? sizeof(shared<shape<float, true>>)
                                                            : sizeof(shared<shape<__half, true>>);
    return tile_grid_fits(d) && bytes <= (size_t)chip->shared_bytes;
}

cudaError_t launch(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    cuda_args a = cuda_args_of(chip, plan);
    uint8_t *const own = a.rows_later ? nullptr : (uint8_t *)workspace;
    if (own) {
        a.rows_found = own;
        a.rows_later = own + MARKS_HEAD;
        if (is_first_share(chip)) {
            const cudaError_t cleared = cudaMemsetAsync(own, 0, (size_t)(MARKS_HEAD + query_rows(a.g.dims)), stream);
            if (cleared != cudaSuccess) return cleared;
        }
    }
    const attn_dtype dtype = plan->problem->q.dtype;
    const cudaError_t code = dtype == ATTN_F32    ? launch_for<float>(chip, a, plan, stream)
                             : dtype == ATTN_BF16 ? launch_for<__nv_bfloat16>(chip, a, plan, stream)
                                                  : launch_for<__half>(chip, a, plan, stream);
    if (code == cudaSuccess && own && is_last_share(chip)) simple_marked_rows(chip, a, stream);
    return code;
}

} // namespace

extern const cuda_kernel wide_forward = {
    { "generic", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16) | ATTN_DTYPE_BIT(F8E4M3),
      ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan,
    launch,
    true,
};
extern const cuda_kernel f32_wide_forward = {
    { "generic", ATTN_OP_FORWARD, ATTN_DTYPE_BIT(F32), ATTN_MAX_HEAD_DIM,
      ATTN_ALL_SCORES | ATTN_TENSOR_BIT(page_table) },
    80,
    ANY_COMPUTE,
    plan,
    launch,
    true,
};
