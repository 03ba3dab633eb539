/* check.h: makes a job that can run from a complete body, or refuses it.
 *
 * The time depends on the body: 40 ms for an envelope of 1024 problems, 200 ms for a mask of a gigabyte. Small
 * bodies are therefore checked by the HTTP thread that received them, and others on libuv's threads for the
 * loop (CHECKING). Reading shared memory takes long too, 15 ms for 67 MB. It is done in pieces, in turn with
 * those of other requests. */
#ifndef CHECK_H
#define CHECK_H

#include "server/work/request.h"

/* The result of a check. The check changes only the request's parser, memory (also shared memory) and job, because
 * the loop may refuse the request while another thread checks it. */
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
/* Reads inputs in shared memory, decodes, checks and prepares. Afterwards request->job is set, unless
 * the check failed early. */
void check_body(struct request *request, struct check_result *result);
/* Does a piece of that, until the time is over; returns true when all is done. *result starts with zeros. */
bool check_piece(struct request *request, struct check_result *result, int64_t until_ns);
/* Copies deadline and failure to the request. Only its owner may call this. */
void check_apply(struct request *request, const struct check_result *result);

/* The deadline: the earlier of the server's limit, counted from the last byte, and the client's, counted from the
 * first. `call` may be NULL while the body's own limit is unknown. */
int64_t check_deadline(const struct request *request, const proto_call *call);

#endif
