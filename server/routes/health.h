/* health.h: health probes. They show whether the process works, and whether the server accepts requests. Any thread may
 * call these handlers (route.h). */
#ifndef HEALTH_H
#define HEALTH_H

#include <stdbool.h>
#include <stddef.h>

#include "server/work/request.h"

/* Returns whether the server is ready. Writes "ready", or the reason why the server is not ready, to `why`. */
bool health_ready(const struct server *server, char *why, size_t capacity);

void health_answer_live(struct request *request, struct answer *answer);
/* Answers 503 while the server is not ready. The body is the text of health_ready(). */
void health_answer_ready(struct request *request, struct answer *answer);

#endif
