/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: frames arrive whole and unchanged over TLS 1.3 and in the clear, whatever the splits; who may not
 * connect is refused with a sentence on both sides; memory stays bounded. Method: both ends in one process.
 */
#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "format/channel.h"
#include "tests/support/tls_pair.h"

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

static void open_pair(struct tls_pair *p, const char *host)
{
    tls_pair_open(p, server_config, client_config, host);
    tls_pair_move(p);
    if (p->server_err.class || p->client_err.class)
        fail_msg("server: %s; client: %s", p->server_err.text, p->client_err.text);
    assert_true(channel_ready(p->server));
    assert_true(channel_ready(p->client));
}

static struct channel *clear(bool server)
{
    struct identity who = {.tenant = "acme", .role = ROLE_WRITER, .server = !server};
    struct channel *c;
    assert_int_equal(channel_create_clear(server, &who, &c), 0);
    return c;
}

static void fill(uint8_t *p, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        p[i] = (uint8_t)(seed >> 24);
    }
}

/* ---- frames ---- */

static void send_one(struct channel *c, uint16_t opcode, uint64_t id, const void *m, size_t mn, const void *t,
                     size_t tn)
{
    struct frame_header h = {.opcode = opcode, .request_id = id};
    struct err e;
    if (channel_send(c, &h, SLICE(m, mn), SLICE(t, tn), &e) < 0)
        fail_msg("%s", e.text);
}

static void identities_are_known_after_the_handshake(void **state)
{
    (void)state;
    struct tls_pair p;
    tls_pair_open(&p, server_config, client_config, "localhost");
    assert_null(channel_peer(p.server));
    assert_null(channel_peer(p.client));
    tls_pair_move(&p);
    assert_string_equal(channel_peer(p.server)->tenant, "acme");
    assert_int_equal(channel_peer(p.server)->role, ROLE_WRITER);
    assert_false(channel_peer(p.server)->server);
    assert_true(channel_peer(p.client)->server);
    assert_non_null(strstr(channel_peer(p.server)->subject, "acme writer"));
    tls_pair_close(&p);
}

static void the_host_is_checked(void **state)
{
    (void)state;
    struct tls_pair p;
    open_pair(&p, "127.0.0.1");
    tls_pair_close(&p);
    open_pair(&p, "::1");
    tls_pair_close(&p);
    static const char *const wrong[] = {"store.example", "127.0.0.2"};
    for (int i = 0; i < 2; i++) {
        tls_pair_open(&p, server_config, client_config, wrong[i]);
        tls_pair_move(&p);
        assert_int_equal(p.client_err.class, ERR_DENIED);
        assert_non_null(strstr(p.client_err.text, wrong[i]));
        assert_non_null(strstr(p.client_err.text, "localhost, 127.0.0.1, ::1"));
        assert_false(channel_ready(p.server));
        assert_int_equal(p.server_err.class, ERR_DENIED); /* by the alert */
        tls_pair_close(&p);
    }
}

/* Frames of many sizes, both ways, moved `step` bytes at a time. */
static void exchange(struct channel *from, struct channel *to, struct tls_pair *p, size_t n)
{
    uint8_t *data = malloc(n + 1);
    struct frame f;
    struct err e;
    fill(data, n, (uint32_t)n);
    size_t message = n < 100 ? n : 100;
    send_one(from, OP_PING, n + 1, data, message, data + message, n - message);
    send_one(from, OP_STATUS, n + 2, NULL, 0, NULL, 0); /* right behind it */
    tls_pair_move(p);
    assert_int_equal(channel_frame(to, &f, &e), 1);
    assert_int_equal(f.header.opcode, OP_PING);
    assert_int_equal(f.header.request_id, n + 1);
    assert_int_equal(f.header.payload_bytes, n);
    assert_memory_equal(f.payload, data, n);
    channel_frame_done(to);
    assert_int_equal(channel_frame(to, &f, &e), 1);
    assert_int_equal(f.header.opcode, OP_STATUS);
    assert_int_equal(f.header.payload_bytes, 0);
    assert_non_null(f.payload);
    channel_frame_done(to);
    assert_int_equal(channel_frame(to, &f, &e), 0);
    free(data);
}

static void frames_arrive_whatever_the_splits(void **state)
{
    (void)state;
    static const size_t sizes[] = {0,     1,     60,    4095,   4096,
                                   16352, 16384, 16385, 100000, FRAME_CONTROL_BYTES_MAX};
    static const size_t steps[] = {0, 1, 7, 4096, 70001};
    for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++) {
        struct tls_pair p;
        open_pair(&p, NULL);
        p.step = steps[s];
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            if (steps[s] > 0 && steps[s] < 100 && sizes[i] > 20000)
                continue;
            exchange(p.client, p.server, &p, sizes[i]);
            exchange(p.server, p.client, &p, sizes[i]);
        }
        tls_pair_close(&p);
        p = (struct tls_pair){.server = clear(true), .client = clear(false), .step = steps[s]};
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            exchange(p.client, p.server, &p, sizes[i]);
        tls_pair_close(&p);
    }
}

