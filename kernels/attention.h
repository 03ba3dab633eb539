/* attention.h: exact attention, forward and backward. The public C API of libattn.a.
 *
 * One call describes a whole problem: an attn_problem holds the tensors (pointer, dtype, shape, strides), the masks
 * and the options. attn_check() says whether the problem is valid, attn_plan_make() chooses the kernel of a device that
 * computes it, and attn_run() computes it. The library has no code for HTTP or JSON. It depends on libc, and on the
 * statically linked CUDA runtime if it is built with CUDA.
 *
 *   attn_device *gpu;   attn_stream *stream;   attn_error err;   size_t bytes;   int done = 0;
 *   attn_device_open("cpu", 0, NULL, &gpu, &err);
 *   attn_stream_open(gpu, &stream, &err);
 *   attn_problem p = ATTN_PROBLEM_INIT;            // forward, scale 1/sqrt(D), no mask
 *   p.q = attn_tensor_make(Q, ATTN_F16, 4, (int64_t[]){B, Sq, H, D});   // ... k, v, out, lse
 *   if (attn_check(&p, &err) == ATTN_OK) attn_forward(stream, &p, NULL, &err);
 *   attn_stream_wait(stream, &err);
 *
 * Sizes: B batch size, H number of query heads, Hk number of key/value heads, Sq number of queries, Sk number of keys,
 * D head size of q and k, Dv head size of v. Query head h reads key/value head h / (H / Hk). kernels/README.md defines
 * the results.
 *
 * Source: FlashAttention-2 (arXiv:2307.08691), Algorithms 1 and 2; FlashMask (arXiv:2410.01359) for
 * mask_startend_rows. */
#ifndef ATTN_ATTENTION_H
#define ATTN_ATTENTION_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Statuses and error messages --------------------------------------------------------------------------------- */

/* The statuses that functions of the library return. Each row: id, meaning. proto-json/errors.c maps each status to an
 * HTTP status. */
#define ATTN_STATUS_MAP(X)                                              \
    X(OK, "success")                                                    \
    X(INVALID, "malformed, or its values disagree")                     \
    X(TOO_LARGE, "over a limit")                                        \
    X(UNSUPPORTED, "valid, but no kernel here computes it")             \
    X(BUSY, "the queue is full, or memory is short: try again later")   \
    X(TIMEOUT, "the deadline passed")                                   \
    X(CANCELLED, "given up before its end: nobody waits for it")        \
    X(NO_MEMORY, "out of memory")                                       \
    X(DEVICE, "the device failed")                                      \
    X(DEVICE_LOST, "the device is gone: only a new process can use it") \
    X(NOT_FOUND, "no such thing, or it has expired")                    \
    X(IN_USE, "another request uses it: try again later")               \
    X(QUOTA, "the caller has used up a share that is its own")          \
    X(FULL, "what is kept for later has no room")                       \
    X(INTERNAL, "a fault of ours")

typedef enum attn_status {
#define X(id, meaning) ATTN_##id,
    ATTN_STATUS_MAP(X)
#undef X
        ATTN_STATUS_COUNT
} attn_status;

/* An error. The client receives its text unchanged.
 *
 *   member  RFC 6901 pointer to the offending member, relative to the problem: "/k/shape/1"; empty if there is none.
 *   text    one sentence: tensor, index, value, rule. */
typedef struct attn_error {
    attn_status status;
    char member[64];
    char text[384];
} attn_error;

/* Fills *err (which may be NULL) and returns `status`, so that a function can report an error in one line:
 *     return attn_fail(err, ATTN_INVALID, "/k/shape/2", "k: shape[2] is %lld, must divide the %lld heads", Hk, H); */
attn_status attn_fail(attn_error *err, attn_status status, const char *member, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

const char *attn_status_name(attn_status status); /* "INVALID" */

/* ---- Tensors: dtypes, shapes and strides ------------------------------------------------------------------------- */

/* The dtypes. Each row: id, name in requests, safetensors name, KServe name, bytes of a number, and 1 for a floating
 * point dtype or 0 for an integer dtype */
#define ATTN_DTYPE_MAP(X)                                   \
    X(F32, "float32", "F32", "FP32", 4, 1)                  \
    X(F16, "float16", "F16", "FP16", 2, 1)                  \
    X(BF16, "bfloat16", "BF16", "BF16", 2, 1)               \
    X(F8E4M3, "float8_e4m3fn", "F8_E4M3", "FP8_E4M3", 1, 1) \
    X(I32, "int32", "I32", "INT32", 4, 0)                   \
    X(U8, "uint8", "U8", "UINT8", 1, 0)

typedef enum attn_dtype {
#define X(id, wire, safetensors, kserve, bytes, floating) ATTN_##id,
    ATTN_DTYPE_MAP(X)
#undef X
        ATTN_DTYPE_COUNT
} attn_dtype;

/* A set of dtypes is an unsigned integer with one bit for each dtype. ATTN_DTYPE_BIT(id) is the bit of dtype `id`.
 * ATTN_DTYPES_BACKWARD is the set of dtypes that q may have in a backward. */
#define ATTN_DTYPE_BIT(id)   (1u << ATTN_##id)
#define ATTN_DTYPES_BACKWARD (ATTN_DTYPE_BIT(F32) | ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16))
/* the set of dtypes that q may have in a forward, or in an observe (statistics of probabilities) */
#define ATTN_DTYPES_FORWARD (ATTN_DTYPES_BACKWARD | ATTN_DTYPE_BIT(F8E4M3))

size_t attn_dtype_bytes(attn_dtype dtype);
const char *attn_dtype_name(attn_dtype dtype); /* the name in requests: "float16" */
/* Finds a dtype by its name in requests, in safetensors or in KServe, in upper or lower case. Returns false if no dtype
 * has this name. */
bool attn_dtype_parse(const char *name, attn_dtype *dtype);
bool attn_dtype_floating(attn_dtype dtype);

enum { ATTN_DTYPE_LIST_BYTES = 80 };
/* Writes the names of a set of dtypes to `text`, as requests spell them: "float32, float16 or bfloat16". Returns
 * `text`. */
const char *attn_dtype_list(unsigned dtypes, char text[ATTN_DTYPE_LIST_BYTES]);

enum { ATTN_MAX_RANK = 4 };

/* The largest D and Dv of every operation. Multi-head latent attention needs D = 576 and Dv = 512. If the kernels of a
 * device support only smaller heads, attn_plan_make() returns UNSUPPORTED. */
enum { ATTN_MAX_HEAD_DIM = 1024 };

/* Upper bound on B * H of one problem. Each head of each sequence costs time and workspace, even if the sequence is
 * empty. */
enum { ATTN_MAX_HEADS = 1 << 20 };

/* A view of memory that belongs to the caller. Strides are in elements; the last axis must have stride 1. Rank 0 means
 * that the tensor is not given. A tensor with a zero in its shape has no elements; its data may be NULL. */
typedef struct attn_tensor {
    void *data;
    attn_dtype dtype;
    int rank;
    int64_t shape[ATTN_MAX_RANK];
    int64_t stride[ATTN_MAX_RANK];
} attn_tensor;

/* Makes a C-contiguous tensor. It does not check whether sizes overflow; attn_check() does. */
attn_tensor attn_tensor_make(void *data, attn_dtype dtype, int rank, const int64_t *shape);

/* Compute the number of elements, and of bytes, of a contiguous tensor of this shape. Both functions return false if
 * the result does not fit in int64_t. */
bool attn_shape_elements(int rank, const int64_t *shape, int64_t *elements);
bool attn_shape_bytes(attn_dtype dtype, int rank, const int64_t *shape, int64_t *bytes);

/* ---- Problems: what one call computes ---------------------------------------------------------------------------- */

/* Rules for the dtype of a tensor. Each row: id of the rule, dtypes that are always allowed, dtypes that are allowed
 * only if q has the same dtype. */
#define ATTN_DTYPE_RULE_MAP(X)                                                   \
    X(INPUT, ATTN_DTYPES_FORWARD, 0)                                             \
    X(KEY, ATTN_DTYPE_BIT(F8E4M3), ATTN_DTYPES_FORWARD)                          \
    X(GRADIENT, ATTN_DTYPE_BIT(F32), ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16)) \
    X(RESULT, ATTN_DTYPES_BACKWARD, 0)                                           \
    X(BIAS, ATTN_DTYPE_BIT(F32), ATTN_DTYPE_BIT(F16) | ATTN_DTYPE_BIT(BF16))     \
    X(F32, ATTN_DTYPE_BIT(F32), 0)                                               \
    X(I32, ATTN_DTYPE_BIT(I32), 0)                                               \
    X(U8, ATTN_DTYPE_BIT(U8), 0)

typedef enum attn_dtype_rule {
#define X(id, always, as_q) ATTN_RULE_##id,
    ATTN_DTYPE_RULE_MAP(X)
#undef X
} attn_dtype_rule;

