/* device.cu: implements backend.h for NVIDIA GPUs: devices, memory, streams, errors.
 *
 * 1. Every call of the CUDA runtime is checked. After a sticky error (errors.h) all calls on the device return
 * ATTN_DEVICE_LOST.
 * 2. Freed device memory is kept in lists by size and used again, because cudaMalloc would synchronise the device.
 * `lock` is never held during a driver call: cudaMalloc and cudaFree may wait for all work of the device.
 * 3. The caller frees a block only after the stream that used it is done.
 * 4. Each thread has its own current CUDA device, so every function first sets it.
 * 5. The CUDA runtime is linked statically, and no C++ library is used, so the program also starts without CUDA. */
#include <atomic>
#include <cuda_runtime.h>
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/common/errors.h"
#include "kernels/cuda/common/kernels.h"
#include "kernels/backend.h"
#include "kernels/cuda/simple/simple.h"
#include "kernels/cuda/truth/truth.h"

extern const cuda_kernel decode_forward;                  /* in sm80/decode.cu */
extern const cuda_kernel wide_decode_forward;             /* in sm80/decode_wide.cu */
extern const cuda_kernel simple_forward, simple_backward; /* in simple/simple.cu */
extern const cuda_kernel simple_observe;                  /* in simple/observe.cu */

