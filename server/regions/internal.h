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
    int references; /* number of references to the region; the lock of the table of regions protects this number */
    struct regions *regions;
    struct caller *caller; /* the account (access token) that owns the region; the region holds a reference to the
                            * account */
    char name[PROTO_REGION_BYTES];
    /* offset of the region (memory that a client registered) in its shared memory object, and the region's length, both
     * in bytes; in a GPU's memory the offset is 0 */
    int64_t offset, bytes;
    struct region *next; /* next region in the list of regions that the table's own thread will close */

    /* The members below are used for regions of kind SYSTEM: ranges of objects in /dev/shm. */
    char key[PROTO_REGION_BYTES];
    int fd; /* descriptor of the object of /dev/shm; -1: the region has none */
    dev_t filesystem;
    ino_t inode;
    /* The pin of the region: pages of the object that a driver holds for devices. NULL: the region is not pinned. The
     * table's lock protects the members from `pin` to `after`. */
    struct pin *pin;
    struct timespec seen; /* time of the object's last modification, ignoring the server's own writes */
    int writing;          /* number of running writes by the server to the region (the client's memory) */
    /* true: when the server's writes that are running now began, no client had modified the object */
    bool intact;
    /* time of the last attempt to pin the region (to let a driver hold its pages); 0: there was none */
    int64_t pinned_ms;
    /* true: the region is in the list `fresh` of regions to pin, which holds a reference to the region */
    bool is_to_pin;
    struct region *after; /* next region in the list `fresh` (regions to pin) */

    /* The members below are used for regions of kind CUDA: memory of a GPU. */
    attn_device *device;
    int number; /* the server's number of `device` */
    int64_t id; /* the clients' number of `device` */
    char *memory;
};

/* A pin: pages of a shared object that a driver holds, so that devices can copy from and to them. See pin() in
 * keeper.c. */
struct pin {
    /* number of references, protected by the table's lock: one for the region, and one for each tensor of a request
     * that uses the pin */
    int references;
    struct regions *regions;
    /* `mapping`: address at which whole pages of the object are mapped; `memory`: address of the region's first byte in
     * this mapping */
    char *mapping, *memory;
    size_t bytes;     /* size of the mapping in bytes */
    struct pin *next; /* next pin (pages that a driver holds) in the list of pins to undo */
};

struct regions {
    const char *const *prefixes;
    int prefix_count;

    pthread_mutex_t lock;
    struct hash_key key;
    struct {
        /* hash of a name and an account: a search compares only regions that have the wanted hash */
        uint64_t hash;
        struct region *region;
    } table[REGIONS_MAX_COUNT];
    int count;
    int64_t bytes;

    pthread_t keeper;
    pthread_cond_t wake;
    struct region *gone, *fresh; /* lists of regions (registered memory): those to close (gone), and those to pin for
                                  * devices (fresh) */
    struct pin *loose;           /* list of pins (pages that a driver holds) to undo */
    bool end;
    /* the device whose driver pins regions (holds their pages); NULL: no device copies from regions */
    attn_device *pinner;
    int64_t pinned_bytes, pinned_most;
};

/* ---- Functions of table.c, to be called with the lock held ------------------------------------------------------- */

/* True if both regions are ranges of one shared memory object, or of one allocation on a GPU. The lock is not
 * needed. */
bool region_is_same_object(const struct region *a, const struct region *b);

/* Returns the index in the table of the region that this account has registered under this name; -1: there is none. */
int regions_find(const struct regions *regions, const struct caller *caller, const char *name);

/* ---- Functions of keeper.c, to be called with the lock held ------------------------------------------------------ */

/* Drops a reference to the region (memory that a client registered). */
void region_let_go(struct region *region);
void region_let_pin_go(struct pin *pin); /* does nothing if `pin` is NULL */

/* True if the object still contains the region's pinned pages: no client has modified the object since the region was
 * pinned, and the object is still long enough for the region. */
bool region_is_intact(const struct region *region);

/* Puts the region (registered memory) on the list of regions whose pages a driver is to pin. Does nothing if the region
 * is too small or too large to be pinned, is on the list already, or if the last attempt to pin it was a short time
 * ago. */
void region_ask_for_pin(struct region *region);

/* ---- Functions of keeper.c, to be called without the lock -------------------------------------------------------- */

/* Call this before (`begins`) and after each of the server's writes to the region (the client's memory), so that these
 * writes do not count as modifications by the client. A modification by the client between the two calls is not
 * noticed; the client must leave the object alone then. */
void region_note_write(struct region *region, bool begins);

/* The main function of the table's own thread (the argument is the table). The thread makes those calls of the
 * driver and the system that may take long. The function ends when `end` is set and nothing is left to do. */
void *region_keeper(void *regions);

#endif
