/* Deletes of rows that lie in immutable blocks: a delta is a list of rows, strictly
 * ascending, and of as many stamps. Also the order of versions of a key. Stamps are
 * little-endian u64 and rows little-endian u32, at any alignment. Safe from any thread;
 * delta_order takes scratch for long runs from the allocator. */
#ifndef TXNKV_ROWSET_DELTA_H
#define TXNKV_ROWSET_DELTA_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

typedef struct {
    const uint8_t *rows;
    const uint8_t *stamps;
    uint32_t n;
} delta_t;

/* OK when rows are strictly ascending and below `limit`; CORRUPT otherwise. */
status_t delta_check(const delta_t *delta, uint32_t limit);

/* All rows of both, with the lower stamp where both have a row: a row dies once. Room for
 * a->n + b->n in both outputs; says how many were written. */
void delta_merge(const delta_t *a, const delta_t *b, uint8_t *out_rows, uint8_t *out_stamps,
                 uint32_t *out_n);

/* A delete stamp for each of n rows: that of the delta, else STAMP_NEVER.
 * RANGE: a row of the delta is not below n. */
status_t delta_expand(const delta_t *delta, uint32_t n, uint8_t *out_stamps);

/* Bits of the rows whose delete stamp is above `after` and at or below `upto`: `out_bits` of
 * n bits, (n + 7) / 8 bytes, cleared first. RANGE as above. */
status_t delta_between(const delta_t *delta, uint32_t n, uint64_t after, uint64_t upto,
                       uint8_t *out_bits, uint32_t *out_count);

/* The order that puts versions of a key newest first. Keys are ascending, equal ones stand
 * together: bit i of `same` says that key i equals key i - 1. Equal stamps stay in place.
 * Says whether anything moves. NO_MEMORY: nothing usable was written. */
status_t delta_order(const uint8_t *same, const uint8_t *inserts, uint32_t n, uint32_t *out_order,
                     int *out_moved);

#endif
