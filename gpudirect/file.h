/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plain files, moved between a disk of this machine and host or device memory. For device memory there are
 * two ways:
 *
 *   cuFile          where its library is; directly or in its compatibility mode (cufile.h)
 *   bounce buffer   everywhere: pread and pwrite on pinned pieces of host memory, copied by the device while
 * the next piece is on its way
 *
 * Which one a file goes is decided when it is opened, told by file_path, and does not change: a failure of
 * one is a failure, and not a reason to take the other.
 *
 * Threads: an access, and the files opened with it, by one thread at a time. Every wait has a bound
 * (FILE_WAIT_MS for the device; disks take the time they take).
 */
#ifndef LARDER_GPUDIRECT_FILE_H
#define LARDER_GPUDIRECT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "gpudirect/memory.h"

#define FILE_WAIT_MS 60000u

struct file_access; /* what files are moved with: a stream of the device, and the bounce buffer */
struct file;

enum file_want {
    FILE_BEST = 0,  /* cuFile where it is usable, for files that it takes */
    FILE_BOUNCE = 1 /* the bounce buffer */
};
enum file_mode {
    FILE_READ = 0,
    FILE_CREATE = 1, /* to write, and to read again; fails where the name exists: ERR_EXISTS. Mode 0600 */
    FILE_UPDATE = 2  /* the same for a file that is there */
};

/* m: the memory that is read into and written from, open for longer; with host memory there is one way,
 * without any detour. */
must_check int file_access_open(struct memory *m, enum file_want want, struct file_access **out,
                                struct err *e);
/* Its files are closed. NULL allowed. */
void file_access_close(struct file_access *a);
/* What is written from now on is what the device's memory holds once the caller's stream has done all that it
 * was given so far: waits for that. On host memory: nothing to do. */
must_check int file_after_caller(struct file_access *a, void *caller_stream, struct err *e);

/* ERR_NOT_FOUND, ERR_DENIED, ...: as the system says, with the path. ERR_INVALID: no regular file. */
must_check int file_open(struct file_access *a, const char *path, enum file_mode mode, struct file **out,
                         struct err *e);
void file_close(struct file *f); /* NULL allowed; does not sync */
/* As it was opened. Its times and size tell later whether it is still the same: see file_unchanged. */
const struct stat *file_stat(const struct file *f);
/* 0; ERR_MISMATCH: size, time of change or identity are not those of `then` any more. */
must_check int file_unchanged(struct file *f, const struct stat *then, struct err *e);

/* "cuFile, direct", "cuFile, compatibility mode: ...", "pinned bounce buffer: ..." with the reason, "read and
 * written in place" on host memory. Lives as long as f. */
const char *file_path(const struct file *f);

/* All n > 0 bytes from offset on, into or out of the access's memory. ERR_CORRUPT: the file ends before. */
must_check int file_read(struct file *f, uint64_t offset, size_t n, void *to, struct err *e);
must_check int file_write(struct file *f, uint64_t offset, size_t n, const void *from, struct err *e);
/* The same with host memory, whatever the access is for: for headers and tables. */
must_check int file_read_host(struct file *f, uint64_t offset, size_t n, void *to, struct err *e);
must_check int file_write_host(struct file *f, uint64_t offset, size_t n, const void *from, struct err *e);
/* What was written is on the disk. */
must_check int file_sync(struct file *f, struct err *e);

#endif
