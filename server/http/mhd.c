/* mhd.c: the libmicrohttpd side of a request.
 *
 *   on_uri          the request line: a request is born
 *   on_request      STEP_HEAD      framing, route, limits, token, admission        (nothing of the body is kept before)
 *                   STEP_DECODE    each piece of the body goes through the decoder; a compressed one is unpacked
 *                                  before, a turn at a time
 *                   STEP_DISCARD   refused: the body is read and dropped, so that the client lives to hear why
 *                   (body ends)    decoded and checked -> suspended, posted to the loop; or answered: refused, or so
 *                                  small that it was computed here
 *                   STEP_WAIT      resumed: answer
 *   on_completed    the client has it, or left: log line, metrics, everything is freed
 *
 * What libmicrohttpd demands of us, each measured or read in the sources of 0.9.75 and 1.0.1; make http-other runs the
 * tests with the one that is not installed:
 * 1. A response queued in the first call closes the connection after it; so refusals wait for the end of the body,
 * unless that is what we want (bad framing, a body over the limit, Expect: 100-continue).
 * 2. In the middle of a body no response can be queued at all: 408 and 413 there are written to the socket, past
 * it.
 * 3. A suspended connection has no time-out and no eyes. It must be resumed before the daemon is stopped, or it
 * panics.
 * 4. Its own connection limit must never be reached: 0.9.75, refusing a connection there, leaves a mutex locked. It is
 * given no limit. The limits are ours, and they count connections that it may still hold.
 * 5. Bytes of a body must all be consumed in each call, or the connection hangs; unless it is suspended, which may end
 * at once: the thread then serves its other connections, and comes back with what is left.
 * 6. Given exactly 128 events at once, it would sleep on them: http_threads.c has an epoll_wait() that does not.
 * 7. It refuses some requests by itself, with a page in HTML that differs by version: own_answers.c replaces it. */
#include "server/http/mhd.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "proto-json/text.h"
#include "server/base/limits.h"
#include "server/http/access_log.h"
#include "server/http/answer.h"
#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/work/contexts.h"
#include "server/work/prepare.h"
#include "server/work/regions.h"
#include "server/work/steps.h"
#include "server/device/devices.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/sched/check.h"
#include "server/sched/loop.h"
#include "server/base/metrics.h"
#include "server/base/unpack.h"
#include "server/http/head_rules.h"
#include "server/http/http_head.h"
#include "server/http/connections.h"
#include "server/http/own_answers.h"
#include "server/http/first_bytes.h"
#include "server/http/routes.h"
#include "server/http/tls_memory.h"
#include "server/http/tokens.h"

enum {
    NO_LIMIT = INT_MAX,    /* of connections; see rule 4 */
    FIRST_STEP = 64 << 10, /* staging memory leased at first where none was leased ahead */
    EXPECTED_TENSORS = 16, /* of a body, for its size in memory; more of them make it grow */
};

/* ---- Head -------------------------------------------------------------------------------------------------------- */

static enum MHD_Result on_header(void *context, enum MHD_ValueKind kind, const char *key, size_t key_size,
                                 const char *value, size_t value_size)
{
    (void)kind;
    http_head_header(context, key, key_size, value, value_size);
    return MHD_YES;
}

/* The id and the trace come first, for every answer and log line carries them. */
static void read_identity(struct request *request, const struct http_head *f)
{
    if (http_head_is_request_id(f->value[HEADER_REQUEST_ID])) strcpy(request->id, f->value[HEADER_REQUEST_ID]);
    else request_make_id(request->id);
    http_head_traceparent(f->value[HEADER_TRACEPARENT], request->trace_id, request->span_id);
}

/* The last lines of X-Forwarded-For, in order of arrival. */
struct forwarded {
    const char *lines[FORWARDED_LINES];
    int count;
};

