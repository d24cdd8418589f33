/* SPDX-License-Identifier: Apache-2.0 */
/* index.json out of any bytes: what is accepted keeps its promises. */
#include <string.h>

#include "format/limits.h"
#include "format/mds.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_file(const struct mds_file *f)
{
    check(f->name[0] && f->name[0] != '/' && strlen(f->name) <= NAME_BYTES_MAX);
    check(strncmp(f->name, "../", 3) != 0 && !strstr(f->name, "/../") && strcmp(f->name, "..") != 0);
    check(f->hash_count <= MDS_HASHES_MAX);
    for (uint32_t i = 0; i < f->hash_count; i++)
        check(f->hashes[i].algorithm && f->hashes[i].digest);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct mds_index *x;
    struct err e = {0};
    int r = mds_index_parse(data, n, &x, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r < 0)
        return 0;
    check(x->count > 0 && x->count <= MDS_SHARDS_MAX);
    for (uint32_t i = 0; i < x->count; i++) {
        const struct mds_shard *s = &x->shards[i];
        check_file(&s->raw);
        check(!s->zip.name == !s->compression);
        if (s->zip.name)
            check_file(&s->zip);
        check(s->column_count > 0 && s->column_count <= SAMPLE_FIELDS_MAX);
        for (uint32_t k = 0; k < s->column_count; k++)
            check(s->columns[k].name[0] && s->columns[k].type[0]);
    }
    mds_index_free(x);
    return 0;
}
