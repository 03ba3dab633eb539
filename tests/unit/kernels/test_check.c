/* test_check.c: tests every message of attn_check() word for word, because clients receive it unchanged. Each case
 * starts from a valid problem with B 2, Sq 3, Sk 4, H 8, Hk 2, D 16, Dv 8, and breaks one thing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"

/* Data of every tensor of the valid problems: 0 is valid everywhere. */
static _Alignas(64) uint8_t zeros[1 << 16];
static int32_t cu_q[] = { 0, 2, 6 }, cu_k[] = { 0, 5, 8 }, lengths[] = { 4, 0 }, mask_rows[2 * 2 * 4 * 4];
static uint8_t keep[2 * 8 * 3 * 4];
static float bias32[2 * 8 * 3 * 4], sinks[8], slopes[16], scales[4];
static uint16_t bias16[2 * 8 * 3 * 4];

#define SHAPE(...)  \
    (int64_t[])     \
    {               \
        __VA_ARGS__ \
    }
#define TENSOR(data, dtype, ...) attn_tensor_make(data, dtype, (int)ARRAY_SIZE(SHAPE(__VA_ARGS__)), SHAPE(__VA_ARGS__))

static attn_problem forward(void)
{
    attn_problem p = ATTN_PROBLEM_INIT;
    p.q = TENSOR(zeros, ATTN_F16, 2, 3, 8, 16);
    p.k = TENSOR(zeros, ATTN_F16, 2, 4, 2, 16);
    p.v = TENSOR(zeros, ATTN_F16, 2, 4, 2, 8);
    p.out = TENSOR(zeros, ATTN_F16, 2, 3, 8, 8);
    p.lse = TENSOR(zeros, ATTN_F32, 2, 8, 3);
    return p;
}

static attn_problem backward(void)
{
    attn_problem p = forward();
    p.op = ATTN_OP_BACKWARD;
    p.dout = TENSOR(zeros, ATTN_F16, 2, 3, 8, 8);
    p.dq = TENSOR(zeros, ATTN_F16, 2, 3, 8, 16);
    p.dk = TENSOR(zeros, ATTN_F16, 2, 4, 2, 16);
    p.dv = TENSOR(zeros, ATTN_F16, 2, 4, 2, 8);
    return p;
}

static attn_problem packed(void)
{
    attn_problem p = ATTN_PROBLEM_INIT;
    p.q = TENSOR(zeros, ATTN_F16, 6, 8, 16);
    p.k = TENSOR(zeros, ATTN_F16, 8, 2, 16);
    p.v = TENSOR(zeros, ATTN_F16, 8, 2, 8);
    p.cu_seqlens_q = TENSOR(cu_q, ATTN_I32, 3);
    p.cu_seqlens_k = TENSOR(cu_k, ATTN_I32, 3);
    return p;
}

static attn_problem bhsd(void)
{
    attn_problem p = ATTN_PROBLEM_INIT;
    p.layout = ATTN_BHSD;
    p.q = TENSOR(zeros, ATTN_F16, 2, 8, 3, 16);
    p.k = TENSOR(zeros, ATTN_F16, 2, 2, 4, 16);
    p.v = TENSOR(zeros, ATTN_F16, 2, 2, 4, 8);
    return p;
}

/* Returns a problem with keys in pages: batch row 0 uses two pages, row 1 none. */
static attn_problem paged(void)
{
    static int32_t table[] = { 5, 0, 99, -1, 77, 88 };
    attn_problem p = forward();
    p.k = TENSOR(zeros, ATTN_F16, 6, 3, 2, 16);
    p.v = TENSOR(zeros, ATTN_F16, 6, 3, 2, 8);
    p.seqlens_k = TENSOR(lengths, ATTN_I32, 2);
    p.page_table = TENSOR(table, ATTN_I32, 2, 3);
    return p;
}

static attn_problem paged_packed(void)
{
    attn_problem p = paged();
    p.q = TENSOR(zeros, ATTN_F16, 6, 8, 16);
    p.out = TENSOR(zeros, ATTN_F16, 6, 8, 8);
    p.lse = TENSOR(zeros, ATTN_F32, 8, 6);
    p.cu_seqlens_q = TENSOR(cu_q, ATTN_I32, 3);
    return p;
}

static attn_problem fp8(void)
{
    attn_problem p = forward();
    p.q.dtype = p.k.dtype = p.v.dtype = ATTN_F8E4M3;
    p.q_scale = p.k_scale = p.v_scale = TENSOR(scales, ATTN_F32, 2, 2);
    return p;
}

static void expect(int line, const attn_problem *p, attn_status status, const char *member, const char *text)
{
    attn_error err = { 0 };
    const attn_status is = attn_check(p, &err);
    if (is != status || strcmp(err.member, member) || strcmp(err.text, text))
        fail_msg("line %d:\n  is   %s %s \"%s\"\n  must %s %s \"%s\"", line, attn_status_name(is), err.member, err.text,
                 attn_status_name(status), member, text);
}

/* Tests one error message. of() returns a valid problem, and the statement `...` makes it invalid. attn_check() must
 * refuse the problem with this status, member and text. */
#define SAYS(of, status, member, text, ...)                \
    do {                                                   \
        attn_problem p = of();                             \
        __VA_ARGS__;                                       \
        expect(__LINE__, &p, ATTN_##status, member, text); \
    } while (0)
#define PASSES(of, ...) SAYS(of, OK, "", "", __VA_ARGS__)

static void test_good_problems_pass(void **state)
{
    (void)state;
    PASSES(forward, (void)0);
    PASSES(backward, (void)0);
    PASSES(packed, (void)0);
    PASSES(bhsd, (void)0);
    PASSES(fp8, (void)0);
    PASSES(forward, p.out.rank = p.lse.rank = 0);
    PASSES(forward, p.out.data = p.lse.data = NULL);
    PASSES(backward, p.dq.data = p.dk.data = p.dv.data = NULL);
    PASSES(backward, p.out.rank = p.lse.rank = 0); /* a backward without out and lse computes both */
    /* a forward ignores dout */
    PASSES(forward, p.op = ATTN_OP_FORWARD; p.dout = TENSOR(NULL, ATTN_U8, 9));
    PASSES(forward, p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = p.out.shape[0] = p.lse.shape[0] = 0;
           p.q.data = p.k.data = p.v.data = NULL);
    PASSES(forward, p.q.shape[1] = p.out.shape[1] = p.lse.shape[2] = 0);
    PASSES(forward, p.k.shape[1] = p.v.shape[1] = 0);
    PASSES(packed, p.cu_seqlens_q = p.cu_seqlens_k = TENSOR(cu_q, ATTN_I32, 1);
           p.q.shape[0] = p.k.shape[0] = p.v.shape[0] = 0);
    PASSES(forward, p.out.dtype = ATTN_F32; p.out = TENSOR(zeros, ATTN_F32, 2, 3, 8, 8));
    PASSES(forward, p.has_scale = true; p.scale = 0);
    PASSES(forward, p.has_scale = true; p.scale = -3);
    PASSES(forward, p.scale = NAN);
    PASSES(forward, p.softcap = 50; p.window_left = 0; p.window_right = INT64_MAX; p.dropout_p = 0.999);
    PASSES(forward, p.q.stride[1] = 0; p.k.stride[0] = 0; p.v.stride[1] = 1000);
    PASSES(forward, p.bias = TENSOR(bias32, ATTN_F32, 2, 8, 3, 4));
    PASSES(forward, p.bias = TENSOR(bias16, ATTN_F16, 1, 1, 1, 4));
    PASSES(forward, p.bias = TENSOR(bias32, ATTN_F32, 1, 8, 1, 4); bias32[3] = -INFINITY);
    bias32[3] = 0;
    PASSES(forward, p.keep_mask = TENSOR(keep, ATTN_U8, 1, 8, 3, 4));
    PASSES(forward, p.sinks = TENSOR(sinks, ATTN_F32, 8); sinks[0] = -INFINITY);
    sinks[0] = 0;
    PASSES(forward, p.alibi_slopes = TENSOR(slopes, ATTN_F32, 8));
    PASSES(forward, p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2, 8));
    PASSES(packed, p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2, 8));
    PASSES(forward, p.seqlens_k = TENSOR(lengths, ATTN_I32, 2));
    PASSES(forward, p.causal = true; p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 1));
    PASSES(forward, p.causal = true; p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 2, 4, 2));
    PASSES(forward, p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 2));
    PASSES(forward, p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 2, 4, 4));
}

