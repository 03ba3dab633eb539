/* stop.c: how the server stops (SIGTERM or SIGINT).
 *
 *   SERVING --signal--> DRAINING: readiness is 503, new clients are refused, each listener accepts the connections in
 *                                 its backlog and is then closed, answers have Connection: close
 *           --no connection is open, or --drain-ms passed, or a second signal-->
 *                       STOPPING: waiting requests are answered 503, no connection is suspended any more
 *           --no connection is suspended, and none is open or LOOP_STOP_MS passed--> over
 *
 * When the last usable device fails, readiness is 503 and STOPPING begins at once; loop_run() then returns 70. */
#include "server/sched/loop_internal.h"

#include "server/base/clock.h"
#include "server/base/log.h"

static void enter_stage(struct loop *loop, enum loop_stage stage)
{
    loop->stage = stage;
    loop->stage_since_ms = clock_ms();
}

int stop_open_connections(const struct loop *loop)
{
    return loop->frontend.connections(loop->frontend.context);
}

void stop_drain(struct loop *loop)
{
    int ready = SERVER_READY;
    const int open = stop_open_connections(loop);
    /* Refuses new connections before the stage DRAINING begins. In that stage each answer closes its connection, and
     * its client may try to connect again. */
    loop->frontend.drain(loop->frontend.context);
    enter_stage(loop, DRAINING);
    atomic_compare_exchange_strong(&loop->server->phase, &ready, SERVER_DRAINING);
    atomic_store(&loop->server->drain_since_ms, loop->stage_since_ms);
    log_event(LOG_INFO, NULL, "draining", "connections=%d waiting=%d", open, atomic_load(&loop->server->suspended));
}

void stop_waiting(struct loop *loop)
{
    if (loop->stage == STOPPING) return;
    if (loop->stage == SERVING) stop_drain(loop);
    enter_stage(loop, STOPPING);
    loop->frontend.close_metrics(loop->frontend.context);
    atomic_store(&loop->server->stopping, true);
    int cut = 0;
    for (struct request *request = loop->oldest, *next; request; request = next, cut++) {
        next = request->next;
        waiting_let_go_of_device(request);
        if (loop->exit_status != 0) waiting_cancel(loop, request, PROTO_E_UNAVAILABLE, "no device is usable");
        else waiting_cancel(loop, request, PROTO_E_DRAINING, "the server is stopping");
    }
    if (cut > 0) log_event(LOG_WARN, NULL, "stopping", "unanswered=%d", cut);
}

void stop_advance(struct loop *loop, int64_t now_ms)
{
    struct server *server = loop->server;
    const int open = stop_open_connections(loop);
    if (loop->stage == DRAINING && (open == 0 || now_ms - loop->stage_since_ms >= server->config->drain_ms))
        stop_waiting(loop);
    if (loop->stage != STOPPING || atomic_load(&server->suspended) > 0) return;
    if (open > 0 && now_ms - loop->stage_since_ms < LOOP_STOP_MS) return;
    uv_stop(&loop->uv);
}
