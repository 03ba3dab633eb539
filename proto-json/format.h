/* format.h: what a format of bodies is: functions that read one and functions that write one. proto.h names the formats
 * (proto_json, proto_safetensors, proto_kserve), decode.c and encode.c call them and do what all have in common. A new
 * format is a file with a `const proto_format` in it.
 *
 *     body -> feed() ... finish() -> a tree of problems, as JSON has them, and lifted values   -> decode.c: every check
 *     results, tensors            -> write(): pieces of text and of tensors (encode.h)         -> encode.c: in blocks
 *
 * So a reader turns names, shapes and options into what a JSON body would have said,
 * and finds nothing but its own faults. */
#ifndef FORMAT_H
#define FORMAT_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "scan.h"

/* What a body has become. */
struct format_body {
    const cJSON *root;      /* the tree of a skeleton (tree.h), the reader's; NULL: out of memory */
    const scan_lift *lifts; /* the reader's */
    int lift_count;
    uint8_t *memory; /* the caller's: where the lifted values are */
    size_t memory_bytes;
    struct scan_room *room; /* the same memory: more may be asked for */
    /* KServe: for the answer (proto_call). The id is the reader's. */
    const proto_model *model;
    const char *id;
    proto_sequence sequence;
    uint64_t binary, shared;
    const proto_input *inputs; /* ATTN_TENSOR_COUNT of them; NULL: none */
};

struct proto_format {
    /* Bodies. `reader` is what open() returned, NULL: out of memory. feed() gives an error for ever once it has given
     * it. finish() is called once, when all has been fed. */
    void *(*open)(const proto_limits *limits, const proto_memory *memory);
    void (*close)(void *reader);                                               /* NULL is fine */
    void (*begin)(void *reader, const proto_model *model, int64_t json_bytes); /* proto_decoder_kserve(); or NULL */
    attn_status (*feed)(void *reader, const void *bytes, size_t count, attn_error *err);
    attn_status (*finish)(void *reader, struct format_body *body, attn_error *err);
    const proto_sequence *(*sequence)(const void *reader); /* proto_decoder_sequence(); NULL: there are none */
    /* proto_decoder_shared(), proto_decoder_shared_room(); NULL: such a body refers to nothing outside of it. */
    attn_status (*shared)(void *reader, proto_shared **shared, int *count, attn_error *err);
    attn_status (*shared_room)(void *reader, attn_error *err);
    size_t (*skeleton_bytes)(const void *reader);
    size_t (*held_bytes)(
        const void *reader); /* proto_decoder_held_bytes(); NULL: a header, PROTO_HEADER_BYTES at most */
    size_t (*memory_for)(uint64_t body_bytes); /* bytes of tensors in a body of this length, without their alignment */
    /* Of a fault in the tree, or found later: err->member becomes a pointer into the body. NULL: it is one already. */
    void (*locate)(const proto_call *call, attn_error *err);

    /* Answers. */
    void (*write)(proto_encoder *encoder, const proto_call *call, const proto_result *results, const char *request_id);
    const char *media; /* content type */
    bool one_problem;  /* an answer has room for that of one alone */
    bool text;         /* tensors are text, as `encoding` says */
};

#endif
