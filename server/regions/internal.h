/* regions_internal.h: what the files of the regions share; regions.h is what others see.
 *
 *   regions.c        the table: which objects are taken, whose they are, how many
 *   region_keeper.c  references, and the thread that closes, pins and lets go of what nobody uses any more
 *   region_uses.c    what a request uses of them: its tensors, read and written piece by piece, or where they lie
 *
 * One lock for the table and the references; what is read and written needs none. */
#ifndef REGIONS_INTERNAL_H
#define REGIONS_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "server/base/keyed_hash.h"
#include "server/regions/regions.h"

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
    struct hash_key key;
    struct {
        uint64_t hash; /* of the name and its caller; names with another hash need not be compared */
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

/* ---- regions.c: with the lock held ------------------------------------------------------------------------------- */

/* Are both of one object, or one allocation? (The lock is not needed.) */
bool region_is_same_object(const struct region *a, const struct region *b);

/* The entry of the table; -1: the caller has none of that name. */
int regions_find(const struct regions *regions, const struct caller *caller, const char *name);

/* ---- region_keeper.c: with the lock held ------------------------------------------------------------------------- */

/* A reference less. */
void region_let_go(struct region *region);
void region_let_pin_go(struct pin *pin); /* NULL is fine */

/* Has nobody else modified the object since it was pinned, and is it as long? */
bool region_is_intact(const struct region *region);

/* It is to be pinned, if that is worth it. */
void region_ask_for_pin(struct region *region);

/* ---- region_keeper.c: without it --------------------------------------------------------------------------------- */

/* Around each of the server's writes. A client that modifies the object between the two is not seen;
 * it was to leave it alone. */
void region_note_write(struct region *region, bool begins);

/* The table's thread (argument: the table), until `end` is set and nothing is left to do: what may take the driver, or
 * the system, long. */
void *region_keeper(void *regions);

#endif
