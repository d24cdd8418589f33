/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of the training job. It owns some rows of every parameter and of Adam's two moments: it updates and
 * saves those, and no others. Gradients are made per micro-batch and summed in the order of micro-batches, so
 * the result is the same on 1, 2, 3, 4, 6 or 12 ranks.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/demo/demo.h"
#include "tools/demo/model.h"

#define PENDING_MAX 4
#define WAIT_MS     60000

struct rank {
    const struct job *job;
    struct world *world;
    unsigned rank;
    struct larder *larder;
    struct larder_feed *feed;
    struct model_work *work;
    float *m, *v; /* whole arrays, of which this rank's rows are used */
    struct param params[MODEL_PARAMS];
    struct {
        struct larder_save *save;
        uint64_t step;
    } pending[PENDING_MAX];
    struct rank_figures *figures;
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u + b;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int complain(const struct rank *r, const char *doing, const struct larder_error *e)
{
    demo_error("rank %u: %s: %s", r->rank, doing, e->text);
    return -(e->errnum ? e->errnum : EIO);
}

/* This rank's rows of a parameter: [first, first + count). */
static uint64_t rows_of(const struct rank *r, const struct param *p, uint64_t *count)
{
    unsigned world = r->world->ranks;
    uint64_t first = p->shape[0] * r->rank / world;
    *count = p->shape[0] * (r->rank + 1) / world - first;
    return first;
}

/* The box of parameter i that this rank owns, in the array at `base` (weights or a moment). */
static void box_of(const struct rank *r, int i, const char *name, float *base, struct larder_tensor *t)
{
    const struct param *p = &r->params[i];
    *t = (struct larder_tensor){.name = name, .dtype = LARDER_F32, .dims = p->dims};
    t->shape[0] = p->shape[0];
    t->offsets[0] = rows_of(r, p, &t->lengths[0]);
    if (p->dims == 2)
        t->shape[1] = t->lengths[1] = p->shape[1];
    t->data = base + p->offset + t->offsets[0] * p->shape[1];
}

/* ---- saving -------------------------------------------------------------------------------------------- */

static const char *const kinds[] = {"model", "adam.m", "adam.v"};

/* Calls f for the boxes of weights and moments. */
static int each_box(struct rank *r, int (*f)(void *to, const struct larder_tensor *t, struct larder_error *e),
                    void *to, struct larder_error *e)
{
    float *bases[] = {r->world->weights, r->m, r->v};
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < MODEL_PARAMS; i++) {
            char name[64];
            struct larder_tensor t;
            snprintf(name, sizeof name, "%s/%s", kinds[kind], r->params[i].name);
            box_of(r, i, name, bases[kind], &t);
            int status = f(to, &t, e);
            if (status < 0)
                return status;
        }
    return 0;
}

static int add_to_save(void *to, const struct larder_tensor *t, struct larder_error *e)
{
    return larder_save_tensor(to, t, e);
}

static int add_to_restore(void *to, const struct larder_tensor *t, struct larder_error *e)
{
    return larder_restore_add(to, t, e);
}

/* Notes the figures of a save that is over and frees it. */
static int save_over(struct rank *r, int i, struct larder_error *e)
{
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    int status = larder_save_info(r->pending[i].save, &info);
    if (status == 0 && info.state == LARDER_SAVE_FAILED) {
        *e = info.error;
        status = -(e->errnum ? e->errnum : EIO);
    } else if (status == 0 && r->figures->save_count < WORLD_SAVES_MAX) {
        r->figures->saves[r->figures->save_count++] =
            (struct save_figures){.step = r->pending[i].step,
                                  .stall_s = info.stall_seconds,
                                  .durable_s = info.durable_seconds,
                                  .plain_bytes = info.plain_bytes,
                                  .stored_bytes = info.stored_bytes};
    }
    larder_save_free(r->pending[i].save);
    r->pending[i].save = NULL;
    return status;
}

