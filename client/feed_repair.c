/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Samples that could not be read. Once all else of a batch is in place, a worker leaves them out, or reads
 * what stands in for them: the first that can be read of the order that format/order.h names for their
 * position. Which one that is follows from the data, seed and position alone, so every number of ranks, and
 * every repetition, sees the same.
 *
 * Damage is rare, so this reads one field after the other and waits for each.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/dataset_wait.h"
#include "client/feed_private.h"

void feed_hurt_add(struct larder_batch *b, uint32_t row, const struct err *why)
{
    if (b->bad[row])
        return;
    struct feed_hurt *h = calloc(1, sizeof *h), **at = &b->hurt;
    if (!h) {
        err_set(&b->err, ERR_NO_MEMORY, "no memory for noting a damaged sample");
        return;
    }
    const struct larder_sample *s = &b->samples[row];
    *h = (struct feed_hurt){.row = row,
                            .why = *why,
                            .position = s->position,
                            .source = s->dataset,
                            .shard = s->shard,
                            .number = s->number};
    while (*at && (*at)->row < row)
        at = &(*at)->next;
    h->next = *at;
    *at = h;
    b->bad[row] = true;
}

void feed_hurts_free(struct larder_batch *b)
{
    for (struct feed_hurt *h = b->hurt, *next; h; h = next) {
        next = h->next;
        free(h->memory);
        free(h);
    }
    b->hurt = NULL;
}

/* ---- leaving out ---- */

static struct feed_stack *stack_at(const struct larder_batch *b, const struct larder_field *field)
{
    for (uint32_t k = 0; k < b->stack_count; k++)
        if (b->stacks[k].fits && slice_eq(b->stacks[k].name, slice_str(field->name)))
            return &b->stacks[k];
    return NULL;
}

/* Rows of stacks stand one behind the other: they move up. */
static void move_up(struct larder_batch *b, uint32_t to, uint32_t from)
{
    const struct larder_sample *s = &b->samples[from];
    struct larder_field *fields = b->fields + (s->field - b->fields);
    for (uint32_t k = 0; k < s->fields; k++) {
        struct feed_stack *stack = stack_at(b, &fields[k]);
        if (!stack)
            continue;
        memmove(stack->base + to * stack->bytes, fields[k].data, stack->bytes);
        fields[k].data = stack->base + to * stack->bytes;
    }
    b->samples[to] = *s;
}

static void leave_out(struct larder_batch *b)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        if (b->bad[i])
            continue;
        if (kept != i)
            move_up(b, kept, i);
        kept++;
    }
    b->count = kept;
}

/* ---- substitutes ---- */

/* A substitute's description, in one piece of memory: bytes that find no place in the batch, fields, names.
 */
struct found {
    struct larder_feed *f;
    struct larder_batch *b;
    struct feed_hurt *hurt;
    struct dataset_view *view;
    uint64_t number;
    uint32_t fields;
    uint8_t *memory;
};

/* Where a field may go in the batch: where the damaged one had it, or where its row of a stack is. NULL:
 * nowhere. */
static uint8_t *place_of(const struct found *x, const struct sample_field *field)
{
    const struct larder_batch *b = x->b;
    const struct larder_sample *s = &b->samples[x->hurt->row];
    for (uint32_t k = 0; k < b->stack_count; k++) {
        const struct feed_stack *stack = &b->stacks[k];
        if (stack->fits && stack->bytes == field->bytes && slice_eq(stack->name, field->name))
            return stack->base + x->hurt->row * stack->bytes;
    }
    for (uint32_t k = 0; k < s->fields && b->stack_count == 0; k++)
        if (slice_eq(slice_str(s->field[k].name), field->name) && field->bytes <= s->field[k].bytes)
            return b->data + ((const uint8_t *)s->field[k].data - b->data);
    return NULL;
}

static int take_memory(struct found *x, struct err *e)
{
    size_t bytes =
        feed_align(x->fields * sizeof(struct larder_field)) + samples_key(x->view->samples, x->number).n + 1;
    for (uint32_t k = 0; k < x->fields; k++) {
        struct sample_field field = samples_field(x->view->samples, x->number, k);
        bytes += field.name.n + 1 + field.type.n + 1;
        if (field.bytes > SIZE_MAX / 4 || add_overflows(bytes, feed_align(field.bytes), &bytes))
            return err_set(e, ERR_LIMIT, "a sample of more bytes than memory can have");
    }
    x->memory = aligned_alloc(FEED_ALIGN, feed_align(bytes));
    return x->memory ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a substitute of %zu bytes", bytes);
}

/* As patient as any other read of the feed, but not once it is closed. */
static int read_field(struct larder_feed *f, struct dataset_view *v, const struct sample_field *field,
                      uint8_t *to, struct err *e)
{
    struct larder_dataset *d = v->dataset;
    uint64_t begin = clock_ms();
    unsigned pause_ms = 0;
    bool again = true; /* damage on the way, or in a cache, is gone the second time */
    while (field->bytes) {
        err_clear(e);
        int64_t got = dataset_bytes(d, v->shard, field->offset, to, (size_t)field->bytes, 0, e);
        if (got >= 0)
            break;
        if (feed_is_damage(e) && again) {
            again = false;
            continue;
        }
        if (!ranged_read_retriable(e) || d->closing ||
            clock_ms() - begin >= client_options(f->client)->reconnect_ms)
            return (int)got;
        pause_between(&pause_ms);
    }
    return 0;
}

