/* The fields of a message, and many of them from columns at once.
 *
 *     MessageFields(raw, key, headers, micros, partition, offset, txn_id, codec=None, topic=0)
 *     messages(type, values, keys, headers, offsets, micros, txn_ids, partition, codec, topic) -> list
 *
 * What a message refers to cannot refer back to it, but for a value that was decoded, which is the
 * caller's to change: the garbage collector does not look at a message before it has one. */
#include "native/native.h"

#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *raw, *key, *headers, *txn_id, *codec, *row;
    long long micros, partition, offset, topic, redelivery_count, lease_end;
} message_t;

/* 1: its messages have fields of no subclass, which may refer to anything; -1: an error is set. */
static int is_bare(PyTypeObject *type) {
    static const char *const names[] = {"__basicsize__", "__dictoffset__"};
    const Py_ssize_t wanted[] = {sizeof(message_t), 0};
    for (int i = 0; i < 2; i++) {
        PyObject *given = PyObject_GetAttrString((PyObject *)type, names[i]);
        if (given == NULL) return -1;
        const Py_ssize_t size = PyLong_AsSsize_t(given);
        Py_DECREF(given);
        if (size == -1 && PyErr_Occurred() != NULL) return -1;
        if (size != wanted[i]) return 0;
    }
    return 1;
}

static message_t *message_make(PyTypeObject *type, allocfunc alloc, int bare) {
    message_t *made = (message_t *)alloc(type, 0);
    if (made != NULL && bare != 0) PyObject_GC_UnTrack(made);
    return made;
}

static PyObject *kept(PyObject *given) {
    if (given == Py_None) return NULL; /* which reads as None */
    Py_INCREF(given);
    return given;
}

static PyObject *message_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"raw",    "key",    "headers", "micros", "partition",
                            "offset", "txn_id", "codec",   "topic",  NULL};
    PyObject *raw, *key, *headers, *txn_id, *codec = Py_None;
    long long micros, partition, offset, topic = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOLLLO|OL:Message", names, &raw, &key,
                                     &headers, &micros, &partition, &offset, &txn_id, &codec,
                                     &topic)) {
        return NULL;
    }
    const int bare = is_bare(type);
    if (bare < 0) return NULL;
    message_t *made = message_make(type, (allocfunc)PyType_GetSlot(type, Py_tp_alloc), bare);
    if (made == NULL) return NULL;
    made->raw = kept(raw);
    made->key = kept(key);
    made->headers = kept(headers);
    made->txn_id = kept(txn_id);
    made->codec = kept(codec);
    made->micros = micros;
    made->partition = partition;
    made->offset = offset;
    made->topic = topic;
    return (PyObject *)made;
}

static int message_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((message_t *)self)->row);
    return 0;
}

static int message_clear(PyObject *self) {
    Py_CLEAR(((message_t *)self)->row);
    return 0;
}

static void message_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    message_t *message = (message_t *)self;
    PyObject_GC_UnTrack(self);
    Py_XDECREF(message->raw);
    Py_XDECREF(message->key);
    Py_XDECREF(message->headers);
    Py_XDECREF(message->txn_id);
    Py_XDECREF(message->codec);
    Py_XDECREF(message->row);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static PyObject *message_row(PyObject *self, void *closure) {
    PyObject *row = ((message_t *)self)->row;
    if (row == NULL) Py_RETURN_NONE;
    Py_INCREF(row);
    return row;
}

static int message_set_row(PyObject *self, PyObject *row, void *closure) {
    message_t *message = (message_t *)self;
    PyObject *old = message->row;
    message->row = row == NULL ? NULL : kept(row);
    Py_XDECREF(old);
    if (message->row != NULL && !PyObject_GC_IsTracked(self)) PyObject_GC_Track(self);
    return 0;
}

static PyObject *message_nbytes(PyObject *self, void *closure) {
    const message_t *message = (message_t *)self;
    PyObject *parts[] = {message->raw, message->key, message->headers};
    Py_ssize_t size = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const Py_ssize_t more = parts[i] == NULL ? 0 : PyObject_Size(parts[i]);
        if (more < 0) return NULL;
        size += more;
    }
    return PyLong_FromSsize_t(size);
}

bool message_place(PyObject *object, message_place_t *place) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) != (void *)message_new) return false;
    const message_t *message = (const message_t *)object;
    *place = (message_place_t){message->topic, message->partition, message->offset};
    return true;
}

