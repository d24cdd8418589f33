/* SPDX-License-Identifier: Apache-2.0 */
/* larder feed order: which sample comes when, without reading any. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/order.h"
#include "tools/commands.h"

#define WINDOW_SHARDS 8 /* the feed's own default */

struct asked {
    uint64_t version, seed, epoch, from, count, window;
    bool sequential;
};

static json_t *places_json(struct order *o, const struct asked *a, uint64_t samples, struct larder_dataset *d)
{
    json_t *list = json_array();
    for (uint64_t i = a->from; i < samples && i - a->from < a->count; i++) {
        struct order_place p = order_at(o, a->epoch * samples + i);
        struct larder_shard_info s = {.name = ""};
        (void)larder_dataset_shard(d, p.shard, &s, NULL);
        json_array_append_new(list,
                              json_pack("{s:I,s:I,s:s,s:I}", "position", (json_int_t)i, "shard",
                                        (json_int_t)p.shard, "name", s.name, "sample", (json_int_t)p.sample));
    }
    return list;
}

static void places_table(json_t *places)
{
    static const char *const heads[] = {">POSITION", ">SHARD", "NAME", ">SAMPLE"};
    struct table t;
    size_t i;
    json_t *p;
    table_begin(&t, heads, 4);
    json_array_foreach(places, i, p)
    {
        table_row(&t, number_text((uint64_t)json_integer_value(json_object_get(p, "position"))).s,
                  number_text((uint64_t)json_integer_value(json_object_get(p, "shard"))).s,
                  json_string_value(json_object_get(p, "name")),
                  number_text((uint64_t)json_integer_value(json_object_get(p, "sample"))).s);
    }
    table_end(&t);
}

static int show_order(struct larder_dataset *d, const char *name, const struct asked *a, bool json)
{
    size_t shards = larder_dataset_shards(d);
    uint64_t *counts = need(calloc(shards ? shards : 1, sizeof *counts));
    struct order *o = NULL;
    struct err e = {0};
    int status = STATUS_OK;
    for (size_t i = 0; i < shards; i++) {
        struct larder_shard_info s;
        struct larder_error le = {0};
        if (larder_dataset_shard(d, i, &s, &le) < 0) {
            free(counts);
            return fail(&le);
        }
        counts[i] = s.samples;
    }
    uint32_t window = a->sequential ? 0 : a->window ? (uint32_t)a->window : WINDOW_SHARDS;
    uint64_t end;
    if (order_create(counts, (uint32_t)shards, a->seed, window, &o, &e) < 0)
        status = fail_err(&e);
    else if (__builtin_mul_overflow(a->epoch + 1, order_samples(o), &end) || a->epoch == UINT64_MAX)
        status = fail_usage("feed order", "epoch %" PRIu64 " is beyond what positions can count", a->epoch);
    else {
        if (a->from >= order_samples(o))
            fprintf(stderr, "an epoch of %s has positions 0 to %" PRIu64 ": none from %" PRIu64 " on\n",
                    name_text(name).s, order_samples(o) - 1, a->from);
        json_t *places = places_json(o, a, order_samples(o), d);
        if (json)
            status = json_print(json_pack("{s:s,s:o,s:o,s:o,s:I,s:O}", "dataset", name, "version",
                                          json_u64(larder_dataset_version(d)), "seed", json_u64(a->seed),
                                          "epoch", json_u64(a->epoch), "samples",
                                          (json_int_t)order_samples(o), "order", places));
        else
            places_table(places);
        json_decref(places);
    }
    order_free(o);
    free(counts);
    return status;
}

static int order_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct asked a = {.count = 20};
    const struct opt opts[] = {{"version", OPT_NUMBER, &a.version},     {"seed", OPT_NUMBER, &a.seed},
                               {"epoch", OPT_NUMBER, &a.epoch},         {"from", OPT_NUMBER, &a.from},
                               {"count", OPT_NUMBER, &a.count},         {"window", OPT_NUMBER, &a.window},
                               {"sequential", OPT_FLAG, &a.sequential}, {0}};
    struct larder_error e = {0};
    struct larder_dataset *d = NULL;
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 1, 1, &common, &status))
        return status;
    if (a.window > UINT32_MAX - 1)
        return fail_usage(cmd->name, "--window is at most %u shards", UINT32_MAX - 1);
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (larder_dataset_open(c, argv[0], a.version, &d, &e) < 0)
        status = fail(&e);
    else
        status = show_order(d, argv[0], &a, common.json);
    larder_dataset_close(d);
    return client_close(c, status);
}

const struct command cmd_feed_order = {
    "feed order", "which sample comes when",
    "usage: larder feed order DATASET [options]\n"
    "Prints shard and sample for positions of an epoch, as a feed with the same seed and window hands them "
    "out.\n"
    "  --version N     of the dataset (latest)\n"
    "  --seed N        (0)    --epoch N  (0)\n"
    "  --from N        first position (0)    --count N  positions (20)\n"
    "  --window N      shuffle window in shards (8)    --sequential  no shuffling\n"
    "  --json          {\"dataset\", \"version\", \"seed\", \"epoch\", \"samples\", \"order\": [...]}\n",
    order_run};
