/* openapi.c: the OpenAPI 3.1 document of GET /openapi.json, written from a skeleton and the program's tables.
 *
 * The problem: a description that is typed a second time is wrong a month later. The idea: the program runs by tables,
 * and the document is made of the same tables at run time. What no table has stands in the skeleton openapi.json. There
 * a mark, "@paths@", says where put_document() writes what this file makes of the tables:
 *
 *   the rows of the routes (route.h)   -> paths, and of each what it answers and may refuse
 *   proto_operations[]                 -> what each operation takes, needs and gives, and its summary
 *   attn_tensors[]                     -> the tensor members, their ranks, dtypes and shapes
 *   proto_options[]                    -> the other members, their types, ranges and defaults
 *   PROTO_ERROR_MAP                    -> the error responses
 *   config, proto_limits               -> security, and limits that a schema can state
 *
 * This file has two tables of its own: the errors that any request, or any with a body, may be answered with, and the
 * examples. The schemas of answers in the skeleton are typed; tests hold them against answers.
 *
 * Invariants
 * 1. The schemas are never stricter than the server: a body that they forbid is refused with 4xx. (But for the other
 * names of a dtype, which a generated client would have twice.) Where the server is stricter (shapes must fit each
 * other, which JSON Schema cannot say; which dtypes and axes a tensor has) the description says so.
 * 2. Every example is answered 200 as it stands, where there is the cache that it names (CACHE_EXAMPLE): an empty one.
 * 3. Programs that write clients can use it: names of components and operations are names in any language, all tensors
 * are one schema, as are all refusals, and each schema that is used twice has a name. */
