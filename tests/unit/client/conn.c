/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a connection keeps its promises to calls: answers in any order, streams with credit, deadlines, loss
 * and return of the server, and an end for every call. Method: a scripted server in this process.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/clock.h"
#include "client/conn.h"
#include "tests/support/scripted.h"

struct script {
    atomic_uint hang_ups; /* the next so many marks end the connection */
    struct frame_header held;
    bool holding;
    atomic_ullong credit; /* granted by OP_CREDIT */
    atomic_uint cancels;
};

static struct conn *open_to(const char *port, unsigned request_ms, unsigned reconnect_ms, struct err *e)
{
    struct conn_options o = {.host = "127.0.0.1",
                             .port = port,
                             .connect_timeout_ms = 2000,
                             .request_timeout_ms = request_ms,
                             .reconnect_ms = reconnect_ms};
    struct conn *c = NULL;
    int rc = conn_open(&o, &c, e);
    assert_int_equal(rc == 0, c != NULL);
    return c;
}

static void credited(struct script *t, struct scripted *s, const uint8_t *payload, size_t n)
{
    struct rcur in = rcur_of(payload, n);
    struct msg_credit m;
    int rc = msg_credit_decode(&in, &m, NULL);
    check(rc == 0 && m.request_id == t->held.request_id);
    uint64_t credit = atomic_fetch_add(&t->credit, m.bytes) + m.bytes;
    scripted_answer(s, &t->held, credit < 8 ? FRAME_MORE : 0, "efgh", 4);
}

/* ping: echoed. run_list: held until the next ping has been answered. status: refused. cancel: counted. read:
 * a stream of three frames, one per credit message after the first. mark: hangs up while hang_ups lasts. */
static enum scripted_next answer(void *arg, struct scripted *s, const struct frame_header *h,
                                 const uint8_t *payload)
{
    struct script *t = arg;
    switch (h->opcode) {
    case OP_PING:
        scripted_answer(s, h, 0, payload, h->payload_bytes);
        if (t->holding)
            scripted_answer(s, &t->held, 0, "late", 4);
        t->holding = false;
        break;
    case OP_RUN_LIST:
        t->held = *h;
        t->holding = true;
        break;
    case OP_STATUS: scripted_refuse(s, h, ERR_QUOTA, "the quota is used up"); break;
    case OP_CANCEL: atomic_fetch_add(&t->cancels, 1); break;
    case OP_READ:
        t->held = *h;
        scripted_answer(s, h, FRAME_MORE, "abcd", 4);
        break;
    case OP_CREDIT: credited(t, s, payload, h->payload_bytes); break;
    case OP_MARK:
        if (atomic_load(&t->hang_ups) > 0) {
            atomic_fetch_sub(&t->hang_ups, 1);
            return SCRIPT_HANG_UP;
        }
        scripted_answer(s, h, 0, NULL, 0);
        break;
    default: break; /* never answered */
    }
    return SCRIPT_GO_ON;
}

static int ask(struct conn *c, uint16_t opcode, const char *text, uint32_t timeout_ms, struct call *call,
               struct err *e)
{
    return conn_call(c, opcode, slice_str(text), SLICE(NULL, 0), timeout_ms, call, NULL, e);
}

struct async {
    struct call call;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
    char got[64];
    size_t n;
    struct conn *conn;
    atomic_bool paused;
};

static void async_done(struct call *call)
{
    struct async *a = container_of(call, struct async, call);
    pthread_mutex_lock(&a->lock);
    a->done = true;
    pthread_cond_signal(&a->cond);
    pthread_mutex_unlock(&a->lock);
}

static void async_start(struct async *a, struct conn *c, uint16_t opcode, struct slice message,
                        uint32_t timeout_ms)
{
    pthread_mutex_init(&a->lock, NULL);
    clock_cond_init(&a->cond);
    a->conn = c;
    a->call.opcode = opcode;
    a->call.timeout_ms = timeout_ms;
    a->call.done = async_done;
    conn_submit(c, &a->call, message, SLICE(NULL, 0));
}

static bool async_wait(struct async *a, unsigned ms)
{
    uint64_t until = clock_ms() + ms;
    pthread_mutex_lock(&a->lock);
    while (!a->done && clock_wait(&a->cond, &a->lock, until))
        ;
    bool done = a->done;
    pthread_mutex_unlock(&a->lock);
    return done;
}

static void answers_come_in_any_order(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 1000, &e);
    struct conn_hello h;
    conn_hello(c, &h);
    assert_string_equal(h.tenant, "acme");
    assert_int_equal(h.role, ROLE_WRITER);
    assert_string_equal(h.software, "scripted 1");

    struct async first = {0};
    async_start(&first, c, OP_RUN_LIST, slice_str("x"), 0);
    struct call call;
    struct rcur in;
    assert_int_equal(conn_call(c, OP_PING, slice_str("mess"), slice_str("age"), 0, &call, &in, &e), 0);
    assert_true(slice_eq(rcur_take(&in, in.left), slice_str("message")));
    call_free(&call);
    assert_true(async_wait(&first, 5000));
    assert_int_equal(first.call.err.class, ERR_NONE);
    assert_true(slice_eq(SLICE(first.call.payload, first.call.payload_bytes), slice_str("late")));
    call_free(&first.call);

    assert_int_equal(ask(c, OP_STATUS, "", 0, &call, &e), -EDQUOT);
    assert_int_equal(e.class, ERR_QUOTA);
    assert_string_equal(e.text, "the quota is used up");
    conn_close(c);
    scripted_stop(s);
}

