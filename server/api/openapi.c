/* openapi.c: the OpenAPI 3.1 document of GET /openapi.json, written from the program's tables.
 *
 * The problem: a description that is typed a second time is wrong a month later. The idea: the document is made at
 * run time from the tables that the program itself runs by:
 *
 *   the rows of the routes (route.h)   -> paths, and of each what it answers and may refuse
 *   attn_tensors[], proto_takes_tensor -> the tensor members, their ranks, dtypes and shapes
 *   proto_options[]                    -> the other members, their types, ranges and defaults
 *   PROTO_ERROR_MAP                    -> the error responses
 *   config, proto_limits               -> security, and limits that a schema can state
 *
 * What only this file knows is in its own tables: which errors any request may be answered with, or any with a body,
 * and the examples.
 *
 * Invariants
 * 1. The schemas are never stricter than the server: a body that they forbid is refused with 4xx. Where the server
 * is stricter (shapes must fit each other, which JSON Schema cannot say) the description says so.
 * 2. Every example is answered 200 as it stands. */
#include "server/api/info.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/jsontext.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- Tables of this file ----------------------------------------------------------------------------------------- */

/* Errors of every route, of those with a body, and of those that want a token; a row adds its own. What is missing here
 * and there is on no route: names of proto.h that nothing uses yet. (A path that does not exist has no operation.) */
static const uint64_t errors_of_all = ROUTE_ERROR(INVALID_FRAMING) | ROUTE_ERROR(METHOD_NOT_ALLOWED) |
                                      ROUTE_ERROR(REQUEST_TIMEOUT) | ROUTE_ERROR(TOO_LARGE) |
                                      ROUTE_ERROR(TARGET_TOO_LONG) | ROUTE_ERROR(EXPECTATION_FAILED) |
                                      ROUTE_ERROR(HEAD_TOO_LARGE) | ROUTE_ERROR(INTERNAL) |
                                      ROUTE_ERROR(UNAVAILABLE) /* too many connections */ | ROUTE_ERROR(OUT_OF_MEMORY);
static const uint64_t errors_of_bodies = ROUTE_ERROR(INVALID_REQUEST) | ROUTE_ERROR(UNSUPPORTED_MEDIA) |
                                         ROUTE_ERROR(UNSUPPORTED) | ROUTE_ERROR(TOO_MUCH_WORK) | ROUTE_ERROR(QUOTA) |
                                         ROUTE_ERROR(QUEUE_FULL) | ROUTE_ERROR(DRAINING) | ROUTE_ERROR(DEADLINE);
static const uint64_t errors_of_tokens = ROUTE_ERROR(UNAUTHORIZED);

/* Ranges of PROTO_TYPE_NUMBER options that attn_check() keeps. */
static const struct {
    const char *name, *range;
} number_ranges[] = {
    { "softcap", ",'minimum':0" },
    { "dropout_p", ",'minimum':0,'exclusiveMaximum':1" },
};

/* Headers of answers. `on` names the statuses that always have it; 0: usual on every answer, but not on one that is
 * written past the web server, such as 408 in the middle of a body. */
static const struct {
    const char *name, *schema, *description;
    int on[2];
} headers[] = {
    { "X-Request-Id",
      "{'type':'string','pattern':'^[A-Za-z0-9._-]{1,128}$'}",
      "The request's own id where it sent a usable one, else one made here; it is in the log too.",
      { 0 } },
    { "Server-Timing",
      "{'type':'string'}",
      "Milliseconds of each stage: recv, decode, queue, copy_in, compute, copy_out, encode.",
      { 0 } },
    { "Retry-After", "{'type':'integer','minimum':1}", "Seconds to wait before the next try.", { 429, 503 } },
    { "Allow", "{'type':'string'}", "The methods that work here.", { 405 } },
    { "WWW-Authenticate", "{'type':'string'}", "Bearer.", { 401 } },
};

/* clang-format off */
/* A request that people can read: two queries over three keys, one head, head size 2. */
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
    { "BackwardRequest", "numbers", "out and lse are recomputed",
      "{'q':" Q_TENSOR ",'k':" K_TENSOR ",'v':" V_TENSOR ",'dout':" Q_TENSOR ",'causal':true,'encoding':'array'}" },
    { "BackwardRequest", "requests", "Two problems in one body",
      "{'requests':[{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 ",'dout':" Q_BASE64 "},"
      "{'q':" Q_BASE64 ",'k':" K_BASE64 ",'v':" V_BASE64 ",'dout':" Q_BASE64 ",'causal':true}]}" },
};
/* clang-format on */

