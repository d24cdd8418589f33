/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: staging memory that is lent comes back, keeps what is in it when it grows, and leaves half to saves;
 * what describes very many tensors lies in it, so that a client stays within its budget; and a save that
 * finds none there is as good. Method: a real larderd, a client whose slots are counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "client/loan.h"
#include "client/saver.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

#define STAGING (64u << 20)
#define SLOTS   (STAGING >> 22)
#define MANY    300000u /* whose index, items and names take more than one slot each */
#define FEW     1000u
#define TIED    100u

static struct daemon server;

/* How many slots are free: all are taken, and given back. */
static size_t slots_free(struct larder *c)
{
    uint8_t *taken[SLOTS];
    size_t n = 0;
    while (n < SLOTS && (taken[n] = pool_take(c->staging)) != NULL)
        n++;
    for (size_t i = 0; i < n; i++)
        pool_give(c->staging, taken[i]);
    return n;
}

static struct larder *client(uint64_t staging)
{
    char path[512];
    daemon_credentials(&server, "writer", path, sizeof path);
    return daemon_client_at(path, staging);
}

static void half_is_lent_and_comes_back(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = client(STAGING);
    struct loan loans[SLOTS], l, small;
    size_t n = 0, in_staging = 0;
    assert_int_equal(slots_free(c), SLOTS);
    assert_true(loan_begin(c, 1000, &small));
    assert_int_equal(small.slots, 0); /* too little for a slot */
    for (; n < SLOTS; n++) {
        assert_true(loan_begin(c, 3u << 20, &loans[n]));
        memset(loans[n].memory, (int)n, 3u << 20);
        in_staging += loans[n].slots;
    }
    assert_int_equal(in_staging, SLOTS / 2);
    assert_int_equal(slots_free(c), SLOTS / 2);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(loans[i].memory[(3u << 20) - 1], i);
    while (n > 0)
        loan_end(c, &loans[--n]);
    assert_null(loans[0].memory);
    loan_end(c, &loans[0]); /* of none */
    loan_end(c, &small);

    l = (struct loan){0};
    size_t used = 0, in_slots = 0;
    for (size_t bytes = 100; bytes <= STAGING; bytes *= 3) {
        assert_true(loan_grow(c, &l, used, bytes));
        for (size_t i = 0; i < used; i += 99)
            assert_int_equal(l.memory[i], (uint8_t)(i / 99));
        for (size_t i = 0; i < bytes; i += 99)
            l.memory[i] = (uint8_t)(i / 99);
        used = bytes;
        in_slots += l.slots > 0;
        assert_true(slots_free(c) >= SLOTS / 2);
    }
    assert_true(in_slots >= 2 && l.slots == 0); /* from its own memory to slots, and back */
    loan_end(c, &l);
    assert_int_equal(slots_free(c), SLOTS);
    assert_true(loan_begin(NULL, 5u << 20, &l));
    assert_int_equal(l.slots, 0);
    loan_end(NULL, &l);
    GOOD(larder_close(c, -1, &e));
}

/* ---- saves of very many tensors ---- */

static void name_of(unsigned i, char *out, size_t size)
{
    snprintf(out, size, "a layer with a long name/%u", i);
}

static struct larder_save *described(struct larder *c, uint64_t step, unsigned count, uint32_t *values)
{
    struct larder_error e;
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    struct larder_tensor t = {.dtype = LARDER_U32, .dims = 1, .shape = {1}};
    char name[64];
    o.run = "many";
    o.step = step;
    o.world = 1;
    GOOD(larder_save_begin(c, &o, &s, &e));
    t.name = name;
    for (unsigned i = 0; i < count; i++) {
        name_of(i, name, sizeof name);
        values[i] = (uint32_t)(i * 2654435761u + step);
        t.data = &values[i];
        GOOD(larder_save_tensor(s, &t, &e));
    }
    for (unsigned i = 0; i < TIED * (step % 8); i++) { /* behind the records: more than last time */
        char alias[64];
        name_of(i, name, sizeof name);
        snprintf(alias, sizeof alias, "tied/%u", i);
        GOOD(larder_save_alias(s, alias, name, &e));
        GOOD(larder_save_blob(s, alias, values, i, &e));
    }
    return s;
}

