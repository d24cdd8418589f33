/* SPDX-License-Identifier: Apache-2.0 */
#include "format/samples.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/commit.h"
#include "format/tar.h"
#include "format/version.h"

#define UNSIGNED(x) ((unsigned long long)(x))

/* Different byte strings, numbered in the order of their coming. */
struct strings {
    struct buf text;
    struct buf ends; /* u64 each: where in text the string ends */
    uint32_t count;
    uint32_t *slots; /* number + 1, open addressing, at most half full */
    size_t mask;
};

struct field {
    uint64_t offset;
    uint64_t bytes;
    uint32_t name;
};

struct samples {
    enum shard_format format;
    uint64_t shard_bytes;
    uint64_t record_bytes;
    struct strings keys;  /* one per sample, but none for records */
    struct strings names; /* of fields */
    struct buf fields;    /* struct field each */
    struct buf firsts;    /* u64 each: the first field of a sample */
};

/* ---- Strings ---- */

static uint64_t end_of(const struct strings *s, uint32_t i)
{
    uint64_t end;
    memcpy(&end, s->ends.p + i * sizeof end, sizeof end);
    return end;
}

static struct slice strings_at(const struct strings *s, uint32_t i)
{
    uint64_t begin = i == 0 ? 0 : end_of(s, i - 1);
    return SLICE(s->text.p + begin, end_of(s, i) - begin);
}

static void strings_free(struct strings *s)
{
    buf_free(&s->text);
    buf_free(&s->ends);
    free(s->slots);
}

static size_t slot_of(const struct strings *s, struct slice x)
{
    size_t i = hash64(x.p, x.n) & s->mask;
    while (s->slots[i] && !slice_eq(strings_at(s, s->slots[i] - 1), x))
        i = (i + 1) & s->mask;
    return i;
}

static bool strings_grow(struct strings *s)
{
    size_t size = s->slots ? 2 * (s->mask + 1) : 16;
    uint32_t *slots = calloc(size, sizeof *slots);
    if (!slots)
        return false;
    free(s->slots);
    s->slots = slots;
    s->mask = size - 1;
    for (uint32_t i = 0; i < s->count; i++)
        s->slots[slot_of(s, strings_at(s, i))] = i + 1;
    return true;
}

/* Number of x, which is added if it is not there; *was_there says so. */
static int strings_add(struct strings *s, struct slice x, uint32_t *number, bool *was_there, struct err *e)
{
    if (s->count == UINT32_MAX - 1)
        return err_set(e, ERR_LIMIT, "more than %u samples in one shard", s->count);
    if ((!s->slots || 2 * (size_t)s->count >= s->mask) && !strings_grow(s))
        return err_set(e, ERR_NO_MEMORY, "no memory for the keys of %u samples", s->count);
    size_t i = slot_of(s, x);
    *was_there = s->slots[i] != 0;
    if (!*was_there) {
        buf_put(&s->text, x.p, x.n);
        uint64_t end = s->text.n;
        buf_put(&s->ends, &end, sizeof end);
        int r = s->text.failed ? buf_end(&s->text, "the keys of samples", e)
                               : buf_end(&s->ends, "the keys of samples", e);
        if (r < 0)
            return r;
        s->slots[i] = ++s->count;
    }
    *number = s->slots[i] - 1;
    return 0;
}

/* ---- What is asked of a built one ---- */

uint64_t samples_count(const struct samples *s)
{
    return s->format == SHARD_RECORDS ? s->shard_bytes / s->record_bytes : s->keys.count;
}

struct slice samples_key(const struct samples *s, uint64_t i)
{
    check(i < samples_count(s));
    return s->format == SHARD_RECORDS ? SLICE("", 0) : strings_at(&s->keys, (uint32_t)i);
}

static uint64_t first_of(const struct samples *s, uint64_t i)
{
    uint64_t first;
    if (i == s->keys.count)
        return s->fields.n / sizeof(struct field);
    memcpy(&first, s->firsts.p + i * sizeof first, sizeof first);
    return first;
}

uint32_t samples_fields(const struct samples *s, uint64_t i)
{
    check(i < samples_count(s));
    return s->format == SHARD_TAR ? (uint32_t)(first_of(s, i + 1) - first_of(s, i)) : 1;
}

