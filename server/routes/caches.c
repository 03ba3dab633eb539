/* caches.c: the routes of /v1/caches that compute nothing. In a path with a cache's id, the id is the first
 * parameter. */
#include "server/routes/caches.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"
#include "server/base/log.h"
#include "server/caches/caches.h"
#include "server/routes/json.h"
#include "server/work/server.h"

_Static_assert((int)PROTO_CACHE_HEADS == (int)CACHES_HEADS, "a body may ask for what there can be");

/* Copies the cache's id from the URL's path to `id`. An id that is too long for a cache becomes "", which no cache
 * has. */
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
    if (infos == NULL) return; /* out of memory: an answer without a body becomes a 503 */
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
