/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: behind OpenSSL's handshake our records are TLS 1.3 to any peer, and a peer that has the keys and
 * breaks the protocol is refused with the right alert. Method: the other end is plain OpenSSL, as server and
 * as client, with every suite, tickets, padding, small fragments and key updates; hostile records are sealed
 * with the secrets that this peer logs, in its place.
 */
#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/hash.h"
#include "format/channel.h"
#include "format/record.h"
#include "tests/support/tls_pair.h"

#define PAYLOAD_BYTES 100000

static struct tls_material material;
static struct channel_config *server_config, *client_config;

static int set_up(void **state)
{
    (void)state;
    tls_material_make(&material);
    server_config = tls_config(true, &material.ca, &material.server);
    client_config = tls_config(false, &material.ca, &material.user);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    channel_config_unref(server_config);
    channel_config_unref(client_config);
    tls_material_free(&material);
    return 0;
}

/* ---- a peer that is not ours ---- */

struct peer {
    struct channel *ours;
    struct err err; /* the channel's first */
    bool server;
    SSL_CTX *ctx;
    SSL *ssl;
    uint16_t suite;
    uint8_t its[RECORD_SECRET_MAX], of_ours[RECORD_SECRET_MAX];
};
static struct peer *logging;

static void log_secret(const SSL *ssl, const char *line)
{
    (void)ssl;
    bool client = strncmp(line, "CLIENT_TRAFFIC_SECRET_0 ", 24) == 0;
    if (!client && strncmp(line, "SERVER_TRAFFIC_SECRET_0 ", 24) != 0)
        return;
    const char *hex = strrchr(line, ' ') + 1;
    assert_int_equal(
        hex_decode(hex, strlen(hex) / 2, client == logging->server ? logging->of_ours : logging->its), 0);
}

static int select_first(SSL *ssl, const unsigned char **out, unsigned char *n, const unsigned char *in,
                        unsigned in_bytes, void *arg)
{
    (void)ssl, (void)in_bytes, (void)arg;
    *out = in + 1;
    *n = in[0];
    return SSL_TLSEXT_ERR_OK;
}

static int any_certificate(int good, X509_STORE_CTX *x)
{
    (void)good, (void)x;
    return 1;
}

static void use_own(SSL_CTX *ctx, const struct pki_pair *own)
{
    BIO *b = BIO_new_mem_buf(own->certificate_pem, -1);
    X509 *x = PEM_read_bio_X509(b, NULL, NULL, NULL);
    BIO *k = BIO_new_mem_buf(secret_bytes(own->key_pem), (int)secret_size(own->key_pem) - 1);
    EVP_PKEY *key = PEM_read_bio_PrivateKey(k, NULL, NULL, NULL);
    assert_int_equal(SSL_CTX_use_certificate(ctx, x), 1);
    assert_int_equal(SSL_CTX_use_PrivateKey(ctx, key), 1);
    X509_free(x), EVP_PKEY_free(key), BIO_free(b), BIO_free(k);
}

/* Moves all bytes both ways, `step` at a time towards us. */
static void move(struct peer *p, size_t step)
{
    static uint8_t buf[1 << 16];
    for (bool moved = true; moved;) {
        moved = false;
        if (!SSL_is_init_finished(p->ssl))
            (void)SSL_do_handshake(p->ssl);
        int n = BIO_read(SSL_get_wbio(p->ssl), buf, step < sizeof buf ? (int)step : (int)sizeof buf);
        struct err e = {0};
        if (n > 0) {
            moved = true;
            if (channel_input(p->ours, buf, (size_t)n, &e) < 0 && p->err.class == ERR_NONE)
                p->err = e;
        }
        struct slice out = channel_output(p->ours);
        if (out.n > 0) {
            moved = true;
            int put = BIO_write(SSL_get_rbio(p->ssl), out.p, out.n < 1 << 30 ? (int)out.n : 1 << 30);
            assert_true(put > 0);
            channel_output_done(p->ours, (size_t)put);
        }
    }
}

