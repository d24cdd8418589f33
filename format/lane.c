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
#define BLOCK       16u
#define CACHE_LINE  64u
#define PIECE_BYTES 2048u
#define AHEAD_BYTES 8192u

struct lane_mac {
    EVP_CIPHER_CTX *ctx;
    uint32_t direction;
    uint64_t count;
    uint8_t carry[BLOCK]; /* of a tag that is begun: bytes that do not fill a block yet */
    size_t carried;
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

/* Bytes that another core has just sealed come from its cache, and Poly1305 alone would wait for each line of
 * them: half its speed. So lines are asked for a little ahead, a few at a time: more at once than the core
 * can wait for would stop it. */
static void feed(struct lane_mac *m, const uint8_t *p, size_t n)
{
    while (n > 0) {
        size_t now = n < PIECE_BYTES ? n : PIECE_BYTES, ahead = n > AHEAD_BYTES ? n - AHEAD_BYTES : 0;
        int done;
        for (size_t at = 0; at < ahead && at < now; at += CACHE_LINE)
            __builtin_prefetch(p + AHEAD_BYTES + at);
        check(EVP_EncryptUpdate(m->ctx, NULL, &done, p, (int)now) == 1);
        p += now;
        n -= now;
    }
}

void lane_mac_begin(struct lane_mac *m)
{
    uint8_t nonce[NONCE_BYTES];
    le32_put(nonce, m->direction);
    le64_put(nonce + 4, m->count++);
    check(EVP_EncryptInit_ex(m->ctx, NULL, NULL, NULL, nonce) == 1);
    m->carried = 0;
}

/* Poly1305 goes at a third of its speed from the first incomplete block on: none is shown to it. */
void lane_mac_add(struct lane_mac *m, struct slice part)
{
    if (part.n == 0)
        return;
    if (m->carried > 0 || part.n < BLOCK) {
        size_t n = BLOCK - m->carried < part.n ? BLOCK - m->carried : part.n;
        if (n > 0)
            memcpy(m->carry + m->carried, part.p, n);
        m->carried += n;
        part = SLICE(part.p + n, part.n - n);
        if (m->carried < BLOCK)
            return;
        feed(m, m->carry, BLOCK);
        m->carried = 0;
    }
    size_t whole = part.n - part.n % BLOCK;
    feed(m, part.p, whole);
    m->carried = part.n - whole;
    if (m->carried > 0)
        memcpy(m->carry, part.p + whole, m->carried);
}

void lane_mac_end(struct lane_mac *m, uint8_t tag[LANE_TAG_BYTES])
{
    uint8_t none[1];
    int done;
    feed(m, m->carry, m->carried);
    check(EVP_EncryptFinal_ex(m->ctx, none, &done) == 1 && done == 0);
    check(EVP_CIPHER_CTX_ctrl(m->ctx, EVP_CTRL_AEAD_GET_TAG, LANE_TAG_BYTES, tag) == 1);
}

int lane_mac_end_check(struct lane_mac *m, const uint8_t tag[LANE_TAG_BYTES])
{
    uint8_t right[LANE_TAG_BYTES];
    lane_mac_end(m, right);
    return CRYPTO_memcmp(right, tag, sizeof right) == 0 ? 0 : -EBADMSG;
}

void lane_mac_tag(struct lane_mac *m, struct slice a, struct slice b, uint8_t tag[LANE_TAG_BYTES])
{
    lane_mac_begin(m);
    lane_mac_add(m, a);
    lane_mac_add(m, b);
    lane_mac_end(m, tag);
}

int lane_mac_check(struct lane_mac *m, struct slice a, const uint8_t tag[LANE_TAG_BYTES])
{
    lane_mac_begin(m);
    lane_mac_add(m, a);
    return lane_mac_end_check(m, tag);
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
