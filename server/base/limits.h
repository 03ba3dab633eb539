/* limits.h: every limit and time-out of the server that no option sets, with its reason.
 *
 * Limits that an option sets stand in its row of config_table.c, and limits on the contents of one body in
 * PROTO_LIMITS_DEFAULT of proto-json/proto.h. A name begins with the file that keeps the limit (HTTP: mhd.c).
 * Constants that bound nothing from outside, such as table sizes or pauses of threads (http/http_threads.c), stay in
 * the files that use them. */
#ifndef LIMITS_H
#define LIMITS_H

#include <stdint.h>

/* ---- Options ----------------------------------------------------------------------------------------------------- */

enum {
    CONFIG_MAX_LISTEN = 8, /* most addresses of --listen, enough for several of each kind */
    /* Connections to --metrics-listen, beside --max-connections; probes and scrapers use them. */
    CONFIG_METRICS_CONNECTIONS = 256,
    CONFIG_SPARE_FILES = 128, /* open files that are no connections: epoll, eventfd, libraries, log, GPU driver */
    /* CONFIG_SPARE_FILES without GPU driver and threads, for a very low limit on open files. */
    CONFIG_LEAST_FILES = 32,
    CONFIG_THREAD_FILES = 2, /* open files of one HTTP thread: epoll and eventfd */
    CONFIG_MAX_BATCH = 1024, /* upper bound of --max-batch; the loop has an array of this size */
    CONFIG_MAX_PROXIES = 8,  /* most networks of --trusted-proxy; each is compared with the peer of every request */
    CONFIG_MAX_DEVICES = 64, /* upper bound of device numbers in --devices: they are bits of a mask */
    CONFIG_MAX_SHM = 8,      /* most prefixes of --allow-shm; a client whose key has none of them is told all of them */
    CONFIG_SHM_BYTES = 32,   /* bytes of all these prefixes together */
};

/* ---- Connections (http/) ----------------------------------------------------------------------------------------- */

enum {
    LISTEN_BACKLOG = 4096,          /* connections waiting to be accepted; the system cuts it to net.core.somaxconn */
    LISTEN_ACCEPT_BURST = 64,       /* connections accepted at a time, before the loop does its other work */
    LISTEN_DOOR_MS = 100,           /* while a listener closes, time for handshakes that have begun: a round trip */
    LISTEN_DOOR_LOCAL_MS = 20,      /* LISTEN_DOOR_MS for clients on this machine, whose round trip is short */
    LISTEN_KEEPALIVE_S = 60,        /* silence after which the kernel probes a connection */
    LISTEN_USER_TIMEOUT_MS = 30000, /* after this long without acknowledgement of sent bytes the client has vanished */
    REFUSAL_RETRY_AFTER_S = 1, /* a refused client may try again after this, since other connections end all the time */

    FRONTEND_HEAD_MS = 10000, /* time for a request's head to arrive, unless --body-timeout-ms is less */
    /* Idle time between two requests: more than the 60 s for which balancers keep a connection. */
    FRONTEND_IDLE_MS = 75000,
    /* While draining: after this long without a request on any connection, idle connections are closed. Until then a
     * balancer may still use its open connections for its next requests. */
    FRONTEND_SILENT_MS = 500,
    FRONTEND_STALLED_MS = 2000, /* while draining: time after which a request that makes no progress is cut */
    /* A sweep over 10000 connections takes 2 ms: with more connections, sweeps are rarer. */
    FRONTEND_SWEEP_CONNECTIONS = 2000,
    /* Rate of a body or answer that goes on longer than --body-timeout-ms (see its help). */
    CONNECTION_BYTES_PER_MS = 1024,

    /* On a server with tokens, a connection without a token gives up its slot if another connection needs it. First it
     * has this long to send a refused body, and as long again to fetch its answer. */
    CONNECTION_STRANGER_MS = 1000,
    /* Other connections keep their slot for this long after a request, because a busy client is idle for less. */
    CONNECTION_BETWEEN_MS = 100,
    CONNECTION_LOOK_MS = 10, /* pause after a search that found no connection to close, before the next one */
    CONNECTION_LEAVING = 64, /* connections that were cut to make room and that libmicrohttpd has not closed yet */

