/* shared_memory.c: see shared_memory.h. Paths with a region's name have it as their first parameter. */
#include "server/api/shared_memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto-json/text.h"
#include "server/api/route.h"
#include "server/base/log.h"
#include "server/work/regions.h"
#include "server/work/server.h"

static_assert((int)ROUTE_PARAMETER_BYTES < (int)PROTO_REGION_BYTES, "a region's name in a path fits");

/* False: it has failed, for there is no shared memory. */
static bool is_offered(struct request *request)
{
    if (request->server->regions != NULL) return true;
    request_fail(
        request, PROTO_E_NOT_IMPLEMENTED, NULL,
        "shared memory is not offered here: start the server with --allow-shm PREFIX, or send the bytes of tensors as "
        "binary data");
    return false;
}

/* The name in the path; NULL: there is none, all regions are meant. */
static const char *name_of(const struct request *request, char text[ROUTE_PARAMETER_BYTES + 1])
{
    const struct slice name = request->parameters[0];
    if (name.at == NULL || name.length == 0) return NULL;
    snprintf(text, ROUTE_PARAMETER_BYTES + 1, "%.*s", (int)name.length, name.at);
    return text;
}

static void answer_nothing(struct answer *answer)
{
    answer->status = 200;
    answer->body = calloc(1, 1);
}

static void put_region(void *context, const struct region_facts *facts)
{
    struct json *const j = context;
    json_comma(j);
    json_put(j, "{'name':'%s','key':'%s','offset':%lld,'byte_size':%lld}", facts->name, facts->key,
             (long long)facts->offset, (long long)facts->bytes);
}

/* The list of regions of a kind, or of the one that the path names. */
static void answer_status(struct request *request, enum region_kind kind, struct answer *answer)
{
    struct json j = { 0 };
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    int count = 0;
    json_raw(&j, "[");
    if (kind != REGION_KIND_COUNT)
        count = regions_visit(request->server->regions, kind, request->caller, name, put_region, &j);
    json_raw(&j, "]\n");
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = json_take(&j, &answer->length);
    if (name != NULL && count == 0)
        request_fail(request, PROTO_E_NOT_FOUND, NULL, "there is no region '%.*s'", (int)text_cut(name, 64), name);
}

void shared_memory_status(struct request *request, struct answer *answer)
{
    if (is_offered(request)) answer_status(request, REGION_SYSTEM, answer);
}

void shared_memory_cuda_status(struct request *request, struct answer *answer)
{
    if (is_offered(request)) answer_status(request, REGION_KIND_COUNT, answer);
}

/* Keys are the operator's and the client's business, and are not logged. */
static void log_region(const struct request *request, const char *event, const char *name, const char *what,
                       long long n)
{
    char clean[LOG_CLEAN_BYTES];
    log_event(LOG_INFO, request->id, event, "region=" LOG_Q " %s=%lld", log_clean(clean, sizeof clean, name), what, n);
}

void shared_memory_register(struct request *request, struct answer *answer)
{
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    proto_region wanted;
    proto_error error;
    attn_error why = { 0 };
    if (!is_offered(request)) return;
    if (proto_region_read(request->text, request->text_bytes, &wanted, &why) != ATTN_OK) {
        request_fail_status(request, &why);
    } else if (!regions_register(request->server->regions, request->caller, name, &wanted, &error, &why)) {
        request_fail(request, error, why.member, "%s", why.text);
    } else {
        log_region(request, "region_registered", name, "bytes", wanted.bytes);
        answer_nothing(answer);
    }
}

void shared_memory_unregister(struct request *request, struct answer *answer)
{
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    if (!is_offered(request)) return;
    const int count = regions_unregister(request->server->regions, request->caller, name);
    if (count > 0) log_region(request, "region_unregistered", name ? name : "", "count", count);
    answer_nothing(answer);
}

void shared_memory_cuda_register(struct request *request, struct answer *answer)
{
    (void)answer;
    if (is_offered(request))
        request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                     "shared memory of a GPU is not offered here: register system shared memory, or send the bytes of "
                     "tensors as "
                     "binary data");
}

void shared_memory_cuda_unregister(struct request *request, struct answer *answer)
{
    if (is_offered(request))
        answer_nothing(answer); /* there is none of that name, which is fine for system memory too */
}

/* ---- Schemas ----------------------------------------------------------------------------------------------------- */

/* clang-format off */
#define SIZE(minimum, says) "{'type':'integer','minimum':" minimum ",'maximum':9007199254740992,'description':'" says "'}"
#define KEY "{'type':'string','minLength':1,'maxLength':128,'description':'An object of /dev/shm: a name that begins as --allow-shm says; a " \
            "slash before it is fine.'}"
#define OBJECT(required, properties) \
    "{'type':'object','additionalProperties':false,'required':[" required "],'properties':{" properties "}}"

static const struct {
    const char *name, *schema; /* JSON with ' for " */
} schemas[] = {
    { "RegionRegister", OBJECT("'key','byte_size'", "'key':" KEY ",'offset':" SIZE("0", "Where the region begins in the object.")
        ",'byte_size':" SIZE("1", "How long it is.")) },
    { "Regions", "{'type':'array','items':" OBJECT("'name','key','offset','byte_size'", "'name':{'type':'string'},'key':{'type':'string'},"
        "'offset':{'type':'integer','minimum':0},'byte_size':{'type':'integer','minimum':1}") "}" },
};
/* clang-format on */

void shared_memory_put_schemas(struct json *j)
{
    for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
        json_put(j, ",'%s':", schemas[i].name);
        json_constant(j, schemas[i].schema);
    }
}
