/* simple.cu: attention without tensor cores, for every dtype, head dim and option. Tests on the GPU compare all other
 * kernels with this one, and it computes problems that no other kernel takes. Source: FlashAttention-2
 * (arXiv:2307.08691), Algorithms 1 and 2, one row at a time.
 *
 * One warp computes one row of out, dq, or dk and dv (or one element of dbias) without atomics, so the bits of a row
 * depend on the problem alone. A lane holds every 32nd channel: 8 registers for D <= 256; variants with 18 (forward, D
 * <= 576) and 32 registers compute wider heads. Hidden keys are skipped, not multiplied by zero: NaN in a hidden key
 * has no effect, and NaN in a visible key reaches exactly the rows that see it. */
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/common/pair.cuh"
#include "head_sums.h"
#include "left.cuh"
#include "simple.h"

namespace {

/* ---- The kernels of the forward ---------------------------------------------------------------------------------- */

template <int N>
__global__ void __launch_bounds__(32 * WARPS)
    forward_rows(const __grid_constant__ cuda_args a, int64_t first, attn_view out, float *lse_dense)
{
    const row r = query_row(a, first + warp_index());
    if (r.exists) forward_row<N>(a, r.x, r.i, out, lse_dense, EVERY_ROW);
}

/* Calls visit(n) with a whole warp for each n in first .. first + count - 1 for which wanted(n) is true. The grid has
 * `warps` warps. A warp tests 32 values of n at a time, one per lane; the values of a warp are `warps` apart. */
template <class WANTED, class VISIT>
DEVICE void for_wanted(int64_t first, int64_t count, int64_t warps, WANTED wanted, VISIT visit)
{
    for (int64_t base = warp_index(); base < count; base += 32 * warps) {
        const int64_t mine = base + threadIdx.x % 32 * warps;
        unsigned set = __ballot_sync(0xffffffff, mine < count && wanted(first + mine));
        for (; set; set &= set - 1) visit(first + base + (__ffs(set) - 1) * warps);
    }
}

/* Computes the rows that earlier launches have marked because they could not compute them. a.rows_later must be NULL;
 * otherwise this launch, too, would only mark the rows. */
template <int N>
__global__ void __launch_bounds__(32 * WARPS)
    forward_rows_left(const __grid_constant__ cuda_args a, int64_t first, int64_t count, int64_t warps, uint8_t *marks)
{
    /* Clears each mark after reading it, because in a backward the next kernel uses the same bytes for its own
     * marks. */
    for_wanted(
        first, count, warps, [&](int64_t n) { return marks[n] != 0; },
        [&](int64_t n) {
            const row r = query_row(a, n);
            const rows_written which = (rows_written)(marks[n] - 1);
            forward_row<N, BY_LANES>(a, r.x, r.i, a.g.view[ATTN_T_out], nullptr, which);
            __syncwarp();
            if (threadIdx.x % 32 == 0) marks[n] = 0;
        });
}

/* ---- The kernels of the backward --------------------------------------------------------------------------------- */

/* Stores the two parts of a row's lse: the largest score in s.lse, and `rest`. Kernels on tensor cores recognise such a
 * row by the huge number in s.lse. A largest score below ATTN_LSE_MOST is therefore raised to this limit, and `rest` is
 * reduced by the difference. */
DEVICE void store_parts(const saved &s, int64_t at, float2 parts)
{
    const bool raised = parts.y != 0 && fabsf(parts.x) < ATTN_LSE_MOST;
    s.lse[at] = raised ? ATTN_LSE_MOST : parts.x;
    s.rest[at] = raised ? parts.y - (ATTN_LSE_MOST - parts.x) : parts.y;
}

/* Computes lse and rest (the two parts of a huge lse) of the warp's row. The row's number is computed again here,
 * because keeping it would take registers in delta_rows(). */
template <int N> __device__ __noinline__ void lse_of_row_in_parts(const cuda_args &a, const saved &s)
{
    const row r = query_row(a, warp_index());
    const float2 parts = lse_in_parts<N>(a, r.x, r.i, s.lse[lse_at(a, r.x, r.i)]);
    if (threadIdx.x % 32 == 0) store_parts(s, lse_at(a, r.x, r.i), parts);
}

__device__ __noinline__ void mark_one_key(const cuda_args &a, const saved &s)
{
    const row r = query_row(a, warp_index());
    if (sees_one_key(a, r.x, r.i) && threadIdx.x % 32 == 0) s.rest[lse_at(a, r.x, r.i)] = ONE_KEY;
}

/* Computes delta_i = rowsum(dO * O) - dlse (0 if the row sees no key), and copies lse to the dense array s.lse. The
 * launch bound limits registers, so that enough blocks fit on a multiprocessor to read memory fast. */
template <int N>
__global__ void __launch_bounds__(32 * WARPS, (N > CHANNELS ? 16 : 48) / WARPS)
    delta_rows(const __grid_constant__ cuda_args a, const __grid_constant__ saved s, bool given)
{
    const attn_geometry &g = a.g;
    const row r = query_row(a, warp_index());
    if (!r.exists) return;
    const head_args &x = r.x;
    const int64_t line = x.s.q_start + r.i;
    float o[N], dout[N];
    load_row(s.out, x.b, x.h, line, g.dims.Dv, o);
    load_row(g.view[ATTN_T_dout], x.b, x.h, line, g.dims.Dv, dout);
    float delta = dot(o, dout);
    const attn_view &dlse = g.view[ATTN_T_dlse], &given_lse = g.view[ATTN_T_lse];
    const int64_t at = lse_at(a, x, r.i);
    const float lse = given ? ((const float *)given_lse.data)[attn_at(&given_lse, x.b, x.h, line)] : s.lse[at];
    if (threadIdx.x % 32 == 0) {
        if (dlse.data) delta -= ((const float *)dlse.data)[attn_at(&dlse, x.b, x.h, line)];
        s.lse[at] = lse;
        s.rest[at] = 0;
        s.delta[at] = lse == -CUDART_INF_F ? 0 : delta;
    }
    __syncwarp();
    if (fabsf(lse) < ATTN_LSE_MOST) mark_one_key(a, s);
    else lse_of_row_in_parts<N>(a, s);
}

template <int N>
__global__ void __launch_bounds__(32 * WARPS) dq_rows(const __grid_constant__ cuda_args a, int64_t first, saved s)
{
    const row r = query_row(a, first + warp_index());
    if (r.exists) dq_row<N>(a, s, r.x, r.i);
}

/* Computes the rows of dk and dv of key number n. Keys are counted over all key/value heads, head after head. */
template <int N, row_way WAY> DEVICE void dkdv_row_at(const cuda_args &a, const saved &s, int64_t n)
{
    const attn_dims &d = a.g.dims;
    const int64_t line = n % d.Sk, rest = n / d.Sk, b = d.packed ? sequence_at(a.g.cu_k, d.B, line) : rest / d.Hk;
    dkdv_row<N, WAY>(a, s, b, rest % d.Hk, line - attn_sequence_of(&a.g, b).k_start);
}

template <int N>
__global__ void __launch_bounds__(32 * WARPS) dkdv_rows(const __grid_constant__ cuda_args a, int64_t first, saved s)
{
    const attn_dims &d = a.g.dims;
    const int64_t n = first + warp_index();
    if (d.Sk > 0 && n < d.Sk * d.Hk * (d.packed ? 1 : d.B)) dkdv_row_at<N, BY_WARP>(a, s, n);
}

/* Computes lse and rest (the two parts of a huge lse) of rows for which earlier launches have not done so. */
template <int N>
__global__ void __launch_bounds__(32 * WARPS)
    lse_in_parts_left(const __grid_constant__ cuda_args a, int64_t first, int64_t count, int64_t warps, saved s)
{
    for_wanted(
        first, count, warps,
        [&](int64_t n) {
            const float lse = s.lse[n];
            return fabsf(lse) >= ATTN_LSE_MOST && lse != -CUDART_INF_F &&
                   !(is_parted_by_tiles(a, lse) && s.rest[n] == s.rest[n]);
        },
        [&](int64_t n) {
            const row r = query_row(a, n);
            if (!r.exists) return;
            const float2 parts = lse_in_parts<N, BY_LANES>(a, r.x, r.i, s.lse[n], true);
            __syncwarp();
            if (threadIdx.x % 32 == 0) store_parts(s, n, parts);
        });
}
template <int N>
__global__ void __launch_bounds__(32 * WARPS) dq_rows_left(const __grid_constant__ cuda_args a, int64_t first,
                                                           int64_t count, int64_t warps, saved s, const uint8_t *marks)
{
    for_wanted(
        first, count, warps, [&](int64_t n) { return marks[n] != 0; },
        [&](int64_t n) {
            const row r = query_row(a, n);
            dq_row<N, BY_LANES>(a, s, r.x, r.i);
        });
}
template <int N>
__global__ void __launch_bounds__(32 * WARPS)
    dkdv_rows_left(const __grid_constant__ cuda_args a, int64_t first, int64_t count, int64_t warps, saved s,
                   const uint8_t *marks)
{
    for_wanted(
        first, count, warps, [&](int64_t n) { return marks[n] != 0; },
        [&](int64_t n) { dkdv_row_at<N, BY_LANES>(a, s, n); });
}

template <int N> DEVICE float dz_of(const cuda_args &a, const saved &s, const head_args &x, int64_t i, int64_t j)
{
    if (i >= x.s.Sq || s.lse[lse_at(a, x, i)] == -CUDART_INF_F || !visible(a, x, i, j)) return 0;
    return gradient_of_pair<N>(a, s, x, i, j).dz;
}

/* The part of dbias [nb, nh, nq, Sk] that one launch computes; a broadcast axis has size 1. An element is a sum over
 * the broadcast axes: one term per query, head and batch row. The launch adds the terms `begin` to `end` - 1 to the sum
 * so far. */
struct dbias_part {
    int64_t nb, nh, nq, first, begin, end;
};

static inline int64_t dbias_terms(const attn_dims &d, const dbias_part &x)
{
    return (x.nb == 1 ? d.B : 1) * (x.nh == 1 ? d.H : 1) * (x.nq == 1 ? d.Sq : 1);
}

template <int N>
__global__ void __launch_bounds__(32 * WARPS) dbias_elements(const __grid_constant__ cuda_args a, saved s, dbias_part x)
{
    const attn_dims &d = a.g.dims;
    const int64_t n = x.first + warp_index();
    if (d.Sk == 0 || n >= x.nb * x.nh * x.nq * d.Sk) return;
    const int64_t j = n % d.Sk, i0 = n / d.Sk % x.nq, h0 = n / d.Sk / x.nq % x.nh, b0 = n / d.Sk / x.nq / x.nh;
    const int64_t rows = x.nq == 1 ? d.Sq : 1, heads = x.nh == 1 ? d.H : 1;
    const attn_view &view = a.g.view[ATTN_T_dbias];
    float *const to = (float *)view.data + attn_at(&view, b0, h0, i0) + j;
    float sum = x.begin ? *to : 0;
    if (x.begin == x.end) { /* if there are no queries, the sum has no terms and is 0 */
        if (threadIdx.x % 32 == 0) *to = 0;
        return;
    }
    int64_t i = x.begin % rows, h = x.begin / rows % heads, b = x.begin / rows / heads;
    head_args of = head_args_of(a, b0 + b, h0 + h);
    for (int64_t term = x.begin; term < x.end; term++) {
        sum += dz_of<N>(a, s, of, i0 + i, j);
        if (++i < rows) continue;
        i = 0;
        if (++h == heads) h = 0, b++;
        if (term + 1 < x.end) of = head_args_of(a, b0 + b, h0 + h);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) *to = sum;
}

template <int N>
DEVICE float sum_of_far_pairs(const cuda_args &a, const saved &s, const head_args &x, int64_t i, bool given)
{
    const attn_geometry &g = a.g;
    const float lse = s.lse[lse_at(a, x, i)], rest = s.rest[lse_at(a, x, i)], delta = s.delta[lse_at(a, x, i)];
    float q[N], k[N], dout[N], v[N];
    row_far_sums sum = { 0, 0, 0, 0 };
    if (lse == -CUDART_INF_F) return 0;
    load_row(g.view[ATTN_T_q], x.b, x.h, x.s.q_start + i, g.dims.D, q);
    load_row(g.view[ATTN_T_dout], x.b, x.h, x.s.q_start + i, g.dims.Dv, dout);
    const attn_range keys = attn_keys_of(&g, &x.s, i);
    for (int64_t j = keys.lo; j < keys.hi; j++) {
        if (!visible_by_mask(a, x, i, j)) continue;
        load_row(g.view[ATTN_T_k], x.b, x.hk, x.s.k_start + j, g.dims.D, k);
        load_row(g.view[ATTN_T_v], x.b, x.hk, x.s.k_start + j, g.dims.Dv, v);
        const pair_gradient y = gradient(a, x, i, j, lse, rest, delta, q, k, dot(dout, v));
        const int64_t distance = i + x.s.Sk - x.s.Sq - j;
        const float far = (float)(distance < 0 ? -distance : distance);
        if (y.p == 0) continue;
        sum.p += y.p;
        sum.p_far += y.p * far;
        sum.dz += y.dz;
        sum.dz_far += y.dz * far;
    }
    return far_of_row(a, s, x, i, sum, given);
}

template <int N>
__global__ void __launch_bounds__(32 * WARPS)
    far_rows(const __grid_constant__ cuda_args a, int64_t first, saved s, bool given)
{
    const row r = query_row(a, first + warp_index());
    if (!r.exists) return;
    const float sum = sum_of_far_pairs<N>(a, s, r.x, r.i, given);
    if (threadIdx.x % 32 == 0) s.far[lse_at(a, r.x, r.i)] = sum;
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

bool plan_forward(const cuda_chip *, attn_plan *plan)
{
    plan->workspace_bytes = 0;
    return true;
}

/* Returns N, the channels per lane. A backward is not compiled for N = LATENT_CHANNELS. */
int channels_of(const attn_geometry &g)
{
    const int64_t most = attn_max64(g.dims.D, g.dims.Dv);
    return most <= 32 * CHANNELS ? CHANNELS : most <= 32 * LATENT_CHANNELS ? LATENT_CHANNELS : WIDE_CHANNELS;
}

void launch_rows(const cuda_chip *chip, const cuda_args &a, const attn_view &out, float *lse_dense, cudaStream_t stream)
{
    const int channels = channels_of(a.g);
    const auto kernel = channels == CHANNELS          ? forward_rows<CHANNELS>
                        : channels == LATENT_CHANNELS ? forward_rows<LATENT_CHANNELS>
                                                      : forward_rows<WIDE_CHANNELS>;
    in_steps(chip, query_rows(a.g.dims), row_seconds(chip, a.g, FORWARD_PAIR), [&](int64_t first, int64_t count) {
        kernel<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, out, lse_dense);
    });
}

cudaError_t launch_forward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *)
{
    const cuda_args a = cuda_args_of(chip, plan);
    launch_rows(chip, a, a.g.view[ATTN_T_out], nullptr, stream);
    return cudaPeekAtLastError();
}

