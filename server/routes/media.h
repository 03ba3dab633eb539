/* media.h: media types of bodies (Content-Type) and of answers (Accept). */
#ifndef MEDIA_H
#define MEDIA_H

#include <stdbool.h>

/* True if the text is this media type, in upper or lower case, followed by nothing or by parameters. */
bool media_is(const char *text, const char *type);
/* Returns how much an Accept header (RFC 9110, 12.5.1) prefers the media type `type`; 0: not at all. A higher weight q
 * gives a higher result. Of two types with equal q, one that the header names gets a higher result than one that only
 * matches a wildcard. */
int media_accepts(const char *accept, const char *type);

#endif
