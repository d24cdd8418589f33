/* SPDX-License-Identifier: Apache-2.0 */
/* Is this build one whose programs keep what they have freed, and more beside it? Then their size says
 * nothing of ours, and memory without end is no error but their end. */
#ifndef LARDER_TESTS_SANITIZED_H
#define LARDER_TESTS_SANITIZED_H

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#define SANITIZED 1
#elif defined __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif
