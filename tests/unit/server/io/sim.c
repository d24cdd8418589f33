/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the simulator is a harsh and repeatable world: what was not synced can be lost, what was synced
 * cannot, a crash ends everything of its node, and one seed gives one history. Method: each promise of sim.h
 * by itself; what the loop promises everywhere is in loop.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/hash.h"
#include "server/io/sim.h"
#include "tests/support/rig.h"

static struct sim *sim;
static struct loop *loop;
static char trace[1 << 20];
static size_t trace_bytes;

static void keep_line(void *arg, const char *line)
{
    size_t n = strlen(line);
    (void)arg;
    if (trace_bytes + n + 1 < sizeof trace) {
        memcpy(trace + trace_bytes, line, n);
        trace[trace_bytes + n] = '\n';
        trace_bytes += n + 1;
    }
}

static void begin(uint64_t seed, struct sim_faults faults, uint64_t disk_bytes)
{
    trace_bytes = 0;
    sim = sim_create(
        &(struct sim_options){.seed = seed, .faults = faults, .disk_bytes = disk_bytes, .trace = keep_line});
    loop = sim_loop(sim, 0);
}

static void end(void)
{
    loop_destroy(loop);
    sim_destroy(sim);
}

static int64_t finish(struct step *s)
{
    assert_true(sim_run(sim, NULL, NULL, 1000000) < 1000000);
    assert_true(s->done);
    return s->op.result;
}

static struct step one;

static int open_file(const char *path, int flags)
{
    loop_open(loop, step_op(&one), path, flags, 0644);
    return (int)finish(&one);
}
static int64_t write_file(int fd, const void *p, size_t n, uint64_t at)
{
    loop_write(loop, step_op(&one), fd, p, n, at);
    return finish(&one);
}
static int64_t read_file(int fd, void *p, size_t n, uint64_t at)
{
    loop_read(loop, step_op(&one), fd, p, n, at);
    return finish(&one);
}
static int64_t sync_fd(int fd)
{
    loop_fsync(loop, step_op(&one), fd);
    return finish(&one);
}
static int64_t close_fd(int fd)
{
    loop_close(loop, step_op(&one), fd);
    return finish(&one);
}
static void sync_root(void)
{
    int fd = open_file("/", O_RDONLY | O_DIRECTORY);
    assert_int_equal(sync_fd(fd), 0);
    close_fd(fd);
}
static void crash(void)
{
    sim_crash(sim, 0);
    loop_destroy(loop);
    loop = sim_loop(sim, 0);
}

static void what_is_synced_stays(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint8_t *got;
        size_t n;
        begin(seed, (struct sim_faults){.lose_unsynced = true}, 0);
        int fd = open_file("f", O_CREAT | O_RDWR);
        assert_int_equal(write_file(fd, "durable", 7, 5000), 7);
        assert_int_equal(sim_file(sim, 0, "f", true, &got, &n), -ENOENT); /* its name is not durable yet */
        assert_int_equal(sync_fd(fd), 0);
        sync_root();
        assert_int_equal(write_file(fd, "changed", 7, 5000), 7);
        assert_int_equal(sim_file(sim, 0, "f", true, &got, &n), 0);
        assert_int_equal(n, 5007);
        assert_memory_equal(got + 5000, "durable", 7);
        free(got);
        assert_int_equal(sim_file(sim, 0, "f", false, &got, &n), 0);
        assert_memory_equal(got + 5000, "changed", 7);
        free(got);
        assert_int_equal(sync_fd(fd), 0);
        crash();
        assert_int_equal(sim_file(sim, 0, "f", false, &got, &n), 0);
        assert_int_equal(n, 5007);
        assert_memory_equal(got + 5000, "changed", 7);
        free(got);
        end();
    }
}

/* Over many seeds each fate of unsynced things is seen: name kept or lost, sectors torn, length kept or lost.
 */