static void peer_open(struct peer *p, bool server, const char *suite)
{
    *p = (struct peer){.server = server,
                       .ctx = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method())};
    logging = p;
    SSL_CTX_set_keylog_callback(p->ctx, log_secret);
    assert_int_equal(SSL_CTX_set_ciphersuites(p->ctx, suite), 1);
    use_own(p->ctx, server ? &material.server : &material.user);
    if (server) {
        SSL_CTX_set_alpn_select_cb(p->ctx, select_first, NULL);
        SSL_CTX_set_verify(p->ctx, SSL_VERIFY_PEER, any_certificate);
    } else {
        SSL_CTX_set_alpn_protos(p->ctx, (const unsigned char *)"\x08larder/1", 9);
    }
    p->ssl = SSL_new(p->ctx);
    SSL_set_bio(p->ssl, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    server ? SSL_set_accept_state(p->ssl) : SSL_set_connect_state(p->ssl);
    struct err e;
    assert_int_equal(channel_create(server ? client_config : server_config, NULL, &p->ours, &e), 0);
    if (server)
        assert_int_equal(channel_input(p->ours, NULL, 0, &e), 0);
}

static void peer_meets(struct peer *p, bool server, const char *suite)
{
    peer_open(p, server, suite);
    move(p, SIZE_MAX);
    if (p->err.class || !channel_ready(p->ours))
        fail_msg("no handshake with %s: %s", suite, p->err.text);
    p->suite = SSL_CIPHER_get_protocol_id(SSL_get_current_cipher(p->ssl));
    channel_allow_large(p->ours);
}

static void peer_close(struct peer *p)
{
    channel_free(p->ours);
    SSL_free(p->ssl);
    SSL_CTX_free(p->ctx);
}

static const uint8_t *content(void)
{
    static uint8_t bytes[PAYLOAD_BYTES];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 31 + i / 255);
    return bytes;
}

/* The peer reads a frame from us. */
static void to_peer(struct peer *p, uint64_t id, size_t n)
{
    struct frame_header h = {.opcode = OP_PING, .request_id = id};
    uint8_t *got = malloc(FRAME_HEADER_BYTES + n + 1);
    size_t have = 0, want = FRAME_HEADER_BYTES + n;
    assert_int_equal(
        channel_send(p->ours, &h, SLICE(content(), n / 2), SLICE(content() + n / 2, n - n / 2), NULL), 0);
    move(p, SIZE_MAX);
    for (int rc; have < want && (rc = SSL_read(p->ssl, got + have, (int)(want - have + 1))) > 0;)
        have += (size_t)rc;
    assert_int_equal(have, want);
    struct frame_header seen;
    assert_int_equal(frame_header_decode(got, &seen, NULL), 0);
    assert_int_equal(seen.request_id, id);
    assert_memory_equal(got + FRAME_HEADER_BYTES, content(), n);
    free(got);
}

static void expect_frame(struct peer *p, uint64_t id, size_t n)
{
    struct frame f;
    struct err e = {0};
    if (channel_frame(p->ours, &f, &e) != 1)
        fail_msg("no frame %llu: %s%s", (unsigned long long)id, e.text, p->err.text);
    assert_int_equal(f.header.request_id, id);
    assert_int_equal(f.header.payload_bytes, n);
    assert_memory_equal(f.payload, content(), n);
    channel_frame_done(p->ours);
}

/* We read a frame from the peer, in input of `step` bytes. */
static void from_peer(struct peer *p, uint64_t id, size_t n, size_t step)
{
    struct frame_header h = {.opcode = OP_PING, .request_id = id, .payload_bytes = (uint32_t)n};
    uint8_t head[FRAME_HEADER_BYTES];
    frame_header_encode(&h, head);
    assert_int_equal(SSL_write(p->ssl, head, sizeof head), sizeof head);
    assert_true(n == 0 || SSL_write(p->ssl, content(), (int)n) == (int)n);
    move(p, step);
    expect_frame(p, id, n);
}

static void no_more(struct peer *p)
{
    struct frame f;
    struct err e;
    assert_int_equal(channel_frame(p->ours, &f, &e), 0);
    assert_int_equal(p->err.class, ERR_NONE);
}

/* ---- OpenSSL at the other end ---- */

static const char *const suites[] = {"TLS_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256",
                                     "TLS_CHACHA20_POLY1305_SHA256"};
static const size_t lengths[] = {0, 1, 16352, 16353, 40000, PAYLOAD_BYTES};

