/* The table of URLs: every row sound, paths taken as they stand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/http/routes.h"

static void test_every_row_is_sound(void **state)
{
    (void)state;
    int count;
    const struct route *all = routes_all(&count);
    assert_true(count > 10);
    for (int i = 0; i < count; i++) {
        const struct route *r = &all[i];
        assert_true(r->path[0] == '/');
        assert_true(r->ports != 0);
        assert_true(r->body == (r->method == ROUTE_POST)); /* tensors are posted, everything else is fetched */
        assert_true((r->answer != NULL) == !r->body);
        assert_true(!r->body || r->token);
        for (int j = 0; j < i; j++) assert_true(strcmp(all[j].path, r->path) != 0 || (all[j].ports & r->ports) == 0);
        for (unsigned port = PORT_MAIN; port <= PORT_METRICS; port <<= 1)
            if (r->ports & port) assert_ptr_equal(routes_find(r->path, port), r);
    }
}

static void test_probes_need_no_token_and_metrics_only_on_their_own_port(void **state)
{
    (void)state;
    static const char *const probes[] = { "/livez",          "/healthz", "/health",
                                          "/v2/health/live", "/readyz",  "/v2/health/ready" };
    for (size_t i = 0; i < sizeof probes / sizeof *probes; i++) {
        assert_false(routes_find(probes[i], PORT_MAIN)->token);
        assert_false(routes_find(probes[i], PORT_METRICS)->token);
    }
    assert_true(routes_find("/metrics", PORT_MAIN)->token);
    assert_false(routes_find("/metrics", PORT_METRICS)->token);
    assert_null(routes_find("/v1/attention/forward", PORT_METRICS));
}

static void test_a_path_is_exactly_that(void **state)
{
    (void)state;
    static const char *const unknown[] = {
        "", "*", "//", "/v1", "/livez/", "/LIVEZ", "/livez ", "/v1/attention/forward/", "/v1//attention/forward"
    };
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) assert_null(routes_find(unknown[i], PORT_MAIN));
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
        { "/v1/attention/forward", "POST", "POST", true },
        { "/v1/attention/forward", "GET", "POST", false },
        { "/v1/attention/backward", "HEAD", "POST", false },
        { "/v1/attention/backward", "PUT", "POST", false },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct route *r = routes_find(cases[i].path, PORT_MAIN);
        assert_int_equal(route_allows(r, cases[i].method), cases[i].answers);
        assert_string_equal(route_allow(r), cases[i].allow);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_row_is_sound),
        cmocka_unit_test(test_probes_need_no_token_and_metrics_only_on_their_own_port),
        cmocka_unit_test(test_a_path_is_exactly_that),
        cmocka_unit_test(test_methods),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
