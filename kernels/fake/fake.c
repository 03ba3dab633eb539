/* fake.c: the backend "fake": devices that behave like GPUs and fail by a script. It is only in test builds
 * (ATTN_FAKE); a released program does not contain it.
 *
 * The fake device shows its caller the same difficulties as a real device, in their worst form. It has memory of its
 * own: an allocation is full of NaN, and a pointer outside its allocations is an illegal address. It is asynchronous:
 * no command on a stream runs before the caller checks whether the stream is done. Tests thus fail where code frees,
 * reads or reuses a buffer too early. The kernels of the CPU backend compute the results. Errors are CUDA's error
 * codes, and kernels/cuda/common/errors.h says what each means. After a sticky error every call fails.
 *
 *   ATTN_FAKE_DEVICES=2                                     number of devices (default 1)
 *   ATTN_FAKE_READS_STAGING=1                               kernels may read and write staging memory
 *                                                           (attn_device_info)
 *   ATTN_FAKE_SCRIPT='0:launch.err=700@3,1:hold=/tmp/gate'  faults to produce (or attn_device_options.script)
 *
 * A script is a list, separated by commas, of [DEVICE:]FAULT[=VALUE][@N[+]]. The fault hits the N-th event of its kind
 * on this device (without DEVICE: on each device). Events are counted from 1. With + the fault hits the N-th event and
 * all later ones; without @N it hits every event. FAULT_MAP below lists the faults. A script that cannot be parsed is
 * refused when the device is opened.
 *
 * Only `delay` and `launch.slow` depend on time. `hold` stops the kernels of an event until a file is deleted, so that
 * a test decides the order of events. When such kernels start, the device appends a byte to the file, so that a test
 * can wait until they have started. The marks (time stamps) of a stream have the times at which a real device would
 * reach them: such a device starts each command as soon as it is queued and the previous one is done.
 *
 * Memory that another process lends (attn_device_import()) is an object of POSIX shared memory, so that a test can
 * write and read it. Its handle is the text "DEVICE/NAME", padded with NULs. Only the device may access it: while the
 * device runs no command the mapping is closed, and a read or write there raises SIGSEGV. */
#include <assert.h>
#include <ctype.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backend.h"
#include "kernels/cuda/common/errors.h"
#include "kernels/fake/truth.h"
#include "kernels/tiles.h"
#include "kernels/verify_lse.h"

/* One row per fault: id, name in scripts, type of the value that a script gives, kind of events that N counts (the
 * fault hits the N-th event), effect */
#define FAULT_MAP(X)                                                                                             \
    X(OPEN_ERR, "open.err", CODE, OPEN, "the device cannot be opened: CUDA's error CODE")                        \
    X(ALLOC_FAIL, "alloc.fail", NOTHING, ALLOC, "there is no device memory")                                     \
    X(IMPORT_ERR, "import.err", CODE, IMPORT, "memory of another process cannot be opened: CUDA's error CODE")   \
    X(RELEASE_HOLD, "release.hold", PATH, RELEASE, "it is not closed while there is a file of that name")        \
    X(PINNED_FAIL, "pinned.fail", NOTHING, PINNED, "there is no staging memory")                                 \
    X(COPY_ERR, "copy.err", CODE, COPY, "the copy fails when it is called")                                      \
    X(PEER_ERR, "peer.err", CODE, PEER, "the copy from another device fails when it is called")                  \
    X(LAUNCH_ERR, "launch.err", CODE, RUN, "the kernels fail when they are started")                             \
    X(LAUNCH_SLOW, "launch.slow", MILLISECONDS, RUN, "the call that starts the kernels takes that much longer")  \
    X(SYNC_ERR, "sync.err", CODE, RUN, "the kernels start, and fail when their stream is asked")                 \
    X(EVENT_NEVER, "event.never", NOTHING, RUN, "the kernels never end")                                         \
    X(DELAY, "delay", MILLISECONDS, RUN, "the kernels take that much longer")                                    \
    X(HOLD, "hold", PATH, RUN, "the kernels do not end while there is a file of that name")                      \
    X(PLAN_HOLD, "plan.hold", PATH, PLAN, "a plan is not made while there is a file of that name")               \
    X(SIZE_HOLD, "size.hold", PATH, SIZE, "attn_workspace() does not return while there is a file of that name") \
    X(NAN, "nan", NOTHING, RUN, "the outputs are NaN, and nobody says so")                                       \
    X(LEFT, "left", NOTHING, RUN, "rows are left out, and the outputs are NaN: see attn_stream_left_rows()")     \
    X(TRUTH_NONE, "truth.none", NOTHING, OPEN, "the device computes nothing in float64")                         \
    X(TRUTH_ERR, "truth.err", CODE, TRUTH, "a step of attn_truth_some() fails when it is started")               \
    X(TRUTH_HOLD, "truth.hold", PATH, TRUTH, "such a step does not end while there is a file of that name")      \
    X(ABORT, "abort", NOTHING, RUN, "the process aborts")                                                        \
    X(SEGV, "segv", NOTHING, RUN, "the process dies of SIGSEGV")                                                 \
    X(CALL_ERR, "call.err", CODE, CALL, "whatever call it is (of ALLOC, COPY, RUN, MARK, DONE), it fails")       \
    X(WALK_ERR, "walk.err", CODE, CALL, "the first call fails, then the second after that one, then the third, ...")

enum fault_id {
#define X(id, name, value, counts, what) FAULT_##id,
    FAULT_MAP(X)
#undef X
        FAULT_COUNT
};
enum value_kind { VALUE_NOTHING, VALUE_CODE, VALUE_MILLISECONDS, VALUE_PATH };
enum event {
    EVENT_OPEN,
    EVENT_ALLOC,
    EVENT_IMPORT,
    EVENT_RELEASE,
    EVENT_PINNED,
    EVENT_COPY,
    EVENT_PEER,
    EVENT_PLAN,
    EVENT_SIZE,
    EVENT_RUN,
    EVENT_TRUTH,
    EVENT_CALL,
    EVENT_COUNT
};

static const struct {
    const char *name;
    enum value_kind value;
    enum event counts;
} faults[FAULT_COUNT] = {
#define X(id, name, value, counts, what) { name, VALUE_##value, EVENT_##counts },
    FAULT_MAP(X)
#undef X
};

enum {
    MAX_DEVICES = 16,
    MAX_RULES = 32,
    STREAMS = 4, /* number of streams that the device reports */
    PATH_BYTES = 256,
};

struct rule {
    enum fault_id fault;
    int64_t number; /* value of the fault in the script: an error code, or milliseconds */
    char path[PATH_BYTES];
    int64_t first, last;
};

