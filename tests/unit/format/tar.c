/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: members and the places of their data come out right for every dialect, and whatever is cut, damaged
 * or contradictory is refused by name and offset (cases D1 to D6). Method: archives made here, pushed whole
 * and in pieces; every cut of one; archives of GNU tar and of Python where they are installed. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/tar.h"
#include "tests/support/tarball.h"

#define SEEN_MAX 64

struct seen {
    int n;
    struct {
        char name[TAR_NAME_BYTES_MAX + 1];
        enum tar_type type;
        uint64_t at, data, bytes;
    } m[SEEN_MAX];
};

static struct seen seen;

static int found(void *arg, const struct tar_member *m, struct err *e)
{
    struct seen *s = arg;
    (void)e;
    assert_true(s->n < SEEN_MAX);
    assert_true(slice_cstr(m->name, s->m[s->n].name, sizeof s->m[s->n].name));
    s->m[s->n].type = m->type;
    s->m[s->n].at = m->header_offset;
    s->m[s->n].data = m->data_offset;
    s->m[s->n++].bytes = m->bytes;
    return 0;
}

/* Reads n bytes in pieces; skip: passes over data instead of pushing it. */
static int read_all(const uint8_t *p, size_t n, size_t piece, bool skip, struct err *e)
{
    struct tar *t;
    int r = tar_create(found, &seen, &t, e);
    seen.n = 0;
    for (size_t at = 0; r == 0 && at < n;) {
        size_t take = n - at < piece ? n - at : piece;
        if (skip && tar_skippable(t) > 0) {
            uint64_t most = tar_skippable(t);
            take = most < n - at ? most : n - at;
            tar_skip(t, take);
        } else {
            uint8_t *exact = malloc(take);
            memcpy(exact, p + at, take);
            r = tar_push(t, exact, take, e);
            free(exact);
        }
        at += take;
        if (r == 0)
            assert_true(tar_offset(t) == at);
    }
    if (r == 0)
        r = tar_finish(t, e);
    else
        assert_int_equal(tar_finish(t, NULL), r); /* what failed stays failed */
    tar_free(t);
    return r;
}

static int read_buf(const struct buf *b, struct err *e)
{
    return read_all(b->p, b->n, b->n, false, e);
}

static char long_name[200];

static struct buf an_archive(enum tarball_dialect dialect)
{
    struct buf b = {0};
    memset(long_name, 'd', 120);
    strcpy(long_name + 120, "/img.v2.jpg");
    tarball_header(&b, '5', "set/", 0);
    tarball_file(&b, dialect, "set/a.txt", "hello", 5);
    tarball_file(&b, dialect, "set/a.cls", "", 0);
    tarball_file(&b, dialect, long_name, "0123456789", 10);
    char data[1500];
    memset(data, 'z', sizeof data);
    tarball_file(&b, dialect, "set/b.bin", data, sizeof data);
    tarball_end(&b);
    return b;
}

/* D3 */
static void the_same_members_in_every_dialect(void **state)
{
    (void)state;
    for (int dialect = 0; dialect < 3; dialect++) {
        struct buf b = an_archive(dialect);
        for (size_t piece = 1; piece < 3000; piece = piece * 3 + 1)
            for (int skip = 0; skip < 2; skip++) {
                struct err e = {0};
                assert_int_equal(read_all(b.p, b.n, piece, skip, &e), 0);
                assert_int_equal(seen.n, 5);
                assert_true(seen.m[0].type == TAR_DIRECTORY);
                assert_string_equal(seen.m[1].name, "set/a.txt");
                assert_true(seen.m[1].bytes == 5 && memcmp(b.p + seen.m[1].data, "hello", 5) == 0);
                assert_true(seen.m[1].data == seen.m[1].at + 512);
                assert_true(seen.m[2].bytes == 0);
                assert_string_equal(seen.m[3].name, long_name);
                assert_memory_equal(b.p + seen.m[3].data, "0123456789", 10);
                assert_true(seen.m[4].bytes == 1500 && b.p[seen.m[4].data + 1499] == 'z');
            }
        buf_free(&b);
    }
}

