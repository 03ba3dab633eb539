/* scan.c: reads the body once, as it arrives. A state machine reads the JSON byte by byte, but long strings are passed
 * to base64_decode_until(), and arrays of numbers to the reader in numbers.c. The sink of a value says where its bytes
 * go: REST (copied), EXTRACTED (decoded into the caller's memory) or NOWHERE (only checked, after an error in an
 * extracted value).
 *
 * The whole state is in struct scan, so a body gives the same result however it is split. The value that is being
 * extracted is the last one in the caller's memory, so it can grow there. There are limits for the stack (`depth`), for
 * JSON without tensor values (`rest_bytes`), for cJSON's nodes (`values`) and for the extracted values
 * (`tensor_bytes`). */
#include "scan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base64.h"
#include "suggestions.h"
#include "numbers.h"
#include "text/text.h"

enum state {
    VALUE,
    FIRST_ELEMENT, /* after '[': a value or ']' must follow */
    FIRST_NAME,    /* after '{': a member's name or '}' must follow */
    NAME,          /* after ',' in an object: a member's name must follow */
    COLON,
    AFTER, /* after a value: ',' or a closing bracket must follow */
    STRING,
    ESCAPE,    /* after '\' */
    HEX,       /* the next bytes are the four hexadecimal digits of an escape \uXXXX */
    LOW_SLASH, /* after a high surrogate: the '\' of a low surrogate must follow */
    LOW_U,     /* after the '\' of a low surrogate: 'u' must follow */
    /* the states from here to EXPONENT_DIGITS: inside a number; each is named after the characters read last */
    MINUS,
    ZERO,
    DIGITS,
    POINT,
    FRACTION,
    EXPONENT,
    EXPONENT_SIGN,
    EXPONENT_DIGITS,
    LITERAL, /* inside true, false or null */
    ARRAY,   /* inside an array of numbers that is being extracted */
    DONE,    /* after the body's value: only white space may follow */
};

enum sink { REST, EXTRACTED, NOWHERE };

/* What a member's name says about its value: numbers of a tensor, a dtype, or neither. */
enum name { NAME_OTHER, NAME_DATA, NAME_DTYPE };

enum { NO_EXTRACT = -1, NO_DTYPE = -1, WORD_BYTES = 32 };

struct frame {
    bool object;
    int members;
    int extract; /* for an object: index of the extracted value of its member `data` */
    int dtype;   /* for an object: the value of its member `dtype` */
};

struct scan {
    proto_limits limits;
    bool plain;       /* whether the scanner extracts nothing, because the JSON has no tensor values */
    bool kserve;      /* whether the body is JSON in KServe's format */
    attn_error error; /* the first error of the body, which all later calls return */
    uint64_t offset;  /* offset of the current piece of the body: the number of bytes that came before it */

    enum state state;
    int depth; /* number of open objects and arrays */
    struct frame frames[PROTO_MAX_DEPTH];
    int values;
    const char *literal; /* letters of true, false or null that must still arrive */
    bool is_name;
    enum name name;
    int hex_left; /* number of digits of an escape \uXXXX that must still arrive */
    /* `code`: value of the digits of \uXXXX read so far; `high`: the high surrogate read before it, or 0 */
    uint32_t code, high;
    /* number of UTF-8 continuation bytes that must still arrive; the next one must be from utf8_low to utf8_high */
    int utf8_left;
    unsigned char utf8_low, utf8_high;

    /* where the bytes of the current value go */
    enum sink sink;
    /* if not 0, the contents of the object or array at this depth are checked but not stored */
    int mute_depth;
    char word[WORD_BYTES]; /* the first characters of the current string, with escapes decoded and a NUL */
    /* length of `word`; WORD_BYTES: the string is longer than all words that matter, or not ASCII */
    int word_length;

    struct text rest;

    struct scan_room room;
    size_t used; /* number of bytes of the caller's memory in use */
    scan_extract *extracts;
    int extract_count, extract_capacity;
    base64_decoder base64;
    numbers_reader numbers;
    /* index in `extracts` of the array that the reader `numbers` reads, or has read last; NO_EXTRACT: none yet */
    int numbers_extract;
    /* where the array that `numbers` reads begins: the offset of its '[' from the start of the body */
    uint64_t numbers_begin;
};

/* ---- Error messages ---------------------------------------------------------------------------------------------- */

static attn_status fail(scan *s, attn_status status, uint64_t at, const char *text)
{
    return attn_fail(&s->error, status, "", "byte %llu: %s", (unsigned long long)at, text);
}

