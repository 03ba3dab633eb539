/* routes.c: the table of URLs, and the handlers that need no device.
 *
 * A route is one row (server/api/route.h has its columns); what a row does not say is the same for all: framing checks,
 * request ids, limits, HEAD, CORS, logging and counting (mhd.c, answer.c). To add an endpoint: its row, its handler
 * and its test. */
#include "server/http/routes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/api/gauges.h"
#include "server/api/info.h"
#include "server/api/page.h"
#include "server/api/ready.h"
#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/metrics.h"
#include "server/device/devices.h"
#include "server/http/http_head.h"
#include "server/http/connections.h"
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

static void answer_livez(struct request *request, struct answer *answer)
{
    (void)request;
    answer_text(answer, 200, "ok\n");
}

static void answer_readyz(struct request *request, struct answer *answer)
{
    char why[96], text[100];
    const bool yes = ready(request->server, why, sizeof why);
    snprintf(text, sizeof text, "%s\n", why);
    answer_text(answer, yes ? 200 : 503, text);
}

static void answer_metrics(struct request *request, struct answer *answer)
{
    struct server *server = request->server;
    gauges_publish(server);
    metrics_set(METRIC_CONNECTIONS, NULL, NULL, atomic_load(&server->connections->count));
    answer->status = 200;
    answer->content_type = "text/plain; version=0.0.4; charset=utf-8";
    answer->body = metrics_write(&answer->length);
}

static void answer_info(struct request *request, struct answer *answer)
{
    struct server *server = request->server;
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
        .connections = atomic_load(&server->connections->count),
        .inflight_requests = inflight,
        .staging_used_bytes = staging_leased_bytes(server->staging),
    };
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = info_write(&facts, &answer->length);
    free(devices);
}

static void answer_openapi(struct request *request, struct answer *answer)
{
    int count;
    const struct route *all = routes_all(&count);
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = info_openapi_write(request->server->config, &request->server->limits, all, count, &answer->length);
}

static void answer_page(struct request *request, struct answer *answer)
{
    (void)request;
    answer->status = 200;
    answer->content_type = "text/html; charset=utf-8";
    answer->csp = page_csp;
    answer->body = page_write(&answer->length);
}

/* ---- Bodies ------------------------------------------------------------------------------------------------------ */

/* Tensors, by content type. */
static const struct route_body tensors[] = {
    /* curl names the second type when it is told nothing */
    { "application/json", "application/x-www-form-urlencoded", proto_decoder_new, NULL },
    { NULL, NULL, NULL, NULL },
};

const struct route_body *routes_body(const struct route *route, const char *content_type)
{
    if (content_type == NULL || *content_type == '\0') return route->bodies;
    for (const struct route_body *body = route->bodies; body->media; body++)
        if (http_head_is_media(content_type, body->media) ||
            (body->also && http_head_is_media(content_type, body->also)))
            return body;
    return NULL;
}

const char *routes_media(const struct route *route, char *text, size_t capacity)
{
    size_t used = 0;
    *text = '\0';
    for (const struct route_body *body = route->bodies; body->media && used < capacity; body++)
        used += (size_t)snprintf(text + used, capacity - used, "%s%s", used > 0 ? " or " : "", body->media);
    return text;
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

#define BOTH         (PORT_MAIN | PORT_METRICS)
#define SCHEMA(name) "{'$ref':'#/components/schemas/" name "'}"
#define TEXT         "{'type':'string'}"

/* clang-format off */
/* Each kind of prober has paths of its own. */
#define LIVE(at) \
    { ROUTE_GET, at, "livez", BOTH, .quiet = true, .answer = answer_livez, \
      .doc = { "operations", "Does the process work?", "Whatever the load.", \
               .answer = "The process works", .media = "text/plain", .schema = TEXT } }
#define READY(at) \
    { ROUTE_GET, at, "readyz", BOTH, .quiet = true, .answer = answer_readyz, \
      .doc = { "operations", "Does it take work?", "503 while starting, draining, or when no device is usable.", \
               .answer = "It takes work", .media = "text/plain", .schema = TEXT, \
               .errors = ROUTE_ERROR(DRAINING), .plain_503 = true } }

static const struct route routes[] = {
    /* method     path      endpoint  ports        and by name what else there is to say */
    { ROUTE_POST, "/v1/attention/forward", "forward", PORT_MAIN,
      .token = PORT_MAIN, .bodies = tensors, .op = ATTN_OP_FORWARD,
      .doc = { "attention", "Exact attention, forward",
               "out = softmax(scale q k^T) v and the natural logarithm of the softmax denominator (lse), for one problem or "
               "for a list of independent ones. Shapes must fit each other as the tensors' descriptions say. The same "
               "problem gives the same bits, whoever else is being served.",
               .body = "ForwardRequest",
               .answer = "The results", .media = "application/json", .schema = SCHEMA("ForwardAnswer") } },

    { ROUTE_POST, "/v1/attention/backward", "backward", PORT_MAIN,
      .token = PORT_MAIN, .bodies = tensors, .op = ATTN_OP_BACKWARD,
      .doc = { "attention", "Exact attention, backward: the gradients",
               "The gradients of a loss with respect to q, k and v (and sinks, bias, alibi_slopes), given its gradient with "
               "respect to out. Send forward's inputs again, or the context that a forward with save left here.",
               .body = "BackwardRequest", .errors = ROUTE_ERROR(NOT_FOUND), /* the context */
               .answer = "The gradients", .media = "application/json", .schema = SCHEMA("BackwardAnswer") } },

    { ROUTE_GET, "/v1/info", "info", PORT_MAIN, .token = PORT_MAIN, .answer = answer_info,
      .doc = { "operations", "Version, devices, limits and features",
               "What this server is, what it can compute, its limits and its load.",
               .answer = "The facts", .media = "application/json", .schema = SCHEMA("Info") } },

    { ROUTE_GET, "/openapi.json", "openapi", PORT_MAIN, .answer = answer_openapi,
      .doc = { "operations", "This document", "OpenAPI 3.1.", .answer = "The document",
               .media = "application/json", .schema = "{'type':'object','required':['openapi','info','paths']}" } },

    { ROUTE_GET, "/", "page", PORT_MAIN, .answer = answer_page,
      .doc = { "operations", "The facts of /v1/info for a browser", "Refreshes itself from /v1/info.",
               .answer = "The page", .media = "text/html", .schema = TEXT } },

    { ROUTE_GET, "/metrics", "metrics", BOTH, .token = PORT_MAIN, .quiet = true, .answer = answer_metrics,
      .doc = { "operations", "Counters, gauges and histograms for Prometheus", "Counters, gauges and histograms.",
               .answer = "Prometheus text format 0.0.4", .media = "text/plain", .schema = TEXT } },

    LIVE("/livez"),
    LIVE("/healthz"),
    LIVE("/health"),
    LIVE("/v2/health/live"),
    READY("/readyz"),
    READY("/v2/health/ready"),
};
/* clang-format on */

const struct route *routes_all(int *count)
{
    *count = (int)ARRAY_SIZE(routes);
    return routes;
}

struct route_match routes_find(unsigned port, const char *path, const char *method)
{
    return route_find(routes, (int)ARRAY_SIZE(routes), port, path, method);
}
