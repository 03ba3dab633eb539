/* decode.c: from a tree of members to problems that have passed attn_check().
 *
 * The format's reader (format.h) has taken the tensor values out of the body and made a tree of what is left, which is
 * small. Here names get their meaning, whatever the format was. Two tables say it all: attn_tensors[]
 * (kernels/attention.h) for the members that are tensors, proto_options[] below for the rest. A member that is in neither
 * is refused by name.
 *
 *     body -> reader -> tree -> object() -> tensor(), option()  -> attn_check() -> proto_call
 *                 \---> memory -------------^
 *
 * Invariants:
 *   1. Every member is looked at exactly once, in the order of the body; the first fault is the one reported, with its
 *      pointer.
 *   2. A number is its text until its type is known: integers are never read through a double.
 *   3. A problem without error in a proto_call has passed attn_check() and its outputs have shapes; only one with a
 *      `context` has not, for its tensors are elsewhere.
 *   4. In an envelope the fault of one problem is its own; broken JSON, limits and lack of memory fail the whole. */
#include "proto.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "format.h"
#include "habits.h"
#include "scan.h"
#include "text.h"
#include "tree.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- The options ------------------------------------------------------------------------------------------------- */

enum { BOTH = PROTO_FORWARD | PROTO_BACKWARD, SCORES = BOTH | PROTO_DECODE };

static const char *const layouts[] = { "bshd", "bhsd", NULL };
static const char *const alignments[] = { "bottom_right", "top_left", NULL };
static const char *const encodings[] = { "base64", "array", NULL };

