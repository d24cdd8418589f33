/* SPDX-License-Identifier: Apache-2.0 */
/* larder ckpt ls|show|verify|pin|unpin|mark|prune|destroy. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"
#include "format/base/hash.h"
#include "format/dtype.h"
#include "tools/commands.h"

/* ---- ls -------------------------------------------------------------------------------------------------
 */

struct commits {
    struct table *table;
    json_t *list;
    uint64_t now_ns;
};

static int one_commit(void *arg, const struct larder_commit_info *i)
{
    struct commits *l = arg;
    char parts[32], note[600];
    if (l->list) {
        json_array_append_new(
            l->list,
            json_pack("{s:o,s:I,s:I,s:s,s:b,s:I,s:I,s:I,s:I,s:I,s:s,s:s}", "step",
                      i->world ? json_u64(i->step) : json_null(), "sequence", (json_int_t)i->sequence,
                      "attempt_number", (json_int_t)i->attempt_number, "state", commit_state_name(i->state),
                      "pinned", i->pinned, "world", (json_int_t)i->world, "parts", (json_int_t)i->parts,
                      "plain_bytes", (json_int_t)i->plain_bytes, "stored_bytes", (json_int_t)i->stored_bytes,
                      "server_time_ns", (json_int_t)i->server_time_ns, "reason", i->reason ? i->reason : "",
                      "labels", i->labels ? i->labels : ""));
        return 0;
    }
    snprintf(parts, sizeof parts, "%" PRIu32 "/%" PRIu32, i->parts, i->world);
    snprintf(note, sizeof note, "%s%s%s", i->reason ? i->reason : "",
             i->reason && *i->reason && i->labels && *i->labels ? "; " : "", i->labels ? i->labels : "");
    char state[32];
    snprintf(state, sizeof state, "%s%s", commit_state_name(i->state), i->pinned ? ", pinned" : "");
    if (i->world == 0) { /* the commit record cannot be read: only its name tells something */
        table_row(l->table, "-", number_text(i->sequence).s, state, "-", "-", "-", "-", note);
        return 0;
    }
    table_row(l->table, number_text(i->step).s, i->sequence ? number_text(i->sequence).s : "-", state, parts,
              size_text(i->plain_bytes).s, size_text(i->stored_bytes).s,
              age_text(l->now_ns, i->server_time_ns).s, note);
    return 0;
}

static int list_commits(struct larder *c, const char *run, bool pending, bool json)
{
    static const char *const heads[] = {">STEP", ">SEQ",    "STATE", ">PARTS",
                                        ">SIZE", ">STORED", ">AGE",  "NOTE"};
    struct larder_error e = {0};
    struct table t;
    struct commits l = {.table = &t, .now_ns = client_now_ns(c), .list = json ? json_array() : NULL};
    table_begin(&t, heads, 8);
    if (larder_commit_list(c, LARDER_CHECKPOINTS, run, pending, one_commit, &l, &e) < 0) {
        json_decref(l.list);
        return fail(&e);
    }
    if (json)
        return json_print(l.list);
    if (t.cells == 0)
        fprintf(stderr, "no checkpoints in %s yet\n", name_text(run).s);
    table_end(&t);
    return STATUS_OK;
}

static int ls_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    bool committed = false;
    const struct opt opts[] = {{"committed", OPT_FLAG, &committed}, {0}};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 1, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) == STATUS_OK)
        status = argc ? list_commits(c, argv[0], !committed, common.json)
                      : runs_list(c, LARDER_CHECKPOINTS, common.json);
    return client_close(c, status);
}

const struct command cmd_ckpt_ls = {
    "ckpt ls", "list runs, or the checkpoints of one",
    "usage: larder ckpt ls [RUN] [--committed] [--json]\n"
    "Lists the runs, or the checkpoints of RUN in the order of their commits, with saves that are pending "
    "or\n"
    "were abandoned.\n"
    "  --committed    only checkpoints that exist\n"
    "  --json         [{\"name\", \"commits\", \"latest_step\", ...}], or [{\"step\", \"sequence\", "
    "\"state\", ...}]\n",
    ls_run};

