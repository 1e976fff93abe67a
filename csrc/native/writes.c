/* The rows that a small transaction has written, by single calls: tables/write/write_buffer.py.
 *
 *     writes.start(ground, snapshot, add_key, limits)    before anything else
 *     writes.offer(lock, deadline, told)                 from here on `put` and `find` may be called
 *     writes.put(table, op, row) -> bool                 False: nothing was done, Python does it
 *     writes.find(table, key) -> dict, None or NotImplemented
 *     writes.withdraw()                                  no more, until it is offered again
 *     writes.many(reader, op) -> bool                    such rows had better be written together
 *     writes.read(reader, key)                           as `find`
 *     writes.write(reader, op, values)                   a checked row; 0: nothing was done
 *
 * The ground is that of all transactions of a store: its tables, the readers of those that are
 * called by their names, the clock, and two names of attributes, a reader's and the clock's. */
#include <stdbool.h>

#include "native/native.h"
#include "native/reader.h"

enum { TABLES = 0, READERS = 1, CLOCK = 2, READER_NAME = 3, CLOCK_NAME = 4, GROUND = 5 };
enum { ENTRY_BYTES = 8 /* of a row in a payload beside its key and values */ };
enum { SETS = 8 /* that one row and its entries may want to be made, and one more */ };

typedef struct {
    PyObject_HEAD
    PyObject *ground, *sets, *add_key;
    PyObject *acquire, *release; /* the lock of the transaction; NULL: it is not offered */
    PyObject *told;              /* a list of what became of rows */
    uint64_t snapshot, deadline;
    uint64_t statements;
    int64_t rows, bytes;
    int64_t most_rows, most_bytes, few;
    PyObject *kind; /* the reader that was written by before, `alike` times with this operation */
    int64_t alike;
    int op;
    bool timed, replaces;
} writes_t;

static bool is_large(const writes_t *self) {
    return self->rows > self->most_rows || self->bytes > self->most_bytes;
}

/* Behind the first rows: so many of a kind came one after the other, which go through arrays; or
 * all of it will. */
static bool is_of_many(writes_t *self, PyObject *reader, int op) {
    if (is_large(self)) return true;
    if (self->rows < self->few) return false;
    if (self->kind == reader && self->op == op) {
        self->alike++;
    } else {
        PyObject *before = self->kind;
        self->kind = Py_NewRef(reader);
        self->op = op;
        self->alike = 0;
        Py_XDECREF(before);
    }
    return self->alike >= self->few;
}

/* What became of a row, for the list of those: a number, or of a PUT the way to find it out. */
static PyObject *outcome_of(writes_t *self, int op, int what, const reader_own_t *own,
                            const row_bytes_t *key) {
    if (op != PUT) return PyLong_FromLong(what);
    return Py_BuildValue("(OONK)", (PyObject *)self, own->place,
                         PyBytes_FromStringAndSize((const char *)key->data, (Py_ssize_t)key->len),
                         (unsigned long long)own->statement);
}

/* Forgets what came behind a statement; an error is set. */
static void undo(writes_t *self, uint64_t statement) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethod((PyObject *)self, "_undo", "K", (unsigned long long)statement);
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
}

/* Writes a checked row. A new reference: what became of it, or 0 where nothing was done. */
static PyObject *write_row(writes_t *self, reader_t *reader, int op, PyObject *values) {
    const bool blind = !reader_is_indexed(reader) && row_table_is_whole(reader_table(reader), values);
    if (op == PUT && !blind) op = UPSERT;
    const uint64_t before = self->statements;
    reader_own_t own = {.sets = self->sets,
                        .add_key = self->add_key,
                        .snapshot = self->snapshot,
                        .statements = &self->statements};
    row_bytes_t key;
    row_bytes_init(&key);
    int what = row_write(reader, op, values, &own, &key);
    for (int tries = 0; what == NO_SET; tries++) {
        PyObject *made = PyObject_CallMethod((PyObject *)self, "_of", "O", own.place);
        Py_XDECREF(made);
        Py_CLEAR(own.place);
        key.len = 0;
        what = made == NULL ? FAILED : row_write(reader, op, values, &own, &key);
        if (what == NO_SET && tries == SETS) what = LEFT;
    }
    if (what == FAILED && self->statements != before) undo(self, before);
    PyObject *outcome = NULL;
    if (what == LEFT) {
        outcome = PyLong_FromLong(LEFT);
    } else if (what != FAILED) {
        self->rows += own.rows;
        self->bytes += (int64_t)own.bytes + ENTRY_BYTES * own.rows;
        if (what != INSERTED || op == PUT || own.rows > 1) self->replaces = true;
        outcome = outcome_of(self, op, what, &own, &key);
    }
    Py_XDECREF(own.place);
    row_bytes_free(&key);
    return outcome;
}