#include "server/routes/info.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"
#include "server/caches/caches.h"
#include "server/routes/caches.h"
#include "proto-json/report.h"
#include "server/routes/jsontext.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* (The Makefile knows that this file depends on it.) */
__asm__(".pushsection .rodata\n"
        "openapi_skeleton: .incbin \"server/routes/openapi.json\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char openapi_skeleton[] __attribute__((visibility("hidden"))); /* NUL-ended */

/* The document that is being written. */
struct document {
    struct json json;
    const struct config *config;
    const proto_limits *limits;
    const struct route *routes;
    int route_count;
    bool skips; /* what the skeleton has here is not offered */
};

/* One more name in an array. */
static void put_name(struct json *j, const char *name)
{
    json_comma(j);
    json_put(j, "'%s'", name);
}

/* ---- Tables of this file ----------------------------------------------------------------------------------------- */

/* Errors of every route, of those with tensors, of those that compute or change something, and of those that want a
 * token; a row adds its own. What is missing here and there is on no route: names of proto.h that nothing uses yet. (A
 * path that does not exist has no operation.) */
static const uint64_t errors_of_all = ROUTE_ERROR(INVALID_FRAMING) | ROUTE_ERROR(METHOD_NOT_ALLOWED) |
                                      ROUTE_ERROR(REQUEST_TIMEOUT) | ROUTE_ERROR(TOO_LARGE) |
                                      ROUTE_ERROR(TARGET_TOO_LONG) | ROUTE_ERROR(EXPECTATION_FAILED) |
                                      ROUTE_ERROR(HEAD_TOO_LARGE) | ROUTE_ERROR(INTERNAL) |
                                      ROUTE_ERROR(UNAVAILABLE) /* too many connections */ | ROUTE_ERROR(OUT_OF_MEMORY);
static const uint64_t errors_of_bodies = ROUTE_ERROR(UNSUPPORTED_MEDIA) | ROUTE_ERROR(UNSUPPORTED) |
                                         ROUTE_ERROR(TOO_MUCH_WORK) | ROUTE_ERROR(QUOTA) | ROUTE_ERROR(QUEUE_FULL) |
                                         ROUTE_ERROR(DRAINING) | ROUTE_ERROR(DEADLINE);
static const uint64_t errors_of_changes = /* of all that are no GET: a query is refused, and pages of other sites */
    ROUTE_ERROR(INVALID_REQUEST) | ROUTE_ERROR(FORBIDDEN_ORIGIN);
static const uint64_t errors_of_tokens = ROUTE_ERROR(UNAUTHORIZED);

/* Ranges of PROTO_TYPE_NUMBER options that attn_check() keeps. Scores have theirs in their table, where 0 is off. */
static const struct {
    const char *name;
    double least, most;
    bool below; /* `most` itself is too much */
} number_ranges[] = {
#define X(name, id, least, most, rule, meaning) { #name, least < 0 ? least : 0, most > 0 ? most : 0, false },
    ATTN_SCORE_OPTION_MAP(X)
#undef X
        { "dropout_p", 0, 1, true },
};

/* Headers of answers, which components/headers of the skeleton describes. `on` names the statuses that always have it;
 * 0: usual on every answer, but not on one that is written past the web server, such as 408 in the middle of a body. */
static const struct {
    const char *name;
    int on[2];
} headers[] = {
    { "X-Request-Id", { 0 } }, { "Server-Timing", { 0 } }, { "Retry-After", { 429, 503 } },
    { "Allow", { 405 } },      { "Location", { 201 } },    { "WWW-Authenticate", { 401 } },
};

/* clang-format off */
/* An example request that is short enough to read: two queries, three keys, one head, head size 2. */
#define Q_TENSOR "{'shape':[1,2,1,2],'dtype':'float32','data':[1,0,0,1]}"
#define K_TENSOR "{'shape':[1,3,1,2],'dtype':'float32','data':[1,0,0,1,1,1]}"
#define V_TENSOR "{'shape':[1,3,1,2],'dtype':'float32','data':[1,2,3,4,5,6]}"
/* The same q, k, v as the base64 of their little-endian bytes. */
#define Q_BASE64 "{'shape':[1,2,1,2],'dtype':'float32','data':'AACAPwAAAAAAAAAAAACAPw=='}"
#define K_BASE64 "{'shape':[1,3,1,2],'dtype':'float32','data':'AACAPwAAAAAAAAAAAACAPwAAgD8AAIA/'}"
#define V_BASE64 "{'shape':[1,3,1,2],'dtype':'float32','data':'AACAPwAAAEAAAEBAAACAQAAAoEAAAMBA'}"

static const struct {
    const char *body; /* a schema, as the rows of the routes name it */
    const char *name, *summary, *value;
} examples[] = {
    { "ForwardRequest", "numbers", "Typed by hand: arrays of numbers in, arrays of numbers out",
      "{'q':" Q_TENSOR ",'k':" K_TENSOR ",'v':" V_TENSOR ",'causal':true,'encoding':'array'}" },
    { "ForwardRequest", "base64", "As a program sends it", "{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 "}" },
    { "ForwardRequest", "requests", "Two problems in one body",
      "{'requests':[{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 ",'causal':true},"
      "{'q':" Q_BASE64 ",'k':" Q_BASE64 ",'v':" Q_BASE64 ",'scale':0.5,'outputs':['out']}]}" },
    { "InferRequest", "numbers", "Typed by hand: numbers in, numbers out",
      "{'inputs':[{'name':'q','shape':[1,2,1,2],'datatype':'FP32','data':[1,0,0,1]},"
      "{'name':'k','shape':[1,3,1,2],'datatype':'FP32','data':[1,0,0,1,1,1]},"
      "{'name':'v','shape':[1,3,1,2],'datatype':'FP32','data':[1,2,3,4,5,6]}],"
      "'parameters':{'causal':true,'window':'[1,-1]'},'outputs':[{'name':'out'}]}" },
    { "BackwardRequest", "numbers", "out and lse are recomputed",
      "{'q':" Q_TENSOR ",'k':" K_TENSOR ",'v':" V_TENSOR ",'dout':" Q_TENSOR ",'causal':true,'encoding':'array'}" },
    { "BackwardRequest", "requests", "Two problems in one body",
      "{'requests':[{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 ",'dout':" Q_BASE64 "},"
      "{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 ",'dout':" Q_BASE64 ",'causal':true}]}" },
    { "AppendRequest", "numbers", "Typed by hand: three positions of a float32 cache with kv_heads 1 and head_dim 2",
      "{'k':{'shape':[3,1,2],'dtype':'float32','data':[1,0,0,1,1,1]},"
      "'v':{'shape':[3,1,2],'dtype':'float32','data':[1,2,3,4,5,6]}}" },
    { "DecodeRequest", "numbers", "Typed by hand: one step, whose position is appended to a float32 cache with kv_heads 1 and head_dim 2",
      "{'caches':['" CACHE_EXAMPLE "'],'q':{'shape':[1,1,1,2],'dtype':'float32','data':[1,0]},"
      "'k':{'shape':[1,1,1,2],'dtype':'float32','data':[1,0]},'v':{'shape':[1,1,1,2],'dtype':'float32','data':[1,2]},"
      "'causal':true,'encoding':'array'}" },
};
/* clang-format on */

