/* regions.c: see regions.h. One lock for the table and the references; what is read and written needs none. Inputs come before
 * outputs in a list of uses.
 *
 * Which objects are taken: a key is a name of one object of /dev/shm, so it has no '/'. It begins with a prefix of the operator's,
 * who says so which objects are meant for clients. The object must be a regular file with no second name (a link to somebody
 * else's object would be one), be the server's own or be open to it by its mode: what only root can open is nobody's to
 * offer. An object that one caller has registered is no other's to register. */
#include "server/work/regions.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto-json/text.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/metrics.h"

struct region {
    enum region_kind kind;
    int references; /* under the table's lock */
    struct regions *regions;
    struct caller *caller; /* a reference */
    char name[PROTO_REGION_BYTES];
    int64_t offset, bytes; /* of the object; offset is 0 in a GPU's memory */
    struct region *next;   /* of those that are to be closed */

    /* SYSTEM */
    char key[PROTO_REGION_BYTES];
    int fd; /* -1: none */
    dev_t filesystem;
    ino_t inode;
    struct pin *pin;      /* NULL: none so far. This and the rest under the table's lock */
    struct timespec seen; /* when the object was modified last, but for the server's own writes */
    int writing;          /* of those, how many are under way, */
    bool intact;          /* and was nothing else before them? */
    int64_t pinned_ms;    /* when that was tried last */
    bool is_to_pin;       /* it is in `fresh`, by a reference */
    struct region *after; /* in it */

    /* CUDA */
    attn_device *device;
    int number; /* of the device: the server's, */
    int64_t id; /* and the client's */
    char *memory;
};

/* Pages of an object that a driver holds for copies of devices: see pin(). */
struct pin {
    int references; /* under the table's lock: the region's, and each use's */
    struct regions *regions;
    char *mapping, *memory; /* whole pages, and where the region begins in them */
    size_t bytes;           /* of the mapping */
    struct pin *next;       /* of those that are to be undone */
};

struct regions {
    const char *const *prefixes;
    int prefix_count;

    pthread_mutex_t lock;
    struct {
        uint64_t hash; /* of the name, so that most others need not be looked at */
        struct region *region;
    } table[REGIONS_MAX_COUNT];
    int count;
    int64_t bytes;

    pthread_t keeper;
    pthread_cond_t wake;
    struct region *gone, *fresh; /* to be closed, to be pinned */
    struct pin *loose;           /* to be undone */
    bool end;
    attn_device *pinner; /* NULL: no device copies from regions */
    int64_t pinned_bytes, pinned_most;
};

static const char *const kinds[REGION_KIND_COUNT] = {
#define X(id, label) label,
    REGION_KIND_MAP(X)
#undef X
};

const char *region_kind_label(enum region_kind kind)
{
    return kinds[kind];
}

/* ---- References -------------------------------------------------------------------------------------------------- */

/* With the lock held. */
static void let_pin_go(struct pin *pin)
{
    if (pin == NULL || --pin->references > 0) return;
    pin->next = pin->regions->loose;
    pin->regions->loose = pin;
    pthread_cond_signal(&pin->regions->wake);
}

/* With the lock held. */
static void let_go(struct region *region)
{
    struct regions *const regions = region->regions;
    assert(region->references > 0);
    if (--region->references > 0) return;
    let_pin_go(region->pin);
    region->pin = NULL;
    region->next = regions->gone;
    regions->gone = region;
    pthread_cond_signal(&regions->wake);
}

static void undo_pin(struct pin *pin)
{
    attn_host_unpin(pin->regions->pinner, pin->mapping);
    munmap(pin->mapping, pin->bytes);
    free(pin);
}

static void close_region(struct region *region)
{
    if (region->fd >= 0) close(region->fd);
    if (region->device) attn_device_release_import(region->device, region->memory);
    caller_release(region->caller);
    free(region);
}

/* With the lock held: has nobody else modified the object since begin_watch(), and is it as long? */
static bool is_intact(const struct region *region)
{
    struct stat st;
    if (fstat(region->fd, &st) != 0 || st.st_size < region->offset + region->bytes) return false;
    if (region->writing > 0) return region->intact;
    return st.st_mtim.tv_sec == region->seen.tv_sec && st.st_mtim.tv_nsec == region->seen.tv_nsec;
}

/* With the lock held. */
static void begin_watch(struct region *region)
{
    struct stat st;
    region->intact = fstat(region->fd, &st) == 0;
    if (region->intact) region->seen = st.st_mtim;
}

/* Around each of the server's writes. A client that modifies the object between the two is not seen; it was to leave it alone. */
static void note_write(struct region *region, bool begins)
{
    pthread_mutex_lock(&region->regions->lock);
    if (begins) {
        if (region->writing == 0) region->intact = is_intact(region);
        region->writing++;
    } else {
        if (region->intact) begin_watch(region);
        region->writing--;
    }
    pthread_mutex_unlock(&region->regions->lock);
}

