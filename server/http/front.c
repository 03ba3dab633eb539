/* front.c: what the loop asks of the side that holds the connections, and how slow a connection may be. */
#include "server/http/front.h"

#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/http/routes.h"
#include "server/http/tokens.h"

static int connections(void *context)
{
    const struct front *front = context;
    return atomic_load(&front->peers.count);
}

static void sweep(void *context, int64_t now_ms, bool draining)
{
    struct front *front = context;
    const struct config *config = front->server->config;
    const struct peer_limits limits = {
        .head_ms = config->body_timeout_ms < FRONT_HEAD_MS ? config->body_timeout_ms : FRONT_HEAD_MS,
        .idle_ms = FRONT_IDLE_MS,
        .stall_ms = config->body_stall_ms,
        .transfer_ms = config->body_timeout_ms,
    };
    static const struct peer_patience patience = { FRONT_SILENT_MS, FRONT_STALLED_MS };
    if (++front->sweeps % (1 + (unsigned)connections(front) / FRONT_SWEEP_PEERS) == 0)
        peers_sweep(&front->peers, now_ms, &limits, draining ? &patience : NULL);
    linger_sweep(&front->peers.linger, now_ms);
    if (!draining) daemon_balance(&front->main_port, now_ms);
}

static void reload(void *context)
{
    const struct front *front = context;
    char why[512];
    if (front->server->tokens == NULL) return;
    if (tokens_reload(front->server->tokens, why, sizeof why)) log_event(LOG_INFO, NULL, "reloaded", "what=tokens");
    else log_event(LOG_ERROR, NULL, "reload_failed", "text=" LOG_Q, why);
}

static void stop_listeners(struct front *front, unsigned kind)
{
    for (int i = 0; i < front->listener_count; i++)
        if (front->listeners[i].port->kind == kind) listener_stop(&front->listeners[i]);
}

static void drain(void *context)
{
    struct front *front = context;
    stop_listeners(front, PORT_MAIN);
    daemon_let_go(&front->main_port);
}

static void hurry(void *context)
{
    stop_listeners(context, PORT_METRICS);
}

struct loop_front front_for_loop(struct front *front)
{
    return (struct loop_front){ front, daemon_resume, connections, sweep, reload, drain, hurry };
}

void front_init(struct front *front, struct server *server, struct listener *listeners, int count)
{
    *front = (struct front){ .server = server, .listeners = listeners, .listener_count = count };
    peers_init(&front->peers);
    server->peers = &front->peers;
}

attn_status front_open(struct front *front, attn_error *err)
{
    attn_status status = daemon_open(&front->main_port, front->server, PORT_MAIN, err);
    if (status == ATTN_OK && front->server->config->metrics_listen)
        status = daemon_open(&front->metrics_port, front->server, PORT_METRICS, err);
    return status;
}

attn_status front_start(struct front *front, attn_error *err)
{
    attn_status status = ATTN_OK;
    for (int i = 0; i < front->listener_count && status == ATTN_OK; i++) {
        const bool main_address = i < front->server->config->listen_count;
        status = listener_start(&front->listeners[i], loop_uv(front->server->loop), front->server,
                                main_address ? &front->main_port : &front->metrics_port, err);
    }
    return status;
}

void front_close(struct front *front)
{
    for (int i = 0; i < front->listener_count; i++) listener_close(&front->listeners[i]);
    daemon_close(&front->metrics_port);
    daemon_close(&front->main_port);
}

void front_clear(struct front *front)
{
    peers_clear(&front->peers);
}