    /* Lingering close: a client that has not fetched its answer by then may lose the answer's end. */
    LINGER_MS = 10000,
    LINGER_MOST = 256,       /* sockets in lingering close; when there is one more, the oldest is closed early */
    LINGER_SPARE_FILES = 32, /* descriptors that lingering sockets must leave free */
    LINGER_EVENTS = 16,      /* lingering sockets that are read in one turn of the loop */
    LINGER_DROP_BYTES = 16 << 10,
    LINGER_DROP_PIECES = 64, /* pieces of LINGER_DROP_BYTES read from one socket at a time: 1 MiB */
    /* Pieces read from all lingering sockets in one turn of the loop: 4 MiB, about a millisecond. */
    LINGER_SWEEP_PIECES = LINGER_MOST,
};

/* ---- Heads and bodies (http/) ------------------------------------------------------------------------------------ */

enum {
    /* libmicrohttpd gives each connection this much memory. It holds the head of a request, and one recv() of the body
     * fills half of it. With 80 KiB a body of 131 KB needs three calls of recv(). More memory would be slower: all of
     * it is set to zero between two requests, and it drives the body out of the CPU's cache.
     * HTTP_CONNECTION_STEP is how much libmicrohttpd adds when the head needs more room. In versions before 1.0
     * (measured: 0.9.75) a step larger than the memory makes each later recv() read another eighth of what is still
     * free; from 1.0 on such a step would keep the buffer from growing. */
    HTTP_CONNECTION_BYTES = 80 << 10,
    HTTP_CONNECTION_STEP = 60 << 10,
    /* Memory of connections that attnd_connection_bytes counts; tensors are staging memory instead. An open connection
     * has HTTP_CONNECTION_BYTES, and records of libmicrohttpd and attnd. TLS took 28 KiB with GnuTLS 3.7.9. A running
     * request has a record, a parser and an unpacker (72 KiB). It also has the beginning of its text, or a body that
     * was kept, or a block of its answer. */
    HTTP_OPEN_BYTES = HTTP_CONNECTION_BYTES + (4 << 10),
    HTTP_TLS_BYTES = 32 << 10,
    HTTP_REQUEST_BYTES = 108 << 10,
    HTTP_CONNECTIONS_SHARE = 8, /* by default connections get at most an eighth of the memory (--max-connections) */
    HTTP_CONNECTIONS_LEAST = 16,
    /* Time to poll after an answer from a GPU: a client takes 20 us to return, a sleeping thread as long to wake. */
    HTTP_EXPECT_NS = 50000,
    HTTP_INACTIVITY_S = 120, /* a fallback: connections.c closes idle connections earlier */
    /* Arguments of a query; libmicrohttpd keeps a record of each in the connection's memory. */
    HTTP_ARGUMENTS_MAX = 100,
    /* Longest body that is kept whole for a handler. The longest valid one has two scales for each of CACHES_HEADS,
     * and Python writes a scale with up to 25 bytes. */
    HTTP_KEPT_BODY_BYTES = 64 << 10,
    HTTP_PEM_BYTES = 1 << 20, /* a certificate chain or key has a few KB; a longer file was named by mistake */
    /* Texts and answers up to this size are not counted; longer ones count as staging memory. */
    REQUEST_UNCOUNTED_BYTES = 32 << 10,
    REQUEST_ID_BYTES = 129,    /* longest X-Request-Id, with the NUL; a longer one is replaced */
    TLS_MEMORY_WAIT_MS = 4000, /* wait for memory; less than HEARTBEAT_LIMIT_MS, when a thread counts as stuck */
    TLS_MEMORY_STEP_MS = 10,
    TOKEN_MAX_BYTES = 256,  /* longest token; all tokens are compared in full, so that the time taken reveals nothing */
    TOKEN_MAX_COUNT = 4096, /* most tokens: 1 MiB, with which every token of a request is compared */
};

/* ---- Compressed bodies (base/unpack.c, http/body.c) -------------------------------------------------------------- */

enum {
    UNPACK_PIECE_BYTES = 32 << 10, /* bytes unpacked at a time; they are parsed before more is unpacked */
    /* Bytes that an HTTP thread unpacks before it turns to another connection. 80 KiB that have arrived may unpack to
     * 80 MiB, which take 100 ms. This amount takes a millisecond; changing the connection adds a fiftieth of that. */
    UNPACK_TURN_BYTES = 256 << 10,
    /* Largest ratio of unpacked to packed bytes. deflate reaches 1032. Numeric tensors shrink to a half, masks to a
     * hundredth. A body that shrinks further is either small or an attack. */
    UNPACK_RATIO = 256,
    UNPACK_FREE_BYTES = 64 << 20, /* up to this size of the unpacked body any ratio is allowed */
};