/* Looks after saves in flight, without waiting (timeout_ms 0) or until they are over. */
static int saves_poll(struct rank *r, int timeout_ms)
{
    struct larder_error e = {0};
    for (int i = 0; i < PENDING_MAX; i++) {
        struct larder_save_info info = LARDER_INIT(larder_save_info);
        if (!r->pending[i].save)
            continue;
        int status = larder_save_info(r->pending[i].save, &info);
        if (status == 0 && info.state < LARDER_SAVE_DURABLE) {
            if (timeout_ms == 0)
                continue;
            if ((status = larder_save_wait(r->pending[i].save, timeout_ms, &e)) < 0)
                return complain(r, "waiting for a save", &e);
        }
        if ((status = save_over(r, i, &e)) < 0)
            return complain(r, "save", &e);
    }
    return 0;
}

static void saves_cancel(struct rank *r, const char *reason)
{
    for (int i = 0; i < PENDING_MAX; i++)
        if (r->pending[i].save) {
            struct larder_error e;
            (void)larder_save_cancel(r->pending[i].save, reason, &e);
            larder_save_free(r->pending[i].save);
            r->pending[i].save = NULL;
        }
}

static int save(struct rank *r, uint64_t step)
{
    const struct job *j = r->job;
    uint8_t state[LARDER_STATE_BYTES];
    char loss[16];
    int state_bytes = larder_feed_state(r->feed, state), slot = 0, status;
    snprintf(loss, sizeof loss, "%.4f", (double)r->world->loss[step - 1]);
    const char *const labels[] = {"job", j->title, "loss", loss, NULL};
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    struct larder_error e = {0};
    if (state_bytes < 0)
        return state_bytes;
    while (slot < PENDING_MAX && r->pending[slot].save)
        slot++;
    if (slot == PENDING_MAX) {
        if ((status = saves_poll(r, WAIT_MS)) < 0)
            return status;
        slot = 0;
    }
    o.run = j->run;
    o.step = step;
    o.rank = r->rank;
    o.world = j->ranks;
    memcpy(o.attempt, j->attempt, sizeof o.attempt);
    o.loader_state = state;
    o.loader_state_bytes = (size_t)state_bytes;
    o.labels = labels;
    if ((status = larder_save_begin(r->larder, &o, &s, &e)) < 0)
        return complain(r, "beginning a save", &e);
    if ((status = each_box(r, add_to_save, s, &e)) ==
        0) /* the output layer is the token table: tied weights */
        status = larder_save_alias(s, "model/output.weight", "model/tokens.weight", &e);
    if (status == 0 && r->rank == 0)
        status = larder_save_blob(s, "loss", r->world->loss, step * sizeof(float), &e);
    if (status == 0)
        status = larder_save_submit(s, &e);
    if (status < 0) {
        larder_save_free(s);
        return complain(r, "save", &e);
    }
    r->pending[slot].save = s;
    r->pending[slot].step = step;
    atomic_store(&r->world->staged[r->rank], step);
    return 0;
}

/* ---- starting and resuming -------------------------------------------------------------------------------
 */

static int restore(struct rank *r, struct larder_restore_info *info)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *from = NULL;
    struct larder_error e = {0};
    void *loss = NULL;
    size_t loss_bytes = 0;
    o.run = r->job->run;
    o.at = LARDER_AT_LATEST;
    int status = larder_restore_open(r->larder, &o, &from, &e);
    if (status < 0)
        return complain(r, "opening the checkpoint", &e);
    if ((status = larder_restore_info(from, info)) < 0 ||
        (status = each_box(r, add_to_restore, from, &e)) < 0 || (status = larder_restore_run(from, &e)) < 0)
        goto out;
    if (r->rank == 0) {
        if ((status = larder_restore_blob(from, 0, "loss", &loss, &loss_bytes, &e)) < 0)
            goto out;
        if (loss_bytes > r->world->steps * sizeof(float)) {
            snprintf(e.text, sizeof e.text,
                     "the checkpoint holds %zu bytes of loss, more than %llu steps have", loss_bytes,
                     (unsigned long long)r->world->steps);
            status = -EINVAL;
            goto out;
        }
        memcpy(r->world->loss, loss, loss_bytes);
        r->world->first_step = info->step;
    }
    r->figures->resumed_step = info->step;
    r->figures->resumed_sequence = info->sequence;
out:
    if (status < 0)
        status = complain(r, "restoring", &e);
    free(loss);
    larder_restore_close(from);
    return status;
}

