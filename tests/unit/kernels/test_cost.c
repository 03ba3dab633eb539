/* test_cost.c: tests of kernels/cost.c, which estimates the time of a problem, and of kernels/strange.c, which finds
 * rows whose scores leave float32's range. Estimates are compared with each other; `build/cost-bench` compares them
 * with measured times. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "../testing.h"
#include "kernels/cpu/simd.h"
#include "kernels/strange.h"

enum { S = 256, MOST_COLUMNS = 64 };

/* A problem with S x S scores, and its memory. Tensors are float16 unless a test says otherwise. */
struct problem {
    attn_problem p;
    attn_plan plan;
    attn_device_info info;
    attn_kernel kernel;
    float bias[S * S], slopes[4], lse[4 * S];
    uint8_t keep[S * S];
    int32_t bounds[S];
    char numbers[3][S * 4 * MOST_COLUMNS * 4], results[8][S * 4 * MOST_COLUMNS * 4];
};

static struct problem *open_problem(attn_dtype dtype, int64_t H, int64_t D)
{
    struct problem *t = calloc(1, sizeof *t);
    const int64_t shape[] = { 1, S, H, D };
    assert_non_null(t);
    t->p = (attn_problem)ATTN_PROBLEM_INIT;
    for (int n = 0; n < 3; n++) {
        t->p.tensor[ATTN_T_q + n] = attn_tensor_make(t->numbers[n], dtype, 4, shape);
        for (int64_t x = 0; x < S * H * D; x++) attn_store(dtype, t->numbers[n], x, x % 7 - 3.0);
    }
    t->p.out = attn_tensor_make(t->results[0], dtype, 4, shape);
    t->p.lse = attn_tensor_make(t->lse, ATTN_F32, 3, (int64_t[]){ 1, H, S });
    return t;
}

/* Turns the problem into a backward that is given out and lse and computes all gradients. */
static void make_backward(struct problem *t)
{
    attn_error err;
    int n = 1;
    t->p.op = ATTN_OP_BACKWARD;
    t->p.dout = t->p.out;
    for (attn_tensor_id id = ATTN_T_dq; id <= ATTN_T_dv; id++, n++) {
        assert_int_equal(attn_output(&t->p, id, t->p.q.dtype, &t->p.tensor[id], &err), ATTN_OK);
        t->p.tensor[id].data = t->results[n];
    }
}

static void give_bias(struct problem *t)
{
    t->p.bias = attn_tensor_make(t->bias, ATTN_F32, 4, (int64_t[]){ 1, 1, S, S });
}

static void plan_by(struct problem *t, const char *kernel, int units)
{
    attn_error err;
    if (attn_check(&t->p, &err) != ATTN_OK) fail_msg("%s", err.text);
    t->kernel = (attn_kernel){ .name = kernel, .op = t->p.op };
    t->info.units = units;
    t->plan = (attn_plan){ .problem = &t->p, .kernel = &t->kernel, .features = attn_features(&t->p) };
}

static attn_cost closer(struct problem *t, const char *kernel, int units)
{
    plan_by(t, kernel, units);
    return attn_cost_closer(&t->info, &t->plan, ATTN_EVERYTHING, 7);
}

static double seconds(struct problem *t, const char *kernel, int units)
{
    plan_by(t, kernel, units);
    return attn_cost_of(&t->info, &t->plan).seconds;
}

/* ---- Tests of what each feature (option or tensor) adds to the expected time ------------------------------------- */

