/* log.c: one line per event. A thread that logs formats the line on its own stack and copies it under a mutex into one
 * of two buffers. A writer thread swaps the buffers and passes the full one to write(2), the only call that can block.
 * It does not hold the mutex during the call.
 *
 *     log_event --> [ filling, 1 MiB ] --swap--> [ writing, 1 MiB ] --> write(2, ...) */
#include "server/base/log.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "text/text.h"
#include "server/base/limits.h"

enum {
    /* longest log line: JSON needs at most six bytes for each byte of the pairs and names */
    LINE_BYTES = 6 * (LOG_PAIRS_BYTES + 2 * LOG_NAME_BYTES) + 256,
    EVENT_BYTES = 32,
    /* longest text that is logged as a number; a longer one is an id, whose value a double cannot hold */
    NUMBER_BYTES = 15,
};

static const char *const level_text[] = { "DEBUG", "INFO", "WARN", "ERROR" };
static const char *const level_json[] = { "debug", "info", "warn", "error" };

struct repeat {
    char event[EVENT_BYTES];
    enum log_level level;
    int64_t second;
    int written;
    uint64_t left_out;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, finished;
    pthread_t writer;
    bool open, closing, done;
    /* Whether log_close() gave up waiting for the writer thread, which is still in write(). New lines are then only
     * counted as lost. */
    bool stuck;
    bool waiting;
    char buffer[2][LOG_BUFFER_BYTES];
    int filling;
    size_t used;
    uint64_t lines;
    /* number of lost lines that the log has already reported; `dropped` counts all lost lines */
    uint64_t told_lost;
    struct repeat repeats[LOG_REPEAT_SLOTS];
    bool repeats_left_out;
} the = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* Threads read the variables min_level, as_json and dropped without the mutex. */
static atomic_int min_level = LOG_INFO;
static atomic_bool as_json;
static atomic_uint_fast64_t dropped;

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* ---- Writing one line of the log --------------------------------------------------------------------------------- */

static bool is_control(char c)
{
    return (unsigned char)c < 0x20 || c == 0x7f;
}

/* Appends the inside of a JSON string. Unlike text_put_json(), it replaces control characters by spaces and marks
 * invalid UTF-8. */
static void put_json(struct text *t, const char *string, size_t count)
{
    for (size_t i = 0; i < count;) {
        size_t plain = i;
        while (plain < count && string[plain] >= 0x20 && string[plain] < 0x7f && string[plain] != '"' &&
               string[plain] != '\\')
            plain++;
        text_put(t, string + i, plain - i);
        if ((i = plain) == count) return;

        const size_t length = text_character(string + i);
        if (length == 0 || i + length > count) text_put_string(t, "\\ufffd");
        else if (is_control(string[i])) text_put_char(t, ' ');
        else {
            if (length == 1) text_put_char(t, '\\');
            text_put(t, string + i, length);
        }
        i += length > 0 && i + length <= count ? length : 1;
    }
}

/* True for a JSON number (RFC 8259 section 6) that a double can hold. */
static bool is_number(const char *s, size_t count)
{
    const char *end = s + count;
    if (count == 0 || count > NUMBER_BYTES) return false;
    if (*s == '-') s++;
    const char *digits = s;
    while (s < end && *s >= '0' && *s <= '9') s++;
    if (s == digits || (*digits == '0' && s - digits > 1)) return false;
    if (s < end && *s == '.') {
        const char *fraction = ++s;
        while (s < end && *s >= '0' && *s <= '9') s++;
        if (s == fraction) return false;
    }
    if (s < end && (*s == 'e' || *s == 'E')) {
        s++;
        if (s < end && (*s == '+' || *s == '-')) s++;
        const char *exponent = s;
        while (s < end && *s >= '0' && *s <= '9') s++;
        /* a number with a three-digit exponent, such as 1e300, is no plausible measurement, so it is written as a
         * string */
        if (s == exponent || s - exponent > 2) return false;
    }
    return s == end;
}

/* Appends a quoted value (LOG_Q) as the inside of a JSON string. `s` begins after the opening quote. \" and \\ become
 * one character; \xNN stays as four characters. Returns the text that follows the value. */
static const char *put_quoted_as_json(struct text *t, const char *s)
{
    while (*s != '\0' && *s != '"') {
        if (*s == '\\' && (s[1] == '"' || s[1] == '\\')) s++;
        /* the character after a backslash is copied unchanged */
        const char *piece = s++;
        while (*s != '\0' && *s != '"' && *s != '\\') s++;
        put_json(t, piece, (size_t)(s - piece));
    }
    return *s == '"' ? s + 1 : s;
}

