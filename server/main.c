/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larderd: reads the configuration, makes a loop per thread, boots everything on them, and turns signals into
 * messages. The main thread only waits: for signals, and to be told that the server runs or has stopped.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "format/channel.h"
#include "format/version.h"
#include "server/boot.h"
#include "server/config.h"
#include "server/dev.h"
#include "server/io/ring.h"
#include "server/obs/logger.h"

#define PEM_BYTES_MAX (1u << 20)
#define DEV_LISTEN    "127.0.0.1:0"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

struct options {
    const char *config, *dev, *listen;
    bool check_only;
};

static const char help[] =
    "larderd " LARDER_VERSION_STRING ": the store behind a GPU cluster\n"
    "\n"
    "usage: larderd --config FILE [--check-config]\n"
    "       larderd --dev DIR [--listen HOST:PORT]\n"
    "\n"
    "  -c, --config FILE       serve as FILE says; larderd.conf(5) describes it\n"
    "      --check-config      only check FILE and what it names; exit status 0 if all is well\n"
    "      --dev DIR           serve on this machine from DIR, making everything that is missing in it:\n"
    "                          certificates, keys, a store, a tenant, credential files\n"
    "      --listen HOST:PORT  listen here instead of where the configuration says; port 0 picks one\n"
    "      --version           print the version\n"
    "      --help              print this\n"
    "\n"
    "SIGTERM and SIGINT stop it: what is in flight may finish for stop_wait, a second signal ends the wait.\n"
    "SIGHUP reads the certificates and what is published, and opens the log, anew.\n";

/* Everything of a running process. */
struct daemon {
    struct config *config;
    const char *config_path;
    struct config *reread; /* by SIGHUP, the last one first: what they publish may be in use */
    struct dev *dev;       /* NULL: not --dev */
    struct channel_config *tls;
    struct loop *loops[LOOPS_MAX];
    pthread_t threads[LOOPS_MAX];
    size_t loop_count, thread_count;
    char io_path[256];
    int signal_fd, event_fd;
    struct boot *boot; /* on the thread of loops[0] */
    struct err err;    /* why the start failed; read after `event` */
    char address[ADDRESS_BYTES_MAX];
    uint64_t finished, failed;
    _Atomic int event; /* enum event, last one */
    struct loop_msg stop_msg, hurry_msg;
};

enum event { EVENT_NONE, EVENT_STARTED, EVENT_START_FAILED, EVENT_STOPPED, EVENT_LOOP_FAILED, EVENT_STUCK };

/* Beyond stop_wait, or beyond the second signal: for closing files and folders. A disk that takes longer does
 * not answer, and there is nothing that a server could still do. */
#define STOP_GRACE_MS 5000u

static void tell_main(struct daemon *d, enum event event)
{
    uint64_t one = 1;
    atomic_store(&d->event, event);
    if (write(d->event_fd, &one, sizeof one) != (ssize_t)sizeof one)
        log_error("the main thread cannot be told: %s", strerror(errno));
}

/* Certificates. */

static int read_pem(const char *path, char **out, size_t *n, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno, "opening %s", path);
    char *text = malloc(PEM_BYTES_MAX + 1);
    ssize_t got = text ? read(fd, text, PEM_BYTES_MAX) : -1;
    int r = got < 0 ? err_sys(e, text ? errno : ENOMEM, "reading %s", path) : 0;
    close(fd);
    if (r < 0) {
        free(text);
        return r;
    }
    text[got] = 0;
    *n = (size_t)got;
    *out = text;
    return 0;
}

static int load_tls(const struct config *c, struct channel_config **out, struct err *e)
{
    char *ca = NULL, *certificate = NULL, *key_text = NULL;
    struct secret *key = NULL;
    size_t n, key_bytes = 0;
    int r = read_pem(c->ca, &ca, &n, e);
    if (r == 0)
        r = read_pem(c->certificate, &certificate, &n, e);
    if (r == 0)
        r = read_pem(c->key, &key_text, &key_bytes, e);
    if (r == 0 && !(key = secret_create(key_text, key_bytes + 1)))
        r = err_set(e, ERR_LIMIT, "the key %s is larger than %u bytes", c->key, SECRET_BYTES_MAX - 1);
    if (r == 0 && (r = channel_config_create(true, ca, certificate, key, out, e)) < 0)
        err_prepend(e, "certificate %s, key %s, ca %s", c->certificate, c->key, c->ca);
    if (key_text)
        secret_wipe(key_text, key_bytes);
    secret_free(key);
    free(key_text);
    free(certificate);
    free(ca);
    return r;
}

