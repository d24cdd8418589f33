/* SPDX-License-Identifier: Apache-2.0 */
/* A call that has to succeed: fails the test with its number and the words in `e`, the error it was given.
 * After cmocka.h. */
#ifndef LARDER_TESTS_GOOD_H
#define LARDER_TESTS_GOOD_H

#define GOOD(call)                                     \
    do {                                               \
        int rc_ = (call);                              \
        if (rc_ < 0)                                   \
            fail_msg("%s: %d %s", #call, rc_, e.text); \
    } while (0)

#endif