static void test_sequences_and_heads_are_bounded_even_where_they_hold_nothing(void **state)
{
    (void)state;
    PASSES(forward, p.q = TENSOR(NULL, ATTN_F16, 1 << 17, 0, 8, 1); p.k = TENSOR(NULL, ATTN_F16, 1 << 17, 0, 1, 1);
           p.v = TENSOR(NULL, ATTN_F16, 1 << 17, 0, 1, 1); p.out.rank = p.lse.rank = 0);
    SAYS(forward, TOO_LARGE, "/q/shape",
         "q: 131073 batch rows of 8 heads are 1048584, B times H must be at most 1048576",
         p.q = TENSOR(NULL, ATTN_F16, (1 << 17) + 1, 0, 8, 1);
         p.out.rank = p.lse.rank = 0);
    SAYS(forward, TOO_LARGE, "/q/shape",
         "q: 2147483647 batch rows of 1 heads are 2147483647, B times H must be at most 1048576",
         p.q = TENSOR(NULL, ATTN_F16, INT32_MAX, 0, 1, 1);
         p.out.rank = p.lse.rank = 0);
    SAYS(packed, TOO_LARGE, "/q/shape",
         "q: 2147483646 sequences of 8 heads are 1.717986917e+10, B times H must be at most 1048576",
         p.cu_seqlens_q.shape[0] = INT32_MAX);
}

static void test_the_shapes_of_q_k_v(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/q", "q: is required; a problem has q, k and v", p.q.rank = 0);
    SAYS(forward, INVALID, "/k", "k: is required; a problem has q, k and v", p.k.rank = 0);
    SAYS(forward, INVALID, "/v", "v: is required; a problem has q, k and v", p.v.rank = 0);
    SAYS(forward, INVALID, "/q/shape",
         "q: shape [2, 3, 8] has 3 dimensions, must have 4: [B, Sq, H, D]; a missing axis is written as 1, and heads "
         "have an axis of their own",
         p.q.rank = 3);
    SAYS(
        packed, INVALID, "/k/shape",
        "k: shape [1, 8, 2, 16] has 4 dimensions, must have 3 with cu_seqlens_q: [total_k, Hk, D]; leave out the first "
        "axis",
        p.k = TENSOR(zeros, ATTN_F16, 1, 8, 2, 16));
    SAYS(forward, INVALID, "/q/dtype", "q: dtype is int32, must be float32, float16, bfloat16 or float8_e4m3fn",
         p.q.dtype = ATTN_I32);
    SAYS(forward, INVALID, "/k/dtype", "k: dtype is bfloat16, must be float16 as q's, or float8_e4m3fn",
         p.k.dtype = ATTN_BF16);
    SAYS(forward, INVALID, "/v/dtype", "v: dtype is float32, must be float16 as q's, or float8_e4m3fn",
         p.v.dtype = ATTN_F32);
    SAYS(forward, INVALID, "/q/shape/1", "q: shape[1] is -1, must be at least 0", p.q.shape[1] = -1);
    SAYS(forward, TOO_LARGE, "/k/shape/1", "k: shape[1] is 2147483648, must be at most 2147483647",
         p.k.shape[1] = INT64_C(1) << 31);
    SAYS(forward, TOO_LARGE, "/q/shape", "q: the product of its shape is over 2^61 elements",
         p.q.shape[0] = p.q.shape[1] = 1 << 30);
    /* q has fewer elements than the limit of 2^61, but `out` would have more. */
    SAYS(forward, TOO_LARGE, "/q/shape", "q: its result would be over 2^61 elements",
         p.q = TENSOR(NULL, ATTN_F16, 0, 1 << 30, 1 << 29, 1);
         p.k = TENSOR(NULL, ATTN_F16, 0, 0, 1 << 29, 1); p.v = TENSOR(NULL, ATTN_F16, 0, 0, 1 << 29, 16);
         p.out.rank = p.lse.rank = 0);
    SAYS(forward, INVALID, "/q/shape/2", "q: shape[2] is 0, must be at least 1", p.q.shape[2] = 0);
    SAYS(bhsd, INVALID, "/q/shape/1", "q: shape[1] is 0, must be at least 1", p.q.shape[1] = 0);
    SAYS(forward, INVALID, "/q/shape/3", "q: shape[3] is 0, must be at least 1", p.q.shape[3] = 0);
    SAYS(forward, INVALID, "/k/shape/2", "k: shape[2] is 0, must be at least 1", p.k.shape[2] = 0);
    SAYS(forward, INVALID, "/v/shape/3", "v: shape[3] is 0, must be at least 1", p.v.shape[3] = 0);
    SAYS(forward, UNSUPPORTED, "/q/shape/3", "q: shape[3] is 1025, head sizes up to 1024 are supported",
         p.q.shape[3] = p.k.shape[3] = 1025);
    SAYS(forward, UNSUPPORTED, "/v/shape/3", "v: shape[3] is 1025, head sizes up to 1024 are supported",
         p.v.shape[3] = 1025);
    SAYS(backward, UNSUPPORTED, "/v/shape/3", "v: shape[3] is 1025, head sizes up to 1024 are supported",
         p.v.shape[3] = 1025);
    SAYS(forward, INVALID, "/k/shape/2", "k: shape[2] is 3, must divide the 8 heads of q", p.k.shape[2] = 3);
    SAYS(bhsd, INVALID, "/k/shape/1", "k: shape[1] is 3, must divide the 8 heads of q", p.k.shape[1] = 3);
    SAYS(packed, INVALID, "/k/shape/1", "k: shape[1] is 3, must divide the 8 heads of q", p.k.shape[1] = 3);
    SAYS(forward, INVALID, "/k/shape/2", "k: shape[2] is 16, must divide the 8 heads of q", p.k.shape[2] = 16);
    SAYS(forward, INVALID, "/k/shape/0", "k: shape[0] is 1, must be 2, the batch of q", p.k.shape[0] = 1);
    SAYS(forward, INVALID, "/k/shape/3", "k: shape[3] is 8, must be 16, the head size of q", p.k.shape[3] = 8);
    SAYS(forward, INVALID, "/v/shape/0", "v: shape[0] is 3, must be 2, the batch of q", p.v.shape[0] = 3);
    SAYS(forward, INVALID, "/v/shape/1", "v: shape[1] is 5, must be 4, the keys of k", p.v.shape[1] = 5);
    SAYS(bhsd, INVALID, "/v/shape/2", "v: shape[2] is 5, must be 4, the keys of k", p.v.shape[2] = 5);
    SAYS(forward, INVALID, "/v/shape/2", "v: shape[2] is 8, must be 2, the heads of k", p.v.shape[2] = 8);
}

static void test_packed_lengths(void **state)
{
    static int32_t starts_at_1[] = { 1, 2, 6 }, falls[] = { 0, 7, 6 }, short_[] = { 0, 2, 5 }, long_[] = { 0, 2, 9 };
    (void)state;
    SAYS(packed, INVALID, "/cu_seqlens_k",
         "cu_seqlens_k: is required with cu_seqlens_q, unless k and v are [2, Sk, Hk, D], a row for each sequence",
         p.cu_seqlens_k.rank = 0);
    SAYS(packed, INVALID, "/cu_seqlens_q", "cu_seqlens_q: is required with cu_seqlens_k", p.cu_seqlens_q.rank = 0);
    SAYS(packed, INVALID, "/cu_seqlens_q/shape", "cu_seqlens_q: shape [3, 0] has 2 dimensions, must have 1: [N + 1]",
         p.cu_seqlens_q.rank = 2);
    SAYS(packed, INVALID, "/cu_seqlens_q/dtype", "cu_seqlens_q: dtype is float32, must be int32",
         p.cu_seqlens_q.dtype = ATTN_F32);
    SAYS(packed, INVALID, "/cu_seqlens_q/shape/0", "cu_seqlens_q: shape[0] is 0, must be at least 1",
         p.cu_seqlens_q.shape[0] = 0);
    SAYS(packed, INVALID, "/cu_seqlens_k/shape/0", "cu_seqlens_k: shape[0] is 2, must be 3 as cu_seqlens_q's",
         p.cu_seqlens_k.shape[0] = 2);
    SAYS(packed, INVALID, "/layout", "layout: is bhsd, must be bshd with cu_seqlens_q", p.layout = ATTN_BHSD);
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [0] is 1, must be 0, where the first sequence starts; these look like ends, a 0 before them is "
         "wanted: [0, 1, ...]",
         p.cu_seqlens_q.data = starts_at_1);
    SAYS(packed, INVALID, "/cu_seqlens_q/data", "cu_seqlens_q: [2] is 6, must be at least 7, the value before it",
         p.cu_seqlens_q.data = falls);
    SAYS(packed, INVALID, "/cu_seqlens_q/data", "cu_seqlens_q: [2] is 5, must be 6, the rows of q",
         p.cu_seqlens_q.data = short_);
    SAYS(packed, INVALID, "/cu_seqlens_k/data", "cu_seqlens_k: [2] is 9, must be 8, the rows of k",
         p.cu_seqlens_k.data = long_);
