/* staging.c: a pool of staging memory (host memory for the tensors of requests) with an upper bound. Released blocks
 * stay mapped for later requests (warm blocks), because the page faults of a new mapping take longer than decoding the
 * data.
 *
 *   classes[c]   warm blocks of size class c, the most recently used first
 *   oldest ...   all warm blocks by age; the oldest are unmapped first
 *
 * Memory is counted before it is mapped: leased + warm <= limit, and warm <= warm_limit. Memory is mapped and unmapped
 * without the lock, because unmapping 256 MiB takes milliseconds. Under AddressSanitizer, warm blocks are poisoned. */
#include "server/base/staging.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

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
    SMALLEST_LOG2 = 14, /* log2 of the size of the smallest block, 16 KiB */
    LARGEST_LOG2 = 46,
    STEPS = 8,
    /* To find a warm block (released, but kept for later requests) that this core released, the pool examines at most
     * this many warm blocks of a size class. */
    LOOK = 16,
    CLASS_COUNT = (LARGEST_LOG2 - SMALLEST_LOG2) * STEPS + 1,
};
#define HUGE_PAGE ((size_t)2 << 20)
/* Blocks smaller than this use small pages, because the first access to a huge page must clear the whole page. Measured
 * with 200 clients that sent bodies of 8 MiB, on a machine with two cores: huge pages raised the 99th percentile of
 * another client's time from about 45 ms to about 440 ms. */
#define HUGE_LEAST ((size_t)32 << 20)

struct staging_pool {
    pthread_mutex_t lock;
    struct staging_source source;
    int64_t limit, warm_limit, leased, warm;
    /* number of leased bytes whose data have not arrived yet; grows only under the lock, and shrinks without it */
    _Atomic int64_t ahead;
    struct staging_block *classes[CLASS_COUNT];
    struct staging_block *oldest, *newest;
};

/* ---- Mapping anonymous memory ------------------------------------------------------------------------------------ */

