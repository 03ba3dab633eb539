/* kserve_json.c: translates the JSON of a KServe request into a body in the server's own JSON format. It also assigns
 * an address in the caller's memory to each tensor. */
#include "kserve_internal.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "parse_internal.h"
#include "suggestions.h"
#include "text/text.h"
#include "tree.h"

/* ---- Error messages ---------------------------------------------------------------------------------------------- */

static attn_status no_memory(struct kserve_reader *r)
{
    return attn_fail(&r->error, ATTN_NO_MEMORY, "", "no memory to read the request");
}

/* The following functions write JSON pointers such as "/inputs/2/datatype" and names such as "q: datatype" into errors.
 * They avoid printf(), because it took longer than all other work on a request. */
static void point_to(tree_member pointer, const char *list, int index, const char *rest)
{
    struct text t = text_in(pointer, sizeof(tree_member));
    text_put_string(&t, list);
    text_put_number(&t, (uint64_t)index);
    text_put_string(&t, rest);
}

enum { WHERE_BYTES = 2 * TREE_NAME_BYTES };

static void name_part(char where[WHERE_BYTES], const char *name, const char *part)
{
    struct text t = text_in(where, WHERE_BYTES);
    text_put(&t, name, text_cut(name, TREE_NAME_BYTES));
    text_put_string(&t, ": ");
    text_put_string(&t, part);
}

static void name_output(char where[WHERE_BYTES], int index, const char *colon, const char *part)
{
    struct text t = text_in(where, WHERE_BYTES);
    text_put_string(&t, "outputs[");
    text_put_number(&t, (uint64_t)index);
    text_put_string(&t, "]");
    text_put_string(&t, colon);
    text_put_string(&t, part);
}

enum { LISTED_BYTES = 240 };
static const char *list_names(const char *const *names, char listed[LISTED_BYTES])
{
    struct text t = text_in(listed, LISTED_BYTES);
    for (int i = 0; names[i]; i++) {
        text_put_string(&t, i == 0 ? " (there are " : names[i + 1] ? ", " : " and ");
        text_put_string(&t, names[i]);
    }
    text_put_char(&t, ')');
    return listed;
}

/* Makes the error for an unknown member. `where` names the part of the body that has it; NULL: the top of the body.
 * `place` is the name of this part in suggestions.h, for hints about the words of other programs; "": no such hints. */
static attn_status unknown(struct kserve_reader *r, const char *pointer, const char *place, const char *where,
                           const char *name, const char *const *known)
{
    const int length = (int)text_cut(name, TREE_NAME_BYTES);
    struct text_nearest best = { name, NULL, 3 };
    char suggestion[TREE_SUGGESTION_BYTES], listed[LISTED_BYTES];
    for (const char *const *one = known; *one; one++) text_consider(&best, *one);
    return attn_fail(&r->error, ATTN_INVALID, pointer, "%s%sunknown member '%.*s%s'%s", where ? where : "",
                     where ? ": " : "", length, name, name[length] ? "..." : "",
                     *tree_suggestion(place, &best, suggestion) ? suggestion : list_names(known, listed));
}

static attn_status must_be(struct kserve_reader *r, const char *pointer, const char *what, const cJSON *value,
                           const char *rule)
{
    char quote[TREE_QUOTE_BYTES];
    return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: is %s, must be %s", what, tree_describe(value, quote),
                     rule);
}

static bool is_one_of(const char *name, const char *const *names)
{
    while (*names && strcmp(*names, name)) names++;
    return *names != NULL;
}

/* ---- Names of dtypes in KServe ----------------------------------------------------------------------------------- */

static const char *const datatypes[ATTN_DTYPE_COUNT] = {
#define X(id, wire, safetensors, kserve, bytes, floating) [ATTN_##id] = kserve,
    ATTN_DTYPE_MAP(X)
#undef X
};

const char *proto_datatype(attn_dtype dtype)
{
    return datatypes[dtype];
}

enum { DATATYPES_BYTES = 96 };
/* Writes the KServe datatypes of a tensor, such as "FP32, FP16, BF16 or UINT8 with the parameter fp8: true". */
static const char *datatype_list(attn_tensor_id id, char list[DATATYPES_BYTES])
{
    struct text t = text_in(list, DATATYPES_BYTES);
    const unsigned dtypes = attn_tensor_dtypes(id);
    unsigned left = dtypes;
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++) {
        if (!(dtypes >> d & 1)) continue;
        left &= ~(1u << d);
        if (t.used) text_put_string(&t, left ? ", " : " or ");
        text_put_string(&t, d == ATTN_F8E4M3 ? "UINT8 with the parameter " FP8 ": true" : datatypes[d]);
    }
#define X(wire, safetensors, kserve, bytes, as) \
    if (dtypes == ATTN_DTYPE_BIT(as)) text_put_string(&t, " or " kserve);
    PROTO_DTYPE_MAP(X)
#undef X
    return list;
}

/* ---- The inputs of the request ----------------------------------------------------------------------------------- */

static const char *const input_members[] = { "name", "shape", "datatype", "parameters", "data", NULL };
static const char *const input_parameters[] = { BINARY_SIZE, FP8, REGION, REGION_AT, REGION_SIZE, NULL };
static const char shared_memory[] = "shared_memory_";

