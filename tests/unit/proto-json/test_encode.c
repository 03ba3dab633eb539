/* test_encode.c: tests answers byte by byte, in whatever block sizes they are read. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "codec.h"

static char *answer(const proto_call *call, const proto_result *results, size_t block)
{
    proto_encoder *e = NULL;
    attn_error err = { 0 };
    size_t done = 0, count;
    char *text;
    assert_int_equal(proto_encoder_new(call, results, "req-1", &e, &err), ATTN_OK);
    const size_t length = proto_encoder_length(e);
    text = malloc(length + 1);
    assert_non_null(text);
    for (;;) {
        /* The block has exactly the requested size, so that AddressSanitizer reports a write beyond it. */
        char *piece = malloc(block);
        assert_non_null(piece);
        count = proto_encoder_read(e, piece, block);
        assert_true(count <= block && count <= length - done);
        assert_true(count == block || done + count == length); /* every block but the last is full */
        memcpy(text + done, piece, count);
        free(piece);
        done += count;
        if (!count) break;
    }
    assert_int_equal(done, length);
    assert_int_equal(proto_encoder_read(e, text, 0), 0);
    text[done] = '\0';
    proto_encoder_free(e);
    return text;
}

/* Checks that the answer is JSON and has the text `says`, in whatever block sizes it is read. */
static void check(const proto_call *call, const proto_result *results, const char *says)
{
    const size_t length = strlen(says);
    cJSON *json = cJSON_ParseWithLengthOpts(says, length + 1, NULL, true);
    assert_non_null(json);
    cJSON_Delete(json);
    for (size_t block = 1; block <= length + 1; block++) {
        char *text = answer(call, results, block);
        assert_string_equal(text, says);
        free(text);
    }
}

static void give(proto_item *item, attn_tensor_id id, void *data, attn_dtype dtype, int rank, const int64_t *shape)
{
    item->problem.tensor[id] = attn_tensor_make(data, dtype, rank, shape);
    item->outputs |= UINT64_C(1) << id;
}

#define SHAPE(...)    \
    (const int64_t[]) \
    {                 \
        __VA_ARGS__   \
    }
#define TIMING "\"timing_us\":{\"queue\":0.0,\"copy_in\":0.0,\"compute\":0.0,\"copy_out\":0.0}"

static void test_an_answer_of_base64(void **state)
{
    uint16_t out[] = { 0x3c00, 0x4000, 0xfc00 };
    float lse[] = { 1.0f, -INFINITY, 0.5f };
    proto_item item = { .problem = ATTN_PROBLEM_INIT };
    const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
    proto_result result = { .backend = "cpu avx512" };
    (void)state;
    give(&item, ATTN_T_out, out, ATTN_F16, 4, SHAPE(1, 3, 1, 1));
    give(&item, ATTN_T_lse, lse, ATTN_F32, 3, SHAPE(1, 1, 3));
    result.timing_us[PROTO_STAGE_recv] = 1000;
    result.timing_us[PROTO_STAGE_queue] = 12.34;
    result.timing_us[PROTO_STAGE_copy_in] = 0.05;
    result.timing_us[PROTO_STAGE_launch] = 1.28;
    result.timing_us[PROTO_STAGE_compute] = 123455.5;
    result.timing_us[PROTO_STAGE_copy_out] = -1;
    check(&call, &result,
          "{\"out\":{\"shape\":[1,3,1,1],\"dtype\":\"float16\",\"data\":\"ADwAQAD8\"},"
          "\"lse\":{\"shape\":[1,1,3],\"dtype\":\"float32\",\"data\":\"AACAPwAAgP8AAAA/\"},"
          "\"backend\":\"cpu "
          "avx512\",\"timing_us\":{\"queue\":12.3,\"copy_in\":0.1,\"compute\":123456.8,\"copy_out\":0.0}}");
}

