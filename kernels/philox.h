/* philox.h: which probabilities dropout drops, on host and device.
 *
 * Whether P_ij of head h of batch row b is kept depends only on (seed, b, h, i, j), and not on the order in which a
 * kernel visits elements. Forward and backward, every tile size, every backend and every mask therefore drop the same
 * elements, and a backward needs only the seed.
 *
 *   key      the 64-bit seed, low word first
 *   counter  (j div 8, i, b * H + h, 0). In a packed problem i and j are indices in the sequence, and b is the index of
 *            the sequence. A part of a problem uses the indices of the whole problem (attn_dropout_head()).
 *   halves   the four result words have eight halves of 16 bits, the low half of word 0 first. Element j has half
 *            j mod 8.
 *   keep     element j is kept if its half >= round(dropout_p * 65536), so dropout_p counts in steps of 2^-16. Kept
 *            probabilities are divided by 1 - dropout_p.
 *
 * Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox4x32 with ten rounds. Its
 * known answers are in tests/unit/kernels/test_philox.c. */
#ifndef ATTN_PHILOX_H
#define ATTN_PHILOX_H

#include "dtype.h"

/* The constants of Philox. In each round, words 0 and 2 are multiplied by their factors, and each half of the key grows
 * by its step. */
#define ATTN_PHILOX_FACTOR0 0xd2511f53u
#define ATTN_PHILOX_FACTOR2 0xcd9e8d57u
#define ATTN_PHILOX_STEP0   0x9e3779b9u
#define ATTN_PHILOX_STEP1   0xbb67ae85u

typedef struct attn_philox {
    uint32_t word[4];
} attn_philox;

ATTN_HD attn_philox attn_philox4x32_10(attn_philox counter, uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)ATTN_PHILOX_FACTOR0 * counter.word[0];
        const uint64_t p1 = (uint64_t)ATTN_PHILOX_FACTOR2 * counter.word[2];
        const uint32_t c1 = counter.word[1], c3 = counter.word[3];
        counter.word[0] = (uint32_t)(p1 >> 32) ^ c1 ^ key0;
        counter.word[1] = (uint32_t)p1;
        counter.word[2] = (uint32_t)(p0 >> 32) ^ c3 ^ key1;
        counter.word[3] = (uint32_t)p0;
        key0 += ATTN_PHILOX_STEP0;
        key1 += ATTN_PHILOX_STEP1;
    }
    return counter;
}

/* Draws the random words for keys 8 * `group` to 8 * `group` + 7. head_index is b * H + h (attn_dropout_head()). */
ATTN_HD attn_philox attn_dropout_words(uint64_t seed, int64_t head_index, int64_t i, int64_t group)
{
    attn_philox counter;
    counter.word[0] = (uint32_t)group;
    counter.word[1] = (uint32_t)i;
    counter.word[2] = (uint32_t)head_index;
    counter.word[3] = 0;
    return attn_philox4x32_10(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

ATTN_HD uint32_t attn_dropout_half(attn_philox words, int half)
{
    return words.word[half >> 1] >> (16 * (half & 1)) & 0xffffu;
}

/* Returns the threshold of dropout, 0 to 65536. An element is dropped if its 16 random bits are below the threshold. */
ATTN_HD uint32_t attn_dropout_threshold(double dropout_p)
{
    return (uint32_t)(dropout_p * 65536.0 + 0.5);
}

/* Returns whether dropout keeps element (i, j) of a head. Vector code does not call this function, but decides for a
 * group of eight elements at a time. */
ATTN_HD bool attn_dropout_keep(uint64_t seed, int64_t head_index, int64_t i, int64_t j, uint32_t threshold)
{
    return attn_dropout_half(attn_dropout_words(seed, head_index, i, j >> 3), (int)(j & 7)) >= threshold;
}

#endif
