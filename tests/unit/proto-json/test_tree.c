/* Trees: what a scanner wrote becomes what cJSON makes of it; text that stands in a string of a request: a list of
 * words is read in a way of its own, and becomes what it becomes in the other. */
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

/* Two at a time, as of bodies that arrive at once; each has more than a block holds,
 * and pieces that are longer than one. */
static void test_trees_of_a_memory_go_with_it(void **state)
{
    (void)state;
    enum { WORDS = 1000, LONG = 30000 };
    static char long_word[LONG + 1];
    struct tree_memory memories[2] = { 0 };
    cJSON *lists[2];
    memset(long_word, 'x', LONG);
    for (int i = 0; i < 2 * WORDS; i++) {
        char word[32];
        tree_enter(&memories[i % 2]);
        if (i < 2) assert_non_null(lists[i] = tree_keep("[]", sizeof "[]"));
        snprintf(word, sizeof word, "word %d", i);
        cJSON *const piece = cJSON_CreateString(i / 2 % 100 == 99 ? long_word : word);
        cJSON_Delete(cJSON_CreateString(word));
        assert_true(cJSON_AddItemToArray(lists[i % 2], piece));
        tree_leave();
        cJSON_Delete(cJSON_CreateString(word)); /* one of malloc() */
    }
    for (int m = 0; m < 2; m++) {
        int i = m;
        for (const cJSON *one = lists[m]->child; one; one = one->next, i += 2) {
            char word[32];
            snprintf(word, sizeof word, "word %d", i);
            assert_string_equal(one->valuestring, i / 2 % 100 == 99 ? long_word : word);
        }
        assert_int_equal(i, 2 * WORDS + m);
        tree_forget(&memories[m]);
        assert_null(memories[m].last);
        tree_forget(&memories[m]);
    }
}

/* As scanners write them. */
static const char *const skeletons[] = {
    "{}",
    "[]",
    "true",
    "false",
    "null",
    "0",
    "1234567",
    "\"\"",
    "\"stext\"",
    "{\"q\":{\"shape\":[\"n1\",\"n-2\"],\"data\":0},\"k\":1,\"\":[[],{},[[null]]],\"causal\":true,\"q\":false}",
    "[[[[[]]]],{\"a\":{\"b\":{\"c\":[{}]}}}]",
    "\"s\\\"\"",
    "\"s\\\\\"",
    "\"s\\\\\\\"x\\\\\\\\\"",
    "{\"\\\\\":\"s\\\\\",\"\\\"\":\"s[\\\"a\\\",\\\"b\\\"]\"}",
    "\"s\\b\\f\\n\\r\\t\\/\\\\\\\"/\"",
    "\"s\\u0041\\u00e9\\u00E9\\u07ff\\u0800\\ud7ff\\ue000\\uffff\"",
    "\"s\\ud800\\udc00 \\uDBFF\\uDFFF \\ud83d\\ude00\"",
    "\"s\xc3\xa9 \x7f \xf0\x9f\x98\x80\"",
};

static void test_a_skeleton_becomes_what_cjson_makes_of_it(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof skeletons / sizeof *skeletons; i++) {
        const size_t bytes = strlen(skeletons[i]) + 1;
        cJSON *const want = cJSON_ParseWithLengthOpts(skeletons[i], bytes, NULL, true);
        cJSON *const kept = tree_keep(skeletons[i], bytes), *const parsed = tree_parse(skeletons[i], bytes);
        assert_non_null(want);
        char *const says[] = { cJSON_PrintUnformatted(want), cJSON_PrintUnformatted(kept),
                               cJSON_PrintUnformatted(parsed) };
        assert_string_equal(says[1], says[0]);
        assert_string_equal(says[2], says[0]);
        for (int n = 0; n < 3; n++) cJSON_free(says[n]);
        tree_delete(parsed);
        cJSON_Delete(kept);
        cJSON_Delete(want);
    }
}

/* The last of a list is found from the first, as cJSON has it. */
static void test_a_list_can_be_added_to(void **state)
{
    static const char text[] = "[0,1]";
    (void)state;
    cJSON *const list = tree_keep(text, sizeof text);
    assert_true(cJSON_AddItemToArray(list, cJSON_CreateNumber(2)));
    cJSON_Delete(cJSON_DetachItemFromArray(list, 1));
    assert_int_equal(cJSON_GetArraySize(list), 2);
    assert_int_equal(cJSON_GetArrayItem(list, 1)->valueint, 2);
    cJSON_Delete(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_skeleton_becomes_what_cjson_makes_of_it),
        cmocka_unit_test(test_a_list_can_be_added_to),
        cmocka_unit_test(test_a_list_of_words_is_what_it_is_to_the_scanner),
        cmocka_unit_test(test_trees_of_a_memory_go_with_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