static void test_every_remainder_of_three(void **state)
{
    static const char *const texts[] = {
        "", "AQ==", "AQI=", "AQID", "AQIDBA==", "AQIDBAU=", "AQIDBAUG", "AQIDBAUGBw=="
    };
    (void)state;
    for (int64_t bytes = 0; bytes < (int64_t)ARRAY_SIZE(texts); bytes++) {
        uint8_t out[] = { 1, 2, 3, 4, 5, 6, 7 };
        proto_item item = { .problem = ATTN_PROBLEM_INIT };
        const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
        const proto_result result = { .backend = "cpu" };
        char says[256];
        give(&item, ATTN_T_out, out, ATTN_U8, 1, SHAPE(bytes));
        snprintf(says, sizeof says,
                 "{\"out\":{\"shape\":[%d],\"dtype\":\"uint8\",\"data\":\"%s\"},\"backend\":\"cpu\"," TIMING "}",
                 (int)bytes, texts[bytes]);
        check(&call, &result, says);
    }
}

static void test_an_answer_of_numbers(void **state)
{
    float dq[] = { 0.1f, -0.0f, 1, 16777216, NAN, INFINITY, -INFINITY, 3.4028235e38f, 1e-45f, 1.5f, 100, 0.001f };
    uint16_t dk[] = { 0x3c01, 0x2e66, 0x7bff, 0x0001 }; /* float16 */
    uint16_t dv[] = { 0x3f80, 0x3dcd };                 /* bfloat16 */
    proto_item item = { .problem = ATTN_PROBLEM_INIT, .encoding = PROTO_ARRAY };
    const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
    const proto_result result = { .backend = "reference" };
    (void)state;
    give(&item, ATTN_T_dq, dq, ATTN_F32, 4, SHAPE(2, 3, 1, 2));
    give(&item, ATTN_T_dk, dk, ATTN_F16, 3, SHAPE(1, 1, 4));
    give(&item, ATTN_T_dv, dv, ATTN_BF16, 1, SHAPE(2));
    check(&call, &result,
          "{\"dq\":{\"shape\":[2,3,1,2],\"dtype\":\"float32\",\"data\":"
          "[[[[0.1,-0.0]],[[1,16777216]],[[\"NaN\",\"Infinity\"]]],[[[\"-Infinity\",3.4028235e38]],[[1e-45,1.5]],[[100,"
          "0.001]]]]},"
          "\"dk\":{\"shape\":[1,1,4],\"dtype\":\"float16\",\"data\":[[[1.001,0.1,65500,6e-8]]]},"
          "\"dv\":{\"shape\":[2],\"dtype\":\"bfloat16\",\"data\":[1,0.1]},\"backend\":\"reference\"," TIMING "}");
}

static void test_an_empty_tensor_is_flat(void **state)
{
    proto_item item = { .problem = ATTN_PROBLEM_INIT, .encoding = PROTO_ARRAY };
    const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
    const proto_result result = { .backend = "cpu" };
    (void)state;
    /* Nested arrays of this shape would be 2^40 pairs of brackets. */
    give(&item, ATTN_T_out, NULL, ATTN_F32, 4, SHAPE(INT64_C(1) << 40, 0, 3, 2));
    check(&call, &result,
          "{\"out\":{\"shape\":[1099511627776,0,3,2],\"dtype\":\"float32\",\"data\":[]},\"backend\":\"cpu\"," TIMING
          "}");
    item.encoding = PROTO_BASE64;
    check(&call, &result,
          "{\"out\":{\"shape\":[1099511627776,0,3,2],\"dtype\":\"float32\",\"data\":\"\"},\"backend\":\"cpu\"," TIMING
          "}");
}

static void test_what_else_an_answer_says(void **state)
{
    float lse[] = { 1 };
    proto_item item = { .problem = ATTN_PROBLEM_INIT };
    const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
    proto_result result = {
        .backend = "cuda:0 \"sm90\"", .context = "c-1", .verified = true, .verification = { 1.5e-7, NAN, 16 }
    };
    (void)state;
    give(&item, ATTN_T_lse, lse, ATTN_F32, 3, SHAPE(1, 1, 1));
    item.problem.dropout_p = 0.5;
    item.problem.seed = UINT64_MAX;
    check(&call, &result,
          "{\"lse\":{\"shape\":[1,1,1],\"dtype\":\"float32\",\"data\":\"AACAPw==\"},\"seed\":18446744073709551615,"
          "\"verification\":{\"max_abs\":1.5e-07,\"relative\":\"NaN\",\"rows\":16},\"context\":\"c-1\","
          "\"backend\":\"cuda:0 sm90\"," TIMING "}");
}

/* An answer has the sizes (B, H, Sq, ...) that the server read from the shapes, so that a client sees if it sent
 * another layout than it meant. */
