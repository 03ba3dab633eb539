/* test_routes.c: tests that every row of the server's table of URLs is valid. Tests of the lookup of a path and a
 * method use small tables of their own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "server/http/http_head.h"
#include "server/routes/routes.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- Tests of the program's table of routes ---------------------------------------------------------------------- */

/* Checks that each parameter of a pattern is a whole segment of the path, with a name that is documented. */
static void check_parameters(const struct route *r)
{
    int count = 0;
    for (const char *p = r->path; *p; p++) {
        const size_t length = strcspn(p, "}");
        if (*p == '}') fail_msg("%s: a '}' that ends nothing", r->path);
        if (*p != '{') continue;
        assert_true(p > r->path && p[-1] == '/');
        assert_true(p[length] == '}' && (p[length + 1] == '/' || p[length + 1] == '\0'));
        assert_true(count < REQUEST_PARAMETERS);
        const char *name = r->doc.parameters[count++].name;
        if (name == NULL || strlen(name) != length - 1 || strncmp(name, p + 1, length - 1) != 0)
            fail_msg("%s: parameter %d is documented as %s", r->path, count, name ? name : "nothing");
        assert_non_null(r->doc.parameters[count - 1].example);
        p += length;
    }
    for (int i = count; i < REQUEST_PARAMETERS; i++) assert_null(r->doc.parameters[i].name);
}

/* Returns whether two patterns differ only in the names of their parameters. */
static bool is_the_same_but_for_names(const char *a, const char *b)
{
    for (; *a && *a == *b; a++, b++)
        if (*a == '{') a += strcspn(a, "}"), b += strcspn(b, "}");
    return *a == *b;
}

static void test_every_row_is_sound(void **state)
{
    (void)state;
    static const char *const methods[] = {
#define X(id, allow, name) #id,
        ROUTE_METHOD_MAP(X)
#undef X
    };
    int count;
    const struct route *all = routes_all(&count);
    assert_true(count > 10);
    for (int i = 0; i < count; i++) {
        const struct route *r = &all[i];
        assert_true(r->path[0] == '/');
        assert_true(r->ports != 0 && (r->token & ~r->ports) == 0);
        const proto_operation *const operation = route_operation(r);
        assert_true((r->answer != NULL) == (operation ? !proto_is_run(operation) : r->bodies == NULL));
        assert_true(r->bodies == NULL || (r->method == ROUTE_POST && r->token == r->ports && r->doc.body != NULL));
        assert_non_null(r->doc.tag);
        if (operation) assert_true(!r->doc.summary && !r->doc.description && !r->doc.answer);
        else assert_true(r->doc.summary && r->doc.description && r->doc.answer);
        assert_true((r->doc.media != NULL) == (r->doc.schema != NULL));
        assert_true(r->doc.media != NULL || r->shm != ROUTE_ALWAYS || r->doc.status == 204);
        assert_true(!r->keeps_body || (r->bodies == NULL && r->doc.body != NULL));
        check_parameters(r);
        for (int j = 0; j < i; j++) {
            if (!(all[j].ports & r->ports) || !is_the_same_but_for_names(all[j].path, r->path)) continue;
            if (strcmp(all[j].path, r->path) != 0) fail_msg("%s is hidden by %s", r->path, all[j].path);
            if (all[j].method == r->method) fail_msg("%s is there twice", r->path);
        }
        for (unsigned http = PORT_MAIN; http <= PORT_METRICS; http <<= 1) {
            const struct route_match match = routes_find(http, r->path, methods[r->method]);
            if (r->ports & http) assert_ptr_equal(match.route, r);
        }
    }
}

static void test_every_operation_has_a_route_with_its_name_and_path(void **state)
{
    (void)state;
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        const proto_operation *const operation = &proto_operations[op];
        const struct route_match match = routes_find(PORT_MAIN, operation->path, "POST");
        assert_true(match.answers && route_operation(match.route) == operation);
        assert_string_equal(match.route->path, operation->path);
        assert_string_equal(match.route->endpoint, operation->name);
        char body[64];
        snprintf(body, sizeof body, "%sRequest", operation->title);
        assert_string_equal(match.route->doc.body, body);
    }
}

