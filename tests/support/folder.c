/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/folder.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/base/err.h"

void folder_make(char *path, size_t size)
{
    const char *build = getenv("BUILD");
    if (build)
        (void)mkdir(build, 0777);
    snprintf(path, size, "%s/larder-test-XXXXXX", build ? build : "/tmp");
    if (!mkdtemp(path)) {
        perror(path);
        abort();
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st, (void)type, (void)where;
    return remove(path);
}

void folder_remove(const char *path)
{
    if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS))
        perror(path);
}

void folder_file(const char *folder, const char *name, const void *p, size_t n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    check(fd >= 0 && write(fd, p, n) == (ssize_t)n && close(fd) == 0);
}

void folder_replace(const char *folder, const char *name, const void *p, size_t n)
{
    char from[512], to[512];
    folder_file(folder, ".new", p, n);
    snprintf(from, sizeof from, "%s/.new", folder);
    snprintf(to, sizeof to, "%s/%s", folder, name);
    check(rename(from, to) == 0);
}