bool plan_backward(const cuda_chip *, attn_plan *plan)
{
    const attn_dims &d = plan->geometry.dims;
    plan->workspace_bytes = sizeof(float) *
                            (saved_floats(plan) + (plan->problem->out.rank ? 0 : (size_t)(query_rows(d) * d.Dv)));
    return true;
}

void launch_dq(const cuda_chip *chip, const cuda_args &a, const saved &s, cudaStream_t stream)
{
    const auto kernel = channels_of(a.g) == CHANNELS ? dq_rows<CHANNELS> : dq_rows<WIDE_CHANNELS>;
    in_steps(chip, query_rows(a.g.dims), row_seconds(chip, a.g, BACKWARD_PAIR),
             [&](int64_t first, int64_t count) { kernel<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, s); });
}

void launch_dkdv(const cuda_chip *chip, const cuda_args &a, const saved &s, cudaStream_t stream)
{
    const auto kernel = channels_of(a.g) == CHANNELS ? dkdv_rows<CHANNELS> : dkdv_rows<WIDE_CHANNELS>;
    in_steps(chip, key_rows(a.g.dims), key_seconds(chip, a.g, BACKWARD_PAIR),
             [&](int64_t first, int64_t count) { kernel<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, s); });
}

cudaError_t launch_backward(const cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace)
{
    const cuda_args a = cuda_args_of(chip, plan);
    const attn_dims &d = a.g.dims;
    const bool given = plan->problem->out.rank > 0;
    saved s;
    lay_out_saved(&s, d, workspace);
    s.out = a.g.view[ATTN_T_out];
    if (!given) {
        s.out.data = (float *)workspace + saved_floats(plan);
        s.out.dtype = ATTN_F32;
        s.out.row = d.Dv; /* the recomputed out is [B, H, Sq, Dv], or for packed problems [H, total_q, Dv] */
        s.out.head = d.Sq * d.Dv;
        s.out.batch = d.packed ? 0 : d.H * d.Sq * d.Dv;
        launch_rows(chip, a, s.out, s.lse, stream);
    }
    if (takes_step(chip, chip->step_seconds)) simple_delta(a, s, given, stream);
    if (a.g.view[ATTN_T_dq].data) launch_dq(chip, a, s, stream);
    if (a.g.view[ATTN_T_dk].data || a.g.view[ATTN_T_dv].data) launch_dkdv(chip, a, s, stream);
    simple_gradients(chip, plan->problem, a, s, stream);
    return cudaPeekAtLastError();
}

} // namespace

