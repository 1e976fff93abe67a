/* Values between hosts, as remote/wire.py describes them byte by byte. What comes in is anybody's:
 * each length is held against what is there before it is believed. */
#include "native/native.h"
#include "native/row_table.h"

#include "common/bytes.h"

enum { DEEPEST = 100, HEAD = 5 };

static int too_deep(void) {
    PyErr_Format(PyExc_ValueError, "a value is nested deeper than %d", DEEPEST);
    return -1;
}

/* -- to bytes ------------------------------------------------------------------------- */

typedef struct {
    row_bytes_t bytes;
    PyObject *down;
} writer_t;

static int put_head(writer_t *out, char kind, Py_ssize_t count) {
    if ((uint64_t)count > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a value is too long for a message");
        return -1;
    }
    uint8_t *at = row_bytes_more(&out->bytes, HEAD);
    if (at == NULL) return -1;
    at[0] = (uint8_t)kind;
    store_le32(at + 1, (uint32_t)count);
    return 0;
}

static int put_bytes(writer_t *out, char kind, const char *data, Py_ssize_t len) {
    if (put_head(out, kind, len) < 0) return -1;
    uint8_t *at = row_bytes_more(&out->bytes, (size_t)len);
    if (at == NULL) return -1;
    copy_bytes(at, data, (size_t)len);
    return 0;
}

static int put_eight(writer_t *out, char kind, uint64_t value) {
    uint8_t *at = row_bytes_more(&out->bytes, 9);
    if (at == NULL) return -1;
    at[0] = (uint8_t)kind;
    store_le64(at + 1, value);
    return 0;
}

static int put_encoded(writer_t *out, char kind, PyObject *text) {
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (bytes == NULL) return -1;
    const int failed = put_bytes(out, kind, PyBytes_AsString(bytes), PyBytes_Size(bytes));
    Py_DECREF(bytes);
    return failed;
}

static int put_text(writer_t *out, PyObject *text) {
    Py_ssize_t len;
    const char *data = PyUnicode_AsUTF8AndSize(text, &len);
    if (data != NULL) return put_bytes(out, 's', data, len);
    PyErr_Clear(); /* half of a pair */
    return put_encoded(out, 's', text);
}

static int put_int(writer_t *out, PyObject *value) {
    int overflow;
    const long long small = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) return put_eight(out, 'i', (uint64_t)small);
    PyObject *text = PyObject_Str(value);
    if (text == NULL) return -1;
    const int failed = put_encoded(out, 'I', text);
    Py_DECREF(text);
    return failed;
}

static int put_float(writer_t *out, PyObject *value) {
    const double number = PyFloat_AsDouble(value);
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return put_eight(out, 'd', bits);
}

static int put_value(writer_t *out, PyObject *value, int depth);

static int put_list(writer_t *out, PyObject *list, int depth) {
    const Py_ssize_t n = PyList_Size(list);
    int failed = put_head(out, 'l', n);
    for (Py_ssize_t i = 0; i < n && failed == 0; i++) {
        PyObject *item = PyList_GetItem(list, i); /* another thread may have made it shorter */
        if (item == NULL) return -1;
        Py_INCREF(item);
        failed = put_value(out, item, depth + 1);
        Py_DECREF(item);
    }
    return failed;
}

static int has_names(PyObject *dict) {
    Py_ssize_t at = 0;
    PyObject *key;
    while (PyDict_Next(dict, &at, &key, NULL)) {
        if (!PyUnicode_CheckExact(key)) return 0;
    }
    return 1;
}

static int put_dict(writer_t *out, PyObject *dict, int depth) {
    PyObject *items = PyDict_Items(dict);
    if (items == NULL) return -1;
    const Py_ssize_t n = PyList_Size(items);
    int failed = put_head(out, 'm', n);
    for (Py_ssize_t i = 0; i < n && failed == 0; i++) {
        PyObject *item = PyList_GetItem(items, i);
        failed = put_text(out, PyTuple_GetItem(item, 0));
        if (failed == 0) failed = put_value(out, PyTuple_GetItem(item, 1), depth + 1);
    }
    Py_DECREF(items);
    return failed;
}

