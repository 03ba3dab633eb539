/* supervise.h: --supervise: a parent that keeps the listening sockets and starts a new server when one dies, so
 * that clients see a pause and not a refused connection. */
#ifndef SUPERVISE_H
#define SUPERVISE_H

#include "server/http/listen.h"

/* Runs servers on these sockets until one ends for good; returns the exit status to pass on. The calling process
 * must have no other threads than log.c's, and have called signals_block(). argv is what the servers get. A server that
 * was told to stop and does not end by itself, for which it has `stop_ms` (when told again, `again_ms`), is killed. */
int supervise_run(struct listener *listeners, int count, char **argv, int64_t stop_ms, int64_t again_ms);

/* In a server: the sockets that a supervisor left it, in the order of its listeners. -1: there is no supervisor. */
int supervise_inherited(int *fds, int capacity);

#endif
