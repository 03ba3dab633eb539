/* mhd_quirks.h: where libmicrohttpd behaves differently from what its manual suggests, and what attnd does about it.
 * Each quirk was measured, or read in the sources of 0.9.75 and 1.0.1. `make http-other` runs the tests of framing,
 * headers, refused bodies and shutdown with whichever of the two versions is not installed.
 *
 *  1. An answer that is queued in the first call for a request makes the library close the connection after the answer.
 *     attnd therefore queues a refusal only at the end of the body. The exceptions are requests after which the
 *     connection is closed anyway: bad framing, a body over the limit, or Expect: 100-continue. (0.9.75 and 1.0.1;
 *     mhd.c, head())
 *  2. In the middle of a body no answer can be queued. attnd writes the answers 408 and 413 directly to the socket.
 *     (0.9.75 and 1.0.1; own_answers.c)
 *  3. A suspended connection has no time-out, and the library does not notice when its client leaves. If a
 *     connection is still suspended when the daemon is stopped, the library aborts the process. (0.9.75 and 1.0.1;
 *     server/sched/ keeps the deadline and watches the socket, stop.c resumes all connections)
 *  4. When the library refuses a connection at its own limit of connections, it leaves a mutex locked. attnd gives
 *     the library no limit, and counts the connections itself. (0.9.75; fixed in 1.0.0; QUIRKS_NO_LIMIT)
 *  5. If a callback does not consume all bytes of a body that it gets, the connection hangs, unless the callback
 *     suspends it. The connection may be resumed at once: the thread first serves its other connections, and then calls
 *     the callback with the rest of the bytes. (0.9.75 and 1.0.1; mhd.c, advance())
 *  6. The library requests 128 events at a time. If it gets 128, it requests more before it handles any, with the
 *     same time-out. After exactly 128 events it therefore sleeps before it handles them. (0.9.75 and 1.0.1;
 *     epoll_wait() of mhd_quirks.c)
 *  7. The library refuses malformed messages by itself, with an HTML page that differs by version. 0.9.75 sends the
 *     head of some of these answers twice. (own_answers.c)
 *  8. When the records of a query's arguments do not fit into the connection's memory, the library begins an answer,
 *     forgets it and waits. attnd refuses a target with more than HTTP_ARGUMENTS_MAX arguments before the library does
 *     that. (0.9.75; mhd.c, begin_request())
 *  9. The library compares the value of Expect together with the white space after it. For a request without a body
 *     it sends 100, and then does not read the bytes after this request. (0.9.75; mhd_quirks_expectation())
 * 10. While the library receives a body, the room for each recv() shrinks to an eighth of the memory that is left,
 *     unless the memory of a connection grows in large steps. From 1.0.0 on, large steps would keep the memory from
 *     growing. (0.9.75; mhd_quirks_options())
 * 11. The library ends some connections without a report that their request has ended. (0.9.75: at the second fault
 *     in a head; 1.0.1: at a chunk whose head is longer than its buffer; mhd.c, on_connection()) */
#ifndef MHD_QUIRKS_H
#define MHD_QUIRKS_H

#include <limits.h>
#include <microhttpd.h>

#include "kernels/attention.h"
#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* libmicrohttpd gets no limit on connections, because it leaves a mutex locked at its limit (quirk 4 above) */
enum { QUIRKS_NO_LIMIT = INT_MAX };

/* Checks two conditions on which the corrections of the quirks depend. libmicrohttpd must call this program's
 * epoll_wait() (quirk 6); otherwise the result is INTERNAL. The version of libmicrohttpd should be one with which the
 * corrections were tested; for any other version, a line is logged. */
attn_status mhd_quirks_self_test(attn_error *err);

/* Writes the additional options that a libmicrohttpd daemon needs, for the version of libmicrohttpd that is loaded.
 * Returns the number of options, at most 1. */
int mhd_quirks_options(struct MHD_OptionItem *options);

/* Corrects the value of the header Expect in place, in libmicrohttpd's memory (quirk 9). Call this inside
 * libmicrohttpd's first callback for the request, because libmicrohttpd reads the value after that callback. */
void mhd_quirks_expectation(struct request *request, const struct http_head *head);

#endif
