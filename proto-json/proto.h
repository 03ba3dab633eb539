/* proto.h: turns bytes into problems and results into bytes, in several formats. It uses no sockets, threads or files.
 *
 * A parser gets the request's body in pieces of any size, as they arrive. It decodes tensor values (base64 strings and
 * arrays of numbers) at once into memory that the caller provides, and never keeps their text. An encoder knows the
 * length of its answer before the first byte, and produces the answer block by block while it is sent.
 *
 * PROTOCOL.md describes the formats, with examples that a test replays. */
#ifndef PROTO_H
#define PROTO_H

#include "kernels/attention.h"
#include "kernels/judge/judge.h"
#include "operations.h"

/* ---- Errors: one table of all errors that a client can get ------------------------------------------------------- */

/* The table of errors that a client can get. Each row: id, HTTP status, code (a stable name), title. The member
 * `detail` of an error is a sentence that is made where the error is found. */
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

/* Returns the error of a status: ATTN_INVALID gives INVALID_REQUEST, ATTN_BUSY gives QUEUE_FULL, ... */
proto_error proto_error_of(attn_status status);

/* Writes the problem document of an error (RFC 9457) and a NUL, shortened to fit; 4 KiB are always enough. Returns its
 * length. `pointer` may be NULL or empty. `prefix`, such as "/requests/3", goes before `pointer` and may be NULL. */
size_t proto_error_write(char *buffer, size_t capacity, proto_error error, const char *detail, const char *prefix,
                         const char *pointer, const char *request_id);

/* ---- Names of dtypes --------------------------------------------------------------------------------------------- */

/* The dtypes that bodies may have but kernels do not support. Elements are converted while they are decoded. Each row:
 * wire name, safetensors name, KServe name, bytes of an element, resulting dtype. Values must fit the resulting dtype:
 * an int64 must fit int32, and a bool must be 0 or 1. */
#define PROTO_DTYPE_MAP(X)             \
    X("int64", "I64", "INT64", 8, I32) \
    X("bool", "BOOL", "BOOL", 1, U8)

typedef struct proto_dtype {
    const char *name;
    attn_dtype as; /* dtype of the elements after they are decoded */
    size_t bytes;  /* size in bytes of an element as a client sends it, before base64 */
} proto_dtype;

/* Finds a dtype by any of its three names (JSON, safetensors, KServe), in upper or lower case. */
bool proto_dtype_parse(const char *name, proto_dtype *dtype);
/* proto_dtype_takes() returns whether the tensor may have the dtype. proto_dtype_list() writes the names of all its
 * dtypes, such as "int32 or int64". proto_dtype_judged() returns whether a check request may contain a client's result
 * of this dtype. */
bool proto_dtype_takes(attn_tensor_id id, const proto_dtype *dtype);
bool proto_dtype_judged(const proto_dtype *dtype);
enum { PROTO_DTYPE_LIST_BYTES = ATTN_DTYPE_LIST_BYTES + 16 };
const char *proto_dtype_list(attn_tensor_id id, char text[PROTO_DTYPE_LIST_BYTES]);

/* ---- The formats of bodies --------------------------------------------------------------------------------------- */

enum { PROTO_SAFETENSORS_MARK = 9 };
/* Returns whether a body begins like a safetensors file: 8 bytes with a length below 2^32, and '{'. `count` must be at
 * least PROTO_SAFETENSORS_MARK. */
bool proto_is_safetensors(const void *bytes, size_t count);

/* A format of bodies and answers. All formats have the same tensors and options (PROTOCOL.md). */
typedef struct proto_format proto_format;
extern const proto_format proto_json, proto_safetensors, proto_kserve;
const char *proto_media(const proto_format *format); /* returns the content type (media type) of the format */

/* Returns the dtype's name as KServe writes it, such as "FP32". */
const char *proto_datatype(attn_dtype dtype);

/* ---- Reading bodies ---------------------------------------------------------------------------------------------- */

