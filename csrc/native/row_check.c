/* Rows on their way into a session: checked where they are given, and put into a list.
 *
 *     check = RowCheck(table, slow, of_keys, partial)
 *     check.take(row) -> values       in schema order, or of a key; by `slow` if not known at sight
 *     add = check.adder(rows, room, more)
 *     add.add(row)                    the same, appended to `rows` while room[0] > 0; the bytes are
 *                                     taken from there. What is not known at sight, leaves columns
 *                                     out or has no room goes to more(check.take(row)). */
#include "native/native.h"

#include "native/row_column.h"

/* -- at sight ----------------------------------------------------------------------------- */

/* Tells whether a value is known at sight; OTHER when it is not. */
static row_table_status_t known(const row_column_spec_t *column, PyObject *value) {
    if (value == Py_None && column->nullable && !column->in_key) return ROW_TABLE_OK;
    if ((PyObject *)Py_TYPE(value) != column->exact) return ROW_TABLE_OTHER;
    if (column->zone != NULL) { /* an instant: `to` takes any of its zone */
        PyObject *zone = PyObject_GetAttrString(value, "tzinfo");
        if (zone == NULL) return row_slot_finish(ROW_TABLE_ERROR, true);
        Py_DECREF(zone);
        return zone == column->zone ? ROW_TABLE_OK : ROW_TABLE_OTHER;
    }
    if (column->to != NULL) {
        PyObject *made;
        uint8_t slot[ROW_SLOT];
        row_table_status_t status = row_slot_convert(column, value, true, &made);
        if (status == ROW_TABLE_OK) {
            if (column->width != 0) status = row_slot_put(column, made, true, slot);
            Py_DECREF(made);
        }
        return row_slot_finish(status, true);
    }
    if (column->width != 0) {
        uint8_t slot[ROW_SLOT];
        return row_slot_finish(row_slot_put(column, value, true, slot), true);
    }
    Py_ssize_t len;
    const char *bytes = row_slot_bytes(column, value, true, &len);
    return bytes == NULL ? row_slot_finish(ROW_TABLE_ERROR, true) : ROW_TABLE_OK;
}

/* The values of a dict by column, NULL without an error: it has not all of them, or others. */
static PyObject *tuple_of(row_table_t *table, PyObject *given, bool partial) {
    PyObject *made = PyTuple_New((Py_ssize_t)table->n);
    Py_ssize_t left = PyDict_Size(given);
    for (uint32_t i = 0; made != NULL && i < table->n; i++) {
        PyObject *value = PyDict_GetItemWithError(given, table->columns[i].name);
        if (value != NULL) {
            left--;
        } else if (partial && !table->columns[i].in_key && PyErr_Occurred() == NULL) {
            value = table->missing;
        } else {
            Py_DECREF(made);
            return NULL;
        }
        Py_INCREF(value);
        PyTuple_SetItem(made, (Py_ssize_t)i, value);
    }
    if (made == NULL || left == 0) return made;
    Py_DECREF(made);
    return NULL;
}

row_table_status_t row_table_check(row_table_t *table, PyObject *given, bool partial,
                                   PyObject **out) {
    const bool named = PyDict_CheckExact(given);
    if (!named && !PyTuple_CheckExact(given)) return ROW_TABLE_OTHER;
    if (!named && PyTuple_Size(given) != (Py_ssize_t)table->n) return ROW_TABLE_OTHER;
    PyObject *values = given;
    if (named) {
        values = tuple_of(table, given, partial);
        if (values == NULL) return PyErr_Occurred() != NULL ? ROW_TABLE_ERROR : ROW_TABLE_OTHER;
    } else {
        Py_INCREF(values);
    }
    row_table_status_t status = ROW_TABLE_OK;
    for (uint32_t i = 0; i < table->n && status == ROW_TABLE_OK; i++) {
        PyObject *value = PyTuple_GetItem(values, (Py_ssize_t)i);
        if (named && value == table->missing && !table->columns[i].in_key) continue;
        status = known(table->columns + i, value);
    }
    if (status == ROW_TABLE_OK) {
        *out = values;
    } else {
        Py_DECREF(values);
    }
    return status;
}

