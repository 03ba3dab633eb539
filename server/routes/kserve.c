/* kserve.c: the models of the KServe protocol, their descriptions, and their statistics. See kserve.h.
 *
 * A model is a name for an operation, such as forward, together with a dtype and a mask. The reason is that clients
 * such as perf_analyzer can choose only a model's name, shapes and a dtype. They send every input that the model's
 * metadata names. The metadata therefore names only required inputs, and those optional inputs that may be left out
 * once a sequence has begun. The parameters of the model's configuration name all other inputs.
 *
 * Statistics count answered requests and their time, under the names that Triton has. `success` and `fail` have the
 * time of whole requests; `queue`, `compute_input`, `compute_infer` and `compute_output` are parts of it. A batch is
 * counted once per model, by the model's first request in the batch. */
#include "server/routes/kserve.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "text/text.h"
#include "server/routes/health.h"
#include "server/routes/route.h"
#include "server/routes/json.h"
#include "server/work/server.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- The table of models ----------------------------------------------------------------------------------------- */

#define VERSION "1"

static const proto_model *model_at(int n)
{
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        if (n < proto_operations[op].model_count) return &proto_operations[op].models[n];
        n -= proto_operations[op].model_count;
    }
    return NULL;
}

static const char *const extensions[] = { "binary_tensor_data",  "parameters",       "statistics",
                                          "model_configuration", "model_repository", "sequence" };

const proto_model *kserve_find(struct slice name, struct slice version, char why[KSERVE_WHY_BYTES])
{
    char wanted[ROUTE_PARAMETER_BYTES + 1];
    struct text_nearest nearest = { wanted, NULL, 6 };
    const proto_model *model;
    const int shown = name.length < TEXT_NAME_BYTES * 2 ? (int)name.length : TEXT_NAME_BYTES * 2;
    for (int m = 0; (model = model_at(m)) != NULL; m++) {
        if (strlen(model->name) != name.length || memcmp(model->name, name.at, name.length) != 0) continue;
        if (version.length == 0 || (version.length == strlen(VERSION) && *version.at == *VERSION)) return model;
        snprintf(why, KSERVE_WHY_BYTES, "the model %s has no version '%.*s', only " VERSION, model->name,
                 (int)version.length, version.at);
        return NULL;
    }
    snprintf(wanted, sizeof wanted, "%.*s", (int)name.length, name.at);
    for (int m = 0; (model = model_at(m)) != NULL; m++) text_consider(&nearest, model->name);
    struct text text = text_in(why, KSERVE_WHY_BYTES);
    text_printf(&text, "there is no model '%.*s'%s%s%s; there are ", shown, name.at,
                nearest.name ? ", did you mean '" : "", nearest.name ? nearest.name : "", nearest.name ? "'?" : "");
    for (int m = 0, next; (model = model_at(m)) != NULL; m = next) {
        next = m + proto_operations[model->op].model_count;
        text_printf(&text, "%s%s", m == 0 ? "" : model_at(next) ? ", " : " and ", model->name);
    }
    text_printf(&text, ", some also with _fp32, _fp16 or _bf16, and then _causal behind the name (GET /v2/models lists "
                       "them)");
    return NULL;
}

/* ---- Writing descriptions of the server and its models ----------------------------------------------------------- */

static bool is_required(const proto_model *model, attn_tensor_id id)
{
    return proto_operations[model->op].needs >> id & 1;
}

/* True for an input that a request may leave out once its sequence has begun. */
static bool is_optional(const proto_model *model, attn_tensor_id id)
{
    return proto_operations[model->op].appends >> id & 1;
}

static bool is_listed(const proto_model *model, attn_tensor_id id)
{
    return is_required(model, id) || is_optional(model, id);
}

static const char *datatype_of(const proto_model *model, attn_tensor_id id)
{
    const unsigned dtypes = attn_tensor_dtypes(id);
    return proto_datatype(dtypes >> model->dtype & 1 ? model->dtype : (attn_dtype)__builtin_ctz(dtypes));
}

static void put_open_shape(struct json *j, attn_tensor_id id)
{
    const int rank = 31 - __builtin_clz(attn_tensor_ranks(id));
    json_raw(j, "[");
    for (int a = 0; a < rank; a++) json_raw(j, a ? ",-1" : "-1");
    json_raw(j, "]");
}

/* Appends the names of the tensors of a merge's parts ("parts.1.out,parts.1.lse,..."), beginning with part `first`. If
 * `gradients` is true, appends the names of their gradients instead. */
