/* test_answer.c: tests of the status, headers and body that the server gives libmicrohttpd, and of who owns the body's
 * memory. The test replaces functions of libmicrohttpd (__wrap_..., see the Makefile), so there is no connection. */
#include "tests/unit/server/jobs.h"

#include "server/device/devices.h"
#include "server/http/answer.h"
#include "server/http/exchange.h"
#include "server/http/mhd.h"
#include "server/http/connections.h"
#include "server/routes/routes.h"
#include "server/intake/prepare.h"

enum { PORTION = 10007, LARGE = 256 << 10 };

/* ---- What the server handed to libmicrohttpd --------------------------------------------------------------------- */

static struct {
    int count;
    unsigned status;
    /* each header as "Name: value" and a newline, in the order in which the server added them */
    char headers[4096];
    char *body;
    size_t length;
    uint64_t announced;
    const void *buffer; /* the body of an answer that is not streamed; NULL: the body is streamed */
    enum MHD_ResponseMemoryMode mode;
    bool streamed;
    size_t block;
    MHD_ContentReaderCallback read;
    void *context;
} sent;
/* whether libmicrohttpd fails the next time that the server creates a response from a buffer */
static bool no_response;

struct MHD_Response *__real_MHD_create_response_from_buffer(size_t size, void *buffer,
                                                            enum MHD_ResponseMemoryMode mode);
struct MHD_Response *__wrap_MHD_create_response_from_buffer(size_t size, void *buffer,
                                                            enum MHD_ResponseMemoryMode mode);
struct MHD_Response *__real_MHD_create_response_from_callback(uint64_t size, size_t block,
                                                              MHD_ContentReaderCallback read, void *context,
                                                              MHD_ContentReaderFreeCallback release);
struct MHD_Response *__wrap_MHD_create_response_from_callback(uint64_t size, size_t block,
                                                              MHD_ContentReaderCallback read, void *context,
                                                              MHD_ContentReaderFreeCallback release);
enum MHD_Result __wrap_MHD_queue_response(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *response);

struct MHD_Response *__wrap_MHD_create_response_from_buffer(size_t size, void *buffer, enum MHD_ResponseMemoryMode mode)
{
    if (no_response) {
        no_response = false;
        return NULL;
    }
    sent.streamed = false;
    sent.announced = size;
    sent.buffer = buffer;
    sent.mode = mode;
    free(sent.body);
    sent.body = calloc(1, size + 1);
    if (size > 0) memcpy(sent.body, buffer, size);
    sent.length = size;
    return __real_MHD_create_response_from_buffer(size, buffer, mode);
}

struct MHD_Response *__wrap_MHD_create_response_from_callback(uint64_t size, size_t block,
                                                              MHD_ContentReaderCallback read, void *context,
                                                              MHD_ContentReaderFreeCallback release)
{
    sent.streamed = true;
    sent.announced = size;
    sent.block = block;
    sent.read = read;
    sent.context = context;
    return __real_MHD_create_response_from_callback(size, block, read, context, release);
}

static enum MHD_Result note_header(void *context, enum MHD_ValueKind kind, const char *name, const char *value)
{
    (void)context, (void)kind;
    const size_t used = strlen(sent.headers);
    snprintf(sent.headers + used, sizeof sent.headers - used, "%s: %s\n", name, value);
    return MHD_YES;
}

/* Reads the streamed body in pieces that end at other positions than the encoder's blocks. */
static void read_stream(void)
{
    free(sent.body);
    sent.body = calloc(1, (size_t)sent.announced + 1);
    sent.length = 0;
    for (ssize_t got; sent.length < sent.announced; sent.length += (size_t)got) {
        const size_t left = (size_t)sent.announced - sent.length;
        got = sent.read(sent.context, sent.length, sent.body + sent.length, left < PORTION ? left : PORTION);
        assert_true(got > 0);
    }
    char more;
    assert_int_equal(sent.read(sent.context, sent.length, &more, 1), MHD_CONTENT_READER_END_OF_STREAM);
}

