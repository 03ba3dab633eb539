/* test_info.c: tests that /v1/info and /openapi.json agree with the program's tables, and with each other. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <cjson/cJSON.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "server/routes/info.h"
#include "server/routes/openapi.h"
#include "server/base/limits.h"
#include "server/routes/routes.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static struct config config;
static const proto_limits limits = PROTO_LIMITS_DEFAULT;

static int set_up(void **state)
{
    (void)state;
    char message[256], *argv[] = { "attnd" };
    if (config_read(&config, 1, argv, message, sizeof message) != CONFIG_RUN) return -1;
    return 0;
}

static cJSON *parse(char *text, size_t length)
{
    assert_non_null(text);
    assert_int_equal(strlen(text), length);
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithOpts(text, &end, true);
    if (tree == NULL) fail_msg("not JSON at: %.80s", end);
    free(text);
    return tree;
}

static cJSON *openapi_of(const struct config *c)
{
    size_t length = 0;
    int count;
    const struct route *routes = routes_all(&count);
    char *text = openapi_write(c, &limits, routes, count, &length);
    return parse(text, length);
}

static cJSON *openapi(void)
{
    return openapi_of(&config);
}

/* Returns the member at a path such as "a/b/c". In a name, ~1 stands for /. */
static cJSON *at(cJSON *tree, const char *path)
{
    char copy[256];
    snprintf(copy, sizeof copy, "%s", path);
    char *rest = copy;
    for (char *name; tree != NULL && (name = strsep(&rest, "/")) != NULL;) {
        char plain[128];
        size_t n = 0;
        for (; *name; name++) {
            if (name[0] == '~' && name[1] == '1') plain[n++] = '/', name++;
            else plain[n++] = *name;
        }
        plain[n] = '\0';
        tree = cJSON_GetObjectItemCaseSensitive(tree, plain);
    }
    return tree;
}

static bool lists(const cJSON *array, const char *word)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, array) if (cJSON_IsString(item) && strcmp(item->valuestring, word) == 0) return true;
    return false;
}

/* ---- Tests of the OpenAPI document ------------------------------------------------------------------------------- */

static void check_refs(cJSON *root, const cJSON *tree)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, tree)
    {
        if (child->string && strcmp(child->string, "$ref") == 0) {
            assert_true(strncmp(child->valuestring, "#/", 2) == 0);
            if (at(root, child->valuestring + 2) == NULL) fail_msg("%s leads nowhere", child->valuestring);
        }
        check_refs(root, child);
    }
}

static void test_every_reference_leads_somewhere(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    check_refs(doc, doc);
    cJSON_Delete(doc);
}

static void test_every_route_and_method_is_there(void **state)
{
    (void)state;
    int count;
    const struct route *all = routes_all(&count);
    struct config with_tokens = config;
    with_tokens.token_file = "tokens";
    with_tokens.allow_shm_count = 1;
    with_tokens.allow_cuda_shm = true;
    cJSON *doc = openapi_of(&with_tokens), *paths = at(doc, "paths");
    check_refs(doc, doc);
    for (int i = 0; i < count; i++) {
        if (!(all[i].ports & PORT_MAIN)) continue;
        cJSON *path = cJSON_GetObjectItemCaseSensitive(paths, all[i].path);
        if (all[i].hidden) {
            if (path != NULL) fail_msg("%s is in the document", all[i].path);
            continue;
        }
        if (path == NULL) fail_msg("%s is not in the document", all[i].path);
        static const char *const methods[] = { "get", "head", "post", "options", "put", "delete", "patch", "trace" };
        for (size_t m = 0; m < ARRAY_SIZE(methods); m++) {
            char upper[16];
            for (size_t k = 0; k <= strlen(methods[m]); k++) upper[k] = (char)toupper((unsigned char)methods[m][k]);
            const cJSON *operation = cJSON_GetObjectItemCaseSensitive(path, methods[m]);
            const struct route_match match = routes_find(PORT_MAIN, all[i].path, upper);
            if (match.answers != (operation != NULL)) fail_msg("%s %s", upper, all[i].path);
            if (operation == NULL) continue;
            const cJSON *security = cJSON_GetObjectItemCaseSensitive(operation, "security");
            const bool open = security != NULL && cJSON_GetArraySize(security) == 0;
            if (open == (match.route->token == PORT_MAIN)) fail_msg("%s %s: the token is wrong", upper, all[i].path);
            assert_non_null(cJSON_GetObjectItemCaseSensitive(operation, "responses"));
        }
    }
    cJSON_Delete(doc);
}

