/* test_fake.c: tests of the fake device and of the table of CUDA's errors. Tests of the daemon rely on what the fake
 * device promises. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "kernels/attention.h"
#include "kernels/cuda/common/errors.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

enum { B = 1, S = 5, H = 2, D = 8, ELEMENTS = B * S * H * D };

/* A forward's tensors in one block of host memory. */
struct host {
    float q[ELEMENTS], k[ELEMENTS], v[ELEMENTS], out[ELEMENTS], lse[B * H * S];
};

struct fixture {
    attn_device *device;
    attn_stream *stream;
    struct host host;
    struct host *mirror;
    attn_problem problem;
};

static void open_with(struct fixture *f, const char *script)
{
    static const int64_t shape[] = { B, S, H, D }, rows[] = { B, H, S };
    const attn_device_options options = { .threads = 1, .script = script };
    attn_error err = { 0 };
    void *memory = NULL;
    memset(f, 0, sizeof *f);
    if (attn_device_open("fake", 0, &options, &f->device, &err) != ATTN_OK) fail_msg("%s", err.text);
    assert_int_equal(attn_stream_open(f->device, &f->stream, &err), ATTN_OK);
    for (int i = 0; i < ELEMENTS; i++) {
        f->host.q[i] = (float)(i % 7) - 3;
        f->host.k[i] = (float)(i % 5) - 2;
        f->host.v[i] = (float)(i % 11);
    }
    if (attn_device_alloc(f->device, sizeof f->host, &memory, &err) != ATTN_OK) memory = NULL;
    f->mirror = memory;
    f->problem = (attn_problem)ATTN_PROBLEM_INIT;
    if (!memory) return;
    f->problem.q = attn_tensor_make(f->mirror->q, ATTN_F32, 4, shape);
    f->problem.k = attn_tensor_make(f->mirror->k, ATTN_F32, 4, shape);
    f->problem.v = attn_tensor_make(f->mirror->v, ATTN_F32, 4, shape);
    f->problem.out = attn_tensor_make(f->mirror->out, ATTN_F32, 4, shape);
    f->problem.lse = attn_tensor_make(f->mirror->lse, ATTN_F32, 3, rows);
}

static void close_it(struct fixture *f)
{
    attn_stream_close(f->stream);
    attn_device_free(f->device, f->mirror);
    attn_device_close(f->device);
}

/* Copies the inputs to the device, queues the forward, and copies `out` back. */
static attn_status put(struct fixture *f, attn_error *err)
{
    attn_status status = attn_copy(f->stream, f->mirror, &f->host, sizeof f->host, ATTN_TO_DEVICE, err);
    if (status == ATTN_OK) status = attn_forward(f->stream, &f->problem, NULL, err);
    if (status == ATTN_OK)
        status = attn_copy(f->stream, f->host.out, f->mirror->out, sizeof f->host.out, ATTN_FROM_DEVICE, err);
    return status;
}

static void test_the_table_of_errors_says_which_ones_are_sticky(void **state)
{
    static const int stays[] = { 46, 201, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 810, 999 };
    static const int passes[] = { 1, 2, 9, 98, 205, 209, 217, 400, 600, 701, 711, 801, 912 };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(stays); i++) {
        assert_true(cuda_error_of(stays[i]).sticky);
        assert_int_equal(cuda_error_of(stays[i]).status, ATTN_DEVICE_LOST);
    }
    for (size_t i = 0; i < ARRAY_SIZE(passes); i++) assert_false(cuda_error_of(passes[i]).sticky);
    assert_int_equal(cuda_error_of(2).status, ATTN_NO_MEMORY);
    assert_int_equal(cuda_error_of(9).status, ATTN_DEVICE);
}

static void test_an_error_of_no_table_counts_as_sticky(void **state)
{
    (void)state;
    assert_true(cuda_error_of(4711).sticky);
    assert_int_equal(cuda_error_of(4711).code, 4711);
    assert_int_equal(cuda_error_of(-1).status, ATTN_DEVICE_LOST);
}

