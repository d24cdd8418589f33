/* SPDX-License-Identifier: Apache-2.0 */
/* As in aead.c: OpenSSL's calls fail only where we pass it nonsense, and that stops the process. */
#include "format/lane.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#define NONCE_BYTES 12

struct lane_mac {
    EVP_CIPHER_CTX *ctx;
    uint32_t direction;
    uint64_t count;
};

struct lane_mac *lane_mac_create(bool to_client, const uint8_t key[LANE_KEY_BYTES])
{
    struct lane_mac *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->direction = to_client;
    m->ctx = EVP_CIPHER_CTX_new();
    if (m->ctx && EVP_EncryptInit_ex(m->ctx, EVP_chacha20_poly1305(), NULL, key, NULL) == 1)
        return m;
    ERR_clear_error();
    lane_mac_free(m);
    return NULL;
}

void lane_mac_free(struct lane_mac *m)
{
    if (!m)
        return;
    EVP_CIPHER_CTX_free(m->ctx);
    free(m);
}

static void add(struct lane_mac *m, struct slice part)
{
    int done;
    check(part.n <= INT32_MAX);
    if (part.n > 0)
        check(EVP_EncryptUpdate(m->ctx, NULL, &done, part.p, (int)part.n) == 1);
}

void lane_mac_tag(struct lane_mac *m, struct slice a, struct slice b, uint8_t tag[LANE_TAG_BYTES])
{
    uint8_t nonce[NONCE_BYTES], none[1];
    int done;
    le32_put(nonce, m->direction);
    le64_put(nonce + 4, m->count++);
    check(EVP_EncryptInit_ex(m->ctx, NULL, NULL, NULL, nonce) == 1);
    add(m, a);
    add(m, b);
    check(EVP_EncryptFinal_ex(m->ctx, none, &done) == 1 && done == 0);
    check(EVP_CIPHER_CTX_ctrl(m->ctx, EVP_CTRL_AEAD_GET_TAG, LANE_TAG_BYTES, tag) == 1);
}

int lane_mac_check(struct lane_mac *m, struct slice a, const uint8_t tag[LANE_TAG_BYTES])
{
    uint8_t right[LANE_TAG_BYTES];
    lane_mac_tag(m, a, SLICE(NULL, 0), right);
    return CRYPTO_memcmp(right, tag, sizeof right) == 0 ? 0 : -EBADMSG;
}

uint64_t lane_mac_count(const struct lane_mac *m)
{
    return m->count;
}

void lane_plain_encode(const struct id *ticket, uint8_t out[LANE_PLAIN_BYTES])
{
    le32_put(out, LANE_MAGIC);
    le16_put(out + 4, LANE_VERSION);
    le16_put(out + 6, 0);
    memcpy(out + 8, ticket->bytes, ID_BYTES);
}

int lane_plain_decode(const uint8_t in[LANE_PLAIN_BYTES], struct id *ticket, struct err *e)
{
    if (le32_get(in) != LANE_MAGIC)
        return err_set(e, ERR_PROTOCOL,
                       "expected the opening of a bulk lane, found magic 0x%08x; is the peer a larder?",
                       le32_get(in));
    if (le16_get(in + 4) != LANE_VERSION)
        return err_set(e, ERR_VERSION,
                       "the peer opens a bulk lane of version %u, this side knows version %u; upgrade the "
                       "older one",
                       le16_get(in + 4), LANE_VERSION);
    if (le16_get(in + 6) != 0)
        return err_set(e, ERR_PROTOCOL, "the opening of a bulk lane has reserved bits set");
    memcpy(ticket->bytes, in + 8, ID_BYTES);
    return 0;
}
