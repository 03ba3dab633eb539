/* loop.c: the main thread. It owns every request between the end of its body and its answer.
 *
 *   on_message      takes new requests (sets their deadlines, queues them) and finished batches (batches.c)
 *   on_check        runs once per iteration, after all messages: sends batches to devices that have room
 *   on_deadline     handles the timer that all deadlines share (waiting.c, deadlines.c)
 *   waiting_tick    starts to watch for hang-ups of clients that have waited long enough
 *   on_sweep        cuts slow connections, frees old memory and contexts, and advances a drain (stop.c) */
#include "server/sched/loop_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/intake/prepare.h"
#include "server/work/transaction.h"
#include "server/device/devices.h"
#include "server/device/inline.h"
#include "server/intake/check.h"
#include "server/sched/finish.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/polling_sleep.h"

/* ---- What libuv calls before and after each iteration of the event loop ------------------------------------------ */

/* on_prepare() and on_check() tell the watchdog that the main thread is idle while libuv waits for events. */
static void on_prepare(uv_prepare_t *prepare)
{
    struct loop *loop = prepare->loop->data;
    heartbeat_idle();
    const int64_t now_ns = clock_ns();
    if (now_ns >= loop->awake_until_ns || atomic_load(&loop->server->suspended) > NAPS_MOST ||
        !devices_away(loop->server->devices))
        return;
    const int timeout_ms = uv_backend_timeout(&loop->uv); /* milliseconds until the next timer; -1: no timer is set */
    const int64_t timer_ns = timeout_ms < 0 ? INT64_MAX : now_ns + timeout_ms * CLOCK_NS_PER_MS;
    polling_sleep_until(uv_backend_fd(&loop->uv), timer_ns < loop->awake_until_ns ? timer_ns : loop->awake_until_ns);
}

static void on_check(uv_check_t *check)
{
    struct loop *loop = check->loop->data;
    heartbeat_busy(HEARTBEAT_LOOP);
    if (!loop->queue_changed) return;
    loop->queue_changed = false;
    waiting_arm_deadline(loop);
    batches_dispatch(loop);
}

/* ---- Messages from other threads --------------------------------------------------------------------------------- */

struct checking {
    struct piece piece;
    struct request *request; /* the request whose body is checked; the main thread owns it meanwhile */
    struct check_result result;
    bool complete;
};

static void check_work(struct piece *piece)
{
    struct checking *checking = (struct checking *)piece; /* a valid cast: `piece` is the struct's first member */
    request_set_role(ROLE_DEVICE);
    checking->complete = check_piece(checking->request, &checking->result, clock_ns() + FINISH_PIECE_NS);
}

static const char homeless[] = "the device that alone can compute this has failed";

/* True if a part of the queued job can run only on a device that has failed. */
static bool is_homeless(const struct loop *loop, const struct job *job)
{
    for (const struct job_part *part = &job->part; part; part = part->next)
        if (part->device >= 0 && !devices_is_usable(loop->server->devices, part->device)) return true;
    return false;
}

static void on_checked(struct piece *piece)
{
    struct checking *checking = (struct checking *)piece;
    struct loop *loop = piece->pieces->loop->data;
    struct request *request = checking->request;
    assert(loop->finishing > 0 && request->held && request->state == REQUEST_CHECKING);
    if (!checking->complete && !request->failed && !request->gone) {
        pieces_add(&loop->pieces, &checking->piece);
        return;
    }
    loop->finishing--;
    request->held = false;
    deadlines_remove(&loop->deadlines, &request->deadline);
    check_apply(request, &checking->result);
    free(checking);
    if (!request->failed && !request->gone && request->job->runnable > 0) {
        request->job->request = request;
        request_move(request, REQUEST_QUEUED);
        if (!batches_begin(loop, request->job)) return;
        if (is_homeless(loop, request->job)) waiting_cancel(loop, request, PROTO_E_UNAVAILABLE, homeless);
        else if (!deadlines_add(&loop->deadlines, &request->deadline))
            waiting_cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a deadline");
        return;
    }
    if (request->job) contexts_finish_job(request->job, false);
    request_drop_body(request); /* releases the place in the queue and the parser's memory */
    waiting_hand_back(loop, request);
}