static void lies_ready(uint16_t opcode, const struct buf *message)
{
    struct tls_pair p = {.server = clear(true), .client = clear(false)};
    assert_int_equal(message->n, frame_written_at(opcode));
    static const size_t tails[] = {5000, 4096, 1, 1u << 20};
    channel_allow_large(p.server);
    for (size_t i = 0; i < 4; i++) {
        uint8_t *tail = malloc(tails[i]);
        struct frame f;
        fill(tail, tails[i], 1);
        send_one(p.client, opcode, i, message->p, message->n, tail, tails[i]);
        tls_pair_move(&p);
        assert_int_equal(channel_frame(p.server, &f, NULL), 1);
        const uint8_t *payload = f.payload, *got = payload + message->n;
        uint8_t *memory = channel_frame_steal(p.server);
        assert_int_equal((uintptr_t)got % BLOCK_BYTES, 0);
        assert_memory_equal(got, tail, tails[i]);
        for (size_t k = tails[i]; k < block_align(tails[i]); k++)
            assert_int_equal(got[k], 0);
        /* What comes next does not touch what was taken. */
        send_one(p.client, OP_PING, 9, "xxxx", 4, NULL, 0);
        tls_pair_move(&p);
        assert_int_equal(channel_frame(p.server, &f, NULL), 1);
        assert_int_equal((uintptr_t)f.payload % BLOCK_BYTES, 0);
        channel_frame_done(p.server);
        assert_memory_equal(got, tail, tails[i]);
        free(memory);
        free(tail);
    }
    tls_pair_close(&p);
}

static void what_is_written_lies_ready_for_direct_io(void **state)
{
    (void)state;
    struct buf chunk = {0}, index = {0};
    msg_segment_chunk_encode(&(struct msg_segment_chunk){.number = 3}, &chunk);
    msg_segment_index_encode(&(struct msg_segment_index){.offset = 4096}, &index);
    lies_ready(OP_SEGMENT_CHUNK, &chunk);
    lies_ready(OP_SEGMENT_INDEX, &index);
    buf_free(&chunk);
    buf_free(&index);
}

static void large_frames_only_after_hello(void **state)
{
    (void)state;
    struct tls_pair p;
    open_pair(&p, NULL);
    static uint8_t data[FRAME_CONTROL_BYTES_MAX + 1];
    struct err e;
    send_one(p.client, OP_PING, 4, data, sizeof data, NULL, 0);
    tls_pair_move(&p);
    assert_int_equal(p.server_err.class, ERR_NONE);
    struct frame f;
    for (int i = 0; i < 2; i++) { /* and it stays so */
        assert_int_equal(channel_frame(p.server, &f, &e), -E2BIG);
        assert_non_null(strstr(e.text, "1048577"));
    }
    send_one(p.server, OP_PING, 4, "too large", 9, NULL, 0); /* the client can be told */
    tls_pair_move(&p);
    assert_int_equal(channel_frame(p.client, &f, &e), 1);
    assert_memory_equal(f.payload, "too large", 9);
    channel_frame_done(p.client);
    tls_pair_close(&p);
    open_pair(&p, NULL);
    channel_allow_large(p.server);
    uint8_t *large = calloc(1, FRAME_PAYLOAD_BYTES_MAX);
    send_one(p.client, OP_PING, 4, data, 10, large, FRAME_PAYLOAD_BYTES_MAX - 10);
    tls_pair_move(&p);
    assert_int_equal(channel_frame(p.server, &f, &e), 1);
    assert_int_equal(f.header.payload_bytes, FRAME_PAYLOAD_BYTES_MAX);
    channel_frame_done(p.server);
    struct frame_header h = {.opcode = OP_PING};
    assert_int_equal(
        channel_send(p.client, &h, SLICE(data, 11), SLICE(large, FRAME_PAYLOAD_BYTES_MAX - 10), &e), -E2BIG);
    assert_int_equal(channel_send(p.client, &h, SLICE(data, 11), SLICE(NULL, 0), &e), 0); /* still usable */
    free(large);
    tls_pair_close(&p);
}

static void memory_stays_bounded(void **state)
{
    (void)state;
    struct channel *c = clear(true);
    struct channel *from = clear(false);
    struct err e;
    static uint8_t data[FRAME_CONTROL_BYTES_MAX];
    int rc = 0, sent = 0;
    while (rc == 0 && sent < 100) {
        send_one(from, OP_PING, 1, data, sizeof data, NULL, 0);
        struct slice s = channel_output(from);
        rc = channel_input(c, s.p, s.n, &e); /* and nobody takes a frame */
        channel_output_done(from, s.n);
        sent++;
    }
    assert_int_equal(rc, -E2BIG);
    assert_in_range(sent, 8, 10);
    channel_free(c);
    rc = 0;
    for (sent = 0; rc == 0 && sent < 100; sent++) {
        struct frame_header h = {.opcode = OP_PING};
        rc = channel_send(from, &h, SLICE(data, sizeof data), SLICE(NULL, 0), &e);
    }
    assert_int_equal(rc, -EBUSY);
    assert_in_range(sent, 63, 65);
    size_t n;
    uint8_t *all = channel_output_take(from, &n);
    assert_int_equal(n, (size_t)(sent - 1) * (sizeof data + FRAME_HEADER_BYTES)); /* none in half */
    free(all);
    assert_null(channel_output_take(from, &n));
    assert_int_equal(n, 0);
    send_one(from, OP_PING, 1, data, sizeof data, NULL, 0);
    channel_free(from);
}

