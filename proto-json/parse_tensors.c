/* parse_tensors.c: reads the members of a problem that are tensors, and makes the hints for wrong values. */
#include "parse_internal.h"

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base64.h"
#include "suggestions.h"
#include "text/text.h"

/* ---- Hints for values of the wrong type -------------------------------------------------------------------------- */

#define UNITS "abcdefghijklmnopqrstuvwxyz%" /* characters that the unit after a number may have, as in "5s" or "10%" */

const char *parse_value_suggestion(const cJSON *value)
{
    const char *const text = tree_string(value);
    char *end;
    if (cJSON_IsNull(value)) return "; leave it out where it is not wanted";
    if (cJSON_IsArray(value) && cJSON_GetArraySize(value) == 1) return ", without brackets";
    if (!text) return "";
    if (!strcmp(text, "true") || !strcmp(text, "false")) return ", without quotes";
    if (!strcasecmp(text, "true") || !strcasecmp(text, "false")) return ", in small letters (in JSON without quotes)";
    if (!*text) return "; leave it out where it is not wanted";
    if (text_is_among("auto default none null random", text)) return "; leave it out for the default";
    if (!strchr("-0123456789", *text)) return "";
    (void)strtod(text, &end); /* the program runs in the C locale, so strtod() takes '.' as the decimal point */
    if (end != text && *end == '/') return "; JSON has no fractions, 1/8 is 0.125";
    if (end == text || strspn(end, UNITS) != strlen(end)) return "";
    return *end == '\0' ? ", without quotes" : ", without quotes and unit";
}

const char *parse_integer_suggestion(const cJSON *value)
{
    const char *const text = tree_number(value);
    if (text) return strpbrk(text, ".eE") ? "; it is written without point and exponent" : "";
    return cJSON_IsNull(value) ? "" : parse_value_suggestion(value);
}

/* ---- Shapes, dtypes and sizes of tensors ------------------------------------------------------------------------- */

enum { SHAPE_BYTES = ATTN_MAX_RANK * (TEXT_DIGITS + 2) + 3 };
static const char *shape_text(int rank, const int64_t *shape, char text[SHAPE_BYTES])
{
    struct text t = text_in(text, SHAPE_BYTES);
    text_put_char(&t, '[');
    for (int a = 0; a < rank; a++) text_printf(&t, "%s%lld", a ? ", " : "", (long long)shape[a]);
    text_put_char(&t, ']');
    return text;
}

static const char *size_suggestion(const cJSON *size)
{
    const char *const text = tree_number(size);
    if (text && *text == '-') return "; no size can be left open";
    return parse_integer_suggestion(size);
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
                         "%s: shape has %d dimensions, must have 1 to %d; %s is %s%s", name, rank, ATTN_MAX_RANK, name,
                         attn_tensor_shape(id, axes),
                         rank == 0 && proto_may_be_number(id) ? "; one number has the shape [1]" : "");
    size = value->child;
    for (int a = 0; a < rank; a++, size = size->next)
        if (!tree_integer(size, 0, TREE_INTEGER_MAX, &t->shape[a])) {
            snprintf(member, sizeof member, "/%s/shape/%d", name, a);
            return attn_fail(err, ATTN_INVALID, member, "%s: shape[%d] is %s, must be an integer from 0 to 2^31 - 1%s",
                             name, a, tree_describe(size, quote), size_suggestion(size));
        }
    t->rank = rank;
    return ATTN_OK;
}

/* Returns whether the nesting of a JSON array agrees with the tensor's shape. A flat list agrees with every shape. An
 * array without elements agrees if its nesting ends at the first axis of size 0. */
static bool nesting_fits(const scan_extract *extract, const attn_tensor *t)
{
    if (extract->rank == 1 && (t->rank > 1 || extract->shape[0] == t->shape[0]))
        return true; /* a flat list is accepted here; the caller checks its number of elements */
    if (extract->rank > t->rank || (extract->rank < t->rank && extract->elements)) return false;
    for (int a = 0; a < extract->rank; a++)
        if (extract->shape[a] != t->shape[a]) return false;
    return true;
}

