/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Texts that every Debian has (licences, copyright files, READMEs) as tar shards: one passage per member,
 * named PACKAGE-NUMBER.txt, cut at line ends. Files come in sorted order and equal texts are taken once, so
 * one machine always packs the same shards.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/base/hash.h"
#include "tools/demo/demo.h"

#define SHARDS        6
#define PASSAGE_BYTES 1500
#define PASSAGE_LEAST 200
#define FILE_MOST     (256u << 10)
#define TOTAL_MOST    (6u << 20)
#define SEEN_MAX      65536

struct packer {
    FILE *shard[SHARDS];
    uint64_t passages, bytes, files;
    uint64_t seen[SEEN_MAX]; /* hashes of texts already taken; open addressing */
};

static bool seen_before(struct packer *p, const void *text, size_t n)
{
    uint64_t h = hash64(text, n) | 1;
    for (size_t i = h % SEEN_MAX, tries = 0; tries < SEEN_MAX; i = (i + 1) % SEEN_MAX, tries++) {
        if (p->seen[i] == h)
            return true;
        if (p->seen[i] == 0) {
            p->seen[i] = h;
            return false;
        }
    }
    return true; /* full: enough */
}

/* A ustar header for a regular file. */
static int tar_member(FILE *to, const char *name, const void *data, size_t n)
{
    char h[512] = {0};
    static const char padding[512];
    snprintf(h, 100, "%s", name);
    memcpy(h + 100, "0000644", 8);
    memcpy(h + 108, "0000000", 8);
    memcpy(h + 116, "0000000", 8);
    snprintf(h + 124, 12, "%011zo", n);
    memcpy(h + 136, "00000000000", 12);
    memset(h + 148, ' ', 8);
    h[156] = '0';
    memcpy(h + 257, "ustar\00000", 8);
    unsigned sum = 0;
    for (int i = 0; i < 512; i++)
        sum += (unsigned char)h[i];
    snprintf(h + 148, 8, "%06o", sum);
    size_t fill = (512 - n % 512) % 512;
    return fwrite(h, 1, 512, to) == 512 && fwrite(data, 1, n, to) == n && fwrite(padding, 1, fill, to) == fill
               ? 0
               : -EIO;
}

/* The next passage of the text: up to PASSAGE_BYTES, to the last line end within them. */
static size_t passage(const char *text, size_t n)
{
    if (n <= PASSAGE_BYTES + PASSAGE_LEAST)
        return n <= PASSAGE_BYTES ? n : n / 2;
    const char *end = memrchr(text, '\n', PASSAGE_BYTES);
    return end && end > text + PASSAGE_LEAST ? (size_t)(end - text) + 1 : PASSAGE_BYTES;
}

static int pack_text(struct packer *p, const char *key, const char *text, size_t n)
{
    unsigned number = 0;
    p->files++;
    while (n >= PASSAGE_LEAST && p->bytes < TOTAL_MOST) {
        size_t take = passage(text, n);
        char name[100];
        snprintf(name, sizeof name, "%.60s-%04u.txt", key, number++);
        int status = tar_member(p->shard[p->passages % SHARDS], name, text, take);
        if (status < 0)
            return status;
        p->passages++;
        p->bytes += take;
        text += take;
        n -= take;
    }
    return 0;
}

/* One blank for several, none before or after a line's words, one empty line for several: layout teaches a
 * small model nothing. Returns the new length. */
static size_t squeeze(char *text, size_t n)
{
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        char c = text[i] == '\t' || text[i] == '\r' || text[i] == '\f' ? ' ' : text[i];
        if (c == ' ' && (out == 0 || text[out - 1] == ' ' || text[out - 1] == '\n'))
            continue;
        if (c == '\n' && out > 0 && text[out - 1] == ' ')
            out--;
        if (c == '\n' && (out == 0 || (out > 1 && text[out - 1] == '\n' && text[out - 2] == '\n')))
            continue;
        text[out++] = c;
    }
    return out;
}

