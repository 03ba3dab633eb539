/* check.c: checks a complete body and makes its job. See check.h. */
#include "server/intake/check.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/flow.h"
#include "server/base/limits.h"
#include "server/device/devices.h"
#include "server/work/server.h"
#include "server/caches/caches.h"
#include "server/intake/prepare.h"
#include "server/intake/verify.h"
#include "server/regions/regions.h"

enum { ALIGNMENT = 64 };

bool check_takes_long(const struct request *request)
{
    const bool has_lse = proto_takes_tensor(proto_parser_op(request->parser), ATTN_T_lse);
    return request->decoded_bytes > (has_lse ? CHECK_LONG_LSE_BYTES : CHECK_LONG_BODY_BYTES) ||
           proto_parser_skeleton_bytes(request->parser) > CHECK_LONG_SKELETON_BYTES ||
           (request->shared && request->shared->input_bytes > REGIONS_AT_ONCE_BYTES);
}

bool check_shared(struct request *request)
{
    const struct server *server = request->server;
    const uint64_t limit = (uint64_t)server->config->max_body_bytes;
    proto_shared *list;
    int count;
    attn_error err = { 0 };
    attn_status status = proto_parser_shared(request->parser, &list, &count, &err);
    if (status == ATTN_OK && count == 0) return true;
    if (status == ATTN_OK && server->regions == NULL) {
        char pointer[sizeof err.member];
        snprintf(pointer, sizeof pointer, "/%s/%d/parameters/shared_memory_region",
                 list[0].output ? "outputs" : "inputs", list[0].index);
        status = attn_fail(&err, ATTN_INVALID, pointer, "%s: " PROTO_NO_SHARED_MEMORY " (the server's --allow-shm)",
                           attn_tensors[list[0].id].name);
    }
    if (status == ATTN_OK)
        status = region_uses_new(server->regions, request->caller, list, count, &request->shared, &err);
    const uint64_t bytes = request->decoded_bytes + (request->shared ? region_uses_input_bytes(request->shared) : 0);
    if (status == ATTN_OK && bytes > limit)
        status = attn_fail(&err, ATTN_TOO_LARGE, "/inputs",
                           "the body has %llu bytes with those in shared memory, the limit is %llu (the server's "
                           "--max-body-bytes)",
                           (unsigned long long)bytes, (unsigned long long)limit);
    if (status == ATTN_OK && request->shared->home >= 0 && !devices_is_usable(server->devices, request->shared->home))
        status = attn_fail(&err, ATTN_DEVICE_LOST, NULL, "the GPU in whose memory the tensors are has failed");
    if (status != ATTN_OK) request_fail_status(request, &err);
    return status == ATTN_OK;
}

/* Leases a longer block if the request's block of staging memory (memory for tensors) is small, and too short for the
 * inputs in shared memory. These inputs are then copied to the new block, which has a third more room, for outputs. If
 * no block can be leased now, the request's block grows later. */
static void lease_at_once(struct request *request)
{
    struct staging_pool *const staging = request->server->staging;
    const size_t used = request->block ? request->block->bytes : 0;
    const size_t inputs = used + (size_t)request->shared->input_bytes + (size_t)request->shared->count * ALIGNMENT +
                          2 * PROTO_MEMORY_STEP;
    struct staging_block *block;
    if ((uint64_t)request->shared->input_bytes <= used || used > CHECK_COPY_BYTES) return;
    if (staging_lease(staging, request->caller, inputs + inputs / 3, &block, NULL) != ATTN_OK) return;
    if (used > 0) memcpy(block->memory, request->block->memory, used);
    staging_release(staging, request->block);
    request->block = block;
}

static bool is_within(const struct staging_block *block, const struct region_use *use)
{
    if (use->output || use->in_place || use->pinned || use->bytes == 0) return true;
    const uintptr_t at = (uintptr_t)use->memory, from = (uintptr_t)block->memory;
    return at >= from && at - from <= block->bytes && (uint64_t)use->bytes <= block->bytes - (at - from);
}

/* Copies inputs from shared memory to staging memory. The server then checks the copy, which the client cannot change.
 * Inputs in a GPU's memory stay there. */
static attn_status read_shared(struct request *request, int64_t until_ns, bool *done, attn_error *err)
{
    struct region_uses *const uses = request->shared;
    *done = true;
    if (uses == NULL) return ATTN_OK;
    if (!uses->placed) {
        proto_shared *list;
        int count;
        if (request->block) staging_arrived(request->server->staging, request->block);
        lease_at_once(request);
        attn_status status = proto_parser_shared(request->parser, &list, &count, err);
        for (int i = 0; status == ATTN_OK && i < count; i++)
            list[i].device = uses->list[i].in_place ? uses->list[i].in_place : uses->list[i].pinned;
        if (status == ATTN_OK) status = proto_parser_shared_room(request->parser, err);
        if (status != ATTN_OK) return status;
        region_uses_place(uses, list);
        for (int i = 0; i < uses->count; i++) assert(is_within(request->block, &uses->list[i]));
    }
    return region_uses_read(uses, until_ns, done, err);
}

