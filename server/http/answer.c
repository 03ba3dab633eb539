/* answer.c: makes the answers that libmicrohttpd sends.
 *
 * A small answer is encoded at once, into the memory of the request's input tensors. This memory is no longer needed,
 * and is in the CPU's cache. A large answer is encoded block by block while it is sent. If the inputs are large, the
 * answer gets memory of its own, so that the inputs' memory is free earlier. The answer's length is known before its
 * first byte (Content-Length).
 *
 * If there is no memory for an answer, the client gets status 503. But if the request has already changed something,
 * such as a cache, the connection is closed without an answer. The client then knows that the change may have
 * happened. */
#include "server/http/answer.h"
#include "server/http/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/text.h"
#include "server/routes/kserve.h"
#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/device/devices.h"
#include "server/http/connections.h"
#include "server/routes/routes.h"
#include "server/work/contexts.h"
#include "server/work/server.h"
#include "server/work/transaction.h"

enum { PROBLEM_BYTES = 4096 };

/* ---- Headers of answers ------------------------------------------------------------------------------------------ */

size_t answer_server_timing(const struct request *request, char *text, size_t capacity)
{
    const struct request_times *times = &request->times;
    const struct job *job = request->job;
    const proto_result *result = job && job->call->count > 0 ? &job->results[0] : NULL;
    int64_t stage[PROTO_STAGE_COUNT] = { 0 };
    struct text t = text_in(text, capacity);
    stage[PROTO_STAGE_recv] = times->recv_ns;
    stage[PROTO_STAGE_decode] = times->decode_ns;
    stage[PROTO_STAGE_encode] = times->encode_ns;
    for (int s = PROTO_STAGE_queue; result && s <= PROTO_STAGE_copy_out; s++)
        stage[s] = (int64_t)(result->timing_us[s] * 1e3);
    for (int s = 0; s < PROTO_STAGE_COUNT; s++) {
        if (s > 0) text_put_string(&t, ", ");
        text_put_string(&t, proto_stages[s]);
        text_put_string(&t, ";dur=");
        text_put_ms(&t, stage[s]);
    }
    return t.failure == TEXT_FINE ? t.used : 0;
}

static void add(struct MHD_Response *response, const char *name, const char *value)
{
    (void)MHD_add_response_header(response, name,
                                  /* adding a header fails only when memory is short, and the answer is useful without
                                   * it */
                                  value);
}

static void add_common_headers(struct request *request, struct MHD_Response *response, int status,
                               const char *content_type, bool close)
{
    struct exchange *const exchange = exchange_of(request);
    const struct server *server = request->server;
    char text[PROTO_STAGE_COUNT * 64];
    if (content_type) add(response, "Content-Type", content_type);
    add(response, "X-Request-Id", request->id);
    if (answer_server_timing(request, text, sizeof text)) add(response, "Server-Timing", text);
    if (status == 503 || status == 429) {
        snprintf(text, sizeof text, "%d", queue_retry_after_s(&server->queue, devices_count(server->devices)));
        add(response, "Retry-After", text);
    }
    /* status 415 refuses the body's compression; Accept-Encoding lists the codings that are allowed (RFC 9110,
     * 15.5.16) */
    if (status == 415)
        add(response, "Accept-Encoding", request->route && request->route->keeps_body ? "identity" : UNPACK_CODINGS);
    if (status == 401) add(response, "WWW-Authenticate", "Bearer realm=\"attnd\"");
    if (request->route && status == 405) add(response, "Allow", route_allow(exchange->methods, text));
    if (server->config->cors_origin && strcmp(server->config->cors_origin, "*") != 0) add(response, "Vary", "Origin");
    if (exchange->cors) {
        add(response, "Access-Control-Allow-Origin", server->config->cors_origin);
        add(response, "Access-Control-Expose-Headers",
            "X-Request-Id, Retry-After, Server-Timing, Inference-Header-Content-Length");
        if (exchange->preflight && request->route) {
            add(response, "Access-Control-Allow-Methods", route_allow(exchange->methods, text));
            add(response, "Access-Control-Allow-Headers",
                "Content-Type, Content-Encoding, Authorization, X-Request-Id, X-Request-Timeout-Ms, traceparent, "
                "Inference-Header-Content-Length");
            add(response, "Access-Control-Max-Age", "86400");
        }
    }
    if (close) add(response, "Connection", "close");
}