static void what_is_not_synced_may_go(void **state)
{
    (void)state;
    unsigned names_lost = 0, names_kept = 0, torn = 0, whole = 0, length_lost = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
        uint8_t *got, text[2048];
        size_t n;
        begin(seed, (struct sim_faults){.lose_unsynced = true}, 0);
        int a = open_file("a", O_CREAT | O_RDWR), b = open_file("b", O_CREAT | O_RDWR);
        memset(text, 'o', sizeof text);
        assert_int_equal(write_file(a, text, 1024, 0), 1024);
        assert_int_equal(sync_fd(a), 0);
        memset(text, 'n', sizeof text);
        assert_int_equal(write_file(b, text, 10, 0), 10);
        int folder = open_file("/", O_RDONLY);
        if (seed % 2) { /* the name of a is durable, that of b is not asked for in the other half */
            assert_int_equal(sync_fd(folder), 0);
        }
        assert_int_equal(write_file(a, text, 2048, 0), 2048);
        crash();
        int status = sim_file(sim, 0, "a", false, &got, &n);
        if (seed % 2) {
            assert_int_equal(status, 0);
            assert_true(n == 1024 || n == 2048);
            length_lost += n == 1024;
            unsigned fresh = 0;
            for (size_t k = 0; k < n / 512; k++) {
                for (size_t i = 0; i < 512; i++)
                    assert_true(got[k * 512 + i] == got[k * 512]); /* a sector is never torn */
                assert_true(got[k * 512] == 'n' || got[k * 512] == (k < 2 ? 'o' : 0));
                fresh += got[k * 512] == 'n';
            }
            torn += fresh > 0 && fresh < n / 512;
            whole += fresh == n / 512;
            free(got);
        } else {
            names_lost += status == -ENOENT;
            names_kept += status == 0;
            if (status == 0)
                free(got);
        }
        end();
    }
    assert_true(names_lost > 0 && names_kept > 0 && torn > 0 && whole > 0 && length_lost > 0);
}

static void without_loss_all_stays(void **state)
{
    (void)state;
    uint8_t *got;
    size_t n;
    begin(1, (struct sim_faults){0}, 0);
    int fd = open_file("f", O_CREAT | O_RDWR);
    assert_int_equal(write_file(fd, "kept", 4, 0), 4);
    crash();
    assert_int_equal(sim_file(sim, 0, "f", false, &got, &n), 0);
    assert_int_equal(n, 4);
    assert_memory_equal(got, "kept", 4);
    free(got);
    end();
}

/* A link that was synced keeps the file through the loss of its first name; a removal that was not may come
 * back. */
static void names_and_files_are_apart(void **state)
{
    (void)state;
    unsigned back = 0, gone = 0;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint8_t *got;
        size_t n;
        begin(seed, (struct sim_faults){.lose_unsynced = true}, 0);
        loop_mkdir(loop, step_op(&one), "d", 0755);
        assert_int_equal(finish(&one), 0);
        sync_root();
        int fd = open_file("tmp", O_CREAT | O_RDWR);
        assert_int_equal(write_file(fd, "x", 1, 0), 1);
        assert_int_equal(sync_fd(fd), 0);
        loop_link(loop, step_op(&one), "tmp", "d/f");
        assert_int_equal(finish(&one), 0);
        int folder = open_file("d", O_RDONLY);
        assert_int_equal(sync_fd(folder), 0);
        loop_unlink(loop, step_op(&one), "tmp");
        assert_int_equal(finish(&one), 0);
        crash();
        assert_int_equal(sim_file(sim, 0, "d/f", false, &got, &n), 0);
        assert_int_equal(n, 1);
        free(got);
        loop_unlink(loop, step_op(&one), "d/f");
        assert_int_equal(finish(&one), 0);
        crash();
        int status = sim_file(sim, 0, "d/f", false, &got, &n);
        back += status == 0;
        gone += status == -ENOENT;
        if (status == 0)
            free(got);
        end();
    }
    assert_true(back > 0 && gone > 0);
}

