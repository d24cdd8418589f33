/* SPDX-License-Identifier: Apache-2.0 */
#include "format/tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "format/base/secret.h"
#include "format/channel.h"
#include "format/record.h"

/* ALPN's form: length, name. */
static const unsigned char alpn[] = "\x08larder/1";
#define ALPN_BYTES (sizeof alpn - 1)

#define DATE_BYTES 32
/* Records in a row without a byte for the application: tickets, key updates, empty ones. */
#define IDLE_RECORDS_MAX 32u

enum way { IN, OUT, WAYS };

struct channel_config {
    unsigned refs;
    bool server;
    SSL_CTX *ctx;
    BIO_METHOD *bio;
    struct identity own;
    char until[DATE_BYTES]; /* of the own certificate */
};

struct tls {
    struct channel_config *config;
    SSL *ssl;
    struct tls_io io;
    char host[256];
    struct identity peer;
    struct err refusal; /* what we found wrong with the peer's certificate */
    bool done;
    bool peer_closed;
    /* After the handshake. */
    uint16_t suite;
    struct secret *secrets; /* the traffic secrets of both ways, RECORD_SECRET_MAX bytes each */
    size_t secret_bytes[WAYS];
    struct record_key *key[WAYS];
    uint8_t *plain; /* a record's content that the caller has no room for, else NULL */
    size_t plain_at, plain_end;
    unsigned idle_records;
};

/* ---- words ---- */

static void date_text(const ASN1_TIME *t, char out[DATE_BYTES])
{
    struct tm tm;
    if (!t || !ASN1_TIME_to_tm(t, &tm) || strftime(out, DATE_BYTES, "%Y-%m-%d %H:%M UTC", &tm) == 0)
        snprintf(out, DATE_BYTES, "an unreadable date");
}

static const char *reason_text(unsigned long code)
{
    const char *text = ERR_reason_error_string(code);
    return text ? text : "no reason given";
}

/* The one larder:// URI among the certificate's alternative names. */
static int identity_of(X509 *x, struct identity *out, struct err *e)
{
    int rc = 0, found = 0;
    *out = (struct identity){0};
    GENERAL_NAMES *names = X509_get_ext_d2i(x, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; names && i < sk_GENERAL_NAME_num(names) && rc == 0; i++) {
        const GENERAL_NAME *g = sk_GENERAL_NAME_value(names, i);
        if (g->type != GEN_URI)
            continue;
        const char *uri = (const char *)ASN1_STRING_get0_data(g->d.uniformResourceIdentifier);
        size_t n = (size_t)ASN1_STRING_length(g->d.uniformResourceIdentifier);
        if (n < sizeof IDENTITY_SCHEME - 1 || memcmp(uri, IDENTITY_SCHEME, sizeof IDENTITY_SCHEME - 1) != 0)
            continue;
        if (++found > 1)
            rc = err_set(e, ERR_DENIED,
                         "the certificate names more than one larder:// identity; expected exactly one");
        else
            rc = identity_parse(uri, n, out, e);
    }
    GENERAL_NAMES_free(names);
    if (rc == 0 && found == 0)
        rc = err_set(
            e, ERR_DENIED,
            "the certificate names no larder:// identity; expected the SAN URI larder://TENANT/ROLE or "
            "larder://server, as `larder tenant add` issues it");
    char raw[128];
    X509_NAME_oneline(X509_get_subject_name(x), raw, sizeof raw);
    err_quote(out->subject, sizeof out->subject, raw, strlen(raw));
    return rc;
}

/* ---- the peer's certificate ---- */

static const char *peer_word(const struct tls *t)
{
    return t->config->server ? "the client's" : "the server's";
}

