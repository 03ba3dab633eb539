/* test_habits.c: the words of proto-json/habits.c, each in a body. A word that a member, a dtype or a choice has taken
 * since, or that stands in two rows, would be told nothing or another cure. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "proto-json/habits.h"

/* The operation of this name; PROTO_OP_COUNT: the place is none. */
static proto_op op_named(const char *place)
{
    proto_op op = 0;
    while (op < PROTO_OP_COUNT && strcmp(proto_operations[op].name, place) != 0) op++;
    return op;
}

/* A body with the word at its place. */
static void body_of(const char *place, const char *word, char *body, size_t capacity)
{
    static const struct {
        const char *place, *body;
    } bodies[] = {
        { HABIT_INPUT, "{\"inputs\":[{\"name\":\"q\",\"%s\":1}]}" },
        { HABIT_TENSOR, "{\"q\":{\"%s\":1}}" },
        { "q", "{\"q\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "k", "{\"k\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "v", "{\"v\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "keep_mask", "{\"keep_mask\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "bias", "{\"bias\":{\"shape\":[1,1,1,1],\"dtype\":\"%s\",\"data\":\"\"}}" },
        { "layout", "{\"layout\":\"%s\"}" },
        { "alignment", "{\"alignment\":\"%s\"}" },
        { "encoding", "{\"encoding\":\"%s\"}" },
        { "outputs", "{\"outputs\":[\"%s\"]}" },
    };
    if (op_named(place) < PROTO_OP_COUNT || strcmp(place, HABIT_CACHE) == 0 || strcmp(place, HABIT_LENGTH) == 0 ||
        strcmp(place, HABIT_KSERVE) == 0) {
        snprintf(body, capacity, "{\"%s\":1}", word);
        return;
    }
    for (size_t i = 0; i < ARRAY_SIZE(bodies); i++) {
        const char *const at = strstr(bodies[i].body, "%s");
        if (strcmp(bodies[i].place, place) != 0) continue;
        snprintf(body, capacity, "%.*s%s%s", (int)(at - bodies[i].body), bodies[i].body, word, at + strlen("%s"));
        return;
    }
    fail_msg("no body for '%s'", place);
}

/* The same of the JSON of a KServe request. */
static void refuse_kserve(const char *body, attn_error *err)
{
    static const proto_model model = { .name = "attention_forward", .op = (proto_op)ATTN_OP_FORWARD };
    struct decoded d = { 0 };
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d.memory };
    proto_decoder *const decoder = proto_decoder_new(&proto_kserve, model.op, &limits, &memory);
    proto_decoder_kserve(decoder, &model, (int64_t)strlen(body));
    if (proto_decoder_feed(decoder, body, strlen(body), err) == ATTN_OK)
        (void)proto_decoder_finish(decoder, &d.call, err);
    proto_decoder_free(decoder);
    decoded_clear(&d);
}

/* What the body is refused for, by who reads it at that place. */
static void refuse(const char *place, const char *body, attn_error *err)
{
    const proto_op op = op_named(place);
    *err = (attn_error){ 0 };
    if (strcmp(place, HABIT_CACHE) == 0) {
        proto_cache cache;
        if (proto_cache_read(body, strlen(body), &cache, err) == ATTN_OK) proto_cache_clear(&cache);
    } else if (strcmp(place, HABIT_LENGTH) == 0) {
        int64_t length;
        (void)proto_length_read(body, strlen(body), true, &length, err);
    } else if (strcmp(place, HABIT_KSERVE) == 0 || strcmp(place, HABIT_INPUT) == 0) {
        refuse_kserve(body, err);
    } else {
        struct decoded d = { 0 };
        decode_whole(&d, op < PROTO_OP_COUNT ? (attn_op)op : ATTN_OP_FORWARD, body);
        *err = d.err;
        decoded_clear(&d);
    }
    if (err->status != ATTN_INVALID) fail_msg("%s: %s\nis not refused: %s", place, body, err->text);
}

static void check_word(const struct habit *habit, const char *place, const char *word)
{
    attn_error err;
    char body[256], end[256];
    body_of(place, word, body, sizeof body);
    refuse(place, body, &err);
    /* What the message says already is not said twice: "belongs to backward, POST /v1/attention/backward". */
    const char *const path = strstr(habit->cure, "/v1/attention/"), *const said = path ? strstr(err.text, path) : NULL;
    if (said && strstr(err.text, ": belongs to ") && strstr(err.text, habit->cure) == NULL) return;
    snprintf(end, sizeof end, "; %s", habit->cure);
    const size_t length = strlen(err.text), tail = strlen(end);
    if (length < tail || strcmp(err.text + length - tail, end) != 0)
        fail_msg("%s: %s\nsays: %s\nmust end with: %s", place, body, err.text, end);
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

/* Calls `each` for every part of a list with spaces between them. */
static void for_each(const char *list, const struct habit *habit, const char *place,
                     void (*each)(const struct habit *habit, const char *place, const char *part))
{
    char parts[4096], *rest = NULL;
    assert_true((size_t)snprintf(parts, sizeof parts, "%s", list) < sizeof parts);
    for (char *part = strtok_r(parts, " ", &rest); part; part = strtok_r(NULL, " ", &rest)) each(habit, place, part);
}

static void check_word_at(const struct habit *habit, const char *place, const char *word)
{
    if (strcmp(place, HABIT_DTYPE) == 0) check_dtype(habit, word);
    else check_word(habit, place, word);
}

static void check_words_at(const struct habit *habit, const char *unused, const char *place)
{
    (void)unused;
    for_each(habit->words, habit, place, check_word_at);
}

static void test_every_word_gets_the_cure_of_its_row(void **state)
{
    (void)state;
    for (const struct habit *habit = habits; habit->places; habit++)
        for_each(habit->places, habit, NULL, check_words_at);
}

/* Who does what a cure says is not refused for it: its 'names', and the "names": of what to write,
 * are taken at that place. */
static void check_name(const struct habit *habit, const char *place, const char *name)
{
    static const char *const refusals[] = { "unknown member", "belongs to", "is computed here", "takes one problem" };
    attn_error err;
    char body[256];
    if (op_named(place) < PROTO_OP_COUNT && (!strcmp(name, "dtype") || !strcmp(name, "shape"))) return; /* a tensor's */
    body_of(place, name, body, sizeof body);
    refuse(place, body, &err);
    for (size_t i = 0; i < ARRAY_SIZE(refusals); i++)
        if (strstr(err.text, refusals[i])) fail_msg("%s: %s\nsays then: %s", place, habit->cure, err.text);
}

static void check_names_at(const struct habit *habit, const char *unused, const char *place)
{
    (void)unused;
    if (op_named(place) == PROTO_OP_COUNT && strcmp(place, HABIT_CACHE) != 0) return;
    for (const char *at = habit->cure; (at = strpbrk(at, "'\"")); at++) {
        char name[64];
        const char quote = *at++;
        const size_t length = strcspn(at, (const char[]){ quote, '\0' });
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        at += length;
        assert_int_equal(*at, quote);
        if (quote == '\'' || at[1] == ':') check_name(habit, place, name);
    }
}

static void test_no_cure_leads_to_the_next_refusal(void **state)
{
    (void)state;
    for (const struct habit *habit = habits; habit->places; habit++)
        for_each(habit->places, habit, NULL, check_names_at);
    for (const struct habit *topic = habit_topics; topic->places; topic++)
        for_each(topic->places, topic, NULL, check_names_at);
}

static void test_a_name_with_a_known_part_gets_advice_about_that_part(void **state)
{
    static const struct {
        const char *place, *word, *says; /* NULL: nothing is known of any part */
    } cases[] = {
        { "forward", "valid_mask", "about masks there are 'keep_mask'" },
        { "forward", "validMask", "about masks" },
        { "decode", "valid_mask", "about masks there is 'keep_mask' (1: may attend), of the last keys" },
        { "forward", "max_attn_window", "about windows" },
        { "forward", "scale_s", "'q_scale', 'k_scale' and 'v_scale' of float8" },
        { "backward", "scale_s", "about scales there is 'scale'" },
        { "forward", "kv_page_indptr", "'page_table' and 'seqlens_k'" },
        { "backward", "kv_page_indptr", "backward has no pages" },
        { "forward", "prompt_lens", "'seqlens_k'" },
        { "append", "device_ordinal", "the server decides" },
        { "append", "valid_mask", NULL },
        { "forward", "unmasked", NULL },
        { "forward", "frobnicate", NULL },
        { "forward", "__", NULL },
        { HABIT_TENSOR, "valid_mask", NULL },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const char *const says = habit_topic(cases[i].place, cases[i].word);
        if (cases[i].says == NULL) assert_null(says);
        else if (says == NULL || strstr(says, cases[i].says) == NULL)
            fail_msg("%s: %s\nsays: %s\nmust say: %s", cases[i].place, cases[i].word, says, cases[i].says);
    }
}

static void test_each_operation_has_its_own_cures(void **state)
{
    static const struct {
        const char *place, *word, *cure;
    } cases[] = {
        { "forward", "deterministic", "leave it out, the same kernel always gives the same bits" },
        { "backward", "gradOutput", "write 'dout'" },
        { "decode", "gradOutput", "gradients are POST /v1/attention/backward" },
        { "forward", "block_size", "leave it out, with 'page_table' it is shape[1] of k" },
        { "decode", "block_size",
          "leave it out, 'caches' names one for each row of q, and each knows its length and its pages" },
        { HABIT_CACHE, "block_size", "write 'page_size', 64 or 128" },
        { "backward", "block_table", "backward has no pages; send k and v whole, or with 'cu_seqlens_k'" },
        { "append", "block_table", NULL },
        { HABIT_CACHE, "num_key_value_heads",
          "write 'kv_heads', the heads of keys and values; q may have a multiple of them" },
        { HABIT_CACHE, "head_size", "write 'head_dim'" },
        { "decode", "tree_mask",
          "write 'keep_mask' (uint8 or bool, 1: may attend), which is of the last keys of each row" },
        { "decode", "past_key_values", "POST /v1/caches makes one; write its id into 'caches'" },
        { "forward", "kv_cache",
          "send all keys and values as 'k' and 'v'; or POST /v1/caches keeps keys and values, POST "
          "/v1/attention/decode attends to them" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const char *const cure = habit_of(cases[i].place, cases[i].word);
        if (cases[i].cure == NULL) assert_null(cure);
        else assert_string_equal(cure, cases[i].cure);
    }
}

static void test_a_word_is_a_whole_one_in_any_case(void **state)
{
    (void)state;
    assert_string_equal(habit_of("forward", "Softmax_Scale"), "write 'scale'");
    assert_string_equal(habit_of("forward", "scale_factor"), "write 'scale'"); /* the last of its row */
    assert_string_equal(habit_of("forward", "softmaxScale"), "write 'scale'");
    assert_string_equal(habit_of("forward", "softmax-scale"), "write 'scale'");
    assert_null(habit_of("forward", ""));
    assert_null(habit_of("forward", "_"));
    assert_null(habit_of("forward", " "));
    assert_null(habit_of("forward", "causal_mas"));
    assert_null(habit_of("forward", "query queries"));
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
        cmocka_unit_test(test_no_cure_leads_to_the_next_refusal),
        cmocka_unit_test(test_a_name_with_a_known_part_gets_advice_about_that_part),
        cmocka_unit_test(test_each_operation_has_its_own_cures),
        cmocka_unit_test(test_a_word_is_a_whole_one_in_any_case),
        cmocka_unit_test(test_many_hexadecimal_digits_are_known_by_the_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
