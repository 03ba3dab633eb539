/* parse_options.c: reads the options, which are the members of a problem that are not tensors. */
#include "parse_internal.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "suggestions.h"
#include "text/text.h"

/* ---- The table of options ---------------------------------------------------------------------------------------- */

enum {
    BOTH = PROTO_FORWARD | PROTO_BACKWARD,
    LOOKS = BOTH | PROTO_OBSERVE,
    OUTPUTS = BOTH | PROTO_DECODE | PROTO_MERGE,
    SCORES = BOTH | PROTO_DECODE | PROTO_OBSERVE,
    ANSWERS = SCORES | PROTO_MERGE,
    LOOKS_OR_CHECK = LOOKS | PROTO_CHECK,
    SCORES_OR_CHECK = SCORES | PROTO_CHECK
};
enum { MOST_TILE = 1 << 30 };

static const char *const layouts[] = { "bshd", "bhsd", NULL };
static const char *const alignments[] = { "bottom_right", "top_left", NULL };
static const char *const operations[] = { "forward", "backward", NULL };
static const char *const encodings[] = { "base64", "array", NULL };
#define UNBOUNDED ", where -1 is unbounded"
static const char *const window_form[] = { "[left, right]" UNBOUNDED, NULL };
static const char *const region_form[] = { "[first, end]", NULL };
static const char *const map_form[] = { "[cells of queries, cells of keys]", NULL };
static const char *const tile_form[] = { "[queries, keys]", NULL };
static const char *const bases[] = { "e", "2", NULL };
static const char *const empties[] = { "-inf", "+inf", NULL };