#define AT(field) offsetof(proto_item, field)
const proto_option proto_options[] = {
    /* name, type, ops, with_context, offset, given, minimum, maximum, choices, otherwise, help */
    { "layout", PROTO_TYPE_CHOICE, BOTH, false, AT(problem.layout), 0, 0, 0, layouts, "\"bshd\"",
      "order of the axes of q, k, v, out and their gradients" },
    { "scale", PROTO_TYPE_NUMBER, SCORES, false, AT(problem.scale), AT(problem.has_scale), 0, 0, NULL, NULL,
      "multiplies q . k; 1/sqrt(D) where it is not given" },
    { "causal", PROTO_TYPE_BOOL, SCORES, false, AT(problem.causal), 0, 0, 0, NULL, "false",
      "query i sees keys j <= i', where alignment says what i' is" },
    { "window", PROTO_TYPE_PAIR, SCORES, false, AT(problem.window_left), 0, -1, TREE_INTEGER_MAX, NULL, "[-1,-1]",
      "[left, right]: query i sees i' - left <= j <= i' + right; -1 is unbounded" },
    { "alignment", PROTO_TYPE_CHOICE, SCORES, false, AT(problem.alignment), 0, 0, 0, alignments, "\"bottom_right\"",
      "bottom_right: i' = i + Sk - Sq, the last query sees the last key; top_left: i' = i" },
    { "keep_mask_at_end", PROTO_TYPE_BOOL, BOTH, false, AT(problem.keep_mask_at_end), 0, 0, 0, NULL, "false",
      "keep_mask is of the last keys of each row, as many as its last axis has; those before are kept" },
#define X(name, id, least, most, rule, meaning) \
    { #name, PROTO_TYPE_NUMBER, SCORES, false, AT(problem.name), 0, 0, 0, NULL, "0", meaning },
    ATTN_SCORE_OPTION_MAP(X)
#undef X
        { "dropout_p", PROTO_TYPE_NUMBER, BOTH, false, AT(problem.dropout_p), 0, 0, 0, NULL, "0",
          "from 0 to below 1: the probability with which each probability is dropped" },
    { "seed", PROTO_TYPE_SEED, BOTH, false, AT(problem.seed), 0, 0, 0, NULL, "0",
      "of dropout: the same seed drops the same elements, in backward too, on every backend" },
    { "deterministic", PROTO_TYPE_BOOL, PROTO_BACKWARD, true, AT(problem.deterministic), 0, 0, 0, NULL, "false",
      "the same bits on every run" },
    { "out_dtype", PROTO_TYPE_DTYPE, SCORES, false, AT(out_dtype), AT(has_out_dtype), 0, 0, NULL, NULL,
      "dtype of out; q's where it is not given, bfloat16 where that is float8_e4m3fn" },
    { "outputs", PROTO_TYPE_NAMES, SCORES, true, AT(outputs), 0, 0, 0, NULL, NULL,
      "the tensors to send back: forward out and lse; backward dq, dk and dv, and where asked for dsinks, dbias, "
      "dalibi_slopes" },
    { "encoding", PROTO_TYPE_CHOICE, SCORES, true, AT(encoding), 0, 0, 0, encodings, "\"base64\"",
      "how tensors are written in the answer" },
    { "verify", PROTO_TYPE_ROWS, PROTO_FORWARD, false, AT(verify_rows), 0, 0, TREE_INTEGER_MAX, NULL, "0",
      "recompute that many rows, or \"all\", in float64 and report the error" },
    { "save", PROTO_TYPE_BOOL, PROTO_FORWARD, false, AT(save), 0, 0, 0, NULL, "false",
      "keep q, k, v, out and lse on the server for one backward; the answer then has context" },
    { "context", PROTO_TYPE_ID, PROTO_BACKWARD, true, AT(context), 0, 0, 0, NULL, NULL,
      "what a forward with save answered: q, k, v, out, lse and the options come from there" },
    { "caches", PROTO_TYPE_IDS, PROTO_DECODE, false, AT(caches), 0, 0, 0, NULL, NULL,
      "ids of POST /v1/caches, one for each row of q: its keys and values are what the row attends to" },
    { "timeout_ms", PROTO_TYPE_INTEGER, SCORES | PROTO_APPEND, true, AT(timeout_ms), 0, 1, TREE_INTEGER_MAX, NULL, NULL,
      "milliseconds until the answer is of no use; the server's limit where it is not given" },
    { .name = NULL },
};
#undef AT

_Static_assert(offsetof(attn_problem, window_right) == offsetof(attn_problem, window_left) + sizeof(int64_t),
               "PROTO_TYPE_PAIR writes two integers");
_Static_assert(offsetof(proto_item, cache_count) == offsetof(proto_item, caches) + sizeof(void *),
               "PROTO_TYPE_IDS writes a pointer and a count");
_Static_assert(sizeof(attn_layout) == sizeof(int) && sizeof(attn_alignment) == sizeof(int) &&
                   sizeof(proto_encoding) == sizeof(int),
               "PROTO_TYPE_CHOICE writes an int");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor bytes are used as they come");

/* ---- The operations ---------------------------------------------------------------------------------------------- */

/* What each takes and gives, bits of attn_tensor_id; `takes` 0: what the roles of attn_tensors[] say of its attn_op. */
#define BIT(name) ATTN_TENSOR_BIT(name)
static const struct {
    const char *name, *path;
    attn_op op;
    uint64_t takes;
    bool gives;
} ops[PROTO_OP_COUNT] = {
    [ATTN_OP_FORWARD] = { "forward", "/v1/attention/forward", ATTN_OP_FORWARD, 0, true },
    [ATTN_OP_BACKWARD] = { "backward", "/v1/attention/backward", ATTN_OP_BACKWARD, 0, true },
    [PROTO_OP_DECODE] = { "decode", "/v1/attention/decode", ATTN_OP_FORWARD,
                          BIT(q) | BIT(k) | BIT(v) | BIT(alibi_slopes) | BIT(keep_mask) | BIT(sinks), true },
    [PROTO_OP_APPEND] = { "append", "/v1/caches/{id}/append", ATTN_OP_FORWARD, BIT(k) | BIT(v), false },
};
#undef BIT

const char *proto_op_name(proto_op op)
{
    return ops[op].name;
}

const char *proto_op_path(proto_op op)
{
    return ops[op].path;
}

bool proto_takes_tensor(proto_op op, attn_tensor_id id)
{
    if (ops[op].takes) return ops[op].takes >> id & 1;
    switch (attn_tensors[id].role) {
    case ATTN_ROLE_IN: return true;
    case ATTN_ROLE_OUT:
    case ATTN_ROLE_IN_BACK: return ops[op].op == ATTN_OP_BACKWARD;
    default: return false;
    }
}

bool proto_gives_tensor(proto_op op, attn_tensor_id id, bool *by_default)
{
    *by_default = ops[op].op == ATTN_OP_FORWARD || id == ATTN_T_dq || id == ATTN_T_dk || id == ATTN_T_dv;
    return ops[op].gives &&
           attn_tensors[id].role == (ops[op].op == ATTN_OP_FORWARD ? ATTN_ROLE_OUT : ATTN_ROLE_OUT_BACK);
}

/* ---- Values of the tree ------------------------------------------------------------------------------------------ */

/* What all steps of one body share. */
struct reader {
    proto_op op;
    const scan_lift *lifts;
    int lift_count;
    uint8_t *memory;
    bool sequence; /* stands in the place of caches */
};

#define UNITS "abcdefghijklmnopqrstuvwxyz%" /* "5s", "10%" */

/* What else there is to say of a value that should be a number, true or false, an array: "" where nothing is. */
static const char *value_cure(const cJSON *value)
{
    const char *const text = tree_string(value);
    char *end;
    if (cJSON_IsNull(value)) return "; leave it out where it is not wanted";
    if (!text) return "";
    if (!strcasecmp(text, "true") || !strcasecmp(text, "false")) return ", without quotes";
    if (!strchr("-0123456789", *text)) return "";
    (void)strtod(text, &end); /* the program never leaves the C locale */
    if (end == text || strspn(end, UNITS) != strlen(end)) return "";
    return *end == '\0' ? ", without quotes" : ", without quotes and unit";
}

/* The same of one that should be an integer, and is not optional. */
static const char *integer_cure(const cJSON *value)
{
    const char *const text = tree_number(value);
    if (text) return strpbrk(text, ".eE") ? "; it is written without point and exponent" : "";
    return cJSON_IsNull(value) ? "" : value_cure(value);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* "[2, 3]" */
enum { SHAPE_BYTES = ATTN_MAX_RANK * (TEXT_DIGITS + 2) + 3 };
static const char *shape_text(int rank, const int64_t *shape, char text[SHAPE_BYTES])
{
    struct text t = text_in(text, SHAPE_BYTES);
    text_put_char(&t, '[');
    for (int a = 0; a < rank; a++) text_printf(&t, "%s%lld", a ? ", " : "", (long long)shape[a]);
    text_put_char(&t, ']');
    return text;
}

/* What else there is to say of a size that is no integer. */
static const char *size_cure(const cJSON *size)
{
    const char *const text = tree_number(size);
    if (text && *text == '-') return "; no size can be left open";
    return integer_cure(size);
}

static attn_status shape(attn_tensor_id id, const cJSON *value, attn_tensor *t, attn_error *err)
{
    const char *const name = attn_tensors[id].name;
    tree_member member;
    char quote[TREE_QUOTE_BYTES], axes[ATTN_SHAPE_BYTES];
    const cJSON *size;
    int rank;
    if (!cJSON_IsArray(value))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                         "%s: shape is %s, must be an array of integers, such as [1, 128, 8, 64]", name,
                         tree_describe(value, quote));
    rank = cJSON_GetArraySize(value);
    if (rank < 1 || rank > ATTN_MAX_RANK)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                         "%s: shape has %d dimensions, must have 1 to %d; %s is %s", name, rank, ATTN_MAX_RANK, name,
                         attn_tensor_shape(id, axes));
    size = value->child;
    for (int a = 0; a < rank; a++, size = size->next)
        if (!tree_integer(size, 0, TREE_INTEGER_MAX, &t->shape[a])) {
            snprintf(member, sizeof member, "/%s/shape/%d", name, a);
            return attn_fail(err, ATTN_INVALID, member, "%s: shape[%d] is %s, must be an integer from 0 to 2^53%s",
                             name, a, tree_describe(size, quote), size_cure(size));
        }
    t->rank = rank;
    return ATTN_OK;
}

