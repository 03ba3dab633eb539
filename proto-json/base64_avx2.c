/* base64_avx2.c: whole groups of base64, 32 characters at a time.
 *
 * Decoding. The two halves of a character, hi = c >> 4 and lo = c & 15, decide what it is. The alphabet is seven runs:
 *
 *     hi 2: '+' (lo B), '/' (lo F)    hi 3: '0'-'9' (lo 0-9)    hi 4, 6: letters (lo 1-F)    hi 5, 7: letters (lo 0-A)
 *
 * Each kind of hi has a bit. A table has an entry for each lo: the bits of the kinds of hi with which this lo cannot
 * occur. If the entry includes the bit of the character's hi, the character is outside the alphabet. A second table
 * has, for each hi, the difference between a character and its six bits. Characters with the same hi have the same
 * difference, except '/'. The difference of '/' is in entry 1, because no character of the alphabet has hi = 1. Two
 * multiply-adds then join the sextets, 00aaaaaa 00bbbbbb 00cccccc 00dddddd -> aaaaaabb bbbbcccc ccdddddd, and shuffles
 * close the gaps.
 *
 * Encoding does the reverse. A shuffle copies bytes so that each 16-bit half of 32 bits holds two sextets. Two
 * multiplications shift them into place, and a table of 16 differences turns them into letters.
 *
 * Source of the idea: Mula and Lemire, "Faster Base64 Encoding and Decoding using AVX2 Instructions",
 * arXiv:1704.00605. */
#include "base64_simd.h"

#ifdef __AVX2__

#include <immintrin.h>

enum { CHARS = 32, BYTES = 24, UNROLL = 4 };

/* A table of 16 bytes, written twice, because a byte shuffle works on each half of a 32-byte vector separately. */
#define TWICE(...) _mm256_setr_epi8(__VA_ARGS__, __VA_ARGS__)

/* Returns the sextets (6-bit values) of 32 characters. A byte of *foreign becomes nonzero if its character is outside
 * the alphabet, and 0 otherwise. */
static inline __m256i sextets(__m256i text, __m256i *foreign)
{
    enum { PLUS_SLASH = 1, DIGITS = 2, AO_ao = 4, PZ_pz = 8, NEVER = 16 };
    const __m256i kind_of_hi = TWICE(NEVER, NEVER, PLUS_SLASH, DIGITS, AO_ao, PZ_pz, AO_ao, PZ_pz, NEVER, NEVER, NEVER,
                                     NEVER, NEVER, NEVER, NEVER, NEVER);
    const __m256i not_with_lo = TWICE(
        /* entry for characters whose lower 4 bits are 0: of the alphabet only 0, P and p have these bits, so the entry
         * excludes '+', '/', A-O and a-o */
        NEVER | PLUS_SLASH | AO_ao,
        /* entries for characters whose lower 4 bits are 1 to 9: of the alphabet, digits and letters have these bits, so
         * the entries exclude '+' and '/' */
        NEVER | PLUS_SLASH, NEVER | PLUS_SLASH, NEVER | PLUS_SLASH, NEVER | PLUS_SLASH, NEVER | PLUS_SLASH,
        NEVER | PLUS_SLASH, NEVER | PLUS_SLASH, NEVER | PLUS_SLASH, NEVER | PLUS_SLASH,
        /* entry for characters whose lower 4 bits are A: of the alphabet only J, Z, j and z have these bits, so the
         * entry excludes digits, '+' and '/' */
        NEVER | PLUS_SLASH | DIGITS,
        /* entry for characters whose lower 4 bits are B: of the alphabet only '+', K and k have these bits, so the
         * entry excludes digits, P-Z and p-z */
        NEVER | DIGITS | PZ_pz,
        /* entries for characters whose lower 4 bits are C to E: of the alphabet only L-N and l-n have these bits, so
         * the entries exclude digits, '+', '/', P-Z and p-z */
        NEVER | PLUS_SLASH | DIGITS | PZ_pz, NEVER | PLUS_SLASH | DIGITS | PZ_pz, NEVER | PLUS_SLASH | DIGITS | PZ_pz,
        /* entry for characters whose lower 4 bits are F: of the alphabet only '/', O and o have these bits, so the
         * entry excludes digits, P-Z and p-z */
        NEVER | DIGITS | PZ_pz);
    const __m256i to_sextet = TWICE(0, 63 - '/', 62 - '+', 52 - '0', -'A', -'A', 26 - 'a', 26 - 'a', 0, 0, 0, 0, 0, 0,
                                    0, 0);

    const __m256i low_half = _mm256_set1_epi8(0x0F);
    __m256i lo = _mm256_and_si256(text, low_half);
    __m256i hi = _mm256_and_si256(_mm256_srli_epi32(text, 4), low_half);
    *foreign = _mm256_and_si256(_mm256_shuffle_epi8(not_with_lo, lo), _mm256_shuffle_epi8(kind_of_hi, hi));
    /* Each byte of `slash` is -1 where the character is '/', and otherwise 0. For '/', hi + slash is 1, a table entry
     * that no other character of the alphabet uses. */
    __m256i slash = _mm256_cmpeq_epi8(text, _mm256_set1_epi8('/'));
    return _mm256_add_epi8(text, _mm256_shuffle_epi8(to_sextet, _mm256_add_epi8(hi, slash)));
}

