/* Handlers of signals, put off while a call lasts.
 *
 * CPython runs handlers in one thread, which it knows by a word of its own: the identity of the main
 * thread, in `_PyRuntime`. While that word names nobody, signals are noted and nothing is run for
 * them; when it is as it was they are run, as if they had come just then:
 *
 *     word      main   0 ........................ main
 *     call             [ the call, whole          ]
 *     signal                  noted                 its handler runs, and may raise: the call is over
 *
 * That is what every other thread sees of it at any time, so nothing else depends on it: the word
 * is asked for by what installs handlers, runs them and runs pending calls, and set by a fork. It
 * is written under the GIL, by the main thread alone.
 *
 * No function of Python does this: masks of signals are of one thread, and another takes the signal.
 * The word has no name either that an extension may use. It is looked for where it has been since
 * 3.11, the first word of `_PyRuntime` that is the main thread's identity, and then tried: with it
 * changed to and fro, `signal.signal` has to say that this is, and is not, the main thread. Where
 * it does not, there is no `Handlers`, and calls are made in another thread (storage/threads.py). */
#define _GNU_SOURCE
#include "native/native.h"

#include <dlfcn.h>

#define SEARCHED 8192 /* bytes; it is in the first 2,000 of all known versions */

typedef struct {
    PyObject_HEAD
    volatile unsigned long *main; /* whose handlers run; 0: nobody's, while a call lasts */
    unsigned long calm;           /* the thread whose call lasts; 0: none */
    unsigned long nobody;         /* 0, in the place of `main` behind the end */
} handlers_t;

/* Tell whether CPython takes this thread for the main one; -1 with an error set. */
static int taken_for_main(void) {
    PyObject *module = PyImport_ImportModule("_signal");
    if (module == NULL) return -1;
    /* No handler: refused as such in the main thread, in another one for that. */
    PyObject *found = PyObject_CallMethod(module, "signal", "iO", 2, Py_None);
    Py_DECREF(module);
    if (found != NULL) {
        Py_DECREF(found);
        PyErr_SetString(PyExc_RuntimeError, "signal.signal took None for a handler");
        return -1;
    }
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        return 1;
    }
    if (PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        return 0;
    }
    return -1;
}

/* The word that names the main thread; NULL with RuntimeError set where it is not to be found. */
static volatile unsigned long *find(unsigned long main) {
    volatile unsigned long *words = dlsym(RTLD_DEFAULT, "_PyRuntime");
    const unsigned long me = PyThread_get_thread_ident();
    for (size_t i = 0; words != NULL && i < SEARCHED / sizeof *words; i++) {
        if (words[i] != main || main == 0) continue;
        words[i] = 0;
        const int without = taken_for_main();
        words[i] = me;
        const int with = without < 0 ? -1 : taken_for_main();
        words[i] = main;
        if (with == 1 && without == 0) return words + i;
        break;
    }
    if (PyErr_Occurred() == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this Python does not say which its main thread is");
    }
    return NULL;
}

static PyObject *handlers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long main;
    if (kwargs != NULL && PyDict_Size(kwargs) != 0) {
        PyErr_SetString(PyExc_TypeError, "Handlers takes no names of arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "k:Handlers", &main)) return NULL;
    volatile unsigned long *found = find(main);
    if (found == NULL) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    handlers_t *made = (handlers_t *)alloc(type, 0);
    if (made == NULL) return NULL;
    made->main = found;
    return (PyObject *)made;
}

static void handlers_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

static int is_call(PyObject *const *args, Py_ssize_t n) {
    if (n == 3 && PyTuple_Check(args[1]) && PyDict_Check(args[2])) return 1;
    PyErr_SetString(PyExc_TypeError, "a function, a tuple of arguments and a dict of named ones");
    return 0;
}

/* Run what was put off. Where a handler raises, that is the outcome, and the call's is dropped. */
static PyObject *after(PyObject *found) {
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    if (found == NULL) PyErr_Fetch(&type, &value, &trace);
    if (PyErr_CheckSignals() == 0) {
        if (found == NULL) PyErr_Restore(type, value, trace);
        return found;
    }
    PyObject *kind, *raised, *at;
    PyErr_Fetch(&kind, &raised, &at); /* what is dropped may run code of its own */
    Py_XDECREF(found);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    PyErr_Restore(kind, raised, at);
    return NULL;
}

/* put_off(function, args, kwargs): the call, without a handler in it, if this thread runs any. */
static PyObject *handlers_put_off(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    handlers_t *handlers = (handlers_t *)self;
    if (!is_call(args, n)) return NULL;
    const unsigned long me = PyThread_get_thread_ident();
    if (*handlers->main != me) return PyObject_Call(args[0], args[1], args[2]);
    handlers->calm = me;
    *handlers->main = 0;
    PyObject *found = PyObject_Call(args[0], args[1], args[2]);
    *handlers->main = me;
    handlers->calm = 0;
    return after(found);
}

/* let(function, args, kwargs): the call, with handlers in it again. */
static PyObject *handlers_let(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    handlers_t *handlers = (handlers_t *)self;
    if (!is_call(args, n)) return NULL;
    const unsigned long me = PyThread_get_thread_ident();
    if (handlers->calm != me) return PyObject_Call(args[0], args[1], args[2]);
    handlers->calm = 0;
    *handlers->main = me;
    PyObject *found = PyErr_CheckSignals() < 0 ? NULL : PyObject_Call(args[0], args[1], args[2]);
    *handlers->main = 0;
    handlers->calm = me;
    return found;
}

/* calm(): whether a call of this thread lasts for which they are put off. */
static PyObject *handlers_calm(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(((handlers_t *)self)->calm == PyThread_get_thread_ident());
}

/* here(): whether handlers may run in this thread now. */
static PyObject *handlers_here(PyObject *self, PyObject *none) {
    (void)none;
    return PyBool_FromLong(*((handlers_t *)self)->main == PyThread_get_thread_ident());
}

/* forget(): in a forked child, where the call of another thread does not go on. */
static PyObject *handlers_forget(PyObject *self, PyObject *none) {
    (void)none;
    handlers_t *handlers = (handlers_t *)self;
    if (*handlers->main == PyThread_get_thread_ident()) handlers->calm = 0;
    Py_RETURN_NONE;
}

/* end(): from here on all calls are made as they come, as no handler matters any more. */
static PyObject *handlers_end(PyObject *self, PyObject *none) {
    (void)none;
    handlers_t *handlers = (handlers_t *)self;
    if (handlers->calm == 0) handlers->main = &handlers->nobody;
    Py_RETURN_NONE;
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL
static PyMethodDef methods[] = {
    {"calm", handlers_calm, METH_NOARGS, NULL},
    {"end", handlers_end, METH_NOARGS, NULL},
    {"forget", handlers_forget, METH_NOARGS, NULL},
    {"here", handlers_here, METH_NOARGS, NULL},
    {"let", FAST(handlers_let)},
    {"put_off", FAST(handlers_put_off)},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)handlers_new},
    {Py_tp_dealloc, (void *)handlers_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec handlers_spec = {
    .name = "txnkv._native.Handlers",
    .basicsize = sizeof(handlers_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
