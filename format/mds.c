/* SPDX-License-Identifier: Apache-2.0 */
#include "format/mds.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "format/commit.h"
#include "format/limits.h"

#define MDS_VERSION        2
#define ENCODING_BYTES_MAX 255u
#define UNSIGNED(x)        ((unsigned long long)(x))

/* Columns of one or more shards. */
struct mds_column_set {
    struct mds_column_set *next;
    uint32_t count;
    struct column columns[];
};

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for an index of shards");
}

/* ---- pieces of JSON ---- */

static int text_get(const json_t *o, const char *key, uint32_t shard, char **out, struct err *e)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_string(v) || json_string_length(v) > NAME_BYTES_MAX || json_string_length(v) == 0)
        return err_set(e, ERR_CORRUPT, "shard %u: \"%s\" is not a text of 1 to %u bytes", shard, key,
                       NAME_BYTES_MAX);
    *out = strdup(json_string_value(v));
    return *out ? 0 : no_memory(e);
}

static int number_get(const json_t *o, const char *key, uint32_t shard, uint64_t *out, struct err *e)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return err_set(e, ERR_CORRUPT, "shard %u: \"%s\" is not a number from 0 on", shard, key);
    *out = (uint64_t)json_integer_value(v);
    return 0;
}

/* ---- files ---- */

/* It will be opened below the folder of index.json, and must not lead out of it. */
static int path_check(const char *name, uint32_t shard, struct err *e)
{
    char q[160];
    bool good = run_name_check(name, strlen(name), NULL) == 0 && name[0] != '/';
    for (const char *part = name; good && part; part = strchr(part, '/')) {
        part += *part == '/';
        size_t n = strcspn(part, "/");
        good = n > 0 && !(n == 1 && part[0] == '.') && !(n == 2 && part[0] == '.' && part[1] == '.');
    }
    return good ? 0
                : err_set(e, ERR_CORRUPT,
                          "shard %u: the file name \"%s\" is not one of a file below the folder of the index",
                          shard, err_quote(q, sizeof q, name, strlen(name)));
}

static void file_free(struct mds_file *f)
{
    for (uint32_t i = 0; i < f->hash_count; i++) {
        free(f->hashes[i].algorithm);
        free(f->hashes[i].digest);
    }
    free(f->hashes);
    free(f->name);
    *f = (struct mds_file){0};
}

static int hashes_get(json_t *hashes, uint32_t shard, struct mds_file *out, struct err *e)
{
    const char *algorithm;
    json_t *digest;
    size_t n = json_object_size(hashes);
    if ((hashes && !json_is_object(hashes)) || n > MDS_HASHES_MAX)
        return err_set(e, ERR_CORRUPT, "shard %u: \"hashes\" is not an object of at most %u", shard,
                       MDS_HASHES_MAX);
    out->hashes = calloc(n + 1, sizeof *out->hashes);
    if (!out->hashes)
        return no_memory(e);
    json_object_foreach(hashes, algorithm, digest)
    {
        if (!json_is_string(digest) || strlen(algorithm) > NAME_BYTES_MAX)
            return err_set(e, ERR_CORRUPT, "shard %u: a hash is no text", shard);
        struct mds_hash *h = &out->hashes[out->hash_count++];
        h->algorithm = strdup(algorithm);
        h->digest = strdup(json_string_value(digest));
        if (!h->algorithm || !h->digest)
            return no_memory(e);
    }
    return 0;
}

static int file_get(const json_t *o, const char *key, uint32_t shard, struct mds_file *out, struct err *e)
{
    const json_t *f = json_object_get(o, key);
    if (!json_is_object(f))
        return err_set(e, ERR_CORRUPT, "shard %u: \"%s\" is missing", shard, key);
    int r = text_get(f, "basename", shard, &out->name, e);
    if (r == 0)
        r = path_check(out->name, shard, e);
    if (r == 0)
        r = number_get(f, "bytes", shard, &out->bytes, e);
    return r == 0 ? hashes_get(json_object_get(f, "hashes"), shard, out, e) : r;
}

/* ---- columns ---- */

