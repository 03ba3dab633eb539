/* test_attention.c: tests of attention.h: names, shapes, outputs, counts, devices and errors, and the choice of a
 * backend. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

#include "../testing.h"

static void test_dtypes_have_three_names_in_any_case(void **state)
{
    static const struct {
        const char *name;
        attn_dtype dtype;
        size_t bytes;
    } cases[] = {
        { "float32", ATTN_F32, 4 },    { "F32", ATTN_F32, 4 },
        { "fp32", ATTN_F32, 4 },       { "Float16", ATTN_F16, 2 },
        { "BF16", ATTN_BF16, 2 },      { "bfloat16", ATTN_BF16, 2 },
        { "f8_e4m3", ATTN_F8E4M3, 1 }, { "float8_e4m3fn", ATTN_F8E4M3, 1 },
        { "INT32", ATTN_I32, 4 },      { "i32", ATTN_I32, 4 },
        { "uint8", ATTN_U8, 1 },       { "U8", ATTN_U8, 1 },
    };
    attn_dtype dtype;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        assert_true(attn_dtype_parse(cases[n].name, &dtype));
        assert_int_equal(dtype, cases[n].dtype);
        assert_int_equal(attn_dtype_bytes(dtype), cases[n].bytes);
    }
    assert_false(attn_dtype_parse("float64", &dtype));
    assert_false(attn_dtype_parse("", &dtype));
    assert_string_equal(attn_dtype_name(ATTN_F8E4M3), "float8_e4m3fn");
    assert_true(attn_dtype_floating(ATTN_BF16));
    assert_false(attn_dtype_floating(ATTN_I32));
}

static void test_an_error_holds_status_member_and_text(void **state)
{
    attn_error err;
    char long_text[600];
    (void)state;
    assert_int_equal(attn_fail(&err, ATTN_INVALID, "/k/shape/2", "k: shape[%d] is %d", 2, 3), ATTN_INVALID);
    assert_int_equal(err.status, ATTN_INVALID);
    assert_string_equal(err.member, "/k/shape/2");
    assert_string_equal(err.text, "k: shape[2] is 3");
    assert_int_equal(attn_fail(NULL, ATTN_DEVICE, NULL, "nobody listens"), ATTN_DEVICE);
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = 0;
    attn_fail(&err, ATTN_INVALID, long_text, "%s", long_text);
    assert_int_equal(strlen(err.text), sizeof err.text - 1);
    assert_int_equal(strlen(err.member), sizeof err.member - 1);
    assert_string_equal(attn_status_name(ATTN_TOO_LARGE), "TOO_LARGE");
    assert_string_equal(attn_status_name(ATTN_STATUS_COUNT), "?");
}

static void test_sizes_are_multiplied_with_care(void **state)
{
    int64_t n;
    (void)state;
    assert_true(attn_shape_elements(3, (int64_t[]){ 2, 3, 5 }, &n) && n == 30);
    assert_true(attn_shape_elements(0, NULL, &n) && n == 1);
    assert_true(attn_shape_elements(3, (int64_t[]){ 2, 0, 5 }, &n) && n == 0);
    assert_false(attn_shape_elements(2, (int64_t[]){ 2, -3 }, &n));
    assert_false(attn_shape_elements(2, (int64_t[]){ INT64_C(1) << 32, INT64_C(1) << 31 }, &n));
    assert_false(attn_shape_elements(3, (int64_t[]){ INT64_C(1) << 32, INT64_C(1) << 32, 0 }, &n));
    assert_true(attn_shape_bytes(ATTN_BF16, 2, (int64_t[]){ 3, 5 }, &n) && n == 30);
    assert_false(attn_shape_bytes(ATTN_F32, 2, (int64_t[]){ INT64_C(1) << 31, INT64_C(1) << 30 }, &n));
}

static void test_outputs_have_the_shapes_of_the_contract(void **state)
{
    static const struct {
        const char *name;
        struct spec spec;
        attn_tensor_id id;
        attn_dtype dtype;
        int rank;
        int64_t shape[4];
    } cases[] = {
        { "out",
          SPEC(.B = 2, .Sq = 3, .Sk = 4, .H = 8, .Hk = 2, .D = 16, .Dv = 5),
          ATTN_T_out,
          ATTN_BF16,
          4,
          { 2, 3, 8, 5 } },
        { "lse",
          SPEC(.B = 2, .Sq = 3, .Sk = 4, .H = 8, .Hk = 2, .D = 16, .Dv = 5),
          ATTN_T_lse,
          ATTN_F32,
          3,
          { 2, 8, 3 } },
        { "out bhsd",
          SPEC(.B = 2, .Sq = 3, .Sk = 4, .H = 8, .Hk = 2, .layout = ATTN_BHSD, .Dv = 5),
          ATTN_T_out,
          ATTN_BF16,
          4,
          { 2, 8, 3, 5 } },
        { "lse bhsd",
          SPEC(.B = 2, .Sq = 3, .Sk = 4, .H = 8, .Hk = 2, .layout = ATTN_BHSD),
          ATTN_T_lse,
          ATTN_F32,
          3,
          { 2, 8, 3 } },
        { "out packed",
          SPEC(.sequences = 2, .q_lengths = { 3, 4 }, .k_lengths = { 5, 6 }),
          ATTN_T_out,
          ATTN_BF16,
          3,
          { 7, 2, 64 } },
        { "lse packed",
          SPEC(.sequences = 2, .q_lengths = { 3, 4 }, .k_lengths = { 5, 6 }),
          ATTN_T_lse,
          ATTN_F32,
          2,
          { 2, 7 } },
        { "dk",
          SPEC(.op = ATTN_OP_BACKWARD, .dtype = ATTN_F16, .B = 2, .Sq = 3, .Sk = 4, .H = 8, .Hk = 2, .D = 16),
          ATTN_T_dk,
          ATTN_F16,
          4,
          { 2, 4, 2, 16 } },
        { "dq packed",
          SPEC(.op = ATTN_OP_BACKWARD, .dtype = ATTN_F16, .sequences = 2, .q_lengths = { 3, 4 }, .k_lengths = { 5, 6 }),
          ATTN_T_dq,
          ATTN_F16,
          3,
          { 7, 2, 64 } },
        { "dbias",
          SPEC(.op = ATTN_OP_BACKWARD, .B = 2, .Sq = 3, .Sk = 4, .bias = 6),
          ATTN_T_dbias,
          ATTN_F32,
          4,
          { 2, 1, 3, 4 } },
        { "dsinks", SPEC(.op = ATTN_OP_BACKWARD, .H = 4, .Hk = 4, .sinks = 1), ATTN_T_dsinks, ATTN_F32, 1, { 4 } },
        { "dalibi_slopes [B, H]",
          SPEC(.op = ATTN_OP_BACKWARD, .B = 3, .alibi = 2),
          ATTN_T_dalibi_slopes,
          ATTN_F32,
          2,
          { 3, 2 } },
        { "dalibi_slopes [H]",
          SPEC(.op = ATTN_OP_BACKWARD, .B = 3, .alibi = 1),
          ATTN_T_dalibi_slopes,
          ATTN_F32,
          1,
          { 2 } },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture f;
        attn_tensor t;
        const bool back = cases[n].spec.op == ATTN_OP_BACKWARD;
        fixture_make(&f, &cases[n].spec);
        if (back) {
            assert_int_equal(attn_output(&f.p, cases[n].id, ATTN_F32, &t, NULL), ATTN_OK);
            assert_int_equal(t.dtype, ATTN_F32);
        }
        assert_int_equal(attn_output(&f.p, cases[n].id, back ? f.p.q.dtype : ATTN_BF16, &t, NULL), ATTN_OK);
        if (t.dtype != cases[n].dtype || t.rank != cases[n].rank ||
            memcmp(t.shape, cases[n].shape, (size_t)t.rank * sizeof *t.shape) || t.data)
            fail_msg("%s: dtype %s, rank %d, [%lld, %lld, %lld, %lld]", cases[n].name, attn_dtype_name(t.dtype), t.rank,
                     (long long)t.shape[0], (long long)t.shape[1], (long long)t.shape[2], (long long)t.shape[3]);
        fixture_clear(&f);
    }
}

static void test_outputs_that_do_not_exist_are_named(void **state)
{
    static const struct {
        attn_op op;
        attn_tensor_id id;
        attn_dtype dtype;
        attn_status status;
        const char *text;
    } cases[] = {
        { ATTN_OP_FORWARD, ATTN_T_dq, ATTN_F32, ATTN_NOT_FOUND, "outputs: forward has no dq" },
        { ATTN_OP_FORWARD, ATTN_T_q, ATTN_F32, ATTN_NOT_FOUND, "outputs: forward has no q" },
        { ATTN_OP_BACKWARD, ATTN_T_out, ATTN_F32, ATTN_NOT_FOUND, "outputs: backward has no out" },
        { ATTN_OP_BACKWARD, ATTN_T_dsinks, ATTN_F32, ATTN_NOT_FOUND,
          "outputs: dsinks needs sinks, which is not given" },
        { ATTN_OP_FORWARD, ATTN_T_out, ATTN_F8E4M3, ATTN_INVALID,
          "out_dtype: is float8_e4m3fn, must be float32, float16 or bfloat16" },
        { ATTN_OP_BACKWARD, ATTN_T_dq, ATTN_F16, ATTN_INVALID, "grad_dtype: is float16, must be float32, q's dtype" },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct spec s = SPEC(.op = cases[n].op);
        struct fixture f;
        attn_tensor t;
        attn_error err;
        fixture_make(&f, &s);
        assert_int_equal(attn_output(&f.p, cases[n].id, cases[n].dtype, &t, &err), cases[n].status);
        assert_string_equal(err.text, cases[n].text);
        fixture_clear(&f);
    }
}

static void test_work_is_counted_exactly(void **state)
{
    static const struct {
        struct spec spec;
        double pairs;
    } cases[] = {
        { SPEC(.B = 2, .H = 3, .Hk = 3, .Sq = 10, .Sk = 20), 2 * 3 * 200 },
        { SPEC(.H = 1, .Hk = 1, .Sq = 10, .Sk = 10, .causal = true), 55 },
        { SPEC(.H = 1, .Hk = 1, .Sq = 10, .Sk = 20, .causal = true), 155 },
        { SPEC(.H = 1, .Hk = 1, .Sq = 20, .Sk = 10, .causal = true), 55 },
        { SPEC(.H = 1, .Hk = 1, .Sq = 10, .Sk = 20, .causal = true, .alignment = ATTN_TOP_LEFT), 55 },
        { SPEC(.H = 1, .Hk = 1, .Sq = 10, .Sk = 10, .window_left = 2, .window_right = 1), 4 * 10 - 1 - 3 },
        { SPEC(.H = 2, .Hk = 1, .sequences = 2, .q_lengths = { 3, 4 }, .k_lengths = { 5, 4 }, .causal = true),
          2 * (3 + 4 + 5 + 10) },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture f;
        fixture_make(&f, &cases[n].spec);
        assert_true(attn_flops(&f.p) == cases[n].pairs * 4 * 64);
        f.p.op = ATTN_OP_BACKWARD;
        assert_true(attn_flops(&f.p) == cases[n].pairs * 10 * 64);
        fixture_clear(&f);
    }
}

static double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void test_work_of_two_thousand_million_empty_rows_is_counted_at_once(void **state)
{
    const int64_t rows = INT32_MAX;
    (void)state;
    for (int causal = 0; causal < 2; causal++) {
        attn_problem p = ATTN_PROBLEM_INIT;
        const double began = seconds();
        p.q = attn_tensor_make(NULL, ATTN_F16, 4, (int64_t[]){ rows, 0, 1, 1 });
        p.k = p.v = p.q;
        p.causal = causal;
        assert_true(attn_flops(&p) == 0);
        p.q.shape[1] = p.k.shape[1] = p.v.shape[1] = 4;
        assert_true(attn_flops(&p) == (double)rows * (causal ? 10 : 16) * 4);
        assert_true(seconds() - began < 0.1);
    }
}

static void test_scores_that_flashmask_hides_are_not_work(void **state)
{
    static const struct {
        bool causal;
        int n;
        int32_t bounds[4];
        /* how many of the 8 x 4 pairs of a query and a key the mask lets through */
        double scores;
    } cases[] = {
        { true, 1, { 8 }, 4 + 3 + 2 + 1 },   { true, 1, { 0 }, 0 },
        { true, 2, { 6, 8 }, 2 + 1 },        { false, 2, { 6, 2 }, 4 * 4 },
        { false, 4, { 4, 6, 0, 1 }, 4 * 5 }, { false, 4, { 2, 6, 4, 8 }, 4 * 2 },
        { false, 4, { 0, 8, 0, 8 }, 0 },     { false, 2, { 8, 0 }, 4 * 8 },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        int32_t bounds[16];
        attn_problem p = ATTN_PROBLEM_INIT;
        for (int i = 0; i < 4 * cases[n].n; i++) bounds[i] = cases[n].bounds[i % cases[n].n];
        p.q = p.out = attn_tensor_make(NULL, ATTN_F16, 4, (int64_t[]){ 1, 8, 6, 16 });
        p.k = p.v = attn_tensor_make(NULL, ATTN_F16, 4, (int64_t[]){ 1, 4, 2, 16 });
        p.causal = cases[n].causal;
        p.alignment = ATTN_BOTTOM_RIGHT;
        assert_true(attn_scores(&p) == (cases[n].causal ? 4 + 3 + 2 + 1 : 32) * 6);
        p.mask_startend_rows = attn_tensor_make(bounds, ATTN_I32, 4, (int64_t[]){ 1, 1, 4, cases[n].n });
        if (attn_scores(&p) != cases[n].scores * 6) print_error("case %zu: %g\n", n, attn_scores(&p));
        assert_true(attn_scores(&p) == cases[n].scores * 6);
    }
}