/* ---- Tensors: from a row to a schema ----------------------------------------------------------------------------- */

/* Names of dtypes, as elements of an array. */
static void put_dtype_names(struct json *j, unsigned dtypes)
{
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++)
        if (dtypes >> d & 1) put_name(j, attn_dtype_name((attn_dtype)d));
}

/* A tensor as a member: 'q':{...}. What is special about it, the schema leaves to the server. */
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
    if (strchr(proto_dtype_list(id, list), ' ')) json_put(j, "; %s", list); /* one: the shape says it */
    json_put(j, ": %s'}", attn_tensors[id].meaning);
}

/* ---- Options: from a row to a schema ----------------------------------------------------------------------------- */

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
        put_dtype_names(j, attn_tensor_dtypes(ATTN_T_out));
        json_raw(j, "]");
        break;
    case PROTO_TYPE_NAMES:
        json_put(j, "'type':'array','items':{'type':'string','enum':[");
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
            if (proto_gives_tensor(op, (attn_tensor_id)t)) {
                json_comma(j);
                json_put(j, "'%s'", attn_tensors[t].name);
            }
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

/* ---- Schemas ----------------------------------------------------------------------------------------------------- */

static bool takes_option(proto_op op, const char *name)
{
    const proto_option *o = proto_options;
    while (o->name != NULL && strcmp(o->name, name) != 0) o++;
    return o->name != NULL && (o->ops >> op & 1);
}

/* Tensors that are not given without another one. */
static void put_dependences(struct json *j, proto_op op)
{
    static const attn_tensor_id pairs[][2] = { { ATTN_T_page_table, ATTN_T_seqlens_k },
                                               { ATTN_T_cu_seqlens_k, ATTN_T_cu_seqlens_q },
                                               { ATTN_T_out, ATTN_T_lse },
                                               { ATTN_T_lse, ATTN_T_out } };
    bool any = false;
    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        if (!proto_takes_tensor(op, pairs[i][0]) || (proto_operations[op].judged >> pairs[i][0] & 1)) continue;
        if (!any) json_put(j, ",'dependentRequired':{");
        else json_comma(j);
        any = true;
        json_put(j, "'%s':['%s']", attn_tensors[pairs[i][0]].name, attn_tensors[pairs[i][1]].name);
    }
    if (any) json_raw(j, "}");
}

/* A problem as its members; `with_context`: a backward whose inputs were saved by a forward. */
static void put_problem_schema(struct json *j, proto_op op, bool with_context)
{
    const proto_operation *const operation = &proto_operations[op];
    json_put(j, "{'type':'object','additionalProperties':false,'required':[");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        if (!(operation->needs >> t & 1) || (with_context && attn_tensors[t].role != ATTN_ROLE_IN_BACK)) continue;
        put_name(j, attn_tensors[t].name);
    }
    if (operation->takes_caches && !operation->cache_in_path) put_name(j, "caches");
    if (with_context) put_name(j, "context");
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
    json_raw(j, "}");
}

/* One problem, in either form. */
static void put_problem_refs(struct json *j, const char *name, bool context)
{
    json_put(j, "{'$ref':'#/components/schemas/%sProblem'}", name);
    if (context) json_put(j, ",{'$ref':'#/components/schemas/%sOfContext'}", name);
}

/* A body of one problem or, where the operation has an envelope, of several. */
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

