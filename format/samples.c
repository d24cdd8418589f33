/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/commit.h"
#include "format/limits.h"
#include "format/samples_private.h"
#include "format/tokens.h"
#include "format/version.h"

#define UNSIGNED(x) ((unsigned long long)(x))

struct field {
    uint64_t offset;
    uint64_t bytes;
    uint32_t name;
};

#define TOKENS_FIELD "tokens"
#define OPAQUE       "bytes" /* type of a field of which nothing more is known */

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

static void fit(struct buf *b)
{
    uint8_t *p = b->n ? realloc(b->p, b->n) : NULL;
    if (!p)
        return;
    b->p = p;
    b->cap = b->n;
}

/* Nothing is added, or looked up by its text, any more: gives back what only that needs. */
static void strings_settle(struct strings *s)
{
    free(s->slots);
    s->slots = NULL;
    fit(&s->text);
    fit(&s->ends);
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

static bool in_columns(const struct samples *s)
{
    return s->format == SHARD_MDS || (s->format == SHARD_TOKENS && s->window.tokens == 0);
}

static bool in_windows(const struct samples *s)
{
    return s->format == SHARD_TOKENS && s->window.tokens > 0;
}

uint64_t samples_count(const struct samples *s)
{
    if (in_columns(s))
        return s->columns.samples;
    if (in_windows(s))
        return token_window_count(&s->window, s->shard_bytes / tokens_width(s->token_code));
    return s->format == SHARD_RECORDS ? s->shard_bytes / s->record_bytes : s->keys.count;
}

struct slice samples_key_at(const struct samples *s, uint32_t i)
{
    return strings_at(&s->keys, i);
}

struct slice samples_key(const struct samples *s, uint64_t i)
{
    check(i < samples_count(s));
    return s->keys.count ? strings_at(&s->keys, (uint32_t)i) : SLICE("", 0);
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
    if (s->format == SHARD_MDS)
        return s->columns.count;
    return s->format == SHARD_TAR ? (uint32_t)(first_of(s, i + 1) - first_of(s, i)) : 1;
}

static struct sample_field opaque(const char *name, uint64_t offset, uint64_t bytes)
{
    return (struct sample_field){slice_str(name), slice_str(OPAQUE), offset, bytes};
}

static struct sample_field column_field(const struct samples *s, uint64_t i, uint32_t field)
{
    const struct column *c = &s->columns.columns[field];
    struct column_place at = columns_at(&s->columns, i, field);
    return (struct sample_field){slice_str(c->name), slice_str(c->type), at.offset, at.bytes};
}

static struct sample_field window_field(const struct samples *s, uint64_t i)
{
    uint64_t width = tokens_width(s->token_code);
    return (struct sample_field){slice_str(TOKENS_FIELD), slice_str(tokens_type(s->token_code)),
                                 i * s->window.tokens * width, (s->window.tokens + s->window.extra) * width};
}

struct sample_field samples_field(const struct samples *s, uint64_t i, uint32_t field)
{
    check(field < samples_fields(s, i));
    struct field f;
    switch (s->format) {
    case SHARD_RECORDS: return opaque("bin", i * s->record_bytes, s->record_bytes);
    case SHARD_MDS: return column_field(s, i, field);
    case SHARD_TOKENS: return in_windows(s) ? window_field(s, i) : column_field(s, i, field);
    case SHARD_TAR:
        memcpy(&f, s->fields.p + (first_of(s, i) + field) * sizeof f, sizeof f);
        return (struct sample_field){strings_at(&s->names, f.name), slice_str(OPAQUE), f.offset, f.bytes};
    default: return opaque("bin", 0, s->shard_bytes);
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
    columns_free(&s->columns);
    free(s);
}

/* ---- Filling, by builder and decoder alike ---- */

int samples_add(struct samples *s, struct slice key, bool *was_there, struct err *e)
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
int samples_add_field(struct samples *s, const struct sample_field *x, bool *was_there, struct err *e)
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

int samples_set_documents(struct samples *s, const uint32_t *lengths, uint64_t count, struct err *e)
{
    char name[] = TOKENS_FIELD, type[16];
    const struct column c = {.name = name, .type = type, .bytes = COLUMN_VARIABLE};
    strcpy(type, tokens_type(s->token_code));
    int r = columns_init(&s->columns, &c, 1, tokens_width(s->token_code), 0, 0, e);
    for (uint64_t i = 0; r == 0 && i < count; i++)
        r = columns_add(&s->columns, &lengths[i], e);
    return r;
}

/* ---- Encoding ---- */

static void fields_put(struct buf *b, const struct samples *s)
{
    for (uint32_t i = 0; i < s->names.count; i++)
        buf_put16(b, strings_at(&s->names, i));
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

static void sizes_put(struct buf *b, const struct columns *c)
{
    for (uint64_t i = 0; i < c->samples; i++)
        for (uint32_t k = 0; k < c->variable; k++)
            buf_u32(b, columns_size(c, i, k));
}

static void columns_put(struct buf *b, const struct columns *c)
{
    for (uint32_t i = 0; i < c->count; i++) {
        buf_put16(b, slice_str(c->columns[i].name));
        buf_put16(b, slice_str(c->columns[i].type));
        buf_u64(b, c->columns[i].bytes);
    }
    buf_u64(b, c->base);
    sizes_put(b, c);
}

static void tokens_put(struct buf *b, const struct samples *s)
{
    buf_u32(b, s->token_code);
    buf_u32(b, 0);
    buf_u64(b, s->window.tokens);
    buf_u64(b, s->window.extra);
    sizes_put(b, &s->columns);
}

int samples_encode(const struct samples *s, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_u32(&b, s->format);
    buf_u32(&b, s->format == SHARD_MDS ? s->columns.count : s->names.count);
    buf_u64(&b, s->shard_bytes);
    buf_u64(&b, s->record_bytes);
    buf_u64(&b, samples_count(s));
    if (s->format == SHARD_MDS)
        columns_put(&b, &s->columns);
    else if (s->format == SHARD_TOKENS)
        tokens_put(&b, s);
    else
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
    int r = samples_add(s, key, &was_there, e);
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
        r = samples_add_field(s, &f, &was_there, e);
        if (r == 0 && was_there)
            r = bad_index(e, "a sample has a field twice");
    }
    return r;
}

/* Fields of samples that say for themselves where they are. */
static int fields_take(struct rcur *c, struct samples *s, uint32_t names, uint64_t count, struct err *e)
{
    int r = names_take(c, s, names, e);
    for (uint64_t i = 0; r == 0 && i < count && !c->failed; i++)
        r = sample_take(c, s, e);
    return r;
}

static int sizes_take(struct rcur *c, struct samples *s, uint64_t count, struct err *e)
{
    uint32_t sizes[SAMPLE_FIELDS_MAX], n = s->columns.variable;
    if (n == 0 ? count > s->shard_bytes / 4 : count > c->left / (4ull * n))
        return bad_index(e, "it has more samples than there is room for");
    int r = n == 0 ? columns_add_fixed(&s->columns, count, e) : 0;
    for (uint64_t i = 0; r == 0 && n > 0 && i < count; i++) {
        for (uint32_t k = 0; k < n; k++)
            sizes[k] = rcur_u32(c);
        r = columns_add(&s->columns, sizes, e);
    }
    if (r == 0 && s->columns.end != s->shard_bytes)
        r = bad_index(e, "its samples do not end where the shard does");
    return r;
}

static int column_take(struct rcur *c, struct column *out, struct samples *s, struct err *e)
{
    char name[NAME_BYTES_MAX + 1], type[NAME_BYTES_MAX + 1];
    struct slice name_is = rcur_take16(c), type_is = rcur_take16(c);
    uint32_t number;
    bool was_there = false,
         fits = slice_cstr(name_is, name, sizeof name) && slice_cstr(type_is, type, sizeof type);
    out->bytes = rcur_u64(c);
    if (c->failed || !fits || name_is.n == 0 || type_is.n == 0)
        return bad_index(e, "a column's name or type is not a text of 1 to 255 bytes");
    int r = strings_add(&s->names, name_is, &number, &was_there, e);
    if (r == 0 && was_there)
        r = bad_index(e, "two columns have one name");
    out->name = strdup(name);
    out->type = strdup(type);
    if (r == 0 && (!out->name || !out->type))
        r = err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
    return r;
}

static int columns_take(struct rcur *c, struct samples *s, uint32_t columns, uint64_t count, struct err *e)
{
    struct column list[SAMPLE_FIELDS_MAX] = {0};
    uint32_t variable = 0;
    int r = columns >= 1 && columns <= SAMPLE_FIELDS_MAX ? 0 : bad_index(e, "it has no columns, or too many");
    for (uint32_t i = 0; r == 0 && i < columns; i++) {
        r = column_take(c, &list[i], s, e);
        variable += list[i].bytes == COLUMN_VARIABLE;
    }
    uint64_t base = rcur_u64(c);
    if (r == 0)
        r = columns_init(&s->columns, list, columns, 1, 4ull * variable, base, e);
    for (uint32_t i = 0; i < columns && i < SAMPLE_FIELDS_MAX; i++) {
        free(list[i].name);
        free(list[i].type);
    }
    return r == 0 ? sizes_take(c, s, count, e) : r;
}

static int tokens_take(struct rcur *c, struct samples *s, uint64_t count, struct err *e)
{
    s->token_code = rcur_u32(c);
    uint32_t reserved = rcur_u32(c);
    s->window.tokens = rcur_u64(c);
    s->window.extra = rcur_u64(c);
    uint64_t width = tokens_width(s->token_code);
    if (c->failed || reserved != 0 || width == 0 || !token_window_valid(&s->window) ||
        s->shard_bytes % width != 0)
        return bad_index(e, "its tokens have a type, a window or a number that cannot be");
    if (!in_windows(s)) {
        int r = samples_set_documents(s, NULL, 0, e);
        return r == 0 ? sizes_take(c, s, count, e) : r;
    }
    return count == samples_count(s) ? 0 : bad_index(e, "its counts do not fit its format");
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
        (s->format != SHARD_TAR && s->format != SHARD_MDS && names > 0))
        return bad_index(e, "its counts do not fit its format");
    int r = s->format == SHARD_MDS      ? columns_take(c, s, names, count, e)
            : s->format == SHARD_TOKENS ? tokens_take(c, s, count, e)
            : records                   ? 0
                                        : fields_take(c, s, names, count, e);
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
    if (r < 0) {
        samples_free(s);
        return r;
    }
    strings_settle(&s->keys);
    strings_settle(&s->names);
    fit(&s->fields);
    fit(&s->firsts);
    *out = s;
    return 0;
}
