/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine can do, stage by stage, each measured alone: the bounds that larder is compared with. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <zstd.h>

#include "format/base/hash.h"
#include "format/base/pages.h"
#include "format/channel.h"
#include "format/lane.h"
#include "format/pki.h"
#include "format/seal.h"
#include "format/version.h"
#include "tools/bench.h"
#include "tools/ui.h"

#define WORK_BYTES   (64u << 20) /* larger than most caches */
#define CHUNK        CHUNK_PLAIN_BYTES_MAX
#define BLOCK        (4u << 20)
#define FRAME_BYTES  (1u << 20)
#define WINDOW_BYTES (64ull << 20) /* many times what sockets hold */

const char *stage_name(enum stage s)
{
    static const char *const names[STAGE_COUNT] = {
        "memcpy",        "checksum XXH3-128", "AES-256-GCM", "lane tag",   "zstd level 1", "planes encode",
        "planes decode", "loopback TCP",      "TLS 1.3",     "disk write", "disk read",    "cached read"};
    return names[s];
}

/* As larder's own memory is, and faulted in. */
static void *pages(size_t n)
{
    void *p = pages_alloc(n);
    if (p)
        memset(p, 1, n);
    return p;
}

/* ---- codec
 * ------------------------------------------------------------------------------------------------- */

struct codec_run {
    struct codec_state *state;
    ZSTD_CCtx *zc;
    ZSTD_DCtx *zd;
    int level;
    enum dtype dtype;
    uint8_t *packed;
    size_t *packed_bytes;
    enum codec *codecs;
    uint64_t stored;
};

static int encode_all(struct codec_run *r, const uint8_t *p, size_t n)
{
    size_t room = r->level < 0 ? ZSTD_compressBound(CHUNK) : codec_payload_max(CHUNK);
    r->stored = 0;
    for (size_t at = 0, i = 0; at < n; at += CHUNK, i++) {
        size_t take = n - at < CHUNK ? n - at : CHUNK;
        if (r->level < 0) {
            r->packed_bytes[i] = ZSTD_compressCCtx(r->zc, r->packed + i * room, room, p + at, take, 1);
            if (ZSTD_isError(r->packed_bytes[i]))
                return -EIO;
        } else if (codec_encode(r->state, (enum codec_level)r->level, r->dtype, p + at, take,
                                r->packed + i * room, &r->packed_bytes[i], &r->codecs[i], NULL, NULL) < 0)
            return -EIO;
        r->stored += r->packed_bytes[i];
    }
    return 0;
}

static int decode_all(struct codec_run *r, uint8_t *out, size_t n)
{
    size_t room = r->level < 0 ? ZSTD_compressBound(CHUNK) : codec_payload_max(CHUNK);
    for (size_t at = 0, i = 0; at < n; at += CHUNK, i++) {
        size_t take = n - at < CHUNK ? n - at : CHUNK;
        if (r->level < 0 ? ZSTD_isError(ZSTD_decompressDCtx(r->zd, out + at, take, r->packed + i * room,
                                                            r->packed_bytes[i]))
                         : codec_decode(r->state, r->codecs[i], r->dtype, r->packed + i * room,
                                        r->packed_bytes[i], out + at, take, NULL, NULL) < 0)
            return -EIO;
    }
    return 0;
}

/* The best of as many passes as fit in the time, in GB/s. */
static int best_of(struct codec_run *r, const uint8_t *p, uint8_t *out, size_t n, double seconds, bool encode,
                   double *gbps)
{
    double begun = clock_now_s(), best = 1e30;
    do {
        double t = clock_now_s();
        if ((encode ? encode_all(r, p, n) : decode_all(r, out, n)) < 0)
            return -EIO;
        t = clock_now_s() - t;
        best = t < best ? t : best;
    } while (clock_now_s() - begun < seconds);
    *gbps = (double)n / best / 1e9;
    return 0;
}

