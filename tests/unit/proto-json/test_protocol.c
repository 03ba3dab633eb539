/* test_protocol.c: tests that PROTOCOL.md is true. Every request in it is decoded (whole, and split at every byte) and
 * computed by the reference backend, and must give the answer in it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "codec.h"
#include "proto-json/base64.h"

#define PROTOCOL "proto-json/PROTOCOL.md" /* tests run in the repository's top folder */

/* A fenced block of the document: the words after ```json, and the text. The struct owns both. */
struct block {
    char *mark, *text;
    int line;
};

enum { MAX_BLOCKS = 64 };

static int read_blocks(struct block blocks[MAX_BLOCKS])
{
    FILE *f = fopen(PROTOCOL, "r");
    char line[4096], *text = NULL;
    size_t bytes = 0;
    int count = 0, number = 0;
    FILE *inside = NULL;
    if (!f) fail_msg("cannot open %s: run this test at the root of the tree", PROTOCOL);
    while (fgets(line, sizeof line, f)) {
        number++;
        if (inside && !strncmp(line, "```", 3)) {
            fclose(inside);
            inside = NULL;
            blocks[count++].text = text;
        } else if (inside) {
            fputs(line, inside);
        } else if (!strncmp(line, "```json ", 8)) {
            assert_in_range(count, 0, MAX_BLOCKS - 1);
            line[strcspn(line, "\n")] = '\0';
            blocks[count].mark = strdup(line + 8);
            blocks[count].line = number;
            inside = open_memstream(&text, &bytes);
        }
    }
    assert_null(inside);
    fclose(f);
    return count;
}

/* Returns a safetensors file from its form in PROTOCOL.md: the header, and on the last line the data in base64. */
static char *file_of(const char *text, size_t *bytes)
{
    const char *const end = text + strlen(text) - 1;
    const char *line = end;
    while (line[-1] != '\n') line--;
    const size_t header = (size_t)(line - text);
    char *const file = calloc(1, 8 + header + BASE64_DECODED_MAX((size_t)(end - line)));
    base64_decoder parser = { 0 };
    size_t written;
    assert_non_null(file);
    for (int i = 0; i < 8; i++) file[i] = (char)(header >> 8 * i);
    memcpy(file + 8, text, header);
    assert_int_equal(base64_decode_until(&parser, line, (size_t)(end - line), (uint8_t *)file + 8 + header, &written),
                     end - line);
    assert_true(base64_finish(&parser));
    *bytes = 8 + header + written;
    return file;
}

static size_t header_of(const char *file)
{
    size_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | (unsigned char)file[i];
    return header;
}

/* Returns the header of a safetensors file as JSON, with the data as a base64 member. */
static cJSON *parse_file(const char *file, size_t bytes)
{
    char data[1024] = { 0 };
    const size_t header = header_of(file);
    cJSON *const json = cJSON_ParseWithLength(file + 8, header);
    assert_true(BASE64_ENCODED(bytes - 8 - header) < sizeof data);
    base64_encode((const uint8_t *)file + 8 + header, bytes - 8 - header, data);
    cJSON_AddStringToObject(json, "data", data);
    return json;
}

/* Judges the results that a client sent, as the server does. Returns the judge's report. */
static judge_result *report_of(const proto_item *item)
{
    judge_result *const report = malloc(sizeof *report);
    attn_error err = { 0 };
    judge *j;
    assert_non_null(report);
    assert_int_equal(judge_open(&item->problem, item->results, NULL, 60, &j, &err), ATTN_OK);
    while (!judge_step(j)) {
    }
    judge_report(j, report);
    judge_close(j);
    return report;
}

