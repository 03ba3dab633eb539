/* encode.h: the functions that formats write answers with. An answer is a list of pieces: text, which lies in
 * one small buffer, and tensors, which stay where they are until they are read. */
#ifndef ENCODE_H
#define ENCODE_H

#include "proto.h"
#include "text/text.h"

enum { ENCODE_PROBLEM_BYTES = 4096 }; /* bound on a problem document, and twice the bound on the facts of an answer */

/* The text of the answer. Text written since the last tensor goes before the next tensor. */
struct text *encode_text(proto_encoder *encoder);

/* Adds a tensor at this place of the answer. ENCODE_BYTES: its bytes as they are. ENCODE_BASE64: base64.
 * ENCODE_ARRAY: an array of numbers, nested by its shape. The fourth way is a flat list in which NaN and
 * infinities have no quotes, as KServe's clients read it. Outputs are C-contiguous. */
typedef enum encode_as { ENCODE_BYTES, ENCODE_BASE64, ENCODE_ARRAY, ENCODE_LIST } encode_as;
void encode_tensor(proto_encoder *encoder, const attn_tensor *tensor, encode_as as);

/* The facts that an answer states beside its tensors, in order: names, with values as JSON. Returns how many
 * there are. */
enum {
    ENCODE_FACTS = 8 + 8,                           /* the second 8 are report_members[] of a check */
    ENCODE_FACT_BYTES = PROTO_MAX_CACHES * 11 + 64, /* the lengths of PROTO_MAX_CACHES caches, and some more */
};
struct encode_fact {
    const char *name;
    char value[ENCODE_FACT_BYTES];
};
int encode_facts(const proto_item *item, const proto_result *result, struct encode_fact facts[ENCODE_FACTS]);

#endif
