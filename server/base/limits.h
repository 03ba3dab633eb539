/* limits.h: every limit and time-out of the server that no option sets, with its reason.
 *
 * What an option sets stands in its row of config_table.c; what one body may hold, in PROTO_LIMITS_DEFAULT of
 * proto-json/proto.h. A name begins with the file (HTTP: mhd.c) that keeps the limit. What is no bound on anything from
 * outside, such as the shape of a table or when threads are held on their cores (http/http_threads.c),
 * stays where it is used. */
#ifndef LIMITS_H
#define LIMITS_H

#include <stdint.h>

/* ---- Options ----------------------------------------------------------------------------------------------------- */

enum {
    CONFIG_MAX_LISTEN = 8,            /* of --listen: each kind of address several times */
    CONFIG_METRICS_CONNECTIONS = 256, /* to --metrics-listen, beside --max-connections: probes and scrapers */
    CONFIG_SPARE_FILES = 128, /* open files beside the connections: epoll, eventfd, libraries, log, GPU driver */
    CONFIG_LEAST_FILES = 32,  /* the same without the GPU driver and the threads, where files are very few */
    CONFIG_THREAD_FILES = 2,  /* of an HTTP thread: epoll and eventfd */
    CONFIG_MAX_BATCH = 1024,  /* of --max-batch: an array of the loop's has room for it */
    CONFIG_MAX_PROXIES = 8,   /* of --trusted-proxy: each is compared with the peer of every request */
    CONFIG_MAX_DEVICES = 64,  /* numbers in --devices are bits of a mask */
    CONFIG_MAX_SHM = 8,       /* of --allow-shm: each is told to a client whose key has none of them, */
    CONFIG_SHM_BYTES = 32,    /* all of it */
};

/* ---- Connections (http/) ----------------------------------------------------------------------------------------- */

enum {
    LISTEN_BACKLOG = 4096,     /* the system cuts it to net.core.somaxconn */
    LISTEN_ACCEPT_BURST = 64,  /* connections accepted in one go: the loop has other things to do */
    LISTEN_DOOR_MS = 100,      /* for a handshake to end that had begun when new ones were refused: a round trip, */
    LISTEN_DOOR_LOCAL_MS = 20, /* or nearly none on this machine */
    LISTEN_KEEPALIVE_S = 60,   /* before the kernel asks a silent connection whether it is still there */
    LISTEN_USER_TIMEOUT_MS = 30000, /* unacknowledged bytes for so long: the client has vanished without a word */
    REFUSAL_RETRY_AFTER_S = 1,      /* a connection that was one too many is welcome as soon as another ends */

    FRONT_HEAD_MS = 10000, /* for a head to arrive, or --body-timeout-ms where that is less */
    FRONT_IDLE_MS = 75000, /* between two requests: more than the 60 s for which balancers keep a connection */
    /* While draining: when nobody has said anything for so long, connections that say nothing will not be missed. Until
     * then a balancer takes those that it has kept for its next requests. */
    FRONT_SILENT_MS = 500,
    FRONT_STALLED_MS = 2000,        /* and one that is in the middle of something and does not move */
    FRONT_SWEEP_CONNECTIONS = 2000, /* looking at 10000 connections takes 2 ms: the more there are, the less often */
    CONNECTION_BYTES_PER_MS = 1024, /* of a body or an answer, beyond --body-timeout-ms, whose help says so */

    /* For a connection that never showed a token, on a server with tokens. When another one needs its place, it has
     * this long to send a body that was refused, and as long to fetch its answer. */
    CONNECTION_STRANGER_MS = 1000,
    /* All other connections keep their place for this long after a request: a busy client is idle for less. */
    CONNECTION_BETWEEN_MS = 100,
    CONNECTION_LOOK_MS = 10, /* from a search for a connection to close that found none to the next search */
    CONNECTION_LEAVING = 64, /* connections that were cut to make room and that the web server has not closed yet */

