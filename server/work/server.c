/* server.c: the names of the server's phases (starting, ready, draining, ...). */
#include "server/work/server.h"

const char *server_phase_label(int phase)
{
    static const char *const labels[SERVER_PHASE_COUNT] = {
#define X(id, label) label,
        SERVER_PHASE_MAP(X)
#undef X
    };
    return phase >= 0 && phase < SERVER_PHASE_COUNT ? labels[phase] : "?";
}