/* Do the brackets of an array agree with the shape? A flat list of the right length does; so does one without
 * elements that ends where the shape has its first 0. */
static bool nesting_fits(const scan_lift *lift, const attn_tensor *t)
{
    if (lift->rank == 1 && (t->rank > 1 || lift->shape[0] == t->shape[0]))
        return true; /* the number of elements is checked anyway */
    if (lift->rank > t->rank || (lift->rank < t->rank && lift->elements)) return false;
    for (int a = 0; a < lift->rank; a++)
        if (lift->shape[a] != t->shape[a]) return false;
    return true;
}

/* Of what dtype so many bytes would be right for so many elements; NULL: of none. */
static const char *dtype_of_bytes(const proto_dtype *dtype, uint64_t bytes, uint64_t elements)
{
    static const struct {
        size_t bytes;
        bool floating;
        const char *name;
    } dtypes[] = {
        { 1, true, "float8_e4m3fn" }, { 2, true, "float16" }, { 4, true, "float32" }, { 8, true, "float64" },
        { 1, false, "uint8" },        { 2, false, "int16" },  { 4, false, "int32" },  { 8, false, "int64" }
    };
    const bool floating = attn_dtype_floating(dtype->as);
    for (size_t i = 0; i < COUNT(dtypes); i++)
        if (dtypes[i].floating == floating && elements > 0 && bytes % dtypes[i].bytes == 0 &&
            bytes / dtypes[i].bytes == elements)
            return dtypes[i].name;
    return NULL;
}

/* What else there is to say of bytes that are not as many as they must be. */
static const char *length_cure(const scan_lift *lift, const uint8_t *bytes, const proto_dtype *dtype, uint64_t elements,
                               char cure[TREE_CURE_BYTES])
{
    const char *const file = lift->bytes ? habit_bytes(bytes, lift->bytes) : NULL;
    const char *const other = dtype_of_bytes(dtype, lift->bytes, elements);
    const bool text = lift->kind == SCAN_BASE64;
    proto_dtype taken;
    if (text && lift->bytes == 0) snprintf(cure, TREE_CURE_BYTES, "; the string is empty");
    else if (file) snprintf(cure, TREE_CURE_BYTES, "; %s", file);
    else if (text && habit_is_hex(bytes, lift->bytes)) snprintf(cure, TREE_CURE_BYTES, "; %s", habit_hex);
    else if (other && proto_dtype_parse(other, &taken))
        snprintf(cure, TREE_CURE_BYTES, "; %zu would be right for %s: is that the array's dtype?", lift->bytes, other);
    else if (other)
        snprintf(cure, TREE_CURE_BYTES, "; %zu would be right for %s: convert the array to %s", lift->bytes, other,
                 dtype->name);
    else *cure = '\0';
    return cure;
}

/* int64 become int32, in place: element i is written where element i / 2 was read. */
static attn_status narrow(const char *name, attn_tensor *t, int64_t elements, attn_error *err)
{
    const int64_t *const from = t->data;
    int32_t *const to = t->data;
    tree_member member;
    char at[SHAPE_BYTES];
    for (int64_t i = 0; i < elements; i++) {
        int64_t index[ATTN_MAX_RANK], x;
        memcpy(&x, from + i, sizeof x);
        if (x >= INT32_MIN && x <= INT32_MAX) {
            const int32_t narrowed = (int32_t)x;
            memcpy(to + i, &narrowed, sizeof narrowed);
            continue;
        }
        for (int a = t->rank - 1; a >= 0; a--) {
            index[a] = i % t->shape[a];
            i /= t->shape[a];
        }
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: %s is %lld, must be between %d and %d, as it becomes an int32", name,
                         shape_text(t->rank, index, at), (long long)x, INT32_MIN, INT32_MAX);
    }
    return ATTN_OK;
}

