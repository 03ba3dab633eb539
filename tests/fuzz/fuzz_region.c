/* fuzz_region.c: fuzz target for the bodies that register regions of shared memory. Each input is read twice: as a
 * region of system memory and as a region of a GPU.
 *
 * An accepted body must have a key and a range (system memory), or a device and a size (GPU). The range or size must
 * have at least one byte, and be within the limits for a client. A refused body must have a message. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/answer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    proto_region region;
    proto_cuda_region cuda;
    attn_error err = { 0 }, cuda_err = { 0 };
    /* The memory has exactly the size of the body, so that a sanitizer reports any read beyond the end. */
    uint8_t *const body = malloc(size ? size : 1);
    must(body != NULL);
    if (size) memcpy(body, data, size);
    const attn_status status = proto_region_read(body, size, &region, &err);
    const attn_status cuda_status = proto_cuda_region_read(body, size, &cuda, &cuda_err);
    free(body);
    if (cuda_status == ATTN_OK) {
        must(status != ATTN_OK); /* no body may be valid in both formats */
        must(cuda.device >= 0 && cuda.device <= INT64_C(1) << 53 && cuda.bytes >= 1 && cuda.bytes <= INT64_C(1) << 53);
    } else must(cuda_err.status == cuda_status && cuda_err.text[0]);
    if (status != ATTN_OK) {
        must(err.status == status && err.text[0]);
        return 0;
    }
    must(region.key[0] && strlen(region.key) < sizeof region.key);
    must(region.offset >= 0 && region.offset <= INT64_C(1) << 53 && region.bytes >= 1 &&
         region.bytes <= INT64_C(1) << 53);
    return 0;
}