typedef struct proto_limits {
    size_t rest_bytes; /* largest size in bytes of the body without tensor data */
    int depth;
    int members;
    /* Largest number of values outside tensor data (numbers, strings, arrays, ...), each of which needs memory in
     * cJSON. */
    int values;
    int batch;            /* largest number of problems in one body {"requests": [...]} */
    int64_t tensor_bytes; /* largest size in bytes of all tensors of one body, after decoding */
} proto_limits;

#define PROTO_LIMITS_DEFAULT                                                                 \
    {                                                                                        \
        .rest_bytes = 1 << 20, .depth = 32, .members = 64, .values = 1 << 17, .batch = 1024, \
        .tensor_bytes = INT64_C(1) << 40                                                     \
    }

enum { PROTO_MAX_DEPTH = 64 }; /* upper bound of limits.depth; a larger limit has no further effect */

/* Largest size in bytes of the header of a safetensors body, and of the JSON of a KServe body, unless limits.rest_bytes
 * is smaller. The HTTP thread parses this much text in 3 ms at most. The ids of PROTO_MAX_CACHES caches, as Python's
 * json module writes them, take 46 KiB and therefore fit. */
enum { PROTO_HEADER_BYTES = 64 << 10 };

/* The memory for a body's tensors, which the caller provides. grow() must provide at least `bytes` bytes at *base,
 * 64-byte aligned, and keep the old contents; it may move the block. If grow() fails, the old contents stay valid, and
 * the client gets the error that grow() wrote to *err. Each tensor starts at a multiple of 64 bytes. The parser
 * requests memory in steps of PROTO_MEMORY_STEP bytes. */
enum { PROTO_MEMORY_STEP = 4096 };
typedef struct proto_memory {
    attn_status (*grow)(void *context, size_t bytes, void **base, attn_error *err);
    void *context;
} proto_memory;

/* Returns an upper bound on the bytes that a parser requests from grow(), for callers that know Content-Length. Arrays
 * of numbers in JSON may need more: the text of an element, such as "0,", may have two bytes, and the element up to
 * eight bytes in memory. */
size_t proto_memory_for(const proto_format *format, uint64_t body_bytes, int tensors);

/* Numbers that an observe request (statistics of probabilities) can return beside its tensors: name, description. */
#define PROTO_COUNT_MAP(X)                                                                          \
    X(pairs, "pairs (query, key) that all masks let through, over all heads and rows of the batch") \
    X(flops_forward, "2 pairs (D + Dv), with head_dim_v for Dv")                                    \
    X(flops_backward, "2 pairs (3 D + 2 Dv)")                                                       \
    X(tiles, "tiles of tile_size: in how many no pair, every pair or some pairs are let through")
typedef enum proto_count_id {
#define X(name, meaning) PROTO_COUNT_##name,
    PROTO_COUNT_MAP(X)
#undef X
        PROTO_COUNTS
} proto_count_id;
extern const char *const proto_counts[PROTO_COUNTS]; /* their names */

typedef enum proto_encoding { PROTO_BASE64, PROTO_ARRAY } proto_encoding;

enum { PROTO_VERIFY_ALL = -1, PROTO_CONTEXT_BYTES = 64, PROTO_MAX_CACHES = 1024 };

/* Each tensor of a body or an answer has a number. The numbers 0 to ATTN_TENSOR_COUNT - 1 are values of attn_tensor_id.
 * The next two numbers stand for out and lse of part 0 of a merge: parts.0.out and parts.0.lse in a body. Two numbers
 * for part 1 follow, and so on. In an answer these numbers stand for the gradients of the parts: parts.0.dout,
 * parts.0.dlse. */
enum { PROTO_TENSORS = ATTN_TENSOR_COUNT + 2 * ATTN_MERGE_PARTS, PROTO_NAME_BYTES = 24 };

/* Returns the number of the tensor `name`; PROTO_TENSORS: there is no such tensor. `result` is true for a tensor of an
 * answer, and false for a tensor of a body. */
