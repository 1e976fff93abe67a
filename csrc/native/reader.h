/* The rows of a table one by one: read by keys as callers give them, as dicts, and written into a
 * transaction's own sets. What tablets have in common with the current catalog is confirmed for an
 * epoch (native/published.h): as long as that is, the table is as it is here. */
#ifndef TXNKV_NATIVE_READER_H
#define TXNKV_NATIVE_READER_H

#include "native/published.h"

typedef struct reader reader_t;

/* What an operation makes of a key: tables/operations.py has the table. A PUT is an upsert of whole
 * rows of which nobody asks whether they were there. */
enum { INSERT = 0, UPSERT = 1, UPDATE = 2, DELETE = 3, PUT = 4 };

/* What became of a row; 0 is left to Python. */
enum { LEFT = 0, INSERTED = 1, UPDATED = 2, DELETED = 3, NO_SET = 4, FAILED = 5 };

/* A transaction's own rows, and what it reads; the row that was written last. */
typedef struct {
    PyObject *sets;       /* {id of a tablet: MemRowSet}; of a read NULL: none */
    PyObject *add_key;    /* tells the read set of a key, or None */
    uint64_t snapshot;
    uint64_t *statements; /* the number of the statement before */
    uint64_t statement;
    PyObject *place;      /* its tablet, a reference of its own; of NO_SET, it has no set so far */
    int64_t rows;         /* that were written: its own, and its entries in indexes */
    size_t bytes;         /* of their keys and rows */
} reader_own_t;

/* A tablet, as long as the tuple of tablets is held that it was taken from. */
typedef struct {
    published_t *published;
    PyObject *id, *tablet;
} reader_place_t;

/* The reader that an object is, else NULL with an error set. */
reader_t *reader_of(PyObject *object);

/* Whether it is of these tables, and they are in a snapshot as they are here. */
bool reader_is_current(const reader_t *reader, PyObject *tables, uint64_t snapshot);

/* Whether rows have entries in indexes: those of `reader_indexes`, of NULL they are for Python. */
bool reader_is_indexed(const reader_t *reader);
PyObject *reader_indexes(const reader_t *reader);
row_table_t *reader_table(const reader_t *reader);
PyObject *reader_tablets(const reader_t *reader);

/* A key's tablet; false: it does not follow from the key alone. */
bool reader_place(const reader_t *reader, const row_bytes_t *key, reader_place_t *at);

/* A transaction's own set of a tablet; NULL, maybe with an error set: there is none. */
mem_row_set_t *reader_set(const reader_own_t *own, const reader_place_t *at);

/* Finds a row in a transaction's own set, or else in its snapshot, of which the read set is told. */
published_status_t reader_look(const reader_place_t *at, const reader_own_t *own,
                               const row_bytes_t *key, row_bytes_t *row);

/* The row of a key as callers give it, None, or NotImplemented for a miss. */
PyObject *reader_find(reader_t *reader, PyObject *given, const reader_own_t *own);

/* A method of the type (by_entries.c). */
PyObject *reader_by_entries(PyObject *reader, PyObject *const *args, Py_ssize_t n);

/* Writes a checked row into a transaction's own sets, with its entries (row_write.c). `key` takes
 * the bytes of its key. After FAILED what came behind the statement before is to be forgotten. */
int row_write(reader_t *reader, int op, PyObject *values, reader_own_t *own, row_bytes_t *key);

#endif
