/* operations.h: the operations that a body of tensors can request. Each row of proto_operations[] describes one.
 *
 * A row says which inputs its operation takes, which outputs it returns, and what it does. The parser, the server and
 * the OpenAPI document read the rows; none of them compares a proto_op with a constant. The table is constant, and any
 * thread may read it. */
#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "kernels/attention.h"

/* The first operations have the same numbers as in attn_op (forward, backward, ...). */
typedef int proto_op;
enum {
    PROTO_OP_DECODE = ATTN_OP_COUNT, /* a forward whose keys and values are in caches of the server */
    PROTO_OP_APPEND,                 /* adds keys and values to one cache, and computes nothing */
    /* compares results that the client sends with exact ones */
    PROTO_OP_CHECK,
    PROTO_OP_MERGE, /* combines results of the same queries over different keys to one result */
    PROTO_OP_COUNT
};

/* A KServe model: a name that stands for an operation with certain options, for clients that cannot send options. */
typedef struct proto_model {
    const char *name;
    proto_op op;
    bool causal;
    bool fixed; /* true: q must have the dtype `dtype`; false: any dtype */
    attn_dtype dtype;
} proto_model;

/* Largest number of models of one operation: any dtype, float32, float16 and bfloat16, each with and without causal. */
enum { PROTO_MODELS = 8 };

/* The OpenAPI document's text about a tensor in one operation. It replaces the general text in attn_tensors[]. */
typedef struct proto_tensor_doc {
    attn_tensor_id id;
    const char *says; /* NULL ends a list of such entries */
} proto_tensor_doc;

/* One operation. Sets of tensors are bits of attn_tensor_id. All texts are constants. */
typedef struct proto_operation {
    const char *name; /* name in messages, metrics and /v1/info, such as "decode" */
    const char *path; /* path of the URL, such as "/v1/attention/decode" */
    attn_op op;       /* the attn_op that the operation's problems have: forward, backward or observe */

    bool computes;
    /* true: a device combines the tensors in the request's `parts` (attn_merge()) */
    bool merges;
    bool takes_caches;
    /* true: keys and values are in caches only if the request has the member `caches` */
    bool may_take_caches;
    /* true: the URL names the one cache; false: the member `caches` names the caches */
    bool cache_in_path;
    bool envelope; /* true: one body may hold several problems: {"requests": [...]} */

    /* true: the CPU compares results that the client sends with exact ones (kernels/judge/judge.h) */
    bool judges;

    uint64_t takes; /* the tensors that a problem may have as inputs */
    /* Inputs that a problem must have. With the member `context` (a saved forward), only those that a backward adds are
     * needed. */
    uint64_t needs;
    uint64_t appends;
    uint64_t gives;
    /* the client's results that may be compared with exact ones; a problem must have one or more */
    uint64_t judged;
    uint64_t usual; /* the default outputs */
    /* The required member that names the outputs and the counts of PROTO_COUNT_MAP; NULL: the optional member `outputs`
     * names the outputs. */
    const char *asks;
    uint64_t beside_caches; /* inputs that a problem may also have if it has the member `caches` */

    const proto_model *models;
    int model_count; /* number of `models`; 0: KServe does not offer the operation */

    const char *members; /* the required members, in words for a message, such as "q and caches" */
    /* prefix of the names of schemas in the OpenAPI document, such as "Decode" */
    const char *title;
    const char *summary, *description;
    const char *answer;
    /* texts that replace those in attn_tensors[] for this operation; NULL: none */
    const proto_tensor_doc *tensors;
} proto_operation;

extern const proto_operation proto_operations[PROTO_OP_COUNT];

static inline bool proto_takes_tensor(proto_op op, attn_tensor_id id)
{
    return proto_operations[op].takes >> id & 1;
}

static inline bool proto_gives_tensor(proto_op op, attn_tensor_id id)
{
    return proto_operations[op].gives >> id & 1;
}

/* Returns whether the operation has work to do after the checks of the body. */
static inline bool proto_is_run(const proto_operation *operation)
{
    return operation->computes || operation->merges || operation->takes_caches || operation->judges;
}

#endif
