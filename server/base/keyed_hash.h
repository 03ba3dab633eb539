/* keyed_hash.h: hashes of names that clients choose, and of ids. (A client can keep the ids that suit it.)
 *
 * A client that knows a table's hash could fill one bucket with names, and every lookup there would walk them. The hash
 * therefore has a secret key, which the process draws: no client can tell which names share a bucket. The owner of a
 * name is hashed with it, so equal names of two callers have different hashes.
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

/* Draws a secret. False: the system gave no random bytes. */
bool hash_key_draw(struct hash_key *key);

/* SipHash-2-4 of the eight bytes of `owner` (the least significant first) and the `count` bytes behind them. */
uint64_t keyed_hash(const struct hash_key *key, uint64_t owner, const void *bytes, size_t count);

/* The hash of a text, without its NUL. The pointer `owner` stands for its owner and is not followed. */
uint64_t keyed_hash_name(const struct hash_key *key, const void *owner, const char *name);

#endif
