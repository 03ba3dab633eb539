/* attention.c: the content types of tensors, and the schemas of problems and results. The schemas are written from the
 * tables by which the server reads bodies: proto_operations[], attn_tensors[] and proto_options[]. */
#include "server/routes/attention.h"

#include <string.h>

#include "proto-json/report.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- Tables of the bodies ---------------------------------------------------------------------------------------- */

/* The content types that curl and fetch() send by default are read as JSON. Pages of other sites may send them without
 * a CORS preflight, so head_rules.c checks the Origin. */
static const char *const as_json[] = { "application/x-www-form-urlencoded", "text/plain", NULL };

/* The formats of bodies with tensors. The answer has the body's content type, or one that Accept prefers. */
const struct route_body attention_bodies[] = {
    { "application/json", as_json, &proto_json, NULL },
    { "application/x-safetensors", NULL, &proto_safetensors, ROUTE_SCHEMA("Safetensors") },
    { NULL, NULL, NULL, NULL },
};

/* Ranges of options of type PROTO_TYPE_NUMBER, as attn_check() enforces them. A value of 0 turns an option off. */
static const struct {
    const char *name;
    double least, most;
    bool below; /* whether the value must be less than `most`; otherwise it may also be equal to `most` */
} number_ranges[] = {
#define X(name, id, least, most, rule, meaning) { #name, least < 0 ? least : 0, most > 0 ? most : 0, false },
    ATTN_SCORE_OPTION_MAP(X)
#undef X
        { "dropout_p", 0, 1, true },
};

/* ---- Schemas of tensors ------------------------------------------------------------------------------------------ */

void attention_put_dtypes(struct json *j, unsigned dtypes)
{
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++)
        if (dtypes >> d & 1) json_name(j, attn_dtype_name((attn_dtype)d));
}

/* Writes the schema of one tensor of a partial result, or of its gradient. A merge combines partial results, each over
 * some of the keys. */
static void put_part_tensor(struct json *j, attn_tensor_id id)
{
    json_comma(j);
    json_put(j, "'%s':{'$ref':'#/components/schemas/Tensor'}", attn_tensors[id].name);
}

static void put_parts(struct json *j, attn_tensor_id one, attn_tensor_id other)
{
    json_put(j,
             "'type':'array','minItems':1,'maxItems':%d,'items':{'type':'object','additionalProperties':false,"
             "'required':['%s','%s'],'properties':{",
             ATTN_MERGE_PARTS, attn_tensors[one].name, attn_tensors[other].name);
    put_part_tensor(j, one);
    put_part_tensor(j, other);
    json_raw(j, "}}");
}

static void put_tensor(struct json *j, proto_op op, attn_tensor_id id)
{
    char shape[ATTN_SHAPE_BYTES], list[PROTO_DTYPE_LIST_BYTES];
    const proto_tensor_doc *own = proto_operations[op].tensors;
    json_comma(j);
    if (proto_may_be_number(id))
        json_put(
            j, "'%s':{'oneOf':[{'$ref':'#/components/schemas/Tensor'},{'type':'number'}],'description':'a number, or ",
            attn_tensors[id].name);
    else json_put(j, "'%s':{'$ref':'#/components/schemas/Tensor','description':'", attn_tensors[id].name);
    while (own != NULL && own->says != NULL && own->id != id) own++;
    if (own != NULL && own->says != NULL) {
        json_put(j, "%s'}", own->says);
        return;
    }
    json_put(j, "%s", attn_tensor_shape(id, shape));
    /* attn_tensor_shape() has already written the dtype if the tensor allows only one */
    if (strchr(proto_dtype_list(id, list), ' ')) json_put(j, "; %s", list);
    json_put(j, ": %s'}", attn_tensors[id].meaning);
}

/* ---- Schemas of options ------------------------------------------------------------------------------------------ */

static void put_integer(struct json *j, int64_t minimum, int64_t maximum)
{
    json_put(j, "'type':'integer','minimum':%lld,'maximum':%lld", (long long)minimum, (long long)maximum);
}

