/* SPDX-License-Identifier: Apache-2.0 */
/* larder status. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/commands.h"

/* What people read is grouped, and written with units; --json has the server's own flat object. */

struct shown {
    const char *key, *name;
};

static const struct shown of_store[] = {{"store_read_only_reason", "read-only because"},
                                        {"store_free_bytes", "free"},
                                        {"store_total_bytes", "size of its disk"},
                                        {"store_stored_bytes", "stored"},
                                        {"reserved_bytes", "promised to saves under way"},
                                        {"unpacked_bytes", "unpacked shards beside it"},
                                        {"store_tenants", "tenants"},
                                        {"store_runs", "runs and datasets"},
                                        {"store_commits", "checkpoints and versions"},
                                        {"store_segments_open", "parts being written"},
                                        {"store_damaged_objects", "damaged objects"},
                                        {"store_id", "id"},
                                        {0}};
static const struct shown of_now[] = {{"sessions_open", "sessions"},
                                      {"lanes_open", "  of them bulk lanes"},
                                      {"feeds_open", "feeds that report"},
                                      {"requests_in_flight", "requests in flight"},
                                      {"joins_waiting", "ranks that wait for others"},
                                      {0}};
static const struct shown since_start[] = {{"sessions_total", "sessions"},
                                           {"sessions_refused", "connections refused"},
                                           {"lanes_total", "bulk lanes"},
                                           {"lanes_refused", "  refused"},
                                           {"lanes_tampered", "  ended: changed on the way"},
                                           {"requests_total", "requests"},
                                           {"requests_failed", "  failed"},
                                           {"requests_cancelled", "  cancelled"},
                                           {"received_bytes", "received"},
                                           {"sent_bytes", "sent"},
                                           {"restore_read_bytes", "read for restores"},
                                           {"feed_read_bytes", "read for feeds"},
                                           {"disk_read_bytes", "  of them from disk"},
                                           {"joined_read_bytes", "  with a read for another client"},
                                           {"cached_read_bytes", "  still in memory"},
                                           {"ahead_read_bytes", "  asked for ahead"},
                                           {"unpacked_shards_total", "shards unpacked for feeds"},
                                           {"feed_reports_total", "reports of feeds"},
                                           {"feed_network_ms", "  they waited for the network"},
                                           {"feed_disk_ms", "  for the disk"},
                                           {"feed_decode_ms", "  for decoding"},
                                           {"feed_full_ms", "  were full"},
                                           {"scrub_read_bytes", "read for verify"},
                                           {"segment_written_bytes", "written for saves and imports"},
                                           {"segments_created", "parts begun"},
                                           {"segments_sealed", "  made durable"},
                                           {"segments_discarded", "  given up"},
                                           {"chunks_received", "chunks written"},
                                           {"chunks_refused", "  damaged on arrival"},
                                           {"commits_total", "commits"},
                                           {"commits_failed", "saves that failed"},
                                           {"pruned_commits", "commits pruned"},
                                           {"pruned_bytes", "  freed"},
                                           {"corrupt_found", "objects found damaged"},
                                           {0}};
/* In the head, in the table, or the same as another. */
static const char *const elsewhere[] = {
    "version",         "protocol", "uptime_ms", "server_time_ns", "io", "transport",
    "store_read_only", "class_",   "loop",      "feeds",          NULL};

static bool ends_in(const char *key, const char *end)
{
    size_t n = strlen(key), m = strlen(end);
    return n > m && strcmp(key + n - m, end) == 0;
}

static void show(const char *key, const char *name, const json_t *v)
{
    if (!v || (json_is_string(v) && !*json_string_value(v)))
        return;
    printf("  %-30s ", name_text(name).s);
    if (json_is_string(v))
        printf("%s\n", name_text(json_string_value(v)).s);
    else if (json_is_integer(v) && ends_in(key, "_bytes"))
        printf("%s\n", size_text((uint64_t)json_integer_value(v)).s);
    else if (json_is_integer(v))
        printf("%" JSON_INTEGER_FORMAT "%s\n", json_integer_value(v), ends_in(key, "_ms") ? " ms" : "");
    else
        printf("%s\n", json_is_true(v) ? "yes" : json_is_false(v) ? "no" : "-");
}

