/* test_regions.c: tests of regions of shared memory: which are accepted, which caller sees a region, how long it lives,
 * and how it is read and written in pieces while it changes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "server/base/clock.h"
#include "server/regions/regions.h"

static const char *const prefixes[] = { "attn_unit_", "/other" };
enum { MIB = 1 << 20 };

struct object {
    char key[64];
    int fd;
};

static struct object object_of(int64_t bytes)
{
    static int number;
    struct object o;
    snprintf(o.key, sizeof o.key, "/attn_unit_%d_%d", (int)getpid(), number++);
    o.fd = shm_open(o.key, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(o.fd >= 0);
    assert_int_equal(ftruncate(o.fd, bytes), 0);
    return o;
}

static void object_clear(struct object *o)
{
    shm_unlink(o->key);
    close(o->fd);
}

/* Returns how many descriptors of this process, the test's own included, refer to the object. */
static int holders(const struct object *o)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++) {
        char name[32], path[256];
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        const ssize_t length = readlink(name, path, sizeof path - 1);
        if (length < 0) continue;
        path[length] = '\0';
        const char *const at = strstr(path, o->key);
        count += at && (at[strlen(o->key)] == '\0' || at[strlen(o->key)] == ' ');
    }
    return count;
}

static void wait_until_closed(const struct object *o)
{
    const int64_t until_ms = clock_ms() + 60000;
    while (holders(o) > 1) {
        if (clock_ms() > until_ms) fail_msg("%s is not closed", o->key);
        nanosleep(&(struct timespec){ 0, 500000 }, NULL);
    }
}

static proto_error register_as(struct regions *r, struct caller *caller, const char *name, const char *key,
                               int64_t offset, int64_t bytes)
{
    proto_region wanted = { .offset = offset, .bytes = bytes };
    proto_error error;
    attn_error why = { 0 };
    snprintf(wanted.key, sizeof wanted.key, "%s", key);
    if (regions_register(r, caller, name, &wanted, &error, &why)) return PROTO_ERROR_COUNT;
    assert_true(why.text[0] != '\0' && error < PROTO_ERROR_COUNT);
    return error;
}

static void must_register(struct regions *r, struct caller *caller, const char *name, const struct object *o,
                          int64_t offset, int64_t bytes)
{
    assert_int_equal(register_as(r, caller, name, o->key, offset, bytes), PROTO_ERROR_COUNT);
}

static void count_one(void *context, const struct region_facts *facts)
{
    assert_true(facts->name[0] && facts->key[0] && facts->bytes > 0);
    ++*(int *)context;
}

static int seen_by(struct regions *r, const struct caller *caller, const char *name)
{
    int count = 0;
    const int told = regions_visit(r, REGION_SYSTEM, caller, name, count_one, &count);
    assert_int_equal(told, count);
    return count;
}

static void test_a_region_is_seen_by_its_caller_alone(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY, *anna = caller_new(), *bert = caller_new();
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(4096), p = object_of(4096);
    int count;
    int64_t bytes;
    must_register(r, anna, "a", &o, 0, 4096);
    must_register(r, anna, "b", &o, 100, 1);
    must_register(r, bert, "a", &p, 4095, 1);
    assert_int_equal(register_as(r, anna, "a", p.key, 0, 64), PROTO_E_CONFLICT);
    assert_int_equal(register_as(r, bert, "c", o.key, 0, 64), PROTO_E_CONFLICT);
    assert_int_equal(register_as(r, &everybody, "c", o.key, 0, 64), PROTO_E_CONFLICT);
    assert_int_equal(seen_by(r, anna, NULL), 2);
    assert_int_equal(seen_by(r, anna, "b"), 1);
    assert_int_equal(seen_by(r, bert, "b"), 0);
    assert_int_equal(seen_by(r, &everybody, NULL), 0);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, bert, "b"), 0);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, bert, NULL), 1);
    regions_count(r, REGION_SYSTEM, &count, &bytes);
    assert_true(count == 2 && bytes == 4097);
    wait_until_closed(&p);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, anna, "a"), 1);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, anna, "a"), 0);
    object_clear(&p);
    regions_free(r);
    assert_int_equal(holders(&o), 1);
    object_clear(&o);
    caller_release(anna);
    caller_release(bert);
}