static int keep(struct call *call, const uint8_t *payload, size_t n, struct err *e)
{
    (void)e;
    struct async *a = container_of(call, struct async, call);
    memcpy(a->got + a->n, payload, n);
    a->n += n;
    if (!a->paused)
        conn_credit(a->conn, call, n);
    return 0;
}

static void start_stream(struct async *a, struct conn *c, uint32_t timeout_ms)
{
    struct buf b = {0};
    msg_read_encode(&(struct msg_read){.source = READ_SEGMENT, .class = 1, .credit = 4}, &b);
    a->call.more = keep;
    async_start(a, c, OP_READ, SLICE(b.p, b.n), timeout_ms);
    buf_free(&b);
}

static void streams_flow_by_credit(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 1000, &e);
    struct async a = {0};
    start_stream(&a, c, 0);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_NONE);
    assert_int_equal(a.n, 8); /* the third frame is the last: in payload */
    assert_true(slice_eq(SLICE(a.call.payload, a.call.payload_bytes), slice_str("efgh")));
    call_free(&a.call);

    /* A reader that gives no credit is not cut off, however short its deadline; with credit it goes on. */
    struct async paused = {.paused = true};
    atomic_store(&t.credit, 0);
    start_stream(&paused, c, 50);
    assert_false(async_wait(&paused, 1000));
    paused.paused = false;
    conn_credit(c, &paused.call, 4);
    assert_true(async_wait(&paused, 5000));
    assert_int_equal(paused.call.err.class, ERR_NONE);
    assert_int_equal(paused.n, 8);
    call_free(&paused.call);
    conn_close(c);
    scripted_stop(s);
}

static uint8_t *place_in(struct call *call, size_t skip, size_t *n)
{
    struct async *a = container_of(call, struct async, call);
    size_t at = a->n + skip;
    *n = at < 6 ? 6 - at : sizeof a->got - at; /* in two places, the second of a frame's middle */
    return (uint8_t *)a->got + at;
}

static int came_in(struct call *call, size_t n, struct err *e)
{
    struct async *a = container_of(call, struct async, call);
    a->n += n;
    if (a->paused)
        return err_set(e, ERR_CORRUPT, "the reader does not like it");
    if (a->n % 4 == 0)
        conn_credit(a->conn, call, 4);
    return 0;
}

/* Bytes go where the stream wants them, those of the last frame too; what comes for a call that has ended is
 * passed over, and the connection goes on. */
static void streams_are_received_in_place(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 1000, &e);
    struct buf b = {0};
    msg_read_encode(&(struct msg_read){.source = READ_SEGMENT, .class = 1, .credit = 4}, &b);
    struct async a = {.call = {.place = place_in, .came = came_in}};
    async_start(&a, c, OP_READ, SLICE(b.p, b.n), 0);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_NONE);
    assert_int_equal(a.n, 12);
    assert_memory_equal(a.got, "abcdefghefgh", 12);
    assert_int_equal(a.call.payload_bytes, 0);

    struct async bad = {.call = {.place = place_in, .came = came_in}, .paused = true};
    struct call call;
    async_start(&bad, c, OP_READ, SLICE(b.p, b.n), 0);
    assert_true(async_wait(&bad, 5000));
    assert_int_equal(bad.call.err.class, ERR_CORRUPT);
    assert_int_equal(ask(c, OP_PING, "", 0, &call, &e), 0);
    call_free(&call);
    buf_free(&b);
    conn_close(c);
    scripted_stop(s);
}

static int give_up(struct call *call, const uint8_t *payload, size_t n, struct err *e)
{
    (void)call, (void)payload, (void)n;
    return err_set(e, ERR_CORRUPT, "the reader does not like it");
}

static void a_reader_may_give_up(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 1000, &e);
    struct buf b = {0};
    msg_read_encode(&(struct msg_read){.source = READ_SEGMENT, .class = 1, .credit = 4}, &b);
    struct async a = {.call.more = give_up};
    async_start(&a, c, OP_READ, SLICE(b.p, b.n), 0);
    buf_free(&b);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_CORRUPT);
    struct call call;
    assert_int_equal(ask(c, OP_PING, "", 0, &call, &e), 0); /* the connection goes on, the server was told */
    call_free(&call);
    assert_int_equal(atomic_load(&t.cancels), 1);
    conn_close(c);
    scripted_stop(s);
}

