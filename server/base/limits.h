/* limits.h: every limit and time-out of the server that no option sets, with its reason.
 *
 * A limit that an option sets is in the option's row of config_table.c. The limits on the contents of one body are in
 * PROTO_LIMITS_DEFAULT of proto-json/proto.h. The name of a limit begins with the name of the file that enforces it,
 * but the limits that begin with HTTP are enforced by mhd.c. */
#ifndef LIMITS_H
#define LIMITS_H

#include <stdint.h>

/* ---- Limits on the values of options ----------------------------------------------------------------------------- */

enum {
    /* largest number of --listen addresses, enough for several of each kind (IPv4, IPv6, unix) */
    CONFIG_MAX_LISTEN = 8,
    /* Largest number of connections to --metrics-listen, in addition to --max-connections. Probes and scrapers use
     * them. */
    CONFIG_METRICS_CONNECTIONS = 256,
    /* Number of file descriptors that are reserved for other uses than connections: epoll, eventfd, libraries, the log
     * and the GPU driver. */
    CONFIG_SPARE_FILES = 128,
    /* Number of file descriptors that the process itself needs, besides those of connections, threads and the GPU
     * driver. If the limit on open files is very low, this number is used in place of the larger CONFIG_SPARE_FILES. */
    CONFIG_LEAST_FILES = 32,
    CONFIG_THREAD_FILES = 2, /* number of file descriptors of one HTTP thread: one for epoll, one for an eventfd */
    /* upper bound of --max-batch (requests in a batch) */
    CONFIG_MAX_BATCH = 1024,
    /* largest number of --trusted-proxy networks; the peer of every request is compared with all of them */
    CONFIG_MAX_PROXIES = 8,
    /* device numbers in --devices are less than this: a 64-bit mask has one bit for each device */
    CONFIG_MAX_DEVICES = 64,
    /* largest number of --allow-shm prefixes; the error message for a wrong key lists all of them */
    CONFIG_MAX_SHM = 8,
    CONFIG_SHM_BYTES = 32, /* longest --allow-shm prefix, in bytes */
};

/* ---- Connections (http/) ----------------------------------------------------------------------------------------- */

enum {
    /* backlog of a listener: connections that may wait to be accepted; the kernel lowers it to net.core.somaxconn */
    LISTEN_BACKLOG = 4096,
    /* largest number of connections that the main thread accepts in a row before it does its other work */
    LISTEN_ACCEPT_BURST = 64,
    /* when a listener stops accepting clients, TCP handshakes that have begun get this time to complete */
    LISTEN_DOOR_MS = 100,
    /* replaces LISTEN_DOOR_MS for a listener that only clients on this machine can reach */
    LISTEN_DOOR_LOCAL_MS = 20,
    /* seconds of silence after which the kernel probes whether the client of a connection is still there */
    LISTEN_KEEPALIVE_S = 60,
    LISTEN_USER_TIMEOUT_MS = 30000, /* a client that has not acknowledged sent bytes for this long counts as vanished */
    /* Retry-After in seconds of a refused connection; short, because connections end all the time */
    REFUSAL_RETRY_AFTER_S = 1,

    FRONTEND_HEAD_MS = 10000, /* the head of a request must arrive within this time (or --body-timeout-ms, if that is
                               * less) */
    /* Longest idle time of a connection between two requests. It is more than the 60 s for which load balancers keep a
     * connection. */
    FRONTEND_IDLE_MS = 75000,
    /* While the server drains (finishes requests before it stops), idle connections are closed once no connection has
     * had a request for this long. */
    FRONTEND_SILENT_MS = 500,
    /* while the server drains (before it stops), a connection on which no byte moves for this long is closed */
    FRONTEND_STALLED_MS = 2000,
    /* With more connections than this, sweeps over all connections are rarer. A sweep over 10000 connections takes 2
     * ms. */
    FRONTEND_SWEEP_CONNECTIONS = 2000,
    /* The lowest allowed rate, in bytes per millisecond, of a body or an answer that takes longer than
     * --body-timeout-ms. */
    CONNECTION_BYTES_PER_MS = 1024,

