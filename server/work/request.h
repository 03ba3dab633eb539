/* request.h: one HTTP request, from its request line to its last byte, and who may touch it when.
 *
 * A request has one owner at a time, and handing it over is the only synchronisation: what the old owner wrote is
 * seen by the new one because the hand-over goes through a lock (the mailbox, or libmicrohttpd's suspend and
 * resume). The table below is the code: request_move() asserts it and counts it, /metrics shows the counts. */
#ifndef REQUEST_H
#define REQUEST_H

#include <stdbool.h>

#include "proto-json/proto.h"
#include "server/base/limits.h"
#include "server/base/caller.h"
#include "server/base/deadlines.h"
#include "server/work/job.h"
#include "server/base/mailbox.h"

struct region_uses;
struct route;
struct server;
struct flow;
struct hangup_watch;

/* ---- The owner table --------------------------------------------------------------------------------------------- */

enum role { ROLE_NONE, ROLE_HTTP, ROLE_LOOP, ROLE_DEVICE };

/* state, label in /metrics, the role that owns it, its place in the queue, the states that it may go to. Any state but
 * the last two may go to ANSWERING early: an error is an answer. A job that runs is left behind then, and freed when
 * the device brings it back: soon, for a batch that nobody waits for is cancelled. One that uses its client's memory
 * in place is waited for: its request is held, unless the device hangs or the server ends. A state ends when
 *
 *   RECEIVING    the last byte has arrived, or the client has left
 *   COMPUTING    its HTTP thread has computed it, or leaves that to a device
 *   CHECKING     a large body, or much shared memory, has been read and checked
 *   QUEUED       a batch has formed
 *   RUNNING      the output has been copied back
 *   FINISHING    rows are verified, shared memory is written, numbers are measured
 *   ANSWERING    the client has the answer, or has left */
/* clang-format off */
#define REQUEST_STATE_MAP(X)                                                                                            \
    X(RECEIVING, "receiving", HTTP, RECEIVING, MOVE(CHECKING) | MOVE(COMPUTING) | MOVE(ANSWERING) | MOVE(FREED))        \
    X(COMPUTING, "computing", HTTP, PLACES, MOVE(QUEUED) | MOVE(RUNNING) | MOVE(ANSWERING) | MOVE(FREED))               \
    X(CHECKING, "checking", LOOP, WAITING, MOVE(QUEUED) | MOVE(ANSWERING))                                              \
    X(QUEUED, "queued", LOOP, WAITING, MOVE(RUNNING) | MOVE(ANSWERING))                                                 \
    X(RUNNING, "running", LOOP, PLACES, MOVE(FINISHING) | MOVE(ANSWERING))                                              \
    X(FINISHING, "finishing", LOOP, PLACES, MOVE(ANSWERING))                                                            \
    X(ANSWERING, "answering", HTTP, PLACES, MOVE(FREED))                                                                \
    X(FREED, "freed", NONE, PLACES, 0)
/* clang-format on */

enum request_state {
#define X(id, label, owner, place, to) REQUEST_##id,
    REQUEST_STATE_MAP(X)
#undef X
        REQUEST_STATE_COUNT
};

/* What this thread is; each thread says so when it starts to touch requests. */
void request_set_role(enum role role);
enum role request_role(void);

const char *request_state_label(enum request_state state);
bool request_may_move(enum request_state from, enum request_state to);
int request_count(enum request_state state); /* requests for tensors in that state now; probes and pages do not count */

/* ---- A request --------------------------------------------------------------------------------------------------- */

/* Times of a request on CLOCK_MONOTONIC; 0 where it did not get there. */
struct request_times {
    int64_t began_ns;    /* the request line arrived */
    int64_t head_ns;     /* the headers are complete */
    int64_t received_ns; /* the last byte of the body */
    int64_t answer_ns;   /* the answer was queued */
    int64_t recv_ns;     /* duration: of waiting for the body, without the decoding in between */
    int64_t decode_ns;   /* duration: of decoding, spread over the body */
    int64_t encode_ns;   /* duration */
};

/* A part of a text that is somebody else's: not NUL-ended. */
struct slice {
    const char *at;
    size_t length;
};

