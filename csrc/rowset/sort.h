/* Orders of keys, as row numbers. Safe from any thread; scratch comes from the allocator. */
#ifndef TXNKV_ROWSET_SORT_H
#define TXNKV_ROWSET_SORT_H

#include "codec/keys.h"
#include "common/status.h"

/* The stable ascending order of the n keys rows[0 .. n) (NULL: of keys 0 .. n) as row
 * numbers of `keys`. *ascending becomes 1, and nothing is written, when they stand in
 * strictly ascending order already. RANGE: a row is not below keys->n. */
status_t sort_order(const keys_t *keys, const uint32_t *rows, uint32_t n, uint32_t *out_order,
                    int *ascending);

/* Bit i is set when key order[i] equals key order[i - 1] (NULL: keys i and i - 1). Writes
 * (n + 7) / 8 bytes. RANGE as above. */
status_t sort_mark_duplicates(const keys_t *keys, const uint32_t *order, uint32_t n,
                              uint8_t *out_bits, uint32_t *out_count);

#endif