    LINGER_MS = 10000,       /* after this, a client that has not fetched its answer may lose the answer's end */
    LINGER_MOST = 256,       /* sockets; one more, and the oldest is closed before its time */
    LINGER_SPARE_FILES = 32, /* descriptors that are never used for them */
    LINGER_EVENTS = 16,      /* sockets that are looked at in one turn of the loop */
    LINGER_DROP_BYTES = 16 << 10,
    LINGER_DROP_PIECES = 64,           /* pieces of LINGER_DROP_BYTES from one socket at once: 1 MiB */
    LINGER_SWEEP_PIECES = LINGER_MOST, /* from all of them in one turn of the loop: 4 MiB, about a millisecond */
};

/* ---- Heads and bodies (http/) ------------------------------------------------------------------------------------ */

enum {
    /* A connection's memory in libmicrohttpd: the head, and half of it is what one recv() reads. It is zeroed whole
     * between two requests, and the more there is the less of it is still in the cache when it is decoded: so it is
     * no more than what makes three calls of a body of 131 KB. Before 1.0 (measured with 0.9.75) a step that is
     * larger than the buffer makes each further recv() of a body read an eighth of the rest more; from 1.0 on it
     * would keep the buffer from growing. */
    HTTP_CONNECTION_BYTES = 80 << 10,
    HTTP_CONNECTION_STEP = 60 << 10,
    /* The memory of connections that is counted (attnd_connection_bytes); tensors are staging memory. An open
     * connection has HTTP_CONNECTION_BYTES, and records of libmicrohttpd and of ours. TLS took 28 KiB with GnuTLS
     * 3.7.9. A request under way has a record, a decoder and an unpacker (72 KiB). It also has the beginning of its
     * text, or a kept body, or a block of its answer. */
    HTTP_OPEN_BYTES = HTTP_CONNECTION_BYTES + (4 << 10),
    HTTP_TLS_BYTES = 32 << 10,
    HTTP_REQUEST_BYTES = 108 << 10,
    HTTP_CONNECTIONS_SHARE = 8, /* connections get at most an eighth of the memory by default (--max-connections) */
    HTTP_CONNECTIONS_LEAST = 16,
    HTTP_EXPECT_NS = 50000,   /* after an answer of a GPU: a client takes 20 us, and to wake a thread as few more */
    HTTP_INACTIVITY_S = 120,  /* a backstop: the sweep of connections.c is stricter */
    HTTP_ARGUMENTS_MAX = 100, /* of a query; libmicrohttpd keeps a record of each in the connection's memory */
    /* Of a body that a handler reads. The longest has two scales for each of CACHES_HEADS,
     * which Python writes with up to 25 bytes each. */
    HTTP_KEPT_BODY_BYTES = 64 << 10,
    HTTP_PEM_BYTES = 1 << 20,           /* of a certificate chain or key, a few KB: another file was named by mistake */
    REQUEST_UNCOUNTED_BYTES = 32 << 10, /* of a text or an answer; longer ones are counted as staging memory */
    REQUEST_ID_BYTES = 129,             /* of X-Request-Id, with the NUL: what is longer is replaced */
    TLS_MEMORY_WAIT_MS = 4000,          /* less than HEARTBEAT_LIMIT_MS, after which the thread counts as stuck */
    TLS_MEMORY_STEP_MS = 10,
    TOKEN_MAX_BYTES = 256,  /* all are compared in full, so that the time tells nothing */
    TOKEN_MAX_COUNT = 4096, /* 1 MiB that every request with a token is compared with */
};

/* ---- Compressed bodies (base/unpack.c, http/mhd.c) --------------------------------------------------------------- */

enum {
    UNPACK_PIECE_BYTES = 32 << 10, /* unpacked at a time, and decoded before there is more */
    /* In one go of an HTTP thread, then it is another connection's turn: 80 KiB that have arrived may hold 80 MiB,
     * which take 100 ms. A millisecond, and the fiftieth of one for the turn. */
    UNPACK_TURN_BYTES = 256 << 10,
    /* deflate makes at most 1032 bytes of one. Tensors of numbers shrink to a half, masks to a hundredth; what shrinks
     * to less is a small body, or one that means no good. */
    UNPACK_RATIO = 256,
    UNPACK_FREE_BYTES = 64 << 20, /* up to here it may be more */
};

