#include <string.h>

#include "codec/key_value.h"
#include "common/bits.h"
#include "native/row_column.h"

enum { COLUMNS = 64, SLOT = 16 };

/* `OTHER`, whatever error says why. */
static row_table_status_t other(void) {
    PyErr_Clear();
    return ROW_TABLE_OTHER;
}

static row_table_status_t put_signed(PyObject *number, uint32_t width, uint8_t *out) {
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (value == -1 && PyErr_Occurred() != NULL) return ROW_TABLE_ERROR;
    const long long high = width == 8 ? INT64_MAX : (INT64_C(1) << (8 * width - 1)) - 1;
    if (overflow != 0 || value > high || value < -high - 1) {
        PyErr_Format(PyExc_ValueError, "%R is out of the range of %u bytes", number, width);
        return ROW_TABLE_ERROR;
    }
    store_le64(out, (uint64_t)value);
    return ROW_TABLE_OK;
}

static row_table_status_t put_unsigned(PyObject *number, uint32_t width, uint8_t *out) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred() != NULL) return ROW_TABLE_ERROR;
    if (width < 8 && value >> (8 * width) != 0) {
        PyErr_Format(PyExc_ValueError, "%R is out of the range of %u bytes", number, width);
        return ROW_TABLE_ERROR;
    }
    store_le64(out, value);
    return ROW_TABLE_OK;
}

static row_table_status_t put_float(PyObject *value, uint32_t code, bool strict, uint8_t *out) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred() != NULL) return ROW_TABLE_ERROR;
    if (code == KEY_F64) {
        memcpy(out, &number, sizeof number);
        return ROW_TABLE_OK;
    }
    if (strict && !(number >= -3.4028234663852886e38 && number <= 3.4028234663852886e38)) {
        PyErr_SetNone(PyExc_ValueError); /* infinities and such: Arrow says what they are */
        return ROW_TABLE_ERROR;
    }
    const float rounded = (float)number;
    memcpy(out, &rounded, sizeof rounded);
    return ROW_TABLE_OK;
}

static row_table_status_t put_raw(PyObject *bytes, uint32_t width, uint8_t *out) {
    char *data;
    Py_ssize_t len;
    if (PyBytes_AsStringAndSize(bytes, &data, &len) < 0) return ROW_TABLE_ERROR;
    if ((size_t)len != width) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for a column of %u", len, width);
        return ROW_TABLE_ERROR;
    }
    memcpy(out, data, width);
    return ROW_TABLE_OK;
}

/* The slot of a value of fixed width, as Arrow has it. */
static row_table_status_t put_slot(const row_column_spec_t *column, PyObject *value, bool strict,
                                   uint8_t out[SLOT]) {
    switch (column->code) {
        case KEY_BOOL: {
            const int truth = PyObject_IsTrue(value);
            out[0] = (uint8_t)(truth == 1);
            return truth < 0 ? ROW_TABLE_ERROR : ROW_TABLE_OK;
        }
        case KEY_F32:
        case KEY_F64: return put_float(value, column->code, strict, out);
        case KEY_DECIMAL128:
        case KEY_UUID:
        case ROW_TABLE_RAW: return put_raw(value, column->width, out);
        case KEY_U8:
        case KEY_U16:
        case KEY_U32:
        case KEY_U64: return put_unsigned(value, column->width, out);
        default: return put_signed(value, column->width, out);
    }
}

/* A slot as memcmp orders it. */
static void put_ordered(uint32_t code, const uint8_t slot[SLOT], uint8_t *to) {
    switch (code) {
        case KEY_I8: *to = (uint8_t)(slot[0] ^ 0x80); break;
        case KEY_I16: store_be16(to, (uint16_t)(load_le16(slot) ^ 0x8000)); break;
        case KEY_I32: store_be32(to, load_le32(slot) ^ KEY_SIGN_32); break;
        case KEY_I64: store_be64(to, load_le64(slot) ^ KEY_SIGN_64); break;
        case KEY_U16: store_be16(to, load_le16(slot)); break;
        case KEY_U32: store_be32(to, load_le32(slot)); break;
        case KEY_U64: store_be64(to, load_le64(slot)); break;
        case KEY_F32: store_be32(to, key_order_f32(load_le32(slot))); break;
        case KEY_F64: store_be64(to, key_order_f64(load_le64(slot))); break;
        case KEY_DECIMAL128:
            store_be64(to, load_le64(slot + 8) ^ KEY_SIGN_64);
            store_be64(to + 8, load_le64(slot));
            break;
        case KEY_UUID: memcpy(to, slot, 16); break;
        default: *to = slot[0]; /* bool and u8 */
    }
}

