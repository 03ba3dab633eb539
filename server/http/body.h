/* body.h: receives the body of a request, from before its first byte until its job runs or waits. Call these functions
 * on the HTTP thread that owns the request. */
#ifndef BODY_H
#define BODY_H

#include <stddef.h>

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Reserves what the body needs before its first byte arrives: a slot in the queue, a parser, and memory for the inputs
 * plus a third for the outputs. If other bodies have leased too much memory ahead of their bytes (staging.h), the
 * parser leases memory for this body later. On an error the request fails. */
void body_admit(struct request *request, const struct http_head *head);

/* Takes a piece of the body. Returns how many bytes at the end of the piece were not consumed; the next call must pass
 * these bytes again. */
size_t body_piece(struct request *request, const char *bytes, size_t count);

/* Call this when the body is complete. Computes a small job in this thread and queues its answer. Hands any other
 * request to the main thread, unless its answer is decided already. Returns MHD_NO if the connection must be closed. */
enum MHD_Result body_done(struct request *request);

#endif
