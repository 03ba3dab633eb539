/* caller.c: reference counts of clients' accounts. All clients that send the same token have one account. */
#include "server/base/caller.h"

#include <assert.h>
#include <stdlib.h>

#include "server/base/flow.h"

struct caller *caller_new(void)
{
    struct caller *caller = calloc(1, sizeof *caller);
    if (caller == NULL) return NULL;
    atomic_init(&caller->references, 1);
    atomic_init(&caller->percent, 100);
    return caller;
}

/* Returns whether `caller` is the account of all clients without a token. This account has no reference count, because
 * every thread would write to the count in every request. */
bool caller_is_anonymous(const struct caller *caller)
{
    return atomic_load_explicit(&caller->references, memory_order_relaxed) == 0;
}

struct caller *caller_hold(struct caller *caller)
{
    if (caller && !caller_is_anonymous(caller)) atomic_fetch_add_explicit(&caller->references, 1, memory_order_relaxed);
    return caller;
}

void caller_release(struct caller *caller)
{
    if (caller == NULL || caller_is_anonymous(caller)) return;
    if (atomic_fetch_sub_explicit(&caller->references, 1, memory_order_acq_rel) != 1) return;
    for (int place = 0; place < CALLER_PLACES; place++) assert(atomic_load(&caller->places[place]) == 0);
    assert(caller->staging_bytes == 0 && caller->context_bytes == 0 && caller->contexts == 0);
    assert(caller->regions == 0 && caller->region_bytes == 0);
    flow_release(caller->flow);
    free(caller);
}

int64_t caller_share(const struct caller *caller, int64_t bound)
{
    const int percent = caller ? atomic_load_explicit(&caller->percent, memory_order_relaxed) : 100;
    const int64_t share = bound / 100 * percent + bound % 100 * percent / 100;
    return share > 1 ? share : 1;
}