/* The members of a check's answer that are its report; components/schemas of the skeleton has each. */
static void put_report_schema(struct json *j)
{
    for (int i = 0; i < REPORT_MEMBERS; i++) {
        json_comma(j);
        json_put(j, "'%s':{'$ref':'#/components/schemas/Check_%s'}", report_members[i].name, report_members[i].name);
    }
}

/* What is answered to one problem: {...}. */
static void put_result_schema(struct json *j, proto_op op)
{
    const proto_operation *const operation = &proto_operations[op];
    const bool sizes = operation->needs >> ATTN_T_q & 1;
    json_put(j, "{'type':'object','additionalProperties':false,'required':[");
    for (int i = 0; i < REPORT_MEMBERS && operation->judges; i++) put_name(j, report_members[i].name);
    if (operation->takes_caches) put_name(j, "lengths");
    put_name(j, "backend");
    put_name(j, "timing_us");
    json_put(j, sizes ? ",'sizes'],'properties':{" : "],'properties':{");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_gives_tensor(op, (attn_tensor_id)t)) put_tensor(j, op, (attn_tensor_id)t);
    if (operation->judges) put_report_schema(j);
    json_comma(j);
    if (sizes)
        json_put(j, "'sizes':{'$ref':'#/components/schemas/Sizes'},'hints':{'$ref':'#/components/schemas/Hints'},");
    if (operation->takes_caches)
        json_put(j, "'lengths':{'type':'array','description':'Positions of each cache afterwards.','items':{'type':"
                    "'integer','minimum':0}},");
    json_put(j,
             "'backend':{'type':'string','description':'Which device and kernel %s it.'},"
             "'timing_us':{'$ref':'#/components/schemas/Timing'}",
             operation->takes_caches ? "did" : "computed");
    if (takes_option(op, "seed") && !operation->judges)
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

/* ---- Paths ------------------------------------------------------------------------------------------------------- */

static void put_headers(struct json *j, int status)
{
    json_put(j, "'headers':{");
    for (size_t i = 0; i < ARRAY_SIZE(headers); i++)
        if (headers[i].on[0] == 0 || headers[i].on[0] == status || headers[i].on[1] == status) {
            json_comma(j);
            json_put(j, "'%s':{'$ref':'#/components/headers/%s'}", headers[i].name, headers[i].name);
        }
    json_raw(j, "}");
}

static uint64_t errors_of(const struct route *route, bool secured)
{
    return errors_of_all | route->doc.errors | (route->bodies ? errors_of_bodies : 0) |
           (route->keeps_body ? ROUTE_ERROR(UNSUPPORTED_MEDIA) : 0) |
           (route->method != ROUTE_GET ? errors_of_changes : 0) |
           (secured && (route->token & PORT_MAIN) ? errors_of_tokens : 0);
}

/* Is this one of the errors, with this status? */
static bool has_error(uint64_t errors, int error, int status)
{
    return (errors >> error & 1) && proto_errors[error].http == status;
}

/* The error response of one status. Its codes are listed beside the schema, not in it: of a schema that narrows another
 * one, program generators make a class of its own for each response, or none. */
static void put_error(struct json *j, uint64_t errors, int status, bool head, bool plain, const char *media)
{
    const char *separator = "";
    json_put(j, ",'%d':{'description':'", status);
    for (int e = 0; e < PROTO_ERROR_COUNT; e++)
        if (has_error(errors, e, status)) {
            json_put(j, "%s%s: %s", separator, proto_errors[e].code, proto_errors[e].title);
            separator = "; ";
        }
    json_put(j, "','x-codes':[");
    for (int e = 0; e < PROTO_ERROR_COUNT; e++)
        if (has_error(errors, e, status)) {
            json_comma(j);
            json_put(j, "'%s'", proto_errors[e].code);
        }
    json_raw(j, "],");
    put_headers(j, status);
    if (!head) {
        json_put(j, ",'content':{'%s':{'schema':{'$ref':'#/components/schemas/Problem'}}", media);
        if (plain) json_put(j, ",'text/plain':{'schema':{'type':'string'}}");
        json_raw(j, "}");
    }
    json_raw(j, "}");
}

