/* kernels.h: the table of CUDA kernels, and the functions that a kernel provides for device.cu.
 *
 * A row of the table says what a kernel computes (attn_kernel: operation, dtypes, head dims, features) and on which
 * compute capabilities, and has the functions plan() and launch(). The first row that can compute a problem is used, so
 * fast kernels stand before general ones. A problem with a feature that the row does not list goes to another row. To
 * add a kernel, add a row to cuda_kernels[] in kernels.cu. */
#ifndef ATTN_CUDA_KERNELS_H
#define ATTN_CUDA_KERNELS_H

#include <atomic>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "kernels/merge.h"

struct cuda_kernel;

/* Properties of the device, and options of one launch. */
struct cuda_chip {
    int major, minor;
    int multiprocessors;
    int shared_bytes; /* the largest dynamic shared memory that a block can have, in bytes */
    /* kernels skip packed sequences of at most this many rows (queries * heads of a group), because decode.cu computes
     * them */
    int decode_rows;
    /* whether threads copy tiles to shared memory even if the kernel could use TMA */
    bool copies_by_threads;
    /* whether the kernel may read its inputs before the stream's previous call ends: true if that call was a decode
     * whose results this problem does not read */
    bool after_decode;
    /* the stream's counter in device memory, from which blocks claim work tiles (sm90/layer/scheduler.cuh); NULL:
     * none */
    int *counter;
    /* bytes in which a kernel marks rows that it cannot compute on tensor cores (see cuda_args) */
    uint8_t *rows_later, *keys_later, *rows_found;
    /* A byte of the host's pinned memory, which becomes 1 if a check finds marked rows (rows that a later launch must
     * compute). NULL: this problem has no check for marked rows, and no launch that computes them. */
    uint8_t *found;
    /* The tiles are divided into `shares` equal parts, and the launch computes part number `share`. If both are 0, the
     * launch computes all tiles. */
    int share, shares;
    double step_seconds;      /* the longest time in seconds that one step may take (see cuda_steps) */
    struct cuda_steps *steps; /* selects the steps (parts of a long problem) that this call launches; NULL: all steps */
    /* the forward kernels that may be used: the entries `forward_kernels` to `kernels_end` - 1 of cuda_kernels[] */
    const struct cuda_kernel *const *forward_kernels, *const *kernels_end;
};

/* Selects the steps of a long problem that a call queues. A step is one launch, or a few that together take at most 20
 * ms. At each call, launch() goes through the same steps, and takes_step() says which of them to launch. The host can
 * therefore queue a few steps, and cancel the rest. */
struct cuda_steps {
    int64_t done; /* number of steps (launches of a long problem) that attn_run_some() has queued so far */
    /* number of the next step of the problem */
    int64_t at;
    /* seconds of work that this call of attn_run_some() may still queue; its first step is always queued */
    double seconds;
    bool more; /* whether steps (launches of a long problem) are left for the next call of attn_run_some() */
    bool any;  /* whether this call of attn_run_some() has queued a step (a launch of a long problem) */
    bool idle; /* whether all work of earlier calls of attn_run_some() had ended when this call began */
    /* whether this call has queued a check for marked rows (rows that a later launch must compute, see
     * cuda_chip.found); only the next call can read its result */
    bool looked;
};

static inline bool takes_step(const struct cuda_chip *chip, double seconds)
{
    struct cuda_steps *s = chip->steps;
    if (!s) return true;
    if (s->more || s->at++ < s->done) return false;
    if (s->any && seconds > s->seconds) {
        s->more = true;
        return false;
    }
    s->any = true;
    s->seconds -= seconds;
    s->done++;
    return true;
}

/* The default of cuda_chip.step_seconds. It is smaller in builds for the emulator, so that even their small problems
 * have several steps. */
#ifdef ATTN_STEP_SECONDS
const double STEP_SECONDS = ATTN_STEP_SECONDS;
#else
const double STEP_SECONDS = 0.02;
#endif

/* Divides `count` pieces of work, each of which takes `seconds_each`, into parts. A part takes at most step_seconds, or
 * is a single piece. Calls visit(first, count) for each part. */
