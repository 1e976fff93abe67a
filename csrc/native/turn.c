/* The turn of a writer: a lock of its process, then a flock; storage/write_queue.py.
 *
 *     turn._lock, ._descriptor, ._owner   the lock; the file and the thread that has the turn, or None
 *     turn._refusing                      True: `take` gives it to nobody any more
 *     turn.take() -> bool                 the turn, where it is to be had nearly at once; False: who
 *                                         queues for it finds out why
 *     turn.release()                      ends a turn, however it was taken */
#define _DEFAULT_SOURCE
#include "native/native.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>

/* A writer has its turn for some 30 us; to hand the wait for it to another thread costs 1 ms. */
enum { TRIES = 8, PAUSE_NANOSECONDS = 10000 };

typedef struct {
    PyObject_HEAD
    PyObject *lock, *acquire_here, *release_here;
    unsigned long owner; /* 0: nobody */
    int descriptor;      /* -1: none */
    char is_refused;
} turn_t;

static PyObject *turn_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    turn_t *turn = (turn_t *)alloc(type, 0);
    if (turn != NULL) turn->descriptor = -1;
    return (PyObject *)turn;
}

static void forget_lock(turn_t *turn) {
    Py_CLEAR(turn->acquire_here);
    Py_CLEAR(turn->release_here);
    Py_CLEAR(turn->lock);
}

static void turn_dealloc(PyObject *object) {
    turn_t *turn = (turn_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    forget_lock(turn);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

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

/* Whether it is locked, and the file is there. */
static bool take_file(int fd) {
    struct stat status;
    if (!lock(fd)) return false;
    if (fstat(fd, &status) == 0 && status.st_nlink != 0) return true;
    flock(fd, LOCK_UN);
    return false;
}

static PyObject *turn_take(PyObject *object, PyObject *none) {
    turn_t *turn = (turn_t *)object;
    const unsigned long me = PyThread_get_thread_ident();
    (void)none;
    if (turn->owner == me || turn->acquire_here == NULL) Py_RETURN_FALSE;
    PyObject *had = PyObject_CallFunctionObjArgs(turn->acquire_here, Py_False, NULL);
    if (had != Py_True) return had;
    if (turn->descriptor >= 0 && !turn->is_refused && take_file(turn->descriptor)) {
        turn->owner = me;
        return had;
    }
    Py_DECREF(had);
    PyObject *released = PyObject_CallNoArgs(turn->release_here);
    if (released == NULL) return NULL;
    Py_DECREF(released);
    Py_RETURN_FALSE;
}

static PyObject *turn_release(PyObject *object, PyObject *none) {
    turn_t *turn = (turn_t *)object;
    (void)none;
    if (turn->release_here == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the turn has no lock");
        return NULL;
    }
    turn->owner = 0;
    const int failed = turn->descriptor < 0 || flock(turn->descriptor, LOCK_UN) == 0 ? 0 : errno;
    PyObject *released = PyObject_CallNoArgs(turn->release_here);
    if (failed == 0 || released == NULL) return released;
    Py_DECREF(released);
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *get_lock(PyObject *object, void *closure) {
    PyObject *lock = ((turn_t *)object)->lock;
    (void)closure;
    return Py_NewRef(lock == NULL ? Py_None : lock);
}

static int set_lock(PyObject *object, PyObject *lock, void *closure) {
    turn_t *turn = (turn_t *)object;
    (void)closure;
    forget_lock(turn);
    if (lock == NULL) return 0;
    turn->acquire_here = PyObject_GetAttrString(lock, "acquire");
    turn->release_here = PyObject_GetAttrString(lock, "release");
    turn->lock = Py_NewRef(lock);
    return turn->acquire_here == NULL || turn->release_here == NULL ? -1 : 0;
}

static PyObject *get_owner(PyObject *object, void *closure) {
    const unsigned long owner = ((turn_t *)object)->owner;
    (void)closure;
    if (owner == 0) Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(owner);
}

static int set_owner(PyObject *object, PyObject *value, void *closure) {
    const unsigned long owner = value == NULL || value == Py_None ? 0 : PyLong_AsUnsignedLong(value);
    (void)closure;
    if (PyErr_Occurred() != NULL) return -1;
    ((turn_t *)object)->owner = owner;
    return 0;
}

static PyObject *get_descriptor(PyObject *object, void *closure) {
    const int descriptor = ((turn_t *)object)->descriptor;
    (void)closure;
    if (descriptor < 0) Py_RETURN_NONE;
    return PyLong_FromLong(descriptor);
}

static int set_descriptor(PyObject *object, PyObject *value, void *closure) {
    const long descriptor = value == NULL || value == Py_None ? -1 : PyLong_AsLong(value);
    (void)closure;
    if (PyErr_Occurred() != NULL) return -1;
    ((turn_t *)object)->descriptor = (int)descriptor;
    return 0;
}

static PyMemberDef members[] = {
    {"_refusing", T_BOOL, offsetof(turn_t, is_refused), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"release", turn_release, METH_NOARGS, NULL},
    {"take", turn_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"_lock", get_lock, set_lock, NULL, NULL},
    {"_descriptor", get_descriptor, set_descriptor, NULL, NULL},
    {"_owner", get_owner, set_owner, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)turn_new},
    {Py_tp_dealloc, (void *)turn_dealloc},
    {Py_tp_methods, (void *)methods},
    {Py_tp_members, (void *)members},
    {Py_tp_getset, (void *)fields},
    {0, NULL},
};

PyType_Spec turn_spec = {
    .name = "txnkv._native.Turn",
    .basicsize = sizeof(turn_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
