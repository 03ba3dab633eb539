/* test_decode.c: tests how request bodies become problems: every message of parse.c word for word, every member, and
 * the same result however a body is split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "codec.h"
#include "kernels/dtype.h"

/* Small valid tensors with B 1, Sq 2, Sk 3, H 2, Hk 1, D 2, Dv 1. */
#define Q    "\"q\":{\"shape\":[1,2,2,2],\"dtype\":\"float16\",\"data\":\"AAABAAIAAwAEAAUABgAHAA==\"}"
#define K    "\"k\":{\"shape\":[1,3,1,2],\"dtype\":\"float16\",\"data\":[1,2,3,4,5,6]}"
#define V    "\"v\":{\"shape\":[1,3,1,1],\"dtype\":\"float16\",\"data\":[[[[1]],[[2]],[[3]]]]}"
#define DOUT "\"dout\":{\"shape\":[1,2,2,1],\"dtype\":\"float16\",\"data\":[1,2,3,4]}"
#define QKV  Q "," K "," V

/* A small valid part of a merge (the result over a part of the keys) with B 1, Sq 2, H 1, Dv 1. */
#define PART_OUT       "\"out\":{\"shape\":[1,2,1,1],\"dtype\":\"float16\",\"data\":[1,2]}"
#define PART_LSE(data) "\"lse\":{\"shape\":[1,1,2],\"dtype\":\"float32\",\"data\":" data "}"
#define PART           "{" PART_OUT "," PART_LSE("[0,1]") "}"
#define PARTS          "\"parts\":[" PART "]"

#define FORWARD  ATTN_OP_FORWARD
#define BACKWARD ATTN_OP_BACKWARD

static int differences;

static int no_differences(void **state)
{
    const int found = differences;
    (void)state;
    differences = 0;
    return found ? -1 : 0;
}

static struct body json_body(attn_op op, const char *text)
{
    return (struct body){ .format = &proto_json, .op = op, .bytes = text, .count = strlen(text) };
}

static void decode_text(struct decoded *d, attn_op op, const char *text)
{
    const struct body body = json_body(op, text);
    differences += decode_all_ways(d, &body);
}

struct refusal {
    attn_op op;
    const char *body, *member, *says;
};

static void check_refusals(const struct refusal *cases, size_t count, attn_status status)
{
    for (size_t i = 0; i < count; i++) {
        const struct body body = json_body(cases[i].op, cases[i].body);
        differences += refused_otherwise(&body, cases[i].body, status, cases[i].member, cases[i].says);
    }
}

/* ---- Tests of wrong tensors in request bodies -------------------------------------------------------------------- */

#define T(q)                       "{\"q\":" q "," K "," V "}"
#define TENSOR(shape, dtype, data) T("{\"shape\":" shape ",\"dtype\":" dtype ",\"data\":" data "}")
#define B64                        "\"AAABAAIAAwAEAAUABgAHAA==\""

