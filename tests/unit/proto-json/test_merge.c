/* test_merge.c: tests of the bodies of a merge, which joins results over parts of the keys: both ways to name the
 * parts, every message of parse_parts.c, and the conversion of lse, however a body is split. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "kernels/dtype.h"

#define MERGE ((attn_op)PROTO_OP_MERGE)

/* Small valid parts of a merge (each is a result over some of the keys) with B 1, Sq 2, H 1, Dv 1. */
#define TENSOR(shape, dtype, data) "{\"shape\":" shape ",\"dtype\":\"" dtype "\",\"data\":" data "}"
#define OUT                        TENSOR("[1,2,1,1]", "float16", "[1,2]")
#define LSE(data)                  TENSOR("[1,1,2]", "float32", data)
#define PART(out, lse)             "{\"out\":" out ",\"lse\":" lse "}"
#define SOUND                      PART(OUT, LSE("[0,1]"))
#define PARTS(list)                "\"parts\":[" list "]"
#define NAMED(n, out, lse)         "\"parts." n ".out\":" out ",\"parts." n ".lse\":" lse

static int differences;

static int no_differences(void **state)
{
    const int found = differences;
    (void)state;
    differences = 0;
    return found ? -1 : 0;
}

static struct body body_of(const char *text)
{
    return (struct body){ .format = &proto_json, .op = MERGE, .bytes = text, .count = strlen(text) };
}

