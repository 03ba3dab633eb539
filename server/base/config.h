/* config.h: the options of attnd. One table (config.c) makes --help, the man page, the environment names, the
 * defaults and the checks. */
#ifndef CONFIG_H
#define CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "server/base/limits.h"

/* Everything is settled here before anything starts; strings live as long as the process. Sizes in bytes, times in
 * ms. */
struct config {
    const char *listen[CONFIG_MAX_LISTEN]; /* "127.0.0.1:8080", "[::1]:8080", "unix:/run/attnd.sock" */
    int listen_count;
    const char *metrics_listen;    /* NULL: /metrics is on the main port only */
    const char *devices;           /* "auto", "all", "cpu", "0,1" */
    int http_threads, cpu_threads; /* 0 in the table means by the cores; resolved here */
    int64_t memory_bytes;          /* of the machine, or what the cgroup allows */
    int cores;                     /* that this process may keep busy: of the affinity mask, at most its quota */
    int64_t max_body_bytes;        /* at most staging_bytes */
    int64_t discard_bytes;         /* of a refused request: what is dropped after its answer */
    int64_t staging_bytes;         /* resolved: half the memory unless given */
    int64_t kv_bytes;              /* for KV caches on each device; 0: none; -1: a share of its memory */
    int64_t device_bytes;          /* 0: each device takes its own share (attn_device_options.memory_bytes) */
    int64_t open_files;            /* the limit on open files, where it lowered max_connections; else 0 */
    int max_connections, max_receiving, queue_depth, max_batch;
    int64_t batch_window_us;
    int64_t timeout_ms, body_timeout_ms, body_stall_ms, discard_ms, drain_ms;
    int max_seconds;     /* a request that is expected to take longer, alone on a device, is refused */
    int64_t watchdog_ms; /* what a device may take for a batch beyond what its size explains */
    const char *token_file, *tls_cert, *tls_key, *cors_origin; /* NULL: off */
    int token_share;                                           /* percent */
    const char *allow_shm[CONFIG_MAX_SHM]; /* how keys of shared memory may begin; a '/' before it means nothing */
    int allow_shm_count;                   /* 0: there is none of the system */
    const char *trusted_proxies[CONFIG_MAX_PROXIES]; /* as peer.h reads them */
    int trusted_proxy_count;                         /* 0: X-Forwarded-For is not read */
    bool allow_cuda_shm;
    bool supervise;
    const char *log_format; /* "text" or "json" */
    const char *log_level;  /* "debug" "info" "warn" "error" */
};

/* May clients register any regions? */
static inline bool config_shares_memory(const struct config *config)
{
    return config->allow_shm_count > 0 || config->allow_cuda_shm;
}

/* Most memory of one open connection, with its request and without tensors; then of all connections together. */
static inline int64_t config_one_connection_bytes(const struct config *config)
{
    return HTTP_OPEN_BYTES + HTTP_REQUEST_BYTES + (config->tls_cert != NULL ? HTTP_TLS_BYTES : 0);
}
static inline int64_t config_connection_bytes(const struct config *config)
{
    const int metrics = config->metrics_listen != NULL ? CONFIG_METRICS_CONNECTIONS : 0;
    return (config->max_connections + metrics + CONNECTION_LEAVING) * config_one_connection_bytes(config);
}

/* What a key of shared memory may hold: it is the name of a file. */
#define CONFIG_SHM_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"

/* How variables of options begin; and the one in which a supervisor leaves its sockets to the server. */
#define CONFIG_PREFIX            "ATTND_"
#define CONFIG_INHERITED_SOCKETS CONFIG_PREFIX "INHERITED_SOCKETS"

enum config_result { CONFIG_RUN, CONFIG_EXIT_OK, CONFIG_BAD, CONFIG_BAD_FILE };

/* argv over environment over defaults; an empty environment variable counts as unset. CONFIG_EXIT_OK after --help
 * or --version (printed to stdout). CONFIG_BAD after one clear line on stderr naming the option, the value and what
 * is allowed: exit with 64. CONFIG_BAD_FILE: the same where a file that an option names cannot be read: 78. */
enum config_result config_load(struct config *config, int argc, char **argv);

/* The same without printing: CONFIG_BAD and CONFIG_BAD_FILE leave their line (no newline) in `message`.
 * CONFIG_EXIT_OK: see config_help() and argv. */
enum config_result config_read(struct config *config, int argc, char **argv, char *message, size_t capacity);

void config_help(FILE *to); /* the table for people, 100 columns; config_read() must have run */
void config_help_markdown(
    FILE *to);                   /* the same table for OPTIONS.md (attnd --help-markdown); a test compares the two */
void config_help_man(FILE *to);  /* as attnd(1), in roff (--help-man) */
void config_help_bash(FILE *to); /* for bash to complete a command line with (--help-bash) */

#endif
