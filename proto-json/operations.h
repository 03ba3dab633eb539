/* operations.h: the table of operations that a client can request with a body of tensors, such as forward and decode.
 *
 * Each row of proto_operations[] describes one operation: its inputs, its outputs and what it does. The parser, the
 * server and the OpenAPI document read the rows. The table is constant, and any thread may read it. */
#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "kernels/attention.h"

/* The number of an operation: a value of attn_op (forward, backward or observe) or one of the following constants. */
typedef int proto_op;
enum {
    PROTO_OP_DECODE = ATTN_OP_COUNT, /* a forward whose keys and values are in KV caches of the server */
    PROTO_OP_APPEND,                 /* adds keys and values to one cache, and computes nothing */
    /* compares a client's results with float64 results that the server computes */
    PROTO_OP_CHECK,
    PROTO_OP_MERGE, /* merges partial results (of the same queries over different keys) into one result */
    PROTO_OP_COUNT
};

/* A KServe model: a name that stands for an operation with certain options, for clients that cannot send options. */
typedef struct proto_model {
    const char *name;
    proto_op op;
    bool causal;
    bool fixed; /* whether q must have the dtype `dtype`; if not, q may have any dtype */
    attn_dtype dtype;
} proto_model;

/* Largest number of models of one operation: any dtype, float32, float16 and bfloat16, each with and without causal. */
enum { PROTO_MODELS = 8 };

/* The OpenAPI document's text about a tensor in one operation. It replaces the general text in attn_tensors[]. */
typedef struct proto_tensor_doc {
    attn_tensor_id id;
    const char *says; /* the text; NULL ends a list of such entries */
} proto_tensor_doc;

/* One operation. A set of tensors has one bit for each attn_tensor_id. All texts are constants. */
typedef struct proto_operation {
    const char *name; /* name in messages, metrics and /v1/info, such as "decode" */
    const char *path; /* path of the URL, such as "/v1/attention/decode" */
    attn_op op;       /* what the kernels compute for this operation: forward, backward or observe */

    bool computes;
    /* whether a device merges the partial results in the request's `parts` (attn_merge()) */
    bool merges;
    bool takes_caches;
    /* whether the member `caches` decides: if a request has it, keys and values are in caches, otherwise in the body */
    bool may_take_caches;
    /* whether the URL names the only cache of a request (true) or the body's member `caches` names the caches
     * (false) */
    bool cache_in_path;
    bool envelope; /* whether one body may hold several problems: {"requests": [...]} */

    /* whether the CPU compares a client's results with float64 results that the server computes
     * (kernels/judge/judge.h) */
    bool judges;

    uint64_t takes; /* set of the tensors that a problem may have as inputs */
    /* Set of the inputs that a problem must have. A problem with the member `context` (a saved forward) needs only
     * those inputs of this set that a backward has and a forward has not. */
    uint64_t needs;
    uint64_t appends;
    uint64_t gives;
    /* set of the client's results that may be compared with exact ones; a problem must have at least one of them */
    uint64_t judged;
    uint64_t usual; /* set of the outputs that an answer has if the request names none */
    /* The name of the required member that lists the outputs and the counts (PROTO_COUNT_MAP) that the client wants.
     * NULL: the optional member `outputs` lists the outputs. */
    const char *asks;
    uint64_t beside_caches; /* set of further inputs that a problem may have if it has the member `caches` */

    const proto_model *models;
    int model_count; /* number of `models`; 0: KServe does not offer the operation */

    const char *members; /* the required members of a request, in words for a message, such as "q and caches" */
    /* prefix of the operation's schema names in the OpenAPI document, such as "Decode" */
    const char *title;
    const char *summary, *description;
    const char *answer;
    /* the OpenAPI document's texts about tensors of this operation, in place of those of attn_tensors[]; NULL: none */
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

/* Returns whether a request of this operation has work to do after its body has been checked. */
static inline bool proto_is_run(const proto_operation *operation)
{
    return operation->computes || operation->merges || operation->takes_caches || operation->judges;
}

#endif
