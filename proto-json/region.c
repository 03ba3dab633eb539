/* region.c: the body with which Triton's clients register a region of shared memory. */
#include <stdio.h>
#include <string.h>

#include "proto.h"
#include "scan.h"
#include "text.h"
#include "tree.h"

#define EXAMPLE "{\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}"

static attn_status wrong(const char *name, const cJSON *value, const char *rule, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member pointer;
    return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, name), "%s: is %s, must be %s", name,
                     tree_describe(value, quote), rule);
}

static attn_status read_member(const cJSON *one, proto_region *region, attn_error *err)
{
    static const char *const names[] = { "key", "offset", "byte_size", NULL };
    const char *const text = tree_string(one);
    char rule[64];
    if (!strcmp(one->string, "key")) {
        snprintf(rule, sizeof rule, "a string of 1 to %zu bytes", sizeof region->key - 1);
        if (!text || !*text || strlen(text) >= sizeof region->key) return wrong("key", one, rule, err);
        strcpy(region->key, text);
    } else if (!strcmp(one->string, "offset")) {
        if (!tree_integer(one, 0, TREE_INTEGER_MAX, &region->offset))
            return wrong("offset", one, "a number of bytes: an integer from 0 to 2^53", err);
    } else if (!strcmp(one->string, "byte_size")) {
        if (!tree_integer(one, 1, TREE_INTEGER_MAX, &region->bytes))
            return wrong("byte_size", one, "a number of bytes: an integer from 1 to 2^53", err);
    } else {
        struct text_nearest best = { one->string, NULL, 3 };
        char cure[TREE_CURE_BYTES];
        tree_member pointer;
        const int length = (int)text_cut(one->string, TREE_NAME_BYTES);
        for (const char *const *name = names; *name; name++) text_consider(&best, *name);
        return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, one->string),
                         "unknown member '%.*s%s'%s the body must be like " EXAMPLE, length, one->string,
                         one->string[length] ? "..." : "", best.name ? tree_cure("", &best, cure) : ";");
    }
    return ATTN_OK;
}

static attn_status read_object(const cJSON *root, proto_region *region, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    attn_status status = ATTN_OK;
    if (!root) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    if (!cJSON_IsObject(root))
        return attn_fail(err, ATTN_INVALID, "", "the body is %s, must be an object: " EXAMPLE,
                         tree_describe(root, quote));
    for (const cJSON *one = root->child; one && status == ATTN_OK; one = one->next)
        status = tree_repeated(root, one) ? tree_twice(NULL, one->string, err) : read_member(one, region, err);
    if (status == ATTN_OK && (!*region->key || region->bytes == 0))
        status = attn_fail(err, ATTN_INVALID, "", "%s is missing, the body must be like " EXAMPLE,
                           *region->key ? "byte_size" : "key");
    return status;
}

attn_status proto_region_read(const void *body, size_t bytes, proto_region *region, attn_error *err)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    scan *const s = scan_new_plain(&limits, 0);
    attn_status status;
    *region = (proto_region){ 0 };
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    if (bytes == 0) status = attn_fail(err, ATTN_INVALID, "", "the body is empty, must be like " EXAMPLE);
    else status = scan_feed(s, body, bytes, err);
    if (status == ATTN_OK) status = scan_finish(s, err);
    if (status == ATTN_OK) {
        size_t length;
        const char *const skeleton = scan_skeleton(s, &length);
        cJSON *const root = tree_parse(skeleton, length + 1);
        status = read_object(root, region, err);
        tree_delete(root);
    }
    scan_free(s);
    return status;
}
