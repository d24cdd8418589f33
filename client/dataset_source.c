/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_source.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>
#include <zstd.h>

#include "format/base/digest.h"

#define PACKED_BYTES (256u << 10) /* read at once */

struct checking {
    struct digest *digest;
    const struct mds_hash *hash;
};

struct source {
    struct source_options o;
    int fd;
    uint64_t at;   /* of the file: where it is read next */
    uint64_t done; /* bytes of the shard */
    ZSTD_DStream *zstd;
    uint8_t *packed;
    ZSTD_inBuffer in;
    size_t hint; /* of zstd: 0 between frames */
    struct checking plain[MDS_HASHES_MAX], raw[MDS_HASHES_MAX];
    uint32_t plain_count, raw_count;
};

/* ---- files ---- */

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

int source_unchanged(const struct stat *was, int fd, struct err *e)
{
    struct stat now;
    if (fstat(fd, &now) < 0)
        return err_sys(e, errno, "looking at it again");
    if (now.st_ino != was->st_ino || now.st_dev != was->st_dev || now.st_size != was->st_size ||
        !same_time(now.st_mtim, was->st_mtim))
        return err_set(e, ERR_MISMATCH,
                       "the file was changed while it was imported: import it again when nobody "
                       "writes to it");
    return 0;
}

/* Up to n bytes; 0 at the end of the file. */
static ssize_t read_some(struct source *s, void *p, size_t n, struct err *e)
{
    ssize_t r;
    do
        r = pread(s->fd, p, n, (off_t)s->at);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return err_sys(e, errno, "reading %zu bytes at %" PRIu64, n, s->at);
    s->at += (uint64_t)r;
    return r;
}

/* ---- checksums ---- */

static int checks_begin(struct checking *list, uint32_t *count, const struct mds_file *f, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && f && i < f->hash_count; i++) {
        if (!digest_known(f->hashes[i].algorithm))
            continue; /* told by who imports */
        list[*count].hash = &f->hashes[i];
        rc = digest_start(f->hashes[i].algorithm, &list[*count].digest, e);
        *count += rc == 0;
    }
    return rc;
}

static void checks_add(struct checking *list, uint32_t count, const void *p, size_t n)
{
    for (uint32_t i = 0; i < count; i++)
        digest_update(list[i].digest, p, n);
}

static int checks_end(struct checking *list, uint32_t count, const char *what, struct err *e)
{
    char hex[DIGEST_HEX_BYTES], quoted[DIGEST_HEX_BYTES + 32];
    for (uint32_t i = 0; i < count; i++) {
        const struct mds_hash *h = list[i].hash;
        digest_end(list[i].digest, hex);
        if (strcasecmp(hex, h->digest) != 0)
            return err_set(e, ERR_CORRUPT,
                           "the %s of its %s bytes is %s, " MDS_INDEX_NAME " says %s: it is damaged, or of "
                           "another version",
                           h->algorithm, what, hex,
                           err_quote(quoted, sizeof quoted, h->digest, strlen(h->digest)));
    }
    return 0;
}

/* ---- the source ---- */

static int unpacking_begin(struct source *s, struct err *e)
{
    s->zstd = ZSTD_createDStream();
    s->packed = malloc(PACKED_BYTES);
    if (!s->zstd || !s->packed)
        return err_set(e, ERR_NO_MEMORY, "no memory for unpacking a shard");
    return 0;
}