static void test_without_shared_memory_its_routes_are_not_there(void **state)
{
    (void)state;
    int count, shared[3] = { 0 };
    const struct route *all = routes_all(&count);
    struct config with = config, with_cuda = config;
    with.allow_shm_count = 1;
    with_cuda.allow_cuda_shm = true;
    cJSON *doc = openapi(), *doc_with = openapi_of(&with), *doc_cuda = openapi_of(&with_cuda);
    check_refs(doc_cuda, doc_cuda);
    for (int i = 0; i < count; i++) {
        if (all[i].shm == ROUTE_ALWAYS) continue;
        shared[all[i].shm]++;
        assert_null(cJSON_GetObjectItemCaseSensitive(at(doc, "paths"), all[i].path));
        const bool cuda = all[i].shm == ROUTE_ALLOW_CUDA_SHM;
        assert_non_null(cJSON_GetObjectItemCaseSensitive(at(cuda ? doc_cuda : doc_with, "paths"), all[i].path));
        assert_null(cJSON_GetObjectItemCaseSensitive(at(cuda ? doc_with : doc_cuda, "paths"), all[i].path));
    }
    assert_true(shared[ROUTE_ALLOW_SHM] == 5 && shared[ROUTE_ALLOW_CUDA_SHM] == 5);
    assert_null(at(doc_with, "components/schemas/CudaRegionRegister"));
    assert_non_null(at(doc_cuda, "components/schemas/CudaRegionRegister"));
    cJSON_Delete(doc_cuda);
    assert_null(at(doc, "components/schemas/RegionRegister"));
    cJSON *const post = at(doc_with, "paths/~1v2~1systemsharedmemory~1region~1{region}~1register/post");
    assert_string_equal(at(post, "requestBody/content/application~1json/schema/$ref")->valuestring,
                        "#/components/schemas/RegionRegister");
    assert_non_null(at(post, "responses/200"));
    assert_null(at(post, "responses/200/content"));
    assert_non_null(at(post, "responses/409"));
    cJSON_Delete(doc);
    cJSON_Delete(doc_with);
}