void simple_delta(const cuda_args &a, const saved &s, bool given, cudaStream_t stream)
{
    const int64_t rows = query_rows(a.g.dims);
    const auto kernel = channels_of(a.g) == CHANNELS ? delta_rows<CHANNELS> : delta_rows<WIDE_CHANNELS>;
    if (rows > 0) kernel<<<blocks_for(rows), 32 * WARPS, 0, stream>>>(a, s, given);
}

void simple_rows_left(const cuda_chip *chip, const attn_plan *plan, cudaStream_t stream)
{
    cuda_args a = cuda_args_of(chip, plan);
    uint8_t *const marks = a.rows_later;
    const bool wide = channels_of(a.g) != CHANNELS;
    a.rows_later = a.keys_later = nullptr;
    if (!chip->found) return;
    look_for_rows(chip, stream);
    launch_left(chip, query_rows(a.g.dims), row_seconds(chip, a.g, FORWARD_PAIR),
                [&](unsigned blocks, int64_t first, int64_t count, int64_t warps) {
                    const auto kernel = wide ? forward_rows_left<WIDE_CHANNELS> : forward_rows_left<CHANNELS>;
                    kernel<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, warps, marks);
                });
}

static unsigned blocks_for_marks(const cuda_chip *chip, int64_t rows)
{
    /* this many warps, 32 per multiprocessor, keep the GPU busy */
    const int64_t busy = (int64_t)chip->multiprocessors * 32;
    return blocks_for(attn_max64(attn_tiles(rows, 32), attn_min64(rows, busy)));
}

