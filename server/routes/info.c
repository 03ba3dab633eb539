/* info.c: writes /v1/info, which tells programs the state and the abilities of this server.
 *
 * The abilities of a backend are read from the rows by which the kernel of each request is chosen, so /v1/info lists
 * exactly what requests can use. openapi.json has the schema of this document, and a test compares the two. */
#include "server/routes/info.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/routes/json.h"
#include "server/base/clock.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/staging.h"
#include "server/caches/caches.h"
#include "server/work/server.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* ---- Features of the kernels ------------------------------------------------------------------------------------- */

/* Returns the feature that a kernel needs for an option of the protocol, or 0 if it needs none. The option `layout`
 * only changes strides, and options that are not in attn_options[] do not reach kernels. */
static uint64_t feature_of(const char *option)
{
    if (strcmp(option, "seed") == 0) return ATTN_OPTION_BIT(DROPOUT);
    for (int n = 0; n < (int)ARRAY_SIZE(attn_options); n++)
        if (strcmp(option, attn_options[n].wire) == 0) return UINT64_C(1) << (ATTN_OPTION_FIRST + 1 + n);
    return 0;
}

/* True if the kernel can compute the operation. A decode needs a kernel that reads keys and values from pages, because
 * caches consist of pages. */
static bool computes(const attn_kernel *k, proto_op op)
{
    const uint64_t pages = ATTN_TENSOR_BIT(page_table) | ATTN_TENSOR_BIT(seqlens_k);
    const proto_operation *const operation = &proto_operations[op];
    return operation->computes && k->op == operation->op &&
           (!operation->takes_caches || (k->features & pages) == pages);
}

static bool takes_tensor(const attn_kernel *k, proto_op op, attn_tensor_id id)
{
    const bool of_keys = id == ATTN_T_k_scale || id == ATTN_T_v_scale, fp8_only = of_keys || id == ATTN_T_q_scale;
    const bool fp8 = k->dtypes >> ATTN_F8E4M3 & 1 || (of_keys && k->features & ATTN_OPTION_BIT(KEY_DTYPE));
    if (proto_operations[op].takes_caches && id == ATTN_T_keep_mask &&
        !(k->features & ATTN_OPTION_BIT(KEEP_MASK_AT_END)))
        /* in a decode, a keep mask covers only the last keys, so the kernel must have the feature KEEP_MASK_AT_END */
        return false;
    return proto_takes_tensor(op, id) && (k->features >> id & 1) && (!fp8_only || fp8);
}

static void put_row(struct json *j, const attn_kernel *k, proto_op op)
{
    json_put(j, "'dtypes':[");
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++) {
        if (!(k->dtypes >> d & 1)) continue;
        json_comma(j);
        json_put(j, "'%s'", attn_dtype_name((attn_dtype)d));
    }
    json_put(j, "],'tensors':[");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        if (!takes_tensor(k, op, (attn_tensor_id)t)) continue;
        json_comma(j);
        json_put(j, "'%s'", attn_tensors[t].name);
    }
    json_put(j, "],'options':[");
    for (const proto_option *o = proto_options; o->name != NULL && k->dtypes != 0; o++) {
        if (!(o->ops >> op & 1) || (feature_of(o->name) & ~k->features) != 0) continue;
        json_comma(j);
        json_put(j, "'%s'", o->name);
    }
    json_raw(j, "]");
}