static void test_probes_need_no_token_and_metrics_only_on_the_main_port(void **state)
{
    (void)state;
    static const char *const probes[] = { "/livez",          "/healthz", "/health",
                                          "/v2/health/live", "/readyz",  "/v2/health/ready" };
    for (size_t i = 0; i < ARRAY_SIZE(probes); i++) {
        const struct route_match match = routes_find(PORT_MAIN, probes[i], "GET");
        assert_true(match.answers && match.route->token == 0 && match.route->ports == (PORT_MAIN | PORT_METRICS));
    }
    const struct route_match metrics = routes_find(PORT_METRICS, "/metrics", "GET");
    assert_ptr_equal(metrics.route, routes_find(PORT_MAIN, "/metrics", "GET").route);
    assert_int_equal(metrics.route->token, PORT_MAIN);
    assert_null(routes_find(PORT_METRICS, "/v1/attention/forward", "POST").route);
}

static void test_a_path_is_exactly_that(void **state)
{
    (void)state;
    static const char *const unknown[] = {
        "", "*", "//", "/v1", "/livez/", "/LIVEZ", "/livez ", "/v1/attention/forward/", "/v1//attention/forward"
    };
    for (size_t i = 0; i < ARRAY_SIZE(unknown); i++) assert_null(routes_find(PORT_MAIN, unknown[i], "GET").route);
}

static void test_methods(void **state)
{
    (void)state;
    static const struct {
        const char *path, *method, *allow;
        bool answers;
    } cases[] = {
        { "/livez", "GET", "GET, HEAD", true },
        { "/livez", "HEAD", "GET, HEAD", true },
        { "/livez", "POST", "GET, HEAD", false },
        { "/livez", "get", "GET, HEAD", false },
        { "/livez", "OPTIONS", "GET, HEAD", false },
        { "/livez", "", "GET, HEAD", false },
        { "/v1/attention/forward", "POST", "POST", true },
        { "/v1/attention/forward", "GET", "POST", false },
        { "/v1/attention/backward", "HEAD", "POST", false },
        { "/v1/attention/backward", "PUT", "POST", false },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[ROUTE_ALLOW_BYTES];
        const struct route_match match = routes_find(PORT_MAIN, cases[i].path, cases[i].method);
        /* Metrics label a request by the route of its path, even if the method is wrong. */
        assert_non_null(match.route);
        assert_int_equal(match.answers, cases[i].answers);
        assert_string_equal(route_allow(match.methods, text), cases[i].allow);
    }
}

static void test_a_body_is_read_as_its_content_type_says(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        bool json;
    } cases[] = {
        { NULL, true },
        { "", true },
        { "application/json", true },
        { "Application/JSON; charset=utf-8", true },
        { "application/x-www-form-urlencoded", true },
        { "application/jsonp", false },
        { "text/json", false },
        { "application/safetensors", false },
        { "multipart/form-data; boundary=x", false },
    };
    const struct route *forward = routes_find(PORT_MAIN, "/v1/attention/forward", "POST").route;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct route_body *body = route_body(forward, cases[i].type);
        assert_int_equal(body != NULL, cases[i].json);
        if (body) assert_string_equal(body->media, "application/json");
    }
}

static void test_an_answer_is_written_as_accept_says_and_else_as_the_body_is(void **state)
{
    (void)state;
    static const struct {
        const char *type, *accept;
        const proto_format *format;
    } cases[] = {
        { "application/json", NULL, &proto_json },
        { "application/json", "*/*", &proto_json },
        { "application/json", "application/x-safetensors", &proto_safetensors },
        { "application/json", "application/x-safetensors, */*", &proto_safetensors },
        { "application/json", "application/x-safetensors, application/json", &proto_json },
        { "application/x-safetensors", NULL, &proto_safetensors },
        { "application/x-safetensors", "", &proto_safetensors },
        { "application/x-safetensors", "*/*", &proto_safetensors },
        { "application/x-safetensors", "application/*;q=0.3", &proto_safetensors },
        { "application/x-safetensors", "application/json", &proto_json },
        { "application/x-safetensors", "application/json, text/plain, */*", &proto_json },
        { "application/x-safetensors", "application/json, application/x-safetensors", &proto_safetensors },
        { "application/x-safetensors", "text/html", &proto_json },
    };
    const struct route *forward = routes_find(PORT_MAIN, "/v1/attention/forward", "POST").route;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct route_body *body = route_body(forward, cases[i].type);
        assert_string_equal(body->media, proto_media(body->format));
        assert_ptr_equal(route_answer(forward, body, cases[i].accept)->format, cases[i].format);
    }
}

