#include "tree.h"

#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "suggestions.h"
#include "scan.h"

/* ---- Memory of cJSON's trees ------------------------------------------------------------------------------------- */

/* cJSON would allocate each node and each name separately: 57 allocations for a body of three tensors. Here nodes and
 * names are cut from large blocks, which are freed together. */
enum { TREE_BYTES = 8192, TREE_ALIGNMENT = 16 };

struct tree_block {
    struct tree_block *before;
    size_t size;
    _Alignas(TREE_ALIGNMENT) char bytes[];
};

/* the memory from which this thread allocates trees: tree_enter() sets it, and tree_leave() makes it NULL again */
static _Thread_local struct tree_memory *entered;

static size_t aligned(size_t bytes)
{
    return (bytes + TREE_ALIGNMENT - 1) / TREE_ALIGNMENT * TREE_ALIGNMENT;
}

static void *tree_malloc(size_t bytes)
{
    struct tree_memory *const memory = entered;
    if (memory == NULL) return malloc(bytes);
    if (memory->last == NULL || aligned(bytes) > memory->last->size - memory->used) {
        const size_t size = aligned(bytes) > TREE_BYTES ? aligned(bytes) : TREE_BYTES;
        struct tree_block *const block = malloc(sizeof *block + size);
        if (block == NULL) return NULL;
        *block = (struct tree_block){ .before = memory->last, .size = size };
        memory->last = block;
        memory->used = 0;
    }
    void *const piece = memory->last->bytes + memory->used;
    memory->used += aligned(bytes);
    return piece;
}

static void tree_free(void *piece)
{
    if (!entered) free(piece);
}

static pthread_once_t hooks_once = PTHREAD_ONCE_INIT;
static void set_hooks(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){ tree_malloc, tree_free });
}

void tree_enter(struct tree_memory *memory)
{
    pthread_once(&hooks_once, set_hooks);
    assert(!entered);
    entered = memory;
}

void tree_leave(void)
{
    entered = NULL;
}

void tree_forget(struct tree_memory *memory)
{
    for (struct tree_block *block = memory->last, *before; block; block = before) {
        before = block->before;
        free(block);
    }
    *memory = (struct tree_memory){ 0 };
}

/* ---- Parsing a body's JSON without its tensor values ------------------------------------------------------------- */

/* The functions below parse the rest (a body's JSON without tensor values), which the scanner has checked. cJSON's own
 * parser takes ten or more instructions for each character. Each take_ function reads text at *at and moves *at behind
 * it. NULL: out of memory. */

static cJSON *new_value(int type)
{
    cJSON *const value = tree_malloc(sizeof *value);
    if (value) *value = (cJSON){ .type = type };
    return value;
}

static void add_last(cJSON *to, cJSON *value)
{
    if (to->child == NULL) to->child = value;
    else {
        value->prev = to->child->prev;
        value->prev->next = value;
    }
    to->child->prev = value;
}

static const char *closing_quote(const char *inside)
{
    for (const char *p = inside;; p++) {
        int slashes = 0;
        p = strchr(p, '"');
        while (p[-1 - slashes] == '\\') slashes++;
        if (slashes % 2 == 0) return p;
    }
}

static uint32_t code_at(const char *digits)
{
    uint32_t code = 0;
    for (int i = 0; i < 4; i++) code = code * 16 + (uint32_t)text_hex_digit((unsigned char)digits[i]);
    return code;
}

static char *put_utf8(char *to, uint32_t code)
{
    static const unsigned char first[] = { 0, 0, 0xc0, 0xe0, 0xf0 };
    const int bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = bytes - 1; i > 0; i--, code >>= 6) to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(first[bytes] | code);
    return to + bytes;
}

/* Writes the character of the escape at `from` to *to, and returns the text behind the escape. */
static const char *take_escape(const char *from, char **to)
{
    static const char shorts[] = "bfnrt", meanings[] = "\b\f\n\r\t";
    if (from[1] != 'u') {
        const char *const which = strchr(shorts, from[1]);
        *(*to)++ = which ? meanings[which - shorts] : from[1];
        return from + 2;
    }
    uint32_t code = code_at(from + 2);
    from += 6;
    if (code >= 0xd800 && code <= 0xdbff) { /* the first half of a surrogate pair; the second half follows */
        code = 0x10000 + ((code - 0xd800) << 10) + (code_at(from + 2) - 0xdc00);
        from += 6;
    }
    *to = put_utf8(*to, code);
    return from;
}

/* Reads a string into new memory and decodes its escapes, which never makes it longer. */
static char *take_string(const char **at)
{
    const char *from = *at + 1, *const end = closing_quote(from);
    char *const string = tree_malloc((size_t)(end - from) + 1), *to = string;
    while (string && from < end) {
        const char *const slash = memchr(from, '\\', (size_t)(end - from));
        const size_t plain = (size_t)((slash ? slash : end) - from);
        memcpy(to, from, plain);
        to += plain;
        from = slash ? take_escape(slash, &to) : end;
    }
    if (string) *to = '\0';
    *at = end + 1;
    return string;
}