static void add_parts(struct text *t, int first, bool gradients)
{
    char name[PROTO_NAME_BYTES];
    for (int n = ATTN_TENSOR_COUNT + 2 * first; n < PROTO_TENSORS; n++)
        text_printf(t, "%s%s", t->used ? "," : "", proto_tensor_name(n, gradients, name));
}

/* Writes a tensor's description for the metadata of a model. If `config` is true, writes it for the model's
 * configuration, which has other names for the same facts. */
static void put_tensor(struct json *j, const proto_model *model, int number, bool config)
{
    char name[PROTO_NAME_BYTES];
    const attn_tensor_id id = proto_tensor_id(number);
    json_comma(j);
    json_put(j, config ? "{'name':'%s','data_type':'TYPE_%s','dims':" : "{'name':'%s','datatype':'%s','shape':",
             proto_tensor_name(number, false, name), datatype_of(model, id));
    put_open_shape(j, id);
    if (is_optional(model, id)) json_put(j, ",'optional':true");
    json_raw(j, "}");
}

static void put_tensors(struct json *j, const proto_model *model, bool config)
{
    json_put(j, config ? "'input':[" : "'inputs':[");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (is_listed(model, (attn_tensor_id)id)) put_tensor(j, model, (attn_tensor_id)id, config);
    const proto_operation *const operation = &proto_operations[model->op];
    const uint64_t outputs = operation->usual ? operation->usual : operation->gives;
    /* every merge also requires `out` and `lse` of its first part */
    for (int which = 0; which < 2 && proto_operations[model->op].merges; which++)
        put_tensor(j, model, ATTN_TENSOR_COUNT + which, config);
    json_put(j, config ? "],'output':[" : "],'outputs':[");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (outputs >> id & 1) put_tensor(j, model, (attn_tensor_id)id, config);
    if (proto_operations[model->op].judges)
        json_put(j, config ? "{'name':'report','data_type':'TYPE_STRING','dims':[1]}"
                           : "{'name':'report','datatype':'BYTES','shape':[1]}");
    json_raw(j, "]");
}

static char *write_server(const struct config *config, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'name':'attnd','version':'%s','extensions':[", ATTND_VERSION);
    for (size_t i = 0; i < ARRAY_SIZE(extensions); i++) {
        json_comma(&j);
        json_put(&j, "'%s'", extensions[i]);
    }
    if (config->allow_shm_count > 0) json_put(&j, ",'system_shared_memory'");
    if (config->allow_cuda_shm) json_put(&j, ",'cuda_shared_memory'");
    json_raw(&j, "]}\n");
    return json_take(&j, length);
}

static char *write_models(size_t *length)
{
    struct json j = { 0 };
    const proto_model *model;
    json_put(&j, "{'models':[");
    for (int m = 0; (model = model_at(m)) != NULL; m++) {
        json_comma(&j);
        json_put(&j, "'%s'", model->name);
    }
    json_raw(&j, "]}\n");
    return json_take(&j, length);
}

static char *write_metadata(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'name':'%s','versions':['" VERSION "'],'platform':'attnd',", model->name);
    put_tensors(&j, model, false);
    json_raw(&j, "}\n");
    return json_take(&j, length);
}

static char *write_ready(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'name':'%s','ready':true}\n", model->name);
    return json_take(&j, length);
}

/* Writes tensor names as one string, because a parameter of ModelConfig cannot be a list. */
static void put_names(struct json *j, const char *name, const struct text *names)
{
    json_comma(j);
    json_put(j, "'%s':{'string_value':'%s'}", name, names->at);
}

