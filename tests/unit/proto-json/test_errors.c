/* test_errors.c: tests that problem documents (the JSON of errors) are valid JSON, have all members, and are cut only
 * where allowed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "codec.h"

static void test_a_problem_document_has_the_members_of_the_contract(void **state)
{
    char text[4096];
    size_t length = proto_error_write(text, sizeof text, PROTO_E_INVALID_REQUEST,
                                      "k: shape[2] is 3, must divide the 8 heads of q", "/requests/3", "/k/shape/2",
                                      "abc");
    (void)state;
    assert_int_equal(length, strlen(text));
    assert_string_equal(text,
                        "{\"type\":\"urn:attnd:invalid-request\",\"title\":\"The request is malformed\",\"status\":400,"
                        "\"code\":\"invalid-request\",\"request_id\":\"abc\",\"pointer\":\"/requests/3/k/shape/2\","
                        "\"detail\":\"k: shape[2] is 3, must divide the 8 heads of q\","
                        "\"error\":\"k: shape[2] is 3, must divide the 8 heads of q\"}");
    proto_error_write(text, sizeof text, PROTO_E_QUEUE_FULL, NULL, NULL, NULL, NULL);
    assert_string_equal(
        text,
        "{\"type\":\"urn:attnd:queue-full\",\"title\":\"The queue is full\",\"status\":503,\"code\":\"queue-full\","
        "\"detail\":\"The queue is full\",\"error\":\"The queue is full\"}");
    proto_error_write(text, sizeof text, (proto_error)999, "x", NULL, "", "");
    assert_string_equal(
        text, "{\"type\":\"urn:attnd:internal\",\"title\":\"The server failed\",\"status\":500,\"code\":\"internal\","
              "\"detail\":\"x\",\"error\":\"x\"}");
}

static void test_every_error_writes_itself(void **state)
{
    (void)state;
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) {
        char text[4096];
        cJSON *json;
        proto_error_write(text, sizeof text, (proto_error)e, "d", NULL, NULL, NULL);
        json = cJSON_Parse(text);
        assert_non_null(json);
        assert_int_equal(cJSON_GetObjectItemCaseSensitive(json, "status")->valuedouble, proto_errors[e].http);
        assert_string_equal(cJSON_GetObjectItemCaseSensitive(json, "code")->valuestring, proto_errors[e].code);
        assert_string_equal(cJSON_GetObjectItemCaseSensitive(json, "title")->valuestring, proto_errors[e].title);
        assert_true(proto_errors[e].http >= 400 && proto_errors[e].http < 600);
        cJSON_Delete(json);
    }
}

static void test_every_status_has_its_error(void **state)
{
    static const struct {
        attn_status status;
        proto_error error;
        int http;
    } cases[] = {
        { ATTN_OK, PROTO_E_INTERNAL, 500 },         { ATTN_INVALID, PROTO_E_INVALID_REQUEST, 400 },
        { ATTN_TOO_LARGE, PROTO_E_TOO_LARGE, 413 }, { ATTN_UNSUPPORTED, PROTO_E_UNSUPPORTED, 422 },
        { ATTN_BUSY, PROTO_E_QUEUE_FULL, 503 },     { ATTN_TIMEOUT, PROTO_E_DEADLINE, 504 },
        { ATTN_CANCELLED, PROTO_E_DEADLINE, 504 },  { ATTN_NO_MEMORY, PROTO_E_OUT_OF_MEMORY, 503 },
        { ATTN_DEVICE, PROTO_E_INTERNAL, 500 },     { ATTN_NOT_FOUND, PROTO_E_NOT_FOUND, 404 },
        { ATTN_IN_USE, PROTO_E_IN_USE, 409 },       { ATTN_DEVICE_LOST, PROTO_E_UNAVAILABLE, 503 },
        { ATTN_QUOTA, PROTO_E_QUOTA, 429 },         { ATTN_FULL, PROTO_E_STORAGE_FULL, 507 },
        { ATTN_INTERNAL, PROTO_E_INTERNAL, 500 },
    };
    (void)state;
    assert_int_equal(ARRAY_SIZE(cases), ATTN_STATUS_COUNT);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(proto_error_of(cases[i].status), cases[i].error);
        assert_int_equal(proto_errors[cases[i].error].http, cases[i].http);
    }
}

static void test_texts_are_escaped_and_cleaned(void **state)
{
    static const struct {
        const char *detail, *becomes;
    } cases[] = {
        { "\"\\/", "\\\"\\\\/" },
        { "a\tb\nc\x7f\x01", "a\\u0009b\\u000ac\\u007f\\u0001" },
        { "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80" },
        { "\xff\x80x\xc3", "??x?" },
        { "\xe2\x82", "??" },
        { "\xed\xa0\x80|\xc0\xaf|\xf4\x90\x80\x80", "???|??|????" },
        { "\xe0\x80\x80|\xf0\x80\x80\x80|\xf5\x80", "???|????|??" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[4096], says[256];
        proto_error_write(text, sizeof text, PROTO_E_INTERNAL, cases[i].detail, NULL, NULL, NULL);
        snprintf(says, sizeof says, "\"detail\":\"%s\",\"error\":\"%s\"}", cases[i].becomes, cases[i].becomes);
        assert_non_null(strstr(text, says));
    }
}

/* A problem document is the JSON of an error. It must be valid JSON in a buffer of any size. */
static void test_a_problem_document_is_json_in_any_room(void **state)
{
    char detail[400], pointer[200], request_id[200];
    (void)state;
    for (size_t i = 0; i + 1 < sizeof detail; i++) detail[i] = "a\"\n\xe2\x82\xac\xff"[i % 7];
    detail[sizeof detail - 1] = '\0';
    memset(pointer, '"', sizeof pointer), pointer[sizeof pointer - 1] = '\0';
    memset(request_id, '\x01', sizeof request_id), request_id[sizeof request_id - 1] = '\0';
    for (size_t room = 0; room <= 4096; room++) {
        /* The function may write `room` bytes. The byte after them must stay unchanged; AddressSanitizer reports
         * writes further beyond. */
        char *text = malloc(room + 1);
        size_t length;
        assert_non_null(text);
        text[room] = '!';
        length = proto_error_write(text, room, PROTO_E_TOO_LARGE, detail, "/requests/1023", pointer, request_id);
        assert_int_equal(text[room], '!');
        if (room >= 3) {
            cJSON *json = cJSON_ParseWithLengthOpts(text, length + 1, NULL, true);
            assert_non_null(json);
            assert_int_equal(strlen(text), length);
            if (room > 300) assert_non_null(cJSON_GetObjectItemCaseSensitive(json, "detail"));
            cJSON_Delete(json);
        }
        free(text);
    }
}