static void test_a_bad_merge_is_named_in_the_error(void **state)
{
    static const struct {
        const char *body, *member, *says;
    } cases[] = {
        { "{}", "/parts", "parts: is missing, must be an array of {\"out\": {...}, \"lse\": {...}}" },
        { "{\"parts\":3}", "/parts", "parts: is 3, must be an array of {\"out\": {...}, \"lse\": {...}}" },
        { "{\"parts\":[]}", "/parts", "parts: there are 0, must be 1 to 64" },
        { "{\"parts\":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,"
          "0,0,"
          "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}",
          "/parts", "parts: there are 65, must be 1 to 64; merge them in groups, and then the groups" },
        { "{" PARTS("3") "}", "/parts/0",
          "parts: [0] is 3, must be an object of two tensors: {\"out\": {...}, \"lse\": {...}}" },
        { "{" PARTS(SOUND ","
                          "{\"outt\":1}") "}",
          "/parts/1", "parts.1: unknown member 'outt', did you mean 'out'?" },
        { "{" PARTS("{\"x\":1}") "}", "/parts/0", "parts.0: unknown member 'x' (a part has out and lse)" },
        { "{" PARTS("{\"out\":" OUT ",\"out\":" OUT "}") "}", "/parts/0", "parts.0: member 'out' is given twice" },
        { "{" PARTS("{\"out\":" OUT "}") "}", "/parts/0", "parts.0.lse: is missing, each part has out and lse" },
        { "{" NAMED("1", OUT, LSE("[0,1]")) "}", "/parts.0.out", "parts.0.out: is missing, each part has out and lse" },
        { "{" PARTS(SOUND "," PART(TENSOR("[1,2,1,1]", "int32", "[1,2]"), LSE("[0,1]"))) "}", "/parts/1/out/dtype",
          "parts.1.out: dtype is 'int32', must be float32, float16 or bfloat16; convert it to float32" },
        { "{" NAMED("0", TENSOR("[1,2,1]", "float16", "[1]"), LSE("[0,1]")) "}", "/parts.0.out/data",
          "parts.0.out: data has 1 numbers, shape [1, 2, 1] needs 2" },
        { "{" PARTS(SOUND "," PART(TENSOR("[1,1,1,1]", "float16", "[1]"), LSE("[0,1]"))) "}", "/parts/1/out/shape/1",
          "parts.1.out: shape[1] is 1, must be 2, the rows of parts.0.out" },
        { "{" NAMED("0", OUT, TENSOR("[1,2]", "float32", "[0,1]")) "}", "/parts.0.lse/shape",
          "parts.0.lse: has 2 dimensions, must have 3: [batch, heads, rows]" },
        { "{" PARTS(SOUND "," PART(TENSOR("[1,2,1,1]", "float32", "[1,2]"), LSE("[0,1]"))) "}", "/parts/1/out/dtype",
          "parts.1.out: dtype is float32, must be float16, as in parts.0.out" },
        { "{" PARTS(SOUND "," PART(OUT, LSE("[0,\"NaN\"]"))) "}", "/parts/1/lse/data",
          "parts.1.lse: [0, 0, 1] is nan, must be a number, or -inf for an empty part" },
        { "{" NAMED("0", OUT, LSE("[\"Infinity\",0]")) "}", "/parts.0.lse/data",
          "parts.0.lse: [0, 0, 0] is inf, must be finite, or -inf for an empty part; where empty parts have +inf, "
          "write "
          "\"empty_lse\": \"+inf\"" },
        { "{" PARTS(SOUND) ",\"sinks\":" TENSOR("[1]", "float32", "[\"Infinity\"]") "}", "/sinks/data",
          "sinks: [0] is inf, must be finite or -inf" },
        { "{" PARTS(SOUND) ",\"sinks\":" TENSOR("[2]", "float32", "[0,0]") "}", "/sinks/shape/0",
          "sinks: shape[0] is 2, must be 1, the heads of parts.0.out" },
        { "{" PARTS(SOUND) ",\"dlse\":" LSE("[0,0]") "}", "/dout", "dout: is missing, must be given for gradients" },
        { "{" PARTS(SOUND) ",\"outputs\":[\"dsinks\"]}", "/outputs",
          "outputs: dsinks needs sinks, which is not given" },
        { "{" PARTS(SOUND) ",\"outputs\":[\"dsinks\"],\"sinks\":" TENSOR("[1]", "float32", "[0]") "}", "/outputs",
          "outputs: dsinks needs dout, which is not given" },
        { "{" PARTS(SOUND) "," NAMED("0", OUT, LSE("[0,1]")) "}", "/parts.0.out",
          "parts.0.out: parts are a list, or a member for each tensor, and not both" },
        { "{" NAMED("0", OUT, LSE("[0,1]")) "," PARTS(SOUND) "}", "/parts",
          "parts: parts are a list, or a member for each tensor, and not both" },
        { "{" PARTS(SOUND) ",\"lse_base\":2}", "/lse_base", "lse_base: is 2, must be e or 2, in quotes" },
        { "{" PARTS(SOUND) ",\"empty_lse\":\"inf\"}", "/empty_lse",
          "empty_lse: is 'inf', must be -inf or +inf, did you mean '-inf'?" },
        { "{" PARTS(SOUND) ",\"causal\":true}", "/causal", "causal: belongs to forward, POST /v1/attention/forward" },
        { "{\"parts.64.out\":" OUT "}", "/parts.64.out",
          "unknown member 'parts.64.out' (/docs lists the members of merge)" },
        { "{" PARTS(
              PART(TENSOR("[2,1,1]", "float16", "[1,2]"), TENSOR("[1,2]", "float32", "[0,1]"))) ",\"layout\":\"bhsd\"}",
          "/layout", "layout: is bhsd, must be bshd with packed parts" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct body body = body_of(cases[i].body);
        differences += refused_otherwise(&body, cases[i].body, ATTN_INVALID, cases[i].member, cases[i].says);
    }
}

static void test_parts_have_two_spellings(void **state)
{
    struct decoded list = { 0 }, named = { 0 };
    const struct body of_list = body_of("{" PARTS(SOUND "," PART(OUT, LSE("[2,3]"))) "}"),
                      of_names = body_of("{" NAMED("0", OUT, LSE("[0,1]")) "," NAMED("1", OUT, LSE("[2,3]")) "}");
    (void)state;
    differences += decode_all_ways(&list, &of_list) + decode_all_ways(&named, &of_names);
    char *const a = decoded_text(&list), *const b = decoded_text(&named);
    assert_int_equal(list.status, ATTN_OK);
    assert_string_equal(a, b);
    assert_int_equal(list.call->items[0].parts->count, 2);
    assert_false(list.call->items[0].parts->has_back);
    free(a), free(b);
    decoded_clear(&list), decoded_clear(&named);
}

static void test_lse_becomes_natural_and_minus_infinity_where_empty(void **state)
{
    struct decoded d = { 0 };
    const struct body body = body_of("{" PARTS(PART(OUT, LSE("[3,\"Infinity\"]")) "," PART(
        OUT, LSE("[\"-Infinity\",-1]"))) ",\"lse_base\":\"2\",\"empty_lse\":\"+inf\"}");
    (void)state;
    differences += decode_all_ways(&d, &body);
    assert_int_equal(d.status, ATTN_OK);
    const float *const first = d.call->items[0].parts->at[0].lse.data, *const second =
                                                                           d.call->items[0].parts->at[1].lse.data;
    assert_true(first[0] == (float)(3 * M_LN2) && first[1] == -INFINITY);
    assert_true(second[0] == -INFINITY && second[1] == (float)-M_LN2);
    decoded_clear(&d);
}

static void test_the_answer_has_the_gradients_that_dout_asks_for(void **state)
{
    struct decoded d = { 0 };
    char name[PROTO_NAME_BYTES];
    const struct body body = body_of("{" PARTS(SOUND "," SOUND) ",\"out_dtype\":\"float32\",\"sinks\":" TENSOR(
        "[1]", "float32", "[0]") ","
                                 "\"dout\":" TENSOR("[1,2,1,1]", "bfloat16",
                                                    "[1,1]") ",\"outputs\":[\"dsinks\",\"out\"]}");
    (void)state;
    differences += decode_all_ways(&d, &body);
    assert_int_equal(d.status, ATTN_OK);
    proto_item *const item = &d.call->items[0];
    static const char *const names[] = {
        "out", "dsinks", "parts.0.dout", "parts.0.dlse", "parts.1.dout", "parts.1.dlse"
    };
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F32, ATTN_F16, ATTN_F32, ATTN_F16, ATTN_F32 };
    size_t count = 0;
    for (int n = 0; n < PROTO_TENSORS; n++) {
        const attn_tensor *const t = proto_item_result(item, n);
        if (t == NULL) continue;
        assert_true(count < ARRAY_SIZE(names));
        assert_string_equal(proto_tensor_name(n, true, name), names[count]);
        assert_int_equal(proto_tensor_named(name, true), n);
        assert_int_equal(t->dtype, dtypes[count++]);
    }
    assert_int_equal(count, ARRAY_SIZE(names));
    decoded_clear(&d);
}