int proto_tensor_named(const char *name, bool result);
const char *proto_tensor_name(int number, bool result, char name[PROTO_NAME_BYTES]);
/* Returns the attn_tensor_id whose dtypes and axes tensor `number` has. For parts.3.out of a merge it is ATTN_T_out. */
attn_tensor_id proto_tensor_id(int number);

/* The parts of a merge, which are results of the same queries over different keys. */
typedef struct proto_parts {
    int count;
    /* whether the body has members such as parts.0.out; if not, it has a list `parts` */
    bool named;
    bool has_back; /* whether the client wants the gradients of the parts */
    /* out and lse of each part, then the gradients dout and dlse of each part. lse is a natural logarithm; it is -inf
     * in a part without keys. */
    attn_result at[];
} proto_parts;

/* One problem of a body. Its inputs point into the caller's memory. An output that the client wants has a shape but no
 * data: the caller provides the memory. */
typedef struct proto_item {
    attn_problem problem;
    /* dtype of the results, from the option out_dtype or grad_dtype; default: q's dtype, or bfloat16 if q is float8 */
    attn_dtype result_dtype;
    bool has_result_dtype;
    /* whether the body has the member `seed`; if not, the caller draws the seed for dropout */
    bool has_seed;
    bool has_layout;
    unsigned hints;   /* bit mask of hints (hints.h) about what looks wrong in a valid problem */
    uint64_t outputs; /* bit mask of the outputs that the answer contains; bit i is the tensor with attn_tensor_id i */
    proto_encoding encoding;
    int64_t verify_rows; /* number of rows of out to verify; PROTO_VERIFY_ALL: all rows */
    /* whether the results are kept as a context (saved forward pass) for one later backward */
    bool save;
    /* For a backward request: the id of the context (saved forward pass) that it uses; empty: none. The body of such a
     * problem gives only dout and dlse; the caller sets the other tensors from the context. */
    char context[PROTO_CONTEXT_BYTES];
    /* For a decode request: the ids of the caches, one for each row of q. The tensors k and v are then the keys and
     * values to append. The caller sets the tensors that describe the caches. */
    char (*caches)[PROTO_CONTEXT_BYTES];
    int cache_count;
    /* for an observe request (statistics of probabilities): bit mask of the numbers to return; bit i is proto_count_id
     * i */
    unsigned counts;
    /* for an observe request (statistics of probabilities): how many queries and how many keys a tile has, for the
     * counts of tiles; 0: the request wants no counts of tiles */
    int64_t tile_size[2];
    int64_t head_dim_v; /* length of a row of V, for counts of operations; 0: as long as a row of Q and K */
    proto_parts *parts; /* the parts of a merge (results over different keys); the proto_call owns them */
    /* for a merge request: lse_base is 1 if the parts' lse are base-2 logarithms (otherwise natural); empty_lse is 1 if
     * parts without keys have lse +inf (otherwise -inf) */
    int lse_base, empty_lse;
    /* for a check request: the client's results, indexed by attn_tensor_id; the proto_call owns them */
    attn_tensor *results;
    attn_op asked;      /* for a check request: the operation whose results are checked */
    int64_t timeout_ms; /* 0: not given */
    int64_t priority;   /* 1 is the most urgent; 0: not given */
    /* a problem with an error is not run and has no result */
    attn_error error;
} proto_item;

/* ---- The options: one row for each member of a problem that is not a tensor -------------------------------------
 *
 * The table is in parse_options.c. The OpenAPI document is also written from it. */

enum { PROTO_PRIORITY_USUAL = 128 }; /* the default of `priority` */

