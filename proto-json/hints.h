/* hints.h: a request that is valid, and most likely not what was meant, is computed as it is written, and its answer
 * says what looks wrong: `hints`, a list of sentences. The table is PROTO_HINT_MAP. */
#ifndef HINTS_H
#define HINTS_H

#include "proto.h"
#include "text.h"

/* Each is rare in right requests, costs nothing where its member is not given, and ends at the first number that speaks
 * against it. */
#define PROTO_HINT_MAP(X)                                                                                              \
    X(SCALE_ZERO, "scale is 0, and every key weighs the same; leave scale out for 1/sqrt(D)")                          \
    X(SCALE_SQRT, "scale is sqrt(D), and multiplies the scores; the default is 1/sqrt(D)")                             \
    X(WINDOW_ZERO, "window [0, 0] shows each query one key alone; leave window out for all keys")                      \
    X(MASK_ZERO, "keep_mask is 0 everywhere, and hides every key; 1 is where a query may attend")                      \
    X(MASK_INVERTED, "keep_mask is 1 only where j > i, which a causal mask hides; 1 is where a query may attend")      \
    X(BIAS_OF_BITS, "bias holds only 0 and 1, and is added to the scores; a mask of 0 and 1 is keep_mask")             \
    X(FEW_QUERIES, "there are more heads than queries and keys; layout is bhsd if the tensors are [B, H, S, D]; this " \
                   "hint goes where layout is named")

/* Bits of what is to be said of a problem that attn_check() has let pass. */
unsigned hints_of(const proto_item *item);

/* Writes them as a JSON array of strings. */
void hints_put(struct text *t, unsigned hints);

#endif