static const char *nesting_suggestion(const scan_extract *extract, const attn_tensor *t)
{
    const bool four = extract->rank == 4 && t->rank == 4;
    return four && extract->shape[0] == t->shape[0] && extract->shape[1] == t->shape[2] &&
                   extract->shape[2] == t->shape[1] && extract->shape[3] == t->shape[3]
               ? "; if the data are [B, H, S, D], write their shape, and \"layout\": \"bhsd\""
               : "";
}

/* Returns a dtype with which `elements` elements take `bytes` bytes; NULL: there is none. */
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

/* Writes a hint for a tensor whose size in bytes is wrong: a dtype that would give this size. "": there is none.
 * Returns `suggestion`. */
static const char *bytes_suggestion(attn_tensor_id id, const proto_dtype *dtype, uint64_t bytes, uint64_t elements,
                                    char suggestion[TREE_SUGGESTION_BYTES])
{
    const char *const other = dtype_of_bytes(dtype, bytes, elements);
    proto_dtype taken;
    *suggestion = '\0';
    if (other && proto_dtype_parse(other, &taken) && proto_dtype_takes(id, &taken))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %llu would be right for %s: is that the array's dtype?",
                 (unsigned long long)bytes, other);
    else if (other)
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %llu would be right for %s: convert the array to %s",
                 (unsigned long long)bytes, other, dtype->name);
    return suggestion;
}

static const char *length_suggestion(attn_tensor_id id, const scan_extract *extract, const uint8_t *bytes,
                                     const proto_dtype *dtype, uint64_t elements,
                                     char suggestion[TREE_SUGGESTION_BYTES])
{
    const char *const file = extract->bytes ? suggestion_bytes(bytes, extract->bytes) : NULL;
    const bool text = extract->kind == SCAN_BASE64;
    const uint64_t needed = elements * dtype->bytes;
    if (text && extract->bytes == 0) snprintf(suggestion, TREE_SUGGESTION_BYTES, "; the string is empty");
    else if (text && extract->bytes == BASE64_ENCODED(needed) && suggestion_is_base64(bytes, extract->bytes))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; the bytes are base64 again: was it encoded twice?");
    else if (file) snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %s", file);
    else if (text && suggestion_is_hex(bytes, extract->bytes))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %s", suggestion_hex);
    else (void)bytes_suggestion(id, dtype, extract->bytes, elements, suggestion);
    return suggestion;
}

/* Converts int64 to int32 in place. Element i as int32 overwrites only int64 elements that have been read already. */
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

