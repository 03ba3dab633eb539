/* config.c: the options of attnd.
 *
 * The problem: many settings, each with a flag, an environment name, a default, a range and a sentence of
 * help, must never disagree with each other. The idea: one table, options[], one row per option. Everything here
 * (parsing, the environment, the range checks and their messages, --help, the table in OPTIONS.md, the man page, the
 * completion of bash) walks that table; a new option is a new row and a member of struct config.
 *
 *   defaults of the rows -> environment -> command line -> shares of the machine -> checks between options
 *
 * Invariants
 * 1. What config_read() accepts is usable: every number lies in its row's range, every file can be read.
 * 2. A refusal is one line that names the option as the user wrote it (flag or variable), the value and what is
 * allowed.
 * 3. A default that does not fit this machine is fitted silently (and shown by /v1/info); a value that was given is
 * never
 *    changed, only refused.
 * 4. Nothing is started, opened or written here, except that the soft limit on open files is raised to what
 * --max-connections needs. */
#include "server/base/config.h"

#include <arpa/inet.h>
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

#include "kernels/machine.h"
#include "proto-json/text.h"
#include "server/base/config_habits.h"
#include "server/base/limits.h"

#if !defined(ATTND_VERSION) || !defined(ATTND_DATE)
#error "the Makefile defines ATTND_VERSION and ATTND_DATE"
#endif

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define KIB           INT64_C(1024)
#define MIB           (KIB * 1024)
#define GIB           (MIB * 1024)
#define DAY_MS        INT64_C(86400000)

enum {
    /* A thread reads its connections by turns, a piece of each; the fewer it has, the more of a body is still in
     * the cache when its last byte arrives. One thread fills a 25 Gbit/s link with base64. */
    HTTP_THREADS_A_CORE = 8,
    HTTP_THREADS_AUTO_MAX = 16,
    HELP_COLUMNS = 100,
};
#define STAGING_AUTO_MAX (64 * GIB) /* pinned memory beyond this starves the page cache without serving anyone faster */

/* ---- The table --------------------------------------------------------------------------------------------------- */

enum type {
    TYPE_INT,     /* a whole number in an int */
    TYPE_INT64,   /* a whole number in an int64_t */
    TYPE_SIZE,    /* bytes in an int64_t, suffixes K M G */
    TYPE_SWITCH,  /* bool */
    TYPE_CHOICE,  /* one of the words in `words` */
    TYPE_ADDRESS, /* ADDR:PORT or unix:PATH */
    TYPE_LISTEN,  /* a list of addresses: config->listen */
    TYPE_SHM,     /* a list of prefixes: config->allow_shm */
    TYPE_DEVICES, /* auto, all, cpu, or GPU numbers */
    TYPE_FILE,    /* a file that can be read now */
    TYPE_ORIGIN,  /* scheme://host[:port] or * */
};

struct option {
    const char *flag, *env;
    enum type type;
    const char *placeholder;
    size_t offset;     /* of the member in struct config */
    int64_t fallback;  /* default of numbers and switches */
    int64_t min, max;  /* numbers */
    const char *word;  /* default of the other types; NULL: none */
    const char *words; /* TYPE_CHOICE: "text|json"; of others what a shell offers for it */
    const char *shown; /* the default as --help shows it, where it is not the value itself */
    const char *help;
};

#define AT(member) offsetof(struct config, member)