/* The axes of a tensor. A letter for each axis says which size the axis has:
 *   b batch (packed: sequences)   q queries (packed: total_q)   k keys (packed: total_k)
 *   h heads of q                  g heads of k and v            d head size of q and k
 *   e head size of v              c sequences + 1               m 1, Hk or H (mask_startend_rows)
 *   n bounds of a key (mask_startend_rows)   p pages            s slots of a page
 *   t entries of page_table for a batch row                     y keys that key_mass has (packed: total_k)
 *   w observe.top                 r x queries and keys of observe's region      u v sizes of observe.map
 * The tensor q sets the sizes b, q, h and d; k sets k, g, p and s; v sets e; page_table sets t. In a packed problem,
 * cu_seqlens_q sets b. With page_table, size k is t * s. The shapes of all other tensors must agree with these
 * sizes. */
typedef enum attn_axes_kind {
    ATTN_AXES_FIXED,
    ATTN_AXES_LAYOUT,    /* in layout bhsd, the second and the third axis (1 and 2) are exchanged */
    ATTN_AXES_BROADCAST, /* every axis but the last may have size 1; it is then broadcast (all indices share it) */
    ATTN_AXES_OPTIONAL,  /* the first axis may be missing */
    ATTN_AXES_SPREAD,    /* the first axis may be missing, and every axis may have size 1 */
} attn_axes_kind;

typedef struct attn_axes {
    /* `plain`: letters of the axes in layout bshd; `packed`: letters of the axes in a packed problem, or an empty
     * string if a packed problem cannot have the tensor */
    const char *plain, *packed;
    const char *paged; /* letters of the axes where page_table is given; NULL: page_table does not change the letters */
    attn_axes_kind kind;
    /* Id of the tensor that has the same axes: for a gradient, the id of its input. ATTN_TENSOR_COUNT: the axes are
     * listed in this row itself. */
    int like;
} attn_axes;

#define ATTN_AXES(plain, packed, kind)                           \
    {                                                            \
        plain, packed, NULL, ATTN_AXES_##kind, ATTN_TENSOR_COUNT \
    }
#define ATTN_AXES_OR_PAGED(plain, packed, paged, kind)            \
    {                                                             \
        plain, packed, paged, ATTN_AXES_##kind, ATTN_TENSOR_COUNT \
    }
#define ATTN_LIKE(tensor)                              \
    {                                                  \
        "", "", NULL, ATTN_AXES_FIXED, ATTN_T_##tensor \
    }

/* Every tensor of a problem, in one table: member (its name in C and on the wire), role, dtypes, axes (unpacked and
 * packed), meaning. All code that deals with ranks, dtypes or shapes reads this table: attn_check() and its messages,
 * the outputs, the strides that kernels get, the schemas of the OpenAPI document.
 *
 * Roles: every operation reads tensors of role IN, but an observe (statistics of probabilities) does not read v and
 * v_scale. A forward writes tensors of role OUT; a backward reads these if they are given. A backward also reads
 * tensors of role IN_BACK, and writes tensors of role OUT_BACK. An observe writes tensors of role OUT_OBSERVE, and lse
 * unless the caller gives it. attn_reads() and attn_writes() say what one problem reads and writes.
 *
 * q is [B, Sq, H, D], k [B, Sk, Hk, D], v [B, Sk, Hk, Dv]. Layout bhsd swaps axes 1 and 2 of q k v out and their
 * gradients. A packed problem (cu_seqlens given) has no batch axis and is always bshd: q [total_q, H, D], k [total_k,
 * Hk, D], lse [H, total_q]. lse and dlse are never swapped. A packed problem may also have seqlens_q or seqlens_k:
 * cu_seqlens then say where sequences start, and seqlens say how many of their rows exist. In a packed problem k and v
 * may be [B, Sk, Hk, D]; row b then has the keys of sequence b, as if cu_seqlens_k were [0, Sk, 2 Sk, ...].
 * attn_check() reads the values of index and mask tensors, bias, sinks, alibi_slopes and the scales, which must be in
 * host memory when it is called.
 *
 * k and v have q's dtype. In a forward k and v may instead be float8_e4m3fn (a key/value cache in eight bits). Only
 * tensors of float8_e4m3fn have scales (q_scale, k_scale, v_scale).
 *
 * With page_table (forward, layout bshd) k and v are pools of pages, [pages, page_size, Hk, D or Dv]: key j of row b
 * lies in page page_table[b][j / page_size], slot j % page_size. The strides of k and v are free: the stride of the
 * page axis may be smaller than a page, so pages may overlap. seqlens_k is required. cu_seqlens_q may be given, but not
 * cu_seqlens_k. Sk of the problem is t * page_size, where t is the number of entries of page_table for a row. The
 * number of keys of row b is seqlens_k[b]. Entries of page_table for later keys are not read, and what the slots of
 * later keys contain does not matter. Rows may share pages. */
#define ATTN_TENSOR_MAP(X)                                                                                            \
    X(q, IN, INPUT, ATTN_AXES("bqhd", "qhd", LAYOUT), "queries")                                                      \
    X(k, IN, KEY, ATTN_AXES_OR_PAGED("bkgd", "kgd", "psgd", LAYOUT),                                                  \
      "keys; Hk divides H; beside cu_seqlens_q, without cu_seqlens_k, [B, Sk, Hk, D] too; with page_table [pages, "   \
      "page_size, Hk, D]")                                                                                            \
    X(v, IN, KEY, ATTN_AXES_OR_PAGED("bkge", "kge", "psge", LAYOUT),                                                  \
      "values; as k, [B, Sk, Hk, Dv] or with page_table [pages, page_size, Hk, Dv]")                                  \
    X(alibi_slopes, IN, F32, ATTN_AXES("bh", "bh", OPTIONAL), "adds -slope * abs(i + Sk - Sq - j) after softcap")     \
    X(bias, IN, BIAS, ATTN_AXES("bhqk", "", BROADCAST), "added after softcap; -inf hides a key")                      \
    X(keep_mask, IN, U8, ATTN_AXES("bhqk", "", BROADCAST), "1: may attend; 0: hidden")                                \
    X(sinks, IN, F32, ATTN_AXES("h", "h", FIXED),                                                                     \
      "one more logit a head, without a value: it joins the denominator and lse")                                     \
    X(cu_seqlens_q, IN, I32, ATTN_AXES("c", "c", FIXED), "packed variable lengths: where each sequence of q starts")  \
    X(cu_seqlens_k, IN, I32, ATTN_AXES("c", "c", FIXED), "the same for k and v")                                      \
    X(seqlens_q, IN, I32, ATTN_AXES("b", "b", FIXED),                                                                 \
      "only the first seqlens_q[b] queries of row or sequence b exist; results of the others are 0, lse -inf")        \
    X(seqlens_k, IN, I32, ATTN_AXES("b", "b", FIXED), "only the first seqlens_k[b] keys of row or sequence b exist")  \
    X(page_table, IN, I32, ATTN_AXES("bt", "bt", FIXED),                                                              \
      "k and v are pools of pages: key j of row b lies in page page_table[b][j / page_size], slot j % page_size")     \
    X(mask_startend_rows, IN, I32, ATTN_AXES("bmkn", "", FIXED),                                                      \
      "FlashMask: for each key the query rows hidden from it")                                                        \
    X(q_scale, IN, F32, ATTN_AXES("bg", "bg", SPREAD), "float8: the factor of q")                                     \
    X(k_scale, IN, F32, ATTN_AXES("bg", "bg", SPREAD), "float8: the factor of k")                                     \
    X(v_scale, IN, F32, ATTN_AXES("bg", "bg", SPREAD), "float8: the factor of v")                                     \
    X(out, OUT, RESULT, ATTN_AXES("bqhe", "qhe", LAYOUT), "attention's result; 0 for a query that sees no key")       \
    X(lse, OUT, F32, ATTN_AXES("bhq", "hq", FIXED),                                                                   \
      "natural logarithm of the softmax denominator; -inf for such a query")                                          \
    X(dout, IN_BACK, RESULT, ATTN_LIKE(out), "gradient of the loss with respect to out")                              \
    X(dlse, IN_BACK, F32, ATTN_LIKE(lse), "gradient with respect to lse; zeros where not given")                      \
    X(dq, OUT_BACK, GRADIENT, ATTN_LIKE(q), "gradient with respect to q")                                             \
    X(dk, OUT_BACK, GRADIENT, ATTN_LIKE(k), "gradient with respect to k")                                             \
    X(dv, OUT_BACK, GRADIENT, ATTN_LIKE(v), "gradient with respect to v")                                             \
    X(dsinks, OUT_BACK, F32, ATTN_LIKE(sinks), "gradient with respect to sinks")                                      \
    X(dbias, OUT_BACK, F32, ATTN_LIKE(bias), "gradient with respect to bias, summed over broadcast axes")             \
    X(dalibi_slopes, OUT_BACK, F32, ATTN_LIKE(alibi_slopes), "gradient with respect to alibi_slopes")                 \
    X(row_max, OUT_OBSERVE, F32, ATTN_LIKE(lse), "each query's largest score; -inf for one that sees no key")         \
    X(entropy, OUT_OBSERVE, F32, ATTN_LIKE(lse),                                                                      \
      "entropy of each query's probabilities, the sink's too, in nats; 0 for one that sees no key")                   \
    X(max_logit, OUT_OBSERVE, F32, ATTN_AXES("bh", "bh", FIXED), "the largest row_max of each head")                  \
    X(mean_entropy, OUT_OBSERVE, F32, ATTN_AXES("bh", "bh", FIXED),                                                   \
      "mean entropy of the queries of each head that see a key; 0 where none does")                                   \
    X(key_mass, OUT_OBSERVE, F32, ATTN_AXES_OR_PAGED("bhy", "hy", "bhy", FIXED),                                      \
      "for each key the sum of its probabilities over the last key_mass_rows queries")                                \
    X(top_keys, OUT_OBSERVE, I32, ATTN_AXES("bhqw", "hqw", FIXED),                                                    \
      "for each query the keys of its largest probabilities, of equal ones the lower key first; -1 where there are "  \
      "no more")                                                                                                      \
    X(top_weights, OUT_OBSERVE, F32, ATTN_LIKE(top_keys), "the probabilities of top_keys; 0 where there are no more") \
    X(weights, OUT_OBSERVE, F32, ATTN_AXES("bhrx", "hrx", FIXED), "the probabilities of the region rows, keys")       \
    X(map, OUT_OBSERVE, F32, ATTN_AXES("bhuv", "huv", FIXED),                                                         \
      "the sums of the probabilities in each cell of a grid over the region rows, keys")

