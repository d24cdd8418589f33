/* SPDX-License-Identifier: Apache-2.0 */
#include "format/tokens.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC_BYTES 9u
#define HEAD_BYTES  34u
#define VERSION     1u
#define UNSIGNED(x) ((unsigned long long)(x))

static const char magic[MAGIC_BYTES] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};

/* ---- words ---- */

static const struct {
    const char *name;
    unsigned width;
} types[TOKENS_CODES + 1] = {{NULL, 0},    {"uint8", 1},   {"int8", 1},    {"int16", 2}, {"int32", 4},
                             {"int64", 8}, {"float64", 8}, {"float32", 4}, {"uint16", 2}};

unsigned tokens_width(unsigned code)
{
    return code <= TOKENS_CODES ? types[code].width : 0;
}

const char *tokens_type(unsigned code)
{
    return code <= TOKENS_CODES ? types[code].name : NULL;
}

static const char *number_parse(const char *text, uint64_t *out)
{
    uint64_t n = 0;
    const char *p = text;
    for (; *p >= '0' && *p <= '9' && n <= TOKEN_WINDOW_MAX; p++)
        n = n * 10 + (uint64_t)(*p - '0');
    *out = n;
    return p == text ? NULL : p;
}

bool token_window_parse(const char *text, struct token_window *out)
{
    *out = (struct token_window){0};
    const char *p = number_parse(text, &out->tokens);
    if (p && *p == '+')
        p = number_parse(p + 1, &out->extra);
    return p && *p == '\0' && out->tokens > 0 && token_window_valid(out);
}

bool token_window_valid(const struct token_window *w)
{
    return w->tokens <= TOKEN_WINDOW_MAX && w->extra <= w->tokens;
}

uint64_t token_window_count(const struct token_window *w, uint64_t tokens)
{
    return tokens < w->tokens + w->extra ? 0 : (tokens - w->extra) / w->tokens;
}

/* ---- the .idx ---- */

enum part { HEAD, LENGTHS, STARTS, BORDERS, MODES, DONE };

struct tokens_reader {
    uint64_t idx_bytes, bin_bytes;
    enum part part;
    uint64_t index;            /* of the next element of the part */
    uint8_t piece[HEAD_BYTES]; /* an element, or the head, gathered */
    size_t piece_n;
    unsigned code;
    uint64_t sequences, borders, modes;
    uint32_t *lengths, *documents; /* tokens of each sequence, and of each document */
    uint64_t start;                /* where the next sequence must begin, in tokens */
    uint64_t taken;                /* sequences that documents have */
};

int tokens_reader_create(uint64_t idx_bytes, uint64_t bin_bytes, struct tokens_reader **out, struct err *e)
{
    struct tokens_reader *r = calloc(1, sizeof *r);
    if (!r)
        return err_set(e, ERR_NO_MEMORY, "no memory for reading a token index");
    r->idx_bytes = idx_bytes;
    r->bin_bytes = bin_bytes;
    *out = r;
    return 0;
}

void tokens_reader_free(struct tokens_reader *r)
{
    if (!r)
        return;
    free(r->lengths);
    free(r->documents);
    free(r);
}

/* The counts are believed only where the file has room for them. */
static int counts_check(struct tokens_reader *r, struct err *e)
{
    uint64_t least = HEAD_BYTES, rest = r->idx_bytes < HEAD_BYTES ? 0 : r->idx_bytes - HEAD_BYTES;
    if (r->sequences > rest / 12 || r->borders > rest / 8)
        least = UINT64_MAX;
    else
        least += r->sequences * 12 + r->borders * 8;
    if (r->idx_bytes != least && r->idx_bytes != least + r->sequences)
        return err_set(e, ERR_CORRUPT,
                       "token index: %llu sequences and %llu document borders do not make a file of %llu "
                       "bytes; it is cut or damaged",
                       UNSIGNED(r->sequences), UNSIGNED(r->borders), UNSIGNED(r->idx_bytes));
    r->modes = r->idx_bytes - least;
    if (r->sequences > TOKENS_SEQUENCES_MAX)
        return err_set(e, ERR_LIMIT, "token index: %llu sequences, at most %u are allowed; split the file",
                       UNSIGNED(r->sequences), TOKENS_SEQUENCES_MAX);
    if (r->borders == 0 || r->borders > (uint64_t)TOKENS_SEQUENCES_MAX + 1)
        return err_set(e, ERR_CORRUPT, "token index: %llu document borders; 1 to %u are expected",
                       UNSIGNED(r->borders), TOKENS_SEQUENCES_MAX + 1);
    return 0;
}

