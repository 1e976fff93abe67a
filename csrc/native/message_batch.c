/* Messages of Python's values as a batch of a log.
 *
 *     message_size(rows) -> (int, bool) | None    bytes of values and keys, and whether one has a key
 *     message_batch(rows, timestamp, txn_id, decided) -> bytes
 *     place(data, base_offset, commit_ts) -> bytes | int   a copy, placed; or why it is not
 *     put_message(put, room, value, key) -> a row     that was put; None: nothing was done
 *
 * A row is bytes, or a tuple of a value and a key that are bytes or None; where one has more,
 * there is no size. A batch is as `encode_batch` makes it of the same in Arrow. */
#include "native/native.h"

#include <float.h>
#include <stdbool.h>
#include <string.h>

#include "common/bits.h"
#include "log/messages.h"

typedef struct {
    PyObject *value, *key; /* None: none */
} fields_t;

/* 1: the row has these fields; 0: it has more. */
static int row_fields(PyObject *rows, Py_ssize_t i, fields_t *out) {
    PyObject *row = PyList_GetItem(rows, i);
    out->value = row;
    out->key = Py_None;
    if (!PyTuple_Check(row)) return 1;
    if (PyTuple_Size(row) != 2) return 0;
    out->value = PyTuple_GetItem(row, 0);
    out->key = PyTuple_GetItem(row, 1);
    return 1;
}

/* How long a field is, else -1 with an error set. */
static Py_ssize_t field_len(PyObject *field) {
    return field == Py_None ? 0 : PyBytes_Size(field);
}

static int require_rows(PyObject *rows) {
    if (PyList_Check(rows) && PyList_Size(rows) > 0 && PyList_Size(rows) <= BATCH_COUNT_MAX) return 0;
    PyErr_SetString(PyExc_TypeError, "messages of a batch are a list of one or more");
    return -1;
}

/* 1 where no row has more than the fields, and then their sizes; -1 with an error set. */
static int sizes_of(PyObject *rows, Py_ssize_t *values, Py_ssize_t *keys, int *keyed) {
    const Py_ssize_t n = PyList_Size(rows);
    *values = *keys = *keyed = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        fields_t fields;
        if (!row_fields(rows, i, &fields)) return 0;
        const Py_ssize_t value = field_len(fields.value), key = field_len(fields.key);
        if (value < 0 || key < 0) return -1;
        *values += value;
        *keys += key;
        *keyed |= fields.key != Py_None;
    }
    return 1;
}

PyObject *message_size(PyObject *module, PyObject *rows) {
    Py_ssize_t values, keys;
    int keyed;
    (void)module;
    if (require_rows(rows) < 0) return NULL;
    const int plain = sizes_of(rows, &values, &keys, &keyed);
    if (plain < 0) return NULL;
    if (!plain) Py_RETURN_NONE;
    return Py_BuildValue("(nN)", values + keys, PyBool_FromLong(keyed));
}

/* -- a message ----------------------------------------------------------------------------- */

enum { ROW_BYTES = 8 /* of a row beside its fields */, FIELD_MAX = 1 << 24 };

/* Bytes of a value or key that is bytes, text or None, a new reference; NULL, maybe with an error
 * set: it is left to Python, which knows what to say of it. */
static PyObject *field_of(PyObject *given) {
    if (given == Py_None) return Py_NewRef(given);
    PyObject *field = NULL;
    if (PyBytes_CheckExact(given)) {
        field = Py_NewRef(given);
    } else if (PyUnicode_CheckExact(given)) {
        field = PyUnicode_AsUTF8String(given);
        if (field == NULL && PyErr_ExceptionMatches(PyExc_UnicodeError)) PyErr_Clear();
    }
    if (field != NULL && PyBytes_Size(field) > FIELD_MAX) Py_CLEAR(field);
    return field;
}

/* A row that has a value alone is that value. */
static bool is_bare_row(PyObject *value, PyObject *key) {
    return key == Py_None && value != Py_None;
}

/* What a list of one number has left; negative: nothing, or an error is set. */
static double room_left(PyObject *room) {
    PyObject *left = PyList_GetItem(room, 0);
    return left == NULL ? -1 : PyFloat_AsDouble(left);
}

static int take_room(PyObject *room, PyObject *value, PyObject *key) {
    const double left = room_left(room);
    if (left > DBL_MAX) return 0; /* no limit */
    const Py_ssize_t fields = field_len(value) + field_len(key);
    const bool bare = is_bare_row(value, key);
    const Py_ssize_t size = fields + (bare ? ROW_BYTES : 2 * ROW_BYTES);
    PyObject *less = PyFloat_FromDouble(left - (double)size);
    return less == NULL ? -1 : PyList_SetItem(room, 0, less);
}

static PyObject *put_fields(PyObject *put, PyObject *room, PyObject *value, PyObject *key) {
    PyObject *row = is_bare_row(value, key) ? Py_NewRef(value) : PyTuple_Pack(2, value, key);
    if (row == NULL) return NULL;
    PyObject *done = NULL;
    if (take_room(room, value, key) == 0) done = PyObject_CallFunctionObjArgs(put, row, NULL);
    if (done == NULL) Py_CLEAR(row);
    Py_XDECREF(done);
    return row;
}

