/* shared_memory.c: the routes of Triton's shared memory extensions; see shared_memory.h. A region is a registered piece
 * of shared memory. If a path names a region, its name is the first parameter of the path. */
#include "server/routes/shared_memory.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/text.h"
#include "server/routes/route.h"
#include "server/base/log.h"
#include "server/device/devices.h"
#include "server/regions/regions.h"
#include "server/work/server.h"
#include "server/routes/json.h"

static_assert((int)ROUTE_PARAMETER_BYTES < (int)PROTO_REGION_BYTES, "a region's name in a path fits");

static bool is_offered(struct request *request)
{
    if (request->server->regions != NULL) return true;
    request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                 "shared memory is not offered here: start the server with --allow-shm PREFIX (or --allow-cuda-shm, "
                 "for that of GPUs), or send the bytes of tensors as binary data");
    return false;
}

/* Returns the name of the region (registered shared memory) in the request's path. NULL: the request is about all
 * regions. */
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

static void put_cuda_region(void *context, const struct region_facts *facts)
{
    struct json *const j = context;
    json_comma(j);
    json_put(j, "{'name':'%s','device_id':%lld,'byte_size':%lld}", facts->name, (long long)facts->device_id,
             (long long)facts->bytes);
}

static void put_system_region(void *context, const struct region_facts *facts)
{
    struct json *const j = context;
    json_comma(j);
    json_put(j, "{'name':'%s','key':'%s','offset':%lld,'byte_size':%lld}", facts->name, facts->key,
             (long long)facts->offset, (long long)facts->bytes);
}

static void (*const put_region[REGION_KIND_COUNT])(void *context, const struct region_facts *facts) = {
    [REGION_SYSTEM] = put_system_region,
    [REGION_CUDA] = put_cuda_region,
};

static void answer_status(struct request *request, enum region_kind kind, struct answer *answer)
{
    if (!is_offered(request)) return;
    struct json j = { 0 };
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    json_raw(&j, "[");
    const int count = regions_visit(request->server->regions, kind, request->caller, name, put_region[kind], &j);
    json_raw(&j, "]\n");
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = json_take(&j, &answer->length);
    if (name != NULL && count == 0)
        request_fail(request, PROTO_E_NOT_FOUND, NULL, "there is no region '%.*s'", (int)text_cut(name, 64), name);
}

void shared_memory_status(struct request *request, struct answer *answer)
{
    answer_status(request, REGION_SYSTEM, answer);
}

void shared_memory_cuda_status(struct request *request, struct answer *answer)
{
    answer_status(request, REGION_CUDA, answer);
}

/* Logs that a region (registered shared memory) has changed. The log line has the name that the client gave the region.
 * It has no key (name of the shared memory object), which concerns only the operator and the client. */
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
    if (request->server->config->allow_shm_count == 0) {
        request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                     "system shared memory is not offered here: start the server with --allow-shm PREFIX, or register "
                     "memory of a GPU, or send the bytes of tensors as binary data");
    } else if (proto_region_read(request->text, request->text_bytes, &wanted, &why) != ATTN_OK) {
        request_fail_status(request, &why);
    } else if (!regions_register(request->server->regions, request->caller, name, &wanted, &error, &why)) {
        request_fail(request, error, why.member, "%s", why.text);
    } else {
        log_region(request, "region_registered", name, "bytes", wanted.bytes);
        answer_nothing(answer);
    }
}

/* Returns the device whose number is `device_id` in the body. Fails the request and returns NULL if the server does not
 * use this device, or if the device has failed. */
static attn_device *device_of(struct request *request, const proto_cuda_region *wanted, int *number)
{
    struct server *const server = request->server;
    attn_device *const device = devices_of_index(server->devices, wanted->device, number);
    if (device == NULL) {
        request_fail(request, PROTO_E_INVALID_REQUEST, "/device_id",
                     "device_id: is %lld, this server has no such device (GET /v1/info lists them)",
                     (long long)wanted->device);
        return NULL;
    }
    if (devices_is_usable(server->devices, *number)) return device;
    request_fail(request, PROTO_E_UNAVAILABLE, "/device_id", "device_id: device %lld has failed",
                 (long long)wanted->device);
    return NULL;
}

/* Returns whether the server can register GPU memory. If not, fails the request. */
static bool takes_cuda(struct request *request)
{
    if (!is_offered(request)) return false;
    if (!request->server->config->allow_cuda_shm) {
        request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                     "shared memory of a GPU is not offered here: start the server with --allow-cuda-shm, or register "
                     "system shared memory, or send the bytes of tensors as binary data");
        return false;
    }
    if (!devices_largest(request->server->devices)->unified) return true;
    request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                 "shared memory of a GPU is not offered here: this server computes on the CPU; register system shared "
                 "memory, or send the bytes of tensors as binary data");
    return false;
}

void shared_memory_cuda_register(struct request *request, struct answer *answer)
{
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    proto_cuda_region wanted;
    proto_error error;
    attn_error why = { 0 };
    attn_device *device;
    int number;
    if (!takes_cuda(request)) return;
    if (proto_cuda_region_read(request->text, request->text_bytes, &wanted, &why) != ATTN_OK) {
        request_fail_status(request, &why);
    } else if ((device = device_of(request, &wanted, &number)) == NULL) {
        return;
    } else if (!regions_register_cuda(request->server->regions, request->caller, name, &wanted, device, number, &error,
                                      &why)) {
        if (why.status == ATTN_DEVICE_LOST) devices_note_lost(request->server->devices, number);
        request_fail(request, error, why.member, "%s", why.text);
    } else {
        log_region(request, "region_registered", name, "bytes", wanted.bytes);
        answer_nothing(answer);
    }
}

static void unregister(struct request *request, enum region_kind kind, struct answer *answer)
{
    char text[ROUTE_PARAMETER_BYTES + 1];
    const char *const name = name_of(request, text);
    if (!is_offered(request)) return;
    const int count = regions_unregister(request->server->regions, kind, request->caller, name);
    if (count > 0) log_region(request, "region_unregistered", name ? name : "", "count", count);
    answer_nothing(answer);
}

void shared_memory_unregister(struct request *request, struct answer *answer)
{
    unregister(request, REGION_SYSTEM, answer);
}

void shared_memory_cuda_unregister(struct request *request, struct answer *answer)
{
    unregister(request, REGION_CUDA, answer);
}
