/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/standin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Test programs lie in BUILD/tests/unit and BUILD/tests/fault, the libraries in BUILD/tests/KIND. */
const char *standin_folder(const char *kind, char *path, size_t size)
{
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    check(n > 0);
    program[n] = '\0';
    char *rooms[] = {strstr(program, "/tests/unit/"), strstr(program, "/tests/fault/")};
    char *room = rooms[0] ? rooms[0] : rooms[1];
    check(room != NULL);
    *room = '\0';
    check((size_t)snprintf(path, size, "%s/tests/%s", program, kind) < size);
    return path;
}

void standin_find(void *library, void *to, const char *symbol)
{
    void *p = dlsym(library, symbol);
    if (!p)
        fprintf(stderr, "a stand-in lacks %s\n", symbol);
    check(p != NULL);
    memcpy(to, &p, sizeof p);
}

void *standin_open(const char *name, const char *variable, const char *settings)
{
    char folder[4096], path[4200];
    snprintf(path, sizeof path, "%s/%s", standin_folder("standin", folder, sizeof folder), name);
    if (settings)
        setenv(variable, settings, 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* found again by its soname */
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    check(library != NULL);
    return library;
}

const struct standin *standin_load(const char *settings)
{
    static struct standin calls;
    if (calls.cuInit)
        return &calls;
    void *library = standin_open(CUDA_LIBRARY, "LARDER_STANDIN", settings);
#define STANDIN_FIND(symbol, ...) standin_find(library, &calls.symbol, #symbol);
    CUDA_CALLS(STANDIN_FIND)
    STANDIN_CALLS(STANDIN_FIND)
    return &calls;
}