/* Whatever is cut off meanwhile, the system says so: no SIGBUS. The first write to a page of a mapping counts as a modification, so that
 * is done before; and a later one has another time. */
static bool hold_pages(struct region *region, struct pin *pin)
{
    const struct timespec quiet = { .tv_nsec = REGIONS_QUIET_MS * CLOCK_NS_PER_MS };
    struct regions *const regions = region->regions;
    attn_error ignored;
    if (madvise(pin->mapping, pin->bytes, MADV_POPULATE_WRITE) != 0) return false;
    nanosleep(&quiet, NULL);
    pthread_mutex_lock(&regions->lock);
    begin_watch(region);
    pthread_mutex_unlock(&regions->lock);
    nanosleep(&quiet, NULL);
    if (attn_host_pin(regions->pinner, pin->mapping, pin->bytes, &ignored) != ATTN_OK) return false;
    pthread_mutex_lock(&regions->lock);
    const bool intact = is_intact(region);
    pthread_mutex_unlock(&regions->lock);
    if (!intact) attn_host_unpin(regions->pinner, pin->mapping);
    return intact;
}

/* NULL: the processor copies. Holes are filled. */
static struct pin *pin(struct region *region)
{
    const int64_t page = sysconf(_SC_PAGESIZE), from = region->offset / page * page;
    const int64_t end = (region->offset + region->bytes + page - 1) / page * page;
    struct pin *const made = calloc(1, sizeof *made);
    if (made == NULL) return NULL;
    *made = (struct pin){ .references = 1, .regions = region->regions, .bytes = (size_t)(end - from) };
    void *const mapping = mmap(NULL, made->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region->fd, from);
    if (mapping != MAP_FAILED) {
        made->mapping = mapping;
        made->memory = made->mapping + (region->offset - from);
        if (hold_pages(region, made)) return made;
        munmap(mapping, made->bytes);
    }
    free(made);
    return NULL;
}

/* With the lock held, for the next of them. Whoever registers more than may be pinned has the rest copied. */
static void pin_next(struct regions *regions)
{
    struct region *const region = regions->fresh;
    regions->fresh = region->after;
    let_pin_go(region->pin);
    region->pin = NULL;
    if (!regions->end && region->references > 1 && /* somebody has it besides this list */
        region->bytes <= regions->pinned_most - regions->pinned_bytes) {
        pthread_mutex_unlock(&regions->lock);
        struct pin *const made = pin(region);
        pthread_mutex_lock(&regions->lock);
        if (made) regions->pinned_bytes += (int64_t)made->bytes;
        region->pin = made;
    }
    region->pinned_ms = clock_ms();
    region->is_to_pin = false;
    let_go(region);
}

/* With the lock held: it is to be pinned, if that is worth it. */
static void ask_for_pin(struct region *region)
{
    struct regions *const regions = region->regions;
    if (region->kind != REGION_SYSTEM || regions->pinner == NULL || region->is_to_pin ||
        region->bytes < REGIONS_PINNED_TENSOR || region->bytes > REGIONS_PINNED_REGION ||
        (region->pinned_ms && clock_ms() - region->pinned_ms < REGIONS_PIN_AGAIN_MS))
        return;
    region->references++;
    region->is_to_pin = true;
    region->after = regions->fresh;
    regions->fresh = region;
    pthread_cond_signal(&regions->wake);
}

/* The table's thread: what may take the driver, or the system, long. */
static void *keeper(void *context)
{
    struct regions *const regions = context;
    pthread_mutex_lock(&regions->lock);
    for (;;) {
        struct region *const region = regions->gone;
        struct pin *const loose = regions->loose;
        if (loose) {
            regions->loose = loose->next;
            regions->pinned_bytes -= (int64_t)loose->bytes;
            pthread_mutex_unlock(&regions->lock);
            undo_pin(loose);
            pthread_mutex_lock(&regions->lock);
        } else if (region) {
            regions->gone = region->next;
            pthread_mutex_unlock(&regions->lock);
            close_region(region);
            pthread_mutex_lock(&regions->lock);
        } else if (regions->fresh) {
            pin_next(regions);
        } else {
            if (regions->end) break;
            pthread_cond_wait(&regions->wake, &regions->lock);
        }
    }
    pthread_mutex_unlock(&regions->lock);
    return NULL;
}

static void *must(void *memory)
{
    if (memory != NULL) return memory;
    fprintf(stderr, "attnd: out of memory for the table of shared memory\n");
    abort();
}

struct regions *regions_new(const char *const *prefixes, int prefix_count)
{
    struct regions *const regions = must(calloc(1, sizeof *regions));
    regions->prefixes = prefixes;
    regions->prefix_count = prefix_count;
    pthread_mutex_init(&regions->lock, NULL);
    pthread_cond_init(&regions->wake, NULL);
    if (pthread_create(&regions->keeper, NULL, keeper, regions) != 0) (void)must(NULL);
    return regions;
}

