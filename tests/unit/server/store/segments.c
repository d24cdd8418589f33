/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what is sealed is what the client sealed, byte for byte; what is refused leaves nothing behind.
 * Method: parts written whole, in pieces, twice, wrongly, over quota and on a full disk, on memory and on a
 * real folder; what lies there afterwards is compared with what was sent.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "format/index.h"
#include "tests/support/store_rig.h"

static struct store_rig rig;
static struct id run, attempt;

static int begin(enum store_rig_kind kind)
{
    store_rig_open(&rig, kind, 3);
    if (!store_rig_start(&rig))
        return -1;
    attempt = store_rig_id(&rig);
    return rig_tenant_add(&rig, "acme", 0) || rig_run_open(&rig, RUN_CHECKPOINTS, "llm", true, &run) ||
           rig_attempt(&rig, &run, &attempt, 2, NULL);
}

static int on_memory(void **state)
{
    (void)state;
    return begin(STORE_ON_MEMORY);
}

static int on_folder(void **state)
{
    (void)state;
    return begin(STORE_ON_FOLDER);
}

static int on_sim(void **state)
{
    (void)state;
    return begin(STORE_ON_SIM);
}

static int teardown(void **state)
{
    (void)state;
    store_rig_close(&rig);
    return 0;
}

static struct rig_part part_of(uint32_t chunks)
{
    struct rig_part p = {.run = run,
                         .attempt = attempt,
                         .step = 7,
                         .rank = 1,
                         .world = 2,
                         .chunks = chunks,
                         .index_extra = 9000};
    rig_part_make(&rig, &p);
    return p;
}

static enum err_class once(struct ask *c)
{
    enum err_class class = ask_do(c);
    ask_free(c);
    return class;
}

static uint64_t reserved(void)
{
    struct store_stats stats;
    store_stats(rig.store, &stats);
    return stats.reserved_bytes;
}

static void what_is_stored_is_what_was_sent(void **state)
{
    (void)state;
    struct rig_part p = part_of(9);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE);
    size_t n;
    uint8_t *file = rig_object_read(&rig, rig_segment_name(&rig, &p), &n);
    assert_non_null(file);
    assert_int_equal(n, p.file_bytes);
    assert_memory_equal(file, p.header, BLOCK_BYTES);
    assert_memory_equal(file + n - BLOCK_BYTES, p.trailer, BLOCK_BYTES);
    struct segment_trailer t;
    assert_int_equal(segment_trailer_decode(file + n - BLOCK_BYTES, &t, NULL), 0);
    assert_memory_equal(file + t.index_offset, p.index.p, p.index.n);
    for (size_t i = t.index_offset + p.index.n; i < n - BLOCK_BYTES; i++)
        assert_int_equal(file[i], 0);
    for (uint32_t i = 0; i < p.chunks; i++) {
        struct chunk_entry e;
        assert_int_equal(chunk_entry_decode(p.chunk[i].entry, i, &e, NULL), 0);
        if (e.stored_bytes == 0)
            continue;
        assert_memory_equal(file + e.offset, p.chunk[i].bytes, p.chunk[i].n);
        for (size_t k = e.offset + e.stored_bytes; k % BLOCK_BYTES != 0; k++)
            assert_int_equal(file[k], 0);
    }
    assert_int_equal(reserved(), 0);
    free(file);
    rig_part_free(&p);
}

static void many_chunks_in_flight(void **state)
{
    (void)state;
    rig.options.buffers_bytes_max = 40000; /* most of them have to wait */
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    struct rig_part p = part_of(40);
    struct ask *c[80];
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    for (uint32_t i = 0; i < 80; i++) /* each of them twice */
        ask_begin(c[i] = rig_chunk(&rig, &p, (i * 7) % 40));
    for (uint32_t i = 0; i < 80; i++) {
        assert_int_equal(ask_end(c[i]), ERR_NONE);
        ask_free(c[i]);
    }
    assert_int_equal(once(rig_index(&rig, &p, 0, p.index.n)), ERR_NONE);
    struct ask *seals[2] = {rig_seal(&rig, &p), rig_seal(&rig, &p)};
    for (int i = 0; i < 2; i++)
        ask_begin(seals[i]);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(ask_end(seals[i]), ERR_NONE);
        ask_free(seals[i]);
    }
    rig_part_free(&p);
}

