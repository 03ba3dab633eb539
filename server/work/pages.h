/* pages.h: who has which part of one large piece of memory: the pages of KV caches on one device.
 *
 *   memory:  | granule | granule | granule | granule | granule | granule | ...
 *            |<-------- a page -------->|<-------- a page -------->|  free
 *
 * A page is a run of granules, as many as its cache needs, and is called by the number of its first: the address is
 * base + number * granule. So caches of all shapes share one memory, and a kernel finds a page by one multiplication,
 * whatever its size is (page_table of kernels/attention.h; the stride of its first axis is the granule).
 *
 * A page is counted by references: caches that were forked share it. Nothing here touches the memory itself, which may
 * be a GPU's. Not thread-safe: caches.c has the lock.
 *
 * Source: PagedAttention (arXiv:2309.06180). */
#ifndef PAGES_H
#define PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pages;

/* Of `bytes` from `base` on, whole granules of them. NULL when out of memory. */
struct pages *pages_new(void *base, size_t bytes, size_t granule);
void pages_free(struct pages *pages); /* NULL is fine */

/* How large a granule of so much memory is: a power of two from 4 KiB on, so that there are PAGES_GRANULES at most. */
size_t pages_granule_for(size_t bytes);

char *pages_base(const struct pages *pages);
size_t pages_granule(const struct pages *pages);
size_t pages_bytes(const struct pages *pages); /* all of them */
size_t pages_used(const struct pages *pages);  /* bytes that pages hold, each counted once */
int64_t pages_count(const struct pages *pages);
int64_t pages_shared(const struct pages *pages); /* with more than one reference */

/* How many granules a page of so many bytes takes; 0: more than there are at all. */
int32_t pages_run(const struct pages *pages, size_t bytes);

/* A page of `run` granules with one reference; -1: there is no room. Its memory holds what its last owner left. */
int32_t pages_take(struct pages *pages, int32_t run);
void pages_hold(struct pages *pages, int32_t page);
bool pages_drop(struct pages *pages, int32_t page, int32_t run); /* true: it was the last reference, the page is free */
bool pages_is_shared(const struct pages *pages, int32_t page);

#endif