    /* When all connections are in use, the server may close one that has shown no access token. If this connection
     * sends the body of a refused request, or fetches an answer, it must have done so for at least this time. */
    CONNECTION_STRANGER_MS = 1000,
    /* A connection that has shown an access token is closed to make room for another connection only after it has been
     * idle for this long. On a server without tokens this holds for every connection. */
    CONNECTION_BETWEEN_MS = 100,
    /* if no connection can be closed to make room, the server waits this long before it searches for one again */
    CONNECTION_LOOK_MS = 10,
    /* largest number of connections that were closed to make room, but not yet released by libmicrohttpd */
    CONNECTION_LEAVING = 64,

    /* Longest time of a lingering close: the socket stays open after its connection has ended, until the client has
     * fetched its answer. A slower client may lose the answer's end. */
    LINGER_MS = 10000,
    /* largest number of sockets in lingering close (open until the client has its answer); one more closes the oldest
     * early */
    LINGER_MOST = 256,
    /* number of file descriptors that sockets in lingering close (open until the client has its answer) leave free */
    LINGER_SPARE_FILES = 32,
    /* largest number of sockets in lingering close that the main thread reads from before it does other work */
    LINGER_EVENTS = 16,
    LINGER_DROP_BYTES = 16 << 10,
    /* largest number of reads from one socket in a row; each reads LINGER_DROP_BYTES, so all of them read 1 MiB */
    LINGER_DROP_PIECES = 64,
    /* largest number of reads from all sockets together before the main thread does other work; each reads
     * LINGER_DROP_BYTES, so all of them together read 4 MiB */
    LINGER_SWEEP_PIECES = LINGER_MOST,
};

/* ---- HTTP headers and bodies (http/) ----------------------------------------------------------------------------- */

enum {
    /* Memory that libmicrohttpd gives each connection (quirk 10 in http/mhd_quirks.h). The head of a request lies in
     * this memory, and half of the memory takes the bytes of one recv() of the body. More memory would be slower,
     * because libmicrohttpd clears all of it between two requests. HTTP_CONNECTION_STEP is added when the head needs
     * more room. */
    HTTP_CONNECTION_BYTES = 80 << 10,
    HTTP_CONNECTION_STEP = 60 << 10,
    /* Memory of connections as attnd_connection_bytes in /metrics counts it, without tensors. Each connection counts
     * HTTP_OPEN_BYTES, and HTTP_TLS_BYTES more with TLS (28 KiB were measured with GnuTLS 3.7.9). A running request
     * counts HTTP_REQUEST_BYTES more: its record, its parser, an unpacker (72 KiB), and a text or a block of the
     * answer. */
    HTTP_OPEN_BYTES = HTTP_CONNECTION_BYTES + (4 << 10),
    HTTP_TLS_BYTES = 32 << 10,
    HTTP_REQUEST_BYTES = 108 << 10,
    /* by default, connections may use an eighth of the machine's memory (see --max-connections) */
    HTTP_CONNECTIONS_SHARE = 8,
    HTTP_CONNECTIONS_LEAST = 16,
    /* Time for which a thread polls for the next request after an answer from a GPU. A client needs 20 us to send the
     * next request. A sleeping thread would need another 20 us to wake. */
    HTTP_EXPECT_NS = 50000,
    /* idle time after which libmicrohttpd closes a connection; connections.c closes it earlier */
    HTTP_INACTIVITY_S = 120,
    /* Largest number of arguments in a URL's query. libmicrohttpd keeps a record of each argument in the connection's
     * memory. */
    HTTP_ARGUMENTS_MAX = 100,
    /* Largest size in bytes of a body without tensors, which the server keeps as a whole for the handler of its path.
     * The longest valid one creates a KV cache and has two scales, of up to 25 bytes as text, for each of CACHES_HEADS
     * heads. */
    HTTP_KEPT_BODY_BYTES = 64 << 10,
    /* longest file of a certificate chain or a key; usual ones have a few KB */
    HTTP_PEM_BYTES = 1 << 20,
    /* If the text of a request or of an answer is longer than this, it counts towards the limit of staging memory
     * (memory for tensors). Shorter texts are not counted. */
    REQUEST_UNCOUNTED_BYTES = 32 << 10,
    REQUEST_ID_BYTES = 129, /* longest X-Request-Id, with the NUL; a longer id from a client is replaced */
    /* longest wait of a TLS connection for memory; below HEARTBEAT_LIMIT_MS, after which the thread counts as stuck */
    TLS_MEMORY_WAIT_MS = 4000,
    TLS_MEMORY_STEP_MS = 10,
    /* longest access token in bytes; a comparison looks at all bytes of all tokens, so that its time reveals nothing */
    TOKEN_MAX_BYTES = 256,
    /* largest number of access tokens; the token of a request is compared with all of them */
    TOKEN_MAX_COUNT = 4096,
};

