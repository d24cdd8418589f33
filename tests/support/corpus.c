/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/corpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "tests/support/tarball.h"

/* What sample (shard, number) holds follows from this value alone. */
static uint64_t value_of(uint32_t shard, uint64_t number)
{
    uint64_t x[2] = {shard, number};
    return hash64(x, sizeof x);
}

static size_t bin_bytes(const struct corpus *c, uint64_t value)
{
    return value % 7 == 0 ? 0 : value % (c->field_bytes_max + 1);
}

static void bin_fill(uint64_t value, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = value + i * 0x9e3779b97f4a7c15ull;
        word ^= word >> 29;
        memcpy(out + i, &word, n - i < 8 ? n - i : 8);
    }
}

static void add_sample(struct corpus *c, uint32_t shard, uint64_t number, uint8_t *room)
{
    char name[64], text[64];
    uint64_t value = value_of(shard, number);
    size_t n = bin_bytes(c, value);
    bin_fill(value, room, n);
    snprintf(name, sizeof name, "d%u/%06llu.bin", shard, (unsigned long long)number);
    tarball_file(&c->files[shard], TARBALL_USTAR, name, room, n);
    snprintf(name, sizeof name, "d%u/%06llu.txt", shard, (unsigned long long)number);
    snprintf(text, sizeof text, "sample %llu of shard %u", (unsigned long long)number, shard);
    tarball_file(&c->files[shard], TARBALL_USTAR, name, text, strlen(text));
}

void corpus_make(struct corpus *c, uint64_t seed, uint32_t shards, uint32_t samples, uint32_t field_bytes_max)
{
    *c = (struct corpus){.shards = shards, .field_bytes_max = field_bytes_max};
    c->counts = calloc(shards, sizeof *c->counts);
    c->files = calloc(shards, sizeof *c->files);
    c->names = calloc(shards, sizeof *c->names);
    uint8_t *room = malloc(field_bytes_max + 8);
    check(c->counts && c->files && c->names && room);
    for (uint32_t i = 0; i < shards; i++) {
        c->counts[i] = hash64(&(uint64_t[2]){seed, i}, 16) % (2 * samples + 1);
        snprintf(c->names[i], sizeof c->names[i], "shard-%03u.tar", i);
        for (uint64_t k = 0; k < c->counts[i]; k++)
            add_sample(c, i, k, room);
        tarball_end(&c->files[i]);
        check(!c->files[i].failed);
    }
    free(room);
}

void corpus_free(struct corpus *c)
{
    for (uint32_t i = 0; i < c->shards; i++)
        buf_free(&c->files[i]);
    free(c->files);
    free(c->counts);
    free(c->names);
}

uint64_t corpus_samples(const struct corpus *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->shards; i++)
        n += c->counts[i];
    return n;
}

uint64_t corpus_bytes(const struct corpus *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < c->shards; i++)
        n += c->files[i].n;
    return n;
}

char **corpus_write(const struct corpus *c, const char *folder)
{
    char **paths = calloc(c->shards + 1, sizeof *paths);
    check(paths);
    for (uint32_t i = 0; i < c->shards; i++) {
        int n = asprintf(&paths[i], "%s/%s", folder, c->names[i]);
        check(n > 0);
        FILE *f = fopen(paths[i], "wb");
        check(f && fwrite(c->files[i].p, 1, c->files[i].n, f) == c->files[i].n);
        check(fclose(f) == 0);
    }
    return paths;
}

void corpus_paths_free(char **paths)
{
    for (size_t i = 0; paths[i]; i++)
        free(paths[i]);
    free(paths);
}

void corpus_check(const struct corpus *c, const struct larder_sample *s)
{
    char key[64], text[64];
    check(s->shard < c->shards && s->number < c->counts[s->shard]);
    uint64_t value = value_of(s->shard, s->number);
    snprintf(key, sizeof key, "d%u/%06llu", s->shard, (unsigned long long)s->number);
    snprintf(text, sizeof text, "sample %llu of shard %u", (unsigned long long)s->number, s->shard);
    const struct larder_field *bin = larder_sample_field(s, "bin"), *txt = larder_sample_field(s, "txt");
    check(s->fields == 2 && bin && txt && strcmp(s->key, key) == 0);
    check((uintptr_t)bin->data % 256 == 0 && (uintptr_t)txt->data % 256 == 0);
    check(txt->bytes == strlen(text) && memcmp(txt->data, text, txt->bytes) == 0);
    size_t n = bin_bytes(c, value);
    uint8_t *room = malloc(n + 8);
    bin_fill(value, room, n);
    check(bin->bytes == n && memcmp(bin->data, room, n) == 0);
    free(room);
}
