/* Messages that are ready for the one consumer of an exclusive subscription, one after the other:
 * topics/acks/exclusive.py.
 *
 *     delivery = Delivery(store, counter, main)   StoreWords, what counts, by its `value`, and the
 *                                            thread that signals interrupt
 *     delivery.know(number)                  the change number as of which all of it is known; None
 *     delivery.offer(partition, ready)       what is in a deque may be given
 *     delivery.receive() -> message or None  None: it takes a look
 *     delivery.unsure                        the message that this thread may not have: whoever has it
 *                                            sets it to None
 *     delivery.withdraw(partition, offset)   acknowledgements that were offered in a partition, or
 *                                            with None in all, look again; and so does `receive`, where
 *                                            messages up to the offset wait to be given
 *     delivery.end()                         nothing is offered any more; what is unsure stays so
 *
 * A call is one step under the GIL: no signal, no other thread comes between its parts. */
#define _POSIX_C_SOURCE 200809L
#include "native/delivery.h"

#include <structmember.h>
#include <unistd.h>

enum { EPOCHS = 16 };

struct delivery {
    PyObject_HEAD
    PyObject *store, *counter, *value;
    PyObject *ready, *first; /* a deque, and what takes its first; NULL: nothing is offered */
    PyObject *unsure; /* no more of what was given: its value is the program's, and may refer to this */
    unsigned long main;
    Py_ssize_t left;
    long long partition, next; /* the offset behind the last that was given */
    uint64_t number, epoch, epochs[EPOCHS]; /* of all partitions; of those of a number modulo EPOCHS */
    pid_t pid;
    bool known;
};

void count_one(PyObject *counter, PyObject *name) {
    PyObject *before = PyObject_GetAttr(counter, name), *one = PyLong_FromLong(1);
    PyObject *now = before == NULL || one == NULL ? NULL : PyNumber_Add(before, one);
    if (now == NULL || PyObject_SetAttr(counter, name, now) < 0) PyErr_Clear();
    Py_XDECREF(before);
    Py_XDECREF(one);
    Py_XDECREF(now);
}

/* Both only grow, and so does their sum. */
uint64_t delivery_epoch(const delivery_t *self, long long partition) {
    return self->epoch + self->epochs[(unsigned long long)partition % EPOCHS];
}

bool delivery_is_current(const delivery_t *self) {
    return self->known && store_words_are_at(self->store, self->number) && self->pid == getpid();
}

bool delivery_has_given(const delivery_t *self, const message_place_t *place) {
    return self->left == 0 || place->partition != self->partition || place->offset < self->next;
}

static void take_away(delivery_t *self) {
    PyObject *ready = self->ready, *first = self->first;
    self->ready = self->first = NULL;
    self->left = 0;
    Py_XDECREF(ready);
    Py_XDECREF(first);
}

static PyObject *delivery_know(PyObject *object, PyObject *number) {
    delivery_t *self = (delivery_t *)object;
    const uint64_t given = number == Py_None ? 0 : PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred() != NULL) return NULL;
    self->known = number != Py_None;
    self->number = given;
    Py_RETURN_NONE;
}

static PyObject *delivery_offer(PyObject *object, PyObject *args) {
    delivery_t *self = (delivery_t *)object;
    long long partition;
    PyObject *ready;
    if (!PyArg_ParseTuple(args, "LO:offer", &partition, &ready)) return NULL;
    PyObject *first = PyObject_GetAttrString(ready, "popleft");
    message_place_t place;
    PyObject *next = first == NULL ? NULL : PySequence_GetItem(ready, 0);
    const bool is_message = next != NULL && message_place(next, &place);
    Py_XDECREF(next);
    if (!is_message) {
        Py_XDECREF(first);
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_TypeError, "offer() takes a deque of messages");
        }
        return NULL;
    }
    take_away(self);
    self->ready = Py_NewRef(ready);
    self->first = first;
    self->partition = partition;
    self->next = place.offset;
    self->left = PySequence_Size(ready);
    Py_RETURN_NONE;
}

static PyObject *delivery_receive(PyObject *object, PyObject *nothing) {
    delivery_t *self = (delivery_t *)object;
    (void)nothing;
    const bool is_main = PyThread_get_thread_ident() == self->main;
    const bool is_unsure = is_main && self->unsure != NULL && self->unsure != Py_None;
    if (self->left == 0 || is_unsure) Py_RETURN_NONE;
    if (!delivery_is_current(self)) Py_RETURN_NONE;
    PyObject *found = PyObject_CallNoArgs(self->first);
    if (found == NULL) return NULL;
    message_place_t place;
    if (message_place(found, &place)) self->next = place.offset + 1;
    self->left--;
    if (is_main) {
        PyObject *none = self->unsure;
        self->unsure = Py_NewRef(found);
        Py_XDECREF(none);
    }
    count_one(self->counter, self->value);
    return found;
}

static PyObject *delivery_withdraw(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    delivery_t *self = (delivery_t *)object;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "withdraw() takes a partition or None, and an offset");
        return NULL;
    }
    const bool is_all = args[0] == Py_None;
    const long long partition = is_all ? 0 : PyLong_AsLongLong(args[0]);
    const long long upto = PyErr_Occurred() != NULL ? -1 : PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() != NULL) return NULL;
    if (is_all) self->epoch++;
    else self->epochs[(unsigned long long)partition % EPOCHS]++;
    if (upto > self->next && (is_all || partition == self->partition)) self->left = 0;
    Py_RETURN_NONE;
}

static PyObject *delivery_end(PyObject *object, PyObject *none) {
    (void)none;
    take_away((delivery_t *)object);
    Py_RETURN_NONE;
}

/* -- the type -------------------------------------------------------------------------------- */

static PyObject *delivery_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *store, *counter;
    (void)kwargs;
    unsigned long main;
    if (!PyArg_ParseTuple(args, "OOk:Delivery", &store, &counter, &main)) return NULL;
    if (store_words_check(store) < 0) return NULL;
    PyObject *value = PyUnicode_InternFromString("value");
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    delivery_t *made = value == NULL ? NULL : (delivery_t *)alloc(type, 0);
    if (made == NULL) {
        Py_XDECREF(value);
        return NULL;
    }
    made->value = value;
    made->pid = getpid();
    made->main = main;
    made->store = Py_NewRef(store);
    made->counter = Py_NewRef(counter);
    return (PyObject *)made;
}

delivery_t *delivery_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)delivery_new) {
        return (delivery_t *)object;
    }
    PyErr_Format(PyExc_TypeError, "a Delivery is needed, not %R", object);
    return NULL;
}

static void delivery_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    delivery_t *self = (delivery_t *)object;
    take_away(self);
    Py_XDECREF(self->unsure);
    Py_XDECREF(self->value);
    Py_XDECREF(self->counter);
    Py_XDECREF(self->store);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"end", delivery_end, METH_NOARGS, NULL},
    {"know", delivery_know, METH_O, NULL},
    {"offer", delivery_offer, METH_VARARGS, NULL},
    {"receive", delivery_receive, METH_NOARGS, NULL},
    {"withdraw", (PyCFunction)(void (*)(void))delivery_withdraw, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"unsure", T_OBJECT, offsetof(delivery_t, unsure), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)delivery_new},
    {Py_tp_dealloc, (void *)delivery_dealloc},
    {Py_tp_methods, (void *)methods},
    {Py_tp_members, (void *)members},
    {0, NULL},
};

PyType_Spec delivery_spec = {
    .name = "txnkv._native.Delivery",
    .basicsize = sizeof(delivery_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