#define AT(field) offsetof(proto_item, field)
const proto_option proto_options[] = {
    /* columns of the table: name, type, ops, with_context, offset, given, minimum, maximum, choices, otherwise, help */
    { "parts", PROTO_TYPE_PARTS, PROTO_MERGE, false, AT(parts), 0, 0, 0, NULL, NULL,
      "what to merge: out and lse of the same queries over each part of the keys, 1 to 64 of equal shapes and dtypes. "
      "out is [B, Sq, H, Dv] in float32, float16 or bfloat16, or packed [total_q, H, Dv]; lse is float32 [B, H, Sq], "
      "or "
      "packed [H, total_q]. Each tensor may also be a member, parts.0.out, parts.0.lse, ..." },
    { "lse_base", PROTO_TYPE_CHOICE, PROTO_MERGE, false, AT(lse_base), 0, 0, 0, bases, "\"e\"",
      "base of the logarithm in lse of the parts; that of the answer is natural" },
    { "empty_lse", PROTO_TYPE_CHOICE, PROTO_MERGE, false, AT(empty_lse), 0, 0, 0, empties, "\"-inf\"",
      "what lse of an empty part is; with +inf, -inf is empty too. That of the answer is -inf" },
    { "layout", PROTO_TYPE_CHOICE, LOOKS_OR_CHECK | PROTO_MERGE, false, AT(problem.layout), AT(has_layout), 0, 0,
      layouts, "\"bshd\"", "order of the axes of q, k, v, out and their gradients" },
    { "scale", PROTO_TYPE_NUMBER, SCORES_OR_CHECK, false, AT(problem.scale), AT(problem.has_scale), 0, 0, NULL, NULL,
      "multiplies q . k; 1/sqrt(D) where it is not given" },
    { "causal", PROTO_TYPE_BOOL, SCORES_OR_CHECK, false, AT(problem.causal), 0, 0, 0, NULL, "false",
      "query i sees keys j <= i', where alignment says what i' is" },
    { "window", PROTO_TYPE_PAIR, SCORES_OR_CHECK, false, AT(problem.window_left), 0, -1, TREE_INTEGER_MAX, window_form,
      "[-1,-1]", "[left, right]: query i sees i' - left <= j <= i' + right; -1 is unbounded" },
    { "alignment", PROTO_TYPE_CHOICE, SCORES_OR_CHECK, false, AT(problem.alignment), 0, 0, 0, alignments,
      "\"bottom_right\"", "bottom_right: i' = i + Sk - Sq, the last query sees the last key; top_left: i' = i" },
    { "keep_mask_at_end", PROTO_TYPE_BOOL, LOOKS_OR_CHECK, false, AT(problem.keep_mask_at_end), 0, 0, 0, NULL, "false",
      "keep_mask is of the last keys of each row, as many as its last axis has; those before are kept" },
#define X(name, id, least, most, rule, meaning) \
    { #name, PROTO_TYPE_NUMBER, SCORES_OR_CHECK, false, AT(problem.name), 0, 0, 0, NULL, "0", meaning },
    ATTN_SCORE_OPTION_MAP(X)
#undef X
        { "dropout_p", PROTO_TYPE_NUMBER, LOOKS_OR_CHECK, false, AT(problem.dropout_p), 0, 0, 0, NULL, "0",
          "from 0 to below 1: the probability with which each probability is dropped" },
    { "seed", PROTO_TYPE_SEED, LOOKS_OR_CHECK, false, AT(problem.seed), AT(has_seed), 0, 0, NULL, NULL,
      "of dropout: the same seed drops the same elements, on every backend. A forward without one draws it, and "
      "answers "
      "it; a backward with dropout_p wants the forward's" },
    { "deterministic", PROTO_TYPE_BOOL, PROTO_BACKWARD, true, AT(problem.deterministic), 0, 0, 0, NULL, "false",
      "the same bits on every run" },
    { "out_dtype", PROTO_TYPE_DTYPE, PROTO_FORWARD | PROTO_DECODE | PROTO_MERGE, false, AT(result_dtype),
      AT(has_result_dtype), 0, 0, NULL, NULL,
      "dtype of out; q's where it is not given, bfloat16 where that is float8_e4m3fn; of a merge that of the parts" },
    { "grad_dtype", PROTO_TYPE_DTYPE, PROTO_BACKWARD, true, AT(result_dtype), AT(has_result_dtype), 0, 0, NULL, NULL,
      "dtype of dq, dk and dv: float32, or q's, which it is where it is not given" },
    { "observe", PROTO_TYPE_NAMES, PROTO_OBSERVE, false, AT(outputs), 0, 0, 0, NULL, NULL,
      "what is wanted: names of tensors and numbers of the answer; top_keys brings top_weights" },
    { "rows", PROTO_TYPE_PAIR, PROTO_OBSERVE, false, AT(problem.observe.rows), 0, 0, TREE_INTEGER_MAX, region_form,
      NULL, "[first, end] of the queries in weights and map; all where it is not given" },
    { "keys", PROTO_TYPE_PAIR, PROTO_OBSERVE, false, AT(problem.observe.keys), 0, 0, TREE_INTEGER_MAX, region_form,
      NULL, "[first, end] of the keys in weights and map; all where it is not given" },
    { "map", PROTO_TYPE_PAIR, PROTO_OBSERVE, false, AT(problem.observe.map), 0, 1, ATTN_MAX_MAP, map_form, NULL,
      "cells of map: [of queries, of keys]; query r of rows [a, b] is in cell floor((r - a) m / (b - a))" },
    { "top", PROTO_TYPE_INTEGER, PROTO_OBSERVE, false, AT(problem.observe.top), 0, 1, ATTN_MAX_TOP, NULL, NULL,
      "how many keys of each query top_keys names" },
    { "key_mass_rows", PROTO_TYPE_INTEGER, PROTO_OBSERVE, false, AT(problem.observe.key_mass_rows), 0, 1,
      TREE_INTEGER_MAX, NULL, NULL,
      "key_mass is a sum over that many of the last queries; over all where it is not given" },
    { "sequence", PROTO_TYPE_INTEGER, PROTO_OBSERVE, false, AT(problem.observe.sequence), 0, 0, TREE_INTEGER_MAX, NULL,
      NULL, "packed: the sequence that weights, map, rows and keys are of" },
    { "tile_size", PROTO_TYPE_PAIR, PROTO_OBSERVE, false, AT(tile_size), 0, 1, MOST_TILE, tile_form, NULL,
      "queries and keys of a tile of tiles" },
    { "head_dim_v", PROTO_TYPE_INTEGER, PROTO_OBSERVE, false, AT(head_dim_v), 0, 1, TREE_INTEGER_MAX, NULL, NULL,
      "Dv of flops_forward and flops_backward; D where it is not given" },
    { "outputs", PROTO_TYPE_NAMES, OUTPUTS, true, AT(outputs), 0, 0, 0, NULL, NULL,
      "the tensors to send back: forward out and lse; backward dq, dk and dv, and where asked for dsinks, dbias, "
      "dalibi_slopes; merge out and lse, and where asked for dsinks" },
    { "encoding", PROTO_TYPE_CHOICE, ANSWERS, true, AT(encoding), 0, 0, 0, encodings, "\"base64\"",
      "how tensors are written in the answer" },
    { "verify", PROTO_TYPE_ROWS, PROTO_FORWARD, false, AT(verify_rows), 0, 0, TREE_INTEGER_MAX, NULL, "0",
      "recompute that many rows, or \"all\", in float64 and report the error" },
    { "save", PROTO_TYPE_BOOL, PROTO_FORWARD, false, AT(save), 0, 0, 0, NULL, "false",
      "keep q, k, v, out and lse on the server for one backward; the answer then has context" },
    { "context", PROTO_TYPE_ID, PROTO_BACKWARD, true, AT(context), 0, 0, 0, NULL, NULL,
      "what a forward with save answered: q, k, v, out, lse and the options come from there" },
    { "caches", PROTO_TYPE_IDS, PROTO_DECODE | PROTO_OBSERVE, false, AT(caches), 0, 0, 0, NULL, NULL,
      "ids of POST /v1/caches, one for each row of q: its keys and values are what the row attends to" },
    { "operation", PROTO_TYPE_CHOICE, PROTO_CHECK, false, AT(asked), 0, 0, 0, operations, NULL,
      "whose results they are; backward where dout or a gradient is given" },
    { "timeout_ms", PROTO_TYPE_INTEGER, ANSWERS | PROTO_CHECK | PROTO_APPEND, true, AT(timeout_ms), 0, 1,
      TREE_INTEGER_MAX, NULL, NULL,
      "milliseconds until the answer is of no use; the server's limit where it is not given" },
    { "priority", PROTO_TYPE_INTEGER, ANSWERS | PROTO_CHECK, true, AT(priority), 0, 0, TREE_INTEGER_MAX, NULL, "0",
      "of the requests of one token that wait for a device, 1 leaves before 2; 0 is as 128. Steps on caches keep their "
      "order" },
    { .name = NULL },
};
#undef AT

_Static_assert(offsetof(attn_problem, window_right) == offsetof(attn_problem, window_left) + sizeof(int64_t),
               "PROTO_TYPE_PAIR writes two integers");

const char *const proto_counts[PROTO_COUNTS] = {
#define X(name, meaning) #name,
    PROTO_COUNT_MAP(X)
#undef X
};
_Static_assert(offsetof(proto_item, cache_count) == offsetof(proto_item, caches) + sizeof(void *),
               "PROTO_TYPE_IDS writes a pointer and a count");
_Static_assert(sizeof(attn_layout) == sizeof(int) && sizeof(attn_alignment) == sizeof(int) &&
                   sizeof(proto_encoding) == sizeof(int),
               "PROTO_TYPE_CHOICE writes an int");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor bytes are used as they come");

/* ---- Reading the values of options ------------------------------------------------------------------------------- */

/* Makes the error "NAME: is VALUE, must be RULE", with a hint at the end. */
static attn_status wrong_word(const char *name, const char *step, const cJSON *value, const char *rule,
                              const char *suggestion, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    if (step)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, step), "%s: [%s] is %s, must be %s%s", name,
                         step, tree_describe(value, quote), rule, suggestion);
    return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, name), "%s: is %s, must be %s%s", name,
                     tree_describe(value, quote), rule, suggestion);
}