static const char *const op_names[] = { [ATTN_OP_FORWARD] = "Forward", [ATTN_OP_BACKWARD] = "Backward" };

/* ---- Tensors: from a row to a schema ----------------------------------------------------------------------------- */

static int lowest(unsigned bits)
{
    return __builtin_ctz(bits);
}
static int highest(unsigned bits)
{
    return 31 - __builtin_clz(bits);
}

/* The names of these dtypes, in JSON: every name that is accepted, or only those that answers use. */
static void put_dtypes(struct json *j, unsigned dtypes, bool accepted)
{
    static const struct {
        const char *wire, *safetensors, *kserve;
    } names[] = {
#define X(id, wire, safetensors, kserve, bytes, floating) { wire, safetensors, kserve },
        ATTN_DTYPE_MAP(X)
#undef X
    };
    json_raw(j, "[");
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++) {
        if (!(dtypes >> d & 1)) continue;
        json_comma(j);
        json_put(j, "'%s'", names[d].wire);
        if (!accepted) continue;
        if (strcmp(names[d].safetensors, names[d].wire) != 0) json_put(j, ",'%s'", names[d].safetensors);
        if (strcmp(names[d].kserve, names[d].safetensors) != 0) json_put(j, ",'%s'", names[d].kserve);
    }
    json_raw(j, "]");
}

static void put_tensor_schema(struct json *j, attn_tensor_id id, bool request)
{
    const unsigned ranks = attn_tensor_ranks(id);
    char text[ATTN_SHAPE_BYTES];
    json_put(j,
             "{'type':'object','description':'%s: %s. "
             "%s','required':['shape','dtype','data'],'additionalProperties':false,'properties':{",
             attn_tensors[id].name, attn_tensor_shape(id, text), attn_tensors[id].meaning);
    json_put(j,
             "'shape':{'type':'array','items':{'$ref':'#/components/schemas/"
             "Axis'},'minItems':%d,'maxItems':%d},'dtype':{'enum':",
             lowest(ranks), highest(ranks));
    put_dtypes(j, attn_tensor_dtypes(id), request);
    json_put(j, "},'data':{'$ref':'#/components/schemas/Data'}}}");
}

/* ---- Options: from a row to a schema ----------------------------------------------------------------------------- */

static void put_integer(struct json *j, int64_t minimum, int64_t maximum)
{
    json_put(j, "'type':'integer','minimum':%lld,'maximum':%lld", (long long)minimum, (long long)maximum);
}

