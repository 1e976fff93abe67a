/* A row that a transaction writes, and its entries in indexes: tables/table_index.py has the rules,
 * of which those are here for indexes that are ready. What is refused, or not known at sight, is
 * left to Python. */
#include <stdbool.h>
#include <string.h>

#include "native/native.h"
#include "native/reader.h"

enum { INDEXES = 8 /* of a table, at most; those of others are for Python */ };

/* An entry, or none. */
typedef struct {
    bool is;
    row_bytes_t key, rest;
} entry_t;

/* What becomes of a row's entries in an index. */
typedef struct {
    PyObject *tablets; /* of the place */
    reader_place_t at;
    bool moves;
    entry_t gone, come;
} change_t;

typedef struct {
    reader_place_t at;
    bool there;
    row_bytes_t old, row;
    PyObject *dict; /* of the old row, where it was wanted */
    change_t changes[INDEXES];
    size_t n;
} plan_t;

static bool is_refused(int op, bool there) {
    return there ? op == INSERT : op == UPDATE || op == DELETE;
}

static void entry_init(entry_t *entry) {
    entry->is = false;
    row_bytes_init(&entry->key);
    row_bytes_init(&entry->rest);
}

static void entry_free(entry_t *entry) {
    row_bytes_free(&entry->key);
    row_bytes_free(&entry->rest);
}

static void change_free(change_t *change) {
    entry_free(&change->gone);
    entry_free(&change->come);
    Py_DECREF(change->tablets);
}

static bool are_equal(const row_bytes_t *one, const row_bytes_t *other) {
    return one->len == other->len && memcmp(one->data, other->data, one->len) == 0;
}

/* Makes the bytes of a row, those of the old one for columns that are missing; OTHER is left to
 * Python. */
static bool make_row(reader_t *reader, int op, PyObject *values, plan_t *plan) {
    if (op == DELETE) return true;
    row_bytes_t key;
    row_bytes_init(&key);
    const uint8_t *old = plan->there && op != INSERT ? plan->old.data : NULL;
    const row_table_status_t status = row_table_values(reader_table(reader), values, old,
                                                       plan->old.len, &key, &plan->row);
    row_bytes_free(&key);
    return status == ROW_TABLE_OK;
}

/* -- entries --------------------------------------------------------------------------------- */

/* The entry of a row, of checked values or of the dict of an older one; false with an error set. */
static bool make_entry(const row_table_t *table, row_table_t *entries, PyObject *columns,
                       PyObject *values, PyObject *old, entry_t *entry) {
    const Py_ssize_t n = PyTuple_Size(columns);
    PyObject *given = PyTuple_New(n);
    bool is = given != NULL;
    for (Py_ssize_t i = 0; is && i < n; i++) {
        const uint32_t column = (uint32_t)PyLong_AsLong(PyTuple_GetItem(columns, i));
        PyObject *value = row_table_value(table, values, old, column);
        is = value != NULL && value != Py_None && PyTuple_SetItem(given, i, value) == 0;
        if (value == Py_None) Py_DECREF(value);
    }
    if (is) {
        is = row_table_values(entries, given, NULL, 0, &entry->key, &entry->rest) == ROW_TABLE_OK;
    }
    entry->is = is;
    Py_XDECREF(given);
    return PyErr_Occurred() == NULL;
}

/* A change leaves the columns as they are that an index is by. */
static bool leaves(const row_table_t *table, PyObject *columns, PyObject *values) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(columns); i++) {
        const uint32_t column = (uint32_t)PyLong_AsLong(PyTuple_GetItem(columns, i));
        if (!row_table_lacks(table, values, column)) return false;
    }
    return true;
}

/* No other row has the values of the entry that comes; false: one has, or it is not known. */
static bool is_free(const change_t *change, const reader_own_t *own) {
    row_bytes_t there;
    row_bytes_init(&there);
    const published_status_t found = reader_look(&change->at, own, &change->come.key, &there);
    const bool same = found == PUBLISHED_FOUND && are_equal(&there, &change->come.rest);
    row_bytes_free(&there);
    return same || found == PUBLISHED_ABSENT;
}

/* Plans what becomes of a row's entries in one index; false: it is left to Python. */
static bool plan_entry(const reader_t *reader, PyObject *index, int op, PyObject *values,
                       const reader_own_t *own, const row_bytes_t *key, plan_t *plan) {
    row_table_t *table = reader_table(reader);
    reader_t *of = reader_of(PyTuple_GetItem(index, 0));
    PyObject *columns = PyTuple_GetItem(index, 1), *beside = PyTuple_GetItem(index, 2);
    if (plan->there && op != DELETE && leaves(table, beside, values)) return true;
    if (plan->there && plan->dict == NULL) {
        plan->dict = row_table_dict(table, key->data, key->len, plan->old.data, plan->old.len);
        if (plan->dict == NULL) return false;
    }
    change_t *change = plan->changes + plan->n++;
    change->tablets = Py_NewRef(reader_tablets(of)); /* a look may let other threads run */
    entry_t *gone = &change->gone, *come = &change->come;
    entry_init(gone);
    entry_init(come);
    row_table_t *entries = reader_table(of);
    if (plan->there && !make_entry(table, entries, columns, NULL, plan->dict, gone)) return false;
    if (op != DELETE && !make_entry(table, entries, columns, values, plan->dict, come)) return false;
    change->moves = gone->is != come->is || (gone->is && !are_equal(&gone->key, &come->key));
    if (!change->moves && (!gone->is || are_equal(&gone->rest, &come->rest))) {
        plan->n--;
        change_free(change);
        return true;
    }
    if (!reader_place(of, gone->is ? &gone->key : &come->key, &change->at)) return false;
    const bool unique = PyTuple_GetItem(index, 3) == Py_True;
    return !unique || !come->is || !change->moves || is_free(change, own);
}

