/* sum.c: attn_sum_parts() on the host. It adds up several float32 arrays element by element, in the order of the
 * arrays. */
#include "attention.h"
#include "backend.h"
#include "dtype.h"

void attn_sum_all(const attn_sum *sum)
{
    for (int64_t n = 0; n < sum->elements; n++) {
        float total = sum->parts[0][n];
        for (int part = 1; part < sum->count; part++) total += sum->parts[part][n];
        attn_store(sum->dtype, sum->to, n, total);
    }
}
