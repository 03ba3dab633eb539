/* gauges.h: sets the gauges of /metrics. */
#ifndef GAUGES_H
#define GAUGES_H

#include "server/work/request.h"

/* Sets the gauges of /metrics to the server's current numbers. Call this on any thread before the page of /metrics is
 * written. */
void gauges_publish(struct server *server);

/* Answers GET /metrics: sets the gauges and writes the page. */
void gauges_answer(struct request *request, struct answer *answer);

#endif