#define BYTES_BEHIND \
    " (bytes of tensors? The header Inference-Header-Content-Length says how many bytes of the body are JSON)"

/* Makes the syntax error: byte `at` of the body is the character `c`, but JSON allows only what `expected` says
 * there. */
static attn_status unexpected(scan *s, uint64_t at, const char *expected, unsigned char c)
{
    const suggestion_place place = s->state == VALUE || s->state == FIRST_ELEMENT ? SUGGESTION_VALUE
                                   : s->state == NAME || s->state == FIRST_NAME   ? SUGGESTION_NAME
                                   : s->state == DONE                             ? SUGGESTION_END
                                                                                  : SUGGESTION_OTHER;
    const char *const hint = s->kserve && place == SUGGESTION_END ? BYTES_BEHIND : suggestion_character(at, place, c);
    if (c > 0x20 && c < 0x7f)
        return attn_fail(&s->error, ATTN_INVALID, "", "not JSON at byte %llu: expected %s, found '%c'%s",
                         (unsigned long long)at, expected, c, hint);
    return attn_fail(&s->error, ATTN_INVALID, "", "not JSON at byte %llu: expected %s, found byte 0x%02x%s",
                     (unsigned long long)at, expected, c, hint);
}

static const char *expected_in(const scan *s)
{
    switch (s->state) {
    case VALUE: return "a value";
    case FIRST_ELEMENT: return "a value or ']'";
    case FIRST_NAME: return "a member's name in quotes or '}'";
    case NAME: return "a member's name in quotes";
    case COLON: return "':'";
    case AFTER: return s->depth && s->frames[s->depth - 1].object ? "',' or '}'" : "',' or ']'";
    case ESCAPE: return "one of \"\\/bfnrtu after a backslash";
    case HEX: return "a hexadecimal digit";
    case LOW_SLASH:
    case LOW_U: return "the second half of a surrogate pair";
    case MINUS:
    case POINT:
    case EXPONENT_SIGN: return "a digit";
    case EXPONENT: return "a digit or a sign";
    case LITERAL: return "true, false or null";
    case DONE: return "nothing after the value";
    default: return "more";
    }
}

static scan_extract *extract_of(scan *s)
{
    return &s->extracts[s->extract_count - 1];
}

/* Records an error in the value that is being extracted; parse.c later refuses the problem that has the value. */
static void extract_fault(scan *s, scan_fault fault, uint64_t position, uint64_t at, const char *reason)
{
    scan_extract *extract = extract_of(s);
    extract->fault = fault;
    extract->position = position;
    extract->at = at;
    extract->reason = reason;
    extract->bytes = 0;
    s->sink = NOWHERE;
}

/* ---- Memory for JSON without tensor values, and for extracted values --------------------------------------------- */

static attn_status emit(scan *s, const void *text, size_t count)
{
    if (s->sink != REST) return ATTN_OK;
    text_put(&s->rest, text, count);
    switch (s->rest.failure) {
    case TEXT_FINE: return ATTN_OK;
    case TEXT_FULL:
        return attn_fail(&s->error, ATTN_TOO_LARGE, "", "%s more than %zu bytes",
                         s->kserve ? "the JSON but for its arrays of numbers takes"
                                   : "the members other than tensor data take",
                         s->limits.rest_bytes);
    case TEXT_NO_MEMORY: break;
    }
    return attn_fail(&s->error, ATTN_NO_MEMORY, "", "no memory to read the request");
}

static attn_status emit_char(scan *s, char c)
{
    return emit(s, &c, 1);
}

attn_status scan_make_room(struct scan_room *room, size_t used, size_t bytes, attn_error *err)
{
    size_t need;
    void *base = NULL;
    attn_status status;
    if (__builtin_add_overflow(used, bytes, &need) || __builtin_add_overflow(need, PROTO_MEMORY_STEP - 1, &need))
        return attn_fail(err, ATTN_TOO_LARGE, "", "the tensors are too large for memory");
    need -= need % PROTO_MEMORY_STEP;
    if (need <= room->have) return ATTN_OK;
    err->status = ATTN_OK;
    status = room->memory.grow(room->memory.context, need, &base, err);
    if (status != ATTN_OK) {
        if (err->status == ATTN_OK) attn_fail(err, status, "", "no memory for the tensors");
        return status;
    }
    room->base = base;
    room->have = need;
    return ATTN_OK;
}

