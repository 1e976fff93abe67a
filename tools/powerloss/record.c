/* Records what a process does to the files below a folder, for tools/powerloss/.
 *
 * Preloaded (LD_PRELOAD) into every process of a run. Each call that changes files is written to
 * a log as two records, BEGIN before the call and END after it: a write is certain to be covered
 * by a sync only if its END stands before the sync's BEGIN, and what the sync covers is certain
 * to be durable only behind the sync's END.
 *
 * The log is one file for all processes and threads, opened with O_APPEND. A record is one
 * writev, and the kernel appends those one after the other, so the place in the log is the order
 * of the run. Nothing is kept about descriptors: what one refers to is asked of the kernel at
 * each call, so dup, fork and exec need no care.
 *
 * TXNKV_RECORD_LOG    the log
 * TXNKV_RECORD_ROOT   real path of the folder; what is not below it is not recorded
 * TXNKV_RECORD_MARKS  real path of a file; what is written to it becomes MARK records
 *
 * Not recorded: stores through a shared mapping (MMAP records say that one was made, so that the
 * reader can refuse), and I/O past libc. Linux alone, 64 bits.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "record_log.h"

#define HOLE (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)

#define REAL(name)                                      \
    static __typeof__(name) *real;                      \
    if (real == NULL) {                                 \
        *(void **)(&real) = dlsym(RTLD_NEXT, #name);    \
    }

/* -- content ------------------------------------------------------------------------- */

/* -1: write at the descriptor's own place. */
static int begin_write(int fd, int64_t offset, const struct iovec *data, int parts,
                       uint64_t *call) {
    char path[PATH_MAX];
    if (log_fd < 0 || fd < 0 || fd == log_fd || !path_of(fd, path)) return 0;
    if (is_marks(path)) {
        *call = begin(MARK, 0, 0, 0, NULL, NULL, data, parts);
        return 1;
    }
    if (!is_below(path)) return 0;
    int mode = fcntl(fd, F_GETFL);
    struct stat found;
    if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) return 0;
    if (mode & O_APPEND) {
        offset = found.st_size;
    } else if (offset < 0) {
        offset = lseek(fd, 0, SEEK_CUR);
    }
    int flags = mode & O_DSYNC ? FLAG_DURABLE : 0;
    *call = begin(WRITE, flags, found.st_ino, offset, NULL, NULL, data, parts);
    return 1;
}

#define RECORDED_WRITE(fd, offset, data, parts, expression)             \
    uint64_t call;                                                      \
    int recorded = begin_write(fd, offset, data, parts, &call);         \
    ssize_t result = (expression);                                      \
    if (recorded) end(call, 0, result);                                 \
    return result

#define ONE_PART(buffer, count) \
    struct iovec part = {(void *)(uintptr_t)(buffer), count}

ssize_t write(int fd, const void *buffer, size_t count) {
    REAL(write);
    ONE_PART(buffer, count);
    RECORDED_WRITE(fd, -1, &part, 1, real(fd, buffer, count));
}

ssize_t pwrite(int fd, const void *buffer, size_t count, off_t offset) {
    REAL(pwrite);
    ONE_PART(buffer, count);
    RECORDED_WRITE(fd, offset, &part, 1, real(fd, buffer, count, offset));
}

ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
    REAL(pwrite64);
    ONE_PART(buffer, count);
    RECORDED_WRITE(fd, offset, &part, 1, real(fd, buffer, count, offset));
}

ssize_t writev(int fd, const struct iovec *data, int parts) {
    REAL(writev);
    RECORDED_WRITE(fd, -1, data, parts, real(fd, data, parts));
}

ssize_t pwritev(int fd, const struct iovec *data, int parts, off_t offset) {
    REAL(pwritev);
    RECORDED_WRITE(fd, offset, data, parts, real(fd, data, parts, offset));
}

ssize_t pwritev64(int fd, const struct iovec *data, int parts, off64_t offset) {
    REAL(pwritev64);
    RECORDED_WRITE(fd, offset, data, parts, real(fd, data, parts, offset));
}