enum MHD_Result __wrap_MHD_queue_response(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *response)
{
    assert_null(mhd);
    sent.count++;
    sent.status = status;
    sent.headers[0] = '\0';
    (void)MHD_get_response_headers(response, note_header, NULL);
    if (sent.streamed) read_stream();
    return MHD_YES;
}

/* Returns the value of a header in static memory, or NULL if the answer does not have it. */
static const char *header(const char *name)
{
    static char value[1024];
    for (const char *line = sent.headers; *line; line = strchr(line, '\n') + 1) {
        const size_t length = strlen(name);
        if (strncmp(line, name, length) != 0 || strncmp(line + length, ": ", 2) != 0) continue;
        snprintf(value, sizeof value, "%.*s", (int)strcspn(line + length + 2, "\n"), line + length + 2);
        return value;
    }
    return NULL;
}

static void assert_header(const char *name, const char *value)
{
    const char *found = header(name);
    if (value == NULL && found) fail_msg("%s: %s", name, found);
    if (value && found == NULL) fail_msg("no %s among\n%s", name, sent.headers);
    if (value) assert_string_equal(found, value);
}

/* ---- Requests that a test answers -------------------------------------------------------------------------------- */

struct bench {
    struct config config;
    struct server server;
    struct connection connection;
    uv_loop_t uv;
    struct mailbox box;
};

static void on_message(void *context, struct message *message)
{
    (void)context, (void)message;
}

static void open_bench(struct bench *b)
{
    attn_error err = { 0 };
    *b = (struct bench){ 0 };
    memset(&sent, 0, sizeof sent);
    config_default(&b->config);
    b->config.devices = "cpu";
    server_open(&b->server, &b->config);
    assert_int_equal(uv_loop_init(&b->uv), 0);
    assert_int_equal(mailbox_open(&b->box, &b->uv, on_message, NULL), 0);
    if (devices_open(&b->config, &b->box, 0, &b->server.devices, &err) != ATTN_OK) fail_msg("%s", err.text);
    request_set_role(ROLE_HTTP);
}

static void close_bench(struct bench *b)
{
    assert_true(devices_stop(b->server.devices, PATIENCE_MS));
    devices_close(b->server.devices);
    mailbox_close(&b->box);
    uv_run(&b->uv, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&b->uv), 0);
    server_close(&b->server);
    free(sent.body);
    sent.body = NULL;
}

static struct request *begin(struct bench *b, const char *method)
{
    struct http_server http = { .server = &b->server };
    struct request *request = &exchange_new(&http, NULL)->request;
    request->caller = caller_hold(&b->server.everybody);
    exchange_of(request)->connection = &b->connection;
    exchange_of(request)->method = method;
    strcpy(request->id, "the-id");
    return request;
}

static struct request *computed(struct bench *b, char *body)
{
    attn_error err = { 0 };
    struct request *request = begin(b, "POST");
    struct job *job = request->job = job_of(&b->server, ATTN_OP_FORWARD, body);
    request->route = routes_find(PORT_MAIN, proto_operations[ATTN_OP_FORWARD].path, exchange_of(request)->method).route;
    if (prepare_job(job, devices_capabilities(b->server.devices), devices_largest(b->server.devices), &err) != ATTN_OK)
        fail_msg("%s", err.text);
    float *numbers = (float *)job->outputs.memory;
    for (size_t i = 0; i < job->outputs.bytes / sizeof *numbers; i++) numbers[i] = (float)(i % 1000) / 8;
    strcpy(job->results[0].backend, "cpu test");
    request_move(request, REQUEST_ANSWERING);
    return request;
}

static char *encoded(const struct request *request, size_t *length)
{
    proto_encoder *encoder;
    attn_error err;
    assert_int_equal(proto_encoder_new(request->job->call, request->job->results, request->id, &encoder, &err),
                     ATTN_OK);
    *length = (size_t)proto_encoder_length(encoder);
    char *text = malloc(*length + 1);
    assert_int_equal(proto_encoder_read(encoder, text, *length + 1), *length);
    proto_encoder_free(encoder);
    return text;
}

