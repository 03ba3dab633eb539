/* keeper.c: references to regions (memory that clients registered), and the table's own thread. This thread makes the
 * calls that may take long, so that no request waits for them: munmap(), pinning by a driver, the last close() of an
 * object.
 *
 * A pin (pages that a driver holds) is valid while its pages belong to the object: a client may truncate its object and
 * extend it again. The test is that the object's modification time has not changed since the pinning, except by the
 * server's own writes (region_note_write()). */
#include "server/regions/internal.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "server/base/caller.h"
#include "server/base/clock.h"
#include "server/base/limits.h"

/* ---- References to regions --------------------------------------------------------------------------------------- */

void region_let_pin_go(struct pin *pin)
{
    if (pin == NULL || --pin->references > 0) return;
    pin->next = pin->regions->loose;
    pin->regions->loose = pin;
    pthread_cond_signal(&pin->regions->wake);
}

void region_let_go(struct region *region)
{
    struct regions *const regions = region->regions;
    assert(region->references > 0);
    if (--region->references > 0) return;
    region_let_pin_go(region->pin);
    region->pin = NULL;
    region->next = regions->gone;
    regions->gone = region;
    pthread_cond_signal(&regions->wake);
}

/* ---- Whether a region's pinned pages still belong to its object -------------------------------------------------- */

bool region_is_intact(const struct region *region)
{
    struct stat st;
    if (fstat(region->fd, &st) != 0 || st.st_size < region->offset + region->bytes) return false;
    if (region->writing > 0) return region->intact;
    return st.st_mtim.tv_sec == region->seen.tv_sec && st.st_mtim.tv_nsec == region->seen.tv_nsec;
}

/* Records the modification time of the region's object, so that a later modification is noticed. To be called with the
 * lock held. */
static void begin_watch(struct region *region)
{
    struct stat st;
    region->intact = fstat(region->fd, &st) == 0;
    if (region->intact) region->seen = st.st_mtim;
}

void region_note_write(struct region *region, bool begins)
{
    pthread_mutex_lock(&region->regions->lock);
    if (begins) {
        if (region->writing == 0) region->intact = region_is_intact(region);
        region->writing++;
    } else {
        if (region->intact) begin_watch(region);
        region->writing--;
    }
    pthread_mutex_unlock(&region->regions->lock);
}

/* ---- Pinning regions --------------------------------------------------------------------------------------------- */

void region_ask_for_pin(struct region *region)
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

/* Maps the object's pages and lets a driver hold (pin) them. The first write to a mapped page changes the object's
 * modification time. All pages are therefore written to before that time is recorded. The pauses before and after the
 * recording make sure that any later modification has a different time. If the client truncates the object during this
 * function, a system call fails, and no SIGBUS is raised. */
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
    const bool intact = region_is_intact(region);
    pthread_mutex_unlock(&regions->lock);
    if (!intact) attn_host_unpin(regions->pinner, pin->mapping);
    return intact;
}

/* Pins a region's pages: a driver then holds them, and devices can copy from and to them. Fills holes in the file
 * first. Returns NULL if the pages cannot be pinned; the CPU then copies. */
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

/* Pins the next region in the list `fresh`: a driver holds its pages, so that devices can copy. If the bound on pinned
 * memory is reached, the region is not pinned, and the CPU copies. Call this with the lock held; the lock is released
 * during the pinning. */
static void pin_next(struct regions *regions)
{
    struct region *const region = regions->fresh;
    regions->fresh = region->after;
    region_let_pin_go(region->pin);
    region->pin = NULL;
    /* the list `fresh` holds one reference; a region without any other reference is unregistered and unused */
    if (!regions->end && region->references > 1 && region->bytes <= regions->pinned_most - regions->pinned_bytes) {
        pthread_mutex_unlock(&regions->lock);
        struct pin *const made = pin(region);
        pthread_mutex_lock(&regions->lock);
        if (made) regions->pinned_bytes += (int64_t)made->bytes;
        region->pin = made;
    }
    region->pinned_ms = clock_ms();
    region->is_to_pin = false;
    region_let_go(region);
}

/* ---- The thread that pins and closes regions --------------------------------------------------------------------- */

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

void *region_keeper(void *context)
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