int source_open(const struct source_options *o, struct source **out, struct err *e)
{
    struct source *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for reading a file");
    s->o = *o;
    s->fd = open(o->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int rc = s->fd < 0 ? err_sys(e, errno, "opening it") : 0;
    if (rc == 0 && o->was)
        rc = source_unchanged(o->was, s->fd, e);
    if (rc == 0 && o->whole)
        (void)posix_fadvise(s->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    if (rc == 0)
        rc = checks_begin(s->plain, &s->plain_count, o->plain, e);
    if (rc == 0)
        rc = checks_begin(s->raw, &s->raw_count, o->packed, e);
    if (rc == 0 && o->zstd)
        rc = unpacking_begin(s, e);
    if (rc < 0)
        source_close(s);
    else
        *out = s;
    return rc;
}

void source_close(struct source *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->plain_count; i++)
        digest_free(s->plain[i].digest);
    for (uint32_t i = 0; i < s->raw_count; i++)
        digest_free(s->raw[i].digest);
    ZSTD_freeDStream(s->zstd);
    free(s->packed);
    if (s->fd >= 0)
        close(s->fd);
    free(s);
}

/* More packed bytes; 0 at the end of the file. */
static int refill(struct source *s, struct err *e)
{
    ssize_t n = read_some(s, s->packed, PACKED_BYTES, e);
    if (n > 0)
        checks_add(s->raw, s->raw_count, s->packed, (size_t)n);
    s->in = (ZSTD_inBuffer){.src = s->packed, .size = n > 0 ? (size_t)n : 0};
    return (int)n;
}

/* Up to n unpacked bytes; 0 at the end of all frames. */
static int unpack(struct source *s, void *p, size_t n, size_t *got, struct err *e)
{
    ZSTD_outBuffer out = {.dst = p, .size = n};
    bool ended = false;
    while (out.pos < n && !ended) {
        int rc = s->in.pos == s->in.size ? refill(s, e) : 1;
        if (rc < 0)
            return rc;
        ended = rc == 0;
        size_t before = out.pos;
        s->hint = ended && s->hint == 0 ? 0 : ZSTD_decompressStream(s->zstd, &out, &s->in);
        if (ZSTD_isError(s->hint))
            return err_set(e, ERR_CORRUPT, "it cannot be unpacked: %s; it is cut or damaged",
                           ZSTD_getErrorName(s->hint));
        ended = ended && out.pos == before;
    }
    *got = out.pos;
    return 0;
}

static int read_packed(struct source *s, void *p, size_t n, struct err *e)
{
    size_t got;
    int rc = unpack(s, p, n, &got, e);
    if (rc == 0 && got < n)
        rc = err_set(e, ERR_CORRUPT, "unpacked it has %" PRIu64 " bytes, " MDS_INDEX_NAME " says %" PRIu64,
                     s->done + got, s->o.bytes);
    return rc;
}

static int read_plain(struct source *s, void *p, size_t n, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = read_some(s, (char *)p + done, n - done, e);
        if (r < 0)
            return (int)r;
        if (r == 0)
            return err_set(e, ERR_MISMATCH,
                           "the file became shorter while it was imported: %" PRIu64 " bytes now", s->at);
        done += (size_t)r;
    }
    return 0;
}

int source_read(struct source *s, void *p, size_t n, struct err *e)
{
    int rc = s->zstd ? read_packed(s, p, n, e) : read_plain(s, p, n, e);
    if (rc == 0) {
        checks_add(s->plain, s->plain_count, p, n);
        s->done += n;
    }
    return rc;
}

uint64_t source_skip(struct source *s, uint64_t n)
{
    if (s->zstd)
        return 0;
    check(s->plain_count == 0 || n == 0);
    s->at += n;
    s->done += n;
    return n;
}

int source_end(struct source *s, struct err *e)
{
    uint8_t more;
    size_t got = 0;
    check(s->done == s->o.bytes);
    int rc = s->zstd ? unpack(s, &more, 1, &got, e) : 0;
    if (rc == 0 && got > 0)
        rc = err_set(e, ERR_CORRUPT, "unpacked it has more than the %" PRIu64 " bytes of " MDS_INDEX_NAME,
                     s->o.bytes);
    if (rc == 0 && s->zstd && s->hint != 0)
        rc = err_set(e, ERR_CORRUPT, "it ends inside a frame of zstd; it is cut");
    if (rc == 0)
        rc = checks_end(s->raw, s->raw_count, "packed", e);
    if (rc == 0)
        rc = checks_end(s->plain, s->plain_count, s->zstd ? "unpacked" : "own", e);
    return rc == 0 && s->o.was ? source_unchanged(s->o.was, s->fd, e) : rc;
}