typedef enum attn_tensor_id {
#define X(name, role, dtypes, axes, meaning) ATTN_T_##name,
    ATTN_TENSOR_MAP(X)
#undef X
        ATTN_TENSOR_COUNT
} attn_tensor_id;

typedef enum attn_role {
    ATTN_ROLE_IN,
    ATTN_ROLE_OUT,
    ATTN_ROLE_IN_BACK,
    ATTN_ROLE_OUT_BACK,
    ATTN_ROLE_OUT_OBSERVE
} attn_role;

/* The rows of ATTN_TENSOR_MAP as an array, indexed by attn_tensor_id. */
typedef struct attn_tensor_info {
    const char *name;
    attn_role role;
    attn_dtype_rule dtypes;
    attn_axes axes;
    const char *meaning;
} attn_tensor_info;
extern const attn_tensor_info attn_tensors[ATTN_TENSOR_COUNT];

enum { ATTN_SHAPE_BYTES = 96 };
/* attn_tensor_dtypes() returns the set of dtypes that a tensor may have (bits of attn_dtype). attn_tensor_ranks()
 * returns the set of ranks that it may have (bit r: r axes). attn_tensor_shape() writes both sets as text, such as
 * "float32 [H] or [B, H]", to `text` and returns `text`. */
unsigned attn_tensor_dtypes(attn_tensor_id id);
unsigned attn_tensor_ranks(attn_tensor_id id);
const char *attn_tensor_shape(attn_tensor_id id, char text[ATTN_SHAPE_BYTES]);

/* The options that are one number and change every score. The columns are: name of the member (in attn_problem, in
 * attn_geometry and in requests), id of the option's feature bit (attn_features()), smallest and largest value, words
 * for these limits in messages, meaning. The value 0 is also allowed, and turns the option off. score.h defines how an
 * option changes a score. Each row makes the option's members, its feature bit, its check in attn_check() and its entry
 * in the decoder of requests. */
#define ATTN_SCORE_OPTION_MAP(X)                                                          \
    X(softcap, SOFTCAP, FLT_MIN, FLT_MAX, "0 or between 1.18e-38 and 3.4e38 (a float32)", \
      "where positive, s = softcap * tanh(s / softcap) after scale")

/* ATTN_OP_OBSERVE computes statistics of the probabilities P (which keys the queries attend to), but not out */
typedef enum attn_op { ATTN_OP_FORWARD, ATTN_OP_BACKWARD, ATTN_OP_OBSERVE, ATTN_OP_COUNT } attn_op;
const char *attn_op_name(attn_op op); /* "observe" */
typedef enum attn_layout { ATTN_BSHD, ATTN_BHSD } attn_layout;
typedef enum attn_alignment { ATTN_BOTTOM_RIGHT, ATTN_TOP_LEFT } attn_alignment;

/* The largest values that an observe (statistics of probabilities) may ask for: keys per query in `top_keys`, size of
 * each axis of `map`, and number of elements of `weights`. */
enum { ATTN_MAX_TOP = 64, ATTN_MAX_MAP = 1024, ATTN_MAX_WEIGHTS = 1 << 24 };

/* The options of an observe (statistics of probabilities), apart from its output tensors.
 *
 *   rows, keys     the region that the outputs weights and map show: queries rows[0] to rows[1] - 1 and keys keys[0] to
 *                  keys[1] - 1 of each batch row. An end of -1 means the number of queries or keys;
 *                  attn_observe_region() replaces it.
 *   map            size of the output map: number of cells along the queries, and along the keys. Query r lies in cell
 *                  floor((r - rows[0]) map[0] / (rows[1] - rows[0])), and key c in cell
 *                  floor((c - keys[0]) map[1] / (keys[1] - keys[0]))
 *   top            number of keys per query in top_keys
 *   key_mass_rows  number of queries, at the end of each sequence, over which key_mass is a sum; 0: all queries
 *   sequence       in a packed problem, index of the sequence to which the region belongs; -1: none
 *   shown_keys     with page_table: number of keys per row in key_mass and in the default region; 0: as many as the
 *                  row's pages can hold
 *   given_lse      the problem's lse is an input: P_ij = exp(z_ij - lse_i) for every output. An lse whose absolute
 *                  value is 2^24 or more is too coarse for that; lse is then computed from the scores instead. */
typedef struct attn_observe {
    int64_t rows[2], keys[2];
    int64_t map[2], top, key_mass_rows, sequence, shown_keys;
    bool given_lse;
} attn_observe;

/* One attention problem. Zero-initialise it with ATTN_PROBLEM_INIT, then fill in what is given.
 *
 *   s_ij = scale * q_i . k_j          t_ij = softcap > 0 ? softcap * tanh(s_ij / softcap) : s_ij
 *   z_ij = t_ij + bias_ij - slope_h * |i + Sk - Sq - j|,  |z_ij| <= FLT_MAX, -inf where a mask hides (i, j)
 *   lse_i = ln(sum_j exp z_ij + exp sink_h)     out_i = sum_j exp(z_ij - lse_i) M_ij v_j     M: dropout, 1 without
 *
 * An output tensor whose rank is 0 is not computed (out and lse of a forward, each gradient of a backward).
 * A backward gets both out and lse, or neither; in the second case it computes them first.
 *
 * An observe (statistics of the probabilities P_ij = exp(z_ij - lse_i)) reads q, k and all tensors and options that
 * change scores. It has no v, and ignores dropout. If a z_ij is NaN, all outputs of query i are NaN, and its top_keys
 * are -1. */
typedef struct attn_problem {
    attn_op op;
    union {
        struct {
#define X(name, role, dtypes, axes, meaning) attn_tensor name;
            ATTN_TENSOR_MAP(X)
#undef X
        };
        attn_tensor tensor[ATTN_TENSOR_COUNT]; /* all tensors of the problem as an array, indexed by attn_tensor_id */
    };
    attn_layout layout; /* order of the axes of q, k, v, out and their gradients */
    /* Where query i stands among the keys: its position i', from which causal masks and windows count. Bottom right: i'
     * = i + Sk - Sq. Top left: i' = i. */
    attn_alignment alignment;
    bool has_scale; /* whether `scale` is the softmax scale; if not, the softmax scale is 1/sqrt(D) */
    double scale;   /* the softmax scale: any float32; 0 and negative numbers are allowed */
#define X(name, id, least, most, rule, meaning) double name;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    /* Whether keep_mask covers only the last n keys of each row, where n <= Sk is the size of its last axis. All
     * earlier keys are then kept. If false, keep_mask covers all keys. */
    bool keep_mask_at_end;
    bool causal; /* whether query i sees only keys j <= i' (`alignment` says what i' is) */
    /* query i sees only keys i' - left <= j <= i' + right (`alignment` says what i' is); -1: no limit on this side */
    int64_t window_left;
    int64_t window_right;
    /* The probability with which dropout drops each P_ij, in [0, 1). The generator Philox4x32-10 decides which elements
     * are dropped, by `seed` and the position of the element (philox.h). */
    double dropout_p;
    uint64_t seed;
    /* Set by attn_part_of(), so that a part of a problem drops the same elements as the whole problem: for head h of
     * batch row b, dropout draws the random numbers of head index dropout_first + b * dropout_heads + h. If
     * dropout_heads is 0, the problem is not a part, and the head index is b * H + h. */
    int64_t dropout_first, dropout_heads;
    /* Whether a backward must give the same bits each time it runs on one backend. The gradients of a batch row or head
     * then also have the same bits as if this row or head were computed alone. Two backends may still give different
     * bits. */
    bool deterministic;
    attn_observe observe;

    /* Only with page_table; may be NULL. An array int32 [B], in the same kind of memory (host or device) as seqlens_k.
     * The first prefix_keys[b] keys of batch row b lie in the same pages as the first keys of row b - 1, as in forks of
     * one cache. prefix_keys[0] is 0. If several rows share keys, a kernel can use prefix_keys to read these keys only
     * once. prefix_keys do not change the results, and are not a feature (attn_features()). */
    const int32_t *prefix_keys;

    /* Set by attn_queries_of() in a part of a larger problem: the number of queries of the whole problem. 0: the
     * problem is not a part. A kernel that splits keys by the number of queries uses this number. It thus splits the
     * keys of the part as it splits those of the whole problem, so that the results are bitwise equal. */
    int64_t whole_queries;
} attn_problem;

