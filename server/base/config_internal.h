/* config_internal.h: what the files of the options share; config.h is what others see.
 *
 *   config.c        reads them: the environment, the command line, the machine
 *   config_help.c   writes of them: --help, OPTIONS.md, the man page, the completion of bash
 *   config_table.c  the table that both walk: a row for each option */
#ifndef CONFIG_INTERNAL_H
#define CONFIG_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "server/base/config.h"

#if !defined(ATTND_VERSION) || !defined(ATTND_DATE)
#error "the Makefile defines ATTND_VERSION and ATTND_DATE"
#endif

/* The platform that the compiler built for, as --version says it. */
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
    TYPE_INT,     /* a whole number in an int */
    TYPE_INT64,   /* a whole number in an int64_t */
    TYPE_SIZE,    /* bytes in an int64_t, suffixes K M G */
    TYPE_SWITCH,  /* bool */
    TYPE_CHOICE,  /* one of the words in `words` */
    TYPE_ADDRESS, /* ADDR:PORT or unix:PATH */
    TYPE_LISTEN,  /* a list of addresses: config->listen */
    TYPE_SHM,     /* a list of prefixes: config->allow_shm */
    TYPE_PROXY,   /* a list of networks: config->trusted_proxies */
    TYPE_DEVICES, /* auto, all, cpu, or GPU numbers */
    TYPE_FILE,    /* a file that can be read now */
    TYPE_ORIGIN,  /* scheme://host[:port] or * */
};

struct config_option {
    const char *flag, *env;
    enum config_type type;
    const char *placeholder;
    size_t offset;     /* of the member in struct config */
    int64_t fallback;  /* default of numbers and switches */
    int64_t min, max;  /* numbers */
    const char *word;  /* default of the other types; NULL: none */
    const char *words; /* TYPE_CHOICE: "text|json"; of others what a shell offers for it */
    const char *shown; /* the default as --help shows it, where it is not the value itself */
    const char *help;
};

enum { CONFIG_OPTIONS_MAX = 64 };
extern const struct config_option config_options[];
extern const size_t config_option_count; /* at most CONFIG_OPTIONS_MAX */

/* 1048576 -> "1M". Whole multiples only, so that it reads back as the same number. */
const char *config_size_text(int64_t bytes, char text[24]);

/* "; write 1536M" for a text that is no size but means one in that range: 1.5G, 512MiB, 1T. Else "". Returns hint. */
enum { CONFIG_HINT_BYTES = 160 };
const char *config_size_hint(const char *value, int64_t min, int64_t max, char hint[CONFIG_HINT_BYTES]);

/* "; write 30000" for a value that the option does not take, and that means one which it does: 30s for milliseconds,
 * `warning` for a level, cuda:0 for devices. Else "". Returns hint. */
const char *config_value_hint(const struct config_option *o, const char *value, char hint[CONFIG_HINT_BYTES]);

#endif
