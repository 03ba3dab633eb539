/* decode.cu: computes the splits of sm80/decode.cu (parts of a sequence's keys) on Hopper, with tiles that TMA loads
 * (decode_copies.cuh). */
#include "decode_copies.cuh"

namespace {

/* The shape of decode_stacks(), which computes together the sequences that share keys. It has as many slots (buffers
 * for tiles) as shared memory allows. */
template <int D> struct tall_shape : stack_shape<D> {
    static const int BLOCKS = D == 256 ? 1 : 2, SLOTS = D == 64 ? 6 : D == 128 ? 5 : 8;
};

/* Does the work of decode_stacks() (sm80/decode.cu) with tiles that TMA loads: computes the splits that several
 * sequences share. */
template <typename T, int D>
__global__ void __launch_bounds__(tall_shape<D>::THREADS, tall_shape<D>::BLOCKS)
    decode_stacks_by_engine(const __grid_constant__ copy_plan copies, const __grid_constant__ cuda_args a,
                            const __grid_constant__ plan p)
{
    typedef tall_shape<D> X;
    static_assert(((sizeof(shared_with_boxes<X>) + sizeof(ring_barriers) + 1023) / 1024 + 1) * X::BLOCKS <= 228,
                  "KB of a multiprocessor, of which each block takes one more");
    extern __shared__ __align__(1024) char memory[];
    ring_barriers &bars = *(ring_barriers *)(memory + sizeof(shared_with_boxes<X>));
    make_ready(copies, bars, X::THREADS / 32);
    wait_for_prerequisites();
    typename copies_by_engine<T, X>::kept kept = { copies, bars, 0, 0 };
    walk_stack<T, X, copies_by_engine>(a, p, memory, kept);
}

template <typename T, int D, keys_as AS> using few_ring = copies_by_engine<T, few_shape<D, true, AS>>;
template <typename T, int D, keys_as AS>
constexpr size_t few_bytes = sizeof(typename few_ring<T, D, AS>::memory) + sizeof(ring_barriers);

template <typename T, int D, keys_as AS>
__global__ void __launch_bounds__(THREADS, (blocks_of<D, false>))
    decode_few_by_engine(const __grid_constant__ copy_plan copies, const __grid_constant__ cuda_args a,
                         const __grid_constant__ plan p)
{
    typedef few_ring<T, D, AS> ring;
    static_assert(((few_bytes<T, D, AS> + 1023) / 1024 + 1) * (blocks_of<D, false>) <= 228,
                  "KB of a multiprocessor, of which each block takes one more");
    extern __shared__ __align__(1024) char memory[];
    ring_barriers &bars = *(ring_barriers *)(memory + sizeof(typename ring::memory));
    make_ready<ring::SLOTS>(copies, bars, WARPS);
    __syncthreads(); /* every warp now sees the initialised barriers, so each may request a tile */
    typename ring::kept kept = { copies, bars, 0, 0 };
    walk_few<T, D, true, AS, copies_by_engine>(a, p, memory, kept);
}

/* ---- Functions of the host that launch the kernels --------------------------------------------------------------- */

template <typename T, int D, keys_as AS>
cudaError_t launch(copy_plan &copies, const cuda_args &a, const plan &p, int64_t blocks, cudaStream_t stream)
{
    cudaError_t code = cudaSuccess;
    if constexpr (AS == KEYS_AS_T)
        if (p.stack) {
            typedef tall_shape<D> X;
            const size_t tall = sizeof(shared_with_boxes<X>) + sizeof(ring_barriers);
            code = allow_shared<decode_stacks_by_engine<T, D>>(tall);
            if (code == cudaSuccess)
                code = launch_dependent(decode_stacks_by_engine<T, D>, blocks_of_stacks(a.g.dims, p), X::THREADS, tall,
                                        stream, copies, a, p);
        }
    return code == cudaSuccess ? launch_splits<T, D, AS>(copies, a, p, blocks, stream) : code;
}

template <typename T, int D, keys_as AS>
cudaError_t launch_few(copy_plan &copies, const cuda_args &a, const plan &p, int64_t blocks, cudaStream_t stream)
{
    const cudaError_t code = allow_shared<decode_few_by_engine<T, D, AS>>(few_bytes<T, D, AS>);
    if (code != cudaSuccess) return code;
    return launch_kernel(true, decode_few_by_engine<T, D, AS>, grid_of_splits(a.g.dims, p, blocks), THREADS,
                         few_bytes<T, D, AS>, stream, copies, a, p);
}

template <typename T, keys_as AS>
cudaError_t launch_for(copy_plan &copies, const cuda_args &a, const plan &p, int D, int64_t blocks, cudaStream_t stream)
{
    return p.few      ? launch_few<T, 128, AS>(copies, a, p, blocks, stream)
           : D == 64  ? launch<T, 64, AS>(copies, a, p, blocks, stream)
           : D == 128 ? launch<T, 128, AS>(copies, a, p, blocks, stream)
                      : launch<T, 256, AS>(copies, a, p, blocks, stream);
}

} // namespace

bool decode_by_engine(const cuda_chip *chip, cudaStream_t stream, const attn_plan *of, const cuda_args &a,
                      const decode_plan &p, int64_t blocks, cudaError_t *code)
{
    const attn_dims &d = a.g.dims;
    const int64_t widest = attn_max64(d.D, d.Dv);
    const int D = widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
    const bool float8 = decode_has_float8_form(of), bf16 = of->problem->q.dtype == ATTN_BF16;
    copy_plan copies;
    if (!plan_copies(&copies, chip, of, a, D == 256 ? 32 : 64, float8 ? D : D * 2)) return false;
    if (float8)
        *code = bf16 ? launch_for<__nv_bfloat16, KEYS_AS_FLOAT8>(copies, a, p, D, blocks, stream)
                     : launch_for<compiled_half, KEYS_AS_FLOAT8>(copies, a, p, D, blocks, stream);
    else
        *code = bf16 ? launch_for<__nv_bfloat16, KEYS_AS_T>(copies, a, p, D, blocks, stream)
                     : launch_for<compiled_half, KEYS_AS_T>(copies, a, p, D, blocks, stream);
    return true;
}
