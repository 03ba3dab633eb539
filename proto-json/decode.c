/* decode.c: from the skeleton to problems that have passed attn_check().
 *
 * scan.c has taken the tensor values out of the body; what is left is small, and cJSON makes a tree of it. Here
 * names get their meaning. Two tables say it all: attn_tensors[] (kernels/attention.h) for the members that are
 * tensors, proto_options[] below for the rest. A member that is in neither is refused by name.
 *
 *     body -> scan -> skeleton -> cJSON -> object() -> tensor(), option()  -> attn_check() -> proto_call
 *                 \-> memory  ------------------------^
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
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scan.h"
#include "text.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- The options ------------------------------------------------------------------------------------------------- */

enum { BOTH = PROTO_FORWARD | PROTO_BACKWARD };
#define INTEGER_MAX (INT64_C(1) << 53) /* beyond it other programs' JSON numbers are not exact */

static const char *const layouts[] = { "bshd", "bhsd", NULL };
static const char *const alignments[] = { "bottom_right", "top_left", NULL };
static const char *const encodings[] = { "base64", "array", NULL };

#define AT(field) offsetof(proto_item, field)
const proto_option proto_options[] = {
    /* name, type, ops, with_context, offset, given, minimum, maximum, choices, otherwise, help */
    { "layout", PROTO_TYPE_CHOICE, BOTH, false, AT(problem.layout), 0, 0, 0, layouts, "\"bshd\"",
      "order of the axes of q, k, v, out and their gradients" },
    { "scale", PROTO_TYPE_NUMBER, BOTH, false, AT(problem.scale), AT(problem.has_scale), 0, 0, NULL, NULL,
      "multiplies q . k; 1/sqrt(D) where it is not given" },
    { "causal", PROTO_TYPE_BOOL, BOTH, false, AT(problem.causal), 0, 0, 0, NULL, "false",
      "query i sees keys j <= i', where alignment says what i' is" },
    { "window", PROTO_TYPE_PAIR, BOTH, false, AT(problem.window_left), 0, -1, INTEGER_MAX, NULL, "[-1,-1]",
      "[left, right]: query i sees i' - left <= j <= i' + right; -1 is unbounded" },
    { "alignment", PROTO_TYPE_CHOICE, BOTH, false, AT(problem.alignment), 0, 0, 0, alignments, "\"bottom_right\"",
      "bottom_right: i' = i + Sk - Sq, the last query sees the last key; top_left: i' = i" },
#define X(name, id, least, most, rule, meaning) \
    { #name, PROTO_TYPE_NUMBER, BOTH, false, AT(problem.name), 0, 0, 0, NULL, "0", meaning },
    ATTN_SCORE_OPTION_MAP(X)
#undef X
        { "dropout_p", PROTO_TYPE_NUMBER, BOTH, false, AT(problem.dropout_p), 0, 0, 0, NULL, "0",
          "from 0 to below 1: the probability with which each probability is dropped" },
    { "seed", PROTO_TYPE_SEED, BOTH, false, AT(problem.seed), 0, 0, 0, NULL, "0",
      "of dropout: the same seed drops the same elements, in backward too, on every backend" },
    { "deterministic", PROTO_TYPE_BOOL, PROTO_BACKWARD, true, AT(problem.deterministic), 0, 0, 0, NULL, "false",
      "the same bits on every run" },
    { "out_dtype", PROTO_TYPE_DTYPE, BOTH, false, AT(out_dtype), AT(has_out_dtype), 0, 0, NULL, NULL,
      "dtype of out; q's where it is not given, bfloat16 where that is float8_e4m3fn" },
    { "outputs", PROTO_TYPE_NAMES, BOTH, true, AT(outputs), 0, 0, 0, NULL, NULL,
      "the tensors to send back: forward out and lse; backward dq, dk and dv, and where asked for dsinks, dbias, "
      "dalibi_slopes" },
    { "encoding", PROTO_TYPE_CHOICE, BOTH, true, AT(encoding), 0, 0, 0, encodings, "\"base64\"",
      "how tensors are written in the answer" },
    { "verify", PROTO_TYPE_ROWS, PROTO_FORWARD, false, AT(verify_rows), 0, 0, INTEGER_MAX, NULL, "0",
      "recompute that many rows, or \"all\", in float64 and report the error" },
    { "save", PROTO_TYPE_BOOL, PROTO_FORWARD, false, AT(save), 0, 0, 0, NULL, "false",
      "keep q, k, v, out and lse on the server for one backward; the answer then has context" },
    { "context", PROTO_TYPE_ID, PROTO_BACKWARD, true, AT(context), 0, 0, 0, NULL, NULL,
      "what a forward with save answered: q, k, v, out, lse and the options come from there" },
    { "timeout_ms", PROTO_TYPE_INTEGER, BOTH, true, AT(timeout_ms), 0, 1, INTEGER_MAX, NULL, NULL,
      "milliseconds until the answer is of no use; the server's limit where it is not given" },
    { .name = NULL },
};
#undef AT

_Static_assert(offsetof(attn_problem, window_right) == offsetof(attn_problem, window_left) + sizeof(int64_t),
               "PROTO_TYPE_PAIR writes two integers");
_Static_assert(sizeof(attn_layout) == sizeof(int) && sizeof(attn_alignment) == sizeof(int) &&
                   sizeof(proto_encoding) == sizeof(int),
               "PROTO_TYPE_CHOICE writes an int");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor bytes are used as they come");

bool proto_takes_tensor(attn_op op, attn_tensor_id id)
{
    switch (attn_tensors[id].role) {
    case ATTN_ROLE_IN: return true;
    case ATTN_ROLE_OUT:
    case ATTN_ROLE_IN_BACK: return op == ATTN_OP_BACKWARD;
    default: return false;
    }
}

bool proto_gives_tensor(attn_op op, attn_tensor_id id, bool *by_default)
{
    *by_default = op == ATTN_OP_FORWARD || id == ATTN_T_dq || id == ATTN_T_dk || id == ATTN_T_dv;
    return attn_tensors[id].role == (op == ATTN_OP_FORWARD ? ATTN_ROLE_OUT : ATTN_ROLE_OUT_BACK);
}

/* ---- Values of the tree ------------------------------------------------------------------------------------------ */

/* What all steps of one body share. */
struct reader {
    attn_op op;
    const scan_lift *lifts;
    int lift_count;
    uint8_t *memory;
};

enum { QUOTE_BYTES = 48 };

/* The client's string, or NULL where the value is none. */
static const char *string_of(const cJSON *value)
{
    return cJSON_IsString(value) && value->valuestring[0] == SCAN_STRING ? value->valuestring + 1 : NULL;
}

/* The client's number as it was written, or NULL. */
static const char *number_of(const cJSON *value)
{
    return cJSON_IsString(value) && value->valuestring[0] == SCAN_NUMBER ? value->valuestring + 1 : NULL;
}

/* The value in a message: itself where it is short. */
static const char *describe(const cJSON *value, char quote[QUOTE_BYTES])
{
    const char *text;
    if ((text = string_of(value))) {
        const int length = (int)text_cut(text, 32);
        snprintf(quote, QUOTE_BYTES, "'%.*s'%s", length, text, text[length] ? "..." : "");
    } else if ((text = number_of(value))) {
        snprintf(quote, QUOTE_BYTES, "%.24s%s", text, strlen(text) > 24 ? "..." : "");
    } else {
        snprintf(quote, QUOTE_BYTES, "%s",
                 cJSON_IsNull(value)     ? "null"
                 : cJSON_IsTrue(value)   ? "true"
                 : cJSON_IsFalse(value)  ? "false"
                 : cJSON_IsObject(value) ? "an object"
                                         : "an array");
    }
    return quote;
}

/* An integer literal within the limits: no fraction, no exponent, no -0 (1.0 is refused too). */
static bool integer_of(const cJSON *value, int64_t minimum, int64_t maximum, int64_t *integer)
{
    const char *text = number_of(value);
    const bool negative = text && *text == '-';
    uint64_t n;
    if (!text || !text_is_number(text + negative, INT64_MAX, &n) || (negative && n == 0)) return false;
    const int64_t signed_n = negative ? -(int64_t)n : (int64_t)n;
    if (signed_n < minimum || signed_n > maximum) return false;
    *integer = signed_n;
    return true;
}

typedef char member_text[sizeof((attn_error *)0)->member];
enum { POINTER_BYTES = sizeof(member_text) - 2 };

/* A pointer of one or two steps into a problem, RFC 6901: ~ and / in names are escaped. Cut at a character's end, at most
 * POINTER_BYTES long. */
static const char *pointer(member_text out, const char *outer, const char *name)
{
    struct text t = text_in(out, POINTER_BYTES + 1);
    if (outer) text_printf(&t, "/%s", outer);
    text_put_char(&t, '/');
    for (size_t bytes; t.failure == TEXT_FINE && (bytes = text_character(name)) > 0; name += bytes) {
        if (*name == '~') text_put_string(&t, "~0");
        else if (*name == '/') text_put_string(&t, "~1");
        else text_put(&t, name, bytes);
    }
    return out;
}

/* ---- Names nobody knows ------------------------------------------------------------------------------------------ */

static attn_status unknown_member(const char *outer, const struct text_nearest *best, attn_error *err)
{
    member_text member;
    const int length = (int)text_cut(best->unknown, 48);
    return attn_fail(err, ATTN_INVALID, pointer(member, outer, best->unknown), "%s%sunknown member '%.*s%s'%s%s%s",
                     outer ? outer : "", outer ? ": " : "", length, best->unknown, best->unknown[length] ? "..." : "",
                     best->name ? ", did you mean '" : "", best->name ? best->name : "", best->name ? "'?" : "");
}

/* Was this name seen in the object before? */
static bool repeated(const cJSON *object, const cJSON *member)
{
    for (const cJSON *other = object->child; other != member; other = other->next)
        if (!strcmp(other->string, member->string)) return true;
    return false;
}

static attn_status repeated_member(const char *outer, const char *name, attn_error *err)
{
    member_text member;
    const int length = (int)text_cut(name, 48);
    return attn_fail(err, ATTN_INVALID, pointer(member, outer, name), "%s%smember '%.*s%s' is given twice",
                     outer ? outer : "", outer ? ": " : "", length, name, name[length] ? "..." : "");
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

static attn_status shape(const char *name, const cJSON *value, attn_tensor *t, attn_error *err)
{
    member_text member;
    char quote[QUOTE_BYTES];
    const cJSON *size;
    int rank;
    if (!cJSON_IsArray(value))
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "shape"),
                         "%s: shape is %s, must be an array of integers", name, describe(value, quote));
    rank = cJSON_GetArraySize(value);
    if (rank < 1 || rank > ATTN_MAX_RANK)
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "shape"),
                         "%s: shape has %d dimensions, must have 1 to %d", name, rank, ATTN_MAX_RANK);
    size = value->child;
    for (int a = 0; a < rank; a++, size = size->next)
        if (!integer_of(size, 0, INTEGER_MAX, &t->shape[a])) {
            snprintf(member, sizeof member, "/%s/shape/%d", name, a);
            return attn_fail(err, ATTN_INVALID, member, "%s: shape[%d] is %s, must be an integer from 0 to %lld", name,
                             a, describe(size, quote), (long long)INTEGER_MAX);
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

static attn_status data(const struct reader *r, const char *name, const cJSON *value, attn_tensor *t, attn_error *err)
{
    member_text member;
    char quote[QUOTE_BYTES], is[SHAPE_BYTES], must[SHAPE_BYTES];
    const scan_lift *lift;
    int64_t bytes, elements;
    if (!cJSON_IsNumber(value)) /* the only numbers in a skeleton are indices of lifted values */
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"),
                         "%s: data is %s, must be base64 in a string or an array of numbers", name,
                         describe(value, quote));
    lift = &r->lifts[(int)value->valuedouble];
    switch (lift->fault) {
    case SCAN_FINE: break;
    case SCAN_BASE64_CHARACTER:
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"),
                         "%s: data is not base64 at character %llu (byte %llu of the body): %s", name,
                         (unsigned long long)lift->position, (unsigned long long)lift->at, lift->reason);
    case SCAN_BASE64_ENDS:
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"),
                         "%s: data ends after %llu characters of base64, inside a group of four", name,
                         (unsigned long long)lift->position);
    case SCAN_ARRAY_TEXT:
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"), "%s: data at byte %llu of the body: %s",
                         name, (unsigned long long)lift->at, lift->reason);
    case SCAN_ARRAY_ELEMENT:
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"), "%s: element %llu of data: %s", name,
                         (unsigned long long)lift->position, lift->reason);
    }
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes) || !attn_shape_elements(t->rank, t->shape, &elements))
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "shape"),
                         "%s: shape %s of %s is more bytes than can be counted", name,
                         shape_text(t->rank, t->shape, must), attn_dtype_name(t->dtype));
    if (lift->kind == SCAN_ARRAY && lift->elements != elements)
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"),
                         "%s: data has %lld numbers, shape %s needs %lld", name, (long long)lift->elements,
                         shape_text(t->rank, t->shape, must), (long long)elements);
    if (lift->kind == SCAN_ARRAY && !nesting_fits(lift, t))
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"), "%s: data is nested as %s, shape is %s",
                         name, shape_text(lift->rank, lift->shape, is), shape_text(t->rank, t->shape, must));
    if (lift->kind == SCAN_ARRAY && (!lift->typed || lift->dtype != t->dtype))
        return attn_fail(err, ATTN_INTERNAL, pointer(member, name, "data"), "%s: data was not converted to %s", name,
                         attn_dtype_name(t->dtype));
    if (lift->bytes != (uint64_t)bytes)
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "data"),
                         "%s: data has %zu bytes, shape %s of %s needs %lld", name, lift->bytes,
                         shape_text(t->rank, t->shape, must), attn_dtype_name(t->dtype), (long long)bytes);
    *t = attn_tensor_make(r->memory ? r->memory + lift->offset : NULL, t->dtype, t->rank, t->shape);
    return ATTN_OK;
}

