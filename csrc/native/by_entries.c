/* Rows by the entries of an index: a short range of its tablet, and each row by its key. */
#include "codec/keys_inline.h"
#include "common/bytes.h"
#include "native/reader.h"

/* The row of an entry's key, of which the row's own key stands behind `skip` bytes. */
static PyObject *row_of_entry(reader_t *self, slice_t entry, size_t skip, uint64_t snapshot,
                              row_bytes_t *key, row_bytes_t *row) {
    reader_place_t at;
    key->len = row->len = 0;
    if (entry.len < skip) return Py_NewRef(Py_NotImplemented);
    uint8_t *to = row_bytes_more(key, entry.len - skip);
    if (to == NULL) return NULL;
    copy_bytes(to, entry.data + skip, entry.len - skip);
    if (!reader_place(self, key, &at)) return Py_NewRef(Py_NotImplemented);
    switch (published_find(at.published, NULL, key->data, key->len, snapshot, row)) {
        case PUBLISHED_FOUND:
            return row_table_dict(reader_table(self), key->data, key->len, row->data, row->len);
        case PUBLISHED_ABSENT: return Py_NewRef(Py_None);
        case PUBLISHED_ERROR: return NULL;
        default: return Py_NewRef(Py_NotImplemented);
    }
}

static PyObject *rows_of_entries(reader_t *self, const published_range_t *entries, size_t skip) {
    const layers_range_t *range = entries->range;
    PyObject *tablets = Py_NewRef(reader_tablets(self)); /* a look may let other threads run */
    PyObject *made = PyList_New((Py_ssize_t)range->n);
    row_bytes_t key, row;
    size_t bytes = 0;
    row_bytes_init(&key);
    row_bytes_init(&row);
    for (uint32_t i = 0; made != NULL && i < range->n; i++) {
        const slice_t entry = {range->keys + range->ends[i], range->ends[i + 1] - range->ends[i]};
        PyObject *found = row_of_entry(self, entry, skip, entries->snapshot, &key, &row);
        bytes += row.len;
        if (found == Py_NotImplemented || (found != NULL && bytes > PUBLISHED_MOST_BYTES)) {
            Py_DECREF(found);
            Py_DECREF(made);
            made = Py_NewRef(Py_NotImplemented);
            break;
        }
        if (found == NULL || PyList_SetItem(made, (Py_ssize_t)i, found) < 0) Py_CLEAR(made);
    }
    row_bytes_free(&key);
    row_bytes_free(&row);
    Py_DECREF(tablets);
    return made;
}

/* by_entries(index, low, high, most, descending, snapshot, skip): the rows of the first entries with
 * low <= key < high in the tablet of an index, or the last ones, descending; None where one is not
 * there; their keys stand behind `skip` bytes of the entries'. NotImplemented for a miss, or where
 * they are many. */
PyObject *reader_by_entries(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    published_range_t entries;
    published_t *index;
    row_bytes_t rows;
    PyObject *made = NULL;
    if (n != 7) {
        PyErr_SetString(PyExc_TypeError,
                        "by_entries() takes index, low, high, most, descending, snapshot, skip");
        return NULL;
    }
    const size_t skip = PyLong_AsSize_t(args[6]);
    if (PyErr_Occurred() != NULL || (index = published_of(args[0])) == NULL) return NULL;
    if (published_range_of(args + 1, &entries) < 0) return NULL;
    if (published_range_init(&entries, &rows) < 0) return NULL;
    switch (published_find_range(index, &entries)) {
        case PUBLISHED_FOUND: made = rows_of_entries((reader_t *)object, &entries, skip); break;
        case PUBLISHED_ERROR: break;
        default: made = Py_NewRef(Py_NotImplemented);
    }
    published_range_free(&entries);
    return made;
}
