/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: no pair of key and nonce encrypts twice, whatever is retried, killed and begun again. Method: in this
 * program the linker puts an oracle between our code and AES-GCM (-Wl,--wrap, see the Makefile). It keeps a
 * fingerprint of every pair in memory that all processes of the test share, so that what a killed one has
 * used still counts. Real saves through cut connections, a killed server, killed clients and a rotation; then
 * writers that are killed and race for chunk numbers, until LARDER_TEST_ENCRYPTIONS (1,000,000) are reached.
 */
#include <openssl/evp.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "format/aead.h"
#include "format/aead_mb.h"
#include "format/seal.h"
#include "tests/support/daemon.h"

#define ROUNDS       12
#define STORM_CHUNKS 5000u
#define RACERS       2
#define PAYLOAD      64u
#define BYTES        (3u << 20)

static uint64_t most; /* encryptions to reach */

/* ---- the oracle ---- */

/* A pair is known by 64 bits of a hash: of 10^7 of them, two share one by chance once in 400,000 runs. */
static struct oracle {
    _Atomic uint64_t pairs, repeats;
    uint64_t mask;
    size_t bytes;
    _Atomic uint64_t slot[];
} * oracle;

static void oracle_open(uint64_t pairs)
{
    uint64_t slots = 1024;
    while (slots < 2 * pairs)
        slots *= 2;
    size_t bytes = sizeof *oracle + slots * sizeof oracle->slot[0];
    if (oracle)
        munmap(oracle, oracle->bytes);
    oracle = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(oracle != MAP_FAILED);
    oracle->bytes = bytes;
    oracle->mask = slots - 1;
}

static void oracle_tell(const uint8_t *key, const uint8_t *nonce)
{
    uint8_t pair[AEAD_KEY_BYTES + AEAD_NONCE_BYTES];
    memcpy(pair, key, AEAD_KEY_BYTES);
    memcpy(pair + AEAD_KEY_BYTES, nonce, AEAD_NONCE_BYTES);
    struct hash128 hash = hash128(pair, sizeof pair);
    uint64_t print;
    memcpy(&print, hash.bytes, sizeof print);
    print += print == 0; /* 0 is an empty slot */
    atomic_fetch_add(&oracle->pairs, 1);
    for (uint64_t at = print & oracle->mask;; at = (at + 1) & oracle->mask) {
        uint64_t found = 0;
        if (atomic_compare_exchange_strong(&oracle->slot[at], &found, print))
            return;
        if (found == print) {
            atomic_fetch_add(&oracle->repeats, 1);
            return;
        }
    }
}

int __real_EVP_CipherInit_ex(EVP_CIPHER_CTX *x, const EVP_CIPHER *type, ENGINE *engine, const uint8_t *key,
                             const uint8_t *nonce, int seals);
int __wrap_EVP_CipherInit_ex(EVP_CIPHER_CTX *x, const EVP_CIPHER *type, ENGINE *engine, const uint8_t *key,
                             const uint8_t *nonce, int seals);
void __real_EVP_CIPHER_CTX_free(EVP_CIPHER_CTX *x);
void __wrap_EVP_CIPHER_CTX_free(EVP_CIPHER_CTX *x);

/* All goes through OpenSSL here: keys and nonces are the same whoever does the arithmetic. */
struct aead_mb *__wrap_aead_mb_create(bool seals);
struct aead_mb *__wrap_aead_mb_create(bool seals)
{
    (void)seals;
    return NULL;
}

/* The key stays with the context until the next one is set. */
int __wrap_EVP_CipherInit_ex(EVP_CIPHER_CTX *x, const EVP_CIPHER *type, ENGINE *engine, const uint8_t *key,
                             const uint8_t *nonce, int seals)
{
    int rc = __real_EVP_CipherInit_ex(x, type, engine, key, nonce, seals);
    uint8_t *kept = EVP_CIPHER_CTX_get_app_data(x);
    if (key && !kept) {
        kept = malloc(AEAD_KEY_BYTES);
        check(kept);
        EVP_CIPHER_CTX_set_app_data(x, kept);
    }
    if (key)
        memcpy(kept, key, AEAD_KEY_BYTES);
    if (nonce && seals) {
        check(kept); /* a nonce without a key: the oracle would see nothing */
        oracle_tell(kept, nonce);
    }
    return rc;
}

