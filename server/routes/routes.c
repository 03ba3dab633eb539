/* routes.c: the table of routes (URLs); server/routes/route.h has its columns. What is the same for all routes is in no
 * row: framing checks, request ids, limits, HEAD, CORS, logging and counting (http/mhd.c, http/answer.c). */
#include "server/routes/routes.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "server/routes/attention.h"
#include "server/routes/caches.h"
#include "server/routes/gauges.h"
#include "server/routes/health.h"
#include "server/routes/info.h"
#include "server/routes/kserve.h"
#include "server/routes/openapi.h"
#include "server/routes/page.h"
#include "server/routes/shared_memory.h"
#include "server/work/server.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* All answers share one copy of the document (264 KiB), so that clients that do not read their answers cannot fill the
 * memory. */
static void answer_openapi(struct request *request, struct answer *answer)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char *kept;
    static size_t length;
    int count;
    const struct route *all = routes_all(&count);
    answer->status = 200;
    answer->content_type = "application/json";
    answer->constant = true;
    pthread_mutex_lock(&lock);
    if (kept == NULL) kept = openapi_write(request->server->config, &request->server->limits, all, count, &length);
    answer->body = kept;
    answer->length = length;
    pthread_mutex_unlock(&lock);
}

#define BOTH (PORT_MAIN | PORT_METRICS)
#define TEXT "{'type':'string'}"

/* clang-format off */
/* Rows of the table of routes for health probes. Each kind of probe has its own path. */
#define LIVE(at) \
    { ROUTE_GET, at, "livez", BOTH, .quiet = true, .answer = health_answer_live, \
      .doc = { "operations", "Does the process work?", "Whatever the load.", \
               .answer = "The process works", .media = "text/plain", .schema = TEXT } }
#define READY(at) \
    { ROUTE_GET, at, "readyz", BOTH, .quiet = true, .answer = health_answer_ready, \
      .doc = { "operations", "Does it take work?", "503 while starting, draining, or when no device is usable.", \
               .answer = "It takes work", .media = "text/plain", .schema = TEXT, \
               .errors = ROUTE_ERROR(DRAINING), .plain_503 = true } }

/* Two rows for a KServe model: its path without and with the model's only version. */
#define OF_MODEL(id, what, handler, title, says, name) \
    { ROUTE_GET, "/v2/models/{model}" what, id, PORT_MAIN, .token = PORT_MAIN, .model = true, .answer = handler, \
      .doc = { "kserve", title, says, .parameters = { MODEL }, .errors = ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(UNAVAILABLE), \
               .answer = says, .media = "application/json", .schema = ROUTE_SCHEMA(name) } }, \
    { ROUTE_GET, "/v2/models/{model}/versions/{version}" what, id, PORT_MAIN, .token = PORT_MAIN, .model = true, .answer = handler, \
      .doc = { "kserve", title, says, .parameters = { MODEL, VERSION }, .errors = ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(UNAVAILABLE), \
               .answer = says, .media = "application/json", .schema = ROUTE_SCHEMA(name) } }
#define MODEL   { "model", "A name of GET /v2/models.", "attention_forward" }
#define VERSION { "version", "1.", "1" }
#define INFER(at, ...) \
    { ROUTE_POST, at, "infer", PORT_MAIN, .token = PORT_MAIN, .model = true, .bodies = kserve_bodies, \
      .doc = { "kserve", "Attention as a KServe model", "The tensors and options of the model by its operation, which its name says. Stock " \
               "clients of KServe and Triton send this; tensors may be numbers in the JSON or bytes behind it.", \
               .body = "InferRequest", .parameters = { __VA_ARGS__ }, .errors = ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(IN_USE) | ROUTE_ERROR(STORAGE_FULL), \
               .answer = "The results", .media = "application/json", .schema = ROUTE_SCHEMA("InferAnswer") } }
#define NOT_OFFERED(method, at, handler, ...) \
    { ROUTE_##method, at, "kserve", PORT_MAIN, .token = PORT_MAIN, .hidden = true, .answer = handler, \
      .doc = { "kserve", "Not offered", "501.", .parameters = { __VA_ARGS__ }, .errors = ROUTE_ERROR(NOT_IMPLEMENTED), \
               .answer = "Never", .media = "application/json", .schema = TEXT } }
