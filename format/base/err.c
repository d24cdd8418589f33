/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"

static const struct {
    int errnum;
    const char *name;
} classes[ERR_CLASS_COUNT] = {
    [ERR_NONE] = {0, "no error"},
    [ERR_INVALID] = {EINVAL, "invalid"},
    [ERR_DENIED] = {EACCES, "denied"},
    [ERR_NOT_FOUND] = {ENOENT, "not found"},
    [ERR_EXISTS] = {EEXIST, "exists"},
    [ERR_CORRUPT] = {EBADMSG, "corrupt"},
    [ERR_KEY] = {EKEYREJECTED, "wrong key"},
    [ERR_FENCED] = {ESTALE, "fenced"},
    [ERR_NO_SPACE] = {ENOSPC, "no space"},
    [ERR_QUOTA] = {EDQUOT, "quota"},
    [ERR_IO] = {EIO, "I/O"},
    [ERR_TIMEOUT] = {ETIMEDOUT, "timeout"},
    [ERR_CANCELLED] = {ECANCELED, "cancelled"},
    [ERR_BUSY] = {EBUSY, "busy"},
    [ERR_VERSION] = {EPROTONOSUPPORT, "version"},
    [ERR_PROTOCOL] = {EPROTO, "protocol"},
    [ERR_LIMIT] = {E2BIG, "limit"},
    [ERR_NETWORK] = {ECONNRESET, "network"},
    [ERR_READ_ONLY] = {EROFS, "read-only"},
    [ERR_MISMATCH] = {EILSEQ, "mismatch"},
    [ERR_NO_MEMORY] = {ENOMEM, "no memory"},
    [ERR_UNSUPPORTED] = {ENOTSUP, "unsupported"},
};

int err_class_errno(enum err_class class)
{
    return (unsigned)class < ERR_CLASS_COUNT ? classes[class].errnum : EIO;
}

const char *err_class_name(enum err_class class)
{
    return (unsigned)class < ERR_CLASS_COUNT ? classes[class].name : "unknown";
}

enum err_class err_class_of_errno(int errnum)
{
    switch (errnum) {
    case 0: return ERR_NONE;
    case EINVAL: return ERR_INVALID;
    case EACCES:
    case EPERM: return ERR_DENIED;
    case ENOTDIR:
    case ENOENT: return ERR_NOT_FOUND;
    case EEXIST: return ERR_EXISTS;
    case ENOSPC: return ERR_NO_SPACE;
    case EDQUOT: return ERR_QUOTA;
    case ETIMEDOUT: return ERR_TIMEOUT;
    case ECANCELED: return ERR_CANCELLED;
    case EBUSY:
    case EAGAIN: return ERR_BUSY;
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ENETDOWN:
    case EADDRNOTAVAIL:
    case ENOTCONN:
    case EPIPE: return ERR_NETWORK;
    case EROFS: return ERR_READ_ONLY;
    case ENOMEM: return ERR_NO_MEMORY;
    case ENOTSUP:
    case ENOSYS: return ERR_UNSUPPORTED;
    default: return ERR_IO;
    }
}

int err_set(struct err *e, enum err_class class, const char *fmt, ...)
{
    int errnum = err_class_errno(class);
    if (e) {
        /* Formatted aside first: the arguments may point into e->text. */
        char text[ERR_TEXT_BYTES];
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(text, sizeof text, fmt, ap);
        va_end(ap);
        e->class = class;
        e->errnum = errnum;
        memcpy(e->text, text, sizeof text);
    }
    return -errnum;
}

int err_sys(struct err *e, int errnum, const char *fmt, ...)
{
    if (errnum <= 0)
        errnum = EIO;
    if (e) {
        char text[ERR_TEXT_BYTES];
        va_list ap;
        va_start(ap, fmt);
        int n = vsnprintf(text, sizeof text, fmt, ap);
        va_end(ap);
        size_t used = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
        char reason[96];
        snprintf(text + used, sizeof text - used, ": %s", strerror_r(errnum, reason, sizeof reason));
        e->class = err_class_of_errno(errnum);
        e->errnum = errnum;
        memcpy(e->text, text, sizeof text);
    }
    return -errnum;
}

int err_prepend(struct err *e, const char *fmt, ...)
{
    if (!e)
        return -EIO;
    char text[ERR_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t used = n < 0 ? 0 : (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
    snprintf(text + used, sizeof text - used, ": %s", e->text);
    memcpy(e->text, text, sizeof text);
    return e->errnum > 0 ? -e->errnum : -EIO;
}

void err_clear(struct err *e)
{
    if (!e)
        return;
    e->class = ERR_NONE; /* not all of the text: a million calls do this */
    e->errnum = 0;
    e->text[0] = 0;
}

char *err_quote(char *buf, size_t size, const void *name, size_t n)
{
    const uint8_t *p = name;
    size_t used = 0;
    check(size >= 8);
    for (size_t i = 0; i < n;) {
        char piece[5];
        size_t take = utf8_sequence(p + i, n - i), width;
        if (take == 0 || p[i] < 0x20 || p[i] == 0x7f) {
            snprintf(piece, sizeof piece, "\\x%02x", p[i]);
            take = 1;
            width = 4;
        } else {
            memcpy(piece, p + i, take);
            width = take;
        }
        if (used + width + 4 > size) {
            memcpy(buf + used, "...", 3);
            used += 3;
            break;
        }
        memcpy(buf + used, piece, width);
        used += width;
        i += take;
    }
    buf[used] = '\0';
    return buf;
}

void check_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "larder: internal check failed: %s at %s:%d; please report this with the log\n", cond,
            file, line);
    abort();
}
