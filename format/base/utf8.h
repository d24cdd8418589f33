/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LARDER_BASE_UTF8_H
#define LARDER_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the valid UTF-8 sequence at p (1 to 4; left >= 1), or 0. Overlong forms and surrogates are not
 * valid. */
size_t utf8_sequence(const uint8_t *p, size_t left);

/* Valid UTF-8 without NUL? Empty is valid. */
bool utf8_valid(const void *p, size_t n);

#endif