int64_t check_deadline(const struct request *request, const proto_call *call)
{
    int64_t at_ns = request->times.received_ns + request->server->config->timeout_ms * CLOCK_NS_PER_MS;
    int64_t wish_ms = request->client_timeout_ms;
    for (int i = 0; call && i < call->count; i++) {
        const int64_t timeout_ms = call->items[i].timeout_ms;
        if (call->items[i].error.status == ATTN_OK && timeout_ms > 0 && (wish_ms < 0 || timeout_ms < wish_ms))
            wish_ms = timeout_ms;
    }
    if (wish_ms >= 0 && wish_ms < INT64_MAX / CLOCK_NS_PER_MS / 2) {
        const int64_t wish_ns = request->times.began_ns + wish_ms * CLOCK_NS_PER_MS;
        if (wish_ns < at_ns) at_ns = wish_ns;
    }
    return at_ns;
}

/* Sets the item's cache to the one that the path of an append request names. A name that is too long for a cache's id
 * becomes "", which no cache has. Returns false when out of memory. */
static bool name_cache(const struct request *request, proto_item *item)
{
    const struct slice *const id = &request->parameters[0];
    item->caches = calloc(1, sizeof *item->caches);
    if (item->caches == NULL) return false;
    item->cache_count = 1;
    if (id->length < PROTO_CONTEXT_BYTES) memcpy(item->caches[0], id->at, id->length);
    return true;
}

static attn_status make_job(struct request *request, struct check_result *result, attn_error *err)
{
    struct server *server = request->server;
    proto_call *call = NULL;
    attn_status status = proto_parser_finish(request->parser, &call, err);
    if (status != ATTN_OK) {
        const proto_sequence *const sequence = proto_parser_sequence(request->parser);
        if (sequence && sequence->start && *sequence->id)
            caches_end_sequence(server->caches, request->caller, sequence->id);
        return status;
    }
    proto_parser_free(request->parser);
    request->parser = NULL;
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
    request->job->flow = flow_hold(request->flow);
    if (request->block) staging_arrived(server->staging, request->block);
    request->block = NULL;
    region_uses_drop_inputs(&request->shared);
    request->job->shared = request->shared;
    request->shared = NULL;
    if (proto_operations[call->op].cache_in_path && !name_cache(request, &call->items[0]))
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    if (request->job->shared) request->job->part.device = request->job->shared->home;
    result->deadline_ns = check_deadline(request, call);
    status = prepare_job(request->job, devices_capabilities(server->devices), devices_largest(server->devices), err);
    if (status == ATTN_OK) cut_prepare(server->devices, request->job);
    else proto_call_locate(call, err);
    return status;
}

/* Refuses a request if its expected time exceeds --max-seconds. Also refuses it if even its least possible time is
 * longer than the time before its deadline. */
static void refuse_hopeless(const struct request *request, struct check_result *result)
{
    const struct server *server = request->server;
    struct job *const job = request->job;
    prepare_look_closer(job, devices_largest(server->devices));
    const double left_s = (double)(result->deadline_ns - clock_ns()) / 1e9;
    const double half_s = (left_s < server->config->max_seconds ? left_s : server->config->max_seconds) / 2;
    /* A device would compute the exact results of all rows. If this would take more than half of the time that is left,
     * or more than half of --max-seconds, the CPU computes exact results instead. It does so for only some rows
     * (kernels/judge/judge.h). */
    if (job->wants_judge && job->truth_seconds > half_s) verify_drop_checks(job);
    const double least_s = devices_least_seconds(server->devices, job) / cut_most_parts(server->devices, job);
    result->failed = true;
    result->error = PROTO_E_DEADLINE;
    if (left_s <= 0)
        snprintf(result->why.text, sizeof result->why.text, "the deadline passed before the request could be queued");
    else if (job->seconds > server->config->max_seconds) {
        const bool plain = job->because[0] == '\0';
        result->error = PROTO_E_TOO_MUCH_WORK;
        snprintf(result->why.text, sizeof result->why.text,
                 "this is expected to take %.3g seconds here%s%s, a request may take %d (--max-seconds)", job->seconds,
                 plain ? "" : ", most of them for ", job->because, server->config->max_seconds);
    } else if (least_s > left_s)
        snprintf(result->why.text, sizeof result->why.text,
                 "this takes %.3g seconds here at the very least, and the deadline is in %.3g", least_s, left_s);
    else result->failed = false;
}

bool check_piece(struct request *request, struct check_result *result, int64_t until_ns)
{
    const int64_t began_ns = clock_ns();
    bool done;
    result->deadline_ns = check_deadline(request, NULL);
    attn_status status = read_shared(request, until_ns, &done, &result->why);
    if (status == ATTN_OK && done) status = make_job(request, result, &result->why);
    if (status != ATTN_OK) {
        result->failed = true;
        result->error = proto_error_of(status);
    } else if (done && request->job->runnable > 0) refuse_hopeless(request, result);
    result->took_ns += clock_ns() - began_ns;
    return done || result->failed;
}

void check_body(struct request *request, struct check_result *result)
{
    *result = (struct check_result){ 0 };
    while (!check_piece(request, result, INT64_MAX)) continue;
}

void check_apply(struct request *request, const struct check_result *result)
{
    request->times.decode_ns += result->took_ns;
    request->deadline.at_ns = result->deadline_ns;
    if (result->failed)
        request_fail(request, result->error, result->why.member, "%s",
                     result->why.text[0] ? result->why.text : "no reason was given");
}