struct sample_field samples_field(const struct samples *s, uint64_t i, uint32_t field)
{
    check(field < samples_fields(s, i));
    struct field f;
    switch (s->format) {
    case SHARD_RECORDS: return (struct sample_field){slice_str("bin"), i * s->record_bytes, s->record_bytes};
    case SHARD_TAR:
        memcpy(&f, s->fields.p + (first_of(s, i) + field) * sizeof f, sizeof f);
        return (struct sample_field){strings_at(&s->names, f.name), f.offset, f.bytes};
    default: return (struct sample_field){slice_str("bin"), 0, s->shard_bytes};
    }
}

void samples_free(struct samples *s)
{
    if (!s)
        return;
    strings_free(&s->keys);
    strings_free(&s->names);
    buf_free(&s->fields);
    buf_free(&s->firsts);
    free(s);
}

/* ---- Filling, by builder and decoder alike ---- */

static int sample_begin(struct samples *s, struct slice key, bool *was_there, struct err *e)
{
    uint32_t number;
    int r = strings_add(&s->keys, key, &number, was_there, e);
    if (r < 0 || *was_there)
        return r;
    uint64_t first = s->fields.n / sizeof(struct field);
    buf_put(&s->firsts, &first, sizeof first);
    return buf_end(&s->firsts, "a sample index", e);
}

/* Adds a field to the last sample. */
static int field_add(struct samples *s, const struct sample_field *x, bool *was_there, struct err *e)
{
    struct field f = {.offset = x->offset, .bytes = x->bytes}, other;
    int r = strings_add(&s->names, x->name, &f.name, was_there, e);
    if (r < 0)
        return r;
    uint64_t first = first_of(s, s->keys.count - 1), end = s->fields.n / sizeof f;
    if (end - first >= SAMPLE_FIELDS_MAX)
        return err_set(e, ERR_LIMIT, "one sample has more than %u members", SAMPLE_FIELDS_MAX);
    *was_there = false;
    for (uint64_t i = first; i < end; i++) {
        memcpy(&other, s->fields.p + i * sizeof other, sizeof other);
        *was_there |= other.name == f.name;
    }
    if (*was_there)
        return 0;
    buf_put(&s->fields, &f, sizeof f);
    return buf_end(&s->fields, "a sample index", e);
}

/* ---- Encoding ---- */

static void fields_put(struct buf *b, const struct samples *s)
{
    for (uint32_t i = 0; i < s->keys.count; i++) {
        uint64_t first = first_of(s, i), end = first_of(s, i + 1ull);
        buf_put16(b, strings_at(&s->keys, i));
        buf_u16(b, (uint16_t)(end - first));
        for (; first < end; first++) {
            struct field f;
            memcpy(&f, s->fields.p + first * sizeof f, sizeof f);
            buf_u32(b, f.name);
            buf_u64(b, f.offset);
            buf_u64(b, f.bytes);
        }
    }
}

int samples_encode(const struct samples *s, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_u32(&b, s->format);
    buf_u32(&b, s->names.count);
    buf_u64(&b, s->shard_bytes);
    buf_u64(&b, s->record_bytes);
    buf_u64(&b, samples_count(s));
    for (uint32_t i = 0; i < s->names.count; i++)
        buf_put16(&b, strings_at(&s->names, i));
    fields_put(&b, s);
    int r = buf_end(&b, "a sample index", e);
    if (r == 0)
        r = record_encode(RECORD_SAMPLES, SAMPLES_VERSION, b.p, b.n, out, e);
    buf_free(&b);
    return r;
}

static int bad_index(struct err *e, const char *why)
{
    return err_set(e, ERR_CORRUPT, "sample index: %s; import the shard again", why);
}

/* Every name once, and kept in a table of its own: fields are told apart by number. */
static int names_take(struct rcur *c, struct samples *s, uint32_t count, struct err *e)
{
    for (uint32_t i = 0; i < count && !c->failed; i++) {
        struct slice name = rcur_take16(c);
        uint32_t number;
        bool was_there = false;
        int r = c->failed ? 0 : strings_add(&s->names, name, &number, &was_there, e);
        if (r < 0)
            return r;
        if (was_there || (name.n == 0 && !c->failed))
            return bad_index(e, "a field's name is empty or stands twice");
    }
    return 0;
}