static const char *put_string(char **at, struct slice s)
{
    char *out = *at;
    memcpy(out, s.p, s.n);
    out[s.n] = '\0';
    *at += s.n + 1;
    return out;
}

/* Reads all fields, and only then puts the sample in its row. */
static int read_fields(struct found *x, struct err *e)
{
    const struct samples *samples = x->view->samples;
    struct larder_field *fields = (struct larder_field *)x->memory;
    uint8_t *own = x->memory + feed_align(x->fields * sizeof *fields);
    int rc = 0;
    for (uint32_t k = 0; rc == 0 && k < x->fields; k++) {
        struct sample_field field = samples_field(samples, x->number, k);
        uint8_t *to = place_of(x, &field);
        if (!to) {
            to = own;
            own += feed_align(field.bytes);
        }
        fields[k] = (struct larder_field){.data = to, .bytes = (size_t)field.bytes};
        rc = read_field(x->f, x->view, &field, to, e);
    }
    if (rc < 0)
        return rc;
    struct larder_sample *s = &x->b->samples[x->hurt->row];
    char *strings = (char *)own;
    for (uint32_t k = 0; k < x->fields; k++) {
        struct sample_field field = samples_field(samples, x->number, k);
        fields[k].name = put_string(&strings, field.name);
        fields[k].type = put_string(&strings, field.type);
    }
    s->key = put_string(&strings, samples_key(samples, x->number));
    s->shard = x->view->shard;
    s->number = x->number;
    s->fields = x->fields;
    s->field = fields;
    return 0;
}

/* One that may stand in: 0, or why it cannot be read either. */
static int try(struct larder_feed *f, struct larder_batch *b, struct feed_hurt *h, struct order_place at,
               struct err *e)
{
    struct larder_dataset *d = f->sources[h->source].dataset;
    struct found x = {.f = f, .b = b, .hurt = h, .number = at.sample};
    int rc = dataset_view_get(d, at.shard, true, &x.view, e);
    if (rc < 0)
        return rc;
    if (at.sample >= samples_count(x.view->samples))
        rc = err_set(e, ERR_CORRUPT, "shard %u has no sample number %" PRIu64, at.shard, at.sample);
    if (rc == 0) {
        x.fields = samples_fields(x.view->samples, at.sample);
        rc = take_memory(&x, e);
    }
    if (rc == 0)
        rc = read_fields(&x, e);
    dataset_view_put(d, x.view);
    if (rc < 0) {
        free(x.memory);
        return rc;
    }
    h->memory = x.memory;
    h->substituted = true;
    h->by = at;
    b->bad[h->row] = false;
    return 0;
}

static int substitute(struct larder_feed *f, struct larder_batch *b, struct feed_hurt *h, struct err *e)
{
    struct mix_place p;
    for (uint32_t attempt = 0;
         attempt < FEED_SUBSTITUTES_MAX && feed_plan_substitute(&f->repair_plan, h->position, attempt, &p);
         attempt++) {
        if (p.at.shard == h->shard && p.at.sample == h->number)
            continue;
        err_clear(e);
        int rc = try(f, b, h, p.at, e);
        if (rc == 0 || !feed_is_damage(e))
            return rc;
    }
    *e = h->why;
    return err_prepend(e, "no other sample of its window can be read in its place");
}

void feed_repair(struct larder_feed *f, struct larder_batch *b)
{
    struct err e = {0};
    int rc = 0;
    for (struct feed_hurt *h = b->hurt; h && f->damage == FEED_SUBSTITUTE && rc == 0; h = h->next)
        rc = substitute(f, b, h, &e);
    if (rc == 0)
        leave_out(b);
    pthread_mutex_lock(&f->lock);
    if (rc < 0)
        b->err = e;
    feed_batch_ready(f, b);
    pthread_mutex_unlock(&f->lock);
}

/* ---- telling ---- */

static void tell(struct larder_feed *f, const struct feed_hurt *h)
{
    const struct larder_dataset *d = f->sources[h->source].dataset;
    if (!f->damages)
        f->damages = calloc(FEED_DAMAGE_MAX, sizeof *f->damages);
    char *text = f->damages && f->damage_count < FEED_DAMAGE_MAX ? strdup(h->why.text) : NULL;
    if (!text)
        return; /* it is counted */
    f->damages[f->damage_count++] =
        (struct larder_feed_damage){.position = h->position,
                                    .dataset = d->name,
                                    .shard = d->table.shards[h->shard].name,
                                    .number = h->number,
                                    .substituted = h->substituted,
                                    .by_shard = h->substituted ? d->table.shards[h->by.shard].name : "",
                                    .by_number = h->by.sample,
                                    .text = text};
}

void feed_repair_told(struct larder_feed *f, struct larder_batch *b)
{
    for (const struct feed_hurt *h = b->hurt; h; h = h->next) {
        tell(f, h);
        *(h->substituted ? &f->substituted : &f->skipped) += 1;
    }
}

void feed_damages_free(struct larder_feed *f)
{
    for (uint32_t i = 0; i < f->damage_count; i++)
        free((char *)f->damages[i].text);
    free(f->damages);
    f->damages = NULL;
    f->damage_count = 0;
}
