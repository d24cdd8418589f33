/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies between tensors in a device's memory, with any strides, and packed bytes in pinned host memory. They
 * are given to a stream and happen later: both sides stay as they are until an event behind them has
 * happened.
 */
#ifndef LARDER_CLIENT_TRANSFER_H
#define LARDER_CLIENT_TRANSFER_H

#include "client/packer.h"

/* MEMORY_OUT: box_gather from the device into packed; MEMORY_IN: box_scatter from packed to the device. Rows,
 * rows of rows, and rows of those go as one copy where the device can do it. Short rows, and what takes many
 * copies, go through the packer (NULL: none), which is the stream's; where there is none, elements that lie
 * apart in several dimensions take a copy for each. On failure some of it may have been given. */
must_check int transfer(struct memory_stream *s, struct packer *p, enum memory_direction d,
                        const struct box_copy *b, uint64_t offset, size_t n, uint8_t *packed, struct err *e);

#endif