namespace {

/* errors.h includes no CUDA header, so its error numbers are compared with CUDA's here */
#define X(code, cuda, name, sticky, status) \
    static_assert((int)cuda == code, #cuda " is not " #code " in this version of CUDA");
CUDA_ERROR_MAP(X)
#undef X

/* ---- Opening and describing devices ------------------------------------------------------------------------------ */

/* number of streams of a device: one copies inputs, one computes, one copies results, and one waits */
enum { STREAMS = 4 };

/* block sizes of device memory are 2^n and 1.5 * 2^n bytes, so at most a third of a block is unused */
enum { CLASSES = 96, CLASS_LEAST_LOG2 = 9 };

/* Upper bounds for any GPU. FASTEST_FLOPS: operations per second (dense float8 on the fastest known GPU).
 * FASTEST_SCORES: scores per second (twice the number of exponentials per second of the fastest known GPU). */
const double FASTEST_FLOPS = 1e16, FASTEST_SCORES = 2e13;

/* Dense 16-bit operations per clock cycle of a multiprocessor, by compute capability. They are the rates of NVIDIA's
 * data sheets (A100: 312 TFLOP/s at 1.41 GHz, H100 SXM: 989 TFLOP/s at 1.83 GHz), divided by the number of
 * multiprocessors and by the clock rate. */
const struct {
    int compute, a_clock;
} tensor_cores[] = { { 80, 2048 }, { 86, 1024 },  { 87, 1024 },  { 89, 1024 },
                     { 90, 4096 }, { 100, 8192 }, { 103, 8192 }, { 120, 1024 } };

enum { COUNTER_BYTES = 128 }; /* bytes of a stream's counter of work tiles, which has a cache line of its own */

/* One call of attn_run_some() queues work for at most this constant times step_seconds(). Queued work cannot be
 * cancelled, and delays all other streams of the device. */
const double SOME_STEPS = 1.2;

/* Size in bytes of a header in the workspace. The marks of rows lie behind this header. A mark is one byte; it is not 0
 * if a later launch must compute the row. */
enum { MARKS_HEAD = 16 };

struct block {
    block *next;
    void *memory;
    int size_class;
};

struct device {
    attn_device base;
    cuda_chip chip;
    cudaDeviceProp properties;
    /* core_khz, memory_khz: highest clock rates; memory_bits: width of the memory bus. A value of 0 means unknown. */
    int core_khz, memory_khz, memory_bits;
    /* whether the device is lost after a sticky error; any thread may set this, and nothing clears it */
    std::atomic<bool> lost;
    /* bit n: this device has asked for direct access to the memory of device n; any thread may set a bit */
    std::atomic<uint64_t> peers;
    /* the driver's function cuStreamWriteValue32, by which a stream writes the number of the last note that it has
     * reached (struct stream); NULL: not available */
    PFN_cuStreamWriteValue32_v11070 write_word;

    pthread_mutex_t lock; /* protects all members below */
    int64_t memory_limit, memory_used, memory_taken;
    /* for each size class, the freed blocks that are kept for reuse */
    block *idle[CLASSES];
    block *live;
};

struct memory_range {
    const char *begin, *end; /* addresses `begin` to `end` - 1; both pointers are NULL if the range is empty */
};

struct stream {
    attn_stream base;
    cudaStream_t cuda;
    cudaEvent_t marks[ATTN_MARKS];
    /* A note is a numbered point in the stream's queue. When the stream reaches the note, it writes the note's number
     * here, in pinned memory. NULL: the stream has no notes. */
    volatile uint32_t *note;
    uint32_t notes;
    int *counter;
    /* Two bytes of pinned memory. cuda_chip.found may point to found[0]. found[1] becomes 1 if kernels could not
     * compute some rows and no later launch computes them; the host must then recompute the problem (left_rows()). */
    uint8_t *found;
    /* Rows that a kernel could not compute: in a long problem a later launch always computes them. True (ATTN_EVERY_ROW
     * of attn_run_some()): a later launch computes them even in a short problem. */
    bool every_row;
    /* whether the last kernel queued on the stream is one of decode.cu; `written` then says which memory that kernel
     * writes */
    bool after_decode;
    memory_range written[2];
};

device *device_of(attn_device *d)
{
    return reinterpret_cast<device *>(d);
}
const device *device_of(const attn_device *d)
{
    return reinterpret_cast<const device *>(d);
}
stream *stream_of(attn_stream *s)
{
    return reinterpret_cast<stream *>(s);
}

attn_status check(device *d, cudaError_t code, const char *what, attn_error *err)
{
    if (code == cudaSuccess) return ATTN_OK;
    const cuda_error_info info = cuda_error_of((int)code);
    cudaGetLastError();
    if (info.sticky && d) d->lost.store(true, std::memory_order_relaxed);
    return attn_fail(err, info.status, "", "cuda: %s: %s (error %d)", what, info.name, (int)code);
}

attn_status enter(device *d, attn_error *err)
{
    if (d->lost.load(std::memory_order_relaxed))
        return attn_fail(err, ATTN_DEVICE_LOST, "", "cuda:%d was lost to an earlier error", d->base.index);
    return check(d, cudaSetDevice(d->base.index), "cudaSetDevice", err);
}

int device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

/* The part of the free memory (measured at attn_device_open()) that this process may allocate if the options set no
 * limit. The rest is for the CUDA context, the kernels and other processes. */
const double MEMORY_SHARE = 0.85;

/* Returns the index in cuda_kernels[] of the first kernel that may compute `op`. With the environment variable
 * ATTN_CUDA_FAMILY=NAME, this is the first kernel of a family (sm90, generic, ...). All kernels before it in the table
 * are not used, so that tests can run slower kernels. The variable has no effect on an `op` for which the family has no
 * kernel. */
int first_kernel(attn_op op)
{
    const char *family = getenv("ATTN_CUDA_FAMILY");
    for (int i = 0; family && i < cuda_kernel_count; i++)
        if (cuda_kernels[i]->takes.op == op && strcmp(cuda_kernels[i]->takes.name, family) == 0) return i;
    return 0;
}

/* Returns whether the environment variable ATTN_CUDA_COPIES is "threads". A kernel that exists in two variants, with
 * and without TMA, then runs without TMA, so that tests can compare the two variants. */
bool copies_by_threads()
{
    const char *copies = getenv("ATTN_CUDA_COPIES");
    return copies && strcmp(copies, "threads") == 0;
}

/* Returns the longest time in seconds that a step (a part of a long problem) may take. The environment variable
 * ATTN_CUDA_STEP_US=N sets it to N microseconds, so that tests divide even small problems into steps. */
double step_seconds()
{
    const char *microseconds = getenv("ATTN_CUDA_STEP_US");
    const double seconds = microseconds ? atof(microseconds) / 1e6 : 0;
    return seconds > 0 ? seconds : STEP_SECONDS;
}

void list_kernels(device *d)
{
    const int compute = d->chip.major * 10 + d->chip.minor;
    d->chip.forward_kernels = cuda_kernels + first_kernel(ATTN_OP_FORWARD);
    d->chip.kernels_end = cuda_kernels + cuda_kernel_count;
    attn_capabilities *const can = &d->base.can;
    for (int i = 0; i < cuda_kernel_count && can->kernel_count < ATTN_MOST_KERNELS; i++) {
        const cuda_kernel *k = cuda_kernels[i];
        if (i < first_kernel(k->takes.op)) continue;
        if (compute >= k->least_compute && compute <= k->most_compute) can->kernels[can->kernel_count++] = &k->takes;
    }
    can->facts = &d->chip;
    can->facts_bytes = sizeof d->chip;
}

PFN_cuStreamWriteValue32_v11070 word_writer()
{
    PFN_cuStreamWriteValue32_v11070 write = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", (void **)&write, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    return write;
}

int attribute(cudaDeviceAttr which, int index)
{
    int value = 0;
    if (cudaDeviceGetAttribute(&value, which, index) == cudaSuccess) return value;
    cudaGetLastError();
    return 0;
}

attn_status device_open(int index, const attn_device_options *options, attn_device **opened, attn_error *err)
{
    size_t free_bytes = 0, total_bytes = 0;
    attn_status status;
    device *d = (device *)calloc(1, sizeof *d);
    if (!d) return attn_fail(err, ATTN_NO_MEMORY, "", "cuda: out of memory");
    d->base.backend = &attn_backend_cuda;
    d->base.index = index;
    status = check(d, cudaSetDevice(index), "cudaSetDevice", err);
    if (status == ATTN_OK)
        status = check(d, cudaGetDeviceProperties(&d->properties, index), "cudaGetDeviceProperties", err);
    if (status == ATTN_OK) status = check(d, cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo", err);
    if (status == ATTN_OK && d->properties.major < 8)
        status = attn_fail(err, ATTN_UNSUPPORTED, "", "cuda:%d is %s with compute capability %d.%d; 8.0 is the least",
                           index, d->properties.name, d->properties.major, d->properties.minor);
    if (status == ATTN_OK && QUICK_BUILD)
        status = attn_fail(err, ATTN_UNSUPPORTED, "",
                           "cuda: this program was built with CUDA_QUICK=1, which only shows "
                           "that the kernels compile; build it without CUDA_QUICK");
    if (status != ATTN_OK) {
        free(d);
        return status;
    }
    pthread_mutex_init(&d->lock, nullptr);
    d->chip.major = d->properties.major;
    d->chip.minor = d->properties.minor;
    d->chip.multiprocessors = d->properties.multiProcessorCount;
    d->chip.shared_bytes = (int)d->properties.sharedMemPerBlockOptin;
    d->chip.copies_by_threads = copies_by_threads();
    d->chip.step_seconds = step_seconds();
    d->core_khz = attribute(cudaDevAttrClockRate, index);
    d->memory_khz = attribute(cudaDevAttrMemoryClockRate, index);
    d->memory_bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
    list_kernels(d);
    d->write_word = d->properties.unifiedAddressing ? word_writer() : nullptr;
    d->memory_limit = options && options->memory_bytes ? options->memory_bytes
                                                       : (int64_t)(MEMORY_SHARE * (double)free_bytes);
    *opened = &d->base;
    return ATTN_OK;
}

block *kept_blocks(device *d);
void give_back(block *b);

void device_close(attn_device *base)
{
    device *d = device_of(base);
    attn_error ignored;
    if (enter(d, &ignored) == ATTN_OK) {
        give_back(kept_blocks(d));
        give_back(d->live);
    }
    pthread_mutex_destroy(&d->lock);
    free(d);
}

void describe_peak(const device *d, attn_device_info *info)
{
    const int compute = d->chip.major * 10 + d->chip.minor;
    if (d->core_khz <= 0 || d->memory_khz <= 0 || d->memory_bits <= 0) return;
    for (const auto &row : tensor_cores)
        if (row.compute == compute) info->peak_flops = 1e3 * d->core_khz * row.a_clock * d->chip.multiprocessors;
    /* memory transfers data twice per clock cycle */
    info->peak_bytes = 2.0 * 1e3 * d->memory_khz * d->memory_bits / 8;
    snprintf(info->peak_from, sizeof info->peak_from,
             "%d multiprocessors at %.2f GHz, dense 16-bit products; %d bits of memory at 2 x %.2f GHz",
             d->chip.multiprocessors, d->core_khz / 1e6, d->memory_bits, d->memory_khz / 1e6);
}

void describe(const attn_device *base, attn_device_info *info)
{
    device *d = const_cast<device *>(device_of(base));
    memset(info, 0, sizeof *info);
    pthread_mutex_lock(&d->lock);
    info->memory_used = d->memory_used;
    pthread_mutex_unlock(&d->lock);
    info->backend = "cuda";
    snprintf(info->name, sizeof info->name, "cuda:%d", base->index);
    snprintf(info->description, sizeof info->description, "%.60s, sm_%d%d, %.0f GiB", d->properties.name, d->chip.major,
             d->chip.minor, (double)d->properties.totalGlobalMem / (1 << 30));
    info->fastest_flops = FASTEST_FLOPS;
    info->fastest_scores = FASTEST_SCORES;
    describe_peak(d, info);
    info->units = d->chip.multiprocessors;
    info->streams = STREAMS;
    info->reads_staging = d->properties.unifiedAddressing && d->properties.canMapHostMemory;
    info->memory_total = (int64_t)d->properties.totalGlobalMem;
    info->memory_limit = d->memory_limit;
}

/* ---- Allocating memory of a device and of the host --------------------------------------------------------------- */

int64_t class_bytes(int size_class)
{
    const int64_t power = INT64_C(1) << (CLASS_LEAST_LOG2 + size_class / 2);
    return size_class % 2 ? power + power / 2 : power;
}

int class_of(size_t bytes)
{
    int size_class = 0;
    while (size_class < CLASSES && (uint64_t)class_bytes(size_class) < bytes) size_class++;
    return size_class;
}

/* Empties the lists of freed blocks, and returns the blocks as one list for give_back(). The caller holds the lock. */
block *kept_blocks(device *d)
{
    block *list = nullptr;
    for (int c = 0; c < CLASSES; c++) {
        while (d->idle[c]) {
            block *b = d->idle[c];
            d->idle[c] = b->next;
            d->memory_taken -= class_bytes(c);
            b->next = list;
            list = b;
        }
    }
    return list;
}

/* Frees the blocks of a list. The caller must not hold the lock, because cudaFree waits for the device. */
void give_back(block *b)
{
    while (b) {
        block *next = b->next;
        cudaFree(b->memory);
        free(b);
        b = next;
    }
}

/* Allocates a block from the driver. The caller has already counted its size in memory_taken. */
attn_status allocate(device *d, int size_class, block **taken, attn_error *err)
{
    block *b = (block *)calloc(1, sizeof *b);
    if (!b) return attn_fail(err, ATTN_NO_MEMORY, "", "cuda: out of memory");
    b->size_class = size_class;
    cudaError_t code = cudaMalloc(&b->memory, (size_t)class_bytes(size_class));
    if (code == cudaErrorMemoryAllocation) {
        /* the driver has no memory left, perhaps because of another process: free the blocks kept for reuse and try
         * again */
        cudaGetLastError();
        pthread_mutex_lock(&d->lock);
        block *const kept = kept_blocks(d);
        pthread_mutex_unlock(&d->lock);
        give_back(kept);
        code = cudaMalloc(&b->memory, (size_t)class_bytes(size_class));
    }
    const attn_status status = check(d, code, "cudaMalloc", err);
    if (status == ATTN_OK) *taken = b;
    else free(b);
    return status;
}

attn_status device_alloc(attn_device *base, size_t bytes, void **memory, attn_error *err)
{
    device *d = device_of(base);
    const int size_class = class_of(bytes ? bytes : 1);
    const int64_t size = size_class == CLASSES ? 0 : class_bytes(size_class);
    block *b = nullptr, *kept = nullptr;
    attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    pthread_mutex_lock(&d->lock);
    const bool fits = size_class < CLASSES && size <= d->memory_limit - d->memory_used;
    if (fits) {
        d->memory_used += size;
        b = d->idle[size_class];
        if (b) d->idle[size_class] = b->next;
        else {
            if (d->memory_taken + size > d->memory_limit) kept = kept_blocks(d);
            d->memory_taken += size;
        }
    }
    pthread_mutex_unlock(&d->lock);
    if (!fits)
        return attn_fail(err, ATTN_NO_MEMORY, "", "cuda:%d: %zu bytes are not left of %lld", base->index, bytes,
                         (long long)d->memory_limit);
    give_back(kept);
    if (!b) status = allocate(d, size_class, &b, err);
    pthread_mutex_lock(&d->lock);
    if (status == ATTN_OK) {
        b->next = d->live;
        d->live = b;
        *memory = b->memory;
    } else {
        d->memory_used -= size;
        d->memory_taken -= size;
    }
    pthread_mutex_unlock(&d->lock);
    return status;
}

void device_free(attn_device *base, void *memory)
{
    device *d = device_of(base);
    if (!memory) return;
    pthread_mutex_lock(&d->lock);
    /* a linear search is fast enough: the list is short, and callers usually free their youngest blocks first */
    for (block **link = &d->live; *link; link = &(*link)->next) {
        block *b = *link;
        if (b->memory != memory) continue;
        *link = b->next;
        b->next = d->idle[b->size_class];
        d->idle[b->size_class] = b;
        d->memory_used -= class_bytes(b->size_class);
        break;
    }
    pthread_mutex_unlock(&d->lock);
}

attn_status staging_alloc(attn_device *base, size_t bytes, void **memory, attn_error *err)
{
    device *d = device_of(base);
    attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    return check(d, cudaHostAlloc(memory, bytes, cudaHostAllocPortable), "cudaHostAlloc", err);
}

void staging_free(attn_device *base, void *memory, size_t bytes)
{
    (void)base, (void)bytes;
    cudaFreeHost(memory);
}

/* ---- Memory of other processes, imported by a handle ------------------------------------------------------------- */

/* Returns the error for a memory handle (CUDA IPC) that the driver refused. If the device still works, the client's
 * handle was wrong. This holds even for an error code that means a lost device when another call returns it. */
attn_status refuse_import(device *d, cudaError_t code, attn_error *err)
{
    size_t free_bytes, total_bytes;
    cudaGetLastError();
    const attn_status status = check(d, cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo", err);
    if (status != ATTN_OK) return status;
    return attn_fail(err, code == cudaErrorMemoryAllocation ? ATTN_NO_MEMORY : ATTN_INVALID, "",
                     "cuda: cudaIpcOpenMemHandle: %s (error %d)", cuda_error_of((int)code).name, (int)code);
}

attn_status check_import(device *d, void *memory, size_t bytes, attn_error *err)
{
    cudaPointerAttributes attributes;
    PFN_cuMemGetAddressRange_v3020 address_range = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUdeviceptr base = 0;
    size_t size = 0;
    attn_status status = check(d, cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes", err);
    if (status != ATTN_OK) return status;
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != d->base.index)
        return attn_fail(err, ATTN_INVALID, "", "cuda: the memory is of device %d, not of device %d", attributes.device,
                         d->base.index);
    status = check(d,
                   cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", (void **)&address_range, 3020,
                                                    cudaEnableDefault, &found),
                   "cuMemGetAddressRange", err);
    if (status != ATTN_OK) return status;
    if (!address_range) return attn_fail(err, ATTN_UNSUPPORTED, "", "cuda: the driver has no cuMemGetAddressRange");
    /* the driver's error numbers are the same as those of the CUDA runtime, so check() can take them */
    status = check(d, (cudaError_t)address_range(&base, &size, (CUdeviceptr)memory), "cuMemGetAddressRange", err);
    if (status != ATTN_OK) return status;
    size -= (size_t)((CUdeviceptr)memory - base);
    if (bytes <= size) return ATTN_OK;
    return attn_fail(err, ATTN_INVALID, "", "cuda: the allocation has %zu bytes, not %zu", size, bytes);
}

attn_status import_memory(attn_device *base, const uint8_t *handle, size_t bytes, void **memory, attn_error *err)
{
    device *d = device_of(base);
    cudaIpcMemHandle_t lent;
    static_assert(sizeof lent == ATTN_HANDLE_BYTES, "a handle of CUDA");
    attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    memcpy(&lent, handle, sizeof lent);
    const cudaError_t code = cudaIpcOpenMemHandle(memory, lent, cudaIpcMemLazyEnablePeerAccess);
    if (code != cudaSuccess) {
        *memory = nullptr;
        return refuse_import(d, code, err);
    }
    status = check_import(d, *memory, bytes, err);
    if (status != ATTN_OK) {
        cudaIpcCloseMemHandle(*memory);
        *memory = nullptr;
    }
    return status;
}

void release_import(attn_device *base, void *memory)
{
    device *d = device_of(base);
    attn_error ignored;
    if (enter(d, &ignored) == ATTN_OK) (void)check(d, cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle", &ignored);
}

/* ---- Pinning memory of this process ------------------------------------------------------------------------------ */

attn_status pin(attn_device *base, void *memory, size_t bytes, attn_error *err)
{
    const attn_status status = enter(device_of(base), err);
    if (status != ATTN_OK) return status;
    const cudaError_t code = cudaHostRegister(memory, bytes, cudaHostRegisterPortable);
    if (code == cudaSuccess) return ATTN_OK;
    cudaGetLastError();
    return attn_fail(err, ATTN_UNSUPPORTED, "", "cuda: cudaHostRegister: %s (error %d)", cuda_error_of((int)code).name,
                     (int)code);
}

void unpin(attn_device *base, void *memory)
{
    attn_error ignored;
    (void)enter(device_of(base), &ignored);
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

/* ---- Planning: which kernel computes a problem ------------------------------------------------------------------- */

const size_t WORKSPACE_ALIGN = 1024; /* in bytes; TMA and its swizzles need this alignment */

size_t aligned(size_t bytes)
{
    return (bytes + WORKSPACE_ALIGN - 1) / WORKSPACE_ALIGN * WORKSPACE_ALIGN;
}

bool is_decode(const attn_plan *plan)
{
    return plan->kernel == &decode_forward.takes || plan->kernel == &wide_decode_forward.takes;
}

/* Returns the number of bytes for the marks of rows that a later launch must compute (cuda_args.rows_later). Returns 0
 * if the kernels compute all rows themselves. */
size_t mark_bytes(const cuda_chip *chip, const attn_plan *plan)
{
    const attn_geometry &g = plan->geometry;
    const bool backward = plan->problem->op == ATTN_OP_BACKWARD;
    const double rows = (double)query_rows(g.dims) * LEFT_COST *
                        row_seconds(chip, g, backward ? BACKWARD_PAIR : FORWARD_PAIR);
    if (rows < 2 * chip->step_seconds || is_decode(plan) || plan->kernel == &simple_forward.takes ||
        plan->kernel == &simple_backward.takes || plan->kernel == &simple_observe.takes)
        return 0;
    /* An observe (statistics of attention weights) needs only the header of MARKS_HEAD bytes, because its kernels mark
     * rows in their own workspace. */
    if (plan->problem->op == ATTN_OP_OBSERVE) return MARKS_HEAD;
    return (size_t)(MARKS_HEAD + query_rows(g.dims) + (backward ? key_rows(g.dims) : 0));
}

/* A plan points to the first member of its kernel's entry in cuda_kernels[]. */
const cuda_kernel *kernel_of(const attn_plan *plan)
{
    return reinterpret_cast<const cuda_kernel *>(plan->kernel);
}

bool plan(const attn_capabilities *can, attn_plan *plan)
{
    const cuda_chip *const chip = static_cast<const cuda_chip *>(can->facts);
    if (!kernel_of(plan)->plan(chip, plan)) return false;
    const size_t marks = mark_bytes(chip, plan);
    if (marks) plan->workspace_bytes = aligned(plan->workspace_bytes) + aligned(marks);
    return true;
}

attn_status workspace_bytes(const attn_capabilities *, const attn_plan *plans, int count, size_t *bytes, attn_error *)
{
    *bytes = 0;
    for (int i = 0; i < count; i++) *bytes += aligned(plans[i].workspace_bytes);
    return ATTN_OK;
}

/* ---- Streams, and the work on them ------------------------------------------------------------------------------- */

attn_status note(attn_stream *base, attn_error *err)
{
    device *d = device_of(base->device);
    stream *s = stream_of(base);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    s->after_decode = false;
    if (!s->note || d->write_word((CUstream)s->cuda, (CUdeviceptr)s->note, s->notes + 1, 0) != CUDA_SUCCESS)
        return attn_fail(err, ATTN_UNSUPPORTED, "", "cuda:%d: no notes", base->device->index);
    s->notes++;
    return ATTN_OK;
}

bool noted(const attn_stream *base)
{
    const stream *s = reinterpret_cast<const stream *>(base);
    return __atomic_load_n(s->note, __ATOMIC_ACQUIRE) == s->notes;
}

void stream_close(attn_stream *base)
{
    stream *s = stream_of(base);
    attn_error ignored;
    if (enter(device_of(base->device), &ignored) == ATTN_OK) {
        for (cudaEvent_t mark : s->marks)
            if (mark) cudaEventDestroy(mark);
        if (s->cuda) cudaStreamDestroy(s->cuda);
        if (s->note) cudaFreeHost((void *)s->note);
        if (s->counter) cudaFree(s->counter);
        if (s->found) cudaFreeHost(s->found);
    }
    free(s);
}

attn_status stream_open(attn_device *base, attn_stream **opened, attn_error *err)
{
    device *d = device_of(base);
    attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    stream *s = (stream *)calloc(1, sizeof *s);
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "cuda: out of memory");
    s->base.device = base;
    status = check(d, cudaStreamCreateWithFlags(&s->cuda, cudaStreamNonBlocking), "cudaStreamCreate", err);
    for (int i = 0; i < ATTN_MARKS && status == ATTN_OK; i++)
        status = check(d, cudaEventCreate(&s->marks[i]), "cudaEventCreate", err);
    if (status == ATTN_OK) status = check(d, cudaMalloc((void **)&s->counter, COUNTER_BYTES), "cudaMalloc", err);
    if (status == ATTN_OK) status = check(d, cudaMemset(s->counter, 0, COUNTER_BYTES), "cudaMemset", err);
    if (status == ATTN_OK)
        status = check(d, cudaHostAlloc((void **)&s->found, 2, cudaHostAllocPortable), "cudaHostAlloc", err);
    if (status == ATTN_OK) s->found[0] = s->found[1] = 0;
    if (status == ATTN_OK && d->write_word) {
        status = check(d, cudaHostAlloc((void **)&s->note, sizeof *s->note, cudaHostAllocPortable), "cudaHostAlloc",
                       err);
        if (status == ATTN_OK) *s->note = 0;
    }
    if (status != ATTN_OK) {
        stream_close(&s->base);
        return status;
    }
    *opened = &s->base;
    return ATTN_OK;
}

attn_status copy(attn_stream *base, void *to, const void *from, size_t bytes, attn_direction direction, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK || bytes == 0) return status;
    stream_of(base)->after_decode = false;
    return check(d,
                 cudaMemcpyAsync(to, from, bytes,
                                 direction == ATTN_TO_DEVICE ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                 stream_of(base)->cuda),
                 "cudaMemcpyAsync", err);
}

attn_status copy_rows(attn_stream *base, const attn_rows *rows, attn_direction direction, attn_error *err)
{
    const size_t most = INT32_MAX;
    device *d = device_of(base->device);
    attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    stream_of(base)->after_decode = false;
    if (rows->to_pitch <= most && rows->from_pitch <= most)
        return check(d,
                     cudaMemcpy2DAsync(rows->to, rows->to_pitch, rows->from, rows->from_pitch, rows->width, rows->count,
                                       direction == ATTN_TO_DEVICE ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                       stream_of(base)->cuda),
                     "cudaMemcpy2DAsync", err);
    for (size_t n = 0; n < rows->count && status == ATTN_OK; n++)
        status = copy(base, (char *)rows->to + n * rows->to_pitch, (const char *)rows->from + n * rows->from_pitch,
                      rows->width, direction, err);
    return status;
}

attn_status moves(attn_stream *base, const attn_move *list, int64_t count, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    stream_of(base)->after_decode = false;
    return status == ATTN_OK ? check(d, cuda_moves(stream_of(base)->cuda, list, count), "moves", err) : status;
}

/* Lets device `d` (the thread's current device) access the memory of device number `index` directly. If the driver
 * refuses, copies between the two devices go through the host's memory. */
void allow_peer(device *d, int index)
{
    const uint64_t bit = index < 64 ? UINT64_C(1) << index : 0;
    int can = 0;
    if (bit == 0 || (d->peers.fetch_or(bit, std::memory_order_relaxed) & bit)) return;
    if (cudaDeviceCanAccessPeer(&can, d->base.index, index) == cudaSuccess && can)
        (void)cudaDeviceEnablePeerAccess(index, 0);
    /* clears CUDA's last error, which a failed call of cudaDeviceEnablePeerAccess() may have set */
    cudaGetLastError();
}

attn_status copy_peer(attn_stream *base, void *to, const attn_device *source, const void *from, size_t bytes,
                      attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    if (device_of(source)->lost.load(std::memory_order_relaxed))
        return attn_fail(err, ATTN_CANCELLED, "", "cuda:%d was lost to an earlier error", source->index);
    allow_peer(d, source->index);
    stream_of(base)->after_decode = false;
    return check(d, cudaMemcpyPeerAsync(to, d->base.index, from, source->index, bytes, stream_of(base)->cuda),
                 "cudaMemcpyPeerAsync", err);
}

attn_status sum(attn_stream *base, const attn_sum *parts, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    stream_of(base)->after_decode = false;
    return status == ATTN_OK ? check(d, cuda_sum(stream_of(base)->cuda, parts), "sum", err) : status;
}

attn_status merge(attn_stream *base, const attn_merge_plan *plan, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    stream_of(base)->after_decode = false;
    return status == ATTN_OK ? check(d, cuda_merge(stream_of(base)->cuda, plan), "merge", err) : status;
}

attn_status sum_lse(attn_stream *base, const attn_problem *problem, const attn_lse_look *look, double *found,
                    attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    stream_of(base)->after_decode = false;
    return check(d, cuda_sum_lse(stream_of(base)->cuda, problem, look, found), "sum_lse", err);
}

attn_status wait(attn_stream *base, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    return check(d, cudaStreamSynchronize(stream_of(base)->cuda), "cudaStreamSynchronize", err);
}

memory_range range_of(const attn_tensor &t)
{
    if (t.rank == 0 || !t.data) return { nullptr, nullptr };
    int64_t last = 0;
    for (int axis = 0; axis < t.rank; axis++) last += (t.shape[axis] - 1) * t.stride[axis];
    const char *const begin = (const char *)t.data;
    return { begin, begin + (last + 1) * (int64_t)attn_dtype_bytes(t.dtype) };
}

/* Returns whether the problem reads nothing that the stream's previous kernel writes (s->written). Its reads may then
 * start before that kernel ends. */
bool reads_no_results(const stream *s, const attn_problem *p)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!attn_reads(p, (attn_tensor_id)id)) continue;
        const memory_range read = range_of(p->tensor[id]);
        for (const memory_range &written : s->written)
            if (read.begin < written.end && written.begin < read.end) return false;
    }
    return true;
}

