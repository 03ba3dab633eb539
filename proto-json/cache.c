/* cache.c: reads small JSON bodies: those that make a cache, give the length of a cache, or ask for KServe's index of
 * models. A table describes each kind of body. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parse_internal.h"
#include "suggestions.h"
#include "proto.h"
#include "scan.h"
#include "text/text.h"
#include "tree.h"

enum type { TYPE_INTEGER, TYPE_BOOL, TYPE_DTYPE, TYPE_SCALES };

struct member {
    const char *name;
    enum type type;
    bool required;
    /* Offset of the value in the struct that read_body() fills. A value of TYPE_SCALES takes two neighbouring members:
     * a float * to the scales, and an int with their number. */
    size_t offset;
    int64_t minimum, maximum;
    /* what messages say about the allowed values; NULL: they name `minimum` and `maximum` */
    const char *rule;
};

#define AT(field) offsetof(proto_cache, field)
static const struct member create[] = {
    { "kv_heads", TYPE_INTEGER, true, AT(kv_heads), 1, PROTO_CACHE_HEADS, NULL },
    { "head_dim", TYPE_INTEGER, true, AT(head_dim), 1, ATTN_MAX_HEAD_DIM, NULL },
    { "head_dim_v", TYPE_INTEGER, false, AT(head_dim_v), 1, ATTN_MAX_HEAD_DIM, NULL },
    { "dtype", TYPE_DTYPE, true, AT(dtype), 0, 0, NULL },
    { "page_size", TYPE_INTEGER, false, AT(page_size), 1, TREE_INTEGER_MAX, "64 or 128" },
    { "latent", TYPE_BOOL, false, AT(latent), 0, 0, NULL },
    { "k_scale", TYPE_SCALES, false, AT(k_scale), 0, 0, NULL },
    { "v_scale", TYPE_SCALES, false, AT(v_scale), 0, 0, NULL },
    { "ttl_s", TYPE_INTEGER, false, AT(ttl_s), 1, PROTO_CACHE_TTL_MOST_S, NULL },
    { .name = NULL },
};
#undef AT
static const struct member length_needed[] = { { "length", TYPE_INTEGER, true, 0, 0, TREE_INTEGER_MAX, NULL },
                                               { .name = NULL } };
static const struct member length_if_given[] = { { "length", TYPE_INTEGER, false, 0, 0, TREE_INTEGER_MAX, NULL },
                                                 { .name = NULL } };

static const struct member index_members[] = { { "ready", TYPE_BOOL, false, 0, 0, 0, NULL }, { .name = NULL } };

struct body {
    const struct member *members;
    const char *example;
    /* the name of this kind of body in suggestions.h, for hints about the words of other programs; "": no such hints */
    const char *place;
    const char *listed;
};
static const struct body new_cache = { create, "{\"kv_heads\": 8, \"head_dim\": 128, \"dtype\": \"bfloat16\"}",
                                       SUGGESTION_CACHE,
                                       " (a cache has kv_heads, head_dim, head_dim_v, dtype, page_size, latent, "
                                       "k_scale, v_scale and ttl_s)" };
#define LENGTH_ALONE "{\"length\": 128}", SUGGESTION_LENGTH, " (the only member is length)"
static const struct body new_length = { length_needed, LENGTH_ALONE };
static const struct body maybe_length = { length_if_given, LENGTH_ALONE };
#undef LENGTH_ALONE
static const struct body of_index = { index_members, "{\"ready\": true}", "", " (the only member is ready)" };

_Static_assert(offsetof(proto_cache, k_scales) == offsetof(proto_cache, k_scale) + sizeof(float *) &&
                   offsetof(proto_cache, v_scales) == offsetof(proto_cache, v_scale) + sizeof(float *),
               "TYPE_SCALES writes a pointer and a count");

static attn_status wrong(const char *name, const cJSON *value, const char *rule, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member pointer;
    return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, name), "%s: is %s, must be %s%s", name,
                     tree_describe(value, quote), rule, parse_value_suggestion(value));
}

/* Reads the scales of a cache: an array with one number for each head, or a single number for all heads. For a single
 * number *count stays 0, because the number of heads may not be known yet. */
