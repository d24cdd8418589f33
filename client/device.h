/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA devices that a client has used: each is opened once and stays so until the client is closed.
 *
 *   save      device -> out -> staging slots     (stage.c)
 *   restore   slots of its own -> in -> device   (restore_device.c)
 *
 * Feeds have streams of their own. One thread at a time gives copies to a stream: it holds the device's lock,
 * which is taken before any other of the client's.
 */
#ifndef LARDER_CLIENT_DEVICE_H
#define LARDER_CLIENT_DEVICE_H

#include "client/client.h"
#include "client/packer.h"
#include "gpudirect/memory.h"
#include "gpudirect/pool.h"

struct device {
    struct device *next;
    struct memory *memory;
    pthread_mutex_t lock;
    struct memory_stream *out, *in;
    struct packer packer_out, packer_in;
};

/* The device of that number. ERR_UNSUPPORTED where there is no driver, or one that is too old; ERR_NOT_FOUND.
 */
must_check int device_get(struct larder *c, int ordinal, struct device **out, struct err *e);
/* The same, for saves: staging memory is registered with it, once. */
must_check int device_get_staged(struct larder *c, int ordinal, struct device **out, struct err *e);
/* Is [low, high) memory of the device, or (NULL) of none? ERR_INVALID says what it is instead. */
must_check int device_check(struct device *d, const uint8_t *low, const uint8_t *high, struct err *e);
/* For memory that a device may still write to or read: it stays where it is, registered, until the process
 * ends, and with it what it needs. NULL allowed. */
void device_keep(struct pool *p, void *needs);
/* When nothing is under way on any of them, and no pool is registered. */
void devices_close(struct larder *c);

#endif
