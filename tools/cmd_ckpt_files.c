/* SPDX-License-Identifier: Apache-2.0 */
/* larder ckpt save|restore: from and to safetensors files. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/commands.h"
#include "tools/layout.h"

#define STALLED_S 120 /* a save that moves nothing for so long is given up */

/* A mapped file that is cut while it is read, or whose disk fails, is a signal and not an error. */
static void on_bus_error(int number)
{
    static const char text[] =
        "larder: a file shrank while it was read, or its disk failed; nothing was saved or restored\n";
    (void)number;
    (void)!write(2, text, sizeof text - 1);
    _exit(STATUS_CORRUPT);
}

static void guard_maps(void)
{
    struct sigaction a = {.sa_handler = on_bus_error};
    sigaction(SIGBUS, &a, NULL);
}

/* ---- save -------------------------------------------------------------------------------------------------
 */

static int add_tensors(struct larder_save *s, const struct st_files *f, size_t *tensors,
                       struct larder_error *e)
{
    for (size_t i = 0; i < f->count; i++) {
        const struct st_file *file = &f->file[i];
        for (size_t k = 0; k < file->header.count; k++, ++*tensors) {
            const struct safetensors_entry *x = &file->header.entries[k];
            struct larder_tensor t = {.name = x->name, .dtype = (enum larder_dtype)x->dtype, .dims = x->dims};
            memcpy(t.shape, x->shape, x->dims * sizeof t.shape[0]);
            memcpy(t.lengths, x->shape, x->dims * sizeof t.lengths[0]);
            t.data = file->map + file->header.data_offset + x->begin;
            int status = larder_save_tensor(s, &t, e);
            if (status < 0)
                return status;
        }
    }
    return 0;
}

/* Until it is durable, failed, or nothing has moved for STALLED_S. */
static int wait_durable(struct larder_save *s, struct larder_save_info *info, struct larder_error *e)
{
    struct progress p;
    uint64_t moved = 0;
    double moved_s = clock_now_s();
    int status;
    progress_begin(&p, "sent");
    while ((status = larder_save_wait(s, 200, e)) == -ETIMEDOUT) {
        if (larder_save_info(s, info) < 0 || info->state == LARDER_SAVE_FAILED)
            break;
        if (info->sent_bytes != moved) {
            moved = info->sent_bytes;
            moved_s = clock_now_s();
        }
        if (clock_now_s() - moved_s > STALLED_S)
            break;
        if (info->chunks)
            progress_bytes(&p, info->plain_bytes / info->chunks * info->chunks_sent, info->plain_bytes, NULL);
    }
    progress_end(&p);
    if (status == 0)
        status = larder_save_info(s, info);
    return status;
}

static int save(struct larder *c, const struct larder_save_options *o, const struct st_files *f, bool json)
{
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    struct larder_error e = {0};
    struct larder_save *s = NULL;
    size_t tensors = 0;
    char *layout = need(st_layout(f));
    int status = larder_save_begin(c, o, &s, &e);
    if (status == 0)
        status = add_tensors(s, f, &tensors, &e);
    if (status == 0)
        status = larder_save_blob(s, LAYOUT_BLOB, layout, strlen(layout), &e);
    if (status == 0)
        status = larder_save_submit(s, &e);
    if (status == 0)
        status = wait_durable(s, &info, &e);
    if (status < 0)
        status = fail(&e);
    else if (json)
        status =
            json_print(json_pack("{s:s,s:o,s:I,s:I,s:I,s:I,s:f}", "run", o->run, "step", json_u64(o->step),
                                 "sequence", (json_int_t)info.sequence, "tensors", (json_int_t)tensors,
                                 "plain_bytes", (json_int_t)info.plain_bytes, "stored_bytes",
                                 (json_int_t)info.stored_bytes, "seconds", info.durable_seconds));
    else
        printf("saved %s step %" PRIu64 ", sequence %" PRIu64
               ": %zu tensors, %s, %s stored, durable after %.2f s\n",
               name_text(o->run).s, o->step, info.sequence, tensors, size_text(info.plain_bytes).s,
               size_text(info.stored_bytes).s, info.durable_seconds);
    larder_save_free(s);
    free(layout);
    return status;
}

