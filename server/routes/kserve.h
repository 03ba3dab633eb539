/* kserve.h: KServe v2 as Triton speaks it, but for the tensors (proto-json/kserve.c): models, what is said of them, and
 * their statistics. Bodies are malloc'ed and NUL-ended, *length bytes without the NUL; NULL when out of memory. Any
 * thread may call. */
#ifndef KSERVE_H
#define KSERVE_H

#include "proto-json/proto.h"
#include "server/base/config.h"
#include "server/work/request.h"

/* The model of that name and version (empty: any); NULL, and in `why` a sentence that names others,
 * where there is none. */
enum { KSERVE_WHY_BYTES = 384 };
const proto_model *kserve_find(struct slice name, struct slice version, char why[KSERVE_WHY_BYTES]);

char *kserve_server(const struct config *config, size_t *length); /* GET /v2 */
char *kserve_models(size_t *length);                              /* GET /v2/models */
char *kserve_metadata(const proto_model *model, size_t *length);  /* GET /v2/models/{model} */
char *kserve_ready(const proto_model *model, size_t *length);     /* .../ready */
char *kserve_config(const proto_model *model, size_t *length);    /* .../config */
char *kserve_stats(const proto_model *model, size_t *length);     /* .../stats; of all where `model` is NULL */
/* POST /v2/repository/index; `ready_alone`: of those that are ready. */
char *kserve_index(bool ready, bool ready_alone, size_t *length);

/* Before the answer leaves, so that who has it and asks for statistics finds it there; or where a request ends without
 * one. `status` is that of the answer, `ns` how long it took. Counts what is for a model. */
void kserve_count(const struct request *request, int status, int64_t ns);

#endif
