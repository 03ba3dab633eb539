/* openapi.c: the OpenAPI 3.1 document of GET /openapi.json, written from the skeleton openapi.json and the tables by
 * which the server works. A mark such as "@paths@" in the skeleton shows where the text from a table is inserted:
 *
 *   the rows of the routes (route.h)   -> the paths, and the answers and errors of each
 *   proto_operations[]                 -> the summaries of their routes; attention.c writes the schemas
 *   PROTO_ERROR_MAP                    -> the error responses
 *   config, proto_limits               -> security, and limits that a schema can express
 *
 * The schemas are never stricter than the server, except that they leave out aliases of dtypes. The server answers
 * every example with 200, if there is an empty cache with the id CACHE_EXAMPLE. For generators of clients, names of
 * components and operations are valid in any programming language, and a schema that is used twice has a name. */
#include "server/routes/openapi.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/base/limits.h"
#include "server/caches/caches.h"
#include "server/routes/attention.h"
#include "server/routes/caches.h"
#include "server/routes/json.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* Embeds openapi.json in the program. */
__asm__(".pushsection .rodata\n"
        "openapi_skeleton: .incbin \"server/routes/openapi.json\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const char openapi_skeleton[] __attribute__((visibility("hidden")));

struct document {
    struct json json;
    const struct config *config;
    const proto_limits *limits;
    const struct route *routes;
    int route_count;
    /* Whether the present part of the skeleton is left out, because it describes an option that this server was started
     * without. */
    bool skips;
};

/* ---- The tables of this file ------------------------------------------------------------------------------------- */

/* Errors that several routes have in common: all routes, routes with tensors, routes that compute or change something,
 * and routes that require a token. The row of a route adds its own errors. */
static const uint64_t errors_of_all = ROUTE_ERROR(INVALID_FRAMING) | ROUTE_ERROR(METHOD_NOT_ALLOWED) |
                                      ROUTE_ERROR(REQUEST_TIMEOUT) | ROUTE_ERROR(TOO_LARGE) |
                                      ROUTE_ERROR(TARGET_TOO_LONG) | ROUTE_ERROR(EXPECTATION_FAILED) |
                                      ROUTE_ERROR(HEAD_TOO_LARGE) | ROUTE_ERROR(INTERNAL) |
                                      ROUTE_ERROR(UNAVAILABLE) /* UNAVAILABLE: there are too many connections */ |
                                      ROUTE_ERROR(OUT_OF_MEMORY);
static const uint64_t errors_of_bodies = ROUTE_ERROR(UNSUPPORTED_MEDIA) | ROUTE_ERROR(UNSUPPORTED) |
                                         ROUTE_ERROR(TOO_MUCH_WORK) | ROUTE_ERROR(QUOTA) | ROUTE_ERROR(QUEUE_FULL) |
                                         ROUTE_ERROR(DRAINING) | ROUTE_ERROR(DEADLINE);
/* Errors that only methods other than GET have: for a query string in the URL, and for a request from a web page of
 * another origin. */
static const uint64_t errors_of_changes = ROUTE_ERROR(INVALID_REQUEST) | ROUTE_ERROR(FORBIDDEN_ORIGIN);
static const uint64_t errors_of_tokens = ROUTE_ERROR(UNAUTHORIZED);

/* Headers of answers. `on` lists the statuses whose answers always have the header. If `on` is { 0 }, all answers have
 * the header, except those written directly to a socket, such as a 408 in the middle of a body. */
static const struct {
    const char *name;
    int on[2];
} headers[] = {
    { "X-Request-Id", { 0 } }, { "Server-Timing", { 0 } }, { "Retry-After", { 429, 503 } },
    { "Allow", { 405 } },      { "Location", { 201 } },    { "WWW-Authenticate", { 401 } },
};

/* clang-format off */
/* The tensors of the examples: two queries, three keys, one head, head size 2. */
#define Q_TENSOR "{'shape':[1,2,1,2],'dtype':'float32','data':[1,0,0,1]}"
#define K_TENSOR "{'shape':[1,3,1,2],'dtype':'float32','data':[1,0,0,1,1,1]}"
#define V_TENSOR "{'shape':[1,3,1,2],'dtype':'float32','data':[1,2,3,4,5,6]}"
/* the tensors of Q_TENSOR, K_TENSOR and V_TENSOR, with their data as base64 of little-endian bytes */
#define Q_BASE64 "{'shape':[1,2,1,2],'dtype':'float32','data':'AACAPwAAAAAAAAAAAACAPw=='}"
#define K_BASE64 "{'shape':[1,3,1,2],'dtype':'float32','data':'AACAPwAAAAAAAAAAAACAPwAAgD8AAIA/'}"
#define V_BASE64 "{'shape':[1,3,1,2],'dtype':'float32','data':'AACAPwAAAEAAAEBAAACAQAAAoEAAAMBA'}"

static const struct {
    const char *body;
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
    { "MergeRequest", "numbers", "Typed by hand: two parts of equal weight, the second empty for the last query",
      "{'parts':[{'out':{'shape':[1,2,1,1],'dtype':'float32','data':[1,2]},"
      "'lse':{'shape':[1,1,2],'dtype':'float32','data':[0.5,0.25]}},"
      "{'out':{'shape':[1,2,1,1],'dtype':'float32','data':[3,0]},"
      "'lse':{'shape':[1,1,2],'dtype':'float32','data':[0.5,'-Infinity']}}],'encoding':'array'}" },
    { "AppendRequest", "numbers", "Typed by hand: three positions of a float32 cache with kv_heads 1 and head_dim 2",
      "{'k':{'shape':[3,1,2],'dtype':'float32','data':[1,0,0,1,1,1]},"
      "'v':{'shape':[3,1,2],'dtype':'float32','data':[1,2,3,4,5,6]}}" },
    { "DecodeRequest", "numbers", "Typed by hand: one step, whose position is appended to a float32 cache with kv_heads 1 and head_dim 2",
      "{'caches':['" CACHE_EXAMPLE "'],'q':{'shape':[1,1,1,2],'dtype':'float32','data':[1,0]},"
      "'k':{'shape':[1,1,1,2],'dtype':'float32','data':[1,0]},'v':{'shape':[1,1,1,2],'dtype':'float32','data':[1,2]},"
      "'causal':true,'encoding':'array'}" },
};
/* clang-format on */

/* ---- Writing the paths ------------------------------------------------------------------------------------------- */

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

static bool has_error(uint64_t errors, int error, int status)
{
    return (errors >> error & 1) && proto_errors[error].http == status;
}

/* Writes the error response of one status. All error responses have one schema, because some client generators make a
 * class for each schema, and others make no class at all. */
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

/* Writes an operationId, the name of a function in generated clients: get_v1_info, or get_page for the path /. */
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

/* Writes the content of a 200 answer: one content type, or all content types of a route with tensors. */
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

/* Writes one path with all its methods. `first` is the index of the first row with this path. */
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

/* ---- Writing the whole document ---------------------------------------------------------------------------------- */

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
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) json_name(&d->json, proto_errors[e].code);
}

