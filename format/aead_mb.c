/* SPDX-License-Identifier: Apache-2.0 */
#include "format/aead_mb.h"

#if defined(__x86_64__) && __has_include(<intel-ipsec-mb.h>)

#include <dlfcn.h>
#include <intel-ipsec-mb.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <stdlib.h>

#include "format/base/secret.h"

#define LIBRARY      "libIPSec_MB.so.1"
#define OPENSSL_WIDE 0x30100000ul /* the first that is as fast */
#define FEATURES     (IMB_FEATURE_VAES | IMB_FEATURE_AVX512_SKX)

struct aead_mb {
    struct gcm_key_data key;
    struct gcm_context_data message;
    bool seals;
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const IMB_MGR *functions; /* NULL: not to be used */

static void load(void)
{
    if (OpenSSL_version_num() >= OPENSSL_WIDE)
        return;
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return;
    IMB_MGR *(*allocate)(uint64_t) = (IMB_MGR * (*)(uint64_t)) dlsym(library, "alloc_mb_mgr");
    void (*init)(IMB_MGR *, IMB_ARCH *) = (void (*)(IMB_MGR *, IMB_ARCH *))dlsym(library, "init_mb_mgr_auto");
    void (*release)(IMB_MGR *) = (void (*)(IMB_MGR *))dlsym(library, "free_mb_mgr");
    IMB_MGR *m = allocate && init && release ? allocate(0) : NULL;
    IMB_ARCH arch = IMB_ARCH_NONE;
    if (m)
        init(m, &arch); /* tests itself */
    if (m && arch == IMB_ARCH_AVX512 && (m->features & FEATURES) == FEATURES) {
        functions = m; /* read only from here on, and kept as long as the process */
        return;
    }
    if (m)
        release(m);
    dlclose(library);
}

struct aead_mb *aead_mb_create(bool seals)
{
    void *p;
    pthread_once(&once, load);
    if (!functions || posix_memalign(&p, 64, sizeof(struct aead_mb)) != 0)
        return NULL;
    struct aead_mb *m = p;
    m->seals = seals;
    return m;
}

void aead_mb_free(struct aead_mb *m)
{
    if (!m)
        return;
    secret_wipe(m, sizeof *m);
    free(m);
}

void aead_mb_key(struct aead_mb *m, const uint8_t key[32])
{
    IMB_AES256_GCM_PRE(functions, key, &m->key);
}

void aead_mb_begin(struct aead_mb *m, const uint8_t nonce[12], const void *ad, size_t ad_bytes)
{
    IMB_AES256_GCM_INIT(functions, &m->key, &m->message, nonce, ad, ad_bytes);
}

void aead_mb_add(struct aead_mb *m, const void *in, size_t n, uint8_t *out)
{
    if (m->seals)
        IMB_AES256_GCM_ENC_UPDATE(functions, &m->key, &m->message, out, in, n);
    else
        IMB_AES256_GCM_DEC_UPDATE(functions, &m->key, &m->message, out, in, n);
}

void aead_mb_end(struct aead_mb *m, uint8_t tag[16])
{
    if (m->seals)
        IMB_AES256_GCM_ENC_FINALIZE(functions, &m->key, &m->message, tag, 16);
    else
        IMB_AES256_GCM_DEC_FINALIZE(functions, &m->key, &m->message, tag, 16);
}

#else

struct aead_mb *aead_mb_create(bool seals)
{
    (void)seals;
    return NULL;
}

void aead_mb_free(struct aead_mb *m)
{
    (void)m;
}

void aead_mb_key(struct aead_mb *m, const uint8_t key[32])
{
    (void)m, (void)key;
}

void aead_mb_begin(struct aead_mb *m, const uint8_t nonce[12], const void *ad, size_t ad_bytes)
{
    (void)m, (void)nonce, (void)ad, (void)ad_bytes;
}

void aead_mb_add(struct aead_mb *m, const void *in, size_t n, uint8_t *out)
{
    (void)m, (void)in, (void)n, (void)out;
}

void aead_mb_end(struct aead_mb *m, uint8_t tag[16])
{
    (void)m, (void)tag;
}

#endif
