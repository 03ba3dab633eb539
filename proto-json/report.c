#include "report.h"

#include <math.h>

#include "kernels/attention.h"

void report_put_double(struct text *t, double x)
{
    if (isnan(x)) text_put_string(t, "\"NaN\"");
    else if (isinf(x)) text_put_string(t, x < 0 ? "\"-Infinity\"" : "\"Infinity\"");
    else text_printf(t, "%.9g", x);
}

static void put_quoted(struct text *t, const char *text)
{
    text_put_char(t, '"');
    text_put_json(t, text, JUDGE_TEXT);
    text_put_char(t, '"');
}

static void put_verdict(struct text *t, const judge_result *r)
{
    put_quoted(t, judge_verdict_name(r->verdict));
}

static void put_operation(struct text *t, const judge_result *r)
{
    put_quoted(t, r->op == ATTN_OP_FORWARD ? "forward" : "backward");
}

static void put_number(struct text *t, const char *before, double x)
{
    text_put_string(t, before);
    report_put_double(t, x);
}

static void put_errors(struct text *t, const judge_result *r)
{
    char before = '{';
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const judge_tensor *const tensor = &r->tensor[id];
        if (!(r->given >> id & 1)) continue;
        text_put_char(t, before);
        before = ',';
        put_quoted(t, attn_tensors[id].name);
        put_number(t, ":{\"max_abs\":", tensor->max_abs);
        put_number(t, ",\"relative\":", tensor->relative);
        put_number(t, ",\"explained\":", tensor->explained);
        put_number(t, ",\"limit\":", tensor->limit);
        text_printf(t, ",\"wrong\":%lld,\"of\":%lld,\"nan\":%lld}", (long long)tensor->wrong, (long long)tensor->of,
                    (long long)tensor->nan);
    }
    text_put_string(t, before == '{' ? "{}" : "}");
}

static void put_worst(struct text *t, const judge_result *r)
{
    text_put_char(t, '[');
    for (int n = 0; n < r->worst_count; n++) {
        const judge_element *const e = &r->worst[n];
        text_put_string(t, n ? ",{\"tensor\":" : "{\"tensor\":");
        put_quoted(t, attn_tensors[e->id].name);
        text_put_string(t, ",\"index\":[");
        for (int a = 0; a < e->rank; a++) text_printf(t, "%s%lld", a ? "," : "", (long long)e->index[a]);
        put_number(t, "],\"got\":", e->got);
        put_number(t, ",\"want\":", e->want);
        text_put_char(t, '}');
    }
    text_put_char(t, ']');
}

static void put_where(struct text *t, const judge_result *r)
{
    text_put_char(t, '[');
    for (int n = 0; n < r->place_count; n++) {
        const judge_place *const place = &r->place[n];
        text_put_string(t, n ? ",{\"tensor\":" : "{\"tensor\":");
        put_quoted(t, attn_tensors[place->id].name);
        text_put_string(t, ",\"what\":");
        put_quoted(t, place->what);
        text_printf(t, ",\"wrong\":%lld,\"of_wrong\":%lld}", (long long)place->wrong, (long long)place->of_wrong);
    }
    text_put_char(t, ']');
}

static void put_explanations(struct text *t, const judge_result *r)
{
    text_put_char(t, '[');
    for (int n = 0; n < r->explanation_count; n++) {
        const judge_explanation *const e = &r->explanation[n];
        const char *between = "";
        text_put_string(t, n ? ",{\"code\":" : "{\"code\":");
        put_quoted(t, e->code);
        if (e->partly) text_put_string(t, ",\"partly\":true");
        if (e->and_code) {
            text_put_string(t, ",\"and\":");
            put_quoted(t, e->and_code);
        }
        text_put_string(t, ",\"detail\":");
        put_quoted(t, e->detail);
        text_put_string(t, ",\"fix\":");
        put_quoted(t, e->fix);
        text_put_string(t, ",\"tensors\":[");
        for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
            if (!(e->tensors >> id & 1)) continue;
            text_put_string(t, between);
            put_quoted(t, attn_tensors[id].name);
            between = ",";
        }
        put_number(t, "],\"error_now\":", e->now);
        put_number(t, ",\"error_if_so\":", e->if_so);
        text_put_char(t, '}');
    }
    text_put_char(t, ']');
}

static void put_not_tried(struct text *t, const judge_result *r)
{
    text_put_char(t, '[');
    for (int n = 0; n < r->not_tried_count; n++) {
        if (n) text_put_char(t, ',');
        put_quoted(t, r->not_tried[n]);
    }
    text_put_char(t, ']');
}

static void put_rows(struct text *t, const judge_result *r)
{
    text_printf(t, "{\"checked\":%lld,\"of\":%lld,\"emulated\":%lld}", (long long)r->rows_checked,
                (long long)r->rows_of, (long long)r->rows_emulated);
}

const report_member report_members[REPORT_MEMBERS] = {
    { "verdict", put_verdict },     { "operation", put_operation }, { "errors", put_errors },
    { "worst", put_worst },         { "where", put_where },         { "explanations", put_explanations },
    { "not_tried", put_not_tried }, { "rows", put_rows },
};
