/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler of one loop: decides which data operation may start next. Pure: no clock, no I/O, no threads;
 * the caller passes the time and is called back only from sched_pump.
 *
 * Classes are served by priority, restore > feed > save > scrub, but each has a floor: a class that has work
 * waiting and has had less than its floor's share of the bytes admitted recently goes first. So nothing
 * starves, and what nobody claims goes to the highest class. Within a class tenants share by weight
 * (start-time fair queueing: the flow with the least bytes / weight is next). A tenant may be capped in
 * bytes per second over all classes (token bucket).
 *
 * What is bounded is the bytes in flight: an item counts from its admission until sched_release. One item is
 * always let through when nothing is in flight, whatever its size.
 */
#ifndef LARDER_SCHED_H
#define LARDER_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/list.h"

enum sched_class { CLASS_RESTORE, CLASS_FEED, CLASS_SAVE, CLASS_SCRUB, SCHED_CLASSES };
const char *sched_class_name(enum sched_class c);

struct sched;
struct sched_tenant; /* owned by the scheduler, valid until sched_destroy */

struct sched_options {
    uint64_t in_flight_bytes_max;          /* > 0 */
    uint32_t floor_percent[SCHED_CLASSES]; /* together at most 100; all 0: the defaults 40, 25, 20, 5 */
};

must_check int sched_create(const struct sched_options *o, struct sched **out);
void sched_destroy(struct sched *s); /* nothing queued or in flight */

/* The tenant's entry, made on first use with weight 1 and no cap. NULL: no memory. */
must_check struct sched_tenant *sched_tenant(struct sched *s, const char *name);
/* weight >= 1; cap in bytes per second, 0: none. */
void sched_tenant_set(struct sched_tenant *t, uint32_t weight, uint64_t cap_bytes_s);

/* One operation; embedded in the caller's struct, zeroed before first use. */
struct sched_item {
    void (*admit)(struct sched_item *item); /* from sched_pump; may queue and release items */
    uint64_t bytes;
    /* Private. */
    struct list link;
    struct sched_tenant *tenant;
    enum sched_class class;
    uint8_t state;
    uint64_t queued_at_ms;
};

void sched_queue(struct sched *s, struct sched_item *item, enum sched_class c, struct sched_tenant *t,
                 uint64_t now_ms);
/* Ends the item in any state: takes it off the queue, or gives its bytes back. Harmless if it is neither. */
void sched_release(struct sched *s, struct sched_item *item);
bool sched_is_queued(const struct sched_item *item);
/* Admits what fits. Returns the time at which a capped tenant may go on and pump is to be called again; 0 if
 * nothing waits for time to pass. */
uint64_t sched_pump(struct sched *s, uint64_t now_ms);

struct sched_figures {
    uint64_t queued, queued_bytes, in_flight_bytes;
    uint64_t admitted, admitted_bytes; /* since start */
    uint64_t waited_ms, waited_ms_max; /* of admitted items: sum and longest */
};
void sched_figures(const struct sched *s, enum sched_class c, struct sched_figures *out);

#endif
