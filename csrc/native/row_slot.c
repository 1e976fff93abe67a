#include <string.h>

#include "codec/json.h"
#include "common/bytes.h"
#include "native/row_column.h"

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

row_table_status_t row_slot_put(const row_column_spec_t *column, PyObject *value, bool strict,
                                   uint8_t out[ROW_SLOT]) {
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

const char *row_slot_bytes(const row_column_spec_t *column, PyObject *value, bool strict,
                           Py_ssize_t *len) {
    size_t at;
    if (row_column_is_text(column)) {
        const char *text = PyUnicode_AsUTF8AndSize(value, len);
        if (text == NULL || !strict || column->code != ROW_TABLE_JSON) return text;
        if (json_text((const uint8_t *)text, (size_t)*len, &at)) return text;
        PyErr_SetNone(PyExc_ValueError);
        return NULL;
    }
    char *data;
    return PyBytes_AsStringAndSize(value, &data, len) < 0 ? NULL : data;
}

row_table_status_t row_slot_convert(const row_column_spec_t *column, PyObject *value, bool strict,
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

row_table_status_t row_slot_finish(row_table_status_t status, bool strict) {
    if (status != ROW_TABLE_ERROR || !strict) return status;
    return PyErr_ExceptionMatches(PyExc_MemoryError) ? ROW_TABLE_ERROR : other();
}
