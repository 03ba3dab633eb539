/* encode.h: the functions with which formats write answers. An answer is a list of pieces: text, which lies in one
 * small buffer, and tensors, which stay in their own memory until they are read. */
#ifndef ENCODE_H
#define ENCODE_H

#include "proto.h"
#include "text/text.h"

/* Upper bound on the size in bytes of an error as a JSON document. The members of an answer other than tensors (its
 * facts) take at most twice as much. */
enum { ENCODE_PROBLEM_BYTES = 4096 };

/* Returns the text of the answer, so that the caller can append to it. Text that was appended before a call of
 * encode_tensor() stands before the tensor of that call. */
struct text *encode_text(proto_encoder *encoder);

typedef enum encode_as { ENCODE_BYTES, ENCODE_BASE64, ENCODE_ARRAY, ENCODE_LIST } encode_as;
/* Adds a tensor at this place of the answer. ENCODE_BYTES: as its bytes. ENCODE_BASE64: as base64. ENCODE_ARRAY: as an
 * array of numbers, nested by its shape. ENCODE_LIST: as a flat list in which NaN and infinities have no quotes, as
 * KServe's clients expect. Outputs are C-contiguous. */
void encode_tensor(proto_encoder *encoder, const attn_tensor *tensor, encode_as as);

enum {
    /* largest number of facts (members of an answer that are not tensors): 8 for any answer, 8 for the report of a
     * check, and PROTO_COUNTS for an observe (statistics of probabilities) */
    ENCODE_FACTS = 8 + 8 + PROTO_COUNTS,
    /* room in bytes for the longest value of a fact (a member of an answer that is not a tensor): the lengths of
     * PROTO_MAX_CACHES caches */
    ENCODE_FACT_BYTES = PROTO_MAX_CACHES * 11 + 64,
};
struct encode_fact {
    const char *name;
    char value[ENCODE_FACT_BYTES];
};
/* Collects the facts of an answer (its members that are not tensors): names, and values as JSON, in the order of the
 * answer. Returns the number of facts. */
int encode_facts(const proto_item *item, const proto_result *result, struct encode_fact facts[ENCODE_FACTS]);

#endif
