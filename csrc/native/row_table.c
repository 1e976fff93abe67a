#include "native/row_table.h"

#include <string.h>

#include "native/native.h"
#include "native/row_column.h"

static void drop_columns(row_table_t *table) {
    for (uint32_t i = 0; table->columns != NULL && i < table->n; i++) {
        row_column_spec_t *column = table->columns + i;
        Py_XDECREF(column->name);
        Py_XDECREF(column->exact);
        Py_XDECREF(column->zone);
        Py_XDECREF(column->to);
        Py_XDECREF(column->of);
    }
    PyMem_Free(table->columns);
    PyMem_Free(table->key);
}

static void table_dealloc(PyObject *self) {
    row_table_t *table = (row_table_t *)self;
    PyTypeObject *type = Py_TYPE(self);
    drop_columns(table);
    Py_XDECREF(table->empty);
    Py_XDECREF(table->error);
    Py_XDECREF(table->missing);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

/* -- making ------------------------------------------------------------------------------- */

static PyObject *or_null(PyObject *given) {
    if (given == Py_None) return NULL;
    Py_INCREF(given);
    return given;
}

static int take_column(row_column_spec_t *column, PyObject *given) {
    PyObject *name, *exact, *zone, *to, *of;
    int nullable, asks_zone;
    unsigned int code, width;
    if (!PyArg_ParseTuple(given, "UIIpOpOOO;a column", &name, &code, &width, &nullable, &exact,
                          &asks_zone, &zone, &to, &of)) {
        return -1;
    }
    const bool varies = code == ROW_TABLE_TEXT || code == ROW_TABLE_JSON || code == KEY_BYTES;
    if ((width == 0) != varies || width > 16) {
        PyErr_Format(PyExc_ValueError, "column %R: no %u bytes for code %u", name, width, code);
        return -1;
    }
    Py_INCREF(name);
    column->name = name;
    column->code = code;
    column->width = width;
    column->nullable = nullable != 0;
    column->exact = or_null(exact);
    if (asks_zone) {
        Py_INCREF(zone);
        column->zone = zone;
    }
    column->to = or_null(to);
    column->of = or_null(of);
    return 0;
}

static int take_columns(row_table_t *table, PyObject *columns, PyObject *key) {
    const Py_ssize_t n = PyTuple_Size(columns), n_key = PyTuple_Size(key);
    if (n < 0 || n > 1 << 16 || n_key < 0 || n_key > n) {
        PyErr_Format(PyExc_ValueError, "%zd columns, a key of %zd", n, n_key);
        return -1;
    }
    table->columns = PyMem_Calloc((size_t)n, sizeof *table->columns);
    table->key = PyMem_Calloc((size_t)n, sizeof *table->key);
    if (table->columns == NULL || table->key == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->n = (uint32_t)n;
    table->n_key = (uint32_t)n_key;
    for (uint32_t i = 0; i < table->n; i++) {
        if (take_column(table->columns + i, PyTuple_GetItem(columns, i)) < 0) return -1;
    }
    for (uint32_t i = 0; i < table->n_key; i++) {
        const long at = PyLong_AsLong(PyTuple_GetItem(key, i));
        if (at < 0 || at >= n || table->columns[at].in_key) {
            if (PyErr_Occurred() == NULL) PyErr_Format(PyExc_ValueError, "no column %ld", at);
            return -1;
        }
        table->key[i] = (uint32_t)at;
        table->columns[at].in_key = true;
    }
    uint32_t next = table->n_key;
    for (uint32_t i = 0; i < table->n; i++) {
        if (!table->columns[i].in_key) table->key[next++] = i;
    }
    return 0;
}

/* Finds the place of each slot, as row_layout_init does. */
static void lay_out(row_table_t *table) {
    uint32_t at = row_table_nulls(table);
    for (uint32_t i = table->n_key; i < table->n; i++) {
        row_column_spec_t *column = table->columns + table->key[i];
        column->at = at;
        at += column->width;
    }
    table->ends = at;
    for (uint32_t i = table->n_key; i < table->n; i++) {
        row_column_spec_t *column = table->columns + table->key[i];
        if (column->width != 0) continue;
        column->at = at;
        at += 4;
    }
    table->head = at;
}

static int make_empty(row_table_t *table) {
    table->empty = PyDict_New();
    if (table->empty == NULL) return -1;
    for (uint32_t i = 0; i < table->n; i++) {
        if (PyDict_SetItem(table->empty, table->columns[i].name, Py_None) < 0) return -1;
    }
    return 0;
}

PyObject *row_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *columns, *key, *error, *missing;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Table takes no names of arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!OO:Table", &PyTuple_Type, &columns, &PyTuple_Type, &key,
                          &error, &missing)) {
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    row_table_t *table = (row_table_t *)alloc(type, 0);
    if (table == NULL) return NULL;
    Py_INCREF(error);
    table->error = error;
    Py_INCREF(missing);
    table->missing = missing;
    if (take_columns(table, columns, key) < 0 || make_empty(table) < 0) {
        Py_DECREF(table);
        return NULL;
    }
    lay_out(table);
    return (PyObject *)table;
}

