/* test_log.c: tests of log lines as text and as JSON, of strings from clients, and of pipes and files that are full,
 * closed or slow. Each test redirects standard error into a pipe. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "server/base/log.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static int read_end, real_stderr;

static int redirect(void **state)
{
    (void)state;
    int ends[2];
    signal(SIGPIPE, SIG_IGN);
    fflush(stderr);
    if (pipe(ends) != 0) return -1;
    real_stderr = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    read_end = ends[0];
    fcntl(read_end, F_SETFL, O_NONBLOCK);
    fcntl(read_end, F_SETPIPE_SZ, 1 << 20);
    return 0;
}

/* Restores standard error, so that a failed assertion is visible. */
static void restore(void)
{
    if (real_stderr < 0) return;
    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    real_stderr = -1;
}

static int finish(void **state)
{
    (void)state;
    log_close();
    restore();
    if (read_end >= 0) close(read_end);
    read_end = -1;
    return 0;
}

static const char *written(void)
{
    static char text[1 << 20];
    size_t used = 0;
    ssize_t n;
    log_close();
    while ((n = read(read_end, text + used, sizeof text - 1 - used)) > 0) used += (size_t)n;
    text[used] = '\0';
    restore();
    return text;
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    for (; (text = strstr(text, part)) != NULL; text++) count++;
    return count;
}

/* Returns how many lines of `event` the log says it has left out. */
static uint64_t left_out_of(const char *event, const char *text)
{
    char said[64];
    uint64_t count = 0;
    snprintf(said, sizeof said, " repeated of=%s lines=", event);
    for (; (text = strstr(text, said)) != NULL; text++) count += strtoull(text + strlen(said), NULL, 10);
    return count;
}

/* Returns the present second of the clock by which the log limits repeated lines. */
static int64_t second_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

static void test_a_text_line_has_time_level_id_event_and_pairs(void **state)
{
    (void)state;
    log_open("text", "info");
    log_event(LOG_INFO, "ab12", "done", "status=%d ms=%.1f", 200, 1.5);
    log_event(LOG_WARN, NULL, "slow", "%s", "");
    const char *text = written();
    struct tm tm = { 0 };
    int ms;
    assert_int_equal(sscanf(text, "%d-%d-%dT%d:%d:%d.%3dZ", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour,
                            &tm.tm_min, &tm.tm_sec, &ms),
                     7);
    tm.tm_year -= 1900;
    tm.tm_mon--;
    assert_true(llabs((long long)(timegm(&tm) - time(NULL))) < 5);
    assert_int_equal(text[23], 'Z');
    const char *rest = text + 24, *end = strchr(rest, '\n');
    assert_int_equal(strncmp(rest, " INFO req=ab12 done status=200 ms=1.5\n", (size_t)(end - rest + 1)), 0);
    assert_string_equal(end + 1 + 24, " WARN slow\n");
}

static void test_a_json_line_is_an_object_with_typed_members(void **state)
{
    (void)state;
    log_open("json", "info");
    log_event(LOG_INFO, "ab12", "done",
              "status=%d ms=%.1f tiny=%g ok=true path=/v1/x span=%s client=" LOG_Q " empty= tail word", 200, 1.5, 1e-5,
              "1234567812345678", "a \\\"b\\\\c\\x1b=d e");
    cJSON *line = cJSON_Parse(written());
    assert_non_null(line);
    assert_int_equal(strlen(cJSON_GetObjectItem(line, "time")->valuestring), 24);
    assert_string_equal(cJSON_GetObjectItem(line, "level")->valuestring, "info");
    assert_string_equal(cJSON_GetObjectItem(line, "request_id")->valuestring, "ab12");
    assert_string_equal(cJSON_GetObjectItem(line, "event")->valuestring, "done");
    assert_true(cJSON_GetObjectItem(line, "status")->valuedouble == 200);
    assert_true(cJSON_GetObjectItem(line, "ms")->valuedouble == 1.5);
    assert_true(cJSON_GetObjectItem(line, "tiny")->valuedouble == 1e-5);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(line, "ok")));
    assert_string_equal(cJSON_GetObjectItem(line, "path")->valuestring, "/v1/x");
    /* An id is a JSON string even if it has only digits. */
    assert_string_equal(cJSON_GetObjectItem(line, "span")->valuestring, "1234567812345678");
    assert_string_equal(cJSON_GetObjectItem(line, "client")->valuestring, "a \"b\\c\\x1b=d e");
    assert_string_equal(cJSON_GetObjectItem(line, "empty")->valuestring, "");
    assert_string_equal(cJSON_GetObjectItem(line, "text")->valuestring, "tail");
    cJSON_Delete(line);
}

