/* keyed_hash.h: hashes of ids, and of names that clients choose: SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast
 * short-input PRF", 2012).
 *
 * The secret random key prevents clients from choosing names that all fall into one bucket of a hash table. The owner
 * of a name (the client's account) is hashed together with the name, so that equal names of two owners have different
 * hashes. */
#ifndef KEYED_HASH_H
#define KEYED_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
