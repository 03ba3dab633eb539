/* fuzz_decoder.c: fuzz target for whole JSON requests, from body to answer.
 *
 * An input is one byte of choices, one byte that seeds the random sizes of the pieces, and the request body:
 *   bit 0  backward
 *   bit 1  small limits
 *   bit 2  q, k and v of a small valid problem are inserted before the body's first member, so that the fuzzer gets
 *          past the error "q is required" to the options
 *   bit 6  a merge, whatever bit 0 says
 *
 * What must hold:
 *   1. The body read in pieces has the same result as the whole body, to the bit (decoded_text() prints everything).
 *   2. Every problem without an error has passed attn_check() or attn_merge_check(). Its inputs lie in the parser's
 *      memory, and its outputs have shapes.
 *   3. The answer is JSON, has the announced length, and is the same in blocks of any size. Problem documents
 *      (answers to refused requests) are JSON, too. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char small[] = "{\"q\":{\"shape\":[1,2,2,2],\"dtype\":\"float16\",\"data\":\"AAABAAIAAwAEAAUABgAHAA==\"},"
                            "\"k\":{\"shape\":[1,3,1,2],\"dtype\":\"float16\",\"data\":[1,2,3,4,5,6]},\"v\":{\"shape\":"
                            "[1,3,1,1],\"dtype\":\"float16\",\"data\":[1,2,3]},";

static void parses(const char *text, size_t length)
{
    cJSON *json = cJSON_ParseWithLengthOpts(text, length + 1, NULL, true);
    must(json != NULL);
    cJSON_Delete(json);
}

static void check_answer(proto_call *call, uint32_t seed)
{
    proto_result *results = calloc((size_t)call->count, sizeof *results);
    uint8_t *outputs = calloc(1, OUTPUT_BYTES);
    must(results && outputs);
    for (size_t i = 0; i < OUTPUT_BYTES; i++) outputs[i] = (uint8_t)(seed >> i % 25);
    for (int i = 0; i < call->count; i++) {
        proto_item *item = &call->items[i];
        if (item->error.status != ATTN_OK) {
            must(item->error.text[0] && memchr(item->error.text, 0, sizeof item->error.text) &&
                 memchr(item->error.member, 0, sizeof item->error.member));
            continue;
        }
        /* The fuzz target has no saved forwards (contexts), so a backward that names one lacks tensors and cannot be
         * answered. */
        if (item->context[0]) {
            item->error.status = ATTN_NOT_FOUND;
            continue;
        }
        if (!give_outputs(item, outputs)) item->error.status = ATTN_TOO_LARGE;
        snprintf(results[i].backend, sizeof results[i].backend, "fuzz");
    }
    if (call->envelope || call->items[0].error.status == ATTN_OK) {
        size_t length, head;
        char *answer = answer_of(call, results, &seed, &length, &head);
        parses(answer, length);
        free(answer);
    }
    free(results);
    free(outputs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct decoded whole = { 0 }, pieces = { 0 };
    char *body, *a, *b;
    size_t bytes = 0;
    uint32_t seed;
    if (size < 2) return 0;
    const attn_op op = data[0] & 64    ? (attn_op)PROTO_OP_MERGE
                       : data[0] & 128 ? ATTN_OP_OBSERVE
                       : data[0] & 1   ? ATTN_OP_BACKWARD
                                       : ATTN_OP_FORWARD;
    seed = 1u + data[1];
    if (data[0] & 2) {
        limits.rest_bytes = 400;
        limits.depth = 6;
        limits.members = 8;
        limits.values = 60;
        limits.batch = 2;
        limits.tensor_bytes = 300;
    }
    body = malloc(sizeof small + size);
    must(body != NULL);
    if (data[0] & 4 && size > 2 && data[2] == '{') {
        memcpy(body, small, bytes = sizeof small - 1);
        memcpy(body + bytes, data + 3, size - 3), bytes += size - 3;
    } else {
        memcpy(body, data + 2, bytes = size - 2);
    }
    decode_in_pieces(&whole, &proto_json, op, &limits, body, bytes, NULL, NULL);
    decode_in_pieces(&pieces, &proto_json, op, &limits, body, bytes, some_bytes, &seed);
    a = decoded_text(&whole), b = decoded_text(&pieces);
    if (strcmp(a, b)) fprintf(stderr, "whole:\n%s\npieces:\n%s\n", a, b);
    must(!strcmp(a, b));
    if (whole.status == ATTN_OK) {
        check_answer(whole.call, seed);
    } else {
        char problem[4096];
        const size_t length = proto_error_write(problem, sizeof problem, proto_error_of(whole.status), whole.err.text,
                                                NULL, whole.err.member, "fuzz");
        must(whole.call == NULL && whole.err.text[0]);
        parses(problem, length);
    }
    free(a), free(b), free(body);
    decoded_clear(&whole);
    decoded_clear(&pieces);
    return 0;
}