static void put_option_schema(struct json *j, const proto_option *o, proto_op op)
{
    json_put(j, "{'description':'%s',", o->help);
    switch (o->type) {
    case PROTO_TYPE_BOOL: json_put(j, "'type':'boolean'"); break;
    case PROTO_TYPE_NUMBER:
        json_put(j, "'type':'number'");
        for (size_t i = 0; i < ARRAY_SIZE(number_ranges); i++)
            if (strcmp(number_ranges[i].name, o->name) == 0)
                json_put(j, ",'minimum':%g,'%s':%g", number_ranges[i].least,
                         number_ranges[i].below ? "exclusiveMaximum" : "maximum", number_ranges[i].most);
        break;
    case PROTO_TYPE_INTEGER: put_integer(j, o->minimum, o->maximum); break;
    case PROTO_TYPE_SEED: json_put(j, "'type':'integer','minimum':0,'maximum':18446744073709551615"); break;
    case PROTO_TYPE_CHOICE:
        json_put(j, "'type':'string','enum':[");
        for (const char *const *c = o->choices; *c != NULL; c++) {
            json_comma(j);
            json_put(j, "'%s'", *c);
        }
        json_raw(j, "]");
        break;
    case PROTO_TYPE_PAIR:
        json_put(j, "'type':'array','minItems':2,'maxItems':2,'items':{");
        put_integer(j, o->minimum, o->maximum);
        json_raw(j, "}");
        break;
    case PROTO_TYPE_DTYPE:
        json_put(j, "'type':'string','enum':[");
        attention_put_dtypes(j, attn_tensor_dtypes(ATTN_T_out));
        json_raw(j, "]");
        break;
    case PROTO_TYPE_NAMES:
        json_put(j, "'type':'array','items':{'type':'string','enum':[");
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
            if (proto_gives_tensor(op, (attn_tensor_id)t)) {
                json_comma(j);
                json_put(j, "'%s'", attn_tensors[t].name);
            }
        for (int n = 0; proto_operations[op].asks && n < PROTO_COUNTS; n++) json_put(j, ",'%s'", proto_counts[n]);
        json_put(j, "]},'minItems':1,'uniqueItems':true");
        break;
    case PROTO_TYPE_ROWS:
        json_put(j, "'oneOf':[{");
        put_integer(j, o->minimum, o->maximum);
        json_put(j, "},{'type':'string','const':'all'}]");
        break;
    case PROTO_TYPE_IDS:
        json_put(
            j, "'type':'array','minItems':1,'maxItems':%d,'items':{'type':'string','pattern':'^[A-Za-z0-9._-]{1,%d}$'}",
            PROTO_MAX_CACHES, PROTO_CONTEXT_BYTES - 1);
        break;
    case PROTO_TYPE_PARTS: put_parts(j, ATTN_T_out, ATTN_T_lse); break;
    case PROTO_TYPE_ID:
        json_put(j, "'type':'string','pattern':'^[A-Za-z0-9._-]{1,%d}$'", PROTO_CONTEXT_BYTES - 1);
        break;
    }
    if (o->otherwise != NULL) {
        json_put(j, ",'default':");
        json_raw(j, o->otherwise);
    }
    json_raw(j, "}");
}

/* ---- Schemas of requests and answers ----------------------------------------------------------------------------- */

static bool takes_option(proto_op op, const char *name)
{
    const proto_option *o = proto_options;
    while (o->name != NULL && strcmp(o->name, name) != 0) o++;
    return o->name != NULL && (o->ops >> op & 1);
}

/* Writes a rule for each tensor that may be given only together with another tensor. */
static void put_dependences(struct json *j, proto_op op)
{
    static const attn_tensor_id pairs[][2] = { { ATTN_T_page_table, ATTN_T_seqlens_k },
                                               { ATTN_T_cu_seqlens_k, ATTN_T_cu_seqlens_q },
                                               { ATTN_T_out, ATTN_T_lse },
                                               { ATTN_T_lse, ATTN_T_out } };
    bool any = false;
    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        if (!proto_takes_tensor(op, pairs[i][0]) || !proto_takes_tensor(op, pairs[i][1])) continue;
        if (proto_operations[op].judged >> pairs[i][0] & 1) continue;
        if (!any) json_put(j, ",'dependentRequired':{");
        else json_comma(j);
        any = true;
        json_put(j, "'%s':['%s']", attn_tensors[pairs[i][0]].name, attn_tensors[pairs[i][1]].name);
    }
    if (any) json_raw(j, "}");
}