static void answer_tensors(struct request *request)
{
    size_t length;
    char *want = encoded(request, &length);
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.count, 1);
    assert_int_equal(sent.status, 200);
    assert_int_equal(sent.announced, length);
    assert_int_equal(sent.length, length);
    assert_memory_equal(sent.body, want, length);
    assert_int_equal(exchange_of(request)->http_status, 200);
    assert_int_equal(exchange_of(request)->sent_bytes, length);
    assert_true(request->times.answer_ns > 0);
    free(want);
}

/* ---- Tests of answers with tensors ------------------------------------------------------------------------------- */

static void test_a_small_answer_is_written_over_the_inputs(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(40, 8, ""));
    request->times.recv_ns = 1500000;
    request->job->results[0].timing_us[PROTO_STAGE_compute] = 250;
    answer_tensors(request);
    assert_false(sent.streamed);
    assert_int_equal(sent.mode, MHD_RESPMEM_PERSISTENT);
    assert_ptr_equal(sent.buffer, request->job->inputs->memory);
    assert_header("Content-Type", "application/json");
    assert_header("X-Request-Id", "the-id");
    assert_int_equal(strncmp(header("Server-Timing"), "recv;dur=1.500, decode;dur=0.000, queue;dur=0.000, ", 50), 0);
    assert_non_null(strstr(header("Server-Timing"), "compute;dur=0.250, "));
    assert_header("Retry-After", NULL);
    assert_header("Connection", NULL);
    assert_header("Vary", NULL);
    request_free(request);
    close_bench(&b);
}

static void test_an_answer_that_is_longer_than_the_inputs_has_memory_of_its_own(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, wide_body());
    answer_tensors(request);
    assert_int_equal(sent.mode, MHD_RESPMEM_MUST_FREE);
    assert_null(request->job->inputs);
    assert_int_equal(staging_leased_bytes(b.server.staging), sent.length);
    request_free(request);
    close_bench(&b);
}

static int ready_contexts(struct bench *b)
{
    int counts[CONTEXT_STATE_COUNT];
    contexts_count(b->server.contexts, counts);
    return counts[CONTEXT_READY];
}

static void test_inputs_that_a_context_holds_are_not_written_over(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(40, 8, "\"save\": true"));
    float before[40 * 8];
    memcpy(before, request->job->call->items[0].problem.q.data, sizeof before);
    answer_tensors(request);
    assert_int_equal(sent.mode, MHD_RESPMEM_MUST_FREE);
    assert_memory_equal(request->job->call->items[0].problem.q.data, before, sizeof before);
    request_free(request);
    assert_true(staging_leased_bytes(b.server.staging) > 0);
    assert_int_equal(ready_contexts(&b), 1);
    close_bench(&b);
}

static void test_a_context_of_which_no_answer_tells_is_not_kept(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(40, 8, "\"save\": true"));
    no_response = true;
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.status, 503);
    assert_int_equal(ready_contexts(&b), 0);
    request_free(request);
    request_free(computed(&b, forward_body(40, 8, "\"save\": true")));
    assert_int_equal(ready_contexts(&b), 0);
    assert_int_equal(staging_leased_bytes(b.server.staging), 0);
    close_bench(&b);
}

static void test_large_inputs_are_given_back_before_a_small_answer_is_sent(void **state)
{
    (void)state;
    struct bench b;
    char *text = NULL;
    size_t bytes = 0;
    open_bench(&b);
    FILE *f = open_memstream(&text, &bytes);
    fprintf(f, "{");
    put_tensor(f, "q", 2, 64, 0);
    fprintf(f, ", ");
    put_tensor(f, "k", 4500, 64, 1);
    fprintf(f, ", ");
    put_tensor(f, "v", 4500, 64, 2);
    fprintf(f, "}");
    fclose(f);
    struct request *request = computed(&b, text);
    assert_true(request->job->inputs->bytes >= 2 << 20);
    answer_tensors(request);
    assert_false(sent.streamed);
    assert_int_equal(sent.mode, MHD_RESPMEM_MUST_FREE);
    assert_int_equal(staging_leased_bytes(b.server.staging), 0);
    request_free(request);
    close_bench(&b);
}

