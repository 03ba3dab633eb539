/* can_fail.cu: kernels with one mistake each, which the emulator must report by name. `make emulate` runs this program
 * first. */
#include "tests/emulator/sm80.h"

namespace {

typedef float word[128];

/* Each thread loads 16 bytes with an asynchronous copy (cp.async), and a thread of another warp reads them. Without
 * WAIT or BARRIER the reader does not wait until the bytes are there. */
template <bool WAIT, bool BARRIER> __global__ void copies(const float *from)
{
    char *const memory = emu::dynamic_shared(1024);
    uint32_t r[4];
    emu::cp_async(emu::shared_address(memory) + threadIdx.x * 16, from + threadIdx.x * 4, true);
    emu::cp_async_commit();
    if (WAIT) emu::cp_async_wait(0);
    if (BARRIER) __syncthreads();
    emu::ldmatrix_x4(r, emu::shared_address(memory) + (threadIdx.x + 32) % blockDim.x * 16);
}

__global__ void stores_under_a_copy(const float *from)
{
    float *const memory = (float *)emu::dynamic_shared(1024);
    emu::cp_async(emu::shared_address(memory), from, true);
    memory[threadIdx.x % 4] = 5;
}

template <bool BARRIER> __global__ void neighbours(float *to)
{
    word &x = emu::static_shared<word>();
    x[threadIdx.x] = (float)threadIdx.x;
    if (BARRIER) __syncthreads();
    to[threadIdx.x] = x[(threadIdx.x + 32) % 64];
}

template <bool BARRIER> __global__ void lanes(float *to)
{
    word &x = emu::static_shared<word>();
    x[threadIdx.x] = (float)threadIdx.x;
    if (BARRIER) __syncwarp();
    to[threadIdx.x] = __shfl_xor_sync(0xffffffff, x[threadIdx.x ^ 1], 2);
}

__global__ void two_instructions()
{
    if (threadIdx.x < 16) __syncwarp();
    else __shfl_xor_sync(0xffffffff, 1, 1);
}

__global__ void half_a_barrier()
{
    if (threadIdx.x < 32) emu::barrier_sync(1, 64);
}

__global__ void nowhere()
{
    int *volatile nobodys = (int *)16;
    *nobodys = 1;
}

__global__ void reads_nothing()
{
    uint32_t r[4];
    emu::ldmatrix_x4(r, emu::shared_address(emu::dynamic_shared(1024)) + threadIdx.x * 16);
}

int wrong;

/* Runs a kernel. `expected` is a part of the message that the emulator must print; NULL: none. */
template <class... P, class... A> void check(const char *expected, void (*kernel)(P...), int threads, A... args)
{
    cudaGetLastError();
    emu::failure[0] = 0;
    emu::launch("", "", kernel, 3, threads, 4096)(args...);
    if (expected ? strstr(emu::failure, expected) && cudaGetLastError() == cudaErrorLaunchFailure : !emu::failure[0])
        return;
    fprintf(stderr, "can_fail: expected '%s', found '%s'\n", expected ? expected : "", emu::failure);
    wrong++;
}

} // namespace

int main()
{
    void *memory;
    emu::quiet = true;
    cudaMalloc(&memory, 4096);
    float *const x = (float *)memory;
    check(nullptr, copies<true, true>, 64, x);
    /* copies<true, false> reads its bytes without a barrier, which is a race. The emulator must report the race; any
     * message will do. */
    check("", copies<true, false>, 64, x);
    check("cp.async", copies<false, true>, 64, x);
    check("was written while a cp.async", stores_under_a_copy, 32, x);
    check(nullptr, neighbours<true>, 64, x);
    check("nothing that orders the two", neighbours<false>, 64, x);
    check(nullptr, lanes<true>, 32, x);
    check("nothing that orders the two", lanes<false>, 32, x);
    check("comes to", two_instructions, 64);
    check("deadlock", half_a_barrier, 64);
    check("nobody's", nowhere, 64);
    check("which nobody has written", reads_nothing, 32);
    printf("can_fail: %s\n", wrong ? "FAILED" : "every mistake was named");
    return wrong != 0;
}