static void refuse_host(struct tls *t, X509 *x)
{
    char names[256] = "";
    size_t used = 0;
    GENERAL_NAMES *all = X509_get_ext_d2i(x, NID_subject_alt_name, NULL, NULL);
    for (int i = 0; all && i < sk_GENERAL_NAME_num(all); i++) {
        const GENERAL_NAME *g = sk_GENERAL_NAME_value(all, i);
        char one[80] = "", raw[INET6_ADDRSTRLEN];
        if (g->type == GEN_DNS)
            err_quote(one, sizeof one, ASN1_STRING_get0_data(g->d.dNSName),
                      (size_t)ASN1_STRING_length(g->d.dNSName));
        else if (g->type == GEN_IPADD &&
                 inet_ntop(ASN1_STRING_length(g->d.iPAddress) == 4 ? AF_INET : AF_INET6,
                           ASN1_STRING_get0_data(g->d.iPAddress), raw, sizeof raw))
            snprintf(one, sizeof one, "%s", raw);
        if (one[0] && used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", one);
    }
    GENERAL_NAMES_free(all);
    (void)err_set(&t->refusal, ERR_DENIED,
                  "the server's certificate is not for '%s' but for %s; connect by one of its names, or have "
                  "it issued with this one",
                  t->host, names[0] ? names : "no host at all");
}

/* One sentence for what verification found. */
static void refuse_certificate(struct tls *t, int why, X509 *x)
{
    const char *whose = peer_word(t);
    char from[DATE_BYTES], until[DATE_BYTES];
    date_text(x ? X509_get0_notBefore(x) : NULL, from);
    date_text(x ? X509_get0_notAfter(x) : NULL, until);
    bool ca = x && X509_check_ca(x) == 1;
    switch (why) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
        (void)err_set(&t->refusal, ERR_DENIED, "%s certificate%s expired on %s; renew it", whose,
                      ca ? " authority's certificate" : "", until);
        break;
    case X509_V_ERR_CERT_NOT_YET_VALID:
        (void)err_set(&t->refusal, ERR_DENIED,
                      "%s certificate is valid only from %s on; check the clocks of both machines", whose,
                      from);
        break;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        (void)err_set(&t->refusal, ERR_DENIED,
                      "%s certificate was not issued by the CA that this side trusts; use credentials and a "
                      "server of one cluster",
                      whose);
        break;
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH: refuse_host(t, x); break;
    case X509_V_ERR_INVALID_PURPOSE:
        (void)err_set(&t->refusal, ERR_DENIED, "%s certificate is not meant for a %s; have one issued for it",
                      whose, t->config->server ? "client" : "server");
        break;
    default:
        (void)err_set(&t->refusal, ERR_DENIED, "%s certificate was refused: %s", whose,
                      X509_verify_cert_error_string(why));
    }
}

static bool identity_accepted(struct tls *t, X509 *x)
{
    if (identity_of(x, &t->peer, &t->refusal) < 0) {
        (void)err_prepend(&t->refusal, "%s certificate", peer_word(t));
        return false;
    }
    if (t->peer.server == t->config->server) {
        (void)err_set(
            &t->refusal, ERR_DENIED,
            t->config->server
                ? "expected a client's certificate (larder://TENANT/ROLE), found a server's; connect "
                  "with a user's credentials"
                : "expected a server's certificate (larder://server), found that of a user; the "
                  "server must be given the certificate that was issued for it");
        return false;
    }
    return true;
}

/* In place of OpenSSL's own verification: the same, then words and identity. Its result becomes the alert. */
static int verify(X509_STORE_CTX *x, void *arg)
{
    (void)arg;
    const SSL *ssl = X509_STORE_CTX_get_ex_data(x, SSL_get_ex_data_X509_STORE_CTX_idx());
    struct tls *t = SSL_get_app_data(ssl);
    if (X509_verify_cert(x) != 1) {
        int why = X509_STORE_CTX_get_error(x);
        refuse_certificate(t, why, X509_STORE_CTX_get_current_cert(x));
        if (why == X509_V_OK)
            X509_STORE_CTX_set_error(x, X509_V_ERR_UNSPECIFIED);
        return 0;
    }
    if (!identity_accepted(t, X509_STORE_CTX_get0_cert(x))) {
        X509_STORE_CTX_set_error(x, X509_V_ERR_CERT_REJECTED);
        return 0;
    }
    return 1;
}

/* ---- configuration ---- */

static int no_password(char *buf, int size, int writing, void *arg)
{
    (void)buf, (void)size, (void)writing, (void)arg;
    return -1;
}

/* What OpenSSL works out of a certificate when it first needs it is worked out now, before threads share it.
 * It does that safely at any time, but by means that ThreadSanitizer cannot see. */
static void work_out(X509 *x)
{
    (void)X509_check_purpose(x, -1, 0);
}

static int load_ca(SSL_CTX *ctx, const char *pem, struct err *e)
{
    BIO *b = BIO_new_mem_buf(pem, -1);
    X509_STORE *store = SSL_CTX_get_cert_store(ctx);
    unsigned count = 0;
    bool added = true;
    X509 *x;
    while (b && added && (x = PEM_read_bio_X509(b, NULL, no_password, NULL))) {
        work_out(x);
        added = X509_STORE_add_cert(store, x) == 1;
        X509_free(x);
        count += added;
    }
    unsigned long code = ERR_peek_last_error();
    bool at_end = ERR_GET_LIB(code) == ERR_LIB_PEM && ERR_GET_REASON(code) == PEM_R_NO_START_LINE;
    BIO_free(b);
    ERR_clear_error();
    if (count == 0 || !at_end)
        return err_set(e, ERR_INVALID, "expected the CA's certificate as PEM, found %s%s%s",
                       count ? "one that cannot be read" : "none", code && !at_end ? ": " : "",
                       code && !at_end ? reason_text(code) : "");
    return 0;
}

