/* tokens.c: bearer tokens.
 *
 * The time of a comparison must not tell an attacker how much of a guess was right. Every token is therefore padded
 * with zeros to a fixed length, and a candidate is compared with all bytes of all tokens, even after a match. */
#include "server/http/tokens.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "text/text.h"
#include "server/base/flow.h"

struct token {
    uint8_t text[TOKEN_MAX_BYTES];
    struct caller *caller; /* the token's account, a counted reference */
    char name
        /* name of the account: the comment after the token, or else the number of its line */
        [METRICS_LABEL_BYTES];
};

struct token_list {
    size_t count;
    struct token tokens[];
};

struct tokens {
    pthread_rwlock_t lock;
    struct token_list *list;
    int share_percent;
    char path[];
};

static void free_list(struct token_list *list)
{
    if (list == NULL) return;
    for (size_t i = 0; i < list->count; i++) caller_release(list->tokens[i].caller);
    free(list);
}

static struct caller *caller_in(const struct token_list *list, size_t count, const uint8_t *text)
{
    for (size_t i = 0; i < count; i++)
        if (memcmp(list->tokens[i].text, text, TOKEN_MAX_BYTES) == 0) return list->tokens[i].caller;
    return NULL;
}

/* Gives every token the account that an earlier line or the list `before` has for the same token, or else a new
 * account. Returns false when out of memory. */
static bool open_accounts(struct token_list *list, const struct token_list *before)
{
    for (size_t i = 0; i < list->count; i++) {
        struct token *token = &list->tokens[i];
        struct caller *known = caller_in(list, i, token->text);
        if (known == NULL && before) known = caller_in(before, before->count, token->text);
        token->caller = known ? caller_hold(known) : caller_new();
        if (token->caller == NULL) return false;
        if (known == NULL && (token->caller->flow = flow_new(token->name)) == NULL) return false;
    }
    return true;
}

/* Sets which percentage of each limit of the server (such as staging memory) a token may use. A single token may use
 * all. */
static void set_shares(struct token_list *list, int share_percent)
{
    bool several = false;
    for (size_t i = 0; i < list->count; i++) several |= list->tokens[i].caller != list->tokens[0].caller;
    for (size_t i = 0; i < list->count; i++)
        atomic_store_explicit(&list->tokens[i].caller->percent, several ? share_percent : 100, memory_order_relaxed);
}

static const char *cut_comment(const char *line, size_t *length)
{
    const char *hash = line;
    while ((hash = strchr(hash, '#')) && hash > line && hash[-1] != ' ' && hash[-1] != '\t') hash++;
    if (hash == NULL || hash == line) return NULL;
    *length = (size_t)(hash - line);
    while (*length > 0 && strchr(" \t", line[*length - 1])) --*length;
    hash += 1 + strspn(hash + 1, " \t");
    return *hash ? hash : NULL;
}

/* Copies as many whole characters as fit, because Prometheus reads labels as UTF-8. */
static void copy_name(char to[METRICS_LABEL_BYTES], const char *name)
{
    struct text t = text_in(to, METRICS_LABEL_BYTES);
    while (*name) {
        const size_t length = text_character(name);
        if (t.used + (length ? length : 1) >= METRICS_LABEL_BYTES) return;
        if (length) text_put(&t, name, length);
        else text_put_char(&t, '?');
        name += length ? length : 1;
    }
}

static bool read_line(FILE *file, char *line, size_t capacity, size_t *length)
{
    *length = 0;
    for (int c; *length < capacity - 1 && (c = getc(file)) != EOF;) {
        line[(*length)++] = (char)c;
        if (c == '\n') break;
    }
    line[*length] = '\0';
    return *length > 0;
}

/* True if a header can carry all bytes of the token; otherwise *at is the index of the first one that it cannot
 * carry. */
static bool is_token(const char *text, size_t length, size_t *at)
{
    for (*at = 0; *at < length; ++*at)
        if (text[*at] <= ' ' || text[*at] > '~') return false;
    return true;
}

static struct token_list *read_file(const char *path, char *why, size_t capacity)
{
    struct token_list *list = NULL;
    bool good = false;
    char line[TOKEN_MAX_BYTES + METRICS_LABEL_BYTES + 64];
    size_t room = 0, number = 0, length, at;
    FILE *file = fopen(path, "re");

