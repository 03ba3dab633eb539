/* refusal.h: an answer that is written to the socket itself, past the web server: to a connection that it does not have
 * yet, or in the middle of a body, where it takes no answer. */
#ifndef REFUSAL_H
#define REFUSAL_H

#include <stddef.h>

#include "proto-json/proto.h"

enum { REFUSAL_BYTES = 2048 };

/* The text of such an answer, a problem document with `Connection: close`; returns its length. A NULL `detail` is the
 * error's title, a NULL or empty request_id is made here. `media` is its content type, NULL where nobody knows yet what
 * is asked for: that of a problem document. */
size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media);
/* Sends the whole answer, as far as the socket takes it at once: a client that does not read its answer does not get
 * it. The caller shuts the socket down. */
void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media);

#endif