void regions_pin_for(struct regions *regions, attn_device *device, int64_t most_bytes)
{
    regions->pinner = device;
    regions->pinned_most = most_bytes < REGIONS_PINNED_BYTES ? most_bytes : REGIONS_PINNED_BYTES;
}

/* With the lock held: the table has entry `i` no more. */
static void take_out(struct regions *regions, int i)
{
    struct region *const region = regions->table[i].region;
    regions->table[i] = regions->table[--regions->count];
    regions->bytes -= region->bytes;
    region->caller->regions--;
    region->caller->region_bytes -= region->bytes;
    let_go(region);
}

void regions_free(struct regions *regions)
{
    if (regions == NULL) return;
    pthread_mutex_lock(&regions->lock);
    while (regions->count > 0) take_out(regions, regions->count - 1);
    regions->end = true;
    pthread_cond_signal(&regions->wake);
    pthread_mutex_unlock(&regions->lock);
    pthread_join(regions->keeper, NULL);
    pthread_cond_destroy(&regions->wake);
    pthread_mutex_destroy(&regions->lock);
    free(regions);
}

/* ---- Which objects ----------------------------------------------------------------------------------------------- */

/* Both with and without it they name the same object. */
static const char *without_slash(const char *key)
{
    return *key == '/' ? key + 1 : key;
}

/* May a client name it? What is said does not tell whether there is such an object. */
static attn_status check_key(const struct regions *regions, const char *key, attn_error *why)
{
    const char *const name = without_slash(key);
    char list[CONFIG_MAX_SHM * (CONFIG_SHM_BYTES + 8)];
    struct text t = text_in(list, sizeof list);
    for (int i = 0; i < regions->prefix_count; i++) {
        const char *const prefix = without_slash(regions->prefixes[i]);
        text_printf(&t, "%s/%s", i ? " or " : "", prefix);
        if (strncmp(name, prefix, strlen(prefix)) != 0) continue;
        if (strspn(name, CONFIG_SHM_CHARACTERS) == strlen(name) && strstr(name, "..") == NULL) return ATTN_OK;
        return attn_fail(
            why, ATTN_INVALID, "/key",
            "key: has a character that is not a letter, a digit, '_', '.' or '-' (or a '/' that is not the "
            "first), or two dots in a row");
    }
    return attn_fail(why, ATTN_INVALID, "/key", "key: must begin with %s (the server's --allow-shm)", list);
}

static attn_status cannot_open(const char *key, int error, proto_error *code, attn_error *why)
{
    static const struct {
        int error;
        const char *says;
    } reasons[] = {
        { ENOENT, "there is no such object in the server's /dev/shm; in a container, is that the client's?" },
        { EACCES, "its mode does not let the server read and write it" },
        { EPERM, "it is sealed, or its mode does not let the server read and write it" },
        { ELOOP, "it is a symbolic link, which is not followed" },
        { EISDIR, "it is a directory" },
        { EINVAL, "it is a directory" }, /* as glibc's shm_open() says it */
        { ENXIO, "it is not a regular file" },
        { EWOULDBLOCK, "another process has a lease on it" },
    };
    *code = PROTO_E_INVALID_REQUEST;
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].error == error)
            return attn_fail(why, ATTN_INVALID, "/key", "key: '%s' cannot be opened: %s", key, reasons[i].says);
    *code = PROTO_E_UNAVAILABLE; /* descriptors, memory */
    return attn_fail(why, ATTN_BUSY, "/key", "key: '%s' cannot be opened: %s", key, strerror(error));
}

/* Could the server read and write it if it had no power over others' files? */
static bool is_open_to_us(const struct stat *st)
{
    const mode_t others = S_IROTH | S_IWOTH, group = S_IRGRP | S_IWGRP;
    return st->st_uid == geteuid() || ((st->st_mode & group) == group && group_member(st->st_gid)) ||
           (st->st_mode & others) == others;
}

static attn_status check_object(const struct stat *st, const proto_region *wanted, attn_error *why)
{
    int64_t end;
    if (!S_ISREG(st->st_mode))
        return attn_fail(why, ATTN_INVALID, "/key", "key: '%s' is not a regular file", wanted->key);
    if (st->st_nlink > 1)
        return attn_fail(why, ATTN_INVALID, "/key", "key: '%s' is an object with a second name", wanted->key);
    if (!is_open_to_us(st))
        return attn_fail(why, ATTN_INVALID, "/key",
                         "key: '%s' belongs to user %u, and its mode does not let others read and write it",
                         wanted->key, (unsigned)st->st_uid);
    if (__builtin_add_overflow(wanted->offset, wanted->bytes, &end) || end > st->st_size)
        return attn_fail(why, ATTN_INVALID, wanted->offset < st->st_size ? "/byte_size" : "/offset",
                         "%s: offset %lld and byte_size %lld go past the end of '%s', which has %lld bytes",
                         wanted->offset < st->st_size ? "byte_size" : "offset", (long long)wanted->offset,
                         (long long)wanted->bytes, wanted->key, (long long)st->st_size);
    return ATTN_OK;
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

/* FNV-1a */
static uint64_t hash_of(const char *name)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    return hash;
}