static const char *list_inputs(proto_op op, char listed[LISTED_BYTES])
{
    struct text t = text_in(listed, LISTED_BYTES);
    const char *before = " (its inputs are ";
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        if (!proto_takes_tensor(op, (attn_tensor_id)id)) continue;
        text_put_string(&t, before);
        text_put_string(&t, attn_tensors[id].name);
        before = ", ";
    }
    if (proto_operations[op].merges) text_put_string(&t, ", and parts.0.out, parts.0.lse, parts.1.out and so on");
    text_put_char(&t, ')');
    return listed;
}

static int named(const char *name)
{
    const int number = proto_tensor_named(name, false);
    return number < ATTN_TENSOR_COUNT ? number : ATTN_TENSOR_COUNT;
}

static bool takes_input(proto_op op, int number)
{
    if (number < ATTN_TENSOR_COUNT) return proto_takes_tensor(op, (attn_tensor_id)number);
    return number < PROTO_TENSORS && proto_operations[op].merges;
}

const proto_option *kserve_option_named(const char *name)
{
    const proto_option *o = proto_options;
    while (o->name && strcmp(o->name, name)) o++;
    return o->name ? o : NULL;
}

/* Reads one of the parameters that say where a tensor is in shared memory (region, offset, size) into *place. Before
 * the first of a tensor's parameters, *place must be {.bytes = -1}. */
static attn_status read_place(struct kserve_reader *r, const char *pointer, const char *where, const cJSON *one,
                              proto_shared *place)
{
    static const char rule[] = "a number of bytes: an integer from 0 to 2^53";
    const char *const name = tree_string(one);
    if (!strcmp(one->string, REGION)) {
        if (!name || !*name || strlen(name) >= sizeof place->region) {
            char names[64];
            snprintf(names, sizeof names, "the name of a region, of 1 to %zu bytes", sizeof place->region - 1);
            return must_be(r, pointer, where, one, names);
        }
        strcpy(place->region, name);
    } else if (!strcmp(one->string, REGION_AT)) {
        if (!tree_integer(one, 0, TREE_INTEGER_MAX, &place->offset)) return must_be(r, pointer, where, one, rule);
    } else if (!tree_integer(one, 0, TREE_INTEGER_MAX, &place->bytes)) {
        return must_be(r, pointer, where, one, rule);
    }
    return ATTN_OK;
}

/* Checks that the parameters that say where a tensor is in shared memory (region, offset, size) are complete. `said`:
 * the client gave at least one of them. */
static attn_status check_place(struct kserve_reader *r, const char *pointer, const char *where, bool said,
                               const proto_shared *place)
{
    const char *const lacks = !said ? NULL : !*place->region ? REGION : place->bytes < 0 ? REGION_SIZE : NULL;
    if (!lacks) return ATTN_OK;
    return attn_fail(&r->error, ATTN_INVALID, pointer,
                     "%s: %s is missing; shared memory is named by " REGION ", " REGION_SIZE
                     " and, where it is not 0, " REGION_AT,
                     where, lacks);
}

static bool is_place(const char *name)
{
    return !strncmp(name, shared_memory, sizeof shared_memory - 1);
}

/* Reads the parameters of one input. *size becomes the number of bytes of its binary data; -1: it has none.
 * place->bytes becomes its number of bytes in shared memory. */
static attn_status read_input_parameters(struct kserve_reader *r, const char *name, int index, const cJSON *parameters,
                                         int64_t *size, bool *fp8, proto_shared *place)
{
    char where[WHERE_BYTES];
    tree_member pointer;
    attn_status status;
    bool said = false;
    *size = -1;
    *fp8 = false;
    if (!parameters) return ATTN_OK;
    point_to(pointer, "/inputs/", index, "/parameters");
    name_part(where, name, "parameters");
    if (!cJSON_IsObject(parameters)) return must_be(r, pointer, where, parameters, "an object");
    for (const cJSON *one = parameters->child; one; one = one->next) {
        if (tree_repeated(parameters, one)) return tree_twice(name, one->string, &r->error);
        if (!is_one_of(one->string, input_parameters))
            return unknown(r, pointer, SUGGESTION_INPUT, where, one->string, input_parameters);
        name_part(where, name, one->string);
        if (!strcmp(one->string, FP8)) {
            if (!cJSON_IsBool(one)) return must_be(r, pointer, where, one, "true or false");
            *fp8 = cJSON_IsTrue(one);
        } else if (is_place(one->string)) {
            said = true;
            if ((status = read_place(r, pointer, where, one, place)) != ATTN_OK) return status;
        } else if (!tree_integer(one, 0, TREE_INTEGER_MAX, size)) {
            return must_be(r, pointer, where, one, "a number of bytes: an integer from 0 to 2^53");
        }
    }
    name_part(where, name, "parameters");
    return check_place(r, pointer, where, said, place);
}

