/* media.h: media types of bodies (Content-Type) and of answers (Accept). */
#ifndef MEDIA_H
#define MEDIA_H

#include <stdbool.h>

/* Does a content type begin with the media type `type`, in any case, followed by nothing or by parameters? */
bool media_is(const char *text, const char *type);
/* How much does this Accept (RFC 9110, 12.5.1) want the media type `type`? 0: not at all. More is better: by q, and
 * where that is the same, a type that is named is better than one that a range (application/x,
 * x/x with stars) has in it. */
int media_accepts(const char *accept, const char *type);

#endif
