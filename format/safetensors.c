/* SPDX-License-Identifier: Apache-2.0 */
#include "format/safetensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"

#define HEADER_BYTES_MAX 100000000u /* the format's own limit */
#define METADATA         "__metadata__"
#define UNSIGNED(x)      ((unsigned long long)(x))

int safetensors_header_bytes(const uint8_t first[8], uint64_t file_bytes, uint64_t *header_bytes,
                             struct err *e)
{
    uint64_t n = le64_get(first);
    if (n > HEADER_BYTES_MAX)
        return err_set(
            e, ERR_CORRUPT,
            "safetensors: a header of %llu bytes, at most %u are allowed; this is no safetensors file, or "
            "it is damaged",
            UNSIGNED(n), HEADER_BYTES_MAX);
    if (n < 2 || file_bytes < 8 || n > file_bytes - 8)
        return err_set(e, ERR_CORRUPT,
                       "safetensors: a header of %llu bytes in a file of %llu; the file is cut or damaged",
                       UNSIGNED(n), UNSIGNED(file_bytes));
    *header_bytes = n;
    return 0;
}

static int bad_tensor(struct err *e, const char *name, const char *why)
{
    char q[160];
    return err_set(e, ERR_CORRUPT, "safetensors: tensor \"%s\" %s",
                   err_quote(q, sizeof q, name, strlen(name)), why);
}

static bool integer_get(const json_t *v, uint64_t *out)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *out = (uint64_t)json_integer_value(v);
    return true;
}

static int shape_get(const json_t *shape, struct safetensors_entry *x, uint64_t *elements, struct err *e)
{
    size_t dims = json_array_size(shape);
    bool none = false, fits = true;
    if (!json_is_array(shape) || dims > TENSOR_DIMS_MAX)
        return bad_tensor(e, x->name, "has no shape, or more than 16 dimensions");
    *elements = 1;
    x->dims = (unsigned)dims;
    for (size_t i = 0; i < dims; i++) {
        if (!integer_get(json_array_get(shape, i), &x->shape[i]))
            return bad_tensor(e, x->name, "has a shape that is not made of whole numbers");
        none |= x->shape[i] == 0;
        fits = fits && !mul_overflows(*elements, x->shape[i], elements);
    }
    if (none)
        *elements = 0;
    else if (!fits)
        return bad_tensor(e, x->name, "has more elements than 64 bits can count");
    return 0;
}

static int entry_get(const char *name, const json_t *v, struct safetensors_entry *x, struct err *e)
{
    const json_t *dtype = json_object_get(v, "dtype"), *range = json_object_get(v, "data_offsets");
    uint64_t elements = 0, bytes;
    char why[160];
    size_t n = strlen(name);
    if (n == 0 || n > TENSOR_NAME_BYTES_MAX)
        return bad_tensor(e, name, "has a name of no bytes, or of more than 4096");
    x->name = strdup(name);
    if (!x->name)
        return err_set(e, ERR_NO_MEMORY, "no memory for the names of tensors");
    if (!json_is_object(v) || json_object_size(v) != 3 || !json_is_string(dtype) || !json_is_array(range) ||
        json_array_size(range) != 2 || !integer_get(json_array_get(range, 0), &x->begin) ||
        !integer_get(json_array_get(range, 1), &x->end))
        return bad_tensor(e, name, "is not described by dtype, shape and data_offsets, and nothing else");
    if (dtype_of_name(json_string_value(dtype), &x->dtype) < 0) {
        char q[64];
        snprintf(why, sizeof why, "has the dtype \"%s\", which this build does not know",
                 err_quote(q, sizeof q, json_string_value(dtype), json_string_length(dtype)));
        return bad_tensor(e, name, why);
    }
    int r = shape_get(json_object_get(v, "shape"), x, &elements, e);
    if (r < 0)
        return r;
    if (x->dims > 0 && x->shape[x->dims - 1] % dtype_pack(x->dtype) != 0)
        return bad_tensor(e, name, "has packed elements that do not fill whole bytes in its last dimension");
    if (x->end < x->begin || dtype_bytes(x->dtype, elements, &bytes, NULL) < 0 ||
        bytes != x->end - x->begin) {
        snprintf(why, sizeof why, "lies at %llu to %llu, which does not fit %llu elements of %s",
                 UNSIGNED(x->begin), UNSIGNED(x->end), UNSIGNED(elements), dtype_name(x->dtype));
        return bad_tensor(e, name, why);
    }
    return 0;
}