static void output_may_leave_in_pieces(void **state)
{
    (void)state;
    struct channel *from = clear(false), *to = clear(true);
    struct frame f;
    for (uint64_t i = 0; i < 5; i++)
        send_one(from, OP_PING, i, "abcdefgh", 8, NULL, 0);
    struct slice s = channel_output(from);
    assert_int_equal(s.n, 200);
    assert_int_equal(channel_input(to, s.p, 50, NULL), 0);
    channel_output_done(from, 50);
    send_one(from, OP_PING, 5, "abcdefgh", 8, NULL, 0);
    size_t n;
    uint8_t *rest = channel_output_take(from, &n);
    assert_int_equal(n, 190);
    assert_int_equal(channel_input(to, rest, n, NULL), 0);
    free(rest);
    for (uint64_t i = 0; i < 6; i++) {
        assert_int_equal(channel_frame(to, &f, NULL), 1);
        assert_int_equal(f.header.request_id, i);
        channel_frame_done(to);
    }
    assert_int_equal(channel_frame(to, &f, NULL), 0);
    channel_free(from);
    channel_free(to);
}

/* More input comes while frames that came before are not taken yet. */
static void frames_not_taken_wait_in_order(void **state)
{
    (void)state;
    for (int tls = 0; tls < 2; tls++) {
        struct tls_pair p = {0};
        if (tls)
            open_pair(&p, NULL);
        else
            p = (struct tls_pair){.server = clear(true), .client = clear(false)};
        uint64_t sent = 0, taken = 0;
        for (int round = 0; round < 50; round++) {
            uint8_t data[3000];
            struct frame f;
            for (int i = 0; i < 3; i++, sent++) {
                size_t n = (size_t)(sent * 611 % sizeof data);
                fill(data, n, (uint32_t)sent);
                send_one(p.client, OP_PING, sent, data, n, NULL, 0);
            }
            p.step = round % 2 ? 1 + (size_t)round * 13 : 0;
            tls_pair_move(&p);
            for (int i = 0; i < 1 + round % 4 && channel_frame(p.server, &f, NULL) == 1; i++, taken++) {
                assert_int_equal(f.header.request_id, taken);
                assert_int_equal(f.header.payload_bytes, taken * 611 % sizeof data);
                fill(data, f.header.payload_bytes, (uint32_t)taken);
                assert_memory_equal(f.payload, data, f.header.payload_bytes);
                channel_frame_done(p.server);
            }
        }
        assert_in_range(taken, 100, 140); /* most were taken, and some still wait */
        assert_true(channel_buffered(p.server) > 0);
        tls_pair_close(&p);
    }
}

/* A sink with places of up to 700 bytes, for frames of one kind. */
struct sunk {
    uint8_t bytes[200000];
    size_t n, asked;
};

static bool wants_status(void *arg, const struct frame_header *h)
{
    struct sunk *s = arg;
    s->asked++;
    return h->opcode == OP_STATUS;
}

static uint8_t *place_of(void *arg, size_t skip, size_t *n)
{
    struct sunk *s = arg;
    assert_int_equal(skip, 0);
    assert_true(s->n < sizeof s->bytes);
    *n = sizeof s->bytes - s->n < 700 ? sizeof s->bytes - s->n : 700;
    return s->bytes + s->n;
}

static void has_come(void *arg, size_t n)
{
    struct sunk *s = arg;
    s->n += n;
}

static void payloads_go_where_they_are_wanted(void **state)
{
    (void)state;
    static uint8_t data[90000];
    for (int round = 0; round < 6; round++) {
        struct tls_pair p = {.step = round / 2 == 0 ? 0 : round / 2 == 1 ? 1 : 1009};
        struct sunk sunk = {0};
        struct frame f;
        if (round % 2)
            open_pair(&p, NULL);
        else
            p.server = clear(true), p.client = clear(false);
        channel_allow_large(p.server);
        channel_sink(p.server, &(struct channel_sink){
                                   .wants = wants_status, .place = place_of, .came = has_come, .arg = &sunk});
        fill(data, sizeof data, (uint32_t)round);
        send_one(p.client, OP_STATUS, 1, data, sizeof data, NULL, 0);
        send_one(p.client, OP_PING, 2, data, 500, NULL, 0);
        send_one(p.client, OP_STATUS, 3, NULL, 0, NULL, 0);
        tls_pair_move(&p);
        assert_int_equal(channel_frame(p.server, &f, NULL), 1);
        assert_true(f.sunk);
        assert_int_equal(f.header.payload_bytes, sizeof data);
        assert_int_equal(sunk.n, sizeof data);
        assert_memory_equal(sunk.bytes, data, sizeof data);
        channel_frame_done(p.server);
        assert_int_equal(channel_frame(p.server, &f, NULL), 1);
        assert_false(f.sunk);
        assert_memory_equal(f.payload, data, 500);
        channel_frame_done(p.server);
        assert_int_equal(channel_frame(p.server, &f, NULL), 1);
        assert_false(f.sunk); /* nothing to be put anywhere */
        channel_frame_done(p.server);
        assert_int_equal(sunk.asked, 2);
        tls_pair_close(&p);
    }
}

