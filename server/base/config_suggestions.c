/* config_suggestions.c: option names of other servers, and hints for values that were written in the form of another
 * program. */
#include "server/base/config_suggestions.h"

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/text.h"
#include "server/base/config_internal.h"

enum { NAME_BYTES = 64 }; /* longest name of an option, with the NUL; a longer name matches none */

const struct config_suggestion config_suggestions[] = {
    { "port p http-port", "listen", "127.0.0.1:PORT", NULL },
    { "host h hostname http-address", "listen", "ADDR:8080", NULL },
    { "bind bind-address b l address addr", "listen", "ADDR:PORT", NULL },
    { "socket unix-socket uds", "listen", "unix:PATH", NULL },
    { "metrics-port", "metrics-listen", "127.0.0.1:PORT", NULL },
    { "metrics-address", "metrics-listen", "ADDR:PORT", NULL },
    { "gpu gpu-id", "devices", "0", NULL },
    { "gpus cuda tensor-parallel-size", "devices", "all", NULL },
    { "device d backend", "devices", "auto", NULL },
    { "cpu cpu-only no-gpu", "devices", "cpu", NULL },
    { "threads t num-threads j", "cpu-threads", "N", NULL },
    { "workers w http-thread-count", "http-threads", "N", NULL },
    { "verbose v log-verbose debug", "log-level", "debug", NULL },
    { "quiet q", "log-level", "warn", NULL },
    { "silent", "log-level", "error", NULL },
    { "json log-json json-logs", "log-format", "json", NULL },
    { "timeout request-timeout", "timeout-ms", "N", NULL },
    { "timeout-keep-alive", NULL, NULL, "how long an idle connection is kept cannot be set" },
    { "grace-period timeout-graceful-shutdown", "drain-ms", "N", NULL },
    { "max-request-size client-max-body-size", "max-body-bytes", "SIZE", NULL },
    { "memory max-memory", "staging-bytes", "SIZE", NULL },
    { "gpu-memory gpu-memory-utilization", "device-bytes", "SIZE", NULL },
    { "max-batch-size batch-size max-num-seqs", "max-batch", "N", NULL },
    { "max-queue-delay-microseconds", "batch-window-us", "N", NULL },
    { "queue queue-size backlog", "queue-depth", "N", NULL },
    { "limit-concurrency", "max-connections", "N", NULL },
    { "cert ssl-cert ssl-certfile certfile", "tls-cert", "FILE", NULL },
    { "ssl-key ssl-keyfile keyfile", "tls-key", "FILE", NULL },
    { "trust-proxy trusted-proxies proxy-headers forwarded-allow-ips real-ip set-real-ip-from", "trusted-proxy", "ADDR",
      NULL },
    { "token api-key auth", "token-file", "FILE", NULL },
    { "cors allow-origin allowed-origins cors-allow-origin", "cors-origin", "ORIGIN", NULL },
    { "allow-client-shm client-shm shm shared-memory shm-prefix", "allow-shm", "PREFIX", NULL },
    { "cuda-shm cuda-shared-memory allow-client-cuda-shm cuda-ipc", "allow-cuda-shm", "", NULL },
    { "restart", "supervise", "", NULL },
    { "config c config-file", NULL, NULL, "there is no file of options: give flags, or ATTND_ variables" },
    { "daemon daemonize", NULL, NULL,
      "it stays in the foreground: let systemd start it (deploy/systemd), or a shell with &" },
    { "model m", NULL, NULL, "it computes attention of tensors that it is sent, and has no models" },
    { "serve server start run", NULL, NULL, "it serves without being told to: attnd alone is enough" },
    { "help", NULL, NULL, "it is --help" },
    { "version", NULL, NULL, "it is --version" },
    { NULL, NULL, NULL, NULL },
};

const struct config_suggestion *config_suggestion(const char *name)
{
    char dashed[NAME_BYTES];
    size_t i;
    for (i = 0; name[i] != '\0' && i < NAME_BYTES - 1; i++) dashed[i] = (char)(name[i] == '_' ? '-' : name[i]);
    dashed[i] = '\0';
    for (const struct config_suggestion *suggestion = config_suggestions; suggestion->names != NULL; suggestion++)
        if (text_is_among(suggestion->names, dashed)) return suggestion;
    return NULL;
}

const char *config_size_hint(const char *value, int64_t min, int64_t max, char hint[CONFIG_HINT_BYTES])
{
    static const struct {
        const char *names;
        /* unit: size of the unit in bytes; step: a value with a fraction, such as 1.5, is rounded to a multiple of this
         * many bytes */
        int64_t unit, step;
    } units[] = {
        { "b byte bytes", 1, 1 },    { "k kb kib ki", KIB, 1 },          { "m mb mib mi", MIB, KIB },
        { "g gb gib gi", GIB, MIB }, { "t tb tib ti", 1024 * GIB, GIB },
    };
    char *end, text[24];
    const double number = strtod(value, &end);
    *hint = '\0';
    if (end == value || !isdigit((unsigned char)*value)) return hint;
    end += strspn(end, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (!text_is_among(units[i].names, *end ? end : "b")) continue;
        const double steps = number * (double)(units[i].unit / units[i].step);
        if (!(steps < (double)(INT64_MAX / units[i].step))) return hint;
        const int64_t bytes = (int64_t)(steps + 0.5) * units[i].step;
        if (bytes >= min && bytes <= max)
            snprintf(hint, CONFIG_HINT_BYTES, "; write %s", config_size_text(bytes, text));
    }
    return hint;
}

