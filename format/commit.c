/* SPDX-License-Identifier: Apache-2.0 */
#include "format/commit.h"

#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"
#include "format/version.h"

/* Frame of every record: checksum 16, magic 8, kind u32, version u32, body length u64, body. */
#define RECORD_HEAD_BYTES 40u
#define PART_BYTES        64u
static const char record_magic[8] = {'L', 'A', 'R', 'D', 'R', 'E', 'C', 'D'};

static const char *const kind_names[] = {
    [RECORD_STORE] = "store",     [RECORD_TENANT] = "tenant",
    [RECORD_RUN] = "run",         [RECORD_ATTEMPT] = "attempt",
    [RECORD_COMMIT] = "commit",   [RECORD_MARK] = "mark",
    [RECORD_SAMPLES] = "samples", [RECORD_PUBLISHED] = "published index",
};

static const char *kind_name(uint32_t kind)
{
    return kind >= RECORD_STORE && kind <= RECORD_PUBLISHED ? kind_names[kind] : "unknown";
}

int record_encode(enum record_kind kind, uint32_t version, const void *body, size_t n, struct buf *out,
                  struct err *e)
{
    size_t start = out->n;
    buf_zeros(out, HASH128_BYTES);
    buf_put(out, record_magic, sizeof record_magic);
    buf_u32(out, kind);
    buf_u32(out, version);
    buf_u64(out, n);
    buf_put(out, body, n);
    int r = buf_end(out, "a record", e);
    if (r < 0)
        return r;
    struct hash128 h = hash128(out->p + start + HASH128_BYTES, out->n - start - HASH128_BYTES);
    memcpy(out->p + start, h.bytes, HASH128_BYTES);
    return 0;
}

int record_decode(enum record_kind kind, uint32_t version, const void *p, size_t n, struct slice *body,
                  struct err *e)
{
    const char *name = kind_name(kind);
    if (n < RECORD_HEAD_BYTES)
        return err_set(e, ERR_CORRUPT, "%s record: %zu bytes, at least %u expected; it is cut short", name, n,
                       RECORD_HEAD_BYTES);
    const uint8_t *in = p;
    if (memcmp(in + 16, record_magic, sizeof record_magic) != 0)
        return err_set(e, ERR_CORRUPT, "%s record: magic at offset 16 is not \"%.8s\"", name, record_magic);
    struct hash128 h = hash128(in + HASH128_BYTES, n - HASH128_BYTES);
    if (memcmp(in, h.bytes, HASH128_BYTES) != 0)
        return err_set(e, ERR_CORRUPT,
                       "%s record: checksum at offset 0 does not match its %zu bytes; it is damaged", name,
                       n);
    if (le32_get(in + 24) != (uint32_t)kind)
        return err_set(e, ERR_CORRUPT, "expected a %s record, found a %s record (kind %u at offset 24)", name,
                       kind_name(le32_get(in + 24)), le32_get(in + 24));
    if (le32_get(in + 28) != version)
        return err_set(e, ERR_VERSION,
                       "%s record: version %u at offset 28, this build knows %u; it was written by %s larder",
                       name, le32_get(in + 28), version,
                       le32_get(in + 28) > version ? "a newer" : "an older");
    if (le64_get(in + 32) != n - RECORD_HEAD_BYTES)
        return err_set(e, ERR_CORRUPT, "%s record: body of %llu bytes at offset 32, %zu are there", name,
                       (unsigned long long)le64_get(in + 32), n - RECORD_HEAD_BYTES);
    *body = SLICE(in + RECORD_HEAD_BYTES, n - RECORD_HEAD_BYTES);
    return 0;
}

int run_name_check(const void *name, size_t n, struct err *e)
{
    char q[160];
    const uint8_t *p = name;
    if (n == 0 || n > NAME_BYTES_MAX)
        return err_set(e, ERR_INVALID, "name \"%s\" has %zu bytes; 1 to %u are allowed",
                       err_quote(q, sizeof q, name, n), n, NAME_BYTES_MAX);
    if (!utf8_valid(name, n))
        return err_set(e, ERR_INVALID, "name \"%s\" is not UTF-8; rename it",
                       err_quote(q, sizeof q, name, n));
    for (size_t i = 0; i < n; i++)
        if (p[i] < 0x20 || p[i] == 0x7f)
            return err_set(e, ERR_INVALID, "name \"%s\" holds the control byte 0x%02x; rename it",
                           err_quote(q, sizeof q, name, n), p[i]);
    return 0;
}