/* clang-format off */
static const struct option options[] = {
    { "listen", "ATTND_LISTEN", TYPE_LISTEN, "ADDR:PORT", AT(listen), .word = "127.0.0.1:8080",
      .help = "Where to serve: 0.0.0.0:8080, [::1]:8080 or unix:/run/attnd.sock. Repeatable, up to 8; the variable takes a "
              "comma-separated list. Port 0 is any free port." },
    { "devices", "ATTND_DEVICES", TYPE_DEVICES, "auto|all|cpu|0,1", AT(devices), .word = "auto", .words = "auto|all|cpu",
      .help = "Where to compute: every GPU, else the CPU (auto); every GPU (all); the CPU; the GPUs of these numbers. "
              "`reference` is the slow float64 backend of the tests." },
    { "http-threads", "ATTND_HTTP_THREADS", TYPE_INT, "N", AT(http_threads), 0, 0, 256, .shown = "8 a core, at most 16",
      .help = "Threads that receive, decode, encode and send, and compute what is small when the CPU is the device. 0 is the "
              "default." },
    { "cpu-threads", "ATTND_CPU_THREADS", TYPE_INT, "N", AT(cpu_threads), 0, 0, 1024, .shown = "cores",
      .help = "Threads of the CPU device, for all but small problems. 0 is the default. Cores are those of the affinity mask "
              "and the cgroup's quota." },
    { "max-body-bytes", "ATTND_MAX_BODY_BYTES", TYPE_SIZE, "SIZE", AT(max_body_bytes), GIB, KIB, 1024 * GIB,
      .shown = "1G, at most --staging-bytes",
      .help = "Longest request body, with what it names in shared memory; a longer one is answered 413." },
    { "staging-bytes", "ATTND_STAGING_BYTES", TYPE_SIZE, "SIZE", AT(staging_bytes), 0, MIB, 16384 * GIB,
      .shown = "half the memory, at most 64G",
      .help = "Host memory for the tensors of all requests together; a request that finds none is answered 503. Memory is "
              "what the machine has or the cgroup allows." },
    { "device-bytes", "ATTND_DEVICE_BYTES", TYPE_SIZE, "SIZE", AT(device_bytes), 0, MIB, 16384 * GIB,
      .shown = "a share of the device's",
      .help = "Memory to use on each device; /v1/info shows what the default came to. A request that can never have enough is "
              "answered 413." },
    { "kv-bytes", "ATTND_KV_BYTES", TYPE_SIZE, "SIZE", AT(kv_bytes), -1, 0, 16384 * GIB,
      .shown = "an eighth of the device's",
      .help = "Memory of each device for KV caches (/v1/caches), taken when the first is made; a cache that finds no page is answered 507. Of the CPU the "
              "default is at most 16G. 0: no caches." },
    { "max-connections", "ATTND_MAX_CONNECTIONS", TYPE_INT, "N", AT(max_connections), 10000, 1, 1000000,
      .shown = "10000, or what open files allow",
      .help = "Open connections; one more is answered 503 and closed." },
    { "max-receiving", "ATTND_MAX_RECEIVING", TYPE_INT, "N", AT(max_receiving), 0, 0, 1000000,
      .shown = "--max-connections",
      .help = "Requests whose body is being received; one more is answered 503. 0 is the default." },
    { "queue-depth", "ATTND_QUEUE_DEPTH", TYPE_INT, "N", AT(queue_depth), 1024, 1, 1 << 20,
      .help = "Requests that wait for a device; one more is answered 503." },
    { "batch-window-us", "ATTND_BATCH_WINDOW_US", TYPE_INT64, "N", AT(batch_window_us), 0, 0, 1000000,
      .help = "How long a request may wait for others to run with, in microseconds. 0: never while a device is idle. Small "
              "problems of the CPU never wait." },
    { "max-batch", "ATTND_MAX_BATCH", TYPE_INT, "N", AT(max_batch), 64, 1, CONFIG_MAX_BATCH,
      .help = "Problems that are run together at most." },
    { "timeout-ms", "ATTND_TIMEOUT_MS", TYPE_INT64, "N", AT(timeout_ms), 60000, 1, DAY_MS,
      .help = "Time a request may take from its last byte to its answer; then 504. A client may ask for less." },
    { "max-seconds", "ATTND_MAX_SECONDS", TYPE_INT, "N", AT(max_seconds), 60, 1, 86400,
      .help = "Most work of one request, in seconds of the device at a speed that no kernel reaches; more is answered 422, and "
              "work that cannot be done before its deadline 504, both at once." },
    { "body-timeout-ms", "ATTND_BODY_TIMEOUT_MS", TYPE_INT64, "N", AT(body_timeout_ms), 30000, 1, DAY_MS,
      .help = "Time for a body to arrive or an answer to be fetched, plus 1 ms for each KiB of it; then the connection is "
              "cut, with 408 where the body is not complete." },
    { "body-stall-ms", "ATTND_BODY_STALL_MS", TYPE_INT64, "N", AT(body_stall_ms), 5000, 1, DAY_MS,
      .help = "Time that a body may stand still while it arrives; then the connection is cut with 408, and what it holds is "
              "free for others." },
    { "drain-ms", "ATTND_DRAIN_MS", TYPE_INT64, "N", AT(drain_ms), 30000, 0, DAY_MS,
      .help = "Time after SIGTERM for what was accepted to be answered." },
    { "watchdog-ms", "ATTND_WATCHDOG_MS", TYPE_INT64, "N", AT(watchdog_ms), 60000, 1, DAY_MS,
      .help = "Time that a GPU may take for a batch beyond what its size explains; then the GPU counts as lost. What it runs "
              "is answered 503, and without another GPU the server ends with status 70." },
    { "token-file", "ATTND_TOKEN_FILE", TYPE_FILE, "FILE", AT(token_file), .shown = "off",
      .help = "File of bearer tokens, one a line; every route but the probes then wants one of them." },
    { "token-share", "ATTND_TOKEN_SHARE", TYPE_INT, "PERCENT", AT(token_share), 50, 1, 100,
      .help = "How much of the staging memory, of the requests that may be received or wait, and of the saved contexts one "
              "token may use while --token-file has others; what goes beyond is answered 429." },
    { "tls-cert", "ATTND_TLS_CERT", TYPE_FILE, "FILE", AT(tls_cert), .shown = "off",
      .help = "Certificate chain (PEM) to serve TLS with. Needs --tls-key." },
    { "tls-key", "ATTND_TLS_KEY", TYPE_FILE, "FILE", AT(tls_key), .shown = "off",
      .help = "Its private key (PEM)." },
    { "cors-origin", "ATTND_CORS_ORIGIN", TYPE_ORIGIN, "ORIGIN", AT(cors_origin), .shown = "off",
      .help = "Web origin whose pages may call this server: https://example.org, or * (not with --token-file). Pages of other "
              "sites than this server's own are answered 403 where they compute." },
    { "allow-shm", "ATTND_ALLOW_SHM", TYPE_SHM, "PREFIX", AT(allow_shm), .shown = "off",
      .help = "Let clients keep tensors in shared memory of this machine (Triton's extension): in objects of /dev/shm whose key "
              "begins with PREFIX, which whoever may use this server can then have read and written. Repeatable, up to 8; the "
              "variable takes a comma-separated list." },
    { "allow-cuda-shm", "ATTND_ALLOW_CUDA_SHM", TYPE_SWITCH, NULL, AT(allow_cuda_shm), 0, .shown = "off",
      .help = "Let clients keep tensors in GPU memory of their own that they share by a handle (Triton's extension for CUDA): the "
              "server's kernels read and write it in place. For clients that are trusted: a handle opens whatever the driver lets "
              "this process open." },
    { "supervise", "ATTND_SUPERVISE", TYPE_SWITCH, NULL, AT(supervise), 0, .shown = "off",
      .help = "Keep the listening sockets in a parent process that starts a new server when one dies." },
    { "log-format", "ATTND_LOG_FORMAT", TYPE_CHOICE, "text|json", AT(log_format), .word = "text", .words = "text|json",
      .help = "One line per event on standard error, as text or JSON." },
    { "log-level", "ATTND_LOG_LEVEL", TYPE_CHOICE, "LEVEL", AT(log_level), .word = "info", .words = "debug|info|warn|error",
      .help = "The least serious lines to write: debug, info, warn or error." },
    { "metrics-listen", "ATTND_METRICS_LISTEN", TYPE_ADDRESS, "ADDR:PORT", AT(metrics_listen),
      .shown = "the --listen addresses",
      .help = "Serve /metrics and the probes here too, on a thread of its own that stays free when the others are busy, to 256 "
              "connections of its own." },
};
/* clang-format on */

