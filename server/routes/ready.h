/* ready.h: does this server take work? For /readyz and /metrics. */
#ifndef READY_H
#define READY_H

#include <stdbool.h>
#include <stddef.h>

struct server;

/* Writes "ready", or the reason why the server is not ready, to `why`. May be called from any thread. */
bool ready(const struct server *server, char *why, size_t capacity);

#endif
