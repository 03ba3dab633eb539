/* safetensors.c: reads and writes bodies in the format of safetensors files. When the header of a body is complete, it
 * is converted to the tree of an equivalent JSON body, which parse.c checks. In this tree, a tensor has no
 * data_offsets; its member `data` is the index of an extracted value. The strings of __metadata__ are options in the
 * tree. The tensors' data go directly to the caller's memory, where each tensor begins at a multiple of 64 bytes.
 *
 * The whole state is in struct reader, so a body gives the same result however it is split. The tensors fill the data
 * without gaps. Memory grows with the data that have arrived, and not with the sizes in the header. */
#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "format.h"
#include "scan.h"
#include "text/text.h"
#include "tree.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { LENGTH_BYTES = 8, HEADER_MIN = 2 /* {} is the shortest header */, HEADER_ALIGNMENT = 8 };

#define METADATA "__metadata__"
#define OFFSETS  "data_offsets"

struct slot {
    const char *name;
    int64_t begin, end;
    int index;
};

struct reader {
    proto_limits limits;
    attn_error error; /* the first error of the body, which all later calls return */
    uint64_t offset;  /* number of bytes of the body that have arrived */

    uint8_t length[LENGTH_BYTES];
    uint64_t header_bytes; /* length of the header, known after the body's first LENGTH_BYTES bytes */
    scan *header;          /* scanner of the header; NULL: the header has not begun */
    int values;            /* number of JSON values read so far */
    struct tree_memory trees;
    cJSON *root; /* tree of the header, in `memory`; NULL until the header is complete */

    struct slot *slots;
    scan_extract *extracts; /* the tensors' values; their member `bytes` counts the bytes that have arrived */
    /* count: number of tensors; now: index of the first tensor that has not arrived completely */
    int count, now;
    struct scan_room room;
};

bool proto_is_safetensors(const void *bytes, size_t count)
{
    static const uint8_t zeros[LENGTH_BYTES / 2];
    const uint8_t *const p = bytes;
    return count >= PROTO_SAFETENSORS_MARK && p[LENGTH_BYTES] == '{' && !memcmp(p + sizeof zeros, zeros, sizeof zeros);
}

static attn_status no_memory(struct reader *r)
{
    return attn_fail(&r->error, ATTN_NO_MEMORY, "", "no memory to read the request");
}

/* ---- Reading the tensors that the header describes --------------------------------------------------------------- */

static attn_status offsets(struct reader *r, const cJSON *value, struct slot *slot)
{
    const int length = (int)text_cut(slot->name, TREE_NAME_BYTES);
    int64_t *const to[] = { &slot->begin, &slot->end };
    const cJSON *one = value->child;
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    tree_pointer(member, NULL, slot->name);
    if (!cJSON_IsArray(value) || cJSON_GetArraySize(value) != (int)COUNT(to))
        return attn_fail(&r->error, ATTN_INVALID, member,
                         "%.*s: " OFFSETS " is %s, must be [begin, end], two integers that count bytes of the data",
                         length, slot->name,
                         cJSON_IsArray(value) ? "an array of another length" : tree_describe(value, quote));
    for (size_t i = 0; i < COUNT(to); i++, one = one->next)
        if (!tree_integer(one, 0, TREE_INTEGER_MAX, to[i]))
            return attn_fail(&r->error, ATTN_INVALID, member,
                             "%.*s: " OFFSETS "[%zu] is %s, must be an integer from 0 to %lld", length, slot->name, i,
                             tree_describe(one, quote), (long long)TREE_INTEGER_MAX);
    if (slot->end < slot->begin)
        return attn_fail(&r->error, ATTN_INVALID, member,
                         "%.*s: " OFFSETS
                         " are [%lld, %lld], must be [begin, end], and the end is not before the begin",
                         length, slot->name, (long long)slot->begin, (long long)slot->end);
    return ATTN_OK;
}