static void test_the_content_types_of_a_route_are_told(void **state)
{
    (void)state;
    static const char *const also[] = { "text/c", "text/d", NULL };
    static const struct route_body two[] = { { .media = "text/a" }, { .media = "text/b", .also = also }, { 0 } };
    const struct route route = { .bodies = two };
    char text[64], small[10];
    assert_string_equal(route_media(&route, text, sizeof text), "text/a or text/b");
    assert_string_equal(route_media(&route, small, sizeof small), "text/a or");
    assert_ptr_equal(route_body(&route, NULL), &two[0]);
    assert_ptr_equal(route_body(&route, "text/b"), &two[1]);
    assert_ptr_equal(route_body(&route, "text/c"), &two[1]);
    assert_ptr_equal(route_body(&route, "text/d; charset=utf-8"), &two[1]);
    assert_null(route_body(&route, "text/e"));
    assert_string_equal(route_media(routes_find(PORT_MAIN, "/v1/attention/forward", "POST").route, text, sizeof text),
                        "application/json or application/x-safetensors");
}

/* ---- Tests of the patterns of URL paths -------------------------------------------------------------------------- */

enum { LIST, MAKE, ONE, DROP, MINE, APPEND, PART, OTHER, DEEP, ELSEWHERE };
static const struct route table[] = {
    /* The pattern /v1/caches/{id} comes before the literal path /v1/caches/mine. A request for the literal path must
     * get the literal row nevertheless. */
    [LIST] = { ROUTE_GET, "/v1/caches", "caches", PORT_MAIN },
    [MAKE] = { ROUTE_POST, "/v1/caches", "caches", PORT_MAIN },
    [ONE] = { ROUTE_GET, "/v1/caches/{id}", "cache", PORT_MAIN },
    [DROP] = { ROUTE_DELETE, "/v1/caches/{id}", "cache", PORT_MAIN },
    [MINE] = { ROUTE_GET, "/v1/caches/mine", "mine", PORT_MAIN },
    [APPEND] = { ROUTE_POST, "/v1/caches/{id}/append", "append", PORT_MAIN },
    [PART] = { ROUTE_GET, "/v1/caches/{id}/{part}", "part", PORT_MAIN },
    [OTHER] = { ROUTE_GET, "/v1/{kind}/x/append", "other", PORT_MAIN },
    [DEEP] = { ROUTE_GET, "/{a}/{b}/{c}/{d}/end", "deep", PORT_MAIN },
    [ELSEWHERE] = { ROUTE_GET, "/v1/caches/{id}", "cache", PORT_METRICS },
};

static struct route_match find(const char *path, const char *method)
{
    return route_find(table, ARRAY_SIZE(table), PORT_MAIN, path, method);
}

static void test_a_path_finds_its_row_and_its_parameters(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path;
        int row;
        const char *parameters[REQUEST_PARAMETERS];
    } cases[] = {
        { "GET", "/v1/caches", LIST, { 0 } },
        { "POST", "/v1/caches", MAKE, { 0 } },
        { "GET", "/v1/caches/a", ONE, { "a" } },
        { "HEAD", "/v1/caches/a", ONE, { "a" } },
        { "DELETE", "/v1/caches/a", DROP, { "a" } },
        { "GET", "/v1/caches/mine", MINE, { 0 } },
        { "GET", "/v1/caches/mines", ONE, { "mines" } },
        { "GET", "/v1/caches/min", ONE, { "min" } },
        { "GET", "/v1/caches/{id}", ONE, { "{id}" } },
        { "POST", "/v1/caches/a/append", APPEND, { "a" } },
        { "POST", "/v1/caches/append/append", APPEND, { "append" } },
        { "GET", "/v1/caches/a/b", PART, { "a", "b" } },
        { "GET", "/v1/caches/x/appendix", PART, { "x", "appendix" } },
        { "GET", "/v1/tables/x/append", OTHER, { "tables" } },
        { "GET", "/v1/caches/x/y/end", DEEP, { "v1", "caches", "x", "y" } },
        { "GET", "/v1/caches/a%2Fb", ONE, { "a%2Fb" } },
        { "GET", "/v1/caches/..", ONE, { ".." } },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct route_match match = find(cases[i].path, cases[i].method);
        print_message("%s %s\n", cases[i].method, cases[i].path);
        assert_ptr_equal(match.route, &table[cases[i].row]);
        assert_true(match.answers);
        for (int p = 0; p < REQUEST_PARAMETERS; p++) {
            const char *want = cases[i].parameters[p];
            assert_int_equal(match.parameters[p].length, want ? strlen(want) : 0);
            if (want) assert_memory_equal(match.parameters[p].at, want, strlen(want));
        }
    }
}