static attn_status tensor(const struct reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                          attn_error *err)
{
    static const char *const names[] = { "shape", "dtype", "data" };
    const char *const name = attn_tensors[id].name;
    const cJSON *members[COUNT(names)] = { 0 };
    member_text member;
    char quote[QUOTE_BYTES];
    const char *dtype;
    attn_status status;
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, pointer(member, NULL, name),
                         "%s: is %s, must be an object with shape, dtype and data", name, describe(value, quote));
    for (const cJSON *part = value->child; part; part = part->next) {
        struct text_nearest best = { part->string, NULL, 3 };
        size_t i = 0;
        if (repeated(value, part)) return repeated_member(name, part->string, err);
        while (i < COUNT(names) && strcmp(part->string, names[i])) i++;
        if (i == COUNT(names)) {
            for (i = 0; i < COUNT(names); i++) text_consider(&best, names[i]);
            return unknown_member(name, &best, err);
        }
        members[i] = part;
    }
    for (size_t i = 0; i < COUNT(names); i++)
        if (!members[i])
            return attn_fail(err, ATTN_INVALID, pointer(member, NULL, name), "%s: %s is missing", name, names[i]);
    if ((status = shape(name, members[0], t, err)) != ATTN_OK) return status;
    dtype = string_of(members[1]);
    if (!dtype || !attn_dtype_parse(dtype, &t->dtype))
        return attn_fail(err, ATTN_INVALID, pointer(member, name, "dtype"),
                         "%s: dtype is %s, must be float32, float16, bfloat16, float8_e4m3fn, int32 or uint8", name,
                         describe(members[1], quote));
    return data(r, name, members[2], t, err);
}

