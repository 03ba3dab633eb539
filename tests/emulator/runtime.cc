/* runtime.cc: the functions of the CUDA runtime that kernels/cuda calls. Each call completes before it returns, so
 * streams are always idle.
 *
 * The device describes itself as an H200, with two exceptions. Its compute capability is that of the build
 * (EMULATED_ARCH). Its number of multiprocessors is a random number from one to six, which depends on the seed. A
 * kernel may run with one block per multiprocessor, and its results must not depend on the number of
 * multiprocessors. */
#include <cuda.h>

#include "emulator.h"

#include <map>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* the emulator's cuTensorMapEncodeTiled, declared here without its arguments; sm90.cc or no_sm90.cc defines it */
extern "C" CUresult emu_cuTensorMapEncodeTiled();

namespace {

const size_t MEMORY = (size_t)141 << 30, POISON_MOST = (size_t)64 << 20, GUARD = 4096;

std::map<const char *, size_t> allocations; /* device memory: the size of each allocation, by its address */
std::map<const void *, size_t> allowed;     /* the shared memory that each kernel may use, by the kernel's address */
size_t memory_used;
cudaError_t last = cudaSuccess;

struct moment {
    timespec when;
};

} // namespace

void emu::check_global(const void *pointer, size_t bytes, size_t align, const char *what)
{
    static const char *begin, *end; /* bounds of the allocation that the last search found */
    const char *p = (const char *)pointer;
    if ((uintptr_t)p % align) fail("%s: %p is not a multiple of %zu", what, pointer, align);
    if (p >= begin && p + bytes <= end) return;
    auto after = allocations.upper_bound(p);
    if (after == allocations.begin()) fail("%s: %p is not global memory", what, pointer);
    --after;
    if (p + bytes > after->first + after->second)
        fail("%s: %zu bytes at %p are not in global memory", what, bytes, pointer);
    begin = after->first, end = begin + after->second;
    if (allocations.size() > 64) begin = end = nullptr; /* see cudaFree */
}

size_t emu::shared_allowed(const void *kernel)
{
    const auto known = allowed.find(kernel);
    return known == allowed.end() ? 48 << 10 : known->second;
}

void emu::launch_failed()
{
    last = cudaErrorLaunchFailure;
}

extern "C" {

cudaError_t cudaGetDeviceCount(int *count)
{
    return *count = 1, cudaSuccess;
}
cudaError_t cudaSetDevice(int)
{
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    return *device = 0, cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int)
{
    const char *text = getenv("ATTN_EMULATOR_SEED");
    *p = cudaDeviceProp();
    snprintf(p->name, sizeof p->name, "emulated H200");
    p->major = EMULATED_ARCH / 100;
    p->minor = EMULATED_ARCH / 10 % 10;
    p->multiProcessorCount = 1 + (int)((text && *text ? strtoul(text, nullptr, 10) : 1) * 7 % 6);
    p->sharedMemPerBlockOptin = EMULATED_ARCH >= 900 ? 227 << 10 : 163 << 10;
    p->totalGlobalMem = MEMORY;
    return cudaSuccess;
}

/* Gives an attribute of the emulated device. The clock rates are those of an H200. */
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int)
{
    *value = which == cudaDevAttrClockRate              ? 1980000
             : which == cudaDevAttrMemoryClockRate      ? 3201000
             : which == cudaDevAttrGlobalMemoryBusWidth ? 6144
                                                        : 0;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    return *free_bytes = MEMORY - memory_used, *total = MEMORY, cudaSuccess;
}

/* A page without access rights follows the allocation's last byte, so that an access beyond the end crashes. */
cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    const size_t whole = (bytes + GUARD - 1) / GUARD * GUARD + GUARD;
    if (bytes > MEMORY - memory_used) return last = cudaErrorMemoryAllocation;
    char *at = (char *)mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return last = cudaErrorMemoryAllocation;
    mprotect(at + whole - GUARD, GUARD, PROT_NONE);
    if (bytes <= POISON_MOST) memset(at, 0xff, bytes);
    allocations[at] = bytes;
    memory_used += bytes;
    *memory = at;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    const auto known = allocations.find((const char *)memory);
    if (!memory) return cudaSuccess;
    if (known == allocations.end()) return last = cudaErrorInvalidValue;
    munmap(memory, (known->second + GUARD - 1) / GUARD * GUARD + GUARD);
    memory_used -= known->second;
    allocations.erase(known);
    return cudaSuccess;
}

/* Always fails: the emulator has no other process whose memory it could open. */
cudaError_t cudaIpcOpenMemHandle(void **memory, cudaIpcMemHandle_t, unsigned)
{
    return *memory = nullptr, last = cudaErrorInvalidResourceHandle;
}
cudaError_t cudaIpcCloseMemHandle(void *)
{
    return last = cudaErrorInvalidValue;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *, const void *)
{
    return last = cudaErrorNotSupported;
}

cudaError_t cudaHostRegister(void *, size_t, unsigned)
{
    return cudaSuccess; /* pins nothing, because all memory is the host's */
}

cudaError_t cudaHostUnregister(void *)
{
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned)
{
    *memory = malloc(bytes ? bytes : 1);
    return *memory ? cudaSuccess : last = cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *memory)
{
    return free(memory), cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t)
{
    if (bytes) emu::check_global(kind == cudaMemcpyHostToDevice ? to : from, bytes, 1, "cudaMemcpyAsync");
    memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
    for (size_t n = 0; n < height; n++)
        cudaMemcpyAsync((char *)to + n * to_pitch, (const char *)from + n * from_pitch, width, kind, stream);
    return cudaSuccess;
}

/* The emulator has one device, so these three functions are never called. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int)
{
    return *can = 0, cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned)
{
    return last = cudaErrorInvalidDevice;
}
cudaError_t cudaMemcpyPeerAsync(void *, int, const void *, int, size_t, cudaStream_t)
{
    return last = cudaErrorInvalidDevice;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t)
{
    if (bytes) emu::check_global(to, bytes, 1, "cudaMemsetAsync");
    memset(to, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = (cudaStream_t)malloc(1);
    return *stream ? cudaSuccess : last = cudaErrorMemoryAllocation;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    return free((void *)stream), cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t)
{
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = (cudaEvent_t)calloc(1, sizeof(moment));
    return *event ? cudaSuccess : last = cudaErrorMemoryAllocation;
}
cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    return free((void *)event), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    return clock_gettime(CLOCK_MONOTONIC, &((moment *)event)->when), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    const timespec a = ((moment *)from)->when, b = ((moment *)to)->when;
    *ms = (float)((double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) * 1e-6);
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value)
{
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > 227 << 10)
        return last = cudaErrorInvalidValue;
    allowed[kernel] = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, const void *)
{
    *to = cudaFuncAttributes();
    to->ptxVersion = to->binaryVersion = EMULATED_ARCH / 10;
    return cudaSuccess;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last;
}
cudaError_t cudaGetLastError(void)
{
    const cudaError_t code = last;
    last = cudaSuccess;
    return code;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    if (strcmp(name, "cuTensorMapEncodeTiled")) return last = cudaErrorInvalidValue;
    *to = (void *)emu_cuTensorMapEncodeTiled;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
}