static void test_every_number_that_changes_scores_has_the_range_of_its_row(void **state)
{
    (void)state;
    cJSON *doc = openapi(), *properties = at(doc, "components/schemas/ForwardProblem/properties");
#define X(name, id, least, most, rule, meaning)                                        \
    {                                                                                  \
        const double lowest = cJSON_GetNumberValue(at(properties, #name "/minimum")),  \
                     highest = cJSON_GetNumberValue(at(properties, #name "/maximum")); \
        if (lowest != (least < 0 ? least : 0) || highest != (most > 0 ? most : 0))     \
            fail_msg(#name " from %g to %g", lowest, highest);                         \
    }
    ATTN_SCORE_OPTION_MAP(X)
#undef X
    cJSON_Delete(doc);
}

static void test_without_tokens_nothing_is_said_of_them(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    assert_null(at(doc, "security"));
    assert_null(at(doc, "components/securitySchemes"));
    assert_null(at(doc, "paths/~1v1~1info/get/responses/401"));
    cJSON_Delete(doc);
}

/* If a path has two methods, the OpenAPI document has one entry for the path, which describes the path's parameter. */
static void test_rows_of_one_path_are_one_item_and_its_parameters_are_documented(void **state)
{
    (void)state;
#define DOC                                                                                  \
    "operations", "A thing", "Of its name.", "The thing", "text/plain", "{'type':'string'}", \
        .parameters = { { "name", "Which one.", "mine" } }, .errors = ROUTE_ERROR(NOT_FOUND)
    static const struct route rows[] = {
        { ROUTE_GET, "/v1/things/{name}", "things", PORT_MAIN, .token = PORT_MAIN, .doc = { DOC } },
        { ROUTE_GET, "/elsewhere", "elsewhere", PORT_METRICS, .doc = { DOC } },
        { ROUTE_DELETE, "/v1/things/{name}", "things", PORT_MAIN, .doc = { DOC } },
    };
    struct config with_tokens = config;
    size_t length = 0;
    with_tokens.token_file = "tokens";
    char *text = openapi_write(&with_tokens, &limits, rows, ARRAY_SIZE(rows), &length);
    cJSON *doc = parse(text, length), *path = at(doc, "paths/~1v1~1things~1{name}");
    assert_int_equal(cJSON_GetArraySize(at(doc, "paths")), 1);
    assert_int_equal(cJSON_GetArraySize(path), 3);
    static const struct {
        const char *method, *id;
        bool open;
    } operations[] = { { "get", "get_v1_things_name", false },
                       { "head", "head_v1_things_name", false },
                       { "delete", "delete_v1_things_name", true } };
    for (size_t i = 0; i < ARRAY_SIZE(operations); i++) {
        cJSON *operation = cJSON_GetObjectItemCaseSensitive(path, operations[i].method);
        const cJSON *parameters = at(operation, "parameters"), *last = cJSON_GetArrayItem(parameters, 2);
        assert_string_equal(cJSON_GetStringValue(at(operation, "operationId")), operations[i].id);
        /* two headers, which every route takes, and the path's parameter */
        assert_int_equal(cJSON_GetArraySize(parameters), 3);
        assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(last, "in")), "path");
        assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(last, "name")), "name");
        assert_true(cJSON_IsTrue(cJSON_GetObjectItem(last, "required")));
        assert_int_equal(at((cJSON *)last, "schema/maxLength")->valueint, ROUTE_PARAMETER_BYTES);
        assert_int_equal(at(operation, "security") != NULL, operations[i].open);
        assert_int_equal(at(operation, "responses/401") == NULL, operations[i].open);
        assert_non_null(at(operation, "responses/404"));
        assert_null(at(operation, "responses/415"));
    }
    cJSON_Delete(doc);
}

struct memory {
    char *base;
    size_t bytes;
};

static attn_status on_grow(void *context, size_t bytes, void **base, attn_error *err)
{
    struct memory *m = context;
    if (bytes > m->bytes) {
        char *more = aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (more == NULL) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory");
        if (m->base) memcpy(more, m->base, m->bytes);
        free(m->base);
        m->base = more;
        m->bytes = bytes;
    }
    *base = m->base;
    return ATTN_OK;
}

static attn_status decode(const proto_format *format, proto_op op, const cJSON *body, int *problems, attn_error *err)
{
    struct memory m = { 0 };
    proto_memory memory = { on_grow, &m };
    proto_parser *d = proto_parser_new(format, op, &limits, &memory);
    char *text = cJSON_PrintUnformatted(body);
    proto_call *call = NULL;
    attn_status status = proto_parser_feed(d, text, strlen(text), err);
    *problems = 0;
    if (status == ATTN_OK) status = proto_parser_finish(d, &call, err);
    for (int i = 0; call != NULL && i < call->count; i++) {
        if (call->items[i].error.status != ATTN_OK) {
            *err = call->items[i].error;
            status = err->status;
        } else ++*problems;
    }
    proto_call_free(call);
    proto_parser_free(d);
    free(text);
    free(m.base);
    return status;
}

static void test_every_example_is_accepted_as_it_stands(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        const proto_format *format;
        proto_op op;
        int least;
    } ops[] = {
        { "paths/~1v1~1attention~1forward/post/requestBody/content/application~1json/examples", &proto_json,
          ATTN_OP_FORWARD, 2 },
        { "paths/~1v1~1attention~1backward/post/requestBody/content/application~1json/examples", &proto_json,
          ATTN_OP_BACKWARD, 2 },
        { "paths/~1v2~1models~1{model}~1infer/post/requestBody/content/application~1json/examples", &proto_kserve,
          ATTN_OP_FORWARD, 1 },
        { "paths/~1v1~1attention~1decode/post/requestBody/content/application~1json/examples", &proto_json,
          PROTO_OP_DECODE, 1 },
        { "paths/~1v1~1caches~1{id}~1append/post/requestBody/content/application~1json/examples", &proto_json,
          PROTO_OP_APPEND, 1 },
    };
    cJSON *doc = openapi();
    for (size_t i = 0; i < ARRAY_SIZE(ops); i++) {
        const cJSON *example;
        int count = 0;
        cJSON_ArrayForEach(example, at(doc, ops[i].path))
        {
            attn_error err = { 0 };
            int problems = 0;
            if (decode(ops[i].format, ops[i].op, cJSON_GetObjectItem(example, "value"), &problems, &err) != ATTN_OK ||
                problems == 0)
                fail_msg("%s: %s", example->string, err.text);
            count++;
        }
        assert_true(count >= ops[i].least);
    }
    cJSON_Delete(doc);
}

