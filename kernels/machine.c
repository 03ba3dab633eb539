/* machine.c: how many cores, how much memory and how many threads this process may use.
 *
 * /proc/self/cgroup has a line for each hierarchy of control groups: "0::/a/b" belongs to version 2, "4:memory:/a/b" to
 * a hierarchy of version 1 with its controllers. Every group from this process's own up to the root may set a limit,
 * and the least limit counts.
 *
 * The path starts at the root of the process's cgroup namespace. A container with version 1 may have no such namespace.
 * The path is then that of the host, and its folders do not exist in the container. But the root that is mounted in the
 * container is the process's own group, so the files in this root give the limits. */
#include "machine.h"

#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* the largest number of lines of /proc/cpuinfo that are read; the text about the first core has only 28 lines */
enum { CPUINFO_LINES = 64 };

/* Returns the first line of a file, but at most its first 127 characters. Returns "" if there is no file. */
static const char *read_line(const char *directory, const char *name, char line[128])
{
    char path[PATH_MAX];
    line[0] = '\0';
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) return line;
    FILE *f = fopen(path, "re");
    if (f != NULL && fgets(line, 128, f) == NULL) line[0] = '\0';
    if (f != NULL) fclose(f);
    return line;
}

/* Reads the number in a file. Returns `fallback` if there is no file, or if the file has something other than a
 * positive number, such as "max". */
static int64_t read_number(const char *directory, const char *name, int64_t fallback)
{
    char line[128];
    long long number;
    return sscanf(read_line(directory, name, line), "%lld", &number) == 1 && number > 0 ? number : fallback;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void limit_cores(struct attn_machine *machine, int64_t quota, int64_t period)
{
    if (quota <= 0 || period <= 0) return;
    machine->cores = (int)least(machine->cores, quota / period + (quota % period > 0));
}

/* read_cpu_v1() and the functions after it read the limits in one cgroup's folder. The file of a limit that is not set
 * has "max" (version 2), or -1 or a number larger than any memory (version 1). */
static void read_cpu_v1(const char *directory, struct attn_machine *machine)
{
    limit_cores(machine, read_number(directory, "cpu.cfs_quota_us", 0), read_number(directory, "cpu.cfs_period_us", 0));
}

static void read_memory_v1(const char *directory, struct attn_machine *machine)
{
    machine->memory_bytes = least(machine->memory_bytes, read_number(directory, "memory.limit_in_bytes", INT64_MAX));
}

static void read_pids(const char *directory, struct attn_machine *machine)
{
    machine->threads = least(machine->threads, read_number(directory, "pids.max", INT64_MAX));
}

static void read_v2(const char *directory, struct attn_machine *machine)
{
    char line[128];
    long long quota, period;
    if (sscanf(read_line(directory, "cpu.max", line), "%lld %lld", &quota, &period) == 2)
        limit_cores(machine, quota, period);
    machine->memory_bytes = least(machine->memory_bytes, read_number(directory, "memory.max", INT64_MAX));
    read_pids(directory, machine);
}

/* The cgroup hierarchies: controller, mount point, and the function that reads a folder. Version 2 has one hierarchy
 * for all controllers; it is mounted as "unified" where other hierarchies are of version 1. */
static const struct {
    const char *controller, *mounted;
    void (*read)(const char *directory, struct attn_machine *machine);
} hierarchies[] = {
    { "", "", read_v2 },
    { "", "/unified", read_v2 },
    { "cpu", "/cpu", read_cpu_v1 },
    { "memory", "/memory", read_memory_v1 },
    { "pids", "/pids", read_pids },
};

/* Returns whether `word` is in a comma-separated list of controllers. An empty word means cgroup version 2, whose list
 * of controllers is empty too. */
static bool has_word(const char *list, size_t length, const char *word)
{
    const size_t size = strlen(word);
    if (size == 0) return length == 0;
    for (size_t at = 0; at + size <= length; at++)
        if (memcmp(list + at, word, size) == 0 && (at == 0 || list[at - 1] == ',') &&
            (at + size == length || list[at + size] == ','))
            return true;
    return false;
}

/* Reads the limits of every cgroup from base + path up to base itself, because each of them may set a limit. */
static void walk_up(const char *base, const char *path, void (*read)(const char *, struct attn_machine *),
                    struct attn_machine *machine)
{
    char directory[PATH_MAX];
    const size_t root = strlen(base);
    /* A path with "/.." means that the process's cgroup lies outside its cgroup namespace. Only the namespace's root is
     * then readable. */
    if (strstr(path, "/..") != NULL) path = "";
    if (snprintf(directory, sizeof directory, "%s%s", base, path) >= (int)sizeof directory) return;
    for (;;) {
        read(directory, machine);
        char *const end = strrchr(directory + root, '/');
        if (end == NULL) break;
        *end = '\0';
    }
}

/* Reads a line of /proc/self/cgroup, which has a number, controllers and a path. If a known controller is among them,
 * the limits of that cgroup and of all cgroups above it are read. */
static void look_at_line(const char *root, char *line, struct attn_machine *machine)
{
    line[strcspn(line, "\n")] = '\0';
    const char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
    if (path == NULL) return;
    list++;
    for (size_t i = 0; i < sizeof hierarchies / sizeof *hierarchies; i++) {
        char base[PATH_MAX];
        if (!has_word(list, (size_t)(path - list), hierarchies[i].controller)) continue;
        if (snprintf(base, sizeof base, "%s/sys/fs/cgroup%s", root, hierarchies[i].mounted) < (int)sizeof base)
            walk_up(base, path + 1, hierarchies[i].read, machine);
    }
}

/* Reads the highest clock of a core from cpufreq. A virtual machine has no cpufreq; on x86 the clock then comes from
 * /proc/cpuinfo. */
static double look_at_clock(const char *root)
{
    char path[PATH_MAX], line[256];
    double megahertz = 0;
    snprintf(path, sizeof path, "%.256s/sys/devices/system/cpu/cpu0/cpufreq", root);
    const int64_t kilohertz = read_number(path, "cpuinfo_max_freq", 0);
    if (kilohertz > 0) return (double)kilohertz * 1e3;
    snprintf(path, sizeof path, "%.256s/proc/cpuinfo", root);
    FILE *f = fopen(path, "re");
    for (int n = 0; f && n < CPUINFO_LINES && megahertz == 0 && fgets(line, sizeof line, f);) {
        n += strchr(line, '\n') != NULL;
        if (sscanf(line, "cpu MHz : %lf", &megahertz) != 1) megahertz = 0;
    }
    if (f) fclose(f);
    return megahertz > 0 && megahertz < 1e5 ? megahertz * 1e6 : 0;
}

void attn_machine_look(const char *root, struct attn_machine *machine)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) machine->cores = CPU_COUNT(&set);
    /* sched_getaffinity() fails if the machine has more processors than a cpu_set_t holds */
    else machine->cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (machine->cores < 1) machine->cores = 1;

    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    machine->memory_bytes = pages > 0 && page > 0 ? (int64_t)pages * page : (INT64_C(4) << 30);
    machine->threads = INT64_MAX;
    machine->hertz = look_at_clock(root);

    char path[PATH_MAX], *line = NULL;
    size_t capacity = 0;
    snprintf(path, sizeof path, "%.256s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    if (f == NULL) return;
    while (getline(&line, &capacity, f) > 0) look_at_line(root, line, machine);
    free(line);
    fclose(f);
}
