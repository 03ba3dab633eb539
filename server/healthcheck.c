/* healthcheck.c: sends one request to a running attnd with non-blocking sockets, prints one line and returns an exit
 * status. The command ends at most HEALTHCHECK_TIMEOUT_MS after its start, whatever the server does. Only a complete
 * status line "HTTP/1.x 2dd" counts as healthy: a daemon whose threads hang still accepts connections. This client does
 * not speak TLS. It sends a ClientHello, and any TLS record as answer counts as healthy, because a thread of the daemon
 * has read it. */
#include "server/healthcheck.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "text/text.h"
#include "server/base/limits.h"

enum { EXIT_HEALTHY = 0, EXIT_UNHEALTHY = 1, EXIT_BAD_ARGUMENT = 64 };

static const char default_address[] = "127.0.0.1:8080";
static const char default_path[] = "/readyz";

static const char usage[] =
    "Usage: attnd healthcheck [URL]\n\n"
    "Asks a running attnd whether it takes work; exit status 0 if it does, 1 if not.\n"
    "URL is http://127.0.0.1:8080/readyz, an address as --listen takes it (127.0.0.1:8080,\n"
    "unix:/run/attnd.sock) or nothing: the first address of ATTND_LISTEN, else 127.0.0.1:8080.\n"
    "The path is /readyz unless given; /livez asks whether the process works at all.\n";

struct target {
    bool tls, is_unix;
    char host[256]; /* name of a host, or path of a unix socket */
    char port[8];
    char path[512];
};

/* ---- The address to which the request is sent -------------------------------------------------------------------- */

/* Returns the loopback address for a wildcard address (0.0.0.0, [::]), to which clients cannot connect. */
static const char *askable(const char *host)
{
    if (strcmp(host, "0.0.0.0") == 0) return "127.0.0.1";
    if (strcmp(host, "::") == 0) return "::1";
    return host;
}

/* Parses http://HOST[:PORT][/PATH], https://..., HOST:PORT[/PATH] or unix:PATH; false: another form. */
static bool parse_target(const char *text, struct target *t)
{
    memset(t, 0, sizeof *t);
    snprintf(t->path, sizeof t->path, "%s", default_path);
    if (strncmp(text, "unix:", 5) == 0) {
        t->is_unix = true;
        return strlen(text + 5) > 0 &&
               (size_t)snprintf(t->host, sizeof t->host, "%s", text + 5) < sizeof(((struct sockaddr_un *)0)->sun_path);
    }
    const bool scheme = strstr(text, "://") != NULL;
    if (strncmp(text, "http://", 7) == 0) text += 7;
    else if (strncmp(text, "https://", 8) == 0) text += 8, t->tls = true;
    else if (scheme) return false;

    const size_t length = strcspn(text, "/?#");
    if (text[length] == '/' && text[length + 1] != '\0') {
        if ((size_t)snprintf(t->path, sizeof t->path, "%s", text + length) >= sizeof t->path) return false;
        /* a request line must not contain white space or control characters */
        for (const char *c = t->path; *c; c++)
            if ((unsigned char)*c <= 0x20 || *c == 0x7f) return false;
    } else if (text[length] != '\0' && text[length] != '/') return false;

    /* room for HOST, HOST:PORT, [IPV6] or [IPV6]:PORT */
    char authority[300];
    if (length == 0 || length >= sizeof authority) return false;
    memcpy(authority, text, length);
    authority[length] = '\0';
    char *host = authority, *port = NULL;
    if (*host == '[') {
        char *end = strchr(++host, ']');
        if (end == NULL || (end[1] != '\0' && end[1] != ':')) return false;
        if (end[1] == ':') port = end + 2;
        *end = '\0';
    } else if ((port = strrchr(host, ':')) != NULL) *port++ = '\0';
    /* refused: a single word without scheme and port is probably a mistake */
    if (port == NULL && !scheme) return false;
    if (port == NULL) port = t->tls ? "443" : "80";
    uint64_t number;
    if (strlen(port) > 5 || !text_is_number(port, 65535, &number) || *host == '\0') return false;
    if ((size_t)snprintf(t->host, sizeof t->host, "%s", askable(host)) >= sizeof t->host) return false;
    snprintf(t->port, sizeof t->port, "%s", port);
    return true;
}

static void describe(const struct target *t, char *text, size_t capacity)
{
    if (t->is_unix) snprintf(text, capacity, "unix:%s %s", t->host, t->path);
    else
        snprintf(text, capacity, strchr(t->host, ':') ? "%s://[%s]:%s%s" : "%s://%s:%s%s", t->tls ? "https" : "http",
                 t->host, t->port, t->path);
}

