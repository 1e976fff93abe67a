/* Values of typed messages: a row, and before it which schema it has. Part of the format:
 * docs/format-topics.md, "Typed value".
 *
 *   u8 version | u16 schema | row
 *
 * All functions are pure and safe from any thread. */
#ifndef TXNKV_CODEC_VALUE_H
#define TXNKV_CODEC_VALUE_H

#include <stddef.h>
#include <stdint.h>

#include "codec/row.h"
#include "common/status.h"

enum { VALUE_VERSION = 1, VALUE_HEAD = 3 };

/* As row_encode_size and row_encode, of values: offsets fit Arrow's i32, and LIMIT says that
 * they do not. `out` has room for offsets[n] + VALUE_HEAD bytes, of which the last are only
 * slack. */
status_t value_encode_size(const row_layout_t *layout, const row_column_t *columns,
                           const uint32_t *rows, uint32_t n, uint32_t *out_offsets);
void value_encode(const row_layout_t *layout, const row_column_t *columns, const uint32_t *rows,
                  uint32_t n, uint16_t schema, const uint32_t *offsets, uint8_t *out,
                  size_t out_len);

/* The rows of a binary column of values, checked for the decoders of row.h; a null has none.
 * CORRUPT: value *out_bad is not of this version, schema or layout. INPUT: a buffer is too
 * short, or the offsets of a value fall. */
status_t value_rows(const row_layout_t *layout, const row_column_t *values, uint16_t schema,
                    row_slice_t *out, uint32_t *out_bad);

/* Lists: each is its elements one behind the other, as rows of one column. First where the
 * elements of each begin, [0 .. length] from 0, then all of them; a null list has none.
 * CORRUPT: list *out_bad is not made of such rows. INPUT: as value_rows. */
status_t value_list_offsets(const row_layout_t *element, const row_column_t *lists,
                            uint32_t *out_offsets, uint32_t *out_bad);
void value_list_rows(const row_layout_t *element, const row_column_t *lists, row_slice_t *out);

#endif