static bool is_not(void *context, const struct caller *caller)
{
    return caller != context;
}

static void test_callers_who_are_known_no_more_are_forgotten(void **state)
{
    (void)state;
    struct caller *anna = caller_new(), *bert = caller_new();
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(64), p = object_of(64);
    must_register(r, anna, "a", &o, 0, 64);
    must_register(r, bert, "b", &p, 0, 64);
    regions_forget(r, is_not, anna);
    wait_until_closed(&o);
    assert_int_equal(seen_by(r, anna, NULL), 0);
    assert_int_equal(seen_by(r, bert, NULL), 1);
    regions_free(r);
    caller_release(anna);
    caller_release(bert);
    object_clear(&o);
    object_clear(&p);
}

static void test_which_keys_and_ranges_are_taken(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(4096);
    static const char *const bad[] = { "attn",        "attn_unit/", "/attn_unit_/../x", "attn_unit_..", "//attn_unit_x",
                                       "attn_unit_*", "",           "attn_unit_\x80" };
    static const struct {
        int64_t offset, bytes;
    } beyond[] = { { 0, 4097 }, { 4096, 1 }, { 1, INT64_MAX }, { INT64_MAX, 1 }, { INT64_MAX, INT64_MAX } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(register_as(r, &everybody, "r", bad[i], 0, 1), PROTO_E_INVALID_REQUEST);
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        assert_int_equal(register_as(r, &everybody, "r", o.key, beyond[i].offset, beyond[i].bytes),
                         PROTO_E_INVALID_REQUEST);
    assert_int_equal(register_as(r, &everybody, "r", "attn_unit_nothing", 0, 1), PROTO_E_INVALID_REQUEST);
    assert_int_equal(register_as(r, &everybody, "r", "othernothing", 0, 1), PROTO_E_INVALID_REQUEST);
    assert_int_equal(seen_by(r, &everybody, NULL), 0);
    wait_until_closed(&o);
    must_register(r, &everybody, "r", &o, 4095, 1);
    /* The slash at the beginning of o.key may be left out. */
    assert_int_equal(register_as(r, &everybody, "s", o.key + 1, 0, 4096), PROTO_ERROR_COUNT);
    regions_free(r);
    object_clear(&o);
}

/* ---- Tests of requests that use a region of shared memory -------------------------------------------------------- */

static attn_status use(struct regions *r, const struct caller *caller, const char *name, attn_tensor_id id, bool output,
                       int64_t offset, int64_t bytes, struct region_uses **uses, attn_error *err)
{
    proto_shared shared = { .id = id, .output = output, .index = 3, .offset = offset, .bytes = bytes };
    snprintf(shared.region, sizeof shared.region, "%s", name);
    return region_uses_new(r, caller, &shared, 1, uses, err);
}

static void test_a_use_lies_within_its_region_and_outlives_it(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(4096);
    struct region_uses *uses;
    attn_error err = { 0 };
    must_register(r, &everybody, "r", &o, 96, 4000);
    assert_int_equal(use(r, &everybody, "s", ATTN_T_q, false, 0, 1, &uses, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.member, "/inputs/3/parameters/shared_memory_region");
    assert_int_equal(use(r, &everybody, "r", ATTN_T_out, true, 1, 4000, &uses, &err), ATTN_INVALID);
    assert_string_equal(err.member, "/outputs/3/parameters/shared_memory_byte_size");
    assert_int_equal(use(r, &everybody, "r", ATTN_T_q, false, 4000, 1, &uses, &err), ATTN_INVALID);
    assert_string_equal(err.member, "/inputs/3/parameters/shared_memory_offset");
    assert_int_equal(use(r, &everybody, "r", ATTN_T_q, false, INT64_MAX, INT64_MAX, &uses, &err), ATTN_INVALID);
    assert_null(uses);

    assert_int_equal(use(r, &everybody, "r", ATTN_T_q, false, 4, 6, &uses, &err), ATTN_OK);
    assert_int_equal(pwrite(o.fd, "abcdefghij", 10, 98), 10);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, &everybody, NULL), 1);
    shm_unlink(o.key);
    char memory[6];
    bool done;
    region_uses_place(uses, &(proto_shared){ .to = memory });
    assert_int_equal(region_uses_read(uses, INT64_MAX, &done, &err), ATTN_OK);
    assert_true(done);
    assert_memory_equal(memory, "cdefgh", 6);
    assert_int_equal(holders(&o), 2);
    region_uses_drop_inputs(&uses);
    assert_null(uses);
    wait_until_closed(&o);
    regions_free(r);
    object_clear(&o);
}

