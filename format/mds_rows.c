/* SPDX-License-Identifier: Apache-2.0 */
#include "format/mds_rows.h"

#include <stdlib.h>
#include <string.h>

#include "format/limits.h"

#define UNSIGNED(x) ((unsigned long long)(x))

enum part { COUNT, OFFSETS, SIZES, PASS };

struct mds_rows {
    const struct mds_shard *shard;
    uint64_t shard_bytes;
    enum part part;
    uint64_t left;    /* PASS: to be passed over */
    uint64_t row;     /* the one whose sizes come next */
    uint32_t samples; /* by the shard's own count */
    uint32_t *offsets;
    uint32_t offset_count; /* read so far */
    uint8_t piece[4 * SAMPLE_FIELDS_MAX];
    size_t piece_n;
    struct columns columns;
};

int mds_rows_create(const struct mds_shard *shard, uint64_t shard_bytes, struct mds_rows **out, struct err *e)
{
    if (shard_bytes != shard->raw.bytes)
        return err_set(e, ERR_CORRUPT,
                       "%llu bytes, its " MDS_INDEX_NAME " says %llu; it is cut, or of another version",
                       UNSIGNED(shard_bytes), UNSIGNED(shard->raw.bytes));
    struct mds_rows *m = calloc(1, sizeof *m);
    if (!m)
        return err_set(e, ERR_NO_MEMORY, "no memory for reading a shard");
    m->shard = shard;
    m->shard_bytes = shard_bytes;
    *out = m;
    return 0;
}

void mds_rows_free(struct mds_rows *m)
{
    if (!m)
        return;
    columns_free(&m->columns);
    free(m->offsets);
    free(m);
}

static int count_take(struct mds_rows *m, struct err *e)
{
    m->samples = le32_get(m->piece);
    if (m->samples != m->shard->samples)
        return err_set(e, ERR_CORRUPT,
                       "it says to have %u samples, its " MDS_INDEX_NAME " says %llu; it is damaged, or of "
                       "another version",
                       m->samples, UNSIGNED(m->shard->samples));
    if (4 + 4 * (m->samples + 1ull) > m->shard_bytes)
        return err_set(e, ERR_CORRUPT, "%u samples do not fit into its %llu bytes", m->samples,
                       UNSIGNED(m->shard_bytes));
    m->offsets = malloc((m->samples + 1ull) * sizeof *m->offsets);
    m->part = OFFSETS;
    return m->offsets ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the offsets of %u samples", m->samples);
}

/* A sum beyond 32 bits, written into 32 bits, begins again at 0: the table descends, or ends at the length of
 * the shard without its upper bits. */
static int wrapped(const struct mds_rows *m, struct err *e)
{
    return err_set(
        e, ERR_CORRUPT,
        "its %llu bytes are more than its 32-bit offsets count, which have wrapped and point to wrong "
        "samples; write it again with a size_limit below 4 GiB",
        UNSIGNED(m->shard_bytes));
}

static int offsets_check(const struct mds_rows *m, struct err *e)
{
    uint64_t table_end = 4 + 4 * (m->samples + 1ull);
    if (m->shard_bytes > UINT32_MAX)
        return wrapped(m, e);
    if (m->offsets[0] < table_end)
        return err_set(e, ERR_CORRUPT, "sample 0 begins at byte %u, inside the table that ends at %llu",
                       m->offsets[0], UNSIGNED(table_end));
    for (uint32_t i = 0; i < m->samples; i++) {
        uint64_t least = m->offsets[i] + m->columns.fixed, end = m->offsets[i + 1];
        if (end < least || (m->columns.variable == 0 && end != least))
            return err_set(
                e, ERR_CORRUPT,
                "sample %u goes from byte %u to %llu, and its columns of fixed size take %llu; it is "
                "damaged",
                i, m->offsets[i], UNSIGNED(end), UNSIGNED(m->columns.fixed));
    }
    if (m->offsets[m->samples] != m->shard_bytes)
        return err_set(e, ERR_CORRUPT, "the last sample ends at byte %u, the shard has %llu; it is damaged",
                       m->offsets[m->samples], UNSIGNED(m->shard_bytes));
    return 0;
}

