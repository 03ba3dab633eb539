/* threads.c: starts threads as a test, and if that fails, names the limit that forbids them; see threads.h.
 *
 * The test threads have stacks as large as those of libuv's threads, which are the largest: 8 MiB from version 1.46 on,
 * before that the value of `ulimit -s`. */
#include "server/base/threads.h"

#include <dirent.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/machine.h"
#include "server/base/config.h"
#include "server/base/limits.h"

/* libuv's number of threads if UV_THREADPOOL_SIZE is not set, and the largest number that libuv allows */
enum { LIBUV_THREADS = 4, LIBUV_THREADS_MOST = 1024 };

int threads_of_libuv(void)
{
    const char *text = getenv("UV_THREADPOOL_SIZE");
    /* UV_THREADPOOL_SIZE is read with atoi(), as libuv reads it, so that both get the same number */
    const int count = text ? atoi(text) : LIBUV_THREADS;
    return count < 1 ? 1 : count < LIBUV_THREADS_MOST ? count : LIBUV_THREADS_MOST;
}

static bool computes_on_cpu(const struct config *config)
{
    if (strcmp(config->devices, "auto") != 0) return strcmp(config->devices, "cpu") == 0;
    for (const char *const *name = attn_backends(); *name; name++)
        if (attn_is_gpu(*name)) return false;
    return true;
}

int threads_needed(const struct config *config)
{
    const int threads = config->cpu_threads, streams = (threads < 2 ? threads : 2) + DEVICE_GUESTS;
    const int signals = 1, devices = computes_on_cpu(config) ? streams + threads - 1 : 1;
    return signals + threads_of_libuv() + config->http_threads + (config->metrics_listen != NULL) +
           config_shares_memory(config) + devices;
}

/* ---- Finding the limit that forbids a thread --------------------------------------------------------------------- */

static size_t stack_bytes(void)
{
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur == RLIM_INFINITY || stack.rlim_cur < THREADS_STACK_BYTES)
        return THREADS_STACK_BYTES;
    return (size_t)stack.rlim_cur;
}

static bool has_space(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    munmap(memory, bytes);
    return true;
}

static bool address_space_is_limited(struct rlimit *limit)
{
    return getrlimit(RLIMIT_AS, limit) == 0 && limit->rlim_cur != RLIM_INFINITY;
}

const char *threads_space(char text[THREADS_SPACE_BYTES])
{
    struct rlimit limit;
    text[0] = '\0';
    if (address_space_is_limited(&limit))
        snprintf(text, THREADS_SPACE_BYTES, "address space is limited to %lld bytes (RLIMIT_AS, ulimit -v)",
                 (long long)limit.rlim_cur);
    return text;
}

/* Writes to *err which limit refused a thread. The kernel's error code does not tell which one, because EAGAIN stands
 * for all limits. */
static attn_status refuse(int number, int count, size_t stack, attn_error *err)
{
    struct attn_machine machine;
    struct rlimit limit;
    char why[THREADS_SPACE_BYTES];
    attn_machine_look("", &machine);
    if (!has_space(stack) && *threads_space(why) == '\0')
        snprintf(why, sizeof why, "the system has no memory for a stack of %zu bytes", stack);
    else if (has_space(stack) && getrlimit(RLIMIT_NPROC, &limit) == 0 && (int64_t)limit.rlim_cur < machine.threads)
        snprintf(why, sizeof why, "this user's processes may have %lld threads together (RLIMIT_NPROC, ulimit -u)",
                 (long long)limit.rlim_cur);
    else if (has_space(stack) && machine.threads < INT64_MAX)
        snprintf(why, sizeof why, "the cgroup may have %lld threads (pids.max, docker --pids-limit, TasksMax)",
                 (long long)machine.threads);
    else if (has_space(stack))
        snprintf(why, sizeof why, "the system has no more of them (kernel.threads-max, kernel.pid_max)");
    return attn_fail(err, ATTN_NO_MEMORY, NULL,
                     "thread %d of the %d that are needed could not be started: %s; --http-threads and --cpu-threads "
                     "ask for fewer",
                     number, count, why);
}

/* ---- Tests whether all threads can be started -------------------------------------------------------------------- */

/* the test threads wait for this mutex, which is locked until all of them have started */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static void *wait_at_gate(void *unused)
{
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    return unused;
}

static int threads_now(void)
{
    struct dirent *entry;
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    if (folder == NULL) return 0;
    while ((entry = readdir(folder)) != NULL) count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

/* Waits until the system has removed the joined threads, a moment after pthread_join(). Until then they count towards
 * the limits on threads. */
static void wait_for_ends(int threads)
{
    for (int i = 0; i < THREADS_END_MS && threads_now() > threads; i++) usleep(1000);
}

attn_status threads_try(int count, attn_error *err)
{
    const size_t stack = stack_bytes();
    const int before = threads_now();
    attn_status status = ATTN_OK;
    pthread_attr_t attributes;
    int started = 0;
    pthread_t *threads = calloc((size_t)count, sizeof *threads);
    if (threads == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "no memory for %d threads", count);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack);
    pthread_mutex_lock(&gate);
    while (started < count && pthread_create(&threads[started], &attributes, wait_at_gate, NULL) == 0) started++;
    /* refuse() is called while the started threads still exist, because it counts them */
    if (started < count) status = refuse(started + 1, count, stack, err);
    pthread_mutex_unlock(&gate);
    while (started > 0) pthread_join(threads[--started], NULL);
    wait_for_ends(before);
    pthread_attr_destroy(&attributes);
    free(threads);
    return status;
}
