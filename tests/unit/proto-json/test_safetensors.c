/* test_safetensors.c: tests of bodies and answers that are safetensors files. Each body must give the same problem as a
 * JSON body with the same members, however it is split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "codec.h"
#include "proto-json/base64.h"

#define FORWARD  ATTN_OP_FORWARD
#define BACKWARD ATTN_OP_BACKWARD

/* Small valid tensors with B 1, Sq 2, Sk 3, H 2, Hk 1, D 2, Dv 1, in 34 bytes of data. */
#define TENSOR(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"
#define Q   TENSOR("q", "F16", "[1,2,2,2]", 0, 16)
#define K   TENSOR("k", "F16", "[1,3,1,2]", 16, 28)
#define V   TENSOR("v", "F16", "[1,3,1,1]", 28, 34)
#define QKV Q "," K "," V
enum { QKV_BYTES = 34 };

static uint8_t data_byte(size_t i)
{
    return (uint8_t)(i % 2 ? 0x30 + i % 7 : i * 5);
}

/* Returns a safetensors file with this header and `data` bytes of data. The caller frees it. */
static uint8_t *file_of(const char *header, size_t data, size_t *bytes)
{
    const size_t length = strlen(header);
    uint8_t *const body = malloc(8 + length + data + 1);
    assert_non_null(body);
    for (int i = 0; i < 8; i++) body[i] = (uint8_t)((uint64_t)length >> 8 * i);
    memcpy(body + 8, header, length);
    for (size_t i = 0; i < data; i++) body[8 + length + i] = data_byte(i);
    *bytes = 8 + length + data;
    return body;
}

/* Writes a tensor as the member of a JSON request. Its elements are the bytes `begin` to `end` - 1 of the data that
 * file_of() writes to a safetensors file. */
static void put_json(FILE *f, const char *name, const char *dtype, const char *shape, size_t begin, size_t end)
{
    uint8_t data[64];
    char text[BASE64_ENCODED(sizeof data) + 1] = { 0 };
    assert_true(end - begin <= sizeof data);
    for (size_t i = begin; i < end; i++) data[i - begin] = data_byte(i);
    base64_encode(data, end - begin, text);
    fprintf(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data\":\"%s\"}", name, dtype, shape, text);
}

static struct body file_body(attn_op op, const void *bytes, size_t count)
{
    return (struct body){ .format = &proto_safetensors, .op = op, .bytes = bytes, .count = count };
}

static void decode_file(struct decoded *d, attn_op op, const void *bytes, size_t count)
{
    const struct body body = file_body(op, bytes, count);
    decode_body(d, &body, NULL, NULL);
}

static void decode_split(struct decoded *d, attn_op op, const void *bytes, size_t count)
{
    const struct body body = file_body(op, bytes, count);
    assert_int_equal(decode_all_ways(d, &body), 0);
}

/* ---- Tests of bodies that are accepted --------------------------------------------------------------------------- */

/* Checks that a file with this header gives the same problem as JSON with q, k, v and `members`. */
static void check_same(attn_op op, const char *header, const char *members)
{
    struct decoded d = { 0 }, json = { 0 };
    size_t bytes, length;
    char *body_json = NULL, *a, *b;
    uint8_t *body = file_of(header, op == BACKWARD ? QKV_BYTES + 8 : QKV_BYTES, &bytes);
    FILE *f = open_memstream(&body_json, &length);
    assert_non_null(f);
    fprintf(f, "{");
    put_json(f, "q", "float16", "[1,2,2,2]", 0, 16);
    fprintf(f, ",");
    put_json(f, "k", "float16", "[1,3,1,2]", 16, 28);
    fprintf(f, ",");
    put_json(f, "v", "float16", "[1,3,1,1]", 28, 34);
    if (op == BACKWARD) {
        fprintf(f, ",");
        put_json(f, "dout", "float16", "[1,2,2,1]", 34, 42);
    }
    fprintf(f, "%s}", members);
    fclose(f);
    decode_split(&d, op, body, bytes);
    a = decoded_text(&d);
    decode_whole(&json, op, body_json);
    b = decoded_text(&json);
    if (strcmp(a, b) || d.status != ATTN_OK) fail_msg("%s\n%s\nas JSON:\n%s", header, a, b);
    assert_ptr_equal(d.call->answer, &proto_safetensors);
    assert_ptr_equal(json.call->answer, &proto_json);
    free(a), free(b), free(body), free(body_json);
    decoded_clear(&d);
    decoded_clear(&json);
}

static void test_a_file_is_the_same_problem_as_json(void **state)
{
    (void)state;
    check_same(FORWARD, "{" QKV "}", "");
    /* The header may name tensors in any order. */
    check_same(FORWARD, "{" V "," Q "," K "}", "");
    /* The package `safetensors` pads headers with spaces. */
    check_same(FORWARD, "{" QKV "}     ", "");
    check_same(FORWARD, "{\"__metadata__\":{}," QKV "}", "");
    check_same(FORWARD,
               "{\"q\":{\"data_offsets\":[0,16],\"shape\":[1,2,2,2],\"dtype\":\"float16\"}," K ","
               "\"v\":{\"dtype\":\"fp16\",\"data_offsets\":[28,34],\"shape\":[1,3,1,1]}}",
               "");
    check_same(BACKWARD, "{" QKV "," TENSOR("dout", "F16", "[1,2,2,1]", 34, 42) "}", "");
}

