/* LMDB's lock of writers where it is a semaphore with a name, as on macOS: nobody gives it back when
 * its holder dies; storage/lmdb_open.py.
 *
 *     WriterLock(descriptor)   of lock.mdb, which is mapped: LMDB's locks of the process go when one
 *                              of its descriptors is closed, so none stays open
 *     lock.named               False: LMDB has a mutex there, or was not opened yet
 *     lock.free(last) -> bool  gives it back, if it is taken. The caller knows that nobody who lives
 *                              has it; `last` is the number of the last transaction in the file, on
 *                              which the next writer builds (so does LMDB, where it has a mutex) */
#define _DEFAULT_SOURCE
#include "native/native.h"

#include <errno.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

/* MDB_txninfo: magic, format, the name of the readers' semaphore, the last transaction, the number
 * of slots; in the next line of the cache, the name of the writers' one. */
enum { OF_READERS = 8, LAST = 40, OF_WRITERS = 64, NAME_BYTES = 32, HEAD_BYTES = 128 };

typedef struct {
    PyObject_HEAD
    char *head; /* NULL: none */
} lock_t;

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int descriptor;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "i", &descriptor)) return NULL;
    void *head = mmap(NULL, HEAD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (head == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    lock_t *lock = (lock_t *)alloc(type, 0);
    if (lock == NULL)
        munmap(head, HEAD_BYTES);
    else
        lock->head = head;
    return (PyObject *)lock;
}

static void lock_dealloc(PyObject *object) {
    lock_t *lock = (lock_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (lock->head != NULL) munmap(lock->head, HEAD_BYTES);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static bool is_named(const lock_t *lock) {
    return memcmp(lock->head + OF_READERS, "/MDBr", 5) == 0 &&
           memcmp(lock->head + OF_WRITERS, "/MDBw", 5) == 0;
}

/* 1: it was taken, and is not any more; 0: it was not; -1: see errno. */
static int give_back(lock_t *lock, sem_t *semaphore, size_t last) {
    int failed;
    do failed = sem_trywait(semaphore);
    while (failed != 0 && errno == EINTR);
    if (failed != 0 && errno != EAGAIN) return -1;
    if (failed != 0) memcpy(lock->head + LAST, &last, sizeof last);
    return sem_post(semaphore) != 0 ? -1 : failed != 0;
}

static PyObject *lock_free(PyObject *object, PyObject *number) {
    lock_t *lock = (lock_t *)object;
    char name[NAME_BYTES + 1] = {0};
    const size_t last = PyLong_AsSize_t(number);
    if (PyErr_Occurred() != NULL) return NULL;
    if (!is_named(lock)) Py_RETURN_FALSE;
    memcpy(name, lock->head + OF_WRITERS, NAME_BYTES);
    sem_t *semaphore = sem_open(name, 0);
    if (semaphore == SEM_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    const int freed = give_back(lock, semaphore, last), error = errno;
    sem_close(semaphore);
    errno = error;
    return freed < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyBool_FromLong(freed);
}

static PyObject *get_named(PyObject *object, void *closure) {
    (void)closure;
    return PyBool_FromLong(is_named((lock_t *)object));
}

static PyMethodDef methods[] = {
    {"free", lock_free, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"named", get_named, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)lock_new},
    {Py_tp_dealloc, (void *)lock_dealloc},
    {Py_tp_methods, (void *)methods},
    {Py_tp_getset, (void *)fields},
    {0, NULL},
};

PyType_Spec writer_lock_spec = {
    .name = "txnkv._native.WriterLock",
    .basicsize = sizeof(lock_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
