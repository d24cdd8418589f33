/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where things stand in a header block is in POSIX.1 (pax, "ustar Interchange Format" and "pax Extended
 * Header"); GNU's own types L, K and S and base-256 numbers in the manual of GNU tar ("Basic Tar Format").
 */
#include "format/tar.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNSIGNED(x)      ((unsigned long long)(x))
#define USTAR_SIZE_MAX   077777777777ull /* what some writers put where a PAX size is larger */
#define MEMBER_BYTES_MAX (1ull << 62)    /* sums of offsets and sizes stay far from 2^64 */

enum {
    AT_NAME = 0,
    NAME_BYTES = 100,
    AT_SIZE = 124,
    SIZE_BYTES = 12,
    AT_SUM = 148,
    SUM_BYTES = 8,
    AT_TYPE = 156,
    AT_MAGIC = 257,
    AT_PREFIX = 345,
    PREFIX_BYTES = 155,
};

enum mode {
    IN_HEADER, /* gathering a block */
    IN_EXTRA,  /* gathering the data of an extended header */
    IN_DATA,   /* passing over data of a member */
    IN_PADDING,
    AT_END, /* behind the first block of zeros */
};

/* What extended headers say of the next member, or (global) of all. */
struct extra {
    char *path;     /* owned; NULL: not said */
    char *gnu_path; /* from an L header */
    uint64_t size;
    bool has_size;
    bool sparse;
};

struct tar {
    tar_found *found;
    void *arg;
    enum mode mode;
    uint64_t offset; /* of the next byte */
    uint64_t left;   /* of what is gathered or passed over */
    uint64_t padding;
    uint64_t header_offset;
    uint8_t block[TAR_BLOCK_BYTES];
    size_t block_n;
    char extra_type; /* x, g, L or K */
    struct buf extra_data;
    struct extra next, global;
    char *name; /* of the last member, for messages; owned */
    struct err failed;
};

int tar_create(tar_found *found, void *arg, struct tar **out, struct err *e)
{
    struct tar *t = calloc(1, sizeof *t);
    if (!t)
        return err_set(e, ERR_NO_MEMORY, "no memory for a reader of tar archives");
    t->found = found;
    t->arg = arg;
    t->extra_data.max = TAR_EXTRA_BYTES_MAX;
    *out = t;
    return 0;
}

static void extra_free(struct extra *x)
{
    free(x->path);
    free(x->gnu_path);
    *x = (struct extra){0};
}

void tar_free(struct tar *t)
{
    if (!t)
        return;
    extra_free(&t->next);
    extra_free(&t->global);
    buf_free(&t->extra_data);
    free(t->name);
    free(t);
}

static bool all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != 0)
            return false;
    return true;
}

/* A number: octal digits, blanks before and a blank or NUL behind; or base-256 with the first bit set. */
static bool number_get(const uint8_t *p, size_t n, uint64_t *out)
{
    uint64_t v = 0;
    size_t i = 0;
    if (p[0] & 0x80) {
        if (p[0] != 0x80) /* negative, or larger than anything */
            return false;
        for (i = 1; i < n; i++) {
            if (v >> 56 != 0)
                return false;
            v = v << 8 | p[i];
        }
        *out = v;
        return true;
    }
    while (i < n && p[i] == ' ')
        i++;
    for (; i < n && p[i] >= '0' && p[i] <= '7'; i++)
        v = v << 3 | (uint64_t)(p[i] - '0'); /* 12 digits: 36 bits */
    for (; i < n; i++)
        if (p[i] != ' ' && p[i] != 0)
            return false;
    *out = v;
    return true;
}