static void test_a_bad_tensor_is_named_in_the_error(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, T("5"), "/q",
          "q: is 5, must be an object: {\"shape\": [...], \"dtype\": \"float32\", \"data\": base64 or numbers}" },
        { FORWARD, T("null"), "/q",
          "q: is null, must be an object: {\"shape\": [...], \"dtype\": \"float32\", \"data\": base64 or numbers}" },
        { FORWARD, T("\"AAAA\""), "/q",
          "q: is 'AAAA', must be an object: {\"shape\": [...], \"dtype\": \"float32\", \"data\": base64 or numbers}" },
        { FORWARD, T("[1]"), "/q",
          "q: is an array, must be an object: {\"shape\": [...], \"dtype\": \"float32\", \"data\": base64 or "
          "numbers}" },
        { FORWARD, T("{}"), "/q", "q: shape is missing; q is [B, Sq, H, D]" },
        { FORWARD, T("{\"shape\":[1,2,2,2],\"data\":" B64 "}"), "/q",
          "q: dtype is missing, must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, T("{\"shape\":[1,2,2,2],\"dtype\":\"float16\"}"), "/q",
          "q: data is missing, must be base64 in a string or an array of numbers" },
        { FORWARD, T("{\"shap\":[1]}"), "/q/shap", "q: unknown member 'shap', did you mean 'shape'?" },
        { FORWARD, T("{\"shape\":[1],\"parameters\":{\"data\":\"AAAA\"}}"), "/q/parameters",
          "q: unknown member 'parameters' (a tensor has shape, dtype and data)" },
        { FORWARD, T("{\"shape\":[1],\"shape\":[1]}"), "/q/shape", "q: member 'shape' is given twice" },
        { FORWARD, T("{\"data\":" B64 ",\"d\\u0061ta\":" B64 "}"), "/q/data", "q: member 'data' is given twice" },
        { FORWARD, TENSOR("8", "\"float16\"", B64), "/q/shape",
          "q: shape is 8, must be an array of integers, such as [1, 128, 8, 64]" },
        { FORWARD, TENSOR("[]", "\"float16\"", B64), "/q/shape",
          "q: shape has 0 dimensions, must have 1 to 4; q is [B, Sq, H, D]" },
        { FORWARD, TENSOR("[1,1,2,2,2]", "\"float16\"", B64), "/q/shape",
          "q: shape has 5 dimensions, must have 1 to 4; q is [B, Sq, H, D]" },
        { FORWARD, TENSOR("[1,1,1,1,1,1,2,2,2]", "\"float16\"", B64), "/q/shape",
          "q: shape has 9 dimensions, must have 1 to 4; q is [B, Sq, H, D]" },
        { FORWARD, TENSOR("[1,1.5,2,2]", "\"float16\"", B64), "/q/shape/1",
          "q: shape[1] is 1.5, must be an integer from 0 to 2^31 - 1; it is written without point and exponent" },
        { FORWARD, TENSOR("[1,2.0,2,2]", "\"float16\"", B64), "/q/shape/1",
          "q: shape[1] is 2.0, must be an integer from 0 to 2^31 - 1; it is written without point and exponent" },
        { FORWARD, TENSOR("[1,2e0,2,2]", "\"float16\"", B64), "/q/shape/1",
          "q: shape[1] is 2e0, must be an integer from 0 to 2^31 - 1; it is written without point and exponent" },
        { FORWARD, TENSOR("[1,2,2,1e400]", "\"float16\"", B64), "/q/shape/3",
          "q: shape[3] is 1e400, must be an integer from 0 to 2^31 - 1; it is written without point and exponent" },
        { FORWARD, TENSOR("[9007199254740993,2,2,2]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is 9007199254740993, must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[18446744073709551617,2,2,2]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is 18446744073709551617, must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[100000000000000000000000000000000000000]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is 100000000000000000000000..., must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[-0,2,2,2]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is -0, must be an integer from 0 to 2^31 - 1; no size can be left open" },
        { FORWARD, TENSOR("[-1,2,2,2]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is -1, must be an integer from 0 to 2^31 - 1; no size can be left open" },
        { FORWARD, TENSOR("[\"1\",2,2,2]", "\"float16\"", B64), "/q/shape/0",
          "q: shape[0] is '1', must be an integer from 0 to 2^31 - 1, without quotes" },
        { FORWARD, TENSOR("[1,[2],2,2]", "\"float16\"", B64), "/q/shape/1",
          "q: shape[1] is an array, must be an integer from 0 to 2^31 - 1, without brackets" },
        { FORWARD, TENSOR("[1,2,null,2]", "\"float16\"", B64), "/q/shape/2",
          "q: shape[2] is null, must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[1,2,true,{}]", "\"float16\"", B64), "/q/shape/2",
          "q: shape[2] is true, must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[1,2,2,{}]", "\"float16\"", B64), "/q/shape/3",
          "q: shape[3] is an object, must be an integer from 0 to 2^31 - 1" },
        { FORWARD, TENSOR("[4294967296,4294967296,2,2]", "\"float16\"", B64), "/q/shape",
          "q: shape [4294967296, 4294967296, 2, 2] of float16 is more bytes than can be counted" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float64\"", B64), "/q/dtype",
          "q: dtype is 'float64', must be float32, float16, bfloat16 or float8_e4m3fn; convert it to float32" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\\n\"", B64), "/q/dtype",
          "q: dtype is 'float16\n', must be float32, float16, bfloat16 or float8_e4m3fn; write float16" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"a dtype that nobody has heard of, ever\"", B64), "/q/dtype",
          "q: dtype is 'a dtype that nobody has heard of'..., must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"123456789012345678901234567890\xe2\x82\xac\"", B64), "/q/dtype",
          "q: dtype is '123456789012345678901234567890'..., must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, TENSOR("[1,2,2,2]", "16", B64), "/q/dtype",
          "q: dtype is 16, must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"int32\"", "[1,2,3,4,5,6,7,8]"), "/q/dtype",
          "q: dtype is 'int32', must be float32, float16, bfloat16 or float8_e4m3fn; convert it to float32" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "7"), "/q/data",
          "q: data is 7, must be base64 in a string or an array of numbers" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "null"), "/q/data",
          "q: data is null, must be base64 in a string or an array of numbers; JSON.stringify() writes null for "
          "undefined and NaN" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "{\"b64\":\"\"}"), "/q/data",
          "q: data is an object, must be base64 in a string or an array of numbers; of a typed array of JavaScript "
          "send "
          "Array.from(x), or Buffer.from(x.buffer).toString('base64')" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "false"), "/q/data",
          "q: data is false, must be base64 in a string or an array of numbers" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AAA*\""), "/q/data",
          "q: data is not base64 at character 3 (byte 53 of the body): not a character of the base64 alphabet (RFC "
          "4648 section 4)" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AA==AA\""), "/q/data",
          "q: data is not base64 at character 4 (byte 54 of the body): nothing may follow the padding" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AAAAA\""), "/q/data",
          "q: data ends after 5 characters of base64, inside a group of four; a character or more is missing" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AAABAAIAAwAEAAUABgA=\""), "/q/data",
          "q: data has 14 bytes, shape [1, 2, 2, 2] of float16 needs 16" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AAABAAIAAwAEAAUABgAHAAA=\""), "/q/data",
          "q: data has 17 bytes, shape [1, 2, 2, 2] of float16 needs 16" },
        { FORWARD, TENSOR("[2,3]", "\"float32\"", "\"AAAAAAAAAAAAAAAA\""), "/q/data",
          "q: data has 12 bytes, shape [2, 3] of float32 needs 24; 12 would be right for float16: is that the array's "
          "dtype?" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"\""), "/q/data",
          "q: data has 0 bytes, shape [1, 2, 2, 2] of float16 needs 16; the string is empty" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[1,2,3,4,5,6,7]"), "/q/data",
          "q: data has 7 numbers, shape [1, 2, 2, 2] needs 8" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[]"), "/q/data",
          "q: data has 0 numbers, shape [1, 2, 2, 2] needs 8" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[[1,2,3,4],[5,6,7,8]]"), "/q/data",
          "q: data is nested as [2, 4], shape is [1, 2, 2, 2]" },
        { FORWARD, TENSOR("[8]", "\"float16\"", "[[1,2,3,4,5,6,7,8]]"), "/q/data",
          "q: data is nested as [1, 8], shape is [8]" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[[1,2],[3]]"), "/q/data",
          "q: data at byte 58 of the body: this array is shorter than the ones before it" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[1,2,3,4,5,6,7,\"8\"]"), "/q/data",
          "q: data at byte 65 of the body: a string here is \"NaN\", \"Infinity\" or \"-Infinity\", numbers stand "
          "without quotes" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "[1,2,3,4,5,6,7,65536]"), "/q/data",
          "q: data at byte 64 of the body: the number is out of the range of float16 (\"Infinity\" and \"-Infinity\" "
          "are taken)" },
        { FORWARD, T("{\"data\":[1,2,3,4,5,6,7,65536],\"shape\":[1,2,2,2],\"dtype\":\"float16\"}"), "/q/data",
          "q: element 7 of data: the number is out of the range of float16 (\"Infinity\" and \"-Infinity\" are "
          "taken)" },
        { FORWARD, T("{\"data\":[1,2,3,4,5,6,7,8],\"shape\":[1,2,2,2],\"dtype\":\"float17\"}"), "/q/dtype",
          "q: dtype is 'float17', must be float32, float16, bfloat16 or float8_e4m3fn; convert it to float32" },
        /* parse.c gives clients the messages of attn_check() (the kernel library's check of a problem) unchanged. */
        { FORWARD, "{" K "," V "}", "/q", "q: is required; a problem has q, k and v" },
        { FORWARD, "{}", "/q", "q: is required; a problem has q, k and v" },
        { FORWARD, TENSOR("[1,2,3,2]", "\"float16\"", "[1,2,3,4,5,6,7,8,9,10,11,12]"), "", NULL },
        { FORWARD, TENSOR("[1,2,2]", "\"float16\"", "[1,2,3,4]"), "/q/shape",
          "q: shape [1, 2, 2] has 3 dimensions, must have 4: [B, Sq, H, D]; a missing axis is written as 1, and heads "
          "have an axis of their own" },
        { FORWARD, "{" QKV ",\"seqlens_k\":{\"shape\":[1],\"dtype\":\"int32\",\"data\":[4]}}", "/seqlens_k/data/0",
          NULL },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        if (cases[i].says) {
            check_refusals(&cases[i], 1, ATTN_INVALID);
        } else {
            struct decoded d = { 0 };
            decode_text(&d, cases[i].op, cases[i].body);
            assert_int_equal(d.status, *cases[i].member ? ATTN_INVALID : ATTN_OK);
            decoded_clear(&d);
        }
    }
}

/* ---- Tests of options in request bodies -------------------------------------------------------------------------- */

#define O(option)  "{" QKV "," option "}"
#define OB(option) "{" QKV "," DOUT "," option "}"

#define IN_THERE "; it belongs to each of the problems in there"