#define ATTN_PROBLEM_INIT                                                                                         \
    {                                                                                                             \
        .window_left = -1, .window_right = -1, .observe = {.rows = { 0, -1 }, .keys = { 0, -1 }, .sequence = -1 } \
    }

/* A part of a problem: some rows of the batch, and some key/value heads with their query heads. attn_part_of() makes a
 * problem of this part, whose tensors are views of the same memory. If the same kernel and variant computes the part
 * and the whole problem, the results of the part are bitwise equal to those of the whole. The exceptions are gradients
 * that are sums over batch or heads (dsinks, gradients of broadcast tensors): they are sums over the part alone. */
typedef struct attn_part {
    int64_t first_batch, batches, first_head, heads; /* first_head and heads count key/value heads */
} attn_part;
attn_problem attn_part_of(const attn_problem *p, const attn_part *part);

/* attn_reads() returns whether computing this problem reads the tensor. attn_writes() returns whether computing it
 * writes the tensor, if the tensor is given. lse is an output of a forward, and of an observe without given_lse. */
bool attn_reads(const attn_problem *p, attn_tensor_id id);
bool attn_writes(const attn_problem *p, attn_tensor_id id);

/* Sizes of a checked problem. In a packed problem B is the number of sequences, and Sq and Sk are total_q and total_k.
 * With page_table Sk is the number of keys that the pages of a row can hold. For the lengths of sequences, see
 * attn_sequence_of() in kernels/tiles.h. */
typedef struct attn_dims {
    int64_t B, H, Hk, Sq, Sk, D, Dv;
    bool packed;
    int64_t total_q,
        /* total_q: number of rows of q in a packed problem; total_k: number of rows of k. With page_table, total_k is
         * an upper bound on the number of keys of all sequences. */
        total_k;
    int64_t pages, page_size; /* number of pages, and of slots in a page, if page_table is given; otherwise 0 */
    int64_t row_k;            /* Sk of a packed problem whose k is [B, Sk, Hk, D]; otherwise 0 */
} attn_dims;

/* Returns the sizes of a problem, from its shapes alone. The ranks of the tensors must be correct. The function does
 * not check that the shapes agree, because attn_check() itself uses it. */
attn_dims attn_dims_of(const attn_problem *p);

/* A tensor's address, and its strides for batch, head and row. In a view v, element (b, h, row, column) has the index
 * b * v.batch + h * v.head + row * v.row + column. What h, row and column mean in each tensor:
 *
 *   q k v out dout dq dk dv       h is the head of that tensor (of k and v: a key/value head), row the query or key,
 *                                 column the channel. In a pool of pages, b is the page and row its slot: see
 *                                 attn_key_at() of tiles.h
 *   lse dlse row_max entropy      row is the query; column is 0
 *   bias keep_mask dbias          row is the query, column the key
 *   mask_startend_rows            h is h / mask_group, row the key, column the bound
 *   sinks alibi_slopes *_scale    row and column are 0
 *   top_keys top_weights          row is the query, column the rank of the key among the query's largest scores
 *   key_mass                      row is 0, column the key (packed: k_start + key)
 *   weights                       row and column count the queries and keys of observe's region; if packed, b is 0
 *   map                           row and column are the cell; if packed, b is 0
 *   max_logit mean_entropy        row and column are 0 */
typedef struct attn_view {
    void *data; /* address of the first element; NULL if the tensor is not given or has no elements */
    attn_dtype dtype;
    int64_t batch, head, row;
} attn_view;

/* A checked problem in the form that kernels read: sizes, options, and each tensor's address and strides for batch,
 * head and row. It is plain data and may be copied to a device. Its pointers are copies of the problem's pointers. */
typedef struct attn_geometry {
    attn_dims dims;
    int64_t group;      /* number of query heads per key/value head, H / Hk: query head h reads key/value head h /
                         * group */
    int64_t mask_group; /* query head h reads head h / mask_group of mask_startend_rows */
    int mask_bounds;    /* size of the last axis of mask_startend_rows: 1, 2 or 4; 0 without that tensor */
    /* Number of columns of a keep_mask that covers only the last keys of each row. -1: keep_mask covers all keys, or is
     * not given. */
    int64_t keep_tail;
    bool causal, top_left;
    /* The window: query i sees the keys i' - left to i' + right, where i' = i + attn_align() is the query's position
     * among the keys (tiles.h). ATTN_UNBOUNDED: no limit on this side. A causal mask sets `right` to 0. */
    int64_t left, right;
    double scale;
#define X(name, id, least, most, rule, meaning) double name;
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    /* data of the tensors cu_seqlens_q, cu_seqlens_k, seqlens_q and seqlens_k; NULL where a tensor is not given */
    const int32_t *cu_q, *cu_k, *seqlens_q, *seqlens_k;
    const int32_t *page_table; /* the tensor page_table, whose row b starts at index b * page_table_row */
    /* copy of attn_problem.prefix_keys; NULL if not given */
    const int32_t *prefix_keys;
    int64_t page_table_row;
    attn_observe observe;
    attn_view view[ATTN_TENSOR_COUNT];
} attn_geometry;

/* Checks the shapes, dtypes, ranks, options, and the values of index tensors and masks, which it reads in host memory.
 * No other function validates problems, and kernels run only problems that attn_check() accepted. Outputs need not be
 * given; a given output must have the correct shape. Errors: INVALID, TOO_LARGE (sizes overflow), UNSUPPORTED (D or Dv
 * above ATTN_MAX_HEAD_DIM). */
attn_status attn_check(const attn_problem *p, attn_error *err);

/* In a checked observe (statistics of probabilities), replaces ends of -1 in `rows` and `keys` by the number of queries
 * or keys. It reads cu_seqlens and seqlens, which must be in host memory. Call it before attn_output(), and before you
 * run a problem whose outputs include weights or map. */
void attn_observe_region(attn_problem *p);

/* Fills *tensor with the shape and dtype of an output (attn_writes()) of a checked problem. The tensor becomes
 * contiguous, and its `data` NULL. result_dtype is the dtype of out in a forward, and of dq, dk and dv in a backward
 * (q's dtype, or float32). top_keys is int32, other outputs are float32. Returns INVALID if an observe lacks an option
 * that the output needs, TOO_LARGE if its `weights` has too many elements, and NOT_FOUND if this problem does not have
 * the output (dsinks without sinks). */
attn_status attn_output(const attn_problem *p, attn_tensor_id id, attn_dtype result_dtype, attn_tensor *tensor,
                        attn_error *err);

/* ---- Features: the tensors and options that a problem uses -------------------------------------------------------
 *
 * Features are the things that a kernel must support to compute a problem: one bit for every tensor that is given or
 * wanted, and for every option in use. The row of a kernel (attn_kernel) names the bits that the kernel supports, and
 * the kernel gets no problem with other bits. A tensor or option that is added to the tables is therefore refused by
 * all kernels whose row does not name it. Kernels with ATTN_ALL_SCORES are the exception: they call the functions of
 * score.h for each score, so they support every option that score.h defines. How keys are stored (pages, float8) is not
 * part of ATTN_ALL_SCORES; every kernel names those bits itself. */

/* One row per option: id, name of the option in requests ("": none), condition under which attn_features() sets the
 * option's bit. The options in ATTN_SCORE_OPTION_MAP are not in this table. */