static void test_any_bytes_make_one_valid_json_line(void **state)
{
    (void)state;
    static const char alphabet[] = "\"\\= \n\t\x01\x7f\xc3\xa9\xff\xe2\x82x";
    log_open("json", "info");
    uint64_t random = 1;
    for (int i = 0; i < 300; i++) {
        char text[1500];
        for (size_t k = 0; k < sizeof text; k++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            text[k] = alphabet[(random >> 33) % (sizeof alphabet - 1)];
        }
        text[i * 5] = '\0';
        log_event(LOG_INFO, i % 2 ? "id\n\"" : NULL, "fuzz", "%s", text);
    }
    char *text = strdup(written()), *rest = text;
    int lines = 0;
    for (char *line; (line = strsep(&rest, "\n")) != NULL && *line; lines++) {
        cJSON *tree = cJSON_ParseWithOpts(line, NULL, true);
        if (tree == NULL) fail_msg("%s", line);
        cJSON_Delete(tree);
    }
    assert_int_equal(lines, 300);
    free(text);
}

static void test_a_line_stays_a_line(void **state)
{
    (void)state;
    char big[5000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    log_open("text", "info");
    log_event(LOG_INFO, "a\nb", "one", "text=%s", "with\nnewline\r\x1b[31m");
    log_event(LOG_INFO, NULL, "two", "text=%s", big);
    const char *text = written();
    assert_int_equal(count_of(text, "\n"), 2);
    assert_null(strchr(text, '\r'));
    assert_null(strchr(text, '\x1b'));
    assert_non_null(strstr(text, " INFO req=a b one text=with newline  [31m\n"));
    assert_true(strlen(text) < 1300);
}

static void test_levels_below_the_wanted_one_are_not_written(void **state)
{
    (void)state;
    log_open("text", "warn");
    assert_false(log_enabled(LOG_INFO));
    assert_true(log_enabled(LOG_WARN));
    log_event(LOG_DEBUG, NULL, "a", "%s", "");
    log_event(LOG_INFO, NULL, "b", "%s", "");
    log_event(LOG_ERROR, NULL, "c", "%s", "");
    const char *text = written();
    assert_int_equal(count_of(text, "\n"), 1);
    assert_non_null(strstr(text, " ERROR c\n"));
}

static void test_client_strings_are_cleaned(void **state)
{
    (void)state;
    static const struct {
        const char *in, *out;
    } cases[] = {
        { "plain text", "plain text" },
        { "", "" },
        { NULL, "" },
        { "a\"b\\c", "a\\\"b\\\\c" },
        { "line\nfeed\t\x1b[31m\x7f", "line\\x0afeed\\x09\\x1b[31m\\x7f" },
        { "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80" },
        { "\xff\xc3", "\\xff\\xc3" },
        { "\xc0\xaf\xed\xa0\x80", "\\xc0\\xaf\\xed\\xa0\\x80" }, /* overlong, surrogate */
        { "\xc2\x9b"
          "31m",
          "\\xc2\\x9b"
          "31m" },
        { "a\xe2\x80\xa8z\xe2\x80\xae", "a\\xe2\\x80\\xa8z\\xe2\\x80\\xae" },
    };
    char buffer[LOG_CLEAN_BYTES];
    restore();
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_string_equal(log_clean(buffer, sizeof buffer, cases[i].in), cases[i].out);

    char big[300], want[300];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    snprintf(want, sizeof want, "%.128s...", big);
    assert_string_equal(log_clean(buffer, sizeof buffer, big), want);
    big[128] = '\0';
    assert_string_equal(log_clean(buffer, sizeof buffer, big), big);
    memset(big, '\n', 200);
    big[200] = '\0';
    assert_int_equal(strlen(log_clean(buffer, sizeof buffer, big)), LOG_CLEAN_BYTES - 1);
    for (size_t capacity = 0; capacity < 40; capacity++) {
        char small[41];
        memset(small, '#', sizeof small);
        log_clean(small, capacity, "caf\xc3\xa9\n\"0123456789");
        for (size_t k = capacity; k < sizeof small; k++) assert_int_equal(small[k], '#');
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void test_a_sink_that_nobody_reads_blocks_no_caller(void **state)
{
    (void)state;
    const uint64_t before = log_dropped();
    char big[900];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    log_open("text", "info");
    double worst = 0;
    /* The lines have 7.4 MB in all, but the pipe holds 1 MiB and the log's buffers hold 2 MiB. */
    for (int i = 0; i < 8000; i++) {
        const double start = seconds();
        log_event(LOG_INFO, NULL, "flood", "text=%s", big);
        const double took = seconds() - start;
        if (took > worst) worst = took;
    }
    assert_true(log_dropped() - before > 1000);
    assert_true(log_dropped() - before < 8000);
    assert_true(worst < 0.5);

    /* When the pipe is read again, the log must say how many lines were lost. */
    static char pipe_text[1 << 16];
    size_t told = 0;
    const double start = seconds();
    while (seconds() - start < 5 && !told) {
        const ssize_t n = read(read_end, pipe_text, sizeof pipe_text - 1);
        if (n > 0) {
            pipe_text[n] = '\0';
            told = strstr(pipe_text, " WARN lost lines=") != NULL;
        } else {
            log_event(LOG_INFO, NULL, "again", "%s", "");
            usleep(2000);
        }
    }
    close(read_end);
    read_end = -1;
    assert_true(told);
}

static void test_closing_gives_up_on_a_stuck_sink(void **state)
{
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip(); /* ThreadSanitizer does not let a child process start a thread */
#endif
    /* Nobody reads the full pipe, so the log's writer thread hangs for ever, and only a child process can end it. */
    pid_t child = fork();
    if (child == 0) {
        char big[900];
        memset(big, 'x', sizeof big - 1);
        big[sizeof big - 1] = '\0';
        fcntl(STDERR_FILENO, F_SETPIPE_SZ, 4096);
        log_open("text", "info");
        for (int i = 0; i < 200; i++) log_event(LOG_INFO, NULL, "flood", "text=%s", big);
        usleep(50000);
        const double start = seconds();
        log_close();
        const double took = seconds() - start;
        log_event(LOG_INFO, NULL, "after", "%s", "");
        _exit(took > 0.5 && took < 3 && log_dropped() > 0 ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void test_a_sink_that_is_gone_is_only_counted(void **state)
{
    (void)state;
    const uint64_t before = log_dropped();
    log_open("text", "info");
    close(read_end); /* every write fails with EPIPE now */
    read_end = -1;
    for (int i = 0; i < 10; i++) log_event(LOG_INFO, NULL, "lost", "n=%d", i);
    log_close();
    restore();
    assert_true(log_dropped() - before >= 10);
}

static void test_a_closed_standard_error_is_only_counted(void **state)
{
    (void)state;
    const uint64_t before = log_dropped();
    close(STDERR_FILENO);
    log_open("text", "info");
    log_event(LOG_INFO, NULL, "lost", "n=%d", 1);
    log_close();
    restore();
    assert_true(log_dropped() - before >= 1);
}

static void test_a_full_disk_is_only_counted(void **state)
{
    (void)state;
    const uint64_t before = log_dropped();
    const int full = open("/dev/full", O_WRONLY);
    assert_true(full >= 0);
    dup2(full, STDERR_FILENO);
    close(full);
    log_open("json", "info");
    log_event(LOG_INFO, NULL, "lost", "n=%d", 1);
    log_close();
    restore();
    assert_true(log_dropped() - before >= 1);
}

static void test_repeats_of_a_warning_are_counted_instead_of_written(void **state)
{
    (void)state;
    log_open("text", "info");
    for (int i = 0; i < 1000; i++) {
        log_event(LOG_WARN, NULL, "http", "text=%d", i);
        log_event(LOG_INFO, NULL, "done", "n=%d", i);
    }
    log_event(LOG_WARN, NULL, "other", "n=%d", 1);
    const char *text = written();
    const int http = count_of(text, " WARN http text=");
    assert_int_equal(count_of(text, " INFO done n="), 1000);
    assert_int_equal(count_of(text, " WARN other n=1\n"), 1);
    /* The log allows 20 lines per second, and the test takes at most two seconds. */
    assert_true(http >= 20 && http <= 40);
    assert_int_equal(left_out_of("http", text), 1000 - http);
}

static void test_repeats_are_told_while_nothing_else_happens(void **state)
{
    (void)state;
    log_open("text", "info");
    const struct timespec pause = { 0, 1000000 };
    static char text[1 << 16];
    uint64_t events = 0;
    size_t used = 0;
    int64_t second;
    /* Repeats until all lines fall into one second, because in the next second the log reports the lines that it
     * omitted. */
    do {
        for (second = second_now(); second_now() == second;) nanosleep(&pause, NULL);
        second = second_now();
        for (int i = 0; i < 100; i++, events++) log_event(LOG_ERROR, NULL, "device", "n=%d", i);
    } while (second_now() != second);
    for (int ms = 0; ms < 60000 && left_out_of("device", text) + (uint64_t)count_of(text, " ERROR device n=") < events;
         ms++) {
        const ssize_t n = read(read_end, text + used, sizeof text - 1 - used);
        if (n > 0) used += (size_t)n;
        text[used] = '\0';
        nanosleep(&pause, NULL);
    }
    assert_non_null(strstr(text, " ERROR repeated of=device lines=80\n"));
    assert_int_equal(left_out_of("device", text) + (uint64_t)count_of(text, " ERROR device n="), events);
}

static void *log_many(void *name)
{
    for (int i = 0; i < 2000; i++) log_event(LOG_INFO, name, "thread", "n=%d", i);
    return NULL;
}

static void test_lines_of_threads_stay_whole_and_in_order(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    static char *const names[THREADS] = { "a", "b", "c", "d" };
    pthread_t threads[THREADS];
    log_open("text", "info");
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, log_many, names[i]), 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    const uint64_t dropped = log_dropped();
    char *text = strdup(written()), *rest = text;
    int next[THREADS] = { 0 }, lines = 0;
    for (char *line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        char name;
        int n;
        if (sscanf(line + 24, " INFO req=%c thread n=%d", &name, &n) != 2)
            continue; /* this line is the log's own report of lines omitted in an earlier test */
        assert_true(n >= next[name - 'a']);
        next[name - 'a'] = n + 1;
        lines++;
    }
    assert_true(lines == THREADS * 2000 || dropped > 0);
    assert_true(lines > 1000);
    free(text);
}

static void test_a_forked_child_can_open_its_own(void **state)
{
    (void)state;
#ifdef __SANITIZE_THREAD__
    skip(); /* ThreadSanitizer does not let a child process start a thread */
#endif
    log_open("text", "info");
    log_event(LOG_INFO, NULL, "parent", "%s", "");
    pid_t child = fork();
    if (child == 0) {
        log_event(LOG_INFO, NULL, "direct", "%s", "");
        log_open("text", "info");
        log_event(LOG_INFO, NULL, "child", "%s", "");
        log_close();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    const char *text = written();
    assert_int_equal(count_of(text, " INFO parent\n"), 1);
    assert_int_equal(count_of(text, " INFO direct\n"), 1);
    assert_int_equal(count_of(text, " INFO child\n"), 1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, redirect, finish)
    const struct CMUnitTest tests[] = {
        TEST(test_a_text_line_has_time_level_id_event_and_pairs),
        TEST(test_a_json_line_is_an_object_with_typed_members),
        TEST(test_any_bytes_make_one_valid_json_line),
        TEST(test_a_line_stays_a_line),
        TEST(test_levels_below_the_wanted_one_are_not_written),
        TEST(test_client_strings_are_cleaned),
        TEST(test_a_sink_that_nobody_reads_blocks_no_caller),
        TEST(test_closing_gives_up_on_a_stuck_sink),
        TEST(test_a_sink_that_is_gone_is_only_counted),
        TEST(test_a_closed_standard_error_is_only_counted),
        TEST(test_a_full_disk_is_only_counted),
        TEST(test_repeats_of_a_warning_are_counted_instead_of_written),
        TEST(test_repeats_are_told_while_nothing_else_happens),
        TEST(test_lines_of_threads_stay_whole_and_in_order),
        TEST(test_a_forked_child_can_open_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
