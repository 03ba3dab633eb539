/* keyed_hash.h: hashes over what clients choose: names, and ids of which a client may keep those that suit it.
 *
 * A client that knows a table's hash fills one bucket with names, and every lookup there walks them. The hash is
 * therefore under a secret that the process draws, so nobody outside can tell which names meet. The owner of the name
 * is hashed with it: equal names of two callers have nothing in common.
 *
 * Source: SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). */
#ifndef KEYED_HASH_H
#define KEYED_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One table's secret. */
struct hash_key {
    uint64_t k0, k1;
};

/* Draws a secret; false: the system gave no random bytes. */
bool hash_key_draw(struct hash_key *key);

/* SipHash-2-4 of the eight bytes of `owner` (the least significant first) and the `count` bytes behind them. */
uint64_t keyed_hash(const struct hash_key *key, uint64_t owner, const void *bytes, size_t count);

/* The same of a text, without its NUL, that belongs to whom the pointer stands for. */
uint64_t keyed_hash_name(const struct hash_key *key, const void *owner, const char *name);

#endif
