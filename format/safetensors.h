/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The header of a safetensors file (an 8-byte little-endian length, then JSON): read with every check that
 * the format asks for, and written. Tensor data is not touched here.
 */
#ifndef LARDER_SAFETENSORS_H
#define LARDER_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/dtype.h"
#include "format/limits.h"

struct safetensors_entry {
    char *name; /* UTF-8, no NUL */
    enum dtype dtype;
    unsigned dims;
    uint64_t shape[TENSOR_DIMS_MAX];
    uint64_t begin, end; /* in the data area */
};

struct safetensors {
    struct safetensors_entry *entries; /* in the order of their data */
    size_t count;
    char **metadata; /* key, value, key, value ... */
    size_t metadata_pairs;
    uint64_t data_offset; /* of the data area, in the file */
    uint64_t data_bytes;
};

/* Bytes of the header, from the first 8 bytes of the file and its size: ERR_CORRUPT if it cannot be. */
must_check int safetensors_header_bytes(const uint8_t first[8], uint64_t file_bytes, uint64_t *header_bytes,
                                        struct err *e);
/* Parses the JSON part. Refuses holes, overlaps, data beyond the file, unknown dtypes, shapes that do not
 * match the byte range, duplicate names: each with the tensor's name. Free with safetensors_free. */
must_check int safetensors_parse(const void *json, size_t n, uint64_t file_bytes, struct safetensors *out,
                                 struct err *e);
/* Writes length and JSON for entries with begin and end already set; data area 8-byte aligned. */
must_check int safetensors_write(const struct safetensors *st, struct buf *out, struct err *e);
void safetensors_free(struct safetensors *st);

#endif
