/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/folder.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

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
