/* 64-bit words of memory that processes share, as of a mapped file: common/shared.h, from Python.
 * An object holds the buffer: a thread may be at a word when another one gives the memory up. */
#include "native/native.h"

#include "common/shared.h"

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
} words_t;

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *memory;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Words takes no names of arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O:Words", &memory)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    words_t *words = (words_t *)alloc(type, 0);
    if (words == NULL) return NULL;
    if (PyObject_GetBuffer(memory, &words->buffer, PyBUF_WRITABLE) < 0) {
        Py_DECREF(words);
        return NULL;
    }
    return (PyObject *)words;
}

static void words_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&((words_t *)self)->buffer);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

int words_check(PyObject *object, Py_ssize_t word) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) != (void *)words_new) {
        PyErr_Format(PyExc_TypeError, "Words are needed, not %R", object);
        return -1;
    }
    if (word >= 0 && word < ((words_t *)object)->buffer.len / 8) return 0;
    PyErr_Format(PyExc_IndexError, "word %zd of %zd", word, ((words_t *)object)->buffer.len / 8);
    return -1;
}

uint64_t words_at(PyObject *object, size_t word) {
    const Py_buffer *buffer = &((words_t *)object)->buffer;
    return shared_load(buffer->buf, (size_t)buffer->len, 8 * word);
}

void words_put(PyObject *object, size_t word, uint64_t value) {
    const Py_buffer *buffer = &((words_t *)object)->buffer;
    shared_store(buffer->buf, (size_t)buffer->len, 8 * word, value);
}

void words_lift(PyObject *object, size_t word, uint64_t value) {
    const Py_buffer *buffer = &((words_t *)object)->buffer;
    const size_t len = (size_t)buffer->len;
    uint64_t known = shared_load(buffer->buf, len, 8 * word);
    while (known < value && !shared_cas(buffer->buf, len, 8 * word, known, value)) {
        known = shared_load(buffer->buf, len, 8 * word);
    }
}

/* The byte of a word; -1 with IndexError set. */
static Py_ssize_t offset_of(const words_t *words, PyObject *word) {
    const Py_ssize_t n = words->buffer.len / 8;
    const Py_ssize_t at = PyNumber_AsSsize_t(word, PyExc_IndexError);
    if (at >= 0 && at < n) return at * 8;
    PyErr_Format(PyExc_IndexError, "word %R of %zd", word, n);
    return -1;
}

static int value_of(PyObject *number, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(number);
    return *out == UINT64_MAX && PyErr_Occurred() != NULL ? -1 : 0;
}

static int wants(const char *what, Py_ssize_t n, Py_ssize_t wanted) {
    if (n == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", what, wanted, n);
    return -1;
}

static PyObject *words_load(PyObject *self, PyObject *word) {
    const words_t *words = (words_t *)self;
    const Py_ssize_t at = offset_of(words, word);
    if (at < 0) return NULL;
    return PyLong_FromUnsignedLongLong(
        shared_load(words->buffer.buf, (size_t)words->buffer.len, (size_t)at));
}

static PyObject *words_store(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const words_t *words = (words_t *)self;
    uint64_t value;
    if (wants("store", n, 2) < 0) return NULL;
    const Py_ssize_t at = offset_of(words, args[0]);
    if (at < 0 || value_of(args[1], &value) < 0) return NULL;
    shared_store(words->buffer.buf, (size_t)words->buffer.len, (size_t)at, value);
    Py_RETURN_NONE;
}

static PyObject *words_add(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const words_t *words = (words_t *)self;
    if (wants("add", n, 2) < 0) return NULL;
    const Py_ssize_t at = offset_of(words, args[0]);
    if (at < 0) return NULL;
    const uint64_t delta = PyLong_AsUnsignedLongLongMask(args[1]);
    if (delta == UINT64_MAX && PyErr_Occurred() != NULL) return NULL;
    return PyLong_FromUnsignedLongLong(
        shared_add(words->buffer.buf, (size_t)words->buffer.len, (size_t)at, delta));
}

static PyObject *words_swap(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const words_t *words = (words_t *)self;
    uint64_t expected, desired;
    if (wants("swap", n, 3) < 0) return NULL;
    const Py_ssize_t at = offset_of(words, args[0]);
    if (at < 0 || value_of(args[1], &expected) < 0 || value_of(args[2], &desired) < 0) return NULL;
    return PyBool_FromLong(shared_cas(words->buffer.buf, (size_t)words->buffer.len, (size_t)at,
                                      expected, desired));
}

/* lift(word, value): sets it, where it is less. */
static PyObject *lift(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    uint64_t value;
    if (wants("lift", n, 2) < 0) return NULL;
    const Py_ssize_t at = offset_of((words_t *)self, args[0]);
    if (at < 0 || value_of(args[1], &value) < 0) return NULL;
    words_lift(self, (size_t)at / 8, value);
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL
static PyMethodDef methods[] = {
    {"add", FAST(words_add)},
    {"lift", FAST(lift)},
    {"load", words_load, METH_O, NULL},
    {"store", FAST(words_store)},
    {"swap", FAST(words_swap)},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)words_new},
    {Py_tp_dealloc, (void *)words_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec words_spec = {
    .name = "txnkv._native.Words",
    .basicsize = sizeof(words_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