#define ALONE "; send a sequence that needs it as a problem of its own"
    SAYS(packed, INVALID, "/bias", "bias: cannot be combined with cu_seqlens_q" ALONE,
         p.bias = TENSOR(bias32, ATTN_F32, 2, 8, 3, 4));
    SAYS(packed, INVALID, "/keep_mask", "keep_mask: cannot be combined with cu_seqlens_q" ALONE,
         p.keep_mask = TENSOR(keep, ATTN_U8, 2, 8, 3, 4));
    SAYS(packed, INVALID, "/mask_startend_rows", "mask_startend_rows: cannot be combined with cu_seqlens_q" ALONE,
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 2));
    SAYS(packed, INVALID, "/alibi_slopes/shape/0",
         "alibi_slopes: shape[0] is 3, must be 2, the sequences of cu_seqlens_q",
         p.alibi_slopes = TENSOR(zeros, ATTN_F32, 3, 8));
    SAYS(packed, INVALID, "/out/shape/0", "out: shape[0] is 7, must be 6, the queries of q",
         p.out = TENSOR(zeros, ATTN_F16, 7, 8, 8));
    SAYS(packed, INVALID, "/lse/shape/1", "lse: shape[1] is 5, must be 6, the queries of q",
         p.lse = TENSOR(zeros, ATTN_F32, 8, 5));
}

static void test_lengths_are_at_most_the_room_that_there_is(void **state)
{
    static int32_t q_lengths[] = { 2, 3 }, too_long[] = { 3, 3 }, k_lengths[] = { 5, 0 }, below[] = { 0, -1 },
                   rows[] = { 0, 4, 8 };
    (void)state;
    PASSES(forward, p.seqlens_q = TENSOR(q_lengths, ATTN_I32, 2); p.seqlens_k = TENSOR(lengths, ATTN_I32, 2));
    PASSES(packed, p.seqlens_q = TENSOR(q_lengths, ATTN_I32, 2));
    PASSES(packed, p.seqlens_k = TENSOR(k_lengths, ATTN_I32, 2));
    PASSES(paged_packed, p.seqlens_q = TENSOR(q_lengths, ATTN_I32, 2));
    PASSES(paged, p.seqlens_q = TENSOR(q_lengths, ATTN_I32, 2));
    SAYS(forward, INVALID, "/seqlens_q/data", "seqlens_q: [0] is 5, must be between 0 and 3, the queries of q",
         p.seqlens_q = TENSOR(k_lengths, ATTN_I32, 2));
    SAYS(forward, INVALID, "/seqlens_q/shape/0", "seqlens_q: shape[0] is 3, must be 2, the batch of q",
         p.seqlens_q = TENSOR(rows, ATTN_I32, 3));
    SAYS(packed, INVALID, "/seqlens_q/data",
         "seqlens_q: [0] is 3, must be between 0 and 2, the rows that cu_seqlens_q has for this sequence",
         p.seqlens_q = TENSOR(too_long, ATTN_I32, 2));
    SAYS(packed, INVALID, "/seqlens_k/data",
         "seqlens_k: [1] is -1, must be between 0 and 3, the rows that cu_seqlens_k has for this sequence",
         p.seqlens_k = TENSOR(below, ATTN_I32, 2));
    SAYS(packed, INVALID, "/seqlens_k/shape/0", "seqlens_k: shape[0] is 3, must be 2, the sequences of cu_seqlens_q",
         p.seqlens_k = TENSOR(rows, ATTN_I32, 3));
    SAYS(paged_packed, INVALID, "/seqlens_q/data",
         "seqlens_q: [0] is 3, must be between 0 and 2, the rows that cu_seqlens_q has for this sequence",
         p.seqlens_q = TENSOR(too_long, ATTN_I32, 2));
}

/* Returns a problem with packed queries and unpacked keys: a batch in which padding may follow the keys of each row. */
static attn_problem by_rows(void)
{
    static int32_t rows[] = { 0, 4, 8 };
    attn_problem p = packed();
    p.k = TENSOR(zeros, ATTN_F16, 2, 4, 2, 16);
    p.v = TENSOR(zeros, ATTN_F16, 2, 4, 2, 8);
    p.cu_seqlens_k = TENSOR(rows, ATTN_I32, 3);
    p.seqlens_k = TENSOR(lengths, ATTN_I32, 2);
    return p;
}

static void test_packed_queries_take_padded_rows_of_keys(void **state)
{
    (void)state;
    PASSES(by_rows, (void)0);
    PASSES(by_rows, p.seqlens_k.rank = 0); /* without seqlens_k, every batch row has Sk keys without padding */
    PASSES(by_rows, p.op = ATTN_OP_BACKWARD; p.dout = TENSOR(zeros, ATTN_F16, 6, 8, 8);
           p.dk = TENSOR(zeros, ATTN_F16, 2, 4, 2, 16));
    SAYS(by_rows, INVALID, "/v/shape/1", "v: shape[1] is 3, must be 4, the keys of k", p.v.shape[1] = 3);
    SAYS(by_rows, INVALID, "/v/shape",
         "v: shape [8, 2, 8] has 3 dimensions, must have 4 with cu_seqlens_q: [N, Sk, Hk, Dv]; a missing axis is "
         "written as 1, and heads have an axis of their own",
         p.v = TENSOR(zeros, ATTN_F16, 8, 2, 8));
    SAYS(by_rows, INVALID, "/k/shape",
         "k: shape [3, 4, 2, 16] has 4 dimensions, must have 3 with cu_seqlens_q: [total_k, Hk, D]",
         p.k = TENSOR(zeros, ATTN_F16, 3, 4, 2, 16));
    SAYS(by_rows, INVALID, "/cu_seqlens_k/data",
         "cu_seqlens_k: [1] is 5, must be 4, where that row of k begins; with k [B, Sk, Hk, D] it may be left out",
         p.cu_seqlens_k = TENSOR(cu_k, ATTN_I32, 3));
    SAYS(by_rows, INVALID, "/k/stride/0",
         "k: stride[0] is 200, must be 128 with cu_seqlens_q, where rows lie side by side", p.k.stride[0] = 200);
    SAYS(by_rows, INVALID, "/seqlens_k/data",
         "seqlens_k: [1] is 5, must be between 0 and 4, the rows that cu_seqlens_k has for this sequence",
         static int32_t too_long[] = { 4, 5 };
         p.seqlens_k = TENSOR(too_long, ATTN_I32, 2));
}

