/* What readers and transactions hold while no other process knows of them, a snapshot, or a version
 * of the manifest, and an id; and all such numbers of this process, counted, of which the least is
 * told to others.
 *
 * Each call is one step under the GIL: no signal, no other thread comes between what is counted and
 * what is told, and a holding that is dropped is given back on the spot. */
#define _POSIX_C_SOURCE 200809L
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "common/shared.h"
#include "native/native.h"
#include "native/published.h"

#define NOTHING UINT64_MAX

/* -- counted numbers, ascending -------------------------------------------------------------- */

typedef struct {
    uint64_t value;
    uint64_t count;
} item_t;

typedef struct {
    item_t *items;
    size_t begin, end, cap; /* [begin, end) is used: most come at the end and go at the beginning */
} numbers_t;

static uint64_t least(const numbers_t *self, uint64_t low) {
    size_t lo = self->begin, hi = self->end;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        if (self->items[mid].value < low) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo < self->end ? self->items[lo].value : NOTHING;
}

static size_t place_of(const numbers_t *self, uint64_t value) {
    size_t at = self->end, lo = self->begin;
    if (at == lo || self->items[at - 1].value < value) return at;
    while (lo < at) {
        const size_t mid = lo + (at - lo) / 2;
        if (self->items[mid].value < value) {
            lo = mid + 1;
        } else {
            at = mid;
        }
    }
    return lo;
}

static bool make_room(numbers_t *self) {
    if (self->end < self->cap) return true;
    const size_t n = self->end - self->begin;
    if (self->begin <= n) {
        const size_t cap = self->cap == 0 ? 16 : 2 * self->cap;
        item_t *more = PyMem_Realloc(self->items, cap * sizeof *more);
        if (more == NULL) return false;
        self->items = more;
        self->cap = cap;
    } else {
        memmove(self->items, self->items + self->begin, n * sizeof *self->items);
        self->begin = 0;
        self->end = n;
    }
    return true;
}

static bool add(numbers_t *self, uint64_t value) {
    size_t at = place_of(self, value);
    if (at < self->end && self->items[at].value == value) {
        self->items[at].count++;
        return true;
    }
    const size_t behind = self->end - at;
    if (!make_room(self)) return false;
    at = self->end - behind;
    memmove(self->items + at + 1, self->items + at, behind * sizeof *self->items);
    self->items[at] = (item_t){value, 1};
    self->end++;
    return true;
}

static bool take_away(numbers_t *self, uint64_t value) {
    const size_t at = place_of(self, value);
    if (at == self->end || self->items[at].value != value) return false;
    if (--self->items[at].count != 0) return true;
    if (at == self->begin) {
        self->begin++;
    } else {
        self->end--;
        memmove(self->items + at, self->items + at + 1, (self->end - at) * sizeof *self->items);
    }
    return true;
}

/* -- pins ------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    numbers_t numbers;
    PyObject *words; /* of the runtime file; NULL: nobody is told */
    size_t word, change;
    pid_t pid; /* whose words they are */
    uint64_t told;
} pins_t;

/* A forked child drops what other threads had before it is told that it is one: that the parent goes
 * on to hold. */
static void tell(pins_t *self, uint64_t value) {
    self->told = value;
    if (self->words != NULL && self->pid == getpid()) words_put(self->words, self->word, value);
}

static bool pin(pins_t *self, uint64_t value) {
    if (value < self->told) tell(self, value); /* before anything relies on it */
    return add(&self->numbers, value);
}

static bool unpin(pins_t *self, uint64_t value) {
    if (!take_away(&self->numbers, value)) return false;
    const uint64_t now = least(&self->numbers, 0);
    if (now != self->told) tell(self, now);
    return true;
}

static int number_of(PyObject *given, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(given);
    return *out == UINT64_MAX && PyErr_Occurred() != NULL ? -1 : 0;
}

