/* access_log.h: one line of the log and a few numbers for each request, when all is over. */
#ifndef ACCESS_LOG_H
#define ACCESS_LOG_H

#include "server/http/exchange.h"

/* A rate sees nothing in the first sample of a series: what an alert watches is there, at 0, before it happens. */
void access_log_begin(void);
/* The request is over, in the way that libmicrohttpd says. By its owner, before it is freed. */
void access_log_request(struct request *request, enum MHD_RequestTerminationCode how);

#endif
