/* test_config.c: tests of options from the command line and the environment, and of defaults that depend on the
 * machine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/machine.h"
#include "server/base/config.h"
#include "server/base/config_suggestions.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

extern char **environ;

static enum config_result read_text(struct config *config, const char *text, char message[512])
{
    char *argv[32] = { "attnd" }, copy[512];
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " ")) argv[argc++] = word;
    return config_read(config, argc, argv, message, 512);
}

static int no_environment(void **state)
{
    (void)state;
    for (char **e = environ; *e != NULL;) {
        char name[64];
        if (strncmp(*e, "ATTND_", 6) != 0) {
            e++;
            continue;
        }
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*e, "="), *e);
        unsetenv(name);
        e = environ;
    }
    return 0;
}

static void test_defaults_are_those_of_the_table(void **state)
{
    (void)state;
    struct config c;
    struct attn_machine m;
    char message[512];
    attn_machine_look("", &m);
    assert_int_equal(read_text(&c, "", message), CONFIG_RUN);
    assert_int_equal(c.listen_count, 1);
    assert_string_equal(c.listen[0], "127.0.0.1:8080");
    assert_string_equal(c.devices, "auto");
    assert_int_equal(c.http_threads, m.cores == 1 ? 8 : m.cores == 3 ? 15 : 16);
    assert_int_equal(c.cpu_threads, m.cores);
    assert_true(c.staging_bytes >= INT64_C(1) << 20 && c.staging_bytes <= m.memory_bytes);
    assert_true(c.max_body_bytes == INT64_C(1) << 30 || c.max_body_bytes == c.staging_bytes);
    assert_int_equal(c.device_bytes, 0);
    assert_int_equal(c.queue_depth, 1024);
    assert_int_equal(c.batch_window_us, 0);
    assert_int_equal(c.split_above_ms, 20);
    assert_int_equal(c.max_batch, 64);
    assert_int_equal(c.timeout_ms, 60000);
    assert_int_equal(c.body_timeout_ms, 30000);
    assert_int_equal(c.body_stall_ms, 5000);
    assert_int_equal(c.discard_ms, 10000);
    assert_int_equal(c.discard_bytes, INT64_C(4) << 30);
    assert_int_equal(c.drain_ms, 30000);
    assert_null(c.token_file);
    assert_null(c.tls_cert);
    assert_null(c.tls_key);
    assert_null(c.cors_origin);
    assert_null(c.metrics_listen);
    assert_false(c.supervise);
    assert_string_equal(c.log_format, "text");
    assert_string_equal(c.log_level, "info");
}

static void test_a_flag_wins_over_the_environment_and_that_over_the_default(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    setenv("ATTND_QUEUE_DEPTH", "7", 1);
    setenv("ATTND_MAX_BATCH", "9", 1);
    setenv("ATTND_LOG_LEVEL", "", 1);
    setenv("ATTND_SUPERVISE", "true", 1);
    assert_int_equal(read_text(&c, "--queue-depth=8", message), CONFIG_RUN);
    assert_int_equal(c.queue_depth, 8);
    assert_int_equal(c.max_batch, 9);
    assert_string_equal(c.log_level, "info");
    assert_true(c.supervise);
    assert_int_equal(read_text(&c, "--supervise=off", message), CONFIG_RUN);
    assert_false(c.supervise);
}

static void test_both_ways_to_write_a_value(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    assert_int_equal(
        read_text(&c, "--max-body-bytes 3M --timeout-ms=5 --supervise --log-format json --device-bytes 2g", message),
        CONFIG_RUN);
    assert_int_equal(c.max_body_bytes, 3 << 20);
    assert_int_equal(c.timeout_ms, 5);
    assert_true(c.supervise);
    assert_string_equal(c.log_format, "json");
    assert_true(c.device_bytes == INT64_C(2) << 30);
}

static void test_listen_addresses_add_up_and_replace_the_level_below(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    /* the comma ends the path of the unix socket, so y is read as an address, and is refused */
    setenv("ATTND_LISTEN", "127.0.0.1:1,[::1]:2,unix:/tmp/x,y", 1);
    assert_int_equal(read_text(&c, "", message), CONFIG_BAD);
    setenv("ATTND_LISTEN", "127.0.0.1:1,[::1]:2", 1);
    assert_int_equal(read_text(&c, "", message), CONFIG_RUN);
    assert_int_equal(c.listen_count, 2);
    assert_string_equal(c.listen[0], "127.0.0.1:1");
    assert_string_equal(c.listen[1], "[::1]:2");
    assert_int_equal(
        read_text(&c, "--listen localhost:80 --listen unix:/run/a.sock --listen [fe80::1%eth0]:0", message),
        CONFIG_RUN);
    assert_int_equal(c.listen_count, 3);
    assert_string_equal(c.listen[1], "unix:/run/a.sock");
}