static void test_a_wrong_method_is_told_all_methods_of_the_path(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path, *allow;
        int row;
    } cases[] = {
        { "DELETE", "/v1/caches", "GET, HEAD, POST", LIST },     { "POST", "/v1/caches/a", "GET, HEAD, DELETE", ONE },
        { "OPTIONS", "/v1/caches/a", "GET, HEAD, DELETE", ONE }, { "delete", "/v1/caches/a", "GET, HEAD, DELETE", ONE },
        { "DELETE", "/v1/caches/mine", "GET, HEAD", MINE },      { "GET", "/v1/caches/a/append", "POST", APPEND },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[ROUTE_ALLOW_BYTES];
        const struct route_match match = find(cases[i].path, cases[i].method);
        print_message("%s %s\n", cases[i].method, cases[i].path);
        assert_false(match.answers);
        assert_ptr_equal(match.route, &table[cases[i].row]);
        assert_string_equal(route_allow(match.methods, text), cases[i].allow);
    }
    char all[ROUTE_ALLOW_BYTES];
    assert_string_equal(route_allow((1u << ROUTE_METHOD_COUNT) - 1, all), "GET, HEAD, POST, DELETE");
    assert_string_equal(route_allow(0, all), "");
}

static void test_a_parameter_is_one_whole_segment(void **state)
{
    (void)state;
    static const char *const unknown[] = { "/v1/caches/",
                                           "/v1/caches//",
                                           "/v1/caches//append",
                                           "/v1/caches/a/",
                                           "/v1/caches/a//",
                                           "/v1/caches/a/append/",
                                           "/v1/cachesa",
                                           "/v1/caches/a/b/c",
                                           "v1/caches/a",
                                           "/V1/caches/a",
                                           "",
                                           "/",
                                           "/v1/caches/a/b/",
                                           "//v1/caches/a" };
    for (size_t i = 0; i < ARRAY_SIZE(unknown); i++)
        if (find(unknown[i], "GET").route != NULL) fail_msg("'%s' leads somewhere", unknown[i]);
}

static void test_a_parameter_has_a_longest_length(void **state)
{
    (void)state;
    char path[300];
    for (int length = ROUTE_PARAMETER_BYTES - 1; length <= 2 * ROUTE_PARAMETER_BYTES; length++) {
        for (int tail = 0; tail < 2; tail++) {
            snprintf(path, sizeof path, "/v1/caches/%0*d%s", length, 0, tail ? "/append" : "");
            const struct route_match match = find(path, "POST");
            assert_int_equal(match.route != NULL, length <= ROUTE_PARAMETER_BYTES);
            if (match.route) assert_int_equal(match.parameters[0].length, length);
        }
    }
}

/* The server decodes all percent-escapes in a path except that of a slash. */
static void test_an_escaped_slash_separates_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *target;
        int row;
        const char *first;
    } cases[] = {
        { "/v1/caches/a%2Fappend", ONE, "a%2Fappend" },
        { "/v1/caches/a%2fb", ONE, "a%2fb" },
        { "/v1/caches/%2F", ONE, "%2F" },
        { "/v1/caches/%61", ONE, "a" },
        { "/v1/caches/m%69ne", MINE, NULL },
        { "/v1/caches/a%20b", ONE, "a b" },
        { "/v1/caches/a%00b", ONE, "a%00b" },
        { "/v1%2Fcaches/a", -1, NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char path[64];
        snprintf(path, sizeof path, "%s", cases[i].target);
        http_head_unescape(path);
        const struct route_match match = find(path, "GET");
        print_message("%s\n", cases[i].target);
        assert_ptr_equal(match.route, cases[i].row < 0 ? NULL : &table[cases[i].row]);
        if (cases[i].first == NULL) continue;
        assert_int_equal(match.parameters[0].length, strlen(cases[i].first));
        assert_memory_equal(match.parameters[0].at, cases[i].first, strlen(cases[i].first));
    }
}