/* ---- Answers (http/answer.c) ------------------------------------------------------------------------------------- */

enum {
    /* Up to this size an answer is encoded at once and sent in one call; a larger one is made block by block. */
    ANSWER_SMALL_BYTES = 256 << 10,
    /* Inputs of this size or more are not overwritten by the answer, but released for the next request. */
    ANSWER_LARGE_INPUTS = 2 << 20,
    ANSWER_STREAM_BLOCK = 192 << 10, /* a block fits in the second-level cache beside the tensors it is made from */
    /* A block of numbers as text takes a millisecond, in which the thread serves no other connection. */
    ANSWER_ARRAY_BLOCK = 32 << 10,
};

/* ---- Requests that wait (sched/, work/) -------------------------------------------------------------------------- */

enum {
    LOOP_TICK_MS = 10, /* interval between two searches for requests that have waited long enough to be watched */
    LOOP_WATCH_AFTER_MS = 20, /* a request that waits this long is watched for a client that leaves */
    LOOP_SWEEP_MS = 40,       /* a client that leaves in the middle of a request is noticed within two sweeps */
    LOOP_CROWD = 512, /* if this many connections were open and most are closed now, memory is returned to the system */
    LOOP_STOP_MS = 2000, /* time after a drain for the last answers to be sent */

    /* A body whose text without tensor data is longer than this is checked on another thread: 2 ms. */
    CHECK_LONG_SKELETON_BYTES = 32 << 10,
    CHECK_LONG_BODY_BYTES = 8 << 20, /* a longer body is checked on another thread: 2 ms if it is all mask rows */
    CHECK_LONG_LSE_BYTES =
        512 << 10, /* in a longer body, a given lse is checked on another thread (attn_check_lse()) */
    /* A body of at most this size that needs a larger block is copied to it, which is faster than new pages. */
    CHECK_COPY_BYTES = 256 << 10,
    FINISH_PIECE_NS = 10000000, /* time of one piece of verifying or measuring; then another piece has its turn */
    /* The most pieces at a time: as many as libuv has threads, because libuv itself serves in order of arrival. */
    PIECES_AT_ONCE = 4,
    /* A check stops its search this long before the deadline, and a tenth of the time earlier, so that its answer is in
     * time. */
    JUDGE_MARGIN_MS = 50,
    FINISH_NUMBERS = 4096, /* numbers read between two looks at the clock */
    /* Numbers whose text length the HTTP thread measures itself: a millisecond at most. */
    PREPARE_MEASURE_AT_ONCE = 4096,

    QUEUE_SCAN_MAX = 512,     /* requests examined to join the first one in a batch; the queue may have a million */
    QUEUE_PASS_MAX = 1 << 16, /* waiting requests that a search for the next one skips; skipping this many takes 3 ms */
    /* Caches examined when waiting transactions are tested: 30 ms when hundreds
     * have a thousand caches each. */
    QUEUE_STEP_ROWS = 1 << 19,
    QUEUE_RETRY_MAX_S = 30, /* largest Retry-After, which is only a guess */

    CONTEXTS_MAX_COUNT = 1024, /* contexts in the table, which is allocated at the start */
    CONTEXTS_TTL_MS = 300000,  /* a context waits this long for its backward; then its memory is released */
    CONTEXTS_SHARE = 4,        /* contexts may hold a quarter of the staging memory */

    PAGES_GRANULE_BYTES = 4096, /* smallest granule; also the alignment of every page */
    PAGES_GRANULES = 1 << 20,   /* granules of one pool at most: a search over all of them takes a millisecond */
    CACHES_MAX_COUNT = 1 << 16,
    /* Upper bound on page-table entries of all caches of a device: the larger of CACHES_NUMBERS and CACHES_SHARING per
     * granule. Forks share pages, but each fork has its own copy of a part of the page list. */
    CACHES_NUMBERS = 1 << 16,
    CACHES_SHARING = 16,
    CACHES_PREFIX_KEYS = 1024,   /* forks in one decode that share fewer positions than this are computed one by one */
    CACHES_TTL_MS = 600000,      /* time since a cache's last use after which it ends, unless ttl_s is given */
    CACHES_PAGE_SIZE = 128,      /* positions in a page, unless page_size is given */
    CACHES_PAGE_SIZE_LEAST = 64, /* the only other page size */
    CACHES_PAGE_SIZE_MOST = 128,
    CACHES_HEADS = 1024, /* key/value heads of a cache at most */
    CACHES_ROWS = 1024,  /* caches in one cache transaction at most */
    /* entries in the page table of one cache transaction, which take a millisecond to write */
    CACHES_STEP_PAGES = 1 << 20,
    CACHES_LIST = 1000,         /* caches in one answer of GET /v1/caches */
    CACHES_EXPIRE_LOOKS = 4096, /* caches that one sweep for expired caches examines */
};