static void test_an_empty_problem_needs_no_workspace_and_runs_beside_others(void **state)
{
    const struct spec s = SPEC(.causal = true);
    static const char *const backends[] = { "cpu", "reference" };
    struct fixture f;
    attn_error err;
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(backends); n++) {
        attn_problem problems[3] = { ATTN_PROBLEM_INIT, ATTN_PROBLEM_INIT, ATTN_PROBLEM_INIT };
        attn_plan plans[3];
        struct bench b;
        size_t alone, together, nothing;
        fixture_make(&f, &s);
        bench_open(&b, backends[n], 0);
        problems[0].q = problems[0].out = attn_tensor_make(NULL, ATTN_F16, 4, (int64_t[]){ ATTN_MAX_HEADS, 0, 1, 1 });
        problems[0].k = problems[0].v = problems[0].q;
        assert_int_equal(attn_check(&problems[0], &err), ATTN_OK);
        assert_true(attn_is_empty(&problems[0]) && !attn_is_empty(&f.p));
        problems[1] = f.p;
        problems[2] = problems[0];
        for (int i = 0; i < 3; i++)
            assert_int_equal(attn_plan_make(attn_device_capabilities(b.device), &problems[i], &plans[i], &err),
                             ATTN_OK);
        assert_int_equal(attn_workspace(attn_device_capabilities(b.device), &plans[1], 1, &alone, &err), ATTN_OK);
        assert_int_equal(attn_workspace(attn_device_capabilities(b.device), plans, 3, &together, &err), ATTN_OK);
        assert_int_equal(attn_workspace(attn_device_capabilities(b.device), plans, 1, &nothing, &err), ATTN_OK);
        assert_int_equal(together, alone);
        assert_int_equal(nothing, 0);
        memset(f.p.lse.data, 0xff, 4);
        assert_int_equal(attn_run(b.stream, plans, 3, NULL, &err), ATTN_OK);
        assert_false(isnan(*(float *)f.p.lse.data)); /* lse was NaN before, so the run has written it */
        bench_close(&b);
        fixture_clear(&f);
    }
}

