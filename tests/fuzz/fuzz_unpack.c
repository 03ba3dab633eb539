/* fuzz_unpack.c: fuzz target for compressed bodies, which are unpacked and decoded.
 *
 * An input is two bytes of choices, one byte that seeds the random sizes of the pieces, and the request body:
 *   byte 0, bit 0     deflate instead of gzip
 *           bit 1     the body is a compressed stream. Without this bit, the fuzz target itself compresses the body, so
 *                     that the body's text reaches the parser
 *           bit 2     small limits: 300 bytes unpacked
 *           bits 3,4  the format: JSON, safetensors, KServe, or KServe with the value of byte 1 as the length of JSON
 *           bit 5     one byte of the target's compressed stream is changed: the seed says which one, and to what
 *           bit 6     bytes follow the target's compressed stream
 *           bit 7     the target's compressed stream is cut off
 *   byte 1, bits 0,1  how the target compresses: stored, fast, best, or with fixed codes
 *
 * What must hold:
 *   1. The body read in pieces has the same result as the whole body, to the bit: numbers, or the same error.
 *   2. A body that the fuzz target compressed and did not change has the same result as the body before compression.
 *   3. No more bytes than the limit are unpacked. A piece has at most UNPACK_PIECE_BYTES bytes, and no piece follows
 *      an error. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <zlib.h>

#include "server/base/limits.h"
#include "server/base/unpack.h"
#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { WINDOW = 15, GZIP = 16, SMALL_LIMIT = 300, LIMIT = 1 << 20, MORE_BYTES = 3 };

static const proto_format *const formats[] = { &proto_json, &proto_safetensors, &proto_kserve, &proto_kserve };

static proto_parser *decoder_of(uint8_t choices, uint8_t json_bytes, struct moving_memory *to)
{
    static const proto_model model = { .name = "attention_forward", .op = ATTN_OP_FORWARD };
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, to };
    const int format = choices >> 3 & 3;
    proto_parser *const parser = proto_parser_new(formats[format], ATTN_OP_FORWARD, &limits, &memory);
    must(parser != NULL);
    if (format >= 2) proto_parser_kserve(parser, &model, format == 3 ? json_bytes : -1);
    return parser;
}

static char *pack(uint8_t choices, uint8_t how, const uint8_t *bytes, size_t count, size_t *size)
{
    static const struct {
        int level, strategy;
    } ways[] = { { 0, Z_DEFAULT_STRATEGY }, { 1, Z_DEFAULT_STRATEGY }, { 9, Z_DEFAULT_STRATEGY }, { 6, Z_FIXED } };
    z_stream z = { 0 };
    must(deflateInit2(&z, ways[how & 3].level, Z_DEFLATED, choices & 1 ? WINDOW : WINDOW + GZIP, 8,
                      ways[how & 3].strategy) == Z_OK);
    const size_t most = deflateBound(&z, count) + MORE_BYTES;
    char *const to = malloc(most);
    must(to != NULL);
    z.next_in = (z_const Bytef *)bytes;
    z.avail_in = (uInt)count;
    z.next_out = (Bytef *)to;
    z.avail_out = (uInt)most;
    must(deflate(&z, Z_FINISH) == Z_STREAM_END);
    *size = most - z.avail_out;
    deflateEnd(&z);
    return to;
}

/* Unpacks the body in pieces and decodes each piece, as server/http/body.c does. */
static void decode(struct decoded *d, uint8_t choices, uint8_t json_bytes, const char *body, size_t count,
                   uint32_t *seed)
{
    const uint64_t limit = choices & 4 ? SMALL_LIMIT : LIMIT;
    struct unpacker *const u = unpack_new(choices & 1 ? UNPACK_DEFLATE : UNPACK_GZIP, limit);
    proto_parser *const parser = decoder_of(choices, json_bytes, &d->memory);
    uint64_t unpacked = 0;
    must(u != NULL);
    d->status = ATTN_OK;
    while (count > 0 && d->status == ATTN_OK) {
        const size_t part = seed ? some_bytes(seed, count) : count;
        /* The memory has exactly the size of this piece, so that a sanitizer reports any read beyond the end. */
        char *const copy = malloc(part);
        must(copy != NULL);
        memcpy(copy, body, part);
        const char *bytes = copy, *piece;
        size_t left = part, given;
        do {
            d->status = unpack_next(u, &bytes, &left, &piece, &given, &d->err);
            must(given <= UNPACK_PIECE_BYTES && (d->status == ATTN_OK || given == 0));
            must((size_t)(bytes - copy) + left == part);
            unpacked += given;
            if (given > 0) d->status = proto_parser_feed(parser, piece, given, &d->err);
        } while (d->status == ATTN_OK && given > 0);
        must(d->status != ATTN_OK || left == 0);
        free(copy);
        body += part;
        count -= part;
    }
    must(unpacked <= limit);
    if (d->status == ATTN_OK) d->status = unpack_finish(u, &d->err);
    if (d->status == ATTN_OK) d->status = proto_parser_finish(parser, &d->call, &d->err);
    proto_parser_free(parser);
    unpack_free(u);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct decoded whole = { 0 }, pieces = { 0 }, plain = { 0 };
    if (size < 3) return 0;
    const uint8_t choices = data[0], how = data[1];
    const bool harmed = choices & (2 | 4 | 32 | 64 | 128);
    const uint8_t *const text = data + 3;
    uint32_t seed = 1u + data[2];
    char *body;
    size -= 3;
    size_t bytes = size;
    if (choices & 2) {
        body = malloc(size + MORE_BYTES);
        must(body != NULL);
        memcpy(body, text, size);
    } else {
        body = pack(choices, how, text, size, &bytes);
        if (choices & 32) body[seed * 2654435761u % bytes] = (char)(seed * 40503u >> 3);
    }
    if (choices & 128) bytes -= bytes > seed % 9 ? seed % 9 : bytes;
    if (choices & 64) memcpy(body + bytes, "\x1f\x8b{", MORE_BYTES), bytes += MORE_BYTES;

    decode(&whole, choices, how, body, bytes, NULL);
    decode(&pieces, choices, how, body, bytes, &seed);
    char *a = decoded_text(&whole), *b = decoded_text(&pieces);
    if (strcmp(a, b)) fprintf(stderr, "whole:\n%s\npieces:\n%s\n", a, b);
    must(!strcmp(a, b));
    must((whole.status == ATTN_OK) == (whole.call != NULL) && (whole.call || whole.err.text[0]));
    if (!harmed && size <= LIMIT) {
        feed_in_pieces(&plain, decoder_of(choices, how, &plain.memory), text, size, NULL, NULL);
        char *const c = decoded_text(&plain);
        if (strcmp(a, c)) fprintf(stderr, "unpacked:\n%s\nplain:\n%s\n", a, c);
        must(!strcmp(a, c));
        free(c);
    }
    free(a), free(b), free(body);
    decoded_clear(&whole);
    decoded_clear(&pieces);
    decoded_clear(&plain);
    return 0;
}
