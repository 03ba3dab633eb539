/* refusal.c: writes a refusal directly to a client's socket; see refusal.h. */
#include "server/http/refusal.h"

#include <assert.h>
#include <microhttpd.h>
#include <sys/socket.h>

#include "text/text.h"
#include "server/base/limits.h"
#include "server/http/exchange.h"

enum { BODY_BYTES = 1024 };

size_t refusal_text(char text[REFUSAL_BYTES], proto_error error, const char *detail, const char *request_id,
                    const char *media)
{
    const int status = proto_errors[error].http;
    char body[BODY_BYTES], made[REQUEST_ID_BYTES];
    struct text t = text_in(text, REFUSAL_BYTES);
    if (request_id == NULL || *request_id == '\0') {
        request_make_id(made);
        request_id = made;
    }
    const size_t length = proto_error_write(body, sizeof body, error, detail, NULL, NULL, request_id);
    text_printf(&t,
                "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
                "Connection: close\r\nX-Request-Id: %s\r\n",
                status, MHD_get_reason_phrase_for((unsigned)status), media ? media : "application/problem+json", length,
                request_id);
    if (status == 503) text_printf(&t, "Retry-After: %d\r\n", REFUSAL_RETRY_AFTER_S);
    text_put_string(&t, "\r\n");
    text_put(&t, body, length);
    assert(t.failure == TEXT_FINE);
    return t.used;
}

void refusal_send(int fd, proto_error error, const char *detail, const char *request_id, const char *media)
{
    char text[REFUSAL_BYTES];
    const size_t length = refusal_text(text, error, detail, request_id, media);
    /* not send(), which own_answers.c replaces */
    (void)!sendto(fd, text, length, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
}
