/* check_command.c: the command `attnd check FILE`. FILE is what a client could POST to /v1/attention/check as
 * application/x-safetensors. --members names a file with further members of the request, which are added to FILE's
 * metadata before FILE is parsed. */
#include "server/check_command.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto-json/proto.h"
#include "proto-json/report.h"
#include "server/base/clock.h"
#include "server/check_truth.h"
#include "text/text.h"

enum { EXIT_WRONG = 1, EXIT_USAGE_ERROR = 64, EXIT_NOT_UNDERSTOOD = 65 };
enum {
    LENGTH_BYTES = 8, /* size of the number that begins a safetensors file: its header's length */
    /* time limit in seconds for comparing the file's results with exact ones */
    CHECK_SECONDS = 60,
    LINES_WORST = 3,   /* at most this many elements are printed: those with the largest errors */
    LINES_REASONS = 3, /* at most this many explanations are printed */
    LINES_WHERE = 3,
};
#define MEMBERS_BYTES ((size_t)1 << 20)
#define FILE_BYTES    ((size_t)1 << 40)
#define METADATA      "__metadata__"

static const char usage[] =
    "Usage: attnd check FILE.safetensors [--members FILE.json] [--json] [--devices D]\n\n"
    "Says what is wrong with a kernel's results. FILE holds q, k, v, the options and the results\n"
    "(out, lse; for a backward dout, dq, dk, dv), as POST /v1/attention/check takes them. Options\n"
    "stand in the metadata (\"causal\": \"true\") or in the file of --members, which wins. --json\n"
    "prints what the server answers. A GPU computes exact results of large problems in float64:\n"
    "--devices is auto (the first GPU, if there is one), cpu, or the number of a GPU. Exit status:\n"
    "0 match or rounding, 1 mismatch, 64 wrong arguments, 65 a file that is not understood.\n";

struct arguments {
    const char *file, *members, *devices;
    bool json;
};

static int refuse(int status, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int refuse(int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("attnd check: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return status;
}

/* Reads the arguments into *a. Returns false after printing a message if they are wrong. */
static bool read_arguments(int argc, char **argv, struct arguments *a)
{
    *a = (struct arguments){ .devices = "auto" };
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) a->json = true;
        else if (strcmp(argv[i], "--members") == 0 && i + 1 < argc) a->members = argv[++i];
        else if (strcmp(argv[i], "--devices") == 0 && i + 1 < argc) a->devices = argv[++i];
        else if (argv[i][0] == '-' && argv[i][1] != '\0') {
            (void)refuse(0, "%s: there is no such option, or it lacks its value; attnd check --help lists them",
                         argv[i]);
            return false;
        } else if (a->file) {
            (void)refuse(0, "%s: one file is checked at a time, and %s is one", argv[i], a->file);
            return false;
        } else a->file = argv[i];
    }
    if (a->file) return true;
    (void)refuse(0, "FILE is missing; attnd check --help says what it holds");
    return false;
}

/* Returns the content of a file, in memory from malloc(), or NULL after printing a message. */
static char *read_file(const char *name, size_t most, size_t *bytes)
{
    FILE *const file = fopen(name, "rb");
    char *content = NULL;
    size_t room = 0;
    *bytes = 0;
    while (file && *bytes <= most) {
        if (*bytes == room) {
            room = room ? 2 * room : 1 << 16;
            char *const larger = realloc(content, room + 1);
            if (!larger) break;
            content = larger;
        }
        const size_t got = fread(content + *bytes, 1, room - *bytes, file);
        *bytes += got;
        if (got > 0) continue;
        if (ferror(file)) break;
        fclose(file);
        content[*bytes] = '\0';
        return content;
    }
    (void)refuse(0, "%s: %s", name,
                 !file           ? strerror(errno)
                 : *bytes > most ? "the file is too large"
                                 : "it cannot be read");
    if (file) fclose(file);
    free(content);
    return NULL;
}

/* ---- The members of the request ---------------------------------------------------------------------------------- */