static void put_op_features(struct json *j, const attn_capabilities *can, proto_op op)
{
    attn_kernel all = { 0 }; /* union of all kernels: has every feature that one of them has */
    /* operations that merge results need none of these kernels: every device supports such operations, with all
     * features */
    if (proto_operations[op].merges) all = (attn_kernel){ .dtypes = ATTN_DTYPES_BACKWARD, .features = ATTN_EVERYTHING };
    for (int n = 0; n < can->kernel_count; n++)
        if (computes(can->kernels[n], op))
            all.dtypes |= can->kernels[n]->dtypes, all.features |= can->kernels[n]->features;
    json_raw(j, "{");
    put_row(j, &all, op);
    json_put(j, ",'kernels':[");
    for (int n = 0; n < can->kernel_count; n++) {
        const attn_kernel *const k = can->kernels[n];
        if (!computes(k, op)) continue;
        json_comma(j);
        json_put(j, "{'name':'%s','head_dim':%d,", k->name, k->head_dim);
        put_row(j, k, op);
        json_raw(j, "}");
    }
    json_raw(j, "]}");
}

static void put_features(struct json *j, const struct info_facts *facts)
{
    json_put(j, ",'features':{");
    for (int i = 0; i < facts->device_count; i++) {
        const struct device_state *d = &facts->devices[i];
        bool seen = d->can == NULL;
        for (int k = 0; k < i; k++)
            seen |= facts->devices[k].can != NULL && strcmp(facts->devices[k].info.backend, d->info.backend) == 0;
        if (seen) continue;
        json_comma(j);
        json_put(j, "'%s':{", d->info.backend);
        for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
            if (!proto_operations[op].computes && !proto_operations[op].merges) continue;
            json_comma(j);
            json_put(j, "'%s':", proto_operations[op].name);
            put_op_features(j, d->can, op);
        }
        json_raw(j, "}");
    }
    json_raw(j, "}");
}

/* ---- /v1/info ---------------------------------------------------------------------------------------------------- */

static void put_devices(struct json *j, const struct info_facts *facts)
{
    json_put(j, ",'devices':[");
    for (int i = 0; i < facts->device_count; i++) {
        const attn_device_info *d = &facts->devices[i].info;
        json_comma(j);
        json_put(
            j,
            "{'name':'%s','backend':'%s','description':'%s','streams':%d,'memory_total_bytes':%lld,'memory_limit_bytes'"
            ":%lld,"
            "'memory_used_bytes':%lld,'usable':%s,'running_requests':%lld,'batches':%g,'parts':%g,'errors':%g,"
            "'kernel_seconds':%g,'flops':%g,'tensor_bytes':%g",
            d->name, d->backend, d->description, d->streams, (long long)d->memory_total, (long long)d->memory_limit,
            (long long)d->memory_used, facts->devices[i].usable ? "true" : "false",
            (long long)facts->devices[i].running_requests, metrics_sum(METRIC_DEVICE_BATCHES, d->name),
            metrics_sum(METRIC_DEVICE_PARTS, d->name), metrics_sum(METRIC_DEVICE_ERRORS, d->name),
            metrics_sum(METRIC_KERNEL_SECONDS, d->name), metrics_sum(METRIC_FLOPS, d->name),
            metrics_sum(METRIC_TENSOR_BYTES, d->name));
        json_put(j, ",'verifies':%s",
                 facts->devices[i].can && attn_has_truth(facts->devices[i].can) ? "true" : "false");
        if (d->peak_flops > 0) json_put(j, ",'peak_flops':%g", d->peak_flops);
        if (d->peak_bytes > 0) json_put(j, ",'peak_bytes_per_s':%g", d->peak_bytes);
        if (d->peak_from[0]) json_put(j, ",'peak_from':'%s'", d->peak_from);
        json_raw(j, "}");
    }
    json_raw(j, "]");
}