static enum MHD_Result on_forwarded(void *context, enum MHD_ValueKind kind, const char *name, const char *value)
{
    struct forwarded *const f = context;
    (void)kind;
    if (strcasecmp(name, "X-Forwarded-For") != 0) return MHD_YES;
    if (f->count == FORWARDED_LINES) memmove(&f->lines[0], &f->lines[1], (size_t)--f->count * sizeof f->lines[0]);
    f->lines[f->count++] = value ? value : "";
    return MHD_YES;
}

/* Sets the peer: where a trusted proxy sent the request, the client behind the proxy. */
static void read_peer(struct request *request)
{
    const struct config *const config = request->server->config;
    const char *const *const networks = config->trusted_proxies;
    struct forwarded f = { .count = 0 };
    if (!peer_is_trusted(networks, config->trusted_proxy_count, request->peer)) return;
    (void)MHD_get_connection_values(request->mhd, MHD_HEADER_KIND, on_forwarded, &f);
    (void)peer_forwarded(networks, config->trusted_proxy_count, request->connection->peer, f.lines, f.count,
                         request->peer);
}

/* Of a body whose memory could not be leased ahead: what it has doubles, up to what was announced, and where there is
 * no room for that it grows by what is needed. */
static attn_status on_grow(void *context, size_t bytes, void **base, attn_error *err)
{
    struct request *request = context;
    struct staging_pool *staging = request->server->staging;
    size_t ample = request->block ? 2 * request->block->bytes : FIRST_STEP;
    attn_status status = request->block && bytes <= request->block->bytes ? ATTN_OK : ATTN_BUSY;
    if (request->expected_bytes > 0 && ample > request->expected_bytes) ample = request->expected_bytes;
    for (int attempt = 0; attempt < 2 && status != ATTN_OK; attempt++) {
        const size_t want = attempt == 0 && ample > bytes ? ample : bytes;
        attn_error *const why = attempt == 0 ? NULL : err; /* of the first there is nothing to tell */
        if (request->block == NULL) status = staging_lease(staging, request->caller, want, &request->block, why);
        else status = staging_grow(staging, &request->block, request->block->bytes, want, why);
    }
    if (status == ATTN_OK) *base = request->block->memory;
    return status;
}

/* A place, memory and a decoder: everything that a body needs, before its first byte. Memory is leased ahead for what
 * the inputs need and as much again as is usual for outputs (a third of the inputs), as long as not too much is leased
 * so (staging.h); large blocks only reserve it, pages come with the first touch. Without that, the decoder's first
 * value leases the first of it. */
static void admit(struct request *request, const struct http_head *f)
{
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
    if (request->coding != UNPACK_NOTHING) {
        request->unpacker = unpack_new(request->coding, (uint64_t)server->config->max_body_bytes);
        if (request->unpacker == NULL) {
            request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory to unpack the body");
            return;
        }
    } else if (f->has_length && f->length > 0) { /* what a compressed body unpacks to, its length does not say */
        const size_t inputs = proto_memory_for(request->body->format, f->length, EXPECTED_TENSORS);
        request->expected_bytes = inputs + inputs / 3 + PROTO_MEMORY_STEP;
        (void)staging_lease_ahead(server->staging, request->caller, request->expected_bytes, &request->block);
    }
    const proto_memory memory = { on_grow, request };
    request->decoder = proto_decoder_new(request->body->format, request->route->op, &server->limits, &memory);
    if (request->decoder == NULL) request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for a decoder");
    else if (request->model) proto_decoder_kserve(request->decoder, request->model, request->json_bytes);
}

/* ---- Answers ----------------------------------------------------------------------------------------------------- */

static enum MHD_Result answer_now(struct request *request, bool close)
{
    if (request->failed && request->job) prepare_finish_contexts(request->job, false);
    if (request->state != REQUEST_ANSWERING) {
        request_drop_body(request);
        if (!connection_enter(request->connection, CONNECTION_SEND)) return MHD_NO;
        request_move(request, REQUEST_ANSWERING);
    } else if (!connection_enter(request->connection, CONNECTION_SEND)) return MHD_NO;
    request->step = STEP_ANSWER;
    if (request->failed) { /* its memory is of use to others while the client reads why */
        job_release(request->job);
        request->job = NULL;
    }
    return answer_queue(request, close || atomic_load(&request->server->phase) != SERVER_READY);
}

