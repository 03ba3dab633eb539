/* test_keyed_hash.c: compares the keyed hash with published results of SipHash-2-4. Another key or another owner must
 * give another hash. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/base/keyed_hash.h"

/* SipHash's test vectors: the key is 00 01 .. 0f, and the message of n bytes is 00 01 .. (n - 1). keyed_hash() takes
 * the first eight bytes of the message as the owner. */
static void test_the_hash_has_the_published_answers_of_siphash(void **state)
{
    static const struct {
        size_t bytes;
        uint64_t hash;
    } cases[] = {
        { 8, UINT64_C(0x93f5f5799a932462) },  { 9, UINT64_C(0x9e0082df0ba9e4b0) },
        { 10, UINT64_C(0x7a5dbbc594ddb9f3) }, { 11, UINT64_C(0xf4b32f46226bada7) },
        { 12, UINT64_C(0x751e8fbc860ee5fb) }, { 13, UINT64_C(0x14ea5627c0843d90) },
        { 14, UINT64_C(0xf723ca908e7af2ee) }, { 15, UINT64_C(0xa129ca6149be45e5) },
        { 16, UINT64_C(0x3f2acc7f57c29bdb) }, { 63, UINT64_C(0x958a324ceb064572) },
    };
    const struct hash_key key = { UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908) };
    unsigned char message[64];
    (void)state;
    for (int i = 0; i < 64; i++) message[i] = (unsigned char)i;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(keyed_hash(&key, UINT64_C(0x0706050403020100), message + 8, cases[i].bytes - 8),
                         cases[i].hash);
}

static void test_another_key_or_another_owner_is_another_hash(void **state)
{
    struct hash_key one, other;
    (void)state;
    assert_true(keyed_hash_draw(&one) && keyed_hash_draw(&other));
    assert_memory_not_equal(&one, &other, sizeof one);
    assert_int_equal(keyed_hash_name(&one, &one, "name"), keyed_hash_name(&one, &one, "name"));
    assert_int_not_equal(keyed_hash_name(&one, &one, "name"), keyed_hash_name(&other, &one, "name"));
    assert_int_not_equal(keyed_hash_name(&one, &one, "name"), keyed_hash_name(&one, &other, "name"));
    assert_int_not_equal(keyed_hash_name(&one, &one, "name"), keyed_hash_name(&one, &one, "names"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_hash_has_the_published_answers_of_siphash),
        cmocka_unit_test(test_another_key_or_another_owner_is_another_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