/* ---- Answers (http/answer.c) ------------------------------------------------------------------------------------- */

enum {
    ANSWER_SMALL_BYTES = 256 << 10,  /* encoded at once and sent in one call; a larger one block by block */
    ANSWER_LARGE_INPUTS = 2 << 20,   /* not written over by the answer, but given back for the next request */
    ANSWER_STREAM_BLOCK = 192 << 10, /* fits in the second level cache beside the tensors it is made from */
    ANSWER_ARRAY_BLOCK = 32 << 10,   /* of numbers as text: a millisecond, in which the thread serves nobody else */
};

/* ---- Requests that wait (sched/, work/) -------------------------------------------------------------------------- */

enum {
    LOOP_TICK_MS = 10,        /* between two looks for those that have waited long enough to be watched */
    LOOP_WATCH_AFTER_MS = 20, /* a client that leaves is noticed within LOOP_WATCH_AFTER_MS + LOOP_TICK_MS */
    LOOP_SWEEP_MS = 40,       /* a client that leaves in the middle of a request is noticed within two of them */
    LOOP_CROWD = 512,         /* connections whose memory is worth giving back */
    LOOP_STOP_MS = 2000,      /* after a drain, for the last answers to leave */

    CHECK_LONG_SKELETON_BYTES = 32 << 10, /* longer ones are decoded elsewhere: 2 ms of names and shapes */
    CHECK_LONG_BODY_BYTES = 8 << 20,      /* the same: 2 ms, if all of it were mask rows */
    CHECK_LONG_LSE_BYTES = 512 << 10,     /* the same for a backward, because its lse is checked (attn_check_lse()) */
    CHECK_COPY_BYTES =
        256 << 10, /* of a body, beside which a larger block is leased: the copy takes less than new pages */
    FINISH_PIECE_NS = 10000000,     /* length of a piece of verifying or measuring; then another piece has its turn */
    PIECES_AT_ONCE = 4,             /* as many as libuv has threads, because libuv itself serves in order of arrival */
    FINISH_NUMBERS = 4096,          /* between two looks at the clock */
    PREPARE_MEASURE_AT_ONCE = 4096, /* numbers whose text the HTTP thread measures itself: a millisecond at most */

    QUEUE_SCAN_MAX = 512, /* requests that are asked whether they go with the first, of a queue of up to a million */
    QUEUE_PASS_MAX = 1 << 16, /* requests that are passed over because they wait for something else: 3 ms */
    QUEUE_STEP_ROWS =
        1 << 19, /* caches of steps that are asked whether they can begin: 30 ms, when hundreds have a thousand each */
    QUEUE_RETRY_MAX_S = 30, /* of Retry-After, which is only a guess */

    CONTEXTS_MAX_COUNT = 1024, /* entries of the table, which is made at the start */
    CONTEXTS_TTL_MS = 300000,  /* for the backward to come; its memory is others' then */
    CONTEXTS_SHARE = 4,        /* they may hold a quarter of the staging memory */

    PAGES_GRANULE_BYTES = 4096, /* the least; also the alignment of every page */
    PAGES_GRANULES = 1 << 20,   /* of one pool at most: the search looks at them all in a millisecond */
    CACHES_MAX_COUNT = 1 << 16,
    /* Page numbers that all caches of a device may hold together: CACHES_NUMBERS, or CACHES_SHARING for each granule
     * where that is more. A fork shares pages, but has a copy of a part of their list. */
    CACHES_NUMBERS = 1 << 16,
    CACHES_SHARING = 16,
    CACHES_PREFIX_KEYS = 1024,   /* forks in one decode that share fewer positions are computed each alone */
    CACHES_TTL_MS = 600000,      /* since it was last used, where ttl_s is not given */
    CACHES_PAGE_SIZE = 128,      /* positions, where page_size is not given */
    CACHES_PAGE_SIZE_LEAST = 64, /* there is no size between the two */
    CACHES_PAGE_SIZE_MOST = 128,
    CACHES_HEADS = 1024,         /* of a cache: its key/value heads */
    CACHES_ROWS = 1024,          /* caches in one step */
    CACHES_STEP_PAGES = 1 << 20, /* entries of one step's page table: a millisecond to write */
    CACHES_LIST = 1000,          /* caches in one answer of GET /v1/caches */
    CACHES_EXPIRE_LOOKS = 4096,  /* caches that one sweep looks at */
};

