/* test_metrics.c: tests that everything the server counts appears on the metrics page, in Prometheus' form. All tests
 * share one process's metrics, so each uses labels of its own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "server/base/metrics.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static char *page(void)
{
    size_t length = 0;
    char *text = metrics_write(&length);
    assert_non_null(text);
    assert_int_equal(strlen(text), length);
    return text;
}

static bool has_line(const char *text, const char *line)
{
    const size_t length = strlen(line);
    for (const char *p = text; (p = strstr(p, line)) != NULL; p++)
        if ((p == text || p[-1] == '\n') && p[length] == '\n') return true;
    return false;
}

static void must_have(const char *const *lines)
{
    char *text = page();
    for (; *lines != NULL; lines++)
        if (!has_line(text, *lines)) fail_msg("not on the page: %s\n%s", *lines, text);
    free(text);
}

static void test_a_counter_counts_by_its_labels(void **state)
{
    (void)state;
    metrics_add(METRIC_REQUESTS, "forward", "200", 1);
    metrics_add(METRIC_REQUESTS, "forward", "200", 1);
    metrics_add(METRIC_REQUESTS, "forward", "400", 1);
    metrics_add(METRIC_BODY_BYTES_IN, NULL, NULL, 131072);
    metrics_add(METRIC_KERNEL_SECONDS, "cpu", "forward", 0.125);
    metrics_add(METRIC_KERNEL_SECONDS, "cpu", "forward", 0.5);
    must_have((const char *const[]){
        "# HELP attnd_requests_total Answers by endpoint and HTTP status.", "# TYPE attnd_requests_total counter",
        "attnd_requests_total{endpoint=\"forward\",status=\"200\"} 2",
        "attnd_requests_total{endpoint=\"forward\",status=\"400\"} 1", "attnd_body_bytes_received_total 131072",
        "attnd_kernel_seconds_total{device=\"cpu\",op=\"forward\"} 0.625", NULL });
    assert_true(metrics_sum(METRIC_REQUESTS, "forward") == 3);
    assert_true(metrics_sum(METRIC_REQUESTS, NULL) == 3);
    assert_true(metrics_sum(METRIC_REQUESTS, "backward") == 0);
}

static void test_a_gauge_is_set_and_moves_both_ways(void **state)
{
    (void)state;
    metrics_set(METRIC_READY, NULL, NULL, 1);
    metrics_add(METRIC_INFLIGHT, "running", NULL, 3);
    metrics_add(METRIC_INFLIGHT, "running", NULL, -1);
    metrics_set(METRIC_STAGING_BYTES, "limit", NULL, 12637437952.0);
    must_have((const char *const[]){ "# TYPE attnd_ready gauge", "attnd_ready 1",
                                     "attnd_inflight_requests{state=\"running\"} 2",
                                     "attnd_staging_bytes{kind=\"limit\"} 12637437952", NULL });
}

static void test_a_histogram_has_cumulative_buckets(void **state)
{
    (void)state;
    static const double seconds[] = { 0.00005, 0.0001, 0.00011, 0.5, 13.1072, 14 };
    for (size_t i = 0; i < ARRAY_SIZE(seconds); i++) metrics_observe(METRIC_REQUEST_SECONDS, "forward", seconds[i]);
    for (int i = 1; i <= 3; i++) metrics_observe(METRIC_BATCH_SIZE, NULL, i);
    must_have((const char *const[]){ "# TYPE attnd_request_duration_seconds histogram",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"0.0001\"} 2",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"0.0002\"} 3",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"0.4096\"} 3",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"0.8192\"} 4",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"13.1072\"} 5",
                                     "attnd_request_duration_seconds_bucket{endpoint=\"forward\",le=\"+Inf\"} 6",
                                     "attnd_request_duration_seconds_count{endpoint=\"forward\"} 6",
                                     "attnd_batch_size_bucket{le=\"1\"} 1", "attnd_batch_size_bucket{le=\"2\"} 2",
                                     "attnd_batch_size_bucket{le=\"4\"} 3", "attnd_batch_size_bucket{le=\"1024\"} 3",
                                     "attnd_batch_size_bucket{le=\"+Inf\"} 3", "attnd_batch_size_sum 6",
                                     "attnd_batch_size_count 3", NULL });
}

static void test_label_values_are_escaped_and_cut(void **state)
{
    (void)state;
    char big[200];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    metrics_add(METRIC_CANCELLED, "a\"b\\c\nd", NULL, 1);
    metrics_add(METRIC_CANCELLED, big, NULL, 1);
    /* The label `big` is too long, so it is truncated. The second call must find the series with the truncated
     * label. */
    metrics_add(METRIC_CANCELLED, big, NULL, 1);
    char line[200];
    snprintf(line, sizeof line, "attnd_cancelled_total{state=\"%.63s\"} 2", big);
    must_have((const char *const[]){ "attnd_cancelled_total{state=\"a\\\"b\\\\c\\nd\"} 1", line, NULL });
}