/* ---- Compressed bodies (base/unpack.c, http/body.c) -------------------------------------------------------------- */

enum {
    /* number of bytes that are unpacked at a time; the parser reads them before more are unpacked */
    UNPACK_PIECE_BYTES = 32 << 10,
    /* Number of bytes that an HTTP thread unpacks for one connection before it serves another connection. Unpacking
     * them takes a millisecond. */
    UNPACK_TURN_BYTES = 256 << 10,
    /* Largest allowed ratio of unpacked to packed bytes; the largest ratio of deflate is 1032. Numeric tensors shrink
     * to a half, masks to a hundredth. */
    UNPACK_RATIO = 256,
    /* UNPACK_RATIO applies only to bodies that are longer than this after unpacking */
    UNPACK_FREE_BYTES = 64 << 20,
};

/* ---- Answers (http/answer.c) ------------------------------------------------------------------------------------- */

enum {
    /* An answer up to this size is encoded at once and sent in one call. A larger one is encoded block by block. */
    ANSWER_SMALL_BYTES = 256 << 10,
    /* If the inputs of a request have this many bytes or more, its answer gets memory of its own. The memory of the
     * inputs can then be released early. */
    ANSWER_LARGE_INPUTS = 2 << 20,
    /* Size in bytes of the blocks in which a large answer is written. A block fits in the second-level cache beside the
     * tensors from which it is made. */
    ANSWER_STREAM_BLOCK = 192 << 10,
    /* Size in bytes of the blocks in which an answer is written if its numbers are sent as text. Writing one block
     * takes a millisecond, during which the thread serves no other connection. */
    ANSWER_ARRAY_BLOCK = 32 << 10,
};

/* ---- Requests that wait for a device (sched/, work/) ------------------------------------------------------------- */

enum {
    /* Interval at which the main thread looks for requests that have waited for LOOP_WATCH_AFTER_MS. From then on it
     * watches whether the clients of these requests disconnect. */
    LOOP_TICK_MS = 10,
    /* when a request has waited this long, the main thread begins to watch whether its client disconnects */
    LOOP_WATCH_AFTER_MS = 20,
    /* interval at which the main thread examines all connections; a client that leaves during its request is noticed at
     * the second examination at the latest */
    LOOP_SWEEP_MS = 40,
    /* When at least three quarters of the connections have ended, free memory is returned to the system. This is done
     * only if at least this many connections were open before. */
    LOOP_CROWD = 512,
    LOOP_STOP_MS = 2000, /* time for sending the last answers when the server stops */

