/* fuzz_numbers.c: fuzz target for numbers. An array must mean the same however it is cut into pieces and however much
 * room there is for its elements. The C library must agree about every value, and a value that is written must be read
 * back unchanged.
 *
 * An input is one byte for the dtype, one byte that seeds the sizes of the pieces, and the text, whose bytes also serve
 * as values to write. */
#include "proto-json/numbers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool holds)
{
    if (!holds) abort();
}

struct outcome {
    numbers_status status;
    numbers_reader reader;
    size_t taken;
    uint8_t *values; /* owned */
};

/* Reads a text as an array of numbers. If the seed is 0, it is read at once. Otherwise it is read in pieces of random
 * sizes, with room for only a few elements at a time. */
static struct outcome read_text(const char *text, size_t count, numbers_type type, uint32_t seed)
{
    struct outcome o = { .status = NUMBERS_MORE };
    size_t bytes = numbers_bytes(type), most = count / 2 + 1, used;
    numbers_begin(&o.reader, type);
    o.values = malloc(most * bytes);
    must(o.values != NULL);
    while (o.taken < count && (o.status == NUMBERS_MORE || o.status == NUMBERS_FULL)) {
        size_t now = count - o.taken, before = o.reader.elements, room = most - before, written;
        if (seed) {
            seed = seed * 1664525 + 1013904223;
            size_t longest = seed >> 28 ? 9 : 300;
            if (now > (seed >> 8) % longest) now = (seed >> 8) % longest;
            if (room > (seed >> 16) % 5) room = (seed >> 16) % 5;
        }
        /* The memory has exactly the size of this piece, so that a sanitizer reports any read beyond the end. */
        char *piece = malloc(now ? now : 1);
        uint8_t *out = malloc(room * bytes > 0 ? room * bytes : 1);
        must(piece && out);
        memcpy(piece, text + o.taken, now);
        o.status = numbers_read(&o.reader, piece, now, out, room, &used, &written);
        must(used <= now && written <= room && o.reader.elements == before + written);
        if (o.status == NUMBERS_MORE) must(used == now);
        if (o.status == NUMBERS_FULL) must(written == room);
        memcpy(o.values + before * bytes, out, written * bytes);
        o.taken += used;
        free(piece);
        free(out);
        if (o.status != NUMBERS_BAD) must(o.reader.offset == o.taken);
    }
    return o;
}

static void must_agree(const struct outcome *a, const struct outcome *b)
{
    must(a->status == b->status && a->reader.offset == b->reader.offset && a->reader.elements == b->reader.elements);
    must(memcmp(a->values, b->values, a->reader.elements * numbers_bytes(a->reader.type)) == 0);
    if (a->status == NUMBERS_BAD) must(strcmp(a->reader.error, b->reader.error) == 0);
    if (a->status != NUMBERS_DONE) return;
    must(a->taken == b->taken && a->reader.rank == b->reader.rank);
    must(memcmp(a->reader.shape, b->reader.shape, (size_t)a->reader.rank * sizeof a->reader.shape[0]) == 0);
}

/* The number of elements must be the product of the shape. For float32 the C library must read the same numbers. */
static void must_be_true(const struct outcome *o, const char *text)
{
    int64_t product = 1;
    must(o->reader.rank >= 1 && o->reader.rank <= NUMBERS_RANK);
    for (int i = 0; i < o->reader.rank; i++) {
        must(o->reader.shape[i] >= 0);
        product *= o->reader.shape[i];
    }
    must((uint64_t)product == o->reader.elements);
    if (o->reader.type != NUMBERS_F32) return;

    char *copy = malloc(o->taken + 1), *at = copy;
    must(copy != NULL);
    memcpy(copy, text, o->taken);
    copy[o->taken] = '\0';
    for (uint64_t i = 0; i < o->reader.elements; i++) {
        float got, want;
        char *behind;
        memcpy(&got, o->values + i * sizeof got, sizeof got);
        at += strcspn(at, "-0123456789NI");
        want = strtof(at, &behind);
        must(behind > at);
        at = behind;
        must(isnan(want) ? isnan(got) : memcmp(&got, &want, sizeof got) == 0);
    }
    must(strpbrk(at, "0123456789") == NULL);
    free(copy);
}

/* Numbers read without a dtype, and then converted, must equal those read with the dtype. */
static void must_convert(const char *text, size_t count, const struct outcome *typed)
{
    struct outcome o = read_text(text, count, NUMBERS_UNTYPED, 0);
    uint64_t element = UINT64_MAX;
    if (o.status == NUMBERS_DONE) {
        bool fits = numbers_convert(&o.reader, (const double *)(const void *)o.values, typed->reader.type, o.values,
                                    &element);
        must(fits == (typed->status == NUMBERS_DONE));
        if (fits) must(memcmp(o.values, typed->values, o.reader.elements * numbers_bytes(typed->reader.type)) == 0);
        else must(element == typed->reader.elements && strcmp(o.reader.error, typed->reader.error) == 0);
    } else {
        must(typed->status != NUMBERS_DONE);
    }
    free(o.values);
}

/* Writes values as a JSON array, and returns its length. `text` needs room for count * (NUMBERS_TEXT_MAX + 1) + 2
 * bytes. */
static size_t put_array(attn_dtype dtype, const void *values, size_t count, char *text)
{
    char *end = text;
    *end++ = '[';
    for (size_t i = 0; i < count; i++) {
        if (i > 0) *end++ = ',';
        end += numbers_format(dtype, (const uint8_t *)values + i * attn_dtype_bytes(dtype), end);
    }
    *end++ = ']';
    return (size_t)(end - text);
}

static void must_come_back(const uint8_t *values, size_t count, attn_dtype dtype)
{
    size_t bytes = numbers_bytes((numbers_type)dtype), room = count * (NUMBERS_TEXT_MAX + 1) + 2;
    char *text = malloc(room);
    must(text != NULL);
    const size_t length = put_array(dtype, values, count, text);
    must(length <= room);
    struct outcome o = read_text(text, length, (numbers_type)dtype, 0);
    must(o.status == NUMBERS_DONE && o.taken == length && o.reader.elements == count);
    for (size_t i = 0; i < count; i++) {
        if (memcmp(o.values + i * bytes, values + i * bytes, bytes) == 0) continue;
        char a[NUMBERS_TEXT_MAX], b[NUMBERS_TEXT_MAX];
        must(numbers_format(dtype, values + i * bytes, a) == 5 && memcmp(a, "\"NaN\"", 5) == 0);
        must(numbers_format(dtype, o.values + i * bytes, b) == 5 && memcmp(b, "\"NaN\"", 5) == 0);
    }
    free(o.values);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    attn_dtype dtype = (attn_dtype)(data[0] % ATTN_DTYPE_COUNT);
    const char *text = (const char *)data + 2;
    size_t count = size - 2;

    struct outcome whole = read_text(text, count, (numbers_type)dtype, 0);
    struct outcome pieces = read_text(text, count, (numbers_type)dtype, data[1] + 1u);
    struct outcome single = { 0 };
    single = read_text(text, count, (numbers_type)dtype, data[1] * 2654435761u + 77u);
    must_agree(&whole, &pieces);
    must_agree(&whole, &single);
    if (whole.status == NUMBERS_DONE) must_be_true(&whole, text);
    must_convert(text, count, &whole);
    must_come_back(data + 2, count / numbers_bytes((numbers_type)dtype), dtype);
    free(whole.values);
    free(pieces.values);
    free(single.values);
    return 0;
}
