/* kernels.cu: the table of CUDA kernels that kernels.h describes; fast kernels come first. */
#include "kernels/cuda/common/kernels.h"

extern const cuda_kernel decode_forward;                                /* in sm80/decode.cu */
extern const cuda_kernel wide_decode_forward;                           /* in sm80/decode_wide.cu */
extern const cuda_kernel sm90_f8_forward;                               /* in sm90/forward/f8_forward.cu */
extern const cuda_kernel sm90_packed_forward, sm90_forward;             /* in sm90/forward/forward.cu */
extern const cuda_kernel sm90_packed_pairs_forward, sm90_pairs_forward; /* in sm90/forward/forward_pairs.cu */
extern const cuda_kernel sm90_backward;                                 /* in sm90/backward/backward.cu */
extern const cuda_kernel sm90_pairs_backward;                           /* in sm90/backward/backward_pairs.cu */
extern const cuda_kernel sm90_backward_256;                             /* in sm90/backward/backward_256.cu */
extern const cuda_kernel sm90_latent_forward;                           /* in sm90/latent/latent.cu */
extern const cuda_kernel sm90_wide_forward;                             /* in sm90/wide/wide.cu */
extern const cuda_kernel sm90_wide_backward;                            /* in sm90/wide_backward/wide_backward.cu */
extern const cuda_kernel generic_packed_forward, generic_forward;       /* in sm80/forward.cu */
extern const cuda_kernel wide_forward, wide_backward;                   /* in sm80/wide_*.cu */
extern const cuda_kernel f32_wide_forward, f32_wide_backward;           /* in sm80/wide_*.cu */
extern const cuda_kernel generic_backward;                              /* in sm80/backward.cu */
extern const cuda_kernel f32_forward, f32_backward;                     /* in sm80/f32_*.cu */
extern const cuda_kernel simple_forward, simple_backward;               /* in simple/simple.cu */
extern const cuda_kernel sm90_observe;                                  /* in sm90/observe/observe.cu */
extern const cuda_kernel generic_observe;                               /* in sm80/observe.cu */
extern const cuda_kernel simple_observe;                                /* in simple/observe.cu */

/* clang-format would put several kernels of the table on one line */
/* clang-format off */
extern const cuda_kernel *const cuda_kernels[] = {
    &decode_forward,
    &sm90_latent_forward,
    &wide_decode_forward,
    &sm90_wide_forward,
    &sm90_packed_forward,
    &sm90_packed_pairs_forward,
    &generic_packed_forward,
    &sm90_f8_forward,
    &sm90_forward,
    &sm90_pairs_forward,
    &generic_forward,
    &wide_forward,
    &sm90_backward,
    &sm90_pairs_backward,
    &sm90_backward_256,
    &sm90_wide_backward,
    &generic_backward,
    &wide_backward,
    &f32_forward,
    &f32_backward,
    &f32_wide_forward,
    &f32_wide_backward,
    &simple_forward,
    &simple_backward,
    &sm90_observe,
    &generic_observe,
    &simple_observe,
};
/* clang-format on */
extern const int cuda_kernel_count = sizeof cuda_kernels / sizeof *cuda_kernels;
