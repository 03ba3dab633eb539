/* machine.h: how many cores, how much memory and how many threads this process may use, and the clock of a core. The
 * server's defaults and the device "cpu" both use these numbers, so that they keep the same limits. */
#ifndef ATTN_MACHINE_H
#define ATTN_MACHINE_H

#include <stdint.h>

/* `cores`: number of cores that the affinity mask and the cgroup quota (rounded up) allow. `memory_bytes`: the smaller
 * of two numbers. One is the physical memory, or 4 GiB if the system does not report it. The other is the smallest
 * memory limit of the process's cgroups up to the root (version 2 or 1). */
struct attn_machine {
    int cores;
    int64_t memory_bytes;
    /* highest clock of the first core in Hz, or the present clock if the system does not report the highest; 0: the
     * system reports neither */
    double hertz;
    /* the smallest limit that a cgroup of this process sets (pids): the number of threads that all processes of the
     * cgroup may have together; INT64_MAX: there is no limit */
    int64_t threads;
};

/* Fills *machine with what the system reports. `root` is put before paths in /proc and /sys; it is "" except in
 * tests. */
void attn_machine_look(const char *root, struct attn_machine *machine);

#endif
