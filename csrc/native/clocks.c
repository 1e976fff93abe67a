#define _POSIX_C_SOURCE 200809L
#include "native/native.h"

#include <time.h>

#define EPOCH_SECONDS INT64_C(1577836800) /* 2020-01-01 00:00 UTC */

static PyObject *micros(clockid_t clock, int64_t epoch) {
    struct timespec now;
    if (clock_gettime(clock, &now) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLongLong(((int64_t)now.tv_sec - epoch) * 1000000 + now.tv_nsec / 1000);
}

PyObject *clock_wall(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return micros(CLOCK_REALTIME, EPOCH_SECONDS);
}

PyObject *clock_monotonic(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return micros(CLOCK_MONOTONIC, 0);
}

int clock_allows(PyObject *clock, PyObject *name, uint64_t deadline) {
    PyObject *function = PyObject_GetAttr(clock, name);
    PyObject *now = function == NULL ? NULL : PyObject_CallNoArgs(function);
    Py_XDECREF(function);
    if (now == NULL) return -1;
    const uint64_t micros = PyLong_AsUnsignedLongLong(now);
    Py_DECREF(now);
    if (PyErr_Occurred() != NULL) return -1;
    return micros <= deadline;
}
