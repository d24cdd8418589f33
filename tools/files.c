/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CREDENTIALS_BYTES_MAX (256u << 10)

int file_read(const char *path, size_t most, char **out, size_t *n, struct err *e)
{
    struct stat st;
    char *p = NULL;
    size_t got = 0;
    int status = 0, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    *out = NULL;
    if (fd < 0)
        return err_sys(e, errno, "%s cannot be opened", path);
    if (fstat(fd, &st) < 0)
        status = err_sys(e, errno, "%s", path);
    else if (!S_ISREG(st.st_mode))
        status = err_set(e, ERR_INVALID, "%s is not a regular file", path);
    else if ((uint64_t)st.st_size > most)
        status = err_set(e, ERR_LIMIT, "%s has %lld bytes, at most %zu are expected", path,
                         (long long)st.st_size, most);
    else if (!(p = malloc((size_t)st.st_size + 1)))
        status = err_set(e, ERR_NO_MEMORY, "%s: no memory for %lld bytes", path, (long long)st.st_size);
    while (status == 0 && got < (size_t)st.st_size) {
        ssize_t r = read(fd, p + got, (size_t)st.st_size - got);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            status = err_sys(e, errno, "%s cannot be read", path);
        if (r <= 0)
            break;
        got += (size_t)r;
    }
    close(fd);
    if (status < 0) {
        free(p);
        return status;
    }
    p[got] = 0;
    *out = p;
    *n = got;
    return 0;
}

static int write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t r = write(fd, p, n);
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return -errno;
        p += r;
        n -= (size_t)r;
    }
    return fsync(fd) < 0 ? -errno : 0;
}

/* Makes the folder's entry durable; a file system that cannot is not an error here. */
static void sync_folder(const char *path)
{
    char folder[4096];
    const char *slash = strrchr(path, '/');
    snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    int fd = open(*folder ? folder : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)!fsync(fd);
        close(fd);
    }
}

static int file_put(const char *path, const void *p, size_t n, mode_t mode, bool replace, struct err *e)
{
    char temporary[4096];
    if (snprintf(temporary, sizeof temporary, "%s.XXXXXX", path) >= (int)sizeof temporary)
        return err_set(e, ERR_INVALID, "the path %.100s... is too long", path);
    int fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno, "a file beside %s cannot be made", path);
    int status = fchmod(fd, mode) < 0 ? -errno : write_all(fd, p, n);
    if (close(fd) < 0 && status == 0)
        status = -errno;
    if (status == 0 && (replace ? rename(temporary, path) : link(temporary, path)) < 0)
        status = -errno;
    if (status < 0 || !replace)
        unlink(temporary);
    if (status < 0)
        return err_sys(e, -status, "%s cannot be written", path);
    sync_folder(path);
    return 0;
}

int file_replace(const char *path, const void *p, size_t n, mode_t mode, struct err *e)
{
    return file_put(path, p, n, mode, true, e);
}

int file_create(const char *path, const void *p, size_t n, mode_t mode, struct err *e)
{
    return file_put(path, p, n, mode, false, e);
}

int credentials_read(const char *path, struct credentials *out, struct err *e)
{
    char *text;
    size_t n;
    int status = file_read(path, CREDENTIALS_BYTES_MAX, &text, &n, e);
    if (status < 0)
        return status;
    status = credentials_decode(text, n, out, e);
    secret_wipe(text, n);
    free(text);
    return status < 0 ? err_prepend(e, "%s", path) : 0;
}

int credentials_write(const char *path, const struct credentials *c, bool replace, struct err *e)
{
    struct buf b = {0};
    int status = credentials_encode(c, &b, e);
    if (status == 0)
        status = file_put(path, b.p, b.n, 0600, replace, e);
    if (b.p)
        secret_wipe(b.p, b.n);
    buf_free(&b);
    return status;
}