/* X509_cmp_current_time: the only use of a clock here, and the same that verification makes inside OpenSSL.
 */
static int check_dates(X509 *x, struct channel_config *c, struct err *e)
{
    char from[DATE_BYTES];
    date_text(X509_get0_notBefore(x), from);
    date_text(X509_get0_notAfter(x), c->until);
    if (X509_cmp_current_time(X509_get0_notAfter(x)) <= 0)
        return err_set(e, ERR_DENIED, "our own certificate %s expired on %s; have a new one issued",
                       c->own.subject, c->until);
    if (X509_cmp_current_time(X509_get0_notBefore(x)) > 0)
        return err_set(e, ERR_DENIED,
                       "our own certificate %s is valid only from %s on; check this machine's clock",
                       c->own.subject, from);
    return 0;
}

static int check_own(X509 *x, struct channel_config *c, struct err *e)
{
    int rc = identity_of(x, &c->own, e);
    if (rc < 0) {
        (void)err_prepend(e, "our own certificate");
        return rc;
    }
    if (c->own.server != c->server)
        return err_set(e, ERR_DENIED,
                       c->server ? "expected a server's certificate (larder://server), found that of a user"
                                 : "expected a user's certificate (larder://TENANT/ROLE), found a server's");
    return check_dates(x, c, e);
}

static int load_certificate(struct channel_config *c, const char *pem, struct err *e)
{
    int rc = 0;
    BIO *b = BIO_new_mem_buf(pem, -1);
    X509 *x = b ? PEM_read_bio_X509(b, NULL, no_password, NULL) : NULL;
    if (!x) {
        rc = err_set(e, ERR_INVALID, "expected a certificate as PEM, found none: %s",
                     reason_text(ERR_peek_last_error()));
        goto out;
    }
    work_out(x);
    rc = check_own(x, c, e);
    if (rc == 0 && SSL_CTX_use_certificate(c->ctx, x) != 1)
        rc = err_set(e, ERR_DENIED, "the certificate cannot be used: %s", reason_text(ERR_peek_last_error()));
    X509 *more;
    while (rc == 0 && (more = PEM_read_bio_X509(b, NULL, no_password, NULL)))
        if (SSL_CTX_add0_chain_cert(c->ctx, more) != 1) {
            X509_free(more);
            rc = err_set(e, ERR_NO_MEMORY, "no memory for the certificate's chain");
        }
out:
    ERR_clear_error();
    X509_free(x);
    BIO_free(b);
    return rc;
}

static int load_key(SSL_CTX *ctx, const struct secret *pem, struct err *e)
{
    int rc = 0;
    const char *text = (const char *)secret_bytes(pem);
    BIO *b = BIO_new_mem_buf(text, (int)strnlen(text, secret_size(pem)));
    EVP_PKEY *key = b ? PEM_read_bio_PrivateKey(b, NULL, no_password, NULL) : NULL;
    if (!key)
        rc = err_set(e, ERR_INVALID, "expected a private key as PEM without a password, found none: %s",
                     reason_text(ERR_peek_last_error()));
    /* use_PrivateKey compares it with the certificate that is already there. */
    else if (SSL_CTX_use_PrivateKey(ctx, key) != 1 || SSL_CTX_check_private_key(ctx) != 1)
        rc = err_set(e, ERR_DENIED,
                     "the private key does not belong to the certificate; use the pair that was issued "
                     "together");
    ERR_clear_error();
    EVP_PKEY_free(key);
    BIO_free(b);
    return rc;
}

static int alpn_select(SSL *ssl, const unsigned char **out, unsigned char *outlen, const unsigned char *in,
                       unsigned inlen, void *arg)
{
    (void)ssl, (void)arg;
    for (unsigned i = 0; i < inlen; i += 1u + in[i]) {
        if (inlen - i >= ALPN_BYTES && memcmp(in + i, alpn, ALPN_BYTES) == 0) {
            *out = in + i + 1;
            *outlen = in[i];
            return SSL_TLSEXT_ERR_OK;
        }
    }
    return SSL_TLSEXT_ERR_ALERT_FATAL;
}

/* alpn_select is not asked where the extension is missing. */
static int require_alpn(SSL *ssl, int *alert, void *arg)
{
    (void)arg;
    const unsigned char *p;
    size_t n;
    if (SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &p, &n))
        return SSL_CLIENT_HELLO_SUCCESS;
    struct tls *t = SSL_get_app_data(ssl);
    (void)err_set(&t->refusal, ERR_PROTOCOL,
                  "the peer does not offer the protocol larder/1 (ALPN); is it a larder client?");
    *alert = SSL_AD_NO_APPLICATION_PROTOCOL;
    return SSL_CLIENT_HELLO_ERROR;
}