enum { OPTION_COUNT = ARRAY_SIZE(options) };

static const char examples[] =
    "Examples:\n"
    "  attnd                                             serve on 127.0.0.1:8080\n"
    "  attnd --listen 0.0.0.0:8080 --log-format json     serve everyone, log for machines\n"
    "  attnd --listen unix:/run/attnd.sock --devices cpu\n"
    "  ATTND_MAX_BODY_BYTES=256M attnd --queue-depth=64  the environment, overridden by flags\n"
    "  attnd healthcheck http://127.0.0.1:8080           exit status 0 while it takes work\n";

/* ---- Small helpers ----------------------------------------------------------------------------------------------- */

/* Copies that live as long as the process, as struct config promises; the list keeps them reachable for leak
 * checkers. */
struct kept {
    struct kept *next;
    char text[];
};
static struct kept *kept_list;

static char *keep(const char *text, size_t length)
{
    struct kept *k = malloc(sizeof *k + length + 1);
    if (k == NULL) {
        fprintf(stderr, "attnd: out of memory for an option of %zu bytes\n", length);
        abort();
    }
    memcpy(k->text, text, length);
    k->text[length] = '\0';
    k->next = kept_list;
    kept_list = k;
    return k->text;
}

static enum config_result refuse(char *message, size_t capacity, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static enum config_result refuse(char *message, size_t capacity, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, capacity, format, args);
    va_end(args);
    return CONFIG_BAD;
}

/* 1048576 -> "1M". Whole multiples only, so that it reads back as the same number. */
static const char *size_text(int64_t bytes, char text[24])
{
    static const struct {
        int64_t unit;
        char suffix;
    } units[] = { { GIB, 'G' }, { MIB, 'M' }, { KIB, 'K' } };
    for (size_t i = 0; i < ARRAY_SIZE(units); i++)
        if (bytes >= units[i].unit && bytes % units[i].unit == 0) {
            snprintf(text, 24, "%lld%c", (long long)(bytes / units[i].unit), units[i].suffix);
            return text;
        }
    snprintf(text, 24, "%lld", (long long)bytes);
    return text;
}

static bool parse_number(const char *text, int64_t *value)
{
    uint64_t number;
    if (!text_is_number(text, INT64_MAX, &number)) return false;
    *value = (int64_t)number;
    return true;
}

static bool parse_size(const char *text, int64_t *value)
{
    uint64_t number;
    int64_t unit = 1;
    const char *end = text_read_number(text, &number);
    if (end == NULL) return false;
    switch (toupper((unsigned char)*end)) {
    case 'K': unit = KIB; break;
    case 'M': unit = MIB; break;
    case 'G': unit = GIB; break;
    case '\0': break;
    default: return false;
    }
    return (*end == '\0' || end[1] == '\0') && !__builtin_mul_overflow(number, unit, value);
}

static bool word_in(const char *words, const char *word)
{
    const size_t length = strlen(word);
    for (const char *w = words; w != NULL; w = strchr(w, '|') ? strchr(w, '|') + 1 : NULL)
        if (length > 0 && strncmp(w, word, length) == 0 && (w[length] == '|' || w[length] == '\0')) return true;
    return false;
}

/* Form only; whether the address exists on this machine shows when it is bound. */
static bool address_ok(const char *text)
{
    if (strncmp(text, "unix:", 5) == 0) {
        const size_t length = strlen(text + 5);
        return length > 0 && length < sizeof(((struct sockaddr_un *)0)->sun_path);
    }
    const char *colon = strrchr(text, ':');
    int64_t port;
    char host[256];
    unsigned char binary[16];
    if (colon == NULL || colon == text || (size_t)(colon - text) >= sizeof host) return false;
    if (!parse_number(colon + 1, &port) || port > 65535) return false;
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = '\0';
    const size_t length = strlen(host);
    if (host[0] == '[') {
        if (length < 3 || host[length - 1] != ']') return false;
        host[length - 1] = '\0';
        host[1 + strcspn(host + 1, "%")] = '\0'; /* a scope: [fe80::1%eth0] */
        return inet_pton(AF_INET6, host + 1, binary) == 1;
    }
    if (strspn(host, "0123456789.") == length) return inet_pton(AF_INET, host, binary) == 1;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)host[i]) && strchr("-._", host[i]) == NULL) return false;
    return true;
}

