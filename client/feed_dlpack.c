/* SPDX-License-Identifier: Apache-2.0 */
/* Fields of batches as DLPack tensors: the bytes where they are, which stay until the last of them is
 * deleted. */
#include <errno.h>
#include <stdlib.h>

#include "client/dlpack.h"
#include "client/feed_private.h"

struct exported {
    struct DLManagedTensor tensor;
    int64_t shape[2];
    struct larder_batch *batch;
};

static void delete_exported(struct DLManagedTensor *t)
{
    struct exported *x = t->manager_ctx;
    larder_batch_release(x->batch);
    free(x);
}

static int rows_of(struct larder_batch *b, size_t sample, const char *field, struct exported *x,
                   struct err *e)
{
    if (sample == LARDER_ALL_SAMPLES) {
        struct larder_error why;
        const void *data;
        size_t bytes, rows;
        int rc = larder_batch_stack(b, field, &data, &bytes, &rows, &why);
        x->tensor.dl_tensor.data = (void *)data;
        x->tensor.dl_tensor.ndim = 2;
        x->shape[0] = (int64_t)rows;
        x->shape[1] = (int64_t)bytes;
        return rc < 0 ? err_set(e, (enum err_class)why.kind, "%s", why.text) : 0;
    }
    if (!field)
        return err_set(e, ERR_INVALID, "the name of the field is NULL");
    const struct larder_field *f = sample < b->count ? larder_sample_field(&b->samples[sample], field) : NULL;
    if (!f)
        return err_set(e, ERR_NOT_FOUND, "the batch has %u samples, and number %zu no field \"%s\"", b->count,
                       sample, field);
    x->tensor.dl_tensor.data = (void *)f->data;
    x->tensor.dl_tensor.ndim = 1;
    x->shape[0] = (int64_t)f->bytes;
    return 0;
}

int larder_batch_dlpack(struct larder_batch *b, size_t sample, const char *field,
                        struct DLManagedTensor **out, struct larder_error *error)
{
    struct err e = {0};
    struct larder_feed *f = b->feed;
    struct exported *x = calloc(1, sizeof *x);
    int rc = client_enter(f->client, &e);
    if (rc == 0)
        rc = x ? rows_of(b, sample, field, x, &e) : err_set(&e, ERR_NO_MEMORY, "no memory for a tensor");
    if (rc < 0) {
        free(x);
        return client_leave(rc, &e, error);
    }
    struct dl_tensor *t = &x->tensor.dl_tensor;
    t->device.device_type = b->lifted ? DL_CUDA : DL_CPU;
    t->device.device_id = b->lifted ? feed_lift_device(f) : 0;
    t->dtype.code = DL_UINT;
    t->dtype.bits = 8;
    t->dtype.lanes = 1;
    t->shape = x->shape;
    x->tensor.manager_ctx = x;
    x->tensor.deleter = delete_exported;
    x->batch = b;
    pthread_mutex_lock(&f->lock);
    b->references++;
    pthread_mutex_unlock(&f->lock);
    *out = &x->tensor;
    return client_leave(0, &e, error);
}