/* What compresses archives begins with these; NULL: none of them. */
static const char *compressed_by(const uint8_t *p, size_t n)
{
    static const struct {
        const char *name, *magic;
        size_t n;
    } known[] = {{"gzip", "\x1f\x8b", 2},
                 {"zstd", "\x28\xb5\x2f\xfd", 4},
                 {"xz",
                  "\xfd"
                  "7zXZ\0",
                  6},
                 {"bzip2", "BZh", 3},
                 {"lz4", "\x04\x22\x4d\x18", 4}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (n >= known[i].n && memcmp(p, known[i].magic, known[i].n) == 0)
            return known[i].name;
    return NULL;
}

static int compressed_refuse(const char *by, struct err *e)
{
    return err_set(
        e, ERR_UNSUPPORTED,
        "the archive is compressed by %s; samples are read in place, so unpack it first (larder compresses "
        "what it stores)",
        by);
}

static int sum_check(const struct tar *t, struct err *e)
{
    uint64_t stored = 0, sum = 0;
    int64_t sum_signed = 0; /* some old writers summed signed bytes */
    for (size_t i = 0; i < TAR_BLOCK_BYTES; i++) {
        uint8_t b = i >= AT_SUM && i < AT_SUM + SUM_BYTES ? ' ' : t->block[i];
        sum += b;
        sum_signed += (int8_t)b;
    }
    if (number_get(t->block + AT_SUM, SUM_BYTES, &stored) && (stored == sum || (int64_t)stored == sum_signed))
        return 0;
    const char *by = t->header_offset == 0 ? compressed_by(t->block, TAR_BLOCK_BYTES) : NULL;
    if (by)
        return compressed_refuse(by, e);
    return err_set(e, ERR_CORRUPT,
                   "no tar header at offset %llu: its checksum is %llu, its bytes give %llu; the archive is "
                   "damaged, or is no tar",
                   UNSIGNED(t->header_offset), UNSIGNED(stored), UNSIGNED(sum));
}

/* The name in the header itself. */
static void header_name(const struct tar *t, char out[TAR_NAME_BYTES_MAX + 1])
{
    const char *name = (const char *)t->block + AT_NAME, *prefix = (const char *)t->block + AT_PREFIX;
    bool posix = memcmp(t->block + AT_MAGIC, "ustar\0", 6) == 0;
    int name_n = (int)strnlen(name, NAME_BYTES), prefix_n = posix ? (int)strnlen(prefix, PREFIX_BYTES) : 0;
    if (prefix_n > 0)
        snprintf(out, TAR_NAME_BYTES_MAX + 1, "%.*s/%.*s", prefix_n, prefix, name_n, name);
    else
        snprintf(out, TAR_NAME_BYTES_MAX + 1, "%.*s", name_n, name);
}

static int refuse(const struct tar *t, enum err_class class, const char *name, const char *why, struct err *e)
{
    char q[160];
    return err_set(e, class, "member \"%s\" at offset %llu %s", err_quote(q, sizeof q, name, strlen(name)),
                   UNSIGNED(t->header_offset), why);
}

/* ---- Extended headers ---- */

static int decimal_get(struct slice s, uint64_t *out)
{
    uint64_t v = 0;
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] < '0' || s.p[i] > '9' || v > (UINT64_MAX - 9) / 10)
            return -1;
        v = v * 10 + (uint64_t)(s.p[i] - '0');
    }
    *out = v;
    return s.n > 0 ? 0 : -1;
}

static int bad_extra(const struct tar *t, const char *what, struct err *e)
{
    return err_set(e, ERR_CORRUPT, "extended header at offset %llu %s; the archive is damaged",
                   UNSIGNED(t->header_offset), what);
}

static int path_set(const struct tar *t, char **to, struct slice value, struct err *e)
{
    if (value.n > TAR_NAME_BYTES_MAX || (value.n > 0 && memchr(value.p, 0, value.n)))
        return bad_extra(t, "holds a path that is too long or holds a NUL", e);
    free(*to);
    *to = NULL;
    if (value.n == 0) /* PAX: an empty value takes back what was said */
        return 0;
    *to = strndup((const char *)value.p, value.n);
    return *to ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the name of a member");
}

static bool key_is(struct slice key, const char *name)
{
    return slice_eq(key, slice_str(name));
}

static int record_apply(const struct tar *t, struct extra *x, struct slice key, struct slice value,
                        struct err *e)
{
    if (key_is(key, "path"))
        return path_set(t, &x->path, value, e);
    if (key_is(key, "size")) {
        x->has_size = value.n > 0;
        if (x->has_size && (decimal_get(value, &x->size) < 0 || x->size > MEMBER_BYTES_MAX))
            return bad_extra(t, "holds a size that is no decimal number, or too large", e);
        return 0;
    }
    if (key.n >= 10 && memcmp(key.p, "GNU.sparse", 10) == 0)
        x->sparse = true; /* refused once its name is known */
    return 0;             /* times, owners, attributes: of no use here */
}