static void put_limits(struct json *j, const struct info_facts *facts)
{
    const struct config *const c = facts->config;
    const proto_limits *const l = facts->limits;
    const struct {
        const char *name;
        int64_t value;
    } limits[] = {
        { "max_body_bytes", c->max_body_bytes },
        { "max_connections", c->max_connections },
        /* upper bound of the memory of all connections, without tensors */
        { "connection_bytes", config_connection_bytes(c) },
        { "max_receiving", c->max_receiving },
        { "queue_depth", c->queue_depth },
        { "token_share_percent", c->token_share },
        { "max_batch", c->max_batch },
        { "batch_window_us", c->batch_window_us },
        { "split_above_ms", c->split_above_ms }, /* 0: no attention problem is divided among devices */
        { "timeout_ms", c->timeout_ms },
        { "body_timeout_ms", c->body_timeout_ms },
        { "body_stall_ms", c->body_stall_ms },
        { "discard_ms", c->discard_ms },
        { "discard_bytes", c->discard_bytes },
        { "drain_ms", c->drain_ms },
        { "requests_per_body", l->batch },
        { "tensor_bytes", l->tensor_bytes },
        { "tensor_rank", ATTN_MAX_RANK },
        { "safetensors_header_bytes", PROTO_HEADER_BYTES },
        /* limit in bytes for the JSON of a body, without its arrays of numbers */
        { "kserve_json_bytes", PROTO_HEADER_BYTES },
        { "json_skeleton_bytes", (int64_t)l->rest_bytes },
        { "json_depth", l->depth },
        { "json_members", l->members },
        { "json_values", l->values },
        { "contexts", CONTEXTS_MAX_COUNT },
        { "context_bytes", c->staging_bytes / CONTEXTS_SHARE },
        { "context_ttl_ms", CONTEXTS_TTL_MS },
        { "kv_bytes", facts->kv_bytes },
        { "caches", CACHES_MAX_COUNT },
        { "cache_ttl_ms", CACHES_TTL_MS },
        { "cache_ttl_most_ms", INT64_C(1000) * PROTO_CACHE_TTL_MOST_S },
        { "cache_kv_heads", CACHES_HEADS },
        /* number of positions in a page: the default, then the smallest and the largest value of page_size */
        { "cache_page_size", CACHES_PAGE_SIZE },
        { "cache_page_size_least", CACHES_PAGE_SIZE_LEAST },
        { "cache_page_size_most", CACHES_PAGE_SIZE_MOST },
        { "decode_caches", CACHES_ROWS },
        { "decode_pages", CACHES_STEP_PAGES },
        /* limit for `verify` on the CPU: number of multiply-adds for all problems of a body together */
        { "verify_multiply_adds", VERIFY_MAX_MULTIPLY_ADDS },
        /* limit for `verify` on the CPU: number of elements of k and v of one head together */
        { "verify_head_elements", VERIFY_MAX_HEAD_ELEMENTS },
        { "shared_memory_regions", config_shares_memory(c) ? REGIONS_MAX_COUNT : 0 },
        { "shared_memory_bytes", config_shares_memory(c) ? REGIONS_MAX_BYTES : 0 },
    };
    json_put(j, ",'limits':{");
    for (size_t i = 0; i < ARRAY_SIZE(limits); i++) {
        json_comma(j);
        json_put(j, "'%s':%lld", limits[i].name, (long long)limits[i].value);
    }
    json_raw(j, "}");
}

/* Writes the number of refusals for each reason that has occurred, as a member such as "rejected_queue_full". */
static void put_refusals(struct json *j)
{
    for (int error = 0; error <= PROTO_ERROR_COUNT; error++) {
        const char *const reason = error < PROTO_ERROR_COUNT ? proto_errors[error].code : "connections";
        const double count = metrics_sum(METRIC_REJECTED, reason);
        char name[METRICS_LABEL_BYTES];
        if (count == 0) continue;
        snprintf(name, sizeof name, "%s", reason);
        for (char *dash = name; (dash = strchr(dash, '-')) != NULL;) *dash = '_';
        json_comma(j);
        json_put(j, "'rejected_%s':%g", name, count);
    }
}

