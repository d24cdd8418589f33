/* SPDX-License-Identifier: Apache-2.0 */
/* larder feed order: which sample comes when, without reading any. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/choice.h"
#include "format/mix.h"
#include "tools/commands.h"

#define WINDOW_SHARDS 8 /* the feed's own default */

/* One dataset of the order. */
struct member {
    const char *name;
    struct larder_dataset *d;
    uint64_t version, weight;
    struct choice choice;
    uint64_t *counts;
    bool *chosen;
};

struct asked {
    struct member members[MIX_DATASETS_MAX];
    uint32_t count_of_members;
    uint64_t seed, epoch, from, count, window;
    bool sequential;
};

/* ---- what was asked for: lists with commas, one value for all datasets or one for each ---- */

/* The i-th value of a list, into `word`; NULL: neither one nor `count` values are there, or one is too long.
 */
static const char *value_of(const char *list, uint32_t i, uint32_t count, char word[CHOICE_BYTES_MAX + 1])
{
    uint32_t values = 1;
    for (const char *p = list; *p; p++)
        values += *p == ',';
    if (values != 1 && values != count)
        return NULL;
    for (uint32_t k = 0; values > 1 && k < i; k++)
        list = strchr(list, ',') + 1;
    size_t n = strcspn(list, ",");
    if (n > CHOICE_BYTES_MAX)
        return NULL;
    memcpy(word, list, n);
    word[n] = '\0';
    return word;
}

static bool numbers_of(struct asked *a, const char *list, size_t at)
{
    char word[CHOICE_BYTES_MAX + 1];
    for (uint32_t i = 0; list && i < a->count_of_members; i++)
        if (!value_of(list, i, a->count_of_members, word) ||
            !parse_number(word, (uint64_t *)((char *)&a->members[i] + at)))
            return false;
    return true;
}

static bool patterns_of(struct asked *a, const char *list)
{
    char word[CHOICE_BYTES_MAX + 1];
    for (uint32_t i = 0; list && i < a->count_of_members; i++) {
        if (!value_of(list, i, a->count_of_members, word))
            return false;
        a->members[i].choice.pattern = need(strdup(word));
    }
    return true;
}

static bool slices_of(struct asked *a, const char *list)
{
    char word[CHOICE_BYTES_MAX + 1];
    for (uint32_t i = 0; list && i < a->count_of_members; i++) {
        uint64_t slice, slices;
        char *of = value_of(list, i, a->count_of_members, word) ? strchr(word, '/') : NULL;
        if (!of)
            return false;
        *of = '\0';
        if (!parse_number(word, &slice) || !parse_number(of + 1, &slices) || slices > UINT32_MAX ||
            slice >= slices)
            return false;
        a->members[i].choice.slice = (uint32_t)slice;
        a->members[i].choice.slices = (uint32_t)slices;
    }
    return true;
}

/* ---- the order ---- */

static int count_samples(struct member *m)
{
    size_t shards = larder_dataset_shards(m->d);
    uint32_t matched = 0;
    m->counts = need(calloc(shards + 1, sizeof *m->counts));
    m->chosen = need(calloc(shards + 1, sizeof *m->chosen));
    for (size_t i = 0; i < shards; i++) {
        struct larder_shard_info s = {.name = ""};
        struct larder_error e = {0};
        int rc = larder_dataset_shard(m->d, i, &s, &e);
        m->chosen[i] = choice_takes(&m->choice, slice_str(s.name), &matched);
        if (rc < 0 && m->chosen[i])
            return fail(&e);
        m->counts[i] = s.samples;
    }
    return STATUS_OK;
}

static int members_open(struct larder *c, struct asked *a)
{
    struct larder_error e = {0};
    struct err ce = {0};
    int status = STATUS_OK;
    for (uint32_t i = 0; status == STATUS_OK && i < a->count_of_members; i++) {
        struct member *m = &a->members[i];
        if (choice_check(&m->choice, &ce) < 0)
            status = fail_err(&ce);
        else if (larder_dataset_open(c, m->name, m->version, &m->d, &e) < 0)
            status = fail(&e);
        else
            status = count_samples(m);
    }
    return status;
}