/* The types of options: how the value is written in JSON, and which C type stores it in proto_item. */
typedef enum proto_type {
    PROTO_TYPE_BOOL,   /* JSON true or false; stored as a bool */
    PROTO_TYPE_NUMBER, /* any JSON number; stored as a double */
    /* an integer literal (no fraction, no exponent, not -0) from minimum to maximum; stored as an int64_t */
    PROTO_TYPE_INTEGER,
    PROTO_TYPE_SEED,   /* an integer literal from 0 to 2^64 - 1, exact; stored as a uint64_t */
    PROTO_TYPE_CHOICE, /* one of the words in `choices`; stored as an enum, whose first value is 0 */
    PROTO_TYPE_PAIR,   /* [integer, integer], each as PROTO_TYPE_INTEGER; stored as two int64_t */
    PROTO_TYPE_DTYPE,  /* name of a dtype of results: float32, float16, bfloat16; stored as an attn_dtype */
    /* an array of names of outputs, or for `observe` also names of PROTO_COUNT_MAP; stored as a uint64_t with a bit for
     * each attn_tensor_id */
    PROTO_TYPE_NAMES,
    PROTO_TYPE_ROWS, /* an integer, or "all"; stored as an int64_t, in which PROTO_VERIFY_ALL stands for "all" */
    /* an array of 1 to PROTO_MAX_CACHES ids; stored as a char (*)[PROTO_CONTEXT_BYTES], followed by an int with their
     * number */
    PROTO_TYPE_IDS,
    /* an array of 1 to ATTN_MERGE_PARTS objects with the tensors out and lse; stored as a proto_parts * */
    PROTO_TYPE_PARTS,
    /* 1 to PROTO_CONTEXT_BYTES - 1 letters, digits, '.', '_' or '-'; stored as a char[PROTO_CONTEXT_BYTES] */
    PROTO_TYPE_ID,
} proto_type;

enum {
    PROTO_FORWARD = 1 << ATTN_OP_FORWARD,
    PROTO_BACKWARD = 1 << ATTN_OP_BACKWARD,
    PROTO_OBSERVE = 1 << ATTN_OP_OBSERVE,
    PROTO_DECODE = 1 << PROTO_OP_DECODE,
    PROTO_APPEND = 1 << PROTO_OP_APPEND,
    PROTO_CHECK = 1 << PROTO_OP_CHECK,
    PROTO_MERGE = 1 << PROTO_OP_MERGE,
};

typedef struct proto_option {
    const char *name;
    proto_type type;
    unsigned ops;
    /* Whether the option may be given together with `context`. A context (saved forward) contains the values of all
     * other options. */
    bool with_context;
    size_t offset; /* offset of the value in proto_item */
    /* offset in proto_item of a bool that becomes true if the option is given; 0: none */
    size_t given;
    int64_t minimum, maximum;
    /* the words that the value may be, with NULL at the end; for PROTO_TYPE_PAIR: how error messages write the form of
     * the pair */
    const char *const *choices;
    const char *otherwise; /* the default, as JSON; NULL: the default varies, as `help` explains */
    const char *help;
} proto_option;

extern const proto_option proto_options[]; /* a row whose name is NULL ends the table */
/* Returns whether the option may be one of the `parameters` of a KServe request. */
bool proto_is_parameter(const proto_option *option);

/* Returns whether a body may give a single number instead of this tensor. */
bool proto_may_be_number(attn_tensor_id id);

/* The error for a tensor in shared memory if the server does not offer shared memory. */
#define PROTO_NO_SHARED_MEMORY "shared memory is not offered here, send the bytes as binary data"

/* KServe: a tensor in memory that client and server share, in a region (a range that the client has registered). */
enum { PROTO_REGION_BYTES = 129 }; /* size in bytes, with the NUL, of a region's name or key */
typedef struct proto_shared {
    attn_tensor_id id;
    bool output;
    int index;                       /* index of the tensor in the body's list of inputs or of outputs */
    char region[PROTO_REGION_BYTES]; /* the client's name of the region */
    /* the tensor's range in the region; for an output, `bytes` is the largest size that it may have */
    int64_t offset, bytes;
    bool kernels_only; /* whether only kernels read or write the tensor, so that it may stay in a GPU's memory */
    /* address to which the caller must copy the tensor, if it is an input; set by proto_parser_shared_room() */
    void *to;
    /* Address of the tensor in a GPU's memory, which the caller sets before proto_parser_shared_room(). */
    void *device;
} proto_shared;

