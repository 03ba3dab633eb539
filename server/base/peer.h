/* peer.h: the addresses of clients as the log shows them, and the addresses that proxies forward.
 *
 * In this header an address is a text: "10.0.0.1", "2001:db8::1" (as inet_ntop() writes it, but an IPv4 address mapped
 * into IPv6 is written as IPv4), or "unix" for a unix socket. The text is never copied from a client: an address that a
 * proxy forwards is parsed, and then written by inet_ntop(). */
#ifndef PEER_H
#define PEER_H

#include <stdbool.h>
#include <sys/socket.h>

enum { PEER_BYTES = 48 }; /* bytes of an address as text with its NUL: at least INET6_ADDRSTRLEN, which is 46 */

/* Writes the address of a socket's other end, or "-" if the socket has none. Returns `text`. */
const char *peer_text(const struct sockaddr *address, char text[PEER_BYTES]);

/* True for a valid value of --trusted-proxy: "10.0.0.1", "10.0.0.0/8", "fd00::/8" or "unix". */
bool peer_is_network(const char *text);
bool peer_is_trusted(const char *const *networks, int count, const char *address);

/* Finds the client behind trusted proxies: the last address in X-Forwarded-For that is in no trusted network. `lines`
 * are the header's lines in order of arrival. Each proxy appends the address of its own client, so entries before an
 * untrusted address may be forged. Entries are therefore read from the last to the first. If an entry is no address, or
 * if all entries are trusted, the result is the address that was read last. Returns `text`, which may be `peer`. */
const char *peer_forwarded(const char *const *networks, int count, const char *peer, const char *const *lines,
                           int line_count, char text[PEER_BYTES]);

#endif