static void test_members_of_a_problem_are_those_of_the_decoder(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        char where[96];
        snprintf(where, sizeof where, "components/schemas/%s%s/properties", proto_operations[op].title,
                 proto_operations[op].envelope ? "Problem" : "Request");
        const cJSON *properties = at(doc, where);
        int expected = 0;
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
            const bool takes = proto_takes_tensor(op, (attn_tensor_id)t);
            expected += takes;
            const proto_option *o = proto_options;
            while (o->name && strcmp(o->name, attn_tensors[t].name) != 0) o++;
            if (o->name && !takes) continue;
            if ((cJSON_GetObjectItemCaseSensitive(properties, attn_tensors[t].name) != NULL) != takes)
                fail_msg("%s", attn_tensors[t].name);
        }
        for (const proto_option *o = proto_options; o->name; o++) {
            const bool takes = (o->ops >> op & 1) && strcmp(o->name, "context") != 0;
            expected += takes;
            if ((cJSON_GetObjectItemCaseSensitive(properties, o->name) != NULL) != takes) fail_msg("%s", o->name);
        }
        assert_int_equal(cJSON_GetArraySize(properties), expected);
    }
    const cJSON *saved = at(doc, "components/schemas/BackwardOfContext/properties");
    assert_non_null(cJSON_GetObjectItem(saved, "context"));
    assert_non_null(cJSON_GetObjectItem(saved, "dout"));
    assert_null(cJSON_GetObjectItem(saved, "q"));
    assert_null(cJSON_GetObjectItem(saved, "scale"));
    cJSON_Delete(doc);
}

static void test_a_tensor_is_the_one_schema_and_says_its_axes_and_dtypes(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    unsigned ranks = 0;
    for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
        char path[128], shape[ATTN_SHAPE_BYTES], dtypes[PROTO_DTYPE_LIST_BYTES];
        const attn_tensor_id id = (attn_tensor_id)t;
        snprintf(path, sizeof path, "components/schemas/BackwardProblem/properties/%s", attn_tensors[t].name);
        const cJSON *member = at(doc, path);
        assert_int_equal(member != NULL, proto_takes_tensor(ATTN_OP_BACKWARD, id));
        if (member == NULL) continue;
        ranks |= attn_tensor_ranks(id);
        const cJSON *forms = cJSON_GetObjectItem(member, "oneOf"), *one = forms ? forms->child : member;
        assert_string_equal(cJSON_GetObjectItem(one, "$ref")->valuestring, "#/components/schemas/Tensor");
        assert_int_equal(forms != NULL, proto_may_be_number(id));
        if (forms) assert_string_equal(cJSON_GetObjectItem(one->next, "type")->valuestring, "number");
        const char *text = cJSON_GetObjectItem(member, "description")->valuestring;
        print_message("%s: %s\n", attn_tensors[t].name, text);
        assert_non_null(strstr(text, attn_tensor_shape(id, shape)));
        assert_non_null(strstr(text, attn_tensors[t].meaning));
        assert_non_null(strstr(text, proto_dtype_list(id, dtypes)));
    }
    const cJSON *shape = at(doc, "components/schemas/Tensor/properties/shape");
    assert_int_equal(cJSON_GetObjectItem(shape, "minItems")->valueint, __builtin_ctz(ranks));
    assert_int_equal(cJSON_GetObjectItem(shape, "maxItems")->valueint, 31 - __builtin_clz(ranks));
    const cJSON *dtypes = at(doc, "components/schemas/Dtype/enum");
#define X(wire, ...) +1
    assert_int_equal(cJSON_GetArraySize(dtypes), ATTN_DTYPE_COUNT PROTO_DTYPE_MAP(X));
#undef X
#define X(wire, ...) assert_true(lists(dtypes, wire));
    PROTO_DTYPE_MAP(X)
#undef X
    for (int d = 0; d < ATTN_DTYPE_COUNT; d++) assert_true(lists(dtypes, attn_dtype_name((attn_dtype)d)));
    cJSON_Delete(doc);
}

/* In requests on caches, k and v have other shapes than in a forward, so the OpenAPI document must describe them
 * differently. */
