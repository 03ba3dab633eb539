/* backends_sums.c: tests of attn_sum_parts(), which adds in a fixed order, and of attn_copy_peer(), which copies
 * between devices. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/dtype.h"

#include "backends.h"

enum { PARTS = 5, MOST = 70000 };

/* Fills the parts with numbers of all sizes, numbers halfway between two 16-bit numbers, infinities and NaN. */
static void fill(float *parts, int64_t count)
{
    struct rng r = { 3 };
    for (int64_t n = 0; n < count; n++) {
        const uint32_t bits = (uint32_t)rng_next(&r), tie = bits & 0xffff0000u;
        parts[n] = attn_f32_from_bits(rng_chance(&r, 0.2) ? tie | 0x8000u : bits);
        if (rng_chance(&r, 0.5)) parts[n] = (float)(rng_uniform(&r) - 0.5);
    }
}

static float sum_of(const float *parts, int count, int64_t n)
{
    float sum = parts[n];
    for (int part = 1; part < count; part++) sum += parts[(int64_t)part * MOST + n];
    return sum;
}

/* Checks that the device adds up `count` parts to the same bits as the host. */
static void check_sum(const float *parts, float *on_device, void *to, attn_dtype dtype, int count, int64_t elements)
{
    attn_sum sum = { .to = to, .dtype = dtype, .count = count, .elements = elements };
    const size_t bytes = (size_t)elements * attn_dtype_bytes(dtype);
    unsigned char *const got = malloc(bytes + 1);
    attn_error err = { 0 };
    for (int part = 0; part < count; part++) sum.parts[part] = on_device + (int64_t)part * MOST;
    if (attn_sum_parts(bench.stream, &sum, &err) != ATTN_OK) fail_msg("%s", err.text);
    assert_int_equal(attn_copy(bench.stream, got, to, bytes, ATTN_FROM_DEVICE, &err), ATTN_OK);
    assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
    for (int64_t n = 0; n < elements; n++) {
        float want = 0;
        attn_store(dtype, &want, 0, sum_of(parts, count, n));
        const double a = attn_load(dtype, got, n), b = attn_load(dtype, &want, 0);
        if (!(isnan(a) && isnan(b)) &&
            memcmp(got + (size_t)n * attn_dtype_bytes(dtype), &want, attn_dtype_bytes(dtype)))
            fail_msg("%s, %d parts: element %d is %a, must be %a", attn_dtype_name(dtype), count, (int)n, a, b);
    }
    free(got);
}

void test_sums_of_parts_are_added_in_order_and_rounded_once(void **state)
{
    static const attn_dtype dtypes[] = { ATTN_F32, ATTN_F16, ATTN_BF16 };
    static const int64_t sizes[] = { 0, 1, 255, 4097, MOST };
    const size_t bytes = (size_t)PARTS * MOST * sizeof(float);
    float *const parts = malloc(bytes);
    attn_error err = { 0 };
    void *on_device, *to;
    (void)state;
    fill(parts, (int64_t)PARTS * MOST);
    assert_int_equal(attn_device_alloc(bench.device, bytes, &on_device, &err), ATTN_OK);
    assert_int_equal(attn_device_alloc(bench.device, MOST * sizeof(float), &to, &err), ATTN_OK);
    assert_int_equal(attn_copy(bench.stream, on_device, parts, bytes, ATTN_TO_DEVICE, &err), ATTN_OK);
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
            for (int count = 1; count <= PARTS; count += 2) check_sum(parts, on_device, to, dtypes[d], count, sizes[n]);
    attn_device_free(bench.device, to);
    attn_device_free(bench.device, on_device);
    free(parts);
}

void test_bytes_are_copied_from_another_device(void **state)
{
    enum { BYTES = 300007 };
    static unsigned char sent[BYTES], got[BYTES];
    struct rng r = { 4 };
    (void)state;
    for (int index = 1; index < attn_device_count(backend); index++) {
        attn_device *other;
        attn_stream *stream;
        attn_error err = { 0 };
        void *from, *to;
        for (int n = 0; n < BYTES; n++) sent[n] = (unsigned char)rng_next(&r);
        assert_int_equal(attn_device_open(backend, index, NULL, &other, &err), ATTN_OK);
        assert_int_equal(attn_stream_open(other, &stream, &err), ATTN_OK);
        assert_int_equal(attn_device_alloc(other, BYTES, &from, &err), ATTN_OK);
        assert_int_equal(attn_device_alloc(bench.device, BYTES, &to, &err), ATTN_OK);
        assert_int_equal(attn_copy(stream, from, sent, BYTES, ATTN_TO_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_stream_wait(stream, &err), ATTN_OK);
        if (attn_copy_peer(bench.stream, to, other, from, BYTES, &err) != ATTN_OK) fail_msg("%s", err.text);
        assert_int_equal(attn_copy(bench.stream, got, to, BYTES, ATTN_FROM_DEVICE, &err), ATTN_OK);
        assert_int_equal(attn_stream_wait(bench.stream, &err), ATTN_OK);
        assert_memory_equal(got, sent, BYTES);
        attn_device_free(bench.device, to);
        attn_device_free(other, from);
        attn_stream_close(stream);
        attn_device_close(other);
    }
}