/* Rows of the table of routes for Triton's shared memory extensions (system memory and GPU memory). */
#define REGION { "region", "Its name.", "q" }
#define REGIONS_ROW(shm_, method_, path_, handler, title, says, what, media_, schema_, errors_, ...) \
    { ROUTE_##method_, path_, "kserve", PORT_MAIN, .token = PORT_MAIN, .shm = ROUTE_ALLOW_##shm_, .answer = handler, \
      .doc = { "kserve", title, says, .answer = what, .media = media_, .schema = schema_, .parameters = { __VA_ARGS__ }, \
               .errors = ROUTE_ERROR(NOT_IMPLEMENTED) | (errors_) } }
#define REGIONS_STATUS(shm_, path_, handler, schema_, ...) \
    REGIONS_ROW(shm_, GET, path_, handler, "Triton: regions of shared memory", "Those that this token has registered.", "The regions", \
                "application/json", ROUTE_SCHEMA(schema_), ROUTE_ERROR(NOT_FOUND), __VA_ARGS__)
#define REGIONS_UNREGISTER(shm_, path_, handler, ...) \
    REGIONS_ROW(shm_, POST, path_, handler, "Triton: unregister shared memory", "Requests that use it go on. A region that is not there is fine.", \
                "There is no such region any more", NULL, NULL, ROUTE_ERROR(NOT_FOUND), __VA_ARGS__)
#define REGIONS_REGISTER(shm_, path_, handler, title, body_, errors_) \
    { ROUTE_POST, path_, "kserve", PORT_MAIN, .token = PORT_MAIN, .shm = ROUTE_ALLOW_##shm_, .keeps_body = true, .answer = handler, \
      .doc = { "kserve", title, "Tensors of later requests of the same token may lie there: inputs and outputs with shared_memory_region " \
               "among their parameters.", .body = body_, .parameters = { REGION }, .answer = "The region is there", \
               .errors = ROUTE_ERROR(NOT_IMPLEMENTED) | ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(CONFLICT) | ROUTE_ERROR(QUOTA) | \
                         ROUTE_ERROR(UNAVAILABLE) | ROUTE_ERROR(STORAGE_FULL) | (errors_) } }
#define NONE { NULL, NULL, NULL }
#define NO_SETTINGS(at, ...) \
    NOT_OFFERED(GET, at, kserve_answer_no_settings, __VA_ARGS__), NOT_OFFERED(POST, at, kserve_answer_no_settings, __VA_ARGS__)
#define KSERVE(method_, at, handler, title, says, name, hidden_) \
    { ROUTE_##method_, at, "kserve", PORT_MAIN, .token = PORT_MAIN, .hidden = hidden_, .answer = handler, \
      .doc = { "kserve", title, says, .answer = says, .media = "application/json", .schema = ROUTE_SCHEMA(name) } }

/* The route of an operation that a device runs. The row of proto_operations[] has its texts for the OpenAPI
 * document. */
#define OPERATION(op_, at, name, title, tag_, errors_, ...) \
    { ROUTE_POST, at, name, PORT_MAIN, .token = PORT_MAIN, .bodies = attention_bodies, .op = op_, \
      .doc = { .tag = tag_, .body = title "Request", .parameters = { __VA_ARGS__ }, .errors = errors_, \
               .media = "application/json", .schema = ROUTE_SCHEMA(title "Answer") } }
#define CACHE { "id", "Of POST /v1/caches.", CACHE_EXAMPLE }

