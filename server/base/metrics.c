/* metrics.c: counters, gauges and histograms, and the page /metrics that shows them.
 *
 * Each metric is a row of METRIC_MAP. It has a small hash table with one series for each set of label values. A slot of
 * the table changes only once, from NULL to a complete series (release store, under the mutex). A thread finds a series
 * without a lock (acquire load), and updates it with relaxed atomics. The page does not show all numbers at the same
 * moment, but a histogram's count on the page is the sum of its buckets. */
#include "server/base/metrics.h"

#include <assert.h>
#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "kernels/attention.h"
#include "text/text.h"
#include "server/base/limits.h"
#include "server/base/log.h"

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- The table of metrics ---------------------------------------------------------------------------------------- */

enum kind { COUNTER, GAUGE, SECONDS, SIZES };

static const struct row {
    const char *name;
    enum kind kind;
    const char *labels; /* names of the labels of a metric: "" or "a" or "a,b" */
    const char *help;
} rows[METRIC_COUNT] = {
#define X(id, name, kind, labels, help) [METRIC_##id] = { name, kind, labels, help },
    METRIC_MAP(X)
#undef X
};

/* Upper bounds of the buckets for seconds; +Inf follows. They double from 100 us, because small requests take less than
 * a millisecond. */
static const double seconds_bounds[] = { 0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.0256,
                                         0.0512, 0.1024, 0.2048, 0.4096, 0.8192, 1.6384, 3.2768, 6.5536, 13.1072 };
static const double sizes_bounds[] = { 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024 };

static const struct bounds {
    const double *at;
    int count;
} bounds_of[] = {
    [SECONDS] = { seconds_bounds, ARRAY_SIZE(seconds_bounds) }, [SIZES] = { sizes_bounds, ARRAY_SIZE(sizes_bounds) }
};

enum {
    /* entries of a metric's hash table: a power of two above METRICS_MAX_SERIES, so that every search ends at an empty
     * entry */
    SLOTS = 256,
    MAX_BUCKETS = 20,
};
static_assert((int)METRICS_MAX_SERIES < (int)SLOTS && (SLOTS & (SLOTS - 1)) == 0,
              "a full table would be searched forever");
static_assert(ARRAY_SIZE(seconds_bounds) < MAX_BUCKETS, "+Inf needs a bucket too");

/* ---- Series of metrics: one for each set of labels --------------------------------------------------------------- */

struct series {
    uint32_t hash;
    char label[2][METRICS_LABEL_BYTES];
    _Atomic double value; /* value of a counter or gauge, or sum of a histogram */
    /* counts of a histogram's MAX_BUCKETS buckets, not cumulative; other metrics have none */
    atomic_uint_fast64_t buckets[];
};

static _Atomic(struct series *) slots[METRIC_COUNT][SLOTS];
static int series_count[METRIC_COUNT]; /* number of series of each metric; guarded by the mutex */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool histogram(enum metric_id id)
{
    return rows[id].kind == SECONDS || rows[id].kind == SIZES;
}

static uint32_t hash_labels(const char *label0, const char *label1)
{
    uint32_t hash = text_hash(TEXT_HASH_BEGIN, label0, METRICS_LABEL_BYTES - 1);
    /* separates the labels with a byte that UTF-8 never has: otherwise ("ab", "") and ("a", "b") would have the same
     * hash */
    hash = text_hash(hash, "\xFF", 1);
    hash = text_hash(hash, label1, METRICS_LABEL_BYTES - 1);
    return hash ^ hash >> 15;
}

/* Returns the series with these labels. If there is none, returns NULL, and *slot becomes the index of the empty entry
 * in the hash table where the series belongs. */
