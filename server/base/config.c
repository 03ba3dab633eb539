/* config.c: reads the options of attnd. The table config_options[] (config_table.c) has a row for each option, with
 * flag, environment variable, default, range and help.
 *
 * A value on the command line replaces one from the environment, which replaces the default. The final step sets
 * defaults that depend on the machine and checks that the options fit together.
 *
 * A refusal is one line that names the option as the user wrote it, the value and what is allowed. A given value is
 * never changed, only refused. Nothing is started, opened or written here, but the soft limit on open files is
 * raised. */
#include "server/base/config_internal.h"

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
#include "text/text.h"
#include "server/base/config_suggestions.h"
#include "server/base/limits.h"
#include "server/base/peer.h"

enum {
    /* Number of HTTP threads per core, unless --http-threads is given. With few connections per thread, more of a body
     * is still in the CPU's cache when its last byte arrives. */
    HTTP_THREADS_A_CORE = 8,
    HTTP_THREADS_AUTO_MAX = 16,
};
/* largest default value of --staging-bytes (memory for tensors of requests) */
#define STAGING_AUTO_MAX (64 * GIB)

/* Copies of options' texts, which live as long as the process. kept_list links all copies, so that leak checkers do not
 * report them. */
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
        /* cuts off the scope, such as %eth0 in [fe80::1%eth0], which inet_pton() does not accept */
        host[1 + strcspn(host + 1, "%")] = '\0';
        return inet_pton(AF_INET6, host + 1, binary) == 1;
    }
    if (strspn(host, "0123456789.") == length) return inet_pton(AF_INET, host, binary) == 1;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)host[i]) && strchr("-._", host[i]) == NULL) return false;
    return true;
}

/* Writes a hint, such as "; write 127.0.0.1:9000", for an address that lacks a part or has one part too many. Writes ""
 * if there is no hint. */
static const char *address_hint(const char *value, char hint[CONFIG_HINT_BYTES])
{
    static const struct {
        const char *begins;
        /* the hint is `before`, then the refused value without `begins`, then `behind` */
        const char *before, *behind;
    } suggestions[] = {
        { "", "127.0.0.1:", "" }, /* for the refused value "9000", the hint is 127.0.0.1:9000 */
        { ":", "127.0.0.1:", "" }, { "*:", "0.0.0.0:", "" }, { "http://", "", "" },
        { "https://", "", "" },    { "tcp://", "", "" },     { "unix://", "unix:", "" },
        { "", "", ":8080" },       { "", "[", "]:8080" },    { "/", "unix:/", "" },
    };
    const char *const colon = strrchr(value, ':');
    char address[CONFIG_HINT_BYTES];
    *hint = '\0';
    snprintf(address, sizeof address, "[%.*s]%s", colon ? (int)(colon - value) : 0, value, colon ? colon : "");
    /* suggests brackets around an IPv6 address: [::1]:8080 instead of ::1:8080 */
    bool found = address_ok(address);
    for (size_t i = 0; i < ARRAY_SIZE(suggestions) && !found; i++) {
        const size_t cut = strlen(suggestions[i].begins);
        if (strncmp(value, suggestions[i].begins, cut) != 0 || (cut == 0 && strncmp(value, "unix:", 5) == 0)) continue;
        const size_t length = strlen(value + cut), slash = length > 0 && value[cut + length - 1] == '/';
        snprintf(address, sizeof address, "%s%.*s%s", suggestions[i].before, (int)(length - slash), value + cut,
                 suggestions[i].behind);
        found = address_ok(address);
    }
    if (found) snprintf(hint, CONFIG_HINT_BYTES, "; write %.120s", address);
    return hint;
}

