/* routes.c: the table of URLs, and the handlers that need no device.
 *
 * A path is looked up as it stands (percent-escapes resolved, query cut off): no patterns, no trailing slashes.
 * What a row does not say is the same for all: framing checks, request ids, limits, tokens, HEAD, CORS, logging and
 * counting (daemon.c). */
#include "server/http/routes.h"
#include "server/http/peers.h"

#include <stdlib.h>
#include <string.h>

#include "server/api/gauges.h"
#include "server/api/ready.h"
#include "server/base/arena.h"
#include "server/base/clock.h"
#include "server/work/contexts.h"
#include "server/device/devices.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/work/server.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- Handlers ---------------------------------------------------------------------------------------------------- */

static void answer_text(struct answer *answer, int status, const char *text)
{
    answer->status = status;
    answer->content_type = "text/plain; charset=utf-8";
    answer->length = strlen(text);
    answer->body = strdup(text);
}

static void answer_livez(struct server *server, struct answer *answer)
{
    (void)server;
    answer_text(answer, 200, "ok\n");
}

static void answer_readyz(struct server *server, struct answer *answer)
{
    char why[96], text[100];
    const bool yes = ready(server, why, sizeof why);
    snprintf(text, sizeof text, "%s\n", why);
    answer_text(answer, yes ? 200 : 503, text);
}

static void answer_metrics(struct server *server, struct answer *answer)
{
    gauges_publish(server);
    metrics_set(METRIC_CONNECTIONS, NULL, NULL, atomic_load(&server->peers->count));
    answer->status = 200;
    answer->content_type = "text/plain; version=0.0.4; charset=utf-8";
    answer->body = metrics_write(&answer->length);
}

static void answer_info(struct server *server, struct answer *answer)
{
    const int count = devices_count(server->devices);
    struct device_state *devices = calloc((size_t)count + 1, sizeof *devices);
    int64_t requests, bytes;
    if (devices == NULL) return; /* no body: 500 */
    devices_describe(server->devices, devices);
    queue_waiting(&server->queue, &requests, &bytes);
    int inflight = 0;
    for (int state = 0; state < REQUEST_STATE_COUNT; state++) inflight += request_count((enum request_state)state);
    const struct info_facts facts = {
        .config = server->config,
        .limits = &server->limits,
        .state = server_phase_label(atomic_load(&server->phase)),
        .uptime_s = (double)(clock_ms() - server->started_ms) / 1e3,
        .devices = devices,
        .device_count = count,
        .queue_requests = requests,
        .queue_bytes = bytes,
        .connections = atomic_load(&server->peers->count),
        .inflight_requests = inflight,
        .staging_used_bytes = arena_leased_bytes(server->arena),
    };
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = info_write(&facts, &answer->length);
    free(devices);
}

static void answer_openapi(struct server *server, struct answer *answer)
{
    struct info_route list[64];
    int count, listed = 0;
    const struct route *all = routes_all(&count);
    for (int i = 0; i < count && listed < (int)ARRAY_SIZE(list); i++)
        if (all[i].ports & PORT_MAIN) list[listed++] = (struct info_route){ all[i].path, all[i].kind };
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = info_openapi_write(server->config, &server->limits, list, listed, &answer->length);
}

static void answer_page(struct server *server, struct answer *answer)
{
    (void)server;
    answer->status = 200;
    answer->content_type = "text/html; charset=utf-8";
    answer->csp = info_page_csp;
    answer->body = info_page_write(&answer->length);
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

#define BOTH (PORT_MAIN | PORT_METRICS)

/* clang-format off */
static const struct route routes[] = {
    /* path                    method      endpoint    kind                 ports      token  quiet  body  op */
    { "/v1/attention/forward",  ROUTE_POST, "forward",  INFO_ROUTE_FORWARD,  PORT_MAIN, true,  false, true, ATTN_OP_FORWARD,  NULL },
    { "/v1/attention/backward", ROUTE_POST, "backward", INFO_ROUTE_BACKWARD, PORT_MAIN, true,  false, true, ATTN_OP_BACKWARD, NULL },
    { "/v1/info",               ROUTE_GET,  "info",     INFO_ROUTE_INFO,     PORT_MAIN, true,  false, false, 0, answer_info },
    { "/openapi.json",          ROUTE_GET,  "openapi",  INFO_ROUTE_OPENAPI,  PORT_MAIN, false, false, false, 0, answer_openapi },
    { "/",                      ROUTE_GET,  "page",     INFO_ROUTE_PAGE,     PORT_MAIN, false, false, false, 0, answer_page },
    { "/metrics",               ROUTE_GET,  "metrics",  INFO_ROUTE_METRICS,  PORT_MAIN, true,  true,  false, 0, answer_metrics },
    { "/metrics",               ROUTE_GET,  "metrics",  INFO_ROUTE_METRICS,  PORT_METRICS, false, true, false, 0, answer_metrics },
    { "/livez",                 ROUTE_GET,  "livez",    INFO_ROUTE_LIVE,     BOTH,      false, true,  false, 0, answer_livez },
    { "/healthz",               ROUTE_GET,  "livez",    INFO_ROUTE_LIVE,     BOTH,      false, true,  false, 0, answer_livez },
    { "/health",                ROUTE_GET,  "livez",    INFO_ROUTE_LIVE,     BOTH,      false, true,  false, 0, answer_livez },
    { "/v2/health/live",        ROUTE_GET,  "livez",    INFO_ROUTE_LIVE,     BOTH,      false, true,  false, 0, answer_livez },
    { "/readyz",                ROUTE_GET,  "readyz",   INFO_ROUTE_READY,    BOTH,      false, true,  false, 0, answer_readyz },
    { "/v2/health/ready",       ROUTE_GET,  "readyz",   INFO_ROUTE_READY,    BOTH,      false, true,  false, 0, answer_readyz },
};
/* clang-format on */

const struct route *routes_all(int *count)
{
    *count = (int)ARRAY_SIZE(routes);
    return routes;
}

const struct route *routes_find(const char *path, unsigned port)
{
    for (size_t i = 0; i < ARRAY_SIZE(routes); i++)
        if ((routes[i].ports & port) && strcmp(routes[i].path, path) == 0) return &routes[i];
    return NULL;
}

const char *route_allow(const struct route *route)
{
    return route->method == ROUTE_GET ? "GET, HEAD" : "POST";
}

bool route_allows(const struct route *route, const char *method)
{
    if (route->method == ROUTE_POST) return strcmp(method, "POST") == 0;
    return strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
}
