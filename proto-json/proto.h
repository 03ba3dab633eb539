/* proto.h: bytes to problems, results to bytes, in several formats. No sockets, no threads, no files.
 *
 * A parser is fed the request's body in pieces of any size, as they arrive. It decodes tensor values (base64
 * strings and arrays of numbers) at once into memory that the caller provides, and never keeps their text.
 * The rest of the body, a rest of a few hundred bytes, goes to cJSON at the end and becomes attn_problems
 * that have passed attn_check(). An encoder knows the length of its answer before the first byte, and
 * produces the answer block by block while it is sent.
 *
 * The wire format, with examples that a test replays, is in PROTOCOL.md. */
#ifndef PROTO_H
#define PROTO_H

#include "kernels/attention.h"
#include "kernels/judge/judge.h"
#include "operations.h"

/* ---- Errors: one table for every refusal a client can meet ------------------------------------------------------- */

/* id, HTTP status, code (a stable slug), title. The texts (`detail`) are made where the fault is found. */
#define PROTO_ERROR_MAP(X)                                                                                  \
    X(INVALID_REQUEST, 400, "invalid-request", "The request is malformed")                                  \
    X(INVALID_FRAMING, 400, "invalid-framing", "The HTTP message is malformed")                             \
    X(UNAUTHORIZED, 401, "unauthorized", "A token is required")                                             \
    X(FORBIDDEN_ORIGIN, 403, "forbidden-origin", "Pages of another site may not use this server")           \
    X(NOT_FOUND, 404, "not-found", "There is no such resource")                                             \
    X(METHOD_NOT_ALLOWED, 405, "method-not-allowed", "This method does not work here")                      \
    X(REQUEST_TIMEOUT, 408, "request-timeout", "The body did not arrive in time")                           \
    X(CONFLICT, 409, "conflict", "That name is taken")                                                      \
    X(IN_USE, 409, "in-use", "Another request uses this")                                                   \
    X(TOO_LARGE, 413, "too-large", "The request is over a limit")                                           \
    X(TARGET_TOO_LONG, 414, "target-too-long", "The request target is too long")                            \
    X(UNSUPPORTED_MEDIA, 415, "unsupported-media-type", "This content type or encoding is not spoken here") \
    X(EXPECTATION_FAILED, 417, "expectation-failed", "This expectation cannot be met")                      \
    X(UNSUPPORTED, 422, "unsupported", "No kernel here computes this")                                      \
    X(TOO_MUCH_WORK, 422, "too-much-work", "This would take too long here")                                 \
    X(QUOTA, 429, "quota-exceeded", "The caller's quota is used up")                                        \
    X(HEAD_TOO_LARGE, 431, "head-too-large", "The head of the request is too large")                        \
    X(INTERNAL, 500, "internal", "The server failed")                                                       \
    X(NOT_IMPLEMENTED, 501, "not-implemented", "This is not offered here")                                  \
    X(UNAVAILABLE, 503, "unavailable", "The server cannot take this now")                                   \
    X(QUEUE_FULL, 503, "queue-full", "The queue is full")                                                   \
    X(OUT_OF_MEMORY, 503, "out-of-memory", "Memory is short")                                               \
    X(DRAINING, 503, "draining", "The server is stopping")                                                  \
    X(DEADLINE, 504, "deadline-exceeded", "The deadline passed")                                            \
    X(STORAGE_FULL, 507, "storage-full", "The pool is full")

typedef enum proto_error {
#define X(id, http, code, title) PROTO_E_##id,
    PROTO_ERROR_MAP(X)
#undef X
        PROTO_ERROR_COUNT
} proto_error;

typedef struct proto_error_info {
    int http;
    const char *code, *title;
} proto_error_info;
extern const proto_error_info proto_errors[PROTO_ERROR_COUNT];

proto_error proto_error_of(attn_status status); /* ATTN_INVALID -> INVALID_REQUEST, ATTN_BUSY -> QUEUE_FULL, ... */

/* Writes the problem document (RFC 9457, plus code, request_id, pointer, error), NUL-ended and cut to fit,
 * and returns its length. `pointer` may be NULL or empty. `prefix` (may be NULL) goes before `pointer`:
 * "/requests/3". 4 KiB are always enough. */
