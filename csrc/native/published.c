#include "native/published.h"
#include "native/native.h"

#include <stdbool.h>
#include <string.h>

#include "codec/keys_inline.h"
#include "common/bytes.h"

#define NO_NUMBER UINT64_MAX

struct published {
    PyObject_HEAD
    Py_buffer epoch;   /* a u64 word */
    Py_buffer shown;   /* SHOWN_WORDS */
    PyObject *id_of;   /* of an LMDB transaction */
    PyObject *keep;    /* what all of the following lies in; NULL: nothing is published */
    PyObject *begin;   /* an LMDB read; NULL where nothing is on disk */
    Py_buffer word;    /* the change word */
    PyObject *defaults;
    const layers_t *layers;
    const row_layout_t *layout;
    uint64_t at;       /* the epoch */
    uint64_t txn_id;
    uint64_t since;    /* rows of memory below this stamp have another layout */
    uint64_t floor;    /* of the history */
    int nested;        /* rows in blocks have values that are not for the core */
};

static uint64_t word_of(const Py_buffer *buffer, size_t i) {
    return __atomic_load_n((const uint64_t *)buffer->buf + i, __ATOMIC_ACQUIRE);
}

uint64_t published_epoch(const published_t *self) { return word_of(&self->epoch, 0); }

static void empty(published_t *self) {
    PyObject *keep = self->keep, *begin = self->begin, *defaults = self->defaults;
    Py_buffer word = self->word;
    self->keep = self->begin = self->defaults = NULL;
    self->layers = NULL;
    memset(&self->word, 0, sizeof self->word);
    if (word.obj != NULL) PyBuffer_Release(&word);
    Py_XDECREF(begin);
    Py_XDECREF(defaults);
    Py_XDECREF(keep);
}

/* -- reading ------------------------------------------------------------------------------ */

/* The latest snapshot, all of which is here; 0 when it has to be asked for. */
static uint64_t latest(const published_t *self) {
    const uint64_t known = word_of(&self->shown, KNOWN), number = word_of(&self->word, 0);
    if (known == NO_NUMBER) return 0;
    const bool same = number == known || number == word_of(&self->shown, FLIGHT) ||
                      number == word_of(&self->shown, FLIGHT + 1);
    return same ? word_of(&self->shown, VISIBLE) : 0;
}

static published_status_t take(row_bytes_t *row, const uint8_t *data, size_t len) {
    uint8_t *at = row_bytes_more(row, len);
    if (at == NULL) return PUBLISHED_ERROR;
    copy_bytes(at, data, len);
    return PUBLISHED_FOUND;
}

static published_status_t take_from_block(published_t *self, const layer_found_t *found,
                                          row_bytes_t *row) {
    const uint8_t *defaults = (const uint8_t *)PyBytes_AsString(self->defaults);
    const size_t len = (size_t)PyBytes_Size(self->defaults);
    if (self->nested != 0) return PUBLISHED_MISS;
    for (;;) {
        const size_t room = row->cap - row->len;
        const int64_t used =
            layers_row(self->layout, defaults, len, found, row->data + row->len, room);
        if (used < 0) return PUBLISHED_MISS;
        if (row_bytes_more(row, (size_t)used) == NULL) return PUBLISHED_ERROR;
        if ((size_t)used <= room) return PUBLISHED_FOUND;
        row->len -= (size_t)used; /* again, there is more room: for its head at least */
    }
}

/* A look into row sets; with a read of LMDB around it, which ends with its object. */
typedef published_status_t (*look_t)(published_t *self, void *asked);

static published_status_t on_disk(published_t *self, look_t look, void *asked) {
    if (self->begin == NULL) return PUBLISHED_MISS;
    PyObject *txn = PyObject_CallNoArgs(self->begin);
    PyObject *id = txn == NULL ? NULL : PyObject_CallFunctionObjArgs(self->id_of, txn, NULL);
    published_status_t status = PUBLISHED_MISS;
    /* The begin may let other threads run, that take away what was published, or move its map. */
    const bool there = self->layers != NULL && self->at == word_of(&self->epoch, 0);
    if (id != NULL && there && PyLong_AsUnsignedLongLong(id) == self->txn_id) {
        status = look(self, asked);
    }
    if (status == PUBLISHED_MISS) PyErr_Clear();
    Py_XDECREF(id);
    Py_XDECREF(txn);
    return status;
}