bool has_steps(const device *d, const attn_plan *plan)
{
    return tile_seconds(&d->chip, plan) > d->chip.step_seconds || mark_bytes(&d->chip, plan) > 0 ||
           plan->kernel == &simple_forward.takes || plan->problem->op != ATTN_OP_FORWARD;
}

/* Queues those steps (launches) of a problem that chip->steps selects. The steps of the problem's kernel come first,
 * and then the steps that compute marked rows (rows that the kernel could not compute). In a short problem
 * (looks_for_rows() is false) marked rows are only reported by left_rows(). */
cudaError_t launch_steps(device *d, cuda_chip *chip, stream *s, const attn_plan *plan, char *scratch)
{
    const size_t marks = chip->steps ? mark_bytes(&d->chip, plan)
                                     /* without steps (attn_run()) no rows are marked: the kernel computes all rows
                                      * itself */
                                     : 0;
    const bool forward = plan->problem->op == ATTN_OP_FORWARD, by_rows = plan->kernel == &simple_forward.takes;
    if (marks) {
        uint8_t *const head = (uint8_t *)scratch + plan->workspace_bytes - aligned(marks);
        const bool looks = s->every_row || looks_for_rows(chip, plan);
        chip->rows_later = head + MARKS_HEAD;
        chip->keys_later = forward ? nullptr : chip->rows_later + query_rows(plan->geometry.dims);
        chip->found = looks ? s->found : nullptr;
        chip->rows_found = looks ? chip->rows_later - 1 : s->found + 1;
        if (looks && takes_step(chip, 0)) {
            const cudaError_t code = cudaMemsetAsync(head, 0, marks, s->cuda);
            if (code != cudaSuccess) return code;
        }
    }
    const auto kernel = kernel_of(plan);
    const auto launch = [&](const cuda_chip *part) { return kernel->launch(part, s->cuda, plan, scratch); };
    const double seconds = tile_seconds(chip, plan);
    cudaError_t code = cudaSuccess;
    if (forward && kernel->shares) code = in_shares(chip, seconds, launch);
    else if (!forward || by_rows || takes_step(chip, seconds)) code = launch(chip);
    if (code != cudaSuccess) return code;
    if (forward && marks) simple_rows_left(chip, plan, s->cuda);
    return cudaPeekAtLastError();
}

