/* errors.h: what every CUDA error means here, in one table.
 *
 * A sticky error has broken the process's context: no later call can succeed, and only a new process can use the device again.
 * The others are answered and forgotten. An error that is not in the table counts as sticky: nothing is promised of it.
 * The server's fake device uses the same table, so that its scripted faults have the consequences of real ones. */
#ifndef ATTN_CUDA_ERRORS_H
#define ATTN_CUDA_ERRORS_H

#include "kernels/attention.h"

/* CUDA's number, its name, sticky, the status that it becomes */
#define CUDA_ERROR_MAP(X)                                  \
    X(1, "invalid value", 0, DEVICE)                       \
    X(2, "out of memory", 0, NO_MEMORY)                    \
    X(9, "invalid configuration", 0, DEVICE)               \
    X(35, "insufficient driver", 0, UNSUPPORTED)           \
    X(46, "device unavailable", 1, DEVICE_LOST)            \
    X(98, "invalid device function", 0, DEVICE)            \
    X(100, "no device", 0, UNSUPPORTED)                    \
    X(101, "invalid device", 0, UNSUPPORTED)               \
    X(209, "no kernel image for this device", 0, DEVICE)   \
    X(214, "uncorrectable ECC error", 1, DEVICE_LOST)      \
    X(600, "not ready", 0, BUSY)                           \
    X(700, "illegal address", 1, DEVICE_LOST)              \
    X(701, "out of launch resources", 0, DEVICE)           \
    X(702, "launch timeout", 1, DEVICE_LOST)               \
    X(709, "context is destroyed", 1, DEVICE_LOST)         \
    X(710, "device assertion", 1, DEVICE_LOST)             \
    X(714, "hardware stack error", 1, DEVICE_LOST)         \
    X(715, "illegal instruction", 1, DEVICE_LOST)          \
    X(716, "misaligned address", 1, DEVICE_LOST)           \
    X(717, "invalid address space", 1, DEVICE_LOST)        \
    X(718, "invalid program counter", 1, DEVICE_LOST)      \
    X(719, "launch failure", 1, DEVICE_LOST)               \
    X(801, "not supported", 0, UNSUPPORTED)                \
    X(810, "MPS client terminated", 1, DEVICE_LOST)        \
    X(999, "unknown error", 1, DEVICE_LOST)

struct cuda_error_info {
    int         code;
    const char *name;
    bool        sticky;
    attn_status status;
};

static inline struct cuda_error_info cuda_error_of(int code)
{
    static const struct cuda_error_info table[] = {
#define X(code, name, sticky, status) { code, name, sticky != 0, ATTN_##status },
        CUDA_ERROR_MAP(X)
#undef X
    };
    const struct cuda_error_info unknown = { code, "an error that is not in our table", true, ATTN_DEVICE_LOST };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].code == code) return table[i];
    return unknown;
}

#endif
