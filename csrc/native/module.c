/* The module txnkv._native: what stands on the way of each small transaction and each point read,
 * where a call through cffi and the objects around it would cost more than the work. */
#include "native/native.h"

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return -1;
    const int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}

static int fill(PyObject *module) {
    if (PyModule_AddIntConstant(module, "sqlite_api", 0) < 0) return -1; /* sqlite_writer.c */
    if (add_type(module, "AckRun", &ack_run_spec) < 0) return -1;
    if (add_type(module, "Delivery", &delivery_spec) < 0) return -1;
    if (add_type(module, "Handlers", &handlers_spec) < 0) return -1;
    if (add_type(module, "IdSet", &ids_spec) < 0) return -1;
    if (add_type(module, "Histogram", &histogram_spec) < 0) return -1;
    if (add_type(module, "Holding", &holding_spec) < 0) return -1;
    if (add_type(module, "MemRowSet", &mem_set_spec) < 0) return -1;
    if (add_type(module, "MessageFields", &message_spec) < 0) return -1;
    if (add_type(module, "PinSet", &pins_spec) < 0) return -1;
    if (add_type(module, "Published", &published_spec) < 0) return -1;
    if (add_type(module, "Reader", &reader_spec) < 0) return -1;
    if (add_type(module, "RowCheck", &row_check_spec) < 0) return -1;
    if (add_type(module, "SqliteWriter", &sqlite_writer_spec) < 0) return -1;
    if (add_type(module, "StoreWords", &store_words_spec) < 0) return -1;
    if (add_type(module, "Table", &row_table_spec) < 0) return -1;
    if (add_type(module, "Turn", &turn_spec) < 0) return -1;
    if (add_type(module, "Words", &words_spec) < 0) return -1;
    if (add_type(module, "WriterLock", &writer_lock_spec) < 0) return -1;
    return add_type(module, "Writes", &writes_spec);
}

static PyMethodDef functions[] = {
    {"fill_holes", (PyCFunction)(void (*)(void))hole_fill, METH_FASTCALL, NULL},
    {"message_batch", (PyCFunction)(void (*)(void))message_batch, METH_FASTCALL, NULL},
    {"message_size", message_size, METH_O, NULL},
    {"messages", (PyCFunction)(void (*)(void))message_many, METH_FASTCALL, NULL},
    {"monotonic_micros", clock_monotonic, METH_NOARGS, NULL},
    {"pack", (PyCFunction)(void (*)(void))payload_pack, METH_FASTCALL, NULL},
    {"place", (PyCFunction)(void (*)(void))place_batches, METH_FASTCALL, NULL},
    {"punch_hole", (PyCFunction)(void (*)(void))hole_punch, METH_FASTCALL, NULL},
    {"put_message", (PyCFunction)(void (*)(void))put_message, METH_FASTCALL, NULL},
    {"take_in", (PyCFunction)(void (*)(void))payload_take_in, METH_FASTCALL, NULL},
    {"unpack", (PyCFunction)(void (*)(void))payload_unpack, METH_FASTCALL, NULL},
    {"wall_micros", clock_wall, METH_NOARGS, NULL},
    {"wire_pack", (PyCFunction)(void (*)(void))wire_pack, METH_FASTCALL, NULL},
    {"wire_unpack", (PyCFunction)(void (*)(void))wire_unpack, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)fill},
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "txnkv._native",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