/* A plan (the choice of a kernel for a problem) also serves the problem at other addresses, unless the alignment of a
 * tensor changes. */
static void test_a_plan_moves_with_its_problem(void **state)
{
    const struct spec s = SPEC(.causal = true);
    static const char *const backends[] = { "cpu", "reference" };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(backends); n++) {
        struct fixture f, elsewhere;
        struct bench b, other;
        attn_plan made, moved;
        attn_error err;
        fixture_make(&f, &s);
        fixture_make(&elsewhere, &s);
        bench_open(&b, backends[n], 0);
        bench_open(&other, backends[1 - n], 0);
        const attn_capabilities *const can = attn_device_capabilities(b.device);
        assert_int_equal(attn_plan_make(can, &f.p, &made, &err), ATTN_OK);
        assert_int_equal(made.unaligned, 0);
        memset(elsewhere.p.lse.data, 0xff, 4);
        assert_int_equal(attn_plan_move(can, &made, &elsewhere.p, &moved, &err), ATTN_OK);
        assert_ptr_equal(moved.kernel, made.kernel);
        assert_ptr_equal(moved.problem, &elsewhere.p);
        assert_int_equal(attn_run(b.stream, &moved, 1, NULL, &err), ATTN_OK);
        assert_false(isnan(*(float *)elsewhere.p.lse.data)); /* lse was NaN before, so the run has written it */

        attn_problem shifted = elsewhere.p;
        shifted.out.data = (char *)shifted.out.data + 4;
        assert_int_equal(attn_plan_move(can, &made, &shifted, &moved, &err), ATTN_OK);
        assert_int_equal(moved.unaligned, ATTN_TENSOR_BIT(out));

        assert_int_equal(attn_plan_move(attn_device_capabilities(other.device), &made, &f.p, &moved, &err), ATTN_OK);
        assert_ptr_not_equal(moved.kernel, made.kernel);
        bench_close(&other);
        bench_close(&b);
        fixture_clear(&elsewhere);
        fixture_clear(&f);
    }
}

