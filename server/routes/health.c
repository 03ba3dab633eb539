/* health.c: a server is ready while its phase is SERVER_READY, a device is usable, and no thread of the server is
 * stuck. */
#include "server/routes/health.h"

#include <stdio.h>
#include <string.h>

#include "server/base/clock.h"
#include "server/base/heartbeat.h"
#include "server/device/devices.h"
#include "server/work/server.h"

bool health_ready(const struct server *server, char *why, size_t capacity)
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

static void answer_text(struct answer *answer, int status, const char *text)
{
    answer->status = status;
    answer->content_type = "text/plain; charset=utf-8";
    answer->length = strlen(text);
    answer->body = strdup(text);
}

void health_answer_live(struct request *request, struct answer *answer)
{
    (void)request;
    answer_text(answer, 200, "ok\n");
}

void health_answer_ready(struct request *request, struct answer *answer)
{
    char why[96], text[100];
    const bool yes = health_ready(request->server, why, sizeof why);
    snprintf(text, sizeof text, "%s\n", why);
    answer_text(answer, yes ? 200 : 503, text);
}