static bool devices_ok(const char *text)
{
    if (word_in("auto|all|cpu|reference", text)) return true;
    uint64_t seen = 0;
    static_assert(CONFIG_MAX_DEVICES <= 64, "each has a bit in `seen`");
    for (;;) { /* numbers, each once */
        uint64_t number;
        if ((text = text_read_number(text, &number)) == NULL || number >= CONFIG_MAX_DEVICES || (seen >> number & 1))
            return false;
        seen |= UINT64_C(1) << number;
        if (*text == '\0') return true;
        if (*text++ != ',') return false;
    }
}

static bool shm_ok(const char *text)
{
    if (*text == '/') text++;
    const size_t length = strlen(text);
    return length >= 1 && length <= CONFIG_SHM_BYTES && *text != '.' && strspn(text, CONFIG_SHM_CHARACTERS) == length;
}

static bool origin_ok(const char *text)
{
    if (strcmp(text, "*") == 0) return true;
    const char *host = strncmp(text, "https://", 8) == 0  ? text + 8
                       : strncmp(text, "http://", 7) == 0 ? text + 7
                                                          : NULL;
    if (host == NULL || *host == '\0') return false;
    for (; *host; host++)
        if (!isalnum((unsigned char)*host) && strchr("-._:[]", *host) == NULL) return false;
    return true;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

struct reading {
    struct config *config;
    bool given[OPTION_COUNT];     /* by flag or variable */
    bool from_flag[OPTION_COUNT]; /* so that a first --listen replaces the environment's list */
    char *message;
    size_t capacity;
};

/* Where a list is kept, how many it has, and how many it may have; *most 0: the option is no list. */
static const char **list_of(struct config *config, const struct option *o, int **count, int *most)
{
    *count = NULL;
    *most = 0;
    switch (o->type) {
    case TYPE_LISTEN: *count = &config->listen_count, *most = CONFIG_MAX_LISTEN; return config->listen;
    case TYPE_SHM: *count = &config->allow_shm_count, *most = CONFIG_MAX_SHM; return config->allow_shm;
    default: return NULL;
    }
}

static enum config_result add_to_list(struct reading *r, const struct option *o, const char *name, const char *value,
                                      const char *what)
{
    int *count, most;
    const char **const list = list_of(r->config, o, &count, &most);
    if (*count == most)
        return refuse(r->message, r->capacity, "%s: '%s' is one too many, at most %d %s", name, value, most, what);
    list[(*count)++] = keep(value, strlen(value));
    return CONFIG_RUN;
}

/* Sets one option. `name` is how the user named it: "--queue-depth" or "ATTND_QUEUE_DEPTH". */
static enum config_result set_value(struct reading *r, const struct option *o, const char *name, const char *value)
{
    char *const m = r->message;
    const size_t n = r->capacity;
    void *member = (char *)r->config + o->offset;
    int64_t number = 0;
    char low[24], high[24], list[96];
    switch (o->type) {
    case TYPE_INT:
    case TYPE_INT64:
        if (!parse_number(value, &number) || number < o->min || number > o->max)
            return refuse(m, n, "%s: '%s' is not a whole number from %lld to %lld", name, value, (long long)o->min,
                          (long long)o->max);
        if (o->type == TYPE_INT) *(int *)member = (int)number;
        else *(int64_t *)member = number;
        return CONFIG_RUN;
    case TYPE_SIZE:
        if (!parse_size(value, &number) || number < o->min || number > o->max)
            return refuse(m, n, "%s: '%s' is not a size from %s to %s (bytes, or with K, M or G)", name, value,
                          size_text(o->min, low), size_text(o->max, high));
        *(int64_t *)member = number;
        return CONFIG_RUN;
    case TYPE_SWITCH:
        if (word_in("1|true|on|yes", value)) *(bool *)member = true;
        else if (word_in("0|false|off|no", value)) *(bool *)member = false;
        else return refuse(m, n, "%s: '%s' is not on or off", name, value);
        return CONFIG_RUN;
    case TYPE_CHOICE:
        if (!word_in(o->words, value)) {
            snprintf(list, sizeof list, "%s", o->words);
            for (char *bar = list; (bar = strchr(bar, '|')) != NULL;) *bar = ' ';
            return refuse(m, n, "%s: '%s' is not one of: %s", name, value, list);
        }
        break;
    case TYPE_ADDRESS:
    case TYPE_LISTEN:
        if (!address_ok(value))
            return refuse(
                m, n,
                "%s: '%s' is not ADDR:PORT, [IPV6]:PORT with a port from 0 to 65535, or unix:PATH of at most %zu bytes",
                name, value, sizeof(((struct sockaddr_un *)0)->sun_path) - 1);
        if (o->type == TYPE_LISTEN) return add_to_list(r, o, name, value, "addresses");
        break;
    case TYPE_SHM:
        if (!shm_ok(value))
            return refuse(
                m, n,
                "%s: '%s' is not the beginning of a key: 1 to %d letters, digits, '_', '.' and '-', such as attn_",
                name, value, CONFIG_SHM_BYTES);
        return add_to_list(r, o, name, value, "prefixes");
    case TYPE_DEVICES:
        if (!devices_ok(value))
            return refuse(m, n, "%s: '%s' is not auto, all, cpu, or different GPU numbers from 0 to %d such as 0,1",
                          name, value, CONFIG_MAX_DEVICES - 1);
        break;
    case TYPE_FILE:
        if (access(value, R_OK) != 0) return refuse(m, n, "%s: '%s' cannot be read: %s", name, value, strerror(errno));
        break;
    case TYPE_ORIGIN:
        if (!origin_ok(value))
            return refuse(m, n, "%s: '%s' is not an origin such as https://example.org, or *", name, value);
        break;
    }
    *(const char **)member = keep(value, strlen(value));
    return CONFIG_RUN;
}

static void set_default(struct config *config, const struct option *o)
{
    void *member = (char *)config + o->offset;
    switch (o->type) {
    case TYPE_INT: *(int *)member = (int)o->fallback; break;
    case TYPE_INT64:
    case TYPE_SIZE: *(int64_t *)member = o->fallback; break;
    case TYPE_SWITCH: *(bool *)member = o->fallback != 0; break;
    case TYPE_LISTEN:
        config->listen[0] = o->word;
        config->listen_count = 1;
        break;
    case TYPE_SHM: config->allow_shm_count = 0; break;
    default: *(const char **)member = o->word; break;
    }
}

/* A value of the environment or of a flag. A list's first value replaces what was there. */
static enum config_result give(struct reading *r, size_t index, const char *name, const char *value, bool from_flag)
{
    const struct option *o = &options[index];
    int *count, most;
    (void)list_of(r->config, o, &count, &most);
    if (most > 0 && (!r->given[index] || (from_flag && !r->from_flag[index]))) *count = 0;
    r->given[index] = true;
    if (from_flag) r->from_flag[index] = true;
    if (most == 0 || from_flag) return set_value(r, o, name, value);
    for (const char *at = value;;) {
        const size_t length = strcspn(at, ",");
        char *one = keep(at, length);
        enum config_result result = set_value(r, o, name, one);
        if (result != CONFIG_RUN || at[length] == '\0') return result;
        at += length + 1;
    }
}

/* "--queue-depth 8" or "ATTND_QUEUE_DEPTH=8", of a flag's or a variable's name, between two texts. */
static void put_option(const char *name, const char *value, bool variable, const char *before, const char *behind,
                       char *text, size_t capacity)
{
    struct text t = text_in(text, capacity);
    text_put_string(&t, before);
    text_put_string(&t, variable ? CONFIG_PREFIX : "--");
    for (; *name != '\0'; name++)
        text_put_char(&t, !variable ? *name : *name == '-' ? '_' : (char)toupper((unsigned char)*name));
    if (*value != '\0') text_printf(&t, "%c%s", variable ? '=' : ' ', value);
    text_put_string(&t, behind);
}

/* What to write in the place of a name that no option has, for a flag ("--") or a variable ("ATTND_"): what others call it,
 * or the option whose name is most like it. */
static void suggest(const char *name, bool variable, char *text, size_t capacity)
{
    const struct config_habit *const habit = config_habit(name);
    struct text_nearest nearest = { name, NULL, 1 + (int)strlen(name) / 2 }; /* further than half of it is no help */
    for (size_t i = 0; i < OPTION_COUNT; i++)
        text_consider(&nearest, variable ? options[i].env + strlen(CONFIG_PREFIX) : options[i].flag);
    *text = '\0';
    if (habit != NULL && habit->instead != NULL) snprintf(text, capacity, "; %s", habit->instead);
    else if (habit != NULL) put_option(habit->flag, habit->value, variable, "; write ", "", text, capacity);
    else if (nearest.name != NULL) put_option(nearest.name, "", variable, "; did you mean ", "?", text, capacity);
}

static enum config_result refuse_unknown(struct reading *r, const char *arg)
{
    const size_t dashes = strspn(arg, "-"), length = strcspn(arg + dashes, "=");
    char name[64], hint[192];
    snprintf(name, sizeof name, "%.*s", (int)length, arg + dashes);
    if (dashes == 0) { /* the name of a program's command, or a value without its option */
        const struct config_habit *const habit = config_habit(name);
        const char *const instead = habit != NULL ? habit->instead : NULL;
        return refuse(r->message, r->capacity,
                      "unexpected argument '%s'%s%s (options begin with --, attnd --help lists them)", name,
                      instead ? "; " : "", instead ? instead : "");
    }
    suggest(name, false, hint, sizeof hint);
    return refuse(r->message, r->capacity, "%.*s%s is not an option%s (attnd --help lists them)",
                  (int)(dashes < 3 ? dashes : 3), arg, name, hint);
}

static bool is_variable(const char *name)
{
    for (size_t i = 0; i < OPTION_COUNT; i++)
        if (strcmp(options[i].env, name) == 0) return true;
    return strcmp(name, CONFIG_INHERITED_SOCKETS) == 0;
}

/* A variable that looks like one of ours and is none would be missed in silence. */
static enum config_result refuse_variables(struct reading *r)
{
    for (char **variable = environ; *variable != NULL; variable++) {
        const size_t length = strcspn(*variable, "=");
        const char *const value = *variable + length + ((*variable)[length] == '=');
        char name[96], hint[192];
        if (strncmp(*variable, CONFIG_PREFIX, strlen(CONFIG_PREFIX)) != 0 || *value == '\0') continue;
        snprintf(name, sizeof name, "%.*s", (int)length, *variable);
        if (is_variable(name) || config_is_service_link(name, value)) continue;
        suggest(name + strlen(CONFIG_PREFIX), true, hint, sizeof hint);
        return refuse(r->message, r->capacity, "%s is not an option%s (attnd --help lists them)", name, hint);
    }
    return CONFIG_RUN;
}

static enum config_result read_environment(struct reading *r)
{
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const char *value = getenv(options[i].env);
        if (value == NULL || *value == '\0') continue; /* compose files write VAR= for "not set" */
        const enum config_result result = give(r, i, options[i].env, value, false);
        if (result != CONFIG_RUN) return result;
    }
    return refuse_variables(r);
}

