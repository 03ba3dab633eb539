/* refused_head.h: how libmicrohttpd tells that it refuses a head by itself, and whether the one here does so. */
#ifndef REFUSED_HEAD_H
#define REFUSED_HEAD_H

#include <stdbool.h>

/* Is this what libmicrohttpd logs in the moment in which it refuses a request? The first argument is the status
 * then, an unsigned. */
bool refused_head_is_told(const char *format);

/* Sends a malformed Content-Length to a daemon of its own: is it told as expected, while the head counts as complete
 * and has no answer? It takes less than a millisecond. What mhd.c does with such heads depends on both. */
bool refused_head_self_test(void);

#endif
