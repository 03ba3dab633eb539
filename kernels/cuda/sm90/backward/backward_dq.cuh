/* backward_dq.cuh: computes dQ from the float32 sums that the kernel of backward_tiles.cuh has collected. When a block
 * finds no more tiles of keys, its consumers do this. Each warp claims units (32 or 64 queries of a head). Before it
 * reads the sums of a unit, it waits until all tiles of keys of the head are done. The sums of a unit take 16 KB: four
 * pieces of 16 queries by 64 channels. */
#ifndef ATTN_SM90_BACKWARD_DQ_CUH
#define ATTN_SM90_BACKWARD_DQ_CUH

#include "kernels/cuda/sm90/backward/backward_prepare.cuh"

namespace {

template <class X> static __device__ __noinline__ void repair_queries_of(const cuda_args &a, const saved &s, int n)
{
    const query_unit x = query_unit_of<X>(a, n);
    const head_args head = head_args_of(a, x.b, x.h);
    repair_begins();
    for (int i = x.i0; i < x.i0 + UNIT_ROWS<X> && i < x.s.Sq; i++) dq_row(a, s, head, i);
}

template <typename T, class X> struct dq_writer {
    const cuda_args &a;
    const plan &p;
    uint16_t *const staging; /* shared memory through which this warp writes dQ: 16 rows of 64 numbers */
    const int lane;
    int known = -1; /* index in plan::done of the group of heads for which await_head() has waited last; -1: none */

    DEVICE void run()
    {
        for (int next = claim_unit();;) {
            const int n = __shfl_sync(0xffffffff, next, 0);
            if (n >= p.units) return;
            /* claim the next unit of queries before this one is computed, because the atomic operation takes time */
            next = claim_unit();
            write(n);
        }
    }

    DEVICE int claim_unit() const { return lane == 0 ? claim(p.claimed) : 0; }

    DEVICE void await_head(int head)
    {
        if (head == known) return;
        if (lane == 0) wait_until_equal(p.done + head, 2 * p.order.per_head << p.tile_parts.log2_of_ranges, 1000);
        __syncwarp();
        known = head;
    }

    DEVICE void write(int n)
    {
        const query_unit x = query_unit_of<X>(a, n);
        const int head = ((a.g.dims.packed ? 0 : x.b * (int)a.g.dims.H) + x.h) / p.group, first = x.i0 % QUERY_TILE;
        const int count = (int)x.s.Sq - x.i0;
        bool finite = true;
        if (count > 0) {
            await_head(head);
            float sums[UNIT_ROWS<X> / 16][X::CHUNKS][32];
            const float *const from = p.scratch.sums + (int64_t)x.place * (QUERY_TILE * X::D) + lane * 4;
#pragma unroll
            for (int row = 0; row < UNIT_ROWS<X> / 16; row++)
#pragma unroll
                for (int n = 0; n < X::D / 8; n++)
                    *(float4 *)&sums[row][n / 8][n % 8 * 4] = load_4(from + fragment_at<X::D>(first + row * 16, n * 8));
            const attn_view &dq = a.g.view[ATTN_T_dq];
            const int64_t to = attn_at(&dq, x.b, x.h, x.s.q_start + x.i0);
#pragma unroll
            for (int chunk = 0; chunk < X::CHUNKS; chunk++) {
                /* If the word is 0, no block has added to these sums, because no key is visible to the queries. Their
                 * dQ is 0. */
                const uint32_t *const word = p.begun + x.place * 2 + (X::UNITS == 2 ? x.i0 / QUERY_TILE % 2 : chunk);
                const bool begun = p.zeros || load_acquire(word) != 0;
                const float factors[2] = { p.scale, p.scale };
#pragma unroll
                for (int row = 0; row < UNIT_ROWS<X> / 16; row++) {
                    float(&piece)[32] = sums[row][chunk];
#pragma unroll
                    for (int i = 0; i < 32; i++) piece[i] = begun ? piece[i] : 0;
                    finite &= finish_rows(piece, factors);
                    store_gradient<T, 64>(dq, to + row * 16 * dq.row + chunk * 64, count - row * 16,
                                          (int)a.g.dims.D - chunk * 64, piece, staging, lane);
                    __syncwarp();
                }
            }
        }
        finite = __all_sync(0xffffffff, finite);
        if (!finite) repair_queries_of<X>(a, p.scratch.s, n);
    }
};

} // namespace

#endif