static void test_a_bad_option_is_named_in_the_error(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, O("\"layout\":\"bhds\""), "/layout",
          "layout: is 'bhds', must be bshd or bhsd, did you mean 'bhsd'?" },
        { FORWARD, O("\"layout\":0"), "/layout", "layout: is 0, must be bshd or bhsd" },
        { FORWARD, O("\"alignment\":\"Top_left\""), "/alignment",
          "alignment: is 'Top_left', must be bottom_right or top_left, did you mean 'top_left'?" },
        { FORWARD, O("\"encoding\":null"), "/encoding",
          "encoding: is null, must be base64 or array; leave it out where it is not wanted" },
        { FORWARD, O("\"causal\":1"), "/causal", "causal: is 1, must be true or false; write true" },
        { FORWARD, O("\"causal\":\"true\""), "/causal", "causal: is 'true', must be true or false, without quotes" },
        { FORWARD, O("\"causal\":null"), "/causal",
          "causal: is null, must be true or false; leave it out where it is not wanted" },
        { FORWARD, O("\"scale\":\"0.5\""), "/scale", "scale: is '0.5', must be a number, without quotes" },
        { FORWARD, O("\"scale\":null"), "/scale",
          "scale: is null, must be a number; leave it out where it is not wanted" },
        { FORWARD, O("\"scale\":1e400"), "/scale", "scale: is 1e400, must be within the range of float64" },
        { FORWARD, O("\"softcap\":[1]"), "/softcap", "softcap: is an array, must be a number, without brackets" },
        { FORWARD, O("\"softcap\":-1"), "/softcap",
          "softcap: is -1, must be 0 or between 1.18e-38 and 3.4e38 (a float32)" },
        { FORWARD, O("\"dropout_p\":1"), "/dropout_p", "dropout_p: is 1, must be at least 0 and below 1" },
        { BACKWARD, OB("\"dropout_p\":0.5"), "/seed",
          "seed: is missing, must be that of the forward with this dropout_p; the forward's answer has it (a context "
          "has "
          "its own)" },
        { BACKWARD, OB("\"dropout_p\":1"), "/dropout_p", "dropout_p: is 1, must be at least 0 and below 1" },
        { FORWARD, O("\"window\":5"), "/window",
          "window: is 5, must be [left, right], where -1 is unbounded; W keys up to that of the query are [W - 1, 0]" },
        { FORWARD, O("\"window\":[5]"), "/window",
          "window: has 1 element, must have 2: [left, right], where -1 is unbounded" },
        { FORWARD, O("\"window\":[1,2,3]"), "/window",
          "window: has 3 elements, must have 2: [left, right], where -1 is unbounded" },
        { FORWARD, O("\"window\":[-2,0]"), "/window/0",
          "window: [0] is -2, must be an integer from -1 to 2^53, where -1 is unbounded" },
        { FORWARD, O("\"window\":[0,1.0]"), "/window/1",
          "window: [1] is 1.0, must be an integer from -1 to 2^53, where -1 is unbounded; it is written without point "
          "and exponent" },
        { FORWARD, O("\"window\":[0,null]"), "/window/1",
          "window: [1] is null, must be an integer from -1 to 2^53, where -1 is unbounded" },
        { FORWARD, O("\"seed\":-1"), "/seed",
          "seed: is -1, must be an integer from 0 to 2^64 - 1; leave it out where it is not wanted" },
        { FORWARD, O("\"seed\":18446744073709551616"), "/seed",
          "seed: is 18446744073709551616, must be an integer from 0 to 2^64 - 1" },
        { FORWARD, O("\"seed\":1.0"), "/seed",
          "seed: is 1.0, must be an integer from 0 to 2^64 - 1; it is written without point and exponent" },
        { FORWARD, O("\"seed\":1e3"), "/seed",
          "seed: is 1e3, must be an integer from 0 to 2^64 - 1; it is written without point and exponent" },
        { FORWARD, O("\"seed\":\"1\""), "/seed",
          "seed: is '1', must be an integer from 0 to 2^64 - 1, without quotes" },
        { FORWARD, O("\"out_dtype\":\"int32\""), "/out_dtype",
          "out_dtype: is 'int32', must be float32, float16 or bfloat16; convert what comes back" },
        { FORWARD, O("\"out_dtype\":\"float8_e4m3fn\""), "/out_dtype",
          "out_dtype: is 'float8_e4m3fn', must be float32, float16 or bfloat16; convert what comes back" },
        { FORWARD, O("\"out_dtype\":32"), "/out_dtype", "out_dtype: is 32, must be float32, float16 or bfloat16" },
        { FORWARD, O("\"outputs\":\"out\""), "/outputs",
          "outputs: is 'out', must be an array of names, such as [\"out\"]" },
        { FORWARD, O("\"outputs\":[]"), "/outputs",
          "outputs: is empty, must name out or lse; leave it out for the default" },
        { BACKWARD, OB("\"outputs\":[]"), "/outputs",
          "outputs: is empty, must name dq, dk, dv, dsinks, dbias or dalibi_slopes; leave it out for the default" },
        { FORWARD, O("\"outputs\":[\"out\",\"dq\"]"), "/outputs/1",
          "outputs: [1] is 'dq', must be out or lse; gradients are POST /v1/attention/backward" },
        { BACKWARD, OB("\"outputs\":[\"out\"]"), "/outputs/0",
          "outputs: [0] is 'out', must be dq, dk, dv, dsinks, dbias or dalibi_slopes" },
        { FORWARD, O("\"outputs\":[\"out\",\"out\"]"), "/outputs/1", "outputs: [1] names 'out' a second time" },
        { FORWARD, O("\"outputs\":[7]"), "/outputs/0", "outputs: [0] is 7, must be out or lse" },
        { BACKWARD, OB("\"outputs\":[\"dsinks\"]"), "/outputs", "outputs: dsinks needs sinks, which is not given" },
        { FORWARD, O("\"verify\":\"some\""), "/verify",
          "verify: is 'some', must be an integer from 0 to 2^53, the number of rows, or \"all\"" },
        { FORWARD, O("\"verify\":-1"), "/verify",
          "verify: is -1, must be an integer from 0 to 2^53, the number of rows, or \"all\"; leave it out where it is "
          "not wanted" },
        { FORWARD, O("\"verify\":true"), "/verify",
          "verify: is true, must be an integer from 0 to 2^53, the number of rows, or \"all\"; write \"all\"" },
        { FORWARD, O("\"save\":\"yes\""), "/save", "save: is 'yes', must be true or false; write true" },
        { FORWARD, O("\"timeout_ms\":0"), "/timeout_ms",
          "timeout_ms: is 0, must be an integer from 1 to 2^53, in milliseconds; leave it out where it is not wanted" },
        { FORWARD, O("\"timeout_ms\":\"5s\""), "/timeout_ms",
          "timeout_ms: is '5s', must be an integer from 1 to 2^53, in milliseconds, without quotes and unit" },
        { FORWARD, O("\"scale\":\"1/8\""), "/scale",
          "scale: is '1/8', must be a number; JSON has no fractions, 1/8 is 0.125" },
        { FORWARD, O("\"causal\":\"True\""), "/causal",
          "causal: is 'True', must be true or false, in small letters (in JSON without quotes)" },
        { FORWARD, O("\"timeout_ms\":1.5"), "/timeout_ms",
          "timeout_ms: is 1.5, must be an integer from 1 to 2^53, in milliseconds; it is written without point and "
          "exponent" },
        { BACKWARD, OB("\"deterministic\":0"), "/deterministic",
          "deterministic: is 0, must be true or false; write false" },
        { BACKWARD, "{\"context\":\"\"," DOUT "}", "/context",
          "context: is '', must be the id that a forward with save answered" },
        { BACKWARD, "{\"context\":\"../x\"," DOUT "}", "/context",
          "context: is '../x', must be the id that a forward with save answered" },
        { BACKWARD, "{\"context\":17," DOUT "}", "/context",
          "context: is 17, must be the id that a forward with save answered" },
        { BACKWARD, "{\"context\":\"1234567890123456789012345678901234567890123456789012345678901234\"," DOUT "}",
          "/context",
          "context: is '12345678901234567890123456789012'..., must be the id that a forward with save answered" },
        { BACKWARD, "{\"context\":\"a\"," Q "," DOUT "}", "/q", "q: comes from context and cannot be given beside it" },
        { BACKWARD, "{\"causal\":true,\"context\":\"a\"," DOUT "}", "/causal",
          "causal: comes from context and cannot be given beside it" },
        { FORWARD, O("\"casual\":true"), "/casual", "unknown member 'casual', did you mean 'causal'?" },
        { FORWARD, O("\"key_mask\":true"), "/key_mask",
          "unknown member 'key_mask'; about masks there are 'keep_mask' (1: may attend), 'bias' and "
          "'mask_startend_rows' (/docs lists the members of forward)" },
        { FORWARD, O("\"Causal\":true"), "/Causal", "unknown member 'Causal', did you mean 'causal'?" },
        { FORWARD, O("\"kepe_msak\":true"), "/kepe_msak", "unknown member 'kepe_msak', did you mean 'keep_mask'?" },
        { FORWARD, O("\"x\":{\"data\":\"***\"}"), "/x",
          "unknown member 'x'; send 'q', 'k' and 'v', the projections of it" },
        { FORWARD, O("\"data\":\"***\""), "/data",
          "unknown member 'data'; a tensor is one member, an object with shape, dtype and data" },
        { FORWARD, O("\"a~b/c\":1"), "/a~0b~1c", "unknown member 'a~b/c' (/docs lists the members of forward)" },
        { FORWARD, O("\"\":1"), "/", "unknown member '' (/docs lists the members of forward)" },
        { FORWARD, O("\"a_member_whose_name_is_longer_than_anybody_would_care_to_read_at_once\":1"),
          "/a_member_whose_name_is_longer_than_anybody_would_care_to_read",
          "unknown member 'a_member_whose_name_is_longer_than_anybody_would...'; a name for a request is the header "
          "X-Request-Id (/docs lists the members of forward)" },
        { FORWARD,
          O("\"\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20a"
            "c\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\\u20ac\":1"),
          "/\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82"
          "\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82"
          "\xac\xe2\x82\xac\xe2\x82\xac",
          "unknown member "
          "'\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82"
          "\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac...' (/docs lists "
          "the members of forward)" },
        { FORWARD, O("\"causal\":true,\"causal\":true"), "/causal", "member 'causal' is given twice" },
        { FORWARD, O("\"causal\":true,\"caus\\u0061l\":false"), "/causal", "member 'causal' is given twice" },
        { FORWARD, O(Q), "/q", "member 'q' is given twice" },
        { FORWARD, O(DOUT), "/dout", "dout: belongs to backward, POST /v1/attention/backward" },
        { FORWARD, O("\"deterministic\":true"), "/deterministic",
          "deterministic: belongs to backward, POST /v1/attention/backward; leave it out, the same kernel always gives "
          "the same bits" },
        { FORWARD, O("\"grad_dtype\":\"float32\""), "/grad_dtype",
          "grad_dtype: belongs to backward, POST /v1/attention/backward" },
        { BACKWARD, OB("\"out_dtype\":\"float16\""), "/out_dtype",
          "out_dtype: belongs to forward, POST /v1/attention/forward; the dtype of dq, dk and dv is 'grad_dtype'" },
        { BACKWARD, OB("\"grad_dtype\":\"bfloat16\""), "/grad_dtype",
          "grad_dtype: is bfloat16, must be float32 or float16, q's dtype" },
        { BACKWARD, OB("\"grad_dtype\":\"bfloat16\",\"outputs\":[\"dsinks\"]"), "/grad_dtype",
          "grad_dtype: is bfloat16, must be float32 or float16, q's dtype" },
        { BACKWARD, OB("\"grad_dtype\":\"float64\""), "/grad_dtype",
          "grad_dtype: is 'float64', must be float32, float16 or bfloat16; convert what comes back" },
        { FORWARD, O("\"context\":\"a\""), "/context", "context: belongs to backward, POST /v1/attention/backward" },
        { BACKWARD, OB("\"save\":true"), "/save", "save: belongs to forward, POST /v1/attention/forward" },
        { BACKWARD, OB("\"verify\":1"), "/verify", "verify: belongs to forward, POST /v1/attention/forward" },
        { FORWARD, O("\"out\":1"), "/out", "out: is computed here and cannot be given" },
        { BACKWARD, OB("\"dq\":1"), "/dq", "dq: is computed here and cannot be given" },
        { FORWARD, O("\"dq\":1"), "/dq", "unknown member 'dq'; gradients are POST /v1/attention/backward" },
        { FORWARD, "[]", "",
          "the body is an array, must be an object with q, k and v; several problems are {\"requests\": [{...}, "
          "{...}]}" },
        { FORWARD, "null", "", "the body is null, must be an object with q, k and v" },
        { FORWARD, "17", "", "the body is 17, must be an object with q, k and v" },
        { FORWARD, "\"x\"", "", "the body is a string, 'x', must be an object with q, k and v; was it encoded twice?" },
        { FORWARD, "{\"requests\":{}}", "/requests", "requests: is an object, must be an array of problems" },
        { FORWARD, "{\"requests\":[]}", "/requests", "requests: is empty, must hold at least one problem" },
        { FORWARD, "{\"requests\":[{}],\"timeout_ms\":5}", "/timeout_ms",
          "timeout_ms: cannot stand beside requests" IN_THERE },
        { FORWARD, "{\"causal\":true,\"requests\":[{}]}", "/causal", "causal: cannot stand beside requests" IN_THERE },
        { FORWARD, "{\"requests\":[{}],\"requests\":[{}]}", "/requests", "member 'requests' is given twice" },
        { FORWARD, O("\"causal\":tru"), "", "not JSON at byte 223: expected true, false or null, found '}'" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), ATTN_INVALID);
}