static void test_pages(void **state)
{
    static int32_t far[] = { 5, 6, 0, 0, 0, 0 }, below[] = { 5, 0, 0, -3, 0, 0 }, long_[] = { 4, 10 },
                   both[] = { 4, 1 }, growing[] = { 4, 7 }, none[] = { 0, 0 };
    (void)state;
    SAYS(paged, INVALID, "/k/shape/2",
         "k: shape[2] is 3, must divide the 8 heads of q; are the pages [Hk, page_size, D]? They must be [page_size, "
         "Hk, D]",
         p.k = TENSOR(zeros, ATTN_F16, 6, 2, 3, 16));
    SAYS(paged, INVALID, "/seqlens_k", "seqlens_k: is required with page_table, the number of keys of each row",
         p.seqlens_k.rank = 0);
    SAYS(paged_packed, INVALID, "/cu_seqlens_k",
         "cu_seqlens_k: cannot be combined with page_table, where seqlens_k says how long rows are",
         p.cu_seqlens_k = TENSOR(cu_k, ATTN_I32, 3));
    SAYS(paged, UNSUPPORTED, "/page_table",
         "page_table: backward has no pages; send k and v whole, or with cu_seqlens_k", p.op = ATTN_OP_BACKWARD);
    SAYS(paged, INVALID, "/layout", "layout: is bhsd, must be bshd with page_table", p.layout = ATTN_BHSD);
    SAYS(paged, INVALID, "/page_table/shape", "page_table: shape [2] has 1 dimensions, must have 2: [B, most]",
         p.page_table.rank = 1);
    SAYS(paged, INVALID, "/page_table/dtype", "page_table: dtype is float32, must be int32",
         p.page_table.dtype = ATTN_F32);
    SAYS(paged, INVALID, "/page_table/shape/0", "page_table: shape[0] is 3, must be 2, the batch of q",
         p.page_table.shape[0] = 3);
    SAYS(paged_packed, INVALID, "/page_table/shape/0",
         "page_table: shape[0] is 3, must be 2, the sequences of cu_seqlens_q", p.page_table.shape[0] = 3);
    SAYS(paged, INVALID, "/k/shape",
         "k: shape [6, 3, 2] has 3 dimensions, must have 4 with page_table: [pages, page_size, Hk, D]; a missing axis "
         "is "
         "written as 1, and heads have an axis of their own",
         p.k.rank = 3);
    SAYS(paged_packed, INVALID, "/k/shape",
         "k: shape [6, 3, 2] has 3 dimensions, must have 4 with page_table: [pages, page_size, Hk, D]; a missing axis "
         "is "
         "written as 1, and heads have an axis of their own",
         p.k.rank = 3);
    SAYS(paged, INVALID, "/k/shape/1", "k: shape[1] is 0, must be at least 1", p.k.shape[1] = p.v.shape[1] = 0);
    SAYS(paged, INVALID, "/v/shape/0", "v: shape[0] is 5, must be 6, the pages of k", p.v.shape[0] = 5);
    SAYS(paged, INVALID, "/v/shape/1", "v: shape[1] is 2, must be 3, the slots of a page of k", p.v.shape[1] = 2);
    SAYS(paged, TOO_LARGE, "/page_table/shape/1",
         "page_table: shape[1] is 1073741824, with the 3 slots of a page of k 3221225472 keys in a row, of which there "
         "may be "
         "2147483647",
         p.page_table.shape[1] = 1 << 30);
    SAYS(paged, TOO_LARGE, "/k/shape", "k: the product of its shape is over 2^61 elements",
         p.k.shape[0] = p.k.shape[1] = INT32_MAX);
    SAYS(paged, INVALID, "/seqlens_k/data",
         "seqlens_k: [1] is 10, must be between 0 and 9, the slots of the 3 pages of a row of page_table",
         p.seqlens_k.data = long_);
    SAYS(paged, INVALID, "/page_table/data",
         "page_table: [0, 1] is 6, must be between 0 and 5, a page of k; it is read, for seqlens_k[0] is 4 and pages "
         "have 3 "
         "slots",
         p.page_table.data = far);
    SAYS(paged, INVALID, "/page_table/data",
         "page_table: [1, 0] is -3, must be between 0 and 5, a page of k; it is read, for seqlens_k[1] is 1 and pages "
         "have 3 "
         "slots",
         p.page_table.data = below, p.seqlens_k.data = both);
    SAYS(paged, INVALID, "/page_table/data", /* page_table has a stride of 0 here, so both batch rows have the entries
                                              * of row 0. Row 1 has more keys than row 0, so it reads entry 2. */
         "page_table: [1, 2] is 99, must be between 0 and 5, a page of k; it is read, for seqlens_k[1] is 7 and pages "
         "have 3 slots",
         p.page_table.stride[0] = 0, p.seqlens_k.data = growing);
    SAYS(paged, INVALID, "/bias/shape/3", "bias: shape[3] is 4, must be 9, the keys of k",
         p.bias = TENSOR(bias32, ATTN_F32, 1, 1, 1, 4));
    PASSES(paged, p.k.stride[0] = 5, p.v.stride[0] = 0);
    PASSES(paged, p.k.shape[0] = p.v.shape[0] = 0, p.seqlens_k.data = none);
    PASSES(paged, p.page_table.shape[1] = 0, p.page_table.data = NULL, p.seqlens_k.data = none);
    PASSES(paged, p.bias = TENSOR(bias32, ATTN_F32, 1, 1, 1, 9), p.sinks = TENSOR(sinks, ATTN_F32, 8));
    PASSES(paged_packed, p.causal = true);
}

static void test_lengths_in_the_place_of_their_sums_are_recognised(void **state)
{
    static int32_t lengths_q[] = { 2, 4 }, with_zero[] = { 0, 1, 5 }, falling[] = { 0, 5, 1 }, other[] = { 2, 5 },
                   many[] = { 1, 1, 1, 1, 2 }, below[] = { 0, 8, -2 }, ends[] = { 2, 6 };
    (void)state;
#define LENGTHS            "; these look like lengths, their running sums are wanted: "
#define Q_AND_K(values, n) p.cu_seqlens_q = TENSOR(values, ATTN_I32, n), p.cu_seqlens_k = TENSOR(values, ATTN_I32, n)
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [0] is 2, must be 0, where the first sequence starts" LENGTHS "[0, 2, 6]",
         Q_AND_K(lengths_q, 2));
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [2] is 5, must be 6, the rows of q" LENGTHS "[0, 0, 1, 6]", Q_AND_K(with_zero, 3));
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [2] is 1, must be at least 5, the value before it" LENGTHS "[0, 0, 5, 6]", Q_AND_K(falling, 3));
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [0] is 1, must be 0, where the first sequence starts" LENGTHS "[0, 1, 2, 3, ...]",
         Q_AND_K(many, 5));
    SAYS(packed, INVALID, "/cu_seqlens_q/data", "cu_seqlens_q: [0] is 2, must be 0, where the first sequence starts",
         /* If the 2 and 5 of cu_seqlens_q were lengths, their sum would have to be the rows of q. It is not, so the
          * message does not suggest that they are lengths. */
         Q_AND_K(other, 2));
    SAYS(packed, INVALID, "/cu_seqlens_q/data",
         "cu_seqlens_q: [0] is 2, must be 0, where the first sequence starts; these look like ends, a 0 before them is "
         "wanted: [0, 2, ...]",
         Q_AND_K(ends, 2));
    SAYS(packed, INVALID, "/cu_seqlens_q/data", "cu_seqlens_q: [2] is -2, must be at least 8, the value before it",
         Q_AND_K(below, 3));
}

static void test_the_other_layout_is_suspected_where_it_would_do(void **state)
{
    (void)state;
#define AS_BHSD      "; read as [B, H, S, D] all would fit: is \"layout\": \"bhsd\" missing?"
#define MORE_ROWS(p) p.q.shape[2] = 30, p.k.shape[2] = p.v.shape[2] = 40
#define AS_BSHD      "; read as [B, S, H, D] all would fit: is \"layout\": \"bhsd\" meant?"
    SAYS(bhsd, INVALID, "/k/shape/2", "k: shape[2] is 40, must divide the 30 heads of q" AS_BHSD, MORE_ROWS(p);
         p.layout = ATTN_BSHD);
    SAYS(forward, INVALID, "/k/shape/1", "k: shape[1] is 40, must divide the 30 heads of q" AS_BSHD,
         p.q = TENSOR(zeros, ATTN_F16, 2, 30, 8, 16);
         p.k = TENSOR(zeros, ATTN_F16, 2, 40, 2, 16); p.v = TENSOR(zeros, ATTN_F16, 2, 40, 2, 8);
         p.out.rank = p.lse.rank = 0; p.layout = ATTN_BHSD);
    SAYS(bhsd, INVALID, "/keep_mask/shape/2", "keep_mask: shape[2] is 30, must be 1 or 8, the queries of q" AS_BHSD,
         MORE_ROWS(p);
         p.layout = ATTN_BSHD; p.k = p.v = p.q; p.keep_mask = TENSOR(keep, ATTN_U8, 1, 1, 30, 30));
    SAYS(bhsd, INVALID, "/sinks/shape/0", "sinks: shape[0] is 8, must be 30, the heads of q" AS_BHSD, MORE_ROWS(p);
         p.layout = ATTN_BSHD; p.k = p.v = p.q; p.sinks = TENSOR(sinks, ATTN_F32, 8));
    /* The tensors have the layout bhsd, but are declared as bshd. So 1 query is read as 1 head of q, and 40 keys are
     * read as 40 heads of k. */
    SAYS(bhsd, INVALID, "/k/shape/2", "k: shape[2] is 40, must divide the 1 heads of q" AS_BHSD, MORE_ROWS(p);
         p.layout = ATTN_BSHD; p.q.shape[2] = 1);
    /* These messages suggest no other layout, because no layout fits the shapes, or because the fault is the dtype. */
    SAYS(bhsd, INVALID, "/k/shape/3", "k: shape[3] is 15, must be 16, the head size of q", p.k.shape[3] = 15);
    SAYS(bhsd, INVALID, "/k/dtype", "k: dtype is float32, must be float16 as q's, or float8_e4m3fn",
         p.k.dtype = ATTN_F32);
    attn_problem p = bhsd();
    p.layout = ATTN_BSHD;
    assert_int_equal(attn_check(&p, NULL), ATTN_INVALID);
}