static int save_run(const struct command *cmd, int argc, char **argv)
{
    static const char *const words[] = {"default", "off", "fast", "dense"};
    struct common common = {0};
    const char *compression = "default";
    const struct opt opts[] = {{"compression", OPT_TEXT, &compression}, {0}};
    const char *const labels[] = {"source", "safetensors", NULL};
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct st_files files = {0};
    struct err e = {0};
    struct larder *c = NULL;
    int status, level = 0;
    if (!options_read(cmd, &argc, argv, opts, 3, -1, &common, &status))
        return status;
    while (level < 4 && strcmp(words[level], compression) != 0)
        level++;
    if (level == 4)
        return fail_usage(cmd->name, "\"%s\" is not a compression: default, off, fast or dense", compression);
    if (!parse_number(argv[1], &o.step))
        return fail_usage(cmd->name, "\"%s\" is not a step", argv[1]);
    o.run = argv[0];
    o.world = 1;
    o.labels = labels;
    o.compression = (enum larder_compression)level;
    guard_maps();
    if (st_files_open(argv + 2, (size_t)argc - 2, &files, &e) < 0)
        status = fail_err(&e);
    else if ((status = client_open_to_save(&common, &c)) == STATUS_OK)
        status = save(c, &o, &files, common.json);
    status = client_close(c, status);
    st_files_close(&files);
    return status;
}

const struct command cmd_ckpt_save = {
    "ckpt save", "save safetensors files as a checkpoint",
    "usage: larder ckpt save RUN STEP FILE.safetensors... [--compression default|off|fast|dense] [--json]\n"
    "Saves the tensors of the files, with their metadata, as one checkpoint. MODEL.safetensors.index.json "
    "stands for\n"
    "the files that it lists. Returns when the checkpoint is durable.\n"
    "  --json    {\"run\", \"step\", \"sequence\", \"tensors\", \"plain_bytes\", \"stored_bytes\", "
    "\"seconds\"}\n",
    save_run};

/* ---- restore
 * ------------------------------------------------------------------------------------------------ */

/* The saved layout, or NULL if there is none: a checkpoint of a training job. 0 or an exit code. */
static int layout_read(struct larder_restore *r, json_t **out)
{
    struct larder_error e = {0};
    void *text = NULL;
    size_t n = 0;
    *out = NULL;
    if (larder_restore_blob(r, 0, LAYOUT_BLOB, &text, &n, &e) < 0)
        return e.kind == LARDER_NOT_FOUND ? STATUS_OK : fail(&e);
    *out = json_loadb(text, n, 0, NULL);
    free(text);
    return STATUS_OK;
}

struct chosen {
    struct safetensors_entry *entries; /* names belong to the restore */
    size_t count;
};

static void choose(struct larder_restore *r, const char *prefix, struct chosen *out)
{
    size_t n = larder_restore_tensors(r);
    out->entries = need(calloc(n + 1, sizeof *out->entries));
    for (size_t i = 0; i < n; i++) {
        struct larder_tensor t;
        if (larder_restore_tensor(r, i, &t) < 0 || strncmp(t.name, prefix, strlen(prefix)) != 0)
            continue;
        struct safetensors_entry *x = &out->entries[out->count++];
        *x = (struct safetensors_entry){.name = (char *)t.name, .dtype = (enum dtype)t.dtype, .dims = t.dims};
        memcpy(x->shape, t.shape, t.dims * sizeof x->shape[0]);
    }
}

/* Asks for every tensor straight into its place in the mapped files, and gets them. */
static int fill(struct larder_restore *r, const struct st_files *f)
{
    struct larder_error e = {0};
    struct larder_damage d;
    for (size_t i = 0; i < f->count; i++)
        for (size_t k = 0; k < f->file[i].header.count; k++) {
            const struct safetensors_entry *x = &f->file[i].header.entries[k];
            struct larder_tensor t = {.name = x->name, .dtype = (enum larder_dtype)x->dtype, .dims = x->dims};
            memcpy(t.shape, x->shape, x->dims * sizeof t.shape[0]);
            memcpy(t.lengths, x->shape, x->dims * sizeof t.lengths[0]);
            t.data = f->file[i].map + f->file[i].header.data_offset + x->begin;
            if (larder_restore_add(r, &t, &e) < 0)
                return fail(&e);
        }
    if (larder_restore_run(r, &e) == 0)
        return STATUS_OK;
    int status = fail(&e);
    for (size_t i = 0; larder_restore_damage(r, i, &d) == 0; i++)
        fprintf(stderr, "larder: damaged: tensor %s, rank %" PRIu32 ", chunk %" PRIu32 ": %s\n",
                name_text(d.tensor ? d.tensor : "?").s, d.rank, d.chunk, d.text ? d.text : "");
    return status == STATUS_CORRUPT ? STATUS_DAMAGE : status;
}

static int tell_restored(struct larder_restore *r, const char *run, const struct st_files *f, size_t tensors,
                         bool json)
{
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    uint64_t bytes = 0;
    json_t *files = json_array();
    (void)larder_restore_info(r, &info);
    for (size_t i = 0; i < f->count; i++) {
        bytes += f->file[i].bytes;
        json_array_append_new(files, json_string(f->file[i].path));
    }
    if (json)
        return json_print(json_pack("{s:s,s:o,s:I,s:o,s:I,s:I,s:I}", "run", run, "step", json_u64(info.step),
                                    "sequence", (json_int_t)info.sequence, "files", files, "tensors",
                                    (json_int_t)tensors, "bytes", (json_int_t)bytes, "fetched_bytes",
                                    (json_int_t)info.fetched_bytes));
    printf("restored %s step %" PRIu64 ", sequence %" PRIu64 ": %zu tensors, %s in %zu file%s\n",
           name_text(run).s, info.step, info.sequence, tensors, size_text(bytes).s, f->count,
           f->count == 1 ? "" : "s");
    json_decref(files);
    return STATUS_OK;
}

