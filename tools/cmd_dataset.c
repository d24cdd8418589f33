/* SPDX-License-Identifier: Apache-2.0 */
/* larder dataset import|ls|verify|cat|prune|destroy. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "format/tokens.h"
#include "tools/commands.h"

/* ---- import ---------------------------------------------------------------------------------------------
 */

static void import_progress(void *arg, uint64_t done, uint64_t total, const char *file)
{
    progress_bytes(arg, done, total, file);
}

#define LABELS_MAX 32

/* "a=b,c=d" into key, value, ..., NULL; cuts the text in place. */
static bool labels_split(char *text, const char *labels[2 * LABELS_MAX + 1])
{
    size_t n = 0;
    for (char *next, *pair = text; pair && *pair; pair = next) {
        if ((next = strchr(pair, ',')))
            *next++ = 0;
        char *value = strchr(pair, '=');
        if (!value || value == pair || n == LABELS_MAX)
            return false;
        *value++ = 0;
        labels[2 * n] = pair;
        labels[2 * n++ + 1] = value;
    }
    labels[2 * n] = NULL;
    return true;
}

static bool format_of(const char *word, enum larder_shard_format *out)
{
    static const struct {
        const char *word;
        enum larder_shard_format format;
    } formats[] = {{"auto", LARDER_SHARD_AUTO}, {"whole", LARDER_SHARD_WHOLE},
                   {"tar", LARDER_SHARD_TAR},   {"records", LARDER_SHARD_RECORDS},
                   {"mds", LARDER_SHARD_MDS},   {"tokens", LARDER_SHARD_TOKENS}};
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (strcmp(word, formats[i].word) == 0) {
            *out = formats[i].format;
            return true;
        }
    return false;
}

static bool compression_of(const char *word, enum larder_compression *out)
{
    static const char *const words[] = {"default", "off", "fast", "dense"};
    for (int i = 0; i < 4; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = (enum larder_compression)i;
            return true;
        }
    return false;
}

static void import_note(void *arg, const char *text)
{
    const struct progress *p = arg;
    fprintf(stderr, "%slarder: %s\n", p->shown ? "\r\033[K" : "", text);
}

/* How many shards the version has that was just made: a file may stand for several. */
static size_t shards_of(struct larder *c, const char *name, uint64_t version)
{
    struct larder_dataset *d = NULL;
    if (larder_dataset_open(c, name, version, &d, NULL) < 0)
        return 0;
    size_t n = larder_dataset_shards(d);
    larder_dataset_close(d);
    return n;
}

static int import_told(struct larder *c, const char *name, uint64_t version, bool json)
{
    size_t shards = shards_of(c, name, version);
    if (json)
        return json_print(json_pack("{s:s,s:I,s:I}", "dataset", name, "version", (json_int_t)version,
                                    "shards", (json_int_t)shards));
    printf("imported %s, version %" PRIu64 ": %zu shard%s\n", name_text(name).s, version, shards,
           shards == 1 ? "" : "s");
    return STATUS_OK;
}

/* Whether what was asked for goes together; else an exit code, told. */
static int import_options(const struct command *cmd, struct larder_import_options *o, const char *format,
                          const char *compression, const char *window)
{
    struct token_window w = {0};
    if (!format_of(format, &o->format))
        return fail_usage(cmd->name, "\"%s\" is not a format: auto, tar, mds, tokens, records or whole",
                          format);
    if (!compression_of(compression, &o->compression))
        return fail_usage(cmd->name, "\"%s\" is not a compression: default, off, fast or dense", compression);
    if ((o->format == LARDER_SHARD_RECORDS) != (o->record_bytes != 0))
        return fail_usage(cmd->name, "--format records and --record-bytes go together");
    if (window && !token_window_parse(window, &w))
        return fail_usage(cmd->name, "\"%s\" is not a window: a number of tokens, or 2048+1", window);
    if (window && o->format != LARDER_SHARD_TOKENS && o->format != LARDER_SHARD_AUTO)
        return fail_usage(cmd->name, "--window goes with --format tokens");
    o->window_tokens = w.tokens;
    o->window_extra = w.extra;
    return STATUS_OK;
}