/* Copies inside the kernel are refused, so that callers fall back to write(). */
ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t count,
                        unsigned flags) {
    char path[PATH_MAX];
    REAL(copy_file_range);
    if (known(out, path)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return real(in, in_at, out, out_at, count, flags);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    char path[PATH_MAX];
    REAL(sendfile);
    if (known(out, path)) {
        errno = EINVAL;
        return -1;
    }
    return real(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) {
    char path[PATH_MAX];
    REAL(sendfile64);
    if (known(out, path)) {
        errno = EINVAL;
        return -1;
    }
    return real(out, in, offset, count);
}

/* A call on a descriptor: BEGIN with the inode, the call, END. */
#define RECORDED_ON(fd, kind, flags, offset, data, parts, expression)                             \
    char path[PATH_MAX];                                                                          \
    if (!known(fd, path)) return (expression);                                                    \
    uint64_t call = begin(kind, flags, inode_of(fd), offset, path, NULL, data, parts);            \
    int result = (expression);                                                                    \
    end(call, 0, result);                                                                         \
    return result

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    RECORDED_ON(fd, TRUNCATE, 0, size, NULL, 0, real(fd, size));
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    RECORDED_ON(fd, TRUNCATE, 0, size, NULL, 0, real(fd, size));
}

int truncate(const char *name, off_t size) {
    int fd = open(name, O_WRONLY | O_CLOEXEC);
    int result = fd < 0 ? -1 : ftruncate(fd, size);
    if (fd >= 0) close(fd);
    return result;
}

int truncate64(const char *name, off64_t size) { return truncate(name, size); }

/* A hole: zeros are written, as far as the file goes. */
static int punched(int (*real)(int, int, off64_t, off64_t), int fd, int mode, off64_t offset,
                   off64_t length) {
    struct stat found;
    if (fstat(fd, &found) != 0) return -1;
    const off64_t left = found.st_size > offset ? found.st_size - offset : 0;
    const size_t count = (size_t)(length < left ? length : left);
    void *zeros = calloc(count + 1, 1);
    if (zeros == NULL) return -1;
    ONE_PART(zeros, count);
    uint64_t call;
    const int recorded = begin_write(fd, offset, &part, 1, &call);
    const int result = real(fd, mode, offset, length);
    if (recorded) end(call, 0, result < 0 ? result : (int64_t)count);
    free(zeros);
    return result;
}

/* ALLOCATE: the offset is where the file ends afterwards at least. Only the plain mode is known. */
static int64_t allocated_end(int mode, off64_t offset, off64_t length) {
    if (mode != 0 && mode != FALLOC_FL_KEEP_SIZE) {
        errno = EINVAL;
        fail("fallocate in a mode that is not recorded");
    }
    return mode == 0 ? offset + length : 0;
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(fallocate);
    if (mode == HOLE) return punched(real, fd, mode, offset, length);
    RECORDED_ON(fd, ALLOCATE, 0, allocated_end(mode, offset, length), NULL, 0,
                real(fd, mode, offset, length));
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    REAL(fallocate64);
    if (mode == HOLE) return punched(real, fd, mode, offset, length);
    RECORDED_ON(fd, ALLOCATE, 0, allocated_end(mode, offset, length), NULL, 0,
                real(fd, mode, offset, length));
}

/* These return an errno: END has its negative. */
#define RECORDED_POSIX(fd, offset, length)                                                        \
    char path[PATH_MAX];                                                                          \
    if (!known(fd, path)) return real(fd, offset, length);                                        \
    uint64_t call =                                                                               \
        begin(ALLOCATE, 0, inode_of(fd), allocated_end(0, offset, length), path, NULL, NULL, 0);  \
    int result = real(fd, offset, length);                                                        \
    end(call, 0, -result);                                                                        \
    return result

int posix_fallocate(int fd, off_t offset, off_t length) {
    REAL(posix_fallocate);
    RECORDED_POSIX(fd, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    RECORDED_POSIX(fd, offset, length);
}

/* -- durability ---------------------------------------------------------------------- */

int fsync(int fd) {
    REAL(fsync);
    RECORDED_ON(fd, SYNC, 0, 0, NULL, 0, real(fd));
}

int fdatasync(int fd) {
    REAL(fdatasync);
    RECORDED_ON(fd, SYNC, FLAG_DATA_ONLY, 0, NULL, 0, real(fd));
}

/* sync_file_range and msync promise nothing here: the one by its manual (it does not write the
 * metadata, nor empties the disk's cache), the other because mappings are not recorded. */

static void *recorded_map(void *map, int protection, int flags, int fd) {
    char path[PATH_MAX];
    if (map != MAP_FAILED && (protection & PROT_WRITE) && (flags & MAP_SHARED) && known(fd, path)) {
        end(begin(MMAP, 0, inode_of(fd), 0, path, NULL, NULL, 0), 0, 0);
    }
    return map;
}

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    void *map = real(address, length, protection, flags, fd, offset);
    return recorded_map(map, protection, flags, fd);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    void *map = real(address, length, protection, flags, fd, offset);
    return recorded_map(map, protection, flags, fd);
}

/* -- names --------------------------------------------------------------------------- */

static int begin_open(int folder, const char *name, int flags, uint64_t *call) {
    char path[PATH_MAX];
    if (log_fd < 0 || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE) return 0;
    if (!absolute(folder, name, path) || !is_below(path)) return 0;
    *call = begin(OPEN, flags & O_TRUNC ? FLAG_TRUNCATES : 0, 0, 0, path, NULL, NULL, 0);
    return 1;
}

#define RECORDED_OPEN(folder, name, flags, expression)                        \
    mode_t mode = 0;                                                          \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                    \
        va_list arguments;                                                    \
        va_start(arguments, flags);                                           \
        mode = va_arg(arguments, mode_t);                                     \
        va_end(arguments);                                                    \
    }                                                                         \
    uint64_t call;                                                            \
    int recorded = begin_open(folder, name, flags, &call);                    \
    int result = (expression);                                                \
    if (recorded) end(call, result < 0 ? 0 : inode_of(result), result);       \
    return result

