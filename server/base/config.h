/* config.h: the options of attnd. --help, the man page, the environment names, the defaults and the checks all come
 * from one table (config_table.c). */
#ifndef CONFIG_H
#define CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "server/base/limits.h"

/* The final values of all options. They are known before any thread starts. Texts live as long as the process. Sizes
 * are in bytes, times in milliseconds. */
struct config {
    /* addresses to listen on, such as "127.0.0.1:8080", "[::1]:8080" or "unix:/run/attnd.sock" */
    const char *listen[CONFIG_MAX_LISTEN];
    int listen_count;
    /* address of the port for metrics and probes; NULL: /metrics is on the main port only */
    const char *metrics_listen;
    const char *devices; /* the devices to use: "auto", "all", "cpu", or GPU numbers such as "0,1" */
    /* numbers of threads; the option's value 0 (choose by the number of cores) is replaced by the chosen number */
    int http_threads, cpu_threads;
    int64_t memory_bytes; /* memory of the machine, or the limit of the process's cgroup if that is less */
    /* cores that this process may keep busy: those in its affinity mask, but at most the CPU quota of its cgroup */
    int cores;
    int64_t max_body_bytes; /* largest size of a request body; at most staging_bytes */
    /* after a refusal, the server reads and drops at most this many further bytes of the request */
    int64_t discard_bytes;
    /* the limit of staging memory (memory for tensors of requests); unless --staging-bytes is given, half of
     * memory_bytes or less */
    int64_t staging_bytes;
    /* memory for KV caches on each device; 0: no caches; -1: the default share of the device's memory */
    int64_t kv_bytes;
    /* Memory that each device may use; 0: the library's default (attn_device_options.memory_bytes). */
    int64_t device_bytes;
    int64_t open_files; /* the limit on open files, if max_connections was lowered because of that limit; otherwise 0 */
    int max_connections, max_receiving, queue_depth, max_batch;
    int64_t batch_window_us;
    int64_t split_above_ms;
    int64_t timeout_ms, body_timeout_ms, body_stall_ms, discard_ms, drain_ms;
    /* longest expected time in seconds of a request that has a device for itself; a request that would take longer is
     * refused */
    int max_seconds;
    /* If a batch runs this many milliseconds longer than the longest time that is expected for its size, its device
     * counts as failed. */
    int64_t watchdog_ms;
    /* the token file, the TLS certificate, the certificate's key, and the origin that CORS allows; NULL: the option is
     * not given */
    const char *token_file, *tls_cert, *tls_key, *cors_origin;
    int token_share; /* percentage of each of the server's bounds (memory, queue slots) that one token may use */
    /* a shared memory key must begin with one of these prefixes; a '/' at the beginning of a prefix is ignored */
    const char *allow_shm[CONFIG_MAX_SHM];
    int allow_shm_count;
    /* addresses and networks of trusted proxies, as texts in the form that peer.h describes */
    const char *trusted_proxies[CONFIG_MAX_PROXIES];
    int trusted_proxy_count; /* 0: the header X-Forwarded-For is ignored */
    bool allow_cuda_shm;
    bool supervise;
    const char *log_format; /* form of the log lines: "text" or "json" */
    const char *log_level;  /* lowest level of lines that are logged: "debug", "info", "warn" or "error" */
};

static inline bool config_shares_memory(const struct config *config)
{
    return config->allow_shm_count > 0 || config->allow_cuda_shm;
}

/* Upper bounds on memory, in bytes, without the tensors of requests. config_one_connection_bytes() is the bound for one
 * open connection and its request, config_connection_bytes() for all connections together. */
static inline int64_t config_one_connection_bytes(const struct config *config)
{
    return HTTP_OPEN_BYTES + HTTP_REQUEST_BYTES + (config->tls_cert != NULL ? HTTP_TLS_BYTES : 0);
}
static inline int64_t config_connection_bytes(const struct config *config)
{
    const int metrics = config->metrics_listen != NULL ? CONFIG_METRICS_CONNECTIONS : 0;
    return (config->max_connections + metrics + CONNECTION_LEAVING) * config_one_connection_bytes(config);
}

/* Characters that a shared memory key may contain. The key is the name of a file in /dev/shm. */
#define CONFIG_SHM_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"

/* Prefix of the environment variables of options, and the variable in which a supervisor lists its sockets. */
#define CONFIG_PREFIX            "ATTND_"
#define CONFIG_INHERITED_SOCKETS CONFIG_PREFIX "INHERITED_SOCKETS"

enum config_result { CONFIG_RUN, CONFIG_EXIT_OK, CONFIG_BAD, CONFIG_BAD_FILE };

/* Reads the options. Flags in argv override environment variables, and environment variables override defaults. An
 * empty environment variable counts as unset. CONFIG_EXIT_OK: --help or --version was printed to stdout. CONFIG_BAD:
 * one line on stderr names the option, its value and what is allowed; the program should exit with 64. CONFIG_BAD_FILE:
 * a file that an option names cannot be read, and one line on stderr says so; the program should exit with 78. */
enum config_result config_load(struct config *config, int argc, char **argv);

/* Reads the options as config_load() does, but prints nothing. On CONFIG_BAD and CONFIG_BAD_FILE, `message` has the
 * line that config_load() would print, without a newline. On CONFIG_EXIT_OK the caller finds in argv which text to
 * print; see config_help(). */
enum config_result config_read(struct config *config, int argc, char **argv, char *message, size_t capacity);

void config_help(FILE *to);          /* prints --help, at most 100 columns wide; call config_read() first */
void config_help_markdown(FILE *to); /* prints OPTIONS.md (--help-markdown); a test compares it with the file */
void config_help_man(FILE *to);
void config_help_bash(FILE *to);

#endif
