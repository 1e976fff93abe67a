/* Counts of observed values by classes of their size: metrics.py.
 *
 *     histogram = Histogram(bounds)   upper ends of the classes, ascending; the last class has none
 *     histogram.observe(value)
 *     histogram.counts, .sum          how many of each class, and all values together */
#include "native/native.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t n; /* bounds; there is one class more */
    double *bounds;
    uint64_t *counts;
    double sum;
} histogram_t;

static PyObject *histogram_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *bounds;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!:Histogram", &PyTuple_Type, &bounds)) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    histogram_t *made = (histogram_t *)alloc(type, 0);
    if (made == NULL) return NULL;
    made->n = PyTuple_Size(bounds);
    made->bounds = PyMem_Calloc((size_t)made->n + 1, sizeof *made->bounds);
    made->counts = PyMem_Calloc((size_t)made->n + 1, sizeof *made->counts);
    if (made->bounds == NULL || made->counts == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < made->n && PyErr_Occurred() == NULL; i++) {
        made->bounds[i] = PyFloat_AsDouble(PyTuple_GetItem(bounds, i));
    }
    if (PyErr_Occurred() != NULL) Py_CLEAR(made);
    return (PyObject *)made;
}

static void histogram_dealloc(PyObject *object) {
    histogram_t *self = (histogram_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->bounds);
    PyMem_Free(self->counts);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyObject *histogram_observe(PyObject *object, PyObject *number) {
    histogram_t *self = (histogram_t *)object;
    const double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred() != NULL) return NULL;
    Py_ssize_t low = 0, high = self->n;
    while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        if (self->bounds[middle] < value) low = middle + 1;
        else high = middle;
    }
    self->counts[low]++;
    self->sum += value;
    Py_RETURN_NONE;
}

static PyObject *get_counts(PyObject *object, void *closure) {
    const histogram_t *self = (const histogram_t *)object;
    (void)closure;
    PyObject *made = PyList_New(self->n + 1);
    for (Py_ssize_t i = 0; made != NULL && i <= self->n; i++) {
        PyObject *count = PyLong_FromUnsignedLongLong(self->counts[i]);
        if (count == NULL || PyList_SetItem(made, i, count) < 0) Py_CLEAR(made);
    }
    return made;
}

static PyObject *get_sum(PyObject *object, void *closure) {
    (void)closure;
    return PyFloat_FromDouble(((const histogram_t *)object)->sum);
}

static PyMethodDef methods[] = {
    {"observe", histogram_observe, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef fields[] = {
    {"counts", get_counts, NULL, NULL, NULL},
    {"sum", get_sum, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)histogram_new},
    {Py_tp_dealloc, (void *)histogram_dealloc},
    {Py_tp_methods, (void *)methods},
    {Py_tp_getset, (void *)fields},
    {0, NULL},
};

PyType_Spec histogram_spec = {
    .name = "txnkv._native.Histogram",
    .basicsize = sizeof(histogram_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
