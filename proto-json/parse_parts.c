/* parse_parts.c: the parts of a merge, which are results (out and lse) of the same queries over different keys. In JSON
 * the parts are a list. The other formats have one member for each tensor:
 *
 *     "parts": [{"out": {...}, "lse": {...}}, ...]            "parts.0.out": {...}, "parts.0.lse": {...}, ... */
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "suggestions.h"
#include "text/text.h"

/* ---- Names of tensors of the parts of a merge -------------------------------------------------------------------- */

#define PARTS "parts"

/* The tensors and gradients of a merge's part, in the order of their tensor numbers. */
static const attn_tensor_id of_part[] = { ATTN_T_out, ATTN_T_lse }, of_gradient[] = { ATTN_T_dout, ATTN_T_dlse };

/* Returns the tensor number (see PROTO_TENSORS) of a tensor of part `part` of a merge: `out` if `which` is 0, and `lse`
 * if `which` is 1. */
static int number_of(int part, int which)
{
    return ATTN_TENSOR_COUNT + 2 * part + which;
}

static int part_of(int number)
{
    return (number - ATTN_TENSOR_COUNT) / 2;
}

attn_tensor_id proto_tensor_id(int number)
{
    return number < ATTN_TENSOR_COUNT ? (attn_tensor_id)number : of_part[(number - ATTN_TENSOR_COUNT) % 2];
}

const char *proto_tensor_name(int number, bool result, char name[PROTO_NAME_BYTES])
{
    if (number < ATTN_TENSOR_COUNT) snprintf(name, PROTO_NAME_BYTES, "%s", attn_tensors[number].name);
    else
        snprintf(name, PROTO_NAME_BYTES, PARTS ".%d.%s", part_of(number),
                 attn_tensors[(result ? of_gradient : of_part)[(number - ATTN_TENSOR_COUNT) % 2]].name);
    return name;
}

/* Returns the text after a prefix such as "parts.12." of `name`, and sets *part to 12. Returns NULL if `name` has no
 * such prefix. */
static const char *skip_part(const char *name, int *part)
{
    static const char begin[] = PARTS ".";
    if (strncmp(name, begin, sizeof begin - 1) != 0) return NULL;
    const char *const digits = name + sizeof begin - 1;
    const size_t count = strspn(digits, "0123456789");
    if (count < 1 || count > 2 || (count == 2 && *digits == '0') || digits[count] != '.') return NULL;
    *part = count == 1 ? digits[0] - '0' : 10 * (digits[0] - '0') + digits[1] - '0';
    return *part < ATTN_MERGE_PARTS ? digits + count + 1 : NULL;
}

int proto_tensor_named(const char *name, bool result)
{
    int id = 0, part;
    while (id < ATTN_TENSOR_COUNT && strcmp(attn_tensors[id].name, name)) id++;
    const char *const rest = id == ATTN_TENSOR_COUNT ? skip_part(name, &part) : NULL;
    if (id < ATTN_TENSOR_COUNT) return id;
    for (int which = 0; which < 2 && rest; which++)
        if (!strcmp(rest, attn_tensors[(result ? of_gradient : of_part)[which]].name)) return number_of(part, which);
    return PROTO_TENSORS;
}

bool parse_parts_has(const char *name)
{
    const int number = proto_tensor_named(name, false);
    return number >= ATTN_TENSOR_COUNT && number < PROTO_TENSORS;
}

void parse_parts_name(int number, attn_error *err)
{
    char text[sizeof err->text];
    if (!err || number < ATTN_TENSOR_COUNT) return;
    snprintf(text, sizeof text, PARTS ".%d.%.*s", part_of(number), (int)sizeof text - PROTO_NAME_BYTES, err->text);
    memcpy(err->text, text, sizeof text);
}

/* ---- Reading the parts of a merge -------------------------------------------------------------------------------- */

static attn_status make(proto_item *item, int count, bool named, attn_error *err)
{
    proto_parts *const parts = calloc(1, sizeof *parts + 2 * (size_t)count * sizeof parts->at[0]);
    if (!parts) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    parts->count = count;
    parts->named = named;
    item->parts = parts;
    return ATTN_OK;
}

