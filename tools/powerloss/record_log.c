/* Which files are recorded, and the writing of the log. */
#define _GNU_SOURCE
#include "record_log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct record {
    uint32_t magic;
    uint16_t kind;
    uint16_t flags;
    uint64_t call; /* the same in BEGIN and END */
    uint64_t inode;
    int64_t offset; /* END: what the call returned */
    uint64_t data_bytes;
    uint32_t path_bytes;
    uint32_t other_bytes;
};
_Static_assert(sizeof(struct record) == 48, "the reader unpacks 48 bytes");

static const uint32_t MAGIC = 0x53534c50; /* "PLSS" */
enum { HIGH_DESCRIPTOR = 900, PARTS_MAX = 1024 };

int log_fd = -1;
static char root[PATH_MAX], marks[PATH_MAX];
static size_t root_length;
static _Atomic uint32_t calls;

void fail(const char *what) {
    fprintf(stderr, "recording: %s: %s\n", what, strerror(errno));
    abort();
}

__attribute__((constructor)) static void start(void) {
    const char *log = getenv("TXNKV_RECORD_LOG");
    const char *folder = getenv("TXNKV_RECORD_ROOT");
    const char *mark = getenv("TXNKV_RECORD_MARKS");
    if (log == NULL || folder == NULL || mark == NULL) return;
    snprintf(root, sizeof root, "%s", folder);
    snprintf(marks, sizeof marks, "%s", mark);
    root_length = strlen(root);
    int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, log, flags, 0600);
    if (fd < 0) fail(log);
    /* Far from where anybody closes or replaces low descriptors. */
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR);
    if (log_fd < 0) fail("duplicating the log's descriptor");
    syscall(SYS_close, fd);
}

/* -- what a call is about ------------------------------------------------------------ */

int is_below(const char *path) {
    return strncmp(path, root, root_length) == 0 &&
           (path[root_length] == '/' || path[root_length] == '\0');
}

int is_marks(const char *path) { return strcmp(path, marks) == 0; }

int path_of(int fd, char *path) {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = '\0';
    return 1;
}

int absolute(int folder, const char *name, char *path) {
    char base[PATH_MAX];
    if (name == NULL) return 0;
    if (name[0] == '/') {
        base[0] = '\0';
    } else if (folder == AT_FDCWD) {
        if (getcwd(base, sizeof base) == NULL) return 0;
    } else if (!path_of(folder, base)) {
        return 0;
    }
    int length = snprintf(path, PATH_MAX, "%s%s%s", base, name[0] == '/' ? "" : "/", name);
    return length > 0 && length < PATH_MAX;
}

uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0 ? found.st_ino : 0;
}

int known(int fd, char *path) {
    return log_fd >= 0 && fd >= 0 && fd != log_fd && path_of(fd, path) && is_below(path);
}

/* -- the log ------------------------------------------------------------------------- */

static void append(struct record *record, const char *path, const char *other,
                   const struct iovec *data, int parts) {
    struct iovec all[PARTS_MAX + 3];
    record->magic = MAGIC;
    record->path_bytes = path == NULL ? 0 : (uint32_t)strlen(path);
    record->other_bytes = other == NULL ? 0 : (uint32_t)strlen(other);
    size_t total = sizeof *record + record->path_bytes + record->other_bytes;
    all[0] = (struct iovec){record, sizeof *record};
    all[1] = (struct iovec){(void *)(uintptr_t)path, record->path_bytes};
    all[2] = (struct iovec){(void *)(uintptr_t)other, record->other_bytes};
    if (parts > PARTS_MAX - 3) {
        errno = EINVAL;
        fail("too many parts in one writev");
    }
    for (int i = 0; i < parts; i++) {
        all[i + 3] = data[i];
        record->data_bytes += data[i].iov_len;
    }
    total += record->data_bytes;
    if (syscall(SYS_writev, log_fd, all, parts + 3) != (long)total) fail("writing the log");
}

uint64_t begin(enum kind kind, int flags, uint64_t inode, int64_t offset, const char *path,
               const char *other, const struct iovec *data, int parts) {
    int saved = errno;
    uint64_t call = ((uint64_t)getpid() << 32) | atomic_fetch_add(&calls, 1);
    struct record record = {.kind = (uint16_t)kind,
                            .flags = (uint16_t)flags,
                            .call = call,
                            .inode = inode,
                            .offset = offset};
    append(&record, path, other, data, parts);
    errno = saved;
    return call;
}

void end(uint64_t call, uint64_t inode, int64_t result) {
    int saved = errno;
    struct record record = {.kind = END, .call = call, .inode = inode, .offset = result};
    append(&record, NULL, NULL, NULL, 0);
    errno = saved;
}