    if (file == NULL) {
        snprintf(why, capacity, "--token-file %s: %s", path, strerror(errno));
        return NULL;
    }
    while (read_line(file, line, sizeof line, &length)) {
        number++;
        if (length == sizeof line - 1 && line[length - 1] != '\n') {
            snprintf(why, capacity, "--token-file %s: line %zu is longer than %d bytes", path, number, TOKEN_MAX_BYTES);
            goto out;
        }
        while (length > 0 && line[length - 1] != '\0' && strchr(" \t\r\n", line[length - 1])) line[--length] = '\0';
        const char *start = line + strspn(line, " \t");
        length -= (size_t)(start - line);
        if (length == 0 || *start == '#') continue;
        if (length > TOKEN_MAX_BYTES) {
            snprintf(why, capacity, "--token-file %s: line %zu is longer than %d bytes", path, number, TOKEN_MAX_BYTES);
            goto out;
        }
        const char *const name = cut_comment(start, &length);
        if (memchr(start, ' ', length) || memchr(start, '\t', length)) {
            snprintf(why, capacity, "--token-file %s: line %zu contains a space", path, number);
            goto out;
        }
        if (!is_token(start, length, &at)) {
            snprintf(
                why, capacity,
                "--token-file %s: line %zu contains the byte 0x%02x; a token is of visible ASCII characters, for it "
                "stands in a header",
                path, number, (unsigned char)start[at]);
            goto out;
        }
        if (list && list->count == TOKEN_MAX_COUNT) {
            snprintf(why, capacity, "--token-file %s: more than %d tokens", path, TOKEN_MAX_COUNT);
            goto out;
        }
        if (list == NULL || list->count == room) {
            room = room ? 2 * room : 16;
            struct token_list *wider = realloc(list, sizeof *list + room * sizeof list->tokens[0]);
            if (wider == NULL) {
                snprintf(why, capacity, "--token-file %s: out of memory", path);
                goto out;
            }
            if (list == NULL) wider->count = 0;
            list = wider;
        }
        struct token *const token = &list->tokens[list->count];
        *token = (struct token){ .caller = NULL };
        if (name) copy_name(token->name, name);
        else snprintf(token->name, sizeof token->name, "line %zu", number);
        memcpy(token->text, start, length);
        list->count++;
    }
    if (ferror(file)) snprintf(why, capacity, "--token-file %s: %s", path, strerror(errno));
    else if (list == NULL) snprintf(why, capacity, "--token-file %s: no token in it", path);
    else good = true;
out:
    fclose(file);
    memset(line, 0, sizeof line);
    if (good) return list;
    free_list(list);
    return NULL;
}

struct tokens *tokens_open(const char *path, int share_percent, char *why, size_t why_capacity)
{
    struct token_list *list = read_file(path, why, why_capacity);
    if (list == NULL) return NULL;
    struct tokens *tokens = calloc(1, sizeof *tokens + strlen(path) + 1);
    if (tokens == NULL || !open_accounts(list, NULL)) {
        snprintf(why, why_capacity, "--token-file %s: out of memory", path);
        free_list(list);
        free(tokens);
        return NULL;
    }
    set_shares(list, share_percent);
    pthread_rwlock_init(&tokens->lock, NULL);
    tokens->list = list;
    tokens->share_percent = share_percent;
    strcpy(tokens->path, path);
    return tokens;
}

void tokens_close(struct tokens *tokens)
{
    if (tokens == NULL) return;
    pthread_rwlock_destroy(&tokens->lock);
    free_list(tokens->list);
    free(tokens);
}

bool tokens_reload(struct tokens *tokens, char *why, size_t why_capacity)
{
    struct token_list *list = read_file(tokens->path, why, why_capacity);
    if (list == NULL) return false;
    /* no lock is needed, because only this thread changes the list */
    if (!open_accounts(list, tokens->list)) {
        snprintf(why, why_capacity, "--token-file %s: out of memory", tokens->path);
        free_list(list);
        return false;
    }
    set_shares(list, tokens->share_percent);
    pthread_rwlock_wrlock(&tokens->lock);
    struct token_list *old = tokens->list;
    tokens->list = list;
    pthread_rwlock_unlock(&tokens->lock);
    free_list(old);
    return true;
}

static const char scheme[] = "Bearer ";

struct caller *tokens_find(struct tokens *tokens, const char *authorization)
{
    uint8_t candidate[TOKEN_MAX_BYTES] = { 0 };
    if (authorization == NULL || strncasecmp(authorization, scheme, strlen(scheme)) != 0) return NULL;
    authorization += strlen(scheme);
    while (*authorization == ' ') authorization++;
    const size_t length = strlen(authorization);
    if (length == 0 || length > TOKEN_MAX_BYTES) return NULL;
    memcpy(candidate, authorization, length);

    uintptr_t found = 0;
    pthread_rwlock_rdlock(&tokens->lock);
    for (size_t i = 0; i < tokens->list->count; i++) {
        const volatile uint8_t *text =
            /* keeps the compiler from stopping the comparison early */
            tokens->list->tokens[i].text;
        unsigned difference = 0;
        for (size_t b = 0; b < TOKEN_MAX_BYTES; b++) difference |= (unsigned)(text[b] ^ candidate[b]);
        /* `same` is all ones if no byte differs, otherwise 0. The code has no branch, so its duration does not depend
         * on the bytes. A token that is listed twice has one account. */
        const uintptr_t same = (uintptr_t)0 - (uintptr_t)((difference - 1u) >> 31 & 1u);
        found |= (uintptr_t)tokens->list->tokens[i].caller & same;
    }
    struct caller *caller = caller_hold((struct caller *)found);
    pthread_rwlock_unlock(&tokens->lock);
    return caller;
}

bool tokens_know(struct tokens *tokens, const struct caller *caller)
{
    bool known = false;
    pthread_rwlock_rdlock(&tokens->lock);
    for (size_t i = 0; i < tokens->list->count && !known; i++) known = tokens->list->tokens[i].caller == caller;
    pthread_rwlock_unlock(&tokens->lock);
    return known;
}

const char *tokens_fault(const char *authorization)
{
    if (authorization == NULL) return "no Authorization came";
    if (strchr(authorization, ' ') == NULL) return "Authorization has no scheme in front of the token";
    if (strncasecmp(authorization, scheme, strlen(scheme)) != 0) return "Authorization has another scheme than Bearer";
    return "the token is not one of those in --token-file";
}