/* Each tensor and option that a problem has must set its own bit of attn_features(), and no other bit. */
static void test_every_tensor_and_every_option_is_a_feature(void **state)
{
    const uint64_t basic = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v);
    attn_problem plain = ATTN_PROBLEM_INIT;
    (void)state;
    plain.q = plain.k = plain.v = attn_tensor_make(NULL, ATTN_BF16, 4, (int64_t[]){ 1, 8, 4, 64 });
    assert_int_equal(attn_features(&plain), basic);
    for (attn_op op = ATTN_OP_FORWARD; op < ATTN_OP_COUNT; op++)
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            attn_problem p = plain;
            const attn_role role = attn_tensors[id].role;
            const bool of_values = id == ATTN_T_v || id == ATTN_T_v_scale, look = op == ATTN_OP_OBSERVE;
            const bool counts = look ? (role == ATTN_ROLE_IN && !of_values) || id == ATTN_T_lse ||
                                           role == ATTN_ROLE_OUT_OBSERVE
                                : op == ATTN_OP_BACKWARD ? role != ATTN_ROLE_OUT_OBSERVE
                                                         : role == ATTN_ROLE_IN || role == ATTN_ROLE_OUT;
            p.op = op;
            p.tensor[id] = plain.q;
            assert_int_equal(attn_features(&p),
                             (look ? basic & ~ATTN_TENSOR_BIT(v) : basic) | (counts ? UINT64_C(1) << id : 0));
        }

    attn_problem p[14];
    uint64_t want[14];
    int n = 0;