void simple_marked_rows(const cuda_chip *chip, cuda_args a, cudaStream_t stream)
{
    uint8_t *const marks = a.rows_later;
    const int64_t rows = query_rows(a.g.dims);
    const unsigned blocks = blocks_for_marks(chip, rows);
    const auto kernel = channels_of(a.g) == CHANNELS ? forward_rows_left<CHANNELS> : forward_rows_left<WIDE_CHANNELS>;
    a.rows_later = nullptr;
    if (rows > 0) kernel<<<blocks, 32 * WARPS, 0, stream>>>(a, 0, rows, (int64_t)blocks * WARPS, marks);
}

void simple_marked_gradients(const cuda_chip *chip, cuda_args a, const saved &s, cudaStream_t stream)
{
    const uint8_t *const rows = a.rows_later, *const keys = a.keys_later;
    const int64_t query = query_rows(a.g.dims), key = key_rows(a.g.dims);
    const unsigned query_blocks = blocks_for_marks(chip, query), key_blocks = blocks_for_marks(chip, key);
    const bool wide = channels_of(a.g) != CHANNELS;
    const auto dq_kernel = wide ? dq_rows_left<WIDE_CHANNELS> : dq_rows_left<CHANNELS>;
    const auto dkdv_kernel = wide ? dkdv_rows_left<WIDE_CHANNELS> : dkdv_rows_left<CHANNELS>;
    a.rows_later = a.keys_later = nullptr;
    if (a.g.view[ATTN_T_dq].data && query > 0)
        dq_kernel<<<query_blocks, 32 * WARPS, 0, stream>>>(a, 0, query, (int64_t)query_blocks * WARPS, s, rows);
    if ((a.g.view[ATTN_T_dk].data || a.g.view[ATTN_T_dv].data) && key > 0)
        dkdv_kernel<<<key_blocks, 32 * WARPS, 0, stream>>>(a, 0, key, (int64_t)key_blocks * WARPS, s, keys);
}