static void test_every_refusal_names_option_value_and_rule(void **state)
{
    (void)state;
    static const struct {
        const char *args, *says;
    } cases[] = {
        { "--queue-depth x", "--queue-depth: 'x' is not a whole number from 1 to 1048576" },
        { "--queue-depth=0", "--queue-depth: '0' is not a whole number from 1 to 1048576" },
        { "--queue-depth=-1", "--queue-depth: '-1' is not a whole number from 1 to 1048576" },
        { "--queue-depth=1048577", "--queue-depth: '1048577' is not a whole number from 1 to 1048576" },
        { "--queue-depth=99999999999999999999",
          "--queue-depth: '99999999999999999999' is not a whole number from 1 to 1048576" },
        { "--queue-depth=", "--queue-depth: '' is not a whole number from 1 to 1048576" },
        { "--queue-depth=1K", "--queue-depth: '1K' is not a whole number from 1 to 1048576" },
        { "--queue-depth", "--queue-depth: a value is missing (N)" },
        { "--http-threads=257", "--http-threads: '257' is not a whole number from 0 to 256" },
        { "--batch-window-us=2000000", "--batch-window-us: '2000000' is not a whole number from 0 to 1000000" },
        { "--max-body-bytes=1T",
          "--max-body-bytes: '1T' is not a size from 1K to 1024G (bytes, or with K, M or G); write 1024G" },
        { "--max-body-bytes=9223372036854775807G",
          "--max-body-bytes: '9223372036854775807G' is not a size from 1K to 1024G (bytes, or with K, M or G)" },
        { "--max-body-bytes=1.5G",
          "--max-body-bytes: '1.5G' is not a size from 1K to 1024G (bytes, or with K, M or G); write 1536M" },
#define NO_SIZE(value) "--kv-bytes: '" value "' is not a size from 0 to 16384G (bytes, or with K, M or G)"
        { "--kv-bytes=1GiB", NO_SIZE("1GiB") "; write 1G" },
        { "--kv-bytes=512MB", NO_SIZE("512MB") "; write 512M" },
        { "--kv-bytes=2T", NO_SIZE("2T") "; write 2048G" },
        { "--kv-bytes=0.3m", NO_SIZE("0.3m") "; write 307K" },
        { "--kv-bytes=1e9", NO_SIZE("1e9") "; write 1000000000" },
        { "--kv-bytes=17000G", NO_SIZE("17000G") },
        { "--kv-bytes=-1G", NO_SIZE("-1G") },
        { "--kv-bytes=inf", NO_SIZE("inf") },
        { "--kv-bytes=1e300G", NO_SIZE("1e300G") },
        { "--kv-bytes=half", NO_SIZE("half") },
        { "--max-body-bytes=512", "--max-body-bytes: '512' is not a size from 1K to 1024G (bytes, or with K, M or G)" },
        { "--staging-bytes=64K", "--staging-bytes: '64K' is not a size from 1M to 16384G (bytes, or with K, M or G)" },
        { "--log-format=xml", "--log-format: 'xml' is not one of: text json" },
        { "--log-format=tex", "--log-format: 'tex' is not one of: text json" },
        { "--log-level=loud", "--log-level: 'loud' is not one of: debug info warn error" },
        { "--log-level=warning", "--log-level: 'warning' is not one of: debug info warn error; write warn" },
        { "--log-level=trace", "--log-level: 'trace' is not one of: debug info warn error; write debug" },
        { "--log-format=logfmt", "--log-format: 'logfmt' is not one of: text json; write text" },
        { "--timeout-ms=30s", "--timeout-ms: '30s' is not a whole number from 1 to 86400000; write 30000" },
        { "--timeout-ms=1.5m", "--timeout-ms: '1.5m' is not a whole number from 1 to 86400000; write 90000" },
        { "--timeout-ms=500ms", "--timeout-ms: '500ms' is not a whole number from 1 to 86400000; write 500" },
        { "--timeout-ms=30d", "--timeout-ms: '30d' is not a whole number from 1 to 86400000" },
        { "--timeout-ms=25h", "--timeout-ms: '25h' is not a whole number from 1 to 86400000" },
        { "--supervise=maybe", "--supervise: 'maybe' is not on or off" },
        { "--devices=gpu",
          "--devices: 'gpu' is not auto, all, cpu, or different GPU numbers from 0 to 63 such as 0,1; write all" },
        { "--devices=cuda:3",
          "--devices: 'cuda:3' is not auto, all, cpu, or different GPU numbers from 0 to 63 such as 0,1; write 3" },
        { "--devices=cuda:64",
          "--devices: 'cuda:64' is not auto, all, cpu, or different GPU numbers from 0 to 63 such as 0,1" },
        { "--devices=0,0",
          "--devices: '0,0' is not auto, all, cpu, or different GPU numbers from 0 to 63 such as 0,1" },
        { "--devices=0,", "--devices: '0,' is not auto, all, cpu, or different GPU numbers from 0 to 63 such as 0,1" },
        { "--tls-cert=/dev/null", "--tls-cert: needs --tls-key too" },
        { "--tls-key=/dev/null", "--tls-key: needs --tls-cert too" },
        { "--cors-origin=example.org",
          "--cors-origin: 'example.org' is not an origin such as https://example.org, or *" },
        { "--cors-origin=https://example.org/",
          "--cors-origin: 'https://example.org/' is not an origin such as https://example.org, or *" },
        { "--cors-origin=* --token-file=/dev/null", "--cors-origin: '*' cannot go with --token-file, name the origin" },
#define NO_ADDRESS(value)                                                                                           \
    "--listen: '" value "' is not ADDR:PORT, [IPV6]:PORT with a port from 0 to 65535, or unix:PATH of at most 107 " \
    "bytes"
        { "--listen=9000", NO_ADDRESS("9000") "; write 127.0.0.1:9000" },
        { "--listen=:9000", NO_ADDRESS(":9000") "; write 127.0.0.1:9000" },
        { "--listen=*:80", NO_ADDRESS("*:80") "; write 0.0.0.0:80" },
        { "--listen=0.0.0.0", NO_ADDRESS("0.0.0.0") "; write 0.0.0.0:8080" },
        { "--listen=::1", NO_ADDRESS("::1") "; write [::1]:8080" },
        { "--listen=::1:80", NO_ADDRESS("::1:80") "; write [::1]:80" },
        { "--listen=http://localhost:80/", NO_ADDRESS("http://localhost:80/") "; write localhost:80" },
        { "--listen=/run/attnd.sock", NO_ADDRESS("/run/attnd.sock") "; write unix:/run/attnd.sock" },
        { "--listen=1.2.3:80", NO_ADDRESS("1.2.3:80") },
        { "--listen=a:65536", NO_ADDRESS("a:65536") },
        { "--listen=99999", NO_ADDRESS("99999") },
        { "--listen=unix:", NO_ADDRESS("unix:") },
        { "--metrics-listen=9001",
          "--metrics-listen: '9001' is not ADDR:PORT, [IPV6]:PORT with a port from 0 to 65535, or unix:PATH of at most "
          "107 bytes; write 127.0.0.1:9001" },
        { "--listen=a:1 --listen=a:1", "--listen: 'a:1' is given twice" },
        { "--listen=a:1 --metrics-listen=a:1", "--metrics-listen: 'a:1' is a --listen address already" },
        { "--listen=a:1 --listen=a:2 --listen=a:3 --listen=a:4 --listen=a:5 --listen=a:6 --listen=a:7 --listen=a:8 "
          "--listen=a:9",
          "--listen: 'a:9' is one too many, at most 8 addresses" },
        { "--max-body-bytes=2M --staging-bytes=1M", "--max-body-bytes: 2M is more than --staging-bytes, which is 1M" },
        { "--queue-dept=4", "--queue-dept is not an option; did you mean --queue-depth? (attnd --help lists them)" },
        { "--lisetn=4", "--lisetn is not an option; did you mean --listen? (attnd --help lists them)" },
        { "--zzzzzzzzzzzzzzz", "--zzzzzzzzzzzzzzz is not an option (attnd --help lists them)" },
        { "--queue-depthx=4",
          "--queue-depthx is not an option; did you mean --queue-depth? (attnd --help lists them)" },
        { "--=4", "-- is not an option (attnd --help lists them)" },
        { "8080", "unexpected argument '8080' (options begin with --, attnd --help lists them)" },
#define IS_NO_OPTION(hint) " is not an option; " hint " (attnd --help lists them)"
        { "-p 8000", "-p" IS_NO_OPTION("write --listen 127.0.0.1:PORT") },
        { "--port 8000", "--port" IS_NO_OPTION("write --listen 127.0.0.1:PORT") },
        { "--PORT=8000", "--PORT" IS_NO_OPTION("write --listen 127.0.0.1:PORT") },
        { "--host 0.0.0.0", "--host" IS_NO_OPTION("write --listen ADDR:8080") },
        { "--bind 0.0.0.0:80", "--bind" IS_NO_OPTION("write --listen ADDR:PORT") },
        { "--gpu 0", "--gpu" IS_NO_OPTION("write --devices 0") },
        { "--cpu", "--cpu" IS_NO_OPTION("write --devices cpu") },
        { "--verbose", "--verbose" IS_NO_OPTION("write --log-level debug") },
        { "-v", "-v" IS_NO_OPTION("write --log-level debug") },
        { "--threads 4", "--threads" IS_NO_OPTION("write --cpu-threads N") },
        { "--num_threads 4", "--num_threads" IS_NO_OPTION("write --cpu-threads N") },
        { "--api-key=x", "--api-key" IS_NO_OPTION("write --token-file FILE") },
        { "--restart", "--restart" IS_NO_OPTION("write --supervise") },
        { "--config x", "--config" IS_NO_OPTION("there is no file of options: give flags, or ATTND_ variables") },
        { "-listen=a:1", "-listen" IS_NO_OPTION("did you mean --listen?") },
        { "---listen=a:1", "---listen" IS_NO_OPTION("did you mean --listen?") },
        { "--Queue_Depth=1", "--Queue_Depth" IS_NO_OPTION("did you mean --queue-depth?") },
        { "-x", "-x is not an option (attnd --help lists them)" },
        { "-", "- is not an option (attnd --help lists them)" },
        { "serve",
          "unexpected argument 'serve'; it serves without being told to: attnd alone is enough (options begin with "
          "--, attnd --help lists them)" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config c;
        char message[512];
        print_message("%s\n", cases[i].args);
        assert_int_equal(read_text(&c, cases[i].args, message), CONFIG_BAD);
        assert_string_equal(message, cases[i].says);
    }
}

static void test_a_file_that_cannot_be_read_is_no_wrong_option(void **state)
{
    static const char *const flags[] = { "--token-file", "--tls-cert", "--tls-key" };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(flags); i++) {
        struct config c;
        char message[512], args[64], says[128];
        snprintf(args, sizeof args, "%s=/no/such", flags[i]);
        snprintf(says, sizeof says, "%s: '/no/such' cannot be read: No such file or directory", flags[i]);
        assert_int_equal(read_text(&c, args, message), CONFIG_BAD_FILE);
        assert_string_equal(message, says);
    }
}