static int import_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    const char *format = "auto", *compression = "default", *label_text = NULL, *window = NULL,
               *labels[2 * LABELS_MAX + 1] = {0};
    const struct opt opts[] = {
        {"format", OPT_TEXT, &format},           {"record-bytes", OPT_SIZE, &o.record_bytes},
        {"compression", OPT_TEXT, &compression}, {"labels", OPT_TEXT, &label_text},
        {"window", OPT_TEXT, &window},           {0}};
    struct larder_error e = {0};
    struct progress p;
    struct larder *c = NULL;
    uint64_t version = 0;
    char *owned = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 2, -1, &common, &status))
        return status;
    if ((status = import_options(cmd, &o, format, compression, window)) != STATUS_OK)
        return status;
    if (label_text && !labels_split(owned = need(strdup(label_text)), labels)) {
        free(owned);
        return fail_usage(cmd->name, "--labels needs KEY=VALUE,KEY=VALUE, at most %d", LABELS_MAX);
    }
    for (int i = 1; i < argc; i++)
        if (access(argv[i], R_OK) < 0) {
            free(owned);
            return fail_with(errno == ENOENT ? STATUS_MISSING : STATUS_DENIED, "%s cannot be read: %s",
                             argv[i], strerror(errno));
        }
    o.dataset = argv[0];
    const char **files = need(calloc((size_t)argc, sizeof *files));
    memcpy(files, argv + 1, (size_t)(argc - 1) * sizeof *files);
    o.files = files;
    o.labels = labels;
    progress_begin(&p, "imported");
    o.progress = import_progress;
    o.progress_arg = &p;
    o.note = import_note;
    o.note_arg = &p;
    if ((status = client_open(&common, &c)) == STATUS_OK) {
        int r = larder_dataset_import(c, &o, &version, &e);
        progress_end(&p);
        if (r < 0)
            status = fail(&e);
        else
            status = import_told(c, argv[0], version, common.json);
    }
    free(files);
    free(owned);
    return client_close(c, status);
}

const struct command cmd_dataset_import = {
    "dataset import", "encrypt and store shards as a new version of a dataset",
    "usage: larder dataset import NAME FILE... [options]\n"
    "Each FILE becomes one shard, named by its base name. A folder with an index.json, or that file, stands "
    "for the\n"
    "shards of an MDS dataset; X.bin and X.idx, or a folder of them, for Megatron token files. One commit "
    "makes the\n"
    "version exist; until then nobody sees it.\n"
    "  --format F          auto (default: by name, else whole), tar, mds, tokens, records, whole\n"
    "  --record-bytes N    with --format records: bytes of one record\n"
    "  --window N[+E]      with token files: a sample is N tokens and E more (2048+1), not a document\n"
    "  --compression C     default, off, fast, dense\n"
    "  --labels K=V,...    kept with the version\n"
    "  --json              {\"dataset\", \"version\", \"shards\"}\n",
    import_run};

/* ---- ls -------------------------------------------------------------------------------------------------
 */

static int one_version(void *arg, const struct larder_commit_info *i)
{
    if (i->state == LARDER_COMMIT_GOOD || i->state == LARDER_COMMIT_BAD)
        json_array_append_new(arg,
                              json_pack("{s:I,s:s,s:b,s:I,s:I,s:I,s:s}", "version", (json_int_t)i->sequence,
                                        "state", commit_state_name(i->state), "pinned", i->pinned,
                                        "plain_bytes", (json_int_t)i->plain_bytes, "stored_bytes",
                                        (json_int_t)i->stored_bytes, "server_time_ns",
                                        (json_int_t)i->server_time_ns, "labels", i->labels ? i->labels : ""));
    return 0;
}

/* All shards; those whose samples cannot be found with null for their number. *status: an exit code if there
 * are any, after telling why. */
static json_t *shards_json(struct larder_dataset *d, uint64_t *samples, uint64_t *bytes, int *status)
{
    struct larder_error e = {0};
    json_t *list = json_array();
    *samples = *bytes = 0;
    for (size_t i = 0; i < larder_dataset_shards(d); i++) {
        struct larder_shard_info s = {.name = ""};
        bool found = larder_dataset_shard(d, i, &s, &e) == 0;
        if (!found)
            *status = fail(&e);
        *samples += s.samples;
        *bytes += s.bytes;
        json_array_append_new(list, json_pack("{s:s,s:I,s:o}", "name", s.name, "bytes", (json_int_t)s.bytes,
                                              "samples",
                                              found ? json_integer((json_int_t)s.samples) : json_null()));
    }
    return list;
}

static uint64_t whole_of(const json_t *o, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(o, key));
}

