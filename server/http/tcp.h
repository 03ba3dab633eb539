/* tcp.h: reads data that only the kernel has about a connection. This needs <linux/tcp.h>, which conflicts with the
 * <netinet/tcp.h> that libuv includes. */
#ifndef TCP_H
#define TCP_H

#include <stdbool.h>

/* True if the client has never sent a byte. The result is also false if the system cannot tell (a unix socket, an old
 * kernel). */
bool tcp_is_mute(int fd);

#endif
