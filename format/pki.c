/* SPDX-License-Identifier: Apache-2.0 */
/*
 * X.509v3 certificates on P-256. Every extension is built from typed values, never from a configuration
 * string, so that a host or tenant name cannot smuggle in another one.
 */
#include "format/pki.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "format/commit.h"

#define DAY_S       86400
#define DAYS_MAX    36500
#define EARLIER_S   3600
#define SERIAL_BITS 128

void pki_pair_free(struct pki_pair *p)
{
    free(p->certificate_pem);
    secret_free(p->key_pem);
    *p = (struct pki_pair){0};
}

/* The cause that OpenSSL knows, or a plain word. Empties its queue. */
static const char *cause(void)
{
    const char *reason = ERR_reason_error_string(ERR_peek_error());
    ERR_clear_error();
    return reason ? reason : "no memory";
}

static int refuse(struct err *e, const char *what)
{
    return err_set(e, ERR_NO_MEMORY, "%s could not be made: %s", what, cause());
}

static int no_password(char *buf, int size, int writing, void *arg)
{
    (void)buf, (void)size, (void)writing, (void)arg;
    return -1;
}

static int pair_of(X509 *x, EVP_PKEY *key, struct pki_pair *out, struct err *e)
{
    int rc = 0;
    BIO *cert = BIO_new(BIO_s_mem()), *priv = BIO_new(BIO_s_mem());
    char *p;
    if (!cert || !priv || !PEM_write_bio_X509(cert, x) ||
        !PEM_write_bio_PKCS8PrivateKey(priv, key, NULL, NULL, 0, NULL, NULL) || BIO_write(priv, "", 1) != 1) {
        rc = refuse(e, "the certificate's text");
        goto out;
    }
    long n = BIO_get_mem_data(cert, &p);
    out->certificate_pem = strndup(p, (size_t)n);
    n = BIO_get_mem_data(priv, &p);
    out->key_pem = secret_create(p, (size_t)n);
    if (!out->certificate_pem || !out->key_pem) {
        pki_pair_free(out);
        rc = err_set(e, ERR_NO_MEMORY, "no memory for a certificate");
    }
out:
    BIO_free(cert);
    BIO_free(priv); /* a memory BIO wipes what it frees */
    return rc;
}

static bool set_serial(X509 *x)
{
    BIGNUM *n = BN_new();
    /* Top bit clear and next one set: positive, and always 16 bytes. */
    bool done = n && BN_rand(n, SERIAL_BITS - 1, BN_RAND_TOP_ONE, BN_RAND_BOTTOM_ANY) &&
                BN_to_ASN1_INTEGER(n, X509_get_serialNumber(x));
    BN_free(n);
    return done;
}

static bool add_name(X509_NAME *name, const char *common)
{
    return X509_NAME_add_entry_by_txt(name, "O", MBSTRING_UTF8, (const unsigned char *)"larder", -1, -1, 0) &&
           X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8, (const unsigned char *)common, -1, -1, 0);
}

/* A certificate with everything but issuer, extensions and signature. */
static X509 *blank(const char *common, EVP_PKEY *key, int64_t begin_s, int64_t end_s)
{
    X509 *x = X509_new();
    if (!x)
        return NULL;
    if (X509_set_version(x, X509_VERSION_3) && set_serial(x) && add_name(X509_get_subject_name(x), common) &&
        ASN1_TIME_set(X509_getm_notBefore(x), (time_t)begin_s) &&
        ASN1_TIME_set(X509_getm_notAfter(x), (time_t)end_s) && X509_set_pubkey(x, key))
        return x;
    X509_free(x);
    return NULL;
}

static bool add_basic(X509 *x, bool ca)
{
    BASIC_CONSTRAINTS *b = BASIC_CONSTRAINTS_new();
    bool done = false;
    if (b) {
        b->ca = ca ? 0xff : 0;
        if (ca) {
            b->pathlen = ASN1_INTEGER_new();
            done = b->pathlen && ASN1_INTEGER_set(b->pathlen, 0);
        } else {
            done = true;
        }
        done = done && X509_add1_ext_i2d(x, NID_basic_constraints, b, 1, X509V3_ADD_DEFAULT) == 1;
    }
    BASIC_CONSTRAINTS_free(b);
    return done;
}

/* RFC 5280 4.2.1.3: bit 0 digitalSignature, 5 keyCertSign, 6 cRLSign. */
static bool add_usage(X509 *x, bool ca)
{
    ASN1_BIT_STRING *u = ASN1_BIT_STRING_new();
    bool done = u && (ca ? ASN1_BIT_STRING_set_bit(u, 5, 1) && ASN1_BIT_STRING_set_bit(u, 6, 1)
                         : ASN1_BIT_STRING_set_bit(u, 0, 1));
    done = done && X509_add1_ext_i2d(x, NID_key_usage, u, 1, X509V3_ADD_DEFAULT) == 1;
    ASN1_BIT_STRING_free(u);
    return done;
}