#define CASE(bits, change) (p[n] = plain, p[n].change, want[n++] = (bits))
    CASE(ATTN_OPTION_BIT(CAUSAL), causal = true);
    CASE(ATTN_OPTION_BIT(WINDOW), window_left = 0);
    CASE(ATTN_OPTION_BIT(WINDOW), window_right = 3);
    CASE(ATTN_OPTION_BIT(TOP_LEFT), alignment = ATTN_TOP_LEFT);
    CASE(ATTN_OPTION_BIT(GROUPED), k.shape[2] = 2);
    CASE(ATTN_OPTION_BIT(SCALE), has_scale = true); /* the scale is 0, outside 1e-6 to 1e30 */
    CASE(0, scale = -1);
    CASE(ATTN_OPTION_BIT(SOFTCAP), softcap = 5);
    CASE(ATTN_OPTION_BIT(DROPOUT), dropout_p = 0.1);
    CASE(ATTN_OPTION_BIT(KEY_DTYPE), k.dtype = ATTN_F8E4M3);
    CASE(0, keep_mask_at_end = true);
    CASE(0, deterministic = true); /* `deterministic` sets no bit in a forward, which is always deterministic */
    CASE(0, layout = ATTN_BHSD);   /* `layout` sets no bit, because a layout changes only strides */