static void close_is_told_from_a_cut(void **state)
{
    (void)state;
    struct tls_pair p;
    open_pair(&p, NULL);
    assert_false(channel_peer_closed(p.server));
    send_one(p.client, OP_PING, 1, "bye", 3, NULL, 0);
    channel_close(p.client);
    tls_pair_move(&p);
    struct frame f;
    assert_int_equal(channel_frame(p.server, &f, NULL), 1); /* what was sent before the end still counts */
    channel_frame_done(p.server);
    assert_int_equal(channel_frame(p.server, &f, NULL), 0);
    assert_true(channel_peer_closed(p.server));
    tls_pair_close(&p);
}

static void exported_keys_are_equal_and_bound(void **state)
{
    (void)state;
    struct tls_pair p;
    uint8_t a[32], b[32], other[32];
    open_pair(&p, NULL);
    assert_int_equal(channel_export(p.server, "EXPORTER-larder-lane", "x", 1, a, 32), 0);
    assert_int_equal(channel_export(p.client, "EXPORTER-larder-lane", "x", 1, b, 32), 0);
    assert_memory_equal(a, b, 32);
    assert_int_equal(channel_export(p.client, "EXPORTER-larder-lane", "y", 1, other, 32), 0);
    assert_memory_not_equal(a, other, 32);
    tls_pair_close(&p);
    struct channel *c = clear(true);
    assert_int_equal(channel_export(c, "l", NULL, 0, a, 32), -ENOTSUP);
    channel_free(c);
}

/* ---- refusals ---- */

static void refused(struct channel_config *server, struct channel_config *client, enum err_class server_class,
                    const char *server_word, enum err_class client_class, const char *client_word)
{
    struct tls_pair p;
    tls_pair_open(&p, server, client, "localhost");
    tls_pair_move(&p);
    assert_int_equal(p.server_err.class, server_class);
    assert_int_equal(p.client_err.class, client_class);
    if (!strstr(p.server_err.text, server_word) || !strstr(p.client_err.text, client_word))
        fail_msg("server: %s; client: %s", p.server_err.text, p.client_err.text);
    assert_false(channel_ready(p.server) && !p.server_err.class);
    tls_pair_close(&p);
}

static void a_foreign_ca_is_refused_by_both(void **state)
{
    (void)state;
    struct tls_material foreign;
    tls_material_make(&foreign);
    struct channel_config *c = tls_config(false, &material.ca, &foreign.user);
    refused(server_config, c, ERR_DENIED, "the client's certificate was not issued by the CA", ERR_DENIED,
            "the server refused our certificate");
    channel_config_unref(c);
    c = tls_config(true, &material.ca, &foreign.server);
    refused(c, client_config, ERR_DENIED, "the client refused our certificate", ERR_DENIED,
            "the server's certificate was not issued by the CA");
    channel_config_unref(c);
    tls_material_free(&foreign);
}

static void roles_are_not_exchanged(void **state)
{
    (void)state;
    /* The configuration already refuses the other kind's certificate... */
    struct channel_config *c;
    struct err e;
    assert_int_equal(channel_config_create(true, material.ca.certificate_pem, material.user.certificate_pem,
                                           material.user.key_pem, &c, &e),
                     -EACCES);
    assert_non_null(strstr(e.text, "expected a server's certificate"));
    assert_int_equal(channel_config_create(false, material.ca.certificate_pem,
                                           material.server.certificate_pem, material.server.key_pem, &c, &e),
                     -EACCES);
}

static void keys_and_certificates_must_fit(void **state)
{
    (void)state;
    struct channel_config *c;
    struct err e;
    const char *ca = material.ca.certificate_pem, *cert = material.user.certificate_pem;
    assert_int_equal(channel_config_create(false, ca, cert, material.server.key_pem, &c, &e), -EACCES);
    assert_non_null(strstr(e.text, "does not belong to the certificate"));
    assert_null(c);
    assert_int_equal(channel_config_create(false, "", cert, material.user.key_pem, &c, &e), -EINVAL);
    assert_non_null(strstr(e.text, "CA's certificate"));
    assert_int_equal(channel_config_create(false, ca, "rubbish", material.user.key_pem, &c, &e), -EINVAL);
    struct secret *rubbish = secret_create("rubbish", 8);
    assert_int_equal(channel_config_create(false, ca, cert, rubbish, &c, &e), -EINVAL);
    assert_non_null(strstr(e.text, "private key"));
    secret_free(rubbish);
}

