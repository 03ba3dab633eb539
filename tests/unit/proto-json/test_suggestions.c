/* test_suggestions.c: sends each word of proto-json/suggestions.c (names that clients write by mistake) in a body. The
 * server must not know a member, a dtype or a choice of that name, and no word may be in two rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "proto-json/suggestions.h"

/* Returns the operation with the name `place`, or PROTO_OP_COUNT if there is none. */
static proto_op op_named(const char *place)
{
    proto_op op = 0;
    while (op < PROTO_OP_COUNT && strcmp(proto_operations[op].name, place) != 0) op++;
    return op;
}

/* Writes a body with the member `word` at `place`, which names an operation or a part of a body. */
static void body_of(const char *place, const char *word, char *body, size_t capacity)
{
    static const struct {
        const char *place, *body;
    } bodies[] = {
        { SUGGESTION_INPUT, "{\"inputs\":[{\"name\":\"q\",\"%s\":1}]}" },
        { SUGGESTION_TENSOR, "{\"q\":{\"%s\":1}}" },
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
    if (op_named(place) < PROTO_OP_COUNT || strcmp(place, SUGGESTION_CACHE) == 0 ||
        strcmp(place, SUGGESTION_LENGTH) == 0 || strcmp(place, SUGGESTION_KSERVE) == 0) {
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

static void refuse_kserve(const char *body, attn_error *err)
{
    static const proto_model model = { .name = "attention_forward", .op = (proto_op)ATTN_OP_FORWARD };
    struct decoded d = { 0 };
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d.memory };
    proto_parser *const parser = proto_parser_new(&proto_kserve, model.op, &limits, &memory);
    proto_parser_kserve(parser, &model, (int64_t)strlen(body));
    if (proto_parser_feed(parser, body, strlen(body), err) == ATTN_OK) (void)proto_parser_finish(parser, &d.call, err);
    proto_parser_free(parser);
    decoded_clear(&d);
}

static void refuse(const char *place, const char *body, attn_error *err)
{
    const proto_op op = op_named(place);
    *err = (attn_error){ 0 };
    if (strcmp(place, SUGGESTION_CACHE) == 0) {
        proto_cache cache;
        if (proto_cache_read(body, strlen(body), &cache, err) == ATTN_OK) proto_cache_clear(&cache);
    } else if (strcmp(place, SUGGESTION_LENGTH) == 0) {
        int64_t length;
        (void)proto_length_read(body, strlen(body), true, &length, err);
    } else if (strcmp(place, SUGGESTION_KSERVE) == 0 || strcmp(place, SUGGESTION_INPUT) == 0) {
        refuse_kserve(body, err);
    } else {
        struct decoded d = { 0 };
        decode_whole(&d, op < PROTO_OP_COUNT ? (attn_op)op : ATTN_OP_FORWARD, body);
        *err = d.err;
        decoded_clear(&d);
    }
    if (err->status != ATTN_INVALID) fail_msg("%s: %s\nis not refused: %s", place, body, err->text);
}

static void check_word(const struct suggestion *suggestion, const char *place, const char *word)
{
    attn_error err;
    char body[256], end[256];
    body_of(place, word, body, sizeof body);
    refuse(place, body, &err);
    const char *const path = strstr(suggestion->suggestion, "/v1/attention/"), *const said =
                                                                                   path ? strstr(err.text, path) : NULL;
    if (said && strstr(err.text, ": belongs to ") && strstr(err.text, suggestion->suggestion) == NULL) return;
    snprintf(end, sizeof end, "; %s", suggestion->suggestion);
    const size_t length = strlen(err.text), tail = strlen(end);
    if (length < tail || strcmp(err.text + length - tail, end) != 0)
        fail_msg("%s: %s\nsays: %s\nmust end with: %s", place, body, err.text, end);
}

/* Checks the suggestion for `word`, which is no dtype. The suggested dtype must need no suggestion itself. */
static void check_dtype(const struct suggestion *suggestion, const char *word)
{
    char name[SUGGESTION_DTYPE_BYTES];
    proto_dtype dtype;
    if (proto_dtype_parse(word, &dtype)) fail_msg("%s is taken as it is", word);
    assert_string_equal(suggestion_dtype(word, name), suggestion->suggestion);
    assert_null(suggestion_of(SUGGESTION_DTYPE, suggestion->suggestion));
}

static void for_each(const char *list, const struct suggestion *suggestion, const char *place,
                     void (*each)(const struct suggestion *suggestion, const char *place, const char *part))
{
    char parts[4096], *rest = NULL;
    assert_true((size_t)snprintf(parts, sizeof parts, "%s", list) < sizeof parts);
    for (char *part = strtok_r(parts, " ", &rest); part; part = strtok_r(NULL, " ", &rest))
        each(suggestion, place, part);
}

static void check_word_at(const struct suggestion *suggestion, const char *place, const char *word)
{
    if (strcmp(place, SUGGESTION_DTYPE) == 0) check_dtype(suggestion, word);
    else check_word(suggestion, place, word);
}

static void check_words_at(const struct suggestion *suggestion, const char *unused, const char *place)
{
    (void)unused;
    for_each(suggestion->words, suggestion, place, check_word_at);
}

static void test_every_word_gets_the_suggestion_of_its_row(void **state)
{
    (void)state;
    for (const struct suggestion *suggestion = suggestions; suggestion->places; suggestion++)
        for_each(suggestion->places, suggestion, NULL, check_words_at);
}

/* A suggestion quotes names as 'name', or as "name": in JSON. They must be accepted at `place`. */
static void check_name(const struct suggestion *suggestion, const char *place, const char *name)
{
    static const char *const refusals[] = { "unknown member", "belongs to", "is computed here", "takes one problem" };
    attn_error err;
    char body[256];
    if (op_named(place) < PROTO_OP_COUNT && (!strcmp(name, "dtype") || !strcmp(name, "shape"))) return; /* a tensor's */
    body_of(place, name, body, sizeof body);
    refuse(place, body, &err);
    for (size_t i = 0; i < ARRAY_SIZE(refusals); i++)
        if (strstr(err.text, refusals[i])) fail_msg("%s: %s\nsays then: %s", place, suggestion->suggestion, err.text);
}

static void check_names_at(const struct suggestion *suggestion, const char *unused, const char *place)
{
    (void)unused;
    if (op_named(place) == PROTO_OP_COUNT && strcmp(place, SUGGESTION_CACHE) != 0) return;
    for (const char *at = suggestion->suggestion; (at = strpbrk(at, "'\"")); at++) {
        char name[64];
        const char quote = *at++;
        const size_t length = strcspn(at, (const char[]){ quote, '\0' });
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        at += length;
        assert_int_equal(*at, quote);
        if (quote == '\'' || at[1] == ':') check_name(suggestion, place, name);
    }
}

static void test_no_suggestion_leads_to_the_next_refusal(void **state)
{
    (void)state;
    for (const struct suggestion *suggestion = suggestions; suggestion->places; suggestion++)
        for_each(suggestion->places, suggestion, NULL, check_names_at);
    for (const struct suggestion *topic = suggestion_topics; topic->places; topic++)
        for_each(topic->places, topic, NULL, check_names_at);
}

static void test_a_name_with_a_known_part_gets_advice_about_that_part(void **state)
{
    static const struct {
        const char *place, *word, *says; /* says: the expected suggestion; NULL: none */
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
        { SUGGESTION_TENSOR, "valid_mask", NULL },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const char *const says = suggestion_topic(cases[i].place, cases[i].word);
        if (cases[i].says == NULL) assert_null(says);
        else if (says == NULL || strstr(says, cases[i].says) == NULL)
            fail_msg("%s: %s\nsays: %s\nmust say: %s", cases[i].place, cases[i].word, says, cases[i].says);
    }
}

static void test_each_operation_has_its_own_suggestions(void **state)
{
    static const struct {
        const char *place, *word, *suggestion;
    } cases[] = {
        { "forward", "deterministic", "leave it out, the same kernel always gives the same bits" },
        { "backward", "gradOutput", "write 'dout'" },
        { "decode", "gradOutput", "gradients are POST /v1/attention/backward" },
        { "forward", "block_size", "leave it out, with 'page_table' it is shape[1] of k" },
        { "decode", "block_size",
          "leave it out, 'caches' names one for each row of q, and each knows its length and its pages" },
        { SUGGESTION_CACHE, "block_size", "write 'page_size', 64 or 128" },
        { "backward", "block_table", "backward has no pages; send k and v whole, or with 'cu_seqlens_k'" },
        { "append", "block_table", NULL },
        { SUGGESTION_CACHE, "num_key_value_heads",
          "write 'kv_heads', the heads of keys and values; q may have a multiple of them" },
        { SUGGESTION_CACHE, "head_size", "write 'head_dim'" },
        { "decode", "tree_mask",
          "write 'keep_mask' (uint8 or bool, 1: may attend), which is of the last keys of each row" },
        { "decode", "past_key_values", "POST /v1/caches makes one; write its id into 'caches'" },
        { "forward", "kv_cache",
          "send all keys and values as 'k' and 'v'; or POST /v1/caches keeps keys and values, POST "
          "/v1/attention/decode attends to them" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const char *const suggestion = suggestion_of(cases[i].place, cases[i].word);
        if (cases[i].suggestion == NULL) assert_null(suggestion);
        else assert_string_equal(suggestion, cases[i].suggestion);
    }
}

static void test_a_word_is_a_whole_one_in_any_case(void **state)
{
    (void)state;
    assert_string_equal(suggestion_of("forward", "Softmax_Scale"), "write 'scale'");
    assert_string_equal(suggestion_of("forward", "scale_factor"), "write 'scale'");
    assert_string_equal(suggestion_of("forward", "softmaxScale"), "write 'scale'");
    assert_string_equal(suggestion_of("forward", "softmax-scale"), "write 'scale'");
    assert_null(suggestion_of("forward", ""));
    assert_null(suggestion_of("forward", "_"));
    assert_null(suggestion_of("forward", " "));
    assert_null(suggestion_of("forward", "causal_mas"));
    assert_null(suggestion_of("forward", "query queries"));
    assert_null(suggestion_of(SUGGESTION_TENSOR, "is_causal"));
}

static void test_many_hexadecimal_digits_are_known_by_the_first(void **state)
{
    static uint8_t bytes[3 << 20];
    (void)state;
    /* The base64 of 0xd3 bytes is "09PT" again and again. P and T are not hexadecimal digits. */
    memset(bytes, 0xd3, sizeof bytes);
    assert_false(suggestion_is_hex(bytes, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i += 3) memcpy(bytes + i, "\xd3\x4d\x34", 3); /* "0000" */
    assert_true(suggestion_is_hex(bytes, sizeof bytes));
    bytes[sizeof bytes / 2] = 0xff; /* only the first digits are examined, so this byte does not matter */
    assert_true(suggestion_is_hex(bytes, sizeof bytes));
    bytes[0] = 0xff;
    assert_false(suggestion_is_hex(bytes, sizeof bytes));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_word_gets_the_suggestion_of_its_row),
        cmocka_unit_test(test_no_suggestion_leads_to_the_next_refusal),
        cmocka_unit_test(test_a_name_with_a_known_part_gets_advice_about_that_part),
        cmocka_unit_test(test_each_operation_has_its_own_suggestions),
        cmocka_unit_test(test_a_word_is_a_whole_one_in_any_case),
        cmocka_unit_test(test_many_hexadecimal_digits_are_known_by_the_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
