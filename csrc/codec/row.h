/* Rows: the value columns of one row as one byte string, for small writes. Part of the format:
 * docs/format-blocks.md, "Row".
 *
 *   null bits | fixed slots | u32 ends of variable values | variable values
 *
 * A set null bit is a null; its slot is zero, its variable value empty. Columns stand in their
 * order in each part. Rows from disk are checked by row_check before they are read.
 * All functions are pure and safe from any thread. */
#ifndef TXNKV_CODEC_ROW_H
#define TXNKV_CODEC_ROW_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

typedef enum {
    ROW_BIT = 1,   /* one byte, 0 or 1; a bitmap in Arrow */
    ROW_FIXED = 2, /* width bytes */
    ROW_VARLEN = 3 /* bytes of any number */
} row_kind_t;

/* One column: kind and width are the caller's, `at` is where its slot begins in a row. */
typedef struct {
    row_kind_t kind;
    uint32_t width;
    uint32_t at;
} row_slot_t;

/* `head`: bytes before the variable values; `ends`: where their u32 ends begin. */
typedef struct {
    const row_slot_t *slots;
    uint32_t n;
    uint32_t ends;
    uint32_t head;
} row_layout_t;

/* An Arrow column. Lengths are those of whole buffers in bytes, `offset` and `length` are
 * Arrow's, in rows; validity is NULL when there are no nulls. ROW_VARLEN has i32 offsets. */
typedef struct {
    const uint8_t *values;
    size_t values_len;
    const uint8_t *offsets;
    size_t offsets_len;
    const uint8_t *validity;
    size_t validity_len;
    uint64_t offset;
    uint64_t length;
} row_column_t;

/* One encoded row; data is NULL where there is none, which reads as nulls. */
typedef struct {
    const uint8_t *data;
    size_t len;
} row_slice_t;

/* Finds the place of each slot; the layout refers to them. */
void row_layout_init(row_slot_t *slots, uint32_t n, row_layout_t *out);

/* n rows in two steps: first where each begins, offsets [0 .. n], and the bytes of all; then
 * the rows. rows[0 .. n) are row numbers of the columns, NULL: the first n. RANGE: a row is
 * outside of a column. INPUT: a buffer is too short, or Arrow offsets fall. LIMIT: the rows
 * reach 4 GiB. Columns stay as they are between the two. */
status_t row_encode_size(const row_layout_t *layout, const row_column_t *columns,
                         const uint32_t *rows, uint32_t n, uint32_t *out_offsets);
void row_encode(const row_layout_t *layout, const row_column_t *columns, const uint32_t *rows,
                uint32_t n, const uint32_t *offsets, uint8_t *out, size_t out_len);

/* Rows that stand one behind the other, as slices. CORRUPT: offsets fall or pass data_len. */
status_t row_slices(const uint8_t *data, size_t data_len, const uint32_t *offsets, uint32_t n,
                    row_slice_t *out);

/* CORRUPT: one of the slices is no row of this layout. The functions below want this first. */
status_t row_check(const row_layout_t *layout, const row_slice_t *slices, uint32_t n);

/* Column `column` of n checked rows as Arrow buffers: validity (n + 7) / 8 bytes, values
 * width * n bytes, or a bitmap. Returns the nulls. */
uint32_t row_decode_fixed(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                          uint32_t column, uint8_t *out_validity, uint8_t *out_values);

/* The same for ROW_VARLEN: first validity and the n + 1 offsets from 0, then that many bytes.
 * LIMIT: more than Arrow's i32 offsets can say. */
status_t row_decode_offsets(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                            uint32_t column, uint8_t *out_validity, uint32_t *out_offsets,
                            uint32_t *out_null_count);
void row_decode_bytes(const row_layout_t *layout, const row_slice_t *slices, uint32_t n,
                      uint32_t column, const uint32_t *offsets, uint8_t *out);

#endif
