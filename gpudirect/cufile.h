/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of cuFile (GPUDirect Storage) that larder uses, declared by us so that nothing of it is needed to
 * build, and loaded by dlopen. Only file.c calls this; only cufile.c and tests, which stand in for the
 * library, see its types. A test holds them against NVIDIA's own cufile.h where there is one.
 *
 * cuFile moves bytes between files and device memory: directly, by the storage's own engine, or in
 * compatibility mode, through host memory of its own. Which of the two is the library's decision; what can be
 * known about it beforehand is told here.
 */
#ifndef LARDER_GPUDIRECT_CUFILE_H
#define LARDER_GPUDIRECT_CUFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "gpudirect/memory.h"

#define CUFILE_LIBRARY "libcufile.so.0"

struct cufile_probe {
    bool usable;
    bool compatible;           /* compatibility mode for every file */
    char note[ERR_TEXT_BYTES]; /* "with nvidia-fs 2.26", or why it cannot be used, or is in
                                  compatibility mode */
};

/* Looks for the library and opens its driver, once per process; it stays. Only where CUDA is usable: else the
 * note says so. */
void cufile_probe(struct cufile_probe *out);

struct cufile; /* a file that cuFile knows */

/* Makes an open file known. fd stays the caller's and stays open longer. ERR_UNSUPPORTED with cuFile's
 * reason: not this file, not this file system, not usable at all. m is a CUDA device. */
must_check int cufile_open(struct memory *m, int fd, struct cufile **out, struct err *e);
void cufile_close(struct cufile *f); /* NULL allowed */
/* How its bytes go, for people: "cuFile, direct", "cuFile, compatibility mode: ...", or that it cannot be
 * known from here. Lives as long as f. */
const char *cufile_path(const struct cufile *f);

/* Like pread and pwrite, with device memory: how many bytes, 0 at the end of the file, at most n > 0; the
 * memory is that of the device given at open. Blocks. One file by several threads at once. */
must_check int64_t cufile_read(struct cufile *f, uint64_t offset, size_t n, void *to, struct err *e);
must_check int64_t cufile_write(struct cufile *f, uint64_t offset, size_t n, const void *from, struct err *e);

/* ---- the library's own types ---- */

typedef void *cufile_handle;

struct cufile_result {
    int code;      /* 0, or 5000 and more */
    int cuda_code; /* where code says that CUDA failed */
};

struct cufile_description {
    int type; /* CUFILE_TYPE_FD */
    union {
        int fd;
        void *pointer;
    } handle;
    const void *operations; /* of user-space file systems: NULL */
};

struct cufile_properties {
    struct {
        unsigned major, minor; /* of nvidia-fs; 0.0 where it is not there */
        size_t poll_threshold, direct_max;
        unsigned kinds;    /* of storage that it reaches directly: bits CUFILE_KIND_* */
        unsigned controls; /* bits CUFILE_CONTROL_* */
    } driver;
    unsigned features; /* bits CUFILE_FEATURE_* */
    unsigned cache_max, cache_per_buffer, pinned_max, batch_max, batch_timeout_ms;
};

/* X(our name, NVIDIA's name, value) */
#define CUFILE_NUMBERS(X)                                           \
    X(CUFILE_TYPE_FD, CU_FILE_HANDLE_TYPE_OPAQUE_FD, 1)             \
    X(CUFILE_KIND_LUSTRE, CU_FILE_LUSTRE_SUPPORTED, 0)              \
    X(CUFILE_KIND_NFS, CU_FILE_NFS_SUPPORTED, 2)                    \
    X(CUFILE_KIND_GPFS, CU_FILE_GPFS_SUPPORTED, 3)                  \
    X(CUFILE_KIND_NVME, CU_FILE_NVME_SUPPORTED, 4)                  \
    X(CUFILE_KIND_NVMEOF, CU_FILE_NVMEOF_SUPPORTED, 5)              \
    X(CUFILE_KIND_SCSI, CU_FILE_SCSI_SUPPORTED, 6)                  \
    X(CUFILE_KIND_BEEGFS, CU_FILE_BEEGFS_SUPPORTED, 9)              \
    X(CUFILE_KIND_NVME_P2P, CU_FILE_NVME_P2P_SUPPORTED, 11)         \
    X(CUFILE_CONTROL_COMPATIBLE, CU_FILE_ALLOW_COMPAT_MODE, 1)      \
    X(CUFILE_NOT_INITIALIZED, CU_FILE_DRIVER_NOT_INITIALIZED, 5001) \
    X(CUFILE_PLATFORM, CU_FILE_PLATFORM_NOT_SUPPORTED, 5007)        \
    X(CUFILE_FILE, CU_FILE_IO_NOT_SUPPORTED, 5008)                  \
    X(CUFILE_DEVICE, CU_FILE_DEVICE_NOT_SUPPORTED, 5009)            \
    X(CUFILE_CUDA, CU_FILE_CUDA_DRIVER_ERROR, 5011)                 \
    X(CUFILE_POINTER, CU_FILE_CUDA_POINTER_INVALID, 5012)           \
    X(CUFILE_CONTEXT, CU_FILE_CUDA_CONTEXT_MISMATCH, 5015)          \
    X(CUFILE_NO_DIRECT, CU_FILE_DIO_NOT_SET, 5020)                  \
    X(CUFILE_VALUE, CU_FILE_INVALID_VALUE, 5022)                    \
    X(CUFILE_DENIED, CU_FILE_PERMISSION_DENIED, 5025)               \
    X(CUFILE_INTERNAL, CU_FILE_INTERNAL_ERROR, 5030)                \
    X(CUFILE_PINNING, CU_FILE_GPU_MEMORY_PINNING_FAILED, 5036)
#define CUFILE_NUMBER_ENUM(ours, theirs, value) ours = value,
enum cufile_number { CUFILE_NUMBERS(CUFILE_NUMBER_ENUM) };
#define CUFILE_FEATURE_P2P \
    4 /* CU_FILE_P2P_SUPPORTED; older headers lack it, and tell it by CUFILE_KIND_NVME_P2P */

/* X(symbol, result, parameters) */
#define CUFILE_CALLS(X)                                                                         \
    X(cuFileDriverOpen, struct cufile_result, (void))                                           \
    X(cuFileDriverGetProperties, struct cufile_result, (struct cufile_properties * properties)) \
    X(cuFileHandleRegister, struct cufile_result,                                               \
      (cufile_handle * handle, struct cufile_description * file))                               \
    X(cuFileHandleDeregister, void, (cufile_handle handle))                                     \
    X(cuFileRead, ssize_t,                                                                      \
      (cufile_handle handle, void *base, size_t n, off_t file_offset, off_t base_offset))       \
    X(cuFileWrite, ssize_t,                                                                     \
      (cufile_handle handle, const void *base, size_t n, off_t file_offset, off_t base_offset))

#endif