/* Reads a tensor of one part (partial result) of a merge. `where` is the JSON pointer to the tensor, for errors. */
static attn_status read_tensor(const struct parse_reader *r, proto_parts *parts, int number, const cJSON *value,
                               const char *where, attn_error *err)
{
    const attn_tensor_id id = proto_tensor_id(number);
    attn_result *const part = &parts->at[part_of(number)];
    attn_error why = { 0 };
    const attn_status status = parse_tensor(r, id, value, id == ATTN_T_out ? &part->out : &part->lse, &why);
    if (status == ATTN_OK || !err) return status;
    /* why.member is a JSON pointer that begins with the tensor's name, such as "/out/shape/1". In *err, `where`
     * replaces this name. */
    const char *const rest = why.member[0] ? strchr(why.member + 1, '/') : NULL;
    *err = why;
    snprintf(err->member, sizeof err->member, "%s%.*s", where, (int)(sizeof err->member - strlen(where) - 1),
             rest ? rest : "");
    parse_parts_name(number, err);
    return status;
}

static attn_status read_part(const struct parse_reader *r, proto_parts *parts, int p, const cJSON *value,
                             attn_error *err)
{
    char quote[TREE_QUOTE_BYTES], outer[PROTO_NAME_BYTES], where[PROTO_NAME_BYTES];
    snprintf(where, sizeof where, "/" PARTS "/%d", p);
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, where,
                         PARTS ": [%d] is %s, must be an object of two tensors: {\"out\": {...}, \"lse\": {...}}", p,
                         tree_describe(value, quote));
    snprintf(outer, sizeof outer, PARTS ".%d", p);
    for (const cJSON *member = value->child; member; member = member->next) {
        int which = 0;
        while (which < 2 && strcmp(member->string, attn_tensors[of_part[which]].name)) which++;
        if (tree_repeated(value, member) || which == 2) {
            struct text_nearest best = { member->string, NULL, 3 };
            for (which = 0; which < 2; which++) text_consider(&best, attn_tensors[of_part[which]].name);
            const attn_status status = tree_repeated(value, member)
                                           ? tree_twice(outer, member->string, err)
                                           : tree_unknown("", outer, &best, " (a part has out and lse)", err);
            if (err) snprintf(err->member, sizeof err->member, "%s", where);
            return status;
        }
        snprintf(where, sizeof where, "/" PARTS "/%d/%s", p, member->string);
        const attn_status status = read_tensor(r, parts, number_of(p, which), member, where, err);
        if (status != ATTN_OK) return status;
        snprintf(where, sizeof where, "/" PARTS "/%d", p);
    }
    return ATTN_OK;
}

static attn_status both_ways(const char *name, attn_error *err)
{
    tree_member member;
    return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, name),
                     "%s: parts are a list, or a member for each tensor, and not both", name);
}

attn_status parse_parts(const struct parse_reader *r, const cJSON *value, proto_item *item, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    const int count = cJSON_IsArray(value) ? cJSON_GetArraySize(value) : 0;
    int p = 0;
    if (item->parts) return both_ways(PARTS, err);
    if (!cJSON_IsArray(value))
        return attn_fail(err, ATTN_INVALID, "/" PARTS,
                         PARTS ": is %s, must be an array of {\"out\": {...}, \"lse\": {...}}",
                         tree_describe(value, quote));
    if (count < 1 || count > ATTN_MERGE_PARTS)
        return attn_fail(err, ATTN_INVALID, "/" PARTS, PARTS ": there are %d, must be 1 to %d%s", count,
                         ATTN_MERGE_PARTS, count ? "; merge them in groups, and then the groups" : "");
    attn_status status = make(item, count, false, err);
    for (const cJSON *one = value->child; one && status == ATTN_OK; one = one->next, p++)
        status = read_part(r, item->parts, p, one, err);
    return status;
}

attn_status parse_parts_named(const struct parse_reader *r, const cJSON *object, const cJSON *member, proto_item *item,
                              attn_error *err)
{
    char where[PROTO_NAME_BYTES];
    if (item->parts && !item->parts->named) return both_ways(member->string, err);
    if (!item->parts) {
        int count = 0;
        for (const cJSON *one = object->child; one; one = one->next)
            if (parse_parts_has(one->string) && part_of(proto_tensor_named(one->string, false)) >= count)
                count = part_of(proto_tensor_named(one->string, false)) + 1;
        const attn_status status = make(item, count, true, err);
        if (status != ATTN_OK) return status;
    }
    snprintf(where, sizeof where, "/%s", member->string);
    return read_tensor(r, item->parts, proto_tensor_named(member->string, false), member, where, err);
}