static void versions_table(const json_t *versions, uint64_t now_ns)
{
    static const char *const heads[] = {">VERSION", "STATE", ">SIZE", ">STORED", ">AGE", "LABELS"};
    struct table t;
    size_t i;
    json_t *v;
    if (json_array_size(versions) == 0)
        return;
    table_begin(&t, heads, 6);
    json_array_foreach(versions, i, v)
    {
        table_row(&t, number_text(whole_of(v, "version")).s, json_string_value(json_object_get(v, "state")),
                  size_text(whole_of(v, "plain_bytes")).s, size_text(whole_of(v, "stored_bytes")).s,
                  age_text(now_ns, whole_of(v, "server_time_ns")).s,
                  json_string_value(json_object_get(v, "labels")));
    }
    table_end(&t);
    putchar('\n');
}

static void shards_table(const json_t *shards)
{
    static const char *const heads[] = {"SHARD", ">SAMPLES", ">SIZE"};
    struct table t;
    size_t i;
    json_t *s;
    table_begin(&t, heads, 3);
    json_array_foreach(shards, i, s)
    {
        bool found = !json_is_null(json_object_get(s, "samples"));
        table_row(&t, json_string_value(json_object_get(s, "name")),
                  found ? number_text(whole_of(s, "samples")).s : "?", size_text(whole_of(s, "bytes")).s);
    }
    table_end(&t);
}

static int list_one(struct larder *c, const char *name, uint64_t version, bool json)
{
    struct larder_error e = {0};
    struct larder_dataset *d = NULL;
    json_t *versions = json_array();
    uint64_t samples, bytes;
    int status = STATUS_OK;
    if (larder_dataset_open(c, name, version, &d, &e) < 0) {
        json_decref(versions);
        return fail(&e);
    }
    /* A published directory has no versions to list; then its shards are all there is. */
    int listed = larder_commit_list(c, LARDER_DATASETS, name, 0, one_version, versions, &e);
    if (listed < 0 && e.kind != LARDER_NOT_FOUND && e.kind != LARDER_UNSUPPORTED && e.kind != LARDER_INVALID)
        status = fail(&e);
    int unfound = STATUS_OK;
    json_t *shards = shards_json(d, &samples, &bytes, &unfound);
    if (status == STATUS_OK && json) {
        status = json_print(json_pack("{s:s,s:o,s:I,s:I,s:O,s:O}", "dataset", name, "version",
                                      json_u64(larder_dataset_version(d)), "samples", (json_int_t)samples,
                                      "bytes", (json_int_t)bytes, "shards", shards, "versions", versions));
    } else if (status == STATUS_OK) {
        versions_table(versions, client_now_ns(c));
        printf("%s, version %" PRIu64 ": %zu shards, %" PRIu64 " samples, %s\n", name_text(name).s,
               larder_dataset_version(d), json_array_size(shards), samples, size_text(bytes).s);
        shards_table(shards);
    }
    if (status == STATUS_OK)
        status = unfound;
    json_decref(shards);
    json_decref(versions);
    larder_dataset_close(d);
    return status;
}

static int ls_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    uint64_t version = 0;
    const struct opt opts[] = {{"version", OPT_NUMBER, &version}, {0}};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 1, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) == STATUS_OK)
        status =
            argc ? list_one(c, argv[0], version, common.json) : runs_list(c, LARDER_DATASETS, common.json);
    return client_close(c, status);
}

const struct command cmd_dataset_ls = {
    "dataset ls", "list datasets, or the versions and shards of one",
    "usage: larder dataset ls [NAME] [--version N] [--json]\n"
    "Lists the datasets; or the versions of NAME, and the shards of its latest version or of version N.\n"
    "  --json    [{\"name\", ...}], or {\"dataset\", \"version\", \"samples\", \"bytes\", \"shards\", "
    "\"versions\"}\n",
    ls_run};

/* ---- verify, cat ------------------------------------------------------------------------------------------
 */

static int verify_main(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    const char *level = "scrub";
    uint64_t version = 0, step = 0;
    const struct opt opts[] = {{"level", OPT_TEXT, &level}, {"version", OPT_NUMBER, &version}, {0}};
    enum larder_verify_level ignored;
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 1, &common, &status))
        return status;
    if (!verify_level(level, &ignored))
        return fail_usage(cmd->name, "\"%s\" is not a level: structure, scrub or deep", level);
    if (version && !argc)
        return fail_usage(cmd->name, "--version goes with a NAME");
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (version)
        status = commit_find(c, LARDER_DATASETS, argv[0], NULL, &version, &step);
    if (status == STATUS_OK)
        status = verify_run(c, LARDER_DATASETS, argc ? argv[0] : NULL, version, level, false, common.json);
    return client_close(c, status);
}

