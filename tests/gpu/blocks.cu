/* blocks.cu: tests that a GPU does what the building blocks of the kernels rely on. The checks find out where TMA and
 * its swizzle put an element, which accumulator holds an element of a product, and in which order an operand needs its
 * keys. They also find out whether the phases of mbarriers keep a ring of stages in order. The checks in this file use
 * the kernels' own functions of sm90, and those in blocks_sm80.cu use the functions of sm80.
 *
 *   build/tests/gpu/blocks [SECTION]      all checks, or those of one section (the table at the end)
 *
 * Inputs are random integers. They are so small that every product and sum is exact, and results are compared with ==.
 * Whatever must be overwritten is first set to NaN. A ring that is stuck would wait for ever, so the program ends
 * after HANG_SECONDS. Without a GPU of compute capability 9.0 nothing runs; `make emulate` runs the program on the
 * emulator. */
#include <unistd.h>

#include "kernels/cuda/sm90/layer/epilogue.cuh"
#include "kernels/cuda/sm90/layer/pipeline.cuh"
#include "kernels/cuda/sm90/layer/products.cuh"
#include "kernels/cuda/sm90/layer/scheduler.cuh"
#include "tests/gpu/blocks.cuh"

template <> struct stored<e4m3> {
    typedef uint8_t bits;
    static bits of(float x) { return attn_e4m3_from_f32(x); }
};

namespace {

enum { HANG_SECONDS = 300 };

/* ---- Tests of tensor maps ---------------------------------------------------------------------------------------- */

/* A dense tensor [B, rows, H, columns]. map_of() makes its TMA tensor map as the launchers of forward.cu and
 * f8_forward.cu do. */
struct tensor {
    const void *data;
    int element; /* bytes */
    int64_t B, rows, H, columns;
};
CUtensorMap map_of(const tensor &t, int box_rows)
{
    CUtensorMap map;
    tma_tensor x = tma_bytes_of(t.data, t.B, t.H, t.rows, t.columns, t.rows * t.H * t.columns, t.columns,
                                t.H * t.columns);
    if (t.element == 2) x.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x.element = 2;
    if (!tma_map(&map, x, box_rows)) must(cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
    return map;
}
template <class T> CUtensorMap map_of(const array<T> &x, int rows, int columns, int box_rows)
{
    return map_of(tensor{ x.device, (int)sizeof(T), 1, rows, 1, columns }, box_rows);
}

/* Returns the offset of byte b of row r in a swizzled tile with rows of 128 bytes. */
int swizzled(int r, int b)
{
    return r * 128 + ((b / 16 ^ r % 8) * 16) + b % 16;
}

/* ---- Tests of TMA: boxes, swizzle, elements outside the tensor --------------------------------------------------- */

struct place {
    int column, row, head, batch;
};

/* Loads `chunks` adjacent TMA boxes into shared memory, and copies them to `out`. */
__global__ void load_boxes(const __grid_constant__ CUtensorMap map, place from, int chunks, int chunk_columns,
                           int chunk_bytes, uint4 *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint4 *const tile = (uint4 *)memory;
    const int bytes = chunks * chunk_bytes;
    const uint32_t full = smem_addr(memory + bytes);
    for (int n = threadIdx.x; n < bytes / 16; n += blockDim.x) tile[n] = make_uint4(~0u, ~0u, ~0u, ~0u);
    fence_proxy_async_shared();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map);
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, bytes);
        for (int c = 0; c < chunks; c++)
            tma_load_4d(smem_addr(memory) + c * chunk_bytes, &map, from.column + c * chunk_columns, from.row, from.head,
                        from.batch, full);
    }
    mbarrier_wait(full, 0);
    for (int n = threadIdx.x; n < bytes / 16; n += blockDim.x) out[n] = tile[n];
}

/* Stores `chunks` adjacent TMA boxes. TMA must drop the elements that lie outside the tensor. */
__global__ void store_boxes(const __grid_constant__ CUtensorMap map, place to, int chunks, int chunk_columns,
                            int chunk_bytes, const uint4 *from)
{
    extern __shared__ __align__(1024) char memory[];
    for (int n = threadIdx.x; n < chunks * chunk_bytes / 16; n += blockDim.x) ((uint4 *)memory)[n] = from[n];
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int c = 0; c < chunks; c++)
            tma_store_4d(&map, to.column + c * chunk_columns, to.row, to.head, to.batch,
                         smem_addr(memory) + c * chunk_bytes);
        bulk_commit();
        bulk_wait_read<0>();
    }
}

enum { TMA_B = 2, TMA_S = 40, TMA_H = 3, TMA_ROWS = 32 };

/* clang-format off */
const struct tma_case {
    const char *name;
    int element, columns, chunks, row, head, batch;
} tma_cases[] = {
    { "16 bits, two chunks inside",           2, 128, 2,  3, 1, 1 },
    { "16 bits, past the last row",           2, 128, 2, 24, 2, 0 },
    { "16 bits, no row of the box exists",    2, 128, 2, 64, 1, 1 },
    { "16 bits, columns end inside a chunk",  2,  72, 2,  8, 0, 1 },
    { "16 bits, a chunk past the columns",    2,  64, 2, 24, 2, 1 },
    { "8 bits, two chunks inside",            1, 256, 2,  3, 1, 1 },
    { "8 bits, columns end inside a chunk",   1,  80, 1, 24, 2, 0 },
    { "8 bits, a chunk past the columns",     1, 128, 2, 16, 0, 1 },
};
/* clang-format on */