void simple_gradients_left(const cuda_chip *chip, const attn_plan *plan, cuda_args a, const saved &s,
                           cudaStream_t stream)
{
    uint8_t *const rows = a.rows_later, *const keys = a.keys_later;
    const int64_t query = query_rows(a.g.dims), key = key_rows(a.g.dims);
    const bool wide = channels_of(a.g) != CHANNELS;
    const auto lse_kernel = wide ? lse_in_parts_left<WIDE_CHANNELS> : lse_in_parts_left<CHANNELS>;
    const auto dq_kernel = wide ? dq_rows_left<WIDE_CHANNELS> : dq_rows_left<CHANNELS>;
    const auto dkdv_kernel = wide ? dkdv_rows_left<WIDE_CHANNELS> : dkdv_rows_left<CHANNELS>;
    a.rows_later = a.keys_later = nullptr;
    if (!chip->found) return;
    look_for_rows(chip, stream);
    launch_left(chip, query, row_seconds(chip, a.g, FORWARD_PAIR),
                [&](unsigned blocks, int64_t first, int64_t count, int64_t warps) {
                    lse_kernel<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, warps, s);
                });
    if (a.g.view[ATTN_T_dq].data)
        launch_left(chip, query, row_seconds(chip, a.g, BACKWARD_PAIR),
                    [&](unsigned blocks, int64_t first, int64_t count, int64_t warps) {
                        dq_kernel<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, warps, s, rows);
                    });
    if (a.g.view[ATTN_T_dk].data || a.g.view[ATTN_T_dv].data)
        launch_left(chip, key, key_seconds(chip, a.g, BACKWARD_PAIR),
                    [&](unsigned blocks, int64_t first, int64_t count, int64_t warps) {
                        dkdv_kernel<<<blocks, 32 * WARPS, 0, stream>>>(a, first, count, warps, s, keys);
                    });
}