/* libmicrohttpd reads Expect after us. 0.9.75 compares the value with the white space behind it. It would also send 100
 * for a request without a body, and then not read the bytes behind this request. Therefore the value is changed where
 * it lies, in the memory of libmicrohttpd's connection: the white space is cut off, and without a body all of it. */
static void settle_expectation(struct request *request, const struct http_head *f)
{
    char *const value = (char *)MHD_lookup_connection_value(request->mhd, MHD_HEADER_KIND, "Expect");
    if (value) value[http_head_has_body(f) ? strlen(f->value[HEADER_EXPECT]) : 0] = '\0';
}

/* The first call: the headers are there. */
static enum MHD_Result head(struct request *request, const char *version)
{
    struct http_head f;
    request->times.head_ns = clock_ns();
    http_head_begin(&f, version);
    if (request->bad_line) http_head_fault(&f, "the request line contains a character where it cannot stand");
    (void)MHD_get_connection_values_n(request->mhd, MHD_HEADER_KIND, on_header, &f);
    const bool sound = http_head_end(&f);
    read_identity(request, &f);
    read_peer(request);
    if (!sound) {
        request_fail(request, PROTO_E_INVALID_FRAMING, NULL, "%s", f.fault);
        request->connection->sending = true; /* the client may send more, whatever it is */
        return answer_now(request, true);
    }
    head_rules_origin(request, &f);
    head_rules_check(request, &f);
    if (request->route && request->route->bodies && !request->preflight) request_count_in(request);
    if (!request->failed && request->body) admit(request, &f);
    request->step = request->decoder && !request->failed ? STEP_DECODE : STEP_DISCARD;
    if (request->failed) {
        request_drop_body(request);
        const bool over = f.has_length && f.length > (uint64_t)request->server->config->max_body_bytes;
        if (http_head_has_body(&f) && (over || f.value[HEADER_EXPECT])) {
            request->connection->sending = true;
            return answer_now(request, true);
        }
    }
    settle_expectation(request, &f);
    if (http_head_has_body(&f) && !connection_enter(request->connection, CONNECTION_BODY)) return MHD_NO;
    return MHD_YES;
}

/* ---- Body -------------------------------------------------------------------------------------------------------- */

/* A body that is refused: what is left of it is dropped. */
static void refuse_body(struct request *request, const attn_error *why)
{
    request_fail_status(request, why);
    request_drop_body(request);
    request->step = STEP_DISCARD;
}

static attn_status decode(struct request *request, const char *bytes, size_t count, attn_error *err)
{
    attn_status status = proto_decoder_feed(request->decoder, bytes, count, err);
    request->decoded_bytes += count;
    if (status == ATTN_OK) status = request_count_bytes(request, proto_decoder_held_bytes(request->decoder), err);
    if (request->block && request->decoded_bytes > request->block->bytes / 2)
        staging_arrived(request->server->staging, request->block);
    return status;
}

/* As much as makes a turn; *count becomes what is left. */
static attn_status unpack_and_decode(struct request *request, const char *bytes, size_t *count, attn_error *err)
{
    const uint64_t turn_ends = request->decoded_bytes + UNPACK_TURN_BYTES;
    attn_status status;
    const char *piece;
    size_t size;
    do {
        status = unpack_next(request->unpacker, &bytes, count, &piece, &size, err);
        if (status == ATTN_OK && size > 0) status = decode(request, piece, size, err);
    } while (status == ATTN_OK && size > 0 && !(*count > 0 && request->decoded_bytes >= turn_ends));
    return status;
}

/* Of a route whose handler reads its body. */
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

