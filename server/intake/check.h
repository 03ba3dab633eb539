/* check.h: from a complete body to a job that can run, or a refusal.
 *
 * It costs what the body says: 40 ms for an envelope of 1024 problems, 200 ms for a mask of a gigabyte. So a small body
 * is checked by the HTTP thread that received it, and the loop has others checked on libuv's threads (CHECKING).
 * Reading shared memory takes long too, 15 ms for 67 MB: it is done in pieces,
 * one of a request after one of another. */
#ifndef CHECK_H
#define CHECK_H

#include "server/work/request.h"

/* What came of it. The request itself is not touched but for its decoder, memory (shared memory too) and job: while it
 * is checked on another thread the loop may refuse it. */
struct check_result {
    bool failed; /* because of: */
    proto_error error;
    attn_error why;
    int64_t deadline_ns;
    int64_t took_ns;
};

/* First, by the HTTP thread: finds what the body refers to in shared memory, and keeps it.
 * False: the request has failed. */
bool check_shared(struct request *request);
/* Too long for an HTTP thread: some milliseconds and more. */
bool check_takes_long(const struct request *request);
/* Reads what lies in shared memory, decodes, checks and prepares; request->job is there afterwards,
 * unless it failed early. */
void check_body(struct request *request, struct check_result *result);
/* A piece of that: reads until the time is over; true when all is done. *result starts with zeros. */
bool check_piece(struct request *request, struct check_result *result, int64_t until_ns);
/* By the request's owner: takes deadline and failure over. */
void check_apply(struct request *request, const struct check_result *result);

/* The earlier of the server's limit, which counts from the last byte, and the client's wishes, which count from the
 * first. `call` may be NULL: what the body wishes is not known yet. */
int64_t check_deadline(const struct request *request, const proto_call *call);

#endif
