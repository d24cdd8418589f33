/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/standin_cufile.h"

const struct standin_cufile *standin_cufile_load(const char *settings)
{
    static struct standin_cufile calls;
    if (calls.standin_cufile_configure)
        return &calls;
    void *library = standin_open(CUFILE_LIBRARY, "LARDER_STANDIN_CUFILE", settings);
#define STANDIN_CUFILE_FIND(symbol, ...) standin_find(library, &calls.symbol, #symbol);
    STANDIN_CUFILE_CALLS(STANDIN_CUFILE_FIND)
    return &calls;
}
