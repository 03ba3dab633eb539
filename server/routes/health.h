/* health.h: does the process work, and does this server take work? Handlers of routes (route.h), which any thread may
 * call. */
#ifndef HEALTH_H
#define HEALTH_H

#include <stdbool.h>
#include <stddef.h>

#include "server/work/request.h"

/* Writes "ready", or the reason why the server is not ready, to `why`. */
bool health_ready(const struct server *server, char *why, size_t capacity);

void health_answer_live(struct request *request, struct answer *answer);
/* 503 while the server is not ready; the body is what health_ready() wrote. */
void health_answer_ready(struct request *request, struct answer *answer);

#endif