/* Returns which byte of the tensor is byte b of row r of TMA box c, or -1 if there is none. A box has 128 bytes in each
 * row. */
int64_t source_of(const tma_case &x, int c, int r, int b)
{
    const int column = (c * 128 + b) / x.element, row = x.row + r;
    if (row >= TMA_S || column >= x.columns) return -1;
    return (((int64_t)x.batch * TMA_S + row) * TMA_H + x.head) * x.columns * x.element + c * 128 + b;
}

void check_tma()
{
    const int chunk_bytes = TMA_ROWS * 128;
    for (const tma_case &x : tma_cases) {
        const size_t bytes = (size_t)TMA_B * TMA_S * TMA_H * x.columns * x.element;
        const int tile_bytes = x.chunks * chunk_bytes, columns = 128 / x.element;
        const place at = { 0, x.row, x.head, x.batch };
        std::vector<uint8_t> data(bytes), expected(tile_bytes);
        /* The bytes are neither 0, which TMA writes for missing elements, nor 0xff, with which shared memory is filled
         * first. */
        for (uint8_t &b : data) b = (uint8_t)(1 + random_bits() % 254);
        array<uint8_t> source(data), out(tile_bytes);
        const CUtensorMap from = map_of(tensor{ source.device, x.element, TMA_B, TMA_S, TMA_H, x.columns }, TMA_ROWS);
        load_boxes<<<1, 128, tile_bytes + 8>>>(from, at, x.chunks, columns, chunk_bytes, (uint4 *)out.device);
        finish("load_boxes");
        for (int c = 0; c < x.chunks; c++)
            for (int r = 0; r < TMA_ROWS; r++)
                for (int b = 0; b < 128; b++) {
                    const int64_t n = source_of(x, c, r, b);
                    expected[c * chunk_bytes + swizzled(r, b)] = n < 0 ? 0 : data[n];
                }
        char name[120];
        snprintf(name, sizeof name, "TMA load: %s", x.name);
        judge(name, compare(out.fetch(), expected));

        array<uint8_t> back(bytes);
        const CUtensorMap to = map_of(tensor{ back.device, x.element, TMA_B, TMA_S, TMA_H, x.columns }, TMA_ROWS);
        for (uint8_t &b : expected) b = (uint8_t)(1 + random_bits() % 254);
        array<uint8_t> tile(expected);
        store_boxes<<<1, 128, tile_bytes>>>(to, at, x.chunks, columns, chunk_bytes, (const uint4 *)tile.device);
        finish("store_boxes");
        std::vector<uint8_t> all(bytes, 0xff);
        for (int c = 0; c < x.chunks; c++)
            for (int r = 0; r < TMA_ROWS; r++)
                for (int b = 0; b < 128; b++)
                    if (const int64_t n = source_of(x, c, r, b); n >= 0)
                        all[n] = expected[c * chunk_bytes + swizzled(r, b)];
        snprintf(name, sizeof name, "TMA store: %s", x.name);
        judge(name, compare(back.fetch(), all));
    }
}

/* ---- Tests of wgmma with 16-bit numbers: S = Q K^T, P in registers, O += P V ------------------------------------- */

/* row_of() and column_of() return the position of this thread's register i in a 64 x N accumulator (see wgmma in
 * ptx.cuh). */
DEVICE int row_of(int i)
{
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
DEVICE int column_of(int i)
{
    return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

template <int N> DEVICE void write_accumulators(float *to, const float (&d)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[row_of(i) * N + column_of(i)] = d[i];
}

/* poison() fills accumulators with NaN, which a product must overwrite. begin_sums() fills them with integers, to which
 * a product must add. */
template <int N> DEVICE void poison(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = CUDART_NAN_F;
}
template <int N> DEVICE void begin_sums(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = (float)(column_of(i) - row_of(i));
}
float begun(int row, int column)
{
    return (float)(column - row);
}

/* Sizes of a tile: head dimension D of q and k, BN keys, head dimension DV of v. */
template <int D_, int BN_, int DV_> struct shape {
    static const int D = D_, BN = BN_, DV = DV_, CHUNKS = (D + 63) / 64, CHUNKS_V = (DV + 63) / 64;
};
template <class X> struct shared {
    alignas(1024) uint16_t Q[64 * 64 * X::CHUNKS];
    alignas(1024) uint16_t K[X::BN * 64 * X::CHUNKS];
    alignas(1024) uint16_t V[X::BN * 64 * X::CHUNKS_V];
    alignas(8) uint64_t full;
};

/* Computes attention without the softmax: S = Q K^T and O += S V. */
template <typename T, class X>
__global__ void __launch_bounds__(128)
    attend(const __grid_constant__ CUtensorMap map_Q, const __grid_constant__ CUtensorMap map_K,
           const __grid_constant__ CUtensorMap map_V, float *S_out, float *O_out)
{
    extern __shared__ __align__(1024) char memory[];
    shared<X> &sm = *reinterpret_cast<shared<X> *>(memory);
    const uint32_t full = smem_addr(&sm.full), Q = smem_addr(sm.Q), K = smem_addr(sm.K), V = smem_addr(sm.V);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 3);
        fence_mbarrier_init();
        load_tile<64, X::CHUNKS, 64>(Q, &map_Q, {}, full);
        load_tile<X::BN, X::CHUNKS, 64>(K, &map_K, {}, full);
        load_tile<X::BN, X::CHUNKS_V, 64>(V, &map_V, {}, full);
    }
    __syncthreads();
    mbarrier_wait(full, 0);

    float S[X::BN / 2], O[X::DV / 2];
    uint32_t P[X::BN / 16][4];
    poison(S);
    multiply<T, X::BN, X::D / 16>(S, k_major<64>{ Q }, k_major<X::BN>{ K });
    wgmma_wait<0>();
    opaque(S);
    write_accumulators<X::BN>(S_out, S);
    to_operand<T, X::BN>(P, S);
    begin_sums(O);
    multiply_add<T, X::DV, X::BN / 16>(O, P, mn_major<X::BN>{ V });
    wgmma_wait<0>();
    opaque(O);
    write_accumulators<X::DV>(O_out, O);
}