/* A joined batch should not keep its members waiting for more than some ten milliseconds on a CPU. */
#define QUEUE_BATCH_FLOPS 1e9
/* The same of jobs whose keys and values are in caches. */
#define QUEUE_BATCH_STEP_FLOPS 1e11

/* Jobs above this are never joined with others: they keep a device busy alone, and small ones should not wait for
 * them. */
#define PREPARE_SMALL_FLOPS 1e8
/* The same of those whose keys and values are in caches: they wait for memory and not for each other,
 * on a GPU at least. */
#define PREPARE_STEP_FLOPS  1e10
#define PREPARE_SMALL_BYTES ((size_t)2 << 20)
/* From here on (60 us of an H200) a step that cannot become one problem with others (MERGE_BYTES) is not joined with
 * them: whoever waits for one of a batch waits for all. */
#define PREPARE_ALONE_FLOPS 1e9
/* A device with so much memory has enough for any small job, scratch memory included: it is not added up. */
#define PREPARE_SMALL_DEVICE (INT64_C(256) << 20)

/* From PREPARE_CLOSER_S expected seconds on, FlashMask's bounds are read for a closer estimate. q, k and v are read, to
 * look for rows that leave float32, where such rows could make a problem slow. That is so where all rows of that kind
 * would take PREPARE_STRANGE_S seconds, and PREPARE_STRANGE times as long as without them. Reading takes a hundredth of
 * the problem's time. For few rows of queries it takes more, but there such rows cost less than PREPARE_STRANGE times
 * as much. */
#define PREPARE_CLOSER_S  0.05
#define PREPARE_STRANGE_S 1.0
#define PREPARE_STRANGE   8

/* What the problems of one body may have verified together: multiply-adds (rows and heads * Sk * (D + Dv), about a
 * second); and one of them: the K and V of one head as doubles. */
#define VERIFY_MAX_MULTIPLY_ADDS (INT64_C(1) << 30)
#define VERIFY_MAX_HEAD_ELEMENTS (INT64_C(1) << 24)
/* Multiply-adds for checking the lse of one body: 30 ms. A row that takes more is not checked. */
#define VERIFY_LSE_MULTIPLY_ADDS (INT64_C(1) << 25)
/* The same, for each byte of the body. Without this bound a small body with heads of one number could keep a thread
 * that receives bodies busy for 30 ms. Heads of 16 numbers and more have enough for some ten rows. */
#define VERIFY_LSE_PER_BYTE 8

/* ---- Devices (device/) ------------------------------------------------------------------------------------------ */