/* Computes the problems of a request, and returns the answer's body. The caller frees it. */
static char *answer(struct decoded *d, int *http, size_t *length)
{
    attn_device *device;
    attn_stream *stream;
    attn_error err = { 0 };
    proto_result *results;
    proto_encoder *encoder;
    char *text;
    *http = 200;
    if (d->status != ATTN_OK) {
        text = malloc(4096);
        proto_error_write(text, 4096, proto_error_of(d->status), d->err.text, NULL, d->err.member, "0001");
        *http = proto_errors[proto_error_of(d->status)].http;
        return text;
    }
    assert_int_equal(attn_device_open("reference", 0, NULL, &device, &err), ATTN_OK);
    assert_int_equal(attn_stream_open(device, &stream, &err), ATTN_OK);
    results = calloc((size_t)d->call->count, sizeof *results);
    assert_non_null(results);
    for (int i = 0; i < d->call->count; i++) {
        proto_item *item = &d->call->items[i];
        snprintf(results[i].backend, sizeof results[i].backend, "reference");
        if (item->error.status != ATTN_OK) continue;
        if (item->results) {
            results[i].report = report_of(item);
            continue;
        }
        for (int n = 0; n < PROTO_TENSORS; n++) {
            attn_tensor *const t = proto_item_result(item, n);
            int64_t size;
            if (!t) continue;
            assert_true(attn_shape_bytes(t->dtype, t->rank, t->shape, &size));
            t->data = calloc(1, (size_t)size + 1);
        }
        if (item->parts) {
            const attn_merge_problem merge = proto_item_merge(item);
            assert_int_equal(attn_merge(stream, &merge, &err), ATTN_OK);
            continue;
        }
        attn_plan plan;
        assert_int_equal(attn_plan_make(attn_device_capabilities(device), &item->problem, &plan, &err), ATTN_OK);
        assert_int_equal(attn_run(stream, &plan, 1, NULL, &err), ATTN_OK);
    }
    assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);
    assert_int_equal(proto_encoder_new(d->call, results, "0001", &encoder, &err), ATTN_OK);
    *length = (size_t)proto_encoder_length(encoder);
    /* A KServe answer has the form of a safetensors file once the length of its JSON is put before it. parse_file() can
     * then read it. */
    const size_t head = (size_t)proto_encoder_head_bytes(encoder), front = d->call->model && head < *length ? 8 : 0;
    text = calloc(1, front + *length + 1);
    assert_non_null(text);
    for (size_t i = 0; i < front; i++) text[i] = (char)(head >> 8 * i);
    assert_int_equal(proto_encoder_read(encoder, text + front, *length), *length);
    *length += front;
    proto_encoder_free(encoder);
    for (int i = 0; i < d->call->count; i++)
        for (int n = 0; n < PROTO_TENSORS; n++) {
            attn_tensor *const t = proto_item_result(&d->call->items[i], n);
            if (t) free(t->data);
        }
    for (int i = 0; i < d->call->count; i++) free(results[i].report);
    free(results);
    attn_stream_close(stream);
    attn_device_close(device);
    return text;
}

/* Removes a member whose value differs in every run. */
static void drop(cJSON *object, const char *name)
{
    if (!cJSON_GetObjectItemCaseSensitive(object, name)) print_error("%s is missing\n", name);
    assert_non_null(cJSON_GetObjectItemCaseSensitive(object, name));
    cJSON_DeleteItemFromObjectCaseSensitive(object, name);
}

static void normalise(cJSON *json)
{
    cJSON *responses = cJSON_GetObjectItemCaseSensitive(json, "responses"), *one;
    cJSON *metadata = cJSON_GetObjectItemCaseSensitive(json, "__metadata__");
    cJSON *parameters = cJSON_GetObjectItemCaseSensitive(json, "parameters");
    cJSON *errors = cJSON_GetObjectItemCaseSensitive(json, "errors");
    cJSON *explanations = cJSON_GetObjectItemCaseSensitive(json, "explanations");
    /* The members `explained` and `limit` depend on how the processor rounds. */
    cJSON_ArrayForEach(one, errors) drop(one, "explained"), drop(one, "limit");
    cJSON_ArrayForEach(one, explanations) drop(one, "error_if_so");
    if (metadata || parameters) {
        normalise(metadata ? metadata : parameters);
    } else if (responses) {
        cJSON_ArrayForEach(one, responses) normalise(one);
    } else if (cJSON_GetObjectItemCaseSensitive(json, "error")) {
        cJSON *problem = cJSON_GetObjectItemCaseSensitive(json, "error");
        drop(cJSON_IsObject(problem) ? problem : json, "request_id");
    } else {
        drop(json, "backend");
        drop(json, "timing_us");
    }
}