/* The snapshot to look at; 0, at which there is nothing yet: the layers are not for it. */
static uint64_t here(const published_t *self, uint64_t snapshot) {
    if (self->layers == NULL || self->at != word_of(&self->epoch, 0)) return 0;
    if (snapshot == PUBLISHED_LATEST) snapshot = latest(self);
    if (snapshot > word_of(&self->shown, APPLIED) || snapshot < self->floor) return 0;
    return snapshot;
}

typedef struct {
    const mem_row_set_t *own;
    slice_t key;
    uint64_t snapshot;
    row_bytes_t *row;
} key_asked_t;

static published_status_t look_for_key(published_t *self, void *of) {
    const key_asked_t *asked = of;
    layer_found_t found;
    switch (layers_find(self->layers, asked->own, asked->key.data, asked->key.len,
                        asked->snapshot, &found)) {
        case LAYERS_ABSENT: return PUBLISHED_ABSENT;
        case LAYERS_BLOCK: return take_from_block(self, &found, asked->row);
        default: return PUBLISHED_MISS; /* a block is to be loaded, or is damaged */
    }
}

published_status_t published_find(published_t *self, const mem_row_set_t *own, const uint8_t *key,
                                  size_t key_len, uint64_t snapshot, row_bytes_t *row) {
    layer_found_t found;
    snapshot = here(self, snapshot);
    if (snapshot == 0) return PUBLISHED_MISS;
    const uint32_t state = layers_find_memory(self->layers, own, key, key_len, snapshot, &found);
    if (state == LAYERS_MEMORY && found.entry->stamp < self->since) return PUBLISHED_MISS;
    if (state != LAYERS_ABSENT) return take(row, found.entry->row, found.entry->row_len);
    if (found.entry != NULL) return PUBLISHED_ABSENT;
    if (layers_meet(self->layers, key, key_len, snapshot) == 0) return PUBLISHED_ABSENT;
    key_asked_t asked = {own, {key, key_len}, snapshot, row};
    return on_disk(self, look_for_key, &asked);
}

static published_status_t look_for_range(published_t *self, void *of) {
    published_range_t *asked = of;
    layers_range_t *range = asked->range;
    const layers_range_status_t status =
        layers_range(self->layers, asked->own, asked->low.data, asked->low.len, asked->high.data,
                     asked->high.len, asked->snapshot, asked->most, asked->descending, range);
    if (status == LAYERS_RANGE_LONG) return PUBLISHED_MANY;
    if (status != LAYERS_RANGE_OK) return PUBLISHED_MISS; /* a block is to be loaded, or is damaged */
    for (uint32_t i = 0; i < range->n; i++) {
        const layer_found_t *found = range->found + i;
        published_status_t taken;
        if (found->state == LAYERS_BLOCK) {
            taken = take_from_block(self, found, asked->rows);
        } else {
            const bool former = found->state == LAYERS_MEMORY && found->entry->stamp < self->since;
            if (former) return PUBLISHED_MISS;
            taken = take(asked->rows, found->entry->row, found->entry->row_len);
        }
        if (taken != PUBLISHED_FOUND) return taken;
        if (asked->rows->len > PUBLISHED_MOST_BYTES) return PUBLISHED_MISS;
        asked->ends[i] = asked->rows->len;
    }
    return PUBLISHED_FOUND;
}

published_status_t published_find_range(published_t *self, published_range_t *asked) {
    asked->snapshot = here(self, asked->snapshot);
    if (asked->snapshot == 0) return PUBLISHED_MISS;
    if (self->layers->steps_n == 0) return look_for_range(self, asked);
    return on_disk(self, look_for_range, asked);
}

/* -- the type ----------------------------------------------------------------------------- */

static int words(PyObject *given, Py_buffer *out, Py_ssize_t n) {
    if (PyObject_GetBuffer(given, out, PyBUF_SIMPLE) < 0) return -1;
    if (out->len >= n * 8 && (uintptr_t)out->buf % 8 == 0) return 0;
    PyErr_Format(PyExc_ValueError, "%zd aligned words are needed", n);
    return -1;
}