/* ---- Bodies of answers ------------------------------------------------------------------------------------------- */

struct stream {
    proto_encoder *encoder;
    struct job *job; /* counted reference that keeps the job's tensors until they are sent */
    struct connection *connection;
};

static ssize_t on_read(void *context, uint64_t position, char *buffer, size_t capacity)
{
    struct stream *stream = context;
    heartbeat_busy(HEARTBEAT_HTTP);
    const size_t count = proto_encoder_read(stream->encoder, buffer, capacity);
    heartbeat_idle();
    connection_progress(stream->connection, position);
    return count > 0 ? (ssize_t)count : MHD_CONTENT_READER_END_OF_STREAM;
}

static void on_free(void *context)
{
    struct stream *stream = context;
    proto_encoder_free(stream->encoder);
    job_release(stream->job);
    free(stream);
}

static struct MHD_Response *problem_response(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    char text[PROBLEM_BYTES];
    const size_t length = proto_error_write(text, sizeof text, request->error, request->why.text, NULL,
                                            request->why.member, request->id);
    exchange->http_status = proto_errors[request->error].http;
    exchange->sent_bytes = length;
    return MHD_create_response_from_buffer(length, text, MHD_RESPMEM_MUST_COPY);
}

static bool encode_all(proto_encoder *encoder, char *to, size_t length)
{
    size_t at = 0;
    for (size_t part; at < length && (part = proto_encoder_read(encoder, to + at, length - at)) > 0;) at += part;
    return at == length;
}

static struct MHD_Response *small_response(struct request *request, proto_encoder *encoder, size_t length)
{
    struct job *const job = request->job;
    /* True if only this request has a reference to the job, so that the answer may overwrite the job's memory. */
    const bool ours = atomic_load(&job->references) == 1;
    if (ours && job->inputs && job->inputs->bytes < ANSWER_LARGE_INPUTS && length <= job->inputs_used) {
        /* libmicrohttpd must not free this memory (RESPMEM_PERSISTENT), because the job owns it */
        return encode_all(encoder, job->inputs->memory, length)
                   ? MHD_create_response_from_buffer(length, job->inputs->memory, MHD_RESPMEM_PERSISTENT)
                   : NULL;
    }
    char *text = malloc(length);
    struct MHD_Response *response = NULL;
    if (text && encode_all(encoder, text, length))
        response = MHD_create_response_from_buffer(length, text, MHD_RESPMEM_MUST_FREE);
    if (response == NULL) free(text);
    else if (ours) job_release_memory(job);
    /* An answer that exceeds the limit of staging memory (memory for tensors) is sent anyway: it exists already, and
     * has at most ANSWER_SMALL_BYTES. */
    if (response) (void)request_count_bytes(request, length, NULL);
    return response;
}

/* Makes the response with the result tensors. Returns NULL and sets request->failed if this fails. */
static struct MHD_Response *tensor_response(struct request *request, const char **content_type)
{
    struct exchange *const exchange = exchange_of(request);
    struct job *job = request->job;
    struct MHD_Response *response;
    proto_encoder *encoder = request->encoder;
    attn_error err = { 0 };
    const int64_t began = clock_ns();

    request->encoder = NULL;
    if (encoder == NULL && proto_encoder_new(job->call, job->results, request->id, &encoder, &err) != ATTN_OK) {
        request_fail_status(request, &err);
        return NULL;
    }
    const uint64_t length = proto_encoder_length(encoder), head = proto_encoder_head_bytes(encoder);
    size_t block = job->wants_measure ? ANSWER_ARRAY_BLOCK : ANSWER_STREAM_BLOCK;
    if (length <= ANSWER_SMALL_BYTES && !job->wants_measure) {
        response = small_response(request, encoder, (size_t)length);
        proto_encoder_free(encoder);
        request->times.encode_ns += clock_ns() - began;
    } else {
        /* If staging memory (memory for tensors) is short, the answer is sent in small blocks. They do not count
         * towards the limit of staging memory. */
        if (request_count_bytes(request, block, NULL) != ATTN_OK) block = ANSWER_ARRAY_BLOCK;
        struct stream *stream = malloc(sizeof *stream);
        if (stream) *stream = (struct stream){ encoder, job_hold(job), exchange->connection };
        else proto_encoder_free(encoder);
        response = stream ? MHD_create_response_from_callback(length, length < block ? (size_t)length : block, on_read,
                                                              stream, on_free)
                          : NULL;
        if (response == NULL && stream) on_free(stream);
        request->times.encode_ns += clock_ns() - began;
    }
    if (response == NULL) {
        request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for the answer");
        return NULL;
    }
    exchange->http_status = 200;
    exchange->sent_bytes = length;
    *content_type = proto_media(job->call->answer);
    if (request->model && head < length) { /* in the KServe protocol, the bytes of the tensors may follow the JSON */
        char text[TEXT_DIGITS + 1];
        snprintf(text, sizeof text, "%llu", (unsigned long long)head);
        add(response, "Inference-Header-Content-Length", text);
        *content_type = "application/octet-stream";
    }
    return response;
}

