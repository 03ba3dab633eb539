/* proto.h: turns bytes into problems and results into bytes, in several formats. It uses no sockets, threads or files.
 *
 * A parser gets the request's body in pieces of any size, as they arrive. It decodes tensor values (base64 strings and
 * arrays of numbers) at once into memory that the caller provides, and never keeps their text. At the end it parses the
 * rest of the body, a few hundred bytes, into a tree, and turns the tree into attn_problems that have passed
 * attn_check(). An encoder knows the length of its answer before the first byte, and produces the answer block by block
 * while it is sent.
 *
 * PROTOCOL.md describes the formats, with examples that a test replays. */
#ifndef PROTO_H
#define PROTO_H

#include "kernels/attention.h"
#include "kernels/judge/judge.h"
#include "operations.h"

/* ---- Errors: one table of all errors that a client can get ------------------------------------------------------- */

/* The errors. Each row: id, HTTP status, code (a stable name), title. The member `detail` of an error is a sentence
 * that is made where the error is found. */
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

/* Returns the error that belongs to a status: ATTN_INVALID gives INVALID_REQUEST, ATTN_BUSY gives QUEUE_FULL, ... */
proto_error proto_error_of(attn_status status);

/* Writes the problem document of an error (RFC 9457, with `code`, `request_id`, `pointer` and `error` as further
 * members) and a NUL, cut to fit. Returns the document's length. `pointer` may be NULL or empty. `prefix`, such as
 * "/requests/3", goes before `pointer` and may be NULL. 4 KiB are always enough. */
size_t proto_error_write(char *buffer, size_t capacity, proto_error error, const char *detail, const char *prefix,
                         const char *pointer, const char *request_id);

/* ---- Names of dtypes --------------------------------------------------------------------------------------------- */

/* The dtypes that are converted while they are decoded. Each row: wire name, safetensors name, KServe name, bytes of an
 * element, resulting dtype. Values must fit the resulting dtype: an int64 must fit int32, and a bool must be 0 or 1.
 * ATTN_DTYPE_MAP has all other dtypes. */
#define PROTO_DTYPE_MAP(X)             \
    X("int64", "I64", "INT64", 8, I32) \
    X("bool", "BOOL", "BOOL", 1, U8)

typedef struct proto_dtype {
    const char *name; /* name of the dtype in a JSON body */
    attn_dtype as;    /* dtype of the elements after they are decoded */
    size_t bytes;     /* size in bytes of an element as a client sends it, before base64 */
} proto_dtype;

/* Finds a dtype by any of its three names (JSON, safetensors, KServe), in upper or lower case. */
bool proto_dtype_parse(const char *name, proto_dtype *dtype);
/* proto_dtype_takes() returns whether a tensor of this id may have the dtype. proto_dtype_list() writes the wire names
 * of all dtypes that the tensor may have, such as "int32 or int64", and returns `text`. proto_dtype_judged() returns
 * whether the dtype is allowed for a client's result in a check (which compares it with an exact one). */
bool proto_dtype_takes(attn_tensor_id id, const proto_dtype *dtype);
bool proto_dtype_judged(const proto_dtype *dtype);
enum { PROTO_DTYPE_LIST_BYTES = ATTN_DTYPE_LIST_BYTES + 16 };
const char *proto_dtype_list(attn_tensor_id id, char text[PROTO_DTYPE_LIST_BYTES]);

/* ---- The formats of bodies --------------------------------------------------------------------------------------- */

enum { PROTO_SAFETENSORS_MARK = 9 };
/* Returns whether the bytes, at least PROTO_SAFETENSORS_MARK of them, begin like a safetensors file: with a length
 * below 2^32 in 8 bytes, and '{'. The 8 bytes then contain NULs, which JSON never has. */
bool proto_is_safetensors(const void *bytes, size_t count);

/* A format of bodies and answers. All formats have the same tensors and options (PROTOCOL.md). */
typedef struct proto_format proto_format;
extern const proto_format proto_json, proto_safetensors, proto_kserve;
const char *proto_media(const proto_format *format); /* returns the content type (media type) of the format */

