/* pages.h: allocates the pages of KV caches in one large piece of memory of one device.
 *
 *   memory:  | granule | granule | granule | granule | granule | granule | ...
 *            |<-------- a page -------->|<-------- a page -------->|  free
 *
 * A page is a run of successive granules. How many they are depends on the shape of the page's cache. The number of a
 * page is the number of its first granule, and its address is base + number * granule. Caches of all shapes therefore
 * share one memory, and a kernel finds a page of any size by one multiplication (page_table of kernels/attention.h; the
 * stride of its first axis is the granule).
 *
 * Pages have reference counts, because forked caches share them (page_lists.h). No function here touches the memory of
 * the pages, which may be a GPU's memory. The functions are not thread-safe: call them with the lock of table.c held.
 *
 * Source: PagedAttention (arXiv:2309.06180). */
#ifndef PAGES_H
#define PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pages;

/* Makes a pool of `bytes` bytes, rounded down to whole granules. Returns NULL when out of memory. */
struct pages *pages_new(size_t bytes, size_t granule);
void pages_free(struct pages *pages);

/* Returns the granule size for a pool of `bytes` bytes: a power of two, at least 4 KiB, with at most PAGES_GRANULES
 * granules in the pool. */
size_t pages_granule_for(size_t bytes);

size_t pages_granule(const struct pages *pages);
size_t pages_bytes(const struct pages *pages);
/* bytes of the pool that are in pages; a page counts once, however many caches share it */
size_t pages_used(const struct pages *pages);
int64_t pages_count(const struct pages *pages);
/* number of shared pages: those with several references, plus the sum of `more` over all calls of pages_share_more() */
int64_t pages_shared(const struct pages *pages);

/* Returns the number of granules that a page of `bytes` bytes takes; 0: more than the pool has. */
int32_t pages_run(const struct pages *pages, size_t bytes);

/* Allocates a page of `run` granules. It has one reference and no owner yet. Returns the page's number, or -1 if there
 * is no room. The page's memory still holds the data of its last owner. */
int32_t pages_take(struct pages *pages, int32_t run);
/* Sets the owner of a page that has one reference. The owner is the block of page numbers (page_lists.h) that contains
 * the page's number. */
void pages_own(struct pages *pages, int32_t page, const void *owner);
/* Adds a reference for `owner`, which may have at most one reference to a page. */
void pages_hold(struct pages *pages, int32_t page, const void *owner);
/* Drops the reference of `owner`. Returns true if it was the page's last reference; the page is free then. */
bool pages_drop(struct pages *pages, int32_t page, int32_t run, const void *owner);
bool pages_is_shared(const struct pages *pages, int32_t page);
/* Returns the owner of a page that has one reference; NULL: it has no owner, or several references. */
void *pages_owner(const struct pages *pages, int32_t page);
/* Adds `more` to the number of shared pages. page_lists.c calls this for pages with one reference that are in one block
 * of page numbers, but in several lists that share this block. */
void pages_share_more(struct pages *pages, int64_t more);

#endif
