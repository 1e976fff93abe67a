#include <string.h>

#include "codec/key_value.h"
#include "common/bits.h"
#include "native/row_column.h"

/* Sets the table's error in place of whatever is set. */
static PyObject *damaged(const row_table_t *table, const char *what) {
    PyErr_Clear();
    PyErr_Format(table->error, "reading a row: %s. Check the store that it came from.", what);
    return NULL;
}

static PyObject *from_slot(const row_column_spec_t *column, const uint8_t *slot) {
    switch (column->code) {
        case KEY_BOOL: return PyBool_FromLong(slot[0] != 0);
        case KEY_I8: return PyLong_FromLong((int8_t)slot[0]);
        case KEY_I16: return PyLong_FromLong((int16_t)load_le16(slot));
        case KEY_I32: return PyLong_FromLong((int32_t)load_le32(slot));
        case KEY_I64: return PyLong_FromLongLong((int64_t)load_le64(slot));
        case KEY_U8: return PyLong_FromLong(slot[0]);
        case KEY_U16: return PyLong_FromLong(load_le16(slot));
        case KEY_U32: return PyLong_FromUnsignedLong(load_le32(slot));
        case KEY_U64: return PyLong_FromUnsignedLongLong(load_le64(slot));
        case KEY_F32: {
            float number;
            memcpy(&number, slot, sizeof number);
            return PyFloat_FromDouble(number);
        }
        case KEY_F64: {
            double number;
            memcpy(&number, slot, sizeof number);
            return PyFloat_FromDouble(number);
        }
        default: return PyBytes_FromStringAndSize((const char *)slot, column->width);
    }
}

static PyObject *from_bytes(const row_column_spec_t *column, const uint8_t *data, size_t len) {
    const char *text = (const char *)data;
    if (row_column_is_text(column)) return PyUnicode_DecodeUTF8(text, (Py_ssize_t)len, NULL);
    return PyBytes_FromStringAndSize(text, (Py_ssize_t)len);
}

/* What `of` makes of a value, which is given up. */
static PyObject *back(const row_column_spec_t *column, PyObject *value) {
    if (value == NULL || column->of == NULL) return value;
    PyObject *made = PyObject_CallFunctionObjArgs(column->of, value, NULL);
    Py_DECREF(value);
    return made;
}

/* -- keys --------------------------------------------------------------------------------- */

static void from_ordered(uint32_t code, const uint8_t *key, uint8_t slot[ROW_SLOT]) {
    switch (code) {
        case KEY_I8: slot[0] = (uint8_t)(*key ^ 0x80); break;
        case KEY_I16: store_le16(slot, (uint16_t)(load_be16(key) ^ 0x8000)); break;
        case KEY_I32: store_le32(slot, load_be32(key) ^ KEY_SIGN_32); break;
        case KEY_I64: store_le64(slot, load_be64(key) ^ KEY_SIGN_64); break;
        case KEY_U16: store_le16(slot, load_be16(key)); break;
        case KEY_U32: store_le32(slot, load_be32(key)); break;
        case KEY_U64: store_le64(slot, load_be64(key)); break;
        case KEY_F32: store_le32(slot, key_bits_f32(load_be32(key))); break;
        case KEY_F64: store_le64(slot, key_bits_f64(load_be64(key))); break;
        case KEY_DECIMAL128:
            store_le64(slot, load_be64(key + 8));
            store_le64(slot + 8, load_be64(key) ^ KEY_SIGN_64);
            break;
        case KEY_UUID: memcpy(slot, key, 16); break;
        default: slot[0] = *key; /* bool and u8 */
    }
}

/* A string that is not the last column, without its escapes; `*at` is moved behind its end mark.
 * NULL without an error: it has no end. */