static attn_status wrong(const char *name, const char *step, const cJSON *value, const char *rule, attn_error *err)
{
    return wrong_word(name, step, value, rule, parse_value_suggestion(value), err);
}

static attn_status wrong_bool(const char *name, const cJSON *value, attn_error *err)
{
    const char *const text = tree_number(value) ? tree_number(value) : tree_string(value);
    const char *const suggestion = text && text_is_among("1 yes y on", text)   ? "; write true"
                                   : text && text_is_among("0 no n off", text) ? "; write false"
                                                                               : parse_value_suggestion(value);
    return wrong_word(name, NULL, value, "true or false", suggestion, err);
}

/* Makes the error for a value that should be an integer. If the value is a number of a pair, `step` is its index, "0"
 * or "1". If the value is the whole option, `step` is NULL. */
static attn_status wrong_integer(const char *name, const char *step, const cJSON *value, const char *rule,
                                 attn_error *err)
{
    const char *const text = tree_number(value);
    /* users of other programs write 0 or -1 to turn an option off; the hint tells them to leave it out */
    if (!step && text && text_is_among("0 -1", text))
        return wrong_word(name, step, value, rule, "; leave it out where it is not wanted", err);
    return wrong_word(name, step, value, rule,
                      step || text ? parse_integer_suggestion(value) : parse_value_suggestion(value), err);
}