static void show_group(const char *title, const struct shown *group, const json_t *server)
{
    printf("\n%s\n", title);
    for (; group->key; group++)
        show(group->key, group->name, json_object_get(server, group->key));
}

static bool is_shown(const char *key)
{
    const struct shown *const groups[] = {of_store, of_now, since_start};
    for (size_t i = 0; elsewhere[i]; i++)
        if (strncmp(key, elsewhere[i], strlen(elsewhere[i])) == 0)
            return true;
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        for (const struct shown *s = groups[g]; s->key; s++)
            if (strcmp(key, s->key) == 0)
                return true;
    return false;
}

/* Of a newer server. */
static void show_others(const json_t *server)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)server, key, value)
    {
        if (!is_shown(key))
            show(key, key, value);
    }
}

static uint64_t class_figure(const json_t *server, const char *class, const char *what)
{
    char key[96];
    snprintf(key, sizeof key, "class_%s_%s", class, what);
    return (uint64_t)json_integer_value(json_object_get(server, key));
}

/* How the scheduler shares the disk: who waits, and how long it took. */
static void show_classes(const json_t *server)
{
    static const char *const classes[] = {"restore", "feed", "save", "scrub"};
    static const char *const heads[] = {"DISK WORK", ">OPERATIONS",    ">IN FLIGHT",
                                        ">QUEUED",   ">WAITED (MEAN)", ">WAITED (MOST)"};
    struct table t;
    table_begin(&t, heads, 6);
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        uint64_t n = class_figure(server, classes[i], "admitted");
        char mean[32], most[32];
        snprintf(mean, sizeof mean, "%.1f ms",
                 n ? (double)class_figure(server, classes[i], "waited_ms") / (double)n : 0);
        snprintf(most, sizeof most, "%" PRIu64 " ms", class_figure(server, classes[i], "waited_ms_max"));
        table_row(&t, classes[i], number_text(n).s,
                  size_text(class_figure(server, classes[i], "in_flight_bytes")).s,
                  number_text(class_figure(server, classes[i], "queued")).s, mean, most);
    }
    printf("\n");
    table_end(&t);
}

static int by_rank(const void *a, const void *b)
{
    const json_t *p = *(json_t *const *)a, *q = *(json_t *const *)b;
    static const char *const keys[] = {"tenant", "run", "dataset"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *s = json_string_value(json_object_get(p, keys[i])),
                   *t = json_string_value(json_object_get(q, keys[i]));
        int d = strcmp(s ? s : "", t ? t : "");
        if (d)
            return d;
    }
    json_int_t r = json_integer_value(json_object_get(p, "rank")),
               s = json_integer_value(json_object_get(q, "rank"));
    return r < s ? -1 : r > s;
}

static uint64_t of_feed(const json_t *feed, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(feed, key));
}

/* Share of the time between the last two reports. */
static struct text share_of(const json_t *feed, const char *key)
{
    struct text t;
    uint64_t all = of_feed(feed, "recent_ms");
    snprintf(t.s, sizeof t.s, "%.0f %%", all ? 100.0 * (double)of_feed(feed, key) / (double)all : 0.0);
    return t;
}