static int put_tagged(writer_t *out, PyObject *value, int depth) {
    PyObject *told = PyObject_CallFunctionObjArgs(out->down, value, NULL);
    if (told == NULL) return -1;
    int failed = -1;
    if (!PyList_CheckExact(told) || PyList_Size(told) != 2 ||
        !PyUnicode_CheckExact(PyList_GetItem(told, 0))) {
        PyErr_SetString(PyExc_TypeError, "a value is told by its kind and content");
    } else {
        uint8_t *at = row_bytes_more(&out->bytes, 1);
        if (at != NULL) {
            *at = '!';
            failed = put_text(out, PyList_GetItem(told, 0));
            if (failed == 0) failed = put_value(out, PyList_GetItem(told, 1), depth + 1);
        }
    }
    Py_DECREF(told);
    return failed;
}

static int put_value(writer_t *out, PyObject *value, int depth) {
    if (depth > DEEPEST) return too_deep();
    if (PyUnicode_CheckExact(value)) return put_text(out, value);
    if (PyLong_CheckExact(value)) return put_int(out, value);
    if (PyFloat_CheckExact(value)) return put_float(out, value);
    if (PyBytes_CheckExact(value)) {
        return put_bytes(out, 'b', PyBytes_AsString(value), PyBytes_Size(value));
    }
    if (PyList_CheckExact(value)) return put_list(out, value, depth);
    if (PyDict_CheckExact(value) && has_names(value)) return put_dict(out, value, depth);
    if (value != Py_None && value != Py_True && value != Py_False) {
        return put_tagged(out, value, depth);
    }
    uint8_t *at = row_bytes_more(&out->bytes, 1);
    if (at == NULL) return -1;
    *at = value == Py_None ? 'N' : value == Py_True ? 'T' : 'F';
    return 0;
}

PyObject *wire_pack(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "wire_pack() takes a value and a function");
        return NULL;
    }
    writer_t out = {.down = args[1]};
    row_bytes_init(&out.bytes);
    PyObject *made = NULL;
    if (put_value(&out, args[0], 0) == 0) {
        made = PyBytes_FromStringAndSize((const char *)out.bytes.data, (Py_ssize_t)out.bytes.len);
    }
    row_bytes_free(&out.bytes);
    return made;
}

/* -- from bytes ----------------------------------------------------------------------- */

typedef struct {
    const uint8_t *at, *end;
    PyObject *up;
} reader_t;

/* The next `len` bytes; NULL with an error set when there are fewer. */
static const uint8_t *take(reader_t *in, size_t len) {
    if ((size_t)(in->end - in->at) < len) {
        PyErr_SetString(PyExc_ValueError, "a message ends before a value does");
        return NULL;
    }
    const uint8_t *at = in->at;
    in->at += len;
    return at;
}

/* Of what takes a byte each at least; -1 with an error set. */
static int64_t take_count(reader_t *in) {
    const uint8_t *at = take(in, 4);
    if (at == NULL) return -1;
    const uint32_t count = load_le32(at);
    if (count > (size_t)(in->end - in->at)) {
        PyErr_SetString(PyExc_ValueError, "a message ends before a value does");
        return -1;
    }
    return count;
}

static PyObject *get_value(reader_t *in, int depth);

static PyObject *get_text(reader_t *in) {
    const int64_t len = take_count(in);
    if (len < 0) return NULL;
    const uint8_t *at = take(in, (size_t)len);
    return PyUnicode_DecodeUTF8((const char *)at, (Py_ssize_t)len, "surrogatepass");
}

static PyObject *get_name(reader_t *in) {
    const uint8_t *kind = take(in, 1);
    if (kind == NULL) return NULL;
    if (*kind == 's') return get_text(in);
    PyErr_SetString(PyExc_ValueError, "a name in a message is no text");
    return NULL;
}