/* The numbers of heads (32 and 12) could as well be lengths, so a request without a layout is not read as bhsd. */
static void test_heads_that_do_not_divide_are_not_taken_for_another_layout(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/k/shape/2", "k: shape[2] is 12, must divide the 32 heads of q",
         p.q = TENSOR(zeros, ATTN_F16, 1, 128, 32, 16);
         p.k = TENSOR(zeros, ATTN_F16, 1, 128, 12, 16); p.v = TENSOR(zeros, ATTN_F16, 1, 128, 12, 16);
         p.out.rank = p.lse.rank = 0);
    SAYS(forward, INVALID, "/k/shape/1", "k: shape[1] is 12, must divide the 32 heads of q", p.layout = ATTN_BHSD;
         p.q = TENSOR(zeros, ATTN_F16, 1, 32, 128, 16); p.k = TENSOR(zeros, ATTN_F16, 1, 12, 128, 16);
         p.v = TENSOR(zeros, ATTN_F16, 1, 12, 128, 16); p.out.rank = p.lse.rank = 0);
    /* k looks like bhsd (its axis 1 is smaller than its axis 2), but q does not, so the message suggests no layout. */
    SAYS(forward, INVALID, "/k/shape/2", "k: shape[2] is 12, must divide the 32 heads of q",
         p.q = TENSOR(zeros, ATTN_F16, 1, 128, 32, 16);
         p.k = TENSOR(zeros, ATTN_F16, 1, 4, 12, 16); p.v = TENSOR(zeros, ATTN_F16, 1, 4, 12, 16);
         p.out.rank = p.lse.rank = 0);
    SAYS(bhsd, INVALID, "/alibi_slopes/shape/0", "alibi_slopes: shape[0] is 4, must be 8, the heads of q",
         p.layout = ATTN_BSHD;
         p.q = p.k = p.v = TENSOR(zeros, ATTN_F16, 1, 4, 8, 16); p.alibi_slopes = TENSOR(slopes, ATTN_F32, 4));
}

static void test_masks_and_biases(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/alibi_slopes/shape",
         "alibi_slopes: shape [1, 2, 8] has 3 dimensions, must have 1 or 2: [H] or [B, H]",
         p.alibi_slopes = TENSOR(slopes, ATTN_F32, 1, 2, 8));
    SAYS(forward, INVALID, "/alibi_slopes/shape/0", "alibi_slopes: shape[0] is 2, must be 8, the heads of q",
         p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2));
    SAYS(forward, INVALID, "/alibi_slopes/shape/1", "alibi_slopes: shape[1] is 4, must be 8, the heads of q",
         p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2, 4));
    SAYS(forward, INVALID, "/alibi_slopes/dtype", "alibi_slopes: dtype is float16, must be float32",
         p.alibi_slopes = TENSOR(slopes, ATTN_F16, 8));
    SAYS(forward, INVALID, "/alibi_slopes/data", "alibi_slopes: [1, 3] is inf, must be finite", slopes[11] = INFINITY;
         p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2, 8));
    slopes[11] = 0;
    SAYS(forward, INVALID, "/sinks/shape/0", "sinks: shape[0] is 2, must be 8, the heads of q",
         p.sinks = TENSOR(sinks, ATTN_F32, 2));
    SAYS(forward, INVALID, "/sinks/data", "sinks: [7] is nan, must be finite or -inf", sinks[7] = -NAN;
         p.sinks = TENSOR(sinks, ATTN_F32, 8));
    sinks[7] = 0;
    SAYS(forward, INVALID, "/bias/shape",
         "bias: shape [3, 4] has 2 dimensions, must have 4: [1 or B, 1 or H, 1 or Sq, Sk]; a missing axis is written "
         "as 1",
         p.bias = TENSOR(bias32, ATTN_F32, 3, 4));
    SAYS(forward, INVALID, "/bias/shape/0", "bias: shape[0] is 3, must be 1 or 2, the batch of q",
         p.bias = TENSOR(zeros, ATTN_F32, 3, 8, 3, 4));
    SAYS(forward, INVALID, "/bias/shape/1", "bias: shape[1] is 2, must be 1 or 8, the heads of q",
         p.bias = TENSOR(bias32, ATTN_F32, 2, 2, 3, 4));
    SAYS(forward, INVALID, "/bias/shape/2", "bias: shape[2] is 4, must be 1 or 3, the queries of q",
         p.bias = TENSOR(zeros, ATTN_F32, 2, 8, 4, 4));
    SAYS(forward, INVALID, "/bias/shape/3", "bias: shape[3] is 1, must be 4, the keys of k",
         p.bias = TENSOR(bias32, ATTN_F32, 2, 8, 3, 1));
    SAYS(forward, INVALID, "/bias/dtype", "bias: dtype is bfloat16, must be float16 as q's, or float32",
         p.bias = TENSOR(bias16, ATTN_BF16, 2, 8, 3, 4));
    SAYS(fp8, INVALID, "/bias/dtype", "bias: dtype is float8_e4m3fn, must be float32",
         p.bias = TENSOR(zeros, ATTN_F8E4M3, 2, 8, 3, 4));
    SAYS(forward, INVALID, "/bias/data", "bias: [1, 7, 2, 3] is nan, must be finite or -inf", bias32[191] = NAN;
         p.bias = TENSOR(bias32, ATTN_F32, 2, 8, 3, 4));
    SAYS(forward, INVALID, "/bias/data", "bias: [0, 0, 0, 2] is inf, must be finite or -inf", bias32[2] = INFINITY;
         p.bias = TENSOR(bias32, ATTN_F32, 2, 8, 3, 4));
    SAYS(forward, INVALID, "/bias/data", "bias: [0, 1, 0, 1] is inf, must be finite or -inf", bias16[12] = 0xfc00;
         bias16[13] = 0x7c00; p.bias = TENSOR(bias16, ATTN_F16, 2, 8, 3, 4));
    SAYS(forward, INVALID, "/bias/data", "bias: [0, 1, 0, 1] is nan, must be finite or -inf", bias16[12] = 0xff80;
         bias16[13] = 0x7fc0; p.bias = TENSOR(bias16, ATTN_BF16, 2, 8, 3, 4);
         p.q.dtype = p.k.dtype = p.v.dtype = ATTN_BF16);
    SAYS(forward, INVALID, "/keep_mask/dtype", "keep_mask: dtype is int32, must be uint8",
         p.keep_mask = TENSOR(zeros, ATTN_I32, 2, 8, 3, 4));
    SAYS(forward, INVALID, "/keep_mask/shape/1", "keep_mask: shape[1] is 2, must be 1 or 8, the heads of q",
         p.keep_mask = TENSOR(keep, ATTN_U8, 2, 2, 3, 4));
    SAYS(forward, INVALID, "/keep_mask/data", "keep_mask: [0, 2, 1, 0] is 255, must be 0 or 1", keep[28] = 255;
         p.keep_mask = TENSOR(keep, ATTN_U8, 2, 8, 3, 4));
    keep[28] = 0;
    SAYS(forward, INVALID, "/seqlens_k/shape/0", "seqlens_k: shape[0] is 1, must be 2, the batch of q",
         p.seqlens_k = TENSOR(lengths, ATTN_I32, 1));
    SAYS(forward, INVALID, "/seqlens_k/data", "seqlens_k: [1] is 5, must be between 0 and 4, the keys of k",
         lengths[1] = 5;
         p.seqlens_k = TENSOR(lengths, ATTN_I32, 2));
    SAYS(forward, INVALID, "/seqlens_k/data", "seqlens_k: [1] is -1, must be between 0 and 4, the keys of k",
         lengths[1] = -1;
         p.seqlens_k = TENSOR(lengths, ATTN_I32, 2));
    lengths[1] = 0;
    SAYS(forward, INVALID, "/mask_startend_rows/shape/1",
         "mask_startend_rows: shape[1] is 3, must be 1, 2 (the heads of k) or 8 (the heads of q)",
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 3, 4, 2));
    SAYS(forward, INVALID, "/mask_startend_rows/shape/2", "mask_startend_rows: shape[2] is 3, must be 4, the keys of k",
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 3, 2));
    SAYS(forward, INVALID, "/mask_startend_rows/shape/3",
         "mask_startend_rows: shape[3] is 1, must be 2 or 4 when not causal",
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 1));
    SAYS(forward, INVALID, "/mask_startend_rows/shape/3",
         "mask_startend_rows: shape[3] is 4, must be 1 or 2 when causal", p.causal = true;
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 4));
    SAYS(forward, INVALID, "/mask_startend_rows/data",
         "mask_startend_rows: [1, 0, 3, 1] is 4, must be between 0 and 3, the queries of q", mask_rows[15] = 4;
         p.mask_startend_rows = TENSOR(mask_rows, ATTN_I32, 2, 1, 4, 2));
    mask_rows[15] = 0;
}

static void test_keys_in_float8(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/v/dtype", "v: dtype is float16, must be float8_e4m3fn as k's", p.k.dtype = ATTN_F8E4M3);
    SAYS(forward, INVALID, "/v/dtype", "v: dtype is float8_e4m3fn, must be float16 as k's", p.v.dtype = ATTN_F8E4M3);
    SAYS(fp8, INVALID, "/k/dtype", "k: dtype is float16, must be float8_e4m3fn as q's", p.k.dtype = ATTN_F16);
    SAYS(forward, INVALID, "/q_scale", "q_scale: q has dtype float16, scales are for float8_e4m3fn",
         p.k.dtype = p.v.dtype = ATTN_F8E4M3, p.q_scale = TENSOR(scales, ATTN_F32, 2, 2));
    SAYS(forward, INVALID, "/v_scale", "v_scale: v has dtype float16, scales are for float8_e4m3fn",
         p.v_scale = TENSOR(scales, ATTN_F32, 2, 2));
    SAYS(backward, UNSUPPORTED, "/k/dtype",
         "k: dtype is float8_e4m3fn, backward supports float32, float16 and bfloat16",
         p.k.dtype = p.v.dtype = ATTN_F8E4M3);
    PASSES(forward, p.k.dtype = p.v.dtype = ATTN_F8E4M3);
    PASSES(forward, p.k.dtype = p.v.dtype = ATTN_F8E4M3, p.k_scale = TENSOR(scales, ATTN_F32, 2, 2));
}