static void test_options_are_strings_that_hold_json(void **state)
{
    static const struct {
        attn_op op;
        const char *metadata, *json;
    } cases[] = {
        { FORWARD, "\"causal\":\"true\"", "\"causal\":true" },
        { FORWARD, "\"causal\":\" true \"", "\"causal\":true" },
        { FORWARD, "\"causal\":\"True\",\"save\":\"False\"", "\"causal\":true,\"save\":false" },
        { FORWARD, "\"scale\":\"0.125\",\"window\":\"[-1, 0]\"", "\"scale\":0.125,\"window\":[-1,0]" },
        { FORWARD, "\"seed\":\"18446744073709551615\",\"dropout_p\":\"0.5\"",
          "\"seed\":18446744073709551615,\"dropout_p\":0.5" },
        { FORWARD, "\"outputs\":\"[\\\"lse\\\"]\"", "\"outputs\":[\"lse\"]" },
        { FORWARD, "\"verify\":\"all\"", "\"verify\":\"all\"" },
        { FORWARD, "\"verify\":\"\\\"all\\\"\"", "\"verify\":\"all\"" },
        { FORWARD, "\"verify\":\"7\",\"save\":\"true\",\"timeout_ms\":\"9\"",
          "\"verify\":7,\"save\":true,\"timeout_ms\":9" },
        { FORWARD, "\"layout\":\"bshd\",\"alignment\":\"top_left\"", "\"layout\":\"bshd\",\"alignment\":\"top_left\"" },
        { FORWARD, "\"layout\":\"\\\"bshd\\\"\",\"encoding\":\"\\\"array\\\"\"",
          "\"layout\":\"bshd\",\"encoding\":\"array\"" },
        { FORWARD, "\"out_dtype\":\"float32\"", "\"out_dtype\":\"float32\"" },
        { FORWARD, "\"out_dtype\":\"\\\"F32\\\"\"", "\"out_dtype\":\"F32\"" },
        { BACKWARD, "\"deterministic\":\"true\"", "\"deterministic\":true" },
        { BACKWARD, "\"grad_dtype\":\"F32\"", "\"grad_dtype\":\"float32\"" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char header[1024], members[512];
        snprintf(header, sizeof header, "{\"__metadata__\":{%s},%s%s}", cases[i].metadata, QKV,
                 cases[i].op == BACKWARD ? "," TENSOR("dout", "F16", "[1,2,2,1]", 34, 42) : "");
        snprintf(members, sizeof members, ",%s", cases[i].json);
        check_same(cases[i].op, header, members);
    }
}

static void test_what_describes_a_file_is_passed_over(void **state)
{
    static const char *const members[] = {
        "\"format\":\"pt\"",
        "\"format\":\"mlx\",\"total_size\":\"34\",\"total_parameters\":\"17\"",
        "\"framework\":\"pt\",\"library_name\":\"diffusers\",\"_diffusers_version\":\"0.35\",\"_class_name\":\"X\"",
        "\"modelspec.title\":\"a \\\"b\\\"\",\"modelspec.sai_model_spec\":\"1.0.0\",\"ss_network_dim\":\"16\"",
        "\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":\"{\\\"q\\\":{\\\"saved_offsets\\\":[0]}}\",\"workflow\":\"{\"",
    };
    char header[1024];
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(members); i++) {
        snprintf(header, sizeof header, "{\"__metadata__\":{%s,\"causal\":\"true\"},%s}", members[i], QKV);
        check_same(FORWARD, header, ",\"causal\":true");
        snprintf(header, sizeof header, "{\"__metadata__\":{%s},%s}", members[i],
                 QKV "," TENSOR("dout", "F16", "[1,2,2,1]", 34, 42));
        check_same(BACKWARD, header, "");
    }
}

/* Sends the member under each of its names, with a wrong value. A parser that knows the member refuses the value. */
static void check_member_is_read(attn_op op, const char *name)
{
    struct decoded d = { 0 };
    char header[512], member[64];
    size_t bytes;
    snprintf(header, sizeof header, "{\"__metadata__\":{\"%s\":\"?\"},%s}", name,
             op == BACKWARD ? QKV "," TENSOR("dout", "F16", "[1,2,2,1]", 34, 42) : QKV);
    snprintf(member, sizeof member, "/%s", name);
    uint8_t *body = file_of(header, op == BACKWARD ? QKV_BYTES + 8 : QKV_BYTES, &bytes);
    decode_file(&d, op, body, bytes);
    if (d.status == ATTN_OK || strcmp(d.err.member, member) != 0) fail_msg("%s: %s", name, d.err.text);
    free(body);
    decoded_clear(&d);
}