static attn_status integer(const proto_option *o, const char *step, const cJSON *value, int64_t *to,
                           const char *or_else, attn_error *err)
{
    char rule[96], most[TEXT_DIGITS + 2];
    if (tree_integer(value, o->minimum, o->maximum, to)) return ATTN_OK;
    if (o->maximum == TREE_INTEGER_MAX) snprintf(most, sizeof most, "2^53");
    else snprintf(most, sizeof most, "%lld", (long long)o->maximum);
    snprintf(rule, sizeof rule, "an integer from %lld to %s%s", (long long)o->minimum, most, or_else);
    return wrong_integer(o->name, step, value, rule, err);
}

static void list_add(struct text *list, const char *name, bool last)
{
    if (list->used > 0) text_put_string(list, last ? " or " : ", ");
    text_put_string(list, name);
}

static bool is_choice(const proto_option *o, const char *text)
{
    int i = 0;
    while (o->choices[i] && strcmp(text, o->choices[i])) i++;
    return o->choices[i] != NULL;
}

static attn_status choice(const proto_option *o, const cJSON *value, int *to, attn_error *err)
{
    const char *text = tree_string(value);
    char rule[96], suggestion[TREE_SUGGESTION_BYTES];
    struct text list = text_in(rule, sizeof rule);
    struct text_nearest best = { text ? text : "", NULL, 3 };
    int i;
    for (i = 0; o->choices[i]; i++)
        if (text && !strcmp(text, o->choices[i])) {
            *to = i;
            return ATTN_OK;
        }
    for (i = 0; o->choices[i]; i++) {
        list_add(&list, o->choices[i], !o->choices[i + 1]);
        text_consider(&best, o->choices[i]);
    }
    if (cJSON_IsArray(value)) return wrong_word(o->name, NULL, value, rule, "; write it as one string", err);
    if (tree_number(value) && is_choice(o, tree_number(value)))
        return wrong_word(o->name, NULL, value, rule, ", in quotes", err);
    if (!text || !*text) return wrong(o->name, NULL, value, rule, err);
    return wrong_word(o->name, NULL, value, rule, tree_suggestion(o->name, &best, suggestion), err);
}

/* Upper bound on the number of names that an array of output names, such as the member `outputs`, may have. */
enum { NAMES = ATTN_TENSOR_COUNT + PROTO_COUNTS };
static const char *name_at(proto_op op, int n)
{
    if (n < ATTN_TENSOR_COUNT) return proto_gives_tensor(op, (attn_tensor_id)n) ? attn_tensors[n].name : NULL;
    return proto_operations[op].asks ? proto_counts[n - ATTN_TENSOR_COUNT] : NULL;
}

