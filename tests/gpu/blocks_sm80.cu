/* blocks_sm80.cu: the part of blocks.cu that tests the building blocks of the kernels of sm80: cp.async, swizzled
 * tiles, fragments, mma, and float32 split into two 16-bit planes (hi and lo). */
#include "kernels/cuda/common/rows.cuh"
#include "kernels/cuda/sm80/split.cuh"
#include "kernels/cuda/sm80/tile.cuh"
#include "tests/gpu/blocks.cuh"

namespace {

/* Each thread issues two groups of copies of 16 bytes. The copies of odd threads are marked as not valid, so they must
 * write zeros. The kernel outputs the copied bytes after the wait for the first group, and again after the wait for
 * both. */
__global__ void copy(const uint4 *from, uint4 *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint4 *const tile = (uint4 *)memory;
    const int n = threadIdx.x;
    for (int m = n; m < 256; m += 128) tile[m] = make_uint4(~0u, ~0u, ~0u, ~0u);
    __syncthreads();
    cp_async_16(smem_addr(memory) + n * 16, from + n, n % 2 == 0);
    cp_async_commit();
    cp_async_16(smem_addr(memory) + 2048 + n * 16, from + 128 + n, n % 2 == 0);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    out[127 - n] = tile[127 - n];
    cp_async_wait<0>();
    __syncthreads();
    out[128 + 127 - n] = tile[128 + 127 - n];
}

void check_copies()
{
    std::vector<uint32_t> data(1024), expected(1024);
    for (int n = 0; n < 1024; n++) data[n] = random_bits(), expected[n] = n / 4 % 2 ? 0 : data[n];
    array<uint32_t> from(data), out(1024);
    copy<<<1, 128, 4096>>>((const uint4 *)from.device, (uint4 *)out.device);
    finish("copy");
    judge("cp.async: groups, and zeros where a copy is not valid", compare(out.fetch(), expected));
}

/* Tests the class `loader`: lets it load a tile into shared memory, and copies the tile to `out`. */
template <int D, int ROWS>
__global__ void __launch_bounds__(128)
    load_tile(const __grid_constant__ attn_view view, int h, int first, int count, int width, uint16_t *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint16_t *const tile = (uint16_t *)memory;
    for (int n = threadIdx.x; n < ROWS * D; n += 128) tile[n] = 0xffff;
    __syncthreads();
    loader<D, 128>(view, 0, h, 0, count, width).template load<ROWS>(tile, first);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int n = threadIdx.x; n < ROWS * D; n += 128) out[n] = tile[n];
}

/* clang-format off */
const struct loader_case {
    const char *name;
    attn_dtype dtype;
    int width, first;
} loader_cases[] = {
    { "pieces, all there",                 ATTN_BF16,   128,  0 },
    { "pieces, past the last row",         ATTN_F16,    128, 64 },
    { "pieces, past the last column",      ATTN_BF16,    72, 32 },
    { "elements, rows on odd addresses",   ATTN_BF16,    59, 64 },
    { "float8 becomes float16",            ATTN_F8E4M3, 104, 64 },
};
/* clang-format on */

void check_loader()
{
    const int D = 128, ROWS = 64, SEQUENCE = 100, H = 2, h = 1;
    for (const loader_case &x : loader_cases) {
        const bool narrow = x.dtype == ATTN_F8E4M3;
        const size_t count = (size_t)SEQUENCE * H * x.width;
        std::vector<uint16_t> data(count), expected(ROWS * D);
        std::vector<uint8_t> bytes(count);
        for (size_t n = 0; n < count; n++) {
            data[n] = (uint16_t)(1 + random_bits() % 0xfffe);
            bytes[n] = (uint8_t)(random_bits() % 0x7f | (random_bits() & 0x80));
        }
        array<uint16_t> source(data), out(ROWS * D);
        array<uint8_t> source_8(bytes);
        attn_view view = {};
        view.data = narrow ? (void *)source_8.device : (void *)source.device;
        view.dtype = x.dtype;
        view.head = x.width, view.row = H * x.width;
        load_tile<D, ROWS><<<1, 128, ROWS * D * 2>>>(view, h, x.first, SEQUENCE, x.width, out.device);
        finish("loader");
        for (int r = 0; r < ROWS; r++)
            for (int d = 0; d < D; d++) {
                const size_t n = ((size_t)(x.first + r) * H + h) * x.width + d;
                const bool inside = x.first + r < SEQUENCE && d < x.width;
                const uint16_t value = !inside ? 0 : narrow ? attn_f16_from_f32(attn_e4m3_to_f32(bytes[n])) : data[n];
                expected[r * D + (d / 8 ^ r % 8) * 8 + d % 8] = value;
            }
        char name[120];
        snprintf(name, sizeof name, "tile.cuh: a tile of 16 bits, %s", x.name);
        judge(name, compare(out.fetch(), expected));
    }
}