static void check(struct loop *loop, struct request *request)
{
    struct checking *checking = loop->stage == STOPPING ? NULL : calloc(1, sizeof *checking);
    if (checking == NULL || !deadlines_add(&loop->deadlines, &request->deadline)) {
        if (loop->stage == STOPPING) request_fail(request, PROTO_E_DRAINING, NULL, "the server is stopping");
        else request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory to check the request");
        free(checking);
        request_drop_body(request);
        waiting_hand_back(loop, request);
        return;
    }
    checking->piece =
        (struct piece){ .flow = request->flow, .work = FLOW_CHECK, .run = check_work, .after = on_checked };
    checking->request = request;
    loop->queue_changed = true;
    request->held = true;
    loop->finishing++;
    pieces_add(&loop->pieces, &checking->piece);
}

/* Takes over a late job: an HTTP thread has started it on a device, and it takes longer than expected. The job becomes
 * a batch of its own. False: out of memory; the request has been answered. */
static bool take_late(struct loop *loop, struct request *request)
{
    struct job *job = request->job;
    struct batch *batch = calloc(1, sizeof *batch + sizeof batch->parts[0]);
    /* Without memory for a batch, the request fails, but only after the device has stopped using the job's memory. */
    if (batch == NULL) {
        inline_settle(job);
        transaction_end(job, false);
        loop->queue_changed = loop->transactions_changed = true;
        waiting_cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a batch");
        return false;
    }
    job->queued_ns = clock_ns();
    batch->parts[0] = job_part_leaves(&job->part, batch);
    batch->flops = job->flops;
    batch->bytes = job->bytes;
    batch->count = batch->waiting = 1;
    batch->flow = job->flow;
    request->held = waiting_is_used_in_place(job);
    batches_mark(batch);
    metrics_observe(METRIC_BATCH_SIZE, NULL, 1);
    devices_submit_late(loop->server->devices, batch);
    queue_flow_runs(job->flow, batch->left_ns);
    /* makes on_check() set the timer, because this request's deadline may be the earliest */
    loop->queue_changed = true;
    return true;
}

static void request_arrived(struct loop *loop, struct request *request)
{
    waiting_add(loop, request);
    if (request->state == REQUEST_CHECKING) {
        check(loop, request);
        return;
    }
    if (request->job->part.handed_over) {
        if (!take_late(loop, request)) return;
    } else if (!batches_begin(loop, request->job)) return;
    if (loop->stage == STOPPING) {
        waiting_let_go_of_device(request);
        waiting_cancel(loop, request, PROTO_E_DRAINING, "the server is stopping");
        return;
    }
    if (request->state == REQUEST_QUEUED && is_homeless(loop, request->job))
        waiting_cancel(loop, request, PROTO_E_UNAVAILABLE, homeless);
    else if (!deadlines_add(&loop->deadlines, &request->deadline))
        waiting_cancel(loop, request, PROTO_E_OUT_OF_MEMORY, "no memory for a deadline");
}

static void on_message(void *context, struct message *message)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    switch (message->kind) {
    case LOOP_REQUEST:
        request_arrived(context, (struct request *)message);
        /* The casts are valid: `message` is the first member of struct request and of struct batch. */
        break;
    case LOOP_BATCH: batches_done(context, (struct batch *)message); break;
    default: assert(0 && "a message of no kind");
    }
}

void loop_post(struct loop *loop, struct request *request)
{
    request->message.kind = LOOP_REQUEST;
    mailbox_post(&loop->box, &request->message);
}

static void on_step_ended(uv_async_t *async)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct loop *loop = async->loop->data;
    loop->queue_changed = loop->transactions_changed = true;
}

void loop_note_step_end(struct loop *loop)
{
    uv_async_send(&loop->step_ended);
}

/* ---- Regular sweeps, and signals --------------------------------------------------------------------------------- */

