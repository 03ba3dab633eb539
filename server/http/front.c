/* front.c: what the loop asks of the side that holds the connections, and how slow a connection may be. */
#include "server/http/front.h"

#include <microhttpd.h>

#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/routes/routes.h"
#include "server/http/tokens.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"

static int connections(void *context)
{
    const struct front *front = context;
    return atomic_load(&front->connections.totals.count) + front->retiring;
}

/* Listeners at their end are closed when nobody can be at the door any more. */
static void finish_listeners(struct front *front, int64_t now_ms)
{
    front->retiring = 0;
    for (int i = 0; i < front->listener_count; i++) {
        struct listener *listener = &front->listeners[i];
        if (listener_is_retiring(listener, now_ms)) front->retiring++;
        else if (listener->retired_ms > 0) listener_stop(listener);
    }
}

/* Whom will nobody miss? */
static struct connection_patience patience_of(const struct front *front)
{
    const int64_t drain_ms = atomic_load(&front->server->drain_since_ms),
                  used_ms = atomic_load(&front->connections.used_ms);
    return (struct connection_patience){ FRONT_SILENT_MS, FRONT_STALLED_MS, used_ms > drain_ms ? used_ms : drain_ms };
}

static void sweep(void *context, int64_t now_ms, bool draining)
{
    struct front *front = context;
    const struct config *config = front->server->config;
    const struct connection_limits limits = {
        .head_ms = config->body_timeout_ms < FRONT_HEAD_MS ? config->body_timeout_ms : FRONT_HEAD_MS,
        .idle_ms = FRONT_IDLE_MS,
        .stall_ms = config->body_stall_ms,
        .transfer_ms = config->body_timeout_ms,
    };
    const struct connection_patience patience = patience_of(front);
    if (draining) finish_listeners(front, now_ms);
    if (++front->sweeps % (1 + (unsigned)connections(front) / FRONT_SWEEP_CONNECTIONS) == 0)
        connections_sweep(&front->connections, now_ms, &limits, draining ? &patience : NULL);
    linger_sweep(&front->connections.linger, now_ms);
    if (!draining) http_server_balance(&front->main_http, now_ms);
}

static bool is_known(void *context, const struct caller *caller)
{
    return tokens_know(context, caller);
}

static void reload(void *context)
{
    const struct front *front = context;
    char why[512];
    if (front->server->tokens == NULL) return;
    if (tokens_reload(front->server->tokens, why, sizeof why)) {
        log_event(LOG_INFO, NULL, "reloaded", "what=tokens");
        /* Nobody could unregister, delete or use them any more. */
        if (front->server->regions) regions_forget(front->server->regions, is_known, front->server->tokens);
        caches_forget(front->server->caches, is_known, front->server->tokens);
        contexts_forget(front->server->contexts, clock_ms(), is_known, front->server->tokens);
    } else log_event(LOG_ERROR, NULL, "reload_failed", "text=" LOG_Q, why);
}

static void drain(void *context)
{
    struct front *front = context;
    for (int i = 0; i < front->listener_count; i++)
        if (front->listeners[i].http->kind == PORT_MAIN) listener_retire(&front->listeners[i]);
    finish_listeners(front, clock_ms());
    http_server_unpin(&front->main_http);
}

static void close_metrics(void *context)
{
    struct front *front = context;
    for (int i = 0; i < front->listener_count; i++)
        if (front->listeners[i].http->kind == PORT_METRICS) listener_stop(&front->listeners[i]);
}

struct loop_front front_for_loop(struct front *front)
{
    return (struct loop_front){ front, http_server_resume, connections, sweep, reload, drain, close_metrics };
}

static void on_lingering(void *context)
{
    struct front *front = context;
    linger_drop(&front->connections.linger);
}

void front_init(struct front *front, struct server *server, struct listener *listeners, int count)
{
    const struct config *const config = server->config;
    *front = (struct front){ .server = server, .listeners = listeners, .listener_count = count };
    connections_init(&front->connections);
    linger_limit(&front->connections.linger,
                 config->max_connections < LINGER_MOST ? config->max_connections : LINGER_MOST, config->discard_bytes,
                 config->discard_ms);
    server->web_library = MHD_get_version();
    server->connections = &front->connections;
    server->open_connections = &front->connections.totals;
}

attn_status front_open(struct front *front, attn_error *err)
{
    attn_status status = http_server_open(&front->main_http, front->server, PORT_MAIN, err);
    if (status == ATTN_OK && front->server->config->metrics_listen)
        status = http_server_open(&front->metrics_http, front->server, PORT_METRICS, err);
    return status;
}

attn_status front_start(struct front *front, attn_error *err)
{
    attn_status status = ATTN_OK;
    const int lingering = front->connections.linger.epoll_fd;
    if (loop_watch(front->server->loop, lingering, on_lingering, front, &front->linger_watch, err) != ATTN_OK)
        return attn_fail(err, ATTN_INTERNAL, NULL, "the sockets whose clients still send cannot be watched");
    for (int i = 0; i < front->listener_count && status == ATTN_OK; i++) {
        const bool main_address = i < front->server->config->listen_count;
        status = listener_start(&front->listeners[i], front->server->loop, front->server,
                                main_address ? &front->main_http : &front->metrics_http, err);
    }
    return status;
}

void front_close(struct front *front)
{
    for (int i = 0; i < front->listener_count; i++) listener_close(&front->listeners[i]);
    http_server_close(&front->metrics_http);
    http_server_close(&front->main_http);
}

void front_clear(struct front *front)
{
    connections_clear(&front->connections);
}
