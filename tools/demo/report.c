/* SPDX-License-Identifier: Apache-2.0 */
/* What the jobs did, for people: a loss curve drawn with braille dots, then one table. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/demo/demo.h"

#define CURVE_COLUMNS 72
#define CURVE_ROWS    12

struct figures {
    json_t *json;
    const char *title;
    unsigned ranks;
    double seconds, samples;
    double stall_mean, stall_most, durable_mean, durable_most; /* per save, the slowest rank of each */
    double plain, stored, starved[4];
    unsigned saves;
};

static double real_of(const json_t *o, const char *key)
{
    return json_number_value(json_object_get(o, key));
}

/* ---- the curve -------------------------------------------------------------------------------------------
 */

/* Two by four dots to a character: U+2800 and one bit per dot. */
static void put_braille(unsigned bits)
{
    unsigned c = 0x2800 + bits;
    putchar((int)(0xe0 | c >> 12));
    putchar((int)(0x80 | (c >> 6 & 0x3f)));
    putchar((int)(0x80 | (c & 0x3f)));
}

static void dot(unsigned char cells[CURVE_ROWS][CURVE_COLUMNS], int x, int y)
{
    static const unsigned char bit[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    if (x >= 0 && y >= 0 && x < CURVE_COLUMNS * 2 && y < CURVE_ROWS * 4)
        cells[y / 4][x / 2] |= bit[y % 4][x % 2];
}

/* Each dot column shows the mean of its steps; neighbours are joined. */
static void draw(const json_t *loss, unsigned char cells[CURVE_ROWS][CURVE_COLUMNS], double low, double high)
{
    size_t n = json_array_size(loss);
    int before = -1;
    for (int x = 0; x < CURVE_COLUMNS * 2; x++) {
        size_t from = (size_t)x * n / (CURVE_COLUMNS * 2), to = (size_t)(x + 1) * n / (CURVE_COLUMNS * 2);
        double sum = 0;
        to = to > from ? to : from + 1;
        for (size_t i = from; i < to; i++)
            sum += json_real_value(json_array_get(loss, i));
        int y = (int)lround((high - sum / (double)(to - from)) / (high - low) * (CURVE_ROWS * 4 - 1));
        int step = before < 0 || before == y ? 0 : before < y ? 1 : -1;
        for (int at = before < 0 ? y : before; at != y; at += step)
            dot(cells, x, at);
        dot(cells, x, y);
        before = y;
    }
}

static int column_of(double step, size_t steps)
{
    int at = (int)((step - 0.5) * CURVE_COLUMNS / (double)steps);
    return at < 0 ? 0 : at >= CURVE_COLUMNS ? CURVE_COLUMNS - 1 : at;
}

/* The line below the curve: saves, the kill, the resumption. */
static void draw_events(const struct figures *reference, const struct figures *killed,
                        const struct figures *resumed, size_t steps)
{
    const char *mark[CURVE_COLUMNS] = {0};
    size_t i;
    json_t *save;
    json_array_foreach(json_object_get(reference->json, "saves"), i, save)
        mark[column_of(real_of(save, "step"), steps)] = "▴";
    mark[column_of(real_of(killed->json, "kill_step"), steps)] = "✗";
    mark[column_of(real_of(resumed->json, "first_step"), steps)] = "↻";
    printf("        ");
    for (int x = 0; x < CURVE_COLUMNS; x++)
        fputs(mark[x] ? mark[x] : " ", stdout);
    printf("\n        ▴ saved   ✗ rank killed at step %.0f   ↻ resumed after step %.0f\n\n",
           real_of(killed->json, "kill_step"), real_of(resumed->json, "first_step"));
}

static void curve(const struct figures *reference, const struct figures *killed,
                  const struct figures *resumed)
{
    static unsigned char cells[CURVE_ROWS][CURVE_COLUMNS];
    const json_t *loss = json_object_get(resumed->json, "loss");
    size_t n = json_array_size(loss);
    double low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        double v = json_real_value(json_array_get(loss, i));
        low = v < low ? v : low;
        high = v > high ? v : high;
    }
    if (n == 0 || !(high > low))
        return;
    draw(json_object_get(reference->json, "loss"), cells, low, high);
    draw(loss, cells, low, high);
    printf("\n  loss (nats a byte), both runs\n");
    for (int y = 0; y < CURVE_ROWS; y++) {
        printf("  %5.2f ", high - (high - low) * y / (CURVE_ROWS - 1));
        for (int x = 0; x < CURVE_COLUMNS; x++)
            put_braille(cells[y][x]);
        putchar('\n');
    }
    printf("        step 1%*zu\n", CURVE_COLUMNS - 6, n);
    draw_events(reference, killed, resumed, n);
}

/* ---- the table -------------------------------------------------------------------------------------------
 */

