/* access_log.c: writes log lines and updates metrics when requests have ended; see access_log.h. */
#include "server/http/access_log.h"
#include "server/http/exchange.h"

#include <assert.h>
#include <string.h>

#include "text/text.h"
#include "server/routes/kserve.h"
#include "server/routes/route.h"
#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/http/connections.h"
#include "server/routes/routes.h"

/* True for errors that alerts watch: those with which the server may refuse a correct request, for example because it
 * is busy. */
static bool is_watched(proto_error error)
{
    switch (error) {
    case PROTO_E_UNAUTHORIZED:
    case PROTO_E_TOO_LARGE:
    case PROTO_E_QUOTA:
    case PROTO_E_UNAVAILABLE:
    case PROTO_E_QUEUE_FULL:
    case PROTO_E_OUT_OF_MEMORY:
    case PROTO_E_DRAINING:
    case PROTO_E_STORAGE_FULL: return true;
    default: return false;
    }
}

static proto_error refusal_of(const struct request *request, int status)
{
    if (status < 400 || status == 499) return PROTO_ERROR_COUNT;
    if (request->failed) return request->error;
    /* If no request has failed, a status 400 comes from libmicrohttpd. Such a status means invalid framing, and never
     * INVALID_REQUEST. */
    for (int error = 0; error < PROTO_ERROR_COUNT; error++)
        if (status < 500 && proto_errors[error].http == status && error != PROTO_E_INVALID_REQUEST)
            return (proto_error)error;
    return PROTO_ERROR_COUNT;
}

enum {
    /* in a URL's path, a run of more hexadecimal digits than this may be a secret id, so the log shortens it */
    SECRET_DIGITS = 16,
    /* Number of hexadecimal digits that the log shows of a secret id. The other 28 digits of a cache's id stay
     * secret. */
    SHOWN_DIGITS = 12,
    PATH_BYTES = LOG_CLEAN_INPUT_BYTES + SECRET_DIGITS + 2,
};

/* Copies the path for the log and shortens every run of digits that may be the secret id of a cache. */
static const char *without_secrets(char buffer[PATH_BYTES], const char *path)
{
    struct text t = text_in(buffer, PATH_BYTES);
    while (*path && t.used <= LOG_CLEAN_INPUT_BYTES) {
        size_t run = 0;
        while (text_hex_digit((unsigned char)path[run]) >= 0) run++;
        if (run == 0) run = 1;
        text_put(&t, path, run > SECRET_DIGITS ? SHOWN_DIGITS : run);
        if (run > SECRET_DIGITS) text_put_string(&t, "...");
        path += run;
    }
    return buffer;
}

/* Largest sizes in bytes of parts of a log line: path, token and pointer (escaped, with their NUL), and all other words
 * together. */
enum { PATH_MOST = LOG_CLEAN_BYTES, TOKEN_MOST = 90, POINTER_MOST = 100, OTHERS_MOST = 270 };
static_assert(PATH_MOST + TOKEN_MOST + POINTER_MOST + PEER_BYTES + OTHERS_MOST <= LOG_PAIRS_BYTES, "no line is cut");

/* Appends ` name="value"` with the value escaped and cut to `most` bytes. */
static void put_quoted(struct text *t, const char *name, const char *value, size_t most)
{
    char clean[LOG_CLEAN_BYTES];
    text_put_char(t, ' ');
    text_put_string(t, name);
    text_put_string(t, "=\"");
    text_put_string(t, log_clean(clean, most, value));
    text_put_char(t, '"');
}

/* Writes a line such as this one: method=POST path="/v1/attention/forward" status=400 ms=1.234 bytes_in=131248
 * bytes_out=45381 peer=10.0.0.1 token="team-a" code=invalid-request pointer="/k/shape/2" */
