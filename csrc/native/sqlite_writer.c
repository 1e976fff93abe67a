/* The begin, the rows and the commit of a write of the status database, on a connection of apsw
 * that nobody else uses meanwhile.
 *
 *     writer = SqliteWriter(connection, address, words, change, pending, committed)
 *     writer.begin(millis)             BEGIN IMMEDIATE; waits so long for another connection
 *     writer.append(sql, a, b, data)   one row: two numbers and bytes
 *     writer.commit(hook)              the change number busy, COMMIT, the change number bumped
 *     writer.put(sql, a, b, data, hook, wal)   all three in one statement
 *     writer.close()                   before the connection's
 *
 * With the descriptor of the WAL, else -1, what `put` has written is on its way to the disk when it
 * returns: the sync that follows waits the shorter, the more is done before.
 *
 * Each answers with a result code of SQLite, 0 for done; `commit` where it is done with -1 - the
 * pages of the WAL, and so does `put`. What does not wait for a disk keeps the lock of the interpreter: to get it back
 * takes longer, where other threads are busy, than the step itself. */
#define _GNU_SOURCE
#include "native/native.h"

#include <fcntl.h>

#include "native/sqlite_api.h"

enum { LONG = 1 << 14 /* bytes, about 10 us */ };

typedef struct {
    PyObject_HEAD
    PyObject *connection, *words;
    sqlite_api_t api;
    sqlite3 *db;
    sqlite3_stmt *begin, *append, *commit;
    PyObject *sql; /* of `append` */
    size_t change, pending, committed;
    int pages;
} writer_t;

/* -- the functions of SQLite --------------------------------------------------------------- */

/* The entry of an extension, which SQLite calls with its functions: txnkv._native.sqlite_api is
 * their address from now on. */
__attribute__((visibility("default"))) int txnkv_sqlite_api(sqlite3 *db, char **message,
                                                            const void *routines);

int txnkv_sqlite_api(sqlite3 *db, char **message, const void *routines) {
    (void)db;
    (void)message;
    int failed = -1;
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *module = PyImport_ImportModule("txnkv._native");
    PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)routines);
    if (module != NULL && address != NULL) {
        failed = PyObject_SetAttrString(module, "sqlite_api", address);
    }
    Py_XDECREF(address);
    Py_XDECREF(module);
    PyErr_Clear();
    PyGILState_Release(state);
    return failed == 0 ? SQLITE_OK : SQLITE_NOMEM;
}

static int note_pages(void *given, sqlite3 *db, const char *name, int pages) {
    (void)db;
    (void)name;
    ((writer_t *)given)->pages = pages;
    return SQLITE_OK;
}

/* -- the type ------------------------------------------------------------------------------ */

static void close_statements(writer_t *self) {
    if (self->db == NULL) return;
    sqlite_wal_hook(self->api, self->db, NULL, NULL);
    sqlite_finalize(self->api, self->begin);
    sqlite_finalize(self->api, self->append);
    sqlite_finalize(self->api, self->commit);
    self->begin = self->append = self->commit = NULL;
    self->db = NULL;
}

static void writer_dealloc(PyObject *object) {
    writer_t *self = (writer_t *)object;
    PyTypeObject *type = Py_TYPE(object);
    close_statements(self);
    Py_XDECREF(self->sql);
    Py_XDECREF(self->words);
    Py_XDECREF(self->connection);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(object);
    Py_DECREF(type);
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *connection, *words, *address = NULL;
    unsigned long long routines;
    Py_ssize_t change, pending, committed;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OKOnnn:SqliteWriter", &connection, &routines, &words, &change,
                          &pending, &committed)) {
        return NULL;
    }
    if (words_check(words, change) < 0 || words_check(words, pending) < 0) return NULL;
    if (words_check(words, committed) < 0) return NULL;
    address = PyObject_CallMethod(connection, "sqlite3_pointer", NULL);
    void *db = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    if (db == NULL) return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    writer_t *self = (writer_t *)alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(connection);
    self->connection = connection;
    Py_INCREF(words);
    self->words = words;
    self->api.routines = (const sqlite_function_t *)(uintptr_t)routines;
    self->db = db;
    self->change = (size_t)change;
    self->pending = (size_t)pending;
    self->committed = (size_t)committed;
    sqlite_wal_hook(self->api, self->db, note_pages, self);
    sqlite_busy_timeout(self->api, self->db, 0);
    return (PyObject *)self;
}