static void test_no_member_of_ours_is_passed_over(void **state)
{
    (void)state;
    for (attn_op op = FORWARD; op <= BACKWARD; op++) {
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) check_member_is_read(op, attn_tensors[id].name);
        for (const proto_option *o = proto_options; o->name; o++) check_member_is_read(op, o->name);
    }
}

/* The id of a context (a saved forward) is a string, even if it has only digits. */
static void test_a_context_of_digits_is_a_word(void **state)
{
    static const char *const ids[] = { "123", "true", "\\\"123\\\"" };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ids); i++) {
        char header[512];
        size_t bytes;
        struct decoded d = { 0 };
        snprintf(header, sizeof header,
                 "{\"__metadata__\":{\"context\":\"%s\"}," TENSOR("dout", "F16", "[1,2,2,1]", 0, 8) "}", ids[i]);
        uint8_t *body = file_of(header, 8, &bytes);
        decode_file(&d, BACKWARD, body, bytes);
        assert_int_equal(d.status, ATTN_OK);
        assert_string_equal(d.call->items[0].context, i == 1 ? "true" : "123");
        free(body);
        decoded_clear(&d);
    }
}

/* After a tensor of 0, 4 or 5 bytes, the next one still begins at a multiple of 64 (decoded_text() checks this). */
static void test_every_tensor_gets_a_boundary_of_its_own(void **state)
{
    static const char header[] = "{" TENSOR("q", "F32", "[1,1,1,1]", 5, 9) "," TENSOR(
        "k", "F32", "[1,5,1,1]", 9, 29) "," TENSOR("v", "F32", "[1,5,1,1]", 29, 49) "," TENSOR("keep_mask", "BOOL",
                                                                                               "[1,1,1,5]", 0, 5) "}";
    static const char empty[] = "{" TENSOR("v", "F32", "[1,0,1,1]", 4, 4) "," TENSOR(
        "q", "F32", "[1,1,1,1]", 0, 4) "," TENSOR("k", "F32", "[1,0,1,1]", 4, 4) "}";
    struct decoded d = { 0 };
    size_t bytes;
    (void)state;
    uint8_t *body = file_of(header, 49, &bytes);
    for (int i = 0; i < 5; i++) body[sizeof header - 1 + 8 + i] = (uint8_t)(i % 2);
    decode_split(&d, FORWARD, body, bytes);
    assert_int_equal(d.status, ATTN_OK);
    const attn_problem *p = &d.call->items[0].problem;
    assert_int_equal(p->keep_mask.dtype, ATTN_U8);
    assert_memory_equal(p->keep_mask.data, body + sizeof header - 1 + 8, 5);
    assert_memory_equal(p->q.data, body + sizeof header - 1 + 8 + 5, 4);
    assert_memory_equal(p->v.data, body + sizeof header - 1 + 8 + 29, 20);
    assert_int_equal(d.call->memory_bytes, 3 * 64 + 20);
    free(body);
    decoded_clear(&d);

    body = file_of(empty, 4, &bytes);
    decode_split(&d, FORWARD, body, bytes);
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->items[0].problem.k.shape[1], 0);
    free(body);
    decoded_clear(&d);
}

static void test_int64_becomes_int32(void **state)
{
    static const char header[] = "{" QKV "," TENSOR("seqlens_k", "I64", "[1]", 34, 42) "}";
    size_t bytes;
    struct decoded d = { 0 };
    int64_t length = 2;
    (void)state;
    uint8_t *body = file_of(header, QKV_BYTES + 8, &bytes);
    memcpy(body + bytes - 8, &length, 8);
    decode_file(&d, FORWARD, body, bytes);
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(d.call->items[0].problem.seqlens_k.dtype, ATTN_I32);
    assert_int_equal(*(const int32_t *)d.call->items[0].problem.seqlens_k.data, 2);
    decoded_clear(&d);
    length = INT64_C(1) << 31;
    memcpy(body + bytes - 8, &length, 8);
    decode_file(&d, FORWARD, body, bytes);
    assert_string_equal(d.err.text, "seqlens_k: [0] is 2147483648, must be between -2147483648 and 2147483647, as it "
                                    "becomes an int32");
    free(body);
    decoded_clear(&d);
}

/* ---- Tests of bodies that are refused ---------------------------------------------------------------------------- */

struct refusal {
    attn_op op;
    const char *header;
    size_t data;
    const char *member, *says;
};

static void check_refusals(const struct refusal *cases, size_t count, const proto_limits *limits, attn_status status)
{
    int differences = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        uint8_t *const made = file_of(cases[i].header, cases[i].data, &bytes);
        struct body body = file_body(cases[i].op, made, bytes);
        body.limits = limits;
        differences += refused_otherwise(&body, cases[i].header, status, cases[i].member, cases[i].says);
        free(made);
    }
    assert_int_equal(differences, 0);
}

#define METADATA(members) "{\"__metadata__\":{" members "}," QKV "}"