#undef CASE
    for (int i = 0; i < n; i++)
        if (attn_features(&p[i]) != (basic | want[i]))
            fail_msg("case %d: %llx", i, (unsigned long long)attn_features(&p[i]));

    attn_problem backward = plain;
    backward.op = ATTN_OP_BACKWARD, backward.deterministic = true;
    assert_int_equal(attn_features(&backward), basic | ATTN_OPTION_BIT(DETERMINISTIC));
    backward.deterministic = false;
    backward.out = backward.dout = attn_tensor_make(NULL, ATTN_F32, 4, (int64_t[]){ 1, 8, 4, 64 });
    assert_int_equal(attn_features(&backward), basic | ATTN_TENSOR_BIT(out) | ATTN_TENSOR_BIT(dout) |
                                                   ATTN_OPTION_BIT(OUT_DTYPE) | ATTN_OPTION_BIT(DOUT_DTYPE));
    for (int id = ATTN_T_dq; id <= ATTN_T_dv; id++) {
        attn_problem wide = plain;
        wide.op = ATTN_OP_BACKWARD;
        wide.tensor[id] = attn_tensor_make(NULL, ATTN_F32, 4, (int64_t[]){ 1, 8, 4, 64 });
        assert_int_equal(attn_features(&wide), basic | UINT64_C(1) << id | ATTN_OPTION_BIT(GRAD_DTYPE));
    }
    attn_problem fp8 = plain;
    fp8.out = plain.q;
    fp8.q.dtype = fp8.k.dtype = fp8.v.dtype = ATTN_F8E4M3; /* float8 inputs have `out` in bfloat16 by default */
    assert_int_equal(attn_features(&fp8), basic | ATTN_TENSOR_BIT(out));
    attn_problem tail = plain;
    tail.keep_mask = attn_tensor_make(NULL, ATTN_U8, 4, (int64_t[]){ 1, 1, 1, 3 }), tail.keep_mask_at_end = true;
    assert_int_equal(attn_features(&tail), basic | ATTN_TENSOR_BIT(keep_mask) | ATTN_OPTION_BIT(KEEP_MASK_AT_END));
}

static void test_backends_are_found_by_name(void **state)
{
    const char *const *names = attn_backends();
    attn_device *device;
    attn_error err;
    bool cpu = false, reference = false, paper = false;
    (void)state;
    for (; *names; names++) {
        cpu |= !strcmp(*names, "cpu"), reference |= !strcmp(*names, "reference"), paper |= !strcmp(*names, "paper");
        assert_int_equal(attn_is_gpu(*names), strcmp(*names, "cuda") == 0);
    }
    assert_true(cpu && reference && paper && !attn_is_gpu("tpu"));
    assert_int_equal(attn_device_count("reference"), 1);
    assert_int_equal(attn_device_count("tpu"), 0);
    assert_int_equal(attn_device_open("tpu", 0, NULL, &device, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "there is no backend 'tpu' in this build");
    assert_int_equal(attn_device_open("reference", 1, NULL, &device, &err), ATTN_NOT_FOUND);
    assert_string_equal(err.text, "backend reference has 1 devices, there is no number 1");
    attn_device_close(NULL);
    attn_stream_close(NULL);
}

/* The backend "paper" computes only what the paper on FlashAttention-2 describes. Its errors must name whatever it does
 * not compute. */
static void test_what_paper_does_not_compute_is_named(void **state)
{
    static const struct {
        struct spec spec;
        const char *says;
    } cases[] = {
        { SPEC(.causal = true), NULL },
        { SPEC(.op = ATTN_OP_BACKWARD, .window_left = 3, .window_right = 0), NULL },
        { SPEC(.sinks = 1), "sinks: no kernel of paper takes it in a forward" },
        { SPEC(.op = ATTN_OP_BACKWARD, .alibi = 1), "alibi_slopes: no kernel of paper takes it in a backward" },
        { SPEC(.H = 4, .Hk = 2),
          "no kernel of paper takes a forward where several query heads read one key/value head" },
        { SPEC(.softcap = 5), "no kernel of paper takes a forward where softcap is not 0" },
    };
    struct bench b;
    (void)state;
    bench_open(&b, "paper", 0);
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture f;
        attn_plan plan;
        attn_error err = { 0 };
        fixture_make(&f, &cases[n].spec);
        const attn_status status = attn_plan_make(attn_device_capabilities(b.device), &f.p, &plan, &err);
        assert_int_equal(status, cases[n].says ? ATTN_UNSUPPORTED : ATTN_OK);
        if (cases[n].says) assert_string_equal(err.text, cases[n].says);
        fixture_clear(&f);
    }
    bench_close(&b);
}