static attn_status read_scales(const char *name, const cJSON *value, float **scales, int *count, attn_error *err)
{
    const bool single = tree_number(value) != NULL;
    const int length = single ? 1 : cJSON_IsArray(value) ? cJSON_GetArraySize(value) : 0;
    int i = 0;
    if (!single && !cJSON_IsArray(value))
        return wrong(name, value, "a number, or an array of numbers, one for each of kv_heads", err);
    if (length < 1 || length > PROTO_CACHE_HEADS) {
        tree_member pointer;
        return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, name),
                         "%s: has %d numbers, must have 1 to %d, one for each of kv_heads", name, length,
                         PROTO_CACHE_HEADS);
    }
    *scales = calloc((size_t)length, sizeof **scales);
    if (*scales == NULL) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    *count = single ? 0 : length;
    for (const cJSON *one = single ? value : value->child; one; one = single ? NULL : one->next, i++) {
        const char *const text = tree_number(one);
        char quote[TREE_QUOTE_BYTES];
        tree_member pointer;
        (*scales)[i] = text ? strtof(text, NULL) : NAN;
        if (isfinite((*scales)[i])) continue;
        if (single) return wrong(name, value, "a number within float32", err);
        snprintf(pointer, sizeof pointer, "/%s/%d", name, i);
        return attn_fail(err, ATTN_INVALID, pointer, "%s: [%d] is %s, must be a number within float32", name, i,
                         tree_describe(one, quote));
    }
    return ATTN_OK;
}

static attn_status read_member(const struct member *member, const cJSON *value, char *into, attn_error *err)
{
    char rule[160], list[ATTN_DTYPE_LIST_BYTES], quote[TREE_QUOTE_BYTES], suggestion[TREE_SUGGESTION_BYTES];
    tree_member pointer;
    const char *text;
    switch (member->type) {
    case TYPE_INTEGER:
        if (tree_integer(value, member->minimum, member->maximum, (int64_t *)(into + member->offset))) return ATTN_OK;
        if (member->rule) snprintf(rule, sizeof rule, "%s", member->rule);
        else if (member->maximum == TREE_INTEGER_MAX)
            snprintf(rule, sizeof rule, "an integer from %lld to 2^53", (long long)member->minimum);
        else
            snprintf(rule, sizeof rule, "an integer from %lld to %lld", (long long)member->minimum,
                     (long long)member->maximum);
        return wrong(member->name, value, rule, err);
    case TYPE_BOOL:
        if (!cJSON_IsBool(value)) return wrong(member->name, value, "true or false", err);
        *(bool *)(into + member->offset) = cJSON_IsTrue(value);
        return ATTN_OK;
    case TYPE_DTYPE:
        text = tree_string(value);
        if (text && attn_dtype_parse(text, (attn_dtype *)(into + member->offset)) &&
            (ATTN_DTYPES_FORWARD >> *(attn_dtype *)(into + member->offset) & 1))
            return ATTN_OK;
        return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, member->name), "%s: is %s, must be %s%s",
                         member->name, tree_describe(value, quote), attn_dtype_list(ATTN_DTYPES_FORWARD, list),
                         parse_dtype_suggestion(ATTN_T_k, true, value, suggestion));
    case TYPE_SCALES:
        return read_scales(member->name, value, (float **)(into + member->offset),
                           (int *)(into + member->offset + sizeof(float *)), err);
    }
    return ATTN_OK;
}

static attn_status read_object(const struct body *body, const cJSON *root, char *into, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member pointer;
    if (!root) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    if (!cJSON_IsObject(root))
        return attn_fail(err, ATTN_INVALID, "", "the body is %s, must be an object: %s", tree_describe(root, quote),
                         body->example);
    for (const cJSON *one = root->child; one; one = one->next) {
        const struct member *member = body->members;
        attn_status status = ATTN_OK;
        while (member->name && strcmp(member->name, one->string)) member++;
        if (tree_repeated(root, one)) return tree_twice(NULL, one->string, err);
        if (!member->name) {
            struct text_nearest best = { one->string, NULL, 3 };
            for (member = body->members; member->name; member++) text_consider(&best, member->name);
            return tree_unknown(body->place, NULL, &best, body->listed, err);
        }
        if ((status = read_member(member, one, into, err)) != ATTN_OK) return status;
    }
    for (const struct member *member = body->members; member->name; member++)
        if (member->required && !cJSON_GetObjectItemCaseSensitive(root, member->name))
            return attn_fail(err, ATTN_INVALID, tree_pointer(pointer, NULL, member->name),
                             "%s: is missing, the body must be like %s", member->name, body->example);
    return ATTN_OK;
}