static char *write_config(const proto_model *model, size_t *length)
{
    enum { NAMES_BYTES = 4096 };
    struct json j = { 0 };
    char inputs[NAMES_BYTES], outputs[NAMES_BYTES], options[NAMES_BYTES];
    struct text in = text_in(inputs, sizeof inputs), out = text_in(outputs, sizeof outputs),
                option = text_in(options, sizeof options);
    const proto_operation *const operation = &proto_operations[model->op];
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const char *const name = attn_tensors[id].name;
        if (proto_takes_tensor(model->op, (attn_tensor_id)id) && !is_listed(model, (attn_tensor_id)id))
            text_printf(&in, "%s%s", in.used ? "," : "", name);
        if ((operation->gives & ~operation->usual) >> id & 1) text_printf(&out, "%s%s", out.used ? "," : "", name);
    }
    if (operation->merges) add_parts(&in, 1, false), add_parts(&out, 0, true);
    for (const proto_option *o = proto_options; o->name; o++)
        if ((o->ops >> model->op & 1) && proto_is_parameter(o))
            text_printf(&option, "%s%s", option.used ? "," : "", o->name);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (proto_takes_tensor(model->op, (attn_tensor_id)id) && proto_may_be_number((attn_tensor_id)id))
            text_printf(&option, ",%s", attn_tensors[id].name);
    json_put(&j, "{'name':'%s','platform':'attnd','backend':'attnd','max_batch_size':0,", model->name);
    put_tensors(&j, model, true);
    if (operation->takes_caches)
        json_put(&j, ",'sequence_batching':{'max_sequence_idle_microseconds':%lld}", (long long)CACHES_TTL_MS * 1000);
    json_put(&j, ",'parameters':{");
    put_names(&j, "optional_inputs", &in);
    put_names(&j, "optional_outputs", &out);
    put_names(&j, "request_parameters", &option);
    json_raw(&j, "}}\n");
    return json_take(&j, length);
}

static char *write_index(bool ready, bool ready_alone, size_t *length)
{
    struct json j = { 0 };
    const proto_model *model;
    json_raw(&j, "[");
    for (int m = 0; (ready || !ready_alone) && (model = model_at(m)) != NULL; m++) {
        json_comma(&j);
        json_put(&j, "{'name':'%s','version':'" VERSION "','state':'%s'}", model->name,
                 ready ? "READY" : "UNAVAILABLE");
    }
    json_raw(&j, "]\n");
    return json_take(&j, length);
}

/* ---- Statistics of requests -------------------------------------------------------------------------------------- */

/* The parts of a request's time that the statistics count. cache_hit and cache_miss stay 0; they exist because clients
 * require them. */
#define PART_MAP(X) \
    X(success) X(fail) X(queue) X(compute_input) X(compute_infer) X(compute_output) X(cache_hit) X(cache_miss)
enum part {
#define X(name) PART_##name,
    PART_MAP(X)
#undef X
        PARTS
};
static const char *const part_names[PARTS] = {
#define X(name) #name,
    PART_MAP(X)
#undef X
};
/* The statistics of batches have only three of these parts: compute_input, compute_infer and compute_output. */
enum { BATCH_FIRST = PART_compute_input, BATCH_PARTS = 3 };

static struct statistics {
    struct {
        atomic_llong count, ns;
    } parts[PARTS];
    atomic_llong last_ms, batches;
    struct {
        atomic_llong count, ns[BATCH_PARTS];
        /* counts and times of batches; the index is the number of requests in the batch, minus 1 */
    } batch[CONFIG_MAX_BATCH];
} statistics[PROTO_OP_COUNT][PROTO_MODELS];

static struct statistics *statistics_of(const proto_model *model)
{
    return &statistics[model->op][model - proto_operations[model->op].models];
}

static void add(atomic_llong *to, int64_t x)
{
    atomic_fetch_add_explicit(to, x, memory_order_relaxed);
}

static long long get(atomic_llong *from)
{
    return atomic_load_explicit(from, memory_order_relaxed);
}

static void count_part(struct statistics *s, enum part part, int64_t ns)
{
    add(&s->parts[part].count, 1);
    add(&s->parts[part].ns, ns > 0 ? ns : 0);
}

