/* tokens.h: the bearer tokens that may use this server (--token-file). The file has one token per line; blank lines and
 * lines that start with # are skipped. Text after " #" names the token in /metrics and in the log; without this text
 * the name is the line's number, such as "line 3". Each token has an account of its own (caller.h). SIGHUP makes the
 * server read the file again; a token that stays in the file keeps its account and its name. All functions are
 * thread-safe. */
#ifndef TOKENS_H
#define TOKENS_H

#include <stdbool.h>
#include <stddef.h>

#include "server/base/limits.h"
#include "server/base/caller.h"

struct tokens;

/* Reads the token file. If there are several tokens, each may use `share_percent` percent of every limit of the server.
 * On an error returns NULL and describes the error by one line in `why`. */
struct tokens *tokens_open(const char *path, int share_percent, char *why, size_t why_capacity);
void tokens_close(struct tokens *tokens);

/* Reads the token file again. If that fails, returns false, and the old tokens stay valid. */
bool tokens_reload(struct tokens *tokens, char *why, size_t why_capacity);

/* Finds the account of the token in the value of an Authorization header, which may be NULL. Returns a reference that
 * the caller owns, or NULL if no token matches. The search takes the same time for known and unknown tokens of the same
 * length. */
struct caller *tokens_find(struct tokens *tokens, const char *authorization);

bool tokens_know(struct tokens *tokens, const struct caller *caller);

/* Returns what is wrong with an Authorization header that carries no known token. The text is static and never quotes
 * the header. */
const char *tokens_fault(const char *authorization);

#endif