static uint32_t variable_of(const struct mds_shard *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->column_count; i++)
        n += s->columns[i].bytes == COLUMN_VARIABLE;
    return n;
}

static void pass(struct mds_rows *m, uint64_t bytes)
{
    m->left = bytes;
    m->part = m->left > 0 || m->row == m->samples ? PASS : SIZES;
}

static int table_end(struct mds_rows *m, struct err *e)
{
    const struct mds_shard *s = m->shard;
    uint64_t head = 4ull * variable_of(s), here = 4 + 4 * (m->samples + 1ull);
    int r = columns_init(&m->columns, s->columns, s->column_count, 1, head, m->offsets[0], e);
    if (r == 0)
        r = offsets_check(m, e);
    if (r == 0 && m->columns.variable == 0) {
        m->row = m->samples;
        r = columns_add_fixed(&m->columns, m->samples, e);
        pass(m, m->shard_bytes - here);
    } else if (r == 0) {
        pass(m, m->offsets[0] - here);
    }
    return r;
}

static int offset_take(struct mds_rows *m, struct err *e)
{
    m->offsets[m->offset_count++] = le32_get(m->piece);
    return m->offset_count == m->samples + 1ull ? table_end(m, e) : 0;
}

static int sizes_take(struct mds_rows *m, struct err *e)
{
    uint32_t sizes[SAMPLE_FIELDS_MAX];
    uint64_t end = m->offsets[m->row + 1], begin = m->offsets[m->row];
    for (uint32_t i = 0; i < m->columns.variable; i++)
        sizes[i] = le32_get(m->piece + 4 * i);
    int r = columns_add(&m->columns, sizes, e);
    if (r < 0)
        return r;
    if (m->columns.end != end)
        return err_set(
            e, ERR_CORRUPT,
            "the columns of sample %llu have %llu bytes together, it goes from byte %llu to %llu; it "
            "is damaged",
            UNSIGNED(m->row), UNSIGNED(m->columns.end - begin), UNSIGNED(begin), UNSIGNED(end));
    m->row++;
    pass(m, end - begin - m->columns.head);
    return 0;
}

static size_t piece_bytes(const struct mds_rows *m)
{
    return m->part == SIZES ? 4 * (size_t)m->columns.variable : 4;
}

int mds_rows_push(struct mds_rows *m, const void *bytes, size_t n, struct err *e)
{
    const uint8_t *p = bytes;
    int r = 0;
    while (r == 0 && n > 0) {
        size_t take, need = piece_bytes(m) - m->piece_n;
        if (m->part == PASS) {
            take = n < m->left ? n : (size_t)m->left;
            check(take > 0); /* never more than the shard has, and its last byte ends a sample */
            mds_rows_skip(m, take);
        } else {
            take = n < need ? n : need;
            memcpy(m->piece + m->piece_n, p, take);
            m->piece_n += take;
            if (take == need) {
                m->piece_n = 0;
                r = m->part == COUNT     ? count_take(m, e)
                    : m->part == OFFSETS ? offset_take(m, e)
                                         : sizes_take(m, e);
            }
        }
        p += take;
        n -= take;
    }
    return r;
}

uint64_t mds_rows_skippable(const struct mds_rows *m)
{
    return m->part == PASS ? m->left : 0;
}

void mds_rows_skip(struct mds_rows *m, uint64_t n)
{
    check(n <= mds_rows_skippable(m));
    pass(m, m->left - n);
}

int mds_rows_finish(struct mds_rows *m, struct columns *out, struct err *e)
{
    if (m->part != PASS || m->left > 0 || m->row != m->samples)
        return err_set(e, ERR_CORRUPT, "it is cut inside its table of samples");
    *out = m->columns;
    m->columns = (struct columns){0};
    return 0;
}