static void test_every_member_lands_where_it_belongs(void **state)
{
    struct decoded d = { 0 };
    proto_item *item;
    (void)state;
    decode_text(&d, ATTN_OP_FORWARD,
                O("\"layout\":\"bshd\",\"scale\":-0.25,\"causal\":true,\"window\":[7,0],\"alignment\":\"top_left\","
                  "\"softcap\":30.5,"
                  "\"dropout_p\":1.25e-1,\"seed\":18446744073709551615,\"out_dtype\":\"F32\",\"outputs\":[\"lse\"],"
                  "\"encoding\":\"array\","
                  "\"verify\":16,\"save\":true,\"timeout_ms\":1500"));
    assert_int_equal(d.status, ATTN_OK);
    assert_false(d.call->envelope);
    assert_int_equal(d.call->count, 1);
    item = &d.call->items[0];
    assert_int_equal(item->problem.op, ATTN_OP_FORWARD);
    assert_true(item->problem.has_scale && item->problem.scale == -0.25);
    assert_true(item->problem.causal);
    assert_int_equal(item->problem.window_left, 7);
    assert_int_equal(item->problem.window_right, 0);
    assert_int_equal(item->problem.alignment, ATTN_TOP_LEFT);
    assert_true(item->problem.softcap == 30.5);
    assert_true(item->problem.dropout_p == 0.125);
    assert_true(item->problem.seed == UINT64_MAX);
    assert_true(item->has_result_dtype);
    assert_int_equal(item->result_dtype, ATTN_F32);
    assert_int_equal(item->outputs, UINT64_C(1) << ATTN_T_lse);
    assert_int_equal(item->encoding, PROTO_ARRAY);
    assert_int_equal(item->verify_rows, 16);
    assert_true(item->save);
    assert_int_equal(item->timeout_ms, 1500);
    assert_int_equal(item->problem.out.rank, 0);
    assert_int_equal(item->problem.lse.rank, 3);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_FORWARD,
                O("\"layout\":\"bshd\",\"verify\":\"all\",\"encoding\":\"base64\",\"alignment\":\"bottom_right\""));
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->items[0].verify_rows, PROTO_VERIFY_ALL);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_BACKWARD, OB("\"deterministic\":true,\"seed\":0,\"scale\":0"));
    assert_int_equal(d.status, ATTN_OK);
    item = &d.call->items[0];
    assert_int_equal(item->problem.op, ATTN_OP_BACKWARD);
    assert_true(item->problem.deterministic);
    assert_true(item->problem.has_scale && item->problem.scale == 0);
    assert_int_equal(item->problem.dq.rank, 4);
    assert_int_equal(item->problem.dk.shape[1], 3);
    assert_int_equal(item->problem.dv.shape[3], 1);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_BACKWARD, OB("\"grad_dtype\":\"F32\""));
    assert_int_equal(d.status, ATTN_OK);
    item = &d.call->items[0];
    for (int id = ATTN_T_dq; id <= ATTN_T_dv; id++) assert_int_equal(item->problem.tensor[id].dtype, ATTN_F32);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_BACKWARD,
                "{\"context\":\"Ab-9._z\"," DOUT
                ",\"outputs\":[\"dv\",\"dsinks\"],\"timeout_ms\":9,\"deterministic\":true,\"grad_dtype\":\"float32\"}");
    assert_int_equal(d.status, ATTN_OK);
    item = &d.call->items[0];
    assert_int_equal(item->result_dtype, ATTN_F32);
    assert_string_equal(item->context, "Ab-9._z");
    assert_int_equal(item->outputs, UINT64_C(1) << ATTN_T_dv | UINT64_C(1) << ATTN_T_dsinks);
    assert_int_equal(item->problem.dout.rank, 4);
    assert_int_equal(item->problem.q.rank, 0);
    decoded_clear(&d);
}

