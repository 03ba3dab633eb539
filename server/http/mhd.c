/* mhd.c: the functions that libmicrohttpd calls at each step of a request.
 *
 *   on_uri         the request line has arrived: makes the request
 *   on_request     STEP_HEAD      checks framing, route, limits, token and admission, before any byte of the body is
 *                                 kept
 *                  STEP_DECODE    feeds each piece of the body to the parser; a compressed piece is unpacked first, a
 *                                 limited amount per call
 *                  STEP_DISCARD   the request was refused: reads and drops the body, so the client reads the answer
 *                  (body ends)    checks the body. Answers at once if the request was refused, or was so small that
 *                                 this thread computed it. Otherwise suspends the connection, and the main thread
 *                                 gets the request
 *                  STEP_WAIT      the connection was resumed: answers
 *   on_completed   the client has the answer, or has left: writes the log line and metrics, frees everything */
#include "server/http/mhd.h"
#include "server/http/exchange.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "server/base/limits.h"
#include "server/http/access_log.h"
#include "server/http/answer.h"
#include "server/base/clock.h"
#include "server/device/devices.h"
#include "server/device/inline.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/metrics.h"
#include "server/base/unpack.h"
#include "server/http/body.h"
#include "server/http/head_rules.h"
#include "server/http/mhd_quirks.h"
#include "server/http/http_head.h"
#include "server/http/connections.h"
#include "server/http/own_answers.h"
#include "server/http/first_bytes.h"
#include "server/routes/routes.h"
#include "server/http/tls_memory.h"

/* ---- Reading a request's head ------------------------------------------------------------------------------------ */

static enum MHD_Result on_header(void *context, enum MHD_ValueKind kind, const char *key, size_t key_size,
                                 const char *value, size_t value_size)
{
    (void)kind;
    http_head_header(context, key, key_size, value, value_size);
    return MHD_YES;
}

/* Reads the request's id and trace ids, which every answer and log line contains. */
static void read_identity(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    if (http_head_is_request_id(f->value[HEADER_REQUEST_ID])) strcpy(request->id, f->value[HEADER_REQUEST_ID]);
    else request_make_id(request->id);
    http_head_traceparent(f->value[HEADER_TRACEPARENT], exchange->trace_id, exchange->span_id);
}

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

/* Sets the client's address; if a trusted proxy sent the request, this is the client behind the proxy. */
static void read_peer(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    const struct config *const config = request->server->config;
    const char *const *const networks = config->trusted_proxies;
    struct forwarded f = { .count = 0 };
    if (!peer_is_trusted(networks, config->trusted_proxy_count, exchange->peer)) return;
    (void)MHD_get_connection_values(exchange->mhd, MHD_HEADER_KIND, on_forwarded, &f);
    (void)peer_forwarded(networks, config->trusted_proxy_count, exchange->connection->peer, f.lines, f.count,
                         exchange->peer);
}

static enum MHD_Result head(struct request *request, const char *version)
{
    struct exchange *const exchange = exchange_of(request);
    struct http_head f;
    request->times.head_ns = clock_ns();
    http_head_begin(&f, version);
    if (exchange->bad_line) http_head_fault(&f, "the request line contains a character where it cannot stand");
    (void)MHD_get_connection_values_n(exchange->mhd, MHD_HEADER_KIND, on_header, &f);
    const bool sound = http_head_end(&f);
    read_identity(request, &f);
    read_peer(request);
    if (!sound) {
        request_fail(request, PROTO_E_INVALID_FRAMING, NULL, "%s", f.fault);
        /* the end of a request with bad framing is unknown, so its client may still be sending */
        exchange->connection->sending = true;
        return answer_now(request, true);
    }
    head_rules_origin(request, &f);
    head_rules_check(request, &f);
    if (request->route && request->route->bodies && !exchange->preflight) request_count_in(request);
    if (!request->failed && exchange->body) body_admit(request, &f);
    exchange->step = request->parser && !request->failed ? STEP_DECODE : STEP_DISCARD;
    if (request->failed) {
        exchange_drop_body(request);
        const bool over = f.has_length && f.length > (uint64_t)request->server->config->max_body_bytes;
        if (http_head_has_body(&f) && (over || f.value[HEADER_EXPECT])) {
            exchange->connection->sending = true;
            return answer_now(request, true);
        }
    }
    mhd_quirks_expectation(request, &f);
    if (http_head_has_body(&f) && !connection_enter(exchange->connection, CONNECTION_BODY)) return MHD_NO;
    return MHD_YES;
}

