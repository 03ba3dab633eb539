/* base64_neon.c: whole groups of base64 on arm64, 64 characters at a time. NEON loads 64 characters into four
 * registers: every fourth character goes into the same register. Two look-ups in tables of 64 entries give the sextets
 * of the 16 characters in a register. A character is outside the alphabet if its highest bit is set, or if its table
 * entry is BASE64_FOREIGN. The scalar loops handle the rest, and find the first such character. */
#include "base64_simd.h"

#ifdef __aarch64__

#include <arm_neon.h>

enum { CHARS = 64, BYTES = 48 };

size_t base64_decode_neon(const char *text, size_t count, uint8_t *out)
{
    const uint8x16x4_t low = vld1q_u8_x4(base64_sextet), high = vld1q_u8_x4(base64_sextet + 64);
    size_t done = 0;
    for (; count - done >= CHARS; done += CHARS, out += BYTES) {
        uint8x16x4_t x = vld4q_u8((const uint8_t *)text + done);
        uint8x16_t foreign = vdupq_n_u8(0);
        for (int i = 0; i < 4; i++) {
            const uint8x16_t c = x.val[i];
            x.val[i] = vqtbx4q_u8(vqtbl4q_u8(low, c), high, veorq_u8(c, vdupq_n_u8(64)));
            foreign = vorrq_u8(foreign, vorrq_u8(c, x.val[i]));
        }
        if (vmaxvq_u8(foreign) >= BASE64_FOREIGN) break;
        const uint8x16x3_t bytes = { { vorrq_u8(vshlq_n_u8(x.val[0], 2), vshrq_n_u8(x.val[1], 4)),
                                       vorrq_u8(vshlq_n_u8(x.val[1], 4), vshrq_n_u8(x.val[2], 2)),
                                       vorrq_u8(vshlq_n_u8(x.val[2], 6), x.val[3]) } };
        vst3q_u8(out, bytes);
    }
    return done + base64_decode_scalar(text + done, count - done, out);
}

size_t base64_encode_neon(const uint8_t *bytes, size_t count, char *text)
{
    const uint8x16x4_t letters = vld1q_u8_x4((const uint8_t *)base64_alphabet);
    const uint8x16_t six = vdupq_n_u8(63);
    size_t done = 0;
    for (; count - done >= BYTES; done += BYTES, text += CHARS) {
        const uint8x16x3_t b = vld3q_u8(bytes + done);
        uint8x16x4_t x = { { vshrq_n_u8(b.val[0], 2), vorrq_u8(vshlq_n_u8(b.val[0], 4), vshrq_n_u8(b.val[1], 4)),
                             vorrq_u8(vshlq_n_u8(b.val[1], 2), vshrq_n_u8(b.val[2], 6)), b.val[2] } };
        for (int i = 0; i < 4; i++) x.val[i] = vqtbl4q_u8(letters, vandq_u8(x.val[i], six));
        vst4q_u8((uint8_t *)text, x);
    }
    return done + base64_encode_scalar(bytes + done, count - done, text);
}

#endif