/* C13: after a lost connection the server's truth wins. */
static void a_writer_goes_on_where_it_was(void **state)
{
    (void)state;
    struct rig_part p = part_of(5), other;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    assert_int_equal(once(rig_chunk(&rig, &p, 1)), ERR_NONE);
    assert_int_equal(once(rig_chunk(&rig, &p, 3)), ERR_NONE);
    assert_int_equal(once(rig_index(&rig, &p, 0, BLOCK_BYTES)), ERR_NONE);
    struct ask *c = rig_create(&rig, &p);
    assert_int_equal(ask_do(c), ERR_NONE);
    struct msg_segment_create_reply reply = ANSWER(c, segment_create_reply);
    assert_int_equal(reply.sealed, 0);
    assert_int_equal(reply.chunks_received.n, 8);
    assert_int_equal(le32_get(reply.chunks_received.p), 1);
    assert_int_equal(le32_get(reply.chunks_received.p + 4), 3);
    ask_free(c);
    other = p;
    other.header[3000] = 0;
    other.chunks = 4; /* another shape of the same segment */
    assert_int_equal(once(rig_create(&rig, &other)), ERR_EXISTS);
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_INVALID); /* not yet */
    assert_non_null(strstr(rig.err.text, "2 of 5 chunks"));
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(once(rig_chunk(&rig, &p, i)), ERR_NONE);
    assert_int_equal(once(rig_index(&rig, &p, 2 * BLOCK_BYTES, 100)), ERR_INVALID); /* a gap */
    assert_int_equal(once(rig_index(&rig, &p, 0, p.index.n)), ERR_NONE); /* from the begin, which is known */
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_NONE);
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_NONE);
    c = rig_create(&rig, &p);
    assert_int_equal(ask_do(c), ERR_NONE);
    assert_int_equal(ANSWER(c, segment_create_reply).sealed, 1);
    ask_free(c);
    assert_int_equal(once(rig_chunk(&rig, &p, 0)), ERR_INVALID);
    rig_part_free(&p);
}

static void a_chunk_is_never_another(void **state)
{
    (void)state;
    struct rig_part p = part_of(3);
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    assert_int_equal(once(rig_chunk(&rig, &p, 0)), ERR_NONE);
    struct rig_part changed = p;
    struct rig_chunk chunks[3];
    memcpy(chunks, p.chunk, sizeof chunks);
    changed.chunk = chunks;
    chunks[0].entry[30] ^= 1; /* of its hash */
    assert_int_equal(once(rig_chunk(&rig, &changed, 0)), ERR_EXISTS);
    struct chunk_entry e;
    assert_int_equal(chunk_entry_decode(p.chunk[1].entry, 1, &e, NULL), 0);
    if (e.stored_bytes > 0) {
        e.offset = 0;
        chunk_entry_encode(&e, chunks[1].entry);
        assert_true(once(rig_chunk(&rig, &changed, 1)) != ERR_NONE);
        e.offset = p.reserve_bytes - BLOCK_BYTES;
        chunk_entry_encode(&e, chunks[1].entry);
        assert_int_equal(once(rig_chunk(&rig, &changed, 1)), ERR_LIMIT);
        e.offset = UINT64_MAX / BLOCK_BYTES * BLOCK_BYTES;
        chunk_entry_encode(&e, chunks[1].entry);
        assert_true(once(rig_chunk(&rig, &changed, 1)) != ERR_NONE);
    }
    struct ask *c = rig_chunk(&rig, &p, 1); /* a tail that is not as long as the entry says */
    c->op.payload_bytes--;
    assert_int_equal(once(c), p.chunk[1].n ? ERR_PROTOCOL : ERR_PROTOCOL);
    rig_part_free(&p);
}

static void pieces_of_an_index_lie_side_by_side(void **state)
{
    (void)state;
    struct rig_part p = part_of(2), other = p;
    size_t n = p.index.n, last = n / BLOCK_BYTES * BLOCK_BYTES;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    other.index_offset += BLOCK_BYTES;
    assert_int_equal(once(rig_index(&rig, &p, 0, BLOCK_BYTES)), ERR_NONE); /* before the chunks */
    assert_int_equal(once(rig_index(&rig, &other, BLOCK_BYTES, BLOCK_BYTES)), ERR_INVALID);
    assert_int_equal(once(rig_index(&rig, &p, 100, 200)), ERR_INVALID);
    assert_int_equal(once(rig_index(&rig, &p, 0, 2 * BLOCK_BYTES)), ERR_NONE); /* half of it is known */
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(once(rig_chunk(&rig, &p, i)), ERR_NONE);
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_INVALID); /* not yet */
    assert_int_equal(once(rig_index(&rig, &p, last, n - last)), ERR_NONE);
    assert_int_equal(once(rig_index(&rig, &p, last, n - last - 1)), ERR_NONE); /* known too */
    buf_zeros(&p.index, 2 * BLOCK_BYTES);
    assert_int_equal(once(rig_index(&rig, &p, 0, n + 1)), ERR_INVALID); /* behind the last */
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_NONE);
    size_t file_bytes;
    uint8_t *file = rig_object_read(&rig, rig_segment_name(&rig, &p), &file_bytes);
    assert_int_equal(file_bytes, p.file_bytes);
    assert_memory_equal(file + p.index_offset, p.index.p, n + block_align(n) - n);
    free(file);
    rig_part_free(&p);
}

