/* machine.c: how many cores and how much memory this process may use. See machine.h. */
#include "machine.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool read_line(const char *path, char *line, size_t capacity)
{
    FILE *f = fopen(path, "re");
    bool ok = f != NULL && fgets(line, (int)capacity, f) != NULL;
    if (f != NULL) fclose(f);
    return ok;
}

/* cgroup v2, one directory: "max 100000" or "150000 100000". */
static void limit_by_v2(const char *directory, struct attn_machine *machine)
{
    char path[640], line[128];
    long long quota, period, bytes;
    snprintf(path, sizeof path, "%.600s/cpu.max", directory);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2 && quota > 0 &&
        period > 0) {
        const long long cores = (quota + period - 1) / period;
        if (cores < machine->cores) machine->cores = (int)cores;
    }
    snprintf(path, sizeof path, "%.600s/memory.max", directory);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld", &bytes) == 1 && bytes > 0 &&
        bytes < machine->memory_bytes)
        machine->memory_bytes = bytes;
}

static void limit_by_v1(const char *root, struct attn_machine *machine)
{
    char path[640], line[128];
    long long quota, period, bytes;
    snprintf(path, sizeof path, "%.500s/sys/fs/cgroup/cpu/cpu.cfs_quota_us", root);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld", &quota) == 1 && quota > 0) {
        snprintf(path, sizeof path, "%.500s/sys/fs/cgroup/cpu/cpu.cfs_period_us", root);
        if (read_line(path, line, sizeof line) && sscanf(line, "%lld", &period) == 1 && period > 0) {
            const long long cores = (quota + period - 1) / period;
            if (cores < machine->cores) machine->cores = (int)cores;
        }
    }
    snprintf(path, sizeof path, "%.500s/sys/fs/cgroup/memory/memory.limit_in_bytes", root);
    if (read_line(path, line, sizeof line) && sscanf(line, "%lld", &bytes) == 1 && bytes > 0 &&
        bytes < machine->memory_bytes)
        machine->memory_bytes = bytes;
}

void attn_machine_look(const char *root, struct attn_machine *machine)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) machine->cores = CPU_COUNT(&set);
    else machine->cores = (int)sysconf(_SC_NPROCESSORS_ONLN); /* more processors than a cpu_set_t holds */
    if (machine->cores < 1) machine->cores = 1;

    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    machine->memory_bytes = pages > 0 && page > 0 ? (int64_t)pages * page : (INT64_C(4) << 30);

    /* Each cgroup from ours up to the root may set a limit. In a container with a cgroup namespace ours is "/". */
    char path[512], line[512];
    snprintf(path, sizeof path, "%.256s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (f != NULL) {
        while (fgets(line, sizeof line, f) != NULL) {
            if (strncmp(line, "0::/", 4) != 0) continue;
            line[strcspn(line, "\n")] = '\0';
            char directory[600];
            const int base = snprintf(directory, sizeof directory, "%.64s/sys/fs/cgroup", root);
            snprintf(directory + base, sizeof directory - (size_t)base, "%s", line + 3);
            for (char *end = directory + strlen(directory); end > directory + base;) {
                limit_by_v2(directory, machine);
                *end = '\0';
                end = strrchr(directory + base, '/');
                if (end == NULL) break;
                *end = '\0';
            }
            limit_by_v2(directory, machine);
        }
        fclose(f);
    }
    limit_by_v1(root, machine);
}