attn_status scan_take(struct scan_room *room, scan_extract *extract, uint64_t size, const void *bytes, size_t count,
                      size_t *taken, attn_error *err)
{
    const uint64_t left = size - extract->bytes;
    *taken = count < left ? count : (size_t)left;
    const attn_status status = scan_make_room(room, extract->offset + extract->bytes, *taken, err);
    if (status != ATTN_OK) return status;
    memcpy(room->base + extract->offset + extract->bytes, bytes, *taken);
    extract->bytes += *taken;
    return ATTN_OK;
}

static attn_status reserve(scan *s, size_t bytes)
{
    const scan_extract *extract = extract_of(s);
    return scan_make_room(&s->room, extract->offset + extract->bytes, bytes, &s->error);
}

/* Adds `bytes` bytes, which the decoder has stored, to the length of the value that is being extracted. */
static attn_status extracted(scan *s, size_t bytes)
{
    scan_extract *extract = extract_of(s);
    extract->bytes += bytes;
    if ((uint64_t)extract->offset + extract->bytes > (uint64_t)s->limits.tensor_bytes)
        return attn_fail(&s->error, ATTN_TOO_LARGE, "", "the tensors take more than %lld bytes",
                         (long long)s->limits.tensor_bytes);
    return ATTN_OK;
}

/* Begins a value that is extracted. In the rest (the JSON without tensor values), the value's index stands in place of
 * the value. */
static attn_status extract_begin(scan *s, scan_kind kind)
{
    char digits[TEXT_DIGITS], *const end = digits + TEXT_DIGITS, *index;
    attn_status status;
    if (s->extract_count == s->extract_capacity) {
        int capacity = s->extract_capacity ? 2 * s->extract_capacity : 8;
        scan_extract *larger = realloc(s->extracts, (size_t)capacity * sizeof *larger);
        if (!larger) return attn_fail(&s->error, ATTN_NO_MEMORY, "", "no memory to read the request");
        s->extracts = larger;
        s->extract_capacity = capacity;
    }
    index = text_digits_before(end, (uint64_t)s->extract_count);
    status = emit(s, index, (size_t)(end - index));
    if (status != ATTN_OK) return status;
    s->frames[s->depth - 1].extract = s->extract_count;
    s->extracts[s->extract_count++] = (scan_extract){ .kind = kind, .offset = SCAN_ALIGNED(s->used) };
    s->sink = EXTRACTED;
    return ATTN_OK;
}

static void extract_end(scan *s)
{
    const scan_extract *extract = extract_of(s);
    if (extract->fault == SCAN_FINE) s->used = extract->offset + extract->bytes;
}

/* ---- Reading JSON strings, and base64 in them -------------------------------------------------------------------- */

/* Keeps the decoded text of a string in s->word if it is short and ASCII. */
static void word_add(scan *s, const unsigned char *text, size_t count)
{
    if (count >= (size_t)(WORD_BYTES - s->word_length)) {
        s->word_length = WORD_BYTES;
        return;
    }
    memcpy(s->word + s->word_length, text, count);
    s->word_length += (int)count;
}

static bool word_is(const scan *s, const char *word)
{
    const size_t length = strlen(word);
    return (size_t)s->word_length == length && !memcmp(s->word, word, length);
}

/* Returns why the base64 decoder stopped at `found`: a hint from suggestions.c, or the decoder's own reason. */
static const char *base64_fault(scan *s, char found)
{
    const scan_extract *extract = extract_of(s);
    char head[BASE64_HEAD + 1];
    base64_head(&s->base64, s->room.base + extract->offset, extract->bytes, head);
    const char *const suggestion = suggestion_text(head, s->base64.offset, found);
    return suggestion ? suggestion : base64_reason(&s->base64, found);
}

/* Returns the reason why base64 text that ends inside a group of four characters is wrong. Hexadecimal text gets a
 * hint. */
static const char *base64_end_fault(scan *s)
{
    const scan_extract *extract = extract_of(s);
    if (suggestion_is_hex(s->room.base + extract->offset, extract->bytes)) return suggestion_hex;
    if (s->base64.ended) return "a second '=' is missing";
    if (s->base64.held == 1) return "a character or more is missing";
    return "'=' at the end fills it to a multiple of four";
}

/* Reads base64 text up to a quote, an escape, an error, or the end of the received bytes. The escape "\\/" is handled
 * here, because some libraries write every '/' in this way. */