/* Returns the size of the parts (batch rows, key/value heads) into which a long problem is divided. A gradient's sum
 * over batch rows or heads always lies within one part. The division therefore changes no bit of the results, except in
 * a backward without the option `deterministic`. */
attn_part part_of(const device *d, const attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    const attn_dims &dims = plan->geometry.dims;
    const double steps = tile_seconds(&d->chip, plan) / d->chip.step_seconds;
    attn_part part = { 0, dims.B, 0, dims.Hk };
    if (steps < 1.5 || p->op == ATTN_OP_OBSERVE || is_decode(plan) || plan->kernel == &simple_forward.takes ||
        plan->kernel == &simple_backward.takes)
        return part;
    const bool heads = !p->dbias.rank || p->dbias.shape[1] == dims.H,
               batches = !dims.packed && (dims.B == 1 || ((!p->dbias.rank || p->dbias.shape[0] > 1) &&
                                                          p->dalibi_slopes.rank != 1 && !p->dsinks.rank));
    const auto share = [&](int64_t count) { return attn_max64((int64_t)((double)count / steps), 1); };
    if (heads && (!batches || dims.Hk >= dims.B)) part.heads = share(dims.Hk);
    else if (batches) part.batches = share(dims.B);
    return part;
}

/* Plans `some`, which is a part of the problem of `whole`, for the kernel of `whole`, and writes the plan to *plan.
 * Returns false if the kernel cannot compute the part, or if the part needs more workspace than the whole problem. */
