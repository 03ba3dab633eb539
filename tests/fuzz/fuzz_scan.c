/* fuzz_scan.c: fuzz target for the JSON scanner alone. Its results are compared with those of cJSON. Results
 * of reading in pieces are compared with those of reading at once.
 *
 * An input is one byte of choices, one byte that seeds the random sizes of the pieces, and the request body:
 *   bit 0  small limits, so that every limit is reached
 *   bit 1  too little memory
 *
 * The scanner extracts the data of tensors from a body; the "rest" is the JSON that remains. Three things must hold:
 *   1. The body read in pieces has the same result as the whole body: status, message, rest, extracted values.
 *   2. cJSON, which is less strict, accepts every body that the scanner accepts, and accepts its rest.
 *   3. The tree of the rest has the members and strings of the body's tree, and numbers as text. Where a string or an
 *      array was extracted, the rest has the index of the extracted value. Each index occurs once, in order. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "proto-json/scan.h"
#include "tests/unit/proto-json/codec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define must(holds) ((holds) ? (void)0 : broken(#holds, __LINE__))

static void broken(const char *what, int line)
{
    fprintf(stderr, "fuzz_scan.c:%d: %s\n", line, what);
    abort();
}

struct outcome {
    struct moving_memory memory;
    scan *s;
    attn_status status;
    attn_error err;
};

/* Scans the body in pieces of pseudo-random lengths, or at once if the seed is 0. */
static void run(struct outcome *o, const proto_limits *limits, size_t room, const uint8_t *body, size_t bytes,
                uint32_t seed)
{
    const proto_memory memory = { moving_grow, &o->memory };
    o->memory.limit = room;
    o->s = scan_new(limits, &memory);
    must(o->s != NULL);
    while (bytes && o->status == ATTN_OK) {
        size_t piece = bytes;
        uint8_t *copy;
        if (seed) {
            seed = seed * 1664525u + 1013904223u;
            piece = 1 + (seed >> 16) % (seed >> 30 ? 4u : 40u);
            if (piece > bytes) piece = bytes;
        }
        copy = malloc(piece);
        must(copy != NULL);
        memcpy(copy, body, piece);
        o->status = scan_feed(o->s, copy, piece, &o->err);
        free(copy);
        body += piece;
        bytes -= piece;
    }
    if (o->status == ATTN_OK) o->status = scan_finish(o->s, &o->err);
}

static void outcome_clear(struct outcome *o)
{
    scan_free(o->s);
    free(o->memory.base);
}

static void same(const struct outcome *a, const struct outcome *b)
{
    size_t lengths[2], used[2];
    int counts[2];
    must(a->status == b->status);
    if (a->status != ATTN_OK) {
        must(a->err.status == a->status && !strcmp(a->err.text, b->err.text) && !strcmp(a->err.member, b->err.member));
        return;
    }
    const char *rests[2] = { scan_rest(a->s, &lengths[0]), scan_rest(b->s, &lengths[1]) };
    const scan_extract *extracts[2] = { scan_extracts(a->s, &counts[0]), scan_extracts(b->s, &counts[1]) };
    const uint8_t *memories[2] = { scan_memory(a->s, &used[0]), scan_memory(b->s, &used[1]) };
    must(lengths[0] == lengths[1] && !strcmp(rests[0], rests[1]) && strlen(rests[0]) == lengths[0]);
    must(counts[0] == counts[1] && used[0] == used[1]);
    for (int i = 0; i < counts[0]; i++) {
        const scan_extract *x = &extracts[0][i], *y = &extracts[1][i];
        must(x->kind == y->kind && x->typed == y->typed && x->dtype == y->dtype && x->offset == y->offset &&
             x->bytes == y->bytes);
        must(x->elements == y->elements && x->rank == y->rank && !memcmp(x->shape, y->shape, sizeof x->shape));
        must(x->fault == y->fault && x->position == y->position && x->at == y->at && x->reason == y->reason);
        must(x->offset % 64 == 0 && x->offset + x->bytes <= (x->fault == SCAN_FINE ? used[0] : x->offset));
        must(x->bytes == 0 || !memcmp(memories[0] + x->offset, memories[1] + y->offset, x->bytes));
    }
}

