/* json.c: JSON as a format of bodies and answers: scan.c reads it, and an answer is an object of tensors and facts. */
#include <stdio.h>
#include <string.h>

#include "encode.h"
#include "format.h"
#include "text.h"
#include "tree.h"

/* ---- Bodies ------------------------------------------------------------------------------------------------------ */

static void *open_reader(const proto_limits *limits, const proto_memory *memory)
{
    return scan_new(limits, memory);
}

static void close_reader(void *reader)
{
    scan_free(reader);
}

static attn_status feed(void *reader, const void *bytes, size_t count, attn_error *err)
{
    return scan_feed(reader, bytes, count, err);
}

static attn_status finish(void *reader, struct format_body *body, attn_error *err)
{
    size_t length;
    const attn_status status = scan_finish(reader, err);
    if (status != ATTN_OK) return status;
    const char *const skeleton = scan_skeleton(reader, &length);
    body->root = tree_parse(skeleton, length + 1);
    body->lifts = scan_lifts(reader, &body->lift_count);
    body->memory = scan_memory(reader, &body->memory_bytes);
    return ATTN_OK;
}

static size_t skeleton_bytes(const void *reader)
{
    size_t bytes;
    (void)scan_skeleton(reader, &bytes);
    return bytes;
}

/* Of base64: arrays of numbers may need more. */
static size_t memory_for(uint64_t body_bytes)
{
    return (size_t)(body_bytes / 4 * 3);
}

/* ---- Answers ----------------------------------------------------------------------------------------------------- */

static void add_tensor(proto_encoder *e, const char *name, const attn_tensor *tensor, proto_encoding encoding)
{
    struct text *const t = encode_text(e);
    const bool array = encoding == PROTO_ARRAY;
    text_put_char(t, '"');
    text_put_string(t, name);
    text_put_string(t, "\":{\"shape\":[");
    for (int a = 0; a < tensor->rank; a++) {
        if (a) text_put_char(t, ',');
        text_put_number(t, (uint64_t)tensor->shape[a]);
    }
    text_put_string(t, "],\"dtype\":\"");
    text_put_string(t, attn_dtype_name(tensor->dtype));
    text_put_string(t, array ? "\",\"data\":" : "\",\"data\":\"");
    encode_tensor(e, tensor, array ? ENCODE_ARRAY : ENCODE_BASE64);
    text_put_string(t, array ? "}," : "\"},");
}

/* The members of one answer. */
static void add_result(proto_encoder *e, const proto_item *item, const proto_result *result)
{
    struct text *const t = encode_text(e);
    struct encode_fact facts[ENCODE_FACTS];
    const int count = encode_facts(item, result, facts);
    text_put_char(t, '{');
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (item->outputs >> id & 1) add_tensor(e, attn_tensors[id].name, &item->problem.tensor[id], item->encoding);
    for (int i = 0; i < count; i++) {
        text_put_string(t, i ? ",\"" : "\"");
        text_put_string(t, facts[i].name);
        text_put_string(t, "\":");
        text_put_string(t, facts[i].value);
    }
    text_put_char(t, '}');
}

/* A problem of several that has no result. */
static void add_fault(proto_encoder *e, int index, const attn_error *fault, const char *request_id)
{
    struct text *const t = encode_text(e);
    char problem[ENCODE_PROBLEM_BYTES], prefix[32];
    snprintf(prefix, sizeof prefix, "/requests/%d", index);
    const size_t length = proto_error_write(problem, sizeof problem, proto_error_of(fault->status), fault->text, prefix,
                                            fault->member, request_id);
    text_put_string(t, "{\"error\":");
    text_put(t, problem, length);
    text_put_char(t, '}');
}

static void answer(proto_encoder *e, const proto_call *call, const proto_result *results, const char *request_id)
{
    struct text *const t = encode_text(e);
    if (call->envelope) text_put_string(t, "{\"responses\":[");
    for (int i = 0; i < call->count; i++) {
        const attn_error *fault = &call->items[i].error;
        if (i) text_put_char(t, ',');
        if (fault->status == ATTN_OK) add_result(e, &call->items[i], &results[i]);
        else add_fault(e, i, fault, request_id);
    }
    if (call->envelope) text_put_string(t, "]}");
}

const proto_format proto_json = {
    .open = open_reader,
    .close = close_reader,
    .feed = feed,
    .finish = finish,
    .skeleton_bytes = skeleton_bytes,
    .memory_for = memory_for,
    .write = answer,
    .media = "application/json",
    .text = true,
};
