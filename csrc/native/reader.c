#include "native/reader.h"

#include <stdbool.h>

#include "native/native.h"
#include "codec/keys_inline.h"
#include "common/bytes.h"
#include "rowset/partition.h"

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

struct reader {
    PyObject_HEAD
    PyObject *table;   /* a row_table_t */
    PyObject *tables;  /* whose it is */
    PyObject *tablets; /* a tuple of published_t, each with its id and its tablet behind it */
    Py_ssize_t n;
    uint64_t since;    /* no snapshot below has the table as it is here */
    uint64_t epoch;    /* for which it was confirmed */
    PyObject *places;  /* a tuple: by which bytes of a key its tablet is found; of several alone */
    bool indexed;
    PyObject *indexes; /* a tuple, see index(); NULL: they are for Python */
};

enum { EACH = 3 /* of `tablets` */ };

static reader_place_t place_of(const reader_t *self, Py_ssize_t number) {
    return (reader_place_t){(published_t *)PyTuple_GetItem(self->tablets, EACH * number),
                            PyTuple_GetItem(self->tablets, EACH * number + 1),
                            PyTuple_GetItem(self->tablets, EACH * number + 2)};
}

bool reader_is_indexed(const reader_t *self) { return self->indexed; }

PyObject *reader_indexes(const reader_t *self) { return self->indexes; }

PyObject *reader_tablets(const reader_t *self) { return self->tablets; }

row_table_t *reader_table(const reader_t *self) { return (row_table_t *)self->table; }

static bool is_confirmed(const reader_t *self) {
    return self->n != 0 && self->epoch == published_epoch(place_of(self, 0).published);
}

bool reader_is_current(const reader_t *self, PyObject *tables, uint64_t snapshot) {
    return self->tables == tables && self->since <= snapshot && is_confirmed(self);
}

/* How many of ascending bounds, a tuple of bytes, are not above a key; -1: they are none. */
static Py_ssize_t bounds_below(PyObject *bounds, slice_t key) {
    Py_ssize_t low = 0, high = PyTuple_Size(bounds);
    while (low < high) {
        const Py_ssize_t middle = low + (high - low) / 2;
        char *data;
        Py_ssize_t len;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(bounds, middle), &data, &len) < 0) return -1;
        const slice_t bound = {(const uint8_t *)data, (size_t)len};
        if (slice_compare(bound, key) <= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* (from, len, how): some bytes of a key, len -1: all from there on, and the number of buckets that
 * they are hashed to, or bounds. */
static bool step_place(PyObject *step, const row_bytes_t *key, uint64_t *number) {
    const Py_ssize_t from = PyLong_AsSsize_t(PyTuple_GetItem(step, 0));
    Py_ssize_t len = PyLong_AsSsize_t(PyTuple_GetItem(step, 1));
    PyObject *how = PyTuple_GetItem(step, 2);
    if (from < 0 || (size_t)from >= key->len) return false;
    if (len < 0) len = (Py_ssize_t)key->len - from;
    if (len == 0 || (size_t)(from + len) > key->len) return false;
    const slice_t part = {key->data + from, (size_t)len};
    if (PyTuple_Check(how)) {
        const Py_ssize_t below = bounds_below(how, part);
        if (below < 0) return false;
        *number = *number * (uint64_t)(PyTuple_Size(how) + 1) + (uint64_t)below;
        return true;
    }
    const unsigned long buckets = PyLong_AsUnsignedLong(how);
    if (buckets < 1 || buckets > 65536) return false;
    uint16_t bucket;
    const keys_t keys = {part.data, part.len, NULL, (uint32_t)part.len, 1};
    partition_hash(&keys, (uint32_t)buckets, &bucket);
    *number = *number * buckets + bucket;
    return true;
}

bool reader_place(const reader_t *self, const row_bytes_t *key, reader_place_t *at) {
    const Py_ssize_t steps = PyTuple_Size(self->places);
    uint64_t number = 0;
    if (self->n == 0 || (self->n > 1 && steps == 0)) return false;
    for (Py_ssize_t i = 0; i < steps; i++) {
        if (!step_place(PyTuple_GetItem(self->places, i), key, &number)) return false;
    }
    if (number >= (uint64_t)self->n) return false;
    *at = place_of(self, (Py_ssize_t)number);
    return true;
}

/* Tells a transaction's read set of a key. */
static int note(PyObject *add_key, PyObject *id, const row_bytes_t *key) {
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)key->data, (Py_ssize_t)key->len);
    if (bytes == NULL) return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(add_key, id, bytes, NULL);
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
        case PUBLISHED_ERROR: return NULL;
        default: return Py_NewRef(Py_NotImplemented);
    }
}

