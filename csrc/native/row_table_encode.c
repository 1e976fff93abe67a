#include <string.h>

#include "codec/key_value.h"
#include "common/bits.h"
#include "native/row_column.h"

enum { COLUMNS = 64 };

/* A slot as memcmp orders it. */
static void put_ordered(uint32_t code, const uint8_t slot[ROW_SLOT], uint8_t *to) {
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
        uint8_t slot[ROW_SLOT];
        const row_table_status_t status = row_slot_put(column, value, strict, slot);
        if (status != ROW_TABLE_OK) return status;
        uint8_t *to = row_bytes_more(out, column->width);
        if (to == NULL) return ROW_TABLE_ERROR;
        put_ordered(column->code, slot, to);
        return ROW_TABLE_OK;
    }
    Py_ssize_t len;
    const char *data = row_slot_bytes(column, value, strict, &len);
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

/* values: of the key's first n columns, in its order. */
static row_table_status_t put_first(row_table_t *table, PyObject *const *values, uint32_t n,
                                    bool strict, row_bytes_t *key) {
    row_table_status_t status = ROW_TABLE_OK;
    for (uint32_t i = 0; i < n && status == ROW_TABLE_OK; i++) {
        const row_column_spec_t *column = table->columns + table->key[i];
        PyObject *given;
        status = row_slot_convert(column, values[i], strict, &given);
        if (status != ROW_TABLE_OK) break;
        status = put_key_value(column, given, strict, i + 1 == table->n_key, key);
        Py_DECREF(given);
    }
    return row_slot_finish(status, strict);
}

static row_table_status_t put_key(row_table_t *table, PyObject *const *values, bool strict,
                                  row_bytes_t *key) {
    return put_first(table, values, table->n_key, strict, key);
}

/* The same of a tuple, which keeps what is in it as long as it is held. */
static row_table_status_t put_tuple(row_table_t *table, PyObject *given, uint32_t n, bool strict,
                                    row_bytes_t *key) {
    PyObject *values[COLUMNS];
    if (!PyTuple_CheckExact(given) || n > COLUMNS || PyTuple_Size(given) != (Py_ssize_t)n) {
        return ROW_TABLE_OTHER;
    }
    for (uint32_t i = 0; i < n; i++) values[i] = PyTuple_GetItem(given, i);
    return put_first(table, values, n, strict, key);
}

static row_table_status_t put_key_tuple(row_table_t *table, PyObject *given, bool strict,
                                        row_bytes_t *key) {
    return put_tuple(table, given, table->n_key, strict, key);
}