static void test_a_variable_that_is_no_option_is_refused_like_one(void **state)
{
    static const struct {
        const char *name, *value, *says; /* says: the error message; NULL: the server ignores the variable */
    } cases[] = {
        { "ATTND_QUEUE_DEPHT", "4",
          "ATTND_QUEUE_DEPHT is not an option; did you mean ATTND_QUEUE_DEPTH? (attnd --help lists them)" },
        { "ATTND_PORT", "8000",
          "ATTND_PORT is not an option; write ATTND_LISTEN=127.0.0.1:PORT (attnd --help lists them)" },
        { "ATTND_VERBOSE", "1",
          "ATTND_VERBOSE is not an option; write ATTND_LOG_LEVEL=debug (attnd --help lists them)" },
        { "ATTND_ZZZZZZZZZZZZZZZ", "1", "ATTND_ZZZZZZZZZZZZZZZ is not an option (attnd --help lists them)" },
        { "ATTND_", "1", "ATTND_ is not an option (attnd --help lists them)" },
        { "ATTND_ZZZZZZZZZZZZZZZ", "", NULL },
        /* a variable of the kernels library, not of the server */
        { "ATTN_CPU_ISA", "portable", NULL },
        /* the supervisor process sets this variable for the server process */
        { "ATTND_INHERITED_SOCKETS", "3", NULL },
        /* variables that Kubernetes and Docker set for a service named attnd */
        { "ATTND_PORT", "tcp://10.0.0.1:8080", NULL },
        { "ATTND_SERVICE_HOST", "10.0.0.1", NULL },
        { "ATTND_SERVICE_PORT", "8080", NULL },
        { "ATTND_SERVICE_PORT_HTTP", "8080", NULL },
        { "ATTND_CPU_SERVICE_HOST", "10.0.0.1", NULL },
        { "ATTND_PORT_8080_TCP", "tcp://10.0.0.1:8080", NULL },
        { "ATTND_PORT_8080_TCP_PROTO", "tcp", NULL },
        { "ATTND_PORT_8080_TCP_PORT", "8080", NULL },
        { "ATTND_CPU_PORT_8080_UDP_ADDR", "10.0.0.1", NULL },
        { "ATTND_NAME", "/client/attnd", NULL },
        { "ATTND_CPU_NAME", "/client/attnd-cpu", NULL },
        { "ATTND_ENV_PATH", "/bin", NULL },
        { "ATTND_BINARY", "/x/build/attnd", NULL },
        { "ATTND_URL", "http://127.0.0.1:8080", NULL },
        { "ATTND_TOKEN", "secret", NULL },
        { "ATTND_SLOWER", "10", NULL },
        { "ATTND_PUBLISH", "0.0.0.0:8080", NULL },
        { "ATTND_BINARYS", "x", "ATTND_BINARYS is not an option (attnd --help lists them)" },
        { "ATTND_NAME", "mine", "ATTND_NAME is not an option (attnd --help lists them)" },
        { "ATTND_PORT_8080_TCP_ADDRESS", "10.0.0.1",
          "ATTND_PORT_8080_TCP_ADDRESS is not an option (attnd --help lists them)" },
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct config c;
        char message[512];
        print_message("%s=%s\n", cases[i].name, cases[i].value);
        setenv(cases[i].name, cases[i].value, 1);
        assert_int_equal(read_text(&c, "", message), cases[i].says ? CONFIG_BAD : CONFIG_RUN);
        assert_string_equal(message, cases[i].says ? cases[i].says : "");
        unsetenv(cases[i].name);
    }
}