static void test_every_kernel_has_rates(void **state)
{
    static const char *const cuda[] = { "decode",      "sm90+decode", "generic+decode", "sm90_f8", "sm90",
                                        "sm90_latent", "sm90_wide",   "generic",        "simple" };
    (void)state;
    for (const char *const *name = simd_names; *name; name++)
        for (int dtype = ATTN_F32; dtype <= ATTN_F8E4M3; dtype++) {
            assert_true(attn_cost_knows(*name, ATTN_OP_FORWARD, (attn_dtype)dtype));
            if (ATTN_DTYPES_BACKWARD >> dtype & 1)
                assert_true(attn_cost_knows(*name, ATTN_OP_BACKWARD, (attn_dtype)dtype));
        }
    for (size_t n = 0; n < ARRAY_SIZE(cuda); n++) assert_true(attn_cost_knows(cuda[n], ATTN_OP_FORWARD, ATTN_F16));
    for (const char *const *backend = attn_backends(); *backend; backend++) {
        attn_device *device;
        attn_error err;
        if (attn_device_count(*backend) == 0) continue;
        assert_int_equal(attn_device_open(*backend, 0, NULL, &device, &err), ATTN_OK);
        attn_device_info info;
        attn_device_describe(device, &info);
        assert_true(info.units >= 1);
        const attn_capabilities *const can = attn_device_capabilities(device);
        for (int n = 0; n < can->kernel_count; n++)
            for (int dtype = 0; dtype < ATTN_DTYPE_COUNT; dtype++) {
                const attn_kernel *const kernel = can->kernels[n];
                if ((kernel->dtypes >> dtype & 1) && !attn_cost_knows(kernel->name, kernel->op, (attn_dtype)dtype))
                    fail_msg("cost.c has no rates of %s's kernel %s", *backend, kernel->name);
            }
        attn_device_close(device);
    }
    assert_false(attn_cost_knows("another", ATTN_OP_FORWARD, ATTN_F16));
}

/* Each add_...() function adds an option, with which the problem must cost more. */
static void add_bias(struct problem *t)
{
    give_bias(t);
}
static void add_keep(struct problem *t)
{
    memset(t->keep, 1, sizeof t->keep);
    t->p.keep_mask = attn_tensor_make(t->keep, ATTN_U8, 4, (int64_t[]){ 1, 1, S, S });
}
static void add_slopes(struct problem *t)
{
    t->p.alibi_slopes = attn_tensor_make(t->slopes, ATTN_F32, 1, t->p.q.shape + 2);
}
static void add_softcap(struct problem *t)
{
    t->p.softcap = 30;
}
static void add_dropout(struct problem *t)
{
    t->p.dropout_p = 0.1;
}
static void add_dbias(struct problem *t)
{
    t->p.dbias = t->p.bias;
    t->p.dbias.data = t->results[4];
}
static void add_dslopes(struct problem *t)
{
    t->p.dalibi_slopes = t->p.alibi_slopes;
    t->p.dalibi_slopes.data = t->results[5];
}
static void drop_forward(struct problem *t)
{
    t->p.out.rank = t->p.lse.rank = 0;
}

static void test_each_option_raises_the_estimate(void **state)
{
    static const struct {
        const char *kernel;
        bool backward;
        void (*before)(struct problem *), (*add)(struct problem *);
    } cases[] = {
        { "bf16", false, NULL, add_bias },
        { "bf16", false, NULL, add_keep },
        { "bf16", false, NULL, add_slopes },
        { "bf16", false, NULL, add_softcap },
        { "bf16", false, NULL, add_dropout },
        { "bf16", true, NULL, add_bias },
        { "bf16", true, NULL, add_dropout },
        { "bf16", true, add_bias, add_dbias },
        { "bf16", true, add_slopes, add_dslopes },
        { "bf16", true, NULL, drop_forward },
        { "portable", false, NULL, add_softcap },
        { "generic", false, NULL, add_bias },
        { "generic", true, NULL, add_dropout },
        { "generic", true, add_bias, add_dbias },
        { "generic", true, add_slopes, add_dslopes },
        { "sm90", true, NULL, drop_forward },
        { "sm90", false, NULL, add_softcap },
    };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(cases); n++) {
        struct problem *t = open_problem(ATTN_F16, 4, 64);
        if (cases[n].backward) make_backward(t);
        if (cases[n].before) cases[n].before(t);
        const double without = seconds(t, cases[n].kernel, 1);
        cases[n].add(t);
        const double with = seconds(t, cases[n].kernel, 1);
        if (!(with > 1.05 * without)) fail_msg("case %zu: %g s with it, %g s without", n, with, without);
        free(t);
    }
}

static void test_twice_the_heads_take_twice_as_long_and_twice_the_units_half(void **state)
{
    (void)state;
    struct problem *two = open_problem(ATTN_F16, 2, 64), *four = open_problem(ATTN_F16, 4, 64);
    const double launch = 1e-5;
    assert_true(fabs(seconds(four, "avx2", 1) - 2 * seconds(two, "avx2", 1)) < launch);
    assert_true(fabs(2 * seconds(four, "avx2", 2) - seconds(four, "avx2", 1)) < launch);
    assert_true(seconds(two, "avx2", 1000) > 0.05 * seconds(two, "avx2", 1));
    free(two);
    free(four);
}

