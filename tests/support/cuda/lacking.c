/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda.so.1 that tells a new version and has nothing else: what a damaged driver looks like. */
__attribute__((visibility("default"))) int cuDriverGetVersion(int *version);

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}