bool plan_part(const device *d, const attn_plan *whole, const attn_problem *some, attn_plan *plan)
{
    *plan = *whole;
    plan->problem = some;
    plan->geometry = attn_geometry_of(some);
    plan->workspace_bytes = 0;
    if (!kernel_of(whole)->plan(&d->chip, plan)) return false;
    const size_t marks = mark_bytes(&d->chip, plan);
    if (marks) plan->workspace_bytes = aligned(plan->workspace_bytes) + aligned(marks);
    return plan->workspace_bytes <= whole->workspace_bytes;
}

cudaError_t launch_parts(device *d, cuda_chip *chip, stream *s, const attn_plan *plan, char *scratch)
{
    const attn_dims &dims = plan->geometry.dims;
    attn_part part = part_of(d, plan);
    const attn_part each = part;
    if (part.batches == dims.B && part.heads == dims.Hk) return launch_steps(d, chip, s, plan, scratch);
    for (part.first_batch = 0; part.first_batch < dims.B; part.first_batch += each.batches)
        for (part.first_head = 0; part.first_head < dims.Hk; part.first_head += each.heads) {
            part.batches = attn_min64(each.batches, dims.B - part.first_batch);
            part.heads = attn_min64(each.heads, dims.Hk - part.first_head);
            const attn_problem some = attn_part_of(plan->problem, &part);
            attn_plan some_plan;
            if (!plan_part(d, plan, &some, &some_plan)) return cudaErrorInvalidConfiguration;
            const cudaError_t code = launch_steps(d, chip, s, &some_plan, scratch);
            if (code != cudaSuccess) return code;
        }
    return cudaSuccess;
}