/* Storage of the operands of C = A B, where A is 64 x D. An operand is stored row by row, or column by column (as its
 * transpose). */
enum fragments { ROWS_ROWS, ROWS_COLUMNS, COLUMNS_ROWS, COLUMNS_COLUMNS };
const char *const fragment_names[] = { "A by rows, B by rows", "A by rows, B by columns", "A by columns, B by rows",
                                       "A by columns, B by columns" };

/* The argument `h` is always 0. A constant 0 in its place would meet an error of nvcc 13.0: if all other terms of an
 * address are 0, nvcc drops the thread's own offset. */
/* With ANYWHERE, tiles begin 16 bytes after a multiple of 128 bytes. They are read by functions that accept any
 * multiple of 16 bytes. */
template <typename T, int D, bool ANYWHERE>
__global__ void __launch_bounds__(128)
    multiply_tiles(const __grid_constant__ attn_view A, const __grid_constant__ attn_view B, int h, fragments how,
                   float *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint16_t *const tileA = (uint16_t *)memory + (ANYWHERE ? 8 : 0), *const tileB = (uint16_t *)memory + 64 * D +
                                                                                    (ANYWHERE ? 8 : 0);
    const uint32_t a_at = smem_addr(tileA), b_at = smem_addr(tileB);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool a_down = how == COLUMNS_ROWS || how == COLUMNS_COLUMNS,
               b_down = how == ROWS_COLUMNS || how == COLUMNS_COLUMNS;
    const int M = a_down ? D : 64, N = b_down ? D : 64, K = how == ROWS_ROWS ? D : 64;
    loader<D, 128>(A, 0, h, 0, 64, D).template load<64>(tileA, 0);
    loader<D, 128>(B, 0, h, 0, 64, D).template load<64>(tileB, 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int m = warp * 16; m < M; m += 64)
        for (int n = 0; n < N; n += 16) {
            float c[2][4] = {};
            for (int k = 0; k < K; k += 16) {
                uint32_t a[4], b[4];
                if (ANYWHERE) {
                    if (a_down) a_columns<D>(a, tileA, m, k, lane);
                    else a_rows<D>(a, tileA, m, k, lane);
                    if (b_down) b_columns<D>(b, tileB, n, k, lane);
                    else b_rows<D>(b, tileB, n, k, lane);
                } else {
                    if (a_down) a_columns<D>(a, a_at, m, k, lane);
                    else a_rows<D>(a, a_at, m, k, lane);
                    if (b_down) b_columns<D>(b, b_at, n, k, lane);
                    else b_rows<D>(b, b_at, n, k, lane);
                }
                mma<T>(c[0], a, b[0], b[1]);
                mma<T>(c[1], a, b[2], b[3]);
            }
            for (int e = 0; e < 8; e++)
                out[(m + lane / 4 + e / 2 % 2 * 8) * N + n + e / 4 * 8 + lane % 4 * 2 + e % 2] = c[e / 4][e % 4];
        }
}

