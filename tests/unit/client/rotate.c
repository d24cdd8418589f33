/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a rotation wraps each run's key anew, and never drops the last envelope that the user can open.
 * Method: a scripted server that holds one run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/opened.h"
#include "tests/support/scripted.h"

struct stock {
    struct id run_id;
    uint8_t envelopes[4][ENVELOPE_BYTES];
    uint32_t count;
    atomic_uint put, dropped; /* dropped: sum of the epochs */
};

static struct kek make_kek(uint32_t epoch, uint8_t fill)
{
    uint8_t raw[KEY_BYTES];
    memset(raw, fill, sizeof raw);
    return (struct kek){.epoch = epoch, .key = secret_create(raw, sizeof raw)};
}

static void answer_list(struct stock *k, struct scripted *s, const struct frame_header *h, uint8_t kind)
{
    struct buf items = {0}, b = {0};
    uint8_t epochs[4 * 4];
    for (uint32_t i = 0; i < k->count; i++) {
        struct id id;
        uint32_t epoch;
        check(envelope_epoch(k->envelopes[i], ENVELOPE_BYTES, &id, &epoch, NULL) == 0);
        le32_put(epochs + 4 * i, epoch);
    }
    struct msg_run_item item = {
        .name = slice_str("llm"), .run_id = k->run_id, .envelope_epochs = SLICE(epochs, 4 * k->count)};
    if (kind == RUN_CHECKPOINTS)
        msg_run_item_encode(&item, &items);
    struct msg_list_reply reply = {.count = kind == RUN_CHECKPOINTS, .items = SLICE(items.p, items.n)};
    msg_list_reply_encode(&reply, &b);
    scripted_answer(s, h, 0, b.p, b.n);
    buf_free(&items);
    buf_free(&b);
}

static void answer_open(struct stock *k, struct scripted *s, const struct frame_header *h)
{
    struct buf b = {0};
    struct msg_run_open_reply reply = {.run_id = k->run_id,
                                       .envelopes = SLICE(k->envelopes, k->count * ENVELOPE_BYTES)};
    msg_run_open_reply_encode(&reply, &b);
    scripted_answer(s, h, 0, b.p, b.n);
    buf_free(&b);
}

static enum scripted_next answer(void *arg, struct scripted *s, const struct frame_header *h,
                                 const uint8_t *payload)
{
    struct stock *k = arg;
    struct rcur in = rcur_of(payload, h->payload_bytes);
    struct msg_run_list list;
    struct msg_envelope_put put;
    struct msg_envelope_drop drop;
    switch (h->opcode) {
    case OP_RUN_LIST:
        check(msg_run_list_decode(&in, &list, NULL) == 0);
        answer_list(k, s, h, list.kind);
        break;
    case OP_RUN_OPEN: answer_open(k, s, h); break;
    case OP_ENVELOPE_PUT:
        check(msg_envelope_put_decode(&in, &put, NULL) == 0 && put.envelope.n == ENVELOPE_BYTES &&
              k->count < 4);
        memcpy(k->envelopes[k->count++], put.envelope.p, ENVELOPE_BYTES);
        atomic_fetch_add(&k->put, 1);
        scripted_answer(s, h, 0, NULL, 0);
        break;
    case OP_ENVELOPE_DROP:
        check(msg_envelope_drop_decode(&in, &drop, NULL) == 0);
        atomic_fetch_add(&k->dropped, drop.epoch);
        scripted_answer(s, h, 0, NULL, 0);
        break;
    default: check(!"an opcode that a rotation has no use for");
    }
    return SCRIPT_GO_ON;
}

static void stock_add(struct stock *k, struct kek kek, const struct dek *dek)
{
    uint8_t salt[SALT_BYTES] = {(uint8_t)k->count};
    check(envelope_wrap(&kek, "acme", &k->run_id, dek, salt, k->envelopes[k->count++], NULL) == 0);
    secret_free(kek.key);
}