enum {
    DEVICE_MAX_STREAMS = 16, /* batches on a device at a time, whatever it offers */
    DEVICE_GUESTS = 6,       /* of DEVICE_MAX_STREAMS, kept for flows without a batch there: see device/devices.c */
    /* A guest waits until the other batches have run for this long. Most batches end sooner, and each would take longer
     * beside another. */
    DEVICE_GUEST_AFTER_NS = 20000000,
    /* Batches of several flows run without a further guest for this many times as long as it would need beside them.
     * Equal work of many flows is then done one after the other, and a short request does not wait for long ones. */
    DEVICE_GUEST_FACTOR = 2,
    DEVICE_MAX_RUN = 1024,  /* problems in one attn_run(): an envelope may hold as many */
    DEVICE_POLL_NS = 20000, /* between two questions to a stream: so late may its end be seen */
    /* While a batch is as young, its end is asked for without a pause: small problems and most steps of decoding. */
    DEVICE_SPIN_NS = 1000000,
    DEVICE_LOST_POLL_NS = 10000000,   /* to one that is lost: nobody waits for it */
    DEVICE_WORKSPACE_KEEP = 64 << 20, /* bytes; a larger workspace is given back after its batch */
    MERGE_BYTES =
        1 << 20, /* inputs and outputs of a problem that may leave together with its equals: beyond, copies are quick */
    MERGE_ALIGN = 16,       /* of each of their tensors */
    MERGE_LINE = 256,       /* of the tensors that they become */
    DEVICE_STOP_MS = 60000, /* for the threads of devices that could not all be opened: idle ones end at once */
    INLINE_KEEP = 4 << 20,  /* as DEVICE_WORKSPACE_KEEP, for an inline slot */
    INLINE_BYTES = 1 << 20, /* inputs and outputs of a small problem of a GPU: 20 us on its bus */
    INLINE_WAIT_NS =
        500000, /* a thread looks for the end of what it put on a GPU so long, then it leaves it to others */
    INLINE_STEP_WAIT_NS = 2000000, /* the same of a step, which has the GPU for itself */
    INLINE_ASK_NS = 20000, /* meanwhile it asks the driver so often; in between it looks at what the GPU writes */
    INLINE_HEADS = 128,    /* heads of all sequences: each costs up to 2 us, however few its numbers */
};

/* A thread that waits for a device (base/naps.h). */
enum {
    NAP_NS = 50000,    /* to which the kernel adds as much: together less than what lets a core sleep deeply */
    NAPS_NS = 2000000, /* since it began to wait: what takes longer is not noticeably longer for a late end */
    /* Requests that wait: among more of them no thread is idle for long, and looking up takes time from others. */
    NAPS_MOST = 4,
};

/* An inline slot's problems, padded: some 100 us of a core. An HTTP thread has other connections, and more cores are
 * worth waking for more. */
#define INLINE_FLOPS 2e7
/* And those of a GPU whose tensors are all in its memory: some 400 us of a Hopper. */
#define INLINE_DEVICE_FLOPS 2e11
/* The same of a step, by the keys and values that it reads: 1.5 ms of an H200. */
#define INLINE_STEP_BYTES (INT64_C(6) << 30)
/* Beyond --watchdog-ms a batch may take what its work takes at this rate. The slowest kernels (float32) reach 34e12
 * on an H200 and a thirtieth of that on the smallest GPU of sm_80 and up. */
#define DEVICE_SLOWEST_FLOPS 2e11
/* Of a device's memory for KV caches, where --kv-bytes is not given; and of the CPU's at most. */
#define DEVICE_CACHE_SHARE    8
#define DEVICE_CACHE_MOST_CPU (INT64_C(16) << 30)
/* What a batch puts on a stream at a time, about: 10 to 50 ms of the GPUs that there are. */
#define DEVICE_GROUP_FLOPS 1e13

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum {
    STAGING_AHEAD_SHARE = 4, /* a quarter of the staging memory may be leased before the bytes for it have arrived */
    STAGING_WARM_MS = 30000, /* staging memory that nobody wanted for so long goes back to the system */
    JSON_DOCUMENT_BYTES = 16 << 20, /* about this server; the longest, /openapi.json, has not a hundredth of it */
    METRICS_PAGE_BYTES = 64 << 20,  /* far above METRICS_MAX_SERIES of every metric */
    METRICS_MAX_SERIES = 192,       /* of one metric; later ones count as "other" */
    METRICS_LABEL_BYTES = 64,       /* with the NUL; labels are cut */
};

/* Shared memory (regions/table.c). A region costs a descriptor, which max-connections leaves for it, and 400 bytes; its
 * own bytes are the client's. What a region may have is a bound all the same: pages that the server is the first to
 * write count as the server's. */
