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
    size_t bytes;         /* of key and row */
} reader_own_t;

/* The reader that an object is, else NULL with an error set. */
reader_t *reader_of(PyObject *object);

/* Whether it is of these tables, and they are in a snapshot as they are here. */
bool reader_is_current(const reader_t *reader, PyObject *tables, uint64_t snapshot);

/* Whether rows have entries in indexes, which are for Python. */
bool reader_is_indexed(const reader_t *reader);
row_table_t *reader_table(const reader_t *reader);

/* The row of a key as callers give it, None, or NotImplemented for a miss. */
PyObject *reader_find(reader_t *reader, PyObject *given, const reader_own_t *own);

/* Writes a checked row into a transaction's own sets. `key` takes the bytes of its key. */
int reader_write(reader_t *reader, int op, PyObject *values, reader_own_t *own, row_bytes_t *key);

#endif
