/* Random access to the rows of a block as it lies, whatever its encoding. Values and keys are
 * found in constant time (run lengths: in the logarithm of the runs), without a copy of the block.
 *
 *   block_parse(bytes, len, &block)               once for a block
 *   access_value(&block, row, &value)             value at a row
 *   access_compare(&block, row, key, n, &order)   key at a row, compared
 *   access_lower_bound / access_find              search of a key in a block of ascending keys
 *
 * The block is one that block_verify has accepted; what is damaged all the same gives CORRUPT,
 * never a read outside of it. Pure; safe from any thread. */
#ifndef TXNKV_ROWSET_ACCESS_H
#define TXNKV_ROWSET_ACCESS_H

#include "rowset/block.h"

/* One value of a block: bytes in it or in `own`, or a bit. */
typedef struct {
    const uint8_t *data;
    size_t len;
    uint32_t bit;
    uint32_t is_null;
    uint8_t own[16]; /* where a value lies that the block has in other form */
} access_value_t;

/* The value at `row`; a null has no bytes. It points into the block, or into `out` itself: so do not copy `out`.
 * RANGE: the row is not in the block. CORRUPT: the block is opaque, or damaged. */
status_t access_value(const block_t *block, uint32_t row, access_value_t *out);

/* The order of the key at `row` to `key`: below 0, 0, above 0 as memcmp. RANGE, CORRUPT: as above. */
status_t access_compare(const block_t *keys, uint32_t row, const uint8_t *key, size_t key_len,
                        int *out_order);

/* In a block of ascending keys: the number of keys below `key`. CORRUPT: it is no block of keys. */
status_t access_lower_bound(const block_t *keys, const uint8_t *key, size_t key_len,
                            uint32_t *out_row);

/* The row of the first such key, -1 when it is not there. CORRUPT: it is no block of keys. */
status_t access_find(const block_t *keys, const uint8_t *key, size_t key_len, int64_t *out_row);

#endif
