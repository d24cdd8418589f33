/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a disk that misreads a part's header, trailer or chunk once costs nobody what is in it; one that is
 * damaged is told. Method: a dataset of one part on a server in memory, whose reads are changed on the way,
 * once or always.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/folder.h"
#include "tests/support/good.h"
#include "tests/support/shelf.h"

enum place { HEADER, TRAILER, CHUNK, PLACES };

struct spoiler {
    unsigned times, done; /* reads to be changed, and those that were */
    enum place place;
};

/* Chunks are read by themselves, and these are not whole blocks. */
static enum place place_of(uint64_t offset, size_t n)
{
    return offset == 0 ? HEADER : n % 4096 == 0 ? TRAILER : CHUNK;
}

static enum err_class reading(void *arg, bool published, uint32_t shard, uint64_t offset, uint8_t *p,
                              size_t n)
{
    struct spoiler *x = arg;
    (void)published, (void)shard;
    if (x->done < x->times && place_of(offset, n) == x->place) {
        p[x->place == HEADER ? 100 : x->place == TRAILER ? n - 100 : n / 2] ^= 1;
        x->done++;
    }
    return ERR_NONE;
}

static void import(struct larder *c)
{
    char folder[256], path[300];
    struct larder_error e;
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    folder_make(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/file", folder);
    folder_file(folder, "file", "some bytes", 10);
    o.dataset = "d";
    o.files = (const char *const[]){path, NULL};
    o.format = LARDER_SHARD_WHOLE;
    GOOD(larder_dataset_import(c, &o, NULL, &e));
    folder_remove(folder);
}

/* Found by the simulator's campaign: a restore with fallback opened an older checkpoint, and a save whose set
 * was checked failed on all ranks. */
static void what_is_misread_once_is_opened(void **state)
{
    (void)state;
    for (enum place place = HEADER; place < PLACES; place++) {
        struct spoiler x = {.place = place};
        struct larder_error e;
        struct shelf *s = shelf_start(&(struct shelf_options){.reading = reading, .arg = &x});
        struct larder *c = shelf_client(s, 1000);
        struct larder_dataset *d = NULL;
        import(c);
        x.times = 1;
        GOOD(larder_dataset_open(c, "d", 0, &d, &e));
        assert_int_equal(x.done, 1);
        larder_dataset_close(d);
        x = (struct spoiler){.place = place, .times = 1000};
        assert_int_equal(larder_dataset_open(c, "d", 0, &d, &e), -EBADMSG);
        assert_int_equal(e.kind, LARDER_CORRUPT);
        assert_int_equal(x.done, 2); /* it was looked at again */
        GOOD(larder_close(c, -1, &e));
        shelf_stop(s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_misread_once_is_opened)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