static attn_status data(const struct parse_reader *r, attn_tensor_id id, const cJSON *value, const proto_dtype *dtype,
                        attn_tensor *t, attn_error *err)
{
    const char *const name = attn_tensors[id].name;
    tree_member member;
    char quote[TREE_QUOTE_BYTES], is[SHAPE_BYTES], must[SHAPE_BYTES], suggestion[TREE_SUGGESTION_BYTES];
    const scan_extract *extract;
    int64_t bytes, elements;
    /* A cJSON number in the tree is always the index of an extracted tensor value, because the client's numbers are
     * kept as text. */
    if (!cJSON_IsNumber(value))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data is %s, must be base64 in a string or an array of numbers%s%s", name,
                         tree_describe(value, quote), cJSON_IsObject(value) || cJSON_IsNull(value) ? "; " : "",
                         cJSON_IsObject(value) ? suggestion_typed_array
                         : cJSON_IsNull(value) ? "JSON.stringify() writes null for undefined and NaN"
                                               : "");
    extract = &r->extracts[(int)value->valuedouble];
    switch (extract->fault) {
    case SCAN_FINE: break;
    case SCAN_BASE64_CHARACTER:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data is not base64 at character %llu (byte %llu of the body): %s", name,
                         (unsigned long long)extract->position, (unsigned long long)extract->at, extract->reason);
    case SCAN_BASE64_ENDS:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data ends after %llu characters of base64, inside a group of four; %s", name,
                         (unsigned long long)extract->position, extract->reason);
    case SCAN_ARRAY_TEXT:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"), "%s: data at byte %llu of the body: %s",
                         name, (unsigned long long)extract->at, extract->reason);
    case SCAN_ARRAY_ELEMENT:
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"), "%s: element %llu of data: %s", name,
                         (unsigned long long)extract->position, extract->reason);
    }
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &bytes) || !attn_shape_elements(t->rank, t->shape, &elements) ||
        __builtin_mul_overflow(elements, (int64_t)dtype->bytes, &bytes))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                         "%s: shape %s of %s is more bytes than can be counted", name,
                         shape_text(t->rank, t->shape, must), dtype->name);
    if (extract->kind == SCAN_ARRAY && extract->elements != elements)
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data has %lld numbers, shape %s needs %lld%s", name, (long long)extract->elements,
                         shape_text(t->rank, t->shape, must), (long long)elements,
                         dtype->bytes > 1 && elements > 0 && extract->elements == bytes
                             ? "; are these its bytes? They are sent in base64"
                             : "");
    if (extract->kind == SCAN_ARRAY && !nesting_fits(extract, t))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "data"),
                         "%s: data is nested as %s, shape is %s%s", name, shape_text(extract->rank, extract->shape, is),
                         shape_text(t->rank, t->shape, must), nesting_suggestion(extract, t));
    if (extract->kind == SCAN_ARRAY && (!extract->typed || extract->dtype != t->dtype))
        return attn_fail(err, ATTN_INTERNAL, tree_pointer(member, name, "data"), "%s: data was not converted to %s",
                         name, attn_dtype_name(t->dtype));
    *t = attn_tensor_make(extract->device ? extract->device
                          : r->memory     ? r->memory + extract->offset
                                          : NULL,
                          t->dtype, t->rank, t->shape);
    if (extract->kind == SCAN_ARRAY) return ATTN_OK;
    if (extract->bytes != (uint64_t)bytes)
        return attn_fail(
            err, ATTN_INVALID, tree_pointer(member, name, "data"),
            "%s: data has %zu bytes, shape %s of %s needs %lld%s", name, extract->bytes,
            shape_text(t->rank, t->shape, must), dtype->name, (long long)bytes,
            extract->device ? "" : length_suggestion(id, extract, t->data, dtype, (uint64_t)elements, suggestion));
    return dtype->bytes > attn_dtype_bytes(dtype->as) ? narrow(name, t, elements, err) : ATTN_OK;
}

attn_status parse_size(attn_tensor_id id, const cJSON *of_shape, const proto_dtype *dtype, const char *what,
                       int64_t size, const char *pointer, attn_error *err)
{
    attn_tensor t;
    char must[SHAPE_BYTES], suggestion[TREE_SUGGESTION_BYTES];
    int64_t bytes, elements;
    if (!of_shape || shape(id, of_shape, &t, NULL) != ATTN_OK || !attn_shape_elements(t.rank, t.shape, &elements) ||
        __builtin_mul_overflow(elements, (int64_t)dtype->bytes, &bytes) || bytes == size)
        return ATTN_OK;
    return attn_fail(err, ATTN_INVALID, pointer, "%s: %s is %lld, shape %s of %s needs %lld%s", attn_tensors[id].name,
                     what, (long long)size, shape_text(t.rank, t.shape, must), dtype->name, (long long)bytes,
                     bytes_suggestion(id, dtype, (uint64_t)size, (uint64_t)elements, suggestion));
}

/* Beginnings of dtype names of other programs for which no simple conversion helps, because elements have fewer than 8
 * bits or share scales. */
static const char *const packed_dtypes[] = { "nvfp", "mxfp", "fp4",  "fp6_", "float4", "float6_", "f6_",
                                             "e2m1", "e2m3", "e3m2", "int4", "uint4",  "nf4" };
static const char *const other_dtypes[] = { "float", "int",  "uint", "bool", "complex", "bfloat", "fp",  "bf8", "f8_",
                                            "e5m2",  "e4m3", "e8m0", "qint", "quint",   "i16",    "u16", "u32", "u64" };

static bool begins_like(const char *name, const char *const *begins, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strncasecmp(name, begins[i], strlen(begins[i]))) return true;
    return false;
}

static const char *first_dtype(attn_tensor_id id)
{
    return attn_dtype_name((attn_dtype)__builtin_ctz(attn_tensor_dtypes(id)));
}

