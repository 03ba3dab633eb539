/* supervise.h: --supervise, a parent process that keeps the listening sockets and starts a new server when one dies.
 * Clients then see a pause, but no refused connection. */
#ifndef SUPERVISE_H
#define SUPERVISE_H

#include "server/http/listen.h"

/* Runs one server after another on these sockets. Returns the exit status when no further server is to be started. The
 * process must have no threads except log.c's, and must have called signals_block(). A server that was told to stop is
 * killed after `stop_ms`, or after `again_ms` if it was told a second time. */
int supervise_run(struct listener *listeners, int count, char **argv, int64_t stop_ms, int64_t again_ms);

/* Writes the descriptors of the sockets that a supervisor has opened, in the order of the server's listeners, and
 * returns their number; -1: no supervisor. */
int supervise_inherited(int *fds, int capacity);

#endif
