/* test_tree.c: compares the trees of clients' JSON with those of cJSON. A list of plain words in a string (such as
 * cache ids in KServe) is read without the scanner, and must give the same tree. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto-json/scan.h"
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
    /* These texts are valid JSON, but the fast reader of lists leaves them to the scanner. */
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
    /* not JSON */
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
            char behind_a_space[128];
            int values, others;
            struct tree_memory memory = { 0 };
            tree_enter(&memory);
            snprintf(behind_a_space, sizeof behind_a_space, " %s", texts[i]);
            const attn_status status = read_text(texts[i], most, &values, &one);
            const attn_status want = read_text(behind_a_space, most, &others, &other);
            if (status != want || values != others || (one == NULL) != (other == NULL) ||
                (one && !cJSON_Compare(one, other, true)))
                fail_msg("%s: status %d %d, %d %d values", texts[i], status, want, values, others);
            tree_leave();
            tree_forget(&memory);
        }
}

/* Two tree_memories make trees alternately, as for two bodies that arrive at the same time. Each tree_memory needs
 * more than one block. */
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
        if (i < 2) assert_non_null(lists[i] = tree_parse("[]", 2));
        snprintf(word, sizeof word, "word %d", i);
        cJSON *const piece = cJSON_CreateString(i / 2 % 100 == 99 ? long_word : word);
        cJSON_Delete(cJSON_CreateString(word));
        assert_true(cJSON_AddItemToArray(lists[i % 2], piece));
        tree_leave();
        cJSON_Delete(cJSON_CreateString(word));
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

static const char *const bodies[] = {
    "{}",
    "[]",
    "true",
    "false",
    "null",
    "0",
    "-1234567",
    "\"\"",
    "\"text\"",
    "{\"q\":{\"shape\":[1,-2],\"dtype\":\"n1\"},\"k\":1.5,\"\":[[],{},[[null]]],\"causal\":true,\"q\":false}",
    "[[[[[]]]],{\"a\":{\"b\":{\"c\":[{}]}}}]",
    "\"\\\"\"",
    "\"\\\\\"",
    "\"\\\\\\\"x\\\\\\\\\"",
    "{\"\\\\\":\"\\\\\",\"\\\"\":\"[\\\"a\\\",\\\"b\\\"]\"}",
    "\"\\b\\f\\n\\r\\t\\/\\\\\\\"/\"",
    "\"\\u0041\\u00e9\\u00E9\\u07ff\\u0800\\ud7ff\\ue000\\uffff\"",
    "\"\\ud800\\udc00 \\uDBFF\\uDFFF \\ud83d\\ude00\"",
    "\"\xc3\xa9 \x7f \xf0\x9f\x98\x80\"",
};

static void test_a_body_becomes_what_cjson_makes_of_it(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        const proto_limits limits = PROTO_LIMITS_DEFAULT;
        struct tree_memory memory = { 0 };
        attn_error err;
        size_t bytes;
        cJSON *const want = cJSON_ParseWithOpts(bodies[i], NULL, true);
        scan *const s = scan_new_plain(&limits, 0);
        assert_int_equal(scan_feed(s, bodies[i], strlen(bodies[i]), &err), ATTN_OK);
        assert_int_equal(scan_finish(s, &err), ATTN_OK);
        const char *const rest = scan_rest(s, &bytes);
        tree_enter(&memory);
        const cJSON *const tree = tree_parse(rest, bytes);
        tree_leave();
        assert_non_null(want);
        char *const says[] = { cJSON_PrintUnformatted(want), cJSON_PrintUnformatted(tree) };
        assert_string_equal(says[1], says[0]);
        for (int n = 0; n < 2; n++) cJSON_free(says[n]);
        tree_forget(&memory);
        scan_free(s);
        cJSON_Delete(want);
    }
}

/* In the tree of a JSON body, strings, the client's numbers (which keep their text) and the scanner's indices become
 * nodes of different types. */
static void test_a_node_is_what_its_type_says(void **state)
{
    static const char text[] = "[\"sn1\",\"n1e400\",7]";
    struct tree_memory memory = { 0 };
    (void)state;
    tree_enter(&memory);
    const cJSON *const list = tree_parse(text, sizeof text - 1), *const string = list->child,
                       *const number = string->next, *const index = number->next;
    tree_leave();
    assert_string_equal(tree_string(string), "n1");
    assert_null(tree_number(string));
    assert_string_equal(tree_number(number), "1e400");
    assert_null(tree_string(number));
    assert_true(cJSON_IsNumber(index));
    assert_int_equal(index->valueint, 7);
    assert_true(!tree_string(index) && !tree_number(index));
    tree_forget(&memory);
}

/* The first node of a list must point to the last, as in cJSON. */
static void test_a_list_can_be_added_to(void **state)
{
    struct tree_memory memory = { 0 };
    (void)state;
    tree_enter(&memory);
    cJSON *const list = tree_parse("[0,1]", 5);
    assert_true(cJSON_AddItemToArray(list, cJSON_CreateNumber(2)));
    cJSON_Delete(cJSON_DetachItemFromArray(list, 1));
    assert_int_equal(cJSON_GetArraySize(list), 2);
    assert_int_equal(cJSON_GetArrayItem(list, 1)->valueint, 2);
    tree_leave();
    tree_forget(&memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_body_becomes_what_cjson_makes_of_it),
        cmocka_unit_test(test_a_node_is_what_its_type_says),
        cmocka_unit_test(test_a_list_can_be_added_to),
        cmocka_unit_test(test_a_list_of_words_is_what_it_is_to_the_scanner),
        cmocka_unit_test(test_trees_of_a_memory_go_with_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