/* ---- secrets of a connection ---- */

static int keep_secret(struct tls *t, enum way way, const uint8_t *bytes, size_t n)
{
    uint8_t both[WAYS * RECORD_SECRET_MAX] = {0};
    if (t->secrets)
        memcpy(both, secret_bytes(t->secrets), sizeof both);
    memcpy(both + way * RECORD_SECRET_MAX, bytes, n);
    struct secret *s = secret_create(both, sizeof both);
    secret_wipe(both, sizeof both);
    if (!s)
        return -ENOMEM;
    secret_free(t->secrets);
    t->secrets = s;
    t->secret_bytes[way] = n;
    return 0;
}

static const uint8_t *secret_of(const struct tls *t, enum way way)
{
    return secret_bytes(t->secrets) + way * RECORD_SECRET_MAX;
}

/* A line of a key log: label, client's random, secret in hexadecimal. If it cannot be kept take_over fails.
 */
static void catch_secret(const SSL *ssl, const char *line)
{
    static const char of_client[] = "CLIENT_TRAFFIC_SECRET_0 ", of_server[] = "SERVER_TRAFFIC_SECRET_0 ";
    struct tls *t = SSL_get_app_data(ssl);
    bool client = strncmp(line, of_client, sizeof of_client - 1) == 0;
    if (!client && strncmp(line, of_server, sizeof of_server - 1) != 0)
        return;
    const char *hex = strrchr(line, ' ') + 1;
    uint8_t bytes[RECORD_SECRET_MAX];
    size_t n = strlen(hex) / 2;
    if (n <= sizeof bytes && hex_decode(hex, n, bytes) == 0 &&
        keep_secret(t, client == t->config->server ? IN : OUT, bytes, n) < 0)
        (void)err_set(&t->refusal, ERR_NO_MEMORY, "no memory for the secrets of a connection");
    secret_wipe(bytes, sizeof bytes);
}

static bool set_policy(SSL_CTX *ctx, bool server)
{
    SSL_CTX_set_options(ctx, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET);
    SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_keylog_callback(ctx, catch_secret);
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_cert_verify_callback(ctx, verify, NULL);
    if (server) {
        SSL_CTX_set_alpn_select_cb(ctx, alpn_select, NULL);
        SSL_CTX_set_client_hello_cb(ctx, require_alpn, NULL);
    }
    return SSL_CTX_set_min_proto_version(ctx, TLS1_3_VERSION) &&
           SSL_CTX_set_max_proto_version(ctx, TLS1_3_VERSION) && SSL_CTX_set_num_tickets(ctx, 0) &&
           SSL_CTX_set_max_early_data(ctx, 0) &&
           SSL_CTX_set_ciphersuites(
               ctx, "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") &&
           SSL_CTX_set1_groups_list(ctx, "X25519:P-256:P-384") &&
           (server || SSL_CTX_set_alpn_protos(ctx, alpn, ALPN_BYTES) == 0);
}

/* ---- the BIO between OpenSSL and the channel ---- */

static int bio_read(BIO *b, char *p, int n)
{
    struct tls *t = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    struct slice in = n > 0 ? t->io.see(t->io.arg, 1) : SLICE(NULL, 0);
    if (in.n == 0) {
        BIO_set_retry_read(b);
        return -1;
    }
    int got = in.n < (size_t)n ? (int)in.n : n;
    memcpy(p, in.p, (size_t)got);
    t->io.skip(t->io.arg, (size_t)got);
    return got;
}

static int bio_write(BIO *b, const char *p, int n)
{
    struct tls *t = BIO_get_data(b);
    BIO_clear_retry_flags(b);
    if (n <= 0)
        return 0;
    uint8_t *to = t->io.grow(t->io.arg, (size_t)n);
    if (!to)
        return -1;
    memcpy(to, p, (size_t)n);
    return n;
}

static long bio_ctrl(BIO *b, int cmd, long num, void *ptr)
{
    (void)b, (void)num, (void)ptr;
    return cmd == BIO_CTRL_FLUSH;
}

static int bio_new(BIO *b)
{
    BIO_set_init(b, 1);
    return 1;
}

static BIO_METHOD *bio_method(void)
{
    BIO_METHOD *m = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "larder channel");
    if (m && BIO_meth_set_read(m, bio_read) && BIO_meth_set_write(m, bio_write) &&
        BIO_meth_set_ctrl(m, bio_ctrl) && BIO_meth_set_create(m, bio_new))
        return m;
    BIO_meth_free(m);
    return NULL;
}

