/* SPDX-License-Identifier: Apache-2.0 */
/* Temporary folders for tests: below $BUILD, so on a real disk where that is one. */
#ifndef LARDER_TEST_FOLDER_H
#define LARDER_TEST_FOLDER_H

#include <stddef.h>

void folder_make(char *path, size_t size); /* aborts with a message if it cannot */
void folder_remove(const char *path);      /* with all that is in it */
/* Files in a folder, written anew, or put in a name's place as one does who publishes anew. Both abort if
 * they cannot. */
void folder_file(const char *folder, const char *name, const void *p, size_t n);
void folder_replace(const char *folder, const char *name, const void *p, size_t n);

#endif