static attn_status data(const struct reader *r, const char *name, const cJSON *value, const proto_dtype *dtype,
                        attn_tensor *t, attn_error *err)
{
    tree_member member;
    char quote[TREE_QUOTE_BYTES], is[SHAPE_BYTES], must[SHAPE_BYTES], cure[TREE_CURE_BYTES];
    const scan_lift *lift;
    int64_t bytes, elements;
    if (!cJSON_IsNumber(value)) /* the only numbers in a skeleton are indices of lifted values */
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data is %s, must be base64 in a string or an array of numbers%s%s", name,
                         tree_describe(value, quote), cJSON_IsObject(value) ? "; " : "",
                         cJSON_IsObject(value) ? habit_typed_array : "");
    lift = &r->lifts[(int)value->valuedouble];
    switch (lift->fault) {
    case SCAN_FINE: break;
    case SCAN_BASE64_CHARACTER:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data is not base64 at character %llu (byte %llu of the body): %s", name,
                         (unsigned long long)lift->position, (unsigned long long)lift->at, lift->reason);
    case SCAN_BASE64_ENDS:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data ends after %llu characters of base64, inside a group of four; %s", name,
                         (unsigned long long)lift->position, lift->reason);
    case SCAN_ARRAY_TEXT:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"), "%s: data at byte %llu of the body: %s",
                         name, (unsigned long long)lift->at, lift->reason);
    case SCAN_ARRAY_ELEMENT:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"), "%s: element %llu of data: %s", name,
                         (unsigned long long)lift->position, lift->reason);
    }
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes) || !attn_shape_elements(t->rank, t->shape, &elements) ||
        __builtin_mul_overflow(elements, (int64_t)dtype->bytes, &bytes))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                         "%s: shape %s of %s is more bytes than can be counted", name,
                         shape_text(t->rank, t->shape, must), dtype->name);
    if (lift->kind == SCAN_ARRAY && lift->elements != elements)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data has %lld numbers, shape %s needs %lld%s", name, (long long)lift->elements,
                         shape_text(t->rank, t->shape, must), (long long)elements,
                         dtype->bytes > 1 && elements > 0 && lift->elements == bytes
                             ? "; are these its bytes? They are sent in base64"
                             : "");
    if (lift->kind == SCAN_ARRAY && !nesting_fits(lift, t))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"), "%s: data is nested as %s, shape is %s",
                         name, shape_text(lift->rank, lift->shape, is), shape_text(t->rank, t->shape, must));
    if (lift->kind == SCAN_ARRAY && (!lift->typed || lift->dtype != t->dtype))
        return attn_fail(err, ATTN_INTERNAL, tree_pointer(member, name, "data"), "%s: data was not converted to %s",
                         name, attn_dtype_name(t->dtype));
    *t = attn_tensor_make(lift->device ? lift->device
                          : r->memory  ? r->memory + lift->offset
                                       : NULL,
                          t->dtype, t->rank, t->shape);
    if (lift->kind == SCAN_ARRAY) return ATTN_OK;
    if (lift->bytes != (uint64_t)bytes)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data has %zu bytes, shape %s of %s needs %lld%s", name, lift->bytes,
                         shape_text(t->rank, t->shape, must), dtype->name, (long long)bytes,
                         lift->device ? "" : length_cure(lift, t->data, dtype, (uint64_t)elements, cure));
    return dtype->bytes > attn_dtype_bytes(dtype->as) ? narrow(name, t, elements, err) : ATTN_OK;
}

/* Names of dtypes that nobody takes here, but that mean something. */
static bool is_dtype(const char *name)
{
    static const char *const begins[] = { "float", "int", "uint", "bool", "complex", "bfloat" };
    for (size_t i = 0; i < COUNT(begins); i++)
        if (!strncasecmp(name, begins[i], strlen(begins[i]))) return true;
    return false;
}

/* The wire name of the first dtype that a tensor may have. */
static const char *first_dtype(attn_tensor_id id)
{
    return attn_dtype_name((attn_dtype)__builtin_ctz(attn_tensor_dtypes(id)));
}

/* What to write in the place of a dtype that the tensor cannot have; of an output nothing can be converted. */
static const char *dtype_cure(attn_tensor_id id, bool given, const cJSON *value, char cure[TREE_CURE_BYTES])
{
    const char *const word = tree_string(value);
    char name[HABIT_DTYPE_BYTES];
    proto_dtype dtype;
    const bool known = word && proto_dtype_parse(habit_dtype(word, name), &dtype);
    const char *const habit = word ? habit_of(attn_tensors[id].name, known ? dtype.name : name) : NULL;
    *cure = '\0';
    if (!word) return cure;
    if (given && habit_big_endian(word))
        snprintf(cure, TREE_CURE_BYTES, "; its bytes must be little-endian, x.astype(x.dtype.newbyteorder('<'))");
    else if (known && proto_dtype_takes(id, &dtype)) snprintf(cure, TREE_CURE_BYTES, "; write %s", dtype.name);
    else if (!given) return cure;
    else if (habit) snprintf(cure, TREE_CURE_BYTES, "; %s", habit);
    else if (known || is_dtype(name)) snprintf(cure, TREE_CURE_BYTES, "; convert it to %s", first_dtype(id));
    return cure;
}

/* A member of a tensor is missing. */
static attn_status missing(attn_tensor_id id, const char *part, attn_error *err)
{
    const char *const name = attn_tensors[id].name;
    char axes[ATTN_SHAPE_BYTES], list[PROTO_DTYPE_LIST_BYTES];
    tree_member member;
    tree_pointer(member, NULL, name);
    if (!strcmp(part, "shape"))
        return attn_fail(err, ATTN_INVALID, member, "%s: shape is missing; %s is %s", name, name,
                         attn_tensor_shape(id, axes));
    if (!strcmp(part, "dtype"))
        return attn_fail(err, ATTN_INVALID, member, "%s: dtype is missing, must be %s", name,
                         proto_dtype_list(id, list));
    return attn_fail(err, ATTN_INVALID, member,
                     "%s: data is missing, must be base64 in a string or an array of numbers", name);
}