/* Returns the dtype's name as KServe writes it, such as "FP32". */
const char *proto_datatype(attn_dtype dtype);

/* ---- Reading bodies ---------------------------------------------------------------------------------------------- */

typedef struct proto_limits {
    size_t rest_bytes; /* largest number of bytes of a body that are not tensor data */
    int depth;         /* largest depth of nested arrays and objects in the body */
    int members;       /* largest number of members of one object */
    /* Largest number of values outside tensor data (numbers, strings, arrays, ...). cJSON needs memory for each of
     * these values. */
    int values;
    int batch;            /* largest number of problems in an envelope {"requests": [...]} */
    int64_t tensor_bytes; /* largest size in bytes of all tensors of one body, after decoding */
} proto_limits;

#define PROTO_LIMITS_DEFAULT                                                                 \
    {                                                                                        \
        .rest_bytes = 1 << 20, .depth = 32, .members = 64, .values = 1 << 17, .batch = 1024, \
        .tensor_bytes = INT64_C(1) << 40                                                     \
    }

enum { PROTO_MAX_DEPTH = 64 }; /* upper bound of limits.depth; a larger limit counts as PROTO_MAX_DEPTH */

/* Upper bound on two texts: the header of a safetensors body, and the JSON of a KServe body without its arrays of
 * numbers. If limits.rest_bytes is smaller, it applies instead. This text is parsed by the thread that receives the
 * body, as soon as it is complete, because it says where the following data go. Parsing takes 3 ms at most. 64 tensors
 * with their shapes take 10 KiB of text, and PROTO_MAX_CACHES ids as Python writes them take 46 KiB. */
enum { PROTO_HEADER_BYTES = 64 << 10 };

/* The memory for tensor bytes. grow() provides at least `bytes` in one block at *base, 64-byte aligned, and keeps the
 * old contents; the block may move. Every tensor in the block starts at a multiple of 64 bytes. If grow() returns an
 * error, the old contents stay valid, and the client gets *err unchanged. The parser requests more memory in steps of
 * PROTO_MEMORY_STEP. A grow() that copies should enlarge the block in proportion to its size. */
enum { PROTO_MEMORY_STEP = 4096 };
typedef struct proto_memory {
    attn_status (*grow)(void *context, size_t bytes, void **base, attn_error *err);
    void *context;
} proto_memory;

/* Returns an upper bound on the bytes that a parser requests from grow() for a body of `body_bytes` bytes with at most
 * `tensors` tensors. This is for callers that know Content-Length. Arrays of numbers in JSON may need more: "0," is two
 * bytes of text and up to eight bytes of memory. */
size_t proto_memory_for(const proto_format *format, uint64_t body_bytes, int tensors);

/* Numbers that an observe (statistics of probabilities) can return beside its tensors. Each row: name, description. */
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

/* Numbers of tensors. 0 to ATTN_TENSOR_COUNT - 1 are the problem's tensors, by attn_tensor_id. The next numbers are out
 * and lse of part 0 of a merge, out and lse of part 1, ... In a body these are parts.0.out, parts.0.lse, and so on. In
 * an answer the same numbers are the gradients of the parts: parts.0.dout, parts.0.dlse. */
enum { PROTO_TENSORS = ATTN_TENSOR_COUNT + 2 * ATTN_MERGE_PARTS, PROTO_NAME_BYTES = 24 };

/* Returns the number of the tensor that has this name in a body or, if `result` is true, in an answer. PROTO_TENSORS:
 * no tensor has the name. */
int proto_tensor_named(const char *name, bool result);
/* Writes the name of tensor number `number` into `name` and returns `name`. */
const char *proto_tensor_name(int number, bool result, char name[PROTO_NAME_BYTES]);
/* Returns the attn_tensor_id that says which dtypes and axes tensor `number` has. For parts.3.out, the `out` of a
 * merge's part, it is ATTN_T_out. */
attn_tensor_id proto_tensor_id(int number);