row_table_status_t row_table_check_key(row_table_t *table, PyObject *given, PyObject **out) {
    PyObject *values = given;
    if (table->n_key == 1) {
        values = PyTuple_Pack(1, given);
        if (values == NULL) return ROW_TABLE_ERROR;
    } else {
        if (!PyTuple_CheckExact(given) || PyTuple_Size(given) != (Py_ssize_t)table->n_key) {
            return ROW_TABLE_OTHER;
        }
        Py_INCREF(values);
    }
    row_table_status_t status = ROW_TABLE_OK;
    for (uint32_t i = 0; i < table->n_key && status == ROW_TABLE_OK; i++) {
        status = known(table->columns + table->key[i], PyTuple_GetItem(values, (Py_ssize_t)i));
    }
    if (status == ROW_TABLE_OK) {
        *out = values;
    } else {
        Py_DECREF(values);
    }
    return status;
}

row_table_status_t row_table_fits(row_table_t *table, uint32_t column, PyObject *value) {
    return known(table->columns + column, value);
}

bool row_table_is_whole(const row_table_t *table, PyObject *values) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++) {
        if (PyTuple_GetItem(values, i) == table->missing) return false;
    }
    return true;
}

bool row_table_lacks(const row_table_t *table, PyObject *values, uint32_t i) {
    return PyTuple_GetItem(values, (Py_ssize_t)i) == table->missing;
}

uint32_t row_table_columns(const row_table_t *table) { return table->n; }

PyObject *row_table_value(const row_table_t *table, PyObject *values, PyObject *old, uint32_t i) {
    PyObject *value = values == NULL ? table->missing : PyTuple_GetItem(values, (Py_ssize_t)i);
    if (value == table->missing) {
        value = old == NULL ? NULL : PyDict_GetItemWithError(old, table->columns[i].name);
    }
    if (value != NULL) return Py_NewRef(value);
    if (PyErr_Occurred() == NULL) PyErr_Format(PyExc_ValueError, "no value for column %u", i);
    return NULL;
}

uint64_t row_table_size(PyObject *values) {
    const Py_ssize_t n = PyTuple_Size(values);
    uint64_t size = 8 * (uint64_t)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *value = PyTuple_GetItem(values, i);
        if (PyUnicode_CheckExact(value)) size += (uint64_t)PyUnicode_GetLength(value);
        if (PyBytes_CheckExact(value)) size += (uint64_t)PyBytes_Size(value);
    }
    return size;
}