static void test_a_mask_of_the_last_keys(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/keep_mask/shape/3", "keep_mask: shape[3] is 5, must be at most 4, the keys of k",
         p.keep_mask = TENSOR(keep, ATTN_U8, 1, 1, 1, 5), p.keep_mask_at_end = true);
    SAYS(forward, INVALID, "/keep_mask/shape/3", "keep_mask: shape[3] is 3, must be 4, the keys of k",
         p.keep_mask = TENSOR(keep, ATTN_U8, 1, 1, 1, 3));
    SAYS(forward, INVALID, "/keep_mask_at_end", "keep_mask_at_end: is true, but keep_mask is not given",
         p.keep_mask_at_end = true);
    for (int n = 0; n <= 4; n++)
        PASSES(backward, p.keep_mask = TENSOR(keep, ATTN_U8, 1, 1, 3, n), p.keep_mask_at_end = true);
}

static void test_fp8(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/q_scale", "q_scale: q has dtype float16, scales are for float8_e4m3fn",
         p.q_scale = TENSOR(scales, ATTN_F32, 2, 2));
    SAYS(forward, INVALID, "/v_scale", "v_scale: v has dtype float16, scales are for float8_e4m3fn",
         p.v_scale = TENSOR(scales, ATTN_F32, 2, 2));
    SAYS(fp8, INVALID, "/k_scale/shape/1", "k_scale: shape[1] is 8, must be 1 or 2, the heads of k",
         p.k_scale = TENSOR(zeros, ATTN_F32, 2, 8));
    SAYS(fp8, INVALID, "/k_scale/data", "k_scale: [1, 0] is inf, must be finite", scales[2] = INFINITY;
         p.q_scale = p.v_scale = TENSOR(zeros, ATTN_F32, 2, 2));
    scales[2] = 0;
    SAYS(backward, UNSUPPORTED, "/q/dtype",
         "q: dtype is float8_e4m3fn, backward supports float32, float16 and bfloat16",
         p.q.dtype = p.k.dtype = p.v.dtype = ATTN_F8E4M3);
}

static void test_a_float8_scale_is_of_every_head_and_row_or_of_all(void **state)
{
    (void)state;
    PASSES(fp8, p.q_scale = TENSOR(scales, ATTN_F32, 1));
    PASSES(fp8, p.k_scale = TENSOR(scales, ATTN_F32, 2));
    PASSES(fp8, p.v_scale = TENSOR(scales, ATTN_F32, 2, 1));
    PASSES(fp8, p.q_scale = TENSOR(scales, ATTN_F32, 1, 2); p.k_scale = TENSOR(scales, ATTN_F32, 1, 1));
    SAYS(fp8, INVALID, "/q_scale/shape/0",
         "q_scale: shape[0] is 3, must be 1 or 2, the heads of k; one dimension is that of the heads, and a scale of "
         "each batch row is [B, 1]",
         p.q_scale = TENSOR(zeros, ATTN_F32, 3));
    SAYS(fp8, INVALID, "/q_scale/shape/0", "q_scale: shape[0] is 3, must be 1 or 2, the batch of q",
         p.q_scale = TENSOR(zeros, ATTN_F32, 3, 2));
    SAYS(fp8, INVALID, "/q_scale/shape",
         "q_scale: shape [2, 2, 1] has 3 dimensions, must have 1 or 2: [1 or Hk] or [1 or B, 1 or Hk]",
         p.q_scale = TENSOR(zeros, ATTN_F32, 2, 2, 1));
    SAYS(fp8, INVALID, "/v_scale/data", "v_scale: [0] is nan, must be finite", scales[0] = NAN;
         p.q_scale = p.k_scale = TENSOR(zeros, ATTN_F32, 1); p.v_scale = TENSOR(scales, ATTN_F32, 1));
    scales[0] = 0;
}

static void test_results_and_gradients(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/out/dtype", "out: dtype is float8_e4m3fn, must be float32, float16 or bfloat16",
         p.out.dtype = ATTN_F8E4M3);
    SAYS(forward, INVALID, "/out/shape/3", "out: shape[3] is 16, must be 8, the head size of v", p.out.shape[3] = 16);
    SAYS(bhsd, INVALID, "/out/shape/1", "out: shape[1] is 3, must be 8, the heads of q",
         p.out = TENSOR(zeros, ATTN_F16, 2, 3, 8, 8));
    SAYS(forward, INVALID, "/lse/dtype", "lse: dtype is float16, must be float32", p.lse.dtype = ATTN_F16);
    SAYS(forward, INVALID, "/lse/shape/1", "lse: shape[1] is 3, must be 8, the heads of q",
         p.lse = TENSOR(zeros, ATTN_F32, 2, 3, 8));
    SAYS(backward, INVALID, "/dout", "dout: is required, the gradient of the loss with respect to out",
         p.dout.rank = 0);
    SAYS(backward, INVALID, "/out", "out: is required with lse (give both or neither)", p.out.rank = 0);
    SAYS(backward, INVALID, "/lse", "lse: is required with out (give both or neither)", p.lse.rank = 0);
    SAYS(backward, INVALID, "/dsinks", "dsinks: sinks is not given", p.dsinks = TENSOR(zeros, ATTN_F32, 8));
    SAYS(backward, INVALID, "/dbias", "dbias: bias is not given", p.dbias = TENSOR(zeros, ATTN_F32, 1, 1, 1, 4));
    SAYS(backward, INVALID, "/dalibi_slopes", "dalibi_slopes: alibi_slopes is not given",
         p.dalibi_slopes = TENSOR(zeros, ATTN_F32, 8));
    SAYS(backward, INVALID, "/dbias/shape/1", "dbias: shape[1] is 8, must be 1 as bias's",
         p.bias = TENSOR(zeros, ATTN_F32, 2, 1, 3, 4);
         p.dbias = TENSOR(zeros, ATTN_F32, 2, 8, 3, 4));
    SAYS(backward, INVALID, "/dalibi_slopes/shape", "dalibi_slopes: shape [8] has 1 dimensions, must have 2: [B, H]",
         p.alibi_slopes = TENSOR(slopes, ATTN_F32, 2, 8);
         p.dalibi_slopes = TENSOR(zeros, ATTN_F32, 8));
    SAYS(backward, INVALID, "/dq/dtype", "dq: dtype is bfloat16, must be float16 as q's, or float32",
         p.dq.dtype = ATTN_BF16);
    SAYS(backward, INVALID, "/dk/shape/2", "dk: shape[2] is 8, must be 2, the heads of k", p.dk.shape[2] = 8);
    SAYS(backward, INVALID, "/dlse/shape/2", "dlse: shape[2] is 4, must be 3, the queries of q",
         p.dlse = TENSOR(zeros, ATTN_F32, 2, 8, 4));
}

static void test_memory(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/q/stride/3", "q: stride[3] is 2, must be 1", p.q.stride[3] = 2);
    SAYS(forward, INVALID, "/k/stride/0", "k: stride[0] is -5, must be at least 0", p.k.stride[0] = -5);
    SAYS(forward, INVALID, "/out/stride/1", "out: stride[1] is 0, must be at least 1 where 3 results are written",
         p.out.stride[1] = 0);
    SAYS(forward, TOO_LARGE, "/v/stride", "v: its strides reach past 2^63 bytes", p.v.stride[1] = INT64_MAX / 4);
    SAYS(forward, TOO_LARGE, "/v/stride", "v: its strides reach past 2^63 bytes", p.v.stride[1] = INT64_MAX);
    SAYS(forward, INVALID, "/k/data", "k: has no data", p.k.data = NULL);
    SAYS(backward, INVALID, "/out/data", "out: has no data", p.out.data = NULL);
    SAYS(forward, INVALID, "/v/data", "v: data is not aligned to 2 bytes", p.v.data = zeros + 1);
    SAYS(forward, INVALID, "/lse/data", "lse: data is not aligned to 4 bytes", p.lse.data = zeros + 2);
}