/* Mostly printable ASCII? */
static bool is_text(const char *p, size_t n)
{
    size_t odd = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];
        if (c == 0)
            return false;
        odd += c < 9 || c > 126;
    }
    return odd * 50 < n;
}

/* PACKAGE for /usr/share/doc/PACKAGE/..., the file's name otherwise; without characters that end a key. */
static void key_of(const char *path, char *key, size_t size)
{
    static const char doc[] = "/usr/share/doc/";
    const char *slash = strrchr(path, '/');
    if (strncmp(path, doc, sizeof doc - 1) == 0) {
        snprintf(key, size, "%s", path + sizeof doc - 1);
        if (!strstr(path, "/copyright"))
            for (char *c = key; *c; c++)
                *c = *c == '/' ? '-' : *c;
        key[strcspn(key, "/")] = 0;
    } else {
        snprintf(key, size, "licence-%s", slash ? slash + 1 : path);
    }
    for (char *c = key; *c; c++)
        if (!isalnum((unsigned char)*c))
            *c = '-';
}

static int pack_file(struct packer *p, const char *path, uint64_t bytes)
{
    char key[128];
    char *text = NULL;
    int status = 0;
    if (bytes < PASSAGE_LEAST || bytes > FILE_MOST)
        return 0;
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    text = malloc(bytes);
    size_t n = text ? fread(text, 1, bytes, f) : 0;
    fclose(f);
    if (n >= PASSAGE_LEAST && is_text(text, n) && !seen_before(p, text, n)) {
        key_of(path, key, sizeof key);
        n = squeeze(text, n);
        status = pack_text(p, key, text, n);
    }
    free(text);
    return status;
}

static bool wanted(const FTSENT *f)
{
    if (f->fts_info != FTS_F)
        return false;
    return strncmp(f->fts_path, "/usr/share/common-licenses/", 27) == 0 ||
           strcmp(f->fts_name, "copyright") == 0 || strncmp(f->fts_name, "README", 6) == 0 ||
           strstr(f->fts_name, ".txt");
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

static int pack_folders(struct packer *p, char *const *folders)
{
    int status = 0;
    FTS *walk = fts_open(folders, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, by_name);
    if (!walk)
        return -errno;
    for (FTSENT *f; status == 0 && p->bytes < TOTAL_MOST && (f = fts_read(walk));)
        if (wanted(f))
            status = pack_file(p, f->fts_path, (uint64_t)f->fts_statp->st_size);
    fts_close(walk);
    return status;
}

int pack_main(int argc, char **argv)
{
    static char *sources[] = {"/usr/share/common-licenses", "/usr/share/doc", NULL};
    static struct packer p;
    int status = 0;
    if (argc < 2 || strcmp(argv[1], "--help") == 0) {
        printf("usage: larder-demo pack OUT [FOLDER ...]\n"
               "Packs the texts of this machine (or of FOLDER) into %d tar shards in OUT.\n",
               SHARDS);
        return argc < 2 ? 2 : 0;
    }
    for (int i = 0; i < SHARDS && status == 0; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/text-%02d.tar", argv[1], i);
        if (!(p.shard[i] = fopen(path, "we"))) {
            demo_error("%s cannot be written: %s", path, strerror(errno));
            status = -errno;
        }
    }
    if (status == 0)
        status = pack_folders(&p, argc > 2 ? argv + 2 : sources);
    for (int i = 0; i < SHARDS; i++) {
        static const char end[1024];
        if (p.shard[i] && (fwrite(end, 1, sizeof end, p.shard[i]) != sizeof end || fclose(p.shard[i])))
            status = status < 0 ? status : -EIO;
    }
    if (status == 0 && p.passages < 200) {
        demo_error("only %llu passages of text were found; 200 are needed. Name a FOLDER with texts",
                   (unsigned long long)p.passages);
        return 1;
    }
    if (status < 0) {
        demo_error("packing into %s: %s", argv[1], strerror(-status));
        return 1;
    }
    printf("  packed %llu passages (%.1f MiB) of %llu texts into %d tar shards\n",
           (unsigned long long)p.passages, (double)p.bytes / 1048576, (unsigned long long)p.files, SHARDS);
    return 0;
}
