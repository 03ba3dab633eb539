/* access_log.h: writes one line of the log and updates the metrics when a request has ended. */
#ifndef ACCESS_LOG_H
#define ACCESS_LOG_H

#include "server/http/exchange.h"

/* Creates at 0 every series (metric with label values) that an alert watches. A rate ignores the first sample of a
 * series, so without this the first event would stay invisible. */
void access_log_begin(void);
/* Logs and counts a request that has ended. `how` is what libmicrohttpd says about its end. The owner of the request
 * calls this before it frees the request. */
void access_log_request(struct request *request, enum MHD_RequestTerminationCode how);

#endif