template <typename T, class X> void check_attend()
{
    const int D = X::D, BN = X::BN, DV = X::DV;
    const std::vector<float> Q = random_ints(64 * D, 1), K = random_ints(BN * D, 1), V = random_ints(BN * DV, 8);
    array<uint16_t> gQ(bits_of<T>(Q)), gK(bits_of<T>(K)), gV(bits_of<T>(V));
    array<float> S(64 * BN), O(64 * DV);
    MUST((allow_shared<attend<T, X>>(sizeof(shared<X>))));
    attend<T, X><<<1, 128, sizeof(shared<X>)>>>(map_of(gQ, 64, D, 64), map_of(gK, BN, D, BN), map_of(gV, BN, DV, BN),
                                                S.device, O.device);
    finish("attend");
    const auto at = [&](const std::vector<float> &x, int columns) {
        return [&x, columns](int r, int c) { return x[r * columns + c]; };
    };
    const std::vector<float> P = multiply(64, BN, D, at(Q, D), [&](int k, int j) { return K[j * D + k]; });
    std::vector<float> expected = multiply(64, DV, BN, at(P, BN), at(V, DV));
    for (int i = 0; i < 64 * DV; i++) expected[i] += begun(i / DV, i % DV);
    char name[120];
    snprintf(name, sizeof name, "wgmma %s: S = Q K^T, %d keys, head dim %d", stored<T>::name, BN, D);
    judge(name, compare(S.fetch(), P));
    snprintf(name, sizeof name, "wgmma %s: O += P V, P from the accumulators of %d keys, head dim %d", stored<T>::name,
             BN, DV);
    judge(name, compare(O.fetch(), expected));
}

template <typename T> void check_wgmma_16()
{
    check_attend<T, shape<64, 128, 64>>();
    check_attend<T, shape<96, 128, 96>>();
    check_attend<T, shape<128, 176, 128>>();
    check_attend<T, shape<192, 112, 192>>();
    check_attend<T, shape<192, 128, 128>>();
    check_attend<T, shape<256, 64, 256>>();
    check_attend<T, shape<256, 80, 256>>();
}
void check_wgmma()
{
    check_wgmma_16<__nv_bfloat16>();
    check_wgmma_16<__half>();
}

/* ---- Tests of the backward: dS in shared memory, and sums that TMA adds ------------------------------------------ */

template <int D> struct shared_sums {
    alignas(1024) uint16_t K[64 * D];
    alignas(1024) uint16_t dS[64 * 64];
    alignas(128) float sums[64 * D];
    alignas(16) float more[64];
    alignas(8) uint64_t full;
};

/* Tests sums in global memory: adds dS K + more to `sums` twice. There are 64 queries and 64 keys. dS_transposed has
 * one row per key, and `more` has one number per query. */
template <typename T, int D>
__global__ void __launch_bounds__(128)
    add_sums(const float *dS_transposed, const __grid_constant__ CUtensorMap map_K, const float *more, float *sums)
{
    extern __shared__ __align__(1024) char memory[];
    shared_sums<D> &sm = *reinterpret_cast<shared_sums<D> *>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t full = smem_addr(&sm.full);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
        load_tile<64, D / 64, 64>(smem_addr(sm.K), &map_K, {}, full, sizeof sm.more);
        bulk_load(smem_addr(sm.more), more, sizeof sm.more, full);
    }
    float x[32], dQ[D / 2];
    uint32_t dS[4][4];
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] = dS_transposed[row_of(i) * 64 + column_of(i)];
    to_operand<T, 64>(dS, x);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int i = n * 16 + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
        stmatrix_x4_trans(smem_addr(sm.dS + i * 64 + (piece ^ (i & 7)) * 8), dS[n]);
    }
    fence_proxy_async_shared();
    __syncthreads();
    mbarrier_wait(full, 0);
    poison(dQ);
    multiply_down<T, D, 4>(dQ, k_major_low<64>(smem_addr(sm.dS)), mn_major_low<64>(smem_addr(sm.K)));
    wgmma_wait<0>();
    opaque(dQ);
#pragma unroll
    for (int i = 0; i < D / 2; i++) sm.sums[row_of(i) * D + column_of(i)] = dQ[i] + sm.more[row_of(i)];
    fence_proxy_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; n++) {
            bulk_add(sums, smem_addr(sm.sums), sizeof sm.sums);
            bulk_commit();
        }
        bulk_wait_read<0>();
    }
}

