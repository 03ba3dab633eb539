/* codec.h: helpers of the tests and fuzz targets of proto-json/: memory that moves when it grows, feeding a parser
 * in pieces, and printing all that a parser produced (strcmp() can then compare two runs). */
#ifndef TEST_CODEC_H
#define TEST_CODEC_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto-json/proto.h"

#ifndef ARRAY_SIZE
#define ARRAY_SIZE(array) (sizeof(array) / sizeof *(array))
#endif

/* Memory for a parser (proto_memory). It moves whenever it grows, so that a sanitizer reports any use of an old
 * pointer. */
struct moving_memory {
    void *base;
    size_t bytes, limit; /* bytes: present size; limit: largest size, or 0 for no limit */
    int growths;
};

static inline attn_status moving_grow(void *context, size_t bytes, void **base, attn_error *err)
{
    struct moving_memory *m = context;
    void *larger;
    if (m->limit && bytes > m->limit)
        return attn_fail(err, ATTN_TOO_LARGE, "", "the test's memory ends at %zu bytes", m->limit);
    if (bytes <= m->bytes) {
        *base = m->base;
        return ATTN_OK;
    }
    larger = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!larger) return attn_fail(err, ATTN_NO_MEMORY, "", "the test has no memory");
    if (m->bytes) memcpy(larger, m->base, m->bytes);
    free(m->base);
    m->base = larger;
    m->bytes = bytes;
    m->growths++;
    *base = larger;
    return ATTN_OK;
}

struct decoded {
    struct moving_memory memory;
    proto_call *call;
    attn_status status;
    attn_error err;
    /* whether fill_shared() fills the regions of shared memory that a KServe body names */
    bool has_regions;
};

/* Fills each input that lies in shared memory. The bytes depend on the input's name and on their position. */
static inline void fill_shared(struct decoded *d, proto_parser *parser)
{
    proto_shared *shared;
    int count;
    d->status = proto_parser_shared(parser, &shared, &count, &d->err);
    if (d->status == ATTN_OK) d->status = proto_parser_shared_room(parser, &d->err);
    for (int i = 0; i < count && d->status == ATTN_OK && !shared[i].output; i++)
        for (int64_t b = 0; b < shared[i].bytes; b++)
            ((uint8_t *)shared[i].to)[b] = b % 2 ? 0x3c : (uint8_t)(shared[i].region[0] + shared[i].offset + b);
}

static inline void decoded_clear(struct decoded *d)
{
    proto_call_free(d->call);
    free(d->memory.base);
    memset(d, 0, sizeof *d);
}

static inline size_t one_byte(void *context, size_t left)
{
    (void)context, (void)left;
    return 1;
}

/* Returns the size of the next piece of a body. The first piece has *context bytes, and the second piece has the
 * rest. */
static inline size_t first_then_rest(void *context, size_t left)
{
    size_t *first = context, piece = *first && *first < left ? *first : left;
    *first = 0;
    return piece;
}

/* Returns the random size of the next piece. *context, a uint32_t, is the state of the random numbers. */
static inline size_t some_bytes(void *context, size_t left)
{
    uint32_t *seed = context;
    *seed = *seed * 1664525u + 1013904223u;
    const size_t piece = 1 + (*seed >> 16) % (*seed >> 30 ? 5u : 60u);
    return piece < left ? piece : left;
}

/* Feeds the body in pieces, whose sizes piece_of(context, left) returns, and frees the parser. Each piece is in memory
 * of its own size, so that the sanitizer sees a read beyond its end. */
static inline void feed_in_pieces(struct decoded *d, proto_parser *parser, const void *body, size_t bytes,
                                  size_t (*piece_of)(void *context, size_t left), void *context)
{
    const char *p = body;
    if (!parser) abort();
    d->status = ATTN_OK;
    while (bytes && d->status == ATTN_OK) {
        size_t piece = piece_of ? piece_of(context, bytes) : bytes;
        char *copy = malloc(piece ? piece : 1);
        if (!copy) abort();
        memcpy(copy, p, piece);
        d->status = proto_parser_feed(parser, copy, piece, &d->err);
        free(copy);
        p += piece;
        bytes -= piece;
    }
    if (d->status == ATTN_OK && d->has_regions) fill_shared(d, parser);
    if (d->status == ATTN_OK) d->status = proto_parser_finish(parser, &d->call, &d->err);
    proto_parser_free(parser);
}

static inline void decode_in_pieces(struct decoded *d, const proto_format *format, proto_op op,
                                    const proto_limits *limits, const void *body, size_t bytes,
                                    size_t (*piece_of)(void *context, size_t left), void *context)
{
    const proto_limits standard = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d->memory };
    feed_in_pieces(d, proto_parser_new(format, op, limits ? limits : &standard, &memory), body, bytes, piece_of,
                   context);
}

/* Decodes a KServe body. json_bytes: the length of its JSON as the request states it, or -1 if it is not stated. */
static inline void decode_kserve(struct decoded *d, const proto_model *model, int64_t json_bytes,
                                 const proto_limits *limits, const void *body, size_t bytes,
                                 size_t (*piece_of)(void *context, size_t left), void *context)
{
    const proto_limits standard = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d->memory };
    proto_parser *parser = proto_parser_new(&proto_kserve, model->op, limits ? limits : &standard, &memory);
    if (parser) proto_parser_kserve(parser, model, json_bytes);
    feed_in_pieces(d, parser, body, bytes, piece_of, context);
}

