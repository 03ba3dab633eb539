/* test_kserve.c: tests of bodies and answers of KServe v2 with binary tensors. Each body must give the same problem as
 * a JSON body with the same members, however it is split. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "codec.h"

static const proto_model forward = { "attention_forward", ATTN_OP_FORWARD, false, false, ATTN_F32 },
                         causal = { "attention_forward_causal", ATTN_OP_FORWARD, true, false, ATTN_F32 },
                         half = { "attention_forward_fp16", ATTN_OP_FORWARD, false, true, ATTN_F16 },
                         single = { "attention_forward_fp32", ATTN_OP_FORWARD, false, true, ATTN_F32 },
                         backward = { "attention_backward", ATTN_OP_BACKWARD, false, false, ATTN_F32 };

/* Small valid inputs with B 1, Sq 2, Sk 3, H 2, Hk 1, D 2, Dv 1: as numbers, or as 34 bytes. */
#define INPUT(name, shape, more) "{\"name\":\"" name "\",\"shape\":" shape ",\"datatype\":\"FP16\"," more "}"
#define SIZE(bytes)              "\"parameters\":{\"binary_data_size\":" #bytes "}"
#define REGION(name, size)       "\"parameters\":{\"shared_memory_region\":" name ",\"shared_memory_byte_size\":" size "}"
#define Q                        INPUT("q", "[1,2,2,2]", "\"data\":[0,1,2,3,4,5,6,7]")
#define K                        INPUT("k", "[1,3,1,2]", "\"data\":[[[[1,2]],[[3,4]],[[5,6]]]]")
#define V                        INPUT("v", "[1,3,1,1]", "\"data\":[1,2,3]")
#define BINARY_Q                 INPUT("q", "[1,2,2,2]", SIZE(16))
#define BINARY_K                 INPUT("k", "[1,3,1,2]", SIZE(12))
#define BINARY_V                 INPUT("v", "[1,3,1,1]", SIZE(6))
#define BODY(inputs, more)       "{\"inputs\":[" inputs "]" more "}"
#define QKV                      Q "," K "," V
#define BINARY_QKV               BINARY_Q "," BINARY_K "," BINARY_V
enum { QKV_BYTES = 34 };
/* lengths of the JSON as the request states them. ALL: not stated; THE_JSON: the true length */
enum { ALL = -1, THE_JSON = -2 };

struct infer {
    const proto_model *model;
    const char *json;
    size_t data; /* number of tensor bytes after the JSON */
    int64_t json_bytes;
};

static const uint16_t numbers[] = { 0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x3c00,
                                    0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x3c00, 0x4000, 0x4200 };

static struct body body_of(const struct infer *infer, const proto_limits *limits)
{
    const size_t length = strlen(infer->json), count = length + infer->data;
    uint8_t *const made = calloc(1, count + 1);
    assert_non_null(made);
    memcpy(made, infer->json, length);
    memcpy(made + length, numbers, infer->data < sizeof numbers ? infer->data : sizeof numbers);
    return (struct body){ .bytes = made,
                          .count = count,
                          .limits = limits,
                          .model = infer->model,
                          .json_bytes = infer->json_bytes == THE_JSON ? (int64_t)length : infer->json_bytes };
}

static void decode_with(struct decoded *d, const struct infer *infer, const proto_limits *limits,
                        size_t (*piece_of)(void *context, size_t left), void *context)
{
    const struct body body = body_of(infer, limits);
    decode_body(d, &body, piece_of, context);
    free((void *)body.bytes);
}

static void decode_split(struct decoded *d, const struct infer *infer)
{
    const struct body body = body_of(infer, NULL);
    assert_int_equal(decode_all_ways(d, &body), 0);
    free((void *)body.bytes);
}

struct refusal {
    struct infer body;
    const char *member, *says;
};

static void check_refusals(const struct refusal *cases, size_t count)
{
    int differences = 0;
    for (size_t i = 0; i < count; i++) {
        const struct body body = body_of(&cases[i].body, NULL);
        differences += refused_otherwise(&body, cases[i].body.json, ATTN_INVALID, cases[i].member, cases[i].says);
        free((void *)body.bytes);
    }
    assert_int_equal(differences, 0);
}

/* ---- Tests of tensors in shared memory --------------------------------------------------------------------------- */

/* Decodes a body. All regions of shared memory that it names exist, and hold the bytes of the inputs in QKV. */
static void decode_shared(struct decoded *d, const struct infer *infer, proto_shared **list, int *count,
                          proto_shared copy[8])
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d->memory };
    const struct body body = body_of(infer, NULL);
    proto_parser *const parser = proto_parser_new(&proto_kserve, body.model->op, &limits, &memory);
    proto_parser_kserve(parser, body.model, body.json_bytes);
    d->status = proto_parser_feed(parser, body.bytes, body.count, &d->err);
    if (d->status == ATTN_OK) d->status = proto_parser_shared(parser, list, count, &d->err);
    if (d->status == ATTN_OK) d->status = proto_parser_shared_room(parser, &d->err);
    for (int i = 0; d->status == ATTN_OK && i < *count; i++) {
        static const size_t at[] = { 0, 8, 14 };
        copy[i] = (*list)[i];
        if (!copy[i].output && copy[i].bytes > 0) memcpy(copy[i].to, numbers + at[copy[i].id], (size_t)copy[i].bytes);
    }
    if (d->status == ATTN_OK) d->status = proto_parser_finish(parser, &d->call, &d->err);
    proto_parser_free(parser);
    free((void *)body.bytes);
}

#define SHARED(name, shape, region, size) INPUT(name, shape, REGION("\"" region "\"", size))

static void test_inputs_in_shared_memory_are_those_of_the_body(void **state)
{
    (void)state;
    static const struct {
        struct infer body;
        int shared;
    } cases[] = {
        { { &forward, BODY(SHARED("q", "[1,2,2,2]", "a", "16") "," K "," V, ""), 0, ALL }, 1 },
        { { &forward,
            BODY(SHARED("v", "[1,3,1,1]", "a", "6") "," SHARED("q", "[1,2,2,2]", "b", "16") "," SHARED("k", "[1,3,1,2]",
                                                                                                       "a", "12"),
                 ""),
            0, THE_JSON },
          3 },
        { { &forward, BODY(BINARY_Q "," SHARED("k", "[1,3,1,2]", "a", "12") "," V, ""), 16, THE_JSON }, 1 },
        { { &forward, BODY(SHARED("k", "[1,3,1,2]", "a", "12") "," BINARY_Q "," SHARED("v", "[1,3,1,1]", "a", "6"), ""),
            16, THE_JSON },
          2 },
    };
    static const struct infer plain = { &forward, BODY(QKV, ""), 0, ALL };
    struct decoded must = { 0 };
    decode_with(&must, &plain, NULL, NULL, NULL);
    char *const want = decoded_text(&must);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decoded d = { 0 };
        proto_shared *list;
        proto_shared copy[8];
        int count = 0;
        decode_shared(&d, &cases[i].body, &list, &count, copy);
        assert_int_equal(count, cases[i].shared);
        char *const text = decoded_text(&d);
        assert_string_equal(text, want);
        free(text);
        decoded_clear(&d);
    }
    free(want);
    decoded_clear(&must);
}