/* Rotates with KEKs 1 (of ones) and 2 (of twos). */
static int rotate(struct stock *k, bool drop_old, uint64_t *runs, struct larder_error *error)
{
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = k});
    struct larder *c = calloc(1, sizeof *c);
    struct kek keks[2] = {make_kek(1, 1), make_kek(2, 2)};
    struct err e;
    c->pid = getpid();
    c->options = (struct larder_options){.size = sizeof c->options,
                                         .connect_timeout_ms = 5000,
                                         .request_timeout_ms = 5000,
                                         .reconnect_ms = 5000};
    snprintf(c->credentials.tenant, sizeof c->credentials.tenant, "acme");
    c->credentials.keks = (struct keyring){.keks = keks, .count = 2};
    snprintf(c->host, sizeof c->host, "127.0.0.1");
    snprintf(c->port, sizeof c->port, "%s", scripted_port(s));
    assert_int_equal(client_connect(c, CONN_LANE_OPEN, &c->conn, &e), 0);
    int rc = larder_key_rotate(c, drop_old, runs, error);
    conn_close(c->conn);
    scripted_stop(s);
    secret_free(keks[0].key);
    secret_free(keks[1].key);
    free(c);
    return rc;
}

static struct dek make_dek(uint8_t fill)
{
    uint8_t raw[KEY_BYTES];
    memset(raw, fill, sizeof raw);
    return (struct dek){.id = {{fill}}, .key = secret_create(raw, sizeof raw)};
}

static void a_key_is_wrapped_anew_and_the_old_envelope_dropped(void **state)
{
    (void)state;
    for (int drop = 0; drop < 2; drop++) {
        struct stock k = {.run_id = {{9}}};
        struct dek dek = make_dek(7), got;
        struct larder_error error;
        uint64_t runs = 0;
        stock_add(&k, make_kek(1, 1), &dek);
        assert_int_equal(rotate(&k, drop, &runs, &error), 0);
        assert_int_equal(runs, 1);
        assert_int_equal(k.put, 1);
        assert_int_equal(k.dropped, drop ? 1 : 0);
        struct kek second = make_kek(2, 2);
        struct keyring ring = {.keks = &second, .count = 1};
        assert_int_equal(envelope_open(&ring, "acme", &k.run_id, k.envelopes[1], ENVELOPE_BYTES, &got, NULL),
                         0);
        assert_true(secret_equal(got.key, dek.key));
        secret_free(second.key);
        dek_free(&got);
        dek_free(&dek);
    }
}

/* Epoch 2 of the store is another KEK than epoch 2 of the credential file: dropping epoch 1 would lock the
 * user out.
 */
static void the_last_envelope_that_opens_stays(void **state)
{
    (void)state;
    struct stock k = {.run_id = {{9}}};
    struct dek dek = make_dek(7);
    struct larder_error error;
    stock_add(&k, make_kek(1, 1), &dek);
    stock_add(&k, make_kek(2, 99), &dek);
    assert_true(rotate(&k, true, NULL, &error) < 0);
    assert_int_equal(error.kind, LARDER_WRONG_KEY);
    assert_non_null(strstr(error.text, "the old envelopes are kept"));
    assert_int_equal(k.dropped, 0);
    dek_free(&dek);
}

static void an_envelope_with_another_key_stops_it(void **state)
{
    (void)state;
    struct stock k = {.run_id = {{9}}};
    struct dek dek = make_dek(7), other = make_dek(8);
    struct larder_error error;
    stock_add(&k, make_kek(1, 1), &dek);
    stock_add(&k, make_kek(2, 2), &other);
    assert_true(rotate(&k, true, NULL, &error) < 0);
    assert_non_null(strstr(error.text, "holds another key"));
    assert_int_equal(k.dropped, 0);
    dek_free(&dek);
    dek_free(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_key_is_wrapped_anew_and_the_old_envelope_dropped),
        cmocka_unit_test(the_last_envelope_that_opens_stays),
        cmocka_unit_test(an_envelope_with_another_key_stops_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
