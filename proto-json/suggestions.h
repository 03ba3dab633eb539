/* suggestions.h: hints for clients that use the words or values of other programs. A hint says what this server accepts
 * instead. The tables are read only after a refusal, so they cost correct requests no time. To add a hint, add a word
 * to a row of suggestions.c, or add a row. */
#ifndef SUGGESTIONS_H
#define SUGGESTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The places where an unknown word may stand. For a member of a problem, the place is the name of the operation
 * (proto_operations[]), because the operations take different members. */
#define SUGGESTION_CACHE  "cache"  /* an unknown member of the body of POST /v1/caches, which creates a cache */
#define SUGGESTION_LENGTH "length" /* an unknown member of the body that forks or truncates a cache */
#define SUGGESTION_TENSOR "tensor" /* an unknown member of a tensor */
#define SUGGESTION_INPUT  "input"  /* an unknown member of an input of a KServe request */
#define SUGGESTION_KSERVE "kserve" /* an unknown member of a KServe request */
#define SUGGESTION_DTYPE  "dtype"  /* a dtype; the hint is the server's own name of this dtype */
/* The place of an option's value is the option's name. The place of a dtype is SUGGESTION_DTYPE or the tensor's
 * name. */

/* A row of hints: words that clients write by mistake, the places in a body where clients write them, and the hint,
 * which is the same for all words. Words are separated by spaces, and so are places. If the hint quotes the name of a
 * member, as in 'causal', that member must exist in all places of the row. */
struct suggestion {
    const char *places, *words, *suggestion;
};
extern const struct suggestion suggestions[]; /* the table of hints; in its last row, places is NULL */

/* Returns the hint for an unknown word at `place`, such as "write 'causal'"; NULL: the tables have none. Upper or lower
 * case and underscores make no difference: isCausal is is_causal. */
const char *suggestion_of(const char *place, const char *word);

extern const struct suggestion suggestion_topics[];
/* Looks for a topic, such as mask or window, in the parts of an unknown word. Returns the members of a problem that
 * belong to this topic; NULL: no part names a topic. Call this for words without a hint of their own. `place` is as for
 * suggestion_of(). */
const char *suggestion_topic(const char *place, const char *word);

enum { SUGGESTION_DTYPE_BYTES = 32 };
/* Reads a dtype of another program: "torch.bfloat16" is bfloat16, "<f4" and "float" are float32, "double" is
 * float64. */
const char *suggestion_dtype(const char *word, char name[SUGGESTION_DTYPE_BYTES]);
/* Returns whether the name of a dtype, such as ">f4", says that its numbers are big-endian. */
bool suggestion_big_endian(const char *dtype);

/* Returns a hint for text that is not base64: what the text seems to be, and what to do. NULL: the kind of text is not
 * recognised. `head` is the start of the text, up to a few characters of valid base64. `position` is the position of
 * the bad character `found`. */
const char *suggestion_text(const char *head, uint64_t position, char found);

/* Returns whether the bytes were decoded from text that has only hexadecimal digits. Real base64 text of this kind is
 * very unlikely. The text may begin with "0x". If the text is long, only its beginning is examined. */
bool suggestion_is_hex(const uint8_t *bytes, size_t count);
/* Returns whether the bytes, decoded from base64, look like base64 text themselves (the client encoded its data
 * twice). */
bool suggestion_is_base64(const uint8_t *bytes, size_t count);
extern const char suggestion_hex[]; /* the hint for text that is hexadecimal instead of base64 */
/* The hint about a typed array that JSON.stringify() has turned into an object. */
extern const char suggestion_typed_array[];

/* Returns a hint for bytes that are a whole file instead of a tensor's values: which kind of file it is, and what to
 * do. NULL: the bytes are not a known kind of file. */
const char *suggestion_bytes(const uint8_t *bytes, size_t count);

typedef enum suggestion_place { SUGGESTION_OTHER, SUGGESTION_VALUE, SUGGESTION_NAME, SUGGESTION_END } suggestion_place;
/* Returns a hint about a character that cannot stand at byte `at` of a body, where `place` was expected. The hint is
 * text in parentheses for the end of the message; "": there is none. */
const char *suggestion_character(uint64_t at, suggestion_place place, unsigned char found);

#endif