static bool devices_ok(const char *text)
{
    if (word_in("auto|all|cpu|reference|paper", text)) return true;
    uint64_t seen = 0;
    static_assert(CONFIG_MAX_DEVICES <= 64, "each has a bit in `seen`");
    for (;;) {
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

/* Copies the origin of --cors-origin in the form in which browsers send origins: lower case, without the scheme's
 * default port. */
static const char *keep_origin(const char *text)
{
    char *const origin = keep(text, strlen(text));
    for (char *c = origin; *c; c++) *c = (char)tolower((unsigned char)*c);
    const char *const port = strncmp(origin, "https:", 6) == 0 ? ":443" : ":80";
    const size_t length = strlen(origin), most = strlen(port);
    if (length > most && strcmp(origin + length - most, port) == 0) origin[length - most] = '\0';
    return origin;
}

/* ---- Reading options and environment variables ------------------------------------------------------------------- */

struct reading {
    struct config *config;
    bool given[CONFIG_OPTIONS_MAX];
    /* from_flag[i]: whether a command-line flag has set option i */
    bool from_flag[CONFIG_OPTIONS_MAX];
    char *message;
    size_t capacity;
};

static const char **list_of(struct config *config, const struct config_option *o, int **count, int *most)
{
    *count = NULL;
    *most = 0;
    switch (o->type) {
    case TYPE_LISTEN: *count = &config->listen_count, *most = CONFIG_MAX_LISTEN; return config->listen;
    case TYPE_SHM: *count = &config->allow_shm_count, *most = CONFIG_MAX_SHM; return config->allow_shm;
    case TYPE_PROXY: *count = &config->trusted_proxy_count, *most = CONFIG_MAX_PROXIES; return config->trusted_proxies;
    default: return NULL;
    }
}

static enum config_result add_to_list(struct reading *r, const struct config_option *o, const char *name,
                                      const char *value, const char *what)
{
    int *count, most;
    const char **const list = list_of(r->config, o, &count, &most);
    if (*count == most)
        return refuse(r->message, r->capacity, "%s: '%s' is one too many, at most %d %s", name, value, most, what);
    list[(*count)++] = keep(value, strlen(value));
    return CONFIG_RUN;
}

/* `name` is the option as the user wrote it, for messages: "--queue-depth" or "ATTND_QUEUE_DEPTH" */
static enum config_result set_value(struct reading *r, const struct config_option *o, const char *name,
                                    const char *value)
{
    char *const m = r->message;
    const size_t n = r->capacity;
    void *member = (char *)r->config + o->offset;
    int64_t number = 0;
    char low[24], high[24], list[96], hint[CONFIG_HINT_BYTES];
    switch (o->type) {
    case TYPE_INT:
    case TYPE_INT64:
        if (!parse_number(value, &number) || number < o->min || number > o->max)
            return refuse(m, n, "%s: '%s' is not a whole number from %lld to %lld%s", name, value, (long long)o->min,
                          (long long)o->max, config_value_hint(o, value, hint));
        if (o->type == TYPE_INT) *(int *)member = (int)number;
        else *(int64_t *)member = number;
        return CONFIG_RUN;
    case TYPE_SIZE:
        if (!parse_size(value, &number) || number < o->min || number > o->max)
            return refuse(m, n, "%s: '%s' is not a size from %s to %s (bytes, or with K, M or G)%s", name, value,
                          config_size_text(o->min, low), config_size_text(o->max, high),
                          config_size_hint(value, o->min, o->max, hint));
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
            return refuse(m, n, "%s: '%s' is not one of: %s%s", name, value, list, config_value_hint(o, value, hint));
        }
        break;
    case TYPE_ADDRESS:
    case TYPE_LISTEN:
        if (!address_ok(value))
            return refuse(
                m, n,
                "%s: '%s' is not ADDR:PORT, [IPV6]:PORT with a port from 0 to 65535, or unix:PATH of at most %zu "
                "bytes%s",
                name, value, sizeof(((struct sockaddr_un *)0)->sun_path) - 1, address_hint(value, hint));
        if (o->type == TYPE_LISTEN) return add_to_list(r, o, name, value, "addresses");
        break;
    case TYPE_SHM:
        if (!shm_ok(value))
            return refuse(
                m, n,
                "%s: '%s' is not the beginning of a key: 1 to %d letters, digits, '_', '.' and '-', such as attn_",
                name, value, CONFIG_SHM_BYTES);
        return add_to_list(r, o, name, value, "prefixes");
    case TYPE_PROXY:
        if (!peer_is_network(value))
            return refuse(m, n,
                          "%s: '%s' is not an address, a network or unix: 10.0.0.1, 10.0.0.0/8, fd00::/8, or unix for "
                          "a proxy that connects through a unix socket",
                          name, value);
        return add_to_list(r, o, name, value, "networks");
    case TYPE_DEVICES:
        if (!devices_ok(value))
            return refuse(m, n, "%s: '%s' is not auto, all, cpu, or different GPU numbers from 0 to %d such as 0,1%s",
                          name, value, CONFIG_MAX_DEVICES - 1, config_value_hint(o, value, hint));
        break;
    case TYPE_FILE:
        if (access(value, R_OK) != 0) {
            (void)refuse(m, n, "%s: '%s' cannot be read: %s", name, value, strerror(errno));
            return CONFIG_BAD_FILE;
        }
        break;
    case TYPE_ORIGIN:
        if (!origin_ok(value))
            return refuse(m, n, "%s: '%s' is not an origin such as https://example.org, or *", name, value);
        *(const char **)member = keep_origin(value);
        return CONFIG_RUN;
    }
    *(const char **)member = keep(value, strlen(value));
    return CONFIG_RUN;
}

static void set_default(struct config *config, const struct config_option *o)
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
    case TYPE_PROXY: config->trusted_proxy_count = 0; break;
    default: *(const char **)member = o->word; break;
    }
}