/* Tensor cores compute dbias and dalibi_slopes of 16-bit inputs. A slow kernel computes those of float32 inputs. */
static void test_gradients_of_slopes_on_a_gpu_cost_many_times_the_others_in_float32_alone(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F32, 4, 64);
    add_slopes(t);
    make_backward(t);
    const double without = seconds(t, "generic", 132);
    add_dslopes(t);
    plan_by(t, "generic", 132);
    const attn_cost cost = attn_cost_of(&t->info, &t->plan);
    assert_true(cost.seconds > 3 * without);
    assert_string_equal(cost.because, "dalibi_slopes");
    free(t);

    static const char *const kernels[] = { "generic", "sm90" };
    for (size_t n = 0; n < ARRAY_SIZE(kernels); n++) {
        t = open_problem(ATTN_BF16, 4, 64);
        add_slopes(t);
        make_backward(t);
        const double alone = seconds(t, kernels[n], 132);
        add_dslopes(t);
        plan_by(t, kernels[n], 132);
        assert_true(attn_cost_of(&t->info, &t->plan).seconds > alone);
        assert_true(attn_cost_of(&t->info, &t->plan).seconds < 6 * alone);
        free(t);
    }
}

static void test_bytes_are_those_of_the_tensors_and_of_what_is_read_of_pages(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 4, 64);
    const double matrix = 2.0 * S * 4 * 64, lse = 4.0 * 4 * S;
    plan_by(t, "avx512", 2);
    assert_true(attn_cost_of(&t->info, &t->plan).bytes == 4 * matrix + lse);
    t->p.v.data = t->p.k.data; /* v shares the memory of k, which is read only once */
    assert_true(attn_cost_of(&t->info, &t->plan).bytes == 3 * matrix + lse);

    int32_t table[] = { 1 }, lengths[] = { 40 };
    t->p.v.data = t->numbers[2];
    t->p.k.shape[0] = t->p.v.shape[0] = S;
    t->p.k.shape[1] = t->p.v.shape[1] = 64;
    t->p.page_table = attn_tensor_make(table, ATTN_I32, 2, (int64_t[]){ 1, 1 });
    t->p.seqlens_k = attn_tensor_make(lengths, ATTN_I32, 1, (int64_t[]){ 1 });
    plan_by(t, "avx512", 2);
    assert_true(attn_cost_of(&t->info, &t->plan).bytes == 2 * matrix + lse + 4 + 4 + 2 * 2.0 * 40 * 4 * 64);
    free(t);
}

/* A thread block of a GPU computes 128 rows of queries with heads of 64 numbers, and takes as long for fewer rows or
 * smaller heads. */
static void test_a_gpu_takes_as_long_for_a_block_that_is_not_full(void **state)
{
    (void)state;
    struct problem *narrow = open_problem(ATTN_F32, 1, 1), *wide = open_problem(ATTN_F32, 1, 64);
    assert_true(seconds(narrow, "generic", 132) > 0.9 * seconds(wide, "generic", 132));
    const double whole = seconds(wide, "generic", 132);
    for (int n = ATTN_T_q; n <= ATTN_T_out; n += ATTN_T_out - ATTN_T_q) wide->p.tensor[n].shape[1] = 1;
    wide->p.lse.shape[2] = 1;
    assert_true(seconds(wide, "generic", 132) > 0.8 * whole);
    free(narrow);
    free(wide);
}

/* Above head size 256, a thread block of a GPU computes only 256 columns of out, dq, dk or dv. Each thread block
 * computes all scores of its rows for itself, so the scores are computed several times. */
