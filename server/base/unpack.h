/* unpack.h: unpacks a compressed body (Content-Encoding: gzip, deflate) as it arrives, in pieces of a bounded size. It
 * uses no sockets: the caller passes in the bytes.
 *
 *   struct unpacker *u = unpack_new(UNPACK_GZIP, limit_bytes);
 *   for (;;) {                                        // each part of the body, of any size
 *       if (unpack_next(u, &bytes, &count, &piece, &size, &err) != ATTN_OK) ...
 *       if (size == 0) break;                         // all of the part is unpacked, and count is 0
 *       ... piece, of `size` bytes ...                // the caller may stop here and continue later
 *   }
 *   if (unpack_finish(u, &err) != ATTN_OK) ...        // the body is complete
 *   unpack_free(u);
 *
 * gzip is the format of RFC 1952, and deflate is zlib's format (RFC 1950), as in RFC 9110. A body is one gzip
 * member. */
#ifndef UNPACK_H
#define UNPACK_H

#include <stdbool.h>

#include "kernels/attention.h"

enum unpack_coding { UNPACK_NOTHING, UNPACK_GZIP, UNPACK_DEFLATE };

/* Finds the coding that a Content-Encoding header names. Upper and lower case are equal, and empty list elements do not
 * count. NULL, "" and "identity" give UNPACK_NOTHING. Returns false if there are several codings, or one that is not
 * supported. */
bool unpack_coding_of(const char *content_encoding, enum unpack_coding *coding);
#define UNPACK_CODINGS "gzip, deflate" /* the supported codings in the form of Accept-Encoding */

struct unpacker;

/* Makes an unpacker. `limit_bytes` bounds the size of the unpacked body. Returns NULL when out of memory (an unpacker
 * needs some 80 KiB). */
struct unpacker *unpack_new(enum unpack_coding coding, uint64_t limit_bytes);
void unpack_free(struct unpacker *unpacker);

/* Unpacks some of the *count bytes at *bytes. *bytes becomes the address of the first byte that was not used, and
 * *count the number of bytes from there on. *piece points to the result, *size bytes (at most UNPACK_PIECE_BYTES,
 * limits.h), which stay valid until the next call. Output that precedes a fault is returned first. The next call
 * returns the fault, and so does every later call. The output and the fault do not depend on how the body is split
 * between calls. Errors: INVALID (the data is no valid stream, or continues after the end of the stream), TOO_LARGE. */
attn_status unpack_next(struct unpacker *unpacker, const char **bytes, size_t *count, const char **piece, size_t *size,
                        attn_error *err);
/* Checks that the stream is complete. Returns INVALID if it is not. An empty body is no error here; the caller must
 * test for it. */
attn_status unpack_finish(struct unpacker *unpacker, attn_error *err);

#endif
