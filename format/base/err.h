/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Errors that a person will read.
 *
 * A function that can fail for a reason worth telling takes `struct err *` last and returns a negative errno;
 * the struct is filled once, where the cause is known, and upper layers prepend what they were doing. Callers
 * branch on the class, never on the text. A NULL `struct err *` is allowed everywhere: then only the return
 * value speaks.
 *
 * A good text has three parts: what was expected, what was found, what to do.
 */
#ifndef LARDER_BASE_ERR_H
#define LARDER_BASE_ERR_H

#include <stddef.h>
#include <stdint.h>

#define ERR_TEXT_BYTES 512

/* Classes travel on the wire and through the public header (enum larder_class): values are fixed for ever. */
enum err_class {
    ERR_NONE = 0,
    ERR_INVALID = 1,    /* the caller's argument or input is not allowed                    EINVAL    */
    ERR_DENIED = 2,     /* not authenticated, or the role does not allow it                 EACCES    */
    ERR_NOT_FOUND = 3,  /* absent, or not yours: the two look alike                         ENOENT    */
    ERR_EXISTS = 4,     /* exclusive creation lost                                          EEXIST    */
    ERR_CORRUPT = 5,    /* stored or received bytes do not match their checksum or format   EBADMSG   */
    ERR_KEY = 6,        /* wrong key: the bytes may be fine                                 EKEYREJECTED */
    ERR_FENCED = 7,     /* a newer attempt has taken over                                   ESTALE    */
    ERR_NO_SPACE = 8,   /* the store's disk is full                                         ENOSPC    */
    ERR_QUOTA = 9,      /* the tenant's quota is used up                                    EDQUOT    */
    ERR_IO = 10,        /* the disk or the device failed                                    EIO       */
    ERR_TIMEOUT = 11,   /* a deadline passed                                                ETIMEDOUT */
    ERR_CANCELLED = 12, /* the caller, or a stop, cancelled it                              ECANCELED */
    ERR_BUSY = 13,      /* try again later                                                  EBUSY     */
    ERR_VERSION = 14,   /* a format or protocol version that this build does not know       EPROTONOSUPPORT */
    ERR_PROTOCOL = 15,  /* the peer broke the protocol                                      EPROTO    */
    ERR_LIMIT = 16,     /* larger than limits.h or the configuration allows                 E2BIG     */
    ERR_NETWORK = 17,   /* the connection could not be made or was lost                     ECONNRESET */
    ERR_READ_ONLY = 18, /* the store turned read-only after a failed sync                   EROFS     */
    ERR_MISMATCH = 19,  /* parts, shapes or dtypes do not agree                             EILSEQ    */
    ERR_NO_MEMORY = 20, /* memory could not be had                                          ENOMEM    */
    ERR_UNSUPPORTED = 21, /* this build or machine cannot do it                             ENOTSUP   */
    ERR_CLASS_COUNT
};

struct err {
    enum err_class class;
    int errnum;                /* positive errno */
    char text[ERR_TEXT_BYTES]; /* UTF-8, one sentence or two, no trailing newline, always terminated */
};

/* The errno that stands for a class where no better one is known. */
int err_class_errno(enum err_class class);

/* Short lower-case word for a class ("corrupt", "wrong key"), never NULL. */
const char *err_class_name(enum err_class class);

/* The class that an errno of a system call belongs to (ENOSPC: ERR_NO_SPACE, EIO: ERR_IO, ...). */
enum err_class err_class_of_errno(int errnum);

/* Fills e and returns -errno of the class. Overwrites what was there. e may be NULL. */
int err_set(struct err *e, enum err_class class, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* The same for a failed system call: class from errnum, strerror appended to the text. Returns -errnum. */
int err_sys(struct err *e, int errnum, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "what we were doing: " in front of the text. Returns -e->errnum so that it can be the return value. */
int err_prepend(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void err_clear(struct err *e);

/* Text of names that come from outside: control bytes and non-UTF-8 are escaped as \xNN, long ones shortened
 * with "...". Writes at most size bytes, terminated; returns buf. */
char *err_quote(char *buf, size_t size, const void *name, size_t n);

#define must_check __attribute__((warn_unused_result))

/* A broken promise of our own code: print and abort. On in release. Never for input, disks or peers. */
#define check(cond)                                  \
    do {                                             \
        if (__builtin_expect(!(cond), 0))            \
            check_failed(#cond, __FILE__, __LINE__); \
    } while (0)
void check_failed(const char *cond, const char *file, int line) __attribute__((noreturn, cold));

#endif
