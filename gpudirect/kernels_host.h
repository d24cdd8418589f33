/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels of kernels.cu as plain C, thread after thread: for tests, and for the stand-in driver. A
 * parameter list is what cuLaunchKernel takes: pointers to the values, of the sizes told here.
 */
#ifndef LARDER_GPUDIRECT_KERNELS_HOST_H
#define LARDER_GPUDIRECT_KERNELS_HOST_H

#include <stddef.h>
#include <stdint.h>

#define KERNEL_PARAMETERS_MAX 5

struct kernel_host {
    const char *name;
    uint32_t parameters;
    uint32_t parameter_bytes[KERNEL_PARAMETERS_MAX];
    void (*run)(void *const *parameters);
};

/* NULL: there is no kernel of that name. */
const struct kernel_host *kernel_host_find(const char *name);
/* Runs all threads of a grid of `rows` rows with `threads` threads each. Any thread; several at once. */
void kernel_host_run(const struct kernel_host *k, uint64_t threads, uint32_t rows, void *const *parameters);

#endif
