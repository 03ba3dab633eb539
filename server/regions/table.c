/* table.c: the table of regions (memory that clients registered). A key names one object of /dev/shm, and begins with a
 * prefix that the operator chose. The object must be a regular file without a second name, which could be a link to
 * another user's object. It must belong to the server's user, or its mode must allow access: otherwise clients of a
 * server that runs as root could offer objects that only root can open. Two accounts cannot register the same
 * object. */
#include "server/regions/internal.h"

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

#include "text/text.h"
#include "server/base/clock.h"
#include "server/base/config.h"
#include "server/base/metrics.h"

static const char *const kinds[REGION_KIND_COUNT] = {
#define X(id, label) label,
    REGION_KIND_MAP(X)
#undef X
};

const char *region_kind_label(enum region_kind kind)
{
    return kinds[kind];
}

/* ---- Opening and closing the table ------------------------------------------------------------------------------- */

struct regions *regions_new(const char *const *prefixes, int prefix_count)
{
    struct regions *const regions = calloc(1, sizeof *regions);
    if (regions == NULL) return NULL;
    regions->prefixes = prefixes;
    regions->prefix_count = prefix_count;
    if (!keyed_hash_draw(&regions->key)) {
        fprintf(stderr, "attnd: the system gave no random bytes\n");
        abort();
    }
    pthread_mutex_init(&regions->lock, NULL);
    pthread_cond_init(&regions->wake, NULL);
    if (pthread_create(&regions->keeper, NULL, region_keeper, regions) == 0) return regions;
    pthread_cond_destroy(&regions->wake);
    pthread_mutex_destroy(&regions->lock);
    free(regions);
    return NULL;
}

void regions_pin_for(struct regions *regions, attn_device *device, int64_t most_bytes)
{
    regions->pinner = device;
    regions->pinned_most = most_bytes < REGIONS_PINNED_BYTES ? most_bytes : REGIONS_PINNED_BYTES;
}

/* Removes entry `i` from the table. To be called with the lock held. */
static void take_out(struct regions *regions, int i)
{
    struct region *const region = regions->table[i].region;
    regions->table[i] = regions->table[--regions->count];
    regions->bytes -= region->bytes;
    region->caller->regions--;
    region->caller->region_bytes -= region->bytes;
    region_let_go(region);
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

/* ---- Which shared-memory objects may be registered --------------------------------------------------------------- */

static const char *without_slash(const char *key)
{
    return *key == '/' ? key + 1 : key;
}

/* Checks that a client may register the object with this key. The error does not reveal whether the object exists. */
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
        { EINVAL, "it is a directory" }, /* shm_open() of glibc gives EINVAL for a directory */
        { ENXIO, "it is not a regular file" },
        { EWOULDBLOCK, "another process has a lease on it" },
    };
    *code = PROTO_E_INVALID_REQUEST;
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
        if (reasons[i].error == error)
            return attn_fail(why, ATTN_INVALID, "/key", "key: '%s' cannot be opened: %s", key, reasons[i].says);
    *code = PROTO_E_UNAVAILABLE; /* other errors mean a lack of descriptors or memory */
    return attn_fail(why, ATTN_BUSY, "/key", "key: '%s' cannot be opened: %s", key, strerror(error));
}

/* True if the file belongs to the server's user, or its mode lets the server read and write it. Root's right to open
 * any file does not count. */
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

/* ---- Finding, registering and removing regions ------------------------------------------------------------------- */

int regions_find(const struct regions *regions, const struct caller *caller, const char *name)
{
    const uint64_t hash = keyed_hash_name(&regions->key, caller, name);
    for (int i = 0; i < regions->count; i++) {
        const struct region *const region = regions->table[i].region;
        if (regions->table[i].hash == hash && region->caller == caller && strcmp(region->name, name) == 0) return i;
    }
    return -1;
}

bool region_is_same_object(const struct region *a, const struct region *b)
{
    if (a->kind != b->kind) return false;
    if (a->kind == REGION_SYSTEM) return a->inode == b->inode && a->filesystem == b->filesystem;
    /* a GPU's allocation has the same address each time it is opened */
    return a->device == b->device && a->memory == b->memory;
}

/* True if another account has registered the same shared memory object. To be called with the lock held. */
static bool is_anothers(const struct regions *regions, const struct region *region)
{
    for (int i = 0; i < regions->count; i++) {
        const struct region *const other = regions->table[i].region;
        if (other->caller != region->caller && region_is_same_object(other, region)) return true;
    }
    return false;
}

/* Checks that one more region is within the limits. To be called with the lock held. */
static proto_error check_room(const struct regions *regions, const struct region *region, attn_error *why)
{
    const struct caller *const caller = region->caller;
    const int64_t most_bytes = caller_share(caller, REGIONS_MAX_BYTES);
    if (regions_find(regions, caller, region->name) >= 0) {
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
        return caller_is_anonymous(caller) ? PROTO_E_STORAGE_FULL : PROTO_E_QUOTA;
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
    regions->table[regions->count].hash = keyed_hash_name(&regions->key, region->caller, region->name);
    regions->table[regions->count++].region = region;
    regions->bytes += region->bytes;
    region->caller->regions++;
    region->caller->region_bytes += region->bytes;
    region->references++;
    return error;
}

/* Makes a region without adding it to the table. Returns NULL with *error set when out of memory, or if the name is too
 * long. */
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

/* Adds the region to the table, unless *error has an error already. Always drops the caller's reference to the
 * region. */
static bool settle(struct region *region, proto_error *error, attn_error *why)
{
    struct regions *const regions = region->regions;
    pthread_mutex_lock(&regions->lock);
    if (*error == PROTO_ERROR_COUNT) *error = add(regions, region, why);
    if (*error == PROTO_ERROR_COUNT) region_ask_for_pin(region);
    region_let_go(region);
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
    /* O_NONBLOCK: do not wait if another process has a lease on the file */
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
    /* check for room first, so that memory is not opened for a region that is refused */
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
        const int i = regions_find(regions, caller, name);
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
