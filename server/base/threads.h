/* threads.h: can as many threads be started here, and if not, what limit says so? libuv aborts the process where the
 * system refuses it a thread, so that is found out before it is asked for any. */
#ifndef THREADS_H
#define THREADS_H

#include <stdbool.h>

#include "kernels/attention.h"

struct config;

/* Threads that a server with these options starts, as far as is known before its devices are open: GPUs' drivers have
 * threads of their own. */
int threads_needed(const struct config *config);
/* Of them, libuv's: UV_THREADPOOL_SIZE in the environment, or 4. */
int threads_of_libuv(void);

/* Starts `count` threads that do nothing, all at the same time, and ends them. On an error, NO_MEMORY, the text names
 * the limit and its number, as far as they can be found out. */
attn_status threads_try(int count, attn_error *err);

/* "address space is limited to 300000000 bytes (RLIMIT_AS, ulimit -v)"; "" where it is not. A start that failed later,
 * for want of memory or of a thread, failed because of it most likely. Returns `text`. */
enum { THREADS_SPACE_BYTES = 128 };
const char *threads_space(char text[THREADS_SPACE_BYTES]);

#endif