static attn_status describe(struct reader *r, const cJSON *tensor, struct slot *slot)
{
    static const char *const parts[] = { "dtype", "shape", OFFSETS };
    const int length = (int)text_cut(tensor->string, TREE_NAME_BYTES);
    const cJSON *value = NULL;
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    tree_pointer(member, NULL, tensor->string);
    slot->name = tensor->string;
    for (const proto_option *o = proto_options; o->name; o++)
        if (o->type != PROTO_TYPE_PARTS && !strcmp(o->name, tensor->string))
            return attn_fail(&r->error, ATTN_INVALID, member,
                             "%s: is an option, which stands in " METADATA " as a string: {\"" METADATA
                             "\": {\"%s\": \"...\"}}",
                             o->name, o->name);
    if (!cJSON_IsObject(tensor))
        return attn_fail(&r->error, ATTN_INVALID, member,
                         "%.*s: is %s, must be an object: {\"dtype\": \"F16\", \"shape\": [...], \"" OFFSETS
                         "\": [begin, end]}",
                         length, tensor->string, tree_describe(tensor, quote));
    for (const cJSON *part = tensor->child; part; part = part->next) {
        size_t i = 0;
        const int part_length = (int)text_cut(part->string, TREE_NAME_BYTES);
        if (tree_repeated(tensor, part))
            return attn_fail(&r->error, ATTN_INVALID, member, "%.*s: member '%.*s' is given twice", length,
                             tensor->string, part_length, part->string);
        while (i < COUNT(parts) && strcmp(part->string, parts[i])) i++;
        if (i == COUNT(parts))
            return attn_fail(&r->error, ATTN_INVALID, member,
                             "%.*s: unknown member '%.*s', a tensor has dtype, shape and " OFFSETS, length,
                             tensor->string, part_length, part->string);
        if (!strcmp(part->string, OFFSETS)) value = part;
    }
    if (!value)
        return attn_fail(&r->error, ATTN_INVALID, member,
                         "%.*s: " OFFSETS
                         " is missing, must be [begin, end], two integers that count bytes of the data",
                         length, tensor->string);
    return offsets(r, value, slot);
}

static int by_place(const void *a, const void *b)
{
    const struct slot *const one = a, *const other = b;
    if (one->begin != other->begin) return one->begin < other->begin ? -1 : 1;
    if (one->end != other->end) return one->end < other->end ? -1 : 1;
    return one->index - other->index;
}

/* Checks that the tensors fill the data without gaps, and gives each tensor its offset in the caller's memory. */
static attn_status place(struct reader *r)
{
    size_t used = 0;
    qsort(r->slots, (size_t)r->count, sizeof *r->slots, by_place);
    for (int i = 0; i < r->count; i++) {
        const struct slot *const slot = &r->slots[i], *const before = i ? slot - 1 : NULL;
        const int64_t must = before ? before->end : 0;
        tree_member member;
        if (slot->begin != must) {
            const int length = (int)text_cut(slot->name, TREE_NAME_BYTES);
            tree_pointer(member, NULL, slot->name);
            if (!before)
                return attn_fail(&r->error, ATTN_INVALID, member,
                                 "%.*s: " OFFSETS " are [%lld, %lld], but no tensor begins at 0", length, slot->name,
                                 (long long)slot->begin, (long long)slot->end);
            return attn_fail(&r->error, ATTN_INVALID, member,
                             "%.*s: " OFFSETS " are [%lld, %lld], must begin at %lld, where %.*s ends: tensors follow "
                             "each other without %s",
                             length, slot->name, (long long)slot->begin, (long long)slot->end, (long long)must,
                             (int)text_cut(before->name, TREE_NAME_BYTES), before->name,
                             slot->begin < must ? "overlapping" : "gaps");
        }
        used = SCAN_ALIGNED(used);
        r->extracts[i] = (scan_extract){ .kind = SCAN_BYTES, .offset = used };
        /* no overflow: all tensors together have at most TREE_INTEGER_MAX bytes */
        used += (size_t)(slot->end - slot->begin);
    }
    if (used > (uint64_t)r->limits.tensor_bytes)
        return attn_fail(&r->error, ATTN_TOO_LARGE, "", "the tensors take %zu bytes, at most %lld are taken", used,
                         (long long)r->limits.tensor_bytes);
    return ATTN_OK;
}

