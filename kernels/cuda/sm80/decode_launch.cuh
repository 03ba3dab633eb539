/* decode_launch.cuh: code that decode.cu (which explains the design) and decode_wide.cu share: the kernels that compute
 * and combine splits, and the plan of a launch. */
#ifndef ATTN_SM80_DECODE_LAUNCH_CUH
#define ATTN_SM80_DECODE_LAUNCH_CUH

#include <atomic>

#include "decode.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace {

/* bytes of shared memory that a block can have on every GPU from compute capability 8.0 on */
enum { LEAST_SHARED_BYTES = 99 * 1024 };

/* ---- The kernels that compute splits ----------------------------------------------------------------------------- */

template <typename T, int D, bool SCORE_MODS, bool PAGED, keys_as AS>
__global__ void __launch_bounds__(threads_of<D>, (blocks_of<D, SCORE_MODS>))
    decode_splits(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    static_assert(shared_bytes<T, D, SCORE_MODS, AS, copies_by_threads>() <=
                      (D <= TILE_HEAD_DIM ? (int)LEAST_SHARED_BYTES : 227 * 1024 / blocks_of<D, SCORE_MODS>),
                  "what every GPU from compute capability 8.0 on has; for wide heads what a Hopper GPU has");
    extern __shared__ __align__(128) char memory[];
    typename copies_by_threads<T, shape<D, false, SCORE_MODS, PAGED, AS>>::kept narrow;
    typename copies_by_threads<T, many_rows_shape<D, SCORE_MODS, PAGED, AS>>::kept wide;
    walk_splits<T, D, SCORE_MODS, PAGED, AS, copies_by_threads>(a, p, memory, narrow, wide);
}

/* ---- The kernel that combines the results of splits -------------------------------------------------------------- */

enum { COMBINE_WARPS = 8, COMBINE_THREADS = 32 * COMBINE_WARPS };

/* Returns the sum of x over all threads of a block, in every thread. */
template <typename real> DEVICE real block_sum(real x, double (&parts)[COMBINE_WARPS])
{
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    __syncthreads(); /* after this barrier no thread reads the `parts` of the block's previous call of block_sum() */
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    real sum = 0;
    for (int w = 0; w < COMBINE_WARPS; w++) sum += (real)parts[w];
    return sum;
}

/* The number of columns of out that a block of combine_splits() computes, at most one per thread. With more than 256
 * columns, several blocks share them. */
template <int D> constexpr int columns_of = D < COMBINE_THREADS ? D : (int)COMBINE_THREADS;

/* Like forward_row() of rows.cuh, but a whole block (not a warp) computes the row, and only the columns of out from
 * `column0` on. A thread has every 256th channel of q and k, and one channel of v. The function is inline, because a
 * kernel that calls a function needs a stack and starts later. */