static void an_expired_own_certificate_is_told_with_its_date(void **state)
{
    (void)state;
    struct pki_pair old;
    struct channel_config *c;
    struct err e;
    assert_int_equal(pki_issue_user(&material.ca, "acme", ROLE_READER, 1700000000, -1, &old, &e), 0);
    assert_int_equal(
        channel_config_create(false, material.ca.certificate_pem, old.certificate_pem, old.key_pem, &c, &e),
        -EACCES);
    assert_non_null(strstr(e.text, "expired on 2023-11-13 22:13 UTC"));
    pki_pair_free(&old);
    assert_int_equal(pki_issue_user(&material.ca, "acme", ROLE_READER, 4000000000, 1, &old, &e), 0);
    assert_int_equal(
        channel_config_create(false, material.ca.certificate_pem, old.certificate_pem, old.key_pem, &c, &e),
        -EACCES);
    assert_non_null(strstr(e.text, "valid only from 2096-10-02 06:06 UTC"));
    pki_pair_free(&old);
}

/* ---- peers that are not ours, made with OpenSSL itself ---- */

struct stranger {
    SSL_CTX *ctx;
    SSL *ssl;
    char said[256]; /* OpenSSL's reason for the end */
};

static int select_ours(SSL *ssl, const unsigned char **out, unsigned char *outlen, const unsigned char *in,
                       unsigned inlen, void *arg)
{
    (void)ssl, (void)arg, (void)inlen;
    *out = in + 1;
    *outlen = in[0];
    return SSL_TLSEXT_ERR_OK;
}

/* alpn: what a client offers; a server selects what it is offered first, or knows no ALPN (NULL). */
static void stranger_open(struct stranger *s, bool server, const struct pki_pair *own, int version,
                          const char *alpn)
{
    *s = (struct stranger){.ctx = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method())};
    SSL_CTX_set_min_proto_version(s->ctx, version);
    SSL_CTX_set_max_proto_version(s->ctx, version);
    SSL_CTX_set_verify(s->ctx, SSL_VERIFY_NONE, NULL);
    if (server && alpn)
        SSL_CTX_set_alpn_select_cb(s->ctx, select_ours, NULL);
    else if (alpn)
        assert_int_equal(SSL_CTX_set_alpn_protos(s->ctx, (const unsigned char *)alpn, (unsigned)strlen(alpn)),
                         0);
    if (own) {
        BIO *b = BIO_new_mem_buf(own->certificate_pem, -1);
        X509 *x = PEM_read_bio_X509(b, NULL, NULL, NULL);
        BIO *k = BIO_new_mem_buf(secret_bytes(own->key_pem), (int)secret_size(own->key_pem) - 1);
        EVP_PKEY *key = PEM_read_bio_PrivateKey(k, NULL, NULL, NULL);
        assert_int_equal(SSL_CTX_use_certificate(s->ctx, x), 1);
        assert_int_equal(SSL_CTX_use_PrivateKey(s->ctx, key), 1);
        X509_free(x), EVP_PKEY_free(key), BIO_free(b), BIO_free(k);
    }
    s->ssl = SSL_new(s->ctx);
    SSL_set_bio(s->ssl, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
    if (server)
        SSL_set_accept_state(s->ssl);
    else
        SSL_set_connect_state(s->ssl);
}

static void stranger_close(struct stranger *s)
{
    SSL_free(s->ssl);
    SSL_CTX_free(s->ctx);
}

/* Talks until one side gives up or both are done; the channel's error is in e. */
static void stranger_meets(struct stranger *s, struct channel *c, struct err *e)
{
    bool moved = true, broken = false;
    *e = (struct err){0};
    while (moved) {
        char buf[65536];
        moved = false;
        ERR_clear_error();
        int rc = SSL_is_init_finished(s->ssl) ? SSL_read(s->ssl, buf, 1) : SSL_do_handshake(s->ssl);
        if (rc <= 0 && SSL_get_error(s->ssl, rc) == SSL_ERROR_SSL)
            snprintf(s->said, sizeof s->said, "%s", ERR_reason_error_string(ERR_peek_error()));
        int n = BIO_read(SSL_get_wbio(s->ssl), buf, sizeof buf);
        if (n > 0 && !broken) {
            broken = channel_input(c, buf, (size_t)n, e) < 0;
            moved = true;
        }
        struct slice out = channel_output(c);
        if (out.n > 0) {
            assert_int_equal(BIO_write(SSL_get_rbio(s->ssl), out.p, (int)out.n), (int)out.n);
            channel_output_done(c, out.n);
            moved = true;
        }
    }
}

static void expect_stranger(bool stranger_serves, const struct pki_pair *own, int version, const char *alpn,
                            enum err_class class, const char *word, const char *said)
{
    struct stranger s;
    struct channel *c;
    struct err e;
    stranger_open(&s, stranger_serves, own, version, alpn);
    assert_int_equal(channel_create(stranger_serves ? client_config : server_config, NULL, &c, &e), 0);
    if (stranger_serves)
        assert_int_equal(channel_input(c, NULL, 0, &e), 0);
    stranger_meets(&s, c, &e);
    if (e.class != class || (word && !strstr(e.text, word)) || (said && !strstr(s.said, said)))
        fail_msg("class %d: %s; the other side: %s", e.class, e.text, s.said);
    assert_int_equal(channel_ready(c), class == ERR_NONE);
    channel_free(c);
    stranger_close(&s);
}

#define OURS "\x08larder/1"