/* Registers `elements` float32 numbers at `data` as an output that goes to the region "r" of shared memory. */
static struct region_uses *output_use(struct regions *r, const struct caller *caller, void *data, int64_t elements)
{
    struct region_uses *uses;
    attn_error err = { 0 };
    attn_problem p = ATTN_PROBLEM_INIT;
    const int64_t shape[] = { 1, elements, 1, 1 };
    assert_int_equal(use(r, caller, "r", ATTN_T_out, true, 0, elements * 4 + 1, &uses, &err), ATTN_OK);
    p.out = attn_tensor_make(data, ATTN_F32, 4, shape);
    assert_int_equal(region_uses_bind(uses, &p, 1, &err), ATTN_OK);
    assert_int_equal(uses->output_bytes, elements * 4);
    return uses;
}

/* With a time limit of 0, each call moves one piece of 1 MiB. */
static void test_much_is_moved_in_pieces(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    const int64_t bytes = 5 * MIB / 2;
    struct object o = object_of(bytes + 4096);
    struct region_uses *uses;
    attn_error err = { 0 };
    uint8_t *const memory = malloc((size_t)bytes), *const back = malloc((size_t)bytes);
    bool done;
    assert_true(memory && back);
    for (int64_t i = 0; i < bytes; i++) memory[i] = (uint8_t)(i * 7 + (i >> 12));
    must_register(r, &everybody, "r", &o, 1, bytes + 4095);

    uses = output_use(r, &everybody, memory, bytes / 4);
    for (int piece = 0; piece < 3; piece++) {
        assert_int_equal(region_uses_write(uses, 0, &done, &err), ATTN_OK);
        assert_int_equal(uses->list[0].done, piece < 2 ? (piece + 1) * MIB : bytes);
    }
    assert_int_equal(region_uses_write(uses, 0, &done, &err), ATTN_OK);
    assert_true(done);
    region_uses_free(uses);
    assert_int_equal(pread(o.fd, back, (size_t)bytes, 1), bytes);
    assert_memory_equal(back, memory, (size_t)bytes);

    memset(back, 0, (size_t)bytes);
    assert_int_equal(use(r, &everybody, "r", ATTN_T_q, false, 0, bytes, &uses, &err), ATTN_OK);
    region_uses_place(uses, &(proto_shared){ .to = back });
    int calls = 0;
    do assert_int_equal(region_uses_read(uses, 0, &done, &err), ATTN_OK);
    while (calls++ < 10 && !done);
    assert_int_equal(calls, 4);
    assert_memory_equal(back, memory, (size_t)bytes);
    region_uses_free(uses);
    regions_free(r);
    object_clear(&o);
    free(memory);
    free(back);
}

