/* SPDX-License-Identifier: Apache-2.0 */
/* Feeds that hand out batches in device memory: what the rest of a feed needs to know of it. */
#ifndef LARDER_CLIENT_FEED_LIFT_H
#define LARDER_CLIENT_FEED_LIFT_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"

struct feed_lift;
struct larder_feed;
struct larder_batch;

/* f->lift, with a ring of so many bytes on the device; registers the feed's pool. It is there also after a
 * failure. */
must_check int feed_lift_create(struct larder_feed *f, int device, uint64_t bytes, struct err *e);
must_check int feed_lift_start(struct larder_feed *f); /* the thread; 0 or a positive errno */
void feed_lift_stop(struct larder_feed *f);            /* joins it, once the feed is closing */
/* Then, when all batches are released: waits, bounded, until nothing of the feed is under way on the device.
 * False: something may be; then the feed's pool and the lift stay (device_keep). */
must_check bool feed_lift_settle(struct larder_feed *f);
void feed_lift_free(struct feed_lift *l); /* after the pool; NULL allowed */

/* With the feed's lock held; without a device they do nothing. */
void feed_lift_wake(struct larder_feed *f);        /* a batch is complete, or the feed is closing */
void feed_lift_drop(struct larder_batch *b);       /* the batch's device memory goes back */
bool feed_lift_full(const struct larder_feed *f);  /* released batches are what the next one waits for */
int feed_lift_device(const struct larder_feed *f); /* there is one */

#endif