static PyObject *get_big(reader_t *in) {
    PyObject *text = get_text(in);
    if (text == NULL) return NULL;
    char *end = NULL;
    Py_ssize_t len;
    const char *digits = PyUnicode_AsUTF8AndSize(text, &len);
    PyObject *made = digits == NULL ? NULL : PyLong_FromString(digits, &end, 10);
    if (made != NULL && end != digits + len) {
        PyErr_SetString(PyExc_ValueError, "a number in a message is none");
        Py_CLEAR(made);
    }
    Py_DECREF(text);
    return made;
}

static PyObject *get_bytes(reader_t *in) {
    const int64_t len = take_count(in);
    if (len < 0) return NULL;
    return PyBytes_FromStringAndSize((const char *)take(in, (size_t)len), (Py_ssize_t)len);
}

static PyObject *get_list(reader_t *in, int depth) {
    const int64_t n = take_count(in);
    /* It grows with what comes: lists in lists may each say how many bytes are left. */
    PyObject *made = n < 0 ? NULL : PyList_New(0);
    for (int64_t i = 0; made != NULL && i < n; i++) {
        PyObject *item = get_value(in, depth + 1);
        if (item == NULL || PyList_Append(made, item) < 0) Py_CLEAR(made);
        Py_XDECREF(item);
    }
    return made;
}

static PyObject *get_dict(reader_t *in, int depth) {
    const int64_t n = take_count(in);
    PyObject *made = n < 0 ? NULL : PyDict_New();
    for (int64_t i = 0; made != NULL && i < n; i++) {
        PyObject *name = get_name(in);
        PyObject *item = name == NULL ? NULL : get_value(in, depth + 1);
        if (item == NULL || PyDict_SetItem(made, name, item) < 0) Py_CLEAR(made);
        Py_XDECREF(name);
        Py_XDECREF(item);
    }
    return made;
}

static PyObject *get_tagged(reader_t *in, int depth) {
    PyObject *kind = get_name(in);
    PyObject *content = kind == NULL ? NULL : get_value(in, depth + 1);
    PyObject *made = NULL;
    if (content != NULL) made = PyObject_CallFunctionObjArgs(in->up, kind, content, NULL);
    Py_XDECREF(kind);
    Py_XDECREF(content);
    return made;
}

static PyObject *get_eight(reader_t *in, int is_float) {
    const uint8_t *at = take(in, 8);
    if (at == NULL) return NULL;
    const uint64_t bits = load_le64(at);
    if (!is_float) return PyLong_FromLongLong((int64_t)bits);
    double number;
    memcpy(&number, &bits, sizeof number);
    return PyFloat_FromDouble(number);
}

static PyObject *get_value(reader_t *in, int depth) {
    if (depth > DEEPEST) {
        too_deep();
        return NULL;
    }
    const uint8_t *kind = take(in, 1);
    if (kind == NULL) return NULL;
    switch (*kind) {
    case 'N': return Py_NewRef(Py_None);
    case 'T': return Py_NewRef(Py_True);
    case 'F': return Py_NewRef(Py_False);
    case 'i': return get_eight(in, 0);
    case 'd': return get_eight(in, 1);
    case 'I': return get_big(in);
    case 's': return get_text(in);
    case 'b': return get_bytes(in);
    case 'l': return get_list(in, depth);
    case 'm': return get_dict(in, depth);
    case '!': return get_tagged(in, depth);
    default: PyErr_Format(PyExc_ValueError, "a message has a value of kind %d", *kind);
    }
    return NULL;
}

PyObject *wire_unpack(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    (void)module;
    char *data;
    Py_ssize_t len;
    if (n != 2 || PyBytes_AsStringAndSize(args[0], &data, &len) < 0) {
        PyErr_SetString(PyExc_TypeError, "wire_unpack() takes bytes and a function");
        return NULL;
    }
    reader_t in = {.at = (const uint8_t *)data, .end = (const uint8_t *)data + len, .up = args[1]};
    PyObject *made = get_value(&in, 0);
    if (made != NULL && in.at != in.end) {
        PyErr_SetString(PyExc_ValueError, "a message goes on behind its value");
        Py_CLEAR(made);
    }
    return made;
}
