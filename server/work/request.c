/* request.c: makes and frees requests, and moves them from state to state. */
#include "server/work/request.h"

#include <assert.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/flow.h"
#include "server/work/contexts.h"
#include "server/work/queue.h"
#include "server/regions/regions.h"
#include "server/work/server.h"

#define MOVE(to) (1u << REQUEST_##to)

static const struct {
    const char *label;
    enum role owner;
    enum caller_place place; /* the place in the queue that this state needs; CALLER_PLACES: none */
    unsigned to;             /* states to which the request may move next, as bits */
} states[REQUEST_STATE_COUNT] = {
#define X(id, label, owner, place, to) { label, ROLE_##owner, CALLER_##place, to },
    REQUEST_STATE_MAP(X)
#undef X
};

static _Atomic int counts[REQUEST_STATE_COUNT];
static _Thread_local enum role this_role;

void request_set_role(enum role role)
{
    this_role = role;
}
enum role request_role(void)
{
    return this_role;
}

const char *request_state_label(enum request_state state)
{
    return states[state].label;
}
int request_count(enum request_state state)
{
    return atomic_load_explicit(&counts[state], memory_order_relaxed);
}

bool request_may_move(enum request_state from, enum request_state to)
{
    return states[from].to >> to & 1;
}

static void leave_place(struct request *request)
{
    if (request->place == CALLER_PLACES) return;
    queue_leave(&request->server->queue, (enum caller_place)request->place, request->caller);
    request->place = CALLER_PLACES;
}

void request_move(struct request *request, enum request_state to)
{
    assert(request_may_move(request->state, to));
    assert(this_role == states[request->state].owner);
    if (states[to].place == CALLER_PLACES) leave_place(request);
    else assert(request->place == (int)states[to].place);
    if (request->counted) {
        const int count = atomic_fetch_sub_explicit(&counts[request->state], 1, memory_order_relaxed);
        assert(count > 0);
        (void)count;
        if (to != REQUEST_FREED) atomic_fetch_add_explicit(&counts[to], 1, memory_order_relaxed);
    }
    request->state = to;
}

void request_count_in(struct request *request)
{
    request->counted = true;
    atomic_fetch_add_explicit(&counts[request->state], 1, memory_order_relaxed);
}

/* The id comes from splitmix64, with one counter for all threads and a random start value for each thread. It therefore
 * takes no lock, and only one system call per thread. */
void request_make_id(char id[REQUEST_ID_BYTES])
{
    static _Atomic uint64_t counter;
    static _Thread_local uint64_t start;
    if (start == 0 && getrandom(&start, sizeof start, GRND_NONBLOCK) != (ssize_t)sizeof start)
        start = (uint64_t)clock_ns() | 1;
    uint64_t x = start + atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    for (int i = 15; i >= 0; i--, x >>= 4) id[i] = "0123456789abcdef"[x & 15];
    id[16] = '\0';
}

struct request *request_new(struct server *server, size_t bytes)
{
    assert(bytes >= sizeof(struct request));
    struct request *request = calloc(1, bytes);
    if (request == NULL) return NULL;
    request->server = server;
    request->client_timeout_ms = -1;
    request->place = CALLER_PLACES;
    request->times.began_ns = clock_ns();
    return request;
}

attn_status request_enter(struct request *request, enum caller_place place, attn_error *err)
{
    leave_place(request);
    const attn_status status = queue_enter(&request->server->queue, place, request->caller, err);
    if (status == ATTN_OK) request->place = place;
    return status;
}

attn_status request_count_bytes(struct request *request, size_t bytes, attn_error *err)
{
    if (bytes <= REQUEST_UNCOUNTED_BYTES || bytes <= request->counted_bytes) return ATTN_OK;
    const attn_status status = staging_count(request->server->staging, request->caller, bytes - request->counted_bytes,
                                             err);
    if (status == ATTN_OK) request->counted_bytes = bytes;
    return status;
}

void request_drop_body(struct request *request)
{
    proto_parser_free(request->parser);
    request->parser = NULL;
    if (request->block) staging_release(request->server->staging, request->block);
    request->block = NULL;
    if (request->counted_bytes > 0)
        staging_count_back(request->server->staging, request->caller, request->counted_bytes);
    request->counted_bytes = 0;
    region_uses_free(request->shared);
    request->shared = NULL;
    leave_place(request);
}

void request_free(struct request *request)
{
    if (request == NULL) return;
    assert(request->watch == NULL && request->deadline.place == 0 && !request->held);
    request_drop_body(request);
    free(request->text);
    proto_encoder_free(request->encoder);
    /* If no answer was sent, the saved forwards (contexts) that this backward has taken can be used by another
     * backward. */
    if (request->job) contexts_finish_job(request->job, false);
    job_release(request->job);
    flow_release(request->flow);
    caller_release(request->caller);
    request_move(request, REQUEST_FREED);
    free(request);
}

void request_fail(struct request *request, proto_error error, const char *pointer, const char *format, ...)
{
    va_list args;
    if (request->failed) return;
    request->failed = true;
    request->error = error;
    snprintf(request->why.member, sizeof request->why.member, "%s", pointer ? pointer : "");
    va_start(args, format);
    vsnprintf(request->why.text, sizeof request->why.text, format, args);
    va_end(args);
}

void request_fail_status(struct request *request, const attn_error *why)
{
    request_fail(request, proto_error_of(why->status), why->member, "%s",
                 why->text[0] ? why->text : "no reason was given");
}

void request_fail_in_job(struct request *request, const attn_error *why)
{
    attn_error where = *why;
    proto_call_locate(request->job->call, &where);
    request_fail_status(request, &where);
}