static struct MHD_Response *handler_response(struct request *request, const char **content_type)
{
    struct exchange *const exchange = exchange_of(request);
    struct answer answer = { 0 };
    struct MHD_Response *response;
    if (exchange->preflight) {
        exchange->http_status = 204;
        *content_type = NULL;
        return MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    }
    request->route->answer(request, &answer);
    if (request->failed) {
        if (!answer.constant) free(answer.body);
        return NULL;
    }
    exchange->done = request->route->method != ROUTE_GET && !request->route->only_reads;
    if (answer.body == NULL && answer.status != 204) {
        request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for the answer");
        return NULL;
    }
    response = MHD_create_response_from_buffer(answer.length, answer.body,
                                               answer.constant ? MHD_RESPMEM_PERSISTENT : MHD_RESPMEM_MUST_FREE);
    if (response == NULL) {
        if (!answer.constant) free(answer.body);
        request_fail(request, PROTO_E_OUT_OF_MEMORY, NULL, "no memory for the answer");
        return NULL;
    }
    if (*answer.location) add(response, "Location", answer.location);
    if (answer.csp) add(response, "Content-Security-Policy", answer.csp);
    *content_type = answer.content_type;
    exchange->http_status = answer.status;
    exchange->sent_bytes = strcmp(exchange->method, "HEAD") == 0 ? 0 : answer.length;
    return response;
}

enum MHD_Result answer_queue(struct request *request, bool close)
{
    struct MHD_Response *response = NULL;
    const char *content_type = NULL;
    if (!request->failed && request->job && !request->route->answer) {
        /* A filled context (saved forward) holds a reference to the job, which keeps the answer from overwriting the
         * job's memory. */
        contexts_fill_job(request->job);
        response = tensor_response(request, &content_type);
        contexts_finish_job(request->job, response != NULL);
    } else if (!request->failed) response = handler_response(request, &content_type);
    if (response == NULL && (exchange_of(request)->done || (request->job && transaction_is_committed(request->job)))) {
        log_event(LOG_WARN, request->id, "no_answer", "text=\"it was carried out, and there is no memory to say so\"");
        /* closes the connection without an answer: an error answer would tell the client that nothing has changed, and
         * the client would repeat the request */
        return MHD_NO;
    }
    if (response == NULL) {
        content_type = route_error_media(exchange_of(request)->path);
        response = problem_response(request);
    }
    if (response == NULL) return MHD_NO;
    add_common_headers(request, response, exchange_of(request)->http_status, content_type, close);
    request->times.answer_ns = clock_ns();
    kserve_count(request, exchange_of(request)->http_status, request->times.answer_ns - request->times.began_ns);
    const enum MHD_Result result = MHD_queue_response(exchange_of(request)->mhd,
                                                      (unsigned)exchange_of(request)->http_status, response);
    MHD_destroy_response(response);
    return result;
}

enum MHD_Result answer_now(struct request *request, bool close)
{
    if (request->failed && request->job) contexts_finish_job(request->job, false);
    if (request->state != REQUEST_ANSWERING) {
        exchange_drop_body(request);
        if (!connection_enter(exchange_of(request)->connection, CONNECTION_SEND)) return MHD_NO;
        request_move(request, REQUEST_ANSWERING);
    } else if (!connection_enter(exchange_of(request)->connection, CONNECTION_SEND)) return MHD_NO;
    exchange_of(request)->step = STEP_ANSWER;
    /* an error answer needs no tensors, so their memory is released for other requests */
    if (request->failed) {
        job_release(request->job);
        request->job = NULL;
    }
    return answer_queue(request, close || atomic_load(&request->server->phase) != SERVER_READY);
}