PyObject *put_message(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 4 || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "put_message() takes a function, a list, a value and a key");
        return NULL;
    }
    PyObject *value = NULL, *key = NULL, *row = NULL;
    if (room_left(args[1]) > 0 && (value = field_of(args[2])) != NULL) key = field_of(args[3]);
    if (key != NULL) row = put_fields(args[0], args[1], value, key);
    Py_XDECREF(value);
    Py_XDECREF(key);
    return row == NULL && PyErr_Occurred() == NULL ? Py_NewRef(Py_None) : row;
}

/* -- a batch ------------------------------------------------------------------------------ */

/* An Arrow column that is being filled. */
typedef struct {
    uint8_t *offsets, *validity, *values;
    size_t len;
} column_t;

static void column_add(column_t *column, size_t row, PyObject *field) {
    if (field != Py_None) {
        const size_t len = (size_t)PyBytes_Size(field);
        column->validity[row / 8] |= (uint8_t)(1 << row % 8);
        copy_bytes(column->values + column->len, PyBytes_AsString(field), len);
        column->len += len;
    }
    store_le32(column->offsets + 4 * (row + 1), (uint32_t)column->len);
}

static messages_column_t column_made(const column_t *column, size_t rows) {
    return (messages_column_t){
        .values = column->values,
        .values_len = column->len,
        .offsets = column->offsets,
        .offsets_len = 4 * (rows + 1),
        .validity = column->validity,
        .validity_len = bits_bytes(rows),
    };
}

static PyObject *encode(const messages_t *messages, uint64_t txn_id, int decided) {
    messages_plan_t plan;
    if (messages_plan(messages, &plan) != STATUS_OK) {
        PyErr_SetString(PyExc_OverflowError, "more messages than a batch holds");
        return NULL;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, BATCH_HEADER_BYTES + (Py_ssize_t)plan.raw_bytes);
    if (made == NULL) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(made);
    messages_encode(messages, &plan, out + BATCH_HEADER_BYTES, plan.raw_bytes);
    const batch_header_t header = {
        .attributes = (uint16_t)(plan.attributes | (txn_id != 0 ? BATCH_TRANSACTIONAL : 0) |
                                 (decided ? BATCH_DECIDED : 0)),
        .count = plan.rows,
        .txn_id = txn_id,
        .base_timestamp = plan.base_timestamp,
        .max_timestamp = plan.max_timestamp,
        .base_sequence = -1,
        .rows = plan.rows,
        .raw_bytes = plan.raw_bytes,
    };
    batch_seal(&header, out, BATCH_HEADER_BYTES + (size_t)plan.raw_bytes);
    return made;
}

static PyObject *batch_of(PyObject *rows, int64_t timestamp, uint64_t txn_id, int decided) {
    Py_ssize_t value_bytes, key_bytes;
    int keyed;
    const int plain = sizes_of(rows, &value_bytes, &key_bytes, &keyed);
    if (plain < 0) return NULL;
    if (!plain || value_bytes > INT32_MAX || key_bytes > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "messages with more than a value and a key, or too long");
        return NULL;
    }
    const size_t n = (size_t)PyList_Size(rows);
    const size_t ends = 4 * (n + 1), bits = bits_bytes(n);
    uint8_t few[512], *memory = few;
    const size_t size = 2 * (ends + bits) + (size_t)value_bytes + (size_t)key_bytes;
    if (size > sizeof few && (memory = PyMem_Malloc(size)) == NULL) return PyErr_NoMemory();
    memset(memory, 0, 2 * (ends + bits));
    column_t values = {.offsets = memory, .validity = memory + 2 * ends};
    column_t keys = {.offsets = memory + ends, .validity = values.validity + bits};
    values.values = keys.validity + bits;
    keys.values = values.values + value_bytes;
    for (size_t i = 0; i < n; i++) {
        fields_t fields;
        row_fields(rows, (Py_ssize_t)i, &fields);
        column_add(&values, i, fields.value);
        column_add(&keys, i, fields.key);
    }
    const messages_t messages = {
        .value = column_made(&values, n),
        .key = column_made(&keys, n),
        .timestamp = timestamp,
        .rows = (uint32_t)n,
    };
    PyObject *made = encode(&messages, txn_id, decided);
    if (memory != few) PyMem_Free(memory);
    return made;
}

PyObject *message_batch(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "message_batch() takes rows, a time, an id and a flag");
        return NULL;
    }
    const long long timestamp = PyLong_AsLongLong(args[1]);
    if (timestamp == -1 && PyErr_Occurred() != NULL) return NULL;
    const unsigned long long txn_id = PyLong_AsUnsignedLongLong(args[2]);
    if (txn_id == UINT64_MAX && PyErr_Occurred() != NULL) return NULL;
    if (require_rows(args[0]) < 0) return NULL;
    return batch_of(args[0], timestamp, txn_id, args[3] == Py_True);
}

PyObject *place_batches(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "place() takes bytes, an offset and a timestamp");
        return NULL;
    }
    char *data;
    Py_ssize_t len;
    const unsigned long long offset = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() != NULL) return NULL;
    const unsigned long long stamp = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred() != NULL || PyBytes_AsStringAndSize(args[0], &data, &len) < 0) return NULL;
    PyObject *placed = PyBytes_FromStringAndSize(data, len);
    if (placed == NULL) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(placed);
    const status_t status = batch_place(out, (size_t)len, offset, stamp);
    if (status == STATUS_OK) return placed;
    Py_DECREF(placed);
    return PyLong_FromLong(status);
}