static void test_offsets_that_cannot_be(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"shape\":[1,2,2,2]}," K "," V "}", 34, "/q",
          "q: data_offsets is missing, must be [begin, end], two integers that count bytes of the data" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":16}}", 34, "/q",
          "q: data_offsets is 16, must be [begin, end], two integers that count bytes of the data" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0]}}", 34, "/q",
          "q: data_offsets is an array of another length, must be [begin, end], two integers that count bytes of the "
          "data" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,16,32]}}", 34, "/q",
          "q: data_offsets is an array of another length, must be [begin, end], two integers that count bytes of the "
          "data" },
        { FORWARD, "{" TENSOR("q", "F16", "[1]", 0, -2) "}", 34, "/q",
          "q: data_offsets[1] is -2, must be an integer from 0 to 9007199254740992" },
        { FORWARD, "{" TENSOR("q", "F16", "[1]", 0.0, 2) "}", 34, "/q",
          "q: data_offsets[0] is 0.0, must be an integer from 0 to 9007199254740992" },
        { FORWARD, "{" TENSOR("q", "F16", "[1]", 0, 18446744073709551616) "}", 34, "/q",
          "q: data_offsets[1] is 18446744073709551616, must be an integer from 0 to 9007199254740992" },
        { FORWARD, "{" Q "," TENSOR("k", "F16", "[1,3,1,2]", 28, 16) "," V "}", 34, "/k",
          "k: data_offsets are [28, 16], must be [begin, end], and the end is not before the begin" },
        { FORWARD, "{" Q "," TENSOR("k", "F16", "[1,3,1,2]", 14, 26) "," V "}", 34, "/k",
          "k: data_offsets are [14, 26], must begin at 16, where q ends: tensors follow each other without "
          "overlapping" },
        { FORWARD, "{" Q "," TENSOR("k", "F16", "[1,2,2,2]", 0, 16) "}", 34, "/k",
          "k: data_offsets are [0, 16], must begin at 16, where q ends: tensors follow each other without "
          "overlapping" },
        { FORWARD, "{" Q "," TENSOR("k", "F16", "[1,3,1,2]", 18, 30) "}", 34, "/k",
          "k: data_offsets are [18, 30], must begin at 16, where q ends: tensors follow each other without gaps" },
        { FORWARD, "{" K "," V "}", 34, "/k", "k: data_offsets are [16, 28], but no tensor begins at 0" },
        { FORWARD, "{" QKV "}", 33, "/v",
          "v: the body ends after 5 of its 6 bytes: it has 224 bytes, must have 225 (was it cut off?)" },
        { FORWARD, "{" QKV "}", 0, "/q",
          "q: the body ends after 0 of its 16 bytes: it has 191 bytes, must have 225 (was it cut off?)" },
        { FORWARD, "{" QKV "}", 35, "",
          "the body goes on behind its last tensor, which ends at byte 225: 8, the header's 183, and 34 of data" },
        { FORWARD, "{}", 1, "",
          "the body goes on behind its last tensor, which ends at byte 10: 8, the header's 2, and 0 of data" },
        { FORWARD, "{" TENSOR("q", "F32", "[1,2,2,2]", 0, 16) "," K "," V "}", 34, "/q/data",
          "q: data has 16 bytes, shape [1, 2, 2, 2] of float32 needs 32; 16 would be right for float16: is that the "
          "array's dtype?" },
        { FORWARD, "{" TENSOR("q", "F16", "[1,2,2,2]", 0, 0) "}", 0, "/q/data",
          "q: data has 0 bytes, shape [1, 2, 2, 2] of float16 needs 16" },
        { FORWARD, "{" TENSOR("q", "F16", "[9007199254740992,9007199254740992,2,2]", 0, 16) "}", 16, "/q/shape",
          "q: shape [9007199254740992, 9007199254740992, 2, 2] of float16 is more bytes than can be counted" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), NULL, ATTN_INVALID);
}