size_t proto_error_write(char *buffer, size_t capacity, proto_error error, const char *detail, const char *prefix,
                         const char *pointer, const char *request_id);

/* ---- dtypes ------------------------------------------------------------------------------------------------------ */

/* dtypes that are converted while they are decoded: wire name, safetensors name, KServe name, bytes in
 * base64, resulting dtype. Every value must fit: int64 into int32, bool must be 0 or 1. All other dtypes are
 * those of ATTN_DTYPE_MAP. */
#define PROTO_DTYPE_MAP(X)             \
    X("int64", "I64", "INT64", 8, I32) \
    X("bool", "BOOL", "BOOL", 1, U8)

typedef struct proto_dtype {
    const char *name; /* the wire name */
    attn_dtype as;    /* the resulting dtype of its elements */
    size_t bytes;     /* of an element in base64 */
} proto_dtype;

/* Any of the three names, in any case. */
bool proto_dtype_parse(const char *name, proto_dtype *dtype);
/* May the tensor have this dtype, for some dtypes of the others? The second function lists the wire names of
 * all dtypes that it may have, as "int32 or int64", and returns `text`. A result that is judged may have any float
 * dtype: proto_dtype_judged(). */
bool proto_dtype_takes(attn_tensor_id id, const proto_dtype *dtype);
bool proto_dtype_judged(const proto_dtype *dtype);
enum { PROTO_DTYPE_LIST_BYTES = ATTN_DTYPE_LIST_BYTES + 16 };
const char *proto_dtype_list(attn_tensor_id id, char text[PROTO_DTYPE_LIST_BYTES]);

/* ---- Formats ----------------------------------------------------------------------------------------------------- */

/* Do these bytes begin like a safetensors file? The function needs PROTO_SAFETENSORS_MARK bytes: a length
 * below 2^32 in 8 bytes, and '{'. JSON never has such a NUL. */
enum { PROTO_SAFETENSORS_MARK = 9 };
bool proto_is_safetensors(const void *bytes, size_t count);

/* How a body, or an answer, is written. All formats have the same tensors and options (PROTOCOL.md). */
typedef struct proto_format proto_format;
extern const proto_format proto_json, proto_safetensors, proto_kserve;
const char *proto_media(const proto_format *format); /* its content type */

/* The dtype as KServe writes it: "FP32". */
const char *proto_datatype(attn_dtype dtype);

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

typedef struct proto_limits {
    size_t rest_bytes;    /* bytes of a body that are not tensor data */
    int depth;            /* nesting */
    int members;          /* of one object */
    int values;           /* values outside tensor data (numbers, strings, arrays, ...), each of which costs
                            * cJSON a node */
    int batch;            /* problems in {"requests": [...]} */
    int64_t tensor_bytes; /* decoded bytes of the tensors of one body */
} proto_limits;

#define PROTO_LIMITS_DEFAULT                                                                 \
    {                                                                                        \
        .rest_bytes = 1 << 20, .depth = 32, .members = 64, .values = 1 << 17, .batch = 1024, \
        .tensor_bytes = INT64_C(1) << 40                                                     \
    }

enum { PROTO_MAX_DEPTH = 64 }; /* bound on limits.depth; a larger limit counts as this one */

/* Limit on the header of a safetensors body, and on the JSON of a KServe body without its arrays of numbers;
 * limits.rest_bytes applies where it is less. The header says where the data behind it go, and the
 * receiving thread therefore parses it at once, in 3 ms at most. 64 tensors with their shapes take 10 KiB,
 * and PROTO_MAX_CACHES ids as Python writes them take 46 KiB. */
enum { PROTO_HEADER_BYTES = 64 << 10 };

/* Where tensor bytes go. grow() provides at least `bytes` in one piece at *base, 64-byte aligned, and keeps
 * what is there; the piece may move. Every tensor starts at a multiple of 64 bytes in it. On failure the old
 * contents stay valid, and *err goes to the client as it is. The parser remembers how much it has and
 * requests more in steps of PROTO_MEMORY_STEP; a grow() that copies should still grow in proportion. */
enum { PROTO_MEMORY_STEP = 4096 };
typedef struct proto_memory {
    attn_status (*grow)(void *context, size_t bytes, void **base, attn_error *err);
    void *context;
} proto_memory;