static void test_names_of_parts_are_exact(void **state)
{
    static const char *const strangers[] = { "parts",         "parts.",       "parts.0",      "parts.0.",
                                             "parts.0.outs",  "parts.00.out", "parts.64.out", "parts.-1.out",
                                             "parts.100.lse", "parts.1out",   "Parts.0.out",  "parts.0.dout",
                                             "parts.0.q" };
    char name[PROTO_NAME_BYTES];
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(strangers); i++)
        assert_int_equal(proto_tensor_named(strangers[i], false), PROTO_TENSORS);
    for (int n = 0; n < PROTO_TENSORS; n++)
        for (int result = 0; result < 2; result++)
            assert_int_equal(proto_tensor_named(proto_tensor_name(n, result, name), result), n);
    assert_string_equal(proto_tensor_name(PROTO_TENSORS - 1, true, name), "parts.63.dlse");
}

static void test_a_refused_merge_of_several_leaves_the_others(void **state)
{
    struct decoded d = { 0 };
    const struct body body = body_of(
        "{\"requests\":[{" PARTS(SOUND) "},{" PARTS(SOUND) ",\"q\":1},{" PARTS(SOUND) "}]}");
    (void)state;
    differences += decode_all_ways(&d, &body);
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->count, 3);
    assert_non_null(d.call->items[0].parts);
    assert_null(d.call->items[1].parts);
    assert_string_equal(d.call->items[1].error.text, "q: belongs to forward, POST /v1/attention/forward");
    assert_non_null(d.call->items[2].parts);
    decoded_clear(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_bad_merge_is_named_in_the_error, no_differences),
        cmocka_unit_test_teardown(test_parts_have_two_spellings, no_differences),
        cmocka_unit_test_teardown(test_lse_becomes_natural_and_minus_infinity_where_empty, no_differences),
        cmocka_unit_test_teardown(test_the_answer_has_the_gradients_that_dout_asks_for, no_differences),
        cmocka_unit_test(test_names_of_parts_are_exact),
        cmocka_unit_test_teardown(test_a_refused_merge_of_several_leaves_the_others, no_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