enum { REQUEST_PARAMETERS = 4 }; /* of a path, at most */

/* The answer of a handler that computes nothing (routes.c). */
struct answer {
    int status;
    const char *content_type;
    char *body;    /* malloc'ed, given to libmicrohttpd; NULL: none */
    bool constant; /* the body is not given away: it lives as long as the process */
    size_t length;
    const char *csp;   /* Content-Security-Policy */
    char location[72]; /* of what was made; empty: none */
};

struct request {
    struct message message; /* to the loop */
    enum request_state state;
    bool counted; /* in request_count() */
    struct server *server;
    int socket;                /* its connection's, to be watched for a hang-up: never closed by us */
    const struct route *route; /* NULL: no such path; where that has no row for the method, its first */
    struct slice parameters[REQUEST_PARAMETERS]; /* of its path, in the order of the pattern */
    struct caller *caller;                       /* a reference; NULL: not looked at yet, or refused */
    struct flow *flow;                           /* a reference; NULL: the request has used no device's time yet */
    char id[REQUEST_ID_BYTES];
    struct request_times times;

    /* Receiving: the HTTP thread's. */
    const proto_model *model;      /* that its path names; NULL: none */
    const proto_format *answer_as; /* how the answer to it is written */
    proto_decoder *decoder;
    struct staging_block *block; /* where the decoder writes */
    size_t counted_bytes;        /* bytes of its text, or of its answer, that count as staging memory */
    struct region_uses *shared;  /* what the body refers to in shared memory, until the job has it; NULL: nothing */
    char *text;                  /* the body, of a route that keeps it (malloc) */
    size_t text_bytes;
    uint64_t decoded_bytes;    /* of the body, as the decoder was given it: unpacked */
    int64_t client_timeout_ms; /* X-Request-Timeout-Ms; -1: not given */
    int place;                 /* enum caller_place that it has in the queue; CALLER_PLACES: none. request.c's */

    /* Whose owner changes with the state. */
    struct job *job; /* a reference */
    bool failed;     /* answered with a problem document: */
    proto_error error;
    attn_error why; /* its text and pointer */
    bool gone;      /* the client left while it waited: nothing to answer */

    proto_encoder *encoder; /* of the answer, measured already; NULL: none yet */

    /* Waiting: the loop's. */
    struct deadline deadline;
    /* Another thread checks its body, or something is written into its client's memory: it cannot be handed back before
     * that is over. */
    bool held;
    struct request *previous, *next; /* all requests whose connections are suspended, in order of arrival */
    struct hangup_watch *watch;      /* for hang-up; NULL: not watched (yet) */
};

/* Makes a request in RECEIVING, which the calling HTTP thread owns. It is the head of a zeroed block of `bytes`, so
 * that a struct that begins with a request can be made of it. NULL when out of memory. */
struct request *request_new(struct server *server, size_t bytes);
/* Gives everything back. Only its owner may. */
void request_free(struct request *request);

/* It is one for tensors: counts it in its present state. */
void request_count_in(struct request *request);

/* By the owner of the present state: it belongs to the owner of the next one. */
void request_move(struct request *request, enum request_state to);

/* Records why the request is refused; the first reason stays. */
void request_fail(struct request *request, proto_error error, const char *pointer, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void request_fail_status(struct request *request, const attn_error *why);
/* The same by who owns its job, of a fault that was found in there: its pointer becomes one into the body as it was
 * sent. */
void request_fail_in_job(struct request *request, const attn_error *why);

/* By the owner: takes a place in the queue, in exchange for the one it has. A state that wants one (the table above) is
 * entered with it; request_move() gives it back at the edge to a state that has none. On an error it has none. */
attn_status request_enter(struct request *request, enum caller_place place, attn_error *err);

/* The request's text, or its answer, which are not leased, have so many bytes now. The growth is counted as staging
 * memory of its caller. */
attn_status request_count_bytes(struct request *request, size_t bytes, attn_error *err);

/* Ends the receiving side: decoder, place, staging and shared memory, as far as they are still held. */
void request_drop_body(struct request *request);

/* A new id, unique in this process and unlikely elsewhere: 16 hexadecimal digits. */
void request_make_id(char id[REQUEST_ID_BYTES]);

#endif