/* Of a body whose content type was refused, what it seems to be. */
static void look_at_body(struct request *request, const char *bytes, size_t count)
{
    if (!request->failed || request->error != PROTO_E_UNSUPPORTED_MEDIA || request->coding != UNPACK_NOTHING ||
        !proto_is_safetensors(bytes, count))
        return;
    snprintf(request->why.text, sizeof request->why.text,
             "the body begins like a safetensors file, but its Content-Type is another one; send it with Content-Type: "
             "application/x-safetensors");
}

/* Returns how much of the piece is left for another call. */
static size_t body_piece(struct request *request, const char *bytes, size_t count)
{
    const uint64_t limit = (uint64_t)request->server->config->max_body_bytes;
    size_t left = 0;
    if (request->received_bytes + count > limit) { /* only a chunked body gets here */
        request->received_bytes += count;
        request->failed = false; /* whatever else is wrong, for this the connection ends */
        request_fail(request, PROTO_E_TOO_LARGE, NULL,
                     "the body has more than %llu bytes, the limit (the server's --max-body-bytes)",
                     (unsigned long long)limit);
        request_drop_body(request);
        own_answers_refuse(request);
        return 0;
    }
    if (request->step == STEP_DECODE) {
        attn_error err = { 0 };
        const int64_t began = clock_ns();
        attn_status status;
        if (request->unpacker) {
            left = count;
            status = unpack_and_decode(request, bytes, &left, &err);
        } else status = decode(request, bytes, count, &err);
        request->times.decode_ns += clock_ns() - began;
        if (status != ATTN_OK) {
            refuse_body(request, &err);
            left = 0;
        }
    } else {
        if (request->received_bytes == 0) look_at_body(request, bytes, count);
        keep_body(request, bytes, count);
    }
    request->received_bytes += count - left;
    /* A client is as fast as its bytes weigh. */
    connection_progress(request->connection, request->decoded_bytes > request->received_bytes
                                                 ? request->decoded_bytes
                                                 : request->received_bytes);
    return left;
}

/* The connection is not suspended any more. */
static void end_wait(struct request *request)
{
    if (request->step != STEP_WAIT) return;
    request->step = STEP_ANSWER;
    struct server *const server = request->server;
    atomic_fetch_sub(&server->suspended, 1);
    if (!devices_near(server->devices)) http_threads_await(-1, &server->suspended);
}

/* Is what goes into shared memory so little that this thread can write it? */
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

/* Of a step that began in this thread: its caches are as they were, or longer.
 * Steps that came meanwhile may have found it there. */
static void end_step(struct request *request)
{
    if (request->job == NULL || request->job->step == NULL) return;
    step_end(request->job, !request->failed);
    if (request_count(REQUEST_QUEUED) > 0) loop_note_step_end(request->server->loop);
}

/* Gives the request the flow of its token, or of its connection. A connection without memory for a flow has none, and
 * shares the queue's flow for such jobs. */
static void join_flow(struct request *request)
{
    struct connection *const connection = request->connection;
    struct flow *flow = request->caller->flow;
    if (flow == NULL && connection->flow == NULL) connection->flow = flow_new("everybody");
    if (flow == NULL) flow = connection->flow;
    request->flow = flow_hold(flow);
}

/* Nothing of the body is to come any more: its decoder and unpacker have all of it. False: the request has failed. */
static bool end_body(struct request *request)
{
    attn_error err = { 0 };
    request->times.received_ns = clock_ns();
    request->times.recv_ns = request->times.received_ns - request->times.began_ns - request->times.decode_ns;
    metrics_add(METRIC_BODY_BYTES_IN, NULL, NULL, (double)request->received_bytes);
    if (request->unpacker && unpack_finish(request->unpacker, &err) != ATTN_OK) refuse_body(request, &err);
    if (request->step == STEP_DISCARD) return false;
    unpack_free(request->unpacker);
    request->unpacker = NULL;
    return true;
}

/* A body that is quick to check gets its job here, the loop has the others checked in pieces. False: the request has
 * its answer, because it failed, because every item was refused, or because a handler answers. */