cudaError_t launch(device *d, stream *s, const attn_plan *plan, char *scratch, cuda_steps *steps)
{
    cuda_chip chip = d->chip;
    const attn_dims &dims = plan->geometry.dims;
    const bool decodes = is_decode(plan);
    chip.counter = s->counter;
    chip.steps = steps;
    if ((attn_has_padding(&plan->geometry) || plan->problem->op == ATTN_OP_OBSERVE) && takes_step(&chip, 0)) {
        const cudaError_t code = cuda_fill_padding(s->cuda, plan);
        if (code != cudaSuccess) return code;
    }
    if (has_steps(d, plan)) {
        s->after_decode = false;
        return launch_parts(d, &chip, s, plan, scratch);
    }
    if (!takes_step(&chip, tile_seconds(&chip, plan))) return cudaSuccess;
    chip.after_decode = s->after_decode && reads_no_results(s, plan->problem);
    /* a decode without query rows queues no kernel, so the stream's last kernel stays the same */
    if (!decodes || dims.B * dims.H * dims.Sq > 0) {
        s->after_decode = decodes;
        s->written[0] = range_of(plan->problem->out);
        s->written[1] = range_of(plan->problem->lse);
    }
    return kernel_of(plan)->launch(&chip, s->cuda, plan, scratch);
}

