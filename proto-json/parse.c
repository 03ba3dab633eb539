/* parse.c: converts the JSON tree of a body into problems, and checks them with attn_check(). The reader of the body's
 * format has made the tree (format.h). Three tables say what is allowed: attn_tensors[] for members that are tensors,
 * proto_options[] for options, and proto_operations[] for the members of each operation.
 *
 * Members are examined once, in the order of the body, and the first error is reported. A number stays text until its
 * type is known, so integers are never converted to a double. A problem with a `context` (a saved forward) or with
 * caches is checked later, when its tensors are known. An error in one of several problems concerns only that problem.
 * Malformed JSON, exceeded limits and lack of memory fail the whole body. */
#include "parse_internal.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "format.h"
#include "suggestions.h"
#include "hints.h"
#include "text/text.h"

/* ---- Reading one problem of a body ------------------------------------------------------------------------------- */

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

/* Returns the first operation that has an option or an input tensor of this name; PROTO_OP_COUNT: none. In a check
 * request, the client's results do not count as inputs. */
static proto_op op_of(const char *name)
{
    const int id = tensor_named(name);
    const proto_option *o = option_named(name);
    proto_op op = 0;
    while (op < PROTO_OP_COUNT && !(o && (o->ops >> op & 1)) &&
           !(id < ATTN_TENSOR_COUNT && proto_takes_tensor(op, (attn_tensor_id)id) &&
             !(proto_operations[op].judged >> id & 1)))
        op++;
    return op;
}

/* Makes the error for a member that the operation `op` does not take. */
static attn_status foreign(proto_op op, const char *name, attn_error *err)
{
    const int id = tensor_named(name);
    const proto_option *o;
    const proto_op other = op_of(name);
    struct text_nearest best = { name, NULL, 3 };
    tree_member member;
    char listed[64];
    const char *const own = proto_operations[op].name, *const suggestion = suggestion_of(own, name);
    tree_pointer(member, NULL, name);
    if (id < ATTN_TENSOR_COUNT && proto_gives_tensor(op, (attn_tensor_id)id))
        return attn_fail(err, ATTN_INVALID, member, "%s: is computed here and cannot be given", name);
    if (other < PROTO_OP_COUNT) {
        const char *const path = proto_operations[other].path;
        const bool more = suggestion && !strstr(suggestion, path);
        return attn_fail(err, ATTN_INVALID, member, "%s: belongs to %s, POST %s%s%s", name,
                         proto_operations[other].name, path, more ? "; " : "", more ? suggestion : "");
    }
    if (!strcmp(name, "requests"))
        return attn_fail(err, ATTN_INVALID, member, "requests: must be the only member of the body");
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++)
        if (proto_takes_tensor(op, (attn_tensor_id)t)) text_consider(&best, attn_tensors[t].name);
    for (o = proto_options; o->name; o++)
        if (o->ops >> op & 1) text_consider(&best, o->name);
    snprintf(listed, sizeof listed, " (/docs lists the members of %s)", own);
    return tree_unknown(own, NULL, &best, listed, err);
}

/* Checks the body of a backward with `context` (the id of a saved forward). Options and tensors that the context
 * already holds are errors. */
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

/* Checks a problem whose keys and values are in caches, as far as possible without reading the caches. */
static attn_status of_caches(const struct parse_reader *r, const proto_item *item, attn_error *err)
{
    const proto_operation *const operation = &proto_operations[r->op];
    const attn_problem *const p = &item->problem;
    /* If the URL names the only cache of the request, the tensors k and v of the body have no batch axis. */
    const bool one = operation->cache_in_path;
    const int rank = one ? 3 : 4;
    tree_member member;
    const uint64_t needs = operation->may_take_caches ? operation->needs & operation->beside_caches : operation->needs;
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        if ((needs >> id & 1) && p->tensor[id].rank == 0)
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, attn_tensors[id].name), "%s: is missing",
                             attn_tensors[id].name);
    if (!one && item->caches && r->sequence)
        return attn_fail(err, ATTN_INVALID, "/caches", "caches: cannot stand beside sequence_id, which names one");
    if (!one && !item->caches && !r->sequence)
        return attn_fail(err, ATTN_INVALID, "/caches",
                         "caches: is missing, must be ids of POST /v1/caches, one for each row of q");
    if (p->q.rank != 0 && p->q.rank != 4)
        return attn_fail(err, ATTN_INVALID, "/q/shape", "q: has %d dimensions, must have 4: [B, Sq, H, D]", p->q.rank);
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const attn_tensor *const t = &p->tensor[id];
        const char *const name = attn_tensors[id].name;
        if ((operation->appends >> id & 1) && t->rank != 0 && t->rank != rank)
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, name, "shape"),
                             "%s: has %d dimensions, must have %d: [%sS, Hk, %s]%s", name, t->rank, rank,
                             one ? "" : "B, ", id == ATTN_T_k ? "D" : "Dv", one ? "" : ", new positions of each cache");
    }
    return ATTN_OK;
}

