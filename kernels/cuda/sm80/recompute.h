/* recompute.h: plans the forward that a backward runs first if the client has not given the tensors out and lse. */
#ifndef ATTN_CUDA_RECOMPUTE_H
#define ATTN_CUDA_RECOMPUTE_H

#include "kernels/backend.h"
#include "kernels/cuda/common/kernels.h"
#include "kernels/cuda/simple/simple.h"

/* The forward that a backward runs first if the client has not given the tensors out and lse: its problem and its plan.
 * Do not copy this struct: `plan` has pointers to `problem`. */
struct recomputed_forward {
    attn_problem problem;
    attn_plan plan;
};

/* Returns whether a forward on tensor cores computes the two numbers (lse and rest) that stand for a huge lse. It does
 * so only in problems with options (softcap, bias, masks, ...). It does not if dbias or dalibi_slopes of float32 inputs
 * is requested, because simple.cu computes these gradients and adds up scores in another order. */
static inline bool parts_by_tiles(const attn_plan *plan)
{
    const attn_problem *p = plan->problem;
    return has_options(plan) && (p->q.dtype != ATTN_F32 || (!p->dbias.rank && !p->dalibi_slopes.rank));
}

static inline size_t recomputed_out_bytes(const attn_dims &d)
{
    return (size_t)query_rows(d) * (size_t)d.Dv * sizeof(float);
}
static inline size_t recomputed_lse_bytes(const attn_dims &d)
{
    return (size_t)query_rows(d) * sizeof(float);
}

/* Plans the forward that recomputes out (of `dtype`) and lse. `out` and `lse` may be NULL if only the workspace size is
 * needed. Returns false if `kernel` does not compute this forward. */
static inline bool plan_recomputed(recomputed_forward *f, const cuda_kernel &kernel, const cuda_chip *chip,
                                   const attn_plan *backward, void *out, void *lse, attn_dtype dtype = ATTN_F32)
{
    const attn_dims &d = backward->geometry.dims;
    int64_t shape[ATTN_MAX_RANK], lse_shape[3] = { d.B, d.H, d.Sq };
    f->problem = *backward->problem;
    attn_problem &p = f->problem;
    for (int i = 0; i < p.q.rank; i++) shape[i] = p.q.shape[i];
    shape[p.q.rank - 1] = d.Dv;
    p.op = ATTN_OP_FORWARD;
    p.out = attn_tensor_make(out, dtype, p.q.rank, shape);
    p.lse = d.packed ? attn_tensor_make(lse, ATTN_F32, 2, lse_shape + 1)
                     : attn_tensor_make(lse, ATTN_F32, 3, lse_shape);
    f->plan = attn_plan{};
    f->plan.problem = &p;
    f->plan.features = attn_features(&p);
    f->plan.geometry = attn_geometry_of(&p);
    f->plan.kernel = &kernel.takes;
    return attn_kernel_takes(&kernel.takes, &p, f->plan.features) && kernel.plan(chip, &f->plan);
}

/* Finds the first of the chip's forward kernels for which plan_recomputed() succeeds. Returns this kernel, or NULL if
 * there is none. out is float32 if the kernel can write float32, otherwise it has q's dtype. Kernels that use decode.cu
 * for short sequences are skipped: with such a kernel, the dtype and the bits of a sequence's out would depend on the
 * other sequences. */
static inline const cuda_kernel *plan_first_recomputed(recomputed_forward *f, const cuda_chip *chip,
                                                       const attn_plan *backward, void *out, void *lse)
{
    const int compute = chip->major * 10 + chip->minor;
    const bool is_float32 = backward->problem->q.dtype == ATTN_F32;
    for (const cuda_kernel *const *next = chip->forward_kernels; next < chip->kernels_end; next++) {
        const cuda_kernel *const kernel = *next;
        if (compute < kernel->least_compute || compute > kernel->most_compute) continue;
        if (strstr(kernel->takes.name, "decode")) continue;
        /* The float32 kernels for wide heads add up scores in another order than f32_forward. If their backward used
         * the lse of f32_forward, the P that the backward computes would not fit this lse. The backward of simple.cu
         * also takes wide heads, and does not use f32_forward either. */
        if (is_float32 && backward->kernel->head_dim > TILE_HEAD_DIM && kernel->takes.head_dim <= TILE_HEAD_DIM)
            continue;
        const bool wide = kernel->takes.features & ATTN_OPTION_BIT(OUT_DTYPE);
        if (plan_recomputed(f, *kernel, chip, backward, out, lse, wide ? ATTN_F32 : backward->problem->q.dtype))
            return kernel;
    }
    return nullptr;
}

#endif