/* Takes the value of an option from the environment or from the command line. If the option is a list, the value is
 * added to the list. But the first value from the environment replaces the defaults, and the first value from the
 * command line replaces all values from the environment. */
static enum config_result give(struct reading *r, size_t index, const char *name, const char *value, bool from_flag)
{
    const struct config_option *o = &config_options[index];
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

/* Prints an option with its value between the texts `before` and `behind`: as a flag, "--queue-depth 8", or as a
 * variable, "ATTND_QUEUE_DEPTH=8". */
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

/* Suggests for an unknown flag or variable the option that other servers call by this name, or else the most similar
 * one. */
static void suggest(const char *name, bool variable, char *text, size_t capacity)
{
    const struct config_suggestion *const suggestion = config_suggestion(name);
    /* An option is suggested only if at most about half of the letters of `name` differ. */
    struct text_nearest nearest = { name, NULL, 1 + (int)strlen(name) / 2 };
    for (size_t i = 0; i < config_option_count; i++)
        text_consider(&nearest, variable ? config_options[i].env + strlen(CONFIG_PREFIX) : config_options[i].flag);
    *text = '\0';
    if (suggestion != NULL && suggestion->instead != NULL) snprintf(text, capacity, "; %s", suggestion->instead);
    else if (suggestion != NULL)
        put_option(suggestion->flag, suggestion->value, variable, "; write ", "", text, capacity);
    else if (nearest.name != NULL) put_option(nearest.name, "", variable, "; did you mean ", "?", text, capacity);
}

static enum config_result refuse_unknown(struct reading *r, const char *arg)
{
    const size_t dashes = strspn(arg, "-"), length = strcspn(arg + dashes, "=");
    char name[64], hint[192];
    snprintf(name, sizeof name, "%.*s", (int)length, arg + dashes);
    /* an argument without dashes is a command that attnd does not have, or a value whose option is missing */
    if (dashes == 0) {
        const struct config_suggestion *const suggestion = config_suggestion(name);
        const char *const instead = suggestion != NULL ? suggestion->instead : NULL;
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
    for (size_t i = 0; i < config_option_count; i++)
        if (strcmp(config_options[i].env, name) == 0) return true;
    return strcmp(name, CONFIG_INHERITED_SOCKETS) == 0;
}

/* Refuses variables that begin with ATTND_ and are no options, such as misspelt ones. */
static enum config_result refuse_variables(struct reading *r)
{
    for (char **variable = environ; *variable != NULL; variable++) {
        const size_t length = strcspn(*variable, "=");
        const char *const value = *variable + length + ((*variable)[length] == '=');
        char name[96], hint[192];
        if (strncmp(*variable, CONFIG_PREFIX, strlen(CONFIG_PREFIX)) != 0 || *value == '\0') continue;
        snprintf(name, sizeof name, "%.*s", (int)length, *variable);
        if (is_variable(name) || config_is_service_link(name, value) || config_is_of_the_project(name)) continue;
        suggest(name + strlen(CONFIG_PREFIX), true, hint, sizeof hint);
        return refuse(r->message, r->capacity, "%s is not an option%s (attnd --help lists them)", name, hint);
    }
    return CONFIG_RUN;
}

static enum config_result read_environment(struct reading *r)
{
    for (size_t i = 0; i < config_option_count; i++) {
        const char *value = getenv(config_options[i].env);
        /* an empty variable counts as unset, because Docker Compose files write VAR= for variables that are not set */
        if (value == NULL || *value == '\0') continue;
        const enum config_result result = give(r, i, config_options[i].env, value, false);
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
        while (i < config_option_count &&
               !(strncmp(config_options[i].flag, flag, length) == 0 && config_options[i].flag[length] == '\0'))
            i++;
        if (i == config_option_count) return refuse_unknown(r, arg);
        char name[64];
        snprintf(name, sizeof name, "--%s", config_options[i].flag);
        const char *value = flag[length] == '=' ? flag + length + 1 : NULL;
        if (value == NULL && config_options[i].type == TYPE_SWITCH) value = "on";
        if (value == NULL) {
            if (a + 1 == argc)
                return refuse(r->message, r->capacity, "%s: a value is missing (%s)", name,
                              config_options[i].placeholder);
            value = argv[++a];
        }
        const enum config_result result = give(r, i, name, value, true);
        if (result != CONFIG_RUN) return result;
    }
    return CONFIG_RUN;
}

static bool was_given(const struct reading *r, const char *flag)
{
    for (size_t i = 0; i < config_option_count; i++)
        if (strcmp(config_options[i].flag, flag) == 0) return r->given[i];
    abort(); /* reached only if this file's own code looks up an option that does not exist */
}

/* True if two listening addresses are equal. Port 0 means any free port, so an address with port 0 equals no other. */
static bool same_address(const char *a, const char *b)
{
    int64_t port = 0;
    if (strcmp(a, b) != 0) return false;
    return strncmp(a, "unix:", 5) == 0 || !parse_number(strrchr(a, ':') + 1, &port) || port != 0;
}

/* Returns how many connections are possible with `files` open files. `spare` files are reserved for other uses. If
 * `spare` is more than half of `files`, connections get half of the files that the process and its threads do not
 * need. */
static int connections_for(const struct config *c, int64_t files, int64_t spare)
{
    const int64_t own = CONFIG_LEAST_FILES + (int64_t)CONFIG_THREAD_FILES * (c->http_threads + 1);
    const int64_t most = files >= 2 * spare ? files - spare : (files - own) / 2;
    return most < 0 ? 0 : (int)most;
}

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
        /* rounds down to a multiple of the number of cores, so that each core has the same number of threads */
        if (cores * cores <= most) c->http_threads -= c->http_threads % cores;
    }
    if (c->cpu_threads == 0) c->cpu_threads = machine.cores;
    c->cores = machine.cores;
    c->memory_bytes = machine.memory_bytes;

