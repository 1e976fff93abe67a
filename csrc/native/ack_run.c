/* Acknowledgements of one transaction, of one message after the other, in memory alone:
 * topics/delivery/transaction_acks.py.
 *
 *     run = AckRun(delivery, counter, info, where, own, pending, clock, deadline, more)
 *     run.take(subscription, message) -> bool    False: nothing was done, Python does it
 *     run.withdraw()                             no more, nor by those behind
 *
 * `info` is what the subscription has as `info`; `where` the topic and partition of its messages and
 * the offsets [begin, end) of which none was done with when the run was offered; `own` and `pending`
 * are sets of offsets of the partition, each a list of where its ranges begin and one of where they
 * end (topics/ranges.py): what this transaction has, and what all in this process have. The clock is
 * a module with `monotonic_micros`, the deadline of the transaction such a time or None. `more` is the
 * run that was offered before, of another partition mostly, or None: what is not of this one may be of
 * that.
 *
 * A message behind all that is pending is free: it goes to the end of both sets in one step under the
 * GIL, so that no signal and no thread finds it in one of them. What else would make it taken raises
 * the epoch of the delivery. */
#include "native/delivery.h"

enum { MOST = 16 /* runs behind each other */ };
enum { OWN_BEGIN, OWN_END, PENDING_BEGIN, PENDING_END, LISTS };

typedef struct {
    PyObject_HEAD
    PyObject *delivery, *counter, *info, *clock; /* NULL: it was withdrawn */
    PyObject *lists[LISTS];
    PyObject *more; /* a run of another place, or NULL */
    PyObject *value_name, *info_name, *clock_name;
    uint64_t deadline, epoch;
    long long topic, partition, begin, end;
    bool is_timed;
} run_t;

/* Where `all` are meant, those behind it too. */
static void run_withdraw(run_t *self, bool all) {
    PyObject *had[] = {self->delivery, self->counter, self->info, self->clock, self->more};
    PyObject *lists[LISTS];
    if (all && self->more != NULL) run_withdraw((run_t *)self->more, true);
    self->delivery = self->counter = self->info = self->clock = self->more = NULL;
    for (int i = 0; i < LISTS; i++) {
        lists[i] = self->lists[i];
        self->lists[i] = NULL;
    }
    for (size_t i = 0; i < sizeof had / sizeof *had; i++) Py_XDECREF(had[i]);
    for (int i = 0; i < LISTS; i++) Py_XDECREF(lists[i]);
}

/* 1: it is for this consumer, and in time; 0: it is not; -1: an error is set. */
static int is_meant(run_t *self, PyObject *subscription) {
    PyObject *info = PyObject_GetAttr(subscription, self->info_name);
    if (info == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    const bool is_same = info == self->info;
    Py_DECREF(info);
    if (!is_same || self->clock == NULL) return 0;
    return self->is_timed ? clock_allows(self->clock, self->clock_name, self->deadline) : 1;
}

/* The offset behind the last in a set, or 0; -1: an error is set. */
static long long end_of(PyObject *ends) {
    const Py_ssize_t n = PyList_Size(ends);
    if (n <= 0) return n;
    return PyLong_AsLongLong(PyList_GetItem(ends, n - 1));
}

static void drop_last(PyObject *list) {
    const Py_ssize_t n = PyList_Size(list);
    PyList_SetSlice(list, n - 1, n, NULL);
}

/* Adds an empty range at the end of a set. */
static bool add_empty(PyObject *begins, PyObject *ends, PyObject *offset) {
    if (PyList_Append(begins, offset) < 0) return false;
    if (PyList_Append(ends, offset) == 0) return true;
    drop_last(begins);
    return false;
}

/* 1: it was free, and is in both sets; 0: it may not be free; -1: an error is set. */
static int take(const run_t *self, long long at) {
    PyObject *const *lists = self->lists;
    const long long own = end_of(lists[OWN_END]), pending = end_of(lists[PENDING_END]);
    if (own < 0 || pending < 0) return -1;
    if (at < own || at < pending) return 0;
    PyObject *offset = PyLong_FromLongLong(at);
    PyObject *behind = offset == NULL ? NULL : PyLong_FromLongLong(at + 1);
    int done = -1;
    const bool is_new = own != at || PyList_Size(lists[OWN_END]) == 0;
    if (behind != NULL && (!is_new || add_empty(lists[OWN_BEGIN], lists[OWN_END], offset))) {
        if ((pending == at && PyList_Size(lists[PENDING_END]) > 0) ||
            add_empty(lists[PENDING_BEGIN], lists[PENDING_END], offset)) {
            for (int i = OWN_END; i < LISTS; i += PENDING_END - OWN_END) {
                PyList_SetItem(lists[i], PyList_Size(lists[i]) - 1, Py_NewRef(behind));
            }
            done = 1;
        } else if (is_new) {
            drop_last(lists[OWN_BEGIN]);
            drop_last(lists[OWN_END]);
        }
    }
    Py_XDECREF(offset);
    Py_XDECREF(behind);
    return done;
}

static bool is_of(const run_t *self, const message_place_t *place) {
    return place->partition == self->partition && place->topic == self->topic;
}

/* Whether all is as it was when the run was offered, and a message may be taken. */
static bool is_free(const run_t *self, const message_place_t *place) {
    const delivery_t *delivery = (const delivery_t *)self->delivery;
    if (delivery == NULL || delivery_epoch(delivery, self->partition) != self->epoch) return false;
    return delivery_is_current(delivery) && delivery_has_given(delivery, place);
}

/* take(subscription, message) */
static PyObject *run_take(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    run_t *self = (run_t *)object;
    message_place_t place;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "take() takes a subscription and a message");
        return NULL;
    }
    if (!message_place(args[1], &place)) Py_RETURN_FALSE;
    while (self != NULL && !is_of(self, &place)) self = (run_t *)self->more;
    if (self == NULL || self->delivery == NULL) Py_RETURN_FALSE;
    if (place.offset < self->begin || place.offset >= self->end) Py_RETURN_FALSE;
    PyObject *kept = Py_NewRef((PyObject *)self); /* others may take it out of the row of runs */
    int done = is_meant(self, args[0]);
    /* From here on no code of Python's runs. */
    if (done == 1 && !is_free(self, &place)) done = 0;
    if (done == 1) done = take(self, place.offset);
    if (done == 1) count_one(self->counter, self->value_name);
    Py_DECREF(kept);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *run_withdrawn(PyObject *object, PyObject *none) {
    (void)none;
    run_withdraw((run_t *)object, true);
    Py_RETURN_NONE;
}

