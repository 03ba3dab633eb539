/* keyed_hash.h: hashes of ids, and of names that clients choose.
 *
 * If a client knew a table's hash function, it could choose names that all fall into one bucket, and every lookup would
 * have to search all these names. The hash therefore uses a secret random key, so a client cannot tell which names
 * share a bucket. The owner of a name (the client's account) is hashed together with the name, so that equal names of
 * two owners have different hashes.
 *
 * Source: SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). */
#ifndef KEYED_HASH_H
#define KEYED_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The secret key of one hash table. */
struct hash_key {
    uint64_t k0, k1;
};

/* Draws a random key. Returns false if the system has no random bytes. */
bool keyed_hash_draw(struct hash_key *key);

/* Returns SipHash-2-4 of `owner` (as eight bytes, the least significant first) followed by the `count` bytes. */
uint64_t keyed_hash(const struct hash_key *key, uint64_t owner, const void *bytes, size_t count);

/* Returns the hash of a text without its NUL. `owner` is hashed as a number and never dereferenced. */
uint64_t keyed_hash_name(const struct hash_key *key, const void *owner, const char *name);

#endif