static void all_lengths(struct peer *p, size_t step)
{
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        to_peer(p, i, lengths[i]);
        from_peer(p, i, lengths[i], step);
    }
    no_more(p);
}

static void openssl_understands_every_suite(void **state)
{
    (void)state;
    static const size_t steps[] = {SIZE_MAX, 1000, 16406, 5};
    for (size_t s = 0; s < 3; s++)
        for (int server = 0; server < 2; server++)
            for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
                struct peer p;
                peer_meets(&p, server, suites[s]); /* a server sends two tickets */
                all_lengths(&p, steps[i]);
                peer_close(&p);
            }
}

static void records_may_be_padded_and_short(void **state)
{
    (void)state;
    for (int server = 0; server < 2; server++) {
        struct peer p;
        peer_meets(&p, server, suites[0]);
        SSL_set_block_padding(p.ssl, 4096);
        all_lengths(&p, 3000);
        SSL_set_block_padding(p.ssl, 1);
        SSL_set_max_send_fragment(p.ssl, 512);
        all_lengths(&p, SIZE_MAX);
        peer_close(&p);
    }
}

static void keys_are_updated_as_the_peer_asks(void **state)
{
    (void)state;
    for (size_t s = 0; s < 3; s++)
        for (int server = 0; server < 2; server++) {
            struct peer p;
            peer_meets(&p, server, suites[s]);
            for (uint64_t i = 0; i < 6; i++) {
                assert_int_equal(
                    SSL_key_update(p.ssl, i % 2 ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED),
                    1);
                from_peer(&p, i, 20000, SIZE_MAX);
                to_peer(&p, i, 20000);
            }
            peer_close(&p);
        }
}

/* Ours is updated before it is worn, which the peer follows. */
static void keys_are_updated_before_they_wear_out(void **state)
{
    (void)state;
    struct peer p;
    peer_meets(&p, false, suites[1]);
    for (uint64_t i = 0; i < RECORD_KEY_MAX + 10; i += 1000) {
        static uint8_t got[1000 * FRAME_HEADER_BYTES];
        struct frame_header h = {.opcode = OP_PING, .request_id = i};
        for (unsigned k = 0; k < 1000; k++)
            assert_int_equal(channel_send(p.ours, &h, SLICE(NULL, 0), SLICE(NULL, 0), NULL), 0);
        move(&p, SIZE_MAX);
        for (size_t have = 0; have < sizeof got;) {
            int rc = SSL_read(p.ssl, got + have, (int)(sizeof got - have));
            assert_true(rc > 0);
            have += (size_t)rc;
        }
    }
    to_peer(&p, 7, 20000);
    from_peer(&p, 8, 20000, SIZE_MAX);
    peer_close(&p);
}

static void a_close_is_told_both_ways(void **state)
{
    (void)state;
    for (int server = 0; server < 2; server++) {
        struct peer p;
        char byte;
        peer_meets(&p, server, suites[0]);
        channel_close(p.ours);
        move(&p, SIZE_MAX);
        assert_int_equal(SSL_read(p.ssl, &byte, 1), 0);
        assert_int_equal(SSL_get_error(p.ssl, 0), SSL_ERROR_ZERO_RETURN);
        assert_false(channel_peer_closed(p.ours));
        from_peer(&p, 1, 100, SIZE_MAX); /* the other way is still open */
        (void)SSL_shutdown(p.ssl);
        move(&p, SIZE_MAX);
        assert_true(channel_peer_closed(p.ours));
        no_more(&p);
        peer_close(&p);
    }
}

/* The peer's first records come in one piece with its Finished. */
static void nothing_behind_the_handshake_is_lost(void **state)
{
    (void)state;
    struct peer p;
    uint8_t head[FRAME_HEADER_BYTES], all[1 << 16], *out;
    size_t n;
    peer_open(&p, false, suites[0]);
    assert_int_equal(SSL_do_handshake(p.ssl), -1); /* its hello */
    int got = BIO_read(SSL_get_wbio(p.ssl), all, sizeof all);
    assert_int_equal(channel_input(p.ours, all, (size_t)got, NULL), 0);
    out = channel_output_take(p.ours, &n);
    assert_int_equal(BIO_write(SSL_get_rbio(p.ssl), out, (int)n), (int)n);
    free(out);
    assert_int_equal(SSL_do_handshake(p.ssl), 1);
    frame_header_encode(&(struct frame_header){.opcode = OP_PING, .request_id = 5, .payload_bytes = 3}, head);
    assert_int_equal(SSL_write(p.ssl, head, sizeof head), sizeof head);
    assert_int_equal(SSL_write(p.ssl, content(), 3), 3);
    got = BIO_read(SSL_get_wbio(p.ssl), all, sizeof all);
    assert_int_equal(channel_input(p.ours, all, (size_t)got, NULL), 0);
    assert_true(channel_ready(p.ours));
    expect_frame(&p, 5, 3);
    to_peer(&p, 6, 1000);
    peer_close(&p);
}