static attn_status base64_text(scan *s, const unsigned char **text, const unsigned char *end, uint64_t at)
{
    const unsigned char *const begin = *text;
    const unsigned char *p = begin;
    uint8_t *out;
    size_t written, total = 0;
    /* 3 more bytes, because a group of four characters may have begun in an earlier piece of the body */
    attn_status status = reserve(s, BASE64_DECODED_MAX((size_t)(end - p)) + 3);
    if (status != ATTN_OK) return status;
    out = s->room.base + extract_of(s)->offset + extract_of(s)->bytes;
    for (;;) {
        p += base64_decode_until(&s->base64, (const char *)p, (size_t)(end - p), out + total, &written);
        total += written;
        if (end - p < 2 || p[0] != '\\' || p[1] != '/') break;
        if (!base64_decode_until(&s->base64, "/", 1, out + total, &written)) break;
        total += written;
        p += 2;
    }
    *text = p;
    if ((status = extracted(s, total)) != ATTN_OK) return status;
    if (p < end && *p != '"' && *p != '\\')
        extract_fault(s, SCAN_BASE64_CHARACTER, s->base64.offset, at + (uint64_t)(p - begin),
                      base64_fault(s, (char)*p));
    return ATTN_OK;
}

static attn_status code_point(scan *s, uint32_t code, uint64_t at)
{
    const unsigned char c = (unsigned char)code;
    if (s->sink == EXTRACTED) {
        const unsigned char *text = &c;
        if (code < 0x80 && code != '"' && code != '\\') return base64_text(s, &text, text + 1, at);
        extract_fault(s, SCAN_BASE64_CHARACTER, s->base64.offset, at,
                      code < 0x80 ? base64_fault(s, (char)code) : base64_reason(&s->base64, '\\'));
        return ATTN_OK;
    }
    if (code < 0x80) word_add(s, &c, 1);
    else s->word_length = WORD_BYTES;
    return ATTN_OK;
}

static attn_status string_end(scan *s, uint64_t at)
{
    attn_status status = emit_char(s, '"');
    if (status != ATTN_OK) return status;
    if (s->is_name) {
        s->name = s->plain                                       ? NAME_OTHER
                  : word_is(s, "data")                           ? NAME_DATA
                  : word_is(s, s->kserve ? "datatype" : "dtype") ? NAME_DTYPE
                                                                 : NAME_OTHER;
        s->state = COLON;
        return ATTN_OK;
    }
    if (s->sink == EXTRACTED) {
        if (!base64_finish(&s->base64)) extract_fault(s, SCAN_BASE64_ENDS, s->base64.offset, at, base64_end_fault(s));
        extract_end(s);
    } else if (s->name == NAME_DTYPE && s->word_length < WORD_BYTES) {
        proto_dtype dtype;
        s->word[s->word_length] = '\0';
        if (proto_dtype_parse(s->word, &dtype)) s->frames[s->depth - 1].dtype = (int)dtype.as;
    }
    s->sink = s->mute_depth ? NOWHERE : REST;
    s->state = AFTER;
    return ATTN_OK;
}

static attn_status string_begin(scan *s, bool is_name)
{
    s->is_name = is_name;
    s->word_length = 0;
    s->state = STRING;
    if (!is_name && s->name == NAME_DATA && !s->mute_depth) {
        s->base64 = (base64_decoder){ 0 };
        return extract_begin(s, SCAN_BASE64);
    }
    return is_name ? emit_char(s, '"') : emit(s, (const char[]){ '"', SCAN_STRING }, 2);
}

/* Reads from *text to the end of the string, an escape, or `end`. *text becomes the place where it stopped. */
static attn_status string(scan *s, const unsigned char **text, const unsigned char *end, uint64_t at)
{
    const unsigned char *const begin = *text, *p = begin;
    attn_status status = ATTN_OK;
    if (s->sink == EXTRACTED) {
        status = base64_text(s, &p, end, at);
    } else if (!s->utf8_left) {
        size_t run = text_plain_run((const char *)p, (const char *)end);
        word_add(s, p, run);
        p += run;
        /* escaped quotes are handled here, because a string that contains JSON has many of them */
        while (end - p >= 2 && p[0] == '\\' && p[1] == '"') {
            run = text_plain_run((const char *)p + 2, (const char *)end);
            word_add(s, p + 1, 1 + run);
            p += 2 + run;
        }
        status = emit(s, begin, (size_t)(p - begin));
    }
    at += (uint64_t)(p - begin);
    *text = p;
    if (status != ATTN_OK || p == end) return status;

    const unsigned char c = *p;
    if (s->utf8_left) {
        if (c < s->utf8_low || c > s->utf8_high) return fail(s, ATTN_INVALID, at, "invalid UTF-8");
        s->utf8_left--;
        s->utf8_low = 0x80, s->utf8_high = 0xbf;
        status = emit_char(s, (char)c);
    } else if (c == '"') {
        status = string_end(s, at);
    } else if (c == '\\') {
        s->state = ESCAPE;
        status = emit_char(s, '\\');
    } else if (c < 0x20) {
        const bool in_base64 = s->name == NAME_DATA && !s->is_name && (c == '\n' || c == '\r');
        return attn_fail(&s->error, ATTN_INVALID, "",
                         "not JSON at byte %llu: control character 0x%02x inside a string%s", (unsigned long long)at, c,
                         in_base64 ? " (a line break in base64? `base64 -w0` writes none)" : "");
    } else if (c >= 0x80) {
        s->utf8_left = text_utf8_more(c, &s->utf8_low, &s->utf8_high);
        if (!s->utf8_left) return fail(s, ATTN_INVALID, at, "invalid UTF-8");
        s->word_length = WORD_BYTES;
        status = emit_char(s, (char)c);
    } else { /* not valid base64: the next call reads the remainder as plain text */
        return ATTN_OK;
    }
    if (status == ATTN_OK) *text = p + 1;
    return status;
}

