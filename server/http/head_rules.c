/* head_rules.c: one function for each rule about the head of a request. The order is: path, method, then rules[]. An
 * error is about the first rule that the head breaks. */
#include "server/http/head_rules.h"
#include "server/http/exchange.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "text/text.h"
#include "server/routes/kserve.h"
#include "server/base/config.h"
#include "server/http/connections.h"
#include "server/http/mhd.h"
#include "server/routes/routes.h"
#include "server/http/tokens.h"
#include "server/work/server.h"

enum { QUOTED_BYTES = 80 /* largest number of bytes of a client's text that an error quotes */, MEDIA_BYTES = 128 };

static int quoted(const char *text)
{
    return (int)text_cut(text, QUOTED_BYTES);
}

void head_rules_origin(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    const char *allowed = request->server->config->cors_origin, *origin = f->value[HEADER_ORIGIN];
    if (allowed == NULL || origin == NULL) return;
    exchange->cors = strcmp(allowed, "*") == 0 || strcmp(allowed, origin) == 0;
    exchange->preflight = exchange->cors && strcmp(exchange->method, "OPTIONS") == 0;
}

static void check_path(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    char hint[ROUTES_HINT_BYTES];
    if (request->route) return;
    request_fail(request, PROTO_E_NOT_FOUND, NULL, "there is nothing at '%.*s'%s (/openapi.json lists what there is)",
                 quoted(exchange->path), exchange->path, routes_hint(exchange->http->kind, exchange->path, hint));
}

static void check_method(struct request *request, bool answers)
{
    struct exchange *const exchange = exchange_of(request);
    char allow[ROUTE_ALLOW_BYTES], media[MEDIA_BYTES], more[MEDIA_BYTES + 64] = "";
    if (answers) return;
    if (request->route->bodies)
        snprintf(more, sizeof more, " with tensors in the body, as JSON or binary (%s)",
                 route_media(request->route, media, sizeof media));
    else if (strcmp(exchange->method, "POST") == 0) snprintf(more, sizeof more, "; " ROUTES_WHERE_TO);
    else if (strcmp(exchange->method, "DELETE") == 0 && strcmp(exchange->path, "/v1/caches") == 0)
        snprintf(more, sizeof more, "; DELETE /v1/caches/{id} deletes one");
    request_fail(request, PROTO_E_METHOD_NOT_ALLOWED, NULL, "%.*s came, this path answers %s%s",
                 quoted(exchange->method), exchange->method, route_allow(exchange->methods, allow), more);
}

static void check_expectation(struct request *request, const struct http_head *f)
{
    const char *const expect = f->value[HEADER_EXPECT];
    if (expect && strcasecmp(expect, "100-continue") != 0)
        request_fail(request, PROTO_E_EXPECTATION_FAILED, NULL, "Expect is '%.*s', only 100-continue can be expected",
                     quoted(expect), expect);
}

/* Refuses a request from a page of another site, unless --cors-origin allows it. The browser would only hide the
 * answer, but the page could still use the devices or fill the memory. */
static void check_origin(struct request *request, const struct http_head *f)
{
    const char *const origin = f->value[HEADER_ORIGIN], *host = f->value[HEADER_HOST];
    if (origin == NULL || exchange_of(request)->cors || request->route->method == ROUTE_GET) return;
    if (host == NULL) host = "";
    if (http_head_same_origin(origin, host)) return;
    /* browsers send the Origin "null" for a page without a site; only --cors-origin '*' allows such pages */
    const char *const option = strcmp(origin, "null") == 0 ? "'*'" : origin;
    request_fail(request, PROTO_E_FORBIDDEN_ORIGIN, NULL,
                 "Origin is '%.*s', a page of another site than '%.*s'; such a page may use this server where it is "
                 "started with --cors-origin %.*s",
                 quoted(origin), origin, quoted(host), host, quoted(option), option);
}

static void check_token(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    struct server *const server = request->server;
    const char *const authorization = f->value[HEADER_AUTHORIZATION];
    request->caller = &server->everybody;
    if (!(request->route->token & exchange->http->kind) || server->tokens == NULL) return;
    request->caller = tokens_find(server->tokens, authorization);
    if (request->caller == NULL)
        request_fail(request, PROTO_E_UNAUTHORIZED, NULL, "%s; this path wants `Authorization: Bearer <token>`",
                     tokens_fault(authorization));
    else atomic_store_explicit(&exchange->connection->known, true, memory_order_relaxed);
}

static void check_model(struct request *request, const struct http_head *f)
{
    char why[KSERVE_WHY_BYTES];
    (void)f;
    if (!request->route->model) return;
    request->model = kserve_find(request->parameters[0], request->parameters[1], why);
    if (request->model == NULL) request_fail(request, PROTO_E_NOT_FOUND, NULL, "%s", why);
}

static void check_length(struct request *request, const struct http_head *f)
{
    const uint64_t limit = (uint64_t)request->server->config->max_body_bytes;
    if (f->has_length && f->length > limit)
        request_fail(request, PROTO_E_TOO_LARGE, NULL,
                     "the body has %llu bytes, the limit is %llu (the server's --max-body-bytes)",
                     (unsigned long long)f->length, (unsigned long long)limit);
}