static bool plan_entries(const reader_t *reader, int op, PyObject *values, const reader_own_t *own,
                         const row_bytes_t *key, plan_t *plan) {
    PyObject *indexes = reader_indexes(reader);
    if (indexes == NULL || PyTuple_Size(indexes) > INDEXES) return false;
    Py_INCREF(indexes); /* what follows may let other threads run, which have others for it */
    bool planned = true;
    for (Py_ssize_t i = 0; planned && i < PyTuple_Size(indexes); i++) {
        planned = plan_entry(reader, PyTuple_GetItem(indexes, i), op, values, own, key, plan);
    }
    Py_DECREF(indexes);
    return planned;
}

/* -- writing --------------------------------------------------------------------------------- */

static int put(const reader_place_t *at, reader_own_t *own, const row_bytes_t *key,
               const row_bytes_t *row) {
    mem_row_set_t *set = reader_set(own, at);
    const size_t len = row == NULL ? 0 : row->len;
    own->statement = ++*own->statements;
    own->rows++;
    own->bytes += key->len + len;
    const uint8_t *data = row == NULL ? NULL : row->data;
    if (set == NULL) return -1;
    return mem_row_set_put(set, key->data, key->len, own->statement, data, len) == STATUS_OK ? 0 : -1;
}

/* The first tablet without a set, of the row and its entries; NULL: each has one. */
static const reader_place_t *without_set(const plan_t *plan, const reader_own_t *own) {
    if (reader_set(own, &plan->at) == NULL) return &plan->at;
    for (size_t i = 0; i < plan->n; i++) {
        if (reader_set(own, &plan->changes[i].at) == NULL) return &plan->changes[i].at;
    }
    return NULL;
}

/* Nothing of Python runs here; what did before may have put other sets there. */
static int write_planned(const plan_t *plan, int op, reader_own_t *own, const row_bytes_t *key) {
    const reader_place_t *lacking = without_set(plan, own);
    if (PyErr_Occurred() != NULL) return LEFT;
    if (lacking != NULL) {
        own->place = Py_NewRef(lacking->tablet);
        return NO_SET;
    }
    int failed = put(&plan->at, own, key, op == DELETE ? NULL : &plan->row);
    const uint64_t statement = own->statement;
    for (size_t i = 0; i < plan->n && failed == 0; i++) {
        const change_t *change = plan->changes + i;
        if (change->gone.is && change->moves) {
            failed = put(&change->at, own, &change->gone.key, NULL);
        }
        if (change->come.is && failed == 0) {
            failed = put(&change->at, own, &change->come.key, &change->come.rest);
        }
    }
    if (failed != 0) {
        PyErr_NoMemory();
        return FAILED;
    }
    own->statement = statement;
    own->place = Py_NewRef(plan->at.tablet);
    return op == DELETE ? DELETED : plan->there ? UPDATED : INSERTED;
}

static int write_at(reader_t *reader, int op, PyObject *values, reader_own_t *own,
                    const row_bytes_t *key, plan_t *plan) {
    published_status_t found = PUBLISHED_ABSENT;
    if (op != PUT) found = reader_look(&plan->at, own, key, &plan->old);
    if (found != PUBLISHED_FOUND && found != PUBLISHED_ABSENT) return LEFT;
    plan->there = found == PUBLISHED_FOUND;
    if (is_refused(op, plan->there) || !make_row(reader, op, values, plan)) return LEFT;
    if (reader_is_indexed(reader) && !plan_entries(reader, op, values, own, key, plan)) return LEFT;
    return write_planned(plan, op, own, key);
}

int row_write(reader_t *reader, int op, PyObject *values, reader_own_t *own, row_bytes_t *key) {
    row_table_t *table = reader_table(reader);
    PyObject *tablets = Py_NewRef(reader_tablets(reader)); /* a look may let other threads run */
    plan_t plan;
    int what = LEFT;
    plan.n = 0;
    plan.there = false;
    plan.dict = NULL;
    row_bytes_init(&plan.old);
    row_bytes_init(&plan.row);
    const row_table_status_t known = op == DELETE ? row_table_key_values(table, values, key)
                                                  : row_table_key_of(table, values, key);
    if (known == ROW_TABLE_OK && reader_place(reader, key, &plan.at)) {
        what = write_at(reader, op, values, own, key, &plan);
    }
    for (size_t i = 0; i < plan.n; i++) change_free(&plan.changes[i]);
    Py_XDECREF(plan.dict);
    row_bytes_free(&plan.old);
    row_bytes_free(&plan.row);
    Py_DECREF(tablets);
    /* Python tells of an error, on its own way; a signal's is none. */
    if (what == FAILED) return FAILED;
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception)) return FAILED;
    PyErr_Clear();
    return what;
}