template <typename T, int D> void check_sums()
{
    const std::vector<float> dS = random_ints(64 * 64, 8), K = random_ints(64 * D, 8), more = random_ints(64, 100),
                             begin = random_ints(64 * D, 1000);
    array<uint16_t> gK(bits_of<T>(K));
    array<float> gdS(dS), gMore(more), sums(begin);
    MUST((allow_shared<add_sums<T, D>>(sizeof(shared_sums<D>))));
    add_sums<T, D><<<1, 128, sizeof(shared_sums<D>)>>>(gdS.device, map_of(gK, 64, D, 64), gMore.device, sums.device);
    finish("add_sums");
    std::vector<float> expected = multiply(
        64, D, 64, [&](int i, int j) { return dS[j * 64 + i]; }, [&](int j, int d) { return K[j * D + d]; });
    for (int n = 0; n < 64 * D; n++) expected[n] = begin[n] + 2 * (expected[n] + more[n / D]);
    char name[120];
    snprintf(name, sizeof name, "wgmma %s: dQ = dS K, dS transposed by stmatrix, added by the copy engine, head dim %d",
             stored<T>::name, D);
    judge(name, compare(sums.fetch(), expected));
}

void check_added_sums()
{
    check_sums<__nv_bfloat16, 64>();
    check_sums<__nv_bfloat16, 128>();
    check_sums<__half, 128>();
}

/* ---- Tests of attention with e4m3 tensor core products (wgmma) --------------------------------------------------- */

/* sizes of a tile: head dimension D, and BN keys */
template <int D_, int BN_> struct shape_8 {
    static const int D = D_, BN = BN_, CHUNKS = (D + 127) / 128, CHUNKS_V = (BN + 127) / 128;
};
template <class X> struct shared_8 {
    alignas(1024) uint8_t Q[64 * 128 * X::CHUNKS];
    alignas(1024) uint8_t K[X::BN * 128 * X::CHUNKS];
    alignas(1024) uint8_t V[X::D * 128 * X::CHUNKS_V]; /* V transposed: each row has one column of V for all keys */
    alignas(8) uint64_t full;
};

/* Returns which key is at position n of a row of V^T. Products of e4m3 need the keys in this order. */
int key_at(int n)
{
    return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2;
}

template <class X>
__global__ void __launch_bounds__(128)
    attend_8(const __grid_constant__ CUtensorMap map_Q, const __grid_constant__ CUtensorMap map_K,
             const __grid_constant__ CUtensorMap map_V, float *S_out, float *O_out)
{
    extern __shared__ __align__(1024) char memory[];
    shared_8<X> &sm = *reinterpret_cast<shared_8<X> *>(memory);
    const uint32_t full = smem_addr(&sm.full), Q = smem_addr(sm.Q), K = smem_addr(sm.K), V = smem_addr(sm.V);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 3);
        fence_mbarrier_init();
        load_tile<64, X::CHUNKS, 128>(Q, &map_Q, {}, full);
        load_tile<X::BN, X::CHUNKS, 128>(K, &map_K, {}, full);
        load_tile<X::D, X::CHUNKS_V, 128>(V, &map_V, {}, full);
    }
    __syncthreads();
    mbarrier_wait(full, 0);

    float S[X::BN / 2], O[X::D / 2];
    uint32_t P[X::BN / 32][4];
    poison(S);
    multiply<e4m3, X::BN, X::D / 32>(S, k_major_described<64>(Q), k_major_described<X::BN>(K));
    wgmma_wait<0>();
    opaque(S);
    write_accumulators<X::BN>(S_out, S);
    to_operand_8<X::BN>(P, S);
    begin_sums(O);
    multiply_add<e4m3, X::D, X::BN / 32>(O, P, k_major_described<X::D>(V));
    wgmma_wait<0>();
    opaque(O);
    write_accumulators<X::D>(O_out, O);
}

/* Tests P V in e4m3, where P is S rounded to e4m3. All numbers are integers, and |P V| stays below 2^13, so sums are
 * exact in the 14 bits that the tensor core keeps. */
template <class X> void check_attend_8()
{
    const int D = X::D, BN = X::BN, PITCH = X::CHUNKS_V * 128;
    const std::vector<float> Q = random_ints(64 * D, 1), K = random_ints(BN * D, 1), V = random_ints(BN * D, 4);
    std::vector<float> transposed(D * PITCH, 0);
    for (int d = 0; d < D; d++)
        for (int n = 0; n < BN; n++) transposed[d * PITCH + n] = V[key_at(n) * D + d];
    array<uint8_t> gQ(bits_of<e4m3>(Q)), gK(bits_of<e4m3>(K)), gV(bits_of<e4m3>(transposed));
    array<float> S(64 * BN), O(64 * D);
    MUST(allow_shared<attend_8<X>>(sizeof(shared_8<X>)));
    attend_8<X><<<1, 128, sizeof(shared_8<X>)>>>(map_of(gQ, 64, D, 64), map_of(gK, BN, D, BN), map_of(gV, D, PITCH, D),
                                                 S.device, O.device);
    finish("attend_8");
    const std::vector<float> exact = multiply(
        64, BN, D, [&](int i, int k) { return Q[i * D + k]; }, [&](int k, int j) { return K[j * D + k]; });
    std::vector<float> P = exact;
    for (float &x : P) x = attn_e4m3_to_f32(attn_e4m3_from_f32(x));
    std::vector<float> expected = multiply(
        64, D, BN, [&](int i, int j) { return P[i * BN + j]; }, [&](int j, int n) { return V[j * D + n]; });
    for (int i = 0; i < 64 * D; i++) expected[i] += begun(i / D, i % D);
    char name[120];
    snprintf(name, sizeof name, "wgmma e4m3: S = Q K^T, %d keys, head dim %d", BN, D);
    judge(name, compare(S.fetch(), exact));
    snprintf(name, sizeof name, "wgmma e4m3: O += P V, %d keys, head dim %d, V in P's order", BN, D);
    judge(name, compare(O.fetch(), expected));
}