/* cJSON reads numbers with strtod. */
static bool same_number(const char *text, double value)
{
    const double x = strtod(text, NULL);
    return x == value || (isnan(x) && isnan(value));
}

/* Compares the tree of the body with the tree of the rest (the body's JSON without tensor values). */
static void same_tree(const cJSON *body, const cJSON *rest, const scan_extract *extracts, int extract_count)
{
    struct {
        const cJSON *body, *rest;
    } stack[PROTO_MAX_DEPTH + 1];
    int depth = 0, extracted = 0;
    stack[0].body = body, stack[0].rest = rest;
    while (depth >= 0) {
        const cJSON *b = stack[depth].body, *s = stack[depth].rest;
        must(!b == !s);
        if (!b) {
            if (--depth >= 0) stack[depth].body = stack[depth].body->next, stack[depth].rest = stack[depth].rest->next;
            if (depth == 0) break;
            continue;
        }
        must(!b->string == !s->string && (!b->string || !strcmp(b->string, s->string)));
        if (cJSON_IsNumber(s)) {
            must(b->string && !strcmp(b->string, "data") && (cJSON_IsString(b) || cJSON_IsArray(b)));
            must(s->valuedouble == extracted && extracted < extract_count);
            must(extracts[extracted].kind == (cJSON_IsString(b) ? SCAN_BASE64 : SCAN_ARRAY));
            extracted++;
        } else if (cJSON_IsNumber(b)) {
            must(cJSON_IsString(s) && s->valuestring[0] == SCAN_NUMBER &&
                 same_number(s->valuestring + 1, b->valuedouble));
        } else if (cJSON_IsString(b)) {
            must(cJSON_IsString(s) && s->valuestring[0] == SCAN_STRING && !strcmp(s->valuestring + 1, b->valuestring));
        } else {
            must((b->type & 0xff) == (s->type & 0xff));
            if (b->child || s->child) {
                must(depth < PROTO_MAX_DEPTH);
                depth++;
                stack[depth].body = b->child, stack[depth].rest = s->child;
                continue;
            }
        }
        if (depth == 0) break;
        stack[depth].body = b->next, stack[depth].rest = s->next;
    }
    must(extracted == extract_count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct outcome whole = { 0 }, pieces = { 0 };
    size_t room = 0;
    if (size < 2) return 0;
    if (data[0] & 1) {
        limits.rest_bytes = 64;
        limits.depth = 4;
        limits.members = 3;
        limits.values = 12;
        limits.tensor_bytes = 100;
    }
    if (data[0] & 2) room = PROTO_MEMORY_STEP;
    run(&whole, &limits, room, data + 2, size - 2, 0);
    run(&pieces, &limits, room, data + 2, size - 2, 1 + data[1]);
    /* `room` is a limit on memory in bytes; 0: no limit. With a limit, the two results may differ. Reading in pieces
     * requests memory later than reading at once. It may therefore succeed, or find another error, where reading at
     * once runs out of memory. */
    if (!room) same(&whole, &pieces);
    if (whole.status == ATTN_OK) {
        size_t length;
        int count;
        char *text = malloc(size - 2 + 1);
        const char *rest = scan_rest(whole.s, &length);
        const scan_extract *extracts = scan_extracts(whole.s, &count);
        cJSON *a, *b;
        must(text != NULL);
        memcpy(text, data + 2, size - 2);
        text[size - 2] = '\0';
        a = cJSON_ParseWithLengthOpts(text, size - 2 + 1, NULL, true);
        b = cJSON_ParseWithLengthOpts(rest, length + 1, NULL, true);
        must(a != NULL && b != NULL);
        same_tree(a, b, extracts, count);
        cJSON_Delete(a);
        cJSON_Delete(b);
        free(text);
    }
    outcome_clear(&whole);
    outcome_clear(&pieces);
    return 0;
}