/* The same columns again; those that are not among the names of `empty` are not read. */
static int take_over(row_table_t *table, const row_table_t *from) {
    table->columns = PyMem_Calloc(from->n, sizeof *table->columns);
    table->key = PyMem_Calloc(from->n, sizeof *table->key);
    if (table->columns == NULL || table->key == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(table->columns, from->columns, from->n * sizeof *table->columns);
    memcpy(table->key, from->key, from->n * sizeof *table->key);
    table->n = from->n;
    table->n_key = from->n_key;
    table->ends = from->ends;
    table->head = from->head;
    Py_ssize_t read = 0;
    for (uint32_t i = 0; i < table->n; i++) {
        row_column_spec_t *column = table->columns + i;
        Py_XINCREF(column->name);
        Py_XINCREF(column->exact);
        Py_XINCREF(column->zone);
        Py_XINCREF(column->to);
        Py_XINCREF(column->of);
    }
    for (uint32_t i = 0; i < table->n; i++) {
        row_column_spec_t *column = table->columns + i;
        const int there = PyDict_Contains(table->empty, column->name);
        if (there < 0) return -1;
        column->unread = there == 0;
        read += there;
    }
    if (read == PyDict_Size(table->empty)) return 0;
    PyErr_Format(PyExc_ValueError, "of %R not all are columns", table->empty);
    return -1;
}

/* -- methods ------------------------------------------------------------------------------ */

static PyObject *as_bytes(const row_bytes_t *bytes) {
    return PyBytes_FromStringAndSize((const char *)bytes->data, (Py_ssize_t)bytes->len);
}

/* (key, row), None for OTHER. */
static PyObject *pair(row_table_status_t status, row_bytes_t *key, row_bytes_t *row) {
    PyObject *made = NULL;
    if (status == ROW_TABLE_OK) {
        PyObject *one = as_bytes(key), *two = one == NULL ? NULL : as_bytes(row);
        if (two != NULL) made = PyTuple_Pack(2, one, two);
        Py_XDECREF(one);
        Py_XDECREF(two);
    } else if (status == ROW_TABLE_OTHER) {
        Py_INCREF(Py_None);
        made = Py_None;
    }
    row_bytes_free(key);
    row_bytes_free(row);
    return made;
}

static PyObject *table_row(PyObject *self, PyObject *given) {
    row_bytes_t key, row;
    row_bytes_init(&key);
    row_bytes_init(&row);
    return pair(row_table_row((row_table_t *)self, given, &key, &row), &key, &row);
}

/* values(values, old=None) */
static PyObject *table_values(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    char *old = NULL;
    Py_ssize_t old_len = 0;
    if (n < 1 || n > 2) {
        PyErr_SetString(PyExc_TypeError, "values() takes the values of a row, and an older row");
        return NULL;
    }
    if (n == 2 && args[1] != Py_None && PyBytes_AsStringAndSize(args[1], &old, &old_len) < 0) {
        return NULL;
    }
    row_bytes_t key, row;
    row_bytes_init(&key);
    row_bytes_init(&row);
    return pair(row_table_values((row_table_t *)self, args[0], (const uint8_t *)old,
                                 (size_t)old_len, &key, &row),
                &key, &row);
}

/* missing(values): which are missing, a byte each; None: none is. */
static PyObject *table_missing(PyObject *self, PyObject *given) {
    const row_table_t *table = (const row_table_t *)self;
    if (!PyTuple_CheckExact(given)) {
        PyErr_SetString(PyExc_TypeError, "missing() takes a tuple of values");
        return NULL;
    }
    const Py_ssize_t n = PyTuple_Size(given);
    Py_ssize_t i = 0;
    while (i < n && PyTuple_GetItem(given, i) != table->missing) i++;
    if (i == n) Py_RETURN_NONE;
    PyObject *made = PyBytes_FromStringAndSize(NULL, n);
    if (made == NULL) return NULL;
    char *out = PyBytes_AsString(made);
    for (i = 0; i < n; i++) out[i] = PyTuple_GetItem(given, i) == table->missing;
    return made;
}

static PyObject *table_key(PyObject *self, PyObject *given) {
    row_bytes_t key;
    row_bytes_init(&key);
    const row_table_status_t status = row_table_key((row_table_t *)self, given, &key);
    PyObject *made = NULL;
    if (status == ROW_TABLE_OK) {
        made = as_bytes(&key);
    } else if (status == ROW_TABLE_OTHER) {
        Py_INCREF(Py_None);
        made = Py_None;
    }
    row_bytes_free(&key);
    return made;
}

/* The end of the keys that begin so: those of all columns are one. */
static PyObject *end_of(const row_table_t *table, PyObject *given, row_bytes_t *key) {
    if (PyTuple_Size(given) == (Py_ssize_t)table->n_key) {
        uint8_t *end = row_bytes_more(key, 1);
        if (end == NULL) return NULL;
        *end = 0;
        return as_bytes(key);
    }
    while (key->len > 0 && key->data[key->len - 1] == 0xFF) key->len--;
    if (key->len == 0) return Py_NewRef(Py_None);
    key->data[key->len - 1]++;
    return as_bytes(key);
}

/* beginning(values): (low, high) of the keys whose first columns have the values of a tuple, low <=
 * key < high, None: no end; None for OTHER. */
static PyObject *table_beginning(PyObject *self, PyObject *given) {
    row_bytes_t key;
    row_bytes_init(&key);
    const row_table_status_t status = row_table_beginning((row_table_t *)self, given, &key);
    PyObject *made = NULL;
    if (status == ROW_TABLE_OK) {
        PyObject *low = as_bytes(&key);
        PyObject *high = low == NULL ? NULL : end_of((row_table_t *)self, given, &key);
        if (high != NULL) made = PyTuple_Pack(2, low, high);
        Py_XDECREF(low);
        Py_XDECREF(high);
    } else if (status == ROW_TABLE_OTHER) {
        made = Py_NewRef(Py_None);
    }
    row_bytes_free(&key);
    return made;
}

static PyObject *table_dict(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    char *key, *row;
    Py_ssize_t key_len, row_len;
    if (n != 2) {
        PyErr_Format(PyExc_TypeError, "dict() takes a key and a row, not %zd arguments", n);
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[0], &key, &key_len) < 0) return NULL;
    if (PyBytes_AsStringAndSize(args[1], &row, &row_len) < 0) return NULL;
    return row_table_dict((row_table_t *)self, (const uint8_t *)key, (size_t)key_len,
                          (const uint8_t *)row, (size_t)row_len);
}