/* -- the type -------------------------------------------------------------------------------- */

static bool take_lists(run_t *self, PyObject *own, PyObject *pending) {
    PyObject *const pairs[] = {own, pending};
    for (int i = 0; i < LISTS; i++) {
        PyObject *list = PyTuple_Check(pairs[i / 2]) ? PyTuple_GetItem(pairs[i / 2], i % 2) : NULL;
        if (list == NULL || !PyList_CheckExact(list)) {
            PyErr_SetString(PyExc_TypeError, "a set of offsets is two lists");
            return false;
        }
        self->lists[i] = Py_NewRef(list);
    }
    return true;
}

static bool take_names(run_t *self) {
    self->value_name = PyUnicode_InternFromString("value");
    self->info_name = PyUnicode_InternFromString("info");
    self->clock_name = PyUnicode_InternFromString("monotonic_micros");
    return self->value_name != NULL && self->info_name != NULL && self->clock_name != NULL;
}

/* Puts a run behind another, without those of the same place, and no more than look-ups are quick. */
static void put_behind(run_t *self, PyObject *more) {
    PyObject **at = &self->more;
    *at = Py_NewRef(more);
    for (int n = 1; *at != NULL; n++) {
        run_t *other = (run_t *)*at;
        const message_place_t place = {other->topic, other->partition, 0};
        if (!is_of(self, &place) && n < MOST) {
            at = &other->more;
            continue;
        }
        *at = n < MOST ? other->more : NULL;
        if (n < MOST) other->more = NULL;
        run_withdraw(other, true); /* another thread may be about to ask it */
        Py_DECREF(other);
    }
}

static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *delivery, *counter, *info, *own, *pending, *clock, *deadline, *more;
    long long topic, partition, begin, end;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OOO(LLLL)OOOOO:AckRun", &delivery, &counter, &info, &topic,
                          &partition, &begin, &end, &own, &pending, &clock, &deadline, &more)) {
        return NULL;
    }
    const delivery_t *of = delivery_of(delivery);
    const uint64_t until = deadline == Py_None ? 0 : PyLong_AsUnsignedLongLong(deadline);
    if (of == NULL || PyErr_Occurred() != NULL) return NULL;
    if (more != Py_None && Py_TYPE(more) != type) {
        PyErr_SetString(PyExc_TypeError, "behind an AckRun stands another, or None");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    run_t *made = (run_t *)alloc(type, 0);
    if (made == NULL) return NULL;
    made->delivery = Py_NewRef(delivery);
    made->counter = Py_NewRef(counter);
    made->info = Py_NewRef(info);
    made->clock = Py_NewRef(clock);
    made->deadline = until;
    made->is_timed = deadline != Py_None;
    made->epoch = delivery_epoch(of, partition);
    made->topic = topic;
    made->partition = partition;
    made->begin = begin;
    made->end = end;
    if (!take_lists(made, own, pending) || !take_names(made)) Py_CLEAR(made);
    if (made != NULL && more != Py_None) put_behind(made, more);
    return (PyObject *)made;
}

static void run_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    run_t *self = (run_t *)object;
    run_withdraw(self, false);
    Py_XDECREF(self->value_name);
    Py_XDECREF(self->info_name);
    Py_XDECREF(self->clock_name);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))run_take, METH_FASTCALL, NULL},
    {"withdraw", run_withdrawn, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)run_new},
    {Py_tp_dealloc, (void *)run_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec ack_run_spec = {
    .name = "txnkv._native.AckRun",
    .basicsize = sizeof(run_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
