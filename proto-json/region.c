/* region.c: reads the bodies of requests that register regions of shared memory, in main memory or on a GPU, as in
 * Triton's protocol. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base64.h"
#include "proto.h"
#include "scan.h"
#include "text/text.h"
#include "tree.h"

#define SYSTEM_EXAMPLE "{\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}"
#define CUDA_EXAMPLE   "{\"raw_handle\": {\"b64\": \"...\"}, \"device_id\": 0, \"byte_size\": 4096}"

enum { HANDLE_CHARACTERS = BASE64_ENCODED(ATTN_HANDLE_BYTES) };

enum member_kind { MEMBER_KEY, MEMBER_BYTES, MEMBER_DEVICE, MEMBER_HANDLE };

struct member {
    const char *name;
    enum member_kind kind;
    int64_t minimum;
    bool required;
    size_t offset; /* offset of the value in the struct that the body is read into */
};

/* A kind of body: its members, and an example of it for error messages, such as {"key": ...}. */
struct form {
    const char *example;
    struct member members[3];
};
enum { MEMBERS = sizeof((struct form *)0)->members / sizeof((struct form *)0)->members[0] };

#define SYSTEM(field) offsetof(proto_region, field)
#define CUDA(field)   offsetof(proto_cuda_region, field)
static const struct form system_form = { SYSTEM_EXAMPLE,
                                         { { "key", MEMBER_KEY, 0, true, SYSTEM(key) },
                                           { "offset", MEMBER_BYTES, 0, false, SYSTEM(offset) },
                                           { "byte_size", MEMBER_BYTES, 1, true, SYSTEM(bytes) } } };
static const struct form cuda_form = { CUDA_EXAMPLE,
                                       { { "raw_handle", MEMBER_HANDLE, 0, true, CUDA(handle) },
                                         { "device_id", MEMBER_DEVICE, 0, true, CUDA(device) },
                                         { "byte_size", MEMBER_BYTES, 1, true, CUDA(bytes) } } };

static attn_status wrong(const char *name, const cJSON *value, const char *rule, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member pointer;
    return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, name), "%s: is %s, must be %s", name,
                     tree_describe(value, quote), rule);
}

/* Reads the handle of a GPU's memory, {"b64": "..."}. No message quotes the handle, because whoever knows it could open
 * the memory. */
static attn_status read_handle(const cJSON *value, uint8_t handle[ATTN_HANDLE_BYTES], attn_error *err)
{
    const cJSON *const b64 = cJSON_IsObject(value) ? value->child : NULL;
    const char *const text = b64 && !b64->next && !strcmp(b64->string, "b64") ? tree_string(b64) : NULL;
    uint8_t bytes[BASE64_DECODED_MAX(HANDLE_CHARACTERS)];
    base64_decoder decoder = { 0 };
    size_t written = 0;
    if (!text)
        return attn_fail(err, ATTN_INVALID, "/raw_handle",
                         "raw_handle: must be {\"b64\": \"...\"}, base64 of the %d bytes of a cudaIpcMemHandle_t",
                         ATTN_HANDLE_BYTES);
    if (strlen(text) != HANDLE_CHARACTERS || !base64_decode(&decoder, text, HANDLE_CHARACTERS, bytes, &written) ||
        !base64_finish(&decoder) || written != ATTN_HANDLE_BYTES)
        return attn_fail(err, ATTN_INVALID, "/raw_handle/b64",
                         "raw_handle: b64 has %zu characters, must be base64 of %d bytes: %d characters with padding",
                         strlen(text), ATTN_HANDLE_BYTES, HANDLE_CHARACTERS);
    memcpy(handle, bytes, ATTN_HANDLE_BYTES);
    return ATTN_OK;
}

static attn_status read_member(const struct member *member, const cJSON *one, char *into, attn_error *err)
{
    const char *const text = tree_string(one);
    void *const to = into + member->offset;
    char rule[64];
    switch (member->kind) {
    case MEMBER_KEY:
        snprintf(rule, sizeof rule, "a string of 1 to %d bytes", PROTO_REGION_BYTES - 1);
        if (!text || !*text || strlen(text) >= PROTO_REGION_BYTES) return wrong(member->name, one, rule, err);
        strcpy(to, text);
        break;
    case MEMBER_BYTES:
        snprintf(rule, sizeof rule, "a number of bytes: an integer from %d to 2^53", (int)member->minimum);
        if (!tree_integer(one, member->minimum, TREE_INTEGER_MAX, to)) return wrong(member->name, one, rule, err);
        break;
    case MEMBER_DEVICE:
        if (!tree_integer(one, 0, TREE_INTEGER_MAX, to))
            return wrong(member->name, one, "the number of a GPU: an integer from 0 on", err);
        break;
    case MEMBER_HANDLE: return read_handle(one, to, err);
    }
    return ATTN_OK;
}

static attn_status unknown(const struct form *form, const cJSON *one, attn_error *err)
{
    struct text_nearest best = { one->string, NULL, 3 };
    char suggestion[TREE_SUGGESTION_BYTES];
    tree_member pointer;
    const int length = (int)text_cut(one->string, TREE_NAME_BYTES);
    for (int i = 0; i < MEMBERS; i++) text_consider(&best, form->members[i].name);
    return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, one->string),
                     "unknown member '%.*s%s'%s the body must be like %s", length, one->string,
                     one->string[length] ? "..." : "", best.name ? tree_suggestion("", &best, suggestion) : ";",
                     form->example);
}

static attn_status read_object(const struct form *form, const cJSON *root, char *into, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    bool given[MEMBERS] = { false };
    if (!root) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    if (!cJSON_IsObject(root))
        return attn_fail(err, ATTN_INVALID, "", "the body is %s, must be an object: %s", tree_describe(root, quote),
                         form->example);
    for (const cJSON *one = root->child; one; one = one->next) {
        int i = 0;
        if (tree_repeated(root, one)) return tree_twice(NULL, one->string, err);
        while (i < MEMBERS && strcmp(one->string, form->members[i].name) != 0) i++;
        if (i == MEMBERS) return unknown(form, one, err);
        const attn_status status = read_member(&form->members[i], one, into, err);
        if (status != ATTN_OK) return status;
        given[i] = true;
    }
    for (int i = 0; i < MEMBERS; i++)
        if (form->members[i].required && !given[i])
            return attn_fail(err, ATTN_INVALID, "", "%s is missing, the body must be like %s", form->members[i].name,
                             form->example);
    return ATTN_OK;
}

static attn_status read_body(const struct form *form, const void *body, size_t bytes, void *into, attn_error *err)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct tree_memory memory = { 0 };
    scan *const s = scan_new_plain(&limits, 0);
    attn_status status;
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    if (bytes == 0) status = attn_fail(err, ATTN_INVALID, "", "the body is empty, must be like %s", form->example);
    else status = scan_feed(s, body, bytes, err);
    if (status == ATTN_OK) status = scan_finish(s, err);
    if (status == ATTN_OK) {
        size_t length;
        const char *const rest = scan_rest(s, &length);
        tree_enter(&memory);
        status = read_object(form, tree_parse(rest, length), into, err);
        tree_leave();
        tree_forget(&memory);
    }
    scan_free(s);
    return status;
}

attn_status proto_region_read(const void *body, size_t bytes, proto_region *region, attn_error *err)
{
    *region = (proto_region){ 0 };
    return read_body(&system_form, body, bytes, region, err);
}

attn_status proto_cuda_region_read(const void *body, size_t bytes, proto_cuda_region *region, attn_error *err)
{
    *region = (proto_cuda_region){ 0 };
    return read_body(&cuda_form, body, bytes, region, err);
}
