/* arena.c: staging memory with a bound, recycled so that a steady load causes no page faults.
 *
 * The problem: fresh memory costs a page fault every 4 KiB (0.25 us and the zeroing of the page), more than
 * decoding into it. And whatever a client may ask for must be bounded. The idea: extents of a few sizes, eight to a
 * doubling (at most 12.5 % is wasted, and of that only address space). A released extent goes to the list of its
 * size and is the next to be leased there, by the same core where there is one, whose cache may still have it.
 * Large ones are aligned to huge pages.
 *
 *   classes[c]   warm extents of size class c, the most recently used first
 *   oldest ...   all warm extents by age: what is evicted when the bound is reached, and what arena_trim() gives back
 *
 * Invariants
 * 1. leased + warm <= limit, counted in whole extents, at every moment; memory is counted before it is mapped.
 * 2. warm <= warm_limit.
 * 3. Memory is mapped and unmapped without the lock: unmapping 256 MiB takes milliseconds, and others would wait.
 * 4. ahead <= limit / ARENA_AHEAD_SHARE, and a caller's extents together <= its share.
 * 5. Under AddressSanitizer a warm extent is poisoned: whoever still reads it is caught. */
#include "server/base/arena.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "server/base/caller.h"
#include "server/base/clock.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(memory, bytes)   ASAN_POISON_MEMORY_REGION(memory, bytes)
#define UNPOISON(memory, bytes) ASAN_UNPOISON_MEMORY_REGION(memory, bytes)
#else
#define POISON(memory, bytes)   ((void)0)
#define UNPOISON(memory, bytes) ((void)0)
#endif

enum {
    SMALLEST_LOG2 = 14, /* 16 KiB: less is not worth a mapping of its own */
    LARGEST_LOG2 = 46,
    STEPS = 8, /* sizes to a doubling */
    LOOK = 16, /* extents of a class that are asked whether this core released them */
    CLASS_COUNT = (LARGEST_LOG2 - SMALLEST_LOG2) * STEPS + 1,
};
#define HUGE_PAGE ((size_t)2 << 20)

struct arena {
    pthread_mutex_t lock;
    struct arena_source source;
    int64_t limit, warm_limit, leased, warm;
    _Atomic int64_t ahead; /* of `leased`; grows under the lock, shrinks without */
    struct extent *classes[CLASS_COUNT];
    struct extent *oldest, *newest;
};

/* ---- Anonymous memory -------------------------------------------------------------------------------------------- */

static size_t page_round(size_t bytes)
{
    const size_t unit = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096;
    return (bytes + unit - 1) / unit * unit;
}