/* The parts of a merge, which joins results over different parts of the keys. */
typedef struct proto_parts {
    int count;
    /* true: the body has a member for each tensor of a merge's part, such as parts.0.out; false: the body has a list
     * `parts` */
    bool named;
    bool has_back; /* true: the client wants the gradients of the partial results that the merge combines */
    /* first out and lse of each of the `count` parts, then the gradients dout and dlse of each part. lse is a natural
     * logarithm; it is -inf in a part without keys. */
    attn_result at[];
} proto_parts;

/* One problem of a body. Its inputs point into the caller's memory. An output that the client wants has a dtype, a
 * rank, a shape and strides, but its data is NULL: the caller provides the memory. */
typedef struct proto_item {
    attn_problem problem;
    attn_dtype result_dtype; /* dtype of the results: out_dtype or grad_dtype; by default q's dtype, or bfloat16 if q
                              * is float8 */
    bool has_result_dtype;   /* true: the body gave out_dtype or grad_dtype */
    /* true: the body gave problem.seed; false: the caller draws a seed for a forward with dropout */
    bool has_seed;
    bool has_layout;  /* true: the body has the member `layout` */
    unsigned hints;   /* what looks wrong in a valid problem, as bits: see hints.h */
    uint64_t outputs; /* the outputs that the answer contains: bits of attn_tensor_id */
    proto_encoding encoding;
    int64_t verify_rows; /* number of rows of out to verify; 0: no rows; PROTO_VERIFY_ALL: all rows */
    /* for a forward: true if the client wants the results kept as a context (saved forward), for one later backward */
    bool save;
    /* For a backward: the id of the context (saved forward) that it uses; empty: none. A backward with a context has
     * only dout and dlse. The caller sets its other tensors, and then has it checked. */
    char context[PROTO_CONTEXT_BYTES];
    /* For a decode: the ids of the caches, one for each row of q. The tensors k and v of the problem are then the keys
     * and values to append. The caller sets the problem's other tensors, and then has it checked. */
    char (*caches)[PROTO_CONTEXT_BYTES];
    int cache_count;
    unsigned counts; /* for an observe (statistics of probabilities): the numbers that the client wants besides
                      * tensors, one bit for each proto_count_id */
    /* for an observe (statistics of probabilities): the size of the tiles to be counted, in queries and in keys; 0: no
     * tiles are counted */
    int64_t tile_size[2];
    int64_t head_dim_v; /* member head_dim_v, the length of a row of V, for the counts flops_forward and
                         * flops_backward; 0: as long as a row of Q and K */
    proto_parts *parts; /* for a merge: the parts (results over different keys), which the proto_call owns; NULL: the
                         * operation is not a merge */
    /* for a merge of parts: lse_base is 1 if the parts' lse are base-2 logarithms (otherwise natural); empty_lse is 1
     * if parts without keys have lse +inf (otherwise -inf) */
    int lse_base, empty_lse;
    attn_tensor *results; /* for a check: the client's results that are compared with exact ones, by attn_tensor_id;
                           * the proto_call owns them */
    attn_op asked;        /* for a check: the member `operation`, which says which operation's results are checked */
    int64_t timeout_ms;   /* value of the member timeout_ms; 0: not given */
    int64_t priority;     /* value of the member priority, where 1 is the most urgent; 0: not given */
    /* the error of the problem; if the status is not ATTN_OK, the problem is not run and has no result */
    attn_error error;
} proto_item;

/* ---- The options: one row for each member of a problem that is not a tensor -------------------------------------
 *
 * parse_options.c has this table, and uses it to read the members. The OpenAPI document is also written from it. A new
 * option is a new row. The members that are tensors have the table attn_tensors[] (kernels/attention.h). */

enum { PROTO_PRIORITY_USUAL = 128 }; /* priority of a problem whose body does not give the member `priority` */

/* The types of a body's members. The comment of each type says how the value is written in JSON, and which C type
 * stores it in proto_item. */
