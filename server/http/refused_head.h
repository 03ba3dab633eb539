/* refused_head.h: how libmicrohttpd reports that it refuses a head by itself, and a test that this version does so. */
#ifndef REFUSED_HEAD_H
#define REFUSED_HEAD_H

#include <stdbool.h>

/* Is this the format that libmicrohttpd logs when it refuses a request? Its first argument is then the status, an
 * unsigned. */
bool refused_head_is_told(const char *format);

/* Sends a malformed Content-Length to a daemon of its own. True: libmicrohttpd logged the refusal as expected, when the
 * head counted as complete and had no answer. mhd.c depends on both. Takes less than a millisecond. */
bool refused_head_self_test(void);

#endif
