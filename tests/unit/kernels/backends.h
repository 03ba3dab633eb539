/* backends.h: declarations shared by the backends_*.c files of test_backends. They are the backend under test, the
 * choice of the problems that this process tests, short names for shapes, and the tests. */
#ifndef BACKENDS_H
#define BACKENDS_H

#include "../testing.h"

/* ---- The backend under test, and which problems this process tests (test_backends.c) ----------------------------- */

extern struct bench bench;
extern const char *backend;

/* How many random problems are tested if ATTN_RANDOM_COUNT is not set. */
#if defined(__SANITIZE_THREAD__)
enum { RANDOM_COUNT = 30 };
#elif defined(__SANITIZE_ADDRESS__)
enum { RANDOM_COUNT = 100 };
#else
enum { RANDOM_COUNT = 300 };
#endif

long env_number(const char *name, long otherwise);
bool is_brief(void); /* whether slow tests are left out (ATTN_BRIEF) */
/* Returns whether this process tests the next problem of a list. ATTN_PART divides the problems among several
 * processes. */
bool is_ours(void);
/* Returns whether the backend under test and the reference backend agree on the problem. Returns true without a test if
 * another process tests the problem, or the backend has no kernel for it. */
bool agrees(const struct spec *s);
/* Checks that all problems of the list, each with its own operation, agree with the reference backend. */
void assert_all_agree(const struct spec *list, size_t count);

#define assert_outputs_equal(a, b)                     \
    do {                                               \
        char why_[400];                                \
        if (!outputs_equal(a, b, why_, sizeof why_)) { \
            spec_print(stderr, &(a)->spec);            \
            fail_msg("%s", why_);                      \
        }                                              \
    } while (0)

/* ---- Making problems: names for shapes, random problems ---------------------------------------------------------- */

#define BACK           .op = ATTN_OP_BACKWARD
#define F16            .dtype = ATTN_F16, .out_dtype = ATTN_F16
#define BF16           .dtype = ATTN_BF16, .out_dtype = ATTN_BF16
#define FP8            .dtype = ATTN_F8E4M3, .out_dtype = ATTN_BF16
#define HEADS(h, hk)   .H = h, .Hk = hk
#define SIZES(q, k, d) .Sq = q, .Sk = k, .D = d, .Dv = d
#define MLA            .D = 576, .Dv = 512, .H = 16, .Hk = 1
#define PAGES(n)       .page_size = n, .seqlens_k = true
#define WINDOW(l, r)   .window_left = l, .window_right = r

int64_t pick(struct rng *r, const int64_t *from, size_t count);
extern const int64_t page_sizes[9];
/* Puts keys and values in pages of `page_size` keys. Sk becomes a multiple of the page size, and batch rows get any
 * length up to Sk. */
void give_pages(struct spec *s, int64_t page_size);
/* Returns a valid problem with random options. Most options are off. */
struct spec random_spec(uint64_t seed);
/* Runs the problems forward and backward. Returns how many of them disagree with the reference backend. */
int problems_disagree(const struct spec *list, size_t count);
/* Checks that each of the problems draw(9000) to draw(9000 + count - 1) has the same result bits when it runs alone and
 * when all run in one call. `count` is at most 16. */
void assert_same_bits_alone_and_among_others(struct spec (*draw)(uint64_t seed), int count);
/* Checks that the backend and the reference backend agree on the problems draw(first) to draw(first + count - 1). */
void random_problems_agree(struct spec (*draw)(uint64_t seed), long first, long count);
/* Asserts that tensor `id` of the problem `part` has the same bits as the elements of tensor `id` of `whole` from
 * element `first` on. The tensor's first axis must be the batch or the packed rows. */
void assert_part_equal(const struct fixture *whole, const struct fixture *part, attn_tensor_id id, int64_t first);

/* ---- The tests that each file defines ---------------------------------------------------------------------------- */