void kserve_count(const struct request *request, int status, int64_t ns)
{
    if (request->model == NULL || request->route == NULL || request->route->bodies == NULL) return;
    struct statistics *const s = statistics_of(request->model);
    const struct job *const job = request->job;
    if (status != 200 || job == NULL) {
        count_part(s, PART_fail, ns);
        return;
    }
    const double *const us = job->results[0].timing_us;
    const int64_t of_batch[BATCH_PARTS] = { request->times.decode_ns + (int64_t)(us[PROTO_STAGE_copy_in] * 1e3),
                                            (int64_t)((us[PROTO_STAGE_launch] + us[PROTO_STAGE_compute]) * 1e3),
                                            request->times.encode_ns + (int64_t)(us[PROTO_STAGE_copy_out] * 1e3) };
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    count_part(s, PART_queue, (int64_t)(us[PROTO_STAGE_queue] * 1e3));
    for (int p = 0; p < BATCH_PARTS; p++) count_part(s, (enum part)(BATCH_FIRST + p), of_batch[p]);
    atomic_store_explicit(&s->last_ms, (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000, memory_order_relaxed);
    if (!job->follows) {
        const int size = job->batch_jobs > 0 ? job->batch_jobs : 1;
        add(&s->batches, 1);
        add(&s->batch[size - 1].count, 1);
        for (int p = 0; p < BATCH_PARTS; p++) add(&s->batch[size - 1].ns[p], of_batch[p]);
    }
    /* The count of successes is increased last. A reader who sees this request in the count usually sees its times
     * too. */
    count_part(s, PART_success, ns);
}

static void put_statistics(struct json *j, const proto_model *model)
{
    struct statistics *const s = statistics_of(model);
    const long long count = get(&s->parts[PART_success].count);
    json_comma(j);
    json_put(j,
             "{'name':'%s','version':'" VERSION "','last_inference':%lld,'inference_count':%lld,'execution_count':%lld,"
             "'inference_stats':{",
             model->name, get(&s->last_ms), count, get(&s->batches));
    for (int p = 0; p < PARTS; p++) {
        json_comma(j);
        json_put(j, "'%s':{'count':%lld,'ns':%lld}", part_names[p], get(&s->parts[p].count), get(&s->parts[p].ns));
    }
    json_put(j, "},'response_stats':{},'batch_stats':[");
    for (int size = 0; size < CONFIG_MAX_BATCH; size++) {
        const long long batches = get(&s->batch[size].count);
        if (batches == 0) continue;
        json_comma(j);
        json_put(j, "{'batch_size':%d", size + 1);
        for (int p = 0; p < BATCH_PARTS; p++)
            json_put(j, ",'%s':{'count':%lld,'ns':%lld}", part_names[BATCH_FIRST + p], batches,
                     get(&s->batch[size].ns[p]));
        json_raw(j, "}");
    }
    json_put(j, "],'memory_usage':[]}");
}

static char *write_stats(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'model_stats':[");
    const proto_model *one;
    for (int m = 0; (one = model_at(m)) != NULL; m++)
        if (model == NULL || model == one) put_statistics(&j, one);
    json_raw(&j, "]}\n");
    return json_take(&j, length);
}

/* ---- Functions that answer requests ------------------------------------------------------------------------------ */

static void answer_json(struct answer *answer, char *body)
{
    answer->status = 200;
    answer->content_type = "application/json";
    answer->body = body;
}

void kserve_answer_server(struct request *request, struct answer *answer)
{
    answer_json(answer, write_server(request->server->config, &answer->length));
}

void kserve_answer_models(struct request *request, struct answer *answer)
{
    (void)request;
    answer_json(answer, write_models(&answer->length));
}

void kserve_answer_metadata(struct request *request, struct answer *answer)
{
    answer_json(answer, write_metadata(request->model, &answer->length));
}

void kserve_answer_ready(struct request *request, struct answer *answer)
{
    char why[96];
    if (health_ready(request->server, why, sizeof why))
        answer_json(answer, write_ready(request->model, &answer->length));
    else request_fail(request, PROTO_E_UNAVAILABLE, NULL, "%s is not ready: %s", request->model->name, why);
}

void kserve_answer_config(struct request *request, struct answer *answer)
{
    answer_json(answer, write_config(request->model, &answer->length));
}

void kserve_answer_stats(struct request *request, struct answer *answer)
{
    answer_json(answer, write_stats(request->model, &answer->length));
}

void kserve_answer_index(struct request *request, struct answer *answer)
{
    char why[96];
    attn_error err = { 0 };
    bool ready_alone;
    if (proto_index_read(request->text, request->text_bytes, &ready_alone, &err) == ATTN_OK)
        answer_json(answer, write_index(health_ready(request->server, why, sizeof why), ready_alone, &answer->length));
    else request_fail_status(request, &err);
}

void kserve_answer_no_loading(struct request *request, struct answer *answer)
{
    (void)answer;
    request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                 "models are not loaded or unloaded here, all of POST /v2/repository/index are always there");
}

void kserve_answer_no_settings(struct request *request, struct answer *answer)
{
    (void)answer;
    request_fail(request, PROTO_E_NOT_IMPLEMENTED, NULL,
                 "traces and logs are set when the server starts (--log-level), not over HTTP");
}

/* KServe requests may have any content type or none. Triton's own client sends none. */
static const char *const as_whatever[] = { "*", NULL };
const struct route_body kserve_bodies[] = {
    { "application/json", as_whatever, &proto_kserve, NULL },
    { "application/octet-stream", NULL, &proto_kserve, ROUTE_SCHEMA("InferBinary") },
    { NULL, NULL, NULL, NULL },
};
