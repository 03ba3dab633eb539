/* supervise.c: the parent process of --supervise. It keeps the listening sockets open and starts a server by fork and
 * exec of this same program, with the descriptor numbers in ATTND_INHERITED_SOCKETS.
 *
 *   the server ends with      the supervisor
 *   0                         ends with 0: the server was drained
 *   64, 69, 78                ends with the same status: another server would fail in the same way
 *   anything else, a signal   starts another: at once, or after 1, 2, 4 ... 30 s when it lived for less than
 *                             SUPERVISE_SHORT_LIFE_S; gives up after SUPERVISE_GIVE_UP such lives in a row and passes
 *                             its status on
 *
 * The supervisor passes SIGTERM and SIGINT on as SIGTERM, and SIGHUP as SIGHUP. It kills a server that does not end in
 * time. The server has a process group of its own: otherwise a Ctrl-C would reach it twice, and a second signal makes
 * it stop without waiting. The server dies with its parent (PDEATHSIG). */
#include "server/supervise.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "text/text.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/limits.h"
#include "server/base/log.h"

static const char variable[] = CONFIG_INHERITED_SOCKETS;

int supervise_inherited(int *fds, int capacity)
{
    const char *at = getenv(variable);
    int count = 0;
    if (at == NULL) return -1;
    for (uint64_t fd; count < capacity && (at = text_read_number(at, &fd)) != NULL && fd <= INT_MAX; at++) {
        fds[count++] = (int)fd;
        if (*at != ',') break;
    }
    unsetenv(variable); /* programs that the server starts must not inherit this variable */
    return count;
}

/* Replaces this process, a child after fork(), by a new server. Only system calls are allowed here, because another
 * thread may have held a lock at the fork. */
static _Noreturn void become_server(const struct listener *listeners, int count, char **argv, pid_t parent,
                                    const sigset_t *mask)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(75); /* the supervisor has died already */
    setpgid(0, 0);
    for (int i = 0; i < count; i++) fcntl(listeners[i].fd, F_SETFD, 0);
    sigprocmask(SIG_SETMASK, mask, NULL);
    execv("/proc/self/exe", argv);
    _exit(75);
}

static pid_t start_server(struct listener *listeners, int count, char **argv, const sigset_t *mask)
{
    /* room for a number and a comma for each listener: at most CONFIG_MAX_LISTEN of --listen, and that of
     * --metrics-listen */
    char numbers[(CONFIG_MAX_LISTEN + 1) * 12];
    struct text list = text_in(numbers, sizeof numbers);
    for (int i = 0; i < count; i++) text_printf(&list, "%s%d", i ? "," : "", listeners[i].fd);
    assert(list.failure == TEXT_FINE);
    setenv(variable, numbers, 1);
    const pid_t parent = getpid(), child = fork();
    if (child == 0) become_server(listeners, count, argv, parent, mask);
    unsetenv(variable);
    if (child < 0) log_event(LOG_ERROR, NULL, "supervisor", "what=fork text=" LOG_Q, strerror(errno));
    else log_event(LOG_INFO, NULL, "supervisor", "what=started pid=%d", (int)child);
    return child;
}

static bool is_final(int status)
{
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 64 || WEXITSTATUS(status) == 69 ||
                                 WEXITSTATUS(status) == 78);
}

static int exit_status(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int supervise_run(struct listener *listeners, int count, char **argv, int64_t stop_ms, int64_t again_ms)
{
    /* `before` is the signal mask with which each server starts. It blocks SIGTERM, SIGINT and SIGHUP, so that a new
     * server loses no signal. */
    sigset_t watched, before;
    int64_t kill_ms = 0; /* time at which the server is killed; 0: it was not told to stop */
    int failures = 0;
    bool stopping = false;

    sigemptyset(&watched);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGINT);
    sigaddset(&watched, SIGHUP);
    sigaddset(&watched, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &watched, &before);

    pid_t child = start_server(listeners, count, argv, &before);
    /* began_ms: time at which the server was started; start_ms: time at which the next one is to be started */
    int64_t began_ms = clock_ms(), start_ms = 0;
    for (;;) {
        int status;
        const int64_t until_ms = child > 0 ? kill_ms > 0 ? kill_ms : clock_ms() + 3600000 : start_ms;
        const int64_t wait_ms = until_ms > clock_ms() ? until_ms - clock_ms() : 0;
        const struct timespec wait = { wait_ms / 1000, wait_ms % 1000 * 1000000 };
        const int number = sigtimedwait(&watched, NULL, &wait);

        if (number == SIGTERM || number == SIGINT) {
            const int64_t at_ms = clock_ms() + (stopping ? again_ms : stop_ms) + SUPERVISE_KILL_MS;
            if (kill_ms == 0 || at_ms < kill_ms) kill_ms = at_ms;
            stopping = true;
            if (child <= 0) return 0;
            /* No other server will be started, so the sockets must refuse new clients from now on. */
            for (int i = 0; i < count; i++) listener_hide(&listeners[i]);
            kill(child, SIGTERM);
            for (int i = 0; i < count; i++) {
                if (listeners[i].fd >= 0) close(listeners[i].fd);
                listeners[i].fd = -1;
            }
        } else if (number == SIGHUP && child > 0) kill(child, SIGHUP);

        if (child > 0 && kill_ms > 0 && clock_ms() >= kill_ms) {
            log_event(LOG_ERROR, NULL, "supervisor", "what=killed pid=%d", (int)child);
            kill(child, SIGKILL);
            /* the next time to kill it again, because a killed server may take a moment to end */
            kill_ms = clock_ms() + SUPERVISE_KILL_MS;
        }
        if (child > 0 && waitpid(child, &status, WNOHANG) == child) {
            const int64_t lived_ms = clock_ms() - began_ms;
            child = 0;
            log_event(is_final(status) ? LOG_INFO : LOG_ERROR, NULL, "supervisor", "what=ended status=%d lived_ms=%lld",
                      exit_status(status), (long long)lived_ms);
            failures = lived_ms < SUPERVISE_SHORT_LIFE_S * 1000 ? failures + 1 : 0;
            if (stopping || is_final(status) || failures >= SUPERVISE_GIVE_UP) return exit_status(status);
            const int pause_s = failures <= 1 ? 0 : 1 << (failures - 2);
            start_ms = clock_ms() + 1000 * (pause_s < SUPERVISE_MAX_PAUSE_S ? pause_s : SUPERVISE_MAX_PAUSE_S);
        }
        if (child <= 0 && clock_ms() >= start_ms) {
            child = start_server(listeners, count, argv, &before);
            began_ms = clock_ms();
            if (child < 0) start_ms = clock_ms() + 1000;
        }
    }
}
