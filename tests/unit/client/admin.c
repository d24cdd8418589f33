/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what an operator asks for is done and told truly: lists, marks, prune with its plan, rotation,
 * destruction, tenants, status. Method: a real larderd; each effect is looked at by another call.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

static struct daemon server;

static void save_steps(struct larder *c, const char *run, uint64_t first, uint64_t last)
{
    struct larder_error e;
    for (uint64_t step = first; step <= last; step++) {
        struct larder_save_options o = LARDER_INIT(larder_save_options);
        const char *labels[] = {"host", "a", NULL};
        struct larder_save *s = NULL;
        o.run = run;
        o.step = step;
        o.labels = labels;
        struct larder_tensor t = {.name = "step", .dtype = LARDER_U64, .data = &step};
        GOOD(larder_save_begin(c, &o, &s, &e));
        GOOD(larder_save_tensor(s, &t, &e));
        GOOD(larder_save_submit(s, &e));
        GOOD(larder_save_wait(s, -1, &e));
        larder_save_free(s);
    }
}

static int restored_step(struct larder *c, const char *run, uint64_t *step, struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r;
    o.run = run;
    int rc = larder_restore_open(c, &o, &r, e);
    if (rc < 0)
        return rc;
    struct larder_tensor t = {.name = "step", .dtype = LARDER_U64, .data = step};
    rc = larder_restore_add(r, &t, e);
    if (rc == 0)
        rc = larder_restore_run(r, e);
    larder_restore_close(r);
    return rc;
}

struct listed {
    unsigned count;
    struct larder_run_info run;
    struct larder_commit_info commits[32];
    char reasons[32][64], labels[64];
};

static int note_run(void *arg, const struct larder_run_info *r)
{
    struct listed *l = arg;
    l->count++;
    l->run = *r;
    return 0;
}

static int note_commit(void *arg, const struct larder_commit_info *i)
{
    struct listed *l = arg;
    assert_true(l->count < 32);
    snprintf(l->reasons[l->count], sizeof l->reasons[0], "%s", i->reason);
    snprintf(l->labels, sizeof l->labels, "%s", i->labels);
    l->commits[l->count++] = *i;
    return 0;
}

static int stop_at_once(void *arg, const struct larder_commit_info *i)
{
    (void)arg, (void)i;
    return 42;
}

static void lists_and_marks(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "admin");
    save_steps(c, "listed", 10, 12);
    static struct listed l;
    l = (struct listed){0};
    GOOD(larder_run_list(c, LARDER_CHECKPOINTS, note_run, &l, &e));
    assert_int_equal(l.count, 1);
    assert_true(l.run.commits == 3 && l.run.latest_step == 12 && l.run.latest_sequence == 3 &&
                l.run.key_epoch >= 1);
    GOOD(larder_mark(c, LARDER_CHECKPOINTS, "listed", 1, LARDER_PIN, "for the paper", &e));
    GOOD(larder_mark(c, LARDER_CHECKPOINTS, "listed", 3, LARDER_MARK_BAD, "loss exploded", &e));
    l = (struct listed){0};
    GOOD(larder_commit_list(c, LARDER_CHECKPOINTS, "listed", 1, note_commit, &l, &e));
    assert_int_equal(l.count, 3);
    assert_true(l.commits[0].pinned && l.commits[0].step == 10 && !l.commits[1].pinned);
    assert_int_equal(l.commits[2].state, LARDER_COMMIT_BAD);
    assert_string_equal(l.reasons[2], "loss exploded");
    assert_string_equal(l.labels, "host=a");
    assert_true(l.commits[1].plain_bytes == 8 && l.commits[1].stored_bytes > 8192 &&
                l.commits[1].server_time_ns > 0);
    uint64_t step = 0;
    GOOD(restored_step(c, "listed", &step, &e));
    assert_int_equal(step, 11); /* the newest that is not bad */
    GOOD(larder_mark(c, LARDER_CHECKPOINTS, "listed", 3, LARDER_MARK_GOOD, NULL, &e));
    GOOD(restored_step(c, "listed", &step, &e));
    assert_int_equal(step, 12);
    assert_int_equal(larder_commit_list(c, LARDER_CHECKPOINTS, "listed", 0, stop_at_once, NULL, &e), 42);
    assert_int_equal(larder_commit_list(c, LARDER_CHECKPOINTS, "absent", 0, note_commit, &l, &e), -ENOENT);
    assert_int_equal(larder_mark(c, LARDER_CHECKPOINTS, "listed", 99, LARDER_PIN, NULL, &e), -ENOENT);
    GOOD(larder_close(c, -1, &e));
}

struct planned {
    unsigned kept, removed, done;
    char why[32][96];
    uint64_t step[32];
    int remove[32];
    unsigned count;
};

static int note_plan(void *arg, const struct larder_prune_item *i)
{
    struct planned *p = arg;
    assert_true(p->count < 32);
    p->removed += i->remove != 0;
    p->kept += !i->remove;
    p->done += i->removed != 0;
    snprintf(p->why[p->count], sizeof p->why[0], "%s", i->reason);
    p->remove[p->count] = i->remove;
    p->step[p->count++] = i->step;
    return 0;
}