static void test_a_suggestion_names_an_option_that_exists(void **state)
{
    (void)state;
    for (const struct config_suggestion *suggestion = config_suggestions; suggestion->names != NULL; suggestion++) {
        struct config c;
        char message[512], names[512], *rest = NULL;
        assert_true((size_t)snprintf(names, sizeof names, "%s", suggestion->names) < sizeof names);
        for (char *name = strtok_r(names, " ", &rest); name != NULL; name = strtok_r(NULL, " ", &rest))
            if (config_suggestion(name) != suggestion) fail_msg("'%s' stands in two rows", name);
        if (suggestion->instead != NULL) continue;
        char flag[64];
        snprintf(flag, sizeof flag, "--%s", suggestion->flag);
        (void)read_text(&c, flag, message);
        if (strstr(message, "is not an option") != NULL) fail_msg("%s: %s", suggestion->names, message);
    }
    assert_ptr_equal(config_suggestion("HTTP_Port"), config_suggestion("port"));
    assert_null(config_suggestion(""));
    assert_null(config_suggestion("por"));
    assert_null(config_suggestion("port p"));
}

static void test_a_refusal_names_the_variable_that_holds_the_value(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    setenv("ATTND_MAX_BATCH", "many", 1);
    assert_int_equal(read_text(&c, "", message), CONFIG_BAD);
    assert_string_equal(message, "ATTND_MAX_BATCH: 'many' is not a whole number from 1 to 1024");
}

