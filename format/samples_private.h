/* SPDX-License-Identifier: Apache-2.0 */
/* What samples.c (questions, stored form) and samples_build.c (finding them) share. */
#ifndef LARDER_SAMPLES_PRIVATE_H
#define LARDER_SAMPLES_PRIVATE_H

#include "format/columns.h"
#include "format/samples.h"

/* Different byte strings, numbered in the order of their coming. */
struct strings {
    struct buf text;
    struct buf ends; /* u64 each: where in text the string ends */
    uint32_t count;
    uint32_t *slots; /* number + 1, open addressing, at most half full */
    size_t mask;
};

struct samples {
    enum shard_format format;
    uint64_t shard_bytes;
    uint64_t record_bytes;
    /* Whole files and tar. */
    struct strings keys;  /* one per sample */
    struct strings names; /* of fields */
    struct buf fields;    /* struct field each */
    struct buf firsts;    /* u64 each: the first field of a sample */
    /* MDS, and documents of tokens. */
    struct columns columns;
    /* Tokens. */
    uint32_t token_code;
    struct token_window window;
};

struct slice samples_key_at(const struct samples *s, uint32_t i);
/* Begins a sample. *was_there: not, since its key was there before. */
must_check int samples_add(struct samples *s, struct slice key, bool *was_there, struct err *e);
/* Adds a field to the last sample. *was_there: not, since it has one of that name. */
must_check int samples_add_field(struct samples *s, const struct sample_field *x, bool *was_there,
                                 struct err *e);
/* Says that documents have these lengths, in tokens. */
must_check int samples_set_documents(struct samples *s, const uint32_t *lengths, uint64_t count,
                                     struct err *e);

#endif
