/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An MDS shard that is packed with zstd, unpacked piece by piece; and the checksums that an index.json has of
 * its files. No more comes out than index.json says, whatever goes in. Memory: zstd's window, at most 128
 * MiB.
 */
#ifndef LARDER_MDS_UNPACK_H
#define LARDER_MDS_UNPACK_H

#include "format/mds.h"

struct digest;

/* The checksums of one file; those that nobody here can compute are left out. Zeroed memory to begin with. */
struct mds_checks {
    struct {
        struct digest *digest;
        const struct mds_hash *hash;
    } list[MDS_HASHES_MAX];
    uint32_t count;
};

must_check int mds_checks_begin(struct mds_checks *c, const struct mds_file *f, struct err *e);
void mds_checks_add(struct mds_checks *c, const void *p, size_t n);
/* what: "packed", "own", for the sentence. ERR_CORRUPT. */
must_check int mds_checks_end(struct mds_checks *c, const char *what, struct err *e);
void mds_checks_free(struct mds_checks *c);

struct mds_unpack;

/* bytes: unpacked. plain, packed: whose checksums are compared, and outlive it; NULL: none. */
must_check int mds_unpack_create(uint64_t bytes, const struct mds_file *plain, const struct mds_file *packed,
                                 struct mds_unpack **out, struct err *e);
void mds_unpack_free(struct mds_unpack *u); /* NULL allowed */
/* Takes packed bytes off the front of *in and writes at most n unpacked ones. *got < n: all of in was taken.
 * ERR_CORRUPT: it is damaged, or has more bytes than it should. */
must_check int mds_unpack_push(struct mds_unpack *u, struct slice *in, void *out, size_t n, size_t *got,
                               struct err *e);
/* The file has ended: was it whole, and do the checksums agree? ERR_CORRUPT. */
must_check int mds_unpack_end(struct mds_unpack *u, struct err *e);

#endif
