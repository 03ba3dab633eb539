/* peer.c: parses addresses and networks, and finds clients behind trusted proxies; see peer.h. */
#include "server/base/peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "text/text.h"

#define UNIX "unix"

enum {
    BITS = 128,     /* number of bits of a stored address; an IPv4 address is stored as an IPv6 address */
    BITS_FOUR = 96, /* position of the IPv4 address in an IPv6 address that contains it, in bits */
    ENTRY_BYTES = 64,
};

static const uint8_t four_in_six[BITS_FOUR / 8] = { [10] = 0xff, [11] = 0xff };

/* Reads an IP address from the text; an IPv4 address becomes a mapped IPv6 address. Returns false if the text is not an
 * address. *first is the number of leading bits that were added to the text's address (96 for IPv4, otherwise 0). */
static bool parse(const char *text, uint8_t address[BITS / 8], int *first)
{
    memcpy(address, four_in_six, sizeof four_in_six);
    *first = BITS_FOUR;
    if (inet_pton(AF_INET, text, address + sizeof four_in_six) == 1) return true;
    *first = 0;
    return inet_pton(AF_INET6, text, address) == 1;
}

static const char *write_address(const uint8_t address[BITS / 8], char text[PEER_BYTES])
{
    const bool four = memcmp(address, four_in_six, sizeof four_in_six) == 0;
    return inet_ntop(four ? AF_INET : AF_INET6, four ? address + sizeof four_in_six : address, text, PEER_BYTES);
}

const char *peer_text(const struct sockaddr *address, char text[PEER_BYTES])
{
    uint8_t bytes[BITS / 8];
    snprintf(text, PEER_BYTES, "%s", address->sa_family == AF_UNIX ? UNIX : "-");
    if (address->sa_family == AF_INET) {
        memcpy(bytes, four_in_six, sizeof four_in_six);
        memcpy(bytes + sizeof four_in_six, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
        return write_address(bytes, text);
    }
    if (address->sa_family == AF_INET6)
        return write_address(((const struct sockaddr_in6 *)(const void *)address)->sin6_addr.s6_addr, text);
    return text;
}

/* Reads a network such as "10.0.0.0/8". *bits is the length of the prefix: an address is in the network if its first
 * *bits bits equal those of `address`. */
static bool parse_network(const char *text, uint8_t address[BITS / 8], int *bits)
{
    char host[ENTRY_BYTES];
    const size_t length = strcspn(text, "/");
    uint64_t given;
    int first;
    if (length >= sizeof host) return false;
    memcpy(host, text, length);
    host[length] = '\0';
    if (!parse(host, address, &first)) return false;
    *bits = BITS;
    if (text[length] == '\0') return true;
    if (!text_is_number(text + length + 1, (uint64_t)(BITS - first), &given)) return false;
    *bits = first + (int)given;
    return true;
}

bool peer_is_network(const char *text)
{
    uint8_t address[BITS / 8];
    int bits;
    return strcmp(text, UNIX) == 0 || parse_network(text, address, &bits);
}

static bool is_within(const uint8_t *address, const uint8_t *network, int bits)
{
    const int whole = bits / 8, rest = bits % 8;
    if (memcmp(address, network, (size_t)whole) != 0) return false;
    return rest == 0 || ((address[whole] ^ network[whole]) >> (8 - rest)) == 0;
}

bool peer_is_trusted(const char *const *networks, int count, const char *address)
{
    uint8_t one[BITS / 8], network[BITS / 8];
    int bits, first;
    const bool is_address = parse(address, one, &first);
    for (int i = 0; i < count; i++) {
        if (!is_address && strcmp(networks[i], UNIX) == 0 && strcmp(address, UNIX) == 0) return true;
        if (is_address && parse_network(networks[i], network, &bits) && is_within(one, network, bits)) return true;
    }
    return false;
}

/* Reads the address in one entry of X-Forwarded-For, such as "10.0.0.1:80" or "[::1]:80". White space, brackets and
 * port are left out. Returns false if there is no address. */
static bool read_entry(const char *at, const char *end, char text[PEER_BYTES])
{
    char entry[ENTRY_BYTES];
    uint8_t address[BITS / 8];
    int first;
    while (at < end && (*at == ' ' || *at == '\t')) at++;
    while (at < end && (end[-1] == ' ' || end[-1] == '\t')) end--;
    if ((size_t)(end - at) >= sizeof entry) return false;
    memcpy(entry, at, (size_t)(end - at));
    entry[end - at] = '\0';
    char *host = entry, *const colon = strchr(entry, ':');
    if (*entry == '[') {
        host++;
        host[strcspn(host, "]")] = '\0';
    } else if (colon != NULL && strchr(colon + 1, ':') == NULL) *colon = '\0';
    return parse(host, address, &first) && write_address(address, text) != NULL;
}

const char *peer_forwarded(const char *const *networks, int count, const char *peer, const char *const *lines,
                           int line_count, char text[PEER_BYTES])
{
    const char *found = peer;
    char entry[PEER_BYTES];
    for (int i = line_count - 1; i >= 0; i--)
        for (const char *end = lines[i] + strlen(lines[i]), *at; end != NULL; end = at) {
            for (at = end; at > lines[i] && at[-1] != ',';) at--;
            if (!read_entry(at, end, entry)) return found;
            memcpy(text, entry, PEER_BYTES);
            found = text;
            if (!peer_is_trusted(networks, count, found)) return found;
            at = at > lines[i] ? at - 1 : NULL;
        }
    return found;
}
