/* mhd_quirks.c: corrections of libmicrohttpd's behaviour, which mhd_quirks.h lists by number. */
#include "server/http/mhd_quirks.h"
#include "server/http/exchange.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/epoll.h>

#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/http/http_threads.h"

static bool is_0_9(void)
{
    /* the version of the loaded library may differ from that of the header file */
    return strcmp(MHD_get_version(), "1") < 0;
}

attn_status mhd_quirks_self_test(attn_error *err)
{
    int (*const found)(int, struct epoll_event *, int, int) = (__typeof__(&epoll_wait))dlsym(RTLD_DEFAULT,
                                                                                             "epoll_wait");
    const char *const version = MHD_get_version();
    if (found != NULL && found != epoll_wait)
        return attn_fail(err, ATTN_INTERNAL, NULL,
                         "libmicrohttpd would not call this program's epoll_wait(): connections could hang");
    if (strcmp(version, "0.9.75") < 0 || strncmp(version, "1.1", 3) >= 0)
        log_event(LOG_WARN, NULL, "libmicrohttpd_untried", "version=%s tried=\"0.9.75 to 1.0\"", version);
    return ATTN_OK;
}

int mhd_quirks_options(struct MHD_OptionItem *options)
{
    if (!is_0_9()) return 0;
    options[0] = (struct MHD_OptionItem){ MHD_OPTION_CONNECTION_MEMORY_INCREMENT, HTTP_CONNECTION_STEP, NULL };
    return 1;
}

void mhd_quirks_expectation(struct request *request, const struct http_head *head)
{
    char *const value = (char *)MHD_lookup_connection_value(exchange_of(request)->mhd, MHD_HEADER_KIND, "Expect");
    if (value) value[http_head_has_body(head) ? strlen(head->value[HEADER_EXPECT]) : 0] = '\0';
}

/* Replaces libc's epoll_wait() in the whole process. If a call returned as many events as requested, the next call for
 * the same epoll set does not sleep (quirk 6). */
int epoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout)
{
    /* epoll set of this thread's last call, if its events filled the whole buffer */
    static _Thread_local int full_epfd = -1;
    const int count = http_threads_wait(epfd, events, maxevents, full_epfd == epfd ? 0 : timeout);
    full_epfd = count == maxevents ? epfd : -1;
    return count;
}