/* The bytes of a text or binary value, which the value keeps. */
static const char *bytes_of(const row_column_spec_t *column, PyObject *value, Py_ssize_t *len) {
    if (column->code == ROW_TABLE_TEXT) return PyUnicode_AsUTF8AndSize(value, len);
    char *data;
    return PyBytes_AsStringAndSize(value, &data, len) < 0 ? NULL : data;
}

/* What stands in the row for a value: itself, or what `to` makes of it; a new reference. OTHER
 * when it is not known at sight, and has to be. */
static row_table_status_t converted(const row_column_spec_t *column, PyObject *value, bool strict,
                                    PyObject **out) {
    if (strict) {
        if ((PyObject *)Py_TYPE(value) != column->exact) return ROW_TABLE_OTHER;
        if (column->zone != NULL) {
            PyObject *zone = PyObject_GetAttrString(value, "tzinfo");
            if (zone == NULL) return ROW_TABLE_ERROR;
            Py_DECREF(zone);
            if (zone != column->zone) return ROW_TABLE_OTHER;
        }
    }
    if (column->to == NULL) {
        Py_INCREF(value);
        *out = value;
        return ROW_TABLE_OK;
    }
    *out = PyObject_CallFunctionObjArgs(column->to, value, NULL);
    return *out == NULL ? ROW_TABLE_ERROR : ROW_TABLE_OK;
}

static int escape(const uint8_t *from, size_t len, row_bytes_t *out) {
    for (size_t i = 0; i < len; i++) {
        uint8_t *to = row_bytes_more(out, from[i] == 0 ? 2 : 1);
        if (to == NULL) return -1;
        to[0] = from[i];
        if (from[i] == 0) to[1] = 0xFF;
    }
    uint8_t *end = row_bytes_more(out, 2);
    if (end == NULL) return -1;
    end[0] = 0x00;
    end[1] = 0x01;
    return 0;
}

static row_table_status_t put_key_value(const row_column_spec_t *column, PyObject *value,
                                        bool strict, bool last, row_bytes_t *out) {
    if (column->width != 0) {
        uint8_t slot[SLOT];
        const row_table_status_t status = put_slot(column, value, strict, slot);
        if (status != ROW_TABLE_OK) return status;
        uint8_t *to = row_bytes_more(out, column->width);
        if (to == NULL) return ROW_TABLE_ERROR;
        put_ordered(column->code, slot, to);
        return ROW_TABLE_OK;
    }
    Py_ssize_t len;
    const char *data = bytes_of(column, value, &len);
    if (data == NULL) return ROW_TABLE_ERROR;
    if (!last) {
        return escape((const uint8_t *)data, (size_t)len, out) < 0 ? ROW_TABLE_ERROR
                                                                   : ROW_TABLE_OK;
    }
    uint8_t *to = row_bytes_more(out, (size_t)len);
    if (to == NULL) return ROW_TABLE_ERROR;
    copy_bytes(to, data, (size_t)len);
    return ROW_TABLE_OK;
}

static row_table_status_t finished(row_table_status_t status, bool strict) {
    if (status != ROW_TABLE_ERROR || !strict) return status;
    return PyErr_ExceptionMatches(PyExc_MemoryError) ? ROW_TABLE_ERROR : other();
}

/* values: of the key's columns, in its order. */
static row_table_status_t put_key(row_table_t *table, PyObject *const *values, bool strict,
                                  row_bytes_t *key) {
    row_table_status_t status = ROW_TABLE_OK;
    for (uint32_t i = 0; i < table->n_key && status == ROW_TABLE_OK; i++) {
        const row_column_spec_t *column = table->columns + table->key[i];
        PyObject *given;
        status = converted(column, values[i], strict, &given);
        if (status != ROW_TABLE_OK) break;
        status = put_key_value(column, given, strict, i + 1 == table->n_key, key);
        Py_DECREF(given);
    }
    return finished(status, strict);
}

static row_table_status_t put_column(const row_table_t *table, const row_column_spec_t *column,
                                     uint32_t number, PyObject *value, bool strict,
                                     size_t row_at, row_bytes_t *row) {
    PyObject *given;
    row_table_status_t status = converted(column, value, strict, &given);
    if (status != ROW_TABLE_OK) return status;
    (void)number;
    if (column->width != 0) {
        uint8_t slot[SLOT];
        status = put_slot(column, given, strict, slot);
        memcpy(row->data + row_at + column->at, slot, column->width);
    } else {
        Py_ssize_t len;
        const char *data = bytes_of(column, given, &len);
        uint8_t *to = data == NULL ? NULL : row_bytes_more(row, (size_t)len);
        if (to == NULL) {
            status = ROW_TABLE_ERROR;
        } else {
            copy_bytes(to, data, (size_t)len);
            const size_t end = row->len - row_at - table->head;
            store_le32(row->data + row_at + column->at, (uint32_t)end);
            if (end > UINT32_MAX - 1) {
                PyErr_SetString(PyExc_ValueError, "the values of a row pass 4 GiB");
                status = ROW_TABLE_ERROR;
            }
        }
    }
    Py_DECREF(given);
    return status;
}

