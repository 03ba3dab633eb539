/* caches.c: see caches.h. Paths with a cache's id have it as their first parameter. */
#include "server/routes/caches.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/caches/caches.h"
#include "server/work/server.h"

_Static_assert((int)PROTO_CACHE_HEADS == (int)CACHES_HEADS, "a body may ask for what there can be");

/* The id in the path. One of another length is none of ours. */
static const char *id_of(const struct request *request, char id[CACHE_ID_BYTES])
{
    const struct slice *const in = &request->parameters[0];
    const size_t length = in->length < CACHE_ID_BYTES ? in->length : 0;
    memcpy(id, in->at, length);
    id[length] = '\0';
    return id;
}

static void put_info(struct json *j, const struct cache_info *info)
{
    const struct cache_shape *const s = &info->shape;
    json_put(j,
             "{'id':'%s','length':%lld,'kv_heads':%lld,'head_dim':%lld,'head_dim_v':%lld,'dtype':'%s','latent':%s,"
             "'page_size':%lld,'pages':%lld,'shared_pages':%lld,'page_bytes':%lld,'ttl_s':%lld,'expires_in_s':%g,"
             "'device':'%s'}",
             info->id, (long long)info->length, (long long)s->kv_heads, (long long)s->head_dim,
             (long long)s->head_dim_v, attn_dtype_name(s->dtype), s->latent ? "true" : "false", (long long)s->page_size,
             (long long)info->pages, (long long)info->shared_pages, (long long)info->page_bytes,
             (long long)(info->ttl_ms / 1000), (double)info->expires_in_ms / 1e3, info->device);
}

static void answer_json(struct answer *answer, int status, struct json *j)
{
    json_raw(j, "\n");
    answer->status = status;
    answer->content_type = "application/json";
    answer->body = json_take(j, &answer->length);
}

static void answer_info(struct answer *answer, int status, const struct cache_info *info)
{
    struct json j = { 0 };
    put_info(&j, info);
    answer_json(answer, status, &j);
    if (status == 201) snprintf(answer->location, sizeof answer->location, "/v1/caches/%s", info->id);
}

void caches_answer_create(struct request *request, struct answer *answer)
{
    attn_error err = { 0 };
    proto_cache wanted;
    struct cache_info info;
    if (proto_cache_read(request->text, request->text_bytes, &wanted, &err) != ATTN_OK) {
        request_fail_status(request, &err);
        return;
    }
    const struct cache_shape shape = { wanted.kv_heads,   wanted.head_dim,
                                       wanted.head_dim_v, wanted.dtype,
                                       wanted.latent,     wanted.page_size ? wanted.page_size : CACHES_PAGE_SIZE };
    const int64_t ttl_ms = wanted.ttl_s ? wanted.ttl_s * 1000 : CACHES_TTL_MS;
    const attn_status status = caches_create(request->server->caches, request->caller, &shape, wanted.k_scale,
                                             wanted.v_scale, ttl_ms, &info, &err);
    proto_cache_clear(&wanted);
    if (status == ATTN_OK) answer_info(answer, 201, &info);
    else request_fail_status(request, &err);
}

void caches_answer_list(struct request *request, struct answer *answer)
{
    struct json j = { 0 };
    int written, count;
    struct cache_info *infos = calloc(CACHES_LIST, sizeof *infos);
    if (infos == NULL) return; /* no body: out of memory */
    caches_list(request->server->caches, request->caller, infos, CACHES_LIST, &written, &count);
    json_put(&j, "{'count':%d,'caches':[", count);
    for (int i = 0; i < written; i++) {
        json_comma(&j);
        put_info(&j, &infos[i]);
    }
    json_raw(&j, "]}");
    free(infos);
    answer_json(answer, 200, &j);
}

void caches_answer_get(struct request *request, struct answer *answer)
{
    attn_error err = { 0 };
    struct cache_info info;
    char id[CACHE_ID_BYTES];
    if (caches_get(request->server->caches, request->caller, id_of(request, id), &info, &err) == ATTN_OK)
        answer_info(answer, 200, &info);
    else request_fail_status(request, &err);
}

void caches_answer_fork(struct request *request, struct answer *answer)
{
    attn_error err = { 0 };
    struct cache_info info;
    int64_t length;
    char id[CACHE_ID_BYTES];
    if (proto_length_read(request->text, request->text_bytes, false, &length, &err) == ATTN_OK &&
        caches_fork(request->server->caches, request->caller, id_of(request, id), length, &info, &err) == ATTN_OK)
        answer_info(answer, 201, &info);
    else request_fail_status(request, &err);
}

void caches_answer_truncate(struct request *request, struct answer *answer)
{
    attn_error err = { 0 };
    struct cache_info info;
    int64_t length;
    char id[CACHE_ID_BYTES];
    if (proto_length_read(request->text, request->text_bytes, true, &length, &err) == ATTN_OK &&
        caches_truncate(request->server->caches, request->caller, id_of(request, id), length, &info, &err) == ATTN_OK)
        answer_info(answer, 200, &info);
    else request_fail_status(request, &err);
}