static void a_failed_sync_stays_failed(void **state)
{
    (void)state;
    unsigned lost = 0;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint8_t *got;
        size_t n;
        begin(seed, (struct sim_faults){.lose_unsynced = true}, 0);
        int fd = open_file("f", O_CREAT | O_RDWR);
        sync_root();
        assert_int_equal(write_file(fd, "x", 1, 0), 1);
        sim_set_faults(sim, &(struct sim_faults){.lose_unsynced = true, .sync_error = 1000000});
        assert_int_equal(sync_fd(fd), -EIO);
        sim_set_faults(sim, &(struct sim_faults){.lose_unsynced = true});
        assert_int_equal(sync_fd(fd), 0); /* says so, as Linux does, and does nothing */
        crash();
        assert_int_equal(sim_file(sim, 0, "f", false, &got, &n), 0);
        lost += n == 0 || got[0] != 'x';
        free(got);
        end();
    }
    assert_true(lost > 0);
}

static void direct_needs_alignment(void **state)
{
    (void)state;
    uint8_t *p = NULL;
    begin(1, (struct sim_faults){.short_transfer = 1000000}, 0);
    assert_int_equal(posix_memalign((void **)&p, 4096, 1 << 16), 0);
    memset(p, 'd', 1 << 16);
    int fd = open_file("f", O_CREAT | O_RDWR | O_DIRECT);
    assert_int_equal(write_file(fd, p, 1 << 16, 0), 1 << 16);
    assert_int_equal(write_file(fd, p, 100, 0), -EINVAL);
    assert_int_equal(write_file(fd, p + 512, 4096, 0), -EINVAL);
    assert_int_equal(read_file(fd, p, 4096, 512), -EINVAL);
    assert_int_equal(read_file(fd, p, 1 << 16, 4096), (1 << 16) - 4096);
    free(p);
    end();
}

static void the_disk_has_an_end(void **state)
{
    (void)state;
    static uint8_t p[1 << 16];
    uint64_t free_bytes, total_bytes;
    begin(1, (struct sim_faults){0}, 1 << 17);
    int fd = open_file("f", O_CREAT | O_RDWR);
    loop_allocate(loop, step_op(&one), fd, 1 << 16);
    assert_int_equal(finish(&one), 0);
    assert_int_equal(loop_space(loop, "/", &free_bytes, &total_bytes), 0);
    assert_int_equal(total_bytes, 1 << 17);
    assert_int_equal(free_bytes, 1 << 16);
    assert_int_equal(write_file(fd, p, 1 << 16, 0), 1 << 16); /* into what was reserved */
    int g = open_file("g", O_CREAT | O_RDWR);
    loop_allocate(loop, step_op(&one), g, (1 << 16) + 1);
    assert_int_equal(finish(&one), -ENOSPC);
    assert_int_equal(write_file(g, p, 1 << 16, 0), 1 << 16);
    assert_int_equal(write_file(g, p, 1, 1 << 16), -ENOSPC);
    loop_unlink(loop, step_op(&one), "g");
    assert_int_equal(finish(&one), 0);
    assert_int_equal(loop_space(loop, "/", &free_bytes, &total_bytes), 0);
    assert_int_equal(free_bytes, 0); /* still open */
    close_fd(g);
    assert_int_equal(loop_space(loop, "/", &free_bytes, &total_bytes), 0);
    assert_int_equal(free_bytes, 1 << 16);
    end();
}