static enum config_result read_flags(struct reading *r, int argc, char **argv)
{
    for (int a = 1; a < argc; a++) {
        const char *arg = argv[a];
        if (strncmp(arg, "--", 2) != 0 || arg[2] == '\0') return refuse_unknown(r, arg);
        const char *flag = arg + 2;
        const size_t length = strcspn(flag, "=");
        size_t i = 0;
        while (i < OPTION_COUNT && !(strncmp(options[i].flag, flag, length) == 0 && options[i].flag[length] == '\0'))
            i++;
        if (i == OPTION_COUNT) return refuse_unknown(r, arg);
        char name[64];
        snprintf(name, sizeof name, "--%s", options[i].flag);
        const char *value = flag[length] == '=' ? flag + length + 1 : NULL;
        if (value == NULL && options[i].type == TYPE_SWITCH) value = "on";
        if (value == NULL) {
            if (a + 1 == argc)
                return refuse(r->message, r->capacity, "%s: a value is missing (%s)", name, options[i].placeholder);
            value = argv[++a];
        }
        const enum config_result result = give(r, i, name, value, true);
        if (result != CONFIG_RUN) return result;
    }
    return CONFIG_RUN;
}

static bool was_given(const struct reading *r, const char *flag)
{
    for (size_t i = 0; i < OPTION_COUNT; i++)
        if (strcmp(options[i].flag, flag) == 0) return r->given[i];
    abort(); /* a name misspelt in this file */
}

