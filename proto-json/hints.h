/* hints.h: hints for a request that is valid, but probably not what its client meant. The request is computed as it is
 * written. The answer's member `hints` says what looks wrong. */
#ifndef HINTS_H
#define HINTS_H

#include "proto.h"
#include "text/text.h"

/* The hints: remarks that an answer makes if a problem is legal, but probably not what the client wants. Each row has
 * an id and a text. The checks cost little. A hint about a member is checked only if the member is given. The check of
 * a tensor ends at the first number that rules the hint out. */
#define PROTO_HINT_MAP(X)                                                                                              \
    X(SCALE_ZERO, "scale is 0, and every key weighs the same; leave scale out for 1/sqrt(D)")                          \
    X(SCALE_SQRT, "scale is sqrt(D), and multiplies the scores; the default is 1/sqrt(D)")                             \
    X(WINDOW_ZERO, "window [0, 0] shows each query one key alone; leave window out for all keys")                      \
    X(MASK_ZERO, "keep_mask is 0 everywhere, and hides every key; 1 is where a query may attend")                      \
    X(MASK_INVERTED, "keep_mask is 1 only where j > i, which a causal mask hides; 1 is where a query may attend")      \
    X(BIAS_OF_BITS, "bias holds only 0 and 1, and is added to the scores; a mask of 0 and 1 is keep_mask")             \
    X(FEW_QUERIES, "there are more heads than queries and keys; layout is bhsd if the tensors are [B, H, S, D]; this " \
                   "hint is not given where layout is named")

/* Returns the hints for a problem that has passed attn_check(): one bit for each row of PROTO_HINT_MAP. */
unsigned hints_of(const proto_item *item);

/* Writes the hints as a JSON array of strings. */
void hints_put(struct text *t, unsigned hints);

#endif