/* With the lock held; -1: the caller has none of that name. */
static int find(const struct regions *regions, const struct caller *caller, const char *name)
{
    const uint64_t hash = hash_of(name);
    for (int i = 0; i < regions->count; i++) {
        const struct region *const region = regions->table[i].region;
        if (regions->table[i].hash == hash && region->caller == caller && strcmp(region->name, name) == 0) return i;
    }
    return -1;
}

static bool is_same_object(const struct region *a, const struct region *b)
{
    if (a->kind != b->kind) return false;
    if (a->kind == REGION_SYSTEM) return a->inode == b->inode && a->filesystem == b->filesystem;
    return a->device == b->device && a->memory == b->memory; /* what is opened twice is at one address */
}

/* With the lock held: does another caller have the same object? */
static bool is_anothers(const struct regions *regions, const struct region *region)
{
    for (int i = 0; i < regions->count; i++) {
        const struct region *const other = regions->table[i].region;
        if (other->caller != region->caller && is_same_object(other, region)) return true;
    }
    return false;
}

/* With the lock held: may it be added? */
static proto_error check_room(const struct regions *regions, const struct region *region, attn_error *why)
{
    const struct caller *const caller = region->caller;
    const int64_t most_bytes = caller_share(caller, REGIONS_MAX_BYTES);
    if (find(regions, caller, region->name) >= 0) {
        attn_fail(why, ATTN_INVALID, NULL, "the region '%s' is registered already; unregister it first", region->name);
        return PROTO_E_CONFLICT;
    }
    if (is_anothers(regions, region)) {
        if (region->kind == REGION_SYSTEM)
            attn_fail(why, ATTN_INVALID, "/key", "key: '%s' is registered by another token", region->key);
        else attn_fail(why, ATTN_INVALID, "/raw_handle", "raw_handle: is registered by another token");
        return PROTO_E_CONFLICT;
    }
    if (region->bytes > most_bytes) {
        attn_fail(why, ATTN_TOO_LARGE, "/byte_size", "byte_size: is %lld, all regions%s may have %lld bytes together",
                  (long long)region->bytes, most_bytes < REGIONS_MAX_BYTES ? " of a token" : "", (long long)most_bytes);
        return PROTO_E_TOO_LARGE;
    }
    if (caller->regions >= caller_share(caller, REGIONS_MAX_COUNT) ||
        region->bytes > most_bytes - caller->region_bytes) {
        attn_fail(why, ATTN_QUOTA, NULL,
                  "this token has %d regions of %lld bytes, its share is %lld of %lld; unregister what is not used",
                  caller->regions, (long long)caller->region_bytes, (long long)caller_share(caller, REGIONS_MAX_COUNT),
                  (long long)most_bytes);
        return caller_is_everybody(caller) ? PROTO_E_STORAGE_FULL : PROTO_E_QUOTA;
    }
    if (regions->count == REGIONS_MAX_COUNT || region->bytes > REGIONS_MAX_BYTES - regions->bytes) {
        attn_fail(why, ATTN_BUSY, NULL, "there are %d regions of %lld bytes, and room for %d of %lld", regions->count,
                  (long long)regions->bytes, REGIONS_MAX_COUNT, (long long)REGIONS_MAX_BYTES);
        return PROTO_E_STORAGE_FULL;
    }
    return PROTO_ERROR_COUNT;
}

static proto_error add(struct regions *regions, struct region *region, attn_error *why)
{
    const proto_error error = check_room(regions, region, why);
    if (error != PROTO_ERROR_COUNT) return error;
    regions->table[regions->count].hash = hash_of(region->name);
    regions->table[regions->count++].region = region;
    regions->bytes += region->bytes;
    region->caller->regions++;
    region->caller->region_bytes += region->bytes;
    region->references++;
    return error;
}

/* Ours, of which the table has none yet; NULL: because of *error. */
static struct region *region_new(struct regions *regions, enum region_kind kind, struct caller *caller,
                                 const char *name, int64_t bytes, proto_error *error, attn_error *why)
{
    struct region *const region = calloc(1, sizeof *region);
    *error = PROTO_E_INVALID_REQUEST;
    if (region == NULL || strlen(name) >= sizeof region->name) {
        *error = region ? PROTO_E_INVALID_REQUEST : PROTO_E_OUT_OF_MEMORY;
        attn_fail(why, ATTN_NO_MEMORY, NULL, region ? "the name of the region is too long" : "no memory for a region");
        free(region);
        return NULL;
    }
    region->kind = kind;
    region->references = 1;
    region->regions = regions;
    region->caller = caller_hold(caller);
    region->bytes = bytes;
    region->fd = -1;
    strcpy(region->name, name);
    return region;
}

