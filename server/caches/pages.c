/* pages.c: allocates pages of KV caches. A page is a run of granules (units of memory). This file keeps a bit for each
 * granule, and searches for free granules from where the last search ended.
 *
 * If all caches have one shape, the granules where a search begins are nearly always free. The longest search, over all
 * PAGES_GRANULES, takes a millisecond. */
#include "server/caches/pages.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"

enum { WORD = 64 };

struct pages {
    size_t granule;
    int64_t granules, used, count,
        /* granules: number of all granules. used: number of granules that are in pages. count: number of all pages.
         * shared: number of shared pages, as pages_shared() counts them. */
        shared;
    int64_t next;
    uint64_t *taken;
    int32_t *references; /* [granule]: number of references to the page that begins at this granule */
    /* [granule]: XOR of the addresses of all owners of the page that begins at this granule. If only one owner is left,
     * this is its address. */
    uintptr_t *owners;
};

size_t pages_granule_for(size_t bytes)
{
    size_t granule = PAGES_GRANULE_BYTES;
    while (bytes / granule > PAGES_GRANULES) granule *= 2;
    return granule;
}

struct pages *pages_new(size_t bytes, size_t granule)
{
    struct pages *pages = calloc(1, sizeof *pages);
    if (pages == NULL) return NULL;
    pages->granule = granule;
    pages->granules = (int64_t)(bytes / granule);
    pages->taken = calloc((size_t)pages->granules / WORD + 1, sizeof *pages->taken);
    pages->references = calloc((size_t)pages->granules + 1, sizeof *pages->references);
    pages->owners = calloc((size_t)pages->granules + 1, sizeof *pages->owners);
    if (pages->taken == NULL || pages->references == NULL || pages->owners == NULL) {
        pages_free(pages);
        return NULL;
    }
    return pages;
}

void pages_free(struct pages *pages)
{
    if (pages == NULL) return;
    free(pages->taken);
    free(pages->references);
    free(pages->owners);
    free(pages);
}

size_t pages_granule(const struct pages *pages)
{
    return pages->granule;
}

size_t pages_bytes(const struct pages *pages)
{
    return (size_t)pages->granules * pages->granule;
}

size_t pages_used(const struct pages *pages)
{
    return (size_t)pages->used * pages->granule;
}

int64_t pages_count(const struct pages *pages)
{
    return pages->count;
}

int64_t pages_shared(const struct pages *pages)
{
    return pages->shared;
}

int32_t pages_run(const struct pages *pages, size_t bytes)
{
    const size_t run = bytes / pages->granule + (bytes % pages->granule != 0);
    return run <= (size_t)pages->granules ? (int32_t)run : 0;
}

static bool is_taken(const struct pages *pages, int64_t at)
{
    return pages->taken[at / WORD] >> (at % WORD) & 1;
}

static void mark(struct pages *pages, int64_t from, int64_t run, bool taken)
{
    for (int64_t at = from; at < from + run; at++) {
        const uint64_t bit = UINT64_C(1) << (at % WORD);
        assert(is_taken(pages, at) != taken);
        if (taken) pages->taken[at / WORD] |= bit;
        else pages->taken[at / WORD] &= ~bit;
    }
}

static int64_t search(const struct pages *pages, int64_t from, int64_t to, int64_t run)
{
    int64_t begin = from;
    for (int64_t at = from; at < to;) {
        if (pages->taken[at / WORD] == UINT64_MAX) begin = at = (at / WORD + 1) * WORD;
        else if (is_taken(pages, at)) begin = ++at;
        else if (++at - begin == run) return begin;
    }
    return -1;
}

int32_t pages_take(struct pages *pages, int32_t run)
{
    if (run <= 0 || pages->granules - pages->used < run) return -1;
    int64_t at = search(pages, pages->next, pages->granules, run);
    if (at < 0) at = search(pages, 0, pages->granules, run);
    if (at < 0) return -1;
    mark(pages, at, run, true);
    pages->next = at + run;
    pages->used += run;
    pages->count++;
    pages->references[at] = 1;
    pages->owners[at] = 0;
    return (int32_t)at;
}

void pages_own(struct pages *pages, int32_t page, const void *owner)
{
    assert(pages->references[page] == 1 && pages->owners[page] == 0);
    pages->owners[page] = (uintptr_t)owner;
}

void *pages_owner(const struct pages *pages, int32_t page)
{
    return pages->references[page] == 1 ? (void *)pages->owners[page] : NULL;
}

void pages_hold(struct pages *pages, int32_t page, const void *owner)
{
    assert(pages->references[page] > 0);
    pages->owners[page] ^= (uintptr_t)owner;
    if (++pages->references[page] == 2) pages->shared++;
}

bool pages_drop(struct pages *pages, int32_t page, int32_t run, const void *owner)
{
    assert(pages->references[page] > 0 && pages->used >= run);
    pages->owners[page] ^= (uintptr_t)owner;
    if (--pages->references[page] == 1) pages->shared--;
    if (pages->references[page] > 0) return false;
    assert(pages->owners[page] == 0);
    mark(pages, page, run, false);
    pages->used -= run;
    pages->count--;
    return true;
}

bool pages_is_shared(const struct pages *pages, int32_t page)
{
    return pages->references[page] > 1;
}

void pages_share_more(struct pages *pages, int64_t more)
{
    pages->shared += more;
    assert(pages->shared >= 0);
}