static void a_crash_ends_what_is_pending(void **state)
{
    (void)state;
    struct step accepting = {0}, writing = {0}, receiving = {0}, later = {0}, connecting = {0}, here = {0};
    char got[4], bound[64];
    int listener;
    begin(3, (struct sim_faults){0}, 0);
    struct loop *other = sim_loop(sim, 1);
    assert_int_equal(loop_listen(loop, NULL, "0", false, &listener, bound, sizeof bound, NULL), 0);
    loop_accept(loop, step_op(&accepting), listener);
    loop_connect(other, step_op(&connecting), "node0", strrchr(bound, ':') + 1);
    int fd = open_file("f", O_CREAT | O_RDWR);
    assert_true(accepting.done && connecting.done);
    loop_recv(loop, step_op(&receiving), (int)accepting.op.result, got, 1);
    loop_recv(other, step_op(&here), (int)connecting.op.result, got, 1);
    sim_run(sim, NULL, NULL, 5);
    loop_accept(loop, step_op(&accepting), listener);
    loop_write(loop, step_op(&writing), fd, "x", 1, 0);
    sim_crash(sim, 0);
    loop_fsync(loop, step_op(&later), fd);
    assert_false(writing.done); /* never from within */
    assert_int_equal(finish(&writing), -EIO);
    assert_int_equal(accepting.op.result, -EIO);
    assert_int_equal(receiving.op.result, -EIO);
    assert_int_equal(later.op.result, -EIO);
    assert_int_equal(here.op.result, -ECONNRESET); /* the other side hears of it */
    assert_int_equal(loop_listen(loop, NULL, "0", false, &listener, NULL, 0, NULL), -EIO);
    loop_close(other, step_op(&here), (int)connecting.op.result);
    assert_int_equal(finish(&here), 0);
    loop_connect(other, step_op(&here), "node0", strrchr(bound, ':') + 1);
    assert_int_equal(finish(&here), -ECONNREFUSED);
    uint8_t *p;
    size_t n;
    assert_int_equal(sim_file(sim, 0, "f", false, &p, &n), 0);
    assert_int_equal(n, 0); /* the write had no effect */
    free(p);
    loop_destroy(other);
    end();
}

static void nodes_have_disks_of_their_own(void **state)
{
    (void)state;
    begin(1, (struct sim_faults){0}, 0);
    struct loop *other = sim_loop(sim, 1);
    open_file("f", O_CREAT | O_RDWR);
    loop_open(other, step_op(&one), "f", O_RDONLY, 0);
    assert_int_equal(finish(&one), -ENOENT);
    loop_destroy(other);
    struct loop *same = sim_loop(sim, 0);
    loop_open(same, step_op(&one), "f", O_RDONLY, 0);
    assert_true(finish(&one) >= 0);
    loop_destroy(same);
    end();
}

/* Everything that can vary, in one go. */
static void busy_history(uint64_t seed)
{
    struct sim_faults faults = {.read_error = 20000,
                                .write_error = 20000,
                                .short_transfer = 300000,
                                .connection_cut = 10000,
                                .stall_ms_max = 3,
                                .lose_unsynced = true};
    static uint8_t data[100000], got[100000];
    struct step send = {0}, receive = {0}, accepting = {0}, connecting = {0}, writes[20] = {0};
    char bound[64];
    int listener;
    begin(seed, faults, 0);
    loop_random(loop, data, sizeof data);
    assert_int_equal(loop_listen(loop, NULL, "0", false, &listener, bound, sizeof bound, NULL), 0);
    loop_accept(loop, step_op(&accepting), listener);
    loop_connect(loop, step_op(&connecting), "node0", strrchr(bound, ':') + 1);
    int fd = open_file("f", O_CREAT | O_RDWR);
    for (size_t i = 0; i < 20; i++)
        loop_write(loop, step_op(&writes[i]), fd, data, 1 + 1000 * i, 500 * i);
    if (connecting.op.result >= 0) {
        loop_send(loop, step_op(&send), (int)connecting.op.result, data, sizeof data);
        for (int i = 0; i < 10; i++) {
            loop_recv(loop, step_op(&receive), (int)accepting.op.result, got, sizeof got);
            sim_run(sim, NULL, NULL, 100);
            if (!receive.done)
                break;
        }
    } else {
        loop_cancel(loop, &accepting.op);
    }
    sim_crash(sim, 0);
    assert_true(sim_run(sim, NULL, NULL, 100000) < 100000);
    end();
}

static void one_seed_is_one_history(void **state)
{
    (void)state;
    struct hash128 seen[12];
    for (uint64_t seed = 0; seed < 12; seed++) {
        busy_history(seed);
        assert_true(trace_bytes > 1000);
        seen[seed] = hash128(trace, trace_bytes);
        busy_history(seed);
        struct hash128 again = hash128(trace, trace_bytes);
        assert_memory_equal(&again, &seen[seed], sizeof again);
        for (uint64_t other = 0; other < seed; other++)
            assert_memory_not_equal(&seen[other], &seen[seed], sizeof seen[0]);
    }
}