/* The table takes it, where there was no error so far. Ours is given back. */
static bool settle(struct region *region, proto_error *error, attn_error *why)
{
    struct regions *const regions = region->regions;
    pthread_mutex_lock(&regions->lock);
    if (*error == PROTO_ERROR_COUNT) *error = add(regions, region, why);
    if (*error == PROTO_ERROR_COUNT) ask_for_pin(region);
    let_go(region);
    pthread_mutex_unlock(&regions->lock);
    return *error == PROTO_ERROR_COUNT;
}

bool regions_register(struct regions *regions, struct caller *caller, const char *name, const proto_region *wanted,
                      proto_error *error, attn_error *why)
{
    struct stat st;
    char path[PROTO_REGION_BYTES + 1];
    *error = PROTO_E_INVALID_REQUEST;
    if (check_key(regions, wanted->key, why) != ATTN_OK) return false;
    struct region *const region = region_new(regions, REGION_SYSTEM, caller, name, wanted->bytes, error, why);
    if (region == NULL) return false;
    region->offset = wanted->offset;
    strcpy(region->key, wanted->key);
    snprintf(path, sizeof path, "/%s", without_slash(wanted->key));
    /* Not to wait where another process has a lease on it. */
    region->fd = shm_open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
    if (region->fd < 0) cannot_open(wanted->key, errno, error, why);
    else if (fstat(region->fd, &st) != 0) cannot_open(wanted->key, errno, error, why);
    else if (check_object(&st, wanted, why) == ATTN_OK) *error = PROTO_ERROR_COUNT;
    if (*error == PROTO_ERROR_COUNT) region->filesystem = st.st_dev, region->inode = st.st_ino;
    return settle(region, error, why);
}

bool regions_register_cuda(struct regions *regions, struct caller *caller, const char *name,
                           const proto_cuda_region *wanted, attn_device *device, int number, proto_error *error,
                           attn_error *why)
{
    attn_error says = { 0 };
    void *memory = NULL;
    struct region *const region = region_new(regions, REGION_CUDA, caller, name, wanted->bytes, error, why);
    if (region == NULL) return false;
    region->number = number;
    region->id = wanted->device;
    /* Where there is no room anyway, nothing is opened. */
    pthread_mutex_lock(&regions->lock);
    *error = check_room(regions, region, why);
    pthread_mutex_unlock(&regions->lock);
    if (*error == PROTO_ERROR_COUNT &&
        attn_device_import(device, wanted->handle, (size_t)wanted->bytes, &memory, &says) != ATTN_OK) {
        *error = proto_error_of(says.status);
        attn_fail(why, says.status, "/raw_handle",
                  "raw_handle: cannot be opened as %lld bytes of device %lld: %.200s; it must be another process's "
                  "allocation of that device, and still be there",
                  (long long)wanted->bytes, (long long)wanted->device, says.text);
    }
    if (memory != NULL) region->device = device, region->memory = memory;
    return settle(region, error, why);
}

int regions_unregister(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name)
{
    int count = 0;
    pthread_mutex_lock(&regions->lock);
    if (name == NULL) {
        for (int i = regions->count - 1; i >= 0; i--) {
            const struct region *const region = regions->table[i].region;
            if (region->caller == caller && region->kind == kind) take_out(regions, i), count++;
        }
    } else {
        const int i = find(regions, caller, name);
        if (i >= 0 && regions->table[i].region->kind == kind) take_out(regions, i), count++;
    }
    pthread_mutex_unlock(&regions->lock);
    return count;
}

void regions_forget(struct regions *regions, bool (*is_known)(void *context, const struct caller *caller),
                    void *context)
{
    pthread_mutex_lock(&regions->lock);
    for (int i = regions->count - 1; i >= 0; i--)
        if (!is_known(context, regions->table[i].region->caller)) take_out(regions, i);
    pthread_mutex_unlock(&regions->lock);
}

int regions_visit(struct regions *regions, enum region_kind kind, const struct caller *caller, const char *name,
                  void (*visit)(void *context, const struct region_facts *facts), void *context)
{
    int count = 0;
    pthread_mutex_lock(&regions->lock);
    for (int i = 0; i < regions->count; i++) {
        const struct region *const region = regions->table[i].region;
        if (region->caller != caller || region->kind != kind || (name && strcmp(region->name, name) != 0)) continue;
        visit(context, &(struct region_facts){ region->name, region->key, region->offset, region->bytes, region->id });
        count++;
    }
    pthread_mutex_unlock(&regions->lock);
    return count;
}