/* -- by the table and the row as callers give them ------------------------------------------- */

static PyObject *ground_of(const writes_t *self, int i) { return PyTuple_GetItem(self->ground, i); }

/* The reader of a table by its name or handle, a new reference; NULL, maybe with an error set. */
static reader_t *reader_by(const writes_t *self, PyObject *table) {
    PyObject *found;
    if (PyUnicode_CheckExact(table)) {
        found = PyDict_GetItemWithError(ground_of(self, READERS), table);
        Py_XINCREF(found);
    } else {
        found = PyObject_GetAttr(table, ground_of(self, READER_NAME));
        if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    }
    if (found == NULL) return NULL;
    reader_t *reader = reader_of(found);
    PyErr_Clear(); /* another kind of handle */
    if (reader != NULL && reader_is_current(reader, ground_of(self, TABLES), self->snapshot)) {
        return reader;
    }
    Py_DECREF(found);
    return NULL;
}

/* 1: it is offered, and in time; 0: it is not; -1: an error is set. */
static int is_at_hand(const writes_t *self) {
    if (self->release == NULL) return 0;
    if (!self->timed) return 1;
    return clock_allows(ground_of(self, CLOCK), ground_of(self, CLOCK_NAME), self->deadline);
}

/* Holds the lock of the transaction. What is to be called to free it; NULL, maybe with an error set:
 * it is not to be had at once. */
static PyObject *hold(const writes_t *self) {
    if (self->release == NULL) return NULL;
    PyObject *release = Py_NewRef(self->release);
    PyObject *had = PyObject_CallFunctionObjArgs(self->acquire, Py_False, NULL);
    const bool is_held = had == Py_True;
    Py_XDECREF(had);
    if (is_held) return release;
    Py_DECREF(release);
    return NULL;
}

/* Also where an error is set. */
static void let_go(PyObject *release) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *none = PyObject_CallNoArgs(release);
    Py_XDECREF(none);
    Py_DECREF(release);
    if (type != NULL) PyErr_Restore(type, value, trace);
}

static int put_locked(writes_t *self, PyObject *table, int op, PyObject *row) {
    const int at_hand = is_at_hand(self);
    reader_t *reader = at_hand == 1 ? reader_by(self, table) : NULL;
    if (reader == NULL) return PyErr_Occurred() == NULL ? 0 : -1;
    if (self->told == NULL) { /* withdrawn since */
        Py_DECREF(reader);
        return 0;
    }
    PyObject *values, *outcome = NULL;
    PyObject *told = Py_NewRef(self->told); /* a write may let other threads run */
    row_table_status_t status = ROW_TABLE_OTHER;
    const bool by_python = reader_is_indexed(reader) && reader_indexes(reader) == NULL;
    if (!by_python && !is_of_many(self, (PyObject *)reader, op)) {
        row_table_t *rows = reader_table(reader);
        status = op == DELETE ? row_table_check_key(rows, row, &values)
                              : row_table_check(rows, row, op != INSERT, &values);
    }
    int done = status == ROW_TABLE_ERROR ? -1 : 0;
    if (status == ROW_TABLE_OK) {
        outcome = write_row(self, reader, op, values);
        Py_DECREF(values);
        done = outcome == NULL ? -1 : !PyLong_Check(outcome) || PyLong_AsLong(outcome) != LEFT;
    }
    if (done == 1 && PyList_Append(told, outcome) < 0) done = -1;
    Py_XDECREF(outcome);
    Py_DECREF(told);
    Py_DECREF(reader);
    return done;
}

