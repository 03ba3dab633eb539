/* peer.h: the addresses of clients as the log shows them, and the addresses that proxies forward.
 *
 * An address is text here: "10.0.0.1", "2001:db8::1" (as inet_ntop() writes it, an IPv4 address in IPv6 as IPv4), or
 * "unix" for a unix socket. No text of a client gets into one: what a proxy forwards is parsed and written anew. */
#ifndef PEER_H
#define PEER_H

#include <stdbool.h>
#include <sys/socket.h>

enum { PEER_BYTES = 48 }; /* INET6_ADDRSTRLEN is 46 */

/* The address of a socket's other end; "-" where it has none. Returns `text`. */
const char *peer_text(const struct sockaddr *address, char text[PEER_BYTES]);

/* Is it a value that --trusted-proxy may have: "10.0.0.1", "10.0.0.0/8", "fd00::/8" or "unix"? */
bool peer_is_network(const char *text);
/* Is the address in one of these networks? */
bool peer_is_trusted(const char *const *networks, int count, const char *address);

/* The client behind a trusted proxy: the last address in X-Forwarded-For that is in no trusted network. `lines` are the
 * header's lines in order of arrival. A proxy adds the address of its own client, so entries before an untrusted
 * address may be made up. Entries are read from the last one on. If one is no address, or all are trusted, the address
 * that was read last counts. Returns `text`, which may be `peer`. */
const char *peer_forwarded(const char *const *networks, int count, const char *peer, const char *const *lines,
                           int line_count, char text[PEER_BYTES]);

#endif
