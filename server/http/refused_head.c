/* refused_head.c: see refused_head.h. libmicrohttpd 0.9.75 to 1.0.1 use these words, but no interface promises them.
 * Therefore they are tried at the start, against the library that is installed. */
#include "server/http/refused_head.h"

#include <microhttpd.h>
#include <stdarg.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

bool refused_head_is_told(const char *format)
{
    static const char words[] = "Error processing request (HTTP response code is %u";
    return strncmp(format, words, sizeof words - 1) == 0;
}

/* ---- Self-test --------------------------------------------------------------------------------------------------- */

enum { TURNS = 8 }; /* of the daemon: to take the connection, to read, to refuse; a few more do no harm */

struct trial {
    struct MHD_Connection *mhd;
    bool told;
};

static void on_log(void *context, const char *format, va_list args) __attribute__((format(printf, 2, 0)));
static void on_log(void *context, const char *format, va_list args)
{
    struct trial *trial = context;
    va_list copy;
    if (!refused_head_is_told(format) || trial->mhd == NULL) return;
    va_copy(copy, args);
    trial->told = va_arg(copy, unsigned) == MHD_HTTP_BAD_REQUEST &&
                  MHD_get_connection_info(trial->mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE) != NULL &&
                  MHD_get_connection_info(trial->mhd, MHD_CONNECTION_INFO_HTTP_STATUS) == NULL;
    va_end(copy);
}

static void *on_uri(void *context, const char *uri, struct MHD_Connection *mhd)
{
    struct trial *trial = context;
    (void)uri;
    trial->mhd = mhd;
    return NULL;
}

/* This handler is never called, because the head is refused before. */
static enum MHD_Result on_request(void *context, struct MHD_Connection *mhd, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_size, void **request_context)
{
    (void)context;
    (void)mhd;
    (void)url;
    (void)method;
    (void)version;
    (void)upload;
    (void)upload_size;
    (void)request_context;
    return MHD_NO;
}

bool refused_head_self_test(void)
{
    static const char head[] = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n";
    struct trial trial = { 0 };
    struct sockaddr address = { .sa_family = AF_UNIX };
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) return false;
    struct MHD_Daemon *daemon = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_USE_ERROR_LOG, 0, NULL,
                                                 NULL, on_request, NULL, MHD_OPTION_EXTERNAL_LOGGER, on_log, &trial,
                                                 MHD_OPTION_URI_LOG_CALLBACK, on_uri, &trial, MHD_OPTION_END);
    if (daemon == NULL) close(fds[0]);
    else if (write(fds[1], head, sizeof head - 1) == (ssize_t)sizeof head - 1 &&
             MHD_add_connection(daemon, fds[0], &address, sizeof address) == MHD_YES) /* it closes fds[0], or has */
        for (int i = 0; i < TURNS && !trial.told; i++) (void)MHD_run(daemon);
    if (daemon) MHD_stop_daemon(daemon);
    close(fds[1]);
    return trial.told;
}