/* ---- Reading options from the metadata of the header ------------------------------------------------------------- */

/* Returns whether an option of this type is a string in a JSON body. */
static bool is_word(proto_type type)
{
    return type == PROTO_TYPE_CHOICE || type == PROTO_TYPE_DTYPE || type == PROTO_TYPE_ID;
}

/* Parses the JSON value in `text`. *value stays NULL if the text is not JSON. */
static attn_status parse(struct reader *r, const char *text, cJSON **value)
{
    const attn_status status = tree_of_text(text, &r->limits, &r->values, value);
    if (status == ATTN_NO_MEMORY) return no_memory(r);
    if (status == ATTN_TOO_LARGE)
        return attn_fail(&r->error, status, "", METADATA ": its strings hold more than %d values or %zu bytes",
                         r->limits.values, r->limits.rest_bytes);
    return ATTN_OK;
}

/* Returns "true" or "false" for Python's True or False, and any other text unchanged. */
static const char *json_of_bool(const char *text)
{
    return !strcmp(text, "True") ? "true" : !strcmp(text, "False") ? "false" : text;
}

/* Makes the error for a member of __metadata__ that must be a number, such as a scale, but is not. */
static attn_status no_number(struct reader *r, const char *name, const cJSON *value)
{
    char quote[TREE_QUOTE_BYTES];
    tree_member member;
    return attn_fail(&r->error, ATTN_INVALID, tree_pointer(member, NULL, name),
                     "%s: is %s in " METADATA ", must be a number; as a tensor it is one of the file's tensors", name,
                     tree_describe(value, quote));
}

/* Makes the value of an option, or a number in place of a tensor, from a string of __metadata__. If the option's
 * value is a word (is_word()) and the string does not begin with a quote, the string is the value. Any other string is
 * parsed as JSON. If it is not JSON, it becomes the value unchanged, and parse.c refuses it with a reason. */
static attn_status option(struct reader *r, const char *name, const char *text)
{
    const proto_option *o = proto_options;
    cJSON *value = NULL;
    bool number = false;
    while (o->name && strcmp(o->name, name)) o++;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) number |= !o->name && !strcmp(attn_tensors[id].name, name);
    if (number) {
        const attn_status status = parse(r, text, &value);
        if (status != ATTN_OK) return status;
        if (value && !tree_number(value)) return no_number(r, name, value);
    }
    if (o->name && !(is_word(o->type) && *text != '"')) {
        const attn_status status = parse(r, o->type == PROTO_TYPE_BOOL ? json_of_bool(text) : text, &value);
        if (status != ATTN_OK) return status;
    }
    if (!value) value = cJSON_CreateString(text);
    return value && cJSON_AddItemToObject(r->root, name, value) ? ATTN_OK : no_memory(r);
}

/* Members of __metadata__ that other programs write, and that are ignored. None is similar to a member that attnd
 * takes. A '*' at the end stands for any text. */
/* clang-format off */
static const char *const foreign[] = {
    /* metadata members written by PyTorch, transformers and mlx, such as {"format": "pt"} */
    "format", "framework", "library_name", "library_version",
    /* metadata members written in the index of a model that is split into several files */
    "total_size", "total_parameters", "total_shards",
    "torch_version", "transformers_version", "diffusers_version", "safetensors_version", "mlx_version", "mflux_version",
    "_class_name", "_diffusers_version", "lora_adapter_metadata", "quantization_level", "_quantization_metadata",
    "DCP_VERSION", "DCP_SHARDING_INFO",                       /* torch.distributed.checkpoint */
    /* metadata members written by tools for training and quantization */
    "modelspec.*", "ss_*", "sshs_*", "sd_merge_*", "ot_*", "gptq_*", "auto_gptq_version",
    "prompt", "workflow", "software", "training_info",        /* image generators */
    "title", "description", "author", "license", "created_at", "tags", "base_model",
};
/* clang-format on */