static void test_what_lies_in_shared_memory_is_told(void **state)
{
    (void)state;
    static const struct infer body = {
        &forward,
        BODY(INPUT("q", "[1,2,2,2]",
                   "\"parameters\":{\"shared_memory_offset\":7,\"shared_memory_region\":\"a "
                   "b\",\"shared_memory_byte_size\":16}") "," K "," V,
             ",\"parameters\":{\"binary_data_output\":true},\"outputs\":[{\"name\":\"lse\"},{\"name\":\"out\","
             "\"parameters\":{"
             "\"binary_data\":false,\"shared_memory_region\":\"o\",\"shared_memory_byte_size\":9007199254740992,"
             "\"shared_memory_offset\":9007199254740992}}]"),
        0, ALL
    };
    struct decoded d = { 0 };
    proto_shared *list;
    proto_shared copy[8];
    int count = 0;
    decode_shared(&d, &body, &list, &count, copy);
    assert_int_equal(d.status, ATTN_OK);
    assert_int_equal(count, 2);
    assert_true(!copy[0].output && copy[0].id == ATTN_T_q && copy[0].index == 0 && copy[0].offset == 7 &&
                copy[0].bytes == 16);
    assert_string_equal(copy[0].region, "a b");
    assert_true(copy[1].output && copy[1].id == ATTN_T_out && copy[1].index == 1);
    assert_true(copy[1].offset == INT64_C(1) << 53 && copy[1].bytes == INT64_C(1) << 53);
    assert_true(d.call->shared == UINT64_C(1) << ATTN_T_out && d.call->binary == UINT64_C(1) << ATTN_T_lse);
    assert_false(proto_writes_numbers(d.call, d.call->items));
    decoded_clear(&d);
}

/* In the answer, an output in shared memory has no parameters, because Triton's C++ client would look in them for a
 * size of binary data. */
static void test_an_output_in_shared_memory_is_only_named(void **state)
{
    (void)state;
    static const struct infer body = {
        &forward, BODY(QKV, ",\"outputs\":[{\"name\":\"out\"," REGION("\"x\"", "8") "},{\"name\":\"lse\"}]"), 0, ALL
    };
    struct decoded d = { 0 };
    proto_shared copy[8];
    proto_shared *list;
    int count;
    proto_result result = { .backend = "test" };
    proto_encoder *encoder;
    char text[1024] = "";
    float lse[4] = { 1, 2, 3, 4 };
    uint16_t out[4] = { 0 };
    decode_shared(&d, &body, &list, &count, copy);
    assert_int_equal(d.status, ATTN_OK);
    d.call->items[0].problem.out.data = out;
    d.call->items[0].problem.lse.data = lse;
    assert_int_equal(proto_encoder_new(d.call, &result, "id", &encoder, &d.err), ATTN_OK);
    assert_int_equal(proto_encoder_length(encoder), proto_encoder_head_bytes(encoder));
    proto_encoder_read(encoder, text, sizeof text - 1);
    assert_non_null(
        strstr(text, "\"outputs\":[{\"name\":\"out\",\"datatype\":\"FP16\",\"shape\":[1,2,2,1]},{\"name\":\"lse\","));
    assert_non_null(strstr(text, "\"data\":[1,2,3,4]}]}"));
    proto_encoder_free(encoder);
    decoded_clear(&d);
}

static void test_faults_of_shared_inputs_name_their_size(void **state)
{
    (void)state;
    static const struct infer body = { &forward, BODY(K "," SHARED("q", "[1,2,2,2]", "a", "12") "," V, ""), 0, ALL },
                              far = { &forward, BODY(SHARED("q", "[1,2,2,2]", "a", "9007199254740992") "," QKV, ""), 0,
                                      ALL };
    struct decoded d = { 0 };
    proto_shared copy[8];
    proto_shared *list;
    int count;
    decode_shared(&d, &body, &list, &count, copy);
    assert_int_equal(d.status, ATTN_INVALID);
    assert_string_equal(d.err.member, "/inputs/1/parameters/shared_memory_byte_size");
    assert_string_equal(d.err.text, "q: data has 12 bytes, shape [1, 2, 2, 2] of float16 needs 16");
    decoded_clear(&d);
    decode_shared(&d, &far, &list, &count, copy);
    assert_true(d.status == ATTN_INVALID || d.status == ATTN_TOO_LARGE);
    decoded_clear(&d);
}

/* The parser requests memory for inputs in shared memory only after the server has checked that the region exists. */
static void test_memory_for_shared_inputs_is_asked_for_after_the_body(void **state)
{
    (void)state;
    static const char body[] = BODY(SHARED("q", "[1,2,2,2]", "a", "1000000") "," BINARY_K "," BINARY_V, "");
    struct decoded d = { .memory.limit = 8192 };
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory memory = { moving_grow, &d.memory };
    proto_shared *list;
    int count;
    proto_parser *const parser = proto_parser_new(&proto_kserve, ATTN_OP_FORWARD, &limits, &memory);
    proto_parser_kserve(parser, &forward, (int64_t)strlen(body));
    assert_int_equal(proto_parser_feed(parser, body, strlen(body), &d.err), ATTN_OK);
    assert_int_equal(proto_parser_feed(parser, numbers, 18, &d.err), ATTN_OK);
    assert_int_equal(proto_parser_shared(parser, &list, &count, &d.err), ATTN_OK);
    assert_int_equal(count, 1);
    assert_int_equal(proto_parser_shared_room(parser, &d.err), ATTN_TOO_LARGE);
    assert_string_equal(d.err.text, "the test's memory ends at 8192 bytes");
    d.memory.limit = 2000000;
    assert_int_equal(proto_parser_shared_room(parser, &d.err), ATTN_OK);
    memset(list[0].to, 0, (size_t)list[0].bytes);
    proto_parser_free(parser);
    decoded_clear(&d);
}