static void test_too_many_label_sets_are_counted_together(void **state)
{
    (void)state;
    for (int i = 0; i < METRICS_MAX_SERIES + 50; i++) {
        /* The next iteration overwrites this text, so metrics_add() must copy it. */
        char reason[24];
        snprintf(reason, sizeof reason, "reason%d", i);
        metrics_add(METRIC_REJECTED, reason, NULL, 1);
        metrics_add(METRIC_REJECTED, reason, NULL, 1);
    }
    must_have((const char *const[]){ "attnd_rejected_total{reason=\"reason0\"} 2",
                                     "attnd_rejected_total{reason=\"other\"} 102", NULL });
    assert_true(metrics_sum(METRIC_REJECTED, NULL) == 2 * (METRICS_MAX_SERIES + 50));
}

static void test_rows_without_labels_are_there_from_the_start(void **state)
{
    (void)state;
    must_have((const char *const[]){ "attnd_queue_requests 0", "attnd_queue_bytes 0", "attnd_connections 0",
                                     "attnd_log_lines_dropped_total 0", NULL });
}

static double process_number(const char *text, const char *name)
{
    for (const char *p = text; (p = strstr(p, name)) != NULL; p++)
        if (p[-1] == '\n' && p[strlen(name)] == ' ') return strtod(p + strlen(name), NULL);
    fail_msg("%s is not on the page", name);
    return 0;
}

static void test_the_process_is_described(void **state)
{
    (void)state;
    char *text = page();
    assert_non_null(strstr(text, "attnd_build_info{version=\"" ATTND_VERSION "\",backends=\""));
    assert_true(process_number(text, "process_resident_memory_bytes") > 1e5);
    assert_true(process_number(text, "process_virtual_memory_bytes") > 1e5);
    assert_true(process_number(text, "process_cpu_seconds_total") >= 0);
    const double fds = process_number(text, "process_open_fds"),
                 start = process_number(text, "process_start_time_seconds");
    assert_true(start <= (double)time(NULL) + 1 && start > (double)time(NULL) - 600);
    assert_true(process_number(text, "process_max_fds") >= fds);
    free(text);
    const int more = dup(0);
    text = page();
    assert_true(process_number(text, "process_open_fds") == fds + 1);
    close(more);
    free(text);
}

static void *count_many(void *unused)
{
    (void)unused;
    for (int i = 0; i < 20000; i++) {
        metrics_add(METRIC_FLOPS, i % 2 ? "cuda:0" : "cuda:1", "backward", 1);
        metrics_observe(METRIC_STAGE_SECONDS, i % 3 ? "queue" : "compute", 0.001);
    }
    return NULL;
}

static void test_nothing_is_lost_between_threads(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, count_many, NULL), 0);
    for (int i = 0; i < 20; i++) free(page());
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    must_have((const char *const[]){ "attnd_flops_total{device=\"cuda:0\",op=\"backward\"} 40000",
                                     "attnd_flops_total{device=\"cuda:1\",op=\"backward\"} 40000",
                                     "attnd_stage_duration_seconds_count{stage=\"compute\"} 26668",
                                     "attnd_stage_duration_seconds_count{stage=\"queue\"} 53332", NULL });
}

/* This test must run last, when every metric has a series. */
static void test_promtool_finds_no_fault(void **state)
{
    (void)state;
    if (system("command -v promtool > /dev/null") != 0) {
        print_message("promtool is not installed\n");
        skip();
    }
    for (int id = 0; id < METRIC_COUNT; id++) metrics_set((enum metric_id)id, "x", "y", 1);
    char path[] = "/tmp/test_metrics_XXXXXX", command[128], said[4096];
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    char *text = page();
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    free(text);
    snprintf(command, sizeof command, "promtool check metrics < %s 2>&1", path);
    FILE *f = popen(command, "r");
    const size_t used = fread(said, 1, sizeof said - 1, f);
    said[used] = '\0';
    const int status = pclose(f);
    unlink(path);
    if (status != 0 || used != 0) fail_msg("promtool: %s", said);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_counter_counts_by_its_labels),
        cmocka_unit_test(test_a_gauge_is_set_and_moves_both_ways),
        cmocka_unit_test(test_a_histogram_has_cumulative_buckets),
        cmocka_unit_test(test_label_values_are_escaped_and_cut),
        cmocka_unit_test(test_too_many_label_sets_are_counted_together),
        cmocka_unit_test(test_rows_without_labels_are_there_from_the_start),
        cmocka_unit_test(test_the_process_is_described),
        cmocka_unit_test(test_nothing_is_lost_between_threads),
        cmocka_unit_test(test_promtool_finds_no_fault),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
