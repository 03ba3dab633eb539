/* pages.h: who has which part of one large piece of memory: the pages of KV caches on one device.
 *
 *   memory:  | granule | granule | granule | granule | granule | granule | ...
 *            |<-------- a page -------->|<-------- a page -------->|  free
 *
 * A page is a run of granules, as many as its cache needs, and is called by the number of its first: the address is
 * base + number * granule. So caches of all shapes share one memory, and a kernel finds a page by one multiplication,
 * whatever its size is (page_table of kernels/attention.h; the stride of its first axis is the granule).
 *
 * A page is counted by references: caches that were forked share it (page_lists.h). Nothing here touches the memory
 * itself, which may be a GPU's. Not thread-safe: caches.c has the lock.
 *
 * Source: PagedAttention (arXiv:2309.06180). */
#ifndef PAGES_H
#define PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pages;

/* A pool of `bytes`, in whole granules. NULL when out of memory. */
struct pages *pages_new(size_t bytes, size_t granule);
void pages_free(struct pages *pages); /* NULL is fine */

/* How large a granule of so much memory is: a power of two from 4 KiB on, so that there are PAGES_GRANULES at most. */
size_t pages_granule_for(size_t bytes);

size_t pages_granule(const struct pages *pages);
size_t pages_bytes(const struct pages *pages); /* all of them */
size_t pages_used(const struct pages *pages);  /* bytes that pages hold, each counted once */
int64_t pages_count(const struct pages *pages);
int64_t pages_shared(const struct pages *pages); /* those with several references, and those of pages_share_more() */

/* How many granules a page of so many bytes takes; 0: more than there are at all. */
int32_t pages_run(const struct pages *pages, size_t bytes);

/* A page of `run` granules with one reference, which has no owner; -1: there is no room. Its memory holds what its last
 * owner left. */
int32_t pages_take(struct pages *pages, int32_t run);
/* Makes `owner` the owner of the page's only reference. */
void pages_own(struct pages *pages, int32_t page, const void *owner);
/* Adds a reference, which is `owner`'s. An owner has at most one reference to a page. */
void pages_hold(struct pages *pages, int32_t page, const void *owner);
/* Drops the reference of `owner`. True: it was the last one, and the page is free. */
bool pages_drop(struct pages *pages, int32_t page, int32_t run, const void *owner);
bool pages_is_shared(const struct pages *pages, int32_t page);
/* The owner of the page's only reference; NULL: it has none, or there are several references. */
void *pages_owner(const struct pages *pages, int32_t page);
/* Counts `more` pages as shared that have one reference, because several lists share the block that has them. */
void pages_share_more(struct pages *pages, int64_t more);

#endif
