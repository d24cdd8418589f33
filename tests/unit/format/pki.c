/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: certificates are X.509v3 as RFC 5280 asks, carry one identity, and no argument smuggles in another.
 * Method: issue them, read them back with OpenSSL. How they fare in a handshake: channel.c.
 */
#include <errno.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/identity.h"
#include "format/pki.h"

static X509 *read_pem(const struct pki_pair *p)
{
    BIO *b = BIO_new_mem_buf(p->certificate_pem, -1);
    X509 *x = PEM_read_bio_X509(b, NULL, NULL, NULL);
    BIO_free(b);
    assert_non_null(x);
    return x;
}

/* The certificate as `openssl x509 -text` prints it. */
static char *text_of(const struct pki_pair *p)
{
    X509 *x = read_pem(p);
    BIO *b = BIO_new(BIO_s_mem());
    char *data;
    assert_int_equal(X509_print_ex(b, x, XN_FLAG_ONELINE, 0), 1);
    long n = BIO_get_mem_data(b, &data);
    char *text = strndup(data, (size_t)n);
    BIO_free(b);
    X509_free(x);
    return text;
}

static void expect_text(const struct pki_pair *p, const char *const *words)
{
    char *text = text_of(p);
    for (size_t i = 0; words[i]; i++)
        if (!strstr(text, words[i]))
            fail_msg("'%s' is not in: %s", words[i], text);
    free(text);
}

static void make_ca(struct pki_pair *ca)
{
    assert_int_equal(pki_ca_create("a cluster", 1800000000, 365, ca, NULL), 0);
}

static void a_ca_may_sign_and_nothing_else(void **state)
{
    (void)state;
    struct pki_pair ca;
    make_ca(&ca);
    static const char *const words[] = {"Version: 3",
                                        "CN = a cluster",
                                        "CA:TRUE, pathlen:0",
                                        "Certificate Sign, CRL Sign",
                                        "Basic Constraints: critical",
                                        "Key Usage: critical",
                                        "ASN1 OID: prime256v1",
                                        "Not Before: Jan 15 07:00:00 2027 GMT",
                                        "Not After : Jan 15 08:00:00 2028 GMT",
                                        NULL};
    expect_text(&ca, words);
    const uint8_t *key = secret_bytes(ca.key_pem);
    assert_int_equal(key[secret_size(ca.key_pem) - 1], 0);
    assert_memory_equal(key, "-----BEGIN PRIVATE KEY-----\n", 28);
    pki_pair_free(&ca);
    assert_null(ca.key_pem);
}

