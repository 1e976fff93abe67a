/* The turn of a writer, where nobody else has it for long: a flock that is tried a few times, and a
 * look at whether its file still has a name. */
#define _DEFAULT_SOURCE
#include "native/native.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

/* A writer has its turn for some 30 us; to hand the wait for it to another thread costs 1 ms. */
enum { TRIES = 8, PAUSE_NANOSECONDS = 10000 };

/* Locked under the GIL: who waits for that keeps no other process from its turn. */
static bool lock(int fd) {
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK || i == TRIES) return false;
        const struct timespec pause = {.tv_nsec = PAUSE_NANOSECONDS};
        Py_BEGIN_ALLOW_THREADS
        nanosleep(&pause, NULL);
        Py_END_ALLOW_THREADS
    }
    return true;
}

/* take_turn(descriptor) -> True: locked, and the file is there. False: not locked, for whatever
 * reason; whoever queues finds out which. */
PyObject *turn_take(PyObject *module, PyObject *descriptor) {
    (void)module;
    const long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred() != NULL) return NULL;
    if (!lock((int)fd)) Py_RETURN_FALSE;
    struct stat status;
    if (fstat((int)fd, &status) == 0 && status.st_nlink != 0) Py_RETURN_TRUE;
    flock((int)fd, LOCK_UN);
    Py_RETURN_FALSE;
}

/* end_turn(descriptor): unlocks it. */
PyObject *turn_end(PyObject *module, PyObject *descriptor) {
    (void)module;
    const long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred() != NULL) return NULL;
    if (flock((int)fd, LOCK_UN) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}