enum {
    REGIONS_MAX_COUNT = 1024,
    REGIONS_PIECE_BYTES = 1 << 20,     /* between two looks at the clock: 0.1 to 0.4 ms */
    REGIONS_AT_ONCE_BYTES = 256 << 10, /* are read, or written, by the HTTP thread: less than 0.1 ms */
    REGIONS_PINNED_TENSOR =
        256 << 10,         /* from here on a device copies it itself: drivers read what is small by the processor */
    REGIONS_QUIET_MS = 50, /* the system's clock of changes to files is as coarse as a fifth of that */
    REGIONS_PIN_AGAIN_MS = 1000, /* after a change of the object */
};
#define REGIONS_MAX_BYTES     (INT64_C(1) << 40)
#define REGIONS_PINNED_REGION (INT64_C(1) << 30) /* pinning takes the driver 0.1 ms per MiB, or more */
#define REGIONS_PINNED_BYTES  (INT64_C(8) << 30) /* of all regions: pages that cannot be moved */

/* Of the staging memory that nobody leases, so much is kept for the next request. */
#define STAGING_WARM_BYTES (INT64_C(1) << 30)

/* ---- The log (base/log.c) ---------------------------------------------------------------------------------------- */

enum {
    LOG_BUFFER_BYTES = 1 << 20,  /* of lines that wait while the sink takes none; more are lost, and counted */
    LOG_PAIRS_BYTES = 1024,      /* of a line's key=value pairs, with the NUL */
    LOG_NAME_BYTES = 128,        /* of a request id or an event */
    LOG_CLEAN_INPUT_BYTES = 128, /* of a string that a client sent */
    LOG_REPEATS_PER_SECOND = 20, /* lines of one event from WARN on: a stream of them fills no disk */
    LOG_REPEAT_SLOTS = 64,       /* events with a count of their own; more of them share slots in turn */
    LOG_GATHER_MS = 5, /* the writer waits this long for more lines, so that it makes at most 200 calls per second */
    LOG_CLOSE_TIMEOUT_MS = 1000, /* for a sink that is stuck at the end */
};

/* Connections that speak another protocol (http/first_bytes.c), and what proxies say. */
enum {
    FIRST_BYTES_SOCKETS = 1 << 20, /* descriptors below this are looked at: a million connections */
    FIRST_BYTES_LOG_MS = 60000,    /* between two lines of one reason: a flood of such clients fills no disk */
    FORWARDED_LINES = 8,           /* the last lines of X-Forwarded-For: a proxy adds to a line, or adds a line */
};

/* ---- Threads: their start, being stuck, and ends ----------------------------------------------------------------- */

enum {
    THREADS_STACK_BYTES = 8 << 20, /* stack of libuv's threads from 1.46 on, and the least that threads_try() tries */
    THREADS_END_MS = 1000,         /* for joined threads to be gone from the system: a millisecond is usual */

    HEARTBEAT_LIMIT_MS = 5000, /* at one piece of work: milliseconds are usual, a busy machine explains no seconds */
    HEARTBEAT_THREADS = 1024,  /* that are looked at: --http-threads, the loop, devices, and room */

    MAIN_BYTES = 64 << 20,       /* memory of the process itself: program, libraries, tables, log */
    MAIN_THREAD_BYTES = 8 << 20, /* memory of an HTTP thread: stack, malloc's arena, INLINE_KEEP */

    SIGNALS_GRACE_MS = 5000,  /* for what follows the last answers: threads join, devices and memory are given back */
    MAIN_STOP_WAIT_MS = 1000, /* for the devices' threads to end what they compute, which nobody waits for */

    SUPERVISE_SHORT_LIFE_S = 2, /* a server that ended sooner has failed */
    SUPERVISE_GIVE_UP = 5,      /* failures in a row after which another try is no help */
    SUPERVISE_MAX_PAUSE_S = 30, /* between two tries; it doubles up to here */
    SUPERVISE_KILL_MS = 1000,   /* beyond what a server takes to end by itself at most */

    HEALTHCHECK_TIMEOUT_MS = 5000, /* less than the 30 s that Docker gives a check, so that the reason is told */
};

#endif
