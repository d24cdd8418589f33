/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: where io_uring is refused, the error says why and what to do, and the pool works all the same.
 * Method: a child process puts itself under a seccomp filter that answers io_uring_setup as a container or an
 * old kernel does.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/io/ring.h"
#include "tests/support/rig.h"

enum { NO_FILTER = 77 };

static int refuse_io_uring(int errnum)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)errnum),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof code[0], .filter = code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -errno;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) ? -errno : 0;
}

/* 0: as it should be. */
static int in_the_child(int errnum, const char *expected)
{
    struct loop *l = NULL;
    struct err e = {0};
    char text[256];
    struct rig rig;
    struct step s = {0};
    if (refuse_io_uring(errnum))
        return NO_FILTER;
    if (ring_create(NULL, &l, &e) != -ENOTSUP || l || e.class != ERR_UNSUPPORTED)
        return 1;
    if (!strstr(e.text, expected) || !strstr(e.text, "io = pool")) {
        fprintf(stderr, "# %s\n", e.text);
        return 2;
    }
    if (ring_probe(text, sizeof text, &e) != -ENOTSUP || ring_create(NULL, &l, NULL) != -ENOTSUP)
        return 3;
    rig_open(&rig, RIG_POOL, 0);
    loop_open(rig.loop, step_op(&s), rig_path(&rig, "f"), O_CREAT | O_RDWR, 0600);
    int64_t fd = step_end(&rig, &s);
    if (fd < 0)
        return 4;
    loop_close(rig.loop, step_op(&s), (int)fd);
    if (step_end(&rig, &s))
        return 5;
    rig_close(&rig);
    return 0;
}

static void try_with(int errnum, const char *expected)
{
    int status;
    pid_t pid = fork();
    if (pid == 0)
        _exit(in_the_child(errnum, expected));
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NO_FILTER) {
        print_message("# this machine allows no seccomp filter\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void refused_by_a_container(void **state)
{
    (void)state;
    try_with(EPERM, "seccomp");
}

static void absent(void **state)
{
    (void)state;
    try_with(ENOSYS, "5.11");
}

static void the_probe_says_what_is_there(void **state)
{
    (void)state;
    char text[256], little[10];
    struct err e = {0};
    if (ring_probe(text, sizeof text, &e)) {
        print_message("# %s\n", e.text);
        skip();
    }
    assert_non_null(strstr(text, "io_uring: kernel "));
    assert_non_null(strstr(text, "on helper threads: "));
    assert_non_null(strstr(text, "list"));
    assert_int_equal(ring_probe(little, sizeof little, &e), 0);
    assert_memory_equal(little, "io_uring:", 10); /* cut, and ended */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused_by_a_container),
        cmocka_unit_test(absent),
        cmocka_unit_test(the_probe_says_what_is_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