/* ---- Options ----------------------------------------------------------------------------------------------------- */

/* "NAME: is VALUE, must be RULE" */
static attn_status wrong(const char *name, const char *step, const cJSON *value, const char *rule, attn_error *err)
{
    char quote[QUOTE_BYTES];
    member_text member;
    if (step)
        return attn_fail(err, ATTN_INVALID, pointer(member, name, step), "%s: [%s] is %s, must be %s", name, step,
                         describe(value, quote), rule);
    return attn_fail(err, ATTN_INVALID, pointer(member, NULL, name), "%s: is %s, must be %s", name,
                     describe(value, quote), rule);
}

static attn_status integer(const proto_option *o, const char *step, const cJSON *value, int64_t *to,
                           const char *or_else, attn_error *err)
{
    char rule[96];
    if (integer_of(value, o->minimum, o->maximum, to)) return ATTN_OK;
    snprintf(rule, sizeof rule, "an integer from %lld to %lld%s", (long long)o->minimum, (long long)o->maximum,
             or_else);
    return wrong(o->name, step, value, rule, err);
}

/* The list of names after "must be", with commas and `or`. */
static void list_add(struct text *list, const char *name, bool last)
{
    if (list->used > 0) text_put_string(list, last ? " or " : ", ");
    text_put_string(list, name);
}

