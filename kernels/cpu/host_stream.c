/* host_stream.c: see host_stream.h. */
#include "kernels/cpu/host_stream.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct host_stream {
    attn_stream base;
    struct timespec marks[ATTN_MARKS];
};

attn_status host_stream_open(attn_device *device, attn_stream **stream, attn_error *err)
{
    struct host_stream *s = calloc(1, sizeof *s);
    if (!s) return attn_fail(err, ATTN_NO_MEMORY, "", "%s: no memory for a stream", device->backend->name);
    s->base.device = device;
    *stream = &s->base;
    return ATTN_OK;
}

void host_stream_close(attn_stream *stream)
{
    free(stream);
}

attn_status host_stream_copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                             attn_error *err)
{
    (void)stream, (void)direction, (void)err;
    memmove(to, from, bytes); /* `to` may be `from`: both are memory of the host */
    return ATTN_OK;
}

attn_status host_stream_moves(attn_stream *stream, const attn_move *moves, int64_t count, attn_error *err)
{
    (void)stream, (void)err;
    for (int64_t i = 0; i < count; i++)
        if (moves[i].from) memcpy(moves[i].to, moves[i].from, moves[i].bytes);
        else memset(moves[i].to, 0, moves[i].bytes);
    return ATTN_OK;
}

attn_status host_stream_mark(attn_stream *stream, int slot, attn_error *err)
{
    (void)err;
    clock_gettime(CLOCK_MONOTONIC, &((struct host_stream *)stream)->marks[slot]);
    return ATTN_OK;
}

double host_stream_between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot)
{
    const struct timespec *a = &((struct host_stream *)from)->marks[from_slot];
    const struct timespec *b = &((struct host_stream *)to)->marks[to_slot];
    return (double)(b->tv_sec - a->tv_sec) * 1e6 + (double)(b->tv_nsec - a->tv_nsec) / 1e3;
}