static int begin(struct rank *r)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_feed_options f = LARDER_INIT(larder_feed_options);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    struct larder_error e = {0};
    o.staging_bytes = 32 << 20;
    int status = larder_open(&o, &r->larder, &e);
    if (status < 0)
        return complain(r, "connecting", &e);
    if (r->job->resume) {
        if ((status = restore(r, &info)) < 0)
            return status;
        f.state = info.loader_state;
        f.state_bytes = info.loader_state_bytes;
    } else if (r->rank == 0) {
        model_init(r->world->weights, r->job->seed);
    }
    f.dataset = r->job->dataset;
    f.seed = r->job->seed;
    f.rank = r->rank;
    f.world = r->job->ranks;
    f.global_batch = WORLD_MICROS * r->job->per_micro;
    f.epochs = 1000000;
    f.depth_bytes = 8 << 20;
    if ((status = larder_feed_open(r->larder, &f, &r->feed, &e)) < 0)
        return complain(r, "opening the feed", &e);
    struct larder_feed_info fi = LARDER_INIT(larder_feed_info);
    if (larder_feed_info(r->feed, &fi) == 0) {
        r->figures->resumed_epoch = fi.epoch;
        r->figures->resumed_position = fi.position;
    }
    return 0;
}

/* ---- a step -------------------------------------------------------------------------------------------- */

/* The context-sized piece of a sample that global step and place in the batch choose: no matter which rank
 * trains on it. Short texts are followed by line ends. */
static void cut_text(const struct job *j, uint64_t step, uint64_t place, const struct larder_field *field,
                     uint8_t text[MODEL_CONTEXT + 1])
{
    size_t from = 0, n = MODEL_CONTEXT + 1;
    if (field->bytes > n)
        from = mix(mix(j->seed, step), place) % (field->bytes - n + 1);
    else
        n = field->bytes;
    memset(text, '\n', MODEL_CONTEXT + 1);
    memcpy(text, (const uint8_t *)field->data + from, n);
}

/* Gradients and losses of this rank's micro-batches into their slots. */
static int learn_batch(struct rank *r, uint64_t step, const struct larder_batch *b)
{
    const struct job *j = r->job;
    unsigned micros = WORLD_MICROS / j->ranks, first = micros * r->rank;
    float scale = 1.0f / (float)(MODEL_CONTEXT * WORLD_MICROS * j->per_micro);
    if (larder_batch_samples(b) != (size_t)micros * j->per_micro) {
        demo_error("rank %u: step %llu: a batch of %zu samples, expected %u", r->rank,
                   (unsigned long long)step, larder_batch_samples(b), micros * j->per_micro);
        return -EPROTO;
    }
    for (unsigned micro = first; micro < first + micros; micro++) {
        float *slot = r->world->slots + micro * r->world->floats, loss = 0;
        memset(slot, 0, r->world->floats * sizeof *slot);
        for (unsigned i = 0; i < j->per_micro; i++) {
            struct larder_sample s;
            uint8_t text[MODEL_CONTEXT + 1];
            int status = larder_batch_sample(b, (micro - first) * j->per_micro + i, &s);
            const struct larder_field *field = status < 0 ? NULL : larder_sample_field(&s, "txt");
            if (!field) {
                demo_error("rank %u: step %llu: a sample without a field \"txt\"", r->rank,
                           (unsigned long long)step);
                return -EBADMSG;
            }
            cut_text(j, step, (uint64_t)micro * j->per_micro + i, field, text);
            loss += model_learn(r->work, r->world->weights, text, scale, slot);
        }
        r->world->micro_loss[micro] = loss / (float)j->per_micro;
    }
    return 0;
}

/* Sums the slots in their order into slot 0 and updates this rank's rows. */
static void update_rows(struct rank *r, uint64_t step)
{
    struct world *w = r->world;
    float warm = step < 20 ? (float)step / 20 : 1, left = 1 - (float)step / (float)w->steps;
    struct adam a = {
        .rate = 8e-3f * warm * (0.1f + 0.9f * left), .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f};
    for (int i = 0; i < MODEL_PARAMS; i++) {
        const struct param *p = &r->params[i];
        uint64_t rows, from = p->offset + rows_of(r, p, &rows) * p->shape[1], n = rows * p->shape[1];
        for (int micro = 1; micro < WORLD_MICROS; micro++)
            for (uint64_t x = from; x < from + n; x++)
                w->slots[x] += w->slots[(size_t)micro * w->floats + x];
        adam_update(&a, step, w->slots + from, w->weights + from, r->m + from, r->v + from, n);
    }
}

