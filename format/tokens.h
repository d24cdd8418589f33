/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Token files as Megatron-LM writes them: NAME.bin is the tokens of all sequences one behind the other,
 * NAME.idx (MMIDIDX, version 1) says how long each is and which of them make up a document. This reads the
 * .idx, pushed in any split:
 *
 *   9 bytes "MMIDIDX\0\0"   u64 version, 1   u8 dtype   u64 sequences S   u64 borders D (documents + 1)
 *   S x i32 tokens of a sequence   S x i64 where it begins in the .bin   D x i64 first sequence of a document
 *   nothing, or S x i8 (modes of sequences, which are passed over)
 *
 * All of it is checked against itself and against the length of the .bin: sequences fill the .bin without gap
 * and without rest, and documents take every sequence once, in order.
 */
#ifndef LARDER_TOKENS_H
#define LARDER_TOKENS_H

#include "format/base/cursor.h"

#define TOKENS_SEQUENCES_MAX (1u << 27) /* in one file */
#define TOKENS_CODES         8u         /* dtype codes are 1 .. 8 */

/* How tokens become samples. Sample i of a window is the tokens [i * tokens, i * tokens + tokens + extra) of
 * the file, whatever documents they belong to; there are as many samples as fit whole, and tokens behind the
 * last one are in no sample. */
struct token_window {
    uint64_t tokens; /* 0: each document is one sample */
    uint64_t extra;  /* <= tokens; 1: the token to be predicted last comes along */
};

#define TOKEN_WINDOW_MAX (1ull << 32)

/* "2048" or "2048+1". false: it is neither, or larger than TOKEN_WINDOW_MAX. */
must_check bool token_window_parse(const char *text, struct token_window *out);
bool token_window_valid(const struct token_window *w);
/* Samples in a file of so many tokens. */
uint64_t token_window_count(const struct token_window *w, uint64_t tokens);

unsigned tokens_width(unsigned code);   /* bytes of a token; 0: no such code */
const char *tokens_type(unsigned code); /* "uint16"; NULL: no such code */

struct tokens_reader;
/* idx_bytes: how many will be pushed. bin_bytes: length of the .bin. */
must_check int tokens_reader_create(uint64_t idx_bytes, uint64_t bin_bytes, struct tokens_reader **out,
                                    struct err *e);
must_check int tokens_reader_push(struct tokens_reader *r, const void *p, size_t n, struct err *e);
void tokens_reader_free(struct tokens_reader *r); /* NULL allowed */

/* Once all was pushed. */
struct tokens_found {
    unsigned code;
    uint64_t tokens, documents;
    const uint32_t *lengths; /* tokens of each document; the reader's */
};
must_check int tokens_reader_finish(struct tokens_reader *r, struct tokens_found *out, struct err *e);

#endif