static bool is_container(const cJSON *value)
{
    return cJSON_IsObject(value) || cJSON_IsArray(value);
}

/* Reads a string value. Its first letter, SCAN_STRING or SCAN_NUMBER, says whether the body has a string or a number
 * here. */
static cJSON *take_tagged(const char **at)
{
    cJSON *const value = new_value((*at)[1] == SCAN_NUMBER ? cJSON_Raw : cJSON_String);
    if (value == NULL) return NULL;
    ++*at; /* now *at is the tag letter, which take_string() skips like an opening quote */
    value->valuestring = take_string(at);
    return value->valuestring ? value : NULL;
}

/* Reads a value. Of an object or array, it reads only the opening bracket. */
static cJSON *take_value(const char **at)
{
    const char first = **at;
    if (first == '"') return take_tagged(at);
    cJSON *const value = new_value(first == '{'   ? cJSON_Object
                                   : first == '[' ? cJSON_Array
                                   : first == 't' ? cJSON_True
                                   : first == 'f' ? cJSON_False
                                   : first == 'n' ? cJSON_NULL
                                                  : cJSON_Number);
    if (value == NULL) return NULL;
    if (is_container(value)) ++*at;
    else if (cJSON_IsNumber(value)) {
        uint64_t index = 0;
        *at = text_read_number(*at, &index);
        value->valueint = (int)index;
        value->valuedouble = (double)index;
    } else *at += first == 'f' ? sizeof "false" - 1 : sizeof "true" - 1;
    return value;
}

/* Reads the next member or element of the object or array `in`, and appends it there. If `in` is NULL, reads the
 * outermost value. */
static cJSON *take_member(cJSON *in, const char **at)
{
    char *name = NULL;
    if (in && cJSON_IsObject(in)) {
        name = take_string(at);
        if (name == NULL) return NULL;
        ++*at;
    }
    cJSON *const value = take_value(at);
    if (value == NULL) return NULL;
    value->string = name;
    if (in) add_last(in, value);
    return value;
}

cJSON *tree_parse(const char *rest, size_t bytes)
{
    assert(entered);
    cJSON *open[PROTO_MAX_DEPTH], *root = NULL; /* open[0] is the outermost object or array */
    int depth = 0;
    const char *at = rest;
    do {
        cJSON *const value = take_member(depth ? open[depth - 1] : NULL, &at);
        if (value == NULL) return NULL;
        if (root == NULL) root = value;
        if (is_container(value) && *at != '}' && *at != ']') {
            assert(depth < PROTO_MAX_DEPTH); /* the scanner refuses deeper nesting */
            open[depth++] = value;
            continue;
        }
        if (is_container(value)) at++;
        for (; depth && *at != ','; depth--) at++;
        if (depth) at++;
    } while (depth);
    assert(at == rest + bytes);
    (void)bytes;
    return root;
}

/* ---- Parsing JSON that is inside a string ------------------------------------------------------------------------ */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Reads a quoted string of plain characters, appends it to the list, and returns the text after it. Returns NULL if
 * there is no such string, or it is too long. */
static const char *take_word(const char *text, const char *end, cJSON *list)
{
    if (*text++ != '"') return NULL;
    const size_t length = text_plain_run(text, end);
    if (text[length] != '"' || length >= PROTO_CONTEXT_BYTES) return NULL;
    cJSON *const value = new_value(cJSON_String);
    char *const word = value ? tree_malloc(length + 1) : NULL;
    if (word == NULL) return NULL;
    memcpy(word, text, length);
    word[length] = '\0';
    value->valuestring = word;
    add_last(list, value);
    return text + length + 1;
}

/* Reads a list of words, such as ids of caches, faster than the scanner: 11 us instead of 78 us for 1024 ids (AMD EPYC,
 * one core, 2026-11-27). NULL: not a list of words, or an error, which the scanner then reports. */
static cJSON *list_of_words(const char *text, size_t bytes, int most, int *values)
{
    const char *const end = text + bytes;
    cJSON *const list = *text == '[' ? cJSON_CreateArray() : NULL;
    int count = 1; /* starts at 1, because the list itself is a value */
    const char *at = list ? text + 1 : NULL;
    while (at) {
        while (is_space(*at)) at++;
        at = ++count <= most ? take_word(at, end, list) : NULL;
        while (at && is_space(*at)) at++;
        if (at == NULL || *at != ',') break;
        at++;
    }
    if (at && *at == ']') {
        do at++;
        while (is_space(*at));
        if (*at == '\0') {
            *values += count;
            return list;
        }
    }
    return NULL;
}