static attn_status choice(const proto_option *o, const cJSON *value, int *to, attn_error *err)
{
    const char *text = string_of(value);
    char rule[96];
    struct text list = text_in(rule, sizeof rule);
    int i;
    for (i = 0; o->choices[i]; i++)
        if (text && !strcmp(text, o->choices[i])) {
            *to = i;
            return ATTN_OK;
        }
    for (i = 0; o->choices[i]; i++) list_add(&list, o->choices[i], !o->choices[i + 1]);
    return wrong(o->name, NULL, value, rule, err);
}

/* `outputs`: each name one that the op gives, none twice. */
static attn_status output_names(const proto_option *o, attn_op op, const cJSON *value, uint64_t *to, attn_error *err)
{
    char rule[128], step[16];
    struct text list = text_in(rule, sizeof rule);
    member_text member;
    bool by_default;
    uint64_t mask = 0;
    int last = 0, i = 0;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (proto_gives_tensor(op, (attn_tensor_id)id, &by_default)) last = id;
    for (int id = 0; id <= last; id++)
        if (proto_gives_tensor(op, (attn_tensor_id)id, &by_default)) list_add(&list, attn_tensors[id].name, id == last);
    if (!cJSON_IsArray(value)) return wrong(o->name, NULL, value, "an array of names", err);
    for (const cJSON *element = value->child; element; element = element->next, i++) {
        const char *text = string_of(element);
        int id = 0;
        snprintf(step, sizeof step, "%d", i);
        while (id < ATTN_TENSOR_COUNT && !(text && proto_gives_tensor(op, (attn_tensor_id)id, &by_default) &&
                                           !strcmp(text, attn_tensors[id].name)))
            id++;
        if (id == ATTN_TENSOR_COUNT) return wrong(o->name, step, element, rule, err);
        if (mask >> id & 1)
            return attn_fail(err, ATTN_INVALID, pointer(member, o->name, step), "%s: [%d] names '%s' a second time",
                             o->name, i, text);
        mask |= UINT64_C(1) << id;
    }
    if (!mask)
        return attn_fail(err, ATTN_INVALID, pointer(member, NULL, o->name), "%s: is empty, must name %s", o->name,
                         rule);
    *to = mask;
    return ATTN_OK;
}

