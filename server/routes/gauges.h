/* gauges.h: the gauges of /metrics whose values are kept elsewhere. */
#ifndef GAUGES_H
#define GAUGES_H

struct server;

/* Sets them all. Call before the page is written; from any thread. */
void gauges_publish(struct server *server);

#endif