/* Rounds up to whole pages, which have 4 KiB on x86-64 and up to 64 KiB on arm64. */
static size_t page_round(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

/* Reserves memory. Large blocks are aligned to huge pages. */
static void *reserve(size_t bytes)
{
    const size_t rounded = page_round(bytes);
    if (rounded < HUGE_LEAST) {
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

/* Asks the kernel for huge pages. A kernel without transparent huge pages gives the block small pages. */
static void want_huge_pages(void *memory, size_t bytes)
{
    const size_t whole = bytes / HUGE_PAGE * HUGE_PAGE;
    if (bytes >= HUGE_LEAST) (void)madvise(memory, whole, MADV_HUGEPAGE);
}

static void *anonymous_map(void *context, size_t bytes)
{
    (void)context;
    void *memory = reserve(bytes);
    if (memory) want_huge_pages(memory, bytes);
    return memory;
}

static void anonymous_unmap(void *context, void *memory, size_t bytes)
{
    (void)context;
    munmap(memory, page_round(bytes));
}

/* Enlarges a mapping with mremap(), which moves page tables. Copies the bytes only if mremap() fails. */
static void *anonymous_grow(void *context, void *memory, size_t bytes, size_t new_bytes)
{
    void *place = anonymous_map(context, new_bytes);
    if (place == NULL) return NULL;
    void *moved = mremap(memory, page_round(bytes), page_round(new_bytes), MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (moved != MAP_FAILED) {
        want_huge_pages(moved, new_bytes);
        return moved;
    }
    memcpy(place, memory, bytes);
    anonymous_unmap(context, memory, bytes);
    return place;
}

/* ---- Size classes of blocks -------------------------------------------------------------------------------------- */

/* Returns the size in bytes of the blocks of a class, in whole pages. */
static size_t class_bytes(int size_class)
{
    const int shift = SMALLEST_LOG2 + size_class / STEPS;
    return page_round(((size_t)1 << shift) + ((size_t)(size_class % STEPS) << shift) / STEPS);
}

static int class_of(size_t bytes)
{
    if (bytes <= (size_t)1 << SMALLEST_LOG2) return 0;
    const int log2 = 63 - __builtin_clzll((unsigned long long)(bytes - 1));
    if (log2 >= LARGEST_LOG2) return CLASS_COUNT;
    const size_t step = ((size_t)1 << log2) / STEPS;
    return (log2 - SMALLEST_LOG2) * STEPS + (int)((bytes - ((size_t)1 << log2) + step - 1) / step);
}

/* ---- The pool of blocks ------------------------------------------------------------------------------------------ */

struct staging_pool *staging_new(int64_t limit_bytes, int64_t warm_bytes, const struct staging_source *source)
{
    static const struct staging_source anonymous = { anonymous_map, anonymous_unmap, anonymous_grow, NULL };
    struct staging_pool *staging = calloc(1, sizeof *staging);
    if (staging == NULL) {
        fprintf(stderr, "attnd: out of memory for a pool of %zu bytes\n", sizeof *staging);
        abort();
    }
    pthread_mutex_init(&staging->lock, NULL);
    staging->source = source ? *source : anonymous;
    staging->limit = limit_bytes;
    staging->warm_limit = warm_bytes < limit_bytes ? warm_bytes : limit_bytes;
    return staging;
}

/* Removes a warm block (released, not unmapped) from the list of its size class, and from the list of all warm blocks
 * by age. Call this with the lock held. */
static void unlink_warm(struct staging_pool *staging, struct staging_block *block)
{
    struct staging_block **at = &staging->classes[block->size_class];
    while (*at != block) at = &(*at)->next_in_class;
    *at = block->next_in_class;
    *(block->older ? &block->older->newer : &staging->oldest) = block->newer;
    *(block->newer ? &block->newer->older : &staging->newest) = block->older;
    staging->warm -= (int64_t)block->bytes;
}

static void link_warm(struct staging_pool *staging, struct staging_block *block)
{
    block->next_in_class = staging->classes[block->size_class];
    staging->classes[block->size_class] = block;
    block->older = staging->newest;
    block->newer = NULL;
    *(staging->newest ? &staging->newest->newer : &staging->oldest) = block;
    staging->newest = block;
    staging->warm += (int64_t)block->bytes;
}

/* Takes the oldest warm blocks out of the pool until leased + warm + `room` <= `bound`. Returns these blocks as a list,
 * linked by next_in_class. The caller unmaps them without holding the lock. */
static struct staging_block *evict(struct staging_pool *staging, int64_t room, int64_t bound)
{
    struct staging_block *victims = NULL;
    while (staging->oldest && staging->leased + staging->warm + room > bound) {
        struct staging_block *block = staging->oldest;
        unlink_warm(staging, block);
        block->next_in_class = victims;
        victims = block;
    }
    return victims;
}

static void unmap_all(struct staging_pool *staging, struct staging_block *victims)
{
    while (victims) {
        struct staging_block *next = victims->next_in_class;
        UNPOISON(victims->memory, victims->bytes);
        staging->source.unmap(staging->source.context, victims->memory, victims->bytes);
        free(victims);
        victims = next;
    }
}

void staging_free(struct staging_pool *staging)
{
    if (staging == NULL) return;
    assert(staging->leased == 0 && staging->ahead == 0);
    unmap_all(staging, evict(staging, staging->limit + 1, staging->limit));
    assert(staging->warm == 0 && staging->oldest == NULL && staging->newest == NULL);
    pthread_mutex_destroy(&staging->lock);
    free(staging);
}

/* Returns the size of the block that is leased to a request of `bytes` bytes. This is the size of the smallest class of
 * blocks with room for them, or the account's share of the pool if that is less. Returns 0 if `bytes` exceeds that
 * share. */
static size_t lease_bytes(const struct staging_pool *staging, const struct caller *caller, size_t bytes,
                          int *size_class)
{
    const size_t most = (size_t)caller_share(caller, staging->limit);
    *size_class = class_of(bytes);
    if (*size_class >= CLASS_COUNT || bytes > most) return 0;
    const size_t rounded = class_bytes(*size_class);
    return rounded <= most ? rounded : most;
}

static attn_status too_large(const struct staging_pool *staging, const struct caller *caller, size_t bytes,
                             attn_error *err)
{
    const int64_t share = caller_share(caller, staging->limit);
    if (share < staging->limit)
        return attn_fail(
            err, ATTN_TOO_LARGE, NULL,
            "%zu bytes of tensors are needed, the limit is %lld for one token (--staging-bytes, --token-share)", bytes,
            (long long)share);
    return attn_fail(err, ATTN_TOO_LARGE, NULL, "%zu bytes of tensors are needed, the limit is %lld (--staging-bytes)",
                     bytes, (long long)staging->limit);
}

static attn_status busy(size_t bytes, attn_error *err)
{
    return attn_fail(err, ATTN_BUSY, NULL, "%zu bytes of staging memory are needed, and other requests hold them",
                     bytes);
}

/* Tests whether `more` bytes may be leased. The account's share of the pool is tested first, so the error is QUOTA even
 * if the pool is full too. *held becomes the number of bytes that the account holds. Call this with the lock held. */
static attn_status may_lease(const struct staging_pool *staging, const struct caller *caller, int64_t more,
                             int64_t *held)
{
    *held = caller ? caller->staging_bytes : 0;
    if (caller && caller_share(caller, staging->limit) < staging->limit &&
        *held + more > caller_share(caller, staging->limit))
        return ATTN_QUOTA;
    return staging->leased + more <= staging->limit ? ATTN_OK : ATTN_BUSY;
}

/* Adds `more` bytes, which may be negative, to the leased bytes of the pool and of the account. Call this with the lock
 * held. */
static void count_leased(struct staging_pool *staging, struct caller *caller, int64_t more)
{
    staging->leased += more;
    if (caller) caller->staging_bytes += more;
    assert(staging->leased >= 0 && staging->leased + staging->warm <= staging->limit);
    assert(caller == NULL || caller->staging_bytes >= 0);
}

static attn_status refused(attn_status status, const struct staging_pool *staging, const struct caller *caller,
                           size_t bytes, int64_t held, attn_error *err)
{
    if (status != ATTN_QUOTA) return busy(bytes, err);
    return attn_fail(err, ATTN_QUOTA, NULL,
                     "%zu bytes of staging memory are needed, this token holds %lld of %lld (--token-share)", bytes,
                     (long long)held, (long long)caller_share(caller, staging->limit));
}

/* Chooses a warm block of a size class: the block that this core released last, or else the block that any core
 * released last. Call this with the lock held. */
static struct staging_block *pick_warm(const struct staging_pool *staging, int size_class, int core)
{
    struct staging_block *block = staging->classes[size_class];
    for (int i = 0; block && i < LOOK; i++, block = block->next_in_class)
        if (block->core == core) return block;
    return staging->classes[size_class];
}

/* Leases a block. `ahead` means that the bytes for the block have not arrived from the client yet. */
static attn_status lease(struct staging_pool *staging, struct caller *caller, size_t bytes, bool ahead,
                         struct staging_block **out, attn_error *err)
{
    int size_class;
    const size_t want = lease_bytes(staging, caller, bytes, &size_class);
    const int core = sched_getcpu();
    struct staging_block *block = NULL, *victims = NULL;
    int64_t held;

    *out = NULL;
    if (want == 0) return too_large(staging, caller, bytes, err);
    pthread_mutex_lock(&staging->lock);
    block = pick_warm(staging, size_class, core);
    if (block && (block->bytes < bytes || block->bytes > (size_t)caller_share(caller, staging->limit))) block = NULL;
    const int64_t size = (int64_t)(block ? block->bytes : want);
    /* A warm block (released, not unmapped) counts towards the pool's bound already, but not towards the account's
     * share. */
    attn_status status = may_lease(staging, caller, size, &held);
    if (status == ATTN_OK && ahead && staging->ahead + size > staging->limit / STAGING_AHEAD_SHARE) status = ATTN_BUSY;
    if (status == ATTN_OK) {
        if (block) unlink_warm(staging, block);
        else victims = evict(staging, size, staging->limit);
        count_leased(staging, caller, size);
        if (ahead) staging->ahead += size;
        assert(!ahead || staging->ahead <= staging->limit / STAGING_AHEAD_SHARE);
    }
    pthread_mutex_unlock(&staging->lock);

    unmap_all(staging, victims);
    if (status != ATTN_OK) return refused(status, staging, caller, bytes, held, err);
    if (block) UNPOISON(block->memory, block->bytes);
    else {
        block = calloc(1, sizeof *block);
        if (block) block->memory = staging->source.map(staging->source.context, want);
        if (block == NULL || block->memory == NULL) {
            free(block);
            pthread_mutex_lock(&staging->lock);
            count_leased(staging, caller, -size);
            if (ahead) staging->ahead -= size;
            pthread_mutex_unlock(&staging->lock);
            return attn_fail(err, ATTN_NO_MEMORY, NULL, "the system has no memory for %zu bytes of tensors", bytes);
        }
        block->bytes = want;
        block->size_class = size_class;
    }
    assert(!block->leased);
    block->leased = true;
    block->caller = caller;
    block->ahead = ahead;
    *out = block;
    return ATTN_OK;
}

attn_status staging_lease(struct staging_pool *staging, struct caller *caller, size_t bytes,
                          struct staging_block **block, attn_error *err)
{
    return lease(staging, caller, bytes, false, block, err);
}

bool staging_lease_ahead(struct staging_pool *staging, struct caller *caller, size_t bytes,
                         struct staging_block **block)
{
    return lease(staging, caller, bytes, true, block, NULL) == ATTN_OK;
}

void staging_arrived(struct staging_pool *staging, struct staging_block *block)
{
    assert(block->leased);
    if (!block->ahead) return;
    block->ahead = false;
    const int64_t ahead = atomic_fetch_sub(&staging->ahead, (int64_t)block->bytes) - (int64_t)block->bytes;
    assert(ahead >= 0);
    (void)ahead;
}

attn_status staging_grow(struct staging_pool *staging, struct staging_block **held, size_t used, size_t bytes,
                         attn_error *err)
{
    struct staging_block *block = *held;
    int size_class;
    struct caller *caller = block->caller;
    if (bytes <= block->bytes) return ATTN_OK;
    const size_t want = lease_bytes(staging, caller, bytes, &size_class);
    if (want == 0) return too_large(staging, caller, bytes, err);
    staging_arrived(staging, block);

    if (staging->source.grow == NULL) {
        struct staging_block *larger;
        const attn_status status = staging_lease(staging, caller, bytes, &larger, err);
        if (status != ATTN_OK) return status;
        memcpy(larger->memory, block->memory, used);
        staging_release(staging, block);
        *held = larger;
        return ATTN_OK;
    }

    const int64_t more = (int64_t)want - (int64_t)block->bytes;
    struct staging_block *victims = NULL;
    pthread_mutex_lock(&staging->lock);
    int64_t already;
    const attn_status status = may_lease(staging, caller, more, &already);
    if (status == ATTN_OK) {
        victims = evict(staging, more, staging->limit);
        count_leased(staging, caller, more);
    }
    pthread_mutex_unlock(&staging->lock);
    unmap_all(staging, victims);
    if (status != ATTN_OK) return refused(status, staging, caller, bytes, already, err);

    void *moved = staging->source.grow(staging->source.context, block->memory, block->bytes, want);
    if (moved == NULL) {
        pthread_mutex_lock(&staging->lock);
        count_leased(staging, caller, -more);
        pthread_mutex_unlock(&staging->lock);
        return attn_fail(err, ATTN_NO_MEMORY, NULL, "the system has no memory for %zu bytes of tensors", bytes);
    }
    block->memory = moved;
    block->bytes = want;
    block->size_class = size_class;
    return ATTN_OK;
}

void staging_release(struct staging_pool *staging, struct staging_block *block)
{
    struct staging_block *victims = NULL;
    if (block == NULL) return;
    staging_arrived(staging, block);
    block->core = sched_getcpu();
    block->idle_since_ms = clock_ms();
    POISON(block->memory, block->bytes);
    pthread_mutex_lock(&staging->lock);
    count_leased(staging, block->caller, -(int64_t)block->bytes);
    block->caller = NULL;
    block->leased = false;
    link_warm(staging, block);
    if (staging->warm > staging->warm_limit) victims = evict(staging, 0, staging->leased + staging->warm_limit);
    assert(staging->warm >= 0 && staging->warm <= staging->warm_limit);
    pthread_mutex_unlock(&staging->lock);
    unmap_all(staging, victims);
}

attn_status staging_count(struct staging_pool *staging, struct caller *caller, size_t bytes, attn_error *err)
{
    struct staging_block *victims = NULL;
    int64_t held;
    pthread_mutex_lock(&staging->lock);
    const attn_status status = may_lease(staging, caller, (int64_t)bytes, &held);
    if (status == ATTN_OK) {
        victims = evict(staging, (int64_t)bytes, staging->limit);
        count_leased(staging, caller, (int64_t)bytes);
    }
    pthread_mutex_unlock(&staging->lock);
    unmap_all(staging, victims);
    return status == ATTN_OK ? status : refused(status, staging, caller, bytes, held, err);
}

void staging_count_back(struct staging_pool *staging, struct caller *caller, size_t bytes)
{
    pthread_mutex_lock(&staging->lock);
    count_leased(staging, caller, -(int64_t)bytes);
    pthread_mutex_unlock(&staging->lock);
}

void staging_trim(struct staging_pool *staging, int64_t now_ms, int64_t idle_ms)
{
    struct staging_block *victims = NULL;
    pthread_mutex_lock(&staging->lock);
    while (staging->oldest && now_ms - staging->oldest->idle_since_ms >= idle_ms) {
        struct staging_block *block = staging->oldest;
        unlink_warm(staging, block);
        block->next_in_class = victims;
        victims = block;
    }
    pthread_mutex_unlock(&staging->lock);
    unmap_all(staging, victims);
}

static int64_t read_locked(const struct staging_pool *staging, const int64_t *value)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&staging->lock;
    pthread_mutex_lock(lock);
    const int64_t copy = *value;
    pthread_mutex_unlock(lock);
    return copy;
}

int64_t staging_limit_bytes(const struct staging_pool *staging)
{
    return staging->limit;
}
int64_t staging_leased_bytes(const struct staging_pool *staging)
{
    return read_locked(staging, &staging->leased);
}
int64_t staging_warm_bytes(const struct staging_pool *staging)
{
    return read_locked(staging, &staging->warm);
}
int64_t staging_ahead_bytes(const struct staging_pool *staging)
{
    return staging->ahead;
}