/* ---- show -----------------------------------------------------------------------------------------------
 */

/* 0, or an exit code: reads "[STEP]" and --sequence into options. */
static int select_commit(const struct command *cmd, const char *step, const uint64_t *sequence,
                         struct larder_restore_options *o)
{
    if (step && *sequence)
        return fail_usage(cmd->name, "give a step or --sequence, not both");
    o->at = step ? LARDER_AT_STEP : *sequence ? LARDER_AT_SEQUENCE : LARDER_AT_LATEST;
    o->value = *sequence;
    if (step && !parse_number(step, &o->value))
        return fail_usage(cmd->name, "\"%s\" is not a step", step);
    return STATUS_OK;
}

static uint64_t tensor_bytes(const struct larder_tensor *t)
{
    uint64_t elements = 1, bytes = 0;
    for (unsigned i = 0; i < t->dims; i++)
        if (__builtin_mul_overflow(elements, t->shape[i], &elements))
            return UINT64_MAX;
    return dtype_bytes((enum dtype)t->dtype, elements, &bytes, NULL) < 0 ? 0 : bytes;
}

static json_t *shape_json(const struct larder_tensor *t)
{
    json_t *a = json_array();
    for (unsigned i = 0; i < t->dims; i++)
        json_array_append_new(a, json_integer((json_int_t)t->shape[i]));
    return a;
}

static json_t *blobs_json(struct larder_restore *r, uint32_t world)
{
    json_t *list = json_array();
    for (uint32_t rank = 0; rank < world; rank++) {
        const char *name;
        uint64_t bytes;
        for (size_t i = 0; larder_restore_blob_name(r, rank, i, &name, &bytes) == 0; i++)
            json_array_append_new(list, json_pack("{s:I,s:s,s:I}", "rank", (json_int_t)rank, "name", name,
                                                  "bytes", (json_int_t)bytes));
    }
    return list;
}

/* What a feed keeps as its state (FORMAT.md, state of a feed); false: the trainer kept something else. */
struct feed_state {
    uint64_t version, seed, epoch, position;
    uint32_t window_shards;
};
static bool feed_state_decode(const struct larder_restore_info *i, struct feed_state *out)
{
    struct rcur c = rcur_of(i->loader_state, i->loader_state_bytes);
    struct slice magic = rcur_take(&c, 4);
    uint32_t format = rcur_u32(&c);
    (void)rcur_u64(&c); /* which dataset, as a hash */
    out->version = rcur_u64(&c);
    out->seed = rcur_u64(&c);
    out->epoch = rcur_u64(&c);
    out->position = rcur_u64(&c);
    out->window_shards = rcur_u32(&c);
    (void)rcur_u32(&c);
    uint64_t sum = rcur_u64(&c);
    return rcur_end(&c, "feed state", NULL) == 0 && memcmp(magic.p, "LRDF", 4) == 0 && format == 1 &&
           sum == hash64(i->loader_state, 56);
}

static json_t *feed_state_json(const struct larder_restore_info *i)
{
    struct feed_state f;
    if (!feed_state_decode(i, &f))
        return json_null();
    return json_pack("{s:I,s:o,s:I,s:o,s:I}", "version", (json_int_t)f.version, "seed", json_u64(f.seed),
                     "epoch", (json_int_t)f.epoch, "position", json_u64(f.position), "window_shards",
                     (json_int_t)f.window_shards);
}

static void feed_state_text(const struct larder_restore_info *i)
{
    char hex[2 * LARDER_STATE_BYTES + 1] = "";
    struct feed_state f;
    hex_encode(i->loader_state, i->loader_state_bytes, hex);
    if (feed_state_decode(i, &f))
        printf("loader: dataset version %" PRIu64 ", seed %" PRIu64 ", epoch %" PRIu64
               ", next position %" PRIu64 "\n",
               f.version, f.seed, f.epoch, f.position);
    else
        printf("loader: %s\n", *hex ? hex : "no state was saved");
}