static void test_tensors_of_caches_say_what_they_are_there(void **state)
{
    (void)state;
    static const struct {
        const char *member, *begins, *says;
    } cases[] = {
        { "AppendRequest/properties/k", "[S, Hk, D]; ", "keys of S more positions" },
        { "AppendRequest/properties/v", "[S, Hk, Dv]; ", "their values" },
        { "DecodeRequest/properties/q", "[B, Sq, H, D]; ", "of float8_e4m3fn also" },
        { "DecodeRequest/properties/k", "[B, S, Hk, D]; ", "keys of S more positions" },
        { "DecodeRequest/properties/v", "[B, S, Hk, Dv]; ", "their values" },
        { "DecodeRequest/properties/keep_mask", "[1 or B, 1 or H, 1 or Sq, n]; ", "of the last n keys" },
        { "ForwardProblem/properties/k", "[B, Sk, Hk, D]; ", "with page_table" },
    };
    cJSON *doc = openapi();
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char path[128];
        snprintf(path, sizeof path, "components/schemas/%s/description", cases[i].member);
        const char *text = cJSON_GetStringValue(at(doc, path));
        assert_non_null(text);
        if (strncmp(text, cases[i].begins, strlen(cases[i].begins)) != 0 || !strstr(text, cases[i].says))
            fail_msg("%s: %s", cases[i].member, text);
        if (cases[i].member[0] != 'F' && strstr(text, "page_table")) fail_msg("%s: %s", cases[i].member, text);
    }
    cJSON_Delete(doc);
}

/* The OpenAPI document must list the special answers of requests that change something: 403 for another site's page,
 * 400 for a query in the URL, 507 if infer finds no page for a sequence. */
static void test_statuses_and_headers_of_what_changes_something(void **state)
{
    (void)state;
    struct config with = config;
    with.allow_shm_count = 1;
    with.allow_cuda_shm = true;
    cJSON *doc = openapi_of(&with);
    const cJSON *path, *operation;
    cJSON_ArrayForEach(path, at(doc, "paths")) cJSON_ArrayForEach(operation, path)
    {
        const bool changes = strcmp(operation->string, "get") != 0 && strcmp(operation->string, "head") != 0;
        const cJSON *made = at((cJSON *)operation, "responses/201");
        if ((at((cJSON *)operation, "responses/403") != NULL) != changes)
            fail_msg("%s %s: 403", operation->string, path->string);
        if (lists(at((cJSON *)operation, "responses/400/x-codes"), "invalid-request") != changes)
            fail_msg("%s %s: 400", operation->string, path->string);
        if (made && !at((cJSON *)made, "headers/Location")) fail_msg("%s: no Location", path->string);
        if (at((cJSON *)operation, "responses/200/headers/Location")) fail_msg("%s: Location", path->string);
        const cJSON *media;
        cJSON_ArrayForEach(media, at((cJSON *)operation, "requestBody/content"))
        {
            const cJSON *examples = cJSON_GetObjectItem(media, "examples");
            if (examples && cJSON_GetArraySize(examples) == 0) fail_msg("%s: no examples", path->string);
        }
    }
    assert_non_null(at(doc, "components/headers/Location"));
    assert_non_null(at(doc, "paths/~1v2~1models~1{model}~1infer/post/responses/507"));
    cJSON_Delete(doc);
}

static void test_what_a_sequence_wants_is_among_the_parameters_of_infer(void **state)
{
    (void)state;
    static const char *const names[] = { "caches", "sequence_id", "sequence_start", "sequence_end" };
    cJSON *doc = openapi();
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        assert_non_null(cJSON_GetObjectItem(at(doc, "components/schemas/InferParameters/properties"), names[i]));
    assert_non_null(strstr(cJSON_GetStringValue(at(doc, "components/schemas/InferInput/properties/name/description")),
                           "DecodeRequest"));
    cJSON_Delete(doc);
}

static void check_name(const char *name)
{
    if (!isalpha((unsigned char)name[0])) fail_msg("%s", name);
    for (const char *c = name; *c; c++)
        if (!isalnum((unsigned char)*c) && *c != '_') fail_msg("%s", name);
}

/* Code generators turn each enum value into a constant in capitals, so the values must differ in capitals too. */
static void check_enums(const cJSON *tree)
{
    const cJSON *child;
    cJSON_ArrayForEach(child, tree)
    {
        for (int i = 0; child->string && strcmp(child->string, "enum") == 0 && i < cJSON_GetArraySize(child); i++)
            for (int k = 0; k < i; k++) {
                const char *a = cJSON_GetArrayItem(child, i)->valuestring,
                           *b = cJSON_GetArrayItem(child, k)->valuestring;
                if (strcasecmp(a, b) == 0) fail_msg("%s and %s", a, b);
            }
        check_enums(child);
    }
}

