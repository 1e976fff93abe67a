/* Holes in files: room that goes back to the disk while the file stays as long as it is. */
#define _GNU_SOURCE
#include "native/native.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

static int punch(int fd, long long offset, long long length) {
#if defined(FALLOC_FL_PUNCH_HOLE) && defined(FALLOC_FL_KEEP_SIZE)
    int failed;
    do {
        failed = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
    } while (failed != 0 && errno == EINTR);
    return failed;
#elif defined(F_PUNCHHOLE)
    fpunchhole_t hole;
    memset(&hole, 0, sizeof hole);
    hole.fp_offset = offset;
    hole.fp_length = length;
    return fcntl(fd, F_PUNCHHOLE, &hole);
#else
    (void)fd, (void)offset, (void)length;
    errno = EOPNOTSUPP;
    return -1;
#endif
}

/* What is in the file stays, also what another process writes meanwhile: not posix_fallocate, which
 * writes to each block itself where the file system does not know how. */
static int fill(int fd, long long length) {
#if defined(FALLOC_FL_KEEP_SIZE)
    int failed;
    do {
        failed = fallocate(fd, 0, 0, length);
    } while (failed != 0 && errno == EINTR);
    return failed != 0 && errno == EOPNOTSUPP ? 0 : failed;
#else
    (void)fd, (void)length;
    return 0;
#endif
}

/* punch_hole(descriptor, offset, length): these bytes are zeros, and blocks of the disk that lie
 * wholly in them are free. OSError: EOPNOTSUPP where the file system has no holes. */
PyObject *hole_punch(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "punch_hole(descriptor, offset, length)");
        return NULL;
    }
    const long fd = PyLong_AsLong(args[0]);
    const long long offset = PyLong_AsLongLong(args[1]);
    const long long length = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() != NULL) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = punch((int)fd, offset, length);
    Py_END_ALLOW_THREADS
    if (failed != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* fill_holes(descriptor, length): the first bytes have blocks of the disk, as far as the file system
 * gives some. */
PyObject *hole_fill(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "fill_holes(descriptor, length)");
        return NULL;
    }
    const long fd = PyLong_AsLong(args[0]);
    const long long length = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() != NULL) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = fill((int)fd, length);
    Py_END_ALLOW_THREADS
    if (failed != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}