/* values: of the other columns, in their order. */
static row_table_status_t put_row(row_table_t *table, PyObject *const *values, bool strict,
                                  row_bytes_t *row) {
    const size_t at = row->len;
    const uint32_t n = table->n - table->n_key;
    uint8_t *head = row_bytes_more(row, table->head);
    if (head == NULL) return ROW_TABLE_ERROR;
    memset(head, 0, table->head);
    for (uint32_t i = 0; i < n; i++) {
        const row_column_spec_t *column = table->columns + table->key[table->n_key + i];
        row_table_status_t status = ROW_TABLE_OK;
        if (values[i] == Py_None) {
            if (strict && !column->nullable) return ROW_TABLE_OTHER;
            bits_set(row->data + at, i);
            if (column->width == 0) {
                store_le32(row->data + at + column->at, (uint32_t)(row->len - at - table->head));
            }
        } else {
            status = put_column(table, column, i, values[i], strict, at, row);
        }
        if (status != ROW_TABLE_OK) return finished(status, strict);
    }
    return ROW_TABLE_OK;
}

/* -- values of a row ---------------------------------------------------------------------- */

/* The values of a dict or tuple, in the order of table->key; each a new reference. */
static row_table_status_t collect(row_table_t *table, PyObject *given, PyObject **out) {
    const uint32_t n = table->n;
    const bool named = PyDict_CheckExact(given);
    if (!named && !PyTuple_CheckExact(given)) return ROW_TABLE_OTHER;
    if ((named ? PyDict_Size(given) : PyTuple_Size(given)) != (Py_ssize_t)n) {
        return ROW_TABLE_OTHER;
    }
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t at = table->key[i];
        out[i] = named ? PyDict_GetItemWithError(given, table->columns[at].name)
                       : PyTuple_GetItem(given, at);
        if (out[i] == NULL) {
            while (i != 0) Py_DECREF(out[--i]);
            return PyErr_Occurred() != NULL ? ROW_TABLE_ERROR : ROW_TABLE_OTHER;
        }
        Py_INCREF(out[i]);
    }
    return ROW_TABLE_OK;
}

static row_table_status_t put(row_table_t *table, PyObject *given, bool strict, row_bytes_t *key,
                              row_bytes_t *row) {
    PyObject *few[COLUMNS], **values = few;
    if (table->n > COLUMNS && (values = PyMem_Malloc(table->n * sizeof *values)) == NULL) {
        PyErr_NoMemory();
        return ROW_TABLE_ERROR;
    }
    row_table_status_t status = collect(table, given, values);
    if (status == ROW_TABLE_OK) {
        status = put_key(table, values, strict, key);
        if (status == ROW_TABLE_OK) status = put_row(table, values + table->n_key, strict, row);
        for (uint32_t i = 0; i < table->n; i++) Py_DECREF(values[i]);
    }
    if (values != few) PyMem_Free(values);
    return status;
}

row_table_status_t row_table_row(row_table_t *table, PyObject *given, row_bytes_t *key,
                                 row_bytes_t *row) {
    return put(table, given, true, key, row);
}

row_table_status_t row_table_values(row_table_t *table, PyObject *values, row_bytes_t *key,
                                    row_bytes_t *row) {
    const row_table_status_t status = put(table, values, false, key, row);
    if (status == ROW_TABLE_OTHER) {
        PyErr_Format(PyExc_ValueError, "not a tuple of the %u columns", table->n);
        return ROW_TABLE_ERROR;
    }
    return status;
}

row_table_status_t row_table_key(row_table_t *table, PyObject *given, row_bytes_t *key) {
    if (table->n_key == 1) return put_key(table, &given, true, key);
    PyObject *values[COLUMNS];
    if (!PyTuple_CheckExact(given) || table->n_key > COLUMNS ||
        PyTuple_Size(given) != (Py_ssize_t)table->n_key) {
        return ROW_TABLE_OTHER;
    }
    /* A tuple that is held keeps what is in it. */
    for (uint32_t i = 0; i < table->n_key; i++) values[i] = PyTuple_GetItem(given, i);
    return put_key(table, values, true, key);
}
