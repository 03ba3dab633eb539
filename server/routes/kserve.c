/* kserve.c: the models, their descriptions, and their statistics. See kserve.h.
 *
 * A model is an operation under a name. Clients such as perf_analyzer can say nothing but a name, a shape and a dtype,
 * and send every input that the metadata list: so there is a model for each dtype and for causal, and the metadata list
 * what is required, and what a sequence needs to start, as optional. What may be given besides stands in the
 * configuration's parameters.
 *
 * Statistics count what was answered, in the parts that Triton has: success and fail with the time of the whole
 * request, queue, compute_input (decoding and copying in), compute_infer, compute_output (copying out and encoding).
 * They only grow. A batch is counted by the first of its requests for a model. */
#include "server/routes/kserve.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "text/text.h"
#include "server/routes/route.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- The models -------------------------------------------------------------------------------------------------- */

#define VERSION "1"

/* The models of all operations, in the order of the table; NULL: n is behind the last. */
static const proto_model *model_at(int n)
{
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        if (proto_operations[op].models == NULL) continue;
        if (n < PROTO_MODELS) return &proto_operations[op].models[n];
        n -= PROTO_MODELS;
    }
    return NULL;
}

/* What of Triton's protocol is spoken here beside the core. */
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
    for (int m = 0; (model = model_at(m)) != NULL; m += PROTO_MODELS)
        text_printf(&text, "%s%s", m == 0 ? "" : model_at(m + PROTO_MODELS) ? ", " : " and ", model->name);
    text_printf(&text, ", each also with _fp32, _fp16 or _bf16, and then _causal behind its name (GET /v2/models lists "
                       "them)");
    return NULL;
}

/* ---- Descriptions ------------------------------------------------------------------------------------------------ */

static bool is_required(const proto_model *model, attn_tensor_id id)
{
    return proto_operations[model->op].needs >> id & 1;
}

/* A request of a sequence that has begun may leave them out. */
static bool is_optional(const proto_model *model, attn_tensor_id id)
{
    return proto_operations[model->op].appends >> id & 1;
}

static bool is_listed(const proto_model *model, attn_tensor_id id)
{
    return is_required(model, id) || is_optional(model, id);
}

/* q's dtype where the tensor may have it, else the only one that it may have. */
static const char *datatype_of(const proto_model *model, attn_tensor_id id)
{
    const unsigned dtypes = attn_tensor_dtypes(id);
    return proto_datatype(dtypes >> model->dtype & 1 ? model->dtype : (attn_dtype)__builtin_ctz(dtypes));
}

/* [-1,-1,-1,-1]: as many axes as it has at most. */
static void put_open_shape(struct json *j, attn_tensor_id id)
{
    const int rank = 31 - __builtin_clz(attn_tensor_ranks(id));
    json_raw(j, "[");
    for (int a = 0; a < rank; a++) json_raw(j, a ? ",-1" : "-1");
    json_raw(j, "]");
}

/* What the metadata say of a tensor, or (`type` "TYPE_") the configuration, which has other names for the same. */
static void put_tensor(struct json *j, const proto_model *model, attn_tensor_id id, bool config)
{
    json_comma(j);
    json_put(j, config ? "{'name':'%s','data_type':'TYPE_%s','dims':" : "{'name':'%s','datatype':'%s','shape':",
             attn_tensors[id].name, datatype_of(model, id));
    put_open_shape(j, id);
    if (is_optional(model, id)) json_put(j, ",'optional':true");
    json_raw(j, "}");
}

static void put_tensors(struct json *j, const proto_model *model, bool config)
{
    json_put(j, config ? "'input':[" : "'inputs':[");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (is_listed(model, (attn_tensor_id)id)) put_tensor(j, model, (attn_tensor_id)id, config);
    json_put(j, config ? "],'output':[" : "],'outputs':[");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (proto_operations[model->op].usual >> id & 1) put_tensor(j, model, (attn_tensor_id)id, config);
    json_raw(j, "]");
}

char *kserve_server(const struct config *config, size_t *length)
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

char *kserve_models(size_t *length)
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

char *kserve_metadata(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'name':'%s','versions':['" VERSION "'],'platform':'attnd',", model->name);
    put_tensors(&j, model, false);
    json_raw(&j, "}\n");
    return json_take(&j, length);
}

char *kserve_ready(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'name':'%s','ready':true}\n", model->name);
    return json_take(&j, length);
}

/* A list of names in one string, as ModelConfig has parameters. */
static void put_names(struct json *j, const char *name, const struct text *names)
{
    json_comma(j);
    json_put(j, "'%s':{'string_value':'%s'}", name, names->at);
}