static attn_status escape(scan *s, unsigned char c, uint64_t at)
{
    static const char shorts[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char *which;
    int digit;
    attn_status status = emit_char(s, (char)c);
    if (status != ATTN_OK) return status;
    switch (s->state) {
    case ESCAPE:
        if (c == 'u') {
            s->state = HEX, s->hex_left = 4, s->code = 0;
            return ATTN_OK;
        }
        which = c ? strchr(shorts, c) : NULL;
        if (!which) return unexpected(s, at, expected_in(s), c);
        s->state = STRING;
        return code_point(s, (unsigned char)meanings[which - shorts], at);
    case LOW_SLASH:
        if (c != '\\') return unexpected(s, at, expected_in(s), c);
        s->state = LOW_U;
        return ATTN_OK;
    case LOW_U:
        if (c != 'u') return unexpected(s, at, expected_in(s), c);
        s->state = HEX, s->hex_left = 4, s->code = 0;
        return ATTN_OK;
    default: break;
    }
    digit = text_hex_digit(c);
    if (digit < 0) return unexpected(s, at, expected_in(s), c);
    s->code = s->code * 16 + (uint32_t)digit;
    if (--s->hex_left) return ATTN_OK;
    if (s->high) {
        if (s->code < 0xdc00 || s->code > 0xdfff)
            return fail(s, ATTN_INVALID, at, "the second half of a surrogate pair must be \\udc00 to \\udfff");
        s->code = 0x10000 + ((s->high - 0xd800) << 10) + (s->code - 0xdc00);
        s->high = 0;
    } else if (s->code >= 0xd800 && s->code <= 0xdbff) {
        s->high = s->code;
        s->state = LOW_SLASH;
        return ATTN_OK;
    } else if (s->code >= 0xdc00 && s->code <= 0xdfff) {
        return fail(s, ATTN_INVALID, at, "a surrogate without its first half");
    } else if (s->code == 0) {
        return fail(s, ATTN_INVALID, at, "\\u0000 is not accepted (bytes are sent in base64)");
    }
    s->state = STRING;
    return code_point(s, s->code, at);
}

/* ---- Entering and leaving objects and arrays --------------------------------------------------------------------- */

static attn_status push(scan *s, bool object, uint64_t at)
{
    int depth = s->limits.depth < PROTO_MAX_DEPTH ? s->limits.depth : PROTO_MAX_DEPTH;
    if (s->depth >= depth)
        return attn_fail(&s->error, ATTN_INVALID, "", "byte %llu: nested deeper than %d", (unsigned long long)at,
                         depth);
    s->frames[s->depth++] = (struct frame){ .object = object, .extract = NO_EXTRACT, .dtype = NO_DTYPE };
    s->name = NAME_OTHER; /* elements of an array have no names */
    s->state = object ? FIRST_NAME : FIRST_ELEMENT;
    return ATTN_OK;
}

/* Ends an object or array. If an array of numbers came before its dtype, the numbers are converted now, while they are
 * still the last value in memory. */
static attn_status pop(scan *s, char c)
{
    const struct frame frame = s->frames[--s->depth];
    attn_status status = emit_char(s, c);
    if (status != ATTN_OK) return status;
    if (s->mute_depth > s->depth) {
        s->mute_depth = 0;
        s->sink = REST;
    }
    s->name = NAME_OTHER;
    s->state = s->depth ? AFTER : DONE;
    if (frame.object && frame.extract != NO_EXTRACT && frame.extract == s->numbers_extract &&
        frame.extract == s->extract_count - 1 && frame.dtype != NO_DTYPE) {
        scan_extract *extract = extract_of(s);
        double *values = (double *)(void *)(s->room.base + extract->offset);
        uint64_t element;
        if (extract->kind != SCAN_ARRAY || extract->typed || extract->fault != SCAN_FINE) return ATTN_OK;
        extract->typed = true;
        extract->dtype = (attn_dtype)frame.dtype;
        if (numbers_convert(&s->numbers, values, (numbers_type)extract->dtype, values, &element)) {
            extract->bytes = (size_t)extract->elements * attn_dtype_bytes(extract->dtype);
            extract_end(s);
        } else {
            s->used = extract->offset;
            extract_fault(s, SCAN_ARRAY_ELEMENT, element, 0, s->numbers.error);
            s->sink = REST;
        }
    }
    return ATTN_OK;
}

/* ---- Reading arrays of numbers ----------------------------------------------------------------------------------- */

/* Largest number of characters per call of numbers_read(), which limits the memory reserved for the elements. */
enum { ARRAY_BLOCK = 1 << 15 };

static attn_status array_begin(scan *s, uint64_t at)
{
    const int dtype = s->frames[s->depth - 1].dtype;
    attn_status status = extract_begin(s, SCAN_ARRAY);
    if (status != ATTN_OK) return status;
    scan_extract *extract = extract_of(s);
    extract->typed = dtype != NO_DTYPE;
    if (extract->typed) extract->dtype = (attn_dtype)dtype;
    numbers_begin(&s->numbers, extract->typed ? (numbers_type)dtype : NUMBERS_UNTYPED);
    s->numbers.bare_words = s->kserve;
    s->numbers_extract = s->extract_count - 1;
    s->numbers_begin = at;
    s->state = ARRAY;
    return ATTN_OK;
}

static attn_status consume(scan *s, const unsigned char *text, const unsigned char *end, uint64_t at);

/* Handles a wrong token in an array of tensor data: a word, or a number that does not fit the dtype. Records the error.
 * The text may still be JSON, so the rest of the array is read from the token's beginning, but not stored. `at`: offset
 * of the first byte that numbers_read() has not taken. */
static attn_status array_fault(scan *s, uint64_t at)
{
    char token[NUMBERS_CHARS];
    size_t length;
    const numbers_place place = numbers_stopped(&s->numbers, token, &length);
    const int levels = s->numbers.depth;
    extract_fault(s, SCAN_ARRAY_TEXT, s->numbers.elements, s->numbers_begin + s->numbers.offset, s->numbers.error);
    s->mute_depth = s->depth + 1;
    at -= length; /* now `at` is the offset of the token's first byte, which may be in an earlier piece of the body */
    for (int level = 0; level < levels; level++) {
        attn_status status = push(s, false, at);
        if (status != ATTN_OK) return status;
    }
    s->state = place == NUMBERS_AFTER ? AFTER : place == NUMBERS_FIRST ? FIRST_ELEMENT : VALUE;
    return consume(s, (const unsigned char *)token, (const unsigned char *)token + length, at);
}

static attn_status array(scan *s, const unsigned char **text, const unsigned char *end, uint64_t at)
{
    const size_t count = end - *text < ARRAY_BLOCK ? (size_t)(end - *text) : ARRAY_BLOCK;
    const size_t bytes = numbers_bytes(s->numbers.type);
    const unsigned char *const begin = *text;
    scan_extract *extract = extract_of(s);
    numbers_status result;
    size_t taken, written;
    attn_status status = reserve(s, (count / 2 + 1) * bytes);
    if (status != ATTN_OK) return status;
    result = numbers_read(&s->numbers, (const char *)begin, count, s->room.base + extract->offset + extract->bytes,
                          count / 2 + 1, &taken, &written);
    if ((status = extracted(s, written * bytes)) != ATTN_OK) return status;
    *text = begin + taken;
    switch (result) {
    case NUMBERS_FULL: /* impossible, because there is room for all elements that the text can hold */
    case NUMBERS_MORE: return ATTN_OK;
    case NUMBERS_DONE:
        extract->elements = (int64_t)s->numbers.elements;
        extract->rank = s->numbers.rank;
        memcpy(extract->shape, s->numbers.shape, sizeof extract->shape);
        extract_end(s);
        s->sink = REST;
        s->state = AFTER;
        return ATTN_OK;
    default: return array_fault(s, at + taken);
    }
}

/* ---- The state machine of JSON's grammar ------------------------------------------------------------------------- */

static attn_status value_begin(scan *s, unsigned char c, uint64_t at)
{
    attn_status status;
    if (s->sink == REST && ++s->values > s->limits.values)
        return attn_fail(
            &s->error, ATTN_TOO_LARGE, "", "more than %d values outside tensor data%s", s->limits.values,
            s->plain
                ? ""
                : "; a tensor is {\"shape\": ..., \"dtype\": ..., \"data\": ...}, and its numbers go into \"data\"");
    switch (c) {
    case '{':
    case '[':
        if (c == '[' && s->name == NAME_DATA && s->sink == REST) return array_begin(s, at);
        status = emit_char(s, (char)c);
        return status == ATTN_OK ? push(s, c == '{', at) : status;
    case '"': return string_begin(s, false);
    case 't': s->literal = "rue"; break;
    case 'f': s->literal = "alse"; break;
    case 'n': s->literal = "ull"; break;
    case '-': s->state = MINUS; return emit(s, (const char[]){ '"', SCAN_NUMBER, '-' }, 3);
    case '0': s->state = ZERO; return emit(s, (const char[]){ '"', SCAN_NUMBER, '0' }, 3);
    default:
        if (c < '1' || c > '9') return unexpected(s, at, expected_in(s), c);
        s->state = DIGITS;
        return emit(s, (const char[]){ '"', SCAN_NUMBER, (char)c }, 3);
    }
    s->state = LITERAL;
    return emit_char(s, (char)c);
}

/* Reads one character inside a number. *more becomes false if the number has ended before this character. */
static attn_status number(scan *s, unsigned char c, uint64_t at, bool *more)
{
    const bool digit = c >= '0' && c <= '9', exponent = c == 'e' || c == 'E';
    *more = true;
    switch (s->state) {
    case MINUS: s->state = c == '0' ? ZERO : digit ? DIGITS : DONE; break;
    case ZERO:
        if (digit) return fail(s, ATTN_INVALID, at - 1, "a number may not begin with 0 and another digit");
        s->state = c == '.' ? POINT : exponent ? EXPONENT : AFTER;
        break;
    case DIGITS: s->state = digit ? DIGITS : c == '.' ? POINT : exponent ? EXPONENT : AFTER; break;
    case POINT: s->state = digit ? FRACTION : DONE; break;
    case FRACTION: s->state = digit ? FRACTION : exponent ? EXPONENT : AFTER; break;
    case EXPONENT: s->state = c == '+' || c == '-' ? EXPONENT_SIGN : digit ? EXPONENT_DIGITS : DONE; break;
    case EXPONENT_SIGN: s->state = digit ? EXPONENT_DIGITS : DONE; break;
    default: s->state = digit ? EXPONENT_DIGITS : AFTER; break;
    }
    if (s->state == DONE) return unexpected(s, at, "a digit", c);
    if (s->state != AFTER) return emit_char(s, (char)c);
    *more = false;
    return emit_char(s, '"');
}

static bool is_number(enum state state)
{
    return state >= MINUS && state <= EXPONENT_DIGITS;
}

/* Reads the bytes from `text` to `end`. The byte at `text` is byte `at` of the body. */
static attn_status consume(scan *s, const unsigned char *text, const unsigned char *end, uint64_t at)
{
    const unsigned char *p = text;
    attn_status status = ATTN_OK;
    while (p < end && status == ATTN_OK) {
        const uint64_t here = at + (uint64_t)(p - text);
        unsigned char c = *p;
        switch (s->state) {
        case STRING: status = string(s, &p, end, here); continue;
        case ARRAY: status = array(s, &p, end, here); continue;
        case ESCAPE:
        case HEX:
        case LOW_SLASH:
        case LOW_U:
            status = escape(s, c, here);
            p++;
            continue;
        case LITERAL:
            if (c != (unsigned char)*s->literal) return unexpected(s, here, expected_in(s), c);
            if (!*++s->literal) s->state = AFTER;
            status = emit_char(s, (char)c);
            p++;
            continue;
        default: break;
        }
        if (is_number(s->state)) {
            bool more;
            status = number(s, c, here, &more);
            p += more;
            continue;
        }
        if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
            p++;
            continue;
        }
        if (s->state == AFTER && s->depth == 0) s->state = DONE;
        switch (s->state) {
        case VALUE: break;
        case FIRST_ELEMENT:
            if (c == ']') {
                status = pop(s, ']');
                p++;
                continue;
            }
            break;
        case FIRST_NAME:
        case NAME:
            if (c == '}' && s->state == FIRST_NAME) {
                status = pop(s, '}');
            } else if (c == '"') {
                if (++s->frames[s->depth - 1].members > s->limits.members)
                    return attn_fail(&s->error, ATTN_INVALID, "", "byte %llu: an object of more than %d members (%s)",
                                     (unsigned long long)here, s->limits.members, suggestion_typed_array);
                status = string_begin(s, true);
            } else {
                return unexpected(s, here, expected_in(s), c);
            }
            p++;
            continue;
        case COLON:
            if (c != ':') return unexpected(s, here, expected_in(s), c);
            s->state = VALUE;
            status = emit_char(s, ':');
            p++;
            continue;
        case AFTER: {
            const bool object = s->frames[s->depth - 1].object;
            if (c == ',') {
                s->state = object ? NAME : VALUE;
                status = emit_char(s, ',');
            } else if (c == (object ? '}' : ']')) {
                status = pop(s, (char)c);
            } else {
                return unexpected(s, here, expected_in(s), c);
            }
            p++;
            continue;
        }
        default: return unexpected(s, here, expected_in(s), c);
        }
        status = value_begin(s, c, here);
        /* The '[' of an array of numbers is not skipped, because the reader in numbers.c expects it. */
        if (s->state != ARRAY) p++;
    }
    return status;
}