static void members_close(struct asked *a)
{
    for (uint32_t i = 0; i < a->count_of_members; i++) {
        struct member *m = &a->members[i];
        larder_dataset_close(m->d);
        free((char *)m->choice.pattern);
        free(m->counts);
        free(m->chosen);
    }
}

static int make_mix(const struct asked *a, struct mix **out)
{
    struct mix_source s[MIX_DATASETS_MAX];
    struct err e = {0};
    for (uint32_t i = 0; i < a->count_of_members; i++) {
        const struct member *m = &a->members[i];
        s[i] = (struct mix_source){.name = m->name,
                                   .samples_per_shard = m->counts,
                                   .chosen = m->chosen,
                                   .shards = (uint32_t)larder_dataset_shards(m->d),
                                   .weight = (uint32_t)m->weight};
    }
    uint32_t window = a->sequential ? 0 : a->window ? (uint32_t)a->window : WINDOW_SHARDS;
    return mix_create(s, a->count_of_members, a->seed, window, out, &e) < 0 ? fail_err(&e) : STATUS_OK;
}

/* ---- printing ---- */

static json_t *places_json(struct mix *mix, const struct asked *a)
{
    uint64_t samples = mix_samples(mix);
    json_t *list = json_array();
    for (uint64_t i = a->from; i < samples && i - a->from < a->count; i++) {
        struct mix_place p = mix_at(mix, a->epoch * samples + i);
        const struct member *m = &a->members[p.source];
        struct larder_shard_info s = {.name = ""};
        (void)larder_dataset_shard(m->d, p.at.shard, &s, NULL);
        json_t *place = json_pack("{s:I,s:I,s:s,s:I}", "position", (json_int_t)i, "shard",
                                  (json_int_t)p.at.shard, "name", s.name, "sample", (json_int_t)p.at.sample);
        if (a->count_of_members > 1)
            json_object_set_new(place, "dataset", json_string(m->name));
        json_array_append_new(list, place);
    }
    return list;
}

static void places_table(json_t *places, bool mixed)
{
    static const char *const heads[] = {">POSITION", ">SHARD", "NAME", ">SAMPLE", "DATASET"};
    struct table t;
    size_t i;
    json_t *p;
    table_begin(&t, heads, mixed ? 5 : 4);
    json_array_foreach(places, i, p)
    {
        table_row(&t, number_text((uint64_t)json_integer_value(json_object_get(p, "position"))).s,
                  number_text((uint64_t)json_integer_value(json_object_get(p, "shard"))).s,
                  json_string_value(json_object_get(p, "name")),
                  number_text((uint64_t)json_integer_value(json_object_get(p, "sample"))).s,
                  json_string_value(json_object_get(p, "dataset")));
    }
    table_end(&t);
}

static json_t *members_json(const struct asked *a)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < a->count_of_members; i++) {
        const struct member *m = &a->members[i];
        json_array_append_new(list, json_pack("{s:s,s:o,s:I}", "dataset", m->name, "version",
                                              json_u64(larder_dataset_version(m->d)), "weight",
                                              (json_int_t)m->weight));
    }
    return list;
}

static int print_json(const struct asked *a, struct mix *mix, json_t *places)
{
    json_t *o = json_pack("{s:o,s:o,s:I,s:O}", "seed", json_u64(a->seed), "epoch", json_u64(a->epoch),
                          "samples", (json_int_t)mix_samples(mix), "order", places);
    if (a->count_of_members > 1) {
        json_object_set_new(o, "mix", members_json(a));
    } else {
        json_object_set_new(o, "dataset", json_string(a->members->name));
        json_object_set_new(o, "version", json_u64(larder_dataset_version(a->members->d)));
    }
    return json_print(o);
}

