/* deadlines.h: finds the earliest of many deadlines, which lets one uv_timer serve all of them. It is a binary heap of
 * pointers to deadlines that are embedded in other structs. Only the loop's thread uses it. */
#ifndef DEADLINES_H
#define DEADLINES_H

#include <stdbool.h>
#include <stdint.h>

/* Embed this in a struct. `place` is 0 outside a heap, else the index in it plus one; start from zeroed memory. */
struct deadline {
    int64_t at_ns;
    int place;
};

struct deadlines {
    struct deadline **heap;
    int count, capacity;
};

bool deadlines_add(struct deadlines *all, struct deadline *deadline); /* returns false when out of memory */
/* Does nothing if the deadline is in no heap. */
void deadlines_remove(struct deadlines *all, struct deadline *deadline);
struct deadline *deadlines_next(const struct deadlines *all); /* the earliest deadline; NULL if the heap is empty */
void deadlines_clear(struct deadlines *all); /* frees the heap, but not the structs that have the deadlines */

#endif