static void test_names_are_names_in_any_language_and_no_two_are_one(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    const cJSON *schema, *path, *operation;
    char ids[4096] = " ";
    cJSON_ArrayForEach(schema, at(doc, "components/schemas")) check_name(schema->string);
    cJSON_ArrayForEach(path, at(doc, "paths")) cJSON_ArrayForEach(operation, path)
    {
        const char *id = cJSON_GetObjectItem(operation, "operationId")->valuestring;
        char word[160];
        check_name(id);
        assert_int_not_equal(id[strlen(id) - 1], '_');
        snprintf(word, sizeof word, " %s ", id);
        if (strstr(ids, word)) fail_msg("%s is there twice", id);
        assert_true(strlen(ids) + strlen(word) < sizeof ids);
        strcat(ids, word + 1);
    }
    check_enums(doc);
    cJSON_Delete(doc);
}

static void test_errors_of_one_status_are_one_response(void **state)
{
    (void)state;
    cJSON *doc = openapi();
    const cJSON *response = at(doc, "paths/~1v1~1attention~1forward/post/responses/503");
    const cJSON *codes = cJSON_GetObjectItem(response, "x-codes");
    assert_true(lists(codes, "queue-full"));
    assert_true(lists(codes, "draining"));
    assert_true(lists(codes, "out-of-memory"));
    assert_false(lists(codes, "not-found"));
    assert_non_null(strstr(cJSON_GetObjectItem(response, "description")->valuestring, "queue-full: "));
    assert_string_equal(at(doc, "paths/~1v1~1attention~1forward/post/responses/503/content/application~1problem+json/"
                                "schema/$ref")
                            ->valuestring,
                        "#/components/schemas/Problem");
    assert_non_null(at(doc, "paths/~1v1~1attention~1forward/post/responses/503/headers/Retry-After"));
    assert_null(at(doc, "paths/~1v1~1attention~1forward/post/responses/404"));
    assert_non_null(at(doc, "paths/~1v1~1attention~1backward/post/responses/404"));
    cJSON_Delete(doc);
}

/* ---- Tests of /v1/info ------------------------------------------------------------------------------------------- */

static void check_schema(const cJSON *schema, const cJSON *value, const char *where)
{
    const cJSON *keyword, *item;
    const char *type = "";
    cJSON_ArrayForEach(keyword, schema)
    {
        const char *k = keyword->string;
        if (strcmp(k, "type") == 0) {
            type = keyword->valuestring;
            const bool ok = strcmp(type, "object") == 0    ? cJSON_IsObject(value)
                            : strcmp(type, "array") == 0   ? cJSON_IsArray(value)
                            : strcmp(type, "string") == 0  ? cJSON_IsString(value)
                            : strcmp(type, "boolean") == 0 ? cJSON_IsBool(value)
                            : strcmp(type, "number") == 0  ? cJSON_IsNumber(value)
                            : strcmp(type, "integer") == 0
                                ? cJSON_IsNumber(value) && value->valuedouble == (double)(int64_t)value->valuedouble
                                : false;
            if (!ok) fail_msg("%s is not of type %s", where, type);
        } else if (strcmp(k, "minimum") == 0) {
            if (value->valuedouble < keyword->valuedouble) fail_msg("%s is %g", where, value->valuedouble);
        } else if (strcmp(k, "enum") == 0) {
            if (!lists(keyword, value->valuestring)) fail_msg("%s is %s", where, value->valuestring);
        } else if (strcmp(k, "required") == 0) {
            cJSON_ArrayForEach(item, keyword) if (!cJSON_GetObjectItemCaseSensitive(value, item->valuestring))
                fail_msg("%s has no %s", where, item->valuestring);
        } else if (strcmp(k, "items") == 0) {
            cJSON_ArrayForEach(item, value) check_schema(keyword, item, where);
        } else if (strcmp(k, "additionalProperties") == 0) {
            const cJSON *known = cJSON_GetObjectItem(schema, "properties");
            cJSON_ArrayForEach(item, value)
            {
                if (cJSON_GetObjectItemCaseSensitive(known, item->string)) continue;
                if (cJSON_IsFalse(keyword)) fail_msg("%s.%s is not in the schema", where, item->string);
                check_schema(keyword, item, item->string);
            }
        } else if (strcmp(k, "properties") == 0) {
            cJSON_ArrayForEach(item, keyword)
            {
                const cJSON *member = cJSON_GetObjectItemCaseSensitive(value, item->string);
                if (member) check_schema(item, member, item->string);
            }
        } else if (strcmp(k, "description") != 0) fail_msg("this test does not know the keyword %s", k);
    }
}