typedef enum proto_type {
    PROTO_TYPE_BOOL,   /* JSON true or false; stored as a bool */
    PROTO_TYPE_NUMBER, /* any JSON number; stored as a double */
    /* an integer literal (no fraction, no exponent, not -0) from minimum to maximum; stored as an int64_t */
    PROTO_TYPE_INTEGER,
    PROTO_TYPE_SEED,   /* an integer literal from 0 to 2^64 - 1, exact; stored as a uint64_t */
    PROTO_TYPE_CHOICE, /* one of the words in `choices`; stored as an enum, whose first value is 0 */
    PROTO_TYPE_PAIR,   /* [integer, integer], each as PROTO_TYPE_INTEGER; stored as two int64_t */
    PROTO_TYPE_DTYPE,  /* name of a dtype of results: float32, float16, bfloat16; stored as an attn_dtype */
    /* an array of names of outputs; stored as a uint64_t with a bit for each attn_tensor_id. For `observe` the array
     * may also have names of PROTO_COUNT_MAP */
    PROTO_TYPE_NAMES,
    PROTO_TYPE_ROWS, /* an integer, or "all"; stored as an int64_t, in which PROTO_VERIFY_ALL stands for "all" */
    /* An array of 1 to PROTO_MAX_CACHES values of PROTO_TYPE_ID. In proto_item it is a char (*)[PROTO_CONTEXT_BYTES],
     * followed by an int with the number of values. */
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
    unsigned ops; /* operations that have this option: bits PROTO_FORWARD, ... */
    /* true: the option may be given together with `context` (a saved forward); all other options are then those of the
     * saved forward */
    bool with_context;
    size_t offset; /* offset in bytes of the option's value in proto_item */
    /* offset in proto_item of a bool that becomes true if the option is given; 0: the option has no such bool */
    size_t given;
    int64_t minimum, maximum;
    /* the words that the value may be, with NULL at the end. For PROTO_TYPE_PAIR: a single text, the form of the pair
     * for messages */
    const char *const *choices;
    const char *otherwise; /* the default value, as JSON; NULL: the default varies, as `help` explains */
    const char *help;
} proto_option;

extern const proto_option proto_options[]; /* a row whose name is NULL ends the table */
/* Returns whether the option may be one of the `parameters` of a KServe request. The options for outputs and encoding
 * may not be parameters, because a KServe request has other places for them. */
bool proto_is_parameter(const proto_option *option);

/* Returns whether a single number may replace this tensor, as if the tensor were an option. */
bool proto_may_be_number(attn_tensor_id id);

/* The text of the error for a tensor in shared memory, if the server or the parser's caller does not offer shared
 * memory. */
#define PROTO_NO_SHARED_MEMORY "shared memory is not offered here, send the bytes as binary data"

/* KServe: a tensor in memory that client and server share. Neither the body nor the answer contains its bytes. */
enum { PROTO_REGION_BYTES = 129 }; /* size in bytes, with the NUL, of the name or key of a region (registered memory) */
typedef struct proto_shared {
    attn_tensor_id id;
    bool output;
    int index;                       /* index of the tensor in the body's list of inputs or of outputs */
    char region[PROTO_REGION_BYTES]; /* the client's name of the registered region of shared memory */
    /* the tensor's range in the registered memory, each number up to 2^53; for an output, `bytes` is the largest size
     * that it may have */
    int64_t offset, bytes;
    bool kernels_only; /* true: only kernels read or write the tensor, so it may stay in a GPU's memory */
    void *to;          /* where the caller must copy the bytes of an input; proto_parser_shared_room() sets it */
    /* Address of the tensor in a GPU's memory. The caller sets this before proto_parser_shared_room(). */
    void *device;
} proto_shared;

/* Returns whether the tensor may be in memory that only a device can read. False: the host checks or converts the
 * tensor's values. */
bool proto_may_lie_on_device(attn_tensor_id id);

/* KServe: a sequence of Triton's protocol. Its keys and values are in a cache of the server. The operation is decode,
 * with sequence_id instead of caches. */
enum { PROTO_SEQUENCE_BYTES = 128 + 1 }; /* Triton accepts sequence ids of 128 bytes; the NUL needs one more byte */
typedef struct proto_sequence {
    char id[PROTO_SEQUENCE_BYTES]; /* the sequence's id as text; empty: the request does not belong to a sequence */
    bool start, end;
} proto_sequence;