static bool put_member(cJSON *metadata, const cJSON *member)
{
    enum { EXACT_BITS = 53 };
    const bool is_text = cJSON_IsString(member);
    if (cJSON_IsNumber(member) && fabs(member->valuedouble) >= (double)(INT64_C(1) << EXACT_BITS)) {
        (void)refuse(0, "%s: a number of 2^53 or more stands in quotes in the file of --members", member->string);
        return false;
    }
    char *const text = is_text ? NULL : cJSON_PrintUnformatted(member);
    const char *const value = is_text ? member->valuestring : text;
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, member->string);
    const bool added = value && cJSON_AddStringToObject(metadata, member->string, value);
    cJSON_free(text);
    if (!added) (void)refuse(0, "out of memory");
    return added;
}

/* Returns a new header for the safetensors file: its old header plus the members of the JSON file `name`. *data becomes
 * the offset at which the old file continues after its header. Returns NULL after printing a message if the members
 * were refused. */
static char *merge_members(const char *name, const char *file, size_t bytes, size_t *header_bytes, size_t *data)
{
    size_t count;
    uint64_t length = 0;
    char *merged = NULL;
    char *const text = read_file(name, MEMBERS_BYTES, &count);
    cJSON *const members = text ? cJSON_ParseWithLength(text, count) : NULL;
    if (bytes >= LENGTH_BYTES) memcpy(&length, file, LENGTH_BYTES);
    const bool fits = bytes >= LENGTH_BYTES && length <= bytes - LENGTH_BYTES && length <= PROTO_HEADER_BYTES;
    cJSON *const header = fits ? cJSON_ParseWithLength(file + LENGTH_BYTES, (size_t)length) : NULL;
    cJSON *metadata = cJSON_GetObjectItemCaseSensitive(header, METADATA);
    bool fine = text && cJSON_IsObject(members) && cJSON_IsObject(header);
    if (text && !cJSON_IsObject(members)) (void)refuse(0, "%s: is no JSON object of members", name);
    else if (text && !cJSON_IsObject(header)) (void)refuse(0, "the file does not begin with a safetensors header");
    if (fine && !metadata) fine = (metadata = cJSON_AddObjectToObject(header, METADATA)) != NULL;
    for (const cJSON *m = fine ? members->child : NULL; m && fine; m = m->next) fine = put_member(metadata, m);
    if (fine) merged = cJSON_PrintUnformatted(header);
    if (merged) *header_bytes = strlen(merged), *data = LENGTH_BYTES + (size_t)length;
    cJSON_Delete(members);
    cJSON_Delete(header);
    free(text);
    return merged;
}

/* ---- Reading the problem, and comparing its results with exact ones ---------------------------------------------- */

struct memory {
    void *memory;
    size_t bytes;
};

static attn_status grow(void *context, size_t bytes, void **base, attn_error *err)
{
    enum { ALIGNMENT = 64 };
    struct memory *const room = context;
    const size_t wanted = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *const larger = aligned_alloc(ALIGNMENT, wanted > 0 ? wanted : ALIGNMENT);
    if (!larger) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    if (room->memory) memcpy(larger, room->memory, room->bytes);
    free(room->memory);
    room->memory = larger;
    room->bytes = wanted;
    *base = larger;
    return ATTN_OK;
}

static attn_status parse(const char *header, size_t header_bytes, const char *data, size_t bytes, struct memory *memory,
                         proto_call **call, attn_error *err)
{
    const proto_limits limits = PROTO_LIMITS_DEFAULT;
    const proto_memory room = { grow, memory };
    proto_parser *const parser = proto_parser_new(&proto_safetensors, PROTO_OP_CHECK, &limits, &room);
    const uint64_t length = header_bytes;
    if (!parser) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    attn_status status = ATTN_OK;
    if (header) {
        status = proto_parser_feed(parser, &length, LENGTH_BYTES, err);
        if (status == ATTN_OK) status = proto_parser_feed(parser, header, header_bytes, err);
    }
    if (status == ATTN_OK) status = proto_parser_feed(parser, data, bytes, err);
    if (status == ATTN_OK) status = proto_parser_finish(parser, call, err);
    proto_parser_free(parser);
    return status;
}

static attn_status judge_item(const char *devices, const proto_item *item, judge_result *result, attn_error *err)
{
    judge *j = NULL;
    struct check_truth truth;
    bool computed, hurried = false;
    attn_status status = check_truth_compute(devices, item, &truth, &computed, err);
    const int64_t began_ns = clock_ns();
    if (status == ATTN_OK)
        status = judge_open(&item->problem, item->results, computed ? &truth.results : NULL, CHECK_SECONDS, &j, err);
    if (status != ATTN_OK) {
        check_truth_free(&truth);
        return status;
    }
    while (!judge_step(j)) {
        const double seconds = (double)(clock_ns() - began_ns) / 1e9;
        if (seconds > CHECK_SECONDS / 2 && !hurried) judge_hurry(j), hurried = true;
        if (seconds > CHECK_SECONDS && judge_has_verdict(j)) break;
    }
    judge_report(j, result);
    judge_close(j);
    check_truth_free(&truth);
    return ATTN_OK;
}

