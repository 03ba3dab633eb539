#include "operations.h"

#include <stddef.h>

#include "kernels/judge/judge.h"

/* Macros for sets of tensors, such as the inputs of a forward. A set has one bit for each tensor of ATTN_TENSOR_MAP. */
#define BIT(name)                       ATTN_TENSOR_BIT(name)
#define IF_IN(name, role, ...)          | (ATTN_ROLE_##role == ATTN_ROLE_IN ? BIT(name) : 0)
#define IF_OUT(name, role, ...)         | (ATTN_ROLE_##role == ATTN_ROLE_OUT ? BIT(name) : 0)
#define IF_IN_BACK(name, role, ...)     | (ATTN_ROLE_##role == ATTN_ROLE_IN_BACK ? BIT(name) : 0)
#define IF_OUT_BACK(name, role, ...)    | (ATTN_ROLE_##role == ATTN_ROLE_OUT_BACK ? BIT(name) : 0)
#define INPUTS                          (UINT64_C(0) ATTN_TENSOR_MAP(IF_IN))
#define OUTPUTS                         (UINT64_C(0) ATTN_TENSOR_MAP(IF_OUT))
#define IF_OUT_OBSERVE(name, role, ...) | (ATTN_ROLE_##role == ATTN_ROLE_OUT_OBSERVE ? BIT(name) : 0)
#define OBSERVED                        (BIT(lse) ATTN_TENSOR_MAP(IF_OUT_OBSERVE))
#define INPUTS_OF_BACKWARD              (INPUTS | OUTPUTS ATTN_TENSOR_MAP(IF_IN_BACK))
#define GRADIENTS                       (UINT64_C(0) ATTN_TENSOR_MAP(IF_OUT_BACK))

/* Two KServe models of an operation for one dtype: one without the causal mask and one with it. */
#define OF_DTYPE(name, op, fixed, dtype)       \
    { name, op, false, fixed, dtype },         \
    {                                          \
        name "_causal", op, true, fixed, dtype \
    }
#define MODELS(name, op)                             \
    (const proto_model[PROTO_MODELS]){               \
        OF_DTYPE(name, op, false, ATTN_F32),         \
        OF_DTYPE(name "_fp32", op, true, ATTN_F32),  \
        OF_DTYPE(name "_fp16", op, true, ATTN_F16),  \
        OF_DTYPE(name "_bf16", op, true, ATTN_BF16), \
    },                                               \
        .model_count = PROTO_MODELS

/* clang-format off */
static const proto_tensor_doc of_decode[] = {
    { ATTN_T_q, "[B, Sq, H, D]; the caches' dtype, of float8_e4m3fn also float32, float16 or bfloat16: queries, a row "
                "for each cache" },
    { ATTN_T_k, "[B, S, Hk, D]; the caches' dtype: keys of S more positions, which each cache gets first" },
    { ATTN_T_v, "[B, S, Hk, Dv]; the caches' dtype: their values; not of latent caches" },
    { ATTN_T_keep_mask, "[1 or B, 1 or H, 1 or Sq, n]; uint8 or bool: of the last n keys of each row, the new ones "
                        "too; 1: may attend; 0: hidden; those before are kept" },
    { 0, NULL },
};

static const proto_tensor_doc of_observe[] = {
    { ATTN_T_q, "[B, Sq, H, D]: queries; beside caches a row for each, in the caches' dtype, of float8_e4m3fn also "
                "float32, float16 or bfloat16" },
    { ATTN_T_lse, "float32 [B, H, Sq]: the natural logarithm of the softmax denominator; as an input the one to use, "
                  "where it is not given it is computed; -inf for a query that sees no key" },
    { 0, NULL },
};

static const proto_tensor_doc of_append[] = {
    { ATTN_T_k, "[S, Hk, D]; the cache's dtype: keys of S more positions" },
    { ATTN_T_v, "[S, Hk, Dv]; the cache's dtype: their values; not of a latent cache" },
    { 0, NULL },
};

static const proto_tensor_doc of_check[] = {
    { ATTN_T_out, "out's shape or another one of as many elements; any float dtype: your result" },
    { ATTN_T_lse, "[B, H, Sq] or another shape of as many elements; any float dtype: your result" },
    { ATTN_T_dq, "q's shape or another one of as many elements; any float dtype: your result" },
    { ATTN_T_dk, "k's shape or another one of as many elements; any float dtype: your result" },
    { ATTN_T_dv, "v's shape or another one of as many elements; any float dtype: your result" },
    { ATTN_T_dsinks, "sinks' shape; any float dtype: your result" },
    { ATTN_T_dbias, "bias's shape; any float dtype: your result" },
    { ATTN_T_dalibi_slopes, "alibi_slopes' shape; any float dtype: your result" },
    { 0, NULL },
};

static const proto_tensor_doc of_merge[] = {
    { ATTN_T_sinks, "[H]; float32: one more part for each head, with this lse and without a value; merged once" },
    { ATTN_T_dout, "the shape of out of a part; float32, float16 or bfloat16: gradient with respect to out; the answer then "
                   "has parts" },
    { ATTN_T_dlse, "the shape of lse of a part; float32: gradient with respect to lse; zeros where not given; needs dout" },
    { ATTN_T_out, "the shape of out of a part; out_dtype, or the dtype of the parts: the whole; 0 where all parts are empty" },
    { ATTN_T_lse, "the shape of lse of a part; float32: natural logarithm; -inf where all parts are empty" },
    { ATTN_T_dsinks, "[H]; float32: gradient with respect to sinks; needs dout" },
    { 0, NULL },
};

