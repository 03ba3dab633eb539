/* body.c: the body of a request.
 *
 *   body_admit    before the first byte: reserves a slot in the queue, memory for tensors and a parser
 *   body_piece    for each piece: feeds the parser; a compressed piece is unpacked first, a limited amount per call
 *   body_done     at the end: checks the body, then computes in this thread, or suspends the connection and posts the
 *                 request to the main thread, or refuses the request */
#include "server/http/body.h"
#include "server/http/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/base/limits.h"
#include "server/base/metrics.h"
#include "server/base/staging.h"
#include "server/base/unpack.h"
#include "server/device/devices.h"
#include "server/device/inline.h"
#include "server/http/answer.h"
#include "server/http/connections.h"
#include "server/http/http_threads.h"
#include "server/http/own_answers.h"
#include "server/intake/check.h"
#include "server/regions/regions.h"
#include "server/routes/routes.h"
#include "server/sched/loop.h"
#include "server/work/contexts.h"
#include "server/work/server.h"
#include "server/work/transaction.h"

enum {
    /* size in bytes of the first staging memory (memory for tensors) of a body, if none was leased before its bytes
     * arrived */
    FIRST_STEP = 64 << 10,
    /* number of tensors that the first estimate of a body's memory assumes */
    EXPECTED_TENSORS = 16,
};

/* ---- What is decided before the body's first byte ---------------------------------------------------------------- */

/* Called by the parser when a body needs more memory. The memory is doubled, up to expected_bytes if the body's length
 * was announced. If staging memory is too short for that, the memory grows only by what the parser needs. */
static attn_status on_grow(void *context, size_t bytes, void **base, attn_error *err)
{
    struct request *request = context;
    struct staging_pool *staging = request->server->staging;
    size_t ample = request->block ? 2 * request->block->bytes : FIRST_STEP;
    attn_status status = request->block && bytes <= request->block->bytes ? ATTN_OK : ATTN_BUSY;
    if (exchange_of(request)->expected_bytes > 0 && ample > exchange_of(request)->expected_bytes)
        ample = exchange_of(request)->expected_bytes;
    for (int attempt = 0; attempt < 2 && status != ATTN_OK; attempt++) {
        const size_t want = attempt == 0 && ample > bytes ? ample : bytes;
        attn_error *const why = attempt == 0 ? NULL : err;
        if (request->block == NULL) status = staging_lease(staging, request->caller, want, &request->block, why);
        else status = staging_grow(staging, &request->block, request->block->bytes, want, why);
    }
    if (status == ATTN_OK) *base = request->block->memory;
    return status;
}

void body_admit(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    struct server *server = request->server;
    const int phase = atomic_load(&server->phase);
    attn_error err = { 0 };

    if (phase == SERVER_FAILED || phase == SERVER_STARTING || !devices_usable(server->devices)) {
        request_fail(request, PROTO_E_UNAVAILABLE, NULL, "no device is usable");
        return;
    }
    if (queue_look(&server->queue, CALLER_WAITING, request->caller, &err) != ATTN_OK ||
        request_enter(request, CALLER_RECEIVING, &err) != ATTN_OK) {
        request_fail_status(request, &err);
        return;
    }
    if (exchange->coding != UNPACK_NOTHING) {
        exchange->unpacker = unpack_new(exchange->coding, (uint64_t)server->config->max_body_bytes);
        if (exchange->unpacker == NULL) {
            request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory to unpack the body");
            return;
        }
        /* memory is leased before the bytes arrive only for an uncompressed body, whose length is known in advance */
    } else if (f->has_length && f->length > 0) {
        const size_t inputs = proto_memory_for(exchange->body->format, f->length, EXPECTED_TENSORS);
        exchange->expected_bytes = inputs + inputs / 3 + PROTO_MEMORY_STEP;
        (void)staging_lease_ahead(server->staging, request->caller, exchange->expected_bytes, &request->block);
    }
    const proto_memory memory = { on_grow, request };
    request->parser = proto_parser_new(exchange->body->format, request->route->op, &server->limits, &memory);
    if (request->parser == NULL) request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for a parser");
    else if (request->model) proto_parser_kserve(request->parser, request->model, exchange->json_bytes);
}

/* ---- Receiving the body, piece by piece -------------------------------------------------------------------------- */

static void refuse_body(struct request *request, const attn_error *why)
{
    request_fail_status(request, why);
    exchange_drop_body(request);
    exchange_of(request)->step = STEP_DISCARD;
}

static attn_status decode(struct request *request, const char *bytes, size_t count, attn_error *err)
{
    attn_status status = proto_parser_feed(request->parser, bytes, count, err);
    request->decoded_bytes += count;
    if (status == ATTN_OK) status = request_count_bytes(request, proto_parser_held_bytes(request->parser), err);
    if (request->block && request->decoded_bytes > request->block->bytes / 2)
        staging_arrived(request->server->staging, request->block);
    return status;
}