static void test_headers_that_cannot_be(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, "", 0, "", "the length of the header is 0, must be at least 2: {}" },
        { FORWARD, "{", 5, "", "the length of the header is 1, must be at least 2: {}" },
        { FORWARD, "[]", 0, "", "the header is an array, must be an object with q, k and v" },
        { FORWARD, "17", 0, "", "the header is 17, must be an object with q, k and v" },
        { FORWARD, "{\"q\":", 0, "", "the header of 5 bytes ends before its JSON is complete" },
        { FORWARD, "    ", 0, "", "the header of 4 bytes ends before its JSON is complete" },
        { FORWARD, "{\"q\":x}", 0, "", "not JSON at byte 13: expected a value, found 'x'" },
        { FORWARD, "{" QKV "}}", 34, "", "not JSON at byte 191: expected nothing after the value, found '}'" },
        { FORWARD, "{\"q\":{\"dtype\":\"\xff\"}}", 0, "", "byte 23: invalid UTF-8" },
        { FORWARD, "{" Q "," Q "}", 16, "/q", "member 'q' is given twice" },
        { FORWARD, "{\"q\":5}", 0, "/q",
          "q: is 5, must be an object: {\"dtype\": \"F16\", \"shape\": [...], \"data_offsets\": [begin, end]}" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"dtype\":\"F16\"}}", 0, "/q", "q: member 'dtype' is given twice" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"shape\":[0],\"data\":0,\"data_offsets\":[0,0]}}", 0, "/q",
          "q: unknown member 'data', a tensor has dtype, shape and data_offsets" },
        { FORWARD, "{\"q\":{\"shape\":[1],\"data_offsets\":[0,0]}}", 0, "/q",
          "q: dtype is missing, must be float32, float16, bfloat16 or float8_e4m3fn" },
        { FORWARD, "{\"q\":{\"dtype\":\"F16\",\"data_offsets\":[0,0]}}", 0, "/q",
          "q: shape is missing; q is [B, Sq, H, D]" },
        { FORWARD, "{" TENSOR("q", "F64", "[1,2,2,2]", 0, 16) "}", 16, "/q/dtype",
          "q: dtype is 'F64', must be float32, float16, bfloat16 or float8_e4m3fn; convert it to float32" },
        /* names */
        { FORWARD, "{" QKV "," TENSOR("biass", "F16", "[1]", 34, 36) "}", 36, "/biass",
          "unknown member 'biass', did you mean 'bias'?" },
        { FORWARD, "{" QKV "," TENSOR("dout", "F16", "[1]", 34, 36) "}", 36, "/dout",
          "dout: belongs to backward, POST /v1/attention/backward" },
        { FORWARD, "{" QKV "," TENSOR("causal", "U8", "[1]", 34, 35) "}", 35, "/causal",
          "causal: is an option, which stands in __metadata__ as a string: {\"__metadata__\": {\"causal\": \"...\"}}" },
        { FORWARD, "{" QKV ",\"causal\":true}", 34, "/causal",
          "causal: is an option, which stands in __metadata__ as a string: {\"__metadata__\": {\"causal\": \"...\"}}" },
        { FORWARD, "{" TENSOR("requests", "U8", "[1]", 0, 1) "}", 1, "/requests",
          "requests: a safetensors body holds one problem; several go into one JSON body" },
        { FORWARD, METADATA("\"requests\":\"[]\""), 34, "/requests",
          "requests: a safetensors body holds one problem; several go into one JSON body" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), NULL, ATTN_INVALID);
}

static void test_options_that_cannot_be(void **state)
{
    static const struct refusal cases[] = {
        { FORWARD, "{\"__metadata__\":[]," QKV "}", 34, "/__metadata__",
          "__metadata__: is an array, must be an object of strings" },
        { FORWARD, METADATA("\"causal\":true"), 34, "/causal",
          "causal: is true in __metadata__, must be a string that holds JSON: \"true\", \"0.125\"" },
        { FORWARD, METADATA("\"causal\":\"true\",\"causal\":\"true\""), 34, "/__metadata__/causal",
          "__metadata__: member 'causal' is given twice" },
        { FORWARD, METADATA("\"causal\":\"TRUE\""), 34, "/causal",
          "causal: is 'TRUE', must be true or false, in small letters (in JSON without quotes)" },
        { FORWARD, METADATA("\"causal\":\"\""), 34, "/causal",
          "causal: is '', must be true or false; leave it out where it is not wanted" },
        { FORWARD, METADATA("\"causal\":\"1\""), 34, "/causal", "causal: is 1, must be true or false; write true" },
        { FORWARD, METADATA("\"causal\":\"\\\"true\\\"\""), 34, "/causal",
          "causal: is 'true', must be true or false, without quotes" },
        { FORWARD, METADATA("\"scale\":\"0,5\""), 34, "/scale", "scale: is '0,5', must be a number" },
        { FORWARD, METADATA("\"scale\":\"NaN\""), 34, "/scale", "scale: is 'NaN', must be a number" },
        { FORWARD, METADATA("\"window\":\"(1, 2)\""), 34, "/window",
          "window: is '(1, 2)', must be [left, right], where -1 is unbounded" },
        { FORWARD, METADATA("\"layout\":\"bsnd\""), 34, "/layout",
          "layout: is 'bsnd', must be bshd or bhsd; write 'bshd'" },
        { FORWARD, METADATA("\"layout\":\"5\""), 34, "/layout", "layout: is '5', must be bshd or bhsd" },
        { FORWARD, METADATA("\"verify\":\"every\""), 34, "/verify",
          "verify: is 'every', must be an integer from 0 to 2^53, the number of rows, or \"all\"" },
        { FORWARD, METADATA("\"casual\":\"true\""), 34, "/casual", "unknown member 'casual', did you mean 'causal'?" },
        /* The parser ignores names that describe a file, such as "format", but not these similar ones. */
        { FORWARD, METADATA("\"formats\":\"pt\""), 34, "/formats",
          "unknown member 'formats' (/docs lists the members of forward)" },
        { FORWARD, METADATA("\"Format\":\"pt\""), 34, "/Format",
          "unknown member 'Format'; leave it out; 'encoding' says how numbers are written, the header Accept asks for "
          "safetensors" },
        { FORWARD, METADATA("\"modelspec\":\"x\""), 34, "/modelspec",
          "unknown member 'modelspec' (/docs lists the members of forward)" },
        { FORWARD, METADATA("\"format\":1"), 34, "/format",
          "format: is 1 in __metadata__, must be a string that holds JSON: \"true\", \"0.125\"" },
        { FORWARD, METADATA("\"__metadata__\":\"x\""), 34, "/__metadata__",
          "unknown member '__metadata__'; leave it out, a name for a request is the header X-Request-Id" },
        { FORWARD, METADATA("\"bias\":\"{\\\"shape\\\":[1],\\\"dtype\\\":\\\"F32\\\",\\\"data\\\":[1]}\""), 34, "/bias",
          "bias: is a tensor and cannot stand in __metadata__" },
        { BACKWARD, METADATA("\"context\":\"a b\""), 34, "/context",
          "context: is 'a b', must be the id that a forward with save answered" },
    };
    (void)state;
    check_refusals(cases, ARRAY_SIZE(cases), NULL, ATTN_INVALID);
}