static void test_a_region_is_read_from_what_clients_send(void **state)
{
    (void)state;
    static const struct {
        const char *body, *member, *says; /* NULL: accepted */
    } cases[] = {
        { "{\"key\": \"/x\", \"offset\": 5, \"byte_size\": 64}", NULL, NULL },
        { "{\"byte_size\":64,\"offset\":5,\"key\":\"/x\"}\n", NULL, NULL },
        { "", "", "the body is empty, must be like {\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}" },
        { "[]", "",
          "the body is an array, must be an object: {\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}" },
        { "{\"key\":\"/x\"}", "",
          "byte_size is missing, the body must be like {\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}" },
        { "{\"byte_size\":1}", "",
          "key is missing, the body must be like {\"key\": \"/name\", \"offset\": 0, \"byte_size\": 4096}" },
        { "{\"key\":5,\"byte_size\":1}", "/key", "key: is 5, must be a string of 1 to 128 bytes" },
        { "{\"key\":\"\",\"byte_size\":1}", "/key", "key: is '', must be a string of 1 to 128 bytes" },
        { "{\"key\":\"/x\",\"byte_size\":0}", "/byte_size",
          "byte_size: is 0, must be a number of bytes: an integer from 1 to 2^53" },
        { "{\"key\":\"/x\",\"byte_size\":64,\"offset\":-1}", "/offset",
          "offset: is -1, must be a number of bytes: an integer from 0 to 2^53" },
        { "{\"key\":\"/x\",\"byte_size\":9007199254740993}", "/byte_size",
          "byte_size: is 9007199254740993, must be a number of bytes: an integer from 1 to 2^53" },
        { "{\"key\":\"/x\",\"byte_size\":64,\"byte_size\":64}", "/byte_size", "member 'byte_size' is given twice" },
        { "{\"key\":\"/x\",\"bytes_size\":64}", "/bytes_size",
          "unknown member 'bytes_size', did you mean 'byte_size'? the body must be like {\"key\": \"/name\", "
          "\"offset\": 0, \"byte_size\": 4096}" },
        { "{\"key\":\"/x\\u0000y\",\"byte_size\":64}", "", NULL },
        { "{\"key\":\"/x\"", "", NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        attn_error err = { 0 };
        proto_region region;
        const attn_status status = proto_region_read(cases[i].body, strlen(cases[i].body), &region, &err);
        assert_int_equal(status, cases[i].member ? ATTN_INVALID : ATTN_OK);
        if (!cases[i].member) {
            assert_string_equal(region.key, "/x");
            assert_true(region.offset == 5 && region.bytes == 64);
        } else {
            assert_string_equal(err.member, cases[i].member);
            if (cases[i].says) assert_string_equal(err.text, cases[i].says);
        }
    }
}

#define HANDLE "{\"b64\":\"QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU2Nzg5YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXorLw==\"}"

static void test_a_region_of_a_gpu_is_read_from_what_clients_send(void **state)
{
    (void)state;
    static const char example[] = "{\"raw_handle\": {\"b64\": \"...\"}, \"device_id\": 0, \"byte_size\": 4096}";
    static const char no_handle[] =
        "raw_handle: must be {\"b64\": \"...\"}, base64 of the 64 bytes of a cudaIpcMemHandle_t";
    static const struct {
        const char *body, *member, *says; /* NULL: accepted */
    } cases[] = {
        { "{\"raw_handle\":" HANDLE ",\"device_id\":3,\"byte_size\":64}", NULL, NULL },
        { "{\"byte_size\":64, \"device_id\":3, \"raw_handle\":" HANDLE "}\n", NULL, NULL },
        { "", "", "the body is empty, must be like " },
        { "5", "", "the body is 5, must be an object: " },
        { "{\"device_id\":3,\"byte_size\":64}", "", "raw_handle is missing, the body must be like " },
        { "{\"raw_handle\":" HANDLE ",\"byte_size\":64}", "", "device_id is missing, the body must be like " },
        { "{\"raw_handle\":" HANDLE ",\"device_id\":3}", "", "byte_size is missing, the body must be like " },
        { "{\"raw_handle\":" HANDLE ",\"device_id\":-1,\"byte_size\":64}", "/device_id",
          "device_id: is -1, must be the number of a GPU: an integer from 0 on" },
        { "{\"raw_handle\":" HANDLE ",\"device_id\":0,\"byte_size\":0}", "/byte_size",
          "byte_size: is 0, must be a number of bytes: an integer from 1 to 2^53" },
        { "{\"raw_handle\":\"AAAA\"}", "/raw_handle", no_handle },
        { "{\"raw_handle\":{}}", "/raw_handle", no_handle },
        { "{\"raw_handle\":{\"b64\":5}}", "/raw_handle", no_handle },
        { "{\"raw_handle\":{\"b64\":\"AAAA\",\"b65\":1}}", "/raw_handle", no_handle },
        { "{\"raw_handle\":{\"b64\":\"AAAA\"}}", "/raw_handle/b64",
          "raw_handle: b64 has 4 characters, must be base64 of 64 bytes: 88 characters with padding" },
        { "{\"raw_handle\":{\"b64\":"
          "\"QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU2Nzg5YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXorLx==\"}}",
          "/raw_handle/b64",
          "raw_handle: b64 has 88 characters, must be base64 of 64 bytes: 88 characters with padding" },
        { "{\"raw_handles\":" HANDLE "}", "/raw_handles",
          "unknown member 'raw_handles', did you mean 'raw_handle'? the body must be like " },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        attn_error err = { 0 };
        proto_cuda_region region;
        const attn_status status = proto_cuda_region_read(cases[i].body, strlen(cases[i].body), &region, &err);
        assert_int_equal(status, cases[i].member ? ATTN_INVALID : ATTN_OK);
        if (!cases[i].member) {
            assert_memory_equal(region.handle, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789abcdefghijklmnopqrstuvwxyz+/", 64);
            assert_true(region.device == 3 && region.bytes == 64);
            continue;
        }
        char text[400];
        const char *const says = cases[i].says;
        const bool goes_on = says[strlen(says) - 1] == ' ';
        snprintf(text, sizeof text, "%s%s", says, goes_on ? example : "");
        assert_string_equal(err.member, cases[i].member);
        assert_string_equal(err.text, text);
        assert_null(strstr(err.text, "QUJD"));
    }
}

/* Inputs on a device get no host memory, and keep the address that the caller gave. */
static void test_inputs_on_a_device_stay_there(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        BODY(BINARY_K "," SHARED("q", "[1,2,2,2]", "a", "16") "," SHARED("v", "[1,3,1,1]", "b", "6"), ""),
        BODY(BINARY_K "," SHARED("q", "[1,2,2,2]", "a", "16") "," SHARED("v", "[1,3,1,1]", "b", "8"), ""),
    };
    char *const nowhere = (char *)(uintptr_t)0x1000;
    for (size_t i = 0; i < ARRAY_SIZE(bodies); i++) {
        struct decoded d = { .memory.limit = 8192 };
        const proto_limits limits = PROTO_LIMITS_DEFAULT;
        const proto_memory memory = { moving_grow, &d.memory };
        proto_shared *list;
        int count;
        proto_parser *const parser = proto_parser_new(&proto_kserve, ATTN_OP_FORWARD, &limits, &memory);
        proto_parser_kserve(parser, &forward, (int64_t)strlen(bodies[i]));
        assert_int_equal(proto_parser_feed(parser, bodies[i], strlen(bodies[i]), &d.err), ATTN_OK);
        assert_int_equal(proto_parser_feed(parser, numbers + 8, 12, &d.err), ATTN_OK);
        assert_int_equal(proto_parser_shared(parser, &list, &count, &d.err), ATTN_OK);
        assert_int_equal(count, 2);
        list[0].device = nowhere;
        list[1].device = nowhere + 64;
        assert_int_equal(proto_parser_shared_room(parser, &d.err), ATTN_OK);
        assert_true(list[0].to == NULL && list[1].to == NULL);
        d.status = proto_parser_finish(parser, &d.call, &d.err);
        if (i == 0) {
            assert_int_equal(d.status, ATTN_OK);
            const attn_problem *const p = &d.call->items[0].problem;
            assert_true((char *)p->q.data == nowhere && (char *)p->v.data == nowhere + 64);
            assert_memory_equal(p->k.data, numbers + 8, 12);
            assert_int_equal(d.call->memory_bytes, 12);
        } else {
            assert_int_equal(d.status, ATTN_INVALID);
            assert_string_equal(d.err.text, "v: data has 8 bytes, shape [1, 3, 1, 1] of float16 needs 6");
        }
        proto_parser_free(parser);
        decoded_clear(&d);
    }
}

static void test_which_inputs_may_lie_on_a_device(void **state)
{
    (void)state;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        static const attn_tensor_id may[] = { ATTN_T_q, ATTN_T_k, ATTN_T_v, ATTN_T_dout, ATTN_T_dlse };
        bool known = false;
        for (size_t i = 0; i < ARRAY_SIZE(may); i++) known |= (int)may[i] == id;
        assert_int_equal(proto_may_lie_on_device((attn_tensor_id)id), known);
    }
}

/* ---- Tests of bodies that are accepted --------------------------------------------------------------------------- */

/* Checks that a KServe body gives the same problem as the JSON body `json`. */
static void check_same(const struct infer *body, const char *json)
{
    struct decoded d = { 0 }, plain = { 0 };
    decode_split(&d, body);
    if (d.status != ATTN_OK) print_error("%s: %s\n", body->json, d.err.text);
    assert_int_equal(d.status, ATTN_OK);
    decode_whole(&plain, body->model->op, json);
    if (plain.status != ATTN_OK) print_error("%s: %s\n", json, plain.err.text);
    assert_int_equal(plain.status, ATTN_OK);
    char *const a = decoded_text(&d), *const b = decoded_text(&plain);
    assert_string_equal(a, b);
    free(a), free(b);
    decoded_clear(&d);
    decoded_clear(&plain);
}

