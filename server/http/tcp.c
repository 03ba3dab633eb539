/* tcp.c: reads the kernel's data about a TCP connection (struct tcp_info of Linux 4.1 and later). */
#include "server/http/tcp.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

bool tcp_is_mute(int fd)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
    return length >= offsetof(struct tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received &&
           info.tcpi_bytes_received == 0;
}