static void put_errors(struct json *j, const struct route *route, bool head, bool secured)
{
    const uint64_t errors = errors_of(route, secured);
    bool done[600] = { false };
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) {
        const int status = proto_errors[e].http;
        if (!(errors >> e & 1) || done[status]) continue;
        done[status] = true;
        put_error(j, errors, status, head, route->doc.plain_503 && status == 503, route_error_media(route->path));
    }
}

static void put_examples(struct json *j, const char *body)
{
    bool any = false;
    for (size_t i = 0; i < ARRAY_SIZE(examples); i++) {
        if (strcmp(examples[i].body, body) != 0) continue;
        json_put(j, any ? "," : ",'examples':{");
        any = true;
        json_put(j, "'%s':{'summary':'%s','value':", examples[i].name, examples[i].summary);
        json_constant(j, examples[i].value);
        json_raw(j, "}");
    }
    if (any) json_raw(j, "}");
}

static void put_request_body(struct json *j, const struct route *route)
{
    json_put(j, "'requestBody':{'required':true,'description':'May be compressed: Content-Encoding gzip or "
                "deflate.','content':{");
    for (const struct route_body *body = route->bodies; body->media; body++) {
        json_comma(j);
        json_put(j, "'%s':{'schema':", body->media);
        if (body->schema) json_constant(j, body->schema);
        else json_put(j, "{'$ref':'#/components/schemas/%s'}", route->doc.body);
        if (body->schema == NULL) put_examples(j, route->doc.body);
        json_raw(j, "}");
    }
    json_raw(j, "}},");
}

/* An operationId, the name of a function in a generated client: get_v1_info; get_page for /. */
static void put_operation_id(struct json *j, const char *method, const struct route *route)
{
    char id[128];
    const char *path = route->path;
    size_t n = (size_t)snprintf(id, sizeof id, "%s", method);
    if (path[1] == '\0') n = (size_t)snprintf(id, sizeof id, "%s_%s", method, route->endpoint);
    else
        for (; *path && n + 2 < sizeof id; path++)
            if (*path != '{' && *path != '}') id[n++] = *path == '/' || *path == '.' ? '_' : *path;
    id[n] = '\0';
    json_put(j, "'operationId':'%s',", id);
}

static void put_parameters(struct json *j, const struct route *route)
{
    json_put(
        j,
        "'parameters':[{'$ref':'#/components/parameters/X-Request-Id'},{'$ref':'#/components/parameters/traceparent'}");
    if (route->bodies) json_put(j, ",{'$ref':'#/components/parameters/X-Request-Timeout-Ms'}");
    if (route->bodies && route->model)
        json_put(j, ",{'$ref':'#/components/parameters/Inference-Header-Content-Length'}");
    for (int i = 0; i < REQUEST_PARAMETERS && route->doc.parameters[i].name; i++)
        json_put(j,
                 ",{'in':'path','name':'%s','required':true,'description':'%s','example':'%s',"
                 "'schema':{'type':'string','minLength':1,'maxLength':%d}}",
                 route->doc.parameters[i].name, route->doc.parameters[i].description, route->doc.parameters[i].example,
                 ROUTE_PARAMETER_BYTES);
    json_raw(j, "],");
}

/* What a 200 holds: one type, or with tensors any that a body may have. */
static void put_answer(struct json *j, const struct route *route)
{
    json_put(j, ",'content':{'%s':{'schema':", route->doc.media);
    json_constant(j, route->doc.schema);
    json_raw(j, "}");
    for (const struct route_body *body = route->bodies; body && body->media; body++) {
        if (body->schema == NULL) continue;
        json_put(j, ",'%s':{'schema':", body->media);
        json_constant(j, body->schema);
        json_raw(j, "}");
    }
    json_raw(j, "}");
}

