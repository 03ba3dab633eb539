/* request.h: one HTTP request from its request line to its last byte, and which thread may use it when.
 *
 * A request has one owner (thread) at a time, and the hand-over to the next owner is the only synchronisation. The
 * hand-over goes through a lock (the mailbox, or libmicrohttpd's suspend and resume), so the new owner sees what the
 * old one wrote. request_move() checks each move from state to state against the table below, and counts the moves for
 * /metrics. */
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

/* One row for each state: its id, its label in /metrics, the role of the thread that owns the request, the slot in the
 * queue that the request needs, the next states.
 *
 * From any state but the last two, a request may move to ANSWERING early, since an error is an answer. If its job runs
 * at that time, the device keeps the job, and the job is freed when the device returns it. The device returns the job
 * soon, because a batch that no request waits for is cancelled. A request whose job uses its client's memory in place
 * is held until the job ends, unless the device hangs or the server ends. A state ends when
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

/* Sets the role of the calling thread: HTTP, main or device thread. Each thread calls this before it uses requests. */
void request_set_role(enum role role);
enum role request_role(void);

const char *request_state_label(enum request_state state);
bool request_may_move(enum request_state from, enum request_state to);
/* Returns how many requests for tensors are in this state now. Probes and pages are not counted. */
int request_count(enum request_state state);

/* ---- One HTTP request -------------------------------------------------------------------------------------------- */

/* Times of a request on CLOCK_MONOTONIC, in nanoseconds. 0: the request ended before that event. */
struct request_times {
    int64_t began_ns;    /* time at which the request line arrived */
    int64_t head_ns;     /* time at which the headers were complete */
    int64_t received_ns; /* time at which the last byte of the body arrived */
    int64_t answer_ns;   /* time at which the answer was queued for sending */
    int64_t recv_ns;     /* time spent waiting for bytes of the body; decoding them is not included */
    int64_t decode_ns;   /* time spent decoding the body, piece by piece as it arrived */
    int64_t encode_ns;   /* duration of encoding the answer */
};

/* A piece of a longer text that is stored elsewhere, without a NUL at its end. */
struct slice {
    const char *at;
    size_t length;
};

enum { REQUEST_PARAMETERS = 4 }; /* the largest number of parameters in a path */

/* The answer of a handler that computes no tensors. */
struct answer {
    int status;
    const char *content_type;
    char *body;    /* the body of the answer, from malloc(), which libmicrohttpd will free; NULL: none */
    bool constant; /* true: the body of the answer is a constant, which libmicrohttpd must not free */
    size_t length;
    const char *csp; /* value of the header Content-Security-Policy; NULL: none */
    /* value of the header Location, the path of the resource that the request made; empty: no such header */
    char location[72];
};

struct request {
    struct message message; /* an HTTP thread sends this message, and with it the request, to the main thread's
                             * mailbox */
    enum request_state state;
    bool counted; /* true: request_count() counts this request, because it is a request with tensors */
    struct server *server;
    int socket; /* the socket of the client's connection, which is watched for a hang-up; this struct does not own it */
    /* The route (row of the table of routes) that matches the request's path and method. If none matches both, the
     * first route that matches the path. NULL: no route has the path. */
    const struct route *route;
    struct slice parameters[REQUEST_PARAMETERS]; /* parameters of the path, in the order of the route's pattern */
    /* the account (access token) of the client; the request holds a reference to the account; NULL: not determined yet,
     * or refused */
    struct caller *caller;
    /* reference to the flow (client) that is charged for device time; NULL: the request has used no device time yet */
    struct flow *flow;
    char id[REQUEST_ID_BYTES];
    struct request_times times;

    /* While the request is received, only its HTTP thread uses the members below. */
    const proto_model *model;      /* the KServe model in the path; NULL: none */
    const proto_format *answer_as; /* format of the answer */
    proto_parser *parser;
    struct staging_block *block; /* block of staging memory (memory for tensors) into which the parser writes tensors */
    /* number of bytes of `text`, or of the answer, that count towards the limit --staging-bytes. They are not in
     * staging memory (memory for tensors) themselves. */
    size_t counted_bytes;
    /* the tensors of the body that lie in shared memory, until the job takes this list over; NULL: none */
    struct region_uses *shared;
    char *text; /* the body, from malloc(), for a route that keeps the body as text */
    size_t text_bytes;
    uint64_t decoded_bytes;    /* number of bytes of the unpacked body that the parser has received */
    int64_t client_timeout_ms; /* value of the header X-Request-Timeout-Ms; -1: not given */
    /* The request's slot in the queue (enum caller_place); CALLER_PLACES: none. Only request.c changes it. */
    int place;

    /* The members below belong to the owner of the request's current state. */
    struct job *job; /* the request's job, to which the request holds a reference */
    bool failed;     /* true: the request has failed, and its answer is a problem document (an error as JSON) */
    proto_error error;
    attn_error why; /* text of the error, and its pointer into the body, for the problem document */
    bool gone;      /* true: the client left while the request waited, so no answer is sent */

    proto_encoder *encoder; /* encoder of the answer, which is already measured; NULL: none yet */

    /* While the request waits, only the main thread uses the members from here on. */
    struct deadline deadline;
    /* true: the request cannot go back to its HTTP thread yet, because another thread checks its body, or uses its
     * client's shared memory. */
    bool held;
    /* neighbours in the list of all requests with suspended connections, in order of arrival */
    struct request *previous, *next;
    struct hangup_watch *watch; /* the watch that tells when the client hangs up; NULL: there is none yet */
};

/* Makes a request in the state RECEIVING, which the calling HTTP thread owns. The request is the first member of a
 * zeroed block of `bytes` bytes, which the caller may use as a larger struct. NULL: out of memory. */
struct request *request_new(struct server *server, size_t bytes);
/* Frees the request and all that it holds. Only its owner may call this. */
void request_free(struct request *request);

/* Marks the request as one with tensors, and counts it in its current state. */
void request_count_in(struct request *request);

/* Moves the request to its next state. The owner of that state then owns the request. Only the current owner may call
 * this. */
void request_move(struct request *request, enum request_state to);

/* Records why the request is refused. Only the first reason is kept. */
void request_fail(struct request *request, proto_error error, const char *pointer, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void request_fail_status(struct request *request, const attn_error *why);
/* Records an error that was found in the request's job. Only the job's owner may call this. The error points at a
 * member of the problem; this function changes that into a pointer into the body that the client sent. */
void request_fail_in_job(struct request *request, const attn_error *why);

/* Takes a slot in the queue for the request and releases the slot that the request had. Call this before the request
 * moves to a state that needs a slot; request_move() releases the slot on a move to a state that needs none. After an
 * error the request has no slot. Only the thread that owns the request may call this. */
attn_status request_enter(struct request *request, enum caller_place place, attn_error *err);

/* Records the size of the request's text or answer. The text or answer counts as staging memory (the memory for
 * tensors), although it is not in that memory. Growth is charged to the request's account. Errors: BUSY, QUOTA. */
attn_status request_count_bytes(struct request *request, size_t bytes, attn_error *err);

/* Releases what the request needed only while it was received: its parser, its slot in the queue, its memory for
 * tensors, and its references to shared memory. */
void request_drop_body(struct request *request);

/* Makes an id of 16 hexadecimal digits. Two equal ids are unlikely, in this process and across processes. */
void request_make_id(char id[REQUEST_ID_BYTES]);

#endif
