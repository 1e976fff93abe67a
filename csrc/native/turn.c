/* The turn of a writer, where nobody else has it: a flock that is tried, and a look at whether its
 * file still has a name. */
#define _DEFAULT_SOURCE
#include "native/native.h"

#include <sys/file.h>
#include <sys/stat.h>

/* take_turn(descriptor) -> True: locked, and the file is there. False: not locked, for whatever
 * reason; whoever queues finds out which. */
PyObject *turn_take(PyObject *module, PyObject *descriptor) {
    (void)module;
    const long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred() != NULL) return NULL;
    if (flock((int)fd, LOCK_EX | LOCK_NB) != 0) Py_RETURN_FALSE;
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
