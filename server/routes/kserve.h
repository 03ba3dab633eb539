/* kserve.h: the protocol KServe v2 in the form that Triton has: models, their descriptions, and their statistics.
 * proto-json/kserve.c reads and writes the tensors. Any thread may call these functions. */
#ifndef KSERVE_H
#define KSERVE_H

#include "proto-json/proto.h"
#include "server/routes/route.h"
#include "server/base/config.h"
#include "server/work/request.h"

enum { KSERVE_WHY_BYTES = 384 };
/* Returns the model with this name and version (empty: any version). Returns NULL if there is none, and writes a
 * sentence to `why` that names the existing models. */
const proto_model *kserve_find(struct slice name, struct slice version, char why[KSERVE_WHY_BYTES]);

extern const struct route_body kserve_bodies[];

/* Handlers (route.h) of routes about the server and about the model that the path names. */
void kserve_answer_server(struct request *request, struct answer *answer);   /* GET /v2 */
void kserve_answer_models(struct request *request, struct answer *answer);   /* GET /v2/models */
void kserve_answer_metadata(struct request *request, struct answer *answer); /* GET /v2/models/{model} */
void kserve_answer_ready(struct request *request, struct answer *answer);    /* GET /v2/models/{model}/ready */
void kserve_answer_config(struct request *request, struct answer *answer);   /* GET /v2/models/{model}/config */
/* answers GET .../stats, for one model or for all models */
void kserve_answer_stats(struct request *request, struct answer *answer);
void kserve_answer_index(struct request *request, struct answer *answer); /* POST /v2/repository/index */
/* kserve_answer_no_loading() and kserve_answer_no_settings() answer 501 with the reason: models cannot be loaded, and
 * traces and logs have no settings. */
void kserve_answer_no_loading(struct request *request, struct answer *answer);
void kserve_answer_no_settings(struct request *request, struct answer *answer);

/* Counts a request in the statistics of its model. `status` is the status of the answer, and `ns` the request's time in
 * nanoseconds. Call this before the answer is sent, so that the client finds its request in the statistics. Call it
 * also for a request that ends without an answer. */
void kserve_count(const struct request *request, int status, int64_t ns);

#endif