static void put_counters(struct json *j)
{
    static const struct {
        const char *name;
        enum metric_id id;
    } counters[] = {
        { "requests", METRIC_REQUESTS },
        { "rejected", METRIC_REJECTED },
        { "cancelled", METRIC_CANCELLED },
        { "body_bytes_received", METRIC_BODY_BYTES_IN },
        { "body_bytes_sent", METRIC_BODY_BYTES_OUT },
        { "kernel_seconds", METRIC_KERNEL_SECONDS },
        { "flops", METRIC_FLOPS },
    };
    json_put(j, ",'counters':{");
    for (size_t i = 0; i < ARRAY_SIZE(counters); i++) {
        json_comma(j);
        json_put(j, "'%s':%g", counters[i].name, metrics_sum(counters[i].id, NULL));
        if (counters[i].id == METRIC_REJECTED) put_refusals(j);
    }
    json_put(j, ",'log_lines_dropped':%g}", (double)log_dropped());
}

char *info_write(const struct info_facts *facts, size_t *length)
{
    struct json j = { 0 };
    json_put(&j,
             "{'name':'attnd','version':'%s','build':{'compiler':'%s','libmicrohttpd':'%s','libuv':'%s','cjson':'%s'},"
             "'state':'%s','uptime_s':%g,'backends':[",
             ATTND_VERSION, COMPILER, facts->web_library, facts->loop_library, cJSON_Version(), facts->state,
             facts->uptime_s);
    for (const char *const *b = attn_backends(); *b != NULL; b++) {
        json_comma(&j);
        json_put(&j, "'%s'", *b);
    }
    json_raw(&j, "]");
    put_devices(&j, facts);
    json_put(&j, ",'dtypes':[");
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++)
        if (attn_dtype_floating((attn_dtype)d)) {
            json_comma(&j);
            json_put(&j, "'%s'", attn_dtype_name((attn_dtype)d));
        }
    json_put(&j, "],'head_dim':{'minimum':1,'maximum':%d}", ATTN_MAX_HEAD_DIM);
    put_features(&j, facts);
    json_put(&j, ",'checks':[");
    for (int i = 0; judge_code(i) != NULL; i++) {
        json_comma(&j);
        json_put(&j, "'%s'", judge_code(i));
    }
    json_raw(&j, "]");
    put_limits(&j, facts);
    json_put(
        &j,
        ",'queue':{'requests':%lld,'bytes':%lld},'connections':%lld,'inflight_requests':%lld,'staging':{'limit_bytes':%"
        "lld,'used_bytes':%lld}",
        (long long)facts->queue_requests, (long long)facts->queue_bytes, (long long)facts->connections,
        (long long)facts->inflight_requests, (long long)facts->config->staging_bytes,
        (long long)facts->staging_used_bytes);
    put_counters(&j);
    json_raw(&j, "}\n");
    return json_take(&j, length);
}

void info_answer(struct request *request, struct answer *answer)
{
    struct server *server = request->server;
    const int count = devices_count(server->devices);
    struct device_state *devices = calloc((size_t)count + 1, sizeof *devices);
    int64_t requests, bytes;
    if (devices == NULL) return; /* out of memory: an answer without a body becomes a 503 */
    devices_describe(server->devices, devices);
    queue_waiting(&server->queue, &requests, &bytes);
    int inflight = 0;
    struct caches_totals caches;
    caches_totals(server->caches, &caches);
    for (int state = 0; state < REQUEST_STATE_COUNT; state++) inflight += request_count((enum request_state)state);
    const struct info_facts facts = {
        .config = server->config,
        .limits = &server->limits,
        .state = server_phase_label(atomic_load(&server->phase)),
        .web_library = server->web_library,
        .loop_library = server->loop_library,
        .uptime_s = (double)(clock_ms() - server->started_ms) / 1e3,
        .devices = devices,
        .device_count = count,
        .queue_requests = requests,
        .queue_bytes = bytes,
        .connections = atomic_load(&server->open_connections->count),
        .inflight_requests = inflight,
        .staging_used_bytes = staging_leased_bytes(server->staging),
        .kv_bytes = caches.bytes,
    };
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = info_write(&facts, &answer->length);
    free(devices);
}