static attn_status tensor(const struct reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                          attn_error *err)
{
    static const char *const names[] = { "shape", "dtype", "data" };
    const char *const name = attn_tensors[id].name;
    const cJSON *members[COUNT(names)] = { 0 };
    tree_member member;
    char quote[TREE_QUOTE_BYTES], list[PROTO_DTYPE_LIST_BYTES], cure[TREE_CURE_BYTES];
    const char *word;
    proto_dtype dtype;
    attn_status status;
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, name),
                         "%s: is %s, must be an object: {\"shape\": [...], \"dtype\": \"%s\", \"data\": base64 or "
                         "numbers}%s",
                         name, tree_describe(value, quote), first_dtype(id),
                         cJSON_IsNull(value) && id != ATTN_T_q && id != ATTN_T_k && id != ATTN_T_v ? value_cure(value)
                                                                                                   : "");
    for (const cJSON *part = value->child; part; part = part->next) {
        struct text_nearest best = { part->string, NULL, 3 };
        size_t i = 0;
        if (tree_repeated(value, part)) return tree_twice(name, part->string, err);
        while (i < COUNT(names) && strcmp(part->string, names[i])) i++;
        if (i == COUNT(names)) {
            for (i = 0; i < COUNT(names); i++) text_consider(&best, names[i]);
            return tree_unknown(name, &best, err);
        }
        members[i] = part;
    }
    for (size_t i = 0; i < COUNT(names); i++)
        if (!members[i]) return missing(id, names[i], err);
    if ((status = shape(id, members[0], t, err)) != ATTN_OK) return status;
    word = tree_string(members[1]);
    if (!word || !proto_dtype_parse(word, &dtype) || !proto_dtype_takes(id, &dtype))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "dtype"), "%s: dtype is %s, must be %s%s", name,
                         tree_describe(members[1], quote), proto_dtype_list(id, list),
                         dtype_cure(id, true, members[1], cure));
    t->dtype = dtype.as;
    return data(r, name, members[2], &dtype, t, err);
}

/* ---- Options ----------------------------------------------------------------------------------------------------- */

/* "NAME: is VALUE, must be RULE", and the cure */
static attn_status wrong_word(const char *name, const char *step, const cJSON *value, const char *rule,
                              const char *cure, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    if (step)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, step), "%s: [%s] is %s, must be %s%s", name,
                         step, tree_describe(value, quote), rule, cure);
    return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, name), "%s: is %s, must be %s%s", name,
                     tree_describe(value, quote), rule, cure);
}

/* The same of a value that is no word. */
static attn_status wrong(const char *name, const char *step, const cJSON *value, const char *rule, attn_error *err)
{
    return wrong_word(name, step, value, rule, value_cure(value), err);
}

/* The same of one that should be an integer; one in a pair cannot be left out. */
static attn_status wrong_integer(const char *name, const char *step, const cJSON *value, const char *rule,
                                 attn_error *err)
{
    return wrong_word(name, step, value, rule, step || tree_number(value) ? integer_cure(value) : value_cure(value),
                      err);
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

/* The list of names after "must be", with commas and `or`. */
static void list_add(struct text *list, const char *name, bool last)
{
    if (list->used > 0) text_put_string(list, last ? " or " : ", ");
    text_put_string(list, name);
}

static attn_status choice(const proto_option *o, const cJSON *value, int *to, attn_error *err)
{
    const char *text = tree_string(value);
    char rule[96], cure[TREE_CURE_BYTES];
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
    if (!text) return wrong(o->name, NULL, value, rule, err);
    return wrong_word(o->name, NULL, value, rule, tree_cure(o->name, &best, cure), err);
}

/* `outputs`: each name one that the op gives, none twice. */
static attn_status output_names(const proto_option *o, proto_op op, const cJSON *value, uint64_t *to, attn_error *err)
{
    char rule[128], step[16], cure[TREE_CURE_BYTES];
    struct text list = text_in(rule, sizeof rule);
    tree_member member;
    bool by_default;
    uint64_t mask = 0;
    int last = 0, i = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (proto_gives_tensor(op, (attn_tensor_id)id, &by_default)) last = id;
    for (int id = 0; id <= last; id++)
        if (proto_gives_tensor(op, (attn_tensor_id)id, &by_default)) list_add(&list, attn_tensors[id].name, id == last);
    if (!cJSON_IsArray(value)) return wrong(o->name, NULL, value, "an array of names, such as [\"out\"]", err);
    for (const cJSON *element = value->child; element; element = element->next, i++) {
        const char *text = tree_string(element);
        int id = 0;
        snprintf(step, sizeof step, "%d", i);
        while (id < ATTN_TENSOR_COUNT && !(text && proto_gives_tensor(op, (attn_tensor_id)id, &by_default) &&
                                           !strcmp(text, attn_tensors[id].name)))
            id++;
        if (id == ATTN_TENSOR_COUNT) {
            struct text_nearest best = { text ? text : "", NULL, 3 };
            for (id = 0; id <= last; id++)
                if (proto_gives_tensor(op, (attn_tensor_id)id, &by_default))
                    text_consider(&best, attn_tensors[id].name);
            return wrong_word(o->name, step, element, rule, text ? tree_cure(o->name, &best, cure) : "", err);
        }
        if (mask >> id & 1)
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, o->name, step),
                             "%s: [%d] names '%s' a second time", o->name, i, text);
        mask |= UINT64_C(1) << id;
    }
    if (!mask)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, o->name), "%s: is empty, must name %s", o->name,
                         rule);
    *to = mask;
    return ATTN_OK;
}

_Static_assert(ATTN_TENSOR_COUNT <= 64, "outputs is a mask of 64 bits");

/* Is it one that could be an id? Copies it. */
static bool is_identifier(const char *text, char to[PROTO_CONTEXT_BYTES])
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    const size_t length = text ? strlen(text) : 0;
    if (length < 1 || length >= PROTO_CONTEXT_BYTES || strspn(text, allowed) != length) return false;
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
        snprintf(step, sizeof step, "%d", i);
        if (!is_identifier(tree_string(one), item->caches[i]))
            return wrong_word(o->name, step, one, "an id of POST /v1/caches", "", err);
    }
    return ATTN_OK;
}

#define UNBOUNDED ", where -1 is unbounded"

/* Units end a name: what a number of it counts. */
static const char *unit_of(const char *name)
{
    const size_t length = strlen(name);
    return length > 3 && !strcmp(name + length - 3, "_ms") ? ", in milliseconds" : "";
}

