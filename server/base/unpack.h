/* unpack.h: a body that was sent compressed (Content-Encoding: gzip, deflate), unpacked as it arrives, in pieces of a
 * bounded size. No sockets: whoever has the bytes feeds them.
 *
 *   struct unpacker *u = unpack_new(UNPACK_GZIP, limit_bytes);
 *   for (;;) {                                        // each part of the body, of any size
 *       if (unpack_next(u, &bytes, &count, &piece, &size, &err) != ATTN_OK) ...
 *       if (size == 0) break;                         // all of the part is unpacked, and count is 0
 *       ... piece, of `size` bytes ...                // one may stop here, and go on later with what is left
 *   }
 *   if (unpack_finish(u, &err) != ATTN_OK) ...        // the body is complete
 *   unpack_free(u);
 *
 * gzip is RFC 1952, deflate is RFC 1950 (zlib's format), as RFC 9110 has it. One gzip member makes a body. */
#ifndef UNPACK_H
#define UNPACK_H

#include <stdbool.h>

#include "kernels/attention.h"

enum unpack_coding { UNPACK_NOTHING, UNPACK_GZIP, UNPACK_DEFLATE };

/* The coding that a Content-Encoding names, in any case; empty elements of the list do not count. NULL, "" and
 * "identity" are UNPACK_NOTHING. False: a coding that is not taken here, or several. */
bool unpack_coding_of(const char *content_encoding, enum unpack_coding *coding);
#define UNPACK_CODINGS "gzip, deflate" /* as Accept-Encoding lists them */

struct unpacker;

/* `limit_bytes`: of what the body unpacks to. NULL: out of memory, some 80 KiB. */
struct unpacker *unpack_new(enum unpack_coding coding, uint64_t limit_bytes);
void unpack_free(struct unpacker *unpacker); /* NULL is fine */

/* Takes some of the *count bytes at *bytes, moves both, and gives what these unpack to: *size bytes at *piece, at most
 * UNPACK_PIECE_BYTES (limits.h), until the next call. What was there before a fault is given before the fault is told;
 * one that was told is the answer to every further call. How a body is split makes no difference to either.
 * Errors: INVALID (it is no such stream, or goes on behind its end), TOO_LARGE. */
attn_status unpack_next(struct unpacker *unpacker, const char **bytes, size_t *count, const char **piece, size_t *size,
                        attn_error *err);
/* Errors: INVALID (the stream goes on). An empty body is none of this file's business. */
attn_status unpack_finish(struct unpacker *unpacker, attn_error *err);

#endif
