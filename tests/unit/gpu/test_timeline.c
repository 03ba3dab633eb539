/* test_timeline.c: tests the functions by which tests/gpu/overlap.c finds out whether requests overlap on a GPU. The
 * tests use times that were recorded on a GPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/gpu/timeline.h"

/* Times recorded on one H200. Request 0 was copied to the host from 6.68 to 8.07 ms, while the kernel of request 1 ran.
 * When request 0 ran alone, the same copy took twice as long, because something else disturbed it. */
static const struct times recorded[] = {
    { { 0, 2980, 6680, 8070 } },
    { { 2980, 5960, 10440, 11830 } },
};

static void test_a_copy_that_ran_beside_a_kernel_all_the_time_overlaps_whatever_a_copy_alone_took(void **state)
{
    (void)state;
    assert_true(share_beside_others(recorded, 2, STAGE_OUT) > 0.99);
    assert_true(share_beside_others(recorded, 2, STAGE_IN) > 0.5);
}

/* Times recorded on one H200, where copying a request to the device takes longer than its kernel. Request 0 is copied
 * to the host from 6.79 to 8.15 ms, while request 1 is copied to the device until 7.71 ms, and then computed. */
static void test_a_copy_out_beside_the_next_copy_in_overlaps_though_no_kernel_can_run_yet(void **state)
{
    (void)state;
    const struct times slow_in[] = {
        { { 0, 3800, 6790, 8150 } },
        { { 3800, 7710, 10720, 12040 } },
        { { 7710, 11610, 14610, 15920 } },
        { { 11610, 15460, 18450, 19680 } },
    };
    assert_true(share_beside_others(slow_in, 4, STAGE_OUT) > 0.99);
    assert_true(share_beside_others(slow_in, 4, STAGE_IN) > 0.5);
}

static void test_stages_one_after_the_other_do_not_overlap(void **state)
{
    (void)state;
    const struct times apart[] = { { { 0, 1, 2, 3 } }, { { 3, 4, 5, 6 } } };
    assert_true(share_beside_others(apart, 2, STAGE_IN) == 0);
    assert_true(share_beside_others(apart, 2, STAGE_OUT) == 0);
}

static void test_a_copy_that_waited_for_its_engine_is_not_said_to_have_run(void **state)
{
    (void)state;
    /* Times in microseconds: both copies to the device were queued at 0, and the second waited for the first. */
    const struct times queued[] = { { { 0, 10, 11, 12 } }, { { 0, 20, 21, 22 } } };
    assert_true(stage_began(queued, 1, STAGE_IN) == 10);
    assert_true(share_beside_others(queued, 2, STAGE_IN) == 0.2);
}

static void test_the_least_of_each_stage_is_kept(void **state)
{
    (void)state;
    struct times least = { { 0 } };
    const struct times rounds[] = { { { 0, 3, 8, 11 } }, { { 0, 4, 8, 10 } } };
    for (int i = 0; i < 2; i++) keep_least(&least, &rounds[i]);
    assert_true(least.at[1] == 3 && least.at[2] == 7 && least.at[3] == 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_that_ran_beside_a_kernel_all_the_time_overlaps_whatever_a_copy_alone_took),
        cmocka_unit_test(test_a_copy_out_beside_the_next_copy_in_overlaps_though_no_kernel_can_run_yet),
        cmocka_unit_test(test_stages_one_after_the_other_do_not_overlap),
        cmocka_unit_test(test_a_copy_that_waited_for_its_engine_is_not_said_to_have_run),
        cmocka_unit_test(test_the_least_of_each_stage_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
