/* digits.h: numbers as text without printf, for what is written once a request: an answer's Server-Timing, the
 * access log line. printf took longer over such a line than base64 over a small tensor. */
#ifndef DIGITS_H
#define DIGITS_H

#include <stdint.h>

enum { DIGITS_MAX = 24 }; /* bytes that either function writes at most */

/* x in decimal, at least `least` digits, with a point before the last three where `thousandths`. Returns the end;
 * no NUL. */
static inline char *digits_write(char *at, uint64_t x, int least, int thousandths)
{
    char digits[DIGITS_MAX];
    int count = 0;
    do digits[count++] = (char)('0' + x % 10);
    while ((x /= 10) > 0 || count < least);
    while (count > 0) {
        *at++ = digits[--count];
        if (thousandths && count == 3) *at++ = '.';
    }
    return at;
}

/* 1234 */
static inline char *digits_put(char *at, uint64_t x)
{
    return digits_write(at, x, 1, 0);
}

/* Nanoseconds as milliseconds: 12.345; nothing is negative. */
static inline char *digits_put_ms(char *at, int64_t ns)
{
    return digits_write(at, ns > 0 ? (uint64_t)ns / 1000 : 0, 4, 1);
}

#endif
