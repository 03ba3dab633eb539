/* habits.c: see habits.h. */
#include "habits.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "base64.h"
#include "text.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- Words ------------------------------------------------------------------------------------------------------- */

/* Places that agree: what an operation does not take, no cure of its own may name. */
#define BOTH   "forward backward"
#define SCORES BOTH " decode"
#define OPS    SCORES " append"

#define K_SHAPE    "leave it out, the shapes of k and v say it"
#define NO_PAGES   "backward has no pages; send k and v whole, or with 'cu_seqlens_k'"
#define NO_DROPOUT "leave it out, a decode drops nothing"
#define OWN_CACHE  "leave it out, 'caches' names one for each row of q, and each knows its length and its pages"
#define USE_CACHES "POST /v1/caches makes one; write its id into 'caches'"
#define TO_DECODE  "POST /v1/caches keeps keys and values, POST /v1/attention/decode attends to them"

const struct habit habits[] = {
    /* torch.nn.functional.scaled_dot_product_attention and its relatives */
    { SCORES, "query queries query_states", "write 'q'" },
    { OPS, "key keys key_states", "write 'k'" },
    { OPS, "value values value_states", "write 'v'" },
    { SCORES, "qkv kv", "send 'q', 'k' and 'v' as three tensors" },
    { "append", "kv", "send 'k' and 'v' as two tensors" },
    { SCORES, "is_causal use_causal_mask",
      "write 'causal'; where Sq and Sk differ PyTorch and JAX mean \"alignment\": \"top_left\"" },
    { SCORES, "causal_mask", "write \"causal\": true" },
    { SCORES, "softmax_scale sm_scale attn_scale qk_scale scaling scale_factor", "write 'scale'" },
    { BOTH, "mask attn_mask block_mask",
      "write 'keep_mask' (uint8 or bool, 1: may attend) or 'bias' (added to the scores)" },
    { BOTH, "attention_mask",
      "write 'keep_mask' (1: may attend), 'bias' (added to the scores), or 'seqlens_k' for padding" },
    { BOTH, "custom_mask tree_mask tree_attention_mask draft_mask",
      "write 'keep_mask' (1: may attend), and 'keep_mask_at_end' where it is of the last keys alone" },
    { "decode",
      "mask attn_mask block_mask attention_mask custom_mask tree_mask tree_attention_mask draft_mask "
      "startend_row_indices",
      "write 'keep_mask' (uint8 or bool, 1: may attend), which is of the last keys of each row" },
    { BOTH, "key_padding_mask padding_mask",
      "write 'seqlens_k' (keys of each row) or 'keep_mask' [B, 1, 1, Sk] (1: may attend)" },
    { BOTH, "attn_bias attention_bias position_bias core_attention_bias score_mod", "write 'bias'" },
    { "decode", "attn_bias attention_bias position_bias core_attention_bias score_mod",
      "a decode takes 'keep_mask' and 'alibi_slopes', and adds nothing else to the scores" },
    { BOTH, "p dropout dropout_rate p_dropout attn_dropout", "write 'dropout_p'" },
    { BOTH, "keep_prob", "write 'dropout_p', which is 1 - keep_prob" },
    { BOTH, "rng_seed rng_state dropout_rng philox_seed generator", "write 'seed'" },
    { BOTH, "training", "leave it out, 'dropout_p' alone decides" },
    { "decode",
      "p dropout dropout_rate p_dropout attn_dropout keep_prob rng_seed rng_state dropout_rng philox_seed "
      "generator training",
      NO_DROPOUT },
    { SCORES, "temperature", "write 'scale', divided by it" },
    { SCORES, "head_mask", "leave it out, a head that is not wanted need not be sent" },
    { BOTH, "use_cache", "leave it out; " TO_DECODE },
    { "decode", "use_cache", "leave it out, 'caches' are used always" },
    { SCORES, "enable_gqa", "leave it out, k and v may have fewer heads than q" },
    { SCORES, "need_weights return_attn_weights return_attn_probs return_attention_scores output_attentions",
      "the weights are never formed; lse, which a forward and a decode answer, is what can be had of them" },
    /* flash_attn and its relatives */
    { SCORES, "window_size local_window_size window_left window_right pre_tockens next_tockens",
      "write \"window\": [left, right]" },
    { SCORES, "sliding_window sliding_window_size", "write \"window\": [left, right], where -1 is unbounded" },
    { "forward decode", "return_lse return_softmax_lse return_softmax",
      "write \"outputs\": [\"out\", \"lse\"], which is the default" },
    { "backward", "return_lse return_softmax_lse return_softmax", "leave it out, a backward answers gradients" },
    { "forward decode", "softmax_lse logsumexp", "leave it out, the answer has lse" },
    { "backward", "softmax_lse logsumexp", "write 'lse'" },
    { SCORES, "logits_soft_cap soft_cap logit_cap attn_logit_softcapping", "write 'softcap'" },
    { SCORES, "slopes alibi", "write 'alibi_slopes'" },
    { SCORES, "s_aux attention_sinks", "write 'sinks'" },
    { BOTH, "cu_seqlens", "write 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { BOTH, "cu_seq_lens_q qo_indptr query_start_loc", "write 'cu_seqlens_q'" },
    { BOTH, "cu_seq_lens_k cu_seqlens_kv", "write 'cu_seqlens_k'" },
    { "forward", "kv_indptr paged_kv_indptr",
      "write 'cu_seqlens_k', or 'page_table' and 'seqlens_k' where k and v are pages" },
    { "forward", "kv_indices paged_kv_indices kv_page_indices", "write 'page_table' [B, most], the pages of each row" },
    { "forward", "kv_last_page_len paged_kv_last_page_len last_page_len",
      "write 'seqlens_k', (pages of the row - 1) * page_size + last_page_len" },
    { "forward", "page_size block_size", "leave it out, with 'page_table' it is shape[1] of k" },
    { "forward", "block_table block_tables pages_table page_tables",
      "write 'page_table', with k and v as [pages, page_size, Hk, D] and 'seqlens_k'" },
    { "forward", "slot_mapping", "leave it out, nothing is written here; 'page_table' says where keys are read" },
    { "backward",
      "kv_indptr paged_kv_indptr kv_indices paged_kv_indices kv_page_indices kv_last_page_len "
      "paged_kv_last_page_len last_page_len page_size block_size block_table block_tables pages_table page_tables "
      "slot_mapping",
      NO_PAGES },
    { BOTH, "query_seq_lengths seqused_q q_lens qo_lens actual_seq_lengths", "write 'seqlens_q'" },
    { BOTH, "cu_seqlens_q_padded", "write it as 'cu_seqlens_q', and the lengths as 'seqlens_q'" },
    { BOTH, "cu_seqlens_k_padded cu_seqlens_kv_padded", "write it as 'cu_seqlens_k', and the lengths as 'seqlens_k'" },
    { BOTH, "segment_ids q_segment_ids kv_segment_ids offsets",
      "pack the sequences one behind the other, with 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { BOTH, "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv",
      "leave it out, cu_seqlens_q and cu_seqlens_k say it" },
    { "forward", "k_cache", "write 'k', and 'seqlens_k' where rows are not full; or " TO_DECODE },
    { "forward", "v_cache", "write 'v', and 'seqlens_k' where rows are not full; or " TO_DECODE },
    { "backward", "k_cache", "write 'k', and 'seqlens_k' where rows are not full" },
    { "backward", "v_cache", "write 'v', and 'seqlens_k' where rows are not full" },
    { "forward", "past_key_values past_key_value kv_cache", "send all keys and values as 'k' and 'v'; or " TO_DECODE },
    { "backward", "past_key_values past_key_value kv_cache", "send all keys and values as 'k' and 'v'" },
    { "decode", "k_cache v_cache past_key_values past_key_value kv_cache", USE_CACHES },
    { "decode", "cache cache_id cache_ids session_id", "write \"caches\": [\"...\"], an id for each row of q" },
    { BOTH, "cache_seqlens context_lens seqused_k kv_lens actual_seq_lengths_kv key_value_seq_lengths",
      "write 'seqlens_k'" },
    { BOTH, "seqlens seq_lens",
      "write 'seqlens_q' and 'seqlens_k', or 'cu_seqlens_q' and 'cu_seqlens_k' where rows are packed" },
    { "decode",
      "key_padding_mask padding_mask cu_seqlens cu_seq_lens_q qo_indptr query_start_loc cu_seq_lens_k cu_seqlens_kv "
      "kv_indptr paged_kv_indptr kv_indices paged_kv_indices kv_page_indices kv_last_page_len paged_kv_last_page_len "
      "last_page_len page_size block_size block_table block_tables pages_table page_tables segment_ids q_segment_ids "
      "kv_segment_ids offsets query_seq_lengths seqused_q q_lens qo_lens actual_seq_lengths cu_seqlens_q_padded "
      "cu_seqlens_k_padded cu_seqlens_kv_padded max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv cache_seqlens "
      "context_lens seqused_k kv_lens actual_seq_lengths_kv key_value_seq_lengths seqlens seq_lens seqlen_k seq_len_kv",
      OWN_CACHE },
    { "decode", "slot_mapping", "leave it out, k and v are appended to each of 'caches'" },
    { BOTH, "startend_row_indices", "write 'mask_startend_rows'" },
    { OPS, "rotary_cos rotary_sin position_ids",
      "positions are not rotated here, send q and k as they are multiplied" },
    { "forward", "descale_q q_descale", "write 'q_scale'" },
    { "forward", "descale_k k_descale", "write 'k_scale'" },
    { "forward", "descale_v v_descale", "write 'v_scale'" },
    { "backward", "descale_q q_descale descale_k k_descale descale_v v_descale",
      "leave it out, a backward takes no float8" },
    { "decode", "descale_q q_descale", "leave it out, and multiply 'scale' by it" },
    { "decode append", "descale_k k_descale descale_v v_descale",
      "leave it out, a cache is given its scales where it is made, POST /v1/caches" },
    { OPS, "num_splits device backend implementation op", "leave it out, the server decides" },
    { OPS, "sizes", "leave it out, the server reads them from the shapes" },
    { BOTH, "tensor_layout qkv_layout qkv_format tensor_format input_layout", "write 'layout'" },
    { "decode", "tensor_layout qkv_layout qkv_format tensor_format input_layout",
      "leave it out, q is [B, Sq, H, D], k and v are [B, S, Hk, D]" },
    { SCORES, "attn_mask_type mask_type", "write \"causal\": true, and 'alignment'" },
    { "backward", "do grad_out grad_output", "write 'dout'" },
    { "backward", "dsoftmax_lse", "write 'dlse'" },
    { "forward", "do grad_out grad_output dsoftmax_lse", "gradients are POST /v1/attention/backward" },
    /* what the tensors say */
    { SCORES,
      "batch batch_size heads num_heads n_heads nheads head_dim head_size head_num seq_len seq_len_q seqlen "
      "seqlen_q",
      "leave it out, the shape of q says it" },
    { BOTH, "seqlen_k seq_len_kv", K_SHAPE ", or 'seqlens_k' where rows differ" },
    { BOTH, "kv_heads num_kv_heads num_heads_kv num_heads_k num_key_value_heads", K_SHAPE },
    { "decode append", "kv_heads num_kv_heads num_heads_kv num_heads_k num_key_value_heads",
      "leave it out, the cache knows it" },
    { SCORES, "dtype", "each tensor has its own 'dtype'; that of the result is 'out_dtype'" },
    { "append", "dtype", "each tensor has its own 'dtype'" },
    { OPS, "shape", "each tensor has its own 'shape'" },
    { OPS, "timeout", "write 'timeout_ms'" },
    { SCORES, "output_dtype", "write 'out_dtype'" },
    { SCORES, "output_encoding", "write 'encoding'" },
    { OPS, "precision", "leave it out, the dtypes decide" },
    /* other servers */
    { OPS, "id name request_id", "leave it out, a name for a request is the header X-Request-Id" },
    { SCORES, "stream", "leave it out, an answer comes whole" },
    { SCORES, "inputs parameters params options config tensors",
      "'q', 'k', 'v' and the options stand in the body itself" },
    { BOTH, "instances problems", "several problems are \"requests\": [{...}, {...}]" },
    { "decode", "instances problems", "several are rows of 'q', each with one of 'caches'" },
    { OPS " " HABIT_CACHE, "model messages prompt", "this server computes attention of tensors, it has no models" },
    /* a cache */
    { HABIT_CACHE, "id name cache_id", "leave it out, the answer has the id" },
    { HABIT_CACHE,
      "heads num_heads n_heads nheads head_num num_kv_heads num_heads_kv num_heads_k num_key_value_heads n_kv_heads",
      "write 'kv_heads', the heads of keys and values; q may have a multiple of them" },
    { HABIT_CACHE, "head_size d_head dim_head", "write 'head_dim'" },
    { HABIT_CACHE, "head_size_v v_head_dim v_head_size", "write 'head_dim_v'" },
    { HABIT_CACHE, "block_size page_len tokens_per_block", "write 'page_size', 64 or 128" },
    { HABIT_CACHE, "data_type torch_dtype kv_dtype cache_dtype kv_cache_dtype datatype type precision",
      "write 'dtype'" },
    { HABIT_CACHE, "descale_k k_descale", "write 'k_scale'" },
    { HABIT_CACHE, "descale_v v_descale", "write 'v_scale'" },
    { HABIT_CACHE, "ttl ttl_ms timeout timeout_s timeout_ms expires_in_s", "write 'ttl_s', in seconds" },
    { HABIT_CACHE, "mla is_mla use_mla", "write 'latent'" },
    { HABIT_CACHE, "batch batch_size", "leave it out, a cache is one sequence; make one for each" },
    { HABIT_CACHE,
      "length seq_len seqlen max_seq_len max_seqlen max_len max_length capacity size num_blocks num_pages max_pages",
      "leave it out, a cache grows with what is appended" },
    { HABIT_CACHE, "shape", "write 'kv_heads' and 'head_dim'" },
    { HABIT_CACHE, "k v key value keys values", "leave it out, POST /v1/caches/{id}/append appends keys and values" },
    { HABIT_CACHE, "device", "leave it out, the server decides" },

    { HABIT_TENSOR, "datatype data_type type", "write 'dtype'" },
    { HABIT_TENSOR, "dims dimensions size sizes", "write 'shape'" },
    { HABIT_TENSOR, "value values array list base64 b64 bytes buffer contents", "write 'data'" },
    { HABIT_TENSOR, "stride strides order", "leave it out, data is C-contiguous: np.ascontiguousarray(x)" },
    { HABIT_TENSOR, "byteorder endian", "leave it out, data is little-endian" },
    { HABIT_TENSOR, "encoding", "leave it out, data is base64 in a string or an array of numbers" },
    { HABIT_TENSOR, "device", "leave it out, the server decides" },
    { HABIT_TENSOR, "requires_grad", "leave it out, POST /v1/attention/backward has the gradients" },
    { HABIT_TENSOR, "name", "leave it out, the member's own name says it" },

    { HABIT_DTYPE, "half halftensor float16array f2", "float16" },
    { HABIT_DTYPE, "float single floattensor float32array f4", "float32" },
    { HABIT_DTYPE, "bf bfloat bfloat16tensor v2", "bfloat16" }, /* NumPy calls that of ml_dtypes V2 */
    { HABIT_DTYPE, "fp8 float8 float8_e4m3 e4m3 fp8_e4m3fn f8e4m3", "float8_e4m3fn" },
    { HABIT_DTYPE, "double float64array f8 f64 fp64", "float64" },
    { HABIT_DTYPE, "int int32array i4", "int32" },
    { HABIT_DTYPE, "long bigint64array i8", "int64" },
    { HABIT_DTYPE, "u1 byte uint8array", "uint8" },
    { HABIT_DTYPE, "b1 boolean", "bool" },

    { "keep_mask", "float32 float16 bfloat16 float64", "what is added to the scores is 'bias'" },
    { "bias", "bool uint8", "what hides keys is 'keep_mask'" },
    { "layout", "bsnd bsnh bthd blhd nhd", "write 'bshd'" },
    { "layout", "bnsd bnsh bhnd bhtd bhld hnd", "write 'bhsd'" },
    { "layout", "thd", "leave it out and give 'cu_seqlens_q' and 'cu_seqlens_k'" },
    { "layout", "sbhd", "transpose the tensors to one of these" },
    { "layout", "bsh", "split the last axis into heads: [B, S, H, D]" },
    { "alignment", "lower_right causal_lower_right right", "write 'bottom_right'" },
    { "alignment", "upper_left causal_upper_left left", "write 'top_left'" },
    { "encoding", "list json numbers", "write 'array'" },
    { "encoding", "b64 binary", "write 'base64'" },
    { "outputs", "o output attn_output", "write 'out'" },
    { "outputs", "softmax_lse logsumexp", "write 'lse'" },
    { "outputs", "attn_weights attentions probs", "the weights are never formed; 'lse' is what can be had of them" },
    { NULL, NULL, NULL },
};

const char *habit_of(const char *place, const char *word)
{
    for (const struct habit *habit = habits; habit->places; habit++)
        if (text_is_among(habit->places, place) && text_is_among(habit->words, word)) return habit->cure;
    return NULL;
}

const char *habit_dtype(const char *word, char name[HABIT_DTYPE_BYTES])
{
    /* torch.float16, dtype('float16'), <class 'jax.numpy.float16'>: the last word;
     * "<f4": behind NumPy's order of bytes */
    size_t end = strlen(word), begin;
    while (end > 0 && !isalnum((unsigned char)word[end - 1])) end--;
    for (begin = end; begin > 0 && (isalnum((unsigned char)word[begin - 1]) || word[begin - 1] == '_');) begin--;
    snprintf(name, HABIT_DTYPE_BYTES, "%.*s", (int)(end - begin), word + begin);
    const char *const known = habit_of(HABIT_DTYPE, name);
    if (known) snprintf(name, HABIT_DTYPE_BYTES, "%s", known);
    return name;
}

bool habit_big_endian(const char *dtype)
{
    const char *const sign = strchr(dtype, '>'); /* not that of "<class 'numpy.float32'>" */
    return sign && isalnum((unsigned char)sign[1]);
}

/* ---- Text that is no base64 -------------------------------------------------------------------------------------- */

#define BASE64_CALL "base64.b64encode(x.tobytes()).decode()"
#define AS_NUMBERS  "numbers as text; send the array without the quotes"
#define PRINTED     "the print of an array; send x.tolist() without quotes, or " BASE64_CALL
#define PYTHON      "a Python b'...'; send " BASE64_CALL
#define LINE_BREAK  "a line break; `base64 -w0` and base64.b64encode() write none"
#define URL_SAFE    "the URL alphabet; '+' and '/' are wanted, as base64.b64encode() writes them"
#define WHITE_SPACE "white space; write it without (forms and URLs turn '+' into a space)"

static const struct {
    const char *begins; /* all that stands before it; NULL: anything may */
    char found;
    const char *cure;
} texts[] = {
    { "data", ':', "a data URI; send only what is behind the comma" },
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

const char *habit_text(const char *head, uint64_t position, char found)
{
    for (size_t i = 0; i < COUNT(texts); i++)
        if (texts[i].found == found &&
            (!texts[i].begins || (position == strlen(texts[i].begins) && !strcmp(texts[i].begins, head))))
            return texts[i].cure;
    return NULL;
}

const char habit_typed_array[] =
    "of a typed array of JavaScript send Array.from(x), or Buffer.from(x.buffer).toString('base64')";

const char habit_hex[] = "this is hexadecimal, base64 is wanted: " BASE64_CALL;

bool habit_is_hex(const uint8_t *bytes, size_t count)
{
    enum { BLOCK = 48, LEAST = 6, MOST = 64 * BLOCK }; /* what is all digits for so long is no chance any more */
    bool digit = false; /* base64 of zeros is all 'A': a decimal digit must be there too */
    if (count < LEAST || count % 3 != 0) return false; /* no hexadecimal has padding */
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

/* ---- Bytes around a tensor --------------------------------------------------------------------------------------- */

#define ITS_BYTES "; send the bytes of the array alone, x.tobytes()"

static const struct {
    const char *begins, *cure;
} files[] = {
    { "\x93NUMPY", "they begin like an .npy file" ITS_BYTES },
    { "PK\x03\x04", "they begin like a zip file (torch.save, numpy.savez)" ITS_BYTES },
    { "\x80\x04\x95", "they begin like a pickle" ITS_BYTES },
    { "\x80\x05\x95", "they begin like a pickle" ITS_BYTES },
    { "\x1f\x8b\x08", "they begin like gzip; send them uncompressed" },
};

const char *habit_bytes(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < COUNT(files); i++) {
        const size_t length = strlen(files[i].begins);
        if (count >= length && !memcmp(bytes, files[i].begins, length)) return files[i].cure;
    }
    return NULL;
}

/* ---- Characters that are no JSON --------------------------------------------------------------------------------- */

enum where { FIRST, FIRST_TWO, SECOND_VALUE, A_VALUE, A_NAME, BEHIND, ANYWHERE };

#define UTF16      " (UTF-16, or bare bytes? Send JSON in UTF-8)"
#define SMALL      " (JSON writes true and false, as json.dumps() does)"
#define QUOTES     " (strings stand in double quotes, as json.dumps() writes them)"
#define COMMA      " (a comma too many?)"
#define NOT_FINITE "JSON has no NaN or Infinity; inside `data` write them as strings"
/* Letters that begin none of null, true, false, NaN, Infinity, None, True, False. */
#define FORM "abcdeghijklmopqrsuvwxyzABCDEGHJKLMOPQRSUVWXYZ"

static const struct {
    enum where where;
    const char *found; /* any of these; a NUL where it is empty */
    const char *cure;
} characters[] = {
    { FIRST, "\xef", " (a byte order mark? Send UTF-8 without one)" },
    { FIRST, "\xff\xfe", UTF16 },
    { FIRST_TWO, "", UTF16 },
    { FIRST, "\x1f", " (gzip? Say so: Content-Encoding: gzip)" },
    { FIRST, "\x93\x80", " (a file of NumPy or a pickle? Send a JSON object)" },
    { FIRST, "@", " (curl sends a file with --data-binary @FILE)" },
    { FIRST, "%", " (percent-encoding? Send JSON as it is, as curl's --data-binary does)" },
    { FIRST, "'", " (quotes of a shell? Windows does not take them away: curl --data-binary @FILE)" },
    { SECOND_VALUE, "o", " ([object Object]? Send JSON.stringify() of it)" },
    { FIRST, "<", " (XML or HTML? Send a JSON object)" },
    { FIRST_TWO, "-", " (a multipart form? Send the JSON object alone)" },
    { FIRST, FORM,
      " (form fields or a file's name? Send JSON: requests.post(url, json=...), curl --data-binary @FILE)" },
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
    { BEHIND, "{", " (several problems go into one {\"requests\": [...]})" },
    { ANYWHERE, "I", " (" NOT_FINITE ")" }, /* behind a minus sign too */
    { ANYWHERE, "/#", " (JSON has no comments, and no fractions such as 1/8)" },
};

static bool is_there(const struct habit_place *place, enum where where)
{
    switch (where) {
    case FIRST: return place->at == 0;
    case FIRST_TWO: return place->at <= 1;
    case SECOND_VALUE: return place->at == 1 && place->value;
    case A_VALUE: return place->value;
    case A_NAME: return place->name;
    case BEHIND: return place->end;
    case ANYWHERE: break;
    }
    return true;
}

const char *habit_character(const struct habit_place *place, unsigned char found)
{
    for (size_t i = 0; i < COUNT(characters); i++) {
        const bool same = found == '\0' ? *characters[i].found == '\0' : strchr(characters[i].found, found) != NULL;
        if (same && is_there(place, characters[i].where)) return characters[i].cure;
    }
    return "";
}