static void strangers_are_refused(void **state)
{
    (void)state;
    expect_stranger(false, &material.user, TLS1_3_VERSION, OURS, ERR_NONE, NULL, NULL); /* the method works */
    expect_stranger(false, &material.user, TLS1_3_VERSION, "\x02h2\x08larder/1", ERR_NONE, NULL, NULL);
    expect_stranger(false, &material.user, TLS1_2_VERSION, OURS, ERR_PROTOCOL, "TLS 1.3",
                    "alert protocol version");
    expect_stranger(false, NULL, TLS1_3_VERSION, OURS, ERR_DENIED, "showed no certificate",
                    "certificate required");
    expect_stranger(false, &material.user, TLS1_3_VERSION, NULL, ERR_PROTOCOL, "larder/1",
                    "no application protocol");
    expect_stranger(false, &material.user, TLS1_3_VERSION, "\x02h2", ERR_PROTOCOL, "larder/1",
                    "no application protocol");
    /* A server that never heard of ALPN, and one that shows a user's certificate. */
    expect_stranger(true, &material.server, TLS1_3_VERSION, NULL, ERR_PROTOCOL, "larder/1", NULL);
    expect_stranger(true, &material.user, TLS1_3_VERSION, NULL, ERR_DENIED, "not meant for a server",
                    "alert");
    expect_stranger(true, &material.server, TLS1_2_VERSION, NULL, ERR_PROTOCOL, "TLS 1.3", NULL);
    expect_stranger(false, &material.server, TLS1_3_VERSION, OURS, ERR_DENIED, "not meant for a client",
                    "alert");
}

/* A certificate that our own PKI would never issue: any purpose, any URIs. */
static void issue_odd(const char *purpose, const char *alt_names, struct pki_pair *out)
{
    BIO *b = BIO_new_mem_buf(material.ca.certificate_pem, -1);
    BIO *k = BIO_new_mem_buf(secret_bytes(material.ca.key_pem), (int)secret_size(material.ca.key_pem) - 1);
    X509 *ca = PEM_read_bio_X509(b, NULL, NULL, NULL), *x = X509_new();
    EVP_PKEY *ca_key = PEM_read_bio_PrivateKey(k, NULL, NULL, NULL), *key = EVP_EC_gen("P-256");
    const char *const values[][2] = {
        {"extendedKeyUsage", purpose}, {"subjectAltName", alt_names}, {"basicConstraints", "CA:FALSE"}};
    BIO_free(b), BIO_free(k);
    assert_int_equal(X509_set_version(x, X509_VERSION_3), 1);
    ASN1_INTEGER_set(X509_get_serialNumber(x), 7);
    X509_set_issuer_name(x, X509_get_subject_name(ca));
    X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_UTF8, (const unsigned char *)"odd",
                               -1, -1, 0);
    X509_gmtime_adj(X509_getm_notBefore(x), -60);
    X509_gmtime_adj(X509_getm_notAfter(x), 3600);
    X509_set_pubkey(x, key);
    for (int i = 0; i < 3; i++) {
        X509_EXTENSION *ext = values[i][1] ? X509V3_EXT_conf(NULL, NULL, values[i][0], values[i][1]) : NULL;
        assert_true(!values[i][1] || (ext && X509_add_ext(x, ext, -1) == 1));
        X509_EXTENSION_free(ext);
    }
    assert_true(X509_sign(x, ca_key, EVP_sha256()) > 0);
    char *p;
    BIO *cert = BIO_new(BIO_s_mem()), *priv = BIO_new(BIO_s_mem());
    PEM_write_bio_X509(cert, x);
    PEM_write_bio_PKCS8PrivateKey(priv, key, NULL, NULL, 0, NULL, NULL);
    assert_int_equal(BIO_write(priv, "", 1), 1);
    long n = BIO_get_mem_data(cert, &p);
    out->certificate_pem = strndup(p, (size_t)n);
    n = BIO_get_mem_data(priv, &p);
    out->key_pem = secret_create(p, (size_t)n);
    BIO_free(cert), BIO_free(priv), X509_free(ca), X509_free(x), EVP_PKEY_free(ca_key), EVP_PKEY_free(key);
}

