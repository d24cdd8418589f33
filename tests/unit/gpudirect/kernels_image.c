/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the image is a fat binary for the driver, or honestly absent. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/cursor.h"
#include "gpudirect/kernels_image.h"

static void image_is_a_fat_binary_or_absent(void **state)
{
    (void)state;
    const uint8_t *image = kernels_image();
    if (!image) {
        assert_string_equal(kernels_image_note(), "none: built without nvcc");
        return;
    }
    assert_int_equal((uintptr_t)image % 8, 0);
    assert_int_equal(le32_get(image), 0xba55ed50); /* what every fat binary begins with */
    assert_true(le64_get(image + 8) > 1000);       /* bytes behind its header of 16 */
    assert_non_null(strstr(kernels_image_note(), "compute_"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(image_is_a_fat_binary_or_absent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