/* Writes the schema of a problem. `with_context` is true for a backward whose inputs a forward has saved. */
static void put_problem_schema(struct json *j, proto_op op, bool with_context)
{
    const proto_operation *const operation = &proto_operations[op];
    json_put(j, "{'type':'object','additionalProperties':false,'required':[");
    const uint64_t needs = operation->may_take_caches ? operation->needs & operation->beside_caches : operation->needs;
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        if (!(needs >> t & 1) || (with_context && attn_tensors[t].role != ATTN_ROLE_IN_BACK)) continue;
        json_name(j, attn_tensors[t].name);
    }
    if (operation->takes_caches && !operation->cache_in_path) json_name(j, "caches");
    if (operation->merges) json_name(j, "parts");
    if (with_context) json_name(j, "context");
    if (operation->asks) json_name(j, operation->asks);
    json_put(j, "],'properties':{");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        if (!proto_takes_tensor(op, (attn_tensor_id)t)) continue;
        if (with_context && attn_tensors[t].role != ATTN_ROLE_IN_BACK) continue;
        put_tensor(j, op, (attn_tensor_id)t);
    }
    for (const proto_option *o = proto_options; o->name != NULL; o++) {
        if (!(o->ops >> op & 1)) continue;
        if (o->type == PROTO_TYPE_ID ? !with_context : with_context && !o->with_context) continue;
        json_comma(j);
        json_put(j, "'%s':", o->name);
        put_option_schema(j, o, op);
    }
    json_raw(j, "}");
    if (!with_context) put_dependences(j, op);
    if (operation->may_take_caches) json_put(j, ",'oneOf':[{'required':['k']},{'required':['caches']}]");
    json_raw(j, "}");
}

/* Writes a reference to the JSON schema of a problem. If `context` is true, also writes a reference to the schema of a
 * backward that uses a saved forward (context). */
static void put_problem_refs(struct json *j, const char *name, bool context)
{
    json_put(j, "{'$ref':'#/components/schemas/%sProblem'}", name);
    if (context) json_put(j, ",{'$ref':'#/components/schemas/%sOfContext'}", name);
}

/* Writes the schemas of a request body. One schema is for a single problem. If the operation accepts several problems
 * in one body (an envelope), a second schema is for a list of problems. */
static void put_request_schemas(struct json *j, proto_op op, const proto_limits *limits)
{
    const char *const name = proto_operations[op].title;
    const bool context = takes_option(op, "context");
    if (!proto_operations[op].envelope) {
        json_comma(j);
        json_put(j, "'%sRequest':", name);
        put_problem_schema(j, op, false);
        return;
    }
    json_comma(j);
    json_put(j, "'%sProblem':", name);
    put_problem_schema(j, op, false);
    if (context) {
        json_put(j, ",'%sOfContext':", name);
        put_problem_schema(j, op, true);
    }
    json_put(
        j,
        ",'%sBatch':{'type':'object','additionalProperties':false,'required':['requests'],'properties':{'requests':"
        "{'type':'array','description':'Independent problems. One that is wrong is answered by an error in its "
        "place; the others are computed.','minItems':1,'maxItems':%d,'items':{'anyOf':[",
        name, limits->batch);
    put_problem_refs(j, name, context);
    json_put(j, ",{'description':'Anything else: answered by an error in its place.'}]}}}},'%sRequest':{'oneOf':[",
             name);
    put_problem_refs(j, name, context);
    json_put(j, ",{'$ref':'#/components/schemas/%sBatch'}]}", name);
}

static void put_report_schema(struct json *j)
{
    for (int i = 0; i < REPORT_MEMBERS; i++) {
        json_comma(j);
        json_put(j, "'%s':{'$ref':'#/components/schemas/Check_%s'}", report_members[i].name, report_members[i].name);
    }
}

