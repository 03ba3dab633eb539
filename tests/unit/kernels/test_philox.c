/* test_philox.c: compares the Philox random generator with published results, and tests the mapping of elements to
 * counters, which all backends share. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/philox.h"

/* The numbers come from kat_vectors of Random123, the library of Philox's authors. */
static void test_known_answers(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } cases[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        attn_philox counter;
        memcpy(counter.word, cases[n].counter, sizeof counter.word);
        counter = attn_philox4x32_10(counter, cases[n].key[0], cases[n].key[1]);
        assert_memory_equal(counter.word, cases[n].answer, sizeof counter.word);
    }
}

/* Philox turns the counter (j div 8, i, head, 0) into eight lanes of 16 bits. Element j of row i gets lane j mod 8. The
 * key is the seed, its low word first. */
static void test_an_element_has_its_own_lane(void **state)
{
    const uint64_t seed = UINT64_C(0x299f31d0a4093822);
    (void)state;
    for (int64_t j = 0; j < 40; j++) {
        const attn_philox counter = { { (uint32_t)(j / 8), 77, 5, 0 } };
        const attn_philox words = attn_philox4x32_10(counter, 0xa4093822, 0x299f31d0);
        const uint32_t lane = words.word[j % 8 / 2] >> (j % 2 ? 16 : 0) & 0xffff;
        assert_int_equal(attn_dropout_half(attn_dropout_words(seed, 5, 77, j / 8), (int)(j % 8)), lane);
        assert_true(attn_dropout_keep(seed, 5, 77, j, lane));
        assert_false(attn_dropout_keep(seed, 5, 77, j, lane + 1));
    }
}

static void test_thresholds(void **state)
{
    (void)state;
    assert_int_equal(attn_dropout_threshold(0), 0);
    assert_int_equal(attn_dropout_threshold(0.5), 32768);
    assert_int_equal(attn_dropout_threshold(0.17), 11141);
    assert_int_equal(attn_dropout_threshold(0.999), 65470);
    assert_int_equal(attn_dropout_threshold(0.9999999), 65536);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_an_element_has_its_own_lane),
        cmocka_unit_test(test_thresholds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
