/* suggestions.c: the tables of hints about words of other programs. */
#include "suggestions.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base64.h"
#include "text/text.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Hints for words that other programs use --------------------------------------------------------------------- */

/* Lists of operations (kinds of requests) for which a hint is given. If a hint names a member, all operations of its
 * row must accept that member. */
#define BOTH   "forward backward"
#define SCORES BOTH " decode"
#define OPS    SCORES " append observe"

#define K_SHAPE    "leave it out, the shapes of k and v say it"
#define NO_PAGES   "backward has no pages; send k and v whole, or with 'cu_seqlens_k'"
#define NO_DROPOUT "leave it out, a decode drops nothing"
#define OWN_CACHE  "leave it out, 'caches' names one for each row of q, and each knows its length and its pages"
#define USE_CACHES "POST /v1/caches makes one; write its id into 'caches'"
#define TO_DECODE  "POST /v1/caches keeps keys and values, POST /v1/attention/decode attends to them"
#define Q_SHAPE    "leave it out, the shape of q says it"
#define THE_CACHE  "leave it out, the cache knows it"
#define THE_SERVER "leave it out, the server decides"
#define GRADIENTS  "gradients are POST /v1/attention/backward"
#define NO_BIAS    "a decode takes 'keep_mask' and 'alibi_slopes', and adds nothing else to the scores"
#define AS_A_MASK  "write 'keep_mask' (uint8 or bool, 1: may attend)"
#define A_WINDOW   "write \"window\": [left, right]"
#define NO_WEIGHTS "the weights are never formed; POST /v1/attention/observe answers parts and sums of them"

/* Words for a mask or bias. For these words, a decode gets another hint than a forward or backward. */
#define BIASES                                                                                               \
    "attn_bias attention_bias position_bias core_attention_bias score_mod relative_bias rel_bias rel_pos "   \
    "rel_pos_bias "                                                                                          \
    "relative_position relative_position_bias relative_attention_bias pos_bias rpe rpb pair_bias edge_bias " \
    "additive_mask float_mask alibi_bias alibi_mask pse pse_shift score_bias"
#define MASKS                                                                                               \
    "mask attn_mask block_mask tgt_mask src_mask memory_mask bool_mask boolean_mask decoder_mask mask_mod " \
    "causal_attention_mask"
#define TREE_MASKS "custom_mask tree_mask tree_attention_mask draft_mask"
#define PATTERNS                                                                                                       \
    "prefix prefix_len prefix_lens prefix_length prefix_lm global_tokens global_attention global_attention_mask "      \
    "num_global_tokens dilation stride sparse sparsity sparse_mode block_sparse attention_chunk attention_chunk_size " \
    "chunk_size"
#define DROPOUTS                                                                                                      \
    "p dropout dropout_rate p_dropout attn_dropout drop drop_p drop_prob drop_rate dropout_prob dropout_probability " \
    "dropout_ratio attention_dropout attn_drop attn_pdrop p_drop attention_probs_dropout_prob"
#define SEEDS                                                                                                         \
    "rng_seed rng_state dropout_rng philox_seed generator random_seed rng rng_key prng_key dropout_key dropout_seed " \
    "dropout_offset philox_offset philox_seed_offset manual_seed"
#define TRAINING "training train is_training is_test eval inference"
#define KV_HEADS                                                                                                       \
    "kv_heads num_kv_heads num_heads_kv num_heads_k num_key_value_heads n_kv_heads n_kv_head num_kv_head kv_head_num " \
    "num_key_heads num_value_heads heads_k heads_kv nheads_k nheads_kv hk head_dim_v head_dim_vo v_head_dim "          \
    "head_size_v value_dim"
#define K_LENGTHS                                                                                                \
    "seqlen_k seq_len_kv seqlen_kv seq_len_k kv_seq_len kv_len kv_length k_len key_len key_length len_k len_kv " \
    "src_len source_len source_length total_k total_kv nnz_k nnz_kv sk"
#define SEQLENS_K                                                                                                      \
    "cache_seqlens context_lens seqused_k kv_lens actual_seq_lengths_kv key_value_seq_lengths kv_seq_lens kv_seqlens " \
    "seqlens_kv seq_lens_k seq_lens_kv key_lengths kv_lengths k_lens k_lengths k_seqlens cache_lens cache_lengths "    \
    "context_lengths valid_len valid_lens valid_length valid_lengths memory_lengths"
#define SEQLENS_Q "query_seq_lengths seqused_q q_lens q_lengths query_lengths qo_lens qo_lengths actual_seq_lengths"
#define SEQLENS   "seqlens seq_lens lengths lens seq_lengths sequence_lengths input_lengths"
#define SEGMENTS                                                                                \
    "segment_ids q_segment_ids kv_segment_ids offsets document_ids document_id doc_ids doc_id " \
    "sample_ids sequence_ids q_segments kv_segments"
#define CU_Q                                                                                                        \
    "cu_seq_lens_q qo_indptr query_start_loc q_cu_seqlens cu_q cu_seqlen_q cu_seqlens_query seqstart_q q_seqstart " \
    "q_offsets cum_seqlens_q cum_seq_lens_q q_indptr"
#define CU_K                                                                                                     \
    "cu_seq_lens_k cu_seqlens_kv k_cu_seqlens kv_cu_seqlens cu_k cu_kv cu_seqlen_k cu_seqlen_kv cu_seqlens_key " \
    "seqstart_k k_seqstart k_offsets kv_offsets cum_seqlens_k cum_seq_lens_kv"
#define MAX_SEQLENS                                                                                            \
    "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv max_seqlens max_seq_len max_length max_len max_q_len " \
    "max_kv_len max_s max_sequence_length"
#define LEFT_PADDING "leftpad_k leftpad left_padding left_pad cache_leftpad padding padding_side"
#define KEY_PADDING                                                                                             \
    "key_padding_mask padding_mask pad_mask src_key_padding_mask tgt_key_padding_mask memory_key_padding_mask " \
    "encoder_attention_mask"
#define KV_CACHES   "past_key_values past_key_value kv_cache paged_kv_cache kv_data kv_pages"
#define K_CACHES    "k_cache key_cache paged_k_cache k_pages"
#define V_CACHES    "v_cache value_cache paged_v_cache v_pages"
#define PAGES_OF    "kv_indices paged_kv_indices kv_page_indices page_indices block_indices page_ids"
#define PAGE_SIZES  "page_size block_size tokens_per_block"
#define PAGE_COUNTS "num_pages num_blocks max_num_blocks max_pages"
#define TABLES      "block_table block_tables pages_table page_tables"
#define DOUTS                                                                                               \
    "do grad_out grad_output d_out dy g grad grads gradient gradients cotangent upstream_grad output_grad " \
    "grad_outputs"
