/* check.h: checks a complete request body. Refuses it, or turns it into a job that a device can run.
 *
 * A check takes up to 40 ms for 1024 problems, or 200 ms for a mask of a gigabyte. The HTTP thread that received a
 * small body checks it. Large bodies are checked by libuv's threads on behalf of the main thread (state CHECKING). If a
 * body is large, or has tensors in shared memory, its check is divided into pieces of work. These alternate with the
 * pieces of other requests. */
#ifndef CHECK_H
#define CHECK_H

#include "server/work/request.h"

/* The result of checking a body. The main thread may refuse the request while another thread checks it. The checking
 * thread therefore changes only the request's parser, memory and job, and writes everything else to this struct. */
struct check_result {
    bool failed;
    proto_error error;
    attn_error why;
    int64_t deadline_ns;
    int64_t took_ns;
};

/* Finds the registered shared memory that the body refers to, and takes references to it. The HTTP thread calls this
 * before the other functions of this header. On failure, this function marks the request as failed and returns
 * false. */
bool check_shared(struct request *request);
/* True if the check takes some milliseconds or more, which is too long for an HTTP thread. */
bool check_takes_long(const struct request *request);
/* Reads inputs in shared memory, decodes the body, checks it and prepares the job. Afterwards request->job is set,
 * unless the check failed early. */
void check_body(struct request *request, struct check_result *result);
/* Does a part of the work of check_body(), and stops at the time until_ns. Returns true when all of the work is done.
 * Before the first call, *result must be all zeros. */
bool check_piece(struct request *request, struct check_result *result, int64_t until_ns);
/* Copies to the request what the check found: the deadline and, if the check failed, the error. Only the request's
 * owner may call this. */
void check_apply(struct request *request, const struct check_result *result);

/* Returns the request's deadline, the earlier of two times. The server's time limit starts at the last byte of the
 * body. The client's time limit starts at the request line. `call` may be NULL while the time limit in the body is
 * unknown. */
int64_t check_deadline(const struct request *request, const proto_call *call);

#endif