/* Translates the KServe datatype of an input into the name that this dtype has in the server's own JSON format. */
static attn_status read_datatype(struct kserve_reader *r, int index, int id, const char *name, cJSON *input, bool fp8,
                                 proto_dtype *dtype)
{
    cJSON *const value = cJSON_DetachItemFromObjectCaseSensitive(input, "datatype");
    const char *const word = value ? tree_string(value) : NULL;
    char quote[TREE_QUOTE_BYTES], list[DATATYPES_BYTES];
    tree_member pointer;
    attn_status status = ATTN_OK;
    point_to(pointer, "/inputs/", index, "/datatype");
    bool takes = word && proto_dtype_parse(word, dtype);
    /* a client may send float8 with the datatype UINT8, but not with BOOL */
    if (takes && fp8 && !strcmp(dtype->name, attn_dtype_name(ATTN_U8)))
        (void)proto_dtype_parse(attn_dtype_name(ATTN_F8E4M3), dtype);
    else if (takes && fp8)
        status = attn_fail(&r->error, ATTN_INVALID, pointer, "%s: " FP8 " is true, which goes with UINT8, not with %s",
                           name, tree_describe(value, quote));
    takes = takes && proto_dtype_takes((attn_tensor_id)id, dtype);
    if (status != ATTN_OK) {
    } else if (!value) {
        status = attn_fail(&r->error, ATTN_INVALID, pointer, "%s: datatype is missing, must be %s", name,
                           datatype_list((attn_tensor_id)id, list));
    } else if (!takes) {
        status = attn_fail(&r->error, ATTN_INVALID, pointer, "%s: datatype is %s, must be %s", name,
                           tree_describe(value, quote), datatype_list((attn_tensor_id)id, list));
    } else if (r->model->fixed && id == ATTN_T_q && dtype->as != r->model->dtype) {
        status = attn_fail(&r->error, ATTN_INVALID, pointer, "%s: datatype is %s, the model %s takes %s", name,
                           tree_describe(value, quote), r->model->name, datatypes[r->model->dtype]);
    } else if (!cJSON_AddStringToObject(input, "dtype", dtype->name)) {
        status = no_memory(r);
    }
    return status;
}

/* Turns a KServe input into a tensor of the server's own JSON format. The tensor's member `data` is the index of an
 * extracted value. */
static attn_status read_input(struct kserve_reader *r, int index, cJSON *input)
{
    struct kserve_input *const slot = &r->inputs[index];
    char quote[TREE_QUOTE_BYTES];
    tree_member pointer;
    proto_dtype dtype;
    proto_shared place = { .index = index, .bytes = -1 };
    int64_t size;
    bool fp8;
    attn_status status;
    point_to(pointer, "/inputs/", index, "");
    if (!cJSON_IsObject(input))
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "inputs[%d] is %s, must be an object: {\"name\": \"q\", \"shape\": [...], \"datatype\": "
                         "\"FP16\", ...}",
                         index, tree_describe(input, quote));
    cJSON *const name_value = cJSON_GetObjectItemCaseSensitive(input, "name");
    const char *const name = name_value ? tree_string(name_value) : NULL;
    if (!name || !*name)
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "inputs[%d]: name is %s, must be that of a tensor, such as q", index,
                         name_value ? tree_describe(name_value, quote) : "missing");
    const int number = proto_tensor_named(name, false), length = (int)text_cut(name, TREE_NAME_BYTES);
    for (int i = 0; i < index; i++)
        if (!strcmp(r->inputs[i].name, name))
            return attn_fail(&r->error, ATTN_INVALID, pointer, "inputs[%d]: '%.*s' is given twice", index, length,
                             name);
    if (kserve_option_named(name))
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "inputs[%d]: '%s' is no tensor, it goes into the request's parameters", index, name);
    if (!takes_input(r->model->op, number)) {
        struct text_nearest best = { name, NULL, 3 };
        char suggestion[TREE_SUGGESTION_BYTES];
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
            if (proto_takes_tensor(r->model->op, (attn_tensor_id)t)) text_consider(&best, attn_tensors[t].name);
        char listed[LISTED_BYTES];
        return attn_fail(&r->error, ATTN_INVALID, pointer, "inputs[%d]: %s has no input '%.*s%s'%s", index,
                         r->model->name, length, name, name[length] ? "..." : "",
                         *tree_suggestion(proto_operations[r->model->op].name, &best, suggestion)
                             ? suggestion
                             : list_inputs(r->model->op, listed));
    }
    const attn_tensor_id id = proto_tensor_id(number);
    slot->name = name;
    for (const cJSON *one = input->child; one; one = one->next) {
        if (tree_repeated(input, one)) return tree_twice(slot->name, one->string, &r->error);
        if (!is_one_of(one->string, input_members))
            return unknown(r, pointer, SUGGESTION_INPUT, slot->name, one->string, input_members);
    }
    cJSON *const parameters = cJSON_DetachItemFromObjectCaseSensitive(input, "parameters");
    status = read_input_parameters(r, slot->name, index, parameters, &size, &fp8, &place);
    if (status != ATTN_OK) return status;
    if ((status = read_datatype(r, index, id, slot->name, input, fp8, &dtype)) != ATTN_OK) return status;

    const cJSON *const data = cJSON_GetObjectItemCaseSensitive(input, "data");
    slot->binary = size >= 0;
    slot->shared = place.bytes >= 0;
    if (slot->binary + slot->shared + (data != NULL) != 1)
        return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: has %s, must have one of them", slot->name,
                         slot->shared ? data ? "data and " REGION : BINARY_SIZE " and " REGION
                         : data       ? "data and " BINARY_SIZE
                                      : "neither data nor " BINARY_SIZE);
    if (slot->binary) {
        tree_member at;
        point_to(at, "/inputs/", index, "/parameters/" BINARY_SIZE);
        status = parse_size(id, cJSON_GetObjectItemCaseSensitive(input, "shape"), &dtype, BINARY_SIZE, size, at,
                            &r->error);
        if (status != ATTN_OK) parse_parts_name(number, &r->error);
        if (status != ATTN_OK) return status;
    }
    if (slot->binary || slot->shared) {
        slot->extract = r->extract_count++;
        r->extracts[slot->extract] = (scan_extract){ .kind = SCAN_BYTES };
        r->sizes[slot->extract] = slot->shared ? 0 : size;
        place.id = id;
        if (slot->shared) r->shared[r->shared_count++] = place;
        if (!cJSON_AddNumberToObject(input, "data", slot->extract)) return no_memory(r);
    } else if (!cJSON_IsNumber(data) || r->extracts[(int)data->valuedouble].kind != SCAN_ARRAY) {
        point_to(pointer, "/inputs/", index, "/data");
        return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: data is %s, must be an array of numbers", slot->name,
                         cJSON_IsNumber(data) ? "a string" : tree_describe(data, quote));
    } else {
        slot->extract = (int)data->valuedouble;
        /* The client sends a float8 input as UINT8, so the numbers of its array are the bytes of its elements. */
        if (fp8 && r->extracts[slot->extract].typed) r->extracts[slot->extract].dtype = dtype.as;
    }
    (void)cJSON_DetachItemFromObjectCaseSensitive(input, "name");
    return ATTN_OK;
}