static void add_saves(struct figures *f)
{
    json_t *list = json_object_get(f->json, "saves");
    size_t n = json_array_size(list);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_array_get(list, i);
        double step = real_of(s, "step"), stall = 0, durable = 0;
        bool first = true;
        f->plain += real_of(s, "plain_bytes");
        f->stored += real_of(s, "stored_bytes");
        for (size_t k = 0; k < n; k++) {
            const json_t *t = json_array_get(list, k);
            if (real_of(t, "step") != step)
                continue;
            first = first && k >= i;
            stall = fmax(stall, real_of(t, "stall_seconds"));
            durable = fmax(durable, real_of(t, "durable_seconds"));
        }
        if (!first)
            continue;
        f->saves++;
        f->stall_mean += stall;
        f->durable_mean += durable;
        f->stall_most = fmax(f->stall_most, stall);
        f->durable_most = fmax(f->durable_most, durable);
    }
    if (f->saves) {
        f->stall_mean /= f->saves;
        f->durable_mean /= f->saves;
    }
}

static int load(const char *path, struct figures *f)
{
    static const char *const causes[] = {"network", "disk", "decode", "consumer"};
    json_error_t e;
    if (!(f->json = json_load_file(path, 0, &e))) {
        demo_error("%s: %s", path, e.text);
        return -1;
    }
    f->title = json_string_value(json_object_get(f->json, "title"));
    f->ranks = (unsigned)real_of(f->json, "ranks");
    f->seconds = real_of(f->json, "seconds");
    f->samples = real_of(f->json, "samples");
    for (int i = 0; i < 4; i++)
        f->starved[i] = real_of(json_object_get(f->json, "feed"), causes[i]);
    add_saves(f);
    return 0;
}

static void row(const char *label, const struct figures f[2],
                void (*cell)(const struct figures *f, char *out, size_t n))
{
    printf("  %-38s", label);
    for (int i = 0; i < 2; i++) {
        char text[64];
        cell(&f[i], text, sizeof text);
        printf(" %22s", text);
    }
    putchar('\n');
}

#define CELL(name, ...)                                            \
    static void name(const struct figures *f, char *out, size_t n) \
    {                                                              \
        snprintf(out, n, __VA_ARGS__);                             \
    }
CELL(cell_title, "%s, %u ranks", f->title, f->ranks)
CELL(cell_rate, "%.0f", f->seconds > 0 ? f->samples / f->seconds : 0)
CELL(cell_saves, "%u", f->saves)
CELL(cell_stall, "%.2f / %.2f ms", f->stall_mean * 1e3, f->stall_most * 1e3)
CELL(cell_durable, "%.1f / %.1f ms", f->durable_mean * 1e3, f->durable_most * 1e3)
CELL(cell_plain, "%.2f MiB", f->plain / 1048576)
CELL(cell_stored, "%.2f MiB (%.3f)", f->stored / 1048576, f->plain > 0 ? f->stored / f->plain : 0)
CELL(cell_network, "%.3f s", f->starved[0])
CELL(cell_disk, "%.3f s", f->starved[1])
CELL(cell_decode, "%.3f s", f->starved[2])
CELL(cell_consumer, "%.3f s", f->starved[3])

static void table(const struct figures f[2])
{
    row("", f, cell_title);
    row("samples per second", f, cell_rate);
    row("saves that became durable", f, cell_saves);
    row("stall per save, mean / most", f, cell_stall);
    row("submit to durable, mean / most", f, cell_durable);
    row("checkpoint bytes before compression", f, cell_plain);
    row("checkpoint bytes after (ratio)", f, cell_stored);
    row("trainer starved by the network", f, cell_network);
    row("trainer starved by the disk", f, cell_disk);
    row("trainer starved by decoding", f, cell_decode);
    row("feed full, waiting for the trainer", f, cell_consumer);
    const char *path = json_string_value(json_object_get(json_object_get(f[0].json, "feed"), "path"));
    printf("  seconds are summed over ranks; bytes travelled by: %s\n", path ? path : "?");
}

int report_main(int argc, char **argv)
{
    struct figures f[3] = {0};
    if (argc != 4 || strcmp(argv[1], "--help") == 0) {
        printf("usage: larder-demo report REFERENCE.json KILLED.json RESUMED.json\n"
               "Exit status: 0 if the final weights of the reference and the resumed job are the same, else "
               "1.\n");
        return argc == 2 ? 0 : 2;
    }
    int status = 0;
    for (int i = 0; i < 3 && status == 0; i++)
        status = load(argv[1 + i], &f[i]);
    if (status == 0) {
        const char *a = json_string_value(json_object_get(f[0].json, "sha256"));
        const char *b = json_string_value(json_object_get(f[2].json, "sha256"));
        curve(&f[0], &f[1], &f[2]);
        table((const struct figures[2]){f[0], f[2]});
        bool same = a && b && strcmp(a, b) == 0;
        printf("\n  SHA-256 of the final weights\n    %-28s %s\n    %-28s %s\n  %s\n", "never interrupted",
               a ? a : "?", "killed, resumed", b ? b : "?", same ? "the same" : "DIFFERENT");
        status = same ? 0 : 1;
    } else {
        status = 1;
    }
    for (int i = 0; i < 3; i++)
        json_decref(f[i].json);
    return status;
}