static const char *why_step(const struct planned *p, uint64_t step)
{
    for (unsigned i = 0; i < p->count; i++)
        if (p->step[i] == step)
            return p->why[i];
    return "(not in the plan)";
}

static void prune_does_what_its_plan_says(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "admin");
    save_steps(c, "pruned", 1, 10);
    GOOD(larder_mark(c, LARDER_CHECKPOINTS, "pruned", 3, LARDER_PIN, "keep", &e));
    struct larder_prune_options o = LARDER_INIT(larder_prune_options);
    o.kind = LARDER_CHECKPOINTS;
    o.run = "pruned";
    o.keep_last = 2;
    o.keep_every = 5;
    uint8_t plan[32], other[32] = {1};
    uint64_t freed = 0;
    struct planned p = {0};
    GOOD(larder_prune(c, &o, note_plan, &p, plan, &freed, &e));
    assert_true(p.kept == 4 && p.removed == 6 && p.done == 0); /* 9, 10; 5; pinned 3 */
    assert_string_equal(why_step(&p, 9), "last 2");
    assert_non_null(strstr(why_step(&p, 5), "multiple of 5"));
    assert_string_equal(why_step(&p, 3), "pinned");
    assert_non_null(strstr(why_step(&p, 1), "older"));
    struct listed l = {0};
    GOOD(larder_commit_list(c, LARDER_CHECKPOINTS, "pruned", 0, note_commit, &l, &e));
    assert_int_equal(l.count, 10); /* a plan removes nothing */
    o.execute = 1;
    o.plan = other;
    assert_int_equal(larder_prune(c, &o, note_plan, &p, NULL, NULL, &e), -EBUSY);
    o.plan = plan;
    p = (struct planned){0};
    GOOD(larder_prune(c, &o, note_plan, &p, NULL, &freed, &e));
    assert_true(p.done == 6 && freed > 0);
    l = (struct listed){0};
    GOOD(larder_commit_list(c, LARDER_CHECKPOINTS, "pruned", 0, note_commit, &l, &e));
    assert_int_equal(l.count, 4);
    uint64_t step;
    GOOD(restored_step(c, "pruned", &step, &e));
    assert_int_equal(step, 10);
    struct larder *writer = daemon_client(&server, "writer"); /* adds, cannot remove */
    assert_int_equal(larder_prune(writer, &o, note_plan, &p, NULL, NULL, &e), -EACCES);
    GOOD(larder_close(writer, -1, &e));
    GOOD(larder_close(c, -1, &e));
}

/* The role's credential file with a second KEK. */
static void with_new_key(const char *role, const char *name, char *path, size_t size)
{
    char second[160];
    memset(second, 0, sizeof second);
    strcpy(second, "\"keks\": [{\"epoch\": 7, \"key\": \"");
    size_t n = strlen(second);
    memset(second + n, 'b', 64);
    strcpy(second + n + 64, "\"}, ");
    daemon_credentials(&server, role, path, size);
    FILE *f = fopen(path, "r");
    char text[16384];
    assert_non_null(f);
    n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    const char *keks = strstr(text, "\"keks\"");
    assert_non_null(keks);
    char from[64];
    size_t width = (size_t)(strchr(keks, '[') - keks) + 1;
    assert_true(width < sizeof from);
    memcpy(from, keks, width);
    from[width] = 0;
    daemon_credentials_edit(&server, role, name, NULL, from, second, path, size);
}

static void keys_rotate_and_runs_are_destroyed(void **state)
{
    (void)state;
    struct larder_error e;
    char path[320];
    struct larder *old = daemon_client(&server, "admin");
    save_steps(old, "rotated", 1, 2);
    with_new_key("admin", "newer.json", path, sizeof path);
    struct larder *c = daemon_client_at(path, 8u << 20);
    uint64_t runs = 0, step = 0;
    GOOD(larder_key_rotate(c, 0, &runs, &e));
    assert_true(runs >= 1);
    GOOD(restored_step(old, "rotated", &step, &e)); /* the old envelope is still there */
    GOOD(larder_key_rotate(c, 1, &runs, &e));
    assert_int_equal(runs, 0); /* nothing left to wrap; the old ones went */
    GOOD(restored_step(c, "rotated", &step, &e));
    assert_int_equal(step, 2);
    assert_int_equal(restored_step(old, "rotated", &step, &e), -EKEYREJECTED);
    struct listed l = {0};
    GOOD(larder_run_list(c, LARDER_CHECKPOINTS, note_run, &l, &e));
    assert_int_equal(l.run.key_epoch, 7);

    GOOD(larder_run_destroy(c, LARDER_CHECKPOINTS, "rotated", &e));
    assert_int_equal(restored_step(c, "rotated", &step, &e), -ENOENT);
    assert_int_equal(larder_run_destroy(c, LARDER_CHECKPOINTS, "rotated", &e), -ENOENT);
    GOOD(larder_close(c, -1, &e));
    GOOD(larder_close(old, -1, &e));
}

