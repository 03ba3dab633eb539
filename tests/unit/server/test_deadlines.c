/* test_deadlines.c: compares the heap of deadlines with a search through all deadlines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "server/base/deadlines.h"

enum { COUNT = 500 };

static int64_t earliest(const struct deadline *list)
{
    int64_t at = INT64_MAX;
    for (int i = 0; i < COUNT; i++)
        if (list[i].place && list[i].at_ns < at) at = list[i].at_ns;
    return at;
}

static void test_the_next_is_always_the_earliest(void **state)
{
    (void)state;
    struct deadlines all = { 0 };
    struct deadline list[COUNT] = { 0 };
    int in = 0;
    srand(1);
    for (int step = 0; step < 50000; step++) {
        struct deadline *d = &list[rand() % COUNT];
        if (d->place) {
            deadlines_remove(&all, d);
            in--;
        } else {
            d->at_ns = rand() % 300; /* a small range, so that many deadlines are equal */
            assert_true(deadlines_add(&all, d));
            in++;
        }
        assert_int_equal(all.count, in);
        const struct deadline *next = deadlines_next(&all);
        assert_true(in == 0 ? next == NULL : next->at_ns == earliest(list));
    }
    int64_t last = INT64_MIN;
    for (struct deadline *next; (next = deadlines_next(&all)); last = next->at_ns, deadlines_remove(&all, next))
        assert_true(next->at_ns >= last);
    deadlines_clear(&all);
}

static void test_removing_what_is_not_in_does_nothing(void **state)
{
    (void)state;
    struct deadlines all = { 0 };
    struct deadline one = { 0 };
    deadlines_remove(&all, &one);
    assert_null(deadlines_next(&all));
    assert_true(deadlines_add(&all, &one));
    deadlines_remove(&all, &one);
    deadlines_remove(&all, &one);
    assert_int_equal(all.count, 0);
    deadlines_clear(&all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_next_is_always_the_earliest),
        cmocka_unit_test(test_removing_what_is_not_in_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