/* Upper bound on the bytes that a parser requests from grow() for a body of `body_bytes` bytes, while it
 * holds at most `tensors` of them. It helps a caller that knows Content-Length. Arrays of numbers in JSON may
 * need more: "0," is two bytes of text and up to eight of memory. */
size_t proto_memory_for(const proto_format *format, uint64_t body_bytes, int tensors);

typedef enum proto_encoding { PROTO_BASE64, PROTO_ARRAY } proto_encoding;

enum { PROTO_VERIFY_ALL = -1, PROTO_CONTEXT_BYTES = 64, PROTO_MAX_CACHES = 1024 };

/* One problem of a body. Its inputs point into the caller's memory. Requested outputs have dtype, rank, shape
 * and strides set and data NULL; the caller provides memory for them. */
typedef struct proto_item {
    attn_problem problem;
    attn_dtype result_dtype; /* out_dtype or grad_dtype, as given or by default: see attn_output() */
    bool has_result_dtype;   /* it was asked for */
    bool has_seed;           /* problem.seed was given; else the caller draws one for a forward with dropout */
    bool has_layout;         /* layout was named */
    unsigned hints;          /* what looks wrong in a valid problem: hints.h */
    uint64_t outputs;        /* bit attn_tensor_id: wanted in the answer */
    proto_encoding encoding;
    int64_t verify_rows;                 /* rows to verify; 0: none; or PROTO_VERIFY_ALL */
    bool save;                           /* forward: keep the results for one backward */
    char context[PROTO_CONTEXT_BYTES];   /* backward: id of what a forward saved; empty: none. With an id the
                                          * problem has only dout and dlse and is unchecked; the caller fills
                                          * in the rest */
    char (*caches)[PROTO_CONTEXT_BYTES]; /* decode: ids, one for each row of q. The problem is unchecked, k
                                          * and v are the rows to append, and the caller fills in the rest */
    int cache_count;
    attn_tensor *results; /* check: the results to judge, by attn_tensor_id; owned */
    attn_op asked;        /* check: member operation */
    int64_t timeout_ms;   /* member timeout_ms; 0: none */
    int64_t priority;     /* member priority: 1 is the most urgent; 0: not given */
    attn_error error;     /* the error of this problem; with a status other than OK it is not run and has no result */
} proto_item;

/* ---- The options: one row for each member of a problem that is not a tensor
 * ----------------------------------------
 *
 * parse_options.c reads the members by this table, and the OpenAPI document is written from it. The rows of
 * tensors are attn_tensors[] of kernels/attention.h. A new option is a new row. */

enum { PROTO_PRIORITY_USUAL = 128 }; /* what a priority of 0 is */

/* How a member is written in JSON, and what it is in proto_item. */
typedef enum proto_type {
    PROTO_TYPE_BOOL,    /* true, false; bool */
    PROTO_TYPE_NUMBER,  /* any number; double */
    PROTO_TYPE_INTEGER, /* an integer literal (no fraction, no exponent, not -0) from minimum to maximum; int64_t */
    PROTO_TYPE_SEED,    /* an integer literal from 0 to 2^64 - 1, exact; uint64_t */
    PROTO_TYPE_CHOICE,  /* one of `choices`; an enum, whose first value is 0 */
    PROTO_TYPE_PAIR,    /* [integer, integer], each as PROTO_TYPE_INTEGER; two int64_t, one after the other */
    PROTO_TYPE_DTYPE,   /* name of a dtype of results: float32, float16, bfloat16; attn_dtype */
    PROTO_TYPE_NAMES,   /* array of names of outputs; uint64_t, a bit for each attn_tensor_id */
    PROTO_TYPE_ROWS,    /* an integer as above, or "all"; int64_t, PROTO_VERIFY_ALL */
    PROTO_TYPE_IDS,     /* array of 1 to PROTO_MAX_CACHES values of PROTO_TYPE_ID; char
                         * (*)[PROTO_CONTEXT_BYTES], then an int */
    PROTO_TYPE_ID,      /* 1 to PROTO_CONTEXT_BYTES - 1 letters, digits, '.', '_' or '-'; char[PROTO_CONTEXT_BYTES] */
} proto_type;