/* ---- Making the merge problem from its parts --------------------------------------------------------------------- */

attn_tensor *proto_item_result(proto_item *item, int number)
{
    if (number < ATTN_TENSOR_COUNT) return item->outputs >> number & 1 ? &item->problem.tensor[number] : NULL;
    proto_parts *const parts = item->parts;
    if (!parts || !parts->has_back || part_of(number) >= parts->count) return NULL;
    attn_result *const gradient = &parts->at[parts->count + part_of(number)];
    return (number - ATTN_TENSOR_COUNT) % 2 == 0 ? &gradient->out : &gradient->lse;
}

int proto_item_results_end(const proto_item *item)
{
    return ATTN_TENSOR_COUNT + (item->parts && item->parts->has_back ? 2 * item->parts->count : 0);
}

attn_merge_problem proto_item_merge(const proto_item *item)
{
    const attn_problem *const p = &item->problem;
    proto_parts *const parts = item->parts;
    return (attn_merge_problem){ .count = parts->count,
                                 .layout = p->layout,
                                 .parts = parts->at,
                                 .sinks = p->sinks,
                                 .whole = { p->out, p->lse },
                                 .dout = p->dout,
                                 .dlse = p->dlse,
                                 .gradients = parts->has_back ? parts->at + parts->count : NULL,
                                 .dsinks = p->dsinks };
}

/* Changes the error's pointer "/parts/3/out/shape/1" to "/parts.3.out/shape/1" if the body has no list `parts`. */
static void locate(const proto_parts *parts, attn_error *err)
{
    static const char list[] = "/" PARTS "/";
    if (!err || !parts->named || strncmp(err->member, list, sizeof list - 1)) return;
    char *const after_part = strchr(err->member + sizeof list - 1, '/');
    err->member[sizeof list - 2] = '.';
    if (after_part) *after_part = '.';
}

/* Makes the error for element number `at` of the tensor t, which belongs to a part of a merge. */
static attn_status refuse_value(const proto_parts *parts, int number, const attn_tensor *t, int64_t at,
                                const char *rule, attn_error *err)
{
    const float x = ((const float *)t->data)[at];
    char name[PROTO_NAME_BYTES], member[64], index[96], is[32];
    int64_t indices[ATTN_MAX_RANK];
    struct text text = text_in(index, sizeof index);
    proto_tensor_name(number, false, name);
    for (int a = t->rank - 1; a >= 0; a--) indices[a] = at % t->shape[a], at /= t->shape[a];
    for (int a = 0; a < t->rank; a++) text_printf(&text, "%s%lld", a ? ", " : "[", (long long)indices[a]);
    text_put_char(&text, ']');
    /* NaN is written without %g, because printf() may write "-nan" */
    if (isnan(x)) snprintf(is, sizeof is, "nan");
    else snprintf(is, sizeof is, "%.10g", x);
    if (number < ATTN_TENSOR_COUNT) snprintf(member, sizeof member, "/%s/data", name);
    else snprintf(member, sizeof member, "/" PARTS "/%d/lse/data", part_of(number));
    attn_fail(err, ATTN_INVALID, member, "%s: %s is %s, must be %s", name, index, is, rule);
    locate(parts, err);
    return ATTN_INVALID;
}

/* Converts the lse of each part (partial result) of a merge to base e, and the lse of parts without keys to -inf.
 * Refuses NaN. Also refuses +inf, unless the request says that parts without keys have the lse +inf. */