static void test_every_example_of_the_protocol_is_true(void **state)
{
    struct block blocks[MAX_BLOCKS] = { 0 };
    const int count = read_blocks(blocks);
    int requests = 0, answers = 0, wrong = 0;
    (void)state;
    for (int i = 0; i < count; i++) {
        static const proto_model model = { .name = "attention_forward", .op = ATTN_OP_FORWARD };
        const bool check = !strcmp(blocks[i].mark, "check"), merge = !strcmp(blocks[i].mark, "merge"),
                   backward = !strcmp(blocks[i].mark, "backward"), observe = !strcmp(blocks[i].mark, "observe"),
                   binary = !strcmp(blocks[i].mark, "kserve_binary"),
                   kserve = binary || !strcmp(blocks[i].mark, "kserve"),
                   file = binary || !strcmp(blocks[i].mark, "safetensors");
        const struct block *says = i + 1 < count && blocks[i + 1].mark[0] >= '2' && blocks[i + 1].mark[0] <= '5'
                                       ? &blocks[i + 1]
                                       : NULL;
        size_t bytes = strlen(blocks[i].text);
        char *must = NULL;
        if (!check && !merge && !backward && !observe && !file && !kserve && strcmp(blocks[i].mark, "forward"))
            continue;
        char *const body = file ? file_of(blocks[i].text, &bytes) : strdup(blocks[i].text);
        requests++;
        for (size_t split = 0; split <= bytes; split++) {
            struct decoded d = { 0 };
            size_t first = split;
            char *text;
            if (kserve)
                decode_kserve(&d, &model, binary ? (int64_t)header_of(body) : -1, NULL, body + (binary ? 8 : 0),
                              bytes - (binary ? 8 : 0), first_then_rest, &first);
            else
                decode_in_pieces(&d, file ? &proto_safetensors : &proto_json,
                                 check      ? PROTO_OP_CHECK
                                 : merge    ? PROTO_OP_MERGE
                                 : backward ? ATTN_OP_BACKWARD
                                 : observe  ? ATTN_OP_OBSERVE
                                            : ATTN_OP_FORWARD,
                                 NULL, body, bytes, first_then_rest, &first);
            text = decoded_text(&d);
            if (!must) {
                int http;
                must = strdup(text);
                if (says) {
                    size_t length = 0, says_length = 0;
                    char *got = answer(&d, &http, &length);
                    char *says_file = file ? file_of(says->text, &says_length) : NULL;
                    cJSON *a = file ? parse_file(got, length) : cJSON_Parse(got);
                    cJSON *b = file ? parse_file(says_file, says_length) : cJSON_Parse(says->text);
                    free(says_file);
                    answers++;
                    assert_non_null(a);
                    if (!b) fail_msg(PROTOCOL ":%d: not JSON", says->line);
                    normalise(a), normalise(b);
                    if (http != atoi(says->mark) || !cJSON_Compare(a, b, true)) {
                        print_error(PROTOCOL ":%d: the answer is %d\n%s\n", says->line, http, got);
                        wrong++;
                    }
                    cJSON_Delete(a), cJSON_Delete(b);
                    free(got);
                } else if (d.status != ATTN_OK) {
                    print_error(PROTOCOL ":%d: %s\n", blocks[i].line, d.err.text);
                    wrong++;
                }
            }
            assert_string_equal(text, must);
            free(text);
            decoded_clear(&d);
        }
        free(must);
        free(body);
    }
    assert_true(requests >= 8 && answers >= 7);
    assert_int_equal(wrong, 0);
    for (int i = 0; i < count; i++) free(blocks[i].mark), free(blocks[i].text);
}

static void test_the_protocol_names_every_member(void **state)
{
    FILE *f = fopen(PROTOCOL, "r");
    static char text[1 << 17];
    size_t bytes;
    (void)state;
    if (!f) fail_msg("cannot open %s", PROTOCOL);
    bytes = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    assert_in_range(bytes, 1000, sizeof text - 2);
    text[bytes] = '\0';
    for (const proto_option *o = proto_options; o->name; o++) {
        char name[64];
        snprintf(name, sizeof name, "| `%s` |", o->name);
        if (!strstr(text, name)) fail_msg("%s has no row for %s", PROTOCOL, o->name);
    }
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        char name[64];
        snprintf(name, sizeof name, "`%s`", attn_tensors[id].name);
        if (!proto_takes_tensor(ATTN_OP_BACKWARD, (attn_tensor_id)id) &&
            (proto_operations[ATTN_OP_BACKWARD].usual >> id & 1))
            continue; /* PROTOCOL.md may name dq, dk and dv in a list only */
        if (!strstr(text, name)) fail_msg("%s does not name %s", PROTOCOL, attn_tensors[id].name);
    }
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) {
        char row[160];
        snprintf(row, sizeof row, "| %d | `%s` | %s |", proto_errors[e].http, proto_errors[e].code,
                 proto_errors[e].title);
        if (!strstr(text, row)) fail_msg("%s has no row %s", PROTOCOL, row);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_example_of_the_protocol_is_true),
        cmocka_unit_test(test_the_protocol_names_every_member),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