static bool tenant_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
}

int tenant_name_check(const char *name, struct err *e)
{
    char q[96];
    size_t n = strnlen(name, TENANT_NAME_BYTES_MAX + 1);
    bool fine = n > 0 && n <= TENANT_NAME_BYTES_MAX && tenant_byte(name[0]);
    for (size_t i = 1; fine && i < n; i++)
        fine = tenant_byte(name[i]) || name[i] == '-';
    if (fine)
        return 0;
    return err_set(e, ERR_INVALID,
                   "tenant name \"%s\": expected 1 to %u of a-z, 0-9 and -, and no - at the start",
                   err_quote(q, sizeof q, name, n), TENANT_NAME_BYTES_MAX);
}

/* Labels: u16 length, key, u16 length, value, and so on to the end. */
static int labels_check(struct slice labels, struct err *e)
{
    if (labels.n > LABELS_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "labels of %zu bytes; at most %u are allowed", labels.n,
                       LABELS_BYTES_MAX);
    struct rcur c = rcur_of(labels.p, labels.n);
    while (!c.failed && c.left > 0) {
        struct slice key = rcur_take16(&c), value = rcur_take16(&c);
        if (c.failed)
            break;
        int r = run_name_check(key.p, key.n, e);
        if (r < 0) {
            (void)err_prepend(e, "a label's key");
            return r;
        }
        if (!utf8_valid(value.p, value.n))
            return err_set(e, ERR_INVALID, "a label's value is not UTF-8");
    }
    return rcur_end(&c, "the list of labels", e);
}

static int commit_check(const struct commit *c, struct err *e)
{
    if (c->kind != RUN_CHECKPOINTS && c->kind != RUN_DATASET)
        return err_set(e, ERR_INVALID, "kind of run %d; expected 1 (checkpoints) or 2 (dataset)", c->kind);
    int r = run_name_check(c->run.p, c->run.n, e);
    if (r < 0)
        return r;
    if (c->sequence == 0)
        return err_set(e, ERR_INVALID, "sequence 0; the first commit of a run has 1");
    if (c->world == 0 || c->world > WORLD_MAX)
        return err_set(e, ERR_INVALID, "%u parts; expected 1 to %u", c->world, WORLD_MAX);
    if (c->loader.n > LOADER_STATE_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "loader state of %zu bytes; at most %u are allowed", c->loader.n,
                       LOADER_STATE_BYTES_MAX);
    for (uint32_t i = 0; i < c->world; i++)
        if (c->parts[i].rank != i)
            return err_set(e, ERR_INVALID, "part %u is of rank %u; expected all ranks in order", i,
                           c->parts[i].rank);
    return labels_check(c->labels, e);
}

int commit_encode(const struct commit *c, struct buf *out, struct err *e)
{
    int r = commit_check(c, e);
    if (r < 0) {
        (void)err_prepend(e, "commit record");
        return r;
    }
    struct buf body = {.max = COMMIT_BYTES_MAX};
    buf_u32(&body, c->kind);
    buf_u32(&body, c->world);
    buf_put(&body, &c->run_id, ID_BYTES);
    buf_put(&body, &c->attempt, ID_BYTES);
    buf_u64(&body, c->attempt_number);
    buf_u64(&body, c->step);
    buf_u64(&body, c->sequence);
    buf_u64(&body, c->plain_bytes);
    buf_u64(&body, c->server_time_ns);
    for (uint32_t i = 0; i < c->world; i++) {
        buf_u32(&body, c->parts[i].rank);
        buf_u32(&body, 0);
        buf_put(&body, &c->parts[i].segment, ID_BYTES);
        buf_u64(&body, c->parts[i].segment_bytes);
        buf_put(&body, c->parts[i].index_digest, SHA256_BYTES);
    }
    buf_put16(&body, c->run);
    buf_put16(&body, c->loader);
    buf_put16(&body, c->labels);
    r = buf_end(&body, "a commit record", e);
    if (r == 0)
        r = record_encode(RECORD_COMMIT, COMMIT_VERSION, body.p, body.n, out, e);
    buf_free(&body);
    return r;
}