static attn_status option(const struct reader *r, const proto_option *o, const cJSON *value, proto_item *item,
                          attn_error *err)
{
    void *const to = (char *)item + o->offset;
    attn_status status = ATTN_OK;
    switch (o->type) {
    case PROTO_TYPE_BOOL:
        if (!cJSON_IsBool(value)) return wrong(o->name, NULL, value, "true or false", err);
        *(bool *)to = cJSON_IsTrue(value);
        break;
    case PROTO_TYPE_NUMBER: {
        const char *text = tree_number(value);
        const double x = text ? strtod(text, NULL) : 0; /* the program never leaves the C locale */
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
    case PROTO_TYPE_PAIR:
        if (!cJSON_IsArray(value)) return wrong(o->name, NULL, value, "[left, right]" UNBOUNDED, err);
        if (cJSON_GetArraySize(value) != 2) {
            tree_member member;
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, o->name),
                             "%s: has %d element%s, must have 2: [left, right]", o->name, cJSON_GetArraySize(value),
                             cJSON_GetArraySize(value) == 1 ? "" : "s");
        }
        status = integer(o, "0", value->child, to, UNBOUNDED, err);
        if (status == ATTN_OK) status = integer(o, "1", value->child->next, (int64_t *)to + 1, UNBOUNDED, err);
        break;
    case PROTO_TYPE_DTYPE: {
        const char *text = tree_string(value);
        const unsigned dtypes = attn_tensor_dtypes(ATTN_T_out);
        char list[ATTN_DTYPE_LIST_BYTES], cure[TREE_CURE_BYTES];
        attn_dtype dtype;
        if (!text || !attn_dtype_parse(text, &dtype) || !(dtypes >> dtype & 1))
            return wrong_word(o->name, NULL, value, attn_dtype_list(dtypes, list),
                              dtype_cure(ATTN_T_out, false, value, cure), err);
        *(attn_dtype *)to = dtype;
        break;
    }
    case PROTO_TYPE_NAMES: status = output_names(o, r->op, value, to, err); break;
    case PROTO_TYPE_ROWS: {
        const char *text = tree_string(value);
        if (text && !strcmp(text, "all")) *(int64_t *)to = PROTO_VERIFY_ALL;
        else status = integer(o, NULL, value, to, ", the number of rows, or \"all\"", err);
        break;
    }
    case PROTO_TYPE_IDS: status = identifiers(o, value, item, err); break;
    case PROTO_TYPE_ID: status = identifier(o, value, to, err); break;
    }
    if (status == ATTN_OK && o->given) *(bool *)((char *)item + o->given) = true;
    return status;
}

/* ---- Problems ---------------------------------------------------------------------------------------------------- */

static const proto_option *option_named(const char *name)
{
    const proto_option *o = proto_options;
    while (o->name && strcmp(o->name, name)) o++;
    return o->name ? o : NULL;
}

static int tensor_named(const char *name)
{
    int id = 0;
    while (id < ATTN_TENSOR_COUNT && strcmp(attn_tensors[id].name, name)) id++;
    return id;
}

/* The first op that takes a member of this name; PROTO_OP_COUNT: none does. */
static proto_op op_of(const char *name)
{
    const int id = tensor_named(name);
    const proto_option *o = option_named(name);
    proto_op op = 0;
    while (op < PROTO_OP_COUNT && !(o && (o->ops >> op & 1)) &&
           !(id < ATTN_TENSOR_COUNT && proto_takes_tensor(op, (attn_tensor_id)id)))
        op++;
    return op;
}

/* A name that this op does not take: of another op, an output, or nothing known. */
static attn_status foreign(proto_op op, const char *name, attn_error *err)
{
    const int id = tensor_named(name);
    const proto_option *o;
    const proto_op other = op_of(name);
    struct text_nearest best = { name, NULL, 3 };
    tree_member member;
    bool by_default;
    tree_pointer(member, NULL, name);
    if (id < ATTN_TENSOR_COUNT && proto_gives_tensor(op, (attn_tensor_id)id, &by_default))
        return attn_fail(err, ATTN_INVALID, member, "%s: is computed here and cannot be given", name);
    if (other < PROTO_OP_COUNT)
        return attn_fail(err, ATTN_INVALID, member, "%s: belongs to %s, POST %s", name, ops[other].name,
                         ops[other].path);
    if (!strcmp(name, "requests"))
        return attn_fail(err, ATTN_INVALID, member,
                         "requests: must be the only member of the body"); /* reached inside an item */
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_takes_tensor(op, (attn_tensor_id)t)) text_consider(&best, attn_tensors[t].name);
    for (o = proto_options; o->name; o++)
        if (o->ops >> op & 1) text_consider(&best, o->name);
    return tree_unknown(NULL, &best, err);
}

/* With `context` the problem comes from what was saved: only what a backward adds may stand beside it. */
static attn_status beside_context(const cJSON *object, attn_error *err)
{
    for (const cJSON *member = object->child; member; member = member->next) {
        const proto_option *o = option_named(member->string);
        const int id = tensor_named(member->string);
        tree_member text;
        if (o ? o->with_context : id == ATTN_T_dout || id == ATTN_T_dlse) continue;
        return attn_fail(err, ATTN_INVALID, tree_pointer(text, NULL, member->string),
                         "%s: comes from context and cannot be given beside it", member->string);
    }
    return ATTN_OK;
}