static bool is_foreign(const char *name)
{
    for (size_t i = 0; i < COUNT(foreign); i++) {
        const size_t length = strlen(foreign[i]);
        if (foreign[i][length - 1] == '*' ? strncmp(foreign[i], name, length - 1) == 0 : strcmp(foreign[i], name) == 0)
            return true;
    }
    return false;
}

static bool is_option(const char *name)
{
    const proto_option *o = proto_options;
    while (o->name && strcmp(o->name, name)) o++;
    return o->name != NULL;
}

static attn_status options(struct reader *r, const cJSON *metadata)
{
    char quote[TREE_QUOTE_BYTES];
    if (!cJSON_IsObject(metadata))
        return attn_fail(&r->error, ATTN_INVALID, "/" METADATA, METADATA ": is %s, must be an object of strings",
                         tree_describe(metadata, quote));
    for (const cJSON *one = metadata->child; one; one = one->next) {
        const int length = (int)text_cut(one->string, TREE_NAME_BYTES);
        const char *const text = tree_string(one);
        attn_status status;
        tree_member member;
        tree_pointer(member, NULL, one->string);
        if (tree_repeated(metadata, one)) return tree_twice(METADATA, one->string, &r->error);
        if (!text)
            return attn_fail(&r->error, ATTN_INVALID, member,
                             "%.*s: is %s in " METADATA ", must be a string that holds JSON: \"true\", \"0.125\"",
                             length, one->string, tree_describe(one, quote));
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
            /* A name such as `map` may be the name of an option and of a tensor. In __metadata__ it is the name of the
             * option. */
            if (!strcmp(attn_tensors[id].name, one->string) && !proto_may_be_number((attn_tensor_id)id) &&
                !is_option(one->string))
                return attn_fail(&r->error, ATTN_INVALID, member, "%s: is a tensor and cannot stand in " METADATA,
                                 one->string);
        if (is_foreign(one->string)) continue;
        if ((status = option(r, one->string, text)) != ATTN_OK) return status;
    }
    return ATTN_OK;
}

/* ---- Reading the whole header ------------------------------------------------------------------------------------ */

static attn_status extract(struct reader *r)
{
    for (int i = 0; i < r->count; i++) {
        cJSON *const tensor = cJSON_GetObjectItemCaseSensitive(r->root, r->slots[i].name);
        (void)cJSON_DetachItemFromObjectCaseSensitive(tensor, OFFSETS);
        if (!cJSON_AddNumberToObject(tensor, "data", i)) return no_memory(r);
    }
    return ATTN_OK;
}

static attn_status translate(struct reader *r)
{
    char quote[TREE_QUOTE_BYTES];
    cJSON *metadata = NULL;
    attn_status status = ATTN_OK;
    if (!cJSON_IsObject(r->root))
        return attn_fail(&r->error, ATTN_INVALID, "", "the header is %s, must be an object with q, k and v",
                         tree_describe(r->root, quote));
    const size_t members = (size_t)cJSON_GetArraySize(r->root);
    r->slots = calloc(members + 1, sizeof *r->slots);
    r->extracts = calloc(members + 1, sizeof *r->extracts);
    if (!r->slots || !r->extracts) return no_memory(r);
    for (cJSON *one = r->root->child; one && status == ATTN_OK; one = one->next) {
        if (tree_repeated(r->root, one)) return tree_twice(NULL, one->string, &r->error);
        if (!strcmp(one->string, METADATA)) {
            metadata = one;
            continue;
        }
        r->slots[r->count].index = r->count;
        status = describe(r, one, &r->slots[r->count++]);
    }
    if (status == ATTN_OK) status = place(r);
    if (status == ATTN_OK) status = extract(r);
    if (status == ATTN_OK && metadata) {
        (void)cJSON_DetachItemViaPointer(r->root, metadata);
        status = options(r, metadata);
    }
    if (status == ATTN_OK && cJSON_GetObjectItemCaseSensitive(r->root, "requests"))
        return attn_fail(&r->error, ATTN_INVALID, "/requests",
                         "requests: a safetensors body holds one problem; several go into one JSON body");
    return status;
}