template <typename T, int D, bool ANYWHERE> void check_fragments()
{
    const std::vector<float> A = random_ints(64 * D, 64), B = random_ints(64 * D, 64);
    array<uint16_t> gA(bits_of<T>(A)), gB(bits_of<T>(B));
    attn_view viewA = {}, viewB = {};
    viewA.dtype = viewB.dtype = stored<T>::dtype;
    viewA.row = viewB.row = D;
    viewA.data = gA.device, viewB.data = gB.device;
    for (int how = ROWS_ROWS; how <= COLUMNS_COLUMNS; how++) {
        const bool a_down = how == COLUMNS_ROWS || how == COLUMNS_COLUMNS,
                   b_down = how == ROWS_COLUMNS || how == COLUMNS_COLUMNS;
        const int M = a_down ? D : 64, N = b_down ? D : 64, K = how == ROWS_ROWS ? D : 64, bytes = 64 * D * 4 + 32;
        array<float> out((size_t)M * N);
        MUST((allow_shared<multiply_tiles<T, D, ANYWHERE>>((size_t)bytes)));
        multiply_tiles<T, D, ANYWHERE><<<1, 128, bytes>>>(viewA, viewB, 0, (fragments)how, out.device);
        finish("multiply_tiles");
        const std::vector<float> expected = multiply(
            M, N, K, [&](int i, int k) { return a_down ? A[k * D + i] : A[i * D + k]; },
            [&](int k, int j) { return b_down ? B[k * D + j] : B[j * D + k]; });
        char name[120];
        snprintf(name, sizeof name, "mma %s: %s, rows of %d%s", stored<T>::name, fragment_names[how], D,
                 ANYWHERE ? ", tiles anywhere" : "");
        judge(name, compare(out.fetch(), expected));
    }
}

/* Computes attention without the softmax. The accumulators of S become operand A of O = S V, as in forward.cu. */
template <typename T, int D>
__global__ void __launch_bounds__(128) attend(const __grid_constant__ attn_view Q, const __grid_constant__ attn_view K,
                                              const __grid_constant__ attn_view V, int h, float *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint16_t *const tiles = (uint16_t *)memory;
    const uint32_t tileQ = smem_addr(tiles), tileK = tileQ + 64 * D * 2, tileV = tileK + 64 * D * 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    loader<D, 128>(Q, 0, h, 0, 64, D).template load<64>(tiles, 0);
    loader<D, 128>(K, 0, h, 0, 64, D).template load<64>(tiles + 64 * D, 0);
    loader<D, 128>(V, 0, h, 0, 64, D).template load<64>(tiles + 128 * D, 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float S[1][8][4] = {}, O[1][D / 8][4] = {};
    product<T, D / 16, 1, 8>(
        S, [&](uint32_t(&a)[1][4], int kk) { a_rows<D>(a[0], tileQ, warp * 16, kk * 16, lane); },
        [&](uint32_t(&b)[4][4], int kk) {
#pragma unroll
            for (int n = 0; n < 4; n++) b_rows<D>(b[n], tileK, n * 16, kk * 16, lane);
        });
    product<T, 4, 1, D / 8>(
        O,
        [&](uint32_t(&a)[1][4], int kk) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                a[0][e] = pack<T>(S[0][kk * 2 + e / 2][e % 2 * 2], S[0][kk * 2 + e / 2][e % 2 * 2 + 1]);
        },
        [&](uint32_t(&b)[D / 16][4], int kk) {
#pragma unroll
            for (int n = 0; n < D / 16; n++) b_columns<D>(b[n], tileV, n * 16, kk * 16, lane);
        });
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            out[(warp * 16 + lane / 4 + e / 2 * 8) * D + n * 8 + lane % 4 * 2 + e % 2] = O[0][n][e];
}

template <typename T, int D> void check_attend()
{
    const std::vector<float> Q = random_ints(64 * D, 1), K = random_ints(64 * D, 1), V = random_ints(64 * D, 8);
    array<uint16_t> gQ(bits_of<T>(Q)), gK(bits_of<T>(K)), gV(bits_of<T>(V));
    array<float> out(64 * D);
    attn_view views[3] = {};
    const void *const data[3] = { gQ.device, gK.device, gV.device };
    for (int n = 0; n < 3; n++) views[n].data = (void *)data[n], views[n].dtype = stored<T>::dtype, views[n].row = D;
    MUST((allow_shared<attend<T, D>>(64 * D * 6)));
    attend<T, D><<<1, 128, 64 * D * 6>>>(views[0], views[1], views[2], 0, out.device);
    finish("attend");
    const std::vector<float> S = multiply(
        64, 64, D, [&](int i, int k) { return Q[i * D + k]; }, [&](int k, int j) { return K[j * D + k]; });
    const std::vector<float> expected = multiply(
        64, D, 64, [&](int i, int j) { return S[i * 64 + j]; }, [&](int j, int d) { return V[j * D + d]; });
    char name[120];
    snprintf(name, sizeof name, "mma %s: O = P V, P from the accumulators, head dim %d", stored<T>::name, D);
    judge(name, compare(out.fetch(), expected));
}