static void show_feed(struct table *t, const json_t *f)
{
    const char *run = json_string_value(json_object_get(f, "run")),
               *name = json_string_value(json_object_get(f, "dataset")),
               *path = json_string_value(json_object_get(f, "path"));
    char rank[48], at[48];
    snprintf(rank, sizeof rank, "%" PRIu64 "/%" PRIu64, of_feed(f, "rank"), of_feed(f, "world"));
    snprintf(at, sizeof at, "%" PRIu64 ":%" PRIu64, of_feed(f, "epoch"), of_feed(f, "position"));
    table_row(t, name ? name : "", run && *run ? run : "-", rank, at,
              number_text(of_feed(f, "batches_ready")).s, size_text(of_feed(f, "in_flight_bytes")).s,
              share_of(f, "recent_network_ms").s, share_of(f, "recent_disk_ms").s,
              share_of(f, "recent_decode_ms").s, share_of(f, "recent_full_ms").s, path ? path : "");
}

/* Which rank waits for what: shares of the last seconds. */
static void show_feeds(const json_t *server)
{
    static const char *const heads[] = {"FEED",    "RUN",        ">RANK",    ">EPOCH:POSITION",
                                        ">READY",  ">IN FLIGHT", ">NETWORK", ">DISK",
                                        ">DECODE", ">FULL",      "PATH"};
    const json_t *feeds = json_object_get(server, "feeds");
    size_t n = json_array_size(feeds);
    uint64_t left_out = of_feed(server, "feeds_left_out");
    if (n == 0)
        return;
    json_t **sorted = need(calloc(n, sizeof *sorted));
    for (size_t i = 0; i < n; i++)
        sorted[i] = json_array_get(feeds, i);
    qsort(sorted, n, sizeof *sorted, by_rank);
    struct table t;
    table_begin(&t, heads, 11);
    for (size_t i = 0; i < n; i++)
        show_feed(&t, sorted[i]);
    printf("\n");
    table_end(&t);
    if (left_out)
        printf("and %" PRIu64 " more\n", left_out);
    free(sorted);
}

static void show_all(const struct larder_info *info, const json_t *server)
{
    uint64_t up_ns = (uint64_t)json_integer_value(json_object_get(server, "uptime_ms")) * 1000000u;
    const char *io = json_string_value(json_object_get(server, "io"));
    printf("%s at %s, as %s (%s), by %s\n", name_text(info->server_software).s, info->server, info->tenant,
           info->role, info->path);
    printf("started %s, on %" JSON_INTEGER_FORMAT " loops, by %s\n", age_text(up_ns + 1, 1).s,
           json_integer_value(json_object_get(server, "loops")), io ? name_text(io).s : "?");
    show_group("store", of_store, server);
    show_group("now", of_now, server);
    show_group("since the start", since_start, server);
    show_others(server);
    show_classes(server);
    show_feeds(server);
}

static int status_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct larder_info info = LARDER_INIT(larder_info);
    struct larder_error e = {0};
    struct larder *c = NULL;
    char *text = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, NULL, 0, 0, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    if (larder_info(c, &info, &e) < 0 || larder_status(c, &text, &e) < 0)
        return client_close(c, fail(&e));
    json_t *server = json_loads(text, 0, NULL);
    if (!server)
        status = fail_with(STATUS_OTHER, "the server's status is not JSON; is it of another version (%s)?",
                           name_text(info.server_software).s);
    else if (common.json)
        status = json_print(json_pack("{s:s,s:s,s:s,s:s,s:s,s:O}", "server", info.server, "software",
                                      info.server_software, "tenant", info.tenant, "role", info.role, "path",
                                      info.path, "status", server));
    else
        show_all(&info, server);
    json_decref(server);
    free(text);
    return client_close(c, status);
}

const struct command cmd_status = {
    "status", "what the server is, has and does",
    "usage: larder status [--json]\n"
    "  --json    {\"server\", \"software\", \"tenant\", \"role\", \"path\", \"status\": {...}}\n"
    "Sizes, times and counts of the store and of what is going on; --json has them as the server sends "
    "them.\n"
    "Of each feed: rank, position, batches ready, bytes on their way, and for how much of the last seconds "
    "its "
    "trainer\n"
    "waited for the network, the server's disk, or decoding, and the feed was full, waiting for the "
    "trainer.\n",
    status_run};
