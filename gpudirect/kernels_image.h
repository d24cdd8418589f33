/* SPDX-License-Identifier: Apache-2.0 */
/* The image of kernels.cu that nvcc made: code for several generations of GPUs, and PTX for those to come. */
#ifndef LARDER_GPUDIRECT_KERNELS_IMAGE_H
#define LARDER_GPUDIRECT_KERNELS_IMAGE_H

/* For cuModuleLoadData; NULL: this build was made without nvcc. */
const void *kernels_image(void);
/* For people: "sm_80 sm_90 ... and PTX", or "none: built without nvcc". */
const char *kernels_image_note(void);

#endif