static void test_options(void **state)
{
    (void)state;
    SAYS(forward, INVALID, "/scale", "scale: is inf, must be between -3.4e38 and 3.4e38 (a float32)",
         p.has_scale = true;
         p.scale = INFINITY);
    SAYS(forward, INVALID, "/scale", "scale: is nan, must be between -3.4e38 and 3.4e38 (a float32)",
         p.has_scale = true;
         p.scale = NAN);
    SAYS(forward, INVALID, "/scale", "scale: is 1e+39, must be between -3.4e38 and 3.4e38 (a float32)",
         p.has_scale = true;
         p.scale = 1e39);
    SAYS(forward, INVALID, "/scale", "scale: is -3.5e+38, must be between -3.4e38 and 3.4e38 (a float32)",
         p.has_scale = true;
         p.scale = -3.5e38);
    SAYS(forward, INVALID, "/softcap", "softcap: is -1, must be 0 or between 1.18e-38 and 3.4e38 (a float32)",
         p.softcap = -1);
    SAYS(forward, INVALID, "/softcap", "softcap: is nan, must be 0 or between 1.18e-38 and 3.4e38 (a float32)",
         p.softcap = NAN);
    SAYS(forward, INVALID, "/softcap", "softcap: is 1e+39, must be 0 or between 1.18e-38 and 3.4e38 (a float32)",
         p.softcap = 1e39);
    SAYS(forward, INVALID, "/softcap", "softcap: is 1e-39, must be 0 or between 1.18e-38 and 3.4e38 (a float32)",
         p.softcap = 1e-39);
    SAYS(forward, INVALID, "/window/0", "window: [0] is -2, must be at least 0, or -1 for unbounded",
         p.window_left = -2);
    SAYS(forward, INVALID, "/window/1", "window: [1] is -7, must be at least 0, or -1 for unbounded",
         p.window_right = -7);
    SAYS(forward, INVALID, "/dropout_p", "dropout_p: is 1, must be at least 0 and below 1", p.dropout_p = 1);
    SAYS(forward, INVALID, "/dropout_p", "dropout_p: is -0.1, must be at least 0 and below 1", p.dropout_p = -0.1);
    SAYS(forward, INVALID, "/dropout_p", "dropout_p: is nan, must be at least 0 and below 1", p.dropout_p = NAN);
}

static attn_problem look(void)
{
    attn_problem p = forward();
    p.op = ATTN_OP_OBSERVE;
    p.out = p.lse = p.v = (attn_tensor){ 0 };
    return p;
}

static attn_problem packed_look(void)
{
    attn_problem p = packed();
    p.op = ATTN_OP_OBSERVE;
    p.observe.sequence = 1;
    return p;
}

static void test_what_an_observe_looks_at_is_bounded(void **state)
{
    (void)state;
    attn_error err;
    attn_problem good[] = { look(), packed_look() };
    for (size_t i = 0; i < ARRAY_SIZE(good); i++)
        if (attn_check(&good[i], &err) != ATTN_OK) fail_msg("%s", err.text);
    SAYS(look, INVALID, "/k", "k: is required; an observe has q and k", p.k.rank = 0);
    SAYS(look, INVALID, "/lse", "lse: is not given", p.observe.given_lse = true);
    SAYS(look, INVALID, "/rows/0", "rows: [0] is 4, must be between 0 and 3, the queries of q", p.observe.rows[0] = 4);
    SAYS(look, INVALID, "/rows/1", "rows: [1] is 1, must be between 2 and 3, the queries of q", p.observe.rows[0] = 2,
         p.observe.rows[1] = 1);
    SAYS(look, INVALID, "/keys/1", "keys: [1] is 5, must be between 0 and 4, the keys of k", p.observe.keys[1] = 5);
    SAYS(look, INVALID, "/keys/1", "keys: [1] is -2, must be between 0 and 4, the keys of k", p.observe.keys[1] = -2);
    SAYS(look, INVALID, "/map/1", "map: [1] is 1025, must be between 1 and 1024", p.observe.map[0] = 3,
         p.observe.map[1] = 1025);
    SAYS(look, INVALID, "/top", "top: is 65, must be between 1 and 64", p.observe.top = 65);
    SAYS(look, INVALID, "/key_mass_rows", "key_mass_rows: is -1, must be at least 1, or 0 for all",
         p.observe.key_mass_rows = -1);
    SAYS(look, INVALID, "/sequence", "sequence: belongs to packed sequences, cu_seqlens_q", p.observe.sequence = 0);
    SAYS(packed_look, INVALID, "/sequence", "sequence: is 2, must be below 2, the sequences of cu_seqlens_q",
         p.observe.sequence = 2);
    SAYS(packed_look, INVALID, "/sequence",
         "sequence: is missing; weights, map, rows and keys are of one packed sequence", p.observe.sequence = -1,
         p.observe.rows[0] = 1);
    SAYS(packed_look, INVALID, "/rows/1", "rows: [1] is 7, must be between 0 and 4, the queries of the sequence",
         p.observe.rows[1] = 7);
}

static void test_outputs_of_an_observe_say_what_they_need(void **state)
{
    attn_problem p = look();
    attn_tensor t;
    attn_error err;
    (void)state;
    attn_observe_region(&p);
    assert_int_equal(attn_output(&p, ATTN_T_top_weights, ATTN_F32, &t, &err), ATTN_INVALID);
    assert_string_equal(err.text, "top: is missing, must be between 1 and 64 with top_keys");
    assert_int_equal(attn_output(&p, ATTN_T_map, ATTN_F32, &t, &err), ATTN_INVALID);
    assert_string_equal(err.text,
                        "map: is missing, must be [cells of queries, cells of keys], each between 1 and 1024");
    assert_int_equal(attn_output(&p, ATTN_T_out, ATTN_F32, &t, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "outputs: observe has no out");
    p.q.shape[1] = 1 << 20;
    p.observe.rows[1] = 1 << 20;
    assert_int_equal(attn_output(&p, ATTN_T_weights, ATTN_F32, &t, &err), ATTN_TOO_LARGE);
    assert_string_equal(err.text,
                        "observe: weights of 1048576 rows and 4 keys are 67108864 numbers, at most 16777216 are "
                        "answered; give a smaller region by rows and keys, or ask for map");
    p = packed_look();
    p.observe.sequence = -1, p.observe.map[0] = p.observe.map[1] = 1;
    assert_int_equal(attn_output(&p, ATTN_T_map, ATTN_F32, &t, &err), ATTN_INVALID);
    assert_string_equal(err.text, "sequence: is missing; map is of one packed sequence");
}

/* clang-format on */

/* clang-format on */

/* ---- Tests of the library's table of tensors: attn_check() accepts just what its rows say ------------------------ */

static attn_problem with(attn_tensor_id id, bool is_packed)
{
    const attn_axes *axes = &attn_tensors[id].axes;
    attn_problem p = is_packed ? packed() : backward();
    const attn_tensor_id of = axes->like == ATTN_TENSOR_COUNT ? id : (attn_tensor_id)axes->like;
    const struct {
        attn_tensor_id id;
        attn_tensor tensor;
    } others[] = {
        { ATTN_T_alibi_slopes, TENSOR(zeros, ATTN_F32, 2, 8) },
        { ATTN_T_bias, TENSOR(zeros, ATTN_F32, 2, 8, 3, 4) },
        { ATTN_T_keep_mask, TENSOR(zeros, ATTN_U8, 2, 8, 3, 4) },
        { ATTN_T_sinks, TENSOR(zeros, ATTN_F32, 8) },
        { ATTN_T_seqlens_q, TENSOR(zeros, ATTN_I32, 2) },
        { ATTN_T_seqlens_k, TENSOR(zeros, ATTN_I32, 2) },
        { ATTN_T_mask_startend_rows, TENSOR(zeros, ATTN_I32, 2, 1, 4, 2) },
    };
    if (id == ATTN_T_page_table) return is_packed ? paged_packed() : paged();
    if (id == ATTN_T_q_scale || id == ATTN_T_k_scale || id == ATTN_T_v_scale) {
        if (!is_packed) p = fp8();
        p.q.dtype = p.k.dtype = p.v.dtype = ATTN_F8E4M3;
        p.tensor[id] = TENSOR(zeros, ATTN_F32, 2, 2);
    }
    if (is_packed && (attn_tensors[id].role == ATTN_ROLE_IN_BACK || attn_tensors[id].role == ATTN_ROLE_OUT_BACK)) {
        p.op = ATTN_OP_BACKWARD;
        p.dout = TENSOR(zeros, ATTN_F16, 6, 8, 8);
    }
    if (attn_tensors[id].role == ATTN_ROLE_OUT_OBSERVE) {
        attn_error err;
        p.op = ATTN_OP_OBSERVE;
        p.observe.top = 2, p.observe.map[0] = 2, p.observe.map[1] = 3;
        if (is_packed) p.observe.sequence = 0;
        attn_observe_region(&p);
        if (attn_output(&p, id, ATTN_F32, &p.tensor[id], &err) != ATTN_OK) fail_msg("%s", err.text);
        p.tensor[id].data = zeros;
        return p;
    }
    if (of == ATTN_T_out || of == ATTN_T_lse) {
        p.out = is_packed ? TENSOR(zeros, ATTN_F16, 6, 8, 8) : TENSOR(zeros, ATTN_F16, 2, 3, 8, 8);
        p.lse = is_packed ? TENSOR(zeros, ATTN_F32, 8, 6) : TENSOR(zeros, ATTN_F32, 2, 8, 3);
    }
    for (size_t i = 0; i < ARRAY_SIZE(others); i++)
        if (of == others[i].id) p.tensor[of] = others[i].tensor;
    if (of != id) {
        p.tensor[id] = p.tensor[of];
        p.tensor[id].data = zeros;
        if (attn_tensors[id].dtypes == ATTN_RULE_F32) p.tensor[id].dtype = ATTN_F32;
    }
    return p;
}

static bool refuses_rank(const attn_problem *p, attn_tensor_id id)
{
    attn_error err = { 0 };
    char member[64];
    snprintf(member, sizeof member, "/%s/shape", attn_tensors[id].name);
    return attn_check(p, &err) != ATTN_OK && strcmp(err.member, member) == 0;
}

static void test_the_dtypes_of_a_row_are_those_that_pass(void **state)
{
    (void)state;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        unsigned pass = 0;
        for (int d = 0; d < ATTN_DTYPE_COUNT; d++)
            for (attn_dtype q = 0; q < ATTN_DTYPE_COUNT; q++) {
                attn_problem p = with((attn_tensor_id)id, id == ATTN_T_cu_seqlens_q || id == ATTN_T_cu_seqlens_k);
                if (q != p.q.dtype && (attn_tensor_dtypes(ATTN_T_q) >> q & 1)) {
                    if (attn_tensors[id].name[1] == '_') continue;
                    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
                        if (t == ATTN_T_q || attn_tensors[t].dtypes == ATTN_RULE_KEY ||
                            attn_tensors[t].dtypes == ATTN_RULE_GRADIENT)
                            p.tensor[t].dtype = q;
                    if (q == ATTN_F8E4M3 && attn_tensors[id].role <= ATTN_ROLE_OUT) p.op = ATTN_OP_FORWARD;
                }
                p.tensor[id].dtype = (attn_dtype)d;
                if (attn_check(&p, NULL) == ATTN_OK) pass |= 1u << d;
            }
        if (pass != attn_tensor_dtypes((attn_tensor_id)id))
            fail_msg("%s: 0x%x pass, its row says 0x%x", attn_tensors[id].name, pass,
                     attn_tensor_dtypes((attn_tensor_id)id));
    }
}

