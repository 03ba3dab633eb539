/* suggestions.h: hints about words and values that other programs use, and what this server takes instead. The
 * tables are read only after a refusal, so a good request never pays for them. To add a hint, add a word to a
 * row of suggestions.c, or a row. */
#ifndef SUGGESTIONS_H
#define SUGGESTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where a word may stand. For a member of a problem this is the operation's name, as in proto_operations[],
 * because each operation takes other members. */
#define SUGGESTION_CACHE  "cache"  /* a member of the body that creates a cache */
#define SUGGESTION_LENGTH "length" /* a member of the body of a fork or a truncation */
#define SUGGESTION_TENSOR "tensor" /* a member of a tensor */
#define SUGGESTION_INPUT  "input"  /* a member of one of KServe's inputs */
#define SUGGESTION_KSERVE "kserve" /* a member of KServe's request */
#define SUGGESTION_DTYPE  "dtype"  /* a dtype; the hint is its name here */
/* For a value, the place is the name of its option; for a dtype, also the name of its tensor. */

/* Words that mean the same in some places, and a hint for each; words and places are separated by spaces. A
 * 'name' in a hint for a member is a member that all of these places take. */
struct suggestion {
    const char *places, *words, *suggestion;
};
extern const struct suggestion suggestions[]; /* the last row has places == NULL */

/* The hint for an unknown word at that place, as "write 'causal'"; NULL: the tables have none. Case and
 * underscores do not count: isCausal is is_causal. */
const char *suggestion_of(const char *place, const char *word);

/* For a word without a hint of its own: the members about a topic in it, such as mask or window. Places are
 * as above. NULL: no topic is known. */
extern const struct suggestion suggestion_topics[];
const char *suggestion_topic(const char *place, const char *word);

/* Reads a dtype of another program: "torch.bfloat16" is bfloat16, "<f4" and "float" are float32, "double" is
 * float64. */
enum { SUGGESTION_DTYPE_BYTES = 32 };
const char *suggestion_dtype(const char *word, char name[SUGGESTION_DTYPE_BYTES]);
/* Does the dtype say big-endian, as ">f4" does? */
bool suggestion_big_endian(const char *dtype);

/* A hint for text that is not base64: what it seems to be, and what to do. NULL: unknown. `head` is the start
 * of the text, as far as it is base64, cut after some characters. `position` is that of the bad character
 * `found`. */
const char *suggestion_text(const char *head, uint64_t position, char found);

/* Were the bytes decoded from text of hexadecimal digits only, which base64 is not by chance? A "0x" may
 * stand in front. The function reads only the first of many bytes. */
bool suggestion_is_hex(const uint8_t *bytes, size_t count);
/* Are these bytes base64 text again? */
bool suggestion_is_base64(const uint8_t *bytes, size_t count);
extern const char suggestion_hex[];         /* what to do about it */
extern const char suggestion_typed_array[]; /* the hint about a typed array that JSON.stringify() has turned into
                                        * an object */

/* A hint for bytes that are a file around the tensor: which file, and what to do; NULL: unknown. */
const char *suggestion_bytes(const uint8_t *bytes, size_t count);

/* A hint about a character that cannot stand at byte `at` of a body, where `place` was expected. It is text
 * in brackets to append to the message; "": unknown. */
typedef enum suggestion_place { SUGGESTION_OTHER, SUGGESTION_VALUE, SUGGESTION_NAME, SUGGESTION_END } suggestion_place;
const char *suggestion_character(uint64_t at, suggestion_place place, unsigned char found);

#endif
