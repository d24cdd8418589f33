/* SPDX-License-Identifier: Apache-2.0 */
#include "server/obs/metrics.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *kind, *help;
} metrics[METRIC_COUNT] = {
#define METRIC(name, kind, help) {#name, #kind, help},
#include "server/obs/metrics.def"
#undef METRIC
};

static _Atomic int64_t values[METRIC_COUNT];

void metric_add(enum metric m, int64_t n)
{
    atomic_fetch_add_explicit(&values[m], n, memory_order_relaxed);
}

void metric_set(enum metric m, int64_t v)
{
    atomic_store_explicit(&values[m], v, memory_order_relaxed);
}

int64_t metric_get(enum metric m)
{
    return atomic_load_explicit(&values[m], memory_order_relaxed);
}

const char *metric_name(enum metric m)
{
    return metrics[m].name;
}

const char *metric_help(enum metric m)
{
    return metrics[m].help;
}

void metrics_text(struct buf *out)
{
    for (enum metric m = 0; m < METRIC_COUNT; m++) {
        char line[512];
        int n = snprintf(line, sizeof line, "# HELP larder_%s %s\n# TYPE larder_%s %s\nlarder_%s %lld\n",
                         metrics[m].name, metrics[m].help, metrics[m].name, metrics[m].kind, metrics[m].name,
                         (long long)metric_get(m));
        buf_put(out, line, (size_t)n);
    }
}
