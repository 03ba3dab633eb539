/* encode.h: the functions with which formats write answers. An answer is a list of pieces: text, which lies in one
 * small buffer, and tensors, which stay in their own memory until they are read. */
#ifndef ENCODE_H
#define ENCODE_H

#include "proto.h"
#include "text/text.h"

/* Upper bound on the size in bytes of an error as a JSON document. */
enum { ENCODE_PROBLEM_BYTES = 4096 };

/* Returns the text of the answer, so that the caller can append to it. Text appended before a call of encode_tensor()
 * stands before that tensor. */
struct text *encode_text(proto_encoder *encoder);

typedef enum encode_as { ENCODE_BYTES, ENCODE_BASE64, ENCODE_ARRAY, ENCODE_LIST } encode_as;
/* Adds a tensor to the answer. ENCODE_ARRAY: as an array of numbers, nested by its shape. ENCODE_LIST: as a flat list
 * in which NaN and infinities have no quotes, as KServe's clients expect. The tensor must be C-contiguous. */
void encode_tensor(proto_encoder *encoder, const attn_tensor *tensor, encode_as as);

enum {
    /* Largest number of facts, which are the members of an answer that are not tensors. Any answer may have 8 of them.
     * The report on a client's results (check request) has 8 more, and an observe request (statistics of probabilities)
     * has its counts. */
    ENCODE_FACTS = 8 + 8 + PROTO_COUNTS,
    /* Largest size in bytes of a fact's value as JSON. A fact is a member of an answer that is not a tensor. The
     * longest value is the list of the lengths of PROTO_MAX_CACHES caches. */
    ENCODE_FACT_BYTES = PROTO_MAX_CACHES * 11 + 64,
};
struct encode_fact {
    const char *name;
    char value[ENCODE_FACT_BYTES];
};
/* Collects the facts (members that are not tensors) of an answer as names and JSON values. Returns their number. */
int encode_facts(const proto_item *item, const proto_result *result, struct encode_fact facts[ENCODE_FACTS]);

#endif