static void test_an_object_that_becomes_shorter_between_two_pieces(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(3 * MIB);
    struct region_uses *uses;
    attn_error err = { 0 };
    uint8_t *const memory = calloc(1, 3 * MIB);
    struct stat st;
    bool done;
    must_register(r, &everybody, "r", &o, 0, 3 * MIB);
    assert_int_equal(use(r, &everybody, "r", ATTN_T_q, false, 0, 3 * MIB, &uses, &err), ATTN_OK);
    region_uses_place(uses, &(proto_shared){ .to = memory });
    assert_int_equal(region_uses_read(uses, 0, &done, &err), ATTN_OK);
    assert_int_equal(ftruncate(o.fd, MIB + 10), 0);
    /* The object ends 10 bytes after the first piece, so the second call reads 10 bytes, and the third fails. */
    assert_int_equal(region_uses_read(uses, 0, &done, &err), ATTN_OK);
    assert_int_equal(region_uses_read(uses, 0, &done, &err), ATTN_INVALID);
    assert_string_equal(err.text,
                        "q: the shared memory of the region 'r' has become shorter than it was when it was registered");
    assert_string_equal(err.member, "/inputs/3/parameters/shared_memory_region");
    region_uses_free(uses);

    assert_int_equal(ftruncate(o.fd, 3 * MIB), 0);
    uses = output_use(r, &everybody, memory, 3 * MIB / 4 - 1);
    assert_int_equal(region_uses_write(uses, 0, &done, &err), ATTN_OK);
    assert_int_equal(ftruncate(o.fd, 2 * MIB - 1), 0);
    assert_int_equal(region_uses_write(uses, 0, &done, &err), ATTN_INVALID);
    assert_int_equal(fstat(o.fd, &st), 0);
    assert_int_equal(st.st_size, 2 * MIB - 1);
    region_uses_free(uses);
    regions_free(r);
    object_clear(&o);
    free(memory);
}

static void test_outputs_must_fit_and_not_overlap(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    struct object o = object_of(4096);
    const int64_t out[] = { 1, 4, 1, 2 }, lse[] = { 1, 1, 4 };
    static const struct {
        int64_t out_at, lse_at, room;
        bool fits;
    } cases[] = {
        { 0, 32, 32, true }, { 16, 0, 32, true }, { 0, 31, 32, false }, { 15, 0, 32, false }, { 0, 32, 31, false }
    };
    attn_problem p = ATTN_PROBLEM_INIT;
    p.out = attn_tensor_make(&p, ATTN_F32, 4, out);
    p.lse = attn_tensor_make(&p, ATTN_F32, 3, lse);
    must_register(r, &everybody, "r", &o, 0, 4096);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const proto_shared shared[] = {
            { .id = ATTN_T_out, .output = true, .region = "r", .offset = cases[i].out_at, .bytes = cases[i].room },
            { .id = ATTN_T_lse, .output = true, .index = 1, .region = "r", .offset = cases[i].lse_at, .bytes = 100 },
        };
        struct region_uses *uses;
        attn_error err = { 0 };
        assert_int_equal(region_uses_new(r, &everybody, shared, 2, &uses, &err), ATTN_OK);
        assert_int_equal(region_uses_bind(uses, &p, 1, &err), cases[i].fits ? ATTN_OK : ATTN_INVALID);
        region_uses_free(uses);
    }
    regions_free(r);
    object_clear(&o);
}

/* ---- Tests of regions in a GPU's memory -------------------------------------------------------------------------- */

static attn_device *device_with(const char *script)
{
    const attn_device_options options = { .threads = 1, .script = script };
    attn_device *device;
    attn_error err = { 0 };
    if (attn_device_open("fake", 0, &options, &device, &err) != ATTN_OK) fail_msg("%s", err.text);
    return device;
}

/* Returns how often this process has mapped the object. */
static int mappings(const struct object *o)
{
    char line[512];
    int count = 0;
    FILE *const maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps)) count += strstr(line, o->key) != NULL;
    fclose(maps);
    return count;
}

static void wait_until_unmapped(const struct object *o)
{
    const int64_t until_ms = clock_ms() + 60000;
    while (mappings(o) > 0) {
        if (clock_ms() > until_ms) fail_msg("%s is not closed", o->key);
        nanosleep(&(struct timespec){ 0, 500000 }, NULL);
    }
}