static void test_a_head_size_that_no_kernel_takes_is_named(void **state)
{
    static const struct {
        struct spec spec;
        const char *says;
    } cases[] = {
        { SPEC(.D = 128, .Dv = 128), NULL },
        { SPEC(.D = 129, .Dv = 8), "q: shape[3] is 129, no kernel of cpu takes more than 128 in a forward" },
        { SPEC(.D = 8, .Dv = 1024, .op = ATTN_OP_BACKWARD),
          "v: shape[3] is 1024, no kernel of cpu takes more than 128 in a backward" },
    };
    struct bench b;
    (void)state;
    bench_open(&b, "cpu", 0);
    const attn_capabilities *const whole = attn_device_capabilities(b.device);
    attn_capabilities narrow = *whole;
    attn_kernel kernels[ARRAY_SIZE(narrow.kernels)];
    for (int n = 0; n < whole->kernel_count; n++) {
        kernels[n] = *whole->kernels[n];
        kernels[n].head_dim = 128;
        narrow.kernels[n] = &kernels[n];
    }
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct fixture f;
        attn_plan plan;
        attn_error err = { 0 };
        fixture_make(&f, &cases[n].spec);
        const attn_status status = attn_plan_make(&narrow, &f.p, &plan, &err);
        assert_int_equal(status, cases[n].says ? ATTN_UNSUPPORTED : ATTN_OK);
        if (cases[n].says) assert_string_equal(err.text, cases[n].says);
        fixture_clear(&f);
    }
    bench_close(&b);
}

static void test_outputs_without_memory_do_not_run(void **state)
{
    const struct spec s = SPEC(.causal = true);
    struct fixture f;
    struct bench b;
    attn_error err;
    (void)state;
    fixture_make(&f, &s);
    bench_open(&b, "reference", 0);
    f.p.lse.data = NULL;
    assert_int_equal(attn_forward(b.stream, &f.p, NULL, &err), ATTN_INVALID);
    assert_string_equal(err.text, "lse: has no memory");
    f.p.lse.rank = 0;
    assert_int_equal(attn_forward(b.stream, &f.p, NULL, &err), ATTN_OK);
    assert_int_equal(attn_run(b.stream, NULL, 0, NULL, &err), ATTN_OK);
    bench_close(&b);
    fixture_clear(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_have_three_names_in_any_case),
        cmocka_unit_test(test_an_error_holds_status_member_and_text),
        cmocka_unit_test(test_sizes_are_multiplied_with_care),
        cmocka_unit_test(test_outputs_have_the_shapes_of_the_contract),
        cmocka_unit_test(test_outputs_that_do_not_exist_are_named),
        cmocka_unit_test(test_work_is_counted_exactly),
        cmocka_unit_test(test_work_of_two_thousand_million_empty_rows_is_counted_at_once),
        cmocka_unit_test(test_scores_that_flashmask_hides_are_not_work),
        cmocka_unit_test(test_an_empty_problem_needs_no_workspace_and_runs_beside_others),
        cmocka_unit_test(test_a_plan_moves_with_its_problem),
        cmocka_unit_test(test_every_tensor_and_every_option_is_a_feature),
        cmocka_unit_test(test_backends_are_found_by_name),
        cmocka_unit_test(test_outputs_without_memory_do_not_run),
        cmocka_unit_test(test_what_paper_does_not_compute_is_named),
        cmocka_unit_test(test_a_head_size_that_no_kernel_takes_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
