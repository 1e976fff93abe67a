/* What receiving and acknowledging one message after the other have in common: delivery.c. */
#ifndef TXNKV_NATIVE_DELIVERY_H
#define TXNKV_NATIVE_DELIVERY_H

#include <stdbool.h>

#include "native/native.h"

typedef struct delivery delivery_t;

/* The delivery that an object is, else NULL with an error set. */
delivery_t *delivery_of(PyObject *object);

/* Raised when acknowledgements that were offered before in a partition are to look again. */
uint64_t delivery_epoch(const delivery_t *delivery, long long partition);

/* Whether the store is as the consumer knows it, in its process; and whether a message does not wait
 * to be given. */
bool delivery_is_current(const delivery_t *delivery);
bool delivery_has_given(const delivery_t *delivery, const message_place_t *place);

/* counter.name += 1, as far as there is memory for it. */
void count_one(PyObject *counter, PyObject *name);

#endif