static void test_every_row_of_the_table_is_consistent(void **state)
{
    (void)state;
#define X(number, cuda, text, stays, state_)               \
    assert_int_equal(cuda_error_of(number).code, number);  \
    assert_string_equal(cuda_error_of(number).name, text); \
    assert_int_equal(cuda_error_of(number).sticky, ATTN_##state_ == ATTN_DEVICE_LOST);
    CUDA_ERROR_MAP(X)
#undef X
}

static void test_it_computes_what_the_cpu_computes(void **state)
{
    struct fixture f;
    struct host want;
    attn_device *cpu;
    attn_stream *stream;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    want = f.host;
    assert_int_equal(put(&f, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    const attn_device_options options = { .threads = 1 };
    assert_int_equal(attn_device_open("cpu", 0, &options, &cpu, &err), ATTN_OK);
    assert_int_equal(attn_stream_open(cpu, &stream, &err), ATTN_OK);
    attn_problem p = f.problem;
    p.q.data = want.q, p.k.data = want.k, p.v.data = want.v, p.out.data = want.out, p.lse.data = want.lse;
    assert_int_equal(attn_forward(stream, &p, NULL, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);
    assert_memory_equal(f.host.out, want.out, sizeof want.out);
    attn_stream_close(stream);
    attn_device_close(cpu);
    close_it(&f);
}

/* The merge of two results with equal lse is their mean. The merge runs after the copies that come before it in the
 * stream. It fails if a part lies in host memory. */
static void test_a_merge_is_done_in_order_and_in_its_own_memory(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    attn_tensor lse = f.problem.lse, q = f.problem.q, k = f.problem.k;
    const attn_result parts[] = { { q, lse }, { k, lse } };
    const attn_merge_problem m = { .count = 2, .parts = parts, .whole = { .out = f.problem.out } };
    assert_int_equal(attn_copy(f.stream, f.mirror, &f.host, sizeof f.host, ATTN_TO_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_merge(f.stream, &m, &err), ATTN_OK);
    assert_int_equal(attn_copy(f.stream, f.host.out, f.mirror->out, sizeof f.host.out, ATTN_FROM_DEVICE, &err),
                     ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    for (int i = 0; i < ELEMENTS; i++) assert_true(f.host.out[i] == (f.host.q[i] + f.host.k[i]) / 2);
    attn_result strange[] = { parts[0], parts[1] };
    strange[1].out.data = f.host.k;
    const attn_merge_problem of_strange = { .count = 2, .parts = strange, .whole = m.whole };
    assert_int_equal(attn_merge(f.stream, &of_strange, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    close_it(&f);
}

/* A device copies numbers from another device, and adds them up. The copy fails if the other device is lost or has
 * freed the memory, but the copying device stays usable. */
static void test_a_device_copies_from_another_one_that_works(void **state)
{
    static const float numbers[4] = { 1, 2, 3, 4 };
    struct fixture f;
    attn_device *other;
    attn_stream *stream;
    attn_error err = { 0 };
    void *from;
    bool done = false;
    (void)state;
    setenv("ATTN_FAKE_DEVICES", "2", 1);
    open_with(&f, "");
    const attn_device_options options = { .threads = 1, .script = "sync.err=700@1" };
    assert_int_equal(attn_device_open("fake", 1, &options, &other, &err), ATTN_OK);
    assert_int_equal(attn_stream_open(other, &stream, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(other, sizeof numbers, &from, &err), ATTN_OK);
    assert_int_equal(attn_copy(stream, from, numbers, sizeof numbers, ATTN_TO_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);

    const attn_sum sum = { f.mirror->out, ATTN_F32, 2, 4, { f.mirror->q, f.mirror->q } };
    assert_int_equal(attn_copy_peer(f.stream, f.mirror->q, other, from, sizeof numbers, &err), ATTN_OK);
    assert_int_equal(attn_sum_parts(f.stream, &sum, &err), ATTN_OK);
    assert_int_equal(attn_copy(f.stream, f.host.out, f.mirror->out, sizeof numbers, ATTN_FROM_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    for (int n = 0; n < 4; n++) assert_true(f.host.out[n] == 2 * numbers[n]);

    const attn_sum lost = { from, ATTN_F32, 1, 4, { from } };
    assert_int_equal(attn_sum_parts(stream, &lost, &err), ATTN_OK);
    assert_int_equal(attn_stream_done(stream, &done, &err), ATTN_DEVICE_LOST);
    assert_int_equal(attn_copy_peer(f.stream, f.mirror->q, other, from, sizeof numbers, &err), ATTN_CANCELLED);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    attn_device_free(other, from);
    attn_stream_close(stream);
    attn_device_close(other);

    assert_int_equal(attn_device_open("fake", 1, NULL, &other, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(other, sizeof numbers, &from, &err), ATTN_OK);
    assert_int_equal(attn_copy_peer(f.stream, f.mirror->q, other, from, sizeof numbers, &err), ATTN_OK);
    attn_device_free(other, from);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    attn_device_close(other);
    close_it(&f);
    unsetenv("ATTN_FAKE_DEVICES");
}

static void test_nothing_happens_before_the_stream_is_asked(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    bool done = false;
    (void)state;
    open_with(&f, "");
    f.host.out[0] = 12345;
    assert_int_equal(put(&f, &err), ATTN_OK);
    assert_true(f.host.out[0] == 12345);
    assert_int_equal(attn_stream_done(f.stream, &done, &err), ATTN_OK);
    assert_true(done && f.host.out[0] != 12345);
    close_it(&f);
}

/* The fake backend and the CPU backend copy rows in different ways: all with one command, or each with its own. */
static void test_rows_are_copied_to_their_places_and_nothing_beside_them(void **state)
{
    enum { ROWS = 3, WIDTH = 5, FROM = 7, TO = 6 };
    static const char *const backends[] = { "fake", "cpu" };
    char from[ROWS * FROM], back[ROWS * FROM], *there;
    (void)state;
    for (size_t i = 0; i < sizeof from; i++) from[i] = (char)(i + 1);
    for (int n = 0; n < 2; n++) {
        attn_device *device;
        attn_stream *stream;
        attn_error err = { 0 };
        assert_int_equal(attn_device_open(backends[n], 0, &(attn_device_options){ .threads = 1 }, &device, &err),
                         ATTN_OK);
        assert_int_equal(attn_stream_open(device, &stream, &err), ATTN_OK);
        assert_int_equal(attn_device_alloc(device, ROWS * TO, (void **)&there, &err), ATTN_OK);
        memset(back, 0, sizeof back);
        const attn_rows in = { there, from, TO, FROM, WIDTH, ROWS }, out = { back, there, FROM, TO, WIDTH, ROWS },
                        none = { there, from, TO, FROM, WIDTH, 0 }, narrow = { there, from, TO, FROM, 0, ROWS };
        assert_int_equal(attn_copy_rows(stream, &in, ATTN_TO_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_copy_rows(stream, &none, ATTN_TO_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_copy_rows(stream, &narrow, ATTN_TO_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_copy_rows(stream, &out, ATTN_FROM_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);
        for (int i = 0; i < ROWS * FROM; i++) assert_int_equal(back[i], i % FROM < WIDTH ? from[i] : 0);
        attn_device_free(device, there);
        attn_stream_close(stream);
        attn_device_close(device);
    }
}

static void test_rows_past_the_end_of_memory_are_an_illegal_address(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    const attn_rows rows = { f.mirror, &f.host, sizeof f.host, sizeof f.host, 16, 2 };
    assert_int_equal(attn_copy_rows(f.stream, &rows, ATTN_TO_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    close_it(&f);
}

static void test_memory_that_was_never_written_is_nan(void **state)
{
    struct fixture f;
    (void)state;
    open_with(&f, "");
    assert_true(f.mirror->q[0] != f.mirror->q[0]);
    close_it(&f);
}

static void test_a_pointer_of_the_host_is_an_illegal_address(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    f.problem.k.data = f.host.k;
    assert_int_equal(put(&f, &err), ATTN_OK); /* a wrong address is found only when the problem runs, as on a GPU */
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    assert_non_null(strstr(err.text, "illegal address"));
    /* Every further call must return DEVICE_LOST. */
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    close_it(&f);
}

static void test_memory_freed_too_early_is_an_illegal_address(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    assert_int_equal(put(&f, &err), ATTN_OK);
    attn_device_free(f.device, f.mirror);
    f.mirror = NULL;
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    close_it(&f);
}

static void test_faults_come_when_the_script_says(void **state)
{
    static const struct {
        const char *script;
        attn_status expected[4]; /* the expected status of each of the test's four runs */
    } cases[] = {
        { "", { ATTN_OK, ATTN_OK, ATTN_OK, ATTN_OK } },
        { "launch.err=9@2", { ATTN_OK, ATTN_DEVICE, ATTN_OK, ATTN_OK } },
        { "launch.err=9@2+", { ATTN_OK, ATTN_DEVICE, ATTN_DEVICE, ATTN_DEVICE } },
        { "launch.err=9", { ATTN_DEVICE, ATTN_DEVICE, ATTN_DEVICE, ATTN_DEVICE } },
        { "launch.err=9@1,launch.err=701@3", { ATTN_DEVICE, ATTN_OK, ATTN_DEVICE, ATTN_OK } },
        { "sync.err=98@2", { ATTN_OK, ATTN_DEVICE, ATTN_OK, ATTN_OK } },
        { "sync.err=700@2", { ATTN_OK, ATTN_DEVICE_LOST, ATTN_DEVICE_LOST, ATTN_DEVICE_LOST } },
        { "copy.err=2@3", { ATTN_OK, ATTN_NO_MEMORY, ATTN_OK, ATTN_OK } },
        /* All runs of this test are on device 0, so an error of device 1 changes nothing. */
        { "1:launch.err=9@1", { ATTN_OK, ATTN_OK, ATTN_OK, ATTN_OK } },
        { "0:launch.err=9@1", { ATTN_DEVICE, ATTN_OK, ATTN_OK, ATTN_OK } },
        { "delay=1@1", { ATTN_OK, ATTN_OK, ATTN_OK, ATTN_OK } },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct fixture f;
        open_with(&f, cases[i].script);
        for (int round = 0; round < 4; round++) {
            attn_error err = { 0 };
            attn_status got = put(&f, &err);
            attn_error ignored;
            const attn_status waited = attn_stream_wait(f.stream, got == ATTN_OK ? &err : &ignored);
            if (got == ATTN_OK) got = waited;
            if (got != cases[i].expected[round])
                fail_msg("'%s', round %d: %s (%s), not %s", cases[i].script, round, attn_status_name(got), err.text,
                         attn_status_name(cases[i].expected[round]));
        }
        close_it(&f);
    }
}

static void test_a_held_stream_is_done_when_the_file_is_gone(void **state)
{
    char path[] = "/tmp/test_fake_XXXXXX", script[64];
    struct fixture f;
    attn_error err = { 0 };
    bool done = true;
    (void)state;
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    snprintf(script, sizeof script, "hold=%s@1", path);
    open_with(&f, script);
    assert_int_equal(put(&f, &err), ATTN_OK);
    struct stat told;
    assert_int_equal(stat(path, &told), 0);
    assert_int_equal(told.st_size, 1); /* the device adds a byte for each run that `hold` stops */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(attn_stream_done(f.stream, &done, &err), ATTN_OK);
        assert_false(done);
    }
    unlink(path);
    assert_int_equal(attn_stream_done(f.stream, &done, &err), ATTN_OK);
    assert_true(done);
    close_it(&f);
}

static void test_what_never_ends_never_does(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    bool done = true;
    (void)state;
    open_with(&f, "event.never@1");
    assert_int_equal(put(&f, &err), ATTN_OK);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(attn_stream_done(f.stream, &done, &err), ATTN_OK);
        assert_false(done);
    }
    close_it(&f);
}

static void test_outputs_can_be_nan_without_an_error(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "nan@1");
    assert_int_equal(put(&f, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    for (int i = 0; i < ELEMENTS; i++) assert_true(f.host.out[i] != f.host.out[i]);
    close_it(&f);
}

static void test_memory_has_a_limit_and_comes_back(void **state)
{
    const attn_device_options options = { .threads = 1, .memory_bytes = 1 << 20 };
    attn_device *device;
    attn_device_info info;
    attn_error err = { 0 };
    void *a, *b;
    (void)state;
    assert_int_equal(attn_device_open("fake", 0, &options, &device, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(device, 600000, &a, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(device, 600000, &b, &err), ATTN_NO_MEMORY);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_used, 600000);
    attn_device_free(device, a);
    assert_int_equal(attn_device_alloc(device, 600000, &b, &err), ATTN_OK);
    attn_device_free(device, b);
    attn_device_describe(device, &info);
    assert_int_equal(info.memory_used, 0);
    assert_string_equal(info.name, "fake:0");
    attn_device_close(device);
}

static void test_a_script_that_makes_no_sense_is_refused(void **state)
{
    static const char *const scripts[] = { "nonsense",     "launch.err",      "launch.err=",     "launch.err=x",
                                           "alloc.fail=3", "launch.err=9@",   "launch.err=9@0",  "launch.err=9@x",
                                           "hold=",        "launch.err=9@1-", "launch.err=9;nan" };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(scripts); i++) {
        const attn_device_options options = { .threads = 1, .script = scripts[i] };
        attn_device *device;
        attn_error err = { 0 };
        if (attn_device_open("fake", 0, &options, &device, &err) != ATTN_INVALID) fail_msg("'%s' is taken", scripts[i]);
        assert_non_null(strstr(err.text, "nothing is known of"));
    }
}

static void test_opening_can_fail(void **state)
{
    const attn_device_options options = { .threads = 1, .script = "open.err=46" };
    attn_device *device;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(attn_device_open("fake", 0, &options, &device, &err), ATTN_DEVICE_LOST);
    assert_null(device);
    assert_string_equal(err.text, "fake: open: device unavailable (error 46)");
}

static void test_times_between_streams(void **state)
{
    struct fixture f;
    attn_stream *other;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    assert_int_equal(attn_stream_open(f.device, &other, &err), ATTN_OK);
    assert_int_equal(attn_stream_mark(f.stream, 0, &err), ATTN_OK);
    assert_int_equal(attn_stream_mark(other, 3, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(other, &err), ATTN_OK);
    assert_true(attn_streams_between_us(f.stream, 0, other, 3) >= 0);
    assert_true(attn_streams_between_us(other, 3, f.stream, 0) <= 0);
    const double wrong = attn_streams_between_us(other, ATTN_MARKS, f.stream, 0);
    assert_true(wrong != wrong);
    attn_stream_close(other);
    close_it(&f);
}

/* ---- Tests of memory of other processes -------------------------------------------------------------------------- */

/* Device memory that "another process" lends: its handle, and the address at which the test sees it. */
struct loan {
    char name[40];
    uint8_t handle[ATTN_HANDLE_BYTES];
    struct host *here;
};

static struct loan lend(int device)
{
    static int number;
    struct loan l = { 0 };
    snprintf(l.name, sizeof l.name, "attn_fake_%d_%d", (int)getpid(), number++);
    snprintf((char *)l.handle, sizeof l.handle, "%d/%s", device, l.name);
    const int fd = shm_open(l.name, O_RDWR | O_CREAT | O_EXCL, 0600);
    assert_true(fd >= 0 && ftruncate(fd, sizeof *l.here) == 0);
    l.here = mmap(NULL, sizeof *l.here, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(l.here != MAP_FAILED);
    close(fd);
    return l;
}

static void take_back(struct loan *l)
{
    munmap(l->here, sizeof *l->here);
    shm_unlink(l->name);
}

static void test_memory_of_another_process_is_used_in_place(void **state)
{
    struct fixture f;
    struct loan loan = lend(0);
    struct host want;
    void *memory, *again;
    attn_error err = { 0 };
    (void)state;
    open_with(&f, "");
    *loan.here = f.host;
    assert_int_equal(put(&f, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    want = f.host;
    assert_int_equal(attn_device_import(f.device, loan.handle, sizeof want, &memory, &err), ATTN_OK);
    assert_int_equal(attn_device_import(f.device, loan.handle, 1, &again, &err), ATTN_OK);
    assert_ptr_equal(memory, again);
    attn_device_release_import(f.device, again);
    struct host *const there = memory;
    f.problem.q.data = there->q;
    f.problem.k.data = there->k;
    f.problem.out.data = there->out;
    assert_int_equal(attn_forward(f.stream, &f.problem, NULL, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    assert_memory_equal(loan.here->out, want.out, sizeof want.out);
    attn_device_release_import(f.device, memory);
    assert_int_equal(attn_forward(f.stream, &f.problem, NULL, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_DEVICE_LOST);
    close_it(&f);
    take_back(&loan);
}

static void test_handles_that_are_refused(void **state)
{
    struct fixture f;
    struct loan loan = lend(0), elsewhere = lend(1);
    uint8_t none[ATTN_HANDLE_BYTES] = "0/attn_no_such_object", noise[ATTN_HANDLE_BYTES];
    void *memory = &f;
    attn_error err = { 0 };
    (void)state;
    memset(noise, 0xa5, sizeof noise);
    open_with(&f, "import.err=999@6,import.err=2@5");
    assert_int_equal(attn_device_import(f.device, none, 1, &memory, &err), ATTN_INVALID);
    assert_null(memory);
    assert_string_equal(err.text, "fake: import: invalid resource handle (error 400)");
    assert_int_equal(attn_device_import(f.device, noise, 1, &memory, &err), ATTN_INVALID);
    assert_int_equal(attn_device_import(f.device, elsewhere.handle, 1, &memory, &err), ATTN_INVALID);
    assert_string_equal(err.text, "fake: the memory is of device 1, not of device 0");
    assert_int_equal(attn_device_import(f.device, loan.handle, sizeof(struct host) + 1, &memory, &err), ATTN_INVALID);
    assert_int_equal(attn_device_import(f.device, loan.handle, 1, &memory, &err), ATTN_NO_MEMORY);
    assert_int_equal(attn_device_import(f.device, loan.handle, 1, &memory, &err), ATTN_DEVICE_LOST);
    assert_int_equal(attn_device_import(f.device, loan.handle, 1, &memory, &err), ATTN_DEVICE_LOST);
    assert_null(memory);
    close_it(&f);
    take_back(&loan);
    take_back(&elsewhere);
}

static void test_a_processor_has_no_memory_that_others_lend(void **state)
{
    attn_device *cpu;
    const uint8_t handle[ATTN_HANDLE_BYTES] = { 0 };
    void *memory;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(attn_device_open("cpu", 0, NULL, &cpu, &err), ATTN_OK);
    assert_int_equal(attn_device_import(cpu, handle, 1, &memory, &err), ATTN_UNSUPPORTED);
    assert_null(memory);
    attn_device_close(cpu);
}

static void test_its_truth_takes_a_step_for_each_head_and_is_what_the_host_finds(void **state)
{
    struct fixture f;
    attn_error err = { 0 };
    attn_truth_cost cost;
    attn_truth_distance found[ATTN_TRUTH_RESULTS];
    attn_verification wanted;
    struct host host;
    double out[ELEMENTS];
    void *truth, *workspace, *distances;
    int64_t step = 0;
    int steps = 0;
    (void)state;
    open_with(&f, "");
    attn_problem here = f.problem;
    here.q.data = f.host.q, here.k.data = f.host.k, here.v.data = f.host.v;
    here.out.data = f.host.out, here.lse.data = f.host.lse;
    assert_int_equal(attn_truth_need(attn_device_capabilities(f.device), &here, &cost, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(f.device, sizeof out, &truth, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(f.device, cost.workspace_bytes, &workspace, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(f.device, sizeof found, &distances, &err), ATTN_OK);
    assert_int_equal(put(&f, &err), ATTN_OK);
    const attn_truth to = { .out = truth };
    for (; step != ATTN_NO_MORE_STEPS; steps++)
        assert_int_equal(attn_truth_some(f.stream, &f.problem, &to, workspace, &step, &err), ATTN_OK);
    assert_int_equal(steps, B * H);
    assert_int_equal(attn_truth_compare(f.stream, &f.problem, &to, distances, &err), ATTN_OK);
    assert_int_equal(attn_copy(f.stream, found, distances, sizeof found, ATTN_FROM_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_copy(f.stream, out, truth, sizeof out, ATTN_FROM_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(f.stream, &err), ATTN_OK);
    host = f.host;
    here.out.data = host.out;
    assert_int_equal(attn_verify(&here, -1, &wanted, &err), ATTN_OK);
    assert_true(found[0].max_abs == wanted.max_abs && found[0].largest == wanted.largest && wanted.max_abs > 0);
    for (int n = 1; n < ATTN_TRUTH_RESULTS; n++) assert_true(found[n].max_abs == 0 && found[n].largest == 0);
    /* `out` is [B, S, H, D], but the float64 results are [B, H, S, D]. */
    for (int i = 0; i < S; i++)
        for (int h = 0; h < H; h++)
            for (int d = 0; d < D; d++)
                assert_true(fabs(out[(h * S + i) * D + d] - host.out[(i * H + h) * D + d]) < 1e-5);
    attn_device_free(f.device, truth);
    attn_device_free(f.device, workspace);
    attn_device_free(f.device, distances);
    close_it(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_table_of_errors_says_which_ones_are_sticky),
        cmocka_unit_test(test_an_error_of_no_table_counts_as_sticky),
        cmocka_unit_test(test_every_row_of_the_table_is_consistent),
        cmocka_unit_test(test_it_computes_what_the_cpu_computes),
        cmocka_unit_test(test_its_truth_takes_a_step_for_each_head_and_is_what_the_host_finds),
        cmocka_unit_test(test_a_merge_is_done_in_order_and_in_its_own_memory),
        cmocka_unit_test(test_a_device_copies_from_another_one_that_works),
        cmocka_unit_test(test_nothing_happens_before_the_stream_is_asked),
        cmocka_unit_test(test_rows_are_copied_to_their_places_and_nothing_beside_them),
        cmocka_unit_test(test_rows_past_the_end_of_memory_are_an_illegal_address),
        cmocka_unit_test(test_memory_that_was_never_written_is_nan),
        cmocka_unit_test(test_a_pointer_of_the_host_is_an_illegal_address),
        cmocka_unit_test(test_memory_freed_too_early_is_an_illegal_address),
        cmocka_unit_test(test_faults_come_when_the_script_says),
        cmocka_unit_test(test_a_held_stream_is_done_when_the_file_is_gone),
        cmocka_unit_test(test_what_never_ends_never_does),
        cmocka_unit_test(test_outputs_can_be_nan_without_an_error),
        cmocka_unit_test(test_memory_has_a_limit_and_comes_back),
        cmocka_unit_test(test_a_script_that_makes_no_sense_is_refused),
        cmocka_unit_test(test_opening_can_fail),
        cmocka_unit_test(test_times_between_streams),
        cmocka_unit_test(test_memory_of_another_process_is_used_in_place),
        cmocka_unit_test(test_handles_that_are_refused),
        cmocka_unit_test(test_a_processor_has_no_memory_that_others_lend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
