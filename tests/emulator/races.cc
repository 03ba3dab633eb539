/* races.cc: finds races in shared memory; races.h describes how. */
#include "races.h"

#include <algorithm>
#include <string.h>
#include <sys/mman.h>

namespace emu {

enum { EPOCH_BITS = 22, EPOCH_MOST = (1 << EPOCH_BITS) - 1, GRANULES = SHARED_MOST / 2 };

void watch_begin(race_watch &w)
{
    const size_t bytes = GRANULES * sizeof *w.records;
    if (!w.records)
        w.records = (access_record *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*std::max_element(w.now.epoch, w.now.epoch + WARPS) > EPOCH_MOST / 2) {
        memset(w.records, 0, bytes);
        w.now = clocks();
    }
    /* the previous thread block has ended, so no warp of the next block can have a race with its accesses */
    for (int warp = 0; warp < WARPS; warp++) w.after[warp] = w.now;
    for (int warp = 0; warp < WARPS; warp++) w.now.epoch[warp]++;
}

void watch_warp(race_watch &w, int warp)
{
    w.now.epoch[warp]++;
}

void watch_arrive(race_watch &w, int warp, clocks *arrived)
{
    for (int v = 0; v < WARPS; v++) arrived->epoch[v] = std::max(arrived->epoch[v], w.after[warp].epoch[v]);
    arrived->epoch[warp] = w.now.epoch[warp]++;
}

void watch_barrier(race_watch &w, const bool *warps, clocks *arrived)
{
    for (int warp = 0; warp < WARPS; warp++)
        if (warps[warp]) watch_arrive(w, warp, arrived);
    for (int warp = 0; warp < WARPS; warp++)
        if (warps[warp]) w.after[warp] = *arrived;
    *arrived = clocks();
}

void watch_everything(race_watch &w, int warp)
{
    w.after[warp] = w.now;
    w.now.epoch[warp]++;
}

int watch_access(race_watch &w, int thread, size_t at, size_t bytes, bool store)
{
    const int warp = thread / 32;
    const uint32_t epoch = w.now.epoch[warp], mine = (uint32_t)thread << EPOCH_BITS | epoch;
    const clocks &after = w.after[warp];
    int other = -1;
    uint32_t looked_at = 0; /* the last record that was checked (often the next is equal); 0: none */
    const auto look_at = [&](uint32_t record) {
        if (record == looked_at) return;
        looked_at = record;
        const int by = (int)(record >> EPOCH_BITS);
        const uint32_t then = record & EPOCH_MOST;
        if (by != thread && (by / 32 == warp ? then == epoch : then > after.epoch[by / 32])) other = by;
    };
    for (size_t n = at / 2; n < (at + bytes) / 2; n++) {
        access_record &r = w.records[n];
        look_at(r.stored);
        if (store) {
            look_at(r.loaded[0]);
            look_at(r.loaded[1]);
            r = { mine, { 0, 0 } };
        } else if (r.loaded[0] != mine) {
            if (r.loaded[0] >> (EPOCH_BITS + 5) != (uint32_t)warp) r.loaded[1] = r.loaded[0];
            r.loaded[0] = mine;
        }
    }
    return other;
}

} // namespace emu
