/* kserve_internal.h: what kserve.c, which takes the bytes of a body and writes answers, and kserve_json.c, which reads
 * what the body's JSON says, share; format.h is what others see. */
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

enum { ID_BYTES = 512 /* of a request's id, which is echoed */, JSON_BYTES_UNKNOWN = -1 };

/* One input, in the order of the body. */
struct kserve_input {
    const char *name; /* the tree's: that of its member */
    int lift;
    bool binary;
    bool shared; /* it is the one of `shared` that has its index */
};

struct kserve_reader {
    proto_limits limits;
    const proto_model *model;
    int64_t json_bytes; /* JSON_BYTES_UNKNOWN: all */
    attn_error error;   /* once set, the answer to every call */
    uint64_t offset;    /* bytes of the body so far */
    scan *json;
    int values; /* in it, those of strings of parameters included */
    struct tree_memory trees;
    cJSON *source, *root; /* in there: the body's, and what it became; NULL: the JSON is not complete */

    struct kserve_input *inputs;
    int input_count;
    scan_lift *lifts; /* the scanner's, and behind them those of binary inputs: .bytes have arrived */
    int64_t *sizes;   /* of those that are binary: bytes that must arrive */
    int first_binary, lift_count;
    int now;             /* the first lifted value that is not complete */
    uint64_t body_bytes; /* where the body must end */
    size_t memory_bytes; /* where the last tensor ends, without those in shared memory until they have room */

    proto_shared *shared; /* inputs first */
    int shared_count;
    bool has_room; /* those that are inputs */

    proto_input places[ATTN_TENSOR_COUNT]; /* of the inputs, when all is there */
    char id[ID_BYTES + 1];
    proto_sequence sequence;
    uint64_t binary; /* outputs whose bytes come behind the answer's JSON */
};

/* ---- kserve_json.c ----------------------------------------------------------------------------------------------- */

/* The JSON is complete: its tree becomes that of a JSON body, and each tensor that follows it gets its place. */
attn_status kserve_end_json(struct kserve_reader *r);

/* Places for inputs in shared memory that is copied, behind the others. */
attn_status kserve_place_shared(struct kserve_reader *r);

/* ATTN_TENSOR_COUNT: there is none. */
int kserve_tensor_named(const char *name);

/* NULL: there is none. */
const proto_option *kserve_option_named(const char *name);

#endif