static void put_operation(struct json *j, const struct route *route, const char *method, bool secured)
{
    const struct route_doc *doc = &route->doc;
    const proto_operation *const operation = route_operation(route);
    const bool head = strcmp(method, "head") == 0;
    json_put(j, "'%s':{", method);
    put_operation_id(j, method, route);
    json_put(j, "'tags':['%s'],'summary':'%s','description':'%s',", doc->tag,
             operation ? operation->summary : doc->summary, operation ? operation->description : doc->description);
    put_parameters(j, route);
    if (route->bodies) put_request_body(j, route);
    else if (route->keeps_body)
        json_put(j,
                 "'requestBody':{'required':%s,'content':{'application/json':{'schema':{'$ref':'#/components/schemas/"
                 "%s'}}}},",
                 route->optional_body ? "false" : "true", doc->body);
    if (secured && !(route->token & PORT_MAIN)) json_put(j, "'security':[],");

    json_put(j, "'responses':{'%d':{'description':'%s',", doc->status ? doc->status : 200,
             operation ? operation->answer : doc->answer);
    put_headers(j, doc->status ? doc->status : 200);
    if (!head && doc->media) put_answer(j, route);
    json_raw(j, "}");
    put_errors(j, route, head, secured);
    json_raw(j, "}}");
}

/* The operations of all rows that have the path of row `first`, which is the first of them. */
static void put_path(struct json *j, const struct route *routes, int count, int first, bool secured)
{
    json_put(j, "'%s':{", routes[first].path);
    for (int r = first; r < count; r++) {
        if (!(routes[r].ports & PORT_MAIN) || strcmp(routes[r].path, routes[first].path) != 0) continue;
        json_comma(j);
        put_operation(j, &routes[r], route_method_name(routes[r].method), secured);
        if (routes[r].method != ROUTE_GET) continue;
        json_raw(j, ",");
        put_operation(j, &routes[r], "head", secured);
    }
    json_raw(j, "}");
}

static bool is_offered(const struct route *route, const struct config *config)
{
    if (route->shm == ROUTE_ALLOW_SHM) return config->allow_shm_count > 0;
    return route->shm != ROUTE_ALLOW_CUDA_SHM || config->allow_cuda_shm;
}

static void put_paths(struct document *d)
{
    const struct route *const routes = d->routes;
    for (int r = 0; r < d->route_count; r++) {
        bool seen = !(routes[r].ports & PORT_MAIN) || routes[r].hidden || !is_offered(&routes[r], d->config);
        for (int i = 0; i < r; i++)
            seen |= (routes[i].ports & PORT_MAIN) && strcmp(routes[i].path, routes[r].path) == 0;
        if (seen) continue;
        json_comma(&d->json);
        put_path(&d->json, routes, d->route_count, r, d->config->token_file != NULL);
    }
}

/* ---- The document ------------------------------------------------------------------------------------------------ */

static void put_version(struct document *d)
{
    json_put(&d->json, "'%s'", ATTND_VERSION);
}

static void put_timeout(struct document *d)
{
    json_put(&d->json, "%lld", (long long)d->config->timeout_ms);
}

static void put_error_codes(struct document *d)
{
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) put_name(&d->json, proto_errors[e].code);
}

static void put_all_dtypes(struct document *d)
{
    for (int i = 0; i < ATTN_DTYPE_COUNT; i++) put_name(&d->json, attn_dtype_name((attn_dtype)i));
#define X(wire, safetensors, kserve, bytes, as) put_name(&d->json, wire);
    PROTO_DTYPE_MAP(X)
#undef X
}

static void put_cache_dtypes(struct document *d)
{
    put_dtype_names(&d->json, ATTN_DTYPES_FORWARD);
}

static void put_stages(struct document *d)
{
    for (int s = PROTO_STAGE_queue; s <= PROTO_STAGE_copy_out; s++) {
        if (s == PROTO_STAGE_prepare || s == PROTO_STAGE_launch) continue; /* Server-Timing alone has them */
        json_comma(&d->json);
        json_put(&d->json, "'%s':{'type':'number','minimum':0}", proto_stages[s]);
    }
}

static void put_operations(struct document *d)
{
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        put_request_schemas(&d->json, op, d->limits);
        if (proto_is_run(&proto_operations[op])) put_answer_schemas(&d->json, op); /* others: the row of the route */
    }
}

