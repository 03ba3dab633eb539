/* supervise.h: --supervise, a parent process that keeps the listening sockets and starts a new server when one dies.
 * Clients then see a pause and no refused connection. */
#ifndef SUPERVISE_H
#define SUPERVISE_H

#include "server/http/listen.h"

/* Runs servers on these sockets until one ends for good; returns the exit status to pass on. The calling process must
 * have no threads except log.c's, and must have called signals_block(). argv is passed to the servers. A server has
 * `stop_ms` to end after it was told to stop (`again_ms` after a second time); then it is killed. */
int supervise_run(struct listener *listeners, int count, char **argv, int64_t stop_ms, int64_t again_ms);

/* In a server: reads the sockets that a supervisor left, in the order of its listeners. -1: there is no supervisor. */
int supervise_inherited(int *fds, int capacity);

#endif