static bool number_of(PyObject *given, unsigned long long *out) {
    *out = PyLong_AsUnsignedLongLong(given);
    return PyErr_Occurred() == NULL;
}

/* -- a transaction's own rows ---------------------------------------------------------------- */

mem_row_set_t *reader_set(const reader_own_t *own, const reader_place_t *at) {
    if (own->sets == NULL) return NULL;
    PyObject *set = PyDict_GetItemWithError(own->sets, at->id);
    return set == NULL ? NULL : mem_set_of(set);
}

static bool is_tombstone(const mem_entry_t *entry) { return entry->row_len == UINT32_MAX; }

published_status_t reader_look(const reader_place_t *at, const reader_own_t *own,
                               const row_bytes_t *key, row_bytes_t *row) {
    const mem_row_set_t *set = reader_set(own, at);
    if (set == NULL && PyErr_Occurred() != NULL) return PUBLISHED_ERROR;
    const mem_entry_t *entry =
        set == NULL ? NULL : mem_row_set_get(set, key->data, key->len, 0, UINT64_MAX);
    if (entry != NULL) {
        if (is_tombstone(entry)) return PUBLISHED_ABSENT;
        uint8_t *to = row_bytes_more(row, entry->row_len);
        if (to == NULL) return PUBLISHED_ERROR;
        copy_bytes(to, entry->row, entry->row_len);
        return PUBLISHED_FOUND;
    }
    if (own->add_key != Py_None && note(own->add_key, at->id, key) < 0) return PUBLISHED_ERROR;
    return published_find(at->published, NULL, key->data, key->len, own->snapshot, row);
}

PyObject *reader_find(reader_t *self, PyObject *given, const reader_own_t *own) {
    PyObject *tablets = Py_NewRef(self->tablets); /* a look may let other threads run */
    row_bytes_t key, row;
    reader_place_t at;
    row_bytes_init(&key);
    row_bytes_init(&row);
    published_status_t status = PUBLISHED_MISS;
    switch (row_table_key((row_table_t *)self->table, given, &key)) {
        case ROW_TABLE_OK:
            if (reader_place(self, &key, &at)) status = reader_look(&at, own, &key, &row);
            break;
        case ROW_TABLE_OTHER: break;
        case ROW_TABLE_ERROR: status = PUBLISHED_ERROR; break;
    }
    PyObject *made = answer(self, status, &key, &row);
    row_bytes_free(&key);
    row_bytes_free(&row);
    Py_DECREF(tablets);
    return made;
}

/* get(key, snapshot=None, add_key=None): the row, None, or NotImplemented for a miss; of the latest
 * snapshot also where it was not confirmed that the table is still as it is here. */
static PyObject *reader_get(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    unsigned long long snapshot = PUBLISHED_LATEST;
    if (n < 1 || n > 3) {
        PyErr_SetString(PyExc_TypeError, "get() takes a key, a snapshot and a function");
        return NULL;
    }
    if (n > 1 && args[1] != Py_None && !number_of(args[1], &snapshot)) return NULL;
    reader_t *self = (reader_t *)object;
    if (snapshot == PUBLISHED_LATEST && !is_confirmed(self)) return Py_NewRef(Py_NotImplemented);
    const reader_own_t none = {.add_key = n > 2 ? args[2] : Py_None, .snapshot = snapshot};
    return reader_find(self, args[0], &none);
}

/* -- the type -------------------------------------------------------------------------------- */

reader_t *reader_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)reader_new) return (reader_t *)object;
    PyErr_Format(PyExc_TypeError, "a Reader is needed, not %R", object);
    return NULL;
}