/* KServe: the position of a tensor in the body. */
typedef struct proto_input {
    int place;   /* position of the tensor in the body's list of inputs, counted from 1; 0: the tensor is not in the
                  * body */
    bool binary; /* true: the bytes of the tensor follow the JSON */
    bool shared; /* true: the bytes of the tensor are in memory that client and server share */
} proto_input;

/* A decoded body with its problems. The caller owns it and frees it with proto_call_free(). */
typedef struct proto_call {
    proto_op op;
    bool envelope; /* true: the body is {"requests": [...]}, and the answer {"responses": [...]} */
    int count;
    proto_item *items;
    size_t memory_bytes;        /* number of bytes that the tensors take in the caller's memory (proto_memory) */
    const proto_format *answer; /* format of the answer: the body's, unless proto_call_answer_as() was called */
    /* Only KServe uses the members below. */
    const proto_model *model; /* the KServe model that the request names; NULL: the request is not KServe */
    char *id;                 /* the request's id, which the answer repeats; NULL: none */
    uint64_t binary;          /* outputs written as bytes after the JSON: bits of attn_tensor_id */
    /* gradients of a merge's parts that are written as bytes behind the JSON: binary_parts[0] has a bit for each dout,
     * [1] for each dlse */
    uint64_t binary_parts[2];
    uint64_t shared; /* outputs that go into memory that client and server share, and not into the answer: bits of
                      * attn_tensor_id */
    proto_sequence sequence;
    const proto_format *format; /* format of the body */
    proto_input inputs[PROTO_TENSORS];
} proto_call;

/* Call this function for an error that was found after proto_parser_finish(). err->member is a JSON pointer into the
 * problem in its JSON form. The function turns it into a JSON pointer into the body that the client sent. A second call
 * changes nothing. */
void proto_call_locate(const proto_call *call, attn_error *err);

/* Returns the tile size for attn_counter_open(); NULL: the request wants no counts of tiles. */
static inline const int64_t *proto_tile(const proto_item *item)
{
    return item->counts >> PROTO_COUNT_tiles & 1 ? item->tile_size : NULL;
}

/* Returns whether the keys of this problem lie in caches of the server. */
static inline bool proto_uses_caches(proto_op op, const proto_item *item)
{
    return proto_operations[op].takes_caches || (proto_operations[op].may_take_caches && item->caches);
}

/* Sets the format of the answer. Returns ATTN_INVALID if the body has several problems, but an answer in `format` can
 * hold only one. */
attn_status proto_call_answer_as(proto_call *call, const proto_format *format, attn_error *err);
/* Returns whether the answer has the tensors of this problem as arrays of numbers. */
bool proto_writes_numbers(const proto_call *call, const proto_item *item);

/* Returns tensor `number` of the answer to a problem; NULL: the answer does not have it. The caller provides the memory
 * of all these tensors. For a merge they include the gradients of its parts. */
attn_tensor *proto_item_result(proto_item *item, int number);

/* Returns the end of the range of tensor numbers in this answer: proto_item_result() returns NULL for this number and
 * for all larger ones. */
int proto_item_results_end(const proto_item *item);

/* Returns the merge that a problem with parts asks for. The result points into the item. */
attn_merge_problem proto_item_merge(const proto_item *item);

/* Prepares the outputs of a problem whose inputs are set: dtype, rank, shape and strides of every tensor in
 * item->outputs. Returns INVALID if an output or its dtype does not fit the inputs. */
attn_status proto_item_outputs(proto_item *item, attn_error *err);

/* Checks the problem (attn_check) and prepares its outputs. Call this function for a problem whose tensors you have set
 * yourself. proto_parser_finish() has already done this for every merge, and for every forward or backward without a
 * `context` (saved forward). */
attn_status proto_item_prepare(proto_item *item, attn_error *err);

typedef struct proto_parser proto_parser;

/* Makes a parser. It copies `limits` and `memory`. NULL: out of memory. */
proto_parser *proto_parser_new(const proto_format *format, proto_op op, const proto_limits *limits,
                               const proto_memory *memory);
