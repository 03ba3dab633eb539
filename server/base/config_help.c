/* config_help.c: prints the options from the rows of config_options[]. The forms are --help, the table in OPTIONS.md,
 * the man page, and completion for bash. */
#include "server/base/config_internal.h"

#include <stdio.h>
#include <string.h>

enum { HELP_COLUMNS = 100 };

static const char examples[] =
    "Examples:\n"
    "  attnd                                             serve on 127.0.0.1:8080\n"
    "  attnd --listen 0.0.0.0:8080 --log-format json     serve on all addresses, log as JSON\n"
    "  attnd --listen unix:/run/attnd.sock --devices cpu\n"
    "  ATTND_MAX_BODY_BYTES=256M attnd --queue-depth=64  the environment, overridden by flags\n"
    "  attnd healthcheck http://127.0.0.1:8080           exit status 0 while it takes work\n"
    "  attnd check results.safetensors                   what is wrong with a kernel's results\n";

/* ---- Texts of `attnd --help` ------------------------------------------------------------------------------------- */

static const char *default_text(const struct config_option *o, char text[24])
{
    if (o->shown != NULL) return o->shown;
    if (o->word != NULL) return o->word;
    if (o->type == TYPE_SIZE) return config_size_text(o->fallback, text);
    snprintf(text, 24, "%lld", (long long)o->fallback);
    return text;
}

static void full_help(const struct config_option *o, char *text, size_t capacity)
{
    char low[24], high[24];
    if (o->type == TYPE_INT || o->type == TYPE_INT64)
        snprintf(text, capacity, "%s Range: %lld to %lld.", o->help, (long long)o->min, (long long)o->max);
    else if (o->type == TYPE_SIZE)
        snprintf(text, capacity, "%s Range: %s to %s.", o->help, config_size_text(o->min, low),
                 config_size_text(o->max, high));
    else snprintf(text, capacity, "%s", o->help);
}

static void print_wrapped(FILE *to, const char *text, int indent, int columns)
{
    while (*text) {
        size_t take = strlen(text);
        if (take > (size_t)(columns - indent)) {
            take = (size_t)(columns - indent);
            while (take > 0 && text[take] != ' ') take--;
        }
        fprintf(to, "%*s%.*s\n", indent, "", (int)take, text);
        text += take;
        while (*text == ' ') text++;
    }
}

void config_help(FILE *to)
{
    char text[512], number[24];
    fprintf(to,
            "attnd %s (%s): exact attention, forward and backward, over HTTP\n\n"
            "Usage: attnd [options]\n"
            "       attnd healthcheck [URL]\n"
            "       attnd check FILE.safetensors [--members FILE.json] [--json]\n\n"
            "Each option can be given as --name VALUE, as --name=VALUE or in the environment.\n"
            "A command-line option overrides its variable. Sizes take the suffixes K, M and G, powers of 1024.\n\n"
            "  %-36s%-30s%s\n",
            ATTND_VERSION, CONFIG_MACHINE, "Option", "Environment", "Default");
    for (size_t i = 0; i < config_option_count; i++) {
        const struct config_option *o = &config_options[i];
        snprintf(text, sizeof text, "--%s %s", o->flag, o->placeholder ? o->placeholder : "");
        fprintf(to, "\n  %-36s%-30s%s\n", text, o->env, default_text(o, number));
        full_help(o, text, sizeof text);
        print_wrapped(to, text, 6, HELP_COLUMNS);
    }
    fprintf(to, "\n  %-36sthis text\n  %-36sthe version\n\n%s", "--help", "--version", examples);
}

void config_help_markdown(FILE *to)
{
    char text[512], number[24];
    fprintf(to, "| option | environment | default | meaning |\n|---|---|---|---|\n");
    for (size_t i = 0; i < config_option_count; i++) {
        const struct config_option *o = &config_options[i];
        fprintf(to, "| `--%s%s", o->flag, o->placeholder ? " " : "");
        for (const char *p = o->placeholder ? o->placeholder : ""; *p; p++) fprintf(to, *p == '|' ? "\\|" : "%c", *p);
        fprintf(to, "` | `%s` | %s | ", o->env, default_text(o, number));
        full_help(o, text, sizeof text);
        fprintf(to, "%s |\n", text);
    }
}

/* ---- The man page ------------------------------------------------------------------------------------------------ */

/* Prints text for roff (the language of man pages). Hyphens are escaped, and no line begins with a character that roff
 * would read as a command. */
static void put_roff(FILE *to, const char *text)
{
    for (bool first = true; *text; first = *text++ == '\n') {
        if (first && (*text == '.' || *text == '\'')) fputs("\\&", to);
        if (*text == '-' || *text == '\\') fprintf(to, *text == '-' ? "\\-" : "\\e");
        else fputc(*text, to);
    }
}