static void test_a_row_is_found_on_its_ports_alone(void **state)
{
    (void)state;
    const int count = ARRAY_SIZE(table);
    assert_ptr_equal(route_find(table, count, PORT_METRICS, "/v1/caches/a", "GET").route, &table[ELSEWHERE]);
    assert_null(route_find(table, count, PORT_METRICS, "/v1/caches", "GET").route);
    assert_null(route_find(table, 0, PORT_MAIN, "/v1/caches", "GET").route);
}

static void test_who_asks_for_a_path_that_is_not_there_is_shown_the_nearest(void **state)
{
#define MODELS "; there is no language model here, " ROUTES_WHERE_TO
    static const struct {
        unsigned port;
        const char *path, *hint;
    } cases[] = {
        { PORT_MAIN, "/v1/attention/forward/", ", did you mean /v1/attention/forward?" },
        { PORT_MAIN, "/V1/Attention/Backward", ", did you mean /v1/attention/backward?" },
        { PORT_MAIN, "/v1/attention/foward", ", did you mean /v1/attention/forward?" },
        { PORT_MAIN, "/api/v2/forward", ", did you mean /v1/attention/forward?" },
        { PORT_MAIN, "/attention/forward//", ", did you mean /v1/attention/forward?" },
        { PORT_MAIN, "/info", ", did you mean /v1/info?" },
        { PORT_MAIN, "/v1/metrics", ", did you mean /metrics?" },
        { PORT_METRICS, "/v1/metrics", ", did you mean /metrics?" },
        /* On the metrics port nothing is suggested, because only the main port has a similar path. */
        { PORT_METRICS, "/v1/attention/foward", "" },
        { PORT_MAIN, "/v1/chat/completions", MODELS },
        { PORT_MAIN, "/v2/models/attention/generate", "; a model has /infer, /ready, /config and /stats" },
        { PORT_MAIN, "/predict", "; " ROUTES_WHERE_TO },
        { PORT_MAIN, "/v1/attention", "; " ROUTES_WHERE_TO },
        { PORT_MAIN, "/ping", ", did you mean /livez?" },
        { PORT_MAIN, "/openapi.yaml", ", did you mean /openapi.json?" },
        { PORT_METRICS, "/ping", "" },
        { PORT_MAIN, "/v1/nothing", "" },
        { PORT_MAIN, "//", "" },
        { PORT_MAIN, "", "" },
        { PORT_MAIN, "*", "" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char hint[ROUTES_HINT_BYTES];
        if (strcmp(routes_hint(cases[i].port, cases[i].path, hint), cases[i].hint) != 0)
            fail_msg("%s: %s", cases[i].path, hint);
    }
    /* A pattern with parameters is never suggested. */
    assert_null(route_nearest(table, ARRAY_SIZE(table), PORT_MAIN, "/v1/caches/a/b/append"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_row_is_sound),
        cmocka_unit_test(test_every_operation_has_a_route_with_its_name_and_path),
        cmocka_unit_test(test_probes_need_no_token_and_metrics_only_on_the_main_port),
        cmocka_unit_test(test_a_path_is_exactly_that),
        cmocka_unit_test(test_methods),
        cmocka_unit_test(test_who_asks_for_a_path_that_is_not_there_is_shown_the_nearest),
        cmocka_unit_test(test_a_body_is_read_as_its_content_type_says),
        cmocka_unit_test(test_an_answer_is_written_as_accept_says_and_else_as_the_body_is),
        cmocka_unit_test(test_the_content_types_of_a_route_are_told),
        cmocka_unit_test(test_a_path_finds_its_row_and_its_parameters),
        cmocka_unit_test(test_a_wrong_method_is_told_all_methods_of_the_path),
        cmocka_unit_test(test_a_parameter_is_one_whole_segment),
        cmocka_unit_test(test_a_parameter_has_a_longest_length),
        cmocka_unit_test(test_an_escaped_slash_separates_nothing),
        cmocka_unit_test(test_a_row_is_found_on_its_ports_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