void __wrap_EVP_CIPHER_CTX_free(EVP_CIPHER_CTX *x)
{
    if (x)
        free(EVP_CIPHER_CTX_get_app_data(x));
    __real_EVP_CIPHER_CTX_free(x);
}

static void a_repeat_is_seen(void **state)
{
    (void)state;
    uint8_t key[AEAD_KEY_BYTES] = {1}, other[AEAD_KEY_BYTES] = {2}, nonce[AEAD_NONCE_BYTES] = {3},
            out[1 + AEAD_TAG_BYTES], plain;
    struct aead *seals = aead_create(AEAD_AES_256_GCM, true), *opens = aead_create(AEAD_AES_256_GCM, false);
    oracle_open(1000);
    aead_key(seals, key);
    aead_seal(seals, nonce, NULL, 0, "a", 1, out, NULL);
    aead_key(seals, other);
    aead_seal(seals, nonce, NULL, 0, "a", 1, out, NULL);
    aead_key(opens, other);
    assert_int_equal(aead_open(opens, nonce, NULL, 0, out, sizeof out, &plain, NULL), 0); /* no encryption */
    assert_int_equal(oracle->pairs, 2);
    assert_int_equal(oracle->repeats, 0);
    aead_key(seals, key);
    aead_seal(seals, nonce, NULL, 0, "b", 1, out, NULL);
    assert_int_equal(oracle->repeats, 1);
    aead_free(seals);
    aead_free(opens);
}

/* ---- parties that are killed ---- */

static void pause_ms(uint64_t ms)
{
    const struct timespec t = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static uint64_t draw(uint64_t below)
{
    uint64_t x;
    check(getrandom(&x, sizeof x, 0) == sizeof x);
    return x % below;
}

static pid_t begin(void (*work)(uint64_t arg), uint64_t arg)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        work(arg);
        _exit(1);
    }
    return pid;
}

/* It must have been at work until now. */
static void end(pid_t pid)
{
    int status = 0;
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* ---- real saves ---- */

static struct daemon server;

/* Saves on and on; what fails is done again. Every connection breaks after a while. */
static void save_on(uint64_t round)
{
    char credentials[512];
    static uint8_t bytes[BYTES];
    struct proxy *proxy = proxy_start(server.address);
    daemon_credentials_edit(&server, "writer", "cut", proxy_address(proxy), NULL, NULL, credentials,
                            sizeof credentials);
    struct larder *c = daemon_client_at(credentials, 64u << 20);
    for (uint64_t step = 1 + round / 3;; step++) { /* a step is saved again by later attempts */
        struct larder_save_options o = LARDER_INIT(larder_save_options);
        struct larder_save *s = NULL;
        struct larder_error e = {0};
        o.run = "nonces";
        o.step = step;
        o.attempt[0] = (uint8_t)(1 + round);
        proxy_cut_after(proxy, draw(3 * BYTES));
        for (size_t i = 0; i < BYTES; i += 8)
            memcpy(bytes + i, &(uint64_t){(step + i) * 0x9e3779b97f4a7c15ull}, 8);
        struct larder_tensor t[] = {
            {.name = "large", .dtype = LARDER_U8, .dims = 1, .shape = {BYTES - 4096}, .data = bytes},
            {.name = "small", .dtype = LARDER_F32, .dims = 1, .shape = {1000}, .data = bytes},
            {.name = "half", .dtype = LARDER_BF16, .dims = 1, .shape = {1000}, .data = bytes},
            {.name = "double", .dtype = LARDER_F64, .dims = 1, .shape = {500}, .data = bytes}};
        int rc = larder_save_begin(c, &o, &s, &e);
        for (size_t i = 0; i < sizeof t / sizeof t[0] && rc == 0; i++)
            rc = larder_save_tensor(s, &t[i], &e);
        if (rc == 0)
            rc = larder_save_submit(s, &e);
        if (rc == 0)
            larder_save_wait(s, -1, &e);
        larder_save_free(s);
    }
}

static void rotate(uint64_t round)
{
    uint64_t runs;
    struct larder_error e = {0};
    (void)round;
    struct larder *c = daemon_client(&server, "admin");
    int rc = larder_key_rotate(c, 0, &runs, &e);
    if (rc < 0)
        fprintf(stderr, "rotating: %s\n", e.text);
    _exit(rc < 0 ? 1 : 0);
}

static void real_saves_repeat_nothing(void **state)
{
    (void)state;
    int status = 0;
    oracle_open(most + most / 2 + 100000);
    daemon_start(&server);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t before = oracle->pairs;
        pid_t pid = begin(save_on, round);
        for (int i = 0; i < 20000 && oracle->pairs < before + 40; i++)
            pause_ms(1);
        assert_true(oracle->pairs >= before + 40);
        pause_ms(draw(200));
        if (round % 4 == 3) {
            daemon_restart(&server);
            pause_ms(draw(300));
        }
        end(pid);
    }
    assert_int_equal(waitpid(begin(rotate, 0), &status, 0) > 0 ? status : -1, 0);
    daemon_stop(&server);
    print_message("%llu encryptions of real saves\n", (unsigned long long)oracle->pairs);
    assert_true(oracle->pairs > 40 * ROUNDS);
    assert_int_equal(oracle->repeats, 0);
}

