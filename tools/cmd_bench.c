/* SPDX-License-Identifier: Apache-2.0 */
/* larder bench limits|codec. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "tools/bench.h"
#include "tools/commands.h"
#include "tools/files.h"

static json_t *stage_json(enum stage s, const struct stage_figures *f)
{
    if (f->gbps == 0)
        return json_pack("{s:s,s:n,s:n,s:s}", "stage", stage_name(s), "gbps", "cpu_s_per_gb", "why",
                         f->why_not);
    json_t *o =
        json_pack("{s:s,s:f,s:f}", "stage", stage_name(s), "gbps", f->gbps, "cpu_s_per_gb", f->cpu_s_per_gb);
    if (s == STAGE_ZSTD || s == STAGE_PLANES_ENCODE || s == STAGE_PLANES_DECODE)
        json_object_set_new(o, "ratio", json_real(f->ratio));
    if (s == STAGE_DISK_READ || s == STAGE_DISK_WRITE || s == STAGE_CACHED_READ)
        json_object_set_new(o, "direct", json_boolean(f->direct));
    return o;
}

static void stage_row(struct table *t, enum stage s, const struct stage_figures *f)
{
    char gbps[32] = "-", cpu[32] = "-", note[160] = "";
    if (f->gbps > 0) {
        snprintf(gbps, sizeof gbps, "%.2f", f->gbps);
        snprintf(cpu, sizeof cpu, "%.3f", f->cpu_s_per_gb);
    }
    if (f->gbps == 0)
        snprintf(note, sizeof note, "%s", f->why_not);
    else if (s == STAGE_DISK_READ || s == STAGE_DISK_WRITE || s == STAGE_CACHED_READ)
        snprintf(note, sizeof note, "%s", f->direct ? "direct" : "through the page cache");
    else if (f->ratio != 1)
        snprintf(note, sizeof note, "to %.3f of the size", f->ratio);
    table_row(t, stage_name(s), gbps, cpu, note);
}

static int limits_run(const struct command *cmd, int argc, char **argv)
{
    static const char *const heads[] = {"STAGE", ">GB/S", ">CPU S PER GB", "NOTE"};
    struct common common = {0};
    struct stage_work w = {.folder = "/tmp", .data = "bf16-gaussian", .disk_bytes = 512u << 20};
    uint64_t stage_ms = 1000;
    const struct opt opts[] = {{"dir", OPT_TEXT, &w.folder},
                               {"data", OPT_TEXT, &w.data},
                               {"disk-bytes", OPT_SIZE, &w.disk_bytes},
                               {"stage-ms", OPT_NUMBER, &stage_ms},
                               {0}};
    struct table t;
    enum dtype ignored;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    if (!bench_dtype(w.data, &ignored))
        return fail_usage(cmd->name, "\"%s\" is no data: bf16-gaussian, fp32-gaussian, random or zero",
                          w.data);
    if (w.disk_bytes < (16u << 20) || stage_ms < 1 || stage_ms > 600000)
        return fail_usage(cmd->name, "--disk-bytes is at least 16M, --stage-ms from 1 to 600000");
    w.seconds = (double)stage_ms / 1000;
    json_t *list = common.json ? json_array() : NULL;
    struct progress p;
    progress_begin(&p, "measuring");
    table_begin(&t, heads, 4);
    for (int s = 0; s < STAGE_COUNT; s++) {
        struct stage_figures f;
        progress_bytes(&p, (uint64_t)s, STAGE_COUNT, stage_name((enum stage)s));
        stage_measure((enum stage)s, &w, &f);
        if (list)
            json_array_append_new(list, stage_json((enum stage)s, &f));
        else
            stage_row(&t, (enum stage)s, &f);
    }
    progress_end(&p);
    if (list)
        return json_print(json_pack("{s:i,s:s,s:s,s:o}", "cores", cores_usable(), "dir", w.folder, "data",
                                    w.data, "stages", list));
    table_end(&t);
    printf(
        "%d cores; GB are 10^9 bytes; memory stages on one core, network with both ends here, disk in %s\n",
        cores_usable(), w.folder);
    return STATUS_OK;
}

const struct command cmd_bench_limits = {
    "bench limits", "what this machine can do, stage by stage",
    "usage: larder bench limits [--dir FOLDER] [--data KIND] [--json]\n"
    "Measures memcpy, checksum, AES-256-GCM, a bulk lane's tag, zstd, planes, loopback TCP, TLS 1.3 and the\n"
    "disk under FOLDER (/tmp), each alone, without larder's server: GB/s (10^9) and CPU seconds per GB.\n"
    "  --data KIND   what the codecs get: bf16-gaussian (default), fp32-gaussian, random, zero\n"
    "  --stage-ms N, --disk-bytes SIZE   for each stage (1000), to write and read (512M)\n"
    "  --json        {\"cores\", \"dir\", \"data\", \"stages\": [{\"stage\", \"gbps\", \"cpu_s_per_gb\", "
    "...}]}\n",
    limits_run};

/* ---- codec
 * ------------------------------------------------------------------------------------------------- */

struct codec_bench {
    json_t *list;
    struct table table;
    uint64_t bytes, stage_ms;
    const char *loops; /* NULL: the best */
};

