/* check.c: see check.h. */
#include "server/sched/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/limits.h"
#include "server/device/devices.h"
#include "server/work/server.h"
#include "server/work/prepare.h"

bool check_takes_long(const struct request *request)
{
    return request->decoded_bytes > CHECK_LONG_BODY_BYTES ||
           proto_decoder_skeleton_bytes(request->decoder) > CHECK_LONG_SKELETON_BYTES;
}

int64_t check_deadline(const struct request *request, const proto_call *call)
{
    int64_t at_ns = request->times.received_ns + request->server->config->timeout_ms * CLOCK_NS_PER_MS;
    int64_t wish_ms = request->client_timeout_ms;
    for (int i = 0; call && i < call->count; i++) {
        const int64_t timeout_ms = call->items[i].timeout_ms;
        if (timeout_ms > 0 && (wish_ms < 0 || timeout_ms < wish_ms)) wish_ms = timeout_ms;
    }
    if (wish_ms >= 0 && wish_ms < INT64_MAX / CLOCK_NS_PER_MS / 2) {
        const int64_t wish_ns = request->times.began_ns + wish_ms * CLOCK_NS_PER_MS;
        if (wish_ns < at_ns) at_ns = wish_ns;
    }
    return at_ns;
}

/* The cache that the path of an append names; one whose name is too long is none. */
static bool name_cache(const struct request *request, proto_item *item)
{
    const struct slice *const id = &request->parameters[0];
    item->caches = calloc(1, sizeof *item->caches);
    if (item->caches == NULL) return false;
    item->cache_count = 1;
    if (id->length < PROTO_CONTEXT_BYTES) memcpy(item->caches[0], id->at, id->length);
    return true;
}

/* From the decoder's result to a job that can run. */
static attn_status make_job(struct request *request, struct check_result *result, attn_error *err)
{
    struct server *server = request->server;
    proto_call *call = NULL;
    attn_status status = proto_decoder_finish(request->decoder, &call, err);
    if (status != ATTN_OK) return status;
    proto_decoder_free(request->decoder);
    request->decoder = NULL;
    if ((status = proto_call_answer_as(call, request->answer_as, err)) != ATTN_OK) {
        proto_call_free(call);
        return status;
    }
    request->job = job_new(server->staging, server->contexts, request->caller, request->block, call);
    if (request->job == NULL) {
        proto_call_free(call);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    }
    request->job->caches = server->caches;
    if (call->op == PROTO_OP_APPEND && !name_cache(request, &call->items[0]))
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    if (request->block) staging_arrived(server->staging, request->block);
    request->block = NULL; /* the job's now */
    result->deadline_ns = check_deadline(request, call);
    status = prepare_job(request->job, devices_any(server->devices), devices_largest(server->devices), err);
    if (status != ATTN_OK) proto_call_locate(call, err);
    return status;
}

/* Work that one request may not ask for, or that cannot be done in time: said at once, and not after all of it has been
 * tried. The estimate is less than any kernel needs, so nothing is refused that would have fitted. */
static void refuse_hopeless(const struct request *request, struct check_result *result)
{
    const struct server *server = request->server;
    const double left_s = (double)(result->deadline_ns - clock_ns()) / 1e9;
    const double least_s = devices_least_seconds(server->devices, request->job);
    result->failed = true;
    result->error = PROTO_E_DEADLINE;
    if (left_s <= 0)
        snprintf(result->why.text, sizeof result->why.text, "the deadline passed before the request could be queued");
    else if (least_s > server->config->max_seconds) {
        result->error = PROTO_E_TOO_MUCH_WORK;
        snprintf(result->why.text, sizeof result->why.text,
                 "this takes %.3g seconds here at the very least, a request may take %d (--max-seconds)", least_s,
                 server->config->max_seconds);
    } else if (least_s > left_s)
        snprintf(result->why.text, sizeof result->why.text,
                 "this takes %.3g seconds here at the very least, and the deadline is in %.3g", least_s, left_s);
    else result->failed = false;
}

void check_body(struct request *request, struct check_result *result)
{
    const int64_t began_ns = clock_ns();
    *result = (struct check_result){ .deadline_ns = check_deadline(request, NULL) };
    const attn_status status = make_job(request, result, &result->why);
    if (status != ATTN_OK) {
        result->failed = true;
        result->error = proto_error_of(status);
    } else if (request->job->runnable > 0) refuse_hopeless(request, result);
    result->took_ns = clock_ns() - began_ns;
}

void check_apply(struct request *request, const struct check_result *result)
{
    request->times.decode_ns += result->took_ns;
    request->deadline.at_ns = result->deadline_ns;
    if (result->failed)
        request_fail(request, result->error, result->why.member, "%s",
                     result->why.text[0] ? result->why.text : "no reason was given");
}