static int exists_already(const struct st_files *f, const char *out)
{
    if (access(out, F_OK) == 0)
        return fail_with(STATUS_CONFLICT, "%s exists; give --force to replace it", out);
    for (size_t i = 0; i < f->count; i++)
        if (access(f->file[i].path, F_OK) == 0)
            return fail_with(STATUS_CONFLICT, "%s exists; give --force to replace it", f->file[i].path);
    return STATUS_OK;
}

struct restoring {
    struct larder_restore_options o;
    const char *out, *prefix;
    bool force, json;
};

static int restore(struct larder *c, const struct restoring *want)
{
    struct larder_error le = {0};
    struct err e = {0};
    struct larder_restore *r = NULL;
    struct st_files files = {0};
    struct chosen chosen = {0};
    json_t *layout = NULL;
    int status;
    if (larder_restore_open(c, &want->o, &r, &le) < 0)
        return fail(&le);
    if ((status = layout_read(r, &layout)) != STATUS_OK)
        goto out;
    choose(r, want->prefix, &chosen);
    if (chosen.count == 0 && *want->prefix) {
        status = fail_with(STATUS_MISSING, "no tensor of the checkpoint begins with \"%s\"",
                           name_text(want->prefix).s);
        goto out;
    }
    if (st_files_plan(want->out, layout, chosen.entries, chosen.count, &files, &e) < 0) {
        status = fail_err(&e);
        goto out;
    }
    if (!want->force && (status = exists_already(&files, want->out)) != STATUS_OK)
        goto out;
    if (st_files_create(&files, &e) < 0)
        status = fail_err(&e);
    else
        status = fill(r, &files);
    if (status == STATUS_OK && st_files_finish(&files, want->out, &e) < 0)
        status = fail_err(&e);
    if (status == STATUS_OK)
        status = tell_restored(r, want->o.run, &files, chosen.count, want->json);
out:
    st_files_close(&files);
    free(chosen.entries);
    json_decref(layout);
    larder_restore_close(r);
    return status;
}

static int restore_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct restoring want = {.o = LARDER_INIT(larder_restore_options), .prefix = ""};
    uint64_t sequence = 0;
    bool fallback = false;
    const struct opt opts[] = {{"sequence", OPT_NUMBER, &sequence},
                               {"prefix", OPT_TEXT, &want.prefix},
                               {"fallback", OPT_FLAG, &fallback},
                               {"force", OPT_FLAG, &want.force},
                               {0}};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 2, 3, &common, &status))
        return status;
    if (argc == 3 && sequence)
        return fail_usage(cmd->name, "give a step or --sequence, not both");
    want.o.run = argv[0];
    want.o.at = argc == 3 ? LARDER_AT_STEP : sequence ? LARDER_AT_SEQUENCE : LARDER_AT_LATEST;
    want.o.value = sequence;
    want.o.fallback = fallback;
    want.out = argv[argc - 1];
    want.json = common.json;
    if (argc == 3 && !parse_number(argv[1], &want.o.value))
        return fail_usage(cmd->name, "\"%s\" is not a step", argv[1]);
    if (!ends_with(want.out, ".safetensors") && !ends_with(want.out, ".safetensors" INDEX_SUFFIX))
        return fail_usage(cmd->name,
                          "\"%s\" must end in .safetensors, or in .safetensors%s for a set of files",
                          want.out, INDEX_SUFFIX);
    guard_maps();
    if ((status = client_open(&common, &c)) == STATUS_OK)
        status = restore(c, &want);
    return client_close(c, status);
}

const struct command cmd_ckpt_restore = {
    "ckpt restore", "write a checkpoint to safetensors files",
    "usage: larder ckpt restore RUN [STEP] OUT.safetensors [options]\n"
    "Writes the tensors of a checkpoint, whatever number of ranks saved it, to one safetensors file. Where "
    "it was\n"
    "saved from safetensors files, their metadata and order are kept, and OUT.safetensors.index.json writes "
    "the same\n"
    "set of files and the index. Nothing is left behind if anything is damaged (exit status 1).\n"
    "  --sequence N     this commit instead of a step\n"
    "  --fallback       if the latest is damaged, take the one before\n"
    "  --prefix TEXT    only tensors whose names begin so\n"
    "  --force          replace files that exist\n"
    "  --json           {\"run\", \"step\", \"sequence\", \"files\", \"tensors\", \"bytes\", "
    "\"fetched_bytes\"}\n",
    restore_run};
