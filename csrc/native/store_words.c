/* What every commit and every read asks of the words that the processes of a store share:
 * storage/runtime.py says what they mean.
 *
 *     store.aim(words, numbers)   Words, and where in them stand: the change number; commits begun,
 *                                 done and synced; whether a sync failed; up to where all is durable.
 *                                 None: nowhere; then each call asks for `store._attach()` first
 *     store.change_word()         the number as it stands: odd while a change is under way
 *     store.change_number()       the number of the last acknowledged change; None while one is under
 *                                 way. Whoever sees the same one again has missed nothing in between
 *     store.all_synced()          every commit that could be seen at the call is on the disk
 *     store.to_sync()             the number of commits done, for `note_synced` when a sync has
 *                                 followed; None where a sync failed: later ones say nothing of what
 *                                 came before
 *     store.note_synced(count)    the first `count` commits are on the disk. False, and nothing is
 *                                 noted, where another sync failed meanwhile: the system tells of that
 *                                 once, so that this one did not hear of it
 *     store.raise_durable(stamp)  all commits at or below it are on the disk */
#include <stdbool.h>

#include "native/native.h"

enum { CHANGE, PENDING, COMMITTED, SYNCED, SYNC_FAILED, DURABLE, NUMBERS };

typedef struct {
    PyObject_HEAD
    PyObject *words; /* NULL: nowhere */
    size_t at[NUMBERS];
} store_t;

static PyObject *store_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)args, (void)kwargs;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return alloc(type, 0);
}

static void store_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((store_t *)object)->words);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyObject *store_aim(PyObject *object, PyObject *args) {
    store_t *self = (store_t *)object;
    PyObject *words;
    Py_ssize_t at[NUMBERS] = {0};
    if (!PyArg_ParseTuple(args, "O(nnnnnn):aim", &words, &at[CHANGE], &at[PENDING], &at[COMMITTED],
                          &at[SYNCED], &at[SYNC_FAILED], &at[DURABLE])) {
        return NULL;
    }
    for (int i = 0; words != Py_None && i < NUMBERS; i++) {
        if (words_check(words, at[i]) < 0) return NULL;
    }
    PyObject *before = self->words;
    self->words = words == Py_None ? NULL : Py_NewRef(words);
    for (int i = 0; i < NUMBERS; i++) self->at[i] = (size_t)at[i];
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static int attach(store_t *self) {
    if (self->words != NULL) return 0;
    PyObject *file = PyObject_CallMethod((PyObject *)self, "_attach", NULL);
    if (file == NULL) return -1;
    Py_DECREF(file);
    if (self->words != NULL) return 0;
    PyErr_SetString(PyExc_SystemError, "_attach() aimed nowhere");
    return -1;
}

static uint64_t load(const store_t *self, int word) { return words_at(self->words, self->at[word]); }

static PyObject *store_change_word(PyObject *object, PyObject *none) {
    store_t *self = (store_t *)object;
    (void)none;
    return attach(self) < 0 ? NULL : PyLong_FromUnsignedLongLong(load(self, CHANGE));
}

static PyObject *store_change_number(PyObject *object, PyObject *none) {
    store_t *self = (store_t *)object;
    (void)none;
    if (attach(self) < 0) return NULL;
    const uint64_t number = load(self, CHANGE);
    if (number & 1) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(number);
}

int store_words_check(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)store_new) return 0;
    PyErr_Format(PyExc_TypeError, "StoreWords are needed, not %R", object);
    return -1;
}

bool store_words_are_at(PyObject *object, uint64_t number) {
    const store_t *self = (const store_t *)object;
    return self->words != NULL && load(self, CHANGE) == number;
}

static PyObject *store_all_synced(PyObject *object, PyObject *none) {
    store_t *self = (store_t *)object;
    (void)none;
    return attach(self) < 0 ? NULL : PyBool_FromLong(load(self, PENDING) == load(self, SYNCED));
}

static PyObject *store_to_sync(PyObject *object, PyObject *none) {
    store_t *self = (store_t *)object;
    (void)none;
    if (attach(self) < 0) return NULL;
    if (load(self, SYNC_FAILED) != 0) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(load(self, COMMITTED));
}

static PyObject *store_note_synced(PyObject *object, PyObject *number) {
    store_t *self = (store_t *)object;
    const uint64_t count = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() != NULL || attach(self) < 0) return NULL;
    if (load(self, SYNC_FAILED) != 0) Py_RETURN_FALSE;
    words_lift(self->words, self->at[SYNCED], count);
    Py_RETURN_TRUE;
}

static PyObject *store_raise_durable(PyObject *object, PyObject *number) {
    store_t *self = (store_t *)object;
    const uint64_t stamp = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() != NULL || attach(self) < 0) return NULL;
    words_lift(self->words, self->at[DURABLE], stamp);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"aim", store_aim, METH_VARARGS, NULL},
    {"all_synced", store_all_synced, METH_NOARGS, NULL},
    {"change_number", store_change_number, METH_NOARGS, NULL},
    {"change_word", store_change_word, METH_NOARGS, NULL},
    {"note_synced", store_note_synced, METH_O, NULL},
    {"raise_durable", store_raise_durable, METH_O, NULL},
    {"to_sync", store_to_sync, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)store_new},
    {Py_tp_dealloc, (void *)store_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec store_words_spec = {
    .name = "txnkv._native.StoreWords",
    .basicsize = sizeof(store_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