#define FLOAT8(name, shape, data) "\"" name "\":{\"shape\":" shape ",\"dtype\":\"F8_E4M3\",\"data\":" data "}"
#define FLOAT8_QKV \
    FLOAT8("q", "[1,1,1,2]", "[1,2]") "," FLOAT8("k", "[1,1,1,2]", "[3,4]") "," FLOAT8("v", "[1,1,1,1]", "[5]")

/* A scale that is a JSON number becomes a tensor in each problem of a body. */
static void test_a_scale_that_is_a_number_is_a_tensor_of_one(void **state)
{
    struct decoded d = { 0 };
    (void)state;
    decode_text(&d, ATTN_OP_FORWARD,
                "{\"requests\":[{" FLOAT8_QKV ",\"q_scale\":0.5,\"v_scale\":-3e-2},{" FLOAT8_QKV
                ",\"k_scale\":2},{" FLOAT8_QKV ",\"k_scale\":1e39},{\"q_scale\":7}]}");
    assert_int_equal(d.status, ATTN_OK);
    const attn_problem *const first = &d.call->items[0].problem, *const second = &d.call->items[1].problem;
    assert_int_equal(first->q_scale.rank, 1);
    assert_int_equal(first->q_scale.shape[0], 1);
    assert_true(*(const float *)first->q_scale.data == 0.5F && *(const float *)first->v_scale.data == -3e-2F);
    assert_int_equal(first->k_scale.rank, 0);
    assert_true(*(const float *)second->k_scale.data == 2);
    assert_true((uintptr_t)second->k_scale.data % 64 == 0);
    assert_string_equal(d.call->items[2].error.text,
                        "k_scale: is 1e39, must be between -3.4e38 and 3.4e38 (a float32)");
    assert_string_equal(d.call->items[3].error.text, "q: is required; a problem has q, k and v");
    decoded_clear(&d);
}

static void test_rows_of_keys_beside_packed_queries_start_where_they_lie(void **state)
{
    struct decoded d = { 0 };
    (void)state;
    decode_text(&d, ATTN_OP_FORWARD,
                "{\"q\":{\"shape\":[3,1,1],\"dtype\":\"F16\",\"data\":[1,2,3]},"
                "\"k\":{\"shape\":[2,4,1,1],\"dtype\":\"F16\",\"data\":[1,2,3,4,5,6,7,8]},"
                "\"v\":{\"shape\":[2,4,1,1],\"dtype\":\"F16\",\"data\":[1,2,3,4,5,6,7,8]},"
                "\"cu_seqlens_q\":{\"shape\":[3],\"dtype\":\"int64\",\"data\":[0,1,3]},"
                "\"seqlens_k\":{\"shape\":[2],\"dtype\":\"int32\",\"data\":[4,1]}}");
    assert_int_equal(d.status, ATTN_OK);
    const attn_problem *const p = &d.call->items[0].problem;
    const int32_t starts[] = { 0, 4, 8 };
    assert_int_equal(p->cu_seqlens_k.shape[0], 3);
    assert_memory_equal(p->cu_seqlens_k.data, starts, sizeof starts);
    decoded_clear(&d);
}

static void test_what_is_not_said_has_its_default(void **state)
{
    struct decoded d = { 0 };
    const proto_item *item;
    (void)state;
    decode_text(&d, ATTN_OP_FORWARD, "{" QKV "}");
    assert_int_equal(d.status, ATTN_OK);
    item = &d.call->items[0];
    assert_false(item->problem.has_scale);
    assert_false(item->problem.causal);
    assert_int_equal(item->problem.window_left, -1);
    assert_int_equal(item->problem.window_right, -1);
    assert_int_equal(item->problem.alignment, ATTN_BOTTOM_RIGHT);
    assert_int_equal(item->problem.layout, ATTN_BSHD);
    assert_int_equal(item->result_dtype, ATTN_F16);
    assert_int_equal(item->outputs, UINT64_C(1) << ATTN_T_out | UINT64_C(1) << ATTN_T_lse);
    assert_int_equal(item->problem.out.dtype, ATTN_F16);
    assert_int_equal(item->problem.out.shape[3], 1);
    assert_null(item->problem.out.data);
    assert_int_equal(item->problem.lse.dtype, ATTN_F32);
    assert_int_equal(item->timeout_ms, 0);
    assert_int_equal(item->verify_rows, 0);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_BACKWARD, "{" QKV "," DOUT "}");
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->items[0].outputs,
                     UINT64_C(1) << ATTN_T_dq | UINT64_C(1) << ATTN_T_dk | UINT64_C(1) << ATTN_T_dv);
    assert_int_equal(d.call->items[0].problem.dq.dtype, ATTN_F16);
    decoded_clear(&d);

    decode_text(&d, ATTN_OP_FORWARD,
                "{\"q\":{\"shape\":[1,1,1,1],\"dtype\":\"f8_e4m3\",\"data\":[1]},\"k\":{\"shape\":[1,1,1,1],"
                "\"dtype\":\"FP8_E4M3\",\"data\":\"OA==\"},"
                "\"v\":{\"shape\":[1,1,1,1],\"dtype\":\"Float8_E4M3FN\",\"data\":[448]}}");
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->items[0].result_dtype, ATTN_BF16);
    decoded_clear(&d);
}

#define ONE_MORE(name, shape, dtype, data) \
    "{" QKV ",\"" name "\":{\"shape\":" shape ",\"dtype\":\"" dtype "\",\"data\":" data "}}"