#define PLAIN(name, shape, data) "\"" name "\":{\"shape\":" shape ",\"dtype\":\"float16\",\"data\":" data "}"
#define PLAIN_QKV                                \
    PLAIN("q", "[1,2,2,2]", "[0,1,2,3,4,5,6,7]") \
    "," PLAIN("k", "[1,3,1,2]", "[1,2,3,4,5,6]") "," PLAIN("v", "[1,3,1,1]", "[1,2,3]")
#define AS_ARRAY "\"encoding\":\"array\""

static void test_numbers_and_bytes_are_the_problem_that_json_makes(void **state)
{
    (void)state;
    const struct {
        struct infer body;
        const char *json;
    } cases[] = {
        { { &forward, BODY(QKV, ""), 0, ALL }, "{" PLAIN_QKV "," AS_ARRAY "}" },
        { { &forward, BODY(QKV, ""), 0, THE_JSON }, "{" PLAIN_QKV "," AS_ARRAY "}" },
        { { &forward, BODY(BINARY_QKV, ""), QKV_BYTES, THE_JSON }, "{" PLAIN_QKV "," AS_ARRAY "}" },
        { { &forward, BODY(BINARY_QKV, ",\"parameters\":{\"binary_data_output\":true}"), QKV_BYTES, THE_JSON },
          "{" PLAIN_QKV "}" },
        { { &half, BODY(QKV, ",\"outputs\":[]"), 0, ALL }, "{" PLAIN_QKV "," AS_ARRAY "}" },
        { { &causal, BODY(QKV, ""), 0, ALL }, "{" PLAIN_QKV ",\"causal\":true," AS_ARRAY "}" },
        { { &causal, BODY(QKV, ",\"parameters\":{\"causal\":true}"), 0, ALL },
          "{" PLAIN_QKV ",\"causal\":true," AS_ARRAY "}" },
        { { &forward,
            BODY(QKV,
                 ",\"id\":\"7\",\"model_name\":\"x\",\"model_version\":\"1\",\"outputs\":[{\"name\":\"lse\","
                 "\"parameters\":{\"binary_data\":true}},{\"name\":\"out\"}],\"parameters\":{\"causal\":false,"
                 "\"scale\":0.5,\"window\":\"[-1, 4]\",\"seed\":18446744073709551615,\"dropout_p\":0.5,\"alignment\":"
                 "\"top_left\",\"out_dtype\":\"FP32\",\"verify\":\"all\",\"save\":true,\"priority\":3}"),
            0, ALL },
          "{" PLAIN_QKV ",\"outputs\":[\"out\",\"lse\"],\"scale\":0.5,\"window\":[-1,4],\"seed\":18446744073709551615,"
          "\"dropout_p\":0.5,\"alignment\":\"top_left\",\"out_dtype\":\"float32\",\"verify\":\"all\",\"save\":"
          "true," AS_ARRAY "}" },
        { { &forward, BODY(QKV, ",\"parameters\":{\"timeout\":1001,\"timeout_ms\":30}"), 0, ALL },
          "{" PLAIN_QKV ",\"timeout_ms\":2," AS_ARRAY "}" },
        { { &forward, BODY(QKV, ",\"parameters\":{\"timeout_ms\":30,\"timeout\":40000}"), 0, ALL },
          "{" PLAIN_QKV ",\"timeout_ms\":30," AS_ARRAY "}" },
        { { &forward, BODY(QKV, ",\"parameters\":{\"timeout\":0}"), 0, ALL }, "{" PLAIN_QKV "," AS_ARRAY "}" },
        { { &forward,
            BODY("{\"name\":\"keep_mask\",\"data\":[true,false,true],\"datatype\":\"BOOL\",\"shape\":[1,1,1,3]}"
                 "," BINARY_Q "," K "," V,
                 ""),
            16, THE_JSON },
          "{\"keep_mask\":{\"data\":[1,0,1],\"dtype\":\"bool\",\"shape\":[1,1,1,3]}," PLAIN_QKV "," AS_ARRAY "}" },
        { { &forward,
            BODY(QKV ",{\"name\":\"bias\",\"shape\":[1,1,1,3],\"datatype\":\"FP32\",\"data\":[0, -Infinity ,-0.5]}"
                     ",{\"name\":\"seqlens_k\",\"shape\":[1],\"datatype\":\"INT64\",\"data\":[2]}",
                 ""),
            0, ALL },
          "{" PLAIN_QKV ",\"bias\":{\"shape\":[1,1,1,3],\"dtype\":\"float32\",\"data\":[0,\"-Infinity\",-0.5]},"
          "\"seqlens_k\":{\"shape\":[1],\"dtype\":\"int32\",\"data\":[2]}," AS_ARRAY "}" },
        { { &backward,
            BODY(QKV "," INPUT("dout", "[1,2,2,1]", "\"data\":[1,2,3,4]"), ",\"parameters\":{\"deterministic\":true}"),
            0, ALL },
          "{" PLAIN_QKV "," PLAIN("dout", "[1,2,2,1]", "[1,2,3,4]") ",\"deterministic\":true," AS_ARRAY "}" },
        { { &backward,
            BODY(QKV "," INPUT("dout", "[1,2,2,1]", "\"data\":[1,2,3,4]"), ",\"parameters\":{\"grad_dtype\":\"FP32\"}"),
            0, ALL },
          "{" PLAIN_QKV "," PLAIN("dout", "[1,2,2,1]", "[1,2,3,4]") ",\"grad_dtype\":\"float32\"," AS_ARRAY "}" },
        { { &backward, BODY(INPUT("dout", "[1,2,2,1]", "\"data\":[1,2,3,4]"), ",\"parameters\":{\"context\":\"c-1\"}"),
            0, ALL },
          "{\"context\":\"c-1\"," PLAIN("dout", "[1,2,2,1]", "[1,2,3,4]") "," AS_ARRAY "}" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) check_same(&cases[i].body, cases[i].json);
}

static void test_float8_is_uint8_with_a_parameter(void **state)
{
    (void)state;
#define FP8(name, shape, more) "{\"name\":\"" name "\",\"shape\":" shape ",\"datatype\":\"UINT8\"," more "}"
    const struct infer bodies[] = {
        { &forward,
          BODY(FP8("q", "[1,2,2,2]", "\"parameters\":{\"fp8\":true},\"data\":[0,60,0,64,0,66,0,68]") "," FP8(
                   "k", "[1,3,1,2]",
                   "\"parameters\":{\"binary_data_size\":6,\"fp8\":true}") "," FP8("v", "[1,3,1,1]",
                                                                                   "\"data\":[0,60,0],\"parameters\":{"
                                                                                   "\"fp8\":true}"),
               ""),
          6, THE_JSON },
    };
    struct decoded d = { 0 };
    decode_split(&d, &bodies[0]);
    if (d.status != ATTN_OK) print_error("%s\n", d.err.text);
    assert_int_equal(d.status, ATTN_OK);
    const attn_problem *p = &d.call->items[0].problem;
    assert_int_equal(p->q.dtype, ATTN_F8E4M3);
    assert_int_equal(((const uint8_t *)p->q.data)[7], 68);
    assert_int_equal(((const uint8_t *)p->k.data)[3], 0x3c);
    assert_int_equal(d.call->items[0].result_dtype, ATTN_BF16);
    decoded_clear(&d);
}

/* ---- Tests of bodies that are refused ---------------------------------------------------------------------------- */

#define HEADER "Inference-Header-Content-Length"

static void test_bytes_that_do_not_add_up_are_refused(void **state)
{
    (void)state;
    static const struct refusal cases[] = {
        { { &forward, "", 0, ALL }, "", "the body is empty, expected a JSON object with inputs" },
        { { &forward, BODY(BINARY_QKV, ""), QKV_BYTES, 0 },
          "",
          HEADER " is 0, which says that the body is one tensor and no JSON; attention takes several" },
        { { &forward, "{}", 0, 5 }, "", HEADER " is 5, but the body has only 2 bytes" },
        { { &forward, BODY(BINARY_QKV, ""), QKV_BYTES, 10 },
          "",
          "the JSON is not complete after 10 bytes (" HEADER ")" },
        { { &forward, BODY(BINARY_QKV, ""), QKV_BYTES + 1, THE_JSON },
          "",
          "the body goes on behind byte 303, where its last tensor ends: 269 of JSON (" HEADER
          ") and the sum of binary_data_size" },
        { { &forward, BODY(QKV, ""), 1, THE_JSON },
          "",
          "the body goes on behind byte 234, where its last tensor ends: 234 of JSON (" HEADER
          ") and the sum of binary_data_size" },
        { { &forward, BODY(BINARY_QKV, ""), QKV_BYTES - 1, THE_JSON },
          "/inputs/2/parameters/binary_data_size",
          "v: the body ends after 5 of its 6 bytes: it has 302 bytes, must have 303" },
        { { &forward, BODY(BINARY_QKV, ""), 0, ALL },
          "/inputs/0/parameters/binary_data_size",
          "q: the body ends after 0 of its 16 bytes: it has 269 bytes, must have 303; binary data need " HEADER },
        { { &forward, BODY(BINARY_QKV, ""), 4, ALL },
          "",
          "not JSON at byte 269: expected nothing after the value, found byte 0x00 (bytes of tensors? The header "
          "Inference-Header-Content-Length says how many bytes of the body are JSON)" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(12)) "," K "," V, ""), 12, THE_JSON },
          "/inputs/0/parameters/binary_data_size",
          "q: binary_data_size is 12, shape [1, 2, 2, 2] of float16 needs 16" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(17)) "," BINARY_K "," BINARY_V, ""), QKV_BYTES, THE_JSON },
          /* q has one byte too much, so v would end a byte early. The error must name q, not v. */
          "/inputs/0/parameters/binary_data_size",
          "q: binary_data_size is 17, shape [1, 2, 2, 2] of float16 needs 16" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(15)) "," BINARY_K "," BINARY_V, ""), QKV_BYTES, THE_JSON },
          /* q has one byte too little, so a byte of the body is left over. The error must name q. */
          "/inputs/0/parameters/binary_data_size",
          "q: binary_data_size is 15, shape [1, 2, 2, 2] of float16 needs 16" },
        { { &forward, BODY(BINARY_Q "," INPUT("k", "[1,3,1,2]", SIZE(24)) "," BINARY_V, ""), QKV_BYTES + 12, THE_JSON },
          "/inputs/1/parameters/binary_data_size",
          "k: binary_data_size is 24, shape [1, 3, 1, 2] of float16 needs 12; 24 would be right for float32: is that "
          "the "
          "array's dtype?" },
        { { &forward, BODY(BINARY_Q "," INPUT("k", "[1,3,1,2]", SIZE(48)) "," BINARY_V, ""), 0, THE_JSON },
          "/inputs/1/parameters/binary_data_size",
          "k: binary_data_size is 48, shape [1, 3, 1, 2] of float16 needs 12; 48 would be right for float64: convert "
          "the "
          "array to float16" },
        { { &forward, BODY(INPUT("q", "[1,2,2.5,2]", SIZE(17)) "," BINARY_K "," BINARY_V, ""), QKV_BYTES + 1,
            THE_JSON },
          "/inputs/0/shape/2",
          "q: shape[2] is 2.5, must be an integer from 0 to 2^31 - 1; it is written without point and exponent" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(-1)), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: binary_data_size: is -1, must be a number of bytes: an integer from 0 to 2^53" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(9007199254740993)), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: binary_data_size: is 9007199254740993, must be a number of bytes: an integer from 0 to "
          "2^53" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE("16")), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: binary_data_size: is '16', must be a number of bytes: an integer from 0 to 2^53" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", SIZE(16) ",\"data\":[1]"), ""), 16, THE_JSON },
          "/inputs/0",
          "q: has data and binary_data_size, must have one of them" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"parameters\":{}"), ""), 0, ALL },
          "/inputs/0",
          "q: has neither data nor binary_data_size, must have one of them" },
        { { &forward,
            BODY(INPUT("q", "[1,2,2,2]",
                       "\"parameters\":{\"shared_memory_region\":\"x\",\"shared_memory_byte_size\":16}"),
                 ""),
            0, ALL },
          "/inputs/0/parameters/shared_memory_region",
          "q: shared memory is not offered here, send the bytes as binary data" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", REGION("\"x\"", "16") ",\"data\":[1]"), ""), 0, ALL },
          "/inputs/0",
          "q: has data and shared_memory_region, must have one of them" },
        { { &forward,
            BODY(INPUT("q", "[1,2,2,2]",
                       "\"parameters\":{\"shared_memory_region\":\"x\",\"shared_memory_byte_size\":16,\"binary_data_"
                       "size\":"
                       "16}"),
                 ""),
            16, THE_JSON },
          "/inputs/0",
          "q: has binary_data_size and shared_memory_region, must have one of them" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"parameters\":{\"shared_memory_region\":\"x\"}"), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: parameters: shared_memory_byte_size is missing; shared memory is named by shared_memory_region, "
          "shared_memory_byte_size and, where it is not 0, shared_memory_offset" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"parameters\":{\"shared_memory_offset\":4}"), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: parameters: shared_memory_region is missing; shared memory is named by shared_memory_region, "
          "shared_memory_byte_size and, where it is not 0, shared_memory_offset" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", REGION("\"\"", "16")), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: shared_memory_region: is '', must be the name of a region, of 1 to 128 bytes" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", REGION("5", "16")), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: shared_memory_region: is 5, must be the name of a region, of 1 to 128 bytes" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", REGION("\"x\"", "-1")), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: shared_memory_byte_size: is -1, must be a number of bytes: an integer from 0 to 2^53" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", REGION("\"x\"", "9007199254740993")), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: shared_memory_byte_size: is 9007199254740993, must be a number of bytes: an integer from 0 to 2^53" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"parameters\":{\"shared_memory_size\":4}"), ""), 0, ALL },
          "/inputs/0/parameters",
          "q: parameters: unknown member 'shared_memory_size' (there are binary_data_size, fp8, shared_memory_region, "
          "shared_memory_offset and shared_memory_byte_size)" },
    };
    check_refusals(cases, ARRAY_SIZE(cases));
}