/* ---- many writers ---- */

struct race {
    const struct seal *seal;
    _Atomic uint32_t sealed;
};

/* Tries every number, as a thread that does not know of the others or a retry would. */
static void *racer(void *arg)
{
    struct race *r = arg;
    uint8_t payload[PAYLOAD] = {0}, out[PAYLOAD + AEAD_TAG_BYTES];
    struct seal_state *st = seal_state_create();
    check(st);
    for (uint32_t i = 0; i < STORM_CHUNKS; i++)
        if (seal_chunk(r->seal, st, i, PAYLOAD, CODEC_RAW, DTYPE_U8, payload, PAYLOAD, out, NULL, NULL) == 0)
            atomic_fetch_add(&r->sealed, 1);
    seal_state_free(st);
    return NULL;
}

/* One segment of the same run, step and rank as all others: only its id and its salt are fresh. */
static void write_segment(const struct dek *dek)
{
    struct segment_header h = {.version = 1, .suite = 1, .world = 1, .tenant = "acme"};
    struct segment_trailer t = {.version = 1, .chunks = STORM_CHUNKS};
    struct race r = {0};
    struct seal *seal;
    struct seal_state *st = seal_state_create();
    pthread_t threads[RACERS];
    uint8_t digest[SHA256_BYTES] = {0}, index[PAYLOAD + AEAD_TAG_BYTES] = {0};
    check(getrandom(h.salt, sizeof h.salt, 0) == sizeof h.salt);
    check(getrandom(&h.segment_id, sizeof h.segment_id, 0) == sizeof h.segment_id);
    check(st && seal_create(dek, &h, STORM_CHUNKS, &seal, NULL) == 0);
    r.seal = seal;
    for (int i = 0; i < RACERS; i++)
        check(pthread_create(&threads[i], NULL, racer, &r) == 0);
    for (int i = 0; i < RACERS; i++)
        pthread_join(threads[i], NULL);
    check(r.sealed == STORM_CHUNKS);
    for (int tries = 0; tries < 2; tries++) { /* the second is refused */
        bool index_sealed = seal_index(seal, st, digest, index, PAYLOAD, index, NULL) == 0;
        bool trailer_sealed = seal_trailer(seal, st, &t, NULL) == 0;
        check(index_sealed == !tries && trailer_sealed == !tries);
    }
    seal_state_free(st);
    seal_free(seal);
}

static void write_on(uint64_t round)
{
    uint8_t raw[KEY_BYTES] = {9};
    struct dek dek = {.key = secret_create(raw, sizeof raw)};
    (void)round;
    for (;;)
        write_segment(&dek);
}

static void killed_writers_repeat_nothing(void **state)
{
    (void)state;
    uint64_t kills = 0;
    while (oracle->pairs < most) {
        uint64_t before = oracle->pairs, step = most / 20 + draw(STORM_CHUNKS);
        pid_t pid = begin(write_on, 0);
        for (int i = 0; i < 60000 && oracle->pairs < before + step; i++)
            pause_ms(1);
        end(pid);
        assert_true(oracle->pairs > before);
        kills++;
    }
    print_message("%llu encryptions, %llu writers killed\n", (unsigned long long)oracle->pairs,
                  (unsigned long long)kills);
    assert_int_equal(oracle->repeats, 0);
}

int main(void)
{
    const char *given = getenv("LARDER_TEST_ENCRYPTIONS");
    most = given ? strtoull(given, NULL, 10) : 1000000;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_repeat_is_seen),
        cmocka_unit_test(real_saves_repeat_nothing),
        cmocka_unit_test(killed_writers_repeat_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
