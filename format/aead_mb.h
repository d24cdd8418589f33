/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AES-256-GCM of Intel's multi-buffer library (libipsec-mb, BSD), which is loaded by dlopen where it is
 * installed. OpenSSL uses the wide AES and carry-less multiplication of processors since Ice Lake and Zen 4
 * only from version 3.1 on; where an older one meets such a processor this takes a third of its time. It is
 * one pass in constant time, as OpenSSL's is. Used by aead.c alone, with the same rules.
 */
#ifndef LARDER_AEAD_MB_H
#define LARDER_AEAD_MB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

/* NULL: it is not installed, was not there when this was built, would be no faster, or there is no memory. */
struct aead_mb;
must_check struct aead_mb *aead_mb_create(bool seals);
void aead_mb_free(struct aead_mb *m); /* wipes; NULL allowed */
void aead_mb_key(struct aead_mb *m, const uint8_t key[32]);
void aead_mb_begin(struct aead_mb *m, const uint8_t nonce[12], const void *ad, size_t ad_bytes);
void aead_mb_add(struct aead_mb *m, const void *in, size_t n, uint8_t *out);
void aead_mb_end(struct aead_mb *m, uint8_t tag[16]); /* what the tag is, or has to be */

#endif