/* Returns whether the tensor may be in memory that only a device can read. This is so if the host neither checks nor
 * converts the tensor's values. */
bool proto_may_lie_on_device(attn_tensor_id id);

/* KServe: a sequence of Triton's protocol. Its keys and values are in a cache of the server. */
enum { PROTO_SEQUENCE_BYTES = 128 + 1 }; /* Triton's sequence ids have at most 128 bytes */
typedef struct proto_sequence {
    char id[PROTO_SEQUENCE_BYTES]; /* the sequence's id as text; empty: no sequence */
    bool start, end;
} proto_sequence;

typedef struct proto_input {
    int place; /* position among the body's inputs, counted from 1; 0: the tensor is not in the body */
    bool binary;
    bool shared;
} proto_input;

/* A decoded body with its problems, freed with proto_call_free(). */
typedef struct proto_call {
    proto_op op;
    bool envelope; /* whether the body is {"requests": [...]}; the answer is then {"responses": [...]} */
    int count;
    proto_item *items;
    size_t memory_bytes;
    const proto_format *answer; /* format of the answer: the body's, unless proto_call_answer_as() was called */
    /* Only KServe uses the members below. */
    const proto_model *model; /* the KServe model that the request names; NULL: not KServe */
    char *id;                 /* the request's id, which the answer repeats; NULL: none */
    /* bit mask of outputs that the answer has as bytes after its JSON; bit i is the tensor with attn_tensor_id i */
    uint64_t binary;
    /* for a merge: set of the gradients of its parts (partial results) that the answer has as bytes after its JSON; [0]
     * has a bit for the dout of each part, [1] for its dlse */
    uint64_t binary_parts[2];
    /* bit mask of outputs that go into memory that client and server share; bit i is attn_tensor_id i */
    uint64_t shared;
    proto_sequence sequence;
    const proto_format *format;
    proto_input inputs[PROTO_TENSORS];
} proto_call;

/* Replaces err->member, a JSON pointer into the problem, by a pointer into the body that the client sent. Call this for
 * errors that are found after proto_parser_finish(). A second call changes nothing. */
void proto_call_locate(const proto_call *call, attn_error *err);

/* Returns the tile size for attn_counter_open(); NULL: the request wants no counts of tiles. */
static inline const int64_t *proto_tile(const proto_item *item)
{
    return item->counts >> PROTO_COUNT_tiles & 1 ? item->tile_size : NULL;
}

/* Returns whether the problem's keys lie in caches of the server. */
static inline bool proto_uses_caches(proto_op op, const proto_item *item)
{
    return proto_operations[op].takes_caches || (proto_operations[op].may_take_caches && item->caches);
}

/* Sets the format of the answer. Returns ATTN_INVALID if the format can hold only one problem's results and the body
 * has several. */
attn_status proto_call_answer_as(proto_call *call, const proto_format *format, attn_error *err);
/* Returns whether the answer has the tensors of this problem as arrays of numbers. */
bool proto_writes_numbers(const proto_call *call, const proto_item *item);

/* Returns tensor `number` of the answer, which may be a gradient of a part (partial result) of a merge. Returns NULL if
 * the answer has no such tensor. The caller provides the memory for the tensor's values. */
attn_tensor *proto_item_result(proto_item *item, int number);

/* Returns a bound on the tensor numbers of this answer: proto_item_result() returns NULL for this number and all larger
 * ones. */
int proto_item_results_end(const proto_item *item);

/* Returns the arguments of attn_merge() for a merge request, with pointers into `item`. */
attn_merge_problem proto_item_merge(const proto_item *item);

/* Sets dtype, rank, shape and strides of every tensor in item->outputs. Returns INVALID if an output or its dtype does
 * not fit the inputs. */
attn_status proto_item_outputs(proto_item *item, attn_error *err);

/* Checks a problem whose tensors the caller has set (attn_check), and prepares its outputs. proto_parser_finish() has
 * done this already, except for problems with a `context` (saved forward pass) or with caches. */
