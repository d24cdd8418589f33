/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/mosaic.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static void text(struct buf *b, const char *s)
{
    buf_put(b, s, strlen(s));
}

static void list(struct buf *b, const char *key, const struct mosaic_column *columns, uint32_t count,
                 int which)
{
    char item[300];
    text(b, key);
    for (uint32_t i = 0; i < count; i++) {
        const char *comma = i ? ", " : "";
        if (which < 2)
            snprintf(item, sizeof item, "%s\"%s\"", comma, which ? columns[i].encoding : columns[i].name);
        else if (columns[i].bytes < 0)
            snprintf(item, sizeof item, "%snull", comma);
        else
            snprintf(item, sizeof item, "%s%" PRId64, comma, columns[i].bytes);
        text(b, item);
    }
    text(b, "]");
}

static void columns_put(struct buf *b, const struct mosaic_column *columns, uint32_t count)
{
    list(b, "\"column_names\": [", columns, count, 0);
    list(b, ", \"column_encodings\": [", columns, count, 1);
    list(b, ", \"column_sizes\": [", columns, count, 2);
}

void mosaic_shard(struct buf *out, const struct mosaic_column *columns, uint32_t count, uint32_t samples,
                  mosaic_fill *fill, void *arg)
{
    struct buf config = {0}, body = {0}, head = {0}, fields = {0};
    text(&config, "{");
    columns_put(&config, columns, count);
    text(&config, ", \"format\": \"mds\", \"version\": 2}");
    size_t start = out->n;
    uint32_t at = (uint32_t)(4 + 4 * (samples + 1) + config.n);
    buf_u32(out, samples);
    for (uint32_t i = 0; i < samples; i++) {
        buf_u32(out, at + (uint32_t)body.n);
        buf_reset(&head);
        buf_reset(&fields);
        for (uint32_t k = 0; k < count; k++) {
            size_t before = fields.n;
            fill(arg, i, k, &fields);
            if (columns[k].bytes < 0)
                buf_u32(&head, (uint32_t)(fields.n - before));
        }
        buf_put(&body, head.p, head.n);
        buf_put(&body, fields.p, fields.n);
    }
    buf_u32(out, at + (uint32_t)body.n);
    check(out->n - start == 4 + 4 * (samples + 1));
    buf_put(out, config.p, config.n);
    buf_put(out, body.p, body.n);
    check(!out->failed && !body.failed && !head.failed && !fields.failed);
    buf_free(&config);
    buf_free(&body);
    buf_free(&head);
    buf_free(&fields);
}

static void file_put(struct buf *b, const char *key, const char *name, uint64_t bytes, const char *hashes)
{
    char item[1024];
    snprintf(item, sizeof item, "\"%s\": {\"basename\": \"%s\", \"bytes\": %" PRIu64 ", \"hashes\": {%s}}",
             key, name, bytes, hashes ? hashes : "");
    text(b, item);
}

void mosaic_index(struct buf *out, const struct mosaic_column *columns, uint32_t count,
                  const struct mosaic_entry *entries, uint32_t shards)
{
    char item[256];
    text(out, "{\"shards\": [");
    for (uint32_t i = 0; i < shards; i++) {
        const struct mosaic_entry *x = &entries[i];
        text(out, i ? ", {" : "{");
        columns_put(out, columns, count);
        snprintf(item, sizeof item, ", \"compression\": %s%s%s, \"format\": \"mds\", \"hashes\": [], ",
                 x->compression ? "\"" : "", x->compression ? x->compression : "null",
                 x->compression ? "\"" : "");
        text(out, item);
        file_put(out, "raw_data", x->raw, x->raw_bytes, x->raw_hashes);
        snprintf(item, sizeof item, ", \"samples\": %" PRIu64 ", \"size_limit\": 67108864, \"version\": 2, ",
                 x->samples);
        text(out, item);
        if (x->zip)
            file_put(out, "zip_data", x->zip, x->zip_bytes, x->zip_hashes);
        else
            text(out, "\"zip_data\": null");
        text(out, "}");
    }
    text(out, "], \"version\": 2}");
    check(!out->failed);
}

void mosaic_idx(struct buf *out, uint8_t code, unsigned width, const int32_t *lengths, uint64_t sequences,
                const int64_t *borders, uint64_t border_count)
{
    uint64_t at = 0;
    buf_put(out, "MMIDIDX\0\0", 9);
    buf_u64(out, 1);
    buf_u8(out, code);
    buf_u64(out, sequences);
    buf_u64(out, border_count);
    for (uint64_t i = 0; i < sequences; i++)
        buf_u32(out, (uint32_t)lengths[i]);
    for (uint64_t i = 0; i < sequences; i++) {
        buf_u64(out, at);
        at += (uint64_t)lengths[i] * width;
    }
    for (uint64_t i = 0; i < border_count; i++)
        buf_u64(out, (uint64_t)borders[i]);
    check(!out->failed);
}
