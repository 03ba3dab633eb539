/* test_early_load.c: tests of early_load.h, which makes CUDA load all kernels before the server is ready. The tests
 * check for which GPUs it may do so, and that it keeps the user's own setting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <stdlib.h>

#include <cmocka.h>

#include "server/device/early_load.h"

static void test_machine_code_runs_on_later_gpus_of_the_same_generation(void **state)
{
    (void)state;
    assert_true(early_load_runs("80 89 90", 8, 0));
    assert_true(early_load_runs("80 89 90", 8, 6));
    assert_true(early_load_runs("80 89 90", 9, 0));
    assert_true(early_load_runs("120", 12, 1));
    assert_false(early_load_runs("80 89 90", 10, 0));
    assert_false(early_load_runs("80 89 90", 12, 0));
    assert_false(early_load_runs("80 89 90", 7, 5));
    assert_false(early_load_runs("89", 8, 6));
    assert_false(early_load_runs("", 8, 0));
    assert_false(early_load_runs("all", 8, 0));
}

static void test_what_the_user_has_set_stays(void **state)
{
    (void)state;
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    early_load_kernels();
    assert_string_equal(getenv("CUDA_MODULE_LOADING"), "LAZY");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_machine_code_runs_on_later_gpus_of_the_same_generation),
        cmocka_unit_test(test_what_the_user_has_set_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
