/* test_memory.c: tests of mirrors (copies on a device of blocks of host memory), which must be found quickly even for a
 * large batch. */
#include "tests/unit/server/jobs.h"

#include "server/device/internal.h"

/* JOBS: the most that --max-batch allows; REGION: bytes of each block of a job's memory */
enum { JOBS = 1024, REGION = 256 };

struct scene {
    struct device device;
    struct slot slot;
    /* memory of the jobs; each job has one block for inputs, one for tables and one for outputs */
    char *memory;
    struct staging_block inputs[JOBS], tables[JOBS];
    struct job jobs[JOBS];
    proto_call call; /* without items */
};

static void open_scene(struct scene *s)
{
    attn_error err = { 0 };
    *s = (struct scene){ .memory = malloc(3 * JOBS * 2 * REGION) };
    setenv("ATTN_FAKE_DEVICES", "1", 1);
    setenv("ATTN_FAKE_SCRIPT", "", 1);
    if (attn_device_open("fake", 0, NULL, &s->device.handle, &err) != ATTN_OK) fail_msg("%s", err.text);
    /* 619 has no common factor with JOBS, so i * 619 % JOBS takes every value once, in an order that looks random. */
    for (int i = 0; i < JOBS; i++) {
        char *const at = s->memory + (size_t)(i * 619 % JOBS) * 2 * REGION, *const next = at + JOBS * 2 * REGION;
        s->inputs[i] = (struct staging_block){ .memory = at, .bytes = REGION };
        s->tables[i] = (struct staging_block){ .memory = next, .bytes = REGION };
        s->jobs[i] = (struct job){ .call = &s->call,
                                   .inputs = &s->inputs[i],
                                   .inputs_used = REGION - 1,
                                   .tables = &s->tables[i],
                                   .tables_used = REGION,
                                   .outputs = { next + JOBS * 2 * REGION, REGION } };
    }
}

static void close_scene(struct scene *s)
{
    memory_drop_mirrors(&s->device, &s->slot);
    memory_close_slot(s->device.handle, &s->slot);
    attn_device_close(s->device.handle);
    free(s->memory);
}

/* Finds the address by a search through all mirrors, to check the fast search. */
static void *address_by_looking_at_all(const struct slot *slot, char *address)
{
    for (int i = 0; i < slot->mirror_count; i++) {
        const struct mirror *const m = &slot->mirrors[i];
        if (m->host.memory && address >= m->host.memory && address < m->host.memory + m->host.bytes)
            return m->device + (address - m->host.memory);
    }
    return address;
}

static void test_every_address_of_a_large_batch_has_its_place_on_the_device(void **state)
{
    struct scene *s = malloc(sizeof *s);
    attn_error err;
    void *scratch;
    (void)state;
    open_scene(s);
    assert_ptr_equal(memory_address(&s->slot, s->memory), s->memory);
    for (int i = 0; i < JOBS; i++) {
        assert_int_equal(memory_take_mirrors(&s->device, &s->slot, &s->jobs[i], &err), ATTN_OK);
        if (i % 100 == 0) assert_int_equal(memory_take(&s->device, &s->slot, REGION, &scratch, &err), ATTN_OK);
    }
    assert_int_equal(s->slot.region_count, 3 * JOBS);
    for (int i = 0; i < JOBS; i += 7)
        assert_int_equal(memory_take_mirrors(&s->device, &s->slot, &s->jobs[i], &err), ATTN_OK);
    assert_int_equal(s->slot.region_count, 3 * JOBS);
    assert_int_equal(s->slot.mirror_count, 3 * JOBS + 11);
    for (int at = 0; at < 3 * JOBS * 2 * REGION; at += 37)
        assert_ptr_equal(memory_address(&s->slot, s->memory + at), address_by_looking_at_all(&s->slot, s->memory + at));
    for (int i = 0; i < JOBS; i++) {
        char *const end = (char *)s->inputs[i].memory + REGION - 1;
        /* A tensor without elements may have the address right after a block. */
        assert_ptr_equal(memory_address(&s->slot, end), end);
        assert_ptr_not_equal(memory_address(&s->slot, end - 1), end - 1);
    }
    memory_drop_mirrors(&s->device, &s->slot);
    assert_ptr_equal(memory_address(&s->slot, s->memory), s->memory);
    close_scene(s);
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_address_of_a_large_batch_has_its_place_on_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