static PyObject *published_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *epoch, *shown, *id_of;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO", &epoch, &shown, &id_of)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    published_t *self = (published_t *)alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(id_of);
    self->id_of = id_of;
    if (words(epoch, &self->epoch, 1) < 0 || words(shown, &self->shown, SHOWN_WORDS) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int published_traverse(PyObject *object, visitproc visit, void *arg) {
    published_t *self = (published_t *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->id_of);
    Py_VISIT(self->keep);
    Py_VISIT(self->begin);
    return 0;
}

static int published_clear(PyObject *object) {
    published_t *self = (published_t *)object;
    empty(self);
    Py_CLEAR(self->id_of);
    return 0;
}

static void published_dealloc(PyObject *object) {
    published_t *self = (published_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    published_clear(object);
    if (self->epoch.obj != NULL) PyBuffer_Release(&self->epoch);
    if (self->shown.obj != NULL) PyBuffer_Release(&self->shown);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

/* put(epoch, word, keep, layers, layout, defaults, since, floor, begin, txn_id, nested) */
static PyObject *published_put(PyObject *object, PyObject *args) {
    published_t *self = (published_t *)object;
    unsigned long long at, layers, layout, since, floor, txn_id;
    PyObject *word, *keep, *defaults, *begin;
    int nested;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(args, "KOOKKSKKOKp", &at, &word, &keep, &layers, &layout, &defaults,
                          &since, &floor, &begin, &txn_id, &nested)) {
        return NULL;
    }
    memset(&buffer, 0, sizeof buffer);
    if (words(word, &buffer, 1) < 0) {
        if (buffer.obj != NULL) PyBuffer_Release(&buffer);
        return NULL;
    }
    empty(self); /* it may run code of Python, and other threads */
    if (self->keep != NULL) {
        PyBuffer_Release(&buffer);
        Py_RETURN_NONE;
    }
    self->word = buffer;
    Py_INCREF(keep);
    self->keep = keep;
    Py_INCREF(defaults);
    self->defaults = defaults;
    if (begin != Py_None) {
        Py_INCREF(begin);
        self->begin = begin;
    }
    self->layers = (const layers_t *)(uintptr_t)layers;
    self->layout = (const row_layout_t *)(uintptr_t)layout;
    self->at = at;
    self->since = since;
    self->floor = floor;
    self->txn_id = txn_id;
    self->nested = nested;
    Py_RETURN_NONE;
}

static PyObject *published_take_away(PyObject *object, PyObject *none) {
    (void)none;
    empty((published_t *)object);
    Py_RETURN_NONE;
}

/* find(key, snapshot): the bytes of a row, None, or NotImplemented for a miss. */
static PyObject *published_find_row(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    char *key;
    Py_ssize_t key_len;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "find() takes a key and a snapshot");
        return NULL;
    }
    const unsigned long long snapshot = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() != NULL || PyBytes_AsStringAndSize(args[0], &key, &key_len) < 0) {
        return NULL;
    }
    row_bytes_t row;
    row_bytes_init(&row);
    PyObject *made = NULL;
    switch (published_find((published_t *)object, NULL, (const uint8_t *)key, (size_t)key_len,
                           snapshot, &row)) {
        case PUBLISHED_FOUND:
            made = PyBytes_FromStringAndSize((const char *)row.data, (Py_ssize_t)row.len);
            break;
        case PUBLISHED_ABSENT: made = Py_NewRef(Py_None); break;
        case PUBLISHED_ERROR: break;
        default: made = Py_NewRef(Py_NotImplemented);
    }
    row_bytes_free(&row);
    return made;
}

/* The dicts of rows, which may run code of Python: nothing of what is published is used. */
static PyObject *dicts_of(row_table_t *table, const published_range_t *asked) {
    const layers_range_t *range = asked->range;
    PyObject *made = PyList_New((Py_ssize_t)range->n);
    size_t at = 0;
    for (uint32_t i = 0; made != NULL && i < range->n; i++) {
        PyObject *row = row_table_dict(table, range->keys + range->ends[i],
                                       range->ends[i + 1] - range->ends[i], asked->rows->data + at,
                                       asked->ends[i] - at);
        if (row == NULL || PyList_SetItem(made, (Py_ssize_t)i, row) < 0) Py_CLEAR(made);
        at = asked->ends[i];
    }
    return made;
}

