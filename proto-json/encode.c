/* encode.c: writes answers in any format, while they are sent. An answer is a list of text pieces and tensor pieces,
 * whose lengths are computed before the first byte is sent. Text pieces lie in one small buffer. A tensor piece is a
 * pointer to the tensor: a read of the piece writes base64 or numbers directly to the caller's buffer.
 *
 * The bytes of an answer do not depend on how many bytes each read takes. Reading gives exactly proto_encoder_length()
 * bytes. The encoder's memory does not grow with the tensors. */
#include "proto.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base64.h"
#include "encode.h"
#include "format.h"
#include "hints.h"
#include "numbers.h"
#include "report.h"
#include "text/text.h"

const char *const proto_stages[PROTO_STAGE_COUNT] = {
#define X(name) #name,
    PROTO_STAGE_MAP(X)
#undef X
};

struct piece {
    const attn_tensor *tensor; /* the tensor that this piece of the answer writes; NULL: the piece is text */
    encode_as as;
    size_t offset; /* where the text of this piece begins in the encoder's buffer, in bytes */
    uint64_t length;
};

enum {
    /* A token is one number of an array with the brackets and the comma before it, such as "]],[[-1.5". */
    TOKEN_BYTES = 2 * ATTN_MAX_RANK + 1 + NUMBERS_TEXT_MAX,
    /* TENSOR_BYTES: upper bound on the text for one output without its data; its shape has at most 168 bytes.
     * ITEM_BYTES: upper bound on the text for one problem without the tensors' data. */
    TENSOR_BYTES = 256,
    ITEM_BYTES = ENCODE_PROBLEM_BYTES + TENSOR_BYTES * ATTN_TENSOR_COUNT,
    /* upper bound in bytes on the report about a client's results (check request), including escapes */
    REPORT_BYTES = 64 << 10,
};

/* The text of one number in an array, with the brackets and the comma before it. After the last number there is one
 * more token, which has only the closing brackets. */
struct token {
    char text[TOKEN_BYTES];
    size_t length, taken;
};

struct proto_encoder {
    struct text text;
    size_t text_in_pieces;
    struct piece *pieces;
    size_t piece_count, piece_capacity;
    bool short_of_memory;

    uint64_t length; /* number of bytes in the first `measured` pieces of the answer */
    size_t measured;
    int64_t measured_element;

    size_t piece;
    uint64_t taken; /* how many bytes of the current piece (number `piece` of the answer) have been read */
    uint64_t read;
    int64_t element;
    struct token token;
};

/* ---- Making the list of pieces of an answer ---------------------------------------------------------------------- */

static void add_piece(proto_encoder *e, struct piece piece)
{
    if (e->piece_count == e->piece_capacity) {
        size_t capacity = e->piece_capacity ? 2 * e->piece_capacity : 16;
        struct piece *larger = realloc(e->pieces, capacity * sizeof *larger);
        if (!larger) {
            e->short_of_memory = true;
            return;
        }
        e->pieces = larger;
        e->piece_capacity = capacity;
    }
    e->pieces[e->piece_count++] = piece;
}

static void end_text(proto_encoder *e)
{
    const size_t begin = e->text_in_pieces, length = e->text.used - begin;
    e->text_in_pieces = e->text.used;
    if (length > 0) add_piece(e, (struct piece){ .offset = begin, .length = length });
}

struct text *encode_text(proto_encoder *encoder)
{
    return &encoder->text;
}

static bool is_numbers(const struct piece *piece)
{
    return piece->tensor && (piece->as == ENCODE_ARRAY || piece->as == ENCODE_LIST);
}

void encode_tensor(proto_encoder *e, const attn_tensor *tensor, encode_as as)
{
    struct piece piece = { .tensor = tensor, .as = as };
    int64_t bytes = 0;
    attn_shape_bytes(tensor->dtype, tensor->rank, tensor->shape, &bytes);
    if (as == ENCODE_BASE64) piece.length = BASE64_ENCODED(bytes);
    else if (as == ENCODE_BYTES) piece.length = (uint64_t)bytes;
    end_text(e);
    if (is_numbers(&piece) || piece.length > 0)
        add_piece(e, piece); /* the length of an array of numbers stays 0 until proto_encoder_measure() computes it */
}

/* Writes a short text of this program, such as the name of a device, in quotes. Characters that would need an escape
 * are left out. */
static void put_plain(struct text *t, const char *text)
{
    text_put_char(t, '"');
    while (*text) {
        size_t plain = 0;
        while (text[plain] >= 0x20 && text[plain] < 0x7f && text[plain] != '"' && text[plain] != '\\') plain++;
        text_put(t, text, plain);
        text += text[plain] ? plain + 1 : plain;
    }
    text_put_char(t, '"');
}