/* Largest work of a batch, in operations: its members should wait for some ten milliseconds at most on a CPU. */
#define QUEUE_BATCH_FLOPS 1e9
/* Largest work of a batch of jobs whose keys and values are in caches, in operations. */
#define QUEUE_BATCH_STEP_FLOPS 1e11

/* Jobs above this are never joined with others: each keeps a device busy alone, and small jobs should
 * not wait for it. */
#define PREPARE_SMALL_FLOPS 1e8
/* PREPARE_SMALL_FLOPS for jobs whose keys and values are in caches. A GPU spends their time on reading memory, so
 * joined jobs do not slow each other down. */
#define PREPARE_STEP_FLOPS  1e10
#define PREPARE_SMALL_BYTES ((size_t)2 << 20)
/* A cache transaction above this (60 us on an H200) is joined with others only if all become one problem (MERGE_BYTES).
 * Otherwise all members of the batch would wait for the longest. */
#define PREPARE_ALONE_FLOPS 1e9
/* A device with this much memory can run any small job with its scratch memory, so small jobs are not checked. */
#define PREPARE_SMALL_DEVICE (INT64_C(256) << 20)

/* From PREPARE_CLOSER_S expected seconds on, FlashMask's bounds are read for a closer estimate. q, k and v are
 * searched for rows whose scores exceed the range of float32, if such rows could make the problem slow. The condition:
 * if all rows were like that, it would take PREPARE_STRANGE_S seconds, and PREPARE_STRANGE times as long as without
 * them. The search takes a hundredth of the problem's time. For few rows of queries it takes more, but there the
 * slow-down is smaller than PREPARE_STRANGE. */
#define PREPARE_CLOSER_S 0.05
/* A check adds at most this many seconds to the estimate: with less time than it wants, it looks at fewer rows. */
#define PREPARE_JUDGE_S   1.0
#define PREPARE_STRANGE_S 1.0
#define PREPARE_STRANGE   8

/* Work of `verify` for all problems of one body, in multiply-adds: about a second. A problem takes Sk * (D + Dv) of
 * them for each row, and as many for each head that has such a row. The second limit is on the numbers in K and V of
 * one head of one problem, which are kept as doubles. */
#define VERIFY_MAX_MULTIPLY_ADDS (INT64_C(1) << 30)
#define VERIFY_MAX_HEAD_ELEMENTS (INT64_C(1) << 24)
/* Multiply-adds for checking the lse of one body: 30 ms. A row that needs more is not checked. */
#define VERIFY_LSE_MULTIPLY_ADDS (INT64_C(1) << 25)
/* Bound on the work of checking an lse, per byte of the body. Without it a small body with heads of one number could
 * keep an HTTP thread busy for 30 ms. With heads of 16 numbers and more the limit is enough for some ten rows. */
#define VERIFY_LSE_PER_BYTE 8

/* ---- Devices (device/) ------------------------------------------------------------------------------------------ */