static void test_wide_heads_of_16_bits_make_their_scores_for_each_256_columns(void **state)
{
    (void)state;
    struct problem *narrow = open_problem(ATTN_BF16, 1, 256), *wide = open_problem(ATTN_BF16, 1, 512);
    const double launch = 1e-5, back_launch = 2e-5;
    const double ratio = (seconds(wide, "generic", 1) - launch) / (seconds(narrow, "generic", 1) - launch);
    /* The cost is the number of columns of scores and of out that a row takes. With D 512, two blocks take 512 + 256
     * each. With D 256, one block takes 256 + 256. The ratio of the costs is 3. */
    assert_true(ratio > 2.4 && ratio < 3.1);
    make_backward(narrow);
    make_backward(wide);
    const double back = (seconds(wide, "generic", 1) - back_launch) / (seconds(narrow, "generic", 1) - back_launch);
    /* The cost of a backward is the number of columns that it multiplies per pair of a query and a key. With D 512, 2
     * blocks of dv take 512 + 256 each, and 4 blocks of dq and dk take 1024 + 256 each. With D 256, each of 5 products
     * takes 256. The ratio of the costs is 5.2. */
    assert_true(back > 4.2 && back < 5.3);
    free(narrow);
    free(wide);
}

/* On Hopper, a thread block computes at most 512 columns of out, and all scores of its rows. A wider head needs several
 * thread blocks, which compute the scores again. */
static void test_wide_heads_on_hopper_make_their_scores_for_each_512_columns(void **state)
{
    (void)state;
    struct problem *narrow = open_problem(ATTN_BF16, 1, 512), *wide = open_problem(ATTN_BF16, 1, 1024);
    const double launch = 1e-5;
    const double ratio = (seconds(wide, "sm90_wide", 1) - launch) / (seconds(narrow, "sm90_wide", 1) - launch);
    /* The cost is the number of columns of scores and of out that a row takes. With D 1024, two blocks take 1024 + 512
     * each. With D 512, one block takes 512 + 512. The ratio of the costs is 3. */
    assert_true(ratio > 2.6 && ratio < 3.1);
    free(narrow);
    free(wide);
}

static void test_as_many_blocks_as_a_gpu_has_places_take_as_long_as_one(void **state)
{
    (void)state;
    struct problem *one = open_problem(ATTN_BF16, 1, 64), *four = open_problem(ATTN_BF16, 4, 64);
    add_bias(one);
    add_bias(four);
    assert_true(fabs(seconds(four, "generic", 132) / seconds(one, "generic", 132) - 1) < 0.05);
    assert_true(seconds(four, "generic", 2) > 2 * seconds(one, "generic", 2));
    free(one);
    free(four);
}

static void test_head_dims_that_cannot_be_copied_in_pieces_take_longer_on_a_gpu(void **state)
{
    (void)state;
    struct problem *odd = open_problem(ATTN_BF16, 1, 63), *even = open_problem(ATTN_BF16, 1, 64);
    assert_true(seconds(odd, "generic", 132) > 1.5 * seconds(even, "generic", 132));
    make_backward(odd);
    make_backward(even);
    assert_true(seconds(odd, "sm90", 132) > 1.5 * seconds(even, "sm90", 132));
    free(odd);
    free(even);
}

static void test_what_is_empty_costs_a_launch_and_what_is_huge_a_finite_time(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 1, 64);
    plan_by(t, "avx512", 2);
    t->p.q.shape[1] = 0;
    assert_true(attn_cost_of(&t->info, &t->plan).seconds < 1e-3);
    for (int n = 0; n < 3; n++) {
        int64_t *shape = t->p.tensor[ATTN_T_q + n].shape;
        shape[0] = 1 << 20, shape[1] = INT32_MAX, shape[3] = ATTN_MAX_HEAD_DIM;
    }
    const attn_cost cost = attn_cost_of(&t->info, &t->plan);
    assert_true(cost.seconds > 1e12 && cost.seconds < INFINITY && cost.worst > cost.seconds && cost.worst < INFINITY);
    free(t);
}

static void test_what_flashmask_hides_costs_nothing_where_it_is_looked_at(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 4, 64);
    t->p.causal = true;
    for (int j = 0; j < S; j++)
        t->bounds[j] = j + 4 < S ? j + 4 : S; /* a FlashMask with which four queries see each key */
    t->p.mask_startend_rows = attn_tensor_make(t->bounds, ATTN_I32, 4, (int64_t[]){ 1, 1, S, 1 });
    assert_true(closer(t, "avx512", 1).seconds < 0.5 * seconds(t, "avx512", 1));
    /* The GPU kernel "generic" also computes tiles that the mask hides, so reading the mask must not change the
     * estimate. */
    assert_true(closer(t, "generic", 1).seconds == seconds(t, "generic", 1));
    free(t);
}