/* Unpacks and decodes a piece of a compressed body, but stops after about UNPACK_TURN_BYTES, so that this thread can
 * serve other connections. Sets *count to the number of unused compressed bytes. */
static attn_status unpack_and_decode(struct request *request, const char *bytes, size_t *count, attn_error *err)
{
    const uint64_t turn_ends = request->decoded_bytes + UNPACK_TURN_BYTES;
    attn_status status;
    const char *piece;
    size_t size;
    do {
        status = unpack_next(exchange_of(request)->unpacker, &bytes, count, &piece, &size, err);
        if (status == ATTN_OK && size > 0) status = decode(request, piece, size, err);
    } while (status == ATTN_OK && size > 0 && !(*count > 0 && request->decoded_bytes >= turn_ends));
    return status;
}

static void keep_body(struct request *request, const char *bytes, size_t count)
{
    if (request->failed || request->route == NULL || !request->route->keeps_body) return;
    if (count > HTTP_KEPT_BODY_BYTES - request->text_bytes) {
        request_fail(request, PROTO_E_TOO_LARGE, NULL, "the body has more than %d bytes, the limit of this path",
                     HTTP_KEPT_BODY_BYTES);
        return;
    }
    if (request->text == NULL && (request->text = malloc(HTTP_KEPT_BODY_BYTES)) == NULL) {
        request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for the body");
        return;
    }
    memcpy(request->text + request->text_bytes, bytes, count);
    request->text_bytes += count;
}

/* If a body with a refused content type looks like safetensors, adds this fact to the error message. */
static void look_at_body(struct request *request, const char *bytes, size_t count)
{
    if (!request->failed || request->error != PROTO_E_UNSUPPORTED_MEDIA ||
        exchange_of(request)->coding != UNPACK_NOTHING || !proto_is_safetensors(bytes, count))
        return;
    snprintf(request->why.text, sizeof request->why.text,
             "the body begins like a safetensors file, but its Content-Type is another one; send it with Content-Type: "
             "application/x-safetensors");
}

size_t body_piece(struct request *request, const char *bytes, size_t count)
{
    struct exchange *const exchange = exchange_of(request);
    const uint64_t limit = (uint64_t)request->server->config->max_body_bytes;
    size_t left = 0;
    /* only a chunked body can be too long here, because a Content-Length was checked earlier */
    if (exchange->received_bytes + count > limit) {
        exchange->received_bytes += count;
        /* TOO_LARGE, which ends the connection, replaces an earlier error */
        request->failed = false;
        request_fail(request, PROTO_E_TOO_LARGE, NULL,
                     "the body has more than %llu bytes, the limit (the server's --max-body-bytes)",
                     (unsigned long long)limit);
        exchange_drop_body(request);
        own_answers_refuse(request);
        return 0;
    }
    if (exchange->step == STEP_DECODE) {
        attn_error err = { 0 };
        const int64_t began = clock_ns();
        attn_status status;
        if (exchange->unpacker) {
            left = count;
            status = unpack_and_decode(request, bytes, &left, &err);
        } else status = decode(request, bytes, count, &err);
        request->times.decode_ns += clock_ns() - began;
        if (status != ATTN_OK) {
            refuse_body(request, &err);
            left = 0;
        }
    } else {
        if (exchange->received_bytes == 0) look_at_body(request, bytes, count);
        keep_body(request, bytes, count);
    }
    exchange->received_bytes += count - left;
    /* progress is the number of received bytes, or that of unpacked bytes (of a compressed body) if it is larger */
    connection_progress(exchange->connection, request->decoded_bytes > exchange->received_bytes
                                                  ? request->decoded_bytes
                                                  : exchange->received_bytes);
    return left;
}

static bool shares_little(const struct job *job)
{
    return job->shared == NULL || job->shared->output_bytes <= REGIONS_AT_ONCE_BYTES;
}

static void write_shared(struct request *request)
{
    const int64_t began = clock_ns();
    attn_error err = { 0 };
    bool done;
    if (request->job->shared == NULL) return;
    if (region_uses_write(request->job->shared, INT64_MAX, &done, &err) != ATTN_OK) request_fail_in_job(request, &err);
    request->times.encode_ns += clock_ns() - began;
}

/* Ends the cache transaction of a request, if this thread began it. If the request failed, the caches are as they were
 * before the transaction. Tells the main thread that the transaction has ended, because queued requests may wait for
 * its caches. */
static void end_step(struct request *request)
{
    if (request->job == NULL || request->job->transaction == NULL) return;
    transaction_end(request->job, !request->failed);
    if (request_count(REQUEST_QUEUED) > 0) loop_note_step_end(request->server->loop);
}

/* Gives the request the flow (account of used device time) of its token, or of its connection on a server without
 * tokens. */
