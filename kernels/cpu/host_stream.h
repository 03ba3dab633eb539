/* host_stream.h: streams of a device whose memory is the host's and whose calls return when their work is done.
 *
 * Each function is the member of attn_backend that has its name. `done` and `wait` stay NULL in the table of such a
 * backend. A stream belongs to one thread at a time. */
#ifndef KERNELS_HOST_STREAM_H
#define KERNELS_HOST_STREAM_H

#include "kernels/backend.h"

attn_status host_stream_open(attn_device *device, attn_stream **stream, attn_error *err);
void host_stream_close(attn_stream *stream);

attn_status host_stream_copy(attn_stream *stream, void *to, const void *from, size_t bytes, attn_direction direction,
                             attn_error *err);
attn_status host_stream_moves(attn_stream *stream, const attn_move *moves, int64_t count, attn_error *err);

attn_status host_stream_mark(attn_stream *stream, int slot, attn_error *err);
double host_stream_between_us(attn_stream *from, int from_slot, attn_stream *to, int to_slot);

#endif