static bool has_code(const cJSON *tree, const char *code)
{
    for (int i = 0; i < cJSON_GetArraySize(tree); i++) {
        const cJSON *child = cJSON_GetArrayItem(tree, i);
        if ((cJSON_IsString(child) && strcmp(child->valuestring, code) == 0) || has_code(child, code)) return true;
    }
    return false;
}

static void test_every_error_that_is_answered_is_on_some_route(void **state)
{
    (void)state;
    static const proto_error unused[] = { PROTO_E_CONFLICT, PROTO_E_NOT_IMPLEMENTED };
    struct config with_tokens = config;
    with_tokens.token_file = "tokens";
    cJSON *doc = openapi_of(&with_tokens);
    for (int e = 0; e < PROTO_ERROR_COUNT; e++) {
        bool used = true;
        for (size_t i = 0; i < ARRAY_SIZE(unused); i++) used &= unused[i] != (proto_error)e;
        if (has_code(at(doc, "paths"), proto_errors[e].code) != used) fail_msg("%s", proto_errors[e].code);
    }
    cJSON_Delete(doc);
}

static void test_info_has_the_form_that_the_document_says(void **state)
{
    (void)state;
    attn_error err = { 0 };
    attn_device *device = NULL;
    struct device_state d = { .running_requests = 2, .usable = true };
    size_t length = 0;
    assert_int_equal(attn_device_open("reference", 0, NULL, &device, &err), ATTN_OK);
    attn_device_describe(device, &d.info);
    d.can = attn_device_capabilities(device);
    d.info.peak_flops = 1e12;
    snprintf(d.info.peak_from, sizeof d.info.peak_from, "a test");
    const struct info_facts facts = { .config = &config,
                                      .limits = &limits,
                                      .state = "ready",
                                      .web_library = "1.0",
                                      .loop_library = "2.0",
                                      .uptime_s = 1.5,
                                      .devices = &d,
                                      .device_count = 1,
                                      .queue_requests = 3,
                                      .queue_bytes = 4,
                                      .connections = 5,
                                      .inflight_requests = 6,
                                      .staging_used_bytes = 7,
                                      .kv_bytes = 8 };
    char *text = info_write(&facts, &length);
    cJSON *info = parse(text, length), *doc = openapi();
    check_schema(at(doc, "components/schemas/Info"), info, "info");
    assert_string_equal(at(info, "version")->valuestring, ATTND_VERSION);
    assert_string_equal(at(info, "build/libmicrohttpd")->valuestring, "1.0");
    assert_string_equal(at(info, "build/libuv")->valuestring, "2.0");
    assert_int_equal(at(info, "queue/bytes")->valueint, 4);
    assert_int_equal(at(info, "limits/queue_depth")->valueint, config.queue_depth);
    static const struct {
        const char *name;
        int64_t value;
    } of_caches[] = { { "kv_bytes", 8 },
                      { "caches", CACHES_MAX_COUNT },
                      { "cache_ttl_ms", CACHES_TTL_MS },
                      { "cache_ttl_most_ms", INT64_C(604800000) },
                      { "cache_kv_heads", CACHES_HEADS },
                      { "cache_page_size", 128 },
                      { "cache_page_size_least", 64 },
                      { "cache_page_size_most", 128 },
                      { "decode_caches", PROTO_MAX_CACHES },
                      { "decode_pages", CACHES_STEP_PAGES } };
    for (size_t i = 0; i < ARRAY_SIZE(of_caches); i++)
        if (cJSON_GetNumberValue(cJSON_GetObjectItem(at(info, "limits"), of_caches[i].name)) !=
            (double)of_caches[i].value)
            fail_msg("%s", of_caches[i].name);
    const cJSON *first = cJSON_GetArrayItem(at(info, "devices"), 0);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(first, "usable")));
    assert_int_equal(cJSON_GetObjectItem(first, "running_requests")->valueint, 2);
    assert_int_equal(cJSON_GetObjectItem(first, "errors")->valueint, 0);
    assert_true(cJSON_GetObjectItem(first, "peak_flops")->valuedouble == 1e12);
    assert_null(cJSON_GetObjectItem(first, "peak_bytes_per_s"));
    assert_string_equal(cJSON_GetObjectItem(first, "peak_from")->valuestring, "a test");
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(first, "verifies")));
    assert_true(at(info, "limits/verify_multiply_adds")->valuedouble == (double)VERIFY_MAX_MULTIPLY_ADDS);
    assert_true(at(info, "limits/verify_head_elements")->valuedouble == (double)VERIFY_MAX_HEAD_ELEMENTS);
    /* The reference backend must accept every problem by which /v1/info probes a backend. */
    for (proto_op op = 0; op < PROTO_OP_COUNT; op++) {
        if (!proto_operations[op].computes && !proto_operations[op].merges) continue;
        char where[64];
        snprintf(where, sizeof where, "features/reference/%s", proto_operations[op].name);
        cJSON *f = at(info, where);
        assert_true(lists(cJSON_GetObjectItem(f, "dtypes"), "bfloat16"));
        for (int t = 0; t < ATTN_TENSOR_COUNT; t++) {
            const bool forward_only = t == ATTN_T_q_scale || t == ATTN_T_k_scale || t == ATTN_T_v_scale ||
                                      t == ATTN_T_page_table;
            const bool takes = proto_takes_tensor(op, (attn_tensor_id)t) && !(forward_only && op == ATTN_OP_BACKWARD);
            if (lists(cJSON_GetObjectItem(f, "tensors"), attn_tensors[t].name) != takes)
                fail_msg("%s", attn_tensors[t].name);
        }
        for (const proto_option *o = proto_options; o->name; o++)
            if (lists(cJSON_GetObjectItem(f, "options"), o->name) != (o->ops >> op & 1)) fail_msg("%s", o->name);
        /* One kernel computes all merges (joins of results over parts of the keys), so merges are not in the table of
         * kernels. */
        if (proto_operations[op].merges) {
            assert_false(lists(cJSON_GetObjectItem(f, "dtypes"), "float8_e4m3fn"));
            assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(f, "kernels")), 0);
            continue;
        }
        const cJSON *kernel = cJSON_GetArrayItem(cJSON_GetObjectItem(f, "kernels"), 0);
        assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(f, "kernels")), 1);
        assert_string_equal(cJSON_GetObjectItem(kernel, "name")->valuestring, "double");
        assert_int_equal(cJSON_GetObjectItem(kernel, "head_dim")->valueint, ATTN_MAX_HEAD_DIM);
        assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(kernel, "tensors")),
                         cJSON_GetArraySize(cJSON_GetObjectItem(f, "tensors")));
    }
    cJSON_Delete(info);
    cJSON_Delete(doc);
    attn_device_close(device);
}

