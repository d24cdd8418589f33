/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors files as a checkpoint sees them: which files there were, with which metadata, and which tensors
 * in which order each held. A checkpoint saved from such files keeps this beside its tensors, as the blob
 * LAYOUT_BLOB (JSON), so that restore can write the same set of files again.
 */
#ifndef LARDER_TOOLS_LAYOUT_H
#define LARDER_TOOLS_LAYOUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/safetensors.h"

#define LAYOUT_BLOB      "safetensors.layout"
#define LAYOUT_BYTES_MAX (256u << 20)
#define LAYOUT_FILES_MAX 65536u
#define INDEX_SUFFIX     ".index.json"

/* A file that is mapped into memory. */
struct st_file {
    char *path;
    const char *name; /* its base name, in path */
    struct safetensors header;
    uint8_t *map; /* the whole file */
    uint64_t bytes;
    int fd;
    char *temporary; /* a new file's name until it is complete; NULL where it has no name at all till then */
};
struct st_files {
    struct st_file *file;
    size_t count;
    json_t *index; /* of a sharded set: the index file's JSON; NULL if none */
};

bool ends_with(const char *text, const char *end);

/* Opens and checks the files; an argument that ends in .index.json stands for the files that it lists. Every
 * refusal names the file. A tensor's name may occur once over all files. */
must_check int st_files_open(char *const *paths, size_t count, struct st_files *out, struct err *e);
/* JSON text of the layout, malloc'ed. NULL: no memory. */
char *st_layout(const struct st_files *f);
/* Unmaps and closes; new files that were not finished are removed. */
void st_files_close(struct st_files *f);

/* Plans new files for tensors that are described by entries (name, dtype, shape; begin and end are computed).
 * With `layout` (may be NULL) tensors keep its order and metadata; tensors that it does not know come last.
 * `out` ending in .index.json gives the layout's files beside it, anything else one file. The entries' names
 * are copied. */
must_check int st_files_plan(const char *out, const json_t *layout, const struct safetensors_entry *entries,
                             size_t count, struct st_files *files, struct err *e);
/* Makes the planned files under temporary names, at full size, headers written, mapped for writing. */
must_check int st_files_create(struct st_files *f, struct err *e);
/* Syncs them, gives them their names, and writes the index, if any. */
must_check int st_files_finish(struct st_files *f, const char *out, struct err *e);

#endif