static attn_status output_names(const proto_option *o, proto_op op, const cJSON *value, proto_item *item,
                                attn_error *err)
{
    char rule[256], step[16], suggestion[TREE_SUGGESTION_BYTES];
    struct text list = text_in(rule, sizeof rule);
    tree_member member;
    uint64_t mask = 0;
    int last = 0, i = 0;
    for (int n = 0; n < NAMES; n++)
        if (name_at(op, n)) last = n;
    for (int n = 0; n <= last; n++)
        if (name_at(op, n)) list_add(&list, name_at(op, n), n == last);
    const bool observe = proto_operations[op].asks != NULL;
    if (!cJSON_IsArray(value))
        return wrong(o->name, NULL, value,
                     observe ? "an array of names, such as [\"entropy\"]" : "an array of names, such as [\"out\"]",
                     err);
    for (const cJSON *element = value->child; element; element = element->next, i++) {
        const char *text = tree_string(element);
        int n = 0;
        snprintf(step, sizeof step, "%d", i);
        while (n < NAMES && !(text && name_at(op, n) && !strcmp(text, name_at(op, n)))) n++;
        if (n == NAMES) {
            struct text_nearest best = { text ? text : "", NULL, 3 };
            for (n = 0; n <= last; n++)
                if (name_at(op, n)) text_consider(&best, name_at(op, n));
            return wrong_word(o->name, step, element, rule, text ? tree_suggestion(o->name, &best, suggestion) : "",
                              err);
        }
        if (mask >> n & 1)
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, o->name, step),
                             "%s: [%d] names '%s' a second time", o->name, i, text);
        mask |= UINT64_C(1) << n;
    }
    if (!mask)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, o->name), "%s: is empty, must name %s%s",
                         o->name, rule, observe ? "" : "; leave it out for the default");
    item->outputs = mask & ((UINT64_C(1) << ATTN_TENSOR_COUNT) - 1);
    item->counts = (unsigned)(mask >> ATTN_TENSOR_COUNT);
    if (item->outputs & ATTN_TENSOR_BIT(top_keys)) item->outputs |= ATTN_TENSOR_BIT(top_weights);
    return ATTN_OK;
}

_Static_assert(ATTN_TENSOR_COUNT + PROTO_COUNTS <= 64, "names are a mask of 64 bits");

/* Copies the text to `to` if it has the form of an id. strspn() would be too slow, because each call builds a table,
 * and a request may have a thousand ids. */
static bool is_identifier(const char *text, char to[PROTO_CONTEXT_BYTES])
{
    static const bool allowed[256] = {
        ['a' ... 'z'] = true, ['A' ... 'Z'] = true, ['0' ... '9'] = true, ['.'] = true, ['_'] = true, ['-'] = true
    };
    size_t length = 0;
    while (text && length < PROTO_CONTEXT_BYTES && allowed[(unsigned char)text[length]]) length++;
    if (length < 1 || length == PROTO_CONTEXT_BYTES || text[length]) return false;
    memcpy(to, text, length + 1);
    return true;
}

static attn_status identifier(const proto_option *o, const cJSON *value, char *to, attn_error *err)
{
    if (is_identifier(tree_string(value), to)) return ATTN_OK;
    return wrong_word(o->name, NULL, value, "the id that a forward with save answered", "", err);
}

static attn_status identifiers(const proto_option *o, const cJSON *value, proto_item *item, attn_error *err)
{
    const int count = cJSON_IsArray(value) ? cJSON_GetArraySize(value) : 0;
    tree_member member;
    char step[16];
    int i = 0;
    if (!cJSON_IsArray(value))
        return wrong_word(o->name, NULL, value, "an array of ids of POST /v1/caches",
                          tree_string(value) ? "; write [\"...\"] for one" : "", err);
    if (count < 1 || count > PROTO_MAX_CACHES)
        return attn_fail(err, count ? ATTN_TOO_LARGE : ATTN_INVALID, tree_pointer(member, NULL, o->name),
                         "%s: has %d ids, must have 1 to %d", o->name, count, PROTO_MAX_CACHES);
    item->caches = calloc((size_t)count, sizeof *item->caches);
    if (!item->caches) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    item->cache_count = count;
    for (const cJSON *one = value->child; one; one = one->next, i++) {
        if (is_identifier(tree_string(one), item->caches[i])) continue;
        snprintf(step, sizeof step, "%d", i);
        return wrong_word(o->name, step, one, "an id of POST /v1/caches", "", err);
    }
    return ATTN_OK;
}