static void join_flow(struct request *request)
{
    struct connection *const connection = exchange_of(request)->connection;
    struct flow *flow = request->caller->flow;
    if (flow == NULL && connection->flow == NULL) connection->flow = flow_new("everybody");
    if (flow == NULL) flow = connection->flow;
    request->flow = flow_hold(flow);
}

/* Finishes the unpacker after the last byte of the body. Returns false if the request has failed. */
static bool end_body(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    attn_error err = { 0 };
    request->times.received_ns = clock_ns();
    request->times.recv_ns = request->times.received_ns - request->times.began_ns - request->times.decode_ns;
    metrics_add(METRIC_BODY_BYTES_IN, NULL, NULL, (double)exchange->received_bytes);
    if (exchange->unpacker && unpack_finish(exchange->unpacker, &err) != ATTN_OK) refuse_body(request, &err);
    if (exchange->step == STEP_DISCARD) return false;
    unpack_free(exchange->unpacker);
    exchange->unpacker = NULL;
    return true;
}

/* If the check of the body is quick, makes it in this thread, and makes the request's job (work for a device).
 * Otherwise request->job stays NULL. Returns false if the answer is decided: the request failed, every problem was
 * refused, or a handler answers. */
static bool check_here(struct request *request)
{
    struct check_result result;
    if (!check_shared(request)) return false;
    if (check_takes_long(request)) return true;
    check_body(request, &result);
    check_apply(request, &result);
    if (request->failed) return false;
    if (request->job->runnable > 0) return true;
    contexts_finish_job(request->job, false);
    return false;
}

static enum inline_outcome run_here(struct request *request)
{
    if (request->job == NULL) return INLINE_NOT;
    request_move(request, REQUEST_COMPUTING);
    return shares_little(request->job) ? inline_run(request->server->devices, request->job) : INLINE_NOT;
}

/* Writes the outputs that the client wants in its shared memory, ends the job's cache transaction, and answers. */
static enum MHD_Result answer_done(struct request *request)
{
    struct server *const server = request->server;
    if (!job_ran(request->job)) request_fail_in_job(request, job_error(request->job));
    else write_shared(request);
    end_step(request);
    if (!inline_near(server->devices) && atomic_load(&server->suspended) == 0) http_threads_expect();
    return answer_now(request, false);
}

/* Gives the request to the main thread, which has the body checked or queues the job. If `late` is true, the job runs
 * on a device already, and the main thread waits for its end. */
static enum MHD_Result hand_over(struct request *request, bool late)
{
    struct exchange *const exchange = exchange_of(request);
    struct server *const server = request->server;
    attn_error err = { 0 };
    /* a late job runs on a device already, so it needs no slot in the queue */
    if (!late && request_enter(request, CALLER_WAITING, &err) != ATTN_OK) {
        request_fail_status(request, &err);
        end_step(request);
        return answer_now(request, false);
    }

    /* This thread counts the request as suspended and then reads `stopping`. The main thread sets `stopping` and then
     * reads the count. At least one of them sees what the other wrote, so the server does not stop while a connection
     * is suspended. */
    atomic_fetch_add(&server->suspended, 1);
    if (atomic_load(&server->stopping)) {
        atomic_fetch_sub(&server->suspended, 1);
        if (late) inline_settle(request->job);
        request_fail(request, PROTO_E_DRAINING, NULL, "the server is stopping");
        end_step(request);
        return answer_now(request, true);
    }
    exchange->step = STEP_WAIT;
    if (request->job) request->job->request = request;
    else request->deadline.at_ns = check_deadline(request, NULL);
    request_move(request, late ? REQUEST_RUNNING : request->job ? REQUEST_QUEUED : REQUEST_CHECKING);
    MHD_suspend_connection(exchange->mhd);
    if (!inline_near(server->devices)) http_threads_await(1, &server->suspended);
    loop_post(server->loop, request); /* from here on the main thread owns the request: do not touch it */
    return MHD_YES;
}

enum MHD_Result body_done(struct request *request)
{
    if (!end_body(request)) return answer_now(request, false);
    join_flow(request);
    if (!check_here(request)) return answer_now(request, false);
    flow_charge(request->flow, FLOW_CHECK, request->times.decode_ns);
    if (!connection_enter(exchange_of(request)->connection,
                          /* fails if the body came so slowly that the main thread has cut the connection */
                          CONNECTION_WORK)) {
        if (request->job) contexts_finish_job(request->job, false);
        return MHD_NO;
    }
    switch (run_here(request)) {
    case INLINE_DONE: return answer_done(request);
    case INLINE_LATE: return hand_over(request, true);
    case INLINE_NOT:
    case INLINE_BEGAN:
    case INLINE_LOST:
        /* The main thread gets the request. It queues the job, or first has the body checked. INLINE_BEGAN: the job's
         * cache transaction has begun. INLINE_LOST: the device that should have computed the job (job->part.device) has
         * failed. */
        break;
    }
    return hand_over(request, false);
}