/* ---- Devices and streams ----------------------------------------------------------------------------------------- */

struct block {
    struct block *next;
    size_t bytes;
    char *memory;
};

struct lent {
    struct lent *next;
    char handle[ATTN_HANDLE_BYTES];
    int imports; /* how often the handle was imported; all imports share one mapping of the memory */
    size_t bytes;
    char *memory;
};

struct fake_device {
    attn_device base;
    attn_device *cpu; /* device of the backend "cpu", whose kernels compute the results */
    /* address of this struct itself, stored here because attn_capabilities.facts points to this member */
    struct fake_device *self;
    int rule_count;
    struct rule rules[MAX_RULES];
    int64_t memory_limit;
    bool reads_staging;

    pthread_mutex_t lock; /* protects the members `memory_used` to `lost` of this struct */
    int64_t memory_used;
    struct block *blocks;
    struct lent *lent;
    /* number of streams that are executing commands; while it is 0, memory that the test has lent to the device cannot
     * be read or written */
    int working;
    int64_t events[EVENT_COUNT];
    /* The fault walk.err makes the calls number 1, 3, 6, 10, ... fail. walk_next is the number of the next call that
     * fails. walk_step is the difference between walk_next and the number of the last call that failed. */
    int64_t walk_step, walk_next;
    /* code of the error that broke the device, so that every later call fails (a sticky error); 0: the device works */
    int lost;
};

enum command_kind {
    COMMAND_COPY,
    COMMAND_MOVE,
    COMMAND_RUN,
    COMMAND_LSE,
    COMMAND_TRUTH,
    COMMAND_COMPARE,
    COMMAND_MERGE,
    COMMAND_PEER,
    COMMAND_SUM,
    COMMAND_MARK
};

struct command {
    enum command_kind kind;
    void *to; /* address to which a command of kind COPY, PEER, MOVE, LSE or COMPARE writes */
    const void *from;
    size_t bytes;
    /* A command of kind COPY copies `rows` pieces of `bytes` bytes. The pitches are the distances in bytes between the
     * beginnings of neighbouring pieces. */
    size_t rows, to_pitch, from_pitch;
    attn_direction direction;
    /* Copies of the caller's structs, which the command owns. Commands of kind RUN, LSE, TRUTH and COMPARE have
     * problems; only commands of kind RUN have plans. */
    attn_problem *problems;
    attn_plan *plans;
    /* float64 results: commands of kind TRUTH compute them, commands of kind COMPARE read them (and write distances to
     * `to`) */
    attn_truth truth;
    int64_t head; /* index (b * H + h) of the next head that a command of kind TRUTH computes, one head per step */
    /* the rows whose lse a command of kind LSE computes: a copy of the caller's struct, which the command owns. The
     * results go to `to` */
    attn_lse_look *look;
    attn_merge_plan *merge;     /* the merge of a command of kind MERGE: a copy, which the command owns */
    struct fake_device *source; /* device from whose memory a command of kind PEER copies */
    attn_sum *sum;              /* the sum of a command of kind SUM: a copy, which the command owns */
    int count;
    void *workspace;
    bool nan, left;
    int64_t slow_ms;
    int slot;
    int64_t put_ns;
};

