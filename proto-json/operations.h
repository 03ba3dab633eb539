/* operations.h: the operations that a body of tensors can request. Each row of proto_operations[] describes one.
 *
 * A row says which inputs its operation takes, which outputs it returns, and what it does. The parser, the server and
 * the OpenAPI document read the rows; none of them compares a proto_op with a constant. A new operation is a number
 * here, a row in operations.c, and a route; server/README.md has the recipe. The table is constant, and any thread may
 * read it. */
#ifndef OPERATIONS_H
#define OPERATIONS_H

#include "kernels/attention.h"

/* The number of an operation. The first numbers are the same as in attn_op (forward, backward, ...). */
typedef int proto_op;
enum {
    PROTO_OP_DECODE = ATTN_OP_COUNT, /* a forward whose keys and values are in caches of the server */
    PROTO_OP_APPEND,                 /* adds keys and values to one cache, and computes nothing */
    /* a check: compares results that the client sends with exact ones, and says what is wrong with them */
    PROTO_OP_CHECK,
    PROTO_OP_MERGE, /* a merge: results of the same queries over different parts of the keys become one result */
    PROTO_OP_COUNT
};

/* A model of KServe: a name that stands for an operation with certain options, because some clients cannot send
 * options. */
typedef struct proto_model {
    const char *name;
    proto_op op;
    bool causal; /* true: the model sets the option causal */
    bool fixed;  /* true: q must have the dtype `dtype`; false: any dtype */
    attn_dtype dtype;
} proto_model;

/* The largest number of models of one operation: four for dtypes (any, float32, float16, bfloat16), each with and
 * without causal. */
enum { PROTO_MODELS = 8 };

/* The OpenAPI document's text about a tensor in one operation. It replaces the general text in attn_tensors[]. */
typedef struct proto_tensor_doc {
    attn_tensor_id id;
    const char *says; /* the text about the tensor; NULL ends a list of such entries */
} proto_tensor_doc;

/* One operation. Sets of tensors are bits of attn_tensor_id. All texts are constants. */
typedef struct proto_operation {
    const char *name; /* name in messages, in metrics and in /v1/info, such as "decode" */
    const char *path; /* path of the route, such as "/v1/attention/decode" */
    attn_op op;       /* the attn_op that the operation's problems have: forward, backward or observe */

    bool computes; /* true: a device computes the operation's problems */
    /* true: the operation is a merge, so a device merges the tensors in the request's `parts` (attn_merge()); the
     * attn_problem has only the other tensors */
    bool merges;
    bool takes_caches; /* true: keys and values are in caches of the server */
    /* true: keys and values are in caches only if the request has the member `caches`: see proto_uses_caches() */
    bool may_take_caches;
    /* true: the URL's path names the one cache; false: the member `caches` of the request names the caches */
    bool cache_in_path;
    bool envelope; /* true: one body may hold several problems: {"requests": [...]}, which is called an envelope */

    /* true: the CPU compares results that the client sends with exact ones (kernels/judge/judge.h); a device may
     * compute the exact results in float64 */
    bool judges;

    uint64_t takes; /* the tensors that a problem may have as inputs */
    /* Inputs that a problem must have. A problem with the member `context` (a saved forward) needs only those of them
     * that a backward adds (role IN_BACK in ATTN_TENSOR_MAP). */
    uint64_t needs;
    uint64_t appends; /* inputs that are appended to caches of keys and values */
    uint64_t gives;   /* the tensors that the member `outputs` may name */
    /* the inputs in `takes` that are the client's results, to be compared with exact ones; a problem must have one or
     * more */
    uint64_t judged;
    uint64_t usual; /* the outputs of a problem whose request has no member `outputs` */
    /* The required member in which a request of this operation names its outputs; NULL: the optional member `outputs`.
     * The required member may also name counts of PROTO_COUNT_MAP. */
    const char *asks;
    uint64_t beside_caches; /* inputs that a problem may have if the request also has the member `caches` */

    const proto_model *models; /* the KServe models that stand for the operation: an array of model_count entries */
    int model_count;           /* number of `models`; 0: KServe does not offer the operation */

    /* Texts for messages and for the OpenAPI document follow. */
    const char *members; /* the members that a request must have, in words for a message, such as "q and caches" */
    /* prefix of the names of the operation's schemas in the OpenAPI document, such as "Decode" */
    const char *title;
    const char *summary, *description; /* texts about the operation's route, for the OpenAPI document */
    const char *answer;                /* for the OpenAPI document: what an answer with status 200 contains */
    /* descriptions of some tensors, which replace the texts in attn_tensors[] for this operation; NULL: none */
    const proto_tensor_doc *tensors;
} proto_operation;

extern const proto_operation proto_operations[PROTO_OP_COUNT];

/* Returns whether this operation takes the tensor as an input. */
static inline bool proto_takes_tensor(proto_op op, attn_tensor_id id)
{
    return proto_operations[op].takes >> id & 1;
}

/* Returns whether `outputs` of this operation may name the tensor. */
static inline bool proto_gives_tensor(proto_op op, attn_tensor_id id)
{
    return proto_operations[op].gives >> id & 1;
}

/* Returns whether the operation has work to do after the checks of the body. If not, the route's handler answers as
 * soon as the checks succeed. */
static inline bool proto_is_run(const proto_operation *operation)
{
    return operation->computes || operation->merges || operation->takes_caches || operation->judges;
}

#endif