static int show_json(struct larder_restore *r, const char *run, const struct larder_restore_info *i)
{
    char state[2 * LARDER_STATE_BYTES + 1] = "";
    hex_encode(i->loader_state, i->loader_state_bytes, state);
    json_t *labels = json_object(), *tensors = json_array();
    const char *key, *value;
    for (size_t n = 0; larder_restore_label(r, n, &key, &value) == 0; n++)
        json_object_set_new(labels, key, json_string(value));
    for (size_t n = 0; n < larder_restore_tensors(r); n++) {
        struct larder_tensor t;
        if (larder_restore_tensor(r, n, &t) == 0)
            json_array_append_new(tensors, json_pack("{s:s,s:s,s:o,s:I}", "name", t.name, "dtype",
                                                     larder_dtype_name(t.dtype), "shape", shape_json(&t),
                                                     "bytes", (json_int_t)tensor_bytes(&t)));
    }
    return json_print(json_pack("{s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:o,s:o,s:o,s:o}", "run", run, "step",
                                json_u64(i->step), "sequence", (json_int_t)i->sequence, "world",
                                (json_int_t)i->world, "attempt_number", (json_int_t)i->attempt_number,
                                "plain_bytes", (json_int_t)i->plain_bytes, "stored_bytes",
                                (json_int_t)i->stored_bytes, "server_time_ns", (json_int_t)i->server_time_ns,
                                "loader_state", state, "loader", feed_state_json(i), "labels", labels,
                                "tensors", tensors, "blobs", blobs_json(r, i->world)));
}

static int show_text(struct larder *c, struct larder_restore *r, const char *run,
                     const struct larder_restore_info *i)
{
    static const char *const heads[] = {"TENSOR", "DTYPE", "SHAPE", ">BYTES"};
    static const char *const blob_heads[] = {">RANK", "BLOB", ">BYTES"};
    const char *key, *value, *name;
    struct table t;
    uint64_t bytes;
    printf("%s, step %" PRIu64 ", sequence %" PRIu64 ", %s (%s), saved by %" PRIu32
           " rank%s of attempt %" PRIu64 "\n",
           name_text(run).s, i->step, i->sequence, time_text(i->server_time_ns).s,
           age_text(client_now_ns(c), i->server_time_ns).s, i->world, i->world == 1 ? "" : "s",
           i->attempt_number);
    printf("%s in %zu tensor%s, %s stored\n", size_text(i->plain_bytes).s, larder_restore_tensors(r),
           larder_restore_tensors(r) == 1 ? "" : "s", size_text(i->stored_bytes).s);
    feed_state_text(i);
    for (size_t n = 0; larder_restore_label(r, n, &key, &value) == 0; n++) {
        struct text_long k = name_text(key);
        printf("label: %s = %s\n", k.s, name_text(value).s);
    }
    putchar('\n');
    table_begin(&t, heads, 4);
    for (size_t n = 0; n < larder_restore_tensors(r); n++) {
        struct larder_tensor x;
        if (larder_restore_tensor(r, n, &x) == 0)
            table_row(&t, x.name, larder_dtype_name(x.dtype), shape_text(x.dims, x.shape).s,
                      number_text(tensor_bytes(&x)).s);
    }
    table_end(&t);
    table_begin(&t, blob_heads, 3);
    for (uint32_t rank = 0; rank < i->world; rank++)
        for (size_t n = 0; larder_restore_blob_name(r, rank, n, &name, &bytes) == 0; n++)
            table_row(&t, number_text(rank).s, name, number_text(bytes).s);
    if (t.cells)
        putchar('\n');
    if (t.cells)
        table_end(&t);
    return STATUS_OK;
}

