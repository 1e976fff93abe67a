/* What the recorded calls (record.c) use: which files count, and the log. See record.c. */
#ifndef POWERLOSS_LOG_H
#define POWERLOSS_LOG_H

#include <stdint.h>
#include <sys/uio.h>

enum kind {
    END = 0,
    WRITE = 1,
    TRUNCATE = 2,
    ALLOCATE = 3,
    SYNC = 4,
    OPEN = 5,
    MKDIR = 6,
    RENAME = 7,
    REMOVE = 8,
    LINK = 9,
    MMAP = 10,
    MARK = 11,
};

enum { FLAG_DATA_ONLY = 1, FLAG_DURABLE = 2, FLAG_TRUNCATES = 4 };

/* Not to be seen by the process, whose own functions may have such names. */
#pragma GCC visibility push(hidden)

/* The descriptor of the log; -1 as long as nothing is recorded. */
extern int log_fd;

void fail(const char *what) __attribute__((noreturn));

/* Whether an absolute path lies below the recorded folder; whether it is the file of marks. */
int is_below(const char *path);
int is_marks(const char *path);

/* The path of a descriptor, and of a name at a folder's descriptor; 0 when there is none. Paths
 * have PATH_MAX bytes. */
int path_of(int fd, char *path);
int absolute(int folder, const char *name, char *path);

/* Whether a descriptor is of a recorded file; `path` is filled then. */
int known(int fd, char *path);

/* Inode numbers; 0 when there is no such file. */
uint64_t inode_of(int fd);
uint64_t inode_at(const char *path);

/* The two records of a call. errno stays as it is. Any thread may call them at any time. */
uint64_t begin(enum kind kind, int flags, uint64_t inode, int64_t offset, const char *path,
               const char *other, const struct iovec *data, int parts);
void end(uint64_t call, uint64_t inode, int64_t result);

#pragma GCC visibility pop

#endif