/* Records: "LENGTH KEY=VALUE\n", the length counting all of it. */
static int pax_parse(const struct tar *t, struct extra *x, struct err *e)
{
    const uint8_t *p = t->extra_data.p;
    for (size_t left = t->extra_data.n; left > 0;) {
        const uint8_t *blank = memchr(p, ' ', left < 21 ? left : 21);
        uint64_t length;
        if (!blank || decimal_get(SLICE(p, blank - p), &length) < 0 || length > left ||
            length < (uint64_t)(blank - p) + 3 || p[length - 1] != '\n')
            return bad_extra(t, "has a record without a right length", e);
        const uint8_t *key = blank + 1, *end = p + length - 1,
                      *equals = memchr(key, '=', (size_t)(end - key));
        if (!equals || equals == key)
            return bad_extra(t, "has a record without key and value", e);
        int r = record_apply(t, x, SLICE(key, equals - key), SLICE(equals + 1, end - equals - 1), e);
        if (r < 0)
            return r;
        p += length;
        left -= length;
    }
    return 0;
}

static int gnu_name_parse(struct tar *t, struct err *e)
{
    struct slice name = SLICE(t->extra_data.p, t->extra_data.n);
    if (name.n > 0 && name.p[name.n - 1] == 0)
        name.n--;
    if (name.n == 0)
        return bad_extra(t, "holds an empty name", e);
    return path_set(t, &t->next.gnu_path, name, e);
}

static int extra_end(struct tar *t, struct err *e)
{
    switch (t->extra_type) {
    case 'x': return pax_parse(t, &t->next, e);
    case 'g': return pax_parse(t, &t->global, e);
    case 'L': return gnu_name_parse(t, e);
    default: return 0; /* K: the target of a link, which nobody asks for */
    }
}

/* ---- Headers ---- */

static int size_choose(const struct tar *t, const char *name, uint64_t *size, struct err *e)
{
    const struct extra *x = t->next.has_size ? &t->next : t->global.has_size ? &t->global : NULL;
    char why[160];
    if (!number_get(t->block + AT_SIZE, SIZE_BYTES, size) || *size > MEMBER_BYTES_MAX)
        return refuse(t, ERR_CORRUPT, name, "has a size that is no number, or too large", e);
    if (!x)
        return 0;
    /* Writers leave 0, or all sevens, where the size has no room; anything else must agree. */
    bool no_room = *size == 0 || (*size == USTAR_SIZE_MAX && x->size > USTAR_SIZE_MAX);
    if (*size != x->size && !no_room) {
        snprintf(why, sizeof why,
                 "has %llu bytes by its header and %llu by its PAX header; it cannot be told which is meant",
                 UNSIGNED(*size), UNSIGNED(x->size));
        return refuse(t, ERR_CORRUPT, name, why, e);
    }
    *size = x->size;
    return 0;
}

static int name_choose(const struct tar *t, char name[TAR_NAME_BYTES_MAX + 1], struct err *e)
{
    const char *path = t->next.path ? t->next.path : t->global.path;
    header_name(t, name);
    if (t->next.path && t->next.gnu_path && strcmp(t->next.path, t->next.gnu_path) != 0)
        return refuse(t, ERR_CORRUPT, t->next.path,
                      "has another name by its GNU long name; it cannot be told "
                      "which is meant",
                      e);
    if (t->next.gnu_path)
        path = t->next.gnu_path;
    if (path)
        memcpy(name, path, strlen(path) + 1);
    if (name[0] == '\0')
        return refuse(t, ERR_CORRUPT, "", "has no name", e);
    return 0;
}

