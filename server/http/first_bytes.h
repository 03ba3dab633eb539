/* first_bytes.h: finds connections whose client speaks another protocol than the port: TLS on a plain port, plain HTTP
 * on a TLS port, or HTTP/2 (which gRPC needs). The web server or GnuTLS closes such a connection without an answer. The
 * log says why, at most once a minute for each reason, with the number of connections since its last line. */
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

/* Returns which other protocol these first bytes belong to, on a plain or a TLS port. NOTHING: the protocol of the
 * port, or an unknown one. */
enum first_bytes first_bytes_of(const void *bytes, size_t count, bool tls);

/* Call this when a connection begins on this socket: recv() then looks at the next bytes that arrive there. */
void first_bytes_expect(int fd, bool tls);

/* Call this when the web server has refused a request for its version of HTTP. If this thread received the request on a
 * TLS port, it is logged as HTTP/2. The bytes on such a port are encrypted, so recv() cannot see the version. */
void first_bytes_tell_in_tls(void);

/* Limits a log line to one a minute. True: write the line now, for *count events. A function of its arguments only, for
 * tests. */
struct first_bytes_turn {
    int64_t next_ms;
    uint64_t left_out;
};
bool first_bytes_is_due(struct first_bytes_turn *turn, int64_t now_ms, uint64_t *count);

#endif
