/* simd-bench: measures the vector functions of the CPU (kernels/cpu/simd.h) on one core. Each line is one table
 * (functions for one kind of processor), one compute type and one function.
 *
 *   simd-bench [--ms N] [--only WORD] [TABLE...]
 *
 * TABLE is portable, avx2, avx512, bf16 or amx; on arm64 portable, neon or neon_bf16. Default: all that this processor
 * runs. Each figure is the median of 15 timings of N milliseconds (default 20) of processor time. Operands lie in the
 * L2 cache, as those of a tile do in the kernels. "forward" and "backward" loop over the tiles of one head with 2048
 * keys, which are packed beforehand. They compute only products and the softmax or its gradient, so attention with
 * these tile sizes cannot be faster. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cpu/simd.h"

enum { TIMINGS = 15, KEYS = 2048 };

static double budget_ms = 20;
static const char *only;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct work {
    const struct simd *simd;
    const struct simd_type *type;
    int m, n, k; /* sizes of a matrix product; for other functions m and n are rows and columns */
    attn_dtype dtype;
    void *A, *B, *B2, *P, *X;
    float *C, *S, *dP, *drop;
    float m_[1024], l[1024], rescale[1024];
};

/* Returns the median time of a call, in seconds. */
static double measure(void (*kernel)(struct work *), struct work *w)
{
    double times[TIMINGS];
    int calls = 1;
    for (;;) {
        const double start = now();
        for (int i = 0; i < calls; i++) kernel(w);
        const double elapsed = now() - start;
        if (elapsed > budget_ms * 1e-3) break;
        calls = elapsed > budget_ms * 1e-4 ? (int)(calls * budget_ms * 1.1e-3 / elapsed) + 1 : calls * 8;
    }
    for (int t = 0; t < TIMINGS; t++) {
        const double start = now();
        for (int i = 0; i < calls; i++) kernel(w);
        times[t] = (now() - start) / calls;
    }
    qsort(times, TIMINGS, sizeof times[0], compare);
    return times[TIMINGS / 2];
}

static void report(const struct work *w, const char *what, const char *detail, double value, const char *unit)
{
    const char *type = w->type == w->simd->bf16     ? "bf16"
                       : w->type == w->simd->half   ? "half"
                       : w->type == w->simd->single ? "single"
                                                    : "f32";
    printf("%-9s %-6s %-16s %-22s %10.1f %s\n", w->simd->name, type, what, detail, value, unit);
    fflush(stdout);
}

static void gemm_set(struct work *w)
{
    w->type->gemm(w->m, w->n, w->k, w->A, simd_lda(w->type, w->k), w->B, simd_ldb(w->type, w->k), w->C,
                  simd_ld(w->n, 4), false, NULL);
}

static void gemm_add(struct work *w)
{
    w->type->gemm(w->m, w->n, w->k, w->A, simd_lda(w->type, w->k), w->B, simd_ldb(w->type, w->k), w->C,
                  simd_ld(w->n, 4), true, NULL);
}

static void gemm_rescale(struct work *w)
{
    w->type->gemm(w->m, w->n, w->k, w->A, simd_lda(w->type, w->k), w->B, simd_ldb(w->type, w->k), w->C,
                  simd_ld(w->n, 4), true, w->rescale);
}

static void exponential(struct work *w)
{
    w->simd->exp2(w->n, w->S, w->C);
}

static void softmax(struct work *w)
{
    const bool in_place = w->type->dtype == ATTN_F32;
    w->type->softmax(w->m, w->n, w->S, simd_ld(w->n, 4), 0.18f, w->m_, w->l, w->rescale, in_place ? w->S : w->P,
                     in_place ? simd_ld(w->n, 4) : simd_lda(w->type, w->n), NULL);
}

static void score_cap(struct work *w)
{
    const struct simd_score how = { .scale = 1e-30f, .softcap = 30 };
    w->simd->score(w->m, w->n, w->S, simd_ld(w->n, 4), &how);
}

static void score_mask(struct work *w)
{
    static int lo[1024], hi[1024];
    for (int r = 0; r < w->m; r++) hi[r] = w->n;
    const struct simd_score how = { .scale = 0.5f, .lo = lo, .hi = hi };
    w->simd->score(w->m, w->n, w->S, simd_ld(w->n, 4), &how);
}