const char *parse_dtype_suggestion(attn_tensor_id id, bool given, const cJSON *value,
                                   char suggestion[TREE_SUGGESTION_BYTES])
{
    const char *const word = tree_string(value);
    char name[SUGGESTION_DTYPE_BYTES];
    proto_dtype dtype;
    /* safetensors' dtype F4 has four bits, but NumPy's dtype f4 has four bytes */
    const bool four_bits = word && !strcmp(word, "F4");
    const bool floating = attn_dtype_floating((attn_dtype)__builtin_ctz(attn_tensor_dtypes(id)));
    const bool known = word && proto_dtype_parse(suggestion_dtype(word, name), &dtype) && !four_bits;
    const char *const found = word ? suggestion_of(attn_tensors[id].name, known ? dtype.name : name) : NULL;
    *suggestion = '\0';
    if (!word) return suggestion;
    if (given && suggestion_big_endian(word))
        snprintf(suggestion, TREE_SUGGESTION_BYTES,
                 "; its bytes must be little-endian, x.astype(x.dtype.newbyteorder('<'))");
    else if (known && proto_dtype_takes(id, &dtype))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; write %s", dtype.name);
    else if (!given && (known || begins_like(name, other_dtypes, COUNT(other_dtypes))))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; convert what comes back");
    else if (!given) return suggestion;
    else if (found) snprintf(suggestion, TREE_SUGGESTION_BYTES, "; %s", found);
    else if (floating && (four_bits || begins_like(name, packed_dtypes, COUNT(packed_dtypes))))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; dequantise it to float16 or bfloat16");
    else if (known || begins_like(name, other_dtypes, COUNT(other_dtypes)))
        snprintf(suggestion, TREE_SUGGESTION_BYTES, "; convert it to %s", first_dtype(id));
    return suggestion;
}

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

/* ---- Tensors that the parser makes from numbers ------------------------------------------------------------------ */

bool proto_may_be_number(attn_tensor_id id)
{
    return attn_tensors[id].axes.kind == ATTN_AXES_SPREAD;
}

/* Returns the size in bytes of the cu_seqlens_k that the parser makes. Returns 0 if the size would exceed `most`: the
 * shape of cu_seqlens_q is then wrong, and is refused later. */
static size_t bytes_of_starts(const cJSON *cu_seqlens_q, size_t most)
{
    const cJSON *const shape = cJSON_GetObjectItemCaseSensitive(cu_seqlens_q, "shape");
    int64_t count;
    if (!cJSON_IsArray(shape) || !tree_integer(shape->child, 1, INT32_MAX, &count)) return 0;
    return (size_t)count > most / sizeof(int32_t) ? 0 : SCAN_ALIGNED((size_t)count * sizeof(int32_t));
}

size_t parse_room_of(const cJSON *problem, size_t most)
{
    size_t bytes = 0;
    const cJSON *const packed = cJSON_GetObjectItemCaseSensitive(problem, attn_tensors[ATTN_T_cu_seqlens_q].name);
    if (packed && !cJSON_GetObjectItemCaseSensitive(problem, attn_tensors[ATTN_T_cu_seqlens_k].name))
        bytes += bytes_of_starts(packed, most);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if (proto_may_be_number((attn_tensor_id)id) &&
            tree_number(cJSON_GetObjectItemCaseSensitive(problem, attn_tensors[id].name)))
            bytes += SCAN_ALIGNMENT;
    return bytes;
}

/* Allocates zeroed memory at the unused end of the caller's memory, for a tensor that the parser makes. */
static void *take(const struct parse_reader *r, size_t bytes)
{
    uint8_t *const at = r->room->at;
    const size_t whole = SCAN_ALIGNED(bytes);
    assert(whole <= r->room->left);
    r->room->at += whole;
    r->room->left -= whole;
    return memset(at, 0, whole);
}

