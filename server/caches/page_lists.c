/* page_lists.c: lists of pages, in blocks of page numbers. See page_lists.h.
 *
 * Invariants
 * 1. In a block that several lists share, every position of every page is in use, so its page numbers never change.
 * 2. For each page with one reference, pages.c has a pointer to the block that contains the page. The pointer is NULL
 * if the page belongs to a running cache transaction.
 * 3. pages_shared() counts each shared page once: pages.c counts the shared pages in several blocks, and this file
 * counts those in one block that several lists share. */
#include "server/caches/page_lists.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"

static_assert(PAGES_GRANULES / PAGE_BLOCK <= PAGE_BLOCK, "a list of blocks would be longer than a block");

static int64_t blocks_for(int64_t count)
{
    return (count + PAGE_BLOCK - 1) / PAGE_BLOCK;
}

void page_list_copy(const struct page_list *list, int64_t count, int32_t *to)
{
    for (int64_t done = 0; done < count; done += PAGE_BLOCK) {
        const int64_t some = count - done < PAGE_BLOCK ? count - done : PAGE_BLOCK;
        memcpy(to + done, list->blocks[done / PAGE_BLOCK]->pages, (size_t)some * sizeof *to);
    }
}

int64_t page_list_shared(const struct page_list *list)
{
    int64_t shared = 0;
    for (int64_t i = 0; i < blocks_for(list->count); i++) {
        const struct page_block *const block = list->blocks[i];
        shared += block->references > 1 ? block->count : block->shared;
    }
    return shared;
}

/* ---- Blocks of page numbers -------------------------------------------------------------------------------------- */

static void block_free(struct page_block *block)
{
    if (block == NULL) return;
    free(block->pages);
    free(block);
}

/* Makes room in a block for `count` page numbers. A block starts small, because most caches have few pages. */
static bool block_reserve(struct page_block *block, int64_t count)
{
    if (count <= block->room) return true;
    const int64_t more = count + count / 2 + 8, room = more < PAGE_BLOCK ? more : PAGE_BLOCK;
    int32_t *const pages = realloc(block->pages, (size_t)room * sizeof *pages);
    if (pages == NULL) return false;
    block->pages = pages;
    block->room = (int32_t)room;
    return true;
}

static struct page_block *block_new(int64_t count)
{
    struct page_block *const block = calloc(1, sizeof *block);
    if (block == NULL) return NULL;
    block->references = 1;
    if (block_reserve(block, count)) return block;
    block_free(block);
    return NULL;
}

/* Updates the number of shared pages when several lists begin to share the block (`sign` 1), or no longer share it
 * (-1). */
static void count_block(struct pages *pages, const struct page_block *block, int sign)
{
    pages_share_more(pages, sign * (block->count - block->shared));
}

/* Updates the numbers of shared pages when one page of this block begins to be in a second block too (`sign` is 1), or
 * is in no other block any more (`sign` is -1). */
static void count_page(struct pages *pages, struct page_block *block, int sign)
{
    block->shared += sign;
    if (block->references > 1) pages_share_more(pages, -sign);
}

static void block_hold(struct page_block *block, struct pages *pages, int32_t page)
{
    struct page_block *const alone = pages_owner(pages, page);
    pages_hold(pages, page, block);
    if (alone) count_page(pages, alone, 1);
    block->pages[block->count++] = page;
    block->shared++;
}

static bool block_drop_last(struct page_block *block, struct pages *pages, int32_t run)
{
    const int32_t page = block->pages[--block->count];
    const bool was_shared = pages_is_shared(pages, page), is_free = pages_drop(pages, page, run, block);
    struct page_block *const alone = pages_owner(pages, page);
    assert(block->references == 1);
    block->shared -= was_shared;
    if (alone) count_page(pages, alone, -1);
    return is_free;
}

static int64_t block_let_go(struct page_block *block, struct pages *pages, int32_t run)
{
    int64_t count = 0;
    if (block->references > 1) {
        if (block->references == 2) count_block(pages, block, -1);
        block->references--;
        return 0;
    }
    while (block->count > 0) count += block_drop_last(block, pages, run);
    block_free(block);
    return count;
}

/* ---- Lists of pages ---------------------------------------------------------------------------------------------- */