/* Appends key=value pairs as JSON members, each after a comma. A word without '=' becomes a member named "text". */
static void put_pairs_as_json(struct text *t, const char *pairs)
{
    for (const char *s = pairs; *s != '\0';) {
        if (*s == ' ') {
            s++;
            continue;
        }
        const size_t key = strcspn(s, "= ");
        text_put_string(t, ",\"");
        if (s[key] == '=') {
            put_json(t, s, key);
            s += key + 1;
        } else text_put_string(t, "text");
        text_put_string(t, "\":");
        if (*s == '"') {
            text_put_string(t, "\"");
            s = put_quoted_as_json(t, s + 1);
            text_put_string(t, "\"");
            continue;
        }
        const size_t value = strcspn(s, " ");
        if (is_number(s, value) || (value == 4 && memcmp(s, "true", 4) == 0) ||
            (value == 5 && memcmp(s, "false", 5) == 0))
            text_put(t, s, value);
        else {
            text_put_string(t, "\"");
            put_json(t, s, value);
            text_put_string(t, "\"");
        }
        s += value;
    }
}

/* Appends the time in the form 2026-11-20T18:48:03.123Z. */
static void put_time(struct text *t)
{
    static _Thread_local time_t second = -1;
    static _Thread_local char date[24];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec != second) {
        struct tm tm;
        gmtime_r(&now.tv_sec, &tm);
        strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &tm);
        second = now.tv_sec;
    }
    text_put_string(t, date);
    text_put_char(t, '.');
    text_put_three(t, (unsigned)(now.tv_nsec / 1000000));
    text_put_char(t, 'Z');
}

static void put_name(struct text *t, bool json, const char *name)
{
    if (json) put_json(t, name, strnlen(name, LOG_NAME_BYTES));
    else text_put(t, name, strnlen(name, LOG_NAME_BYTES));
}

static void put_line(struct text *t, bool json, enum log_level level, const char *request_id, const char *event,
                     const char *pairs)
{
    text_put_string(t, json ? "{\"time\":\"" : "");
    put_time(t);
    text_put_string(t, json ? "\",\"level\":\"" : " ");
    text_put_string(t, json ? level_json[level] : level_text[level]);
    if (json) text_put_char(t, '"');
    if (request_id != NULL && *request_id != '\0') {
        text_put_string(t, json ? ",\"request_id\":\"" : " req=");
        put_name(t, json, request_id);
        if (json) text_put_char(t, '"');
    }
    text_put_string(t, json ? ",\"event\":\"" : " ");
    put_name(t, json, event);
    if (json) {
        text_put_char(t, '"');
        put_pairs_as_json(t, pairs);
        text_put_char(t, '}');
    } else if (*pairs != '\0') {
        text_put_char(t, ' ');
        text_put_string(t, pairs);
    }
}

/* Formats a line of the log and returns its length with the newline. If the line has no room for the key=value pairs,
 * it gets cut=true instead of them. */
static size_t format_line(char line[LINE_BYTES], bool json, enum log_level level, const char *request_id,
                          const char *event, const char *pairs)
{
    struct text t = text_in(line, LINE_BYTES);
    put_line(&t, json, level, request_id, event, pairs);
    if (t.failure != TEXT_FINE) {
        t = text_in(line, LINE_BYTES);
        put_line(&t, json, level, request_id, event, "cut=true");
    }
    for (size_t i = 0; i < t.used; i++)
        if (is_control(line[i])) line[i] = ' ';
    line[t.used] = '\n';
    return t.used + 1;
}

/* ---- The buffer of lines, and the thread that writes them -------------------------------------------------------- */

/* If writing fails, counts `lines` as lost and returns false. While the log is open, only the writer thread calls
 * this. */
static bool write_all(const char *bytes, size_t count, uint64_t lines)
{
    while (count > 0) {
        const ssize_t n = write(STDERR_FILENO, bytes, count);
        if (n >= 0) {
            bytes += n;
            count -= (size_t)n;
            /* EAGAIN: another process has made the descriptor of standard error non-blocking */
        } else if (errno == EAGAIN) {
            struct pollfd sink = { .fd = STDERR_FILENO, .events = POLLOUT };
            poll(&sink, 1, -1);
        } else if (errno != EINTR) {
            atomic_fetch_add_explicit(&dropped, lines, memory_order_relaxed);
            return false;
        }
    }
    return true;
}

/* Wakes the thread that writes the lines. Call this with the mutex held. */
static void wake_writer(void)
{
    if (!the.waiting) return;
    the.waiting = false;
    pthread_cond_signal(&the.wake);
}

/* Appends a line to the buffer that the writer thread will write. Call this with the mutex held. */
static void append(const char *line, size_t length)
{
    if (length > LOG_BUFFER_BYTES - the.used) {
        atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
        return;
    }
    assert(length > 0 && line[length - 1] == '\n');
    memcpy(the.buffer[the.filling] + the.used, line, length);
    the.used += length;
    the.lines++;
    wake_writer();
}