static void put_size(struct text *t, const char *name, int64_t size)
{
    text_put_string(t, name);
    text_put_number(t, (uint64_t)size);
}

static void put_merge_sizes(struct text *t, const proto_item *item)
{
    const attn_tensor *const out = &item->parts->at[0].out;
    const int heads = out->rank == 4 && item->problem.layout == ATTN_BHSD ? 1 : out->rank - 2;
    put_size(t, "{\"parts\":", item->parts->count);
    if (out->rank == 4) put_size(t, ",\"B\":", out->shape[0]);
    put_size(t, out->rank == 4 ? ",\"Sq\":" : ",\"total_q\":", out->shape[2 * out->rank - 5 - heads]);
    put_size(t, ",\"H\":", out->shape[heads]);
    put_size(t, ",\"Dv\":", out->shape[out->rank - 1]);
    text_put_char(t, '}');
}

/* Writes the sizes (B, H, Sq, ...) that the server has read from the shapes, so that a client can see a wrong
 * layout. */
static void put_sizes(struct text *t, const proto_item *item, const proto_result *result)
{
    if (item->parts) {
        put_merge_sizes(t, item);
        return;
    }
    const attn_dims d = attn_dims_of(&item->problem);
    const bool pages = item->problem.page_table.rank > 0, by_rows = d.packed && !pages && item->problem.k.rank == 4;
    int64_t Sk = d.Sk;
    for (int i = 0; i < result->length_count; i++)
        if (i == 0 || result->lengths[i] > Sk) Sk = result->lengths[i];
    put_size(t, d.packed ? "{\"sequences\":" : "{\"B\":", d.B);
    put_size(t, d.packed ? ",\"total_q\":" : ",\"Sq\":", d.Sq);
    put_size(t, d.packed && !pages && !by_rows ? ",\"total_k\":" : ",\"Sk\":", by_rows ? d.row_k : Sk);
    put_size(t, ",\"H\":", d.H);
    put_size(t, ",\"Hk\":", d.Hk);
    put_size(t, ",\"D\":", d.D);
    /* an observe request (statistics of probabilities) has no v and so no Dv */
    if (d.Dv > 0) put_size(t, ",\"Dv\":", d.Dv);
    text_put_char(t, '}');
}

static void put_count(struct text *t, double count)
{
    if (count < 0x1p63) text_put_number(t, (uint64_t)count);
    else text_printf(t, "%.17g", count);
}

static void put_tiles(struct text *t, const proto_item *item, const attn_counts *counts)
{
    put_size(t, "{\"size\":[", item->tile_size[0]);
    put_size(t, ",", item->tile_size[1]);
    text_put_string(t, "],\"skipped\":");
    put_count(t, counts->skipped);
    text_put_string(t, ",\"whole\":");
    put_count(t, counts->whole);
    text_put_string(t, ",\"partial\":");
    put_count(t, counts->partial);
    text_put_char(t, '}');
}

static void put_counted(struct text *t, proto_count_id which, const proto_item *item, const attn_counts *counts)
{
    const attn_dims d = attn_dims_of(&item->problem);
    const double D = (double)d.D, Dv = item->head_dim_v > 0 ? (double)item->head_dim_v : D;
    switch (which) {
    case PROTO_COUNT_pairs: put_count(t, counts->pairs); break;
    case PROTO_COUNT_flops_forward: put_count(t, 2 * counts->pairs * (D + Dv)); break;
    case PROTO_COUNT_flops_backward: put_count(t, 2 * counts->pairs * (3 * D + 2 * Dv)); break;
    default: put_tiles(t, item, counts); break;
    }
}

