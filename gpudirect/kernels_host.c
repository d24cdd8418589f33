/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/kernels_host.h"

/* The source is nvcc's; this is how the C compiler comes to it. */
#include "gpudirect/kernels.cu"
