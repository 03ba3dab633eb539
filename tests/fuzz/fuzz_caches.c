/* fuzz_caches.c: fuzz target for the bodies of /v1/caches and of decode.
 *
 * An input is one byte that chooses the kind of body, one byte that seeds the sizes of the pieces, and the body:
 *   0, 1   decode, as JSON or safetensors     4      a new cache
 *   2, 3   append, as JSON or safetensors     5, 6   a cache's length, which is required (5) or optional (6)
 *
 * What must hold:
 *   1. A decode or append that is read in pieces has the same result as the whole body, to the bit.
 *   2. An accepted body has tensors of the ranks that the server relies on, inside the parser's memory, and
 *      NUL-terminated ids.
 *   3. An accepted body without tensors has values within their limits; a refused one has a message, and leaves nothing
 *      to free. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_tensor(const struct decoded *d, const attn_tensor *t, int rank)
{
    int64_t bytes = 0;
    if (t->rank == 0) return;
    must(t->rank == rank && attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes));
    const uint8_t *const at = t->data, *const base = d->memory.base;
    must(bytes == 0 || (at >= base && at + bytes <= base + d->call->memory_bytes));
}

static void check_call(const struct decoded *d, proto_op op)
{
    const proto_item *const item = &d->call->items[0];
    must(d->call->op == op && d->call->count == 1 && !d->call->envelope && item->error.status == ATTN_OK);
    check_tensor(d, &item->problem.q, 4);
    check_tensor(d, &item->problem.k, op == PROTO_OP_APPEND ? 3 : 4);
    check_tensor(d, &item->problem.v, op == PROTO_OP_APPEND ? 3 : 4);
    must(op == PROTO_OP_APPEND
             ? item->problem.k.rank == 3 && item->caches == NULL
             : item->problem.q.rank == 4 && item->cache_count >= 1 && item->cache_count <= PROTO_MAX_CACHES);
    for (int i = 0; i < item->cache_count; i++)
        must(*item->caches[i] && memchr(item->caches[i], 0, PROTO_CONTEXT_BYTES));
}

static void check_tensors(const proto_format *format, proto_op op, const uint8_t *body, size_t bytes, uint32_t seed)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    struct decoded whole = { 0 }, pieces = { 0 };
    decode_in_pieces(&whole, format, op, &limits, (const char *)body, bytes, NULL, NULL);
    decode_in_pieces(&pieces, format, op, &limits, (const char *)body, bytes, some_bytes, &seed);
    char *a = decoded_text(&whole), *b = decoded_text(&pieces);
    must(!strcmp(a, b));
    if (whole.status == ATTN_OK) check_call(&whole, op);
    else must(whole.call == NULL && whole.err.text[0]);
    free(a), free(b);
    decoded_clear(&whole);
    decoded_clear(&pieces);
}

static void check_cache(const uint8_t *body, size_t bytes)
{
    proto_cache cache;
    attn_error err = { 0 };
    if (proto_cache_read(body, bytes, &cache, &err) != ATTN_OK) {
        must(err.text[0] && cache.k_scale == NULL && cache.v_scale == NULL);
        return;
    }
    must(cache.kv_heads >= 1 && cache.kv_heads <= PROTO_CACHE_HEADS && cache.head_dim >= 1 && cache.head_dim_v >= 1);
    must(cache.head_dim <= ATTN_MAX_HEAD_DIM && cache.head_dim_v <= ATTN_MAX_HEAD_DIM && cache.page_size >= 0);
    must(cache.ttl_s >= 0 && cache.ttl_s <= PROTO_CACHE_TTL_MOST_S && (ATTN_DTYPES_FORWARD >> cache.dtype & 1));
    must(cache.k_scale == NULL || (cache.k_scales == cache.kv_heads && cache.dtype == ATTN_F8E4M3));
    must(cache.v_scale == NULL || (cache.v_scales == cache.kv_heads && cache.dtype == ATTN_F8E4M3));
    proto_cache_clear(&cache);
}

static void check_length(const uint8_t *body, size_t bytes, bool required)
{
    int64_t length;
    attn_error err = { 0 };
    if (proto_length_read(body, bytes, required, &length, &err) == ATTN_OK) must(length >= (required ? 0 : -1));
    else must(err.text[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    const uint32_t seed = 1u + data[1];
    const uint8_t *const body = data + 2;
    switch (data[0] % 7) {
    case 0: check_tensors(&proto_json, PROTO_OP_DECODE, body, size - 2, seed); break;
    case 1: check_tensors(&proto_safetensors, PROTO_OP_DECODE, body, size - 2, seed); break;
    case 2: check_tensors(&proto_json, PROTO_OP_APPEND, body, size - 2, seed); break;
    case 3: check_tensors(&proto_safetensors, PROTO_OP_APPEND, body, size - 2, seed); break;
    case 4: check_cache(body, size - 2); break;
    default: check_length(body, size - 2, data[0] % 7 == 5);
    }
    return 0;
}