/* Gives the parser what the URL and the header fields of a KServe request say. Call this before the first byte of the
 * body. The caller still owns `model`. json_bytes is the value of Inference-Header-Content-Length; -1: the request does
 * not have it. */
void proto_parser_kserve(proto_parser *parser, const proto_model *model, int64_t json_bytes);
void proto_parser_free(proto_parser *parser); /* does nothing if `parser` is NULL */

/* Takes the next piece of the body, of any size. After an error every further call returns that error. The
 * text of a syntax error names the byte offset in the body. */
attn_status proto_parser_feed(proto_parser *parser, const void *bytes, size_t count, attn_error *err);

/* Returns the operation of the body, which is known before the body arrives. For KServe it is known after
 * proto_parser_kserve(). */
proto_op proto_parser_op(const proto_parser *parser);
/* Returns how many bytes that are not tensor data have arrived so far. proto_parser_finish() parses these bytes, in
 * about 12 us for 200 bytes. */
size_t proto_parser_skeleton_bytes(const proto_parser *parser);

/* Returns how many bytes of memory the parser uses now. Memory that never exceeds a few PROTO_HEADER_BYTES is not
 * counted. */
size_t proto_parser_held_bytes(const proto_parser *parser);

/* Lists the tensors of a complete body that lie in shared memory. *count becomes the number of these tensors, which is
 * usually 0. Inputs come first. Before proto_parser_finish() the caller must call proto_parser_shared_room() and copy
 * the bytes of the inputs; otherwise the body is refused. If the caller has set `device` of an input, the tensor stays
 * there, gets no room, and is not read by the host. The parser owns the list. */
attn_status proto_parser_shared(proto_parser *parser, proto_shared **shared, int *count, attn_error *err);
attn_status proto_parser_shared_room(proto_parser *parser, attn_error *err);

/* Returns the sequence that a KServe body names. Call this after proto_parser_finish(). If the body was refused, the
 * result has those members of the sequence that could be read. NULL: the body's format has no sequences. */
const proto_sequence *proto_parser_sequence(const proto_parser *parser);

/* Call this function when the body is complete. It makes *call, which the caller then owns. */
attn_status proto_parser_finish(proto_parser *parser, proto_call **call, attn_error *err);
void proto_call_free(proto_call *call);

/* ---- Bodies without tensors -------------------------------------------------------------------------------------- */

enum { PROTO_CACHE_HEADS = 1024, PROTO_CACHE_TTL_MOST_S = 7 * 86400 };

/* The body of POST /v1/caches. A member with the value 0 was not given, unless the member's comment says otherwise. */
typedef struct proto_cache {
    int64_t kv_heads, head_dim, head_dim_v; /* head_dim_v is set to head_dim if the body does not give it */
    int64_t page_size, ttl_s;
    attn_dtype dtype;
    bool latent;
    float *k_scale; /* scales of k: an array of kv_heads numbers from malloc(); NULL: not given */
    int k_scales;
    float *v_scale;
    int v_scales;
} proto_cache;

/* Reads the body of POST /v1/caches. After an error the caller need not call proto_cache_clear(). */
attn_status proto_cache_read(const void *body, size_t bytes, proto_cache *cache, attn_error *err);
void proto_cache_clear(proto_cache *cache);

/* Reads the body of KServe's index of models: {"ready": true} requests only the models that are ready. An empty body is
 * read as {}. */
attn_status proto_index_read(const void *body, size_t bytes, bool *ready, attn_error *err);

/* Reads {"length": n}. *length is -1 if n is neither given nor required. An empty body is read as {}. */
attn_status proto_length_read(const void *body, size_t bytes, bool required, int64_t *length, attn_error *err);
/* The body of a request that registers a range (region) of shared memory (Triton's protocol): {"key": "/x", "offset":
 * 0, "byte_size": 64}. `offset` may be left out. An INVALID error has a pointer into the body. */