/* The tensor core adds e4m3 products in steps. It truncates each addend at 2^-13 of the largest one. A product of 1
 * beside one of 2^13 must still count. */
void check_sums_of_e4m3()
{
    typedef shape_8<256, 128> X;
    const int D = X::D, BN = X::BN;
    std::vector<float> Q(64 * D), K(BN * D);
    for (std::vector<float> *x : { &Q, &K })
        for (size_t n = 0; n < x->size(); n++) (*x)[n] = n % D == 0 ? (x == &Q ? 128 : 64) : (float)(random_bits() % 2);
    array<uint8_t> gQ(bits_of<e4m3>(Q)), gK(bits_of<e4m3>(K)), gV(std::vector<uint8_t>(D * 128, 0));
    array<float> S(64 * BN), O(64 * D);
    MUST(allow_shared<attend_8<X>>(sizeof(shared_8<X>)));
    attend_8<X><<<1, 128, sizeof(shared_8<X>)>>>(map_of(gQ, 64, D, 64), map_of(gK, BN, D, BN), map_of(gV, D, 128, D),
                                                 S.device, O.device);
    finish("attend_8");
    const std::vector<float> expected = multiply(
        64, BN, D, [&](int i, int k) { return Q[i * D + k]; }, [&](int k, int j) { return K[j * D + k]; });
    judge("wgmma e4m3: 1 counts beside a sum of 2^13", compare(S.fetch(), expected));
}

void check_wgmma_8()
{
    check_attend_8<shape_8<64, 128>>();
    check_attend_8<shape_8<64, 160>>();
    check_attend_8<shape_8<128, 128>>();
    check_attend_8<shape_8<128, 96>>();
    check_attend_8<shape_8<256, 128>>();
    check_sums_of_e4m3();
}

/* ---- Tests of a ring of shared memory stages: a producer, and consumers that take turns -------------------------- */

enum { TILES = 50 };

/* One producer warpgroup and C consumer warpgroups share a ring of STAGES tiles. Each consumer multiplies BLOCKS blocks
 * of 64 rows of A by tiles of N columns. PRODUCER and CONSUMER are numbers of registers per thread. */
template <int C_, int BLOCKS_, int N_, int STAGES_, int PRODUCER_, int CONSUMER_> struct team {
    static const int C = C_, BLOCKS = BLOCKS_, N = N_, STAGES = STAGES_, PRODUCER = PRODUCER_, CONSUMER = CONSUMER_;
    static const int THREADS = 128 * (C + 1), ROWS = C * BLOCKS * 64;
};
template <class X> struct shared_ring {
    alignas(1024) uint16_t A[X::ROWS * 64];
    alignas(1024) uint16_t tiles[X::STAGES][X::N * 64];
    alignas(8) uint64_t full_A;
    barrier_pairs<X::STAGES> bars;
    int taken, turns[TILES * X::C];
};

/* Returns whether consumer warpgroup w multiplies the tile or skips it. A consumer that skips a tile still takes its
 * turn. (Attention kernels skip keys that none of a consumer's rows sees.) */
ATTN_HD bool sees(int w, int tile)
{
    return (tile * 7 + w * 3) % 5 != 0;
}

/* Each consumer warpgroup multiplies its rows of A by each transposed tile for which sees() is true, and adds up these
 * products. */