enum {
    PROTO_FORWARD = 1 << ATTN_OP_FORWARD,
    PROTO_BACKWARD = 1 << ATTN_OP_BACKWARD,
    PROTO_DECODE = 1 << PROTO_OP_DECODE,
    PROTO_APPEND = 1 << PROTO_OP_APPEND,
    PROTO_CHECK = 1 << PROTO_OP_CHECK,
};

typedef struct proto_option {
    const char *name;
    proto_type type;
    unsigned ops;      /* bits PROTO_FORWARD, ...: the operations that take it */
    bool with_context; /* may stand beside `context`; other options come from the saved forward */
    size_t offset;     /* of its value in proto_item */
    size_t given;      /* of the bool in proto_item that says it was given; 0: there is none */
    int64_t minimum, maximum;
    const char *const *choices; /* NULL at the end */
    const char *otherwise;      /* the default, as JSON; NULL: it varies, as `help` explains */
    const char *help;
} proto_option;

extern const proto_option proto_options[]; /* a row whose name is NULL ends it */
/* May it be one of the `parameters` of a KServe request? The names and the form of the outputs stand
 * elsewhere in such a request. */
bool proto_is_parameter(const proto_option *option);

/* May a single number stand in the place of this tensor, as if it were an option? */
bool proto_may_be_number(attn_tensor_id id);

/* The refusal of shared memory, for servers without regions and for parsers whose caller does not offer it. */
#define PROTO_NO_SHARED_MEMORY "shared memory is not offered here, send the bytes as binary data"

/* KServe: a tensor in memory that client and server share. Its bytes are neither in the body nor in the answer. */
enum { PROTO_REGION_BYTES = 129 }; /* of a name or a key, with the NUL */
typedef struct proto_shared {
    attn_tensor_id id;
    bool output;
    int index;                       /* in the inputs or outputs of the body */
    char region[PROTO_REGION_BYTES]; /* the name under which the region was registered */
    int64_t offset, bytes;           /* in the region, each up to 2^53; `bytes` of an output is the room for it */
    bool kernels_only;               /* only kernels read or write the tensor */
    void *to;                        /* for an input: where its bytes go, set by proto_parser_shared_room() */
    void *device;                    /* the tensor in a GPU's memory; the caller sets it before
                                      * proto_parser_shared_room() */
} proto_shared;

/* May the tensor lie in memory that only a device can read? It may not where the host checks or converts its
 * values. */
bool proto_may_lie_on_device(attn_tensor_id id);

/* KServe: a sequence as Triton has it, whose keys and values are in a cache of the server. The operation is
 * decode, with sequence_id in the place of caches. */
enum { PROTO_SEQUENCE_BYTES = 128 + 1 }; /* with the NUL: Triton takes names of 128 bytes */
typedef struct proto_sequence {
    char id[PROTO_SEQUENCE_BYTES]; /* empty: the request has no sequence */
    bool start, end;
} proto_sequence;

/* KServe: where a tensor stood in the body. */
typedef struct proto_input {
    int place;   /* its number among the inputs, counted from 1; 0: it was not there */
    bool binary; /* its bytes stood behind the JSON */
    bool shared; /* its bytes are in shared memory */
} proto_input;

/* A decoded body. The caller owns it and frees it with proto_call_free(). */
typedef struct proto_call {
    proto_op op;
    bool envelope; /* {"requests": [...]}, which is answered by {"responses": [...]} */
    int count;
    proto_item *items;
    size_t memory_bytes;        /* bytes of the proto_memory in use */
    const proto_format *answer; /* format of the answer: the body's, unless proto_call_answer_as() was called */
    /* KServe: */
    const proto_model *model; /* NULL in other formats */
    char *id;                 /* echoed; NULL: none */
    uint64_t binary;          /* bits of attn_tensor_id: outputs written as bytes behind the JSON */
    uint64_t shared;          /* bits of attn_tensor_id: outputs that go into shared memory and not into the answer */
    proto_sequence sequence;
    const proto_format *format; /* of the body */
    proto_input inputs[ATTN_TENSOR_COUNT];
} proto_call;