#define ATTN_OPTION_MAP(X)                                                                   \
    X(CAUSAL, "causal", "causal is set")                                                     \
    X(WINDOW, "window", "the window is bounded to the left, or to the right and not causal") \
    X(KEEP_MASK_AT_END, "keep_mask_at_end", "keep_mask is of the last keys of each row")     \
    X(TOP_LEFT, "alignment", "the first query is aligned with the first key")                \
    X(GROUPED, "", "several query heads read one key/value head")                            \
    X(GAPS, "", "packed sequences have fewer rows (seqlens) than there is room for")         \
    X(SCALE, "", "the scale is 0, negative or beyond 1e-6 to 1e30: no factor of exponents")  \
    X(DROPOUT, "dropout_p", "dropout_p is above 0")                                          \
    X(DETERMINISTIC, "deterministic", "a backward shall have the same bits on every run")    \
    X(KEY_DTYPE, "", "k and v are float8_e4m3fn, q is not")                                  \
    X(OUT_DTYPE, "out_dtype", "out has another dtype than q (bfloat16 where q is float8)")   \
    X(DOUT_DTYPE, "", "dout has another dtype than q")                                       \
    X(GRAD_DTYPE, "grad_dtype", "dq, dk or dv is float32, q is not")

/* Bit numbers in the result of attn_features(): bits 0 to 39 are tensors (by attn_tensor_id), the others are
 * options. */
enum attn_option_bit {
    ATTN_OPTION_FIRST = 39,
#define X(id, wire, meaning) ATTN_OPTION_##id,
    ATTN_OPTION_MAP(X)
#undef X
#define X(name, id, least, most, rule, meaning) ATTN_OPTION_##id,
        ATTN_SCORE_OPTION_MAP(X)
#undef X
            ATTN_OPTION_END
};
#define ATTN_TENSOR_BIT(name) (UINT64_C(1) << ATTN_T_##name)
#define ATTN_OPTION_BIT(id)   (UINT64_C(1) << ATTN_OPTION_##id)
#define ATTN_EVERYTHING       UINT64_MAX
/* the bits of attn_features() that say how keys are stored: in pages, and in a dtype that is not q's */
#define ATTN_KEY_FEATURES (ATTN_TENSOR_BIT(page_table) | ATTN_OPTION_BIT(KEY_DTYPE))
#define ATTN_ALL_SCORES   (ATTN_EVERYTHING & ~ATTN_KEY_FEATURES)

/* The rows of ATTN_OPTION_MAP and ATTN_SCORE_OPTION_MAP as an array. Entry n describes the option whose bit in
 * attn_features() has the number ATTN_OPTION_FIRST + 1 + n. */
typedef struct attn_option_info {
    const char *wire; /* name of the option in requests; "" where requests have no option with this meaning */
    const char *meaning;
} attn_option_info;
extern const attn_option_info attn_options[ATTN_OPTION_END - ATTN_OPTION_FIRST - 1];

/* Returns the features of a checked problem: a bit for each given tensor and each option in use. The function reads
 * shapes, dtypes and options, but no memory of tensors. */
uint64_t attn_features(const attn_problem *p);

/* Returns the number of floating point operations of a problem, as papers on attention count them. A forward has 2 * (D
 * + Dv) operations for each permitted (query, key, head) triple, and a backward has 2.5 times as many. The number of
 * triples that causal, window and lengths permit is exact. Other masks count as if they hid nothing. The function reads
 * only cu_seqlens and seqlens. */
double attn_flops(const attn_problem *p);

/* Returns the number of (query, key, head) triples that causal, window, lengths and FlashMask permit. Other masks count
 * as if they hid nothing. The function reads all of mask_startend_rows, where given. */
double attn_scores(const attn_problem *p);

/* Returns the number of query rows of all heads together, without padding and gaps. It reads cu_seqlens and seqlens. */
int64_t attn_rows_that_exist(const attn_problem *p);

/* Returns whether a checked problem is empty, which means that all requested outputs have 0 elements. attn_run() skips
 * an empty problem, so it needs no workspace, however large its other sizes are. */
bool attn_is_empty(const attn_problem *p);

typedef struct attn_verification {
    /* the largest |got - want|, where `got` is a value of out and `want` the value recomputed in double; infinite where
     * exactly one of the two is finite */
    double max_abs;
    double largest; /* the largest finite |want|, where `want` is a value of out recomputed in double */
    double relative;
    int64_t rows; /* number of rows of out that were compared with rows recomputed in double */
} attn_verification;
/* Verifies `rows` rows of out, evenly spread over batch, heads and queries. If `rows` is -1, it verifies all rows. The
 * function recomputes these rows in double, on one thread, and compares them with the given out. The problem is a
 * checked forward whose out has been computed, with all tensors in host memory. The function needs 8 * Sk * (D + Dv)
 * bytes of memory and 16 MiB more. If B x Sq x H x Dv is 1 x 1024 x 8 x 64, all rows take some 0.2 s on one CPU
 * core. */
attn_status attn_verify(const attn_problem *p, int64_t rows, attn_verification *verification, attn_error *err);

/* Does the work of attn_verify() in steps, for a caller that may stop between two steps. attn_verifier_step() compares
 * one row (up to 64 rows if all rows are compared), or prepares K and V of the next head. It returns true after the
 * last step. attn_verifier_close() may be called after any step, and then reports on the rows compared so far. `p`
 * must stay valid until attn_verifier_close(). */
typedef struct attn_verifier attn_verifier;
attn_status attn_verifier_open(const attn_problem *p, int64_t rows, attn_verifier **verifier, attn_error *err);
bool attn_verifier_step(attn_verifier *verifier);
attn_verification attn_verifier_close(attn_verifier *verifier);

typedef struct attn_counts {
    double pairs, skipped, whole, partial;
    /* ATTN_NO_MEMORY if memory ran out before all tiles were counted, so that the counts are too small */
    attn_status status;
} attn_counts;
typedef struct attn_counter attn_counter;
/* Counts the pairs (query, key, head) that all masks of a checked problem let through. Where `tile` is not NULL, it
 * also counts tiles of tile[0] queries and tile[1] keys, over all heads and rows of the batch: `skipped` tiles have no
 * such pair, in `whole` tiles every pair is let through, and all other tiles are `partial`. Tiles at the ends may be
 * smaller. All counts are exact below 2^53. Masks, lengths and bias are in host memory; q and k are not read. The
 * problem must stay valid until attn_counter_close().
 *
 * attn_counter_step() counts for up to about a millisecond, and returns whether it was the last step. attn_count_work()
 * returns how many keys, tiles or elements of masks the counting visits; each takes about a nanosecond.
 * attn_counter_open() returns TOO_LARGE if this number is above 2^32. */
attn_status attn_counter_open(const attn_problem *p, const int64_t tile[2], attn_counter **counter, attn_error *err);
bool attn_counter_step(attn_counter *counter);
attn_counts attn_counter_close(attn_counter *counter);
double attn_count_work(const attn_problem *p, const int64_t tile[2]);

enum { ATTN_LSE_ROWS = 16, ATTN_LSE_VARIANTS = 12, ATTN_LSE_NUMBERS = ATTN_LSE_VARIANTS + 1 };
/* Checks whether the lse that the caller gave for a backward or an observe fits the problem's scores. At most
 * ATTN_LSE_ROWS rows are summed in double, with at most `multiply_adds` operations. Returns INVALID if the
 * probabilities of a row sum to more than 1. Returns INVALID too if one conversion (base 2, another scale, a mask left
 * out) makes the sum of every row 1; the message then names the conversion. Sums below 1 are valid: k may be a part of
 * the keys, with the lse of all keys. The problem must be checked and have such an lse, with all of its tensors in
 * host memory. */
attn_status attn_check_lse(const attn_problem *p, int64_t multiply_adds, attn_error *err);

/* Three functions do the work of attn_check_lse() in steps, for q and k in a device's memory. attn_lse_choose() picks
 * the rows to check; it reads lse and lengths in host memory. attn_lse_start() (below) computes lse of these rows on
 * the device. attn_lse_judge() decides whether lse is valid. */
typedef struct attn_lse_row {
    int64_t b, h, i; /* the row is query i of query head h in sequence b */
    double lse;      /* lse of the row, as the client sent it (not computed) */
} attn_lse_row;
typedef struct attn_lse_look {
    int count; /* number of rows that attn_lse_choose() picked; the member `row` lists them */
    attn_lse_row row[ATTN_LSE_ROWS];
    /* The results for each row: first the row's lse, once for each variant of the scores, then the size of the row's
     * products. A variant is one way in which the client may have computed the scores: with the problem's options as
     * given, without some of them, or with another scale (verify_lse.h). The size of the products is the mean of
     * sqrt(sum_d (q_d k_d)^2) over the row's keys, weighted by P. */
    double found[ATTN_LSE_ROWS][ATTN_LSE_NUMBERS];
} attn_lse_look;
void attn_lse_choose(const attn_problem *p, int64_t multiply_adds, attn_lse_look *look);
attn_status attn_lse_judge(const attn_problem *p, const attn_lse_look *look, attn_error *err);

/* ---- Devices: opening them, and their memory --------------------------------------------------------------------- */