static attn_status read_inputs(struct kserve_reader *r, cJSON *inputs)
{
    char quote[TREE_QUOTE_BYTES];
    if (!inputs || !cJSON_IsArray(inputs))
        return attn_fail(&r->error, ATTN_INVALID, inputs ? "/inputs" : "", "inputs: is %s, must be an array of tensors",
                         inputs ? tree_describe(inputs, quote) : "missing");
    for (cJSON *input = inputs->child, *next; input; input = next) {
        next = input->next;
        const attn_status status = read_input(r, r->input_count, input);
        if (status != ATTN_OK) return status;
        (void)cJSON_DetachItemViaPointer(inputs, input);
        if (!cJSON_AddItemToObject(r->root, r->inputs[r->input_count].name, input)) return no_memory(r);
        r->input_count++;
    }
    return ATTN_OK;
}

static attn_status place_one(struct kserve_reader *r, scan_extract *extract, int64_t size)
{
    const size_t at = SCAN_ALIGNED(r->memory_bytes);
    /* no overflow: a size is at most 2^53, and the limit on tensor bytes keeps `at` below 2^63 */
    const uint64_t end = at + (uint64_t)size;
    extract->offset = at;
    if (end > (uint64_t)r->limits.tensor_bytes)
        return attn_fail(&r->error, ATTN_TOO_LARGE, "", "the tensors take %llu bytes, at most %lld are taken",
                         (unsigned long long)end, (long long)r->limits.tensor_bytes);
    r->memory_bytes = (size_t)end;
    return ATTN_OK;
}

/* Assigns an address in the caller's memory to each binary input, behind the values that the scanner has extracted. */
static attn_status place(struct kserve_reader *r)
{
    attn_status status = ATTN_OK;
    (void)scan_memory(r->json, &r->memory_bytes);
    r->body_bytes = r->offset;
    for (int i = 0; i < r->input_count && status == ATTN_OK; i++) {
        const int extract = r->inputs[i].extract;
        if (!r->inputs[i].binary) continue;
        status = place_one(r, &r->extracts[extract], r->sizes[extract]);
        r->body_bytes += (uint64_t)r->sizes[extract];
    }
    return status;
}

attn_status kserve_place_shared(struct kserve_reader *r)
{
    const size_t before = r->memory_bytes;
    attn_status status = ATTN_OK;
    for (int i = 0; i < r->shared_count && !r->shared[i].output && status == ATTN_OK; i++)
        if (!r->shared[i].device)
            status = place_one(r, &r->extracts[r->inputs[r->shared[i].index].extract], r->shared[i].bytes);
    if (status != ATTN_OK) r->memory_bytes = before;
    return status;
}

/* ---- The outputs that the request names -------------------------------------------------------------------------- */

static const char *const output_members[] = { "name", "parameters", NULL };
static const char *const output_parameters[] = { "binary_data", REGION, REGION_AT, REGION_SIZE, NULL };

/* Reads how the client wants to receive an output: as bytes (*binary is true), as numbers, or in shared memory
 * (place->bytes >= 0). Before the call, *binary must be the request's default. */