static bool add_purpose(X509 *x, int nid)
{
    EXTENDED_KEY_USAGE *u = sk_ASN1_OBJECT_new_null();
    bool done = u && sk_ASN1_OBJECT_push(u, OBJ_nid2obj(nid)) > 0 &&
                X509_add1_ext_i2d(x, NID_ext_key_usage, u, 0, X509V3_ADD_DEFAULT) == 1;
    sk_ASN1_OBJECT_pop_free(u, ASN1_OBJECT_free);
    return done;
}

/* SHA-1 of the public key, as RFC 5280 4.2.1.2 (1) names keys; an identifier, not a signature. */
static bool key_name(const X509 *x, ASN1_OCTET_STRING *out)
{
    unsigned char md[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    return X509_pubkey_digest(x, EVP_sha1(), md, &n) && ASN1_OCTET_STRING_set(out, md, (int)n);
}

static bool add_key_names(X509 *x, const X509 *issuer)
{
    ASN1_OCTET_STRING *own = ASN1_OCTET_STRING_new();
    AUTHORITY_KEYID *above = AUTHORITY_KEYID_new();
    bool done = own && above && key_name(x, own) &&
                X509_add1_ext_i2d(x, NID_subject_key_identifier, own, 0, X509V3_ADD_DEFAULT) == 1;
    if (done) {
        above->keyid = ASN1_OCTET_STRING_new();
        done = above->keyid && key_name(issuer, above->keyid) &&
               X509_add1_ext_i2d(x, NID_authority_key_identifier, above, 0, X509V3_ADD_DEFAULT) == 1;
    }
    ASN1_OCTET_STRING_free(own);
    AUTHORITY_KEYID_free(above);
    return done;
}

static bool add_alt_text(GENERAL_NAMES *names, int type, const char *text)
{
    GENERAL_NAME *g = GENERAL_NAME_new();
    ASN1_IA5STRING *s = ASN1_IA5STRING_new();
    if (g && s && ASN1_STRING_set(s, text, -1)) {
        GENERAL_NAME_set0_value(g, type, s);
        if (sk_GENERAL_NAME_push(names, g) > 0)
            return true;
        s = NULL; /* g's now */
    }
    ASN1_IA5STRING_free(s);
    GENERAL_NAME_free(g);
    return false;
}

static bool add_alt_address(GENERAL_NAMES *names, const char *text)
{
    GENERAL_NAME *g = GENERAL_NAME_new();
    ASN1_OCTET_STRING *ip = a2i_IPADDRESS(text);
    if (g && ip) {
        GENERAL_NAME_set0_value(g, GEN_IPADD, ip);
        if (sk_GENERAL_NAME_push(names, g) > 0)
            return true;
        ip = NULL;
    }
    ASN1_OCTET_STRING_free(ip);
    GENERAL_NAME_free(g);
    return false;
}

static bool is_address(const char *text)
{
    unsigned char raw[16];
    return inet_pton(AF_INET, text, raw) == 1 || inet_pton(AF_INET6, text, raw) == 1;
}

static bool add_alt(X509 *x, const char *uri, const char *const *hosts)
{
    GENERAL_NAMES *names = sk_GENERAL_NAME_new_null();
    bool done = names && add_alt_text(names, GEN_URI, uri);
    for (size_t i = 0; done && hosts && hosts[i]; i++)
        done =
            is_address(hosts[i]) ? add_alt_address(names, hosts[i]) : add_alt_text(names, GEN_DNS, hosts[i]);
    done = done && X509_add1_ext_i2d(x, NID_subject_alt_name, names, 0, X509V3_ADD_DEFAULT) == 1;
    GENERAL_NAMES_free(names);
    return done;
}

int pki_ca_create(const char *name, int64_t now_s, unsigned days, struct pki_pair *out, struct err *e)
{
    *out = (struct pki_pair){0};
    if (days == 0 || days > DAYS_MAX)
        return err_set(e, ERR_INVALID, "a certificate lasts 1 to %u days, not %u", DAYS_MAX, days);
    if (name[0] == '\0' || strlen(name) > 64)
        return err_set(e, ERR_INVALID, "a CA's name has 1 to 64 bytes, not %zu", strlen(name));
    int rc;
    EVP_PKEY *key = EVP_EC_gen("P-256");
    X509 *x = key ? blank(name, key, now_s - EARLIER_S, now_s + (int64_t)days * DAY_S) : NULL;
    if (x && X509_set_issuer_name(x, X509_get_subject_name(x)) && add_basic(x, true) && add_usage(x, true) &&
        add_key_names(x, x) && X509_sign(x, key, EVP_sha256()))
        rc = pair_of(x, key, out, e);
    else
        rc = refuse(e, "the CA certificate");
    X509_free(x);
    EVP_PKEY_free(key);
    return rc;
}

struct authority {
    X509 *certificate;
    EVP_PKEY *key;
};

static void authority_free(struct authority *a)
{
    X509_free(a->certificate);
    EVP_PKEY_free(a->key);
}

static int authority_load(const struct pki_pair *ca, struct authority *a, struct err *e)
{
    const char *key_text = (const char *)secret_bytes(ca->key_pem);
    BIO *cert = BIO_new_mem_buf(ca->certificate_pem, -1);
    BIO *key = BIO_new_mem_buf(key_text, (int)strnlen(key_text, secret_size(ca->key_pem)));
    a->certificate = cert ? PEM_read_bio_X509(cert, NULL, no_password, NULL) : NULL;
    a->key = key ? PEM_read_bio_PrivateKey(key, NULL, no_password, NULL) : NULL;
    BIO_free(cert);
    BIO_free(key);
    if (!a->certificate || !a->key)
        return err_set(e, ERR_INVALID, "expected the CA's certificate and key as PEM, found no %s: %s",
                       a->certificate ? "key" : "certificate", cause());
    if (X509_check_private_key(a->certificate, a->key) != 1) {
        ERR_clear_error();
        return err_set(e, ERR_DENIED,
                       "the CA's key does not belong to the CA's certificate; use the pair "
                       "that was made together");
    }
    if (X509_check_ca(a->certificate) != 1)
        return err_set(e, ERR_DENIED, "the certificate given as CA may not sign others; use the CA's");
    return 0;
}

static int issue(const struct pki_pair *ca, const char *common, const char *uri, const char *const *hosts,
                 int purpose, int64_t begin_s, int64_t end_s, struct pki_pair *out, struct err *e)
{
    struct authority a = {0};
    EVP_PKEY *key = NULL;
    X509 *x = NULL;
    int rc = authority_load(ca, &a, e);
    if (rc < 0)
        goto out;
    key = EVP_EC_gen("P-256");
    x = key ? blank(common, key, begin_s, end_s) : NULL;
    if (x && X509_set_issuer_name(x, X509_get_subject_name(a.certificate)) && add_basic(x, false) &&
        add_usage(x, false) && add_purpose(x, purpose) && add_key_names(x, a.certificate) &&
        add_alt(x, uri, hosts) && X509_sign(x, a.key, EVP_sha256()))
        rc = pair_of(x, key, out, e);
    else
        rc = refuse(e, "the certificate");
out:
    X509_free(x);
    EVP_PKEY_free(key);
    authority_free(&a);
    return rc;
}

/* Letters, digits, dots, hyphens, and a star as the whole first label. */
static bool host_valid(const char *h)
{
    size_t n = strlen(h);
    if (is_address(h))
        return true;
    if (n == 0 || n > 253 || h[0] == '-' || h[0] == '.')
        return false;
    if (h[0] == '*' && h[1] != '.')
        return false;
    for (size_t i = h[0] == '*'; i < n; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-", h[i]))
            return false;
    return true;
}

int pki_issue_server(const struct pki_pair *ca, const char *const *hosts, int64_t now_s, unsigned days,
                     struct pki_pair *out, struct err *e)
{
    char quoted[96], common[65];
    *out = (struct pki_pair){0};
    if (days == 0 || days > DAYS_MAX)
        return err_set(e, ERR_INVALID, "a certificate lasts 1 to %u days, not %u", DAYS_MAX, days);
    if (!hosts || !hosts[0])
        return err_set(e, ERR_INVALID, "a server's certificate needs a host name or address; none was given");
    for (size_t i = 0; hosts[i]; i++)
        if (!host_valid(hosts[i]))
            return err_set(e, ERR_INVALID, "expected a host name or an IP address, found '%s'",
                           err_quote(quoted, sizeof quoted, hosts[i], strlen(hosts[i])));
    /* The name that counts stands in the SAN; the subject is for people, and has at most 64 bytes. */
    snprintf(common, sizeof common, "%.64s", hosts[0]);
    return issue(ca, common, "larder://server", hosts, NID_server_auth, now_s - EARLIER_S,
                 now_s + (int64_t)days * DAY_S, out, e);
}

int pki_issue_user(const struct pki_pair *ca, const char *tenant, enum client_role role, int64_t now_s,
                   int days, struct pki_pair *out, struct err *e)
{
    char uri[128], common[65];
    *out = (struct pki_pair){0};
    if (days == 0 || days > DAYS_MAX || days < -DAYS_MAX)
        return err_set(e, ERR_INVALID, "a certificate lasts 1 to %u days, not %d", DAYS_MAX, days);
    int rc = tenant_name_check(tenant, e);
    if (rc < 0)
        return rc;
    if (role <= ROLE_NONE || role > ROLE_ADMIN)
        return err_set(e, ERR_INVALID, "expected the role reader, writer, operator or admin");
    snprintf(uri, sizeof uri, "larder://%s/%s", tenant, role_name(role));
    snprintf(common, sizeof common, "%.48s %s", tenant, role_name(role));
    int64_t end_s = now_s + (int64_t)days * DAY_S;
    int64_t begin_s = days > 0 ? now_s - EARLIER_S : end_s - DAY_S;
    return issue(ca, common, uri, NULL, NID_client_auth, begin_s, end_s, out, e);
}
