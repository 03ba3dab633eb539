/* races.h: finds races: pairs of accesses to shared memory that nothing orders. It does not matter in which order the
 * two accesses happened in this run.
 *
 * The kernels are compiled with -fsanitize=thread, so that a function is called before every load and store;
 * emulator.cc defines these functions instead of ThreadSanitizer. If different threads access one address and at
 * least one access is a store, a barrier must lie between the two:
 *
 *   lanes of a warp    __syncwarp or a barrier of the block. (A shuffle or a product orders no memory.)
 *   warps of a block   __syncthreads, bar.sync or bar.arrive in both warps, or a wait for a condition (such as the
 *                      phase of an mbarrier); the check assumes that such a wait orders everything before it
 *
 * The method is vector clocks (FastTrack, Flanagan and Freund 2009). A warp's epoch is the number of barriers that it
 * has passed. For each pair of warps, the check records up to which epoch of one warp its accesses are ordered before
 * the next accesses of the other warp. For each two bytes of shared memory, the check records the last store and the
 * last loads of two warps. Accesses of a single byte are not checked, because the two bytes may belong to two threads.
 * Volatile accesses are not checked either. */
#ifndef ATTN_EMULATOR_RACES_H
#define ATTN_EMULATOR_RACES_H

#include <stddef.h>
#include <stdint.h>

namespace emu {

enum { THREADS = 1024, WARPS = THREADS / 32, SHARED_MOST = 227 << 10 };

struct clocks {
    uint32_t epoch[WARPS];
};

/* One record for each two adjacent bytes of shared memory. `stored` is the last store. loaded[0] is the last load since
 * that store, and loaded[1] the last load by another warp since that store. Each value holds the number of the thread,
 * and the epoch of its warp (how many barriers the warp had passed) at the time of the access; 0: no access. */
struct access_record {
    uint32_t stored, loaded[2];
};

struct race_watch {
    clocks now; /* the present epoch of each warp: how many barriers the warp has passed */
    /* after[w].epoch[x] is a count of barriers that warp x has passed. All accesses of warp x up to this count are
     * ordered before the next accesses of warp w. */
    clocks after[WARPS];
    access_record *records;
};

/* begins the check of a thread block, and forgets the accesses of earlier thread blocks */
void watch_begin(race_watch &w);
void watch_warp(race_watch &w, int warp); /* __syncwarp */
/* Records that the warps in `warps` have passed a barrier. An epoch is the number of barriers that a warp has passed.
 * `arrived` has an epoch for each warp. The warp's accesses up to that epoch are now ordered before all later accesses
 * of the warps in `warps`. */
void watch_barrier(race_watch &w, const bool *warps, clocks *arrived);
/* Records that the warp has arrived at a barrier and goes on without waiting (bar.arrive). */
void watch_arrive(race_watch &w, int warp, clocks *arrived);
void watch_everything(race_watch &w, int warp);
/* Records an access by `thread` of `bytes` bytes at offset `at` of shared memory. Returns the thread with which the
 * access has a race; -1: there is no race. */
int watch_access(race_watch &w, int thread, size_t at, size_t bytes, bool store);

} // namespace emu

#endif