/* ---- The public functions ---------------------------------------------------------------------------------------- */

scan *scan_new(const proto_limits *limits, const proto_memory *memory)
{
    scan *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->limits = *limits;
    s->room.memory = *memory;
    s->rest = text_growing(limits->rest_bytes);
    s->numbers_extract = NO_EXTRACT;
    return s;
}

scan *scan_new_plain(const proto_limits *limits, uint64_t at)
{
    scan *const s = scan_new(limits, &(proto_memory){ 0 });
    if (!s) return NULL;
    s->plain = true;
    s->offset = at;
    return s;
}

scan *scan_new_kserve(const proto_limits *limits, const proto_memory *memory)
{
    scan *const s = scan_new(limits, memory);
    if (s) s->kserve = true;
    return s;
}

struct scan_room *scan_room(scan *s)
{
    return &s->room;
}

void scan_free(scan *s)
{
    if (!s) return;
    text_free(&s->rest);
    free(s->extracts);
    free(s);
}

attn_status scan_feed(scan *s, const void *bytes, size_t count, attn_error *err)
{
    if (s->error.status == ATTN_OK && count) {
        const unsigned char *text = bytes;
        const attn_status status = consume(s, text, text + count, s->offset);
        s->offset += count;
        assert(status == s->error.status);
        assert(s->depth <= PROTO_MAX_DEPTH && s->used <= s->room.have);
        assert(status != ATTN_OK || (s->values <= s->limits.values && s->rest.used <= s->limits.rest_bytes));
        (void)status;
    }
    if (s->error.status != ATTN_OK && err) *err = s->error;
    return s->error.status;
}

