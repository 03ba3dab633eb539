/* access_log.h: writes one line of the log and updates the metrics when a request has ended. */
#ifndef ACCESS_LOG_H
#define ACCESS_LOG_H

#include "server/http/exchange.h"

/* Sets every series (metric with label values) that an alert watches to 0. Alerts watch rates, which ignore the first
 * sample of a series. */
void access_log_begin(void);
/* Logs and counts a request that has ended. `how` is libmicrohttpd's reason for the end. The owner of the request calls
 * this before it frees the request. */
void access_log_request(struct request *request, enum MHD_RequestTerminationCode how);

#endif
