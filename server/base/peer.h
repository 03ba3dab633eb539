/* peer.h: the addresses of clients as the log shows them, and the addresses that proxies forward.
 *
 * An address is text here: "10.0.0.1", "2001:db8::1" (as inet_ntop() writes it, an IPv4 address in IPv6 as IPv4), or
 * "unix" for a unix socket. It never has a client's own text: an address from a proxy is parsed and written anew. */
#ifndef PEER_H
#define PEER_H

#include <stdbool.h>
#include <sys/socket.h>

enum { PEER_BYTES = 48 }; /* INET6_ADDRSTRLEN is 46 */

/* Writes the address of a socket's other end, or "-" if it has none. Returns `text`. */
const char *peer_text(const struct sockaddr *address, char text[PEER_BYTES]);

/* True for a valid value of --trusted-proxy: "10.0.0.1", "10.0.0.0/8", "fd00::/8" or "unix". */
bool peer_is_network(const char *text);
/* True if the address is in one of these networks. */
bool peer_is_trusted(const char *const *networks, int count, const char *address);

/* Finds the client behind a trusted proxy: the last address in X-Forwarded-For that is in no trusted network. `lines`
 * are the header's lines in order of arrival. A proxy adds the address of its own client, so entries before an
 * untrusted address may be forged. Entries are read from the last one on. If an entry is no address, or all are
 * trusted, the result is the address read before. Returns `text`, which may be `peer`. */
const char *peer_forwarded(const char *const *networks, int count, const char *peer, const char *const *lines,
                           int line_count, char text[PEER_BYTES]);

#endif