static void test_help_comes_first(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    setenv("ATTND_MAX_BATCH", "many", 1);
    assert_int_equal(read_text(&c, "--nonsense --help", message), CONFIG_EXIT_OK);
    assert_int_equal(read_text(&c, "--version", message), CONFIG_EXIT_OK);
}

static void test_a_default_body_limit_follows_a_smaller_staging_memory(void **state)
{
    (void)state;
    struct config c;
    char message[512];
    assert_int_equal(read_text(&c, "--staging-bytes=8M", message), CONFIG_RUN);
    assert_int_equal(c.max_body_bytes, 8 << 20);
}

static void test_with_few_open_files_there_are_fewer_connections(void **state)
{
    (void)state;
    static const struct {
        /* connections: how many the server allows; 0: the server does not start */
        int limit, http_threads, connections;
    } cases[] = { { 300, 16, 172 }, { 256, 16, 128 }, { 255, 16, 94 }, { 128, 16, 31 },   { 128, 8, 39 },
                  { 98, 16, 16 },   { 96, 16, 0 },    { 128, 40, 0 },  { 1000, 128, 872 } };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        if (fork() == 0) {
            const struct rlimit few = { .rlim_cur = (rlim_t)cases[i].limit, .rlim_max = (rlim_t)cases[i].limit };
            struct config c;
            char message[512], options[64];
            int wrong = setrlimit(RLIMIT_NOFILE, &few) != 0;
            snprintf(options, sizeof options, "--http-threads=%d", cases[i].http_threads);
            const enum config_result result = read_text(&c, options, message);
            if (cases[i].connections == 0) wrong |= result != CONFIG_BAD;
            else
                wrong |= result != CONFIG_RUN || c.max_connections != cases[i].connections ||
                         c.open_files != cases[i].limit;
            _exit(wrong);
        }
        int status;
        assert_true(wait(&status) > 0);
        if (status != 0) fail_msg("case %zu", i);
    }
}