void caches_answer_delete(struct request *request, struct answer *answer)
{
    attn_error err = { 0 };
    char id[CACHE_ID_BYTES];
    if (caches_delete(request->server->caches, request->caller, id_of(request, id), &err) == ATTN_OK)
        answer->status = 204;
    else request_fail_status(request, &err);
}

/* ---- Schemas ----------------------------------------------------------------------------------------------------- */

/* "'NAME':{'type':'integer',...}", with a comma before it where one is due. most < 0: unbounded. */
static void put_integer(struct json *j, const char *name, int64_t least, int64_t most, const char *says)
{
    json_comma(j);
    json_put(j, "'%s':{'description':'%s','type':'integer','minimum':%lld", name, says, (long long)least);
    if (most >= 0) json_put(j, ",'maximum':%lld", (long long)most);
    json_raw(j, "}");
}

static void put_scale(struct json *j, const char *name, const char *of)
{
    json_put(j,
             ",'%s':{'description':'float8_e4m3fn: dequantisation factor of the %s, one for all heads or one for each',"
             "'oneOf':[{'type':'number'},{'type':'array','minItems':1,'maxItems':%d,'items':{'type':'number'}}]}",
             name, of, CACHES_HEADS);
}

static void put_dtypes(struct json *j)
{
    json_put(j, ",'dtype':{'type':'string','enum':[");
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++) {
        if (!(ATTN_DTYPES_FORWARD >> d & 1)) continue;
        json_comma(j);
        json_put(j, "'%s'", attn_dtype_name((attn_dtype)d));
    }
    json_raw(j, "]}");
}

#define OBJECT  "{'type':'object','additionalProperties':false,"
#define INTEGER (INT64_C(1) << 53)

static void put_requests(struct json *j)
{
    json_put(j, ",'CacheRequest':" OBJECT "'required':['kv_heads','head_dim','dtype'],'properties':{");
    put_integer(j, "kv_heads", 1, CACHES_HEADS, "Hk");
    put_integer(j, "head_dim", 1, ATTN_MAX_HEAD_DIM, "D, of keys");
    put_integer(j, "head_dim_v", 1, ATTN_MAX_HEAD_DIM, "Dv, of values; D where it is not given");
    put_dtypes(j);
    json_put(j,
             ",'page_size':{'description':'positions of a "
             "page','type':'integer','minimum':%d,'maximum':%d,'multipleOf':%d,'default':%d}",
             CACHES_PAGE_SIZE_LEAST, CACHES_PAGE_SIZE_MOST, CACHES_PAGE_SIZE_LEAST, CACHES_PAGE_SIZE);
    json_put(j, ",'latent':{'description':'values are the first Dv numbers of the keys, and are not sent; "
                "k_scale and v_scale are equal then','type':'boolean','default':false}");
    put_scale(j, "k_scale", "keys");
    put_scale(j, "v_scale", "values");
    put_integer(j, "ttl_s", 1, PROTO_CACHE_TTL_MOST_S,
                "seconds without use after which it is gone; 600 where it is not given");
    json_put(j, "}},'ForkRequest':" OBJECT "'properties':{");
    put_integer(j, "length", 0, INTEGER, "positions of the new cache; all where it is not given");
    json_put(j, "}},'TruncateRequest':" OBJECT "'required':['length'],'properties':{");
    put_integer(j, "length", 0, INTEGER, "positions that stay");
    json_raw(j, "}}");
}

void caches_put_schemas(struct json *j)
{
    put_requests(j);
    json_put(j, ",'Cache':" OBJECT "'required':['id','length'],'properties':{'id':{'type':'string'}");
    put_integer(j, "length", 0, -1, "positions");
    put_integer(j, "kv_heads", 1, -1, "Hk");
    put_integer(j, "head_dim", 1, -1, "D");
    put_integer(j, "head_dim_v", 1, -1, "Dv");
    put_integer(j, "page_size", 1, -1, "positions of a page");
    put_integer(j, "pages", 0, -1, "pages that it has");
    put_integer(j, "shared_pages", 0, -1, "of those, with others");
    put_integer(j, "page_bytes", 1, -1, "of one");
    put_integer(j, "ttl_s", 1, -1, "seconds without use after which it is gone");
    json_put(j, ",'dtype':{'type':'string'},'latent':{'type':'boolean'},'expires_in_s':{'type':'number','minimum':0},"
                "'device':{'type':'string'}}},'Caches':" OBJECT "'required':['count','caches'],'properties':{");
    put_integer(j, "count", 0, -1, "all of yours");
    json_put(j,
             ",'caches':{'description':'oldest first, the first %d of them','type':'array',"
             "'items':{'$ref':'#/components/schemas/Cache'}}}}",
             CACHES_LIST);
}