void parse_starts_of_keys(const struct parse_reader *r, attn_problem *p)
{
    if (p->cu_seqlens_q.rank != 1 || p->cu_seqlens_k.rank || p->page_table.rank || p->k.rank != 4) return;
    const int64_t rows = p->cu_seqlens_q.shape[0] - 1, Sk = p->k.shape[1];
    /* If the sizes are wrong, nothing is made here: attn_check() reports the wrong sizes later. */
    if (rows < 0 || p->k.shape[0] != rows || Sk > INT32_MAX) return;
    int32_t *const starts = take(r, (size_t)(rows + 1) * sizeof *starts);
    for (int64_t b = 0; b <= rows; b++) starts[b] = (int32_t)(b * Sk < INT32_MAX ? b * Sk : INT32_MAX);
    p->cu_seqlens_k = attn_tensor_make(starts, ATTN_I32, 1, (const int64_t[]){ rows + 1 });
}

/* Makes a tensor of shape [1] from a single number for all heads. */
static attn_status number(const struct parse_reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                          attn_error *err)
{
    const char *const name = attn_tensors[id].name;
    /* the program runs in the C locale, so strtof() takes '.' as the decimal point */
    const float x = strtof(tree_number(value), NULL);
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    if (!isfinite(x))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, name),
                         "%s: is %s, must be between -3.4e38 and 3.4e38 (a float32)", name,
                         tree_describe(value, quote));
    *t = attn_tensor_make(take(r, sizeof x), ATTN_F32, 1, (const int64_t[]){ 1 });
    memcpy(t->data, &x, sizeof x);
    return ATTN_OK;
}

/* ---- Reading a member that is a tensor --------------------------------------------------------------------------- */

attn_status parse_tensor(const struct parse_reader *r, attn_tensor_id id, const cJSON *value, attn_tensor *t,
                         attn_error *err)
{
    static const char *const names[] = { "shape", "dtype", "data" };
    const char *const name = attn_tensors[id].name;
    const cJSON *members[COUNT(names)] = { 0 };
    tree_member member;
    char quote[TREE_QUOTE_BYTES], list[PROTO_DTYPE_LIST_BYTES], suggestion[TREE_SUGGESTION_BYTES];
    const char *word;
    proto_dtype dtype;
    attn_status status;
    if (proto_may_be_number(id) && tree_number(value)) return number(r, id, value, t, err);
    if (!cJSON_IsObject(value))
        return attn_fail(
            err, ATTN_INVALID, tree_pointer(member, NULL, name),
            "%s: is %s, must be %san object: {\"shape\": [...], \"dtype\": \"%s\", \"data\": base64 or "
            "numbers}%s",
            name, tree_describe(value, quote), proto_may_be_number(id) ? "a number or " : "", first_dtype(id),
            cJSON_IsNull(value) && id != ATTN_T_q && id != ATTN_T_k && id != ATTN_T_v ? parse_value_suggestion(value)
                                                                                      : "");
    for (const cJSON *part = value->child; part; part = part->next) {
        struct text_nearest best = { part->string, NULL, 3 };
        size_t i = 0;
        if (tree_repeated(value, part)) return tree_twice(name, part->string, err);
        while (i < COUNT(names) && strcmp(part->string, names[i])) i++;
        if (i == COUNT(names)) {
            for (i = 0; i < COUNT(names); i++) text_consider(&best, names[i]);
            return tree_unknown(SUGGESTION_TENSOR, name, &best, " (a tensor has shape, dtype and data)", err);
        }
        members[i] = part;
    }
    for (size_t i = 0; i < COUNT(names); i++)
        if (!members[i]) return missing(id, names[i], err);
    if ((status = shape(id, members[0], t, err)) != ATTN_OK) return status;
    word = tree_string(members[1]);
    const bool is_judged = proto_operations[r->op].judged >> id & 1;
    if (is_judged && (!word || !proto_dtype_parse(word, &dtype) || !proto_dtype_judged(&dtype)))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "dtype"), "%s: dtype is %s, must be %s", name,
                         tree_describe(members[1], quote), attn_dtype_list(ATTN_DTYPES_FORWARD, list));
    if (!is_judged && (!word || !proto_dtype_parse(word, &dtype) || !proto_dtype_takes(id, &dtype)))
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "dtype"), "%s: dtype is %s, must be %s%s", name,
                         tree_describe(members[1], quote), proto_dtype_list(id, list),
                         parse_dtype_suggestion(id, true, members[1], suggestion));
    t->dtype = dtype.as;
    return data(r, id, members[2], &dtype, t, err);
}