/* Port 0 is a free port, another one each time. */
static bool same_address(const char *a, const char *b)
{
    int64_t port = 0;
    if (strcmp(a, b) != 0) return false;
    return strncmp(a, "unix:", 5) == 0 || !parse_number(strrchr(a, ':') + 1, &port) || port != 0;
}

/* Defaults that depend on the machine, then what must hold between options. */
static enum config_result settle(struct reading *r)
{
    struct config *c = r->config;
    char *const m = r->message;
    const size_t n = r->capacity;
    struct attn_machine machine;
    char a[24], b[24];
    attn_machine_look("", &machine);

    if (c->http_threads == 0) {
        const int cores = machine.cores, most = HTTP_THREADS_AUTO_MAX;
        c->http_threads = HTTP_THREADS_A_CORE * cores < most ? HTTP_THREADS_A_CORE * cores : most;
        if (cores * cores <= most) c->http_threads -= c->http_threads % cores; /* as many for each: http_threads.h */
    }
    if (c->cpu_threads == 0) c->cpu_threads = machine.cores;
    c->cores = machine.cores;

    if (c->staging_bytes == 0) {
        c->staging_bytes = machine.memory_bytes / 2 / MIB * MIB;
        if (c->staging_bytes > STAGING_AUTO_MAX) c->staging_bytes = STAGING_AUTO_MAX;
        if (c->staging_bytes < MIB) c->staging_bytes = MIB;
    }
    if (c->max_body_bytes > c->staging_bytes) {
        if (was_given(r, "max-body-bytes"))
            return refuse(m, n, "--max-body-bytes: %s is more than --staging-bytes, which is %s%s",
                          size_text(c->max_body_bytes, a), size_text(c->staging_bytes, b),
                          was_given(r, "staging-bytes") ? "" : " (half the memory here)");
        c->max_body_bytes = c->staging_bytes;
    }

    if ((c->tls_cert == NULL) != (c->tls_key == NULL))
        return refuse(m, n, "--%s: needs --%s too", c->tls_cert ? "tls-cert" : "tls-key",
                      c->tls_cert ? "tls-key" : "tls-cert");
    if (c->cors_origin != NULL && strcmp(c->cors_origin, "*") == 0 && c->token_file != NULL)
        return refuse(m, n, "--cors-origin: '*' cannot go with --token-file, name the origin");
    for (int i = 0; i < c->listen_count; i++) {
        for (int j = 0; j < i; j++)
            if (same_address(c->listen[i], c->listen[j]))
                return refuse(m, n, "--listen: '%s' is given twice", c->listen[i]);
        if (c->metrics_listen != NULL && same_address(c->listen[i], c->metrics_listen))
            return refuse(m, n, "--metrics-listen: '%s' is a --listen address already", c->metrics_listen);
    }

    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        const rlim_t spare = CONFIG_SPARE_FILES + (c->metrics_listen != NULL ? CONFIG_METRICS_CONNECTIONS : 0) +
                             (config_shares_memory(c) ? REGIONS_MAX_COUNT : 0);
        const rlim_t wanted = (rlim_t)c->max_connections + spare;
        if (files.rlim_cur < wanted) {
            files.rlim_cur = files.rlim_max < wanted ? files.rlim_max : wanted;
            setrlimit(RLIMIT_NOFILE, &files);
            getrlimit(RLIMIT_NOFILE, &files);
        }
        if (files.rlim_cur < wanted) {
            if (was_given(r, "max-connections") || files.rlim_cur <= spare)
                return refuse(
                    m, n,
                    "--max-connections: %d connections need %lld open files, but the limit here is %lld (ulimit -n)",
                    c->max_connections, (long long)wanted, (long long)files.rlim_cur);
            c->max_connections = (int)(files.rlim_cur - spare);
        }
    }
    if (c->max_receiving == 0) c->max_receiving = c->max_connections;
    return CONFIG_RUN;
}

