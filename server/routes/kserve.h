/* kserve.h: KServe v2 as Triton speaks it, but for the tensors (proto-json/kserve.c): models, what is said of them, and
 * their statistics. Any thread may call these functions. */
#ifndef KSERVE_H
#define KSERVE_H

#include "proto-json/proto.h"
#include "server/routes/route.h"
#include "server/base/config.h"
#include "server/work/request.h"

/* The model of that name and version (empty: any); NULL, and in `why` a sentence that names others,
 * where there is none. */
enum { KSERVE_WHY_BYTES = 384 };
const proto_model *kserve_find(struct slice name, struct slice version, char why[KSERVE_WHY_BYTES]);

/* The content types that POST /v2/models/{model}/infer takes. */
extern const struct route_body kserve_bodies[];

/* Handlers of routes (route.h): of the server and of the model that the path names. */
void kserve_answer_server(struct request *request, struct answer *answer);   /* GET /v2 */
void kserve_answer_models(struct request *request, struct answer *answer);   /* GET /v2/models */
void kserve_answer_metadata(struct request *request, struct answer *answer); /* GET /v2/models/{model} */
void kserve_answer_ready(struct request *request, struct answer *answer);    /* .../ready */
void kserve_answer_config(struct request *request, struct answer *answer);   /* .../config */
void kserve_answer_stats(struct request *request, struct answer *answer);    /* .../stats: of one model or of all */
void kserve_answer_index(struct request *request, struct answer *answer);    /* POST /v2/repository/index */
/* 501, with a sentence: loading models, and settings of traces and logs. */
void kserve_answer_no_loading(struct request *request, struct answer *answer);
void kserve_answer_no_settings(struct request *request, struct answer *answer);

/* Before the answer leaves, so that who has it and asks for statistics finds it there; or where a request ends without
 * one. `status` is that of the answer, `ns` how long it took. Counts what is for a model. */
void kserve_count(const struct request *request, int status, int64_t ns);

#endif