    /* If the text of a body, without tensor data, is longer than this, the HTTP thread leaves checking the body to
     * another thread. Checking this much text takes 2 ms. */
    CHECK_LONG_SKELETON_BYTES = 32 << 10,
    /* a body longer than this is not checked by the HTTP thread, but by another thread; checking this many bytes of a
     * mask takes 2 ms */
    CHECK_LONG_BODY_BYTES = 8 << 20,
    CHECK_LONG_LSE_BYTES =
        /* applies in place of CHECK_LONG_BODY_BYTES if an operation takes the tensor lse (log-sum-exp of each row): a
         * body longer than this is checked by another thread than the HTTP thread */
    512 << 10,
    /* Inputs in shared memory are copied to the request's memory block. If the block is larger than this, it grows
     * while inputs are added. If the block is not larger than this, and is smaller than the inputs, it is replaced by a
     * larger one before the copy. */
    CHECK_COPY_BYTES = 256 << 10,
    /* Verifying results and computing the length of an answer's text are divided into pieces of this duration. Between
     * two pieces, other requests progress. */
    FINISH_PIECE_NS = 10000000,
    /* Largest number of pieces of work that attnd gives to libuv's thread pool at a time. It is the default number of
     * the pool's threads. Further pieces wait in attnd's own queue, in which clients take turns. */
    PIECES_AT_ONCE = 4,
    /* The comparison of a client's results with exact ones must end before the request's deadline. The margin is this
     * many milliseconds, plus a tenth of the time that is left when the comparison starts, but at most half of that
     * time. */
    JUDGE_MARGIN_MS = 50,
    FINISH_NUMBERS = 4096, /* while a thread computes the length of an answer's text, it looks at the clock after this
                            * many numbers */
    /* If an answer has more numbers as text than this, the HTTP thread leaves computing the text's length to another
     * thread. */
    PREPARE_MEASURE_AT_ONCE = 4096,

    /* to fill a batch, at most this many waiting jobs (requests) are examined */
    QUEUE_SCAN_MAX = 512,
    /* the search for the next job passes over at most this many jobs that cannot run yet; passing over so many takes 3
     * ms */
    QUEUE_PASS_MAX = 1 << 16,
    /* When the server looks for waiting cache transactions (requests that use KV caches) that can begin, it examines at
     * most this many caches. */
    QUEUE_STEP_ROWS = 1 << 19,
    /* largest value of Retry-After in seconds when the queue is full */
    QUEUE_RETRY_MAX_S = 30,

    /* largest number of contexts (saved forward passes); their table is allocated at the start */
    CONTEXTS_MAX_COUNT = 1024,
    /* time after which a context (saved forward pass) is released if no backward has used it */
    CONTEXTS_TTL_MS = 300000,
    /* contexts (saved forward passes) may hold a quarter of the memory for tensors */
    CONTEXTS_SHARE = 4,

    /* bytes of the smallest granule (unit of memory for cache pages); also the alignment of every page */
    PAGES_GRANULE_BYTES = 4096,
    /* largest number of granules (units of memory for pages) of one pool; a search over all of them takes a
     * millisecond */
    PAGES_GRANULES = 1 << 20,
    CACHES_MAX_COUNT = 1 << 16,
    /* Upper bound on the page-table entries of all caches of a device: CACHES_SHARING times the number of granules
     * (units of memory for pages), but at least CACHES_NUMBERS. A page that several caches share has an entry in each
     * of them. */
    CACHES_NUMBERS = 1 << 16,
    CACHES_SHARING = 16,
    /* The caches of two rows of a decode share pages if one cache is a fork of the other. If the caches of neighbouring
     * rows share at least this many positions, the device reads the shared pages once for both rows. */
    CACHES_PREFIX_KEYS = 1024,
    CACHES_TTL_MS = 600000,      /* a cache is deleted when it has not been used for this time, unless ttl_s is given */
    CACHES_PAGE_SIZE = 128,      /* number of positions in a page of a cache, unless page_size is given */
    CACHES_PAGE_SIZE_LEAST = 64, /* size of the smaller pages of a cache, in positions; CACHES_PAGE_SIZE is the only
                                  * other page size */
    CACHES_PAGE_SIZE_MOST = 128,
    CACHES_HEADS = 1024, /* largest number of key/value heads of a cache */
    CACHES_ROWS = 1024,  /* largest number of caches in one cache transaction (request that uses KV caches) */
    /* largest number of page-table entries of one cache transaction (request that uses KV caches); writing them takes a
     * millisecond */
    CACHES_STEP_PAGES = 1 << 20,
    CACHES_LIST = 1000,         /* largest number of caches that one answer of GET /v1/caches lists */
    CACHES_EXPIRE_LOOKS = 4096, /* largest number of caches that one sweep for expired caches examines */
};