template <typename F> void in_parts(const struct cuda_chip *chip, int64_t count, double seconds_each, F visit)
{
    const double fits = chip->step_seconds / seconds_each, least = (double)count / 1e9,
                 most = fits > least ? fits : least;
    const int64_t part = most < 1 ? 1 : most < (double)count ? (int64_t)most : count;
    for (int64_t first = 0; first < count; first += part) visit(first, part < count - first ? part : count - first);
}

/* Divides `count` pieces of work into steps, as in_parts() does, and calls launch(first, count) for each step that
 * chip->steps selects. */
template <typename F> void in_steps(const struct cuda_chip *chip, int64_t count, double seconds_each, F launch)
{
    in_parts(chip, count, seconds_each, [&](int64_t first, int64_t n) {
        if (takes_step(chip, (double)n * seconds_each)) launch(first, n);
    });
}

/* The tiles `first` to `end` - 1, which one launch computes. If the tiles of a head take longer than a step (about 20
 * ms), several launches share them. The number of launches does not change the bits of results. */
struct tile_range {
    int64_t first, end;
};
static inline tile_range share_of(const struct cuda_chip *chip, int64_t tiles)
{
    const int64_t shares = chip->shares > 1 ? chip->shares : 1;
    return { tiles * chip->share / shares, tiles * (chip->share + 1) / shares };
}
static inline bool is_first_share(const struct cuda_chip *chip)
{
    return chip->share == 0;
}
static inline bool is_last_share(const struct cuda_chip *chip)
{
    return chip->share + 1 >= chip->shares;
}

/* Divides work of `seconds` into launches of about one step (20 ms) each, and returns the number of launches. Work of
 * less than 1.5 steps makes one launch. */
static inline int shares_of(const struct cuda_chip *chip, double seconds)
{
    const double steps = seconds / chip->step_seconds, most = 1 << 20;
    return steps < 1.5 ? 1 : steps < most ? (int)steps + 1 : (int)most;
}

/* Divides work that takes `seconds` into equal shares, and calls launch(part) for each share that chip->steps selects.
 * `part` is a copy of *chip with the share's number. */
template <typename F> cudaError_t in_shares(const struct cuda_chip *chip, double seconds, F launch)
{
    struct cuda_chip part = *chip;
    cudaError_t code = cudaSuccess;
    part.shares = shares_of(chip, seconds);
    for (part.share = 0; part.share < part.shares && code == cudaSuccess; part.share++)
        if (takes_step(&part, seconds / part.shares)) code = launch((const struct cuda_chip *)&part);
    return code;
}

/* Divides the work of before() into shares, as in_shares() does, and after that the work of launch() in the same way.
 * If launch() has only one share, before() and launch() together are one step. */
template <typename F, typename G>
cudaError_t in_shares_after(const struct cuda_chip *chip, double seconds_before, F before, double seconds, G launch)
{
    if (shares_of(chip, seconds) > 1) {
        const cudaError_t code = in_shares(chip, seconds_before, before);
        return code == cudaSuccess ? in_shares(chip, seconds, launch) : code;
    }
    if (!takes_step(chip, seconds)) return cudaSuccess;
    const cudaError_t code = before(chip);
    return code == cudaSuccess ? launch(chip) : code;
}

struct cuda_kernel {
    attn_kernel takes;
    /* the lowest and the highest compute capability that can run the kernel, as major * 10 + minor */
    int least_compute, most_compute;
    /* Returns whether the kernel can compute this problem: checks sizes, strides and the chip's shared memory. The
     * caller has already checked features and dtypes. Sets plan->workspace_bytes (memory that launch() may overwrite),
     * and may set plan->variant. The result depends only on the problem and the chip. */
    bool (*plan)(const struct cuda_chip *chip, attn_plan *plan);
    /* Queues one planned problem, whose pointers are device memory. Never waits. */
    cudaError_t (*launch)(const struct cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace);
    /* True: each call of launch() computes only the tiles of one share (cuda_chip.share); this is so for forwards only.
     * False: launch() itself divides the work into steps. */
    bool shares;
};

/* the largest head size of most kernels on tensor cores; sm80/wide_forward.cu and others compute larger heads */
enum { TILE_HEAD_DIM = 256 };

