/* testing.h: attention problems for tests. A problem is made from a few numbers (a spec), run on any backend, and
 * compared with the reference backend, which computes in double.
 *
 *   const struct spec spec = SPEC(.dtype = ATTN_BF16, .Sq = 113, .Sk = 203, .causal = true);
 *   struct fixture f;      fixture_make(&f, &spec);         // seeded random inputs; outputs are filled with NaN
 *   fixtures_run(&bench, (struct fixture *[]){ &f }, 1);     // on an open device; copies where memory is not unified
 *   fixture_compare(&f, &want, &other, why, sizeof why);     // within limits_of[] (kernels/README.md, Accuracy)
 *   spec_print(stderr, &spec);                               // as a SPEC(...) that can be pasted into a test
 *
 * All random numbers come from `data_seed`, so a printed spec describes the whole problem.
 *
 * Tolerances. The truth is the result of the reference backend (in double) for the same rounded inputs. A result x may
 * differ from the truth by
 *     limit * |truth|   + 2 * sensitivity   + noise
 * This rule is tested for the largest elements, and for the whole tensor, with |.| as the Frobenius norm. Rows of `out`
 * are also tested one by one, because in a causal problem the first rows are many times larger than the last rows.
 *   limit        the number in limits_of, plus 2.4e-7 times the largest |score|, because float32 rounds large scores
 *   sensitivity  how much the truth itself changes when out and lse are rounded to the dtype before the backward, which
 *                no kernel can avoid
 *   noise        the error of sums whose terms cancel
 *
 * Functions that are not declared here, and the implementation, are in testing.c. */
#ifndef TESTING_H
#define TESTING_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/attention.h"
#include "kernels/backend.h"
#include "kernels/dtype.h"
#include "kernels/tiles.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof *(a))

/* A test writes a problem as SPEC(...), whose designated initialisers override the defaults inside SPEC(). The compiler
 * would warn of each override. */
#pragma GCC diagnostic ignored "-Woverride-init"

/* ---- Random numbers ---------------------------------------------------------------------------------------------- */

struct rng {
    uint64_t state;
};
/* A generator of random numbers: SplitMix64 (Steele, Lea, Flood 2014). */
uint64_t rng_next(struct rng *r);
double rng_uniform(struct rng *r); /* uniform in [0, 1) */
int64_t rng_between(struct rng *r, int64_t low, int64_t high);
bool rng_chance(struct rng *r, double p);
double rng_normal(struct rng *r);

/* ---- A problem that a few numbers describe (struct spec) --------------------------------------------------------- */

enum { SPEC_SEQUENCES = 12 };

/* How a FlashMask (mask_startend_rows) is made. */
enum mask_kind {
    MASK_RANDOM,   /* random intervals of hidden queries, some empty and some with all queries */
    MASK_DOCUMENT, /* each query sees only keys of its own document; documents have random lengths */
    MASK_WINDOW,   /* a query sees only keys in a band around the diagonal */
    MASK_ALL,      /* every key is hidden from every query */
    MASK_UNION,    /* two intervals of hidden queries per key, which only together hide every query */
    MASK_KINDS
};

/* The signs of scores. BELOW: all are negative. BELOW_ABOVE: those of the last keys are negative, and those of the
 * first keys positive. ABOVE_BELOW: those of the last keys are positive, and those of the first keys negative. BY_ROW:
 * queries have only positive scores and only negative scores in turn. Except with BY_ROW, negative scores differ so
 * much between keys that e^x of the differences is far outside float32. */
enum score_sides { SIDES_NONE, SIDES_BELOW, SIDES_BELOW_ABOVE, SIDES_ABOVE_BELOW, SIDES_BY_ROW };

