/* refusal.h: an answer that is written directly to a socket, before the web server has the connection, or in the middle
 * of a body, where the web server takes no answer. */
#ifndef REFUSAL_H
#define REFUSAL_H

#include <stddef.h>

#include "proto-json/proto.h"

enum { REFUSAL_BYTES = 2048 };

/* Writes a problem document as a whole HTTP answer with `Connection: close`, and returns its length. If `detail` is
 * NULL, the error's title is used. If request_id is NULL or empty, a new id is made. `media` is the content type; NULL,
 * for use while the route is unknown, means that of a problem document. */
size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media);
/* Sends as much of the answer as the socket takes at once. A client that does not read may therefore get only a part of
 * it. The caller must shut the socket down. */
void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media);

#endif