enum {
    DEVICE_MAX_STREAMS = 16, /* batches on a device at a time, even if the device offers more streams */
    DEVICE_GUESTS = 6, /* streams for guests: batches of flows that have no other batch on the device (devices.c) */
    /* A guest's batch starts only when the other batches have run for this long. Most batches end sooner, and each
     * would take longer beside another one. */
    DEVICE_GUEST_AFTER_NS = 20000000,
    /* A guest beside batches of several flows waits this many times as long as it would need beside them.
     * Equal work of many flows is then done one after the other, and a short request does not wait for long ones. */
    DEVICE_GUEST_FACTOR = 2,
    DEVICE_MAX_RUN = 1024, /* problems in one attn_run(), as many as an envelope may hold */
    /* Interval between two polls of a stream, and thus the longest delay in noticing its end. */
    DEVICE_POLL_NS = 20000,
    /* A batch younger than this is polled without pauses; small problems and most decode transactions
     * end in this time. */
    DEVICE_SPIN_NS = 1000000,
    DEVICE_LOST_POLL_NS = 10000000,   /* interval between two polls of a lost device, whose results nobody needs */
    DEVICE_WORKSPACE_KEEP = 64 << 20, /* bytes; a larger workspace is freed after its batch */
    /* Bytes of inputs and outputs of a problem that may be merged: larger copies are fast one by one. */
    MERGE_BYTES = 1 << 20,
    MERGE_ALIGN = 16, /* alignment of each tensor of a problem that may be merged */
    MERGE_LINE = 256, /* alignment of merged tensors, and of the tensors of a cut problem on a device */
    /* If one device cannot be opened, the threads of the other devices have this time to end; idle ones end at once. */
    DEVICE_STOP_MS = 60000,
    INLINE_KEEP = 4 << 20,  /* bytes; a larger workspace of an inline slot is freed after its job */
    INLINE_BYTES = 1 << 20, /* bytes of a small problem's inputs and outputs for a GPU: 20 us on its bus */
    /* An HTTP thread polls for the end of its work on a GPU for this long; then a device thread takes over. */
    INLINE_WAIT_NS = 500000,
    INLINE_STEP_WAIT_NS = 2000000, /* INLINE_WAIT_NS for a cache transaction, which has the GPU to itself */
    /* The polling thread reads a word that the GPU writes, and once in this interval it also asks the driver. */
    INLINE_ASK_NS = 20000,
    /* most heads of all sequences together; each head takes up to 2 us, however few numbers it has */
    INLINE_HEADS = 128,
};

/* A thread that waits for a device polls with short sleeps (base/polling_sleep.h). These are their lengths. */
enum {
    NAP_NS = 50000,    /* one sleep (a nap), which the kernel doubles; in that time a core does not sleep deeply */
    NAPS_NS = 2000000, /* a thread polls for this long; after a longer wait a late end does not matter */
    /* With more waiting requests than this no thread is idle for long, and polling would take time from the others. */
    NAPS_MOST = 4,
};

/* The most FLOPs of the problems in an inline slot, with padding: some 100 us of a core. A larger problem is worth
 * waking other cores, and the HTTP thread has other connections to serve. */
#define INLINE_FLOPS 2e7
/* Largest inline work for a GPU whose memory has all tensors: some 400 us of a Hopper GPU. */
#define INLINE_DEVICE_FLOPS 2e11
/* Bytes of keys and values that an inline cache transaction may read: 1.5 ms of an H200. */
#define INLINE_STEP_BYTES (INT64_C(6) << 30)
/* A batch may take --watchdog-ms longer than its work takes at this rate. The slowest kernels (float32) reach 34e12 on
 * an H200, and a thirtieth of that on the smallest GPU of sm_80 and up. */
#define DEVICE_SLOWEST_FLOPS 2e11
/* The truth in float64 may take this many times as long as expected before its device counts as overdue. */
#define DEVICE_TRUTH_SLOWEST 10
/* The truth takes at least its expected time divided by this. */
#define DEVICE_TRUTH_FASTEST 3
/* Without --kv-bytes, caches get this fraction of a device's memory, with an upper bound for the CPU. */
#define DEVICE_CACHE_SHARE    8
#define DEVICE_CACHE_MOST_CPU (INT64_C(16) << 30)
/* The work that is put on a stream at a time is about this much: 10 to 50 ms on GPUs from sm_80 on. */
#define DEVICE_GROUP_FLOPS 1e13
/* Most seconds of device time, by estimate, that kernels of one flow may have queued on a GPU. */
#define DEVICE_FLOW_SECONDS 0.05
/* Seconds that one call of attn_run_some() queues, at most. */
#define DEVICE_PIECE_SECONDS 0.025
/* Work that takes fewer seconds never waits for the flow's turn. */
#define DEVICE_SHORT_SECONDS 0.005

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum {
    STAGING_AHEAD_SHARE = 4, /* a quarter of the staging memory may be leased before its bytes have arrived */
    STAGING_WARM_MS = 30000, /* warm staging memory that is unused for this long goes back to the system */
    /* Longest document about this server; /openapi.json, today's longest, is less than a hundredth of it. */
    JSON_DOCUMENT_BYTES = 16 << 20,
    METRICS_PAGE_BYTES = 64 << 20, /* upper bound of the page, far above what METRICS_MAX_SERIES of every metric take */
    METRICS_MAX_SERIES = 192,      /* series of one metric; later ones count as "other" */
    METRICS_LABEL_BYTES = 64,      /* with the NUL; longer labels are cut */
};

/* Shared memory (regions/table.c). A region costs a descriptor, which --max-connections leaves free, and 400
 * bytes. Its memory is the client's. Its size is bounded nevertheless, because pages that the server writes
 * first count as the server's. */
