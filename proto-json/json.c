/* json.c: JSON as a format of bodies and answers. A body with a missing or wrong content type is read as JSON. The
 * reader keeps the first bytes of a body until they show whether it is a safetensors file. If it is one, the client's
 * error says so. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "format.h"
#include "text/text.h"
#include "tree.h"

/* ---- Reading JSON bodies ----------------------------------------------------------------------------------------- */

struct reader {
    scan *scan;
    struct tree_memory trees;
    uint8_t first[PROTO_SAFETENSORS_MARK];
    size_t first_bytes;
    attn_error error; /* the error of a body that does not begin like JSON; every later call returns it */
};

static void *open_reader(const proto_limits *limits, const proto_memory *memory)
{
    struct reader *const r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->scan = scan_new(limits, memory);
    if (r->scan) return r;
    free(r);
    return NULL;
}

static void close_reader(void *reader)
{
    struct reader *const r = reader;
    if (!r) return;
    scan_free(r->scan);
    tree_forget(&r->trees);
    free(r);
}

/* Passes the first bytes of the body, which the reader has kept, to the scanner. */
static attn_status first_bytes_done(struct reader *r, attn_error *err)
{
    if (!proto_is_safetensors(r->first, r->first_bytes)) return scan_feed(r->scan, r->first, r->first_bytes, err);
    attn_fail(&r->error, ATTN_INVALID, "",
              "the body is no JSON, it begins like a safetensors file; send it with Content-Type: "
              "application/x-safetensors");
    if (err) *err = r->error;
    return r->error.status;
}

static attn_status feed(void *reader, const void *bytes, size_t count, attn_error *err)
{
    struct reader *const r = reader;
    if (r->error.status != ATTN_OK) {
        if (err) *err = r->error;
        return r->error.status;
    }
    if (r->first_bytes == sizeof r->first) return scan_feed(r->scan, bytes, count, err);
    const size_t lacks = sizeof r->first - r->first_bytes, taken = count < lacks ? count : lacks;
    memcpy(r->first + r->first_bytes, bytes, taken);
    r->first_bytes += taken;
    if (r->first_bytes < sizeof r->first) return ATTN_OK;
    const attn_status status = first_bytes_done(r, err);
    return status == ATTN_OK ? scan_feed(r->scan, (const uint8_t *)bytes + taken, count - taken, err) : status;
}

static attn_status finish(void *reader, struct format_body *body, attn_error *err)
{
    struct reader *const r = reader;
    size_t length;
    attn_status status = r->error.status;
    if (status != ATTN_OK && err) *err = r->error;
    if (status == ATTN_OK && r->first_bytes < sizeof r->first) status = first_bytes_done(r, err);
    if (status == ATTN_OK) status = scan_finish(r->scan, err);
    if (status != ATTN_OK) return status;
    const char *const rest = scan_rest(r->scan, &length);
    tree_enter(&r->trees);
    body->root = tree_parse(rest, length);
    tree_leave();
    body->extracts = scan_extracts(r->scan, &body->extract_count);
    body->memory = scan_memory(r->scan, &body->memory_bytes);
    body->room = scan_room(r->scan);
    return ATTN_OK;
}

static size_t rest_bytes(const void *reader)
{
    size_t bytes;
    (void)scan_rest(((const struct reader *)reader)->scan, &bytes);
    return bytes;
}

static size_t held_bytes(const void *reader)
{
    return scan_held_bytes(((const struct reader *)reader)->scan);
}

/* Returns how many bytes the tensors of a body of `body_bytes` bytes take in memory. The number is exact for base64
 * text; arrays of numbers may need more. */
static size_t memory_for(uint64_t body_bytes)
{
    return (size_t)(body_bytes / 4 * 3);
}

/* ---- Writing JSON answers ---------------------------------------------------------------------------------------- */

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
    text_put_string(t, array ? "}" : "\"}");
}

static void add_gradients(proto_encoder *e, const proto_item *item)
{
    struct text *const t = encode_text(e);
    const proto_parts *const parts = item->parts;
    text_put_string(t, "\"parts\":[");
    for (int p = 0; p < parts->count; p++) {
        const attn_result *const gradient = &parts->at[parts->count + p];
        text_put_string(t, p ? ",{" : "{");
        add_tensor(e, attn_tensors[ATTN_T_dout].name, &gradient->out, item->encoding);
        text_put_char(t, ',');
        add_tensor(e, attn_tensors[ATTN_T_dlse].name, &gradient->lse, item->encoding);
        text_put_char(t, '}');
    }
    text_put_string(t, "],");
}

static void add_result(proto_encoder *e, const proto_item *item, const proto_result *result)
{
    struct text *const t = encode_text(e);
    struct encode_fact facts[ENCODE_FACTS];
    const int count = encode_facts(item, result, facts);
    text_put_char(t, '{');
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (item->outputs >> id & 1) {
            add_tensor(e, attn_tensors[id].name, &item->problem.tensor[id], item->encoding);
            text_put_char(t, ',');
        }
    if (item->parts && item->parts->has_back) add_gradients(e, item);
    for (int i = 0; i < count; i++) {
        text_put_string(t, i ? ",\"" : "\"");
        text_put_string(t, facts[i].name);
        text_put_string(t, "\":");
        text_put_string(t, facts[i].value);
    }
    text_put_char(t, '}');
}

/* If a body has several problems, its answer contains the errors of those that failed. This adds one such error. */
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
    .rest_bytes = rest_bytes,
    .held_bytes = held_bytes,
    .memory_for = memory_for,
    .write = answer,
    .media = "application/json",
    .text = true,
};