int encode_facts(const proto_item *item, const proto_result *result, struct encode_fact facts[ENCODE_FACTS])
{
    static const proto_stage written[] = { PROTO_STAGE_queue, PROTO_STAGE_copy_in, PROTO_STAGE_compute,
                                           PROTO_STAGE_copy_out };
    struct text t;
    int count = 0;
#define FACT(which) facts[count].name = which, t = text_in(facts[count].value, ENCODE_FACT_BYTES), count++
    for (int n = 0; n < PROTO_COUNTS; n++) {
        if (!(item->counts >> n & 1)) continue;
        FACT(proto_counts[n]);
        put_counted(&t, (proto_count_id)n, item, &result->counts);
    }
    for (int i = 0; i < REPORT_MEMBERS && result->report; i++) {
        FACT(report_members[i].name);
        report_members[i].put(&t, result->report);
    }
    if (item->problem.dropout_p > 0 && item->problem.op != ATTN_OP_OBSERVE && !result->report) {
        FACT("seed");
        text_put_number(&t, item->problem.seed);
    }
    if (result->verified) {
        FACT("verification");
        text_put_string(&t, "{\"max_abs\":");
        report_put_double(&t, result->verification.max_abs);
        text_put_string(&t, ",\"relative\":");
        report_put_double(&t, result->verification.relative);
        text_put_string(&t, ",\"rows\":");
        text_put_number(&t, (uint64_t)result->verification.rows);
        text_put_char(&t, '}');
    }
    if (*result->context) {
        FACT("context");
        put_plain(&t, result->context);
    }
    if (result->lengths) {
        FACT("lengths");
        for (int i = 0; i < result->length_count; i++) {
            text_put_char(&t, i ? ',' : '[');
            text_put_number(&t, (uint64_t)result->lengths[i]);
        }
        text_put_char(&t, ']');
    }
    if (item->problem.q.rank > 0 || item->parts) {
        FACT("sizes");
        put_sizes(&t, item, result);
    }
    if (item->hints) {
        FACT("hints");
        hints_put(&t, item->hints);
    }
    FACT("backend");
    put_plain(&t, result->backend);
    FACT("timing_us");
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        double us = result->timing_us[written[i]];
        if (written[i] == PROTO_STAGE_compute) us += result->timing_us[PROTO_STAGE_launch];
        /* outside these bounds, the conversion of the double to an integer would be undefined behaviour */
        uint64_t tenths = us > 0 && us < 1e15 ? (uint64_t)(us * 10 + 0.5) : 0;
        text_put_string(&t, i ? ",\"" : "{\"");
        text_put_string(&t, proto_stages[written[i]]);
        text_put_string(&t, "\":");
        text_put_number(&t, tenths / 10);
        text_put_char(&t, '.');
        text_put_number(&t, tenths % 10);
    }
    text_put_char(&t, '}');
#undef FACT
    return count;
}

/* ---- The public functions ---------------------------------------------------------------------------------------- */

attn_status proto_encoder_new(const proto_call *call, const proto_result *results, const char *request_id,
                              proto_encoder **encoder, attn_error *err)
{
    proto_encoder *e;
    *encoder = NULL;
    if (!call->envelope && call->items[0].error.status != ATTN_OK) {
        if (err) *err = call->items[0].error;
        return call->items[0].error.status;
    }
    e = calloc(1, sizeof *e);
    if (!e) return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to write the answer");
    const size_t each = ITEM_BYTES + (proto_operations[call->op].judges ? REPORT_BYTES : 0);
    size_t most = ((size_t)call->count + 1) * each;
    for (int i = 0; i < call->count; i++)
        if (call->items[i].parts) most += 2 * TENSOR_BYTES * (size_t)call->items[i].parts->count;
    e->text = text_growing(most);
    call->answer->write(e, call, results, request_id);
    end_text(e);
    if (e->short_of_memory || e->text.failure != TEXT_FINE) {
        proto_encoder_free(e);
        return attn_fail(err, ATTN_NO_MEMORY, "", "no memory to write the answer");
    }
    *encoder = e;
    return ATTN_OK;
}

static bool next_token(const struct piece *piece, int64_t element, struct token *token);

bool proto_encoder_measure(proto_encoder *e, int64_t elements)
{
    for (; e->measured < e->piece_count; e->measured++) {
        struct piece *piece = &e->pieces[e->measured];
        struct token token;
        while (is_numbers(piece) && next_token(piece, e->measured_element, &token)) {
            if (elements-- == 0) return false;
            piece->length += token.length;
            e->measured_element++;
        }
        e->measured_element = 0;
        e->length += piece->length;
    }
    return true;
}

uint64_t proto_encoder_length(proto_encoder *encoder)
{
    while (!proto_encoder_measure(encoder, INT64_MAX)) {
    }
    return encoder->length;
}

uint64_t proto_encoder_head_bytes(proto_encoder *encoder)
{
    uint64_t bytes = 0;
    (void)proto_encoder_length(encoder);
    for (const struct piece *piece = encoder->pieces; piece < encoder->pieces + encoder->piece_count; piece++) {
        if (piece->tensor && piece->as == ENCODE_BYTES) break;
        bytes += piece->length;
    }
    return bytes;
}

void proto_encoder_free(proto_encoder *encoder)
{
    if (!encoder) return;
    text_free(&encoder->text);
    free(encoder->pieces);
    free(encoder);
}

/* ---- Writing pieces into the caller's buffer --------------------------------------------------------------------- */