static void test_a_large_answer_is_encoded_while_it_is_sent(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(1000, 64, ""));
    struct job *job = job_hold(request->job);
    answer_tensors(request);
    assert_true(sent.streamed);
    assert_true(sent.announced > LARGE && sent.block == 192 << 10);
    /* The server must see how much the client has received, because it closes slow connections. */
    assert_int_equal(atomic_load(&b.connection.progress_bytes), sent.announced);
    /* The answer was read to its end and has released the job. The request and the test still hold the job. */
    assert_int_equal(atomic_load(&job->references), 2);
    request_free(request);
    job_release(job);
    close_bench(&b);
}

static void test_many_numbers_as_text_are_sent_in_smaller_blocks(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(1000, 16, "\"encoding\": \"array\""));
    attn_error err;
    assert_true(request->job->wants_measure);
    assert_int_equal(proto_encoder_new(request->job->call, request->job->results, request->id, &request->encoder, &err),
                     ATTN_OK);
    answer_tensors(request);
    assert_null(request->encoder);
    assert_true(sent.streamed);
    /* The answer is short, but is streamed in blocks of 32 KiB, because its numbers are text. */
    assert_true(sent.announced < LARGE);
    assert_int_equal(sent.block, 32 << 10);
    request_free(request);
    close_bench(&b);
}

/* ---- Tests of answers that refuse a request ---------------------------------------------------------------------- */

static void test_each_refusal_has_its_document_and_its_headers(void **state)
{
    (void)state;
    static const struct route post_only = { ROUTE_POST, "/v1/attention/forward", "forward", PORT_MAIN, .quiet = false };
    static const struct {
        proto_error error;
        unsigned status;
        const char *retry_after, *authenticate, *allow;
    } cases[] = {
        { PROTO_E_INVALID_REQUEST, 400, NULL, NULL, NULL },
        { PROTO_E_UNAUTHORIZED, 401, NULL, "Bearer realm=\"attnd\"", NULL },
        { PROTO_E_NOT_FOUND, 404, NULL, NULL, NULL },
        { PROTO_E_METHOD_NOT_ALLOWED, 405, NULL, NULL, "POST" },
        { PROTO_E_TOO_LARGE, 413, NULL, NULL, NULL },
        { PROTO_E_QUOTA, 429, "1", NULL, NULL },
        { PROTO_E_INTERNAL, 500, NULL, NULL, NULL },
        { PROTO_E_QUEUE_FULL, 503, "1", NULL, NULL },
        { PROTO_E_DRAINING, 503, "1", NULL, NULL },
        { PROTO_E_DEADLINE, 504, NULL, NULL, NULL },
    };
    struct bench b;
    open_bench(&b);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char want[256];
        struct request *request = begin(&b, "GET");
        request->route = &post_only;
        exchange_of(request)->methods = 1u << ROUTE_POST;
        request_fail(request, cases[c].error, "/q/shape/1", "why it is \"so\"");
        assert_int_equal(answer_queue(request, false), MHD_YES);
        assert_int_equal(sent.status, cases[c].status);
        assert_header("Content-Type", "application/problem+json");
        assert_header("X-Request-Id", "the-id");
        assert_header("Retry-After", cases[c].retry_after);
        assert_header("WWW-Authenticate", cases[c].authenticate);
        assert_header("Allow", cases[c].allow);
        snprintf(want, sizeof want,
                 "\"status\":%u,\"code\":\"%s\",\"request_id\":\"the-id\",\"pointer\":\"/q/shape/1\"", cases[c].status,
                 proto_errors[cases[c].error].code);
        assert_non_null(strstr(sent.body, want));
        assert_non_null(strstr(sent.body, "\"detail\":\"why it is \\\"so\\\"\""));
        assert_int_equal(exchange_of(request)->http_status, cases[c].status);
        assert_int_equal(exchange_of(request)->sent_bytes, sent.length);
        request_free(request);
    }
    close_bench(&b);
}