static bool names_several(const char *list)
{
    static const char between[] = " \t,";
    list += strspn(list, between);
    list += strcspn(list, between);
    return list[strspn(list, between)] != '\0';
}

static void check_body_type(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    const char *const encoding = f->value[HEADER_CONTENT_ENCODING], *const type = f->value[HEADER_CONTENT_TYPE];
    char media[MEDIA_BYTES];
    const bool taken = unpack_coding_of(encoding, &exchange->coding);
    if (request->route->keeps_body && (!taken || exchange->coding != UNPACK_NOTHING))
        request_fail(request, PROTO_E_UNSUPPORTED_MEDIA, NULL,
                     "Content-Encoding is '%.*s', this path takes its few bytes uncompressed", quoted(encoding),
                     encoding);
    if (request->route->bodies == NULL) return;
    if (!taken) {
        request_fail(request, PROTO_E_UNSUPPORTED_MEDIA, NULL,
                     "Content-Encoding is '%.*s', %smust be gzip or deflate; or send the body uncompressed, without it",
                     quoted(encoding), encoding, names_several(encoding) ? "which names several, one is taken: " : "");
        return;
    }
    exchange->body = route_body(request->route, type);
    if (exchange->body == NULL)
        request_fail(request, PROTO_E_UNSUPPORTED_MEDIA, NULL,
                     "Content-Type is '%.*s', must be %s; send a JSON object or a safetensors file, and name it so",
                     quoted(type), type, route_media(request->route, media, sizeof media));
    else request->answer_as = route_answer(request->route, exchange->body, f->value[HEADER_ACCEPT])->format;
}

static void check_json_length(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    const char *const value = f->value[HEADER_INFERENCE_HEADER];
    uint64_t bytes;
    if (request->model == NULL || request->route->bodies == NULL || value == NULL) return;
    if (!text_is_number(value, INT64_MAX, &bytes))
        request_fail(request, PROTO_E_INVALID_REQUEST, NULL,
                     "Inference-Header-Content-Length is '%.*s', must be how many bytes of the body are JSON",
                     quoted(value), value);
    else if (!f->chunked && exchange->coding == UNPACK_NOTHING && bytes > f->length)
        request_fail(request, PROTO_E_INVALID_REQUEST, NULL,
                     "Inference-Header-Content-Length is %llu, but the body has only %llu bytes",
                     (unsigned long long)bytes, (unsigned long long)f->length);
    else exchange->json_bytes = (int64_t)bytes;
}

static void check_timeout(struct request *request, const struct http_head *f)
{
    const char *const value = f->value[HEADER_TIMEOUT];
    const proto_option *rule = proto_options;
    uint64_t timeout_ms;
    if (request->route->bodies == NULL || value == NULL) return;
    /* finds the row of the body's member timeout_ms, whose range also applies to X-Request-Timeout-Ms */
    while (strcmp(rule->name, "timeout_ms") != 0) rule++;
    if (text_is_number(value, (uint64_t)rule->maximum, &timeout_ms) && (int64_t)timeout_ms >= rule->minimum)
        request->client_timeout_ms = (int64_t)timeout_ms;
    else
        request_fail(request, PROTO_E_INVALID_REQUEST, NULL,
                     "X-Request-Timeout-Ms is '%.*s', must be a whole number of milliseconds from %lld to 2^53",
                     quoted(value), value, (long long)rule->minimum);
}

/* libmicrohttpd calls this for the first argument in the URL's query. Stores its name, and ends the iteration. */
static enum MHD_Result on_argument(void *context, enum MHD_ValueKind kind, const char *name, const char *value)
{
    (void)kind;
    (void)value;
    *(const char **)context = name;
    return MHD_NO;
}

/* Refuses a query in the URL unless the method is GET. Otherwise options in the URL would be ignored silently. */
static void check_query(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    const struct route *const route = request->route;
    const char *name = "";
    (void)f;
    if (route->method == ROUTE_GET || !exchange->has_query) return;
    MHD_get_connection_values(exchange->mhd, MHD_GET_ARGUMENT_KIND, on_argument, &name);
    request_fail(request, PROTO_E_INVALID_REQUEST, NULL, "the URL has a query ('?%.*s'), which nobody reads here; %s",
                 quoted(name), name,
                 route->bodies || route->keeps_body ? "options are members of the body" : "this path has no options");
}

static void (*const rules[])(struct request *request, const struct http_head *f) = {
    check_expectation, check_origin,      check_token,   check_model, check_length,
    check_body_type,   check_json_length, check_timeout, check_query,
};

void head_rules_check(struct request *request, const struct http_head *f)
{
    struct exchange *const exchange = exchange_of(request);
    const struct route_match match = routes_find(exchange->http->kind, exchange->path, exchange->method);
    request->route = match.route;
    exchange->methods = match.methods;
    memcpy(request->parameters, match.parameters, sizeof request->parameters);
    check_path(request);
    if (request->failed || exchange->preflight) return;
    check_method(request, match.answers);
    for (size_t i = 0; i < sizeof rules / sizeof *rules && !request->failed; i++) rules[i](request, f);
}