static int metadata_get(const json_t *v, struct safetensors *st, struct err *e)
{
    const char *key;
    json_t *value;
    if (!json_is_object(v))
        return err_set(e, ERR_CORRUPT, "safetensors: " METADATA " is no map of strings");
    st->metadata = calloc(2 * json_object_size(v) + 1, sizeof *st->metadata);
    if (!st->metadata)
        return err_set(e, ERR_NO_MEMORY, "no memory for metadata");
    json_object_foreach((json_t *)v, key, value)
    {
        if (!json_is_string(value))
            return err_set(e, ERR_CORRUPT, "safetensors: " METADATA " holds a value that is no string");
        char **pair = st->metadata + 2 * st->metadata_pairs++;
        pair[0] = strdup(key);
        pair[1] = strdup(json_string_value(value));
        if (!pair[0] || !pair[1])
            return err_set(e, ERR_NO_MEMORY, "no memory for metadata");
    }
    return 0;
}

/* By begin, then end: so that empty ones stand before what begins at the same place. */
static int order_data(const void *pa, const void *pb)
{
    const struct safetensors_entry *a = pa, *b = pb;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

/* The tensors fill the data area, each byte once. */
static int data_check(const struct safetensors *st, struct err *e)
{
    char why[160];
    uint64_t at = 0;
    for (size_t i = 0; i < st->count; i++) {
        const struct safetensors_entry *x = &st->entries[i];
        if (x->end > st->data_bytes) {
            snprintf(why, sizeof why, "ends at %llu, the data at %llu; the file is cut or damaged",
                     UNSIGNED(x->end), UNSIGNED(st->data_bytes));
            return bad_tensor(e, x->name, why);
        }
        if (x->begin != at) {
            snprintf(why, sizeof why, "begins at %llu, where the one before it ends at %llu: %s",
                     UNSIGNED(x->begin), UNSIGNED(at), x->begin < at ? "they overlap" : "there is a hole");
            return bad_tensor(e, x->name, why);
        }
        at = x->end;
    }
    if (at != st->data_bytes)
        return err_set(e, ERR_CORRUPT, "safetensors: the last tensor ends at %llu, the data at %llu",
                       UNSIGNED(at), UNSIGNED(st->data_bytes));
    return 0;
}

static int root_get(const json_t *root, struct safetensors *st, struct err *e)
{
    const char *name;
    json_t *value;
    size_t most = json_object_size(root);
    if (most > TENSORS_MAX)
        return err_set(e, ERR_LIMIT, "safetensors: %zu tensors in one file; at most %u are possible", most,
                       TENSORS_MAX);
    st->entries = calloc(most + 1, sizeof *st->entries);
    if (!st->entries)
        return err_set(e, ERR_NO_MEMORY, "no memory for %zu tensors", most);
    json_object_foreach((json_t *)root, name, value)
    {
        int r = strcmp(name, METADATA) == 0 ? metadata_get(value, st, e)
                                            : entry_get(name, value, &st->entries[st->count++], e);
        if (r < 0)
            return r;
    }
    qsort(st->entries, st->count, sizeof *st->entries, order_data);
    return data_check(st, e);
}

int safetensors_parse(const void *json, size_t n, uint64_t file_bytes, struct safetensors *out, struct err *e)
{
    json_error_t why;
    uint8_t first[8];
    uint64_t same;
    le64_put(first, n);
    int r = safetensors_header_bytes(first, file_bytes, &same, e);
    if (r < 0)
        return r;
    if (*(const uint8_t *)json != '{')
        return err_set(e, ERR_CORRUPT, "safetensors: the header does not begin with {");
    json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return err_set(e, ERR_CORRUPT, "safetensors: the header is no JSON that is allowed: %s at byte %d",
                       why.text, why.position);
    struct safetensors st = {.data_offset = 8 + (uint64_t)n, .data_bytes = file_bytes - 8 - n};
    r = root_get(root, &st, e);
    json_decref(root);
    if (r < 0)
        safetensors_free(&st);
    else
        *out = st;
    return r;
}

static int string_put(struct buf *b, const char *s, struct err *e)
{
    char q[160];
    size_t n = strlen(s);
    if (!utf8_valid(s, n))
        return err_set(e, ERR_INVALID, "safetensors: \"%s\" is not UTF-8; rename it",
                       err_quote(q, sizeof q, s, n));
    buf_u8(b, '"');
    for (; *s; s++) {
        char escaped[8];
        if ((uint8_t)*s < 0x20)
            buf_put(b, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", *s));
        else if (*s == '"' || *s == '\\')
            buf_put(b, (char[]){'\\', *s}, 2);
        else
            buf_u8(b, (uint8_t)*s);
    }
    buf_u8(b, '"');
    return 0;
}

static void text_put(struct buf *b, const char *s)
{
    buf_put(b, s, strlen(s));
}

static void number_put(struct buf *b, uint64_t v)
{
    char text[24];
    buf_put(b, text, (size_t)snprintf(text, sizeof text, "%llu", UNSIGNED(v)));
}

static int entry_put(struct buf *b, const struct safetensors_entry *x, struct err *e)
{
    if (strcmp(x->name, METADATA) == 0)
        return err_set(e, ERR_INVALID, "safetensors: no tensor may be named " METADATA "; rename it");
    int r = string_put(b, x->name, e);
    text_put(b, ":{\"dtype\":\"");
    text_put(b, dtype_name(x->dtype));
    text_put(b, "\",\"shape\":[");
    for (unsigned i = 0; i < x->dims; i++) {
        if (i > 0)
            buf_u8(b, ',');
        number_put(b, x->shape[i]);
    }
    text_put(b, "],\"data_offsets\":[");
    number_put(b, x->begin);
    buf_u8(b, ',');
    number_put(b, x->end);
    text_put(b, "]}");
    return r;
}

static int metadata_put(struct buf *b, const struct safetensors *st, struct err *e)
{
    int r = 0;
    if (st->metadata_pairs == 0)
        return 0;
    text_put(b, "\"" METADATA "\":{");
    for (size_t i = 0; r == 0 && i < 2 * st->metadata_pairs; i++) {
        if (i > 0)
            buf_u8(b, i % 2 ? ':' : ',');
        r = string_put(b, st->metadata[i], e);
    }
    buf_u8(b, '}');
    return r;
}

/* What was written is read again: names that are there twice, holes and overlaps are found before they reach
 * a disk. */
static int written_check(const struct safetensors *st, const uint8_t *json, size_t n, struct err *e)
{
    struct safetensors back;
    struct err why;
    uint64_t end = 0;
    for (size_t i = 0; i < st->count; i++)
        end = st->entries[i].end > end ? st->entries[i].end : end;
    if (n > HEADER_BYTES_MAX || end > INT64_MAX)
        return err_set(e, ERR_LIMIT,
                       "safetensors: a header of %zu bytes for %llu bytes of data is too large; write "
                       "several files",
                       n, UNSIGNED(end));
    if (safetensors_parse(json, n, 8 + n + end, &back, &why) < 0)
        return err_set(e, why.class == ERR_CORRUPT ? ERR_INVALID : why.class,
                       "what would be written is refused: %s", why.text);
    safetensors_free(&back);
    return 0;
}

int safetensors_write(const struct safetensors *st, struct buf *out, struct err *e)
{
    struct buf b = {0};
    buf_u64(&b, 0);
    buf_u8(&b, '{');
    int r = metadata_put(&b, st, e);
    for (size_t i = 0; r == 0 && i < st->count; i++) {
        if (i > 0 || st->metadata_pairs > 0)
            buf_u8(&b, ',');
        r = entry_put(&b, &st->entries[i], e);
    }
    buf_u8(&b, '}');
    while (!b.failed && b.n % 8 != 0)
        buf_u8(&b, ' ');
    if (r == 0)
        r = buf_end(&b, "a safetensors header", e);
    if (r == 0)
        r = written_check(st, b.p + 8, b.n - 8, e);
    if (r == 0) {
        le64_put(b.p, b.n - 8);
        buf_put(out, b.p, b.n);
        r = buf_end(out, "a safetensors header", e);
    }
    buf_free(&b);
    return r;
}

void safetensors_free(struct safetensors *st)
{
    if (!st)
        return;
    for (size_t i = 0; i < st->count; i++)
        free(st->entries[i].name);
    for (size_t i = 0; i < 2 * st->metadata_pairs; i++)
        free(st->metadata[i]);
    free(st->entries);
    free(st->metadata);
    *st = (struct safetensors){0};
}
