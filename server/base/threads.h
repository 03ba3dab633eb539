/* threads.h: can the threads that a server needs be started here, and if not, which limit forbids it? libuv aborts the
 * process where the system refuses it a thread. Therefore this is tried before libuv starts any. */
#ifndef THREADS_H
#define THREADS_H

#include <stdbool.h>

#include "kernels/attention.h"

struct config;

/* Threads that a server with these options starts. The threads of GPUs' drivers are not known before devices are open,
 * and do not count. */
int threads_needed(const struct config *config);
/* How many of them are libuv's: UV_THREADPOOL_SIZE in the environment, or 4. */
int threads_of_libuv(void);

/* Starts `count` threads that do nothing, all at the same time, and ends them. NO_MEMORY: fewer could be started, and
 * the text names the limit and its number, if they can be found out. */
attn_status threads_try(int count, attn_error *err);

/* Writes "address space is limited to 300000000 bytes (RLIMIT_AS, ulimit -v)", or "" where it is not limited. This is
 * the likely reason where a later start fails for want of memory or of a thread. Returns `text`. */
enum { THREADS_SPACE_BYTES = 128 };
const char *threads_space(char text[THREADS_SPACE_BYTES]);

#endif
