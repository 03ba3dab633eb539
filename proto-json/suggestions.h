/* suggestions.h: hints for clients that use the words or values of other programs. A hint says what this server accepts
 * instead. To add a hint, add a word to a row of suggestions.c, or add a row. */
#ifndef SUGGESTIONS_H
#define SUGGESTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Places in a body where a client may write an unknown word. For a member of a problem, the place is the name of its
 * operation, such as "forward". */
#define SUGGESTION_CACHE  "cache"  /* place of a word: a member of the body of POST /v1/caches, which creates a cache */
#define SUGGESTION_LENGTH "length" /* place of a word: a member of the body that forks or truncates a cache */
#define SUGGESTION_TENSOR "tensor" /* place of a word: a member of a tensor's JSON object */
#define SUGGESTION_INPUT  "input"  /* place of a word: a member of an input of a KServe request */
#define SUGGESTION_KSERVE "kserve" /* place of a word: a member of a KServe request */
#define SUGGESTION_DTYPE  "dtype"  /* place of a word: a dtype; the hint is this server's name of the dtype */
/* If an unknown word is the value of an option, the parameter `place` of the functions below is the option's name. */

/* A row of hints: words that clients write by mistake, the places in a body where they write them, and the hint for all
 * of these words. Words are separated by spaces, and so are places. A member that the hint names must exist in all
 * places of the row. */
struct suggestion {
    const char *places, *words, *suggestion;
};
extern const struct suggestion suggestions[]; /* in the last row, `places` is NULL */

/* Returns the hint for an unknown word at `place`, such as "write 'causal'"; NULL: none. Case and underscores make no
 * difference: isCausal is is_causal. */
const char *suggestion_of(const char *place, const char *word);

extern const struct suggestion suggestion_topics[];
/* Returns a hint for an unknown word that contains the name of a topic, such as mask or window. The hint names the
 * members for this topic. Returns NULL if there is none. Use it for words that suggestion_of() does not know. */
const char *suggestion_topic(const char *place, const char *word);

enum { SUGGESTION_DTYPE_BYTES = 32 };
/* Reads a dtype of another program: "torch.bfloat16" is bfloat16, "<f4" and "float" are float32, "double" is
 * float64. */
const char *suggestion_dtype(const char *word, char name[SUGGESTION_DTYPE_BYTES]);
/* Returns whether the dtype says big-endian, as ">f4" does. */
bool suggestion_big_endian(const char *dtype);

/* Returns a hint for text that is not base64: what it seems to be, and what to do; NULL: not recognised. `head` has
 * the first few characters of the text, all of them before the bad character `found`. `position` is the position of
 * `found`. */
const char *suggestion_text(const char *head, uint64_t position, char found);

/* Returns whether the bytes were decoded from text of hexadecimal digits only, perhaps with "0x" before them. Only the
 * beginning of long text is examined. */
bool suggestion_is_hex(const uint8_t *bytes, size_t count);
/* Returns whether the bytes, decoded from base64, are base64 text themselves: the client encoded its data twice. */
bool suggestion_is_base64(const uint8_t *bytes, size_t count);
extern const char suggestion_hex[];
/* The hint about a typed array that JSON.stringify() turned into an object. */
extern const char suggestion_typed_array[];

/* Returns a hint for bytes that are a whole file instead of a tensor's values; NULL: not a known kind of file. */
const char *suggestion_bytes(const uint8_t *bytes, size_t count);

typedef enum suggestion_place { SUGGESTION_OTHER, SUGGESTION_VALUE, SUGGESTION_NAME, SUGGESTION_END } suggestion_place;
/* Returns a hint about the wrong character `found` at byte `at` of a body, as text in parentheses to append to the
 * error message. `place` says what was expected there. Returns "" if there is no hint. */
const char *suggestion_character(uint64_t at, suggestion_place place, unsigned char found);

#endif