static bool check_here(struct request *request)
{
    struct check_result result;
    if (!check_shared(request)) return false;
    if (check_takes_long(request)) return true;
    check_body(request, &result);
    check_apply(request, &result);
    if (request->failed) return false;
    if (request->job->runnable > 0) return true;
    prepare_finish_contexts(request->job, false);
    return false;
}

static enum run_here run_here(struct request *request)
{
    if (request->job == NULL) return RUN_HERE_NOT; /* it is still to be checked */
    request_move(request, REQUEST_COMPUTING);
    return shares_little(request->job) ? devices_run_here(request->server->devices, request->job) : RUN_HERE_NOT;
}

/* The job is over, in this thread. */
static enum MHD_Result answer_done(struct request *request)
{
    struct server *const server = request->server;
    if (!job_ran(request->job)) request_fail_in_job(request, job_error(request->job));
    else write_shared(request);
    end_step(request);
    if (!devices_near(server->devices) && atomic_load(&server->suspended) == 0) http_threads_expect();
    return answer_now(request, false);
}

/* The loop gets the request: to have its body checked, to queue its job, or (`late`) to wait for what runs. */
static enum MHD_Result hand_over(struct request *request, bool late)
{
    struct server *const server = request->server;
    attn_error err = { 0 };
    /* What runs already waits for no device and needs no place; nor may this thread wait for its end. */
    if (!late && request_enter(request, CALLER_WAITING, &err) != ATTN_OK) {
        request_fail_status(request, &err);
        end_step(request);
        return answer_now(request, false);
    }

    /* From here on the loop may see it. It is counted as suspended first and the flag read afterwards; the loop
     * sets the flag and then reads the count: one of the two sees the other. */
    atomic_fetch_add(&server->suspended, 1);
    if (atomic_load(&server->stopping)) {
        atomic_fetch_sub(&server->suspended, 1);
        if (late) devices_settle(request->job);
        request_fail(request, PROTO_E_DRAINING, NULL, "the server is stopping");
        end_step(request);
        return answer_now(request, true);
    }
    request->step = STEP_WAIT;
    if (request->job) request->job->request = request;
    else request->deadline.at_ns = check_deadline(request, NULL);
    request_move(request, late ? REQUEST_RUNNING : request->job ? REQUEST_QUEUED : REQUEST_CHECKING);
    MHD_suspend_connection(request->mhd);
    if (!devices_near(server->devices)) http_threads_await(1, &server->suspended);
    loop_post(server->loop, request); /* the loop's from here on: touch nothing */
    return MHD_YES;
}

/* The body is complete. */
static enum MHD_Result body_done(struct request *request)
{
    if (!end_body(request)) return answer_now(request, false);
    join_flow(request);
    if (!check_here(request)) return answer_now(request, false);
    flow_charge(request->flow, FLOW_CHECK, request->times.decode_ns);
    if (!connection_enter(request->connection, CONNECTION_WORK)) { /* cut in this moment for being too slow */
        if (request->job) prepare_finish_contexts(request->job, false);
        return MHD_NO;
    }
    switch (run_here(request)) {
    case RUN_HERE_DONE: return answer_done(request);
    case RUN_HERE_LATE: return hand_over(request, true);
    case RUN_HERE_NOT:
    case RUN_HERE_BEGAN:
    case RUN_HERE_LOST:
        break; /* to be queued: steps.h knows whether its step began, and job->part.device is the lost one */
    }
    return hand_over(request, false);
}

/* ---- libmicrohttpd's callbacks ----------------------------------------------------------------------------------- */

