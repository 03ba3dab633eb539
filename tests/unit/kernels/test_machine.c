/* test_machine.c: tests of how many cores and how much memory this process may use. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/attention.h"
#include "kernels/machine.h"

static void write_file(const char *root, const char *path, const char *text)
{
    char full[4096], command[4200];
    snprintf(full, sizeof full, "%s%s", root, path);
    snprintf(command, sizeof command, "mkdir -p $(dirname '%s')", full);
    assert_int_equal(system(command), 0);
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_cores_and_memory_are_those_the_cgroup_allows(void **state)
{
    (void)state;
    struct attn_machine whole, m;
    char root[] = "/tmp/test_machine_XXXXXX", command[64];
    attn_machine_look("", &whole);
    assert_true(whole.cores >= 1 && whole.memory_bytes > 0);
    assert_non_null(mkdtemp(root));

    /* cgroup version 2: the smallest limit on the path from the group to the root counts. */
    write_file(root, "/proc/self/cgroup", "0::/a/b\n");
    write_file(root, "/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    write_file(root, "/sys/fs/cgroup/a/cpu.max", "50000 100000\n");
    write_file(root, "/sys/fs/cgroup/a/b/memory.max", "134217728\n");
    write_file(root, "/sys/fs/cgroup/a/memory.max", "max\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.cores, 1);
    assert_int_equal(m.memory_bytes, 134217728);

    write_file(root, "/proc/self/cgroup", "0::/\n"); /* in a container with its own cgroup namespace, the process is
                                                      * in the root group */
    write_file(root, "/sys/fs/cgroup/memory.max", "268435456\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 268435456);

    write_file(root, "/proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/x\n"); /* cgroup version 1: each controller
                                                                               * has its own line and hierarchy */
    write_file(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    write_file(root, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    write_file(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.cores, whole.cores);
    assert_int_equal(m.memory_bytes, 1048576);

    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

/* Makes a folder that stands for the root of the file system. */
static void make_root(char root[32])
{
    strcpy(root, "/tmp/test_machine_XXXXXX");
    assert_non_null(mkdtemp(root));
}

static void remove_root(const char *root)
{
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

static void test_a_slice_of_version_1_without_a_namespace_is_seen_with_all_groups_above_it(void **state)
{
    (void)state;
    struct attn_machine m;
    char root[32];
    make_root(root);
    write_file(root, "/proc/self/cgroup",
               "9:name=systemd:/system.slice/attnd.service\n8:pids:/system.slice/attnd.service\n"
               "4:memory:/system.slice/attnd.service\n3:cpu,cpuacct:/system.slice/attnd.service\n2:cpuset:/\n0::/\n");
    write_file(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    write_file(root, "/sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes", "536870912\n");
    write_file(root, "/sys/fs/cgroup/memory/system.slice/attnd.service/memory.limit_in_bytes", "268435456\n");
    write_file(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    write_file(root, "/sys/fs/cgroup/cpu/system.slice/attnd.service/cpu.cfs_quota_us", "90000\n");
    write_file(root, "/sys/fs/cgroup/cpu/system.slice/attnd.service/cpu.cfs_period_us", "100000\n");
    write_file(root, "/sys/fs/cgroup/pids/system.slice/pids.max", "24\n");
    write_file(root, "/sys/fs/cgroup/pids/system.slice/attnd.service/pids.max", "max\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 268435456);
    assert_int_equal(m.cores, 1);
    assert_int_equal(m.threads, 24);

    write_file(root, "/sys/fs/cgroup/memory/system.slice/memory.limit_in_bytes", "134217728\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 134217728);
    remove_root(root);
}

static void test_a_container_of_version_1_has_its_own_group_as_the_root(void **state)
{
    (void)state;
    struct attn_machine m;
    char root[32];
    make_root(root);
    write_file(root, "/proc/self/cgroup", "4:memory:/docker/0123456789abcdef\n8:pids:/docker/0123456789abcdef\n");
    write_file(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n");
    write_file(root, "/sys/fs/cgroup/pids/pids.max", "100\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 268435456);
    assert_int_equal(m.threads, 100);
    remove_root(root);
}

static void test_paths_of_cgroups_may_be_long_and_lead_out_of_the_namespace(void **state)
{
    (void)state;
    struct attn_machine m;
    char root[32], line[3000], path[3100];
    make_root(root);
    int used = snprintf(line, sizeof line, "0::");
    for (int i = 0; i < 10; i++) used += snprintf(line + used, sizeof line - (size_t)used, "/%0200d", i);
    snprintf(path, sizeof path, "/sys/fs/cgroup%.201s/memory.max", line + 3);
    write_file(root, path, "1048576\n");
    write_file(root, "/proc/self/cgroup", line);
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 1048576);

    write_file(root, "/sys/fs/cgroup/memory.max", "2097152\n");
    write_file(root, "/proc/self/cgroup", "0::/../other\n");
    attn_machine_look(root, &m);
    assert_int_equal(m.memory_bytes, 2097152);
    remove_root(root);
}

static void test_the_clock_is_the_highest_one_or_else_that_of_cpuinfo(void **state)
{
    (void)state;
    struct attn_machine m;
    char root[32];
    make_root(root);
    attn_machine_look(root, &m);
    assert_true(m.hertz == 0);
    write_file(root, "/proc/cpuinfo", "processor\t: 0\nmodel name\t: cpu MHz : 7\ncpu MHz\t\t: 2596.5\n");
    attn_machine_look(root, &m);
    assert_true(m.hertz == 2596.5e6);
    write_file(root, "/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3700000\n");
    attn_machine_look(root, &m);
    assert_true(m.hertz == 3.7e9);
    remove_root(root);
}

static void test_the_cpu_device_has_the_memory_that_the_server_counts_with(void **state)
{
    struct attn_machine machine;
    attn_device *device;
    attn_device_info info;
    attn_error err;
    (void)state;
    attn_machine_look("", &machine);
    assert_int_equal(attn_device_open("cpu", 0, NULL, &device, &err), ATTN_OK);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_total, machine.memory_bytes);
    assert_int_equal(info.memory_limit, machine.memory_bytes / 4 * 3);
    attn_device_close(device);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cores_and_memory_are_those_the_cgroup_allows),
        cmocka_unit_test(test_a_slice_of_version_1_without_a_namespace_is_seen_with_all_groups_above_it),
        cmocka_unit_test(test_a_container_of_version_1_has_its_own_group_as_the_root),
        cmocka_unit_test(test_paths_of_cgroups_may_be_long_and_lead_out_of_the_namespace),
        cmocka_unit_test(test_the_clock_is_the_highest_one_or_else_that_of_cpuinfo),
        cmocka_unit_test(test_the_cpu_device_has_the_memory_that_the_server_counts_with),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