int channel_config_create(bool server, const char *ca_pem, const char *certificate_pem,
                          const struct secret *key_pem, struct channel_config **out, struct err *e)
{
    int rc;
    *out = NULL;
    ERR_clear_error();
    struct channel_config *c = calloc(1, sizeof *c);
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory for a TLS configuration");
    c->refs = 1;
    c->server = server;
    c->ctx = SSL_CTX_new(server ? TLS_server_method() : TLS_client_method());
    c->bio = bio_method();
    if (!c->ctx || !c->bio || !set_policy(c->ctx, server)) {
        rc = err_set(e, ERR_UNSUPPORTED, "this OpenSSL cannot do TLS 1.3 as larder needs it: %s",
                     reason_text(ERR_peek_last_error()));
        ERR_clear_error();
        goto out;
    }
    rc = load_ca(c->ctx, ca_pem, e);
    if (rc == 0)
        rc = load_certificate(c, certificate_pem, e);
    if (rc == 0)
        rc = load_key(c->ctx, key_pem, e);
    if (rc == 0) {
        *out = c;
        c = NULL;
    }
out:
    channel_config_unref(c);
    return rc;
}

struct channel_config *channel_config_ref(struct channel_config *c)
{
    __atomic_fetch_add(&c->refs, 1, __ATOMIC_RELAXED);
    return c;
}

