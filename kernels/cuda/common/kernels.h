/* kernels.h: the table of CUDA kernels, and what a kernel offers to device.cu.
 *
 * A kernel is one row: what it computes (attn_kernel: the name that an answer's `backend` says, the operation, dtypes,
 * head dims, features), the compute capabilities that it is for, and two functions. A problem goes to the first row
 * that takes it, so fast rows stand before general ones; adding a kernel is adding a row to cuda_kernels[] in
 * kernels.cu.
 *
 * A row that names its features is safe: a problem with any other feature never gets there. ATTN_ALL_SCORES is for
 * kernels that compute each score by score() of args.cuh, in all their forms or in one of them (see PLAIN_FEATURES). */
#ifndef ATTN_CUDA_KERNELS_H
#define ATTN_CUDA_KERNELS_H

#include <atomic>
#include <cuda_runtime.h>
#include <stdint.h>

#include "kernels/attention.h"
#include "kernels/merge.h"

/* What a launcher may know of the device. */
struct cuda_chip {
    int major, minor;
    int multiprocessors;
    int shared_bytes; /* most dynamic shared memory of a block */
    /* 0, but in a launch that decode.h makes of another forward kernel: packed sequences of at most so many rows
     * (queries times heads of a group) are left alone, for they are its own. */
    int decode_rows;
    bool copies_by_threads; /* rather than by the copy engine, where a kernel has both: see device.cu */
    /* True if the call before on this stream was a decode and this problem reads none of its results: then it may read
     * before that call has ended. Of a launch, as decode_rows; false in a device's own. */
    bool after_decode;
    int *counter;                                  /* the stream's, for sm90/layer/scheduler.cuh; NULL: it has none */
    uint8_t *rows_later, *keys_later, *rows_found; /* see cuda_args */
    /* Pinned memory: had kernels left rows at the last look? NULL: no later launch of this run computes them, see
     * launch_steps(). */
    uint8_t *found;
    int64_t first_batch, first_head, all_heads; /* where a part of a problem begins; 0: the problem is whole */
    int share, shares;        /* which of so many shares of its tiles a launch computes; 0 of 0: all, see in_shares() */
    double step_seconds;      /* of a step, at most */
    struct cuda_steps *steps; /* which launches of the problem are to be made now; NULL: all */
};

/* A problem of many launches is queued in steps. A step is one launch, or several that together take 20 ms at most. A
 * launcher has the same steps in the same order at each call; takes_step() says which of them to launch now. So work
 * can be queued a few steps at a time, and given up between them. */
