/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/moments.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define WAYS 8u

/* For each change of the disk: how many units would be lost at most. */
static struct {
    uint32_t *units;
    uint64_t count, room;
    uint64_t operations; /* of the disk */
    uint64_t traffic;    /* of commits */
} seen;

void moments_calm(struct plan *p)
{
    static const enum knob faults[] = {
        KNOB_CRASHES,   KNOB_STOPS,      KNOB_CUT,    KNOB_READ_ERROR,  KNOB_WRITE_ERROR, KNOB_SYNC_ERROR,
        KNOB_NO_SPACE,  KNOB_SHORT,      KNOB_TIGHT,  KNOB_SAME_BOOT,   KNOB_BAD_START,   KNOB_CORRUPT,
        KNOB_MISDIRECT, KNOB_LOST_REPLY, KNOB_GHOSTS, KNOB_CLOCK_STEPS, KNOB_CLIENTS,     KNOB_FEEDERS};
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        p->knob[faults[i]] = plan_knob_least(faults[i]);
    p->knob[KNOB_LOSE] = 1;
    p->knob[KNOB_OPERATOR] = 1;                          /* somebody has to prune and to rotate */
    p->knob[KNOB_STALL] = 20 + p->knob[KNOB_STALL] % 40; /* and ranks the time to die in */
    p->knob[KNOB_CRASH_AT] = UINT32_MAX;
}

static void note_change(struct world *w)
{
    if (w->changes >= seen.room) {
        seen.room = 2 * w->changes + 1024;
        seen.units = reallocarray(seen.units, seen.room, sizeof *seen.units);
        check(seen.units);
    }
    while (seen.count < w->changes) /* an event may bring several */
        seen.units[seen.count++] = 0;
    seen.units[seen.count++] = (uint32_t)sim_unsynced(w->sim, 0);
    seen.operations = sim_operations(w->sim);
    seen.traffic = sim_traffic(w->sim);
}

static uint64_t ways_of(uint64_t units)
{
    return units == 0 ? 1 : 2 * units + 3 < WAYS ? 2 * units + 3 : WAYS;
}

static uint32_t way_at(uint64_t i, uint32_t units, uint64_t *rng)
{
    static const uint32_t first[] = {SIM_LOSE_ALL, SIM_LOSE_NOTHING, SIM_LOSE_ANY};
    if (i < 3)
        return first[i];
    if (2 * units + 3 <= WAYS) /* each of them */
        return SIM_LOSE_BUT + (uint32_t)i - 3;
    return SIM_LOSE_BUT + draw_below(rng, 2 * units);
}

static uint64_t images_in_all(void)
{
    uint64_t n = 0;
    for (uint64_t k = 1; k < seen.count; k++)
        n += ways_of(seen.units[k]);
    return n;
}

void images_play(const struct plan *p, uint64_t most, struct tally *sum)
{
    static struct world w;
    uint64_t rng = p->seed ^ 0x1a3e5, number = 0;
    seen.count = 0;
    world_play(&w, p, &(struct watching){.changed = note_change});
    uint64_t every = most ? images_in_all() / most + 1 : 1;
    for (uint64_t k = 1; k < seen.count; k++)
        for (uint64_t i = 0; i < ways_of(seen.units[k]); i++) {
            struct plan image = *p;
            uint32_t way = way_at(i, seen.units[k], &rng);
            if (number++ % every)
                continue;
            image.knob[KNOB_CRASH_AT] = (uint32_t)k;
            image.knob[KNOB_CRASH_WAY] = way;
            world_play(&w, &image, NULL);
            tally_add(sum, &w.tally);
            sum->images++;
        }
}

void sites_play(const struct plan *p, uint64_t most, struct tally *sum)
{
    static struct world w;
    static const int numbers[] = {EIO, ENOSPC};
    struct plan one = *p;
    one.knob[KNOB_CRASH_AT] = 0;
    one.knob[KNOB_FAIL_AT] = UINT32_MAX;
    one.knob[KNOB_STOPS] = 1;
    seen.count = 0;
    world_play(&w, &one, &(struct watching){.changed = note_change});
    uint64_t operations = seen.operations, every = most ? operations * 2 / most + 1 : 1;
    for (uint64_t i = 0; i < 2 * operations; i += every) {
        one.knob[KNOB_FAIL_AT] = (uint32_t)(i / 2 + 1);
        one.knob[KNOB_FAIL_ERRNO] = (uint32_t)numbers[i % 2];
        world_play(&w, &one, NULL);
        tally_add(sum, &w.tally);
    }
}

void allocations_play(const struct plan *p, uint64_t most, struct tally *sum)
{
    static struct world w;
    struct plan one = *p;
    one.knob[KNOB_CRASH_AT] = 0;
    one.knob[KNOB_STARVE_AT] = UINT32_MAX;
    one.knob[KNOB_STOPS] = 1;
    seen.count = 0;
    world_play(&w, &one, NULL);
    uint64_t allocations = w.allocations, every = most ? allocations / most + 1 : 1;
    for (uint64_t at = 1; at <= allocations; at += every) {
        one.knob[KNOB_STARVE_AT] = (uint32_t)at;
        world_play(&w, &one, NULL);
        tally_add(sum, &w.tally);
    }
}

void cuts_play(const struct plan *p, uint64_t most, struct tally *sum)
{
    static struct world w;
    struct plan one = *p;
    one.knob[KNOB_CRASH_AT] = 0;
    one.knob[KNOB_CUT_AT] = UINT32_MAX;
    seen.count = 0;
    world_play(&w, &one, &(struct watching){.changed = note_change});
    uint64_t every = most ? seen.traffic / most + 1 : 1;
    for (uint64_t at = 1; at <= seen.traffic; at += every) {
        one.knob[KNOB_CUT_AT] = (uint32_t)at;
        world_play(&w, &one, NULL);
        tally_add(sum, &w.tally);
    }
}
