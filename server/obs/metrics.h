/* SPDX-License-Identifier: Apache-2.0 */
/* Counters and gauges of the process, safe to touch from every loop. The list is metrics.def. */
#ifndef LARDER_METRICS_H
#define LARDER_METRICS_H

#include <stdint.h>

#include "format/base/cursor.h"

enum metric {
#define METRIC(name, kind, help) METRIC_##name,
#include "server/obs/metrics.def"
#undef METRIC
    METRIC_COUNT
};

void metric_add(enum metric m, int64_t n);
void metric_set(enum metric m, int64_t v);
int64_t metric_get(enum metric m);
const char *metric_name(enum metric m);
const char *metric_help(enum metric m);

/* Text exposition format of Prometheus, version 0.0.4, each name prefixed with larder_. */
void metrics_text(struct buf *out);

#endif