/* Reads a tensor of a check request: a result that the server compares with the exact one. Its shape is checked later,
 * when all members have been read. */
static attn_status judged(const struct parse_reader *r, attn_tensor_id id, const cJSON *value, proto_item *item,
                          attn_error *err)
{
    if (!item->results) item->results = calloc(ATTN_TENSOR_COUNT, sizeof *item->results);
    if (!item->results) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
    return parse_tensor(r, id, value, &item->results[id], err);
}

static attn_status to_judge(proto_item *item, attn_error *err)
{
    bool backward = item->asked == ATTN_OP_BACKWARD || item->problem.dout.rank > 0;
    if (!item->results)
        return attn_fail(
            err, ATTN_INVALID, "",
            "a check needs results: out, lse, or of a backward dq, dk, dv, dsinks, dbias or dalibi_slopes");
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
        backward |= attn_tensors[id].role == ATTN_ROLE_OUT_BACK && item->results[id].rank > 0;
    item->problem.op = backward ? ATTN_OP_BACKWARD : ATTN_OP_FORWARD;
    return ATTN_OK;
}

/* Checks an observe request (statistics of probabilities), as far as possible without reading the caches. */
static attn_status of_observe(const struct parse_reader *r, const cJSON *value, proto_item *item, attn_error *err)
{
    const proto_operation *const operation = &proto_operations[r->op];
    const uint64_t region = ATTN_TENSOR_BIT(weights) | ATTN_TENSOR_BIT(map);
    const unsigned tiles = 1U << PROTO_COUNT_tiles;
    const struct {
        const char *member;
        uint64_t outputs;
        unsigned counts;
        const char *of;
    } options[] = {
        { "top", ATTN_TENSOR_BIT(top_keys) | ATTN_TENSOR_BIT(top_weights), 0, "top_keys" },
        { "map", ATTN_TENSOR_BIT(map), 0, "map" },
        { "rows", region, 0, "weights and map" },
        { "keys", region, 0, "weights and map" },
        { "key_mass_rows", ATTN_TENSOR_BIT(key_mass), 0, "key_mass" },
        { "tile_size", 0, tiles, "tiles" },
        { "head_dim_v", 0, 1U << PROTO_COUNT_flops_forward | 1U << PROTO_COUNT_flops_backward,
          "flops_forward and flops_backward" },
    };
    tree_member member;
    if (!item->outputs && !item->counts)
        return attn_fail(err, ATTN_INVALID, "/observe",
                         "observe: is missing, must name what is wanted, such as [\"entropy\", \"key_mass\"]");
    for (size_t n = 0; n < sizeof options / sizeof *options; n++)
        if (cJSON_HasObjectItem(value, options[n].member) && !(item->outputs & options[n].outputs) &&
            !(item->counts & options[n].counts))
            return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, options[n].member),
                             "%s: belongs to %s, which observe does not name", options[n].member, options[n].of);
    if ((item->counts & tiles) && item->tile_size[0] == 0)
        return attn_fail(err, ATTN_INVALID, "/tile_size",
                         "tile_size: is missing, must be [queries, keys] of a tile with tiles");
    item->problem.observe.given_lse = item->problem.lse.rank > 0;
    if (item->problem.observe.given_lse && (item->outputs & ATTN_TENSOR_BIT(lse)))
        return attn_fail(err, ATTN_INVALID, "/lse", "lse: is given, and cannot be asked for beside that");
    for (const cJSON *one = value->child; one && item->caches; one = one->next) {
        const int id = tensor_named(one->string);
        if (option_named(one->string) || id == ATTN_TENSOR_COUNT || (operation->beside_caches >> id & 1)) continue;
        return attn_fail(err, ATTN_INVALID, tree_pointer(member, NULL, one->string),
                         "%s: cannot stand beside caches, whose keys and lengths are looked at", one->string);
    }
    return ATTN_OK;
}