static attn_status read_output_parameters(struct kserve_reader *r, int index, const cJSON *parameters, bool *binary,
                                          proto_shared *place)
{
    char where[WHERE_BYTES];
    tree_member pointer;
    bool said = false, bytes = false;
    attn_status status;
    if (!parameters) return ATTN_OK;
    name_output(where, index, ": ", "parameters");
    point_to(pointer, "/outputs/", index, "/parameters");
    if (!cJSON_IsObject(parameters)) return must_be(r, pointer, where, parameters, "an object");
    for (const cJSON *one = parameters->child; one; one = one->next) {
        if (!strcmp(one->string, "classification"))
            return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: nothing is classified here", where);
        if (!is_one_of(one->string, output_parameters))
            return unknown(r, pointer, "", where, one->string, output_parameters);
        if (tree_repeated(parameters, one))
            return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: member '%s' is given twice", where, one->string);
        if (is_place(one->string)) {
            said = true;
            name_output(where, index, ": ", one->string);
            if ((status = read_place(r, pointer, where, one, place)) != ATTN_OK) return status;
            name_output(where, index, ": ", "parameters");
            continue;
        }
        if (!cJSON_IsBool(one)) return must_be(r, pointer, where, one, "{\"binary_data\": true} or false");
        *binary = bytes = cJSON_IsTrue(one);
    }
    if (said && bytes)
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "%s: binary_data is true beside " REGION ", must be one of them", where);
    if (said) *binary = false;
    return check_place(r, pointer, where, said, place);
}

static bool names_already(const cJSON *names, const char *word)
{
    for (const cJSON *one = names->child; one; one = one->next)
        if (tree_string(one) && !strcmp(tree_string(one), word)) return true;
    return false;
}

/* Reads the name of an output that is the gradient of one partial result of a merge. If the request names the gradients
 * of only some partial results, the answer nevertheless has those of all. */
static attn_status read_gradient(struct kserve_reader *r, int index, const char *name, bool binary,
                                 const proto_shared *place)
{
    const int number = proto_tensor_named(name, true) - ATTN_TENSOR_COUNT, part = number / 2;
    tree_member pointer;
    point_to(pointer, "/outputs/", index, "/parameters");
    if (place->bytes >= 0)
        return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: gradients of parts cannot go to shared memory", name);
    if (binary) r->binary_parts[number % 2] |= UINT64_C(1) << part;
    if (part >= r->gradients) r->gradients = part + 1;
    return ATTN_OK;
}

/* Makes the member of the JSON body that lists the wanted outputs. The member's name is proto_operations[].asks, or
 * `outputs` if that is NULL. Sets *text to true if some outputs are sent as numbers. */
static attn_status read_outputs(struct kserve_reader *r, const cJSON *outputs, bool all_binary, bool *text)
{
    cJSON *names;
    int index = 0;
    *text = false;
    if (!outputs || (cJSON_IsArray(outputs) && !outputs->child)) {
        r->binary = r->binary_parts[0] = r->binary_parts[1] = all_binary ? UINT64_MAX : 0;
        *text = !all_binary;
        return ATTN_OK;
    }
    if (!cJSON_IsArray(outputs)) return must_be(r, "/outputs", "outputs", outputs, "an array of {\"name\": ...}");
    const bool judges = proto_operations[r->model->op].judges;
    const char *const asks = proto_operations[r->model->op].asks, *const member = asks ? asks : "outputs";
    names = cJSON_GetObjectItemCaseSensitive(r->root, member);
    if (!names && !judges) names = cJSON_AddArrayToObject(r->root, member);
    if (!names && !judges) return no_memory(r);
    for (const cJSON *one = outputs->child; one; one = one->next, index++) {
        char where[WHERE_BYTES];
        tree_member pointer;
        bool binary = all_binary;
        proto_shared place = { .output = true, .index = index, .bytes = -1 };
        name_output(where, index, "", "");
        point_to(pointer, "/outputs/", index, "");
        if (!cJSON_IsObject(one)) return must_be(r, pointer, where, one, "an object: {\"name\": \"out\"}");
        for (const cJSON *part = one->child; part; part = part->next) {
            if (tree_repeated(one, part)) return tree_twice(where, part->string, &r->error);
            if (!is_one_of(part->string, output_members))
                return unknown(r, pointer, "", where, part->string, output_members);
        }
        attn_status status = read_output_parameters(r, index, cJSON_GetObjectItemCaseSensitive(one, "parameters"),
                                                    &binary, &place);
        if (status != ATTN_OK) return status;
        cJSON *const name = cJSON_GetObjectItemCaseSensitive(one, "name");
        const char *const word = name ? tree_string(name) : NULL;
        if (!word) return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: name is missing, or is no string", where);
        if (judges && strcmp(word, "report"))
            return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: name is '%.*s', must be report", where,
                             (int)text_cut(word, TREE_NAME_BYTES), word);
        if (judges && place.bytes >= 0)
            return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: report cannot be in shared memory", where);
        if (judges) continue;
        if (proto_operations[r->model->op].merges && proto_tensor_named(word, true) > ATTN_TENSOR_COUNT - 1 &&
            proto_tensor_named(word, true) < PROTO_TENSORS) {
            if ((status = read_gradient(r, index, word, binary, &place)) != ATTN_OK) return status;
            *text |= !binary;
            continue;
        }
        const int id = named(word);
        if (binary && id < ATTN_TENSOR_COUNT) r->binary |= UINT64_C(1) << id;
        place.id = (attn_tensor_id)id;
        if (place.bytes >= 0 && id < ATTN_TENSOR_COUNT) r->shared[r->shared_count++] = place;
        *text |= !binary && place.bytes < 0;
        if (!cJSON_IsArray(names) || (asks && names_already(names, word))) continue;
        cJSON *const copy = cJSON_CreateString(word);
        if (!copy || !cJSON_AddItemToArray(names, copy)) return no_memory(r);
    }
    /* the request named only gradients of partial results, so the list `outputs` is empty and is left out */
    if (names && !names->child) (void)cJSON_DetachItemViaPointer(r->root, names);
    return ATTN_OK;
}

