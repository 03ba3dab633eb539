/* test_habits.c: the words of proto-json/habits.c, each in a body. A word that a member, a dtype or a choice has taken
 * since, or that stands in two rows, would be told nothing or another cure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "proto-json/habits.h"

/* A body with the word at its place. */
static void body_of(const char *place, const char *word, char *body, size_t capacity)
{
    static const struct {
        const char *place, *body;
    } bodies[] = {
        { HABIT_PROBLEM, "{\"%s\":1}" },
        { HABIT_TENSOR, "{\"q\":{\"%s\":1}}" },
        { "keep_mask", "{\"keep_mask\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "bias", "{\"bias\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "layout", "{\"layout\":\"%s\"}" },
        { "alignment", "{\"alignment\":\"%s\"}" },
        { "encoding", "{\"encoding\":\"%s\"}" },
        { "outputs", "{\"outputs\":[\"%s\"]}" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(bodies); i++) {
        const char *const at = strstr(bodies[i].body, "%s");
        if (strcmp(bodies[i].place, place) != 0) continue;
        snprintf(body, capacity, "%.*s%s%s", (int)(at - bodies[i].body), bodies[i].body, word, at + strlen("%s"));
        return;
    }
    fail_msg("no body for '%s'", place);
}

static void check_word(const struct habit *habit, const char *word)
{
    struct decoded d = { 0 };
    char body[256], end[256];
    body_of(habit->place, word, body, sizeof body);
    decode_whole(&d, ATTN_OP_FORWARD, body);
    snprintf(end, sizeof end, "; %s", habit->cure);
    const size_t length = strlen(d.err.text), tail = strlen(end);
    if (d.status != ATTN_INVALID || length < tail || strcmp(d.err.text + length - tail, end) != 0)
        fail_msg("%s\nsays: %s\nmust end with: %s", body, d.err.text, end);
    decoded_clear(&d);
}

/* What a dtype is taken for is no word of the table, so that one look is enough. */
static void check_dtype(const struct habit *habit, const char *word)
{
    char name[HABIT_DTYPE_BYTES];
    proto_dtype dtype;
    if (proto_dtype_parse(word, &dtype)) fail_msg("%s is taken as it is", word);
    assert_string_equal(habit_dtype(word, name), habit->cure);
    assert_null(habit_of(HABIT_DTYPE, habit->cure));
}

static void test_every_word_gets_the_cure_of_its_row(void **state)
{
    (void)state;
    for (const struct habit *habit = habits; habit->place; habit++) {
        char words[256], *rest = NULL;
        assert_true((size_t)snprintf(words, sizeof words, "%s", habit->words) < sizeof words);
        for (char *word = strtok_r(words, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
            if (strcmp(habit->place, HABIT_DTYPE) == 0) check_dtype(habit, word);
            else check_word(habit, word);
    }
}

static void test_a_word_is_a_whole_one_in_any_case(void **state)
{
    (void)state;
    assert_string_equal(habit_of(HABIT_PROBLEM, "Softmax_Scale"), "write 'scale'");
    assert_string_equal(habit_of(HABIT_PROBLEM, "scale_factor"), "write 'scale'"); /* the last of its row */
    assert_null(habit_of(HABIT_PROBLEM, ""));
    assert_null(habit_of(HABIT_PROBLEM, " "));
    assert_null(habit_of(HABIT_PROBLEM, "causal_mas"));
    assert_null(habit_of(HABIT_PROBLEM, "query queries"));
    assert_null(habit_of(HABIT_TENSOR, "is_causal"));
}

static void test_many_hexadecimal_digits_are_known_by_the_first(void **state)
{
    static uint8_t bytes[3 << 20];
    (void)state;
    memset(bytes, 0xd3, sizeof bytes); /* "09PT": P is none, 0 and 9 are */
    assert_false(habit_is_hex(bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i += 3) memcpy(bytes + i, "\xd3\x4d\x34", 3); /* "0000" */
    assert_true(habit_is_hex(bytes, sizeof bytes));
    bytes[sizeof bytes / 2] = 0xff; /* far behind them */
    assert_true(habit_is_hex(bytes, sizeof bytes));
    bytes[0] = 0xff;
    assert_false(habit_is_hex(bytes, sizeof bytes));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_word_gets_the_cure_of_its_row),
        cmocka_unit_test(test_a_word_is_a_whole_one_in_any_case),
        cmocka_unit_test(test_many_hexadecimal_digits_are_known_by_the_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
