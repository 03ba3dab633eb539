/* upload.c: sends one large forward over one connection, as fast as the socket takes it, and measures the time.
 *
 *   upload PORT [KEYS] [ROUNDS]      (defaults: 65536 keys, 5 rounds; the server is on 127.0.0.1)
 *
 * The body is JSON: one query over KEYS keys, with 8 heads and D = 128, in random float16. For 65536 keys it has 360
 * MB. For each round the program prints
 *   body_bytes SECONDS_TO_LAST_BYTE_TAKEN SECONDS_TO_WHOLE_ANSWER STATUS
 * The first time ends when the operating system has taken the last byte. A few MB may then still lie in socket
 * buffers. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { HEADS = 8, D = 128 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t xorshift(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Appends a tensor of `rows` x HEADS x D random float16 with magnitudes between 2^-3 and 2. */
static char *put_tensor(char *at, const char *name, long rows, uint64_t *state)
{
    static const char alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    at += sprintf(at, "\"%s\":{\"shape\":[1,%ld,%d,%d],\"dtype\":\"float16\",\"data\":\"", name, rows, HEADS, D);
    const size_t bytes = (size_t)rows * HEADS * D * 2;
    for (size_t i = 0; i < bytes; i += 3) {
        uint8_t b[3] = { 0, 0, 0 };
        for (size_t j = 0; j < 3 && i + j < bytes; j++) {
            const uint64_t r = xorshift(state);
            /* Makes random float16 numbers, byte by byte. The low byte (even index) is random. The high byte has a
             * random sign, and an exponent for magnitudes from 0.125 to 2. */
            b[j] = (i + j) % 2 == 0 ? (uint8_t)r : (uint8_t)((r & 0x80) | (0x30 + (r >> 8) % 16));
        }
        *at++ = alphabet[b[0] >> 2];
        *at++ = alphabet[(b[0] & 3) << 4 | b[1] >> 4];
        *at++ = i + 1 < bytes ? alphabet[(b[1] & 15) << 2 | b[2] >> 6] : '=';
        *at++ = i + 2 < bytes ? alphabet[b[2] & 63] : '=';
    }
    at += sprintf(at, "\"}");
    return at;
}

static int die(const char *what)
{
    fprintf(stderr, "upload: %s: %s\n", what, strerror(errno));
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: upload PORT [KEYS] [ROUNDS]\n");
        return 64;
    }
    const int port = atoi(argv[1]);
    const long keys = argc > 2 ? atol(argv[2]) : 65536;
    const int rounds = argc > 3 ? atoi(argv[3]) : 5;

    const size_t room = (size_t)(2 * keys + 1) * HEADS * D * 2 / 3 * 4 + 4096;
    char *body = malloc(room), head[512];
    if (body == NULL) return die("memory");
    uint64_t state = 88172645463325252u ^ (uint64_t)time(NULL);
    char *at = body;
    *at++ = '{';
    at = put_tensor(at, "q", 1, &state);
    *at++ = ',';
    at = put_tensor(at, "k", keys, &state);
    *at++ = ',';
    at = put_tensor(at, "v", keys, &state);
    *at++ = '}';
    const size_t length = (size_t)(at - body);
    const int head_length = snprintf(head, sizeof head,
                                     "POST /v1/attention/forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                                     "application/json\r\nContent-Length: %zu\r\n\r\n",
                                     length);

    struct sockaddr_in address = { .sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) return die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);

    for (int round = 0; round < rounds; round++) {
        const double start = now();
        if (send(fd, head, (size_t)head_length, MSG_NOSIGNAL) != head_length) return die("send");
        for (size_t sent = 0; sent < length;) {
            const ssize_t n = send(fd, body + sent, length - sent < 1 << 20 ? length - sent : 1 << 20, MSG_NOSIGNAL);
            if (n < 0) return die("send");
            sent += (size_t)n;
        }
        const double taken = now() - start;
        static char answer[1 << 20];
        size_t have = 0, want = 0;
        while (want == 0 || have < want) {
            if (have == sizeof answer - 1) return fprintf(stderr, "upload: the answer is too long\n"), 1;
            const ssize_t n = recv(fd, answer + have, sizeof answer - 1 - have, 0);
            if (n <= 0) return die("recv");
            have += (size_t)n;
            answer[have] = '\0';
            const char *end = strstr(answer, "\r\n\r\n"), *field = strcasestr(answer, "\r\ncontent-length:");
            if (want == 0 && end != NULL && field != NULL)
                want = (size_t)(end + 4 - answer) + strtoul(field + 17, NULL, 10);
        }
        printf("%zu %.6f %.6f %.3s\n", length, taken, now() - start, answer + 9);
        fflush(stdout);
    }
    close(fd);
    free(body);
    return 0;
}
