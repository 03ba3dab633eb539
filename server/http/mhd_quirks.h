/* mhd_quirks.h: what differs in libmicrohttpd from what its manual lets one expect, and what attnd does about it. Each
 * was measured, or read in the sources of 0.9.75 and 1.0.1. `make http-other` runs the tests of framing, headers,
 * refused bodies and shutdown with the one of the two that is not installed.
 *
 *  1. An answer that is queued in the first call for a request closes the connection after it. A refusal therefore
 *     waits for the end of the body, unless the connection is to be closed: bad framing, a body over the limit, Expect:
 *     100-continue. (0.9.75 and 1.0.1; mhd.c, head())
 *  2. In the middle of a body no answer can be queued. 408 and 413 are then written to the socket, past the library.
 *     (0.9.75 and 1.0.1; own_answers.c)
 *  3. A suspended connection has no time-out, and nobody notices when its client leaves. If it is still suspended when
 *     the daemon is stopped, the library aborts the process. (0.9.75 and 1.0.1; server/sched/ has the deadline and the
 *     watch, stop.c resumes all)
 *  4. When it refuses a connection at its own limit of connections, it leaves a mutex locked. It is given no limit, and
 *     attnd counts the connections. (0.9.75; fixed in 1.0.0; QUIRKS_NO_LIMIT)
 *  5. The bytes of a body must all be consumed in each call, or the connection hangs; unless it is suspended in that
 *     call. It may be resumed at once: the thread then serves its other connections, and comes back with the rest.
 *     (0.9.75 and 1.0.1; mhd.c, advance())
 *  6. It takes events in 128s. When it was given as many, it asks for more before it looks at any, with the same
 *     time-out: after exactly 128 events it sleeps on them. (0.9.75 and 1.0.1; epoll_wait() of mhd_quirks.c)
 *  7. It refuses malformed messages by itself, with a page in HTML that differs by version, and 0.9.75 sends the head
 *     of some of them twice. (own_answers.c)
 *  8. When the records of a query's arguments do not fit into the connection's memory, it begins an answer, forgets it
 *     and waits. A target with more than HTTP_ARGUMENTS_MAX arguments is answered before. (0.9.75; mhd.c,
 *     begin_request())
 *  9. It compares the value of Expect with the white space behind it. For a request without a body it sends 100, and
 *     then does not read the bytes behind this request. (0.9.75; mhd_quirks_expectation())
 * 10. How much of a body a recv() reads shrinks to an eighth of the rest in each call, unless the memory of a
 *     connection grows in large steps. From 1.0.0 on such steps would keep it from growing. (0.9.75;
 *     mhd_quirks_options())
 * 11. It ends some connections without telling that their request is over. (0.9.75: at the second fault in a head;
 *     1.0.1: at a chunk whose head is longer than its buffer; mhd.c, on_connection()) */
#ifndef MHD_QUIRKS_H
#define MHD_QUIRKS_H

#include <limits.h>
#include <microhttpd.h>

#include "kernels/attention.h"
#include "server/http/http_head.h"
#include "server/http/exchange.h"

enum { QUIRKS_NO_LIMIT = INT_MAX }; /* of connections (4) */

/* Looks whether the corrections are in force: whether the library calls the epoll_wait() of this program (6), and
 * whether its version is one that they were tried with, which is else a line in the log. INTERNAL: they are not. */
attn_status mhd_quirks_self_test(attn_error *err);

/* Writes the options that a daemon of the version that runs needs besides its own. Returns how many: at most 1. */
int mhd_quirks_options(struct MHD_OptionItem *options);

/* Corrects the value of Expect where it lies, in the memory of libmicrohttpd's connection (9). Call it before the first
 * call for the request returns: the library reads the value after that. */
void mhd_quirks_expectation(struct request *request, const struct http_head *head);

#endif