typedef struct attn_device attn_device;
typedef struct attn_stream attn_stream;

typedef struct attn_device_options {
    int threads; /* number of worker threads of the backend "cpu"; 0: one for each core that the process may use */
    int64_t memory_bytes; /* upper bound on device memory in bytes; 0: a fixed share of the device's memory */
    const char *script;   /* text that tells the backend "fake" which errors to produce (kernels/fake/fake.c) */
} attn_device_options;

typedef struct attn_device_info {
    const char *backend;   /* name of the backend: "cpu", "reference", "cuda", ... */
    int index;             /* number of the device in its backend: 0 for "cuda:0" */
    char name[64];         /* "cuda:0", "cpu" */
    char description[128]; /* text for people: "NVIDIA H200, sm_90, 139 GiB", "16 threads, avx512 amx" */
    double fastest_flops;  /* no kernel of this device computes more operations (attn_flops) per second than this */
    /* no kernel of this device computes more (query, key, head) triples per second than this. */
    double fastest_scores;
    double peak_flops; /* peak rate of the hardware in 16-bit floating point operations per second; 0: not known */
    double peak_bytes; /* peak rate of the device's memory in bytes per second; 0: not known */
    /* text that shows from which figures of the hardware peak_flops and peak_bytes were computed; "" if nothing is
     * known */
    char peak_from[128];
    /* number of units that compute side by side: threads of a CPU, multiprocessors of a GPU; the rates in cost.c hold
     * for one unit */
    int units;
    /* whether kernels compute directly in staging memory (host memory), so that nothing is copied to a device */
    bool unified;
    /* whether kernels marked `in_place` can read staging memory (host memory), though more slowly than device memory */
    bool reads_staging;
    /* number of batches of problems that the device should compute at the same time; on a unified device (one that
     * computes in host memory) each batch has a thread of its own */
    int streams;
    int64_t memory_total, memory_limit, memory_used;
} attn_device_info;

/* Returns the names of the backends in this build, the preferred one first, with NULL at the end. A server uses the
 * devices of "reference" and "paper" only if its option --devices names them. */
const char *const *attn_backends(void);
/* returns whether the devices of this backend are not the host's processor; false for an unknown backend */
bool attn_is_gpu(const char *backend);
/* returns the number of the backend's devices; 0 if the build lacks the backend, or the machine lacks a driver or a
 * device */
int attn_device_count(const char *backend);

/* opens a device, which the caller owns until attn_device_close(); `options` may be NULL */
attn_status attn_device_open(const char *backend, int index, const attn_device_options *options, attn_device **device,
                             attn_error *err);
void attn_device_close(attn_device *device); /* closes the device; does nothing if `device` is NULL */
void attn_device_describe(const attn_device *device, attn_device_info *info);

/* Device memory is where the device computes. Staging memory is host memory that is copied fast to and from the device
 * (for a GPU: pinned). On a unified device (one that computes in host memory) both are plain memory, 64-byte aligned.
 * The functions are thread-safe. The contents of new memory are undefined. */
attn_status attn_device_alloc(attn_device *device, size_t bytes, void **memory, attn_error *err);
void attn_device_free(attn_device *device, void *memory);
attn_status attn_staging_alloc(attn_device *device, size_t bytes, void **memory, attn_error *err);
void attn_staging_free(attn_device *device, void *memory, size_t bytes);

enum { ATTN_HANDLE_BYTES = 64 };
/* Maps memory of this device that another process, the lender, has allocated. The lender gives a handle for this memory
 * (CUDA: a cudaIpcMemHandle_t). *memory becomes the address of the memory in this process, so that problems can use it
 * without a copy. The lender may change the contents at any time, and must not free the memory before this process has
 * released it. A handle that is imported twice may give the same *memory; each import is released once. Errors: INVALID
 * (no valid handle, a handle of this process, memory of another device, or fewer than `bytes` bytes), UNSUPPORTED (the
 * backend cannot import memory), NO_MEMORY, DEVICE_LOST. Import and release are thread-safe and may wait for the
 * driver; a release may wait for all work of the device. Release everything before attn_device_close(). */
attn_status attn_device_import(attn_device *device, const uint8_t handle[ATTN_HANDLE_BYTES], size_t bytes,
                               void **memory, attn_error *err);
void attn_device_release_import(attn_device *device, void *memory);

/* Pins memory of this process (CUDA: cudaHostRegister), so that copies between it and any device are as fast as from
 * staging memory. Pinned pages stay in memory. If they belong to a file that is truncated later, a copy has the old
 * contents. `memory` and `bytes` are multiples of a page. Errors: UNSUPPORTED (the backend cannot pin memory, or the
 * driver refuses), DEVICE_LOST. The function is thread-safe; CUDA's driver takes some 0.1 ms per MiB. Unpin the memory
 * once, before you unmap it and before attn_device_close(). */
attn_status attn_host_pin(attn_device *device, void *memory, size_t bytes, attn_error *err);
void attn_host_unpin(attn_device *device, void *memory);

/* ---- Kernels, and plans (which kernel computes a problem) -------------------------------------------------------- */

/* What one kernel computes. A device tries its kernels in order, and the first that takes a problem computes it. Even
 * if these members allow a problem, the kernel may still refuse it because of its sizes or strides. */
typedef struct attn_kernel {
    const char *name; /* name of the kernel: "avx512", "sm90", "generic" */
    attn_op op;
    uint32_t dtypes;   /* dtypes of q that the kernel supports: a set of ATTN_DTYPE_BIT() bits */
    int head_dim;      /* the largest head sizes D and Dv that the kernel supports */
    uint64_t features; /* features that the kernel supports: bits of attn_features() */
    /* Whether the kernel may read staging memory (host memory), on devices that can read it
     * (attn_device_info.reads_staging). Such a kernel reads each number of its inputs about once, so a copy to device
     * memory would gain nothing. */
    bool in_place;
} attn_kernel;

/* The kernels that a device has, at most ATTN_MOST_KERNELS. attn_device_open() makes this list, and the list never
 * changes. Any thread may read it until the device is closed, so code that plans problems needs no device. */
enum { ATTN_MOST_KERNELS = 32 };
typedef struct attn_capabilities {
    const struct attn_backend *backend;
    /* in order of preference: the first kernel that takes a problem computes it */
    const attn_kernel *kernels[ATTN_MOST_KERNELS];
    int kernel_count;
    /* what attn_plan_make() needs to know of the device, in the backend's own format; the backend owns this memory */
    const void *facts;
    size_t facts_bytes;
} attn_capabilities;
const attn_capabilities *attn_device_capabilities(const attn_device *device);

/* How a device computes one problem: attn_plan_make() chooses the kernel once, and attn_workspace() and attn_run() use
 * the plan. A plan is plain data of about 1.4 KB, and need not be freed. While the plan is used, its problem and the
 * addresses of the problem's tensors must not change, but the elements of the tensors may. attn_plan_move() adapts a
 * plan to other addresses. */
typedef struct attn_plan {
    const attn_problem *problem;
    const attn_capabilities *can; /* capabilities of the device (the list of its kernels); the device owns this
                                   * memory */
    const attn_kernel *kernel;
    uint64_t features; /* features of the problem, as attn_features() returns them */
    /* Bytes of workspace (attn_workspace()) that this problem needs. 0 if the backend computes one workspace size for
     * all problems of an attn_run() together. */
    size_t workspace_bytes;
    const void *variant; /* variant of the kernel that computes the problem; the kernel defines what this points to */
    /* Bit t is set if the address of tensor t (attn_tensor_id) was not a multiple of 16 bytes when the plan was made. A
     * plan for an unaligned tensor may have another kernel than a plan for an aligned one. */
    uint64_t unaligned;
    /* sizes, addresses and strides of the problem; filled in only for backends that need them */
    attn_geometry geometry;
} attn_plan;

/* Chooses a kernel and its parameters for a checked problem. Returns UNSUPPORTED if no kernel of the device computes
 * the problem. */
attn_status attn_plan_make(const attn_capabilities *can, const attn_problem *problem, attn_plan *plan, attn_error *err);

/* Makes a plan for `problem`, which must equal the problem of the plan `made`, except that its tensors may be at other
 * addresses. The function keeps the kernel of `made` if the capabilities and the set of unaligned tensors are the same.
 * Otherwise it chooses a kernel as attn_plan_make() does. */
attn_status attn_plan_move(const attn_capabilities *can, const attn_plan *made, const attn_problem *problem,
                           attn_plan *plan, attn_error *err);

/* ---- Cost: the time that a problem is expected to take (cost.c) -------------------------------------------------- */

