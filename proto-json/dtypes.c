/* dtypes.c: the dtypes that a body may name. Clients may send indices as int64 and masks as bool. Kernels do not
 * support these two dtypes, so the elements are converted while they are decoded. */
#include "proto.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "text/text.h"

enum { NAMES = 3 };
static const struct {
    const char *names[NAMES];
    proto_dtype dtype;
} converted[] = {
#define X(wire, safetensors, kserve, bytes, as) { { wire, safetensors, kserve }, { wire, ATTN_##as, bytes } },
    PROTO_DTYPE_MAP(X)
#undef X
};
enum { CONVERTED = sizeof converted / sizeof *converted };

bool proto_dtype_parse(const char *name, proto_dtype *dtype)
{
    if (attn_dtype_parse(name, &dtype->as)) {
        dtype->name = attn_dtype_name(dtype->as);
        dtype->bytes = attn_dtype_bytes(dtype->as);
        return true;
    }
    for (int d = 0; d < CONVERTED; d++)
        for (int n = 0; n < NAMES; n++)
            if (strcasecmp(name, converted[d].names[n]) == 0) {
                *dtype = converted[d].dtype;
                return true;
            }
    return false;
}

const char *proto_dtype_list(attn_tensor_id id, char text[PROTO_DTYPE_LIST_BYTES])
{
    const unsigned dtypes = attn_tensor_dtypes(id);
    char list[ATTN_DTYPE_LIST_BYTES];
    struct text t = text_in(text, PROTO_DTYPE_LIST_BYTES);
    text_put_string(&t, attn_dtype_list(dtypes, list));
    /* a tensor that must be int32 may also be sent as int64, and one that must be uint8 as bool */
    for (int d = 0; d < CONVERTED; d++)
        if (dtypes == 1u << converted[d].dtype.as) text_printf(&t, " or %s", converted[d].dtype.name);
    return text;
}

bool proto_dtype_judged(const proto_dtype *dtype)
{
    return ATTN_DTYPES_FORWARD >> dtype->as & 1;
}

bool proto_dtype_takes(attn_tensor_id id, const proto_dtype *dtype)
{
    return attn_tensor_dtypes(id) >> dtype->as & 1;
}
