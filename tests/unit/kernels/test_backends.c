/* test_backends.c: tests whether a backend computes attention correctly. Edge cases (problems that broke other
 * libraries) and random problems are compared with the reference backend. Tests of properties need no reference: for
 * example, a problem must have equal bits alone and among others. Environment variables select what runs:
 *
 *   ATTN_BACKEND=cpu         the backend (default: cpu); of "paper" only the problems that it can compute are compared
 *   ATTN_RANDOM_SEED=1       first seed of the random problems; a failure prints its SPEC(...)
 *   ATTN_RANDOM_COUNT=300    number of random problems
 *   ATTN_GRID_D=64           the grid of sizes (test_grid*) has problems of this head size only
 *   ATTN_TESTS='test_grid*'  runs only the tests whose names match this pattern
 *   ATTN_BRIEF=1             leaves out what takes minutes on the GPU emulator
 *   ATTN_PART=1/2            runs the first of two halves of the tests, so that two processes can share the work
 *   ATTN_THIN=3              runs only a third of the problems of each list, always the same third; for sanitizers
 *   ATTN_PRINT_BITS=1        prints checksums of each problem's outputs, to compare the bits of two builds */
#include <fnmatch.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backends.h"

struct bench bench;
const char *backend = "cpu";

long env_number(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

bool is_brief(void)
{
    return env_number("ATTN_BRIEF", 0) != 0;
}

/* This process runs part `share` (counted from 0) of `share_count` parts of the tests. ATTN_PART=2/3 gives 1 and 3. */
static long share = 0, share_count = 1;

static void read_share(void)
{
    const char *text = getenv("ATTN_PART");
    if (text == NULL || *text == '\0') return;
    if (sscanf(text, "%ld/%ld", &share, &share_count) != 2 || share < 1 || share > share_count) {
        fprintf(stderr, "ATTN_PART: is %s, must be such as 1/2\n", text);
        exit(2);
    }
    share--;
}

bool is_ours(void)
{
    static uint32_t count;
    const uint32_t divided = (uint32_t)(share_count * env_number("ATTN_THIN", 1));
    return (count++ * UINT32_C(2654435761) >> 16) % divided == (uint32_t)share;
}

/* Only the backend "paper" lacks kernels for some problems. */
static bool is_taken(const struct spec *s)
{
    struct fixture f;
    attn_plan plan;
    attn_error err;
    if (strcmp(backend, "paper") != 0) return true;
    fixture_make(&f, s);
    const attn_status status = attn_plan_make(attn_device_capabilities(bench.device), &f.p, &plan, &err);
    fixture_clear(&f);
    assert_true(status == ATTN_OK || status == ATTN_UNSUPPORTED);
    return status == ATTN_OK;
}

bool agrees(const struct spec *s)
{
    return !is_ours() || !is_taken(s) || spec_agrees(&bench, s);
}

void assert_all_agree(const struct spec *list, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++)
        if (!agrees(&list[i])) failed++;
    assert_int_equal(failed, 0);
}

/* ---- The list of tests, and which of them run -------------------------------------------------------------------- */

static size_t matching(const char *pattern, const struct CMUnitTest *tests, size_t count)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++) found += fnmatch(pattern, tests[i].name, FNM_NOESCAPE) == 0;
    return found;
}