/* D1 */
static void every_cut_is_an_error(void **state)
{
    (void)state;
    for (int dialect = 0; dialect < 3; dialect++) {
        struct buf b = an_archive(dialect);
        for (size_t n = 0; n < b.n; n++) {
            struct err e = {0};
            int r = read_all(b.p, n, 700, n & 1, &e);
            if (n >= b.n - 512) { /* the first block of the marker is there */
                assert_int_equal(r, 0);
                continue;
            }
            assert_int_equal(r, -EBADMSG);
            char offset[32];
            snprintf(offset, sizeof offset, n ? "offset %zu" : "%zu bytes", n);
            assert_non_null(strstr(e.text, offset));
        }
        buf_free(&b);
    }
}

/* D1: at a header, inside a header, inside data. */
static void cuts_name_the_member(void **state)
{
    (void)state;
    struct buf b = an_archive(TARBALL_USTAR);
    struct err e;
    assert_int_equal(read_all(b.p, b.n - 1024, 512, false, &e), -EBADMSG); /* at a header */
    assert_non_null(strstr(e.text, "end-of-archive marker is missing"));
    assert_non_null(strstr(e.text, "set/b.bin"));
    assert_int_equal(read_all(b.p, b.n - 1024 - 1000, 512, false, &e), -EBADMSG); /* in data */
    assert_non_null(strstr(e.text, "inside the data of member \"set/b.bin\""));
    assert_int_equal(read_all(b.p, 512 + 100, 512, false, &e), -EBADMSG); /* in a header */
    assert_non_null(strstr(e.text, "100 bytes into a header"));
    buf_free(&b);
}

/* D2 */
static void empty_is_not_nothing(void **state)
{
    (void)state;
    struct err e;
    uint8_t zeros[10240] = {0};
    assert_int_equal(read_all(zeros, 0, 1, false, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "0 bytes"));
    for (size_t n = 512; n <= sizeof zeros; n += 512) {
        assert_int_equal(read_all(zeros, n, 512, false, &e), 0);
        assert_int_equal(seen.n, 0);
    }
    assert_int_equal(read_all(zeros, 511, 512, false, &e), -EBADMSG);
}

static void no_tar_at_all(void **state)
{
    (void)state;
    struct err e;
    uint8_t junk[2048];
    for (size_t i = 0; i < sizeof junk; i++)
        junk[i] = (uint8_t)(i * 7 + 1);
    assert_int_equal(read_all(junk, sizeof junk, 100, false, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "no tar header at offset 0"));
    static const char *const packed[] = {"\x1f\x8b\x08", "\x28\xb5\x2f\xfd", "BZh9"};
    for (size_t i = 0; i < 3; i++) { /* longer than a block, and shorter */
        memcpy(junk, packed[i], strlen(packed[i]));
        for (size_t n = 200; n <= sizeof junk; n += 1000) {
            assert_int_equal(read_all(junk, n, 100, false, &e), -ENOTSUP);
            assert_non_null(strstr(e.text, "compressed by"));
        }
    }
    struct buf b = an_archive(TARBALL_USTAR);
    b.p[1024 + 512 + 20] ^= 1; /* within the header of the second file */
    assert_int_equal(read_buf(&b, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "offset 1536"));
    buf_free(&b);
    b = an_archive(TARBALL_USTAR);
    struct buf twice = {0};
    buf_put(&twice, b.p, b.n);
    buf_put(&twice, b.p, b.n);
    assert_int_equal(read_buf(&twice, &e), -EBADMSG); /* cat a.tar a.tar would lose half in silence */
    assert_non_null(strstr(e.text, "behind the end-of-archive marker"));
    buf_free(&twice);
    buf_free(&b);
}