int codec_measure(int level, const char *loops, enum dtype dtype, const void *p, size_t n, double seconds,
                  struct codec_figures *f)
{
    size_t chunks = (n + CHUNK - 1) / CHUNK;
    size_t room = chunks * (level < 0 ? ZSTD_compressBound(CHUNK) : codec_payload_max(CHUNK));
    struct codec_run r = {.level = level,
                          .dtype = dtype,
                          .state = codec_state_create(),
                          .zc = ZSTD_createCCtx(),
                          .zd = ZSTD_createDCtx(),
                          .packed = pages(room),
                          .packed_bytes = calloc(chunks, sizeof *r.packed_bytes),
                          .codecs = calloc(chunks, sizeof *r.codecs)};
    uint8_t *out = pages(n);
    int status = -ENOMEM;
    if (r.state && r.zc && r.zd && r.packed && r.packed_bytes && r.codecs && out &&
        (status = loops ? codec_state_loops(r.state, loops) : 0) == 0 &&
        (status = best_of(&r, p, out, n, seconds, true, &f->encode_gbps)) == 0 &&
        (status = best_of(&r, p, out, n, seconds, false, &f->decode_gbps)) == 0) {
        f->ratio = (double)r.stored / (double)n;
        f->same = memcmp(p, out, n) == 0;
    }
    codec_state_free(r.state);
    ZSTD_freeCCtx(r.zc);
    ZSTD_freeDCtx(r.zd);
    free(r.packed_bytes);
    free(r.codecs);
    free(r.packed);
    free(out);
    return status;
}

/* ---- stages in memory
 * --------------------------------------------------------------------------------------- */

struct memory_run {
    uint8_t *from, *to;
    struct seal *seal;
    struct seal_state *seal_state;
    struct lane_mac *mac;
    struct dek dek;
    uint64_t sum; /* keeps the checksum from being dropped */
};

static int seal_begin(struct memory_run *m)
{
    static const uint8_t key[KEY_BYTES] = {1};
    struct segment_header h;
    memset(&h, 0, sizeof h);
    h.version = SEGMENT_VERSION;
    h.suite = SUITE_AES256GCM_HKDF_SHA256;
    snprintf(h.tenant, sizeof h.tenant, "bench");
    seal_free(m->seal);
    m->seal = NULL;
    if (!m->dek.key && !(m->dek.key = secret_create(key, sizeof key)))
        return -ENOMEM;
    return seal_create(&m->dek, &h, WORK_BYTES / CHUNK, &m->seal, NULL);
}

static int memory_pass(enum stage s, struct memory_run *m)
{
    uint8_t tag[LANE_TAG_BYTES];
    if (s == STAGE_AES_GCM && seal_begin(m) < 0)
        return -EIO;
    for (size_t at = 0; at < WORK_BYTES; at += CHUNK) {
        if (s == STAGE_MEMCPY)
            memcpy(m->to + at, m->from + at, CHUNK);
        else if (s == STAGE_CHECKSUM)
            m->sum += hash128(m->from + at, CHUNK).bytes[0];
        else if (s == STAGE_LANE_TAG)
            lane_mac_tag(m->mac, SLICE(m->from + at, CHUNK), SLICE(NULL, 0), tag);
        else if (seal_chunk(m->seal, m->seal_state, (uint32_t)(at / CHUNK), CHUNK, CODEC_RAW, DTYPE_U8,
                            m->from + at, CHUNK, m->to + at / CHUNK * (CHUNK + 64), NULL, NULL) < 0)
            return -EIO;
    }
    return 0;
}

static void measure_memory(enum stage s, const char *data, double seconds, struct stage_figures *out)
{
    static const uint8_t key[LANE_KEY_BYTES] = {1};
    struct memory_run m = {.from = pages(WORK_BYTES),
                           .to = pages(WORK_BYTES + 4096),
                           .seal_state = seal_state_create(),
                           .mac = lane_mac_create(false, key)};
    double begun, best = 1e30;
    bool any = false;
    int status =
        m.from && m.to && m.seal_state && m.mac && bench_fill(data, 1, m.from, WORK_BYTES) ? 0 : -ENOMEM;
    begun = clock_now_s();
    while (status == 0 && (!any || clock_now_s() - begun < seconds)) {
        double t = clock_now_s();
        status = memory_pass(s, &m);
        t = clock_now_s() - t;
        best = t < best ? t : best;
        any = true;
    }
    if (status == 0) {
        out->gbps = WORK_BYTES / best / 1e9;
        out->cpu_s_per_gb = 1 / out->gbps; /* one thread that never waits */
    } else {
        snprintf(out->why_not, sizeof out->why_not, "no memory, or sealing failed");
    }
    seal_free(m.seal);
    seal_state_free(m.seal_state);
    lane_mac_free(m.mac);
    secret_free(m.dek.key);
    free(m.from);
    free(m.to);
}