/* Reads the members of a small body into a struct. An empty body is read as {}. */
static attn_status read_body(const struct body *body, const void *text, size_t bytes, void *into, attn_error *err)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct tree_memory memory = { 0 };
    scan *const s = scan_new_plain(&limits, 0);
    attn_status status;
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    status = bytes ? scan_feed(s, text, bytes, err) : scan_feed(s, "{}", 2, err);
    if (status == ATTN_OK) status = scan_finish(s, err);
    if (status == ATTN_OK) {
        size_t length;
        const char *const rest = scan_rest(s, &length);
        tree_enter(&memory);
        status = read_object(body, tree_parse(rest, length), into, err);
        tree_leave();
        tree_forget(&memory);
    }
    scan_free(s);
    return status;
}

static attn_status spread_scale(float **scales, int *count, int64_t heads, attn_error *err)
{
    if (*scales == NULL || *count > 0) return ATTN_OK;
    float *const all = calloc((size_t)heads, sizeof *all);
    if (all == NULL) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    for (int64_t h = 0; h < heads; h++) all[h] = **scales;
    free(*scales);
    *scales = all;
    *count = (int)heads;
    return ATTN_OK;
}

/* In a latent cache the first numbers of a key are also its value. Kernels multiply keys by one scale and values by
 * another, so the two scales must be equal. */
static attn_status check_latent_scales(const proto_cache *cache, attn_error *err)
{
#define AS_KEYS ": values of a latent cache are the first numbers of its keys"
    if (!cache->k_scale != !cache->v_scale) {
        const bool lacks_v = cache->k_scale != NULL;
        return attn_fail(err, ATTN_INVALID, lacks_v ? "/v_scale" : "/k_scale",
                         "%s: is missing, must be the same as %s" AS_KEYS, lacks_v ? "v_scale" : "k_scale",
                         lacks_v ? "k_scale" : "v_scale");
    }
    for (int i = 0; i < cache->k_scales; i++) {
        tree_member pointer;
        if (cache->v_scale[i] == cache->k_scale[i]) continue;
        snprintf(pointer, sizeof pointer, "/v_scale/%d", i);
        return attn_fail(err, ATTN_INVALID, pointer, "v_scale: [%d] is %g, must be %g as in k_scale" AS_KEYS, i,
                         cache->v_scale[i], cache->k_scale[i]);
    }
#undef AS_KEYS
    return ATTN_OK;
}

attn_status proto_cache_read(const void *body, size_t bytes, proto_cache *cache, attn_error *err)
{
    *cache = (proto_cache){ .head_dim_v = -1 };
    attn_status status = read_body(&new_cache, body, bytes, cache, err);
    if (cache->head_dim_v < 0) cache->head_dim_v = cache->head_dim;
    if (status == ATTN_OK) status = spread_scale(&cache->k_scale, &cache->k_scales, cache->kv_heads, err);
    if (status == ATTN_OK) status = spread_scale(&cache->v_scale, &cache->v_scales, cache->kv_heads, err);
    const struct {
        const char *name;
        const float *scales;
        int count;
    } scales[] = { { "k_scale", cache->k_scale, cache->k_scales }, { "v_scale", cache->v_scale, cache->v_scales } };
    for (int i = 0; i < 2 && status == ATTN_OK; i++) {
        tree_member pointer;
        tree_pointer(pointer, NULL, scales[i].name);
        if (scales[i].scales && cache->dtype != ATTN_F8E4M3)
            status = attn_fail(err, ATTN_INVALID, pointer, "%s: belongs to dtype float8_e4m3fn, it is %s",
                               scales[i].name, attn_dtype_name(cache->dtype));
        else if (scales[i].scales && scales[i].count != cache->kv_heads)
            status = attn_fail(err, ATTN_INVALID, pointer,
                               "%s: has %d numbers, must have %lld, one for each of kv_heads", scales[i].name,
                               scales[i].count, (long long)cache->kv_heads);
    }
    if (status == ATTN_OK && cache->latent) status = check_latent_scales(cache, err);
    if (status != ATTN_OK) proto_cache_clear(cache);
    return status;
}

void proto_cache_clear(proto_cache *cache)
{
    free(cache->k_scale);
    free(cache->v_scale);
    cache->k_scale = cache->v_scale = NULL;
}

attn_status proto_index_read(const void *body, size_t bytes, bool *ready, attn_error *err)
{
    *ready = false;
    return read_body(&of_index, body, bytes, ready, err);
}

attn_status proto_length_read(const void *body, size_t bytes, bool required, int64_t *length, attn_error *err)
{
    *length = -1;
    return read_body(required ? &new_length : &maybe_length, body, bytes, length, err);
}
