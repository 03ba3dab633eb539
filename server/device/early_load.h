/* early_load.h: makes CUDA load all kernels when a GPU is opened, before the server is ready.
 *
 * By default CUDA loads a file of kernels when a call first needs it, and a request then waits for up to 100 ms. */
#ifndef SERVER_EARLY_LOAD_H
#define SERVER_EARLY_LOAD_H

#include <stdbool.h>

/* Sets the environment variable CUDA_MODULE_LOADING to EAGER if the user has not set it and this program has machine
 * code for every GPU of the machine. For other GPUs the driver would first have to compile all kernels, for minutes.
 * Call this before other threads exist and before the first use of CUDA, which reads the variable. */
void early_load_kernels(void);

/* Returns whether a GPU with compute capability major.minor can run this program's machine code. `compiled` lists the
 * compute capabilities of the code ("80 89 90", as in CUDA_ARCHS). Code for X.Y runs on X.Z if Z >= Y. */
bool early_load_runs(const char *compiled, int major, int minor);

#endif
