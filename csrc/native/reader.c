/* The rows of a table one by one: read by keys as callers give them, as dicts, and written into a
 * transaction's own sets. */
#include <stdbool.h>

#include "native/native.h"
#include "native/published.h"
#include "common/bytes.h"
#include "rowset/partition.h"

typedef struct {
    PyObject_HEAD
    PyObject *table; /* a row_table_t */
    PyObject *tablets; /* a tuple of published_t, with the id of each behind it */
    Py_ssize_t n;
    bool hashed; /* a key's tablet follows from the hash of all of it */
} reader_t;

/* The number of a key's tablet; false: it does not follow from the key alone. */
static bool tablet_of(const reader_t *self, const row_bytes_t *key, Py_ssize_t *at) {
    uint16_t number = 0;
    const keys_t keys = {key->data, key->len, NULL, (uint32_t)key->len, 1};
    if (self->n > 1 && (!self->hashed || key->len == 0)) return false;
    if (self->n > 1) partition_hash(&keys, (uint32_t)self->n, &number);
    *at = number;
    return true;
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

/* -- a transaction's own rows ---------------------------------------------------------------- */

/* The set of a tablet among {id: MemRowSet}; NULL, maybe with an error set: there is none. */
static mem_row_set_t *own_of(const reader_t *self, PyObject *own, Py_ssize_t at) {
    PyObject *id = PyTuple_GetItem(self->tablets, 2 * at + 1);
    PyObject *set = id == NULL ? NULL : PyDict_GetItemWithError(own, id);
    return set == NULL ? NULL : mem_set_of(set);
}

static bool is_tombstone(const mem_entry_t *entry) { return entry->row_len == UINT32_MAX; }

/* Finds a row in a transaction's own set, NULL: it has none, or else in its snapshot, of which the
 * read set is told. */
static published_status_t look(const reader_t *self, Py_ssize_t at, const mem_row_set_t *own,
                               const row_bytes_t *key, unsigned long long snapshot,
                               PyObject *add_key, row_bytes_t *row) {
    const mem_entry_t *entry =
        own == NULL ? NULL : mem_row_set_get(own, key->data, key->len, 0, UINT64_MAX);
    if (entry != NULL) {
        if (is_tombstone(entry)) return PUBLISHED_ABSENT;
        uint8_t *to = row_bytes_more(row, entry->row_len);
        if (to == NULL) return PUBLISHED_ERROR;
        copy_bytes(to, entry->row, entry->row_len);
        return PUBLISHED_FOUND;
    }
    if (add_key != Py_None && note(self, add_key, at, key) < 0) return PUBLISHED_ERROR;
    published_t *tablet = (published_t *)PyTuple_GetItem(self->tablets, 2 * at);
    return published_find(tablet, NULL, key->data, key->len, snapshot, row);
}

/* get(key, snapshot=None, add_key=None, own=None): the row, None, or NotImplemented for a miss. */
static PyObject *reader_get(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    reader_t *self = (reader_t *)object;
    unsigned long long snapshot = PUBLISHED_LATEST;
    if (n < 1 || n > 4 || (n > 3 && args[3] != Py_None && !PyDict_CheckExact(args[3]))) {
        PyErr_SetString(PyExc_TypeError, "get() takes a key, a snapshot, a function and a dict");
        return NULL;
    }
    if (n > 1 && !number_of(args[1], &snapshot)) return NULL;
    row_bytes_t key, row;
    Py_ssize_t at;
    row_bytes_init(&key);
    row_bytes_init(&row);
    published_status_t status = PUBLISHED_MISS;
    const mem_row_set_t *own = NULL;
    switch (row_table_key((row_table_t *)self->table, args[0], &key)) {
        case ROW_TABLE_OK:
            if (!tablet_of(self, &key, &at)) break;
            if (n > 3 && args[3] != Py_None) own = own_of(self, args[3], at);
            status = own == NULL && PyErr_Occurred() != NULL
                         ? PUBLISHED_ERROR
                         : look(self, at, own, &key, snapshot, n > 2 ? args[2] : Py_None, &row);
            break;
        case ROW_TABLE_OTHER: break;
        case ROW_TABLE_ERROR: status = PUBLISHED_ERROR; break;
    }
    PyObject *made = answer(self, status, &key, &row);
    row_bytes_free(&key);
    row_bytes_free(&row);
    return made;
}

/* What an operation makes of a key: tables/operations.py has the table. A PUT is an upsert of whole
 * rows of which nobody asks whether they were there. */
enum { INSERT = 0, UPSERT = 1, UPDATE = 2, DELETE = 3, PUT = 4 };

static bool is_refused(int op, bool there) {
    return there ? op == INSERT : op == UPDATE || op == DELETE;
}

/* What became of a row, in the low bits of an answer; 0 is left to Python. */
enum { INSERTED = 1, UPDATED = 2, DELETED = 3, WHAT_BITS = 2 };

/* Writes the row of a key into a transaction's own set. */
static int64_t put_row(reader_t *self, int op, PyObject *values, mem_row_set_t *own,
                        uint64_t number, published_status_t found, const row_bytes_t *key,
                        const row_bytes_t *old, row_bytes_t *row) {
    const bool there = found == PUBLISHED_FOUND;
    const uint8_t *bytes = NULL;
    if (op != DELETE) {
        row_table_t *table = (row_table_t *)self->table;
        row_bytes_t again;
        row_bytes_init(&again);
        const row_table_status_t status = row_table_values(
            table, values, there && op != INSERT ? old->data : NULL, old->len, &again, row);
        row_bytes_free(&again);
        if (status != ROW_TABLE_OK) return 0;
        bytes = row->data;
    }
    if (mem_row_set_put(own, key->data, key->len, number, bytes, row->len) != STATUS_OK) return 0;
    const int64_t what = op == DELETE ? DELETED : there ? UPDATED : INSERTED;
    return (int64_t)(key->len + row->len) << WHAT_BITS | what;
}

/* write(op, values, own, number, snapshot, add_key): takes one row into the sets {id: MemRowSet} of
 * a transaction as its statement `number`. The bytes of key and row, shifted, with what became of
 * it; below 0: nothing yet, for the tablet of number -1 - n has no set so far; 0: it is refused, or
 * the way through Python knows. */
static PyObject *reader_write(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    reader_t *self = (reader_t *)object;
    row_table_t *table = (row_table_t *)self->table;
    unsigned long long number, snapshot;
    const long op = n == 6 ? PyLong_AsLong(args[0]) : -1;
    if (op < INSERT || op > PUT || !PyDict_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "write() takes op, values, own, number, snapshot, add_key");
        return NULL;
    }
    if (!number_of(args[3], &number) || !number_of(args[4], &snapshot)) return NULL;
    row_bytes_t key, old, row;
    Py_ssize_t at;
    int64_t done = 0;
    row_bytes_init(&key);
    row_bytes_init(&old);
    row_bytes_init(&row);
    const row_table_status_t known = op == DELETE ? row_table_key_values(table, args[1], &key)
                                                  : row_table_key_of(table, args[1], &key);
    if (known == ROW_TABLE_OK && tablet_of(self, &key, &at)) {
        mem_row_set_t *own = own_of(self, args[2], at);
        published_status_t found = PUBLISHED_MISS;
        if (own != NULL || PyErr_Occurred() == NULL) {
            found = op == PUT ? PUBLISHED_ABSENT
                              : look(self, at, own, &key, snapshot, args[5], &old);
        }
        const bool known_row = found == PUBLISHED_FOUND || found == PUBLISHED_ABSENT;
        if (known_row && !is_refused((int)op, found == PUBLISHED_FOUND)) {
            done = own == NULL
                       ? -1 - (int64_t)at
                       : put_row(self, (int)op, args[1], own, number, found, &key, &old, &row);
        }
    }
    row_bytes_free(&key);
    row_bytes_free(&old);
    row_bytes_free(&row);
    /* Python tells of an error, on its own way; a signal's is none. */
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Clear();
    return PyLong_FromLongLong(done);
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
    {"write", (PyCFunction)(void (*)(void))reader_write, METH_FASTCALL, NULL},
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