static struct request *begin_request(struct http_thread *thread, const char *uri, struct MHD_Connection *mhd)
{
    struct http_server *http = thread->http;
    request_set_role(ROLE_HTTP);
    if (atomic_load_explicit(&thread->tid, memory_order_relaxed) == 0)
        atomic_store_explicit(&thread->tid, gettid(), memory_order_relaxed);
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct connection *connection = info ? info->socket_context : NULL;
    if (connection == NULL) return NULL;
    atomic_store(&connection->error_media, route_error_media(http_head_path(uri)));
    if (!connection_enter(connection, CONNECTION_HEAD)) return NULL;
    if (http->kind == PORT_MAIN && atomic_load(&http->server->phase) == SERVER_DRAINING)
        atomic_store(&http->server->connections->used_ms, clock_ms());
    struct request *request = request_new(http->server, http, mhd);
    if (request == NULL) return NULL;
    request->connection = connection;
    request->socket = connection->fd;
    memcpy(request->peer, connection->peer, sizeof request->peer);
    connection->request = request;
    connections_count_request(http->server->connections, 1);
    const size_t arguments = http_head_arguments(uri);
    request->bad_line = !http_head_is_target(uri);
    request->has_query = arguments > 0;
    /* When their records do not fit, libmicrohttpd 0.9.75 begins an answer, forgets it and waits. */
    if (arguments > HTTP_ARGUMENTS_MAX) {
        request->http_status = 414;
        connection_cut_with(connection, PROTO_E_TARGET_TOO_LONG, NULL);
    }
    return request;
}

static void *on_uri(void *context, const char *uri, struct MHD_Connection *mhd)
{
    heartbeat_busy(HEARTBEAT_HTTP);
    struct request *request = begin_request(context, uri, mhd);
    heartbeat_idle();
    return request;
}

static size_t on_unescape(void *context, struct MHD_Connection *mhd, char *text)
{
    (void)context;
    (void)mhd;
    return http_head_unescape(text);
}

/* What is to be done next with a request: libmicrohttpd calls one function for everything. */
static enum MHD_Result advance(struct request *request, const char *url, const char *method, const char *version,
                               const char *upload, size_t *upload_size)
{
    switch (request->step) {
    case STEP_HEAD:
        request->path = http_head_path(url);
        atomic_store(&request->connection->error_media,
                     route_error_media(request->path)); /* escapes are resolved now */
        if (http_head_is_method(method)) request->method = method;
        else request->method = "-", request->bad_line = true;
        return head(request, version);
    case STEP_DECODE:
    case STEP_DISCARD:
        if (*upload_size > 0) {
            *upload_size = body_piece(request, upload, *upload_size);
            if (request->step == STEP_ANSWER) return MHD_NO;
            if (*upload_size > 0) { /* rule 5 */
                MHD_suspend_connection(request->mhd);
                MHD_resume_connection(request->mhd);
            }
            return MHD_YES;
        }
        return body_done(request);
    case STEP_WAIT:
        end_wait(request);
        if (request->gone) return MHD_NO;
        return answer_now(request, false);
    default: return MHD_YES;
    }
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *mhd, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **request_context)
{
    struct request *request = *request_context;
    (void)context;
    (void)mhd;
    if (request == NULL) return MHD_NO;
    request_set_role(ROLE_HTTP);
    heartbeat_busy(HEARTBEAT_HTTP);
    const enum MHD_Result result = advance(request, url, method, version, upload, upload_size);
    heartbeat_idle();
    return result;
}

static void complete(struct request *request, enum MHD_RequestTerminationCode how)
{
    request_set_role(ROLE_HTTP);
    struct connection *connection = request->connection;
    end_wait(request); /* the connection broke between being resumed and being answered */
    access_log_request(request, how);
    connection->request = NULL;
    connections_count_request(request->server->connections, -1);
    request_free(request);
    (void)connection_enter(connection, CONNECTION_IDLE); /* when it was cut, it is about to end anyway */
}

static void on_completed(void *context, struct MHD_Connection *mhd, void **request_context,
                         enum MHD_RequestTerminationCode how)
{
    struct http_thread *thread = context;
    struct request *request = *request_context;
    (void)mhd;
    if (request == NULL) return;
    *request_context = NULL;
    atomic_fetch_add_explicit(&thread->requests, 1, memory_order_relaxed);
    heartbeat_busy(HEARTBEAT_HTTP);
    complete(request, how);
    heartbeat_idle();
}

