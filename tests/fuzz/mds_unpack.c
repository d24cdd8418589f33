/* SPDX-License-Identifier: Apache-2.0 */
/* A packed shard out of any bytes: never more comes out than it should have, and what is accepted has all. */
#include "format/mds_unpack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define ROOM 300u

/* The first bytes say how large it should be, and how large the pieces are. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct mds_unpack *u;
    struct err e = {0};
    uint8_t out[ROOM];
    uint64_t done = 0;
    if (n < 4)
        return 0;
    uint64_t bytes = le16_get(data);
    size_t piece = 1 + data[2], room = 1 + data[3];
    struct slice left = SLICE(data + 4, n - 4);
    int rc = mds_unpack_create(bytes, NULL, NULL, &u, &e);
    check(rc == 0);
    while (rc == 0 && left.n > 0) {
        struct slice in = SLICE(left.p, left.n < piece ? left.n : piece);
        left = SLICE(left.p + in.n, left.n - in.n);
        size_t got = room;
        while (rc == 0 && got == room) {
            rc = mds_unpack_push(u, &in, out, room, &got, &e);
            done += rc == 0 ? got : 0;
            check(got <= room && done <= bytes);
        }
        check(rc < 0 || in.n == 0);
    }
    if (rc == 0)
        rc = mds_unpack_end(u, &e);
    check(rc < 0 ? e.text[0] != 0 : done == bytes);
    mds_unpack_free(u);
    return 0;
}