char *kserve_config(const proto_model *model, size_t *length)
{
    enum { NAMES_BYTES = 1024 };
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

char *kserve_index(bool ready, bool ready_alone, size_t *length)
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

/* ---- Statistics -------------------------------------------------------------------------------------------------- */

/* The parts of a request's time; cache_hit and cache_miss, which clients insist on, stay 0. */
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
/* Those that a batch has. */
enum { BATCH_FIRST = PART_compute_input, BATCH_PARTS = 3 };

static struct statistics {
    struct {
        atomic_llong count, ns;
    } parts[PARTS];
    atomic_llong last_ms, batches;
    struct {
        atomic_llong count, ns[BATCH_PARTS];
    } batch[CONFIG_MAX_BATCH]; /* by how many requests were in it, one less */
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
    count_part(s, PART_success, ns); /* the last: whoever sees it sees its parts */
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

char *kserve_stats(const proto_model *model, size_t *length)
{
    struct json j = { 0 };
    json_put(&j, "{'model_stats':[");
    const proto_model *one;
    for (int m = 0; (one = model_at(m)) != NULL; m++)
        if (model == NULL || model == one) put_statistics(&j, one);
    json_raw(&j, "]}\n");
    return json_take(&j, length);
}

/* ---- Schemas ----------------------------------------------------------------------------------------------------- */

/* clang-format off */
#define STRING  "{'type':'string'}"
#define COUNT   "{'type':'integer','minimum':0}"
#define STRINGS "{'type':'array','items':{'type':'string'}}"
#define REF(name) "{'$ref':'#/components/schemas/" name "'}"
#define ARRAY(items) "{'type':'array','items':" items "}"
#define OBJECT(required, properties) \
    "{'type':'object','additionalProperties':false,'required':[" required "],'properties':{" properties "}}"
#define OPTIONAL "'optional':{'type':'boolean','description':'true: a request may leave it out.'}"
/* Where in shared memory a tensor is. */
#define SHARED "'shared_memory_region':{'type':'string','minLength':1,'maxLength':128,'description':'Its bytes are in this region, " \
    "or an output shall go there.'},'shared_memory_offset':{'type':'integer','minimum':0,'maximum':9007199254740992,'description':'0 where " \
    "it is left out.'},'shared_memory_byte_size':{'type':'integer','minimum':0,'maximum':9007199254740992,'description':'Of an input all " \
    "its bytes, of an output the room for it.'}"

/* name, schema: JSON with ' for ". */
static const struct {
    const char *name, *schema;
} schemas[] = {
    { "ServerMetadata", OBJECT("'name','version','extensions'", "'name':" STRING ",'version':" STRING ",'extensions':" STRINGS) },
    { "ModelList", OBJECT("'models'", "'models':" STRINGS) },
    { "TensorMetadata", OBJECT("'name','datatype','shape'", "'name':" STRING ",'datatype':" STRING
        ",'shape':{'type':'array','items':{'type':'integer'},'description':'-1: any size.'}," OPTIONAL) },
    { "ModelMetadata", OBJECT("'name','versions','platform','inputs','outputs'", "'name':" STRING ",'versions':" STRINGS
        ",'platform':" STRING ",'inputs':" ARRAY(REF("TensorMetadata")) ",'outputs':" ARRAY(REF("TensorMetadata"))) },
    { "ModelReady", OBJECT("'name','ready'", "'name':" STRING ",'ready':{'type':'boolean'}") },
    { "ConfigTensor", OBJECT("'name','data_type','dims'", "'name':" STRING ",'data_type':" STRING
        ",'dims':{'type':'array','items':{'type':'integer'}}," OPTIONAL) },
    { "ConfigParameter", OBJECT("'string_value'", "'string_value':" STRING) },
    { "ModelConfig", OBJECT("'name','platform','backend','max_batch_size','input','output','parameters'", "'name':" STRING
        ",'platform':" STRING ",'backend':" STRING ",'max_batch_size':" COUNT ",'input':" ARRAY(REF("ConfigTensor"))
        ",'output':" ARRAY(REF("ConfigTensor")) ",'parameters':{'type':'object','description':'What a request may have besides: names, "
        "with commas.','additionalProperties':" REF("ConfigParameter") "},'sequence_batching':{'type':'object','description':'Of a model "
        "with sequences.','additionalProperties':" COUNT "}") },
    { "Duration", OBJECT("'count','ns'", "'count':" COUNT ",'ns':" COUNT) },
    { "BatchStatistics", OBJECT("'batch_size','compute_input','compute_infer','compute_output'", "'batch_size':" COUNT
        ",'compute_input':" REF("Duration") ",'compute_infer':" REF("Duration") ",'compute_output':" REF("Duration")) },
    { "InferenceStatistics", OBJECT("'success','fail','queue','compute_input','compute_infer','compute_output','cache_hit','cache_miss'",
        "'success':" REF("Duration") ",'fail':" REF("Duration") ",'queue':" REF("Duration") ",'compute_input':" REF("Duration")
        ",'compute_infer':" REF("Duration") ",'compute_output':" REF("Duration") ",'cache_hit':" REF("Duration")
        ",'cache_miss':" REF("Duration")) },
    { "ModelStatistics", OBJECT("'name','version','last_inference','inference_count','execution_count','inference_stats',"
        "'response_stats','batch_stats','memory_usage'", "'name':" STRING ",'version':" STRING
        ",'last_inference':{'type':'integer','minimum':0,'description':'Milliseconds since 1970; 0: none yet.'}"
        ",'inference_count':" COUNT ",'execution_count':" COUNT ",'inference_stats':" REF("InferenceStatistics")
        ",'response_stats':{'type':'object'},'batch_stats':" ARRAY(REF("BatchStatistics"))
        ",'memory_usage':{'type':'array','items':{}}") },
    { "Statistics", OBJECT("'model_stats'", "'model_stats':" ARRAY(REF("ModelStatistics"))) },
    { "IndexedModel", OBJECT("'name','version','state'", "'name':" STRING ",'version':" STRING
        ",'state':{'type':'string','enum':['READY','UNAVAILABLE']}") },
    { "ModelIndex", ARRAY(REF("IndexedModel")) },
    { "IndexRequest", OBJECT("", "'ready':{'type':'boolean','default':false,'description':'true: only models that are ready.'}") },

    { "InferParameters", "{'type':'object','description':'Options by the names of ForwardProblem, BackwardProblem and DecodeRequest, as "
        "strings, numbers and bools; an array is the string of its JSON: [-1,0]. Also binary_data_output (of all outputs that say nothing "
        "else) and timeout in microseconds (the smaller one of it and timeout_ms counts). The members listed here are of attention_decode "
        "alone.','properties':{"
        "'caches':{'description':'Ids of POST /v1/caches, one for each row of q, as the string of their JSON: what each row attends to. Where "
        "there is no sequence_id.'},"
        "'sequence_id':{'description':'A number, or a name of at most 128 bytes; 0 is none. The keys and values of the sequence are in a "
        "cache of its own.','anyOf':[{'type':'integer','minimum':0},{'type':'string','maxLength':128}]},"
        "'sequence_start':{'type':'boolean','default':false,'description':'The first request of the sequence, which has k and v.'},"
        "'sequence_end':{'type':'boolean','default':false,'description':'The last request of the sequence: the cache is deleted once it is answered 200.'}}}" },
    { "InferInput", "{'type':'object','additionalProperties':false,'required':['name','shape','datatype'],'properties':{"
        "'name':{'type':'string','description':'A tensor of ForwardProblem, BackwardProblem or DecodeRequest.'},"
        "'shape':{'type':'array','items':" REF("Axis") ",'minItems':1,'maxItems':4},"
        "'datatype':{'type':'string','description':'FP32, FP16, BF16, INT32, INT64, UINT8, BOOL; float8_e4m3fn is UINT8 with the parameter fp8.'},"
        "'parameters':{'type':'object','additionalProperties':false,'properties':{"
        "'binary_data_size':{'type':'integer','minimum':0,'maximum':9007199254740992,'description':'Its bytes come behind the JSON.'},"
        "'fp8':{'type':'boolean'}," SHARED "}},"
        "'data':{'type':'array','items':{},'description':'Numbers, flat or nested as shape says; not beside binary_data_size or "
        "shared_memory_region.'}}}" },
    { "InferOutput", "{'type':'object','additionalProperties':false,'required':['name'],'properties':{'name':" STRING
        ",'parameters':{'type':'object','additionalProperties':false,'properties':{'binary_data':{'type':'boolean'}," SHARED "}}}}" },
    { "InferRequest", "{'type':'object','additionalProperties':false,'required':['inputs'],'properties':{"
        "'id':{'type':'string','maxLength':512,'description':'Comes back with the answer; of at most 512 bytes.'},"
        "'model_name':{'description':'The path says which.'},'model_version':{'description':'The path says which.'},"
        "'parameters':" REF("InferParameters") ",'inputs':" ARRAY(REF("InferInput")) ","
        "'outputs':{'type':'array','items':" REF("InferOutput") ",'description':'None: all that are sent by default.'}}}" },
    { "InferBinary", "{'type':'string','format':'binary','description':'InferRequest, or InferAnswer, as JSON of as many bytes as the header "
        "Inference-Header-Content-Length says, and behind it the bytes of tensors, in the order of the JSON.'}" },
    { "InferTensor", "{'type':'object','additionalProperties':false,'required':['name','datatype','shape'],'properties':{'name':" STRING
        ",'datatype':" STRING ",'shape':{'type':'array','items':" REF("Axis") "},"
        "'parameters':" OBJECT("'binary_data_size'", "'binary_data_size':" COUNT) ","
        "'data':{'type':'array','items':{},'description':'Numbers, flat. What JSON has no number for is written as NaN, Infinity and "
        "-Infinity without quotes, which KServe clients read.'}}}" },
    { "InferAnswer", OBJECT("'model_name','model_version','parameters','outputs'", "'id':" STRING ",'model_name':" STRING
        ",'model_version':" STRING ",'parameters':{'type':'object','description':'sizes, backend, timing_us, and where there is any seed, "
        "verification, context, lengths, hints. Objects and lists are sent as a string of JSON.'},'outputs':" ARRAY(REF("InferTensor"))) },
};
/* clang-format on */

void kserve_put_schemas(struct json *j)
{
    for (size_t i = 0; i < ARRAY_SIZE(schemas); i++) {
        json_put(j, ",'%s':", schemas[i].name);
        json_constant(j, schemas[i].schema);
    }
}