/* put(table, op, row) */
static PyObject *writes_put(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    writes_t *self = (writes_t *)object;
    const long op = n == 3 ? PyLong_AsLong(args[1]) : -1;
    if (op < INSERT || op > PUT) {
        PyErr_SetString(PyExc_TypeError, "put() takes a table, an operation and a row");
        return NULL;
    }
    PyObject *release = hold(self);
    if (release == NULL) return PyErr_Occurred() == NULL ? Py_NewRef(Py_False) : NULL;
    const int done = put_locked(self, args[0], (int)op, args[2]);
    let_go(release);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *find_row(writes_t *self, reader_t *reader, PyObject *key) {
    self->alike = 0; /* who reads between writes would have to wait for what waits */
    const reader_own_t own = {
        .sets = self->sets, .add_key = self->add_key, .snapshot = self->snapshot};
    return reader_find(reader, key, &own);
}

/* find(table, key) */
static PyObject *writes_find(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    writes_t *self = (writes_t *)object;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "find() takes a table and a key");
        return NULL;
    }
    PyObject *release = hold(self), *found = NULL;
    if (release == NULL) return PyErr_Occurred() == NULL ? Py_NewRef(Py_NotImplemented) : NULL;
    reader_t *reader = is_at_hand(self) == 1 ? reader_by(self, args[0]) : NULL;
    if (reader != NULL && self->release == NULL) { /* withdrawn since */
        Py_CLEAR(reader);
    }
    if (reader != NULL) {
        found = find_row(self, reader, args[1]);
        Py_DECREF(reader);
    } else if (PyErr_Occurred() == NULL) {
        found = Py_NewRef(Py_NotImplemented);
    }
    let_go(release);
    return found;
}

/* -- the type -------------------------------------------------------------------------------- */

static void forget(PyObject **field) {
    PyObject *before = *field;
    *field = NULL;
    Py_XDECREF(before);
}

static void withdraw(writes_t *self) {
    forget(&self->release);
    forget(&self->acquire);
    forget(&self->told);
}

static PyObject *writes_start(PyObject *object, PyObject *args) {
    writes_t *self = (writes_t *)object;
    PyObject *ground, *add_key;
    unsigned long long snapshot;
    long long most_rows, most_bytes, few;
    if (!PyArg_ParseTuple(args, "O!KO(LLL):start", &PyTuple_Type, &ground, &snapshot, &add_key,
                          &most_rows, &most_bytes, &few)) {
        return NULL;
    }
    if (self->sets != NULL || PyTuple_Size(ground) != GROUND ||
        !PyDict_CheckExact(PyTuple_GetItem(ground, READERS))) {
        PyErr_SetString(PyExc_TypeError, "start() takes the ground of a store, once");
        return NULL;
    }
    if ((self->sets = PyDict_New()) == NULL) return NULL;
    self->ground = Py_NewRef(ground);
    self->add_key = Py_NewRef(add_key);
    self->snapshot = snapshot;
    self->most_rows = most_rows;
    self->most_bytes = most_bytes;
    self->few = few;
    Py_RETURN_NONE;
}

static int require_started(const writes_t *self) {
    if (self->sets != NULL) return 0;
    PyErr_SetString(PyExc_TypeError, "start() comes first");
    return -1;
}

static PyObject *writes_offer(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    writes_t *self = (writes_t *)object;
    if (n != 3 || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "offer() takes a lock, a deadline and a list");
        return NULL;
    }
    if (require_started(self) < 0) return NULL;
    const bool timed = args[1] != Py_None;
    const uint64_t deadline = timed ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    if (PyErr_Occurred() != NULL) return NULL;
    PyObject *acquire = PyObject_GetAttrString(args[0], "acquire");
    PyObject *release = acquire == NULL ? NULL : PyObject_GetAttrString(args[0], "release");
    if (release == NULL) {
        Py_XDECREF(acquire);
        return NULL;
    }
    withdraw(self);
    self->timed = timed;
    self->deadline = deadline;
    self->told = Py_NewRef(args[2]);
    self->acquire = acquire;
    self->release = release;
    Py_RETURN_NONE;
}

static PyObject *writes_withdraw(PyObject *object, PyObject *none) {
    (void)none;
    withdraw((writes_t *)object);
    Py_RETURN_NONE;
}