static proto_error lend_as(struct regions *r, struct caller *caller, const char *name, const struct object *o,
                           int64_t bytes, attn_device *device, int number)
{
    proto_cuda_region wanted = { .device = 5, .bytes = bytes };
    proto_error error;
    attn_error why = { 0 };
    snprintf((char *)wanted.handle, sizeof wanted.handle, "0%.60s", o->key);
    if (regions_register_cuda(r, caller, name, &wanted, device, number, &error, &why)) return PROTO_ERROR_COUNT;
    assert_true(why.text[0] != '\0' && error < PROTO_ERROR_COUNT);
    assert_null(strstr(why.text, o->key));
    return error;
}

static void see_device(void *context, const struct region_facts *facts)
{
    assert_int_equal(facts->device_id, 5);
    ++*(int *)context;
}

static void test_memory_of_a_gpu_is_open_as_long_as_its_region(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY, *anna = caller_new();
    struct regions *r = regions_new(NULL, 0);
    attn_device *const device = device_with("import.err=400@4,import.err=700@5");
    struct object o = object_of(4096), p = object_of(64);
    int seen = 0, count;
    int64_t bytes;
    assert_int_equal(lend_as(r, anna, "a", &o, 4096, device, 0), PROTO_ERROR_COUNT);
    assert_int_equal(lend_as(r, anna, "a", &p, 64, device, 0), PROTO_E_CONFLICT);
    assert_int_equal(lend_as(r, &everybody, "b", &o, 64, device, 0), PROTO_E_CONFLICT);
    assert_int_equal(lend_as(r, &everybody, "b", &p, 65, device, 0), PROTO_E_INVALID_REQUEST);
    assert_int_equal(lend_as(r, &everybody, "b", &p, 64, device, 0), PROTO_E_INVALID_REQUEST);
    assert_int_equal(lend_as(r, &everybody, "b", &p, 64, device, 0), PROTO_E_UNAVAILABLE);
    wait_until_unmapped(&p);
    assert_int_equal(regions_visit(r, REGION_CUDA, anna, NULL, see_device, &seen), 1);
    assert_int_equal(seen_by(r, anna, NULL), 0);
    regions_count(r, REGION_CUDA, &count, &bytes);
    assert_true(seen == 1 && count == 1 && bytes == 4096);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, anna, NULL), 0);
    assert_int_equal(regions_unregister(r, REGION_SYSTEM, anna, "a"), 0);
    struct region_uses *uses;
    attn_error err = { 0 };
    assert_int_equal(use(r, anna, "a", ATTN_T_q, false, 0, 64, &uses, &err), ATTN_OK);
    assert_int_equal(regions_unregister(r, REGION_CUDA, anna, "a"), 1);
    /* region_uses_drop_inputs() must keep the region of q, because the job reads q in the GPU's memory. */
    region_uses_drop_inputs(&uses);
    assert_non_null(uses);
    assert_int_equal(mappings(&o), 1);
    region_uses_free(uses);
    wait_until_unmapped(&o);
    regions_free(r);
    attn_device_close(device); /* aborts if the device still has imported memory */
    object_clear(&o);
    object_clear(&p);
    caller_release(anna);
}