/* What can be said of a problem whose keys and values are in caches, before these are looked at. */
static attn_status of_caches(const struct reader *r, const proto_item *item, attn_error *err)
{
    const proto_op op = r->op;
    const attn_problem *const p = &item->problem;
    const int rank = op == PROTO_OP_APPEND ? 3 : 4;
    const attn_tensor_id given[] = { ATTN_T_k, ATTN_T_v };
    if (op == PROTO_OP_DECODE && p->q.rank == 0) return attn_fail(err, ATTN_INVALID, "/q", "q: is missing");
    if (op == PROTO_OP_APPEND && p->k.rank == 0) return attn_fail(err, ATTN_INVALID, "/k", "k: is missing");
    if (op == PROTO_OP_DECODE && item->caches && r->sequence)
        return attn_fail(err, ATTN_INVALID, "/caches", "caches: cannot stand beside sequence_id, which names one");
    if (op == PROTO_OP_DECODE && !item->caches && !r->sequence)
        return attn_fail(err, ATTN_INVALID, "/caches",
                         "caches: is missing, must be ids of POST /v1/caches, one for each row of q");
    if (op == PROTO_OP_DECODE && p->q.rank != 4)
        return attn_fail(err, ATTN_INVALID, "/q/shape", "q: has %d dimensions, must have 4: [B, Sq, H, D]", p->q.rank);
    for (size_t i = 0; i < COUNT(given); i++) {
        const attn_tensor *const t = &p->tensor[given[i]];
        const char *const name = attn_tensors[given[i]].name;
        tree_member member;
        if (t->rank != 0 && t->rank != rank)
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                             "%s: has %d dimensions, must have %d: %s", name, t->rank, rank,
                             rank == 3 ? "[S, Hk, D]" : "[B, S, Hk, D], new positions of each cache");
    }
    return ATTN_OK;
}

static attn_status object(const struct reader *r, const cJSON *value, proto_item *item, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    attn_status status;
    item->problem = (attn_problem)ATTN_PROBLEM_INIT;
    item->problem.op = ops[r->op].op;
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, "", "a problem is %s, must be an object", tree_describe(value, quote));
    for (const cJSON *member = value->child; member; member = member->next) {
        const proto_option *o = option_named(member->string);
        const int id = tensor_named(member->string);
        if (tree_repeated(value, member)) return tree_twice(NULL, member->string, err);
        if (o && (o->ops >> r->op & 1)) status = option(r, o, member, item, err);
        else if (id < ATTN_TENSOR_COUNT && proto_takes_tensor(r->op, (attn_tensor_id)id))
            status = tensor(r, (attn_tensor_id)id, member, &item->problem.tensor[id], err);
        else status = foreign(r->op, member->string, err);
        if (status != ATTN_OK) return status;
    }
    if (!item->outputs)
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            bool by_default;
            if (proto_gives_tensor(r->op, (attn_tensor_id)id, &by_default) && by_default)
                item->outputs |= UINT64_C(1) << id;
        }
    if (*item->context) return beside_context(value, err);
    if (r->op == PROTO_OP_DECODE || r->op == PROTO_OP_APPEND) return of_caches(r, item, err);
    return proto_item_prepare(item, err);
}

attn_status proto_item_prepare(proto_item *item, attn_error *err)
{
    attn_problem *const p = &item->problem;
    attn_status status = attn_check(p, err);
    if (status != ATTN_OK) return status;
    if (!item->has_out_dtype) item->out_dtype = p->q.dtype == ATTN_F8E4M3 ? ATTN_BF16 : p->q.dtype;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!(item->outputs >> id & 1)) continue;
        status = attn_output(p, (attn_tensor_id)id, item->out_dtype, &p->tensor[id], err);
        if (status ==
            ATTN_NOT_FOUND) { /* gradients of what was not given: the fault is in the request, nothing is lost */
            status = ATTN_INVALID;
            if (err) err->status = status, snprintf(err->member, sizeof err->member, "/outputs");
        }
        if (status != ATTN_OK) return status;
    }
    return ATTN_OK;
}

/* ---- The body ---------------------------------------------------------------------------------------------------- */

struct proto_decoder {
    proto_op op;
    proto_limits limits;
    const proto_format *format;
    void *reader;
};

proto_decoder *proto_decoder_new(const proto_format *format, proto_op op, const proto_limits *limits,
                                 const proto_memory *memory)
{
    proto_decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->op = op;
    d->limits = *limits;
    d->format = format;
    d->reader = format->open(limits, memory);
    if (!d->reader) {
        free(d);
        return NULL;
    }
    return d;
}

void proto_decoder_kserve(proto_decoder *decoder, const proto_model *model, int64_t json_bytes)
{
    decoder->op = model->op;
    decoder->format->begin(decoder->reader, model, json_bytes);
}

void proto_decoder_free(proto_decoder *decoder)
{
    if (!decoder) return;
    decoder->format->close(decoder->reader);
    free(decoder);
}

attn_status proto_decoder_feed(proto_decoder *decoder, const void *bytes, size_t count, attn_error *err)
{
    return decoder->format->feed(decoder->reader, bytes, count, err);
}

size_t proto_decoder_skeleton_bytes(const proto_decoder *decoder)
{
    return decoder->format->skeleton_bytes(decoder->reader);
}

attn_status proto_decoder_shared(proto_decoder *decoder, proto_shared **shared, int *count, attn_error *err)
{
    *shared = NULL;
    *count = 0;
    return decoder->format->shared ? decoder->format->shared(decoder->reader, shared, count, err) : ATTN_OK;
}

/* attn_check() reads the values of the others; of these there is nothing to check but their sizes. */
bool proto_may_lie_on_device(attn_tensor_id id)
{
    static const uint64_t may = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(dout) |
                                ATTN_TENSOR_BIT(dlse);
    return may >> id & 1;
}

attn_status proto_decoder_shared_room(proto_decoder *decoder, attn_error *err)
{
    return decoder->format->shared_room ? decoder->format->shared_room(decoder->reader, err) : ATTN_OK;
}