/* The longest texts fit into the 4 KiB that proto.h promises. Only control characters, whose escapes are long, may be
 * cut. */
static void test_4096_bytes_are_always_enough(void **state)
{
    attn_error err;
    char text[4096];
    cJSON *json;
    (void)state;
    memset(err.text, '"', sizeof err.text), err.text[sizeof err.text - 1] = '\0';
    memset(err.member, '\x01', sizeof err.member), err.member[sizeof err.member - 1] = '\0';
    assert_true(
        proto_error_write(
            text, sizeof text, PROTO_E_UNSUPPORTED_MEDIA, err.text, "/requests/1023", err.member,
            "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
            "0123456789012345678901234567") < sizeof text);
    json = cJSON_Parse(text);
    assert_non_null(json);
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(json, "detail")->valuestring, err.text);
    assert_int_equal(strlen(cJSON_GetObjectItemCaseSensitive(json, "request_id")->valuestring), 128);
    cJSON_Delete(json);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_problem_document_has_the_members_of_the_contract),
        cmocka_unit_test(test_every_error_writes_itself),
        cmocka_unit_test(test_every_status_has_its_error),
        cmocka_unit_test(test_texts_are_escaped_and_cleaned),
        cmocka_unit_test(test_a_problem_document_is_json_in_any_room),
        cmocka_unit_test(test_4096_bytes_are_always_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
