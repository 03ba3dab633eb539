/* machine.h: how many cores, how much memory and how many threads this process may use. The server's defaults and the
 * device "cpu" both use these numbers, so that they keep the same limits. */
#ifndef ATTN_MACHINE_H
#define ATTN_MACHINE_H

#include <stdint.h>

/* Affinity mask and cgroup quota (rounded up); physical memory and the narrowest limit of the cgroups from ours up to
 * the root (version 2, or 1). 4 GiB where nothing says how much memory there is. */
struct attn_machine {
    int cores;
    int64_t memory_bytes;
    int64_t threads; /* the least pids limit of our cgroups, for all their processes together; INT64_MAX: none */
};

/* `root` is put before /proc and /sys paths; "" outside tests. */
void attn_machine_look(const char *root, struct attn_machine *machine);

#endif