static void put_all_dtypes(struct document *d)
{
    for (int i = 0; i < ATTN_DTYPE_COUNT; i++) json_name(&d->json, attn_dtype_name((attn_dtype)i));
#define X(wire, safetensors, kserve, bytes, as) json_name(&d->json, wire);
    PROTO_DTYPE_MAP(X)
#undef X
}

static void put_cache_dtypes(struct document *d)
{
    attention_put_dtypes(&d->json, ATTN_DTYPES_FORWARD);
}

static void put_stages(struct document *d)
{
    for (int s = PROTO_STAGE_queue; s <= PROTO_STAGE_copy_out; s++) {
        /* The stages prepare and launch are only in the header Server-Timing, and not in timing_us of an answer. */
        if (s == PROTO_STAGE_prepare || s == PROTO_STAGE_launch) continue;
        json_comma(&d->json);
        json_put(&d->json, "'%s':{'type':'number','minimum':0}", proto_stages[s]);
    }
}

static void put_operations(struct document *d)
{
    attention_put_schemas(&d->json, d->limits);
}

/* openapi.json has marks, such as "@dtypes@", that are replaced when the server writes the document. For each mark of
 * this table, put() writes the text that replaces it. This text is one JSON value, or a list of members of an object or
 * of elements of an array. put() calls json_comma() before each member or element. */
static const struct {
    const char *mark;
    void (*put)(struct document *d);
} marks[] = {
    { "version", put_version },           { "paths", put_paths },           { "timeout_ms", put_timeout },
    { "error_codes", put_error_codes },   { "dtypes", put_all_dtypes },     { "stages", put_stages },
    { "cache_dtypes", put_cache_dtypes }, { "operations", put_operations },
};

/* Marks in openapi.json, such as "@INT32_MAX@", that are replaced by the value of the constant of that name. */
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

/* True if this server was started without the option `condition`. In openapi.json, parts that need an option are
 * between the marks @?OPTION@ and @?@. */
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

/* Writes what replaces the first mark (such as @paths@) in `at`, and returns the text after the mark. If a string
 * consists only of a mark, its quotes are replaced too. A mark for whole members of an object has the form "@paths@":
 * 0, and all of this is replaced. */
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

/* Writes openapi.json without blanks, and with each mark (such as "@paths@") replaced by its text. A comma is written
 * only if another member or element follows. Strings in openapi.json must not contain backslash escapes. */
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
