/* SPDX-License-Identifier: Apache-2.0 */
#include "server/io/inbox.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

int inbox_init(struct inbox *i)
{
    *i = (struct inbox){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (i->fd < 0)
        return -errno;
    i->end = &i->first;
    list_init(&i->finished);
    int status = pthread_mutex_init(&i->lock, NULL);
    if (status)
        close(i->fd);
    return -status;
}

void inbox_fini(struct inbox *i)
{
    pthread_mutex_destroy(&i->lock);
    close(i->fd);
}

/* Called with the lock held, so that a loop which has seen what was sent cannot be gone before the bell. */
static void ring_bell(struct inbox *i)
{
    if (i->rung)
        return;
    uint64_t one = 1;
    i->rung = true;
    while (write(i->fd, &one, sizeof one) < 0)
        check(errno == EINTR || errno == EAGAIN); /* EAGAIN: the counter is full, so the bell is ringing */
}

void inbox_post(struct inbox *i, struct loop_msg *m, bool ring)
{
    m->next = NULL;
    pthread_mutex_lock(&i->lock);
    *i->end = m;
    i->end = &m->next;
    if (ring)
        ring_bell(i);
    pthread_mutex_unlock(&i->lock);
}

void inbox_finish(struct inbox *i, struct io_op *op)
{
    pthread_mutex_lock(&i->lock);
    list_add_tail(&i->finished, &op->link);
    ring_bell(i);
    pthread_mutex_unlock(&i->lock);
}

void inbox_empty(struct inbox *i, struct loop_msg ***end, struct list *finished)
{
    struct list *entry;
    pthread_mutex_lock(&i->lock);
    if (i->rung) {
        uint64_t count;
        while (read(i->fd, &count, sizeof count) < 0 && errno == EINTR)
            ;
        i->rung = false;
    }
    if (i->first) {
        **end = i->first;
        *end = i->end;
        i->first = NULL;
        i->end = &i->first;
    }
    while ((entry = list_pop(&i->finished)))
        list_add_tail(finished, entry);
    pthread_mutex_unlock(&i->lock);
}
