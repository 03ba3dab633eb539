/* encode.h: what formats write answers with. An answer is a list of pieces: text, which lies in one small buffer, and
 * tensors, of which only the address is kept until they are read. */
#ifndef ENCODE_H
#define ENCODE_H

#include "proto.h"
#include "text/text.h"

enum { ENCODE_PROBLEM_BYTES = 4096 }; /* of a problem document, at most; of facts, twice over */

/* The text of the answer. What has been written since the last tensor goes before the next one. */
struct text *encode_text(proto_encoder *encoder);

/* The tensor comes here: its bytes as they are, in base64, as an array of numbers, nested as its shape says, or as a
 * flat list in which what is not finite has no quotes, as KServe's clients read it. Outputs are C-contiguous. */
typedef enum encode_as { ENCODE_BYTES, ENCODE_BASE64, ENCODE_ARRAY, ENCODE_LIST } encode_as;
void encode_tensor(proto_encoder *encoder, const attn_tensor *tensor, encode_as as);

/* What an answer says beside its tensors, in order: names, and values as JSON. Returns how many. */
enum {
    ENCODE_FACTS = 8,
    ENCODE_FACT_BYTES = PROTO_MAX_CACHES * 11 + 64, /* the lengths of so many caches */
};
struct encode_fact {
    const char *name;
    char value[ENCODE_FACT_BYTES];
};
int encode_facts(const proto_item *item, const proto_result *result, struct encode_fact facts[ENCODE_FACTS]);

#endif