static int show_order(const struct asked *a, bool json)
{
    struct mix *mix = NULL;
    int status = make_mix(a, &mix);
    if (status != STATUS_OK)
        return status;
    uint64_t end, samples = mix_samples(mix);
    if (a->epoch == UINT64_MAX || __builtin_mul_overflow(a->epoch + 1, samples, &end)) {
        mix_free(mix);
        return fail_usage("feed order", "epoch %" PRIu64 " is beyond what positions can count", a->epoch);
    }
    if (a->from >= samples)
        fprintf(stderr, "an epoch has positions 0 to %" PRIu64 ": none from %" PRIu64 " on\n", samples - 1,
                a->from);
    json_t *places = places_json(mix, a);
    if (json)
        status = print_json(a, mix, places);
    else
        places_table(places, a->count_of_members > 1);
    json_decref(places);
    mix_free(mix);
    return status;
}

static int order_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct asked *a = need(calloc(1, sizeof *a));
    const char *versions = NULL, *weights = NULL, *patterns = NULL, *slices = NULL;
    const struct opt opts[] = {{"version", OPT_TEXT, &versions},
                               {"weights", OPT_TEXT, &weights},
                               {"shards", OPT_TEXT, &patterns},
                               {"slice", OPT_TEXT, &slices},
                               {"seed", OPT_NUMBER, &a->seed},
                               {"epoch", OPT_NUMBER, &a->epoch},
                               {"from", OPT_NUMBER, &a->from},
                               {"count", OPT_NUMBER, &a->count},
                               {"window", OPT_NUMBER, &a->window},
                               {"sequential", OPT_FLAG, &a->sequential},
                               {0}};
    struct larder *c = NULL;
    int status;
    a->count = 20;
    if (!options_read(cmd, &argc, argv, opts, 1, MIX_DATASETS_MAX, &common, &status)) {
        free(a);
        return status;
    }
    a->count_of_members = (uint32_t)argc;
    for (uint32_t i = 0; i < a->count_of_members; i++)
        a->members[i] = (struct member){.name = argv[i], .weight = 1};
    if (!numbers_of(a, versions, offsetof(struct member, version)))
        status =
            fail_usage(cmd->name, "--version takes a number for all datasets, or one for each, with commas");
    else if (!numbers_of(a, weights, offsetof(struct member, weight)))
        status = fail_usage(cmd->name, "--weights takes a number for each dataset, with commas");
    else if (!patterns_of(a, patterns))
        status =
            fail_usage(cmd->name, "--shards takes a pattern for all datasets, or one for each, with commas");
    else if (!slices_of(a, slices))
        status = fail_usage(cmd->name,
                            "--slice takes I/N, I below N, for all datasets, or one for each, with commas");
    else if (a->window > UINT32_MAX - 1)
        status = fail_usage(cmd->name, "--window is at most %u shards", UINT32_MAX - 1);
    else
        status = STATUS_OK;
    for (uint32_t i = 0; status == STATUS_OK && i < a->count_of_members; i++)
        if (a->members[i].weight == 0 || a->members[i].weight > UINT32_MAX)
            status = fail_usage(cmd->name, "a weight is 1 to %u", UINT32_MAX);
    if (status == STATUS_OK)
        status = client_open(&common, &c);
    if (status == STATUS_OK)
        status = members_open(c, a);
    if (status == STATUS_OK)
        status = show_order(a, common.json);
    members_close(a);
    free(a);
    return client_close(c, status);
}

const struct command cmd_feed_order = {
    "feed order", "which sample comes when",
    "usage: larder feed order DATASET... [options]\n"
    "Prints shard and sample for positions of an epoch, as a feed with the same seed and window hands them "
    "out;\n"
    "several datasets: as a feed of their mix does. Lists have commas, and one value for each dataset.\n"
    "  --weights N,N   shares of the datasets in a mix (1 each)\n"
    "  --version N     of the dataset (latest); or a list\n"
    "  --shards P      only shards with a name like the pattern P: * ? [a-z] [!a-z] \\, ! in front: all "
    "others; or "
    "a list\n"
    "  --slice I/N     of these the ones number I, I + N, ...; or a list\n"
    "  --seed N        (0)    --epoch N  (0)\n"
    "  --from N        first position (0)    --count N  positions (20)\n"
    "  --window N      shuffle window in shards (8)    --sequential  no shuffling\n"
    "  --json          {\"dataset\", \"version\" or \"mix\": [...], \"seed\", \"epoch\", \"samples\", "
    "\"order\": [...]}\n",
    order_run};
