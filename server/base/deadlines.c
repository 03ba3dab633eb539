/* deadlines.c: a binary heap of deadlines. Invariant: heap[i]->place == i + 1, and no child is earlier than its
 * parent. */
#include "server/base/deadlines.h"

#include <assert.h>
#include <stdlib.h>

static void put(struct deadlines *all, int index, struct deadline *deadline)
{
    all->heap[index] = deadline;
    deadline->place = index + 1;
}

static void sift_up(struct deadlines *all, int index, struct deadline *deadline)
{
    while (index > 0 && all->heap[(index - 1) / 2]->at_ns > deadline->at_ns) {
        put(all, index, all->heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    put(all, index, deadline);
}

static void sift_down(struct deadlines *all, int index, struct deadline *deadline)
{
    for (int child; (child = 2 * index + 1) < all->count; index = child) {
        if (child + 1 < all->count && all->heap[child + 1]->at_ns < all->heap[child]->at_ns) child++;
        if (all->heap[child]->at_ns >= deadline->at_ns) break;
        put(all, index, all->heap[child]);
    }
    put(all, index, deadline);
}

bool deadlines_add(struct deadlines *all, struct deadline *deadline)
{
    assert(deadline->place == 0);
    if (all->count == all->capacity) {
        const int capacity = all->capacity ? 2 * all->capacity : 64;
        struct deadline **heap = realloc(all->heap, (size_t)capacity * sizeof *heap);
        if (heap == NULL) return false;
        all->heap = heap;
        all->capacity = capacity;
    }
    sift_up(all, all->count++, deadline);
    return true;
}

void deadlines_remove(struct deadlines *all, struct deadline *deadline)
{
    if (deadline->place == 0) return;
    const int index = deadline->place - 1;
    assert(index < all->count && all->heap[index] == deadline);
    struct deadline *last = all->heap[--all->count];
    deadline->place = 0;
    if (last == deadline) return;
    if (index > 0 && all->heap[(index - 1) / 2]->at_ns > last->at_ns) sift_up(all, index, last);
    else sift_down(all, index, last);
}

struct deadline *deadlines_next(const struct deadlines *all)
{
    return all->count ? all->heap[0] : NULL;
}

void deadlines_clear(struct deadlines *all)
{
    free(all->heap);
    *all = (struct deadlines){ 0 };
}