/* Largest work of a batch, in floating-point operations. A CPU computes a batch of this size in some ten milliseconds,
 * and all requests in the batch wait for its end. */
#define QUEUE_BATCH_FLOPS 1e9
/* Largest work, in floating-point operations, of a batch of requests whose keys and values are in caches on a GPU. */
#define QUEUE_BATCH_STEP_FLOPS 1e11

/* A request with more floating-point operations than this is never batched, because small requests in its batch would
 * have to wait for it. */
#define PREPARE_SMALL_FLOPS 1e8
/* Largest work, in floating-point operations, of a request that may be batched, if its keys and values are in caches on
 * a GPU. Such requests mostly read memory, so they do not slow each other down. */
#define PREPARE_STEP_FLOPS  1e10
#define PREPARE_SMALL_BYTES ((size_t)2 << 20)
/* A cache transaction (a request that uses KV caches) with more floating-point operations than this takes 60 us or more
 * on an H200. It is batched only with transactions that can be merged with it into one problem (MERGE_BYTES). */
#define PREPARE_ALONE_FLOPS 1e9
/* A device with at least this much memory has room for any small request, so the server does not check whether it
 * fits. */
#define PREPARE_SMALL_DEVICE (INT64_C(256) << 20)

/* If a job (the problems of a request) is expected to take PREPARE_CLOSER_S seconds or more, the server makes a second
 * estimate, for which it reads the FlashMask bounds. Rows whose scores exceed the range of float32 take longer. The
 * server searches q, k and v for such rows only if they could make the job take over PREPARE_STRANGE_S seconds, and
 * over PREPARE_STRANGE times as long as expected. */
#define PREPARE_CLOSER_S 0.05
/* The longest time in seconds that comparing a client's results with exact ones may add to the estimated time of a
 * problem. If comparing all rows would take longer, fewer rows are compared. */
#define PREPARE_JUDGE_S   1.0
#define PREPARE_STRANGE_S 1.0
#define PREPARE_STRANGE   8

/* Largest work of the option `verify` (which checks rows of `out`) for all problems of one body together, in
 * multiply-adds. This work takes about a second. Each verified row takes Sk * (D + Dv) multiply-adds, and each head
 * that has a verified row takes the same number once more. K and V of one head are kept as doubles, and together may
 * have at most VERIFY_MAX_HEAD_ELEMENTS numbers. */
#define VERIFY_MAX_MULTIPLY_ADDS (INT64_C(1) << 30)
#define VERIFY_MAX_HEAD_ELEMENTS (INT64_C(1) << 24)
/* Largest number of multiply-adds for checking the lse (log-sum-exp of each row) of one body; they take 30 ms. */
#define VERIFY_LSE_MULTIPLY_ADDS (INT64_C(1) << 25)
/* Largest number of multiply-adds, for each byte of a body, that the server spends to check the body's lse (log-sum-exp
 * of each row). Without this bound, a small body whose tensors have head size 1 could keep an HTTP thread busy for 30
 * ms. */
#define VERIFY_LSE_PER_BYTE 8

/* ---- Devices (device/) ------------------------------------------------------------------------------------------ */

