/* exchange.c: makes exchanges (one request and its answer over HTTP) and releases what their bodies need. */
#include "server/http/exchange.h"

#include "server/http/mhd.h"

struct exchange *exchange_new(struct http_server *http, struct MHD_Connection *mhd)
{
    struct exchange *const exchange = (struct exchange *)request_new(http->server, sizeof *exchange);
    if (exchange == NULL) return NULL;
    exchange->http = http;
    exchange->mhd = mhd;
    exchange->json_bytes = -1;
    return exchange;
}

void exchange_drop_body(struct request *request)
{
    struct exchange *const exchange = exchange_of(request);
    unpack_free(exchange->unpacker);
    exchange->unpacker = NULL;
    request_drop_body(request);
}