static void test_int64_and_bool_become_int32_and_uint8_where_they_fit(void **state)
{
    static const struct {
        const char *body;
        attn_tensor_id id;
        attn_dtype dtype;
        const char *values; /* the expected elements of the tensor after decoding, one digit each */
    } cases[] = {
        { ONE_MORE("seqlens_k", "[1]", "int64", "\"AwAAAAAAAAA=\""), ATTN_T_seqlens_k, ATTN_I32, "3" },
        { ONE_MORE("seqlens_k", "[1]", "I64", "[2]"), ATTN_T_seqlens_k, ATTN_I32, "2" },
        { ONE_MORE("mask_startend_rows", "[1,1,3,2]", "INT64",
                   "\"AAAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAAAAAAAAAAABAAAAAAAAAAIAAAAAAAAA\""),
          ATTN_T_mask_startend_rows, ATTN_I32, "012012" },
        { ONE_MORE("keep_mask", "[1,1,2,3]", "bool", "\"AQABAAEB\""), ATTN_T_keep_mask, ATTN_U8, "101011" },
        { ONE_MORE("keep_mask", "[1,1,2,3]", "BOOL", "[[[[1,0,1],[0,1,1]]]]"), ATTN_T_keep_mask, ATTN_U8, "101011" },
    };
    static const struct refusal wrong[] = {
        { FORWARD, ONE_MORE("seqlens_k", "[1]", "int64", "\"AAAAgAAAAAA=\""), "/seqlens_k/data",
          "seqlens_k: [0] is 2147483648, must be between -2147483648 and 2147483647, as it becomes an int32" },
        { FORWARD,
          ONE_MORE("mask_startend_rows", "[1,1,3,2]", "int64",
                   "\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAD///8AAAAAAAAAAAAAAAAAAAAA\""),
          "/mask_startend_rows/data",
          "mask_startend_rows: [0, 0, 1, 1] is -1099511627776, must be between -2147483648 and 2147483647, as it "
          "becomes an int32" },
        { FORWARD, ONE_MORE("seqlens_k", "[1]", "int64", "[2147483648]"), "/seqlens_k/data",
          "seqlens_k: data at byte 260 of the body: the number is out of the range of int32" },
        { FORWARD, ONE_MORE("seqlens_k", "[1]", "int64", "\"AgAAAA==\""), "/seqlens_k/data",
          "seqlens_k: data has 4 bytes, shape [1] of int64 needs 8; 4 would be right for int32: is that the array's "
          "dtype?" },
        { FORWARD, ONE_MORE("seqlens_k", "[1]", "int32", "\"AgAAAAAAAAA=\""), "/seqlens_k/data",
          "seqlens_k: data has 8 bytes, shape [1] of int32 needs 4; 8 would be right for int64: is that the array's "
          "dtype?" },
        { FORWARD, ONE_MORE("seqlens_k", "[1073741824,1073741824]", "int64", "\"\""), "/seqlens_k/shape",
          "seqlens_k: shape [1073741824, 1073741824] of int64 is more bytes than can be counted" },
        { FORWARD, ONE_MORE("seqlens_k", "[1]", "bool", "[1]"), "/seqlens_k/dtype",
          "seqlens_k: dtype is 'bool', must be int32 or int64; convert it to int32" },
        { FORWARD, ONE_MORE("keep_mask", "[1,1,2,3]", "int64", "[1]"), "/keep_mask/dtype",
          "keep_mask: dtype is 'int64', must be uint8 or bool; convert it to uint8" },
        { FORWARD, ONE_MORE("keep_mask", "[1,1,2,3]", "bool", "\"AQABAAEC\""), "/keep_mask/data",
          "keep_mask: [0, 0, 1, 2] is 2, must be 0 or 1" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decoded d = { 0 };
        decode_text(&d, ATTN_OP_FORWARD, cases[i].body);
        if (d.status) print_error("%s: %s\n", cases[i].body, d.err.text);
        assert_int_equal(d.status, ATTN_OK);
        const attn_tensor *t = &d.call->items[0].problem.tensor[cases[i].id];
        assert_int_equal(t->dtype, cases[i].dtype);
        for (int v = 0; cases[i].values[v]; v++)
            assert_true(attn_load(t->dtype, t->data, v) == cases[i].values[v] - '0');
        decoded_clear(&d);
    }
    check_refusals(wrong, ARRAY_SIZE(wrong), ATTN_INVALID);
}

static void test_names_of_other_programs_are_understood_in_the_message(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, O("\"is_causal\":true"), "/is_causal",
          "unknown member 'is_causal'; write 'causal'; where Sq and Sk differ PyTorch and JAX mean \"alignment\": "
          "\"top_left\"" },
        { FORWARD, O("\"Softmax_Scale\":1"), "/Softmax_Scale", "unknown member 'Softmax_Scale'; write 'scale'" },
        { FORWARD, O("\"Causal\":true"), "/Causal", "unknown member 'Causal', did you mean 'causal'?" },
        { FORWARD, T("{\"datatype\":\"FP32\"}"), "/q/datatype", "q: unknown member 'datatype'; write 'dtype'" },
        { FORWARD, T("{\"is_causal\":1}"), "/q/is_causal",
          /* 'causal' is a member of the body, so it must not be suggested inside a tensor. */
          "q: unknown member 'is_causal' (a tensor has shape, dtype and data)" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"torch.float16\"", B64), "/q/dtype",
          "q: dtype is 'torch.float16', must be float32, float16, bfloat16 or float8_e4m3fn; write float16" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"<f2\"", B64), "/q/dtype",
          "q: dtype is '<f2', must be float32, float16, bfloat16 or float8_e4m3fn; write float16" },
        { FORWARD, TENSOR("[1,2,2,2]", "\">f2\"", B64), "/q/dtype",
          "q: dtype is '>f2', must be float32, float16, bfloat16 or float8_e4m3fn; its bytes must be little-endian, "
          "x.astype(x.dtype.newbyteorder('<'))" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"np.double\"", B64), "/q/dtype",
          "q: dtype is 'np.double', must be float32, float16, bfloat16 or float8_e4m3fn; convert it to float32" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"<class 'jax.numpy.bfloat16'>\"", B64), "/q/dtype",
          "q: dtype is '<class 'jax.numpy.bfloat16'>', must be float32, float16, bfloat16 or float8_e4m3fn; "
          "write bfloat16" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"dtype('>f2')\"", B64), "/q/dtype",
          "q: dtype is 'dtype('>f2')', must be float32, float16, bfloat16 or float8_e4m3fn; its bytes must be "
          "little-endian, x.astype(x.dtype.newbyteorder('<'))" },
        { FORWARD, TENSOR("[1,2,2,2]", "\".\"", B64), "/q/dtype",
          "q: dtype is '.', must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, ONE_MORE("keep_mask", "[1,1,2,3]", "float32", "[]"), "/keep_mask/dtype",
          "keep_mask: dtype is 'float32', must be uint8 or bool; what is added to the scores is 'bias'" },
        { FORWARD, O("\"layout\":\"BNSD\""), "/layout", "layout: is 'BNSD', must be bshd or bhsd; write 'bhsd'" },
        { FORWARD, O("\"outputs\":[\"lse\",\"o\"]"), "/outputs/1",
          "outputs: [1] is 'o', must be out or lse; write 'out'" },
        { FORWARD, O("\"outputs\":[\"Out\"]"), "/outputs/0",
          "outputs: [0] is 'Out', must be out or lse, did you mean 'out'?" },
        { FORWARD, O("\"out_dtype\":\"half\""), "/out_dtype",
          "out_dtype: is 'half', must be float32, float16 or bfloat16; write float16" },
        { FORWARD, O("\"out_dtype\":\"double\""), "/out_dtype",
          "out_dtype: is 'double', must be float32, float16 or bfloat16; convert what comes back" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), ATTN_INVALID);
}