int open(const char *name, int flags, ...) {
    REAL(open);
    RECORDED_OPEN(AT_FDCWD, name, flags, real(name, flags, mode));
}

int open64(const char *name, int flags, ...) {
    REAL(open64);
    RECORDED_OPEN(AT_FDCWD, name, flags, real(name, flags, mode));
}

int openat(int folder, const char *name, int flags, ...) {
    REAL(openat);
    RECORDED_OPEN(folder, name, flags, real(folder, name, flags, mode));
}

int openat64(int folder, const char *name, int flags, ...) {
    REAL(openat64);
    RECORDED_OPEN(folder, name, flags, real(folder, name, flags, mode));
}

int creat(const char *name, mode_t mode) { return open(name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int creat64(const char *name, mode_t mode) {
    return open64(name, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* A call on a name: END has the inode of what stands at the name then. */
#define RECORDED_AT(folder, name, kind, expression)                                     \
    char path[PATH_MAX];                                                                \
    if (log_fd < 0 || !absolute(folder, name, path) || !is_below(path)) return (expression); \
    uint64_t call = begin(kind, 0, 0, 0, path, NULL, NULL, 0);                          \
    int result = (expression);                                                          \
    end(call, (kind) == REMOVE ? 0 : inode_at(path), result);                           \
    return result

int mkdir(const char *name, mode_t mode) {
    REAL(mkdir);
    RECORDED_AT(AT_FDCWD, name, MKDIR, real(name, mode));
}

int mkdirat(int folder, const char *name, mode_t mode) {
    REAL(mkdirat);
    RECORDED_AT(folder, name, MKDIR, real(folder, name, mode));
}

int unlink(const char *name) {
    REAL(unlink);
    RECORDED_AT(AT_FDCWD, name, REMOVE, real(name));
}

int unlinkat(int folder, const char *name, int flags) {
    REAL(unlinkat);
    RECORDED_AT(folder, name, REMOVE, real(folder, name, flags));
}

int rmdir(const char *name) {
    REAL(rmdir);
    RECORDED_AT(AT_FDCWD, name, REMOVE, real(name));
}

#define RECORDED_TWO(old_folder, old, new_folder, new, kind, expression)                    \
    char from[PATH_MAX], to[PATH_MAX];                                                      \
    if (log_fd < 0 || !absolute(old_folder, old, from) || !absolute(new_folder, new, to) || \
        (!is_below(from) && !is_below(to)))                                                 \
        return (expression);                                                                \
    uint64_t call = begin(kind, 0, 0, 0, from, to, NULL, 0);                                \
    int result = (expression);                                                              \
    end(call, inode_at(to), result);                                                        \
    return result

int rename(const char *old, const char *new) {
    REAL(rename);
    RECORDED_TWO(AT_FDCWD, old, AT_FDCWD, new, RENAME, real(old, new));
}

int renameat(int old_folder, const char *old, int new_folder, const char *new) {
    REAL(renameat);
    RECORDED_TWO(old_folder, old, new_folder, new, RENAME, real(old_folder, old, new_folder, new));
}

int renameat2(int old_folder, const char *old, int new_folder, const char *new, unsigned flags) {
    REAL(renameat2);
    if (flags & RENAME_EXCHANGE) {
        errno = EINVAL;
        return -1;
    }
    RECORDED_TWO(old_folder, old, new_folder, new, RENAME,
                 real(old_folder, old, new_folder, new, flags));
}

int link(const char *old, const char *new) {
    REAL(link);
    RECORDED_TWO(AT_FDCWD, old, AT_FDCWD, new, LINK, real(old, new));
}

int linkat(int old_folder, const char *old, int new_folder, const char *new, int flags) {
    REAL(linkat);
    RECORDED_TWO(old_folder, old, new_folder, new, LINK,
                 real(old_folder, old, new_folder, new, flags));
}
