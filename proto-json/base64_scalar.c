/* base64_scalar.c: the base64 loops that run on every processor, and the alphabet as tables. */
#include "base64_simd.h"

const char base64_alphabet[65] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* The sextet (6-bit value) of each character. __ stands for a character outside the alphabet. */
/* clang-format off */
#define __ BASE64_FOREIGN
const uint8_t base64_sextet[256] = {
    __, __, __, __, __, __, __, __, __, __, __, __, __, __, __, __, /* from 0x00 */
    __, __, __, __, __, __, __, __, __, __, __, __, __, __, __, __, /* from 0x10 */
    __, __, __, __, __, __, __, __, __, __, __, 62, __, __, __, 63, /* characters 0x20 to 0x2F, which include + and / */
    52, 53, 54, 55, 56, 57, 58, 59, 60, 61, __, __, __, __, __, __, /* characters 0x30 to 0x3F, which include 0-9 */
    __, 0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, /* characters 0x40 to 0x4F, which include A-O */
    15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, __, __, __, __, __, /* characters 0x50 to 0x5F, which include P-Z */
    __, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, /* characters 0x60 to 0x6F, which include a-o */
    41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, __, __, __, __, __, /* characters 0x70 to 0x7F, which include p-z */
    [0x80 ... 0xFF] = __,
};
#undef __
/* clang-format on */

size_t base64_decode_scalar(const char *text, size_t count, uint8_t *out)
{
    size_t done = 0;
    for (; count - done >= 4; done += 4, out += 3) {
        const unsigned char *c = (const unsigned char *)text + done;
        uint32_t s0 = base64_sextet[c[0]], s1 = base64_sextet[c[1]], s2 = base64_sextet[c[2]], s3 = base64_sextet[c[3]];
        if ((s0 | s1 | s2 | s3) & BASE64_FOREIGN) break;
        uint32_t bits = s0 << 18 | s1 << 12 | s2 << 6 | s3;
        out[0] = (uint8_t)(bits >> 16);
        out[1] = (uint8_t)(bits >> 8);
        out[2] = (uint8_t)bits;
    }
    return done;
}

size_t base64_encode_scalar(const uint8_t *bytes, size_t count, char *text)
{
    size_t done = 0;
    for (; count - done >= 3; done += 3, text += 4) {
        uint32_t bits = (uint32_t)bytes[done] << 16 | (uint32_t)bytes[done + 1] << 8 | bytes[done + 2];
        text[0] = base64_alphabet[bits >> 18];
        text[1] = base64_alphabet[bits >> 12 & 63];
        text[2] = base64_alphabet[bits >> 6 & 63];
        text[3] = base64_alphabet[bits & 63];
    }
    return done;
}