template <class X>
__global__ void __launch_bounds__(X::THREADS, 1)
    run_ring(const __grid_constant__ CUtensorMap map_A, const __grid_constant__ CUtensorMap map_tiles,
             bool slow_producer, bool slow_consumers, float *out, int *turns)
{
    const int C = X::C, N = X::N;
    extern __shared__ __align__(1024) char memory[];
    shared_ring<X> &sm = *reinterpret_cast<shared_ring<X> *>(memory);
    const int wg = warpgroup_index();
    if (threadIdx.x == 0) {
        mbarrier_init(smem_addr(&sm.full_A), 1);
        init_pairs(sm.bars, C);
        sm.taken = 0;
        fence_mbarrier_init();
    }
    __syncthreads();

    ring<X::STAGES> at;
    if (wg == 0) {
        setmaxnreg_dec<X::PRODUCER>();
        if (threadIdx.x == 0) {
            pauses slow(slow_producer);
            const uint32_t bar = smem_addr(&sm.full_A);
            mbarrier_arrive_expect_tx(bar, sizeof sm.A);
            for (int n = 0; n < X::ROWS / 64; n++)
                tma_load_4d(smem_addr(sm.A) + n * 8192, &map_A, 0, n * 64, 0, 0, bar);
#pragma unroll 1
            for (int tile = 0; tile < TILES; tile++) {
                slow.pause();
                fill_stage<N, 1, 64>(sm.bars, at, smem_addr(sm.tiles[at.stage]), &map_tiles, { 0, tile * N, 0, 0 });
                at.next();
            }
        }
    } else {
        setmaxnreg_inc<X::CONSUMER>();
        const consumer<X::C> me(wg - 1);
        pauses slow(slow_consumers);
        float sums[X::BLOCKS][N / 2];
#pragma unroll
        for (int b = 0; b < X::BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) sums[b][i] = 0;
        auto await_turn = [&] {
            me.await_turn();
            if (me.leader) {
                const int n = sm.taken;
                if (n < TILES * C) sm.turns[n] = me.w;
                sm.taken = n + 1;
            }
        };
        me.begin_turns();
        mbarrier_wait(smem_addr(&sm.full_A), 0);
#pragma unroll 1
        for (int tile = 0; tile < TILES; tile++) {
            if (!sees(me.w, tile)) {
                await_turn();
                me.next_turn();
                me.pass(sm.bars, at);
                continue;
            }
            await_full(sm.bars, at);
            await_turn();
            wgmma_fence();
#pragma unroll
            for (int b = 0; b < X::BLOCKS; b++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    wgmma<__nv_bfloat16, N>::ss(sums[b],
                                                k_major<64>{ smem_addr(sm.A) + (me.w * X::BLOCKS + b) * 8192 }.step(k),
                                                k_major<N>{ smem_addr(sm.tiles[at.stage]) }.step(k), 1);
            wgmma_commit();
            me.next_turn();
            slow.pause();
            wgmma_wait<0>();
            me.release(sm.bars, at);
            at.next();
        }
#pragma unroll
        for (int b = 0; b < X::BLOCKS; b++) {
            opaque(sums[b]);
            write_accumulators<N>(out + (me.w * X::BLOCKS + b) * 64 * N, sums[b]);
        }
        me.end_turns();
        if (me.w == 0 && me.leader)
            for (int n = 0; n < TILES * C; n++) turns[n] = sm.turns[n];
    }
}

template <class X> void check_team()
{
    static const char *const slowness[4] = { "", ", slow producer", ", slow consumers", ", both slow" };
    const int C = X::C, N = X::N, ROWS = X::ROWS;
    const std::vector<float> A = random_ints(ROWS * 64, 2), tiles = random_ints((size_t)TILES * N * 64, 4);
    array<uint16_t> gA(bits_of<__nv_bfloat16>(A)), gTiles(bits_of<__nv_bfloat16>(tiles));
    std::vector<float> expected;
    for (int w = 0; w < C; w++) {
        std::vector<float> sum(N * 64, 0);
        for (int tile = 0; tile < TILES; tile++)
            for (int n = 0; n < N * 64 && sees(w, tile); n++) sum[n] += tiles[tile * N * 64 + n];
        const std::vector<float> rows = multiply(
            X::BLOCKS * 64, N, 64, [&](int i, int k) { return A[(w * X::BLOCKS * 64 + i) * 64 + k]; },
            [&](int k, int j) { return sum[j * 64 + k]; });
        expected.insert(expected.end(), rows.begin(), rows.end());
    }
    std::vector<int> order(TILES * C);
    for (int n = 0; n < TILES * C; n++) order[n] = n % C;
    MUST(allow_shared<run_ring<X>>(sizeof(shared_ring<X>)));
    for (int slow = 0; slow < 4; slow++) {
        array<float> out(ROWS * N);
        array<int> turns(TILES * C);
        run_ring<X><<<1, X::THREADS, sizeof(shared_ring<X>)>>>(
            map_of(gA, ROWS, 64, 64), map_of(gTiles, TILES * N, 64, N), slow & 1, slow & 2, out.device, turns.device);
        finish("run_ring");
        char name[120];
        snprintf(name, sizeof name, "ring of %d stages, %d consumers, registers %d and %d%s: every tile once",
                 X::STAGES, C, X::PRODUCER, X::CONSUMER, slowness[slow]);
        judge(name, compare(out.fetch(), expected));
        snprintf(name, sizeof name, "turns of %d consumers, ring of %d stages%s", C, X::STAGES, slowness[slow]);
        judge(name, compare(turns.fetch(), order));
    }
}

void check_ring()
{
    check_team<team<2, 2, 176, 2, 40, 232>>();
    check_team<team<2, 2, 176, 3, 24, 240>>();
    check_team<team<3, 2, 128, 4, 32, 160>>();
}

/* ---- Tests of shared memory that ordinary stores fill and two mbarriers pass to readers -------------------------- */

enum { LETTERS = 200, READERS = 8 };
struct letter {
    int words[8];
};
ATTN_HD int word_of(int letter, int n)
{
    return letter * 131 + n * 17;
}

__global__ void __launch_bounds__(32 * (READERS + 1)) hand_over(bool slow_writer, bool slow_readers, uint32_t *out)
{
    struct post {
        letter x;
        uint64_t full, empty;
    };
    extern __shared__ __align__(1024) char memory[];
    post &sm = *reinterpret_cast<post *>(memory);
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        mbarrier_init(smem_addr(&sm.full), 1);
        mbarrier_init(smem_addr(&sm.empty), READERS);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        pauses slow(slow_writer);
        for (int n = 0; n < LETTERS; n++) {
            slow.pause();
            if (lane == 0) {
                for (int i = 0; i < 8; i++) sm.x.words[i] = word_of(n, i);
                mbarrier_arrive(smem_addr(&sm.full));
            }
            mbarrier_wait(smem_addr(&sm.empty), n & 1);
            /* Keeps the lanes of the warp together, so that all wait for the same phase of the mbarrier. */
            __syncwarp();
        }
        return;
    }
    pauses slow(slow_readers);
    uint32_t digest = 0;
    for (int n = 0; n < LETTERS; n++) {
        mbarrier_wait(smem_addr(&sm.full), n & 1);
        slow.pause();
        for (int i = 0; i < 8; i++) digest = digest * 31 + (uint32_t)sm.x.words[i];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_addr(&sm.empty));
    }
    out[threadIdx.x - 32] = digest;
}