/* ---- a peer with the keys that breaks the protocol ---- */

struct forger {
    struct peer p;
    struct record_key *seals, *opens;
};

static void forger_open(struct forger *f, bool server)
{
    peer_open(&f->p, server, suites[0]);
    SSL_set_num_tickets(f->p.ssl, 0); /* its first record is the forger's */
    move(&f->p, SIZE_MAX);
    assert_true(channel_ready(f->p.ours));
    assert_int_equal(record_key_create(true, 0x1302, f->p.its, &f->seals), 0);
    assert_int_equal(record_key_create(false, 0x1302, f->p.of_ours, &f->opens), 0);
}

static void forger_close(struct forger *f)
{
    record_key_free(f->seals);
    record_key_free(f->opens);
    peer_close(&f->p);
}

static void give(struct forger *f, const void *record, size_t n)
{
    struct err e = {0};
    if (channel_input(f->p.ours, record, n, &e) < 0 && f->p.err.class == ERR_NONE)
        f->p.err = e;
}

static void forge(struct forger *f, enum record_type type, const void *p, size_t n)
{
    static uint8_t record[RECORD_BYTES_MAX];
    give(f, record, record_seal(f->seals, type, &SLICE(p, n), 1, record));
}

/* What we answer: the type of the record; 0 if there is none. */
static int answer(struct forger *f, uint8_t *out, size_t *bytes)
{
    struct slice s = channel_output(f->p.ours);
    enum record_type type;
    size_t n;
    if (s.n == 0)
        return 0;
    assert_true(s.n >= RECORD_HEADER_BYTES);
    assert_int_equal(record_bytes(s.p, &n), 0);
    assert_true(n <= s.n);
    assert_int_equal(record_open(f->opens, s.p, n, out, &type, bytes), 0);
    channel_output_done(f->p.ours, n);
    return type;
}

static void expect_refusal(struct forger *f, enum record_alert alert, enum err_class class, const char *words)
{
    uint8_t out[RECORD_BYTES_MAX];
    size_t n;
    struct frame frame;
    struct err e;
    if (f->p.err.class != class || !strstr(f->p.err.text, words))
        fail_msg("expected '%s', found class %d: %s", words, f->p.err.class, f->p.err.text);
    assert_int_equal(answer(f, out, &n), RECORD_ALERT);
    assert_int_equal(n, 2);
    assert_int_equal(out[0], 2);
    assert_int_equal(out[1], alert);
    assert_int_equal(answer(f, out, &n), 0);
    assert_true(channel_frame(f->p.ours, &frame, &e) < 0);
    assert_true(channel_send(f->p.ours, &(struct frame_header){.opcode = OP_PING}, SLICE(NULL, 0),
                             SLICE(NULL, 0), &e) < 0);
}

