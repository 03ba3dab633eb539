/* shared_memory.h: handlers of Triton's shared memory extensions over HTTP, to register, list and unregister regions
 * (see regions/regions.h).
 *
 * --allow-shm offers regions in /dev/shm, and --allow-cuda-shm regions in a GPU's memory. If only one of the two is
 * set, requests to register a region of the other kind are answered 501. Requests to list or unregister regions of that
 * kind succeed, because Triton's clients send them for both kinds before they register a region. If neither option is
 * set, all requests are answered 501. */
#ifndef SHARED_MEMORY_H
#define SHARED_MEMORY_H

#include "server/base/config.h"
#include "server/work/request.h"

void shared_memory_status(struct request *request, struct answer *answer);
void shared_memory_register(struct request *request, struct answer *answer);
void shared_memory_unregister(struct request *request, struct answer *answer);
void shared_memory_cuda_status(struct request *request, struct answer *answer);
void shared_memory_cuda_register(struct request *request, struct answer *answer);
void shared_memory_cuda_unregister(struct request *request, struct answer *answer);

#endif
