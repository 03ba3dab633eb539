/* kserve.c: bodies and answers of KServe v2 with Triton's binary tensor extension. A body begins with JSON, whose
 * length in bytes is the header Inference-Header-Content-Length. kserve_json.c translates this JSON into a body in the
 * server's own JSON format, which parse.c checks. The bytes behind the JSON go directly to the caller's memory, where
 * each tensor begins at a multiple of 64 bytes. That memory also has room for inputs in shared memory; the caller
 * copies these inputs.
 *
 * The whole state is in struct kserve_reader, so a body gives the same result however it is split. The bytes of binary
 * tensors come in the same order as the inputs in the JSON. Memory grows with the bytes that have arrived, and not with
 * binary_data_size. Sizes of binary inputs are compared with their shapes before their bytes arrive. */
#include "kserve_internal.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "format.h"
#include "report.h"
#include "suggestions.h"
#include "scan.h"
#include "text/text.h"
#include "tree.h"

/* ---- Reading KServe bodies --------------------------------------------------------------------------------------- */

static void pass(struct kserve_reader *r)
{
    while (r->now < r->extract_count && r->extracts[r->now].bytes == (uint64_t)r->sizes[r->now]) r->now++;
}

/* Takes bytes of the body up to the end of the part that is being read: the JSON, or one binary input. *taken becomes
 * the number of bytes taken. */
static attn_status take(struct kserve_reader *r, const uint8_t *bytes, size_t count, size_t *taken)
{
    attn_status status;
    uint64_t left = count;
    if (!r->root) {
        if (r->json_bytes != JSON_BYTES_UNKNOWN) left = (uint64_t)r->json_bytes - r->offset;
        *taken = count < left ? count : (size_t)left;
        status = scan_feed(r->json, bytes, *taken, &r->error);
        r->offset += *taken;
        return status == ATTN_OK && r->offset == (uint64_t)r->json_bytes ? kserve_end_json(r) : status;
    }
    if (r->now == r->extract_count)
        return attn_fail(&r->error, ATTN_INVALID, "",
                         "the body goes on behind byte %llu, where its last tensor ends: %lld of JSON (" JSON_LENGTH
                         ") and the sum of " BINARY_SIZE,
                         (unsigned long long)r->body_bytes, (long long)r->json_bytes);
    status = scan_take(scan_room(r->json), &r->extracts[r->now], (uint64_t)r->sizes[r->now], bytes, count, taken,
                       &r->error);
    if (status == ATTN_OK) r->offset += *taken;
    return status;
}

static void *open_reader(const proto_limits *limits, const proto_memory *memory)
{
    struct kserve_reader *const r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->limits = *limits;
    if (r->limits.rest_bytes > PROTO_HEADER_BYTES) r->limits.rest_bytes = PROTO_HEADER_BYTES;
    /* a placeholder, until begin() sets the model that the URL names */
    r->model = proto_operations[ATTN_OP_FORWARD].models;
    r->json_bytes = JSON_BYTES_UNKNOWN;
    r->json = scan_new_kserve(&r->limits, memory);
    if (r->json) return r;
    free(r);
    return NULL;
}

static void begin(void *reader, const proto_model *model, int64_t json_bytes)
{
    struct kserve_reader *const r = reader;
    r->model = model;
    r->json_bytes = json_bytes < 0 ? JSON_BYTES_UNKNOWN : json_bytes;
    if (r->json_bytes == 0)
        attn_fail(&r->error, ATTN_INVALID, "",
                  JSON_LENGTH " is 0, which says that the body is one tensor and no JSON; attention takes several");
}

static void close_reader(void *reader)
{
    struct kserve_reader *const r = reader;
    if (!r) return;
    scan_free(r->json);
    tree_forget(&r->trees);
    free(r->inputs);
    free(r->extracts);
    free(r->sizes);
    free(r->shared);
    free(r);
}

static attn_status feed(void *reader, const void *bytes, size_t count, attn_error *err)
{
    struct kserve_reader *const r = reader;
    const uint8_t *p = bytes;
    while (count > 0 && r->error.status == ATTN_OK) {
        size_t taken = 0;
        if (take(r, p, count, &taken) != ATTN_OK) break;
        p += taken;
        count -= taken;
        if (r->root) pass(r);
    }
    if (r->error.status != ATTN_OK && err) *err = r->error;
    return r->error.status;
}