static void save_many(struct larder *c, uint64_t step, unsigned count, uint32_t *values)
{
    struct larder_error e;
    struct larder_save *s = described(c, step, count, values);
    GOOD(larder_save_submit(s, &e));
    memset(values, 0, count * sizeof *values);
    GOOD(larder_save_wait(s, -1, &e));
    assert_int_equal(c->saver->lent, 0); /* with the handle still there */
    larder_save_free(s);
}

static void comes_back(struct larder *c, uint64_t step, unsigned count, uint32_t *values)
{
    struct larder_error e;
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r = NULL;
    struct larder_tensor t = {.dtype = LARDER_U32, .dims = 1, .shape = {1}};
    char name[64];
    o.run = "many";
    o.at = LARDER_AT_STEP;
    o.value = step;
    GOOD(larder_restore_open(c, &o, &r, &e));
    t.name = name;
    for (unsigned i = 0; i < count; i++) {
        name_of(i, name, sizeof name);
        t.data = &values[i];
        GOOD(larder_restore_add(r, &t, &e));
    }
    unsigned aliases = TIED * (step % 8);
    uint32_t tied[TIED * 8];
    for (unsigned i = 0; i < aliases; i++) { /* what lies behind the records */
        snprintf(name, sizeof name, "tied/%u", i);
        t.data = &tied[i];
        GOOD(larder_restore_add(r, &t, &e));
    }
    GOOD(larder_restore_run(r, &e));
    void *blob = NULL;
    size_t n = 0;
    if (aliases > 0) /* the last one, with the last name */
        GOOD(larder_restore_blob(r, 0, name, &blob, &n, &e));
    assert_int_equal(n, aliases > 0 ? aliases - 1 : 0);
    assert_true(n == 0 || memcmp(blob, values, n) == 0);
    free(blob);
    larder_restore_close(r);
    assert_memory_equal(tied, values, aliases * sizeof *tied);
    for (unsigned i = 0; i < count; i++)
        assert_int_equal(values[i], (uint32_t)(i * 2654435761u + step));
}

/* Grown from nothing, expected from the save before, expected for far too many, grown again. */
static void descriptions_lie_in_staging_memory(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = client(STAGING);
    uint32_t *values = malloc(MANY * sizeof *values);
    static const unsigned counts[] = {MANY, MANY, MANY - 1, FEW, FEW, MANY};
    assert_non_null(values);
    for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
        save_many(c, i + 1, counts[i], values);
        comes_back(c, i + 1, counts[i], values);
        assert_int_equal(slots_free(c), SLOTS);
    }
    struct larder_save *s = described(c, 100, MANY, values);
    assert_true(c->saver->lent >= 4);
    assert_true(slots_free(c) >= SLOTS / 2);
    GOOD(larder_save_submit(s, &e));
    (void)larder_save_cancel(s, "not wanted", &e);
    (void)larder_save_wait(s, -1, &e);
    larder_save_free(s);
    larder_save_free(described(c, 101, MANY, values));             /* never submitted */
    for (unsigned i = 0; slots_free(c) < SLOTS && i < 2000; i++) { /* the cancelled one winds up by itself */
        pthread_mutex_lock(&c->saver->lock);
        saver_reap(c->saver);
        pthread_mutex_unlock(&c->saver->lock);
        usleep(10000);
    }
    assert_int_equal(slots_free(c), SLOTS);
    assert_int_equal(c->saver->lent, 0);
    free(values);
    GOOD(larder_close(c, -1, &e));
}

static void without_staging_memory_to_lend(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = client(1); /* one slot, for saves */
    uint32_t *values = malloc(MANY * sizeof *values);
    assert_non_null(values);
    assert_int_equal(pool_slots(c->staging), 1);
    struct larder_save *s = described(c, 200, MANY, values);
    assert_int_equal(c->saver->lent, 0);
    larder_save_free(s);
    save_many(c, 201, MANY, values);
    comes_back(c, 201, MANY, values);
    free(values);
    GOOD(larder_close(c, -1, &e));
}

static int start_server(void **state)
{
    (void)state;
    daemon_start(&server);
    return 0;
}

static int stop_server(void **state)
{
    (void)state;
    daemon_stop(&server);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_is_lent_and_comes_back),
        cmocka_unit_test(descriptions_lie_in_staging_memory),
        cmocka_unit_test(without_staging_memory_to_lend),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
