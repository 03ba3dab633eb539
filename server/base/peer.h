/* peer.h: the addresses of clients as the log shows them, and what proxies say of those behind them.
 *
 * An address is text here: "10.0.0.1", "2001:db8::1" (as inet_ntop() writes it, an IPv4 address in IPv6 as IPv4), or
 * "unix" for a unix socket. No text of a client gets into one: what a proxy forwards is parsed and written anew. */
#ifndef PEER_H
#define PEER_H

#include <stdbool.h>
#include <sys/socket.h>

enum { PEER_BYTES = 48 }; /* INET6_ADDRSTRLEN is 46 */

/* Of a socket's other end; "-" where it has none. Returns `text`. */
const char *peer_text(const struct sockaddr *address, char text[PEER_BYTES]);

/* "10.0.0.1", "10.0.0.0/8", "fd00::/8" or "unix": whom --trusted-proxy may name. */
bool peer_is_network(const char *text);
/* Is the address in one of these networks? */
bool peer_is_trusted(const char *const *networks, int count, const char *address);

/* Who stands behind a trusted proxy: in X-Forwarded-For, whose lines come in the order in which they arrived, the last
 * address that is of no trusted network. Each entry was written by the one behind it, so what stands before a client
 * that nobody trusts may be anything. Where an entry is no address, or all are trusted, the last that was read counts.
 * Returns `text`, which may be `peer`. */
const char *peer_forwarded(const char *const *networks, int count, const char *peer, const char *const *lines,
                           int line_count, char text[PEER_BYTES]);

#endif