/* ---- Writing the report ------------------------------------------------------------------------------------------ */

static void print_tensors(const judge_result *r)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const judge_tensor *const t = &r->tensor[id];
        if (!(r->given >> id & 1)) continue;
        printf("  %s: %s, error %.3g, a right kernel has up to %.3g", attn_tensors[id].name,
               judge_verdict_name(t->verdict), t->max_abs, t->explained);
        if (t->wrong > 0) printf(", %lld of %lld elements are wrong", (long long)t->wrong, (long long)t->of);
        if (t->nan > 0) printf(", %lld are NaN", (long long)t->nan);
        printf("\n");
    }
}

static void print_element(const judge_element *e)
{
    printf("  %s[", attn_tensors[e->id].name);
    for (int a = 0; a < e->rank; a++) printf("%s%lld", a ? ", " : "", (long long)e->index[a]);
    printf("] is %.9g, should be %.9g\n", e->got, e->want);
}

static void print_words(const judge_result *r)
{
    printf("%s", judge_verdict_name(r->verdict));
    if (r->verdict == JUDGE_ROUNDING) printf(": the error is what the dtype can keep");
    if (r->rows_checked < r->rows_of)
        printf(" (%lld of %lld rows were checked)", (long long)r->rows_checked, (long long)r->rows_of);
    printf("\n");
    print_tensors(r);
    for (int n = 0; n < r->place_count && n < LINES_WHERE; n++)
        printf("  wrong in %s: %s\n", attn_tensors[r->place[n].id].name, r->place[n].what);
    for (int n = 0; n < r->worst_count && n < LINES_WORST && r->verdict == JUDGE_MISMATCH; n++)
        print_element(&r->worst[n]);
    for (int n = 0; n < r->explanation_count && n < LINES_REASONS; n++)
        printf("%s%s: %s (error %.3g, if so %.3g)\n  %s\n", n ? "or " : "", r->explanation[n].code,
               r->explanation[n].detail, r->explanation[n].now, r->explanation[n].if_so, r->explanation[n].fix);
    if (r->verdict == JUDGE_MISMATCH && r->explanation_count == 0) printf("no known mistake explains it\n");
}

static void print_json(const judge_result *r)
{
    struct text t = text_growing(MEMBERS_BYTES);
    for (int i = 0; i < REPORT_MEMBERS; i++) {
        text_printf(&t, "%s\"%s\":", i ? "," : "{", report_members[i].name);
        report_members[i].put(&t, r);
    }
    text_put_char(&t, '}');
    puts(t.at ? t.at : "");
    text_free(&t);
}

int check_command_main(int argc, char **argv)
{
    struct arguments a;
    struct memory memory = { 0 };
    attn_error err = { 0 };
    proto_call *call = NULL;
    char *header = NULL;
    size_t bytes, header_bytes = 0, data = 0;
    judge_result result;
    int status = EXIT_NOT_UNDERSTOOD;
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) return fputs(usage, stdout), 0;
    if (!read_arguments(argc, argv, &a)) return EXIT_USAGE_ERROR;
    char *const file = read_file(a.file, FILE_BYTES, &bytes);
    if (!file) return EXIT_NOT_UNDERSTOOD;
    if (a.members && !(header = merge_members(a.members, file, bytes, &header_bytes, &data))) goto out;
    if (parse(header, header_bytes, file + data, bytes - data, &memory, &call, &err) != ATTN_OK ||
        judge_item(a.devices, &call->items[0], &result, &err) != ATTN_OK) {
        (void)refuse(0, "%s: %s", a.file, err.text);
        goto out;
    }
    if (a.json) print_json(&result);
    else print_words(&result);
    status = result.verdict == JUDGE_MISMATCH ? EXIT_WRONG : 0;
out:
    proto_call_free(call);
    free(memory.memory);
    cJSON_free(header);
    free(file);
    return status;
}
