/* frontend.c: what the main thread does with web servers, listeners, connections and tokens, and the time limits of
 * connections. */
#include "server/http/frontend.h"

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
    const struct frontend *frontend = context;
    return atomic_load(&frontend->connections.totals.count) + frontend->retiring;
}

/* Closes each retired listener (one that accepts no new clients) when no handshake can be incomplete any more. */
static void finish_listeners(struct frontend *frontend, int64_t now_ms)
{
    frontend->retiring = 0;
    for (int i = 0; i < frontend->listener_count; i++) {
        struct listener *listener = &frontend->listeners[i];
        if (listener_is_retiring(listener, now_ms)) frontend->retiring++;
        else if (listener->retired_ms > 0) listener_stop(listener);
    }
}

static struct connection_drain_limits drain_limits_of(const struct frontend *frontend)
{
    const int64_t drain_ms = atomic_load(&frontend->server->drain_since_ms),
                  used_ms = atomic_load(&frontend->connections.used_ms);
    return (struct connection_drain_limits){ FRONTEND_SILENT_MS, FRONTEND_STALLED_MS,
                                             used_ms > drain_ms ? used_ms : drain_ms };
}

static void sweep(void *context, int64_t now_ms, bool draining)
{
    struct frontend *frontend = context;
    const struct config *config = frontend->server->config;
    const struct connection_limits limits = {
        .head_ms = config->body_timeout_ms < FRONTEND_HEAD_MS ? config->body_timeout_ms : FRONTEND_HEAD_MS,
        .idle_ms = FRONTEND_IDLE_MS,
        .stall_ms = config->body_stall_ms,
        .transfer_ms = config->body_timeout_ms,
    };
    const struct connection_drain_limits drain_limits = drain_limits_of(frontend);
    if (draining) finish_listeners(frontend, now_ms);
    if (++frontend->sweeps % (1 + (unsigned)connections(frontend) / FRONTEND_SWEEP_CONNECTIONS) == 0)
        connections_sweep(&frontend->connections, now_ms, &limits, draining ? &drain_limits : NULL);
    lingering_close_sweep(&frontend->connections.linger, now_ms);
    if (!draining) mhd_balance(&frontend->main_http, now_ms);
}

static bool is_known(void *context, const struct caller *caller)
{
    return tokens_know(context, caller);
}

static void reload(void *context)
{
    const struct frontend *frontend = context;
    char why[512];
    if (frontend->server->tokens == NULL) return;
    if (tokens_reload(frontend->server->tokens, why, sizeof why)) {
        log_event(LOG_INFO, NULL, "reloaded", "what=tokens");
        /* frees the shared memory, caches and contexts (saved forwards) of removed tokens, which no client can use any
         * more */
        if (frontend->server->regions) regions_forget(frontend->server->regions, is_known, frontend->server->tokens);
        caches_forget(frontend->server->caches, is_known, frontend->server->tokens);
        contexts_forget(frontend->server->contexts, clock_ms(), is_known, frontend->server->tokens);
    } else log_event(LOG_ERROR, NULL, "reload_failed", "text=" LOG_Q, why);
}

static void drain(void *context)
{
    struct frontend *frontend = context;
    for (int i = 0; i < frontend->listener_count; i++)
        if (frontend->listeners[i].http->kind == PORT_MAIN) listener_retire(&frontend->listeners[i]);
    finish_listeners(frontend, clock_ms());
    mhd_unpin(&frontend->main_http);
}

static void close_metrics(void *context)
{
    struct frontend *frontend = context;
    for (int i = 0; i < frontend->listener_count; i++)
        if (frontend->listeners[i].http->kind == PORT_METRICS) listener_stop(&frontend->listeners[i]);
}

struct loop_frontend frontend_for_loop(struct frontend *frontend)
{
    return (struct loop_frontend){ frontend, mhd_resume, connections, sweep, reload, drain, close_metrics };
}

static void on_lingering(void *context)
{
    struct frontend *frontend = context;
    lingering_close_drop(&frontend->connections.linger);
}

void frontend_init(struct frontend *frontend, struct server *server, struct listener *listeners, int count)
{
    const struct config *const config = server->config;
    *frontend = (struct frontend){ .server = server, .listeners = listeners, .listener_count = count };
    connections_init(&frontend->connections);
    lingering_close_limit(&frontend->connections.linger,
                          config->max_connections < LINGER_MOST ? config->max_connections : LINGER_MOST,
                          config->discard_bytes, config->discard_ms);
    server->web_library = MHD_get_version();
    server->connections = &frontend->connections;
    server->open_connections = &frontend->connections.totals;
}

attn_status frontend_open(struct frontend *frontend, attn_error *err)
{
    attn_status status = mhd_open(&frontend->main_http, frontend->server, PORT_MAIN, err);
    if (status == ATTN_OK && frontend->server->config->metrics_listen)
        status = mhd_open(&frontend->metrics_http, frontend->server, PORT_METRICS, err);
    return status;
}

attn_status frontend_start(struct frontend *frontend, attn_error *err)
{
    attn_status status = ATTN_OK;
    const int lingering = frontend->connections.linger.epoll_fd;
    if (loop_watch(frontend->server->loop, lingering, on_lingering, frontend, &frontend->lingering_close_watch, err) !=
        ATTN_OK)
        return attn_fail(err, ATTN_INTERNAL, NULL, "the sockets whose clients still send cannot be watched");
    for (int i = 0; i < frontend->listener_count && status == ATTN_OK; i++) {
        const bool main_address = i < frontend->server->config->listen_count;
        status = listener_start(&frontend->listeners[i], frontend->server->loop, frontend->server,
                                main_address ? &frontend->main_http : &frontend->metrics_http, err);
    }
    return status;
}

void frontend_close(struct frontend *frontend)
{
    for (int i = 0; i < frontend->listener_count; i++) listener_close(&frontend->listeners[i]);
    mhd_close(&frontend->metrics_http);
    mhd_close(&frontend->main_http);
}

void frontend_clear(struct frontend *frontend)
{
    connections_clear(&frontend->connections);
}
