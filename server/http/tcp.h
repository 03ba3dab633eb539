/* tcp.h: what only the kernel knows about a connection. A file of its own: <linux/tcp.h> and <netinet/tcp.h>, which
 * libuv includes, do not go together, and glibc's has no tcpi_bytes_received. */
#ifndef TCP_H
#define TCP_H

#include <stdbool.h>

/* True if the client has never sent a byte. False if the system cannot tell (a unix socket, an old kernel). */
bool tcp_is_mute(int fd);

#endif