static attn_status pair(const proto_option *o, const cJSON *value, int64_t to[2], attn_error *err)
{
    const bool window = o->minimum < 0;
    tree_member member;
    if (tree_number(value) && window)
        return wrong_word(o->name, NULL, value, o->choices[0], "; W keys up to that of the query are [W - 1, 0]", err);
    if (tree_number(value)) return wrong_word(o->name, NULL, value, o->choices[0], "", err);
    if (!cJSON_IsArray(value)) return wrong(o->name, NULL, value, o->choices[0], err);
    if (cJSON_GetArraySize(value) != 2)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, o->name),
                         "%s: has %d element%s, must have 2: %s", o->name, cJSON_GetArraySize(value),
                         cJSON_GetArraySize(value) == 1 ? "" : "s", o->choices[0]);
    const attn_status status = integer(o, "0", value->child, to, window ? UNBOUNDED : "", err);
    return status == ATTN_OK ? integer(o, "1", value->child->next, to + 1, window ? UNBOUNDED : "", err) : status;
}

/* Returns the unit at the end of an option's name: "ms" for timeout_ms. */
static const char *unit_of(const char *name)
{
    const size_t length = strlen(name);
    if (!strcmp(name, "priority")) return ", where 1 runs first and 0 is the default";
    return length > 3 && !strcmp(name + length - 3, "_ms") ? ", in milliseconds" : "";
}

attn_status parse_option(const struct parse_reader *r, const proto_option *o, const cJSON *value, proto_item *item,
                         attn_error *err)
{
    void *const to = (char *)item + o->offset;
    attn_status status = ATTN_OK;
    switch (o->type) {
    case PROTO_TYPE_BOOL:
        if (!cJSON_IsBool(value)) return wrong_bool(o->name, value, err);
        *(bool *)to = cJSON_IsTrue(value);
        break;
    case PROTO_TYPE_NUMBER: {
        const char *text = tree_number(value);
        /* the program runs in the C locale, so strtod() takes '.' as the decimal point */
        const double x = text ? strtod(text, NULL) : 0;
        if (!text) return wrong(o->name, NULL, value, "a number", err);
        if (!isfinite(x)) return wrong(o->name, NULL, value, "within the range of float64", err);
        *(double *)to = x;
        break;
    }
    case PROTO_TYPE_INTEGER: status = integer(o, NULL, value, to, unit_of(o->name), err); break;
    case PROTO_TYPE_SEED:
        if (!tree_number(value) || !text_is_number(tree_number(value), UINT64_MAX, to))
            return wrong_integer(o->name, NULL, value, "an integer from 0 to 2^64 - 1", err);
        break;
    case PROTO_TYPE_CHOICE: status = choice(o, value, to, err); break;
    case PROTO_TYPE_PAIR: status = pair(o, value, to, err); break;
    case PROTO_TYPE_DTYPE: {
        const char *text = tree_string(value);
        const unsigned dtypes = attn_tensor_dtypes(ATTN_T_out); /* a gradient can have every dtype that out can have */
        char list[ATTN_DTYPE_LIST_BYTES], suggestion[TREE_SUGGESTION_BYTES];
        attn_dtype dtype;
        if (!text || !attn_dtype_parse(text, &dtype) || !(dtypes >> dtype & 1))
            return wrong_word(o->name, NULL, value, attn_dtype_list(dtypes, list),
                              parse_dtype_suggestion(ATTN_T_out, false, value, suggestion), err);
        *(attn_dtype *)to = dtype;
        break;
    }
    case PROTO_TYPE_NAMES: status = output_names(o, r->op, value, item, err); break;
    case PROTO_TYPE_ROWS: {
        const char *text = tree_string(value);
        if (text && !strcmp(text, "all")) *(int64_t *)to = PROTO_VERIFY_ALL;
        else if (cJSON_IsTrue(value))
            status = wrong_word(o->name, NULL, value, "an integer from 0 to 2^53, the number of rows, or \"all\"",
                                "; write \"all\"", err);
        else status = integer(o, NULL, value, to, ", the number of rows, or \"all\"", err);
        break;
    }
    case PROTO_TYPE_IDS: status = identifiers(o, value, item, err); break;
    case PROTO_TYPE_PARTS: status = parse_parts(r, value, item, err); break;
    case PROTO_TYPE_ID: status = identifier(o, value, to, err); break;
    }
    if (status == ATTN_OK && o->given) *(bool *)((char *)item + o->given) = true;
    return status;
}