/* -- many --------------------------------------------------------------------------------- */

enum { VALUES, KEYS, HEADERS, OFFSETS, MICROS, TXN_IDS, COLUMNS };

static int take_number(PyObject *list, Py_ssize_t i, long long *out) {
    PyObject *given = PyList_GetItem(list, i);
    if (given == NULL) return -1;
    *out = PyLong_AsLongLong(given);
    return *out == -1 && PyErr_Occurred() != NULL ? -1 : 0;
}

static int take_object(PyObject *list, Py_ssize_t i, PyObject **out) {
    PyObject *given = PyList_GetItem(list, i);
    if (given == NULL) return -1;
    *out = kept(given);
    return 0;
}

static int message_fill(message_t *made, PyObject *const *columns, Py_ssize_t i) {
    if (take_object(columns[VALUES], i, &made->raw) < 0) return -1;
    if (take_object(columns[KEYS], i, &made->key) < 0) return -1;
    if (take_object(columns[HEADERS], i, &made->headers) < 0) return -1;
    if (take_number(columns[OFFSETS], i, &made->offset) < 0) return -1;
    if (take_number(columns[MICROS], i, &made->micros) < 0) return -1;
    return take_object(columns[TXN_IDS], i, &made->txn_id);
}

PyObject *message_many(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    if (n != COLUMNS + 4 || !PyType_Check(args[0]) ||
        PyType_GetSlot((PyTypeObject *)args[0], Py_tp_new) != (void *)message_new) {
        PyErr_SetString(PyExc_TypeError, "messages() takes a type of messages and their columns");
        return NULL;
    }
    PyTypeObject *type = (PyTypeObject *)args[0];
    PyObject *const *columns = args + 1;
    const long long partition = PyLong_AsLongLong(args[COLUMNS + 1]);
    if (partition == -1 && PyErr_Occurred() != NULL) return NULL;
    const long long topic = PyLong_AsLongLong(args[COLUMNS + 3]);
    if (topic == -1 && PyErr_Occurred() != NULL) return NULL;
    const int bare = is_bare(type);
    const Py_ssize_t count = bare < 0 ? -1 : PyList_Size(columns[VALUES]);
    PyObject *list = count < 0 ? NULL : PyList_New(count);
    if (list == NULL) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    for (Py_ssize_t i = 0; i < count; i++) {
        message_t *made = message_make(type, alloc, bare);
        if (made == NULL || PyList_SetItem(list, i, (PyObject *)made) < 0 ||
            message_fill(made, columns, i) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        made->partition = partition;
        made->topic = topic;
        made->codec = kept(args[COLUMNS + 2]);
    }
    return list;
}

/* -- the type ----------------------------------------------------------------------------- */

static PyMemberDef members[] = {
    {"_headers", T_OBJECT, offsetof(message_t, headers), READONLY, NULL},
    {"_micros", T_LONGLONG, offsetof(message_t, micros), READONLY, NULL},
    {"_topic", T_LONGLONG, offsetof(message_t, topic), READONLY, NULL},
    {"codec", T_OBJECT, offsetof(message_t, codec), READONLY, NULL},
    {"key", T_OBJECT, offsetof(message_t, key), READONLY, NULL},
    {"lease_end", T_LONGLONG, offsetof(message_t, lease_end), 0, NULL},
    {"offset", T_LONGLONG, offsetof(message_t, offset), READONLY, NULL},
    {"partition", T_LONGLONG, offsetof(message_t, partition), READONLY, NULL},
    {"raw", T_OBJECT, offsetof(message_t, raw), READONLY, NULL},
    {"redelivery_count", T_LONGLONG, offsetof(message_t, redelivery_count), 0, NULL},
    {"txn_id", T_OBJECT, offsetof(message_t, txn_id), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"_row", message_row, message_set_row, NULL, NULL},
    {"nbytes", message_nbytes, NULL, "Bytes of key, value and headers.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)message_new},
    {Py_tp_dealloc, (void *)message_dealloc},
    {Py_tp_traverse, (void *)message_traverse},
    {Py_tp_clear, (void *)message_clear},
    {Py_tp_members, (void *)members},
    {Py_tp_getset, (void *)getters},
    {0, NULL},
};

PyType_Spec message_spec = {
    .name = "txnkv._native.MessageFields",
    .basicsize = sizeof(message_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