static void an_index_has_its_place(void **state)
{
    (void)state;
    struct rig_part p = part_of(2), wrong = p;
    const uint64_t offsets[] = {0, p.index_offset + 1, p.reserve_bytes,
                                UINT64_MAX / BLOCK_BYTES * BLOCK_BYTES};
    const enum err_class classes[] = {ERR_INVALID, ERR_INVALID, ERR_LIMIT, ERR_LIMIT};
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(once(rig_chunk(&rig, &p, i)), ERR_NONE);
    for (int i = 0; i < 4; i++) {
        wrong.index_offset = offsets[i];
        assert_int_equal(once(rig_index(&rig, &wrong, 0, p.index.n)), classes[i]);
    }
    wrong.index_offset = p.index_offset + BLOCK_BYTES;
    assert_int_equal(once(rig_index(&rig, &wrong, 0, p.index.n)), ERR_NONE);
    assert_int_equal(once(rig_seal(&rig, &p)), ERR_INVALID); /* the trailer looks elsewhere */
    assert_int_equal(once(ASK(&rig, OP_SEGMENT_DISCARD, segment_discard, .segment = p.segment)), ERR_NONE);
    store_rig_sleep(&rig, 20);
    assert_int_equal(reserved(), 0);
    rig_part_free(&p);
}

/* C14: damage between client and server is found before the segment exists. */
static void a_seal_that_does_not_match_is_refused(void **state)
{
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        struct rig_part p = part_of(4);
        struct segment_trailer t;
        assert_int_equal(segment_trailer_decode(p.trailer, &t, NULL), 0);
        if (kind == 0)
            p.index.p[p.index.n - 1] ^= 1; /* the sealed part */
        if (kind == 1) {                   /* the table names another hash than the chunk had */
            struct chunk_entry *chunks;
            uint32_t count;
            struct buf table = {0};
            assert_int_equal(
                index_public_decode(p.index.p, t.index_public_bytes, t.index_offset, &chunks, &count, NULL),
                0);
            chunks[count - 1].plain_bytes++;
            assert_int_equal(index_public_encode(chunks, count, &table, NULL), 0);
            memcpy(p.index.p, table.p, table.n);
            sha256(p.index.p, p.index.n, t.index_digest);
            segment_trailer_encode(&t, p.trailer);
            buf_free(&table);
            free(chunks);
        }
        if (kind == 2)
            p.trailer[4000] ^= 1;
        if (kind == 3) {
            t.segment_id.bytes[0] ^= 1;
            segment_trailer_encode(&t, p.trailer);
        }
        enum err_class class = rig_part_write(&rig, &p);
        assert_true(class == (kind == 3 ? ERR_INVALID : ERR_CORRUPT));
        size_t n;
        assert_null(rig_object_read(&rig, rig_segment_name(&rig, &p), &n));
        assert_int_equal(once(ASK(&rig, OP_SEGMENT_DISCARD, segment_discard, .segment = p.segment)),
                         ERR_NONE);
        assert_int_equal(once(rig_seal(&rig, &p)) == ERR_NONE, false);
        rig_part_free(&p);
    }
    assert_int_equal(reserved(), 0);
}

static void headers_are_checked(void **state)
{
    (void)state;
    struct segment_header h;
    struct rig_part p = part_of(1);
    assert_int_equal(segment_header_decode(p.header, &h, NULL), 0);
    struct segment_header x = h;
    strcpy(x.tenant, "other");
    segment_header_encode(&x, p.header);
    assert_int_equal(once(rig_create(&rig, &p)), ERR_INVALID);
    x = h;
    x.attempt = store_rig_id(&rig);
    segment_header_encode(&x, p.header);
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NOT_FOUND);
    segment_header_encode(&h, p.header);
    p.header[100] ^= 1;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_CORRUPT);
    segment_header_encode(&h, p.header);
    p.chunks = SEGMENT_CHUNKS_MAX + 1;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_LIMIT);
    p.chunks = 1;
    p.reserve_bytes = SEGMENT_BYTES_MAX + 1;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_LIMIT);
    p.reserve_bytes = 0;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_LIMIT);
    rig_part_free(&p);
}

