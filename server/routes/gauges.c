/* gauges.c: sets the gauges of /metrics to the current numbers of all parts of the server. */
#include "server/routes/gauges.h"

#include <stdlib.h>

#include "server/routes/health.h"
#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/metrics.h"
#include "server/device/devices.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/regions/regions.h"
#include "server/work/request.h"
#include "server/work/server.h"

void gauges_publish(struct server *server)
{
    int64_t requests, bytes;
    queue_waiting(&server->queue, &requests, &bytes);
    metrics_set(METRIC_QUEUE_REQUESTS, NULL, NULL, (double)requests);
    metrics_set(METRIC_QUEUE_BYTES, NULL, NULL, (double)bytes);
    metrics_set(METRIC_QUEUE_LIMIT, NULL, NULL, server->queue.places[CALLER_WAITING].limit);
    metrics_set(METRIC_RECEIVING_LIMIT, NULL, NULL, server->queue.places[CALLER_RECEIVING].limit);
    for (int state = 0; state < REQUEST_FREED; state++)
        metrics_set(METRIC_INFLIGHT, request_state_label((enum request_state)state), NULL,
                    request_count((enum request_state)state));
    metrics_set(METRIC_STAGING_BYTES, "limit", NULL, (double)staging_limit_bytes(server->staging));
    metrics_set(METRIC_STAGING_BYTES, "used", NULL, (double)staging_leased_bytes(server->staging));
    metrics_set(METRIC_STAGING_BYTES, "warm", NULL, (double)staging_warm_bytes(server->staging));
    metrics_set(METRIC_STAGING_BYTES, "ahead", NULL, (double)staging_ahead_bytes(server->staging));
    metrics_set(METRIC_STAGING_BYTES, "contexts", NULL, (double)contexts_bytes(server->contexts));
    static const char *const context_states[CONTEXT_STATE_COUNT] = { "free",
#define X(id, label) label,
                                                                     CONTEXT_STATE_MAP(X)
#undef X
    };
    struct caches_totals caches;
    caches_totals(server->caches, &caches);
    metrics_set(METRIC_CACHES, NULL, NULL, (double)caches.caches);
    metrics_set(METRIC_CACHE_PAGES, "all", NULL, (double)caches.pages);
    metrics_set(METRIC_CACHE_PAGES, "shared", NULL, (double)caches.shared_pages);
    metrics_set(METRIC_CACHE_BYTES, "used", NULL, (double)caches.used_bytes);
    metrics_set(METRIC_CACHE_BYTES, "free", NULL, (double)(caches.bytes - caches.used_bytes));
    int contexts[CONTEXT_STATE_COUNT];
    contexts_count(server->contexts, contexts);
    for (int state = CONTEXT_FREE + 1; state < CONTEXT_STATE_COUNT; state++)
        metrics_set(METRIC_CONTEXTS, context_states[state], NULL, contexts[state]);
    if (server->regions)
        metrics_set(METRIC_REGION_BYTES_PINNED, NULL, NULL, (double)regions_pinned_bytes(server->regions));
    for (int kind = 0; server->regions && kind < REGION_KIND_COUNT; kind++) {
        int count;
        regions_count(server->regions, (enum region_kind)kind, &count, &bytes);
        metrics_set(METRIC_REGIONS, region_kind_label((enum region_kind)kind), NULL, count);
        metrics_set(METRIC_REGION_BYTES, region_kind_label((enum region_kind)kind), NULL, (double)bytes);
    }
    metrics_set(METRIC_CONNECTIONS_LIMIT, NULL, NULL, server->config->max_connections);
    for (int phase = 0; phase < SERVER_PHASE_COUNT; phase++)
        metrics_set(METRIC_PHASE, server_phase_label(phase), NULL, phase == atomic_load(&server->phase));
    const int64_t drain_since_ms = atomic_load(&server->drain_since_ms);
    metrics_set(METRIC_DRAIN_SECONDS, NULL, NULL, drain_since_ms > 0 ? (double)(clock_ms() - drain_since_ms) / 1e3 : 0);
    metrics_set(METRIC_DRAIN_LIMIT, NULL, NULL, (double)server->config->drain_ms / 1e3);
    char why[96];
    metrics_set(METRIC_READY, NULL, NULL, health_ready(server, why, sizeof why));
    for (int kind = 0; kind < HEARTBEAT_KINDS; kind++)
        metrics_set(METRIC_THREAD_BUSY, heartbeat_label((enum heartbeat_kind)kind), NULL,
                    (double)heartbeat_longest_ms((enum heartbeat_kind)kind, clock_ms()) / 1e3);

    const int count = devices_count(server->devices);
    struct device_state *devices = calloc((size_t)count + 1, sizeof *devices);
    if (devices == NULL) return; /* out of memory: the gauges keep their last values */
    devices_describe(server->devices, devices);
    for (int i = 0; i < count; i++) {
        metrics_set(METRIC_DEVICE_USABLE, devices[i].info.name, NULL, devices[i].usable);
        metrics_set(METRIC_DEVICE_BYTES, devices[i].info.name, "limit", (double)devices[i].info.memory_limit);
        metrics_set(METRIC_DEVICE_BYTES, devices[i].info.name, "used", (double)devices[i].info.memory_used);
    }
    free(devices);
}

void gauges_answer(struct request *request, struct answer *answer)
{
    struct server *server = request->server;
    gauges_publish(server);
    metrics_set(METRIC_CONNECTIONS, NULL, NULL, atomic_load(&server->open_connections->count));
    metrics_set(METRIC_CONNECTION_BYTES, "used", NULL, (double)atomic_load(&server->open_connections->bytes));
    metrics_set(METRIC_CONNECTION_BYTES, "limit", NULL, (double)config_connection_bytes(server->config));
    answer->status = 200;
    answer->content_type = "text/plain; version=0.0.4; charset=utf-8";
    answer->body = metrics_write(&answer->length);
}