static void on_connection(void *context, struct MHD_Connection *mhd, void **socket_context,
                          enum MHD_ConnectionNotificationCode what)
{
    struct http_thread *thread = context;
    struct http_server *http = thread->http;
    struct server *server = http->server;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        own_answers_begin(thread);
        *socket_context = info ? connections_take(server->connections, info->connect_fd) : NULL;
    } else {
        struct connection *connection = *socket_context;
        /* libmicrohttpd closes without on_completed() where it refuses a body itself (1.0.1: a chunk's head longer than
         * its buffer), or refuses a head twice (0.9.75). The head's memory has then been freed. */
        if (connection && connection->request) {
            connection->request->method = connection->request->path = NULL;
            connection->request->mhd = NULL;
            own_answers_end(connection);
            complete(connection->request, MHD_REQUEST_TERMINATED_WITH_ERROR);
        }
        if (connection) {
            linger_on(&server->connections->linger, connection->fd,
                      atomic_load(&connection->phase) == CONNECTION_CUT ? LINGER_CUT
                      : connection->sending                             ? LINGER_DROP
                                                                        : LINGER_DELIVER);
            connections_remove(server->connections, connection);
        }
        *socket_context = NULL;
    }
}

static void on_log(void *context, const char *format, va_list args) __attribute__((format(printf, 2, 0)));
static void on_log(void *context, const char *format, va_list args)
{
    char text[256], clean[512];
    (void)context;
    vsnprintf(text, sizeof text, format, args);
    text[strcspn(text, "\n")] = '\0';
    log_event(LOG_DEBUG, NULL, "libmicrohttpd", "text=" LOG_Q, log_clean(clean, sizeof clean, text));
}

static void on_panic(void *context, const char *file, unsigned line, const char *reason)
{
    (void)context;
    fprintf(stderr, "attnd: libmicrohttpd gave up at %s:%u: %s", file ? file : "?", line, reason ? reason : "");
    abort();
}

/* ---- Open and close ---------------------------------------------------------------------------------------------- */

static char *read_pem(const char *option, const char *path, attn_error *err)
{
    char *text = NULL;
    FILE *file = fopen(path, "re");
    long size;
    if (file && fseek(file, 0, SEEK_END) == 0 && (size = ftell(file)) > 0 && size < HTTP_PEM_BYTES &&
        fseek(file, 0, SEEK_SET) == 0 && (text = calloc(1, (size_t)size + 1)) &&
        fread(text, 1, (size_t)size, file) != (size_t)size) {
        free(text);
        text = NULL;
    }
    if (text == NULL)
        attn_fail(err, ATTN_INVALID, NULL, "%s %s: %s", option, path,
                  file ? "not a readable PEM file" : strerror(errno));
    if (file) fclose(file);
    return text;
}

/* The daemons of the threads, with what they have in common. */
static bool start_threads(struct http_server *http, unsigned flags, const struct MHD_OptionItem *more)
{
    for (int i = 0; i < http->threads.count; i++) {
        struct http_thread *thread = &http->threads.list[i];
        thread->daemon = MHD_start_daemon(
            flags, 0, NULL, NULL, on_request, thread, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL,
            MHD_OPTION_NOTIFY_COMPLETED, on_completed, thread, MHD_OPTION_NOTIFY_CONNECTION, on_connection, thread,
            MHD_OPTION_URI_LOG_CALLBACK, on_uri, thread, MHD_OPTION_UNESCAPE_CALLBACK, on_unescape, NULL,
            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONNECTION_BYTES, MHD_OPTION_CONNECTION_LIMIT,
            (unsigned)NO_LIMIT, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)HTTP_INACTIVITY_S,
            MHD_OPTION_STRICT_FOR_CLIENT, 0, MHD_OPTION_ARRAY, more, MHD_OPTION_END);
        if (thread->daemon == NULL) return false;
    }
    return true;
}

