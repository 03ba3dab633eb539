/* jobs.h: makes request bodies, requests and jobs (a job is the problems of one request) for tests of the server
 * without sockets. As in the daemon, the decoder reads JSON text into leased staging memory, and check_body() or
 * prepare_job() follows.
 *
 *   struct server server;
 *   struct config config;
 *   server_open(&server, &config);                      // staging memory, contexts, slots; no devices, no loop
 *   char *body = forward_body(5, 4, "\"verify\": 2");   // 5 queries and keys, heads of 4 numbers
 *   struct job *job = job_of(&server, ATTN_OP_FORWARD, body);
 *   server_close(&server);                              // fails if memory is still leased or a slot still counted
 *
 * A body is allocated with malloc(); the function that takes it frees it. */
#ifndef TEST_JOBS_H
#define TEST_JOBS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/intake/check.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/work/job.h"
#include "server/work/request.h"
#include "server/work/server.h"

#ifdef NDEBUG
#error "tests run with the program's own assertions"
#endif

/* A test may use only some of the helpers; the compiler must not warn of the others. */
#define HELPER __attribute__((unused)) static

enum { PATIENCE_MS = 60000 }; /* time limit of WAIT_UNTIL() */

#define WAIT_UNTIL(condition)                                                            \
    do {                                                                                 \
        const int64_t until_ms_ = clock_ms() + PATIENCE_MS;                              \
        while (!(condition)) {                                                           \
            if (clock_ms() > until_ms_) fail_msg("waited in vain until %s", #condition); \
            nanosleep(&(struct timespec){ 0, 500000 }, NULL);                            \
        }                                                                                \
    } while (0)

/* ---- Gates: the fake backend waits until a test opens a gate ----------------------------------------------------- */

/* A gate: a file for which the fake backend waits (its script says hold=PATH) until gate_open() deletes the file. */
struct gate {
    char path[64];
};

HELPER void gate_shut(struct gate *gate)
{
    strcpy(gate->path, "/tmp/attnd-unit-XXXXXX");
    const int fd = mkstemp(gate->path);
    if (fd < 0) fail_msg("no file %s", gate->path);
    close(fd);
}

HELPER void gate_open(struct gate *gate)
{
    assert_int_equal(unlink(gate->path), 0);
}

/* Copies `script`, which tells the fake devices what to do, to `text`, and puts the path of the gate's file in place of
 * GATE. */
HELPER void gate_script(const struct gate *gate, const char *script, char *text, size_t bytes)
{
    const char *at = strstr(script, "GATE");
    if (at) snprintf(text, bytes, "%.*s%s%s", (int)(at - script), script, gate->path, at + 4);
    else snprintf(text, bytes, "%s", script);
}

/* ---- A server without its HTTP threads and its scheduler's loop -------------------------------------------------- */

HELPER void config_default(struct config *config)
{
    char why[256], *argv[] = { "attnd", "--staging-bytes", "64M", "--cpu-threads", "1", "--http-threads", "2" };
    if (config_read(config, 7, argv, why, sizeof why) != CONFIG_RUN) fail_msg("%s", why);
}

/* Opens a server without devices and without a loop. config_default() must have filled in `config`. */
HELPER void server_open(struct server *server, const struct config *config)
{
    *server = (struct server){
        .config = config, .limits = PROTO_LIMITS_DEFAULT, .everybody = CALLER_EVERYBODY, .phase = SERVER_READY
    };
    server->staging = staging_new(config->staging_bytes, 0, NULL);
    server->contexts = contexts_new(config->staging_bytes / CONTEXTS_SHARE, CONTEXTS_MAX_COUNT, CONTEXTS_TTL_MS);
    server->caches = caches_new(CACHES_MAX_COUNT);
    assert_non_null(server->caches);
    queue_init(&server->queue, config->max_receiving, config->queue_depth, config->max_batch,
               config->batch_window_us * 1000);
}

HELPER void server_close(struct server *server)
{
    for (int place = 0; place < CALLER_PLACES; place++)
        assert_int_equal(atomic_load(&server->queue.places[place].count), 0);
    assert_int_equal(server->queue.count, 0);
    contexts_free(server->contexts);
    caches_free(server->caches);
    assert_int_equal(staging_leased_bytes(server->staging), 0);
    staging_free(server->staging);
}

/* ---- Bodies of requests ------------------------------------------------------------------------------------------ */

HELPER void put_heads(FILE *f, const char *name, int rows, int heads, int D, int salt)
{
    fprintf(f, "\"%s\": {\"shape\": [1, %d, %d, %d], \"dtype\": \"float32\", \"data\": [", name, rows, heads, D);
    for (int i = 0; i < rows * heads * D; i++) fprintf(f, "%s%g", i ? "," : "", (i * 7 + salt * 3) % 11 / 8.0 - 0.5);
    fprintf(f, "]}");
}

HELPER void put_tensor(FILE *f, const char *name, int rows, int D, int salt)
{
    put_heads(f, name, rows, 1, D, salt);
}

/* Returns a body with the tensors in `names` (such as "q k v"), followed by the members `extra`. Each tensor has `rows`
 * rows of `heads` heads of D numbers. */
HELPER char *heads_body(const char *names, int rows, int heads, int D, const char *extra)
{
    char *text = NULL, name[16];
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    const char *comma = "";
    if (f == NULL) abort();
    fprintf(f, "{");
    for (int salt = 0, used; sscanf(names, "%15s%n", name, &used) == 1; names += used, salt++, comma = ", ") {
        fprintf(f, "%s", comma);
        put_heads(f, name, rows, heads, D, salt);
    }
    if (*extra) fprintf(f, "%s%s", comma, extra);
    fprintf(f, "}");
    fclose(f);
    return text;
}

HELPER char *body_of(const char *names, int rows, int D, const char *extra)
{
    return heads_body(names, rows, 1, D, extra);
}

HELPER char *forward_body(int rows, int D, const char *extra)
{
    return body_of("q k v", rows, D, extra);
}

/* Returns a body of a few hundred bytes whose result `out` has 25600 bytes: 100 queries of one number, and one key
 * whose value has 64 numbers. */
HELPER char *wide_body(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL) abort();
    fprintf(f, "{");
    put_tensor(f, "q", 100, 1, 0);
    fprintf(f, ", ");
    put_tensor(f, "k", 1, 1, 1);
    fprintf(f, ", ");
    put_tensor(f, "v", 1, 64, 2);
    fprintf(f, "}");
    fclose(f);
    return text;
}