/* A process cannot raise its limit on open files again, so a child process lowers it. */
static void test_connections_fit_the_limit_on_open_files(void **state)
{
    (void)state;
    const struct rlimit few = { .rlim_cur = 100, .rlim_max = 1000 };
    if (fork() == 0) {
        struct config c;
        char message[512];
        struct rlimit now;
        int wrong = setrlimit(RLIMIT_NOFILE, &few) != 0;
        wrong |= read_text(&c, "", message) != CONFIG_RUN || c.max_connections != 1000 - 128;
        wrong |= getrlimit(RLIMIT_NOFILE, &now) != 0 || now.rlim_cur != 1000;
        wrong |= read_text(&c, "--max-connections=500", message) != CONFIG_RUN || c.max_connections != 500;
        wrong |= read_text(&c, "--max-connections=2000", message) != CONFIG_BAD;
        wrong |=
            strcmp(
                message,
                "--max-connections: 2000 connections need 2128 open files, but the limit here is 1000 (ulimit -n)") !=
            0;
        _exit(wrong);
    }
    int status;
    assert_true(wait(&status) > 0);
    assert_int_equal(status, 0);
}

static char *text_of(void (*write)(FILE *))
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    write(f);
    fclose(f);
    return text;
}

static void test_help_fits_100_columns_and_shows_flag_and_variable(void **state)
{
    (void)state;
    char *help = text_of(config_help), *table = text_of(config_help_markdown);
    for (const char *line = help; *line;) {
        const size_t length = strcspn(line, "\n");
        if (length > 100) fail_msg("%.*s", (int)length, line);
        line += length + 1;
    }
    static const char *const all[] = { "listen",          "devices",         "http-threads", "cpu-threads",
                                       "max-body-bytes",  "staging-bytes",   "device-bytes", "max-connections",
                                       "queue-depth",     "batch-window-us", "max-batch",    "timeout-ms",
                                       "body-timeout-ms", "drain-ms",        "token-file",   "tls-cert",
                                       "tls-key",         "cors-origin",     "supervise",    "log-format",
                                       "log-level",       "metrics-listen",  "watchdog-ms",  "token-share",
                                       "body-stall-ms",   "max-receiving",   "discard-ms",   "discard-bytes" };
    for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
        char flag[64], env[64] = "ATTND_";
        snprintf(flag, sizeof flag, "--%s", all[i]);
        for (size_t k = 0; all[i][k]; k++)
            env[6 + k] = (char)(all[i][k] == '-' ? '_' : all[i][k] - 'a' + 'A'), env[7 + k] = '\0';
        assert_non_null(strstr(help, flag));
        assert_non_null(strstr(help, env));
        assert_non_null(strstr(table, flag));
        assert_non_null(strstr(table, env));
    }
    free(help);
    free(table);
}

