/* SPDX-License-Identifier: Apache-2.0 */
#include "format/mds_unpack.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <zstd.h>
#include <zstd_errors.h>

#include "format/base/digest.h"

#define WINDOW_LOG_MAX 27 /* what zstd itself takes without being asked */

/* ---- checksums ---- */

int mds_checks_begin(struct mds_checks *c, const struct mds_file *f, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < f->hash_count; i++) {
        if (!digest_known(f->hashes[i].algorithm))
            continue;
        c->list[c->count].hash = &f->hashes[i];
        rc = digest_start(f->hashes[i].algorithm, &c->list[c->count].digest, e);
        c->count += rc == 0;
    }
    return rc;
}

void mds_checks_add(struct mds_checks *c, const void *p, size_t n)
{
    for (uint32_t i = 0; i < c->count; i++)
        digest_update(c->list[i].digest, p, n);
}

int mds_checks_end(struct mds_checks *c, const char *what, struct err *e)
{
    char hex[DIGEST_HEX_BYTES], quoted[DIGEST_HEX_BYTES + 32];
    for (uint32_t i = 0; i < c->count; i++) {
        const struct mds_hash *h = c->list[i].hash;
        digest_end(c->list[i].digest, hex);
        if (strcasecmp(hex, h->digest) != 0)
            return err_set(e, ERR_CORRUPT,
                           "the %s of its %s bytes is %s, " MDS_INDEX_NAME " says %s: it is damaged, or of "
                           "another version",
                           h->algorithm, what, hex,
                           err_quote(quoted, sizeof quoted, h->digest, strlen(h->digest)));
    }
    return 0;
}

void mds_checks_free(struct mds_checks *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        digest_free(c->list[i].digest);
    c->count = 0;
}

/* ---- unpacking ---- */

struct mds_unpack {
    ZSTD_DCtx *zstd;
    uint64_t bytes, done;
    size_t hint; /* of zstd: 0 between frames */
    struct mds_checks plain, packed;
};

int mds_unpack_create(uint64_t bytes, const struct mds_file *plain, const struct mds_file *packed,
                      struct mds_unpack **out, struct err *e)
{
    struct mds_unpack *u = calloc(1, sizeof *u);
    int rc = 0;
    if (u)
        u->zstd = ZSTD_createDCtx();
    if (!u || !u->zstd || ZSTD_isError(ZSTD_DCtx_setParameter(u->zstd, ZSTD_d_windowLogMax, WINDOW_LOG_MAX)))
        rc = err_set(e, ERR_NO_MEMORY, "no memory for unpacking a shard");
    if (rc == 0)
        u->bytes = bytes;
    if (rc == 0 && plain)
        rc = mds_checks_begin(&u->plain, plain, e);
    if (rc == 0 && packed)
        rc = mds_checks_begin(&u->packed, packed, e);
    if (rc < 0)
        mds_unpack_free(u);
    else
        *out = u;
    return rc;
}

void mds_unpack_free(struct mds_unpack *u)
{
    if (!u)
        return;
    mds_checks_free(&u->plain);
    mds_checks_free(&u->packed);
    ZSTD_freeDCtx(u->zstd);
    free(u);
}

int mds_unpack_push(struct mds_unpack *u, struct slice *in, void *p, size_t n, size_t *got, struct err *e)
{
    ZSTD_inBuffer from = {.src = in->p, .size = in->n};
    ZSTD_outBuffer to = {.dst = p, .size = n};
    bool moves = true;
    /* Between frames there is nothing that zstd could still hold back. */
    while (moves && to.pos < n && (from.pos < from.size || u->hint != 0)) {
        size_t before = from.pos + to.pos;
        u->hint = ZSTD_decompressStream(u->zstd, &to, &from);
        if (ZSTD_getErrorCode(u->hint) == ZSTD_error_memory_allocation)
            return err_set(e, ERR_NO_MEMORY, "no memory for unpacking a shard");
        if (ZSTD_isError(u->hint))
            return err_set(e, ERR_CORRUPT, "it cannot be unpacked: %s; it is cut or damaged",
                           ZSTD_getErrorName(u->hint));
        moves = from.pos + to.pos > before;
    }
    mds_checks_add(&u->plain, p, to.pos);
    if (from.pos > 0) {
        mds_checks_add(&u->packed, in->p, from.pos);
        *in = SLICE(in->p + from.pos, in->n - from.pos);
    }
    *got = to.pos;
    u->done += to.pos;
    if (u->done > u->bytes)
        return err_set(e, ERR_CORRUPT, "unpacked it has more than the %" PRIu64 " bytes of " MDS_INDEX_NAME,
                       u->bytes);
    return 0;
}

int mds_unpack_end(struct mds_unpack *u, struct err *e)
{
    struct slice none = {0};
    uint8_t more;
    size_t got;
    int rc = mds_unpack_push(u, &none, &more, 1, &got, e);
    if (rc == 0 && u->done < u->bytes)
        rc = err_set(e, ERR_CORRUPT, "unpacked it has %" PRIu64 " bytes, " MDS_INDEX_NAME " says %" PRIu64,
                     u->done, u->bytes);
    if (rc == 0 && u->hint != 0)
        rc = err_set(e, ERR_CORRUPT, "it ends inside a frame of zstd; it is cut");
    if (rc == 0)
        rc = mds_checks_end(&u->packed, "packed", e);
    return rc == 0 ? mds_checks_end(&u->plain, "unpacked", e) : rc;
}
