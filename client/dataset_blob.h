/* SPDX-License-Identifier: Apache-2.0 */
/* A blob of a part, fetched and decoded whole into memory. */
#ifndef LARDER_DATASET_BLOB_H
#define LARDER_DATASET_BLOB_H

#include "client/part.h"

struct dataset_blob { /* zeroed is empty */
    uint8_t *p;       /* malloc'ed */
    uint64_t bytes;
};

/* ERR_CORRUPT if the part has no such blob. */
must_check int dataset_blob_read(const struct part *p, struct conn *conn, const char *name,
                                 struct dataset_blob *out, struct err *e);
void dataset_blob_free(struct dataset_blob *b);

/* Stored chunks numbers[0..count) of a part, decoded one after the other: `each` gets the plain bytes of one
 * chunk, on the calling thread; the memory is valid during the call. */
must_check int
dataset_chunks_read(const struct part *p, struct conn *conn, const uint32_t *numbers, uint32_t count,
                    int (*each)(void *arg, uint32_t number, const uint8_t *plain, size_t n, struct err *e),
                    void *arg, struct err *e);

#endif