static int barrier(struct rank *r, uint64_t step)
{
    unsigned dead = 0;
    int status = world_barrier(r->world, r->rank, &dead);
    if (status == -EOWNERDEAD) {
        char reason[64];
        snprintf(reason, sizeof reason, "rank %u died in step %llu", dead, (unsigned long long)step);
        saves_cancel(r, reason);
    } else if (status < 0) {
        demo_error("rank %u: step %llu: the other ranks did not come within %d s", r->rank,
                   (unsigned long long)step, WORLD_WAIT_S);
    }
    return status;
}

static int train_step(struct rank *r, uint64_t step)
{
    struct larder_batch *b = NULL;
    struct larder_error e = {0};
    int status = larder_feed_next(r->feed, WAIT_MS, &b, &e);
    if (status <= 0) {
        if (status == 0)
            snprintf(e.text, sizeof e.text, "the feed ended before step %llu", (unsigned long long)step);
        return complain(r, "next batch", &e);
    }
    model_prepare(r->work, r->world->weights);
    status = learn_batch(r, step, b);
    larder_batch_release(b);
    if (status < 0 || (status = barrier(r, step)) < 0)
        return status;
    update_rows(r, step);
    if (r->rank == 0) {
        float loss = 0;
        for (int i = 0; i < WORLD_MICROS; i++)
            loss += r->world->micro_loss[i];
        r->world->loss[step - 1] = loss / WORLD_MICROS;
        atomic_store(&r->world->step, step);
    }
    return barrier(r, step);
}

static int train(struct rank *r)
{
    struct world *w = r->world;
    int status = barrier(r, 0);
    if (r->rank == 0)
        w->begun_s = clock_s();
    for (uint64_t step = w->first_step + 1; step <= w->steps && status == 0; step++) {
        if ((status = train_step(r, step)) == 0 && step % r->job->save_every == 0)
            status = save(r, step);
        if (status == 0)
            status = saves_poll(r, 0);
    }
    if (r->rank == 0)
        w->ended_s = clock_s();
    return status < 0 ? status : saves_poll(r, WAIT_MS);
}

static void note_feed(struct rank *r)
{
    struct larder_feed_info i = LARDER_INIT(larder_feed_info);
    if (!r->feed || larder_feed_info(r->feed, &i) < 0)
        return;
    r->figures->starved_network_s = i.starved_seconds.network;
    r->figures->starved_disk_s = i.starved_seconds.disk;
    r->figures->starved_decode_s = i.starved_seconds.decode;
    r->figures->feed_full_s = i.starved_seconds.consumer;
    r->figures->samples = i.samples_out;
    r->figures->bytes = i.bytes_out;
    snprintf(r->figures->path, sizeof r->figures->path, "%s", i.path);
}

int rank_main(const struct job *j, struct world *w, unsigned rank)
{
    struct rank r = {.job = j, .world = w, .rank = rank, .figures = &w->figures[rank]};
    struct larder_error e = {0};
    int status = world_enter(w, rank);
    model_params(r.params);
    r.work = model_work_create();
    r.m = calloc(w->floats, sizeof *r.m);
    r.v = calloc(w->floats, sizeof *r.v);
    if (status < 0 || !r.work || !r.m || !r.v) {
        demo_error("rank %u: no memory", rank);
        status = -ENOMEM;
        goto out;
    }
    if ((status = begin(&r)) == 0)
        status = train(&r);
    note_feed(&r);
out:
    larder_feed_close(r.feed);
    if (r.larder && larder_close(r.larder, status < 0 ? 0 : WAIT_MS, &e) < 0 && status == 0)
        status = complain(&r, "closing", &e);
    model_work_free(r.work);
    free(r.m);
    free(r.v);
    if (status == -EOWNERDEAD)
        return DEMO_EXIT_LOST;
    if (status == 0)
        world_leave(w, rank);
    return status < 0 ? 1 : 0;
}