static PyObject *writer_close(PyObject *object, PyObject *none) {
    (void)none;
    close_statements((writer_t *)object);
    Py_RETURN_NONE;
}

/* Runs a statement to its end; its result code. */
static int run(const writer_t *self, sqlite3_stmt *stmt) {
    const int code = sqlite_step(self->api, stmt);
    const int after = sqlite_reset(self->api, stmt);
    return code == SQLITE_DONE || code == SQLITE_ROW ? SQLITE_OK : after != SQLITE_OK ? after : code;
}

static int prepare(const writer_t *self, const char *sql, int len, sqlite3_stmt **out) {
    return *out != NULL ? SQLITE_OK : sqlite_prepare(self->api, self->db, sql, len, out);
}

static int require_open(const writer_t *self) {
    if (self->db != NULL) return 0;
    PyErr_SetString(PyExc_ValueError, "the connection is closed");
    return -1;
}

static PyObject *writer_begin(PyObject *object, PyObject *millis) {
    writer_t *self = (writer_t *)object;
    const long patience = PyLong_AsLong(millis);
    if (require_open(self) < 0 || (patience == -1 && PyErr_Occurred() != NULL)) return NULL;
    int code = prepare(self, "BEGIN IMMEDIATE", -1, &self->begin);
    if (code == SQLITE_OK) code = run(self, self->begin);
    if ((code & 0xff) == SQLITE_BUSY) {
        Py_BEGIN_ALLOW_THREADS;
        sqlite_busy_timeout(self->api, self->db, (int)patience);
        code = run(self, self->begin);
        sqlite_busy_timeout(self->api, self->db, 0);
        Py_END_ALLOW_THREADS;
    }
    return PyLong_FromLong(code);
}

static int append(const writer_t *self, long long a, long long b, const char *data,
                  Py_ssize_t len) {
    int code = sqlite_bind_int64(self->api, self->append, 1, a);
    if (code == SQLITE_OK) code = sqlite_bind_int64(self->api, self->append, 2, b);
    if (code == SQLITE_OK) code = sqlite_bind_blob(self->api, self->append, 3, data, (int)len);
    if (code == SQLITE_OK) code = run(self, self->append);
    /* The statement is not to refer to bytes that go. */
    sqlite_bind_blob(self->api, self->append, 3, NULL, 0);
    return code;
}

/* A row as callers give it: SQL, two numbers and bytes. */
typedef struct {
    long long a, b;
    char *data;
    Py_ssize_t len;
} row_t;

/* Takes a row in, and prepares its SQL: a result code of SQLite; -1 with an error set. */
static int prepare_row(writer_t *self, PyObject *const *args, row_t *row) {
    Py_ssize_t sql_len;
    row->a = PyLong_AsLongLong(args[1]);
    row->b = PyLong_AsLongLong(args[2]);
    if (require_open(self) < 0 || PyErr_Occurred() != NULL) return -1;
    if (PyBytes_AsStringAndSize(args[3], &row->data, &row->len) < 0) return -1;
    if (row->len > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a row may have");
        return -1;
    }
    if (self->sql == args[0]) return SQLITE_OK;
    const char *sql = PyUnicode_AsUTF8AndSize(args[0], &sql_len);
    if (sql == NULL) return -1;
    sqlite_finalize(self->api, self->append);
    self->append = NULL;
    Py_CLEAR(self->sql);
    const int code = prepare(self, sql, (int)sql_len, &self->append);
    if (code == SQLITE_OK) self->sql = Py_NewRef(args[0]);
    return code;
}