static void put_option_schema(struct json *j, const proto_option *o, attn_op op)
{
    bool by_default;
    json_put(j, "{'description':'%s',", o->help);
    switch (o->type) {
    case PROTO_TYPE_BOOL: json_put(j, "'type':'boolean'"); break;
    case PROTO_TYPE_NUMBER:
        json_put(j, "'type':'number'");
        for (size_t i = 0; i < ARRAY_SIZE(number_ranges); i++)
            if (strcmp(number_ranges[i].name, o->name) == 0) json_constant(j, number_ranges[i].range);
        break;
    case PROTO_TYPE_INTEGER: put_integer(j, o->minimum, o->maximum); break;
    case PROTO_TYPE_SEED: json_put(j, "'type':'integer','minimum':0,'maximum':18446744073709551615"); break;
    case PROTO_TYPE_CHOICE:
        json_put(j, "'enum':[");
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
        json_put(j, "'enum':");
        put_dtypes(j, attn_tensor_dtypes(ATTN_T_out), true);
        break;
    case PROTO_TYPE_NAMES:
        json_put(j, "'type':'array','items':{'enum':[");
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
            if (proto_gives_tensor(op, (attn_tensor_id)t, &by_default)) {
                json_comma(j);
                json_put(j, "'%s'", attn_tensors[t].name);
            }
        json_put(j, "]},'minItems':1,'uniqueItems':true");
        break;
    case PROTO_TYPE_ROWS:
        json_put(j, "'oneOf':[{");
        put_integer(j, o->minimum, o->maximum);
        json_put(j, "},{'const':'all'}]");
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

/* A problem as its members; `with_context`: a backward whose inputs were saved by a forward. */
static void put_problem_schema(struct json *j, attn_op op, bool with_context)
{
    json_put(j, "{'type':'object','additionalProperties':false,'required':[");
    if (!with_context) json_put(j, "'q','k','v'");
    if (op == ATTN_OP_BACKWARD) {
        json_comma(j);
        json_put(j, "'dout'");
    }
    if (with_context) json_put(j, ",'context'");
    json_put(j, "],'properties':{");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        if (!proto_takes_tensor(op, (attn_tensor_id)t)) continue;
        if (with_context && attn_tensors[t].role != ATTN_ROLE_IN_BACK) continue;
        json_comma(j);
        json_put(j, "'%s':{'$ref':'#/components/schemas/tensor.%s'}", attn_tensors[t].name, attn_tensors[t].name);
    }
    for (const proto_option *o = proto_options; o->name != NULL; o++) {
        if (!(o->ops >> op & 1)) continue;
        if (o->type == PROTO_TYPE_ID ? !with_context : with_context && !o->with_context) continue;
        json_comma(j);
        json_put(j, "'%s':", o->name);
        put_option_schema(j, o, op);
    }
    json_raw(j, "}");
    if (!with_context) {
        json_put(j, ",'dependentRequired':{'cu_seqlens_q':['cu_seqlens_k'],'cu_seqlens_k':['cu_seqlens_q']");
        if (op == ATTN_OP_BACKWARD) json_put(j, ",'out':['lse'],'lse':['out']");
        json_raw(j, "}");
    }
    json_raw(j, "}");
}

static void put_request_schemas(struct json *j, attn_op op, const proto_limits *limits)
{
    const char *name = op_names[op];
    bool context = false; /* does this op take one? */
    for (const proto_option *o = proto_options; o->name != NULL; o++)
        context |= o->type == PROTO_TYPE_ID && (o->ops >> op & 1);

    json_put(j, ",'%sProblem':", name);
    put_problem_schema(j, op, false);
    if (context) {
        json_put(j, ",'%sOfContext':", name);
        put_problem_schema(j, op, true);
    }
    json_put(j, ",'%sItem':{'oneOf':[{'$ref':'#/components/schemas/%sProblem'}", name, name);
    if (context) json_put(j, ",{'$ref':'#/components/schemas/%sOfContext'}", name);
    json_put(j, "]},'%sRequest':{'oneOf':[{'$ref':'#/components/schemas/%sProblem'},", name, name);
    if (context) json_put(j, "{'$ref':'#/components/schemas/%sOfContext'},", name);
    json_put(
        j,
        "{'type':'object','additionalProperties':false,'required':['requests'],'properties':{'requests':{'type':'array'"
        ","
        "'description':'Independent problems. One that is wrong is answered by an error in its place; the others are "
        "computed.','minItems':1,"
        "'maxItems':%d,'items':{'anyOf':[{'$ref':'#/components/schemas/%sItem'},{'description':'Anything else: "
        "answered by "
        "an error in its "
        "place.'}]}}}}]}",
        limits->batch, name);
}

static void put_answer_schemas(struct json *j, attn_op op)
{
    const char *name = op_names[op];
    bool by_default;
    json_put(
        j,
        ",'%sResult':{'type':'object','additionalProperties':false,'required':['backend','timing_us'],'properties':{",
        name);
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_gives_tensor(op, (attn_tensor_id)t, &by_default)) {
            json_comma(j);
            json_put(j, "'%s':", attn_tensors[t].name);
            put_tensor_schema(j, (attn_tensor_id)t, false);
        }
    json_comma(j);
    json_put(
        j,
        "'backend':{'type':'string','description':'Which device and kernel computed it.'},'timing_us':{'type':'object',"
        "'description':'Microseconds.','additionalProperties':false,'properties':{");
    for (int s = PROTO_STAGE_queue; s <= PROTO_STAGE_copy_out; s++) {
        json_comma(j);
        json_put(j, "'%s':{'type':'number','minimum':0}", proto_stages[s]);
    }
    json_raw(j, "}}");
    json_put(j,
             ",'seed':{'type':'integer','minimum':0,'maximum':18446744073709551615,'description':'The seed that "
             "dropout used.'}"
             ",'verification':{'type':'object','description':'Of verify: the error against "
             "float64.','additionalProperties':false,"
             "'required':['max_abs','relative','rows'],'properties':{'max_abs':{'$ref':'#/components/schemas/Number'},"
             "'relative':{'$ref':'#/components/schemas/Number'},'rows':{'type':'integer','minimum':0}}}");
    if (op == ATTN_OP_FORWARD) json_put(j, ",'context':{'type':'string','description':'Of save: for one backward.'}");
    json_raw(j, "}}");
    json_put(
        j,
        ",'%sAnswer':{'oneOf':[{'$ref':'#/components/schemas/%sResult'},{'type':'object','additionalProperties':false,"
        "'required':['responses'],'properties':{'responses':{'type':'array','description':'In the order of "
        "requests.','items':{'oneOf':["
        "{'$ref':'#/components/schemas/"
        "%sResult'},{'type':'object','additionalProperties':false,'required':['error'],'properties':"
        "{'error':{'$ref':'#/components/schemas/Problem'}}}]}}}}]}",
        name, name, name);
}