static attn_status object(const struct parse_reader *r, const cJSON *value, proto_item *item, attn_error *err)
{
    char quote[TREE_QUOTE_BYTES];
    attn_status status;
    item->problem = (attn_problem)ATTN_PROBLEM_INIT;
    item->problem.op = proto_operations[r->op].op;
    if (!cJSON_IsObject(value))
        return attn_fail(err, ATTN_INVALID, "", "a problem is %s, must be an object", tree_describe(value, quote));
    for (const cJSON *member = value->child; member; member = member->next) {
        const proto_option *o = option_named(member->string);
        const int id = tensor_named(member->string);
        if (tree_repeated(value, member)) return tree_twice(NULL, member->string, err);
        if (o && (o->ops >> r->op & 1)) status = parse_option(r, o, member, item, err);
        else if (id < ATTN_TENSOR_COUNT && (proto_operations[r->op].judged >> id & 1))
            status = judged(r, (attn_tensor_id)id, member, item, err);
        else if (id < ATTN_TENSOR_COUNT && proto_takes_tensor(r->op, (attn_tensor_id)id))
            status = parse_tensor(r, (attn_tensor_id)id, member, &item->problem.tensor[id], err);
        else if (proto_operations[r->op].merges && parse_parts_has(member->string))
            status = parse_parts_named(r, value, member, item, err);
        else status = foreign(r->op, member->string, err);
        if (status != ATTN_OK) return status;
    }
    if (!item->outputs) item->outputs = proto_operations[r->op].usual;
    if (*item->context) return beside_context(value, err);
    if (proto_operations[r->op].asks && (status = of_observe(r, value, item, err)) != ATTN_OK) return status;
    if (proto_uses_caches(r->op, item)) return of_caches(r, item, err);
    if (proto_operations[r->op].merges) return parse_parts_done(r, item, err);
    parse_starts_of_keys(r, &item->problem);
    if (proto_operations[r->op].judges && (status = to_judge(item, err)) != ATTN_OK) return status;
    attn_status prepared = proto_item_prepare(item, err);
    if (prepared == ATTN_OK && item->results) prepared = judge_check(&item->problem, item->results, err);
    const bool wants_seed = item->problem.op == ATTN_OP_BACKWARD || proto_operations[r->op].judges;
    if (prepared == ATTN_OK && wants_seed && item->problem.dropout_p > 0 && !item->has_seed)
        return attn_fail(
            err, ATTN_INVALID, "/seed",
            "seed: is missing, must be that of the forward with this dropout_p; the forward's answer has it "
            "(a context has its own)");
    return prepared;
}

attn_status proto_item_outputs(proto_item *item, attn_error *err)
{
    attn_problem *const p = &item->problem;
    attn_tensor unused;
    if (!item->has_result_dtype) item->result_dtype = p->q.dtype == ATTN_F8E4M3 ? ATTN_BF16 : p->q.dtype;
    /* the results' dtype is checked even if the client wants no output that has it */
    attn_status status = ATTN_OK;
    if (p->op == ATTN_OP_OBSERVE) attn_observe_region(p);
    else status = attn_output(p, p->op == ATTN_OP_FORWARD ? ATTN_T_out : ATTN_T_dq, item->result_dtype, &unused, err);
    for (int id = 0; id < ATTN_TENSOR_COUNT && status == ATTN_OK; id++)
        if (item->outputs >> id & 1)
            status = attn_output(p, (attn_tensor_id)id, item->result_dtype, &p->tensor[id], err);
    if (status != ATTN_NOT_FOUND) return status;
    /* The client wants the gradient of a tensor that the body lacks. The status becomes ATTN_INVALID, which gives HTTP
     * status 400. The status 404 would mean that a context or cache is missing. */
    if (err) err->status = ATTN_INVALID, snprintf(err->member, sizeof err->member, "/outputs");
    return ATTN_INVALID;
}

