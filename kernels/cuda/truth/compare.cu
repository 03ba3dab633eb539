/* compare.cu: attn_truth_compare() for GPUs: measures how far results are from the float64 results of truth.cu. */
#include "kernels/cuda/truth/rows.cuh"
#include "kernels/cuda/truth/truth.h"

namespace {

enum { COMPARE_THREADS = 256, COMPARE_BLOCKS = 1 << 12 };

struct compared {
    attn_geometry g;
    attn_view view;
    const double *truth;
    int64_t rows, columns;
    bool keys;
    attn_truth_distance *to;
};

DEVICE bool row_exists(const attn_geometry &g, bool keys, const row_place &row)
{
    const bool packed = packed_rows(g.dims, keys);
    const int64_t b = packed ? sequence_at(keys ? g.cu_k : g.cu_q, g.dims.B, row.line) : row.b;
    const attn_sequence s = attn_sequence_of(&g, b);
    return row.line - (!packed ? 0 : keys ? s.k_start : s.q_start) < (keys ? s.Sk : s.Sq);
}

/* Sets *to to x if x is larger. Doubles that are not negative compare like their bits as integers, so atomicMax()
 * works. */
DEVICE void raise(double *to, double x)
{
    atomicMax((unsigned long long *)to, (unsigned long long)__double_as_longlong(x));
}

__global__ void __launch_bounds__(COMPARE_THREADS) compare(const __grid_constant__ compared c)
{
    const int lane = threadIdx.x % 32, warps = COMPARE_THREADS / 32;
    double max_abs = 0, most = 0;
    for (int64_t n = blockIdx.x * (int64_t)warps + threadIdx.x / 32; n < c.rows; n += gridDim.x * (int64_t)warps) {
        const row_place row = place_of_row(c.g.dims, c.keys, n);
        if (!row_exists(c.g, c.keys, row)) continue;
        const int64_t at = attn_at(&c.view, row.b, row.h, row.line);
        for (int64_t e = lane; e < c.columns; e += 32) {
            const double got = load_float(c.view.dtype, c.view.data, at + e), want = c.truth[n * c.columns + e];
            const bool finite = fabs(want) <= DBL_MAX, both = finite && fabs(got) <= DBL_MAX;
            const bool same = got == want || (got != got && want != want);
            max_abs = fmax(max_abs, same ? 0 : both ? fabs(got - want) : INFINITY);
            if (finite) most = fmax(most, fabs(want));
        }
    }
    for (int other = 16; other; other /= 2) {
        max_abs = fmax(max_abs, __shfl_xor_sync(0xffffffff, max_abs, other));
        most = fmax(most, __shfl_xor_sync(0xffffffff, most, other));
    }
    if (lane != 0) return;
    raise(&c.to->max_abs, max_abs);
    raise(&c.to->largest, most);
}

} // namespace

cudaError_t cuda_truth_compare(cudaStream_t stream, const attn_problem *p, const attn_truth *truth,
                               attn_truth_distance *distances)
{
    const attn_geometry g = attn_geometry_of(p);
    const attn_dims &d = g.dims;
    const struct {
        attn_tensor_id id;
        const double *truth;
        int64_t columns;
        bool keys;
    } results[ATTN_TRUTH_RESULTS] = { { ATTN_T_out, truth->out, d.Dv, false },
                                      { ATTN_T_lse, truth->lse, 1, false },
                                      { ATTN_T_dq, truth->dq, d.D, false },
                                      { ATTN_T_dk, truth->dk, d.D, true },
                                      { ATTN_T_dv, truth->dv, d.Dv, true } };
    cudaError_t code = cudaMemsetAsync(distances, 0, ATTN_TRUTH_RESULTS * sizeof *distances, stream);
    for (int n = 0; n < ATTN_TRUTH_RESULTS && code == cudaSuccess; n++) {
        const int64_t rows = dense_rows(d, results[n].keys);
        const compared c = {
            g, g.view[results[n].id], results[n].truth, rows, results[n].columns, results[n].keys, distances + n
        };
        if (!c.view.data || !c.truth || rows == 0 || c.columns == 0) continue;
        const int64_t blocks = attn_min64(attn_tiles(rows, COMPARE_THREADS / 32), COMPARE_BLOCKS);
        compare<<<(unsigned)blocks, COMPARE_THREADS, 0, stream>>>(c);
        code = cudaPeekAtLastError();
    }
    return code;
}
