/* request.h: one HTTP request from its request line to its last byte, and which thread may use it when.
 *
 * A request has one owner at a time, and the hand-over to the next owner is the only synchronisation. It goes through
 * a lock (the mailbox, or libmicrohttpd's suspend and resume), so the new owner sees what the old one wrote. The table
 * below is executable: request_move() asserts it and counts the moves for /metrics. */
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

/* state, label in /metrics, the role that owns it, its slot in the queue, next states.
 *
 * From any state but the last two it may go to ANSWERING early, since an error is an answer. A running job is then
 * left behind, and freed when the device returns it. That is soon, because a batch that no request waits for is
 * cancelled. A job that uses its client's memory in place is waited for: its request is held, unless the device hangs
 * or the server ends. A state ends when
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

/* Sets the role of the calling thread. Each thread calls this before it uses requests. */
void request_set_role(enum role role);
enum role request_role(void);

const char *request_state_label(enum request_state state);
bool request_may_move(enum request_state from, enum request_state to);
/* Requests for tensors in that state now; probes and pages are not counted. */
int request_count(enum request_state state);

/* ---- A request --------------------------------------------------------------------------------------------------- */

/* Times of a request on CLOCK_MONOTONIC; 0: it did not get that far. */
struct request_times {
    int64_t began_ns;    /* the request line arrived */
    int64_t head_ns;     /* the headers are complete */
    int64_t received_ns; /* the last byte of the body arrived */
    int64_t answer_ns;   /* the answer was queued */
    int64_t recv_ns;     /* duration of waiting for the body, without decoding */
    int64_t decode_ns;   /* duration of decoding, in pieces as the body arrived */
    int64_t encode_ns;   /* duration of encoding */
};

/* A part of a text that lives elsewhere; it has no NUL at its end. */
struct slice {
    const char *at;
    size_t length;
};

enum { REQUEST_PARAMETERS = 4 }; /* most parameters in a path */

/* The answer of a handler that computes nothing. */
struct answer {
    int status;
    const char *content_type;
    char *body;    /* malloc'ed, and passed on to libmicrohttpd; NULL: none */
    bool constant; /* the body is a constant, and is not passed on */
    size_t length;
    const char *csp;   /* Content-Security-Policy */
    char location[72]; /* Location: the path of what was made; empty: none */
};

struct request {
    struct message message; /* sends the request to the loop */
    enum request_state state;
    bool counted; /* the request is included in request_count() */
    struct server *server;
    int socket;                /* the connection's socket, watched for a hang-up and never closed here */
    const struct route *route; /* NULL: unknown path; if the path has no such method, the path's first row */
    struct slice parameters[REQUEST_PARAMETERS]; /* parameters of the path, in the pattern's order */
    struct caller *caller;                       /* a reference; NULL: not determined yet, or refused */
    struct flow *flow;                           /* a reference; NULL: the request has used no device time yet */
    char id[REQUEST_ID_BYTES];
    struct request_times times;

    /* While it is received, only the HTTP thread uses these. */
    const proto_model *model;      /* the model in its path; NULL: none */
    const proto_format *answer_as; /* the format of its answer */
    proto_parser *parser;
    struct staging_block *block; /* staging memory that the parser writes to */
    size_t counted_bytes;        /* bytes of its text or answer that are counted as staging memory */
    struct region_uses *shared;  /* shared memory that the body refers to, until the job takes it over; NULL: none */
    char *text;                  /* the body of a route that keeps it (malloc) */
    size_t text_bytes;
    uint64_t decoded_bytes;    /* bytes of the unpacked body that went to the parser */
    int64_t client_timeout_ms; /* X-Request-Timeout-Ms; -1: not given */
    int place; /* the slot (enum caller_place) it has in the queue; CALLER_PLACES: none; kept by request.c */

    /* The owner of the state uses these. */
    struct job *job; /* a reference */
    bool failed;     /* the answer is a problem document */
    proto_error error;
    attn_error why; /* text and pointer of the problem */
    bool gone;      /* the client left while the request waited, so there is no one to answer */

    proto_encoder *encoder; /* encoder of the answer, already measured; NULL: none yet */

    /* While it waits, only the loop's thread uses these. */
    struct deadline deadline;
    /* It cannot be handed back yet: another thread checks its body, or writes to its client's shared memory. */
    bool held;
    struct request *previous, *next; /* list of all requests with suspended connections, in order of arrival */
    struct hangup_watch *watch;      /* watch for a hang-up; NULL: not watched, or not yet */
};

/* Makes a request in RECEIVING, which the calling HTTP thread owns. It is the first member of a zeroed block of
 * `bytes`, which the caller may use as a larger struct. NULL when out of memory. */
struct request *request_new(struct server *server, size_t bytes);
/* Releases the request and all it holds. Only its owner may call this. */
void request_free(struct request *request);

/* Marks the request as one for tensors, and counts it in its present state. */
void request_count_in(struct request *request);

/* Moves the request to its next state, whose owner then owns it. Only the present owner may call this. */
void request_move(struct request *request, enum request_state to);

/* Records why the request is refused. Only the first reason is kept. */
void request_fail(struct request *request, proto_error error, const char *pointer, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void request_fail_status(struct request *request, const attn_error *why);
/* Records a fault found in the request's job; only the job's owner may call it. The pointer is translated into one
 * into the body as the client sent it. */
void request_fail_in_job(struct request *request, const attn_error *why);

/* Takes a slot in the queue in exchange for the present one. A state that needs a slot is entered with it, and
 * request_move() releases it in a state that needs none. On an error the request has no slot. Call it as the owner. */
attn_status request_enter(struct request *request, enum caller_place place, attn_error *err);

/* Sets the size of the request's text or answer, which is not leased. Growth is counted as staging memory of its
 * caller. Errors: BUSY, QUOTA. */
attn_status request_count_bytes(struct request *request, size_t bytes, attn_error *err);

/* Releases what receiving needed and the request still holds: parser, slot, staging and shared memory. */
void request_drop_body(struct request *request);

/* Makes an id of 16 hexadecimal digits. It is unlikely that two are equal, in this process or elsewhere. */
void request_make_id(char id[REQUEST_ID_BYTES]);

#endif
