/* own_answers.c: replaces libmicrohttpd's own answers; see own_answers.h. Functions of libgnutls, which is not linked
 * here, are looked up at run time. */
#include "server/http/own_answers.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/http/access_log.h"
#include "server/http/connections.h"
#include "server/http/first_bytes.h"
#include "server/http/http_head.h"
#include "server/http/http_threads.h"
#include "server/http/mhd.h"
#include "server/http/refusal.h"
#include "server/http/exchange.h"

/* the HTTP thread that is running; NULL: this thread serves no connections */
static _Thread_local struct http_thread *this_thread;

void own_answers_begin(struct http_thread *thread)
{
    this_thread = thread;
    request_set_role(ROLE_HTTP);
}

/* The statuses with which libmicrohttpd itself refuses requests, and the error that attnd sends instead of each.
 * libmicrohttpd's answer 505 is not in the table and is sent unchanged. */
enum { MALFORMED = 0 };
static const struct {
    int status;
    proto_error error;
    const char *detail;
} refusals[] = {
    [MALFORMED] = { 400, PROTO_E_INVALID_FRAMING, NULL },
    { 301, PROTO_E_INVALID_FRAMING, "the request line contains a character where it cannot stand" },
    { 413, PROTO_E_TOO_LARGE, NULL },
    { 414, PROTO_E_TARGET_TOO_LONG, NULL },
    { 431, PROTO_E_HEAD_TOO_LARGE, NULL },
    /* libmicrohttpd answers 413 if the head of a chunk is too long. If this answer does not fit into the connection's
     * memory, libmicrohttpd answers 500 instead. */
    { 500, PROTO_E_TOO_LARGE, "the head of a chunk does not fit into the memory of a connection" },
    { 501, PROTO_E_NOT_IMPLEMENTED, NULL },
};

/* Returns the status of the HTTP answer that begins with these bytes; 0: no answer, or this thread serves no
 * connections. */
static int status_of(const char *head, size_t bytes)
{
    enum { STATUS_AT = 9, STATUS_ENDS = 12 };
    int status = 0;
    if (this_thread == NULL || bytes < STATUS_ENDS || memcmp(head, "HTTP/1.", 7) != 0) return 0;
    for (int i = STATUS_AT; i < STATUS_ENDS; i++) status = 10 * status + (head[i] - '0');
    return status;
}

/* Returns the row of refusals[] for the answer that begins with these bytes; -1: none. */
static int refusal_of(const char *head, size_t bytes)
{
    const int status = status_of(head, bytes);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++)
        if (refusals[i].status == status) return (int)i;
    return -1;
}

static enum MHD_Result on_header(void *context, enum MHD_ValueKind kind, const char *key, size_t key_size,
                                 const char *value, size_t value_size)
{
    (void)kind;
    http_head_header(context, key, key_size, value, value_size);
    return MHD_YES;
}

static bool find_fault(const struct request *request, struct http_head *head)
{
    struct exchange *const exchange = exchange_of(request);
    http_head_begin(head, "HTTP/1.1");
    if (exchange->mhd == NULL || exchange->step != STEP_HEAD) return false;
    (void)MHD_get_connection_values_n(exchange->mhd, MHD_HEADER_KIND, on_header, head);
    return (head->fault[0] || head->value[HEADER_HOST]) && !http_head_end(head);
}

/* Makes a request for a message without a readable request line, so that it is logged and counted. */
static struct request *begin_lost_request(struct connection *connection)
{
    struct exchange *const exchange = exchange_new(this_thread->http, NULL);
    if (exchange == NULL) return NULL;
    struct request *const request = &exchange->request;
    exchange->connection = connection;
    memcpy(exchange->peer, connection->peer, sizeof exchange->peer);
    return request;
}

static size_t refuse(struct request *request, int row, char refusal[REFUSAL_BYTES])
{
    struct exchange *const exchange = exchange_of(request);
    struct http_head head;
    const char *detail = refusals[row].detail ? refusals[row].detail : proto_errors[refusals[row].error].title;
    if (row == MALFORMED && find_fault(request, &head)) detail = head.fault;
    request_fail(request, refusals[row].error, NULL, "%s", detail);
    exchange->http_status = proto_errors[refusals[row].error].http;
    if (request->id[0] == '\0') request_make_id(request->id);
    return refusal_text(refusal, refusals[row].error, detail, request->id,
                        atomic_load(&exchange->connection->error_media));
}

/* If the bytes begin an answer that libmicrohttpd made, writes the answer that replaces it to `refusal` and returns its
 * length. Returns 0 if the bytes are to be sent unchanged: attnd made the answer, or no row of refusals[] has its
 * status. */