typedef struct proto_region {
    char key[PROTO_REGION_BYTES];
    /* offset and length in bytes of the region, in the shared memory object; each is at most 2^53 */
    int64_t offset, bytes;
} proto_region;
attn_status proto_region_read(const void *body, size_t bytes, proto_region *region, attn_error *err);
/* The body that registers a part (region) of a GPU's memory: {"raw_handle": {"b64": "..."}, "device_id": 0,
 * "byte_size": 64}. All members are required. */
typedef struct proto_cuda_region {
    uint8_t handle[ATTN_HANDLE_BYTES];
    int64_t device, bytes; /* device: number of the GPU; bytes: length of the region; both are at most 2^53 */
} proto_cuda_region;
attn_status proto_cuda_region_read(const void *body, size_t bytes, proto_cuda_region *region, attn_error *err);

/* ---- Writing answers --------------------------------------------------------------------------------------------- */

/* The stages of a request, in order, which are also the parts of the header Server-Timing. The answer's member
 * timing_us reports some of them, and counts `launch` as part of `compute`.
 *
 *   prepare   the device's thread chooses kernels and takes memory, until the device begins
 *   launch    the device is idle after its copies, because its kernels are not on the stream yet */
#define PROTO_STAGE_MAP(X) X(recv) X(decode) X(queue) X(prepare) X(copy_in) X(launch) X(compute) X(copy_out) X(encode)
typedef enum proto_stage {
#define X(name) PROTO_STAGE_##name,
    PROTO_STAGE_MAP(X)
#undef X
        PROTO_STAGE_COUNT
} proto_stage;
extern const char *const proto_stages[PROTO_STAGE_COUNT];

/* the result of `verify`: how far outputs are from their recomputation in float64 */
typedef struct proto_verification {
    /* max_abs: largest absolute error of out; relative: max_abs divided by the largest |out| */
    double max_abs, relative;
    int64_t rows;
} proto_verification;

/* The result of one item (problem) that had no error. */
typedef struct proto_result {
    char backend[80];                    /* device and kernel, such as "cpu avx512" or "cuda:0 sm90" */
    double timing_us[PROTO_STAGE_COUNT]; /* microseconds in each stage; only the stages of a device are set */
    char context[PROTO_CONTEXT_BYTES];   /* id of the context (a saved forward) that the problem made; empty: none */
    /* After a decode or an append: the new lengths of the cache_count caches. NULL: the operation has no caches. */
    const int32_t *lengths;
    int length_count;
    bool verified;
    proto_verification verification;
    attn_counts counts;   /* the counts that an observe request (statistics of probabilities) asks for; not set for
                           * other operations */
    judge_result *report; /* for a check of a client's results: the report, which the caller frees with free(); NULL:
                           * there is no report */
} proto_result;

typedef struct proto_encoder proto_encoder;

/* Makes an encoder for the answer to `call`, with status 200 and in the format call->answer. The answer consists of
 * results[i] and the output tensors of items[i]. The encoder borrows call, results and the tensors' memory until
 * proto_encoder_free(). Numbers of arrays are formatted twice, so that their whole text is never in memory: first to
 * know the length (proto_encoder_measure), then while they are read. `request_id` is written into the error of each
 * failed item of an envelope. If the body has a single problem (no envelope) and it has failed, the function returns
 * that problem's error. */
attn_status proto_encoder_new(const proto_call *call, const proto_result *results, const char *request_id,
                              proto_encoder **encoder, attn_error *err);
/* Finds the length of the text of at most `elements` more array elements, which takes about 0.1 to 0.3 us for each.
 * Returns true when all elements are measured. */
bool proto_encoder_measure(proto_encoder *encoder, int64_t elements);
/* returns the length of the answer in bytes, after measuring all parts that were not measured before */
uint64_t proto_encoder_length(proto_encoder *encoder);
/* Returns how many bytes of the answer precede the first tensor that is written as raw bytes. If there is no such
 * tensor, it is the length of the answer. */
uint64_t proto_encoder_head_bytes(proto_encoder *encoder);
/* Reads the next bytes of the answer, at most `capacity`. Returns the number of bytes read; 0: the answer has ended. */
size_t proto_encoder_read(proto_encoder *encoder, void *buffer, size_t capacity);
void proto_encoder_free(proto_encoder *encoder);

#endif