template <int D>
DEVICE void forward_row_by_block(const cuda_args &a, const head_args &x, int64_t i, int column0,
                                 double (&parts)[COMBINE_WARPS])
{
    const int N = (D + COMBINE_THREADS - 1) / COMBINE_THREADS;
    const attn_geometry &g = a.g;
    const attn_view &q = g.view[ATTN_T_q], &k = g.view[ATTN_T_k], &v = g.view[ATTN_T_v], &out = g.view[ATTN_T_out],
                    &lse = g.view[ATTN_T_lse];
    const int d = column0 + (int)threadIdx.x;
    const bool has_v = d < g.dims.Dv;
    float of_q[N], of_k[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int c = n * COMBINE_THREADS + (int)threadIdx.x;
        of_q[n] = c < g.dims.D ? load_float(q.dtype, q.data, attn_at(&q, x.b, x.h, x.s.q_start + i) + c) : 0;
    }
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    float unit = 1, o, m, l;
#pragma unroll 1
    /* The terms of the sums of P V are multiplied by `unit`, which is 1 at first. If a sum overflows, a second round
     * computes the sums with a unit of 2^-40. */
    for (int turn = 0; turn < 2; turn++) {
        o = 0;
        m = sink_of(a, x.h), l = m == -CUDART_INF_F ? 0 : 1;
#pragma unroll 1
        for (int64_t j = keys.lo; j < keys.hi; j++) {
            if (!visible_by_mask(a, x, i, j)) continue;
            const int64_t k_at = attn_key_at(&g, &k, x.b, x.hk, x.s.k_start + j);
            float product = 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int c = n * COMBINE_THREADS + (int)threadIdx.x;
                of_k[n] = c < g.dims.D ? load_float(k.dtype, k.data, k_at + c) : 0;
                product += of_q[n] * of_k[n];
            }
            const float of_v = has_v ? load_float(v.dtype, v.data, attn_key_at(&g, &v, x.b, x.hk, x.s.k_start + j) + d)
                                     : 0;
            float derivative;
            const float qk = block_sum(product, parts);
            double in_double = 0;
            if (!(fabsf(qk) <= FLT_MAX)) {
#pragma unroll
                for (int n = 0; n < N; n++) in_double += (double)of_q[n] * (double)of_k[n];
                in_double = block_sum(in_double, parts);
            }
            const float z = fabsf(qk) <= FLT_MAX ? score(a, x, i, j, qk, &derivative)
                                                 : score_in_double_inline(a, x, i, j, in_double).x;
            const float m_new = z > m || z != z ? z : m;
            const float rescale = m == -CUDART_INF_F ? 0 : expf(m - m_new), p = expf(z - m_new);
            l = l * rescale + p;
            const float kept = !a.drop_below || kept_of(a, dropout_head(a, x.b, x.h), i, j / 8) >> (j % 8) & 1
                                   ? a.drop_scale
                                   : 0;
            o = o * rescale + p * kept * unit * of_v;
            m = m_new;
        }
        if (turn == 1 || __syncthreads_and(l - l == 0 && o - o == 0)) break;
        unit = 1.0f / (1ll << 40);
    }
    if (has_v && out.data)
        store_float(out.dtype, out.data, attn_at(&out, x.b, x.h, x.s.q_start + i) + d,
                    l == 0      ? 0
                    : unit == 1 ? o * (x.v_scale / l)
                                : o / l / unit * x.v_scale);
    if (d == 0 && lse.data)
        ((float *)lse.data)[attn_at(&lse, x.b, x.h, x.s.q_start + i)] = l == 0 ? -CUDART_INF_F : m + logf(l);
}

/* Combines the partial results of all splits into out and lse. A block computes rows blockIdx.y, blockIdx.y +
 * gridDim.y, ... of one key/value head. Each warp adds up every eighth group of splits, and the block then adds up the
 * warps in order. Rows with huge scores, and rows whose sums overflow, are computed key by key. The kernel must not
 * need more registers than decode_splits(), so that its blocks can start as soon as blocks of decode_splits() end. */