static void test_a_bad_input_is_named_in_the_error(void **state)
{
    (void)state;
    static const struct refusal cases[] = {
        { { &forward, "[1]", 0, ALL }, "", "the JSON is an array, must be an object with inputs" },
        { { &forward, "{}", 0, ALL }, "", "inputs: is missing, must be an array of tensors" },
        { { &forward, "{\"inputs\":[{\"data\":[NaN,-Infinity7]}]}", 0, ALL },
          "",
          "not JSON at byte 33: expected ',' or ']', found '7'" },
        { { &forward, "{\"inputs\":{}}", 0, ALL }, "/inputs", "inputs: is an object, must be an array of tensors" },
        { { &forward, BODY("", ""), 0, ALL }, "/inputs", "q: is required; a problem has q, k and v" },
        { { &forward, BODY("5", ""), 0, ALL },
          "/inputs/0",
          "inputs[0] is 5, must be an object: {\"name\": \"q\", \"shape\": [...], \"datatype\": \"FP16\", ...}" },
        { { &forward, BODY("{\"shape\":[1]}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: name is missing, must be that of a tensor, such as q" },
        { { &forward, BODY("{\"name\":4}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: name is 4, must be that of a tensor, such as q" },
        { { &forward, BODY(Q "," Q, ""), 0, ALL }, "/inputs/1", "inputs[1]: 'q' is given twice" },
        { { &forward, BODY("{\"name\":\"causal\"}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: 'causal' is no tensor, it goes into the request's parameters" },
        { { &forward, BODY("{\"name\":\"query\"}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: attention_forward has no input 'query'; write 'q'" },
        { { &forward, BODY("{\"name\":\"requests\"}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: attention_forward has no input 'requests' (its inputs are q, k, v, alibi_slopes, bias, "
          "keep_mask, sinks, cu_seqlens_q, cu_seqlens_k, seqlens_q, seqlens_k, page_table, mask_startend_rows, "
          "q_scale, k_scale, "
          "v_scale)" },
        { { &forward, BODY("{\"name\":\"dout\"}", ""), 0, ALL },
          "/inputs/0",
          "inputs[0]: attention_forward has no input 'dout'; gradients are POST /v1/attention/backward" },
        { { &forward, BODY("{\"name\":\"q\",\"dtype\":\"FP16\"}", ""), 0, ALL },
          "/inputs/0",
          "q: unknown member 'dtype'; write 'datatype'" },
        { { &forward, BODY("{\"name\":\"q\",\"name\":\"q\"}", ""), 0, ALL },
          "/q/name",
          "q: member 'name' is given twice" },
        { { &forward, BODY("{\"name\":\"q\",\"shape\":[1]}", ""), 0, ALL },
          "/inputs/0/datatype",
          "q: datatype is missing, must be FP32, FP16, BF16 or UINT8 with the parameter fp8: true" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"FP64\"}", ""), 0, ALL },
          "/inputs/0/datatype",
          "q: datatype is 'FP64', must be FP32, FP16, BF16 or UINT8 with the parameter fp8: true" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"UINT8\"}", ""), 0, ALL },
          "/inputs/0/datatype",
          "q: datatype is 'UINT8', must be FP32, FP16, BF16 or UINT8 with the parameter fp8: true" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"FP16\",\"parameters\":{\"fp8\":true}}", ""), 0, ALL },
          "/inputs/0/datatype",
          "q: fp8 is true, which goes with UINT8, not with 'FP16'" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"UINT8\",\"parameters\":{\"fp8\":1}}", ""), 0, ALL },
          "/inputs/0/parameters",
          "q: fp8: is 1, must be true or false" },
        { { &forward, BODY("{\"name\":\"seqlens_k\",\"datatype\":\"INT16\"}", ""), 0, ALL },
          "/inputs/0/datatype",
          "seqlens_k: datatype is 'INT16', must be INT32 or INT64" },
        { { &single, BODY(QKV, ""), 0, ALL },
          "/inputs/0/datatype",
          "q: datatype is 'FP16', the model attention_forward_fp32 takes FP32" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"FP16\",\"parameters\":[]}", ""), 0, ALL },
          "/inputs/0/parameters",
          "q: parameters: is an array, must be an object" },
        { { &forward, BODY("{\"name\":\"q\",\"datatype\":\"FP16\",\"parameters\":{\"binary_size\":1}}", ""), 0, ALL },
          "/inputs/0/parameters",
          "q: parameters: unknown member 'binary_size' (there are binary_data_size, fp8, shared_memory_region, "
          "shared_memory_offset and shared_memory_byte_size)" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"data\":\"AAAA\""), ""), 0, ALL },
          "/inputs/0/data",
          "q: data is a string, must be an array of numbers" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"data\":null"), ""), 0, ALL },
          "/inputs/0/data",
          "q: data is null, must be an array of numbers" },
        { { &forward, BODY(INPUT("q", "[1,2,2,2]", "\"data\":[1,true]") "," K "," V, ""), 0, ALL },
          "/inputs/0/data",
          "q: data at byte 69 of the body: a number is expected, 1 and 0 for true and false" },
        { { &forward, BODY("{\"name\":\"q\",\"data\":[1,false],\"shape\":[2],\"datatype\":\"FP16\"}", ""), 0, ALL },
          "/inputs/0/data",
          "q: element 1 of data: a number is expected, 1 and 0 for true and false" },
        { { &forward, BODY(INPUT("q", "[1,2,2]", "\"data\":[1]") "," K "," V, ""), 0, ALL },
          "/inputs/0/data",
          "q: data has 1 numbers, shape [1, 2, 2] needs 4" },
        { { &forward, BODY(INPUT("q", "[1,-1]", "\"data\":[1]"), ""), 0, ALL },
          "/inputs/0/shape/1",
          "q: shape[1] is -1, must be an integer from 0 to 2^31 - 1; no size can be left open" },
        { { &forward, BODY(Q "," INPUT("k", "[1,3,1,1]", "\"data\":[1,2,3]") "," V, ""), 0, ALL },
          "/inputs/1/shape/3",
          "k: shape[3] is 1, must be 2, the head size of q" },
        { { &forward, BODY(Q "," K, ""), 0, ALL }, "/inputs", "v: is required; a problem has q, k and v" },
    };
    check_refusals(cases, ARRAY_SIZE(cases));
}