static void test_the_sizes_are_told_as_they_were_read(void **state)
{
    static const int32_t longest[] = { 5, 900, 7 };
    static const struct {
        const char *says;
        int q_rank;
        int64_t q[4], k[4], v[4];
        attn_layout layout;
        int64_t sequences, pages; /* sequences: number of packed sequences; pages: entries in a row of page_table */
        bool whole_keys;          /* cu_seqlens_k too */
        int lengths;              /* of caches */
    } cases[] = {
#define SAYS(first, last) "\"sizes\":{" first last "},"
#define SMALL             ",\"H\":4,\"Hk\":2,\"D\":8,\"Dv\":8"
        { .says = SAYS("\"B\":1,\"Sq\":8,\"Sk\":9", ",\"H\":128,\"Hk\":64,\"D\":48,\"Dv\":32"),
          .q_rank = 4,
          .q = { 1, 8, 128, 48 },
          .k = { 1, 9, 64, 48 },
          .v = { 1, 9, 64, 32 } },
        { .says = SAYS("\"B\":2,\"Sq\":128,\"Sk\":64", ",\"H\":8,\"Hk\":2,\"D\":48,\"Dv\":32"),
          .q_rank = 4,
          .q = { 2, 8, 128, 48 },
          .k = { 2, 2, 64, 48 },
          .v = { 2, 2, 64, 32 },
          .layout = ATTN_BHSD },
        { .says = SAYS("\"sequences\":2,\"total_q\":7,\"total_k\":0", SMALL),
          .q_rank = 3,
          .q = { 7, 4, 8 },
          .k = { 0, 2, 8 },
          .v = { 0, 2, 8 },
          .sequences = 2,
          .whole_keys = true },
        { .says = SAYS("\"B\":2,\"Sq\":1,\"Sk\":48", SMALL),
          .q_rank = 4,
          .q = { 2, 1, 4, 8 },
          .k = { 9, 16, 2, 8 },
          .v = { 9, 16, 2, 8 },
          .pages = 3 },
        { .says = SAYS("\"sequences\":2,\"total_q\":7,\"Sk\":48", SMALL),
          .q_rank = 3,
          .q = { 7, 4, 8 },
          .k = { 9, 16, 2, 8 },
          .v = { 9, 16, 2, 8 },
          .sequences = 2,
          .pages = 3 },
        { .says = "\"lengths\":[5,900,7]," SAYS("\"B\":3,\"Sq\":1,\"Sk\":900", SMALL),
          .q_rank = 4,
          .q = { 3, 1, 4, 8 },
          .k = { 9, 128, 2, 8 },
          .v = { 9, 128, 2, 8 },
          .pages = 8,
          .lengths = 3 },
        { .says = "" }, /* an append has no queries, so its answer has no sizes */
#undef SAYS
#undef SMALL
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        proto_item item = { .problem = ATTN_PROBLEM_INIT };
        attn_problem *const p = &item.problem;
        const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
        const proto_result result = { .backend = "cpu",
                                      .lengths = cases[i].lengths ? longest : NULL,
                                      .length_count = cases[i].lengths };
        const int q_rank = cases[i].q_rank, k_rank = cases[i].pages ? 4 : q_rank;
        const int64_t bounds = cases[i].sequences + 1;
        char says[512];
        p->layout = cases[i].layout;
        p->q = attn_tensor_make(NULL, ATTN_F32, q_rank, cases[i].q);
        p->k = attn_tensor_make(NULL, ATTN_F32, k_rank, cases[i].k);
        p->v = attn_tensor_make(NULL, ATTN_F32, k_rank, cases[i].v);
        if (bounds > 1) p->cu_seqlens_q = attn_tensor_make(NULL, ATTN_I32, 1, &bounds);
        if (cases[i].whole_keys) p->cu_seqlens_k = attn_tensor_make(NULL, ATTN_I32, 1, &bounds);
        if (cases[i].pages) p->page_table = attn_tensor_make(NULL, ATTN_I32, 2, SHAPE(3, cases[i].pages));
        snprintf(says, sizeof says, "{%s\"backend\":\"cpu\"," TIMING "}", cases[i].says);
        check(&call, &result, says);
    }
}