static int type_of(const struct tar *t, const char *name, enum tar_type *type, struct err *e)
{
    char why[120], flag = (char)t->block[AT_TYPE];
    size_t n = strlen(name);
    if (t->next.sparse || t->global.sparse)
        flag = 'S';
    switch (flag) {
    case '\0':
    case '0':
    case '7':
        *type = flag != '7' && name[n - 1] == '/' ? TAR_DIRECTORY : TAR_FILE; /* the oldest way to say so */
        return 0;
    case '1': *type = TAR_HARD_LINK; return 0;
    case '2': *type = TAR_SYMBOLIC_LINK; return 0;
    case '5': *type = TAR_DIRECTORY; return 0;
    case '3':
    case '4':
    case '6':
    case 'V': *type = TAR_SPECIAL; return 0;
    case 'S': return refuse(t, ERR_UNSUPPORTED, name, "is sparse; pack the files again without --sparse", e);
    case 'M':
        return refuse(t, ERR_UNSUPPORTED, name, "continues an earlier volume; pack it in one archive", e);
    default:
        snprintf(why, sizeof why, "has type 0x%02x, which this build does not know", (uint8_t)flag);
        return refuse(t, ERR_UNSUPPORTED, name, why, e);
    }
}

static int member_begin(struct tar *t, struct err *e)
{
    char name[TAR_NAME_BYTES_MAX + 1];
    struct tar_member m = {.header_offset = t->header_offset, .data_offset = t->offset};
    int r = name_choose(t, name, e);
    if (r == 0)
        r = type_of(t, name, &m.type, e);
    if (r == 0)
        r = size_choose(t, name, &m.bytes, e);
    if (r < 0)
        return r;
    /* Readers differ on whether these have data; so none may claim it. A hard link may name its file's size.
     */
    if (m.type != TAR_FILE && m.bytes > 0 && m.type != TAR_HARD_LINK)
        return refuse(t, ERR_CORRUPT, name, "is no file, yet claims to have data", e);
    if (m.type == TAR_HARD_LINK)
        m.bytes = 0;
    free(t->name);
    t->name = strdup(name);
    if (!t->name)
        return err_set(e, ERR_NO_MEMORY, "no memory for the name of a member");
    extra_free(&t->next);
    m.name = slice_str(t->name);
    t->left = m.bytes;
    t->padding = -m.bytes % TAR_BLOCK_BYTES;
    t->mode = m.bytes > 0 ? IN_DATA : IN_HEADER;
    return t->found(t->arg, &m, e);
}

static int extra_begin(struct tar *t, struct err *e)
{
    uint64_t size;
    t->extra_type = (char)t->block[AT_TYPE];
    if (t->extra_type == 'X')
        t->extra_type = 'x';
    if (!number_get(t->block + AT_SIZE, SIZE_BYTES, &size) || size > TAR_EXTRA_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "extended header at offset %llu is larger than %u bytes, or has no size",
                       UNSIGNED(t->header_offset), TAR_EXTRA_BYTES_MAX);
    buf_reset(&t->extra_data);
    t->left = size;
    t->padding = -size % TAR_BLOCK_BYTES;
    t->mode = size > 0 ? IN_EXTRA : IN_HEADER;
    return size > 0 ? 0 : extra_end(t, e);
}

static int header_end(struct tar *t, struct err *e)
{
    t->header_offset = t->offset - TAR_BLOCK_BYTES;
    t->block_n = 0;
    if (all_zero(t->block, TAR_BLOCK_BYTES)) {
        if (t->next.path || t->next.gnu_path || t->next.has_size || t->next.sparse)
            return bad_extra(t, "expected a member, for which an extended header stands before it", e);
        t->mode = AT_END;
        return 0;
    }
    int r = sum_check(t, e);
    if (r < 0)
        return r;
    switch (t->block[AT_TYPE]) {
    case 'x':
    case 'X':
    case 'g':
    case 'L':
    case 'K': return extra_begin(t, e);
    default: return member_begin(t, e);
    }
}

/* ---- The stream ---- */

static void pass(struct tar *t, uint64_t n)
{
    t->offset += n;
    t->left -= n;
    if (t->left > 0)
        return;
    if (t->mode != IN_PADDING && t->padding > 0) {
        t->mode = IN_PADDING;
        t->left = t->padding;
    } else {
        t->mode = IN_HEADER;
    }
}

