/* ready.h: does this server take work? For /readyz and /metrics. */
#ifndef READY_H
#define READY_H

#include <stdbool.h>
#include <stddef.h>

struct server;

/* `why`: the answer in words, "ready" or what keeps it from that. Any thread. */
bool ready(const struct server *server, char *why, size_t capacity);

#endif