static void identity_is_one_uri_and_fits_the_side(void **state)
{
    (void)state;
    static const struct {
        bool server;
        const char *alt_names;
        enum err_class class;
        const char *word;
    } cases[] = {
        {true, "URI:larder://server", ERR_NONE, NULL}, /* the method works */
        {false, "URI:larder://acme/reader, URI:https://larder.example, DNS:x", ERR_NONE, NULL},
        {true, "URI:larder://acme/admin", ERR_DENIED, "expected a server's certificate"},
        {false, "URI:larder://server", ERR_DENIED, "expected a client's certificate"},
        {false, "URI:larder://acme/reader, URI:larder://acme/admin", ERR_DENIED, "more than one larder://"},
        {false, "URI:larder://acme/root", ERR_DENIED, "found 'larder://acme/root'"},
        {false, "DNS:larder", ERR_DENIED, "names no larder:// identity"},
        {false, NULL, ERR_DENIED, "names no larder:// identity"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct pki_pair odd;
        issue_odd(cases[i].server ? "serverAuth" : "clientAuth", cases[i].alt_names, &odd);
        expect_stranger(cases[i].server, &odd, TLS1_3_VERSION, cases[i].server ? "" : OURS, cases[i].class,
                        cases[i].word, cases[i].class ? "bad certificate" : NULL);
        pki_pair_free(&odd);
    }
}

static void no_session_can_be_resumed(void **state)
{
    (void)state;
    struct stranger s;
    struct channel *c;
    struct err e;
    stranger_open(&s, false, &material.user, TLS1_3_VERSION, OURS);
    SSL_CTX_set_session_cache_mode(s.ctx, SSL_SESS_CACHE_CLIENT);
    assert_int_equal(channel_create(server_config, NULL, &c, &e), 0);
    stranger_meets(&s, c, &e);
    assert_true(channel_ready(c));
    assert_int_equal(SSL_SESSION_is_resumable(SSL_get_session(s.ssl)), 0);
    channel_free(c);
    stranger_close(&s);
}

/* The server may notice only after the client took the handshake for done. */
static void an_expired_client_hears_why(void **state)
{
    (void)state;
    struct pki_pair old;
    struct err e;
    assert_int_equal(pki_issue_user(&material.ca, "acme", ROLE_READER, 1700000000, -1, &old, &e), 0);
    expect_stranger(false, &old, TLS1_3_VERSION, OURS, ERR_DENIED,
                    "the client's certificate expired on 2023-11-13 22:13 UTC; renew it",
                    "certificate expired");
    pki_pair_free(&old);
    static const char *const hosts[] = {"localhost", NULL};
    assert_int_equal(pki_issue_server(&material.ca, hosts, 1700000000, 1, &old, &e), 0);
    expect_stranger(true, &old, TLS1_3_VERSION, NULL, ERR_DENIED,
                    "the server's certificate expired on 2023-11-15 22:13 UTC; renew it",
                    "certificate expired");
    pki_pair_free(&old);
}

static void what_is_not_tls_is_told(void **state)
{
    (void)state;
    struct channel *c;
    struct err e;
    static const char http[] = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_int_equal(channel_create(server_config, NULL, &c, NULL), 0);
    assert_int_equal(channel_input(c, http, sizeof http - 1, &e), -EPROTO);
    assert_non_null(strstr(e.text, "expected TLS, found 'GET / HTTP/1.1"));
    channel_free(c);
    assert_int_equal(channel_create(client_config, NULL, &c, NULL), 0);
    assert_int_equal(channel_input(c, NULL, 0, &e), 0);
    assert_int_equal(channel_input(c, "SSH-2.0-x\r\n", 11, &e), -EPROTO);
    channel_free(c);
    /* Begins like TLS and goes on as rubbish. */
    static const uint8_t rubbish[] = {0x16, 3, 1, 0, 5, 9, 9, 9, 9, 9};
    assert_int_equal(channel_create(server_config, NULL, &c, NULL), 0);
    assert_int_equal(channel_input(c, rubbish, sizeof rubbish, &e), -EPROTO);
    channel_free(c);
}

static void a_changed_bit_breaks_the_connection(void **state)
{
    (void)state;
    struct tls_pair p;
    open_pair(&p, NULL);
    send_one(p.client, OP_PING, 1, "hello", 5, NULL, 0);
    size_t n;
    uint8_t *bytes = channel_output_take(p.client, &n);
    bytes[20] ^= 1;
    struct err e;
    assert_int_equal(channel_input(p.server, bytes, n, &e), -EBADMSG);
    struct frame f;
    assert_int_equal(channel_frame(p.server, &f, NULL), -EBADMSG);
    free(bytes);
    tls_pair_move(&p); /* the client hears of it */
    assert_int_equal(p.client_err.class, ERR_PROTOCOL);
    tls_pair_close(&p);
}

/* One bit of the handshake is changed on the way, at every place in turn; n bytes pass in each direction. */
static void damage_one(bool to_server, size_t at, size_t *n)
{
    struct tls_pair p;
    size_t passed[2] = {0, 0};
    tls_pair_open(&p, server_config, client_config, "localhost");
    for (bool moved = true; moved;) {
        moved = false;
        for (int dir = 0; dir < 2; dir++) {
            size_t bytes;
            uint8_t *out = channel_output_take(dir ? p.server : p.client, &bytes);
            if (!out)
                continue;
            if (to_server == !dir && at >= passed[dir] && at < passed[dir] + bytes)
                out[at - passed[dir]] ^= 4;
            struct err e = {0}, *first = dir ? &p.client_err : &p.server_err;
            if (channel_input(dir ? p.client : p.server, out, bytes, &e) < 0 && !first->class)
                *first = e;
            passed[dir] += bytes;
            free(out);
            moved = true;
        }
    }
    *n = passed[to_server ? 0 : 1];
    bool hit = at < *n;
    if (hit && !p.server_err.class && !p.client_err.class && channel_ready(p.server) &&
        channel_ready(p.client))
        fail_msg("bit in byte %zu to the %s went unnoticed", at, to_server ? "server" : "client");
    if ((p.server_err.class && !p.server_err.text[0]) || (p.client_err.class && !p.client_err.text[0]))
        fail_msg("an error without words, byte %zu", at);
    tls_pair_close(&p);
}

static void a_damaged_handshake_never_completes(void **state)
{
    (void)state;
    for (int to_server = 0; to_server < 2; to_server++) {
        size_t whole, n;
        damage_one(to_server, SIZE_MAX, &whole); /* none */
        assert_true(whole > 1000);
        for (size_t at = 0; at < whole - 64; at += 29) { /* a signature's length differs by a few bytes */
            damage_one(to_server, at, &n);
            assert_true(at < n);
        }
    }
}

static void a_frame_cut_by_a_close_is_an_error(void **state)
{
    (void)state;
    struct stranger s;
    struct channel *c;
    struct err e;
    stranger_open(&s, false, &material.user, TLS1_3_VERSION, OURS);
    assert_int_equal(channel_create(server_config, NULL, &c, &e), 0);
    stranger_meets(&s, c, &e);
    assert_true(channel_ready(c));
    uint8_t head[FRAME_HEADER_BYTES];
    struct frame_header h = {.opcode = OP_PING, .payload_bytes = 10};
    frame_header_encode(&h, head);
    assert_int_equal(SSL_write(s.ssl, head, sizeof head), sizeof head);
    SSL_shutdown(s.ssl);
    stranger_meets(&s, c, &e);
    assert_int_equal(e.class, ERR_NONE);
    struct frame f;
    assert_int_equal(channel_frame(c, &f, &e), -EPROTO);
    assert_non_null(strstr(e.text, "in the middle of a frame"));
    channel_free(c);
    stranger_close(&s);
}

static void key_updates_are_followed(void **state)
{
    (void)state;
    struct stranger s;
    struct channel *c;
    struct err e;
    struct frame f;
    stranger_open(&s, false, &material.user, TLS1_3_VERSION, OURS);
    assert_int_equal(channel_create(server_config, NULL, &c, &e), 0);
    stranger_meets(&s, c, &e);
    for (uint64_t i = 1; i <= 3; i++) {
        uint8_t head[FRAME_HEADER_BYTES];
        struct frame_header h = {.opcode = OP_PING, .request_id = i};
        frame_header_encode(&h, head);
        assert_int_equal(SSL_key_update(s.ssl, SSL_KEY_UPDATE_REQUESTED), 1);
        assert_int_equal(SSL_write(s.ssl, head, sizeof head), sizeof head);
        stranger_meets(&s, c, &e);
        assert_int_equal(e.class, ERR_NONE);
        assert_int_equal(channel_frame(c, &f, &e), 1);
        assert_int_equal(f.header.request_id, i);
        channel_frame_done(c);
    }
    channel_free(c);
    stranger_close(&s);
}

static void clear_rubbish_is_refused(void **state)
{
    (void)state;
    struct channel *c = clear(true);
    uint8_t rubbish[FRAME_HEADER_BYTES] = "this is not a frame of larder.";
    struct err e;
    struct frame f;
    assert_int_equal(channel_input(c, rubbish, 31, &e), 0);
    assert_int_equal(channel_frame(c, &f, &e), 0); /* not a header yet */
    assert_int_equal(channel_input(c, rubbish + 31, 1, &e), 0);
    assert_int_equal(channel_frame(c, &f, &e), -EPROTO);
    assert_non_null(strstr(e.text, "is the peer a larder?"));
    assert_int_equal(channel_input(c, rubbish, 1, &e), 0); /* dropped */
    assert_int_equal(channel_frame(c, &f, &e), -EPROTO);
    channel_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(identities_are_known_after_the_handshake),
        cmocka_unit_test(the_host_is_checked),
        cmocka_unit_test(frames_arrive_whatever_the_splits),
        cmocka_unit_test(what_is_written_lies_ready_for_direct_io),
        cmocka_unit_test(large_frames_only_after_hello),
        cmocka_unit_test(memory_stays_bounded),
        cmocka_unit_test(output_may_leave_in_pieces),
        cmocka_unit_test(frames_not_taken_wait_in_order),
        cmocka_unit_test(payloads_go_where_they_are_wanted),
        cmocka_unit_test(close_is_told_from_a_cut),
        cmocka_unit_test(exported_keys_are_equal_and_bound),
        cmocka_unit_test(a_foreign_ca_is_refused_by_both),
        cmocka_unit_test(roles_are_not_exchanged),
        cmocka_unit_test(keys_and_certificates_must_fit),
        cmocka_unit_test(an_expired_own_certificate_is_told_with_its_date),
        cmocka_unit_test(strangers_are_refused),
        cmocka_unit_test(identity_is_one_uri_and_fits_the_side),
        cmocka_unit_test(no_session_can_be_resumed),
        cmocka_unit_test(an_expired_client_hears_why),
        cmocka_unit_test(what_is_not_tls_is_told),
        cmocka_unit_test(a_changed_bit_breaks_the_connection),
        cmocka_unit_test(a_damaged_handshake_never_completes),
        cmocka_unit_test(a_frame_cut_by_a_close_is_an_error),
        cmocka_unit_test(key_updates_are_followed),
        cmocka_unit_test(clear_rubbish_is_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
