/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/kernels_image.h"

#include <stddef.h>

#ifdef KERNELS_IMAGE /* the file that nvcc made, and what it was asked for */
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".global larder_kernels_image\n"
        ".hidden larder_kernels_image\n"
        "larder_kernels_image:\n"
        ".incbin \"" KERNELS_IMAGE "\"\n"
        ".popsection\n");
extern const unsigned char larder_kernels_image[] __attribute__((visibility("hidden")));

const void *kernels_image(void)
{
    return larder_kernels_image;
}

const char *kernels_image_note(void)
{
    return KERNELS_IMAGE_FOR;
}
#else
const void *kernels_image(void)
{
    return NULL;
}

const char *kernels_image_note(void)
{
    return "none: built without nvcc";
}
#endif