static int sample_take(struct rcur *c, struct samples *s, struct err *e)
{
    struct slice key = rcur_take16(c);
    uint32_t fields = rcur_u16(c);
    bool was_there = false;
    if (c->failed)
        return 0;
    if (fields > SAMPLE_FIELDS_MAX || (fields == 0) == (s->format == SHARD_TAR))
        return bad_index(e, "a sample has no fields, or too many");
    int r = sample_begin(s, key, &was_there, e);
    if (r == 0 && was_there)
        r = bad_index(e, "a key stands twice");
    for (uint32_t i = 0; r == 0 && i < fields; i++) {
        uint32_t name = rcur_u32(c);
        struct sample_field f = {.offset = rcur_u64(c)};
        f.bytes = rcur_u64(c);
        if (c->failed)
            return 0;
        if (name >= s->names.count || f.offset > s->shard_bytes || f.bytes > s->shard_bytes - f.offset)
            return bad_index(e, "a field lies outside the shard, or has no name");
        f.name = strings_at(&s->names, name);
        r = field_add(s, &f, &was_there, e);
        if (r == 0 && was_there)
            r = bad_index(e, "a sample has a field twice");
    }
    return r;
}

static int body_take(struct rcur *c, struct samples *s, uint64_t shard_bytes, struct err *e)
{
    s->format = rcur_u32(c);
    uint32_t names = rcur_u32(c);
    s->shard_bytes = rcur_u64(c);
    s->record_bytes = rcur_u64(c);
    uint64_t count = rcur_u64(c);
    if (c->failed || s->format >= SHARD_FORMAT_COUNT)
        return bad_index(e, "it is cut short, or of a format that this build does not know");
    if (s->shard_bytes != shard_bytes)
        return err_set(e, ERR_CORRUPT,
                       "sample index: made for a shard of %llu bytes, this one has %llu; import it again",
                       UNSIGNED(s->shard_bytes), UNSIGNED(shard_bytes));
    bool records = s->format == SHARD_RECORDS;
    if (records != (s->record_bytes > 0) || (records && shard_bytes % s->record_bytes != 0) ||
        (records && count != shard_bytes / s->record_bytes) || (s->format == SHARD_WHOLE && count != 1) ||
        (s->format != SHARD_TAR && names > 0))
        return bad_index(e, "its counts do not fit its format");
    int r = names_take(c, s, names, e);
    for (uint64_t i = 0; r == 0 && !records && i < count && !c->failed; i++)
        r = sample_take(c, s, e);
    return r < 0 ? r : rcur_end(c, "a sample index", e);
}

int samples_decode(const void *p, size_t n, uint64_t shard_bytes, struct samples **out, struct err *e)
{
    struct slice body;
    int r = record_decode(RECORD_SAMPLES, SAMPLES_VERSION, p, n, &body, e);
    if (r < 0)
        return r;
    struct samples *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
    struct rcur c = rcur_of(body.p, body.n);
    r = body_take(&c, s, shard_bytes, e);
    if (r < 0)
        samples_free(s);
    else
        *out = s;
    return r;
}

/* ---- Building ---- */

struct samples_builder {
    struct samples *s; /* given away by finish */
    char *shard;
    struct tar *tar;
    uint64_t offset; /* where there is no tar */
};

static const char *base_of(const char *name)
{
    const char *slash = strrchr(name, '/');
    return slash ? slash + 1 : name;
}

static int member_refuse(enum err_class class, const struct tar_member *m, const char *why, struct err *e)
{
    char q[160];
    return err_set(e, class, "member \"%s\" at offset %llu %s", err_quote(q, sizeof q, m->name.p, m->name.n),
                   UNSIGNED(m->header_offset), why);
}

/* Key and field of a member; false for what is no sample. */
static bool name_split(struct slice name, struct slice *key, struct slice *field)
{
    size_t base = name.n;
    while (base > 0 && name.p[base - 1] != '/')
        base--;
    const uint8_t *dot = memchr(name.p + base, '.', name.n - base);
    if (base == name.n || dot == name.p + base)
        return false;
    *key = SLICE(name.p, dot ? (size_t)(dot - name.p) : name.n);
    *field = slice_str("bin");
    if (dot && dot + 1 < name.p + name.n)
        *field = SLICE(dot + 1, name.p + name.n - dot - 1);
    return true;
}

