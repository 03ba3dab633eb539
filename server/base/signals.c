/* signals.c: one thread that waits for signals and ends a process that hangs; see signals.h. */
#include "server/base/signals.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/base/clock.h"

/* WAKE: the signal by which signals_end_within() wakes the signal thread */
enum { WAKE = SIGALRM, LONG_MS = 3600000 };

static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    bool running, told;
    void (*notify)(void *context, int number);
    void *context;
    int64_t first_ms, again_ms;
    int64_t end_ms; /* time (of clock_ms()) at which the process is ended; 0: the process was not told to stop */
    int status;
} self = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void set_of(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
    sigaddset(set, SIGHUP);
}

void signals_block(void)
{
    sigset_t set;
    set_of(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

/* Sets the time limit for the end of the process, unless an earlier one is set. Call this with the lock held. */
static void end_within(int64_t ms, int status)
{
    const int64_t end_ms = clock_ms() + ms;
    if (self.end_ms != 0 && self.end_ms <= end_ms) return;
    self.end_ms = end_ms;
    self.status = status;
}

/* Ends the process without using the log, because the log may be what hangs. */
static _Noreturn void end(int status)
{
    static const char text[] = "attnd: told to stop, it did not end in time: ended\n";
    struct pollfd sink = { .fd = STDERR_FILENO, .events = POLLOUT };
    if (poll(&sink, 1, 0) == 1 && (sink.revents & POLLOUT)) (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(status);
}

static void *run(void *unused)
{
    sigset_t set;
    (void)unused;
    set_of(&set);
    sigaddset(&set, WAKE);
    for (;;) {
        pthread_mutex_lock(&self.lock);
        int64_t wait_ms = self.end_ms == 0 ? LONG_MS : self.end_ms - clock_ms();
        if (wait_ms <= 0) end(self.status);
        pthread_mutex_unlock(&self.lock);
        if (wait_ms > LONG_MS) wait_ms = LONG_MS;
        const struct timespec wait = { wait_ms / 1000, wait_ms % 1000 * 1000000 };
        const int number = sigtimedwait(&set, NULL, &wait);
        if (number <= 0 || number == WAKE) continue;
        pthread_mutex_lock(&self.lock);
        if (number != SIGHUP) {
            end_within(self.told ? self.again_ms : self.first_ms, SIGNALS_STUCK);
            self.told = true;
        }
        if (self.notify) self.notify(self.context, number);
        pthread_mutex_unlock(&self.lock);
    }
    return NULL;
}

bool signals_start(void (*notify)(void *context, int number), void *context, int64_t first_ms, int64_t again_ms)
{
    sigset_t wake, before;
    self.notify = notify;
    self.context = context;
    self.first_ms = first_ms;
    self.again_ms = again_ms;
    sigemptyset(&wake);
    sigaddset(&wake, WAKE);
    /* the new thread inherits the signal mask, so it starts with this signal blocked */
    pthread_sigmask(SIG_BLOCK, &wake, &before);
    self.running = pthread_create(&self.thread, NULL, run, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (self.running) pthread_detach(self.thread);
    return self.running;
}

void signals_end_within(int64_t ms, int status)
{
    pthread_mutex_lock(&self.lock);
    end_within(ms, status);
    if (self.running) pthread_kill(self.thread, WAKE);
    pthread_mutex_unlock(&self.lock);
}

void signals_quiet(void)
{
    pthread_mutex_lock(&self.lock);
    self.notify = NULL;
    pthread_mutex_unlock(&self.lock);
}
