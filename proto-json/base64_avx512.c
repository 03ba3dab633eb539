/* base64_avx512.c: whole groups of base64, 64 characters at a time, with the byte permutations of AVX-512 VBMI.
 *
 * One instruction decodes 64 characters by a table of 128 entries in two registers. The entry of a character outside
 * the alphabet has its top bit set. A character beyond ASCII has its own top bit set. So the top bits of (entry |
 * character) mark characters outside the alphabet. Two multiply-adds join the sextets (as in base64_avx2.c), and one
 * more permutation closes the gaps. For encoding, a permutation distributes the bytes, one multishift cuts them into
 * sextets, and one lookup in 64 entries turns them into letters.
 *
 * Loads at the end are masked: the bytes behind the last characters are loaded as zeros, which are outside the
 * alphabet.
 *
 * Source of the idea: Mula and Lemire, "Base64 encoding and decoding at almost the speed of a memory copy",
 * arXiv:1910.05109. */
#include "base64_simd.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__BMI2__)

#include <immintrin.h>

enum { CHARS = 64, BYTES = 48, UNROLL = 4 };

/* The loops prefetch the output AHEAD bytes before they write it, because the output's cache lines may be in another
 * core's cache. */
enum { AHEAD = 2048, LINE = 64 };

/* The sextets (6-bit values) of the characters 0 to 127. F marks a character outside the alphabet. */
#define F 0x80
static const uint8_t sextet_of[128] __attribute__((aligned(64))) = {
    F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  /* from 0x00 */
    F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  /* from 0x10 */
    F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  F,  62, F,  F,  F,  63, /* from 0x20 */
    52, 53, 54, 55, 56, 57, 58, 59, 60, 61, F,  F,  F,  F,  F,  F,  /* from 0x30 */
    F,  0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, /* from 0x40 */
    15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, F,  F,  F,  F,  F,  /* from 0x50 */
    F,  26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, /* from 0x60 */
    41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, F,  F,  F,  F,  F,  /* from 0x70 */
};
#undef F

static const char letter_of[65]
    __attribute__((aligned(64))) = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Byte indices for a permutation that closes the gaps between groups of 4 bytes in two registers. A group holds three
 * bytes of data, in reverse order, and one unused byte. */
#define CLOSE(i) 4 * (i) + 2, 4 * (i) + 1, 4 * (i)
#define CLOSE8(i) \
    CLOSE(i), CLOSE(i + 1), CLOSE(i + 2), CLOSE(i + 3), CLOSE(i + 4), CLOSE(i + 5), CLOSE(i + 6), CLOSE(i + 7)
static const uint8_t close_gaps[96] __attribute__((aligned(64))) = { CLOSE8(0), CLOSE8(8), CLOSE8(16), CLOSE8(24) };

/* Byte indices for the permutation of encoding. Every three bytes b0 b1 b2 become four bytes, b1 b0 b2 b1. In these 32
 * bits every sextet (6 bits) is contiguous. */
#define DEAL(i) 3 * (i) + 1, 3 * (i), 3 * (i) + 2, 3 * (i) + 1
static const uint8_t deal_out[64] __attribute__((aligned(64))) = {
    DEAL(0), DEAL(1), DEAL(2),  DEAL(3),  DEAL(4),  DEAL(5),  DEAL(6),  DEAL(7),
    DEAL(8), DEAL(9), DEAL(10), DEAL(11), DEAL(12), DEAL(13), DEAL(14), DEAL(15),
};

/* Joins each group of four sextets (6-bit values, one in each byte) to 24 bits, in the low end of 32 bits. */
static inline __m512i joined(__m512i sextets)
{
    /* two neighbouring sextets a and b (6 bits each) become a * 64 + b */
    __m512i pairs = _mm512_maddubs_epi16(sextets, _mm512_set1_epi32(0x01400140));
    /* two neighbouring numbers p and q of 12 bits each become p * 4096 + q, which has 24 bits */
    return _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00011000));
}

static inline __m512i closed(__m512i joined16)
{
    return _mm512_permutexvar_epi8(_mm512_load_si512(close_gaps), joined16);
}

