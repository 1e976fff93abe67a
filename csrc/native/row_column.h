/* One column of a row_table_t, for the files of this folder. */
#ifndef TXNKV_NATIVE_ROW_COLUMN_H
#define TXNKV_NATIVE_ROW_COLUMN_H

#include <stdbool.h>

#include "native/row_table.h"

typedef struct {
    PyObject *name;
    PyObject *exact; /* class of a value that is known at sight; NULL: none is */
    PyObject *zone;  /* of an instant: its `tzinfo`; NULL is not asked for */
    PyObject *to;    /* value -> int or bytes, NULL: as it is */
    PyObject *of;    /* and back */
    uint32_t code;
    uint32_t width; /* bytes of a slot, 0 where values have any length */
    uint32_t at;    /* of the slot in a row, of the u32 end where width is 0 */
    bool nullable;
    bool in_key;
    bool unread; /* dicts of rows do not have it */
} row_column_spec_t;

struct row_table {
    PyObject_HEAD
    row_column_spec_t *columns; /* in schema order */
    uint32_t *key;              /* columns of the key, in its order, then the others */
    uint32_t n, n_key;
    uint32_t ends, head; /* as in row_layout_t */
    PyObject *empty;     /* a dict of all columns that are read, in their order */
    PyObject *error;     /* class of what damaged bytes raise */
    PyObject *missing;   /* stands in values for a column that keeps what it has */
};

static inline bool row_column_is_text(const row_column_spec_t *column) {
    return column->code == ROW_TABLE_TEXT || column->code == ROW_TABLE_JSON;
}

static inline uint32_t row_table_nulls(const row_table_t *table) {
    return (table->n - table->n_key + 7) / 8;
}

/* The lengths of a row of this table add up. */
bool row_table_is_sound(const row_table_t *table, const uint8_t *row, size_t len);

enum { ROW_SLOT = 16 };

/* The slot of a value of fixed width, as Arrow has it. */
row_table_status_t row_slot_put(const row_column_spec_t *column, PyObject *value, bool strict,
                                uint8_t out[ROW_SLOT]);

/* The bytes of a text or binary value, which the value keeps; `strict`: of JSON, if it is such. */
const char *row_slot_bytes(const row_column_spec_t *column, PyObject *value, bool strict,
                           Py_ssize_t *len);

/* What stands in the row for a value: itself, or what `to` makes of it; a new reference. OTHER
 * when it is not known at sight, and has to be. */
row_table_status_t row_slot_convert(const row_column_spec_t *column, PyObject *value, bool strict,
                                    PyObject **out);

/* A status as callers hear of it: at sight no error is one, but of memory. */
row_table_status_t row_slot_finish(row_table_status_t status, bool strict);

#endif
