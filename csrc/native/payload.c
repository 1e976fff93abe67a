/* The payload of a small commit, as coordinator/payload.py describes it byte by byte. */
#include <stdbool.h>

#include "native/native.h"

#include "codec/crc32c.h"
#include "common/bytes.h"

enum { VERSION = 2, CRC = 4, HEAD = 8, ENTRY = 32, LENGTH = 4 };

typedef struct {
    unsigned long kind;
    uint64_t id, first, count;
    uint32_t crc;
    const char *data;
    Py_ssize_t len;
} section_t;

static uint64_t number(PyObject *section, Py_ssize_t at) {
    PyObject *item = PyTuple_GetItem(section, at);
    return item == NULL ? 0 : PyLong_AsUnsignedLongLong(item);
}

static int read_section(PyObject *given, uint32_t seed, section_t *out) {
    if (!PyTuple_Check(given) || PyTuple_Size(given) != 6) {
        PyErr_SetString(PyExc_TypeError, "a section is a tuple of six");
        return -1;
    }
    char *data;
    if (PyBytes_AsStringAndSize(PyTuple_GetItem(given, 2), &data, &out->len) < 0) return -1;
    out->data = data;
    out->kind = (unsigned long)number(given, 0);
    out->id = number(given, 1);
    out->first = number(given, 3);
    out->count = number(given, 4);
    PyObject *crc = PyTuple_GetItem(given, 5);
    const int is_known = crc != Py_None;
    out->crc = is_known ? (uint32_t)number(given, 5)
                        : crc32c(seed, (const uint8_t *)data, (size_t)out->len);
    if (PyErr_Occurred() != NULL) return -1;
    if (out->kind > UINT8_MAX || out->count > UINT32_MAX || (uint64_t)out->len > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a section is too long for a payload");
        return -1;
    }
    return 0;
}

static void write_entry(uint8_t *to, const section_t *section) {
    memset(to, 0, ENTRY);
    to[0] = (uint8_t)section->kind;
    store_le32(to + 4, (uint32_t)section->len);
    store_le32(to + 8, section->crc);
    store_le32(to + 12, (uint32_t)section->count);
    store_le64(to + 16, section->id);
    store_le64(to + 24, section->first);
}

static void write_payload(uint8_t *out, const section_t *sections, uint32_t n, uint32_t seed) {
    const uint32_t directory = CRC + HEAD + n * ENTRY;
    store_le16(out + CRC, VERSION);
    store_le16(out + CRC + 2, 0);
    store_le32(out + CRC + 4, n);
    uint8_t *at = out + directory;
    for (uint32_t i = 0; i < n; i++) {
        write_entry(out + CRC + HEAD + i * ENTRY, sections + i);
        copy_bytes(at, sections[i].data, (size_t)sections[i].len);
        at += sections[i].len;
    }
    store_le32(out, crc32c(seed, out + CRC, directory - CRC));
    memcpy(at, out, directory);
    store_le32(at + directory, directory);
}

static PyObject *pack(PyObject *given, uint32_t seed) {
    const Py_ssize_t n = PySequence_Size(given);
    section_t few[8], *sections = few;
    if (n > 8 && (sections = PyMem_Calloc((size_t)n, sizeof *sections)) == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *made = NULL;
    Py_ssize_t size = 2 * (CRC + HEAD + n * ENTRY) + LENGTH;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *section = PySequence_GetItem(given, i);
        const int failed = section == NULL || read_section(section, seed, sections + i) < 0;
        Py_XDECREF(section); /* the list has it, and nothing of Python runs here */
        if (failed) goto done;
        size += sections[i].len;
    }
    made = PyBytes_FromStringAndSize(NULL, size);
    if (made != NULL) {
        write_payload((uint8_t *)PyBytes_AsString(made), sections, (uint32_t)n, seed);
    }
done:
    if (sections != few) PyMem_Free(sections);
    return made;
}

static int sections_and_stamp(PyObject *sections, PyObject *number, uint64_t *stamp) {
    if (!PyList_Check(sections) && !PyTuple_Check(sections)) {
        PyErr_SetString(PyExc_TypeError, "sections are a list or a tuple");
        return -1;
    }
    *stamp = PyLong_AsUnsignedLongLong(number);
    return *stamp == UINT64_MAX && PyErr_Occurred() != NULL ? -1 : 0;
}