/* -- the type ----------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    row_table_t *table;
    PyObject *slow, *rows, *room, *more;
    int of_keys, partial;
} row_check_t;

static row_check_t *check_make(PyTypeObject *type, PyObject *table, PyObject *slow, int of_keys,
                               int partial) {
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    row_check_t *made = (row_check_t *)alloc(type, 0);
    if (made == NULL) return NULL;
    Py_INCREF(table);
    Py_INCREF(slow);
    made->table = (row_table_t *)table;
    made->slow = slow;
    made->of_keys = of_keys;
    made->partial = partial;
    return made;
}

static PyObject *check_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *table, *slow;
    int of_keys, partial;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "RowCheck takes no names of arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOpp:RowCheck", &table, &slow, &of_keys, &partial)) return NULL;
    if (PyType_GetSlot(Py_TYPE(table), Py_tp_new) != row_table_new) {
        PyErr_Format(PyExc_TypeError, "RowCheck takes a Table, not %R", table);
        return NULL;
    }
    return (PyObject *)check_make(type, table, slow, of_keys, partial);
}

static int check_traverse(PyObject *self, visitproc visit, void *arg) {
    row_check_t *check = (row_check_t *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(check->slow);
    Py_VISIT(check->rows);
    Py_VISIT(check->room);
    Py_VISIT(check->more);
    return 0;
}

static int check_clear(PyObject *self) {
    row_check_t *check = (row_check_t *)self;
    Py_CLEAR(check->slow);
    Py_CLEAR(check->rows);
    Py_CLEAR(check->room);
    Py_CLEAR(check->more);
    return 0;
}

static void check_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    check_clear(self);
    Py_XDECREF((PyObject *)((row_check_t *)self)->table);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static row_table_status_t at_sight(row_check_t *check, PyObject *given, PyObject **out) {
    return check->of_keys ? row_table_check_key(check->table, given, out)
                          : row_table_check(check->table, given, check->partial != 0, out);
}

static PyObject *check_take(PyObject *self, PyObject *given) {
    row_check_t *check = (row_check_t *)self;
    PyObject *values;
    const row_table_status_t status = at_sight(check, given, &values);
    if (status == ROW_TABLE_OK) return values;
    if (status == ROW_TABLE_ERROR) return NULL;
    return PyObject_CallFunctionObjArgs(check->slow, given, NULL);
}

static PyObject *check_adder(PyObject *self, PyObject *args) {
    const row_check_t *check = (row_check_t *)self;
    PyObject *rows, *room, *more;
    if (!PyArg_ParseTuple(args, "O!O!O:adder", &PyList_Type, &rows, &PyList_Type, &room, &more)) {
        return NULL;
    }
    row_check_t *made =
        check_make(Py_TYPE(self), (PyObject *)check->table, check->slow, check->of_keys,
                   check->partial);
    if (made == NULL) return NULL;
    Py_INCREF(rows);
    Py_INCREF(room);
    Py_INCREF(more);
    made->rows = rows;
    made->room = room;
    made->more = more;
    return (PyObject *)made;
}

/* Takes a row's bytes from the room: 1, and 0 when there is none left. */
static int take_room(PyObject *room, PyObject *values) {
    PyObject *left = PyList_GetItem(room, 0);
    const double has = left == NULL ? -1.0 : PyFloat_AsDouble(left);
    if (has == -1.0 && PyErr_Occurred() != NULL) return -1;
    if (!(has > 0)) return 0;
    if (has > 1e300) return 1; /* no limit */
    PyObject *rest = PyFloat_FromDouble(has - (double)row_table_size(values));
    if (rest == NULL) return -1;
    return PyList_SetItem(room, 0, rest) < 0 ? -1 : 1;
}

static PyObject *check_add(PyObject *self, PyObject *given) {
    row_check_t *check = (row_check_t *)self;
    PyObject *values;
    if (check->rows == NULL) {
        PyErr_SetString(PyExc_TypeError, "this check is no adder");
        return NULL;
    }
    const row_table_status_t status = at_sight(check, given, &values);
    if (status == ROW_TABLE_ERROR) return NULL;
    int done = 0;
    if (status == ROW_TABLE_OK) {
        const bool whole = !check->partial || row_table_is_whole(check->table, values);
        done = whole ? take_room(check->room, values) : 0;
        if (done == 1 && PyList_Append(check->rows, values) < 0) done = -1;
    } else {
        values = PyObject_CallFunctionObjArgs(check->slow, given, NULL);
        if (values == NULL) return NULL;
    }
    PyObject *made = NULL;
    if (done == 0) {
        made = PyObject_CallFunctionObjArgs(check->more, values, NULL);
    } else if (done == 1) {
        Py_INCREF(Py_None);
        made = Py_None;
    }
    Py_DECREF(values);
    return made;
}

static PyMethodDef methods[] = {
    {"add", check_add, METH_O, NULL},
    {"adder", check_adder, METH_VARARGS, NULL},
    {"take", check_take, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)check_new},
    {Py_tp_dealloc, (void *)check_dealloc},
    {Py_tp_traverse, (void *)check_traverse},
    {Py_tp_clear, (void *)check_clear},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec row_check_spec = {
    .name = "txnkv._native.RowCheck",
    .basicsize = sizeof(row_check_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
