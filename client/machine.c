/* SPDX-License-Identifier: Apache-2.0 */
/* larder_machine*: what this machine has for device memory, and which way the bytes of each use go here. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/client.h"
#include "gpudirect/cufile.h"
#include "gpudirect/file.h"
#include "gpudirect/kernels.h"
#include "gpudirect/kernels_image.h"
#include "gpudirect/pool.h"

#define TRIAL_BYTES (4u << 20) /* of pinned memory */

int larder_machine(struct larder_machine *out)
{
    struct larder_machine m = {.size = out->size};
    struct memory_probe cuda;
    struct cufile_probe cufile;
    memory_probe(MEMORY_CUDA, &cuda);
    cufile_probe(&cufile);
    m.devices = cuda.usable ? cuda.devices : 0;
    m.has_kernels = kernels_image() != NULL;
    m.driver_version = cuda.driver_version;
    m.cufile = !cufile.usable      ? LARDER_CUFILE_ABSENT
               : cufile.compatible ? LARDER_CUFILE_COMPATIBLE
                                   : LARDER_CUFILE_DIRECT;
    snprintf(m.cuda_note, sizeof m.cuda_note, "%s", cuda.note);
    snprintf(m.cufile_note, sizeof m.cufile_note, "%s", cufile.note);
    snprintf(m.kernels_note, sizeof m.kernels_note, "%s", kernels_image_note());
    memcpy(out, &m, out->size < sizeof m ? out->size : sizeof m);
    return 0;
}

/* ---- devices ---- */

/* Can host memory be pinned for it? how: in words, or why not. */
static int try_pinning(struct memory *m, bool *pins, char *how, size_t size, struct err *e)
{
    struct pool *p = NULL;
    struct err why;
    int rc = pool_create(TRIAL_BYTES, TRIAL_BYTES, &p, e);
    if (rc < 0)
        return rc;
    *pins = pool_register(p, m, &why) == 0;
    snprintf(how, size, "%s", *pins ? pool_note(p) : why.text);
    pool_destroy(p);
    return memory_lost(m, e);
}

static int try_device(struct memory *m, struct larder_device *d, struct err *e)
{
    struct kernels *k = NULL;
    struct err why;
    bool pins = false;
    if (kernels_open(m, kernels_image(), &k, &why) == 0)
        snprintf(d->kernels, sizeof d->kernels, "loaded");
    else
        snprintf(d->kernels, sizeof d->kernels, "%s", why.text);
    d->has_kernels = k != NULL;
    kernels_close(k);
    int rc = try_pinning(m, &pins, d->pinned, sizeof d->pinned, e);
    d->pins = pins;
    return rc;
}

int larder_machine_device(int ordinal, struct larder_device *out, struct larder_error *error)
{
    struct larder_device d = {.size = out->size};
    struct memory *m = NULL;
    struct err e;
    err_clear(&e);
    int rc = memory_open(MEMORY_CUDA, ordinal, &m, &e);
    if (rc == 0) {
        const struct memory_info *i = memory_info(m);
        snprintf(d.name, sizeof d.name, "%s", i->name);
        snprintf(d.bus, sizeof d.bus, "%s", i->bus);
        d.bytes = i->bytes;
        d.numa_node = i->numa_node;
        d.major = i->major;
        d.minor = i->minor;
        rc = try_device(m, &d, &e);
    }
    memory_close(m);
    memcpy(out, &d, out->size < sizeof d ? out->size : sizeof d);
    return client_leave(rc, &e, error);
}

/* ---- ways ---- */