static int head_take(struct tokens_reader *r, struct err *e)
{
    struct rcur c = rcur_of(r->piece, HEAD_BYTES);
    struct slice found = rcur_take(&c, MAGIC_BYTES);
    uint64_t version = rcur_u64(&c);
    char q[64];
    if (memcmp(found.p, magic, MAGIC_BYTES) != 0)
        return err_set(e, ERR_CORRUPT,
                       "token index: expected \"MMIDIDX\" at its beginning, found \"%s\"; it is no .idx file",
                       err_quote(q, sizeof q, found.p, found.n));
    if (version != VERSION)
        return err_set(e, ERR_VERSION, "token index: version %llu, this larder knows version %u",
                       UNSIGNED(version), VERSION);
    r->code = rcur_u8(&c);
    r->sequences = rcur_u64(&c);
    r->borders = rcur_u64(&c);
    if (!tokens_width(r->code))
        return err_set(e, ERR_CORRUPT,
                       "token index: dtype code %u; codes from 1 (uint8) to %u (uint16) exist", r->code,
                       TOKENS_CODES);
    int rc = counts_check(r, e);
    if (rc < 0)
        return rc;
    r->lengths = calloc(r->sequences + 1, sizeof *r->lengths);
    r->documents = calloc(r->borders, sizeof *r->documents);
    if (r->lengths && r->documents)
        return 0;
    return err_set(e, ERR_NO_MEMORY, "no memory for an index of %llu sequences", UNSIGNED(r->sequences));
}

static int length_take(struct tokens_reader *r, struct err *e)
{
    uint32_t n = le32_get(r->piece);
    if (n > INT32_MAX)
        return err_set(e, ERR_CORRUPT, "token index: sequence %llu has %lld tokens", UNSIGNED(r->index),
                       (long long)(int32_t)n);
    r->lengths[r->index] = n;
    return 0;
}

static int start_take(struct tokens_reader *r, struct err *e)
{
    uint64_t start = le64_get(r->piece), width = tokens_width(r->code), end = r->start + r->lengths[r->index];
    if (start != r->start * width)
        return err_set(e, ERR_CORRUPT,
                       "token index: sequence %llu begins at byte %lld, the one before it ends at %llu; "
                       "sequences stand one behind the other",
                       UNSIGNED(r->index), (long long)start, UNSIGNED(r->start * width));
    if (end > r->bin_bytes / width)
        return err_set(e, ERR_CORRUPT,
                       "token index: sequence %llu ends at byte %llu, the .bin has %llu; it is cut, or they "
                       "are not a pair",
                       UNSIGNED(r->index), UNSIGNED(end * width), UNSIGNED(r->bin_bytes));
    r->start = end;
    return 0;
}

/* Sequences taken .. border make the document before this border. */
static int border_take(struct tokens_reader *r, struct err *e)
{
    uint64_t border = le64_get(r->piece), tokens = 0;
    if (border > r->sequences || border < r->taken || (r->index == 0 && border != 0))
        return err_set(e, ERR_CORRUPT,
                       "token index: document border %llu is sequence %lld; from %llu to %llu was expected",
                       UNSIGNED(r->index), (long long)border, UNSIGNED(r->taken),
                       UNSIGNED(r->index ? r->sequences : 0));
    if (r->index == 0)
        return 0;
    for (; r->taken < border; r->taken++)
        tokens += r->lengths[r->taken];
    if (tokens > UINT32_MAX)
        return err_set(e, ERR_LIMIT, "token index: document %llu has %llu tokens, at most %u are allowed",
                       UNSIGNED(r->index - 1), UNSIGNED(tokens), UINT32_MAX);
    r->documents[r->index - 1] = (uint32_t)tokens;
    return 0;
}