/* D4 */
static void pax_size_is_the_next_real_members(void **state)
{
    (void)state;
    struct err e;
    char inner[1024];
    memset(inner, 'i', sizeof inner);
    /* PAX size, then a GNU long name (with a size of its own), then the member, which says 0. */
    struct buf b = {0};
    tarball_pax(&b, 'x', "size", "1024");
    tarball_header(&b, 'L', "././@LongLink", 9);
    tarball_data(&b, "long.txt", 9);
    tarball_header(&b, '0', "short.txt", 0);
    tarball_data(&b, inner, sizeof inner);
    tarball_file(&b, TARBALL_USTAR, "after.txt", "x", 1);
    tarball_end(&b);
    assert_int_equal(read_buf(&b, &e), 0);
    assert_int_equal(seen.n, 2);
    assert_string_equal(seen.m[0].name, "long.txt");
    assert_true(seen.m[0].bytes == 1024);
    assert_string_equal(seen.m[1].name, "after.txt");
    assert_true(seen.m[1].bytes == 1);
    buf_free(&b);
    /* The same with a member that says something else. */
    for (int i = 0; i < 2; i++) {
        tarball_pax(&b, 'x', "size", "1024");
        tarball_header(&b, 'L', "././@LongLink", 9);
        tarball_data(&b, "long.txt", 9);
        tarball_header(&b, '0', "short.txt", i ? 512 : 1024);
        tarball_data(&b, inner, sizeof inner);
        tarball_end(&b);
        assert_int_equal(read_buf(&b, &e), i ? -EBADMSG : 0);
        buf_free(&b);
    }
    assert_non_null(strstr(e.text, "\"long.txt\""));
    assert_non_null(strstr(e.text, "512 bytes by its header and 1024 by its PAX header"));
    /* Two names that differ. */
    tarball_pax(&b, 'x', "path", "one.txt");
    tarball_header(&b, 'L', "././@LongLink", 8);
    tarball_data(&b, "two.txt", 8);
    tarball_file(&b, TARBALL_USTAR, "x", "x", 1);
    tarball_end(&b);
    assert_int_equal(read_buf(&b, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "GNU long name"));
    buf_free(&b);
}

static void global_headers_hold_until_taken_back(void **state)
{
    (void)state;
    struct buf b = {0};
    struct err e;
    tarball_pax(&b, 'g', "comment", "a commit id");
    tarball_pax(&b, 'g', "size", "3");
    tarball_header(&b, '0', "a", 0);
    tarball_data(&b, "abc", 3);
    tarball_pax(&b, 'x', "size", "2");
    tarball_header(&b, '0', "b", 0);
    tarball_data(&b, "ab", 2);
    tarball_pax(&b, 'g', "size", "");
    tarball_header(&b, '0', "c", 1);
    tarball_data(&b, "a", 1);
    tarball_end(&b);
    assert_int_equal(read_buf(&b, &e), 0);
    assert_true(seen.n == 3 && seen.m[0].bytes == 3 && seen.m[1].bytes == 2 && seen.m[2].bytes == 1);
    buf_free(&b);
}

/* D6: sizes beyond what octal holds, by base-256 and by PAX; the data is skipped, not made. */
static void sizes_have_64_bits(void **state)
{
    (void)state;
    uint64_t huge = 5ull << 40;
    for (int i = 0; i < 3; i++) {
        struct buf b = {0}, end = {0};
        struct tar *t;
        struct err e;
        char text[32];
        snprintf(text, sizeof text, "%llu", (unsigned long long)huge);
        if (i > 0)
            tarball_pax(&b, 'x', "size", text);
        tarball_header(&b, '0', "huge", i == 0 ? huge : i == 1 ? 0 : 077777777777ull);
        tarball_file(&end, TARBALL_USTAR, "z", "z", 1);
        tarball_end(&end);
        seen.n = 0;
        assert_int_equal(tar_create(found, &seen, &t, &e), 0);
        assert_int_equal(tar_push(t, b.p, b.n, &e), 0);
        assert_true(tar_skippable(t) == huge);
        tar_skip(t, huge);
        assert_int_equal(tar_push(t, end.p, end.n, &e), 0);
        assert_int_equal(tar_finish(t, &e), 0);
        assert_true(seen.n == 2 && seen.m[0].bytes == huge && seen.m[1].data == b.n + huge + 512);
        tar_free(t);
        buf_free(&b);
        buf_free(&end);
    }
}