static void gradient(struct work *w)
{
    const struct simd_gradient g = { .rows = w->m,
                                     .cols = w->n,
                                     .ld = simd_ld(w->n, 4),
                                     .S = w->S,
                                     .dP = w->dP,
                                     .c = 0.18f,
                                     .lse2 = w->m_,
                                     .delta = w->l,
                                     .P_b = w->B,
                                     .P_ldb = simd_ldb(w->type, w->m),
                                     .dS_b = w->B2,
                                     .dS_ldb = simd_ldb(w->type, w->m),
                                     .dS_a = w->P,
                                     .dS_lda = simd_lda(w->type, w->n) };
    w->type->gradient(&g);
}

static void pack_a(struct work *w)
{
    w->type->pack_a(w->m, w->n, w->X, w->dtype, w->n, w->A, simd_lda(w->type, w->n));
}
static void pack_at(struct work *w)
{
    w->type->pack_at(w->m, w->n, w->X, w->dtype, w->n, w->A, simd_lda(w->type, w->m));
}
static void pack_b(struct work *w)
{
    w->type->pack_b(w->m, w->n, w->X, w->dtype, w->n, w->B, simd_ldb(w->type, w->m));
}
static void pack_bt(struct work *w)
{
    w->type->pack_bt(w->m, w->n, w->X, w->dtype, w->n, w->B, simd_ldb(w->type, w->n));
}
static void dots(struct work *w)
{
    w->simd->dots(w->k, w->m, w->n, w->dP, w->n, w->X, w->dtype, w->n, w->C, w->m);
}
static void axpys(struct work *w)
{
    w->simd->axpys(w->k, w->m, w->n, w->drop, w->m, w->X, w->dtype, w->n, w->C, w->n);
}

/* Computes a forward of m queries over all KEYS keys, in tiles of n keys: S = Q K^T, softmax, O += P V. k is the head
 * size. */
static void forward(struct work *w)
{
    const struct simd_type *t = w->type;
    const int64_t lds = simd_ld(w->n, 4), ldp = simd_lda(t, w->n), ldv = simd_ldb(t, KEYS), ldk = simd_ldb(t, w->k),
                  e = simd_element_bytes(t);
    float *O = w->C;
    void *P = t->dtype == ATTN_F32 ? w->S : w->P;
    for (int r = 0; r < w->m; r++) w->m_[r] = -INFINITY, w->l[r] = 0;
    for (int j = 0; j < KEYS; j += w->n) {
        t->gemm(w->m, w->n, w->k, w->A, simd_lda(t, w->k), (char *)w->B + j / 32 * ldk * e, ldk, w->S, lds, false,
                NULL);
        const bool any = t->softmax(w->m, w->n, w->S, lds, 0.18f, w->m_, w->l, w->rescale, P, ldp, NULL);
        t->gemm(w->m, w->k, w->n, P, ldp, (char *)w->B2 + (int64_t)j * 32 * e, ldv, O, simd_ld(w->k, 4), j > 0,
                any ? w->rescale : NULL);
    }
}

/* Computes a backward of m queries over all KEYS keys, in tiles of n keys: five products and the gradient of the
 * scores. k is the head size. */
static void backward(struct work *w)
{
    const struct simd_type *t = w->type;
    const int64_t lds = simd_ld(w->n, 4), lda = simd_lda(t, w->k), ldat = simd_lda(t, w->m), ldbt = simd_ldb(t, w->k),
                  ldb = simd_ldb(t, w->n);
    const int64_t ldg = simd_ldb(t, w->m), e = simd_element_bytes(t), ldc = simd_ld(KEYS, 4);
    char *dS_b = (char *)w->B2, *P_b = dS_b + simd_b_bytes(t, w->n, ldg);
    struct simd_gradient g = { .rows = w->m,
                               .cols = w->n,
                               .ld = lds,
                               .S = w->S,
                               .dP = w->dP,
                               .c = 0.18f,
                               .lse2 = w->m_,
                               .delta = w->l,
                               .P_b = P_b,
                               .P_ldb = ldg,
                               .dS_b = dS_b,
                               .dS_ldb = ldg,
                               .dS_a = w->P,
                               .dS_lda = simd_lda(t, w->n) };
    float *dQ = w->drop, *dKt = w->C, *dVt = w->C + w->k * ldc;
    for (int j = 0; j < KEYS; j += w->n) {
        const char *K_bt = (char *)w->B + j / 32 * ldbt * e, *V_bt = K_bt;
        t->gemm(w->m, w->n, w->k, w->A, lda, K_bt, ldbt, w->S, lds, false, NULL);
        t->gemm(w->m, w->n, w->k, w->A, lda, V_bt, ldbt, w->dP, lds, false, NULL);
        t->gradient(&g);
        t->gemm(w->m, w->k, w->n, w->P, g.dS_lda, w->B, ldb, dQ, simd_ld(w->k, 4), true, NULL);
        t->gemm(w->k, w->n, w->m, w->A, ldat, P_b, ldg, dVt + j, ldc, true, NULL);
        t->gemm(w->k, w->n, w->m, w->A, ldat, dS_b, ldg, dKt + j, ldc, true, NULL);
    }
}

