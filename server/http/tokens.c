/* tokens.c: bearer tokens.
 *
 * A comparison that stops at the first difference tells an attacker how much of a guess was right. So every token
 * is held in a field of fixed length, padded with zeros, and a candidate is compared with all of them, all bytes,
 * whatever was found before. */
#include "server/http/tokens.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct token_list {
    size_t count;
    uint8_t token[][TOKEN_MAX_BYTES];
};

struct tokens {
    pthread_rwlock_t lock;
    struct token_list *list;
    char path[];
};

static struct token_list *read_file(const char *path, char *why, size_t capacity)
{
    struct token_list *list = NULL;
    bool good = false;
    char line[TOKEN_MAX_BYTES + 64];
    size_t room = 0, number = 0;
    FILE *file = fopen(path, "re");

    if (file == NULL) {
        snprintf(why, capacity, "--token-file %s: %s", path, strerror(errno));
        return NULL;
    }
    while (fgets(line, sizeof line, file)) {
        size_t length = strlen(line);
        number++;
        if (length == sizeof line - 1 && line[length - 1] != '\n') {
            snprintf(why, capacity, "--token-file %s: line %zu is longer than %d bytes", path, number, TOKEN_MAX_BYTES);
            goto out;
        }
        while (length > 0 && strchr(" \t\r\n", line[length - 1])) line[--length] = '\0';
        const char *start = line + strspn(line, " \t");
        length -= (size_t)(start - line);
        if (length == 0 || *start == '#') continue;
        if (length > TOKEN_MAX_BYTES) {
            snprintf(why, capacity, "--token-file %s: line %zu is longer than %d bytes", path, number, TOKEN_MAX_BYTES);
            goto out;
        }
        if (strpbrk(start, " \t")) {
            snprintf(why, capacity, "--token-file %s: line %zu contains a space", path, number);
            goto out;
        }
        if (list && list->count == TOKEN_MAX_COUNT) {
            snprintf(why, capacity, "--token-file %s: more than %d tokens", path, TOKEN_MAX_COUNT);
            goto out;
        }
        if (list == NULL || list->count == room) {
            room = room ? 2 * room : 16;
            struct token_list *wider = realloc(list, sizeof *list + room * TOKEN_MAX_BYTES);
            if (wider == NULL) {
                snprintf(why, capacity, "--token-file %s: out of memory", path);
                goto out;
            }
            if (list == NULL) wider->count = 0;
            list = wider;
        }
        memset(list->token[list->count], 0, TOKEN_MAX_BYTES);
        memcpy(list->token[list->count++], start, length);
    }
    if (ferror(file)) snprintf(why, capacity, "--token-file %s: %s", path, strerror(errno));
    else if (list == NULL) snprintf(why, capacity, "--token-file %s: no token in it", path);
    else good = true;
out:
    fclose(file);
    memset(line, 0, sizeof line);
    if (good) return list;
    free(list);
    return NULL;
}

struct tokens *tokens_open(const char *path, char *why, size_t why_capacity)
{
    struct token_list *list = read_file(path, why, why_capacity);
    if (list == NULL) return NULL;
    struct tokens *tokens = calloc(1, sizeof *tokens + strlen(path) + 1);
    if (tokens == NULL) {
        snprintf(why, why_capacity, "--token-file %s: out of memory", path);
        free(list);
        return NULL;
    }
    pthread_rwlock_init(&tokens->lock, NULL);
    tokens->list = list;
    strcpy(tokens->path, path);
    return tokens;
}

void tokens_close(struct tokens *tokens)
{
    if (tokens == NULL) return;
    pthread_rwlock_destroy(&tokens->lock);
    free(tokens->list);
    free(tokens);
}

bool tokens_reload(struct tokens *tokens, char *why, size_t why_capacity)
{
    struct token_list *list = read_file(tokens->path, why, why_capacity);
    if (list == NULL) return false;
    pthread_rwlock_wrlock(&tokens->lock);
    struct token_list *old = tokens->list;
    tokens->list = list;
    pthread_rwlock_unlock(&tokens->lock);
    free(old);
    return true;
}

bool tokens_allow(struct tokens *tokens, const char *authorization)
{
    uint8_t candidate[TOKEN_MAX_BYTES] = { 0 };
    if (authorization == NULL || strncasecmp(authorization, "Bearer ", 7) != 0) return false;
    authorization += 7;
    while (*authorization == ' ') authorization++;
    const size_t length = strlen(authorization);
    if (length == 0 || length > TOKEN_MAX_BYTES) return false;
    memcpy(candidate, authorization, length);

    unsigned found = 0;
    pthread_rwlock_rdlock(&tokens->lock);
    for (size_t i = 0; i < tokens->list->count; i++) {
        const volatile uint8_t *token = tokens->list->token[i]; /* volatile: the compiler must not stop early either */
        unsigned difference = 0;
        for (size_t b = 0; b < TOKEN_MAX_BYTES; b++) difference |= (unsigned)(token[b] ^ candidate[b]);
        found |= (unsigned)(difference == 0);
    }
    pthread_rwlock_unlock(&tokens->lock);
    return found != 0;
}
