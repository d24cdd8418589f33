/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/standin_cufile.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void find(void *library, void *to, const char *symbol)
{
    void *p = dlsym(library, symbol);
    check(p != NULL);
    memcpy(to, &p, sizeof p);
}

const struct standin_cufile *standin_cufile_load(const char *settings)
{
    static struct standin_cufile calls;
    char folder[4096], path[4200];
    if (calls.standin_cufile_configure)
        return &calls;
    snprintf(path, sizeof path, "%s/%s", standin_folder("standin", folder, sizeof folder), CUFILE_LIBRARY);
    if (settings)
        setenv("LARDER_STANDIN_CUFILE", settings, 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* found again by its soname */
    if (!library)
        fprintf(stderr, "%s\n", dlerror());
    check(library != NULL);
#define STANDIN_CUFILE_FIND(symbol, ...) find(library, &calls.symbol, #symbol);
    STANDIN_CUFILE_CALLS(STANDIN_CUFILE_FIND)
    return &calls;
}