_Static_assert(ATTN_TENSOR_COUNT <= 64, "outputs is a mask of 64 bits");

static attn_status identifier(const proto_option *o, const cJSON *value, char *to, attn_error *err)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    const char *text = string_of(value);
    const size_t length = text ? strlen(text) : 0;
    if (length < 1 || length >= PROTO_CONTEXT_BYTES || strspn(text, allowed) != length)
        return wrong(o->name, NULL, value, "the id that a forward with save answered", err);
    memcpy(to, text, length + 1);
    return ATTN_OK;
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
        const char *text = number_of(value);
        const double x = text ? strtod(text, NULL) : 0; /* the program never leaves the C locale */
        if (!text) return wrong(o->name, NULL, value, "a number", err);
        if (!isfinite(x)) return wrong(o->name, NULL, value, "within the range of float64", err);
        *(double *)to = x;
        break;
    }
    case PROTO_TYPE_INTEGER: status = integer(o, NULL, value, to, "", err); break;
    case PROTO_TYPE_SEED:
        if (!number_of(value) || !text_is_number(number_of(value), UINT64_MAX, to))
            return wrong(o->name, NULL, value, "an integer from 0 to 18446744073709551615", err);
        break;
    case PROTO_TYPE_CHOICE: status = choice(o, value, to, err); break;
    case PROTO_TYPE_PAIR:
        if (!cJSON_IsArray(value)) return wrong(o->name, NULL, value, "an array of two integers", err);
        if (cJSON_GetArraySize(value) != 2) {
            member_text member;
            return attn_fail(err, ATTN_INVALID, pointer(member, NULL, o->name), "%s: has %d elements, must have 2",
                             o->name, cJSON_GetArraySize(value));
        }
        status = integer(o, "0", value->child, to, "", err);
        if (status == ATTN_OK) status = integer(o, "1", value->child->next, (int64_t *)to + 1, "", err);
        break;
    case PROTO_TYPE_DTYPE: {
        const char *text = string_of(value);
        const unsigned dtypes = attn_tensor_dtypes(ATTN_T_out);
        char list[ATTN_DTYPE_LIST_BYTES];
        attn_dtype dtype;
        if (!text || !attn_dtype_parse(text, &dtype) || !(dtypes >> dtype & 1))
            return wrong(o->name, NULL, value, attn_dtype_list(dtypes, list), err);
        *(attn_dtype *)to = dtype;
        break;
    }
    case PROTO_TYPE_NAMES: status = output_names(o, r->op, value, to, err); break;
    case PROTO_TYPE_ROWS: {
        const char *text = string_of(value);
        if (text && !strcmp(text, "all")) *(int64_t *)to = PROTO_VERIFY_ALL;
        else status = integer(o, NULL, value, to, ", or \"all\"", err);
        break;
    }
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

