/* fuzz_region.c: the body with which a region of shared memory is registered.
 *
 * What must hold: what is taken is a key and a range of at least one byte, each no larger than a client may say; a refusal has a text. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_region region;
    attn_error err = { 0 };
    uint8_t *const body = malloc(size ? size : 1); /* of its own size: reading past it is an error */
    must(body != NULL);
    if (size) memcpy(body, data, size);
    const attn_status status = proto_region_read(body, size, &region, &err);
    free(body);
    if (status != ATTN_OK) {
        must(err.status == status && err.text[0]);
        return 0;
    }
    must(region.key[0] && strlen(region.key) < sizeof region.key);
    must(region.offset >= 0 && region.offset <= INT64_C(1) << 53 && region.bytes >= 1 &&
         region.bytes <= INT64_C(1) << 53);
    return 0;
}