attn_status tree_of_text(const char *text, const proto_limits *limits, int *values, cJSON **value)
{
    const size_t length = strlen(text);
    /* Upper bound on the bytes that the scanner would store. The scanner stores one byte more for each string, so that
     * `"",` becomes `"s",`. */
    const size_t most = length + length / 3;
    if (most < limits->rest_bytes && (*value = list_of_words(text, length, limits->values - *values, values)))
        return ATTN_OK;
    proto_limits left = *limits;
    attn_error err = { 0 };
    attn_status status = ATTN_NO_MEMORY;
    left.values -= *values;
    scan *const s = scan_new_plain(&left, 0);
    if (s) status = scan_feed(s, text, length, &err);
    if (status == ATTN_OK) status = scan_finish(s, &err);
    if (status == ATTN_OK) {
        size_t bytes;
        const char *const rest = scan_rest(s, &bytes);
        *value = tree_parse(rest, bytes);
        if (!*value) status = ATTN_NO_MEMORY;
        *values += scan_values(s);
    }
    scan_free(s);
    return status == ATTN_NO_MEMORY || status == ATTN_TOO_LARGE ? status : ATTN_OK;
}

/* ---- Reading values of a tree ------------------------------------------------------------------------------------ */

const char *tree_string(const cJSON *value)
{
    return cJSON_GetStringValue(value);
}

const char *tree_number(const cJSON *value)
{
    return cJSON_IsRaw(value) ? value->valuestring : NULL;
}

const char *tree_describe(const cJSON *value, char quote[TREE_QUOTE_BYTES])
{
    const char *text;
    if ((text = tree_string(value))) {
        const int length = (int)text_cut(text, 32);
        snprintf(quote, TREE_QUOTE_BYTES, "'%.*s'%s", length, text, text[length] ? "..." : "");
    } else if ((text = tree_number(value))) {
        snprintf(quote, TREE_QUOTE_BYTES, "%.24s%s", text, strlen(text) > 24 ? "..." : "");
    } else {
        snprintf(quote, TREE_QUOTE_BYTES, "%s",
                 cJSON_IsNull(value)     ? "null"
                 : cJSON_IsTrue(value)   ? "true"
                 : cJSON_IsFalse(value)  ? "false"
                 : cJSON_IsObject(value) ? "an object"
                                         : "an array");
    }
    return quote;
}

bool tree_integer(const cJSON *value, int64_t minimum, int64_t maximum, int64_t *integer)
{
    const char *text = tree_number(value);
    const bool negative = text && *text == '-';
    uint64_t n;
    if (!text || !text_is_number(text + negative, INT64_MAX, &n) || (negative && n == 0)) return false;
    const int64_t signed_n = negative ? -(int64_t)n : (int64_t)n;
    if (signed_n < minimum || signed_n > maximum) return false;
    *integer = signed_n;
    return true;
}

/* ---- Hints and messages about members' names --------------------------------------------------------------------- */

const char *tree_suggestion(const char *place, const struct text_nearest *best, char suggestion[TREE_SUGGESTION_BYTES])
{
    const char *const found = suggestion_of(place, best->unknown);
    if (found) snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %s", found);
    else if (best->name) snprintf(suggestion, TREE_SUGGESTION_BYTES, ", did you mean '%s'?", best->name);
    else *suggestion = '\0';
    return suggestion;
}

enum { POINTER_BYTES = sizeof(tree_member) - 2 };

const char *tree_pointer(tree_member out, const char *outer, const char *name)
{
    struct text t = text_in(out, POINTER_BYTES + 1);
    if (outer) text_printf(&t, "/%s", outer);
    text_put_char(&t, '/');
    for (size_t bytes; t.failure == TEXT_FINE && (bytes = text_character(name)) > 0; name += bytes) {
        if (*name == '~') text_put_string(&t, "~0");
        else if (*name == '/') text_put_string(&t, "~1");
        else text_put(&t, name, bytes);
    }
    return out;
}

attn_status tree_unknown(const char *place, const char *outer, const struct text_nearest *best, const char *listed,
                         attn_error *err)
{
    tree_member member;
    char suggestion[TREE_SUGGESTION_BYTES];
    const int length = (int)text_cut(best->unknown, TREE_NAME_BYTES);
    /* a name that differs in two letters may be similar by chance */
    const bool near = best->name && best->distance < 2;
    const char *const topic = near || suggestion_of(place, best->unknown) ? NULL
                                                                          : suggestion_topic(place, best->unknown);
    if (topic)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, outer, best->unknown),
                         "%s%sunknown member '%.*s%s'; %s%s", outer ? outer : "", outer ? ": " : "", length,
                         best->unknown, best->unknown[length] ? "..." : "", topic, listed);
    return attn_fail(err, ATTN_INVALID, tree_pointer(member, outer, best->unknown), "%s%sunknown member '%.*s%s'%s",
                     outer ? outer : "", outer ? ": " : "", length, best->unknown, best->unknown[length] ? "..." : "",
                     *tree_suggestion(place, best, suggestion) ? suggestion : listed);
}

bool tree_repeated(const cJSON *object, const cJSON *member)
{
    for (const cJSON *other = object->child; other != member; other = other->next)
        if (!strcmp(other->string, member->string)) return true;
    return false;
}

attn_status tree_twice(const char *outer, const char *name, attn_error *err)
{
    tree_member member;
    const int length = (int)text_cut(name, TREE_NAME_BYTES);
    return attn_fail(err, ATTN_INVALID, tree_pointer(member, outer, name), "%s%smember '%.*s%s' is given twice",
                     outer ? outer : "", outer ? ": " : "", length, name, name[length] ? "..." : "");
}