/* Writes element number `element` of an array, with the brackets and the comma before it. Behind the last element, it
 * writes the closing brackets. Returns false if the array has ended. An array without elements is written as [],
 * because a shape such as [2^40, 0] would need 2^40 pairs of brackets. */
static bool next_token(const struct piece *piece, int64_t element, struct token *token)
{
    const attn_tensor *const t = piece->tensor;
    const size_t bytes = attn_dtype_bytes(t->dtype);
    const int rank = piece->as == ENCODE_LIST ? 1 : t->rank;
    int64_t elements = 0, row = 1;
    int levels = 0; /* number of brackets that open, or close, at this element */
    char *p = token->text;
    token->length = token->taken = 0;
    attn_shape_elements(t->rank, t->shape, &elements);
    if (element > elements) return false;
    if (elements == 0) {
        *p++ = '[', *p++ = ']';
    } else {
        if (element == 0 || element == elements) levels = rank;
        else
            for (int a = rank - 1; a > 0 && element % (row *= t->shape[a]) == 0; a--) levels++;
        for (int i = 0; i < levels && element > 0; i++) *p++ = ']';
        if (element > 0 && element < elements) *p++ = ',';
        for (int i = 0; i < levels && element < elements; i++) *p++ = '[';
        if (element < elements) {
            size_t count = numbers_format(t->dtype, (const char *)t->data + (size_t)element * bytes, p);
            if (*p == '"' && piece->as == ENCODE_LIST) memmove(p, p + 1, count -= 2);
            p += count;
        }
    }
    token->length = (size_t)(p - token->text);
    return true;
}

static size_t read_array(proto_encoder *e, const struct piece *piece, char *to, size_t capacity)
{
    size_t done = 0;
    while (done < capacity) {
        size_t count = e->token.length - e->token.taken;
        if (count == 0) {
            if (!next_token(piece, e->element, &e->token)) break;
            e->element++;
            continue;
        }
        if (count > capacity - done) count = capacity - done;
        memcpy(to + done, e->token.text + e->token.taken, count);
        e->token.taken += count;
        done += count;
    }
    return done;
}

/* Writes at most `capacity` characters of a tensor's base64 text to `to`, from the character with index `taken` on. A
 * group of four characters that two reads share is encoded twice. */
static size_t read_base64(const struct piece *piece, uint64_t taken, char *to, size_t capacity)
{
    const uint8_t *bytes = piece->tensor->data;
    int64_t total = 0;
    uint64_t groups, first = taken / 4;
    attn_shape_bytes(piece->tensor->dtype, piece->tensor->rank, piece->tensor->shape, &total);
    if (taken % 4 || capacity < 4) {
        char group[4];
        const uint64_t rest = (uint64_t)total - first * 3;
        size_t count = 4 - taken % 4;
        base64_encode(bytes + first * 3, rest < 3 ? (size_t)rest : 3, group);
        if (count > capacity) count = capacity;
        memcpy(to, group + taken % 4, count);
        return count;
    }
    groups = (piece->length - taken) / 4;
    if (groups > capacity / 4) groups = capacity / 4;
    {
        const uint64_t rest = (uint64_t)total - first * 3;
        base64_encode(bytes + first * 3, rest < groups * 3 ? (size_t)rest : (size_t)groups * 3, to);
    }
    return (size_t)groups * 4;
}

size_t proto_encoder_read(proto_encoder *e, void *buffer, size_t capacity)
{
    char *to = buffer;
    size_t done = 0;
    /* computes the text length of each array of numbers; the loop below must know where each of these texts ends */
    (void)proto_encoder_length(e);
    while (done < capacity && e->piece < e->piece_count) {
        const struct piece *piece = &e->pieces[e->piece];
        size_t room = capacity - done, count = 0;
        if (piece->tensor && piece->as == ENCODE_BASE64) {
            count = read_base64(piece, e->taken, to + done, room);
        } else if (is_numbers(piece)) {
            count = read_array(e, piece, to + done, room);
        } else {
            const char *const from = piece->tensor ? piece->tensor->data : e->text.at + piece->offset;
            count = piece->length - e->taken < room ? (size_t)(piece->length - e->taken) : room;
            memcpy(to + done, from + e->taken, count);
        }
        done += count;
        e->taken += count;
        assert(e->taken <= piece->length && (count > 0 || piece->length == 0));
        if (e->taken == piece->length) {
            e->piece++;
            e->taken = 0;
            e->element = 0;
            e->token.length = e->token.taken = 0;
        }
    }
    e->read += done;
    assert(e->piece < e->piece_count || e->read == e->length);
    return done;
}