void check_hand_over()
{
    uint32_t digest = 0;
    for (int n = 0; n < LETTERS; n++)
        for (int i = 0; i < 8; i++) digest = digest * 31 + (uint32_t)word_of(n, i);
    const std::vector<uint32_t> expected(READERS * 32, digest);
    for (int slow = 0; slow < 4; slow++) {
        array<uint32_t> out(READERS * 32);
        hand_over<<<1, 32 * (READERS + 1), 1024>>>(slow & 1, slow & 2, out.device);
        finish("hand_over");
        char name[120];
        snprintf(name, sizeof name, "mbarrier: ordinary stores handed to %d warps%s%s", READERS,
                 slow & 1 ? ", slow writer" : "", slow & 2 ? ", slow readers" : "");
        judge(name, compare(out.fetch(), expected));
    }
}

/* ---- Tests of the order in which thread blocks claim tiles of work ----------------------------------------------- */

__global__ void walk(const __grid_constant__ ending_order order, int2 *places)
{
    for (int t = (int)threadIdx.x; t < order.tiles; t += (int)blockDim.x) {
        const head_tile at = head_tile_of(order, t);
        places[t] = make_int2(at.head, at.tile);
    }
}

/* Thread blocks must take each tile of work exactly once. They must take the tiles of a head in ascending order, and
 * short tiles last. */
void check_order()
{
    static const struct {
        int per_head, heads, short_tiles, at_end;
        int64_t head_bytes, share;
    } cases[] = {
        { 7, 5, 0, 8, 1 << 20, 4 << 20 },      { 1, 1, 1, 264, 1, 1 },
        { 4, 37, 4, 264, 256 << 10, 4 << 20 }, { 32, 64, 32, 264, 2 << 20, 16 << 20 },
        { 9, 40, 3, 20, 1 << 20, 4 << 20 },    { 86, 16, 7, 264, 600 << 10, 16 << 20 },
        { 5, 12, 9, 7, 40 << 20, 16 << 20 },   { 6, 11, 2, 4, 3 << 20, 6 << 20 },
    };
    for (const auto &c : cases) {
        const ending_order order = ending_order_of(c.per_head, c.heads, c.head_bytes, c.short_tiles, c.at_end, c.share);
        const int tiles = c.per_head * c.heads;
        array<int2> places(tiles);
        walk<<<1, 128>>>(order, places.device);
        finish("walk");
        std::vector<int> next(c.heads, 0), in_order(tiles, 0);
        int end = 0; /* number of short tiles after the last long tile */
        const std::vector<int2> got = places.fetch();
        for (int t = 0; t < tiles; t++) {
            const bool there = got[t].x >= 0 && got[t].x < c.heads;
            in_order[t] = there && got[t].y == next[got[t].x];
            if (there) next[got[t].x]++;
            end = got[t].y >= c.per_head - c.short_tiles ? end + 1 : 0;
        }
        char name[120];
        snprintf(name, sizeof name, "order: %d heads of %d tiles, %d of them short", c.heads, c.per_head,
                 c.short_tiles);
        judge(name, compare(in_order, std::vector<int>(tiles, 1)));
        const int wanted = std::min(c.at_end, c.heads * std::min(c.short_tiles, c.per_head));
        if (c.short_tiles > 0 && L2_SHARE / c.head_bytes >= c.heads)
            judge("order: and the end is short", compare(std::vector<int>{ end >= wanted }, std::vector<int>{ 1 }));
    }
}

/* ---- Tests of programmatic dependent launch ---------------------------------------------------------------------- */

enum { FIRST_BLOCKS = 64 };

__global__ void write_first(int *x)
{
    launch_dependents();
    for (int n = 0; n < 20; n++) __nanosleep(1000);
    x[blockIdx.x * blockDim.x + threadIdx.x] = (int)(blockIdx.x * blockDim.x + threadIdx.x) * 3 + 1;
}
__global__ void read_second(const int *x, int *y)
{
    wait_for_prerequisites();
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    y[n] = *(const volatile int *)(x + FIRST_BLOCKS * 128 - 1 - n);
}

void check_dependent_launch()
{
    const int count = FIRST_BLOCKS * 128;
    array<int> x(count), y(count);
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    write_first<<<FIRST_BLOCKS, 128, 0, stream>>>(x.device);
    MUST(cudaPeekAtLastError());
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(FIRST_BLOCKS);
    config.blockDim = dim3(128);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    MUST(cudaLaunchKernelEx(&config, read_second, (const int *)x.device, y.device));
    must(cudaStreamSynchronize(stream), "read_second");
    MUST(cudaStreamDestroy(stream));
    std::vector<int> expected(count);
    for (int n = 0; n < count; n++) expected[n] = (count - 1 - n) * 3 + 1;
    judge("a dependent kernel sees what the kernel before wrote", compare(y.fetch(), expected));
}

/* ---- Tests of copying results from accumulators to rows of an output --------------------------------------------- */

template <typename T, int D> __global__ void __launch_bounds__(128) store(const float *x, uint16_t *out)
{
    extern __shared__ __align__(1024) char memory[];
    const int warp = threadIdx.x / 32;
    float O[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; i++) O[i] = x[row_of(i) * D + column_of(i)];
    store_rows<T, D>((T *)out + warp * 16 * D, D, 16, D, O, (uint16_t *)memory + warp * 16 * ((D + 63) / 64 * 64),
                     threadIdx.x % 32);
}

/* The numbers have either sign, and magnitudes between 2^-20 and 2^12. */
std::vector<float> random_floats(size_t n)
{
    std::vector<float> x(n);
    for (float &y : x)
        y = ldexpf(1 + (float)(random_bits() >> 8) / 16777216.0f, (int)(random_bits() % 32) - 20) *
            (random_bits() & 64 ? 1 : -1);
    return x;
}