/* Bytes of the encodings that have one size, whatever the value; 0: another. */
static uint64_t size_of(const char *encoding)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } known[] = {{"int", 8},    {"int8", 1},   {"int16", 2},  {"int32", 4},   {"int64", 8},   {"uint8", 1},
                 {"uint16", 2}, {"uint32", 4}, {"uint64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(encoding, known[i].name) == 0)
            return known[i].bytes;
    return 0;
}

static int column_get(const json_t *name, const json_t *encoding, const json_t *size, uint32_t shard,
                      struct column *out, struct err *e)
{
    char q[100];
    if (!json_is_string(name) || !json_is_string(encoding) || json_string_length(name) == 0 ||
        json_string_length(name) > NAME_BYTES_MAX || json_string_length(encoding) == 0 ||
        json_string_length(encoding) > ENCODING_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "shard %u: a column's name or encoding is not a text of 1 to %u bytes",
                       shard, NAME_BYTES_MAX);
    if (!json_is_null(size) && (!json_is_integer(size) || json_integer_value(size) < 0))
        return err_set(e, ERR_CORRUPT, "shard %u: a column's size is neither null nor a number from 0 on",
                       shard);
    out->name = strdup(json_string_value(name));
    out->type = strdup(json_string_value(encoding));
    out->bytes = json_is_null(size) ? COLUMN_VARIABLE : (uint64_t)json_integer_value(size);
    if (!out->name || !out->type)
        return no_memory(e);
    uint64_t known = size_of(out->type);
    if (known && out->bytes != known)
        return err_set(
            e, ERR_CORRUPT,
            "shard %u: column \"%s\" has the encoding %s, which takes %llu bytes, and another size", shard,
            err_quote(q, sizeof q, out->name, strlen(out->name)), out->type, UNSIGNED(known));
    return 0;
}

static void set_free(struct mds_column_set *s)
{
    for (uint32_t i = 0; i < s->count; i++) {
        free(s->columns[i].name);
        free(s->columns[i].type);
    }
    free(s);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int names_differ(const struct mds_column_set *s, uint32_t shard, struct err *e)
{
    const char *names[SAMPLE_FIELDS_MAX] = {0};
    for (uint32_t i = 0; i < s->count; i++)
        names[i] = s->columns[i].name;
    qsort(names, s->count, sizeof *names, by_name);
    for (uint32_t i = 1; i < s->count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            return err_set(e, ERR_CORRUPT, "shard %u: two columns have one name", shard);
    return 0;
}

static int set_get(const json_t *o, uint32_t shard, struct mds_column_set **out, struct err *e)
{
    const json_t *names = json_object_get(o, "column_names"),
                 *encodings = json_object_get(o, "column_encodings"),
                 *sizes = json_object_get(o, "column_sizes");
    size_t n = json_array_size(names);
    if (!json_is_array(names) || n != json_array_size(encodings) || n != json_array_size(sizes) || n == 0)
        return err_set(e, ERR_CORRUPT,
                       "shard %u: %zu column names, %zu encodings and %zu sizes; as many of each are needed, "
                       "and one at least",
                       shard, n, json_array_size(encodings), json_array_size(sizes));
    if (n > SAMPLE_FIELDS_MAX)
        return err_set(e, ERR_LIMIT, "shard %u: more than %u columns", shard, SAMPLE_FIELDS_MAX);
    struct mds_column_set *s = calloc(1, sizeof *s + n * sizeof *s->columns);
    if (!s)
        return no_memory(e);
    int r = 0;
    for (; r == 0 && s->count < n; s->count++)
        r = column_get(json_array_get(names, s->count), json_array_get(encodings, s->count),
                       json_array_get(sizes, s->count), shard, &s->columns[s->count], e);
    if (r == 0)
        r = names_differ(s, shard, e);
    if (r < 0)
        set_free(s);
    else
        *out = s;
    return r;
}

static bool same_columns(const json_t *a, const json_t *b)
{
    static const char *const keys[] = {"column_names", "column_encodings", "column_sizes"};
    for (int i = 0; i < 3; i++)
        if (!json_equal(json_object_get(a, keys[i]), json_object_get(b, keys[i])))
            return false;
    return true;
}

/* ---- shards ---- */

static int format_check(const json_t *o, uint32_t shard, struct err *e)
{
    char q[64];
    const char *format = json_string_value(json_object_get(o, "format"));
    uint64_t version;
    int r = number_get(o, "version", shard, &version, e);
    if (r < 0)
        return r;
    if (version != MDS_VERSION)
        return err_set(e, ERR_VERSION, "shard %u has version %llu, this larder knows version %u", shard,
                       UNSIGNED(version), MDS_VERSION);
    if (format && strcmp(format, "mds") == 0)
        return 0;
    format = format ? format : "";
    return err_set(e, ERR_UNSUPPORTED,
                   "shard %u has the format \"%s\"; only mds can be read in place (write it as such)", shard,
                   err_quote(q, sizeof q, format, strlen(format)));
}

static int shard_get(const json_t *o, uint32_t i, struct mds_shard *s, struct err *e)
{
    int r = json_is_object(o) ? format_check(o, i, e)
                              : err_set(e, ERR_CORRUPT, "shard %u is not described by an object", i);
    if (r == 0)
        r = file_get(o, "raw_data", i, &s->raw, e);
    json_t *zip = json_object_get(o, "zip_data"), *compression = json_object_get(o, "compression");
    if (r == 0 && zip && !json_is_null(zip))
        r = file_get(o, "zip_data", i, &s->zip, e);
    if (r == 0 && compression && !json_is_null(compression))
        r = text_get(o, "compression", i, &s->compression, e);
    if (r == 0 && (s->zip.name != NULL) != (s->compression != NULL))
        r = err_set(e, ERR_CORRUPT, "shard %u: \"compression\" and \"zip_data\" go together", i);
    if (r == 0)
        r = number_get(o, "samples", i, &s->samples, e);
    return r;
}

static int shards_get(const json_t *list, struct mds_index *x, struct err *e)
{
    const json_t *before = NULL, *o;
    size_t n = json_array_size(list), i;
    if (!json_is_array(list) || n == 0)
        return err_set(e, ERR_CORRUPT, "\"shards\" is not a list of one shard or more");
    if (n > MDS_SHARDS_MAX)
        return err_set(e, ERR_LIMIT, "%zu shards, at most %u are allowed", n, MDS_SHARDS_MAX);
    x->shards = calloc(n, sizeof *x->shards);
    if (!x->shards)
        return no_memory(e);
    json_array_foreach(list, i, o)
    {
        struct mds_shard *s = &x->shards[x->count++];
        struct mds_column_set *set = x->sets;
        int r = shard_get(o, (uint32_t)i, s, e);
        if (r == 0 && (!before || !same_columns(o, before))) {
            r = set_get(o, (uint32_t)i, &set, e);
            if (r == 0) {
                set->next = x->sets;
                x->sets = set;
            }
        }
        if (r < 0)
            return r;
        before = o;
        s->columns = set->columns;
        s->column_count = set->count;
    }
    return 0;
}

static int root_get(const json_t *root, struct mds_index *x, struct err *e)
{
    const json_t *version = json_object_get(root, "version");
    if (!json_is_integer(version))
        return err_set(e, ERR_CORRUPT, "it has no \"version\": it is not the index of an MDS dataset");
    if (json_integer_value(version) != MDS_VERSION)
        return err_set(e, ERR_VERSION, "it has version %lld, this larder knows version %u",
                       (long long)json_integer_value(version), MDS_VERSION);
    return shards_get(json_object_get(root, "shards"), x, e);
}

int mds_index_parse(const void *p, size_t n, struct mds_index **out, struct err *e)
{
    json_error_t why;
    if (n > MDS_INDEX_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "it has %zu bytes, at most %u are allowed", n, MDS_INDEX_BYTES_MAX);
    json_t *root = json_loadb(p, n, JSON_REJECT_DUPLICATES, &why);
    if (!root) {
        char q[ERR_TEXT_BYTES / 2];
        return err_set(e, ERR_CORRUPT, "it is not JSON: line %d, %s", why.line,
                       err_quote(q, sizeof q, why.text, strlen(why.text)));
    }
    struct mds_index *x = calloc(1, sizeof *x);
    int r = x ? root_get(root, x, e) : no_memory(e);
    json_decref(root);
    if (r < 0)
        mds_index_free(x);
    else
        *out = x;
    return r;
}

void mds_index_free(struct mds_index *x)
{
    if (!x)
        return;
    for (uint32_t i = 0; i < x->count; i++) {
        file_free(&x->shards[i].raw);
        file_free(&x->shards[i].zip);
        free(x->shards[i].compression);
    }
    for (struct mds_column_set *s = x->sets, *next; s; s = next) {
        next = s->next;
        set_free(s);
    }
    free(x->shards);
    free(x);
}

bool mds_is_zstd(const char *compression)
{
    return compression && strncmp(compression, "zstd", 4) == 0 &&
           (compression[4] == '\0' || compression[4] == ':');
}
