/* refusal.h: an answer that is written directly to a socket: before the web server has the connection, or in the middle
 * of a body, where the web server takes no answer. */
#ifndef REFUSAL_H
#define REFUSAL_H

#include <stddef.h>

#include "proto-json/proto.h"

enum { REFUSAL_BYTES = 2048 };

/* Writes a problem document with `Connection: close` as a whole HTTP answer, and returns its length. A NULL `detail`
 * stands for the error's title. A NULL or empty request_id gets a new id. `media` is the content type; NULL stands for
 * that of a problem document, for use while the route is unknown. */
size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media);
/* Sends as much of the answer as the socket takes at once. A client that does not read may get less than all of it. The
 * caller shuts the socket down. */
void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media);

#endif