static void test_what_lies_in_a_gpus_memory_stays_there(void **state)
{
    (void)state;
    struct caller everybody = CALLER_EVERYBODY;
    struct regions *r = regions_new(prefixes, 2);
    attn_device *const device = device_with("");
    struct object o = object_of(4096), p = object_of(4096), s = object_of(4096);
    const int64_t shape[] = { 1, 4, 1, 2 }, lse[] = { 1, 1, 4 };
    assert_int_equal(lend_as(r, &everybody, "a", &o, 4096, device, 0), PROTO_ERROR_COUNT);
    assert_int_equal(lend_as(r, &everybody, "b", &p, 4096, device, 1), PROTO_ERROR_COUNT);
    /* One block of memory may be registered under two names. */
    assert_int_equal(lend_as(r, &everybody, "c", &o, 4096, device, 0), PROTO_ERROR_COUNT);
    must_register(r, &everybody, "s", &s, 0, 4096);
    static const struct {
        const char *q, *out, *lse;
        int64_t out_at, lse_at;
        size_t alignment;
        const char *says;
    } cases[] = {
        { "a", "a", "a", 64, 96, 1, NULL },
        { "a", "s", "s", 0, 32, 1, NULL },
        /* q lies in system memory and is copied before the job runs, so lse may overwrite it. */
        { "s", "a", "s", 0, 0, 1, NULL },
        { "a", "a", "a", 64, 92, 1, "lse: would be written over out, in the region 'a'" },
        { "a", "c", "s", 8, 0, 1, "out: would be written over q, in the region 'c'" },
        { "a", "a", "a", 66, 128, 1,
          "out: shared_memory_offset is 66, must be a multiple of 4 in the memory of a GPU" },
        { "a", "a", "a", 68, 128, 8,
          "out: shared_memory_offset is 68, must be a multiple of 8 in the memory of a GPU" },
        { "a", "b", "s", 0, 0, 1,
          "out: the region 'b' is in the memory of device 5, another tensor in that of a "
          "different one; all must be of one" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        proto_shared shared[] = {
            { .id = ATTN_T_q, .bytes = 32 },
            { .id = ATTN_T_out, .output = true, .offset = cases[i].out_at, .bytes = 32 },
            { .id = ATTN_T_lse, .output = true, .index = 1, .offset = cases[i].lse_at, .bytes = 16 },
        };
        char memory[3][64];
        struct region_uses *uses = NULL;
        attn_error err = { 0 };
        attn_problem problem = ATTN_PROBLEM_INIT;
        problem.q = attn_tensor_make(memory[0], ATTN_F32, 4, shape);
        problem.out = attn_tensor_make(memory[1], ATTN_F32, 4, shape);
        problem.lse = attn_tensor_make(memory[2], ATTN_F32, 3, lse);
        strcpy(shared[0].region, cases[i].q);
        strcpy(shared[1].region, cases[i].out);
        strcpy(shared[2].region, cases[i].lse);
        attn_status status = region_uses_new(r, &everybody, shared, 3, &uses, &err);
        if (status == ATTN_OK) status = region_uses_bind(uses, &problem, cases[i].alignment, &err);
        if (cases[i].says) {
            assert_int_equal(status, ATTN_INVALID);
            assert_string_equal(err.text, cases[i].says);
        } else {
            assert_int_equal(status, ATTN_OK);
            const bool in_place = *cases[i].out == 'a';
            assert_int_equal(uses->home, 0);
            assert_int_equal(uses->elsewhere >> ATTN_T_out & 1, in_place);
            assert_true(problem.out.data == (in_place ? uses->list[1].in_place : memory[1]));
            assert_int_equal(uses->writes, *cases[i].lse == 's');
            assert_int_equal(uses->output_bytes, (in_place ? 0 : 32) + (*cases[i].lse == 's' ? 16 : 0));
            assert_int_equal(uses->input_bytes, *cases[i].q == 's' ? 32 : 0);
        }
        region_uses_free(uses);
    }
    struct region_uses *uses;
    attn_error err = { 0 };
    assert_int_equal(use(r, &everybody, "a", ATTN_T_bias, false, 0, 4, &uses, &err), ATTN_INVALID);
    assert_string_equal(err.member, "/inputs/3/parameters/shared_memory_region");
    assert_int_equal(use(r, &everybody, "a", ATTN_T_q, false, 4096, 1, &uses, &err), ATTN_INVALID);
    regions_free(r);
    attn_device_close(device);
    object_clear(&o);
    object_clear(&p);
    object_clear(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_region_is_seen_by_its_caller_alone),
        cmocka_unit_test(test_callers_who_are_known_no_more_are_forgotten),
        cmocka_unit_test(test_which_keys_and_ranges_are_taken),
        cmocka_unit_test(test_a_use_lies_within_its_region_and_outlives_it),
        cmocka_unit_test(test_much_is_moved_in_pieces),
        cmocka_unit_test(test_an_object_that_becomes_shorter_between_two_pieces),
        cmocka_unit_test(test_outputs_must_fit_and_not_overlap),
        cmocka_unit_test(test_memory_of_a_gpu_is_open_as_long_as_its_region),
        cmocka_unit_test(test_what_lies_in_a_gpus_memory_stays_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