/* confirm(epoch): it is of the catalog as it was when the epoch was this one. */
static PyObject *reader_confirm(PyObject *object, PyObject *epoch) {
    unsigned long long number;
    if (!number_of(epoch, &number)) return NULL;
    ((reader_t *)object)->epoch = number;
    Py_RETURN_NONE;
}

/* forget(): the tablets of a former schema, whoever keeps the reader. */
static PyObject *reader_forget(PyObject *object, PyObject *none) {
    reader_t *self = (reader_t *)object;
    PyObject *before = self->tablets, *empty = PyTuple_New(0), *indexes = self->indexes;
    (void)none;
    if (empty == NULL) return NULL;
    self->n = 0;
    self->tablets = empty;
    self->indexes = NULL;
    Py_DECREF(before);
    Py_XDECREF(indexes);
    Py_RETURN_NONE;
}

static bool are_columns(const reader_t *self, PyObject *given) {
    bool all = PyTuple_Check(given);
    for (Py_ssize_t i = 0; all && i < PyTuple_Size(given); i++) {
        const long column = PyLong_AsLong(PyTuple_GetItem(given, i));
        all = column >= 0 && (uint32_t)column < row_table_columns(reader_table(self));
    }
    return all;
}

/* index(indexes): from now on rows are written with their entries. Of each index the reader of its
 * entries, the columns of the row that an entry has, in its order, those that it is by and the
 * row's key has not, and whether no two rows may have the same. */
static PyObject *reader_index(PyObject *object, PyObject *given) {
    reader_t *self = (reader_t *)object;
    bool all = PyTuple_Check(given);
    for (Py_ssize_t i = 0; all && i < PyTuple_Size(given); i++) {
        PyObject *each = PyTuple_GetItem(given, i);
        all = PyTuple_Check(each) && PyTuple_Size(each) == 4 &&
              reader_of(PyTuple_GetItem(each, 0)) != NULL &&
              are_columns(self, PyTuple_GetItem(each, 1)) &&
              are_columns(self, PyTuple_GetItem(each, 2));
    }
    if (!all) {
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_TypeError, "an index is (reader, columns, columns, unique)");
        }
        return NULL;
    }
    PyObject *before = self->indexes;
    self->indexes = Py_NewRef(given);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static bool are_places(PyObject *places) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(places); i++) {
        PyObject *step = PyTuple_GetItem(places, i);
        if (!PyTuple_Check(step) || PyTuple_Size(step) != 3) return false;
    }
    return true;
}

/* Reader(table, tables, tablets, since, places, indexed) */
static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *table, *tables, *tablets, *places;
    unsigned long long since;
    int indexed;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO!KO!p", &table, &tables, &PyTuple_Type, &tablets, &since,
                          &PyTuple_Type, &places, &indexed)) {
        return NULL;
    }
    if (!are_places(places)) {
        PyErr_SetString(PyExc_TypeError, "a place is (from, len, how)");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    reader_t *self = (reader_t *)alloc(type, 0);
    if (self == NULL) return NULL;
    self->table = Py_NewRef(table);
    self->tables = Py_NewRef(tables);
    self->tablets = Py_NewRef(tablets);
    self->n = PyTuple_Size(tablets) / EACH;
    self->since = since;
    self->places = Py_NewRef(places);
    self->indexed = indexed != 0;
    return (PyObject *)self;
}

static int reader_traverse(PyObject *object, visitproc visit, void *arg) {
    reader_t *self = (reader_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->table);
    Py_VISIT(self->tables);
    Py_VISIT(self->tablets);
    Py_VISIT(self->places);
    Py_VISIT(self->indexes);
    return 0;
}

static int reader_clear(PyObject *object) {
    reader_t *self = (reader_t *)object;
    Py_CLEAR(self->table);
    Py_CLEAR(self->tables);
    Py_CLEAR(self->tablets);
    Py_CLEAR(self->places);
    Py_CLEAR(self->indexes);
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
    {"by_entries", (PyCFunction)(void (*)(void))reader_by_entries, METH_FASTCALL, NULL},
    {"confirm", reader_confirm, METH_O, NULL},
    {"forget", reader_forget, METH_NOARGS, NULL},
    {"get", (PyCFunction)(void (*)(void))reader_get, METH_FASTCALL, NULL},
    {"index", reader_index, METH_O, NULL},
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