/* ---- Tests of rows whose scores leave float32's range ------------------------------------------------------------ */

static const double cpu_most = 5.8e37, cuda_most = 0x1p27;

static attn_strange strange(struct problem *t, double most, uint64_t readable)
{
    plan_by(t, "avx512", 1);
    return attn_strange_of(&t->p, &(attn_strange_limits){ .from = most, .cheap_from = INFINITY }, readable, 7);
}

static void test_a_scale_that_leaves_float32_makes_rows_strange_and_costly(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 1, 1);
    const double plain = closer(t, "avx512", 1).seconds;
    t->p.has_scale = true;
    t->p.scale = 3e38;
    const attn_strange found = strange(t, cpu_most, ATTN_EVERYTHING);
    /* `costly` is the fraction of rows whose scores leave float32's range. One query in seven is 0, and so are its
     * scores. */
    assert_true(found.costly > 0.7 && found.cheap == 0);
    const attn_cost cost = closer(t, "avx512", 1);
    assert_true(cost.seconds > 5 * plain);
    assert_string_equal(cost.because, "rows whose scores leave float32");
    /* attn_cost_of() does not read the data, so it cannot find rows whose scores leave float32's range. */
    assert_true(attn_cost_of(&t->info, &t->plan).seconds < 2 * plain);
    assert_true(attn_cost_of(&t->info, &t->plan).worst > cost.seconds);
    free(t);
}

static void test_what_a_scale_of_3e38_leaves_ordinary_is_ordinary(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 1, 1);
    t->p.has_scale = true;
    t->p.scale = 3e38;
    t->p.softcap = 30;
    assert_true(strange(t, cuda_most, ATTN_EVERYTHING).costly == 0);
    t->p.softcap = 0;
    assert_true(strange(t, cuda_most, ATTN_EVERYTHING & ~ATTN_TENSOR_BIT(k)).costly == 0);
    memset(t->numbers[0], 0, sizeof t->numbers[0]);
    assert_true(strange(t, cuda_most, ATTN_EVERYTHING).costly == 0);
    free(t);
}

/* Writes a bias that masks padding on the left, as Hugging Face's models do. */
static void pad(struct problem *t, int rows, float hidden)
{
    for (int i = 0; i < S; i++)
        for (int j = 0; j < S; j++) t->bias[i * S + j] = i < rows || j < rows || j > i ? hidden : 0;
    give_bias(t);
}

static void test_rows_of_nothing_but_the_most_negative_number_are_alike(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 4, 64);
    pad(t, S / 2, -FLT_MAX);
    attn_strange found = strange(t, cpu_most, ATTN_EVERYTHING);
    assert_true(found.costly == 0 && found.cheap > 0.3 && found.cheap < 0.7);
    const double costly = closer(t, "avx512", 1).seconds;
    pad(t, S / 2, -1e30f);
    /* A row is computed a second time only if its scores exceed 5.8e37 on the CPU, or 2^27 on a GPU. */
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).cheap == 0);
    assert_true(strange(t, cuda_most, ATTN_EVERYTHING).cheap > 0.3);
    assert_true(costly < 2.5 * closer(t, "avx512", 1).seconds);
    pad(t, 0, -FLT_MAX);
    found = strange(t, cuda_most, ATTN_EVERYTHING);
    assert_true(found.costly == 0 && found.cheap == 0);
    pad(t, S, -INFINITY);
    found = strange(t, cuda_most, ATTN_EVERYTHING);
    assert_true(found.costly == 0 && found.cheap == 0);
    free(t);
}

static void test_a_share_of_rows_is_estimated_by_some_of_them(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 4, 8);
    for (int i = 0; i < S; i++)
        for (int j = 0; j < S; j++) t->bias[i * S + j] = i % 4 == 0 ? 1e38f + (float)j * 1e33f : 0;
    give_bias(t);
    const attn_strange found = strange(t, cpu_most, ATTN_EVERYTHING);
    assert_true(found.costly > 0.08 && found.costly < 0.5 && found.cheap == 0);
    free(t);
}

