/* request.h: one HTTP request from its request line to its last byte. It has one owner (thread) at a time. The
 * hand-over goes through a lock (the mailbox, or libmicrohttpd's suspend and resume), so the new owner sees what the
 * old one wrote. request_move() checks each move against the table of states, and counts it for /metrics. */
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

/* ---- Which thread owns a request in which state ------------------------------------------------------------------ */

enum role { ROLE_NONE, ROLE_HTTP, ROLE_LOOP, ROLE_DEVICE };

/* One row for each state: its id, its label in /metrics, the role of the thread that owns the request, the kind of
 * place in the queue that the request needs, and the states to which the request may move next.
 *
 * From any state but the last two, a request may move to ANSWERING early, since an error is an answer. If a device
 * reads or writes the client's own memory, the request is held (not answered) until the job ends, unless the device
 * hangs or the server ends. A state ends when
 *
 *   RECEIVING    the last byte has arrived, or the client has left
 *   COMPUTING    the HTTP thread has computed the job, or leaves the job to a device
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
    X(RUNNING, "running", LOOP, PLACES, MOVE(QUEUED) | MOVE(FINISHING) | MOVE(ANSWERING))                               \
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

/* Each thread sets its role (HTTP, main or device thread) before it uses requests. */
void request_set_role(enum role role);
enum role request_role(void);

const char *request_state_label(enum request_state state);
bool request_may_move(enum request_state from, enum request_state to);
/* Returns how many requests for tensors are in this state. */
int request_count(enum request_state state);

/* ---- One HTTP request -------------------------------------------------------------------------------------------- */

/* Times on CLOCK_MONOTONIC at which something happened to the request (0: it has not happened), and durations (recv_ns,
 * decode_ns, encode_ns). */
struct request_times {
    int64_t began_ns;    /* time at which the request line arrived */
    int64_t head_ns;     /* time at which the headers were complete */
    int64_t received_ns; /* time at which the last byte of the body arrived */
    int64_t answer_ns;   /* time at which the answer was queued for sending */
    int64_t recv_ns;     /* time spent waiting for bytes of the body, without decoding */
    int64_t decode_ns;   /* time spent decoding the body, piece by piece */
    int64_t encode_ns;
};

/* A piece of a longer text, without a NUL at its end. */
struct slice {
    const char *at;
    size_t length;
};

enum { REQUEST_PARAMETERS = 4 }; /* largest number of parameters in a path */

/* The answer of a handler that computes no tensors. */
struct answer {
    int status;
    const char *content_type;
    char *body;    /* the answer's body, allocated by malloc() and freed by libmicrohttpd; NULL: none */
    bool constant; /* whether `body` is a constant, which must not be freed */
    size_t length;
    const char *csp; /* header Content-Security-Policy; NULL: none */
    /* header Location, the path of a new resource; empty: none */
    char location[72];
};

struct request {
    struct message message; /* the message that posts this request to the main thread's mailbox */
    enum request_state state;
    bool counted; /* whether request_count() counts the request; only requests with tensors are counted */
    struct server *server;
    int socket; /* the socket of the client's connection, to watch for a hang-up; libmicrohttpd owns it */
    /* The row of the table of routes that matches the request's path and method. If there is none, the first row that
     * matches its path. NULL: no row matches its path. */
    const struct route *route;
    /* values of the path's parameters, in the order of the route's pattern */
    struct slice parameters[REQUEST_PARAMETERS];
    /* The client's account (access token). The request holds a reference to it. NULL: the account is not known yet, or
     * the client was refused. */
    struct caller *caller;
    /* The flow (client) that is charged for the request's device time. The request holds a reference to it. NULL: not
     * known yet. */
    struct flow *flow;
    char id[REQUEST_ID_BYTES];
    struct request_times times;

    /* Only the HTTP thread uses the members below, while the request is received. */
    const proto_model *model; /* the KServe model that the path names; NULL: the path names none */
    const proto_format *answer_as;
    proto_parser *parser;
    struct staging_block *block; /* staging memory (memory for tensors) into which the parser writes */
    /* number of bytes of `text`, or of the answer, that are charged to --staging-bytes although they lie outside
     * staging memory */
    size_t counted_bytes;
    /* list of the body's tensors that lie in shared memory; NULL: none, or the job has taken the list over */
    struct region_uses *shared;
    char *text; /* the body, allocated by malloc(), if the route keeps it as text */
    size_t text_bytes;
    uint64_t decoded_bytes;    /* bytes of the unpacked body that the parser has received */
    int64_t client_timeout_ms; /* header X-Request-Timeout-Ms; -1: not given */
    /* Which kind of place in the queue the request has: receiving or waiting. CALLER_PLACES: none. Only request.c
     * changes it. */
    int place;

    /* Only the request's owner uses the members below. */
    struct job *job; /* the request holds a reference to the job */
    bool failed;     /* whether the answer is an error, as JSON */
    proto_error error;
    attn_error why; /* why the request fails, with a JSON pointer into the body */
    bool gone;      /* whether the client left, so that no answer is sent */

    proto_encoder *encoder; /* encoder that has computed the length of the answer; NULL: none yet */

    /* Only the main thread uses the members below, while the request waits. */
    struct deadline deadline;
    /* Whether another thread checks the request's body, or a device or another thread uses its client's memory. The
     * request cannot go back to its HTTP thread before that has ended. */
    bool held;
    /* neighbours in the list of all requests with suspended connections, in order of arrival */
    struct request *previous, *next;
    struct hangup_watch *watch; /* the watch for the client's hang-up; NULL: none yet */
};

/* Makes a request in the state RECEIVING, which the calling HTTP thread owns. The request is the first member of a new
 * struct of `bytes` bytes, which is filled with zeros. NULL: out of memory. */
struct request *request_new(struct server *server, size_t bytes);
void request_free(struct request *request);

/* Marks the request as one with tensors, which request_count() then counts. */
void request_count_in(struct request *request);

/* Moves the request to its next state. The owner of that state (REQUEST_STATE_MAP) then owns the request. Only the
 * current owner may call this. */
void request_move(struct request *request, enum request_state to);

/* Records why the request is refused. Only the first reason is kept. */
void request_fail(struct request *request, proto_error error, const char *pointer, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void request_fail_status(struct request *request, const attn_error *why);
/* Records an error in the request's job. The error's JSON pointer into the problem is replaced by one into the client's
 * body. Only the job's owner may call this. */
void request_fail_in_job(struct request *request, const attn_error *why);

/* Replaces the request's place in the queue by a place of the kind `place`. Call this before the request moves to a
 * state that needs such a place. If this fails, the request has no place any more. request_move() releases the place
 * when the next state needs none. Only the request's owner may call this. */
attn_status request_enter(struct request *request, enum caller_place place, attn_error *err);

/* Charges the size of the request's text or answer to the limit on staging memory (memory for tensors), although the
 * text or answer lies elsewhere. Only the growth since the last call is charged. The request's account is charged too.
 * Errors: BUSY, QUOTA. */
attn_status request_count_bytes(struct request *request, size_t bytes, attn_error *err);

/* Releases what the request needed while it was received: parser, place in the queue, memory for tensors, references to
 * shared memory. */
void request_drop_body(struct request *request);

/* Makes an id of 16 hexadecimal digits, probably unique even across processes. */
void request_make_id(char id[REQUEST_ID_BYTES]);

#endif