static int show_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    uint64_t sequence = 0;
    const struct opt opts[] = {{"sequence", OPT_NUMBER, &sequence}, {0}};
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    struct larder_restore *r = NULL;
    struct larder_error e = {0};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 1, 2, &common, &status))
        return status;
    o.run = argv[0];
    if ((status = select_commit(cmd, argc > 1 ? argv[1] : NULL, &sequence, &o)) != STATUS_OK)
        return status;
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (larder_restore_open(c, &o, &r, &e) < 0)
        status = fail(&e);
    else if (larder_restore_info(r, &info) < 0)
        status = fail_with(STATUS_OTHER, "the checkpoint's description cannot be read");
    else
        status = common.json ? show_json(r, argv[0], &info) : show_text(c, r, argv[0], &info);
    larder_restore_close(r);
    return client_close(c, status);
}

const struct command cmd_ckpt_show = {
    "ckpt show", "show what a checkpoint holds",
    "usage: larder ckpt show RUN [STEP] [--sequence N] [--json]\n"
    "Tensors with dtype, shape and bytes, blobs, labels and the loader's position of the latest checkpoint "
    "that\n"
    "is not marked bad, or of STEP (its newest commit), or of one sequence number.\n",
    show_run};

/* ---- verify, pin, unpin, mark -------------------------------------------------------------------------- */

static int verify_main(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    const char *level = "scrub";
    bool mark_bad = false;
    uint64_t sequence = 0, step = 0;
    const struct opt opts[] = {{"level", OPT_TEXT, &level},
                               {"sequence", OPT_NUMBER, &sequence},
                               {"mark-bad", OPT_FLAG, &mark_bad},
                               {0}};
    enum larder_verify_level ignored;
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 2, &common, &status))
        return status;
    if (!verify_level(level, &ignored))
        return fail_usage(cmd->name, "\"%s\" is not a level: structure, scrub or deep", level);
    if (argc > 1 && !parse_number(argv[1], &step))
        return fail_usage(cmd->name, "\"%s\" is not a step", argv[1]);
    if ((argc > 1 && sequence) || ((sequence || mark_bad) && !argc))
        return fail_usage(cmd->name,
                          "--sequence and --mark-bad go with a RUN, and --sequence instead of a STEP");
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (argc > 1 || sequence)
        status = commit_find(c, LARDER_CHECKPOINTS, argv[0], argc > 1 ? &step : NULL, &sequence, &step);
    if (status == STATUS_OK)
        status =
            verify_run(c, LARDER_CHECKPOINTS, argc ? argv[0] : NULL, sequence, level, mark_bad, common.json);
    return client_close(c, status);
}

const struct command cmd_ckpt_verify = {
    "ckpt verify", "check stored checkpoints",
    "usage: larder ckpt verify [RUN [STEP]] [--level LEVEL] [--sequence N] [--mark-bad] [--json]\n"
    "Checks all checkpoints of the tenant, of RUN, or one. Nothing stored is changed.\n"
    "  --level structure   records, headers, indexes and trailers\n"
    "  --level scrub       and every chunk against its checksum, on the server, without keys (default)\n"
    "  --level deep        and fetched, decrypted and decoded here, with the keys\n"
    "  --mark-bad          then mark checkpoints with damage as bad, so that latest passes over them\n"
    "Exit status 1 if damage was found.\n",
    verify_main};