static void test_the_ranks_of_a_row_are_those_that_pass(void **state)
{
    (void)state;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_axes *axes = &attn_tensors[id].axes;
        if (axes->like < ATTN_TENSOR_COUNT) axes = &attn_tensors[axes->like].axes;
        unsigned pass = 0;
        for (int is_packed = 0; is_packed < 2; is_packed++)
            for (int rank = 1; rank <= ATTN_MAX_RANK; rank++) {
                if (is_packed ? axes->packed[0] == '\0' : id == ATTN_T_cu_seqlens_q || id == ATTN_T_cu_seqlens_k)
                    continue;
                attn_problem p = with((attn_tensor_id)id, is_packed);
                attn_error err = { 0 };
                if (attn_check(&p, &err) != ATTN_OK) fail_msg("%s: %s", attn_tensors[id].name, err.text);
                if (axes->kind == ATTN_AXES_OPTIONAL && rank == 1) p.alibi_slopes = TENSOR(zeros, ATTN_F32, 8);
                p.tensor[id].rank = rank;
                if (!refuses_rank(&p, (attn_tensor_id)id)) pass |= 1u << rank;
            }
        if (pass != attn_tensor_ranks((attn_tensor_id)id))
            fail_msg("%s: 0x%x pass, its row says 0x%x", attn_tensors[id].name, pass,
                     attn_tensor_ranks((attn_tensor_id)id));
    }
}

static void test_a_shape_as_a_client_reads_it(void **state)
{
    (void)state;
    static const struct {
        attn_tensor_id id;
        const char *text;
    } cases[] = {
        { ATTN_T_q, "[B, Sq, H, D]" },
        { ATTN_T_k, "[B, Sk, Hk, D]" },
        { ATTN_T_v, "[B, Sk, Hk, Dv]" },
        { ATTN_T_alibi_slopes, "float32 [H] or [B, H]" },
        { ATTN_T_bias, "float32 or q's dtype, [1 or B, 1 or H, 1 or Sq, Sk]" },
        { ATTN_T_keep_mask, "uint8, [1 or B, 1 or H, 1 or Sq, Sk]" },
        { ATTN_T_sinks, "float32 [H]" },
        { ATTN_T_cu_seqlens_q, "int32 [N + 1]" },
        { ATTN_T_cu_seqlens_k, "int32 [N + 1]" },
        { ATTN_T_seqlens_q, "int32 [B]" },
        { ATTN_T_seqlens_k, "int32 [B]" },
        { ATTN_T_page_table, "int32 [B, most]" },
        { ATTN_T_mask_startend_rows, "int32 [B, 1 or Hk or H, Sk, n]" },
        { ATTN_T_q_scale, "float32 [1 or Hk] or [1 or B, 1 or Hk]" },
        { ATTN_T_k_scale, "float32 [1 or Hk] or [1 or B, 1 or Hk]" },
        { ATTN_T_v_scale, "float32 [1 or Hk] or [1 or B, 1 or Hk]" },
        { ATTN_T_out, "[B, Sq, H, Dv]" },
        { ATTN_T_lse, "float32 [B, H, Sq]" },
        { ATTN_T_dout, "out's shape" },
        { ATTN_T_dlse, "float32, lse's shape" },
        { ATTN_T_dq, "float32 or q's dtype, q's shape" },
        { ATTN_T_dk, "float32 or q's dtype, k's shape" },
        { ATTN_T_dv, "float32 or q's dtype, v's shape" },
        { ATTN_T_dsinks, "float32, sinks's shape" },
        { ATTN_T_dbias, "float32, bias's shape" },
        { ATTN_T_dalibi_slopes, "float32, alibi_slopes's shape" },
        { ATTN_T_row_max, "float32, lse's shape" },
        { ATTN_T_entropy, "float32, lse's shape" },
        { ATTN_T_max_logit, "float32 [B, H]" },
        { ATTN_T_mean_entropy, "float32 [B, H]" },
        { ATTN_T_key_mass, "float32 [B, H, Sk]" },
        { ATTN_T_top_keys, "int32 [B, H, Sq, top]" },
        { ATTN_T_top_weights, "float32, top_keys's shape" },
        { ATTN_T_weights, "float32 [B, H, rows, keys]" },
        { ATTN_T_map, "float32 [B, H, m, n]" },
    };
    assert_int_equal(ARRAY_SIZE(cases), ATTN_TENSOR_COUNT);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[ATTN_SHAPE_BYTES], names[ATTN_DTYPE_LIST_BYTES];
        assert_string_equal(attn_tensor_shape(cases[i].id, text), cases[i].text);
        /* No text comes close to the size of its buffer, so none is cut off. */
        assert_true(strlen(text) + 20 < sizeof text);
        assert_true(strlen(attn_dtype_list((1u << ATTN_DTYPE_COUNT) - 1, names)) + 10 < sizeof names);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_an_observe_looks_at_is_bounded),
        cmocka_unit_test(test_outputs_of_an_observe_say_what_they_need),
        cmocka_unit_test(test_good_problems_pass),
        cmocka_unit_test(test_sequences_and_heads_are_bounded_even_where_they_hold_nothing),
        cmocka_unit_test(test_the_shapes_of_q_k_v),
        cmocka_unit_test(test_packed_lengths),
        cmocka_unit_test(test_lengths_are_at_most_the_room_that_there_is),
        cmocka_unit_test(test_packed_queries_take_padded_rows_of_keys),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_lengths_in_the_place_of_their_sums_are_recognised),
        cmocka_unit_test(test_the_other_layout_is_suspected_where_it_would_do),
        cmocka_unit_test(test_heads_that_do_not_divide_are_not_taken_for_another_layout),
        cmocka_unit_test(test_masks_and_biases),
        cmocka_unit_test(test_keys_in_float8),
        cmocka_unit_test(test_a_mask_of_the_last_keys),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_a_float8_scale_is_of_every_head_and_row_or_of_all),
        cmocka_unit_test(test_results_and_gradients),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_the_dtypes_of_a_row_are_those_that_pass),
        cmocka_unit_test(test_the_ranks_of_a_row_are_those_that_pass),
        cmocka_unit_test(test_a_shape_as_a_client_reads_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