struct spec {
    const char *name;
    attn_op op;
    attn_dtype dtype, out_dtype, bias_dtype;
    int64_t B, H, Hk, Sq, Sk, D, Dv;
    attn_layout layout;
    attn_alignment alignment;
    bool has_scale;
    double scale;
    bool causal;
    int64_t window_left, window_right;
    double softcap, dropout_p;
    uint64_t seed;
    int sequences; /* number of packed sequences, or 0. If it is not 0, q_lengths and k_lengths replace B, Sq and Sk. */
    int q_lengths[SPEC_SEQUENCES], k_lengths[SPEC_SEQUENCES];
    int alibi; /* shape of alibi_slopes: 0 none, 1 [H], 2 [B, H] */
    /* Shapes of bias and keep_mask. 0: the tensor is absent. Otherwise the number is 1 plus a sum for the axes that are
     * not broadcast: 1 for B, 2 for H, 4 for Sq. */
    int bias, keep_mask;
    double bias_hidden, keep; /* bias_hidden: fraction of -inf in bias; keep: fraction of 1 in keep_mask */
    int keep_tail;            /* if not 0, keep_mask covers only this number of keys, the last ones */
    int mask_bounds;          /* number of FlashMask bounds per key: 0 (no FlashMask), 1, 2 or 4 */
    int mask_heads;           /* number of heads in the FlashMask: 0 means one, 1 means Hk, 2 means H */
    enum mask_kind mask_kind;
    int bias_levels; /* 0: ordinary numbers; 1 to 3: a kind of large numbers (see fill_bias_levels()) */
    /* 0: no sinks; 1: random; 2: random with -inf and numbers around 100; 3: random with 3e38 and -3e38 */
    int sinks;
    bool seqlens_k; /* whether seqlens_k is given, with random numbers of keys, including 0 and Sk */
    bool seqlens_q; /* whether seqlens_q is given, with random numbers of queries; padding rows are NaN */
    /* largest number of NaN rows between two packed sequences */
    int gaps;
    bool key_rows; /* whether queries are packed, while k and v are [B, Sk, Hk, D] with seqlens_k */
    /* Number of keys per page of k and v, or 0 without pages. With pages seqlens_k is given, and Sk is a multiple of
     * page_size. */
    int page_size;
    bool fp8_keys; /* whether k and v of a forward are float8_e4m3fn, while q has `dtype` */
    bool fp8_scales;
    int scale_axes;          /* shape of the float8 scales: 0: [B, Hk], 1: [1, Hk], 2: [B, 1], 3: [Hk], 4: [1] */
    double fp8_scale;        /* magnitude of the float8 scales; 0: around 1 */
    bool dlse, give_forward; /* inputs of a backward. dlse: the gradient of lse; give_forward: the forward's out and
                              * lse */
    bool no_dout;
    /* which gradients are float32 whatever dtype q has: the sum of 1 (dq), 2 (dk) and 4 (dv) */
    int float_grads;
    bool no_lse;
    bool latent;
    bool plain_grads;    /* whether a backward leaves out the gradients of bias and of ALiBi's slopes */
    bool any_order;      /* whether the backward may add up the terms of dq in any order, and so is not deterministic */
    double q_amp, v_amp; /* amplitudes: q_amp of q and k, v_amp of v and dout; 0 stands for 1 */
    double q_mean;       /* a constant added to q and k */
    enum score_sides sides;
    double v_most;      /* if not 0, the values of v are between v_most / 2 and v_most */
    bool strided;       /* whether tensors have gaps between rows, and addresses aligned only to an element's size */
    bool poison_unseen; /* whether keys and values that no query sees are NaN and infinity */
    int poison;
    /* the outputs that an observe (a request for attention weights) wants, one bit each; 0: all */
    uint64_t observe;
    bool given_lse;   /* whether an observe (a request for attention weights) gets lse as an input */
    bool many_blocks; /* whether the problem takes ten seconds or more on the GPU emulator */
    uint64_t data_seed;
};

#define SPEC(...)                                                                                                      \
    (struct spec)                                                                                                      \
    {                                                                                                                  \
        .dtype = ATTN_F32, .out_dtype = ATTN_F32, .bias_dtype = ATTN_F32, .B = 1, .H = 2, .Hk = 2, .Sq = 64, .Sk = 64, \
        .D = 64, .Dv = 64, .window_left = -1, .window_right = -1, .data_seed = 1, __VA_ARGS__                          \
    }

void spec_print(FILE *file, const struct spec *s);

/* ---- A problem with tensors in memory (struct fixture) ----------------------------------------------------------- */

struct fixture {
    struct spec spec;
    attn_problem p;
    /* For each tensor, a memory block that the fixture owns. The block holds guard bytes, then bytes that shift the
     * tensor's address, then the tensor, then guard bytes again. */
    uint8_t *block[ATTN_TENSOR_COUNT];
    size_t block_bytes[ATTN_TENSOR_COUNT];
};

void fixture_clear(struct fixture *f);
int64_t tensor_elements(const attn_tensor *t);
/* Returns the memory offset, in elements, of element n in C order. An n past the last element counts from the first
 * again. */
int64_t tensor_offset(const attn_tensor *t, int64_t n);
/* Returns element n in C order as a double. */
double tensor_get(const attn_tensor *t, int64_t n);
void tensor_set(const attn_tensor *t, int64_t n, double x);
/* Adds a tensor of this shape to the problem, and fills the tensor's memory with NaN. */
void fixture_add(struct fixture *f, attn_tensor_id id, attn_dtype dtype, int rank, const int64_t *shape);
void fill_normal(const attn_tensor *t, struct rng *r, double amp, double mean);
/* Makes the problem of a spec, with random inputs, and outputs full of NaN. Exits if attn_check() refuses the
 * problem. */