/* Address space for `bytes`, aligned so that huge pages fit. */
static void *reserve(size_t bytes)
{
    const size_t rounded = page_round(bytes);
    if (rounded < HUGE_PAGE) {
        void *memory = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return memory == MAP_FAILED ? NULL : memory;
    }
    char *all = mmap(NULL, rounded + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                     0);
    if (all == MAP_FAILED) return NULL;
    char *memory = (char *)(((uintptr_t)all + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (memory > all) munmap(all, (size_t)(memory - all));
    if (memory < all + HUGE_PAGE) munmap(memory + rounded, (size_t)(all + HUGE_PAGE - memory));
    return memory;
}

static void *anonymous_map(void *context, size_t bytes)
{
    (void)context;
    void *memory = reserve(bytes);
    /* Refused on kernels without transparent huge pages: then small ones do. */
    if (memory && bytes >= HUGE_PAGE) (void)madvise(memory, page_round(bytes), MADV_HUGEPAGE);
    return memory;
}

static void anonymous_unmap(void *context, void *memory, size_t bytes)
{
    (void)context;
    munmap(memory, page_round(bytes));
}

/* Moves the page tables, not the bytes. */
static void *anonymous_grow(void *context, void *memory, size_t bytes, size_t new_bytes)
{
    void *place = anonymous_map(context, new_bytes);
    if (place == NULL) return NULL;
    void *moved = mremap(memory, page_round(bytes), page_round(new_bytes), MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (moved != MAP_FAILED) {
        if (new_bytes >= HUGE_PAGE) (void)madvise(moved, page_round(new_bytes), MADV_HUGEPAGE);
        return moved;
    }
    memcpy(place, memory, bytes);
    anonymous_unmap(context, memory, bytes);
    return place;
}

/* ---- Sizes ------------------------------------------------------------------------------------------------------- */

static size_t class_bytes(int size_class)
{
    const int shift = SMALLEST_LOG2 + size_class / STEPS;
    return ((size_t)1 << shift) + ((size_t)(size_class % STEPS) << shift) / STEPS;
}

/* The smallest class that holds `bytes`; CLASS_COUNT when none does. */
static int class_of(size_t bytes)
{
    if (bytes <= (size_t)1 << SMALLEST_LOG2) return 0;
    const int log2 = 63 - __builtin_clzll((unsigned long long)(bytes - 1)); /* 2^log2 < bytes <= 2^(log2 + 1) */
    if (log2 >= LARGEST_LOG2) return CLASS_COUNT;
    const size_t step = ((size_t)1 << log2) / STEPS;
    return (log2 - SMALLEST_LOG2) * STEPS + (int)((bytes - ((size_t)1 << log2) + step - 1) / step);
}

/* ---- The pool ---------------------------------------------------------------------------------------------------- */

struct arena *arena_new(int64_t limit_bytes, int64_t warm_bytes, const struct arena_source *source)
{
    static const struct arena_source anonymous = { anonymous_map, anonymous_unmap, anonymous_grow, NULL };
    struct arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL) {
        fprintf(stderr, "attnd: out of memory for a pool of %zu bytes\n", sizeof *arena);
        abort();
    }
    pthread_mutex_init(&arena->lock, NULL);
    arena->source = source ? *source : anonymous;
    arena->limit = limit_bytes;
    arena->warm_limit = warm_bytes < limit_bytes ? warm_bytes : limit_bytes;
    return arena;
}

/* Takes a warm extent out of both lists. Its place in the class list is found by walking: lists are short, and all but
 * evictions take one of the first. Call with the lock held. */
static void unlink_warm(struct arena *arena, struct extent *extent)
{
    struct extent **at = &arena->classes[extent->size_class];
    while (*at != extent) at = &(*at)->next_in_class;
    *at = extent->next_in_class;
    *(extent->older ? &extent->older->newer : &arena->oldest) = extent->newer;
    *(extent->newer ? &extent->newer->older : &arena->newest) = extent->older;
    arena->warm -= (int64_t)extent->bytes;
}

static void link_warm(struct arena *arena, struct extent *extent)
{
    extent->next_in_class = arena->classes[extent->size_class];
    arena->classes[extent->size_class] = extent;
    extent->older = arena->newest;
    extent->newer = NULL;
    *(arena->newest ? &arena->newest->newer : &arena->oldest) = extent;
    arena->newest = extent;
    arena->warm += (int64_t)extent->bytes;
}

/* Takes the oldest warm extents out until leased + warm + `room` <= `bound`; returns them as a list
 * (next_in_class), to be unmapped after the lock is gone. */
static struct extent *evict(struct arena *arena, int64_t room, int64_t bound)
{
    struct extent *victims = NULL;
    while (arena->oldest && arena->leased + arena->warm + room > bound) {
        struct extent *extent = arena->oldest;
        unlink_warm(arena, extent);
        extent->next_in_class = victims;
        victims = extent;
    }
    return victims;
}

static void unmap_all(struct arena *arena, struct extent *victims)
{
    while (victims) {
        struct extent *next = victims->next_in_class;
        UNPOISON(victims->memory, victims->bytes);
        arena->source.unmap(arena->source.context, victims->memory, victims->bytes);
        free(victims);
        victims = next;
    }
}

void arena_free(struct arena *arena)
{
    if (arena == NULL) return;
    assert(arena->leased == 0 && arena->ahead == 0);
    unmap_all(arena, evict(arena, arena->limit + 1, arena->limit));
    assert(arena->warm == 0 && arena->oldest == NULL && arena->newest == NULL);
    pthread_mutex_destroy(&arena->lock);
    free(arena);
}

/* The size that a request for `bytes` is given: its class, but never more than the caller's share of the pool. 0: more
 * than that. */
static size_t lease_bytes(const struct arena *arena, const struct caller *caller, size_t bytes, int *size_class)
{
    const size_t most = (size_t)caller_share(caller, arena->limit);
    *size_class = class_of(bytes);
    if (*size_class >= CLASS_COUNT || bytes > most) return 0;
    const size_t rounded = class_bytes(*size_class);
    return rounded <= most ? rounded : most;
}

static attn_status too_large(const struct arena *arena, const struct caller *caller, size_t bytes, attn_error *err)
{
    const int64_t share = caller_share(caller, arena->limit);
    if (share < arena->limit)
        return attn_fail(
            err, ATTN_TOO_LARGE, NULL,
            "%zu bytes of tensors are needed, the limit is %lld for one token (--staging-bytes, --token-share)", bytes,
            (long long)share);
    return attn_fail(err, ATTN_TOO_LARGE, NULL, "%zu bytes of tensors are needed, the limit is %lld (--staging-bytes)",
                     bytes, (long long)arena->limit);
}

static attn_status busy(size_t bytes, attn_error *err)
{
    return attn_fail(err, ATTN_BUSY, NULL, "%zu bytes of staging memory are needed, and other requests hold them",
                     bytes);
}

/* May `more` bytes be leased? The share is looked at first: a caller who has used it up hears that, however full the pool
 * is. *held: what counts against the refusal. Call with the lock held. */
static attn_status may_lease(const struct arena *arena, const struct caller *caller, int64_t more, int64_t *held)
{
    *held = caller ? caller->staging_bytes : 0;
    if (caller && caller_share(caller, arena->limit) < arena->limit &&
        *held + more > caller_share(caller, arena->limit))
        return ATTN_QUOTA;
    return arena->leased + more <= arena->limit ? ATTN_OK : ATTN_BUSY;
}

/* `more` may be negative. Call with the lock held. */
static void count_leased(struct arena *arena, struct caller *caller, int64_t more)
{
    arena->leased += more;
    if (caller) caller->staging_bytes += more;
    assert(arena->leased >= 0 && arena->leased + arena->warm <= arena->limit); /* invariant 1 */
    assert(caller == NULL || caller->staging_bytes >= 0);
}

static attn_status refused(attn_status status, const struct arena *arena, const struct caller *caller, size_t bytes,
                           int64_t held, attn_error *err)
{
    if (status != ATTN_QUOTA) return busy(bytes, err);
    return attn_fail(err, ATTN_QUOTA, NULL,
                     "%zu bytes of staging memory are needed, this token holds %lld of %lld (--token-share)", bytes,
                     (long long)held, (long long)caller_share(caller, arena->limit));
}

/* A warm extent of the class: the one that this core released last, else the one that was released last. Call with
 * the lock held. */
static struct extent *pick_warm(const struct arena *arena, int size_class, int core)
{
    struct extent *extent = arena->classes[size_class];
    for (int i = 0; extent && i < LOOK; i++, extent = extent->next_in_class)
        if (extent->core == core) return extent;
    return arena->classes[size_class];
}

/* arena_lease(), with `ahead` for bytes that are only announced. */
static attn_status lease(struct arena *arena, struct caller *caller, size_t bytes, bool ahead, struct extent **out,
                         attn_error *err)
{
    int size_class;
    const size_t want = lease_bytes(arena, caller, bytes, &size_class);
    const int core = sched_getcpu();
    struct extent *extent = NULL, *victims = NULL;
    int64_t held;

    *out = NULL;
    if (want == 0) return too_large(arena, caller, bytes, err);
    pthread_mutex_lock(&arena->lock);
    extent = pick_warm(arena, size_class, core);
    if (extent && extent->bytes < bytes) extent = NULL;
    const int64_t size = (int64_t)(extent ? extent->bytes : want);
    /* Memory that is warm counts already, but not to the caller. */
    attn_status status = may_lease(arena, caller, size, &held);
    if (status == ATTN_OK && ahead && arena->ahead + size > arena->limit / ARENA_AHEAD_SHARE) status = ATTN_BUSY;
    if (status == ATTN_OK) {
        if (extent) unlink_warm(arena, extent);
        else victims = evict(arena, size, arena->limit);
        count_leased(arena, caller, size);
        if (ahead) arena->ahead += size;
        assert(!ahead || arena->ahead <= arena->limit / ARENA_AHEAD_SHARE);
    }
    pthread_mutex_unlock(&arena->lock);

    unmap_all(arena, victims);
    if (status != ATTN_OK) return refused(status, arena, caller, bytes, held, err);
    if (extent) UNPOISON(extent->memory, extent->bytes);
    else {
        extent = calloc(1, sizeof *extent);
        if (extent) extent->memory = arena->source.map(arena->source.context, want);
        if (extent == NULL || extent->memory == NULL) {
            free(extent);
            pthread_mutex_lock(&arena->lock);
            count_leased(arena, caller, -size);
            if (ahead) arena->ahead -= size;
            pthread_mutex_unlock(&arena->lock);
            return attn_fail(err, ATTN_NO_MEMORY, NULL, "the system has no memory for %zu bytes of tensors", bytes);
        }
        extent->bytes = want;
        extent->size_class = size_class;
    }
    assert(!extent->leased);
    extent->leased = true;
    extent->caller = caller;
    extent->ahead = ahead;
    *out = extent;
    return ATTN_OK;
}

attn_status arena_lease(struct arena *arena, struct caller *caller, size_t bytes, struct extent **extent,
                        attn_error *err)
{
    return lease(arena, caller, bytes, false, extent, err);
}

bool arena_lease_ahead(struct arena *arena, struct caller *caller, size_t bytes, struct extent **extent)
{
    return lease(arena, caller, bytes, true, extent, NULL) == ATTN_OK;
}

void arena_arrived(struct arena *arena, struct extent *extent)
{
    assert(extent->leased);
    if (!extent->ahead) return;
    extent->ahead = false;
    const int64_t ahead = arena->ahead -= (int64_t)extent->bytes;
    assert(ahead >= 0);
    (void)ahead;
}

attn_status arena_grow(struct arena *arena, struct extent **held, size_t used, size_t bytes, attn_error *err)
{
    struct extent *extent = *held;
    int size_class;
    struct caller *caller = extent->caller;
    if (bytes <= extent->bytes) return ATTN_OK;
    const size_t want = lease_bytes(arena, caller, bytes, &size_class);
    if (want == 0) return too_large(arena, caller, bytes, err);
    arena_arrived(arena, extent); /* or it would not be too small */

    if (arena->source.grow == NULL) {
        struct extent *larger;
        const attn_status status = arena_lease(arena, caller, bytes, &larger, err);
        if (status != ATTN_OK) return status;
        memcpy(larger->memory, extent->memory, used);
        arena_release(arena, extent);
        *held = larger;
        return ATTN_OK;
    }

    const int64_t more = (int64_t)want - (int64_t)extent->bytes;
    struct extent *victims = NULL;
    pthread_mutex_lock(&arena->lock);
    int64_t already;
    const attn_status status = may_lease(arena, caller, more, &already);
    if (status == ATTN_OK) {
        victims = evict(arena, more, arena->limit);
        count_leased(arena, caller, more);
    }
    pthread_mutex_unlock(&arena->lock);
    unmap_all(arena, victims);
    if (status != ATTN_OK) return refused(status, arena, caller, bytes, already, err);

    void *moved = arena->source.grow(arena->source.context, extent->memory, extent->bytes, want);
    if (moved == NULL) {
        pthread_mutex_lock(&arena->lock);
        count_leased(arena, caller, -more);
        pthread_mutex_unlock(&arena->lock);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "the system has no memory for %zu bytes of tensors", bytes);
    }
    extent->memory = moved;
    extent->bytes = want;
    extent->size_class = size_class;
    return ATTN_OK;
}

void arena_release(struct arena *arena, struct extent *extent)
{
    struct extent *victims = NULL;
    if (extent == NULL) return;
    arena_arrived(arena, extent); /* nobody waits for it any more */
    extent->core = sched_getcpu();
    extent->idle_since_ms = clock_ms();
    POISON(extent->memory, extent->bytes);
    pthread_mutex_lock(&arena->lock);
    count_leased(arena, extent->caller, -(int64_t)extent->bytes);
    extent->caller = NULL;
    extent->leased = false;
    link_warm(arena, extent);
    if (arena->warm > arena->warm_limit) victims = evict(arena, 0, arena->leased + arena->warm_limit);
    assert(arena->warm >= 0 && arena->warm <= arena->warm_limit); /* invariant 2 */
    pthread_mutex_unlock(&arena->lock);
    unmap_all(arena, victims);
}

void arena_trim(struct arena *arena, int64_t now_ms, int64_t idle_ms)
{
    struct extent *victims = NULL;
    pthread_mutex_lock(&arena->lock);
    while (arena->oldest && now_ms - arena->oldest->idle_since_ms >= idle_ms) {
        struct extent *extent = arena->oldest;
        unlink_warm(arena, extent);
        extent->next_in_class = victims;
        victims = extent;
    }
    pthread_mutex_unlock(&arena->lock);
    unmap_all(arena, victims);
}

static int64_t read_locked(const struct arena *arena, const int64_t *value)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&arena->lock;
    pthread_mutex_lock(lock);
    const int64_t copy = *value;
    pthread_mutex_unlock(lock);
    return copy;
}

int64_t arena_limit_bytes(const struct arena *arena)
{
    return arena->limit;
}
int64_t arena_leased_bytes(const struct arena *arena)
{
    return read_locked(arena, &arena->leased);
}
int64_t arena_warm_bytes(const struct arena *arena)
{
    return read_locked(arena, &arena->warm);
}
int64_t arena_ahead_bytes(const struct arena *arena)
{
    return arena->ahead;
}
