/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct range {
    const char *name;
    uint32_t least, from, to; /* least: what is left when it is shrunk away */
    bool sometimes;           /* drawn from the range in every other seed, else least */
};

static const struct range ranges[KNOBS] = {
    [KNOB_CRASHES] = {"crashes", 0, 1, 8, true},
    [KNOB_STOPS] = {"stops", 0, 1, 3, true},
    [KNOB_LOSE] = {"lose", 0, 1, 1, true},
    [KNOB_KILLS] = {"kills", 0, 1, 4, true},
    [KNOB_ZOMBIES] = {"zombies", 0, 1, 3, true},
    [KNOB_CUT] = {"cut", 0, 50, 3000, true},
    [KNOB_READ_ERROR] = {"read-error", 0, 100, 20000, true},
    [KNOB_CORRUPT] = {"corrupt", 0, 1000, 100000, true},
    [KNOB_MISDIRECT] = {"misdirect", 0, 1000, 100000, true},
    [KNOB_WRITE_ERROR] = {"write-error", 0, 100, 6000, true},
    [KNOB_SYNC_ERROR] = {"sync-error", 0, 100, 4000, true},
    [KNOB_NO_SPACE] = {"no-space", 0, 100, 10000, true},
    [KNOB_SHORT] = {"short", 0, 1000, 300000, true},
    [KNOB_STALL] = {"stall", 0, 1, 60, true},
    [KNOB_LOST_REPLY] = {"lost-reply", 0, 500, 30000, true},
    [KNOB_GHOSTS] = {"ghosts", 0, 1, 8, true},
    [KNOB_CLOCK_STEPS] = {"clock-steps", 0, 1, 6, true},
    [KNOB_TIGHT] = {"tight", 0, 0, 1, true},
    [KNOB_SAME_BOOT] = {"same-boot", 0, 0, 1, false},
    [KNOB_BAD_START] = {"bad-start", 0, 0, 0, false},
    [KNOB_JOBS] = {"jobs", 1, 1, 2, false},
    [KNOB_RANKS] = {"ranks", 1, 1, 3, false},
    [KNOB_STEPS] = {"steps", 1, 2, 5, false},
    [KNOB_TENSORS] = {"tensors", 1, 1, 4, false},
    [KNOB_BYTES] = {"bytes", 64, 64, 12000, false},
    [KNOB_READERS] = {"readers", 0, 0, 2, false},
    [KNOB_OPERATOR] = {"operator", 0, 0, 1, false},
    [KNOB_DATASET] = {"dataset", 0, 0, 1, false},
    [KNOB_CLIENTS] = {"clients", 0, 1, 8, true},
    [KNOB_FEEDERS] = {"feeders", 0, 1, 2, true},
    [KNOB_LOOPS] = {"loops", 1, 1, 2, false},
    [KNOB_FAIL_AT] = {"fail-at", 0, 0, 0, false},
    [KNOB_FAIL_ERRNO] = {"fail-errno", 0, 0, 0, false},
    [KNOB_CUT_AT] = {"cut-at", 0, 0, 0, false},
    [KNOB_STARVE_AT] = {"starve-at", 0, 0, 0, false},
    [KNOB_CRASH_AT] = {"crash-at", 0, 0, 0, false},
    [KNOB_CRASH_WAY] = {"crash-way", 0, 0, 0, false},
};

/* splitmix64 (Steele, Lea, Flood 2014). */
uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t draw_below(uint64_t *state, uint32_t n)
{
    return n ? (uint32_t)(draw(state) % n) : 0;
}

void plan_draw(struct plan *p, uint64_t seed)
{
    uint64_t state = seed * 0x2545f4914f6cdd1du + 99;
    p->seed = seed;
    for (int k = 0; k < KNOBS; k++) {
        const struct range *r = &ranges[k];
        uint32_t drawn = r->from + draw_below(&state, r->to - r->from + 1);
        p->knob[k] = r->sometimes && draw_below(&state, 2) ? r->least : drawn;
    }
}

const char *plan_knob_name(enum knob k)
{
    return ranges[k].name;
}

uint32_t plan_knob_least(enum knob k)
{
    return ranges[k].least;
}

bool plan_set(struct plan *p, const char *text)
{
    const char *value = strchr(text, '=');
    for (int k = 0; value && k < KNOBS; k++) {
        size_t n = strlen(ranges[k].name);
        if ((size_t)(value - text) != n || strncmp(text, ranges[k].name, n) != 0)
            continue;
        p->knob[k] = (uint32_t)strtoul(value + 1, NULL, 10);
        return true;
    }
    return false;
}

void plan_print(const struct plan *p, char *out, size_t size)
{
    struct plan drawn;
    size_t n = 0;
    plan_draw(&drawn, p->seed);
    out[0] = 0;
    for (int k = 0; k < KNOBS && n < size; k++)
        if (p->knob[k] != drawn.knob[k])
            n += (size_t)snprintf(out + n, size - n, " --set %s=%u", ranges[k].name, p->knob[k]);
}