/* ---- The connection, which must answer before the deadline ------------------------------------------------------- */

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits until the socket is ready for `events`. False at the deadline or after an error, with errno set. */
static bool await(int fd, short events, int64_t deadline_ms)
{
    for (;;) {
        const int64_t left = deadline_ms - now_ms();
        struct pollfd p = { .fd = fd, .events = events };
        const int n = left > 0 ? poll(&p, 1, (int)left) : 0;
        if (n > 0) return true;
        if (n == 0) errno = ETIMEDOUT;
        if (n == 0 || errno != EINTR) return false;
    }
}

static int connect_to(int family, const struct sockaddr *address, socklen_t length, int64_t deadline_ms)
{
    const int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    int error = 0;
    socklen_t size = sizeof error;
    if (connect(fd, address, length) == 0) return fd;
    if (errno == EINPROGRESS && await(fd, POLLOUT, deadline_ms) &&
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0) {
        if (error == 0) return fd;
        errno = error;
    }
    error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Returns a socket connected to one of the addresses of the target's name, or -1 with the reason in *why. */
static int open_target(const struct target *t, int64_t deadline_ms, const char **why)
{
    int fd = -1;
    if (t->is_unix) {
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        memcpy(address.sun_path, t->host, strnlen(t->host, sizeof address.sun_path - 1));
        fd = connect_to(AF_UNIX, (struct sockaddr *)&address, sizeof address, deadline_ms);
    } else {
        struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found = NULL;
        const int failed = getaddrinfo(t->host, t->port, &hints, &found);
        if (failed) {
            *why = gai_strerror(failed);
            return -1;
        }
        for (struct addrinfo *a = found; a != NULL && fd < 0; a = a->ai_next)
            fd = connect_to(a->ai_family, a->ai_addr, a->ai_addrlen, deadline_ms);
        const int error = errno;
        freeaddrinfo(found);
        errno = error;
    }
    if (fd < 0) *why = strerror(errno);
    return fd;
}

static bool send_all(int fd, const void *bytes, size_t count, int64_t deadline_ms)
{
    for (size_t sent = 0; sent < count;) {
        const ssize_t n = send(fd, (const char *)bytes + sent, count - sent, MSG_NOSIGNAL);
        if (n > 0) sent += (size_t)n;
        else if (errno == EAGAIN ? !await(fd, POLLOUT, deadline_ms) : errno != EINTR) return false;
    }
    return true;
}

/* Reads from the socket until the buffer has `enough` bytes or a line feed, or until the data ends. */
static ssize_t read_line(int fd, char *buffer, size_t enough, int64_t deadline_ms)
{
    size_t used = 0;
    while (used < enough && memchr(buffer, '\n', used) == NULL) {
        const ssize_t n = recv(fd, buffer + used, enough - used, 0);
        if (n == 0) break;
        if (n > 0) used += (size_t)n;
        else if (errno == EAGAIN ? !await(fd, POLLIN, deadline_ms) : errno != EINTR) return -1;
    }
    return (ssize_t)used;
}

/* ---- The two kinds of requests: HTTP and TLS --------------------------------------------------------------------- */

static int ask_http(int fd, const struct target *t, int64_t deadline_ms, const char **why)
{
    char request[1024], line[256];
    const bool v6 = !t->is_unix && strchr(t->host, ':') != NULL;
    const int count = snprintf(
        request, sizeof request,
        "GET %s HTTP/1.1\r\nHost: %s%.255s%s%s%s\r\nUser-Agent: attnd-healthcheck\r\nConnection: close\r\n\r\n",
        t->path, v6 ? "[" : "", t->is_unix ? "localhost" : t->host, v6 ? "]" : "", t->is_unix ? "" : ":", t->port);
    if (!send_all(fd, request, (size_t)count, deadline_ms)) {
        *why = strerror(errno);
        return -1;
    }
    const ssize_t used = read_line(fd, line, sizeof line - 1, deadline_ms);
    if (used < 0) {
        *why = errno == ETIMEDOUT ? "no answer within 5 s" : strerror(errno);
        return -1;
    }
    line[used] = '\0';
    int status = 0;
    if (memchr(line, '\n', (size_t)used) == NULL || sscanf(line, "HTTP/1.%*1[01] %3d", &status) != 1 || status < 100) {
        *why = used == 0 ? "the connection was closed without an answer" : "the answer is not HTTP";
        return -1;
    }
    return status;
}

/* Sends a TLS 1.2 ClientHello (RFC 5246 section 7.4.1.2) with cipher suites for RSA and elliptic curves. The server
 * must support one of them: otherwise libmicrohttpd closes the connection without an alert. */
static bool ask_tls(int fd, int64_t deadline_ms, const char **why)
{
    static const unsigned char hello[94] = {
        0x16, 3, 1, 0, 89, /* TLS record: a handshake of 89 bytes */
        /* ClientHello of 85 bytes, TLS 1.2, with 32 zeros as random bytes */
        1, 0, 0, 85, 3, 3, [43] = 0, /* no session */
        [44] = 0, 8,                 /* 8 bytes of cipher suites */
        0xc0, 0x2b,                  /* TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256 */
        0xc0, 0x2f,                  /* TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256 */
        0, 0x9c, 0, 0x2f,            /* TLS_RSA_WITH_AES_128_GCM_SHA256, TLS_RSA_WITH_AES_128_CBC_SHA */
        1, 0,                        /* no compression */
        0, 36,                       /* 36 bytes of extensions */
        0, 10, 0, 8, 0, 6,           /* supported_groups */
        0, 29, 0, 23, 0, 24,         /* groups x25519, secp256r1, secp384r1 */
        0, 13, 0, 20, 0, 18,         /* signature_algorithms */
        4, 3, 5, 3, 8, 7,            /* ECDSA with SHA-256 and SHA-384, Ed25519 */
        8, 4, 8, 5, 8, 6,            /* RSA-PSS with SHA-256, SHA-384, SHA-512 */
        4, 1, 5, 1, 6, 1,            /* RSA (PKCS #1 v1.5) with SHA-256, SHA-384, SHA-512 */
    };
    unsigned char record[5] = { 0 };
    if (!send_all(fd, hello, sizeof hello, deadline_ms)) {
        *why = strerror(errno);
        return false;
    }
    /* a TLS record may contain a line feed, at which read_line() would stop */
    for (size_t used = 0; used < sizeof record;) {
        const ssize_t n = recv(fd, record + used, sizeof record - used, 0);
        if (n > 0) used += (size_t)n;
        else if (n == 0) {
            *why = "the connection was closed without an answer";
            return false;
        } else if (errno == EAGAIN ? !await(fd, POLLIN, deadline_ms) : errno != EINTR) {
            *why = errno == ETIMEDOUT ? "no answer within 5 s" : strerror(errno);
            return false;
        }
    }
    *why = "the answer is not TLS";
    /* true for the head of a TLS record with an alert or a handshake, of TLS 1.0 or later */
    return (record[0] == 0x15 || record[0] == 0x16) && record[1] == 3;
}

/* Sets the target to the first address of the daemon's environment variable ATTND_LISTEN, with TLS if the daemon serves
 * TLS there. */
static bool target_of_environment(struct target *t)
{
    const char *listen = getenv("ATTND_LISTEN"), *cert = getenv("ATTND_TLS_CERT");
    char first[300];
    if (listen == NULL || *listen == '\0') listen = default_address;
    snprintf(first, sizeof first, "%.*s", (int)strcspn(listen, ","), listen);
    if (!parse_target(first, t)) {
        fprintf(stderr, "attnd healthcheck: ATTND_LISTEN: '%s' is not an address\n", first);
        return false;
    }
    t->tls = cert != NULL && *cert != '\0';
    return true;
}

int healthcheck_main(int argc, char **argv)
{
    struct target t;
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        fputs(usage, stdout);
        return EXIT_HEALTHY;
    }
    if (argc > 2) {
        fprintf(stderr, "attnd healthcheck: one URL at most\n");
        return EXIT_BAD_ARGUMENT;
    }
    if (argc > 1 && !parse_target(argv[1], &t)) {
        fprintf(stderr, "attnd healthcheck: '%s' is not http://HOST[:PORT][/PATH], HOST:PORT or unix:PATH\n", argv[1]);
        return EXIT_BAD_ARGUMENT;
    }
    if (argc <= 1 && !target_of_environment(&t)) return EXIT_BAD_ARGUMENT;

    const int64_t deadline_ms = now_ms() + HEALTHCHECK_TIMEOUT_MS;
    const char *why = "";
    char where[800];
    describe(&t, where, sizeof where);
    const int fd = open_target(&t, deadline_ms, &why);
    int status = -1;
    bool tls_ok = false;
    if (fd >= 0) {
        if (t.tls) tls_ok = ask_tls(fd, deadline_ms, &why);
        else status = ask_http(fd, &t, deadline_ms, &why);
        close(fd);
    }
    if (tls_ok) printf("healthy: %s speaks TLS (whether it takes work is not asked through TLS)\n", where);
    else if (status >= 200 && status <= 299) printf("healthy: %s answered %d\n", where, status);
    else if (status >= 0) fprintf(stderr, "unhealthy: %s answered %d\n", where, status);
    else fprintf(stderr, "unhealthy: %s: %s\n", where, why);
    return tls_ok || (status >= 200 && status <= 299) ? EXIT_HEALTHY : EXIT_UNHEALTHY;
}