static void test_keys_that_overflow_are_found_and_those_that_are_hidden_are_not(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 1, 8);
    for (int d = 0; d < 8; d++) attn_store(ATTN_BF16, t->numbers[1], (S - 1) * 8 + d, 3e38);
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).costly > 0.5);
    t->p.causal = true;
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).costly < 0.1);
    t->p.causal = false;
    add_keep(t);
    for (int i = 0; i < S; i++) t->keep[i * S + S - 1] = 0;
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).costly == 0);
    free(t);
}

/* If the scale is beyond 1e30, a GPU kernel runs the variant that it has for problems with options. This variant
 * computes rows with scores beyond 2^33 only once. */
static void test_scores_beyond_a_second_limit_are_cheap(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 1, 1);
    t->p.has_scale = true;
    t->p.scale = 3e38;
    plan_by(t, "generic", 1);
    const attn_strange found = attn_strange_of(&t->p, &(attn_strange_limits){ .from = cuda_most, .cheap_from = 0x1p33 },
                                               ATTN_EVERYTHING, 7);
    assert_true(found.cheap > 0.7 && found.costly == 0);
    assert_true(closer(t, "generic", 132).seconds < 2 * seconds(t, "generic", 132));
    t->p.scale = 0x1p29;
    /* If the scale is from 1e-6 to 1e30, the kernel runs the variant that it has for problems without options. This
     * variant computes rows with huge scores twice. */
    assert_true(closer(t, "generic", 132).seconds > 2 * seconds(t, "generic", 132));
    free(t);
}

static void test_rows_of_float32_are_repaired_by_a_gpu_where_their_numbers_allow_scores_of_2_22(void **state)
{
    const uint64_t all = ATTN_EVERYTHING;
    attn_strange_limits limits = { .from = cuda_most, .cheap_from = 0x1p33, .bound_from = 0x1p22 };
    (void)state;
    struct problem *t = open_problem(ATTN_F32, 1, 64);
    t->p.has_scale = true;
    t->p.scale = 7000; /* scores are at most 3 * 3 * 64 * 7000, below 2^22, so no row is computed again */
    assert_true(attn_strange_of(&t->p, &limits, all, 7).costly == 0);
    t->p.scale = 7500;
    t->p.softcap = 30;
    assert_true(attn_strange_of(&t->p, &limits, all, 7).costly == 1);
    const double costly = closer(t, "generic", 132).seconds;
    t->p.scale = 7000;
    assert_true(costly > 5 * closer(t, "generic", 132).seconds);
    for (int d = 0; d < 64; d++) attn_store(ATTN_F32, t->numbers[1], (S - 1) * 64 + d, 1e9);
    assert_true(attn_strange_of(&t->p, &limits, all, 7).costly == 1);
    t->p.causal = true;
    assert_true(attn_strange_of(&t->p, &limits, all, 7).costly < 0.1);
    free(t);
}

static void test_a_backward_whose_dq_leaves_float32_is_costly_though_its_scores_are_cheap(void **state)
{
    attn_strange_limits limits = { .from = ATTN_LSE_MOST, .cheap_from = 0x1p33, .gradients = true };
    (void)state;
    struct problem *t = open_problem(ATTN_F16, 1, 64);
    make_backward(t);
    t->p.has_scale = true;
    t->p.scale = 3e38;
    for (int n = 0; n < S; n++) t->lse[n] = FLT_MAX;
    assert_true(attn_strange_of(&t->p, &limits, ATTN_EVERYTHING, 7).costly == 0);
    for (int n = 0; n < S * 64; n++) attn_store(ATTN_F16, t->results[0], n, n % 5 - 2.0);
    assert_true(attn_strange_of(&t->p, &limits, ATTN_EVERYTHING, 7).costly > 0.5);
    assert_true(attn_strange_of(&t->p, &limits, ATTN_EVERYTHING & ~ATTN_TENSOR_BIT(dout), 7).cheap == 1);
    assert_true(closer(t, "generic", 132).seconds > 5 * seconds(t, "generic", 132));
    t->p.scale = 1e30;
    assert_true(attn_strange_of(&t->p, &limits, ATTN_EVERYTHING, 7).costly == 0);
    limits.gradients = false;
    t->p.scale = 3e38;
    assert_true(attn_strange_of(&t->p, &limits, ATTN_EVERYTHING, 7).cheap == 1);
    free(t);
}