/* Returns freed memory to the system after many connections have closed; glibc would keep it. */
static void give_back_memory(struct loop *loop)
{
    const int open = stop_open_connections(loop);
    if (open > loop->most_open) loop->most_open = open;
    if (loop->most_open < LOOP_CROWD || open > loop->most_open / 4) return;
    loop->most_open = open;
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static void on_sweep(uv_timer_t *timer)
{
    struct loop *loop = timer->loop->data;
    struct server *server = loop->server;
    const int64_t now_ms = clock_ms();

    loop->frontend.sweep(loop->frontend.context, now_ms, loop->stage != SERVING);
    if (!server->pinned) staging_trim(server->staging, now_ms, STAGING_WARM_MS);
    contexts_expire(server->contexts, now_ms);
    caches_expire(server->caches, now_ms);
    give_back_memory(loop);
    batches_look_at_devices(loop);
    double seconds;
    const int jobs = inline_learn(server->devices, &seconds);
    if (jobs > 0) queue_learn(&server->queue, jobs, seconds);
    if (loop->stage != SERVING) stop_advance(loop, now_ms);
}

static void on_signalled(uv_async_t *async)
{
    heartbeat_busy(HEARTBEAT_LOOP);
    struct loop *loop = async->loop->data;
    if (atomic_exchange(&loop->reloads, 0) > 0) loop->frontend.reload(loop->frontend.context);
    for (int stops = atomic_exchange(&loop->stops, 0); stops > 0; stops--) {
        log_event(LOG_INFO, NULL, "signal", "stage=%s", loop->stage == SERVING ? "serving" : "draining");
        if (loop->stage == SERVING) {
            stop_drain(loop);
            stop_advance(loop, clock_ms());
        } else stop_waiting(loop);
    }
}

void loop_signal(struct loop *loop, int number)
{
    atomic_fetch_add(number == SIGHUP ? &loop->reloads : &loop->stops, 1);
    uv_async_send(&loop->signalled);
}

/* ---- Opening the event loop -------------------------------------------------------------------------------------- */

static void must(int error, const char *what)
{
    if (error == 0) return;
    fprintf(stderr, "attnd: %s: %s\n", what, uv_strerror(error));
    abort();
}

/* Does nothing. As the first work for libuv, it makes libuv start its threads right after threads_try() has shown that
 * all can be started. If libuv started them later and the system refused one, libuv would abort the process. */
static void nothing(uv_work_t *work)
{
    (void)work;
}

/* Returns the highest descriptor number that this process may get. A watcher for it gives libuv's array of watchers its
 * largest size at once: libuv would abort if the array could not grow later. */
static int highest_number(int fd, const struct config *config)
{
    const int most = config->max_connections + CONFIG_SPARE_FILES + CONFIG_METRICS_CONNECTIONS + REGIONS_MAX_COUNT +
                     LINGER_MOST;
    struct rlimit files;
    if (fd < 0 || getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == 0) return fd;
    const int number = files.rlim_cur < (rlim_t)most ? (int)files.rlim_cur - 1 : most;
    const int high = fcntl(fd, F_DUPFD_CLOEXEC, number);
    if (high < 0) return fd;
    close(fd);
    return high;
}

struct loop *loop_open(struct server *server)
{
    struct loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL) {
        fprintf(stderr, "attnd: out of memory for an event loop of %zu bytes\n", sizeof *loop);
        abort();
    }
    must(uv_loop_init(&loop->uv), "event loop");
    loop->uv.data = loop;
    loop->scan = 1;
    loop->server = server;
    server->loop_library = uv_version_string();
    pieces_init(&loop->pieces, &loop->uv, &server->queue);
    must(mailbox_open(&loop->box, &loop->uv, on_message, loop), "mailbox");
    must(uv_check_init(&loop->uv, &loop->check), "event loop");
    must(uv_check_start(&loop->check, on_check), "event loop");
    must(uv_prepare_init(&loop->uv, &loop->prepare), "event loop");
    must(uv_prepare_start(&loop->prepare, on_prepare), "event loop");
    must(uv_timer_init(&loop->uv, &loop->deadline_timer), "event loop");
    must(uv_timer_init(&loop->uv, &loop->tick_timer), "event loop");
    must(uv_timer_start(&loop->tick_timer, waiting_tick, LOOP_TICK_MS, LOOP_TICK_MS), "event loop");
    must(uv_timer_init(&loop->uv, &loop->sweep_timer), "event loop");
    loop->window_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    must(loop->window_fd < 0 ? -errno : 0, "timerfd");
    loop->window_fd = highest_number(loop->window_fd, server->config);
    must(uv_poll_init(&loop->uv, &loop->window_poll, loop->window_fd), "timerfd");
    must(uv_poll_start(&loop->window_poll, UV_READABLE, batches_window), "timerfd");
    must(uv_async_init(&loop->uv, &loop->signalled, on_signalled), "signals");
    must(uv_async_init(&loop->uv, &loop->step_ended, on_step_ended), "event loop");
    must(uv_queue_work(&loop->uv, &loop->first_work, nothing, NULL), "event loop");
    return loop;
}