static void test_options_md_has_this_table(void **state)
{
    (void)state;
    FILE *f = fopen("server/OPTIONS.md", "r");
    if (f == NULL) {
        print_message("no server/OPTIONS.md here\n");
        skip();
    }
    static char shown[1 << 20];
    const size_t used = fread(shown, 1, sizeof shown - 1, f);
    fclose(f);
    shown[used] = '\0';
    char *table = text_of(config_help_markdown);
    if (strstr(shown, table) == NULL)
        fail_msg("server/OPTIONS.md has not the table that build/attnd --help-markdown prints:\n%s", table);
    free(table);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, no_environment, no_environment)
    const struct CMUnitTest tests[] = {
        TEST(test_defaults_are_those_of_the_table),
        TEST(test_a_flag_wins_over_the_environment_and_that_over_the_default),
        TEST(test_both_ways_to_write_a_value),
        TEST(test_listen_addresses_add_up_and_replace_the_level_below),
        TEST(test_every_refusal_names_option_value_and_rule),
        TEST(test_a_file_that_cannot_be_read_is_no_wrong_option),
        TEST(test_a_variable_that_is_no_option_is_refused_like_one),
        TEST(test_a_suggestion_names_an_option_that_exists),
        TEST(test_a_refusal_names_the_variable_that_holds_the_value),
        TEST(test_help_comes_first),
        TEST(test_a_default_body_limit_follows_a_smaller_staging_memory),
        TEST(test_connections_fit_the_limit_on_open_files),
        TEST(test_with_few_open_files_there_are_fewer_connections),
        TEST(test_help_fits_100_columns_and_shows_flag_and_variable),
        TEST(test_options_md_has_this_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
