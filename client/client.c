/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a client, and the helpers at the border to larder.h. */
#include "client/client.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/device.h"
#include "client/opened.h"
#include "client/saver.h"
#include "client/secrets.h"
#include "format/channel.h"
#include "format/dtype.h"
#include "format/version.h"

static_assert((int)LARDER_UNSUPPORTED == (int)ERR_UNSUPPORTED, "classes are the same numbers");
static_assert((int)LARDER_F6_E3M2 == (int)DTYPE_F6_E3M2, "dtypes are the same numbers");
static_assert(LARDER_DIMS_MAX == TENSOR_DIMS_MAX && LARDER_STATE_BYTES == LOADER_STATE_BYTES_MAX,
              "as in limits.h");
static_assert(sizeof(((struct larder_error *)0)->text) == ERR_TEXT_BYTES, "texts are not cut at the border");

/* ---- small public helpers ---- */

const char *larder_class_name(enum larder_class kind)
{
    return err_class_name((enum err_class)kind);
}

const char *larder_version(void)
{
    return LARDER_VERSION_STRING;
}

unsigned larder_dtype_bits(enum larder_dtype dtype)
{
    return dtype_known((unsigned)dtype) ? dtype_bits((enum dtype)dtype) : 0;
}

const char *larder_dtype_name(enum larder_dtype dtype)
{
    return dtype_known((unsigned)dtype) ? dtype_name((enum dtype)dtype) : "unknown";
}

/* ---- the border ---- */

/* Asking for the process is a system call, which is much where a million tensors are added. */
static const uint8_t *own_page(void)
{
    uint8_t *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (madvise(p, 4096, MADV_WIPEONFORK) != 0) {
        munmap(p, 4096);
        return NULL;
    }
    *p = 1;
    return p;
}

static bool is_forked(const struct larder *c)
{
    return c->own ? *c->own == 0 : c->pid != getpid();
}

int client_enter(struct larder *c, struct err *e)
{
    if (!c)
        return err_set(e, ERR_INVALID, "the client is NULL; open one with larder_open first");
    if (is_forked(c)) {
        err_set(e, ERR_INVALID,
                "this client was opened by process %d before a fork, and this is process %d: threads and "
                "connections do not "
                "survive fork; open a client in the child (or fork before larder_open)",
                (int)c->pid, (int)getpid());
        if (e)
            e->errnum = ECHILD;
        return -ECHILD;
    }
    return 0;
}

int client_leave(int rc, const struct err *from, struct larder_error *to)
{
    if (!to)
        return rc;
    if (rc >= 0) {
        to->kind = LARDER_OK;
        to->errnum = 0;
        to->text[0] = 0;
        return rc;
    }
    to->kind = (enum larder_class)from->class;
    to->errnum = from->errnum;
    memcpy(to->text, from->text, sizeof to->text);
    return rc;
}

const struct credentials *client_credentials(struct larder *c)
{
    return &c->credentials;
}

struct conn *client_conn(struct larder *c)
{
    return c->conn;
}

const struct larder_options *client_options(struct larder *c)
{
    return &c->options;
}

uint32_t client_timeout(struct larder *c, int timeout_ms)
{
    return timeout_ms < 0 ? c->options.request_timeout_ms : (uint32_t)timeout_ms;
}

static int connect_once(struct larder *c, enum conn_lane lane, struct conn **out, struct err *e)
{
    struct conn_options o = {
        .host = c->host,
        .port = c->port,
        .config = c->config,
        .connect_timeout_ms = c->options.connect_timeout_ms,
        .request_timeout_ms = c->options.request_timeout_ms,
        .reconnect_ms = c->options.reconnect_ms,
        .lane = c->options.no_bulk_lane ? CONN_LANE_NONE : lane,
    };
    return conn_open(&o, out, e);
}