    if (c->staging_bytes == 0) {
        c->staging_bytes = machine.memory_bytes / 2 / MIB * MIB;
        if (c->staging_bytes > STAGING_AUTO_MAX) c->staging_bytes = STAGING_AUTO_MAX;
        if (c->staging_bytes < MIB) c->staging_bytes = MIB;
    }
    if (c->max_body_bytes > c->staging_bytes) {
        if (was_given(r, "max-body-bytes"))
            return refuse(m, n, "--max-body-bytes: %s is more than --staging-bytes, which is %s%s",
                          config_size_text(c->max_body_bytes, a), config_size_text(c->staging_bytes, b),
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

    if (!was_given(r, "max-connections")) {
        int64_t most = machine.memory_bytes / HTTP_CONNECTIONS_SHARE / config_one_connection_bytes(c);
        if (most < HTTP_CONNECTIONS_LEAST) most = HTTP_CONNECTIONS_LEAST;
        if (c->max_connections > most) c->max_connections = (int)most;
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
            const int most = connections_for(c, (int64_t)files.rlim_cur, (int64_t)spare);
            if (was_given(r, "max-connections") || most < HTTP_CONNECTIONS_LEAST)
                return refuse(
                    m, n,
                    "--max-connections: %d connections need %lld open files, but the limit here is %lld (ulimit -n)",
                    c->max_connections, (long long)wanted, (long long)files.rlim_cur);
            c->max_connections = most;
            c->open_files = (int64_t)files.rlim_cur;
        }
    }
    if (c->max_receiving == 0) c->max_receiving = c->max_connections;
    return CONFIG_RUN;
}

static void put_version(FILE *to)
{
    fprintf(to, "attnd %s (%s)\n", ATTND_VERSION, CONFIG_MACHINE);
}

/* Looks for the first flag that asks for a text, such as --help or --version, and returns the function that prints the
 * text. Returns NULL if there is no such flag. Other arguments are not checked here. */
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
    for (size_t i = 0; i < config_option_count; i++) set_default(config, &config_options[i]);

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
    if (result == CONFIG_BAD || result == CONFIG_BAD_FILE) fprintf(stderr, "attnd: %s\n", message);
    if (result == CONFIG_EXIT_OK) find_text(argc, argv)(stdout);
    return result;
}