static uint64_t elements(const struct tokens_reader *r)
{
    switch (r->part) {
    case HEAD: return 1;
    case LENGTHS:
    case STARTS: return r->sequences;
    case BORDERS: return r->borders;
    case MODES: return r->modes;
    default: return UINT64_MAX;
    }
}

static size_t element_bytes(enum part part)
{
    switch (part) {
    case HEAD: return HEAD_BYTES;
    case LENGTHS: return 4;
    case MODES: return 1;
    default: return 8;
    }
}

static int element_take(struct tokens_reader *r, struct err *e)
{
    switch (r->part) {
    case HEAD: return head_take(r, e);
    case LENGTHS: return length_take(r, e);
    case STARTS: return start_take(r, e);
    case BORDERS: return border_take(r, e);
    default: return 0;
    }
}

/* Ends a part, and those after it that have no elements. */
static int parts_end(struct tokens_reader *r, struct err *e)
{
    while (r->part != DONE && r->index == elements(r)) {
        if (r->part == STARTS && r->start * tokens_width(r->code) != r->bin_bytes)
            return err_set(
                e, ERR_CORRUPT,
                "token index: its sequences have %llu bytes, the .bin has %llu; they are not a pair",
                UNSIGNED(r->start * tokens_width(r->code)), UNSIGNED(r->bin_bytes));
        if (r->part == BORDERS && r->taken != r->sequences)
            return err_set(e, ERR_CORRUPT,
                           "token index: the documents end with sequence %llu, there are %llu",
                           UNSIGNED(r->taken), UNSIGNED(r->sequences));
        r->part++;
        r->index = 0;
    }
    return 0;
}

/* Modes say nothing that is needed here. */
static size_t modes_pass(struct tokens_reader *r, size_t n)
{
    uint64_t left = elements(r) - r->index;
    size_t take = n < left ? n : (size_t)left;
    r->index += take;
    return take;
}

int tokens_reader_push(struct tokens_reader *r, const void *bytes, size_t n, struct err *e)
{
    const uint8_t *p = bytes;
    int rc = 0;
    while (rc == 0 && n > 0) {
        size_t take = n;
        if (r->part == DONE)
            return err_set(e, ERR_CORRUPT, "token index: %zu bytes more than it says itself", n);
        if (r->part == MODES) {
            take = modes_pass(r, n);
        } else {
            size_t need = element_bytes(r->part) - r->piece_n;
            take = n < need ? n : need;
            memcpy(r->piece + r->piece_n, p, take);
            r->piece_n += take;
            if (take == need) {
                r->piece_n = 0;
                rc = element_take(r, e);
                r->index++;
            }
        }
        p += take;
        n -= take;
        if (rc == 0 && r->piece_n == 0)
            rc = parts_end(r, e);
    }
    return rc;
}

int tokens_reader_finish(struct tokens_reader *r, struct tokens_found *out, struct err *e)
{
    if (r->part != DONE)
        return err_set(e, ERR_CORRUPT, "token index: it ends inside its %s; it is cut",
                       r->part == HEAD      ? "header"
                       : r->part == LENGTHS ? "lengths of sequences"
                       : r->part == STARTS  ? "places of sequences"
                       : r->part == BORDERS ? "document borders"
                                            : "modes");
    *out = (struct tokens_found){
        .code = r->code, .tokens = r->start, .documents = r->borders - 1, .lengths = r->documents};
    return 0;
}