static attn_status convert_lse(const proto_item *item, attn_error *err)
{
    const proto_parts *const parts = item->parts;
    for (int p = 0; p < parts->count; p++) {
        const attn_tensor *const t = &parts->at[p].lse;
        float *const lse = t->data;
        int64_t elements = 0;
        /* cannot fail, because the shape was checked before */
        (void)attn_shape_elements(t->rank, t->shape, &elements);
        for (int64_t i = 0; i < elements; i++) {
            if (isnan(lse[i]) || (lse[i] == INFINITY && !item->empty_lse))
                return refuse_value(parts, number_of(p, 1), t, i,
                                    isnan(lse[i]) ? "a number, or -inf for an empty part"
                                                  : "finite, or -inf for an empty part; where empty parts have +inf, "
                                                    "write \"empty_lse\": \"+inf\"",
                                    err);
            if (lse[i] == INFINITY) lse[i] = -INFINITY;
            else if (item->lse_base) lse[i] = (float)(lse[i] * M_LN2);
        }
    }
    return ATTN_OK;
}

static attn_status check_sinks(const proto_item *item, attn_error *err)
{
    const attn_tensor *const t = &item->problem.sinks;
    for (int64_t h = 0; t->rank == 1 && h < t->shape[0]; h++) {
        const float x = ((const float *)t->data)[h];
        if (!isfinite(x) && x != -INFINITY) return refuse_value(item->parts, ATTN_T_sinks, t, h, "finite or -inf", err);
    }
    return ATTN_OK;
}

static void make_outputs(proto_item *item)
{
    attn_problem *const p = &item->problem;
    proto_parts *const parts = item->parts;
    const attn_tensor *const out = &parts->at[0].out, *const lse = &parts->at[0].lse;
    const attn_dtype dtype = item->has_result_dtype ? item->result_dtype : out->dtype;
    if (item->outputs & ATTN_TENSOR_BIT(out)) p->out = attn_tensor_make(NULL, dtype, out->rank, out->shape);
    if (item->outputs & ATTN_TENSOR_BIT(lse)) p->lse = attn_tensor_make(NULL, ATTN_F32, lse->rank, lse->shape);
    if (item->outputs & ATTN_TENSOR_BIT(dsinks)) p->dsinks = attn_tensor_make(NULL, ATTN_F32, 1, p->sinks.shape);
    parts->has_back = p->dout.rank > 0;
    for (int g = 0; g < parts->count && parts->has_back; g++)
        parts->at[parts->count + g] = (attn_result){ attn_tensor_make(NULL, out->dtype, out->rank, out->shape),
                                                     attn_tensor_make(NULL, ATTN_F32, lse->rank, lse->shape) };
}

attn_status parse_parts_done(const struct parse_reader *r, proto_item *item, attn_error *err)
{
    const attn_problem *const p = &item->problem;
    const proto_parts *const parts = item->parts;
    char name[PROTO_NAME_BYTES], member[64];
    if (!parts)
        return attn_fail(err, ATTN_INVALID, "/" PARTS,
                         PARTS ": is missing, must be an array of {\"out\": {...}, \"lse\": {...}}");
    for (int n = number_of(0, 0); n < number_of(parts->count, 0); n++) {
        const attn_result *const part = &parts->at[part_of(n)];
        if ((proto_tensor_id(n) == ATTN_T_out ? part->out : part->lse).rank > 0) continue;
        if (parts->named) snprintf(member, sizeof member, "/%s", proto_tensor_name(n, false, name));
        else snprintf(member, sizeof member, "/" PARTS "/%d", part_of(n));
        return attn_fail(err, ATTN_INVALID, member, "%s: is missing, each part has out and lse",
                         proto_tensor_name(n, false, name));
    }
    if (item->outputs & ATTN_TENSOR_BIT(dsinks) && (!p->sinks.rank || !p->dout.rank))
        return attn_fail(err, ATTN_INVALID, "/outputs", "outputs: dsinks needs %s, which is not given",
                         p->sinks.rank ? "dout" : "sinks");
    if (r->gradients > (p->dout.rank ? parts->count : 0))
        return attn_fail(err, ATTN_INVALID, "/outputs", "outputs: gradients of part %d need %s", r->gradients - 1,
                         p->dout.rank ? "such a part" : "dout");
    attn_merge_problem m = proto_item_merge(item);
    attn_status status = attn_merge_check(&m, err);
    if (status != ATTN_OK) locate(parts, err);
    if (status == ATTN_OK) status = check_sinks(item, err);
    if (status == ATTN_OK) status = convert_lse(item, err);
    if (status == ATTN_OK) make_outputs(item);
    return status;
}