static void test_beginnings_that_cannot_be(void **state)
{
    static const struct {
        const char *body;
        size_t bytes;
        attn_status status;
        const char *says;
    } cases[] = {
        { "", 0, ATTN_INVALID, "the body is empty, expected a safetensors file with q, k and v" },
        { "\x10\0\0\0\0", 5, ATTN_INVALID,
          "the body has 5 bytes, a safetensors body begins with 8 that hold the length of its header" },
        { "\x10\0\0\0\0\0\0\0", 8, ATTN_INVALID,
          "the length of the header is 16, but the body ends 0 bytes behind it (was it cut off?)" },
        { "\x10\0\0\0\0\0\0\0{\"q\":{", 14, ATTN_INVALID,
          "the length of the header is 16, but the body ends 6 bytes behind it (was it cut off?)" },
        { "\0\0\0\0\0\0\0\x80{}", 10, ATTN_TOO_LARGE,
          "the length of the header is 9223372036854775808, at most 65536 bytes are taken (is it a safetensors "
          "body?)" },
        { "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, ATTN_TOO_LARGE,
          "the length of the header is 18446744073709551615, at most 65536 bytes are taken (is it a safetensors "
          "body?)" },
        { "\1\0\1\0\0\0\0\0{}", 10, ATTN_TOO_LARGE,
          "the length of the header is 65537, at most 65536 bytes are taken (is it a safetensors body?)" },
        { "{\"q\": {\"shape\": [1]}}", 21, ATTN_INVALID,
          "the body begins like JSON, where a safetensors body has 8 bytes with the length of its header; the content "
          "type of JSON is application/json" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decoded d = { 0 };
        decode_split(&d, FORWARD, cases[i].body, cases[i].bytes);
        assert_string_equal(d.err.text, cases[i].says);
        assert_int_equal(d.status, cases[i].status);
        decoded_clear(&d);
    }
}

static void test_limits(void **state)
{
    static const struct refusal tensors[] = {
        { FORWARD, "{" QKV "}", 34, "", "the tensors take 134 bytes, at most 133 are taken" },
        { FORWARD, "{" TENSOR("q", "U8", "[1]", 0, 9007199254740992) "}", 0, "",
          "the tensors take 9007199254740992 bytes, at most 133 are taken" },
    };
    static const struct refusal header = { FORWARD, "{" QKV "}", 34, "",
                                           "the length of the header is 183, at most 182 bytes are taken (is it a "
                                           "safetensors body?)" };
    static const struct refusal depth = { FORWARD, "{\"q\":{\"shape\":[[1]]}}", 0, "",
                                          "byte 23: nested deeper than 3" };
    static const struct refusal members = {
        FORWARD, "{" QKV "}", 34, "",
        "byte 46: an object of more than 2 members (of a typed array of JavaScript send Array.from(x), or "
        "Buffer.from(x.buffer).toString('base64'))"
    };
    static const struct refusal values = { FORWARD, METADATA("\"outputs\":\"[1,2,3,4,5]\""), 34, "",
                                           "__metadata__: its strings hold more than 38 values or 1048576 bytes" };
    static const struct refusal fine = { FORWARD, METADATA("\"outputs\":\"[1,2,3,4]\""), 34, "/outputs/0",
                                         "outputs: [0] is 1, must be out or lse" };
    static const struct refusal many = { FORWARD, "{\"q\":{\"shape\":[1,2,3]}}", 0, "",
                                         "more than 4 values outside tensor data" };
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    (void)state;
    limits.tensor_bytes = 133;
    check_refusals(tensors, ARRAY_SIZE(tensors), &limits, ATTN_TOO_LARGE);
    limits = (proto_limits)PROTO_LIMITS_DEFAULT;
    limits.rest_bytes = 182;
    check_refusals(&header, 1, &limits, ATTN_TOO_LARGE);
    limits = (proto_limits)PROTO_LIMITS_DEFAULT;
    limits.depth = 3;
    check_refusals(&depth, 1, &limits, ATTN_INVALID);
    limits = (proto_limits)PROTO_LIMITS_DEFAULT;
    limits.members = 2;
    check_refusals(&members, 1, &limits, ATTN_INVALID);
    limits = (proto_limits)PROTO_LIMITS_DEFAULT;
    /* The limit is 38 values, and 33 values are in the header. So the strings of __metadata__ may hold five values,
     * such as an array of four numbers. */
    limits.values = 38;
    check_refusals(&values, 1, &limits, ATTN_TOO_LARGE);
    check_refusals(&fine, 1, &limits, ATTN_INVALID);
    limits.values = 4;
    check_refusals(&many, 1, &limits, ATTN_TOO_LARGE);
}

/* The parser requests memory as bytes arrive, and not at once. */
static void test_memory(void **state)
{
    static const char header[] = "{" TENSOR("q", "F32", "[1,4000,1,1]", 0, 16000) "," TENSOR(
        "k", "F32", "[1,4000,1,1]", 16000, 32000) "," TENSOR("v", "F32", "[1,4000,1,1]", 32000, 48000) "}";
    struct decoded d = { 0 };
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    attn_error err = { 0 };
    size_t bytes;
    uint8_t *body = file_of(header, 48000, &bytes);
    (void)state;
    d.memory.limit = proto_memory_for(&proto_safetensors, bytes, 3);
    assert_true(d.memory.limit < bytes + 10000);
    decode_file(&d, FORWARD, body, bytes);
    assert_int_equal(d.status, ATTN_OK);
    decoded_clear(&d);

    d.memory.limit = 20000;
    /* The first piece ends inside the header, so it needs no memory. */
    decode_split(&d, FORWARD, body, 30);
    assert_int_equal(d.memory.growths, 0);
    decoded_clear(&d);
    d.memory.limit = 20000;
    decode_file(&d, FORWARD, body, bytes);
    assert_string_equal(d.err.text, "the test's memory ends at 20000 bytes");
    decoded_clear(&d);

    const proto_memory memory = { moving_grow, &d.memory };
    proto_parser *parser = proto_parser_new(&proto_safetensors, FORWARD, &limits, &memory);
    assert_int_equal(proto_parser_feed(parser, body, sizeof header - 1 + 8 + 100, &err), ATTN_OK);
    assert_int_equal(d.memory.bytes, PROTO_MEMORY_STEP);
    assert_int_equal(proto_parser_skeleton_bytes(parser), sizeof header - 1 + 8);
    proto_parser_free(parser);
    decoded_clear(&d);
    free(body);
}

/* ---- Tests of answers -------------------------------------------------------------------------------------------- */

static uint8_t *answer_of(const proto_call *call, const proto_result *result, size_t block, size_t *length)
{
    proto_encoder *e = NULL;
    attn_error err = { 0 };
    size_t done = 0, count;
    assert_int_equal(proto_encoder_new(call, result, "req-1", &e, &err), ATTN_OK);
    *length = (size_t)proto_encoder_length(e);
    uint8_t *text = malloc(*length + 1);
    assert_non_null(text);
    do {
        uint8_t *piece = malloc(block);
        assert_non_null(piece);
        count = proto_encoder_read(e, piece, block);
        assert_true(count <= block && count <= *length - done);
        memcpy(text + done, piece, count);
        free(piece);
        done += count;
    } while (count > 0);
    assert_int_equal(done, *length);
    text[done] = '\0';
    proto_encoder_free(e);
    return text;
}

static void give(proto_item *item, attn_tensor_id id, void *data, attn_dtype dtype, int rank, const int64_t *shape)
{
    item->problem.tensor[id] = attn_tensor_make(data, dtype, rank, shape);
    item->outputs |= UINT64_C(1) << id;
}

static void test_an_answer(void **state)
{
    static const char header[] =
        "{\"__metadata__\":{\"seed\":\"18446744073709551615\","
        "\"verification\":\"{\\\"max_abs\\\":0.5,\\\"relative\\\":\\\"NaN\\\",\\\"rows\\\":3}\","
        "\"context\":\"\\\"c-1\\\"\",\"backend\":\"\\\"cpu avx2\\\"\","
        "\"timing_us\":\"{\\\"queue\\\":1.5,\\\"copy_in\\\":0.0,\\\"compute\\\":0.0,\\\"copy_out\\\":0.0}\"},"
        "\"lse\":{\"dtype\":\"F32\",\"shape\":[1,1,3],\"data_offsets\":[0,12]},"
        "\"out\":{\"dtype\":\"BF16\",\"shape\":[1,3,1,1],\"data_offsets\":[12,18]}}";
    uint16_t out[] = { 0x3f80, 0x4000, 0xff80 };
    float lse[] = { 1.0f, 2.0f, 0.5f };
    proto_item item = { .problem = ATTN_PROBLEM_INIT, .encoding = PROTO_ARRAY };
    const proto_call call = { .answer = &proto_safetensors, .count = 1, .items = &item };
    proto_result result = { .backend = "cpu avx2", .context = "c-1", .verified = true };
    size_t length;
    (void)state;
    give(&item, ATTN_T_out, out, ATTN_BF16, 4, (const int64_t[]){ 1, 3, 1, 1 });
    give(&item, ATTN_T_lse, lse, ATTN_F32, 3, (const int64_t[]){ 1, 1, 3 });
    item.problem.dropout_p = 0.5;
    item.problem.seed = UINT64_MAX;
    result.verification.max_abs = 0.5, result.verification.relative = 0.0 / 0.0, result.verification.rows = 3;
    result.timing_us[PROTO_STAGE_queue] = 1.5;
    assert_false(proto_writes_numbers(&call, &item));
    const size_t padded = (sizeof header - 1 + 7) / 8 * 8;
    for (size_t block = 1; block <= 8 + padded + 20; block++) {
        uint8_t *text = answer_of(&call, &result, block, &length);
        assert_int_equal(length, 8 + padded + 18);
        assert_int_equal(text[0] | text[1] << 8, padded);
        for (int i = 2; i < 8; i++) assert_int_equal(text[i], 0);
        assert_memory_equal(text + 8, header, sizeof header - 1);
        for (size_t i = sizeof header - 1; i < padded; i++) assert_int_equal(text[8 + i], ' ');
        assert_memory_equal(text + 8 + padded, lse, 12);
        assert_memory_equal(text + 8 + padded + 12, out, 6);
        free(text);
    }
}

static void test_an_answer_without_elements(void **state)
{
    proto_item item = { .problem = ATTN_PROBLEM_INIT };
    const proto_call call = { .answer = &proto_safetensors, .count = 1, .items = &item };
    const proto_result result = { .backend = "cpu" };
    size_t length;
    (void)state;
    give(&item, ATTN_T_out, NULL, ATTN_F16, 4, (const int64_t[]){ 1, 0, 1, 1 });
    uint8_t *text = answer_of(&call, &result, 1000, &length);
    assert_int_equal(length % 8, 0);
    assert_non_null(
        strstr((char *)text + 8, "\"out\":{\"dtype\":\"F16\",\"shape\":[1,0,1,1],\"data_offsets\":[0,0]}}"));
    free(text);
}

static void test_an_answer_is_a_body(void **state)
{
    float out[] = { 1, 2, 3, 4 }, lse[] = { 5, 6 };
    proto_item item = { .problem = ATTN_PROBLEM_INIT };
    const proto_call call = { .answer = &proto_safetensors, .count = 1, .items = &item };
    const proto_result result = { .backend = "cpu" };
    struct decoded d = { 0 };
    size_t length;
    (void)state;
    give(&item, ATTN_T_out, out, ATTN_F32, 4, (const int64_t[]){ 1, 2, 1, 2 });
    give(&item, ATTN_T_lse, lse, ATTN_F32, 3, (const int64_t[]){ 1, 1, 2 });
    uint8_t *text = answer_of(&call, &result, 1000, &length);
    decode_file(&d, BACKWARD, text, length);
    assert_int_equal(d.status, ATTN_INVALID);
    assert_string_equal(d.err.text, "unknown member 'backend'; leave it out, the server decides");
    free(text);
    decoded_clear(&d);
}

static void test_several_problems_are_answered_in_json(void **state)
{
    struct decoded d = { 0 };
    attn_error err = { 0 };
    (void)state;
    decode_whole(&d, FORWARD, "{\"requests\":[{}]}");
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(proto_call_answer_as(d.call, &proto_json, &err), ATTN_OK);
    assert_int_equal(proto_call_answer_as(d.call, &proto_safetensors, &err), ATTN_INVALID);
    assert_string_equal(err.member, "/requests");
    assert_string_equal(err.text, "requests: application/x-safetensors has room for the answer of one problem; send "
                                  "them one by one, or accept application/json");
    assert_ptr_equal(d.call->answer, &proto_json);
    decoded_clear(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_file_is_the_same_problem_as_json),
        cmocka_unit_test(test_options_are_strings_that_hold_json),
        cmocka_unit_test(test_what_describes_a_file_is_passed_over),
        cmocka_unit_test(test_no_member_of_ours_is_passed_over),
        cmocka_unit_test(test_a_context_of_digits_is_a_word),
        cmocka_unit_test(test_every_tensor_gets_a_boundary_of_its_own),
        cmocka_unit_test(test_int64_becomes_int32),
        cmocka_unit_test(test_offsets_that_cannot_be),
        cmocka_unit_test(test_headers_that_cannot_be),
        cmocka_unit_test(test_options_that_cannot_be),
        cmocka_unit_test(test_beginnings_that_cannot_be),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_an_answer),
        cmocka_unit_test(test_an_answer_without_elements),
        cmocka_unit_test(test_an_answer_is_a_body),
        cmocka_unit_test(test_several_problems_are_answered_in_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
