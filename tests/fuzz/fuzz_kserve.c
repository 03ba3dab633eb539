/* fuzz_kserve.c: fuzz target for bodies and answers of KServe v2.
 *
 * An input is one byte of choices, one byte that seeds the sizes of the pieces, and the request body: JSON up to the
 * first line break, which is removed, and then the bytes of the tensors.
 *   bits 0, 1  the model in the request's path: forward, backward, causal forward, or one that takes only float16
 *   bit 2      small limits
 *   bit 3      the request does not say how many bytes of the body are JSON
 *   bit 4      q, k and v of a small valid problem are inserted before the JSON's first member, k and v as bytes after
 *              the JSON, so that the fuzzer gets past the error "q is required" to parameters and outputs
 *   bit 5      all shared memory that the body names exists
 *   bit 6      the model is that of a merge, whatever bits 0 and 1 say
 *
 * What must hold:
 *   1. The body read in pieces has the same result as the whole body, to the bit.
 *   2. A problem without an error has passed attn_check(), and its inputs lie in the parser's memory (decoded_text()
 *      checks this).
 *   3. The answer has the announced length and is the same in blocks of any size. Its head is JSON, except for numbers
 *      that are not finite, and the sizes in the head are those of the bytes after it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { SMALL_BYTES = 18 };

static const char small[] =
    "{\"inputs\":[{\"name\":\"q\",\"shape\":[1,2,2,2],\"datatype\":\"FP16\",\"data\":[1,2,3,4,5,6,7,8]},"
    "{\"name\":\"k\",\"shape\":[1,3,1,2],\"datatype\":\"FP16\",\"parameters\":{\"binary_data_size\":12}},"
    "{\"name\":\"v\",\"shape\":[1,3,1,1],\"datatype\":\"FP16\",\"parameters\":{\"binary_data_size\":6}}],";

static const proto_model models[] = { { "attention_forward", ATTN_OP_FORWARD, false, false, ATTN_F32 },
                                      { "attention_backward", ATTN_OP_BACKWARD, false, false, ATTN_F32 },
                                      { "attention_forward_causal", ATTN_OP_FORWARD, true, false, ATTN_F32 },
                                      { "attention_forward_fp16", ATTN_OP_FORWARD, false, true, ATTN_F16 } };

static const proto_model merges = { "attention_merge", PROTO_OP_MERGE, false, false, ATTN_F32 };

/* Makes the body that a fuzzer's input describes; the caller frees it. *json becomes the length of its JSON. */
static uint8_t *body_of(bool problem, const uint8_t *data, size_t size, size_t *json, size_t *bytes)
{
    const uint8_t *const line = memchr(data, '\n', size);
    const size_t own = line ? (size_t)(line - data) : size, left = line ? size - own - 1 : 0;
    uint8_t *const body = calloc(1, sizeof small + SMALL_BYTES + size + 1);
    uint8_t *p = body;
    must(body != NULL);
    problem = problem && own > 0 && data[0] == '{';
    if (problem) {
        memcpy(p, small, sizeof small - 1), p += sizeof small - 1;
        memcpy(p, data + 1, own - 1), p += own - 1;
    } else {
        memcpy(p, data, own), p += own;
    }
    *json = (size_t)(p - body);
    if (problem)
        for (int i = 0; i < SMALL_BYTES; i++) *p++ = (uint8_t)(i % 2 ? 0x3c : i);
    if (left) memcpy(p, line + 1, left), p += left;
    *bytes = (size_t)(p - body);
    return body;
}

/* Returns the number of tensor bytes that an answer's JSON states. */
static size_t announced(const proto_call *call, const cJSON *json)
{
    size_t bytes = 0;
    const cJSON *output;
    must(cJSON_IsString(cJSON_GetObjectItemCaseSensitive(json, "model_name")));
    cJSON_ArrayForEach(output, cJSON_GetObjectItemCaseSensitive(json, "outputs"))
    {
        const cJSON *parameters = cJSON_GetObjectItemCaseSensitive(output, "parameters");
        const int has = (parameters != NULL) + (cJSON_GetObjectItemCaseSensitive(output, "data") != NULL);
        const char *const name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(output, "name"));
        must(name != NULL && proto_tensor_named(name, true) < PROTO_TENSORS);
        const int number = proto_tensor_named(name, true);
        /* An output in the answer must have numbers or their size in bytes, unless it was written to shared memory. */
        must(has == !(number < ATTN_TENSOR_COUNT && call->shared >> number & 1));
        if (parameters)
            bytes += (size_t)cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(parameters, "binary_data_size"));
    }
    return bytes;
}

static void check_answer(proto_call *call, uint32_t seed)
{
    proto_result result = { .backend = "fuzz", .context = "c-1", .verified = true };
    /* zeros, because NaN and infinity cannot be written as JSON */
    uint8_t *outputs = calloc(1, OUTPUT_BYTES);
    proto_item *item = call->items;
    must(outputs && call->count == 1 && !call->envelope && item->error.status == ATTN_OK && call->model != NULL);
    /* The fuzz target has no saved forwards (contexts), so a backward that names one lacks tensors and cannot be
     * answered. */
    if (!item->context[0] && give_outputs(item, outputs)) {
        size_t length, head;
        char *answer = answer_of(call, &result, &seed, &length, &head);
        answer[head] = '\0';
        cJSON *json = cJSON_ParseWithLengthOpts(answer, head + 1, NULL, true);
        must(json != NULL && announced(call, json) == length - head);
        cJSON_Delete(json);
        free(answer);
    }
    free(outputs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct decoded whole = { 0 }, pieces = { 0 };
    size_t json = 0, bytes = 0;
    uint32_t seed;
    if (size < 2) return 0;
    const proto_model *const model = data[0] & 64 ? &merges : &models[data[0] & 3];
    seed = 1u + data[1];
    if (data[0] & 4) {
        limits.rest_bytes = 700;
        limits.depth = 6;
        limits.members = 8;
        limits.values = 60;
        limits.tensor_bytes = 300;
    }
    whole.has_regions = pieces.has_regions = data[0] & 32;
    /* The JSON may announce large tensors whose bytes do not follow, so memory is limited. */
    whole.memory.limit = pieces.memory.limit = 1 << 20;
    uint8_t *body = body_of(data[0] & 16, data + 2, size - 2, &json, &bytes);
    const int64_t said = data[0] & 8 ? -1 : (int64_t)json;
    decode_kserve(&whole, model, said, &limits, body, bytes, NULL, NULL);
    decode_kserve(&pieces, model, said, &limits, body, bytes, some_bytes, &seed);
    char *a = decoded_text(&whole), *b = decoded_text(&pieces);
    if (strcmp(a, b)) fprintf(stderr, "whole:\n%s\npieces:\n%s\n", a, b);
    must(!strcmp(a, b));
    if (whole.status == ATTN_OK) check_answer(whole.call, seed);
    else must(whole.call == NULL && whole.err.text[0]);
    free(a), free(b), free(body);
    decoded_clear(&whole);
    decoded_clear(&pieces);
    return 0;
}