static PyObject *pins_pin(PyObject *self, PyObject *value) {
    uint64_t number;
    if (number_of(value, &number) < 0) return NULL;
    if (number == NOTHING) {
        PyErr_SetString(PyExc_ValueError, "this number says that there is no pin");
        return NULL;
    }
    if (!pin((pins_t *)self, number)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *pins_unpin(PyObject *self, PyObject *value) {
    uint64_t number;
    if (number_of(value, &number) < 0) return NULL;
    return PyBool_FromLong(unpin((pins_t *)self, number));
}

/* aim(words, word, change): the least is told in a word of shared memory, None: nowhere; another
 * word is the change number. */
static PyObject *pins_aim(PyObject *object, PyObject *args) {
    pins_t *self = (pins_t *)object;
    PyObject *words;
    Py_ssize_t word, change;
    if (!PyArg_ParseTuple(args, "Onn:aim", &words, &word, &change)) return NULL;
    if (words != Py_None && (words_check(words, word) < 0 || words_check(words, change) < 0)) {
        return NULL;
    }
    PyObject *before = self->words;
    self->words = words == Py_None ? NULL : Py_NewRef(words);
    self->word = (size_t)word;
    self->change = (size_t)change;
    self->pid = getpid();
    tell(self, least(&self->numbers, 0));
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *plain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_Size(args) != 0 || (kwargs != NULL && PyDict_Size(kwargs) != 0)) {
        PyErr_SetString(PyExc_TypeError, "it takes no arguments");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static PyObject *pins_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    pins_t *made = (pins_t *)plain_new(type, args, kwargs);
    if (made != NULL) made->told = NOTHING;
    return (PyObject *)made;
}

static void end_of(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static void pins_dealloc(PyObject *object) {
    pins_t *self = (pins_t *)object;
    PyMem_Free(self->numbers.items);
    Py_XDECREF(self->words);
    end_of(object);
}

static Py_ssize_t pins_length(PyObject *self) {
    const numbers_t *numbers = &((pins_t *)self)->numbers;
    return (Py_ssize_t)(numbers->end - numbers->begin);
}

static PyMethodDef pins_methods[] = {
    {"aim", pins_aim, METH_VARARGS, NULL},
    {"pin", pins_pin, METH_O, NULL},
    {"unpin", pins_unpin, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pins_slots[] = {
    {Py_tp_new, (void *)pins_new},
    {Py_tp_dealloc, (void *)pins_dealloc},
    {Py_tp_methods, (void *)pins_methods},
    {Py_sq_length, (void *)pins_length},
    {0, NULL},
};

PyType_Spec pins_spec = {
    .name = "txnkv._native.PinSet",
    .basicsize = sizeof(pins_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pins_slots,
};

/* -- ids ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    numbers_t live;
    uint64_t next, end;
} ids_t;

static bool take(ids_t *self, uint64_t *out) {
    *out = self->next;
    if (self->next == self->end || !add(&self->live, self->next)) return false;
    self->next++;
    return true;
}

/* give(first, end): those to be taken from now on. */
static PyObject *ids_give(PyObject *object, PyObject *args) {
    unsigned long long first, end;
    if (!PyArg_ParseTuple(args, "KK:give", &first, &end)) return NULL;
    ((ids_t *)object)->next = first;
    ((ids_t *)object)->end = end;
    Py_RETURN_NONE;
}

/* take(): the next one, live until it is `ended`; None: there is none. */
static PyObject *ids_take(PyObject *self, PyObject *none) {
    uint64_t id;
    (void)none;
    if (!take((ids_t *)self, &id)) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(id);
}

static PyObject *ids_ended(PyObject *self, PyObject *id) {
    uint64_t number;
    if (number_of(id, &number) < 0) return NULL;
    take_away(&((ids_t *)self)->live, number);
    Py_RETURN_NONE;
}

/* least(first, last): the least of a range that is live or to be taken; None: there is none. */
static PyObject *ids_least(PyObject *object, PyObject *args) {
    const ids_t *self = (ids_t *)object;
    unsigned long long first, last;
    if (!PyArg_ParseTuple(args, "KK:least", &first, &last)) return NULL;
    uint64_t found = least(&self->live, first);
    if (self->next < self->end && self->next < found && self->next >= first) found = self->next;
    if (found > last) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(found);
}

static void ids_dealloc(PyObject *self) {
    PyMem_Free(((ids_t *)self)->live.items);
    end_of(self);
}

static Py_ssize_t ids_length(PyObject *self) {
    const numbers_t *live = &((ids_t *)self)->live;
    return (Py_ssize_t)(live->end - live->begin);
}

static int ids_contains(PyObject *self, PyObject *id) {
    const numbers_t *live = &((ids_t *)self)->live;
    uint64_t number;
    if (number_of(id, &number) < 0) return -1;
    const size_t at = place_of(live, number);
    return at < live->end && live->items[at].value == number;
}

static PyObject *ids_left(PyObject *object, void *closure) {
    const ids_t *self = (ids_t *)object;
    (void)closure;
    return PyLong_FromUnsignedLongLong(self->end - self->next);
}

static PyGetSetDef ids_fields[] = {
    {"left", ids_left, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef ids_methods[] = {
    {"ended", ids_ended, METH_O, NULL},
    {"give", ids_give, METH_VARARGS, NULL},
    {"least", ids_least, METH_VARARGS, NULL},
    {"take", ids_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ids_slots[] = {
    {Py_tp_new, (void *)plain_new},
    {Py_tp_dealloc, (void *)ids_dealloc},
    {Py_tp_methods, (void *)ids_methods},
    {Py_tp_getset, (void *)ids_fields},
    {Py_sq_length, (void *)ids_length},
    {Py_sq_contains, (void *)ids_contains},
    {0, NULL},
};

PyType_Spec ids_spec = {
    .name = "txnkv._native.IdSet",
    .basicsize = sizeof(ids_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = ids_slots,
};

/* -- holdings ---------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *pins, *ids;
    uint64_t snapshot, id;
    bool has_snapshot, has_id;
} holding_t;

static void give_back(holding_t *self) {
    if (self->has_snapshot) unpin((pins_t *)self->pins, self->snapshot);
    if (self->has_id) take_away(&((ids_t *)self->ids)->live, self->id);
    self->has_snapshot = self->has_id = false;
}

static bool hold(holding_t *self, uint64_t snapshot) {
    if (self->has_snapshot) unpin((pins_t *)self->pins, self->snapshot);
    self->has_snapshot = pin((pins_t *)self->pins, snapshot);
    self->snapshot = snapshot;
    return self->has_snapshot;
}

/* Whether nothing was acknowledged since `shown` was written. */
static bool is_latest(const pins_t *pins, const uint64_t *shown) {
    if (pins->words == NULL || shown[KNOWN] == NOTHING) return false;
    const uint64_t number = words_at(pins->words, pins->change);
    return number == shown[KNOWN] || number == shown[FLIGHT] || number == shown[FLIGHT + 1];
}

/* begin(shown, floor, id): the latest snapshot, pinned, and this id, None: the next one. False: the
 * one or the other has to be looked for, and nothing is held. */
static PyObject *holding_begin(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    holding_t *self = (holding_t *)object;
    Py_buffer buffer;
    uint64_t floor, shown[SHOWN_WORDS];
    if (n != 3 || self->ids == NULL || self->has_id || self->has_snapshot) {
        PyErr_SetString(PyExc_TypeError, "begin() takes shown, floor and id, once");
        return NULL;
    }
    if (number_of(args[1], &floor) < 0) return NULL;
    if (PyObject_GetBuffer(args[0], &buffer, PyBUF_SIMPLE) < 0) return NULL;
    const bool fits = buffer.len == sizeof shown;
    if (fits) memcpy(shown, buffer.buf, sizeof shown);
    PyBuffer_Release(&buffer);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "shown has five words");
        return NULL;
    }
    if (shown[KNOWN] == NOTHING || shown[VISIBLE] < floor) Py_RETURN_FALSE;
    /* Pinned before it is looked whether it is the latest: from then on it stays. */
    bool done = hold(self, shown[VISIBLE]) && is_latest((pins_t *)self->pins, shown);
    if (done && args[2] != Py_None) {
        if (number_of(args[2], &self->id) < 0) {
            give_back(self);
            return NULL;
        }
        self->has_id = true;
    } else if (done) {
        done = self->has_id = take((ids_t *)self->ids, &self->id);
    }
    if (!done) give_back(self);
    return PyBool_FromLong(done);
}

/* pin(snapshot): in place of the one before. */
static PyObject *holding_pin(PyObject *self, PyObject *snapshot) {
    uint64_t number;
    if (number_of(snapshot, &number) < 0) return NULL;
    if (!hold((holding_t *)self, number)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* take(id): this id, None: the next one; false: there is none. */
static PyObject *holding_take(PyObject *object, PyObject *id) {
    holding_t *self = (holding_t *)object;
    if (self->ids == NULL) {
        PyErr_SetString(PyExc_TypeError, "this Holding is of a snapshot alone");
        return NULL;
    }
    if (id == Py_None) {
        self->has_id = take((ids_t *)self->ids, &self->id);
    } else {
        if (number_of(id, &self->id) < 0) return NULL;
        self->has_id = true;
    }
    return PyBool_FromLong(self->has_id);
}

static PyObject *holding_end(PyObject *self, PyObject *none) {
    (void)none;
    give_back((holding_t *)self);
    Py_RETURN_NONE;
}

static PyObject *holding_snapshot(PyObject *object, void *closure) {
    const holding_t *self = (holding_t *)object;
    (void)closure;
    if (!self->has_snapshot) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(self->snapshot);
}

static PyObject *holding_id(PyObject *object, void *closure) {
    const holding_t *self = (holding_t *)object;
    (void)closure;
    if (!self->has_id) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(self->id);
}

static bool is_a(PyObject *object, newfunc made_by) {
    return PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)made_by;
}

static PyObject *holding_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *pins, *ids = NULL;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Holding takes no names of arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O|O:Holding", &pins, &ids)) return NULL;
    if (!is_a(pins, pins_new) || (ids != NULL && !is_a(ids, plain_new))) {
        PyErr_SetString(PyExc_TypeError, "Holding takes a PinSet, and an IdSet for ids");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    holding_t *made = (holding_t *)alloc(type, 0);
    if (made == NULL) return NULL;
    made->pins = Py_NewRef(pins);
    made->ids = Py_XNewRef(ids);
    return (PyObject *)made;
}

static void holding_dealloc(PyObject *object) {
    holding_t *self = (holding_t *)object;
    if (self->pins != NULL) give_back(self);
    Py_XDECREF(self->pins);
    Py_XDECREF(self->ids);
    end_of(object);
}

static PyMethodDef holding_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))holding_begin, METH_FASTCALL, NULL},
    {"end", holding_end, METH_NOARGS, NULL},
    {"pin", holding_pin, METH_O, NULL},
    {"take", holding_take, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef holding_fields[] = {
    {"snapshot", holding_snapshot, NULL, NULL, NULL},
    {"txn_id", holding_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot holding_slots[] = {
    {Py_tp_new, (void *)holding_new},
    {Py_tp_dealloc, (void *)holding_dealloc},
    {Py_tp_methods, (void *)holding_methods},
    {Py_tp_getset, (void *)holding_fields},
    {0, NULL},
};

PyType_Spec holding_spec = {
    .name = "txnkv._native.Holding",
    .basicsize = sizeof(holding_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = holding_slots,
};
