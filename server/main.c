/* main.c: starts everything in order, serves until a signal ends it, and stops everything in reverse order.
 *
 * Exit status:
 *
 *   0         the server has finished all accepted requests (it was drained)
 *   64        an option is wrong
 *   69        an address, a device or a thread is not available
 *   70        the last device failed
 *   71        the server was told to stop, and was ended by force (signals.h)
 *   78        a file that an option names is wrong or unreadable
 *   128 + N   under --supervise: signal N ended the server five times in a row
 *
 * If the server cannot start, it prints one line on standard error and serves nothing. */
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/check_command.h"
#include "server/base/staging.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/limits.h"
#include "server/caches/caches.h"
#include "server/work/contexts.h"
#include "server/http/frontend.h"
#include "server/device/devices.h"
#include "server/device/early_load.h"
#include "server/healthcheck.h"
#include "server/base/heartbeat.h"
#include "server/base/log.h"
#include "server/base/signals.h"
#include "server/base/threads.h"
#include "server/sched/loop.h"
#include "server/regions/regions.h"
#include "server/work/server.h"
#include "server/supervise.h"
#include "server/http/tokens.h"

enum { EXIT_USAGE_ERROR = 64, EXIT_UNAVAILABLE = 69, EXIT_DEVICE_LOST = 70, EXIT_CONFIG = 78 };

/* time in milliseconds that the process may take to end after all accepted requests were finished */
enum { AGAIN_MS = LOOP_STOP_MS + SIGNALS_GRACE_MS };

static int complain(int status, const char *text)
{
    log_close();
    fprintf(stderr, "attnd: %s\n", text);
    return status;
}

/* Makes glibc keep freed memory. Otherwise glibc would map each block of some hundred KiB anew, and each of its pages
 * would cause a page fault. */
static void tune_malloc(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 4 << 20);
    mallopt(M_TRIM_THRESHOLD, 32 << 20);
    mallopt(M_TOP_PAD, 1 << 20);
    /* turns off fast bins (lists of small freed pieces): with them, one request would sometimes wait while thousands of
     * pieces are merged */
    mallopt(M_MXFAST, 0);
#endif
}

/* Opens /dev/null for each closed standard descriptor (0, 1, 2). Otherwise a client's socket could get such a number,
 * and log lines would go to this client. */
static void hold_standard_descriptors(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) abort();
}

/* Opens a listening socket for each address, or takes the sockets over from the supervisor (*inherited). */
static bool open_listeners(const struct config *config, struct listener *listeners, int *count, bool *inherited,
                           attn_error *err)
{
    int fds[CONFIG_MAX_LISTEN + 1];
    const int wanted = config->listen_count + (config->metrics_listen != NULL);
    const int given = supervise_inherited(fds, CONFIG_MAX_LISTEN + 1);
    *inherited = given >= 0;
    if (*inherited && given != wanted) {
        attn_fail(err, ATTN_INVALID, NULL, "the supervisor left %d sockets for %d addresses", given, wanted);
        return false;
    }
    for (int i = 0; i < wanted; i++, ++*count) {
        const bool metrics = i == config->listen_count;
        const char *const option = metrics ? "--metrics-listen" : "--listen";
        const char *const where = metrics ? config->metrics_listen : config->listen[i];
        const attn_status status = *inherited ? listener_adopt(&listeners[i], fds[i], err)
                                              : listener_open(&listeners[i], option, where, err);
        if (status != ATTN_OK) return false;
    }
    return true;
}

static void on_signal(void *loop, int number)
{
    loop_signal(loop, number);
}

/* Writes the URL for a browser on this machine; "" if the server listens on unix sockets only. */
static const char *first_url(const struct config *config, const struct listener *listeners,
                             char text[LISTENER_URL_BYTES])
{
    *text = '\0';
    for (int i = 0; i < config->listen_count && *text == '\0'; i++)
        (void)listener_url(&listeners[i], config->tls_cert != NULL, text);
    return text;
}

/* Returns an upper bound on this process's memory: tensors, connections, the CPU device's working memory and caches,
 * and the process itself. */