static bool reserve_pointers(struct page_list *list, int64_t count)
{
    if (count <= list->room) return true;
    const int64_t room = count + count / 2;
    struct page_block **const blocks = realloc(list->blocks, (size_t)room * sizeof *blocks);
    if (blocks == NULL) return false;
    list->blocks = blocks;
    list->room = room;
    return true;
}

bool page_list_reserve(struct page_list *list, int64_t count)
{
    if (!reserve_pointers(list, blocks_for(count))) return false;
    for (int64_t i = list->count / PAGE_BLOCK; i < blocks_for(count); i++) {
        const int64_t left = count - i * PAGE_BLOCK, has = left < PAGE_BLOCK ? left : PAGE_BLOCK;
        if (i < list->made) {
            if (!block_reserve(list->blocks[i], has)) return false;
            continue;
        }
        list->blocks[i] = block_new(has);
        if (list->blocks[i] == NULL) return false;
        list->made++;
    }
    return true;
}

void page_list_put(struct page_list *list, struct pages *pages, int32_t page)
{
    struct page_block *const block = list->blocks[list->count++ / PAGE_BLOCK];
    assert(block->references == 1 && block->count < block->room);
    block->pages[block->count++] = page;
    pages_own(pages, page, block);
}

bool page_list_drop_last(struct page_list *list, struct pages *pages, int32_t run)
{
    return block_drop_last(list->blocks[--list->count / PAGE_BLOCK], pages, run);
}

bool page_list_fork(struct page_list *to, const struct page_list *from, struct pages *pages, int64_t count,
                    int64_t full)
{
    /* the new list shares the full blocks, and has at most one block of its own for the pages after them */
    const int64_t whole = full / PAGE_BLOCK, own = blocks_for(count) - whole;
    assert(to->made == 0 && full <= count && count - full <= 1 && count <= from->count && own <= 1);
    struct page_block *const last = own ? block_new(count % PAGE_BLOCK ? count % PAGE_BLOCK : PAGE_BLOCK) : NULL;
    if ((own && last == NULL) || !reserve_pointers(to, whole + own)) {
        block_free(last);
        return false;
    }
    for (int64_t i = 0; i < whole; i++) {
        to->blocks[i] = from->blocks[i];
        if (++to->blocks[i]->references == 2) count_block(pages, to->blocks[i], 1);
    }
    for (int64_t i = whole * PAGE_BLOCK; i < count; i++) block_hold(last, pages, page_list_at(from, i));
    if (own) to->blocks[whole] = last;
    to->count = count;
    to->made = whole + own;
    return true;
}

static struct page_block *cut_block(const struct page_list *list, int64_t count)
{
    return count % PAGE_BLOCK != 0 && count < list->count ? list->blocks[count / PAGE_BLOCK] : NULL;
}

bool page_list_may_cut(struct page_list *list, int64_t count)
{
    const struct page_block *const through = cut_block(list, count);
    if (through == NULL || through->references == 1 || list->spare) return true;
    list->spare = block_new(PAGE_BLOCK);
    return list->spare != NULL;
}

/* Replaces a shared block by a copy that belongs to this list alone. The copy has the first `count` page numbers of the
 * shared block. */
static void part(struct page_list *list, struct pages *pages, int64_t index, int64_t count)
{
    struct page_block *const block = list->blocks[index], *const own = list->spare;
    assert(own != NULL && block->references > 1 && own->count == 0);
    for (int64_t i = 0; i < count; i++) block_hold(own, pages, block->pages[i]);
    (void)block_let_go(block, pages, 0);
    list->blocks[index] = own;
    list->spare = NULL;
}

int64_t page_list_cut(struct page_list *list, struct pages *pages, int32_t run, int64_t count)
{
    struct page_block *const through = cut_block(list, count);
    int64_t freed = 0;
    if (count < list->count) {
        while (list->made > blocks_for(count)) freed += block_let_go(list->blocks[--list->made], pages, run);
        if (through && through->references > 1) part(list, pages, count / PAGE_BLOCK, count % PAGE_BLOCK);
        else
            while (through && through->count > count % PAGE_BLOCK) freed += block_drop_last(through, pages, run);
        list->count = count;
    }
    block_free(list->spare);
    list->spare = NULL;
    return freed;
}

void page_list_clear(struct page_list *list)
{
    assert(list->count == 0);
    while (list->made > 0) block_free(list->blocks[--list->made]);
    free(list->blocks);
    block_free(list->spare);
    *list = (struct page_list)PAGE_LIST_EMPTY;
}