static int check_folders(const struct config *c, struct err *e)
{
    struct stat st;
    for (size_t i = 0; i < c->published_count; i++) {
        const struct published_dir *d = &c->published[i];
        if (stat(d->path, &st) < 0)
            return err_sys(e, errno, "[publish %s]: path %s", d->name, d->path);
        if (!S_ISDIR(st.st_mode))
            return err_set(e, ERR_INVALID, "[publish %s]: path %s is not a folder", d->name, d->path);
    }
    if (stat(c->store, &st) == 0 && !S_ISDIR(st.st_mode))
        return err_set(e, ERR_INVALID, "store %s is not a folder", c->store);
    return 0;
}

/* The process. */

static void harden(void)
{
#ifndef __SANITIZE_ADDRESS__ /* whose leak check attaches to its own process */
    prctl(PR_SET_DUMPABLE, 0);
#endif
    struct rlimit none = {0, 0}, files;
    setrlimit(RLIMIT_CORE, &none);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that grows beyond its limit fails its write, with EFBIG */
}

static int open_signals(struct daemon *d, struct err *e)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    if (pthread_sigmask(SIG_BLOCK, &set, NULL) != 0 ||
        (d->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)) < 0)
        return err_sys(e, errno, "signals");
    d->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return d->event_fd < 0 ? err_sys(e, errno, "eventfd") : 0;
}

/* The ring, unless the configuration asks for the pool. With --dev a machine that refuses the ring is no
 * reason to stop: it runs on the pool and says so. */
static int make_loops(struct daemon *d, struct err *e)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    size_t count = d->config->loops ? d->config->loops : cores < 1 ? 1 : (size_t)cores;
    struct ring_options o = {.worker_pool = d->config->worker_pool};
    count = count > LOOPS_MAX ? LOOPS_MAX : count;
    while (d->loop_count < count) {
        int r = ring_create(&o, &d->loops[d->loop_count], e);
        if (r < 0 && d->dev && !o.worker_pool && d->loop_count == 0) {
            log_warn("running on a pool of threads instead of io_uring: %s", e->text);
            o.worker_pool = true;
            err_clear(e);
            continue;
        }
        if (r < 0)
            return r;
        d->loop_count++;
    }
    if (o.worker_pool)
        snprintf(d->io_path, sizeof d->io_path, "pool of threads (pread, pwrite) and epoll");
    else
        return ring_probe(d->io_path, sizeof d->io_path, e);
    return 0;
}

struct thread_arg {
    struct daemon *d;
    size_t number;
};

static void *run_loop(void *p)
{
    struct thread_arg arg = *(struct thread_arg *)p;
    struct err e = {0};
    char name[16];
    free(p);
    snprintf(name, sizeof name, "loop-%zu", arg.number);
    pthread_setname_np(pthread_self(), name);
    if (loop_run(arg.d->loops[arg.number], &e) < 0) {
        log_error("loop %zu failed: %s", arg.number, e.text);
        tell_main(arg.d, EVENT_LOOP_FAILED);
    }
    return NULL;
}

static int start_threads(struct daemon *d, struct err *e)
{
    for (size_t i = 0; i < d->loop_count; i++) {
        struct thread_arg *arg = malloc(sizeof *arg);
        if (!arg)
            return err_set(e, ERR_NO_MEMORY, "no memory for a thread");
        *arg = (struct thread_arg){.d = d, .number = i};
        int r = pthread_create(&d->threads[i], NULL, run_loop, arg);
        if (r != 0) {
            free(arg);
            return err_sys(e, r, "starting thread %zu", i);
        }
        d->thread_count++;
    }
    return 0;
}

/* On the thread of loops[0]. */

static void on_started(void *arg, struct boot *b, const struct err *e)
{
    struct daemon *d = arg;
    if (!b) {
        d->err = *e;
        tell_main(d, EVENT_START_FAILED);
        return;
    }
    d->boot = b;
    snprintf(d->address, sizeof d->address, "%s", server_address(boot_server(b), 0));
    for (size_t i = 0; i < d->config->listen_count; i++)
        log_info("listening address=%s loops=%zu io=\"%s\"", server_address(boot_server(b), i), d->loop_count,
                 d->io_path);
    tell_main(d, EVENT_STARTED);
}

static void on_stopped(void *arg, uint64_t finished, uint64_t failed)
{
    struct daemon *d = arg;
    d->boot = NULL;
    d->finished = finished;
    d->failed = failed;
    tell_main(d, EVENT_STOPPED);
}

static void do_stop(struct loop_msg *m)
{
    struct daemon *d = container_of(m, struct daemon, stop_msg);
    boot_stop(d->boot, d->config->stop_wait_ms, on_stopped, d);
}

static void do_hurry(struct loop_msg *m)
{
    struct daemon *d = container_of(m, struct daemon, hurry_msg);
    if (d->boot)
        boot_hurry(d->boot);
}

struct reload_msg {
    struct loop_msg msg;
    struct daemon *d;
    struct channel_config *tls;
    const struct config *config;
};