size_t base64_decode_avx512(const char *text, size_t count, uint8_t *out)
{
    const __m512i table0 = _mm512_load_si512(sextet_of), table1 = _mm512_load_si512(sextet_of + 64);
    size_t done = 0;
    /* Decodes several vectors of text per iteration, with one test for all of them. If a vector has a character outside
     * the alphabet, this loop ends, and the loop below finds the character. */
    for (; count - done >= UNROLL * CHARS; done += UNROLL * CHARS, out += UNROLL * BYTES) {
        __m512i s[UNROLL], any = _mm512_setzero_si512();
        for (int i = 0; i < UNROLL; i++) {
            __m512i c = _mm512_loadu_si512(text + done + i * CHARS);
            s[i] = _mm512_permutex2var_epi8(table0, c, table1);
            /* the constant 0xFE makes this instruction compute a | b | c */
            any = _mm512_ternarylogic_epi32(any, s[i], c, 0xFE);
        }
        if (_mm512_movepi8_mask(any)) break;
        for (int i = 0; i < UNROLL * BYTES / LINE; i++) __builtin_prefetch(out + AHEAD + i * LINE, 1);
        /* each store writes 64 bytes, and only the first 48 are results; the next store overwrites the other 16 */
        for (int i = 0; i < UNROLL; i++) _mm512_storeu_si512(out + i * BYTES, closed(joined(s[i])));
    }
    while (count - done >= 4) {
        size_t left = count - done;
        __mmask64 here = left >= CHARS ? ~(__mmask64)0 : _bzhi_u64(~0ULL, (unsigned)left);
        __m512i c = _mm512_maskz_loadu_epi8(here, text + done);
        __m512i s = _mm512_permutex2var_epi8(table0, c, table1);
        __mmask64 foreign = _mm512_movepi8_mask(_mm512_or_si512(s, c));
        _mm512_storeu_si512(out, closed(joined(s)));
        if (foreign) return done + ((size_t)__builtin_ctzll(foreign) & ~(size_t)3);
        done += CHARS;
        out += BYTES;
    }
    return done;
}

/* Decodes four vectors of text at a time. Each gives 48 bytes, and the 192 bytes are stored as three whole vectors of
 * 64 bytes. */
size_t base64_decode_large_avx512(const char *text, size_t count, uint8_t *out)
{
    const __m512i table0 = _mm512_load_si512(sextet_of), table1 = _mm512_load_si512(sextet_of + 64);
    const __m512i from_48_16 = _mm512_loadu_si512(close_gaps), from_32_32 = _mm512_loadu_si512(close_gaps + 16),
                  from_16_48 = _mm512_loadu_si512(close_gaps + 32);
    size_t head = base64_chars_to_line(out);
    if (head >= count) return 0;
    size_t done = base64_decode_avx512(text, head, out);
    if (done < head) return done;
    out += done / 4 * 3;
    for (; count - done >= UNROLL * CHARS; done += UNROLL * CHARS, out += UNROLL * BYTES) {
        __m512i s[UNROLL], any = _mm512_setzero_si512();
        for (int i = 0; i < UNROLL; i++) {
            __m512i c = _mm512_loadu_si512(text + done + i * CHARS);
            s[i] = _mm512_permutex2var_epi8(table0, c, table1);
            any = _mm512_ternarylogic_epi32(any, s[i], c, 0xFE);
        }
        if (_mm512_movepi8_mask(any)) break;
        for (int i = 0; i < UNROLL; i++) s[i] = joined(s[i]);
        _mm512_stream_si512((void *)out, _mm512_permutex2var_epi8(s[0], from_48_16, s[1]));
        _mm512_stream_si512((void *)(out + 64), _mm512_permutex2var_epi8(s[1], from_32_32, s[2]));
        _mm512_stream_si512((void *)(out + 128), _mm512_permutex2var_epi8(s[2], from_16_48, s[3]));
    }
    /* the stores above bypass the caches; without this fence, another thread that gets the memory might not see the
     * stored bytes */
    _mm_sfence();
    return done;
}

static inline __m512i letters(__m512i bytes)
{
    /* in each group of 64 bits, the positions at which eight sextets (6-bit values) begin: 10 4 22 16, 42 36 54 48 (the
     * lowest byte first) */
    const __m512i shifts = _mm512_set1_epi64(0x3036242A1016040A);
    __m512i dealt = _mm512_permutexvar_epi8(_mm512_load_si512(deal_out), bytes);
    /* the upper two bits of each byte need not be cleared, because the lookup below ignores them */
    __m512i sextets = _mm512_multishift_epi64_epi8(shifts, dealt);
    return _mm512_permutexvar_epi8(sextets, _mm512_load_si512(letter_of));
}

size_t base64_encode_avx512(const uint8_t *bytes, size_t count, char *text)
{
    enum { READ_TOO_FAR = 16 };
    size_t done = 0;
    for (; count - done >= UNROLL * BYTES + READ_TOO_FAR; done += UNROLL * BYTES, text += UNROLL * CHARS) {
        for (int i = 0; i < UNROLL * CHARS / LINE; i++) __builtin_prefetch(text + AHEAD + i * LINE, 1);
        for (int i = 0; i < UNROLL; i++)
            _mm512_storeu_si512(text + i * CHARS, letters(_mm512_loadu_si512(bytes + done + i * BYTES)));
    }
    while (count - done >= 3) {
        size_t now = count - done < BYTES ? (count - done) / 3 * 3 : BYTES, chars = now / 3 * 4;
        __m512i b = _mm512_maskz_loadu_epi8(_bzhi_u64(~0ULL, (unsigned)now), bytes + done);
        _mm512_mask_storeu_epi8(text, chars == CHARS ? ~(__mmask64)0 : _bzhi_u64(~0ULL, (unsigned)chars), letters(b));
        done += now;
        text += chars;
    }
    return done;
}

#endif
