/* test_peer.c: tests of the client addresses in the log, with and without proxies, and of connections whose first bytes
 * are not HTTP. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

#include <cmocka.h>

#include "server/base/limits.h"
#include "server/base/peer.h"
#include "server/http/first_bytes.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static void test_an_address_is_written_as_the_system_writes_it(void **state)
{
    (void)state;
    char text[PEER_BYTES];
    struct sockaddr_in four = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0x0a010203) };
    struct sockaddr_in6 six = { .sin6_family = AF_INET6 };
    const struct sockaddr local = { .sa_family = AF_UNIX }, none = { .sa_family = AF_UNSPEC };
    assert_string_equal(peer_text((struct sockaddr *)&four, text), "10.1.2.3");
    inet_pton(AF_INET6, "2001:DB8:0::1", &six.sin6_addr);
    assert_string_equal(peer_text((struct sockaddr *)&six, text), "2001:db8::1");
    inet_pton(AF_INET6, "::ffff:10.1.2.3", &six.sin6_addr);
    assert_string_equal(peer_text((struct sockaddr *)&six, text), "10.1.2.3");
    assert_string_equal(peer_text(&local, text), "unix");
    assert_string_equal(peer_text(&none, text), "-");
}

static void test_a_network_is_an_address_with_or_without_its_bits(void **state)
{
    static const char *const good[] = { "10.0.0.1", "10.0.0.0/8", "0.0.0.0/0",   "::1", "fd00::/8",
                                        "::/0",     "::/128",     "10.0.0.1/32", "unix" };
    static const char *const bad[] = {
        "",  "10.0.0", "10.0.0.0/33", "::/129",      "10.0.0.0/", "10.0.0.0/-1", "localhost",
        "*", "Unix",   "/8",          "10.0.0.1:80", "[::1]",     "10.0.0.0/8/8"
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(good); i++)
        if (!peer_is_network(good[i])) fail_msg("%s", good[i]);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        if (peer_is_network(bad[i])) fail_msg("%s", bad[i]);
}

static void test_only_what_lies_in_a_network_is_trusted(void **state)
{
    static const char *const networks[] = { "10.0.0.1", "192.168.4.0/23", "fd00::/9", "unix" };
    static const struct {
        const char *address;
        bool trusted;
    } cases[] = {
        { "10.0.0.1", true },
        { "10.0.0.2", false },
        { "192.168.5.255", true },
        { "192.168.6.0", false },
        { "192.168.3.255", false },
        { "::ffff:10.0.0.1", true },
        { "fd7f::1", true },
        { "fd80::1", false },
        { "unix", true },
        { "-", false },
        { "", false },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (peer_is_trusted(networks, ARRAY_SIZE(networks), cases[i].address) != cases[i].trusted)
            fail_msg("%s", cases[i].address);
    assert_false(peer_is_trusted(networks, 3, "unix"));
    assert_false(peer_is_trusted(networks, 0, "10.0.0.1"));
}

static void test_the_last_untrusted_address_is_the_peer(void **state)
{
    static const char *const networks[] = { "10.0.0.0/8", "fd00::/8" };
    static const struct {
        const char *lines[3], *peer;
    } cases[] = {
        { { NULL }, "10.9.9.9" },
        { { "1.2.3.4" }, "1.2.3.4" },
        /* The client may have written the first entry of X-Forwarded-For itself. */
        { { "6.6.6.6, 1.2.3.4" }, "1.2.3.4" },
        { { "6.6.6.6, 1.2.3.4, 10.0.0.7,10.0.0.8" }, "1.2.3.4" },
        { { "6.6.6.6", "1.2.3.4 , 10.0.0.7", "\t10.0.0.8 " }, "1.2.3.4" },
        { { "2001:DB8::0:1, fd00::1" }, "2001:db8::1" },
        { { "[2001:db8::1]:4711" }, "2001:db8::1" },
        { { "1.2.3.4:4711" }, "1.2.3.4" },
        { { "::ffff:1.2.3.4" }, "1.2.3.4" },
        /* All entries are trusted proxies, so the first one is the client. */
        { { "10.0.0.5, 10.0.0.6" }, "10.0.0.5" },
        /* "unknown" is no address, so neither this entry nor those before it are trusted. */
        { { "1.2.3.4, unknown" }, "10.9.9.9" },
        { { "1.2.3.4, unknown, 10.0.0.7" }, "10.0.0.7" },
        { { "1.2.3.4, " }, "10.9.9.9" },
        { { "" }, "10.9.9.9" },
        { { ",,,,,,,," }, "10.9.9.9" },
        { { "1.2.3.4\" status=200" }, "10.9.9.9" },
        { { "0123456789012345678901234567890123456789012345678901234567890123456789" }, "10.9.9.9" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[PEER_BYTES] = "";
        int count = 0;
        while (count < 3 && cases[i].lines[count] != NULL) count++;
        assert_string_equal(peer_forwarded(networks, ARRAY_SIZE(networks), "10.9.9.9", cases[i].lines, count, text),
                            cases[i].peer);
    }
}

static void test_first_bytes_of_another_protocol_are_known(void **state)
{
#define BYTES(text) text, sizeof text - 1
    static const struct {
        const char *bytes;
        size_t count;
        bool tls;
        enum first_bytes what;
    } cases[] = {
        { BYTES("\x16\x03\x01\x02\x00"), false, FIRST_BYTES_TLS },
        { BYTES("\x16\x03\x01\x02\x00"), true, FIRST_BYTES_NOTHING },
        { BYTES("\x16"), false, FIRST_BYTES_NOTHING },
        { BYTES("GET / HTTP/1.1\r\n"), false, FIRST_BYTES_NOTHING },
        { BYTES("GET /"), true, FIRST_BYTES_PLAIN },
        { BYTES("DELET"), true, FIRST_BYTES_PLAIN },
        { BYTES("\x15\x03\x01\x00\x02"), true, FIRST_BYTES_NOTHING },
        { BYTES("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), false, FIRST_BYTES_HTTP2 },
        { BYTES("PRI *"), true, FIRST_BYTES_HTTP2 },
        { BYTES("PRINT"), false, FIRST_BYTES_NOTHING },
        { BYTES("POST"), false, FIRST_BYTES_NOTHING },
        { "", 0, true, FIRST_BYTES_NOTHING },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_int_equal(first_bytes_of(cases[i].bytes, cases[i].count, cases[i].tls), cases[i].what);
}

static void test_a_reason_is_told_once_a_minute_with_how_many_it_stands_for(void **state)
{
    struct first_bytes_turn turn = { 0 };
    uint64_t count;
    (void)state;
    assert_true(first_bytes_is_due(&turn, 5, &count));
    assert_int_equal(count, 1);
    for (int i = 0; i < 1000; i++) assert_false(first_bytes_is_due(&turn, 5 + i * FIRST_BYTES_LOG_MS / 1000, &count));
    assert_true(first_bytes_is_due(&turn, 5 + FIRST_BYTES_LOG_MS, &count));
    assert_int_equal(count, 1001);
    assert_false(first_bytes_is_due(&turn, 6 + FIRST_BYTES_LOG_MS, &count));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_address_is_written_as_the_system_writes_it),
        cmocka_unit_test(test_a_network_is_an_address_with_or_without_its_bits),
        cmocka_unit_test(test_only_what_lies_in_a_network_is_trusted),
        cmocka_unit_test(test_the_last_untrusted_address_is_the_peer),
        cmocka_unit_test(test_first_bytes_of_another_protocol_are_known),
        cmocka_unit_test(test_a_reason_is_told_once_a_minute_with_how_many_it_stands_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