/* Turns err->member of a fault that was found after proto_parser_finish() from a pointer into a problem as
 * JSON has it into one into the body as it was sent. A second call changes nothing. */
void proto_call_locate(const proto_call *call, attn_error *err);

/* Sets the format of the answer. INVALID where that format cannot hold it: several problems of one body. */
attn_status proto_call_answer_as(proto_call *call, const proto_format *format, attn_error *err);
/* Are the tensors of this item written as arrays of numbers? */
bool proto_writes_numbers(const proto_call *call, const proto_item *item);

/* Prepares the outputs of a problem whose inputs are set: dtype, rank, shape and strides of every tensor in
 * item->outputs. INVALID where an output or its dtype does not fit the inputs. */
attn_status proto_item_outputs(proto_item *item, attn_error *err);

/* Checks the problem (attn_check) and prepares its outputs. proto_parser_finish() has done this for every
 * forward or backward item without `context`. For other items the caller does it when their tensors are set. */
attn_status proto_item_prepare(proto_item *item, attn_error *err);

typedef struct proto_parser proto_parser;

/* Makes a parser; `limits` and `memory` are copied. NULL when out of memory. */
proto_parser *proto_parser_new(const proto_format *format, proto_op op, const proto_limits *limits,
                               const proto_memory *memory);
/* For KServe, before the first byte: passes what the URL and the head say. `model` is borrowed. json_bytes is
 * the value of Inference-Header-Content-Length, or -1 where it is not given. */
void proto_parser_kserve(proto_parser *parser, const proto_model *model, int64_t json_bytes);
void proto_parser_free(proto_parser *parser); /* NULL is fine */

/* Takes the next piece of the body, of any size. After an error every further call returns that error. The
 * text of a syntax error names the byte offset in the body. */
attn_status proto_parser_feed(proto_parser *parser, const void *bytes, size_t count, attn_error *err);

/* The operation of the body, known from the start; for KServe, from proto_parser_kserve() on. */
proto_op proto_parser_op(const proto_parser *parser);
/* Bytes of the body so far that are not tensor data. proto_parser_finish() parses these, at some 12 us for
 * 200 bytes. */
size_t proto_parser_skeleton_bytes(const proto_parser *parser);

/* Bytes of memory that the parser holds. Parts that never exceed a few PROTO_HEADER_BYTES are not counted. */
size_t proto_parser_held_bytes(const proto_parser *parser);

/* The tensors of a complete body that lie in shared memory: *count of them, inputs first; usually none.
 * Before proto_parser_finish() the caller makes room for the inputs and fills it with their bytes; otherwise
 * the body is refused. An input whose `device` the caller has set gets no room: its tensor stays there, and
 * the host does not read it. The parser owns the list. */
attn_status proto_parser_shared(proto_parser *parser, proto_shared **shared, int *count, attn_error *err);
attn_status proto_parser_shared_room(proto_parser *parser, attn_error *err);

/* After proto_parser_finish(): the sequence that a KServe body names. Where the body was refused, it holds
 * what could be read of it. NULL: the format has no sequences. */
const proto_sequence *proto_parser_sequence(const proto_parser *parser);

/* Call this when the body is complete. The caller then owns *call. */
attn_status proto_parser_finish(proto_parser *parser, proto_call **call, attn_error *err);
void proto_call_free(proto_call *call);

/* ---- Small bodies ------------------------------------------------------------------------------------------------ */

enum { PROTO_CACHE_HEADS = 1024, PROTO_CACHE_TTL_MOST_S = 7 * 86400 };

/* The body of POST /v1/caches. 0 means "not given", unless a field says otherwise. */
typedef struct proto_cache {
    int64_t kv_heads, head_dim, head_dim_v; /* head_dim_v is head_dim where it is not given */
    int64_t page_size, ttl_s;
    attn_dtype dtype;
    bool latent;
    float *k_scale; /* kv_heads numbers from malloc(); NULL: not given */
    int k_scales;
    float *v_scale;
    int v_scales;
} proto_cache;

/* Reads that body. After an error there is nothing to clear. */
attn_status proto_cache_read(const void *body, size_t bytes, proto_cache *cache, attn_error *err);
void proto_cache_clear(proto_cache *cache);