/* A name that this op does not take: of the other op, an output, or nothing known. */
static attn_status foreign(attn_op op, const char *name, attn_error *err)
{
    const int id = tensor_named(name);
    const proto_option *o = option_named(name);
    const attn_op other = op == ATTN_OP_FORWARD ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    struct text_nearest best = { name, NULL, 3 };
    member_text member;
    bool by_default;
    pointer(member, NULL, name);
    if (id < ATTN_TENSOR_COUNT && proto_gives_tensor(op, (attn_tensor_id)id, &by_default))
        return attn_fail(err, ATTN_INVALID, member, "%s: is computed here and cannot be given", name);
    if (o || (id < ATTN_TENSOR_COUNT && proto_takes_tensor(other, (attn_tensor_id)id)))
        return attn_fail(err, ATTN_INVALID, member, "%s: belongs to %s", name,
                         other == ATTN_OP_FORWARD ? "forward" : "backward");
    if (!strcmp(name, "requests"))
        return attn_fail(err, ATTN_INVALID, member,
                         "requests: must be the only member of the body"); /* reached inside an item */
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_takes_tensor(op, (attn_tensor_id)t)) text_consider(&best, attn_tensors[t].name);
    for (o = proto_options; o->name; o++)
        if (o->ops >> op & 1) text_consider(&best, o->name);
    return unknown_member(NULL, &best, err);
}

/* With `context` the problem comes from what was saved: only what a backward adds may stand beside it. */
static attn_status beside_context(const cJSON *object, attn_error *err)
{
    for (const cJSON *member = object->child; member; member = member->next) {
        const proto_option *o = option_named(member->string);
        const int id = tensor_named(member->string);
        member_text text;
        if (o ? o->with_context : id == ATTN_T_dout || id == ATTN_T_dlse) continue;
        return attn_fail(err, ATTN_INVALID, pointer(text, NULL, member->string),
                         "%s: comes from context and cannot be given beside it", member->string);
    }
    return ATTN_OK;
}

