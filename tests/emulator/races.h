/* races.h: finds pairs of accesses to shared memory that nothing orders, whatever order they happened to have.
 *
 * The kernels are compiled with calls before every load and store (-fsanitize=thread, of which the compiler's half
 * is used; the calls end in emulator.cc). Two accesses of one address by different threads, one of them a store,
 * must have a barrier between:
 *
 *   lanes of a warp    __syncwarp or one of the others. (A shuffle or a product orders no memory.)
 *   warps of a block   __syncthreads, bar.sync and bar.arrive of both, or a condition that was waited for (an
 *                      mbarrier), which is taken to order everything before it
 *
 * Each warp counts epochs, one more at each barrier, and knows the last epoch of every other warp that a barrier
 * has put before it (vector clocks; FastTrack, Flanagan and Freund 2009). Of each two bytes the last store and the
 * last loads of two warps are kept. Accesses of a single byte are not looked at (neighbours in those two bytes may
 * be two threads'), nor are volatile ones. */
#ifndef ATTN_EMULATOR_RACES_H
#define ATTN_EMULATOR_RACES_H

#include <stddef.h>
#include <stdint.h>

namespace emu {

enum { THREADS = 1024, WARPS = THREADS / 32, SHARED_MOST = 227 << 10 };

struct clocks {
    uint32_t epoch[WARPS];
};

/* A thread, shifted, and its warp's epoch; 0 means that nobody has accessed the bytes. */
struct access_record {
    uint32_t stored, loaded[2];
};

struct race_watch {
    clocks now;          /* the present epoch of each warp */
    clocks after[WARPS]; /* for each warp: the last epoch of every warp that a barrier has ordered before it */
    access_record *records;
};

void watch_begin(race_watch &w);          /* a block begins: forget earlier accesses */
void watch_warp(race_watch &w, int warp); /* __syncwarp */
void watch_barrier(race_watch &w, const bool *warps,
                   clocks *arrived); /* these warps continue together, after the epochs in `arrived` */
void watch_arrive(race_watch &w, int warp, clocks *arrived); /* the warp arrives and goes on without waiting */
void watch_everything(race_watch &w, int warp);
/* Records an access by `thread` of `bytes` at offset `at` of shared memory. Returns the other thread of a race, or
 * -1. */
int watch_access(race_watch &w, int thread, size_t at, size_t bytes, bool store);

} // namespace emu

#endif
