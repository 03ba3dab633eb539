/* check.h: makes a job that can run from a complete body, or refuses the body.
 *
 * The time of a check depends on the body: 40 ms for an envelope of 1024 problems, 200 ms for a mask of a gigabyte. So
 * the HTTP thread that received a small body checks it, and libuv's threads check large bodies for the loop (CHECKING).
 * Reading shared memory takes long too, 15 ms for 67 MB. It is done in pieces, which alternate with the pieces of other
 * requests. */
#ifndef CHECK_H
#define CHECK_H

#include "server/work/request.h"

/* The result of a check. While another thread checks a request, the loop may refuse that request. So the check changes
 * only the request's parser, memory (also shared memory) and job, and reports everything else here. */
struct check_result {
    bool failed; /* the members below say why */
    proto_error error;
    attn_error why;
    int64_t deadline_ns;
    int64_t took_ns;
};

/* The HTTP thread calls this first. It finds and holds the shared memory that the body refers to. False:
 * the request has failed. */
bool check_shared(struct request *request);
/* True if the check takes some milliseconds or more, which is too long for an HTTP thread. */
bool check_takes_long(const struct request *request);
/* Reads inputs in shared memory, decodes the body, checks it and prepares the job. Afterwards request->job is set,
 * unless the check failed early. */
void check_body(struct request *request, struct check_result *result);
/* Does a piece of the work of check_body(), until the time is over. True: all is done. *result starts with zeros. */
bool check_piece(struct request *request, struct check_result *result, int64_t until_ns);
/* Copies the deadline and the failure, if any, to the request. Only its owner may call this. */
void check_apply(struct request *request, const struct check_result *result);

/* Returns the deadline, the earlier of two. The server's limit counts from the last byte of the body, the client's from
 * the first. `call` may be NULL while the body's own limit is unknown. */
int64_t check_deadline(const struct request *request, const proto_call *call);

#endif