PyObject *payload_pack(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    uint64_t stamp;
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "pack() takes sections and a commit timestamp");
        return NULL;
    }
    if (sections_and_stamp(args[0], args[1], &stamp) < 0) return NULL;
    return pack(args[0], (uint32_t)stamp);
}

/* Has the member of a section apply it. */
static int apply(PyObject *members, PyObject *section, PyObject *stamp) {
    PyObject *kind = PyTuple_GetItem(section, 0), *id = PyTuple_GetItem(section, 1);
    PyObject *data = PyTuple_GetItem(section, 2);
    PyObject *member = PyDict_GetItemWithError(members, kind);
    if (member == NULL) {
        if (PyErr_Occurred() == NULL) PyErr_SetObject(PyExc_KeyError, kind);
        return -1;
    }
    PyObject *none = PyObject_CallMethod(member, "apply", "OOO", id, data, stamp);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

PyObject *payload_take_in(PyObject *module, PyObject *const *args, Py_ssize_t n) {
    uint64_t stamp;
    (void)module;
    if (n != 3 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "take_in() takes members, sections and a commit timestamp");
        return NULL;
    }
    if (sections_and_stamp(args[1], args[2], &stamp) < 0) return NULL;
    PyObject *made = pack(args[1], (uint32_t)stamp);
    const Py_ssize_t count = made == NULL ? 0 : PySequence_Size(args[1]);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *section = PySequence_GetItem(args[1], i);
        if (section == NULL || apply(args[0], section, args[2]) < 0) Py_CLEAR(made);
        Py_XDECREF(section);
    }
    return made;
}

/* Reads the directory at the beginning; false: it is damaged, or of another version. */
static bool read_directory(const uint8_t *data, size_t len, uint32_t seed, uint32_t *n) {
    if (len < CRC + HEAD + LENGTH) return false;
    const size_t most = (len - CRC - HEAD - LENGTH) / (2 * ENTRY);
    *n = load_le32(data + CRC + 4);
    return load_le16(data + CRC) == VERSION && *n <= most &&
           load_le32(data) == crc32c(seed, data + CRC, HEAD + (size_t)*n * ENTRY);
}

/* Kind, id and bytes of a section; NULL without an error: its checksum does not match. */
static PyObject *make_section(const uint8_t *entry, const uint8_t *data, uint32_t seed) {
    const uint32_t len = load_le32(entry + 4);
    if (load_le32(entry + 8) != crc32c(seed, data, len)) return NULL;
    return Py_BuildValue("(BKN)", entry[0], (unsigned long long)load_le64(entry + 16),
                         PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)len));
}

PyObject *payload_unpack(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    (void)module;
    char *bytes;
    Py_ssize_t size;
    uint32_t n;
    if (n_args != 2 || PyBytes_AsStringAndSize(args[0], &bytes, &size) < 0) {
        PyErr_SetString(PyExc_TypeError, "unpack() takes bytes and a commit timestamp");
        return NULL;
    }
    const uint64_t stamp = PyLong_AsUnsignedLongLong(args[1]);
    if (stamp == UINT64_MAX && PyErr_Occurred() != NULL) return NULL;
    const uint8_t *data = (const uint8_t *)bytes;
    const size_t len = (size_t)size;
    const uint32_t seed = (uint32_t)stamp;
    if (!read_directory(data, len, seed, &n)) Py_RETURN_NONE;
    const uint8_t *entries = data + CRC + HEAD;
    size_t at = CRC + HEAD + (size_t)n * ENTRY, whole = 2 * at + LENGTH;
    for (uint32_t i = 0; i < n; i++) whole += load_le32(entries + (size_t)i * ENTRY + 4);
    if (whole != len) Py_RETURN_NONE;
    PyObject *made = PyList_New((Py_ssize_t)n);
    for (uint32_t i = 0; made != NULL && i < n; i++) {
        const uint8_t *entry = entries + (size_t)i * ENTRY;
        PyObject *section = make_section(entry, data + at, seed);
        if (section == NULL || PyList_SetItem(made, (Py_ssize_t)i, section) < 0) Py_CLEAR(made);
        at += load_le32(entry + 4);
    }
    if (made == NULL && PyErr_Occurred() == NULL) Py_RETURN_NONE;
    return made;
}