/* D5 among them. */
static void what_cannot_be_read_is_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        int kind;
        int r;
        const char *word;
    } bad[] = {
        {0, -ENOTSUP, "\"sparse.bin\" at offset 0 is sparse"},
        {1, -ENOTSUP, "\"map.bin\" at offset 1024 is sparse"},
        {2, -ENOTSUP, "continues an earlier volume"},
        {3, -ENOTSUP, "has type 0x5a"},
        {4, -EBADMSG, "claims to have data"},
        {5, -EBADMSG, "has no name"},
        {6, -EBADMSG, "too large"},
        {7, -EBADMSG, "right length"},
        {8, -EBADMSG, "without key and value"},
        {9, -E2BIG, "extended header at offset 0 is larger"},
        {10, -EBADMSG, "expected a member"},
        {11, -EBADMSG, "too large"},
        {12, -EBADMSG, "no decimal number"},
        {13, -EBADMSG, "a NUL"},
        {14, -EBADMSG, "no number"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct buf b = {0};
        struct err e = {0};
        switch (bad[i].kind) {
        case 0: tarball_header(&b, 'S', "sparse.bin", 0); break;
        case 1:
            tarball_pax(&b, 'x', "GNU.sparse.major", "1");
            tarball_header(&b, '0', "map.bin", 0);
            break;
        case 2: tarball_header(&b, 'M', "part", 0); break;
        case 3: tarball_header(&b, 'Z', "odd", 0); break;
        case 4: tarball_header(&b, '5', "dir/", 512), tarball_data(&b, "", 0), buf_zeros(&b, 512); break;
        case 5: tarball_header(&b, '0', "", 0); break;
        case 6: tarball_header(&b, '0', "huge", 1ull << 63); break;
        case 7: tarball_header(&b, 'x', "h", 10), tarball_data(&b, "99 path=a\n", 10); break;
        case 8: tarball_header(&b, 'x', "h", 9), tarball_data(&b, "9 patha.\n", 9); break;
        case 9: tarball_header(&b, 'x', "h", 2u << 20); break;
        case 10: tarball_pax(&b, 'x', "path", "nothing"); break;
        case 11: tarball_pax(&b, 'x', "size", "99999999999999999999"); break;
        case 12: tarball_pax(&b, 'x', "size", "-1"); break;
        case 13: tarball_header(&b, 'x', "h", 10), tarball_data(&b, "10 path=\0\n", 10); break;
        case 14:
            tarball_header(&b, '0', "n", 0);
            memcpy(b.p + 124, "12x", 3);
            tarball_resum(&b, 0);
            break;
        }
        tarball_end(&b);
        assert_int_equal(read_buf(&b, &e), bad[i].r);
        assert_non_null(strstr(e.text, bad[i].word));
        buf_free(&b);
    }
}

static void random_damage_never_harms(void **state)
{
    (void)state;
    uint64_t seed = 12345;
    for (int round = 0; round < 20000; round++) {
        struct buf b = an_archive(round % 3);
        for (int i = 0; i < 3; i++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            size_t at = (seed >> 33) % b.n;
            b.p[at] = (uint8_t)(seed >> 20);
            if (round & 1)
                tarball_resum(&b, at / 512 * 512);
        }
        struct err e;
        (void)!read_all(b.p, b.n, 1 + seed % 900, round & 2, &e);
        buf_free(&b);
    }
    assert_true(seen.n <= 5);
}

static uint8_t packed[1 << 20];