static row_table_status_t put_column(const row_table_t *table, const row_column_spec_t *column,
                                     PyObject *value, bool strict,
                                     size_t row_at, row_bytes_t *row) {
    PyObject *given;
    row_table_status_t status = row_slot_convert(column, value, strict, &given);
    if (status != ROW_TABLE_OK) return status;
    if (column->width != 0) {
        uint8_t slot[ROW_SLOT];
        status = row_slot_put(column, given, strict, slot);
        memcpy(row->data + row_at + column->at, slot, column->width);
    } else {
        Py_ssize_t len;
        const char *data = row_slot_bytes(column, given, strict, &len);
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

/* Value i of an older row, as it lies there. */
static row_table_status_t keep(const row_table_t *table, uint32_t i, const uint8_t *old,
                               size_t row_at, row_bytes_t *row) {
    const row_column_spec_t *column = table->columns + table->key[table->n_key + i];
    if (bits_get(old, i)) bits_set(row->data + row_at, i);
    if (column->width != 0) {
        memcpy(row->data + row_at + column->at, old + column->at, column->width);
        return ROW_TABLE_OK;
    }
    const uint32_t from = column->at == table->ends ? 0 : load_le32(old + column->at - 4);
    const uint32_t len = load_le32(old + column->at) - from;
    uint8_t *to = row_bytes_more(row, len);
    if (to == NULL) return ROW_TABLE_ERROR;
    copy_bytes(to, old + table->head + from, len);
    store_le32(row->data + row_at + column->at, (uint32_t)(row->len - row_at - table->head));
    return ROW_TABLE_OK;
}

/* values: of the other columns, in their order. old: a sound row, which has those that are
 * missing; NULL: none may be. */
static row_table_status_t put_row(row_table_t *table, PyObject *const *values, bool strict,
                                  const uint8_t *old, row_bytes_t *row) {
    const size_t at = row->len;
    const uint32_t n = table->n - table->n_key;
    uint8_t *head = row_bytes_more(row, table->head);
    if (head == NULL) return ROW_TABLE_ERROR;
    memset(head, 0, table->head);
    for (uint32_t i = 0; i < n; i++) {
        const row_column_spec_t *column = table->columns + table->key[table->n_key + i];
        row_table_status_t status = ROW_TABLE_OK;
        if (values[i] == table->missing) {
            status = old == NULL ? ROW_TABLE_OTHER : keep(table, i, old, at, row);
        } else if (values[i] == Py_None) {
            if (strict && !column->nullable) return ROW_TABLE_OTHER;
            bits_set(row->data + at, i);
            if (column->width == 0) {
                store_le32(row->data + at + column->at, (uint32_t)(row->len - at - table->head));
            }
        } else {
            status = put_column(table, column, values[i], strict, at, row);
        }
        if (status != ROW_TABLE_OK) return row_slot_finish(status, strict);
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

static row_table_status_t put(row_table_t *table, PyObject *given, bool strict,
                              const uint8_t *old, row_bytes_t *key, row_bytes_t *row) {
    PyObject *few[COLUMNS], **values = few;
    if (table->n > COLUMNS && (values = PyMem_Malloc(table->n * sizeof *values)) == NULL) {
        PyErr_NoMemory();
        return ROW_TABLE_ERROR;
    }
    row_table_status_t status = collect(table, given, values);
    if (status == ROW_TABLE_OK) {
        status = put_key(table, values, strict, key);
        if (status == ROW_TABLE_OK) {
            status = put_row(table, values + table->n_key, strict, old, row);
        }
        for (uint32_t i = 0; i < table->n; i++) Py_DECREF(values[i]);
    }
    if (values != few) PyMem_Free(values);
    return status;
}

row_table_status_t row_table_row(row_table_t *table, PyObject *given, row_bytes_t *key,
                                 row_bytes_t *row) {
    return put(table, given, true, NULL, key, row);
}

static row_table_status_t whole(const row_table_t *table, row_table_status_t status) {
    if (status != ROW_TABLE_OTHER) return status;
    PyErr_Format(PyExc_ValueError, "not a tuple of the %u columns", table->n);
    return ROW_TABLE_ERROR;
}

row_table_status_t row_table_values(row_table_t *table, PyObject *values, const uint8_t *old,
                                    size_t old_len, row_bytes_t *key, row_bytes_t *row) {
    if (old != NULL && !row_table_is_sound(table, old, old_len)) {
        PyErr_SetString(table->error, "an older row: its lengths do not add up");
        return ROW_TABLE_ERROR;
    }
    return whole(table, put(table, values, false, old, key, row));
}

row_table_status_t row_table_key_of(row_table_t *table, PyObject *values, row_bytes_t *key) {
    PyObject *some[COLUMNS];
    if (table->n_key > COLUMNS || !PyTuple_CheckExact(values) ||
        PyTuple_Size(values) != (Py_ssize_t)table->n) {
        return ROW_TABLE_OTHER;
    }
    for (uint32_t i = 0; i < table->n_key; i++) some[i] = PyTuple_GetItem(values, table->key[i]);
    return put_key(table, some, false, key);
}

row_table_status_t row_table_key_values(row_table_t *table, PyObject *values, row_bytes_t *key) {
    return put_key_tuple(table, values, false, key);
}

row_table_status_t row_table_key(row_table_t *table, PyObject *given, row_bytes_t *key) {
    if (table->n_key == 1 && !PyTuple_CheckExact(given)) return put_key(table, &given, true, key);
    return put_key_tuple(table, given, true, key);
}

row_table_status_t row_table_beginning(row_table_t *table, PyObject *given, row_bytes_t *key) {
    const Py_ssize_t n = PyTuple_CheckExact(given) ? PyTuple_Size(given) : 0;
    if (n > (Py_ssize_t)table->n_key) return ROW_TABLE_OTHER;
    return put_tuple(table, given, (uint32_t)n, true, key);
}