static bool wanted(const char *what)
{
    return !only || strstr(what, only);
}

static void bench_type(struct work *w)
{
    static const struct {
        const char *product;
        int m, n, k;
        void (*kernel)(struct work *);
    } products[] = {
        { "Q K^T", 64, 128, 64, gemm_set },
        { "Q K^T", 64, 512, 64, gemm_set },
        { "Q K^T", 128, 256, 64, gemm_set },
        { "Q K^T", 128, 256, 128, gemm_set },
        { "P V", 64, 64, 128, gemm_add },
        { "P V", 128, 64, 256, gemm_add },
        { "P V", 128, 128, 256, gemm_add },
        { "P V rescale", 128, 64, 256, gemm_rescale },
        { "P V rescale", 128, 128, 256, gemm_rescale },
        { "dO^T P", 64, 128, 128, gemm_add },
        { "dO^T P", 128, 256, 128, gemm_add },
        { "odd", 33, 100, 65, gemm_set },
    };
    static const struct {
        int m, n;
    } tiles[] = { { 32, 128 }, { 32, 256 }, { 32, 512 },  { 64, 64 },   { 64, 128 },  { 64, 256 },
                  { 64, 512 }, { 128, 64 }, { 128, 128 }, { 128, 256 }, { 128, 512 }, { 256, 256 } };
    static const struct {
        const char *name;
        void (*kernel)(struct work *);
    } packs[] = { { "pack_a", pack_a }, { "pack_at", pack_at }, { "pack_b", pack_b }, { "pack_bt", pack_bt } };
    char detail[64];
    for (size_t i = 0; i < sizeof products / sizeof products[0]; i++) {
        if (!wanted("gemm")) break;
        w->m = products[i].m, w->n = products[i].n, w->k = products[i].k;
        for (int r = 0; r < 1024; r++) w->rescale[r] = 0.99f;
        snprintf(detail, sizeof detail, "%d x %d x %d", w->m, w->n, w->k);
        report(w, products[i].product, detail, 2e-9 * w->m * w->n * w->k / measure(products[i].kernel, w), "GFLOP/s");
    }
    for (size_t i = 1; i < 5 && wanted("softmax"); i++) {
        w->m = tiles[i].m, w->n = tiles[i].n;
        for (int64_t x = 0; x < w->m * simd_ld(w->n, 4); x++)
            w->S[x] = (float)(x * 7919 % 1000) / 60 - 8, w->dP[x] = 0.01f;
        for (int r = 0; r < 1024; r++) w->m_[r] = -INFINITY, w->l[r] = 0;
        snprintf(detail, sizeof detail, "%d x %d", w->m, w->n);
        report(w, "softmax", detail, 1e-9 * w->m * w->n / measure(softmax, w), "G scores/s");
        for (int r = 0; r < 1024; r++) w->m_[r] = 5, w->l[r] = 0.01f;
        report(w, "gradient", detail, 1e-9 * w->m * w->n / measure(gradient, w), "G scores/s");
    }
    for (size_t i = 0; i < 4 && wanted("pack"); i++) {
        w->m = 256, w->n = 64,
        w->dtype = w->type == w->simd->half   ? ATTN_F16
                   : w->type == w->simd->bf16 ? ATTN_BF16
                                              : ATTN_F32;
        report(w, packs[i].name, "256 x 64, own dtype", 1e-9 * w->m * w->n / measure(packs[i].kernel, w),
               "G elements/s");
    }
    for (int D = 64; D <= 128; D *= 2)
        for (size_t i = 0; i < sizeof tiles / sizeof tiles[0]; i++) {
            w->m = tiles[i].m, w->n = tiles[i].n, w->k = D;
            snprintf(detail, sizeof detail, "%d x %d, D %d", w->m, w->n, D);
            if (wanted("forward"))
                report(w, "forward", detail, 4e-9 * w->m * KEYS * D / measure(forward, w), "GFLOP/s");
            for (int r = 0; r < 1024; r++) w->m_[r] = 5, w->l[r] = 0.01f;
            memset(w->C, 0, 4 * 2 * 128 * (size_t)simd_ld(KEYS, 4));
            memset(w->drop, 0, 4 * 256 * 160);
            if (wanted("backward"))
                report(w, "backward", detail, 10e-9 * w->m * KEYS * D / measure(backward, w), "GFLOP/s");
        }
}