static void put_counts_schema(struct json *j)
{
    static const char *const meanings[PROTO_COUNTS] = {
#define X(name, meaning) meaning,
        PROTO_COUNT_MAP(X)
#undef X
    };
    for (int n = 0; n < PROTO_COUNTS; n++) {
        json_put(j, ",'%s':{'description':'%s',", proto_counts[n], meanings[n]);
        json_put(j,
                 n == PROTO_COUNT_tiles
                     ? "'type':'object','additionalProperties':false,'required':['size','skipped','whole','partial'],"
                       "'properties':{'size':{'type':'array','minItems':2,'maxItems':2,'items':{'type':'integer'}},"
                       "'skipped':{'type':'number'},'whole':{'type':'number'},'partial':{'type':'number'}}}"
                     : "'type':'number','minimum':0}");
    }
}

static void put_result_schema(struct json *j, proto_op op)
{
    const proto_operation *const operation = &proto_operations[op];
    const bool sizes = operation->needs >> ATTN_T_q & 1 || operation->merges;
    json_put(j, "{'type':'object','additionalProperties':false,'required':[");
    for (int i = 0; i < REPORT_MEMBERS && operation->judges; i++) json_put(j, "'%s',", report_members[i].name);
    json_put(j, operation->takes_caches ? "'lengths','backend','timing_us'" : "'backend','timing_us'");
    json_put(j, sizes ? ",'sizes'],'properties':{" : "],'properties':{");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_gives_tensor(op, (attn_tensor_id)t)) put_tensor(j, op, (attn_tensor_id)t);
    if (operation->judges) put_report_schema(j);
    if (operation->merges) {
        json_comma(j);
        json_put(j, "'parts':{'description':'With dout: the gradients with respect to out and lse of each part.',");
        put_parts(j, ATTN_T_dout, ATTN_T_dlse);
        json_raw(j, "}");
    }
    json_comma(j);
    if (sizes)
        json_put(j, "'sizes':{'$ref':'#/components/schemas/Sizes'},'hints':{'$ref':'#/components/schemas/Hints'},");
    if (operation->takes_caches || operation->may_take_caches)
        json_put(j, "'lengths':{'type':'array','description':'Positions of each cache afterwards.','items':{'type':"
                    "'integer','minimum':0}},");
    json_put(j,
             "'backend':{'type':'string','description':'Which devices and kernel %s it.'},"
             "'timing_us':{'$ref':'#/components/schemas/Timing'}",
             operation->takes_caches ? "did" : "computed");
    if (operation->asks) put_counts_schema(j);
    if (takes_option(op, "seed") && !operation->asks && !operation->judges)
        json_put(j, ",'seed':{'type':'integer','minimum':0,'maximum':18446744073709551615,'description':'The seed that "
                    "dropout used; drawn, below 2^53, where a forward was given none.'}");
    if (takes_option(op, "verify")) json_put(j, ",'verification':{'$ref':'#/components/schemas/Verification'}");
    if (takes_option(op, "save"))
        json_put(j, ",'context':{'type':'string','description':'Of save: for one backward.'}");
    json_raw(j, "}}");
}

static void put_answer_schemas(struct json *j, proto_op op)
{
    const char *const name = proto_operations[op].title;
    const bool envelope = proto_operations[op].envelope;
    json_put(j, envelope ? ",'%sResult':" : ",'%sAnswer':", name);
    put_result_schema(j, op);
    if (!envelope) return;
    json_put(
        j,
        ",'%sAnswers':{'type':'object','additionalProperties':false,'required':['responses'],'properties':{"
        "'responses':{'type':'array','description':'In the order of requests.','items':{'oneOf':["
        "{'$ref':'#/components/schemas/%sResult'},{'$ref':'#/components/schemas/Refusal'}]}}}},"
        "'%sAnswer':{'oneOf':[{'$ref':'#/components/schemas/%sResult'},{'$ref':'#/components/schemas/%sAnswers'}]}",
        name, name, name, name, name);
}

void attention_put_schemas(struct json *j, const proto_limits *limits)
{
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        put_request_schemas(j, op, limits);
        /* the schemas of all other answers are in the table of routes */
        if (proto_is_run(&proto_operations[op])) put_answer_schemas(j, op);
    }
}