/* Writes a hint for an option in milliseconds whose value has a unit of time: "30s", "500 ms". */
static const char *milliseconds_hint(const struct config_option *o, const char *value, char hint[CONFIG_HINT_BYTES])
{
    static const struct {
        const char *names;
        double ms;
    } units[] = { { "ms", 1 }, { "s sec second seconds", 1e3 }, { "m min minute minutes", 60e3 }, { "h", 3600e3 } };
    char *end;
    const double number = strtod(value, &end);
    if (end == value || !isdigit((unsigned char)*value)) return hint;
    end += strspn(end, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        const double ms = number * units[i].ms;
        if (text_is_among(units[i].names, *end ? end : "ms") && ms >= (double)o->min && ms <= (double)o->max)
            snprintf(hint, CONFIG_HINT_BYTES, "; write %.0f", ms);
    }
    return hint;
}

/* Writes a hint for devices that are named as other programs name them: "gpu", "cuda:0". */
static const char *devices_hint(const char *value, char hint[CONFIG_HINT_BYTES])
{
    const size_t prefix = strcspn(value, ":0123456789");
    const char *const number = value + prefix + (value[prefix] == ':');
    char word[NAME_BYTES];
    snprintf(word, sizeof word, "%.*s", (int)(prefix < NAME_BYTES ? prefix : NAME_BYTES - 1), value);
    if (!text_is_among("gpu gpus cuda nvidia", word)) return hint;
    if (*number == '\0') snprintf(hint, CONFIG_HINT_BYTES, "; write all");
    else if (strspn(number, "0123456789") == strlen(number) && strlen(number) < 3 && atoi(number) < CONFIG_MAX_DEVICES)
        snprintf(hint, CONFIG_HINT_BYTES, "; write %d", atoi(number));
    return hint;
}

const char *config_value_hint(const struct config_option *o, const char *value, char hint[CONFIG_HINT_BYTES])
{
    static const struct {
        const char *flag, *words, *means;
    } choices[] = {
        { "log-level", "trace verbose all", "debug" },
        { "log-level", "information notice", "info" },
        { "log-level", "warning", "warn" },
        { "log-level", "err critical fatal quiet silent", "error" },
        { "log-format", "plain console logfmt", "text" },
    };
    const size_t length = strlen(o->flag);
    *hint = '\0';
    if (o->type == TYPE_DEVICES) return devices_hint(value, hint);
    if (length > 3 && strcmp(o->flag + length - 3, "-ms") == 0) return milliseconds_hint(o, value, hint);
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (strcmp(choices[i].flag, o->flag) == 0 && text_is_among(choices[i].words, value))
            snprintf(hint, CONFIG_HINT_BYTES, "; write %s", choices[i].means);
    return hint;
}

bool config_is_of_the_project(const char *name)
{
    static const char *const names[] = { "BINARY", "EMULATED", "FAKE",   "SHIM",    "BUILD", "SLOWER",
                                         "SEEDS",  "PART",     "PYTHON", "PUBLISH", "URL",   "TOKEN" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name + strlen(CONFIG_PREFIX), names[i]) == 0) return true;
    return false;
}

static bool ends_with(const char *text, const char *end)
{
    const size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* True if the name ends as a variable of a Docker link does: "_PORT_8080_TCP", alone or followed by "_PROTO", "_PORT"
 * or "_ADDR". */
static bool is_port_of_link(const char *name)
{
    static const char ends[] = "_TCP _TCP_PROTO _TCP_PORT _TCP_ADDR _UDP _UDP_PROTO _UDP_PORT _UDP_ADDR "
                               "_SCTP _SCTP_PROTO _SCTP_PORT _SCTP_ADDR";
    for (const char *at = name; (at = strstr(at, "_PORT_")) != NULL;) {
        at += strlen("_PORT_");
        if (text_is_among(ends, at + strspn(at, "0123456789"))) return true;
    }
    return false;
}

bool config_is_service_link(const char *name, const char *value)
{
    return ends_with(name, "_SERVICE_HOST") || strstr(name, "_SERVICE_PORT") != NULL ||
           (ends_with(name, "_PORT") && strstr(value, "://") != NULL) || is_port_of_link(name) ||
           (ends_with(name, "_NAME") && value[0] == '/') || strstr(name, "_ENV_") != NULL;
}
