/* decode_copies.cuh: TMA loads the tiles of sm80/decode.cuh on Hopper, for keys and values in pages. Threads copy keys
 * without pages (copies_by_threads): this is as fast as TMA, and 1 to 2 % faster where memory bandwidth is the limit.
 * sm80/decode.cuh defines what is computed and in which order. Therefore the bits of a result do not depend on whether
 * threads or TMA copy.
 *
 * A box is what one load of TMA brings. A warp requests the boxes of a tile, one box per lane: a box for every 128
 * bytes of channels, and for every page where pages are smaller than a tile. Before the first box is requested, one
 * warp looks up the page and row of each box of the whole split. Therefore no request waits for the page table.
 *
 * A slot is a buffer for one tile. It has two barriers:
 *
 *   full[slot]    One lane arrives and announces how many bytes will come. The barrier completes when they have come.
 *   empty[slot]   Each warp arrives when it has read the tile. The barrier completes when all warps have read it.
 *
 * A step of a split is one tile of K or of V. Steps use the slots in turn. The first step of a split uses the slot
 * after the last one that the previous split used. At the beginning of a split all slots are free, and the first warp
 * requests the first SLOTS steps. (With few rows each warp requests one step, and looks up its boxes itself.) Step s is
 * requested when step s - SLOTS has been read. The warps take turns to request a step, and the warp whose turn it is
 * waits for the other warps. The barriers of a slot therefore complete once per use, in the order of the steps, and no
 * warp uses a slot again before all warps have seen its last phase. Therefore the parity of a phase is enough to wait
 * for it.
 *
 * There is no deadlock, because no warp waits for a later step. At step s a warp waits for full[s]. Step s was
 * requested at the beginning of the split, or by the warp whose turn it was, at the end of step s - SLOTS. That warp
 * waits until the other warps have reached the end of step s - SLOTS. Until then the other warps wait only for steps up
 * to s - SLOTS. A split ends when all requested tiles have arrived and been read, and all warps of the block wait for
 * that. A block without rows or without a split ends before it has requested anything. A split without keys requests
 * nothing.
 *
 * A warp waits for other warps only when it is its turn to request a step. A separate warp for loads would save this
 * wait, but a fifth warp would leave too few registers per thread (README.md). Where memory is the bound, the four
 * warps wait for the same tile anyway.
 *
 * A tile's chunks of 128 bytes of channels lie one after the other, as TMA swizzles them. For rows of 128 bytes this is
 * the swizzle of sm80/tile.cuh. For rows of 64 bytes (float8 with head sizes up to 64) it is the swizzle that
 * sm80/tile.cuh has for rows of 32 elements. Rows past the tensor arrive as zeros. The last page of a sequence may have
 * rows past the sequence's end, which may hold anything. Boxes that lie wholly past the end are not requested. All rows
 * past the end are set to zero in shared memory. */
#ifndef ATTN_SM90_DECODE_COPIES_CUH
#define ATTN_SM90_DECODE_COPIES_CUH

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm80/decode.cuh"
#include "kernels/cuda/sm90/layer/tma.cuh"

namespace {

/* number of rows after which the swizzle repeats; a box (one load of TMA) has at least this many rows */
enum { LEAST_BOX = 8 };
enum { MOST_SLOTS = 12 }; /* the largest number of slots (buffers for a tile) in the ring of any shape */

/* Where a box (one load of TMA) starts: the number of its page, and the row within the page. */
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
    int filled; /* number of steps whose loads were issued; a step is a tile of K or of V */

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

    /* Looks up where each box (one load of TMA) of the split starts. One warp calls this function. It reads no entry of
     * the page table past the last key's. */
    DEVICE void find_boxes() const
    {
        /* one past the last key to load: the end of the split's last tile, or of the sequence if the sequence ends
         * first */
        const int end = min(Sk, (keys.tiles + keys.steps / 2) * X::BN);
        for (int n = threadIdx.x % 32, key = keys.first + n * at.copies.box; key < end;
             n += 32, key += 32 * at.copies.box)
            sm.boxes[n] = box_of(key);
        __syncwarp();
    }

    /* Issues the loads of a step's tile into `slot`, which must be free. One warp calls this function. It leaves out
     * boxes (single loads) past the sequence's end. With FIRST it looks up where the boxes start; without FIRST,
     * find_boxes() has done so. */
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
        /* request the first tiles: as many as there are slots (buffers); a split without keys has no step (tile to
         * load) */
        filled = keys.steps < SLOTS ? keys.steps : SLOTS;
        if constexpr (X::FEW) { /* in blocks of few rows, each of the four warps loads the tile of one slot (buffer) */
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
        __syncthreads(); /* after this barrier all warps see Q, the initialised barriers and the starts of the boxes */
    }

    template <bool VALUES> DEVICE uint16_t *next() const
    {
        mbarrier_wait(smem_addr(&at.bars.full[at.slot]), at.phase);
        return sm.tile.ring[at.slot];
    }

    DEVICE void clear_tail(uint16_t *tile, int j) const
    {
        /* rows: number of rows of tile j before the sequence's end; PIECES: pieces of 16 bytes per row of a chunk.
         * Whole rows are cleared, so the swizzle, which moves pieces only within a row, does not matter */
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

/* Offset of the barriers in dynamic shared memory. The barriers follow the memory for the tiles of a split. */
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

/* The kernel decode_splits() of sm80/decode_launch.cuh, with tiles that TMA loads. */
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

/* Fills *to with the description of K or V that TMA (the copy engine of Hopper GPUs) needs. Returns false if TMA cannot
 * load a tensor with these strides, or if the tensor is empty. */
inline bool walkable_as(tma_tensor *to, const attn_view &view, const attn_dims &d, int64_t columns)
{
    const int64_t B = d.pages, rows = d.page_size;
    const bool bytes = view.dtype == ATTN_F8E4M3;
    *to = bytes ? tma_bytes_of(view.data, B, d.Hk, rows, columns, view.batch, view.head, view.row)
                : tma_tensor_of(view, B, d.Hk, rows, columns);
    return B > 0 && rows > 0 && tma_walkable(view, B, d.Hk, rows, columns, bytes ? 16 : 8);
}

/* Makes the tensor maps of keys and values. Returns false if TMA cannot or shall not load them (for example keys
 * without pages), or if decode_by_engine() of sm80/decode.h has no kernel for the problem (head sizes above 256 have
 * none for float8 keys). tile: the least number of keys per tile, over all shapes. row_bytes: the bytes of a row of a
 * tile in shared memory. */
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
    /* a box (one load of TMA) must lie within one page and one tile, so its number of rows divides those of a page and
     * of a tile */
    const int box_bytes = row_bytes < 128 ? row_bytes : 128;
    copies->box = (int)attn_min64(d.page_size & -d.page_size, tile);
    copies->box_shift = 0;
    while (1 << copies->box_shift < copies->box) copies->box_shift++;
    /* `promotion` is how many bytes the L2 fetches from memory at a time. With 256, each 128 bytes of a row would be
     * fetched twice, and the kernel would take a tenth longer. */
    const CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    return tma_map(&copies->K, K, copies->box, box_bytes, promotion) &&
           tma_map(&copies->V, V, copies->box, box_bytes, promotion);
}

/* Launches the kernel decode_splits_by_engine(), which computes splits. */
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
