/* first_bytes.h: what the first bytes of a connection are, where they are another protocol than the one that is spoken
 * there: a TLS client on a plain port, plain HTTP on a TLS port, HTTP/2 (which gRPC needs). The web server or GnuTLS
 * closes such a connection without a word, so the log says why: once a minute for each reason, with the number of
 * connections that it stands for. */
#ifndef FIRST_BYTES_H
#define FIRST_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FIRST_BYTES_MAP(X)                                                                                         \
    X(NOTHING, "")                                                                                                 \
    X(TLS, "a TLS client on a plain port: write http:// there, or start the server with --tls-cert and --tls-key") \
    X(PLAIN, "plain HTTP on a TLS port: write https:// there")                                                     \
    X(HTTP2, "HTTP/2, which is not spoken here (nor gRPC, which needs it): use HTTP/1.1")
enum first_bytes {
#define X(id, reason) FIRST_BYTES_##id,
    FIRST_BYTES_MAP(X)
#undef X
        FIRST_BYTES_COUNT
};

/* What they are on such a port; NOTHING: nothing that does not belong there. */
enum first_bytes first_bytes_of(const void *bytes, size_t count, bool tls);

/* A connection begins on this socket: the next bytes that this process receives there are looked at. */
void first_bytes_expect(int fd, bool tls);

/* The web server has refused what this thread received last for its version of HTTP: on a TLS port it is HTTP/2, and
 * nothing of it was seen here. */
void first_bytes_tell_in_tls(void);

/* Turns of a line that is written once a minute. True: now, for *count of them. Pure, for tests. */
struct first_bytes_turn {
    int64_t next_ms;
    uint64_t left_out;
};
bool first_bytes_is_due(struct first_bytes_turn *turn, int64_t now_ms, uint64_t *count);

#endif