static void test_values_whose_sum_overflows_are_strange_and_others_are_not(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 1, 8);
    attn_store(ATTN_BF16, t->numbers[2], 5, 1e35);
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).costly == 0);
    attn_store(ATTN_BF16, t->numbers[2], 5, 3e38);
    assert_true(strange(t, cpu_most, ATTN_EVERYTHING).costly == 1);
    free(t);
}

static void test_a_backward_is_looked_at_by_the_lse_that_it_is_given(void **state)
{
    (void)state;
    struct problem *t = open_problem(ATTN_BF16, 4, 64);
    make_backward(t);
    assert_true(strange(t, ATTN_LSE_MOST, ATTN_EVERYTHING).costly == 0);
    for (int n = 0; n < 4 * S; n++) t->lse[n] = 1e9f;
    assert_true(strange(t, ATTN_LSE_MOST, ATTN_EVERYTHING).costly == 1);
    pad(t, S, -FLT_MAX);
    assert_true(strange(t, ATTN_LSE_MOST, ATTN_EVERYTHING).cheap == 1);
    for (int n = 0; n < 4 * S; n++) t->lse[n] = -INFINITY;
    assert_true(strange(t, ATTN_LSE_MOST, ATTN_EVERYTHING).cheap == 0);
    free(t);
}

/* attn_strange_of() looks for rows whose scores leave float32's range. It must read only the problem's own memory,
 * which `make SAN=1` checks. */
static void test_all_kinds_of_problems_are_looked_at_within_their_memory(void **state)
{
    static const struct spec specs[] = {
        SPEC(.B = 2, .H = 4, .Sq = 33, .Sk = 65, .layout = ATTN_BHSD, .strided = true),
        SPEC(.dtype = ATTN_F8E4M3, .out_dtype = ATTN_BF16, .B = 2, .fp8_scales = true),
        SPEC(.dtype = ATTN_BF16, .out_dtype = ATTN_BF16, .D = 576, .Dv = 512, .Hk = 1, .latent = true),
        SPEC(.H = 4, .sequences = 3, .q_lengths = { 67, 0, 35 }, .k_lengths = { 133, 9, 1 }, .alibi = 1),
        SPEC(.B = 3, .seqlens_k = true, .keep_mask = 8, .keep = 0.5, .keep_tail = 20),
        SPEC(.B = 2, .bias = 8, .bias_hidden = 0.5, .sinks = 3, .causal = true, .alignment = ATTN_TOP_LEFT),
        SPEC(.B = 2, .bias = 3, .alibi = 2, .softcap = 5, .window_left = 7, .window_right = 3, .strided = true),
        SPEC(.mask_bounds = 4, .mask_heads = 2, .poison_unseen = true),
        SPEC(.H = 4, .mask_bounds = 1, .causal = true, .poison = 1),
        SPEC(.B = 2, .Sk = 96, .page_size = 32, .seqlens_k = true, .poison_unseen = true),
        SPEC(.op = ATTN_OP_BACKWARD, .B = 2, .H = 4, .give_forward = true, .dlse = true, .bias = 8),
        SPEC(.op = ATTN_OP_BACKWARD, .sequences = 2, .q_lengths = { 5, 7 }, .k_lengths = { 9, 3 }),
        SPEC(.Sq = 0),
        SPEC(.Sk = 0),
        SPEC(.B = 0),
    };
    static const double most[] = { 1e-3, 1, 1e30 };
    (void)state;
    for (size_t n = 0; n < ARRAY_SIZE(specs) * ARRAY_SIZE(most); n++) {
        struct fixture f;
        fixture_make(&f, &specs[n / ARRAY_SIZE(most)]);
        const double from = most[n % ARRAY_SIZE(most)];
        const attn_strange_limits limits = {
            .from = from, .cheap_from = n % 2 ? 1e33 : from, .bound_from = from, .gradients = true
        };
        const attn_strange found = attn_strange_of(&f.p, &limits, ATTN_EVERYTHING, n);
        if (!(found.cheap >= 0 && found.costly >= 0 && found.cheap + found.costly < 1.001))
            fail_msg("problem %zu: shares of %g and %g", n / ARRAY_SIZE(most), found.cheap, found.costly);
        fixture_clear(&f);
    }
}

