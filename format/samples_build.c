/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/mds_rows.h"
#include "format/samples_private.h"
#include "format/tar.h"
#include "format/tokens.h"

#define UNSIGNED(x) ((unsigned long long)(x))

struct samples_builder {
    struct samples *s; /* given away by finish */
    char *shard;
    uint64_t bytes;  /* to be pushed or skipped in all */
    uint64_t offset; /* so far */
    /* At most one of them. */
    struct tar *tar;
    struct mds_rows *mds;
    struct tokens_reader *tokens;
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

/* WebDataset's own notes lie in files and folders that are called "__so__". */
static bool is_note(struct slice name)
{
    const uint8_t *slash = memchr(name.p, '/', name.n);
    size_t n = slash ? (size_t)(slash - name.p) : name.n;
    return n >= 4 && memcmp(name.p, "__", 2) == 0 && memcmp(name.p + n - 2, "__", 2) == 0;
}

/* Key and field of a member; false for what is no sample. */
static bool name_split(struct slice name, struct slice *key, struct slice *field)
{
    size_t base = name.n;
    while (base > 0 && name.p[base - 1] != '/')
        base--;
    const uint8_t *dot = memchr(name.p + base, '.', name.n - base);
    if (!dot || dot == name.p + base || is_note(name))
        return false;
    *key = SLICE(name.p, dot - name.p);
    *field = slice_str("bin");
    if (dot + 1 < name.p + name.n)
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
    if (s->keys.count == 0 || !slice_eq(samples_key_at(s, s->keys.count - 1), key)) {
        int r = samples_add(s, key, &was_there, e);
        if (r < 0)
            return r;
        if (was_there)
            return member_refuse(ERR_MISMATCH, m,
                                 "belongs to a sample that ended earlier; members of one sample must be "
                                 "adjacent (sort them by name)",
                                 e);
    }
    int r = samples_add_field(s, &f, &was_there, e);
    if (r == 0 && was_there)
        r = member_refuse(ERR_MISMATCH, m, "is there twice in its sample; rename one of the two", e);
    return r;
}

uint64_t samples_source_bytes(const struct samples_source *s)
{
    return s->format == SHARD_TOKENS ? s->idx_bytes : s->shard_bytes;
}

static int shard_prepend(const struct samples_builder *b, int r, struct err *e)
{
    char q[160];
    (void)err_prepend(e, "shard \"%s\"", err_quote(q, sizeof q, b->shard, strlen(b->shard)));
    return r;
}

static int reader_create(struct samples_builder *b, const struct samples_source *source, struct err *e)
{
    int r = 0;
    if (source->format == SHARD_TAR)
        r = tar_create(member_found, b->s, &b->tar, e);
    else if (source->format == SHARD_MDS)
        r = mds_rows_create(source->mds, source->shard_bytes, &b->mds, e);
    else if (source->format == SHARD_TOKENS)
        r = tokens_reader_create(source->idx_bytes, source->shard_bytes, &b->tokens, e);
    return r < 0 ? shard_prepend(b, r, e) : 0;
}

int samples_builder_create(const struct samples_source *source, struct samples_builder **out, struct err *e)
{
    if ((unsigned)source->format >= SHARD_FORMAT_COUNT ||
        (source->format == SHARD_RECORDS) != (source->record_bytes > 0))
        return err_set(e, ERR_INVALID,
                       "shard \"%s\": format %d with records of %llu bytes; only fixed-size "
                       "records have a size, and it is not 0",
                       source->shard, source->format, UNSIGNED(source->record_bytes));
    struct samples_builder *b = calloc(1, sizeof *b);
    if (b) {
        b->s = calloc(1, sizeof *b->s);
        b->shard = strdup(source->shard);
        b->bytes = samples_source_bytes(source);
    }
    int r = b && b->s && b->shard ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
    if (r == 0)
        r = reader_create(b, source, e);
    if (r < 0) {
        samples_builder_free(b);
        return r;
    }
    b->s->format = source->format;
    b->s->shard_bytes = source->shard_bytes;
    b->s->record_bytes = source->record_bytes;
    b->s->window = source->window;
    *out = b;
    return 0;
}

int samples_builder_push(struct samples_builder *b, const void *p, size_t n, struct err *e)
{
    int r = 0;
    check(n <= b->bytes - b->offset);
    b->offset += n;
    if (b->tar)
        r = tar_push(b->tar, p, n, e);
    else if (b->mds)
        r = mds_rows_push(b->mds, p, n, e);
    else if (b->tokens)
        r = tokens_reader_push(b->tokens, p, n, e);
    return r < 0 ? shard_prepend(b, r, e) : 0;
}

uint64_t samples_builder_skippable(const struct samples_builder *b)
{
    uint64_t left = b->bytes - b->offset, most = left;
    if (b->tar)
        most = tar_skippable(b->tar);
    else if (b->mds)
        most = mds_rows_skippable(b->mds);
    else if (b->tokens)
        most = 0;
    return most < left ? most : left;
}

void samples_builder_skip(struct samples_builder *b, uint64_t n)
{
    check(n <= samples_builder_skippable(b));
    b->offset += n;
    if (b->tar)
        tar_skip(b->tar, n);
    else if (b->mds)
        mds_rows_skip(b->mds, n);
}

static int tokens_end(struct samples_builder *b, struct err *e)
{
    struct tokens_found found;
    int r = tokens_reader_finish(b->tokens, &found, e);
    if (r < 0)
        return r;
    b->s->token_code = found.code;
    uint64_t documents = b->s->window.tokens ? 0 : found.documents;
    return samples_set_documents(b->s, found.lengths, documents, e);
}

static int reader_end(struct samples_builder *b, struct err *e)
{
    struct samples *s = b->s;
    bool was_there;
    if (b->tar)
        return tar_finish(b->tar, e);
    if (b->mds)
        return mds_rows_finish(b->mds, &s->columns, e);
    if (b->tokens)
        return tokens_end(b, e);
    if (s->format == SHARD_WHOLE)
        return samples_add(s, slice_str(base_of(b->shard)), &was_there, e);
    if (b->offset % s->record_bytes == 0)
        return 0;
    return err_set(e, ERR_CORRUPT,
                   "%llu bytes are no whole number of records of %llu; it is cut, or the size of a "
                   "record is another",
                   UNSIGNED(b->offset), UNSIGNED(s->record_bytes));
}

int samples_builder_finish(struct samples_builder *b, struct samples **out, struct err *e)
{
    check(b->s && b->offset == b->bytes);
    int r = reader_end(b, e);
    if (r < 0)
        return shard_prepend(b, r, e);
    *out = b->s;
    b->s = NULL;
    return 0;
}

void samples_builder_free(struct samples_builder *b)
{
    if (!b)
        return;
    samples_free(b->s);
    tar_free(b->tar);
    mds_rows_free(b->mds);
    tokens_reader_free(b->tokens);
    free(b->shard);
    free(b);
}