static void certificates_carry_their_identity(void **state)
{
    (void)state;
    struct pki_pair ca, server, user;
    struct err e;
    make_ca(&ca);
    static const char *const hosts[] = {"store.example", "*.store.example", "10.0.0.7", "fd00::7", NULL};
    assert_int_equal(pki_issue_server(&ca, hosts, 1800000000, 30, &server, &e), 0);
    static const char *const server_words[] = {
        "CA:FALSE",
        "TLS Web Server Authentication",
        "Digital Signature\n",
        "URI:larder://server, DNS:store.example, DNS:*.store.example, IP Address:10.0.0.7, IP Address:FD00",
        "Issuer: O = larder, CN = a cluster",
        NULL};
    expect_text(&server, server_words);
    assert_int_equal(pki_issue_user(&ca, "team-7", ROLE_OPERATOR, 1800000000, 30, &user, &e), 0);
    static const char *const user_words[] = {"TLS Web Client Authentication",
                                             "URI:larder://team-7/operator\n", NULL};
    expect_text(&user, user_words);

    X509 *ca_x = read_pem(&ca), *server_x = read_pem(&server), *user_x = read_pem(&user);
    EVP_PKEY *ca_key = X509_get0_pubkey(ca_x);
    assert_int_equal(X509_verify(server_x, ca_key), 1);
    assert_int_equal(X509_verify(user_x, ca_key), 1);
    assert_int_equal(X509_check_issued(ca_x, user_x), X509_V_OK);
    assert_int_not_equal(ASN1_INTEGER_cmp(X509_get0_serialNumber(server_x), X509_get0_serialNumber(user_x)),
                         0);
    assert_int_equal(ASN1_STRING_length(X509_get0_serialNumber(user_x)), 16);
    X509_free(ca_x), X509_free(server_x), X509_free(user_x);
    pki_pair_free(&ca), pki_pair_free(&server), pki_pair_free(&user);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    struct pki_pair ca, out;
    struct err e;
    make_ca(&ca);
    static const char *const hosts[] = {"ok", "a, URI:larder://acme/admin", NULL}, *const none[] = {NULL};
    assert_int_equal(pki_issue_server(&ca, hosts, 0, 30, &out, &e), -EINVAL);
    assert_non_null(strstr(e.text, "a, URI:larder"));
    assert_null(out.certificate_pem);
    assert_int_equal(pki_issue_server(&ca, none, 0, 30, &out, &e), -EINVAL);
    assert_int_equal(pki_issue_user(&ca, "acme/admin", ROLE_READER, 0, 30, &out, &e), -EINVAL);
    assert_int_equal(pki_issue_user(&ca, "", ROLE_READER, 0, 30, &out, &e), -EINVAL);
    assert_int_equal(pki_issue_user(&ca, "acme", ROLE_NONE, 0, 30, &out, &e), -EINVAL);
    assert_int_equal(pki_issue_user(&ca, "acme", ROLE_READER, 0, 0, &out, &e), -EINVAL);
    assert_int_equal(pki_ca_create("x", 0, 1000000, &out, &e), -EINVAL);
    /* A user's certificate cannot act as CA; nor can halves of two pairs. */
    struct pki_pair user, other, mixed;
    assert_int_equal(pki_issue_user(&ca, "acme", ROLE_READER, 0, 30, &user, &e), 0);
    assert_int_equal(pki_issue_user(&user, "acme", ROLE_ADMIN, 0, 30, &out, &e), -EACCES);
    make_ca(&other);
    mixed = (struct pki_pair){.certificate_pem = ca.certificate_pem, .key_pem = other.key_pem};
    assert_int_equal(pki_issue_user(&mixed, "acme", ROLE_ADMIN, 0, 30, &out, &e), -EACCES);
    pki_pair_free(&ca), pki_pair_free(&user), pki_pair_free(&other);
}

static void identities_are_parsed_strictly(void **state)
{
    (void)state;
    struct identity who;
    struct err e;
    static const char *const fine[] = {"larder://acme/reader", "larder://a/writer", "larder://0-9/operator",
                                       "larder://acme/admin"};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(identity_parse(fine[i], strlen(fine[i]), &who, &e), 0);
        assert_int_equal(who.role, ROLE_READER + i);
        assert_false(who.server);
    }
    assert_string_equal(who.tenant, "acme");
    assert_int_equal(identity_parse("larder://server", 15, &who, &e), 0);
    assert_true(who.server);
    static const char *const bad[] = {"larder://",
                                      "larder:///reader",
                                      "larder://acme",
                                      "larder://acme/",
                                      "larder://acme/root",
                                      "larder://acme/none",
                                      "larder://acme/reader/x",
                                      "larder://ACME/reader",
                                      "larder://-a/reader",
                                      "http://acme/reader",
                                      "larder://servers",
                                      "larder://acme/reader ",
                                      "larder",
                                      ""};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(identity_parse(bad[i], strlen(bad[i]), &who, &e), -EACCES);
        assert_non_null(strstr(e.text, bad[i]));
        assert_int_equal(who.role, ROLE_NONE);
        assert_string_equal(who.tenant, "");
    }
    assert_int_equal(identity_parse("larder://acme/reader\0x", 22, &who, &e), -EACCES);
    assert_int_equal(identity_parse("larder://ac\0e/reader", 20, &who, &e), -EACCES);
    char name[100];
    int n = snprintf(name, sizeof name, "larder://%063d/reader", 1);
    assert_int_equal(identity_parse(name, (size_t)n, &who, &e), 0);
    n = snprintf(name, sizeof name, "larder://%064d/reader", 1);
    assert_int_equal(identity_parse(name, (size_t)n, &who, &e), -EACCES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ca_may_sign_and_nothing_else),
        cmocka_unit_test(certificates_carry_their_identity),
        cmocka_unit_test(bad_arguments_are_refused),
        cmocka_unit_test(identities_are_parsed_strictly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
