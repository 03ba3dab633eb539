/* deadlines.h: finds the earliest of many deadlines, so that one uv_timer can serve them all. A deadline is a member of
 * another struct, and the binary heap holds pointers to the deadlines. Only the main thread uses the heap. */
#ifndef DEADLINES_H
#define DEADLINES_H

#include <stdbool.h>
#include <stdint.h>

/* A deadline, to be embedded in a struct. `place` is 0 while the deadline is in no heap, otherwise its index in the
 * heap plus one. Start from zeroed memory. */
struct deadline {
    int64_t at_ns;
    int place;
};

struct deadlines {
    struct deadline **heap;
    int count, capacity;
};

bool deadlines_add(struct deadlines *all, struct deadline *deadline);
/* Removes a deadline. Does nothing if it is in no heap. */
void deadlines_remove(struct deadlines *all, struct deadline *deadline);
/* returns the earliest deadline; NULL if the heap is empty */
struct deadline *deadlines_next(const struct deadlines *all);
/* frees the heap, but not the structs that contain the deadlines */
void deadlines_clear(struct deadlines *all);

#endif
