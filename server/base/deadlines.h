/* deadlines.h: which of many deadlines comes next. A binary heap of pointers into the things that have them, so
 * that one uv_timer serves all. Used by one thread (the loop). */
#ifndef DEADLINES_H
#define DEADLINES_H

#include <stdbool.h>
#include <stdint.h>

/* Embedded. `place` is 0 while it is in no heap, else its index there plus one: zero-initialised memory is right. */
struct deadline {
    int64_t at_ns;
    int place;
};

struct deadlines {
    struct deadline **heap;
    int count, capacity;
};

bool deadlines_add(struct deadlines *all, struct deadline *deadline);    /* false when out of memory */
void deadlines_remove(struct deadlines *all, struct deadline *deadline); /* fine when it is not in */
struct deadline *deadlines_next(const struct deadlines *all);            /* the earliest; NULL when empty */
void deadlines_clear(struct deadlines *all);                             /* frees the heap, not the things */

#endif
