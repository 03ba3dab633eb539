/* shim.c: a library that causes faults in attnd which the HTTP tests cannot cause from outside. Usage:
 * LD_PRELOAD=build/tests/shim.so attnd ..., with one or more of these environment variables:
 *
 *   SHIM_NO_CONNECTION=FILE   while FILE exists, libmicrohttpd gets no memory for a connection's record
 *   SHIM_NO_POOL=FILE         while FILE exists, libmicrohttpd gets no memory for a connection's buffers; its
 *                             thread finds that out after MHD_add_connection() has succeeded
 *   SHIM_HANG_STOP=FILE       while FILE exists, MHD_stop_daemon() does not return
 *   SHIM_HANG_RESUME=FILE     while FILE exists, MHD_resume_connection(), which the loop calls, does not return
 *
 *   SHIM_NO_MEMORY=FILE       one allocation of the program or of a library fails. FILE begins with an int32, which
 *                             every allocation decrements. The allocation that makes it 0 fails. If it is 0 from the
 *                             start, no allocation fails
 *
 *   SHIM_HANG_LISTEN=FILE     while FILE exists, listen() does not return, so the server does not start
 *   SHIM_HANG_CLOSE=FILE      while FILE exists, close() of a listening socket does not return, so the server does
 *                             not end
 *
 *   SHIM_THREADS=N            the process may have N threads, as in a cgroup whose pids.max is N
 *
 * SHIM_NO_CONNECTION and SHIM_NO_POOL affect only calls from libmicrohttpd itself. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

struct MHD_Daemon;
struct MHD_Connection;
void MHD_stop_daemon(struct MHD_Daemon *daemon);
void MHD_resume_connection(struct MHD_Connection *mhd);

/* libmicrohttpd makes allocations of at least this many bytes only for the buffers of a connection. */
enum { POOL_BYTES = 64 << 10 };

static uintptr_t first, last; /* address range of libmicrohttpd's code */

static int find(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    (void)context;
    if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libmicrohttpd") == NULL) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_LOAD || !(header->p_flags & PF_X)) continue;
        first = info->dlpi_addr + header->p_vaddr;
        last = first + header->p_memsz;
    }
    return 1;
}

static _Atomic int32_t *countdown; /* the counter of allocations for SHIM_NO_MEMORY; the process of the test shares its
                                    * memory */

__attribute__((constructor)) static void start(void)
{
    const char *file = getenv("SHIM_NO_MEMORY");
    dl_iterate_phdr(find, NULL);
    const int fd = file ? open(file, O_RDWR) : -1;
    void *shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *countdown, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared != MAP_FAILED) countdown = shared;
}

static bool fails(void)
{
    return countdown && atomic_load(countdown) > 0 && atomic_fetch_sub(countdown, 1) == 1;
}

static bool wanted(const char *variable)
{
    const char *file = getenv(variable);
    return file != NULL && access(file, F_OK) == 0;
}

/* Creates FILE.reached, which tells the test that the call hangs, and waits until FILE is gone. */
static void hang(const char *variable)
{
    char reached[4096];
    if (!wanted(variable)) return;
    snprintf(reached, sizeof reached, "%s.reached", getenv(variable));
    close(open(reached, O_CREAT | O_WRONLY, 0600));
    while (wanted(variable)) usleep(10000);
}

static bool is_library(const void *caller)
{
    return (uintptr_t)caller >= first && (uintptr_t)caller < last;
}

void *calloc(size_t count, size_t size)
{
    static void *(*real)(size_t, size_t);
    /* Memory for dlsym(), which may allocate before the real calloc() is known. */
    static char early[4096];
    static size_t used;
    static __thread bool looking;
    if (real == NULL) {
        if (looking) {
            void *memory = early + used;
            used += (count * size + 15) / 16 * 16;
            return used <= sizeof early ? memory : NULL;
        }
        looking = true;
        real = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
        looking = false;
    }
    if (fails() || (is_library(__builtin_return_address(0)) && wanted("SHIM_NO_CONNECTION"))) return NULL;
    return real(count, size);
}

void *malloc(size_t size)
{
    static void *(*real)(size_t);
    if (real == NULL) real = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    if (fails()) return NULL;
    if (size >= POOL_BYTES && is_library(__builtin_return_address(0)) && wanted("SHIM_NO_POOL")) return NULL;
    return real(size);
}

void *realloc(void *memory, size_t size)
{
    static void *(*real)(void *, size_t);
    if (real == NULL) real = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
    return fails() ? NULL : real(memory, size);
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (real == NULL) real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    if (is_library(__builtin_return_address(0)) && wanted("SHIM_NO_POOL")) return MAP_FAILED;
    return real(at, length, protection, flags, fd, offset);
}

static int threads_now(void)
{
    struct dirent *entry;
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    while (folder && (entry = readdir(folder)) != NULL) count += entry->d_name[0] != '.';
    if (folder) closedir(folder);
    return count;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start_at)(void *), void *context)
{
    typedef int function(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    function *real = (function *)dlsym(RTLD_NEXT, "pthread_create");
    const char *most = getenv("SHIM_THREADS");
    if (most && threads_now() >= atoi(most)) return EAGAIN;
    return real(thread, attributes, start_at, context);
}

void MHD_stop_daemon(struct MHD_Daemon *daemon)
{
    void (*real)(struct MHD_Daemon *) = (void (*)(struct MHD_Daemon *))dlsym(RTLD_NEXT, "MHD_stop_daemon");
    hang("SHIM_HANG_STOP");
    real(daemon);
}

void MHD_resume_connection(struct MHD_Connection *mhd)
{
    void (*real)(struct MHD_Connection *) = (void (*)(struct MHD_Connection *))dlsym(RTLD_NEXT,
                                                                                     "MHD_resume_connection");
    hang("SHIM_HANG_RESUME");
    real(mhd);
}

int listen(int fd, int backlog)
{
    int (*real)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
    hang("SHIM_HANG_LISTEN");
    return real(fd, backlog);
}

int close(int fd)
{
    int listening = 0;
    socklen_t length = sizeof listening;
    const int before = errno;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening) hang("SHIM_HANG_CLOSE");
    errno = before;
    return (int)syscall(SYS_close, fd);
}
