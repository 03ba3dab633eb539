/* Text that stands in a string of a request: a list of words is read in a way of its own, and becomes what it becomes in the other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto-json/tree.h"

#define SIXTEEN "0123456789abcdef"
#define WORD63  SIXTEEN SIXTEEN SIXTEEN "0123456789abcde"

static const char *const texts[] = {
    "[\"a\"]",
    "[\"a\",\"b\"]",
    "[ \"a\" ,\n\"b\"\t,\r\"a\"]  ",
    "[\"\"]",
    "[\" !#[]~{}:,\"]",
    "[\"" WORD63 "\"]",
    "[\"" WORD63 "f\"]",
    /* not read so, but JSON */
    " [\"a\"]",
    "[]",
    "[ ]",
    "\"a\"",
    "[1]",
    "[\"a\",1]",
    "[[\"a\"]]",
    "{\"a\":1}",
    "[\"\\u0061\"]",
    "[\"a\\n\"]",
    "[\"\xc3\xa9\"]",
    "[\"\x7f\"]",
    "[\"a\",true]",
    "[\"a\",[\"b\"]]",
    /* no JSON */
    "",
    "[",
    "[\"",
    "[\"a",
    "[\"a\"",
    "[\"a\",",
    "[\"a\",]",
    "[\"a\" \"b\"]",
    "[\"a\"]x",
    "[\"a\"]]",
    "[,\"a\"]",
    "[\"a\tb\"]",
    "[\"\xff\"]",
    "['a']",
    "[\"\\x\"]",
};

static attn_status read_text(const char *text, int most, int *values, cJSON **value)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    limits.values = most;
    *values = 5;
    *value = NULL;
    return tree_of_text(text, &limits, values, value);
}

static void test_a_list_of_words_is_what_it_is_to_the_scanner(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        for (int most = 5; most < 10; most++) {
            cJSON *one, *other;
            char behind_a_space[128]; /* what begins so is left to the scanner */
            int values, others;
            snprintf(behind_a_space, sizeof behind_a_space, " %s", texts[i]);
            const attn_status status = read_text(texts[i], most, &values, &one);
            const attn_status want = read_text(behind_a_space, most, &others, &other);
            if (status != want || values != others || (one == NULL) != (other == NULL) ||
                (one && !cJSON_Compare(one, other, true)))
                fail_msg("%s: status %d %d, %d %d values", texts[i], status, want, values, others);
            cJSON_Delete(one);
            cJSON_Delete(other);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_a_list_of_words_is_what_it_is_to_the_scanner) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
