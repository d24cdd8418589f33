/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the checksums of other formats are theirs. Method: the digests of "larder", made with Python's
 * hashlib and the xxhsum of the library. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/digest.h"

static const struct {
    const char *algorithm, *digest;
} known[] = {
    {"md5", "000f9153a448879ce03f7b8d28a15cc0"},
    {"sha1", "bbc6bf18e0bb213fa00327cbedc3f47ebdf8ffed"},
    {"sha224", "bd9144de88b35338477d6b75488bd16df52533695a5401d312780d32"},
    {"sha256", "c20fbb7794f4e4f8b114391ab5b8a9f12b38e6937f1de3bb0ac4e0d8e224bd71"},
    {"sha384",
     "5477f7aa4fc52baf999fefb4f01987c664c6211bfc70624c6a036b719487448639e3068b4d97c4356e835e5f797a4703"},
    {"sha512", "b7a6d3b8f65e2fcc1af8f26e4b0cc7f33d1016463a2c54c6afe79dbfd2cbcf726c4ea7df382354cf7eeca54d33fb5"
               "de65060c04afe55ed10317244b02b71760e"},
    {"sha3_224", "77c1d6c372320db2889ad01856ad22f9c92a23cf599e3737a7c7934b"},
    {"sha3_256", "fa5b78b004dd677448451506498ce8c2118723e5b22806c6c7ce3714763124bb"},
    {"sha3_384",
     "268deded7916dd19789bd9bfad9a816e5d4997fec3f1709c9a2a47cf665e4034b84e1998456a4b574bcd416207115944"},
    {"sha3_512", "ce5f8db6cb4575b54a943b35af55b77b96c95322afe6710015bc81cf173cdd568f67a821e3c0954b990d1aa4fc3"
                 "7fe01778470864c459878912b9f6594710d35"},
    {"blake2b", "9d2f570ce331d1d44a6e6e98fb59d1483255a8d64b3d59df2c999fbd9b10f6dd3258f84a115ea0f0693dbc939e6c"
                "6e0d204ee513c0693d5bdaaadc3eca8d5f6e"},
    {"blake2s", "5fa6b0e43f287727cc4cd16ed105bcb75791f8594d3091b80b5bfb3f0980f89f"},
    {"xxh32", "c4f165e3"},
    {"xxh64", "305e582bf1b42afa"},
    {"xxh3_64", "c4b29edad156bf67"},
    {"xxh128", "7fb8acf4b9b3968499e126190611c8d6"},
    {"xxh3_128", "7fb8acf4b9b3968499e126190611c8d6"},
};

static void as_others_have_them(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char hex[DIGEST_HEX_BYTES];
        struct digest *d;
        struct err e;
        assert_true(digest_known(known[i].algorithm));
        if (digest_start(known[i].algorithm, &d, &e) < 0)
            fail_msg("%s", e.text);
        digest_update(d, "lar", 3);
        digest_update(d, "", 0);
        digest_update(d, "der", 3);
        digest_end(d, hex);
        assert_string_equal(hex, known[i].digest);
        digest_free(d);
    }
}

static void others_are_refused_by_name(void **state)
{
    (void)state;
    struct digest *d;
    struct err e;
    assert_false(digest_known("sha9"));
    assert_false(digest_known(""));
    assert_int_equal(digest_start("sha9", &d, &e), -ENOTSUP);
    assert_non_null(strstr(e.text, "sha9"));
    digest_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_others_have_them),
        cmocka_unit_test(others_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
