/* errors.c: from a status to what a client reads.
 *
 * PROTO_ERROR_MAP in proto.h is the whole list: HTTP status, slug, title. The sentence (`detail`) comes from where
 * the fault was found and goes out as it is, so it may hold anything a client sent. Two invariants:
 *   1. What proto_problem_write() writes is always one valid JSON object, whatever the strings hold and however small the
 *      buffer: control characters are escaped, bytes that are no UTF-8 become '?', and texts are cut between characters.
 *   2. When the buffer is short, `detail` and `error` are shortened first; then pointer and request_id are left out. */
#include "proto.h"

#include <stdio.h>
#include <string.h>

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
    case ATTN_CANCELLED: return PROTO_E_DEADLINE; /* nobody is there to read that it was cancelled */
    case ATTN_NO_MEMORY: return PROTO_E_OUT_OF_MEMORY;
    case ATTN_NOT_FOUND: return PROTO_E_NOT_FOUND;
    case ATTN_QUOTA: return PROTO_E_QUOTA;
    case ATTN_DEVICE_LOST: return PROTO_E_UNAVAILABLE; /* another process, or this one after a restart, can */
    case ATTN_OK:                                      /* no error to speak of: being asked is a fault of ours */
    case ATTN_DEVICE:
    case ATTN_INTERNAL:
    case ATTN_STATUS_COUNT: break;
    }
    return PROTO_E_INTERNAL;
}

/* Appends to a buffer of fixed size. What does not fit sets `full`, and the text is not to be used. */
struct writer {
    char *text;
    size_t capacity, length;
    bool full;
};

static void put(struct writer *w, const char *text, size_t count)
{
    if (count > w->capacity - w->length) {
        w->full = true;
        return;
    }
    memcpy(w->text + w->length, text, count);
    w->length += count;
}

/* Bytes of the UTF-8 character at `text`, 0 where there is none (RFC 3629: no overlong forms, no surrogates). */
static size_t character_bytes(const unsigned char *text)
{
    const unsigned char c = text[0];
    if (c < 0x80) return 1;
    if (c >= 0xc2 && c <= 0xdf) return (text[1] & 0xc0) == 0x80 ? 2 : 0;
    if (c >= 0xe0 && c <= 0xef) {
        if (c == 0xe0 && text[1] < 0xa0) return 0;
        if (c == 0xed && text[1] > 0x9f) return 0;
        return (text[1] & 0xc0) == 0x80 && (text[2] & 0xc0) == 0x80 ? 3 : 0;
    }
    if (c >= 0xf0 && c <= 0xf4) {
        if (c == 0xf0 && text[1] < 0x90) return 0;
        if (c == 0xf4 && text[1] > 0x8f) return 0;
        return (text[1] & 0xc0) == 0x80 && (text[2] & 0xc0) == 0x80 && (text[3] & 0xc0) == 0x80 ? 4 : 0;
    }
    return 0;
}

/* `text` inside a JSON string, at most `room` bytes once escaped. */
static void put_escaped(struct writer *w, const char *text, size_t room)
{
    const unsigned char *p = (const unsigned char *)text;
    while (*p) {
        char form[8];
        size_t bytes = character_bytes(p), length;
        if (*p == '"' || *p == '\\') length = (size_t)snprintf(form, sizeof form, "\\%c", *p);
        else if (*p < 0x20 || *p == 0x7f) length = (size_t)snprintf(form, sizeof form, "\\u%04x", *p);
        else if (bytes == 0) form[0] = '?', length = 1, bytes = 1;
        else memcpy(form, p, length = bytes);
        if (length > room) return;
        put(w, form, length);
        room -= length;
        p += bytes;
    }
}

static void put_member(struct writer *w, const char *name, const char *value, size_t room)
{
    put(w, ",\"", 2);
    put(w, name, strlen(name));
    put(w, "\":\"", 3);
    put_escaped(w, value, room);
    put(w, "\"", 1);
}

/* How many bytes the escaped `detail` may take at most; attn_error.text is shorter than this unless it is full of
 * control characters. Halved until the document fits. */
enum { DETAIL_ROOM = 1200, POINTER_ROOM = 256, REQUEST_ID_ROOM = 256 };

size_t proto_problem_write(char *buffer, size_t capacity, proto_error error, const char *detail, const char *prefix,
                           const char *pointer, const char *request_id)
{
    const proto_error_info *info = &proto_errors[(unsigned)error < PROTO_ERROR_COUNT ? error : PROTO_E_INTERNAL];
    char where[2 * POINTER_ROOM], head[256];
    if (capacity == 0) return 0;
    snprintf(where, sizeof where, "%s%s", prefix ? prefix : "", pointer ? pointer : "");
    snprintf(head, sizeof head, "{\"type\":\"urn:attnd:%s\",\"title\":\"%s\",\"status\":%d,\"code\":\"%s\"", info->code,
             info->title, info->http, info->code);
    if (!detail || !*detail) detail = info->title;

    for (size_t room = DETAIL_ROOM;; room /= 2) {
        struct writer w = { buffer, capacity - 1, 0, false };
        put(&w, head, strlen(head));
        if (request_id && *request_id && room) put_member(&w, "request_id", request_id, REQUEST_ID_ROOM);
        if (*where && room) put_member(&w, "pointer", where, POINTER_ROOM);
        put_member(&w, "detail", detail, room);
        put_member(&w, "error", detail, room);
        put(&w, "}", 1);
        if (!w.full) {
            buffer[w.length] = '\0';
            return w.length;
        }
        if (room == 0) break;
    }
    /* Not even the fixed members fit. */
    struct writer w = { buffer, capacity - 1, 0, false };
    put(&w, "{}", 2);
    buffer[w.length] = '\0';
    return w.length;
}