static struct series *find(enum metric_id id, uint32_t hash, const char *label0, const char *label1, uint32_t *slot)
{
    for (uint32_t i = hash % SLOTS;; i = (i + 1) % SLOTS) {
        struct series *s = atomic_load_explicit(&slots[id][i], memory_order_acquire);
        if (s == NULL) {
            *slot = i;
            return NULL;
        }
        if (s->hash == hash && strncmp(s->label[0], label0, METRICS_LABEL_BYTES - 1) == 0 &&
            strncmp(s->label[1], label1, METRICS_LABEL_BYTES - 1) == 0)
            return s;
    }
}

/* Adds a series to the table of the metric. Call this with the mutex held. Returns NULL when out of memory. */
static struct series *add_series(enum metric_id id, uint32_t hash, const char *label0, const char *label1,
                                 uint32_t slot)
{
    struct series *s = calloc(1, sizeof *s + (histogram(id) ? MAX_BUCKETS * sizeof s->buckets[0] : 0));
    if (s == NULL) return NULL;
    s->hash = hash;
    snprintf(s->label[0], METRICS_LABEL_BYTES, "%s", label0);
    snprintf(s->label[1], METRICS_LABEL_BYTES, "%s", label1);
    series_count[id]++;
    atomic_store_explicit(&slots[id][slot], s, memory_order_release);
    return s;
}

static struct series *series_of(enum metric_id id, const char *label0, const char *label1)
{
    if (label0 == NULL) label0 = "";
    if (label1 == NULL) label1 = "";
    uint32_t slot, hash = hash_labels(label0, label1);
    struct series *s = find(id, hash, label0, label1, &slot);
    if (s != NULL) return s;

    pthread_mutex_lock(&lock);
    /* another thread may have added the series meanwhile */
    s = find(id, hash, label0, label1, &slot);
    if (s == NULL && series_count[id] < METRICS_MAX_SERIES - 1) s = add_series(id, hash, label0, label1, slot);
    else if (s == NULL) { /* the metric's last series, "other", counts all further label values */
        label0 = *label0 ? "other" : "";
        label1 = *label1 ? "other" : "";
        hash = hash_labels(label0, label1);
        s = find(id, hash, label0, label1, &slot);
        if (s == NULL) s = add_series(id, hash, label0, label1, slot);
    }
    pthread_mutex_unlock(&lock);
    return s;
}

static void add_double(_Atomic double *to, double amount)
{
    double old = atomic_load_explicit(to, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(to, &old, old + amount, memory_order_relaxed, memory_order_relaxed))
        continue;
}

void metrics_add(enum metric_id id, const char *label0, const char *label1, double amount)
{
    struct series *s = series_of(id, label0, label1);
    if (s != NULL) add_double(&s->value, amount);
}

void metrics_set(enum metric_id id, const char *label0, const char *label1, double value)
{
    struct series *s = series_of(id, label0, label1);
    if (s != NULL) atomic_store_explicit(&s->value, value, memory_order_relaxed);
}

void metrics_observe(enum metric_id id, const char *label0, double value)
{
    struct series *s = series_of(id, label0, NULL);
    if (s == NULL) return;
    const struct bounds *b = &bounds_of[rows[id].kind];
    int bucket = 0;
    while (bucket < b->count && !(value <= b->at[bucket])) bucket++; /* a NaN is counted in the bucket +Inf */
    atomic_fetch_add_explicit(&s->buckets[bucket], 1, memory_order_relaxed);
    add_double(&s->value, value);
}

double metrics_sum(enum metric_id id, const char *label0)
{
    double sum = 0;
    for (int i = 0; i < SLOTS; i++) {
        struct series *s = atomic_load_explicit(&slots[id][i], memory_order_acquire);
        if (s != NULL && (label0 == NULL || strcmp(s->label[0], label0) == 0))
            sum += atomic_load_explicit(&s->value, memory_order_relaxed);
    }
    return sum;
}

/* ---- Writing the page /metrics ----------------------------------------------------------------------------------- */

static void put_number(struct text *p, double value)
{
    if (isnan(value)) text_put_string(p, "NaN");
    else if (isinf(value)) text_put_string(p, value > 0 ? "+Inf" : "-Inf");
    else text_put_double(p, value);
}