template <int D>
__global__ void __launch_bounds__(COMBINE_THREADS, D == 64    ? 4
                                                   : D == 128 ? 3
                                                              : 2)
    combine_splits(const __grid_constant__ cuda_args a, const __grid_constant__ plan p)
{
    const int COLUMNS = columns_of<D>, C = COLUMNS / 32;
    __shared__ float part[COMBINE_WARPS][COLUMNS];
    __shared__ float2 parts_ml[COMBINE_WARPS];
    __shared__ double parts_sum[COMBINE_WARPS];
    /* arguments for a row that is recomputed key by key; they are in shared memory, because registers are scarce */
    __shared__ head_args of_head;
    const attn_geometry &g = a.g;
    const int Hk = (int)g.dims.Hk, b = (int)(blockIdx.x / Hk), hk = (int)(blockIdx.x % Hk), group = (int)g.group;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column0 = (int)blockIdx.z * COLUMNS;
    /* Lets the next kernel start. That kernel waits for this kernel's end before it reads results. */
    launch_dependents();
    const group_place place = group_place_of(a, p, b, hk);
    const head_args &x = place.x;
    const int rows = place.rows, splits = place.splits;
    wait_for_prerequisites();
    if (rows == 0 || splits == 1) return;
    /* bit n: tensor cores could not compute row n of this block, so it is computed key by key */
    uint32_t repair = 0;
    for (int r = blockIdx.y; r < rows; r += gridDim.y) {
        const int i = r / group, h = (int)x.h + r % group;
        const float2 *ml = p.ml + place.saved + r;
        const float *O = p.O + (place.saved + r) * D + column0 + lane * C;
        const float sink = sink_in_base_2(sink_of(a, h));
        /* number of partial results of a group of SPLIT_GROUP splits: one if a single block computes the group,
         * otherwise one per split */
        const int each = p.splits_per_block > 1 ? 1 : SPLIT_GROUP;
        float m = -CUDART_INF_F, l = 0, o[C] = {};
        for (int s = warp * SPLIT_GROUP; s < splits; s += COMBINE_WARPS * SPLIT_GROUP) {
            const int count = min(each, splits - s);
            float2 ml_of[SPLIT_GROUP];
            float O_of[SPLIT_GROUP][C], m_group = -CUDART_INF_F, l_group = 0, o_group[C] = {};
#pragma unroll
            for (int n = 0; n < SPLIT_GROUP; n++) {
                if (n >= count) break;
                ml_of[n] = ml[(int64_t)(s + n) * rows];
#pragma unroll
                for (int e = 0; e < C; e += 2) {
                    const float2 two = *(const float2 *)(O + (int64_t)(s + n) * rows * D + e);
                    O_of[n][e] = two.x, O_of[n][e + 1] = two.y;
                }
            }
#pragma unroll
            for (int n = 0; n < SPLIT_GROUP; n++) {
                if (n >= count) break;
                const fold f(m_group, ml_of[n].x);
                m_group = f.m, l_group = f(l_group, ml_of[n].y);
#pragma unroll
                for (int e = 0; e < C; e++) o_group[e] = f(o_group[e], O_of[n][e]);
            }
            const fold f(m, m_group);
            m = f.m, l = f(l, l_group);
#pragma unroll
            for (int e = 0; e < C; e++) o[e] = f(o[e], o_group[e]);
        }
#pragma unroll
        for (int e = 0; e < C; e++) part[warp][lane * C + e] = o[e];
        if (lane == 0) parts_ml[warp] = make_float2(m, l);
        __syncthreads();
        float top = sink;
        for (int w = 0; w < COMBINE_WARPS; w++) top = fmaxf(top, parts_ml[w].x);
        const float base = top == -CUDART_INF_F ? 0 : top;
        /* the sink is added here, because no split contains it */
        float sum = exp2_fast(sink - base), factors[COMBINE_WARPS];
#pragma unroll
        for (int w = 0; w < COMBINE_WARPS; w++) {
            factors[w] = exp2_fast(parts_ml[w].x - base);
            sum += factors[w] * parts_ml[w].y;
        }
        const float factor = sum == 0 ? 0 : x.v_scale / sum;
        const attn_view &out = g.view[ATTN_T_out], &lse = g.view[ATTN_T_lse];
        bool finite = sum - sum == 0 && (p.options              ? is_sound_score<true>(top)
                                         : top != -CUDART_INF_F ? is_sound_score<false>(top)
                                                                : !sees_keys(g, x.s, i));
        const int d = threadIdx.x;
        if (d < COLUMNS && column0 + d < g.dims.Dv && out.data) {
            float value = 0;
#pragma unroll
            for (int w = 0; w < COMBINE_WARPS; w++) value += factors[w] * part[w][d];
            finite &= value - value == 0;
            store_float(out.dtype, out.data, attn_at(&out, x.b, h, x.s.q_start + i) + column0 + d, value * factor);
        }
        if (column0 + d == 0 && lse.data)
            ((float *)lse.data)[attn_at(&lse, x.b, h, x.s.q_start + i)] = lse_of_sum(top, sum);
        /* If tensor cores could not compute the row, its bit in `repair` is set. After this barrier the next row may
         * overwrite `part`. */
        repair |= (uint32_t)(__syncthreads_or(!finite) != 0) << (r / gridDim.y);
    }
    for (int r = blockIdx.y; repair; r += gridDim.y, repair >>= 1)
        if (repair & 1) {
            __syncthreads(); /* after this barrier no thread reads the previous row's arguments in `of_head` */
            if (threadIdx.x == 0) of_head = head_args_of(a, b, x.h + r % group);
            __syncthreads();
            forward_row_by_block<D>(a, of_head, r / group, column0, parts_sum);
        }
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

inline int class_of(const attn_dims &d)
{
    const int64_t D = attn_max64(d.D, d.Dv);
    return D <= 64 ? 64 : D <= 128 ? 128 : D <= 256 ? 256 : D <= 512 ? 512 : 1024;
}

struct launch_plan {
    plan p;
    int64_t blocks;
    unsigned combine_rows; /* gridDim.y of combine_splits(): the number of blocks that share the rows of a key/value
                            * head */
    /* number of rows of partial results in the workspace: one row of O for each row of each split; 0: no sequence has
     * more than one split */
    int64_t rows;
};

/* Plans a launch. `float8`: whether the kernels read float8 keys. With float8 keys, a sequence never has more splits
 * than with 16-bit keys. */
inline launch_plan launch_plan_of(const attn_geometry &g, bool float8)
{
    const attn_dims &d = g.dims;
    launch_plan y = {};
    y.p.float8 = float8;
    y.p.wide_heads = class_of(d) > TILE_HEAD_DIM;
    y.p.splits_per_block = 1;
    y.p.walkers = 1;
    if (d.packed) {
        const int64_t short_slots = d.total_k / 128 + d.B, long_slots = d.total_k / 1024 + 17 * d.B;
        y.p.unit = short_slots <= long_slots ? 128 : 1024;
        y.p.extra = short_slots <= long_slots ? 1 : 17;
        y.p.head_rows = d.total_k / KEYS_A_ROW;
        y.blocks = attn_min64(short_slots, long_slots) * d.Hk;
        y.rows = most_splits(d.total_k, false, false, false) > 1 ? y.p.head_rows * d.Hk : 0;
        /* number of blocks that share the rows of a key/value head; at least DECODE_ROWS / 32, because a block can have
         * at most 32 rows, one for each bit of `repair` */
        y.combine_rows = 4;
    } else {
        const int64_t rows = d.Sq * g.group;
        const int64_t keys = attn_min64(d.Sk, g.left + g.right + d.Sq + SPLIT_ALIGN);
        const int64_t splits = most_splits(keys, rows > NARROW, float8, y.p.wide_heads);
        y.p.splits = y.p.walkers = (int)splits;
        y.blocks = d.B * splits * d.Hk;
        y.rows = splits > 1 ? d.B * d.Hk * splits * rows : 0;
        y.combine_rows = (unsigned)rows;
    }
    return y;
}

/* struct once says for which devices prepare() has already set up a kernel. For devices from number DEVICES on,
 * prepare() repeats the setup at each launch. */
enum { DEVICES = 64 };
struct once {
    /* for each device: 0: not set up; 1: set up; 2: set up, and programmatic dependent launch is possible */
    std::atomic<int> state[DEVICES];
};

/* Lets the kernel `main` use `bytes` of shared memory. *overlap becomes true if the code is compiled for compute
 * capability 9.0 or above: the kernel `combine` may then start before `main` ends. */
template <typename Main, typename Combine>
cudaError_t prepare(once &known, Main *main, Combine *combine, size_t bytes, bool *overlap)
{
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code != cudaSuccess) return code;
    int state = device < DEVICES ? known.state[device].load() : 0;
    if (state == 0) {
        cudaFuncAttributes attributes;
        code = cudaFuncSetAttribute(main, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
        if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, combine);
        if (code != cudaSuccess) return code;
        state = attributes.ptxVersion >= 90 ? 2 : 1;
        if (device < DEVICES) known.state[device].store(state);
    }
    *overlap = state == 2;
    return cudaSuccess;
}