/* Queues the problems of `plans` on the stream. `steps` selects the steps (parts of a long problem) to queue; NULL: all
 * steps. */
attn_status run_with(stream *s, const attn_plan *plans, int count, char *scratch, cuda_steps *steps, attn_error *err)
{
    device *d = device_of(s->base.device);
    char *const begin = scratch;
    for (int i = 0; i < count && !(steps && steps->more); i++) {
        if (attn_is_cancelled(s->base.cancel)) return attn_given_up(err);
        /* An empty problem ends a group of problems. The next group runs after it, and uses the same workspace (see
         * attn_workspace()). */
        if (attn_is_empty(plans[i].problem)) {
            scratch = begin;
            continue;
        }
        const char *name = plans[i].kernel->name;
        attn_status status = check(d, launch(d, s, &plans[i], scratch, steps), name, err);
        if (status == ATTN_OK) status = check(d, cudaGetLastError(), name, err);
        if (status != ATTN_OK) return status;
        if (scratch) scratch += aligned(plans[i].workspace_bytes);
    }
    return ATTN_OK;
}

attn_status run(attn_stream *base, const attn_plan *plans, int count, void *workspace, attn_error *err)
{
    device *d = device_of(base->device);
    void *own = nullptr;
    size_t bytes = 0;
    attn_status status = enter(d, err);
    if (status == ATTN_OK && !workspace) {
        status = workspace_bytes(&base->device->can, plans, count, &bytes, err);
        if (status == ATTN_OK && bytes) status = device_alloc(base->device, bytes, &own, err);
    }
    if (status == ATTN_OK)
        status = run_with(stream_of(base), plans, count, (char *)(own ? own : workspace), nullptr, err);
    if (own) {
        attn_error late;
        const attn_status waited = wait(base, &late);
        if (status == ATTN_OK && waited != ATTN_OK) {
            status = waited;
            if (err) *err = late;
        }
        device_free(base->device, own);
    }
    return status;
}

