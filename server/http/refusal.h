/* refusal.h: an answer that refuses a client and is written directly to its socket. Such answers are needed before
 * libmicrohttpd gets the connection, and in the middle of a body, when libmicrohttpd accepts no answer. */
#ifndef REFUSAL_H
#define REFUSAL_H

#include <stddef.h>

#include "proto-json/proto.h"

enum { REFUSAL_BYTES = 2048 };

/* Writes a problem document as a whole HTTP answer with `Connection: close`, and returns its length. If `detail` is
 * NULL, the error's title is used. If request_id is NULL or empty, a new id is made. `media` is the content type; NULL:
 * that of problem documents. */
size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media);
/* Sends as much of the answer as the socket accepts without waiting. A client that does not read may therefore get only
 * a part of the answer. The caller must shut the socket down. */
void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media);

#endif