/* The expected time of a merge (a join of results over parts of the keys) is the time to read the parts. Gradients
 * add to it. */
static void test_a_merge_costs_by_its_numbers(void **state)
{
    static const int64_t out[] = { 1, 524288, 8, 128 }, lse[] = { 1, 8, 524288 }, heads[] = { 8 };
    attn_result parts[4];
    (void)state;
    for (int p = 0; p < 4; p++)
        parts[p] = (attn_result){ attn_tensor_make(NULL, ATTN_F32, 4, out), attn_tensor_make(NULL, ATTN_F32, 3, lse) };
    const char *const backends[] = { "cpu", "cuda" };
    for (int i = 0; i < 2; i++) {
        const attn_device_info info = { .backend = backends[i], .units = i ? 132 : 4 };
        attn_merge_problem m = { .count = 2, .parts = parts, .whole = parts[0] };
        const attn_cost two = attn_merge_cost(&info, &m);
        m.count = 4;
        const attn_cost four = attn_merge_cost(&info, &m);
        assert_true(four.seconds > 1.9 * two.seconds && four.seconds < 2.1 * two.seconds);
        assert_true(four.flops == 2 * two.flops && two.worst == two.seconds && two.because[0] == '\0');
        /* The merge reads four parts and writes one result. */
        assert_true(four.bytes == 5 * (4.0 * 524288 * 8 * 128 + 4.0 * 524288 * 8));
        m.dout = parts[0].out;
        m.gradients = parts;
        const attn_cost back = attn_merge_cost(&info, &m);
        m.sinks = m.dsinks = attn_tensor_make(NULL, ATTN_F32, 1, heads);
        assert_true(back.seconds > 2 * four.seconds && attn_merge_cost(&info, &m).seconds > 1.1 * back.seconds);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kernel_has_rates),
        cmocka_unit_test(test_each_option_raises_the_estimate),
        cmocka_unit_test(test_twice_the_heads_take_twice_as_long_and_twice_the_units_half),
        cmocka_unit_test(test_gradients_of_slopes_on_a_gpu_cost_many_times_the_others_in_float32_alone),
        cmocka_unit_test(test_bytes_are_those_of_the_tensors_and_of_what_is_read_of_pages),
        cmocka_unit_test(test_a_gpu_takes_as_long_for_a_block_that_is_not_full),
        cmocka_unit_test(test_wide_heads_of_16_bits_make_their_scores_for_each_256_columns),
        cmocka_unit_test(test_wide_heads_on_hopper_make_their_scores_for_each_512_columns),
        cmocka_unit_test(test_as_many_blocks_as_a_gpu_has_places_take_as_long_as_one),
        cmocka_unit_test(test_head_dims_that_cannot_be_copied_in_pieces_take_longer_on_a_gpu),
        cmocka_unit_test(test_what_is_empty_costs_a_launch_and_what_is_huge_a_finite_time),
        cmocka_unit_test(test_what_flashmask_hides_costs_nothing_where_it_is_looked_at),
        cmocka_unit_test(test_a_scale_that_leaves_float32_makes_rows_strange_and_costly),
        cmocka_unit_test(test_what_a_scale_of_3e38_leaves_ordinary_is_ordinary),
        cmocka_unit_test(test_rows_of_nothing_but_the_most_negative_number_are_alike),
        cmocka_unit_test(test_a_share_of_rows_is_estimated_by_some_of_them),
        cmocka_unit_test(test_keys_that_overflow_are_found_and_those_that_are_hidden_are_not),
        cmocka_unit_test(test_scores_beyond_a_second_limit_are_cheap),
        cmocka_unit_test(test_rows_of_float32_are_repaired_by_a_gpu_where_their_numbers_allow_scores_of_2_22),
        cmocka_unit_test(test_a_backward_whose_dq_leaves_float32_is_costly_though_its_scores_are_cheap),
        cmocka_unit_test(test_values_whose_sum_overflows_are_strange_and_others_are_not),
        cmocka_unit_test(test_a_backward_is_looked_at_by_the_lse_that_it_is_given),
        cmocka_unit_test(test_all_kinds_of_problems_are_looked_at_within_their_memory),
        cmocka_unit_test(test_a_merge_costs_by_its_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