static attn_status cut_off(struct kserve_reader *r)
{
    if (r->json_bytes != JSON_BYTES_UNKNOWN && !r->root)
        return attn_fail(&r->error, ATTN_INVALID, "", JSON_LENGTH " is %lld, but the body has only %llu bytes",
                         (long long)r->json_bytes, (unsigned long long)r->offset);
    const char *name = "";
    char pointer[sizeof(tree_member)] = "";
    for (int i = 0; i < r->input_count; i++)
        if (r->inputs[i].extract == r->now) {
            name = r->inputs[i].name;
            snprintf(pointer, sizeof pointer, "/inputs/%d/parameters/" BINARY_SIZE, i);
        }
    return attn_fail(&r->error, ATTN_INVALID, pointer,
                     "%s: the body ends after %zu of its %lld bytes: it has %llu bytes, must have %llu%s", name,
                     r->extracts[r->now].bytes, (long long)r->sizes[r->now], (unsigned long long)r->offset,
                     (unsigned long long)r->body_bytes,
                     r->json_bytes == JSON_BYTES_UNKNOWN ? "; binary data need " JSON_LENGTH : "");
}

static attn_status end_body(struct kserve_reader *r, attn_error *err)
{
    if (r->error.status == ATTN_OK && !r->root && r->json_bytes == JSON_BYTES_UNKNOWN) (void)kserve_end_json(r);
    if (r->root && r->error.status == ATTN_OK) pass(r);
    if (r->error.status == ATTN_OK && (!r->root || r->now < r->extract_count)) (void)cut_off(r);
    if (r->error.status != ATTN_OK && err) *err = r->error;
    return r->error.status;
}

static attn_status shared(void *reader, proto_shared **list, int *count, attn_error *err)
{
    struct kserve_reader *const r = reader;
    const attn_status status = end_body(r, err);
    *list = r->shared;
    *count = status == ATTN_OK ? r->shared_count : 0;
    const proto_operation *const operation = &proto_operations[r->model->op];
    const bool kernels_only = *count > 0 && !operation->takes_caches && !operation->merges && !operation->judges &&
                              !cJSON_HasObjectItem(r->root, "caches") && !cJSON_HasObjectItem(r->root, "save") &&
                              !cJSON_HasObjectItem(r->root, "verify");
    for (int i = 0; i < *count; i++)
        r->shared[i].kernels_only = kernels_only && (r->shared[i].output || proto_may_lie_on_device(r->shared[i].id));
    return status;
}

static attn_status shared_room(void *reader, attn_error *err)
{
    struct kserve_reader *const r = reader;
    struct scan_room *const room = scan_room(r->json);
    const size_t before = r->memory_bytes;
    attn_error why = { 0 };
    attn_status status = kserve_place_shared(r);
    if (status != ATTN_OK) why = r->error;
    else if (r->memory_bytes > before) status = scan_make_room(room, 0, r->memory_bytes, &why);
    if (status != ATTN_OK) {
        r->memory_bytes = before;
        if (err) *err = why;
        return status;
    }
    for (int i = 0; i < r->shared_count && !r->shared[i].output; i++) {
        scan_extract *const extract = &r->extracts[r->inputs[r->shared[i].index].extract];
        extract->bytes = (size_t)r->shared[i].bytes;
        extract->device = r->shared[i].device;
        r->shared[i].to = extract->bytes && !extract->device ? room->base + extract->offset : NULL;
    }
    r->has_room = true;
    return ATTN_OK;
}

static attn_status finish(void *reader, struct format_body *body, attn_error *err)
{
    struct kserve_reader *const r = reader;
    const attn_status status = end_body(r, err);
    if (status != ATTN_OK) return status;
    if (r->shared_count > 0 && !r->has_room) {
        char pointer[sizeof(tree_member)];
        snprintf(pointer, sizeof pointer, "/%s/%d/parameters/" REGION, r->shared[0].output ? "outputs" : "inputs",
                 r->shared[0].index);
        return attn_fail(err, ATTN_INVALID, pointer, "%s: " PROTO_NO_SHARED_MEMORY, attn_tensors[r->shared[0].id].name);
    }
    body->root = r->root;
    body->extracts = r->extracts;
    body->extract_count = r->extract_count;
    body->memory = scan_memory(r->json, &body->memory_bytes);
    body->memory_bytes = r->memory_bytes;
    body->room = scan_room(r->json);
    body->model = r->model;
    body->id = r->id;
    body->binary = r->binary;
    memcpy(body->binary_parts, r->binary_parts, sizeof body->binary_parts);
    body->gradients = r->gradients;
    body->sequence = r->sequence;
    for (int i = 0; i < r->shared_count; i++)
        if (r->shared[i].output) body->shared |= UINT64_C(1) << r->shared[i].id;
    for (int i = 0; i < r->input_count; i++)
        r->places[proto_tensor_named(r->inputs[i].name, false)] = (proto_input){ i + 1, r->inputs[i].binary,
                                                                                 r->inputs[i].shared };
    body->inputs = r->places;
    return ATTN_OK;
}

