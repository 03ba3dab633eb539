/* config_table.c: the options of attnd. A new option is a new row here and a new member of struct config. */
#include "server/base/config_internal.h"

#include <assert.h>
#include <stdio.h>

#include "server/base/limits.h"

#define DAY_MS INT64_C(86400000)

#define AT(member) offsetof(struct config, member)

/* clang-format off */
const struct config_option config_options[] = {
    { "listen", "ATTND_LISTEN", TYPE_LISTEN, "ADDR:PORT", AT(listen), .word = "127.0.0.1:8080",
      .help = "Address to serve on: 0.0.0.0:8080, [::1]:8080 or unix:/run/attnd.sock. Port 0 is any free port. The "
              "option may be given up to 8 times; ATTND_LISTEN takes a comma-separated list." },
    { "devices", "ATTND_DEVICES", TYPE_DEVICES, "auto|all|cpu|0,1", AT(devices), .word = "auto", .words = "auto|all|cpu",
      .help = "Devices that compute. auto: every GPU, or the CPU where there is none. all: every GPU. cpu: the "
              "CPU. 0,1: the GPUs of these numbers. `reference` is the slow float64 backend of the tests; `paper` is "
              "FlashAttention-2 as in its paper." },
    { "http-threads", "ATTND_HTTP_THREADS", TYPE_INT, "N", AT(http_threads), 0, 0, 256, .shown = "8 per core, at most 16",
      .help = "Number of threads that receive requests, decode and encode bodies, and send answers. If the "
              "CPU is the device, they also compute small problems. 0 means the default." },
    { "cpu-threads", "ATTND_CPU_THREADS", TYPE_INT, "N", AT(cpu_threads), 0, 0, 1024, .shown = "cores",
      .help = "Number of threads that compute attention on the CPU, except small problems. 0 means the default: the "
              "cores that the affinity mask and the cgroup's quota allow." },
    { "max-body-bytes", "ATTND_MAX_BODY_BYTES", TYPE_SIZE, "SIZE", AT(max_body_bytes), GIB, KIB, 1024 * GIB,
      .shown = "1G, at most --staging-bytes",
      .help = "Largest length of a request's body, including the tensors that it names in shared memory. A request "
              "with a longer body is answered 413." },
    { "staging-bytes", "ATTND_STAGING_BYTES", TYPE_SIZE, "SIZE", AT(staging_bytes), 0, MIB, 16384 * GIB,
      .shown = "half the memory, at most 64G",
      .help = "Host memory for the tensors of all requests together. A request for which no memory is free is "
              "answered 503. The log warns if SIZE is more than the machine has or the cgroup allows." },
    { "device-bytes", "ATTND_DEVICE_BYTES", TYPE_SIZE, "SIZE", AT(device_bytes), 0, MIB, 16384 * GIB,
      .shown = "a share of the device's",
      .help = "Memory that the server may use on each device; /v1/info shows the size of the default. A request that "
              "needs more than this memory is answered 413." },
    { "kv-bytes", "ATTND_KV_BYTES", TYPE_SIZE, "SIZE", AT(kv_bytes), -1, 0, 16384 * GIB,
      .shown = "an eighth of the device's",
      .help = "Memory of each device for caches of keys and values (/v1/caches), allocated when the first cache is "
              "made. A request that needs more memory for a cache than is free is answered 507. At most "
              "--device-bytes. On the CPU the default is at most 16G. 0: no caches." },
    { "max-connections", "ATTND_MAX_CONNECTIONS", TYPE_INT, "N", AT(max_connections), 10000, 1, 1000000,
      .shown = "10000, or what memory allows",
      .help = "Largest number of open connections. The default is what the limit on open files and an eighth of the "
              "memory allow. To accept a connection beyond this number, the server closes the connection that has "
              "been idle longest, first one that never sent a token; if no connection is idle, the server answers 503 "
              "to the new one and closes it. A connection takes up to 192 KiB of memory, 84 KiB while idle, and 32 "
              "KiB more with TLS; the log line `ready` has the sum." },
    { "max-receiving", "ATTND_MAX_RECEIVING", TYPE_INT, "N", AT(max_receiving), 0, 0, 1000000,
      .shown = "--max-connections",
      .help = "Largest number of requests whose body is being received. A request beyond this number is answered 503. "
              "0 means the default." },
    { "queue-depth", "ATTND_QUEUE_DEPTH", TYPE_INT, "N", AT(queue_depth), 1024, 1, 1 << 20,
      .help = "Largest number of requests that wait for a device. A request beyond this number is answered 503." },
    { "batch-window-us", "ATTND_BATCH_WINDOW_US", TYPE_INT64, "N", AT(batch_window_us), 0, 0, 1000000,
      .help = "Microseconds that a request may wait for other requests with which a device can compute it together. "
              "0: requests never wait while a device is idle. Small problems on the CPU never wait." },
    { "max-batch", "ATTND_MAX_BATCH", TYPE_INT, "N", AT(max_batch), 64, 1, CONFIG_MAX_BATCH,
      .help = "Largest number of problems that a device computes together." },
    { "split-above-ms", "ATTND_SPLIT_ABOVE_MS", TYPE_INT64, "N", AT(split_above_ms), 20, 0, DAY_MS,
      .help = "Milliseconds that a problem may be expected to take on one device. A problem that would take longer is "
              "divided among all devices of one kind that have free memory: by groups of heads, by rows of the batch "
              "or by queries. The answer has the same bits (that of a backward on a GPU needs `deterministic`), except "
              "that dk and dv of a problem divided by queries are sums of parts. 0: problems are never divided." },
    { "timeout-ms", "ATTND_TIMEOUT_MS", TYPE_INT64, "N", AT(timeout_ms), 60000, 1, DAY_MS,
      .help = "Milliseconds from the last byte of a request to its answer. A request that takes longer is answered "
              "504. A client may set a shorter time." },
    { "max-seconds", "ATTND_MAX_SECONDS", TYPE_INT, "N", AT(max_seconds), 60, 1, 86400,
      .help = "Seconds that the work of one request may be expected to take on an idle device. A request that would "
              "take longer is answered 422 at once. The estimate uses rates measured on one machine of each kind: "
              "your machine may be three times as fast or slow. A request that no device can finish before its "
              "deadline is answered 504 at once." },
    { "body-timeout-ms", "ATTND_BODY_TIMEOUT_MS", TYPE_INT64, "N", AT(body_timeout_ms), 30000, 1, DAY_MS,
      .help = "Milliseconds for a body to arrive or an answer to be read, plus 1 ms for each KiB of the body or "
              "answer. After this time the connection is closed, with status 408 if the body is incomplete." },
    { "body-stall-ms", "ATTND_BODY_STALL_MS", TYPE_INT64, "N", AT(body_stall_ms), 5000, 1, DAY_MS,
      .help = "Milliseconds for which no byte of an incomplete body may arrive. After this time the connection is "
              "closed with status 408, and its memory is free for other requests." },
    { "discard-ms", "ATTND_DISCARD_MS", TYPE_INT64, "N", AT(discard_ms), 10000, 1, DAY_MS,
      .help = "Milliseconds for which the server reads and drops the rest of a refused request, so that a client that "
              "reads no answer before it has sent its whole body can still read the answer." },
    { "discard-bytes", "ATTND_DISCARD_BYTES", TYPE_SIZE, "SIZE", AT(discard_bytes), 4 * GIB, 0, 1024 * GIB, .shown = "4G",
      .help = "Largest number of bytes of a refused request that the server reads and drops. After that the "
              "connection is reset. 0: no bytes are dropped." },
    { "drain-ms", "ATTND_DRAIN_MS", TYPE_INT64, "N", AT(drain_ms), 30000, 0, DAY_MS,
      .help = "Milliseconds after SIGTERM in which the server answers the requests that it has accepted." },
    { "watchdog-ms", "ATTND_WATCHDOG_MS", TYPE_INT64, "N", AT(watchdog_ms), 60000, 1, DAY_MS,
      .help = "Milliseconds that a GPU may take for a batch beyond the time that the batch is expected to take. After "
              "this time the GPU counts as lost, and the requests on it are answered 503. If no other GPU is left, "
              "the server ends with exit status 70." },
    { "token-file", "ATTND_TOKEN_FILE", TYPE_FILE, "FILE", AT(token_file), .shown = "off",
      .help = "File of bearer tokens, one per line. A comment behind \" #\" names the token in /metrics and in "
              "the log. With this option every route needs a token, except the probes, /, /docs and "
              "/openapi.json." },
    { "token-share", "ATTND_TOKEN_SHARE", TYPE_INT, "PERCENT", AT(token_share), 50, 1, 100,
      .help = "Largest share, in percent, that one token may use of each of these resources: the staging memory, the "
              "requests that are received or wait, the saved contexts, the caches and their memory on all devices "
              "together, and the regions of shared memory. A request beyond the share is answered 429. The option has "
              "no effect if --token-file has only one token." },
    { "tls-cert", "ATTND_TLS_CERT", TYPE_FILE, "FILE", AT(tls_cert), .shown = "off",
      .help = "Certificate chain (PEM); the server then speaks TLS. Needs --tls-key." },
    { "tls-key", "ATTND_TLS_KEY", TYPE_FILE, "FILE", AT(tls_key), .shown = "off",
      .help = "Private key (PEM) of --tls-cert." },
    { "cors-origin", "ATTND_CORS_ORIGIN", TYPE_ORIGIN, "ORIGIN", AT(cors_origin), .shown = "off",
      .help = "Web origin whose pages may call this server: https://example.org, or * (not with --token-file). A "
              "request other than GET and HEAD from a page of any other site is answered 403." },
    { "trusted-proxy", "ATTND_TRUSTED_PROXY", TYPE_PROXY, "NETWORK", AT(trusted_proxies), .shown = "off",
      .help = "Address or network of a proxy in front of the server: 10.0.0.1, 10.0.0.0/8, fd00::/8, or unix for a "
              "unix socket. For a request from this proxy, the client's address in the log is the last address in "
              "X-Forwarded-For that is not a trusted proxy's. The option may be given up to 8 times; ATTND_TRUSTED_PROXY "
              "takes a comma-separated list." },
    { "allow-shm", "ATTND_ALLOW_SHM", TYPE_SHM, "PREFIX", AT(allow_shm), .shown = "off",
      .help = "Let clients put tensors in shared memory of this machine (Triton's extension): in objects of /dev/shm "
              "whose name begins with PREFIX. Every client can then make the server read and write these objects. The "
              "option may be given up to 8 times; ATTND_ALLOW_SHM takes a comma-separated list." },
    { "allow-cuda-shm", "ATTND_ALLOW_CUDA_SHM", TYPE_SWITCH, NULL, AT(allow_cuda_shm), 0, .shown = "off",
      .help = "Let clients lend tensors in their own GPU memory to the server by a handle (Triton's extension for "
              "CUDA). The server's kernels read and write this memory in place. Only for trusted clients: a handle "
              "opens whatever memory the GPU's driver lets the server open." },
    { "supervise", "ATTND_SUPERVISE", TYPE_SWITCH, NULL, AT(supervise), 0, .shown = "off",
      .help = "A parent process keeps the listening sockets, and starts a new server when the server dies." },
    { "log-format", "ATTND_LOG_FORMAT", TYPE_CHOICE, "text|json", AT(log_format), .word = "text", .words = "text|json",
      .help = "Format of the log on standard error, one line per event: text or JSON." },
    { "log-level", "ATTND_LOG_LEVEL", TYPE_CHOICE, "LEVEL", AT(log_level), .word = "info", .words = "debug|info|warn|error",
      .help = "Lowest level of the log lines that the server writes: debug, info, warn or error." },
    { "metrics-listen", "ATTND_METRICS_LISTEN", TYPE_ADDRESS, "ADDR:PORT", AT(metrics_listen),
      .shown = "the --listen addresses",
      .help = "Another address for /metrics and the health probes. A thread of its own serves this address, even when "
              "all other threads are busy, on up to 256 connections." },
};
/* clang-format on */

const size_t config_option_count = ARRAY_SIZE(config_options);
static_assert(ARRAY_SIZE(config_options) <= CONFIG_OPTIONS_MAX, "config.c keeps a bit for each");

const char *config_size_text(int64_t bytes, char text[24])
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