#define WITH(more)                            \
    {                                         \
        &forward, BODY(QKV, "," more), 0, ALL \
    }

static void test_what_a_request_cannot_say_is_refused(void **state)
{
    (void)state;
    static const struct refusal cases[] = {
        { WITH("\"output\":[]"), "/output", "unknown member 'output', did you mean 'outputs'?" },
        { WITH("\"id\":7"), "/id", "id: is 7, must be a string" },
        { WITH("\"inputs\":[]"), "/inputs", "member 'inputs' is given twice" },
        { WITH("\"parameters\":[]"), "/parameters", "parameters: is an array, must be an object" },
        { WITH("\"parameters\":{\"casual\":true}"), "/parameters/casual",
          "unknown parameter 'casual', did you mean 'causal'?" },
        { WITH("\"parameters\":{\"is_causal\":true}"), "/parameters/is_causal",
          "unknown parameter 'is_causal'; write 'causal'; where Sq and Sk differ PyTorch and JAX mean \"alignment\": "
          "\"top_left\"" },
        { WITH("\"parameters\":{\"requests\":\"x\"}"), "/parameters/requests",
          "unknown parameter 'requests' (GET /v2/models/attention_forward/config lists them)" },
        { WITH("\"parameters\":{\"outputs\":\"out\"}"), "/parameters/outputs",
          "unknown parameter 'outputs'; outputs, and how they are written, are said in the request's outputs" },
        { WITH("\"parameters\":{\"encoding\":\"base64\"}"), "/parameters/encoding",
          "unknown parameter 'encoding'; outputs, and how they are written, are said in the request's outputs" },
        { WITH("\"parameters\":{\"q\":\"x\"}"), "/parameters/q", "q: is a tensor, which goes into inputs" },
        { WITH("\"parameters\":{\"causal\":true,\"causal\":true}"), "/parameters/causal",
          "parameters: member 'causal' is given twice" },
        { WITH("\"parameters\":{\"causal\":\"true\"}"), "/parameters/causal",
          "causal: is 'true', must be true or false, without quotes" },
        { WITH("\"parameters\":{\"window\":\"[-1,\"}"), "/parameters/window",
          "window: is '[-1,', must be [left, right], where -1 is unbounded" },
        { WITH("\"parameters\":{\"window\":\"[-1,-2]\"}"), "/parameters/window/1",
          "window: [1] is -2, must be an integer from -1 to 2^53, where -1 is unbounded" },
        { WITH("\"parameters\":{\"deterministic\":true}"), "/parameters/deterministic",
          "deterministic: belongs to backward, POST /v1/attention/backward; leave it out, the same kernel always gives "
          "the same bits" },
        { WITH("\"parameters\":{\"binary_data_output\":1}"), "/parameters/binary_data_output",
          "binary_data_output: is 1, must be true or false" },
        { WITH("\"parameters\":{\"timeout\":1.5}"), "/parameters/timeout",
          "timeout: is 1.5, must be an integer from 0 to 2^53: microseconds" },
        { WITH("\"parameters\":{\"priority\":\"high\"}"), "/parameters/priority",
          "priority: is 'high', must be an integer from 0 to 2^53, where 1 runs first and 0 is the default" },
        { WITH("\"parameters\":{\"sequence_id\":5,\"sequence_start\":true}"), "/parameters/sequence_id",
          "sequence_id: there are no sequences here, each request is whole; attention_decode has them" },
        { WITH("\"parameters\":{\"triton_x\":5}"), "/parameters/triton_x",
          "unknown parameter 'triton_x' (GET /v2/models/attention_forward/config lists them)" },
        { { &causal, BODY(QKV, ",\"parameters\":{\"causal\":false}"), 0, ALL },
          "/parameters/causal",
          "causal: is false, but the model attention_forward_causal is causal; another model is not" },
        { WITH("\"outputs\":{}"), "/outputs", "outputs: is an object, must be an array of {\"name\": ...}" },
        { WITH("\"outputs\":[\"out\"]"), "/outputs/0", "outputs[0]: is 'out', must be an object: {\"name\": \"out\"}" },
        { WITH("\"outputs\":[{}]"), "/outputs/0", "outputs[0]: name is missing, or is no string" },
        { WITH("\"outputs\":[{\"name\":\"out\"},{\"name\":\"out\"}]"), "/outputs/1",
          "outputs: [1] names 'out' a second time" },
        { WITH("\"outputs\":[{\"name\":\"dq\"}]"), "/outputs/0",
          "outputs: [0] is 'dq', must be out or lse; gradients are POST /v1/attention/backward" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"datatype\":\"FP16\"}]"), "/outputs/0",
          "outputs[0]: unknown member 'datatype' (there are name and parameters)" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"classification\":2}}]"), "/outputs/0/parameters",
          "outputs[0]: parameters: nothing is classified here" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"shared_memory_region\":\"x\"}}]"),
          "/outputs/0/parameters",
          "outputs[0]: parameters: shared_memory_byte_size is missing; shared memory is named by shared_memory_region, "
          "shared_memory_byte_size and, where it is not 0, shared_memory_offset" },
        { WITH("\"outputs\":[{\"name\":\"out\"," REGION("\"x\"", "8") "}]"),
          "/outputs/0/parameters/shared_memory_region",
          "out: shared memory is not offered here, send the bytes as binary data" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"binary_data\":true,\"shared_memory_region\":\"x\","
               "\"shared_memory_byte_size\":8}}]"),
          "/outputs/0/parameters",
          "outputs[0]: parameters: binary_data is true beside shared_memory_region, must be one of them" },
        { WITH("\"outputs\":[{\"name\":\"out\"," REGION("\"x\"", "1.5") "}]"), "/outputs/0/parameters",
          "outputs[0]: shared_memory_byte_size: is 1.5, must be a number of bytes: an integer from 0 to 2^53" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"binary_data\":1}}]"), "/outputs/0/parameters",
          "outputs[0]: parameters: is 1, must be {\"binary_data\": true} or false" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"binary_data\":true,\"binary_data\":false}}]"),
          "/outputs/0/parameters", "outputs[0]: parameters: member 'binary_data' is given twice" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":{\"binary\":true}}]"), "/outputs/0/parameters",
          "outputs[0]: parameters: unknown member 'binary' (there are binary_data, shared_memory_region, "
          "shared_memory_offset and shared_memory_byte_size)" },
        { WITH("\"outputs\":[{\"name\":\"out\",\"parameters\":5}]"), "/outputs/0/parameters",
          "outputs[0]: parameters: is 5, must be an object" },
    };
    check_refusals(cases, ARRAY_SIZE(cases));
}