static void measure_codec(enum stage s, const char *data, double seconds, struct stage_figures *out)
{
    struct codec_figures f = {0};
    enum dtype dtype;
    uint8_t *p = pages(WORK_BYTES);
    if (!p || !bench_dtype(data, &dtype) || !bench_fill(data, 1, p, WORK_BYTES) ||
        codec_measure(s == STAGE_ZSTD ? -1 : CODEC_LEVEL_FAST, NULL, dtype, p, WORK_BYTES, seconds / 2, &f) <
            0) {
        snprintf(out->why_not, sizeof out->why_not, "no memory, or the codec failed");
    } else {
        out->gbps = s == STAGE_PLANES_DECODE ? f.decode_gbps : f.encode_gbps;
        out->cpu_s_per_gb = 1 / out->gbps; /* one thread that never waits */
        out->ratio = f.ratio;
    }
    free(p);
}

/* ---- network
 * ------------------------------------------------------------------------------------------------ */

/* Both ends in this process; the sender has a thread of its own. */
struct wire_run {
    int fd;
    double until_s;
    struct channel *channel; /* NULL: plain TCP */
    const uint8_t *data;     /* WORK_BYTES */
    size_t at;
    int status;
};

/* New bytes each time: those that larder sends do not lie in a cache either. */
static const uint8_t *next_frame(struct wire_run *w)
{
    const uint8_t *p = w->data + w->at;
    w->at = (w->at + FRAME_BYTES) % WORK_BYTES;
    return p;
}

static int send_all(int fd, const uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t r = send(fd, p, n, MSG_NOSIGNAL);
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return -EIO;
        p += r;
        n -= (size_t)r;
    }
    return 0;
}

static int channel_flush(struct channel *c, int fd)
{
    struct slice s = channel_output(c);
    if (s.n && send_all(fd, s.p, s.n) < 0)
        return -EIO;
    channel_output_done(c, s.n);
    return 0;
}

/* Reads once into the channel. 0, -EPIPE at the end, or an error. */
static int channel_take(struct channel *c, int fd, uint8_t *buffer, size_t room, struct err *e)
{
    ssize_t r = recv(fd, buffer, room, 0);
    if (r <= 0)
        return r < 0 && errno == EINTR ? 0 : -EPIPE;
    return channel_input(c, buffer, (size_t)r, e);
}

/* Handshake of one end, until it is ready. */
static int channel_greet(struct channel *c, int fd, bool first, struct err *e)
{
    uint8_t buffer[16384];
    int status = first ? channel_input(c, NULL, 0, e) : 0;
    while (status == 0 && !channel_ready(c)) {
        if ((status = channel_flush(c, fd)) == 0)
            status = channel_take(c, fd, buffer, sizeof buffer, e);
    }
    return status == 0 ? channel_flush(c, fd) : status;
}

static void *sender(void *arg)
{
    struct wire_run *w = arg;
    struct frame_header h = {.opcode = 1};
    if (w->channel)
        w->status = channel_greet(w->channel, w->fd, true, NULL);
    if (w->channel && w->status == 0)
        channel_allow_large(w->channel);
    /* At least what windows need, however long the handshake and the receiver's memory took. */
    for (uint64_t sent = 0; w->status == 0 && (sent < 3 * WINDOW_BYTES || clock_now_s() < w->until_s);
         sent += FRAME_BYTES) {
        if (!w->channel)
            w->status = send_all(w->fd, next_frame(w), FRAME_BYTES);
        else if ((w->status = channel_send(w->channel, &h, SLICE(NULL, 0), SLICE(next_frame(w), FRAME_BYTES),
                                           NULL)) == 0)
            w->status = channel_flush(w->channel, w->fd);
    }
    shutdown(w->fd, SHUT_WR);
    return NULL;
}

/* What came since the last look, if it is enough for a figure: the best counts, as in memory. */
struct window {
    double begun_s, cpu_s;
    uint64_t bytes;
};

static void window_look(struct window *w, uint64_t got, struct stage_figures *out)
{
    double now = clock_now_s(), cpu = cpu_now_s(), gb = (double)(got - w->bytes) / 1e9;
    if (gb < WINDOW_BYTES / 1e9)
        return;
    if (w->begun_s > 0) { /* not the first, in which buffers grow */
        out->gbps = fmax(out->gbps, gb / (now - w->begun_s));
        out->cpu_s_per_gb =
            out->cpu_s_per_gb > 0 ? fmin(out->cpu_s_per_gb, (cpu - w->cpu_s) / gb) : (cpu - w->cpu_s) / gb;
    }
    *w = (struct window){now, cpu, got};
}

