/* page_lists.h: the list of a cache's pages, in the order of the cache's positions, and the number of pages that the
 * cache shares with other caches.
 *
 *   list:   | block of 1024 page numbers | block of 1024 | block of 300 |
 *   fork:   |  the same block            | own block of 700 |
 *
 * A fork has the same pages as the cache that it was made from. The cache and the fork share the full blocks, which
 * never change from then on. The page numbers of the last block are copied. Making a fork, counting its shared pages
 * and deleting it therefore touch a thousand blocks at most, and not a million pages.
 *
 * A page has a reference for each block that contains its number (pages.h). A block has a reference for each list that
 * contains the block. A page is shared if its block is shared, or if more than one block contains its number. The
 * counts are updated at each change.
 *
 * The functions are not thread-safe: call them with the lock of table.c held. */
#ifndef PAGE_LISTS_H
#define PAGE_LISTS_H

#include "server/caches/pages.h"

/* Number of pages in a full block of a page list. The longest possible list has PAGES_GRANULES (1024 * 1024) pages, so
 * it has 1024 blocks. */
enum { PAGE_BLOCK = 1024 };

struct page_block {
    int32_t references;
    int32_t shared; /* how many of this block's page numbers are also in other blocks */
    int32_t count, room;
    int32_t *pages;
};

struct page_list {
    int64_t count;
    /* the blocks of page numbers: first the full ones, then at most one partly filled, then empty ones */
    struct page_block **blocks;
    /* number of blocks in the array, and number of pointers that the array has room for */
    int64_t made, room;
    /* memory that page_list_may_cut() has reserved for a cut inside a shared block; NULL: none */
    struct page_block *spare;
};

#define PAGE_LIST_EMPTY \
    {                   \
        0               \
    }

static inline int32_t page_list_at(const struct page_list *list, int64_t index)
{
    return list->blocks[index / PAGE_BLOCK]->pages[index % PAGE_BLOCK];
}

void page_list_copy(const struct page_list *list, int64_t count, int32_t *to);

/* Returns how many pages of the list are also in other lists. */
int64_t page_list_shared(const struct page_list *list);

/* Allocates memory for a list of `count` pages, so that page_list_put() need not allocate. Returns false when out of
 * memory. */
bool page_list_reserve(struct page_list *list, int64_t count);
/* Appends to the list a page that pages_take() has returned. Call page_list_reserve() first. */
void page_list_put(struct page_list *list, struct pages *pages, int32_t page);
/* Removes the last page of the list. The last block of page numbers must not be shared with other lists. Returns true
 * if the page is free now. The list's memory stays reserved. */
bool page_list_drop_last(struct page_list *list, struct pages *pages, int32_t run);

/* Makes the empty list `to` a list of the first `count` pages of `from`. `full` is the number of these pages that have
 * no free positions: all, or all but the last. Neither list will ever replace such a page. When out of memory, changes
 * nothing and returns false. */
bool page_list_fork(struct page_list *to, const struct page_list *from, struct pages *pages, int64_t count,
                    int64_t full);

/* Allocates the memory that a later page_list_cut() to `count` pages needs. Returns false when out of memory. Between
 * the two calls, pages may be added to the list. The list may also be forked, but only if the fork shares fewer than
 * `count` full pages. */
bool page_list_may_cut(struct page_list *list, int64_t count);
/* Keeps the first `count` pages of the list and drops all later pages. Call page_list_may_cut() first, unless `count`
 * is 0. Returns the number of pages that became free. */
int64_t page_list_cut(struct page_list *list, struct pages *pages, int32_t run, int64_t count);

void page_list_clear(struct page_list *list);

#endif
