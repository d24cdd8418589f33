/* SPDX-License-Identifier: Apache-2.0 */
/* Deadlines of saves, and what a failed save left out. */
#include <errno.h>
#include <string.h>

#include "client/clock.h"
#include "client/saver.h"

uint32_t save_time_left(const struct larder_save *s, uint32_t bound_ms)
{
    if (!s->deadline_ms)
        return bound_ms;
    uint64_t now = clock_ms(), left = s->deadline_ms > now ? s->deadline_ms - now : 1;
    return left < bound_ms ? (uint32_t)left : bound_ms;
}

/* Bytes of tensor i that the server did not have when the save failed. */
static uint64_t bytes_left(const struct larder_save *s, uint32_t i)
{
    uint64_t left = 0;
    struct tensor t;
    snapshot_get(&s->snapshot, i, &t);
    if (!index_large(t.bytes))
        return t.bytes > 0 && !s->stored[t.first_chunk] ? t.bytes : 0;
    for (uint64_t at = 0, chunk = t.first_chunk; at < t.bytes; at += CHUNK_PLAIN_BYTES_MAX, chunk++)
        if (!s->stored[chunk])
            left += s->snapshot.chunks[chunk].bytes;
    return left;
}

/* Where nothing is left the index may be sealed, and tells nothing of the tensors any more. */
static uint64_t all_left(const struct larder_save *s)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->snapshot.chunk_count; i++)
        if (!s->stored[i])
            bytes += s->snapshot.chunks[i].bytes;
    return bytes;
}

struct save_left save_left(const struct larder_save *s)
{
    struct save_left out = {.bytes = all_left(s)};
    const struct snapshot *x = &s->snapshot;
    for (uint32_t i = 0; out.bytes > 0 && i < x->tensor_count; i++)
        if (bytes_left(s, i) > 0 && out.tensors++ == 0)
            out.first = snapshot_name(x, i);
    return out;
}

/* With the lock held. */
static void fail_late(struct larder_save *s)
{
    char name[160] = "";
    struct err over;
    err_set(&over, ERR_TIMEOUT, "the time that the save had is over");
    save_fail(s, &over);
    struct save_left left = save_left(s);
    if (left.first.n > 0)
        err_quote(name, sizeof name, left.first.p, left.first.n);
    err_set(&s->err, ERR_TIMEOUT,
            "the %u ms that it had are over with %llu of %llu bytes not stored, of %u tensors (%s%s%s; "
            "larder_save_left_out names them); nothing is committed",
            s->given_ms, (unsigned long long)left.bytes, (unsigned long long)s->snapshot.plain_bytes,
            left.tensors, left.first.n > 0 ? "\"" : "none", name, left.first.n > 0 ? "\", ..." : "");
}

void *save_watch(void *arg)
{
    struct larder_save *s = arg;
    struct saver *v = s->saver;
    pthread_setname_np(pthread_self(), "larder-watch");
    pthread_mutex_lock(&v->lock);
    while (!s->over && !s->failed && clock_wait(&v->changed, &v->lock, s->deadline_ms))
        ;
    if (!s->over && !s->failed && !s->sealed)
        fail_late(s);
    pthread_mutex_unlock(&v->lock);
    return NULL;
}

int larder_save_left_out(struct larder_save *s, size_t i, const char **name)
{
    struct err e;
    if (!s || client_enter(s->client, &e) < 0)
        return -EINVAL;
    struct saver *v = s->saver;
    struct snapshot *x = &s->snapshot;
    int rc = -ENOENT;
    pthread_mutex_lock(&v->lock);
    bool any = s->failed && s->stored && all_left(s) > 0;
    bool on = s->left_at > 0 && s->left_index <= i; /* goes on where the last call found something */
    size_t n = on ? s->left_index : 0;
    for (size_t k = on ? s->left_at : 0; any && k < x->tensor_count; k++) {
        if (bytes_left(s, (uint32_t)k) == 0 || n++ != i)
            continue;
        s->left_at = k;
        s->left_index = i;
        *name = snapshot_string(x, (uint32_t)k);
        rc = *name ? 0 : -ENOMEM;
        break;
    }
    pthread_mutex_unlock(&v->lock);
    return rc;
}