template <int D> cudaError_t launch_combine(const cuda_args &a, const launch_plan &y, bool overlap, cudaStream_t stream)
{
    if (y.rows == 0) return cudaSuccess;
    return launch_kernel(overlap, combine_splits<D>,
                         dim3((unsigned)(a.g.dims.B * a.g.dims.Hk), y.combine_rows, D / columns_of<D>), COMBINE_THREADS,
                         0, stream, a, y.p);
}

inline bool blocks_fit(const attn_geometry &g)
{
    return launch_plan_of(g, false).blocks <= INT32_MAX && g.dims.B * g.dims.Hk <= INT32_MAX;
}

inline size_t workspace_of(const attn_geometry &g)
{
    return (size_t)launch_plan_of(g, false).rows * ((size_t)class_of(g.dims) * sizeof(float) + sizeof(float2));
}

inline void place_partial_results(launch_plan &y, const attn_dims &d, void *workspace)
{
    if (!y.rows) return;
    y.p.O = (float *)workspace;
    y.p.ml = (float2 *)(y.p.O + y.rows * class_of(d));
}

inline bool reads_no_more(const attn_geometry &g)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (g.view[id].data && attn_tensors[id].role == ATTN_ROLE_IN && id != ATTN_T_q && id != ATTN_T_k &&
            id != ATTN_T_v)
            return false;
    return !g.cu_q && !g.cu_k && !g.seqlens_k && !g.page_table;
}

} // namespace

#endif