attn_status proto_item_prepare(proto_item *item, attn_error *err)
{
    attn_status status = attn_check(&item->problem, err);
    if (status == ATTN_OK) status = proto_item_outputs(item, err);
    if (status == ATTN_OK) item->hints = hints_of(item);
    return status;
}

/* ---- Reading the whole body -------------------------------------------------------------------------------------- */

struct proto_parser {
    proto_op op;
    proto_limits limits;
    const proto_format *format;
    void *reader;
};

proto_parser *proto_parser_new(const proto_format *format, proto_op op, const proto_limits *limits,
                               const proto_memory *memory)
{
    proto_parser *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->op = op;
    d->limits = *limits;
    /* the body of a merge may have a member for each tensor of each part (partial result) */
    if (proto_operations[op].merges) d->limits.members += 2 * ATTN_MERGE_PARTS;
    d->format = format;
    d->reader = format->open(&d->limits, memory);
    if (!d->reader) {
        free(d);
        return NULL;
    }
    return d;
}

void proto_parser_kserve(proto_parser *parser, const proto_model *model, int64_t json_bytes)
{
    parser->op = model->op;
    parser->format->begin(parser->reader, model, json_bytes);
}

const proto_sequence *proto_parser_sequence(const proto_parser *parser)
{
    return parser->format->sequence ? parser->format->sequence(parser->reader) : NULL;
}

void proto_parser_free(proto_parser *parser)
{
    if (!parser) return;
    parser->format->close(parser->reader);
    free(parser);
}

attn_status proto_parser_feed(proto_parser *parser, const void *bytes, size_t count, attn_error *err)
{
    return parser->format->feed(parser->reader, bytes, count, err);
}

proto_op proto_parser_op(const proto_parser *parser)
{
    return parser->op;
}

size_t proto_parser_skeleton_bytes(const proto_parser *parser)
{
    return parser->format->rest_bytes(parser->reader);
}

size_t proto_parser_held_bytes(const proto_parser *parser)
{
    return parser->format->held_bytes ? parser->format->held_bytes(parser->reader) : 0;
}

attn_status proto_parser_shared(proto_parser *parser, proto_shared **shared, int *count, attn_error *err)
{
    *shared = NULL;
    *count = 0;
    return parser->format->shared ? parser->format->shared(parser->reader, shared, count, err) : ATTN_OK;
}

/* Returns whether the tensor may be in memory that only a device can read. That is so for the tensors in the set `may`,
 * whose values the host never reads. */
bool proto_may_lie_on_device(attn_tensor_id id)
{
    static const uint64_t may = ATTN_TENSOR_BIT(q) | ATTN_TENSOR_BIT(k) | ATTN_TENSOR_BIT(v) | ATTN_TENSOR_BIT(dout) |
                                ATTN_TENSOR_BIT(dlse);
    return may >> id & 1;
}

attn_status proto_parser_shared_room(proto_parser *parser, attn_error *err)
{
    return parser->format->shared_room ? parser->format->shared_room(parser->reader, err) : ATTN_OK;
}

size_t proto_memory_for(const proto_format *format, uint64_t body_bytes, int tensors)
{
    return format->memory_for(body_bytes) + (size_t)tensors * SCAN_ALIGNMENT + 2 * PROTO_MEMORY_STEP;
}

static attn_status no_memory(attn_error *err)
{
    return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to read the request");
}

