/* Rows of one table between Python values and bytes, one row a call.
 *
 * What the core does for columns of Arrow this does for one row: a tuple or a dict becomes the
 * bytes of its key (codec/key.h) and of its other columns (codec/row.h), and comes back as a
 * dict. For C there is
 *
 *     row_table_key       a key as callers give it, a scalar or a tuple, to bytes
 *     row_table_row       a whole row, a dict or a tuple in schema order, to both
 *     row_table_values    a tuple of values that were brought into the columns' types; those that
 *                         are missing are taken from the bytes of an older row
 *     row_table_dict      the dict of a row from its key and its bytes, as they lie in a block
 *
 * and the same for Python as `txnkv._native.Table`. A value is taken at sight when it is just of
 * its column's class and range; else the answer is ROW_TABLE_OTHER, no error is set, and Python
 * brings the row into the columns' types. Dates, times, decimals and lists have a function of
 * Python on the way, `to` a number or bytes and `of` it back.
 *
 * The GIL is held all the time; a table does not change once it is made. */
#ifndef TXNKV_NATIVE_ROW_TABLE_H
#define TXNKV_NATIVE_ROW_TABLE_H

#include "native/stable_abi.h"
#include <stdbool.h>
#include <stdint.h>

#include "codec/key.h"

/* Those of a key, and two that stand in none. */
enum {
    ROW_TABLE_RAW = 100, /* bytes of a fixed width */
    ROW_TABLE_TEXT = 101,
    ROW_TABLE_JSON = 102 /* a text of JSON */
};

typedef enum {
    ROW_TABLE_OK = 0,
    ROW_TABLE_OTHER = 1, /* not known at sight, and no error is set */
    ROW_TABLE_ERROR = 2  /* an error of Python is set */
} row_table_status_t;

/* Bytes that grow, the first of them without an allocation. */
typedef struct {
    uint8_t *data;
    size_t len;
    size_t cap;
    uint8_t first[256];
} row_bytes_t;

void row_bytes_init(row_bytes_t *bytes);
void row_bytes_free(row_bytes_t *bytes);
/* `len` more bytes at the end, not cleared; NULL with MemoryError set. */
uint8_t *row_bytes_more(row_bytes_t *bytes, size_t len);

typedef struct row_table row_table_t;

/* What makes one; a type that is made so is Table. */
PyObject *row_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

/* Appended to `key` and `row`, which hold half a row after another answer than OK. */
row_table_status_t row_table_key(row_table_t *table, PyObject *given, row_bytes_t *key);
row_table_status_t row_table_row(row_table_t *table, PyObject *given, row_bytes_t *key,
                                 row_bytes_t *row);
/* The bytes with which a key begins whose first columns have the values of a tuple. */
row_table_status_t row_table_beginning(row_table_t *table, PyObject *given, row_bytes_t *key);
/* old NULL: none is missing. */
row_table_status_t row_table_values(row_table_t *table, PyObject *values, const uint8_t *old,
                                    size_t old_len, row_bytes_t *key, row_bytes_t *row);
/* The key alone of such values, or of those of the key. */
row_table_status_t row_table_key_of(row_table_t *table, PyObject *values, row_bytes_t *key);
row_table_status_t row_table_key_values(row_table_t *table, PyObject *values, row_bytes_t *key);

/* The values of a row in schema order, or of a key in its order, as a tuple, if all of them are
 * known at sight: a new reference, the tuple itself that was given. partial: a dict may leave out
 * columns beside the key, which are missing then. */
row_table_status_t row_table_check(row_table_t *table, PyObject *given, bool partial,
                                   PyObject **out);
row_table_status_t row_table_check_key(row_table_t *table, PyObject *given, PyObject **out);
row_table_status_t row_table_fits(row_table_t *table, uint32_t column, PyObject *value);
/* Value i of a row, a new reference: of its checked values, NULL: it has none, or where it is missing
 * of the dict of an older row. NULL with an error set. */
PyObject *row_table_value(const row_table_t *table, PyObject *values, PyObject *old, uint32_t i);
/* Column i is missing in checked values. */
bool row_table_lacks(const row_table_t *table, PyObject *values, uint32_t i);
uint32_t row_table_columns(const row_table_t *table);
/* No column is missing in them. */
bool row_table_is_whole(const row_table_t *table, PyObject *values);
/* About what values take: eight bytes each, and the length of text and bytes. */
uint64_t row_table_size(PyObject *values);

/* A new dict, in schema order; NULL with the table's error set when the bytes are damaged. */
PyObject *row_table_dict(row_table_t *table, const uint8_t *key, size_t key_len,
                         const uint8_t *row, size_t row_len);

#endif