static void test_an_id_has_a_limit(void **state)
{
    (void)state;
    for (int length = 512; length <= 513; length++) {
        char id[600] = "", json[2000];
        memset(id, 'x', (size_t)length);
        snprintf(json, sizeof json, "%s,\"id\":\"%s\"}", "{\"inputs\":[" QKV "]", id);
        const struct infer body = { &forward, json, 0, ALL };
        struct decoded d = { 0 };
        decode_with(&d, &body, NULL, NULL, NULL);
        assert_int_equal(d.status, length == 512 ? ATTN_OK : ATTN_INVALID);
        if (length == 512) assert_string_equal(d.call->id, id);
        else assert_string_equal(d.err.text, "id: has 513 bytes, at most 512 are echoed");
        decoded_clear(&d);
    }
}

static void test_tensors_have_a_limit_before_their_bytes_arrive(void **state)
{
    (void)state;
    proto_limits limits = PROTO_LIMITS_DEFAULT;
    limits.tensor_bytes = 64 + 64 + 6;
    const struct infer fits = { &forward, BODY(BINARY_QKV, ""), QKV_BYTES, THE_JSON }, over = {
        &forward, BODY(BINARY_QKV "," INPUT("bias", "[1,1,1,4503599627370496]", SIZE(9007199254740992)), ""), 0,
        THE_JSON
    };
    struct decoded d = { 0 };
    decode_with(&d, &fits, &limits, NULL, NULL);
    assert_int_equal(d.status, ATTN_OK);
    decoded_clear(&d);
    decode_with(&d, &over, &limits, NULL, NULL);
    assert_int_equal(d.status, ATTN_TOO_LARGE);
    assert_string_equal(d.err.text, "the tensors take 9007199254741184 bytes, at most 134 are taken");
    assert_int_equal(d.memory.bytes, 0);
    decoded_clear(&d);
}

/* The size of the JSON has a limit, because an HTTP thread parses it in one go. Tensors' numbers in the JSON do not
 * count. */
static void test_the_json_has_a_limit_of_its_own(void **state)
{
    static char json[2 * PROTO_HEADER_BYTES];
    char spaces[PROTO_HEADER_BYTES + 1], id[PROTO_HEADER_BYTES + 1];
    struct decoded d = { 0 };
    (void)state;
    memset(spaces, ' ', PROTO_HEADER_BYTES);
    memset(id, 'i', PROTO_HEADER_BYTES);
    spaces[PROTO_HEADER_BYTES] = id[PROTO_HEADER_BYTES] = '\0';
    const struct infer body = { &forward, json, 0, THE_JSON };
    snprintf(json, sizeof json,
             "{\"inputs\":[" INPUT("q", "[1,2,2,2]", "\"data\":[%s0,1,2,3,4,5,6,7]") "," K "," V "]}", spaces);
    decode_with(&d, &body, NULL, NULL, NULL);
    assert_int_equal(d.status, ATTN_OK);
    decoded_clear(&d);
    snprintf(json, sizeof json, "{\"id\":\"%s\",\"inputs\":[" QKV "]}", id);
    decode_with(&d, &body, NULL, NULL, NULL);
    assert_int_equal(d.status, ATTN_TOO_LARGE);
    assert_string_equal(d.err.text, "the JSON but for its arrays of numbers takes more than 65536 bytes");
    decoded_clear(&d);
}