static int member_found(void *arg, const struct tar_member *m, struct err *e)
{
    struct samples *s = arg;
    struct sample_field f = {.offset = m->data_offset, .bytes = m->bytes};
    struct slice key;
    bool was_there = false;
    if (m->type == TAR_HARD_LINK || m->type == TAR_SYMBOLIC_LINK)
        return member_refuse(ERR_UNSUPPORTED, m,
                             "is a link; pack the files themselves (tar --dereference --hard-dereference)",
                             e);
    if (m->type != TAR_FILE || !name_split(m->name, &key, &f.name))
        return 0;
    if (s->keys.count == 0 || !slice_eq(strings_at(&s->keys, s->keys.count - 1), key)) {
        int r = sample_begin(s, key, &was_there, e);
        if (r < 0)
            return r;
        if (was_there)
            return member_refuse(ERR_MISMATCH, m,
                                 "belongs to a sample that ended earlier; members of one sample must be "
                                 "adjacent (sort them by name)",
                                 e);
    }
    int r = field_add(s, &f, &was_there, e);
    if (r == 0 && was_there)
        r = member_refuse(ERR_MISMATCH, m, "is there twice in its sample; rename one of the two", e);
    return r;
}

int samples_builder_create(enum shard_format format, const char *shard, uint64_t record_bytes,
                           struct samples_builder **out, struct err *e)
{
    if ((unsigned)format >= SHARD_FORMAT_COUNT || (format == SHARD_RECORDS) != (record_bytes > 0))
        return err_set(e, ERR_INVALID,
                       "shard \"%s\": format %d with records of %llu bytes; only fixed-size "
                       "records have a size, and it is not 0",
                       shard, format, UNSIGNED(record_bytes));
    struct samples_builder *b = calloc(1, sizeof *b);
    if (b) {
        b->s = calloc(1, sizeof *b->s);
        b->shard = strdup(shard);
    }
    int r = b && b->s && b->shard ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
    if (r == 0 && format == SHARD_TAR)
        r = tar_create(member_found, b->s, &b->tar, e);
    if (r < 0) {
        samples_builder_free(b);
        return r;
    }
    b->s->format = format;
    b->s->record_bytes = record_bytes;
    *out = b;
    return 0;
}

static int shard_prepend(const struct samples_builder *b, int r, struct err *e)
{
    char q[160];
    (void)err_prepend(e, "shard \"%s\"", err_quote(q, sizeof q, b->shard, strlen(b->shard)));
    return r;
}

int samples_builder_push(struct samples_builder *b, const void *p, size_t n, struct err *e)
{
    b->offset += n;
    int r = b->tar ? tar_push(b->tar, p, n, e) : 0;
    return r < 0 ? shard_prepend(b, r, e) : 0;
}

uint64_t samples_builder_skippable(const struct samples_builder *b)
{
    return b->tar ? tar_skippable(b->tar) : UINT64_MAX - b->offset;
}

void samples_builder_skip(struct samples_builder *b, uint64_t n)
{
    check(n <= samples_builder_skippable(b));
    b->offset += n;
    if (b->tar)
        tar_skip(b->tar, n);
}

int samples_builder_finish(struct samples_builder *b, struct samples **out, struct err *e)
{
    struct samples *s = b->s;
    bool was_there;
    int r = 0;
    check(s);
    s->shard_bytes = b->offset;
    if (b->tar)
        r = tar_finish(b->tar, e);
    else if (s->format == SHARD_RECORDS && b->offset % s->record_bytes != 0)
        r = err_set(e, ERR_CORRUPT,
                    "%llu bytes are no whole number of records of %llu; it is cut, or the size of a "
                    "record is another",
                    UNSIGNED(b->offset), UNSIGNED(s->record_bytes));
    else if (s->format == SHARD_WHOLE)
        r = sample_begin(s, slice_str(base_of(b->shard)), &was_there, e);
    if (r < 0)
        return shard_prepend(b, r, e);
    b->s = NULL;
    *out = s;
    return 0;
}

void samples_builder_free(struct samples_builder *b)
{
    if (!b)
        return;
    samples_free(b->s);
    tar_free(b->tar);
    free(b->shard);
    free(b);
}
