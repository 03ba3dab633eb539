/* kserve_internal.h: what kserve.c (bytes of bodies, and answers) and kserve_json.c (the JSON of a body) share. */
#ifndef KSERVE_INTERNAL_H
#define KSERVE_INTERNAL_H

#include <cjson/cJSON.h>

#include "format.h"
#include "proto.h"
#include "scan.h"
#include "tree.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

#define JSON_LENGTH "Inference-Header-Content-Length"
#define BINARY_SIZE "binary_data_size"
#define FP8         "fp8"
#define REGION      "shared_memory_region"
#define REGION_AT   "shared_memory_offset"
#define REGION_SIZE "shared_memory_byte_size"

enum { ID_BYTES = 512 /* longest request id in bytes */, JSON_BYTES_UNKNOWN = -1 };

struct kserve_input {
    const char *name;
    int extract;
    bool binary;
    bool shared; /* whether the input is in shared memory (kserve_reader.shared) */
};

struct kserve_reader {
    proto_limits limits;
    const proto_model *model;
    /* number of bytes of JSON at the beginning of the body; JSON_BYTES_UNKNOWN: the whole body is JSON */
    int64_t json_bytes;
    attn_error error; /* the first error of the body, which all later calls return */
    uint64_t offset;
    scan *json;
    int values; /* number of JSON values read so far */
    struct tree_memory trees;
    /* `source` is the parsed JSON of the KServe request. `root` is a JSON body in the server's own format, made from
     * it. Both are NULL until the request's JSON is complete. */
    cJSON *source, *root;

    struct kserve_input *inputs;
    int input_count;
    /* The arrays of numbers in the JSON, and behind them the binary inputs. The member `bytes` of an entry says how
     * many of its bytes have arrived. */
    scan_extract *extracts;
    int64_t *sizes;
    int first_binary, extract_count;
    int now; /* index in `extracts` of the first value whose bytes have not all arrived */
    uint64_t body_bytes;
    /* Offset of the end of the last tensor in the caller's memory. */
    size_t memory_bytes;

    proto_shared *shared; /* the inputs and outputs that lie in memory shared by client and server */
    int shared_count;
    /* whether the caller's memory has room for copies of the inputs that are in shared memory */
    bool has_room;

    proto_input places[PROTO_TENSORS]; /* the position of each tensor among the inputs; set when the body is complete */
    char id[ID_BYTES + 1];
    proto_sequence sequence;
    uint64_t binary; /* set of the outputs whose bytes follow the answer's JSON: one bit for each attn_tensor_id */
    /* For a merge of partial results: set of the gradients whose bytes follow the answer's JSON. Bit n of [0] stands
     * for dout of partial result n, bit n of [1] for its dlse. */
    uint64_t binary_parts[2];
    /* for a merge of partial results: 1 + the index of the last part whose gradient the request asks for; 0: none */
    int gradients;
};

/* ---- Functions that kserve_json.c defines ------------------------------------------------------------------------ */

/* Call this when the JSON of the request is complete. Translates the JSON into the tree of a body in the server's own
 * JSON format. Assigns an address in the caller's memory to each tensor whose bytes follow the JSON. */
attn_status kserve_end_json(struct kserve_reader *r);

/* Assigns an address in the caller's memory, behind all other tensors, to each input that is copied from shared
 * memory. */
attn_status kserve_place_shared(struct kserve_reader *r);

/* Returns the row of proto_options[] for the option `name`; NULL: there is no such option. */
const proto_option *kserve_option_named(const char *name);

#endif