static void log_request(const struct request *request, enum log_level level, int status, int64_t ns)
{
    struct exchange *const exchange = exchange_of(request);
    enum { METHOD_BYTES = 16 };
    char pairs[LOG_PAIRS_BYTES], shown[PATH_BYTES];
    struct text t = text_in(pairs, sizeof pairs);
    const char *method = exchange->method ? exchange->method : "-";
    text_put_string(&t, "method=");
    text_put(&t, method, strnlen(method, METHOD_BYTES));
    put_quoted(&t, "path", without_secrets(shown, exchange->path ? exchange->path : "-"), PATH_MOST);
    text_put_string(&t, " status=");
    text_put_three(&t, (unsigned)status);
    text_put_string(&t, " ms=");
    text_put_ms(&t, ns);
    text_put_string(&t, " bytes_in=");
    text_put_number(&t, exchange->received_bytes);
    text_put_string(&t, " bytes_out=");
    text_put_number(&t, exchange->sent_bytes);
    text_put_string(&t, " peer=");
    text_put_string(&t, exchange->peer);
    if (request->caller && request->caller->flow) put_quoted(&t, "token", request->caller->flow->name, TOKEN_MOST);
    if (request->job && job_is_cut(request->job)) {
        text_put_string(&t, " parts=");
        text_put_number(&t, (uint64_t)job_parts(request->job));
    }
    if (exchange->trace_id[0]) {
        text_put_string(&t, " trace_id=");
        text_put_string(&t, exchange->trace_id);
        text_put_string(&t, " span_id=");
        text_put_string(&t, exchange->span_id);
    }
    const proto_error refusal = request->failed ? request->error : refusal_of(request, status);
    if (refusal != PROTO_ERROR_COUNT) {
        text_put_string(&t, " code=");
        text_put_string(&t, proto_errors[refusal].code);
    }
    if (request->failed && request->why.member[0])
        put_quoted(&t, "pointer", without_secrets(shown, request->why.member), POINTER_MOST);
    assert(t.failure == TEXT_FINE);
    log_pairs(level, request->id[0] ? request->id : NULL, "request", pairs);
}

void access_log_request(struct request *request, enum MHD_RequestTerminationCode how)
{
    struct exchange *const exchange = exchange_of(request);
    const struct request_times *t = &request->times;
    const int64_t now = clock_ns();
    const char *endpoint = request->route ? request->route->endpoint : "none";
    const double seconds = (double)(now - t->began_ns) / 1e9;
    int status = exchange->http_status;
    char label[4];
    struct text status_text = text_in(label, sizeof label);

    if (request->gone || status == 0 ||
        (how != MHD_REQUEST_TERMINATED_COMPLETED_OK && request->state == REQUEST_ANSWERING)) {
        const bool cut = atomic_load(&exchange->connection->phase) == CONNECTION_CUT;
        if (!request->gone && request->state == REQUEST_RECEIVING)
            status = status != 0 ? status : cut ? 408 : how == MHD_REQUEST_TERMINATED_COMPLETED_OK ? 400 : 499;
        else status = 499;
        /* Counts a client that closed its connection before it had the answer. The main thread counts clients of
         * waiting requests (request->gone). */
        if (!request->gone && status != 400 && t->head_ns != 0)
            metrics_add(METRIC_CANCELLED, request_state_label(request->state), NULL, 1);
    }
    /* no answer was queued, so KServe's statistics do not count the request yet */
    if (t->answer_ns == 0) kserve_count(request, status, now - t->began_ns);
    const proto_error refusal = refusal_of(request, status);
    if (refusal != PROTO_ERROR_COUNT) metrics_add(METRIC_REJECTED, proto_errors[refusal].code, NULL, 1);
    text_put_three(&status_text, (unsigned)status);
    metrics_add(METRIC_REQUESTS, endpoint, label, 1);
    metrics_observe(METRIC_REQUEST_SECONDS, endpoint, seconds);
    if (status < 400 || status == 499) metrics_add(METRIC_BODY_BYTES_OUT, NULL, NULL, (double)exchange->sent_bytes);
    if (t->decode_ns > 0 && t->received_ns > 0) {
        metrics_observe(METRIC_STAGE_SECONDS, "recv", (double)t->recv_ns / 1e9);
        metrics_observe(METRIC_STAGE_SECONDS, "decode", (double)t->decode_ns / 1e9);
    }
    if (t->encode_ns > 0) metrics_observe(METRIC_STAGE_SECONDS, "encode", (double)t->encode_ns / 1e9);

    const enum log_level level = request->route && request->route->quiet ? LOG_DEBUG : LOG_INFO;
    if (log_enabled(level)) log_request(request, level, status, now - t->began_ns);
}

void access_log_begin(void)
{
    int count;
    const struct route *routes = routes_all(&count);
    for (int error = 0; error < PROTO_ERROR_COUNT; error++)
        if (is_watched((proto_error)error)) metrics_add(METRIC_REJECTED, proto_errors[error].code, NULL, 0);
    metrics_add(METRIC_REJECTED, "connections", NULL, 0);
    for (int i = 0; i < count; i++) {
        if (routes[i].bodies == NULL) continue;
        metrics_add(METRIC_REQUESTS, routes[i].endpoint, "500", 0);
        metrics_add(METRIC_REQUESTS, routes[i].endpoint, "504", 0);
    }
}
