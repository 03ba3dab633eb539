/* base64_simd.h: the two loops that each SIMD variant provides to base64.c. Private to the base64*.c files.
 *
 * A variant may stop before any group of four characters, and step() of base64.c decodes the next group. A variant that
 * stops too often is slow, but its results are correct. */
#ifndef BASE64_SIMD_H
#define BASE64_SIMD_H

#include <stddef.h>
#include <stdint.h>

/* Decodes whole groups of 4 alphabet characters to 3 bytes each, from the start of a group. Returns how many characters
 * it took: a multiple of 4, at most `count`, all of them in the alphabet (without '='). Reads nothing beyond `count`.
 * Writes at most 64 bytes past the decoded bytes, and never beyond BASE64_DECODED_MAX(count). */
typedef size_t base64_decode_groups(const char *text, size_t count, uint8_t *out);

/* Encodes whole groups of 3 bytes. Returns how many bytes it encoded: a multiple of 3, at most `count`. Reads nothing
 * beyond `count`, and writes nothing behind the text of the encoded bytes. */
typedef size_t base64_encode_groups(const uint8_t *bytes, size_t count, char *text);

/* The base64 alphabet as two tables: the character of each sextet (6-bit value), and the sextet of each character.
 * Characters outside the alphabet have BASE64_FOREIGN, a bit that no sextet has. */
enum { BASE64_FOREIGN = 0x80 };
extern const char base64_alphabet[65];
extern const uint8_t base64_sextet[256];

base64_decode_groups base64_decode_scalar, base64_decode_avx2, base64_decode_avx512, base64_decode_neon;

/* Variants of base64_decode_groups for streams larger than the caches. They write whole cache lines with stores that
 * bypass the caches, because an ordinary store would first read the line. Other threads see the bytes when the call
 * returns. */
base64_decode_groups base64_decode_large_avx2, base64_decode_large_avx512;
base64_encode_groups base64_encode_scalar, base64_encode_avx2, base64_encode_avx512, base64_encode_neon;

enum { BASE64_LINE = 64 };

/* Returns how many characters must be decoded before `out` reaches the beginning of a 64-byte cache line. Every 43
 * groups of four characters give 129 = 2 * 64 + 1 bytes, so they move `out` by one byte relative to the lines. */
static inline size_t base64_chars_to_line(const uint8_t *out)
{
    return (BASE64_LINE - (uintptr_t)out % BASE64_LINE) * 43 % BASE64_LINE * 4;
}

#endif
