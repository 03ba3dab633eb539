/* caches.h: the routes of /v1/caches that compute nothing: make, list, look at, fork, shorten and delete caches. */
#ifndef API_CACHES_H
#define API_CACHES_H

#include "server/work/request.h"

void caches_answer_create(struct request *request, struct answer *answer);
void caches_answer_list(struct request *request, struct answer *answer);
void caches_answer_get(struct request *request, struct answer *answer);
void caches_answer_fork(struct request *request, struct answer *answer);
void caches_answer_truncate(struct request *request, struct answer *answer);
void caches_answer_delete(struct request *request, struct answer *answer);

/* The id of a cache in the examples of the OpenAPI document. */
#define CACHE_EXAMPLE "0123456789abcdef0123456789abcdef01234567"

#endif
