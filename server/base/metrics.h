/* metrics.h: counters, gauges and histograms for /metrics. The enum of metrics and the page come from one table
 * (METRIC_MAP), so a new metric is a new row. Updates are relaxed atomics, and any thread may make them. */
#ifndef METRICS_H
#define METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "server/base/limits.h"

/* The table of metrics. Each row: id, name, kind, label names ("" for none), help. Names follow Prometheus's
 * conventions: base units, a unit as suffix, and _total for counters. Kinds: COUNTER, GAUGE, and histograms of SECONDS
 * (buckets from 100 us to 13 s, each twice the one before) or SIZES (1, 2, 4, ... 1024). A row without labels is on the
 * page /metrics from the start, a row with labels from its first use. Series that alerts watch, such as the refusals,
 * are set to 0 at the start, because Prometheus's rate() ignores the first sample of a series. The page also has
 * process_start_time_seconds, process_cpu_seconds_total, process_resident_memory_bytes, process_virtual_memory_bytes,
 * process_open_fds and process_max_fds. The code that writes the page sets LOG_DROPPED and BUILD_INFO. */
#define METRIC_MAP(X)                                                                                           \
    X(REQUESTS, "attnd_requests_total", COUNTER, "endpoint,status", "Answers by endpoint and HTTP status")      \
    X(REQUEST_SECONDS, "attnd_request_duration_seconds", SECONDS, "endpoint",                                   \
      "From the first header to the last byte")                                                                 \
    X(STAGE_SECONDS, "attnd_stage_duration_seconds", SECONDS, "stage", "Time of a request in each stage")       \
    X(QUEUE_REQUESTS, "attnd_queue_requests", GAUGE, "", "Requests that wait for a device")                     \
    X(QUEUE_BYTES, "attnd_queue_bytes", GAUGE, "", "Their tensors' bytes")                                      \
    X(QUEUE_LIMIT, "attnd_queue_limit_requests", GAUGE, "", "What --queue-depth allows of requests that wait")  \
    X(RECEIVING_LIMIT, "attnd_receiving_limit_requests", GAUGE, "",                                             \
      "What --max-receiving allows of requests that are received")                                              \
    X(INFLIGHT, "attnd_inflight_requests", GAUGE, "state", "Requests by state")                                 \
    X(REJECTED, "attnd_rejected_total", COUNTER, "reason", "Refusals by reason")                                \
    X(CANCELLED, "attnd_cancelled_total", COUNTER, "state", "Requests whose client went away, by state")        \
    X(BATCH_SIZE, "attnd_batch_size", SIZES, "", "Problems that were run together")                             \
    X(BODY_BYTES_IN, "attnd_body_bytes_received_total", COUNTER, "", "Request body bytes")                      \
    X(BODY_BYTES_OUT, "attnd_body_bytes_sent_total", COUNTER, "", "Response body bytes")                        \
    X(STAGING_BYTES, "attnd_staging_bytes", GAUGE, "kind", "Staging memory, by what it is for")                 \
    X(CACHES, "attnd_caches", GAUGE, "", "KV caches")                                                           \
    X(CACHE_PAGES, "attnd_cache_pages", GAUGE, "kind", "Pages of KV caches: all, and those that several share") \
    X(CACHE_BYTES, "attnd_cache_bytes", GAUGE, "state", "Memory for KV caches: used and free")                  \
    X(CACHE_TOKENS, "attnd_cache_positions_total", COUNTER, "what",                                             \
      "Positions that were appended to KV caches, and that queries attended to without sending them")           \
    X(CACHE_ENDS, "attnd_cache_ends_total", COUNTER, "why",                                                     \
      "Caches that expired or were on a device that failed, and ids of another process")                        \
    X(CONTEXTS, "attnd_contexts", GAUGE, "state", "Saved contexts by state")                                    \
    X(REGIONS, "attnd_shared_memory_regions", GAUGE, "kind", "Registered regions of shared memory")             \
    X(REGION_BYTES, "attnd_shared_memory_bytes", GAUGE, "kind", "Their bytes")                                  \
    X(REGION_BYTES_PINNED, "attnd_shared_memory_pinned_bytes", GAUGE, "",                                       \
      "Bytes of regions that devices copy from and to themselves")                                              \
    X(REGION_BYTES_MOVED, "attnd_shared_memory_moved_bytes_total", COUNTER, "how",                              \
      "Bytes of tensors read from shared memory, and written to it, by the processor; and copied by devices")   \
    X(DEVICE_BYTES, "attnd_device_memory_bytes", GAUGE, "device,kind", "Device memory: limit and used")         \
    X(DEVICE_BATCHES, "attnd_device_batches_total", COUNTER, "device", "Batches that came back, well or not")   \
    X(DEVICE_PARTS, "attnd_device_parts_total", COUNTER, "device",                                              \
      "Those of them that computed a part of a problem, which was cut over several devices")                    \
    X(DEVICE_ERRORS, "attnd_device_errors_total", COUNTER, "device,error", "Batches that failed, by error")     \
    X(KERNEL_SECONDS, "attnd_kernel_seconds_total", COUNTER, "device,op",                                       \
      "Time in kernels; processor time for small problems of the CPU")                                          \
    X(FLOW_SECONDS, "attnd_caller_seconds_total", COUNTER, "caller,work",                                       \
      "Time spent for each token: on devices, checking bodies, and finishing what ran")                         \
    X(FLOPS, "attnd_flops_total", COUNTER, "device,op", "Floating point operations, by the field's convention") \
    X(TENSOR_BYTES, "attnd_tensor_bytes_total", COUNTER, "device,op",                                           \
      "Bytes of the tensors of problems that ran, read or written, with keys and values in pages")              \
    X(CONNECTIONS, "attnd_connections", GAUGE, "", "Open connections")                                          \
    X(CONNECTIONS_LIMIT, "attnd_connections_limit", GAUGE, "", "What --max-connections allows of them")         \
    X(MADE_ROOM, "attnd_connections_made_room_total", COUNTER, "",                                              \
      "Connections that were closed to make room for others at --max-connections")                              \
    X(CONNECTION_BYTES, "attnd_connection_bytes", GAUGE, "kind",                                                \
      "Memory of connections and their requests, without tensors")                                              \
    X(DEVICE_USABLE, "attnd_device_usable", GAUGE, "device", "1 until the device fails")                        \
    X(PHASE, "attnd_phase", GAUGE, "phase", "1 for the phase the server is in")                                 \
    X(DRAIN_SECONDS, "attnd_drain_seconds", GAUGE, "", "Since the drain began; 0 before")                       \
    X(DRAIN_LIMIT, "attnd_drain_limit_seconds", GAUGE, "", "What --drain-ms allows a drain to take")            \
    X(READY, "attnd_ready", GAUGE, "", "1 while work is taken")                                                 \
    X(THREAD_BUSY, "attnd_thread_busy_seconds", GAUGE, "thread",                                                \
      "Longest present piece of work of a thread of a kind")                                                    \
    X(LOG_DROPPED, "attnd_log_lines_dropped_total", COUNTER, "", "Log lines lost because the sink was full")    \
    X(BUILD_INFO, "attnd_build_info", GAUGE, "version,backends", "Always 1")

enum metric_id {
#define X(id, name, kind, labels, help) METRIC_##id,
    METRIC_MAP(X)
#undef X
        METRIC_COUNT
};

/* Arguments of the functions below: pass label values in the order of the label names in the metric's row, and NULL
 * where the row has fewer labels. Values are copied, up to 63 bytes. They must come from a small fixed set: a row keeps
 * METRICS_MAX_SERIES sets of values, and counts later sets under "other". */
/* adds to a counter or a gauge */
void metrics_add(enum metric_id id, const char *label0, const char *label1, double amount);
void metrics_set(enum metric_id id, const char *label0, const char *label1, double value); /* sets a gauge */
void metrics_observe(enum metric_id id, const char *label0, double value);                 /* adds to a histogram */

/* Returns the sum of all series of a counter or gauge whose first label is `label0` (NULL: any label). */
double metrics_sum(enum metric_id id, const char *label0);

/* Returns the page /metrics in Prometheus text format 0.0.4. The caller frees it with free(). Returns NULL when out of
 * memory. */
char *metrics_write(size_t *length);

#endif