static void test_memory_grows_with_what_arrives_alone(void **state)
{
    (void)state;
    const struct infer body = { &forward, BODY(INPUT("q", "[1,2,2,125000]", SIZE(1000000)), ""), 100, THE_JSON };
    struct decoded d = { 0 };
    decode_with(&d, &body, NULL, one_byte, NULL);
    assert_int_equal(d.status, ATTN_INVALID);
    assert_true(d.memory.bytes > 0 && d.memory.bytes <= PROTO_MEMORY_STEP);
    decoded_clear(&d);
}

/* ---- Tests of answers -------------------------------------------------------------------------------------------- */

/* Returns the answer with the results `out` and `lse`, read in blocks of `block` bytes. */
static char *answer_to(const struct infer *body, const void *out, const void *lse, size_t block, size_t *length,
                       size_t *head)
{
    struct decoded d = { 0 };
    attn_error err = { 0 };
    proto_encoder *encoder;
    proto_result result = { .backend = "cpu" };
    decode_with(&d, body, NULL, NULL, NULL);
    if (d.status != ATTN_OK) print_error("%s\n", d.err.text);
    assert_int_equal(d.status, ATTN_OK);
    attn_problem *p = &d.call->items[0].problem;
    p->out.data = (void *)(uintptr_t)out;
    p->lse.data = (void *)(uintptr_t)lse;
    assert_int_equal(proto_encoder_new(d.call, &result, "1", &encoder, &err), ATTN_OK);
    *length = (size_t)proto_encoder_length(encoder);
    *head = (size_t)proto_encoder_head_bytes(encoder);
    char *const text = calloc(1, *length + block + 1);
    size_t at = 0;
    for (size_t count; (count = proto_encoder_read(encoder, text + at, block)) > 0;) at += count;
    assert_int_equal(at, *length);
    proto_encoder_free(encoder);
    decoded_clear(&d);
    return text;
}

#define BEGIN                                                                                                \
    "\"model_name\":\"attention_forward\",\"model_version\":\"1\",\"parameters\":{\"sizes\":\"{\\\"B\\\":1," \
    "\\\"Sq\\\":2,"                                                                                          \
    "\\\"Sk\\\":3,\\\"H\\\":2,\\\"Hk\\\":1,\\\"D\\\":2,\\\"Dv\\\":1}\",\"backend\":\"cpu\",\"timing_us\":"
#define TIMING "\"{\\\"queue\\\":0.0,\\\"copy_in\\\":0.0,\\\"compute\\\":0.0,\\\"copy_out\\\":0.0}\"}"
#define OUT    "{\"name\":\"out\",\"datatype\":\"FP16\",\"shape\":[1,2,2,1],"
#define LSE    "{\"name\":\"lse\",\"datatype\":\"FP32\",\"shape\":[1,2,2],"

static void test_an_answer_is_written_as_it_was_asked_for(void **state)
{
    (void)state;
    static const uint16_t out[] = { 0x3c00, 0x4000, 0x4200, 0x7e00 };
    static const float lse[] = { 0, 0.5f, -__builtin_inff(), __builtin_inff() };
    static const struct {
        const char *more, *head;
        size_t bytes; /* number of bytes after the JSON */
    } cases[] = {
        { "",
          "{" BEGIN TIMING ",\"outputs\":[" OUT "\"data\":[1,2,3,NaN]}," LSE "\"data\":[0,0.5,-Infinity,Infinity]}]}",
          0 },
        { ",\"id\":\"a\\\"\\u00e4\\n\",\"parameters\":{\"binary_data_output\":true}",
          "{\"id\":\"a\\\"ä\\u000a\"," BEGIN TIMING ",\"outputs\":[" OUT "\"parameters\":{\"binary_data_size\":8}}," LSE
          "\"parameters\":{\"binary_data_size\":16}}]}",
          24 },
        { ",\"id\":\"\",\"outputs\":[{\"name\":\"lse\",\"parameters\":{\"binary_data\":true}},{\"name\":\"out\"}]",
          "{" BEGIN TIMING ",\"outputs\":[" OUT "\"data\":[1,2,3,NaN]}," LSE
          "\"parameters\":{\"binary_data_size\":16}}]}",
          16 },
        { ",\"parameters\":{\"binary_data_output\":true},\"outputs\":[{\"name\":\"lse\",\"parameters\":{\"binary_"
          "data\":false}},"
          "{\"name\":\"out\"}]",
          "{" BEGIN TIMING ",\"outputs\":[" OUT "\"parameters\":{\"binary_data_size\":8}}," LSE
          "\"data\":[0,0.5,-Infinity,Infinity]}]}",
          8 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char json[2000];
        size_t length, head, other_length, other_head;
        snprintf(json, sizeof json, "{\"inputs\":[" QKV "]%s}", cases[i].more);
        const struct infer body = { &forward, json, 0, ALL };
        char *const text = answer_to(&body, out, lse, 4096, &length, &head);
        char *const other = answer_to(&body, out, lse, 1 + i * 3, &other_length, &other_head);
        assert_memory_equal(text, cases[i].head, strlen(cases[i].head));
        assert_int_equal(head, strlen(cases[i].head));
        assert_int_equal(length, head + cases[i].bytes);
        if (cases[i].bytes == 16) assert_memory_equal(text + head, lse, 16);
        if (cases[i].bytes == 24)
            assert_memory_equal(text + head, out, 8), assert_memory_equal(text + head + 8, lse, 16);
        assert_int_equal(other_length, length);
        assert_memory_equal(text, other, length);
        free(text), free(other);
    }
}

static void test_tensors_without_elements_have_no_bytes(void **state)
{
    (void)state;
    const struct infer body = { &forward,
                                BODY(INPUT("q", "[1,0,2,2]", SIZE(0)) "," BINARY_K "," BINARY_V,
                                     ",\"parameters\":{\"binary_data_output\":true}"),
                                18, THE_JSON };
    size_t length, head;
    char *const text = answer_to(&body, NULL, NULL, 4096, &length, &head);
    assert_int_equal(length, head);
    assert_non_null(strstr(text, "\"shape\":[1,0,2,1],\"parameters\":{\"binary_data_size\":0}}"));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inputs_in_shared_memory_are_those_of_the_body),
        cmocka_unit_test(test_what_lies_in_shared_memory_is_told),
        cmocka_unit_test(test_an_output_in_shared_memory_is_only_named),
        cmocka_unit_test(test_faults_of_shared_inputs_name_their_size),
        cmocka_unit_test(test_memory_for_shared_inputs_is_asked_for_after_the_body),
        cmocka_unit_test(test_a_region_is_read_from_what_clients_send),
        cmocka_unit_test(test_a_region_of_a_gpu_is_read_from_what_clients_send),
        cmocka_unit_test(test_inputs_on_a_device_stay_there),
        cmocka_unit_test(test_which_inputs_may_lie_on_a_device),
        cmocka_unit_test(test_numbers_and_bytes_are_the_problem_that_json_makes),
        cmocka_unit_test(test_float8_is_uint8_with_a_parameter),
        cmocka_unit_test(test_bytes_that_do_not_add_up_are_refused),
        cmocka_unit_test(test_a_bad_input_is_named_in_the_error),
        cmocka_unit_test(test_what_a_request_cannot_say_is_refused),
        cmocka_unit_test(test_an_id_has_a_limit),
        cmocka_unit_test(test_tensors_have_a_limit_before_their_bytes_arrive),
        cmocka_unit_test(test_the_json_has_a_limit_of_its_own),
        cmocka_unit_test(test_memory_grows_with_what_arrives_alone),
        cmocka_unit_test(test_an_answer_is_written_as_it_was_asked_for),
        cmocka_unit_test(test_tensors_without_elements_have_no_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
