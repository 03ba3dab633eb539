/* errors.c: turns a status into the error that a client reads.
 *
 * proto_error_write() always writes one valid JSON object. Control characters are escaped, bytes that are not UTF-8
 * become '?', and texts are cut between characters. If the buffer is too small, `detail` and `error` are shortened
 * first. Then pointer and request_id are left out. */
#include "proto.h"

#include "text/text.h"

const proto_error_info proto_errors[PROTO_ERROR_COUNT] = {
#define X(id, http, code, title) { http, code, title },
    PROTO_ERROR_MAP(X)
#undef X
};

proto_error proto_error_of(attn_status status)
{
    switch (status) {
    case ATTN_INVALID: return PROTO_E_INVALID_REQUEST;
    case ATTN_TOO_LARGE: return PROTO_E_TOO_LARGE;
    case ATTN_UNSUPPORTED: return PROTO_E_UNSUPPORTED;
    case ATTN_BUSY: return PROTO_E_QUEUE_FULL;
    case ATTN_TIMEOUT:
    /* a client that cancelled its request does not read the answer, so any error will do */
    case ATTN_CANCELLED: return PROTO_E_DEADLINE;
    case ATTN_NO_MEMORY: return PROTO_E_OUT_OF_MEMORY;
    case ATTN_NOT_FOUND: return PROTO_E_NOT_FOUND;
    case ATTN_IN_USE: return PROTO_E_IN_USE;
    case ATTN_QUOTA: return PROTO_E_QUOTA;
    case ATTN_FULL: return PROTO_E_STORAGE_FULL;
    /* HTTP status 503 tells the client that a later attempt may succeed */
    case ATTN_DEVICE_LOST: return PROTO_E_UNAVAILABLE;
    case ATTN_OK:
    case ATTN_DEVICE:
    case ATTN_INTERNAL:
    case ATTN_STATUS_COUNT: break;
    }
    return PROTO_E_INTERNAL;
}

/* Writes one member of a JSON object. Its name is `name`, and its value is the text `before` followed by the text
 * `value`. Each of these texts is cut to at most `room` bytes. */
static void put_member(struct text *t, const char *name, const char *before, const char *value, size_t room)
{
    text_put_string(t, ",\"");
    text_put_string(t, name);
    text_put_string(t, "\":\"");
    text_put_json(t, before, room);
    text_put_json(t, value, room);
    text_put_char(t, '"');
}

/* Largest sizes in bytes, after escaping, of the members detail, pointer and request_id of an error. */
enum { DETAIL_ROOM = 1200, POINTER_ROOM = 256, REQUEST_ID_ROOM = 256 };

size_t proto_error_write(char *buffer, size_t capacity, proto_error error, const char *detail, const char *prefix,
                         const char *pointer, const char *request_id)
{
    const proto_error_info *info = &proto_errors[(unsigned)error < PROTO_ERROR_COUNT ? error : PROTO_E_INTERNAL];
    if (capacity == 0) return 0;
    if (!prefix) prefix = "";
    if (!pointer) pointer = "";
    if (!detail || !*detail) detail = info->title;

    for (size_t room = DETAIL_ROOM;; room /= 2) {
        struct text t = text_in(buffer, capacity);
        text_printf(&t, "{\"type\":\"urn:attnd:%s\",\"title\":\"%s\",\"status\":%d,\"code\":\"%s\"", info->code,
                    info->title, info->http, info->code);
        if (request_id && *request_id && room) put_member(&t, "request_id", "", request_id, REQUEST_ID_ROOM);
        if ((*prefix || *pointer) && room) put_member(&t, "pointer", prefix, pointer, POINTER_ROOM);
        put_member(&t, "detail", "", detail, room);
        put_member(&t, "error", "", detail, room);
        text_put_char(&t, '}');
        if (t.failure == TEXT_FINE) return t.used;
        if (room == 0) break;
    }
    struct text t = text_in(buffer, capacity);
    text_put_string(&t, "{}");
    return t.used;
}
