/* format.h: the functions of one body format, which read and write bodies. proto.h names the formats (proto_json,
 * proto_safetensors, proto_kserve). parse.c and encode.c call these functions and do what all formats have in common. A
 * new format is a file with a `const proto_format` in it.
 *
 *     body -> feed() ... finish() -> a tree of problems, and the extracted tensor values -> parse.c: all checks
 *     results, tensors            -> write(): pieces of text and of tensors (encode.h)   -> encode.c: blocks
 *
 * A reader (the functions that read a body) turns names, shapes and options into the members of a JSON body. The reader
 * reports only errors of its own format; parse.c reports all others. */
#ifndef FORMAT_H
#define FORMAT_H

#include <cjson/cJSON.h>

#include "proto.h"
#include "scan.h"

struct format_body {
    /* the body's JSON without tensor values, as a tree (tree.h) that the reader owns; NULL: out of memory */
    const cJSON *root;
    /* the tensor values that the reader has extracted from the body; the reader owns this list */
    const scan_extract *extracts;
    int extract_count;
    uint8_t *memory; /* memory for the extracted tensor values; the parser's caller owns it */
    size_t memory_bytes;
    struct scan_room *room;
    /* KServe: the model and the id of the request. The reader owns the id. */
    const proto_model *model;
    const char *id;
    proto_sequence sequence;
    uint64_t binary, shared, binary_parts[2];
    /* for a merge of partial results: 1 + the index of the last part whose gradient the body asks for; 0: none */
    int gradients;
    /* where each input tensor is in the body: an array of PROTO_TENSORS entries; NULL: the format has no positions */
    const proto_input *inputs;
};

struct proto_format {
    /* Functions that read a body. open() returns a reader, or NULL if memory runs out, and the other functions take it
     * as `reader`. After an error every further feed() returns the same error. finish() is called once, after the last
     * feed(). */
    void *(*open)(const proto_limits *limits, const proto_memory *memory);
    void (*close)(void *reader);
    /* implements proto_parser_kserve(); NULL: the format is not KServe */
    void (*begin)(void *reader, const proto_model *model, int64_t json_bytes);
    attn_status (*feed)(void *reader, const void *bytes, size_t count, attn_error *err);
    attn_status (*finish)(void *reader, struct format_body *body, attn_error *err);
    /* implements proto_parser_sequence(); NULL: requests in this format do not belong to sequences of requests */
    const proto_sequence *(*sequence)(const void *reader);
    /* These functions implement proto_parser_shared() and proto_parser_shared_room(). NULL: a body of this format has
     * no tensors in shared memory. */
    attn_status (*shared)(void *reader, proto_shared **shared, int *count, attn_error *err);
    attn_status (*shared_room)(void *reader, attn_error *err);
    size_t (*rest_bytes)(const void *reader);
    /* implements proto_parser_held_bytes(), the memory that the reader holds; NULL: it holds one header of at most
     * PROTO_HEADER_BYTES */
    size_t (*held_bytes)(const void *reader);
    /* returns how many bytes the tensors of a body of `body_bytes` bytes take, without gaps for alignment */
    size_t (*memory_for)(uint64_t body_bytes);
    /* locate() replaces err->member, a JSON pointer into the translated JSON body, by a pointer into the client's body.
     * NULL: both bodies have the same structure. */
    void (*locate)(const proto_call *call, attn_error *err);

    void (*write)(proto_encoder *encoder, const proto_call *call, const proto_result *results, const char *request_id);
    const char *media;
    bool one_problem; /* whether an answer in this format can hold only one problem's results */
    /* whether an answer has tensors as text, in the encoding that the request's member `encoding` names */
    bool text;
};

#endif