static void broken_rules_are_refused(void **state)
{
    (void)state;
    static const uint8_t ticket[] = {4, 0, 0, 3, 1, 2, 3};
    static const struct {
        enum record_type type;
        int server; /* the peer is: 0 or 1, or either: -1 */
        size_t n;
        const char *bytes;
        enum record_alert alert;
        const char *words;
    } cases[] = {
        {RECORD_ALERT, -1, 1, "\1", ALERT_DECODE_ERROR, "an alert that is none"},
        {RECORD_ALERT, -1, 4, "\1\0\1\0", ALERT_DECODE_ERROR, "an alert that is none"},
        {RECORD_HANDSHAKE, -1, 3, "\x18\0\0", ALERT_UNEXPECTED_MESSAGE, "cut into records"},
        {RECORD_HANDSHAKE, -1, 4, "\x18\0\0\1", ALERT_UNEXPECTED_MESSAGE, "cut into records"},
        {RECORD_HANDSHAKE, -1, 5, "\x18\0\0\1\2", ALERT_DECODE_ERROR, "a key update"},
        {RECORD_HANDSHAKE, -1, 4, "\x18\0\0\0", ALERT_DECODE_ERROR, "a key update"},
        {RECORD_HANDSHAKE, -1, 6, "\x18\0\0\2\0\0", ALERT_DECODE_ERROR, "a key update"},
        {RECORD_HANDSHAKE, -1, 10, "\x18\0\0\1\0\x18\0\0\1\0", ALERT_UNEXPECTED_MESSAGE,
         "behind a key update"},
        {RECORD_HANDSHAKE, -1, 4, "\x01\0\0\0", ALERT_UNEXPECTED_MESSAGE, "does not belong"}, /* hello */
        {RECORD_HANDSHAKE, -1, 4, "\x00\0\0\0", ALERT_UNEXPECTED_MESSAGE, "does not belong"}, /* request */
        {RECORD_HANDSHAKE, -1, 4, "\x05\0\0\0", ALERT_UNEXPECTED_MESSAGE, "does not belong"}, /* early data */
        {RECORD_HANDSHAKE, -1, 4, "\x14\0\0\0", ALERT_UNEXPECTED_MESSAGE, "does not belong"}, /* Finished */
        {RECORD_HANDSHAKE, 1, 4, "\x0d\0\0\0", ALERT_UNEXPECTED_MESSAGE,
         "does not belong"}, /* certificate? */
        {RECORD_HANDSHAKE, 0, sizeof ticket, (const char *)ticket, ALERT_UNEXPECTED_MESSAGE,
         "does not belong"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int server = 0; server < 2; server++) {
            struct forger f;
            if (cases[i].server == !server)
                continue;
            forger_open(&f, server);
            forge(&f, cases[i].type, cases[i].bytes, cases[i].n);
            expect_refusal(&f, cases[i].alert, ERR_PROTOCOL, cases[i].words);
            forger_close(&f);
        }
}

static void what_is_no_record_is_refused(void **state)
{
    (void)state;
    static const struct {
        uint8_t bytes[6];
        enum record_alert alert;
    } cases[] = {
        {{20, 3, 3, 0, 1, 1}, ALERT_UNEXPECTED_MESSAGE}, /* change_cipher_spec, too late */
        {{21, 3, 3, 0, 2, 1}, ALERT_UNEXPECTED_MESSAGE}, /* in the clear */
        {{22, 3, 3, 0, 50, 1}, ALERT_UNEXPECTED_MESSAGE}, {{23, 3, 3, 0, 16}, ALERT_DECODE_ERROR},
        {{23, 3, 3, 0x41, 1}, ALERT_RECORD_OVERFLOW},     {{23, 3, 3, 0xff, 0xff}, ALERT_RECORD_OVERFLOW}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct forger f;
        forger_open(&f, i % 2);
        give(&f, cases[i].bytes, sizeof cases[i].bytes);
        expect_refusal(&f, cases[i].alert, ERR_CORRUPT, "does not verify");
        forger_close(&f);
    }
}

/* A record whose tag is wrong gives nothing, in the middle of a payload too. */
static void a_changed_record_gives_nothing(void **state)
{
    (void)state;
    for (int middle = 0; middle < 2; middle++) {
        struct forger f;
        uint8_t record[64], head[FRAME_HEADER_BYTES];
        frame_header_encode(&(struct frame_header){.opcode = OP_PING, .payload_bytes = 20}, head);
        forger_open(&f, false);
        if (middle)
            forge(&f, RECORD_DATA, head, sizeof head);
        size_t n = middle ? record_seal(f.seals, RECORD_DATA, &SLICE(content(), 20), 1, record)
                          : record_seal(f.seals, RECORD_DATA, &SLICE(head, sizeof head), 1, record);
        record[n - 1] ^= 1;
        give(&f, record, n);
        expect_refusal(&f, ALERT_BAD_RECORD_MAC, ERR_CORRUPT, "changed on their way");
        forger_close(&f);
    }
}

static void records_that_carry_nothing_have_an_end(void **state)
{
    (void)state;
    static const char update[] = "\x18\0\0\1\1";
    for (int kind = 0; kind < 3; kind++) {
        struct forger f;
        uint8_t its[RECORD_SECRET_MAX], head[FRAME_HEADER_BYTES];
        forger_open(&f, true);
        memcpy(its, f.p.its, sizeof its);
        frame_header_encode(&(struct frame_header){.opcode = OP_PING, .flags = FRAME_RESPONSE}, head);
        forge(&f, RECORD_DATA, head, 10); /* in the middle of a frame */
        for (unsigned i = 0; i < 33 && f.p.err.class == ERR_NONE; i++) {
            if (kind == 0)
                forge(&f, RECORD_DATA, NULL, 0);
            else if (kind == 1)
                forge(&f, RECORD_ALERT, "\1\x5a", 2); /* user_canceled */
            else
                forge(&f, RECORD_HANDSHAKE, update, 5);
            if (kind < 2)
                continue;
            assert_int_equal(record_secret_next(0x1302, its, its), 0);
            assert_int_equal(record_key_set(f.seals, its), 0);
            assert_int_equal(i == 32, f.p.err.class != ERR_NONE);
        }
        assert_int_equal(f.p.err.class, ERR_PROTOCOL);
        assert_non_null(strstr(f.p.err.text, "records without end"));
        forger_close(&f);
    }
}

/* What the peer's alerts mean is told; a fatal one is not answered. */
static void an_alert_is_told(void **state)
{
    (void)state;
    static const struct {
        const char *alert;
        enum err_class class;
        const char *words;
    } cases[] = {{"\2\x14", ERR_PROTOCOL, "TLS alert 20"},
                 {"\1\x14", ERR_PROTOCOL, "TLS alert 20"}, /* the level is of no meaning (RFC 8446, 6) */
                 {"\2\x2d", ERR_DENIED, "it has expired"},
                 {"\2\x31", ERR_DENIED, "denies access"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct forger f;
        forger_open(&f, true);
        forge(&f, RECORD_ALERT, cases[i].alert, 2);
        assert_int_equal(f.p.err.class, cases[i].class);
        assert_non_null(strstr(f.p.err.text, cases[i].words));
        assert_int_equal(channel_output(f.p.ours).n, 0);
        forger_close(&f);
    }
}

/* The answer to a key update is one under the old key, and all behind it goes under the next. */
static void a_key_update_is_answered_once(void **state)
{
    (void)state;
    struct forger f;
    uint8_t out[RECORD_BYTES_MAX], next[RECORD_SECRET_MAX];
    size_t n;
    forger_open(&f, true);
    forge(&f, RECORD_HANDSHAKE, "\x18\0\0\1\1", 5);
    assert_int_equal(answer(&f, out, &n), RECORD_HANDSHAKE);
    assert_int_equal(n, 5);
    assert_memory_equal(out, "\x18\0\0\1\0", 5);
    assert_int_equal(answer(&f, out, &n), 0);
    assert_int_equal(record_secret_next(0x1302, f.p.of_ours, next), 0);
    assert_int_equal(record_key_set(f.opens, next), 0);
    assert_int_equal(channel_send(f.p.ours, &(struct frame_header){.opcode = OP_PING}, SLICE(NULL, 0),
                                  SLICE(NULL, 0), NULL),
                     0);
    assert_int_equal(answer(&f, out, &n), RECORD_DATA);
    forge(&f, RECORD_DATA, "x", 1); /* the peer's own old key is not good any more */
    assert_int_equal(f.p.err.class, ERR_CORRUPT);
    forger_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(openssl_understands_every_suite),
        cmocka_unit_test(records_may_be_padded_and_short),
        cmocka_unit_test(keys_are_updated_as_the_peer_asks),
        cmocka_unit_test(keys_are_updated_before_they_wear_out),
        cmocka_unit_test(a_close_is_told_both_ways),
        cmocka_unit_test(nothing_behind_the_handshake_is_lost),
        cmocka_unit_test(broken_rules_are_refused),
        cmocka_unit_test(what_is_no_record_is_refused),
        cmocka_unit_test(a_changed_record_gives_nothing),
        cmocka_unit_test(records_that_carry_nothing_have_an_end),
        cmocka_unit_test(an_alert_is_told),
        cmocka_unit_test(a_key_update_is_answered_once),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