struct stream {
    struct io_op op;
    struct loop *loop;
    int fd;
    uint8_t *p;
    size_t n, got;
    int64_t last;
};

static void stream_on(struct io_op *op)
{
    struct stream *t = container_of(op, struct stream, op);
    t->last = op->result;
    if (op->result <= 0)
        return;
    t->got += (size_t)op->result;
    loop_recv(t->loop, op, t->fd, t->p + t->got, t->n - t->got);
}

/* A receiver that pauses stops the sender; bytes come whole and in order, then the end of the stream. */
static void the_window_holds_the_sender(void **state)
{
    (void)state;
    enum { N = 2 << 20 };
    struct step accepting = {0}, connecting = {0}, sending = {0};
    char bound[64];
    int listener;
    begin(5, (struct sim_faults){.short_transfer = 200000, .stall_ms_max = 2}, 0);
    struct loop *other = sim_loop(sim, 1);
    uint8_t *data = malloc(N);
    loop_random(loop, data, N);
    assert_int_equal(loop_listen(loop, NULL, "0", false, &listener, bound, sizeof bound, NULL), 0);
    loop_accept(loop, step_op(&accepting), listener);
    loop_connect(other, step_op(&connecting), "node0", strrchr(bound, ':') + 1);
    assert_true(finish(&connecting) >= 0);
    loop_send(other, step_op(&sending), (int)connecting.op.result, data, N);
    assert_true(sim_run(sim, NULL, NULL, 1000000) < 1000000);
    assert_false(sending.done);
    struct stream in = {.op.done = stream_on, .loop = loop, .fd = (int)accepting.op.result, .n = N + 1};
    in.p = malloc(N + 1);
    loop_recv(loop, &in.op, in.fd, in.p, in.n);
    assert_int_equal(finish(&sending), N);
    loop_close(other, step_op(&one), (int)connecting.op.result);
    assert_int_equal(finish(&one), 0);
    assert_int_equal(in.got, N);
    assert_int_equal(in.last, 0);
    assert_memory_equal(in.p, data, N);
    free(in.p);
    free(data);
    loop_destroy(other);
    end();
}

static void damage_is_found_where_it_was_done(void **state)
{
    (void)state;
    char got[4];
    begin(1, (struct sim_faults){0}, 0);
    int fd = open_file("f", O_CREAT | O_RDWR);
    assert_int_equal(write_file(fd, "abcd", 4, 0), 4);
    assert_int_equal(sim_flip(sim, 0, "f", 2, 0x20), 0);
    assert_int_equal(read_file(fd, got, 4, 0), 4);
    assert_memory_equal(got, "abCd", 4);
    assert_int_equal(sim_flip(sim, 0, "f", 4, 1), -EINVAL);
    assert_int_equal(sim_flip(sim, 0, "g", 0, 1), -ENOENT);
    sim_set_faults(sim, &(struct sim_faults){.read_corrupt = 1000000});
    assert_int_equal(read_file(fd, got, 4, 0), 4);
    assert_memory_not_equal(got, "abCd", 4);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_synced_stays),          cmocka_unit_test(what_is_not_synced_may_go),
        cmocka_unit_test(without_loss_all_stays),        cmocka_unit_test(names_and_files_are_apart),
        cmocka_unit_test(a_failed_sync_stays_failed),    cmocka_unit_test(direct_needs_alignment),
        cmocka_unit_test(the_disk_has_an_end),           cmocka_unit_test(a_crash_ends_what_is_pending),
        cmocka_unit_test(nodes_have_disks_of_their_own), cmocka_unit_test(one_seed_is_one_history),
        cmocka_unit_test(the_window_holds_the_sender),   cmocka_unit_test(damage_is_found_where_it_was_done),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