void fixture_make(struct fixture *f, const struct spec *spec);
/* Makes a problem with the same inputs and with outputs of its own, to run on another backend. */
void fixture_copy(struct fixture *to, const struct fixture *from);
bool is_output(const attn_problem *p, attn_tensor_id id);

/* ---- Running problems on a backend ------------------------------------------------------------------------------- */

struct bench {
    attn_device *device;
    attn_stream *stream;
    attn_device_info info;
    /* Feature bits that are added to every plan (choice of a kernel). Only a kernel that accepts all features can then
     * compute the problem. */
    uint64_t also;
    /* whether the problems run in several calls of attn_run_some(), with a wait after each call */
    bool in_steps;
    int64_t calls; /* number of calls of attn_run_some() in the last run */
};

/* Opens a device of the backend and a stream; exits if that fails. `threads`: number of CPU threads, or 0 for the
 * default. */
void bench_open(struct bench *b, const char *backend, int threads);
void bench_close(struct bench *b);
/* Runs problems together in one attn_run(). Without unified memory every tensor is copied to the device and back. */
attn_status fixtures_run(struct bench *b, struct fixture *const *list, int count, attn_error *err);
/* Does what fixtures_run() does, but exits if the run fails. */
void fixtures_must_run(struct bench *b, struct fixture *const *list, int count);
void fixture_run(struct bench *b, struct fixture *f);
/* Writes the reference backend's results to the outputs of a problem in host memory. */
void run_reference(const attn_problem *p);

/* ---- Comparing results ------------------------------------------------------------------------------------------- */

/* Limits on the errors of results (kernels/README.md, Accuracy). All but `least` are relative. */
struct limits {
    /* limits on the relative errors of out, of dq, dk and dv (qkv), and of dbias, dalibi_slopes and dsinks (sums) */
    double out, qkv, sums;
    double noise; /* limit on the error of sums whose terms cancel, relative to the size of the terms */
    double least; /* limit on the absolute error, because subnormal numbers are rounded coarsely */
};
extern const struct limits limits_of[];

/* Returns the largest absolute value of the tensor's finite elements. */
double largest(const attn_tensor *t);
/* Returns whether the results of `got` agree with the reference results `want`. If not, `why` becomes a sentence that
 * says where. `other` is NULL, or the reference results computed in another way: a backward with out and lse rounded
 * before, or a forward with slightly changed values of v. The difference between `want` and `other` shows how much
 * rounding changes the results. */
bool fixture_compare(const struct fixture *got, const struct fixture *want, const struct fixture *other, char *why,
                     size_t room);
/* Returns whether the run has left inputs, guard bytes, and the gaps between rows unchanged. `before` is a copy of the
 * fixture from before the run. */
bool fixture_intact(const struct fixture *f, const struct fixture *before, char *why, size_t room);
/* Returns whether all outputs of `a` and `b` have equal bits, element by element in C order. Layout and packing may
 * differ. */
bool outputs_equal(const struct fixture *a, const struct fixture *b, char *why, size_t room);
/* Runs `spec` on `bench` and on the reference backend, and compares the results. If they disagree, prints the problem
 * and returns false. */
bool spec_agrees(struct bench *bench, const struct spec *spec);

/* ---- The truth (float64 results) that a device computes ---------------------------------------------------------- */

enum { TRUTH_OUT, TRUTH_LSE, TRUTH_DQ, TRUTH_DK, TRUTH_DV, TRUTH_RESULTS = ATTN_TRUTH_RESULTS };

/* Float64 results of a problem, in this order: out, lse, dq, dk, dv. The struct owns the memory. */
struct truth {
    double *result[TRUTH_RESULTS];
    int64_t count[TRUTH_RESULTS]; /* number of elements; 0: the problem has no such result */
    /* the distance of the fixture's own results from the float64 results */
    attn_truth_distance distance[TRUTH_RESULTS];
};

/* Computes the truth (float64 results) of the fixture's problem on the device, and the distance of the fixture's
 * results from it. Stores the number of calls of attn_truth_some() in b->calls. */
attn_status truth_run(struct bench *b, const struct fixture *f, struct truth *t, attn_error *err);
void truth_clear(struct truth *t);
/* Returns whether the truth (float64 results) that the device computes for `spec` agrees with the reference backend
 * after rounding. If not, prints the problem. */
bool truth_agrees(struct bench *b, const struct spec *spec);

#endif
