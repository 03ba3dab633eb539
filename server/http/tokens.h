/* tokens.h: the bearer tokens that may use this server (--token-file): one a line, blank lines and lines that start
 * with # are skipped. The file is read again on SIGHUP. Thread-safe. */
#ifndef TOKENS_H
#define TOKENS_H

#include <stdbool.h>
#include <stddef.h>

enum { TOKEN_MAX_BYTES = 256, TOKEN_MAX_COUNT = 4096 };

struct tokens;

/* NULL after filling `why` with one clear line. */
struct tokens *tokens_open(const char *path, char *why, size_t why_capacity);
void tokens_close(struct tokens *tokens); /* NULL is fine */

/* All or nothing: after a failure the old tokens stay. */
bool tokens_reload(struct tokens *tokens, char *why, size_t why_capacity);

/* The value of an Authorization header (may be NULL): does it carry one of the tokens? Takes the same time for
 * every token and every wrong one of the same length. */
bool tokens_allow(struct tokens *tokens, const char *authorization);

#endif