static const proto_sequence *sequence(const void *reader)
{
    return &((const struct kserve_reader *)reader)->sequence;
}

static size_t rest_bytes(const void *reader)
{
    const struct kserve_reader *const r = reader;
    size_t bytes;
    (void)scan_rest(r->json, &bytes);
    return bytes;
}

static size_t held_bytes(const void *reader)
{
    return scan_held_bytes(((const struct kserve_reader *)reader)->json);
}

static size_t memory_for(uint64_t body_bytes)
{
    return (size_t)body_bytes;
}

/* Replaces err->member, a JSON pointer into the translated JSON body, by a pointer into the client's KServe body:
 * /q/shape/1 becomes /inputs/0/shape/1. */
static void locate(const proto_call *call, attn_error *err)
{
    char first[TREE_NAME_BYTES], pointer[sizeof(tree_member) + 64];
    if (err->member[0] != '/') return;
    const size_t length = strcspn(err->member + 1, "/");
    const char *rest = err->member + 1 + length;
    if (length >= sizeof first) return;
    memcpy(first, err->member + 1, length);
    first[length] = '\0';
    if (kserve_option_named(first) && strcmp(first, "outputs")) {
        snprintf(pointer, sizeof pointer, "/parameters%s", err->member);
    } else if (proto_tensor_named(first, false) < PROTO_TENSORS) {
        const int number = proto_tensor_named(first, false);
        const proto_input *const input = &call->inputs[number];
        if (input->binary && !strcmp(rest, "/data")) rest = "/parameters/" BINARY_SIZE;
        else if (input->shared && !strcmp(rest, "/data")) rest = "/parameters/" REGION_SIZE;
        else if (!strcmp(rest, "/dtype")) rest = "/datatype";
        if (input->place) snprintf(pointer, sizeof pointer, "/inputs/%d%s", input->place - 1, rest);
        /* the tensor is not among the inputs, because it was sent as a single number, which is a parameter of the
         * request */
        else if (proto_may_be_number(proto_tensor_id(number)))
            snprintf(pointer, sizeof pointer, "/parameters%s", err->member);
        else snprintf(pointer, sizeof pointer, "/inputs");
    } else {
        return;
    }
    snprintf(err->member, sizeof err->member, "%.*s", (int)sizeof err->member - 1, pointer);
}

enum { REPORT_BYTES = 64 << 10 }; /* largest size in bytes of the report on a client's results, without escapes */

/* ---- Writing KServe answers -------------------------------------------------------------------------------------- */

/* Writes the members of an answer that are not tensors (such as times) as KServe parameters. Arrays and objects become
 * strings that contain JSON. */
static void put_parameters(struct text *t, const proto_item *item, const proto_result *result)
{
    struct encode_fact facts[ENCODE_FACTS];
    proto_result without = *result;
    without.report = NULL; /* the report is left out here, because put_report() writes it as an output tensor */
    const int count = encode_facts(item, &without, facts);
    text_put_string(t, "\"parameters\":{");
    for (int i = 0; i < count; i++) {
        const bool composite = facts[i].value[0] == '{' || facts[i].value[0] == '[';
        text_put_string(t, i ? ",\"" : "\"");
        text_put_string(t, facts[i].name);
        text_put_string(t, composite ? "\":\"" : "\":");
        if (composite) text_put_json(t, facts[i].value, ENCODE_FACT_BYTES);
        else text_put_string(t, facts[i].value);
        if (composite) text_put_char(t, '"');
    }
    text_put_char(t, '}');
}