struct fake_stream {
    attn_stream base;
    attn_stream *cpu;
    struct command *commands;
    int count, room;
    /* The members from `never` to `hold` say why the stream does not execute its commands. `never`: the stream will not
     * execute any command again. */
    bool never;
    int fails; /* the CUDA error that the commands of the stream return; 0: none */
    int64_t until_ns;
    const char *hold;
    int64_t marks_ns[ATTN_MARKS];
    /* every_row: whether the run that is being queued must compute all rows (ATTN_EVERY_ROW); left_rows: whether a run
     * on the stream has left out rows since the last call of left_rows() */
    bool every_row, left_rows;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static struct fake_device *device_of(const attn_device *base)
{
    return (struct fake_device *)base;
}
static struct fake_stream *stream_of(attn_stream *base)
{
    return (struct fake_stream *)base;
}

/* ---- Scripts of the faults that the fake device makes ------------------------------------------------------------ */

static bool take_number(const char **at, int64_t *number)
{
    char *end;
    if (!isdigit((unsigned char)**at)) return false;
    *number = strtoll(*at, &end, 10);
    *at = end;
    return true;
}

static bool parse_rule(const char **script, int device, struct rule *rule, bool *mine)
{
    const char *at = *script, *digits = at;
    int64_t number;
    int fault = 0;
    *rule = (struct rule){ .first = 1, .last = INT64_MAX };
    *mine = true;
    if (take_number(&digits, &number) && *digits == ':') {
        *mine = number == device;
        at = digits + 1;
    }
    const size_t length = strcspn(at, "=@,");
    while (fault < FAULT_COUNT &&
           (strlen(faults[fault].name) != length || strncmp(at, faults[fault].name, length) != 0))
        fault++;
    if (fault == FAULT_COUNT) return false;
    rule->fault = (enum fault_id)fault;
    at += length;
    if ((*at == '=') != (faults[fault].value != VALUE_NOTHING)) return false;
    if (*at == '=') {
        at++;
        if (faults[fault].value == VALUE_PATH) {
            const size_t bytes = strcspn(at, "@,");
            if (bytes == 0 || bytes >= PATH_BYTES) return false;
            memcpy(rule->path, at, bytes);
            at += bytes;
        } else if (!take_number(&at, &rule->number)) return false;
    }
    if (*at == '@') {
        at++;
        if (!take_number(&at, &rule->first) || rule->first < 1) return false;
        rule->last = rule->first;
        if (*at == '+') {
            at++;
            rule->last = INT64_MAX;
        }
    }
    if (*at == ',') at++;
    else if (*at) return false;
    *script = at;
    return true;
}

static attn_status parse_script(const char *script, struct fake_device *device, attn_error *err)
{
    while (*script) {
        struct rule rule;
        bool mine;
        if (!parse_rule(&script, device->base.index, &rule, &mine))
            return attn_fail(err, ATTN_INVALID, "", "fake: nothing is known of '%.100s'", script);
        if (!mine) continue;
        if (device->rule_count == MAX_RULES)
            return attn_fail(err, ATTN_TOO_LARGE, "", "fake: more than %d faults", MAX_RULES);
        device->rules[device->rule_count++] = rule;
    }
    return ATTN_OK;
}

/* Returns the rule in the device's script of faults that applies to event number `number` of this fault; NULL: none.
 * The caller must hold device->lock. */
static const struct rule *rule_for(const struct fake_device *device, enum fault_id fault, int64_t number)
{
    for (int i = 0; i < device->rule_count; i++) {
        const struct rule *rule = &device->rules[i];
        if (rule->fault == fault && number >= rule->first && number <= rule->last) return rule;
    }
    return NULL;
}

/* ---- Failing calls ----------------------------------------------------------------------------------------------- */

enum { ERROR_MEMORY = 2, ERROR_INVALID_HANDLE = 400, ERROR_ILLEGAL_ADDRESS = 700 };

/* Returns the library's error for CUDA's error `code`. If the error is sticky (every later call fails), the function
 * also marks the device as lost. The caller must hold device->lock. */
static attn_status fail(struct fake_device *device, int code, const char *what, attn_error *err)
{
    const struct cuda_error_info info = cuda_error_of(code);
    if (info.sticky) device->lost = code;
    return attn_fail(err, info.status, "", "fake: %s: %s (error %d)", what, info.name, code);
}

/* Counts a call and checks whether it must fail: because the device is lost, or because a fault of the script applies
 * to this call. Every call that can fail begins with enter(), while it holds device->lock. */
static attn_status enter(struct fake_device *device, const char *what, attn_error *err)
{
    if (device->lost)
        return attn_fail(err, ATTN_DEVICE_LOST, "", "fake:%d was lost to an earlier error", device->base.index);
    const int64_t call = ++device->events[EVENT_CALL];
    const struct rule *rule = rule_for(device, FAULT_CALL_ERR, call);
    if (!rule && call == device->walk_next && (rule = rule_for(device, FAULT_WALK_ERR, 1)) != NULL)
        device->walk_next = call + ++device->walk_step;
    return rule ? fail(device, (int)rule->number, what, err) : ATTN_OK;
}

/* ---- Memory of the device ---------------------------------------------------------------------------------------- */

/* Returns whether the `bytes` bytes at `memory` lie in memory of this device: in an allocation that has not been freed,
 * or in imported memory. The caller must hold device->lock. */
static bool owns(const struct fake_device *device, const void *memory, size_t bytes)
{
    for (const struct block *b = device->blocks; b; b = b->next)
        if ((const char *)memory >= b->memory && (const char *)memory <= b->memory + b->bytes)
            return bytes <= (size_t)(b->memory + b->bytes - (const char *)memory);
    for (const struct lent *l = device->lent; l; l = l->next)
        if ((const char *)memory >= l->memory && (const char *)memory <= l->memory + l->bytes)
            return bytes <= (size_t)(l->memory + l->bytes - (const char *)memory);
    return false;
}

static struct block *new_block(size_t bytes)
{
    struct block *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    b->bytes = bytes;
    b->memory = aligned_alloc(64, bytes / 64 * 64 + 64);
    if (b->memory) {
        /* NaN in every floating dtype, so that a read of memory that was never written shows in the results */
        memset(b->memory, 0xff, bytes);
        return b;
    }
    free(b);
    return NULL;
}

static attn_status device_alloc(attn_device *base, size_t bytes, void **memory, attn_error *err)
{
    struct fake_device *device = device_of(base);
    struct block *b = NULL;
    *memory = NULL;
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "alloc", err);
    if (status == ATTN_OK && rule_for(device, FAULT_ALLOC_FAIL, ++device->events[EVENT_ALLOC]))
        status = fail(device, ERROR_MEMORY, "alloc", err);
    if (status == ATTN_OK &&
        (bytes > (size_t)device->memory_limit || (int64_t)bytes > device->memory_limit - device->memory_used))
        status = attn_fail(err, ATTN_NO_MEMORY, "", "fake:%d: %zu bytes are not left of %lld", base->index, bytes,
                           (long long)device->memory_limit);
    if (status == ATTN_OK && (b = new_block(bytes)) == NULL) status = fail(device, ERROR_MEMORY, "alloc", err);
    if (b) {
        b->next = device->blocks;
        device->blocks = b;
        device->memory_used += (int64_t)bytes;
        *memory = b->memory;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

static void device_free(attn_device *base, void *memory)
{
    struct fake_device *device = device_of(base);
    struct block *freed = NULL;
    pthread_mutex_lock(&device->lock);
    for (struct block **link = &device->blocks; *link; link = &(*link)->next) {
        if ((*link)->memory != memory) continue;
        freed = *link;
        *link = freed->next;
        device->memory_used -= (int64_t)freed->bytes;
        assert(device->memory_used >= 0 && (device->blocks || device->memory_used == 0));
        break;
    }
    pthread_mutex_unlock(&device->lock);
    if (!freed) abort(); /* the caller frees memory that it did not allocate */
    free(freed->memory);
    free(freed);
}

static attn_status staging_alloc(attn_device *base, size_t bytes, void **memory, attn_error *err)
{
    struct fake_device *device = device_of(base);
    attn_status status = ATTN_OK;
    *memory = NULL;
    pthread_mutex_lock(&device->lock);
    if (device->lost)
        status = attn_fail(err, ATTN_DEVICE_LOST, "", "fake:%d was lost to an earlier error", base->index);
    else if (rule_for(device, FAULT_PINNED_FAIL, ++device->events[EVENT_PINNED]))
        status = fail(device, ERROR_MEMORY, "pin", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    *memory = aligned_alloc(64, bytes / 64 * 64 + 64);
    return *memory ? ATTN_OK : attn_fail(err, ATTN_NO_MEMORY, "", "fake: no staging memory");
}

static void staging_free(attn_device *device, void *memory, size_t bytes)
{
    (void)device, (void)bytes;
    free(memory);
}

/* ---- Memory of other processes ----------------------------------------------------------------------------------- */

/* Returns the error for a handle that cannot be imported. As for real GPUs (device.cu), a handle that the driver
 * refuses is the client's fault, unless the device is lost. */
static attn_status refuse_import(struct fake_device *device, int code, attn_error *err)
{
    if (cuda_error_of(code).sticky || code == ERROR_MEMORY) return fail(device, code, "import", err);
    return attn_fail(err, ATTN_INVALID, "", "fake: import: %s (error %d)", cuda_error_of(code).name, code);
}

/* Maps the shared memory that the handle names. Returns NULL if there is no such memory. The caller must hold
 * device->lock. */
static struct lent *map_lent(const char *handle, const char *name)
{
    struct lent *const l = calloc(1, sizeof *l);
    struct stat st;
    const int fd = l ? shm_open(name, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd >= 0 && fstat(fd, &st) == 0 && st.st_size > 0) {
        memcpy(l->handle, handle, sizeof l->handle);
        l->bytes = (size_t)st.st_size;
        l->memory = mmap(NULL, l->bytes, PROT_NONE, MAP_SHARED, fd, 0);
        if (l->memory == MAP_FAILED) l->memory = NULL;
    }
    if (fd >= 0) close(fd);
    if (l && l->memory) return l;
    free(l);
    return NULL;
}

static void drop_lent(struct lent **link)
{
    struct lent *const l = *link;
    *link = l->next;
    munmap(l->memory, l->bytes);
    free(l);
}

static attn_status import_lent(struct fake_device *device, const char *handle, size_t bytes, void **memory,
                               attn_error *err)
{
    const char *at = handle;
    int64_t index;
    struct lent **link = &device->lent;
    const struct rule *const rule = rule_for(device, FAULT_IMPORT_ERR, ++device->events[EVENT_IMPORT]);
    if (rule) return refuse_import(device, (int)rule->number, err);
    if (!memchr(handle, '\0', ATTN_HANDLE_BYTES) || !take_number(&at, &index) || *at++ != '/')
        return refuse_import(device, ERROR_INVALID_HANDLE, err);
    if (index != device->base.index)
        return attn_fail(err, ATTN_INVALID, "", "fake: the memory is of device %lld, not of device %d",
                         (long long)index, device->base.index);
    while (*link && memcmp((*link)->handle, handle, ATTN_HANDLE_BYTES) != 0) link = &(*link)->next;
    if (!*link && !(*link = map_lent(handle, at))) return refuse_import(device, ERROR_INVALID_HANDLE, err);
    if (device->working && mprotect((*link)->memory, (*link)->bytes, PROT_READ | PROT_WRITE) != 0) abort();
    if (bytes > (*link)->bytes) {
        const size_t have = (*link)->bytes;
        if ((*link)->imports == 0) drop_lent(link);
        return attn_fail(err, ATTN_INVALID, "", "fake: the allocation has %zu bytes, not %zu", have, bytes);
    }
    (*link)->imports++;
    *memory = (*link)->memory;
    return ATTN_OK;
}

static attn_status import_memory(attn_device *base, const uint8_t *handle, size_t bytes, void **memory, attn_error *err)
{
    struct fake_device *device = device_of(base);
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "import", err);
    if (status == ATTN_OK) status = import_lent(device, (const char *)handle, bytes, memory, err);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static void release_import(attn_device *base, void *memory)
{
    struct fake_device *device = device_of(base);
    pthread_mutex_lock(&device->lock);
    const struct rule *rule = rule_for(device, FAULT_RELEASE_HOLD, ++device->events[EVENT_RELEASE]);
    pthread_mutex_unlock(&device->lock);
    while (rule && access(rule->path, F_OK) == 0) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    pthread_mutex_lock(&device->lock);
    struct lent **link = &device->lent;
    while (*link && (*link)->memory != memory) link = &(*link)->next;
    if (!*link) abort(); /* the caller releases memory that it did not import */
    if (--(*link)->imports == 0) drop_lent(link);
    pthread_mutex_unlock(&device->lock);
}

/* Pins nothing, because the fake device copies by memcpy(). The script of faults can make the call fail. */
static attn_status pin(attn_device *base, void *memory, size_t bytes, attn_error *err)
{
    struct fake_device *const device = device_of(base);
    (void)memory, (void)bytes;
    pthread_mutex_lock(&device->lock);
    const attn_status status = enter(device, "pin", err);
    pthread_mutex_unlock(&device->lock);
    return status;
}

static void unpin(attn_device *base, void *memory)
{
    (void)base, (void)memory;
}

/* Makes lent memory (imported from another process) accessible when the first stream starts to work, and inaccessible
 * when the last stream stops. The caller must hold device->lock. */
static void open_lent(struct fake_device *device, bool open)
{
    const int before = device->working;
    device->working += open ? 1 : -1;
    if (before > 0 && device->working > 0) return;
    for (const struct lent *l = device->lent; l; l = l->next)
        if (mprotect(l->memory, l->bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) abort();
}

/* ---- Opening, describing and closing a device -------------------------------------------------------------------- */

static int count_devices(void)
{
    const char *text = getenv("ATTN_FAKE_DEVICES");
    const int count = text && *text ? atoi(text) : 1;
    return count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
}

static void close_device(attn_device *base)
{
    struct fake_device *device = device_of(base);
    attn_backend_cpu.close(device->cpu);
    while (device->blocks) {
        struct block *next = device->blocks->next;
        free(device->blocks->memory);
        free(device->blocks);
        device->blocks = next;
    }
    if (device->lent) abort(); /* the caller has not released all imported memory */
    pthread_mutex_destroy(&device->lock);
    free(device);
}

static attn_status open_device(int index, const attn_device_options *options, attn_device **out, attn_error *err)
{
    const attn_device_options own = { .threads = options->threads };
    const char *script = options->script ? options->script : getenv("ATTN_FAKE_SCRIPT");
    struct fake_device *device = calloc(1, sizeof *device);
    *out = NULL;
    if (!device) return attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a device");
    device->base.backend = &attn_backend_fake;
    device->base.index = index;
    device->memory_limit = options->memory_bytes > 0 ? options->memory_bytes : INT64_C(1) << 30;
    device->walk_step = device->walk_next = 1;
    device->reads_staging = getenv("ATTN_FAKE_READS_STAGING") != NULL;
    attn_status status = script ? parse_script(script, device, err) : ATTN_OK;
    const struct rule *rule = rule_for(device, FAULT_OPEN_ERR, 1);
    if (status == ATTN_OK && rule) status = fail(device, (int)rule->number, "open", err);
    if (status == ATTN_OK) status = attn_backend_cpu.open(0, &own, &device->cpu, err);
    if (status != ATTN_OK) {
        free(device);
        return status;
    }
    device->self = device;
    device->base.can = device->cpu->can;
    device->base.can.facts = &device->self;
    device->base.can.facts_bytes = sizeof device->self;
    pthread_mutex_init(&device->lock, NULL);
    *out = &device->base;
    return ATTN_OK;
}

static void describe(const attn_device *base, attn_device_info *info)
{
    struct fake_device *device = device_of(base);
    info->backend = "fake";
    snprintf(info->name, sizeof info->name, "fake:%d", base->index);
    snprintf(info->description, sizeof info->description, "a device of the tests, %d scripted fault%s",
             device->rule_count, device->rule_count == 1 ? "" : "s");
    attn_device_info cpu = { 0 };
    attn_backend_cpu.describe(device->cpu, &cpu);
    info->fastest_flops = cpu.fastest_flops;
    info->fastest_scores = cpu.fastest_scores;
    info->peak_flops = 1e12;
    info->peak_bytes = 1e11;
    snprintf(info->peak_from, sizeof info->peak_from, "what the tests say");
    info->units = cpu.units;
    info->streams = STREAMS;
    info->reads_staging = device->reads_staging;
    info->memory_total = info->memory_limit = device->memory_limit;
    pthread_mutex_lock(&device->lock);
    info->memory_used = device->memory_used;
    pthread_mutex_unlock(&device->lock);
}

static struct fake_device *device_of_facts(const attn_capabilities *can)
{
    return *(struct fake_device *const *)can->facts;
}

/* Counts an event of the fake device. If the test's script lists `fault` for this event, the function waits until the
 * file that the script names has been deleted. Any thread may call this function. */
static void hold(struct fake_device *device, enum fault_id fault, enum event event)
{
    pthread_mutex_lock(&device->lock);
    const struct rule *rule = rule_for(device, fault, ++device->events[event]);
    pthread_mutex_unlock(&device->lock);
    while (rule && access(rule->path, F_OK) == 0) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
}

static bool plan(const attn_capabilities *can, attn_plan *planned)
{
    (void)planned;
    hold(device_of_facts(can), FAULT_PLAN_HOLD, EVENT_PLAN);
    return true;
}

static attn_status workspace_bytes(const attn_capabilities *can, const attn_plan *plans, int count, size_t *bytes,
                                   attn_error *err)
{
    struct fake_device *const device = device_of_facts(can);
    hold(device, FAULT_SIZE_HOLD, EVENT_SIZE);
    return attn_backend_cpu.workspace(&device->cpu->can, plans, count, bytes, err);
}

/* ---- Streams, and the commands on them --------------------------------------------------------------------------- */

static void command_clear(struct command *c)
{
    free(c->problems);
    free(c->plans);
    free(c->look);
    free(c->merge);
    free(c->sum);
}

static void forget_commands(struct fake_stream *stream)
{
    for (int i = 0; i < stream->count; i++) command_clear(&stream->commands[i]);
    stream->count = 0;
    stream->never = false;
    stream->fails = 0;
    stream->hold = NULL;
    stream->until_ns = 0;
}

static attn_status stream_open(attn_device *base, attn_stream **out, attn_error *err)
{
    struct fake_stream *stream = calloc(1, sizeof *stream);
    *out = NULL;
    if (!stream) return attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a stream");
    stream->base.device = base;
    const attn_status status = attn_backend_cpu.stream_open(device_of(base)->cpu, &stream->cpu, err);
    if (status != ATTN_OK) {
        free(stream);
        return status;
    }
    *out = &stream->base;
    return ATTN_OK;
}

static void stream_close(attn_stream *base)
{
    struct fake_stream *stream = stream_of(base);
    forget_commands(stream);
    free(stream->commands);
    attn_backend_cpu.stream_close(stream->cpu);
    free(stream);
}

static attn_status append(struct fake_stream *stream, struct command command, attn_error *err)
{
    if (stream->count == stream->room) {
        const int room = stream->room ? 2 * stream->room : 64;
        struct command *wider = realloc(stream->commands, (size_t)room * sizeof *wider);
        if (!wider) return attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a command");
        stream->commands = wider;
        stream->room = room;
    }
    command.put_ns = now_ns();
    stream->commands[stream->count++] = command;
    return ATTN_OK;
}

static attn_status copy_rows(attn_stream *base, const attn_rows *rows, attn_direction direction, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "copy", err);
    const struct rule *rule = status == ATTN_OK ? rule_for(device, FAULT_COPY_ERR, ++device->events[EVENT_COPY]) : NULL;
    if (rule) status = fail(device, (int)rule->number, "copy", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    return append(stream_of(base),
                  (struct command){ .kind = COMMAND_COPY,
                                    .to = rows->to,
                                    .from = rows->from,
                                    .bytes = rows->width,
                                    .rows = rows->count,
                                    .to_pitch = rows->to_pitch,
                                    .from_pitch = rows->from_pitch,
                                    .direction = direction },
                  err);
}

static attn_status copy(attn_stream *base, void *to, const void *from, size_t bytes, attn_direction direction,
                        attn_error *err)
{
    return copy_rows(base, &(attn_rows){ to, from, bytes, bytes, bytes, 1 }, direction, err);
}

static attn_status moves(attn_stream *base, const attn_move *list, int64_t count, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "moves", err);
    pthread_mutex_unlock(&device->lock);
    for (int64_t i = 0; i < count && status == ATTN_OK; i++)
        status = append(
            stream_of(base),
            (struct command){ .kind = COMMAND_MOVE, .to = list[i].to, .from = list[i].from, .bytes = list[i].bytes },
            err);
    return status;
}

static int lost_code(struct fake_device *device)
{
    pthread_mutex_lock(&device->lock);
    const int lost = device->lost;
    pthread_mutex_unlock(&device->lock);
    return lost;
}

static attn_status copy_peer(attn_stream *base, void *to, const attn_device *other, const void *from, size_t bytes,
                             attn_error *err)
{
    struct fake_device *device = device_of(base->device), *source = device_of((attn_device *)other);
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "copy", err);
    const struct rule *rule = status == ATTN_OK ? rule_for(device, FAULT_PEER_ERR, ++device->events[EVENT_PEER]) : NULL;
    if (rule) status = fail(device, (int)rule->number, "copy", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    if (lost_code(source))
        return attn_fail(err, ATTN_CANCELLED, "", "fake:%d was lost to an earlier error", other->index);
    return append(stream_of(base),
                  (struct command){ .kind = COMMAND_PEER, .to = to, .from = from, .bytes = bytes, .source = source },
                  err);
}

/* Appends a byte to the file at `path`, if the file exists. The byte tells a test that the kernels have started. They
 * do not end before the test has deleted the file. */
static void tell_test(const char *path)
{
    const int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0) return;
    dprintf(fd, "+");
    close(fd);
}

/* Produces the faults that the script lists for this launch (of problems, or of the kernel that adds up the parts of a
 * sum). The caller must hold device->lock. */
static attn_status meet_faults(struct fake_device *device, struct fake_stream *stream, struct command *command,
                               attn_error *err)
{
    const int64_t n = ++device->events[EVENT_RUN];
    const struct rule *rule;
    if (rule_for(device, FAULT_ABORT, n)) abort();
    if (rule_for(device, FAULT_SEGV, n)) {
        /* with the default action, SIGSEGV kills the process without a sanitizer's report */
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if ((rule = rule_for(device, FAULT_LAUNCH_ERR, n)) != NULL) return fail(device, (int)rule->number, "launch", err);
    if ((rule = rule_for(device, FAULT_SYNC_ERR, n)) != NULL) stream->fails = (int)rule->number;
    if (rule_for(device, FAULT_EVENT_NEVER, n)) stream->never = true;
    if ((rule = rule_for(device, FAULT_HOLD, n)) != NULL) {
        stream->hold = rule->path;
        tell_test(rule->path);
    }
    if ((rule = rule_for(device, FAULT_LAUNCH_SLOW, n)) != NULL) command->slow_ms = rule->number;
    if ((rule = rule_for(device, FAULT_DELAY, n)) != NULL) stream->until_ns = now_ns() + rule->number * 1000000;
    command->left = rule_for(device, FAULT_LEFT, n) != NULL && !stream->every_row;
    command->nan = rule_for(device, FAULT_NAN, n) != NULL || command->left;
    return ATTN_OK;
}

static attn_status run(attn_stream *base, const attn_plan *plans, int count, void *workspace, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    struct command command = { .kind = COMMAND_RUN, .count = count, .workspace = workspace };
    if (attn_is_cancelled(base->cancel))
        /* the run has not started yet; like a GPU, the device does not stop a run that has started */
        return attn_given_up(err);
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "launch", err);
    if (status == ATTN_OK) status = meet_faults(device, stream_of(base), &command, err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    nanosleep(&(struct timespec){ command.slow_ms / 1000, command.slow_ms % 1000 * 1000000 }, NULL);
    command.problems = malloc((size_t)count * sizeof *command.problems);
    command.plans = malloc((size_t)count * sizeof *command.plans);
    if (command.problems && command.plans) {
        for (int n = 0; n < count; n++) {
            command.problems[n] = *plans[n].problem;
            command.plans[n] = plans[n];
            command.plans[n].problem = &command.problems[n];
        }
        status = append(stream_of(base), command, err);
    } else status = attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for %d problems", count);
    if (status != ATTN_OK) command_clear(&command);
    return status;
}

static attn_status sum(attn_stream *base, const attn_sum *parts, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    struct command command = { .kind = COMMAND_SUM };
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "sum", err);
    if (status == ATTN_OK) status = meet_faults(device, stream_of(base), &command, err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    command.sum = malloc(sizeof *command.sum);
    if (!command.sum) return attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a sum");
    *command.sum = *parts;
    status = append(stream_of(base), command, err);
    if (status != ATTN_OK) command_clear(&command);
    return status;
}

static attn_status merge(attn_stream *base, const attn_merge_plan *plan, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    struct command command = { .kind = COMMAND_MERGE };
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "merge", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    command.merge = malloc(sizeof *command.merge);
    if (!command.merge) return attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a merge");
    *command.merge = *plan;
    status = append(stream_of(base), command, err);
    if (status != ATTN_OK) command_clear(&command);
    return status;
}

static attn_status run_some(attn_stream *base, const attn_plan *plans, int count, void *workspace, int64_t *step,
                            attn_error *err)
{
    struct fake_stream *stream = stream_of(base);
    stream->every_row = *step == ATTN_EVERY_ROW;
    *step = ATTN_NO_MORE_STEPS;
    return run(base, plans, count, workspace, err);
}

static bool left_rows(attn_stream *base)
{
    struct fake_stream *stream = stream_of(base);
    const bool any = stream->left_rows;
    stream->left_rows = false;
    return any;
}

static attn_status sum_lse(attn_stream *base, const attn_problem *problem, const attn_lse_look *look, double *found,
                           attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    struct command command = { .kind = COMMAND_LSE, .to = found, .count = 1 };
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "sum_lse", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    command.problems = malloc(sizeof *command.problems);
    command.look = malloc(sizeof *command.look);
    if (command.problems && command.look) {
        *command.problems = *problem;
        *command.look = *look;
        status = append(stream_of(base), command, err);
    } else status = attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory to sum up rows");
    if (status != ATTN_OK) command_clear(&command);
    return status;
}

/* ---- The truth (results in float64): a step computes one head ---------------------------------------------------- */

static bool has_truth(struct fake_device *device)
{
    pthread_mutex_lock(&device->lock);
    const bool has = rule_for(device, FAULT_TRUTH_NONE, 1) == NULL;
    pthread_mutex_unlock(&device->lock);
    return has;
}

static attn_status truth_need(const attn_capabilities *can, const attn_problem *problem, attn_truth_cost *cost,
                              attn_error *err)
{
    const attn_dims d = attn_dims_of(problem);
    if (!has_truth(device_of_facts(can)))
        return attn_fail(err, ATTN_UNSUPPORTED, "", "fake: the device does not compute this in float64");
    cost->workspace_bytes = 64;
    cost->seconds = 1e-6 + 1e-9 * (double)attn_rows_that_exist(problem) * (double)d.Sk * (double)(d.D + d.Dv);
    if (problem->op == ATTN_OP_BACKWARD) cost->seconds *= 2.5;
    return ATTN_OK;
}

static attn_status append_truth(attn_stream *base, struct command command, const attn_problem *problem, attn_error *err)
{
    attn_status status = ATTN_NO_MEMORY;
    command.count = 1;
    command.problems = malloc(sizeof *command.problems);
    if (command.problems) {
        *command.problems = *problem;
        status = append(stream_of(base), command, err);
    } else attn_fail(err, ATTN_NO_MEMORY, "", "fake: no memory for a problem");
    if (status != ATTN_OK) command_clear(&command);
    return status;
}

static attn_status truth(attn_stream *base, const attn_problem *problem, const attn_truth *results, void *workspace,
                         int64_t *step, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    const attn_dims d = attn_dims_of(problem);
    const struct command command = { .kind = COMMAND_TRUTH, .truth = *results, .head = *step, .workspace = workspace };
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "truth", err);
    const int64_t n = status == ATTN_OK ? ++device->events[EVENT_TRUTH] : 0;
    const struct rule *rule = rule_for(device, FAULT_TRUTH_ERR, n);
    if (status == ATTN_OK && rule) status = fail(device, (int)rule->number, "truth", err);
    if (status == ATTN_OK && (rule = rule_for(device, FAULT_TRUTH_HOLD, n)) != NULL) stream_of(base)->hold = rule->path;
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    *step = *step + 1 < d.B * d.H ? *step + 1 : ATTN_NO_MORE_STEPS;
    return append_truth(base, command, problem, err);
}

static attn_status truth_compare(attn_stream *base, const attn_problem *problem, const attn_truth *results,
                                 attn_truth_distance *distances, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    pthread_mutex_lock(&device->lock);
    const attn_status status = enter(device, "truth_compare", err);
    pthread_mutex_unlock(&device->lock);
    if (status != ATTN_OK) return status;
    return append_truth(base, (struct command){ .kind = COMMAND_COMPARE, .to = distances, .truth = *results }, problem,
                        err);
}

static void compare_truth(const struct command *c)
{
    const attn_geometry g = attn_geometry_of(c->problems);
    const attn_view *const out = &g.view[ATTN_T_out];
    attn_truth_distance *const found = c->to;
    memset(found, 0, ATTN_TRUTH_RESULTS * sizeof *found);
    for (int64_t b = 0; b < g.dims.B; b++)
        for (int64_t h = 0; h < g.dims.H; h++) {
            const attn_sequence s = attn_sequence_of(&g, b);
            for (int64_t i = 0; i < s.Sq; i++)
                for (int64_t e = 0; e < g.dims.Dv; e++) {
                    const double got = attn_load(out->dtype, out->data, attn_at(out, b, h, s.q_start + i) + e),
                                 want = c->truth.out[(fake_truth_row(&g.dims, &s, false, b, h) + i) * g.dims.Dv + e],
                                 error = fabs(got - want);
                    if (isfinite(want)) found->largest = fmax(found->largest, fabs(want));
                    if (got == want || (isnan(got) && isnan(want))) continue;
                    found->max_abs = isfinite(error) ? fmax(found->max_abs, error) : INFINITY;
                }
        }
}

static attn_status mark(attn_stream *base, int slot, attn_error *err)
{
    struct fake_device *device = device_of(base->device);
    pthread_mutex_lock(&device->lock);
    const attn_status status = enter(device, "mark", err);
    pthread_mutex_unlock(&device->lock);
    return status == ATTN_OK ? append(stream_of(base), (struct command){ .kind = COMMAND_MARK, .slot = slot }, err)
                             : status;
}

static double between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot)
{
    return (double)(stream_of(to)->marks_ns[to_slot] - stream_of(from)->marks_ns[from_slot]) / 1e3;
}

static double elapsed_us(attn_stream *stream, int from_slot, int to_slot)
{
    return between_us(stream, from_slot, stream, to_slot);
}

/* ---- Carrying out the commands ----------------------------------------------------------------------------------- */

/* Returns the number of bytes from the beginning of a tensor's first element to the end of its last element; 0 if the
 * tensor has no elements. */
static size_t span(const attn_tensor *t)
{
    int64_t last = 0;
    if (t->rank == 0) return 0;
    for (int a = 0; a < t->rank; a++) {
        if (t->shape[a] == 0) return 0;
        last += (t->shape[a] - 1) * t->stride[a];
    }
    return (size_t)(last + 1) * attn_dtype_bytes(t->dtype);
}

static bool is_output(const attn_problem *p, int id)
{
    return attn_writes(p, (attn_tensor_id)id);
}

/* Returns whether all tensors that the problem reads or writes lie in memory of this device. The caller must hold
 * device->lock. */
static bool problem_is_here(const struct fake_device *device, const attn_problem *p)
{
    for (int id = 0; id < ATTN_TENSOR_COUNT; id++) {
        const size_t bytes = span(&p->tensor[id]);
        if (!attn_reads(p, (attn_tensor_id)id) && !attn_writes(p, (attn_tensor_id)id)) continue;
        if (bytes > 0 && !owns(device, p->tensor[id].data, bytes)) return false;
    }
    const size_t rows = p->prefix_keys ? (size_t)p->page_table.shape[0] : 0;
    if (rows > 0 && !owns(device, p->prefix_keys, rows * sizeof *p->prefix_keys)) return false;
    return true;
}

/* Returns whether the merge's tensors lie in memory of this device. A tensor without elements may be anywhere. The
 * caller must hold device->lock. */
static bool merge_is_here(const struct fake_device *device, const attn_merge_plan *m)
{
    const bool rows = attn_merge_count(m) > 0, columns = rows && m->Dv > 0;
    const struct {
        const void *tensor;
        bool has_elements;
    } others[] = { { m->sinks, m->H > 0 }, { m->dsinks, m->H > 0 },  { m->dout.data, columns },
                   { m->dlse.data, rows }, { m->out.data, columns }, { m->lse.data, rows } };
    bool here = true;
    for (size_t i = 0; i < sizeof others / sizeof *others && here; i++)
        here = !others[i].has_elements || !others[i].tensor || owns(device, others[i].tensor, 1);
    for (int p = 0; p < m->count && rows && here; p++)
        here = owns(device, m->part_lse[p], 1) && (!columns || owns(device, m->part_out[p], 1)) &&
               (!m->gradients || (owns(device, m->part_dlse[p], 1) && (!columns || owns(device, m->part_dout[p], 1))));
    return here;
}

/* Returns whether the parts and the result of the sum lie in memory of this device. The caller must hold
 * device->lock. */
static bool sum_is_here(const struct fake_device *device, const attn_sum *sum)
{
    const size_t elements = (size_t)sum->elements;
    bool here = owns(device, sum->to, elements * attn_dtype_bytes(sum->dtype));
    for (int part = 0; part < sum->count && here; part++)
        here = owns(device, sum->parts[part], elements * sizeof(float));
    return here;
}

static bool source_is_there(const struct command *c)
{
    pthread_mutex_lock(&c->source->lock);
    const bool there = owns(c->source, c->from, c->bytes);
    pthread_mutex_unlock(&c->source->lock);
    return there;
}

static bool truth_is_here(const struct fake_device *device, const struct command *c)
{
    const attn_dims d = attn_dims_of(c->problems);
    const int64_t queries = fake_truth_rows(&d, false), keys = fake_truth_rows(&d, true);
    const struct {
        const double *data;
        int64_t elements;
    } results[ATTN_TRUTH_RESULTS] = { { c->truth.out, queries * d.Dv },
                                      { c->truth.lse, queries },
                                      { c->truth.dq, queries * d.D },
                                      { c->truth.dk, keys * d.D },
                                      { c->truth.dv, keys * d.Dv } };
    for (int n = 0; n < ATTN_TRUTH_RESULTS; n++)
        if (results[n].data && !owns(device, results[n].data, (size_t)results[n].elements * sizeof(double)))
            return false;
    return true;
}

static bool command_is_sane(struct fake_device *device, const struct command *c)
{
    /* source_is_there() is called before this device is locked. It takes the lock of another device, and no thread may
     * hold the locks of two devices. */
    bool sane = c->kind != COMMAND_PEER || source_is_there(c);
    pthread_mutex_lock(&device->lock);
    if (c->kind == COMMAND_PEER) sane = sane && owns(device, c->to, c->bytes);
    if (c->kind == COMMAND_SUM) sane = sum_is_here(device, c->sum);
    if (c->kind == COMMAND_COPY) {
        const bool in = c->direction == ATTN_TO_DEVICE;
        sane = owns(device, in ? c->to : c->from, (c->rows - 1) * (in ? c->to_pitch : c->from_pitch) + c->bytes);
    }
    if (c->kind == COMMAND_MOVE)
        sane = device->reads_staging ||
               (owns(device, c->to, c->bytes) && (c->from == NULL || owns(device, c->from, c->bytes)));
    if (c->kind == COMMAND_RUN) {
        for (int i = 0; i < c->count && sane; i++)
            sane = device->reads_staging || problem_is_here(device, &c->problems[i]);
        sane = sane && (!c->workspace || owns(device, c->workspace, 1));
    }
    if (c->kind == COMMAND_MERGE) sane = device->reads_staging || merge_is_here(device, c->merge);
    if (c->kind == COMMAND_LSE)
        sane = device->reads_staging ||
               (problem_is_here(device, c->problems) && owns(device, c->to, sizeof c->look->found));
    if (c->kind == COMMAND_TRUTH || c->kind == COMMAND_COMPARE) {
        sane = (device->reads_staging || problem_is_here(device, c->problems)) && truth_is_here(device, c);
        if (c->kind == COMMAND_TRUTH) sane = sane && owns(device, c->workspace, 1);
        else sane = sane && owns(device, c->to, ATTN_TRUTH_RESULTS * sizeof(attn_truth_distance));
    }
    pthread_mutex_unlock(&device->lock);
    return sane;
}

/* Executes the commands on the stream, oldest first. Returns the CUDA error with which a command failed; 0: none
 * failed. */
static int carry_out(struct fake_stream *stream, attn_error *err)
{
    struct fake_device *device = device_of(stream->base.device);
    /* The time at which a real device would reach command i. Such a device starts a command as soon as the command is
     * queued and the previous one is done. A mark (time stamp) stores this time. */
    int64_t at_ns = 0;
    for (int i = 0; i < stream->count; i++) {
        struct command *c = &stream->commands[i];
        if (!command_is_sane(device, c)) return ERROR_ILLEGAL_ADDRESS;
        if (at_ns < c->put_ns) at_ns = c->put_ns;
        if (c->kind == COMMAND_MARK) stream->marks_ns[c->slot] = at_ns;
        const int64_t began_ns = now_ns();
        for (size_t n = 0; c->kind == COMMAND_COPY && n < c->rows; n++)
            memcpy((char *)c->to + n * c->to_pitch, (const char *)c->from + n * c->from_pitch, c->bytes);
        if (c->kind == COMMAND_MOVE && c->from) memcpy(c->to, c->from, c->bytes);
        if (c->kind == COMMAND_MOVE && !c->from) memset(c->to, 0, c->bytes);
        if (c->kind == COMMAND_PEER) memcpy(c->to, c->from, c->bytes);
        if (c->kind == COMMAND_SUM) attn_sum_all(c->sum);
        if (c->kind == COMMAND_SUM && c->nan)
            memset(c->sum->to, 0xff, (size_t)c->sum->elements * attn_dtype_bytes(c->sum->dtype));
        if (c->kind == COMMAND_MERGE) attn_merge_all(c->merge);
        if (c->kind == COMMAND_LSE) lse_sum_rows(c->problems, c->look, c->to);
        if (c->kind == COMMAND_TRUTH && !fake_truth_of_head(c->problems, c->head, &c->truth)) return ERROR_MEMORY;
        if (c->kind == COMMAND_COMPARE) compare_truth(c);
        if (c->kind == COMMAND_RUN &&
            attn_backend_cpu.run(stream->cpu, c->plans, c->count, c->workspace, err) != ATTN_OK)
            return ERROR_MEMORY;
        at_ns += now_ns() - began_ns;
        if (c->kind != COMMAND_RUN) continue;
        if (at_ns < stream->until_ns) at_ns = stream->until_ns;
        stream->left_rows |= c->left;
        for (int n = 0; n < c->count && c->nan; n++)
            for (int id = 0; id < ATTN_TENSOR_COUNT; id++)
                if (is_output(&c->problems[n], id)) /* outputs are contiguous */
                    memset(c->problems[n].tensor[id].data, 0xff, span(&c->problems[n].tensor[id]));
    }
    return 0;
}

static bool is_held_up(const struct fake_stream *stream)
{
    return stream->never || (stream->hold && access(stream->hold, F_OK) == 0) || now_ns() < stream->until_ns;
}

/* Checks whether the stream is done. While the script of faults holds the stream up, the function does not count its
 * calls as events, because the number of such calls depends on time. */
static attn_status done(attn_stream *base, bool *is_done, attn_error *err)
{
    struct fake_stream *stream = stream_of(base);
    struct fake_device *device = device_of(base->device);
    *is_done = false;
    if (is_held_up(stream)) {
        if (!lost_code(device)) return ATTN_OK;
        return attn_fail(err, ATTN_DEVICE_LOST, "", "fake:%d was lost to an earlier error", base->device->index);
    }
    pthread_mutex_lock(&device->lock);
    attn_status status = enter(device, "query", err);
    pthread_mutex_unlock(&device->lock);
    if (status == ATTN_OK) {
        pthread_mutex_lock(&device->lock);
        open_lent(device, true);
        pthread_mutex_unlock(&device->lock);
        const int code = stream->fails ? stream->fails : carry_out(stream, err);
        pthread_mutex_lock(&device->lock);
        open_lent(device, false);
        if (code) status = fail(device, code, "query", err);
        pthread_mutex_unlock(&device->lock);
    }
    forget_commands(stream);
    *is_done = status == ATTN_OK;
    return status;
}

/* Waits until the stream is done. The function never returns if the fault event.never has hit the stream. */
static attn_status wait_for_stream(attn_stream *base, attn_error *err)
{
    const struct timespec pause = { 0, 1000000 };
    bool is_done = false;
    attn_status status;
    while ((status = done(base, &is_done, err)) == ATTN_OK && !is_done) nanosleep(&pause, NULL);
    return status;
}

const attn_backend attn_backend_fake = {
    .name = "fake",
    .is_gpu = true,
    .count = count_devices,
    .open = open_device,
    .close = close_device,
    .describe = describe,
    .device_alloc = device_alloc,
    .device_free = device_free,
    .staging_alloc = staging_alloc,
    .staging_free = staging_free,
    .plan = plan,
    .workspace = workspace_bytes,
    .stream_open = stream_open,
    .stream_close = stream_close,
    .copy = copy,
    .copy_rows = copy_rows,
    .moves = moves,
    .copy_peer = copy_peer,
    .sum = sum,
    .run = run,
    .merge = merge,
    .mark = mark,
    .elapsed_us = elapsed_us,
    .done = done,
    .wait = wait_for_stream,
    .between_us = between_us,
    .import = import_memory,
    .release_import = release_import,
    .pin = pin,
    .unpin = unpin,
    .sum_lse = sum_lse,
    .run_some = run_some,
    .left_rows = left_rows,
    .truth_need = truth_need,
    .truth = truth,
    .truth_compare = truth_compare,
};