/* ---- Parameters of the request ----------------------------------------------------------------------------------- */

bool proto_is_parameter(const proto_option *option)
{
    return strcmp(option->name, "outputs") != 0 && option->type != PROTO_TYPE_PARTS &&
           strcmp(option->name, "encoding") != 0;
}

static attn_status add_number(struct kserve_reader *r, const char *name, int64_t value)
{
    char digits[TEXT_DIGITS + 2];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    return cJSON_AddRawToObject(r->root, name, digits) ? ATTN_OK : no_memory(r);
}

/* Parses a parameter such as "[-1,0]": KServe has no arrays as parameters, so clients send JSON in a string. *value
 * stays NULL if the string is not JSON; parse.c then makes the error. */
static attn_status parse(struct kserve_reader *r, const char *text, cJSON **value)
{
    const attn_status status = tree_of_text(text, &r->limits, &r->values, value);
    if (status == ATTN_NO_MEMORY) return no_memory(r);
    if (status == ATTN_TOO_LARGE)
        return attn_fail(&r->error, status, "/parameters",
                         "parameters: their strings hold more than %d values or %zu bytes", r->limits.values,
                         r->limits.rest_bytes);
    return ATTN_OK;
}

/* Returns the text of a sequence_id, which is a number or a name; "" for 0, which means no sequence; NULL for anything
 * else. */
static const char *sequence_id_of(const cJSON *one)
{
    const char *const text = tree_string(one), *const number = tree_number(one), *const id = text ? text : number;
    if (!id || strlen(id) >= PROTO_SEQUENCE_BYTES || (number && strspn(number, "0123456789") != strlen(number)))
        return NULL;
    return strcmp(id, "0") ? id : "";
}

static attn_status read_sequence(struct kserve_reader *r, const cJSON *one, const char *pointer)
{
    const char *const name = one->string, *const id = sequence_id_of(one);
    if (!proto_operations[r->model->op].takes_caches)
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "%.*s: there are no sequences here, each request is whole; attention_decode has them",
                         (int)text_cut(name, TREE_NAME_BYTES), name);
    if (!strcmp(name, "sequence_start") || !strcmp(name, "sequence_end")) {
        if (!cJSON_IsBool(one)) return must_be(r, pointer, name, one, "true or false");
        *(!strcmp(name, "sequence_start") ? &r->sequence.start : &r->sequence.end) = cJSON_IsTrue(one);
        return ATTN_OK;
    }
    if (strcmp(name, "sequence_id"))
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "unknown parameter '%.*s'; there are sequence_id, sequence_start and sequence_end",
                         (int)text_cut(name, TREE_NAME_BYTES), name);
    if (!id) return must_be(r, pointer, name, one, "an integer from 0 on, or a string of at most 128 bytes");
    strcpy(r->sequence.id, id);
    return ATTN_OK;
}

static attn_status check_sequence(struct kserve_reader *r)
{
    const proto_sequence *const s = &r->sequence;
    if (*s->id || (!s->start && !s->end)) return ATTN_OK;
    const char *const name = s->start ? "sequence_start" : "sequence_end";
    char pointer[sizeof(tree_member)];
    return attn_fail(&r->error, ATTN_INVALID, tree_pointer(pointer, "parameters", name),
                     "%s: is true, which wants the sequence's sequence_id, a number other than 0 or a name", name);
}

/* Reads sequence_start and sequence_id before all other members. If a request that starts a sequence is refused because
 * of another member, the server must still end the old sequence with this id. */
static void look_for_start(struct kserve_reader *r)
{
    const cJSON *const parameters = cJSON_GetObjectItemCaseSensitive(r->source, "parameters"),
                       *const one = cJSON_GetObjectItemCaseSensitive(parameters, "sequence_id");
    const char *const id = one && proto_operations[r->model->op].takes_caches ? sequence_id_of(one) : NULL;
    if (!id) return;
    strcpy(r->sequence.id, id);
    r->sequence.start = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(parameters, "sequence_start"));
}

/* Reads a parameter whose name Triton reserves. For other names *known becomes false. */
static attn_status read_reserved(struct kserve_reader *r, const cJSON *one, bool *known, int64_t *timeout_us,
                                 bool *all_binary)
{
    const char *const name = one->string;
    char pointer[sizeof(tree_member)];
    tree_pointer(pointer, "parameters", name);
    *known = true;
    if (!strcmp(name, "binary_data_output")) {
        if (!cJSON_IsBool(one)) return must_be(r, pointer, name, one, "true or false");
        *all_binary = cJSON_IsTrue(one);
    } else if (!strcmp(name, "timeout")) {
        if (!tree_integer(one, 0, TREE_INTEGER_MAX, timeout_us))
            return must_be(r, pointer, name, one, "an integer from 0 to 2^53: microseconds");
    } else if (!strncmp(name, "sequence_", strlen("sequence_"))) {
        return read_sequence(r, one, pointer);
    } else {
        *known = false;
    }
    return ATTN_OK;
}

