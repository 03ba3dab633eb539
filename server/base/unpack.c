/* unpack.c: unpacks compressed bodies with zlib's inflate(); see unpack.h.
 *
 * A body is unpacked to at most limit_bytes. If it unpacks to more than UNPACK_FREE_BYTES, its unpacked size must also
 * be at most UNPACK_RATIO times the bytes that have arrived. This limit exists because one byte of deflate data can
 * become a thousand bytes. Error texts do not depend on how the body was split into pieces, so they have no
 * positions. */
#include "server/base/unpack.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <zlib.h>

#include "server/base/limits.h"

/* Window bits for inflateInit2(). Adding 16 to them selects gzip. */
enum {
    WINDOW = 15,
    WINDOW_GZIP = WINDOW + 16,
    MAGIC_BYTES = 2,
    UNPACK_PART_BYTES = 1 << 30 /* largest number of bytes passed to zlib in one call; zlib counts bytes in 32 bits */
};

struct unpacker {
    z_stream zlib;
    enum unpack_coding coding;
    uint64_t limit_bytes;
    uint64_t in_bytes, out_bytes;
    bool ended; /* whether the end of the compressed stream was reached; further bytes are an error */
    attn_error error;
    uint8_t magic[MAGIC_BYTES];
    char piece[UNPACK_PIECE_BYTES];
};

static const struct {
    const char *name;
    enum unpack_coding coding;
} codings[] = {
    { "identity", UNPACK_NOTHING }, { "gzip", UNPACK_GZIP }, { "x-gzip", UNPACK_GZIP }, { "deflate", UNPACK_DEFLATE }
};

bool unpack_coding_of(const char *text, enum unpack_coding *coding)
{
    static const char between[] = " \t,"; /* characters between list elements; RFC 9110, 5.6.1 allows empty elements */
    *coding = UNPACK_NOTHING;
    if (text == NULL) return true;
    text += strspn(text, between);
    const size_t length = strcspn(text, between);
    /* a header that names several codings is refused */
    if (text[length + strspn(text + length, between)] != '\0') return false;
    for (size_t i = 0; i < sizeof codings / sizeof *codings; i++)
        if (strlen(codings[i].name) == length && strncasecmp(text, codings[i].name, length) == 0) {
            *coding = codings[i].coding;
            return true;
        }
    return length == 0;
}

struct unpacker *unpack_new(enum unpack_coding coding, uint64_t limit_bytes)
{
    struct unpacker *u = calloc(1, sizeof *u);
    if (u == NULL) return NULL;
    u->coding = coding;
    u->limit_bytes = limit_bytes;
    if (inflateInit2(&u->zlib, coding == UNPACK_GZIP ? WINDOW_GZIP : WINDOW) == Z_OK) return u;
    free(u);
    return NULL;
}

void unpack_free(struct unpacker *u)
{
    if (u == NULL) return;
    (void)inflateEnd(&u->zlib);
    free(u);
}

/* ---- Errors in compressed bodies --------------------------------------------------------------------------------- */

static const char *name_of(const struct unpacker *u)
{
    return u->coding == UNPACK_GZIP ? "gzip" : "deflate";
}

static bool is_gzip(const uint8_t magic[MAGIC_BYTES])
{
    return magic[0] == 0x1f && magic[1] == 0x8b;
}

/* True for the header of a zlib stream (RFC 1950, 2.2): method 8, and a correct checksum of the first two bytes. */
static bool is_zlib(const uint8_t magic[MAGIC_BYTES])
{
    return (magic[0] & 0x0f) == 8 && (magic[0] << 8 | magic[1]) % 31 == 0;
}

static attn_status wrong_begin(struct unpacker *u)
{
    const char *const like = is_gzip(u->magic)    ? ", it begins like gzip"
                             : is_zlib(u->magic)  ? ", it begins like zlib's format, which is called deflate"
                             : u->magic[0] == '{' ? ", it begins like JSON: was it compressed?"
                                                  : "";
    if (u->coding == UNPACK_GZIP)
        return attn_fail(&u->error, ATTN_INVALID, NULL,
                         "Content-Encoding is gzip, but the body does not begin with 1f 8b, as gzip does%s", like);
    return attn_fail(&u->error, ATTN_INVALID, NULL,
                     "Content-Encoding is deflate, but the body does not begin like zlib's format (RFC 1950), which "
                     "deflate means in HTTP%s",
                     like);
}

static attn_status broken(struct unpacker *u)
{
    static const struct {
        const char *zlib, *says;
    } faults[] = {
        { "incorrect data check", "the checksum at its end is of other bytes (was it changed on its way?)" },
        { "incorrect length check", "the length at its end is another one (was it changed on its way?)" },
    };
    const char *says = u->zlib.msg ? u->zlib.msg : "it wants a dictionary, and there is none";
    if (!(u->coding == UNPACK_GZIP ? is_gzip(u->magic) : is_zlib(u->magic))) return wrong_begin(u);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (strcmp(says, faults[i].zlib) == 0) says = faults[i].says;
    return attn_fail(&u->error, ATTN_INVALID, NULL, "the body is no sound %s: behind %llu bytes that it unpacks to, %s",
                     name_of(u), (unsigned long long)u->out_bytes, says);
}