static attn_status begin_header(struct reader *r)
{
    const size_t most = r->limits.rest_bytes < PROTO_HEADER_BYTES ? r->limits.rest_bytes : PROTO_HEADER_BYTES;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) r->header_bytes = r->header_bytes << 8 | r->length[i];
    if (r->header_bytes > most && r->length[0] == '{')
        return attn_fail(
            &r->error, ATTN_INVALID, "",
            "the body begins like JSON, where a safetensors body has 8 bytes with the length of its header; "
            "the content type of JSON is application/json");
    if (r->header_bytes < HEADER_MIN)
        return attn_fail(&r->error, ATTN_INVALID, "", "the length of the header is %llu, must be at least %d: {}",
                         (unsigned long long)r->header_bytes, HEADER_MIN);
    if (r->header_bytes > most)
        return attn_fail(&r->error, ATTN_TOO_LARGE, "",
                         "the length of the header is %llu, at most %zu bytes are taken (is it a safetensors body?)",
                         (unsigned long long)r->header_bytes, most);
    r->header = scan_new_plain(&r->limits, LENGTH_BYTES);
    return r->header ? ATTN_OK : no_memory(r);
}

static attn_status end_header(struct reader *r)
{
    attn_error err = { 0 };
    size_t bytes;
    attn_status status = scan_finish(r->header, &err);
    if (status == ATTN_NO_MEMORY) return no_memory(r);
    if (status != ATTN_OK)
        return attn_fail(&r->error, status, "", "the header of %llu bytes ends before its JSON is complete",
                         (unsigned long long)r->header_bytes);
    const char *const rest = scan_rest(r->header, &bytes);
    r->values = scan_values(r->header);
    tree_enter(&r->trees);
    r->root = tree_parse(rest, bytes);
    status = r->root ? translate(r) : no_memory(r);
    tree_leave();
    return status;
}

/* ---- Reading the bytes of a body --------------------------------------------------------------------------------- */

static uint64_t size_of(const struct slot *slot)
{
    return (uint64_t)(slot->end - slot->begin);
}

static void pass(struct reader *r)
{
    while (r->now < r->count && r->extracts[r->now].bytes == size_of(&r->slots[r->now])) r->now++;
}

/* Returns the length in bytes that the body must have. */
static uint64_t body_end(const struct reader *r)
{
    return LENGTH_BYTES + r->header_bytes + (r->count ? (uint64_t)r->slots[r->count - 1].end : 0);
}

/* Takes the bytes of the current section (the length, the header, or one tensor) from a piece of the body. */
static attn_status take(struct reader *r, const uint8_t *bytes, size_t count, size_t *taken)
{
    attn_status status = ATTN_OK;
    uint64_t left;
    if (r->offset < LENGTH_BYTES) {
        left = LENGTH_BYTES - r->offset;
        *taken = count < left ? count : (size_t)left;
        memcpy(r->length + r->offset, bytes, *taken);
        return *taken == left ? begin_header(r) : ATTN_OK;
    }
    if (!r->root) {
        left = LENGTH_BYTES + r->header_bytes - r->offset;
        *taken = count < left ? count : (size_t)left;
        status = scan_feed(r->header, bytes, *taken, &r->error);
        return status == ATTN_OK && *taken == left ? end_header(r) : status;
    }
    if (r->now == r->count)
        return attn_fail(
            &r->error, ATTN_INVALID, "",
            "the body goes on behind its last tensor, which ends at byte %llu: 8, the header's %llu, and %llu "
            "of data",
            (unsigned long long)body_end(r), (unsigned long long)r->header_bytes,
            (unsigned long long)(body_end(r) - LENGTH_BYTES - r->header_bytes));
    return scan_take(&r->room, &r->extracts[r->now], size_of(&r->slots[r->now]), bytes, count, taken, &r->error);
}