static void bench_table(struct work *w)
{
    static const struct {
        const char *name;
        attn_dtype dtype;
        int bytes;
    } dtypes[] = {
        { "float32", ATTN_F32, 4 }, { "float16", ATTN_F16, 2 }, { "bfloat16", ATTN_BF16, 2 }, { "e4m3", ATTN_F8E4M3, 1 }
    };
    char detail[64];
    w->type = &w->simd->f32;
    w->n = 4096;
    for (int i = 0; i < w->n; i++) w->S[i] = -(float)(i % 100) / 9;
    if (wanted("exp2")) report(w, "exp2", "4096", 1e-9 * w->n / measure(exponential, w), "G/s");
    w->m = 128, w->n = 256;
    memset(w->S, 0, 4 * 128 * 512);
    if (wanted("score"))
        report(w, "score softcap", "128 x 256", 1e-9 * w->m * w->n / measure(score_cap, w), "G scores/s");
    if (wanted("score"))
        report(w, "score interval", "128 x 256", 1e-9 * w->m * w->n / measure(score_mask, w), "G scores/s");
    for (int big = 0; big < 2; big++)
        for (int nq = 1; nq <= 4; nq *= 4)
            for (size_t i = 0; i < 4; i++) {
                w->m = big ? 65536 : 512, w->n = 128, w->k = nq, w->dtype = dtypes[i].dtype;
                memset(w->X, 0, 65536 * 128 * 4);
                for (int64_t x = 0; x < 4 * 65536; x++) w->drop[x] = 0.5f;
                snprintf(detail, sizeof detail, "%d keys, %d q, %s", w->m, nq, dtypes[i].name);
                const double bytes = 1e-9 * w->m * w->n * dtypes[i].bytes;
                if (wanted("dots")) report(w, "dots", detail, bytes / measure(dots, w), "GB/s");
                if (wanted("axpys")) report(w, "axpys", detail, bytes / measure(axpys, w), "GB/s");
            }
    const struct simd_type *const types[] = { &w->simd->f32, w->simd->bf16, w->simd->half, w->simd->single };
    for (int i = 0; i < 4; i++) {
        w->type = types[i];
        if (w->type) bench_type(w);
    }
}

static void *area(size_t bytes)
{
    void *memory = aligned_alloc(64, bytes);
    if (!memory) {
        fprintf(stderr, "simd-bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(memory, 0, bytes);
    return memory;
}

int main(int argc, char **argv)
{
    static struct work w;
    int tables = 0;
    enum { AREA = 16 << 20 };
    w.A = area(AREA), w.B = area(AREA), w.B2 = area(AREA), w.P = area(AREA), w.X = area(65536 * 128 * 4);
    w.C = area(AREA), w.S = area(AREA), w.dP = area(AREA), w.drop = area(AREA);
    for (int i = 1; i <= argc; i++) {
        if (i < argc && strcmp(argv[i], "--ms") == 0 && i + 1 < argc) {
            budget_ms = atof(argv[++i]);
        } else if (i < argc && strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (i < argc || tables == 0) {
            for (int t = 0; simd_names[t]; t++) {
                if (i < argc && strcmp(argv[i], simd_names[t]) != 0) continue;
                w.simd = simd_find(simd_names[t]);
                if (w.simd) bench_table(&w);
                else printf("%-9s is not for this processor\n", simd_names[t]);
                tables++;
            }
        }
    }
    if (tables == 0) {
        fprintf(stderr, "usage: simd-bench [--ms N] [--only WORD] [portable|avx2|avx512|bf16|amx]...\n");
        return 2;
    }
    return 0;
}
