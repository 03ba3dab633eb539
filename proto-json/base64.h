/* base64.h: RFC 4648 section 4, strict, in streams, with SIMD chosen at run time.
 *
 * Strict: the standard alphabet, padding required, no white space, and the bits that padding leaves over must be
 * zero, so that every byte string has exactly one text. Each SIMD variant agrees with the scalar one on every
 * input, errors included.
 *
 * One pass over a JSON string, without looking for its end first:
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

/* A stream: text arrives in pieces of any size. Zero-initialise. Where a call stopped at a character, the state is that
 * before the character, and the stream may go on with another one. */
typedef struct base64_decoder {
    uint32_t bits;   /* of the unfinished group, 6 for each character */
    int held;        /* characters of the unfinished group, 0 to 3; a first '=' of two counts */
    bool ended;      /* padding was seen */
    uint64_t offset; /* characters consumed */
} base64_decoder;

/* Room that decoding `count` characters needs at `out`. It is more than the bytes written, for SIMD stores whole
 * vectors: what lies behind the last byte that *written counts, up to this size, may be overwritten. */
#define BASE64_DECODED_MAX(count) (((count) + 3) / 4 * 3 + 64)

/* Decodes up to the first character that cannot stand where it stands: one outside the alphabet, a '=' too early,
 * one where the bits left over are not zero, anything behind the padding. Returns how many characters it took,
 * `count` where it met none; decoder->offset grows by as much, and so is the position of that character in the
 * stream. *written: bytes that are now at `out`; a group gives its bytes with its last character. `out` must have
 * room for BASE64_DECODED_MAX(count). Where the stop comes early only the characters taken and the 64 bytes behind
 * them count: bytes beyond are not touched. */
size_t base64_decode_until(base64_decoder *decoder, const char *text, size_t count, uint8_t *out, size_t *written);

/* The same for text that is base64 to its last character: false where it had to stop, decoder->offset says at which
 * one. */
bool base64_decode(base64_decoder *decoder, const char *text, size_t count, uint8_t *out, size_t *written);

/* The text is complete: false where it stops inside a group (offset says how long it was). */
bool base64_finish(const base64_decoder *decoder);

/* Why the decoder stopped at `found`, in words that complete "at offset 17: ": static text. */
const char *base64_reason(const base64_decoder *decoder, char found);

/* The first characters, at most BASE64_HEAD, of the text that the decoder has taken, NUL-ended. `bytes` are the `count`
 * that it has written. */
enum { BASE64_HEAD = 8 };
void base64_head(const base64_decoder *decoder, const uint8_t *bytes, size_t count, char head[BASE64_HEAD + 1]);

/* Characters of the text of `bytes` bytes. */
#define BASE64_ENCODED(bytes) (((uint64_t)(bytes) + 2) / 3 * 4)

/* Encodes `count` bytes, with padding at the end, to exactly BASE64_ENCODED(count) characters. Encode a stream in
 * blocks whose size is a multiple of 3, but for the last. */
void base64_encode(const uint8_t *bytes, size_t count, char *text);

/* The variants this processor and its system can run, best first: names until NULL. "scalar" is always the last. */
const char *const *base64_variants(void);

/* For tests and benchmarks: pick one (NULL: the best) for the whole process. False where it cannot run here. */
bool base64_use(const char *variant);

#endif