static struct timespec in_ms(int ms)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += ms % 1000 * 1000000L;
    at.tv_sec += ms / 1000 + at.tv_nsec / 1000000000L;
    at.tv_nsec %= 1000000000L;
    return at;
}

/* Logs how many lines of one event were left out, if any were. Call this with the mutex held. */
static void tell_repeat(struct repeat *r)
{
    char line[LINE_BYTES], pairs[LOG_PAIRS_BYTES];
    if (r->left_out == 0) return;
    snprintf(pairs, sizeof pairs, "of=%s lines=%llu", r->event, (unsigned long long)r->left_out);
    r->left_out = 0;
    append(line, format_line(line, atomic_load(&as_json), r->level, NULL, "repeated", pairs));
}

/* Returns false if this event has reached its limit of lines in this second. Call this with the mutex held. */
static bool admit(enum log_level level, const char *event)
{
    if (level < LOG_WARN) return true;
    const uint32_t hash = text_hash(TEXT_HASH_BEGIN, event, SIZE_MAX);
    struct repeat *r = &the.repeats[(hash ^ hash >> 16) % LOG_REPEAT_SLOTS];
    const int64_t now = in_ms(0).tv_sec;
    if (strncmp(r->event, event, EVENT_BYTES - 1) != 0 || r->level != level || r->second != now) {
        tell_repeat(r);
        snprintf(r->event, sizeof r->event, "%s", event);
        r->level = level;
        r->second = now;
        r->written = 0;
    }
    if (r->written < LOG_REPEATS_PER_SECOND) {
        r->written++;
        return true;
    }
    r->left_out++;
    /* The first omitted line wakes the writer thread, which reports the number of omitted lines after a second. */
    if (!the.repeats_left_out) wake_writer();
    the.repeats_left_out = true;
    return false;
}

/* Logs how many lines were left out, for each event whose last one-second period has ended. If `all` is true, does so
 * for all events. Call this with the mutex held. */
static void tell_repeats(bool all)
{
    const int64_t now = in_ms(0).tv_sec;
    the.repeats_left_out = false;
    for (int i = 0; i < LOG_REPEAT_SLOTS; i++) {
        if (all || the.repeats[i].second != now) tell_repeat(&the.repeats[i]);
        if (the.repeats[i].left_out > 0) the.repeats_left_out = true;
    }
}

static void *writer_main(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&the.lock);
    for (;;) {
        while (the.used == 0 && !the.closing) {
            the.waiting = true;
            if (the.repeats_left_out) {
                const struct timespec until = in_ms(1000);
                pthread_cond_timedwait(&the.wake, &the.lock, &until);
                tell_repeats(false);
            } else pthread_cond_wait(&the.wake, &the.lock);
            the.waiting = false;
        }
        const struct timespec until = in_ms(LOG_GATHER_MS);
        while (!the.closing && pthread_cond_timedwait(&the.wake, &the.lock, &until) == 0) continue;
        if (the.closing) tell_repeats(true);
        const uint64_t lost = log_dropped(), lines = the.lines;
        const bool tell = lines > 0 && lost != the.told_lost && LOG_BUFFER_BYTES - the.used >= LINE_BYTES;
        /* Appends a line that reports the number of lost lines. `lines` does not count this line. */
        if (tell) {
            char pairs[64];
            snprintf(pairs, sizeof pairs, "lines=%llu", (unsigned long long)(lost - the.told_lost));
            the.used += format_line(the.buffer[the.filling] + the.used, atomic_load(&as_json), LOG_WARN, NULL, "lost",
                                    pairs);
        }
        const char *full = the.buffer[the.filling];
        const size_t used = the.used;
        const bool last = the.closing;
        the.filling ^= 1;
        the.used = 0;
        the.lines = 0;
        pthread_mutex_unlock(&the.lock);
        const bool written = write_all(full, used, lines);
        pthread_mutex_lock(&the.lock);
        if (tell && written) the.told_lost = lost;
        /* another thread may have logged a line while this thread was in write() */
        if (last && the.used == 0) break;
    }
    the.done = true;
    pthread_cond_signal(&the.finished);
    pthread_mutex_unlock(&the.lock);
    return NULL;
}

/* ---- Opening and closing the log, and forks of the process ------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&the.lock);
}
static void after_fork_parent(void)
{
    pthread_mutex_unlock(&the.lock);
}

/* After fork(), the child has no writer thread. The parent's writer thread writes the queued lines. */
static void after_fork_child(void)
{
    the.open = the.closing = the.done = the.stuck = the.waiting = false;
    the.used = 0;
    the.lines = 0;
    pthread_mutex_unlock(&the.lock);
}

