/* SPDX-License-Identifier: Apache-2.0 */
/* Published directories: opening one, and the sample indexes that the server makes of its files. */
#ifndef LARDER_DATASET_PUBLISHED_H
#define LARDER_DATASET_PUBLISHED_H

#include "client/dataset_blob.h"
#include "client/dataset_view.h"

/* Fills table, version and version_id of d, whose name is set. ERR_NOT_FOUND. */
must_check int dataset_published_open(struct larder_dataset *d, struct err *e);
/* The encoded sample index of one shard. */
must_check int dataset_published_samples(struct larder_dataset *d, uint32_t shard, struct dataset_blob *out,
                                         struct err *e);

#endif
