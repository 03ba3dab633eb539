/* answer.h: makes the response that libmicrohttpd sends for a request in the state ANSWERING: tensors, a problem
 * document (an error as JSON), or the text of a handler. */
#ifndef ANSWER_H
#define ANSWER_H

#include "server/http/exchange.h"

/* Hands the answer of a request over to libmicrohttpd. Call this on the HTTP thread. If `close` is true, the connection
 * ends after the answer. Returns MHD_NO if the connection must be closed without an answer. */
enum MHD_Result answer_queue(struct request *request, bool close);

/* Moves the request to the state ANSWERING, releases the memory that the request no longer needs, and queues its
 * answer. */
enum MHD_Result answer_now(struct request *request, bool close);

/* Writes the value of the header Server-Timing, such as "recv;dur=1.234, decode;dur=...", in milliseconds. Returns its
 * length. Public for tests. */
size_t answer_server_timing(const struct request *request, char *text, size_t capacity);

#endif
