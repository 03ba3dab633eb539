/* kernels.cu: the table of kernel families, fast ones first. See kernels.h. */
#include "kernels.h"

extern const cuda_kernel sm90_forward;                      /* sm90/forward.cu */
extern const cuda_kernel generic_forward, generic_backward; /* sm80/forward.cu, sm80/backward.cu */
extern const cuda_kernel simple_forward, simple_backward; /* simple/simple.cu */

extern const cuda_kernel *const cuda_kernels[] = {
    &sm90_forward,
    &generic_forward,
    &generic_backward,
    &simple_forward,
    &simple_backward,
};
extern const int cuda_kernel_count = sizeof cuda_kernels / sizeof *cuda_kernels;
