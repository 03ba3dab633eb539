/* config_internal.h: types and functions that the files of the options share. The public header is config.h.
 *
 *   config.c        reads the options from the environment and the command line; asks the machine for memory and cores
 *   config_help.c   prints the options: --help, OPTIONS.md, the man page, completion for bash
 *   config_table.c  the table that these two files use, with a row for each option */
#ifndef CONFIG_INTERNAL_H
#define CONFIG_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "server/base/config.h"

#if !defined(ATTND_VERSION) || !defined(ATTND_DATE)
#error "the Makefile defines ATTND_VERSION and ATTND_DATE"
#endif

#if defined(__x86_64__)
#define CONFIG_MACHINE "x86-64"
#elif defined(__aarch64__)
#define CONFIG_MACHINE "arm64"
#else
#define CONFIG_MACHINE "another processor"
#endif

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define KIB           INT64_C(1024)
#define MIB           (KIB * 1024)
#define GIB           (MIB * 1024)

enum config_type {
    TYPE_INT,
    TYPE_INT64,
    TYPE_SIZE, /* the value is a size in bytes, stored in an int64_t; a suffix K, M or G may follow the number */
    TYPE_SWITCH,
    TYPE_CHOICE,  /* the value is one of the words in `words` */
    TYPE_ADDRESS, /* the value has the form ADDR:PORT or unix:PATH */
    TYPE_LISTEN,  /* the values are addresses to listen on, stored in config->listen */
    TYPE_SHM,     /* the values are prefixes of shared memory keys, stored in config->allow_shm */
    TYPE_PROXY,   /* the values are networks of proxies, stored in config->trusted_proxies */
    TYPE_DEVICES,
    TYPE_FILE,   /* the value is the path of a file, which must be readable when the options are read */
    TYPE_ORIGIN, /* the value has the form scheme://host[:port], or is * */
};

struct config_option {
    const char *flag, *env;
    enum config_type type;
    const char *placeholder;
    size_t offset;
    int64_t fallback; /* default value of an option that is a number or a switch */
    int64_t min, max; /* allowed range of an option that is a number */
    const char *word; /* default value of an option that is neither a number nor a switch; NULL: none */
    /* TYPE_CHOICE: the allowed words, as in "text|json". Other types: the words that bash completion offers. */
    const char *words;
    /* text that --help shows in place of the default value, such as "half of the memory"; NULL: it shows the value */
    const char *shown;
    const char *help;
};

enum { CONFIG_OPTIONS_MAX = 64 };
extern const struct config_option config_options[];
extern const size_t config_option_count;

/* Writes a size with a suffix: 1048576 becomes "1M". A size that is no whole multiple of the suffix's unit gets no
 * suffix, so every text reads back as exactly the same size. */
const char *config_size_text(int64_t bytes, char text[24]);

enum { CONFIG_HINT_BYTES = 160 };
/* Writes a hint for a value that is no valid size, but clearly means a size within the option's range: 1.5G gets ";
 * write 1536M". Writes "" if there is no hint. Returns `hint`. */
const char *config_size_hint(const char *value, int64_t min, int64_t max, char hint[CONFIG_HINT_BYTES]);

/* Writes a hint for a value that the option refuses but whose meaning is clear: 30s gets "; write 30000". Writes "" if
 * there is no hint. Returns `hint`. */
const char *config_value_hint(const struct config_option *o, const char *value, char hint[CONFIG_HINT_BYTES]);

#endif