static void do_reload(struct loop_msg *m)
{
    struct reload_msg *r = container_of(m, struct reload_msg, msg);
    if (r->d->boot &&
        server_reload(boot_server(r->d->boot), r->tls, r->config->published, r->config->published_count) == 0)
        log_info("certificates and published directories read anew published=%zu",
                 r->config->published_count);
    channel_config_unref(r->tls);
    free(r);
}

/* On the main thread. */

static void reload(struct daemon *d)
{
    struct err e = {0};
    struct config *c = NULL;
    struct reload_msg *r = calloc(1, sizeof *r);
    logger_reopen();
    if (!r || config_read(d->config_path, &c, &e) < 0 || load_tls(c, &r->tls, &e) < 0 ||
        check_folders(c, &e) < 0) {
        log_error("configuration not read anew, the old one stays: %s", r ? e.text : "no memory");
        if (r)
            channel_config_unref(r->tls);
        config_free(c);
        free(r);
        return;
    }
    c->before = d->reread;
    d->reread = c;
    r->config = c;
    r->d = d;
    r->msg.run = do_reload;
    loop_post(d->loops[0], &r->msg);
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* *until: when the stopping must have ended, once it has begun. */
static void on_signal(struct daemon *d, int signal, int *stops, uint64_t *until)
{
    if (signal == SIGHUP) {
        if (*stops == 0)
            reload(d);
        return;
    }
    (*stops)++;
    if (*stops == 1) {
        log_info("stopping signal=%s wait_ms=%u", signal == SIGINT ? "SIGINT" : "SIGTERM",
                 d->config->stop_wait_ms);
        *until = now_ms() + d->config->stop_wait_ms + STOP_GRACE_MS;
        d->stop_msg.run = do_stop;
        loop_post(d->loops[0], &d->stop_msg);
    } else if (*stops == 2) {
        log_info("stopping now: what is in flight fails");
        *until = now_ms() + STOP_GRACE_MS;
        d->hurry_msg.run = do_hurry;
        loop_post(d->loops[0], &d->hurry_msg);
    }
}

/* Waits for one event; signals are handled on the way once the server runs. */
static enum event wait_event(struct daemon *d, bool running)
{
    struct pollfd fds[] = {{.fd = d->event_fd, .events = POLLIN}, {.fd = d->signal_fd, .events = POLLIN}};
    int stops = 0;
    uint64_t until = 0;
    for (;;) {
        uint64_t n, now = now_ms();
        struct signalfd_siginfo info;
        if (until && now >= until)
            return EVENT_STUCK;
        if (poll(fds, running ? 2 : 1, until ? (int)(until - now) : -1) < 0 && errno != EINTR)
            return EVENT_LOOP_FAILED;
        if (read(d->event_fd, &n, sizeof n) == (ssize_t)sizeof n)
            return atomic_load(&d->event);
        if (running && read(d->signal_fd, &info, sizeof info) == (ssize_t)sizeof info)
            on_signal(d, (int)info.ssi_signo, &stops, &until);
    }
}

static int begin(struct daemon *d, struct err *e)
{
    const struct config *c = d->config;
    struct boot_options o = {
        .loops = d->loops,
        .loop_count = d->loop_count,
        .folder = c->store,
        .space_reserve_bytes = c->space_reserve_bytes,
        .join_wait_ms = c->join_wait_ms,
        .check_wait_ms = c->check_wait_ms,
        .segment_idle_ms = c->segment_idle_ms,
        .buffers_bytes = c->buffers_bytes,
        .ensure_tenant = d->dev ? DEV_TENANT : NULL,
        .server = {.tls = d->tls,
                   .listen = (const char *const *)c->listen,
                   .listen_count = c->listen_count,
                   .published = c->published,
                   .published_count = c->published_count,
                   .store_folder = c->store,
                   .space_reserve_bytes = c->space_reserve_bytes,
                   .caps = c->caps,
                   .cap_count = c->cap_count,
                   .no_bulk_lane = !c->bulk_lane,
                   .io_path = d->io_path,
                   .limits = c->limits},
    };
    if (boot_start(&o, on_started, d) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for starting");
    return start_threads(d, e);
}

static int serve(struct daemon *d, struct err *e)
{
    int r = begin(d, e);
    if (r < 0)
        return r;
    enum event event = wait_event(d, false);
    if (event == EVENT_START_FAILED) {
        *e = d->err;
        return -e->errnum;
    }
    if (event == EVENT_STARTED && d->dev) {
        r = dev_announce(d->dev, d->address, e);
        if (r < 0)
            kill(getpid(), SIGTERM); /* the way down is the same */
        else
            dev_print(d->dev, d->address);
    }
    if (event == EVENT_STARTED)
        event = wait_event(d, true);
    if (event == EVENT_STUCK)
        return err_set(e, ERR_IO,
                       "the disk has not answered %u s after the stop was due; left without it: what was "
                       "acknowledged is "
                       "safe, what was in flight has no known outcome; look at the disk of %s",
                       STOP_GRACE_MS / 1000, d->config->store);
    if (event != EVENT_STOPPED)
        return err_set(e, ERR_IO, "a loop failed; what was not acknowledged may be lost");
    if (d->dev)
        dev_withdraw(d->dev);
    log_info("stopped finished=%llu failed=%llu", (unsigned long long)d->finished,
             (unsigned long long)d->failed);
    return r;
}

static void daemon_free(struct daemon *d)
{
    for (size_t i = 0; i < d->thread_count; i++)
        pthread_join(d->threads[i], NULL);
    for (size_t i = 0; i < d->loop_count; i++)
        loop_destroy(d->loops[i]);
    channel_config_unref(d->tls);
    for (struct config *c; (c = d->reread);) {
        d->reread = c->before;
        config_free(c);
    }
    config_free(d->config);
    dev_free(d->dev);
    free(d);
}

static int set_listen(struct config *c, const char *listen, struct err *e)
{
    for (size_t i = 0; i < c->listen_count; i++)
        free(c->listen[i]);
    c->listen_count = 0;
    c->listen[0] = strdup(listen);
    if (!c->listen[0])
        return err_set(e, ERR_NO_MEMORY, "no memory for --listen");
    c->listen_count = 1;
    return 0;
}

static int prepare(struct daemon *d, const struct options *o, struct err *e)
{
    int r = 0;
    if (o->dev)
        r = dev_prepare(o->dev, o->listen ? o->listen : DEV_LISTEN, &d->dev, e);
    if (r == 0)
        r = config_read(d->config_path = o->dev ? dev_config(d->dev) : o->config, &d->config, e);
    if (r == 0 && o->listen)
        r = set_listen(d->config, o->listen, e);
    if (r == 0)
        r = load_tls(d->config, &d->tls, e);
    if (r == 0)
        r = check_folders(d->config, e);
    return r;
}

static int run(const struct options *o)
{
    struct err e = {0};
    struct daemon *d = calloc(1, sizeof *d);
    if (!d)
        return EXIT_FAILED;
    int r = prepare(d, o, &e);
    if (r == 0 && o->check_only) {
        printf("%s is fine\n", o->config);
        daemon_free(d);
        return EXIT_OK;
    }
    if (r == 0)
        r = logger_open(d->config->log, (enum log_level)d->config->log_level, &e);
    if (r == 0)
        r = open_signals(d, &e);
    if (r == 0)
        r = make_loops(d, &e);
    if (r == 0)
        r = serve(d, &e);
    if (r < 0) {
        fprintf(stderr, "larderd: %s\n", e.text);
        if (d->thread_count > 0 && atomic_load(&d->event) != EVENT_START_FAILED)
            _exit(EXIT_FAILED); /* threads that cannot be stopped any more */
    }
    daemon_free(d);
    return r < 0 ? EXIT_FAILED : EXIT_OK;
}

static int usage(const char *text)
{
    fprintf(stderr, "larderd: %s; `larderd --help` tells more\n", text);
    return EXIT_USAGE;
}

int main(int argc, char **argv)
{
    enum { OPT_CHECK = 256, OPT_DEV, OPT_LISTEN, OPT_VERSION, OPT_HELP };
    static const struct option longs[] = {
        {"config", required_argument, NULL, 'c'},
        {"check-config", no_argument, NULL, OPT_CHECK},
        {"dev", required_argument, NULL, OPT_DEV},
        {"listen", required_argument, NULL, OPT_LISTEN},
        {"version", no_argument, NULL, OPT_VERSION},
        {"help", no_argument, NULL, OPT_HELP},
        {NULL, 0, NULL, 0},
    };
    struct options o = {0};
    for (int c; (c = getopt_long(argc, argv, "c:", longs, NULL)) != -1;) {
        switch (c) {
        case 'c': o.config = optarg; break;
        case OPT_CHECK: o.check_only = true; break;
        case OPT_DEV: o.dev = optarg; break;
        case OPT_LISTEN: o.listen = optarg; break;
        case OPT_VERSION: puts("larderd " LARDER_VERSION_STRING); return EXIT_OK;
        case OPT_HELP: fputs(help, stdout); return EXIT_OK;
        default: return usage("an option is not known or lacks its value");
        }
    }
    if (optind < argc) {
        char why[128];
        snprintf(why, sizeof why, "\"%.80s\" is no option", argv[optind]);
        return usage(why);
    }
    if (!o.config == !o.dev)
        return usage("give either --config FILE or --dev DIR");
    if (o.check_only && !o.config)
        return usage("--check-config goes with --config FILE");
    harden();
    return run(&o);
}