/* The server was there when the client was opened; it may be starting again just now. */
int client_connect(struct larder *c, enum conn_lane lane, struct conn **out, struct err *e)
{
    uint64_t give_up_ms = clock_ms() + c->options.reconnect_ms;
    for (;;) {
        struct err why;
        err_clear(&why);
        int rc = connect_once(c, lane, out, &why);
        if (rc >= 0)
            return rc;
        if (why.class != ERR_NETWORK || clock_ms() >= give_up_ms) {
            if (e)
                *e = why;
            return rc;
        }
        const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
}

/* ---- opening ---- */

static unsigned default_threads(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long n = cores / 2 > 2 ? cores / 2 : 2;
    n = n < cores ? n : cores;
    return n < 1 ? 1 : n < 16 ? (unsigned)n : 16;
}

static int fill_options(struct larder *c, const struct larder_options *o, struct err *e)
{
    if (o && o->size > 0)
        memcpy(&c->options, o, o->size < sizeof c->options ? o->size : sizeof c->options);
    struct larder_options *p = &c->options;
    const char *path = p->credentials ? p->credentials : getenv("LARDER_CREDENTIALS");
    if (!path || !*path)
        return err_set(
            e, ERR_INVALID,
            "no credential file is named; set LARDER_CREDENTIALS to its path, or credentials in the options");
    c->path = strdup(path);
    if (!c->path)
        return err_set(e, ERR_NO_MEMORY, "no memory for a client");
    p->size = sizeof *p;
    p->credentials = c->path;
    p->staging_bytes = p->staging_bytes ? p->staging_bytes : 256u << 20;
    p->threads = p->threads ? p->threads : default_threads();
    if (p->threads > 256)
        p->threads = 256;
    p->nice = p->nice ? p->nice : 5;
    p->connect_timeout_ms = p->connect_timeout_ms ? p->connect_timeout_ms : 10000;
    p->request_timeout_ms = p->request_timeout_ms ? p->request_timeout_ms : 60000;
    p->reconnect_ms = p->reconnect_ms ? p->reconnect_ms : 30000;
    return 0;
}

/* The certificate decides who we are; a file that says otherwise was put together wrongly. */
static int check_identity(struct larder *c, struct err *e)
{
    struct conn_hello h;
    conn_hello(c->conn, &h);
    if (strcmp(h.tenant, c->credentials.tenant) != 0)
        return err_set(
            e, ERR_DENIED,
            "the credential file %s is of tenant %s, but its certificate is of tenant %s; get a matching one",
            c->path, c->credentials.tenant, h.tenant);
    return 0;
}

static int take_staging(struct larder *c, struct err *e)
{
    struct conn_hello h;
    conn_hello(c->conn, &h);
    if (h.role == ROLE_READER) /* cannot save */
        return 0;
    uint64_t chunks = c->options.staging_bytes / CHUNK_PLAIN_BYTES_MAX;
    int rc = pool_create(chunks * STAGING_SLOT_BYTES, STAGING_SLOT_BYTES, &c->staging, e);
    if (rc == 0)
        rc = saver_create(c, &c->saver, e);
    struct device *d;
    for (size_t i = 0; rc == 0 && i < c->options.device_count; i++)
        rc = device_get_staged(c, c->options.devices[i], &d, e);
    c->options.devices = NULL; /* the caller's */
    return rc;
}

static void client_free(struct larder *c)
{
    if (c->saver && c->saver->lent > 0)
        c->staging_lost = true; /* a restore or a save whose handle is still there has some of it */
    saver_destroy(c->saver);
    conn_close(c->conn);
    if (c->staging_lost) {
        device_keep(c->staging, c->devices);
    } else {
        pool_destroy(c->staging);
        devices_close(c);
    }
    pthread_mutex_destroy(&c->device_lock);
    if (c->config)
        channel_config_unref(c->config);
    credentials_free(&c->credentials);
    pthread_mutex_destroy(&c->feeds_lock);
    spares_end(&c->sealed);
    part_scratch_free(atomic_load(&c->scratch));
    free(c->path);
    if (c->own)
        munmap((void *)(uintptr_t)c->own, 4096);
    free(c);
}

static int client_open(struct larder *c, const struct larder_options *o, struct err *e)
{
    int rc = fill_options(c, o, e);
    if (rc < 0)
        return rc;
    rc = secrets_load(c->path, c->options.connect_timeout_ms, &c->credentials, e);
    if (rc < 0)
        return rc;
    const struct credentials *k = &c->credentials;
    rc = address_split(k->server, c->host, sizeof c->host, c->port, sizeof c->port, e);
    if (rc == 0)
        rc = channel_config_create(false, k->ca_pem, k->certificate_pem, k->key_pem, &c->config, e);
    if (rc < 0)
        return err_prepend(e, "credential file %s", c->path);
    rc = connect_once(c, CONN_LANE_OFFER, &c->conn, e);
    if (rc == 0)
        rc = check_identity(c, e);
    if (rc == 0)
        rc = take_staging(c, e);
    return rc;
}

int larder_open(const struct larder_options *options, struct larder **out, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct larder *c = calloc(1, sizeof *c);
    if (!c)
        return client_leave(err_set(&e, ERR_NO_MEMORY, "no memory for a client"), &e, error);
    c->pid = getpid();
    c->own = own_page();
    pthread_mutex_init(&c->device_lock, NULL);
    secrets_random(&c->incarnation, sizeof c->incarnation);
    pthread_mutex_init(&c->feeds_lock, NULL);
    spares_init(&c->sealed);
    int rc = client_open(c, options, &e);
    if (rc < 0)
        client_free(c);
    else
        *out = c;
    return client_leave(rc, &e, error);
}

int larder_close(struct larder *c, int timeout_ms, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    if (!c)
        return client_leave(0, &e, error);
    int rc = client_enter(c, &e);
    if (rc == 0) {
        if (c->saver)
            rc = saver_drain(c->saver, clock_ms() + client_timeout(c, timeout_ms), &e);
        client_free(c);
    }
    return client_leave(rc, &e, error);
}

int larder_info(struct larder *c, struct larder_info *out, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    int rc = client_enter(c, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    struct conn_hello h;
    conn_hello(c->conn, &h);
    struct larder_info i = {.size = out->size, .server_time_ns = h.server_time_ns};
    snprintf(i.server, sizeof i.server, "%s", c->credentials.server);
    snprintf(i.tenant, sizeof i.tenant, "%s", h.tenant);
    snprintf(i.role, sizeof i.role, "%s", role_name(h.role));
    snprintf(i.server_software, sizeof i.server_software, "%s", h.software);
    snprintf(i.path, sizeof i.path, "%s%s%s", conn_path(c->conn), c->staging ? "; staging " : "",
             c->staging ? pool_note(c->staging) : "");
    memcpy(out, &i, out->size < sizeof i ? out->size : sizeof i);
    return client_leave(0, &e, error);
}