static attn_status add_option(struct kserve_reader *r, cJSON *parameters, cJSON *one)
{
    cJSON *const value = cJSON_DetachItemViaPointer(parameters, one);
    return value && cJSON_AddItemToObject(r->root, attn_tensors[named(value->string)].name, value) ? ATTN_OK
                                                                                                   : no_memory(r);
}

static attn_status read_option(struct kserve_reader *r, cJSON *parameters, cJSON *one)
{
    const proto_option *const o = kserve_option_named(one->string);
    const int id = named(one->string), length = (int)text_cut(one->string, TREE_NAME_BYTES);
    tree_member pointer;
    tree_pointer(pointer, "parameters", one->string);
    if (id < ATTN_TENSOR_COUNT && proto_may_be_number((attn_tensor_id)id) &&
        proto_takes_tensor(r->model->op, (attn_tensor_id)id)) {
        if (!tree_number(one))
            return must_be(r, pointer, one->string, one, "a number; as a tensor it goes into inputs");
        return add_option(r, parameters, one);
    }
    const bool takes = o && (o->ops >> r->model->op & 1);
    if (id < ATTN_TENSOR_COUNT && !takes)
        return attn_fail(&r->error, ATTN_INVALID, pointer, "%s: is a tensor, which goes into inputs", one->string);
    if (!o || !proto_is_parameter(o)) {
        struct text_nearest best = { one->string, NULL, 3 };
        char suggestion[TREE_SUGGESTION_BYTES];
        for (const proto_option *known = proto_options; known->name; known++)
            if (known->ops >> r->model->op & 1) text_consider(&best, known->name);
        if (o && o->type == PROTO_TYPE_PARTS)
            snprintf(suggestion, sizeof suggestion,
                     "; parts are the inputs parts.0.out, parts.0.lse, parts.1.out, ...");
        else if (o)
            snprintf(suggestion, sizeof suggestion,
                     "; outputs, and how they are written, are said in the request's outputs");
        else if (!*tree_suggestion(proto_operations[r->model->op].name, &best, suggestion))
            snprintf(suggestion, sizeof suggestion, " (GET /v2/models/%s/config lists them)", r->model->name);
        return attn_fail(&r->error, ATTN_INVALID, pointer, "unknown parameter '%.*s%s'%s", length, one->string,
                         one->string[length] ? "..." : "", suggestion);
    }
    cJSON *value = NULL;
    if ((o->type == PROTO_TYPE_PAIR || o->type == PROTO_TYPE_IDS || o->type == PROTO_TYPE_NAMES) && tree_string(one)) {
        const attn_status status = parse(r, tree_string(one), &value);
        if (status != ATTN_OK) return status;
    }
    if (!value) value = cJSON_DetachItemViaPointer(parameters, one);
    return value && cJSON_AddItemToObject(r->root, o->name, value) ? ATTN_OK : no_memory(r);
}

static attn_status read_parameters(struct kserve_reader *r, cJSON *parameters, bool *all_binary)
{
    int64_t timeout_us = 0, timeout_ms;
    if (parameters && !cJSON_IsObject(parameters))
        return must_be(r, "/parameters", "parameters", parameters, "an object");
    for (cJSON *one = parameters ? parameters->child : NULL, *next; one; one = next) {
        bool known;
        attn_status status;
        next = one->next;
        for (const cJSON *other = next; other; other = other->next)
            if (!strcmp(other->string, one->string)) return tree_twice("parameters", one->string, &r->error);
        status = read_reserved(r, one, &known, &timeout_us, all_binary);
        if (status == ATTN_OK && !known) status = read_option(r, parameters, one);
        if (status != ATTN_OK) return status;
    }
    /* the smaller of Triton's timeout (in microseconds) and timeout_ms applies */
    if (timeout_us > 0) {
        const int64_t most_ms = (timeout_us + 999) / 1000;
        const cJSON *const given = cJSON_GetObjectItemCaseSensitive(r->root, "timeout_ms");
        if (!given || (tree_integer(given, 1, TREE_INTEGER_MAX, &timeout_ms) && most_ms < timeout_ms)) {
            (void)cJSON_DetachItemFromObjectCaseSensitive(r->root, "timeout_ms");
            return add_number(r, "timeout_ms", most_ms);
        }
    }
    return ATTN_OK;
}

/* Adds the options that the model's name implies, such as causal. */
static attn_status apply_model(struct kserve_reader *r)
{
    const cJSON *const causal = cJSON_GetObjectItemCaseSensitive(r->root, "causal");
    if (!r->model->causal) return ATTN_OK;
    if (causal && cJSON_IsFalse(causal))
        return attn_fail(&r->error, ATTN_INVALID, "/parameters/causal",
                         "causal: is false, but the model %s is causal; another model is not", r->model->name);
    return causal || cJSON_AddTrueToObject(r->root, "causal") ? ATTN_OK : no_memory(r);
}