static attn_status trailing(struct unpacker *u, char next)
{
    return attn_fail(&u->error, ATTN_INVALID, NULL, "the body goes on behind byte %llu, where its %s stream ends%s",
                     (unsigned long long)u->in_bytes, name_of(u),
                     u->coding == UNPACK_GZIP && next == 0x1f ? "; a second gzip member is not taken" : "");
}

/* Returns `size`, the number of new unpacked bytes, without those beyond limit_bytes. Sets u->error if the unpacked
 * body exceeds limit_bytes or UNPACK_RATIO. */
static size_t within_limits(struct unpacker *u, size_t size)
{
    if (u->out_bytes > u->limit_bytes) {
        size -= (size_t)(u->out_bytes - u->limit_bytes);
        (void)attn_fail(&u->error, ATTN_TOO_LARGE, NULL,
                        "the body unpacks to more than %llu bytes, the limit (the server's --max-body-bytes)",
                        (unsigned long long)u->limit_bytes);
    } else if (u->out_bytes > UNPACK_FREE_BYTES && u->out_bytes / UNPACK_RATIO > u->in_bytes) {
        (void)attn_fail(&u->error, ATTN_TOO_LARGE, NULL,
                        "the body unpacks to more than %d times its bytes, and to more than %d MiB; send it "
                        "uncompressed",
                        UNPACK_RATIO, UNPACK_FREE_BYTES >> 20);
    }
    return size;
}

/* ---- Unpacking a body -------------------------------------------------------------------------------------------- */

static attn_status told(const struct unpacker *u, attn_error *err)
{
    if (u->error.status != ATTN_OK && err) *err = u->error;
    return u->error.status;
}

/* Unpacks until the output buffer is full or all input bytes are used, but passes zlib at most UNPACK_PART_BYTES. */
static int inflate_some(struct unpacker *u, const char **bytes, size_t *count, size_t *size)
{
    const uInt part = *count < UNPACK_PART_BYTES ? (uInt)*count : UNPACK_PART_BYTES;
    const uint64_t room = u->limit_bytes - u->out_bytes;
    /* one byte more than the limit, so that a longer body is noticed */
    const uInt most = room < sizeof u->piece ? (uInt)room + 1 : (uInt)sizeof u->piece;
    for (size_t i = 0; i < MAGIC_BYTES && i < part; i++)
        if (u->in_bytes + i < MAGIC_BYTES) u->magic[u->in_bytes + i] = (uint8_t)(*bytes)[i];
    u->zlib.next_in = (z_const Bytef *)*bytes;
    u->zlib.avail_in = part;
    u->zlib.next_out = (Bytef *)u->piece;
    u->zlib.avail_out = most;
    const int result = inflate(&u->zlib, Z_NO_FLUSH);
    const size_t taken = part - u->zlib.avail_in;
    *size = most - u->zlib.avail_out;
    *bytes += taken;
    *count -= taken;
    u->in_bytes += taken;
    u->out_bytes += *size;
    u->ended = result == Z_STREAM_END;
    return result;
}

attn_status unpack_next(struct unpacker *u, const char **bytes, size_t *count, const char **piece, size_t *size,
                        attn_error *err)
{
    *piece = u->piece;
    *size = 0;
    while (u->error.status == ATTN_OK && *size == 0 && !u->ended) {
        const int result = inflate_some(u, bytes, count, size);
        /* Z_BUF_ERROR is no fault: it means that the bytes so far yield no more output. If a fault comes after some
         * output, the output is returned now, and the fault by the next call. */
        if (*size > 0) *size = within_limits(u, *size);
        else if (result == Z_MEM_ERROR)
            (void)attn_fail(&u->error, ATTN_NO_MEMORY, NULL, "no memory to unpack the body");
        else if (result != Z_OK && result != Z_BUF_ERROR && result != Z_STREAM_END) (void)broken(u);
        else if (*count == 0) break;
    }
    if (*size > 0) return ATTN_OK;
    if (u->error.status == ATTN_OK && u->ended && *count > 0) (void)trailing(u, **bytes);
    return told(u, err);
}

attn_status unpack_finish(struct unpacker *u, attn_error *err)
{
    if (u->error.status == ATTN_OK && !u->ended && u->in_bytes > 0)
        (void)attn_fail(&u->error, ATTN_INVALID, NULL,
                        "the body ends inside its %s stream, after %llu bytes that unpack to %llu (was it cut off?)",
                        name_of(u), (unsigned long long)u->in_bytes, (unsigned long long)u->out_bytes);
    return told(u, err);
}