static void test_bytes_of_the_wrong_length_say_what_they_look_like(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"0000803f00000040000080400000c040\""), "/q/data",
          "q: data has 24 bytes, shape [1, 2, 2, 2] of float16 needs 16; this is hexadecimal, base64 is wanted: "
          "base64.b64encode(x.tobytes()).decode()" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"k05VTVBZAQB2AHsn\""), "/q/data",
          "q: data has 12 bytes, shape [1, 2, 2, 2] of float16 needs 16; they begin like an .npy file; send the bytes "
          "of the array alone, x.tobytes()" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"H4sIAAAAAAAA\""), "/q/data",
          "q: data has 9 bytes, shape [1, 2, 2, 2] of float16 needs 16; they begin like gzip; send them uncompressed" },
        { FORWARD, TENSOR("[1,2,2,2]", "\"float16\"", "\"AAAAAAAAAAA=\""), "/q/data",
          "q: data has 8 bytes, shape [1, 2, 2, 2] of float16 needs 16; 8 would be right for float8_e4m3fn: is that "
          "the array's dtype?" },
        /* In 64 bits, 8 times the product of these sizes overflows to 16. */
        { FORWARD, ONE_MORE("keep_mask", "[1,34,14865121,4562284561]", "uint8", "\"AAAAAAAAAAAAAAAAAAAAAA==\""),
          "/keep_mask/data",
          "keep_mask: data has 16 bytes, shape [1, 34, 14865121, 4562284561] of uint8 needs 2305843009213693954" },
        { FORWARD, TENSOR("[1,2,2,0]", "\"float16\"", "\"AAAA\""), "/q/data",
          "q: data has 3 bytes, shape [1, 2, 2, 0] of float16 needs 0" },
        { FORWARD, TENSOR("[1,1,1,1]", "\"float32\"", "\"AAAAAAAAAAA=\""), "/q/data",
          "q: data has 8 bytes, shape [1, 1, 1, 1] of float32 needs 4; 8 would be right for float64: convert the array "
          "to float32" },
        { FORWARD, TENSOR("[1,1,1,1]", "\"float32\"", "[0,0,128,63]"), "/q/data",
          "q: data has 4 numbers, shape [1, 1, 1, 1] needs 1; are these its bytes? They are sent in base64" },
        { FORWARD, TENSOR("[1,1,1,4]", "\"float8_e4m3fn\"", "[0,0,128]"), "/q/data",
          "q: data has 3 numbers, shape [1, 1, 1, 4] needs 4" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), ATTN_INVALID);
}

static void test_a_safetensors_file_is_told_from_json_however_it_is_split(void **state)
{
    static const struct {
        char body[16];
        size_t bytes;
        bool file;
    } cases[] = {
        { "\x40\0\0\0\0\0\0\0{\"q\"", 12, true },
        { "\x7b\0\0\0\0\0\0\0{", 9, true },
        { "\x20\x20\0\0\0\0\0\0{", 9, true },
        { "\x40\0\0\0\0\0\0\0[", 9, false },
        { "\x40\0\0\0\0\0\0\1{", 9, false },
        { "\x40\0\0\0\0\0\0\0", 8, false },
        { "{\"q\":1}", 7, false },
        { "{", 1, false },
    };
    static const char says[] = "the body is no JSON, it begins like a safetensors file; send it with Content-Type: "
                               "application/x-safetensors";
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        for (size_t first = 0; first <= cases[i].bytes; first++) {
            struct decoded d = { 0 };
            size_t split = first;
            decode_in_pieces(&d, &proto_json, ATTN_OP_FORWARD, NULL, cases[i].body, cases[i].bytes,
                             first ? first_then_rest : one_byte, &split);
            assert_int_equal(d.status, ATTN_INVALID);
            assert_int_equal(strcmp(d.err.text, says) == 0, cases[i].file);
            decoded_clear(&d);
        }
}

static void test_every_tensor_of_the_table_is_known(void **state)
{
    (void)state;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        for (int op = 0; op < 2; op++) {
            struct decoded d = { 0 };
            char body[256];
            snprintf(body, sizeof body, "{\"%s\":{\"shape\":[1],\"dtype\":\"%s\",\"data\":[1,2]}}",
                     attn_tensors[id].name,
                     attn_dtype_name((attn_dtype)__builtin_ctz(attn_tensor_dtypes((attn_tensor_id)id))));
            decode_whole(&d, (attn_op)op, body);
            assert_int_equal(d.status, ATTN_INVALID);
            if (proto_takes_tensor((attn_op)op, (attn_tensor_id)id))
                assert_non_null(strstr(d.err.text, ": data has 2 numbers, shape [1] needs 1"));
            else assert_null(strstr(d.err.text, "data has"));
            decoded_clear(&d);
        }
}

static void test_every_option_of_the_table_is_known(void **state)
{
    (void)state;
    for (const proto_option *o = proto_options; o->name; o++)
        for (int op = 0; op < 2; op++) {
            struct decoded d = { 0 };
            char body[128], says[128];
            assert_non_null(o->help);
            snprintf(body, sizeof body, "{\"%s\":null}", o->name);
            decode_whole(&d, (attn_op)op, body);
            assert_int_equal(d.status, ATTN_INVALID);
            snprintf(says, sizeof says, o->ops >> op & 1 ? "%s: is null, must be " : "%s: belongs to ", o->name);
            assert_int_equal(strncmp(d.err.text, says, strlen(says)), 0);
            decoded_clear(&d);
        }
}

static void test_the_defaults_of_the_table_are_true(void **state)
{
    (void)state;
    for (const proto_option *o = proto_options; o->name; o++) {
        struct decoded silent = { 0 }, said = { 0 };
        char body[1024], *a, *b;
        const bool merge = o->ops == PROTO_MERGE;
        const attn_op op = merge                    ? (attn_op)PROTO_OP_MERGE
                           : o->ops & PROTO_FORWARD ? ATTN_OP_FORWARD
                                                    : ATTN_OP_BACKWARD;
        const char *const members = merge ? PARTS : op == ATTN_OP_FORWARD ? QKV : QKV "," DOUT;
        if (!o->otherwise) continue;
        snprintf(body, sizeof body, "{%s}", members);
        decode_whole(&silent, op, body);
        snprintf(body, sizeof body, "{%s,\"%s\":%s}", members, o->name, o->otherwise);
        decode_whole(&said, op, body);
        a = decoded_text(&silent), b = decoded_text(&said);
        assert_int_equal(said.status, ATTN_OK);
        assert_string_equal(a, b);
        free(a), free(b);
        decoded_clear(&silent), decoded_clear(&said);
    }
}

static void test_values_arrive_in_any_form_and_order(void **state)
{
    static const char *const forms[] = {
        "\"shape\":[2,1,1,2],\"dtype\":\"float16\",\"data\":\"ADwAQAB+APw=\"",
        "\"data\":\"ADwAQAB+APw=\",\"shape\":[2,1,1,2],\"dtype\":\"F16\"",
        "\"dtype\":\"fp16\",\"data\":\"ADwAQAB\\u002bAPw\\u003d\",\"shape\":[2,1,1,2]",
        "\"shape\":[2,1,1,2],\"dtype\":\"float16\",\"data\":[1,2,\"NaN\",\"-Infinity\"]",
        "\"data\":[1e0,20e-1,\"NaN\",\"-Infinity\"],\"dtype\":\"float16\",\"shape\":[2,1,1,2]",
        "\"data\":[[[[1,2]]],[[[\"NaN\",\"-Infinity\"]]]],\"shape\":[2,1,1,2],\"dtype\":\"float16\"",
        "\"data\" : [ [[[1.0 , 2]]] , [[[ \"NaN\",\"-Infinity\" ]]] ] , \"dtype\":\"float16\",\"shape\":[2,1,1,2]",
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(forms); i++) {
        struct decoded d = { 0 };
        char body[1024];
        snprintf(body, sizeof body, "{\"q\":{%s},\"k\":{%s},\"v\":{%s}}", forms[i], forms[i],
                 forms[(i + 1) % ARRAY_SIZE(forms)]);
        decode_text(&d, ATTN_OP_FORWARD, body);
        if (d.status) print_error("%s: %s\n", body, d.err.text);
        assert_int_equal(d.status, ATTN_OK);
        for (int id = 0; id < 3; id++)
            assert_memory_equal(d.call->items[0].problem.tensor[id].data,
                                ((uint16_t[]){ 0x3c00, 0x4000, 0x7e00, 0xfc00 }), 8);
        decoded_clear(&d);
    }
}

