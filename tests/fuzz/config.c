/* SPDX-License-Identifier: Apache-2.0 */
/* larderd's configuration, as any text. What is accepted holds what the rest of larderd counts on, says the
 * same when it is read again, and its sizes and times come back from their plain numbers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_whole(const struct config *c)
{
    check(c->listen_count >= 1 && c->listen_count <= LISTEN_MAX && c->loops <= LOOPS_MAX);
    for (size_t i = 0; i < c->listen_count; i++)
        check(c->listen[i] && c->listen[i][0]);
    check(c->store && c->store[0] && c->certificate && c->key && c->ca);
    check(c->published_count <= PUBLISHED_MAX && c->cap_count <= CAPS_MAX);
    for (size_t i = 0; i < c->published_count; i++) {
        check(c->published[i].name && c->published[i].path && c->published[i].tenant);
        for (size_t k = 0; k < i; k++)
            check(strcmp(c->published[i].name, c->published[k].name) != 0);
    }
    for (size_t i = 0; i < c->cap_count; i++)
        check(c->caps[i].tenant && c->caps[i].tenant[0]);
}

static void check_same(const struct config *a, const struct config *b)
{
    check(a->listen_count == b->listen_count && a->published_count == b->published_count);
    check(a->cap_count == b->cap_count && a->loops == b->loops && strcmp(a->store, b->store) == 0);
    check(a->space_reserve_bytes == b->space_reserve_bytes && a->join_wait_ms == b->join_wait_ms);
    check(memcmp(&a->limits, &b->limits, sizeof a->limits) == 0);
}

static void check_numbers(const char *text)
{
    uint64_t bytes, again;
    uint32_t ms, ms_again;
    char plain[32];
    if (config_size(text, &bytes) == 0) {
        snprintf(plain, sizeof plain, "%llu", (unsigned long long)bytes);
        check(config_size(plain, &again) == 0 && again == bytes);
    }
    if (config_time(text, &ms) == 0) {
        snprintf(plain, sizeof plain, "%ums", ms);
        check(config_time(plain, &ms_again) == 0 && ms_again == ms);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct config *c, *again;
    struct err e = {0};
    char *text = strndup((const char *)data, n); /* a file with a NUL in it is refused before it is parsed */
    check(text);
    if (config_parse(text, "larderd.conf", "/etc/larder", &c, &e) == 0) {
        check_whole(c);
        check(config_parse(text, "larderd.conf", "/etc/larder", &again, &e) == 0);
        check_same(c, again);
        config_free(again);
        config_free(c);
    } else {
        check(e.class != ERR_NONE && strstr(e.text, "larderd.conf"));
    }
    check_numbers(text);
    free(text);
    return 0;
}
