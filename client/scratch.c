/* SPDX-License-Identifier: Apache-2.0 */
/* larder_scratch_*: tensors to and from a plain file of this machine. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/client.h"
#include "client/clock.h"
#include "client/scratch_side.h"
#include "client/secrets.h"
#include "client/snapshot.h"

#define SIDES_MAX      17 /* host memory and 16 devices */
#define PATH_MAX_BYTES 4096u

struct job {
    const char *path;
    char partial[PATH_MAX_BYTES]; /* what is written until it is whole; empty: nothing */
    struct larder_scratch_options options;
    struct scratch_side *sides[SIDES_MAX]; /* the first is host memory */
    size_t side_count;
    uint64_t bytes;
};

/* ---- sides ---- */

static enum file_want want_of(const struct job *j)
{
    return j->options.bounce ? FILE_BOUNCE : FILE_BEST;
}

/* The side of host memory comes first, and holds the file for header and table. */
static int open_side(struct job *j, enum memory_kind kind, int ordinal, enum file_mode mode,
                     struct file **file, struct err *e)
{
    struct scratch_side *s = NULL;
    const char *path = *j->partial ? j->partial : j->path;
    if (j->side_count == SIDES_MAX)
        return err_set(e, ERR_LIMIT, "tensors on more than %d devices", SIDES_MAX - 1);
    int rc = scratch_side_open(kind, ordinal, want_of(j), &s, e);
    if (rc < 0)
        return rc;
    j->sides[j->side_count++] = s;
    return scratch_side_file(s, path, mode, file, e);
}

/* The place that the tensor lies in, after what its stream was given so far. */
static int side_of(struct job *j, const struct larder_tensor *t, enum file_mode mode,
                   struct scratch_side **out, struct err *e)
{
    struct file *file;
    int ordinal = t->memory == LARDER_MEMORY_CUDA ? t->device : 0, rc = 0;
    enum memory_kind kind = t->memory == LARDER_MEMORY_CUDA ? MEMORY_CUDA : MEMORY_HOST;
    *out = NULL;
    if (t->memory != LARDER_MEMORY_HOST && t->memory != LARDER_MEMORY_CUDA)
        return err_set(e, ERR_INVALID, "memory is %d; expected 0 (host) or 1 (CUDA)", (int)t->memory);
    for (size_t i = 0; i < j->side_count; i++)
        if (scratch_side_kind(j->sides[i]) == kind && scratch_side_ordinal(j->sides[i]) == ordinal)
            *out = j->sides[i];
    if (!*out)
        rc = open_side(j, kind, ordinal, mode, &file, e);
    if (rc == 0 && !*out)
        *out = j->sides[j->side_count - 1];
    return rc < 0 ? rc : scratch_side_after(*out, t->stream, e);
}

static int tensor_error(const struct tensor *t, struct err *e)
{
    char text[160];
    return err_prepend(e, "tensor \"%s\"", err_quote(text, sizeof text, t->name.p, t->name.n));
}

/* ---- start and end ---- */

static int begin(struct job *j, const char *path, const struct larder_scratch_options *o, struct err *e)
{
    *j = (struct job){.path = path};
    err_clear(e);
    if (!path || !*path || strlen(path) + 64 > PATH_MAX_BYTES)
        return err_set(e, ERR_INVALID, "a scratch file needs a path of 1 to %u bytes", PATH_MAX_BYTES - 64);
    if (o)
        memcpy(&j->options, o, o->size < sizeof *o ? o->size : sizeof *o);
    return 0;
}

static void tell(const struct job *j, double seconds, struct larder_scratch_info *info)
{
    struct larder_scratch_info i = {.size = info->size, .bytes = j->bytes, .seconds = seconds};
    char text[512];
    size_t used = 0;
    for (size_t s = j->side_count; s-- > 0;) { /* devices before host memory */
        int n = snprintf(i.path + used, sizeof i.path - used, "%s%s", used ? "; " : "",
                         scratch_side_text(j->sides[s], text, sizeof text));
        used += n > 0 && (size_t)n < sizeof i.path - used ? (size_t)n : sizeof i.path - used - 1;
    }
    memcpy(info, &i, info->size < sizeof i ? info->size : sizeof i);
}

