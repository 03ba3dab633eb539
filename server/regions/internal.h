/* internal.h: types and functions that the files of this folder share. The public header is regions.h.
 *
 *   table.c    the table: which objects may be registered, their owners, and limits
 *   keeper.c   references, and the thread that closes, pins and unpins
 *   uses.c     a request's tensors in regions: copied piece by piece, or used in place
 *
 * One lock protects the table and the references. Reading and writing regions needs no lock. */
#ifndef REGIONS_INTERNAL_H
#define REGIONS_INTERNAL_H

#include <pthread.h>
#include <sys/types.h>
#include <time.h>

#include "server/base/keyed_hash.h"
#include "server/regions/regions.h"

struct region {
    enum region_kind kind;
    int references; /* protected by the table's lock */
    struct regions *regions;
    struct caller *caller; /* the account (access token) that owns the region; the region holds a reference to it */
    char name[PROTO_REGION_BYTES];
    /* range in bytes of the shared memory object; in a GPU's memory the offset is 0 */
    int64_t offset, bytes;
    struct region *next; /* next region in the list `gone` of regions that the table's own thread will close */

    /* Members of regions of kind SYSTEM: ranges of objects in /dev/shm. */
    char key[PROTO_REGION_BYTES];
    int fd; /* descriptor of the object; -1: none */
    dev_t filesystem;
    ino_t inode;
    /* The pages of the region that a driver holds for devices; NULL: none. The table's lock protects the members from
     * here to `after`. */
    struct pin *pin;
    /* the object's modification time when no client had modified it; if the object has another time now, a client has
     * modified it */
    struct timespec seen;
    int writing; /* number of the server's running writes to the region */
    /* Whether the object was unmodified by clients when the server began to write to it. */
    bool intact;
    /* time of the last attempt to pin the region (let a driver hold its pages); 0: none */
    int64_t pinned_ms;
    /* whether the region is in `fresh`, the list of regions to pin; the list then holds a reference to it */
    bool is_to_pin;
    struct region *after; /* next region in the list `fresh` */

    /* Members of regions of kind CUDA: memory of a GPU. */
    attn_device *device;
    int number;
    int64_t id;
    char *memory;
};

/* A pin: pages of a shared object that a driver holds, so that devices can copy from and to them. */
struct pin {
    /* Number of references: one from the region, and one from each tensor of a request that uses the pin. Protected by
     * the table's lock. */
    int references;
    struct regions *regions;
    /* `mapping`: whole pages of the object; `memory`: the region's first byte in this mapping */
    char *mapping, *memory;
    size_t bytes;
    struct pin *next;
};

struct regions {
    const char *const *prefixes;
    int prefix_count;

    pthread_mutex_t lock;
    struct hash_key key;
    struct {
        /* hash of name and account, to find a region fast */
        uint64_t hash;
        struct region *region;
    } table[REGIONS_MAX_COUNT];
    int count;
    int64_t bytes;

    pthread_t keeper;
    pthread_cond_t wake;
    struct region *gone, *fresh; /* lists: `gone` has the regions to close, `fresh` the regions to pin for devices */
    struct pin *loose;           /* list of pins (pages that a driver holds) to undo */
    bool end;
    /* the device whose driver pins regions; NULL: no device copies from regions */
    attn_device *pinner;
    int64_t pinned_bytes, pinned_most;
};

/* ---- Functions of table.c, to be called with the lock held ------------------------------------------------------- */

/* True if both regions are in one shared memory object, or in one allocation on a GPU. The lock is not needed. */
bool region_is_same_object(const struct region *a, const struct region *b);

/* Returns the index of the account's region of this name; -1: none. */
int regions_find(const struct regions *regions, const struct caller *caller, const char *name);

/* ---- Functions of keeper.c, to be called with the lock held ------------------------------------------------------ */

void region_let_go(struct region *region);
void region_let_pin_go(struct pin *pin);

/* True if no client has modified the object since the region was pinned, and the object is still long enough. */
bool region_is_intact(const struct region *region);

/* Puts the region on the list `fresh`, so that a driver will pin its pages (hold them for devices). Does nothing if the
 * size of the region is unsuitable, or if the last attempt to pin it was a short time ago. */
void region_ask_for_pin(struct region *region);

/* ---- Functions of keeper.c, to be called without the lock -------------------------------------------------------- */

/* Call this with `begins` true before each of the server's writes to the region, and with false after it. The write
 * then does not count as a modification by the client. The client must not modify the object between the two calls,
 * because the server would not notice the modification. */
void region_note_write(struct region *region, bool begins);

/* The main function of the table's own thread, which makes calls that may take long. It ends when `end` is set and
 * nothing is left to do. */
void *region_keeper(void *regions);

#endif
