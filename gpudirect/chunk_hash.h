/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hash of 128 bits made to be computed by very many threads, on a GPU next to the data, and by one core of
 * the host at the speed of memory; both give the same bits. It says whether a chunk has changed since it was
 * last looked at. It finds accidents, not attacks: its keys are no secret, and it proves nothing about who
 * wrote the bytes. It is stored in scratch files only (format/FORMAT.md, section 14).
 *
 * Construction. The bytes, filled up with zeros to whole blocks of 32, are read as little-endian words of 64
 * bits; block i has words w0..w3. Every block is mixed on its own, under keys that depend on its place, and
 * the results are added up: a sum does not depend on who adds when, so any number of threads may take any
 * blocks.
 *
 *     P = (w0 ^ (K0 + i G)) * (w1 ^ K1)            products of all 128 bits; lo and hi are their halves
 *     Q = (w2 ^ (K2 + i G)) * (w3 ^ K3)
 *     x = (lo P ^ hi Q) + w0 + w3                  the words once more: a factor of 0 hides nothing
 *     y = (hi P ^ lo Q) + w1 + w2
 *     R = (x ^ K4) * (y ^ K5)
 *     lo += lo R, hi += hi R                       each modulo 2^64
 *
 * At the end the sums and the length n in bytes go through a permutation, so that all bits of the hash depend
 * on all of them, and equal sums of different lengths stay apart (zeros at the end of the data change nothing
 * but the length):
 *
 *     lo += mix(hi + n), hi += mix(lo + K6), lo += mix(hi + K7), hi += mix(lo)
 *
 * K0..K7 are the first outputs of splitmix64 from seed 0, mix is its finaliser, and G its increment, 2^64
 * divided by the golden ratio.
 */
#ifndef LARDER_GPUDIRECT_CHUNK_HASH_H
#define LARDER_GPUDIRECT_CHUNK_HASH_H

#include "gpudirect/portable.h"

#define CHUNK_HASH_BLOCK 32u

struct chunk_hash {
    uint64_t lo, hi;
};

/* Any length, any alignment. Any thread. */
struct chunk_hash chunk_hash(const void *p, size_t n);
/* For data that comes in pieces: adds the blocks of n bytes, the first of which is block `first` of the
 * chunk. All pieces but the last are whole blocks; then chunk_hash_end. */
void chunk_hash_sum(struct chunk_hash *sum, uint64_t first, const void *p, size_t n);

/* ---- what host and device share ---- */

#define CHUNK_HASH_K0 0xe220a8397b1dcdafull
#define CHUNK_HASH_K1 0x6e789e6aa1b965f4ull
#define CHUNK_HASH_K2 0x06c45d188009454full
#define CHUNK_HASH_K3 0xf88bb8a8724c81ecull
#define CHUNK_HASH_K4 0x1b39896a51a8749bull
#define CHUNK_HASH_K5 0x53cb9f0c747ea2eaull
#define CHUNK_HASH_K6 0x2c829abe1f4532e1ull
#define CHUNK_HASH_K7 0xc584133ac916ab3cull
#define CHUNK_HASH_G  0x9e3779b97f4a7c15ull

/* Adds a block to the sums; turn = i G. */
SHARED void chunk_hash_add(struct chunk_hash *sum, uint64_t turn, uint64_t w0, uint64_t w1, uint64_t w2,
                           uint64_t w3)
{
    struct product p = multiply(w0 ^ (CHUNK_HASH_K0 + turn), w1 ^ CHUNK_HASH_K1);
    struct product q = multiply(w2 ^ (CHUNK_HASH_K2 + turn), w3 ^ CHUNK_HASH_K3);
    uint64_t x = (p.lo ^ q.hi) + w0 + w3, y = (p.hi ^ q.lo) + w1 + w2;
    struct product r = multiply(x ^ CHUNK_HASH_K4, y ^ CHUNK_HASH_K5);
    sum->lo += r.lo;
    sum->hi += r.hi;
}

SHARED uint64_t chunk_hash_mix(uint64_t v)
{
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
    v = (v ^ v >> 27) * 0x94d049bb133111ebull;
    return v ^ v >> 31;
}

/* The hash of n bytes from the sums over their blocks. */
SHARED struct chunk_hash chunk_hash_end(struct chunk_hash sum, uint64_t n)
{
    sum.lo += chunk_hash_mix(sum.hi + n);
    sum.hi += chunk_hash_mix(sum.lo + CHUNK_HASH_K6);
    sum.lo += chunk_hash_mix(sum.hi + CHUNK_HASH_K7);
    sum.hi += chunk_hash_mix(sum.lo);
    return sum;
}

#endif