struct cuda_steps {
    int64_t done;   /* steps that were queued, by earlier calls and by this one */
    int64_t at;     /* number of the next step that takes_step() is called for */
    double seconds; /* that this call may still queue; its first step is always queued */
    bool more;      /* this call left a step to the next call */
    bool any;       /* this call has queued a step */
    bool idle;      /* all that earlier calls queued had ended when this call began */
    bool looked;    /* this call has queued a look for rows that were left; only the next call sees its result */
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

/* cuda_chip.step_seconds, but for tests. The emulator sets it, so that its small problems have several steps too. */
#ifdef ATTN_STEP_SECONDS
const double STEP_SECONDS = ATTN_STEP_SECONDS;
#else
const double STEP_SECONDS = 0.02;
#endif

/* Divides `count` pieces of work, of `seconds_each`, into parts and calls visit(first, count) for each part, which is
 * a step. */
template <typename F> void in_parts(const struct cuda_chip *chip, int64_t count, double seconds_each, F visit)
{
    const double fits = chip->step_seconds / seconds_each, least = (double)count / 1e9,
                 most = fits > least ? fits : least;
    const int64_t part = most < 1 ? 1 : most < (double)count ? (int64_t)most : count;
    for (int64_t first = 0; first < count; first += part) visit(first, part < count - first ? part : count - first);
}

/* The same: calls launch(first, count) for each step that is to be launched now. */
template <typename F> void in_steps(const struct cuda_chip *chip, int64_t count, double seconds_each, F launch)
{
    in_parts(chip, count, seconds_each, [&](int64_t first, int64_t n) {
        if (takes_step(chip, (double)n * seconds_each)) launch(first, n);
    });
}

/* The tiles of one head may take longer than a step, too. Several launches then compute a share of them each, and each
 * launch is a step. No bit changes. */
struct tile_range {
    int64_t first, end; /* [first, end) */
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

/* How many shares work of `seconds` has: one, unless that takes half as long again as a step. */
static inline int shares_of(const struct cuda_chip *chip, double seconds)
{
    const double steps = seconds / chip->step_seconds, most = 1 << 20;
    return steps < 1.5 ? 1 : steps < most ? (int)steps + 1 : (int)most;
}

/* Calls launch(chip) for each share that is to be launched now. */
template <typename F> cudaError_t in_shares(const struct cuda_chip *chip, double seconds, F launch)
{
    struct cuda_chip part = *chip;
    cudaError_t code = cudaSuccess;
    part.shares = shares_of(chip, seconds);
    for (part.share = 0; part.share < part.shares && code == cudaSuccess; part.share++)
        if (takes_step(&part, seconds / part.shares)) code = launch((const struct cuda_chip *)&part);
    return code;
}

/* The same for launch() where before() must run first. Where all is one share, both are one step. */
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
    int least_compute, most_compute; /* major * 10 + minor */
    /* Can it compute this problem, which the row takes? Not where sizes, strides or the chip's shared memory are in the
     * way. Sets plan->workspace_bytes, what launch() may scribble on, and plan->form where it likes to. Depends on the
     * problem and the chip alone. */
    bool (*plan)(const struct cuda_chip *chip, attn_plan *plan);
    /* Queues the kernels of one planned problem, whose pointers are device memory. Never waits. */
    cudaError_t (*launch)(const struct cuda_chip *chip, cudaStream_t stream, const attn_plan *plan, void *workspace);
    bool shares; /* of a forward: launch() computes chip->share alone. A backward divides its work by itself */
};

enum { TILE_HEAD_DIM = 256 }; /* the widest tile of the kernels on tensor cores */

const int ANY_COMPUTE = 999; /* most_compute of a kernel that newer chips run too */

/* Tensors and options that all have in common, and those of the masks that are intervals of keys. */
const uint64_t BASIC_FEATURES = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(out) |
                                ATTN_TENSOR_BIT(lse) | ATTN_TENSOR_BIT(sinks) | ATTN_OPTION_BIT(GROUPED) |
                                ATTN_OPTION_BIT(CAUSAL) | ATTN_OPTION_BIT(WINDOW) | ATTN_OPTION_BIT(TOP_LEFT);
const uint64_t LENGTH_FEATURES = ATTN_TENSOR_BIT(cu_seqlens_q) | ATTN_TENSOR_BIT(cu_seqlens_k) |
                                 ATTN_TENSOR_BIT(seqlens_k);
/* Queries that do not exist, and rows between packed sequences. Their results are written by cuda_fill_padding(). */
const uint64_t PADDING_FEATURES = ATTN_TENSOR_BIT(seqlens_q) | ATTN_OPTION_BIT(GAPS);

/* What the plain forms of the kernels of sm80/ compute. For any other feature they have a second form, which computes
 * every score by the functions of args.cuh. */
const uint64_t PLAIN_FEATURES = BASIC_FEATURES | LENGTH_FEATURES | PADDING_FEATURES | ATTN_TENSOR_BIT(page_table) |
                                ATTN_TENSOR_BIT(v_scale) | ATTN_TENSOR_BIT(dout) | ATTN_TENSOR_BIT(dlse) |
                                ATTN_TENSOR_BIT(dq) | ATTN_TENSOR_BIT(dk) | ATTN_TENSOR_BIT(dv) |
                                ATTN_TENSOR_BIT(dsinks) | ATTN_OPTION_BIT(DETERMINISTIC) | ATTN_OPTION_BIT(KEY_DTYPE) |
                                ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(DOUT_DTYPE) | ATTN_OPTION_BIT(GRAD_DTYPE);

static inline bool has_options(const attn_plan *plan)
{
    return plan->features & ~PLAIN_FEATURES;
}

/* Keys and values are in pages: another form again, for the copies of tiles. */
static inline bool has_pages(const attn_plan *plan)
{
    return plan->features & ATTN_TENSOR_BIT(page_table);
}

/* Lets `kernel` have that much dynamic shared memory on the current device. The runtime is asked once a device
 * (each has a context of its own), not at every launch. */
template <auto kernel> cudaError_t allow_shared(size_t bytes)
{
    static std::atomic<uint64_t> allowed; /* a bit a device */
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    const uint64_t bit = device < 64 ? UINT64_C(1) << device : 0;
    if (code != cudaSuccess || (allowed.load(std::memory_order_relaxed) & bit)) return code;
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
    return code;
}

/* moves.cu: attn_moves(). */
cudaError_t cuda_moves(cudaStream_t stream, const attn_move *moves, int64_t count);

/* merge.cu: attn_merge(). */
cudaError_t cuda_merge(cudaStream_t stream, const attn_merge_plan *plan);

/* padding.cu: results of rows that do not exist, as attn_fill_padding() has them. */
cudaError_t cuda_fill_padding(cudaStream_t stream, const attn_plan *plan);

/* verify_lse.cu: attn_lse_start(). */
cudaError_t cuda_sum_lse(cudaStream_t stream, const attn_problem *problem, const attn_lse_look *look, double *found);

extern const struct cuda_kernel *const cuda_kernels[];
extern const int cuda_kernel_count;

#endif