static PyObject *unescaped(const row_column_spec_t *column, const uint8_t *key, size_t len,
                           size_t *at) {
    row_bytes_t raw;
    row_bytes_init(&raw);
    PyObject *made = NULL;
    for (size_t i = *at; i < len; i++) {
        if (key[i] == 0) {
            if (i + 1 == len || (key[i + 1] != 0x01 && key[i + 1] != 0xFF)) break;
            if (key[i + 1] == 0x01) {
                *at = i + 2;
                made = from_bytes(column, raw.data, raw.len);
                break;
            }
        }
        uint8_t *to = row_bytes_more(&raw, 1);
        if (to == NULL) break;
        *to = key[i];
        i += key[i] == 0;
    }
    row_bytes_free(&raw);
    return made;
}

static PyObject *from_key(const row_column_spec_t *column, const uint8_t *key, size_t len,
                          bool last, size_t *at) {
    if (column->width != 0) {
        if (column->width > len - *at) return NULL;
        uint8_t slot[ROW_SLOT];
        from_ordered(column->code, key + *at, slot);
        if (column->code == KEY_BOOL && slot[0] > 1) return NULL;
        *at += column->width;
        return from_slot(column, slot);
    }
    if (!last) return unescaped(column, key, len, at);
    const size_t from = *at;
    *at = len;
    return from_bytes(column, key + from, len - from);
}

/* -- rows --------------------------------------------------------------------------------- */

bool row_table_is_sound(const row_table_t *table, const uint8_t *row, size_t len) {
    if (len < table->head) return false;
    uint32_t last = 0;
    for (uint32_t at = table->ends; at < table->head; at += 4) {
        const uint32_t end = load_le32(row + at);
        if (end < last) return false;
        last = end;
    }
    return last == len - table->head;
}

static PyObject *from_row(const row_table_t *table, const row_column_spec_t *column,
                          const uint8_t *row) {
    if (column->width != 0) return from_slot(column, row + column->at);
    const uint32_t from = column->at == table->ends ? 0 : load_le32(row + column->at - 4);
    return from_bytes(column, row + table->head + from, load_le32(row + column->at) - from);
}

/* Puts a value, which is given up, into a dict. */
static int set(PyObject *row, const row_column_spec_t *column, PyObject *value) {
    if (value == NULL) return -1;
    const int failed = PyDict_SetItem(row, column->name, value);
    Py_DECREF(value);
    return failed;
}

static int fill(row_table_t *table, PyObject *made, const uint8_t *key, size_t key_len,
                const uint8_t *row) {
    size_t at = 0;
    for (uint32_t i = 0; i < table->n_key; i++) {
        const row_column_spec_t *column = table->columns + table->key[i];
        PyObject *value = from_key(column, key, key_len, i + 1 == table->n_key, &at);
        if (column->unread && value != NULL) {
            Py_DECREF(value);
        } else if (set(made, column, back(column, value)) < 0) {
            return -1;
        }
    }
    if (at != key_len) return -1;
    for (uint32_t i = table->n_key; i < table->n; i++) {
        const row_column_spec_t *column = table->columns + table->key[i];
        if (column->unread || bits_get(row, i - table->n_key)) continue; /* or is None already */
        if (set(made, column, back(column, from_row(table, column, row))) < 0) return -1;
    }
    return 0;
}

PyObject *row_table_dict(row_table_t *table, const uint8_t *key, size_t key_len,
                         const uint8_t *row, size_t row_len) {
    if (!row_table_is_sound(table, row, row_len)) {
        return damaged(table, "its lengths do not add up");
    }
    PyObject *made = PyDict_Copy(table->empty);
    if (made == NULL) return NULL;
    if (fill(table, made, key, key_len, row) == 0) return made;
    Py_DECREF(made);
    /* Memory, and what `of` refuses, are told as they are. */
    PyObject *why = PyErr_Occurred();
    if (why != NULL && !PyErr_ExceptionMatches(PyExc_ValueError)) return NULL;
    return damaged(table, why == NULL ? "its key has another form" : "a value has another form");
}