static int mark_command(const struct command *cmd, int argc, char **argv, const char *word,
                        enum larder_mark mark)
{
    struct common common = {0};
    const char *reason = NULL;
    uint64_t sequence = 0, step = 0;
    const struct opt opts[] = {{"reason", OPT_TEXT, &reason}, {"sequence", OPT_NUMBER, &sequence}, {0}};
    struct larder_error e = {0};
    struct larder *c = NULL;
    int status, first = mark == LARDER_PIN || mark == LARDER_UNPIN ? 0 : 1;
    if (!options_read(cmd, &argc, argv, opts, 1 + first, 2 + first, &common, &status))
        return status;
    if (first && strcmp(argv[argc - 1], "bad") != 0 && strcmp(argv[argc - 1], "good") != 0)
        return fail_usage(cmd->name, "expected bad or good, found \"%s\"", argv[argc - 1]);
    if (first) {
        mark = strcmp(argv[--argc], "bad") == 0 ? LARDER_MARK_BAD : LARDER_MARK_GOOD;
        word = argv[argc];
    }
    if ((argc > 1) == (sequence != 0))
        return fail_usage(cmd->name, "give a step, or --sequence instead");
    if (argc > 1 && !parse_number(argv[1], &step))
        return fail_usage(cmd->name, "\"%s\" is not a step", argv[1]);
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    status = commit_find(c, LARDER_CHECKPOINTS, argv[0], argc > 1 ? &step : NULL, &sequence, &step);
    if (status == STATUS_OK &&
        larder_mark(c, LARDER_CHECKPOINTS, argv[0], sequence, mark, reason ? reason : "", &e) < 0)
        status = fail(&e);
    if (status == STATUS_OK)
        printf("%s: %s step %" PRIu64 ", sequence %" PRIu64 "\n", word, name_text(argv[0]).s, step, sequence);
    return client_close(c, status);
}

static int pin_run(const struct command *cmd, int argc, char **argv)
{
    return mark_command(cmd, argc, argv, "pinned", LARDER_PIN);
}
static int unpin_run(const struct command *cmd, int argc, char **argv)
{
    return mark_command(cmd, argc, argv, "unpinned", LARDER_UNPIN);
}
static int mark_run(const struct command *cmd, int argc, char **argv)
{
    return mark_command(cmd, argc, argv, NULL, LARDER_MARK_BAD);
}

const struct command cmd_ckpt_pin = {"ckpt pin", "keep a checkpoint whatever prune's rules say",
                                     "usage: larder ckpt pin RUN STEP|--sequence N [--reason TEXT]\n"
                                     "Prune keeps a pinned checkpoint until it is unpinned.\n",
                                     pin_run};
const struct command cmd_ckpt_unpin = {"ckpt unpin", "undo pin",
                                       "usage: larder ckpt unpin RUN STEP|--sequence N\n", unpin_run};
const struct command cmd_ckpt_mark = {
    "ckpt mark", "mark a checkpoint bad or good",
    "usage: larder ckpt mark RUN STEP|--sequence N bad|good [--reason TEXT]\n"
    "Latest passes over a checkpoint that is marked bad.\n",
    mark_run};

/* ---- prune, destroy
 * ---------------------------------------------------------------------------------------- */

static int prune_run(const struct command *cmd, int argc, char **argv)
{
    return prune_command(cmd, LARDER_CHECKPOINTS, argc, argv);
}
static int destroy_run(const struct command *cmd, int argc, char **argv)
{
    return destroy_command(cmd, LARDER_CHECKPOINTS, argc, argv);
}

const struct command cmd_ckpt_prune = {
    "ckpt prune", "remove checkpoints that no rule keeps",
    "usage: larder ckpt prune RUN [--keep-last N] [--keep-every K] [--keep-within TIME] [--yes] [--plan "
    "DIGEST]\n"
    "Prints the plan: what would be removed, what is kept, and why. A checkpoint stays if any rule keeps it, "
    "if\n"
    "it is pinned, or if it is the last good one.\n"
    "  --keep-last N       the newest N, in the order of their commits\n"
    "  --keep-every K      steps that are multiples of K\n"
    "  --keep-within TIME  younger than TIME: 30m, 36h, 7d, 2w\n"
    "  --yes               do what was just shown; refused if it would do anything else (exit status 9)\n"
    "  --plan DIGEST       with --yes: do only the plan that was shown earlier with this digest\n"
    "  --json              {\"run\", \"plan\", \"executed\", \"to_remove\", \"to_keep\", \"removed\", "
    "\"freed_bytes\", \"items\"}\n",
    prune_run};
const struct command cmd_ckpt_destroy = {
    "ckpt destroy", "erase a run: keys first, then everything",
    "usage: larder ckpt destroy RUN --yes\n"
    "Destroys the run's keys, which erases it for good, then its checkpoints.\n",
    destroy_run};
