/* SPDX-License-Identifier: Apache-2.0 */
/* Records that could not be used at start: skipped, never removed, and kept here by name, so that lists,
 * scrubs and requests tell of them instead of passing over them. The first DAMAGES_MAX are kept; the log
 * tells of all. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

void store_report_damaged(struct store *s, const char *name, const struct err *why)
{
    s->damaged++;
    metric_add(METRIC_corrupt_found, 1);
    struct damage *d = s->damages_kept < DAMAGES_MAX ? calloc(1, sizeof *d) : NULL;
    if (d) {
        const char *component = strrchr(name, '/');
        component = component ? component + 1 : name;
        if (!name_number(component, component[0], 16, &d->sequence) || !strchr("cpb", component[0]))
            d->sequence = 0;
        snprintf(d->name, sizeof d->name, "%s", name);
        d->why = *why;
        list_add_tail(&s->damages, &d->link);
        s->damages_kept++;
    }
    log_error("damaged object is skipped object=%s class=\"%s\" reason=\"%s\"", name,
              err_class_name(why->class), why->text);
}

void damage_forget(struct store *s, const struct run *r)
{
    char folder[OBJECT_NAME_BYTES];
    name_of_folder(r, folder);
    size_t n = strlen(folder);
    list_for_each (it, &s->damages) {
        struct damage *d = container_of(it, struct damage, link);
        d->gone |= strncmp(d->name, folder, n) == 0 && d->name[n] == '/'; /* a scrub may stand on it */
    }
}

const struct damage *damage_of_commit(const struct store *s, const struct run *r, uint64_t above)
{
    char begin[OBJECT_NAME_BYTES];
    const struct damage *best = NULL;
    if (r->unreadable == 0)
        return NULL;
    name_of_folder(r, begin);
    size_t n = strlen(begin);
    list_for_each (it, &s->damages) {
        const struct damage *d = container_of(it, struct damage, link);
        if (d->sequence > above && (!best || d->sequence < best->sequence) &&
            strncmp(d->name, begin, n) == 0 && strncmp(d->name + n, "/c-", 3) == 0)
            best = d;
    }
    return best;
}

const struct damage *damage_of_tenant(const struct store *s, const char *tenant)
{
    char record[OBJECT_NAME_BYTES];
    name_of_tenant(tenant, record);
    size_t n = strlen(record) - strlen("/tenant");
    list_for_each (it, &s->damages) {
        const struct damage *d = container_of(it, struct damage, link);
        if (strncmp(d->name, record, n) == 0 && (d->name[n] == '\0' || strcmp(d->name + n, "/tenant") == 0))
            return d;
    }
    return NULL;
}

const struct damage *damage_of_some_run(const struct tenant *t, const struct store *s)
{
    char begin[OBJECT_NAME_BYTES];
    int n = snprintf(begin, sizeof begin, "t/%s/n/", t->record.name);
    list_for_each (it, &s->damages) {
        const struct damage *d = container_of(it, struct damage, link);
        if (!d->gone && strncmp(d->name, begin, (size_t)n) == 0)
            return d;
    }
    return NULL;
}

const struct damage *damage_of_run(const struct tenant *t, const struct store *s, unsigned kind,
                                   struct slice name)
{
    char object[OBJECT_NAME_BYTES];
    struct id key = run_name_key(kind, name);
    name_of_run(t->record.name, kind, &key, object);
    list_for_each (it, &s->damages) {
        const struct damage *d = container_of(it, struct damage, link);
        if (strcmp(d->name, object) == 0)
            return d;
    }
    return NULL;
}