/* Reads the body of KServe's index: {"ready": true} requests only the models that are ready. An empty body is {}. */
attn_status proto_index_read(const void *body, size_t bytes, bool *ready, attn_error *err);

/* Reads {"length": n}. *length is -1 where it is not given and not required. An empty body is {}. */
attn_status proto_length_read(const void *body, size_t bytes, bool required, int64_t *length, attn_error *err);
/* The body with which Triton's clients register a region of shared memory: {"key": "/x", "offset": 0,
 * "byte_size": 64}. `offset` may be left out. INVALID comes with a pointer into the body. */
typedef struct proto_region {
    char key[PROTO_REGION_BYTES];
    int64_t offset, bytes; /* up to 2^53 */
} proto_region;
attn_status proto_region_read(const void *body, size_t bytes, proto_region *region, attn_error *err);
/* The body that registers a region of a GPU's memory: {"raw_handle": {"b64": "..."}, "device_id": 0,
 * "byte_size": 64}. All members are required. */
typedef struct proto_cuda_region {
    uint8_t handle[ATTN_HANDLE_BYTES];
    int64_t device, bytes; /* up to 2^53 */
} proto_cuda_region;
attn_status proto_cuda_region_read(const void *body, size_t bytes, proto_cuda_region *region, attn_error *err);

/* ---- Encoding ---------------------------------------------------------------------------------------------------- */

/* Stages of a request, in order; also the parts of Server-Timing. timing_us reports some of them, and counts
 * `launch` as part of `compute`.
 *
 *   prepare   the device's thread chooses kernels and takes memory, until the device has begun
 *   launch    the device is idle between its copies and its kernels, which are not on the stream yet */
#define PROTO_STAGE_MAP(X) X(recv) X(decode) X(queue) X(prepare) X(copy_in) X(launch) X(compute) X(copy_out) X(encode)
typedef enum proto_stage {
#define X(name) PROTO_STAGE_##name,
    PROTO_STAGE_MAP(X)
#undef X
        PROTO_STAGE_COUNT
} proto_stage;
extern const char *const proto_stages[PROTO_STAGE_COUNT];

typedef struct proto_verification { /* of `verify` */
    double max_abs, relative;       /* largest absolute error of out; that error relative to the largest |out| */
    int64_t rows;
} proto_verification;

/* The result of one item that had no error. */
typedef struct proto_result {
    char backend[80];                    /* "cpu avx512", "cuda:0 sm90" */
    double timing_us[PROTO_STAGE_COUNT]; /* those of a device */
    char context[PROTO_CONTEXT_BYTES];   /* of save; empty: none */
    const int32_t *lengths;              /* after decode or append: the lengths of the cache_count caches;
                                          * NULL: none */
    int length_count;
    bool verified;
    proto_verification verification;
    judge_result *report; /* check: from malloc(), freed with the job; NULL: none */
} proto_result;

typedef struct proto_encoder proto_encoder;

/* Makes the 200 answer to `call`, in the format call->answer, from results[i] and the output tensors of
 * items[i]. It borrows call, results and the tensors' memory until proto_encoder_free(). With array encoding
 * the numbers are formatted twice: once to know the length (proto_encoder_measure), and again while they are
 * read. Their text therefore never lies in memory. request_id goes into the problem documents of failed items
 * of an envelope. A failed call that is not an envelope has no 200 answer: its error is returned. */
attn_status proto_encoder_new(const proto_call *call, const proto_result *results, const char *request_id,
                              proto_encoder **encoder, attn_error *err);
/* Measures at most `elements` more numbers of arrays, at some 0.1 to 0.3 us each. Returns true when all are
 * measured. */
bool proto_encoder_measure(proto_encoder *encoder, int64_t elements);
uint64_t proto_encoder_length(proto_encoder *encoder); /* measures what is left */
/* Bytes of the answer before the first tensor that is written as raw bytes; the whole answer where none is. */
uint64_t proto_encoder_head_bytes(proto_encoder *encoder);
/* Reads the next bytes of the answer, at most `capacity`. Returns how many; 0 at the end. */
size_t proto_encoder_read(proto_encoder *encoder, void *buffer, size_t capacity);
void proto_encoder_free(proto_encoder *encoder);

#endif