/* Computes S = Q K^T and O = S V, without a softmax, with float32 numbers that are stored as hi + lo / 2048
 * (split.cuh). hi and lo are 16-bit numbers in separate arrays. Inputs are small integers, so the result is exact. The
 * tiles of q, k and v are rows 64 to 127 of their arrays. */
template <int D>
__global__ void __launch_bounds__(128)
    attend_split(const uint16_t *Q, const uint16_t *K, const uint16_t *V, float *S_out, float *O_out)
{
    extern __shared__ __align__(1024) char memory[];
    uint16_t *const tiles = (uint16_t *)memory;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, TILE = 2 * 64 * D, PAIRS = 4;
    load_planes<D, 64, 128>(tiles, Q, 64);
    load_planes<D, 64, 128>(tiles + TILE, K, 64);
    load_planes<D, 64, 128>(tiles + 2 * TILE, V, 64);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float S[1][8][4];
    uint32_t ph[4][4], pl[4][4];
    multiply_rows<D, 1, 64, 64>(S, by_16<D>(tiles, lane) + warp * 32 * D, by_8<D>(tiles + TILE, lane));
    split_fragments<64>(ph, pl, S[0]);
    const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) S_out[(row + e / 2 * 8) * 64 + n * 8 + column + e % 2] = S[0][n][e];
#pragma unroll
    for (int pair = 0; pair < D / 16; pair += PAIRS) {
        float O[1][2 * PAIRS][4] = {};
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            uint32_t ah[1][4], al[1][4];
#pragma unroll
            for (int e = 0; e < 4; e++) ah[0][e] = ph[kk][e], al[0][e] = pl[kk][e];
            multiply_columns<1, PAIRS, 64 * 2 * D>(O, ah, al, by_16<D>(tiles + 2 * TILE, lane), pair, kk * 32 * D);
        }
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) O_out[(row + e / 2 * 8) * D + pair * 16 + n * 8 + column + e % 2] = O[0][n][e];
    }
}

template <int D> void check_attend_split()
{
    const int plane = SPLIT_ROWS * D, first = 64 * D;
    /* q, k and v. Each has two matrices of [128][D]: the high parts of the numbers, then the low parts. */
    std::vector<float> planes[3];
    for (int n = 0; n < 3; n++) {
        planes[n] = random_ints(plane, 1);
        const std::vector<float> low = random_ints(plane, n == 2 ? 2 : 4);
        planes[n].insert(planes[n].end(), low.begin(), low.end());
        for (int i = plane; i < 2 * plane && n == 2; i++) planes[n][i] *= 2048;
    }
    array<uint16_t> Q(bits_of<__half>(planes[0])), K(bits_of<__half>(planes[1])), V(bits_of<__half>(planes[2]));
    array<float> S(64 * 64), O(64 * D);
    MUST((allow_shared<attend_split<D>>(64 * D * 12)));
    attend_split<D><<<1, 128, 64 * D * 12>>>(Q.device, K.device, V.device, S.device, O.device);
    finish("attend_split");
    const auto high = [&](int n, int r, int d) { return planes[n][first + r * D + d]; };
    const auto low = [&](int n, int r, int d) { return planes[n][plane + first + r * D + d] / 2048; };
    /* With q = hi + lo and k = hi' + lo', the kernel computes q hi' + hi lo', and omits lo lo' as split.cuh does. */
    std::vector<float> P = multiply(
        64, 64, D, [&](int i, int k) { return high(0, i, k) + low(0, i, k); },
        [&](int k, int j) { return high(1, j, k); });
    const std::vector<float> rest = multiply(
        64, 64, D, [&](int i, int k) { return high(0, i, k); }, [&](int k, int j) { return low(1, j, k); });
    std::vector<float> hi(64 * 64);
    for (int n = 0; n < 64 * 64; n++) P[n] += rest[n], hi[n] = attn_f16_to_f32(attn_f16_from_f32(P[n]));
    std::vector<float> expected = multiply(
        64, D, 64, [&](int i, int j) { return P[i * 64 + j]; }, [&](int j, int d) { return high(2, j, d); });
    const std::vector<float> more = multiply(
        64, D, 64, [&](int i, int j) { return hi[i * 64 + j]; }, [&](int j, int d) { return low(2, j, d); });
    for (int n = 0; n < 64 * D; n++) expected[n] += more[n];
    char name[120];
    snprintf(name, sizeof name, "split.cuh: S = Q K^T of float32, head dim %d", D);
    judge(name, compare(S.fetch(), P));
    snprintf(name, sizeof name, "split.cuh: O = P V of float32, head dim %d", D);
    judge(name, compare(O.fetch(), expected));
}

