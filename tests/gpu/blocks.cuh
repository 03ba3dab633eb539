/* blocks.cuh: helpers for blocks.cu and blocks_sm80.cu. Those are two files because each includes the ptx.cuh of its
 * kernel folder (sm90 or sm80), and both folders use the same names. */
#ifndef TESTS_GPU_BLOCKS_CUH
#define TESTS_GPU_BLOCKS_CUH

#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/args.cuh"
#include "kernels/cuda/common/errors.h"
#include "kernels/cuda/common/kernels.h"

/* ---- Counting tests and failures --------------------------------------------------------------------------------- */

inline int passed, failed;

[[noreturn]] inline void end()
{
    printf("%d passed, %d failed\n", passed, failed);
    exit(failed != 0 || passed == 0);
}

/* Ends the program if a CUDA call failed, because nothing can run on the device any more. */
inline void must(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) return;
    printf("FAIL %s: %s; what follows was not run\n", what, cuda_error_of((int)code).name);
    failed++;
    end();
}
#define MUST(call) must(call, #call)

inline void finish(const char *what)
{
    must(cudaPeekAtLastError(), what);
    must(cudaStreamSynchronize(0), what);
}

struct outcome {
    size_t count = 0, wrong = 0, first = 0;
    double got = 0, expected = 0; /* the two values of the first element that differs */
};

/* The array `off` has the allowed difference of each element, or is empty if none is allowed. NaN differs from
 * everything. */
template <class Got, class Expected>
outcome compare(const std::vector<Got> &got, const std::vector<Expected> &expected, const std::vector<double> &off = {})
{
    outcome x;
    x.count = expected.size();
    for (size_t n = 0; n < x.count; n++) {
        const double a = (double)got[n], b = (double)expected[n];
        if (off.empty() ? a == b : fabs(a - b) <= off[n]) continue;
        if (x.wrong++ == 0) x.first = n, x.got = a, x.expected = b;
    }
    return x;
}

inline void judge(const char *name, const outcome &x)
{
    if (x.wrong == 0 && x.count > 0) {
        printf("ok   %s\n", name);
        passed++;
        return;
    }
    printf("FAIL %s: %zu of %zu are wrong; number %zu is %g and should be %g\n", name, x.wrong, x.count, x.first, x.got,
           x.expected);
    failed++;
}

/* ---- Random numbers and their conversions ------------------------------------------------------------------------ */

inline uint32_t random_state = 2463534242u;
inline uint32_t random_bits()
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}
/* Returns a random integer from -most to most. */
inline float random_int(int most)
{
    return (float)((int)(random_bits() % (2u * (unsigned)most + 1)) - most);
}
inline std::vector<float> random_ints(size_t n, int most)
{
    std::vector<float> x(n);
    for (float &y : x) y = random_int(most);
    return x;
}

template <typename T> struct stored;
template <> struct stored<__nv_bfloat16> {
    typedef uint16_t bits;
    static constexpr const char *name = "bfloat16";
    static const attn_dtype dtype = ATTN_BF16;
    static bits of(float x) { return attn_bf16_from_f32(x); }
};
template <> struct stored<__half> {
    typedef uint16_t bits;
    static constexpr const char *name = "float16";
    static const attn_dtype dtype = ATTN_F16;
    static bits of(float x) { return attn_f16_from_f32(x); }
};

/* An array in host and device memory, first filled with 0xff, which is NaN in every type. */
template <class T> struct array {
    std::vector<T> host;
    T *device = nullptr;
    explicit array(size_t n) : host(n)
    {
        MUST(cudaMalloc((void **)&device, n * sizeof(T)));
        MUST(cudaMemsetAsync(device, 0xff, n * sizeof(T), 0));
        MUST(cudaStreamSynchronize(0));
        memset(host.data(), 0xff, n * sizeof(T));
    }
    explicit array(const std::vector<T> &x) : array(x.size())
    {
        host = x;
        MUST(cudaMemcpyAsync(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice, 0));
        MUST(cudaStreamSynchronize(0));
    }
    array(const array &) = delete;
    ~array() { cudaFree(device); }
    const std::vector<T> &fetch()
    {
        MUST(cudaMemcpyAsync(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost, 0));
        MUST(cudaStreamSynchronize(0));
        return host;
    }
};

template <typename T> std::vector<typename stored<T>::bits> bits_of(const std::vector<float> &x)
{
    std::vector<typename stored<T>::bits> y(x.size());
    for (size_t n = 0; n < x.size(); n++) y[n] = stored<T>::of(x[n]);
    return y;
}

/* Returns C[M x N] = A[M x K] B[K x N], where a(i, k) and b(k, j) return the elements of A and B. */
template <class A, class B> std::vector<float> multiply(int M, int N, int K, A a, B b)
{
    std::vector<float> C((size_t)M * N), line(N);
    for (int i = 0; i < M; i++) {
        line.assign(N, 0);
        for (int k = 0; k < K; k++) {
            const float x = a(i, k);
            for (int j = 0; j < N; j++) line[j] += x * b(k, j);
        }
        std::copy(line.begin(), line.end(), C.begin() + (size_t)i * N);
    }
    return C;
}

/* Packs narrow numbers into 32-bit words, the first in the lowest bits. */
template <class Bits> std::vector<uint32_t> packed(const std::vector<Bits> &x)
{
    const size_t each = 4 / sizeof(Bits);
    std::vector<uint32_t> y(x.size() / each, 0);
    for (size_t n = 0; n < x.size(); n++) y[n / each] |= (uint32_t)x[n] << n % each * 8 * sizeof(Bits);
    return y;
}

/* ---- Pauses of random length ------------------------------------------------------------------------------------- */

/* Random pauses, which are equal for all lanes of a warp and differ between warps. */
struct pauses {
    uint32_t state;
    bool wanted;
    DEVICE pauses(bool wanted_) : state((threadIdx.x / 32 + 1) * 2654435761u), wanted(wanted_) {}
    DEVICE void pause()
    {
        if (!wanted) return;
        state = state * 1664525 + 1013904223;
        __nanosleep(state >> 22);
    }
};

/* Runs the checks of blocks_sm80.cu. */
void check_sm80();

#endif