static PyObject *writes_read(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "read() takes a reader and a key");
        return NULL;
    }
    reader_t *reader = reader_of(args[0]);
    if (reader == NULL || require_started((writes_t *)object) < 0) return NULL;
    return find_row((writes_t *)object, reader, args[1]);
}

static PyObject *writes_write(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    const long op = n == 3 ? PyLong_AsLong(args[1]) : -1;
    if (op < INSERT || op > PUT || !PyTuple_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "write() takes a reader, an operation and values");
        return NULL;
    }
    reader_t *reader = reader_of(args[0]);
    if (reader == NULL || require_started((writes_t *)object) < 0) return NULL;
    return write_row((writes_t *)object, reader, (int)op, args[2]);
}

static PyObject *writes_many(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    const long op = n == 2 ? PyLong_AsLong(args[1]) : -1;
    if (op < INSERT || op > PUT) {
        PyErr_SetString(PyExc_TypeError, "many() takes a reader and an operation");
        return NULL;
    }
    return PyBool_FromLong(is_of_many((writes_t *)object, args[0], (int)op));
}

/* count(rows, bytes): so many more, written by another way. */
static PyObject *writes_count(PyObject *object, PyObject *args) {
    writes_t *self = (writes_t *)object;
    long long rows, bytes;
    if (!PyArg_ParseTuple(args, "LL:count", &rows, &bytes)) return NULL;
    self->rows += rows;
    self->bytes += bytes + ENTRY_BYTES * rows;
    Py_RETURN_NONE;
}

/* step(): the number of the next statement. */
static PyObject *writes_step(PyObject *object, PyObject *none) {
    (void)none;
    return PyLong_FromUnsignedLongLong(++((writes_t *)object)->statements);
}

static PyObject *get_sets(PyObject *object, void *closure) {
    (void)closure;
    return require_started((writes_t *)object) < 0 ? NULL : Py_NewRef(((writes_t *)object)->sets);
}

static PyObject *get_statements(PyObject *object, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(((writes_t *)object)->statements);
}

static PyObject *get_large(PyObject *object, void *closure) {
    (void)closure;
    return PyBool_FromLong(is_large((writes_t *)object));
}

static PyObject *get_replaces(PyObject *object, void *closure) {
    (void)closure;
    return PyBool_FromLong(((writes_t *)object)->replaces);
}

static int set_replaces(PyObject *object, PyObject *value, void *closure) {
    (void)closure;
    const int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    if (is_true < 0) return -1;
    ((writes_t *)object)->replaces = is_true != 0;
    return 0;
}

static PyObject *writes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args;
    (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static int writes_traverse(PyObject *object, visitproc visit, void *arg) {
    writes_t *self = (writes_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->ground);
    Py_VISIT(self->sets);
    Py_VISIT(self->add_key);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->told);
    Py_VISIT(self->kind);
    return 0;
}

static int writes_clear(PyObject *object) {
    writes_t *self = (writes_t *)object;
    withdraw(self);
    forget(&self->kind);
    forget(&self->add_key);
    forget(&self->sets);
    forget(&self->ground);
    return 0;
}

static void writes_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    writes_clear(object);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL
static PyMethodDef methods[] = {
    {"count", writes_count, METH_VARARGS, NULL},
    {"find", FAST(writes_find)},
    {"many", FAST(writes_many)},
    {"offer", FAST(writes_offer)},
    {"put", FAST(writes_put)},
    {"read", FAST(writes_read)},
    {"start", writes_start, METH_VARARGS, NULL},
    {"step", writes_step, METH_NOARGS, NULL},
    {"withdraw", writes_withdraw, METH_NOARGS, NULL},
    {"write", FAST(writes_write)},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"memories", get_sets, NULL, NULL, NULL},
    {"replaces", get_replaces, set_replaces, NULL, NULL},
    {"statements", get_statements, NULL, NULL, NULL},
    {"too_large", get_large, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)writes_new},
    {Py_tp_dealloc, (void *)writes_dealloc},
    {Py_tp_traverse, (void *)writes_traverse},
    {Py_tp_clear, (void *)writes_clear},
    {Py_tp_methods, (void *)methods},
    {Py_tp_getset, (void *)fields},
    {0, NULL},
};

PyType_Spec writes_spec = {
    .name = "txnkv._native.Writes",
    .basicsize = sizeof(writes_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