/* A file that comes and goes in the folder, opened for device 0. */
static int way_of_files(enum larder_use use, const char *folder, enum memory_kind kind, struct larder_way *w,
                        struct err *e)
{
    static const char *const why[] = {
        [LARDER_USE_SCRATCH] =
            "plain bytes on a disk of this machine: its cores have nothing to do to them but hash",
        [LARDER_USE_LOCAL] = "plain bytes on a disk of this machine; feeds, which want many small pieces, "
                             "read them into a ring in "
                             "host memory first",
    };
    struct memory *m = NULL;
    struct file_access *a = NULL;
    struct file *f = NULL;
    char path[4096];
    snprintf(path, sizeof path, "%.4000s/larder-way-%ld", folder, (long)getpid());
    int rc = memory_open(kind, 0, &m, e);
    if (rc == 0)
        rc = file_access_open(m, FILE_BEST, &a, e);
    if (rc == 0)
        rc = file_open(a, path, FILE_CREATE, &f, e);
    if (rc == 0)
        unlink(path);
    if (rc == 0)
        snprintf(w->way, sizeof w->way,
                 use == LARDER_USE_LOCAL ? "file -> %s memory: %.300s" : "%s memory <-> file: %.300s",
                 kind == MEMORY_HOST ? "host" : "device", file_path(f));
    file_close(f);
    file_access_close(a);
    memory_close(m);
    snprintf(w->why, sizeof w->why, "%s", why[use]);
    return rc;
}

/* On the host every use of the network is copied and worked on; with a device the host's side is pinned, or
 * that is told. */
static int way_of_network(enum larder_use use, enum memory_kind kind, struct larder_way *w, struct err *e)
{
    static const struct {
        const char *from, *through, *to, *why;
    } ways[] = {
        [LARDER_USE_SAVE] = {"%s memory -> ", "staging memory", " -> network",
                             "by design: the host's cores compress and encrypt what is saved, and no device "
                             "or disk does that"},
        [LARDER_USE_RESTORE] = {"network -> ", "host memory", " -> %s memory",
                                "by design: the host's cores verify, decrypt and decode what was saved"},
        [LARDER_USE_FEED] =
            {"network -> ", "ring in host memory", " -> %s memory",
             "by design: the host's cores verify, decrypt and decode shards, and put batches together"},
    };
    struct memory *m = NULL;
    char how[200] = "", part[3][128];
    bool pins = false;
    int rc = memory_open(kind, 0, &m, e);
    if (rc == 0 && kind != MEMORY_HOST)
        rc = try_pinning(m, &pins, how, sizeof how, e);
    memory_close(m);
    if (rc < 0)
        return rc;
    const char *name = kind == MEMORY_HOST ? "host" : "device";
    snprintf(part[0], sizeof part[0], ways[use].from, name);
    snprintf(part[1], sizeof part[1], "%s%s", pins ? "pinned " : "", ways[use].through);
    snprintf(part[2], sizeof part[2], ways[use].to, name);
    if (kind == MEMORY_HOST && use != LARDER_USE_SAVE)
        *part[2] = '\0';
    snprintf(w->way, sizeof w->way, "%s%s%s%s", part[0], part[1], part[2],
             kind == MEMORY_HOST || pins ? "" : "; the host's part is not pinned, which is slower");
    snprintf(w->why, sizeof w->why, "%s", ways[use].why);
    return 0;
}

int larder_machine_way(enum larder_use use, const char *folder, struct larder_way *out,
                       struct larder_error *error)
{
    struct larder_way w = {.size = out->size};
    struct memory_probe cuda;
    struct err e;
    int rc;
    err_clear(&e);
    memory_probe(MEMORY_CUDA, &cuda);
    enum memory_kind kind = cuda.usable ? MEMORY_CUDA : MEMORY_HOST;
    if (use == LARDER_USE_SCRATCH || use == LARDER_USE_LOCAL)
        rc = way_of_files(use, folder ? folder : ".", kind, &w, &e);
    else if (use == LARDER_USE_SAVE || use == LARDER_USE_RESTORE || use == LARDER_USE_FEED)
        rc = way_of_network(use, kind, &w, &e);
    else
        rc = err_set(&e, ERR_INVALID, "%d is not a use; expected %d to %d", (int)use, LARDER_USE_SAVE,
                     LARDER_USE_LOCAL);
    memcpy(out, &w, out->size < sizeof w ? out->size : sizeof w);
    return client_leave(rc, &e, error);
}