static void end(struct job *j)
{
    while (j->side_count > 0)
        scratch_side_close(j->sides[--j->side_count]);
    if (*j->partial)
        unlink(j->partial);
}

/* ---- writing ---- */

/* What is not ours is never replaced. */
static int check_target(const char *path, struct err *e)
{
    uint8_t start[BLOCK_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return errno == ENOENT ? 0 : err_sys(e, errno, "looking at %s", path);
    ssize_t n = read(fd, start, sizeof start);
    close(fd);
    if (n >= 0 && scratch_is(start, (size_t)n))
        return 0;
    return err_set(e, ERR_EXISTS,
                   "%s is there and is no scratch file of larder; it is not overwritten: choose another "
                   "name, or remove it",
                   path);
}

/* Beside the file, so that it can take its name. */
static int create_partial(struct job *j, struct file **file, struct err *e)
{
    for (int tries = 0;; tries++) {
        uint32_t number;
        secrets_random(&number, sizeof number);
        snprintf(j->partial, sizeof j->partial, "%s.partial-%08x", j->path, number);
        int rc = open_side(j, MEMORY_HOST, 0, FILE_CREATE, file, e);
        if (rc == 0)
            return 0;
        if (rc == -EEXIST)
            *j->partial = '\0'; /* not ours */
        if (rc != -EEXIST || tries > 4)
            return rc;
        end(j);
    }
}

static int write_bytes(struct job *j, const struct larder_tensor *t, const struct tensor *x,
                       const struct item *from, uint64_t place, uint8_t *hashes, struct err *e)
{
    struct scratch_memory m = {(uint8_t *)item_data(from), item_strides(from)};
    struct scratch_side *side = NULL;
    int rc = side_of(j, t, FILE_UPDATE, &side, e);
    if (rc == 0)
        rc = scratch_side_check(side, x, &m, e);
    return rc < 0 ? rc : scratch_side_write(side, x, &m, place, hashes, e);
}

static int write_tensor(struct job *j, const struct larder_tensor *t, const struct tensor *x,
                        const struct item *from, uint64_t *place, struct buf *table, struct err *e)
{
    uint8_t *hashes = malloc((size_t)scratch_chunks(x->bytes) * SCRATCH_HASH_BYTES + 1);
    int rc = hashes ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for its hashes");
    if (rc == 0 && x->bytes > 0)
        rc = write_bytes(j, t, x, from, *place, hashes, e);
    if (rc == 0) {
        scratch_item_encode(table, &(struct scratch_item){.tensor = *x, .hashes = hashes});
        rc = scratch_next(*place, x->bytes, place, e);
        j->bytes += x->bytes;
    }
    free(hashes);
    return rc < 0 ? tensor_error(x, e) : 0;
}

static int write_ends(struct file *file, uint64_t place, const struct buf *table, uint32_t tensors,
                      struct err *e)
{
    uint8_t block[BLOCK_BYTES];
    scratch_header_encode(&(struct scratch_header){.table_offset = place,
                                                   .table_bytes = table->n,
                                                   .tensors = tensors,
                                                   .table_hash = hash64(table->p, table->n)},
                          block);
    int rc = file_write_host(file, place, table->n, table->p, e);
    if (rc == 0)
        rc = file_write_host(file, 0, sizeof block, block, e);
    return rc < 0 ? rc : file_sync(file, e);
}

/* The name is durable too when it returns. */
static int take_name(struct job *j, struct err *e)
{
    char folder[PATH_MAX_BYTES];
    if (rename(j->partial, j->path) < 0)
        return err_sys(e, errno, "giving %s its name", j->path);
    *j->partial = '\0';
    snprintf(folder, sizeof folder, "%s", j->path);
    int fd = open(dirname(folder), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) < 0 ? err_sys(e, errno, "syncing the folder of %s", j->path) : 0;
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The snapshot holds the tensors' descriptions, checked, in their order. */
static int write_all(struct job *j, const struct larder_tensor *tensors, const struct snapshot *s,
                     struct err *e)
{
    struct buf table = {.max = INDEX_BYTES_MAX};
    struct file *file = NULL;
    uint64_t place = BLOCK_BYTES;
    int rc = check_target(j->path, e);
    if (rc == 0)
        rc = create_partial(j, &file, e);
    for (uint32_t i = 0; i < s->tensor_count && rc == 0; i++) {
        struct tensor t;
        snapshot_get(s, i, &t);
        rc = write_tensor(j, &tensors[i], &t, &s->tensor_items[i], &place, &table, e);
    }
    if (rc == 0)
        rc = buf_end(&table, "the table of a scratch file", e);
    if (rc == 0)
        rc = write_ends(file, place, &table, s->tensor_count, e);
    if (rc == 0)
        rc = take_name(j, e);
    buf_free(&table);
    return rc;
}

int larder_scratch_write(const char *path, const struct larder_tensor *tensors, size_t count,
                         const struct larder_scratch_options *options, struct larder_scratch_info *info,
                         struct larder_error *error)
{
    struct snapshot s = {0};
    struct job j;
    struct err e;
    uint64_t start = clock_ns();
    int rc = begin(&j, path, options, &e);
    for (size_t i = 0; i < count && rc == 0; i++)
        rc = snapshot_tensor(&s, NULL, &tensors[i], &e);
    if (rc == 0)
        rc = write_all(&j, tensors, &s, &e);
    if (rc == 0 && info)
        tell(&j, (double)(clock_ns() - start) / 1e9, info);
    end(&j);
    snapshot_free(&s);
    return client_leave(rc, &e, error);
}

/* ---- reading ---- */

struct table {
    struct scratch_header header;
    uint8_t *bytes;
    struct scratch_item *items;
    struct names names;
};

static void table_free(struct table *t)
{
    names_free(&t->names);
    free(t->items);
    free(t->bytes);
}

static int find_names(struct table *t, struct err *e)
{
    for (uint32_t i = 0; i < t->header.tensors; i++) {
        struct slice kept;
        int rc = names_add(&t->names, t->items[i].tensor.name, i, &kept);
        if (rc == -EEXIST) {
            err_set(e, ERR_CORRUPT, "it stands in the table twice");
            return tensor_error(&t->items[i].tensor, e);
        }
        if (rc < 0)
            return err_set(e, ERR_NO_MEMORY, "no memory for the names of %u tensors", t->header.tensors);
    }
    return 0;
}

static int read_table(struct file *file, struct table *t, struct err *e)
{
    uint8_t block[BLOCK_BYTES];
    struct scratch_header *h = &t->header;
    uint64_t size = (uint64_t)file_stat(file)->st_size;
    if (size < BLOCK_BYTES)
        return err_set(e, ERR_CORRUPT, "it has %llu bytes, less than the header of a scratch file",
                       (unsigned long long)size);
    int rc = file_read_host(file, 0, sizeof block, block, e);
    if (rc == 0)
        rc = scratch_header_decode(block, h, e);
    if (rc == 0 && (h->table_offset > size || h->table_bytes != size - h->table_offset))
        rc = err_set(e, ERR_CORRUPT,
                     "it has %llu bytes, its header says %llu; it was cut, or something was added",
                     (unsigned long long)size, (unsigned long long)(h->table_offset + h->table_bytes));
    if (rc < 0)
        return rc;
    t->bytes = malloc((size_t)h->table_bytes + 1);
    if (!t->bytes)
        return err_set(e, ERR_NO_MEMORY, "no memory for a table of %llu bytes",
                       (unsigned long long)h->table_bytes);
    rc = h->table_bytes > 0 ? file_read_host(file, h->table_offset, (size_t)h->table_bytes, t->bytes, e) : 0;
    if (rc == 0)
        rc = scratch_table_decode(t->bytes, (size_t)h->table_bytes, h, &t->items, e);
    return rc < 0 ? rc : find_names(t, e);
}

/* Is what is asked for what the file holds? */
static int match(const struct tensor *want, const struct tensor *has, struct err *e)
{
    char a[256], b[256];
    size_t n = want->dims * sizeof *want->shape;
    if (want->dtype != has->dtype)
        return err_set(e, ERR_MISMATCH, "it is %s in the file, %s was asked for", dtype_name(has->dtype),
                       dtype_name(want->dtype));
    if (want->dims == has->dims && memcmp(want->offsets, has->offsets, n) == 0 &&
        memcmp(want->lengths, has->lengths, n) == 0 && memcmp(want->shape, has->shape, n) == 0)
        return 0;
    return err_set(e, ERR_MISMATCH,
                   "the file holds box %s of it, %s was asked for, or of another shape; a scratch file gives "
                   "back what was written",
                   box_text(a, sizeof a, has->dims, has->offsets, has->lengths),
                   box_text(b, sizeof b, want->dims, want->offsets, want->lengths));
}

static int memory_of(const struct larder_tensor *t, const struct tensor *x, int64_t *strides,
                     struct scratch_memory *m, struct err *e)
{
    int64_t packed[TENSOR_DIMS_MAX] = {0};
    int rc = box_strides(x->dtype, x->dims, x->lengths, t->strides, true, strides, e);
    if (rc == 0)
        rc = box_strides(x->dtype, x->dims, x->lengths, packed, true, packed, e);
    if (rc == 0 && !t->data)
        rc = err_set(e, ERR_INVALID, "it has elements but its data is NULL");
    *m = (struct scratch_memory){t->data, NULL};
    for (uint32_t i = 0; i < x->dims; i++)
        if (x->lengths[i] != 1 && strides[i] != packed[i])
            m->strides = strides;
    return rc;
}

static int read_bytes(struct job *j, const struct scratch_item *item, const struct larder_tensor *t,
                      struct err *e)
{
    struct scratch_memory m;
    struct scratch_side *side = NULL;
    int64_t strides[TENSOR_DIMS_MAX];
    int rc = memory_of(t, &item->tensor, strides, &m, e);
    if (rc == 0)
        rc = side_of(j, t, FILE_READ, &side, e);
    if (rc == 0)
        rc = scratch_side_check(side, &item->tensor, &m, e);
    return rc < 0 ? rc : scratch_side_read(side, &item->tensor, &m, item->place, item->hashes, e);
}

static int read_tensor(struct job *j, const struct table *table, const struct larder_tensor *t, struct err *e)
{
    struct tensor x;
    uint32_t i = 0;
    tensor_of_public(t, &x);
    int rc = tensor_check(&x, &x.bytes, e);
    if (rc < 0)
        return rc;
    if (names_find(&table->names, x.name, &i) < 0)
        rc = err_set(e, ERR_NOT_FOUND, "it is not in the file");
    else
        rc = match(&x, &table->items[i].tensor, e);
    if (rc == 0 && x.bytes > 0)
        rc = read_bytes(j, &table->items[i], t, e);
    j->bytes += rc == 0 ? x.bytes : 0;
    return rc < 0 ? tensor_error(&x, e) : 0;
}

static int read_all(struct job *j, const struct larder_tensor *tensors, size_t count, struct err *e)
{
    struct table table = {0};
    struct file *file = NULL;
    int rc = open_side(j, MEMORY_HOST, 0, FILE_READ, &file, e);
    if (rc < 0)
        return rc;
    rc = read_table(file, &table, e);
    for (size_t i = 0; i < count && rc == 0; i++)
        rc = read_tensor(j, &table, &tensors[i], e);
    table_free(&table);
    return rc < 0 ? err_prepend(e, "%s", j->path) : 0;
}

int larder_scratch_read(const char *path, const struct larder_tensor *tensors, size_t count,
                        const struct larder_scratch_options *options, struct larder_scratch_info *info,
                        struct larder_error *error)
{
    struct job j;
    struct err e;
    uint64_t start = clock_ns();
    int rc = begin(&j, path, options, &e);
    if (rc == 0)
        rc = read_all(&j, tensors, count, &e);
    if (rc == 0 && info)
        tell(&j, (double)(clock_ns() - start) / 1e9, info);
    end(&j);
    return client_leave(rc, &e, error);
}
