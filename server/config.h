/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larderd's configuration: an INI file. larderd.conf(5) describes every key; the table in config.c is the
 * list. Unknown sections and keys, keys given twice and values out of range are refused with file and line.
 * Relative paths in it are relative to the folder of the file.
 */
#ifndef LARDER_CONFIG_H
#define LARDER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/log.h"
#include "server/session/server.h"

#define LOOPS_MAX     16u
#define PUBLISHED_MAX 256u
#define CAPS_MAX      256u

struct config {
    char *listen[LISTEN_MAX]; /* owned, as all strings here */
    size_t listen_count;
    char *store;
    char *certificate, *key, *ca; /* paths */
    char *log;                    /* path; NULL: standard error */
    uint32_t log_level;           /* enum log_level */
    bool worker_pool;             /* io = pool */
    bool bulk_lane;               /* sealed chunks on plain connections; default: yes */
    uint32_t loops;               /* 0: one per processor, at most LOOPS_MAX */
    uint64_t space_reserve_bytes;
    uint32_t join_wait_ms, check_wait_ms, segment_idle_ms, stop_wait_ms;
    uint64_t buffers_bytes;
    struct server_limits limits;
    struct published_dir published[PUBLISHED_MAX];
    size_t published_count;
    struct tenant_cap caps[CAPS_MAX];
    size_t cap_count;
    struct config *before; /* for who reads it several times */
};

/* On failure nothing is left to free. */
must_check int config_read(const char *path, struct config **out, struct err *e);
/* The same of a text; name stands for the file in errors, folder for its folder. */
must_check int config_parse(const char *text, const char *name, const char *folder, struct config **out,
                            struct err *e);
void config_free(struct config *c); /* NULL allowed */

/* "4096", "64K", "2G", "1T", with or without iB: powers of 1024. 0 or -EINVAL. */
must_check int config_size(const char *text, uint64_t *bytes);
/* "500ms", "30s", "10m", "2h", "1d"; a number alone is seconds. 0 or -EINVAL. */
must_check int config_time(const char *text, uint32_t *ms);

#endif