const int ANY_COMPUTE = 999; /* the value of most_compute for a kernel that also runs on all future GPUs */

/* Features that every kernel computes: the basic tensors, and masks that let each row see one interval of keys. */
const uint64_t BASIC_FEATURES = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(out) |
                                ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(sinks) | ATTN_OPTION_BIT(GROUPED) |
                                ATTN_OPTION_BIT(CAUSAL) | ATTN_OPTION_BIT(WINDOW) | ATTN_OPTION_BIT(TOP_LEFT);
const uint64_t LENGTH_FEATURES = ATTN_TENSOR_BIT(cu_seqlens_q) | ATTN_TENSOR_BIT(cu_seqlens_k) |
                                 ATTN_TENSOR_BIT(seqlens_k);
/* Padding queries (seqlens_q), and gaps between packed sequences. Kernels need no code for them, because
 * cuda_fill_padding() writes the results of padding rows. */
const uint64_t PADDING_FEATURES = ATTN_TENSOR_BIT(seqlens_q) | ATTN_OPTION_BIT(GAPS);

/* The features of problems that the kernels of sm80/ compute with their fast variant. For problems with any other
 * feature they have a second variant, which computes every score with the functions of args.cuh. */
const uint64_t PLAIN_FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_TENSOR_BIT(page_table) |
                                ATTN_TENSOR_BIT(v_scale) | ATTN_TENSOR_BIT(dout) | ATTN_TENSOR_BIT(dlse) |
                                ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) |
                                ATTN_TENSOR_BIT(dsinks) | ATTN_OPTION_BIT(DETERMINISTIC) | ATTN_OPTION_BIT(KEY_DTYPE) |
                                ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(DOUT_DTYPE) | ATTN_OPTION_BIT(GRAD_DTYPE) |
                                ATTN_TENSOR_BIT(row_max) | ATTN_TENSOR_BIT(entropy) | ATTN_TENSOR_BIT(max_logit) |
                                ATTN_TENSOR_BIT(mean_entropy) | ATTN_TENSOR_BIT(key_mass) | ATTN_TENSOR_BIT(top_keys) |
                                ATTN_TENSOR_BIT(top_weights) | ATTN_TENSOR_BIT(weights) | ATTN_TENSOR_BIT(map);

static inline bool has_options(const attn_plan *plan)
{
    return plan->features & ~PLAIN_FEATURES;
}

static inline bool has_pages(const attn_plan *plan)
{
    return plan->features & ATTN_TENSOR_BIT(page_table);
}

/* Lets `kernel` use `bytes` of dynamic shared memory on the current device. Only the first call for a device sets this
 * in the CUDA runtime. */
template <auto kernel> cudaError_t allow_shared(size_t bytes)
{
    static std::atomic<uint64_t> allowed; /* bit n is 1 if allow_shared() has been called for device n */
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    const uint64_t bit = device < 64 ? UINT64_C(1) << device : 0;
    if (code != cudaSuccess || (allowed.load(std::memory_order_relaxed) & bit)) return code;
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
    return code;
}

/* Makes many small copies in one launch, as attn_moves() describes them (in moves.cu). */
cudaError_t cuda_moves(cudaStream_t stream, const attn_move *moves, int64_t count);

/* For attn_merge(): merges results over parts of the keys into the result over all keys (in merge.cu). */
cudaError_t cuda_merge(cudaStream_t stream, const attn_merge_plan *plan);

/* For attn_sum_parts(): adds up arrays element by element (in sum.cu). */
cudaError_t cuda_sum(cudaStream_t stream, const attn_sum *sum);

/* Writes the results of padding rows, as attn_fill_padding() does (in padding.cu). */
cudaError_t cuda_fill_padding(cudaStream_t stream, const attn_plan *plan);

/* For attn_lse_start(), which checks a client's lse: adds up the exponentials of some rows' scores in float64 (in
 * verify_lse.cu). */
cudaError_t cuda_sum_lse(cudaStream_t stream, const attn_problem *problem, const attn_lse_look *look, double *found);

extern const struct cuda_kernel *const cuda_kernels[];
extern const int cuda_kernel_count;

#endif