/* ---- The whole JSON of the request ------------------------------------------------------------------------------- */

/* all members that the request's JSON may have; model_name and model_version are ignored, because the URL names the
 * model */
static const char *const members[] = { "id", "parameters", "inputs", "outputs", "model_name", "model_version", NULL };

static attn_status read_id(struct kserve_reader *r, const cJSON *id)
{
    const char *const text = id ? tree_string(id) : "";
    if (!text) return must_be(r, "/id", "id", id, "a string");
    if (strlen(text) > ID_BYTES)
        return attn_fail(&r->error, ATTN_INVALID, "/id", "id: has %zu bytes, at most %d are echoed", strlen(text),
                         ID_BYTES);
    strcpy(r->id, text);
    return ATTN_OK;
}

/* Makes the error for an unknown top-level member of a request. For a tensor or an option, the message says where it
 * belongs. */
static attn_status unknown_member(struct kserve_reader *r, const char *name)
{
    static const char *const reserved[] = { "timeout",        "binary_data_output", "sequence_id",
                                            "sequence_start", "sequence_end",       NULL };
    const proto_option *const o = kserve_option_named(name);
    tree_member pointer;
    tree_pointer(pointer, NULL, name);
    if (named(name) < ATTN_TENSOR_COUNT)
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "unknown member '%s'; a tensor goes into inputs: {\"inputs\": [{\"name\": \"%s\", ...}]}",
                         name, name);
    if ((o && proto_is_parameter(o)) || is_one_of(name, reserved))
        return attn_fail(&r->error, ATTN_INVALID, pointer,
                         "unknown member '%s'; it goes into parameters: {\"parameters\": {\"%s\": ...}}", name, name);
    return unknown(r, pointer, SUGGESTION_KSERVE, NULL, name, members);
}

static attn_status translate(struct kserve_reader *r)
{
    char quote[TREE_QUOTE_BYTES];
    bool all_binary = false, text;
    attn_status status;
    if (!cJSON_IsObject(r->source))
        return attn_fail(&r->error, ATTN_INVALID, "", "the JSON is %s, must be an object with inputs",
                         tree_describe(r->source, quote));
    for (const cJSON *one = r->source->child; one; one = one->next) {
        if (tree_repeated(r->source, one)) return tree_twice(NULL, one->string, &r->error);
        if (!is_one_of(one->string, members)) return unknown_member(r, one->string);
    }
    cJSON *const inputs = cJSON_GetObjectItemCaseSensitive(r->source, "inputs");
    const cJSON *const outputs = cJSON_GetObjectItemCaseSensitive(r->source, "outputs");
    const size_t most = inputs && cJSON_IsArray(inputs) ? (size_t)cJSON_GetArraySize(inputs) : 0,
                 most_outputs = outputs && cJSON_IsArray(outputs) ? (size_t)cJSON_GetArraySize(outputs) : 0;
    const scan_extract *const extracts = scan_extracts(r->json, &r->first_binary);
    r->extract_count = r->now = r->first_binary;
    r->inputs = calloc(most + 1, sizeof *r->inputs);
    r->extracts = calloc((size_t)r->extract_count + most + 1, sizeof *r->extracts);
    r->sizes = calloc((size_t)r->extract_count + most + 1, sizeof *r->sizes);
    r->shared = calloc(most + most_outputs + 1, sizeof *r->shared);
    r->root = cJSON_CreateObject();
    if (!r->inputs || !r->extracts || !r->sizes || !r->shared || !r->root) return no_memory(r);
    if (r->extract_count) memcpy(r->extracts, extracts, (size_t)r->extract_count * sizeof *extracts);
    look_for_start(r);
    status = read_id(r, cJSON_GetObjectItemCaseSensitive(r->source, "id"));
    if (status == ATTN_OK) status = read_inputs(r, inputs);
    if (status == ATTN_OK)
        status = read_parameters(r, cJSON_GetObjectItemCaseSensitive(r->source, "parameters"), &all_binary);
    if (status == ATTN_OK) status = check_sequence(r);
    if (status == ATTN_OK) status = read_outputs(r, outputs, all_binary, &text);
    if (status == ATTN_OK && text && !cJSON_AddStringToObject(r->root, "encoding", "array")) status = no_memory(r);
    if (status == ATTN_OK) status = apply_model(r);
    return status == ATTN_OK ? place(r) : status;
}

attn_status kserve_end_json(struct kserve_reader *r)
{
    attn_error err = { 0 };
    size_t bytes;
    const attn_status status = scan_finish(r->json, &err);
    if (status != ATTN_OK && r->json_bytes != JSON_BYTES_UNKNOWN && status != ATTN_NO_MEMORY)
        return attn_fail(&r->error, status, "", "the JSON is not complete after %lld bytes (" JSON_LENGTH ")",
                         (long long)r->json_bytes);
    if (status != ATTN_OK) {
        r->error = err;
        return status;
    }
    const char *const rest = scan_rest(r->json, &bytes);
    r->values = scan_values(r->json);
    tree_enter(&r->trees);
    r->source = tree_parse(rest, bytes);
    const attn_status translated = r->source ? translate(r) : no_memory(r);
    tree_leave();
    return translated;
}
