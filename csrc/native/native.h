/* The types and functions of the module txnkv._native, for module.c. */
#ifndef TXNKV_NATIVE_NATIVE_H
#define TXNKV_NATIVE_NATIVE_H

#include <stdbool.h>

#include "native/stable_abi.h"

extern PyType_Spec ack_run_spec;
extern PyType_Spec delivery_spec;
extern PyType_Spec handlers_spec;
extern PyType_Spec histogram_spec;
extern PyType_Spec ids_spec;
extern PyType_Spec holding_spec;
extern PyType_Spec mem_set_spec;
extern PyType_Spec message_spec;
extern PyType_Spec pins_spec;
extern PyType_Spec published_spec;
extern PyType_Spec reader_spec;
extern PyType_Spec row_check_spec;
extern PyType_Spec row_table_spec;
extern PyType_Spec sqlite_writer_spec;
extern PyType_Spec store_words_spec;
extern PyType_Spec turn_spec;
extern PyType_Spec words_spec;
extern PyType_Spec writer_lock_spec;
extern PyType_Spec writes_spec;

/* Whether an object is Words that have a word, else -1 with an error set; then what it is, a new
 * value, and the same where it is less. */
int words_check(PyObject *object, Py_ssize_t word);
uint64_t words_at(PyObject *object, size_t word);
void words_put(PyObject *object, size_t word, uint64_t value);
void words_lift(PyObject *object, size_t word, uint64_t value);

/* Whether an object is StoreWords, else -1 with an error set; then whether their change number is
 * this one. False too where they are aimed nowhere. */
int store_words_check(PyObject *object);
bool store_words_are_at(PyObject *object, uint64_t number);

/* Where a message is; false: the object is none. */
typedef struct {
    long long topic, partition, offset;
} message_place_t;
bool message_place(PyObject *object, message_place_t *place);

/* The set of a MemRowSet; NULL with an error set when it is none. */
struct mem_row_set *mem_set_of(PyObject *object);

/* messages(type, ...) -> list: see message.c. */
PyObject *message_many(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* message_size, message_batch, place and put_message: see message_batch.c. */
PyObject *message_size(PyObject *module, PyObject *rows);
PyObject *message_batch(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *place_batches(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *put_message(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* pack(sections, commit_ts) -> bytes: the payload of a commit (coordinator/payload.py). */
PyObject *payload_pack(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* take_in(members, sections, commit_ts) -> bytes: as `pack`, and the member of each section, by the
 * section's kind, has applied it. */
PyObject *payload_take_in(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* unpack(payload, commit_ts) -> kind, id and bytes of each section, if nothing of them is damaged
 * and they are of this version; else None. */
PyObject *payload_unpack(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* wire_pack(value, down) -> bytes and wire_unpack(bytes, up) -> value: see wire.c. */
PyObject *wire_pack(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *wire_unpack(PyObject *module, PyObject *const *args, Py_ssize_t n);

/* wall_micros() since 2020-01-01 UTC, and monotonic_micros() of CLOCK_MONOTONIC. */
PyObject *clock_wall(PyObject *module, PyObject *none);
PyObject *clock_monotonic(PyObject *module, PyObject *none);

/* Whether a deadline has not passed by a clock, an object that has a function of this name: 1, 0, or -1
 * with an error set. It may be Python's, and let other threads run. */
int clock_allows(PyObject *clock, PyObject *name, uint64_t deadline);

/* fill_holes(descriptor, length) and punch_hole(descriptor, offset, length): see hole.c. */
PyObject *hole_fill(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *hole_punch(PyObject *module, PyObject *const *args, Py_ssize_t n);

#endif