enum {
    REGIONS_MAX_COUNT = 1024,
    REGIONS_PIECE_BYTES = 1 << 20, /* bytes copied between two looks at the clock: 0.1 to 0.4 ms */
    /* Up to this size the HTTP thread copies the bytes itself, in less than 0.1 ms. */
    REGIONS_AT_ONCE_BYTES = 256 << 10,
    REGIONS_PINNED_TENSOR =
        256 << 10, /* from this size on a device copies the bytes itself; drivers copy smaller ones with the CPU */
    REGIONS_QUIET_MS = 50,       /* time stamps of changes to files are up to a fifth of this apart */
    REGIONS_PIN_AGAIN_MS = 1000, /* after a change of the object, time until it is pinned again */
};
#define REGIONS_MAX_BYTES (INT64_C(1) << 40)
/* Largest region to pin: pinning takes the driver 0.1 ms per MiB or more. */
#define REGIONS_PINNED_REGION (INT64_C(1) << 30)
/* bound for the pinned bytes of all regions together, because the system cannot move pinned pages */
#define REGIONS_PINNED_BYTES (INT64_C(8) << 30)

/* Staging memory that is kept warm for the next request while it is not leased. */
#define STAGING_WARM_BYTES (INT64_C(1) << 30)

/* ---- The log (base/log.c) ---------------------------------------------------------------------------------------- */

enum {
    LOG_BUFFER_BYTES = 1 << 20,  /* lines that wait while the sink takes none; further lines are lost and counted */
    LOG_PAIRS_BYTES = 1024,      /* a line's key=value pairs, with the NUL */
    LOG_NAME_BYTES = 128,        /* longest request id or event name in a line */
    LOG_CLEAN_INPUT_BYTES = 128, /* longest string of a client in a line */
    /* lines of one event from WARN on that are written in a second, so that a stream of them cannot fill a disk */
    LOG_REPEATS_PER_SECOND = 20,
    LOG_REPEAT_SLOTS = 64, /* events with a counter of their own; if there are more, they share counters in turn */
    LOG_GATHER_MS = 5,     /* the writer waits this long for more lines, and thus makes at most 200 calls per second */
    LOG_CLOSE_TIMEOUT_MS = 1000, /* time that log_close() gives a stuck sink */
};

/* Connections that speak another protocol (http/first_bytes.c), and the headers that proxies add. */
enum {
    FIRST_BYTES_SOCKETS = 1 << 20, /* descriptors below this are examined: a million connections */
    /* Interval between two lines for one reason: a flood of such clients cannot fill a disk. */
    FIRST_BYTES_LOG_MS = 60000,
    /* Lines of X-Forwarded-For that are read, from the last: each proxy extends a line or adds one. */
    FORWARDED_LINES = 8,
};

/* ---- Threads: their start, being stuck, and ends ----------------------------------------------------------------- */

enum {
    THREADS_STACK_BYTES = 8 << 20, /* stack of libuv's threads from 1.46 on, and the least that threads_try() tries */
    THREADS_END_MS = 1000,         /* time for joined threads to disappear from the system: a millisecond is usual */

    /* Time for one piece of work: milliseconds are usual, and a busy machine does not explain seconds. */
    HEARTBEAT_LIMIT_MS = 5000,
    HEARTBEAT_THREADS = 1024, /* threads that are watched: --http-threads, the loop, devices, and some to spare */

    MAIN_BYTES = 64 << 20,       /* memory of the process itself: program, libraries, tables, log */
    MAIN_THREAD_BYTES = 8 << 20, /* memory of an HTTP thread: stack, malloc's arena, INLINE_KEEP */

    SIGNALS_GRACE_MS = 5000,  /* time after the last answers: threads are joined, devices and memory released */
    MAIN_STOP_WAIT_MS = 1000, /* time for the devices' threads to end their work, whose results nobody needs */

    SUPERVISE_SHORT_LIFE_S = 2, /* a server that ended sooner than this has failed */
    SUPERVISE_GIVE_UP = 5,      /* failures in a row after which the supervisor gives up */
    SUPERVISE_MAX_PAUSE_S = 30, /* longest pause between two starts; the pause doubles up to this */
    SUPERVISE_KILL_MS = 1000,   /* time beyond what a server takes at most to end by itself */

    HEALTHCHECK_TIMEOUT_MS = 5000, /* less than Docker's 30 s for a check, so that the reason is still printed */
};

#endif