/* Joins 32 sextets (6-bit numbers, one in each byte) to 24 bytes: every four sextets become three bytes. */
static inline __m256i joined(__m256i sextets32, __m256i places)
{
    /* two neighbouring sextets a and b (6 bits each) become a * 64 + b */
    __m256i pairs = _mm256_maddubs_epi16(sextets32, _mm256_set1_epi32(0x01400140));
    /* two neighbouring numbers p and q of 12 bits each become p * 4096 + q, which has 24 bits */
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00011000));
    __m256i close = TWICE(2, 1, 0, 6, 5, 4, 10, 9, 8, 14, 13, 12, -1, -1, -1, -1);
    return _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(fours, close), places);
}
#define AT_LOW_END _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7)

static inline __m256i load(const void *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}
static inline void store(void *to, __m256i v)
{
    _mm256_storeu_si256((__m256i *)to, v);
}

size_t base64_decode_avx2(const char *text, size_t count, uint8_t *out)
{
    size_t done = 0;
    /* Decodes several vectors of text per iteration, with one test for all of them. If a vector has a character outside
     * the alphabet, this loop ends, and the loop below finds the character. */
    for (; count - done >= UNROLL * CHARS; done += UNROLL * CHARS, out += UNROLL * BYTES) {
        __m256i s[UNROLL], f[UNROLL];
        for (int i = 0; i < UNROLL; i++) s[i] = sextets(load(text + done + i * CHARS), &f[i]);
        __m256i any = _mm256_or_si256(_mm256_or_si256(f[0], f[1]), _mm256_or_si256(f[2], f[3]));
        if (!_mm256_testz_si256(any, any)) break;
        /* each store writes 32 bytes, and only the first 24 are results; the next store overwrites the other 8 */
        for (int i = 0; i < UNROLL; i++) store(out + i * BYTES, joined(s[i], AT_LOW_END));
    }
    for (; count - done >= CHARS; done += CHARS, out += BYTES) {
        __m256i foreign, s = sextets(load(text + done), &foreign);
        store(out, joined(s, AT_LOW_END));
        unsigned legal = (unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi8(foreign, _mm256_setzero_si256()));
        if (legal != 0xFFFFFFFF) return done + ((size_t)__builtin_ctz(~legal) & ~(size_t)3);
    }
    return done;
}

/* Decodes four vectors of text at a time. Each gives 24 bytes, and the 96 bytes are stored as three whole vectors of 32
 * bytes. */