__global__ void add(float *sums)
{
    const int lane = threadIdx.x % 32;
    float x[4];
    for (int e = 0; e < 4; e++) x[e] = (float)(lane * 4 + e + (int)blockIdx.x);
#if __CUDA_ARCH__ >= 900
    red_add_4(sums + lane * 4, x);
#endif
}

void check_red()
{
    const int blocks = 100, warps = 4;
    array<float> sums(std::vector<float>(128, 0));
    std::vector<float> expected(128);
    for (int n = 0; n < 128; n++) expected[n] = (float)(warps * (n * blocks + blocks * (blocks - 1) / 2));
    add<<<blocks, 32 * warps>>>(sums.device);
    finish("add");
    judge("red_add_4: additions of 400 warps", compare(sums.fetch(), expected));
}

/* Two pairs of warps exchange numbers, each pair with a named barrier. Random pauses change the order in which warps
 * arrive. */
__global__ void __launch_bounds__(128) pairs(uint32_t *out)
{
    extern __shared__ __align__(1024) char memory[];
    uint32_t *const words = (uint32_t *)memory;
    const int pair = threadIdx.x / 64;
    pauses slow(true);
    uint32_t x = threadIdx.x;
    for (uint32_t n = 0; n < 50; n++) {
        slow.pause();
        words[threadIdx.x] = x;
        if (pair) barrier<2, 64>();
        else barrier<1, 64>();
        x = words[threadIdx.x ^ 32] * 3 + n;
        if (pair) barrier<2, 64>();
        else barrier<1, 64>();
    }
    out[threadIdx.x] = x;
}

void check_pairs()
{
    array<uint32_t> out(128);
    std::vector<uint32_t> x(128), y(128);
    for (uint32_t t = 0; t < 128; t++) x[t] = t;
    for (uint32_t n = 0; n < 50; n++, x = y)
        for (uint32_t t = 0; t < 128; t++) y[t] = x[t ^ 32] * 3 + n;
    pairs<<<1, 128, 512>>>(out.device);
    finish("pairs");
    judge("barrier: pairs of warps hand each other numbers", compare(out.fetch(), x));
}

template <typename T> __global__ void dot(const uint32_t *x, const uint32_t *y, float *out)
{
    out[threadIdx.x] = dot_pair<T>(x[threadIdx.x], y[threadIdx.x], (float)threadIdx.x);
}

template <typename T> void check_dot()
{
    const std::vector<float> x = random_ints(256, 64), y = random_ints(256, 64);
    std::vector<float> expected(128);
    for (int n = 0; n < 128; n++) expected[n] = (float)n + x[2 * n] * y[2 * n] + x[2 * n + 1] * y[2 * n + 1];
    array<uint32_t> gX(packed(bits_of<T>(x))), gY(packed(bits_of<T>(y)));
    array<float> out(128);
    dot<T><<<1, 128>>>(gX.device, gY.device, out.device);
    finish("dot");
    char name[120];
    snprintf(name, sizeof name, "dot_pair of %s", stored<T>::name);
    judge(name, compare(out.fetch(), expected));
}

} // namespace

void check_sm80()
{
    check_copies();
    check_loader();
    check_fragments<__nv_bfloat16, 64, false>();
    check_fragments<__nv_bfloat16, 128, false>();
    check_fragments<__half, 128, false>();
    check_fragments<__half, 256, false>();
    check_fragments<__half, 64, true>();
    check_attend<__nv_bfloat16, 64>();
    check_attend<__half, 128>();
    check_attend_split<64>();
    check_attend_split<128>();
    check_red();
    check_pairs();
    check_dot<__nv_bfloat16>();
    check_dot<__half>();
}