/* The rows of one kind of data. */
static int codec_rows(struct codec_bench *b, const char *kind, enum dtype dtype, const void *p, size_t n)
{
    static const struct {
        const char *name;
        int level;
    } codecs[] = {
        {"zstd1", -1}, {"fast", CODEC_LEVEL_FAST}, {"dense", CODEC_LEVEL_DENSE}, {"off", CODEC_LEVEL_OFF}};
    for (size_t i = 0; i < sizeof codecs / sizeof codecs[0]; i++) {
        struct codec_figures f = {0};
        if (codec_measure(codecs[i].level, b->loops, dtype, p, n, (double)b->stage_ms / 1000, &f) < 0)
            return fail_with(STATUS_OTHER, "%s of %s failed: no memory?", codecs[i].name, kind);
        if (!f.same)
            return fail_with(STATUS_DAMAGE, "%s of %s: what was decoded is not what was encoded",
                             codecs[i].name, kind);
        if (b->list) {
            json_array_append_new(b->list, json_pack("{s:s,s:s,s:f,s:f,s:f}", "data", kind, "codec",
                                                     codecs[i].name, "ratio", f.ratio, "encode_gbps",
                                                     f.encode_gbps, "decode_gbps", f.decode_gbps));
            continue;
        }
        char ratio[32], encode[32], decode[32];
        snprintf(ratio, sizeof ratio, "%.4f", f.ratio);
        snprintf(encode, sizeof encode, "%.2f", f.encode_gbps);
        snprintf(decode, sizeof decode, "%.2f", f.decode_gbps);
        table_row(&b->table, kind, codecs[i].name, ratio, encode, decode);
    }
    return STATUS_OK;
}

static int codec_kinds(struct codec_bench *b)
{
    static const char *const kinds[] = {"bf16-gaussian", "fp32-gaussian", "random", "zero"};
    void *p = need(aligned_alloc(4096, b->bytes));
    int status = STATUS_OK;
    for (size_t i = 0; i < 4 && status == STATUS_OK; i++) {
        enum dtype dtype;
        if (bench_fill(kinds[i], 1, p, b->bytes) && bench_dtype(kinds[i], &dtype))
            status = codec_rows(b, kinds[i], dtype, p, b->bytes);
    }
    free(p);
    return status;
}

static int codec_file(struct codec_bench *b, const char *path, const char *dtype_word)
{
    enum dtype dtype;
    struct err e = {0};
    char *p = NULL;
    size_t n = 0;
    uint64_t unit;
    if (!dtype_word || dtype_of_name(dtype_word, &dtype) < 0)
        return fail_usage("bench codec", "--file needs --dtype, such as BF16, F32 or U8");
    if (file_read(path, (size_t)1 << 32, &p, &n, &e) < 0)
        return fail_err(&e);
    unit = dtype_bits(dtype) >= 8 ? dtype_bits(dtype) / 8 : 1;
    n -= n % unit;
    int status = n ? codec_rows(b, path, dtype, p, n) : fail_with(STATUS_CORRUPT, "%s is empty", path);
    free(p);
    return status;
}

static bool loops_known(const char *name)
{
    for (unsigned i = 0; codec_loops_at(i); i++)
        if (strcasecmp(codec_loops_at(i), name) == 0)
            return true;
    return false;
}

static int loops_refuse(const char *command, const char *name)
{
    char have[128] = "";
    for (unsigned i = 0; codec_loops_at(i); i++)
        snprintf(have + strlen(have), sizeof have - strlen(have), "%s%s", i ? ", " : "", codec_loops_at(i));
    return fail_usage(command, "this machine has no loops named %s; it has %s", name, have);
}

static int codec_run(const struct command *cmd, int argc, char **argv)
{
    static const char *const heads[] = {"DATA", "CODEC", ">RATIO", ">ENCODE GB/S", ">DECODE GB/S"};
    struct common common = {0};
    const char *file = NULL, *dtype = NULL;
    struct codec_bench b = {.bytes = 64u << 20, .stage_ms = 500};
    const struct opt opts[] = {{"file", OPT_TEXT, &file},     {"dtype", OPT_TEXT, &dtype},
                               {"bytes", OPT_SIZE, &b.bytes}, {"stage-ms", OPT_NUMBER, &b.stage_ms},
                               {"loops", OPT_TEXT, &b.loops}, {0}};
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    if (b.loops && !loops_known(b.loops))
        return loops_refuse(cmd->name, b.loops);
    if (b.bytes < 4096 || b.bytes > (uint64_t)8 << 30 || b.stage_ms > 600000)
        return fail_usage(cmd->name, "--bytes is from 4 KiB to 8 GiB, --stage-ms at most 600000");
    b.bytes -= b.bytes % 4096;
    b.list = common.json ? json_array() : NULL;
    table_begin(&b.table, heads, 5);
    status = file ? codec_file(&b, file, dtype) : codec_kinds(&b);
    if (common.json && status == STATUS_OK)
        return json_print(b.list);
    json_decref(b.list);
    if (!common.json && status == STATUS_OK)
        table_end(&b.table);
    return status;
}

const struct command cmd_bench_codec = {
    "bench codec", "compression: ratio and speed on one core",
    "usage: larder bench codec [--bytes SIZE] [--file FILE --dtype T] [--loops NAME] [--json]\n"
    "Encodes and decodes chunks of 4 MiB on one core, beside plain zstd level 1, and checks that what comes "
    "back is\n"
    "the same. Data: normal weights as bf16 and fp32, random bytes, zeros; or FILE as elements of T (BF16, "
    "F32, ...).\n"
    "  --bytes SIZE   of each kind of data (64M)    --stage-ms N   for each figure, at least (500)\n"
    "  --loops NAME   of the planes codec: portable, NEON, AVX2, AVX-512; the best that the machine has\n"
    "  --json         [{\"data\", \"codec\", \"ratio\", \"encode_gbps\", \"decode_gbps\"}]\n",
    codec_run};
