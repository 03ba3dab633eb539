/* refusal.h: an answer that is written to the socket itself, past the web server: to a connection that it does not have
 * yet, or in the middle of a body, where it takes no answer. */
#ifndef REFUSAL_H
#define REFUSAL_H

#include <stddef.h>

#include "proto-json/proto.h"

enum { REFUSAL_BYTES = 2048 };

/* Writes the text of such an answer, a problem document with `Connection: close`, and returns its length. A NULL
 * `detail` stands for the error's title; a NULL or empty request_id is made here. `media` is the content type; NULL
 * stands for that of a problem document, where the route is not known yet. */
size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media);
/* Sends as much of the answer as the socket takes at once; a client that does not read may get less than all of it. The
 * caller shuts the socket down. */
void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media);

#endif