static inline void decode_whole(struct decoded *d, proto_op op, const char *body)
{
    decode_in_pieces(d, &proto_json, op, NULL, body, strlen(body), NULL, NULL);
}

/* Prints one line about a tensor: an input of the problem, or a result that the client wants. */
static inline void print_tensor(FILE *f, const struct decoded *d, const char *name, const attn_tensor *t)
{
    int64_t length = 0;
    if (t->rank == 0) return;
    fprintf(f, "%s %s", name, attn_dtype_name(t->dtype));
    for (int a = 0; a < t->rank; a++) fprintf(f, " %lld/%lld", (long long)t->shape[a], (long long)t->stride[a]);
    if (t->data) {
        const unsigned char *data = t->data;
        if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &length)) abort();
        if (data < (unsigned char *)d->memory.base ||
            (size_t)(data - (unsigned char *)d->memory.base) + (size_t)length > d->call->memory_bytes ||
            (size_t)(data - (unsigned char *)d->memory.base) % 64)
            abort();
        fprintf(f, ":");
        for (int64_t b = 0; b < length; b++) fprintf(f, "%02x", data[b]);
    }
    fprintf(f, "\n");
}

static inline char *decoded_text(const struct decoded *d)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (!f) abort();
    fprintf(f, "%s\n", attn_status_name(d->status));
    if (d->status != ATTN_OK) fprintf(f, "%s [%s] %s\n", attn_status_name(d->err.status), d->err.member, d->err.text);
    for (int i = 0; d->call && i < d->call->count; i++) {
        const proto_item *item = &d->call->items[i];
        const attn_problem *p = &item->problem;
        fprintf(f, "%s %d of %d: %s [%s] %s\n", d->call->envelope ? "problem" : "the problem", i, d->call->count,
                attn_status_name(item->error.status), item->error.member, item->error.text);
        fprintf(f,
                "op %d layout %d alignment %d scale %d %a softcap %a causal %d window %lld %lld dropout %a seed %llu "
                "deterministic %d\n",
                (int)p->op, (int)p->layout, (int)p->alignment, p->has_scale, p->scale, p->softcap, p->causal,
                (long long)p->window_left, (long long)p->window_right, p->dropout_p, (unsigned long long)p->seed,
                p->deterministic);
        fprintf(f, "result_dtype %d %d outputs %llx encoding %d verify %lld save %d context '%s' timeout %lld\n",
                item->has_result_dtype, (int)item->result_dtype, (unsigned long long)item->outputs, (int)item->encoding,
                (long long)item->verify_rows, item->save, item->context, (long long)item->timeout_ms);
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) print_tensor(f, d, attn_tensors[id].name, &p->tensor[id]);
        for (int part = 0; item->parts && part < item->parts->count * 2; part++) {
            print_tensor(f, d, "out of a part or of its gradients", &item->parts->at[part].out);
            print_tensor(f, d, "lse", &item->parts->at[part].lse);
        }
    }
    fclose(f);
    return text;
}

/* A request body in any format, and how to decode it. */
struct body {
    const proto_format *format;
    proto_op op;
    const void *bytes;
    size_t count;
    const proto_limits *limits; /* NULL: the default limits */
    const proto_model *model;   /* the model of a KServe body; the model's operation replaces `op` */
    /* the length of a KServe body's JSON as the request states it, or -1 if it is not stated */
    int64_t json_bytes;
};

static inline void decode_body(struct decoded *d, const struct body *b, size_t (*piece_of)(void *context, size_t left),
                               void *context)
{
    if (b->model) decode_kserve(d, b->model, b->json_bytes, b->limits, b->bytes, b->count, piece_of, context);
    else decode_in_pieces(d, b->format, b->op, b->limits, b->bytes, b->count, piece_of, context);
}

/* Decodes the body whole, split in two at every byte, byte by byte, and in random pieces. *d becomes the result of
 * the whole body. Prints each way whose result differs from *d, and returns the number of such ways. */
static inline int decode_all_ways(struct decoded *d, const struct body *body)
{
    int differences = 0;
    decode_body(d, body, NULL, NULL);
    char *const must = decoded_text(d);
    for (size_t way = 0; way < body->count + 20; way++) {
        struct decoded other = { 0 };
        size_t first = way;
        uint32_t seed = (uint32_t)way;
        if (way >= body->count) decode_body(&other, body, some_bytes, &seed);
        else decode_body(&other, body, way ? first_then_rest : one_byte, &first);
        char *const text = decoded_text(&other);
        if (strcmp(text, must)) {
            fprintf(stderr, "way %zu of splitting:\n%s\nnot split:\n%s\n", way, text, must);
            differences++;
        }
        free(text);
        decoded_clear(&other);
    }
    free(must);
    return differences;
}

/* Checks that the body is refused with `status`, `member` and the message `says`, however it is split. Prints
 * differences under the name `shown`, and returns their number. */
static inline int refused_otherwise(const struct body *body, const char *shown, attn_status status, const char *member,
                                    const char *says)
{
    struct decoded d = { 0 };
    int differences = decode_all_ways(&d, body);
    if (d.status != status || strcmp(d.err.member, member) || strcmp(d.err.text, says) ||
        (d.call && d.status != ATTN_OK)) {
        fprintf(stderr, "%s\n  says  %s [%s] %s\n  must  %s [%s] %s\n", shown, attn_status_name(d.status), d.err.member,
                d.err.text, attn_status_name(status), member, says);
        differences++;
    }
    decoded_clear(&d);
    return differences;
}

#endif