void regions_count(struct regions *regions, enum region_kind kind, int *count, int64_t *bytes)
{
    *count = 0;
    *bytes = 0;
    pthread_mutex_lock(&regions->lock);
    for (int i = 0; i < regions->count; i++) {
        if (regions->table[i].region->kind != kind) continue;
        ++*count;
        *bytes += regions->table[i].region->bytes;
    }
    pthread_mutex_unlock(&regions->lock);
}

int64_t regions_pinned_bytes(struct regions *regions)
{
    pthread_mutex_lock(&regions->lock);
    const int64_t bytes = regions->pinned_bytes;
    pthread_mutex_unlock(&regions->lock);
    return bytes;
}

/* ---- What a request uses ----------------------------------------------------------------------------------------- */

/* Where in the body something is said of a tensor. */
static void point(attn_error *err, bool output, int index, const char *parameter)
{
    if (err)
        snprintf(err->member, sizeof err->member, "/%s/%d/parameters/%s", output ? "outputs" : "inputs", index,
                 parameter);
}

/* With the lock held: what is pinned, by a reference. NULL: nothing is, or the object was modified since; then that is asked for. */
static struct pin *begin_copies(struct region *region)
{
    if (region->pin && is_intact(region)) {
        region->pin->references++;
        return region->pin;
    }
    ask_for_pin(region);
    return NULL;
}

static attn_status begin_use(struct regions *regions, const struct caller *caller, const proto_shared *shared,
                             struct region_use *use, attn_error *err)
{
    int64_t end;
    struct pin *pin = NULL;
    const char *const name = attn_tensors[shared->id].name;
    *use = (struct region_use){
        .id = shared->id, .output = shared->output, .index = shared->index, .bytes = shared->bytes
    };
    pthread_mutex_lock(&regions->lock);
    const int i = find(regions, caller, shared->region);
    if (i >= 0) {
        use->region = regions->table[i].region;
        use->region->references++;
        if (shared->kernels_only && shared->bytes >= REGIONS_PINNED_TENSOR) pin = begin_copies(use->region);
        use->pin = pin;
    }
    pthread_mutex_unlock(&regions->lock);
    if (use->region == NULL) {
        attn_fail(err, ATTN_NOT_FOUND, NULL, "%s: there is no region '%.*s'", name, (int)text_cut(shared->region, 64),
                  shared->region);
        point(err, shared->output, shared->index, "shared_memory_region");
        return ATTN_NOT_FOUND;
    }
    if (__builtin_add_overflow(shared->offset, shared->bytes, &end) || end > use->region->bytes) {
        attn_fail(err, ATTN_INVALID, NULL,
                  "%s: shared_memory_offset %lld and shared_memory_byte_size %lld go past the end of the region "
                  "'%.*s', which "
                  "has %lld bytes",
                  name, (long long)shared->offset, (long long)shared->bytes, (int)text_cut(shared->region, 64),
                  shared->region, (long long)use->region->bytes);
        point(err, shared->output, shared->index,
              shared->offset < use->region->bytes ? "shared_memory_byte_size" : "shared_memory_offset");
        return ATTN_INVALID;
    }
    use->offset = use->region->offset + shared->offset;
    if (use->region->kind == REGION_CUDA) use->in_place = use->region->memory + use->offset;
    if (pin) use->pinned = pin->memory + shared->offset;
    return ATTN_OK;
}

/* It lies in a GPU's memory: may it, beside those before it? */
static attn_status begin_in_place(struct region_uses *uses, const struct region_use *use, attn_error *err)
{
    const char *const name = attn_tensors[use->id].name;
    const struct region *const region = use->region;
    if (!use->output && !proto_may_lie_on_device(use->id))
        attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: cannot lie in the memory of a GPU, its values are checked first; send it in the body or in system "
            "shared memory",
            name);
    else if (uses->home >= 0 && uses->home != region->number)
        attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: the region '%.*s' is in the memory of device %lld, another tensor in that of a different one; all "
            "must be of one",
            name, (int)text_cut(region->name, 64), region->name, (long long)region->id);
    else {
        uses->home = region->number;
        if (use->output) uses->elsewhere |= UINT64_C(1) << use->id;
        return ATTN_OK;
    }
    point(err, use->output, use->index, "shared_memory_region");
    return ATTN_INVALID;
}