enum {
    /* largest number of batches on a device at a time, even if the device offers more streams */
    DEVICE_MAX_STREAMS = 16,
    /* number of additional streams of a device for guests: batches of clients that have no other batch on the device
     * (devices.c) */
    DEVICE_GUESTS = 6,
    /* A guest (a batch of a client with no other batch on the device) starts only when the other batches have run for
     * this long. */
    DEVICE_GUEST_AFTER_NS = 20000000,
    /* A guest is a batch of a client with no other batch on the device. If the running batches belong to several
     * clients, the guest waits for the oldest of them: it must have run for this many times the guest's expected
     * time. */
    DEVICE_GUEST_FACTOR = 2,
    /* largest number of problems in one call of attn_run(): as many as an envelope (a body with several problems) may
     * have */
    DEVICE_MAX_RUN = 1024,
    /* Interval between two polls of a stream. */
    DEVICE_POLL_NS = 20000,
    /* A device's thread polls its streams without pauses while a batch has run for less than this time. Small problems
     * and most decode requests end earlier. */
    DEVICE_SPIN_NS = 1000000,
    /* interval between two polls of a device that has failed; nobody waits for its results */
    DEVICE_LOST_POLL_NS = 10000000,
    /* scratch memory of kernels that is larger than this is freed after the batch */
    DEVICE_WORKSPACE_KEEP = 64 << 20,
    /* A problem may be merged with others into one problem only if its inputs and outputs have at most this many bytes.
     * Merging saves the fixed cost of each copy and launch, which matters little for a larger problem. */
    MERGE_BYTES = 1 << 20,
    /* problems may be merged only if the address and the size of each of their tensors are multiples of this */
    MERGE_ALIGN = 16,
    /* alignment in bytes of tensors that are merged, or divided among several devices */
    MERGE_LINE = 256,
    /* if a device cannot be opened at the start, the threads of the other devices have this time to end before the
     * server exits */
    DEVICE_STOP_MS = 60000,
    /* scratch memory of an HTTP thread's own GPU computations that is larger than this is freed after each
     * computation */
    INLINE_KEEP = 4 << 20,
    /* Largest total size in bytes of the inputs and outputs of a problem that an HTTP thread runs on a GPU itself. The
     * bus transfers this much in 20 us. */
    INLINE_BYTES = 1 << 20,
    /* When an HTTP thread runs a problem on a GPU, it polls for the problem's end for at most this time. After that, a
     * thread of the device waits for the GPU instead. */
    INLINE_WAIT_NS = 500000,
    /* An HTTP thread polls at most this long until its cache transaction (request that uses KV caches) on a GPU ends.
     * It may poll longer than INLINE_WAIT_NS, because the transaction has the GPU to itself. */
    INLINE_STEP_WAIT_NS = 2000000,
    /* A thread that waits for its work on a GPU polls a word in host memory that the GPU writes. Once in this interval
     * it also calls the driver, which reports errors. */
    INLINE_ASK_NS = 20000,
    /* largest number of heads, summed over all sequences, of a problem that an HTTP thread computes itself; even a
     * small head takes up to 2 us */
    INLINE_HEADS = 128,
};

/* Threads that wait for a device poll with short sleeps (base/polling_sleep.h). */
enum {
    /* Requested length of one sleep between two polls. The kernel's timer makes the sleep about twice as long. That is
     * too short for the core to enter a deep sleep state. */
    NAP_NS = 50000,
    /* longest time for which a thread polls for one result; after a longer wait, a small delay does not matter */
    NAPS_NS = 2000000,
    /* Threads that wait for a device poll only while at most this many requests wait. With more requests, polling would
     * take processor time from other threads. */
    NAPS_MOST = 4,
};

/* Largest number of floating-point operations, with padding, of a problem that an HTTP thread computes on its own core;
 * they take some 100 us. */
#define INLINE_FLOPS 2e7
/* Largest number of floating-point operations of a problem that an HTTP thread runs on a GPU, if all tensors are in the
 * GPU's memory already. A problem of this size takes some 400 us on a Hopper GPU. */
#define INLINE_DEVICE_FLOPS 2e11
/* Largest number of bytes of keys and values that a cache transaction (request that uses KV caches) may read on an HTTP
 * thread. An H200 reads this many bytes in 1.5 ms. */
