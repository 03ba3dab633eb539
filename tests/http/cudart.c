/* cudart.c: a fake CUDA runtime library for clients of CUDA shared memory, to be used with the fake device
 * (kernels/fake/fake.c). An allocation is an object of shared memory, and its handle is the text "DEVICE/NAME".
 * test_examples.py compiles this file to libcudart.so. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALLOCATIONS = 8, ERROR_VALUE = 1, ERROR_MEMORY = 2 };

static int device;
static struct {
    void *memory;
    size_t bytes;
    char handle[64];
} allocations[ALLOCATIONS];

static int find(const void *memory)
{
    int i = 0;
    while (i < ALLOCATIONS && allocations[i].memory != memory) i++;
    return i;
}

static const char *name_of(int i)
{
    return strchr(allocations[i].handle, '/') + 1;
}

int cudaSetDevice(int number);
int cudaSetDevice(int number)
{
    device = number;
    return 0;
}

int cudaMalloc(void **memory, size_t bytes);
int cudaMalloc(void **memory, size_t bytes)
{
    const int i = find(NULL);
    if (i == ALLOCATIONS) return ERROR_MEMORY;
    snprintf(allocations[i].handle, sizeof allocations[i].handle, "%d/attn_cudart_%d_%d", device, (int)getpid(), i);
    const int fd = shm_open(name_of(i), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) return ERROR_MEMORY;
    void *mapped = ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                                                    : MAP_FAILED;
    close(fd);
    if (mapped == MAP_FAILED) {
        shm_unlink(name_of(i));
        return ERROR_MEMORY;
    }
    *memory = allocations[i].memory = mapped;
    allocations[i].bytes = bytes;
    return 0;
}

int cudaIpcGetMemHandle(void *handle, void *memory);
int cudaIpcGetMemHandle(void *handle, void *memory)
{
    const int i = find(memory);
    if (i == ALLOCATIONS) return ERROR_VALUE;
    memcpy(handle, allocations[i].handle, sizeof allocations[i].handle);
    return 0;
}

int cudaMemcpy(void *to, const void *from, size_t bytes, int direction);
int cudaMemcpy(void *to, const void *from, size_t bytes, int direction)
{
    (void)direction;
    memcpy(to, from, bytes);
    return 0;
}

int cudaFree(void *memory);
int cudaFree(void *memory)
{
    const int i = find(memory);
    if (memory == NULL || i == ALLOCATIONS) return ERROR_VALUE;
    shm_unlink(name_of(i));
    munmap(memory, allocations[i].bytes);
    allocations[i].memory = NULL;
    return 0;
}