static size_t replace(int fd, const char *begin, size_t bytes, char refusal[REFUSAL_BYTES])
{
    const int row = refusal_of(begin, bytes);
    if (row < 0) return 0;
    struct connection *const connection = connections_find(this_thread->http->server->connections, fd);
    if (connection == NULL || (connection->request && exchange_of(connection->request)->step == STEP_ANSWER)) return 0;
    connection->sending = true;
    if (connection->request) return refuse(connection->request, row, refusal);
    struct request *const lost = begin_lost_request(connection);
    if (lost == NULL) return refusal_text(refusal, refusals[row].error, refusals[row].detail, NULL, NULL);
    const size_t length = refuse(lost, row, refusal);
    access_log_request(lost, MHD_REQUEST_TERMINATED_WITH_ERROR);
    exchange_drop_body(lost);
    request_free(lost);
    return length;
}

typedef ssize_t record_send(void *session, const void *bytes, size_t count);
record_send gnutls_record_send;

/* Calls libgnutls's gnutls_record_send(), which the function of the same name in this file hides. */
static ssize_t send_record(void *session, const void *bytes, size_t count)
{
    static _Thread_local void *real;
    if (real == NULL) real = dlsym(RTLD_NEXT, "gnutls_record_send");
    return (*(record_send **)&real)(session, bytes, count);
}

void own_answers_refuse(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    char refusal[REFUSAL_BYTES];
    const union MHD_ConnectionInfo *const tls = MHD_get_connection_info(exchange->mhd,
                                                                        MHD_CONNECTION_INFO_GNUTLS_SESSION);
    const size_t length = refusal_text(refusal, request->error, request->why.text, request->id,
                                       atomic_load(&exchange->connection->error_media));
    exchange->http_status = proto_errors[request->error].http;
    exchange->connection->sending = true;
    exchange->step = STEP_ANSWER;
    if (tls && tls->tls_session) (void)send_record(tls->tls_session, refusal, length);
    else (void)!sendto(exchange->connection->fd, refusal, length, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
}

void own_answers_end(struct connection *connection)
{
    char refusal[REFUSAL_BYTES];
    struct request *const request = connection->request;
    struct pollfd left = { .fd = connection->fd, .events = POLLRDHUP };
    if (request == NULL || exchange_of(request)->step == STEP_WAIT || exchange_of(request)->step == STEP_ANSWER ||
        !connection->plain || connection->sending || atomic_load(&connection->phase) == CONNECTION_CUT ||
        poll(&left, 1, 0) != 0)
        return;
    connection->sending = true;
    const size_t length = refuse(request, MALFORMED, refusal);
    (void)!sendto(connection->fd, refusal, length, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
}

/* ---- Functions that replace functions of the same name in the libraries ------------------------------------------ */

/* Sends the refusal. Tells libmicrohttpd that the client has left, so that libmicrohttpd closes the connection. */
static ssize_t refused(int fd, const char *refusal, size_t length)
{
    (void)!sendto(fd, refusal, length, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
    errno = EPIPE;
    return -1;
}

ssize_t send(int fd, const void *bytes, size_t count, int flags)
{
    char refusal[REFUSAL_BYTES];
    const size_t length = replace(fd, bytes, count, refusal);
    return length > 0 ? refused(fd, refusal, length) : sendto(fd, bytes, count, flags, NULL, 0);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    char refusal[REFUSAL_BYTES];
    const struct iovec *const first = message->msg_iov;
    const size_t length = message->msg_iovlen > 0 ? replace(fd, first->iov_base, first->iov_len, refusal) : 0;
    return length > 0 ? refused(fd, refusal, length) : (ssize_t)syscall(SYS_sendmsg, fd, message, flags);
}

ssize_t gnutls_record_send(void *session, const void *bytes, size_t count)
{
    enum { GNUTLS_E_PUSH_ERROR = -53 };
    /* function of libgnutls that returns a session's socket: int fd_of(void *session) */
    static _Thread_local void *fd_of;
    char refusal[REFUSAL_BYTES];
    if (fd_of == NULL) fd_of = dlsym(RTLD_NEXT, "gnutls_transport_get_int");
    if (status_of(bytes, count) == MHD_HTTP_HTTP_VERSION_NOT_SUPPORTED) first_bytes_tell_in_tls();
    if (fd_of == NULL || refusal_of(bytes, count) < 0) return send_record(session, bytes, count);
    const size_t length = replace((*(int (**)(void *)) & fd_of)(session), bytes, count, refusal);
    if (length == 0) return send_record(session, bytes, count);
    (void)send_record(session, refusal, length);
    return GNUTLS_E_PUSH_ERROR;
}