/* Returns the body {"requests": [...]} with `count` problems, and frees `bodies`. */
HELPER char *envelope_of(char *const *bodies, int count)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL) abort();
    fprintf(f, "{\"requests\": [");
    for (int i = 0; i < count; i++) {
        fprintf(f, "%s%s", i ? ", " : "", bodies[i]);
        free(bodies[i]);
    }
    fprintf(f, "]}");
    fclose(f);
    return text;
}

/* Returns the body of a backward that names a context (a saved forward) instead of its tensors. */
HELPER char *backward_body(const char *context, int rows, int D)
{
    char extra[128];
    snprintf(extra, sizeof extra, "\"context\": \"%s\"", context);
    return body_of("dout", rows, D, extra);
}

/* ---- Requests whose body has arrived ----------------------------------------------------------------------------- */

HELPER attn_status grow_extent(void *context, size_t bytes, void **base, attn_error *err)
{
    struct request *request = context;
    struct staging_pool *staging = request->server->staging;
    const attn_status status = request->block
                                   ? staging_grow(staging, &request->block, request->block->bytes, bytes, err)
                                   : staging_lease(staging, request->caller, bytes, &request->block, err);
    if (status == ATTN_OK) *base = request->block->memory;
    return status;
}

/* Returns a request in state RECEIVING whose body is complete. The calling thread must have ROLE_HTTP. */
HELPER struct request *received(struct server *server, attn_op op, char *body)
{
    attn_error err = { 0 };
    struct request *request = request_new(server, sizeof(struct request));
    const proto_memory memory = { grow_extent, request };
    request->caller = caller_hold(&server->everybody);
    request->socket = -1;
    request_make_id(request->id);
    request_count_in(request);
    assert_int_equal(request_enter(request, CALLER_RECEIVING, &err), ATTN_OK);
    request->answer_as = &proto_json;
    request->parser = proto_parser_new(&proto_json, op, &server->limits, &memory);
    request->decoded_bytes = strlen(body);
    if (proto_parser_feed(request->parser, body, strlen(body), &err) != ATTN_OK) fail_msg("%s", err.text);
    free(body);
    request->times.received_ns = clock_ns();
    return request;
}

/* ---- Jobs (one request's problems), and the check of their results ----------------------------------------------- */

/* Returns a job (one request's problems) that is ready for prepare_job(). */
HELPER struct job *job_of(struct server *server, attn_op op, char *body)
{
    attn_error err = { 0 };
    proto_call *call = NULL;
    request_set_role(ROLE_HTTP);
    struct request *request = received(server, op, body);
    if (proto_parser_finish(request->parser, &call, &err) != ATTN_OK) fail_msg("%s: %s", err.member, err.text);
    struct job *job = job_new(server->staging, server->contexts, request->caller, request->block, call);
    request->block = NULL;
    request_free(request);
    return job;
}

/* Checks that every output of problem `i` has the same bits as when the test computes the problem on a CPU device. */
HELPER void assert_computed(const struct job *job, int i)
{
    const attn_device_options one = { .threads = 1 };
    attn_problem p = job->call->items[i].problem;
    attn_device *device;
    attn_stream *stream;
    attn_error err = { 0 };
    void *own[ATTN_TENSOR_COUNT] = { 0 };
    assert_int_equal(attn_device_open("cpu", 0, &one, &device, &err), ATTN_OK);
    assert_int_equal(attn_stream_open(device, &stream, &err), ATTN_OK);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        int64_t bytes;
        if (attn_tensors[id].role != (p.op == ATTN_OP_FORWARD ? ATTN_ROLE_OUT : ATTN_ROLE_OUT_BACK) ||
            p.tensor[id].rank == 0)
            continue;
        assert_true(attn_shape_bytes(p.tensor[id].dtype, p.tensor[id].rank, p.tensor[id].shape, &bytes));
        own[id] = p.tensor[id].data = aligned_alloc(64, (size_t)bytes / 64 * 64 + 64);
    }
    if ((p.op == ATTN_OP_FORWARD ? attn_forward : attn_backward)(stream, &p, NULL, &err) != ATTN_OK)
        fail_msg("%s", err.text);
    assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        int64_t bytes;
        if (own[id] == NULL || !attn_shape_bytes(p.tensor[id].dtype, p.tensor[id].rank, p.tensor[id].shape, &bytes))
            continue;
        assert_memory_equal(job->call->items[i].problem.tensor[id].data, own[id], (size_t)bytes);
        free(own[id]);
    }
    attn_stream_close(stream);
    attn_device_close(device);
}

#endif