size_t base64_decode_large_avx2(const char *text, size_t count, uint8_t *out)
{
    size_t head = base64_chars_to_line(out);
    if (head >= count) return 0;
    size_t done = base64_decode_avx2(text, head, out);
    done += base64_decode_scalar(text + done, head - done, out + done / 4 * 3);
    if (done < head) return done;
    out += done / 4 * 3;
    for (; count - done >= UNROLL * CHARS; done += UNROLL * CHARS, out += UNROLL * BYTES) {
        __m256i s[UNROLL], f[UNROLL];
        for (int i = 0; i < UNROLL; i++) s[i] = sextets(load(text + done + i * CHARS), &f[i]);
        __m256i any = _mm256_or_si256(_mm256_or_si256(f[0], f[1]), _mm256_or_si256(f[2], f[3]));
        if (!_mm256_testz_si256(any, any)) break;
        /* The four results a, b, c and d have 24 bytes each. They are stored as three vectors of four 8-byte units: a0
         * a1 a2 b0 | b1 b2 c0 c1 | c2 d0 d1 d2. */
        __m256i a = joined(s[0], _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 3, 7));
        __m256i b = joined(s[1], _mm256_setr_epi32(2, 4, 5, 6, 3, 7, 0, 1));
        __m256i c = joined(s[2], _mm256_setr_epi32(5, 6, 3, 7, 0, 1, 2, 4));
        __m256i d = joined(s[3], _mm256_setr_epi32(3, 7, 0, 1, 2, 4, 5, 6));
        _mm256_stream_si256((__m256i *)out, _mm256_blend_epi32(a, b, 0xC0));
        _mm256_stream_si256((__m256i *)(out + 32), _mm256_blend_epi32(b, c, 0xF0));
        _mm256_stream_si256((__m256i *)(out + 64), _mm256_blend_epi32(c, d, 0xFC));
    }
    /* the stores above bypass the caches; without this fence, another thread that gets the memory might not see the
     * stored bytes */
    _mm_sfence();
    return done;
}

/* Turns 24 bytes into 32 characters. Each half of the vector (16 bytes) has 12 of the 24 bytes at its low end. */
static inline __m256i letters(__m256i bytes)
{
    /* Every three bytes b0 b1 b2 become 32 bits, b1 b0 b2 b1, in which every sextet (6 bits) is contiguous. */
    __m256i dealt = _mm256_shuffle_epi8(bytes, TWICE(1, 0, 2, 1, 4, 3, 5, 4, 7, 6, 8, 7, 10, 9, 11, 10));
    __m256i even = _mm256_mulhi_epu16(_mm256_and_si256(dealt, _mm256_set1_epi32(0x0FC0FC00)),
                                      _mm256_set1_epi32(0x04000040));
    __m256i odd = _mm256_mullo_epi16(_mm256_and_si256(dealt, _mm256_set1_epi32(0x003F03F0)),
                                     _mm256_set1_epi32(0x01000010));
    __m256i sextets32 = _mm256_or_si256(even, odd);

    /* Entry 0 of this table is for A-Z, entry 1 for a-z, entries 2 to 11 for 0-9, entry 12 for +, entry 13 for /. */
    const __m256i differences = TWICE('A', 'a' - 26, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52, '0' - 52,
                                      '0' - 52, '0' - 52, '0' - 52, '0' - 52, '+' - 62, '/' - 63, 0, 0);
    __m256i row = _mm256_subs_epu8(sextets32, _mm256_set1_epi8(51));
    row = _mm256_sub_epi8(row, _mm256_cmpgt_epi8(sextets32, _mm256_set1_epi8(25)));
    return _mm256_add_epi8(sextets32, _mm256_shuffle_epi8(differences, row));
}

static inline __m256i load_halves(const uint8_t *from)
{
    __m128i low = _mm_loadu_si128((const __m128i *)from), high = _mm_loadu_si128((const __m128i *)(from + BYTES / 2));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

size_t base64_encode_avx2(const uint8_t *bytes, size_t count, char *text)
{
    enum { READ_TOO_FAR = 4 };
    size_t done = 0;
    for (; count - done >= UNROLL * BYTES + READ_TOO_FAR; done += UNROLL * BYTES, text += UNROLL * CHARS)
        for (int i = 0; i < UNROLL; i++) store(text + i * CHARS, letters(load_halves(bytes + done + i * BYTES)));
    for (; count - done >= BYTES + READ_TOO_FAR; done += BYTES, text += CHARS)
        store(text, letters(load_halves(bytes + done)));
    return done;
}

#endif