template <typename T, int D> void check_store()
{
    const std::vector<float> x = random_floats(64 * D);
    array<float> gX(x);
    array<uint16_t> out(64 * D);
    store<T, D><<<1, 128, 64 * ((D + 63) / 64 * 128)>>>(gX.device, out.device);
    finish("store");
    char name[120];
    snprintf(name, sizeof name, "stmatrix: accumulators to rows of %s, head dim %d", stored<T>::name, D);
    judge(name, compare(out.fetch(), bits_of<T>(x)));
}

void check_stores()
{
    check_store<__nv_bfloat16, 64>();
    check_store<__nv_bfloat16, 96>();
    check_store<__nv_bfloat16, 256>();
    check_store<__half, 128>();
    check_store<__half, 192>();
}

/* ---- Tests of conversions ---------------------------------------------------------------------------------------- */

enum { CONVERTED = 8192 };

__global__ void convert(const float *x, const uint8_t *narrow, uint32_t *bf16, uint32_t *f16, uint32_t *f8,
                        uint32_t *wide)
{
    for (int n = threadIdx.x; n < CONVERTED / 2; n += blockDim.x) {
        bf16[n] = pack<__nv_bfloat16>(x[2 * n], x[2 * n + 1]);
        f16[n] = pack<__half>(x[2 * n], x[2 * n + 1]);
        if (n < CONVERTED / 4) f8[n] = pack_e4m3(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
        if (n < 128) wide[n] = widen_e4m3(narrow[2 * n], narrow[2 * n + 1]);
    }
}
__global__ void raise(const float *x, int count, float *y)
{
    for (int n = threadIdx.x; n < count; n += blockDim.x) y[n] = exp2_fast(x[n]);
}

void check_conversions()
{
    std::vector<float> x = random_floats(CONVERTED), widened(256);
    /* Numbers of few digits often lie halfway between two numbers of the narrow type, so they test how ties are
     * rounded. */
    for (size_t n = 0; n < x.size(); n += 5) x[n] = ldexpf((float)(int)(random_bits() % 64), -8);
    std::vector<uint8_t> narrow(256);
    /* e4m3's NaN is left out, because its conversion may give several bit patterns. */
    for (int n = 0; n < 256; n++) narrow[n] = (n & 0x7f) == 0x7f ? 0 : (uint8_t)n;
    for (int n = 0; n < 256; n++) widened[n] = attn_e4m3_to_f32(narrow[n]);
    array<float> gX(x);
    array<uint8_t> gNarrow(narrow);
    array<uint32_t> bf16(CONVERTED / 2), f16(CONVERTED / 2), f8(CONVERTED / 4), wide(128);
    convert<<<1, 128>>>(gX.device, gNarrow.device, bf16.device, f16.device, f8.device, wide.device);
    finish("convert");
    judge("pack: two floats to bfloat16", compare(bf16.fetch(), packed(bits_of<__nv_bfloat16>(x))));
    judge("pack: two floats to float16", compare(f16.fetch(), packed(bits_of<__half>(x))));
    judge("pack_e4m3: four floats, those past 448 included", compare(f8.fetch(), packed(bits_of<e4m3>(x))));
    judge("widen_e4m3: all numbers as bfloat16", compare(wide.fetch(), packed(bits_of<__nv_bfloat16>(widened))));

    /* ex2.approx has an error of at most 2^-22 (PTX ISA 9.0, 9.7.3.21), and results below 2^-126 become 0. 2^0 must be
     * exactly 1. */
    std::vector<float> powers;
    for (int n = 0; n < 4000; n++) powers.push_back((float)(random_bits() % 136000) / -1000.0f + 10);
    std::vector<double> expected, off;
    for (float y : powers)
        expected.push_back(exp2((double)y)),
            off.push_back(ldexp(exp2((double)y), -22) + (y < -125.999 ? ldexp(1, -126) : 0));
    powers.insert(powers.end(), { 0.0f, -0.0f, -INFINITY, -200.0f });
    expected.insert(expected.end(), { 1, 1, 0, 0 });
    off.insert(off.end(), { 0, 0, 0, 0 });
    array<float> gPowers(powers), raised(powers.size());
    raise<<<1, 128>>>(gPowers.device, (int)powers.size(), raised.device);
    finish("raise");
    judge("exp2_fast: 2^-22 of the result; 2^0 is 1, 2^-inf is 0", compare(raised.fetch(), expected, off));
}

} // namespace

/* clang-format off */
const struct section {
    const char *name;
    void (*run)();
} sections[] = {
    { "tma",        check_tma },
    { "wgmma",      check_wgmma },
    { "sums",       check_added_sums },
    { "e4m3",       check_wgmma_8 },
    { "ring",       check_ring },
    { "mbarrier",   check_hand_over },
    { "order",      check_order },
    { "dependent",  check_dependent_launch },
    { "store",      check_stores },
    { "convert",    check_conversions },
    { "sm80",       check_sm80 },
};
/* clang-format on */

int main(int argc, char **argv)
{
    int devices = 0;
    cudaDeviceProp chip;
    /* With line buffering, no line is lost if the program crashes. */
    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
        cudaGetDeviceProperties(&chip, 0) != cudaSuccess || chip.major != 9 || chip.minor != 0) {
        printf("blocks: no GPU of compute capability 9.0 here: skipped\n0 passed, 0 failed\n");
        return 0;
    }
    alarm(HANG_SECONDS);
    for (const section &x : sections)
        if (argc < 2 || strcmp(argv[1], x.name) == 0) x.run();
    end();
}