static void test_info_is_valid_before_there_is_a_device(void **state)
{
    (void)state;
    const struct info_facts facts = {
        .config = &config, .limits = &limits, .state = "starting", .web_library = "1.0", .loop_library = "2.0"
    };
    size_t length = 0;
    char *text = info_write(&facts, &length);
    cJSON *info = parse(text, length), *doc = openapi();
    check_schema(at(doc, "components/schemas/Info"), info, "info");
    cJSON_Delete(info);
    cJSON_Delete(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_reference_leads_somewhere),
        cmocka_unit_test(test_every_route_and_method_is_there),
        cmocka_unit_test(test_rows_of_one_path_are_one_item_and_its_parameters_are_documented),
        cmocka_unit_test(test_without_shared_memory_its_routes_are_not_there),
        cmocka_unit_test(test_every_number_that_changes_scores_has_the_range_of_its_row),
        cmocka_unit_test(test_without_tokens_nothing_is_said_of_them),
        cmocka_unit_test(test_every_example_is_accepted_as_it_stands),
        cmocka_unit_test(test_members_of_a_problem_are_those_of_the_decoder),
        cmocka_unit_test(test_a_tensor_is_the_one_schema_and_says_its_axes_and_dtypes),
        cmocka_unit_test(test_tensors_of_caches_say_what_they_are_there),
        cmocka_unit_test(test_statuses_and_headers_of_what_changes_something),
        cmocka_unit_test(test_what_a_sequence_wants_is_among_the_parameters_of_infer),
        cmocka_unit_test(test_names_are_names_in_any_language_and_no_two_are_one),
        cmocka_unit_test(test_errors_of_one_status_are_one_response),
        cmocka_unit_test(test_every_error_that_is_answered_is_on_some_route),
        cmocka_unit_test(test_info_has_the_form_that_the_document_says),
        cmocka_unit_test(test_info_is_valid_before_there_is_a_device),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
