/* numbers.c: decimal text to numbers and back, exactly.
 *
 * The grammar is a machine of a dozen states that reads one character at a time.
 *
 *               digit 1-9  +---------+ .   +-------+ digit +----------+ e    +---+ + -  +--------+ digit  +----------+
 *     (value) ----------->| INTEGER |---->| POINT |------>| FRACTION |----->| E |----->| E_SIGN |------->| EXPONENT |
 *        | '-' +-------+  +---------+     +-------+       +----------+      +---+      +--------+        +----------+
 *        +---->| MINUS |-------^ | ^           ^                              ^  `-------- digit ----------------^
 *        |     +-------+ 1-9     `-|---- e ----|------------------------------'
 *        | 0       | 0   +------+  |           |                              |
 *        +---------+---->| ZERO |--|-----. ----'                              |
 *                        +------+  `--- e ------------------------------------'
 *
 * A quick reader runs before the machine. It tries to take all characters of a number at once, if the piece contains
 * them. If the piece ends early, a character does not fit, or the number is long, the quick reader takes nothing. The
 * machine then reads the same characters.
 *
 * Values. A number is read as its first 19 significant digits w, times a power of ten, and perhaps further digits. No
 * dtype here has more than 24 significant bits. The values of the dtypes, and the midpoints between them, are therefore
 * among the numbers of 25 bits ("the grid"). If a double lies on the same side of every grid point as the exact value,
 * it rounds to the same element. Hence
 *
 *   1. x = w * 10^e in double arithmetic has an error of less than 4 units in the last of its 53 bits.
 *   2. The 28 bits after the 25th say how near a grid point is. Almost every random number (all but one in
 *      10^7) is far from every grid point. Then x is used.
 *   3. Otherwise the exact value is compared with the nearest grid point, in integers of 128 bits, or of as many bits
 *      as 768 digits need. The result is the grid point itself, or the double just above or below it.
 *
 * Rounding such a double to any of the dtypes gives the same result as rounding the decimal number itself, ties
 * included.
 *
 * Writing. The algorithm Schubfach finds the shortest decimal in the interval that rounds to the value. Source: R.
 * Giulietti, "The Schubfach way to render doubles", 2020. */
#include "numbers.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned __int128 u128;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "eight characters at a time: the first one is the lowest byte");

/* ---- The floating-point formats ---------------------------------------------------------------------------------- */

/* A floating-point format. A value is (-1)^sign * c * 2^q with c < 2^(fraction_bits + 1). The code of a value is the
 * value's bit pattern: sign, exponent and fraction, as in IEEE 754. */
static const struct format {
    int fraction_bits, min_exponent; /* min_exponent: exponent (of 2) of the format's smallest normal number */
    /* bit patterns of the largest finite number, the sign bit, infinity (0 if the format has none) and NaN */
    uint32_t largest, sign, infinity, nan;
} formats[] = {
    [ATTN_F32] = { 23, -126, 0x7F7FFFFF, 0x80000000, 0x7F800000, 0x7FC00000 },
    [ATTN_F16] = { 10, -14, 0x7BFF, 0x8000, 0x7C00, 0x7E00 },
    [ATTN_BF16] = { 7, -126, 0x7F7F, 0x8000, 0x7F80, 0x7FC0 },
    [ATTN_F8E4M3] = { 3, -6, 0x7E, 0x80, 0, 0x7F },
};

static const uint8_t element_bytes[] = {
    [NUMBERS_F32] = 4, [NUMBERS_F16] = 2, [NUMBERS_BF16] = 2,   [NUMBERS_F8E4M3] = 1,
    [NUMBERS_I32] = 4, [NUMBERS_U8] = 1,  [NUMBERS_UNTYPED] = 8
};

size_t numbers_bytes(numbers_type type)
{
    return element_bytes[type];
}