#define LAYOUTS                                                                                                  \
    "tensor_layout qkv_layout qkv_format tensor_format input_layout data_layout kv_layout kv_cache_layout axes " \
    "axis_order dim_order"

const struct suggestion suggestions[] = {
    /* parameter names of PyTorch's scaled_dot_product_attention and similar functions */
    { SCORES, "query queries query_states query_layer query_tensor xq", "write 'q'" },
    { SCORES " append", "key keys key_states key_layer key_tensor xk k_new new_k", "write 'k'" },
    { SCORES " append", "value values value_states value_layer value_tensor xv v_new new_v", "write 'v'" },
    { "observe", "key key_states key_layer key_tensor xk", "write 'k'" },
    { SCORES, "qkv kv", "send 'q', 'k' and 'v' as three tensors" },
    { "append", "kv", "send 'k' and 'v' as two tensors" },
    { SCORES, "is_causal use_causal_mask",
      "write 'causal'; where Sq and Sk differ PyTorch and JAX mean \"alignment\": \"top_left\"" },
    { SCORES, "causal_mask", "write \"causal\": true" },
    { SCORES, "is_decoder autoregressive parser unidirectional mask_future use_causal causal_attention",
      "write 'causal'" },
    { SCORES, "bidirectional non_causal full_attention", "leave it out, or write 'causal', which is the opposite" },
    { SCORES, "cross cross_attention cross_attn is_cross is_cross_attention attn_type attention_type",
      "leave it out, k and v may have other lengths than q" },
    { SCORES,
      "softmax_scale sm_scale attn_scale qk_scale scaling scaling_factor scale_factor logit_scale attention_scale "
      "attention_multiplier softmax_scaling",
      "write 'scale'" },
    { SCORES, "sm_scale_log2 softmax_scale_log2 scale_log2", "write 'scale', this value times ln 2" },
    { SCORES, "query_pre_attn_scalar", "write 'scale', 1 / sqrt(query_pre_attn_scalar)" },
    { BOTH, MASKS, AS_A_MASK " or 'bias' (added to the scores)" },
    { BOTH, "attention_mask",
      "write 'keep_mask' (1: may attend), 'bias' (added to the scores), or 'seqlens_k' for padding" },
    { BOTH, "inverted_mask hide_mask drop_mask mask_out", "write 'keep_mask', 1 where a query may attend" },
    { BOTH, TREE_MASKS,
      "write 'keep_mask' (1: may attend), and 'keep_mask_at_end' where it is of the last keys alone" },
    { "decode",
      MASKS " " TREE_MASKS " attention_mask startend_row_indices mask_startend_rows inverted_mask hide_mask drop_mask "
            "mask_out",
      AS_A_MASK ", which is of the last keys of each row" },
    { "decode", "keep_mask_at_end", "leave it out, 'keep_mask' is always of the last keys of each row" },
    { BOTH, PATTERNS, "write the pattern as 'keep_mask' (1: may attend) or 'mask_startend_rows'" },
    { "decode", PATTERNS, "write the pattern as 'keep_mask' (1: may attend), which is of the last keys of each row" },
    { BOTH, LEFT_PADDING, "write 'keep_mask' [B, 1, 1, Sk], 0 where a key is padding" },
    { "decode", LEFT_PADDING, "leave it out, a cache has no padding" },
    { BOTH, KEY_PADDING, "write 'seqlens_k' (keys of each row) or 'keep_mask' [B, 1, 1, Sk] (1: may attend)" },
    { BOTH, BIASES, "write 'bias'" },
    { "decode", BIASES " bias", NO_BIAS },
    { BOTH, DROPOUTS, "write 'dropout_p'" },
    { BOTH, "keep_prob", "write 'dropout_p', which is 1 - keep_prob" },
    { BOTH, SEEDS, "write 'seed'" },
    { BOTH, TRAINING, "leave it out, 'dropout_p' alone decides" },
    { "decode", DROPOUTS " " SEEDS " " TRAINING " keep_prob dropout_p seed", NO_DROPOUT },
    { SCORES, "temperature tau", "write 'scale', divided by the temperature" },
    { SCORES, "head_mask", "leave it out, a head that is not wanted need not be sent" },
    { BOTH, "use_cache", "leave it out; " TO_DECODE },
    { "decode", "use_cache", "leave it out, 'caches' are used always" },
    { SCORES, "enable_gqa", "leave it out, k and v may have fewer heads than q" },
    { SCORES,
      "need_weights return_attn_weights return_attn_probs return_attention_scores output_attentions attn_weights "
      "average_attn_weights attention_weights return_weights return_probs return_scores attention_probs attn_probs "
      "probs",
      NO_WEIGHTS },
    { SCORES, "top_k topk", "attention here is exact; 'keep_mask' hides keys" },
    /* parameter names of flash_attn and similar functions */
    { SCORES,
      "window_size local_window_size window_left window_right pre_tockens next_tockens window_sizes window_size_left "
      "window_size_right left_window right_window left_window_size right_window_size",
      A_WINDOW },
    { SCORES,
      "sliding_window sliding_window_size local_window local_attention local_attn attention_window attn_window swa "
      "window_len window_length band_width",
      A_WINDOW "; W keys up to that of the query are [W - 1, 0]; -1 is unbounded" },
    { "forward decode",
      "return_lse return_softmax_lse return_softmax return_logsumexp compute_logsumexp output_lse with_lse "
      "generate_stats",
      "write \"outputs\": [\"out\", \"lse\"], which is the default" },
    { "backward",
      "return_lse return_softmax_lse return_softmax return_logsumexp compute_logsumexp output_lse with_lse "
      "generate_stats",
      "leave it out, a backward answers gradients" },
    { "forward decode", "softmax_lse logsumexp", "leave it out, the answer has lse" },
    { "backward", "softmax_lse logsumexp softmax_stats stats l", "write 'lse'" },
    { "backward", "delta", "leave it out, it is computed from out and dout" },
    { "forward decode", "o output attn_output attn_out", "leave it out, the answer has out" },
    { "backward", "o output attn_output attn_out", "write 'out'" },
    { SCORES,
      "logits_soft_cap soft_cap logit_cap logits_cap attn_logit_softcapping attn_logit_softcap logit_softcap "
      "logits_softcap attn_softcap attention_softcap softcapping",
      "write 'softcap'" },
    { SCORES, "slopes alibi use_alibi head_slopes", "write 'alibi_slopes'" },
    { SCORES,
      "s_aux attention_sinks attention_sink learnable_sink learnable_sinks sink attn_sink attn_sinks sink_logits "
      "sink_bias softmax_offset",
      "write 'sinks'" },
    { SCORES, "num_sinks sink_tokens num_sink_tokens sink_size attention_sink_size",
      "tokens that every query sees are 1 in 'keep_mask'; 'sinks' are logits" },
    { BOTH, "cu_seqlens", "write 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { BOTH, CU_Q, "write 'cu_seqlens_q'" },
    { BOTH, CU_K, "write 'cu_seqlens_k'" },
    { "forward", "kv_indptr paged_kv_indptr",
      "write 'cu_seqlens_k', or 'page_table' and 'seqlens_k' where k and v are pages" },
    { "forward", PAGES_OF, "write 'page_table' [B, most], the pages of each row" },
    { "forward", "kv_last_page_len paged_kv_last_page_len last_page_len",
      "write 'seqlens_k', (pages of the row - 1) * page_size + last_page_len" },
    { "forward", PAGE_SIZES, "leave it out, with 'page_table' it is shape[1] of k" },
    { "forward", PAGE_COUNTS, "leave it out, with 'page_table' it is shape[0] of k" },
    { "forward", TABLES, "write 'page_table', with k and v as [pages, page_size, Hk, D] and 'seqlens_k'" },
    { "forward", "slot_mapping", "leave it out, nothing is written here; 'page_table' says where keys are read" },
    { "backward",
      "kv_indptr paged_kv_indptr kv_last_page_len paged_kv_last_page_len last_page_len slot_mapping " PAGES_OF
      " " PAGE_SIZES " " PAGE_COUNTS " " TABLES,
      NO_PAGES },
    { BOTH, SEQLENS_Q, "write 'seqlens_q'" },
    { BOTH, "cu_seqlens_q_padded", "write it as 'cu_seqlens_q', and the lengths as 'seqlens_q'" },
    { BOTH, "cu_seqlens_k_padded cu_seqlens_kv_padded", "write it as 'cu_seqlens_k', and the lengths as 'seqlens_k'" },
    { BOTH, SEGMENTS, "pack the sequences one behind the other, with 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { BOTH, MAX_SEQLENS, "leave it out, cu_seqlens_q and cu_seqlens_k say it" },
    { "forward", K_CACHES, "write 'k', and 'seqlens_k' where rows are not full; or " TO_DECODE },
    { "forward", V_CACHES, "write 'v', and 'seqlens_k' where rows are not full; or " TO_DECODE },
    { "backward", K_CACHES, "write 'k', and 'seqlens_k' where rows are not full" },
    { "backward", V_CACHES, "write 'v', and 'seqlens_k' where rows are not full" },
    { "forward", KV_CACHES, "send all keys and values as 'k' and 'v'; or " TO_DECODE },
    { "backward", KV_CACHES, "send all keys and values as 'k' and 'v'" },
    { "decode", K_CACHES " " V_CACHES " " KV_CACHES, USE_CACHES },
    { "decode", "cache cache_id cache_ids session_id session sequence_id seq_id slot slot_id cache_batch_idx",
      "write \"caches\": [\"...\"], an id for each row of q" },
    { BOTH, "cache_batch_idx", "leave it out, row b of q attends to row b of k and v" },
    { BOTH, SEQLENS_K, "write 'seqlens_k'" },
    { BOTH, SEQLENS, "write 'seqlens_q' and 'seqlens_k', or 'cu_seqlens_q' and 'cu_seqlens_k' where rows are packed" },
    { "decode",
      KEY_PADDING " " CU_Q " " CU_K " " PAGES_OF " " PAGE_SIZES " " PAGE_COUNTS " " TABLES " " SEGMENTS " " MAX_SEQLENS
                  " " SEQLENS_Q " " SEQLENS_K " " SEQLENS " " K_LENGTHS " cu_seqlens_q_padded cu_seqlens_k_padded "
                  "cu_seqlens_kv_padded cu_seqlens kv_indptr paged_kv_indptr kv_last_page_len "
                  "paged_kv_last_page_len last_page_len page_table seqlens_q seqlens_k cu_seqlens_q cu_seqlens_k",
      OWN_CACHE },
    { "decode", "slot_mapping", "leave it out, k and v are appended to each of 'caches'" },
    { BOTH, "startend_row_indices", "write 'mask_startend_rows'" },
    { SCORES,
      "offset q_offset query_offset causal_offset kv_offset position_offset start_pos start_position cache_position "
      "past_len past_length past_kv_len diagonal",
      "leave it out; with 'causal' the last query sees the last key, unless 'alignment' is top_left" },
    { OPS,
      "rotary_cos rotary_sin position_ids rope rope_theta rope_scale rope_scaling rotary_dim rotary_emb rotary_base "
      "rotary_interleaved rotary_seqlens cos sin freqs_cis freqs position_embeddings pos_encoding_mode",
      "positions are not rotated here, send q and k as they are multiplied" },
    { "forward", "descale_q q_descale", "write 'q_scale'" },
    { "forward", "descale_k k_descale", "write 'k_scale'" },
    { "forward", "descale_v v_descale", "write 'v_scale'" },
    { "backward", "descale_q q_descale descale_k k_descale descale_v v_descale",
      "leave it out, a backward takes no float8" },
    { "decode", "descale_q q_descale", "leave it out, and multiply 'scale' by it" },
    { "decode append", "descale_k k_descale descale_v v_descale",
      "leave it out, a cache is given its scales where it is made, POST /v1/caches" },
    { OPS, "eps epsilon norm qk_norm q_norm k_norm norm_q norm_k layer_norm rms_norm normalize",
      "nothing is normalised here, send q and k as they are multiplied" },
    { SCORES " append",
      "in_proj_weight in_proj_bias out_proj out_proj_weight out_proj_bias q_proj k_proj v_proj o_proj qkv_proj c_attn "
      "c_proj wq wk wv wo w_q w_k w_v w_o w_qkv weight weights",
      "there are no weights here, send q, k and v after their projections" },
    { SCORES, "hidden_states inputs_embeds x input", "send 'q', 'k' and 'v', the projections of it" },
    { OPS,
      "num_splits device backend implementation impl engine provider kernel kernel_name kernel_options algorithm algo "
      "use_flash use_flash_attention flash allow_tf32 sdp_backend attn_implementation attention_backend enable_flash "
      "enable_math enable_mem_efficient pack_gqa sm_margin scheduler_metadata block_m block_n block_q block_k "
      "block_sizes num_warps num_stages use_triton use_cudnn use_tensor_cores use_cuda use_gpu gpu gpu_id device_id "
      "cuda threads num_threads workers workspace workspace_buffer split_k num_kv_splits",
      THE_SERVER },
    { OPS, "op operation task action endpoint method type function mode direction",
      "leave it out, the path says it: POST /v1/attention/forward, backward, observe or decode" },
    { OPS, "verbose debug log logging log_level trace profile", "leave it out, an answer has backend and timing_us" },
    { OPS, "ring cp_group cp_size context_parallel tp_size process_group",
      "leave it out; what each rank computes is merged by lse" },
    { "forward decode", "deterministic", "leave it out, the same kernel always gives the same bits" },
    { OPS, "sizes", "leave it out, the server reads them from the shapes" },
    { BOTH, LAYOUTS, "write 'layout'" },
    { "decode", LAYOUTS " layout", "leave it out, q is [B, Sq, H, D], k and v are [B, S, Hk, D]" },
    { SCORES, "attn_mask_type mask_type mask_mode causal_type causal_variant",
      "write \"causal\": true, and 'alignment'" },
    { "observe", "v value values value_states value_layer value_tensor xv",
      "leave it out, an observe needs q and k alone" },
    { "observe", "outputs returns names wanted quantities", "write 'observe'" },
    { "backward", DOUTS, "write 'dout'" },
    { "backward", "dsoftmax_lse dlogsumexp grad_lse", "write 'dlse'" },
    { "backward", "requires_grad need_grad compute_grad with_grad return_grad",
      "leave it out, a backward answers dq, dk and dv" },
    { "forward decode",
      DOUTS " dsoftmax_lse dlogsumexp grad_lse requires_grad need_grad compute_grad with_grad return_grad dq dk dv "
            "dbias dsinks dout dlse",
      GRADIENTS },
    { "decode", "save context", "a decode has no gradient" },
    { "forward", "save_for_backward save_context retain_graph", "write 'save'" },
    { "backward", "ctx context_id handle saved", "write 'context', which a forward with save returns" },
    { "forward", "check validate verify_rows", "write 'verify'" },
    /* parameter names for sizes, which the server reads from the shapes of the tensors */
    { SCORES,
      "batch batch_size heads num_heads n_heads nheads head_dim head_size head_num seq_len seq_len_q seqlen "
      "seqlen_q num_attention_heads n_head num_query_heads num_q_heads num_qo_heads q_heads heads_q dim_head d_head "
      "head_dim_qk head_dim_k qk_head_dim num_queries q_len q_length query_len query_length len_q tgt_len target_len "
      "target_length n_ctx seq_length sequence_length total_q total_tokens num_tokens nnz_q b h d s n t sq",
      Q_SHAPE },
    { SCORES, "embed_dim hidden_size hidden_dim d_model model_dim", Q_SHAPE ", where heads have an axis of their own" },
    { SCORES, "num_key_value_groups num_kv_groups num_gqa_groups n_rep gqa_group_size gqa_ratio group_size num_groups",
      "leave it out, the heads of q and of k say it" },
    { BOTH, K_LENGTHS, K_SHAPE ", or 'seqlens_k' where rows differ" },
    { BOTH, KV_HEADS, K_SHAPE },
    { "decode append", KV_HEADS, THE_CACHE },
    { OPS, "data shapes q_shape k_shape v_shape q_dtype k_dtype v_dtype q_data k_data v_data ndarray arrays",
      "a tensor is one member, an object with shape, dtype and data" },
    { "forward decode", "dtype", "each tensor has its own 'dtype'; that of the result is 'out_dtype'" },
    { "backward", "dtype", "each tensor has its own 'dtype'; that of the gradients is 'grad_dtype'" },
    { "append", "dtype", "each tensor has its own 'dtype'" },
    { OPS, "shape", "each tensor has its own 'shape'" },
    { OPS, "timeout timeout_s timeout_sec timeout_seconds timeout_us deadline deadline_ms time_limit max_time ttl",
      "write 'timeout_ms', in milliseconds" },
    { "forward decode", "output_dtype dtype_out result_dtype o_dtype o_data_type", "write 'out_dtype'" },
    { "backward", "out_dtype output_dtype dtype_out result_dtype", "the dtype of dq, dk and dv is 'grad_dtype'" },
    { "backward", "dq_dtype dqkv_dtype gradient_dtype grads_dtype", "write 'grad_dtype'" },
    { SCORES, "output_encoding response_encoding data_encoding", "write 'encoding'" },
    { SCORES, "output_names out_names returns", "write 'outputs'" },
    { SCORES, "return_dict return_type return_tensors format output_format out_format response_format binary",
      "leave it out; 'encoding' says how numbers are written, the header Accept asks for safetensors" },
    { OPS, "precision compute_dtype acc_dtype acc_type accumulate_dtype q_data_type kv_data_type fp32_accumulate",
      "leave it out, the dtypes decide" },
    /* members that bodies for other servers have */
    { OPS, "id name request_id trace_id correlation_id idempotency_key metadata comment tags",
      "leave it out, a name for a request is the header X-Request-Id" },
    { OPS " " SUGGESTION_CACHE, "token api_key auth authorization bearer access_token password",
      "it goes into the header Authorization: Bearer <token>" },
    { OPS " " SUGGESTION_CACHE, "user user_id client client_id tenant",
      "leave it out, the bearer token says who asks" },
    { OPS " " SUGGESTION_CACHE, "version api_version schema_version", "leave it out, the path says it: /v1" },
    { OPS, "compression content_encoding", "leave it out; a compressed body has the header Content-Encoding: gzip" },
    { SCORES, "stream streaming async callback webhook", "leave it out, an answer comes whole" },
    { SCORES, "inputs parameters params options config tensors args kwargs payload body",
      "'q', 'k', 'v' and the options stand in the body itself" },
    { BOTH, "instances problems batches items examples", "several problems are \"requests\": [{...}, {...}]" },
    { "decode", "instances problems batches items examples", "several are rows of 'q', each with one of 'caches'" },
    { OPS " " SUGGESTION_CACHE, "model messages prompt text input_ids token_ids tokens max_tokens max_new_tokens",
      "this server computes attention of tensors, it has no models" },
    /* members of the body of POST /v1/caches, which makes a cache */
    { SUGGESTION_CACHE, "id name cache_id sequence_id session_id session request_id",
      "leave it out, the answer has the id" },
    { SUGGESTION_CACHE,
      "heads num_heads n_heads nheads head_num num_attention_heads num_kv_heads num_heads_kv num_heads_k "
      "num_key_value_heads n_kv_heads n_kv_head num_kv_head kv_head_num nheads_k hk h",
      "write 'kv_heads', the heads of keys and values; q may have a multiple of them" },
    { SUGGESTION_CACHE, "head_size d_head dim_head d dk dim qk_head_dim head_dim_k head_dim_qk", "write 'head_dim'" },
    { SUGGESTION_CACHE, "head_size_v v_head_dim v_head_size head_dim_vo dv", "write 'head_dim_v'" },
    { SUGGESTION_CACHE, "kv_lora_rank qk_rope_head_dim",
      "write 'latent': head_dim is kv_lora_rank + qk_rope_head_dim, head_dim_v is kv_lora_rank" },
    { SUGGESTION_CACHE, "layers num_layers n_layers num_hidden_layers layer layer_id layer_idx",
      "leave it out, a cache is of one layer; make one for each" },
    { SUGGESTION_CACHE,
      "causal scale softmax_scale window window_size sliding_window attention_window softcap alibi_slopes sinks",
      "send it with each step, POST /v1/attention/decode" },
    { SUGGESTION_CACHE, "layout kv_layout", "leave it out, keys and values are [S, Hk, D]" },
    { SUGGESTION_CACHE, "block_size page_len tokens_per_block", "write 'page_size', 64 or 128" },
    { SUGGESTION_CACHE,
      "data_type torch_dtype kv_dtype cache_dtype kv_cache_dtype k_dtype v_dtype datatype type precision",
      "write 'dtype'" },
    { SUGGESTION_CACHE, "descale_k k_descale", "write 'k_scale'" },
    { SUGGESTION_CACHE, "descale_v v_descale", "write 'v_scale'" },
    { SUGGESTION_CACHE, "ttl ttl_ms timeout timeout_s timeout_ms expires_in_s expires lifetime max_age idle_timeout",
      "write 'ttl_s', in seconds" },
    { SUGGESTION_CACHE, "mla is_mla use_mla", "write 'latent'" },
    { SUGGESTION_CACHE, "batch batch_size", "leave it out, a cache is one sequence; make one for each" },
    { SUGGESTION_CACHE,
      "length seq_len seqlen max_seq_len max_seqlen max_len max_length capacity size num_blocks num_pages max_pages",
      "leave it out, a cache grows with what is appended" },
    { SUGGESTION_CACHE, "shape", "write 'kv_heads' and 'head_dim'" },
    { SUGGESTION_CACHE, "k v key value keys values",
      "leave it out, POST /v1/caches/{id}/append appends keys and values" },
    { SUGGESTION_CACHE, "device backend gpu", THE_SERVER },
    { SUGGESTION_LENGTH,
      "n len size count position positions pos num_tokens tokens seq_len seqlen new_length keep to end",
      "write 'length', the positions that stay" },

    { SUGGESTION_KSERVE, "instances signature_name predictions", "this is version 2: tensors stand in 'inputs'" },
    { SUGGESTION_KSERVE, "params options config", "write 'parameters'" },
    { SUGGESTION_KSERVE, "request_id", "write 'id'" },
    { SUGGESTION_KSERVE, "model version name", "leave it out, the path says it" },

    { SUGGESTION_INPUT, "dtype data_type type", "write 'datatype'" },
    { SUGGESTION_INPUT, "dims dimensions size sizes", "write 'shape'" },
    { SUGGESTION_INPUT, "contents content values value array b64 base64 bytes fp32_contents",
      "write numbers into 'data', or 'binary_data_size' into the parameters of the input, its bytes behind the JSON" },
    { SUGGESTION_INPUT, "binary_data_size shared_memory_region shared_memory_offset shared_memory_byte_size",
      "write it into the parameters of the input" },
    { SUGGESTION_INPUT, "fp8 binary_data", "write it into parameters" },

    { SUGGESTION_TENSOR, "datatype data_type type", "write 'dtype'" },
    { SUGGESTION_TENSOR, "dims dimensions size sizes", "write 'shape'" },
    { SUGGESTION_TENSOR, "value values array list base64 b64 bytes buffer contents content raw ndarray floats numbers",
      "write 'data'" },
    { SUGGESTION_TENSOR, "stride strides order", "leave it out, data is C-contiguous: np.ascontiguousarray(x)" },
    { SUGGESTION_TENSOR, "ndim rank numel length nbytes", "leave it out, shape says it" },
    { SUGGESTION_TENSOR, "layout", "write it beside q; it holds for all tensors" },
    { SUGGESTION_TENSOR, "scale scales zero_point",
      "the factors of float8 are tensors beside q: q_scale, k_scale, v_scale" },
    { SUGGESTION_TENSOR, "compression", "leave it out; the whole body may be compressed, Content-Encoding: gzip" },
    { SUGGESTION_TENSOR, "byteorder byte_order endian endianness", "leave it out, data is little-endian" },
    { SUGGESTION_TENSOR, "encoding", "leave it out, data is base64 in a string or an array of numbers" },
    { SUGGESTION_TENSOR, "device", "leave it out, the server decides" },
    { SUGGESTION_TENSOR, "requires_grad grad", "leave it out, POST /v1/attention/backward has the gradients" },
    { SUGGESTION_TENSOR, "name", "leave it out, the member's own name says it" },

    { SUGGESTION_DTYPE, "half halftensor float16array f2 e khalf dt_half type_fp16 cuda_r_16f half_float", "float16" },
    { SUGGESTION_DTYPE, "float single floattensor float32array f4 tf32 f kfloat dt_float type_fp32 cuda_r_32f",
      "float32" },
    /* NumPy's V2 (here in lower case) is bfloat16 of the package ml_dtypes */
    { SUGGESTION_DTYPE, "bf bfloat bfloat16tensor v2 kbfloat16 dt_bfloat16 type_bf16 cuda_r_16bf", "bfloat16" },
    { SUGGESTION_DTYPE, "fp8 float8 float8_e4m3 e4m3 e4m3fn fp8_e4m3fn f8e4m3 f8e4m3fn fp8e4nv", "float8_e4m3fn" },
    { SUGGESTION_DTYPE, "double float64array f8 f64 fp64 d kdouble", "float64" },
    { SUGGESTION_DTYPE, "int int32array i4", "int32" },
    { SUGGESTION_DTYPE, "long bigint64array i8", "int64" },
    { SUGGESTION_DTYPE, "u1 byte uint8array", "uint8" },
    { SUGGESTION_DTYPE, "b1 boolean", "bool" },

    { "keep_mask", "float32 float16 bfloat16 float64", "what is added to the scores is 'bias'" },
    { "bias", "bool uint8", "what hides keys is 'keep_mask'" },
    { "q k v", "uint16 int16 ushort short u2 i2",
      "where these are the bits of bfloat16 or float16, write that; else convert it to float32" },
    { "q k v", "uint8", "where these are the bits of float8_e4m3fn, write that; else convert it to float32" },
    { "layout", "bsnd bsnh bthd blhd nhd", "write 'bshd'" },
    { "layout", "bnsd bnsh bhnd bhtd bhld hnd", "write 'bhsd'" },
    { "layout", "thd", "leave it out and give 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { "layout", "sbhd", "transpose the tensors to one of these" },
    { "layout", "bsh", "split the last axis into heads: [B, S, H, D]" },
    { "layout", "torch pytorch sdpa hf huggingface transformers", "write 'bhsd'" },
    { "layout", "flash flash_attn jax xformers numpy", "write 'bshd'" },
    { "alignment", "lower_right causal_lower_right right bottom end flash flash_attn flash2 xformers",
      "write 'bottom_right'" },
    { "alignment", "upper_left causal_upper_left left top start torch pytorch sdpa jax", "write 'top_left'" },
    { "encoding", "list json numbers text plain", "write 'array'" },
    { "encoding", "b64 binary hex", "write 'base64'" },
    { "encoding", "raw bytes safetensors npy numpy",
      "bytes come where the header Accept is application/x-safetensors" },
    { "outputs", "dq dk dv dbias dsinks dalibi_slopes", GRADIENTS },
    { "outputs", "q_grad k_grad v_grad grad_q grad_k grad_v grad_query grad_key grad_value",
      "gradients are 'dq', 'dk' and 'dv' of POST /v1/attention/backward" },
    { "outputs", "o output attn_output attn_out", "write 'out'" },
    { "outputs", "softmax_lse logsumexp", "write 'lse'" },
    { "outputs", "attn_weights attention_weights attentions attn_probs probs weights scores logits", NO_WEIGHTS },
    { "observe", "attn_weights attention_weights attentions attn_probs probs probabilities p scores",
      "write \"observe\": [\"weights\"], with rows and keys for a part of them" },
    { "observe", "max max_score qk_max logit_max max_qk", "write \"observe\": [\"max_logit\"]" },
    { "observe", "attention_sum column_sum col_sum importance mass", "write \"observe\": [\"key_mass\"]" },
    { NULL, NULL, NULL },
};

const char *suggestion_of(const char *place, const char *word)
{
    for (const struct suggestion *suggestion = suggestions; suggestion->places; suggestion++)
        if (text_is_among(suggestion->places, place) && text_has_word(suggestion->words, word))
            return suggestion->suggestion;
    return NULL;
}

/* ---- Hints for names that contain a known word ------------------------------------------------------------------- */

#define NO_LAYER "this server computes attention alone, there are no layers, weights and tokens here"

const struct suggestion suggestion_topics[] = {
    { SCORES, "softcap softcapping capping cap tanh", "about a cap there is 'softcap'" },
    { SCORES, "sink sinks softmax1", "about sinks there is 'sinks', a logit of each head" },
    { SCORES, "alibi slope slopes", "about ALiBi there is 'alibi_slopes'" },
    { BOTH, "dropout drop dropped", "about dropout there are 'dropout_p' and 'seed'" },
    { "decode", "dropout drop dropped seed rng random", "a decode drops nothing" },
    { BOTH, "seed rng prng philox random", "about random numbers there is 'seed'" },
    { "forward", "scale scales scaling scaled descale amax temperature temp",
      "about scales there are 'scale', and 'q_scale', 'k_scale' and 'v_scale' of float8" },
    { "backward decode", "scale scales scaling scaled descale amax temperature temp", "about scales there is 'scale'" },
    { BOTH, "mask masks masked sparse sparsity bigbird longformer strict reverse global",
      "about masks there are 'keep_mask' (1: may attend), 'bias' and 'mask_startend_rows'" },
    { "decode", "mask masks masked sparse sparsity strict tree draft spec medusa global",
      "about masks there is 'keep_mask' (1: may attend), of the last keys" },
    { BOTH, "bias biases", "about what is added to the scores there are 'bias' and 'alibi_slopes'" },
    { "decode", "bias biases", NO_BIAS },
    { SCORES, "window windows lookahead ahead span band bound swa",
      "about windows there is \"window\": [left, right]" },
    { SCORES, "causal triangular diagonal alignment aligned", "about causal masks there are 'causal' and 'alignment'" },
    { "forward", "page pages paged block blocks slot slots",
      "about pages there are 'page_table' and 'seqlens_k'; or " TO_DECODE },
    { "backward", "page pages paged block blocks slot slots", NO_PAGES },
    { "decode", "page pages paged block blocks slot slots cache caches cached past", OWN_CACHE },
    { BOTH,
      "len lens length lengths seqlen seqlens seq sequence sequences indptr offset offsets start loc ragged packed "
      "padded pad padding varlen segment document qlen kvlen",
      "about lengths there are 'seqlens_q' and 'seqlens_k', and for packed rows 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { "decode", "len lens length lengths seqlen seqlens seq sequence sequences indptr offset offsets start",
      OWN_CACHE },
    { "forward", "cache caches cached past", TO_DECODE },
    { "backward", "cache caches cached past", "send all keys and values as 'k' and 'v'" },
    { "forward decode", "grad grads gradient gradients derivative loss backward", GRADIENTS },
    { "backward", "grad grads gradient gradients dout derivative loss", "about gradients there are 'dout' and 'dlse'" },
    { SCORES, "weights probs attentions entropy max sum", NO_WEIGHTS },
    { OPS, "rope rotary pos position positions",
      "positions are not rotated here, send q and k as they are multiplied" },
    { OPS, "norm normalize layernorm rmsnorm", "nothing is normalised here, send q and k as they are multiplied" },
    { BOTH, "quant quantize quantized quantization bits int8 int4 fp8",
      "a forward takes float8_e4m3fn, other numbers are converted before they are sent" },
    { "forward decode", "dtype precision upcast accum accumulate accumulation fp32 fp16 bf16 float32 float16",
      "about dtypes there is 'out_dtype', and each tensor has its own" },
    { "backward", "dtype precision upcast accum accumulate accumulation fp32 fp16 bf16 float32 float16",
      "about dtypes there is 'grad_dtype', and each tensor has its own" },
    { BOTH, "layout transpose transposed permute axis axes order first last",
      "about the order of axes there is 'layout', of [B, S, H, D] or [B, H, S, D]" },
    { OPS, "stride strides contiguous", "data are C-contiguous, there are no strides" },
    { "forward decode",
      "output outputs out return returns result results lse answer response reply include includes only select",
      "about what comes back there are 'outputs', 'out_dtype' and 'encoding'" },
    { "backward",
      "output outputs out return returns result results lse answer response reply include includes only select",
      "about what comes back there are 'outputs' and 'encoding'" },
    { SCORES, "base64 b64 list array numpy format encoding serialization json",
      "about how tensors are written there is 'encoding'" },
    { SCORES, "deterministic reproducible bitwise exact approx approximate",
      "attention here is exact; only a backward on a GPU has a choice, deterministic" },
    { OPS, "timeout deadline time ttl wait retry retries", "about time there is 'timeout_ms'" },
    { SCORES, "priority qos urgency", "about order there is 'priority'" },
    { OPS,
      "kernel kernels backend flash fa sdpa sdp math cudnn xformers triton engine fuse fused algorithm rank world nccl "
      "device gpu cuda thread threads prefill phase stage mode",
      "the server decides what computes it" },
    { OPS, "shm shared region pointer ptr address handle ipc file path url uri",
      "tensors are in the body; shared memory goes by POST /v2/models/attention_forward/infer" },
    { SCORES,
      "head heads dim dims hdim num size sizes shape shapes batch batches bs bsz bsize group groups query queries key "
      "keys "
      "dh dk nh hq hkv tq tk lq lk",
      "the shapes of q, k and v say all sizes" },
    { OPS,
      "layer layers encoder parser expert experts gelu activation residual smoothing embedding embeddings src tgt "
      "source target model token tokens text beam beams sampling stop eos logits proj projection",
      NO_LAYER },
    { OPS, "id ids name tag label title description notes job run request session experiment trace agent client",
      "a name for a request is the header X-Request-Id" },
    { NULL, NULL, NULL },
};

/* Finds the next word of a name: "mask" and "dtype" in mask_dtype and maskDtype. */
static const char *next_part(const char *at, size_t *length)
{
    while (*at && !isalnum((unsigned char)*at)) at++;
    *length = *at != '\0';
    while (isalnum((unsigned char)at[*length]) &&
           !(isupper((unsigned char)at[*length]) && islower((unsigned char)at[*length - 1])))
        ++*length;
    return at;
}

const char *suggestion_topic(const char *place, const char *word)
{
    for (const struct suggestion *topic = suggestion_topics; topic->places; topic++) {
        size_t length;
        if (!text_is_among(topic->places, place)) continue;
        for (const char *part = next_part(word, &length); length > 0; part = next_part(part + length, &length)) {
            char name[32];
            if (length >= sizeof name) continue;
            snprintf(name, sizeof name, "%.*s", (int)length, part);
            if (text_is_among(topic->words, name)) return topic->suggestion;
        }
    }
    return NULL;
}

const char *suggestion_dtype(const char *word, char name[SUGGESTION_DTYPE_BYTES])
{
    /* the last word is the dtype: "float16" in torch.float16 and <class 'jax.numpy.float16'>, "f4" in "<f4" */
    size_t end = strlen(word), begin;
    while (end > 0 && !isalnum((unsigned char)word[end - 1])) end--;
    for (begin = end; begin > 0 && (isalnum((unsigned char)word[begin - 1]) || word[begin - 1] == '_');) begin--;
    snprintf(name, SUGGESTION_DTYPE_BYTES, "%.*s", (int)(end - begin), word + begin);
    const char *const known = suggestion_of(SUGGESTION_DTYPE, name);
    if (known) snprintf(name, SUGGESTION_DTYPE_BYTES, "%s", known);
    return name;
}

bool suggestion_big_endian(const char *dtype)
{
    /* the '>' of a big-endian dtype such as ">f4", or the '>' at the end of "<class 'numpy.float32'>" */
    const char *const sign = strchr(dtype, '>');
    return sign && isalnum((unsigned char)sign[1]);
}

/* ---- Hints for text that is not base64 --------------------------------------------------------------------------- */

#define BASE64_CALL "base64.b64encode(x.tobytes()).decode()"
#define AS_NUMBERS  "numbers as text; send the array without the quotes"
#define PRINTED     "the print of an array; send x.tolist() without quotes, or " BASE64_CALL
#define PYTHON      "a Python b'...'; send " BASE64_CALL
#define LINE_BREAK  "a line break; `base64 -w0` and base64.b64encode() write none"
#define URL_SAFE    "the URL alphabet; '+' and '/' are wanted, as base64.b64encode() writes them"
#define WHITE_SPACE "white space; write it without (forms and URLs turn '+' into a space)"

static const struct {
    /* the hint applies if the text before the bad character is exactly `begins`; NULL: to any text */
    const char *begins;
    char found;
    const char *suggestion;
} texts[] = {
    { "data", ':', "a data URI; send only what is behind the comma" },
    { "base64", ':', "a prefix; send only what is behind the colon" },
    { "base64", ',', "a prefix; send only what is behind the comma" },
    { "b", '\'', PYTHON },
    { "b", '"', PYTHON },
    { "", '[', AS_NUMBERS },
    { "array", '(', PRINTED },
    { "tensor", '(', PRINTED },
    { "Array", '(', PRINTED },
    { NULL, '.', AS_NUMBERS },
    { NULL, ',', AS_NUMBERS },
    { NULL, '\n', LINE_BREAK },
    { NULL, '\r', LINE_BREAK },
    { NULL, '-', URL_SAFE },
    { NULL, '_', URL_SAFE },
    { NULL, ' ', WHITE_SPACE },
    { NULL, '\t', WHITE_SPACE },
    { NULL, '%', "percent-encoding; send base64 as it is" },
};

const char *suggestion_text(const char *head, uint64_t position, char found)
{
    for (size_t i = 0; i < COUNT(texts); i++)
        if (texts[i].found == found &&
            (!texts[i].begins || (position == strlen(texts[i].begins) && !strcmp(texts[i].begins, head))))
            return texts[i].suggestion;
    return NULL;
}

const char suggestion_typed_array[] =
    "of a typed array of JavaScript send Array.from(x), or Buffer.from(x.buffer).toString('base64')";

const char suggestion_hex[] = "this is hexadecimal, base64 is wanted: " BASE64_CALL;

bool suggestion_is_hex(const uint8_t *bytes, size_t count)
{
    /* BLOCK: bytes that one iteration examines. LEAST: shorter text may look hexadecimal by chance. MOST: only the
     * first MOST bytes are examined. */
    enum { BLOCK = 48, LEAST = 6, MOST = 64 * BLOCK };
    /* Text without a decimal digit is not called hexadecimal, because the base64 text of zeros has only the letter
     * 'A'. */
    bool digit = false;
    /* hexadecimal text has no '=', so it decodes to a multiple of 3 bytes */
    if (count < LEAST || count % 3 != 0) return false;
    for (size_t at = 0; at < count && at < MOST; at += BLOCK) {
        char text[BASE64_ENCODED(BLOCK)];
        const size_t part = count - at < BLOCK ? count - at : BLOCK;
        base64_encode(bytes + at, part, text);
        for (size_t i = 0; i < BASE64_ENCODED(part); i++) {
            const bool prefix = at == 0 && i == 1 && text[0] == '0' && (text[1] | 0x20) == 'x';
            if (!isxdigit((unsigned char)text[i]) && !prefix) return false;
            digit |= isdigit((unsigned char)text[i]) != 0;
        }
    }
    return digit;
}

bool suggestion_is_base64(const uint8_t *bytes, size_t count)
{
    enum { MOST = 256 };
    for (size_t i = 0; i < count && i < MOST; i++)
        if (!isalnum(bytes[i]) && bytes[i] != '+' && bytes[i] != '/' && bytes[i] != '=') return false;
    return count > 0;
}

/* ---- Hints for files that clients send instead of a tensor's bytes ----------------------------------------------- */

#define ITS_BYTES "; send the bytes of the array alone, x.tobytes()"

static const struct {
    const char *begins, *suggestion;
} files[] = {
    { "\x93NUMPY", "they begin like an .npy file" ITS_BYTES },
    { "PK\x03\x04", "they begin like a zip file (torch.save, numpy.savez)" ITS_BYTES },
    { "\x80\x04\x95", "they begin like a pickle" ITS_BYTES },
    { "\x80\x05\x95", "they begin like a pickle" ITS_BYTES },
    { "\x1f\x8b\x08", "they begin like gzip; send them uncompressed" },
    { "\x78\x9c", "they begin like zlib; send them uncompressed" },
    { "\x78\xda", "they begin like zlib; send them uncompressed" },
    { "\x28\xb5\x2f\xfd", "they begin like zstd; send them uncompressed" },
};

const char *suggestion_bytes(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < COUNT(files); i++) {
        const size_t length = strlen(files[i].begins);
        if (count >= length && !memcmp(bytes, files[i].begins, length)) return files[i].suggestion;
    }
    return NULL;
}

/* ---- Hints for characters that are not JSON ---------------------------------------------------------------------- */

#define UTF16      " (UTF-16, or bare bytes? Send JSON in UTF-8)"
#define SMALL      " (JSON writes true and false, as json.dumps() does)"
#define QUOTES     " (strings stand in double quotes, as json.dumps() writes them)"
#define COMMA      " (a comma too many?)"
#define NOT_FINITE "JSON has no NaN or Infinity; inside `data` write them as strings"
/* Letters that begin no JSON value: all ASCII letters except the first letters of null, true, false and of the
 * constants NaN, Infinity, None, True, False. */
#define FORM "abcdeghijklmopqrsuvwxyzABCDEGHJKLMOQRSUVWXYZ"

#define FIRST     SUGGESTION_OTHER, 1
#define FIRST_TWO SUGGESTION_OTHER, 2
#define A_VALUE   SUGGESTION_VALUE, 0
#define A_NAME    SUGGESTION_NAME, 0
#define ANYWHERE  SUGGESTION_OTHER, 0

static const struct {
    /* what JSON would allow in place of the wrong character; SUGGESTION_OTHER: anything */
    suggestion_place place;
    /* the character must be one of the first `before` bytes of the body; 0: anywhere */
    int before;
    const char *found; /* the characters that get this hint; "": the NUL character */
    const char *suggestion;
} characters[] = {
    { FIRST, "\xef", " (a byte order mark? Send UTF-8 without one)" },
    { FIRST, "\xff\xfe", UTF16 },
    { FIRST_TWO, "", UTF16 },
    { FIRST, "\x1f", " (gzip? Say so: Content-Encoding: gzip)" },
    { FIRST, "\x93\x80", " (a file of NumPy or a pickle? Send a JSON object)" },
    { FIRST, "@", " (curl sends a file with --data-binary @FILE)" },
    { FIRST, "%", " (percent-encoding? Send JSON as it is, as curl's --data-binary does)" },
    { FIRST, "'", " (quotes of a shell? Windows does not take them away: curl --data-binary @FILE)" },
    { FIRST, "<", " (XML or HTML? Send a JSON object)" },
    { FIRST_TWO, "-", " (a multipart form? Send the JSON object alone)" },
    { FIRST, "P", " (a zip file, as .npz and .pt are? Send a JSON object, or a safetensors file)" },
    { FIRST, FORM,
      " (form fields or a file's name? Send JSON: requests.post(url, json=...), curl --data-binary @FILE)" },
    { SUGGESTION_VALUE, 2, "o", " ([object Object]? Send JSON.stringify() of it)" },
    { A_VALUE, "N", " (" NOT_FINITE "; for None leave the member out)" },
    { A_VALUE, "TF", SMALL },
    { A_VALUE, "u", " (undefined is not JSON, leave the member out)" },
    { A_VALUE, "'", QUOTES },
    { A_VALUE, "$", " (a variable of a shell? Between single quotes it stays as it is)" },
    { A_VALUE, "(", " (a tuple? JSON writes [...])" },
    { A_VALUE, "+", " (a number has no plus sign)" },
    { A_VALUE, ".", " (a digit stands before the point)" },
    { A_VALUE, "]},", COMMA },
    { A_NAME, "'", QUOTES },
    { A_NAME, "},", COMMA },
    { SUGGESTION_END, 0, "{", " (several problems go into one {\"requests\": [...]})" },
    { ANYWHERE, "I", " (" NOT_FINITE ")" }, /* 'I' begins Infinity, also after a minus sign */
    { ANYWHERE, "/#", " (JSON has no comments, and no fractions such as 1/8)" },
};

const char *suggestion_character(uint64_t at, suggestion_place place, unsigned char found)
{
    for (size_t i = 0; i < COUNT(characters); i++) {
        const bool same = found == '\0' ? *characters[i].found == '\0' : strchr(characters[i].found, found) != NULL;
        if (same && (characters[i].place == SUGGESTION_OTHER || characters[i].place == place) &&
            (characters[i].before == 0 || at < (uint64_t)characters[i].before))
            return characters[i].suggestion;
    }
    return "";
}
