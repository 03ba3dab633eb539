/* answer.h: functions of several fuzz targets that check answers: an answer must have the same bytes whether it is read
 * at once or in pieces. A wrong answer ends the program. */
#ifndef FUZZ_ANSWER_H
#define FUZZ_ANSWER_H

#include "tests/unit/proto-json/codec.h"

#define must(condition) ((condition) ? (void)0 : broken(__FILE__, __LINE__, #condition))

static inline void broken(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: %s\n", file, line, what);
    abort();
}

/* largest size in bytes of an output that the fuzzer computes, to save time */
enum { OUTPUT_BYTES = 1 << 16 };

/* Gives each output of the problem a place in the memory `outputs`. Returns false if one does not fit. */
static inline bool give_outputs(proto_item *item, uint8_t *outputs)
{
    attn_error err = { 0 };
    bool fits = true;
    const attn_merge_problem merge = item->parts ? proto_item_merge(item) : (attn_merge_problem){ 0 };
    must((item->parts ? attn_merge_check(&merge, &err) : attn_check(&item->problem, &err)) == ATTN_OK);
    must(item->outputs != 0 || item->counts != 0 || item->results != NULL);
    for (int n = 0; n < PROTO_TENSORS; n++) {
        attn_tensor *const t = proto_item_result(item, n);
        int64_t bytes = 0;
        if (!t) continue;
        must(t->rank > 0 && t->data == NULL && attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes));
        fits = fits && bytes <= OUTPUT_BYTES;
        t->data = outputs;
    }
    return fits;
}

/* Returns the answer: `*length` bytes, then a NUL. The caller frees it. *head becomes the number of bytes before the
 * tensors. */
static inline char *answer_of(const proto_call *call, const proto_result *results, uint32_t *seed, size_t *length,
                              size_t *head)
{
    proto_encoder *whole = NULL, *pieces = NULL;
    attn_error err = { 0 };
    must(proto_encoder_new(call, results, "fuzz", &whole, &err) == ATTN_OK);
    must(proto_encoder_new(call, results, "fuzz", &pieces, &err) == ATTN_OK);
    *length = (size_t)proto_encoder_length(whole);
    *head = (size_t)proto_encoder_head_bytes(whole);
    char *a = calloc(1, *length + 1), *b = calloc(1, *length + 1);
    size_t done = 0, count;
    must(a && b && *head <= *length && proto_encoder_read(whole, a, *length + 1) == *length);
    do {
        char block[64];
        size_t room = some_bytes(seed, sizeof block);
        count = proto_encoder_read(pieces, block, room);
        must(count <= room && count <= *length - done);
        memcpy(b + done, block, count);
        done += count;
    } while (count);
    must(done == *length && !memcmp(a, b, *length));
    free(b);
    proto_encoder_free(whole);
    proto_encoder_free(pieces);
    return a;
}

#endif