static void test_who_is_refused_hears_when_the_queue_may_be_shorter(void **state)
{
    (void)state;
    struct bench b;
    attn_error err;
    open_bench(&b);
    queue_learn(&b.server.queue, 1, 2.5);
    for (int i = 0; i < 3; i++) queue_enter(&b.server.queue, CALLER_WAITING, &b.server.everybody, &err);
    struct request *request = begin(&b, "POST");
    request_fail(request, PROTO_E_QUEUE_FULL, NULL, "full");
    answer_queue(request, false);
    assert_header("Retry-After", "8");
    request_free(request);
    for (int i = 0; i < 3; i++) queue_leave(&b.server.queue, CALLER_WAITING, &b.server.everybody);
    close_bench(&b);
}

/* A body may be a single problem, without {"requests": [...]}. If this problem fails, its error decides the answer's
 * status. */
static void test_a_job_whose_only_problem_failed_is_answered_with_its_error(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(5, 4, ""));
    attn_fail(&request->job->call->items[0].error, ATTN_NO_MEMORY, "/verify", "no memory to verify");
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.status, 503);
    assert_header("Content-Type", "application/problem+json");
    assert_non_null(strstr(sent.body, "\"detail\":\"no memory to verify\""));
    request_free(request);
    close_bench(&b);
}

/* ---- Tests of answers that handlers write ------------------------------------------------------------------------ */

static void say_hello(struct request *request, struct answer *answer)
{
    (void)request;
    *answer = (struct answer){ .status = 200,
                               .content_type = "text/plain; charset=utf-8",
                               .body = strdup("hello"),
                               .length = 5,
                               .csp = "default-src 'none'" };
}

static void say_nothing(struct request *request, struct answer *answer)
{
    (void)request, (void)answer;
}

static void refuse(struct request *request, struct answer *answer)
{
    answer->body = strdup("half of it");
    request_fail(request, PROTO_E_NOT_FOUND, NULL, "it is not here");
}

static const struct route hello = { ROUTE_GET, "/hello", "hello", PORT_MAIN, .answer = say_hello };
static const struct route nothing = { ROUTE_GET, "/nothing", "nothing", PORT_MAIN, .answer = say_nothing };
static const struct route refusing = { ROUTE_GET, "/refusing", "refusing", PORT_MAIN, .answer = refuse };

static struct request *asks(struct bench *b, const struct route *route, const char *method)
{
    struct request *request = begin(b, method);
    request->route = route;
    exchange_of(request)->methods = 1u << ROUTE_GET | 1u << ROUTE_DELETE;
    return request;
}

static void test_what_a_handler_wrote_is_sent(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    for (int head = 0; head < 2; head++) {
        struct request *request = asks(&b, &hello, head ? "HEAD" : "GET");
        assert_int_equal(answer_queue(request, head), MHD_YES);
        assert_int_equal(sent.status, 200);
        assert_int_equal(sent.announced, 5);
        assert_string_equal(sent.body, "hello");
        assert_int_equal(exchange_of(request)->sent_bytes, head ? 0 : 5);
        assert_header("Content-Type", "text/plain; charset=utf-8");
        assert_header("Content-Security-Policy", "default-src 'none'");
        assert_header("Connection", head ? "close" : NULL);
        request_free(request);
    }
    close_bench(&b);
}

static void count_problems(struct request *request, struct answer *answer)
{
    answer->status = 200;
    answer->content_type = "application/json";
    answer->length = (size_t)asprintf(&answer->body, "%d", request->job->call->count);
}

static void test_a_handler_answers_an_operation_that_no_device_runs(void **state)
{
    (void)state;
    static const struct route counts = { ROUTE_POST, "/counts", "counts", PORT_MAIN, .answer = count_problems };
    struct bench b;
    open_bench(&b);
    struct request *request = computed(&b, forward_body(5, 4, ""));
    request->route = &counts;
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.status, 200);
    assert_string_equal(sent.body, "1");
    request_free(request);
    close_bench(&b);
}

