/* shared_memory.h: Triton's shared memory extensions over HTTP: regions are registered, listed and unregistered. What a
 * region is, and what happens to its bytes, is in regions/regions.h.
 *
 * Handlers of routes (route.h). With --allow-shm regions of /dev/shm are offered, with --allow-cuda-shm those of a
 * GPU's memory. With one of them, of the other kind there are none to list or to unregister, which stock clients do
 * before they begin, and to register one is
 * 501. Without both all are 501. */
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