#define INLINE_STEP_BYTES (INT64_C(6) << 30)
/* The watchdog expects this many floating-point operations per second of any device. A batch may take --watchdog-ms
 * longer than its operations take at this rate. The slowest kernels (float32) reach 34e12 operations per second on an
 * H200, and about 1e12 on the smallest GPU with sm_80 or later. */
#define DEVICE_SLOWEST_FLOPS 2e11
/* Computing exact outputs in float64 (for the option `verify`) may take this many times as long as expected. Only after
 * that time does the device count as overdue. */
#define DEVICE_TRUTH_SLOWEST 10
/* Computing exact outputs in float64 (for the option `verify`) may take as little as the expected time divided by this
 * number. The server assumes this shortest time when it compares a request's run time with its deadline. */
#define DEVICE_TRUTH_FASTEST 3
/* Unless --kv-bytes is given, KV caches get an eighth of a device's memory. On the CPU they get at most
 * DEVICE_CACHE_MOST_CPU bytes. */
#define DEVICE_CACHE_SHARE    8
#define DEVICE_CACHE_MOST_CPU (INT64_C(16) << 30)
/* Work is put on a GPU's stream in groups of about this many floating-point operations: 10 to 50 ms of work on GPUs
 * from sm_80 on. */
#define DEVICE_GROUP_FLOPS 1e13
/* The kernels that one flow (client) has queued on a GPU may take at most this estimated device time, in seconds. */
#define DEVICE_FLOW_SECONDS 0.05
/* Largest work, in estimated seconds, that one call of attn_run_some() (which launches the next part of the work) puts
 * on a GPU's stream. */
#define DEVICE_PIECE_SECONDS 0.025
/* A batch that takes a GPU fewer seconds than this is put on the GPU's stream at once. A longer batch may have to wait
 * for earlier batches of the same client (see DEVICE_FLOW_SECONDS). */
#define DEVICE_SHORT_SECONDS 0.005

/* ---- Limits on memory -------------------------------------------------------------------------------------------- */

enum {
    /* Share of the staging memory (memory for tensors) that may be leased for bytes that have not arrived yet: a
     * quarter. */
    STAGING_AHEAD_SHARE = 4,
    /* staging memory (memory for tensors) that was unused for this long goes back to the system */
    STAGING_WARM_MS = 30000,
    /* upper bound in bytes of a JSON document about this server, such as /openapi.json */
    JSON_DOCUMENT_BYTES = 16 << 20,
    /* Upper bound of the size of the page /metrics in bytes. */
    METRICS_PAGE_BYTES = 64 << 20,
    /* largest number of series (sets of label values) of one metric; the values of later series count as "other" */
    METRICS_MAX_SERIES = 192,
    METRICS_LABEL_BYTES = 64, /* longest label value in bytes, with the NUL; a longer one is cut */
};

/* Limits of shared memory regions (segments that clients register; regions/table.c). */
enum {
    REGIONS_MAX_COUNT = 1024,
    /* a thread copies this many bytes of shared memory, in 0.1 to 0.4 ms, before it looks at the clock again */
    REGIONS_PIECE_BYTES = 1 << 20,
    /* An HTTP thread copies up to this many bytes of shared memory itself, in less than 0.1 ms. */
    REGIONS_AT_ONCE_BYTES = 256 << 10,
    REGIONS_PINNED_TENSOR =
        /* smallest tensor in bytes that a device copies from shared memory itself; drivers let the CPU copy smaller
         * ones */
    256 << 10,
    /* The server waits this long before and after it reads the modification time of a shared file. Every later write
     * then gives the file a different modification time. Modification times are precise to a fifth of this duration or
     * better. */
    REGIONS_QUIET_MS = 50,
    /* time between a change of a shared memory object and the next attempt to pin it (to lock its pages in memory) */
    REGIONS_PIN_AGAIN_MS = 1000,
};
#define REGIONS_MAX_BYTES (INT64_C(1) << 40)
/* Largest shared memory region that is pinned for GPUs. The limit exists because the driver needs 0.1 ms or more to pin
 * a MiB. */
