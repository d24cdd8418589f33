/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/tls_pair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A helper that cannot do its part ends the test program, with the reason. */
static void need(int rc, const struct err *e, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, e->text);
    exit(1);
}

void tls_material_make(struct tls_material *m)
{
    static const char *const hosts[] = {"localhost", "127.0.0.1", "::1", NULL};
    struct err e;
    int64_t now_s = time(NULL);
    need(pki_ca_create("test CA", now_s, 30, &m->ca, &e), &e, "CA");
    need(pki_issue_server(&m->ca, hosts, now_s, 30, &m->server, &e), &e, "server certificate");
    need(pki_issue_user(&m->ca, "acme", ROLE_WRITER, now_s, 30, &m->user, &e), &e, "user certificate");
}

void tls_material_free(struct tls_material *m)
{
    pki_pair_free(&m->ca);
    pki_pair_free(&m->server);
    pki_pair_free(&m->user);
}

struct channel_config *tls_config(bool server, const struct pki_pair *ca, const struct pki_pair *own)
{
    struct channel_config *c = NULL;
    struct err e;
    need(channel_config_create(server, ca->certificate_pem, own->certificate_pem, own->key_pem, &c, &e), &e,
         "TLS configuration");
    return c;
}

void tls_pair_open(struct tls_pair *p, struct channel_config *server, struct channel_config *client,
                   const char *expected_host)
{
    struct err e;
    *p = (struct tls_pair){0};
    need(channel_create(server, NULL, &p->server, &e), &e, "server's end");
    need(channel_create(client, expected_host, &p->client, &e), &e, "client's end");
    need(channel_input(p->client, NULL, 0, &e), &e, "start of the handshake");
}

void tls_pair_close(struct tls_pair *p)
{
    channel_free(p->server);
    channel_free(p->client);
    *p = (struct tls_pair){0};
}

static bool move(struct channel *from, struct channel *to, size_t step, struct err *e)
{
    struct slice s = channel_output(from);
    if (s.n == 0)
        return false;
    size_t n = step > 0 && step < s.n ? step : s.n;
    struct err now = {0};
    if (channel_input(to, s.p, n, &now) < 0 && e->class == ERR_NONE)
        *e = now;
    channel_output_done(from, n);
    return true;
}

void tls_pair_move(struct tls_pair *p)
{
    bool moved = true;
    while (moved) {
        moved = move(p->client, p->server, p->step, &p->server_err);
        moved |= move(p->server, p->client, p->step, &p->client_err);
    }
}