static void put_version(FILE *to)
{
    fprintf(to, "attnd %s\n", ATTND_VERSION);
}

/* The text that the first of these flags asks for, which is given whatever else is wrong; NULL: none is there. */
static void (*find_text(int argc, char **argv))(FILE *)
{
    static const struct {
        const char *flag;
        void (*put)(FILE *to);
    } texts[] = {
        { "--help", config_help },         { "-h", config_help },
        { "--version", put_version },      { "--help-markdown", config_help_markdown },
        { "--help-man", config_help_man }, { "--help-bash", config_help_bash },
    };
    for (int a = 1; a < argc; a++)
        for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
            if (strcmp(argv[a], texts[i].flag) == 0) return texts[i].put;
    return NULL;
}

enum config_result config_read(struct config *config, int argc, char **argv, char *message, size_t capacity)
{
    struct reading r = { .config = config, .message = message, .capacity = capacity };
    if (capacity > 0) message[0] = '\0';
    memset(config, 0, sizeof *config);
    for (size_t i = 0; i < OPTION_COUNT; i++) set_default(config, &options[i]);

    if (find_text(argc, argv) != NULL) return CONFIG_EXIT_OK;

    enum config_result result = read_environment(&r);
    if (result == CONFIG_RUN) result = read_flags(&r, argc, argv);
    if (result == CONFIG_RUN) result = settle(&r);
    return result;
}

enum config_result config_load(struct config *config, int argc, char **argv)
{
    char message[512];
    const enum config_result result = config_read(config, argc, argv, message, sizeof message);
    if (result == CONFIG_BAD) fprintf(stderr, "attnd: %s\n", message);
    if (result == CONFIG_EXIT_OK) find_text(argc, argv)(stdout);
    return result;
}

/* ---- Help -------------------------------------------------------------------------------------------------------- */

static const char *default_text(const struct option *o, char text[24])
{
    if (o->shown != NULL) return o->shown;
    if (o->word != NULL) return o->word;
    if (o->type == TYPE_SIZE) return size_text(o->fallback, text);
    snprintf(text, 24, "%lld", (long long)o->fallback);
    return text;
}

/* The help sentence with the range after it, where the option is a number. */
static void full_help(const struct option *o, char *text, size_t capacity)
{
    char low[24], high[24];
    if (o->type == TYPE_INT || o->type == TYPE_INT64)
        snprintf(text, capacity, "%s Range: %lld to %lld.", o->help, (long long)o->min, (long long)o->max);
    else if (o->type == TYPE_SIZE)
        snprintf(text, capacity, "%s Range: %s to %s.", o->help, size_text(o->min, low), size_text(o->max, high));
    else snprintf(text, capacity, "%s", o->help);
}

/* Prints `text` broken at spaces, every line indented. */
static void print_wrapped(FILE *to, const char *text, int indent, int columns)
{
    while (*text) {
        size_t take = strlen(text);
        if (take > (size_t)(columns - indent)) {
            take = (size_t)(columns - indent);
            while (take > 0 && text[take] != ' ') take--;
        }
        fprintf(to, "%*s%.*s\n", indent, "", (int)take, text);
        text += take;
        while (*text == ' ') text++;
    }
}

void config_help(FILE *to)
{
    char text[512], number[24];
    fprintf(to,
            "attnd %s: exact attention, forward and backward, over HTTP\n\n"
            "Usage: attnd [options]\n"
            "       attnd healthcheck [URL]\n\n"
            "Each option can be given as --name VALUE, as --name=VALUE or in the environment; flags win.\n"
            "Sizes take the suffixes K, M and G, powers of 1024.\n\n"
            "  %-36s%-30s%s\n",
            ATTND_VERSION, "Option", "Environment", "Default");
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = &options[i];
        snprintf(text, sizeof text, "--%s %s", o->flag, o->placeholder ? o->placeholder : "");
        fprintf(to, "\n  %-36s%-30s%s\n", text, o->env, default_text(o, number));
        full_help(o, text, sizeof text);
        print_wrapped(to, text, 6, HELP_COLUMNS);
    }
    fprintf(to, "\n  %-36sthis text\n  %-36sthe version\n\n%s", "--help", "--version", examples);
}

void config_help_markdown(FILE *to)
{
    char text[512], number[24];
    fprintf(to, "| option | environment | default | meaning |\n|---|---|---|---|\n");
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = &options[i];
        fprintf(to, "| `--%s%s", o->flag, o->placeholder ? " " : "");
        for (const char *p = o->placeholder ? o->placeholder : ""; *p; p++) fprintf(to, *p == '|' ? "\\|" : "%c", *p);
        fprintf(to, "` | `%s` | %s | ", o->env, default_text(o, number));
        full_help(o, text, sizeof text);
        fprintf(to, "%s |\n", text);
    }
}