static int note_tenant(void *arg, const struct larder_tenant_info *t)
{
    if (strcmp(t->name, "team-b") == 0) {
        assert_true(t->quota_bytes == 5000 && t->weight == 3);
        assert_string_equal(t->residency, "eu");
        ++*(int *)arg;
    }
    return 0;
}

static void status_tenants_and_info(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "admin");
    struct larder_info i = LARDER_INIT(larder_info);
    GOOD(larder_info(c, &i, &e));
    assert_string_equal(i.tenant, "dev");
    assert_string_equal(i.role, "admin");
    assert_string_equal(i.server, server.address);
    assert_non_null(strstr(i.path, "TLS 1.3"));
    char *json;
    GOOD(larder_status(c, &json, &e));
    assert_true(json[0] == '{' && strlen(json) > 20);
    free(json);
    int seen = 0;
    GOOD(larder_tenant_add(c, "team-b", 5000, 3, "eu", &e));
    assert_int_equal(larder_tenant_add(c, "team-b", 5000, 3, "eu", &e), -EEXIST);
    assert_int_equal(larder_tenant_add(c, "Team B", 0, 0, NULL, &e), -EINVAL);
    GOOD(larder_tenant_list(c, note_tenant, &seen, &e));
    assert_int_equal(seen, 1);
    GOOD(larder_close(c, -1, &e));
}

static void bad_credentials_are_explained(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = NULL;
    char path[320], command[400];
    struct larder_options o = LARDER_INIT(larder_options);
    o.credentials = "/nonexistent/larder.json";
    assert_int_equal(larder_open(&o, &c, &e), -ENOENT);
    assert_non_null(strstr(e.text, "/nonexistent/larder.json"));
    daemon_credentials_edit(&server, "reader", "open.json", NULL, NULL, NULL, path, sizeof path);
    snprintf(command, sizeof command, "chmod 644 %s", path);
    assert_int_equal(system(command), 0);
    o.credentials = path;
    assert_int_equal(larder_open(&o, &c, &e), -EACCES);
    assert_non_null(strstr(e.text, "chmod 600"));
    daemon_credentials_edit(&server, "reader", "away.json", "127.0.0.1:1", NULL, NULL, path, sizeof path);
    assert_int_equal(larder_open(&o, &c, &e), -ECONNRESET);
    assert_non_null(strstr(e.text, "127.0.0.1:1"));
    assert_null(c);
    unsetenv("LARDER_CREDENTIALS");
    o.credentials = NULL;
    assert_int_equal(larder_open(&o, &c, &e), -EINVAL);
    assert_non_null(strstr(e.text, "LARDER_CREDENTIALS"));
}

/* Opens with the KEKs from a command instead of the file; "KEY" in it stands for the real key. */
static int open_by_command(const char *command, struct larder_error *e)
{
    char path[320], text[16384], list[512], wanted[512] = "\"kek_command\": \"";
    daemon_credentials(&server, "reader", path, sizeof path);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    const char *keks = strstr(text, "\"keks\""), *end = strchr(keks, ']') + 1, *key = strstr(keks, "\"key\"");
    assert_true(keks && key && (size_t)(end - keks) < sizeof list);
    memcpy(list, keks, (size_t)(end - keks));
    list[end - keks] = 0;
    key = strchr(strchr(key + 5, ':'), '"') + 1;
    const char *stands = strstr(command, "KEY");
    n = strlen(wanted);
    if (stands)
        snprintf(wanted + n, sizeof wanted - n, "%.*s%.64s%s\"", (int)(stands - command), command, key,
                 stands + 3);
    else
        snprintf(wanted + n, sizeof wanted - n, "%s\"", command);
    daemon_credentials_edit(&server, "reader", "command.json", NULL, list, wanted, path, sizeof path);
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder *c = NULL;
    uint64_t step = 0;
    o.credentials = path;
    o.connect_timeout_ms = 1500;
    int rc = larder_open(&o, &c, e);
    if (rc == 0) {
        rc = restored_step(c, "by command", &step, e);
        assert_true(rc < 0 || step == 4);
        (void)larder_close(c, -1, NULL);
    }
    return rc;
}

static void keys_may_come_from_a_command(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    save_steps(c, "by command", 4, 4);
    GOOD(larder_close(c, -1, &e));
    GOOD(open_by_command("echo 1 KEY", &e));
    assert_int_equal(open_by_command("echo 1 KEY; exit 3", &e), -EKEYREJECTED);
    assert_non_null(strstr(e.text, "exit status 3"));
    assert_true(open_by_command("echo one key", &e) < 0);
    assert_non_null(strstr(e.text, "command.json"));
    assert_int_equal(open_by_command("echo 1 KEY; sleep 60", &e),
                     -ETIMEDOUT); /* not waited for without end */
    assert_non_null(strstr(e.text, "1500 ms"));
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
        cmocka_unit_test(lists_and_marks),
        cmocka_unit_test(prune_does_what_its_plan_says),
        cmocka_unit_test(keys_rotate_and_runs_are_destroyed),
        cmocka_unit_test(status_tenants_and_info),
        cmocka_unit_test(bad_credentials_are_explained),
        cmocka_unit_test(keys_may_come_from_a_command),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