attn_status region_uses_new(struct regions *regions, const struct caller *caller, const proto_shared *shared, int count,
                            struct region_uses **uses, attn_error *err)
{
    struct region_uses *made = calloc(1, sizeof *made + (size_t)count * sizeof made->list[0]);
    attn_status status = ATTN_OK;
    *uses = NULL;
    if (made == NULL) return attn_fail(err, ATTN_NO_MEMORY, NULL, "out of memory");
    made->home = -1;
    for (; made->count < count && status == ATTN_OK; made->count++) {
        struct region_use *const use = &made->list[made->count];
        status = begin_use(regions, caller, &shared[made->count], use, err);
        if (use->in_place) {
            status = begin_in_place(made, use, err);
            continue;
        }
        made->writes |= use->output;
        if (use->pinned) {
            made->pinned_bytes += use->bytes;
            if (use->output) made->elsewhere |= UINT64_C(1) << use->id;
            continue;
        }
        /* Each is at most as long as a region, and there are no more than a body of 32 KiB can name: no sum overflows. */
        *(use->output ? &made->output_bytes : &made->input_bytes) += use->bytes;
    }
    if (status == ATTN_OK) *uses = made;
    else region_uses_free(made);
    return status;
}

static void release(struct region_use *use)
{
    if (use->region == NULL) return;
    struct regions *const regions = use->region->regions;
    pthread_mutex_lock(&regions->lock);
    let_pin_go(use->pin);
    let_go(use->region);
    pthread_mutex_unlock(&regions->lock);
}

void region_uses_free(struct region_uses *uses)
{
    if (uses == NULL) return;
    for (int i = 0; i < uses->count; i++) release(&uses->list[i]);
    free(uses);
}

void region_uses_drop_inputs(struct region_uses **held)
{
    struct region_uses *const uses = *held;
    int kept = 0;
    if (uses == NULL) return;
    for (int i = 0; i < uses->count; i++) {
        if (uses->list[i].output || uses->list[i].in_place || uses->list[i].pinned) uses->list[kept++] = uses->list[i];
        else release(&uses->list[i]);
    }
    uses->count = kept;
    uses->input_bytes = 0;
    if (kept > 0) return;
    region_uses_free(uses);
    *held = NULL;
}

void region_uses_place(struct region_uses *uses, const proto_shared *shared)
{
    for (int i = 0; i < uses->count; i++)
        if (!uses->list[i].output && !uses->list[i].in_place && !uses->list[i].pinned)
            uses->list[i].memory = shared[i].to;
    uses->placed = true;
}

static bool overlap(const char *a, int64_t a_bytes, const char *b, int64_t b_bytes)
{
    return a_bytes > 0 && b_bytes > 0 && (uintptr_t)a < (uintptr_t)b + (uint64_t)b_bytes &&
           (uintptr_t)b < (uintptr_t)a + (uint64_t)a_bytes;
}

/* Do what is written and the other have bytes in common? An input that is copied was read before anything is written. */
static bool collide(const struct region_use *output, const struct region_use *other)
{
    if ((output->in_place != NULL) != (other->in_place != NULL)) return false;
    if (output->in_place) return overlap(output->in_place, output->bytes, other->in_place, other->bytes);
    return other->output && other->region == output->region && other->offset < output->offset + output->bytes &&
           output->offset < other->offset + other->bytes;
}

/* An output, among the uses before it: inputs come first. */
static attn_status bind_output(const struct region_uses *uses, struct region_use *use, const attn_tensor *t,
                               attn_error *err)
{
    const int64_t room = use->bytes;
    if (!attn_shape_bytes(t->dtype, t->rank, t->shape, &use->bytes) || use->bytes > room) {
        attn_fail(err, ATTN_INVALID, NULL, "%s: has %lld bytes, shared_memory_byte_size is %lld",
                  attn_tensors[use->id].name, (long long)use->bytes, (long long)room);
        point(err, true, use->index, "shared_memory_byte_size");
        return ATTN_INVALID;
    }
    for (const struct region_use *other = uses->list; other < use; other++) {
        if (!collide(use, other)) continue;
        attn_fail(err, ATTN_INVALID, NULL, "%s: would be written over %s, in the region '%.*s'",
                  attn_tensors[use->id].name, attn_tensors[other->id].name, (int)text_cut(use->region->name, 64),
                  use->region->name);
        point(err, true, use->index, "shared_memory_offset");
        return ATTN_INVALID;
    }
    return ATTN_OK;
}

static attn_status check_alignment(const struct region_use *use, attn_dtype dtype, size_t alignment, attn_error *err)
{
    const size_t element = attn_dtype_bytes(dtype), unit = element > alignment ? element : alignment;
    if ((uintptr_t)use->in_place % unit == 0) return ATTN_OK;
    attn_fail(err, ATTN_INVALID, NULL,
              "%s: shared_memory_offset is %lld, must be a multiple of %zu in the memory of a GPU",
              attn_tensors[use->id].name, (long long)use->offset, unit);
    point(err, use->output, use->index, "shared_memory_offset");
    return ATTN_INVALID;
}