/* ---- The man page ------------------------------------------------------------------------------------------------ */

/* Text for roff: a hyphen that shall be one, and no request at the start of a line. */
static void put_roff(FILE *to, const char *text)
{
    for (bool first = true; *text; first = *text++ == '\n') {
        if (first && (*text == '.' || *text == '\'')) fputs("\\&", to);
        if (*text == '-' || *text == '\\') fprintf(to, *text == '-' ? "\\-" : "\\e");
        else fputc(*text, to);
    }
}

static const char man_head[] =
    ".SH NAME\n"
    "attnd \\- exact attention, forward and backward, over HTTP\n"
    ".SH SYNOPSIS\n"
    ".B attnd\n"
    ".RI [ options ]\n"
    ".br\n"
    ".B attnd healthcheck\n"
    ".RI [ URL ]\n"
    ".SH DESCRIPTION\n"
    "attnd computes attention for whoever can POST tensors: out = softmax(scale q k^T + masks) v, and the gradients\n"
    "of a loss with respect to q, k and v.\n"
    "Requests go to /v1/attention/forward and /v1/attention/backward; /docs in a browser shows every member, and\n"
    "/openapi.json is the same for programs.\n"
    ".PP\n"
    ".B attnd healthcheck\n"
    "exits with 0 while a server takes work.\n"
    ".SH OPTIONS\n"
    "Each option can be given as \\-\\-name VALUE, as \\-\\-name=VALUE or in the environment; flags win.\n"
    "Sizes take the suffixes K, M and G, powers of 1024.\n";

static const char man_tail[] = ".SH SIGNALS\n"
                               ".TP\n"
                               ".B SIGTERM, SIGINT\n"
                               "No connection is accepted any more; what was accepted is answered, for at most "
                               "\\-\\-drain\\-ms. At a second one what still "
                               "waits is answered 503.\n"
                               ".TP\n"
                               ".B SIGHUP\n"
                               "The file of tokens and the certificate are read again.\n"
                               ".SH EXIT STATUS\n"
                               ".TP\n.B 0\nStopped by a signal, and drained.\n"
                               ".TP\n.B 64\nAn option is wrong.\n"
                               ".TP\n.B 69\nAn address or a device cannot be had.\n"
                               ".TP\n.B 70\nThe last device failed.\n"
                               ".TP\n.B 71\nTold to stop, it did not end by itself.\n"
                               ".TP\n.B 78\nA file that an option names is wrong.\n"
                               ".SH EXAMPLES\n"
                               ".nf\n";

void config_help_man(FILE *to)
{
    char text[512], number[24];
    fprintf(to, ".TH ATTND 1 %s \"attnd %s\"\n%s", ATTND_DATE, ATTND_VERSION, man_head);
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = &options[i];
        fputs(".TP\n\\fB", to);
        snprintf(text, sizeof text, "--%s", o->flag);
        put_roff(to, text);
        if (o->placeholder) fprintf(to, "\\fR \\fI%s", o->placeholder);
        fputs("\\fR\n", to);
        full_help(o, text, sizeof text);
        put_roff(to, text);
        fprintf(to, "\nEnvironment: %s. Default: ", o->env);
        put_roff(to, default_text(o, number));
        fputs(".\n", to);
    }
    fputs(man_tail, to);
    put_roff(to, strchr(examples, '\n') + 1); /* without its own title */
    fputs(".fi\n", to);
}

/* ---- Completion in bash ------------------------------------------------------------------------------------------ */

/* "text|json" -> "text json" */
static void put_words(FILE *to, const char *words)
{
    for (; *words; words++) fputc(*words == '|' ? ' ' : *words, to);
}

void config_help_bash(FILE *to)
{
    fputs("# Completion of attnd in bash: attnd --help-bash\n"
          "_attnd()\n"
          "{\n"
          "    local at=$COMP_CWORD word=${COMP_WORDS[COMP_CWORD]} option words=\n"
          "    if [ \"$word\" = '=' ]; then word=; else at=$((at - 1)); fi # --name=VALUE is three words\n"
          "    option=${COMP_WORDS[at]}\n"
          "    [ \"$option\" != '=' ] || option=${COMP_WORDS[at - 1]}\n"
          "    case $option in\n",
          to);
    for (size_t i = 0; i < OPTION_COUNT; i++) {
        const struct option *o = &options[i];
        if (o->type == TYPE_SWITCH) continue;
        fprintf(to, "    --%s) ", o->flag);
        if (o->type == TYPE_FILE)
            fputs("compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return", to);
        else if (o->words != NULL) {
            fputs("words='", to);
            put_words(to, o->words);
            fputs("'", to);
        } else fputs("return", to); /* a value of one's own */
        fputs(" ;;\n", to);
    }
    fputs("    *)\n"
          "        words='--help --version",
          to);
    for (size_t i = 0; i < OPTION_COUNT; i++) fprintf(to, " --%s", options[i].flag);
    fputs("'\n"
          "        [ \"$COMP_CWORD\" != 1 ] || words=\"healthcheck $words\"\n"
          "        ;;\n"
          "    esac\n"
          "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n"
          "}\n"
          "complete -F _attnd attnd\n",
          to);
}