#define REGIONS_PINNED_REGION (INT64_C(1) << 30)
/* Largest number of bytes of shared memory that may be pinned for GPUs, in all regions together. */
#define REGIONS_PINNED_BYTES (INT64_C(8) << 30)

/* Largest amount of unused staging memory (memory for tensors) that is kept for the next request. */
#define STAGING_WARM_BYTES (INT64_C(1) << 30)

/* ---- The log (base/log.c) ---------------------------------------------------------------------------------------- */

enum {
    /* largest size in bytes of log lines that wait to be written to standard error; further lines are lost and
     * counted */
    LOG_BUFFER_BYTES = 1 << 20,
    LOG_PAIRS_BYTES = 1024,      /* longest text of a line's key=value pairs, with the NUL */
    LOG_NAME_BYTES = 128,        /* longest request id or event name in a log line */
    LOG_CLEAN_INPUT_BYTES = 128, /* longest text from a client in a log line */
    /* Largest number of WARN and ERROR lines per second with the same event name. The limit keeps a flood of log lines
     * from filling a disk. */
    LOG_REPEATS_PER_SECOND = 20,
    /* number of counters that limit repeated log lines; if there are more event names, several names share a counter */
    LOG_REPEAT_SLOTS = 64,
    /* the log's writer waits this long for more lines, so it makes at most 200 calls of write() per second */
    LOG_GATHER_MS = 5,
    LOG_CLOSE_TIMEOUT_MS = 1000, /* time for which log_close() waits for a stuck writer */
};

/* Limits for connections that speak a wrong protocol (http/first_bytes.c), and for the headers that proxies add. */
enum {
    /* a connection whose file descriptor is this number or a larger one is not examined for a wrong protocol */
    FIRST_BYTES_SOCKETS = 1 << 20,
    /* interval between two log lines that give the same reason for refusing a connection */
    FIRST_BYTES_LOG_MS = 60000,
    /* Largest number of lines of X-Forwarded-For that are read, beginning with the last line. */
    FORWARDED_LINES = 8,
};

/* ---- Starting, watching and ending threads ----------------------------------------------------------------------- */

enum {
    /* stack of libuv's threads from version 1.46 on; also the smallest stack that threads_try() tries */
    THREADS_STACK_BYTES = 8 << 20,
    /* longest wait until joined threads have disappeared from the system; usually this takes a millisecond */
    THREADS_END_MS = 1000,

    /* A thread that does the same piece of work (such as one request) for longer than this counts as stuck. */
    HEARTBEAT_LIMIT_MS = 5000,
    /* largest number of threads whose busy time is watched */
    HEARTBEAT_THREADS = 1024,

    MAIN_BYTES = 64 << 20, /* estimated memory of the process itself: program, libraries, tables, log */
    /* estimated memory of an HTTP thread: its stack, malloc's arena, and INLINE_KEEP bytes of scratch memory */
    MAIN_THREAD_BYTES = 8 << 20,

    /* after its last answers, the server has this time to join its threads and to release devices and memory */
    SIGNALS_GRACE_MS = 5000,
    /* when the server stops, the devices' threads have this time to end work that nobody waits for */
    MAIN_STOP_WAIT_MS = 1000,

    SUPERVISE_SHORT_LIFE_S = 2, /* a server that ends sooner than this many seconds after its start counts as failed */
    /* the supervisor gives up after this many servers in a row that ended soon after their start */
    SUPERVISE_GIVE_UP = 5,
    /* longest pause in seconds between two starts of the server; the pause doubles with each failure */
    SUPERVISE_MAX_PAUSE_S = 30,
    /* if a server does not end within its time limit, the supervisor kills it this long after the limit */
    SUPERVISE_KILL_MS = 1000,

    /* time limit of a health check, below the 30 s after which Docker ends a check */
    HEALTHCHECK_TIMEOUT_MS = 5000,
};

#endif