static void test_an_envelope_answers_each(void **state)
{
    float lse[] = { 1 };
    proto_item items[3] = { { .problem = ATTN_PROBLEM_INIT },
                            { .error = { ATTN_INVALID, "/q/shape/1", "q: shape[1] is \"x\"" } },
                            { .problem = ATTN_PROBLEM_INIT, .error = { ATTN_TIMEOUT, "", "too late" } } };
    const proto_call call = { .answer = &proto_json, .envelope = true, .count = 3, .items = items };
    const proto_result results[3] = { { .backend = "cpu" } };
    (void)state;
    give(&items[0], ATTN_T_lse, lse, ATTN_F32, 1, SHAPE(1));
    give(&items[2], ATTN_T_lse, NULL, ATTN_F32, 1, SHAPE(1));
    check(&call, results,
          "{\"responses\":[{\"lse\":{\"shape\":[1],\"dtype\":\"float32\",\"data\":\"AACAPw==\"},\"backend\":"
          "\"cpu\"," TIMING "},"
          "{\"error\":{\"type\":\"urn:attnd:invalid-request\",\"title\":\"The request is "
          "malformed\",\"status\":400,\"code\":\"invalid-request\","
          "\"request_id\":\"req-1\",\"pointer\":\"/requests/1/q/shape/1\",\"detail\":\"q: shape[1] is "
          "\\\"x\\\"\",\"error\":\"q: shape[1] is \\\"x\\\"\"}},"
          "{\"error\":{\"type\":\"urn:attnd:deadline-exceeded\",\"title\":\"The deadline "
          "passed\",\"status\":504,\"code\":\"deadline-exceeded\","
          "\"request_id\":\"req-1\",\"pointer\":\"/requests/2\",\"detail\":\"too late\",\"error\":\"too late\"}}]}");
}

static void test_a_failed_call_has_no_answer(void **state)
{
    proto_item item = { .problem = ATTN_PROBLEM_INIT, .error = { ATTN_DEVICE, "", "the device failed" } };
    const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
    const proto_result result = { .backend = "" };
    proto_encoder *e = NULL;
    attn_error err = { 0 };
    (void)state;
    assert_int_equal(proto_encoder_new(&call, &result, "r", &e, &err), ATTN_DEVICE);
    assert_string_equal(err.text, "the device failed");
    assert_null(e);
}

static void test_answers_can_be_requests(void **state)
{
    enum { ALL = 1 << 16 };
    uint16_t *out = malloc(ALL * sizeof *out);
    (void)state;
    assert_non_null(out);
    for (int i = 0; i < ALL; i++) out[i] = (i & 0x7fff) > 0x7c00 ? 0x7e00 : (uint16_t)i;
    for (int encoding = 0; encoding < 2; encoding++) {
        proto_item item = { .problem = ATTN_PROBLEM_INIT, .encoding = (proto_encoding)encoding };
        const proto_call call = { .answer = &proto_json, .count = 1, .items = &item };
        const proto_result result = { .backend = "cpu" };
        struct decoded d = { 0 };
        char *text, *body, *end;
        give(&item, ATTN_T_out, out, ATTN_F16, 4, SHAPE(1, ALL / 16, 1, 16));
        text = answer(&call, &result, 65536);
        end = strstr(text, ",\"backend\"");
        assert_non_null(end);
        *end = '\0';
        body = malloc(3 * strlen(text) + 64);
        assert_non_null(body);
        sprintf(body, "{\"q\":%s,\"k\":%s,\"v\":%s}", text + 7, text + 7, text + 7); /* behind {"out": */
        decode_whole(&d, ATTN_OP_FORWARD, body);
        if (d.status) print_error("%s\n", d.err.text);
        assert_int_equal(d.status, ATTN_OK);
        assert_memory_equal(d.call->items[0].problem.q.data, out, ALL * sizeof *out);
        decoded_clear(&d);
        free(body);
        free(text);
    }
    free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_answer_of_base64),
        cmocka_unit_test(test_every_remainder_of_three),
        cmocka_unit_test(test_an_answer_of_numbers),
        cmocka_unit_test(test_an_empty_tensor_is_flat),
        cmocka_unit_test(test_the_sizes_are_told_as_they_were_read),
        cmocka_unit_test(test_what_else_an_answer_says),
        cmocka_unit_test(test_an_envelope_answers_each),
        cmocka_unit_test(test_a_failed_call_has_no_answer),
        cmocka_unit_test(test_answers_can_be_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