void channel_config_unref(struct channel_config *c)
{
    if (!c || __atomic_sub_fetch(&c->refs, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    SSL_CTX_free(c->ctx);
    BIO_meth_free(c->bio);
    free(c);
}

bool channel_config_is_server(const struct channel_config *c)
{
    return c->server;
}

/* ---- one connection ---- */

static bool expect_host(struct tls *t, const char *host)
{
    unsigned char raw[16];
    if (strlen(host) >= sizeof t->host)
        return false;
    snprintf(t->host, sizeof t->host, "%s", host);
    if (inet_pton(AF_INET, host, raw) == 1 || inet_pton(AF_INET6, host, raw) == 1)
        return X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(t->ssl), host) == 1;
    SSL_set_hostflags(t->ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
    return SSL_set1_host(t->ssl, host) == 1 && SSL_set_tlsext_host_name(t->ssl, host) == 1;
}

int tls_create(struct channel_config *config, const char *expected_host, const struct tls_io *io,
               struct tls **out, struct err *e)
{
    int rc = 0;
    *out = NULL;
    ERR_clear_error();
    struct tls *t = calloc(1, sizeof *t);
    if (!t)
        return err_set(e, ERR_NO_MEMORY, "no memory for a connection");
    t->config = channel_config_ref(config);
    t->io = *io;
    t->ssl = SSL_new(config->ctx);
    BIO *b = t->ssl ? BIO_new(config->bio) : NULL;
    if (!b) {
        rc = err_set(e, ERR_NO_MEMORY, "no memory for a connection");
        goto out;
    }
    BIO_set_data(b, t);
    SSL_set_bio(t->ssl, b, b);
    SSL_set_app_data(t->ssl, t);
    if (config->server) {
        SSL_set_accept_state(t->ssl);
    } else {
        SSL_set_connect_state(t->ssl);
        if (expected_host && !expect_host(t, expected_host)) {
            char quoted[96];
            rc = err_set(e, ERR_INVALID, "expected a host name or an IP address, found '%s'",
                         err_quote(quoted, sizeof quoted, expected_host, strlen(expected_host)));
            ERR_clear_error();
            goto out;
        }
    }
    *out = t;
    t = NULL;
out:
    tls_free(t);
    return rc;
}

void tls_free(struct tls *t)
{
    if (!t)
        return;
    SSL_free(t->ssl); /* and its BIO */
    record_key_free(t->key[IN]);
    record_key_free(t->key[OUT]);
    secret_free(t->secrets);
    free(t->plain);
    channel_config_unref(t->config);
    free(t);
}

/* What the peer's alert means for whoever reads it here. Numbers: RFC 8446, 6.2. */
static int alert_err(const struct tls *t, int alert, struct err *e)
{
    const char *who = t->config->server ? "client" : "server", *why = NULL;
    switch (alert) {
    case 42: why = "it is not one that it accepts (bad certificate)"; break;
    case 43: why = "it was not issued for this use"; break;
    case 44: why = "it was revoked"; break;
    case 45: why = "it has expired"; break;
    case 46: why = "its reason is unknown"; break;
    case 48: why = "it was not issued by a CA that the peer trusts"; break;
    case 116: why = "it asks for one and received none"; break;
    default: break;
    }
    if (why)
        return err_set(e, ERR_DENIED,
                       "the %s refused our certificate (%s, valid until %s): %s; have one issued by the "
                       "server's CA",
                       who, t->config->own.subject, t->config->until, why);
    if (alert == 49)
        return err_set(e, ERR_DENIED, "the %s denies access to %s", who, t->config->own.subject);
    if (alert == 120)
        return err_set(e, ERR_PROTOCOL, "the %s does not speak larder/1; is it a larder of this version?",
                       who);
    if (alert == 70)
        return err_set(e, ERR_PROTOCOL, "the %s does not accept TLS 1.3, and larder uses nothing older", who);
    return err_set(e, ERR_PROTOCOL, "the %s broke the connection off: %s (TLS alert %d)", who,
                   SSL_alert_desc_string_long(alert), alert);
}

static int reason_err(const struct tls *t, unsigned long code, struct err *e)
{
    const char *who = t->config->server ? "client" : "server";
    switch (ERR_GET_REASON(code)) {
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
        return err_set(e, ERR_DENIED, "the client showed no certificate; connect with a user's credentials");
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_NO_PROTOCOLS_AVAILABLE:
    case SSL_R_WRONG_SSL_VERSION:
        return err_set(e, ERR_PROTOCOL, "the %s offers no TLS 1.3, and larder uses nothing older; upgrade it",
                       who);
    case SSL_R_NO_APPLICATION_PROTOCOL:
        return err_set(e, ERR_PROTOCOL, "the %s offers other protocols than larder/1 (ALPN); is it a larder?",
                       who);
    case SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC:
    case SSL_R_BAD_RECORD_TYPE:
        return err_set(e, ERR_CORRUPT,
                       "bytes from the %s were changed on their way: a TLS record does not verify; connect "
                       "again",
                       who);
    default: return err_set(e, ERR_PROTOCOL, "the %s broke the TLS protocol: %s", who, reason_text(code));
    }
}

/* After a failed call on the SSL. Empties OpenSSL's queue. */
static int fail(const struct tls *t, int why, struct err *e)
{
    unsigned long code = ERR_peek_error();
    ERR_clear_error();
    if (t->refusal.class != ERR_NONE)
        return err_set(e, t->refusal.class, "%s", t->refusal.text);
    if (why == SSL_ERROR_ZERO_RETURN)
        return err_set(e, ERR_PROTOCOL, "the peer closed the connection in the middle of the handshake");
    if (code == 0 || why == SSL_ERROR_SYSCALL)
        return err_set(e, ERR_NO_MEMORY, "no memory for a connection");
    if (ERR_GET_REASON(code) == ERR_R_MALLOC_FAILURE)
        return err_set(e, ERR_NO_MEMORY, "no memory for a connection");
    if (ERR_GET_LIB(code) == ERR_LIB_SSL && ERR_GET_REASON(code) > SSL_AD_REASON_OFFSET)
        return alert_err(t, ERR_GET_REASON(code) - SSL_AD_REASON_OFFSET, e);
    return reason_err(t, code, e);
}

/* The handshake is done, and every record from here on is ours. OpenSSL reads record by record, so what came
 * behind the peer's Finished is still with the channel; and it has sent nothing with these secrets: a client
 * only its Finished before, a server no tickets. */
static int take_over(struct tls *t, struct err *e)
{
    if (t->refusal.class != ERR_NONE) /* of catch_secret, which cannot end the handshake */
        return err_set(e, t->refusal.class, "%s", t->refusal.text);
    t->suite = SSL_CIPHER_get_protocol_id(SSL_get_current_cipher(t->ssl));
    size_t n = record_secret_bytes(t->suite);
    if (n == 0 || t->secret_bytes[IN] != n || t->secret_bytes[OUT] != n || SSL_has_pending(t->ssl))
        return err_set(
            e, ERR_PROTOCOL,
            "OpenSSL's state after the handshake is not what it has to be (suite %#x, secrets of %zu "
            "and %zu bytes); is it a version that this build does not know?",
            t->suite, t->secret_bytes[IN], t->secret_bytes[OUT]);
    for (int way = IN; way < WAYS; way++)
        if (record_key_create(way == OUT, t->suite, secret_of(t, way), &t->key[way]) < 0)
            return err_set(e, ERR_NO_MEMORY, "no memory for a connection");
    (void)SSL_free_buffers(t->ssl);
    return 0;
}

int tls_handshake(struct tls *t, struct err *e)
{
    if (t->done)
        return 1;
    ERR_clear_error();
    int rc = SSL_do_handshake(t->ssl);
    if (rc != 1) {
        int why = SSL_get_error(t->ssl, rc);
        return why == SSL_ERROR_WANT_READ ? 0 : fail(t, why, e);
    }
    const unsigned char *name;
    unsigned n;
    SSL_get0_alpn_selected(t->ssl, &name, &n);
    if (n != ALPN_BYTES - 1 || memcmp(name, alpn + 1, n) != 0)
        return err_set(e, ERR_PROTOCOL, "the server did not agree to the protocol larder/1; is it a larder?");
    rc = take_over(t, e);
    t->done = rc == 0;
    return rc == 0 ? 1 : rc;
}

const struct identity *tls_peer(const struct tls *t)
{
    return t->done ? &t->peer : NULL;
}

/* ---- after the handshake: records ---- */

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for a TLS record");
}

static int send_record(struct tls *t, enum record_type type, const struct slice *parts, size_t count,
                       size_t n, struct err *e)
{
    uint8_t *to = t->io.grow(t->io.arg, n + RECORD_OVERHEAD);
    if (!to)
        return no_memory(e);
    size_t made = record_seal(t->key[OUT], type, parts, count, to);
    check(made == n + RECORD_OVERHEAD);
    return 0;
}

/* That the connection is broken now; the peer is told by the alert. */
static int broken(struct tls *t, enum record_alert alert, const char *what, struct err *e)
{
    const char *who = t->config->server ? "client" : "server";
    const uint8_t fatal[] = {2, (uint8_t)alert};
    (void)!send_record(t, RECORD_ALERT, &SLICE(fatal, sizeof fatal), 1, sizeof fatal, NULL);
    if (!what)
        return err_set(
            e, ERR_CORRUPT,
            "bytes from the %s were changed on their way: a TLS record does not verify; connect again", who);
    return err_set(e, ERR_PROTOCOL, "the %s broke the TLS protocol: %s", who, what);
}

/* The next traffic secret of one way takes over (RFC 8446, 7.2). */
static int next_key(struct tls *t, enum way way, struct err *e)
{
    uint8_t next[RECORD_SECRET_MAX];
    int rc = record_secret_next(t->suite, secret_of(t, way), next);
    if (rc == 0)
        rc = keep_secret(t, way, next, record_secret_bytes(t->suite));
    if (rc == 0)
        rc = record_key_set(t->key[way], next);
    secret_wipe(next, sizeof next);
    return rc < 0 ? no_memory(e) : 0;
}

/* KeyUpdate with update_not_requested (4.6.3), the last record under the old key. */
static int update_own_key(struct tls *t, struct err *e)
{
    static const uint8_t message[] = {SSL3_MT_KEY_UPDATE, 0, 0, 1, SSL_KEY_UPDATE_NOT_REQUESTED};
    int rc = send_record(t, RECORD_HANDSHAKE, &SLICE(message, sizeof message), 1, sizeof message, e);
    return rc < 0 ? rc : next_key(t, OUT, e);
}

static int take_key_update(struct tls *t, const uint8_t *body, size_t n, bool last, struct err *e)
{
    if (n != 1 || *body > SSL_KEY_UPDATE_REQUESTED)
        return broken(t, ALERT_DECODE_ERROR, "a key update that is none", e);
    if (!last) /* no message goes across a change of keys (5.1) */
        return broken(t, ALERT_UNEXPECTED_MESSAGE, "a message behind a key update in its record", e);
    int rc = next_key(t, IN, e);
    return rc == 0 && *body == SSL_KEY_UPDATE_REQUESTED ? update_own_key(t, e) : rc;
}

/* Messages that may follow a handshake: key updates and, from a server, tickets, which are not used. Whoever
 * sends them puts each into one record. */
static int take_messages(struct tls *t, const uint8_t *p, size_t n, struct err *e)
{
    int rc = 0;
    while (rc == 0 && n > 0) {
        size_t body = n < 4 ? SIZE_MAX : (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
        if (n < 4 || body > n - 4)
            return broken(t, ALERT_UNEXPECTED_MESSAGE, "a message after the handshake is cut into records",
                          e);
        if (p[0] == SSL3_MT_KEY_UPDATE)
            rc = take_key_update(t, p + 4, body, body == n - 4, e);
        else if (p[0] != SSL3_MT_NEWSESSION_TICKET || t->config->server)
            return broken(t, ALERT_UNEXPECTED_MESSAGE, "a message that does not belong behind a handshake",
                          e);
        p += 4 + body;
        n -= 4 + body;
    }
    return rc;
}

static int take_alert(struct tls *t, const uint8_t *p, size_t n, struct err *e)
{
    if (n != 2)
        return broken(t, ALERT_DECODE_ERROR, "an alert that is none", e);
    if (p[1] == ALERT_CLOSE_NOTIFY)
        t->peer_closed = true;
    else if (p[1] != ALERT_USER_CANCELED) /* close_notify follows it */
        return alert_err(t, p[1], e);
    return 0;
}

static int take_other(struct tls *t, enum record_type type, const uint8_t *p, size_t n, struct err *e)
{
    if (++t->idle_records > IDLE_RECORDS_MAX)
        return broken(t, ALERT_UNEXPECTED_MESSAGE, "it sends records without end that carry nothing", e);
    if (type == RECORD_ALERT)
        return take_alert(t, p, n, e);
    return type == RECORD_HANDSHAKE ? take_messages(t, p, n, e) : 0;
}

/* The next record, whole and as it came; its n is 0 if there is none yet. */
static int next_record(struct tls *t, struct slice *out, struct err *e)
{
    size_t n;
    *out = SLICE(NULL, 0);
    struct slice in = t->io.see(t->io.arg, RECORD_HEADER_BYTES);
    if (in.n < RECORD_HEADER_BYTES)
        return 0;
    int alert = record_bytes(in.p, &n);
    if (alert)
        return broken(t, alert, NULL, e);
    in = t->io.see(t->io.arg, n);
    if (in.n >= n)
        *out = SLICE(in.p, n);
    return 0;
}

static int take_plain(struct tls *t, void *p, size_t n)
{
    size_t left = t->plain_end - t->plain_at;
    n = n < left ? n : left;
    memcpy(p, t->plain + t->plain_at, n);
    t->plain_at += n;
    return (int)n;
}

/* 1: another record was taken, and *got bytes of it are at p; 0: none is there. */
static int read_record(struct tls *t, uint8_t *p, size_t n, size_t *got, struct err *e)
{
    enum record_type type;
    struct slice record;
    size_t bytes;
    *got = 0;
    int rc = next_record(t, &record, e);
    if (rc < 0 || record.n == 0)
        return rc;
    bool fits = record.n - RECORD_OVERHEAD <= n;
    if (!fits && !t->plain && !(t->plain = malloc(RECORD_BYTES_MAX)))
        return no_memory(e);
    uint8_t *to = fits ? p : t->plain;
    int alert = record_open(t->key[IN], record.p, record.n, to, &type, &bytes);
    if (alert)
        return broken(
            t, alert,
            alert == ALERT_BAD_RECORD_MAC ? NULL : "a record's content is of no kind that is allowed", e);
    t->io.skip(t->io.arg, record.n);
    if (type != RECORD_DATA || bytes == 0)
        return (rc = take_other(t, type, to, bytes, e)) < 0 ? rc : 1;
    t->idle_records = 0;
    if (fits) {
        *got = bytes;
    } else {
        t->plain_at = 0;
        t->plain_end = bytes;
    }
    return 1;
}

int tls_read(struct tls *t, void *p, size_t n, struct err *e)
{
    check(n > 0 && n <= INT_MAX);
    while (t->plain_at == t->plain_end) {
        size_t got;
        int rc = t->peer_closed ? 0 : read_record(t, p, n, &got, e);
        if (rc == 0) { /* an idle connection keeps no buffer */
            free(t->plain);
            t->plain = NULL;
        }
        if (rc <= 0)
            return rc;
        if (got > 0)
            return (int)got;
    }
    return take_plain(t, p, n);
}

size_t tls_output_bytes(size_t n)
{
    size_t records = n / RECORD_CONTENT_MAX + 1, updates = records / RECORD_KEY_MAX + 1;
    return n + records * RECORD_OVERHEAD + updates * (5 + RECORD_OVERHEAD);
}

/* Moves what fits into one record from parts to out; returns its bytes. */
static size_t cut(struct slice *parts, size_t count, struct slice *out)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        size_t n = parts[i].n < RECORD_CONTENT_MAX - used ? parts[i].n : RECORD_CONTENT_MAX - used;
        out[i] = SLICE(parts[i].p, n);
        if (n > 0)
            parts[i] = SLICE(parts[i].p + n, parts[i].n - n);
        used += n;
    }
    return used;
}