/* Initializes *steps for a call of run_some() or truth(). `done` is the number of steps that earlier calls for the same
 * problem have queued. */
attn_status begin_steps(attn_stream *base, int64_t done, cuda_steps *steps, attn_error *err)
{
    device *d = device_of(base->device);
    *steps = { done, 0, SOME_STEPS * d->chip.step_seconds, false, false, false, false };
    attn_status status = enter(d, err);
    if (status == ATTN_OK && done > 0) {
        const cudaError_t code = cudaStreamQuery(stream_of(base)->cuda);
        steps->idle = code == cudaSuccess;
        if (code == cudaErrorNotReady) cudaGetLastError();
        else status = check(d, code, "cudaStreamQuery", err);
    }
    return status;
}

attn_status run_some(attn_stream *base, const attn_plan *plans, int count, void *workspace, int64_t *step,
                     attn_error *err)
{
    const int64_t kind = *step & ATTN_EVERY_ROW;
    cuda_steps steps;
    attn_status status = begin_steps(base, *step - kind, &steps, err);
    stream_of(base)->every_row = kind != 0;
    if (status == ATTN_OK) status = run_with(stream_of(base), plans, count, (char *)workspace, &steps, err);
    *step = steps.more ? steps.done | kind : ATTN_NO_MORE_STEPS;
    return status;
}

attn_status truth_need(const attn_capabilities *can, const attn_problem *problem, attn_truth_cost *cost,
                       attn_error *err)
{
    if (cuda_truth_need((const cuda_chip *)can->facts, problem, cost)) return ATTN_OK;
    return attn_fail(err, ATTN_TOO_LARGE, "", "the sizes of the problem in float64 do not fit in 63 bits");
}

attn_status truth(attn_stream *base, const attn_problem *problem, const attn_truth *results, void *workspace,
                  int64_t *step, attn_error *err)
{
    device *d = device_of(base->device);
    cuda_steps steps;
    attn_status status = begin_steps(base, *step, &steps, err);
    cuda_chip chip = d->chip;
    chip.steps = &steps;
    stream_of(base)->after_decode = false;
    if (status == ATTN_OK)
        status = check(d, cuda_truth(&chip, stream_of(base)->cuda, problem, results, workspace), "truth", err);
    *step = steps.more ? steps.done : ATTN_NO_MORE_STEPS;
    return status;
}

attn_status truth_compare(attn_stream *base, const attn_problem *problem, const attn_truth *truth,
                          attn_truth_distance *distances, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    stream_of(base)->after_decode = false;
    if (status != ATTN_OK) return status;
    return check(d, cuda_truth_compare(stream_of(base)->cuda, problem, truth, distances), "truth_compare", err);
}

bool left_rows(attn_stream *base)
{
    /* kernels on the GPU write this byte */
    volatile uint8_t *const left = stream_of(base)->found + 1;
    const bool any = *left;
    *left = 0;
    return any;
}

attn_status mark(attn_stream *base, int slot, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    if (status != ATTN_OK) return status;
    return check(d, cudaEventRecord(stream_of(base)->marks[slot], stream_of(base)->cuda), "cudaEventRecord", err);
}

double between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, stream_of(from)->marks[from_slot], stream_of(to)->marks[to_slot]) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return 1e3 * (double)ms;
}

double elapsed_us(attn_stream *stream, int from_slot, int to_slot)
{
    return between_us(stream, from_slot, stream, to_slot);
}

attn_status done(attn_stream *base, bool *is_done, attn_error *err)
{
    device *d = device_of(base->device);
    const attn_status status = enter(d, err);
    *is_done = false;
    if (status != ATTN_OK) return status;
    const cudaError_t code = cudaStreamQuery(stream_of(base)->cuda);
    if (code == cudaErrorNotReady) {
        cudaGetLastError();
        return ATTN_OK;
    }
    *is_done = code == cudaSuccess;
    return check(d, code, "cudaStreamQuery", err);
}

} // namespace

extern "C" const attn_backend attn_backend_cuda = {
    "cuda",       true,          device_count,  device_open,  device_close,  describe,
    device_alloc, device_free,   staging_alloc, staging_free, plan,          workspace_bytes,
    stream_open,  stream_close,  copy,          copy_rows,    moves,         copy_peer,
    sum,          run,           merge,         mark,         elapsed_us,    done,
    wait,         between_us,    note,          noted,        import_memory, release_import,
    pin,          unpin,         sum_lse,       run_some,     left_rows,     truth_need,
    truth,        truth_compare,
};