static void test_empty_tensors_are_tensors(void **state)
{
    static const char *const forms[] = { "\"\"", "[]", "[[]]", "[[[[],[]]]]" };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(forms); i++) {
        struct decoded d = { 0 };
        char body[1024];
        snprintf(body, sizeof body,
                 "{\"q\":{\"shape\":[1,3,2,4],\"dtype\":\"float32\",\"data\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,"
                 "17,18,19,20,21,22,23,24]},"
                 "\"k\":{\"shape\":[1,0,2,4],\"dtype\":\"float32\",\"data\":%s},\"v\":{\"data\":%s,\"shape\":[1,0,2,4],"
                 "\"dtype\":\"float32\"}}",
                 i < 3 ? forms[i] : "[]", i < 3 ? forms[i] : "\"\"");
        decode_text(&d, ATTN_OP_FORWARD, body);
        if (d.status) print_error("%s: %s\n", body, d.err.text);
        assert_int_equal(d.status, ATTN_OK);
        assert_int_equal(d.call->items[0].problem.k.rank, 4);
        assert_int_equal(d.call->items[0].problem.k.shape[1], 0);
        decoded_clear(&d);
    }
}

/* ---- Tests of envelopes (bodies with several problems) ----------------------------------------------------------- */

static void test_problems_of_an_envelope_fail_alone(void **state)
{
    struct decoded d = { 0 };
    (void)state;
    decode_text(&d, ATTN_OP_FORWARD,
                "{\"requests\":[{" QKV ",\"causal\":true},{" Q "," K "},5,{" QKV ",\"casual\":1},{" Q "," K
                ",\"v\":{\"shape\":[1,3,1,1],\"dtype\":\"float16\",\"data\":\"AA_A\"}},{\"requests\":[]},{" QKV
                ",\"seed\":7}]}");
    assert_int_equal(d.status, ATTN_OK);
    assert_true(d.call->envelope);
    assert_int_equal(d.call->count, 7);
    static const struct {
        const char *member, *says;
    } errors[] = {
        { "", "" },
        { "/v", "v: is required; a problem has q, k and v" },
        { "", "a problem is 5, must be an object" },
        { "/casual", "unknown member 'casual', did you mean 'causal'?" },
        { "/v/data", "v: data is not base64 at character 2 (byte 796 of the body): the URL alphabet; '+' and '/' "
                     "are wanted, as base64.b64encode() writes them" },
        { "/requests", "requests: must be the only member of the body" },
        { "", "" },
    };
    for (int i = 0; i < 7; i++) {
        assert_string_equal(d.call->items[i].error.member, errors[i].member);
        assert_string_equal(d.call->items[i].error.text, errors[i].says);
        assert_int_equal(d.call->items[i].error.status, *errors[i].says ? ATTN_INVALID : ATTN_OK);
        assert_int_equal(d.call->items[i].outputs != 0, !*errors[i].says);
    }
    assert_true(d.call->items[0].problem.causal);
    assert_int_equal(d.call->items[6].problem.seed, 7);
    decoded_clear(&d);
}

static void test_an_envelope_has_a_limit(void **state)
{
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct decoded d = { 0 };
    static const char three[] = "{\"requests\":[{},{},{}]}";
    (void)state;
    limits.batch = 2;
    decode_in_pieces(&d, &proto_json, ATTN_OP_FORWARD, &limits, three, sizeof three - 1, NULL, NULL);
    assert_int_equal(d.status, ATTN_TOO_LARGE);
    assert_string_equal(d.err.text, "requests: has 3 problems, at most 2 are taken at once");
    assert_string_equal(d.err.member, "/requests");
    decoded_clear(&d);
    limits.batch = 3;
    decode_in_pieces(&d, &proto_json, ATTN_OP_FORWARD, &limits, three, sizeof three - 1, NULL, NULL);
    assert_int_equal(d.status, ATTN_OK);
    decoded_clear(&d);
}

/* However the body is split, the memory that proto_memory_for() returns must suffice. */
static void test_the_memory_for_a_body_is_known_from_its_length(void **state)
{
    static const char body[] = "{" Q ",\"k\":{\"shape\":[1,1,2,2],\"dtype\":\"float16\",\"data\":\"AAABAAIAAwA=\"},"
                               "\"v\":{\"shape\":[1,1,2,2],\"dtype\":\"float16\",\"data\":\"AAABAAIAAwA=\"}}";
    (void)state;
    for (size_t split = 0; split < sizeof body; split++) {
        struct decoded d = { .memory = { .limit = proto_memory_for(&proto_json, sizeof body - 1, 3) } };
        size_t first = split;
        decode_in_pieces(&d, &proto_json, ATTN_OP_FORWARD, NULL, body, sizeof body - 1,
                         split ? first_then_rest : one_byte, &first);
        assert_int_equal(d.status, ATTN_OK);
        assert_int_equal(d.call->memory_bytes, 64 + 64 + 8);
        decoded_clear(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_a_bad_tensor_is_named_in_the_error, no_differences),
        cmocka_unit_test_teardown(test_a_bad_option_is_named_in_the_error, no_differences),
        cmocka_unit_test_teardown(test_int64_and_bool_become_int32_and_uint8_where_they_fit, no_differences),
        cmocka_unit_test_teardown(test_names_of_other_programs_are_understood_in_the_message, no_differences),
        cmocka_unit_test_teardown(test_bytes_of_the_wrong_length_say_what_they_look_like, no_differences),
        cmocka_unit_test_teardown(test_every_member_lands_where_it_belongs, no_differences),
        cmocka_unit_test_teardown(test_a_scale_that_is_a_number_is_a_tensor_of_one, no_differences),
        cmocka_unit_test_teardown(test_rows_of_keys_beside_packed_queries_start_where_they_lie, no_differences),
        cmocka_unit_test_teardown(test_what_is_not_said_has_its_default, no_differences),
        cmocka_unit_test_teardown(test_a_safetensors_file_is_told_from_json_however_it_is_split, no_differences),
        cmocka_unit_test_teardown(test_every_tensor_of_the_table_is_known, no_differences),
        cmocka_unit_test_teardown(test_every_option_of_the_table_is_known, no_differences),
        cmocka_unit_test_teardown(test_the_defaults_of_the_table_are_true, no_differences),
        cmocka_unit_test_teardown(test_values_arrive_in_any_form_and_order, no_differences),
        cmocka_unit_test_teardown(test_empty_tensors_are_tensors, no_differences),
        cmocka_unit_test_teardown(test_problems_of_an_envelope_fail_alone, no_differences),
        cmocka_unit_test_teardown(test_an_envelope_has_a_limit, no_differences),
        cmocka_unit_test_teardown(test_the_memory_for_a_body_is_known_from_its_length, no_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
