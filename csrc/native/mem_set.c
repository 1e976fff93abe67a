/* A MemRowSet with what each small transaction calls of it; core/mem_row_set.py has the rest. Its
 * method `_refuse(status)` raises what a status says. Calls that may take long let other threads
 * of Python run; the rules for threads are those of memory/mem_row_set.h. */
#include "native/native.h"

#include "memory/mem_section.h"

enum { LONG = 1 << 13 /* bytes, about 10 us */ };

typedef struct {
    PyObject_HEAD
    mem_row_set_t *set;
    uint32_t width;
} mem_set_t;

static PyObject *mem_set_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);

mem_row_set_t *mem_set_of(PyObject *object) {
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_new) == (void *)mem_set_new) {
        return ((mem_set_t *)object)->set;
    }
    PyErr_Format(PyExc_TypeError, "a MemRowSet is needed, not %R", object);
    return NULL;
}

static mem_set_t *adopt(PyTypeObject *type, mem_row_set_t *set, uint32_t width) {
    if (set == NULL) {
        PyErr_SetString(PyExc_MemoryError, "no memory for a MemRowSet");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    mem_set_t *made = (mem_set_t *)alloc(type, 0);
    if (made == NULL) {
        mem_row_set_destroy(set);
        return NULL;
    }
    made->set = set;
    made->width = width;
    return made;
}

static PyObject *mem_set_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"width", NULL};
    unsigned int width;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I:MemRowSet", names, &width)) return NULL;
    return (PyObject *)adopt(type, mem_row_set_create(width), width);
}

static void mem_set_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    mem_row_set_destroy(((mem_set_t *)self)->set);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

/* None, or what `_refuse` raises. */
static PyObject *done(PyObject *self, status_t status) {
    if (status == STATUS_OK) Py_RETURN_NONE;
    PyObject *none = PyObject_CallMethod(self, "_refuse", "i", (int)status);
    if (none != NULL) {
        Py_DECREF(none);
        PyErr_Format(PyExc_SystemError, "status %d was not refused", (int)status);
    }
    return NULL;
}

static int wants(const char *what, Py_ssize_t n, Py_ssize_t wanted) {
    if (n == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", what, wanted, n);
    return -1;
}

static int bytes_of(PyObject *given, const uint8_t **data, size_t *len) {
    char *at;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(given, &at, &size) < 0) return -1;
    *data = (const uint8_t *)at;
    *len = (size_t)size;
    return 0;
}

static int stamp_of(PyObject *number, uint64_t *out) {
    *out = PyLong_AsUnsignedLongLong(number);
    return *out == UINT64_MAX && PyErr_Occurred() != NULL ? -1 : 0;
}

/* -- writing ------------------------------------------------------------------------------ */

static PyObject *mem_set_put(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const uint8_t *key, *row = NULL;
    size_t key_len, row_len = 0;
    uint64_t stamp;
    if (wants("put", n, 3) < 0 || bytes_of(args[0], &key, &key_len) < 0) return NULL;
    if (stamp_of(args[1], &stamp) < 0) return NULL;
    if (args[2] != Py_None && bytes_of(args[2], &row, &row_len) < 0) return NULL;
    return done(self, mem_row_set_put(((mem_set_t *)self)->set, key, key_len, stamp, row, row_len));
}

static PyObject *mem_set_apply(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    mem_row_set_t *set = ((mem_set_t *)self)->set;
    const uint8_t *section;
    size_t len;
    uint64_t stamp;
    status_t status;
    if (wants("apply", n, 2) < 0 || bytes_of(args[0], &section, &len) < 0) return NULL;
    if (stamp_of(args[1], &stamp) < 0) return NULL;
    if (len < LONG) {
        status = mem_section_apply(set, section, len, stamp);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        status = mem_section_apply(set, section, len, stamp);
        Py_END_ALLOW_THREADS;
    }
    return done(self, status);
}