static void put_problem_document(struct json *j)
{
    json_put(
        j, "'Problem':{'type':'object','description':'RFC 9457.','additionalProperties':false,"
           "'required':['type','title','status','detail','code','error'],'properties':{"
           "'type':{'type':'string'},'title':{'type':'string'},'status':{'type':'integer','minimum':400,'maximum':599},"
           "'detail':{'type':'string','description':'One sentence: what, where, and the rule.'},"
           "'code':{'description':'Stable; the same kind of fault always has the same.','enum':[");
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) {
        json_comma(j);
        json_put(j, "'%s'", proto_errors[e].code);
    }
    json_put(j, "]},'error':{'type':'string','description':'The same text as detail.'},'request_id':{'type':'string'},"
                "'pointer':{'type':'string','description':'RFC 6901: the offending member.'}}}");
}

/* clang-format off */
/* The members of info_write() (info.c); its test holds the two against each other. */
static void put_info_schema(struct json *j)
{
#define STRING  "{'type':'string'}"
#define COUNT   "{'type':'integer','minimum':0}"
#define STRINGS "{'type':'array','items':{'type':'string'}}"
#define OBJECT(required, properties) \
    "{'type':'object','additionalProperties':false,'required':[" required "],'properties':{" properties "}}"
    json_put(j, ",'Info':" OBJECT(
        "'name','version','build','state','uptime_s','backends','devices','dtypes','head_dim','features','limits','queue',"
        "'connections','inflight_requests','staging','counters'",
        "'name':" STRING ",'version':" STRING ",'uptime_s':{'type':'number','minimum':0},"
        "'state':{'enum':['starting','ready','draining','failed']},"
        "'build':" OBJECT("'compiler','libmicrohttpd','libuv','cjson'",
            "'compiler':" STRING ",'libmicrohttpd':" STRING ",'libuv':" STRING ",'cjson':" STRING) ","
        "'backends':" STRINGS ",'dtypes':" STRINGS ","
        "'head_dim':" OBJECT("'minimum','maximum'", "'minimum':" COUNT ",'maximum':" COUNT) ","
        "'devices':{'type':'array','items':" OBJECT(
            "'name','backend','description','streams','memory_total_bytes','memory_limit_bytes','memory_used_bytes',"
            "'usable','running_requests','batches','errors','kernel_seconds','flops'",
            "'name':" STRING ",'backend':" STRING ",'description':" STRING ",'streams':" COUNT ",'memory_total_bytes':" COUNT
            ",'memory_limit_bytes':" COUNT ",'memory_used_bytes':" COUNT ",'usable':{'type':'boolean'},'running_requests':" COUNT
            ",'batches':" COUNT ",'errors':" COUNT ",'kernel_seconds':{'type':'number','minimum':0},"
            "'flops':{'type':'number','minimum':0}") "},"
        "'features':{'type':'object','description':'By backend.','additionalProperties':"
            "{'type':'object','description':'By operation.','additionalProperties':"
            OBJECT("'dtypes','tensors','options','kernels'",
                "'dtypes':" STRINGS ",'tensors':" STRINGS ",'options':" STRINGS ","
                "'kernels':{'type':'array','description':'In the order in which they are tried: a problem goes to the first "
                "that knows its dtype and all that it asks for. One may still leave a problem to the next for its sizes or "
                "strides.','items':" OBJECT("'name','head_dim','dtypes','tensors','options'",
                    "'name':" STRING ",'head_dim':" COUNT ",'dtypes':" STRINGS ",'tensors':" STRINGS ",'options':" STRINGS)
                "}") "}},"
        "'limits':{'type':'object','additionalProperties':" COUNT "},"
        "'queue':" OBJECT("'requests','bytes'", "'requests':" COUNT ",'bytes':" COUNT) ","
        "'connections':" COUNT ",'inflight_requests':" COUNT ","
        "'staging':" OBJECT("'limit_bytes','used_bytes'", "'limit_bytes':" COUNT ",'used_bytes':" COUNT) ","
        "'counters':{'type':'object','additionalProperties':{'type':'number','minimum':0}}"));
#undef STRING
#undef COUNT
#undef STRINGS
#undef OBJECT
}
/* clang-format on */