/* Versions before TLS 1.2 must not be used any more (RFC 8996). */
static char tls_versions[] = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

attn_status http_server_open(struct http_server *http, struct server *server, unsigned kind, attn_error *err)
{
    const struct config *config = server->config;
    const bool tls = kind == PORT_MAIN && config->tls_cert;
    const int threads = kind == PORT_MAIN ? config->http_threads : 1;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_NO_LISTEN_SOCKET | MHD_USE_ITC | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem more[8];
    int count = 0;

    *http = (struct http_server){ .server = server, .kind = kind, .plain = !tls };
    http->most = kind == PORT_MAIN ? config->max_connections : CONFIG_METRICS_CONNECTIONS;
    if (!http_threads_init(&http->threads, http, threads, config->cores))
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "--http-threads: no memory for %d threads", threads);
    if (kind == PORT_MAIN) {
        flags |= MHD_ALLOW_SUSPEND_RESUME;
        access_log_begin();
    }
    if (tls) {
        flags |= MHD_USE_TLS;
        tls_memory_wait();
        http->cert = read_pem("--tls-cert", config->tls_cert, err);
        http->key = http->cert ? read_pem("--tls-key", config->tls_key, err) : NULL;
        if (http->key == NULL) {
            http_server_close(http);
            return ATTN_INVALID;
        }
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_MEM_CERT, 0, http->cert };
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_MEM_KEY, 0, http->key };
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_PRIORITIES, 0, tls_versions };
    }
    if (strcmp(MHD_get_version(), "1") < 0) /* the one that runs, not the one whose header this was compiled with */
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_CONNECTION_MEMORY_INCREMENT, HTTP_CONNECTION_STEP, NULL };
    more[count] = (struct MHD_OptionItem){ MHD_OPTION_END, 0, NULL };

    MHD_set_panic_func(on_panic, NULL);
    if (!start_threads(http, flags, more)) {
        const int error = errno;
        http_server_close(http);
        if (tls)
            return attn_fail(err, ATTN_INVALID, NULL, "--tls-cert %s, --tls-key %s: refused by GnuTLS",
                             config->tls_cert, config->tls_key);
        return attn_fail(err, ATTN_INTERNAL, NULL, "the web server could not be started with %d threads: %s", threads,
                         strerror(error));
    }
    return ATTN_OK;
}

void http_server_close(struct http_server *http)
{
    for (int i = 0; i < http->threads.count; i++)
        if (http->threads.list[i].daemon) MHD_stop_daemon(http->threads.list[i].daemon);
    http_threads_clear(&http->threads);
    free(http->cert);
    free(http->key);
    *http = (struct http_server){ 0 };
}

bool http_server_add(struct http_server *http, int fd, const struct sockaddr *address, socklen_t length)
{
    const bool near = http->server->devices && devices_near(http->server->devices);
    struct http_thread *thread = near ? http_threads_pick(&http->threads, fd)
                                      : http_threads_pick_on(&http->threads, -1);
    struct connection *connection = connections_add(http->server->connections, fd, http->plain, &thread->connections,
                                                    &http->open);
    if (connection == NULL) return false;
    (void)peer_text(address, connection->peer);
    first_bytes_expect(fd, !http->plain);
    if (MHD_add_connection(thread->daemon, fd, address, length) != MHD_YES) { /* it has closed the socket */
        connections_remove(http->server->connections, connection);
        metrics_add(METRIC_REJECTED, "connections", NULL, 1);
    }
    return true;
}

void http_server_balance(struct http_server *http, int64_t now_ms)
{
    if (devices_near(http->server->devices)) http_threads_balance(&http->threads, now_ms);
}

void http_server_unpin(struct http_server *http)
{
    http_threads_unpin(&http->threads);
}

void http_server_resume(struct request *request)
{
    struct MHD_Connection *mhd = request->mhd;
    request_move(request, REQUEST_ANSWERING);
    MHD_resume_connection(mhd); /* the request is the HTTP thread's from here on: touch nothing */
}
