/* fuzz_base64.c: fuzz target for base64. Every variant of the decoder must accept the same characters of any text, give
 * the same bytes and stop at the same offset, however the text is cut into pieces. A variant must decode what it has
 * encoded.
 *
 * An input is one byte of choices, one byte that seeds the random sizes of the pieces, and the text:
 *   bit 0  5000 legal characters are put before the text; in a stream of this length the decoder uses stores that
 *          bypass the caches
 *   bit 1  pieces are short */
#include "proto-json/base64.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PREFIX = 5000, FAR = 1 << 30 };

struct outcome {
    size_t stop, bytes;
    uint64_t offset;
    bool finished, padded;
    uint8_t *out; /* owned */
};

static void must(bool holds)
{
    if (!holds) abort();
}

/* Returns a copy in memory of exactly this size, so that a sanitizer reports any access beyond the end. */
static char *exact_copy(const char *text, size_t count)
{
    char *copy = malloc(count ? count : 1);
    must(copy != NULL);
    if (count) memcpy(copy, text, count);
    return copy;
}

/* Decodes the text in pieces of `longest` characters, or of random lengths up to `longest` if the seed is not 0. */
static struct outcome decode(const char *text, size_t count, uint64_t start, size_t longest, uint32_t seed)
{
    struct outcome o = { 0 };
    base64_decoder d = { .offset = start };
    o.out = malloc(BASE64_DECODED_MAX(count));
    must(o.out != NULL);
    while (o.stop < count) {
        size_t now = longest, written, taken;
        if (seed) {
            seed = seed * 1664525 + 1013904223;
            now = 1 + (seed >> 8) % longest;
        }
        if (now > count - o.stop) now = count - o.stop;
        char *piece = exact_copy(text + o.stop, now);
        /* The memory has exactly the size that the decoder may fill, so that a sanitizer reports any write beyond the
         * end. */
        uint8_t *out = malloc(BASE64_DECODED_MAX(now));
        must(out != NULL);
        taken = base64_decode_until(&d, piece, now, out, &written);
        must(taken <= now && written <= (taken + 3) / 4 * 3 + 3);
        memcpy(o.out + o.bytes, out, written);
        o.bytes += written;
        o.stop += taken;
        free(piece);
        free(out);
        if (taken < now) break;
    }
    o.offset = d.offset;
    o.finished = base64_finish(&d);
    o.padded = d.ended;
    if (o.stop < count) must(base64_reason(&d, text[o.stop])[0] != '\0');
    return o;
}

static void must_agree(const struct outcome *a, const struct outcome *b)
{
    must(a->stop == b->stop && a->bytes == b->bytes && a->offset == b->offset && a->finished == b->finished);
    must(a->padded == b->padded && memcmp(a->out, b->out, a->bytes) == 0);
}

/* Every variant must encode the bytes to the same text, and decode this text to the bytes. */
static void encode(const uint8_t *bytes, size_t count)
{
    size_t chars = (size_t)BASE64_ENCODED(count);
    char *source = exact_copy((const char *)bytes, count), *first = NULL;
    for (const char *const *name = base64_variants(); *name; name++) {
        must(base64_use(*name));
        char *text = exact_copy("", 0);
        text = realloc(text, chars ? chars : 1);
        must(text != NULL);
        base64_encode((const uint8_t *)source, count, text);
        if (!first) {
            first = text;
            continue;
        }
        must(memcmp(text, first, chars) == 0);
        free(text);
    }
    struct outcome o = decode(first, chars, 0, chars ? chars : 1, 0);
    must(o.stop == chars && o.finished && o.bytes == count && (count == 0 || memcmp(o.out, bytes, count) == 0));
    free(o.out);
    free(first);
    free(source);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    bool far_along = data[0] & 1;
    size_t longest = far_along ? 6000 : data[0] & 2 ? 7 : 300, count = size - 2, prefix = far_along ? PREFIX : 0;
    uint64_t start = far_along ? FAR : 0;
    char *text = malloc(prefix + count + 1);
    must(text != NULL);
    memset(text, 'Q', prefix);
    memcpy(text + prefix, data + 2, count);
    count += prefix;

    must(base64_use("scalar"));
    struct outcome truth = decode(text, count, start, far_along ? 997 : 13, 0);
    must(truth.stop >= prefix);
    for (const char *const *name = base64_variants(); *name; name++) {
        must(base64_use(*name));
        struct outcome whole = decode(text, count, start, count ? count : 1, 0);
        struct outcome pieces = decode(text, count, start, longest, data[1] + 1u);
        must_agree(&whole, &truth);
        must_agree(&pieces, &truth);
        free(whole.out);
        free(pieces.out);
    }

    /* No two valid texts decode to the same bytes. */
    if (truth.finished) {
        char *again = malloc(truth.stop + 4);
        must(again != NULL && BASE64_ENCODED(truth.bytes) == truth.stop);
        base64_encode(truth.out, truth.bytes, again);
        must(memcmp(again, text, truth.stop) == 0);
        free(again);
    }
    encode(data + 2, size - 2);
    must(base64_use(NULL));
    free(truth.out);
    free(text);
    return 0;
}