const proto_operation proto_operations[PROTO_OP_COUNT] = {
    [ATTN_OP_FORWARD] = {
        "forward", "/v1/attention/forward", ATTN_OP_FORWARD,
        .computes = true, .envelope = true,
        .takes = INPUTS, .needs = BIT(q) | BIT(k) | BIT(v),
        .gives = OUTPUTS, .usual = BIT(out) | BIT(lse),
        .models = MODELS("attention_forward", ATTN_OP_FORWARD),
        .members = "q, k and v", .title = "Forward", .summary = "Exact attention, forward",
        .description =
            "out = softmax(scale q k^T) v and the natural logarithm of the softmax denominator (lse), for one problem "
            "or for a list of independent ones. Shapes must fit each other as the tensors' descriptions say. The same "
            "problem gives the same bits, whoever else is being served.",
        .answer = "The results",
    },
    [ATTN_OP_BACKWARD] = {
        "backward", "/v1/attention/backward", ATTN_OP_BACKWARD,
        .computes = true, .envelope = true,
        .takes = INPUTS_OF_BACKWARD, .needs = BIT(q) | BIT(k) | BIT(v) | BIT(dout),
        .gives = GRADIENTS, .usual = BIT(dq) | BIT(dk) | BIT(dv),
        .models = MODELS("attention_backward", ATTN_OP_BACKWARD),
        .members = "q, k and v", .title = "Backward", .summary = "Exact attention, backward: the gradients",
        .description =
            "The gradients of a loss with respect to q, k and v (and sinks, bias, alibi_slopes), given its gradient "
            "with respect to out. Send forward's inputs again, or the context that a forward with save left here.",
        .answer = "The gradients",
    },
    [ATTN_OP_OBSERVE] = {
        "observe", "/v1/attention/observe", ATTN_OP_OBSERVE,
        .computes = true, .envelope = true, .may_take_caches = true,
        .takes = (INPUTS & ~(BIT(v) | BIT(v_scale))) | BIT(lse), .needs = BIT(q) | BIT(k),
        .beside_caches = BIT(q) | BIT(alibi_slopes) | BIT(keep_mask) | BIT(sinks) | BIT(lse),
        .gives = OBSERVED, .asks = "observe",
        .models = MODELS("attention_observe", ATTN_OP_OBSERVE),
        .members = "q, k and observe", .title = "Observe", .summary = "What attention looks at",
        .description =
            "Maxima, entropies and sums of the probabilities that a forward with these members would use: observe names "
            "what is wanted. v is not sent, nothing of size Sq x Sk is made, and dropout is ignored. With caches and q it "
            "says what a decode step would see, and changes nothing.",
        .answer = "What was asked for", .tensors = of_observe,
    },
    [PROTO_OP_DECODE] = {
        "decode", "/v1/attention/decode", ATTN_OP_FORWARD,
        .computes = true, .takes_caches = true,
        .takes = BIT(q) | BIT(k) | BIT(v) | BIT(alibi_slopes) | BIT(keep_mask) | BIT(sinks), .needs = BIT(q),
        .appends = BIT(k) | BIT(v), .gives = OUTPUTS, .usual = BIT(out) | BIT(lse),
        .models = MODELS("attention_decode", PROTO_OP_DECODE),
        .members = "q and caches", .title = "Decode", .summary = "Exact attention over keys and values that are here",
        .description =
            "Forward, where the keys and values of each row of q are those of a cache. k and v, where given, are "
            "appended first, to all caches or, when anything fails, to none. keep_mask, where given, is about the last "
            "keys of each row.",
        .answer = "The results", .tensors = of_decode,
    },
    [PROTO_OP_APPEND] = {
        "append", "/v1/caches/{id}/append", ATTN_OP_FORWARD,
        .takes_caches = true, .cache_in_path = true,
        .takes = BIT(k) | BIT(v), .needs = BIT(k), .appends = BIT(k) | BIT(v),
        .members = "k and v", .title = "Append", .summary = "Keys and values at the end of a cache",
        .description = "k is [S, Hk, D], v is [S, Hk, Dv]: S positions more, or none.",
        .answer = "They are there", .tensors = of_append,
    },
    [PROTO_OP_CHECK] = {
        "check", "/v1/attention/check", ATTN_OP_FORWARD,
        .judges = true, .envelope = true,
        .takes = INPUTS_OF_BACKWARD | GRADIENTS, .needs = BIT(q) | BIT(k) | BIT(v), .judged = JUDGE_RESULTS,
        .models = MODELS("attention_check", PROTO_OP_CHECK),
        .members = "q, k, v and results", .title = "Check", .summary = "What is wrong with my kernel?",
        .description =
            "The members of forward or backward, and your own results: out, lse or gradients. They are held against "
            "float64. Where they are wrong, the answer says where, and which mistakes explain it.",
        .answer = "The verdict", .tensors = of_check,
    },
    [PROTO_OP_MERGE] = {
        "merge", "/v1/attention/merge", ATTN_OP_FORWARD,
        .merges = true, .envelope = true,
        .takes = BIT(sinks) | BIT(dout) | BIT(dlse), .gives = BIT(out) | BIT(lse) | BIT(dsinks),
        .usual = BIT(out) | BIT(lse),
        .models = (const proto_model[]){ { "attention_merge", PROTO_OP_MERGE, false, false, ATTN_F32 } }, .model_count = 1,
        .members = "parts", .title = "Merge", .summary = "Results over parts of the keys become one",
        .description =
            "Each part is the out and lse of the same queries over a part of the keys. The answer is the result over "
            "all keys: lse = log(sum of exp(lse_p)), out = sum of exp(lse_p - lse) out_p, in float32 and in the order "
            "given. With dout it also has the gradients of each part: a backward of each part that is given them "
            "yields the gradients of the whole.",
        .answer = "The whole, and the gradients of its parts", .tensors = of_merge,
    },
};
/* clang-format on */