static int append_row(const writer_t *self, const row_t *row) {
    if (row->len < LONG) return append(self, row->a, row->b, row->data, row->len);
    int code;
    Py_BEGIN_ALLOW_THREADS;
    code = append(self, row->a, row->b, row->data, row->len);
    Py_END_ALLOW_THREADS;
    return code;
}

static PyObject *writer_append(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    row_t row;
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "append() takes SQL, two numbers and bytes");
        return NULL;
    }
    int code = prepare_row((writer_t *)object, args, &row);
    if (code == SQLITE_OK) code = append_row((writer_t *)object, &row);
    return code < 0 ? NULL : PyLong_FromLong(code);
}

static void mark_busy(const writer_t *self) {
    words_put(self->words, self->pending, words_at(self->words, self->pending) + 1);
    words_put(self->words, self->change, words_at(self->words, self->change) | 1);
}

static void bump(const writer_t *self) {
    words_put(self->words, self->committed, words_at(self->words, self->pending));
    words_put(self->words, self->change, (words_at(self->words, self->change) | 1) + 1);
}

/* Calls the hook, where there is one: "status.before_commit", "status.after_commit". */
static int tell(PyObject *hook, const char *name) {
    if (hook == Py_None) return 0;
    PyObject *done = PyObject_CallFunction(hook, "s", name);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Has the system begin to write what is new in a file. It waits for nothing, and makes nothing
 * durable. */
static void begin_to_write(int descriptor) {
#ifdef SYNC_FILE_RANGE_WRITE
    if (descriptor >= 0) sync_file_range(descriptor, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
    (void)descriptor;
#endif
}

/* Commits: what was begun, or a row by itself. The answer of both. */
static PyObject *commit(writer_t *self, const row_t *row, PyObject *hook, int wal) {
    int code = SQLITE_OK;
    mark_busy(self);
    int failed = tell(hook, "status.before_commit");
    if (failed == 0) {
        self->pages = 0;
        Py_BEGIN_ALLOW_THREADS;
        code = row == NULL ? run(self, self->commit)
                           : append(self, row->a, row->b, row->data, row->len);
        if (code == SQLITE_OK) begin_to_write(wal);
        Py_END_ALLOW_THREADS;
        if (code == SQLITE_OK) failed = tell(hook, "status.after_commit");
    }
    /* Also after a failure: the number has to come to rest, and an even number that was seen before
     * must not come back. */
    bump(self);
    if (failed != 0) return NULL;
    return PyLong_FromLong(code == SQLITE_OK ? -1 - (long)self->pages : code);
}

static PyObject *writer_commit(PyObject *object, PyObject *hook) {
    writer_t *self = (writer_t *)object;
    if (require_open(self) < 0) return NULL;
    const int code = prepare(self, "COMMIT", -1, &self->commit);
    return code == SQLITE_OK ? commit(self, NULL, hook, -1) : PyLong_FromLong(code);
}

static PyObject *writer_put(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    writer_t *self = (writer_t *)object;
    row_t row;
    if (n != 6) {
        PyErr_SetString(PyExc_TypeError, "put() takes SQL, two numbers, bytes, a hook and the WAL");
        return NULL;
    }
    const int wal = (int)PyLong_AsLong(args[5]);
    if (wal == -1 && PyErr_Occurred() != NULL) return NULL;
    const int code = prepare_row(self, args, &row);
    if (code < 0) return NULL;
    return code == SQLITE_OK ? commit(self, &row, args[4], wal) : PyLong_FromLong(code);
}

static PyMethodDef methods[] = {
    {"append", (PyCFunction)(void (*)(void))writer_append, METH_FASTCALL, NULL},
    {"begin", writer_begin, METH_O, NULL},
    {"close", writer_close, METH_NOARGS, NULL},
    {"commit", writer_commit, METH_O, NULL},
    {"put", (PyCFunction)(void (*)(void))writer_put, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)writer_new},
    {Py_tp_dealloc, (void *)writer_dealloc},
    {Py_tp_methods, (void *)methods},
    {0, NULL},
};

PyType_Spec sqlite_writer_spec = {
    .name = "txnkv._native.SqliteWriter",
    .basicsize = sizeof(writer_t),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