static attn_status object(const struct reader *r, const cJSON *value, proto_item *item, attn_error *err)
{
    char quote[QUOTE_BYTES];
    attn_status status;
    item->problem = (attn_problem)ATTN_PROBLEM_INIT;
    item->problem.op = r->op;
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, "", "a problem is %s, must be an object", describe(value, quote));
    for (const cJSON *member = value->child; member; member = member->next) {
        const proto_option *o = option_named(member->string);
        const int id = tensor_named(member->string);
        if (repeated(value, member)) return repeated_member(NULL, member->string, err);
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

/* ---- Memory of cJSON's trees ------------------------------------------------------------------------------------- */

/* A tree is made, read and forgotten in one call, and cJSON asks for each node and each name by itself: 57 pieces
 * for a body of three tensors. While a tree is open they are cut from one block of the thread's, all of which is
 * free again when the next tree begins; what does not fit comes from malloc(). */
enum { TREE_BYTES = 8192, TREE_ALIGNMENT = 16 };

static _Thread_local struct {
    bool open;
    size_t used;
    _Alignas(TREE_ALIGNMENT) char bytes[TREE_BYTES];
} tree;

static void *tree_malloc(size_t bytes)
{
    void *piece = tree.bytes + tree.used;
    if (!tree.open || bytes > TREE_BYTES - tree.used) return malloc(bytes);
    tree.used += (bytes + TREE_ALIGNMENT - 1) / TREE_ALIGNMENT * TREE_ALIGNMENT; /* TREE_BYTES is a multiple of it */
    return piece;
}

static void tree_free(void *piece)
{
    if ((uintptr_t)piece - (uintptr_t)tree.bytes >= TREE_BYTES) free(piece);
}

static pthread_once_t hooks_once = PTHREAD_ONCE_INIT; /* nothing else in this program uses cJSON */
static void set_hooks(void)
{
    cJSON_InitHooks(&(cJSON_Hooks){ tree_malloc, tree_free });
}

static cJSON *tree_parse(const char *text, size_t bytes)
{
    tree.open = true;
    tree.used = 0;
    return cJSON_ParseWithLengthOpts(text, bytes, NULL, true);
}

static void tree_delete(cJSON *root)
{
    cJSON_Delete(root);
    tree.open = false;
}

/* ---- The body ---------------------------------------------------------------------------------------------------- */

struct proto_decoder {
    attn_op op;
    proto_limits limits;
    scan *scan;
};

proto_decoder *proto_decoder_new(attn_op op, const proto_limits *limits, const proto_memory *memory)
{
    pthread_once(&hooks_once, set_hooks);
    proto_decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->op = op;
    d->limits = *limits;
    d->scan = scan_new(limits, memory);
    if (!d->scan) {
        free(d);
        return NULL;
    }
    return d;
}

void proto_decoder_free(proto_decoder *decoder)
{
    if (!decoder) return;
    scan_free(decoder->scan);
    free(decoder);
}

attn_status proto_decoder_feed(proto_decoder *decoder, const void *bytes, size_t count, attn_error *err)
{
    return scan_feed(decoder->scan, bytes, count, err);
}

size_t proto_decoder_skeleton_bytes(const proto_decoder *decoder)
{
    size_t bytes;
    (void)scan_skeleton(decoder->scan, &bytes);
    return bytes;
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
    char quote[QUOTE_BYTES];
    int count;
    for (const cJSON *member = root->child; member; member = member->next) {
        member_text text;
        if (repeated(root, member)) return repeated_member(NULL, member->string, err);
        if (!strcmp(member->string, "requests")) requests = member;
        else
            return attn_fail(err, ATTN_INVALID, pointer(text, NULL, member->string),
                             "%.*s: cannot stand beside requests", (int)text_cut(member->string, 48), member->string);
    }
    if (!cJSON_IsArray(requests))
        return attn_fail(err, ATTN_INVALID, "/requests", "requests: is %s, must be an array of problems",
                         describe(requests, quote));
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
    struct reader r = { .op = decoder->op };
    const char *skeleton;
    char quote[QUOTE_BYTES];
    size_t length;
    cJSON *root = NULL;
    proto_call *made = NULL;
    attn_status status = scan_finish(decoder->scan, err);
    *call = NULL;
    if (status != ATTN_OK) return status;

    skeleton = scan_skeleton(decoder->scan, &length);
    made = calloc(1, sizeof *made);
    root = tree_parse(skeleton, length + 1);
    if (!made || !root) { /* the scanner let only JSON through: what cJSON lacks is memory */
        status = no_memory(err);
        goto out;
    }
    r.lifts = scan_lifts(decoder->scan, &r.lift_count);
    r.memory = scan_memory(decoder->scan, &made->memory_bytes);
    if (!cJSON_IsObject(root)) {
        status = attn_fail(err, ATTN_INVALID, "", "the body is %s, must be an object", describe(root, quote));
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
    }
out:
    tree_delete(root);
    proto_call_free(made);
    return status;
}

void proto_call_free(proto_call *call)
{
    if (!call) return;
    free(call->items);
    free(call);
}