/* Tests in backends_edges.c: */
void test_huge_scores_and_values_agree_with_the_reference(void **state);
void test_the_largest_numbers_of_float32_agree_with_the_reference(void **state);
void test_edge_cases_agree_with_the_reference(void **state);
void test_lengths_agree_with_the_reference(void **state);
void test_lengths_do_not_need_the_slowest_kernel(void **state);
void test_options_of_pairs_do_not_need_a_slower_kernel_than_none(void **state);
void test_options_together_do_not_need_generic_kernels_on_hopper(void **state);
void test_grid_agrees_with_the_reference(void **state);
void test_random_problems_agree_with_the_reference(void **state);
/* Tests in backends_wide.c: */
void test_wide_heads_agree_with_the_reference(void **state);
void test_wide_heads_of_float32_agree_with_the_reference(void **state);
void test_scores_of_wide_heads_that_nobody_sees_are_not_read(void **state);
void test_wide_heads_agree_if_lse_is_huge_and_scores_are_not(void **state);
void test_random_wide_heads_agree_with_the_reference(void **state);
void test_wide_heads_have_the_same_bits_alone_and_among_others(void **state);
void test_wide_decoding_agrees_with_the_reference_on_both_sides_of_every_edge(void **state);
void test_random_wide_decoding_agrees_with_the_reference(void **state);
void test_wide_decoding_has_the_same_bits_alone_and_among_others(void **state);
void test_wide_decoding_splits_keys(void **state);
/* Tests in backends_decode.c: */
void test_decoding_agrees_with_the_reference_on_both_sides_of_every_edge(void **state);
void test_random_decoding_agrees_with_the_reference(void **state);
void test_keys_of_a_chunk_agree_with_the_reference(void **state);
void test_scores_of_a_chunk_need_no_repair(void **state);
void test_decoding_has_the_same_bits_alone_and_behind_other_decoding(void **state);
void test_pages_do_not_change_a_bit(void **state);
void test_decoding_has_the_same_bits_by_the_copy_engine_and_by_threads(void **state);
void test_queries_of_any_size_meet_float8_keys(void **state);
void test_a_row_in_pages_has_the_bits_that_it_has_alone(void **state);
void test_values_may_be_the_first_columns_of_keys(void **state);
void test_latent_attention_agrees_with_the_reference(void **state);
void test_latent_attention_has_the_same_bits_in_pages_and_alone(void **state);
void test_pages_may_overlap_and_be_shared(void **state);
void test_a_shared_prefix_does_not_change_a_bit(void **state);
/* Tests in backends_merge.c: */
void test_merged_parts_are_the_whole(void **state);
void test_merges_of_empty_and_strange_parts(void **state);
void test_merges_that_disagree_are_refused(void **state);
void test_merges_of_a_layout_are_those_of_its_views(void **state);
void test_gradients_of_a_merge_are_the_differences_of_its_loss(void **state);
void test_gradients_of_empty_parts_are_zeros(void **state);
void test_a_sink_is_a_part_without_a_value(void **state);
/* Tests in backends_sums.c: */
void test_sums_of_parts_are_added_in_order_and_rounded_once(void **state);
void test_bytes_are_copied_from_another_device(void **state);
/* Tests in backends_observe.c: */
void test_observables_agree_with_the_reference(void **state);
void test_random_observables_agree_with_the_reference(void **state);
void test_top_keys_are_the_keys_of_the_largest_probabilities(void **state);
void test_observables_have_the_same_bits_alone_and_among_others(void **state);
void test_one_observable_has_the_bits_that_it_has_among_all(void **state);
void test_pages_and_threads_do_not_change_a_bit_of_an_observe(void **state);
void test_an_observe_without_options_is_computed_by_the_family_of_the_forward(void **state);
/* Tests in backends_properties.c: */
void test_a_problem_has_the_same_bits_alone_and_among_others(void **state);
void test_a_family_that_is_asked_for_computes_both_ways(void **state);
void test_the_number_of_threads_does_not_change_a_bit(void **state);
void test_gradients_of_several_tiles_agree_with_the_reference(void **state);
void test_gradients_of_few_tiles_of_keys_agree_with_the_reference(void **state);
void test_repeats_give_the_same_bits(void **state);
void test_a_packed_sequence_has_the_bits_of_the_problem_alone(void **state);
void test_a_batch_row_has_the_bits_of_the_problem_alone(void **state);
void test_heads_have_the_same_bits_in_parts_and_together(void **state);
void test_queries_have_the_same_bits_in_parts_and_together(void **state);
void test_the_past_does_not_depend_on_the_future(void **state);
void test_hidden_numbers_of_any_size_do_not_matter(void **state);
void test_no_dout_gives_gradients_of_exactly_zero(void **state);
void test_the_order_of_keys_does_not_matter(void **state);
void test_a_shifted_bias_shifts_lse_and_nothing_else(void **state);
void test_attention_is_linear_in_v(void **state);
void test_offsets_past_two_billion_elements(void **state);
void test_offsets_on_both_sides_of_2_31(void **state);
void test_outputs_that_nobody_wants_are_not_needed(void **state);
void test_work_in_steps_has_the_bits_of_work_at_once(void **state);
void test_one_head_in_steps_has_the_bits_of_one_launch(void **state);
void test_moves_copy_and_clear_what_they_say_and_nothing_else(void **state);
/* Tests in backends_truth.c: */
void test_the_truth_rounds_to_the_results_of_the_reference(void **state);
void test_random_truths_round_to_the_results_of_the_reference(void **state);
/* Tests in backends_numerics.c: */
void test_float32_gradients_round_to_those_of_16_bits(void **state);
void test_work_that_sees_no_keys_between_other_work(void **state);
void test_float8_without_lse_agrees_with_the_reference(void **state);
void test_float8_rows_of_one_key_are_its_value(void **state);
void test_float8_sums_keep_what_lies_beside_a_heavy_key(void **state);
void test_scores_of_either_side_of_0_agree_with_the_reference(void **state);
void test_a_feature_that_no_kernel_names_is_computed_by_one_that_takes_everything(void **state);
void test_gradients_of_options_agree_with_the_reference(void **state);
void test_slopes_in_bfloat16_are_as_exact_as_other_sums(void **state);
void test_a_row_with_one_key_is_that_value_to_the_bit(void **state);
void test_every_float8_is_its_number(void **state);
void test_nan_reaches_exactly_the_rows_that_see_it(void **state);
void test_nan_reaches_exactly_the_gradients_that_see_it(void **state);
void test_products_beyond_float32_count_where_their_scores_are_ordinary(void **state);
void test_products_beyond_float32_count_in_latent_attention(void **state);
void test_a_row_whose_products_all_leave_float32_sees_its_keys(void **state);
void test_lse_alone_is_the_lse_beside_out(void **state);
void test_rows_that_a_mask_fills_with_one_huge_number_agree_with_the_reference(void **state);
void test_one_key_has_a_probability_of_one(void **state);
void test_one_key_has_p_1_to_the_last_bit(void **state);

#endif