/* Base64 as RFC 4648 section 4 wants it, canonical: padded, and with zero bits where the last character has some to
 * spare.
 * */
#define BASE64_PATTERN "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$"

static void put_schemas(struct json *j, const proto_limits *limits)
{
    json_put(j, "'schemas':{");
    put_problem_document(j);
    json_put(j, ",'Axis':{'type':'integer','minimum':0,'maximum':%d}", INT32_MAX);
    json_put(j, ",'Number':{'anyOf':[{'type':'number'},{'enum':['NaN','Infinity','-Infinity']}]}");
    json_put(j, ",'Data':{'description':'The little-endian, C-contiguous bytes in base64 (RFC 4648 section 4, with "
                "padding), or the numbers, "
                "flat or nested as shape says. The dtype decides how many bytes a number has; integers for int32 and "
                "uint8.','anyOf':["
                "{'type':'string','contentEncoding':'base64','pattern':'" BASE64_PATTERN "'}");
    for (int depth = 1; depth <= ATTN_MAX_RANK; depth++) {
        json_raw(j, ",");
        for (int d = 0; d < depth; d++) json_put(j, "{'type':'array','items':");
        json_put(j, "{'$ref':'#/components/schemas/Number'}");
        for (int d = 0; d < depth; d++) json_raw(j, "}");
    }
    json_raw(j, "]}");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_takes_tensor(ATTN_OP_FORWARD, (attn_tensor_id)t) ||
            proto_takes_tensor(ATTN_OP_BACKWARD, (attn_tensor_id)t)) {
            json_put(j, ",'tensor.%s':", attn_tensors[t].name);
            put_tensor_schema(j, (attn_tensor_id)t, true);
        }
    for (int op = ATTN_OP_FORWARD; op <= ATTN_OP_BACKWARD; op++) {
        put_request_schemas(j, (attn_op)op, limits);
        put_answer_schemas(j, (attn_op)op);
    }
    put_info_schema(j);
    json_raw(j, "}");
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
           (secured && (route->token & PORT_MAIN) ? errors_of_tokens : 0);
}

/* Is this one of the errors, with this status? */
static bool has_error(uint64_t errors, int error, int status)
{
    return (errors >> error & 1) && proto_errors[error].http == status;
}

/* The error response of one status: its codes are listed together. */
static void put_error(struct json *j, uint64_t errors, int status, bool head, bool plain)
{
    const char *separator = "";
    json_put(j, ",'%d':{'description':'", status);
    for (int e = 0; e < PROTO_ERROR_COUNT; e++)
        if (has_error(errors, e, status)) {
            json_put(j, "%s%s", separator, proto_errors[e].title);
            separator = "; ";
        }
    json_put(j, "',");
    put_headers(j, status);
    if (!head) {
        json_put(j,
                 ",'content':{'application/problem+json':{'schema':{'allOf':[{'$ref':'#/components/schemas/"
                 "Problem'},{'type':'object',"
                 "'properties':{'status':{'const':%d},'code':{'enum':[",
                 status);
        for (int e = 0; e < PROTO_ERROR_COUNT; e++)
            if (has_error(errors, e, status)) {
                json_comma(j);
                json_put(j, "'%s'", proto_errors[e].code);
            }
        json_put(j, "]}}}]}}");
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
        put_error(j, errors, status, head, route->doc.plain_503 && status == 503);
    }
}

static void put_examples(struct json *j, const char *body)
{
    json_put(j, ",'examples':{");
    for (size_t i = 0; i < ARRAY_SIZE(examples); i++) {
        if (strcmp(examples[i].body, body) != 0) continue;
        json_comma(j);
        json_put(j, "'%s':{'summary':'%s','value':", examples[i].name, examples[i].summary);
        json_constant(j, examples[i].value);
        json_raw(j, "}");
    }
    json_raw(j, "}");
}

