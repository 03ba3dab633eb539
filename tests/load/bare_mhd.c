/* bare_mhd.c: a server that does the least that libmicrohttpd can do: it receives requests and discards them. `make
 * upload` and `make compare` compare attnd with this program.
 *
 *   bare_mhd PORT [POOL_BYTES [ANSWER_BYTES [THREADS]]]      serves 127.0.0.1:PORT until SIGTERM; answers 200 with a
 *                                                            count of the bytes, or with ANSWER_BYTES of constant
 *                                                            text
 *
 * POOL_BYTES is libmicrohttpd's memory per connection. THREADS is its number of epoll threads, 1 by default. */
#include <arpa/inet.h>
#include <microhttpd.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *constant; /* the body of every answer, if ANSWER_BYTES is given */
static size_t constant_bytes;

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *url, const char *method,
                                  const char *version, const char *data, size_t *size, void **state)
{
    (void)context, (void)url, (void)method, (void)version, (void)data;
    if (*state == NULL) return (*state = calloc(1, sizeof(size_t))) != NULL ? MHD_YES : MHD_NO;
    size_t *received = *state;
    if (*size != 0) {
        *received += *size;
        *size = 0;
        return MHD_YES;
    }
    char text[64];
    snprintf(text, sizeof text, "{\"received\":%zu}", *received);
    struct MHD_Response *response = constant != NULL
                                        ? MHD_create_response_from_buffer(constant_bytes, constant,
                                                                          MHD_RESPMEM_PERSISTENT)
                                        : MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_COPY);
    if (response == NULL) return MHD_NO;
    const enum MHD_Result result = MHD_queue_response(connection, 200, response);
    MHD_destroy_response(response);
    return result;
}

static void on_completed(void *context, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode why)
{
    (void)context, (void)connection, (void)why;
    free(*state);
    *state = NULL;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bare_mhd PORT [POOL_BYTES [ANSWER_BYTES [THREADS]]]\n");
        return 64;
    }
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigaddset(&stop, SIGINT);
    sigprocmask(SIG_BLOCK, &stop, NULL);

    if (argc > 3) {
        constant_bytes = strtoul(argv[3], NULL, 10);
        if ((constant = malloc(constant_bytes + 1)) == NULL) return 71;
        memset(constant, 'A', constant_bytes);
    }
    const size_t pool = argc > 2 ? strtoul(argv[2], NULL, 10) : 32 * 1024;
    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)atoi(argv[1])),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    const unsigned threads = argc > 4 ? (unsigned)atoi(argv[4]) : 1;
    struct MHD_OptionItem many = { threads > 1 ? MHD_OPTION_THREAD_POOL_SIZE : MHD_OPTION_END, (intptr_t)threads,
                                   NULL };
    struct MHD_OptionItem more[] = { many, { MHD_OPTION_END, 0, NULL } };
    struct MHD_Daemon *daemon = MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, on_request, NULL,
                                                 MHD_OPTION_SOCK_ADDR, &address, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                                                 pool, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL,
                                                 MHD_OPTION_ARRAY, more, MHD_OPTION_END);
    if (daemon == NULL) {
        fprintf(stderr, "bare_mhd: cannot listen on port %s\n", argv[1]);
        return 69;
    }
    int got;
    sigwait(&stop, &got);
    MHD_stop_daemon(daemon);
    return 0;
}