static void set_up(void)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&the.wake, &monotonic);
    pthread_cond_init(&the.finished, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

void log_open(const char *format, const char *level)
{
    pthread_once(&once, set_up);
    atomic_store(&as_json, strcmp(format, "json") == 0);
    for (int l = LOG_DEBUG; l <= LOG_ERROR; l++)
        if (strcmp(level, level_json[l]) == 0) atomic_store(&min_level, l);

    /* The writer thread blocks all signals, so that other threads handle them. A SIGPIPE that its write() causes
     * stays pending and has no effect. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&the.lock);
    /* the old writer thread counted as stuck, but it has returned from write() since then */
    if (the.done) the.stuck = false;
    if (!the.open && !the.stuck) {
        the.closing = the.done = false;
        the.open = pthread_create(&the.writer, NULL, writer_main, NULL) ==
                   0; /* if no thread could be started, each thread writes its log lines directly */
    }
    pthread_mutex_unlock(&the.lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void log_close(void)
{
    pthread_mutex_lock(&the.lock);
    if (!the.open) {
        pthread_mutex_unlock(&the.lock);
        return;
    }
    the.closing = true;
    the.waiting = false;
    pthread_cond_signal(&the.wake);
    const struct timespec until = in_ms(LOG_CLOSE_TIMEOUT_MS);
    while (!the.done && pthread_cond_timedwait(&the.finished, &the.lock, &until) == 0) continue;
    const bool done = the.done;
    the.open = false;
    if (!done) {
        the.stuck = true;
        atomic_fetch_add_explicit(&dropped, the.lines, memory_order_relaxed);
        the.used = 0;
        the.lines = 0;
    }
    pthread_mutex_unlock(&the.lock);
    if (done) pthread_join(the.writer, NULL);
    else pthread_detach(the.writer);
}

/* ---- The other public functions of the log ----------------------------------------------------------------------- */

bool log_enabled(enum log_level level)
{
    return (int)level >= atomic_load_explicit(&min_level, memory_order_relaxed);
}

uint64_t log_dropped(void)
{
    return atomic_load_explicit(&dropped, memory_order_relaxed);
}

void log_event(enum log_level level, const char *request_id, const char *event, const char *pairs, ...)
{
    char text[LOG_PAIRS_BYTES];
    va_list args;
    if (!log_enabled(level)) return;
    va_start(args, pairs);
    vsnprintf(text, sizeof text, pairs, args);
    va_end(args);
    log_pairs(level, request_id, event, text);
}

void log_pairs(enum log_level level, const char *request_id, const char *event, const char *pairs)
{
    char line[LINE_BYTES];
    if (!log_enabled(level)) return;
    const size_t length = format_line(line, atomic_load_explicit(&as_json, memory_order_relaxed), level, request_id,
                                      event, pairs);

    pthread_mutex_lock(&the.lock);
    const bool open = the.open, stuck = the.stuck;
    if (open && admit(level, event)) append(line, length);
    pthread_mutex_unlock(&the.lock);
    if (open) return;
    if (stuck) atomic_fetch_add_explicit(&dropped, 1, memory_order_relaxed);
    else write_all(line, length, 1);
}

/* True for a character that ends a line in some programs (U+2028, U+2029) or changes the direction of the text after it
 * (U+202A to U+202E, U+2066 to U+2069). All these characters have three bytes in UTF-8. */
static bool turns_lines(const unsigned char *s)
{
    return s[0] == 0xE2 &&
           ((s[1] == 0x80 && s[2] >= 0xA8 && s[2] <= 0xAE) || (s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9));
}

const char *log_clean(char *buffer, unsigned long capacity, const char *client_string)
{
    const char *s = client_string ? client_string : "";
    size_t taken = 0;
    struct text t = text_in(buffer, capacity);
    if (capacity == 0) return "";
    while (s[taken] != '\0') {
        static const char hex[] = "0123456789abcdef";
        const unsigned char c = (unsigned char)s[taken];
        size_t length = text_character(s + taken);
        /* characters from U+0080 to U+009F are terminal commands, so they are escaped */
        if (c == 0xC2 && (unsigned char)s[taken + 1] < 0xA0) length = 0;
        if (length == 3 && turns_lines((const unsigned char *)s + taken)) length = 0;
        const char escaped[] = { '\\', (char)c }, code[] = { '\\', 'x', hex[c >> 4], hex[c & 15] };
        const char *form = s + taken;
        size_t bytes = length;
        if (c == '"' || c == '\\') form = escaped, bytes = sizeof escaped;
        else if (length == 0 || is_control((char)c)) form = code, bytes = sizeof code;
        if (length == 0) length = 1;
        if (taken + length > LOG_CLEAN_INPUT_BYTES ||
            t.used + bytes + 4 > capacity) { /* room for "..." and the NUL must remain */
            for (int dots = 0; dots < 3 && t.used + 1 < capacity; dots++) text_put_char(&t, '.');
            break;
        }
        text_put(&t, form, bytes);
        taken += length;
    }
    return buffer;
}
