/* answer.h: from a request in ANSWERING to a response that libmicrohttpd sends: tensors, a problem document, or what a
 * handler wrote. */
#ifndef ANSWER_H
#define ANSWER_H

#include "server/http/exchange.h"

/* Queues the answer, from the HTTP thread. MHD_NO: the connection is to be closed without one. `close`: the
 * connection ends with it. */
enum MHD_Result answer_queue(struct request *request, bool close);

/* Moves the request to ANSWERING, gives back what it needs no more, and queues its answer. */
enum MHD_Result answer_now(struct request *request, bool close);

/* Writes "recv;dur=1.234, decode;dur=..." (milliseconds) from the request's times. Returns its length. For tests as
 * well. */
size_t answer_server_timing(const struct request *request, char *text, size_t capacity);

#endif