int tls_write(struct tls *t, const struct slice *parts, size_t count, struct err *e)
{
    struct slice left[TLS_PARTS_MAX], now[TLS_PARTS_MAX];
    int rc = 0;
    size_t n;
    check(count <= TLS_PARTS_MAX);
    memcpy(left, parts, count * sizeof *parts);
    while (rc == 0 && (n = cut(left, count, now)) > 0) {
        if (record_key_worn(t->key[OUT]))
            rc = update_own_key(t, e);
        if (rc == 0)
            rc = send_record(t, RECORD_DATA, now, count, n, e);
    }
    return rc;
}

void tls_close(struct tls *t)
{
    static const uint8_t warning[] = {1, ALERT_CLOSE_NOTIFY};
    (void)!send_record(t, RECORD_ALERT, &SLICE(warning, sizeof warning), 1, sizeof warning, NULL);
}

bool tls_peer_closed(const struct tls *t)
{
    return t->peer_closed;
}

int tls_export(struct tls *t, const char *label, const void *context, size_t context_bytes, void *out,
               size_t n)
{
    if (!t->done)
        return -EINVAL;
    ERR_clear_error();
    int rc = SSL_export_keying_material(t->ssl, out, n, label, strlen(label), context, context_bytes, 1);
    ERR_clear_error();
    return rc == 1 ? 0 : -EIO;
}