attn_status scan_finish(scan *s, attn_error *err)
{
    const bool digit_read = s->state == ZERO || s->state == DIGITS || s->state == FRACTION ||
                            s->state == EXPONENT_DIGITS;
    /* a number outside objects and arrays ends with the body */
    if (s->error.status == ATTN_OK && s->depth == 0 && digit_read) {
        bool more;
        number(s, ' ', s->offset, &more);
    }
    if (s->error.status == ATTN_OK && s->state != DONE && !(s->state == AFTER && s->depth == 0)) {
        if (s->state == VALUE && s->depth == 0)
            attn_fail(&s->error, ATTN_INVALID, "", "the body is empty, expected a JSON object with %s",
                      s->kserve ? "inputs" : "q, k and v");
        else
            attn_fail(&s->error, ATTN_INVALID, "",
                      "not JSON: the body ends after %llu bytes, before the value is complete (was it cut off?)",
                      (unsigned long long)s->offset);
    }
    if (s->error.status != ATTN_OK && err) *err = s->error;
    return s->error.status;
}

const char *scan_rest(const scan *s, size_t *length)
{
    *length = s->rest.used;
    return s->rest.at;
}

size_t scan_held_bytes(const scan *s)
{
    return s->rest.size + (size_t)s->extract_capacity * sizeof *s->extracts;
}

int scan_values(const scan *s)
{
    return s->values;
}

const scan_extract *scan_extracts(const scan *s, int *count)
{
    *count = s->extract_count;
    return s->extracts;
}

void *scan_memory(const scan *s, size_t *bytes)
{
    *bytes = s->used;
    return s->room.base;
}