const struct command cmd_dataset_verify = {
    "dataset verify", "check stored datasets",
    "usage: larder dataset verify [NAME] [--version N] [--level structure|scrub|deep] [--json]\n"
    "Checks all versions of all datasets, of NAME, or one version; levels as for ckpt verify. Nothing stored "
    "is\n"
    "changed. Exit status 1 if damage was found.\n",
    verify_main};

#define CAT_BYTES (4u << 20)

static int cat_shard(struct larder_dataset *d, size_t shard, uint64_t offset, uint64_t length)
{
    struct larder_error e = {0};
    struct progress p;
    uint64_t done = 0;
    char *buffer = need(malloc(CAT_BYTES));
    int status = STATUS_OK;
    progress_begin(&p, "read");
    if (isatty(1))
        p.shown = false; /* the bytes themselves are on the terminal */
    while (done < length && status == STATUS_OK) {
        size_t want = length - done < CAT_BYTES ? (size_t)(length - done) : CAT_BYTES;
        int64_t n = larder_dataset_read(d, shard, offset + done, buffer, want, &e);
        if (n < 0)
            status = fail(&e);
        else if (fwrite(buffer, 1, (size_t)n, stdout) != (size_t)n)
            status = fail_with(STATUS_OTHER, "the output could not be written: %s", strerror(errno));
        if (n <= 0)
            break;
        done += (uint64_t)n;
        progress_bytes(&p, done, length, NULL);
    }
    progress_end(&p);
    free(buffer);
    return status;
}

static int cat_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    uint64_t version = 0, offset = 0, length = UINT64_MAX;
    const struct opt opts[] = {
        {"version", OPT_NUMBER, &version}, {"offset", OPT_SIZE, &offset}, {"length", OPT_SIZE, &length}, {0}};
    struct larder_error e = {0};
    struct larder_dataset *d = NULL;
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 2, 2, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (larder_dataset_open(c, argv[0], version, &d, &e) < 0)
        return client_close(c, fail(&e));
    struct larder_shard_info s = {.name = ""};
    size_t i = 0, shards = larder_dataset_shards(d);
    for (; i < shards; i++) { /* its bytes can be read even if its samples cannot be found */
        (void)larder_dataset_shard(d, i, &s, NULL);
        if (strcmp(s.name, argv[1]) == 0)
            break;
    }
    if (i == shards) {
        struct text_long shard = name_text(argv[1]);
        status = fail_with(STATUS_MISSING,
                           "dataset \"%s\" has no shard \"%s\"; larder dataset ls %s lists its %zu",
                           name_text(argv[0]).s, shard.s, name_text(argv[0]).s, shards);
    } else if (offset > s.bytes)
        status = fail_usage(cmd->name, "the shard has %" PRIu64 " bytes, and --offset is %" PRIu64, s.bytes,
                            offset);
    else
        status = cat_shard(d, i, offset, length < s.bytes - offset ? length : s.bytes - offset);
    larder_dataset_close(d);
    return client_close(c, status);
}

const struct command cmd_dataset_cat = {
    "dataset cat", "write the bytes of a shard to standard output",
    "usage: larder dataset cat NAME SHARD [--version N] [--offset BYTES] [--length BYTES]\n"
    "Decrypted and verified. SHARD is a shard's name as dataset ls shows it.\n",
    cat_run};

/* ---- prune, destroy
 * ---------------------------------------------------------------------------------------- */

static int prune_run(const struct command *cmd, int argc, char **argv)
{
    return prune_command(cmd, LARDER_DATASETS, argc, argv);
}
static int destroy_run(const struct command *cmd, int argc, char **argv)
{
    return destroy_command(cmd, LARDER_DATASETS, argc, argv);
}

const struct command cmd_dataset_prune = {
    "dataset prune", "remove old versions that no rule keeps",
    "usage: larder dataset prune NAME [--keep-last N] [--keep-within TIME] [--yes] [--plan DIGEST]\n"
    "As ckpt prune, for the versions of a dataset.\n"
    "  --json    {\"dataset\", \"plan\", \"executed\", \"to_remove\", \"to_keep\", \"removed\", "
    "\"freed_bytes\", \"items\"}\n",
    prune_run};
const struct command cmd_dataset_destroy = {
    "dataset destroy", "erase a dataset: keys first, then everything",
    "usage: larder dataset destroy NAME --yes\n"
    "Destroys the dataset's keys, which erases it for good, then its shards.\n",
    destroy_run};