/* ---- libmicrohttpd's callbacks ----------------------------------------------------------------------------------- */

/* Ends the wait of a request whose connection the main thread has resumed. The connection may have broken after it was
 * resumed. */
static void end_wait(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    if (exchange->step != STEP_WAIT) return;
    exchange->step = STEP_ANSWER;
    struct server *const server = request->server;
    atomic_fetch_sub(&server->suspended, 1);
    if (!inline_near(server->devices)) http_threads_await(-1, &server->suspended);
}

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
    struct exchange *const exchange = exchange_new(http, mhd);
    if (exchange == NULL) return NULL;
    struct request *const request = &exchange->request;
    exchange->connection = connection;
    request->socket = connection->fd;
    memcpy(exchange->peer, connection->peer, sizeof exchange->peer);
    connection->request = request;
    connections_count_request(http->server->connections, 1);
    const size_t arguments = http_head_arguments(uri);
    exchange->bad_line = !http_head_is_target(uri);
    exchange->has_query = arguments > 0;
    if (arguments > HTTP_ARGUMENTS_MAX) { /* too many arguments make libmicrohttpd hang (quirk 8 of mhd_quirks.h) */
        exchange->http_status = 414;
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

static enum MHD_Result advance(struct request *request, const char *url, const char *method, const char *version,
                               const char *upload, size_t *upload_size)
{
    struct exchange *const exchange = exchange_of(request);
    switch (exchange->step) {
    case STEP_HEAD:
        exchange->path = http_head_path(url);
        atomic_store(&exchange->connection->error_media,
                     /* the path is now unescaped, so it may belong to another route with another content type for
                      * errors */
                     route_error_media(exchange->path));
        if (http_head_is_method(method)) exchange->method = method;
        else exchange->method = "-", exchange->bad_line = true;
        return head(request, version);
    case STEP_DECODE:
    case STEP_DISCARD:
        if (*upload_size > 0) {
            *upload_size = body_piece(request, upload, *upload_size);
            if (exchange->step == STEP_ANSWER) return MHD_NO;
            /* Some bytes of the body are left for the next call. Without the suspension, the connection would hang
             * (quirk 5 of mhd_quirks.h). */
            if (*upload_size > 0) {
                MHD_suspend_connection(exchange->mhd);
                MHD_resume_connection(exchange->mhd);
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
    struct connection *connection = exchange_of(request)->connection;
    end_wait(request); /* ends the wait here if the connection broke between its resumption and its answer */
    access_log_request(request, how);
    connection->request = NULL;
    connections_count_request(request->server->connections, -1);
    exchange_drop_body(request);
    request_free(request);
    /* false means that the connection was cut, and a cut connection ends anyway */
    (void)connection_enter(connection, CONNECTION_IDLE);
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
        /* libmicrohttpd does not report the end of some requests to on_completed(). In 1.0.1 this happens when a
         * chunk's head is longer than its buffer, in 0.9.75 at the second fault in a head. libmicrohttpd has freed the
         * memory of the request's head by now, so the pointers into it are set to NULL. */
        if (connection && connection->request) {
            exchange_of(connection->request)->method = exchange_of(connection->request)->path = NULL;
            exchange_of(connection->request)->mhd = NULL;
            own_answers_end(connection);
            complete(connection->request, MHD_REQUEST_TERMINATED_WITH_ERROR);
        }
        if (connection) {
            lingering_close_on(&server->connections->linger, connection->fd,
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

/* ---- Starting and stopping a web server -------------------------------------------------------------------------- */

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

static bool start_threads(struct http_server *http, unsigned flags, const struct MHD_OptionItem *more)
{
    for (int i = 0; i < http->threads.count; i++) {
        struct http_thread *thread = &http->threads.list[i];
        thread->daemon = MHD_start_daemon(
            flags, 0, NULL, NULL, on_request, thread, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL,
            MHD_OPTION_NOTIFY_COMPLETED, on_completed, thread, MHD_OPTION_NOTIFY_CONNECTION, on_connection, thread,
            MHD_OPTION_URI_LOG_CALLBACK, on_uri, thread, MHD_OPTION_UNESCAPE_CALLBACK, on_unescape, NULL,
            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HTTP_CONNECTION_BYTES, MHD_OPTION_CONNECTION_LIMIT,
            (unsigned)QUIRKS_NO_LIMIT, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)HTTP_INACTIVITY_S,
            MHD_OPTION_STRICT_FOR_CLIENT, 0, MHD_OPTION_ARRAY, more, MHD_OPTION_END);
        if (thread->daemon == NULL) return false;
    }
    return true;
}

/* TLS before 1.2 must not be used (RFC 8996) */
static char tls_versions[] = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

attn_status mhd_open(struct http_server *http, struct server *server, unsigned kind, attn_error *err)
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
            mhd_close(http);
            return ATTN_INVALID;
        }
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_MEM_CERT, 0, http->cert };
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_MEM_KEY, 0, http->key };
        more[count++] = (struct MHD_OptionItem){ MHD_OPTION_HTTPS_PRIORITIES, 0, tls_versions };
    }
    count += mhd_quirks_options(&more[count]);
    more[count] = (struct MHD_OptionItem){ MHD_OPTION_END, 0, NULL };

    if (mhd_quirks_self_test(err) != ATTN_OK) {
        mhd_close(http);
        return ATTN_INTERNAL;
    }
    MHD_set_panic_func(on_panic, NULL);
    if (!start_threads(http, flags, more)) {
        const int error = errno;
        mhd_close(http);
        if (tls)
            return attn_fail(err, ATTN_INVALID, NULL, "--tls-cert %s, --tls-key %s: refused by GnuTLS",
                             config->tls_cert, config->tls_key);
        return attn_fail(err, ATTN_INTERNAL, NULL, "the web server could not be started with %d threads: %s", threads,
                         strerror(error));
    }
    return ATTN_OK;
}

void mhd_close(struct http_server *http)
{
    for (int i = 0; i < http->threads.count; i++)
        if (http->threads.list[i].daemon) MHD_stop_daemon(http->threads.list[i].daemon);
    http_threads_clear(&http->threads);
    free(http->cert);
    free(http->key);
    *http = (struct http_server){ 0 };
}

bool mhd_add(struct http_server *http, int fd, const struct sockaddr *address, socklen_t length)
{
    const bool near = http->server->devices && inline_near(http->server->devices);
    struct http_thread *thread = near ? http_threads_pick(&http->threads, fd)
                                      : http_threads_pick_on(&http->threads, -1);
    struct connection *connection = connections_add(http->server->connections, fd, http->plain, &thread->connections,
                                                    &http->open);
    if (connection == NULL) return false;
    (void)peer_text(address, connection->peer);
    first_bytes_expect(fd, !http->plain);
    /* libmicrohttpd has closed the socket if this fails */
    if (MHD_add_connection(thread->daemon, fd, address, length) != MHD_YES) {
        connections_remove(http->server->connections, connection);
        metrics_add(METRIC_REJECTED, "connections", NULL, 1);
    }
    return true;
}

void mhd_balance(struct http_server *http, int64_t now_ms)
{
    if (inline_near(http->server->devices)) http_threads_balance(&http->threads, now_ms);
}

void mhd_unpin(struct http_server *http)
{
    http_threads_unpin(&http->threads);
}

void mhd_resume(struct request *request)
{
    struct MHD_Connection *mhd = exchange_of(request)->mhd;
    request_move(request, REQUEST_ANSWERING);
    MHD_resume_connection(
        /* from here on the HTTP thread owns the request */
        mhd);
}
