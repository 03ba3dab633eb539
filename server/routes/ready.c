/* ready.c: a server is ready while it is in that phase, has a device, and none of its threads is stuck. */
#include "server/routes/ready.h"

#include <stdio.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/device/devices.h"
#include "server/work/server.h"

bool ready(const struct server *server, char *why, size_t capacity)
{
    const int phase = atomic_load(&server->phase);
    int64_t busy_ms;
    if (phase != SERVER_READY) {
        snprintf(why, capacity, "%s", server_phase_label(phase));
        return false;
    }
    if (!devices_usable(server->devices)) {
        snprintf(why, capacity, "no device is usable");
        return false;
    }
    const enum heartbeat_kind stuck = heartbeat_stuck(clock_ms(), &busy_ms);
    if (stuck != HEARTBEAT_KINDS) {
        snprintf(why, capacity, "%s has been at one piece of work for %lld s", heartbeat_name(stuck),
                 (long long)(busy_ms / 1000));
        return false;
    }
    snprintf(why, capacity, "%s", server_phase_label(phase));
    return true;
}