int published_range_init(published_range_t *asked, row_bytes_t *rows) {
    row_bytes_init(rows);
    asked->rows = rows;
    asked->range = PyMem_Malloc(sizeof *asked->range);
    asked->ends = PyMem_Malloc(LAYERS_FEW * sizeof *asked->ends);
    if (asked->range != NULL && asked->ends != NULL) return 0;
    published_range_free(asked);
    PyErr_NoMemory();
    return -1;
}

void published_range_free(published_range_t *asked) {
    PyMem_Free(asked->ends);
    PyMem_Free(asked->range);
    row_bytes_free(asked->rows);
}

static int bound_of(PyObject *given, slice_t *out) {
    char *data;
    Py_ssize_t len;
    *out = (slice_t){NULL, 0};
    if (given == Py_None) return 0;
    if (PyBytes_AsStringAndSize(given, &data, &len) < 0) return -1;
    *out = (slice_t){(const uint8_t *)data, (size_t)len};
    return 0;
}

int published_range_of(PyObject *const *args, published_range_t *out) {
    *out = (published_range_t){.own = NULL};
    if (bound_of(args[0], &out->low) < 0 || bound_of(args[1], &out->high) < 0) return -1;
    const unsigned long most = PyLong_AsUnsignedLong(args[2]);
    const int descending = PyObject_IsTrue(args[3]);
    out->snapshot = PyLong_AsUnsignedLongLong(args[4]);
    out->most = most < LAYERS_FEW ? (uint32_t)most : LAYERS_FEW;
    out->descending = descending > 0;
    return PyErr_Occurred() == NULL ? 0 : -1;
}

static PyObject *range_of(published_t *self, row_table_t *table, published_range_t *asked) {
    row_bytes_t rows;
    PyObject *made = NULL;
    if (published_range_init(asked, &rows) < 0) return NULL;
    switch (published_find_range(self, asked)) {
        case PUBLISHED_FOUND: made = dicts_of(table, asked); break;
        case PUBLISHED_MANY: made = Py_NewRef(Py_None); break;
        case PUBLISHED_ERROR: break;
        default: made = Py_NewRef(Py_NotImplemented);
    }
    published_range_free(asked);
    return made;
}

/* range(table, low, high, most, descending, snapshot, own): the first rows with low <= key < high
 * (None: no bound) as dicts, ascending; or the last ones, descending. None where they are many,
 * NotImplemented for a miss. */
static PyObject *published_range_rows(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    published_range_t asked;
    if (n != 7 || PyType_GetSlot(Py_TYPE(args[0]), Py_tp_new) != (void *)row_table_new) {
        PyErr_SetString(PyExc_TypeError,
                        "range() takes table, low, high, most, descending, snapshot, own");
        return NULL;
    }
    if (published_range_of(args + 1, &asked) < 0) return NULL;
    if (args[6] != Py_None && (asked.own = mem_set_of(args[6])) == NULL) return NULL;
    return range_of((published_t *)object, (row_table_t *)args[0], &asked);
}

published_t *published_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)published_new) {
        return (published_t *)object;
    }
    PyErr_Format(PyExc_TypeError, "a Published is needed, not %R", object);
    return NULL;
}

static PyMethodDef methods[] = {
    {"put", published_put, METH_VARARGS, NULL},
    {"take_away", published_take_away, METH_NOARGS, NULL},
    {"find", (PyCFunction)(void (*)(void))published_find_row, METH_FASTCALL, NULL},
    {"range", (PyCFunction)(void (*)(void))published_range_rows, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)published_new},
    {Py_tp_dealloc, (void *)published_dealloc},
    {Py_tp_traverse, (void *)published_traverse},
    {Py_tp_clear, (void *)published_clear},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec published_spec = {
    .name = "txnkv._native.Published",
    .basicsize = sizeof(published_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