/* Packs files of the folder "in" with another program into out.tar; bytes of it. Skips where that fails. */
static size_t pack(const char *command)
{
    char dir[] = "/tmp/larder-tar-XXXXXX", line[600];
    assert_non_null(mkdtemp(dir));
    snprintf(line, sizeof line,
             "cd %s && d=in/$(printf 'n%%.0s' $(seq 80))/$(printf 'm%%.0s' $(seq 70)) && mkdir -p $d && "
             "printf abc >in/x.txt && "
             ": >in/x.none && printf long >$d/y.txt && %s 2>err.txt",
             dir, command);
    int status = system(line);
    snprintf(line, sizeof line, "%s/out.tar", dir);
    FILE *f = fopen(line, "rb");
    size_t n = f ? fread(packed, 1, sizeof packed, f) : 0;
    if (f)
        fclose(f);
    snprintf(line, sizeof line, "rm -rf %s", dir);
    assert_int_equal(system(line), 0);
    if (status != 0)
        skip(); /* the program is not installed */
    return n;
}

/* Looks for the bytes of the three files. */
static void archive_of(const char *command)
{
    size_t n = pack(command);
    struct err e = {0};
    int r = read_all(packed, n, 1000, true, &e);
    if (r < 0)
        print_error("%s: %s\n", command, e.text);
    assert_int_equal(r, 0);
    int files = 0;
    for (int i = 0; i < seen.n; i++) {
        const char *name = seen.m[i].name;
        files += seen.m[i].type == TAR_FILE;
        if (strstr(name, "x.txt"))
            assert_true(seen.m[i].bytes == 3 && memcmp(packed + seen.m[i].data, "abc", 3) == 0);
        if (strstr(name, "y.txt"))
            assert_true(seen.m[i].bytes == 4 && memcmp(packed + seen.m[i].data, "long", 4) == 0 &&
                        strlen(name) == 3 + 80 + 1 + 70 + 6);
    }
    assert_int_equal(files, 3);
}

static void gnu_tar(void **state)
{
    (void)state;
    archive_of("tar --format=gnu -cf out.tar in");
}
static void gnu_tar_pax(void **state)
{
    (void)state;
    archive_of("tar --format=pax -cf out.tar in");
}
static void gnu_tar_ustar(void **state)
{
    (void)state;
    archive_of("tar --format=ustar -cf out.tar in");
}
/* D5: a file with a hole, in each way that GNU tar has of writing it. */
static void gnu_tar_sparse(void **state)
{
    (void)state;
    static const char *const ways[] = {"--format=gnu", "--format=pax --sparse-version=0.0",
                                       "--format=pax --sparse-version=0.1",
                                       "--format=pax --sparse-version=1.0"};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char line[300];
        struct err e = {0};
        size_t n;
        snprintf(line, sizeof line, "truncate -s 1M in/hole.bin && tar %s --sparse -cf out.tar in/hole.bin",
                 ways[i]);
        int r = read_all(packed, (n = pack(line)), 1000, false, &e);
        assert_true(n > 0);
        if (r != -ENOTSUP || !strstr(e.text, "hole.bin\" at offset") || !strstr(e.text, "is sparse"))
            fail_msg("%s: %d: %s", ways[i], r, e.text);
    }
}

static void python_tarfile(void **state)
{
    (void)state;
    archive_of("python3 -c \"import tarfile; t = tarfile.open('out.tar', 'w', format=tarfile.PAX_FORMAT, "
               "pax_headers={'comment': 'made here'}); t.add('in'); t.close()\"");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_members_in_every_dialect),
        cmocka_unit_test(every_cut_is_an_error),
        cmocka_unit_test(cuts_name_the_member),
        cmocka_unit_test(empty_is_not_nothing),
        cmocka_unit_test(no_tar_at_all),
        cmocka_unit_test(pax_size_is_the_next_real_members),
        cmocka_unit_test(global_headers_hold_until_taken_back),
        cmocka_unit_test(sizes_have_64_bits),
        cmocka_unit_test(what_cannot_be_read_is_refused_by_name),
        cmocka_unit_test(random_damage_never_harms),
        cmocka_unit_test(gnu_tar),
        cmocka_unit_test(gnu_tar_pax),
        cmocka_unit_test(gnu_tar_ustar),
        cmocka_unit_test(gnu_tar_sparse),
        cmocka_unit_test(python_tarfile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
