/* decode_copies.cuh: TMA loads the tiles of sm80/decode.cuh on Hopper, for keys and values in pages. sm80/decode.cuh
 * defines what is computed in which order, so results have the same bits as with copies_by_threads.
 *
 * A slot is a buffer for one tile of K or V, with two barriers. A box is what one load of TMA brings: 128 bytes of each
 * of several rows of one page.
 *
 *   full[slot]    One lane arrives and announces how many bytes will come. The barrier completes when they have come.
 *   empty[slot]   Each warp arrives when it has read the tile. The barrier completes when all warps have read it.
 *
 * The tiles of K and of V are numbered together; step s loads tile s. Step s begins when all warps have read tile s -
 * SLOTS, which was in the same slot. The warps take turns to issue the loads of a step, and only the warp whose turn it
 * is waits for the other warps.
 *
 * The swizzle of TMA is that of sm80/tile.cuh. Rows past the end of a sequence are set to zero in shared memory,
 * because the last page may hold any data after the sequence's last key. */
#ifndef ATTN_SM90_DECODE_COPIES_CUH
#define ATTN_SM90_DECODE_COPIES_CUH

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm80/decode.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

namespace {

/* number of rows after which the swizzle repeats; a box (one load of TMA) has at least this many rows */
enum { LEAST_BOX = 8 };
enum { MOST_SLOTS = 12 };

/* Where a box (one load of TMA) starts: its page, and the row within the page. */
struct box_place {
    int row, page;
};

struct copy_plan {
    CUtensorMap K, V;
    /* box: rows that one load of TMA brings, a power of two; box_shift: log2 of box */
    int box, box_shift;
};

struct ring_barriers {
    uint64_t full[MOST_SLOTS], empty[MOST_SLOTS];
};

template <class X> struct shared_with_boxes : shared<X> {
    /* the largest number of keys that split_keys() gives to a split */
    static const int MOST_KEYS = X::WM == 4 ? 2048 : X::FLOAT8 ? (int)MOST_FLOAT8 : 1024;
    box_place boxes[MOST_KEYS / LEAST_BOX];
};

template <typename T, class X> struct copies_by_engine {
    typedef shared_with_boxes<X> memory;
    /* CHUNK: width of a chunk (128 bytes of a row, or the whole row) in 16-bit words */
    static const int SLOTS = X::SLOTS, CHUNK = X::WIDTH < 64 ? X::WIDTH : 64;
    enum { FEW_ADDRESSES = 1 };
    static_assert(SLOTS <= MOST_SLOTS && X::BN * CHUNK * 2 % 1024 == 0 && X::BM * X::D * 2 % 1024 == 0,
                  "tiles begin where the swizzle does");
    struct kept {
        const copy_plan &copies;
        ring_barriers &bars;
        int slot;
        uint32_t phase;
    };
    kept &at;
    memory &sm;
    const cuda_args &a;
    const int b, hk, Sk;
    const split_place keys;
    int filled; /* number of steps (tiles of K or V) whose loads were issued */

    DEVICE copies_by_engine(kept &kept_, memory &sm_, const cuda_args &a_, const head_args &x, const split_place &keys_)
        : at(kept_), sm(sm_), a(a_), b((int)x.b), hk((int)x.hk), Sk((int)x.s.Sk), keys(keys_)
    {
        if (threadIdx.x / 32 == (X::FEW ? WARPS - 1 : 0)) find_boxes();
    }

    DEVICE box_place box_of(int key) const
    {
        const uint32_t page_size = (uint32_t)a.g.dims.page_size, page = (uint32_t)key / page_size;
        return { (int)((uint32_t)key - page * page_size), a.g.page_table[b * a.g.page_table_row + page] };
    }

    /* Looks up where the box of each load starts. One warp calls this. It reads no entry of the page table past the
     * last key's. */
    DEVICE void find_boxes() const
    {
        /* one past the last key to load */
        const int end = min(Sk, (keys.tiles + keys.steps / 2) * X::BN);
        for (int n = threadIdx.x % 32, key = keys.first + n * at.copies.box; key < end;
             n += 32, key += 32 * at.copies.box)
            sm.boxes[n] = box_of(key);
        __syncwarp();
    }

    /* Issues the loads of step number `step` (a tile of K or of V) into buffer `slot`, which must be free. One warp
     * calls this. FIRST: find_boxes() has not run yet. */
    template <bool FIRST = false> DEVICE void fill(int step, int slot) const
    {
        /* COLUMNS: width of a chunk (128 bytes of a row, or the whole row) in elements of the tensor */
        const int CHUNKS = X::WIDTH / CHUNK, COLUMNS = X::FLOAT8 ? CHUNK * 2 : CHUNK;
        static_assert(X::BN / LEAST_BOX * CHUNKS <= 32, "a box per lane");
        const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, row = lane / CHUNKS << at.copies.box_shift;
        const int key = (keys.tiles + step / 2) * X::BN, box = at.copies.box;
        const int rows = min(X::BN, (Sk - key + box - 1) & -box);
        const uint32_t bar = smem_addr(&at.bars.full[slot]);
        if (lane == 0) mbarrier_arrive_expect_tx(bar, (uint32_t)rows * (X::WIDTH * 2));
        __syncwarp();
        if (row < rows) {
            const box_place from = FIRST ? box_of(key + row)
                                         : sm.boxes[(key + row - keys.first) >> at.copies.box_shift];
            tma_load_4d(smem_addr(sm.tile.ring[slot]) + (chunk * X::BN + row) * (CHUNK * 2),
                        step % 2 ? &at.copies.V : &at.copies.K, chunk * COLUMNS, from.row, hk, from.page, bar,
                        evict_first());
        }
        __syncwarp();
    }

    template <class F> DEVICE void begin(F queries)
    {
        filled = keys.steps < SLOTS ? keys.steps : SLOTS;
        if constexpr (X::FEW) {
            const int warp = threadIdx.x / 32, slot = at.slot + warp;
            static_assert(SLOTS == WARPS, "all slots");
            if (warp < filled) fill<true>(warp, slot >= SLOTS ? slot - SLOTS : slot);
        } else if (threadIdx.x < 32)
#pragma unroll 1
            for (int step = 0, slot = at.slot; step < filled; step++) {
                fill(step, slot);
                slot = slot + 1 == SLOTS ? 0 : slot + 1;
            }
        queries();
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads(); /* all warps now see Q, the initialised barriers and the results of find_boxes() */
    }

    template <bool VALUES> DEVICE uint16_t *next() const
    {
        mbarrier_wait(smem_addr(&at.bars.full[at.slot]), at.phase);
        return sm.tile.ring[at.slot];
    }

    DEVICE void clear_tail(uint16_t *tile, int j) const
    {
        /* number of rows of tile j before the sequence's end; whole rows are cleared, so the swizzle within a row does
         * not matter */
        const int rows = Sk - j * X::BN, PIECES = CHUNK / 8;
        if (rows >= X::BN) return;
#pragma unroll 1
        for (int n = threadIdx.x; n < X::BN * X::WIDTH / 8; n += X::THREADS)
            if (n / PIECES % X::BN >= rows) *(uint4 *)(tile + n * 8) = make_uint4(0, 0, 0, 0);
        changed();
        __syncthreads();
    }

    DEVICE void changed() const
    {
        fence_proxy_async_shared();
    }

    DEVICE void release()
    {
        const uint32_t empty = smem_addr(&at.bars.empty[at.slot]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
        if (filled < keys.steps) {
            if (threadIdx.x / 32 == filled % (X::THREADS / 32)) {
                mbarrier_wait(empty, at.phase);
                fill(filled, at.slot);
            }
            filled++;
        }
        if (++at.slot == SLOTS) at.slot = 0, at.phase ^= 1;
    }

    DEVICE void end() const
    {
        __syncthreads();
    }
};

/* Offset of the barriers in dynamic shared memory, after the tiles of a split. */
template <typename T, int D, keys_as AS>
constexpr size_t barriers_at = shared_bytes<T, D, false, AS, copies_by_engine>();

template <int SLOTS = MOST_SLOTS> DEVICE void make_ready(const copy_plan &copies, ring_barriers &bars, int warps)
{
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&copies.K);
    prefetch_tensormap(&copies.V);
    for (int s = 0; s < SLOTS; s++) {
        mbarrier_init(smem_addr(&bars.full[s]), 1);
        mbarrier_init(smem_addr(&bars.empty[s]), warps);
    }
    fence_mbarrier_init();
}

/* Does the work of decode_splits() (sm80/decode_launch.cuh) with tiles that TMA loads. */
template <typename T, int D, keys_as AS>
__global__ void __launch_bounds__(threads_of<D>, (blocks_of<D, false>))
    decode_splits_by_engine(const __grid_constant__ copy_plan copies, const __grid_constant__ cuda_args a,
                            const __grid_constant__ plan p)
{
    static_assert(((barriers_at<T, D, AS> + sizeof(ring_barriers) + 1023) / 1024 + 1) * (blocks_of<D, false>) <= 228,
                  "KB of a multiprocessor, of which each block takes one more");
    extern __shared__ __align__(1024) char memory[];
    ring_barriers &bars = *(ring_barriers *)(memory + barriers_at<T, D, AS>);
    make_ready(copies, bars, threads_of<D> / 32);
    typename copies_by_engine<T, shape<D, false, false, true, AS>>::kept narrow = { copies, bars, 0, 0 };
    typename copies_by_engine<T, many_rows_shape<D, false, true, AS>>::kept wide = { copies, bars, 0, 0 };
    walk_splits<T, D, false, true, AS, copies_by_engine>(a, p, memory, narrow, wide);
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

/* Describes K or V for TMA. Returns false if TMA cannot load a tensor with these strides, or if the tensor is empty. */
inline bool walkable_as(tma_tensor *to, const attn_view &view, const attn_dims &d, int64_t columns)
{
    const int64_t B = d.pages, rows = d.page_size;
    const bool bytes = view.dtype == ATTN_F8E4M3;
    *to = bytes ? tma_bytes_of(view.data, B, d.Hk, rows, columns, view.batch, view.head, view.row)
                : tma_tensor_of(view, B, d.Hk, rows, columns);
    return B > 0 && rows > 0 && tma_walkable(view, B, d.Hk, rows, columns, bytes ? 16 : 8);
}

/* Makes the tensor maps of K and V. Returns false if TMA cannot load K and V, if it shall not
 * (chip->copies_by_threads), or if there is no kernel for the problem. tile: the least number of keys per tile.
 * row_bytes: the bytes of a row of a tile in shared memory. */
inline bool plan_copies(copy_plan *copies, const cuda_chip *chip, const attn_plan *of, const cuda_args &a, int tile,
                        int row_bytes)
{
    const attn_problem &problem = *of->problem;
    const attn_dims &d = a.g.dims;
    const bool float8 = decode_has_float8_form(of) && attn_max64(d.D, d.Dv) <= TILE_HEAD_DIM;
    tma_tensor K, V;
    if (chip->major != 9 || chip->minor != 0 || chip->copies_by_threads || (has_options(of) && !float8)) return false;
    if (problem.k.dtype != problem.v.dtype || (!float8 && problem.k.dtype != problem.q.dtype)) return false;
    if (d.page_size == 0 || d.page_size % LEAST_BOX || !walkable_as(&K, a.g.view[ATTN_T_k], d, d.D) ||
        !walkable_as(&V, a.g.view[ATTN_T_v], d, d.Dv))
        return false;
    /* One load must lie within one page and one tile, so its number of rows is a power of two that divides both. */
    const int box_bytes = row_bytes < 128 ? row_bytes : 128;
    copies->box = (int)attn_min64(d.page_size & -d.page_size, tile);
    copies->box_shift = 0;
    while (1 << copies->box_shift < copies->box) copies->box_shift++;
    /* With an L2 promotion of 256 bytes, the L2 cache would fetch each 128 bytes of a row twice, and the kernel would
     * be 3 to 9 % slower (README.md). */
    const CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    return tma_map(&copies->K, K, copies->box, box_bytes, promotion) &&
           tma_map(&copies->V, V, copies->box, box_bytes, promotion);
}

template <typename T, int D, keys_as AS>
cudaError_t launch_splits(const copy_plan &copies, const cuda_args &a, const plan &p, int64_t blocks,
                          cudaStream_t stream)
{
    const size_t bytes = barriers_at<T, D, AS> + sizeof(ring_barriers);
    const cudaError_t code = allow_shared<decode_splits_by_engine<T, D, AS>>(bytes);
    if (code != cudaSuccess) return code;
    return launch_dependent(decode_splits_by_engine<T, D, AS>, blocks, threads_of<D>, bytes, stream, copies, a, p);
}

} // namespace

#endif