static void quota_is_reserved_before_the_first_byte(void **state)
{
    (void)state;
    rig.tenant = "small";
    assert_int_equal(rig_tenant_add(&rig, "small", 200000), ERR_NONE);
    assert_int_equal(rig_run_open(&rig, RUN_CHECKPOINTS, "llm", true, &run), ERR_NONE);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 2, NULL), ERR_NONE);
    struct rig_part a = part_of(2), b = part_of(2);
    a.reserve_bytes = 150000;
    b.reserve_bytes = 60000;
    assert_int_equal(once(rig_create(&rig, &a)), ERR_NONE);
    assert_int_equal(once(rig_create(&rig, &b)), ERR_QUOTA);
    assert_non_null(strstr(rig.err.text, "small"));
    assert_int_equal(once(ASK(&rig, OP_SEGMENT_DISCARD, segment_discard, .segment = a.segment)), ERR_NONE);
    store_rig_sleep(&rig, 20);
    assert_int_equal(reserved(), 0);
    assert_int_equal(once(rig_create(&rig, &b)), ERR_NONE);
    assert_int_equal(once(rig_chunk(&rig, &a, 0)), ERR_CANCELLED);
    rig_part_free(&a), rig_part_free(&b);
}

/* C7 */
static void a_full_disk_refuses_saves_and_nothing_else(void **state)
{
    (void)state;
    struct msg_commit_item items[4];
    struct rig_part p = part_of(2);
    assert_int_equal(rig_save(&rig, &run, &attempt, 1, 1, NULL, NULL), ERR_NONE);
    p.reserve_bytes = 1ull << 40;
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NO_SPACE);
    assert_non_null(strstr(rig.err.text, "prune"));
    rig.options.space_reserve_bytes = 1ull << 50; /* as good as full */
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    assert_int_equal(rig_save(&rig, &run, &attempt, 2, 2, NULL, NULL), ERR_NO_SPACE);
    assert_int_equal(rig_commits(&rig, RUN_CHECKPOINTS, "llm", true, items, 4), 1);
    assert_int_equal(once(ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str("llm"),
                              .sequence = 1, .action = MARK_ACTION_PIN)),
                     ERR_NONE);
    assert_int_equal(once(ASK(&rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = slice_str("llm"),
                              .keep_last = 1, .execute = 1)),
                     ERR_NONE);
    assert_int_equal(reserved(), 0);
    rig_part_free(&p);
}

static void what_nobody_writes_is_given_up(void **state)
{
    (void)state;
    rig.options.segment_idle_ms = 1000;
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    struct rig_part p = part_of(2);
    assert_int_equal(once(rig_create(&rig, &p)), ERR_NONE);
    assert_true(reserved() > 0);
    store_rig_sleep(&rig, 1100);
    assert_int_equal(once(rig_chunk(&rig, &p, 0)), ERR_TIMEOUT); /* told why, for a while */
    assert_int_equal(reserved(), 0);
    store_rig_sleep(&rig, 3000);
    assert_int_equal(once(rig_chunk(&rig, &p, 0)), ERR_NOT_FOUND);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE); /* and from the begin */
    rig_part_free(&p);
}

#define ON_MEMORY(f) cmocka_unit_test_setup_teardown(f, on_memory, teardown)
#define ON_SIM(f)    cmocka_unit_test_setup_teardown(f, on_sim, teardown)
#define ON_FOLDER(f)                                    \
    {                                                   \
#f " on a folder", f, on_folder, teardown, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_MEMORY(what_is_stored_is_what_was_sent),
        ON_FOLDER(what_is_stored_is_what_was_sent),
        ON_MEMORY(many_chunks_in_flight),
        ON_FOLDER(many_chunks_in_flight),
        ON_MEMORY(a_writer_goes_on_where_it_was),
        ON_MEMORY(a_chunk_is_never_another),
        ON_MEMORY(pieces_of_an_index_lie_side_by_side),
        ON_MEMORY(an_index_has_its_place),
        ON_MEMORY(a_seal_that_does_not_match_is_refused),
        ON_FOLDER(a_seal_that_does_not_match_is_refused),
        ON_MEMORY(headers_are_checked),
        ON_MEMORY(quota_is_reserved_before_the_first_byte),
        ON_MEMORY(a_full_disk_refuses_saves_and_nothing_else),
        ON_SIM(what_nobody_writes_is_given_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
