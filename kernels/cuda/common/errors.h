/* errors.h: a table that says for each CUDA error what happens to the request and to the device.
 *
 * A sticky error has broken the process's CUDA context: only a new process can use the device again. Any other error
 * fails the one request. An error that is not in the table counts as sticky. The tests' fake device (kernels/fake/)
 * uses the same table. */
#ifndef ATTN_CUDA_ERRORS_H
#define ATTN_CUDA_ERRORS_H

#include "kernels/attention.h"

/* The columns are CUDA's error number, its name in CUDA, the message to the client, 1 for a sticky error (else 0), and
 * the attn_status (attention.h). device.cu checks numbers and names against CUDA's. */
#define CUDA_ERROR_MAP(X)                                                                 \
    X(1, cudaErrorInvalidValue, "invalid value", 0, DEVICE)                               \
    X(2, cudaErrorMemoryAllocation, "out of memory", 0, NO_MEMORY)                        \
    X(9, cudaErrorInvalidConfiguration, "invalid configuration", 0, DEVICE)               \
    X(35, cudaErrorInsufficientDriver, "insufficient driver", 0, UNSUPPORTED)             \
    X(46, cudaErrorDevicesUnavailable, "device unavailable", 1, DEVICE_LOST)              \
    X(98, cudaErrorInvalidDeviceFunction, "invalid device function", 0, DEVICE)           \
    X(100, cudaErrorNoDevice, "no device", 0, UNSUPPORTED)                                \
    X(101, cudaErrorInvalidDevice, "invalid device", 0, UNSUPPORTED)                      \
    X(201, cudaErrorDeviceUninitialized, "invalid device context", 1, DEVICE_LOST)        \
    X(205, cudaErrorMapBufferObjectFailed, "mapping failed", 0, DEVICE)                   \
    X(209, cudaErrorNoKernelImageForDevice, "no kernel image for this device", 0, DEVICE) \
    X(214, cudaErrorECCUncorrectable, "uncorrectable ECC error", 1, DEVICE_LOST)          \
    X(217, cudaErrorPeerAccessUnsupported, "no peer access", 0, UNSUPPORTED)              \
    X(222, cudaErrorUnsupportedPtxVersion, "PTX newer than the driver", 0, UNSUPPORTED)   \
    X(400, cudaErrorInvalidResourceHandle, "invalid resource handle", 0, DEVICE)          \
    X(600, cudaErrorNotReady, "not ready", 0, BUSY)                                       \
    X(700, cudaErrorIllegalAddress, "illegal address", 1, DEVICE_LOST)                    \
    X(701, cudaErrorLaunchOutOfResources, "out of launch resources", 0, DEVICE)           \
    X(702, cudaErrorLaunchTimeout, "launch timeout", 1, DEVICE_LOST)                      \
    X(709, cudaErrorContextIsDestroyed, "context is destroyed", 1, DEVICE_LOST)           \
    X(710, cudaErrorAssert, "device assertion", 1, DEVICE_LOST)                           \
    X(711, cudaErrorTooManyPeers, "too many peers", 0, DEVICE)                            \
    X(714, cudaErrorHardwareStackError, "hardware stack error", 1, DEVICE_LOST)           \
    X(715, cudaErrorIllegalInstruction, "illegal instruction", 1, DEVICE_LOST)            \
    X(716, cudaErrorMisalignedAddress, "misaligned address", 1, DEVICE_LOST)              \
    X(717, cudaErrorInvalidAddressSpace, "invalid address space", 1, DEVICE_LOST)         \
    X(718, cudaErrorInvalidPc, "invalid program counter", 1, DEVICE_LOST)                 \
    X(719, cudaErrorLaunchFailure, "launch failure", 1, DEVICE_LOST)                      \
    X(801, cudaErrorNotSupported, "not supported", 0, UNSUPPORTED)                        \
    X(810, cudaErrorMpsClientTerminated, "MPS client terminated", 1, DEVICE_LOST)         \
    X(912, cudaErrorInvalidClusterSize, "invalid cluster size", 0, DEVICE)                \
    X(999, cudaErrorUnknown, "unknown error", 1, DEVICE_LOST)

struct cuda_error_info {
    int code;
    const char *name;
    bool sticky;
    attn_status status;
};

static inline struct cuda_error_info cuda_error_of(int code)
{
    static const struct cuda_error_info table[] = {
#define X(code, cuda, name, sticky, status) { code, name, sticky != 0, ATTN_##status },
        CUDA_ERROR_MAP(X)
#undef X
    };
    const struct cuda_error_info unknown = { code, "an error that is not in our table", true, ATTN_DEVICE_LOST };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].code == code) return table[i];
    return unknown;
}

#endif
