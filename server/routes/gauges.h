/* gauges.h: the gauges of /metrics whose values are kept elsewhere. */
#ifndef GAUGES_H
#define GAUGES_H

struct server;

/* Sets all gauges. Call this on any thread before the page of /metrics is written. */
void gauges_publish(struct server *server);

#endif