static void deadlines_and_cancel_end_calls(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 60000, 1000, &e);
    struct call call;
    assert_int_equal(ask(c, OP_JOIN, "", 20, &call, &e), -ETIMEDOUT);
    assert_int_equal(e.class, ERR_TIMEOUT);
    assert_non_null(strstr(e.text, "join"));
    assert_non_null(strstr(e.text, "127.0.0.1"));

    /* Sent by its submitter, past the thread, which sleeps longer than that. */
    struct async pushed = {.call.push_follows = true};
    async_start(&pushed, c, OP_JOIN, slice_str(""), 20);
    conn_push(c);
    assert_true(async_wait(&pushed, 5000));
    assert_int_equal(pushed.call.err.class, ERR_TIMEOUT);

    struct async a = {0};
    async_start(&a, c, OP_JOIN, slice_str(""), 0);
    conn_cancel(c, &a.call);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_CANCELLED);

    struct async open = {0};
    async_start(&open, c, OP_JOIN, slice_str(""), 0);
    conn_close(c); /* ends what is in flight */
    assert_true(async_wait(&open, 0));
    assert_int_equal(open.call.err.class, ERR_CANCELLED);
    scripted_stop(s);
}

static void a_lost_connection_comes_back(void **state)
{
    (void)state;
    struct script t = {.hang_ups = 3};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 10000, &e);
    struct call call;
    assert_int_equal(ask(c, OP_MARK, "", 0, &call, &e), 0); /* asked again until it was answered */
    assert_int_equal(scripted_connections(s), 4);
    call_free(&call);

    atomic_store(&t.hang_ups, 1); /* a plain submit is not repeated: its owner is told */
    struct async a = {0};
    async_start(&a, c, OP_MARK, slice_str(""), 0);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_NETWORK);
    assert_non_null(strstr(a.call.err.text, scripted_port(s)));
    conn_close(c);
    scripted_stop(s);
}

static void a_server_that_stays_away_is_given_up(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    char port[8];
    strcpy(port, scripted_port(s));
    struct conn *c = open_to(port, 5000, 300, &e);
    scripted_stop(s);
    struct call call;
    assert_int_equal(ask(c, OP_PING, "", 0, &call, &e), -ECONNRESET);
    assert_int_equal(e.class, ERR_NETWORK);
    assert_non_null(strstr(e.text, port));
    assert_non_null(strstr(e.text, "refused")); /* the cause */
    conn_close(c);

    assert_null(open_to(port, 5000, 60000, &e)); /* the first connection is not waited for */
    assert_int_equal(e.class, ERR_NETWORK);
    assert_non_null(strstr(e.text, "is larderd running"));
}

static void refusals_and_silence_at_the_door(void **state)
{
    (void)state;
    struct err e;
    struct scripted *s =
        scripted_start(&(struct scripted_options){.frame = answer, .refuse_class = ERR_DENIED});
    assert_null(open_to(scripted_port(s), 5000, 60000, &e));
    assert_int_equal(e.class, ERR_DENIED);
    assert_int_equal(scripted_connections(s), 1); /* not tried again */
    scripted_stop(s);

    s = scripted_start(
        &(struct scripted_options){.frame = answer, .refuse_class = ERR_BUSY, .refuse_early = true});
    assert_null(open_to(scripted_port(s), 5000, 60000, &e));
    assert_int_equal(e.class, ERR_BUSY);
    assert_non_null(strstr(e.text, "refused by the script"));
    scripted_stop(s);

    s = scripted_start(&(struct scripted_options){.frame = answer, .silent = true});
    struct conn *c = NULL;
    struct conn_options o = {.host = "127.0.0.1", .port = scripted_port(s), .connect_timeout_ms = 100};
    assert_int_equal(conn_open(&o, &c, &e), -ECONNRESET);
    assert_non_null(strstr(e.text, "hello"));
    scripted_stop(s);
}

static void stopped_connections_refuse_calls(void **state)
{
    (void)state;
    struct script t = {0};
    struct err e;
    struct scripted *s = scripted_start(&(struct scripted_options){.frame = answer, .arg = &t});
    struct conn *c = open_to(scripted_port(s), 5000, 10000, &e);
    struct async a = {0};
    async_start(&a, c, OP_JOIN, slice_str(""), 0);
    conn_stop(c);
    assert_true(async_wait(&a, 5000));
    assert_int_equal(a.call.err.class, ERR_CANCELLED);
    struct call call;
    assert_int_equal(ask(c, OP_PING, "", 0, &call, &e), -ECANCELED);
    /* Also one that its submitter means to push: it ends at once, with nothing to be sent. */
    for (int i = 0; i < 50; i++) {
        struct async pushed = {.call.push_follows = true};
        async_start(&pushed, c, OP_PING, slice_str(""), 0);
        conn_push(c);
        assert_true(async_wait(&pushed, 5000));
        assert_int_equal(pushed.call.err.class, ERR_CANCELLED);
    }
    conn_close(c);
    scripted_stop(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_come_in_any_order),
        cmocka_unit_test(streams_flow_by_credit),
        cmocka_unit_test(streams_are_received_in_place),
        cmocka_unit_test(a_reader_may_give_up),
        cmocka_unit_test(deadlines_and_cancel_end_calls),
        cmocka_unit_test(a_lost_connection_comes_back),
        cmocka_unit_test(a_server_that_stays_away_is_given_up),
        cmocka_unit_test(refusals_and_silence_at_the_door),
        cmocka_unit_test(stopped_connections_refuse_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