namespace {

/* Divides the elements of dbias, and each element's terms, among launches, so that no launch takes long. */
void launch_dbias(const cuda_chip *chip, const attn_problem *p, const cuda_args &a, const saved &s, cudaStream_t stream)
{
    const int64_t *n = p->dbias.shape;
    dbias_part x = { n[0], n[1], n[2], 0, 0, 0 };
    const auto kernel = channels_of(a.g) == CHANNELS ? dbias_elements<CHANNELS> : dbias_elements<WIDE_CHANNELS>;
    const int64_t elements = n[0] * n[1] * n[2] * n[3], terms = dbias_terms(a.g.dims, x);
    /* the loop runs at least once, because an element without terms must be set to 0 */
    for (int64_t begin = 0; begin == 0 || begin < terms; begin += MOST_IN_A_ROW) {
        x.begin = begin, x.end = attn_min64(begin + MOST_IN_A_ROW, terms);
        in_steps(chip, elements, (double)attn_max64(x.end - begin, 1) * pair_seconds(chip, a.g, DBIAS_PAIR),
                 [&](int64_t first, int64_t count) {
                     x.first = first;
                     kernel<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, s, x);
                 });
    }
}

} // namespace

void simple_gradients(const cuda_chip *chip, const attn_problem *p, const cuda_args &a, const saved &s,
                      cudaStream_t stream)
{
    const attn_geometry &g = a.g;
    const attn_dims &d = g.dims;
    if (g.view[ATTN_T_dbias].data) launch_dbias(chip, p, a, s, stream);
    if (g.view[ATTN_T_dalibi_slopes].data && d.H > 0) {
        const auto kernel = channels_of(g) == CHANNELS ? far_rows<CHANNELS> : far_rows<WIDE_CHANNELS>;
        in_steps(chip, query_rows(d), row_seconds(chip, g, BACKWARD_PAIR), [&](int64_t first, int64_t count) {
            kernel<<<blocks_for(count), 32 * WARPS, 0, stream>>>(a, first, s, p->out.rank > 0);
        });
    }
    sum_heads(chip, p, a, s, stream);
}

extern const cuda_kernel simple_forward = {
    { "simple", ATTN_OP_FORWARD, ATTN_DTYPES_FORWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES | ATTN_KEY_FEATURES },
    80,
    ANY_COMPUTE,
    plan_forward,
    launch_forward,
};
extern const cuda_kernel simple_backward = {
    { "simple", ATTN_OP_BACKWARD, ATTN_DTYPES_BACKWARD, ATTN_MAX_HEAD_DIM, ATTN_ALL_SCORES },
    80,
    ANY_COMPUTE,
    plan_backward,
    launch_backward,
};