static void put_request_body(struct json *j, const struct route *route)
{
    json_put(j, "'requestBody':{'required':true,'content':{");
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

/* An operationId: get_v1_info. */
static void put_operation_id(struct json *j, const char *method, const char *path)
{
    char id[128];
    size_t n = (size_t)snprintf(id, sizeof id, "%s", method);
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
    for (int i = 0; i < REQUEST_PARAMETERS && route->doc.parameters[i].name; i++)
        json_put(j,
                 ",{'in':'path','name':'%s','required':true,'description':'%s',"
                 "'schema':{'type':'string','minLength':1,'maxLength':%d}}",
                 route->doc.parameters[i].name, route->doc.parameters[i].description, ROUTE_PARAMETER_BYTES);
    json_raw(j, "],");
}

static void put_operation(struct json *j, const struct route *route, const char *method, bool secured)
{
    const struct route_doc *doc = &route->doc;
    const bool head = strcmp(method, "head") == 0;
    json_put(j, "'%s':{", method);
    put_operation_id(j, method, route->path);
    json_put(j, "'tags':['%s'],'summary':'%s','description':'%s',", doc->tag, doc->summary, doc->description);
    put_parameters(j, route);
    if (route->bodies) put_request_body(j, route);
    if (secured && !(route->token & PORT_MAIN)) json_put(j, "'security':[],");

    json_put(j, "'responses':{'200':{'description':'%s',", doc->answer);
    put_headers(j, 200);
    if (!head) {
        json_put(j, ",'content':{'%s':{'schema':", doc->media);
        json_constant(j, doc->schema);
        json_raw(j, "}}");
    }
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

static void put_paths(struct json *j, const struct route *routes, int count, bool secured)
{
    json_put(j, "'paths':{");
    for (int r = 0; r < count; r++) {
        bool seen = !(routes[r].ports & PORT_MAIN);
        for (int i = 0; i < r; i++)
            seen |= (routes[i].ports & PORT_MAIN) && strcmp(routes[i].path, routes[r].path) == 0;
        if (seen) continue;
        json_comma(j);
        put_path(j, routes, count, r, secured);
    }
    json_raw(j, "}");
}

char *info_openapi_write(const struct config *config, const proto_limits *limits, const struct route *routes,
                         int route_count, size_t *length)
{
    struct json j = { 0 };
    const bool secured = config->token_file != NULL;
    json_put(
        &j,
        "{'openapi':'3.1.0','info':{'title':'attnd','version':'%s','summary':'Exact attention, forward and backward',"
        "'description':'Tensors are JSON objects of shape, dtype and data. Errors are problem documents (RFC 9457) "
        "whose detail names the "
        "tensor, the index, the value and the rule. Members that are not listed are refused.'},'servers':[{'url':'/'}],"
        "'tags':[{'name':'attention'},{'name':'operations'}],",
        ATTND_VERSION);
    if (secured) json_put(&j, "'security':[{'bearer':[]}],");
    put_paths(&j, routes, route_count, secured);
    json_put(&j, ",'components':{");
    put_schemas(&j, limits);
    json_put(&j, ",'headers':{");
    for (size_t i = 0; i < ARRAY_SIZE(headers); i++) {
        json_comma(&j);
        json_put(&j, "'%s':{'required':", headers[i].name);
        json_raw(&j, headers[i].on[0] ? "true" : "false");
        json_put(&j, ",'description':'%s','schema':", headers[i].description);
        json_constant(&j, headers[i].schema);
        json_raw(&j, "}");
    }
    json_put(
        &j,
        "},'parameters':{'X-Request-Id':{'in':'header','name':'X-Request-Id','description':'1 to 128 letters, digits, "
        "dots, "
        "underscores "
        "and dashes are kept; anything else is replaced.','schema':{'type':'string'}},"
        "'traceparent':{'in':'header','name':'traceparent','description':'W3C Trace Context; its ids are logged. A "
        "malformed one is "
        "ignored.','schema':{'type':'string'}},"
        "'X-Request-Timeout-Ms':{'in':'header','name':'X-Request-Timeout-Ms','description':'Answer within so many "
        "milliseconds or with "
        "504. The server has a limit of its own (%lld); the smaller one "
        "counts.','schema':{'type':'integer','minimum':0}}}",
        (long long)config->timeout_ms);
    if (secured) json_put(&j, ",'securitySchemes':{'bearer':{'type':'http','scheme':'bearer'}}");
    json_raw(&j, "}}\n");
    return json_take(&j, length);
}
