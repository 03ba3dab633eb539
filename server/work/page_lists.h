/* page_lists.h: which pages a cache has, in the order of its positions; and how many of them other caches have, too.
 *
 *   list:   | block of 1024 page numbers | block of 1024 | block of 300 |
 *   fork:   |  the same block            | own block of 700 |
 *
 * A fork has the pages of what it was made from. Whole blocks are shared by lists and never change from then on; the
 * numbers of the last block are copied. So a fork, a look at what is shared, and the end of a fork touch a thousand
 * blocks at most, and not a million pages.
 *
 * A page counts its references by the blocks that have its number (pages.h), and a block counts the lists that have it.
 * A page is shared where its block is, or where another block has it; both are counted when they change.
 *
 * Not thread-safe: caches.c has the lock. */
#ifndef PAGE_LISTS_H
#define PAGE_LISTS_H

#include "server/work/pages.h"

/* Page numbers of a block: the longest list, PAGES_GRANULES pages, has as many blocks as a block has numbers. */
enum { PAGE_BLOCK = 1024 };

struct page_block {
    int32_t references; /* lists that have it */
    int32_t shared;     /* of its pages, those that other blocks have, too */
    int32_t count, room;
    int32_t *pages;
};

struct page_list {
    int64_t count;              /* pages */
    struct page_block **blocks; /* all but the last one that has pages are full; behind that one they are empty */
    int64_t made, room;         /* blocks, and pointers to them */
    struct page_block *spare;   /* for a cut in a shared block; NULL: none is expected */
};

/* No page, and no memory. */
#define PAGE_LIST_EMPTY \
    {                   \
        0               \
    }

static inline int32_t page_list_at(const struct page_list *list, int64_t index)
{
    return list->blocks[index / PAGE_BLOCK]->pages[index % PAGE_BLOCK];
}

/* The first `count` numbers, at `to`. */
void page_list_copy(const struct page_list *list, int64_t count, int32_t *to);

/* How many of its pages other lists have, too. */
int64_t page_list_shared(const struct page_list *list);

/* Memory for `count` pages in all, so that page_list_put() does not need any; false: there is none. */
bool page_list_reserve(struct page_list *list, int64_t count);
/* A page behind the last one, which pages_take() gave. There must be room. */
void page_list_put(struct page_list *list, struct pages *pages, int32_t page);
/* The last page goes, which must not be in a shared block; true: it is free now. Memory that is reserved stays. */
bool page_list_drop_last(struct page_list *list, struct pages *pages, int32_t run);

/* Makes `to`, which is empty, a list of the first `count` pages of `from`. The first `full` of them, which are all or
 * all but the last, are full of positions: neither list will replace these.
 * False: out of memory, and nothing has changed. */
bool page_list_fork(struct page_list *to, const struct page_list *from, struct pages *pages, int64_t count,
                    int64_t full);

/* Memory for page_list_cut() to `count`; false: there is none. What is put and forked in between does no harm, as long
 * as the forks have fewer than `count` pages that are full. */
bool page_list_may_cut(struct page_list *list, int64_t count);
/* The first `count` pages stay; to 0, or after page_list_may_cut(). Returns how many pages are free now. */
int64_t page_list_cut(struct page_list *list, struct pages *pages, int32_t run, int64_t count);

/* Its memory; it must be empty. */
void page_list_clear(struct page_list *list);

#endif
