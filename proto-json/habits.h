/* habits.h: what people write who come from other programs, and what is written here. Only tables, looked at once
 * something has been refused: a good request never gets here. A new habit is a word in a row of habits.c,
 * or a new row. */
#ifndef HABITS_H
#define HABITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where a word was written. A member of a problem: the operation's name, as in proto_operations[]; each
 * operation takes others. */
#define HABIT_CACHE  "cache"  /* a member of a cache that is to be made */
#define HABIT_LENGTH "length" /* a member of what is said of a fork or of a truncation */
#define HABIT_TENSOR "tensor" /* a member of a tensor */
#define HABIT_INPUT  "input"  /* the same of KServe's inputs */
#define HABIT_KSERVE "kserve" /* a member of KServe's request */
#define HABIT_DTYPE  "dtype"  /* a dtype; the cure is its name here */
/* Other places have the name of the option whose value, or of the tensor whose dtype, the word is. */

/* Words that mean the same in some places, both with spaces between them, and what to do about each. A 'name' in a cure
 * for a member is one that is taken in all of these places. */
struct habit {
    const char *places, *words, *cure;
};
extern const struct habit habits[]; /* places is NULL after the last */

/* What to do about a word that is not known at that place: "write 'causal'". NULL: no habit that is known. Case and
 * underscores do not count: isCausal is is_causal. */
const char *habit_of(const char *place, const char *word);

/* For a word that is no known habit: which members there are about a part of it, such as mask or window; by places as
 * above. NULL: no part is known. */
extern const struct habit habit_topics[];
const char *habit_topic(const char *place, const char *word);

/* A dtype of another program: "torch.bfloat16" is bfloat16, "<f4" and "float" are float32, "double" is float64. */
enum { HABIT_DTYPE_BYTES = 32 };
const char *habit_dtype(const char *word, char name[HABIT_DTYPE_BYTES]);
/* ">f4": bytes the other way round. */
bool habit_big_endian(const char *dtype);

/* Text that is no base64: `head` is how it begins, as far as it is base64, cut after some characters; `position` is
 * that of the character found. What it is taken for, and the cure; NULL: unknown. */
const char *habit_text(const char *head, uint64_t position, char found);

/* Were the bytes made of text that was all hexadecimal digits, as base64 is not by chance? A "0x" may stand in front.
 * Of many bytes the first are looked at. */
bool habit_is_hex(const uint8_t *bytes, size_t count);
/* Are these bytes base64 text again? */
bool habit_is_base64(const uint8_t *bytes, size_t count);
extern const char habit_hex[];         /* what to do about it */
extern const char habit_typed_array[]; /* and about one that JSON.stringify() has made an object of */

/* Bytes that are a file around the tensor: what it is, and the cure; NULL: unknown. */
const char *habit_bytes(const uint8_t *bytes, size_t count);

/* What to do about a character that cannot stand at byte `at` of a body, where this was expected: in brackets, to stand
 * behind the message; "": unknown. */
typedef enum habit_place { HABIT_OTHER, HABIT_VALUE, HABIT_NAME, HABIT_END } habit_place;
const char *habit_character(uint64_t at, habit_place place, unsigned char found);

#endif
