/* early_load.c: see early_load.h. The GPUs' compute capabilities come from NVML, the driver's library for monitoring.
 * CUDA cannot tell them in time, because it reads CUDA_MODULE_LOADING before it answers any call. */
#include "server/device/early_load.h"

#include <dlfcn.h>
#include <stdlib.h>

#ifndef ATTND_CUDA_ARCHS
#define ATTND_CUDA_ARCHS ""
#endif

bool early_load_runs(const char *compiled, int major, int minor)
{
    for (const char *at = compiled; *at != '\0';) {
        char *end;
        const long number = strtol(at, &end, 10);
        if (end == at) return false;
        if (number / 10 == major && number % 10 <= minor) return true;
        at = end;
    }
    return false;
}

/* The functions of NVML that are used here. Each returns 0 if it succeeds. */
struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *gpus);
    int (*gpu)(unsigned index, void **gpu);
    int (*capability)(void *gpu, int *major, int *minor);
};

static bool nvml_find(void *library, struct nvml *nvml)
{
    const struct {
        const char *name;
        void *function;
    } wanted[] = { { "nvmlInit_v2", &nvml->init },
                   { "nvmlShutdown", &nvml->shutdown },
                   { "nvmlDeviceGetCount_v2", &nvml->count },
                   { "nvmlDeviceGetHandleByIndex_v2", &nvml->gpu },
                   { "nvmlDeviceGetCudaComputeCapability", &nvml->capability } };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        *(void **)wanted[i].function = dlsym(library, wanted[i].name);
        if (*(void **)wanted[i].function == NULL) return false;
    }
    return true;
}

/* Returns whether the machine has a GPU, and this program has machine code for each of its GPUs. */
static bool all_gpus_run(const struct nvml *nvml)
{
    unsigned count = 0;
    if (nvml->count(&count) != 0) return false;
    for (unsigned i = 0; i < count; i++) {
        void *gpu;
        int major = 0, minor = 0;
        if (nvml->gpu(i, &gpu) != 0 || nvml->capability(gpu, &major, &minor) != 0 ||
            !early_load_runs(ATTND_CUDA_ARCHS, major, minor))
            return false;
    }
    return count > 0;
}

void early_load_kernels(void)
{
    struct nvml nvml;
    if (getenv("CUDA_MODULE_LOADING") != NULL || *ATTND_CUDA_ARCHS == '\0') return;
    void *const library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library == NULL) return;
    if (nvml_find(library, &nvml) && nvml.init() == 0) {
        if (all_gpus_run(&nvml)) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
        nvml.shutdown();
    }
    dlclose(library);
}