static PyObject *mem_set_copy(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const mem_set_t *from = (mem_set_t *)self;
    uint64_t after, upto;
    mem_row_set_t *made;
    if (wants("copy", n, 2) < 0) return NULL;
    if (stamp_of(args[0], &after) < 0 || stamp_of(args[1], &upto) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    made = mem_row_set_copy(from->set, after, upto);
    Py_END_ALLOW_THREADS;
    return (PyObject *)adopt(Py_TYPE(self), made, from->width);
}

/* -- reading ------------------------------------------------------------------------------ */

static PyObject *mem_set_get(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const uint8_t *key;
    size_t len;
    uint64_t after, upto;
    if (wants("get", n, 3) < 0 || bytes_of(args[0], &key, &len) < 0) return NULL;
    if (stamp_of(args[1], &after) < 0 || stamp_of(args[2], &upto) < 0) return NULL;
    const mem_entry_t *entry = mem_row_set_get(((mem_set_t *)self)->set, key, len, after, upto);
    if (entry == NULL) Py_RETURN_NONE;
    const unsigned long long stamp = entry->stamp;
    if (entry->row_len == UINT32_MAX) return Py_BuildValue("(KO)", stamp, Py_None);
    return Py_BuildValue(
        "(KN)", stamp,
        PyBytes_FromStringAndSize((const char *)entry->row, (Py_ssize_t)entry->row_len));
}

/* changed_of(own, after): the first key of the set `own` that has an entry above a stamp here. */
static PyObject *mem_set_changed_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    const mem_row_set_t *set = ((mem_set_t *)self)->set;
    uint64_t after;
    const mem_entry_t *entry;
    if (wants("changed_of", n, 2) < 0) return NULL;
    const mem_row_set_t *own = mem_set_of(args[0]);
    if (own == NULL || stamp_of(args[1], &after) < 0) return NULL;
    if (mem_row_set_bytes(own) < LONG) {
        entry = mem_row_set_changed_of(set, own, after);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        entry = mem_row_set_changed_of(set, own, after);
        Py_END_ALLOW_THREADS;
    }
    if (entry == NULL) Py_RETURN_NONE;
    const char *key = (const char *)entry->row - entry->key_len;
    return PyBytes_FromStringAndSize(key, (Py_ssize_t)entry->key_len);
}

static PyObject *mem_set_serialize(PyObject *self, PyObject *none) {
    const mem_row_set_t *set = ((mem_set_t *)self)->set;
    uint64_t size;
    (void)none;
    const status_t status = mem_section_size(set, &size);
    if (status != STATUS_OK) return done(self, status);
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (made == NULL) return NULL;
    uint8_t *out = (uint8_t *)PyBytes_AsString(made);
    if (size < LONG) {
        mem_section_write(set, out, (size_t)size);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        mem_section_write(set, out, (size_t)size);
        Py_END_ALLOW_THREADS;
    }
    return made;
}

static PyObject *get_n(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(mem_row_set_count(((mem_set_t *)self)->set));
}

static PyObject *get_nbytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(mem_row_set_bytes(((mem_set_t *)self)->set));
}

static PyObject *get_width(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(((mem_set_t *)self)->width);
}

static PyObject *get_address(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(((mem_set_t *)self)->set);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL
static PyMethodDef methods[] = {
    {"apply", FAST(mem_set_apply)},
    {"changed_of", FAST(mem_set_changed_of)},
    {"copy", FAST(mem_set_copy)},
    {"get", FAST(mem_set_get)},
    {"put", FAST(mem_set_put)},
    {"serialize", mem_set_serialize, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"address", get_address, NULL, NULL, NULL},
    {"n", get_n, NULL, NULL, NULL},
    {"nbytes", get_nbytes, NULL, NULL, NULL},
    {"width", get_width, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)mem_set_new},
    {Py_tp_dealloc, (void *)mem_set_dealloc},
    {Py_tp_methods, (void *)methods},
    {Py_tp_getset, (void *)fields},
    {0, NULL},
};

PyType_Spec mem_set_spec = {
    .name = "txnkv._native.MemRowSet",
    .basicsize = sizeof(mem_set_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
