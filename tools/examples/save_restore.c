/* SPDX-License-Identifier: Apache-2.0 */
/* Saves a tensor and restores it: cc save_restore.c $(pkg-config --cflags --libs larder) -o save_restore
 * LARDER_CREDENTIALS names the credential file. */
#include <larder.h>
#include <stdio.h>
#include <string.h>

static float weights[1000][64], again[1000][64];

int main(void)
{
    struct larder_options options = LARDER_INIT(larder_options);
    struct larder_save_options so = LARDER_INIT(larder_save_options);
    struct larder_restore_options ro = LARDER_INIT(larder_restore_options);
    struct larder_tensor t = {.name = "weights", .dtype = LARDER_F32, .dims = 2, .shape = {1000, 64}};
    struct larder_error e = {0};
    struct larder *c = NULL;
    struct larder_save *s = NULL;
    struct larder_restore *r = NULL;
    for (int i = 0; i < 1000 * 64; i++)
        weights[i / 64][i % 64] = (float)i / 64000;
    so.run = ro.run = "example";
    so.step = 1;
    t.data = weights;
    int bad = larder_open(&options, &c, &e) < 0 || larder_save_begin(c, &so, &s, &e) < 0 ||
              larder_save_tensor(s, &t, &e) < 0 || larder_save_submit(s, &e) < 0;
    /* Staged: the weights may change now. Durable: the checkpoint exists. */
    bad = bad || larder_save_wait(s, 60000, &e) < 0;
    larder_save_free(s);
    t.data = again;
    bad = bad || larder_restore_open(c, &ro, &r, &e) < 0 || larder_restore_add(r, &t, &e) < 0 ||
          larder_restore_run(r, &e) < 0;
    larder_restore_close(r);
    if (c && larder_close(c, 10000, bad ? NULL : &e) < 0)
        bad = 1;
    if (bad)
        fprintf(stderr, "%s\n", e.text);
    else
        printf("saved and restored: %s\n", memcmp(weights, again, sizeof again) ? "different" : "the same");
    return bad || memcmp(weights, again, sizeof again) != 0;
}