static void put_label(struct text *p, const char *separator, const char *name, int name_length, const char *value)
{
    text_printf(p, "%s%.*s=\"", separator, name_length, name);
    for (; *value; value++) {
        if (*value == '\\' || *value == '"' || *value == '\n') text_put_char(p, '\\');
        text_put_char(p, *value == '\n' ? 'n' : *value);
    }
    text_put_char(p, '"');
}

/* Prints the labels of a series, such as {endpoint="forward",le="0.1"}, or nothing if there are none. `le` may be
 * NULL. */
static void put_labels(struct text *p, const struct row *row, const struct series *s, const char *le)
{
    const char *names = row->labels, *separator = "{";
    for (int i = 0; i < 2 && *names; i++) {
        const int length = (int)strcspn(names, ",");
        put_label(p, separator, names, length, s->label[i]);
        separator = ",";
        names += length + (names[length] == ',');
    }
    if (le != NULL) {
        put_label(p, separator, "le", 2, le);
        separator = ",";
    }
    if (*separator == ',') text_put_char(p, '}');
}

static void put_head(struct text *p, const char *name, const char *type, const char *help)
{
    text_printf(p, "# HELP %s %s.\n# TYPE %s %s\n", name, help, name, type);
}

static void put_value(struct text *p, double value)
{
    text_put_char(p, ' ');
    put_number(p, value);
    text_put_char(p, '\n');
}

static void put_histogram(struct text *p, const struct row *row, struct series *s)
{
    const struct bounds *b = &bounds_of[row->kind];
    uint64_t count = 0;
    for (int i = 0; i <= b->count; i++) {
        char bound[32];
        struct text le = text_in(bound, sizeof bound);
        put_number(&le, i < b->count ? b->at[i] : INFINITY);
        count += atomic_load_explicit(&s->buckets[i], memory_order_relaxed);
        text_printf(p, "%s_bucket", row->name);
        put_labels(p, row, s, bound);
        text_printf(p, " %llu\n", (unsigned long long)count);
    }
    text_printf(p, "%s_sum", row->name);
    put_labels(p, row, s, NULL);
    put_value(p, atomic_load_explicit(&s->value, memory_order_relaxed));
    text_printf(p, "%s_count", row->name);
    put_labels(p, row, s, NULL);
    text_printf(p, " %llu\n", (unsigned long long)count);
}

static int by_labels(const void *a, const void *b)
{
    const struct series *x = *(struct series *const *)a, *y = *(struct series *const *)b;
    const int first = strcmp(x->label[0], y->label[0]);
    return first != 0 ? first : strcmp(x->label[1], y->label[1]);
}

static void put_metric(struct text *p, enum metric_id id)
{
    static const char *const types[] = {
        [COUNTER] = "counter", [GAUGE] = "gauge", [SECONDS] = "histogram", [SIZES] = "histogram"
    };
    const struct row *row = &rows[id];
    struct series *found[SLOTS];
    size_t count = 0;
    for (int i = 0; i < SLOTS; i++) {
        struct series *s = atomic_load_explicit(&slots[id][i], memory_order_acquire);
        if (s != NULL) found[count++] = s;
    }
    if (count == 0) return;
    qsort(found, count, sizeof found[0], by_labels);
    put_head(p, row->name, types[row->kind], row->help);
    for (size_t i = 0; i < count; i++) {
        if (histogram(id)) put_histogram(p, row, found[i]);
        else {
            text_put_string(p, row->name);
            put_labels(p, row, found[i], NULL);
            put_value(p, atomic_load_explicit(&found[i]->value, memory_order_relaxed));
        }
    }
}

/* Reads the CPU time, the start time and the memory use of the process from /proc. Returns false if there is no
 * /proc. */