static uint64_t double_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double bits_double(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- Converting decimal numbers to binary ------------------------------------------------------------------------ */

/* The parsed text of a number: (-1)^negative * w * 10^exponent. `longer`: w has only the first 19 significant
 * digits. */
struct decimal {
    bool negative, longer, integer; /* integer: whether the text has neither a point nor an exponent */
    uint64_t w;
    int exponent;
    /* the number's digits and point; no NUL ends this text */
    const char *text;
    size_t count;
};

enum { W_DIGITS = 19 }; /* the largest number of decimal digits that always fit in 64 bits: 10^19 < 2^64 */

/* Powers of ten as doubles. Up to 10^22 they are exact; each larger one is the double nearest to the power. */
static const double tens[] = {
    1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16,
    1e17, 1e18, 1e19, 1e20, 1e21, 1e22, 1e23, 1e24, 1e25, 1e26, 1e27, 1e28, 1e29, 1e30, 1e31, 1e32, 1e33,
    1e34, 1e35, 1e36, 1e37, 1e38, 1e39, 1e40, 1e41, 1e42, 1e43, 1e44, 1e45, 1e46, 1e47, 1e48, 1e49, 1e50,
    1e51, 1e52, 1e53, 1e54, 1e55, 1e56, 1e57, 1e58, 1e59, 1e60, 1e61, 1e62, 1e63, 1e64, 1e65, 1e66,
};

#define BELOW(bit) ((UINT64_C(1) << (bit)) - 1)

enum {
    HUGE_EXPONENT = 38, /* numbers with a larger exponent are too large for every dtype: 10^39 > 2^128 */
    /* Numbers w * 10^e with a smaller exponent e are 0 in every dtype. Because w < 10^19, they are below 10^-48, which
     * is less than half of the smallest float32 (2^-150). */
    TINY_EXPONENT = -66,
    GRID_SHIFT = 52 - 24, /* a double has this many more fraction bits than a number with 25 significant bits */
};
/* HUGE_NUMBER replaces every number that is too large for all dtypes, and TINY_NUMBER every number that is 0 in all
 * dtypes */
static const double HUGE_NUMBER = 0x1p200, TINY_NUMBER = 0x1p-200;

/* A natural number below 10^768 * 2^244 < 2^2816, which is enough for texts of 768 digits. */
struct big {
    int words;
    uint32_t word[96]; /* 32-bit words of the number, the lowest first */
};

static void big_multiply_add(struct big *b, uint32_t factor, uint32_t addend)
{
    uint64_t carry = addend;
    for (int i = 0; i < b->words; i++) {
        carry += (uint64_t)b->word[i] * factor;
        b->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry) b->word[b->words++] = (uint32_t)carry;
}

static void big_multiply_ten(struct big *b, int power)
{
    for (; power >= 9; power -= 9) big_multiply_add(b, 1000000000, 0);
    for (; power > 0; power--) big_multiply_add(b, 10, 0);
}

static void big_shift(struct big *b, int places)
{
    for (; places >= 31; places -= 31) big_multiply_add(b, 1u << 31, 0);
    big_multiply_add(b, 1u << places, 0);
}

static int big_compare(const struct big *a, const struct big *b)
{
    if (a->words != b->words) return a->words < b->words ? -1 : 1;
    for (int i = a->words - 1; i >= 0; i--)
        if (a->word[i] != b->word[i]) return a->word[i] < b->word[i] ? -1 : 1;
    return 0;
}

/* Returns the sign (-1, 0 or 1) of d - m * 2^q, computed exactly. The two numbers must be near each other, because
 * struct big has limited room. */
static int compare_big(const struct decimal *d, uint32_t m, int q)
{
    struct big left = { 0, { 0 } }, right = { 1, { m } };
    /* Exponent (of ten) of the integer that the loop reads from d->text. It is d->exponent, minus 1 for each digit
     * after the first W_DIGITS. */
    int exponent = d->exponent;
    int significant = 0, pending = 0;
    uint32_t chunk = 0;
    for (size_t i = 0; i < d->count; i++) {
        if (d->text[i] == '.') continue;
        if (significant > 0 || d->text[i] != '0') significant++;
        if (significant > W_DIGITS) exponent--;
        chunk = chunk * 10 + (uint32_t)(d->text[i] - '0');
        if (++pending == 9) {
            big_multiply_add(&left, 1000000000, chunk);
            pending = 0;
            chunk = 0;
        }
    }
    big_multiply_ten(&left, pending);
    big_multiply_add(&left, 1, chunk);
    if (exponent >= 0) big_multiply_ten(&left, exponent);
    else big_multiply_ten(&right, -exponent);
    if (q >= 0) big_shift(&right, q);
    else big_shift(&left, -q);
    return big_compare(&left, &right);
}

/* Returns the sign of d - m * 2^q, like compare_big(), but with integers of 128 bits where they suffice. For d = w *
 * 10^e it compares w * 5^e with m * 2^(q - e); if e < 0, it compares w with m * 5^-e * 2^(q - e). If |e| <= 27, one
 * side is below 2^64 * 5^27 < 2^127, and the other side is close to it. */
static int compare(const struct decimal *d, uint32_t m, int q)
{
    static const uint64_t fives[] = { 1,
                                      5,
                                      25,
                                      125,
                                      625,
                                      3125,
                                      15625,
                                      78125,
                                      390625,
                                      1953125,
                                      9765625,
                                      48828125,
                                      244140625,
                                      1220703125,
                                      6103515625,
                                      30517578125,
                                      152587890625,
                                      762939453125,
                                      3814697265625,
                                      19073486328125,
                                      95367431640625,
                                      476837158203125,
                                      2384185791015625,
                                      11920928955078125,
                                      59604644775390625,
                                      298023223876953125,
                                      1490116119384765625,
                                      7450580596923828125 };
    if (d->longer || abs(d->exponent) > 27) return compare_big(d, m, q);
    u128 left = d->w, right = m;
    if (d->exponent > 0) left *= fives[d->exponent];
    else right *= fives[-d->exponent];
    int shift = q - d->exponent;
    if (shift >= 0) right <<= shift;
    else left <<= -shift;
    return left < right ? -1 : left > right;
}

/* Returns a double that can replace the exact value of d. Compared with any number of 25 bits, the double and the exact
 * value give the same result: smaller, equal or larger. */
static double magnitude(const struct decimal *d)
{
    enum { GUARD = 8 }; /* upper bound on the rounding error of x (below), in units in the last place (ulp) */
    const uint64_t off_grid = BELOW(GRID_SHIFT);
    if (d->exponent == 0 && d->w >> 53 == 0 && !d->longer) return (double)d->w;
    if (d->w == 0) return 0;
    if (d->exponent > HUGE_EXPONENT) return HUGE_NUMBER;
    if (d->exponent < TINY_EXPONENT) return TINY_NUMBER;
    double x = d->exponent >= 0 ? (double)d->w * tens[d->exponent] : (double)d->w / tens[-d->exponent];
    uint64_t bits = double_bits(x);
    if (((bits + GUARD) & off_grid) > 2 * GUARD) return x;
    uint64_t grid = (bits + GUARD) & ~off_grid;
    uint32_t m = (uint32_t)((grid & BELOW(52)) >> GRID_SHIFT) | 1u << 24;
    int q = (int)(grid >> 52) - 1023 - 24;
    /* If the exact value equals the grid point (a double with 25 significant bits), compare() returns 0, and the grid
     * point is the result. Otherwise the result is the double next to the grid point, above or below it. */
    return bits_double(grid + (uint64_t)(int64_t)compare(d, m, q));
}

/* Rounds a double from 0 to HUGE_NUMBER to the nearest number of the format, ties to even, and sets its code (bit
 * pattern). Returns false if the result is beyond the format's largest number. */
static bool narrow(const struct format *f, double x, uint32_t *code)
{
    uint64_t bits = double_bits(x);
    int exponent = (int)(bits >> 52) - 1023;
    /* number of significant bits that the result lacks because it is subnormal; 0: it is normal */
    int below = exponent < f->min_exponent ? f->min_exponent - exponent : 0;
    int shift = 52 - f->fraction_bits + below;
    if (bits == 0 || shift > 54) { /* x is less than half of the format's smallest number */
        *code = 0;
        return true;
    }
    uint64_t c = (bits & BELOW(52)) | UINT64_C(1) << 52;
    uint64_t half = UINT64_C(1) << (shift - 1), cut = c & (2 * half - 1);
    c >>= shift;
    /* Rounding up is computed without a branch, because the processor could not predict a branch that depends on the
     * digits. */
    c += (cut > half) | ((cut == half) & c);
    /* The code is the sum of the exponent field and c. The field that is added is one too low, because the highest
     * significant bit of c adds one to it. The field of a subnormal number is 0, and c has that bit only if it was
     * rounded up to a normal number. The sum cannot overflow: for the largest x, 2^200, the sum is 326 << 23. */
    *code = (below ? 0 : (uint32_t)(exponent - f->min_exponent) << f->fraction_bits) + (uint32_t)c;
    return *code <= f->largest;
}

/* Writes the lowest `bytes` bytes of a code (bit pattern). memcpy() is needed, because numbers_convert() reads doubles
 * from the same memory. */
static void put(void *out, size_t index, size_t bytes, uint32_t code)
{
    char *at = (char *)out + index * bytes;
    switch (bytes) {
    case 4: memcpy(at, &code, 4); break;
    case 2: memcpy(at, &code, 2); break;
    default: memcpy(at, &code, 1); break;
    }
}

static void put_double(void *out, size_t index, double x)
{
    memcpy((char *)out + index * sizeof x, &x, sizeof x);
}

#define OUT_OF(dtype) "the number is out of the range of " dtype
#define INFINITE      " (\"Infinity\" and \"-Infinity\" are taken)"

static const char *const range_errors[] = {
    [NUMBERS_F32] = OUT_OF("float32") INFINITE,
    [NUMBERS_F16] = OUT_OF("float16") INFINITE,
    [NUMBERS_BF16] = OUT_OF("bfloat16") INFINITE,
    [NUMBERS_F8E4M3] = OUT_OF("float8_e4m3fn"),
    [NUMBERS_I32] = OUT_OF("int32"),
    [NUMBERS_U8] = OUT_OF("uint8"),
    [NUMBERS_UNTYPED] = OUT_OF("every dtype") INFINITE,
};
static const char no_integer[] = "an integer without point or exponent is expected";

/* The put_ functions write one element of an array. They return NULL, or text that says what is wrong with the
 * number. */

static const char *put_integer(numbers_type type, bool negative, uint64_t w, void *out, size_t index)
{
    uint64_t most = type == NUMBERS_U8 ? (negative ? 0 : UINT8_MAX) : (uint64_t)INT32_MAX + negative;
    if (w > most) return range_errors[type];
    put(out, index, element_bytes[type], negative ? -(uint32_t)w : (uint32_t)w);
    return NULL;
}

static const char *put_floating(numbers_type type, bool negative, double x, void *out, size_t index)
{
    const struct format *f = &formats[type];
    uint32_t code;
    /* the processor's conversion gives what narrow() gives, unless x rounds to more than the largest float32 */
    if (type == NUMBERS_F32 && x < 0x1.ffffffp127) {
        float value = negative ? (float)-x : (float)x;
        memcpy(&code, &value, sizeof code);
        put(out, index, sizeof code, code);
        return NULL;
    }
    if (!narrow(f, x, &code)) return range_errors[type];
    put(out, index, element_bytes[type], negative ? code | f->sign : code);
    return NULL;
}

static const char *put_not_finite(numbers_type type, double x, void *out, size_t index)
{
    if (type == NUMBERS_UNTYPED) {
        put_double(out, index, x);
        return NULL;
    }
    const struct format *f = &formats[type];
    if (isinf(x) && f->infinity == 0) return "float8_e4m3fn has no infinity";
    put(out, index, element_bytes[type], isnan(x) ? f->nan : x < 0 ? f->infinity | f->sign : f->infinity);
    return NULL;
}

static bool is_integer_type(numbers_type type)
{
    return type == NUMBERS_I32 || type == NUMBERS_U8;
}

/* ---- Reading numbers fast ---------------------------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return (unsigned char)(c - '0') < 10;
}

/* Converts eight decimal digits to a number. Each byte of v is a digit (0 to 9), and the lowest byte is the first
 * digit. */
static inline uint64_t sum_eight(uint64_t v)
{
    const uint64_t every_fourth = UINT64_C(0x000000FF000000FF);
    v = v * 10 + (v >> 8); /* each of bytes 0, 2, 4 and 6 of v is now a number of two digits (0 to 99) */
    return ((v & every_fourth) * (100 + (UINT64_C(1000000) << 32)) +
            (v >> 16 & every_fourth) * (1 + (UINT64_C(10000) << 32))) >>
           32;
}

/* Reads the decimal digits at p and appends them to the number w. Returns a pointer to the first character that is not
 * a digit. */
static inline const char *take_digits(const char *p, const char *end, uint64_t *w)
{
    static const uint32_t scale[9] = { 1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000 };
    while (end - p >= 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        v ^= UINT64_C(0x3030303030303030);
        /* The top bit of a byte of `others` is set if the byte is not a digit. Only the lowest such byte is certain:
         * bytes above it may be marked although they are digits. */
        uint64_t others = ((v + UINT64_C(0x7676767676767676)) | v) & UINT64_C(0x8080808080808080);
        if (others == 0) {
            *w = *w * scale[8] + sum_eight(v);
            p += 8;
            continue;
        }
        int count = __builtin_ctzll(others) / 8; /* number of digits before the first character that is not a digit */
        *w = *w * scale[count] + sum_eight(v << 8 << (56 - 8 * count));
        return p + count;
    }
    while (p < end && is_digit(*p)) *w = *w * 10 + (uint64_t)(*p++ - '0');
    return p;
}

/* Sets *d to the value of a number whose text has more than 19 digits, leading zeros included. written_exponent is the
 * number behind 'e' in the text. */
static void take_apart_long(struct decimal *d, int written_exponent)
{
    int significant = 0, after_point = 0;
    bool point = false;
    d->w = 0;
    d->longer = false;
    d->exponent = written_exponent;
    for (size_t i = 0; i < d->count; i++) {
        char c = d->text[i];
        if (c == '.') {
            point = true;
            continue;
        }
        if (significant > 0 || c != '0') significant++;
        if (significant <= W_DIGITS) {
            d->w = d->w * 10 + (uint64_t)(c - '0');
            after_point += point;
        } else {
            d->longer = true;
            d->exponent += !point;
        }
    }
    d->exponent -= after_point;
}

/* Parses a number that begins at p, and returns a pointer to the character behind it. Returns NULL if the number does
 * not end before `end`, is malformed, or is too long. The caller then reads it with the state machine, which is slower
 * and handles all cases. */
static const char *quick(const char *p, const char *end, struct decimal *d)
{
    /* The reader does not let an exponent grow beyond this bound. With such an exponent the number is 0 in every dtype,
     * or too large for every dtype. */
    enum { SATURATED = 100000 };
    const char *const start = p;
    d->negative = *p == '-';
    p += d->negative;
    d->text = p;
    uint64_t w = 0;
    while (p < end && is_digit(*p)) w = w * 10 + (uint64_t)(*p++ - '0');
    size_t digits = (size_t)(p - d->text);
    if (digits == 0 || (digits > 1 && d->text[0] == '0')) return NULL;
    int exponent = 0, fraction_digits = 0;
    d->integer = true;
    if (p < end && *p == '.') {
        const char *const fraction = ++p;
        d->integer = false;
        p = take_digits(p, end, &w);
        if (p == fraction || p - fraction > NUMBERS_CHARS) return NULL;
        fraction_digits = (int)(p - fraction);
        digits += (size_t)fraction_digits;
    }
    d->count = (size_t)(p - d->text);
    if (p < end && (*p == 'e' || *p == 'E')) {
        d->integer = false;
        if (++p == end) return NULL;
        bool down = *p == '-';
        if (down || *p == '+') p++;
        const char *const first = p;
        for (; p < end && is_digit(*p); p++)
            if (exponent < SATURATED) exponent = exponent * 10 + (*p - '0');
        if (p == first) return NULL;
        if (down) exponent = -exponent;
    }
    if (p == end || p - start > NUMBERS_CHARS) return NULL;
    d->w = w;
    d->longer = false;
    d->exponent = exponent - fraction_digits;
    if (digits > W_DIGITS) take_apart_long(d, exponent);
    return p;
}

static const char *put_decimal(numbers_reader *r, const struct decimal *d, void *out, size_t index, uint64_t element)
{
    if (is_integer_type(r->type)) return put_integer(r->type, d->negative, d->longer ? UINT64_MAX : d->w, out, index);
    double x = magnitude(d);
    if (r->type != NUMBERS_UNTYPED) return put_floating(r->type, d->negative, x, out, index);
    uint32_t code;
    /* no dtype has larger numbers than float32, so a number beyond its range is refused */
    if (!narrow(&formats[ATTN_F32], x, &code)) return range_errors[NUMBERS_UNTYPED];
    if (!d->integer && !r->fractional) {
        r->fractional = true;
        r->fraction_element = element;
    }
    put_double(out, index, d->negative ? -x : x);
    return NULL;
}

/* ---- The state machine that reads any text of numbers ------------------------------------------------------------ */

enum state {
    MINUS,
    ZERO,
    INTEGER,
    POINT,
    FRACTION,
    E,
    E_SIGN,
    /* from MINUS to EXPONENT the reader is inside a number; each state is named after the last character read */
    EXPONENT,
    NUMBER_STATES,
    START = NUMBER_STATES, /* no '[' was read yet */
    FIRST,                 /* after '[': a value or ']' must follow */
    NEXT,                  /* after ',': a value must follow */
    AFTER,                 /* after a value: ',' or ']' must follow */
    WORD,
    BARE_WORD,
    DONE,
    COMPLETE,
    /* COMPLETE and WRONG are results and not states. COMPLETE: the number ended before this character. WRONG: the
     * character is not legal here. */
    WRONG
};

enum character { NAUGHT, DIGIT, DOT, EXP, MINUS_SIGN, PLUS_SIGN, OTHER, CHARACTERS };

static const uint8_t next_state[NUMBER_STATES][CHARACTERS] = {
    /* Columns: the next state if the character is 0, 1-9, the point, e or E, -, +, or another one. */
    [MINUS] = { ZERO, INTEGER, WRONG, WRONG, WRONG, WRONG, WRONG },
    [ZERO] = { WRONG, WRONG, POINT, E, COMPLETE, COMPLETE, COMPLETE },
    [INTEGER] = { INTEGER, INTEGER, POINT, E, COMPLETE, COMPLETE, COMPLETE },
    [POINT] = { FRACTION, FRACTION, WRONG, WRONG, WRONG, WRONG, WRONG },
    [FRACTION] = { FRACTION, FRACTION, COMPLETE, E, COMPLETE, COMPLETE, COMPLETE },
    [E] = { EXPONENT, EXPONENT, WRONG, WRONG, E_SIGN, E_SIGN, WRONG },
    [E_SIGN] = { EXPONENT, EXPONENT, WRONG, WRONG, WRONG, WRONG, WRONG },
    [EXPONENT] = { EXPONENT, EXPONENT, COMPLETE, COMPLETE, COMPLETE, COMPLETE, COMPLETE },
};

static const char *const number_errors[NUMBER_STATES] = {
    [MINUS] = "a digit must follow the minus sign",
    [ZERO] = "no digit may follow a leading zero",
    [POINT] = "a digit must follow the decimal point",
    [E] = "a digit or a sign must follow the e of an exponent",
    [E_SIGN] = "a digit must follow the sign of an exponent",
};

static enum character character_of(char c)
{
    switch (c) {
    case '0': return NAUGHT;
    case '.': return DOT;
    case 'e':
    case 'E': return EXP;
    case '-': return MINUS_SIGN;
    case '+': return PLUS_SIGN;
    default: return is_digit(c) ? DIGIT : OTHER;
    }
}

static const struct {
    const char *text;
    double value;
} words[] = {
    { "NaN", NAN },
    { "Infinity", INFINITY },
    { "-Infinity", -INFINITY },
};
enum { WORDS = sizeof words / sizeof words[0] };

/* Words without quotes, legal if the reader's member bare_words is true. */
static const struct {
    const char *text;
    double value;
    bool truth; /* whether the word is true or false, which only a tensor of uint8 may have */
} bare_words[] = {
    { "NaN", NAN, false }, { "Infinity", INFINITY, false }, { "-Infinity", -INFINITY, false }, { "true", 1, true },
    { "false", 0, true },
};
enum { BARE_WORDS = sizeof bare_words / sizeof bare_words[0] };
static const char no_word[] = "a string here is \"NaN\", \"Infinity\" or \"-Infinity\", numbers stand without quotes";

void numbers_begin(numbers_reader *reader, numbers_type type)
{
    memset(reader, 0, offsetof(numbers_reader, text));
    reader->type = type;
    reader->state = START;
    /* -1: the size is unknown until the first array at this depth ends */
    for (int i = 0; i < NUMBERS_RANK; i++) reader->shape[i] = -1;
}

/* Returns NULL if a value is legal at the reader's position, otherwise text that says what is wrong. `opens`: the value
 * is an array. */
static const char *check_place(const numbers_reader *r, bool opens)
{
    int d = r->depth;
    if (opens && d == NUMBERS_RANK) return "arrays are nested deeper than 4";
    if (d == 0) return NULL;
    if (opens && r->leaf_depth == d) return "this array is nested deeper than the ones before it";
    if (!opens && r->leaf_depth > d) return "an array is expected, for the elements before are arrays";
    if (r->shape[d - 1] >= 0 && r->count[d - 1] == r->shape[d - 1])
        return "this array is longer than the ones before it";
    return NULL;
}

static void open_array(numbers_reader *r)
{
    if (r->depth > 0) r->count[r->depth - 1]++;
    r->count[r->depth++] = 0;
    r->state = FIRST;
}

static const char *close_array(numbers_reader *r)
{
    int d = r->depth;
    int64_t count = r->count[d - 1];
    if (r->shape[d - 1] >= 0 && count != r->shape[d - 1]) return "this array is shorter than the ones before it";
    r->shape[d - 1] = count;
    if (r->leaf_depth == 0)
        /* the first array without inner arrays sets the depth of the elements, even if it is empty */
        r->leaf_depth = d;
    r->state = AFTER;
    if (--r->depth == 0) {
        r->state = DONE;
        r->rank = r->leaf_depth;
    }
    return NULL;
}

static void count_element(numbers_reader *r)
{
    r->leaf_depth = r->depth;
    r->count[r->depth - 1]++;
    r->elements++;
    r->state = AFTER;
}

/* Reads numbers separated by commas, and returns a pointer to the character behind the last one. check_place() must
 * have accepted the first number. *error becomes a message if the dtype cannot hold a number. */
static const char *take_run(numbers_reader *r, const char *p, const char *end, void *out, size_t index, size_t room,
                            const char **error)
{
    const int64_t wanted = r->shape[r->depth - 1], count = r->count[r->depth - 1];
    const size_t first = index, last = wanted >= 0 && (uint64_t)(wanted - count) < room
                                           ? index + (size_t)(wanted - count)
                                           : index + room;
    const bool integers = is_integer_type(r->type);
    int state = r->state;
    while (index < last && p < end && (is_digit(*p) || *p == '-')) {
        struct decimal d;
        const char *behind = quick(p, end, &d);
        if (!behind || (integers && !d.integer)) break;
        if ((*error = put_decimal(r, &d, out, index, r->elements + (index - first)))) break;
        index++;
        p = behind;
        state = AFTER;
        if (*p != ',') break;
        state = NEXT;
        p++;
    }
    if (index > first) r->leaf_depth = r->depth;
    r->count[r->depth - 1] += (int64_t)(index - first);
    r->elements += index - first;
    r->state = state;
    return p;
}

static const char no_truth[] = "a number is expected, 1 and 0 for true and false";

static const char *value_expected(const numbers_reader *r, char c)
{
    if (r->state == START) return "an array of numbers is expected";
    if (c == 'N' || c == 'I')
        return "what is not finite is written as a string: \"NaN\", \"Infinity\" or \"-Infinity\"";
    if (c == 'n') return "null is no number; \"NaN\" stands for one that is missing";
    if (c == 't' || c == 'f') return no_truth;
    if (r->state == FIRST) return "a number, an array or ']' is expected";
    return "a number or an array is expected";
}

struct feed {
    numbers_reader *r;
    const char *p, *const text, *const end;
    /* base: offset of text[0] in the whole text of the array; elements: number of elements before the call */
    const uint64_t base, elements;
    void *const out;
    const size_t room;
    const char *error;
    bool at_token; /* whether the error is reported at the beginning of the token (number or word) that contains p */
    bool full;
};

static inline size_t done_here(const struct feed *f)
{
    return (size_t)(f->r->elements - f->elements);
}

static inline bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/* Returns the index of the unquoted word (such as NaN) that begins with the text `begin`; BARE_WORDS: there is none. */
static int bare_word(const numbers_reader *r, const char *begin)
{
    int w = 0;
    const size_t length = strlen(begin);
    while (w < BARE_WORDS && (strncmp(bare_words[w].text, begin, length) != 0 ||
                              (bare_words[w].truth && r->type != NUMBERS_U8 && r->type != NUMBERS_UNTYPED)))
        w++;
    return r->bare_words ? w : BARE_WORDS;
}

static void begin_bare_word(struct feed *f, const char *begin)
{
    numbers_reader *r = f->r;
    if (is_integer_type(r->type) && !bare_words[bare_word(r, begin)].truth) {
        f->error = no_integer;
        return;
    }
    r->state = BARE_WORD;
    r->word = bare_word(r, begin);
    r->held = (int)strlen(begin);
    f->p++;
}

static void begin_token(struct feed *f, char c)
{
    numbers_reader *r = f->r;
    r->token = f->base + (uint64_t)(f->p - f->text);
    r->held = 0;
    if (c == '"' && is_integer_type(r->type)) {
        f->error = no_integer;
        return;
    }
    if (c != '-' && !is_digit(c) && c != '"') {
        begin_bare_word(f, (const char[]){ c, '\0' });
        return;
    }
    f->p++;
    if (c == '"') {
        r->state = WORD;
        r->word = -1;
        return;
    }
    r->state = c == '-' ? MINUS : c == '0' ? ZERO : INTEGER;
    r->text[r->held++] = c;
}

static inline void before_value(struct feed *f, char c)
{
    numbers_reader *r = f->r;
    if (is_space(c)) {
        f->p++;
    } else if (c == '[') {
        if (!(f->error = check_place(r, true))) open_array(r), f->p++;
    } else if (c == ']' && r->state == FIRST) {
        if (!(f->error = close_array(r))) f->p++;
    } else if (r->state == START ||
               !(is_digit(c) || c == '-' || c == '"' || bare_word(r, (const char[]){ c, '\0' }) < BARE_WORDS)) {
        f->error = value_expected(r, c);
    } else if (!(f->error = check_place(r, false))) {
        const char *first = f->p;
        const size_t done = done_here(f);
        if (done == f->room) {
            f->full = true;
            return;
        }
        if (is_digit(c) || c == '-') f->p = take_run(r, f->p, f->end, f->out, done, f->room - done, &f->error);
        if (f->p == first && !f->error) begin_token(f, c);
    }
}

static void after_value(struct feed *f, char c)
{
    if (c == ',') f->r->state = NEXT, f->p++;
    else if (is_space(c)) f->p++;
    else if (c != ']') f->error = "',' or ']' is expected";
    else if (!(f->error = close_array(f->r))) f->p++;
}

static void in_word(struct feed *f, char c)
{
    numbers_reader *r = f->r;
    for (int w = 0; w < WORDS && r->held == 0; w++)
        if (r->word < 0 && words[w].text[0] == c) r->word = w;
    const char wanted = r->word < 0 ? '\0' : words[r->word].text[r->held];
    if (r->word < 0 || c != (wanted ? wanted : '"')) {
        f->error = no_word;
    } else if (wanted) {
        r->held++;
        f->p++;
    } else if (done_here(f) == f->room) {
        f->full = true;
    } else if ((f->error = put_not_finite(r->type, words[r->word].value, f->out, done_here(f)))) {
        f->at_token = true;
    } else {
        if (!r->fractional) r->fractional = true, r->fraction_element = r->elements;
        count_element(r);
        f->p++;
    }
}

static void in_bare_word(struct feed *f, char c)
{
    numbers_reader *r = f->r;
    const char wanted = bare_words[r->word].text[r->held];
    const double value = bare_words[r->word].value;
    if (wanted) {
        if (c != wanted) {
            f->error = "a word here is NaN, Infinity or -Infinity, and of uint8 and bools true or false";
            return;
        }
        r->held++;
        f->p++;
    } else if (done_here(f) == f->room) {
        f->full = true;
    } else if (bare_words[r->word].truth) {
        if (!r->truths) r->truths = true, r->truth_element = r->elements;
        if (r->type == NUMBERS_U8) (void)put_integer(r->type, false, (uint64_t)value, f->out, done_here(f));
        else put_double(f->out, done_here(f), value);
        count_element(r);
    } else if ((f->error = put_not_finite(r->type, value, f->out, done_here(f)))) {
        f->at_token = true;
    } else {
        if (!r->fractional) r->fractional = true, r->fraction_element = r->elements;
        count_element(r);
    }
}

static inline void in_number(struct feed *f, char c)
{
    numbers_reader *r = f->r;
    struct decimal d;
    const uint8_t next = next_state[r->state][character_of(c)];
    if ((next == POINT || next == E) && is_integer_type(r->type)) {
        f->error = no_integer;
    } else if (next == WRONG && r->state == MINUS && c == 'I' && r->bare_words) {
        begin_bare_word(f, "-I");
    } else if (next == WRONG) {
        f->error = number_errors[r->state];
    } else if (next != COMPLETE && r->held == NUMBERS_CHARS) {
        f->error = "the number is longer than 768 characters";
    } else if (next != COMPLETE) {
        r->text[r->held++] = c;
        r->state = next;
        f->p++;
    } else if (done_here(f) == f->room) {
        f->full = true;
    } else {
        r->text[r->held] = ',';
        /* no error is possible here, because the state machine has checked the text */
        quick(r->text, r->text + r->held + 1, &d);
        if ((f->error = put_decimal(r, &d, f->out, done_here(f), r->elements))) f->at_token = true;
        else count_element(r);
    }
}

numbers_status numbers_read(numbers_reader *r, const char *text, size_t count, void *out, size_t room, size_t *taken,
                            size_t *written)
{
    struct feed f = { r, text, text, text + count, r->offset, r->elements, out, room, r->error, false, false };
    while (f.p < f.end && r->state < DONE && !f.error && !f.full) {
        switch ((enum state)r->state) {
        case START:
        case FIRST:
        case NEXT: before_value(&f, *f.p); break;
        case AFTER: after_value(&f, *f.p); break;
        case WORD: in_word(&f, *f.p); break;
        case BARE_WORD: in_bare_word(&f, *f.p); break;
        default: in_number(&f, *f.p);
        }
    }
    *taken = (size_t)(f.p - text);
    *written = done_here(&f);
    if (f.error) {
        r->error = f.error;
        r->offset = f.at_token ? r->token : f.base + *taken;
        return NUMBERS_BAD;
    }
    r->offset = f.base + *taken;
    return f.full ? NUMBERS_FULL : r->state == DONE ? NUMBERS_DONE : NUMBERS_MORE;
}

numbers_place numbers_stopped(const numbers_reader *r, char token[NUMBERS_CHARS], size_t *length)
{
    const char *taken = r->text;
    size_t held = r->state < NUMBER_STATES || r->state == WORD || r->state == BARE_WORD ? (size_t)r->held : 0,
           quote = 0;
    if (r->state == WORD) {
        token[quote++] = '"';
        taken = r->word < 0 ? "" : words[r->word].text;
    } else if (r->state == BARE_WORD) {
        taken = bare_words[r->word].text;
    }
    memcpy(token + quote, taken, held);
    *length = quote + held;
    if (r->state == AFTER) return NUMBERS_AFTER;
    return r->depth > 0 && r->count[r->depth - 1] == 0 ? NUMBERS_FIRST : NUMBERS_NEXT;
}

bool numbers_convert(numbers_reader *r, const double *values, numbers_type type, void *out, uint64_t *element)
{
    for (uint64_t i = 0; i < r->elements; i++) {
        const char *error;
        double x;
        memcpy(&x, values + i, sizeof x);
        if (type != NUMBERS_U8 && r->truths && r->truth_element == i) error = no_truth;
        else if (is_integer_type(type) && r->fractional && r->fraction_element == i) error = no_integer;
        else if (is_integer_type(type))
            error = put_integer(type, x < 0, fabs(x) < 0x1p53 ? (uint64_t)fabs(x) : UINT64_MAX, out, i);
        else if (!isfinite(x)) error = put_not_finite(type, x, out, i);
        else error = put_floating(type, signbit(x), fabs(x), out, i);
        if (error) {
            r->error = error;
            *element = i;
            return false;
        }
    }
    return true;
}

/* ---- Converting binary numbers to decimal ------------------------------------------------------------------------ */

/* The next three functions return the floor of log10(2^q), log10(3/4 * 2^q) and log2(10^k), for all exponents of
 * float32. */
static int log10_pow2(int q)
{
    return (q * 1262611) >> 22;
}
static int log10_three_quarters_pow2(int q)
{
    return (q * 1262611 - 524031) >> 22;
}
static int log2_pow10(int k)
{
    return (k * 1741647) >> 19;
}

enum { POWER_MIN = -36, POWER_MAX = 45 };

/* Powers of ten 10^k. Each is multiplied by a power of two so that it has 64 bits with the top bit set, and rounded
 * up. */
static const uint64_t powers_of_ten[POWER_MAX - POWER_MIN + 1] = {
    0xAA242499697392D3, 0xD4AD2DBFC3D07788, 0x84EC3C97DA624AB5, 0xA6274BBDD0FADD62, 0xCFB11EAD453994BB, /* from 1e-36 */
    0x81CEB32C4B43FCF5, 0xA2425FF75E14FC32, 0xCAD2F7F5359A3B3F, 0xFD87B5F28300CA0E, 0x9E74D1B791E07E49, /* from 1e-31 */
    0xC612062576589DDB, 0xF79687AED3EEC552, 0x9ABE14CD44753B53, 0xC16D9A0095928A28, 0xF1C90080BAF72CB2, /* from 1e-26 */
    0x971DA05074DA7BEF, 0xBCE5086492111AEB, 0xEC1E4A7DB69561A6, 0x9392EE8E921D5D08, 0xB877AA3236A4B44A, /* from 1e-21 */
    0xE69594BEC44DE15C, 0x901D7CF73AB0ACDA, 0xB424DC35095CD810, 0xE12E13424BB40E14, 0x8CBCCC096F5088CC, /* from 1e-16 */
    0xAFEBFF0BCB24AAFF, 0xDBE6FECEBDEDD5BF, 0x89705F4136B4A598, 0xABCC77118461CEFD, 0xD6BF94D5E57A42BD, /* from 1e-11 */
    0x8637BD05AF6C69B6, 0xA7C5AC471B478424, 0xD1B71758E219652C, 0x83126E978D4FDF3C, 0xA3D70A3D70A3D70B, /* from 1e-6 */
    0xCCCCCCCCCCCCCCCD, 0x8000000000000000, 0xA000000000000000, 0xC800000000000000, 0xFA00000000000000, /* from 1e-1 */
    0x9C40000000000000, 0xC350000000000000, 0xF424000000000000, 0x9896800000000000, 0xBEBC200000000000, /* from 1e4 */
    0xEE6B280000000000, 0x9502F90000000000, 0xBA43B74000000000, 0xE8D4A51000000000, 0x9184E72A00000000, /* from 1e9 */
    0xB5E620F480000000, 0xE35FA931A0000000, 0x8E1BC9BF04000000, 0xB1A2BC2EC5000000, 0xDE0B6B3A76400000, /* from 1e14 */
    0x8AC7230489E80000, 0xAD78EBC5AC620000, 0xD8D726B7177A8000, 0x878678326EAC9000, 0xA968163F0A57B400, /* from 1e19 */
    0xD3C21BCECCEDA100, 0x84595161401484A0, 0xA56FA5B99019A5C8, 0xCECB8F27F4200F3A, 0x813F3978F8940985, /* from 1e24 */
    0xA18F07D736B90BE6, 0xC9F2C9CD04674EDF, 0xFC6F7C4045812297, 0x9DC5ADA82B70B59E, 0xC5371912364CE306, /* from 1e29 */
    0xF684DF56C3E01BC7, 0x9A130B963A6C115D, 0xC097CE7BC90715B4, 0xF0BDC21ABB48DB21, 0x96769950B50D88F5, /* from 1e34 */
    0xBC143FA4E250EB32, 0xEB194F8E1AE525FE, 0x92EFD1B8D0CF37BF, 0xB7ABC627050305AE, 0xE596B7B0C643C71A, /* from 1e39 */
    0x8F7E32CE7BEA5C70, 0xB35DBF821AE4F38C,                                                             /* from 1e44 */
};

/* Returns power * c / 2^64, rounded to odd: the result is truncated, and its lowest bit is set if there was a
 * remainder. Remainders below 2^-31 count as none, because they may come from the rounding of `power`. */
static uint32_t multiply_to_odd(uint64_t power, uint32_t c)
{
    u128 product = (u128)power * c;
    return (uint32_t)(product >> 64) | ((uint32_t)((uint64_t)product >> 32) > 1);
}

/* Finds the shortest decimal s * 10^k that rounds to c * 2^q. If several are equally short, it takes the nearest, or of
 * two equally near ones the even one. Returns s; *k_out becomes k. `narrow_below`: c is a power of two, so the next
 * smaller value is only half as far away as the next larger one. */
static uint32_t shortest(uint32_t c, int q, bool narrow_below, int *k_out)
{
    /* whether a decimal number halfway between c and a neighbour rounds to c, because ties go to even */
    bool even = (c & 1) == 0;
    int k = narrow_below ? log10_three_quarters_pow2(q) : log10_pow2(q);
    int h = q + log2_pow10(-k) + 1;
    uint64_t power = powers_of_ten[-k - POWER_MIN];
    /* `value` is 4 * c * 2^q in units of 10^k. `lower` and `upper` are 4 times the ends of the interval of numbers that
     * round to c * 2^q, in the same units. */
    uint32_t lower = multiply_to_odd(power, (4 * c - 2 + narrow_below) << h) + !even;
    uint32_t value = multiply_to_odd(power, (4 * c) << h);
    uint32_t upper = multiply_to_odd(power, (4 * c + 2) << h) - !even;

    /* If a multiple of 10^(k + 1) rounds to c * 2^q, that multiple is the result, because it has one digit fewer than a
     * multiple of 10^k. The code has no branch here, because the processor could not predict the branch. */
    uint32_t s = value / 4, tenth = s / 10, middle = 4 * s + 2;
    bool tenth_inside = lower <= 40 * tenth, next_tenth_inside = 40 * tenth + 40 <= upper;
    bool inside = lower <= 4 * s, next_inside = 4 * s + 4 <= upper;
    bool nearer_above = (value > middle) | ((value == middle) & s);
    uint32_t with_tenth = tenth + next_tenth_inside;
    uint32_t without = s + (inside != next_inside ? next_inside : nearer_above);
    bool shorter = (s >= 10) & (tenth_inside != next_tenth_inside);
    *k_out = k + shorter;
    return shorter ? with_tenth : without;
}

/* Writes eight characters, although the caller may need fewer. */
static void put_eight(char *text, uint64_t eight)
{
    memcpy(text, &eight, 8);
}

static size_t put_text(char *text, const char *from)
{
    size_t count = strlen(from);
    memcpy(text, from, count);
    return count;
}

/* Returns the digits of n < 10^8 as eight bytes, the first digit in the lowest byte. */
static uint64_t eight_digits(uint32_t n)
{
    uint64_t v = n / 10000 | (uint64_t)(n % 10000) << 32;
    /* x * 5243 >> 19 is x / 100 for every x below 10^4 */
    uint64_t hundreds = (v * 5243 >> 19) & UINT64_C(0x0000007F0000007F);
    v = hundreds | (v - hundreds * 100) << 16;
    /* x * 103 >> 10 is x / 10 for every x below 100 */
    uint64_t tenths = (v * 103 >> 10) & UINT64_C(0x000F000F000F000F);
    return (tenths | (v - tenths * 10) << 8) + UINT64_C(0x3030303030303030);
}

static const uint32_t integer_tens[] = { 1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000 };

static int count_digits(uint32_t n)
{
    /* bits * log10(2), where 1233 / 2^12 stands for log10(2); this is the number of decimal digits of n, or one less */
    int guess = (32 - __builtin_clz(n | 1)) * 1233 >> 12;
    return guess + (n >= integer_tens[guess]) + (n == 0);
}

static size_t write_integer(uint32_t n, char *text)
{
    int count = count_digits(n), more = count > 8 ? count - 8 : 0;
    uint32_t top = n / 100000000;
    if (more == 2) *text++ = (char)('0' + top / 10);
    if (more >= 1) *text++ = (char)('0' + top % 10);
    put_eight(text, eight_digits(n % 100000000) >> (more ? 0 : 64 - 8 * count));
    return (size_t)count;
}

/* Writes the decimal text of s * 10^k, where 0 < s < 10^9, and returns its length. */
static size_t write_decimal(uint32_t s, int k, char *text)
{
    /* numbers from 0.0001 to 999999999 are written without an exponent */
    enum { ZEROS_AFTER_POINT = 3, INTEGER_DIGITS = 9 };
    /* the number s * 10^k equals 0.DIGITS * 10^point, where DIGITS are the digits of s */
    int count = count_digits(s), point = count + k;
    s *= integer_tens[9 - count]; /* appends zeros, so that s has nine digits */
    char first = (char)('0' + s / 100000000);
    uint64_t others = eight_digits(s % 100000000), zeros = UINT64_C(0x3030303030303030);
    /* from here on, `count` is the number of digits without trailing zeros */
    count = others == zeros ? 1 : 9 - __builtin_clzll(others ^ zeros) / 8;

    char *t = text;
    /* the number is written with an exponent, such as 1.2345e-7 */
    if (point > INTEGER_DIGITS || point < -ZEROS_AFTER_POINT) {
        t[0] = first;
        t[1] = '.';
        put_eight(t + 2, others);
        t += count > 1 ? count + 1 : 1;
        t[0] = 'e';
        t[1] = '-';
        t += point > 0 ? 1 : 2;
        t += write_integer((uint32_t)abs(point - 1), t);
    } else if (point <= 0) { /* the number is below 1, such as 0.00012345 */
        memcpy(t, "0.000000", 8);
        t += 2 - point;
        t[0] = first;
        put_eight(t + 1, others);
        t += count;
    } else {
        t[0] = first;
        put_eight(t + 1, others);
        /* the number is an integer, such as 123000; its zeros are already written */
        if (point >= count) return (size_t)point;
        t[point] = '.';
        /* the number has digits on both sides of the point, such as 12.345 */
        put_eight(t + point + 1, others >> 8 * (point - 1));
        t += count + 1;
    }
    return (size_t)(t - text);
}

static size_t format_floating(const struct format *f, uint32_t code, char *text)
{
    bool negative = code & f->sign;
    uint32_t magnitude_code = code & ~f->sign;
    if (magnitude_code > f->largest) {
        if (magnitude_code != f->infinity || f->infinity == 0) return put_text(text, "\"NaN\"");
        return put_text(text, negative ? "\"-Infinity\"" : "\"Infinity\"");
    }
    if (magnitude_code == 0) return put_text(text, negative ? "-0.0" : "0");
    uint32_t fraction = magnitude_code & ((1u << f->fraction_bits) - 1);
    int exponent = (int)(magnitude_code >> f->fraction_bits);
    uint32_t c = exponent ? fraction | 1u << f->fraction_bits : fraction;
    int q = f->min_exponent - f->fraction_bits + (exponent ? exponent - 1 : 0);
    *text = '-';
    text += negative;
    /* the value is an integer, and neighbouring values of the dtype differ by at most 1, so no shorter text reads back
     * as this value */
    if (q <= 0 && q >= -f->fraction_bits && (c & ((1u << -q) - 1)) == 0)
        return negative + write_decimal(c >> -q, 0, text);
    int k;
    uint32_t s = shortest(c, q, fraction == 0 && exponent > 1, &k);
    return negative + write_decimal(s, k, text);
}

size_t numbers_format(attn_dtype dtype, const void *value, char *text)
{
    uint32_t code = 0;
    switch (element_bytes[dtype]) { /* `value` may be unaligned */
    case 4: memcpy(&code, value, 4); break;
    case 2: memcpy(&code, value, 2); break;
    default: memcpy(&code, value, 1); break;
    }
    if (dtype == ATTN_U8) return write_integer(code, text);
    if (dtype != ATTN_I32) return format_floating(&formats[dtype], code, text);
    bool negative = code >> 31;
    if (negative) *text++ = '-';
    return negative + write_integer(negative ? -code : code, text);
}