static void put_report(struct text *t, const judge_result *report)
{
    struct text json = text_growing(REPORT_BYTES);
    for (int i = 0; i < REPORT_MEMBERS; i++) {
        text_printf(&json, "%s\"%s\":", i ? "," : "{", report_members[i].name);
        report_members[i].put(&json, report);
    }
    text_put_char(&json, '}');
    text_put_string(t, "{\"name\":\"report\",\"datatype\":\"BYTES\",\"shape\":[1],\"data\":[\"");
    if (json.failure == TEXT_FINE) text_put_json(t, json.at, REPORT_BYTES);
    else t->failure = json.failure;
    text_put_string(t, "\"]}");
    text_free(&json);
}

/* Writes an output as bytes, as numbers, or by name only. An output in shared memory gets no parameters, because
 * Triton's C++ client requires that. */
static void put_output(proto_encoder *e, int number, const attn_tensor *tensor, bool binary, bool in_region)
{
    char name[PROTO_NAME_BYTES];
    struct text *const t = encode_text(e);
    int64_t bytes = 0;
    attn_shape_bytes(tensor->dtype, tensor->rank, tensor->shape, &bytes);
    text_put_string(t, "{\"name\":\"");
    text_put_string(t, proto_tensor_name(number, true, name));
    text_put_string(t, "\",\"datatype\":\"");
    text_put_string(t, proto_datatype(tensor->dtype));
    text_put_string(t, "\",\"shape\":[");
    for (int a = 0; a < tensor->rank; a++) {
        if (a) text_put_char(t, ',');
        text_put_number(t, (uint64_t)tensor->shape[a]);
    }
    if (in_region) {
        text_put_string(t, "]}");
    } else if (binary) {
        text_put_string(t, "],\"parameters\":{\"" BINARY_SIZE "\":");
        text_put_number(t, (uint64_t)bytes);
        text_put_string(t, "}}");
    } else {
        text_put_string(t, "],\"data\":");
        encode_tensor(e, tensor, ENCODE_LIST);
        text_put_char(t, '}');
    }
}

static bool is_binary(const proto_call *call, int number)
{
    /* output numbers from ATTN_TENSOR_COUNT on stand for gradients of a merge's partial results: dout and dlse of
     * partial result 0, of partial result 1, ... */
    const int of_part = number - ATTN_TENSOR_COUNT;
    return of_part < 0 ? call->binary >> number & 1 : call->binary_parts[of_part % 2] >> of_part / 2 & 1;
}

static void answer(proto_encoder *e, const proto_call *call, const proto_result *results, const char *request_id)
{
    proto_item *const item = &call->items[0];
    struct text *const t = encode_text(e);
    const int end = proto_item_results_end(item);
    bool first = true;
    /* only an answer to several problems needs request_id, and a KServe request has one problem */
    (void)request_id;
    text_put_char(t, '{');
    if (call->id) {
        text_put_string(t, "\"id\":\"");
        /* each byte of the id may be written as an escape of six characters, such as \u001f */
        text_put_json(t, call->id, 6 * ID_BYTES);
        text_put_string(t, "\",");
    }
    text_put_string(t, "\"model_name\":\"");
    text_put_string(t, call->model->name);
    text_put_string(t, "\",\"model_version\":\"1\",");
    put_parameters(t, item, results);
    text_put_string(t, ",\"outputs\":[");
    for (int n = 0; n < end; n++) {
        const attn_tensor *const tensor = proto_item_result(item, n);
        if (!tensor) continue;
        if (!first) text_put_char(t, ',');
        first = false;
        put_output(e, n, tensor, is_binary(call, n), n < ATTN_TENSOR_COUNT && call->shared >> n & 1);
    }
    if (results->report) put_report(t, results->report);
    text_put_string(t, "]}");
    for (int n = 0; n < end; n++)
        if (proto_item_result(item, n) && is_binary(call, n))
            encode_tensor(e, proto_item_result(item, n), ENCODE_BYTES);
}

const proto_format proto_kserve = {
    .open = open_reader,
    .close = close_reader,
    .begin = begin,
    .feed = feed,
    .finish = finish,
    .sequence = sequence,
    .shared = shared,
    .shared_room = shared_room,
    .rest_bytes = rest_bytes,
    .held_bytes = held_bytes,
    .memory_for = memory_for,
    .locate = locate,
    .write = answer,
    /* content type of an answer that is only JSON; with bytes behind the JSON it is application/octet-stream */
    .media = "application/json",
    .one_problem = true,
    .text = true,
};