/* only(names): the same, whose dicts have these columns alone, in this order. */
static PyObject *table_only(PyObject *self, PyObject *names) {
    const row_table_t *from = (const row_table_t *)self;
    if (!PyTuple_CheckExact(names)) {
        PyErr_SetString(PyExc_TypeError, "only() takes a tuple of names");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(Py_TYPE(self), Py_tp_alloc);
    row_table_t *table = (row_table_t *)alloc(Py_TYPE(self), 0);
    if (table == NULL) return NULL;
    table->error = Py_NewRef(from->error);
    table->missing = Py_NewRef(from->missing);
    table->empty = PyDict_New();
    int failed = table->empty == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_Size(names); i++) {
        failed = PyDict_SetItem(table->empty, PyTuple_GetItem(names, i), Py_None) < 0;
    }
    if (!failed && take_over(table, from) == 0) return (PyObject *)table;
    Py_DECREF(table);
    return NULL;
}

/* fits(column, value): the value is known at sight. */
static PyObject *table_fits(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    row_table_t *table = (row_table_t *)self;
    const long column = n == 2 ? PyLong_AsLong(args[0]) : -1;
    if (column < 0 || column >= (long)table->n) {
        PyErr_SetString(PyExc_TypeError, "fits() takes the number of a column and a value");
        return NULL;
    }
    const row_table_status_t status = row_table_fits(table, (uint32_t)column, args[1]);
    return status == ROW_TABLE_ERROR ? NULL : PyBool_FromLong(status == ROW_TABLE_OK);
}

static PyMethodDef methods[] = {
    {"beginning", table_beginning, METH_O, NULL},
    {"fits", (PyCFunction)(void (*)(void))table_fits, METH_FASTCALL, NULL},
    {"key", table_key, METH_O, NULL},
    {"only", table_only, METH_O, NULL},
    {"missing", table_missing, METH_O, NULL},
    {"row", table_row, METH_O, NULL},
    {"values", (PyCFunction)(void (*)(void))table_values, METH_FASTCALL, NULL},
    {"dict", (PyCFunction)(void (*)(void))table_dict, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)row_table_new},
    {Py_tp_dealloc, (void *)table_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec row_table_spec = {
    .name = "txnkv._native.Table",
    .basicsize = sizeof(row_table_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
