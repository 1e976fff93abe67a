/* Reads of the rows of a table one by one, by keys as callers give them, as dicts. */
#include <stdbool.h>

#include "native/native.h"
#include "native/published.h"
#include "rowset/partition.h"

typedef struct {
    PyObject_HEAD
    PyObject *table; /* a row_table_t */
    PyObject *tablets; /* a tuple of published_t, with the id of each behind it */
    Py_ssize_t n;
    bool hashed; /* a key's tablet follows from the hash of all of it */
} reader_t;

static published_t *tablet_of(const reader_t *self, const row_bytes_t *key, Py_ssize_t *at) {
    uint16_t number = 0;
    const keys_t keys = {key->data, key->len, NULL, (uint32_t)key->len, 1};
    if (self->n > 1 && (!self->hashed || key->len == 0)) return NULL;
    if (self->n > 1) partition_hash(&keys, (uint32_t)self->n, &number);
    *at = number;
    return (published_t *)PyTuple_GetItem(self->tablets, 2 * *at);
}

/* Tells a transaction's read set of a key. */
static int note(const reader_t *self, PyObject *add_key, Py_ssize_t at, const row_bytes_t *key) {
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)key->data, (Py_ssize_t)key->len);
    if (bytes == NULL) return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(
        add_key, PyTuple_GetItem(self->tablets, 2 * at + 1), bytes, NULL);
    Py_DECREF(bytes);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *answer(reader_t *self, published_status_t status, const row_bytes_t *key,
                        const row_bytes_t *row) {
    switch (status) {
        case PUBLISHED_FOUND:
            return row_table_dict((row_table_t *)self->table, key->data, key->len, row->data,
                                  row->len);
        case PUBLISHED_ABSENT: return Py_NewRef(Py_None);
        case PUBLISHED_MISS: return Py_NewRef(Py_NotImplemented);
        case PUBLISHED_ERROR: break;
    }
    return NULL;
}

static bool number_of(PyObject *given, unsigned long long *out) {
    *out = given == Py_None ? 0 : PyLong_AsUnsignedLongLong(given);
    return PyErr_Occurred() == NULL;
}

/* get(key, snapshot=None, add_key=None): the row, None, or NotImplemented for a miss. */
static PyObject *reader_get(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    reader_t *self = (reader_t *)object;
    unsigned long long snapshot = PUBLISHED_LATEST;
    if (n < 1 || n > 3) {
        PyErr_SetString(PyExc_TypeError, "get() takes a key, a snapshot and a function");
        return NULL;
    }
    if (n > 1 && !number_of(args[1], &snapshot)) return NULL;
    row_bytes_t key, row;
    Py_ssize_t at;
    row_bytes_init(&key);
    row_bytes_init(&row);
    published_status_t status = PUBLISHED_MISS;
    published_t *tablet = NULL;
    switch (row_table_key((row_table_t *)self->table, args[0], &key)) {
        case ROW_TABLE_OK: tablet = tablet_of(self, &key, &at); break;
        case ROW_TABLE_OTHER: break;
        case ROW_TABLE_ERROR: status = PUBLISHED_ERROR; break;
    }
    if (tablet != NULL && n > 2 && args[2] != Py_None && note(self, args[2], at, &key) < 0) {
        status = PUBLISHED_ERROR;
    } else if (tablet != NULL) {
        status = published_find(tablet, NULL, key.data, key.len, snapshot, &row);
    }
    PyObject *made = answer(self, status, &key, &row);
    row_bytes_free(&key);
    row_bytes_free(&row);
    return made;
}

/* Reader(table, tablets, hashed) */
static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *table, *tablets;
    int hashed;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OO!p", &table, &PyTuple_Type, &tablets, &hashed)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    reader_t *self = (reader_t *)alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(table);
    self->table = table;
    Py_INCREF(tablets);
    self->tablets = tablets;
    self->n = PyTuple_Size(tablets) / 2;
    self->hashed = hashed != 0;
    return (PyObject *)self;
}

static int reader_traverse(PyObject *object, visitproc visit, void *arg) {
    reader_t *self = (reader_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->table);
    Py_VISIT(self->tablets);
    return 0;
}

static int reader_clear(PyObject *object) {
    reader_t *self = (reader_t *)object;
    Py_CLEAR(self->table);
    Py_CLEAR(self->tablets);
    return 0;
}

static void reader_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    reader_clear(object);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)(void (*)(void))reader_get, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)reader_new},
    {Py_tp_dealloc, (void *)reader_dealloc},
    {Py_tp_traverse, (void *)reader_traverse},
    {Py_tp_clear, (void *)reader_clear},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec reader_spec = {
    .name = "txnkv._native.Reader",
    .basicsize = sizeof(reader_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