static int64_t memory_bytes(const struct server *server)
{
    const struct config *const config = server->config;
    int64_t sum = config->staging_bytes + config_connection_bytes(config) + MAIN_BYTES +
                  config->http_threads * (int64_t)MAIN_THREAD_BYTES;
    const int count = devices_count(server->devices);
    struct device_state *devices = calloc((size_t)count + 1, sizeof *devices);
    if (devices == NULL) return sum;
    devices_describe(server->devices, devices);
    for (int i = 0; i < count; i++)
        if (devices[i].info.unified) sum += devices[i].info.memory_limit;
    free(devices);
    return sum;
}

static void complain_of_start(const attn_error *err)
{
    char space[THREADS_SPACE_BYTES] = "";
    if (err->status == ATTN_NO_MEMORY || err->status == ATTN_INTERNAL || err->status == ATTN_DEVICE)
        (void)threads_space(space);
    fprintf(stderr, "attnd: %s%s%s\n", err->text, *space ? "; " : "", space);
}

static int serve(const struct config *config, struct listener *listeners, int count)
{
    struct server server = {
        .config = config, .limits = PROTO_LIMITS_DEFAULT, .started_ms = clock_ms(), .everybody = CALLER_EVERYBODY
    };
    struct frontend frontend;
    struct staging_source staging;
    attn_error err = { 0 };
    int status = EXIT_UNAVAILABLE;
    bool stopped = true;
    char why[512] = "", text[LISTENER_URL_BYTES];

    server.limits.tensor_bytes = config->staging_bytes;
    frontend_init(&frontend, &server, listeners, count);
    queue_init(&server.queue, config->max_receiving, config->queue_depth, config->max_batch,
               config->batch_window_us * 1000);
    server.contexts = contexts_new(config->staging_bytes / CONTEXTS_SHARE, CONTEXTS_MAX_COUNT, CONTEXTS_TTL_MS);
    server.caches = caches_new(CACHES_MAX_COUNT);
    server.loop = loop_open(&server);
    if (config_shares_memory(config) &&
        (server.regions = regions_new(config->allow_shm, config->allow_shm_count)) == NULL) {
        attn_fail(&err, ATTN_NO_MEMORY, NULL, "no memory or no thread for the table of shared memory");
        goto out;
    }
    if (!signals_start(on_signal, server.loop, config->drain_ms + AGAIN_MS, AGAIN_MS)) {
        attn_fail(&err, ATTN_NO_MEMORY, NULL, "no thread for signals could be started");
        goto out;
    }
    if (config->token_file &&
        (server.tokens = tokens_open(config->token_file, config->token_share, why, sizeof why)) == NULL) {
        status = EXIT_CONFIG;
        attn_fail(&err, ATTN_INVALID, NULL, "%s", why);
        goto out;
    }
    if (frontend_open(&frontend, &err) != ATTN_OK) {
        if (config->tls_cert && err.status == ATTN_INVALID) status = EXIT_CONFIG;
        goto out;
    }
    if (devices_open(config, loop_mailbox(server.loop), LOOP_BATCH, &server.devices, &err) != ATTN_OK) goto out;
    if (server.caches == NULL) {
        attn_fail(&err, ATTN_NO_MEMORY, NULL, "no memory for the table of caches");
        goto out;
    }
    if (devices_add_caches(server.devices, config, server.caches, &err) != ATTN_OK) {
        status = EXIT_USAGE_ERROR;
        goto out;
    }
    /* pinning memory takes long and stalls the device, so a pool of pinned memory returns none of it to the system */
    server.pinned = devices_staging(server.devices, &staging);
    server.staging = server.pinned ? staging_new(config->staging_bytes, config->staging_bytes, &staging)
                                   : staging_new(config->staging_bytes, STAGING_WARM_BYTES, NULL);
    if (server.regions && server.pinned)
        regions_pin_for(server.regions, devices_copier(server.devices), config->staging_bytes);
    if (frontend_start(&frontend, &err) != ATTN_OK) goto out;
    if (config->staging_bytes > config->memory_bytes)
        log_event(
            LOG_WARN, NULL, "beyond_memory",
            "option=--staging-bytes bytes=%lld machine_bytes=%lld text=\"requests may take more memory than there "
            "is, and the system ends the process then; the default is half the memory\"",
            (long long)config->staging_bytes, (long long)config->memory_bytes);
    /* A device's thread may be busy for a request's whole time limit plus --watchdog-ms. Only after that does /readyz
     * report the thread as stuck. */
    heartbeat_set_limit(HEARTBEAT_DEVICE, config->timeout_ms + config->watchdog_ms + HEARTBEAT_LIMIT_MS);
    atomic_store(&server.phase, SERVER_READY);
    const char *const url = first_url(config, listeners, text);
    const int64_t memory = memory_bytes(&server);
    log_event(
        LOG_INFO, NULL, "ready",
        "%s%s%sversion=%s http_threads=%d staging_bytes=%lld connection_bytes=%lld memory_bytes=%lld queue_depth=%d",
        *url ? "url=" : "", url, *url ? " " : "", ATTND_VERSION, config->http_threads, (long long)config->staging_bytes,
        (long long)config_connection_bytes(config), (long long)memory, config->queue_depth);
    if (config->open_files > 0)
        log_event(LOG_WARN, NULL, "few_open_files",
                  "limit=%lld connections=%d text=\"the limit on open files (ulimit -n) allows no more connections\"",
                  (long long)config->open_files, config->max_connections);
    const struct loop_frontend for_loop = frontend_for_loop(&frontend);
    status = loop_run(server.loop, &for_loop);
out:
    if (err.text[0]) complain_of_start(&err);
    frontend_close(&frontend);
    if (server.devices) stopped = devices_stop(server.devices, MAIN_STOP_WAIT_MS);
    log_event(LOG_INFO, NULL, "stopped", "status=%d", status);
    log_close();
    /* ends without cleaning up: a running kernel cannot be interrupted, and the driver of a lost device might never
     * return */
    if (!stopped || status == EXIT_DEVICE_LOST) _exit(status);
    signals_quiet();
    loop_close(server.loop);
    contexts_free(server.contexts);
    caches_free(server.caches);
    staging_free(server.staging);
    regions_free(server.regions);
    devices_close(server.devices);
    tokens_close(server.tokens);
    frontend_clear(&frontend);
    return status;
}