static void *open_reader(const proto_limits *limits, const proto_memory *memory)
{
    struct reader *const r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->limits = *limits;
    r->room.memory = *memory;
    return r;
}

static void close_reader(void *reader)
{
    struct reader *const r = reader;
    if (!r) return;
    scan_free(r->header);
    tree_forget(&r->trees);
    free(r->slots);
    free(r->extracts);
    free(r);
}

static attn_status feed(void *reader, const void *bytes, size_t count, attn_error *err)
{
    struct reader *const r = reader;
    const uint8_t *p = bytes;
    while (count > 0 && r->error.status == ATTN_OK) {
        size_t taken = 0;
        if (take(r, p, count, &taken) != ATTN_OK) break;
        r->offset += taken;
        p += taken;
        count -= taken;
        if (r->root) pass(r);
    }
    if (r->error.status != ATTN_OK && err) *err = r->error;
    return r->error.status;
}

static attn_status cut_off(struct reader *r)
{
    if (r->offset == 0)
        return attn_fail(&r->error, ATTN_INVALID, "", "the body is empty, expected a safetensors file with q, k and v");
    if (r->offset < LENGTH_BYTES)
        return attn_fail(&r->error, ATTN_INVALID, "",
                         "the body has %llu bytes, a safetensors body begins with 8 that hold the length of its header",
                         (unsigned long long)r->offset);
    if (!r->root)
        return attn_fail(&r->error, ATTN_INVALID, "",
                         "the length of the header is %llu, but the body ends %llu bytes behind it (was it cut off?)",
                         (unsigned long long)r->header_bytes, (unsigned long long)(r->offset - LENGTH_BYTES));
    const struct slot *const slot = &r->slots[r->now];
    tree_member member;
    return attn_fail(&r->error, ATTN_INVALID, tree_pointer(member, NULL, slot->name),
                     "%.*s: the body ends after %llu of its %llu bytes: it has %llu bytes, must have %llu (was it cut "
                     "off?)",
                     (int)text_cut(slot->name, TREE_NAME_BYTES), slot->name,
                     (unsigned long long)r->extracts[r->now].bytes, (unsigned long long)size_of(slot),
                     (unsigned long long)r->offset, (unsigned long long)body_end(r));
}

static attn_status finish(void *reader, struct format_body *body, attn_error *err)
{
    struct reader *const r = reader;
    if (r->error.status == ATTN_OK && (!r->root || r->now < r->count)) (void)cut_off(r);
    if (r->error.status != ATTN_OK) {
        if (err) *err = r->error;
        return r->error.status;
    }
    body->root = r->root;
    body->extracts = r->extracts;
    body->extract_count = r->count;
    body->memory = r->room.base;
    body->room = &r->room;
    if (r->count) body->memory_bytes = r->extracts[r->count - 1].offset + r->extracts[r->count - 1].bytes;
    return ATTN_OK;
}

static size_t rest_bytes(const void *reader)
{
    const struct reader *const r = reader;
    const uint64_t most = LENGTH_BYTES + r->header_bytes;
    return (size_t)(r->offset < most ? r->offset : most);
}

static size_t memory_for(uint64_t body_bytes)
{
    return (size_t)body_bytes;
}

/* ---- Writing safetensors answers --------------------------------------------------------------------------------- */

