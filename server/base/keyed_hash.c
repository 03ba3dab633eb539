/* keyed_hash.c: SipHash-2-4. */
#include "server/base/keyed_hash.h"

#include <string.h>
#include <sys/random.h>

enum { WORD = 8 };

struct state {
    uint64_t v0, v1, v2, v3;
};

static uint64_t rotated(uint64_t x, int bits)
{
    return x << bits | x >> (64 - bits);
}

/* One SipRound, the mixing step of the SipHash paper. */
static void mix(struct state *s)
{
    s->v0 += s->v1, s->v2 += s->v3;
    s->v1 = rotated(s->v1, 13) ^ s->v0;
    s->v3 = rotated(s->v3, 16) ^ s->v2;
    s->v0 = rotated(s->v0, 32);
    s->v2 += s->v1, s->v0 += s->v3;
    s->v1 = rotated(s->v1, 17) ^ s->v2;
    s->v3 = rotated(s->v3, 21) ^ s->v0;
    s->v2 = rotated(s->v2, 32);
}

static void take_word(struct state *s, uint64_t word)
{
    s->v3 ^= word;
    for (int i = 0; i < 2; i++) mix(s);
    s->v0 ^= word;
}

/* Reads `count` bytes (at most WORD) as a number, the least significant byte first. */
static uint64_t word_at(const unsigned char *bytes, size_t count)
{
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) word |= (uint64_t)bytes[i] << 8 * i;
    return word;
}

bool keyed_hash_draw(struct hash_key *key)
{
    return getrandom(key, sizeof *key, 0) == (ssize_t)sizeof *key;
}

uint64_t keyed_hash(const struct hash_key *key, uint64_t owner, const void *bytes, size_t count)
{
    const unsigned char *at = bytes;
    struct state s = { key->k0 ^ UINT64_C(0x736f6d6570736575), key->k1 ^ UINT64_C(0x646f72616e646f6d),
                       key->k0 ^ UINT64_C(0x6c7967656e657261), key->k1 ^ UINT64_C(0x7465646279746573) };
    take_word(&s, owner);
    size_t left = count;
    for (; left >= WORD; at += WORD, left -= WORD) take_word(&s, word_at(at, WORD));
    take_word(&s, word_at(at, left) | (uint64_t)(WORD + count) << 56);
    s.v2 ^= 0xff;
    for (int i = 0; i < 4; i++) mix(&s);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

uint64_t keyed_hash_name(const struct hash_key *key, const void *owner, const char *name)
{
    return keyed_hash(key, (uint64_t)(uintptr_t)owner, name, strlen(name));
}
