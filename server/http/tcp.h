/* tcp.h: reads data that only the kernel has about a connection. This is a separate file because it needs
 * <linux/tcp.h>. That header conflicts with <netinet/tcp.h>, which libuv includes. In glibc, <netinet/tcp.h> has no
 * member tcpi_bytes_received. */
#ifndef TCP_H
#define TCP_H

#include <stdbool.h>

/* True if the client has never sent a byte. The result is also false if the system cannot tell (a unix socket, an old
 * kernel). */
bool tcp_is_mute(int fd);

#endif