static const char man_head[] =
    ".SH NAME\n"
    "attnd \\- exact attention, forward and backward, over HTTP\n"
    ".SH SYNOPSIS\n"
    ".B attnd\n"
    ".RI [ options ]\n"
    ".br\n"
    ".B attnd healthcheck\n"
    ".RI [ URL ]\n"
    ".br\n"
    ".B attnd check\n"
    ".IR FILE .safetensors\n"
    ".RB [ \\-\\-members\n"
    ".IR FILE .json]\n"
    ".RB [ \\-\\-json ]\n"
    ".SH DESCRIPTION\n"
    "attnd computes attention for whoever can POST tensors: out = softmax(scale q k^T + masks) v, and the gradients\n"
    "of a loss with respect to q, k and v.\n"
    "Requests go to /v1/attention/forward and /v1/attention/backward; /docs in a browser shows every member, and\n"
    "/openapi.json is the same for programs.\n"
    ".PP\n"
    ".B attnd healthcheck\n"
    "exits with 0 while a server takes work.\n"
    ".PP\n"
    ".B attnd check\n"
    "says what is wrong with the results of a kernel, without a server; it exits with 0 where they are right, with 1\n"
    "where they are wrong, with 64 for wrong arguments and with 65 for a file that is not understood.\n"
    ".SH OPTIONS\n"
    "Each option can be given as \\-\\-name VALUE, as \\-\\-name=VALUE or in the environment.\n"
    "A command-line option overrides its variable.\n"
    "Sizes take the suffixes K, M and G, powers of 1024.\n";

static const char man_tail[] =
    ".SH SIGNALS\n"
    ".TP\n"
    ".B SIGTERM, SIGINT\n"
    "No connection is accepted any more. Accepted requests are answered, for at most "
    "\\-\\-drain\\-ms. At a second signal, "
    "requests that still wait are answered 503.\n"
    ".TP\n"
    ".B SIGHUP\n"
    "The file of tokens and the certificate are read again.\n"
    ".SH EXIT STATUS\n"
    ".TP\n.B 0\nStopped by a signal, and drained.\n"
    ".TP\n.B 64\nAn option is wrong.\n"
    ".TP\n.B 69\nAn address or a device cannot be had.\n"
    ".TP\n.B 70\nThe last device failed.\n"
    ".TP\n.B 71\nThe server was told to stop and did not end by itself.\n"
    ".TP\n.B 78\nA file that an option names is wrong, or cannot be read.\n"
    ".TP\n.B 128 + N\nUnder \\-\\-supervise: signal N ended the server five times in a row.\n"
    ".SH EXAMPLES\n"
    ".nf\n";

void config_help_man(FILE *to)
{
    char text[512], number[24];
    fprintf(to, ".TH ATTND 1 %s \"attnd %s\"\n%s", ATTND_DATE, ATTND_VERSION, man_head);
    for (size_t i = 0; i < config_option_count; i++) {
        const struct config_option *o = &config_options[i];
        fputs(".TP\n\\fB", to);
        snprintf(text, sizeof text, "--%s", o->flag);
        put_roff(to, text);
        if (o->placeholder) fprintf(to, "\\fR \\fI%s", o->placeholder);
        fputs("\\fR\n", to);
        full_help(o, text, sizeof text);
        put_roff(to, text);
        fprintf(to, "\nEnvironment: %s. Default: ", o->env);
        put_roff(to, default_text(o, number));
        fputs(".\n", to);
    }
    fputs(man_tail, to);
    put_roff(to, strchr(examples, '\n') + 1);
    fputs(".fi\n", to);
}

/* ---- Completion in bash ------------------------------------------------------------------------------------------ */

static void put_words(FILE *to, const char *words)
{
    for (; *words; words++) fputc(*words == '|' ? ' ' : *words, to);
}

void config_help_bash(FILE *to)
{
    fputs("# Completion of attnd in bash: attnd --help-bash\n"
          "_attnd()\n"
          "{\n"
          "    local at=$COMP_CWORD word=${COMP_WORDS[COMP_CWORD]} option words=\n"
          "    if [ \"$word\" = '=' ]; then word=; else at=$((at - 1)); fi # --name=VALUE is three words\n"
          "    option=${COMP_WORDS[at]}\n"
          "    [ \"$option\" != '=' ] || option=${COMP_WORDS[at - 1]}\n"
          "    case $option in\n",
          to);
    for (size_t i = 0; i < config_option_count; i++) {
        const struct config_option *o = &config_options[i];
        if (o->type == TYPE_SWITCH) continue;
        fprintf(to, "    --%s) ", o->flag);
        if (o->type == TYPE_FILE)
            fputs("compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$word\"); return", to);
        else if (o->words != NULL) {
            fputs("words='", to);
            put_words(to, o->words);
            fputs("'", to);
        } else fputs("return", to);
        fputs(" ;;\n", to);
    }
    fputs("    *)\n"
          "        words='--help --version",
          to);
    for (size_t i = 0; i < config_option_count; i++) fprintf(to, " --%s", config_options[i].flag);
    fputs("'\n"
          "        [ \"$COMP_CWORD\" != 1 ] || words=\"healthcheck check $words\"\n"
          "        ;;\n"
          "    esac\n"
          "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$word\")\n"
          "}\n"
          "complete -F _attnd attnd\n",
          to);
}