size_t proto_memory_for(const proto_format *format, uint64_t body_bytes, int tensors)
{
    return format->memory_for(body_bytes) + (size_t)tensors * SCAN_ALIGNMENT + 2 * PROTO_MEMORY_STEP;
}

static attn_status no_memory(attn_error *err)
{
    return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
}

/* {"requests": [...]} and nothing else. */
static attn_status envelope(const proto_decoder *d, const struct reader *r, const cJSON *root, proto_call *call,
                            attn_error *err)
{
    const cJSON *requests = NULL, *one;
    char quote[TREE_QUOTE_BYTES];
    int count;
    for (const cJSON *member = root->child; member; member = member->next) {
        tree_member text;
        if (tree_repeated(root, member)) return tree_twice(NULL, member->string, err);
        if (!strcmp(member->string, "requests")) requests = member;
        else
            return attn_fail(err, ATTN_INVALID, tree_pointer(text, NULL, member->string),
                             "%.*s: cannot stand beside requests; it belongs to each of the problems in there",
                             (int)text_cut(member->string, 48), member->string);
    }
    if (d->op == PROTO_OP_DECODE || d->op == PROTO_OP_APPEND)
        return attn_fail(err, ATTN_INVALID, "/requests", "requests: %s takes one problem%s", ops[d->op].name,
                         d->op == PROTO_OP_DECODE ? ", with a row of q for each of its caches" : "");
    if (!cJSON_IsArray(requests))
        return attn_fail(err, ATTN_INVALID, "/requests", "requests: is %s, must be an array of problems",
                         tree_describe(requests, quote));
    count = cJSON_GetArraySize(requests);
    if (count < 1)
        return attn_fail(err, ATTN_INVALID, "/requests", "requests: is empty, must hold at least one problem");
    if (count > d->limits.batch)
        return attn_fail(err, ATTN_TOO_LARGE, "/requests", "requests: has %d problems, at most %d are taken at once",
                         count, d->limits.batch);
    call->items = calloc((size_t)count, sizeof *call->items);
    if (!call->items) return no_memory(err);
    call->envelope = true;
    call->count = count;
    one = requests->child;
    for (int i = 0; i < count; i++, one = one->next) {
        attn_error fault;
        if (object(r, one, &call->items[i], &fault) != ATTN_OK) call->items[i] = (proto_item){ .error = fault };
    }
    return ATTN_OK;
}

attn_status proto_decoder_finish(proto_decoder *decoder, proto_call **call, attn_error *err)
{
    struct format_body body = { 0 };
    struct reader r = { .op = decoder->op };
    char quote[TREE_QUOTE_BYTES];
    proto_call *made = NULL;
    attn_status status = decoder->format->finish(decoder->reader, &body, err);
    const cJSON *const root = body.root;
    *call = NULL;
    if (status != ATTN_OK) return status;

    made = calloc(1, sizeof *made);
    if (!made || !root) {
        status = no_memory(err);
        goto out;
    }
    made->op = decoder->op;
    made->answer = made->format = decoder->format;
    if (body.inputs) memcpy(made->inputs, body.inputs, sizeof made->inputs);
    made->memory_bytes = body.memory_bytes;
    made->model = body.model;
    made->sequence = body.sequence;
    r.sequence = *body.sequence.id != '\0';
    made->binary = body.binary;
    made->shared = body.shared;
    if (body.id && *body.id && !(made->id = strdup(body.id))) {
        status = no_memory(err);
        goto out;
    }
    r.lifts = body.lifts;
    r.lift_count = body.lift_count;
    r.memory = body.memory;
    if (!cJSON_IsObject(root)) {
        status = attn_fail(err, ATTN_INVALID, "", "the body is %s%s, must be an object with %s%s",
                           tree_string(root) ? "a string, " : "", tree_describe(root, quote),
                           decoder->op == PROTO_OP_DECODE   ? "q and caches"
                           : decoder->op == PROTO_OP_APPEND ? "k and v"
                                                            : "q, k and v",
                           tree_string(root)     ? "; was it encoded twice?"
                           : cJSON_IsArray(root) ? "; several problems are {\"requests\": [{...}, {...}]}"
                                                 : "");
        goto out;
    }
    if (cJSON_GetObjectItemCaseSensitive(root, "requests")) {
        status = envelope(decoder, &r, root, made, err);
    } else {
        made->items = calloc(1, sizeof *made->items);
        made->count = 1;
        status = made->items ? object(&r, root, made->items, err) : no_memory(err);
    }
    if (status == ATTN_OK) {
        *call = made;
        made = NULL; /* the caller's now */
    } else if (err) proto_call_locate(made, err);
out:
    tree_delete(body.root);
    proto_call_free(made);
    return status;
}

void proto_call_locate(const proto_call *call, attn_error *err)
{
    if (call->format && call->format->locate) call->format->locate(call, err);
}

attn_status proto_call_answer_as(proto_call *call, const proto_format *format, attn_error *err)
{
    if (call->envelope && format->one_problem)
        return attn_fail(err, ATTN_INVALID, "/requests",
                         "requests: %s has room for the answer of one problem; send them one by one, or accept "
                         "application/json",
                         format->media);
    call->answer = format;
    return ATTN_OK;
}

const char *proto_media(const proto_format *format)
{
    return format->media;
}

bool proto_writes_numbers(const proto_call *call, const proto_item *item)
{
    return call->answer->text && item->encoding == PROTO_ARRAY;
}

void proto_call_free(proto_call *call)
{
    if (!call) return;
    for (int i = 0; i < call->count && call->items; i++) free(call->items[i].caches);
    free(call->items);
    free(call->id);
    free(call);
}