/* One allocation: the parts, then the three byte strings. */
static int commit_own(struct commit *c, struct err *e)
{
    size_t parts = (size_t)c->world * sizeof *c->parts;
    uint8_t *p = malloc(parts + c->run.n + c->loader.n + c->labels.n + 1);
    if (!p)
        return err_set(e, ERR_NO_MEMORY, "no memory for a commit record of %u parts", c->world);
    c->owned = p;
    c->parts = (struct commit_part *)p;
    p += parts;
    struct slice *strings[] = {&c->run, &c->loader, &c->labels};
    for (size_t i = 0; i < 3; i++) {
        if (strings[i]->n > 0)
            memcpy(p, strings[i]->p, strings[i]->n);
        strings[i]->p = p;
        p += strings[i]->n;
    }
    return 0;
}

int commit_decode(const void *p, size_t n, struct commit *out, struct err *e)
{
    struct slice body;
    int r = record_decode(RECORD_COMMIT, COMMIT_VERSION, p, n, &body, e);
    if (r < 0)
        return r;
    struct rcur c = rcur_of(body.p, body.n);
    struct commit m = {.kind = rcur_u32(&c)};
    m.world = rcur_u32(&c);
    rcur_copy(&c, &m.run_id, ID_BYTES);
    rcur_copy(&c, &m.attempt, ID_BYTES);
    m.attempt_number = rcur_u64(&c);
    m.step = rcur_u64(&c);
    m.sequence = rcur_u64(&c);
    m.plain_bytes = rcur_u64(&c);
    m.server_time_ns = rcur_u64(&c);
    struct slice table = {0};
    if (m.world <= WORLD_MAX)
        table = rcur_take(&c, (size_t)m.world * PART_BYTES);
    m.run = rcur_take16(&c);
    m.loader = rcur_take16(&c);
    m.labels = rcur_take16(&c);
    r = m.world <= WORLD_MAX
            ? rcur_end(&c, "a commit record", e)
            : err_set(e, ERR_CORRUPT, "commit record: %u parts, at most %u", m.world, WORLD_MAX);
    if (r == 0)
        r = commit_own(&m, e);
    if (r < 0)
        return r;
    c = rcur_of(table.p, table.n);
    bool reserved = true;
    for (uint32_t i = 0; i < m.world; i++) {
        m.parts[i].rank = rcur_u32(&c);
        reserved &= rcur_zeros(&c, 4);
        rcur_copy(&c, &m.parts[i].segment, ID_BYTES);
        m.parts[i].segment_bytes = rcur_u64(&c);
        rcur_copy(&c, m.parts[i].index_digest, SHA256_BYTES);
    }
    struct err why;
    if (!reserved)
        r = err_set(e, ERR_CORRUPT, "commit record: reserved bytes of a part are not zero");
    else if (commit_check(&m, &why) < 0)
        r = err_set(e, ERR_CORRUPT, "commit record: %s", why.text);
    if (r < 0)
        commit_free(&m);
    else
        *out = m;
    return r;
}

void commit_free(struct commit *c)
{
    if (c)
        free(c->owned);
    if (c)
        *c = (struct commit){0};
}

/* Encodes the small records: wraps what was written into body. */
static int small_encode(enum record_kind kind, struct buf *body, struct buf *out, struct err *e)
{
    int r = buf_end(body, "a record", e);
    if (r == 0)
        r = record_encode(kind, STORE_VERSION, body->p, body->n, out, e);
    buf_free(body);
    return r;
}

static int small_decode(enum record_kind kind, const void *p, size_t n, struct rcur *c, struct err *e)
{
    struct slice body;
    int r = record_decode(kind, STORE_VERSION, p, n, &body, e);
    if (r == 0)
        *c = rcur_of(body.p, body.n);
    return r;
}

/* Ends the decoding of a small record: all read, and `fine` (a field check of the caller) true. */
static int small_end(const struct rcur *c, bool fine, const char *what, struct err *e)
{
    int r = rcur_end(c, what, e);
    if (r == 0 && !fine)
        r = err_set(e, ERR_CORRUPT, "%s holds a value that is not allowed", what);
    return r;
}

/* Text field: u16 length and bytes; false if it does not fit or is not UTF-8. */
static bool text_take(struct rcur *c, char *out, size_t size)
{
    struct slice s = rcur_take16(c);
    return utf8_valid(s.p, s.n) && slice_cstr(s, out, size);
}

int record_store_encode(const struct record_store *r, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_put(&b, &r->store_id, ID_BYTES);
    buf_u64(&b, r->created_ns);
    return small_encode(RECORD_STORE, &b, out, e);
}

int record_store_decode(const void *p, size_t n, struct record_store *out, struct err *e)
{
    struct rcur c;
    int r = small_decode(RECORD_STORE, p, n, &c, e);
    if (r < 0)
        return r;
    *out = (struct record_store){0};
    rcur_copy(&c, &out->store_id, ID_BYTES);
    out->created_ns = rcur_u64(&c);
    return small_end(&c, true, "a store record", e);
}