/* An estimate of a problem's cost. It uses rates that were measured on one machine per type of device. The real time
 * is usually between a third and three times the estimate.
 *   flops    attn_flops()
 *   bytes    bytes of the tensors, and of the keys and values in pages; a kernel reads or writes at least these
 *   seconds  time on a device that has nothing else to do
 *   worst    the value of `seconds` if the scores of every row exceeded the range of float32
 *   because  the tensor, option or kind of rows that takes more than half of the time, such as "dalibi_slopes"; "" if
 *            there is none, because products of q, k and v or several things share the time */
typedef struct attn_cost {
    double flops, bytes, seconds, worst;
    const char *because;
} attn_cost;

/* Estimates the cost of a checked, planned problem on the device of `info`. Index tensors must be in host memory. The
 * estimate assumes that all scores are within the range of float32 and that FlashMask hides nothing. The call takes
 * some 150 ns. */
attn_cost attn_cost_of(const attn_device_info *info, const attn_plan *plan);

/* Estimates the cost like attn_cost_of(), but more closely, because it reads FlashMask's bounds and numbers in
 * tensors. From a few rows, which the random number `draw` picks, it estimates the share of rows whose scores exceed
 * the range of float32. `readable` names the tensors that this thread may read (bits of attn_tensor_id). The call
 * reads q, k and v at some 10 GB/s, and takes a few milliseconds longer than attn_cost_of(). */
attn_cost attn_cost_closer(const attn_device_info *info, const attn_plan *plan, uint64_t readable, uint64_t draw);

/* Computes how many bytes of workspace (scratch memory on the device) attn_run() needs to compute the `count` plans in
 * one call. */
attn_status attn_workspace(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                           attn_error *err);

/* ---- Streams: a stream runs its work in order, while the caller goes on ------------------------------------------ */

attn_status attn_stream_open(attn_device *device, attn_stream **stream, attn_error *err);
void attn_stream_close(attn_stream *stream);

typedef enum attn_direction { ATTN_TO_DEVICE, ATTN_FROM_DEVICE } attn_direction;

/* Queues a copy. Its buffers belong to the stream until attn_stream_done() or attn_stream_wait() reports that the
 * stream's work is done. Only one thread at a time may use a stream. A unified device (one that computes in host
 * memory) computes inside attn_run(), so several threads may compute at the same time, each on a stream of its own. An
 * error of the copy may be reported by any later call on the stream. */
attn_status attn_copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                      attn_error *err);

/* Rows of equal length at equal distances in memory, for example some of the heads of a tensor. Sizes are in bytes; a
 * pitch is the distance between the beginnings of two rows. */
typedef struct attn_rows {
    void *to;
    const void *from;
    size_t to_pitch, from_pitch, width; /* pitches, and length of a row, in bytes; each pitch is at least `width` */
    size_t count;
} attn_rows;

/* Queues a copy of rows. All requirements of attn_copy() apply. */
attn_status attn_copy_rows(attn_stream *stream, const attn_rows *rows, attn_direction direction, attn_error *err);

/* A piece of device memory to copy within the device, or to clear. Where the device reads staging memory
 * (attn_device_info.reads_staging), source and destination may also be staging memory. */
typedef struct attn_move {
    void *to;
    const void *from; /* source of the copy; NULL: the memory at `to` is cleared */
    size_t bytes;     /* number of bytes to copy or clear; this number and both addresses must be multiples of 4 */
} attn_move;

/* Queues `count` moves, which the device makes in any order. No move may read memory that another move writes. The
 * caller may free `moves` when this function returns. */
attn_status attn_moves(attn_stream *stream, const attn_move *moves, int64_t count, attn_error *err);

/* Queues a copy from the memory of another device of the same backend, `source`, to memory of the stream's device.
 * Before this call, `source` must have done the work that writes the memory at `from`. The memory must stay until the
 * stream is done. Where the two devices cannot reach each other's memory, the driver copies through the host. Errors:
 * CANCELLED if `source` is lost, so that its memory cannot be read (the stream's own device still works); UNSUPPORTED
 * if the backend never has a second device. */
attn_status attn_copy_peer(attn_stream *stream, void *to, const attn_device *source, const void *from, size_t bytes,
                           attn_error *err);

/* Computes `count` planned problems side by side. Pointers in the problems are device memory (index tensors too). The
 * plans must be made for the stream's device, and must stay valid during the call. The bits of each result depend only
 * on its own problem. They do not depend on the other problems or their order, the number of threads or the load.
 * `workspace` may be NULL; the call then allocates one. After an error none of the outputs may be used. */
attn_status attn_run(attn_stream *stream, const attn_plan *plans, int count, void *workspace, attn_error *err);

/* ---- Sums: arrays of float32 numbers (parts) are added up in a fixed order --------------------------------------- */

enum { ATTN_SUM_PARTS = 64 }; /* the largest number of arrays (parts) that one sum adds up */

/* Element n of `to` becomes ((parts[0][n] + parts[1][n]) + parts[2][n]) + ..., added in float32 in this order and
 * rounded once to `dtype`. All pointers are memory of the stream's device. The parts may not overlap `to`. */
typedef struct attn_sum {
    void *to;
    attn_dtype dtype; /* dtype of `to`: float32, float16 or bfloat16 */
    int count;        /* number of parts that are added up, 1 to ATTN_SUM_PARTS */
    int64_t elements;
    const float *parts[ATTN_SUM_PARTS];
} attn_sum;

/* Queues the sum on the stream. The caller may free *sum when this function returns. */
attn_status attn_sum_parts(attn_stream *stream, const attn_sum *sum, attn_error *err);

/* ---- Merging: results over parts of the keys become one result ----------------------------------------------------
 *
 * A merge makes the result over all keys from the results of the same queries over parts of the keys:
 *
 *     lse = log(sum of exp(lse_p))        out = sum of w_p out_p, where w_p = exp(lse_p - lse)
 *
 * The gradients of a loss with respect to the parts follow from those with respect to out and lse:
 *
 *     dout_p = w_p dout                   dlse_p = w_p (dlse + dout . (out_p - out))
 *
 * If the backward of each part is given dout_p and dlse_p, these backwards together yield the gradients of the whole.
 * Everything is computed in float32, part after part in the order given, and each result is rounded once to its dtype.
 *
 *   A part whose lse is -inf is empty: it adds nothing, its out is not read, and its gradients are 0.
 *   Where all parts are empty, out is 0 and lse is -inf.
 *   Where an lse is NaN or +inf, all results of the row are NaN, because the w_p of this part is not a number.
 *   NaN in the out of a part that is not empty makes that number of out NaN, however small w_p is.
 *   Where only one part is not empty, the result equals that part; -0 becomes 0.
 *   A sink is one more part, behind the others. Its lse is sinks[h] and its out is 0. -inf: the head has no sink. */
enum { ATTN_MERGE_PARTS = 64 }; /* the largest number of parts of one merge */

typedef struct attn_result {
    attn_tensor out, lse;
} attn_result;

/* What one attn_merge() computes. Zero-initialise it, then fill in what is given. A tensor of rank 0 is not given, or
 * not wanted.
 *
 * out and dout are [B, Sq, H, Dv], in layout bhsd [B, H, Sq, Dv], and packed [total_q, H, Dv]. Packed tensors are
 * always bshd. The last axis of out and dout has stride 1. lse and dlse are [B, H, Sq], packed [H, total_q]. The outs
 * of all parts have one shape, one set of strides and one dtype (float32, float16 or bfloat16). The gradients of all
 * parts also have one dtype and one set of strides. `whole`, dout and the gradients need not have the dtype and the
 * strides of the parts: each may have any of these three dtypes, and its own strides. lse, dlse, sinks and dsinks are
 * float32; sinks and dsinks are contiguous. Outputs must not overlap inputs. */
typedef struct attn_merge_problem {
    int count; /* number of parts of the merge, 1 to ATTN_MERGE_PARTS */
    attn_layout layout;
    const attn_result *parts; /* an array of `count` results (out and lse), one for each part of the keys */
    attn_tensor sinks;        /* [H] */
    attn_result whole;        /* output: the merged out and lse */
    /* inputs: gradients with respect to whole.out and whole.lse; a dlse that is not given counts as 0 */
    attn_tensor dout, dlse;
    /* output, or NULL if it is not wanted: an array of `count` entries with the gradients with respect to out and lse
     * of each part; requires dout */
    attn_result *gradients;
    attn_tensor dsinks; /* output [H]: gradient with respect to sinks. Requires dout and sinks */
} attn_merge_problem;

/* Checks that shapes, strides and dtypes of a merge agree. The function reads no memory of tensors, so they need not
 * have memory yet. Returns INVALID if they disagree; err->member is then, for example, "/parts/3/lse/shape/1", or
 * "/dout" for a tensor that does not belong to a part. */
attn_status attn_merge_check(const attn_merge_problem *m, attn_error *err);

/* Queues the merge on the stream, as attn_run() queues its problems. All pointers are device memory. *m and its lists
 * may be freed when this returns; the memory of the tensors may be freed when the stream is done. Errors: those of
 * attn_merge_check(), INVALID if a tensor has no memory, CANCELLED on the device "cpu" (attn_stream_heed()). */