/* Reads {"requests": [...]}, which must be the body's only member. */
static attn_status envelope(const proto_parser *d, const struct parse_reader *r, const cJSON *root, proto_call *call,
                            attn_error *err)
{
    const proto_operation *const operation = &proto_operations[d->op];
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
    if (!operation->envelope)
        return attn_fail(
            err, ATTN_INVALID, "/requests", "requests: %s takes one problem%s", operation->name,
            operation->takes_caches && !operation->cache_in_path ? ", with a row of q for each of its caches" : "");
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
        proto_item *const item = &call->items[i];
        attn_error fault;
        attn_status status = object(r, one, item, &fault);
        if (status == ATTN_OK && item->caches)
            status = attn_fail(&fault, ATTN_INVALID, "/caches",
                               "caches: cannot stand in requests; send a problem on caches by itself");
        if (status == ATTN_OK) continue;
        free(item->caches);
        free(item->parts);
        free(item->results);
        *item = (proto_item){ .error = fault };
    }
    return ATTN_OK;
}

static attn_status make_room(struct format_body *body, struct parse_room *room, attn_error *err)
{
    const cJSON *const requests = cJSON_GetObjectItemCaseSensitive(body->root, "requests");
    const size_t used = SCAN_ALIGNED(body->memory_bytes);
    attn_error why = { 0 };
    room->left = requests ? 0 : parse_room_of(body->root, used);
    for (const cJSON *one = requests ? requests->child : NULL; one; one = one->next)
        room->left += parse_room_of(one, used);
    if (room->left == 0) return ATTN_OK;
    const attn_status status = scan_make_room(body->room, used, room->left, &why);
    if (status != ATTN_OK) {
        if (err) *err = why;
        return status;
    }
    body->memory = body->room->base;
    body->memory_bytes = used + room->left;
    room->at = body->memory + used;
    return ATTN_OK;
}

attn_status proto_parser_finish(proto_parser *parser, proto_call **call, attn_error *err)
{
    struct format_body body = { 0 };
    struct parse_reader r = { .op = parser->op };
    struct parse_room room = { 0 };
    char quote[TREE_QUOTE_BYTES];
    proto_call *made = NULL;
    attn_status status = parser->format->finish(parser->reader, &body, err);
    const cJSON *const root = body.root;
    *call = NULL;
    if (status != ATTN_OK) return status;

    made = calloc(1, sizeof *made);
    if (!made || !root) {
        status = no_memory(err);
        goto out;
    }
    made->op = parser->op;
    made->answer = made->format = parser->format;
    if (body.inputs) memcpy(made->inputs, body.inputs, sizeof made->inputs);
    made->model = body.model;
    made->sequence = body.sequence;
    r.sequence = *body.sequence.id != '\0';
    made->binary = body.binary;
    memcpy(made->binary_parts, body.binary_parts, sizeof made->binary_parts);
    r.gradients = body.gradients;
    made->shared = body.shared;
    if (body.id && *body.id && !(made->id = strdup(body.id))) {
        status = no_memory(err);
        goto out;
    }
    if ((status = make_room(&body, &room, err)) != ATTN_OK) goto out;
    r.room = &room;
    r.extracts = body.extracts;
    r.extract_count = body.extract_count;
    r.memory = body.memory;
    made->memory_bytes = body.memory_bytes;
    if (!cJSON_IsObject(root)) {
        status = attn_fail(err, ATTN_INVALID, "", "the body is %s%s, must be an object with %s%s",
                           tree_string(root) ? "a string, " : "", tree_describe(root, quote),
                           proto_operations[parser->op].members,
                           tree_string(root)     ? "; was it encoded twice?"
                           : cJSON_IsArray(root) ? "; several problems are {\"requests\": [{...}, {...}]}"
                                                 : "");
        goto out;
    }
    if (cJSON_GetObjectItemCaseSensitive(root, "requests")) {
        status = envelope(parser, &r, root, made, err);
    } else {
        made->items = calloc(1, sizeof *made->items);
        made->count = 1;
        status = made->items ? object(&r, root, made->items, err) : no_memory(err);
    }
    if (status == ATTN_OK) {
        *call = made;
        made = NULL; /* the caller owns the proto_call now, so it is not freed below */
    } else if (err) proto_call_locate(made, err);
out:
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
    for (int i = 0; i < call->count && call->items; i++) {
        free(call->items[i].caches);
        free(call->items[i].parts);
        free(call->items[i].results);
    }
    free(call->items);
    free(call->id);
    free(call);
}
