/* SPDX-License-Identifier: Apache-2.0 */
/* Scratch files of device memory, by every way that is there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/gpu/gpu.h"

static void measure_way(struct bench *b, const char *name, int bounce, void *device, const uint8_t *host,
                        uint8_t *found)
{
    char path[4200], what[96];
    struct larder_scratch_options o = LARDER_INIT(larder_scratch_options);
    struct larder_scratch_info w = LARDER_INIT(larder_scratch_info), r = LARDER_INIT(larder_scratch_info);
    struct larder_tensor t = {.name = "x",
                              .dtype = LARDER_U8,
                              .dims = 1,
                              .shape = {b->bytes},
                              .data = device,
                              .memory = LARDER_MEMORY_CUDA,
                              .device = memory_ordinal(b->m),
                              .stream = memory_stream_handle(b->s)};
    struct larder_error e;
    o.bounce = bounce;
    snprintf(path, sizeof path, "%s/scratch-%ld", b->folder, (long)getpid());
    upload(b, device, host, b->bytes);
    int rc = larder_scratch_write(path, &t, 1, &o, &w, &e);
    memset(found, 0, b->bytes);
    upload(b, device, found, b->bytes);
    if (rc == 0)
        rc = larder_scratch_read(path, &t, 1, &o, &r, &e);
    unlink(path);
    if (rc < 0) {
        row_failed(b, name, e.text);
        return;
    }
    download(b, found, device, b->bytes);
    bool same = memcmp(found, host, b->bytes) == 0;
    char *end = strchr(w.path, ';'); /* the device's way comes first */
    if (end)
        *end = '\0';
    snprintf(what, sizeof what, "scratch file, written and synced, %s", name);
    row(b, what, same, w.path, "%.2f GB/s", gbps(b->bytes, w.seconds));
    snprintf(what, sizeof what, "scratch file, read, %s", name);
    row(b, what, same, "", "%.2f GB/s", gbps(b->bytes, r.seconds));
}

void measure_files(struct bench *b)
{
    void *device = NULL;
    uint8_t *host = host_alloc(b->bytes), *found = host_alloc(b->bytes);
    struct larder_machine m = LARDER_INIT(larder_machine);
    struct err e;
    (void)larder_machine(&m);
    fill(host, b->bytes, 4);
    must(memory_alloc(b->m, b->bytes, &device, &e), &e, "device memory");
    measure_way(b, "bounce", 1, device, host, found);
    if (m.cufile != LARDER_CUFILE_ABSENT)
        measure_way(b, "cuFile", 0, device, host, found);
    memory_free(b->m, device);
    free(host);
    free(found);
}