attn_status region_uses_bind(struct region_uses *uses, attn_problem *problem, size_t alignment, attn_error *err)
{
    uses->output_bytes = 0;
    for (int i = 0; i < uses->count; i++) {
        struct region_use *const use = &uses->list[i];
        attn_tensor *const t = &problem->tensor[use->id];
        attn_status status = use->in_place ? check_alignment(use, t->dtype, alignment, err) : ATTN_OK;
        if (status == ATTN_OK && use->output) status = bind_output(uses, use, t, err);
        if (status != ATTN_OK) return status;
        if (!use->output) continue;
        if (use->in_place || use->pinned) t->data = use->in_place ? use->in_place : use->pinned;
        else use->memory = t->data, uses->output_bytes += use->bytes;
    }
    return ATTN_OK;
}

/* The object ends before the use does; or another error of the system. */
static attn_status broken(const struct region_use *use, int error, attn_error *err)
{
    const char *const name = attn_tensors[use->id].name;
    const int length = (int)text_cut(use->region->name, 64);
    attn_status status;
    if (error == 0)
        status = attn_fail(
            err, ATTN_INVALID, NULL,
            "%s: the shared memory of the region '%.*s' has become shorter than it was when it was registered", name,
            length, use->region->name);
    else if (error == ENOSPC || error == ENOMEM)
        status = attn_fail(err, ATTN_NO_MEMORY, NULL, "%s: there is no memory for the pages of the region '%.*s'", name,
                           length, use->region->name);
    else if (error == EPERM || error == EFBIG)
        status = attn_fail(err, ATTN_INVALID, NULL, "%s: the region '%.*s' cannot be written: %s", name, length,
                           use->region->name, error == EPERM ? "it is sealed" : "the system's limit on file sizes");
    else
        status = attn_fail(err, ATTN_INTERNAL, NULL, "%s: the region '%.*s': %s", name, length, use->region->name,
                           strerror(error));
    point(err, use->output, use->index, "shared_memory_region");
    return status;
}

static size_t next_piece(const struct region_use *use)
{
    const int64_t left = use->bytes - use->done;
    return left < REGIONS_PIECE_BYTES ? (size_t)left : (size_t)REGIONS_PIECE_BYTES;
}

static attn_status read_piece(struct region_use *use, attn_error *err)
{
    const ssize_t count = pread(use->region->fd, use->memory + use->done, next_piece(use), use->offset + use->done);
    if (count < 0 && errno == EINTR) return ATTN_OK;
    if (count <= 0) return broken(use, count < 0 ? errno : 0, err);
    use->done += count;
    metrics_add(METRIC_REGION_BYTES_MOVED, "read", NULL, (double)count);
    return ATTN_OK;
}

/* Where the object has become shorter, pwrite() would make it longer again. (A client that cuts it between the two calls gets one
 * piece of its own object back.) */
static attn_status write_piece(struct region_use *use, attn_error *err)
{
    const size_t bytes = next_piece(use);
    struct stat st;
    if (fstat(use->region->fd, &st) != 0) return broken(use, errno, err);
    if (st.st_size < use->offset + use->done + (int64_t)bytes) return broken(use, 0, err);
    note_write(use->region, true);
    const ssize_t count = pwrite(use->region->fd, use->memory + use->done, bytes, use->offset + use->done);
    const int error = errno;
    note_write(use->region, false);
    errno = error;
    if (count < 0 && errno == EINTR) return ATTN_OK;
    if (count <= 0) return broken(use, count < 0 ? errno : EIO, err);
    use->done += count;
    metrics_add(METRIC_REGION_BYTES_MOVED, "written", NULL, (double)count);
    return ATTN_OK;
}

/* A device copies it, or has done so. */
static attn_status note_copies(struct region_use *use, attn_error *err)
{
    struct stat st;
    if (use->done == use->bytes) return ATTN_OK;
    if (fstat(use->region->fd, &st) != 0) return broken(use, errno, err);
    if (st.st_size < use->offset + use->bytes) return broken(use, 0, err);
    use->done = use->bytes;
    metrics_add(METRIC_REGION_BYTES_MOVED, "device", NULL, (double)use->bytes);
    return ATTN_OK;
}

/* Of the inputs, or of the outputs, a piece after another. */
static attn_status move(struct region_uses *uses, bool outputs, int64_t until_ns, bool *done, attn_error *err)
{
    *done = false;
    for (int i = 0; i < uses->count; i++) {
        struct region_use *const use = &uses->list[i];
        if (use->output != outputs || use->in_place) continue;
        if (use->pinned) {
            const attn_status status = note_copies(use, err);
            if (status != ATTN_OK) return status;
            continue;
        }
        while (use->done < use->bytes) {
            const attn_status status = (outputs ? write_piece : read_piece)(use, err);
            if (status != ATTN_OK) return status;
            if (clock_ns() >= until_ns) return ATTN_OK;
        }
    }
    *done = true;
    return ATTN_OK;
}

attn_status region_uses_read(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err)
{
    return move(uses, false, until_ns, done, err);
}

attn_status region_uses_write(struct region_uses *uses, int64_t until_ns, bool *done, attn_error *err)
{
    return move(uses, true, until_ns, done, err);
}