int main(void)
{
    const struct CMUnitTest comparisons[] = {
        cmocka_unit_test(test_edge_cases_agree_with_the_reference),
        cmocka_unit_test(test_lengths_agree_with_the_reference),
        cmocka_unit_test(test_lengths_do_not_need_the_slowest_kernel),
        cmocka_unit_test(test_options_of_pairs_do_not_need_a_slower_kernel_than_none),
        cmocka_unit_test(test_options_together_do_not_need_generic_kernels_on_hopper),
        cmocka_unit_test(test_gradients_of_options_agree_with_the_reference),
        cmocka_unit_test(test_huge_scores_and_values_agree_with_the_reference),
        cmocka_unit_test(test_the_largest_numbers_of_float32_agree_with_the_reference),
        cmocka_unit_test(test_products_beyond_float32_count_where_their_scores_are_ordinary),
        cmocka_unit_test(test_grid_agrees_with_the_reference),
        cmocka_unit_test(test_scores_of_either_side_of_0_agree_with_the_reference),
        cmocka_unit_test(test_random_problems_agree_with_the_reference),
        cmocka_unit_test(test_wide_heads_agree_with_the_reference),
        cmocka_unit_test(test_wide_heads_of_float32_agree_with_the_reference),
        cmocka_unit_test(test_scores_of_wide_heads_that_nobody_sees_are_not_read),
        cmocka_unit_test(test_random_wide_heads_agree_with_the_reference),
        cmocka_unit_test(test_wide_decoding_agrees_with_the_reference_on_both_sides_of_every_edge),
        cmocka_unit_test(test_random_wide_decoding_agrees_with_the_reference),
        cmocka_unit_test(test_wide_decoding_splits_keys),
        cmocka_unit_test(test_decoding_agrees_with_the_reference_on_both_sides_of_every_edge),
        cmocka_unit_test(test_random_decoding_agrees_with_the_reference),
        cmocka_unit_test(test_nan_reaches_exactly_the_rows_that_see_it),
        cmocka_unit_test(test_nan_reaches_exactly_the_gradients_that_see_it),
        cmocka_unit_test(test_latent_attention_agrees_with_the_reference),
        cmocka_unit_test(test_observables_agree_with_the_reference),
        cmocka_unit_test(test_random_observables_agree_with_the_reference),
        cmocka_unit_test(test_merged_parts_are_the_whole),
        cmocka_unit_test(test_merges_of_empty_and_strange_parts),
        cmocka_unit_test(test_merges_that_disagree_are_refused),
        cmocka_unit_test(test_merges_of_a_layout_are_those_of_its_views),
        cmocka_unit_test(test_gradients_of_a_merge_are_the_differences_of_its_loss),
        cmocka_unit_test(test_gradients_of_empty_parts_are_zeros),
        cmocka_unit_test(test_a_sink_is_a_part_without_a_value),
        cmocka_unit_test(test_the_truth_rounds_to_the_results_of_the_reference),
        cmocka_unit_test(test_random_truths_round_to_the_results_of_the_reference),
    };
    const struct CMUnitTest lists[] = {
        cmocka_unit_test(test_rows_that_a_mask_fills_with_one_huge_number_agree_with_the_reference),
        cmocka_unit_test(test_one_key_has_a_probability_of_one),
        cmocka_unit_test(test_one_key_has_p_1_to_the_last_bit),
        cmocka_unit_test(test_float32_gradients_round_to_those_of_16_bits),
        cmocka_unit_test(test_work_in_steps_has_the_bits_of_work_at_once),
        cmocka_unit_test(test_one_head_in_steps_has_the_bits_of_one_launch),
        cmocka_unit_test(test_work_that_sees_no_keys_between_other_work),
        cmocka_unit_test(test_float8_without_lse_agrees_with_the_reference),
        cmocka_unit_test(test_float8_rows_of_one_key_are_its_value),
        cmocka_unit_test(test_float8_sums_keep_what_lies_beside_a_heavy_key),
        cmocka_unit_test(test_slopes_in_bfloat16_are_as_exact_as_other_sums),
        cmocka_unit_test(test_a_shared_prefix_does_not_change_a_bit),
        cmocka_unit_test(test_gradients_of_several_tiles_agree_with_the_reference),
        cmocka_unit_test(test_gradients_of_few_tiles_of_keys_agree_with_the_reference),
    };
    const struct CMUnitTest properties[] = {
        cmocka_unit_test(test_a_feature_that_no_kernel_names_is_computed_by_one_that_takes_everything),
        cmocka_unit_test(test_a_problem_has_the_same_bits_alone_and_among_others),
        cmocka_unit_test(test_wide_heads_have_the_same_bits_alone_and_among_others),
        cmocka_unit_test(test_wide_heads_agree_if_lse_is_huge_and_scores_are_not),
        cmocka_unit_test(test_wide_decoding_has_the_same_bits_alone_and_among_others),
        cmocka_unit_test(test_keys_of_a_chunk_agree_with_the_reference),
        cmocka_unit_test(test_scores_of_a_chunk_need_no_repair),
        cmocka_unit_test(test_decoding_has_the_same_bits_alone_and_behind_other_decoding),
        cmocka_unit_test(test_top_keys_are_the_keys_of_the_largest_probabilities),
        cmocka_unit_test(test_observables_have_the_same_bits_alone_and_among_others),
        cmocka_unit_test(test_one_observable_has_the_bits_that_it_has_among_all),
        cmocka_unit_test(test_pages_and_threads_do_not_change_a_bit_of_an_observe),
        cmocka_unit_test(test_an_observe_without_options_is_computed_by_the_family_of_the_forward),
        cmocka_unit_test(test_a_family_that_is_asked_for_computes_both_ways),
        cmocka_unit_test(test_the_number_of_threads_does_not_change_a_bit),
        cmocka_unit_test(test_repeats_give_the_same_bits),
        cmocka_unit_test(test_a_packed_sequence_has_the_bits_of_the_problem_alone),
        cmocka_unit_test(test_a_batch_row_has_the_bits_of_the_problem_alone),
        cmocka_unit_test(test_heads_have_the_same_bits_in_parts_and_together),
        cmocka_unit_test(test_queries_have_the_same_bits_in_parts_and_together),
        cmocka_unit_test(test_moves_copy_and_clear_what_they_say_and_nothing_else),
        cmocka_unit_test(test_sums_of_parts_are_added_in_order_and_rounded_once),
        cmocka_unit_test(test_bytes_are_copied_from_another_device),
        cmocka_unit_test(test_pages_do_not_change_a_bit),
        cmocka_unit_test(test_decoding_has_the_same_bits_by_the_copy_engine_and_by_threads),
        cmocka_unit_test(test_queries_of_any_size_meet_float8_keys),
        cmocka_unit_test(test_a_row_in_pages_has_the_bits_that_it_has_alone),
        cmocka_unit_test(test_values_may_be_the_first_columns_of_keys),
        cmocka_unit_test(test_latent_attention_has_the_same_bits_in_pages_and_alone),
        cmocka_unit_test(test_pages_may_overlap_and_be_shared),
        cmocka_unit_test(test_the_past_does_not_depend_on_the_future),
        cmocka_unit_test(test_hidden_numbers_of_any_size_do_not_matter),
        cmocka_unit_test(test_a_row_with_one_key_is_that_value_to_the_bit),
        cmocka_unit_test(test_every_float8_is_its_number),
        cmocka_unit_test(test_no_dout_gives_gradients_of_exactly_zero),
        cmocka_unit_test(test_the_order_of_keys_does_not_matter),
        cmocka_unit_test(test_a_shifted_bias_shifts_lse_and_nothing_else),
        cmocka_unit_test(test_attention_is_linear_in_v),
        cmocka_unit_test(test_offsets_past_two_billion_elements),
        cmocka_unit_test(test_offsets_on_both_sides_of_2_31),
        cmocka_unit_test(test_outputs_that_nobody_wants_are_not_needed),
        cmocka_unit_test(test_products_beyond_float32_count_in_latent_attention),
        cmocka_unit_test(test_a_row_whose_products_all_leave_float32_sees_its_keys),
        cmocka_unit_test(test_lse_alone_is_the_lse_beside_out),
    };
    struct CMUnitTest tests[ARRAY_SIZE(comparisons) + ARRAY_SIZE(lists) + ARRAY_SIZE(properties)];
    size_t count = 0;
    const char *const pattern = getenv("ATTN_TESTS");
    int failed;
    read_share();
    if (getenv("ATTN_BACKEND") && *getenv("ATTN_BACKEND")) backend = getenv("ATTN_BACKEND");
    const bool takes_all = strcmp(backend, "paper") != 0;
    for (size_t i = 0; i < ARRAY_SIZE(comparisons); i++) tests[count++] = comparisons[i];
    for (size_t i = 0; takes_all && i < ARRAY_SIZE(lists); i++) tests[count++] = lists[i];
    for (size_t i = 0; takes_all && i < ARRAY_SIZE(properties); i++)
        if ((long)i % share_count == share) tests[count++] = properties[i];
    if (pattern && *pattern) {
        /* A pattern that matches no test is an error here, because cmocka would count it as a success. */
        if (strchr(pattern, '[') || matching(pattern, comparisons, ARRAY_SIZE(comparisons)) +
                                            matching(pattern, lists, ARRAY_SIZE(lists)) +
                                            matching(pattern, properties, ARRAY_SIZE(properties)) ==
                                        0) {
            fprintf(stderr, "ATTN_TESTS: no test is called %s (only * and ? stand for others)\n", pattern);
            return 1;
        }
        cmocka_set_test_filter(pattern);
    }
    bench_open(&bench, backend, 0);
    failed = _cmocka_run_group_tests("test_backends", tests, count, NULL, NULL);
    bench_close(&bench);
    return failed;
}
