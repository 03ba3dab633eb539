/* body.h: the body of a request, from before its first byte until its job runs or waits. By an HTTP thread, which owns
 * the request. */
#ifndef BODY_H
#define BODY_H

#include <stddef.h>

#include "server/http/http_head.h"
#include "server/http/exchange.h"

/* Reserves what the body needs before its first byte: a slot, memory and a parser. Memory is leased ahead for what the
 * inputs need, and for outputs of a third of the inputs, as long as not too much is leased so (staging.h). Large blocks
 * reserve addresses; pages come with the first touch. On an error the request fails. */
void body_admit(struct request *request, const struct http_head *head);

/* Takes a piece of the body. Returns how many of its last bytes are left for another call. */
size_t body_piece(struct request *request, const char *bytes, size_t count);

/* The body is complete: its job is computed here, or the request goes to the loop, or its answer is queued. MHD_NO: the
 * connection is to be closed. */
enum MHD_Result body_done(struct request *request);

#endif
