/* replay.c: main() for a fuzz target without libFuzzer, for `make test`: runs the target on every file among its
 * arguments and in the folders among them. The exit status is 1 if there was no file, because an empty corpus must not
 * look like success. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *data = NULL;
    long size;
    int good = 0;
    if (!f || fseek(f, 0, SEEK_END) || (size = ftell(f)) < 0 || fseek(f, 0, SEEK_SET)) goto out;
    /* exactly the size of the file, so that a sanitizer reports any read beyond the end */
    data = malloc((size_t)size + !size);
    if (!data || fread(data, 1, (size_t)size, f) != (size_t)size) goto out;
    LLVMFuzzerTestOneInput(data, (size_t)size);
    good = 1;
out:
    if (!good) perror(path);
    free(data);
    if (f) fclose(f);
    return good;
}

int main(int argc, char **argv)
{
    int replayed = 0, failed = 0;
    for (int i = 1; i < argc; i++) {
        struct stat info;
        struct dirent **names;
        int count;
        if (stat(argv[i], &info) == 0 && !S_ISDIR(info.st_mode)) {
            if (replay_file(argv[i])) replayed++;
            else failed++;
            continue;
        }
        /* The files are sorted, so that a failing target fails at the same file in each run. */
        count = scandir(argv[i], &names, NULL, alphasort);
        if (count < 0) {
            perror(argv[i]);
            failed++;
            continue;
        }
        for (int n = 0; n < count; n++) {
            char path[4096];
            if (names[n]->d_name[0] != '.' &&
                snprintf(path, sizeof path, "%s/%s", argv[i], names[n]->d_name) < (int)sizeof path) {
                if (replay_file(path)) replayed++;
                else failed++;
            }
            free(names[n]);
        }
        free(names);
    }
    printf("%s: %d inputs replayed, %d unreadable\n", argv[0], replayed, failed);
    return replayed > 0 && failed == 0 ? 0 : 1;
}