int record_tenant_encode(const struct record_tenant *r, struct buf *out, struct err *e)
{
    int bad = tenant_name_check(r->name, e);
    if (bad < 0)
        return bad;
    struct buf b = {0};
    buf_put16(&b, slice_str(r->name));
    buf_u64(&b, r->quota_bytes);
    buf_u32(&b, r->weight);
    buf_put16(&b, slice_str(r->residency));
    buf_u64(&b, r->created_ns);
    return small_encode(RECORD_TENANT, &b, out, e);
}

int record_tenant_decode(const void *p, size_t n, struct record_tenant *out, struct err *e)
{
    struct rcur c;
    int r = small_decode(RECORD_TENANT, p, n, &c, e);
    if (r < 0)
        return r;
    *out = (struct record_tenant){0};
    bool fine = text_take(&c, out->name, sizeof out->name) && tenant_name_check(out->name, NULL) == 0;
    out->quota_bytes = rcur_u64(&c);
    out->weight = rcur_u32(&c);
    fine &= text_take(&c, out->residency, sizeof out->residency);
    out->created_ns = rcur_u64(&c);
    return small_end(&c, fine, "a tenant record", e);
}

int record_run_encode(const struct record_run *r, struct buf *out, struct err *e)
{
    int bad = run_name_check(r->name, strlen(r->name), e);
    if (bad < 0)
        return bad;
    struct buf b = {0};
    buf_u32(&b, r->kind);
    buf_put(&b, &r->run_id, ID_BYTES);
    buf_put16(&b, slice_str(r->name));
    buf_u64(&b, r->created_ns);
    return small_encode(RECORD_RUN, &b, out, e);
}

int record_run_decode(const void *p, size_t n, struct record_run *out, struct err *e)
{
    struct rcur c;
    int r = small_decode(RECORD_RUN, p, n, &c, e);
    if (r < 0)
        return r;
    *out = (struct record_run){.kind = rcur_u32(&c)};
    rcur_copy(&c, &out->run_id, ID_BYTES);
    bool fine = text_take(&c, out->name, sizeof out->name) &&
                run_name_check(out->name, strlen(out->name), NULL) == 0 &&
                (out->kind == RUN_CHECKPOINTS || out->kind == RUN_DATASET);
    out->created_ns = rcur_u64(&c);
    return small_end(&c, fine, "a run record", e);
}

int record_attempt_encode(const struct record_attempt *r, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_put(&b, &r->run_id, ID_BYTES);
    buf_put(&b, &r->attempt, ID_BYTES);
    buf_u64(&b, r->number);
    buf_u32(&b, r->world);
    buf_u64(&b, r->created_ns);
    return small_encode(RECORD_ATTEMPT, &b, out, e);
}

int record_attempt_decode(const void *p, size_t n, struct record_attempt *out, struct err *e)
{
    struct rcur c;
    int r = small_decode(RECORD_ATTEMPT, p, n, &c, e);
    if (r < 0)
        return r;
    *out = (struct record_attempt){0};
    rcur_copy(&c, &out->run_id, ID_BYTES);
    rcur_copy(&c, &out->attempt, ID_BYTES);
    out->number = rcur_u64(&c);
    out->world = rcur_u32(&c);
    out->created_ns = rcur_u64(&c);
    return small_end(&c, true, "an attempt record", e);
}

int record_mark_encode(const struct record_mark *r, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_put(&b, &r->run_id, ID_BYTES);
    buf_u32(&b, r->kind);
    buf_u64(&b, r->sequence);
    buf_put16(&b, slice_str(r->reason));
    buf_u64(&b, r->created_ns);
    return small_encode(RECORD_MARK, &b, out, e);
}

int record_mark_decode(const void *p, size_t n, struct record_mark *out, struct err *e)
{
    struct rcur c;
    int r = small_decode(RECORD_MARK, p, n, &c, e);
    if (r < 0)
        return r;
    *out = (struct record_mark){0};
    rcur_copy(&c, &out->run_id, ID_BYTES);
    out->kind = rcur_u32(&c);
    out->sequence = rcur_u64(&c);
    bool fine =
        text_take(&c, out->reason, sizeof out->reason) && (out->kind == MARK_PIN || out->kind == MARK_BAD);
    out->created_ns = rcur_u64(&c);
    return small_end(&c, fine, "a mark record", e);
}