static const struct route routes[] = {
    /* A written-out row begins with method, path, endpoint (label in /metrics) and ports. Other rows are made by
     * macros. */
    OPERATION(ATTN_OP_FORWARD, "/v1/attention/forward", "forward", "Forward", "attention", 0, NONE),
    OPERATION(ATTN_OP_BACKWARD, "/v1/attention/backward", "backward", "Backward", "attention",
              ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(IN_USE) /* saved forward missing, or in use */, NONE),
    OPERATION(PROTO_OP_CHECK, "/v1/attention/check", "check", "Check", "attention", 0, NONE),
    OPERATION(ATTN_OP_OBSERVE, "/v1/attention/observe", "observe", "Observe", "attention",
              ROUTE_ERROR(NOT_FOUND) /* a cache is missing */, NONE),
    OPERATION(PROTO_OP_MERGE, "/v1/attention/merge", "merge", "Merge", "attention", 0, NONE),
    OPERATION(PROTO_OP_DECODE, "/v1/attention/decode", "decode", "Decode", "caches", ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(STORAGE_FULL), NONE),

    { ROUTE_POST, "/v1/caches", "caches", PORT_MAIN, .token = PORT_MAIN, .keeps_body = true, .answer = caches_answer_create,
      .doc = { "caches", "A new cache for keys and values", "It is empty. Its id belongs to the token that made it.",
               .body = "CacheRequest", .status = 201, .errors = ROUTE_ERROR(STORAGE_FULL) | ROUTE_ERROR(QUOTA),
               .answer = "It is there", .media = "application/json", .schema = ROUTE_SCHEMA("Cache") } },
    { ROUTE_GET, "/v1/caches", "caches", PORT_MAIN, .token = PORT_MAIN, .answer = caches_answer_list,
      .doc = { "caches", "Your caches", "Oldest first.",
               .answer = "They", .media = "application/json", .schema = ROUTE_SCHEMA("Caches") } },
    { ROUTE_GET, "/v1/caches/{id}", "caches", PORT_MAIN, .token = PORT_MAIN, .answer = caches_answer_get,
      .doc = { "caches", "One cache", "Its length, shape and pages.", .parameters = { CACHE }, .errors = ROUTE_ERROR(NOT_FOUND),
               .answer = "It", .media = "application/json", .schema = ROUTE_SCHEMA("Cache") } },
    { ROUTE_DELETE, "/v1/caches/{id}", "caches", PORT_MAIN, .token = PORT_MAIN, .answer = caches_answer_delete,
      .doc = { "caches", "Delete a cache", "Pages that a fork shares stay the fork's.", .parameters = { CACHE },
               .errors = ROUTE_ERROR(NOT_FOUND), .answer = "It is gone", .status = 204 } },
    OPERATION(PROTO_OP_APPEND, "/v1/caches/{id}/append", "append", "Append", "caches", ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(STORAGE_FULL), CACHE),
    { ROUTE_POST, "/v1/caches/{id}/fork", "caches", PORT_MAIN,
      .token = PORT_MAIN, .keeps_body = true, .optional_body = true, .answer = caches_answer_fork,
      .doc = { "caches", "A new cache that begins as this one", "It shares the pages of the first positions; whoever writes to a shared "
               "page gets a copy of it.", .body = "ForkRequest", .parameters = { CACHE }, .status = 201,
               .errors = ROUTE_ERROR(NOT_FOUND) | ROUTE_ERROR(STORAGE_FULL) | ROUTE_ERROR(QUOTA),
               .answer = "It is there", .media = "application/json", .schema = ROUTE_SCHEMA("Cache") } },
    { ROUTE_POST, "/v1/caches/{id}/truncate", "caches", PORT_MAIN,
      .token = PORT_MAIN, .keeps_body = true, .answer = caches_answer_truncate,
      .doc = { "caches", "Forget the end of a cache", "The first positions stay.", .body = "TruncateRequest",
               .parameters = { CACHE }, .errors = ROUTE_ERROR(NOT_FOUND),
               .answer = "The cache", .media = "application/json", .schema = ROUTE_SCHEMA("Cache") } },

    { ROUTE_GET, "/v1/info", "info", PORT_MAIN, .token = PORT_MAIN, .answer = info_answer,
      .doc = { "operations", "Version, devices, limits and features",
               "What this server is, what it can compute, its limits and its load.",
               .answer = "The facts", .media = "application/json", .schema = ROUTE_SCHEMA("Info") } },

    { ROUTE_GET, "/openapi.json", "openapi", PORT_MAIN, .answer = answer_openapi,
      .doc = { "operations", "This document", "OpenAPI 3.1.", .answer = "The document",
               .media = "application/json", .schema = "{'type':'object','required':['openapi','info','paths']}" } },

    { ROUTE_GET, "/", "page", PORT_MAIN, .answer = page_answer_index,
      .doc = { "operations", "This server for a browser",
               "Live figures, the tiles of masks, maps of attention, and checks of results. Its script asks this server alone.",
               .answer = "The page", .media = "text/html", .schema = TEXT } },

    { ROUTE_GET, "/docs", "docs", PORT_MAIN, .answer = page_answer_docs,
      .doc = { "operations", "The OpenAPI document for a browser", "Reads /openapi.json, and sends requests by hand.",
               .answer = "The page", .media = "text/html", .schema = TEXT } },

    { ROUTE_GET, "/metrics", "metrics", BOTH, .token = PORT_MAIN, .quiet = true, .answer = gauges_answer,
      .doc = { "operations", "Counters, gauges and histograms for Prometheus", "Counters, gauges and histograms.",
               .answer = "Prometheus text format 0.0.4", .media = "text/plain", .schema = TEXT } },

    LIVE("/livez"),
    LIVE("/healthz"),
    LIVE("/health"),
    LIVE("/v2/health/live"),
    READY("/readyz"),
    READY("/v2/health/ready"),

    KSERVE(GET, "/v2", kserve_answer_server, "KServe: this server", "Name, version and extensions of the protocol.", "ServerMetadata", false),
    KSERVE(GET, "/v2/", kserve_answer_server, "KServe: this server", "Name, version and extensions of the protocol.", "ServerMetadata", true),
    KSERVE(GET, "/v2/models", kserve_answer_models, "KServe: the models", "The names of all models.", "ModelList", false),
    KSERVE(GET, "/v2/models/stats", kserve_answer_stats, "KServe: statistics", "Statistics of all models.", "Statistics", false),
    { ROUTE_POST, "/v2/repository/index", "kserve", PORT_MAIN, .token = PORT_MAIN, .keeps_body = true, .optional_body = true,
      .only_reads = true, .answer = kserve_answer_index,
      .doc = { "kserve", "KServe: the models and their state", "All models, or those that are ready.", .body = "IndexRequest",
               .answer = "The models", .media = "application/json", .schema = ROUTE_SCHEMA("ModelIndex") } },
    OF_MODEL("kserve", "", kserve_answer_metadata, "KServe: a model", "The tensors that it needs, and gives.", "ModelMetadata"),
    OF_MODEL("kserve", "/ready", kserve_answer_ready, "KServe: is it ready?", "It is.", "ModelReady"),
    OF_MODEL("kserve", "/config", kserve_answer_config, "KServe: its configuration", "The configuration, as Triton writes it.", "ModelConfig"),
    OF_MODEL("kserve", "/stats", kserve_answer_stats, "KServe: its statistics", "Its statistics.", "Statistics"),
    INFER("/v2/models/{model}/infer", MODEL),
    INFER("/v2/models/{model}/versions/{version}/infer", MODEL, VERSION),
    REGIONS_STATUS(SHM, "/v2/systemsharedmemory/status", shared_memory_status, "Regions", NONE),
    REGIONS_STATUS(SHM, "/v2/systemsharedmemory/region/{region}/status", shared_memory_status, "Regions", REGION),
    REGIONS_REGISTER(SHM, "/v2/systemsharedmemory/region/{region}/register", shared_memory_register, "Triton: register shared memory",
                     "RegionRegister", 0),
    REGIONS_UNREGISTER(SHM, "/v2/systemsharedmemory/region/{region}/unregister", shared_memory_unregister, REGION),
    REGIONS_UNREGISTER(SHM, "/v2/systemsharedmemory/unregister", shared_memory_unregister, NONE),
    REGIONS_STATUS(CUDA_SHM, "/v2/cudasharedmemory/status", shared_memory_cuda_status, "CudaRegions", NONE),
    REGIONS_STATUS(CUDA_SHM, "/v2/cudasharedmemory/region/{region}/status", shared_memory_cuda_status, "CudaRegions", REGION),
    REGIONS_REGISTER(CUDA_SHM, "/v2/cudasharedmemory/region/{region}/register", shared_memory_cuda_register, "Triton: register memory of a GPU",
                     "CudaRegionRegister", ROUTE_ERROR(OUT_OF_MEMORY)),
    REGIONS_UNREGISTER(CUDA_SHM, "/v2/cudasharedmemory/region/{region}/unregister", shared_memory_cuda_unregister, REGION),
    REGIONS_UNREGISTER(CUDA_SHM, "/v2/cudasharedmemory/unregister", shared_memory_cuda_unregister, NONE),
    NOT_OFFERED(POST, "/v2/repository/models/{model}/load", kserve_answer_no_loading, MODEL),
    NOT_OFFERED(POST, "/v2/repository/models/{model}/unload", kserve_answer_no_loading, MODEL),
    NO_SETTINGS("/v2/trace/setting", { NULL, NULL, NULL }),
    NO_SETTINGS("/v2/models/{model}/trace/setting", MODEL),
    NO_SETTINGS("/v2/logging", { NULL, NULL, NULL }),
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

#define NO_MODEL "; there is no language model here, " ROUTES_WHERE_TO

/* Prefixes of other servers' paths, and the hint of a 404 answer for each. */
static const struct {
    const char *begins, *says;
    bool surely; /* Whether this hint is given even if the path resembles one of this server's paths. */
} elsewhere[] = {
    { "/v1/attention/verify", "; verify is a member of POST /v1/attention/forward", true },
    { "/v1/attention/encode", "; " ROUTES_WHERE_TO, true },
    { "/v1/attention/grad", ", did you mean /v1/attention/backward?", true },
    { "/v1/attention/append", ", did you mean /v1/caches/{id}/append?", true },
    { "/v1/attention/bwd", ", did you mean /v1/attention/backward?", false },
    { "/v1/attention/train", ", did you mean /v1/attention/backward?", false },
    { "/v1/attention/step", ", did you mean /v1/attention/decode?", true },
    { "/v1/attention/generate", ", did you mean /v1/attention/decode?", false },
    { "/v1/caches/", "; a cache has /append, /fork and /truncate, and DELETE deletes it", false },
    { "/v1/version", ", did you mean /v1/info?", false },
    { "/api-docs", ", did you mean /docs?", false },
    { "/infer", ", did you mean /v2/models/attention_forward/infer?", false },
    { "/v1/chat", NO_MODEL, false },
    { "/v1/completions", NO_MODEL, false },
    { "/v1/embeddings", NO_MODEL, false },
    { "/v1/models", NO_MODEL, false },
    { "/api/", NO_MODEL, false },
    { "/generate", NO_MODEL, false },
    { "/v2/models", "; a model has /infer, /ready, /config and /stats", false },
    { "/predict", "; " ROUTES_WHERE_TO, false },
    { "/invocations", "; " ROUTES_WHERE_TO, false },
    { "/attention", "; " ROUTES_WHERE_TO, false },
    { "/v1/attention", "; " ROUTES_WHERE_TO, false },
    { "/v1/flash", "; " ROUTES_WHERE_TO, false },
    { "/v1/sdpa", "; " ROUTES_WHERE_TO, false },
    { "/v1/scaled_dot", "; " ROUTES_WHERE_TO, false },
    { "/v1/batch", "; " ROUTES_WHERE_TO, false },
    { "/ping", ", did you mean /livez?", false },
    { "/version", ", did you mean /v1/info?", false },
    { "/status", ", did you mean /v1/info?", false },
    { "/swagger", ", did you mean /docs?", false },
    { "/redoc", ", did you mean /docs?", false },
    { "/openapi", ", did you mean /openapi.json?", false },
};

const char *routes_hint(unsigned port, const char *path, char text[ROUTES_HINT_BYTES])
{
    const char *const near = route_nearest(routes, (int)ARRAY_SIZE(routes), port, path);
    snprintf(text, ROUTES_HINT_BYTES, "%s%s%s", near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
    for (size_t i = 0; i < ARRAY_SIZE(elsewhere) && port == PORT_MAIN; i++)
        if ((!near || elsewhere[i].surely) && strncmp(path, elsewhere[i].begins, strlen(elsewhere[i].begins)) == 0) {
            snprintf(text, ROUTES_HINT_BYTES, "%s", elsewhere[i].says);
            break;
        }
    return text;
}