attn_status attn_merge(attn_stream *stream, const attn_merge_problem *m, attn_error *err);

/* Estimates the cost of a merge that passed attn_merge_check(). `worst` of this estimate equals its `seconds`. */
attn_cost attn_merge_cost(const attn_device_info *info, const attn_merge_problem *m);

/* Queues the computation of lse for the rows that attn_lse_choose() picked. Call it after the copies of q and k have
 * been queued on the same stream. The tensors of the problem are in device memory. The results go to `found`, device
 * memory of the size of look->found, and the caller copies them to look->found afterwards. Returns UNSUPPORTED on a
 * unified device (one that computes in host memory). */
attn_status attn_lse_start(attn_stream *stream, const attn_problem *p, const attn_lse_look *look, void *found,
                           attn_error *err);

enum { ATTN_NO_MORE_STEPS = -1 };
#define ATTN_EVERY_ROW (INT64_C(1) << 62)
/* Does what attn_run() does, but in pieces, because work that is queued on a GPU's stream cannot be cancelled. *step is
 * 0 at the first call. Each call queues some 25 ms of work and sets *step for the next call, or to ATTN_NO_MORE_STEPS
 * when all work is queued. All calls have the same plans and the same workspace, which must not be NULL and must not be
 * used for anything else until the work is done. A caller that waits for the stream between calls can give up the rest
 * of a long computation within 0.1 s.
 *
 * Rows whose scores exceed the range of float32 take up to a thousand times as long as other rows. In a problem of a
 * few milliseconds attn_run_some() may skip such rows at first, because only the problem's results show whether it has
 * any. When all is queued and the stream is done, attn_stream_left_rows() returns whether rows were skipped since the
 * last call of attn_stream_left_rows(). If so, the outputs are incomplete, and the caller runs the same plans once
 * more, with *step = ATTN_EVERY_ROW at the first call. */
attn_status attn_run_some(attn_stream *stream, const attn_plan *plans, int count, void *workspace, int64_t *step,
                          attn_error *err);
bool attn_stream_left_rows(attn_stream *stream);

/* Sets the cancel flag of this stream (NULL: none). If *cancel is not 0, attn_run() stops: on the CPU between two
 * tiles, on a GPU between two launches. It then returns CANCELLED, and none of the outputs may be used. Any thread may
 * set *cancel at any time with attn_cancel(). The memory at `cancel` must stay valid until the stream gets another
 * flag. */
void attn_stream_heed(attn_stream *stream, const int *cancel);

/* Sets the owner of this stream's work: a pointer that is only compared with other owners, never dereferenced. On a
 * device that computes with this machine's threads, owners that compute at the same time get equal shares of the
 * threads, however many streams each owner has. NULL counts as an owner like any other. Call it from the stream's
 * thread, between two runs. */
void attn_stream_serve(attn_stream *stream, const void *owner);
/* Returns the nanoseconds that all threads together computed on this stream since attn_stream_serve(). On a device that
 * is not unified (a GPU) it returns 0; use attn_stream_elapsed_us() there. Call it from the stream's thread. */
int64_t attn_stream_spent_ns(const attn_stream *stream);
void attn_cancel(int *cancel);

/* Three functions that plan and run one problem: as a forward, as a backward, and as an observe (attn_look()). The
 * problem's own `op` does not matter. */
attn_status attn_forward(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err);
attn_status attn_backward(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err);
attn_status attn_look(attn_stream *stream, const attn_problem *problem, void *workspace, attn_error *err); /* observe */

enum { ATTN_MARKS = 4 };
/* Records a time stamp, called a mark, in slot 0 to ATTN_MARKS - 1 of the stream. It is the moment when all earlier
 * work on the stream is done. */
attn_status attn_stream_mark(attn_stream *stream, int slot, attn_error *err);
/* returns the microseconds between two time stamps of this stream (attn_stream_mark()); the stream's work must
 * be done */
double attn_stream_elapsed_us(attn_stream *stream, int from_slot, int to_slot);

/* Returns the microseconds from a time stamp of one stream (attn_stream_mark()) to a time stamp of another stream of
 * the same device; NaN if the backend cannot measure this time. */
double attn_streams_between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot);

/* does not wait; *done becomes false while the stream still has work, and true when it has none */
attn_status attn_stream_done(attn_stream *stream, bool *done, attn_error *err);
attn_status attn_stream_wait(attn_stream *stream, attn_error *err);

/* attn_stream_note() and attn_stream_noted() detect the end of the work on a stream without a call of the driver, whose
 * lock would block other threads. attn_stream_note() queues a note (a write to host memory) behind all work. It returns
 * UNSUPPORTED if the backend has no notes. attn_stream_noted() returns whether the device has written the note. After
 * an error the device may never write it, so a caller that has polled long enough should call attn_stream_done(). */
attn_status attn_stream_note(attn_stream *stream, attn_error *err);
bool attn_stream_noted(const attn_stream *stream);

/* ---- The truth: a device computes results in float64 --------------------------------------------------------------
 *
 * The truth is a problem's results as the definitions above give them, with every mask and option. Everything is
 * computed in float64, and nothing is rounded to a dtype afterwards: other results can be compared with these.
 *
 *   out  [rows, Dv]        lse  [rows]             of the forward, computed even if a backward is given out and lse
 *   dq   [rows, D]         dk   [key rows, D]      dv  [key rows, Dv]      of a backward
 *
 * Each result is contiguous. Query i of head h and batch row b has row number (b * H + h) * Sq + i. In a packed
 * problem its row number is h * total_q + line, where `line` is the query's index in q. Key rows are numbered in the
 * same way, with Hk and Sk (packed: total_k) in place of H and Sq. For rows past the end of a sequence, lse is -inf
 * and other results are 0. For keys past the end, gradients are 0. If a backward is given out and lse, its gradients
 * are computed from these, as in attn_backward(). There are no results for the gradients of bias, sinks and slopes. */
typedef struct attn_truth {
    double *out, *lse, *dq, *dk, *dv; /* results, in device memory of the caller; NULL: not wanted */
} attn_truth;

typedef struct attn_truth_cost {
    size_t workspace_bytes; /* bytes of device memory that the computation needs in addition to its results */
    double seconds;         /* the expected time on a device that has nothing else to do */
} attn_truth_cost;

/* Returns whether devices with these capabilities can compute the truth (float64 results) of problems. */
bool attn_has_truth(const attn_capabilities *can);

/* Computes how much memory and time the truth (float64 results) of a checked problem takes. Index tensors must be in
 * host memory; no other tensor is read. Errors: UNSUPPORTED where the backend computes no truth (use attn_verify() or
 * the backend "reference"), TOO_LARGE where sizes overflow. Any thread may call it. */
attn_status attn_truth_need(const attn_capabilities *can, const attn_problem *problem, attn_truth_cost *cost,
                            attn_error *err);

/* Queues some 25 ms of the work that computes the truth (float64 results). *step is 0 at the first call; each call sets
 * it for the next, or to ATTN_NO_MORE_STEPS when all work is queued. Pointers in the problem are device memory.
 * Problem, results and workspace are the same at every call, and belong to the stream until it is done; the structs may
 * be freed when this returns. One launch of a kernel is meant to take 20 ms at most. On an H100 it takes longer for a
 * row that sees more than 100,000 keys (25,000 if the problem has options). For dk and dv it takes longer if more than
 * that number of queries see a key, counted over all query heads of its group. Call it from the stream's thread.
 * Errors: UNSUPPORTED, CANCELLED (attn_stream_heed()), INVALID (no workspace), and the errors of the device. */
attn_status attn_truth_some(attn_stream *stream, const attn_problem *problem, const attn_truth *results,
                            void *workspace, int64_t *step, attn_error *err);

/* How far a problem's result is from its truth (the float64 result). max_abs: the largest |result - truth|; largest:
 * the largest finite |truth|. The difference is infinite where exactly one of the two numbers is finite, and 0 where
 * both are NaN or the same infinity. Rows of padding do not count. */
typedef struct attn_truth_distance {
    double max_abs, largest;
} attn_truth_distance;
enum { ATTN_TRUTH_RESULTS = 5 }; /* the number of results that are compared: out, lse, dq, dk and dv */

/* Queues the comparison of the problem's results with `truth` (float64 results), behind the work that computes both.
 * `distances` is device memory for ATTN_TRUTH_RESULTS distances; a distance is 0 for a result that the problem or
 * `truth` lacks. All pointers in the arguments are device memory. The comparison takes as long as reading the results.
 * Call it from the stream's thread. Errors: UNSUPPORTED as in attn_truth_need(), and the errors of the device. */
attn_status attn_truth_compare(attn_stream *stream, const attn_problem *problem, const attn_truth *truth,
                               attn_truth_distance *distances, attn_error *err);

#ifdef __cplusplus
}
#endif
#endif
