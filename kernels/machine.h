/* machine.h: how many cores, how much memory and how many threads this process may use. The server's defaults and the
 * device "cpu" both use these numbers, so that they keep the same limits. */
#ifndef ATTN_MACHINE_H
#define ATTN_MACHINE_H

#include <stdint.h>

/* What affinity mask and cgroup quota (rounded up) allow, and the smaller of physical memory and the
 * narrowest memory limit of our cgroups up to the root (version 2, or 1). Memory is 4 GiB where the system
 * does not tell. */
struct attn_machine {
    int cores;
    int64_t memory_bytes;
    int64_t threads; /* the least pids limit of our cgroups, which all their processes share; INT64_MAX: none */
};

/* Fills *machine. `root` is put before /proc and /sys paths; it is "" outside tests. */
void attn_machine_look(const char *root, struct attn_machine *machine);

#endif