/* Takes some of the bytes; *used says how many. */
static int step(struct tar *t, const uint8_t *p, size_t n, size_t *used, struct err *e)
{
    size_t take = n;
    switch (t->mode) {
    case IN_HEADER:
        take = n < TAR_BLOCK_BYTES - t->block_n ? n : TAR_BLOCK_BYTES - t->block_n;
        memcpy(t->block + t->block_n, p, take);
        t->block_n += take;
        t->offset += take;
        *used = take;
        return t->block_n == TAR_BLOCK_BYTES ? header_end(t, e) : 0;
    case IN_EXTRA:
        take = n < t->left ? n : t->left;
        buf_put(&t->extra_data, p, take);
        *used = take;
        int r = buf_end(&t->extra_data, "an extended header", e);
        if (r == 0 && take == t->left)
            r = extra_end(t, e);
        pass(t, take);
        return r;
    case IN_DATA:
    case IN_PADDING:
        take = n < t->left ? n : t->left;
        *used = take;
        pass(t, take);
        return 0;
    case AT_END: break;
    }
    *used = n;
    for (size_t i = 0; i < n; i++)
        if (p[i] != 0)
            return err_set(
                e, ERR_CORRUPT,
                "data at offset %llu, behind the end-of-archive marker; archives that were joined with "
                "cat must be joined with tar --concatenate",
                UNSIGNED(t->offset + i));
    t->offset += n;
    return 0;
}

static int fail_again(const struct tar *t, struct err *e)
{
    if (e)
        *e = t->failed;
    return -t->failed.errnum;
}

int tar_push(struct tar *t, const void *p, size_t n, struct err *e)
{
    const uint8_t *b = p;
    if (t->failed.class != ERR_NONE)
        return fail_again(t, e);
    while (n > 0) {
        size_t used = 0;
        if (step(t, b, n, &used, &t->failed) < 0)
            return fail_again(t, e);
        b += used;
        n -= used;
    }
    return 0;
}

uint64_t tar_skippable(const struct tar *t)
{
    if (t->failed.class != ERR_NONE)
        return 0;
    return t->mode == IN_DATA ? t->left + t->padding : t->mode == IN_PADDING ? t->left : 0;
}

void tar_skip(struct tar *t, uint64_t n)
{
    check(n <= tar_skippable(t));
    while (n > 0) {
        uint64_t part = n < t->left ? n : t->left;
        pass(t, part);
        n -= part;
    }
}

/* Where the archive was cut, if it was. */
static void cut_tell(const struct tar *t, struct err *e)
{
    char q[160];
    const char *name = t->name ? t->name : "";
    err_quote(q, sizeof q, name, strlen(name));
    const char *by = t->offset == t->block_n ? compressed_by(t->block, t->block_n) : NULL;
    if (by)
        (void)compressed_refuse(by, e);
    else if (t->offset == 0)
        err_set(e, ERR_CORRUPT, "the archive has 0 bytes; an empty tar has a block of zeros at least");
    else if (t->mode == IN_DATA)
        err_set(
            e, ERR_CORRUPT,
            "the archive is cut at offset %llu, inside the data of member \"%s\" at offset %llu: %llu bytes "
            "are missing",
            UNSIGNED(t->offset), q, UNSIGNED(t->header_offset), UNSIGNED(t->left));
    else if (t->mode == IN_PADDING)
        err_set(e, ERR_CORRUPT,
                "the archive is cut at offset %llu, right behind the data of what begins at offset %llu (the "
                "last "
                "member is \"%s\")",
                UNSIGNED(t->offset), UNSIGNED(t->header_offset), q);
    else if (t->mode == IN_EXTRA)
        err_set(
            e, ERR_CORRUPT,
            "the archive is cut at offset %llu, inside the extended header at offset %llu (the last member "
            "before it is \"%s\")",
            UNSIGNED(t->offset), UNSIGNED(t->header_offset), q);
    else if (t->block_n > 0)
        err_set(e, ERR_CORRUPT,
                "the archive is cut at offset %llu, %zu bytes into a header (the last member before it is "
                "\"%s\")",
                UNSIGNED(t->offset), t->block_n, q);
    else
        err_set(
            e, ERR_CORRUPT,
            "the archive is cut at offset %llu, where a header or the end-of-archive marker is missing (the "
            "last member before it is \"%s\")",
            UNSIGNED(t->offset), q);
}

int tar_finish(struct tar *t, struct err *e)
{
    if (t->failed.class == ERR_NONE && t->mode == AT_END)
        return 0;
    if (t->failed.class == ERR_NONE)
        cut_tell(t, &t->failed);
    return fail_again(t, e);
}

uint64_t tar_offset(const struct tar *t)
{
    return t->offset;
}
