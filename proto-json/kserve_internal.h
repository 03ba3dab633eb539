/* kserve_internal.h: what the two files of the format proto_kserve share. kserve.c takes the bytes of a body
 * and writes answers; kserve_json.c reads the body's JSON. format.h has the part that other files see. */
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

enum { ID_BYTES = 512 /* bound on a request's id, which the answer repeats */, JSON_BYTES_UNKNOWN = -1 };

/* One input. The list has them in the order of the body. */
struct kserve_input {
    const char *name; /* the name of its member, owned by the tree */
    int extract;
    bool binary;
    bool shared; /* it is the entry of `shared` that has its index */
};

struct kserve_reader {
    proto_limits limits;
    const proto_model *model;
    int64_t json_bytes; /* JSON_BYTES_UNKNOWN: all */
    attn_error error;   /* once set, every call returns it */
    uint64_t offset;    /* bytes of the body so far */
    scan *json;
    int values; /* values in the JSON, with those inside strings of parameters */
    struct tree_memory trees;
    cJSON *source, *root; /* both in `memory`: the body's tree, and the tree made from it; NULL: the JSON is
                           * not complete */

    struct kserve_input *inputs;
    int input_count;
    scan_extract *extracts; /* the scanner's values, and behind them the binary inputs, of which .bytes have arrived */
    int64_t *sizes;         /* for each binary input, the bytes that must arrive */
    int first_binary, extract_count;
    int now;             /* the first extracted value that is not complete */
    uint64_t body_bytes; /* where the body must end */
    size_t memory_bytes; /* where the last tensor ends; tensors in shared memory count once they have room */

    proto_shared *shared; /* inputs first */
    int shared_count;
    bool has_room; /* those that are inputs */

    proto_input places[ATTN_TENSOR_COUNT]; /* places of the inputs, once the body is complete */
    char id[ID_BYTES + 1];
    proto_sequence sequence;
    uint64_t binary; /* outputs whose bytes come behind the answer's JSON */
};

/* ---- kserve_json.c ----------------------------------------------------------------------------------------------- */

/* Call this when the JSON is complete. It makes the tree of a JSON body, and gives each tensor that follows
 * its place. */
attn_status kserve_end_json(struct kserve_reader *r);

/* Gives places, behind all others, to inputs that are copied from shared memory. */
attn_status kserve_place_shared(struct kserve_reader *r);

/* The tensor of this name; ATTN_TENSOR_COUNT: there is none. */
int kserve_tensor_named(const char *name);

/* NULL: there is none. */
const proto_option *kserve_option_named(const char *name);

#endif