struct mailbox *loop_mailbox(struct loop *loop)
{
    return &loop->box;
}
uv_loop_t *loop_uv(struct loop *loop)
{
    return &loop->uv;
}

/* ---- Watching file descriptors for other parts of the server ----------------------------------------------------- */

struct loop_watch {
    uv_poll_t poll;
    void (*on_readable)(void *context);
    void *context;
    struct loop_watch *previous, *next;
};

static void on_readable(uv_poll_t *poll, int status, int events)
{
    const struct loop_watch *watch = poll->data;
    (void)events;
    heartbeat_busy(HEARTBEAT_LOOP);
    if (status == 0) watch->on_readable(watch->context);
}

static void on_watch_closed(uv_handle_t *handle)
{
    free(handle->data);
}

attn_status loop_watch(struct loop *loop, int fd, void (*on_it)(void *context), void *context,
                       struct loop_watch **watch, attn_error *err)
{
    struct loop_watch *made = calloc(1, sizeof *made);
    int error = made == NULL ? UV_ENOMEM : uv_poll_init(&loop->uv, &made->poll, fd);
    if (error != 0) {
        free(made);
        return attn_fail(err, ATTN_INTERNAL, NULL, "%s", uv_strerror(error));
    }
    made->poll.data = made;
    made->on_readable = on_it;
    made->context = context;
    if ((made->next = loop->watches) != NULL) made->next->previous = made;
    loop->watches = made;
    if ((error = uv_poll_start(&made->poll, UV_READABLE, on_readable)) != 0) {
        loop_unwatch(made);
        return attn_fail(err, ATTN_INTERNAL, NULL, "%s", uv_strerror(error));
    }
    *watch = made;
    return ATTN_OK;
}

void loop_unwatch(struct loop_watch *watch)
{
    struct loop *loop = watch->poll.loop->data;
    if (watch->next) watch->next->previous = watch->previous;
    if (watch->previous) watch->previous->next = watch->next;
    else loop->watches = watch->next;
    uv_poll_stop(&watch->poll);
    uv_close((uv_handle_t *)&watch->poll, on_watch_closed);
}

/* ---- Running and closing the event loop -------------------------------------------------------------------------- */

int loop_run(struct loop *loop, const struct loop_frontend *frontend)
{
    request_set_role(ROLE_LOOP);
    loop->frontend = *frontend;
    /* The timer for sweeps is not started in loop_open(): if the server cannot start, the loop runs once more to close,
     * and a sweep would need devices that do not exist. */
    must(uv_timer_start(&loop->sweep_timer, on_sweep, LOOP_SWEEP_MS, LOOP_SWEEP_MS), "event loop");
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    assert(loop->stage == STOPPING && loop->oldest == NULL);
    return loop->exit_status;
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle)) uv_close(handle, NULL);
}

void loop_close(struct loop *loop)
{
    /* Ends what is left: running pieces are completed, hang-up watches closed, and late batches freed without an
     * answer. */
    /* on_prepare() need not poll for the ends of batches any more, because the devices have stopped */
    loop->awake_until_ns = 0;
    while (loop->finishing > 0) uv_run(&loop->uv, UV_RUN_ONCE);
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    mailbox_close(&loop->box);
    while (loop->watches) loop_unwatch(loop->watches);
    uv_walk(&loop->uv, close_handle, NULL);
    uv_run(&loop->uv, UV_RUN_DEFAULT);
    uv_loop_close(&loop->uv);
    close(loop->window_fd);
    deadlines_clear(&loop->deadlines);
    free(loop);
}