attn_status proto_item_prepare(proto_item *item, attn_error *err);

typedef struct proto_parser proto_parser;

/* Makes a parser, which copies `limits` and `memory`. NULL: out of memory. */
proto_parser *proto_parser_new(const proto_format *format, proto_op op, const proto_limits *limits,
                               const proto_memory *memory);
/* Gives the parser what the URL and the header fields of a KServe request say, before the first byte of the body. The
 * caller still owns `model`. json_bytes is the value of Inference-Header-Content-Length; -1: not given. */
void proto_parser_kserve(proto_parser *parser, const proto_model *model, int64_t json_bytes);
void proto_parser_free(proto_parser *parser);

/* Takes the next piece of the body, of any size. After an error every further call returns that error. The
 * text of a syntax error names the byte offset in the body. */
attn_status proto_parser_feed(proto_parser *parser, const void *bytes, size_t count, attn_error *err);

/* Returns the operation of the body. For KServe it is known after proto_parser_kserve(). */
proto_op proto_parser_op(const proto_parser *parser);
/* Returns how many bytes that are not tensor data have arrived so far. proto_parser_finish() parses these bytes, in
 * about 12 us for 200 bytes. */
size_t proto_parser_skeleton_bytes(const proto_parser *parser);

/* Returns how many bytes of memory the parser uses now. The result may be too low by a small multiple of
 * PROTO_HEADER_BYTES. */
size_t proto_parser_held_bytes(const proto_parser *parser);

/* Lists the tensors of a complete body that lie in shared memory, inputs first. Before proto_parser_finish() the caller
 * must call proto_parser_shared_room() and copy the bytes of the inputs. An input whose `device` the caller has set is
 * not copied: it stays in the GPU's memory. The parser owns the list. */
attn_status proto_parser_shared(proto_parser *parser, proto_shared **shared, int *count, attn_error *err);
attn_status proto_parser_shared_room(proto_parser *parser, attn_error *err);

/* Returns the sequence that a KServe body names, after proto_parser_finish(). If the body was refused, the result has
 * what could be read. NULL: the format has no sequences. */
const proto_sequence *proto_parser_sequence(const proto_parser *parser);

/* Call this after the last byte of the body. Makes *call, which the caller then owns. */
attn_status proto_parser_finish(proto_parser *parser, proto_call **call, attn_error *err);
void proto_call_free(proto_call *call);

/* ---- Bodies without tensors -------------------------------------------------------------------------------------- */

enum { PROTO_CACHE_HEADS = 1024, PROTO_CACHE_TTL_MOST_S = 7 * 86400 };

/* The body of POST /v1/caches. A number that is 0 was not given. */
typedef struct proto_cache {
    int64_t kv_heads, head_dim, head_dim_v; /* head_dim_v is head_dim if the body does not give it */
    int64_t page_size, ttl_s;
    attn_dtype dtype;
    bool latent;
    float *k_scale; /* an array of kv_heads numbers from malloc(); NULL: not given */
    int k_scales;
    float *v_scale;
    int v_scales;
} proto_cache;

/* Reads the body of POST /v1/caches. After an error there is nothing to clear. */
attn_status proto_cache_read(const void *body, size_t bytes, proto_cache *cache, attn_error *err);
void proto_cache_clear(proto_cache *cache);

/* Reads the body of a request for KServe's index of models: {"ready": true} asks only for models that are ready. An
 * empty body is read as {}. */
attn_status proto_index_read(const void *body, size_t bytes, bool *ready, attn_error *err);

/* Reads {"length": n}. *length is -1 if n is neither given nor required. An empty body is read as {}. */
attn_status proto_length_read(const void *body, size_t bytes, bool required, int64_t *length, attn_error *err);
/* The body that registers a range (region) of shared memory: {"key": "/x", "offset": 0, "byte_size": 64}. `offset` is
 * optional. */