static bool read_stat(double *cpu_s, double *start_s, double *virtual_bytes, double *resident_bytes)
{
    char line[1024];
    FILE *f = fopen("/proc/self/stat", "re");
    size_t used = f != NULL ? fread(line, 1, sizeof line - 1, f) : 0;
    if (f != NULL) fclose(f);
    line[used] = '\0';
    /* the program's name in parentheses may contain any character, so the last parenthesis ends the name */
    const char *after = strrchr(line, ')');
    unsigned long long utime, stime, start, vsize, rss;
    if (after == NULL ||
        sscanf(after + 1,
               " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d %*d %*d %llu %llu %llu", &utime,
               &stime, &start, &vsize, &rss) != 5)
        return false;
    struct timespec now, boot;
    clock_gettime(CLOCK_REALTIME, &now);
    clock_gettime(CLOCK_BOOTTIME, &boot);
    const double tick = (double)sysconf(_SC_CLK_TCK);
    const double boot_time = ((double)now.tv_sec + (double)now.tv_nsec * 1e-9) -
                             ((double)boot.tv_sec + (double)boot.tv_nsec * 1e-9);
    *cpu_s = (double)(utime + stime) / tick;
    *start_s = floor((boot_time + (double)start / tick) * 100 + 0.5) / 100;
    *virtual_bytes = (double)vsize;
    *resident_bytes = (double)rss * (double)sysconf(_SC_PAGESIZE);
    return true;
}

static void put_process(struct text *p)
{
    double cpu_s, start_s, virtual_bytes, resident_bytes;
    struct {
        const char *name, *type, *help;
        double value;
    } numbers[6];
    int count = 0;
#define NUMBER(name_, type_, help_, value_) \
    do {                                    \
        numbers[count].name = name_;        \
        numbers[count].type = type_;        \
        numbers[count].help = help_;        \
        numbers[count++].value = value_;    \
    } while (0)
    if (read_stat(&cpu_s, &start_s, &virtual_bytes, &resident_bytes)) {
        NUMBER("process_cpu_seconds_total", "counter", "User and system CPU time", cpu_s);
        NUMBER("process_start_time_seconds", "gauge", "Start of the process since the Unix epoch", start_s);
        NUMBER("process_virtual_memory_bytes", "gauge", "Virtual memory", virtual_bytes);
        NUMBER("process_resident_memory_bytes", "gauge", "Resident memory", resident_bytes);
    }
    DIR *fds = opendir("/proc/self/fd");
    if (fds != NULL) {
        /* starts at -3, because the entries ".." and "." and the directory's own descriptor do not count */
        int open_fds = -3;
        while (readdir(fds) != NULL) open_fds++;
        closedir(fds);
        NUMBER("process_open_fds", "gauge", "Open file descriptors", open_fds);
    }
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        NUMBER("process_max_fds", "gauge", "Limit of open file descriptors", (double)files.rlim_cur);
#undef NUMBER
    for (int i = 0; i < count; i++) {
        put_head(p, numbers[i].name, numbers[i].type, numbers[i].help);
        text_put_string(p, numbers[i].name);
        put_value(p, numbers[i].value);
    }
}

static void list_backends(char text[METRICS_LABEL_BYTES])
{
    struct text list = text_in(text, METRICS_LABEL_BYTES);
    for (const char *const *b = attn_backends(); *b != NULL; b++) text_printf(&list, "%s%s", list.used ? "," : "", *b);
}

char *metrics_write(size_t *length)
{
    struct text p = text_growing(METRICS_PAGE_BYTES);
    char backends[METRICS_LABEL_BYTES];
    list_backends(backends);
    metrics_set(METRIC_BUILD_INFO, ATTND_VERSION, backends, 1);
    metrics_set(METRIC_LOG_DROPPED, NULL, NULL, (double)log_dropped());
    for (int id = 0; id < METRIC_COUNT; id++) {
        if (rows[id].labels[0] == '\0') series_of((enum metric_id)id, NULL, NULL);
        put_metric(&p, (enum metric_id)id);
    }
    put_process(&p);
    return text_take(&p, length);
}