int main(int argc, char **argv)
{
    struct config config;
    struct listener listeners[CONFIG_MAX_LISTEN + 1];
    attn_error err = { 0 };
    int count = 0, status;
    bool inherited;

    hold_standard_descriptors();
    if (argc > 1 && strcmp(argv[1], "healthcheck") == 0) return healthcheck_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "check") == 0) return check_command_main(argc - 1, argv + 1);
    signals_block();
    switch (config_load(&config, argc, argv)) {
    case CONFIG_RUN: break;
    case CONFIG_EXIT_OK: return 0;
    case CONFIG_BAD_FILE: return EXIT_CONFIG;
    default: return EXIT_USAGE_ERROR;
    }
    /* writing to a closed connection must return an error, not end the server */
    signal(SIGPIPE, SIG_IGN);
    /* writing to shared memory beyond `ulimit -f` must return an error, not end the server */
    signal(SIGXFSZ, SIG_IGN);
    tune_malloc();
    early_load_kernels();
    log_open(config.log_format, config.log_level);
    if (!open_listeners(&config, listeners, &count, &inherited, &err)) {
        for (int i = 0; i < count; i++) listener_close(&listeners[i]);
        return complain(EXIT_UNAVAILABLE, err.text);
    }
    if (config.supervise && !inherited) {
        status = supervise_run(listeners, count, argv, config.drain_ms + AGAIN_MS, AGAIN_MS);
        for (int i = 0; i < count; i++) listener_close(&listeners[i]);
        log_close();
        return status;
    }
    if (threads_try(threads_needed(&config), &err) != ATTN_OK) {
        for (int i = 0; i < count; i++) listener_close(&listeners[i]);
        return complain(EXIT_UNAVAILABLE, err.text);
    }
    return serve(&config, listeners, count);
}