typedef struct proto_region {
    char key[PROTO_REGION_BYTES];
    /* start and length in bytes of the range in the shared memory object; each is at most 2^53 */
    int64_t offset, bytes;
} proto_region;
attn_status proto_region_read(const void *body, size_t bytes, proto_region *region, attn_error *err);
/* The body that registers a part (region) of a GPU's memory: {"raw_handle": {"b64": "..."}, "device_id": 0,
 * "byte_size": 64}. */
typedef struct proto_cuda_region {
    uint8_t handle[ATTN_HANDLE_BYTES];
    int64_t device, bytes; /* device: number of the GPU; bytes: at most 2^53 */
} proto_cuda_region;
attn_status proto_cuda_region_read(const void *body, size_t bytes, proto_cuda_region *region, attn_error *err);

/* ---- Writing answers --------------------------------------------------------------------------------------------- */

/* The stages of a request, in order, as in the header Server-Timing. prepare: the device's thread chooses kernels and
 * allocates memory. launch: the device has copied the inputs but is idle, because its kernels are not on the stream
 * yet; the answer's timing_us counts this time as part of `compute`. */
#define PROTO_STAGE_MAP(X) X(recv) X(decode) X(queue) X(prepare) X(copy_in) X(launch) X(compute) X(copy_out) X(encode)
typedef enum proto_stage {
#define X(name) PROTO_STAGE_##name,
    PROTO_STAGE_MAP(X)
#undef X
        PROTO_STAGE_COUNT
} proto_stage;
extern const char *const proto_stages[PROTO_STAGE_COUNT];

/* how far outputs are from the same outputs computed again in float64 */
typedef struct proto_verification {
    /* max_abs: largest absolute error of out; relative: max_abs divided by the largest |out| */
    double max_abs, relative;
    int64_t rows;
} proto_verification;

/* The result of one problem that had no error. */
typedef struct proto_result {
    char backend[80]; /* device and kernel, such as "cpu avx512" or "cuda:0 sm90" */
    /* duration of each stage in microseconds; set only for the stages from `queue` to `copy_out` */
    double timing_us[PROTO_STAGE_COUNT];
    char context[PROTO_CONTEXT_BYTES]; /* id of the context (saved forward pass) that the problem made; empty: none */
    /* after a decode or append request: the new lengths of the caches; NULL: the request has no caches */
    const int32_t *lengths;
    int length_count;
    bool verified;
    proto_verification verification;
    attn_counts counts;   /* the counts that an observe request asks for; unset for other operations */
    judge_result *report; /* for a check request: the report, which the caller frees with free(); NULL: none */
} proto_result;

typedef struct proto_encoder proto_encoder;

/* Makes an encoder for the answer to `call`, from results[i] and the output tensors of items[i]. The encoder borrows
 * call, results and the tensors' memory until proto_encoder_free(). Numbers of arrays are formatted twice: first to
 * know the length (proto_encoder_measure), then while they are read. `request_id` is for the errors of single problems.
 * If the body has only one problem and it has failed, returns that problem's error. */
attn_status proto_encoder_new(const proto_call *call, const proto_result *results, const char *request_id,
                              proto_encoder **encoder, attn_error *err);
/* Computes the text lengths of at most `elements` more array elements, in about 0.1 to 0.3 us each. Returns true when
 * all elements are measured. */
bool proto_encoder_measure(proto_encoder *encoder, int64_t elements);
/* Returns the length of the answer in bytes. First it measures all arrays that proto_encoder_measure() has not
 * measured. */
uint64_t proto_encoder_length(proto_encoder *encoder);
/* Returns how many bytes of the answer precede the first tensor that is written as raw bytes. If there is no such
 * tensor, returns the length of the answer. */
uint64_t proto_encoder_head_bytes(proto_encoder *encoder);
/* Reads the next bytes of the answer, at most `capacity`. Returns the number of bytes read; 0: the answer has ended. */
size_t proto_encoder_read(proto_encoder *encoder, void *buffer, size_t capacity);
void proto_encoder_free(proto_encoder *encoder);

#endif