static void test_a_handler_that_fails_is_answered_with_a_problem(void **state)
{
    (void)state;
    struct bench b;
    open_bench(&b);
    struct request *request = asks(&b, &refusing, "GET");
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.status, 404);
    assert_non_null(strstr(sent.body, "it is not here"));
    assert_header("Content-Type", "application/problem+json");
    request_free(request);
    request = asks(&b, &nothing, "GET");
    assert_int_equal(answer_queue(request, false), MHD_YES);
    assert_int_equal(sent.status, 503);
    assert_non_null(strstr(sent.body, "no memory for the answer"));
    request_free(request);
    close_bench(&b);
}

static void test_pages_of_other_origins_are_told_what_they_may(void **state)
{
    (void)state;
    static const struct {
        const char *origin;
        bool cors, preflight;
        unsigned status;
        const char *vary, *allow_origin, *methods;
    } cases[] = {
        { NULL, false, false, 200, NULL, NULL, NULL },
        { "*", true, false, 200, NULL, "*", NULL },
        /* The first three columns are the option --cors-origin, whether another site's page sends the request, and
         * whether it is a preflight. */
        { "https://a.example", false, false, 200, "Origin", NULL, NULL },
        { "https://a.example", true, false, 200, "Origin", "https://a.example", NULL },
        { "https://a.example", true, true, 204, "Origin", "https://a.example", "GET, HEAD, DELETE" },
    };
    struct bench b;
    open_bench(&b);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        b.config.cors_origin = cases[c].origin;
        struct request *request = asks(&b, &hello, cases[c].preflight ? "OPTIONS" : "GET");
        exchange_of(request)->cors = cases[c].cors;
        exchange_of(request)->preflight = cases[c].preflight;
        assert_int_equal(answer_queue(request, false), MHD_YES);
        assert_int_equal(sent.status, cases[c].status);
        assert_header("Vary", cases[c].vary);
        assert_header("Access-Control-Allow-Origin", cases[c].allow_origin);
        assert_header("Access-Control-Allow-Methods", cases[c].methods);
        assert_header("Access-Control-Expose-Headers",
                      cases[c].cors ? "X-Request-Id, Retry-After, Server-Timing, Inference-Header-Content-Length"
                                    : NULL);
        assert_header("Access-Control-Max-Age", cases[c].preflight ? "86400" : NULL);
        if (cases[c].preflight) {
            assert_int_equal(sent.length, 0);
            assert_header("Content-Type", NULL);
        }
        request_free(request);
    }
    b.config.cors_origin = NULL;
    close_bench(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_small_answer_is_written_over_the_inputs),
        cmocka_unit_test(test_an_answer_that_is_longer_than_the_inputs_has_memory_of_its_own),
        cmocka_unit_test(test_inputs_that_a_context_holds_are_not_written_over),
        cmocka_unit_test(test_a_context_of_which_no_answer_tells_is_not_kept),
        cmocka_unit_test(test_large_inputs_are_given_back_before_a_small_answer_is_sent),
        cmocka_unit_test(test_a_large_answer_is_encoded_while_it_is_sent),
        cmocka_unit_test(test_many_numbers_as_text_are_sent_in_smaller_blocks),
        cmocka_unit_test(test_each_refusal_has_its_document_and_its_headers),
        cmocka_unit_test(test_who_is_refused_hears_when_the_queue_may_be_shorter),
        cmocka_unit_test(test_a_job_whose_only_problem_failed_is_answered_with_its_error),
        cmocka_unit_test(test_what_a_handler_wrote_is_sent),
        cmocka_unit_test(test_a_handler_answers_an_operation_that_no_device_runs),
        cmocka_unit_test(test_a_handler_that_fails_is_answered_with_a_problem),
        cmocka_unit_test(test_pages_of_other_origins_are_told_what_they_may),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