/* The marks of the skeleton. The function writes members or elements, each behind a json_comma(), or one value. */
static const struct {
    const char *mark;
    void (*put)(struct document *d);
} marks[] = {
    { "version", put_version },           { "paths", put_paths },           { "timeout_ms", put_timeout },
    { "error_codes", put_error_codes },   { "dtypes", put_all_dtypes },     { "stages", put_stages },
    { "cache_dtypes", put_cache_dtypes }, { "operations", put_operations },
};

/* Marks that are replaced by a constant of the same name. */
static const struct {
    const char *mark;
    int value;
} numbers[] = {
#define NUMBER(name) \
    {                \
#name, name  \
    }
    NUMBER(INT32_MAX),
    NUMBER(ATTN_MAX_RANK),
    NUMBER(ATTN_MAX_HEAD_DIM),
    NUMBER(CACHES_HEADS),
    NUMBER(CACHES_LIST),
    NUMBER(CACHES_PAGE_SIZE),
    NUMBER(CACHES_PAGE_SIZE_LEAST),
    NUMBER(CACHES_PAGE_SIZE_MOST),
    NUMBER(PROTO_CACHE_TTL_MOST_S),
#undef NUMBER
};

/* Does this server lack an option? From the mark @?OPTION@ to the mark @?@ the skeleton describes what needs it. */
static bool lacks(const struct document *d, const char *condition)
{
    if (strcmp(condition, "secured") == 0) return d->config->token_file == NULL;
    if (strcmp(condition, "allow_shm") == 0) return d->config->allow_shm_count == 0;
    return strcmp(condition, "allow_cuda_shm") == 0 && !d->config->allow_cuda_shm;
}

static void put_mark(struct document *d, const char *mark)
{
    bool known = *mark == '?';
    if (known) d->skips = lacks(d, mark + 1);
    for (size_t i = 0; i < ARRAY_SIZE(marks) && !known; i++)
        if ((known = strcmp(marks[i].mark, mark) == 0)) marks[i].put(d);
    for (size_t i = 0; i < ARRAY_SIZE(numbers) && !known; i++)
        if ((known = strcmp(numbers[i].mark, mark) == 0)) json_put(&d->json, "%d", numbers[i].value);
    assert(known);
}

/* Takes the mark behind the first @ of `at`; returns what follows it. A string that is a mark alone stands for more
 * than a string: its quotes go, and so does the 0 of a member that has it as its name. */
static const char *take_mark(struct document *d, const char *at)
{
    char mark[40];
    const char *const begin = strchr(at, '@') + 1, *end = strchr(begin, '@');
    assert(end != NULL && (size_t)(end - begin) < sizeof mark);
    memcpy(mark, begin, (size_t)(end - begin));
    mark[end - begin] = '\0';
    put_mark(d, mark);
    end += *at == '"' ? 2 : 1;
    return strncmp(end, ": 0", 3) == 0 ? end + 3 : end;
}

/* The skeleton without its blanks, with what its marks stand for. A comma is written when it is known that something
 * follows it. (The skeleton's strings have no escapes.) */
static void put_document(struct document *d)
{
    bool quoted = false, comma = false;
    for (const char *p = openapi_skeleton; *p != '\0';) {
        if (quoted ? *p == '@' : strncmp(p, "\"@", 2) == 0) {
            p = take_mark(d, p);
            comma = false;
            continue;
        }
        const char c = *p++;
        if (!quoted && (c == ',' || c == ' ' || c == '\n')) {
            comma |= c == ',';
            continue;
        }
        if (c == '"') quoted = !quoted;
        if (d->skips) continue;
        if (comma && c != '}' && c != ']') json_comma(&d->json);
        comma = false;
        text_put_char(&d->json.text, c);
    }
}

char *openapi_write(const struct config *config, const proto_limits *limits, const struct route *routes,
                    int route_count, size_t *length)
{
    struct document d = { .json = { text_growing(JSON_DOCUMENT_BYTES) },
                          .config = config,
                          .limits = limits,
                          .routes = routes,
                          .route_count = route_count };
    put_document(&d);
    json_raw(&d.json, "\n");
    return json_take(&d.json, length);
}
