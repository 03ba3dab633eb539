/* threads.h: tests whether the threads that a server needs can be started, and if not, names the limit that forbids it.
 * The test runs before libuv starts any thread, because libuv aborts the process if the system refuses it a thread. */
#ifndef THREADS_H
#define THREADS_H

#include <stdbool.h>

#include "kernels/attention.h"

struct config;

/* Returns the number of threads that a server with these options starts. Threads of GPU drivers are not included: their
 * number is unknown until the devices are open. */
int threads_needed(const struct config *config);
/* Returns the number of libuv's threads: UV_THREADPOOL_SIZE in the environment, or 4. */
int threads_of_libuv(void);

/* Starts `count` idle threads at the same time, and ends them. Error: NO_MEMORY, if not all could be started. The
 * error's text names the limit that forbids them and the limit's value, if they are known. */
attn_status threads_try(int count, attn_error *err);

enum { THREADS_SPACE_BYTES = 128 };
/* Writes "address space is limited to 300000000 bytes (RLIMIT_AS, ulimit -v)", or "" if there is no such limit. If
 * memory or threads run out later, this limit is the likely reason. Returns `text`. */
const char *threads_space(char text[THREADS_SPACE_BYTES]);

#endif
