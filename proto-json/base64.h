/* base64.h: strict base64 by RFC 4648 section 4, for streams, with SIMD chosen at run time.
 *
 * Strict means: the standard alphabet, required padding, no white space, and zeros in the bits that padding leaves
 * over. So every byte string has exactly one text. Each SIMD variant agrees with the scalar one on every input, errors
 * included.
 *
 * One pass over a JSON string suffices, without a search for its end:
 *
 *   base64_decoder d = { 0 };
 *   size_t taken = base64_decode_until(&d, text, count, out, &written);   // out += written
 *   // taken == count: give it the next piece. Otherwise text[taken] is
 *   //   '"'    the string is over: base64_finish(&d)
 *   //   '\\'   an escape: unescape it, give the character it stands for to base64_decode(), go on behind it
 *   //   else   an error at d.offset: base64_reason(&d, text[taken]) says why */
#ifndef BASE64_H
#define BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The state of decoding a stream whose text arrives in pieces of any size; it begins as { 0 }. If a call stopped at a
 * character, the caller may pass another character in its place. An example is the character that a JSON escape stands
 * for. */
typedef struct base64_decoder {
    uint32_t bits; /* the bits decoded from an unfinished group of four characters: 6 for each character read so far */
    /* number of characters (0 to 3) read of the unfinished group; the first of two '=' counts too */
    int held;
    bool ended; /* whether a '=' was read, so that the text must end */
    uint64_t offset;
} base64_decoder;

/* Room in bytes that `out` needs for `count` characters. SIMD code stores whole vectors, so it may overwrite all of
 * this room, although *written counts fewer bytes. */
#define BASE64_DECODED_MAX(count) (((count) + 3) / 4 * 3 + 64)

/* Decodes up to the first character that is not legal in its place, and returns the number of characters decoded
 * (`count` if all are good). decoder->offset grows by this number. *written becomes the number of bytes written to
 * `out`, which must have room for BASE64_DECODED_MAX(count). A call that stops early overwrites at most 64 bytes past
 * the decoded bytes. */
size_t base64_decode_until(base64_decoder *decoder, const char *text, size_t count, uint8_t *out, size_t *written);

/* Decodes text in which every character must be legal base64. Returns false if a character is not legal in its place;
 * decoder->offset is then its position. The arguments are those of base64_decode_until(). */
bool base64_decode(base64_decoder *decoder, const char *text, size_t count, uint8_t *out, size_t *written);

/* Call this when the text is complete. Returns false if the text ends inside a group of four characters;
 * decoder->offset is then the length of the text. */
bool base64_finish(const base64_decoder *decoder);

/* Returns why the decoder stopped at the character `found`: static text that can follow words such as "at offset 17:
 * ". */
const char *base64_reason(const base64_decoder *decoder, char found);

enum { BASE64_HEAD = 8 };
/* Writes the first characters of the text that the decoder has read, at most BASE64_HEAD, and a NUL. It makes them
 * from `bytes` (the `count` bytes that the decoder has written) and from the decoder's unfinished group. */
void base64_head(const base64_decoder *decoder, const uint8_t *bytes, size_t count, char head[BASE64_HEAD + 1]);

/* The length in characters of the base64 text for `bytes` bytes. */
#define BASE64_ENCODED(bytes) (((uint64_t)(bytes) + 2) / 3 * 4)

/* Encodes `count` bytes, with padding at the end, to exactly BASE64_ENCODED(count) characters. To encode a
 * stream, pass blocks whose size is a multiple of 3; only the last block may have another size. */
void base64_encode(const uint8_t *bytes, size_t count, char *text);

/* Returns the names of the variants that this processor and operating system can run, the fastest first, with NULL at
 * the end. The last is always "scalar". */
const char *const *base64_variants(void);

/* Chooses one variant for the whole process (NULL: the fastest), for tests and benchmarks. Returns false if this
 * processor cannot run the variant. */
bool base64_use(const char *variant);

#endif
