/* fuzz_safetensors.c: fuzz target for safetensors bodies and answers.
 *
 * An input is one byte of choices, one byte that seeds the random sizes of the pieces, and the request body without the
 * 8 bytes of its header's length:
 *   bit 0  backward
 *   bit 1  small limits
 *   bit 2  the input contains these 8 bytes. Without this bit they are computed: the header ends at the first line
 *          break, which is removed, or at the end of the input
 *   bit 3  q, k and v of a small valid problem are inserted before the header's first member and before the data, so
 *          that the fuzzer gets past the error "q is required" to the options; the body's own offsets begin after them
 *   bit 6  a merge, whatever bit 0 says
 *
 * What must hold:
 *   1. The body read in pieces has the same result as the whole body, to the bit.
 *   2. A problem without an error has passed attn_check() or attn_merge_check(), and its inputs lie in the parser's
 *      memory (decoded_text() checks this).
 *   3. The answer, as safetensors, has the announced length and is the same in blocks of any size, and its header is
 *      JSON. If it is sent back as a body, it is refused because of one of its members. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LENGTH_BYTES = 8, SMALL_BYTES = 34 };

static const char small[] = "{\"q\":{\"dtype\":\"F16\",\"shape\":[1,2,2,2],\"data_offsets\":[0,16]},"
                            "\"k\":{\"dtype\":\"F16\",\"shape\":[1,3,1,2],\"data_offsets\":[16,28]},"
                            "\"v\":{\"dtype\":\"F16\",\"shape\":[1,3,1,1],\"data_offsets\":[28,34]},";

/* Makes the body that a fuzzer's input describes; the caller frees it. */
static uint8_t *body_of(uint8_t choices, const uint8_t *data, size_t size, size_t *bytes)
{
    const bool whole = choices & 4, problem = !whole && (choices & 8) && size > 0 && data[0] == '{';
    const uint8_t *const line = memchr(data, '\n', size);
    const size_t own = line && !whole ? (size_t)(line - data) : size; /* length of the header in the fuzzer's input */
    const uint8_t *const rest = line && !whole ? line + 1 : data + size;
    const size_t left = (size_t)(data + size - rest);
    uint8_t *const body = calloc(1, LENGTH_BYTES + sizeof small + SMALL_BYTES + size + 1);
    uint8_t *p = body;
    must(body != NULL);
    if (whole) {
        memcpy(body, data, size);
        *bytes = size;
        return body;
    }
    const size_t header = problem ? sizeof small - 1 + own - 1 : own;
    for (int i = 0; i < LENGTH_BYTES; i++) *p++ = (uint8_t)((uint64_t)header >> 8 * i);
    if (problem) memcpy(p, small, sizeof small - 1), memcpy(p + sizeof small - 1, data + 1, own - 1);
    else memcpy(p, data, own);
    p += header;
    if (problem)
        for (int i = 0; i < SMALL_BYTES; i++) *p++ = (uint8_t)(i % 2 ? 0x3c : i);
    memcpy(p, rest, left);
    *bytes = (size_t)(p - body) + left;
    return body;
}

static void check_answer(proto_call *call, uint32_t seed)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    proto_result result = { .backend = "fuzz", .context = "c-1", .verified = true };
    uint8_t *outputs = calloc(1, OUTPUT_BYTES);
    proto_item *item = call->items;
    must(outputs && call->count == 1 && !call->envelope && item->error.status == ATTN_OK);
    /* The fuzz target has no saved forwards (contexts), so a backward that names one lacks tensors and cannot be
     * answered. */
    if (!item->context[0] && give_outputs(item, outputs)) {
        size_t length, head, header = 0;
        char *answer = answer_of(call, &result, &seed, &length, &head);
        for (int i = LENGTH_BYTES - 1; i >= 0; i--) header = header << 8 | (unsigned char)answer[i];
        must(header % 8 == 0 && LENGTH_BYTES + header == head);
        cJSON *json = cJSON_ParseWithLength(answer + LENGTH_BYTES, header);
        must(json != NULL);
        cJSON_Delete(json);
        struct decoded back = { 0 };
        decode_in_pieces(&back, &proto_safetensors, ATTN_OP_FORWARD, &limits, answer, length, some_bytes, &seed);
        must(back.status == ATTN_INVALID && back.err.member[0]);
        decoded_clear(&back);
        free(answer);
    }
    free(outputs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct decoded whole = { 0 }, pieces = { 0 };
    size_t bytes = 0;
    uint32_t seed;
    if (size < 2) return 0;
    const attn_op op = data[0] & 64 ? (attn_op)PROTO_OP_MERGE : data[0] & 1 ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    seed = 1u + data[1];
    if (data[0] & 2) {
        limits.rest_bytes = 500;
        limits.depth = 5;
        limits.members = 8;
        limits.values = 60;
        limits.tensor_bytes = 300;
    }
    uint8_t *body = body_of(data[0], data + 2, size - 2, &bytes);
    decode_in_pieces(&whole, &proto_safetensors, op, &limits, body, bytes, NULL, NULL);
    decode_in_pieces(&pieces, &proto_safetensors, op, &limits, body, bytes, some_bytes, &seed);
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
