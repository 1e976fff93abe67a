/* Reads of one row: where its key stands, and its values out of many blocks, a call each. Pure;
 * safe from any thread. */
#ifndef TXNKV_ROWSET_POINT_H
#define TXNKV_ROWSET_POINT_H

#include "codec/row.h"
#include "rowset/block.h"

enum { POINT_ABSENT = -1, POINT_CORRUPT = -2, POINT_RANGE = -3 };

/* The position of the first `key` in a verified block of ascending keys. POINT_ABSENT: it is not there,
 * or its filter (NULL: none is asked) says so. POINT_CORRUPT: a block is none of its kind. */
int64_t point_find(const uint8_t *keys, size_t keys_len, const uint8_t *filter, size_t filter_len,
                   const uint8_t *key, size_t key_len);

/* Row `row` of one block a column, as codec/row.h has it. Columns whose block is not there, or
 * is opaque, become null. Returns the bytes of the row: when they are more than `cap`, nothing
 * usable was written. POINT_CORRUPT: a block is not of its column's kind. POINT_RANGE: the row
 * is not in a block. */
int64_t point_row(const row_layout_t *layout, const block_bytes_t *blocks, uint32_t row,
                  uint8_t *out, size_t cap);

/* Both in one: the row of a key, probe being a block of ascending keys and its filter (or none).
 * POINT_ABSENT: it is not there. */
int64_t point_get(const row_layout_t *layout, const block_bytes_t *probe,
                  const block_bytes_t *blocks, const uint8_t *key, size_t key_len, uint8_t *out,
                  size_t cap);

#endif
