/* first_bytes.h: finds connections whose client speaks a different protocol from the port's: TLS on a plain port, plain
 * HTTP on a TLS port, or HTTP/2 (which gRPC needs). Such a connection is closed without an answer. The log says why, at
 * most once a minute for each reason. */
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

/* Returns the protocol to which these first bytes belong, if it is not the protocol of the port (TLS or plain).
 * Returns NOTHING if the bytes belong to the port's protocol or to an unknown one. */
enum first_bytes first_bytes_of(const void *bytes, size_t count, bool tls);

/* Call this when a connection begins on this socket. recv() of first_bytes.c will then look at the first bytes that
 * arrive. */
void first_bytes_expect(int fd, bool tls);

/* Call this when the web server has refused a request because of its HTTP version. If it arrived on a TLS port, the log
 * calls it HTTP/2, because recv() sees only encrypted bytes there. */
void first_bytes_tell_in_tls(void);

/* Limits the log lines about one kind of event to one a minute. */
struct first_bytes_turn {
    int64_t next_ms;
    uint64_t left_out;
};
/* Counts an event. Returns true if a log line must be written now; *count is then the number of events since the last
 * line. The result depends only on the arguments, so that tests can choose the time. */
bool first_bytes_is_due(struct first_bytes_turn *turn, int64_t now_ms, uint64_t *count);

#endif