/* Takes everything until the sender closes. */
static void receive(int fd, struct channel *c, struct stage_figures *out)
{
    struct window window = {0};
    int least = FRAME_BYTES / 2;
    uint64_t got = 0;
    size_t at = 0;
    uint8_t *buffer = pages(WORK_BYTES);
    if (!c)
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
    int status = buffer ? 0 : -ENOMEM;
    if (status == 0 && c && (status = channel_greet(c, fd, false, NULL)) == 0)
        channel_allow_large(c);
    while (status == 0) {
        struct frame f;
        window_look(&window, got, out);
        if (!c) {
            ssize_t r = recv(fd, buffer + at, FRAME_BYTES, 0);
            if (r <= 0)
                break;
            got += (uint64_t)r;
            at = (at + (size_t)r) % (WORK_BYTES - FRAME_BYTES);
            continue;
        }
        while ((status = channel_frame(c, &f, NULL)) == 1) {
            got += f.header.payload_bytes;
            channel_frame_done(c);
        }
        if (status == 0)
            status = channel_take(c, fd, buffer, 256 << 10, NULL);
    }
    free(buffer);
}

static int socket_pair(int fds[2])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int status = -EIO, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fds[0] = fds[1] = -1;
    if (listener >= 0 && bind(listener, (struct sockaddr *)&a, n) == 0 && listen(listener, 1) == 0 &&
        getsockname(listener, (struct sockaddr *)&a, &n) == 0 &&
        (fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0 &&
        connect(fds[0], (struct sockaddr *)&a, n) == 0 && (fds[1] = accept(listener, NULL, NULL)) >= 0)
        status = 0;
    for (int i = 0; i < 2; i++) /* as larder does: control that paces would only cost here */
        (void)setsockopt(fds[i], IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    if (listener >= 0)
        close(listener);
    return status;
}

/* Two TLS ends that trust a CA made now. */
static int tls_pair(struct channel **client, struct channel **server, struct err *e)
{
    static const char *const hosts[] = {"127.0.0.1", NULL};
    struct pki_pair ca = {0}, of_server = {0}, of_user = {0};
    struct channel_config *sc = NULL, *cc = NULL;
    int64_t now = (int64_t)time(NULL);
    int status = pki_ca_create("bench", now, 1, &ca, e);
    if (status == 0)
        status = pki_issue_server(&ca, hosts, now, 1, &of_server, e);
    if (status == 0)
        status = pki_issue_user(&ca, "bench", ROLE_WRITER, now, 1, &of_user, e);
    if (status == 0)
        status = channel_config_create(true, ca.certificate_pem, of_server.certificate_pem, of_server.key_pem,
                                       &sc, e);
    if (status == 0)
        status = channel_config_create(false, ca.certificate_pem, of_user.certificate_pem, of_user.key_pem,
                                       &cc, e);
    if (status == 0)
        status = channel_create(sc, NULL, server, e);
    if (status == 0)
        status = channel_create(cc, "127.0.0.1", client, e);
    channel_config_unref(sc);
    channel_config_unref(cc);
    pki_pair_free(&ca);
    pki_pair_free(&of_server);
    pki_pair_free(&of_user);
    return status;
}

static void measure_wire(enum stage s, double seconds, struct stage_figures *out)
{
    struct channel *client = NULL, *server = NULL;
    struct err e = {0};
    pthread_t thread;
    int fds[2];
    uint8_t *data = pages(WORK_BYTES);
    int status = data ? socket_pair(fds) : -ENOMEM;
    if (status == 0 && s == STAGE_TLS)
        status = tls_pair(&client, &server, &e);
    if (status == 0)
        bench_fill("random", 1, data, WORK_BYTES);
    struct wire_run w = {.fd = status == 0 ? fds[0] : -1, .channel = client, .data = data};
    w.until_s = clock_now_s() + seconds;
    if (status == 0 && pthread_create(&thread, NULL, sender, &w) == 0) {
        receive(fds[1], server, out);
        pthread_join(thread, NULL);
        if (w.status != 0)
            out->gbps = 0;
    }
    if (out->gbps == 0)
        snprintf(out->why_not, sizeof out->why_not, "%.100s",
                 *e.text ? e.text : "the loopback connection failed");
    channel_free(client);
    channel_free(server);
    for (int i = 0; data && i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    free(data);
}

/* ---- disk
 * --------------------------------------------------------------------------------------------------- */

/* Several threads take one piece after the other: depth for the device. */
#define DISK_THREADS 8
#define DISK_PIECE   (1u << 20)
#define DISK_PASSES  2
struct disk_run {
    int fd;
    uint64_t bytes;
    uint8_t *pieces; /* one for each thread */
    atomic_uint workers;
    atomic_ullong next, done;
    double until_s; /* round the file once, and on until then */
    bool write;
    atomic_int status;
};

static void *disk_worker(void *arg)
{
    struct disk_run *d = arg;
    uint8_t *piece = d->pieces + (size_t)atomic_fetch_add(&d->workers, 1) * DISK_PIECE;
    while (atomic_load(&d->status) == 0) {
        uint64_t next = atomic_fetch_add(&d->next, DISK_PIECE), at = next % d->bytes;
        if (next >= d->bytes && clock_now_s() >= d->until_s)
            break;
        ssize_t r = d->write ? pwrite(d->fd, piece, DISK_PIECE, (off_t)at)
                             : pread(d->fd, piece, DISK_PIECE, (off_t)at);
        if (r != DISK_PIECE)
            atomic_store(&d->status, r < 0 ? -errno : -EIO);
        atomic_fetch_add(&d->done, DISK_PIECE);
    }
    return NULL;
}

/* Over the file once, or for so long; its figures count if they are the best. */
static int disk_pass(int fd, uint64_t bytes, uint8_t *pieces, bool write, double seconds,
                     struct stage_figures *out)
{
    pthread_t threads[DISK_THREADS];
    int started = 0;
    double begun = clock_now_s(), cpu = cpu_now_s();
    struct disk_run d = {
        .fd = fd, .bytes = bytes, .pieces = pieces, .write = write, .until_s = begun + seconds};
    while (started < DISK_THREADS && pthread_create(&threads[started], NULL, disk_worker, &d) == 0)
        started++;
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    int status = started ? atomic_load(&d.status) : -EAGAIN;
    if (write && status == 0 && fdatasync(fd) < 0)
        status = -errno;
    double done_gb = (double)atomic_load(&d.done) / 1e9, gbps = done_gb / (clock_now_s() - begun);
    if (status == 0 && gbps > out->gbps) {
        out->gbps = gbps;
        out->cpu_s_per_gb = (cpu_now_s() - cpu) / done_gb;
    }
    return status;
}

/* A new file with all its room, as a segment has. */
static int disk_file(const char *folder, uint64_t bytes, bool cached, bool *direct)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/larder-bench-XXXXXX", folder);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int through = cached ? -1 : open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    *direct = through >= 0;
    if (through >= 0) {
        close(fd);
        fd = through;
    }
    unlink(path);
    int status = -posix_fallocate(fd, 0, (off_t)bytes);
    if (status == 0)
        return fd;
    close(fd);
    return status;
}

static void measure_disk(enum stage s, const struct stage_work *w, struct stage_figures *out)
{
    uint64_t bytes = w->disk_bytes - w->disk_bytes % DISK_PIECE;
    struct stage_figures writing = {0};
    uint8_t *pieces = pages(DISK_THREADS * DISK_PIECE);
    int status = pieces ? 0 : -ENOMEM;
    if (pieces)
        bench_fill("random", 1, pieces, DISK_THREADS * DISK_PIECE);
    for (int i = 0; i < DISK_PASSES && status == 0; i++) {
        int fd = disk_file(w->folder, bytes, s == STAGE_CACHED_READ, &out->direct);
        status = fd < 0 ? fd : disk_pass(fd, bytes, pieces, true, 0, s == STAGE_DISK_WRITE ? out : &writing);
        if (status == 0 && s == STAGE_DISK_READ)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        if (status == 0 && s != STAGE_DISK_WRITE)
            status = disk_pass(fd, bytes, pieces, false, w->disk_seconds / DISK_PASSES, out);
        if (fd >= 0)
            close(fd);
    }
    free(pieces);
    if (status < 0)
        snprintf(out->why_not, sizeof out->why_not, "%s: %s", w->folder, strerror(-status));
}

void stage_measure(enum stage s, const struct stage_work *w, struct stage_figures *out)
{
    *out = (struct stage_figures){.ratio = 1};
    switch (s) {
    case STAGE_MEMCPY:
    case STAGE_CHECKSUM:
    case STAGE_LANE_TAG:
    case STAGE_AES_GCM: measure_memory(s, w->data, w->seconds, out); break;
    case STAGE_ZSTD:
    case STAGE_PLANES_ENCODE:
    case STAGE_PLANES_DECODE: measure_codec(s, w->data, w->seconds, out); break;
    case STAGE_TCP:
    case STAGE_TLS: measure_wire(s, w->seconds, out); break;
    case STAGE_DISK_WRITE:
    case STAGE_DISK_READ:
    case STAGE_CACHED_READ: measure_disk(s, w, out); break;
    case STAGE_COUNT: break;
    }
}