static const char *const dtypes[ATTN_DTYPE_COUNT] = {
#define X(id, wire, safetensors, kserve, bytes, floating) [ATTN_##id] = safetensors,
    ATTN_DTYPE_MAP(X)
#undef X
};

/* Lists the answer's tensors in the order of the file, and returns their number. Larger elements come first, so that
 * each tensor is aligned to its elements. */
static int in_order(proto_item *item, int order[PROTO_TENSORS])
{
    const int end = proto_item_results_end(item);
    int count = 0;
    for (size_t bytes = 8; bytes > 0; bytes /= 2)
        for (int n = 0; n < end; n++) {
            const attn_tensor *const t = proto_item_result(item, n);
            if (t && attn_dtype_bytes(t->dtype) == bytes) order[count++] = n;
        }
    return count;
}

static void put_tensor(struct text *t, int number, const attn_tensor *tensor, int64_t *at)
{
    char name[PROTO_NAME_BYTES];
    int64_t bytes = 0;
    attn_shape_bytes(tensor->dtype, tensor->rank, tensor->shape, &bytes);
    text_put_string(t, ",\"");
    text_put_string(t, proto_tensor_name(number, true, name));
    text_put_string(t, "\":{\"dtype\":\"");
    text_put_string(t, dtypes[tensor->dtype]);
    text_put_string(t, "\",\"shape\":[");
    for (int a = 0; a < tensor->rank; a++) {
        if (a) text_put_char(t, ',');
        text_put_number(t, (uint64_t)tensor->shape[a]);
    }
    text_put_string(t, "],\"" OFFSETS "\":[");
    text_put_number(t, (uint64_t)*at);
    text_put_char(t, ',');
    text_put_number(t, (uint64_t)(*at += bytes));
    text_put_string(t, "]}");
}

/* Writes the members of an answer that are not tensors (such as times) into __metadata__, as strings that contain
 * JSON. */
static void put_metadata(struct text *t, const proto_item *item, const proto_result *result)
{
    struct encode_fact facts[ENCODE_FACTS];
    const int count = encode_facts(item, result, facts);
    text_put_string(t, "\"" METADATA "\":{");
    for (int i = 0; i < count; i++) {
        text_put_string(t, i ? ",\"" : "\"");
        text_put_string(t, facts[i].name);
        text_put_string(t, "\":\"");
        text_put_json(t, facts[i].value, ENCODE_FACT_BYTES);
        text_put_char(t, '"');
    }
    text_put_char(t, '}');
}

static void answer(proto_encoder *e, const proto_call *call, const proto_result *results, const char *request_id)
{
    static const char unknown[LENGTH_BYTES];
    proto_item *const item = &call->items[0];
    struct text *const t = encode_text(e);
    int order[PROTO_TENSORS];
    const int count = in_order(item, order);
    int64_t at = 0;
    /* unused: only an answer to several problems contains request_id, and a safetensors body has one problem */
    (void)request_id;
    assert(!call->envelope);
    text_put(t, unknown, sizeof unknown);
    text_put_char(t, '{');
    put_metadata(t, item, results);
    for (int i = 0; i < count; i++) put_tensor(t, order[i], proto_item_result(item, order[i]), &at);
    text_put_char(t, '}');
    while (t->used % HEADER_ALIGNMENT && t->failure == TEXT_FINE) text_put_char(t, ' ');
    if (t->failure != TEXT_FINE) return;
    const uint64_t length = t->used - LENGTH_BYTES;
    for (int i = 0; i < LENGTH_BYTES; i++) t->at[i] = (char)(length >> 8 * i);
    for (int i = 0; i < count; i++) encode_tensor(e, proto_item_result(item, order[i]), ENCODE_BYTES);
}

const proto_format proto_safetensors = {
    .open = open_reader,
    .close = close_reader,
    .feed = feed,
    .finish = finish,
    .rest_bytes = rest_bytes,
    .memory_for = memory_for,
    .write = answer,
    .media = "application/x-safetensors",
    .one_problem = true,
};
